//! Gradients of log decays and of beta: dg and dbeta, beside the input gradients.
//!
//! e^{G_i - G_j} depends on g_t for j < t <= i. With inner products over keys (vector decay: for each key by
//! itself)
//! ```text
//! dG_i = q_i dq_i + a_i da_i - k_i dk_i - b_i db_i     a row that sees S before its decay: to dG_{i-1}
//! dg_t = sum_{i >= t} dG_i + sum_j (k_j dk_j + b_j db_j, terms with dS' only) + e^{G_C} (S . dS')
//! dbeta_i = v_i R_i - e_i da_i                        delta: a = -beta e
//! ```
//! Zero-exponent terms (a token's own score, i = j, or i = j + 1 for a row that sees S before its decay; the last
//! token's write at the chunk's end) would enter dG twice with opposite signs; next to a log decay near -50 the
//! rounding error of that cancellation is larger than every other term. They are left out of dG and added to the
//! gradients afterwards (`zero_exponent`). Other terms of a token before and one after t cancel too, to the rounding of
//! their products: up to 2^-19 in f32 on tensor cores, 1.3 2^-10 where a vector decay's factors are rounded.
//!
//! Gradients of rows lie in one layout from the first to the last, so each unit keeps partial sums of its
//! rows in registers (`PartialSums`); the cube sums once, at the end.

use crate::chunkwise::arguments::{Gradients, StageTypes};
use crate::chunkwise::chunk::{Sums, since_start};
use crate::chunkwise::gradient_tiles::{
    GradientInputs, GradientTiles, cube_sum, partial_at, row_sum,
};
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{Scored, TokenOffset};
use crate::tile::{
    Acc, Grid, Pair, column, computed_here, inside, row, set, slot, swizzled, width_of,
};
use cubecl::prelude::*;

/// A unit's partial sums over its rows: two for each row of fragments.
#[derive(CubeType)]
pub(crate) struct PartialSums {
    /// dG of the row.
    own: Array<f32>,
    /// The row's terms of dG of the row before.
    before: Array<f32>,
    /// Terms that reach the end of the chunk.
    ends: Array<f32>,
    /// e da, subtracted from dbeta.
    beta: Array<f32>,
    /// `S . dS'` of the slices of keys that are through, where tiles hold one at a time.
    through: Array<f32>,
}

/// The rows whose products [`decay_products`] adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DecayTerm {
    /// Rows that read; they may see the token before.
    Query { before: bool },
    /// Erase keys, times -beta.
    Erase { before: bool },
    /// Rows that write: subtracted, and nothing of the last one.
    Write,
    /// Terms that reach the end of the chunk, without the last row's.
    ChunkEnd,
}

impl DecayTerm {
    fn before(self) -> bool {
        matches!(self, Self::Query { before: true } | Self::Erase { before: true })
    }

    fn erases(self) -> bool {
        matches!(self, Self::Erase { .. })
    }
}

impl GradientPlan {
    /// Whether zero-exponent terms of queries' scores are kept out of dG.
    pub fn excludes_query_terms(&self) -> bool {
        self.variant.decay != crate::Decay::None
    }

    pub fn excludes_erase_terms(&self) -> bool {
        self.variant.decay != crate::Decay::None && self.variant.erases_before()
    }

    /// A unit's rows.
    fn rows_of_unit(&self) -> usize {
        2 * self.rows_grid().fragment_rows()
    }

    /// Whether S and dS' of all keys are in tiles at the end.
    fn holds_both_states(&self) -> bool {
        self.key_slices() == 1 && !self.one_state
    }

    /// Whether any row adds to dG of the one before.
    fn looks_back(&self) -> bool {
        self.variant.reads_before() || self.variant.erases_before()
    }
}

#[cube]
pub(crate) fn partial_sums(#[comptime] plan: GradientPlan) -> PartialSums {
    PartialSums {
        own: zero_sums(plan),
        before: zero_sums(plan),
        ends: zero_sums(plan),
        beta: zero_sums(plan),
        through: zero_sums(plan),
    }
}

#[cube]
fn zero_sums(#[comptime] plan: GradientPlan) -> Array<f32> {
    let all = comptime!(plan.rows_of_unit());
    let mut zeros = Array::<f32>::new(all);
    #[unroll]
    for n in 0..all {
        zeros[n] = 0.0f32;
    }
    zeros
}

/// `x_i acc_i` over this unit's columns of one of its rows.
#[cube]
fn dot(
    acc: &Acc,
    rows: &Acc,
    #[comptime] r: usize,
    #[comptime] h: usize,
    #[comptime] grid: Grid,
) -> f32 {
    let across = comptime!(grid.fragment_columns());
    let mut sum = Pair::new(0.0f32);
    #[unroll]
    for c in 0..across {
        let f = comptime!(r * across + c);
        sum += rows.index(f)[h] * acc.index(f)[h];
    }
    sum[0] + sum[1]
}

/// Rows where their gradients lie, a unit's share.
#[derive(CubeType)]
pub(crate) struct TokenRows {
    pub rows: Acc,
    /// Tokens there are.
    pub valid: usize,
}

/// Zero-exponent terms, and what they are scaled by.
#[derive(CubeType)]
pub(crate) struct ZeroExponents {
    /// [4, C], in the order of [`Scored::zero_exponent_row`].
    pub terms: SharedMemory<f32>,
    /// -beta in a delta rule, else 1, [C].
    pub scales: SharedMemory<f32>,
    /// Tokens there are.
    pub valid: usize,
}

/// Adds inner products of rows and their gradients to dG.
#[cube]
pub(crate) fn decay_products<P: StageTypes>(
    sums_of_unit: &mut PartialSums,
    tiles: &mut GradientTiles<P>,
    acc: &Acc,
    own: &TokenRows,
    #[comptime] term: DecayTerm,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(plan.variant.vector()) {
        vector_products::<P>(tiles, acc, own, term, plan);
    } else if comptime!(plan.variant.scalar()) {
        let grid = comptime!(plan.rows_grid());
        #[unroll]
        for r in 0..comptime!(grid.fragment_rows()) {
            #[unroll]
            for h in 0..2usize {
                let at = comptime!(2 * r + h);
                let i = row(comptime!(r * grid.fragment_columns()), h, grid);
                let mut sum = dot(acc, &own.rows, r, h, grid);
                if comptime!(term.erases()) {
                    sum *= tiles.scales[min(i, comptime!(plan.chunk - 1))];
                }
                if comptime!(term == DecayTerm::ChunkEnd) {
                    sums_of_unit.ends[at] += select(i + 1 < own.valid, sum, 0.0f32);
                } else if comptime!(term == DecayTerm::Write) {
                    sums_of_unit.own[at] -= select(i + 1 < own.valid, sum, 0.0f32);
                } else if comptime!(term.before()) {
                    sums_of_unit.before[at] += sum;
                } else {
                    sums_of_unit.own[at] += sum;
                }
            }
        }
    }
}

/// As [`decay_products`] for a vector decay, whose log decays are columns: in shared memory. A unit always adds to the same
/// numbers, so no barrier is needed. Rows that read before the decay add to the row before, which another unit has: these
/// have a barrier on either side.
#[cube]
fn vector_products<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    acc: &Acc,
    own: &TokenRows,
    #[comptime] term: DecayTerm,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let stride = comptime!(plan.stride(plan.key_slice));
    let sum_ends = comptime!(term == DecayTerm::ChunkEnd && plan.by_blocks());
    if comptime!(term.before()) {
        sync_cube();
    }
    if sum_ends {
        plane_ends::<P>(tiles, acc, own, plan);
    }
    #[unroll]
    for f in 0..comptime!(if sum_ends { 0 } else { grid.fragments() }) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = row(f, h, grid);
            if inside(f, grid) {
                let mut x = own.rows.index(f)[h] * acc.index(f)[h];
                if comptime!(term.erases()) {
                    x *= Pair::new(tiles.scales[i]);
                }
                #[unroll]
                for l in 0..2usize {
                    if comptime!(term == DecayTerm::ChunkEnd) {
                        if i + 1 < own.valid {
                            tiles.ends[i * stride + d + l] += x[l];
                        }
                    } else if comptime!(term == DecayTerm::Write) {
                        if i + 1 < own.valid {
                            tiles.d_decays[i * stride + d + l] -= x[l];
                        }
                    } else if comptime!(term.before()) {
                        if i > 0 {
                            tiles.d_decays[(i - 1) * stride + d + l] += x[l];
                        }
                    } else {
                        tiles.d_decays[i * stride + d + l] += x[l];
                    }
                }
            }
        }
    }
    if comptime!(term.before()) {
        sync_cube();
    }
}

/// Terms that reach the end of the chunk, summed over the 16 tokens of a plane.
#[cube]
fn plane_ends<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    acc: &Acc,
    own: &TokenRows,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    comptime!(assert!(grid.fragment_rows() == 1, "a plane has 16 tokens"));
    let block = row(0usize, 0usize, grid) / 16;
    if inside(0usize, grid) {
        #[unroll]
        for f in 0..comptime!(grid.fragments()) {
            let mut sum = Pair::new(0.0f32);
            #[unroll]
            for h in 0..2usize {
                let x = own.rows.index(f)[h] * acc.index(f)[h];
                if row(f, h, grid) + 1 < own.valid {
                    sum += x;
                }
            }
            let at = block * comptime!(plan.stride(plan.key_slice)) + column(f, grid);
            #[unroll]
            for l in 0..2usize {
                let mut end = sum[l];
                // Lanes four apart hold the same columns.
                end += plane_shuffle_xor(end, 4u32);
                end += plane_shuffle_xor(end, 8u32);
                end += plane_shuffle_xor(end, 16u32);
                if UNIT_POS % 32 < 4 {
                    tiles.ends[at + l] += end;
                }
            }
        }
    }
}

/// Delta: dbeta -= e (what da is before -beta).
#[cube]
pub(crate) fn beta_products(
    sums_of_unit: &mut PartialSums,
    acc: &Acc,
    rows: &Acc,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    #[unroll]
    for r in 0..comptime!(grid.fragment_rows()) {
        #[unroll]
        for h in 0..2usize {
            sums_of_unit.beta[comptime!(2 * r + h)] += dot(acc, rows, r, h, grid);
        }
    }
}

/// Adds zero-exponent terms: to row i the term of reader i, or (`offset` Next) of reader i + 1, times row
/// i + offset. `rows` are those rows.
#[cube]
pub(crate) fn add_zero_exponents(
    acc: &mut Acc,
    terms: &ZeroExponents,
    rows: &Acc,
    #[comptime] scored: Scored,
    #[comptime] offset: TokenOffset,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        #[unroll]
        for h in 0..2usize {
            let mut reader = row(f, h, grid);
            if comptime!(offset == TokenOffset::Next) {
                reader += 1;
            }
            let mut by = 0.0f32;
            if reader < terms.valid {
                by = terms.terms[comptime!(scored.zero_exponent_row() * plan.chunk) + reader];
                if comptime!(scored == Scored::Scaled) {
                    by *= terms.scales[reader];
                }
            }
            let x = acc.index(f)[h] + rows.index(f)[h] * Pair::new(by);
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Sum over units of their partial sums of row `i`, which the caller picks; 0 from row `valid` on. Barriers before and
/// after the partial sums are laid out.
#[cube]
fn collect(
    partial: &mut SharedMemory<f32>,
    sums_of_unit: &Array<f32>,
    i: usize,
    valid: usize,
    #[comptime] plan: GradientPlan,
) -> f32 {
    let grid = comptime!(plan.rows_grid());
    sync_cube();
    #[unroll]
    for r in 0..comptime!(grid.fragment_rows()) {
        let f = comptime!(r * grid.fragment_columns());
        #[unroll]
        for h in 0..2usize {
            if inside(f, grid) {
                partial[partial_at(row(f, h, grid), slot(grid), plan)] =
                    sums_of_unit[comptime!(2 * r + h)];
            }
        }
    }
    sync_cube();
    row_sum(partial, i, valid, comptime!(grid.slots()), plan)
}

/// dg of a scalar decay: sums of dG from each token on, and what reaches the end of the chunk.
#[cube]
pub(crate) fn write_scalar_d_g<P: StageTypes>(
    out: &mut Gradients<P::F, P::G, P::W>,
    tiles: &mut GradientTiles<P>,
    sums_of_unit: &PartialSums,
    from: &GradientInputs<P>,
    sums: &Sums,
    #[comptime] plan: GradientPlan,
) {
    let unit = UNIT_POS as usize;
    let grid = comptime!(plan.rows_grid());
    let mut own = collect(&mut tiles.partial, &sums_of_unit.own, unit, from.place.valid, plan);
    if comptime!(plan.looks_back()) {
        own += collect(&mut tiles.partial, &sums_of_unit.before, unit + 1, from.place.valid, plan);
    }
    if unit < comptime!(plan.chunk) {
        tiles.d_decays[unit] = own;
    }
    let end = f32::exp(since_start(sums, comptime!(plan.chunk - 1)));
    let mut through = if comptime!(!plan.whole) {
        through_chunk::<P>(from, plan)
    } else if comptime!(plan.holds_both_states()) {
        through_slice::<P>(tiles, plan)
    } else {
        sums_of_unit.through[0]
    };
    through *= end;
    #[unroll]
    for r in 0..comptime!(grid.fragment_rows()) {
        if inside(comptime!(r * grid.fragment_columns()), grid) {
            through +=
                sums_of_unit.ends[comptime!(2 * r)] + sums_of_unit.ends[comptime!(2 * r + 1)];
        }
    }
    let mut d = cube_sum(&mut tiles.partial, through, plan);
    if unit < from.place.valid {
        for i in unit..from.place.valid {
            d += tiles.d_decays[i];
        }
        out.g[from.place.scalars.start + unit * from.place.scalars.stride] = d;
    }
}

/// This unit's part of `S . dS'`, from the tensors.
#[cube]
fn through_chunk<P: StageTypes>(from: &GradientInputs<P>, #[comptime] plan: GradientPlan) -> f32 {
    let read = width_of::<P::G>();
    let all = comptime!(plan.key_width * plan.value_width / read);
    let start = from.place.index * all;
    let mut product = Vector::<f32, P::G>::new(0.0);
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + turn * comptime!(plan.units);
        if n < all {
            product += Vector::<f32, P::G>::cast_from(from.saved.states[start + n])
                * Vector::<f32, P::G>::cast_from(from.saved.d_states[start + n]);
        }
    }
    sum_of_vector::<P::G>(product)
}

/// This unit's part of `S . dS'` over the keys that the tiles hold.
#[cube]
fn through_slice<P: StageTypes>(tiles: &GradientTiles<P>, #[comptime] plan: GradientPlan) -> f32 {
    let read = width_of::<P::G>();
    let across = comptime!(plan.key_slice / read);
    let all = comptime!(plan.key_slice * plan.value_width / read);
    let stride = comptime!(plan.states_window().stride / read);
    let mut product = Vector::<f32, P::G>::new(0.0);
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + turn * comptime!(plan.units);
        if n < all {
            let at = n / across * stride + n % across;
            product += Vector::<f32, P::G>::cast_from(tiles.start[at])
                * Vector::<f32, P::G>::cast_from(tiles.end[at]);
        }
    }
    sum_of_vector::<P::G>(product)
}

/// Adds this unit's part of `S . dS'` over the keys from `first` on to the sums, where the tile of both holds dS'. S is read
/// from the tensor again: kept in registers it would cost more.
#[cube]
pub(crate) fn add_through_end<P: StageTypes>(
    sums_of_unit: &mut PartialSums,
    tiles: &GradientTiles<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let read = width_of::<P::G>();
    let across = comptime!(plan.key_slice / read);
    let rows = comptime!(plan.value_slice);
    comptime!(assert!((rows * across).is_multiple_of(plan.units)));
    let start = from.place.index * comptime!(plan.key_width * plan.value_width) + first;
    let unit = computed_here(UNIT_POS) as usize;
    let mut product = Vector::<f32, P::G>::new(0.0);
    #[unroll]
    for turn in 0..comptime!((rows * across).div_ceil(plan.units)) {
        let n = unit + comptime!(turn * plan.units);
        let (i, c) = (n / across, n % across);
        let at = start / read + i * comptime!(plan.key_width / read) + c;
        product += Vector::<f32, P::G>::cast_from(from.saved.states[at])
            * Vector::<f32, P::G>::cast_from(tiles.end[swizzled(i, c, rows)]);
    }
    sums_of_unit.through[0] += sum_of_vector::<P::G>(product);
}

/// Adds [`through_slice`] to the sums.
#[cube]
pub(crate) fn add_through_slice<P: StageTypes>(
    sums_of_unit: &mut PartialSums,
    tiles: &GradientTiles<P>,
    #[comptime] plan: GradientPlan,
) {
    let more = through_slice::<P>(tiles, plan);
    sums_of_unit.through[0] += more;
}

#[cube]
fn sum_of_vector<G: Size>(x: Vector<f32, G>) -> f32 {
    let read = width_of::<G>();
    let mut sum = 0.0f32;
    #[unroll]
    for l in 0..read {
        sum += x[l];
    }
    sum
}

#[cube]
pub(crate) fn clear_d_decays<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    #[comptime] plan: GradientPlan,
) {
    let all = comptime!(plan.chunk * plan.stride(plan.key_slice));
    let ends = comptime!(plan.end_rows() * plan.stride(plan.key_slice));
    #[unroll]
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + comptime!(turn * plan.units);
        if n < all {
            tiles.d_decays[n] = 0.0f32;
        }
        if n < ends {
            tiles.ends[n] = 0.0f32;
        }
    }
    sync_cube();
}

/// As [`write_scalar_d_g`], for one slice of a vector decay. Every unit takes part: each first sums a share of
/// `S . dS'`, then a run of tokens of one key, as in [`sum_vectors`](crate::chunkwise::chunk::sum_vectors).
#[cube]
pub(crate) fn write_vector_d_g<P: StageTypes>(
    out: &mut Gradients<P::F, P::G, P::W>,
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    sums: &Sums,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let slice = comptime!(plan.key_slice);
    let stride = comptime!(plan.stride(slice));
    let runs = comptime!(plan.runs());
    let length = comptime!(plan.chunk / runs);
    let read = width_of::<P::G>();
    let shares = comptime!(plan.state_shares(read));
    sync_cube();
    lay_state_shares::<P>(tiles, from, first, plan);
    sync_cube();
    let column = UNIT_POS as usize % slice;
    let run = UNIT_POS as usize / slice;
    let start = run * length;
    let mut through = 0.0f32;
    let mut own = 0.0f32;
    if run < runs {
        #[unroll]
        for n in 0..comptime!(shares.div_ceil(runs)) {
            let share = run + comptime!(n * runs);
            if share < shares {
                through += f32::cast_from(tiles.keys[share * slice + column]);
            }
        }
        through *= f32::exp(since_start(sums, comptime!((plan.chunk - 1) * stride) + column));
        #[unroll]
        for n in 0..comptime!(plan.end_rows().div_ceil(runs)) {
            let row = run + comptime!(n * runs);
            if row < comptime!(plan.end_rows()) {
                through += tiles.ends[row * stride + column];
            }
        }
        #[unroll]
        for i in 0..length {
            if start + i < from.place.valid {
                own += tiles.d_decays[(start + i) * stride + column];
            }
        }
        tiles.partial[run * slice + column] = own;
        // In the place of a share that no other unit reads.
        tiles.keys[run * slice + column] = Vector::<P::X, P::N>::cast_from(through);
    }
    sync_cube();
    if run < runs && first + column < comptime!(plan.key_width) {
        let mut sum = 0.0f32;
        #[unroll]
        for n in 0..runs {
            sum += f32::cast_from(tiles.keys[comptime!(n * slice) + column]);
            if n > run {
                sum += tiles.partial[comptime!(n * slice) + column];
            }
        }
        #[unroll]
        for back in 0..length {
            let i = start + comptime!(length - 1 - back);
            if i < from.place.valid {
                sum += tiles.d_decays[i * stride + column];
                out.g[from.place.rows.start + i * from.place.rows.stride + first + column] = sum;
            }
        }
    }
    sync_cube();
}

impl GradientPlan {
    /// Shares that units sum `S . dS'` of a slice of keys in, of vectors of `read` numbers: as many as the tile of keys
    /// has room for.
    fn state_shares(&self, read: usize) -> usize {
        let room = self.key_numbers() / self.key_slice;
        (self.units / (self.key_slice / read)).min(room)
    }
}

/// Lays shares of `S . dS'` over the values, [shares, key_slice], into the tile of keys.
#[cube]
fn lay_state_shares<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let read = width_of::<P::G>();
    let width = comptime!(plan.key_width);
    let across = comptime!(plan.key_slice / read);
    let shares = comptime!(plan.state_shares(read));
    let d = UNIT_POS as usize % across;
    let share = UNIT_POS as usize / across;
    if share < shares {
        let mut through = Vector::<f32, P::G>::new(0.0);
        if first + d * read < width {
            let start = (from.place.index * comptime!(plan.key_width * plan.value_width) + first)
                / read
                + d;
            #[unroll]
            for turn in 0..comptime!(plan.value_width.div_ceil(shares)) {
                let v = share + comptime!(turn * shares);
                if v < comptime!(plan.value_width) {
                    let at = start + v * (width / read);
                    through += Vector::<f32, P::G>::cast_from(from.saved.states[at])
                        * Vector::<f32, P::G>::cast_from(from.saved.d_states[at]);
                }
            }
        }
        #[unroll]
        for l in 0..read {
            let at = share * comptime!(plan.key_slice) + d * read + l;
            tiles.keys[at] = Vector::<P::X, P::N>::cast_from(through[l]);
        }
    }
}

/// Vectors of `read` numbers from the start of a tile of values to vector `c` of row `i`.
#[cube]
fn value_at(i: usize, c: usize, #[comptime] read: usize, #[comptime] plan: GradientPlan) -> usize {
    if comptime!(plan.warpgroups) {
        swizzled(i, c, comptime!(plan.chunk))
    } else {
        i * comptime!(plan.unscaled().stride(plan.value_slice) / read) + c
    }
}

/// Delta: dv = beta R, dbeta = v R - e da.
#[cube]
pub(crate) fn write_d_values<P: StageTypes>(
    out: &mut Gradients<P::F, P::G, P::W>,
    tiles: &mut GradientTiles<P>,
    sums_of_unit: &PartialSums,
    from: &GradientInputs<P>,
    #[comptime] plan: GradientPlan,
) {
    let read = width_of::<P::G>();
    let unit = UNIT_POS as usize;
    let from_erase = collect(&mut tiles.partial, &sums_of_unit.beta, unit, from.place.valid, plan);
    let side = comptime!(plan.value_slots());
    let i = unit / side;
    let vectors = comptime!(plan.value_width / read);
    sync_cube();
    if i < comptime!(plan.chunk) {
        let mut dot = Vector::<f32, P::G>::new(0.0);
        if i < from.place.valid {
            let beta = from.x.beta[from.place.scalars.start + i * from.place.scalars.stride];
            let start = (from.place.values.start + i * from.place.values.stride) / read;
            for n in 0..comptime!(vectors.div_ceil(side)) {
                let c = n * side + unit % side;
                if c < vectors {
                    let at = value_at(i, c, read, plan);
                    let r = if comptime!(plan.whole) {
                        Vector::<f32, P::G>::cast_from(tiles.r[at])
                    } else {
                        Vector::<f32, P::G>::cast_from(from.saved.r[start + c])
                    };
                    let v = if comptime!(plan.holds_v()) {
                        Vector::<f32, P::G>::cast_from(tiles.v[at])
                    } else {
                        Vector::<f32, P::G>::cast_from(from.x.v[start + c])
                    };
                    dot += r * v;
                    out.v[start + c] = Vector::<P::F, P::G>::cast_from(r * Vector::new(beta));
                }
            }
        }
        let mut sum = 0.0f32;
        #[unroll]
        for l in 0..read {
            sum += dot[l];
        }
        tiles.partial[partial_at(i, unit % side, plan)] = sum;
    }
    sync_cube();
    if unit < from.place.valid {
        let beta = row_sum(&tiles.partial, unit, from.place.valid, side, plan) - from_erase;
        out.beta[from.place.scalars.start + unit * from.place.scalars.stride] = beta;
    }
}
