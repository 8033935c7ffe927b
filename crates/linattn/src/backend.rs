//! Backends that this build runs on, by the crate's features, and the bounds of code that is generic
//! over them.
//!
//! | feature | backend | device |
//! |---|---|---|
//! | `cpu`, on by default | `Flex` | the processor |
//! | `cuda` | `Cuda` | NVIDIA GPUs; CUDA's libraries are found when the program runs |
//! | `wgpu` | `Wgpu` | any GPU, through Vulkan, or Metal on Apple's systems |
//! | `rocm` | `Rocm` | AMD GPUs; ROCm's libraries are found when the program runs |
//! | `ndarray` | `NdArray` | the processor, in tensor operations: slower than `Flex` |
//! | `candle` | `Candle` | the processor, in tensor operations |
//!
//! A feature of this crate switches on Burn's of the same backend: nothing else is needed. `Autodiff`
//! around any of them makes it learn. Burn's `LibTorch` and `Cpu` are left out: they download libraries
//! while they are built.

pub use crate::ops::LinearAttentionBackend;
pub use burn::backend::Autodiff;
#[cfg(feature = "candle")]
pub use burn::backend::{Candle, candle::CandleDevice};
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

#[cfg(test)]
#[cfg(any(feature = "ndarray", feature = "candle"))]
mod tests {
    use super::*;
    use crate::nn::mixers::{GatedDeltaNetConfig, TokenMixer};
    use burn::tensor::{Distribution, Tensor};

    /// A layer's chunks agree with its steps, and its input has a gradient.
    fn holds<B: TrainBackend>(device: &B::Device) {
        let mixer = GatedDeltaNetConfig::new(2, 8).init::<B>(16, device).expect("a layer");
        let x = Tensor::<B, 3>::random([2, 70, 16], Distribution::Default, device).require_grad();
        let (whole, _) = mixer.forward(x.clone(), None);
        let (mut state, mut steps) = (None, vec![]);
        for t in 0..70 {
            let token = x.clone().narrow(1, t, 1).squeeze_dim(1);
            let (y, next) = mixer.step(token, state);
            steps.push(y.unsqueeze_dim::<3>(1));
            state = Some(next);
        }
        let apart = (whole.clone() - Tensor::cat(steps, 1)).abs().max();
        let apart = apart.into_data().iter::<f64>().next().expect("a number");
        assert!(apart < 1e-5, "{apart}");
        let gradients = whole.square().sum().backward();
        let gradient = x.grad(&gradients).expect("x was asked for").into_data();
        assert!(gradient.iter::<f64>().all(f64::is_finite));
        assert!(gradient.iter::<f64>().any(|g| g != 0.0));
    }

    #[cfg(feature = "ndarray")]
    #[test]
    fn layers_run_on_ndarray() {
        holds::<Autodiff<NdArray>>(&Default::default());
    }

    #[cfg(feature = "candle")]
    #[test]
    fn layers_run_on_candle() {
        holds::<Autodiff<Candle>>(&Default::default());
    }
}
