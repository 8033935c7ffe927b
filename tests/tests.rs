//! Promises that cross crates. One binary: one link, and one file to carry to a GPU.

#[cfg(feature = "cpu")]
mod layers;
mod ops;
#[cfg(feature = "cpu")]
mod runs;
mod support;
