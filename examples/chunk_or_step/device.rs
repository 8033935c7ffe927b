//! From a device's name to a backend of this build.

use linattn::backend::LinearAttentionBackend;
use std::error::Error;

/// A job for whichever backend a device's name asks for. (A closure cannot be generic.)
pub trait Job {
    /// Its result.
    type Output;
    /// Runs it.
    fn run<B: LinearAttentionBackend>(self, device: &B::Device) -> Self::Output;
}

/// Runs a job on `cpu`, `cuda:N`, `rocm:N`, or on the adapter that wgpu prefers, `vulkan` or `metal`.
/// # Errors
/// If the name is none of these, or its feature is not compiled in.
pub fn dispatch<J: Job>(name: &str, job: J) -> Result<J::Output, Box<dyn Error>> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let number: usize =
        number.parse().map_err(|_| format!("device `{name}`: `{number}` is no number"))?;
    match (kind, number) {
        #[cfg(feature = "cpu")]
        ("cpu", 0) => Ok(job.run::<linattn::backend::Flex>(&Default::default())),
        #[cfg(feature = "cuda")]
        ("cuda", _) => {
            Ok(job.run::<linattn::backend::Cuda>(&linattn::backend::CudaDevice::new(number)))
        }
        #[cfg(feature = "rocm")]
        ("rocm", _) => {
            Ok(job.run::<linattn::backend::Rocm>(&linattn::backend::RocmDevice::new(number)))
        }
        #[cfg(feature = "wgpu")]
        ("vulkan" | "metal", 0) => {
            Ok(job.run::<linattn::backend::Wgpu>(&linattn::backend::WgpuDevice::DefaultDevice))
        }
        _ => {
            let devices = "cpu, cuda:N, rocm:N, vulkan or metal";
            Err(format!("device `{name}`: it has to be {devices}, with its feature compiled in")
                .into())
        }
    }
}
