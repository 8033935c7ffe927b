//! A few rows times matrices side by side, `y = x [W_1 W_2 ..] + b`: the linear layers of decoding. Layers that
//! read one input are one launch, with their weights where they are.
//! ```text
//! y_mn = b_n + sum_k x_mk W_kn                     in f32
//!
//! x:   [M, K]    F    M from 1 to 64, on tensor cores to 128; it begins at a multiple of 8 bytes; or another `Input`
//! W_i: [K, N_i]  F    1 to 8 of them; rows lie `stride` numbers apart, in each its own
//! b:   [N]       F    if there is one; N = N_1 + N_2 ..
//! y:   [M, N]    F
//! ```
//! Work:   a cube has up to 8 rows of x, and `lanes` vectors of columns side by side, of one matrix. Cube x
//!         counts columns; cube z counts rows, and finds W in L2 where there are several. Units stand in groups
//!         of `lanes`, which deal the rows of W out among them and add their sums up in shared memory.
//! Bytes:  at 4.3 TB/s and 0.7 microseconds of latency 3 MB have to be on their way at any
//!         time: 23 KB for each of 132 multiprocessors. A unit requests 16 vectors of 16 bytes (8 from 3
//!         rows on, or of 16 bits) before it multiplies the first, and for the next ones as soon as these are used up,
//!         ahead of the barriers that x takes: 64 KB (32 KB) a cube. Cubes get narrower, down to 32
//!         columns, until there are five for four multiprocessors, and from there, down to 32 bytes of a row of W, until
//!         three quarters of these have one.
//! Cost:   2 M K N flops for K N numbers of W, once for each 8 rows: bound by memory up to about 8 rows. Where
//!         tensor cores take 16-bit numbers, more rows are theirs: `tensor_cores`.
//!         No sum is split over cubes: that would take another launch, or additions in any order.
//! Edges:  rows past K repeat the last one, times 0; columns past N repeat the last ones and are not
//!         kept. Where 8, 4 or 2 do not divide every N_i and `stride`, vectors are narrower. M, K and N_i are
//!         run-time values: new ones compile nothing, unless they change `Split`.

pub(crate) mod input;
mod tensor_cores;

use input::{CubeRows, Held, InputArrays, Shelf};
pub use input::{Input, MOST_HEADS, Reading};
use tensor_cores::PACKED;
pub use tensor_cores::Tiling;

use crate::SOURCE;
use crate::buffer::{Buffer, array, whole};
use crate::fused::column_sums::multiprocessors;
use crate::fused::team::Team;
use crate::launch::launch_light;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most rows of x. Above, [`matmul`](crate::matmul) is worth its tiles.
pub const MOST_ROWS: usize = 64;
/// Most rows of x where tensor cores take them: a prompt's, whose matrices lie where they are.
pub const MOST_ON_TENSOR_CORES: usize = 128;
/// Most matrices of a launch.
pub const MOST_MATRICES: usize = 8;

/// Most rows for which an [`Input`] that is not plain rows is worth it: every cube computes all of them again, and from
/// 3 rows on tensor cores may read plain ones.
pub const MOST_FOLDED: usize = 2;

/// Units of a cube.
pub(crate) use crate::pointwise::UNITS;
/// Most rows of a cube.
const TILE: usize = 8;
/// Bytes of the widest load.
const LOAD: usize = 16;
/// Bytes of a row of W that a cube has at least: a sector of memory.
const NARROWEST: usize = 32;
/// Columns of a cube that get narrower only where most of the multiprocessors would have no cube.
const NARROW: usize = 32;
/// Numbers in shared memory, at least: 16 KB, which every device has.
const FEWEST: usize = 4096;
/// Most rows of W that a cube requests at once.
const LONGEST: usize = 2048;

/// Sizes of one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// M, rows of x.
    pub rows: usize,
    /// K, columns of x and rows of each W_i.
    pub inner: usize,
}

/// Columns of one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// N_i.
    pub count: usize,
    /// Numbers from one row to the next, N_i or more.
    pub stride: usize,
}

/// Tensors of one product, of one type, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Args<'a> {
    /// Rows, or what they are made of.
    pub x: Input<'a>,
    /// The matrices, each of which begins at a multiple of 16 bytes.
    pub weights: &'a [(&'a Handle, Columns)],
    /// Added to every row.
    pub bias: Option<&'a Handle>,
}

/// How a product is split over cubes and units: compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    pub source: &'static str,
    /// Rows of x that a cube has: 1, 2, 4 or 8.
    pub tile: usize,
    /// Numbers of a vector.
    pub width: usize,
    /// Vectors side by side that a cube has.
    pub lanes: usize,
    /// Vectors that a unit requests at once.
    pub ahead: usize,
    /// Numbers in shared memory, f32, but for factors of heads.
    pub numbers: usize,
    /// Matrices side by side.
    pub matrices: usize,
    pub biased: bool,
    pub reading: Reading,
    /// Whether units of a plane add numbers up by shuffles.
    pub planes: bool,
}

/// Results of a launch.
#[derive(Debug, Clone)]
pub struct Output {
    /// y.
    pub y: Buffer,
    /// `[M, K]`, the sum that was normalized, where something was added.
    pub sum: Option<Buffer>,
}

impl Split {
    /// A fixed rule: nothing is timed.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        reading: Reading,
        matrices: &[Columns],
        dtype: StorageType,
    ) -> Self {
        let hardware = &client.properties().hardware;
        let most = (LOAD / dtype.size()).min(hardware.max_vector_size);
        let divides =
            |n: usize| move |x: &Columns| x.count.is_multiple_of(n) && x.stride.is_multiple_of(n);
        let fits = |n: &usize| *n <= most && matrices.iter().all(divides(*n));
        let width = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let tile = dims.rows.next_power_of_two().min(TILE);
        let units = multiprocessors(client);
        let narrowest = NARROWEST / (width * dtype.size());
        let fills = |lanes: &usize| {
            let columns = lanes * width;
            let cubes = cubes_across(matrices, columns) * dims.rows.div_ceil(tile);
            4 * cubes >= units * if columns > NARROW { 5 } else { 3 }
        };
        let memory = hardware.max_shared_memory_size;
        let split = |lanes| Self {
            source: SOURCE,
            tile,
            width,
            lanes,
            // Numbers of 16 bits take registers twice, as they come and as f32.
            ahead: if tile <= 2 && dtype.size() == 4 { 16 } else { 8 },
            numbers: FEWEST,
            matrices: matrices.len(),
            biased: false,
            reading,
            planes: Team::of(client, UNITS).planes,
        };
        // Narrow cubes have many groups, whose columns of x have to fit in shared memory.
        let fits = |lanes: &usize| split(*lanes).in_memory(memory).batches() > 0;
        let all = [32, 16, 8, 4, 2].into_iter().filter(|lanes| *lanes >= narrowest && fits(lanes));
        let lanes = all.clone().find(fills).or_else(|| all.clone().next_back()).unwrap_or(32);
        split(lanes).in_memory(memory)
    }

    /// With room for all sums of a cube at once, where a cube may have so many bytes of shared memory.
    fn in_memory(self, bytes: usize) -> Self {
        let sums = self.tile * self.width * self.line();
        let room = (bytes / 4).saturating_sub(self.reading.factors_of_heads(self.tile));
        Self { numbers: sums.min(room).max(FEWEST), ..self }
    }

    /// Bytes of shared memory, all that the kernel allocates. It holds rows of x, `[tile, span]`, and after
    /// the last product the sums that meet at once, `[joined, width, line]`; and factors of heads.
    fn shared_memory(&self) -> usize {
        4 * (self.numbers + self.reading.factors_of_heads(self.tile))
    }

    /// Columns of a cube.
    fn columns(&self) -> usize {
        self.lanes * self.width
    }

    /// Groups of units.
    fn groups(&self) -> usize {
        UNITS / self.lanes
    }

    /// Rows of W that a cube requests at once.
    fn batch(&self) -> usize {
        self.groups() * self.ahead
    }

    /// Batches whose columns of x are in shared memory at once.
    fn batches(&self) -> usize {
        self.numbers / (self.tile * self.batch())
    }

    /// Columns of x in shared memory, from one row to the next.
    fn span(&self) -> usize {
        self.batches() * self.batch()
    }

    /// A number of every unit in shared memory, and as many more as keep neighbouring columns of one
    /// group from lying in one bank.
    fn line(&self) -> usize {
        UNITS + self.lanes
    }

    /// How x lies in shared memory.
    fn shelf(&self, vector: usize) -> Shelf {
        let Self { tile, reading, planes, .. } = *self;
        // Rows lie one behind another.
        let span = self.span();
        Shelf { tile, span, group: span, line: tile * span, vector, reading, planes }
    }

    /// Rows whose sums meet at once: 1, 2, 4 or 8.
    fn joined(&self) -> usize {
        let room = self.numbers / (self.width * self.line());
        1 << room.min(self.tile).ilog2()
    }
}

/// Cubes of `each` columns of one matrix.
fn cubes_across(matrices: &[Columns], each: usize) -> usize {
    matrices.iter().map(|matrix| matrix.count.div_ceil(each)).sum()
}

/// Kernel of a product, and its compile-time values.
#[derive(Debug, Clone, Copy)]
enum Plan {
    Units(Split),
    TensorCores(Tiling),
}

impl Plan {
    /// Columns and rows of a cube.
    fn tile(&self) -> [usize; 2] {
        match self {
            Self::Units(split) => [split.columns(), split.tile],
            Self::TensorCores(tiling) => [tiling.columns(), tiling.rows],
        }
    }

    /// How x is read.
    fn reading(&self) -> Reading {
        match self {
            Self::Units(split) => split.reading,
            Self::TensorCores(_) => Reading::Rows,
        }
    }

    /// Cubes in x and in z.
    fn cubes(&self, dims: Dims, matrices: &[Columns]) -> [usize; 2] {
        let [columns, rows] = self.tile();
        [cubes_across(matrices, columns), dims.rows.div_ceil(rows)]
    }
}

/// A product that the device takes, checked and planned before its launch.
#[derive(Debug, Clone)]
pub struct Product {
    dims: Dims,
    matrices: Vec<Columns>,
    dtype: StorageType,
    plan: Plan,
}

impl Product {
    /// Plans for a device.
    ///
    /// # Errors
    /// [`Refusal`] names what is wrong.
    /// # Panics
    /// If heads of an input do not divide a row.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        reading: Reading,
        matrices: &[Columns],
        dtype: StorageType,
    ) -> Result<Self, Refusal> {
        let Dims { rows, inner } = dims;
        let columns: usize = matrices.iter().map(|matrix| matrix.count).sum();
        let any_empty = matrices.iter().any(|matrix| matrix.count == 0);
        let by_tensor_cores = match any_empty {
            // Tensor cores read rows as they lie in memory.
            false if reading == Reading::Rows => Tiling::choose(client, dims, matrices, dtype),
            _ => None,
        };
        let most = if by_tensor_cores.is_some() { MOST_ON_TENSOR_CORES } else { MOST_ROWS };
        if !(1..=most).contains(&rows) || inner == 0 || columns == 0 || any_empty {
            return Err(Refusal::Product { rows, inner, columns, most });
        }
        reading.check(inner)?;
        let (got, most) = (matrices.len(), MOST_MATRICES);
        if got > most {
            return Err(Refusal::TooLarge { what: "matrices side by side", got, most });
        }
        check_type(client, dtype)?;
        // Columns of x are counted up to whole batches.
        let counted = inner.next_multiple_of(LONGEST).saturating_mul(reading.parts() * rows);
        let stride = matrices.iter().map(|matrix| matrix.stride).max().unwrap_or(0);
        let got = inner.saturating_mul(stride).max(counted).max(rows.saturating_mul(columns));
        let most = u32::MAX as usize;
        if got > most {
            return Err(Refusal::TooLarge { what: "numbers in a tensor", got, most });
        }
        let by_units = || Plan::Units(Split::new(client, dims, reading, matrices, dtype));
        let plan = by_tensor_cores.map_or_else(by_units, Plan::TensorCores);
        Self { dims, matrices: matrices.to_vec(), dtype, plan }.checked(client)
    }

    /// This product on tensor cores, in a tiling of the caller's choice; `None` where they do not take it.
    ///
    /// # Errors
    /// [`Refusal`] names what is wrong.
    pub fn tiled<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        tiling: Tiling,
    ) -> Result<Option<Self>, Refusal> {
        let plain = self.plan.reading() == Reading::Rows;
        match plain && tiling.takes(client, self.dims, &self.matrices, self.dtype) {
            true => Self { plan: Plan::TensorCores(tiling), ..self }.checked(client).map(Some),
            false => Ok(None),
        }
    }

    /// This product by units, `lanes` vectors side by side in a cube and `ahead` requested at once, powers of two: for
    /// measurements. `None` where the device has no room for it.
    pub fn by_units<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        lanes: usize,
        ahead: usize,
    ) -> Option<Self> {
        let reading = self.plan.reading();
        if !lanes.is_power_of_two() || lanes > 32 || !(1..=16).contains(&ahead) {
            return None;
        }
        let split = Split::new(client, self.dims, reading, &self.matrices, self.dtype);
        let split = Split { lanes, ahead, ..split };
        let split = split.in_memory(client.properties().hardware.max_shared_memory_size);
        let fits = split.batch() <= LONGEST && split.batches() > 0;
        fits.then(|| Self { plan: Plan::Units(split), ..self }.checked(client).ok()).flatten()
    }

    /// The device has room for the plan.
    fn checked<R: Runtime>(self, client: &ComputeClient<R>) -> Result<Self, Refusal> {
        let hardware = &client.properties().hardware;
        let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
        if let Plan::Units(split) = &self.plan
            && (shared_memory < split.shared_memory() || units < UNITS as u32)
        {
            return Err(Refusal::Device { shared_memory, units });
        }
        let reading = self.plan.reading();
        // Those of x, each matrix, a bias, y and the sizes.
        let (got, most) =
            (reading.bindings() + self.matrices.len() + 3, hardware.max_bindings as usize);
        if reading != Reading::Rows && got > most {
            return Err(Refusal::TooLarge { what: "buffers of a kernel", got, most });
        }
        let [x, z] = self.plan.cubes(self.dims, &self.matrices);
        let [columns, rows] = self.plan.tile();
        let (most_x, _, most_z) = hardware.max_cube_count;
        for (what, got, most, each) in [("columns", x, most_x, columns), ("rows", z, most_z, rows)]
        {
            if got > most as usize {
                let most = most as usize * each;
                return Err(Refusal::TooLarge { what, got: got * each, most });
            }
        }
        Ok(self)
    }

    /// `x [W_1 W_2 ..] + b`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
    ///
    /// # Panics
    /// If there are not as many matrices as were planned, or x is read in another way.
    pub fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        x: Input<'_>,
        weights: &[&Handle],
        bias: Option<&Handle>,
    ) -> Output {
        let Self { dims, matrices, dtype, plan } = self;
        assert_eq!(weights.len(), matrices.len(), "a handle for each matrix");
        let Dims { rows, inner } = *dims;
        let columns = matrices.iter().map(|matrix| matrix.count).sum();
        let output = plan.reading().output(client, [rows, inner], columns, *dtype);
        let [across, deep] = plan.cubes(*dims, matrices);
        let cubes = CubeCount::Static(across as u32, 1, deep as u32);
        let sizes = SizesLaunch::new(rows as u32, inner as u32, columns as u32);
        let biased = bias.is_some();
        // A bias that is not there: any tensor of this type would do, and none is read.
        let bias = bias.map_or(array(weights[0], 1), |bias| array(bias, columns));
        let [each, _] = plan.tile();
        // SAFETY: rows and columns past the ends are cut off or repeat the last ones, so that all stays
        // within the sizes of `dims` and `matrices`, which the caller promises.
        #[allow(unsafe_code)]
        match *plan {
            Plan::Units(split) => unsafe {
                assert_eq!(x.reading(), split.reading, "x is read as it was planned");
                let mut sums = SequenceArg::new();
                let vector = x.vector(client, inner, *dtype);
                let all = rows * inner / vector;
                output.sum.iter().for_each(|sum| sums.push(array(&sum.handle, all)));
                launch_light!(
                    client,
                    cubes,
                    CubeDim::new_1d(UNITS as u32),
                    rows_by_matrices::RowsByMatrices<R>,
                    types: [F: *dtype], sizes: [N: split.width, X: vector],
                    arguments: [
                        x: Operands<rows_by_matrices::F, rows_by_matrices::X> =
                            OperandsLaunch::new(x.arrays([rows, inner], vector), bias),
                        all: Sequence<Matrix<rows_by_matrices::F, rows_by_matrices::N>> =
                            side_by_side(inner, weights, matrices, [each, 1]),
                        y: Array<rows_by_matrices::F> = whole(&output.y),
                        sums: Sequence<Array<Vector<rows_by_matrices::F, rows_by_matrices::X>>> = sums,
                        size: Sizes = sizes,
                    ],
                    comptime: [Split { biased, ..split }, vector, *dtype, split.width, vector],
                );
            },
            Plan::TensorCores(tiling) => unsafe {
                let x = x.rows().expect("x is read as it was planned");
                tensor_cores::rows_on_tensor_cores::launch_unchecked::<R>(
                    client,
                    cubes,
                    CubeDim::new_1d(tiling.units() as u32),
                    tensor_cores::RowsLaunch::new(array(x, rows * inner / PACKED), bias),
                    side_by_side(inner, weights, matrices, [each, PACKED]),
                    whole(&output.y),
                    sizes,
                    tensor_cores::Form::new(tiling, inner, matrices.len(), biased),
                    *dtype,
                    tiling.words(),
                );
            },
        }
        output
    }
}

/// Whether [`product`] takes this.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    matrices: &[Columns],
    dtype: StorageType,
) -> Result<(), Refusal> {
    Product::new(client, dims, Reading::Rows, matrices, dtype).map(drop)
}

/// `x [W_1 W_2 ..] + b`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
///
/// # Errors
/// As [`check`]; then nothing was launched.
/// # Panics
/// If heads of an input do not divide a row.
pub fn product<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    dtype: StorageType,
    args: Args<'_>,
) -> Result<Output, Refusal> {
    let (weights, matrices): (Vec<&Handle>, Vec<Columns>) = args.weights.iter().copied().unzip();
    let product = Product::new(client, dims, args.x.reading(), &matrices, dtype)?;
    Ok(product.launch(client, args.x, &weights, args.bias))
}

/// The matrices, of elements of `packed` numbers, and the places of each among columns and cubes of `each` columns.
fn side_by_side<F: Numeric, N: Size, R: Runtime>(
    inner: usize,
    weights: &[&Handle],
    matrices: &[Columns],
    [each, packed]: [usize; 2],
) -> SequenceArg<R, Matrix<F, N>> {
    let mut given = SequenceArg::new();
    let (mut cubes, mut columns) = (0, 0);
    for (weight, Columns { count, stride }) in weights.iter().zip(matrices) {
        given.push(MatrixLaunch::new(
            array(weight, ((inner - 1) * stride + count) / packed),
            *count as u32,
            *stride as u32,
            cubes as u32,
            columns as u32,
        ));
        cubes += count.div_ceil(each);
        columns += count;
    }
    given
}

/// Rows and what is added to them, shaped as the module says; `split` says whether the bias is read.
#[derive(CubeType, CubeLaunch)]
struct Operands<F: Float, X: Size> {
    x: InputArrays<F, X>,
    bias: Array<F>,
}

/// One matrix, and its place.
#[derive(CubeType, CubeLaunch)]
struct Matrix<F: Numeric, N: Size> {
    numbers: Array<Vector<F, N>>,
    /// N_i.
    columns: u32,
    /// Numbers from one row to the next.
    stride: u32,
    /// The first cube of its columns.
    first_cube: u32,
    /// Its first column in y.
    first_column: u32,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// M.
    rows: u32,
    /// K.
    inner: u32,
    /// N.
    columns: u32,
}

/// The columns of a cube, of one matrix.
#[derive(CubeType, Clone, Copy)]
struct CubeColumns {
    /// Place of the matrix.
    matrix: u32,
    /// Its first column in y.
    before: usize,
    /// The cube's first column of it.
    first: usize,
    /// N_i.
    count: usize,
    /// Numbers from one row of it to the next.
    stride: usize,
}

/// A unit's share of W: its lane's vector of columns, of the rows that its group is dealt.
#[derive(CubeType, Clone, Copy)]
struct WeightShare {
    /// Place of the matrix.
    matrix: u32,
    /// The unit's group, which is its first row too.
    group: usize,
    /// Place of the vector in a row, in vectors.
    column: usize,
    /// Vectors from one row to the next.
    stride: usize,
    /// The last row, K - 1.
    last: usize,
}

/// The kernel.
#[cube(launch_unchecked)]
fn rows_by_matrices<F: Float, N: Size, X: Size>(
    x: &Operands<F, X>,
    weights: &Sequence<Matrix<F, N>>,
    y: &mut Array<F>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    sizes: Sizes,
    #[comptime] split: Split,
    #[comptime] vector: usize,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _width: usize,
    #[define(X)] _of_x: usize,
) {
    let batch = comptime!(split.batch());
    let columns = cube_columns::<F, N>(weights, comptime!(split.columns()), split.matrices);
    let share = weight_share(&columns, sizes, split);
    let mut shared = SharedMemory::<f32>::new(comptime!(split.numbers));
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(split.tile));
    #[unroll]
    for m in 0..comptime!(split.tile) {
        sums[m] = Vector::<f32, N>::new(0.0f32);
    }
    let mut requested = Array::<Vector<F, N>>::new(comptime!(split.ahead));
    request_weights::<F, N>(&mut requested, weights, share.group, &share, split);
    let (tile, shelf) = comptime!((split.tile, split.shelf(vector)));
    let inner = sizes.inner as usize;
    let of = CubeRows { first: CUBE_POS_Z as usize * tile, rows: sizes.rows as usize, inner };
    let mut norms = input::norms::<F, X>(&mut shared, &x.x, of, shelf);

    let batches = share.last / batch + 1;
    let most = comptime!(split.batches());
    for slice in 0..(batches - 1) / most + 1 {
        let first = slice * most;
        let count = min(batches - first, most);
        let held = Held { first: first * batch, count: count * batch };
        input::load::<F, X>(&mut shared, &mut norms, &x.x, sum, of, held, shelf);
        sync_cube();
        for n in 0..count {
            multiply_add::<F, N>(&mut sums, &requested, &shared, n * batch + share.group, split);
            // The next batch is under way while this one's barriers are waited for.
            let next = first + n + 1;
            if next < batches {
                let row = next * batch + share.group;
                request_weights::<F, N>(&mut requested, weights, row, &share, split);
            }
        }
        sync_cube();
    }
    let factors = input::row_factors::<F, X>(&mut shared, &x.x, &norms, inner, shelf);
    #[unroll]
    for m in 0..tile {
        sums[m] = sums[m] * Vector::<f32, N>::new(factors[m]);
    }
    let to = Destination { columns, sizes };
    reduce_groups::<F, N>(&x.bias, y, &mut shared, &sums, to, split);
}

/// The columns of this cube.
#[cube]
fn cube_columns<F: Numeric, N: Size>(
    weights: &Sequence<Matrix<F, N>>,
    #[comptime] across: usize,
    #[comptime] matrices: usize,
) -> CubeColumns {
    let mut matrix = 0u32;
    let mut cubes = 0usize;
    let mut before = 0usize;
    let mut count = weights.index(0usize).columns as usize;
    let mut stride = weights.index(0usize).stride as usize;
    #[unroll]
    for n in 1..matrices {
        let next = weights.index(n);
        if CUBE_POS_X >= next.first_cube {
            matrix = comptime!(n as u32).runtime();
            cubes = next.first_cube as usize;
            before = next.first_column as usize;
            count = next.columns as usize;
            stride = next.stride as usize;
        }
    }
    let first = (CUBE_POS_X as usize - cubes) * across;
    CubeColumns { matrix, before, first, count, stride }
}

/// The share of this unit. Units past the last columns repeat these; their results are not used.
#[cube]
fn weight_share(columns: &CubeColumns, sizes: Sizes, #[comptime] split: Split) -> WeightShare {
    let width = comptime!(split.width);
    let group = UNIT_POS as usize / comptime!(split.lanes);
    let lane = UNIT_POS as usize % comptime!(split.lanes);
    let column = min(columns.first + lane * width, columns.count - width) / width;
    let (stride, last) = (columns.stride / width, sizes.inner as usize - 1);
    WeightShare { matrix: columns.matrix, group, column, stride, last }
}

/// This unit's vectors of one batch, `[ahead]`: those of every row that its group is dealt, from `row` on.
#[cube]
fn request_weights<F: Float, N: Size>(
    requested: &mut Array<Vector<F, N>>,
    weights: &Sequence<Matrix<F, N>>,
    row: usize,
    share: &WeightShare,
    #[comptime] split: Split,
) {
    if comptime!(split.matrices == 1) {
        request_rows::<F, N>(requested, &weights.index(0usize).numbers, row, share, split);
    } else {
        #[unroll]
        for n in 0..comptime!(split.matrices) {
            if share.matrix == comptime!(n as u32) {
                request_rows::<F, N>(requested, &weights.index(n).numbers, row, share, split);
            }
        }
    }
}

/// As [`request_weights`], of the share's own matrix.
#[cube]
fn request_rows<F: Float, N: Size>(
    requested: &mut Array<Vector<F, N>>,
    weight: &Array<Vector<F, N>>,
    row: usize,
    share: &WeightShare,
    #[comptime] split: Split,
) {
    #[unroll]
    for n in 0..comptime!(split.ahead) {
        let at = min(row + comptime!(n * split.groups()), share.last);
        requested[n] = weight[at * share.stride + share.column];
    }
}

/// Adds the products of one batch to the sums, `[tile]` vectors: `at` is the place of the batch's first
/// column of x in shared memory.
#[cube]
fn multiply_add<F: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    requested: &Array<Vector<F, N>>,
    x: &SharedMemory<f32>,
    at: usize,
    #[comptime] split: Split,
) {
    #[unroll]
    for n in 0..comptime!(split.ahead) {
        let w = Vector::<f32, N>::cast_from(requested[n]);
        #[unroll]
        for m in 0..comptime!(split.tile) {
            let value = x[at + comptime!(m * split.span() + n * split.groups())];
            sums[m] = sums[m] + Vector::<f32, N>::new(value) * w;
        }
    }
}

/// The part of y that a cube writes.
#[derive(CubeType, Clone, Copy)]
struct Destination {
    columns: CubeColumns,
    sizes: Sizes,
}

/// The sums of all groups, added up for as many rows at once as there is room for, plus the bias: y.
#[cube]
fn reduce_groups<F: Float, N: Size>(
    bias: &Array<F>,
    y: &mut Array<F>,
    shared: &mut SharedMemory<f32>,
    sums: &Array<Vector<f32, N>>,
    to: Destination,
    #[comptime] split: Split,
) {
    let width = comptime!(split.width);
    let lanes = comptime!(split.lanes);
    let line = comptime!(split.line());
    let across = comptime!(split.columns());
    let joined = comptime!(split.joined());
    let all = comptime!(joined * across);
    let rows = to.sizes.rows as usize;
    #[unroll]
    for part in 0..comptime!(split.tile / joined) {
        if comptime!(part > 0) {
            sync_cube();
        }
        #[unroll]
        for m in 0..joined {
            let sum = sums[comptime!(part * joined + m)];
            #[unroll]
            for l in 0..width {
                shared[UNIT_POS as usize + comptime!((m * width + l) * line)] = sum[l];
            }
        }
        sync_cube();
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(UNITS)) {
            let n = UNIT_POS as usize + comptime!(turn * UNITS);
            let c = n % across;
            let column = to.columns.first + c;
            let m = n / across + comptime!(part * joined);
            let row = CUBE_POS_Z as usize * comptime!(split.tile) + m;
            if n < all && row < rows && column < to.columns.count {
                let from = (n / across * width + c % width) * line + c / width;
                let mut sum = 0.0f32;
                for group in 0..comptime!(split.groups()) {
                    sum += shared[from + group * lanes];
                }
                let column = to.columns.before + column;
                if comptime!(split.biased) {
                    sum += f32::cast_from(bias[column]);
                }
                y[row * to.sizes.columns as usize + column] = F::cast_from(sum);
            }
        }
    }
}

#[cfg(test)]
#[path = "few_rows_tests.rs"]
pub(crate) mod tests;
