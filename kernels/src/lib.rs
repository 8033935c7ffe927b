//! CubeCL kernels for linear attention: one source for CUDA, ROCm, and Vulkan, Metal and WebGPU.
#![deny(missing_docs)]
#![allow(clippy::collapsible_if)] // the outer one is often decided when a kernel is compiled

mod choice;
mod chunk;
pub mod convolution;
mod desk;
mod feed;
pub mod few_rows;
pub mod fused;
mod gates;
mod gradients;
mod inverse;
mod launch;
pub mod matmul;
mod pass;
mod plan;
mod products;
pub mod rowwise;
#[cfg(test)]
mod rowwise_tests;
mod scores;
mod segments;
mod state;
pub mod step;
#[cfg(test)]
mod tests;
mod tile;
mod vector;

pub use choice::{Refusal, WIDEST, engine, launches};
pub use launch::{Backward, Buffer, Forward, Given, Inputs, backward, forward};
pub use plan::{Decay, Dims, Read, Transition, VERSION, Variant};
pub use tile::Engine;

/// A number of these kernels' source. CubeCL's caches of compiled kernels know a kernel by its name and
/// its compile-time values only: a cache in a folder named by this never gives the code of another
/// source.
pub fn source_hash() -> &'static str {
    env!("LINATTN_KERNELS_SOURCE")
}
