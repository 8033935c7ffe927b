//! The kernel of a product by quantized matrices: rows of them by groups, and columns of matrices of floats.

use super::{Bits, GROUP, LOAD, Split};
use crate::few_rows::UNITS;
use crate::few_rows::input::{self, CubeRows, Held, InputArrays};
use crate::fused::team::{Team, over_team};
use cubecl::ir::StorageType;
use cubecl::prelude::*;

/// Where a matrix stands.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Place {
    /// N_i, or C_i.
    columns: u32,
    /// The first cube of its columns, among those of its kind.
    first_cube: u32,
    /// Its first column in y.
    first_column: u32,
}

/// A quantized matrix.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Quantized<N: Size> {
    values: Array<Vector<u32, N>>,
    scales: Array<f32>,
}

/// A matrix of floats.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Narrow<F: Numeric> {
    numbers: Array<F>,
    /// Numbers from one row to the next.
    stride: u32,
}

/// All matrices: quantized ones, those of floats, and their places.
#[derive(CubeType, CubeLaunch)]
pub(super) struct All<F: Numeric, N: Size> {
    quantized: Sequence<Quantized<N>>,
    floats: Sequence<Narrow<F>>,
    places_of_quantized: Sequence<Place>,
    places_of_floats: Sequence<Place>,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    /// M.
    rows: u32,
    /// K.
    inner: u32,
    /// N.
    columns: u32,
    /// Cubes of quantized matrices.
    quantized: u32,
}

/// A unit's share of a matrix.
#[derive(CubeType, Clone, Copy)]
struct Share {
    /// Place of the matrix among those of its kind.
    matrix: u32,
    /// Its first column in y.
    before: usize,
    /// Its last row, N_i - 1, or its last column.
    last: usize,
    /// Groups of a row.
    groups: usize,
    /// The unit's first row of it, or column.
    row: usize,
    /// The unit's first group, or its first number of a column.
    lane: usize,
}

/// Words and scales of `[ahead]` groups that a unit reads, `[deep]` rows of W each.
#[derive(CubeType)]
struct Requested<N: Size> {
    values: Array<Vector<u32, N>>,
    scales: Array<f32>,
}

/// The kernel.
#[cube(launch_unchecked)]
pub(super) fn rows_by_groups<F: Float, N: Size, X: Size>(
    x: &InputArrays<F, X>,
    matrices: &All<F, N>,
    y: &mut Array<F>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    sizes: Sizes,
    #[comptime] split: Split,
    #[comptime] vector: usize,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _load: usize,
    #[define(X)] _of_x: usize,
) {
    let mut shared = SharedMemory::<f32>::new(comptime!(split.numbers()));
    let mut sums = Array::<f32>::new(comptime!(split.sums()));
    #[unroll]
    for n in 0..comptime!(split.sums()) {
        sums[n] = 0.0f32;
    }
    if comptime!(split.floats > 0) {
        if CUBE_POS_X < sizes.quantized {
            by_groups::<F, N, X>(&mut sums, &mut shared, x, matrices, y, sum, sizes, split, vector);
        } else {
            by_columns::<F, N, X>(
                &mut sums,
                &mut shared,
                x,
                matrices,
                y,
                sum,
                sizes,
                split,
                vector,
            );
        }
    } else {
        by_groups::<F, N, X>(&mut sums, &mut shared, x, matrices, y, sum, sizes, split, vector);
    }
}

/// A cube of rows of a quantized matrix.
#[cube]
fn by_groups<F: Float, N: Size, X: Size>(
    sums: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F, X>,
    matrices: &All<F, N>,
    y: &mut Array<F>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    sizes: Sizes,
    #[comptime] split: Split,
    #[comptime] vector: usize,
) {
    let (lanes, deep, ahead) = comptime!((split.lanes, split.deep, split.ahead));
    let (span, step) = comptime!((split.span(), split.step()));
    let place = placed(&matrices.places_of_quantized, CUBE_POS_X, split.matrices);
    let cube = CUBE_POS_X as usize - place.first_cube;
    let row = cube * comptime!(split.across()) + UNIT_POS as usize / lanes * deep;
    let share = share(&place, row, UNIT_POS as usize % lanes, sizes);
    let mut requested = Requested::<N> {
        values: Array::new(comptime!(ahead * deep * split.bits.loads())),
        scales: Array::new(comptime!(ahead * deep)),
    };
    #[unroll]
    for place in 0..ahead {
        let group = share.lane + comptime!(place * lanes);
        request::<N>(&mut requested, &matrices.quantized, group, &share, place, split);
    }
    let shelf = comptime!(split.shelf(vector));
    let of = rows_of(sizes);
    let mut norms = input::norms::<F, X>(shared, x, of, shelf);

    for slice in 0..(share.groups - 1) / span + 1 {
        let first = slice * span;
        let steps = (min(share.groups - first, span) - 1) / step + 1;
        let held = Held { first: first * GROUP, count: steps * step * GROUP };
        input::load::<F, X>(shared, &mut norms, x, sum, of, held, shelf);
        sync_cube();
        for n in 0..steps {
            let more = first + (n + 1) * step < share.groups;
            #[unroll]
            for place in 0..ahead {
                let group = n * step + share.lane + comptime!(place * lanes);
                multiply_add::<N>(sums, &requested, shared, group, place, split);
                // The next groups are under way while barriers are waited for.
                if more {
                    let next = first + group + step;
                    request::<N>(&mut requested, &matrices.quantized, next, &share, place, split);
                }
            }
        }
        sync_cube();
    }
    let factors = input::row_factors::<F, X>(shared, x, &norms, of.inner, shelf);
    write_sums::<F>(y, shared, sums, &factors, &share, sizes, lanes, split);
}

/// A cube of columns of a matrix of floats: a unit has every 256th number of each.
#[cube]
fn by_columns<F: Float, N: Size, X: Size>(
    sums: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F, X>,
    matrices: &All<F, N>,
    y: &mut Array<F>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    sizes: Sizes,
    #[comptime] split: Split,
    #[comptime] vector: usize,
) {
    let span = comptime!(split.span());
    let behind = CUBE_POS_X - sizes.quantized;
    let place = placed(&matrices.places_of_floats, behind, split.floats);
    let column = (behind as usize - place.first_cube) * comptime!(split.deep);
    let share = share(&place, column, UNIT_POS as usize, sizes);
    let shelf = comptime!(split.shelf(vector));
    let of = rows_of(sizes);
    let mut norms = input::norms::<F, X>(shared, x, of, shelf);
    for slice in 0..(share.groups - 1) / span + 1 {
        let first = slice * span;
        let count = min(share.groups - first, span);
        let held = Held { first: first * GROUP, count: count * GROUP };
        input::load::<F, X>(shared, &mut norms, x, sum, of, held, shelf);
        sync_cube();
        #[unroll]
        for n in 0..comptime!(split.floats) {
            if share.matrix == comptime!(n as u32) {
                let matrix = matrices.floats.index(n);
                add_columns::<F>(sums, matrix, shared, first, count, &share, sizes, split);
            }
        }
        sync_cube();
    }
    let factors = input::row_factors::<F, X>(shared, x, &norms, of.inner, shelf);
    write_sums::<F>(y, shared, sums, &factors, &share, sizes, UNITS, split);
}

/// A matrix, as it is found for a cube.
#[derive(CubeType, Clone, Copy)]
struct Found {
    matrix: u32,
    first_cube: usize,
    first_column: usize,
    columns: usize,
}

/// The matrix of a cube.
#[cube]
fn placed(places: &Sequence<Place>, cube: u32, #[comptime] matrices: usize) -> Found {
    let first = places.index(0usize);
    let mut matrix = 0u32;
    let mut first_cube = first.first_cube as usize;
    let mut first_column = first.first_column as usize;
    let mut columns = first.columns as usize;
    #[unroll]
    for n in 1..matrices {
        let next = places.index(n);
        if cube >= next.first_cube {
            matrix = comptime!(n as u32).runtime();
            first_cube = next.first_cube as usize;
            first_column = next.first_column as usize;
            columns = next.columns as usize;
        }
    }
    Found { matrix, first_cube, first_column, columns }
}

/// The share of this unit.
#[cube]
fn share(place: &Found, row: usize, lane: usize, sizes: Sizes) -> Share {
    let groups = (sizes.inner as usize - 1) / GROUP + 1;
    let (matrix, before, last) = (place.matrix, place.first_column, place.columns - 1);
    Share { matrix, before, last, groups, row, lane }
}

/// The rows of x: every cube has all.
#[cube]
fn rows_of(sizes: Sizes) -> CubeRows {
    CubeRows { first: 0usize.runtime(), rows: sizes.rows as usize, inner: sizes.inner as usize }
}

/// Adds the products of `deep` columns of a matrix of floats, over `count` groups of x from `first` on, to the sums,
/// `[deep, tile]`.
#[cube]
fn add_columns<F: Float>(
    sums: &mut Array<f32>,
    matrix: &Narrow<F>,
    x: &SharedMemory<f32>,
    first: usize,
    count: usize,
    share: &Share,
    sizes: Sizes,
    #[comptime] split: Split,
) {
    let (deep, tile) = comptime!((split.deep, split.tile));
    let rows = min(count * GROUP, sizes.inner as usize - first * GROUP);
    for turn in 0..(rows - 1) / UNITS + 1 {
        let held = turn * UNITS + share.lane;
        if held < rows {
            let at = (first * GROUP + held) * matrix.stride as usize;
            let from = held / GROUP * comptime!(split.line()) + held % GROUP;
            #[unroll]
            for n in 0..deep {
                let number = f32::cast_from(matrix.numbers[at + min(share.row + n, share.last)]);
                #[unroll]
                for m in 0..tile {
                    sums[comptime!(n * tile + m)] += number * x[from + comptime!(m * GROUP)];
                }
            }
        }
    }
}

/// Requests one group of the unit's rows, the one that is held at `place`.
#[cube]
fn request<N: Size>(
    requested: &mut Requested<N>,
    matrices: &Sequence<Quantized<N>>,
    group: usize,
    share: &Share,
    #[comptime] place: usize,
    #[comptime] split: Split,
) {
    if comptime!(split.matrices == 1) {
        request_rows::<N>(requested, matrices.index(0usize), group, share, place, split);
    } else {
        #[unroll]
        for n in 0..comptime!(split.matrices) {
            if share.matrix == comptime!(n as u32) {
                request_rows::<N>(requested, matrices.index(n), group, share, place, split);
            }
        }
    }
}

/// As [`request`], of the share's own matrix.
#[cube]
fn request_rows<N: Size>(
    requested: &mut Requested<N>,
    matrix: &Quantized<N>,
    group: usize,
    share: &Share,
    #[comptime] place: usize,
    #[comptime] split: Split,
) {
    let loads = comptime!(split.bits.loads());
    let group = min(group, share.groups - 1);
    #[unroll]
    for n in 0..comptime!(split.deep) {
        let at = min(share.row + n, share.last) * share.groups + group;
        let to = comptime!(place * split.deep + n);
        #[unroll]
        for load in 0..loads {
            requested.values[comptime!(to * loads + load)] = matrix.values[at * loads + load];
        }
        requested.scales[to] = matrix.scales[at];
    }
}

/// Adds the products of one group, which is held at `place`, to the sums, `[deep, tile]`.
#[cube]
fn multiply_add<N: Size>(
    sums: &mut Array<f32>,
    requested: &Requested<N>,
    x: &SharedMemory<f32>,
    group: usize,
    #[comptime] place: usize,
    #[comptime] split: Split,
) {
    let (deep, tile, bits) = comptime!((split.deep, split.tile, split.bits));
    let from = group * comptime!(split.line());
    // `[deep, tile]` for each power of two that numbers have.
    let powers = comptime!(bits.in_half());
    let mut parts = Array::<f32>::new(comptime!(powers * split.sums()));
    #[unroll]
    for n in 0..comptime!(powers * split.sums()) {
        parts[n] = 0.0f32;
    }
    #[unroll]
    for word in 0..comptime!(bits.words()) {
        #[unroll]
        for part in 0..comptime!(2 * powers) {
            let i = comptime!(number_of_group(bits, word, part));
            let mut numbers = Array::<f32>::new(deep);
            #[unroll]
            for n in 0..deep {
                let at = comptime!((place * deep + n) * bits.loads() + word / LOAD);
                numbers[n] = number(requested.values[at][comptime!(word % LOAD)], part, bits);
            }
            #[unroll]
            for m in 0..tile {
                let x = x[from + comptime!(m * GROUP + i)];
                #[unroll]
                for n in 0..deep {
                    let to = comptime!((n * tile + m) * powers + part % powers);
                    parts[to] += numbers[n] * x;
                }
            }
        }
    }
    #[unroll]
    for n in 0..deep {
        #[unroll]
        for m in 0..tile {
            let at = comptime!(n * tile + m);
            let mut all = parts[comptime!(at * powers)];
            #[unroll]
            for power in 1..powers {
                all += parts[comptime!(at * powers + power)] * comptime!(bits.unit(power));
            }
            sums[at] += requested.scales[comptime!(place * deep + n)] * all;
        }
    }
}

/// Place in its group of part `part` of word `word`; the parts of 4 bits are nibbles, low ones first.
pub(super) fn number_of_group(bits: Bits, word: usize, part: usize) -> usize {
    match bits {
        Bits::Eight => 4 * word + part,
        Bits::Four => 4 * word + part / 2 + GROUP / 2 * (part % 2),
    }
}

/// Part `part` of a word, over [`Bits::unit`] of it: the part stays where it stands in its half of the word.
#[cube]
pub(super) fn number(word: u32, #[comptime] part: usize, #[comptime] bits: Bits) -> f32 {
    // The sign of a byte turned, it counts from -128.
    let word = if comptime!(bits == Bits::Eight) { word ^ 0x8080_8080u32 } else { word };
    let half = if comptime!(part >= bits.in_half()) { word >> 16u32 } else { word };
    let (mask, base) = comptime!((bits.mask(part), Bits::BASE.to_bits()));
    f32::reinterpret((half & mask) | base) - comptime!(bits.excess(part))
}

/// Adds the sums of `team` units that share a row or column up, times the factors of the rows of x: y.
#[cube]
fn write_sums<F: Float>(
    y: &mut Array<F>,
    shared: &mut SharedMemory<f32>,
    sums: &Array<f32>,
    factors: &Array<f32>,
    share: &Share,
    sizes: Sizes,
    #[comptime] team: usize,
    #[comptime] split: Split,
) {
    let (tile, sums_of_unit) = comptime!((split.tile, split.sums()));
    let place = UNIT_POS as usize % team;
    let mut all = Array::<f32>::new(sums_of_unit);
    #[unroll]
    for n in 0..sums_of_unit {
        all[n] = sums[n] * factors[comptime!(n % tile)];
    }
    let team = comptime!(Team { units: team, planes: split.planes });
    over_team(&mut all, shared, sums_of_unit, false, team);
    // The units of a team deal its sums out.
    #[unroll]
    for n in 0..sums_of_unit {
        let row = share.row + comptime!(n / tile);
        let there = row <= share.last && comptime!(n % tile).runtime() < sizes.rows as usize;
        if place == comptime!(n).runtime() && there {
            let at = comptime!(n % tile).runtime() * sizes.columns as usize;
            y[at + share.before + row] = F::cast_from(all[n]);
        }
    }
}
