//! A few rows times quantized matrices side by side, and narrow ones of floats behind them,
//! `y = x [W_1^T W_2^T .. U_1 ..]`; and a quantized matrix, or rows of it, as floats: the linear layers of a model that only decodes,
//! whose weights are read as they are kept.
//! ```text
//! W_nk = s_nj q_nk                             j = k / 32, a group; q: -127 to 127, or -7 to 7
//! y_mn = sum_j s_nj sum_(k in j) q_nk x_mk     in f32
//!
//! x:   [M, K]          F      M from 1 to 8; or another `Input`
//! q_i: [N_i, J bits]   u32    1 to 8 of them, J = K / 32 rounded up
//! s_i: [N_i, J]        f32
//! U_i: [K, C_i]        F      C_i up to 64; 0 to 7 of them, 8 matrices in all
//! y:   [M, N]          F      N = N_1 + N_2 .. + C_1 ..
//! ```
//! A row's last group has zeros behind its last number. Of 8 bits a word has four numbers, the first in its low byte, as two's complements. Of 4 bits a group is four
//! words: byte b of all 16 has number b of the group in its low nibble and number 16 + b in its high one, plus 8.
//!
//! Work:   a unit has the same group of `deep` rows of W, which are `lanes` groups apart the next time; units that
//!         stand side by side read groups that lie side by side. A cube has all rows of x. Groups' sums meet in
//!         plane shuffles, or in shared memory, in one order. Cubes behind those have `deep` columns of a U each, whose
//!         rows all units deal out among them.
//! Bytes:  a unit requests vectors of 16 bytes, those of `ahead` groups of its rows, before x is in shared memory, and
//!         the next ones as soon as these are used up.
//! Floats: 2^23 + n is the float whose mantissa is n, so that a number costs no conversion, of which a multiprocessor
//!         makes a quarter as many as it adds. It costs no shift either: q stays where it stands in its half of the
//!         word, as q times a power of two, and products of each power have a sum of their own. What a number has in
//!         excess comes off it, which is exact; off a group's sum, times the sum of its x, it would cost bits.
//! Memory: groups of x lie a number more than 32 apart, where a cube may have 17 KB, or 33 of long rows: units that write one group, and
//!         units that read one number of neighbouring groups, have banks of their own.
//! Cost:   K N (bits / 8 + 1 / 8) bytes, and about (2 + M) K N instructions: a number is made a float once for all
//!         rows of x.
//! Edges:  rows of W past N_i repeat the last one and are not kept; groups past K repeat the last one, times 0.

mod kernel;

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::few_rows::UNITS;
use crate::few_rows::input::{InputArrays, Shelf};
pub use crate::few_rows::{Columns, Dims, Input, MOST_MATRICES, Output, Reading};
use crate::fused::column_sums::multiprocessors;
use crate::fused::embedding::{check_ids, index_of};
use crate::fused::team::Team;
use crate::launch::launch_light;
use crate::pointwise::Source;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernel::{
    All, AllLaunch, NarrowLaunch, Place, PlaceLaunch, QuantizedLaunch, Sizes, SizesLaunch, number,
    number_of_group, rows_by_groups,
};

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;
/// Most rows of x. Above, the matrix is worth dequantizing for a product of matrices.
pub const MOST_ROWS: usize = 8;
/// Most columns of a matrix of floats, whose cubes read single numbers.
pub const MOST_COLUMNS: usize = 64;

/// Words of a load.
const LOAD: usize = 4;
/// Numbers of x in shared memory: 16 KB, which every device has.
const NUMBERS: usize = 4096;
/// As many where a device has room for them and rows are so long: each turn of a cube waits for its x.
const MORE_NUMBERS: usize = 2 * NUMBERS;

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

    /// Numbers in half a word.
    const fn in_half(self) -> usize {
        16 / self.count()
    }

    /// The float whose last bits of the mantissa are whole numbers.
    const BASE: f32 = (1u32 << 23) as f32;

    /// The bits of part `part` of a word in its half.
    const fn mask(self, part: usize) -> u32 {
        ((1 << self.count()) - 1) << (part % self.in_half() * self.count())
    }

    /// Excess of a part's float: the base, and half of the part's range, from which it counts.
    const fn excess(self, part: usize) -> f32 {
        let half = 1u32 << (self.count() - 1);
        Self::BASE + (half << (part % self.in_half() * self.count())) as f32
    }

    /// Unit that part `part` of a word counts in: the kernel's number times this is q.
    const fn unit(self, part: usize) -> f32 {
        1.0 / (1u32 << (part % self.in_half() * self.count())) as f32
    }
}

/// One matrix, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// q, `[N_i, J bits]`.
    pub values: &'a Handle,
    /// s.
    pub scales: &'a Handle,
    /// N_i.
    pub rows: usize,
}

/// One matrix of floats, of the type of x.
#[derive(Debug, Clone, Copy)]
pub struct Floats<'a> {
    /// U.
    pub numbers: &'a Handle,
    /// C_i, and how its rows lie.
    pub columns: Columns,
}

/// The matrices of a product, in the order of their columns.
#[derive(Debug, Clone, Copy)]
pub struct Matrices<'a> {
    /// Bits of all that are quantized.
    pub bits: Bits,
    /// One at least.
    pub quantized: &'a [Matrix<'a>],
    /// Behind them.
    pub floats: &'a [Floats<'a>],
}

/// Sizes of [`Matrices`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// Bits of all that are quantized.
    pub bits: Bits,
    /// N_i.
    pub rows: Vec<usize>,
    /// C_i, and how their rows lie.
    pub floats: Vec<Columns>,
}

impl Matrices<'_> {
    /// Their sizes.
    pub fn form(&self) -> Form {
        Form {
            bits: self.bits,
            rows: self.quantized.iter().map(|matrix| matrix.rows).collect(),
            floats: self.floats.iter().map(|floats| floats.columns).collect(),
        }
    }
}

impl Form {
    /// Whether these are their sizes. A launch asks for every token, so nothing is allocated.
    fn is_of(&self, matrices: Matrices<'_>) -> bool {
        let rows = matrices.quantized.iter().map(|matrix| matrix.rows);
        let floats = matrices.floats.iter().map(|floats| floats.columns);
        self.bits == matrices.bits
            && rows.eq(self.rows.iter().copied())
            && floats.eq(self.floats.iter().copied())
    }

    /// N.
    fn all_columns(&self) -> usize {
        self.rows.iter().copied().chain(self.columns()).sum()
    }

    /// C_i.
    fn columns(&self) -> impl Iterator<Item = usize> {
        self.floats.iter().map(|floats| floats.count)
    }
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
    /// Rows of W that a unit has.
    deep: usize,
    /// Groups of them that a unit requests at once.
    ahead: usize,
    /// Numbers of x in shared memory.
    room: usize,
    /// Whether shared memory has room for a number more behind each group of x.
    padded: bool,
    /// Whether units of a plane add their sums up by shuffles.
    planes: bool,
    /// Quantized matrices side by side.
    matrices: usize,
    /// Matrices of floats behind them.
    floats: usize,
    reading: Reading,
}

impl Split {
    /// A fixed rule: nothing is timed.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        reading: Reading,
        form: &Form,
    ) -> Self {
        let enough = multiprocessors(client) * 3 / 4;
        let tile = dims.rows.next_power_of_two();
        let memory = client.properties().hardware.max_shared_memory_size;
        let split = Self {
            source: SOURCE,
            bits: form.bits,
            tile,
            lanes: 16,
            // Fewer where a unit has sums of more rows of x; of one row fewer for twice as many cubes.
            deep: [2, 4, 2, 1][tile.ilog2() as usize],
            ahead: 1,
            room: if tile * dims.inner > NUMBERS { MORE_NUMBERS } else { NUMBERS },
            padded: true,
            planes: Team::of(client, UNITS).planes,
            matrices: form.rows.len(),
            floats: form.floats.len(),
            reading,
        };
        let least = Self { room: NUMBERS, ..split };
        let split = if split.shared_memory() <= memory { split } else { least };
        let split = Self { padded: split.shared_memory() <= memory, ..split };
        let most = groups(dims.inner).next_power_of_two().min(split.span());
        let fills =
            |lanes: &usize| *lanes >= most || split.in_lanes(*lanes, most).cubes(form) >= enough;
        split.in_lanes([16, 32, 64].into_iter().find(fills).unwrap_or(128), most)
    }

    /// With so many units to a row of W, of rows of up to `most` groups: a unit of few rows requests two groups at once,
    /// where there are two.
    fn in_lanes(self, lanes: usize, most: usize) -> Self {
        let two = self.tile == 1 && 2 * lanes <= most;
        Self { lanes, ahead: if two { 2 } else { 1 }, ..self }
    }

    /// Rows of W that a cube has.
    fn across(&self) -> usize {
        UNITS / self.lanes * self.deep
    }

    /// Cubes of all quantized matrices.
    fn cubes(&self, form: &Form) -> usize {
        form.rows.iter().map(|rows| rows.div_ceil(self.across())).sum()
    }

    /// Cubes of all matrices of floats.
    fn cubes_of_floats(&self, form: &Form) -> usize {
        form.columns().map(|columns| columns.div_ceil(self.deep)).sum()
    }

    /// Groups of x that shared memory holds at once.
    fn span(&self) -> usize {
        self.room / (GROUP * self.tile)
    }

    /// Numbers from one group of x to the next: `[tile, 32]`, and what is behind them.
    fn line(&self) -> usize {
        self.tile * GROUP + usize::from(self.padded)
    }

    /// Numbers in shared memory, but for the factors of heads. It holds groups of x, `[span, line]`, and after the last
    /// product the sums that meet.
    fn numbers(&self) -> usize {
        self.span() * self.line()
    }

    /// How x lies in shared memory.
    fn shelf(&self, vector: usize) -> Shelf {
        let Self { tile, reading, planes, .. } = *self;
        let (span, line) = (self.span() * GROUP, self.line());
        Shelf { tile, span, group: GROUP, line, vector, reading, planes }
    }

    /// Bytes of shared memory, all that the kernel allocates.
    fn shared_memory(&self) -> usize {
        4 * (self.numbers() + self.reading.factors_of_heads(self.tile))
    }

    /// Sums of a unit.
    fn sums(&self) -> usize {
        self.deep * self.tile
    }

    /// Groups that all units of a row request at once.
    fn step(&self) -> usize {
        self.lanes * self.ahead
    }

    /// The kernel has room for it: whole steps among the groups of x, a place for each sum, and units that write them.
    fn fits(&self) -> bool {
        let all = [self.lanes, self.deep, self.ahead];
        all.iter().all(|n| n.is_power_of_two())
            && self.lanes <= UNITS
            && self.span().is_multiple_of(self.step())
            && self.sums() <= self.lanes
            && self.sums() * UNITS <= self.numbers()
    }
}

/// A product that the device takes, checked and planned before its launch.
#[derive(Debug, Clone)]
pub struct Product {
    dims: Dims,
    form: Form,
    dtype: StorageType,
    split: Split,
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
        form: Form,
        dtype: StorageType,
    ) -> Result<Self, Refusal> {
        let (rows, columns) = (&form.rows, form.all_columns());
        let nothing = rows.contains(&0) || form.columns().any(|columns| columns == 0);
        let empty = dims.inner == 0 || rows.is_empty() || nothing;
        if !(1..=MOST_ROWS).contains(&dims.rows) || empty {
            let Dims { rows, inner } = dims;
            return Err(Refusal::Product { rows, inner, columns, most: MOST_ROWS });
        }
        reading.check(dims.inner)?;
        for (what, got, most) in [
            ("matrices side by side", rows.len() + form.floats.len(), MOST_MATRICES),
            ("columns of a matrix of floats", form.columns().max().unwrap_or(0), MOST_COLUMNS),
        ] {
            if got > most {
                return Err(Refusal::TooLarge { what, got, most });
            }
        }
        let strides = form.floats.iter().map(|floats| floats.stride);
        let widest = rows.iter().copied().chain(strides).max().unwrap_or(0);
        check_matrix(client, [widest, dims.inner.saturating_mul(reading.parts())], dtype)?;
        // Those of x, numbers and scales of each matrix, y and the sizes.
        let got = reading.bindings() + 2 * rows.len() + form.floats.len() + 2;
        let most = client.properties().hardware.max_bindings as usize;
        let plain = reading == Reading::Rows && form.floats.is_empty();
        if !plain && got > most {
            return Err(Refusal::TooLarge { what: "buffers of a kernel", got, most });
        }
        let split = Split::new(client, dims, reading, &form);
        let hardware = &client.properties().hardware;
        let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
        if shared_memory < split.shared_memory() {
            return Err(Refusal::Device { shared_memory, units });
        }
        let got = split.cubes(&form) + split.cubes_of_floats(&form);
        let most = hardware.max_cube_count.0 as usize;
        match got > most {
            true => Err(Refusal::TooLarge { what: "cubes", got, most }),
            false => Ok(Self { dims, form, dtype, split }),
        }
    }

    /// This product with `lanes` units for a row of W, `deep` rows for a unit and `ahead` groups of them requested at
    /// once, powers of two: for measurements. `None` where the kernel has no room for it.
    pub fn dealt(self, [lanes, deep, ahead]: [usize; 3]) -> Option<Self> {
        let split = Split { lanes, deep, ahead, ..self.split };
        split.fits().then_some(Self { split, ..self })
    }

    /// `x [W_1^T .. U_1 ..]`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
    ///
    /// # Panics
    /// If matrices are not as planned, or x is read in another way.
    pub fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        x: Input<'_>,
        matrices: Matrices<'_>,
    ) -> Output {
        let Self { dims, form, dtype, split } = self;
        assert!(form.is_of(matrices), "matrices are as planned");
        assert_eq!(x.reading(), split.reading, "x is read as it was planned");
        let (size, columns) = ([dims.rows, dims.inner], form.all_columns());
        let output = split.reading.output(client, size, columns, *dtype);
        let mut sums = SequenceArg::new();
        let vector = x.vector(client, dims.inner, *dtype);
        let all = dims.rows * dims.inner / vector;
        output.sum.iter().for_each(|sum| sums.push(array(&sum.handle, all)));
        let quantized = split.cubes(form);
        let cubes = quantized + split.cubes_of_floats(form);
        let sizes =
            SizesLaunch::new(dims.rows as u32, dims.inner as u32, columns as u32, quantized as u32);
        // SAFETY: rows, columns and groups past the ends repeat the last ones, so that all stays within the sizes of
        // `dims` and `matrices`, which the caller promises.
        #[allow(unsafe_code)]
        unsafe {
            launch_light!(
                client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                rows_by_groups::RowsByGroups<R>,
                types: [F: *dtype], sizes: [N: LOAD, X: vector],
                arguments: [
                    x: InputArrays<rows_by_groups::F, rows_by_groups::X> = x.arrays(size, vector),
                    all: All<rows_by_groups::F, rows_by_groups::N> = self.arrays(matrices),
                    y: Array<rows_by_groups::F> = whole(&output.y),
                    sums: Sequence<Array<Vector<rows_by_groups::F, rows_by_groups::X>>> = sums,
                    size: Sizes = sizes,
                ],
                comptime: [*split, vector, *dtype, LOAD, vector],
            );
        }
        output
    }

    /// The kernel's matrices.
    fn arrays<F: Numeric, N: Size, R: Runtime>(&self, given: Matrices<'_>) -> AllLaunch<F, N, R> {
        let Self { dims, form, split, .. } = self;
        let (mut quantized, mut floats) = (SequenceArg::new(), SequenceArg::new());
        for matrix in given.quantized {
            let all = groups(dims.inner) * matrix.rows;
            quantized.push(QuantizedLaunch::new(
                array(matrix.values, all * split.bits.words()),
                array(matrix.scales, all),
            ));
        }
        for matrix in given.floats {
            let Columns { count, stride } = matrix.columns;
            let numbers = array(matrix.numbers, (dims.inner - 1) * stride + count);
            floats.push(NarrowLaunch::new(numbers, stride as u32));
        }
        let of_quantized = places(&form.rows, split.across(), 0);
        let behind = form.rows.iter().sum();
        let columns: Vec<usize> = form.columns().collect();
        let of_floats = places(&columns, split.deep, behind);
        AllLaunch::new(quantized, floats, of_quantized, of_floats)
    }
}

/// Whether [`product`] takes matrices of these sizes.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    form: Form,
    dtype: StorageType,
) -> Result<(), Refusal> {
    Product::new(client, dims, Reading::Rows, form, dtype).map(drop)
}

/// `x [W_1^T .. U_1 ..]`, `[M, N]`, in one launch, and the sum of an [`Input`] that has one.
///
/// # Errors
/// As [`check`]; then nothing was launched.
/// # Panics
/// If heads of an input do not divide a row.
pub fn product<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    dtype: StorageType,
    x: Input<'_>,
    matrices: Matrices<'_>,
) -> Result<Output, Refusal> {
    let product = Product::new(client, dims, x.reading(), matrices.form(), dtype)?;
    Ok(product.launch(client, x, matrices))
}

/// Checks of both kernels: a matrix `[N, K]`, the type of numbers beside it, and the device.
fn check_matrix<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, inner]: [usize; 2],
    dtype: StorageType,
) -> Result<(), Refusal> {
    check_type(client, dtype)?;
    let whole = groups(inner).saturating_mul(GROUP);
    let (got, most) = (whole.saturating_mul(rows.max(MOST_ROWS)), u32::MAX as usize);
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

/// Groups of a row of so many numbers.
fn groups(inner: usize) -> usize {
    inner.div_ceil(GROUP)
}

/// Where matrices stand, of `sizes` columns each and so many to a cube, from column `columns` of y on.
fn places<R: Runtime>(sizes: &[usize], each: usize, mut columns: usize) -> SequenceArg<R, Place> {
    let (mut places, mut cubes) = (SequenceArg::new(), 0);
    for size in sizes {
        places.push(PlaceLaunch::new(*size as u32, cubes as u32, columns as u32));
        cubes += size.div_ceil(each);
        columns += size;
    }
    places
}

/// Rows of a matrix by number.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// `[M]`; any that is no row's number is the last row.
    pub ids: &'a Handle,
    /// M.
    pub count: usize,
    /// A type of whole numbers.
    pub dtype: StorageType,
}

/// A matrix as floats of type `dtype`, `[N, K]`, or these rows of it, `[M, K]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    inner: usize,
    dtype: StorageType,
    bits: Bits,
    matrix: Matrix<'_>,
    rows: Option<Rows<'_>>,
) -> Result<Buffer, Refusal> {
    let asked = rows.map_or(matrix.rows, |rows| rows.count);
    check_matrix(client, [matrix.rows.max(asked), inner], dtype)?;
    if let Some(rows) = rows {
        check_ids(client, rows.dtype)?;
    }
    let in_row = groups(inner);
    let groups = matrix.rows * in_row;
    if groups == 0 || asked == 0 {
        let (rows, columns, most) = (0, matrix.rows, MOST_ROWS);
        return Err(Refusal::Product { rows, inner, columns, most });
    }
    let floats = buffer(client, &[asked, inner], dtype);
    let words = asked * in_row * bits.words();
    let most = client.properties().hardware.max_cube_count.0 as usize;
    let cubes = words.div_ceil(UNITS).min(most);
    let ids = rows.iter().map(|rows| array(rows.ids, rows.count)).collect();
    // SAFETY: the kernel ends at the last word of the rows that are asked for, whose numbers it keeps within the matrix,
    // and the caller promises its size.
    #[allow(unsafe_code)]
    unsafe {
        words_as_floats::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(matrix.values, groups * bits.words()),
            array(matrix.scales, groups),
            ids,
            whole(&floats),
            words as u32,
            (cubes * UNITS) as u32,
            MatrixRowLaunch::new(in_row as u32, inner as u32, matrix.rows as u32),
            Source(SOURCE),
            bits,
            rows.is_some(),
            // Without numbers of rows any type would do, and none is read.
            [dtype, rows.map_or(ElemType::UInt(UIntKind::U32).into(), |rows| rows.dtype)],
        );
    }
    Ok(floats)
}

/// Rows of a matrix.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct MatrixRow {
    /// J.
    groups: u32,
    /// K.
    inner: u32,
    /// N.
    rows: u32,
}

/// The kernel of [`dequantize`]: a unit has every `units`th word of the rows that are asked for.
#[cube(launch_unchecked)]
fn words_as_floats<F: Float, I: Int>(
    values: &Array<u32>,
    scales: &Array<f32>,
    ids: &Sequence<Array<I>>,
    floats: &mut Array<F>,
    words: u32,
    units: u32,
    row: MatrixRow,
    #[comptime] _source: Source,
    #[comptime] bits: Bits,
    #[comptime] by_id: bool,
    #[define(F, I)] _types: [StorageType; 2],
) {
    let each = comptime!(bits.words());
    let first = ABSOLUTE_POS;
    if first < words as usize {
        for turn in 0..(words as usize - 1 - first) / units as usize + 1 {
            let at = first + turn * units as usize;
            let (groups, inner) = (row.groups as usize, row.inner as usize);
            let (asked, in_row) = (at / each / groups, at % (each * groups));
            let mut from = asked;
            if comptime!(by_id) {
                let id = index_of::<I>(ids.index(0usize)[asked], u32::MAX);
                from = min(id, row.rows - 1) as usize;
            }
            let word = values[from * groups * each + in_row];
            let scale = scales[from * groups + in_row / each];
            let first_number = in_row / each * GROUP + in_row % each * 4;
            let to = asked * inner;
            #[unroll]
            for part in 0..comptime!(32 / bits.count()) {
                let k = first_number + comptime!(number_of_group(bits, 0, part));
                if k < inner {
                    let whole = number(word, part, bits) * comptime!(bits.unit(part));
                    floats[to + k] = F::cast_from(scale * whole);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
