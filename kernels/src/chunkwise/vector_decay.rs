//! Score blocks under a vector decay, which does not factor out of the product:
//! ```text
//! (X|Y)_ij = sum_d x_id y_jd e^{G_id - G_jd}
//! ```
//! The plain engine weights each term by itself. Planes with tensor cores cut a chunk into sub-chunks, blocks of 16
//! tokens, and put a reference row r between readers i and writers j, j <= r <= i (GLA's secondary chunking):
//! ```text
//! e^{G_i - G_j} = e^{G_i - G_r} e^{G_r - G_j}
//! ```
//! so that all but blocks on the diagonal are products of scaled rows. Within these 16 tokens the same is done
//! once more with 8, and what is left of 8 x 8 is weighted term by term, e^{G_i - G_j} as the product of e^g from
//! j + 1 to i. No exponent is ever above 0, in any way: nothing can overflow, whatever the log decays are.

use crate::chunkwise::chunk::{Sums, between, seen};
use crate::chunkwise::plan::Plan;
use crate::tile::{
    Acc, Grid, Pair, Parts, column, execute_tf32, inside, parts, put_parts, row, set, zeros,
};
use cubecl::prelude::*;

/// Tokens of a block of rows, as many as a fragment of tensor cores has.
const BLOCK: usize = 16;

/// Operands of scores, a slice of keys each: readers X and writers Y.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ScoreRows<X: Float, N: Size> {
    pub x: SharedMemory<Vector<X, N>>,
    pub y: SharedMemory<Vector<X, N>>,
}

/// Operands of the adjoint of scores: their gradients, zero where there is no score, and the rows on the other side.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct AdjointRows<X: Float, N: Size, M: Size> {
    pub weights: SharedMemory<Vector<X, M>>,
    pub rows: SharedMemory<Vector<X, N>>,
}

/// The rows that an adjoint is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    /// Writers Y, not readers X.
    pub of_y: bool,
    /// Reader i sees the sums of the token before it.
    pub before: bool,
}

/// How the reference row r of a sub-chunk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Reach {
    /// Which of the first and the last 8 rows of a block take part.
    filled: [bool; 2],
    side: Side,
    /// From one row of a tile to the next.
    stride: usize,
}

impl Plan {
    /// Whether scores under a vector decay are products of blocks; else they are weighted term by term.
    fn by_blocks(&self) -> bool {
        self.has_planes()
    }

    /// Whether scores among 8 tokens are summed up by themselves, from decays in a tile of their own. A delta rule
    /// gains (forward 2.16 to 1.63 ms on an H200); elsewhere fewer cubes for the tile's sake cost more than
    /// exponentials do (identity 0.89 to 1.08, low rank 4.8 to 6.0).
    pub fn has_near_scores(&self) -> bool {
        self.variant.vector() && self.variant.delta() && self.by_blocks()
    }

    /// Whether [`scores_adjoint`] takes decays in place of exponentials.
    pub fn adjoint_takes_decays(&self) -> bool {
        self.variant.vector() && self.by_blocks()
    }

    /// Numbers of shared memory that near scores go through to those who hold their fragments.
    pub fn near_numbers(&self) -> usize {
        self.chunk * NEAR_STRIDE
    }
}

/// Tokens that a token's near scores are with: those of its 8, from the first on.
const NEAR: usize = 8;
/// From one token's near scores to the next's: those of rows side by side share no bank.
const NEAR_STRIDE: usize = NEAR + 1;

/// Near scores of one token, over a quarter of its keys: a unit's share of [C, 8].
#[cube]
pub(crate) fn near_scores(#[comptime] wanted: bool, #[comptime] plan: Plan) -> Array<f32> {
    let count = comptime!(if wanted && plan.has_near_scores() { NEAR } else { 1 });
    let mut near = Array::<f32>::new(count);
    #[unroll]
    for j in 0..count {
        near[j] = 0.0f32;
    }
    near
}

/// `acc[i, j] += (X|Y)_ij` for one slice of keys; numbers above the diagonal are not to be used. With
/// [`Plan::has_near_scores`], scores among 8 tokens go to `near`, for [`add_near`].
#[cube]
pub(crate) fn scores<X: Float, N: Size>(
    acc: &mut Acc,
    near: &mut Array<f32>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.by_blocks()) {
        scores_by_blocks::<X, N>(acc, rows, sums, before, plan);
        if comptime!(plan.has_near_scores()) {
            sum_near::<X, N>(near, rows, sums, before, plan);
        } else {
            add_terms::<X, N>(acc, rows, sums, before, plan);
        }
    } else {
        scores_by_terms::<X, N>(acc, rows, sums, before, plan);
    }
}

#[cube]
fn scores_by_terms<X: Float, N: Size>(
    acc: &mut Acc,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid) * stride;
        #[unroll]
        for h in 0..2usize {
            let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let from = seen(i, before) * stride;
            let sum = acc.index(f)[h] + terms::<X, N>(rows, sums, i * stride, from, j, plan);
            set(acc.index_mut(f), h, sum);
        }
    }
}

/// Terms of one slice of keys of the scores of one reader with two writers side by side, whose rows begin at `reader`
/// and `writers`; the reader's sums begin at `from`.
#[cube]
fn terms<X: Float, N: Size>(
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    reader: usize,
    from: usize,
    writers: usize,
    #[comptime] plan: Plan,
) -> Pair {
    let stride = comptime!(plan.stride(plan.key_slice));
    let mut sum = Pair::new(0.0f32);
    for d in 0..comptime!(plan.key_slice) {
        let mut w = Pair::empty();
        #[unroll]
        for l in 0..2usize {
            let at = writers + comptime!(l * stride) + d;
            w[l] = f32::exp(between(sums, from + d, at)) * f32::cast_from(rows.y[at]);
        }
        sum += Pair::new(f32::cast_from(rows.x[reader + d])) * w;
    }
    sum
}

/// Adjoint of [`scores`] for one slice of keys, `acc[n, d]` over [C, key_slice]: gradients of X from
/// the rows of Y, or (`of_y`) of Y from those of X. `weights` is the gradient of the scores, zero
/// where there is no score.
#[cube]
pub(crate) fn scores_adjoint<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    #[comptime] side: Side,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.by_blocks()) {
        adjoint_by_blocks::<X, N, M>(acc, from, sums, side, plan);
    } else {
        adjoint_by_terms::<X, N, M>(acc, from, sums, side, plan);
    }
}

#[cube]
fn adjoint_by_terms<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    #[comptime] side: Side,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let stride = comptime!(plan.stride(plan.key_slice));
    let pairs = comptime!(plan.stride(plan.chunk));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let n = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let mut sum = acc.index(f)[h];
            for m in 0..comptime!(plan.chunk) {
                let i = if comptime!(side.of_y) { m } else { n };
                let j = if comptime!(side.of_y) { n } else { m };
                let weight = f32::cast_from(from.weights[i * pairs + j]);
                let reader = seen(i, side.before) * stride + d;
                let writer = j * stride + d;
                let mut w = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let y = f32::cast_from(from.rows[m * stride + d + l]);
                    w[l] = f32::exp(between(sums, reader + l, writer + l)) * y;
                }
                sum += Pair::new(weight) * w;
            }
            set(acc.index_mut(f), h, sum);
        }
    }
}

/// The 16 rows of this unit's plane, and its first column.
#[derive(CubeType, Clone, Copy)]
struct Corner {
    top: usize,
    left: usize,
}

#[cube]
fn corner(#[comptime] grid: Grid) -> Corner {
    comptime!(assert!(grid.down() * BLOCK == grid.m, "a plane has one block of rows"));
    let lane = UNIT_POS as usize % 32;
    Corner { top: row(0usize, 0usize, grid) - lane / 4, left: column(0usize, grid) - lane % 4 * 2 }
}

/// Whether the first or the last 8 rows of a block, `half`, are among those that are `filled`.
fn takes_part(filled: [bool; 2], half: usize) -> bool {
    filled[half]
}

/// [`scores`] by planes with tensor cores.
#[cube]
fn scores_by_blocks<X: Float, N: Size>(
    acc: &mut Acc,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let columns = comptime!(grid.fragment_columns());
    let stride = comptime!(plan.stride(plan.key_slice));
    let corner = corner(grid);
    let lane = UNIT_POS as usize % 32;
    let own = lane / 4 * stride + lane % 4;
    let reader = corner.top * stride + own;
    // Writers before the block; and its own first 8, for its last 8.
    let reference = seen(corner.top, true) * stride + lane % 4;
    let inner = (corner.top + 7) * stride + lane % 4;
    if inside(0usize, grid) {
        #[unroll]
        for step in 0..comptime!(plan.key_slice / 8) {
            let side = comptime!(Side { of_y: false, before });
            let all = comptime!(Reach { filled: [true, true], side, stride });
            let far = readers::<X, N>(&rows.x, sums, reader, reference, step, all);
            let last = comptime!(Reach { filled: [false, true], side, stride });
            let near = readers::<X, N>(&rows.x, sums, reader, inner, step, last);
            #[unroll]
            for c in 0..columns {
                let first = corner.left + comptime!(c * 8);
                let writer = first * stride + own;
                if first < corner.top {
                    let right = writers::<X, N>(&rows.y, sums, writer, reference, step);
                    add_parts(acc, &far, &right, c);
                } else if first == corner.top {
                    let right = writers::<X, N>(&rows.y, sums, writer, inner, step);
                    add_parts(acc, &near, &right, c);
                }
            }
        }
    }
}

/// Scores among 8 tokens, term by term, by those who hold their fragments.
#[cube]
fn add_terms<X: Float, N: Size>(
    acc: &mut Acc,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let columns = comptime!(grid.fragment_columns());
    let stride = comptime!(plan.stride(plan.key_slice));
    let corner = corner(grid);
    if inside(0usize, grid) {
        #[unroll]
        for c in 0..columns {
            #[unroll]
            for h in 0..2usize {
                if corner.left + comptime!(c * 8) == corner.top + comptime!(h * 8) {
                    let i = row(c, h, grid);
                    let from = seen(i, before) * stride;
                    let j = column(c, grid) * stride;
                    let sum =
                        acc.index(c)[h] + terms::<X, N>(rows, sums, i * stride, from, j, plan);
                    set(acc.index_mut(c), h, sum);
                }
            }
        }
    }
}

/// Adds one slice of keys to the near scores of token `unit / 4`, the keys `unit % 4`, 4 more and so on.
#[cube]
fn sum_near<X: Float, N: Size>(
    near: &mut Array<f32>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    comptime!(assert!(plan.units == 4 * plan.chunk, "four units a token"));
    let stride = comptime!(plan.stride(plan.key_slice));
    let i = UNIT_POS as usize / 4;
    let own = i % comptime!(NEAR);
    let quarter = UNIT_POS as usize % 4;
    let first = (i - own) * stride + quarter;
    #[unroll]
    for turn in 0..comptime!(plan.key_slice / 4) {
        let d = comptime!(turn * 4);
        let mut reader = f32::cast_from(rows.x[i * stride + quarter + d]);
        #[unroll]
        for back in 0..comptime!(NEAR) {
            let j = comptime!(NEAR - 1 - back);
            let at = first + comptime!(j * stride + d);
            if comptime!(j + 1 < NEAR) {
                // From j on, the decays of all tokens after it, as far as the reader sees.
                let decay = sums.decays[at + stride];
                let sees = own >= comptime!(j + 1 + usize::from(before));
                reader *= select(sees, decay, 1.0f32);
            }
            near[j] += reader * f32::cast_from(rows.y[at]);
        }
    }
}

/// Adds near scores to the fragments that they belong to. Starts with a barrier.
#[cube]
pub(crate) fn add_near(
    acc: &mut Acc,
    near: &mut Array<f32>,
    exchange: &mut SharedMemory<f32>,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let corner = corner(grid);
    let unit = UNIT_POS as usize;
    #[unroll]
    for j in 0..comptime!(NEAR) {
        near[j] += plane_shuffle_xor(near[j], 1u32);
        near[j] += plane_shuffle_xor(near[j], 2u32);
    }
    sync_cube();
    let quarter = unit % 4;
    if quarter == 0 {
        #[unroll]
        for j in 0..comptime!(NEAR) {
            exchange[unit / 4 * comptime!(NEAR_STRIDE) + j] = near[j];
        }
    }
    sync_cube();
    if inside(0usize, grid) {
        #[unroll]
        for c in 0..comptime!(grid.fragment_columns()) {
            #[unroll]
            for h in 0..2usize {
                if corner.left + comptime!(c * 8) == corner.top + comptime!(h * 8) {
                    let at = row(c, h, grid) * comptime!(NEAR_STRIDE) + quarter * 2;
                    let mut sum = acc.index(c)[h];
                    sum[0] += exchange[at];
                    sum[1] += exchange[at + 1];
                    set(acc.index_mut(c), h, sum);
                }
            }
        }
    }
}

/// Rows of X, times the decay from row `reference` to each, as a left operand; `filled`: which of the first and
/// the last 8 rows, zeros for the others.
#[cube]
fn readers<X: Float, N: Size>(
    x: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    at: usize,
    reference: usize,
    #[comptime] step: usize,
    #[comptime] reach: Reach,
) -> Parts {
    let filled = comptime!(reach.filled);
    let side = comptime!(reach.side);
    let stride = comptime!(reach.stride);
    let mut left = parts(4usize);
    #[unroll]
    for n in 0..4usize {
        let right = comptime!(step * 8 + n / 2 * 4);
        let mut number = 0.0f32;
        if comptime!(takes_part(filled, n % 2)) {
            let here = at + comptime!(n % 2 * 8 * stride + right);
            let mut from = here;
            if comptime!(side.before) {
                // The first row of all sees itself.
                from = select(here < stride, here, here - min(here, stride));
            }
            let decay = f32::exp(between(sums, from, reference + right));
            number = f32::cast_from(x[here]) * decay;
        }
        put_parts(&mut left, n, number);
    }
    left
}

/// Rows of Y, times the decay from each to row `reference`, as a right operand.
#[cube]
fn writers<X: Float, N: Size>(
    y: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    at: usize,
    reference: usize,
    #[comptime] step: usize,
) -> Parts {
    let mut right = parts(2usize);
    #[unroll]
    for n in 0..2usize {
        let along = comptime!(step * 8 + n * 4);
        let decay = f32::exp(between(sums, reference + along, at + along));
        put_parts(&mut right, n, f32::cast_from(y[at + along]) * decay);
    }
    right
}

/// Fragment `f` of `acc += left right`.
#[cube]
fn add_parts(acc: &mut Acc, left: &Parts, right: &Parts, #[comptime] f: usize) {
    #[unroll]
    for term in 0..3usize {
        execute_tf32(left, right, acc.index_mut(f), term);
    }
}

/// [`scores_adjoint`] by planes with tensor cores.
#[cube]
fn adjoint_by_blocks<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    #[comptime] side: Side,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let stride = comptime!(plan.stride(plan.key_slice));
    let corner = corner(grid);
    if inside(0usize, grid) {
        // Tokens on the other side of the reference row, which is the last before the block or the last in it.
        let (reference, begin, end) = if side.of_y {
            (corner.top + 15, corner.top + 16, comptime!(plan.chunk).runtime())
        } else {
            (seen(corner.top, true), 0usize.runtime(), corner.top)
        };
        let all = comptime!(Reach { filled: [true, true], side, stride });
        let mut sum = zeros(comptime!(grid.fragments()));
        for step in begin / 8..end / 8 {
            let others = Others { corner, first: step * 8, reference };
            add_by_reference::<X, N, M>(&mut sum, from, sums, &others, all, plan);
        }
        scale_to_rows(&mut sum, sums, reference, all, plan);
        add_fragments(acc, &sum, grid);
        // The other 8 tokens of the block.
        let reference = corner.top + 7;
        let first = if side.of_y { corner.top + 8 } else { corner.top };
        let half = comptime!(Reach { filled: [side.of_y, !side.of_y], side, stride });
        let mut sum = zeros(comptime!(grid.fragments()));
        let others = Others { corner, first, reference };
        add_by_reference::<X, N, M>(&mut sum, from, sums, &others, half, plan);
        scale_to_rows(&mut sum, sums, reference, half, plan);
        add_fragments(acc, &sum, grid);
        add_own::<X, N, M>(acc, from, sums, &corner, side, plan);
    }
}

/// 8 tokens on the other side, from `first` on; row `reference` is between them and a plane's block.
#[derive(CubeType, Clone, Copy)]
struct Others {
    corner: Corner,
    first: usize,
    reference: usize,
}

/// `sum += weights rows` over [`Others`], whose rows are scaled to row `reference`.
#[cube]
fn add_by_reference<X: Float, N: Size, M: Size>(
    sum: &mut Acc,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    others: &Others,
    #[comptime] reach: Reach,
    #[comptime] plan: Plan,
) {
    let filled = comptime!(reach.filled);
    let side = comptime!(reach.side);
    let stride = comptime!(reach.stride);
    let of_y = comptime!(side.of_y);
    let before = comptime!(side.before);
    let corner = others.corner;
    let first = others.first;
    let reference = others.reference;
    let pairs = comptime!(plan.stride(plan.chunk));
    let columns = comptime!(plan.grid(plan.chunk, plan.key_slice).fragment_columns());
    let lane = UNIT_POS as usize % 32;
    let mut left = parts(4usize);
    #[unroll]
    for n in 0..4usize {
        let mut number = 0.0f32;
        if comptime!(takes_part(filled, n % 2)) {
            let own = corner.top + lane / 4 + comptime!(n % 2 * 8);
            let other = first + lane % 4 + comptime!(n / 2 * 4);
            let at = if of_y { other * pairs + own } else { own * pairs + other };
            number = f32::cast_from(from.weights[at]);
        }
        put_parts(&mut left, n, number);
    }
    #[unroll]
    for c in 0..columns {
        let d = corner.left + comptime!(c * 8) + lane / 4;
        let mut right = parts(2usize);
        #[unroll]
        for n in 0..2usize {
            let other = first + lane % 4 + comptime!(n * 4);
            let decay = if of_y {
                f32::exp(between(sums, seen(other, before) * stride + d, reference * stride + d))
            } else {
                f32::exp(between(sums, reference * stride + d, other * stride + d))
            };
            put_parts(&mut right, n, f32::cast_from(from.rows[other * stride + d]) * decay);
        }
        add_parts(sum, &left, &right, c);
    }
}

/// Scales what [`add_by_reference`] has summed up from row `reference` to the plane's own rows.
#[cube]
fn scale_to_rows(
    sum: &mut Acc,
    sums: &Sums,
    reference: usize,
    #[comptime] reach: Reach,
    #[comptime] plan: Plan,
) {
    let filled = comptime!(reach.filled);
    let side = comptime!(reach.side);
    let stride = comptime!(reach.stride);
    let of_y = comptime!(side.of_y);
    let before = comptime!(side.before);
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            if comptime!(takes_part(filled, h)) {
                let i = row(f, h, grid);
                let mut x = sum.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    let middle = reference * stride + d + l;
                    let decay = if of_y {
                        f32::exp(between(sums, middle, i * stride + d + l))
                    } else {
                        f32::exp(between(sums, seen(i, before) * stride + d + l, middle))
                    };
                    x[l] = x[l] * decay;
                }
                set(sum.index_mut(f), h, x);
            }
        }
    }
}

#[cube]
fn add_fragments(acc: &mut Acc, sum: &Acc, #[comptime] grid: Grid) {
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        #[unroll]
        for h in 0..2usize {
            let x = acc.index(f)[h] + sum.index(f)[h];
            set(acc.index_mut(f), h, x);
        }
    }
}

/// The terms of the 8 tokens that a row stands among.
#[cube]
fn add_own<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    corner: &Corner,
    #[comptime] side: Side,
    #[comptime] plan: Plan,
) {
    let of_y = comptime!(side.of_y);
    let before = comptime!(side.before);
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let stride = comptime!(plan.stride(plan.key_slice));
    let pairs = comptime!(plan.stride(plan.chunk));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let n = row(f, h, grid);
            let mut sum = acc.index(f)[h];
            let own = n % comptime!(NEAR);
            let mut product = Pair::new(1.0f32);
            #[unroll]
            for turn in 0..comptime!(NEAR) {
                // Away from the row itself, so that each token's decay is one factor more.
                let other = comptime!(if of_y { turn } else { NEAR - 1 - turn });
                let m = corner.top + comptime!(h * 8 + other);
                let i = if of_y { m } else { n };
                let j = if of_y { n } else { m };
                let back = comptime!(usize::from(before));
                if comptime!(turn > 0) {
                    let newest = if of_y { m - back } else { m + 1 };
                    let sees = if of_y { own + back < other } else { other + back < own };
                    #[unroll]
                    for l in 0..2usize {
                        let decay = sums.decays[newest * stride + d + l];
                        product[l] = product[l] * select(sees, decay, 1.0f32);
                    }
                }
                let mut y = Pair::empty();
                y[0] = f32::cast_from(from.rows[m * stride + d]);
                y[1] = f32::cast_from(from.rows[m * stride + d + 1]);
                sum += Pair::new(f32::cast_from(from.weights[i * pairs + j])) * product * y;
            }
            set(acc.index_mut(f), h, sum);
        }
    }
}
