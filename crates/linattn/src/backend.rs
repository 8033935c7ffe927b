//! Backends that this build runs on, by the crate's features, and the bounds of code that is generic
//! over them.
//!
//! | feature | backend | device |
//! |---|---|---|
//! | `cpu`, on by default | `Flex` | the processor |
//! | `cuda` | `Cuda` | NVIDIA GPUs; CUDA's libraries are found when the program runs |
//! | `wgpu` | `Wgpu` | any GPU, through Vulkan, or Metal on Apple's systems |
//! | `rocm` | `Rocm` | AMD GPUs; ROCm's libraries are found when the program runs |
//! | `ndarray` | `NdArray` | the processor, through tensor operations alone: slower than `Flex` |
//!
//! A feature of this crate switches on Burn's of the same backend: nothing else is needed. `Autodiff`
//! around any of them makes it learn. Burn's other backends are left out: `LibTorch` and the `Cpu` of
//! CubeCL download libraries while they are built, and Burn has deprecated `Candle`.

pub use crate::ops::LinearAttentionBackend;
pub use burn::backend::Autodiff;
#[cfg(feature = "cuda")]
pub use burn::backend::{Cuda, cuda::CudaDevice};
#[cfg(feature = "cpu")]
pub use burn::backend::{Flex, flex::FlexDevice};
#[cfg(feature = "ndarray")]
pub use burn::backend::{NdArray, ndarray::NdArrayDevice};
#[cfg(feature = "rocm")]
pub use burn::backend::{Rocm, rocm::RocmDevice};
#[cfg(feature = "wgpu")]
pub use burn::backend::{Wgpu, wgpu::WgpuDevice};
use burn::tensor::backend::AutodiffBackend;

/// Runs `run` on one of `threads` threads that work at the same time, each on its own part of a batch. Where they keep
/// every core busy, `Flex` does each operation on the calling thread. Results are the
/// same to the bit.
pub fn one_of_threads<T>(threads: usize, run: impl FnOnce() -> T) -> T {
    #[cfg(feature = "cpu")]
    return crate::ops::one_of_threads(threads, run);
    #[cfg(not(feature = "cpu"))]
    {
        let _as_they_are = threads;
        run()
    }
}

/// The one bound that training code carries: operations with gradients, and without them on the backend
/// inside.
pub trait TrainBackend:
    AutodiffBackend<InnerBackend: LinearAttentionBackend> + LinearAttentionBackend
{
}

impl<B> TrainBackend for B where
    B: AutodiffBackend<InnerBackend: LinearAttentionBackend> + LinearAttentionBackend
{
}
