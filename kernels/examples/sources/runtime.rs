//! A runtime that compiles to C++ and keeps the text: CubeCL's HIP and CUDA runtimes without a GPU.

use crate::target::{Compiler, Target};
use cubecl::MemoryAllocationMode;
use cubecl::backtrace::BackTrace;
use cubecl::bytes::Bytes;
use cubecl::device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::ir::TargetProperties;
use cubecl::prelude::*;
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::striding::has_pitched_row_major_strides;
use cubecl::zspace::{Shape, Strides};
use cubecl::{CubeTask, MemoryUsage};
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::storage::{BytesResource, BytesStorage, ManagedResource};
use cubecl_runtime::validation::{validate_cube_dim, validate_units};
use std::any::Any;
use std::collections::HashSet;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

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

/// The runtime of GPUs of one kind.
#[derive(Debug, Clone)]
pub struct Recorder<T>(PhantomData<T>);

impl<T: Target> Runtime for Recorder<T> {
    type Compiler = Compiler<T>;
    type Server = Server<T>;
    type Device = T;

    fn client(device: &T) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        "source"
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
        T::target_properties()
    }

    fn enumerate_devices(_kind: u16, _info: &Records) -> Vec<DeviceId> {
        T::ALL.iter().map(Device::to_id).collect()
    }
}

/// Compiles what it is asked to launch, each kernel once, as CubeCL's servers do. There is no memory.
#[derive(Debug)]
pub struct Server<T: Target> {
    seen: HashSet<KernelId>,
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
}

impl<T: Target> Server<T> {
    fn compile(
        &self,
        kernel: &dyn CubeTask<Compiler<T>>,
        id: &KernelId,
        mode: ExecutionMode,
    ) -> Result<Compiled, String> {
        let properties = &self.utilities.properties;
        validate_cube_dim(properties, id).map_err(|error| error.to_string())?;
        validate_units(properties, id).map_err(|error| error.to_string())?;
        let address = kernel.address_type();
        let mut compiler = Compiler::<T>::default();
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

impl<T: Target> DeviceService for Server<T> {
    fn init(id: DeviceId) -> Self {
        let device = T::from_id(id);
        let properties = device.properties();
        let policy = PitchedMemoryLayoutPolicy::new(properties.memory.alignment as usize);
        let logger = Arc::new(ServerLogger::default());
        let utilities = ServerUtilities::new(properties, logger, Records::default(), policy);
        Self { seen: HashSet::new(), options: device.options(), utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

impl<T: Target> ServerCommunication for Server<T> {
    const SERVER_COMM_ENABLED: bool = false;
}

impl<T: Target> ComputeServer for Server<T> {
    type Kernel = Box<dyn CubeTask<Compiler<T>>>;
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
