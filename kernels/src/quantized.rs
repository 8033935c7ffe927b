//! A few rows times quantized matrices side by side, `y = x [W_1^T W_2^T ..]`, and such a matrix as floats: the
//! linear layers of a model that only decodes, whose weights are read as they are kept.
//! ```text
//! W_nk = s_nj q_nk                             j = k / 32, a group; q: -127 to 127, or -7 to 7
//! y_mn = sum_j s_nj sum_(k in j) q_nk x_mk     in f32
//!
//! x:   [M, K]             F      M from 1 to 8, K a multiple of 32; or another `Input`
//! q_i: [N_i, K bits / 32] u32    1 to 8 of them
//! s_i: [N_i, K / 32]      f32
//! y:   [M, N]             F      N = N_1 + N_2 ..
//! ```
//! Of 8 bits a word has four numbers, the first in its low byte, as two's complements. Of 4 bits a group is four
//! words: byte b of all 16 has number b of the group in its low nibble and number 16 + b in its high one, plus 8.
//!
//! Work:   a unit has the same group of a few rows of W, which are `lanes` groups apart the next time; units that
//!         stand side by side read groups that lie side by side. A cube has all rows of x. Groups' sums meet in
//!         shared memory, in one order.
//! Bytes:  a unit requests its vectors of 16 bytes, 4 of 4 bits and 8 of 8, before x is in shared memory, and the
//!         next ones as soon as these are used up.
//! Floats: 2^23 + q is the float whose low bits are q, so that a number costs no conversion, of which a
//!         multiprocessor makes a quarter as many as it adds.
//! Cost:   K N (bits / 8 + 1 / 8) bytes, and about (3 + M) K N instructions: a number is made a float once for all
//!         rows of x.
//! Edges:  rows of W past N_i repeat the last one and are not kept; groups past K repeat the last one, times 0.

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::few_rows::UNITS;
use crate::few_rows::input::{self, CubeRows, InputArrays};
pub use crate::few_rows::{Dims, Input, MOST_MATRICES, Output, Reading};
use crate::fused::column_sums::multiprocessors;
use crate::pointwise::Source;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;
/// Most rows of x. Above, the matrix is worth dequantizing for a product of matrices.
pub const MOST_ROWS: usize = 8;

/// Words of a load.
const LOAD: usize = 4;
/// Numbers in shared memory: 16 KB, which every device has.
const NUMBERS: usize = 4096;
/// Bits of 2^23, whose last place is 1.
const ONES: u32 = 0x4b00_0000;
/// The float of [`ONES`].
const BASE: f32 = 8_388_608.0;

/// Bits of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bits {
    /// Two to a byte.
    Four,
    /// One.
    Eight,
}

impl Bits {
    /// How many.
    pub const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Words of a group.
    pub const fn words(self) -> usize {
        GROUP * self.count() / 32
    }

    /// Loads of a group.
    const fn loads(self) -> usize {
        self.words() / LOAD
    }

    /// The bits of 0, once the sign of a number of 8 bits is turned.
    const fn zero(self) -> f32 {
        match self {
            Self::Four => 8.0,
            Self::Eight => 128.0,
        }
    }
}

/// One matrix, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// q.
    pub values: &'a Handle,
    /// s.
    pub scales: &'a Handle,
    /// N_i.
    pub rows: usize,
}

/// How a product is split over cubes and units: compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Split {
    source: &'static str,
    bits: Bits,
    /// Rows of x: 1, 2, 4 or 8.
    tile: usize,
    /// Units that share a row of W.
    lanes: usize,
    /// Matrices side by side.
    matrices: usize,
    reading: Reading,
}

impl Split {
    /// A fixed rule: nothing is timed.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        reading: Reading,
        bits: Bits,
        rows: &[usize],
    ) -> Self {
        let enough = multiprocessors(client) * 3 / 4;
        let tile = dims.rows.next_power_of_two();
        let (source, matrices) = (SOURCE, rows.len());
        let split = |lanes| Self { source, bits, tile, lanes, matrices, reading };
        let most = (dims.inner / GROUP).next_power_of_two().min(NUMBERS / (GROUP * tile));
        let fills = |lanes: &usize| *lanes >= most || split(*lanes).cubes(rows) >= enough;
        split([16, 32, 64].into_iter().find(fills).unwrap_or(128))
    }

    /// Rows of W that a unit has: fewer where it has sums of more rows of x.
    fn deep(&self) -> usize {
        (8 / self.tile).min(4)
    }

    /// Rows of W that a cube has.
    fn across(&self) -> usize {
        UNITS / self.lanes * self.deep()
    }

    /// Cubes of all matrices.
    fn cubes(&self, rows: &[usize]) -> usize {
        rows.iter().map(|rows| rows.div_ceil(self.across())).sum()
    }

    /// Groups of x that shared memory holds at once: `[32, tile, span]`.
    fn span(&self) -> usize {
        NUMBERS / (GROUP * self.tile)
    }

    /// Sums of a unit.
    fn sums(&self) -> usize {
        self.deep() * self.tile
    }

    /// Loads of a unit for one group.
    fn ahead(&self) -> usize {
        self.deep() * self.bits.loads()
    }
}

/// A product that the device takes, checked and planned before its launch.
#[derive(Debug, Clone)]
pub struct Product {
    dims: Dims,
    /// N_i.
    rows: Vec<usize>,
    dtype: StorageType,
    split: Split,
}

impl Product {
    /// Plans for a device: matrices of `rows` rows each.
    ///
    /// # Errors
    /// [`Refusal`] names what is wrong.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        reading: Reading,
        (bits, rows): (Bits, &[usize]),
        dtype: StorageType,
    ) -> Result<Self, Refusal> {
        let columns: usize = rows.iter().sum();
        let empty = dims.inner == 0 || rows.contains(&0) || columns == 0;
        if !(1..=MOST_ROWS).contains(&dims.rows) || empty {
            let Dims { rows, inner } = dims;
            return Err(Refusal::Product { rows, inner, columns, most: MOST_ROWS });
        }
        let (got, most) = (rows.len(), MOST_MATRICES);
        if got > most {
            return Err(Refusal::TooLarge { what: "matrices side by side", got, most });
        }
        let widest = rows.iter().copied().max().unwrap_or(0);
        check_matrix(client, [widest, dims.inner.saturating_mul(reading.parts())], dtype)?;
        // Those of x, numbers and scales of each matrix, y and the sizes.
        let got = reading.bindings() + 2 * rows.len() + 2;
        let most = client.properties().hardware.max_bindings as usize;
        if reading != Reading::Rows && got > most {
            return Err(Refusal::TooLarge { what: "buffers of a kernel", got, most });
        }
        let split = Split::new(client, dims, reading, bits, rows);
        let got = split.cubes(rows);
        let most = client.properties().hardware.max_cube_count.0 as usize;
        match got > most {
            true => Err(Refusal::TooLarge { what: "cubes", got, most }),
            false => Ok(Self { dims, rows: rows.to_vec(), dtype, split }),
        }
    }

    /// This product with so many units for a row of W, a power of two: for measurements. `None` where they are more
    /// than a cube has or than groups that wait in shared memory at once, or fewer than a unit has sums.
    pub fn in_lanes(self, lanes: usize) -> Option<Self> {
        let most = UNITS.min(self.split.span());
        let takes = lanes.is_power_of_two() && (self.split.sums()..=most).contains(&lanes);
        takes.then_some(Self { split: Split { lanes, ..self.split }, ..self })
    }

    /// `x [W_1^T W_2^T ..]`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
    ///
    /// # Panics
    /// If matrices are not as planned, or x is read in another way.
    pub fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        x: Input<'_>,
        matrices: &[Matrix<'_>],
    ) -> Output {
        let Self { dims, rows, dtype, split } = self;
        assert!(matrices.iter().map(|matrix| matrix.rows).eq(rows.iter().copied()), "as planned");
        assert_eq!(x.reading(), split.reading, "x is read as it was planned");
        let (size, columns) = ([dims.rows, dims.inner], rows.iter().sum());
        let y = buffer(client, &[dims.rows, columns], *dtype);
        let sum = split.reading.sum(client, size, *dtype);
        let mut sums = SequenceArg::new();
        sum.iter().for_each(|sum| sums.push(whole(sum)));
        let groups = dims.inner / GROUP;
        // SAFETY: rows and groups past the ends repeat the last ones, so that all stays within the sizes of `dims`
        // and `matrices`, which the caller promises.
        #[allow(unsafe_code)]
        unsafe {
            rows_by_groups::launch_unchecked::<R>(
                client,
                CubeCount::Static(split.cubes(rows) as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                x.arrays(size),
                side_by_side(groups, matrices, *split),
                whole(&y),
                sums,
                SizesLaunch::new(dims.rows as u32, groups as u32, columns as u32),
                *split,
                *dtype,
                LOAD,
            );
        }
        Output { y, sum }
    }
}

/// Whether [`product`] takes matrices of `rows` rows each.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    bits: Bits,
    rows: &[usize],
    dtype: StorageType,
) -> Result<(), Refusal> {
    Product::new(client, dims, Reading::Rows, (bits, rows), dtype).map(drop)
}

/// Checks of both kernels: a matrix `[N, K]`, the type of numbers beside it, and the device.
fn check_matrix<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, inner]: [usize; 2],
    dtype: StorageType,
) -> Result<(), Refusal> {
    if !inner.is_multiple_of(GROUP) {
        return Err(Refusal::Groups { inner, group: GROUP });
    }
    check_type(client, dtype)?;
    let (got, most) = (inner.saturating_mul(rows.max(MOST_ROWS)), u32::MAX as usize);
    if got > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got, most });
    }
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    match shared_memory < 4 * NUMBERS || units < UNITS as u32 || hardware.max_vector_size < LOAD {
        true => Err(Refusal::Device { shared_memory, units }),
        false => Ok(()),
    }
}

/// `x [W_1^T W_2^T ..]`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn product<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    dtype: StorageType,
    x: Input<'_>,
    (bits, matrices): (Bits, &[Matrix<'_>]),
) -> Result<Output, Refusal> {
    let rows: Vec<usize> = matrices.iter().map(|matrix| matrix.rows).collect();
    let product = Product::new(client, dims, x.reading(), (bits, &rows), dtype)?;
    Ok(product.launch(client, x, matrices))
}

/// The matrices, and the places of each among cubes and columns.
fn side_by_side<N: Size, R: Runtime>(
    groups: usize,
    matrices: &[Matrix<'_>],
    split: Split,
) -> SequenceArg<R, Given<N>> {
    let mut given = SequenceArg::new();
    let (mut cubes, mut columns) = (0, 0);
    for matrix in matrices {
        let all = groups * matrix.rows;
        given.push(GivenLaunch::new(
            array(matrix.values, all * split.bits.words()),
            array(matrix.scales, all),
            matrix.rows as u32,
            cubes as u32,
            columns as u32,
        ));
        cubes += matrix.rows.div_ceil(split.across());
        columns += matrix.rows;
    }
    given
}

/// One matrix, and its place.
#[derive(CubeType, CubeLaunch)]
struct Given<N: Size> {
    values: Array<Vector<u32, N>>,
    scales: Array<f32>,
    /// N_i.
    rows: u32,
    /// The first cube of its rows.
    first_cube: u32,
    /// Its first column in y.
    first_column: u32,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// M.
    rows: u32,
    /// K / 32.
    groups: u32,
    /// N.
    columns: u32,
}

/// A unit's share of W.
#[derive(CubeType, Clone, Copy)]
struct Share {
    /// Place of the matrix.
    matrix: u32,
    /// Its first column in y.
    before: usize,
    /// Its last row, N_i - 1.
    last: usize,
    /// The unit's first row of it.
    row: usize,
    /// The unit's first group.
    lane: usize,
}

/// Words and scales of one group that a unit reads, `[deep]` rows of W.
#[derive(CubeType)]
struct Requested<N: Size> {
    values: Array<Vector<u32, N>>,
    scales: Array<f32>,
}

/// The kernel.
#[cube(launch_unchecked)]
fn rows_by_groups<F: Float, N: Size>(
    x: &InputArrays<F>,
    matrices: &Sequence<Given<N>>,
    y: &mut Array<F>,
    sum: &mut Sequence<Array<F>>,
    sizes: Sizes,
    #[comptime] split: Split,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _load: usize,
) {
    let lanes = comptime!(split.lanes);
    let span = comptime!(split.span());
    let groups = sizes.groups as usize;
    let share = share::<N>(matrices, split);
    let mut shared = SharedMemory::<f32>::new(NUMBERS);
    let mut sums = Array::<f32>::new(comptime!(split.sums()));
    #[unroll]
    for n in 0..comptime!(split.sums()) {
        sums[n] = 0.0f32;
    }
    let mut requested = Requested::<N> {
        values: Array::new(comptime!(split.ahead())),
        scales: Array::new(comptime!(split.deep())),
    };
    request::<N>(&mut requested, matrices, share.lane, &share, sizes, split);
    let (tile, reading) = comptime!((split.tile, split.reading));
    let of = CubeRows { first: 0, rows: sizes.rows as usize, inner: groups * GROUP };
    let factors = input::row_factors::<F>(&mut shared, x, sum, of, tile, reading);

    for slice in 0..(groups - 1) / span + 1 {
        let first = slice * span;
        let count = min(groups - first, span);
        load_x::<F>(&mut shared, x, first, sizes, split);
        sync_cube();
        for turn in 0..(count - 1) / lanes + 1 {
            let group = turn * lanes + share.lane;
            multiply_add::<N>(&mut sums, &requested, &shared, group, split);
            // The next groups are under way while barriers are waited for.
            let next = first + group + lanes;
            request::<N>(&mut requested, matrices, next, &share, sizes, split);
        }
        sync_cube();
    }
    #[unroll]
    for n in 0..comptime!(split.sums()) {
        sums[n] = sums[n] * factors[comptime!(n % tile)];
    }
    write_sums::<F>(y, &mut shared, &sums, &share, sizes, split);
}

/// The share of this unit.
#[cube]
fn share<N: Size>(matrices: &Sequence<Given<N>>, #[comptime] split: Split) -> Share {
    let mut matrix = 0u32;
    let mut cubes = 0usize;
    let mut before = 0usize;
    let mut rows = matrices.index(0usize).rows as usize;
    #[unroll]
    for n in 1..comptime!(split.matrices) {
        let next = matrices.index(n);
        if CUBE_POS_X >= next.first_cube {
            matrix = comptime!(n as u32).runtime();
            cubes = next.first_cube as usize;
            before = next.first_column as usize;
            rows = next.rows as usize;
        }
    }
    let lanes = comptime!(split.lanes);
    let set = UNIT_POS as usize / lanes;
    let lane = UNIT_POS as usize % lanes;
    let first = (CUBE_POS_X as usize - cubes) * comptime!(split.across());
    let row = first + set * comptime!(split.deep());
    Share { matrix, before, last: rows - 1, row, lane }
}

/// Requests one group of the unit's rows.
#[cube]
fn request<N: Size>(
    requested: &mut Requested<N>,
    matrices: &Sequence<Given<N>>,
    group: usize,
    share: &Share,
    sizes: Sizes,
    #[comptime] split: Split,
) {
    if comptime!(split.matrices == 1) {
        request_rows::<N>(requested, matrices.index(0usize), group, share, sizes, split);
    } else {
        #[unroll]
        for n in 0..comptime!(split.matrices) {
            if share.matrix == comptime!(n as u32) {
                request_rows::<N>(requested, matrices.index(n), group, share, sizes, split);
            }
        }
    }
}

/// As [`request`], of the share's own matrix.
#[cube]
fn request_rows<N: Size>(
    requested: &mut Requested<N>,
    matrix: &Given<N>,
    group: usize,
    share: &Share,
    sizes: Sizes,
    #[comptime] split: Split,
) {
    let loads = comptime!(split.bits.loads());
    let groups = sizes.groups as usize;
    let group = min(group, groups - 1);
    #[unroll]
    for n in 0..comptime!(split.deep()) {
        let at = min(share.row + n, share.last) * groups + group;
        #[unroll]
        for load in 0..loads {
            requested.values[comptime!(n * loads + load)] = matrix.values[at * loads + load];
        }
        requested.scales[n] = matrix.scales[at];
    }
}

/// Fills shared memory with groups of x from `first` on, `[32, tile, span]`, and zeros past the ends: neighbouring
/// units find the same number of neighbouring groups in neighbouring banks.
#[cube]
fn load_x<F: Float>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F>,
    first: usize,
    sizes: Sizes,
    #[comptime] split: Split,
) {
    let line = comptime!(split.span() * GROUP);
    let inner = sizes.groups as usize * GROUP;
    let rows = sizes.rows as usize;
    #[unroll]
    for turn in 0..comptime!(NUMBERS / UNITS) {
        let at = UNIT_POS as usize + comptime!(turn * UNITS);
        let m = at / line;
        let k = first * GROUP + at % line;
        let (m_read, k_read) = (min(m, rows - 1), min(k, inner - 1));
        let value = input::number::<F>(x, m_read, k_read, inner, split.reading);
        let group = at % line / GROUP;
        let to = at % GROUP * comptime!(split.tile * split.span()) + m * comptime!(split.span());
        shared[to + group] = select(m < rows, select(k < inner, value, 0.0f32), 0.0f32);
    }
}

/// Adds the products of one group to the sums, `[deep, tile]`.
#[cube]
fn multiply_add<N: Size>(
    sums: &mut Array<f32>,
    requested: &Requested<N>,
    x: &SharedMemory<f32>,
    group: usize,
    #[comptime] split: Split,
) {
    let (deep, tile, bits) = comptime!((split.deep(), split.tile, split.bits));
    let mut parts = Array::<f32>::new(comptime!(split.sums()));
    #[unroll]
    for n in 0..comptime!(split.sums()) {
        parts[n] = 0.0f32;
    }
    #[unroll]
    for word in 0..comptime!(bits.words()) {
        #[unroll]
        for part in 0..comptime!(32 / bits.count()) {
            let i = comptime!(place(bits, word, part));
            #[unroll]
            for n in 0..deep {
                let at = comptime!(n * bits.loads() + word / LOAD);
                let q = number(requested.values[at][comptime!(word % LOAD)], part, bits);
                #[unroll]
                for m in 0..tile {
                    let x = x[group + comptime!((i * tile + m) * split.span())];
                    parts[comptime!(n * tile + m)] += q * x;
                }
            }
        }
    }
    #[unroll]
    for n in 0..deep {
        #[unroll]
        for m in 0..tile {
            let at = comptime!(n * tile + m);
            sums[at] += requested.scales[n] * parts[at];
        }
    }
}

/// Place in its group of part `part` of word `word`; the parts of 4 bits are nibbles, low ones first.
fn place(bits: Bits, word: usize, part: usize) -> usize {
    match bits {
        Bits::Eight => 4 * word + part,
        Bits::Four => 4 * word + part / 2 + GROUP / 2 * (part % 2),
    }
}

/// Part `part` of a word.
#[cube]
fn number(word: u32, #[comptime] part: usize, #[comptime] bits: Bits) -> f32 {
    // The sign of a byte turned, it counts from -128.
    let word = if comptime!(bits == Bits::Eight) { word ^ 0x8080_8080u32 } else { word };
    let shift = comptime!((part * bits.count()) as u32);
    let mask = comptime!((1u32 << bits.count()) - 1);
    f32::reinterpret(((word >> shift) & mask) | ONES) - comptime!(BASE + bits.zero())
}

/// Adds the sums of the units that share a row of W up: y.
#[cube]
fn write_sums<F: Float>(
    y: &mut Array<F>,
    shared: &mut SharedMemory<f32>,
    sums: &Array<f32>,
    share: &Share,
    sizes: Sizes,
    #[comptime] split: Split,
) {
    let (lanes, tile) = comptime!((split.lanes, split.tile));
    let unit = UNIT_POS as usize;
    #[unroll]
    for n in 0..comptime!(split.sums()) {
        shared[unit + comptime!(n * UNITS)] = sums[n];
    }
    sync_cube();
    #[unroll]
    for level in 1..comptime!(lanes.ilog2() + 1) {
        let half = comptime!(lanes >> level);
        if share.lane < half {
            #[unroll]
            for n in 0..comptime!(split.sums()) {
                let at = unit + comptime!(n * UNITS);
                shared[at] = shared[at] + shared[at + half];
            }
        }
        sync_cube();
    }
    // The lanes of a row deal its sums out.
    if share.lane < comptime!(split.sums()) {
        let n = share.lane / tile;
        let m = share.lane % tile;
        let row = share.row + n;
        if row <= share.last && m < sizes.rows as usize {
            let sum = shared[share.lane * UNITS + unit - share.lane];
            y[m * sizes.columns as usize + share.before + row] = F::cast_from(sum);
        }
    }
}

/// A matrix as floats of type `dtype`, `[N, K]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    inner: usize,
    dtype: StorageType,
    bits: Bits,
    matrix: Matrix<'_>,
) -> Result<Buffer, Refusal> {
    check_matrix(client, [matrix.rows, inner], dtype)?;
    let groups = matrix.rows * inner / GROUP;
    if groups == 0 {
        let (rows, columns, most) = (0, matrix.rows, MOST_ROWS);
        return Err(Refusal::Product { rows, inner, columns, most });
    }
    let floats = buffer(client, &[matrix.rows, inner], dtype);
    let words = groups * bits.words();
    let most = client.properties().hardware.max_cube_count.0 as usize;
    let cubes = words.div_ceil(UNITS).min(most);
    // SAFETY: the kernel ends at the matrix's last word, and the caller promises its size.
    #[allow(unsafe_code)]
    unsafe {
        words_as_floats::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(matrix.values, words),
            array(matrix.scales, groups),
            whole(&floats),
            words as u32,
            (cubes * UNITS) as u32,
            Source(SOURCE),
            bits,
            dtype,
        );
    }
    Ok(floats)
}

/// The kernel of [`dequantize`]: a unit has every `units`th word.
#[cube(launch_unchecked)]
fn words_as_floats<F: Float>(
    values: &Array<u32>,
    scales: &Array<f32>,
    floats: &mut Array<F>,
    words: u32,
    units: u32,
    #[comptime] _source: Source,
    #[comptime] bits: Bits,
    #[define(F)] _dtype: StorageType,
) {
    let each = comptime!(bits.words());
    let first = ABSOLUTE_POS;
    if first < words as usize {
        for turn in 0..(words as usize - 1 - first) / units as usize + 1 {
            let at = first + turn * units as usize;
            let (word, scale) = (values[at], scales[at / each]);
            let to = at / each * GROUP + at % each * 4;
            #[unroll]
            for part in 0..comptime!(32 / bits.count()) {
                let value = scale * number(word, part, bits);
                floats[to + comptime!(place(bits, 0, part))] = F::cast_from(value);
            }
        }
    }
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
