//! Promises that cross crates. One binary: one link, and one file to carry to a GPU.

mod ops;
mod support;
