//! Sums of the columns of a matrix, in f32 and in a fixed order.
//! ```text
//! y[c] = sum_r x[r, c]          x: [R, C] of one type     y: [C] of another
//!
//! Work:   a cube has `lanes` vectors of columns side by side; its other units share the rows, and their
//!         sums meet in shared memory, halving. Where columns alone fill the device, or a unit has few
//!         rows, one launch sums whole columns. Else rows are cut into runs: a launch for [runs, C]
//!         partial sums, and a launch that sums these.
//! Cost:   one read of x, one write of y, and the partial sums once each way.
//! Edges:  any R and C. Both are run-time values: new ones compile nothing, unless they change `lanes`
//!         or the vector width.
//! ```
//! x begins at a multiple of 16 bytes.

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{UNITS, spread};
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes that a cube reads side by side at least: two sectors of memory.
const NARROWEST: usize = 64;
/// Vectors side by side of a cube that has a run of rows.
const LANES: usize = 32;
/// Most times that a unit requests rows in one launch, where columns are too few to fill the device.
const MOST_TURNS: usize = 4;
/// Fewest rows of a unit in a run.
const RUN_ROWS: usize = 8;
/// Most runs: one launch sums their sums in [`MOST_TURNS`].
const MOST_RUNS: usize = 512;
/// Bytes of one column that a unit requests at once.
const AHEAD: usize = 32;
/// Multiprocessors of a device that does not report them.
const UNKNOWN: usize = 64;

/// Multiprocessors of the device.
pub(crate) fn multiprocessors<R: Runtime>(client: &ComputeClient<R>) -> usize {
    let known = client.properties().hardware.num_streaming_multiprocessors;
    known.map_or(UNKNOWN, |n| n as usize)
}

/// Numbers of a vector: 4, 2 or 1, a divisor of `width`.
pub(crate) fn vector_width<R: Runtime>(client: &ComputeClient<R>, width: usize) -> usize {
    let most = client.properties().hardware.max_vector_size;
    [4, 2].into_iter().find(|n| *n <= most && width.is_multiple_of(*n)).unwrap_or(1)
}

/// The device has cubes of [`UNITS`], and every number of a tensor `[rows, columns]` an index of 32 bits.
pub(crate) fn check_matrix<R: Runtime>(
    client: &ComputeClient<R>,
    rows: usize,
    columns: usize,
) -> Result<(), Refusal> {
    if rows == 0 || columns == 0 {
        return Err(Refusal::Empty { batch: rows, tokens: columns });
    }
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    if units < UNITS as u32 {
        return Err(Refusal::Device { shared_memory, units });
    }
    // Kernels count rows up to whole cubes, past the last one.
    let (got, most) = (rows.saturating_mul(columns.max(2)), u32::MAX as usize);
    match got > most {
        true => Err(Refusal::TooLarge { what: "numbers in a tensor", got, most }),
        false => Ok(()),
    }
}

/// Counts of cubes in a launch of `cubes`.
pub(crate) fn grid<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: usize,
) -> Result<CubeCount, Refusal> {
    let largest = client.properties().hardware.max_cube_count;
    let most = (largest.0 as usize).saturating_mul(largest.1 as usize);
    let most = most.min(u32::MAX as usize / UNITS);
    spread(cubes, largest).ok_or(Refusal::TooLarge { what: "cubes of a launch", got: cubes, most })
}

/// How a matrix is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Split {
    /// Vectors side by side of a cube.
    lanes: usize,
    /// Rows of a cube.
    run: usize,
    /// Runs of rows.
    runs: usize,
}

impl Split {
    /// Sums of whole columns, in one launch.
    fn whole(lanes: usize, rows: usize) -> Self {
        Self { lanes, run: rows, runs: 1 }
    }

    /// A fixed rule: nothing is timed.
    fn new(multiprocessors: usize, x: &Matrix<'_>) -> Self {
        let (rows, vectors) = (x.rows, x.vectors());
        let enough = 2 * multiprocessors;
        let fills = |lanes: &usize| vectors.div_ceil(*lanes) >= enough;
        if let Some(lanes) = [256, 128, 64, 32].into_iter().find(fills) {
            return Self::whole(lanes, rows);
        }
        let narrowest = x.narrowest();
        if rows <= MOST_TURNS * x.ahead() * UNITS / narrowest {
            return Self::whole(narrowest, rows);
        }
        let lanes = vectors.next_power_of_two().min(LANES);
        let wanted = (2 * enough).div_ceil(vectors.div_ceil(lanes)).min(MOST_RUNS);
        let run = rows.div_ceil(wanted).max(RUN_ROWS * UNITS / lanes);
        Self { lanes, run, runs: rows.div_ceil(run) }
    }

    /// Cubes side by side.
    fn tiles(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.lanes)
    }
}

/// Compile-time values of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    lanes: usize,
    /// Rows that a unit requests at once.
    ahead: usize,
    /// Whether the last columns have an output of their own.
    parted: bool,
}

/// Sums of the columns of `x`, `[rows, columns]` of type `from`: `[columns]` of type `to`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn column_sums<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    rows: usize,
    columns: usize,
    from: StorageType,
    to: StorageType,
) -> Result<Buffer, Refusal> {
    check_type(client, from)?;
    check_type(client, to)?;
    check_matrix(client, rows, columns)?;
    let width = vector_width(client, columns);
    let x = Matrix { x, rows, columns, dtype: from, width };
    let split = Split::new(multiprocessors(client), &x);
    if split.runs == 1 {
        let y = buffer(client, &[columns], to);
        x.sum(client, split, [&y, &y], false)?;
        return Ok(y);
    }
    let partial = buffer(client, &[split.runs, columns], F32);
    x.sum(client, split, [&partial, &partial], false)?;
    let partial = Matrix { x: &partial.handle, rows: split.runs, columns, dtype: F32, width };
    let y = buffer(client, &[columns], to);
    partial.sum(client, partial.narrow(), [&y, &y], false)?;
    Ok(y)
}

/// Sums of the first `columns[0]` columns of `x`, and of the other `columns[1]`, in one launch. `x` is
/// f32, `[rows, columns[0] + columns[1]]`; the sums are of type `to`.
pub(crate) fn column_sums_in_two<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    rows: usize,
    columns: [usize; 2],
    to: StorageType,
) -> Result<[Buffer; 2], Refusal> {
    let [first, second] = columns;
    check_matrix(client, rows, first + second)?;
    let width = vector_width(client, first).min(vector_width(client, second));
    let x = Matrix { x, rows, columns: first + second, dtype: F32, width };
    let y = [buffer(client, &[first], to), buffer(client, &[second], to)];
    x.sum(client, x.narrow(), [&y[0], &y[1]], true)?;
    Ok(y)
}

/// Sums of the columns of `x`, f32, in one launch, of type `to`.
pub(crate) fn column_sums_at_once<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    rows: usize,
    columns: usize,
    to: StorageType,
) -> Result<Buffer, Refusal> {
    check_matrix(client, rows, columns)?;
    let x = Matrix { x, rows, columns, dtype: F32, width: vector_width(client, columns) };
    let y = buffer(client, &[columns], to);
    x.sum(client, x.narrow(), [&y, &y], false)?;
    Ok(y)
}

/// A matrix to sum, and the width of the vectors that it is read in.
struct Matrix<'a> {
    x: &'a Handle,
    rows: usize,
    columns: usize,
    dtype: StorageType,
    width: usize,
}

impl Matrix<'_> {
    /// Vectors of a row.
    fn vectors(&self) -> usize {
        self.columns / self.width
    }

    /// Fewest vectors side by side that a cube should have.
    fn narrowest(&self) -> usize {
        let least = NARROWEST / (self.width * self.dtype.size());
        self.vectors().next_power_of_two().min(least.max(1))
    }

    /// Rows that a unit requests at once.
    fn ahead(&self) -> usize {
        AHEAD / self.dtype.size()
    }

    /// One launch, of as many cubes as there can be.
    fn narrow(&self) -> Split {
        Split::whole(self.narrowest(), self.rows)
    }

    /// One launch. `y` are `[runs, columns]`; where `parted`, the second has the columns that the first
    /// lacks, else it is not written.
    fn sum<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        split: Split,
        y: [&Buffer; 2],
        parted: bool,
    ) -> Result<(), Refusal> {
        let vectors = self.vectors();
        let cubes = grid(client, split.tiles(vectors) * split.runs)?;
        let form = Form { source: SOURCE, lanes: split.lanes, ahead: self.ahead(), parted };
        let [first, second] = y;
        // WebGPU has no two bindings of memory that is written.
        let none = buffer(client, &[16], first.dtype);
        let second = if parted { second } else { &none };
        // SAFETY: rows end at `rows` and columns at `columns`, which the caller promises; `form` says
        // whether the second output is written.
        #[allow(unsafe_code)]
        unsafe {
            sum_columns::launch_unchecked::<R>(
                client,
                cubes,
                CubeDim::new_1d(UNITS as u32),
                array(self.x, self.rows * self.columns),
                SumsLaunch::new(whole(first), whole(second)),
                SizesLaunch::new(
                    self.rows as u32,
                    vectors as u32,
                    split.run as u32,
                    (first.shape[first.shape.len() - 1] / self.width) as u32,
                ),
                form,
                [self.dtype, first.dtype],
                self.width,
            );
        }
        Ok(())
    }
}

/// Sums of every run, `[runs, columns]`; `form` says whether the last columns are in `second`.
#[derive(CubeType, CubeLaunch)]
struct Sums<Y: Float, N: Size> {
    first: Array<Vector<Y, N>>,
    second: Array<Vector<Y, N>>,
}

/// Sizes that are no part of the compiled code. Columns are counted in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    columns: u32,
    /// Rows of a cube.
    run: u32,
    /// Columns of the first output.
    first: u32,
}

/// The kernel.
#[cube(launch_unchecked)]
fn sum_columns<X: Float, Y: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    y: &mut Sums<Y, N>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(X, Y)] _types: [StorageType; 2],
    #[define(N)] _width: usize,
) {
    let lanes = comptime!(form.lanes);
    let groups = comptime!(UNITS / form.lanes);
    let columns = sizes.columns as usize;
    let first = sizes.first as usize;
    let tiles = (columns - 1) / lanes + 1;
    let unit = UNIT_POS as usize;
    let group = unit / lanes;
    let column = CUBE_POS % tiles * lanes + unit % lanes;
    let run = CUBE_POS / tiles;
    let start = run * sizes.run as usize;
    let end = min(start + sizes.run as usize, sizes.rows as usize);
    // Units past the last column read that one, and keep nothing.
    let from = min(column, columns - 1);

    let mut sums = SharedMemory::<Vector<f32, N>>::new(UNITS);
    sums[unit] = sum_run::<X, N>(x, start + group, end, from, columns, form);
    sync_cube();
    #[unroll]
    for level in 0..comptime!(groups.ilog2()) {
        let half = comptime!(groups >> (level + 1));
        if group < half {
            let other = sums[unit + half * lanes];
            sums[unit] += other;
        }
        sync_cube();
    }
    if group == 0 && column < columns && start < end {
        let sum = Vector::<Y, N>::cast_from(sums[unit]);
        if comptime!(form.parted) {
            if column < first {
                y.first[run * first + column] = sum;
            } else {
                y.second[run * (columns - first) + column - first] = sum;
            }
        } else {
            y.first[run * columns + column] = sum;
        }
    }
}

/// The sum of a unit's rows of one column: `row`, and each that is a multiple of the groups further, up
/// to `end`.
#[cube]
fn sum_run<X: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    row: usize,
    end: usize,
    column: usize,
    columns: usize,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let groups = comptime!(UNITS / form.lanes);
    let batch = comptime!(groups * form.ahead);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut asked = Array::<Vector<f32, N>>::new(comptime!(form.ahead));
    let left = max(row, end) - row;
    for turn in 0..(left + comptime!(batch - 1)) / batch {
        // All are asked for before the first is added.
        #[unroll]
        for n in 0..comptime!(form.ahead) {
            let at = row + turn * batch + comptime!(n * groups);
            let mut value = Vector::<f32, N>::new(0.0f32);
            if at < end {
                value = Vector::<f32, N>::cast_from(x[at * columns + column]);
            }
            asked[n] = value;
        }
        #[unroll]
        for n in 0..comptime!(form.ahead) {
            sum += asked[n];
        }
    }
    sum
}

#[cfg(test)]
#[path = "column_sums_tests.rs"]
mod tests;
