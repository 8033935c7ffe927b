//! Decay within a chunk: the mask of its scores, and the factors of its tokens.

use crate::chunkwise::chunk::{Sums, between, seen, share_kept, since_start};
use crate::chunkwise::plan::Plan;
use crate::tile::{Acc, Grid, Pair, Rows, column, row, row_in, set};
use cubecl::prelude::*;

/// Rows of a chunk's decay factors, C numbers each.
pub(crate) mod decay_factors {
    /// e^G of queries: factor of q S.
    pub const QUERY: usize = 0;
    /// e^G of erase keys: factor of a S, the delta rule's -beta included.
    pub const ERASE: usize = 1;
    /// e^{G_C - G}: share of a token's write that is left at the end of the chunk.
    pub const KEY_TO_END: usize = 2;
    /// e^G: share of the chunk's first state; the last entry is the chunk decay e^{G_C}.
    pub const FROM_START: usize = 3;
    /// beta: factor of v in a delta rule.
    pub const BETA: usize = 4;
    /// How many there are.
    pub const ROWS: usize = 5;
    /// Where producers invert under a scalar decay there are as many more, for masks: of scores below the blocks of 16 on
    /// the diagonal, whose decay is that from the token before a block on, times that up to it.
    ///
    /// Of a query's row i, and of an erase key's: from the token before the row's block on.
    pub const QUERY_ROW: usize = 5;
    pub const ERASE_ROW: usize = 6;
    /// From token j up to the token before block 1; then 2, and 3.
    pub const UP_TO_BLOCK: usize = 7;
    /// How many there are then.
    pub const ROWS_WITH_MASKS: usize = 10;
}

/// Tokens of a block of a mask.
pub(crate) const MASK_BLOCK: usize = 16;

/// How scores are masked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Mask {
    /// Zero on the diagonal, too.
    pub strict: bool,
    /// Row i sees the sums of the token before it.
    pub before: bool,
    /// A fragment above the diagonal is filled with zeros and saves its exponentials.
    pub by_fragment: bool,
}

/// Decay mask at (i, j): e^{G_i - G_j} of a scalar decay, 1 of another, 0 above the diagonal (`strict`: and on
/// it). `before`: row i sees the sums of the token before it.
#[cube]
pub(crate) fn decay_mask(
    sums: &Sums,
    i: usize,
    j: usize,
    #[comptime] strict: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let mut decay = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        decay = share_kept(between(sums, seen(i, before), j));
    }
    if comptime!(strict) { select(i > j, decay, 0.0f32) } else { select(i >= j, decay, 0.0f32) }
}

/// Multiplies every score by its [`decay_mask`]; the chunk's sums begin at `at`.
#[cube]
pub(crate) fn apply_decay_mask(
    acc: &mut Acc,
    sums: &Sums,
    at: usize,
    #[comptime] mask: Mask,
    #[comptime] plan: Plan,
) {
    let strict = comptime!(mask.strict);
    let before = comptime!(mask.before);
    let by_fragment = comptime!(mask.by_fragment);
    let grid = comptime!(plan.pairs());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = at + column(f, grid);
        let mut low = true;
        // A vector decay has no exponentials here.
        if comptime!(by_fragment && !plan.variant.vector()) {
            low = intersects_lower_triangle(f, j - at, grid);
        }
        #[unroll]
        for h in 0..2usize {
            let mut x = Pair::new(0.0);
            if low {
                let i = at + row_in(f, h, grid);
                x = acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    x[l] = x[l] * decay_mask(sums, i, j + l, strict, before, plan);
                }
            }
            set(acc.index_mut(f), h, x);
        }
    }
}

/// As [`apply_decay_mask`] under a scalar decay, with an exponential for each score within a block of 16 on the diagonal
/// alone: below, with products of two factors out of a table that begins at `from`, of which row `rows` is that of the scores'
/// rows.
#[cube]
pub(crate) fn apply_mask_by_factors(
    acc: &mut Acc,
    sums: &Sums,
    at: usize,
    table: &SharedMemory<f32>,
    from: usize,
    #[comptime] rows: usize,
    #[comptime] mask: Mask,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let grid = comptime!(plan.pairs());
    let block = row(0usize, 0usize, grid) / MASK_BLOCK;
    let of_rows = from + comptime!(rows * chunk);
    let up_to = from + comptime!(decay_factors::UP_TO_BLOCK * chunk) + (max(block, 1) - 1) * chunk;
    comptime!(assert!(grid.fragment_rows() == 1 && grid.fragments().is_multiple_of(2)));
    // Of the block on the diagonal that this plane may have, once for all: the instructions' cache is small.
    let (strict, before) = comptime!((mask.strict, mask.before));
    let mut near = Array::<Pair>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        let i = at + row(0usize, comptime!(n % 2), grid);
        let j = at + block * MASK_BLOCK + column(0usize, grid) % MASK_BLOCK + comptime!(n / 2 * 8);
        let mut decays = Pair::empty();
        decays[0] = decay_mask(sums, i, j, strict, before, plan);
        decays[1] = decay_mask(sums, i, j + 1, strict, before, plan);
        near[n] = decays;
    }
    #[unroll]
    for pair in 0..comptime!(grid.fragments() / 2) {
        let first = comptime!(2 * pair);
        let column_block = column(first, grid) / MASK_BLOCK;
        #[unroll]
        for n in 0..4usize {
            let (f, h) = comptime!((first + n / 2, n % 2));
            let mut decays = near[n];
            if column_block != block {
                let of_row = select(column_block < block, table[of_rows + row(f, h, grid)], 0.0f32);
                let j = up_to + column(f, grid);
                decays[0] = of_row * table[j];
                decays[1] = of_row * table[j + 1];
            }
            let x = acc.index(f)[h] * decays;
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Whether a unit has anything on or below the diagonal in fragment `f`, whose first column is `j`.
/// Planes whose whole fragment lies above save its exponentials.
#[cube]
pub(crate) fn intersects_lower_triangle(
    #[comptime] f: usize,
    j: usize,
    #[comptime] grid: Grid,
) -> bool {
    row(f, 1usize, grid) >= j
}

/// Factor of the erase key of token `i`: -beta in a delta rule.
#[cube]
pub(crate) fn erase_scale(
    beta: &Array<f32>,
    scalars: &Rows,
    i: usize,
    #[comptime] plan: Plan,
) -> f32 {
    let mut scale = 1.0f32;
    if comptime!(plan.variant.delta()) {
        scale = 0.0f32;
        if i < scalars.valid {
            scale = -beta[scalars.start + i * scalars.stride];
        }
    }
    scale
}

/// e^{G_i}, or e^{G_{i-1}} for a row that reads before its decay. The chunk's sums begin at `at`.
#[cube]
pub(crate) fn from_start(
    sums: &Sums,
    at: usize,
    i: usize,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let mut decay = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        decay = share_kept(since_start(sums, at + seen(i, before)));
        if comptime!(before) {
            decay = select(i == 0, 1.0f32, decay);
        }
    }
    decay
}

/// e^{G_C - G_i}. The chunk's sums begin at `at`.
#[cube]
pub(crate) fn to_end(sums: &Sums, at: usize, i: usize, #[comptime] plan: Plan) -> f32 {
    let mut decay = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        decay = share_kept(between(sums, at + comptime!(plan.chunk - 1), at + i));
    }
    decay
}

/// As [`from_start`], for key column `d` of a vector decay.
#[cube]
pub(crate) fn vector_from_start(
    sums: &Sums,
    i: usize,
    d: usize,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let stride = comptime!(plan.stride(plan.key_slice));
    let decay = share_kept(since_start(sums, seen(i, before) * stride + d));
    if comptime!(before) { select(i == 0, 1.0f32, decay) } else { decay }
}
