//! What several tests need.

use burn::tensor::{DType, Tensor, TensorData, backend::Backend};

/// Limits on RMS error over RMS truth.
pub const F32_LIMIT: f64 = 1e-5;

/// A tensor of the oracle's numbers.
pub fn upload<B: Backend, const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, D> {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The numbers of a tensor.
pub fn download<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The first adapter of Vulkan or Metal, software or not. Without one the test that asks is skipped,
/// visibly; where `LINATTN_REQUIRE_GPU` is set, it fails.
#[cfg(feature = "wgpu")]
pub fn wgpu() -> Option<burn::backend::wgpu::WgpuDevice> {
    let first = linattn_cli::device::wgpu_devices().into_iter().next();
    if first.is_none() {
        assert!(
            std::env::var_os("LINATTN_REQUIRE_GPU").is_none(),
            "LINATTN_REQUIRE_GPU is set, and there is no adapter"
        );
        eprintln!("skipped: no adapter");
    }
    first
}

/// The first NVIDIA GPU, or a visible skip.
#[cfg(feature = "cuda")]
pub fn cuda() -> Option<burn::backend::cuda::CudaDevice> {
    match linattn_cli::device::choose("cuda:0") {
        Ok(_) => Some(burn::backend::cuda::CudaDevice::new(0)),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}
