//! CubeCL kernels for linear attention: one source for CUDA, ROCm, Vulkan and Metal.
#![deny(missing_docs)]
#![allow(clippy::collapsible_if)] // the outer one is often decided when a kernel is compiled

mod buffer;
mod chunkwise;
pub mod few_rows;
pub mod fused;
mod launch;
pub mod matmul;
pub mod pointwise;
pub mod quantized;
mod refusal;
pub mod simple;
pub mod step;
mod tensors;
#[cfg(test)]
mod tests;
mod tile;
mod variant;

pub use buffer::Buffer;
pub use chunkwise::choose::{WIDEST, WIDEST_VALUE, engine, launches};
pub use chunkwise::launch::{Chunkwise, backward, forward};
pub use refusal::Refusal;
pub use tensors::{Backward, Forward, Given, Inputs};
pub use tile::Engine;
pub use variant::{Decay, Dims, Read, Transition, Variant};

/// A compile-time value of every kernel: CubeCL's caches of compiled kernels know a kernel by its name and its
/// compile-time values alone.
pub(crate) const SOURCE: &str = env!("LINATTN_KERNELS_SOURCE");

/// A number of these kernels' source, by which a cache of compiled kernels can be named.
pub fn source_hash() -> &'static str {
    SOURCE
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
