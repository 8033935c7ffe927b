//! Rows of a table by id, and the gradient of the table.
//! ```text
//! gather           y_n = table[ids_n]
//! table_gradient   d_table[v] = sum over all n with ids_n = v of d_y[n]        in f32
//!
//! table, d_table: [V, D]      ids: [N]  integers      y, d_y: [N, D]
//!
//! Work:   gather: a unit a vector. table_gradient: a cube has a tile of table rows, a tile of columns
//!         and a split of the positions; a unit has a column, whose sums in shared memory only it
//!         touches. The cube lists the positions of its tile (prefix sum over its units) and adds their
//!         rows. A second launch adds the splits.
//! Order:  fixed by N, V and D. No sort, no atomics; nothing depends on how often an id occurs but time.
//! Cost:   table_gradient reads ids once for each tile, rows once, and writes [splits, V, D] f32.
//! Edges:  an id outside [0, V) gives a row of NaN in gather and is left out of table_gradient.
//!         N is a run-time value.
//! ```

use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{UNITS, spread};
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, IntKind, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes of the widest load.
const LOAD: usize = 16;
/// Positions whose ids a cube looks at at once, and entries of its list.
const BLOCK: usize = 1024;
/// Rows that a unit requests at once: while there are many, as of an id that is frequent, and of the rest.
const FAR_AHEAD: usize = 32;
const AHEAD: usize = 8;
/// Bits of an entry of the list that hold the row of the tile.
const ROW_BITS: u32 = 12;
/// Sums in shared memory, and fewer where a cube may have little of it.
const SUMS: usize = 4096;
const FEW_SUMS: usize = 2560;
/// Cubes of [`table_gradient`] worth having: several waves of them fill any device.
const CUBES: usize = 4096;
/// Fewest positions of a split, and most that are wanted of one: one id may be that of nearly all of them, which its cube
/// adds one behind another.
const SHORTEST: usize = 64;
const LONGEST: usize = 4096;
/// Most sums that splits write.
const MOST_SUMS: usize = 64 << 20;
/// Splits from which groups of units share the second launch's sums.
const MANY: usize = 32;

/// Sizes of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// N, positions.
    pub rows: usize,
    /// V, rows of the table.
    pub vocab: usize,
    /// D, numbers of a row.
    pub width: usize,
}

impl Dims {
    /// Both tensors have numbers, and indices of 32 bits hold them.
    fn check(self) -> Result<(), Refusal> {
        let Self { rows, vocab, width } = self;
        check_numbers(rows, width)?;
        check_numbers(vocab, width)
    }
}

/// Types of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Of the rows that are read.
    pub rows: StorageType,
    /// Of ids: an integer.
    pub ids: StorageType,
    /// Of the output.
    pub out: StorageType,
}

impl Types {
    fn check<R: Runtime>(self, client: &ComputeClient<R>) -> Result<(), Refusal> {
        check_type(client, self.rows)?;
        check_ids(client, self.ids)?;
        check_type(client, self.out)
    }
}

/// `[rows, width]` is not empty, and indices of 32 bits hold it.
pub(crate) fn check_numbers(rows: usize, width: usize) -> Result<(), Refusal> {
    if rows == 0 || width == 0 {
        return Err(Refusal::Empty { batch: rows, tokens: width });
    }
    let (got, most) = (rows.saturating_mul(width), u32::MAX as usize);
    match got > most {
        true => Err(Refusal::TooLarge { what: "numbers in a tensor", got, most }),
        false => Ok(()),
    }
}

/// The type is an integer of 32 or 64 bits that the device has.
pub(crate) fn check_ids<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: StorageType,
) -> Result<(), Refusal> {
    let known = matches!(
        dtype,
        StorageType::Scalar(
            ElemType::Int(IntKind::I32 | IntKind::I64)
                | ElemType::UInt(UIntKind::U32 | UIntKind::U64)
        )
    );
    match known && client.properties().type_usage(dtype).contains(TypeUsage::Conversion) {
        true => Ok(()),
        false => Err(Refusal::Type { got: dtype }),
    }
}

/// A grid of so many cubes.
pub(crate) fn grid<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: usize,
) -> Result<CubeCount, Refusal> {
    let largest = client.properties().hardware.max_cube_count;
    let most = largest.0 as usize * largest.1 as usize;
    let most = most.min(u32::MAX as usize / UNITS);
    spread(cubes, largest).ok_or(Refusal::TooLarge { what: "cubes", got: cubes, most })
}

/// Numbers of a vector: as many as a load takes of the larger type, as divide `columns`, and as every
/// handle is aligned to.
pub(crate) fn vector_width<R: Runtime>(
    client: &ComputeClient<R>,
    columns: usize,
    tensors: &[(&Handle, StorageType)],
) -> usize {
    let bytes = tensors.iter().map(|(_, dtype)| dtype.size()).max().unwrap_or(LOAD);
    let most = (LOAD / bytes).min(client.properties().hardware.max_vector_size);
    let aligned = |n: usize| {
        let starts = |(handle, dtype): &(&Handle, StorageType)| {
            handle.offset_start.unwrap_or(0).is_multiple_of((n * dtype.size()) as u64)
        };
        tensors.iter().all(starts)
    };
    let fits = |n: &usize| *n <= most && columns.is_multiple_of(*n) && aligned(*n);
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// An id as an index below `bound`, or `bound` or more if it is none.
#[cube]
pub(crate) fn index_of<I: Int>(id: I, bound: u32) -> u32 {
    let index = u32::cast_from(id);
    // Of 64 bits the upper ones may be lost.
    select(I::cast_from(index) == id, index, bound)
}

/// Rows of `table` `[V, D]` by `ids` `[N]`: `[N, D]`, in one launch.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn gather<R: Runtime>(
    client: &ComputeClient<R>,
    table: &Handle,
    ids: &Handle,
    dims: Dims,
    types: Types,
) -> Result<Buffer, Refusal> {
    dims.check()?;
    types.check(client)?;
    let Dims { rows, vocab, width } = dims;
    let vector = vector_width(client, width, &[(table, types.rows), (table, types.out)]);
    let vectors = width / vector;
    let cubes = grid(client, (rows * vectors).div_ceil(UNITS))?;
    let y = buffer(client, &[rows, width], types.out);
    // SAFETY: units past the last vector stop, and ids outside the table are not looked up.
    #[allow(unsafe_code)]
    unsafe {
        gather_rows::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(table, vocab * width),
            array(ids, rows),
            whole(&y),
            GatherSizesLaunch::new((rows * vectors) as u32, vectors as u32, vocab as u32, f32::NAN),
            GatherForm { source: crate::SOURCE },
            [types.rows, types.out, types.ids],
            vector,
        );
    }
    Ok(y)
}

/// Compile-time values of [`gather_rows`], besides types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GatherForm {
    source: &'static str,
}

/// Numbers of [`gather_rows`] that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct GatherSizes {
    /// Vectors of y.
    count: u32,
    /// Vectors of a row.
    vectors: u32,
    /// V.
    vocab: u32,
    /// A row for an id outside the table: a shader has no constant for it.
    nan: f32,
}

/// The kernel of [`gather`].
#[cube(launch_unchecked)]
fn gather_rows<T: Float, F: Float, I: Int, N: Size>(
    table: &Array<Vector<T, N>>,
    ids: &Array<I>,
    y: &mut Array<Vector<F, N>>,
    sizes: GatherSizes,
    #[comptime] _form: GatherForm,
    #[define(T, F, I)] _types: [StorageType; 3],
    #[define(N)] _width: usize,
) {
    let n = ABSOLUTE_POS;
    if n >= sizes.count as usize {
        terminate!();
    }
    let vectors = sizes.vectors as usize;
    let id = index_of::<I>(ids[n / vectors], sizes.vocab);
    let mut value = Vector::<f32, N>::new(sizes.nan);
    if id < sizes.vocab {
        value = Vector::<f32, N>::cast_from(table[id as usize * vectors + n % vectors]);
    }
    y[n] = Vector::<F, N>::cast_from(value);
}

/// Compile-time values of [`tile_sums`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Units of a cube, each with a column.
    units: usize,
    /// Rows of the table that a cube has.
    tile: usize,
}

impl Form {
    /// Columns in as few and as full tiles as there are, rows in as many as shared memory holds; `None`
    /// where it holds none.
    fn new(dims: Dims, shared_memory: usize) -> Option<Self> {
        let padded = |units: &usize| dims.width.next_multiple_of(*units);
        let units = [256, 128, 64, 32].into_iter().min_by_key(padded).unwrap_or(32);
        let form = |sums: usize| {
            let tile = (sums / units).min(dims.vocab);
            Self { source: crate::SOURCE, units, tile }
        };
        let fits = |form: &Self| form.shared_memory() <= shared_memory;
        [SUMS, FEW_SUMS].map(form).into_iter().find(fits)
    }

    /// Bytes of shared memory: sums, the list and counts, as [`shared_tile`] allocates them.
    fn shared_memory(&self) -> usize {
        4 * (self.sums() + BLOCK + self.units)
    }

    /// Sums in shared memory, one for each row and unit.
    fn sums(&self) -> usize {
        self.tile * self.units
    }

    /// Ids of a block that each unit looks at.
    fn ids(&self) -> usize {
        BLOCK / self.units
    }

    /// Tiles of rows and of columns.
    fn tiles(&self, dims: Dims) -> [usize; 2] {
        [dims.vocab.div_ceil(self.tile), dims.width.div_ceil(self.units)]
    }

    /// Positions of a split. There are as many splits as fill a device and as keep one from being long, as long as each
    /// has a good number of positions and what they write is not much more than what they read.
    fn share(&self, dims: Dims) -> usize {
        let Dims { rows, vocab, width } = dims;
        let [down, across] = self.tiles(dims);
        let splits = (rows / SHORTEST)
            .min((CUBES / (down * across)).max(rows.div_ceil(LONGEST)))
            .min(MOST_SUMS / (vocab * width))
            .min(4 * rows / vocab);
        rows.div_ceil(splits.max(1))
    }
}

/// The gradient of a table `[V, D]` from that of its looked-up rows, `d_y` `[N, D]`. One launch, or two
/// where positions are split.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn table_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    d_y: &Handle,
    ids: &Handle,
    dims: Dims,
    types: Types,
) -> Result<Buffer, Refusal> {
    dims.check()?;
    types.check(client)?;
    let Dims { rows, vocab, width } = dims;
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    let form = Form::new(dims, shared_memory).filter(|form| form.units <= units as usize);
    let form = form.ok_or(Refusal::Device { shared_memory, units })?;
    let share = form.share(dims);
    let splits = rows.div_ceil(share);
    let [down, across] = form.tiles(dims);
    let cubes = grid(client, down * across * splits)?;
    let (shape, dtype) = match splits {
        1 => (vec![vocab, width], types.out),
        _ => (vec![splits, vocab, width], F32),
    };
    let sums = buffer(client, &shape, dtype);
    // SAFETY: positions, rows and columns past the ends repeat the last ones and are not kept, so that
    // all stays within `dims`, which the caller promises.
    #[allow(unsafe_code)]
    unsafe {
        tile_sums::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(form.units as u32),
            array(d_y, rows * width),
            array(ids, rows),
            whole(&sums),
            SizesLaunch::new(rows as u32, vocab as u32, width as u32, splits as u32, share as u32),
            form,
            [types.rows, dtype, types.ids],
        );
    }
    match splits {
        1 => Ok(sums),
        _ => add_splits(client, &sums, types.out),
    }
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// N.
    rows: u32,
    /// V.
    vocab: u32,
    /// D.
    width: u32,
    splits: u32,
    /// Positions of a split.
    share: u32,
}

/// A cube's shared memory.
#[derive(CubeType)]
struct Tile {
    /// Sums of a tile of the table, `[tile, units]`.
    sums: SharedMemory<f32>,
    /// Listed positions of a block.
    list: SharedMemory<u32>,
    /// How many positions a unit, and those before it, have found.
    counts: SharedMemory<u32>,
}

/// Shared memory, as [`Form::shared_memory`] counts it. Sums begin as zeros.
#[cube]
fn shared_tile(unit: usize, #[comptime] form: Form) -> Tile {
    let mut sums = SharedMemory::<f32>::new(comptime!(form.sums()));
    for row in 0..comptime!(form.tile) {
        sums[row * comptime!(form.units) + unit] = 0.0f32;
    }
    Tile {
        sums,
        list: SharedMemory::<u32>::new(BLOCK),
        counts: SharedMemory::<u32>::new(comptime!(form.units)),
    }
}

/// The first kernel of [`table_gradient`]: `out` is `[splits, V, D]`.
#[cube(launch_unchecked)]
fn tile_sums<F: Float, O: Float, I: Int>(
    d_y: &Array<F>,
    ids: &Array<I>,
    out: &mut Array<O>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F, O, I)] _types: [StorageType; 3],
) {
    let units = comptime!(form.units);
    let unit = UNIT_POS as usize;
    let splits = sizes.splits as usize;
    let width = sizes.width as usize;
    let across = (width - 1) / units + 1;
    // Splits of one tile begin together: they are what takes long where an id is frequent.
    let split = CUBE_POS % splits;
    let column = CUBE_POS / splits % across * units + unit;
    let first = CUBE_POS / splits / across * comptime!(form.tile);
    if first >= sizes.vocab as usize {
        // The whole cube: the grid may be larger than there are tiles.
        terminate!();
    }
    let mut tile = shared_tile(unit, form);
    let start = split * sizes.share as usize;
    let end = min(start + sizes.share as usize, sizes.rows as usize);
    let last = sizes.rows as usize - 1;
    for block in 0..(end - start - 1) / BLOCK + 1 {
        let at = start + block * BLOCK;
        let window = Window { at, end, last, first: first as u32 };
        let found = list_positions::<I>(&mut tile, ids, window, form);
        let column = Column { from: at * width + min(column, width - 1), stride: width };
        add_rows::<F>(&mut tile, found, d_y, &column, form);
        sync_cube();
    }
    let rows = min(sizes.vocab as usize - first, comptime!(form.tile));
    if column < width {
        let to = (split * sizes.vocab as usize + first) * width + column;
        for row in 0..rows {
            out[to + row * width] = O::cast_from(tile.sums[row * units + unit]);
        }
    }
}

/// Positions that a cube looks at, and the tile that it looks for.
#[derive(CubeType, Clone, Copy)]
struct Window {
    /// The first position of the block.
    at: usize,
    /// One past the last position of the split.
    end: usize,
    /// The last position of all.
    last: usize,
    /// The first row of the tile.
    first: u32,
}

/// A unit's column of d_y, from the first position of a block on.
#[derive(CubeType, Clone, Copy)]
struct Column {
    /// Its number of that position.
    from: usize,
    /// Numbers from one position to the next, D.
    stride: usize,
}

/// Lists the positions of a block whose ids are in the tile, and returns how many there are. An entry is
/// the place in the block and the row of the tile. Order: by unit, then by position.
#[cube]
fn list_positions<I: Int>(
    tile: &mut Tile,
    ids: &Array<I>,
    window: Window,
    #[comptime] form: Form,
) -> usize {
    let units = comptime!(form.units);
    let none = comptime!(form.tile as u32);
    let unit = UNIT_POS as usize;
    let mut rows = Array::<u32>::new(comptime!(form.ids()));
    let mut own = 0u32;
    #[unroll]
    for n in 0..comptime!(form.ids()) {
        let place = unit + comptime!(n * form.units);
        // An id of another tile gets the row after the last one. An invalid one may get a row past the
        // table's end, which is not kept.
        let id = index_of::<I>(ids[min(window.at + place, window.last)], u32::MAX);
        let within = id >= window.first && window.at + place < window.end;
        rows[n] = min(select(within, id - window.first, none), none);
        own += select(rows[n] < none, 1u32, 0u32);
    }
    // The units' counts, summed up: to this unit's own.
    let mut sum = own;
    #[unroll]
    for level in 0..comptime!(form.units.ilog2()) {
        let reach = comptime!(1usize << level);
        tile.counts[unit] = sum;
        sync_cube();
        if unit >= reach {
            sum += tile.counts[unit - reach];
        }
        sync_cube();
    }
    tile.counts[unit] = sum;
    let mut entry = (sum - own) as usize;
    #[unroll]
    for n in 0..comptime!(form.ids()) {
        if rows[n] < none {
            let place = UNIT_POS + comptime!((n * form.units) as u32);
            tile.list[entry] = (place << ROW_BITS) + rows[n];
            entry += 1usize;
        }
    }
    sync_cube();
    tile.counts[units - 1] as usize
}

/// Adds the `found` positions of the list to this unit's sums.
#[cube]
fn add_rows<F: Float>(
    tile: &mut Tile,
    found: usize,
    d_y: &Array<F>,
    column: &Column,
    #[comptime] form: Form,
) {
    let units = comptime!(form.units);
    let unit = UNIT_POS as usize;
    // Neighbours with one id are summed up in a register.
    let mut open = 0usize;
    let mut sum = 0.0f32;
    let mut done = 0usize;
    #[unroll]
    for pass in 0..2usize {
        let ahead = comptime!(if pass == 0 { FAR_AHEAD } else { AHEAD });
        let partly = comptime!(if pass == 0 { 0 } else { AHEAD - 1 });
        let turns = (found - done + partly) / ahead;
        for turn in 0..turns {
            // All are asked for before the first is added.
            let mut rows = Array::<usize>::new(ahead);
            let mut values = Array::<f32>::new(ahead);
            #[unroll]
            for n in 0..ahead {
                let at = done + turn * ahead + n;
                let entry = tile.list[min(at, found - 1)];
                let place = (entry >> ROW_BITS) as usize;
                let value = f32::cast_from(d_y[column.from + place * column.stride]);
                rows[n] = (entry & comptime!((1u32 << ROW_BITS) - 1)) as usize;
                values[n] = select(at < found, value, 0.0f32);
            }
            #[unroll]
            for n in 0..ahead {
                if rows[n] != open {
                    tile.sums[open * units + unit] += sum;
                    open = rows[n];
                    sum = 0.0f32;
                }
                sum += values[n];
            }
        }
        done += turns * ahead;
    }
    tile.sums[open * units + unit] += sum;
}

/// Compile-time values of [`sum_splits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SumForm {
    source: &'static str,
    /// Groups of units that share out the splits.
    groups: usize,
}

/// Adds `sums` `[splits, V, D]` up over splits: `[V, D]`.
fn add_splits<R: Runtime>(
    client: &ComputeClient<R>,
    sums: &Buffer,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    let splits = sums.shape[0];
    let shape = &sums.shape[1..];
    let numbers = shape.iter().product::<usize>();
    let vector = vector_width(client, numbers, &[(&sums.handle, F32)]);
    let vectors = numbers / vector;
    let groups = if splits >= MANY { 8 } else { 1 };
    let cubes = grid(client, (vectors * groups).div_ceil(UNITS))?;
    let out = buffer(client, shape, dtype);
    // SAFETY: units past the last vector repeat it and store nothing, and splits past the last one repeat
    // that and are not added.
    #[allow(unsafe_code)]
    unsafe {
        sum_splits::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            whole(sums),
            whole(&out),
            splits as u32,
            vectors as u32,
            SumForm { source: crate::SOURCE, groups },
            dtype,
            vector,
        );
    }
    Ok(out)
}

/// The second kernel of [`table_gradient`].
#[cube(launch_unchecked)]
fn sum_splits<O: Float, N: Size>(
    sums: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    splits: u32,
    vectors: u32,
    #[comptime] form: SumForm,
    #[define(O)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let groups = comptime!(form.groups);
    let lanes = comptime!(UNITS / form.groups);
    let splits = splits as usize;
    let vectors = vectors as usize;
    let unit = UNIT_POS as usize;
    let own = CUBE_POS * lanes + unit % lanes;
    let at = min(own, vectors - 1);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    for turn in 0..(splits - 1) / (groups * AHEAD) + 1 {
        let mut values = Array::<Vector<f32, N>>::new(AHEAD);
        #[unroll]
        for n in 0..AHEAD {
            let split = (turn * AHEAD + n) * groups + unit / lanes;
            values[n] = sums[min(split, splits - 1) * vectors + at];
        }
        #[unroll]
        for n in 0..AHEAD {
            if (turn * AHEAD + n) * groups + unit / lanes < splits {
                sum += values[n];
            }
        }
    }
    if comptime!(form.groups > 1) {
        let mut shared = SharedMemory::<Vector<f32, N>>::new(UNITS);
        shared[unit] = sum;
        sync_cube();
        if unit < lanes {
            #[unroll]
            for group in 1..comptime!(form.groups) {
                sum += shared[unit + comptime!(group * UNITS / form.groups)];
            }
        }
    }
    if unit < lanes && own < vectors {
        out[own] = Vector::<O, N>::cast_from(sum);
    }
}

#[cfg(test)]
#[path = "embedding_tests.rs"]
mod tests;
