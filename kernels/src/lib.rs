//! CubeCL kernels for linear attention: one source for CUDA, ROCm, and Vulkan, Metal and WebGPU.
#![deny(missing_docs)]
#![allow(clippy::collapsible_if)] // the outer one is often decided when a kernel is compiled

mod chunkwise;
pub mod convolution;
pub mod few_rows;
pub mod fused;
pub mod matmul;
pub mod rowwise;
#[cfg(test)]
mod rowwise_tests;
pub mod step;
#[cfg(test)]
mod tests;
mod tile;

pub use chunkwise::choose::{Refusal, WIDEST, engine, launches};
pub use chunkwise::launch::{Backward, Buffer, Forward, Given, Inputs, backward, forward};
pub use chunkwise::plan::{Decay, Dims, Read, Transition, VERSION, Variant};
pub use tile::Engine;

/// A number of these kernels' source. CubeCL's caches of compiled kernels know a kernel by its name and
/// its compile-time values only: a cache in a folder named by this never gives the code of another
/// source.
pub fn source_hash() -> &'static str {
    env!("LINATTN_KERNELS_SOURCE")
}
