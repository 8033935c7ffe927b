//! Rows of a table by id, and the gradient of the table.
