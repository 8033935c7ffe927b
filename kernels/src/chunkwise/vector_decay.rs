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

use crate::chunkwise::chunk::{Sums, between, seen, share_kept};
use crate::chunkwise::plan::Plan;
use crate::tile::{
    Acc, Grid, Pair, Parts, column, execute_tf32, inside, parts, put_parts, row, row_in, set, zeros,
};
use crate::variant::Transition;
use cubecl::prelude::*;

/// Tokens of a block of rows, as many as a fragment of tensor cores has.
const BLOCK: usize = 16;

/// Operands of scores, a slice of keys each: readers q and a, writers k and b. Where a variant has k for a, or no b,
/// another tile stands there.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ScoreRows<X: Float, N: Size> {
    pub q: SharedMemory<Vector<X, N>>,
    pub a: SharedMemory<Vector<X, N>>,
    pub k: SharedMemory<Vector<X, N>>,
    pub b: SharedMemory<Vector<X, N>>,
}

/// A block of scores: readers and writers by their places in [`ScoreRows`], q or a and k or b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Block {
    reader: usize,
    writer: usize,
}

/// Places of score blocks among those of a variant.
pub(crate) mod block {
    /// q|k.
    pub const QK: usize = 0;
    /// a|b, which is a|k in a delta rule.
    pub const AB: usize = 1;
    /// Low rank: q|b.
    pub const QB: usize = 2;
    /// Low rank: a|k.
    pub const AK: usize = 3;
}

/// A score block under way: its fragments, and near scores.
#[derive(CubeType)]
pub(crate) struct Score {
    pub acc: Acc,
    pub near: Array<f32>,
}

/// Operands of the adjoint of scores: their gradients, zero where there is no score, and the kinds of rows on the other side.
#[derive(CubeType)]
pub(crate) struct AdjointRows<X: Float, N: Size, M: Size> {
    /// Of every kind of rows that gradients are of with every kind on the other side: [`Adjoint::scores`].
    pub weights: Sequence<SharedMemory<Vector<X, M>>>,
    pub rows: Sequence<SharedMemory<Vector<X, N>>>,
}

/// The rows that an adjoint is of: gradients of several kinds of rows on one side share what is made of the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Adjoint {
    /// Of writers Y, not of readers X.
    pub of_y: bool,
    /// Kinds of rows that gradients are of.
    pub kinds: usize,
    /// Kinds of rows on the other side.
    pub others: usize,
    /// Whether each kind of readers, wherever they are, sees the sums of the token before it.
    pub before: [bool; 2],
}

impl Adjoint {
    /// The place of the scores of a kind of rows with one on the other side.
    pub fn scores(&self, kind: usize, other: usize) -> usize {
        kind * self.others + other
    }

    /// Kinds of readers.
    fn readers(&self) -> usize {
        if self.of_y { self.others } else { self.kinds }
    }

    /// Ways in which readers see: two where one kind sees the token before it and one does not.
    fn ways(&self) -> usize {
        if self.readers() == 2 && self.before[0] != self.before[1] { 2 } else { 1 }
    }

    /// The way in which reader `n` sees.
    fn way(&self, n: usize) -> usize {
        if self.ways() == 2 { n } else { 0 }
    }

    /// Ways in which rows on the other side are scaled.
    fn other_ways(&self) -> usize {
        if self.of_y { self.ways() } else { 1 }
    }

    /// The way of a kind on the other side.
    fn other_way(&self, other: usize) -> usize {
        if self.of_y { self.way(other) } else { 0 }
    }

    /// Whether a kind's gradients are scaled to the rows of the token before.
    fn scaled_before(&self, kind: usize) -> bool {
        !self.of_y && self.before[kind]
    }
}

/// How the reference row r of a sub-chunk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Reach {
    /// Which of the first and the last 8 rows of a block take part.
    filled: [bool; 2],
    /// Reader i sees the sums of the token before it.
    before: bool,
    /// From one row of a tile to the next.
    stride: usize,
    /// [`Grid::first_term`].
    first_term: usize,
}

impl Plan {
    /// The score blocks of a variant, in the order of [`block`].
    fn score_blocks(&self) -> Vec<Block> {
        let block = |reader, writer| Block { reader, writer };
        match self.variant.transition {
            Transition::Identity => vec![block(0, 0)],
            Transition::Delta { .. } => vec![block(0, 0), block(1, 0)],
            Transition::LowRank => vec![block(0, 0), block(1, 1), block(0, 1), block(1, 0)],
        }
    }

    /// Readers of scores: q, and a.
    fn readers(&self) -> usize {
        if self.variant.solves() { 2 } else { 1 }
    }

    /// Writers of scores: k, and b.
    fn writers(&self) -> usize {
        if self.variant.low_rank() { 2 } else { 1 }
    }

    /// Whether q (0) or a (1) sees the sums of the token before it.
    fn reader_before(&self, reader: usize) -> bool {
        if reader == 0 { self.variant.reads_before() } else { self.variant.erases_before() }
    }

    /// Whether there are scores under a vector decay, and they are products of blocks. On the plain engine they are
    /// weighted term by term.
    pub fn by_blocks(&self) -> bool {
        self.variant.vector() && self.has_planes()
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

/// Nothing yet, for each block of a variant.
#[cube]
pub(crate) fn no_scores(#[comptime] plan: Plan) -> Sequence<Score> {
    let count = comptime!(if plan.by_blocks() { NEAR } else { 1 });
    let mut all = Sequence::<Score>::new();
    #[unroll]
    for _ in 0..comptime!(plan.score_blocks().len()) {
        let mut near = Array::<f32>::new(count);
        #[unroll]
        for j in 0..count {
            near[j] = 0.0f32;
        }
        all.push(Score { acc: zeros(comptime!(plan.pairs().fragments())), near });
    }
    all
}

/// Readers' tile `n`.
#[cube]
fn reader_tile<X: Float, N: Size>(
    rows: &ScoreRows<X, N>,
    #[comptime] n: usize,
) -> SharedMemory<Vector<X, N>> {
    if comptime!(n == 0) { rows.q } else { rows.a }
}

/// Writers' tile `n`.
#[cube]
fn writer_tile<X: Float, N: Size>(
    rows: &ScoreRows<X, N>,
    #[comptime] n: usize,
) -> SharedMemory<Vector<X, N>> {
    if comptime!(n == 0) { rows.k } else { rows.b }
}

/// `(X|Y)_ij` of every block, added over one slice of keys; numbers above the diagonal are not to be used. With
/// [`Plan::by_blocks`], scores among 8 tokens go to [`Score::near`], for [`add_near`]. `keys`: how many there are. Loops
/// over them are not unrolled: with all their loads under way at once, one cube would fill a multiprocessor's registers.
#[cube]
pub(crate) fn add_scores<X: Float, N: Size>(
    scores: &mut Sequence<Score>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    keys: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.by_blocks()) {
        scores_by_blocks::<X, N>(scores, rows, sums, keys, plan);
        sum_near::<X, N>(scores, rows, sums, keys, plan);
    } else {
        #[unroll]
        for n in 0..comptime!(plan.score_blocks().len()) {
            let of = comptime!(plan.score_blocks()[n]);
            scores_by_terms::<X, N>(&mut scores.index_mut(n).acc, rows, sums, of, plan);
        }
    }
}

#[cube]
fn scores_by_terms<X: Float, N: Size>(
    acc: &mut Acc,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    #[comptime] of: Block,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.key_slice));
    let before = comptime!(plan.reader_before(of.reader));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid) * stride;
        #[unroll]
        for h in 0..2usize {
            let i = row_in(f, h, grid);
            let from = seen(i, before) * stride;
            let sum = acc.index(f)[h] + terms::<X, N>(rows, sums, i * stride, from, j, of, plan);
            set(acc.index_mut(f), h, sum);
        }
    }
}

/// Terms of one slice of keys of the scores of one reader with two writers side by side, whose rows begin at `at_reader`
/// and `writers`; the reader's sums begin at `from`.
#[cube]
fn terms<X: Float, N: Size>(
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    at_reader: usize,
    from: usize,
    writers: usize,
    #[comptime] of: Block,
    #[comptime] plan: Plan,
) -> Pair {
    let stride = comptime!(plan.stride(plan.key_slice));
    let x = reader_tile::<X, N>(rows, comptime!(of.reader));
    let y = writer_tile::<X, N>(rows, comptime!(of.writer));
    let mut sum = Pair::new(0.0f32);
    for d in 0..comptime!(plan.key_slice) {
        let mut w = Pair::empty();
        #[unroll]
        for l in 0..2usize {
            let at = writers + comptime!(l * stride) + d;
            w[l] = share_kept(between(sums, from + d, at)) * f32::cast_from(y[at]);
        }
        sum += Pair::new(f32::cast_from(x[at_reader + d])) * w;
    }
    sum
}

/// Adjoint of [`add_scores`] for one slice of keys, term by term, added to `acc`, [C, key_slice]: gradients of X from the
/// rows of Y, or (`of_y`) of Y from those of X. `before`: readers see the sums of the token before them.
#[cube]
pub(crate) fn adjoint_by_terms<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] of_y: bool,
    #[comptime] before: bool,
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
            let n = row_in(f, h, grid);
            let mut sum = acc.index(f)[h];
            for m in 0..comptime!(plan.chunk) {
                let i = if of_y { m } else { n };
                let j = if of_y { n } else { m };
                let weight = f32::cast_from(weights[i * pairs + j]);
                let reader = seen(i, before) * stride + d;
                let writer = j * stride + d;
                let mut w = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let y = f32::cast_from(rows[m * stride + d + l]);
                    w[l] = share_kept(between(sums, reader + l, writer + l)) * y;
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

/// [`add_scores`] by planes with tensor cores: each row is scaled once, for all blocks that it is in.
#[cube]
fn scores_by_blocks<X: Float, N: Size>(
    scores: &mut Sequence<Score>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    keys: usize,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.key_slice));
    let first_term = comptime!(plan.pairs().first_term());
    let corner = corner(grid);
    let lane = UNIT_POS as usize % 32;
    let own = lane / 4 * stride + lane % 4;
    let at = corner.top * stride + own;
    // Writers before the block; and its own first 8, for its last 8.
    let reference = seen(corner.top, true) * stride + lane % 4;
    let inner = (corner.top + 7) * stride + lane % 4;
    // Planes above the diagonal have no scores.
    if inside(0usize, grid) && corner.left <= corner.top {
        for step in 0..(keys - 1) / 8 + 1 {
            let mut far = Sequence::<Parts>::new();
            let mut within = Sequence::<Parts>::new();
            #[unroll]
            for n in 0..comptime!(plan.readers()) {
                let x = reader_tile::<X, N>(rows, n);
                let before = comptime!(plan.reader_before(n));
                let all = comptime!(Reach { filled: [true, true], before, stride, first_term });
                far.push(readers::<X, N>(&x, sums, at + step * 8, reference + step * 8, all));
                let last = comptime!(Reach { filled: [false, true], before, stride, first_term });
                within.push(readers::<X, N>(&x, sums, at + step * 8, inner + step * 8, last));
            }
            #[unroll]
            for c in 0..comptime!(grid.fragment_columns()) {
                let first = corner.left + comptime!(c * 8);
                let from = first * stride + own + step * 8;
                if first < corner.top {
                    let to = reference + step * 8;
                    add_writers::<X, N>(scores, &far, rows, sums, from, to, c, plan);
                } else if first == corner.top {
                    let to = inner + step * 8;
                    add_writers::<X, N>(scores, &within, rows, sums, from, to, c, plan);
                }
            }
        }
    }
}

/// Fragment `f` of all blocks: products of scaled readers with the writers that begin at `from`.
#[cube]
fn add_writers<X: Float, N: Size>(
    scores: &mut Sequence<Score>,
    readers: &Sequence<Parts>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    from: usize,
    reference: usize,
    #[comptime] f: usize,
    #[comptime] plan: Plan,
) {
    let first_term = comptime!(plan.pairs().first_term());
    #[unroll]
    for w in 0..comptime!(plan.writers()) {
        let y = writer_tile::<X, N>(rows, w);
        let right = writers::<X, N>(&y, sums, from, reference, first_term);
        #[unroll]
        for n in 0..comptime!(plan.score_blocks().len()) {
            let of = comptime!(plan.score_blocks()[n]);
            if comptime!(of.writer == w) {
                let left = readers.index(comptime!(of.reader));
                add_parts(&mut scores.index_mut(n).acc, left, &right, f, first_term);
            }
        }
    }
}

/// Adds one slice of keys to the near scores of token `unit / 4`, the keys `unit % 4`, 4 more and so on. A plane has 8
/// tokens: units four apart have the same keys, and pass their decays on.
#[cube]
fn sum_near<X: Float, N: Size>(
    scores: &mut Sequence<Score>,
    rows: &ScoreRows<X, N>,
    sums: &Sums,
    keys: usize,
    #[comptime] plan: Plan,
) {
    comptime!(assert!(plan.units == 4 * plan.chunk, "four units a token"));
    let stride = comptime!(plan.stride(plan.key_slice));
    let i = UNIT_POS as usize / 4;
    let own = i % comptime!(NEAR);
    let quarter = UNIT_POS as usize % 4;
    let first = (i - own) * stride + quarter;
    let count = comptime!(plan.readers());
    for turn in 0..(keys - 1) / 4 + 1 {
        let d = turn * 4;
        let here = i * stride + quarter + d;
        let own_decay = share_kept(between(sums, here, here - min(here, stride)));
        let mut x = Array::<f32>::new(count);
        #[unroll]
        for n in 0..count {
            let tile = reader_tile::<X, N>(rows, n);
            x[n] = f32::cast_from(tile[here]);
        }
        #[unroll]
        for back in 0..comptime!(NEAR) {
            let j = comptime!(NEAR - 1 - back);
            if comptime!(j + 1 < NEAR) {
                // From j on, the decays of all tokens after it, as far as a reader sees.
                let after = comptime!((j as u32 + 1) * 4) + quarter as u32;
                let decay = plane_shuffle(own_decay, after);
                #[unroll]
                for n in 0..count {
                    let sees = own >= comptime!(j + 1 + usize::from(plan.reader_before(n)));
                    x[n] = x[n] * select(sees, decay, 1.0f32);
                }
            }
            let at = first + d + comptime!(j * stride);
            #[unroll]
            for w in 0..comptime!(plan.writers()) {
                let tile = writer_tile::<X, N>(rows, w);
                let y = f32::cast_from(tile[at]);
                #[unroll]
                for n in 0..comptime!(plan.score_blocks().len()) {
                    let of = comptime!(plan.score_blocks()[n]);
                    if comptime!(of.writer == w) {
                        let score = scores.index_mut(n);
                        score.near[j] += x[comptime!(of.reader)] * y;
                    }
                }
            }
        }
    }
}

/// Adds near scores to the fragments that they belong to. Starts with a barrier.
#[cube]
pub(crate) fn add_near(
    score: &mut Score,
    exchange: &mut SharedMemory<f32>,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let corner = corner(grid);
    let unit = UNIT_POS as usize;
    #[unroll]
    for j in 0..comptime!(NEAR) {
        score.near[j] += plane_shuffle_xor(score.near[j], 1u32);
        score.near[j] += plane_shuffle_xor(score.near[j], 2u32);
    }
    sync_cube();
    let quarter = unit % 4;
    if quarter == 0 {
        #[unroll]
        for j in 0..comptime!(NEAR) {
            exchange[unit / 4 * comptime!(NEAR_STRIDE) + j] = score.near[j];
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
                    let mut sum = score.acc.index(c)[h];
                    sum[0] += exchange[at];
                    sum[1] += exchange[at + 1];
                    set(score.acc.index_mut(c), h, sum);
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
    #[comptime] reach: Reach,
) -> Parts {
    let filled = comptime!(reach.filled);
    let stride = comptime!(reach.stride);
    let first_term = comptime!(reach.first_term);
    let mut left = parts(4usize, first_term);
    #[unroll]
    for n in 0..4usize {
        let right = comptime!(n / 2 * 4);
        let mut number = 0.0f32;
        if comptime!(takes_part(filled, n % 2)) {
            let here = at + comptime!(n % 2 * 8 * stride + right);
            let mut from = here;
            if comptime!(reach.before) {
                // The first row of all sees itself.
                from = select(here < stride, here, here - min(here, stride));
            }
            let decay = share_kept(between(sums, from, reference + right));
            number = f32::cast_from(x[here]) * decay;
        }
        put_parts(&mut left, n, number, first_term);
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
    #[comptime] first_term: usize,
) -> Parts {
    let mut right = parts(2usize, first_term);
    #[unroll]
    for n in 0..2usize {
        let along = comptime!(n * 4);
        let decay = share_kept(between(sums, reference + along, at + along));
        put_parts(&mut right, n, f32::cast_from(y[at + along]) * decay, first_term);
    }
    right
}

/// Fragment `f` of `acc += left right`.
#[cube]
fn add_parts(
    acc: &mut Acc,
    left: &Parts,
    right: &Parts,
    #[comptime] f: usize,
    #[comptime] first_term: usize,
) {
    #[unroll]
    for term in first_term..3usize {
        execute_tf32(left, right, acc.index_mut(f), term);
    }
}

/// [`adjoint_by_terms`] by planes with tensor cores, of several kinds of rows together. `tokens`: how many the chunk has.
#[cube]
pub(crate) fn adjoint_by_blocks<X: Float, N: Size, M: Size>(
    accs: &mut Sequence<Acc>,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    tokens: usize,
    #[comptime] adjoint: Adjoint,
    #[comptime] plan: Plan,
) {
    let corner = corner(comptime!(plan.grid(plan.chunk, plan.key_slice)));
    if inside(0usize, comptime!(plan.grid(plan.chunk, plan.key_slice))) {
        // Tokens on the other side of the reference row, which is the last before the block or the last in it.
        let (reference, begin, end) = if adjoint.of_y {
            (corner.top + 15, corner.top + 16, comptime!(plan.chunk).runtime())
        } else {
            (seen(corner.top, true), 0usize.runtime(), corner.top)
        };
        let all = comptime!([true, true]);
        let mut far = no_sums(adjoint, plan);
        for step in begin / 8..end / 8 {
            let others = Others { corner, first: step * 8, reference };
            add_by_reference::<X, N, M>(&mut far, from, sums, &others, all, adjoint, plan);
        }
        add_scaled(accs, &far, sums, reference, all, adjoint, plan);
        // The other 8 tokens of the block.
        let reference = corner.top + 7;
        let first = if adjoint.of_y { corner.top + 8 } else { corner.top };
        let half = comptime!([adjoint.of_y, !adjoint.of_y]);
        let mut within = no_sums(adjoint, plan);
        let others = Others { corner, first, reference };
        add_by_reference::<X, N, M>(&mut within, from, sums, &others, half, adjoint, plan);
        add_scaled(accs, &within, sums, reference, half, adjoint, plan);
        add_own::<X, N, M>(accs, from, sums, &corner, tokens, adjoint, plan);
    }
}

/// Nothing yet of each kind of rows.
#[cube]
fn no_sums(#[comptime] adjoint: Adjoint, #[comptime] plan: Plan) -> Sequence<Acc> {
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let mut all = Sequence::<Acc>::new();
    #[unroll]
    for _ in 0..comptime!(adjoint.kinds) {
        all.push(zeros(comptime!(grid.fragments())));
    }
    all
}

/// 8 tokens on the other side, from `first` on; row `reference` is between them and a plane's block.
#[derive(CubeType, Clone, Copy)]
struct Others {
    corner: Corner,
    first: usize,
    reference: usize,
}

/// `by_kind += weights rows` over [`Others`], whose rows are scaled to row `reference`; `filled`: which of the first and
/// the last 8 rows of the plane's block take part.
#[cube]
fn add_by_reference<X: Float, N: Size, M: Size>(
    by_kind: &mut Sequence<Acc>,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    others: &Others,
    #[comptime] filled: [bool; 2],
    #[comptime] adjoint: Adjoint,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(plan.stride(plan.key_slice));
    let columns = comptime!(plan.grid(plan.chunk, plan.key_slice).fragment_columns());
    let first_term = comptime!(plan.pairs().first_term());
    let lane = UNIT_POS as usize % 32;
    let mut left = Sequence::<Parts>::new();
    #[unroll]
    for scores in 0..comptime!(adjoint.kinds * adjoint.others) {
        let weights = from.weights.index(scores);
        left.push(score_operand::<X, M>(weights, others, filled, comptime!(adjoint.of_y), plan));
    }
    #[unroll]
    for c in 0..columns {
        let d = others.corner.left + comptime!(c * 8) + lane / 4;
        let decays = decays_to_reference(sums, others, d, adjoint, plan);
        #[unroll]
        for other in 0..comptime!(adjoint.others) {
            let rows = from.rows.index(other);
            let mut right = parts(2usize, first_term);
            #[unroll]
            for n in 0..2usize {
                let row = others.first + lane % 4 + comptime!(n * 4);
                let decay = decays[comptime!(2 * adjoint.other_way(other) + n)];
                let number = f32::cast_from(rows[row * stride + d]) * decay;
                put_parts(&mut right, n, number, first_term);
            }
            #[unroll]
            for kind in 0..comptime!(adjoint.kinds) {
                let weights = left.index(comptime!(adjoint.scores(kind, other)));
                add_parts(by_kind.index_mut(kind), weights, &right, c, first_term);
            }
        }
    }
}

/// Gradients of the scores of a plane's rows with [`Others`], as a left operand.
#[cube]
fn score_operand<X: Float, M: Size>(
    weights: &SharedMemory<Vector<X, M>>,
    others: &Others,
    #[comptime] filled: [bool; 2],
    #[comptime] of_y: bool,
    #[comptime] plan: Plan,
) -> Parts {
    let pairs = comptime!(plan.stride(plan.chunk));
    let first_term = comptime!(plan.pairs().first_term());
    let lane = UNIT_POS as usize % 32;
    let mut left = parts(4usize, first_term);
    #[unroll]
    for n in 0..4usize {
        let mut number = 0.0f32;
        if comptime!(takes_part(filled, n % 2)) {
            let own = others.corner.top + lane / 4 + comptime!(n % 2 * 8);
            let other = others.first + lane % 4 + comptime!(n / 2 * 4);
            let at = if of_y { other * pairs + own } else { own * pairs + other };
            number = f32::cast_from(weights[at]);
        }
        put_parts(&mut left, n, number, first_term);
    }
    left
}

/// Decays between the reference row and this lane's two rows of [`Others`], in each way that these see.
#[cube]
fn decays_to_reference(
    sums: &Sums,
    others: &Others,
    d: usize,
    #[comptime] adjoint: Adjoint,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let stride = comptime!(plan.stride(plan.key_slice));
    let reference = others.reference * stride + d;
    let mut decays = Array::<f32>::new(comptime!(2 * adjoint.other_ways()));
    #[unroll]
    for way in 0..comptime!(adjoint.other_ways()) {
        #[unroll]
        for n in 0..2usize {
            let row = others.first + UNIT_POS as usize % 4 + comptime!(n * 4);
            decays[comptime!(2 * way + n)] = if adjoint.of_y {
                let reader = seen(row, comptime!(adjoint.before[way])) * stride + d;
                share_kept(between(sums, reader, reference))
            } else {
                share_kept(between(sums, reference, row * stride + d))
            };
        }
    }
    decays
}

/// Scales what [`add_by_reference`] has summed up from row `reference` to the plane's own rows, and adds it to `accs`.
#[cube]
fn add_scaled(
    accs: &mut Sequence<Acc>,
    by_kind: &Sequence<Acc>,
    sums: &Sums,
    reference: usize,
    #[comptime] filled: [bool; 2],
    #[comptime] adjoint: Adjoint,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(plan.stride(plan.key_slice));
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    #[unroll]
    for kind in 0..comptime!(adjoint.kinds) {
        let before = comptime!(adjoint.scaled_before(kind));
        #[unroll]
        for f in 0..comptime!(grid.fragments()) {
            let d = column(f, grid);
            #[unroll]
            for h in 0..2usize {
                if comptime!(takes_part(filled, h)) {
                    let i = row(f, h, grid);
                    let mut by = Pair::empty();
                    #[unroll]
                    for l in 0..2usize {
                        let middle = reference * stride + d + l;
                        by[l] = if adjoint.of_y {
                            share_kept(between(sums, middle, i * stride + d + l))
                        } else {
                            share_kept(between(sums, seen(i, before) * stride + d + l, middle))
                        };
                    }
                    let more = by_kind.index(kind).index(f)[h] * by;
                    let x = accs.index(kind).index(f)[h] + more;
                    set(accs.index_mut(kind).index_mut(f), h, x);
                }
            }
        }
    }
}

/// The terms of the 8 tokens that a row stands among.
#[cube]
fn add_own<X: Float, N: Size, M: Size>(
    accs: &mut Sequence<Acc>,
    from: &AdjointRows<X, N, M>,
    sums: &Sums,
    corner: &Corner,
    tokens: usize,
    #[comptime] adjoint: Adjoint,
    #[comptime] plan: Plan,
) {
    let of_y = comptime!(adjoint.of_y);
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let stride = comptime!(plan.stride(plan.key_slice));
    let pairs = comptime!(plan.stride(plan.chunk));
    comptime!(assert!(grid.fragment_rows() == 1, "a plane has one block of rows"));
    let across = comptime!(grid.fragments());
    let ways = comptime!(adjoint.ways());
    let column = column(0usize, grid);
    // Of 8 tokens, those that are there.
    let count = min(tokens, comptime!(NEAR));
    #[unroll]
    for h in 0..2usize {
        let n = row(0usize, h, grid);
        let own = n % comptime!(NEAR);
        let mut products = Array::<Pair>::new(comptime!(across * ways));
        #[unroll]
        for f in 0..comptime!(across * ways) {
            products[f] = Pair::new(1.0f32);
        }
        for turn in 0..count {
            // Away from the row itself, so that each token's decay is one factor more.
            let other = if of_y { turn } else { count - 1 - turn };
            let m = corner.top + comptime!(h * 8) + other;
            let i = if of_y { m } else { n };
            let j = if of_y { n } else { m };
            let weight_at = i * pairs + j;
            let others = m * stride + column;
            #[unroll]
            for way in 0..ways {
                let back = comptime!(usize::from(adjoint.before[way]));
                let newest =
                    if of_y { m - min(back, m) } else { min(m + 1, comptime!(plan.chunk - 1)) };
                let sees = if of_y { own + back < other } else { other + back < own };
                #[unroll]
                for f in 0..across {
                    let decays = newest * stride + column + comptime!(grid.step(f, 0)[1]);
                    let mut product = products[comptime!(way * across + f)];
                    #[unroll]
                    for l in 0..2usize {
                        product[l] = product[l] * select(sees, sums.decays[decays + l], 1.0f32);
                    }
                    products[comptime!(way * across + f)] = product;
                }
            }
            #[unroll]
            for of in 0..comptime!(adjoint.others) {
                let rows = from.rows.index(of);
                let mut weights = Array::<Pair>::new(comptime!(adjoint.kinds));
                #[unroll]
                for kind in 0..comptime!(adjoint.kinds) {
                    let all = from.weights.index(comptime!(adjoint.scores(kind, of)));
                    weights[kind] = Pair::new(f32::cast_from(all[weight_at]));
                }
                // All columns of the row, which share its weight.
                #[unroll]
                for f in 0..across {
                    let mut y = Pair::empty();
                    #[unroll]
                    for l in 0..2usize {
                        y[l] = f32::cast_from(rows[others + comptime!(grid.step(f, 0)[1] + l)]);
                    }
                    #[unroll]
                    for kind in 0..comptime!(adjoint.kinds) {
                        let way = comptime!(adjoint.way(if of_y { of } else { kind }));
                        // One number for all kinds that see in the same way.
                        let scaled = products[comptime!(way * across + f)] * y;
                        let sum = accs.index(kind).index(f)[h] + weights[kind] * scaled;
                        set(accs.index_mut(kind).index_mut(f), h, sum);
                    }
                }
            }
        }
    }
}
