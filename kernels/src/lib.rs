//! CubeCL kernels for linear attention: one source for CUDA, ROCm, and Vulkan, Metal and WebGPU.
//!
//! Nothing here knows Burn. [`step`] is one token of decoding, for linear attention and the delta
//! rule, with scalar decay or none.
#![deny(missing_docs)]

pub mod step;
