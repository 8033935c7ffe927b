//! GPUs that source is written for, as CubeCL's runtimes see them.

use cubecl::device::{Device, DeviceId};
use cubecl::ir::features::{Plane, Tma};
use cubecl::ir::{
    ContiguousElements, DeviceProperties, ElemType, FloatKind, HardwareProperties, MatrixLayout,
    MemoryDeviceProperties, MmaProperties, TargetProperties, VectorSize,
};
use cubecl::profile::TimingMethod;
use cubecl_cpp::Dialect;
use cubecl_cpp::cuda::CudaDialect;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaWmmaCompiler, contiguous_elements_cuda};
use cubecl_cpp::hip::HipDialect;
use cubecl_cpp::hip::arch::AMDArchitecture;
use cubecl_cpp::hip::mma::{WmmaIntrinsicCompiler, contiguous_elements_rdna3};
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    Architecture, CompilationOptions, CppCompiler, CppSupportedFeatures, DialectWmmaCompiler,
    register_mma_features, register_wmma_features,
};
use std::fmt::Debug;

/// The compiler of a target.
pub type Compiler<T> = CppCompiler<<T as Target>::Language>;

/// GPUs of one language.
pub trait Target: Device + Copy + Debug + Default + 'static {
    /// The language.
    type Language: Dialect;
    /// All GPUs, by their number.
    const ALL: &[Self];
    /// How the names of files end.
    const EXTENSION: &'static str;

    /// The GPU's name.
    fn name(self) -> &'static str;

    /// Properties that CubeCL's runtime derives from the driver's report on such a GPU.
    fn properties(self) -> DeviceProperties;

    /// Options that CubeCL's runtime compiles with.
    fn options(self) -> CompilationOptions;

    /// How tensor cores hold their operands.
    fn target_properties() -> TargetProperties;
}

/// A GPU of HIP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Hip {
    /// CDNA 2: MI210, MI250.
    #[default]
    Gfx90a,
    /// RDNA 3: RX 7900, W7900.
    Gfx1100,
}

impl Hip {
    fn parsed(self) -> AMDArchitecture {
        AMDArchitecture::parse(self.name()).expect("CubeCL knows it")
    }
}

impl Device for Hip {
    fn from_id(id: DeviceId) -> Self {
        Self::ALL[usize::from(id.index_id)]
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: *self as u16 }
    }
}

impl Target for Hip {
    type Language = HipDialect<WmmaIntrinsicCompiler>;
    const ALL: &[Self] = &[Self::Gfx90a, Self::Gfx1100];
    const EXTENSION: &'static str = "hip";

    fn name(self) -> &'static str {
        match self {
            Self::Gfx90a => "gfx90a",
            Self::Gfx1100 => "gfx1100",
        }
    }

    fn properties(self) -> DeviceProperties {
        let arch = self.parsed();
        let wmma = WmmaIntrinsicCompiler::supported_wmma_combinations(&arch);
        let mma = WmmaIntrinsicCompiler::supported_mma_combinations(&arch);
        let mut properties = described(HardwareProperties {
            plane_size_min: arch.warp_size(),
            plane_size_max: arch.warp_size(),
            max_cube_count: (i32::MAX as u32, 65536, 65536),
            min_tensor_cores_dim: (!wmma.is_empty()).then_some(16),
            ..hardware(64 * 1024)
        });
        register_wmma_features(wmma, &mut properties);
        register_mma_features(mma, &mut properties);
        properties
    }

    fn options(self) -> CompilationOptions {
        CompilationOptions {
            warp_size: self.parsed().warp_size(),
            supports_features: CppSupportedFeatures { fast_math: true, ..Default::default() },
        }
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
}

/// A GPU of CUDA.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cuda {
    /// Hopper: H100, H200.
    #[default]
    Sm90,
}

impl Device for Cuda {
    fn from_id(id: DeviceId) -> Self {
        Self::ALL[usize::from(id.index_id)]
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: *self as u16 }
    }
}

impl Target for Cuda {
    type Language = CudaDialect<CudaWmmaCompiler>;
    const ALL: &[Self] = &[Self::Sm90];
    const EXTENSION: &'static str = "cu";

    fn name(self) -> &'static str {
        "sm_90"
    }

    fn properties(self) -> DeviceProperties {
        let arch = CudaArchitecture { version: 90 };
        let wmma = CudaWmmaCompiler::supported_wmma_combinations(&arch);
        let mma = CudaWmmaCompiler::supported_mma_combinations(&arch);
        let mut properties = described(HardwareProperties {
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            num_streaming_multiprocessors: Some(132),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            ..hardware(227 * 1024)
        });
        let features = &mut properties.features;
        for kind in [FloatKind::F16, FloatKind::BF16] {
            features.matmul.ldmatrix.insert(ElemType::Float(kind).into());
            features.matmul.stmatrix.insert(ElemType::Float(kind).into());
        }
        features.copy_async = true;
        features.tma.insert(Tma::Base);
        features.cube_cluster = true;
        features.plane.insert(Plane::Sync);
        register_wmma_features(wmma, &mut properties);
        register_mma_features(mma, &mut properties);
        properties
    }

    fn options(self) -> CompilationOptions {
        CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: true,
                fast_math: true,
                fast_tanh: true,
                elect_sync: true,
            },
        }
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }
}

/// A GPU with planes of 32 and so many bytes of shared memory.
fn hardware(shared_memory: usize) -> HardwareProperties {
    HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_memory,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 1024),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    }
}

/// Properties that both languages share.
fn described(hardware: HardwareProperties) -> DeviceProperties {
    let memory = MemoryDeviceProperties { max_page_size: 1 << 34, alignment: 256 };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
    properties
}
