//! UT transform on tensor cores of 16 bits ([`Engine::Mma`](super::Engine::Mma)), chunks of 64: the algorithm of
//! [`inverse`](super::inverse), its numbers split for the merges once, when they are written.
//!
//! ```text
//! system, solved   blocks of 16 on the diagonals of M and of T, [C / 16, 16, 16] in f32
//! m, t             the rest of M, and all of T: large parts, then small ones, whose sum a number nearly is; each a
//!                  swizzled tile, which `ldmatrix` reads in either direction and of which T's large parts are T, rounded
//! ```
//! Blocks of 16 are inverted in f32: two blocks of 8 each, row by row and a unit a column, then what lies below them, a
//! unit a number.

use super::mma::{execute, load_matrix_at, pair, split};
use super::ptx::sync_some;
use super::warpgroup::{SWIZZLED, swizzled};
use super::{Acc, Grid, Pair, column, inside, row, tile_aligned};
use cubecl::prelude::*;

/// Rows and columns.
const CHUNK: usize = 64;
/// Numbers of a tile of large or of small parts.
const SQUARE: usize = CHUNK * CHUNK;
/// Side of a block on the diagonals in f32.
const BLOCK: usize = 16;
/// Numbers of all of them.
const DIAGONAL: usize = CHUNK * BLOCK;
/// Side of a block that is solved row by row.
const HALF: usize = BLOCK / 2;
/// Units of an inverse.
pub(crate) const INVERTING_UNITS: usize = 256;

/// Numbers of T, large and small parts.
pub(crate) const INVERSE: usize = 2 * SQUARE;

/// Bytes of M and of the diagonals.
pub(crate) const SYSTEM_MEMORY: usize = 2 * INVERSE + 8 * DIAGONAL;

/// M and the diagonals. E: what tensor cores multiply; M: a pair of it.
#[derive(CubeType)]
pub(crate) struct SplitSystem<E: Float, M: Size> {
    m: SharedMemory<Vector<E, M>>,
    system: SharedMemory<f32>,
    solved: SharedMemory<f32>,
}

/// Room for them, or for nothing where there is no inverse.
#[cube]
pub(crate) fn split_system<E: Float, M: Size>(#[comptime] there: bool) -> SplitSystem<E, M> {
    let [square, diagonal] = comptime!(if there { [INVERSE, DIAGONAL] } else { [16, 4] });
    SplitSystem::<E, M> {
        m: tile_aligned::<E, M>(square, comptime!(if there { SWIZZLED } else { 16 })),
        system: SharedMemory::<f32>::new_aligned(diagonal, 16usize),
        solved: SharedMemory::<f32>::new_aligned(diagonal, 16usize),
    }
}

/// A barrier of the first [`INVERTING_UNITS`] units: all of the cube, unless it is in two parts.
#[cube]
fn sync(#[comptime] apart: bool) {
    if comptime!(apart) {
        sync_some(0usize, INVERTING_UNITS);
    } else {
        sync_cube();
    }
}

/// Fills M with a product's part below the diagonal, row i times number i of `scales` from `at` on, or (`of_beta`) times its
/// negative.
#[cube]
pub(crate) fn fill_split_system<E: Float, M: Size>(
    to: &mut SplitSystem<E, M>,
    acc: &Acc,
    scales: &SharedMemory<f32>,
    at: usize,
    #[comptime] of_beta: bool,
    #[comptime] grid: Grid,
) {
    comptime!(assert!(grid.fragment_columns().is_multiple_of(2) && grid.m == CHUNK));
    comptime!(assert!(grid.first == 0 && grid.units == INVERTING_UNITS));
    #[unroll]
    for pair in 0..comptime!(grid.fragments() / 2) {
        // A plane's 16 rows and columns are of one block each.
        let first = comptime!(2 * pair);
        let row_block = row(first, 0usize, grid) / BLOCK;
        let column_block = column(first, grid) / BLOCK;
        if inside(first, grid) && column_block < row_block {
            #[unroll]
            for n in 0..4usize {
                let (f, h) = comptime!((first + n / 2, n % 2));
                let i = row(f, h, grid);
                let x = acc.index(f)[h] * Pair::new(factor(scales, at + i, of_beta));
                put_split::<E, M>(&mut to.m, 0usize, i, column(f, grid), x);
            }
        } else if inside(first, grid) && column_block == row_block {
            #[unroll]
            for n in 0..4usize {
                let (f, h) = comptime!((first + n / 2, n % 2));
                let i = row(f, h, grid);
                let x = acc.index(f)[h] * Pair::new(factor(scales, at + i, of_beta));
                let at = i * BLOCK + column(f, grid) % BLOCK;
                to.system[at] = x[0];
                to.system[at + 1] = x[1];
            }
        }
    }
}

/// Number `at` of scales, or its negative.
#[cube]
fn factor(scales: &SharedMemory<f32>, at: usize, #[comptime] negative: bool) -> f32 {
    if comptime!(negative) { -scales[at] } else { scales[at] }
}

/// A pair of neighbouring columns of row `i`, from column `j` on, in two parts.
#[cube]
fn put_split<E: Float, M: Size>(
    to: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    i: usize,
    j: usize,
    x: Pair,
) {
    let parts = split::<E>(x[0], x[1]);
    let place = (at + swizzled(i, j / 8, CHUNK) * 8 + j % 8) / 2;
    to[place] = Vector::cast_from(parts[0]);
    to[place + SQUARE / 2] = Vector::cast_from(parts[1]);
}

/// Begins `t = (I - M)^-1`, which begins `at` numbers into its tile: solves the blocks of 8 on the diagonal, and fills with
/// zeros what lies above those of 16. Starts with a barrier; units from C on have little to do until
/// [`finish_split_inverse`].
#[cube]
pub(crate) fn begin_split_inverse<E: Float, M: Size>(
    from: &mut SplitSystem<E, M>,
    t: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    #[comptime] apart: bool,
) {
    sync(apart);
    let unit = UNIT_POS as usize;
    if unit < CHUNK {
        solve_column(&from.system, &mut from.solved, unit);
    } else if unit < INVERTING_UNITS {
        write_zeros::<E, M>(t, at, unit - CHUNK);
    }
}

/// Column `j` of T within a block of 8, by substitution: four rows at a time go into all below them.
#[cube]
fn solve_column(system: &SharedMemory<f32>, solved: &mut SharedMemory<f32>, j: usize) {
    let column = j % HALF;
    let corner = j / BLOCK * (BLOCK * BLOCK) + j / HALF % 2 * (HALF * BLOCK + HALF);
    let fours = system.to_slice().into_vectorized().with_vector_size::<Const<4>>();
    let mut x = Array::<f32>::new(HALF);
    #[unroll]
    for i in 0..HALF {
        x[i] = select(column == i, 1.0f32, 0.0f32);
    }
    #[unroll]
    for four in 0..HALF / 4 {
        #[unroll]
        for i in comptime!(four * 4 + 1)..HALF {
            let m = fours[corner / 4 + comptime!((i * BLOCK + four * 4) / 4)];
            #[unroll]
            for n in 0..4usize {
                if comptime!(four * 4 + n < i) {
                    x[i] = fma(m[n], x[comptime!(four * 4 + n)], x[i]);
                }
            }
        }
    }
    #[unroll]
    for i in 0..HALF {
        solved[corner + i * BLOCK + column] = x[i];
    }
}

/// Zeros above the blocks of 16: of 192 vectors of 8 numbers, `n`, both parts.
#[cube]
fn write_zeros<E: Float, M: Size>(t: &mut SharedMemory<Vector<E, M>>, at: usize, n: usize) {
    // Six columns of vectors beside the first block, four beside the second, two beside the third.
    let q = n / BLOCK;
    let mut block = 0usize;
    let mut vector = q + 2;
    if q >= 10 {
        block = 2usize;
        vector = q - 4;
    } else if q >= 6 {
        block = 1usize;
        vector = q - 2;
    }
    let place = (at + swizzled(block * BLOCK + n % BLOCK, vector, CHUNK) * 8) / 2;
    #[unroll]
    for part in 0..2usize {
        #[unroll]
        for word in 0..4usize {
            let place = place + comptime!(part * SQUARE / 2 + word);
            t[place] = Vector::new(E::new(0.0));
        }
    }
}

/// Ends what [`begin_split_inverse`] began. Starts and ends with a barrier.
#[cube]
pub(crate) fn finish_split_inverse<E: Float, M: Size>(
    from: &mut SplitSystem<E, M>,
    t: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    #[comptime] apart: bool,
) {
    sync(apart);
    join_halves::<E, M>(from, apart);
    round_diagonal::<E, M>(&from.solved, t, at);
    sync(apart);
    #[unroll]
    for level in 0..comptime!((CHUNK / BLOCK).ilog2()) {
        merge::<E, M>(&mut from.m, t, at, comptime!(BLOCK << level), apart);
    }
}

/// T22 M21 T11 below two blocks of 8, a unit a number. M21 T11 lies beside them until then, in what is zero of M.
#[cube]
fn join_halves<E: Float, M: Size>(from: &mut SplitSystem<E, M>, #[comptime] apart: bool) {
    let unit = UNIT_POS as usize;
    let (i, j) = (unit / HALF % HALF, unit % HALF);
    let corner = unit / (HALF * HALF) * (BLOCK * BLOCK);
    let below = corner + (HALF + i) * BLOCK;
    let mut x = 0.0f32;
    #[unroll]
    for k in 0..HALF {
        x = fma(from.system[below + k], from.solved[corner + k * BLOCK + j], x);
    }
    from.system[corner + i * BLOCK + HALF + j] = x;
    sync(apart);
    let mut x = 0.0f32;
    #[unroll]
    for k in 0..HALF {
        let right = from.system[corner + comptime!(k * BLOCK + HALF) + j];
        x = fma(from.solved[below + HALF + k], right, x);
    }
    from.solved[below + j] = x;
    sync(apart);
}

/// Blocks of 16 on T's diagonal, in two parts.
#[cube]
fn round_diagonal<E: Float, M: Size>(
    solved: &SharedMemory<f32>,
    t: &mut SharedMemory<Vector<E, M>>,
    at: usize,
) {
    #[unroll]
    for turn in 0..DIAGONAL / 2 / INVERTING_UNITS {
        let n = UNIT_POS as usize + comptime!(turn * INVERTING_UNITS);
        let (i, j) = (n / HALF, n % HALF * 2);
        // Beside two blocks of 8 nothing was written.
        let there = i % BLOCK >= HALF || j < HALF;
        let mut x = Pair::empty();
        x[0] = select(there, solved[n * 2], 0.0f32);
        x[1] = select(there, solved[n * 2 + 1], 0.0f32);
        put_split::<E, M>(t, at, i, i / BLOCK * BLOCK + j, x);
    }
}

/// Merges neighbouring blocks of `side` rows: a plane 16 rows by 8 columns of M21 T11, then of T22 M21 T11.
#[cube]
fn merge<E: Float, M: Size>(
    m: &mut SharedMemory<Vector<E, M>>,
    t: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    #[comptime] side: usize,
    #[comptime] apart: bool,
) {
    let down = comptime!(side / 16);
    let tiles = comptime!(down * (side / 8));
    let plane = UNIT_POS as usize / 32;
    let low = plane / tiles * comptime!(2 * side);
    let i = low + side + plane % down * 16;
    let j = low + plane % tiles / down * 8;
    let works = plane < comptime!(CHUNK / side / 2 * tiles);
    let mut x = no_product();
    if works {
        let a = Place { at: 0usize.runtime(), i, j: low };
        add_split_product::<E, M>(&mut x, m, &a, t, &Place { at, i: low, j }, side);
    }
    sync(apart);
    if works {
        put_product::<E, M>(m, &x, &Place { at: 0usize.runtime(), i, j });
    }
    sync(apart);
    let mut x = no_product();
    if works {
        let a = Place { at, i, j: low + side };
        let b = Place { at: 0usize.runtime(), i: low + side, j };
        add_split_product::<E, M>(&mut x, t, &a, m, &b, side);
        put_product::<E, M>(t, &x, &Place { at, i, j });
    }
    sync(apart);
}

/// A matrix within a tile: its first row and column, `at` numbers into it.
#[derive(CubeType)]
struct Place {
    at: usize,
    i: usize,
    j: usize,
}

/// Vectors of `width` numbers from the tile's start to eight columns of a row.
#[cube]
fn vector_at(place: &Place, down: usize, right: usize, #[comptime] width: usize) -> usize {
    (place.at + swizzled(place.i + down, (place.j + right) / 8, CHUNK) * 8) / width
}

#[cube]
fn no_product() -> Array<Pair> {
    let mut x = Array::<Pair>::new(2usize);
    x[0] = Pair::new(0.0);
    x[1] = Pair::new(0.0);
    x
}

/// `x += A B` for 16 rows of A and 8 columns of B, without the product of their small parts.
#[cube]
fn add_split_product<E: Float, M: Size>(
    x: &mut Array<Pair>,
    a: &SharedMemory<Vector<E, M>>,
    a_place: &Place,
    b: &SharedMemory<Vector<E, M>>,
    b_place: &Place,
    #[comptime] depth: usize,
) {
    let width = M::value();
    let lane = UNIT_POS as usize % 32;
    let small = comptime!(SQUARE / width);
    #[unroll]
    for k in 0..comptime!(depth / 16) {
        let at = vector_at(a_place, lane % 16, lane / 16 * 8 + comptime!(k * 16), width);
        let large_a = load_matrix_at::<E, M>(a, at, false);
        let small_a = load_matrix_at::<E, M>(a, at + small, false);
        // Half of the lanes read large parts, half of them small ones.
        let at = vector_at(b_place, lane % 16 + comptime!(k * 16), 0usize, width);
        let both = load_matrix_at::<E, M>(b, at + lane / 16 * small, true);
        let large_b = pair(&both, 0usize, 1usize);
        let small_b = pair(&both, 2usize, 3usize);
        execute::<E>(&small_a, &large_b, x);
        execute::<E>(&large_a, &small_b, x);
        execute::<E>(&large_a, &large_b, x);
    }
}

/// Writes a plane's 16 x 8 numbers.
#[cube]
fn put_product<E: Float, M: Size>(
    to: &mut SharedMemory<Vector<E, M>>,
    x: &Array<Pair>,
    place: &Place,
) {
    let lane = UNIT_POS as usize % 32;
    let (i, j) = (place.i + lane / 4, place.j + lane % 4 * 2);
    #[unroll]
    for h in 0..2usize {
        put_split::<E, M>(to, place.at, i + comptime!(8 * h), j, x[h]);
    }
}
