//! A runtime that compiles to HIP and keeps the text: CubeCL's HIP runtime without HIP.

use cubecl::MemoryAllocationMode;
use cubecl::backtrace::BackTrace;
use cubecl::bytes::Bytes;
use cubecl::device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::ir::features::Plane;
use cubecl::ir::{
    ContiguousElements, DeviceProperties, HardwareProperties, MatrixLayout, MemoryDeviceProperties,
    MmaProperties, TargetProperties, VectorSize,
};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::striding::has_pitched_row_major_strides;
use cubecl::zspace::{Shape, Strides};
use cubecl::{CubeTask, MemoryUsage};
use cubecl_cpp::hip::HipDialect;
use cubecl_cpp::hip::arch::AMDArchitecture;
use cubecl_cpp::hip::mma::{WmmaIntrinsicCompiler, contiguous_elements_rdna3};
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    Architecture, CompilationOptions, CppCompiler, CppSupportedFeatures, DialectWmmaCompiler,
    register_mma_features, register_wmma_features,
};
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::storage::{BytesResource, BytesStorage, ManagedResource};
use cubecl_runtime::validation::{validate_cube_dim, validate_units};
use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

type HipCompiler = CppCompiler<HipDialect<WmmaIntrinsicCompiler>>;

/// A kind of GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Arch {
    /// CDNA 2: MI210, MI250.
    #[default]
    Gfx90a,
    /// RDNA 3: RX 7900, W7900.
    Gfx1100,
}

impl Arch {
    pub const ALL: [Self; 2] = [Self::Gfx90a, Self::Gfx1100];

    pub fn name(self) -> &'static str {
        match self {
            Self::Gfx90a => "gfx90a",
            Self::Gfx1100 => "gfx1100",
        }
    }

    fn parsed(self) -> AMDArchitecture {
        AMDArchitecture::parse(self.name()).expect("CubeCL knows it")
    }

    /// Properties that CubeCL's HIP runtime derives from the driver's report on such a GPU.
    fn properties(self) -> DeviceProperties {
        let arch = self.parsed();
        let wmma = WmmaIntrinsicCompiler::supported_wmma_combinations(&arch);
        let mma = WmmaIntrinsicCompiler::supported_mma_combinations(&arch);
        let hardware = HardwareProperties {
            load_width: 128,
            plane_size_min: arch.warp_size(),
            plane_size_max: arch.warp_size(),
            max_bindings: 1024,
            max_shared_memory_size: 64 * 1024,
            max_cube_count: (i32::MAX as u32, 65536, 65536),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 1024),
            num_streaming_multiprocessors: None,
            num_tensor_cores: None,
            min_tensor_cores_dim: (!wmma.is_empty()).then_some(16),
            num_cpu_cores: None,
            max_vector_size: VectorSize::MAX,
        };
        let memory = MemoryDeviceProperties { max_page_size: 1 << 34, alignment: 256 };
        let mut properties =
            DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
        register_supported_types(&mut properties);
        properties.features.memory_reinterpret = true;
        properties.features.alignment = true;
        properties.features.plane.insert(Plane::Ops);
        properties.features.plane.insert(Plane::NonUniformControlFlow);
        register_wmma_features(wmma, &mut properties);
        register_mma_features(mma, &mut properties);
        properties
    }
}

impl Device for Arch {
    fn from_id(id: DeviceId) -> Self {
        Self::ALL[usize::from(id.index_id)]
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: *self as u16 }
    }
}

/// A kernel as it would be handed to the GPU's compiler.
#[derive(Debug)]
pub struct Compiled {
    pub name: String,
    pub source: String,
    pub units: u32,
    pub shared_bytes: usize,
}

/// Sources that were compiled, or the errors, in the order of launches.
#[derive(Debug, Default)]
pub struct Records(Mutex<Vec<Result<Compiled, String>>>);

impl Records {
    fn push(&self, compiled: Result<Compiled, String>) {
        self.0.lock().expect("no one panics with it").push(compiled);
    }

    pub fn take(&self) -> Vec<Result<Compiled, String>> {
        std::mem::take(&mut *self.0.lock().expect("no one panics with it"))
    }
}

#[derive(Debug, Clone)]
pub struct Recorder;

impl Runtime for Recorder {
    type Compiler = HipCompiler;
    type Server = Server;
    type Device = Arch;

    fn client(device: &Arch) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        "hip source"
    }

    fn require_array_lengths() -> bool {
        true
    }

    fn max_cube_count() -> (u32, u32, u32) {
        (i32::MAX as u32, u32::from(u16::MAX), u32::from(u16::MAX))
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        shape.is_empty() || has_pitched_row_major_strides(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::ColMajor,
                register_duplication_a: 2,
                register_duplication_b: 2,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_rdna3),
            },
        }
    }

    fn enumerate_devices(_kind: u16, _info: &Records) -> Vec<DeviceId> {
        Arch::ALL.iter().map(Device::to_id).collect()
    }
}

/// Compiles what it is asked to launch, each kernel once, as the HIP server does. There is no memory.
#[derive(Debug)]
pub struct Server {
    seen: HashSet<KernelId>,
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
}

impl Server {
    fn compile(
        &self,
        kernel: &dyn CubeTask<HipCompiler>,
        id: &KernelId,
        mode: ExecutionMode,
    ) -> Result<Compiled, String> {
        let properties = &self.utilities.properties;
        validate_cube_dim(properties, id).map_err(|error| error.to_string())?;
        validate_units(properties, id).map_err(|error| error.to_string())?;
        let address = kernel.address_type();
        let mut compiler = HipCompiler::default();
        let compiled = kernel
            .compile(&mut compiler, &self.options, mode, address)
            .map_err(|error| error.to_string())?;
        let shared_bytes = compiled.repr.map_or(0, |kernel| kernel.shared_memory_size());
        let most = properties.hardware.max_shared_memory_size;
        if shared_bytes > most {
            return Err(format!("{shared_bytes} bytes of shared memory, of {most}"));
        }
        Ok(Compiled {
            name: compiled.entrypoint_name,
            source: compiled.source,
            units: compiled.cube_dim.num_elems(),
            shared_bytes,
        })
    }
}

fn nothing_is_run() -> IoError {
    IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

impl DeviceService for Server {
    fn init(id: DeviceId) -> Self {
        let device = Arch::from_id(id);
        let properties = device.properties();
        let policy = PitchedMemoryLayoutPolicy::new(properties.memory.alignment as usize);
        let logger = Arc::new(ServerLogger::default());
        let utilities = ServerUtilities::new(properties, logger, Records::default(), policy);
        Self {
            seen: HashSet::new(),
            options: CompilationOptions {
                warp_size: device.parsed().warp_size(),
                supports_features: CppSupportedFeatures { fast_math: true, ..Default::default() },
            },
            utilities: Arc::new(utilities),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

impl ServerCommunication for Server {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for Server {
    type Kernel = Box<dyn CubeTask<HipCompiler>>;
    type Info = Records;
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Storage = BytesStorage;

    #[allow(unsafe_code)] // the trait's; nothing is run
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _count: CubeCount,
        _bindings: KernelArguments,
        mode: ExecutionMode,
        _stream: StreamId,
    ) {
        let mut id = kernel.as_ref().id();
        id.mode(mode);
        if !self.seen.insert(id.clone()) {
            return;
        }
        // The compiler panics on what its language lacks.
        let compiled = catch_unwind(AssertUnwindSafe(|| self.compile(kernel.as_ref(), &id, mode)))
            .unwrap_or_else(|panic| Err(message(panic.as_ref())));
        self.utilities.info.push(compiled);
    }

    fn initialize_memory(&mut self, _memory: ManagedMemoryHandle, _size: u64, _stream: StreamId) {}

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        _descriptors: Vec<CopyDescriptor>,
        _stream: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        Box::pin(async { Err(nothing_is_run().into()) })
    }

    fn write(&mut self, _descriptors: Vec<(CopyDescriptor, Bytes)>, _stream: StreamId) {}

    fn sync(&mut self, _stream: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn get_resource(
        &mut self,
        _binding: Binding,
        _stream: StreamId,
    ) -> Result<ManagedResource<BytesResource>, ServerError> {
        Err(nothing_is_run().into())
    }

    fn flush(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _stream: StreamId) -> Result<MemoryUsage, ServerError> {
        Err(nothing_is_run().into())
    }

    fn memory_cleanup(&mut self, _stream: StreamId) {}

    fn start_profile(&mut self, _stream: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(nothing_is_run().into())
    }

    fn end_profile(
        &mut self,
        _stream: StreamId,
        _token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _mode: MemoryAllocationMode, _stream: StreamId) {}
}
