//! Several device threads for one GPU.
//!
//! CubeCL has one thread a device, through which every launch of the process goes: eight small models that train side
//! by side wait for it. [`LanedCuda`] is Burn's CUDA backend over devices that name a lane beside the GPU. Each lane
//! has a thread, a stream and memory of its own; tensors of two lanes meet no more than those of two GPUs do.

use burn_cubecl::CubeBackend;
use cubecl::cuda::CudaRuntime;
use cubecl::device::{Device, DeviceId};
use cubecl::ir::TargetProperties;
use cubecl::prelude::{ComputeClient, Runtime};
use cubecl::server::ComputeServer;
use cubecl::zspace::{Shape, Strides};

/// Burn's CUDA backend with lanes.
#[cfg(not(feature = "fusion"))]
pub type LanedCuda = CubeBackend<LanedCudaRuntime, f32, i32, u8>;
/// Burn's CUDA backend with lanes.
#[cfg(feature = "fusion")]
pub type LanedCuda = burn_fusion::Fusion<CubeBackend<LanedCudaRuntime, f32, i32, u8>>;

/// A GPU, and one of the threads that work for it. The first lane of the first GPU is the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CudaLane {
    /// Number of the GPU, as CUDA counts.
    pub gpu: u16,
    /// Number of the lane on it, from 0.
    pub lane: u16,
}

impl CudaLane {
    /// A lane of a GPU.
    pub fn new(gpu: u16, lane: u16) -> Self {
        Self { gpu, lane }
    }
}

/// CubeCL keeps a thread for each id, and its CUDA server opens the GPU that `index_id` names: lanes differ in
/// `type_id`, which it does not read.
impl Device for CudaLane {
    fn from_id(id: DeviceId) -> Self {
        Self { gpu: id.index_id, lane: id.type_id }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: self.lane, index_id: self.gpu }
    }
}

impl burn::tensor::backend::DeviceOps for CudaLane {}

/// [`CudaRuntime`] over lanes.
#[derive(Debug, Clone)]
pub struct LanedCudaRuntime;

type Server = <CudaRuntime as Runtime>::Server;

impl Runtime for LanedCudaRuntime {
    type Compiler = <CudaRuntime as Runtime>::Compiler;
    type Server = Server;
    type Device = CudaLane;

    fn client(device: &CudaLane) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        "cuda"
    }

    fn require_array_lengths() -> bool {
        CudaRuntime::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        CudaRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        CudaRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        CudaRuntime::target_properties()
    }

    fn enumerate_devices(lane: u16, info: &<Server as ComputeServer>::Info) -> Vec<DeviceId> {
        let on_lane = |id: DeviceId| DeviceId { type_id: lane, ..id };
        CudaRuntime::enumerate_devices(0, info).into_iter().map(on_lane).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_a_gpu_are_devices_of_that_gpu() {
        for lane in [CudaLane::default(), CudaLane::new(0, 7), CudaLane::new(3, 1)] {
            assert_eq!(CudaLane::from_id(lane.to_id()), lane);
            let opened = cubecl::cuda::CudaDevice::from_id(lane.to_id());
            assert_eq!(opened.index, usize::from(lane.gpu), "what CubeCL's server opens");
        }
        assert_ne!(CudaLane::new(0, 1).to_id(), CudaLane::new(0, 2).to_id());
    }
}
