//! Matrix products of linear layers on Burn's CubeCL backends, and split-K for the gradients of weights.
//!
//! ```text
//! y  = x W            x: [N, I]   W: [I, O]
//! dx = dy W^T         dy: [N, O]
//! dW = x^T dy         = sum over S of x_s^T dy_s, slices of N / S rows: one batched product, then a sum
//! ```
//!
//! A product is one launch of cubek's matrix product. [`choose`] takes its tiling and its reader from a
//! table by shape, layout and type; nothing is timed at run time. The figures behind the table come from
//! `kernels/examples/matmul` on an H200. Where the table has no row or the device lacks an instruction,
//! cubek's default runs, which is what Burn runs.
//!
//! Sums are f32. f32 inputs go through TF32 tensor cores where the device has them, as in Burn.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::{cast, into_contiguous, slice};
use burn_cubecl::ops::numeric::{add, empty_device_contiguous_dtype};
use burn_cubecl::tensor::CubeTensor;
use cubecl::features::MmaConfig;
use cubecl::ir::{AddressType, ElemType, FloatKind, StorageType};
use cubecl::prelude::{ComputeClient, Runtime};
use cubecl::zspace::{Strides, metadata::Metadata};
use cubek::matmul::components::stage::PartitionBuffering;
use cubek::matmul::components::tile::TileMatmulKind;
use cubek::matmul::definition::{
    MatmulElems, MatmulGlobalElems, MatmulProblem, MatmulSetupError, TilingBlueprint, TilingScheme,
};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::matmul::routines::BlueprintStrategy;
use cubek::std::cube_count::{CubeCountStrategy, GlobalOrder, HypercubeBlueprint};
use cubek::std::stage::SwizzleMode;
use cubek::std::{InputBinding, MatrixLayout, PartitionSize, StageSize, SwizzleModes, TileSize};
use linattn_kernels::fused::column_sums::column_sums;

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const TF32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::TF32));

/// Multiprocessors of a device that does not say how many it has.
const MULTIPROCESSORS: usize = 132;

/// The sizes of a product `[m, k] x [k, n]`, how both sides lie in memory, and their type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Problem {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    lhs: MatrixLayout,
    rhs: MatrixLayout,
    /// Of both sides.
    dtype: StorageType,
    /// The rows of both sides, along what is not contiguous, start at multiples of 16 bytes.
    aligned: bool,
}

/// Properties of a device that [`choose`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    multiprocessors: usize,
    shared_memory: usize,
}

impl Device {
    fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        let hardware = &client.properties().hardware;
        let count = hardware.num_streaming_multiprocessors;
        Self {
            multiprocessors: count.map_or(MULTIPROCESSORS, |count| count as usize),
            shared_memory: hardware.max_shared_memory_size,
        }
    }
}

/// How tiles come from global to shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Through registers, one stage.
    Simple,
    /// Through registers, two stages.
    Double,
    /// By asynchronous copies of 16 bytes, two stages.
    DoubleAsync,
}

/// Tile of a cube: `tiles` instructions along m, n and k for each of `planes` along m and n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    tiles: [u32; 3],
    planes: [u32; 2],
}

impl Tiling {
    /// Numbers along m, n and k of one stage.
    fn sizes(&self, instruction: [u32; 3]) -> [usize; 3] {
        let planes = [self.planes[0], self.planes[1], 1];
        [0, 1, 2].map(|axis| (instruction[axis] * self.tiles[axis] * planes[axis]) as usize)
    }

    /// Bytes of shared memory, with 16-row fragments of each plane's output.
    fn shared_memory(&self, reader: Reader, instruction: [u32; 3], size: usize) -> usize {
        let [m, n, k] = self.sizes(instruction);
        let stages = if reader == Reader::Simple { 1 } else { 2 };
        let planes = (self.planes[0] * self.planes[1]) as usize;
        stages * (m + n) * k * size + planes * 16 * 16 * 4
    }
}

/// 128 x 128 with 4 planes: the least traffic to shared memory.
const SQUARE: Tiling = Tiling { tiles: [4, 8, 4], planes: [2, 2] };
/// 128 x 128 with 8 planes: two cubes fit on a multiprocessor.
const EIGHT: Tiling = Tiling { tiles: [4, 4, 4], planes: [2, 4] };
/// 128 x 176 with 8 planes, for widths of which 176 is a divisor, or nearly.
const ODD: Tiling = Tiling { tiles: [2, 11, 4], planes: [4, 2] };
/// 64 x 64 with 4 planes, where larger ones would be too few.
const SMALL: Tiling = Tiling { tiles: [2, 4, 4], planes: [2, 2] };

/// The instruction of a type: m, n and k.
fn instruction(dtype: StorageType) -> Option<[u32; 3]> {
    match dtype {
        StorageType::Scalar(ElemType::Float(FloatKind::BF16 | FloatKind::F16)) => Some([16, 8, 16]),
        StorageType::Scalar(ElemType::Float(FloatKind::F32)) => Some([16, 8, 8]),
        _ => None,
    }
}

/// Cubes of a tiling.
fn cubes(problem: &Problem, instruction: [u32; 3], tiling: Tiling) -> usize {
    let [m, n, _] = tiling.sizes(instruction);
    problem.batch * problem.m.div_ceil(m) * problem.n.div_ceil(n)
}

/// Columns that a tiling computes, the ones past the last too.
fn padded_columns(problem: &Problem, instruction: [u32; 3], tiling: Tiling) -> usize {
    problem.n.next_multiple_of(tiling.sizes(instruction)[1])
}

/// The table: the tiling and the reader of a product; `None` leaves it to cubek.
fn choose(problem: &Problem, device: Device) -> Option<(Reader, Tiling)> {
    let instruction = instruction(problem.dtype)?;
    let enough = |tiling| cubes(problem, instruction, tiling) >= device.multiprocessors;
    let columns = |tiling| padded_columns(problem, instruction, tiling);
    let tiling = match () {
        () if !enough(EIGHT) => SMALL,
        () if columns(ODD) < columns(EIGHT) => ODD,
        // Long sums pay for a slower start.
        () if problem.k >= 512 => SQUARE,
        () => EIGHT,
    };
    let reader = match problem.aligned {
        true => Reader::DoubleAsync,
        false if problem.k >= 512 => Reader::Double,
        false => Reader::Simple,
    };
    let size = problem.dtype.size();
    let fits = tiling.shared_memory(reader, instruction, size) <= device.shared_memory;
    fits.then_some((reader, tiling))
}

/// cubek's name for a row of the table.
fn strategy(problem: &Problem, reader: Reader, tiling: Tiling) -> Option<Strategy> {
    let blueprint = blueprint(problem, reader, tiling)?;
    Some(match reader {
        Reader::Simple => Strategy::SimpleCyclicMma(BlueprintStrategy::Forced(blueprint)),
        Reader::Double => Strategy::DoubleCyclicMma(BlueprintStrategy::Forced(blueprint)),
        Reader::DoubleAsync => Strategy::DoubleAsyncCyclicMma(BlueprintStrategy::Forced(blueprint)),
    })
}

fn blueprint(problem: &Problem, reader: Reader, tiling: Tiling) -> Option<TilingBlueprint> {
    let [m, n, k] = instruction(problem.dtype)?;
    let [along_m, along_n, along_k] = tiling.tiles;
    let scheme = TilingScheme::builder()
        .with_tile_size(TileSize::new(m, n, k))
        .with_partition_size(PartitionSize::new(along_m, along_n, along_k))
        .with_stage_size(StageSize::new(tiling.planes[0], tiling.planes[1], 1))
        .build()
        .ok()?;
    let batches = || Shape::from(vec![problem.batch]);
    let described = MatmulProblem::from_parameters(
        problem.m,
        problem.n,
        problem.k,
        batches(),
        batches(),
        problem.lhs,
        problem.rhs,
        MatrixLayout::RowMajor,
        None,
        None,
        MatmulGlobalElems { lhs: problem.dtype, rhs: problem.dtype, out: F32 },
        AddressType::U32,
    );
    // Cubes in strips of 4 rows of tiles share what they read through the L2 cache.
    let hypercube = HypercubeBlueprint::builder()
        .global_order(GlobalOrder::SwizzleRow(4))
        .cube_count_strategy(CubeCountStrategy::Flattened)
        .build();
    let builder = TilingBlueprint::builder(TileMatmulKind::Mma, scheme, 32, &described)
        .partition_buffering(PartitionBuffering::Single)
        .hypercube_blueprint(hypercube)
        .shared_swizzle(swizzles(problem, [m, n, k]));
    let mut blueprint = builder.build();
    // Kernels with two stages load an even number of them; cubek checks bounds as if for one at a time.
    let stages = if reader == Reader::Simple { 1 } else { 2 };
    let depth = stages * tiling.sizes([m, n, k])[2];
    blueprint.check_k_bounds = !problem.k.is_multiple_of(depth);
    Some(blueprint)
}

/// Swizzles with which the rows of a tile meet no bank conflicts.
fn swizzles(problem: &Problem, [m, n, k]: [u32; 3]) -> SwizzleModes {
    let size = problem.dtype.size();
    let mode = |row: u32| match row as usize * size {
        32 => SwizzleMode::B32,
        64 => SwizzleMode::B64,
        _ => SwizzleMode::None,
    };
    SwizzleModes {
        lhs: mode(if problem.lhs == MatrixLayout::RowMajor { k } else { m }),
        rhs: mode(if problem.rhs == MatrixLayout::RowMajor { n } else { k }),
        ..SwizzleModes::default()
    }
}

/// The device has the instruction that the table is made for, and loads of 16 bytes.
fn has_instruction<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    let features = client.features();
    let Some([m, n, k]) = instruction(dtype) else { return false };
    let a_type = if dtype == F32 { TF32 } else { dtype };
    let wanted = MmaConfig { a_type, b_type: a_type, cd_type: F32, m, n, k };
    features.matmul.mma.contains(&wanted)
        && features.copy_async
        && client.properties().hardware.plane_size_max == 32
}

/// A view with one contiguous axis among the last two, which is `x` itself where it has one.
fn readable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    match layout(&x) {
        Some(_) => x,
        None => into_contiguous(x),
    }
}

fn layout<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<MatrixLayout> {
    MatrixLayout::from_shape_and_strides(x.meta.shape(), x.meta.strides(), None).ok()
}

/// Every stride but the contiguous one is a multiple of 16 bytes.
fn aligned<R: CubeRuntime>(x: &CubeTensor<R>, layout: MatrixLayout) -> bool {
    let strides = x.meta.strides();
    let contiguous = strides.len() - if layout == MatrixLayout::RowMajor { 1 } else { 2 };
    let along = |(axis, stride): (usize, &usize)| {
        axis == contiguous || (stride * x.dtype.size()).is_multiple_of(16)
    };
    strides.iter().enumerate().all(along)
}

/// The problem in the table's words. Both tensors are [`readable`].
fn problem<R: CubeRuntime>(lhs: &CubeTensor<R>, rhs: &CubeTensor<R>) -> Option<Problem> {
    let ([left, right], rank) = ([lhs.meta.shape(), rhs.meta.shape()], lhs.meta.shape().len());
    let layouts = (layout(lhs)?, layout(rhs)?);
    Some(Problem {
        batch: if rank == 3 { left[0] } else { 1 },
        m: left[rank - 2],
        n: right[rank - 1],
        k: left[rank - 1],
        lhs: layouts.0,
        rhs: layouts.1,
        dtype: lhs.dtype.into(),
        aligned: aligned(lhs, layouts.0) && aligned(rhs, layouts.1),
    })
}

fn launch<R: CubeRuntime>(
    strategy: &Strategy,
    input: StorageType,
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    out: &CubeTensor<R>,
) -> Result<(), MatmulSetupError> {
    let binding = |x: &CubeTensor<R>| InputBinding::new(x.clone().binding(), input);
    let globals = MatmulGlobalElems { lhs: input, rhs: input, out: out.dtype.into() };
    let mut types = MatmulElems::from_globals(&globals);
    let (lhs, rhs, out_binding) = (binding(lhs), binding(rhs), out.clone().binding());
    launch_ref(strategy, &out.client, lhs, rhs, out_binding, &mut types)
}

/// `[m, k] x [k, n]`, or a batch of them, `[B, m, k] x [B, k, n]`, in `out_dtype`. One launch.
///
/// Transposed views are read where they lie. No size is 0. `rhs` is cast if its type is not that of `lhs`.
///
/// # Panics
/// Where cubek's default cannot run either, as in Burn.
pub(super) fn product<R: CubeRuntime>(
    lhs: CubeTensor<R>,
    rhs: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    let rhs = if rhs.dtype == lhs.dtype { rhs } else { cast(rhs, lhs.dtype) };
    let (lhs, rhs) = (readable(lhs), readable(rhs));
    let mut shape = lhs.meta.shape().to_vec();
    if let (Some(last), Some(columns)) = (shape.last_mut(), rhs.meta.shape().last()) {
        *last = *columns;
    }
    let out = new(&lhs, shape, out_dtype);
    if !launch_from_table(&lhs, &rhs, &out) {
        let dtype = lhs.dtype.into();
        launch(&Strategy::default(), dtype, &lhs, &rhs, &out).expect("cubek's default runs");
    }
    out
}

/// Launches what [`choose`] says; false if there is nothing it can say or cubek refuses it.
fn launch_from_table<R: CubeRuntime>(
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    out: &CubeTensor<R>,
) -> bool {
    let Some(problem) = problem(lhs, rhs) else { return false };
    if !has_instruction(&out.client, problem.dtype) {
        return false;
    }
    let chosen = choose(&problem, Device::of(&out.client));
    let strategy = chosen.and_then(|(reader, tiling)| strategy(&problem, reader, tiling));
    // A forced blueprint converts nothing: it reads f32 as TF32.
    let input = if problem.dtype == F32 { TF32 } else { problem.dtype };
    strategy.is_some_and(|strategy| launch(&strategy, input, lhs, rhs, out).is_ok())
}

/// A contiguous tensor to fill, on the device of `like`.
fn new<R: CubeRuntime>(like: &CubeTensor<R>, shape: Vec<usize>, dtype: DType) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The same memory with another shape and other strides.
fn view<R: CubeRuntime>(x: CubeTensor<R>, shape: &[usize], strides: &[usize]) -> CubeTensor<R> {
    let meta = Metadata::new(Shape::from(shape.to_vec()), Strides::new(strides));
    CubeTensor { meta: Box::new(meta), ..x }
}

/// `x^T` of a matrix, in the same memory.
pub(super) fn transposed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let ([rows, columns], [down, right]) = matrix(&x);
    view(x, &[columns, rows], &[right, down])
}

/// Shape and strides of a matrix.
fn matrix<R: CubeRuntime>(x: &CubeTensor<R>) -> ([usize; 2], [usize; 2]) {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    debug_assert_eq!(shape.len(), 2);
    ([shape[0], shape[1]], [strides[0], strides[1]])
}

/// `y = x W`: `x: [N, I]`, `w: [I, O]`, gives `[N, O]` in `out_dtype`. One launch.
pub(super) fn linear<R: CubeRuntime>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    product(x, w, out_dtype)
}

/// `dx = dy W^T`: `d_y: [N, O]`, `w: [I, O]`, gives `[N, I]` in `out_dtype`. One launch.
pub(super) fn linear_x_gradient<R: CubeRuntime>(
    d_y: CubeTensor<R>,
    w: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    product(d_y, transposed(w), out_dtype)
}

/// `dW = x^T dy`: `x: [N, I]`, `d_y: [N, O]`, gives `[I, O]` in `out_dtype`.
///
/// Split-K: a batched product over [`slices`] of the rows, in f32, and the sum of its results in a fixed
/// order. One launch without slices, two or three with them, and three more where the slices leave rows
/// over.
pub(super) fn linear_weight_gradient<R: CubeRuntime>(
    x: CubeTensor<R>,
    d_y: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    let (x, d_y) = (readable(x), readable(d_y));
    let (([rows, inputs], _), ([_, outputs], _)) = (matrix(&x), matrix(&d_y));
    let slices = slices(rows, inputs, outputs, Device::of(&x.client).multiprocessors);
    let whole = |x, d_y| product(transposed(x), d_y, out_dtype);
    if slices == 1 {
        return whole(x, d_y);
    }
    let covered = rows / slices * slices;
    let parts =
        product(sliced(x.clone(), slices, true), sliced(d_y.clone(), slices, false), DType::F32);
    let (from, to) = (parts.dtype.into(), out_dtype.into());
    let sums = column_sums(&parts.client, &parts.handle, slices, inputs * outputs, from, to);
    let Ok(sums) = sums else { return whole(x, d_y) };
    let shape = Shape::from(vec![inputs, outputs]);
    let (client, device) = (x.client.clone(), x.device.clone());
    let sums = CubeTensor::new_contiguous(client, device, shape, sums.handle, out_dtype);
    if covered == rows {
        return sums;
    }
    let rest = |x: CubeTensor<R>, width: usize| slice(x, &[covered..rows, 0..width]);
    add(sums, whole(rest(x, inputs), rest(d_y, outputs)))
}

/// The first `slices * (N / slices)` rows of a matrix `[N, W]` as `[slices, N / slices, W]`, or with the last
/// two axes swapped, in the same memory.
fn sliced<R: CubeRuntime>(x: CubeTensor<R>, slices: usize, transposed: bool) -> CubeTensor<R> {
    let ([rows, width], [down, right]) = matrix(&x);
    let each = rows / slices;
    match transposed {
        true => view(x, &[slices, width, each], &[each * down, right, down]),
        false => view(x, &[slices, each, width], &[each * down, down, right]),
    }
}

/// Fewest rows of a slice: shorter ones spend more on writing their results than on computing them.
const SHORTEST_SLICE: usize = 256;

/// Slices of the rows of `x^T dy`: a power of two, the fewest that give each multiprocessor a cube of
/// 128 x 128, as far as slices of [`SHORTEST_SLICE`] rows go. 1 where the output alone is large enough.
fn slices(rows: usize, inputs: usize, outputs: usize, multiprocessors: usize) -> usize {
    let cubes = inputs.div_ceil(128) * outputs.div_ceil(128);
    let wanted = multiprocessors.div_ceil(cubes).next_power_of_two();
    let most = (rows / SHORTEST_SLICE).max(1);
    // The largest power of two that is at most `most`.
    wanted.min(1 << most.ilog2())
}

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
