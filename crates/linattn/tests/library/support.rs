//! Parts that several tests need, here and in the tests of the whole repository, which include this file.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use linattn_oracle::Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while a graph is built and gone back through. Burn 0.21 ends each backward pass by freeing what no
/// tensor holds in any graph of the process, and tests join tensors by its `Tensor::cat`, which holds none of
/// them while it does: that thread's gradient is wrong then (tracel-ai/burn#5573).
pub fn alone() -> MutexGuard<'static, ()> {
    static GRAPHS: Mutex<()> = Mutex::new(());
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Draws weights anew that are not all alike: normal.
pub struct DrawnBy {
    pub rng: Rng,
    /// Of weights around 0; without one each tensor keeps the mean and deviation that it has.
    pub deviation: Option<f64>,
}

impl<B: Backend> ModuleMapper<B> for DrawnBy {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|old| {
            let fresh: Vec<f64> = old.to_data().iter().collect();
            if fresh.iter().all(|&x| x == fresh[0]) {
                return old;
            }
            let (mean, deviation) = match self.deviation {
                Some(deviation) => (0.0, deviation),
                None => mean_and_deviation(&fresh),
            };
            let drawn: Vec<f64> =
                fresh.iter().map(|_| mean + deviation * self.rng.normal()).collect();
            let drawn = TensorData::new(drawn, old.dims());
            Tensor::from_data(drawn, (&old.device(), old.dtype())).require_grad()
        })
    }
}

fn mean_and_deviation(numbers: &[f64]) -> (f64, f64) {
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let squares = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
    (mean, (squares / numbers.len() as f64).sqrt())
}

/// `module` with weights that are the same to the last bit in each run: Burn's generator serves all threads of the
/// process, so that no seed of it fixes what one test draws.
pub fn normal_by<B: Backend, M: Module<B>>(seed: u64, deviation: f64, module: M) -> M {
    module.map(&mut DrawnBy { rng: Rng::new(seed), deviation: Some(deviation) })
}

/// Numbers by name.
pub type Numbers = BTreeMap<String, Vec<f64>>;

/// The f32 tensors of a safetensors file: the length of a header, the header in JSON, the numbers.
pub fn safetensors(path: &Path) -> Numbers {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(header).unwrap();
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, tensor)| {
            assert_eq!(tensor["dtype"], "F32", "{name}");
            let at = |i: usize| tensor["data_offsets"][i].as_u64().unwrap() as usize;
            let values = data[at(0)..at(1)].chunks_exact(4);
            let values = values.map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]])));
            (name.clone(), values.collect())
        })
        .collect()
}

/// The first adapter of Vulkan or Metal, software or not. Without one the test that asks is skipped,
/// visibly; where `LINATTN_REQUIRE_GPU` is set, it fails. A device compiles for all who use it on one thread. An
/// adapter that is a processor has two names, so it is two devices, which tests get in turn.
#[cfg(feature = "wgpu")]
pub fn wgpu() -> Option<burn::backend::wgpu::WgpuDevice> {
    use cubecl::device::Device;
    use cubecl::prelude::Runtime;
    use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let all = WgpuRuntime::enumerate_all_devices(&AutoGraphicsApi::backend());
    if all.is_empty() {
        linattn_oracle::skipped_without_adapter();
    }
    if all == [WgpuDevice::Cpu.to_id()] && ASKED.fetch_add(1, Relaxed) % 2 == 1 {
        return Some(WgpuDevice::DefaultDevice);
    }
    all.first().map(|first| WgpuDevice::from_id(*first))
}

/// The first NVIDIA GPU, or a visible skip.
#[cfg(feature = "cuda")]
pub fn cuda() -> Option<burn::backend::cuda::CudaDevice> {
    use cubecl::cuda::{CudaDevice, CudaRuntime};
    use cubecl::prelude::Runtime;
    // Without NVIDIA's driver the question panics, and says why.
    let count = std::panic::catch_unwind(|| CudaRuntime::enumerate_all_devices(&()).len());
    if count.unwrap_or(0) == 0 {
        linattn_oracle::skipped("no NVIDIA GPU, or no driver for it");
        return None;
    }
    Some(CudaDevice::new(0))
}
