//! Parts that several tests need.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use linattn_oracle::Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Limits on RMS error over RMS truth.
pub const F32_LIMIT: f64 = 1e-5;

/// Held while a graph is built and gone back through. Burn 0.21 ends each backward pass by freeing what no
/// tensor holds in any graph of the process, and tests join tensors by its `Tensor::cat`, which holds none of
/// them while it does: that thread's gradient is wrong then (tracel-ai/burn#5573).
pub fn alone() -> MutexGuard<'static, ()> {
    static GRAPHS: Mutex<()> = Mutex::new(());
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Draws weights anew that are not all alike: normal.
struct DrawnBy {
    rng: Rng,
    /// Of weights around 0; without one each tensor keeps the mean and deviation that it has.
    deviation: Option<f64>,
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

/// `module` with weights that are the same in each run but for their mean and deviation, for tests that a few
/// weights in a thousand would fail:
/// Burn's generator serves all threads of the process, so that no seed of it fixes what one test draws.
pub fn drawn_by<B: Backend, M: Module<B>>(seed: u64, module: M) -> M {
    module.map(&mut DrawnBy { rng: Rng::new(seed), deviation: None })
}

/// `module` with the same weights to the last bit in each run, where [`drawn_by`] takes the deviations that it finds.
pub fn normal_by<B: Backend, M: Module<B>>(seed: u64, deviation: f64, module: M) -> M {
    module.map(&mut DrawnBy { rng: Rng::new(seed), deviation: Some(deviation) })
}

/// Weights of a model, first to last: taken from one by a visit, given to another by a map.
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
#[derive(Clone, Default)]
pub struct Weights(std::collections::VecDeque<TensorData>);

#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
impl<B: Backend> burn::module::ModuleVisitor<B> for Weights {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        self.0.push_back(param.val().into_data());
    }
}

#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
impl<B: Backend> ModuleMapper<B> for Weights {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let weight = self.0.pop_front().unwrap();
        param.map(|old| Tensor::from_data(weight, &old.device()).require_grad())
    }
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
/// visibly; where `LINATTN_REQUIRE_GPU` is set, it fails.
#[cfg(feature = "wgpu")]
pub fn wgpu() -> Option<burn::backend::wgpu::WgpuDevice> {
    let first = linattn_cli::device::wgpu_devices().into_iter().next();
    if first.is_none() {
        linattn_oracle::skipped_without_adapter();
    }
    first
}

/// The first NVIDIA GPU, or a visible skip.
#[cfg(feature = "cuda")]
pub fn cuda() -> Option<burn::backend::cuda::CudaDevice> {
    match linattn_cli::device::choose("cuda:0") {
        Ok(_) => Some(burn::backend::cuda::CudaDevice::new(0)),
        Err(why) => {
            linattn_oracle::skipped(why);
            None
        }
    }
}
