//! Products with an activated gate, and their gradients.
