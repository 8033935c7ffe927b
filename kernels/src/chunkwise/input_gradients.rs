//! Input gradients, the last stage of the backward pass: dq, dk, da, db of all chunks at once.
//!
//! D_ij is the decay from j to i, S the state at the chunk's start, dS' the gradient of the state at its end.
//! dqk is the gradient of A_qk, dab that of strict(a|b), and so on (`d_scores`):
//! ```text
//! dqk = tril(dO U^T)        dab = strict(R U^T)          [C, C]   (low rank: dqk with v, and
//! dqb = tril(dO U^T)        dak = strict(R v^T)                    U in dqb and dab)
//! dq_i = sum_j D_ij (dqk_ij k_j + dqb_ij b_j) + e^{G_i} dO_i S^T
//! da_i = sum_j D_ij (dab_ij b_j + dak_ij k_j) + e^{G_i} R_i S^T
//! dk_j = sum_i D_ij (dqk_ij q_i + dak_ij a_i) + e^{G_C - G_j} v_j dS'^T
//! db_j = sum_i D_ij (dqb_ij q_i + dab_ij a_i) + e^{G_C - G_j} U_j dS'^T
//! ```
//! An identity transition has q and k alone, with U = v. The delta rule has a = -beta e and b = k:
//! `de = -beta da`, `dbeta = -e da + v R`, `dv = beta R`.
//!
//! Work: a cube a chunk of a (sequence, head), over slices of keys where its tiles are not in shared
//! memory whole (gradient_tiles.rs). One row's gradients after another, or all rows that read and then all that
//! write ([`Together`]). dg and dbeta: decay_gradients.rs.

use crate::chunkwise::arguments::{Gradients, Operands, RowPairs, SavedTensors, StageTypes, Types};
use crate::chunkwise::chunk::{
    Place, Sizes, Sums, between, chunk_sums, request_log_decays, share_kept, sum_vectors,
};
use crate::chunkwise::decay::{from_start, to_end, vector_from_start};
use crate::chunkwise::decay_gradients::{
    DecayTerm, PartialSums, TokenRows, ZeroExponents, add_through_end, add_through_slice,
    add_zero_exponents, beta_products, clear_d_decays, decay_products, partial_sums,
    write_d_values, write_scalar_d_g, write_vector_d_g,
};
use crate::chunkwise::gradient_tiles::{
    ComingValues, GradientInputs, GradientTiles, LeftFactors, Operand, coming_state, coming_values,
    copy_group_async, gradient_tiles, keys_tile, lay_key_rows, lay_state_operands, load_fragments,
    load_key_rows, request_key_rows, request_state, request_values, state_tile, values_tile,
};
use crate::chunkwise::plan::{GradientPlan, row_major, transposed};
use crate::chunkwise::roles::{CopyGroup, Keys, Scored, States, TokenOffset, Values};
use crate::chunkwise::score_gradients::{
    ScoreGradients, fill_weights, prepare, scale_erase_rows, score_gradients, scored_tile,
};
use crate::chunkwise::state::add;
use crate::chunkwise::varlen::own_chunk;
use crate::chunkwise::vector_decay::{Adjoint, AdjointRows, adjoint_by_blocks, adjoint_by_terms};
use crate::tile::{
    Acc, LeftFactor, Pair, Requested, Source, Swizzled, Zeros, add_warpgroup_product, column,
    commit_copies, computed_here, load_a, mul, multiply_by_warpgroups, row_in, set,
    wait_for_copies, wait_for_factors, write_out_by_four, zeros,
};
use cubecl::prelude::*;

/// A row whose gradient is computed, by its part in the recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RowRole {
    /// q.
    Query,
    /// a, or e of a delta rule.
    Erase,
    /// k, as it writes.
    Key,
    /// Low rank: b.
    Write,
}

/// Rows whose gradients are made together: what they have in common is loaded, and scaled, once. Where tensor cores weight
/// rows by a vector decay these are all that read, or all that write; elsewhere one alone, for registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Together {
    One(RowRole),
    Readers,
    Writers,
}

/// A term of a row's gradient: gradients of scores times the rows on their other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Term {
    scored: Scored,
    rows: Keys,
}

impl GradientPlan {
    fn has_decay(&self) -> bool {
        self.variant.decay != crate::Decay::None
    }

    fn terms(&self, role: RowRole) -> Vec<Term> {
        let low_rank = self.variant.low_rank();
        let term = |scored, rows| Term { scored, rows };
        match role {
            RowRole::Query if low_rank => {
                vec![term(Scored::Qk, Keys::K), term(Scored::Qb, Keys::B)]
            }
            RowRole::Query => vec![term(Scored::Qk, Keys::K)],
            RowRole::Erase if low_rank => {
                vec![term(Scored::Ak, Keys::K), term(Scored::Ab, Keys::B)]
            }
            RowRole::Erase => vec![term(Scored::Ab, self.write_key())],
            RowRole::Key if low_rank => vec![term(Scored::Qk, Keys::Q), term(Scored::Ak, Keys::A)],
            RowRole::Key if self.variant.delta() => {
                vec![term(Scored::Qk, Keys::Q), term(Scored::Scaled, self.erase_key())]
            }
            RowRole::Key => vec![term(Scored::Qk, Keys::Q)],
            RowRole::Write => vec![term(Scored::Qb, Keys::Q), term(Scored::Ab, Keys::A)],
        }
    }

    /// The rows of `together`.
    fn roles(&self, together: Together) -> Vec<RowRole> {
        match together {
            Together::One(role) => vec![role],
            Together::Readers if self.variant.solves() => vec![RowRole::Query, RowRole::Erase],
            Together::Readers => vec![RowRole::Query],
            Together::Writers if self.variant.low_rank() => vec![RowRole::Key, RowRole::Write],
            Together::Writers => vec![RowRole::Key],
        }
    }

    /// Rows on the other side of the terms of `together`, which all of its rows have in this order.
    fn others(&self, together: Together) -> Vec<Keys> {
        let of =
            |role: &RowRole| self.terms(*role).iter().map(|term| term.rows).collect::<Vec<_>>();
        let roles = self.roles(together);
        let others = of(&roles[0]);
        assert!(roles.iter().all(|role| of(role) == others), "{together:?} have the same terms");
        others
    }

    /// Most rows whose gradients are made together.
    pub fn most_together(&self) -> usize {
        let all = [Together::Readers, Together::Writers].map(|together| self.roles(together).len());
        if self.by_blocks() { all[0].max(all[1]) } else { 1 }
    }

    /// Most kinds of rows that gradients are made of at once.
    pub fn most_others(&self) -> usize {
        match self.by_blocks() {
            true => self.others(Together::Readers).len().max(self.others(Together::Writers).len()),
            false => 1,
        }
    }

    /// Left factors of the terms with a state.
    fn state_factors(&self, together: Together) -> LeftFactors {
        let roles = self.roles(together);
        let second = roles.get(1).map(|role| self.state_factor(*role));
        LeftFactors { first: self.state_factor(roles[0]), second }
    }

    /// The adjoint of scores under a vector decay of which the gradients of `together` are made.
    fn adjoint(&self, together: Together) -> Adjoint {
        let roles = self.roles(together);
        let terms = self.terms(roles[0]);
        let of_y = roles[0].writes();
        let last = match of_y {
            true => terms[terms.len() - 1],
            false => self.terms(roles[roles.len() - 1])[0],
        };
        let before = [terms[0], last].map(|term| self.before(term.scored));
        Adjoint { of_y, kinds: roles.len(), others: terms.len(), before }
    }

    /// The row itself.
    fn rows(&self, role: RowRole) -> Keys {
        match role {
            RowRole::Query => Keys::Q,
            RowRole::Erase => self.erase_key(),
            RowRole::Key => Keys::K,
            RowRole::Write => Keys::B,
        }
    }

    /// Left factor X of the row's term with a state, `X S^T`.
    fn state_factor(&self, role: RowRole) -> Values {
        match role {
            RowRole::Query => Values::DO,
            RowRole::Erase => Values::R,
            RowRole::Key => self.key_values(),
            RowRole::Write => Values::U,
        }
    }

    fn decay_term(&self, role: RowRole) -> DecayTerm {
        match role {
            RowRole::Query => DecayTerm::Query { before: self.variant.reads_before() },
            RowRole::Erase => DecayTerm::Erase { before: self.variant.erases_before() },
            RowRole::Key | RowRole::Write => DecayTerm::Write,
        }
    }

    /// Offset to the row that a term's own row is paired with in a zero-exponent term.
    fn offset(&self, term: Term, writes: bool) -> TokenOffset {
        match (self.before(term.scored), writes) {
            (false, _) => TokenOffset::Same,
            (true, false) => TokenOffset::Previous,
            (true, true) => TokenOffset::Next,
        }
    }
}

impl RowRole {
    /// Whether the row writes: its gradient comes from rows after it, and from the state's at the end.
    fn writes(self) -> bool {
        matches!(self, Self::Key | Self::Write)
    }

    fn states(self) -> States {
        if self.writes() { States::End } else { States::Start }
    }
}

/// The input gradients of a chunk under way.
#[derive(CubeType)]
struct Chunk<P: StageTypes> {
    from: GradientInputs<P>,
    to: Gradients<P::F, P::G, P::W>,
    tiles: GradientTiles<P>,
    d_scores: ScoreGradients<P::X, P::M>,
    sums: Sums,
    sums_of_unit: PartialSums,
}

/// The kernel. F: the tensors' type; E: numbers of tensors between stages, and of values and states in tiles; X: keys and
/// gradients of scores in tiles. Widths: [`StageTypes`].
#[cube(launch_unchecked)]
#[allow(unused_mut)] // it marks what is written
#[allow(clippy::too_many_arguments)] // widths of vectors
pub(crate) fn input_gradients<
    F: Float,
    X: Float,
    E: Float,
    G: Size,
    N: Size,
    M: Size,
    L: Size,
    T: Size,
    W: Size,
>(
    x: Operands<F, G>,
    pairs: RowPairs<F, T>,
    saved: SavedTensors<F, E, G>,
    mut out: Gradients<F, G, W>,
    sizes: &Sizes,
    #[comptime] plan: GradientPlan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M, L, T, W)] _widths: [usize; 6],
) {
    let place = own_chunk(sizes, comptime!(*plan));
    let from = inputs::<Types<F, X, E, G, N, M, L, T, W>>(x, pairs, saved, place);
    let mut chunk = chunk::<Types<F, X, E, G, N, M, L, T, W>>(from, out, plan);
    gradients_of_chunk::<Types<F, X, E, G, N, M, L, T, W>>(&mut chunk, plan);
}

#[cube]
fn gradients_of_chunk<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    if comptime!(plan.whole) {
        whole::<P>(chunk, plan);
    } else {
        in_slices::<P>(chunk, plan);
    }
    write_d_g_and_d_values::<P>(chunk, plan);
}

#[cube]
fn inputs<P: StageTypes>(
    x: Operands<P::F, P::G>,
    pairs: RowPairs<P::F, P::T>,
    saved: SavedTensors<P::F, P::E, P::G>,
    place: Place,
) -> GradientInputs<P> {
    GradientInputs::<P> { x, pairs, saved, place }
}

#[cube]
fn chunk<P: StageTypes>(
    from: GradientInputs<P>,
    to: Gradients<P::F, P::G, P::W>,
    #[comptime] plan: GradientPlan,
) -> Chunk<P> {
    Chunk::<P> {
        from,
        to,
        sums: chunk_sums(comptime!(plan.by_blocks()), comptime!(*plan)),
        tiles: gradient_tiles::<P>(plan),
        d_scores: score_gradients::<P::X, P::M>(plan),
        sums_of_unit: partial_sums(plan),
    }
}

/// All gradients of rows, from tiles of all values: three groups of copies are under way from the start, or two where S and
/// dS' take turns in one tile.
#[cube]
fn whole<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::Values), plan);
    copy_group_async::<P>(&mut chunk.tiles, &chunk.from, 0usize, comptime!(CopyGroup::Start), plan);
    copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::Keys), plan);
    if comptime!(!plan.one_state) {
        copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::End), plan);
    }
    prepare::<P>(&mut chunk.d_scores, &mut chunk.tiles, &mut chunk.sums, &chunk.from, plan);
    wait_for(comptime!(if plan.one_state { 1usize } else { 2usize }), plan);
    fill_weights::<P>(&mut chunk.d_scores, &mut chunk.tiles, &chunk.from, &chunk.sums, plan);
    if comptime!(plan.one_state) {
        key_slices_of_one_state::<P>(chunk, plan);
    } else if comptime!(plan.key_slices() == 1) {
        wait_for(1usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, 0usize, plan);
        wait_for(0usize, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, 0usize, plan);
    } else {
        key_slices::<P>(chunk, plan);
    }
}

/// All gradients of rows, one slice of keys after another, of which the first is under way. The next slice is copied as soon
/// as tiles are through with one: its state while dS' is in use, the rest after that.
#[cube]
fn key_slices<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        let next = first + comptime!(plan.key_slice);
        let goes_on = next < comptime!(plan.key_width);
        wait_for(1usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        wait_for(0usize, plan);
        if comptime!(plan.variant.scalar()) {
            add_through_slice::<P>(&mut chunk.sums_of_unit, &chunk.tiles, plan);
        }
        sync_cube();
        if goes_on {
            let group = comptime!(CopyGroup::Start);
            copy_group_async::<P>(&mut chunk.tiles, &chunk.from, next, group, plan);
        }
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        sync_cube();
        if goes_on {
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::Keys), plan);
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::End), plan);
        }
    }
}

/// As [`key_slices`], where dS' follows S into the same tile. What is waited for then, another cube of the multiprocessor
/// fills.
#[cube]
fn key_slices_of_one_state<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        let next = first + comptime!(plan.key_slice);
        wait_for(0usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        sync_cube();
        copy_and_commit::<P>(chunk, first, comptime!(CopyGroup::End), plan);
        wait_for(0usize, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        if comptime!(plan.variant.scalar()) {
            let sums = &mut chunk.sums_of_unit;
            add_through_end::<P>(sums, &chunk.tiles, &chunk.from, first, plan);
        }
        sync_cube();
        if next < comptime!(plan.key_width) {
            let group = comptime!(CopyGroup::Start);
            copy_group_async::<P>(&mut chunk.tiles, &chunk.from, next, group, plan);
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::Keys), plan);
        }
    }
}

/// Waits for all but the `later` groups of copies that were committed last.
#[cube]
fn wait_for(#[comptime] later: usize, #[comptime] plan: GradientPlan) {
    if comptime!(plan.warpgroups) {
        wait_for_factors(later);
    } else {
        wait_for_copies(later);
    }
}

/// Starts copying a group of tiles, which is one group of copies with what is not committed yet.
#[cube]
fn copy_and_commit<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] group: CopyGroup,
    #[comptime] plan: GradientPlan,
) {
    copy_group_async::<P>(&mut chunk.tiles, &chunk.from, first, group, plan);
    commit_copies();
}

/// All gradients of rows, one slice of keys after another.
#[cube]
fn in_slices<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    let vector = comptime!(plan.variant.vector());
    prepare::<P>(&mut chunk.d_scores, &mut chunk.tiles, &mut chunk.sums, &chunk.from, plan);
    fill_weights::<P>(&mut chunk.d_scores, &mut chunk.tiles, &chunk.from, &chunk.sums, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        if comptime!(vector) {
            let mut coming = Array::<f32>::new(comptime!(plan.run_length()));
            let rows = &chunk.from.place.rows;
            let g = &chunk.from.x.vector_g;
            request_log_decays(&mut coming, g, rows, first, comptime!(*plan));
            let decays = comptime!(plan.by_blocks());
            sum_vectors(&mut chunk.sums, &coming, decays, comptime!(*plan));
            clear_d_decays::<P>(&mut chunk.tiles, plan);
        }
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        if comptime!(vector) {
            let tiles = &mut chunk.tiles;
            write_vector_d_g::<P>(&mut chunk.to, tiles, &chunk.from, &chunk.sums, first, plan);
        }
    }
}

/// dg of a scalar decay; dv and dbeta of a delta rule.
#[cube]
fn write_d_g_and_d_values<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    let sums_of_unit = &chunk.sums_of_unit;
    if comptime!(plan.variant.scalar()) {
        let tiles = &mut chunk.tiles;
        write_scalar_d_g::<P>(&mut chunk.to, tiles, sums_of_unit, &chunk.from, &chunk.sums, plan);
    }
    if comptime!(plan.variant.delta()) {
        write_d_values::<P>(&mut chunk.to, &mut chunk.tiles, sums_of_unit, &chunk.from, plan);
    }
}

/// `X S^T` over slices of values for one slice of keys, [C, key_slice] each, where S^T is stored [V, K].
#[cube]
fn state_terms<P: StageTypes>(
    chunk: &mut Chunk<P>,
    key: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.unscaled().grid(plan.chunk, plan.key_slice));
    let factors = comptime!(plan.state_factors(together));
    let states = comptime!(plan.roles(together)[0].states());
    let mut accs = Sequence::<Acc>::new();
    let mut on_the_left = Sequence::<ComingValues<P>>::new();
    #[unroll]
    for _ in 0..comptime!(factors.count()) {
        accs.push(zeros(comptime!(grid.fragments())));
        on_the_left.push(coming_values::<P>(plan));
    }
    let mut on_the_right = coming_state::<P>(plan);
    if comptime!(plan.requests_ahead()) {
        request_factors::<P>(&mut on_the_left, &chunk.from, 0usize, factors, plan);
        request_state::<P>(&mut on_the_right, &chunk.from, 0usize, key, states, plan);
    }
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        if comptime!(!plan.requests_ahead()) {
            request_factors::<P>(&mut on_the_left, &chunk.from, first, factors, plan);
            request_state::<P>(&mut on_the_right, &chunk.from, first, key, states, plan);
        }
        let tiles = &mut chunk.tiles;
        lay_state_operands::<P>(tiles, &on_the_left, &on_the_right, factors, plan);
        if comptime!(plan.requests_ahead()) {
            let next = first + columns;
            request_factors::<P>(&mut on_the_left, &chunk.from, next, factors, plan);
            request_state::<P>(&mut on_the_right, &chunk.from, next, key, states, plan);
        }
        let right = state_tile::<P>(&chunk.tiles, states);
        #[unroll]
        for n in 0..comptime!(factors.count()) {
            let operand = comptime!(Operand::left(n));
            let left = values_tile::<P>(&chunk.tiles, comptime!(factors.values(n)), operand, plan);
            add_state_product::<P>(accs.index_mut(n), &left, &right, plan);
        }
    }
    accs
}

/// Requests columns `first..` of the left factors.
#[cube]
fn request_factors<P: StageTypes>(
    coming: &mut Sequence<ComingValues<P>>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] factors: LeftFactors,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(factors.count()) {
        let which = comptime!(factors.values(n));
        request_values::<P>(coming.index_mut(n), from, first, which, plan);
    }
}

/// `acc += X S^T` for the values that the tiles hold.
#[cube]
fn add_state_product<P: StageTypes>(
    acc: &mut Acc,
    left: &SharedMemory<Vector<P::E, P::L>>,
    right: &SharedMemory<Vector<P::E, P::L>>,
    #[comptime] plan: GradientPlan,
) {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.unscaled().grid(plan.chunk, plan.key_slice));
    let [rows, state] = comptime!([row_major(columns), row_major(plan.key_slice)]);
    if comptime!(plan.warpgroups) {
        let layout = comptime!(Swizzled { rows: columns, transposed: false });
        let steps = comptime!(columns / 16);
        multiply_by_warpgroups::<P::E, P::L>(acc, left, right, 0usize, steps, layout, grid);
    } else {
        let spec = comptime!(plan.unscaled().mul(grid, columns, rows, state));
        mul::<P::E, P::L, P::L>(acc, left, 0usize, right, 0usize, spec);
    }
}

/// `acc += d_scores rows`, or (`of_y`) `d_scores^T rows`, under a decay that is not a vector.
#[cube]
fn add_product<P: StageTypes>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<P::X, P::M>>,
    rows: &SharedMemory<Vector<P::X, P::N>>,
    #[comptime] of_y: bool,
    #[comptime] plan: GradientPlan,
) {
    let chunk = comptime!(plan.chunk);
    let slice = comptime!(plan.key_slice);
    let how = comptime!(if of_y { transposed(chunk) } else { row_major(chunk) });
    let zeros = comptime!(if of_y { Zeros::Below } else { Zeros::Above });
    let spec = comptime!(plan.mul(plan.rows_grid(), chunk, how, row_major(slice)));
    let spec = comptime!(spec.with_zeros(zeros));
    mul::<P::X, P::M, P::N>(acc, weights, 0usize, rows, 0usize, spec);
}

/// [`add_product`] by warpgroups; `d_scores` times `scales` where these are `scaled`.
#[cube]
fn add_by_warpgroups<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    scales: &SharedMemory<f32>,
    #[comptime] transposed: bool,
    #[comptime] scaled: bool,
    #[comptime] plan: GradientPlan,
) {
    comptime!(assert!(transposed || !scaled));
    let chunk = comptime!(plan.chunk);
    let stride = comptime!(plan.stride(chunk));
    let row = computed_here(UNIT_POS) as usize / 32 % 4 * 16;
    let mut left = LeftFactor::<X>::new();
    #[unroll]
    for k in 0..comptime!(chunk / 16) {
        let source = comptime!(Source { down: 0, right: k * 16, stride, transposed });
        let factor = load_a::<X, M>(weights, 0usize, row, source);
        if comptime!(scaled) {
            left.push(scale_columns::<X>(&factor, scales, k));
        } else {
            left.push(factor);
        }
    }
    let layout = comptime!(Swizzled { rows: chunk, transposed: false });
    let grid = comptime!(plan.rows_grid());
    add_warpgroup_product::<X, N>(acc, &left, rows, 0usize, 0usize, layout, grid);
}

/// Step `k` of a left factor, its columns times their scales.
#[cube]
fn scale_columns<X: Float>(
    factor: &Array<Vector<X, Const<2>>>,
    scales: &SharedMemory<f32>,
    #[comptime] k: usize,
) -> Array<Vector<X, Const<2>>> {
    let mut scaled = Array::<Vector<X, Const<2>>>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        // Registers 2 and 3 are eight columns on.
        let column = UNIT_POS as usize % 4 * 2 + comptime!(k * 16 + n / 2 * 8);
        let mut by = Pair::empty();
        by[0] = scales[column];
        by[1] = scales[column + 1];
        scaled[n] = Vector::cast_from(Pair::cast_from(factor[n]) * by);
    }
    scaled
}

/// Multiplies gradients by e^{G_i}, or (`ends`) by e^{G_C - G_i}.
#[cube]
fn scale_by_decay(
    acc: &mut Acc,
    sums: &Sums,
    #[comptime] ends: bool,
    #[comptime] before: bool,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let stride = comptime!(plan.stride(plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = row_in(f, h, grid);
            let mut by = Pair::new(1.0f32);
            if comptime!(plan.variant.vector()) {
                #[unroll]
                for l in 0..2usize {
                    if comptime!(ends) {
                        let end = comptime!((plan.chunk - 1) * stride) + d + l;
                        by[l] = share_kept(between(sums, end, i * stride + d + l));
                    } else {
                        by[l] = vector_from_start(sums, i, d + l, before, comptime!(*plan));
                    }
                }
            } else if comptime!(ends) {
                by = Pair::new(to_end(sums, 0usize, i, comptime!(*plan)));
            } else {
                by = Pair::new(from_start(sums, 0usize, i, before, comptime!(*plan)));
            }
            let x = acc.index(f)[h] * by;
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Gradients of one slice of the rows of `together`; those of e and of a delta rule's a before -beta.
#[cube]
fn gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let count = comptime!(plan.roles(together).len());
    // Where they are requested ahead: under way while the state is multiplied.
    let mut held = Sequence::<TokenRows>::new();
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        held.push(held_rows::<P>(chunk, first, comptime!(plan.requests_ahead()), role, plan));
    }
    let coming = request_others::<P>(chunk, first, together, plan);
    let mut accs = state_terms::<P>(chunk, first, together, plan);
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        let (acc, held) = (accs.index_mut(n), held.index(n));
        scale_state_term::<P>(acc, chunk, held, first, role, plan);
    }
    if comptime!(plan.by_blocks()) {
        let others = comptime!(plan.others(together).len());
        lay_key_rows::<P>(&mut chunk.tiles, &coming, others, plan);
        add_terms_of_blocks::<P>(&mut accs, chunk, together, plan);
    } else {
        let role = comptime!(plan.roles(together)[0]);
        add_terms::<P>(accs.index_mut(0usize), chunk, first, role, plan);
    }
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        let (acc, held) = (accs.index_mut(n), held.index(n));
        finish_gradient::<P>(acc, chunk, held, first, role, plan);
    }
    accs
}

/// Rows on the other side of `together`, requested; nothing where they are loaded when they are used.
#[cube]
fn request_others<P: StageTypes>(
    chunk: &Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Requested<P::F, P::G>> {
    let mut coming = Sequence::<Requested<P::F, P::G>>::new();
    if comptime!(plan.by_blocks()) {
        #[unroll]
        for n in 0..comptime!(plan.others(together).len()) {
            let rows = comptime!(plan.others(together)[n]);
            coming.push(request_key_rows::<P>(&chunk.from, first, rows, plan));
        }
    }
    coming
}

/// A term with a state, times the decay between it and the row.
#[cube]
fn scale_state_term<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let writes = comptime!(role.writes());
    let before = comptime!(
        role == RowRole::Query && plan.variant.reads_before()
            || role == RowRole::Erase && plan.variant.erases_before()
    );
    scale_by_decay(acc, &chunk.sums, writes, before, plan);
    if comptime!(plan.has_decay() && writes) {
        let term = comptime!(DecayTerm::ChunkEnd);
        add_decay_products::<P>(chunk, acc, held, first, role, term, plan);
    }
}

/// Finishes a gradient whose terms are summed: adds its products to dG and dbeta, then the terms that dG must not see.
#[cube]
fn finish_gradient<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(plan.has_decay()) {
        let term = comptime!(plan.decay_term(role));
        add_decay_products::<P>(chunk, acc, held, first, role, term, plan);
    }
    add_zero_exponent_terms::<P>(acc, chunk, first, role, plan);
    if comptime!(role == RowRole::Erase && plan.variant.delta()) {
        if comptime!(plan.requests_ahead()) {
            beta_products(&mut chunk.sums_of_unit, acc, &held.rows, plan);
        } else {
            let own = held_rows::<P>(chunk, first, true, role, plan);
            beta_products(&mut chunk.sums_of_unit, acc, &own.rows, plan);
        }
    }
}

/// Rows of `role` where their gradients lie; none where they are not `wanted`.
#[cube]
fn held_rows<P: StageTypes>(
    chunk: &Chunk<P>,
    first: usize,
    #[comptime] wanted: bool,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) -> TokenRows {
    let valid = chunk.from.place.valid;
    if comptime!(wanted) {
        let own = comptime!(plan.rows(role));
        let same = comptime!(TokenOffset::Same);
        let rows = load_fragments::<P>(&chunk.tiles, &chunk.from, first, own, same, plan);
        TokenRows { rows, valid }
    } else {
        TokenRows { rows: zeros(0usize), valid }
    }
}

/// Adds the products of rows of `role`, `held` where they are requested ahead, with what there is of their gradients
/// to dG.
#[cube]
fn add_decay_products<P: StageTypes>(
    chunk: &mut Chunk<P>,
    acc: &Acc,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] term: DecayTerm,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(plan.requests_ahead()) {
        let (sums, tiles) = (&mut chunk.sums_of_unit, &mut chunk.tiles);
        decay_products::<P>(sums, tiles, acc, held, term, plan);
    } else {
        let own = held_rows::<P>(chunk, first, true, role, plan);
        let (sums, tiles) = (&mut chunk.sums_of_unit, &mut chunk.tiles);
        decay_products::<P>(sums, tiles, acc, &own, term, plan);
    }
}

/// Adds the terms of a role's gradient within the chunk, one after another.
#[cube]
fn add_terms<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        let of = comptime!(term.rows);
        load_key_rows::<P>(&mut chunk.tiles, &chunk.from, first, of, plan);
        let rows = keys_tile::<P>(&chunk.tiles, of, 0usize, plan);
        let weights = scored_tile::<P::X, P::M>(&chunk.d_scores, comptime!(term.scored), plan);
        let of_y = comptime!(role.writes());
        if comptime!(plan.warpgroups) {
            let scaled = comptime!(term.scored == Scored::Scaled);
            let scales = &chunk.tiles.scales;
            add_by_warpgroups::<P::X, P::N, P::M>(acc, &weights, &rows, scales, of_y, scaled, plan);
        } else if comptime!(plan.variant.vector()) {
            let before = comptime!(plan.before(term.scored));
            let common = comptime!(*plan);
            adjoint_by_terms::<P::X, P::N, P::M>(
                acc,
                &weights,
                &rows,
                &chunk.sums,
                of_y,
                before,
                common,
            );
        } else {
            add_product::<P>(acc, &weights, &rows, of_y, plan);
        }
    }
}

/// Adds all terms within the chunk of the gradients of `together`, whose rows on the other side are in tiles.
#[cube]
fn add_terms_of_blocks<P: StageTypes>(
    accs: &mut Sequence<Acc>,
    chunk: &Chunk<P>,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) {
    let others = comptime!(plan.others(together).len());
    let mut from =
        AdjointRows::<P::X, P::N, P::M> { weights: Sequence::new(), rows: Sequence::new() };
    #[unroll]
    for n in 0..others {
        let which = comptime!(plan.others(together)[n]);
        from.rows.push(keys_tile::<P>(&chunk.tiles, which, n, plan));
    }
    #[unroll]
    for kind in 0..comptime!(plan.roles(together).len()) {
        #[unroll]
        for n in 0..others {
            let scored = comptime!(plan.terms(plan.roles(together)[kind])[n].scored);
            from.weights.push(scored_tile::<P::X, P::M>(&chunk.d_scores, scored, plan));
        }
    }
    let adjoint = comptime!(plan.adjoint(together));
    let tokens = chunk.from.place.valid;
    let common = comptime!(*plan);
    adjoint_by_blocks::<P::X, P::N, P::M>(accs, &from, &chunk.sums, tokens, adjoint, common);
}

/// Adds the zero-exponent terms that dG must not see.
#[cube]
fn add_zero_exponent_terms<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let terms = ZeroExponents {
        terms: chunk.d_scores.zero_exponent,
        scales: chunk.tiles.scales,
        valid: chunk.from.place.valid,
    };
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        if comptime!(plan.excludes_zero_exponents(term.scored)) {
            let offset = comptime!(plan.offset(term, role.writes()));
            let of = comptime!(term.rows);
            let rows = load_fragments::<P>(&chunk.tiles, &chunk.from, first, of, offset, plan);
            add_zero_exponents(acc, &terms, &rows, comptime!(term.scored), offset, plan);
        }
    }
}

/// Writes a row's gradient; that of an erase key of a delta rule times -beta, which stays in `acc`.
#[cube]
fn write_gradient<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let width = comptime!(plan.key_width);
    let rows = chunk.from.place.rows;
    if comptime!(role == RowRole::Query) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.q, acc, &rows, first, width, grid);
    } else if comptime!(role == RowRole::Key) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.k, acc, &rows, first, width, grid);
    } else if comptime!(role == RowRole::Write) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.b, acc, &rows, first, width, grid);
    } else {
        if comptime!(plan.variant.delta()) {
            scale_erase_rows(acc, &chunk.tiles.scales, grid);
        }
        if comptime!(plan.variant.own_a()) {
            write_out_by_four::<P::F, P::W>(&mut chunk.to.a, acc, &rows, first, width, grid);
        }
    }
}

/// Writes the gradients of `together`.
#[cube]
fn write_gradients<P: StageTypes>(
    accs: &mut Sequence<Acc>,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(plan.roles(together).len()) {
        let role = comptime!(plan.roles(together)[n]);
        write_gradient::<P>(accs.index_mut(n), chunk, first, role, plan);
    }
}

/// [`gradients`], which are written.
#[cube]
fn written_gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let mut accs = gradients::<P>(chunk, first, together, plan);
    write_gradients::<P>(&mut accs, chunk, first, together, plan);
    accs
}

/// Gradients of the rows that read the chunk's first state: dq and da. The last one of what is returned is de where the
/// erase key is k, to be added to dk.
#[cube]
fn query_and_erase_gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    if comptime!(plan.by_blocks()) {
        written_gradients::<P>(chunk, first, comptime!(Together::Readers), plan)
    } else {
        let query = comptime!(Together::One(RowRole::Query));
        let d_query = written_gradients::<P>(chunk, first, query, plan);
        if comptime!(plan.variant.solves()) {
            let erase = comptime!(Together::One(RowRole::Erase));
            written_gradients::<P>(chunk, first, erase, plan)
        } else {
            d_query
        }
    }
}

/// Gradients of the rows that write: dk, to which the last of `of_readers` is added if the erase key is k, and db.
#[cube]
fn key_and_write_gradients<P: StageTypes>(
    of_readers: &Sequence<Acc>,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let by_blocks = comptime!(plan.by_blocks());
    let together =
        comptime!(if by_blocks { Together::Writers } else { Together::One(RowRole::Key) });
    let mut accs = gradients::<P>(chunk, first, together, plan);
    if comptime!(plan.variant.delta() && !plan.variant.own_a()) {
        // By itself, or after dq.
        let d_erase = of_readers.index(comptime!(usize::from(by_blocks)));
        add(accs.index_mut(0usize), d_erase, comptime!(plan.rows_grid().fragments()));
    }
    write_gradients::<P>(&mut accs, chunk, first, together, plan);
    if comptime!(plan.variant.low_rank() && !by_blocks) {
        let write = comptime!(Together::One(RowRole::Write));
        let _d_write = written_gradients::<P>(chunk, first, write, plan);
    }
}
