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
//! Linear attention has q and k alone, with U = v. The delta rule has a = -beta e and b = k:
//! `de = -beta da`, `dbeta = -e da + v R`, `dv = beta R`.
//!
//! Work: a cube a chunk of a (sequence, head), over slices of keys where its tiles are not in shared
//! memory whole (gradient_tiles.rs). dg and dbeta: gate_gradients.rs.

use crate::chunkwise::arguments::{Gradients, Operands, RowPairs, SavedTensors};
use crate::chunkwise::chunk::{Place, Sizes, Sums, between, chunk_sums, place, sum_vectors};
use crate::chunkwise::gate_gradients::{
    Gate, PartialSums, add_zero_exponents, beta_products, clear_gates, gate_products,
    keep_scalar_gates, keep_values, keep_vector_gates, partial_sums,
};
use crate::chunkwise::gradient_tiles::{
    GradientTiles, copy_group_async, gradient_tiles, keys_tile, load_fragments, load_key_rows,
    load_state_operands, state_tile, values_tile,
};
use crate::chunkwise::intra_chunk::{keep, left, reach, vector_reach};
use crate::chunkwise::plan::{Plan, row_major, transposed};
use crate::chunkwise::roles::{CopyGroup, Keys, Scored, States, TokenOffset, Values};
use crate::chunkwise::score_gradients::{
    ScoreGradients, fill_weights, prepare, scale_erase_rows, score_gradients, scored_tile,
};
use crate::chunkwise::state::add;
use crate::chunkwise::vector_decay::scores_adjoint;
use crate::tile::{Acc, Engine, Pair, Rows, column, inside, mul, put_four, row, set, zeros};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// A row whose gradient is computed, by its part in the recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// q.
    Query,
    /// a, or e of a delta rule.
    Erase,
    /// k, as it writes.
    Key,
    /// Low rank: b.
    Write,
}

/// A term of a row's gradient: gradients of scores times the rows on their other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Term {
    scored: Scored,
    rows: Keys,
}

impl Plan {
    fn gated(&self) -> bool {
        self.variant.decay != crate::Decay::None
    }

    fn terms(&self, role: Role) -> Vec<Term> {
        let low_rank = self.variant.low_rank();
        let term = |scored, rows| Term { scored, rows };
        match role {
            Role::Query if low_rank => vec![term(Scored::Qk, Keys::K), term(Scored::Qb, Keys::B)],
            Role::Query => vec![term(Scored::Qk, Keys::K)],
            Role::Erase if low_rank => vec![term(Scored::Ab, Keys::B), term(Scored::Ak, Keys::K)],
            Role::Erase => vec![term(Scored::Ab, self.write_key())],
            Role::Key if low_rank => vec![term(Scored::Qk, Keys::Q), term(Scored::Ak, Keys::A)],
            Role::Key if self.variant.delta() => {
                vec![term(Scored::Qk, Keys::Q), term(Scored::Scaled, self.erase_key())]
            }
            Role::Key => vec![term(Scored::Qk, Keys::Q)],
            Role::Write => vec![term(Scored::Qb, Keys::Q), term(Scored::Ab, Keys::A)],
        }
    }

    /// The row itself.
    fn rows(&self, role: Role) -> Keys {
        match role {
            Role::Query => Keys::Q,
            Role::Erase => self.erase_key(),
            Role::Key => Keys::K,
            Role::Write => Keys::B,
        }
    }

    /// Left factor X of the row's term with a state, `X S^T`.
    fn state_factor(&self, role: Role) -> Values {
        match role {
            Role::Query => Values::DO,
            Role::Erase => Values::R,
            Role::Key => self.key_values(),
            Role::Write => Values::U,
        }
    }

    fn gate(&self, role: Role) -> Gate {
        match role {
            Role::Query => Gate::Query { before: self.variant.reads_before() },
            Role::Erase => Gate::Erase { before: self.variant.erases_before() },
            Role::Key | Role::Write => Gate::Write,
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

impl Role {
    /// Whether the row writes: its gradient comes from rows after it, and from the state's at the end.
    fn writes(self) -> bool {
        matches!(self, Self::Key | Self::Write)
    }

    fn states(self) -> States {
        if self.writes() { States::End } else { States::Start }
    }
}

/// The kernel. F: the tensors' type; E: what the stages before kept; X: what tiles hold.
#[cube(launch_unchecked)]
pub(crate) fn input_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    saved: &SavedTensors<F, E, G>,
    out: &mut Gradients<F, G, W>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    let variant = comptime!(plan.variant);
    let place = place(sizes, CUBE_POS_Y as usize, CUBE_POS_X as usize, plan);
    let mut sums = chunk_sums(comptime!(plan.adjoint_takes_decays()), plan);
    let mut tiles = gradient_tiles::<X, N>(plan);
    let mut d_scores = score_gradients::<X, M>(plan);
    let mut sums_of_unit = partial_sums(plan);
    if comptime!(plan.whole()) {
        let values = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        let start = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        let end = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        sync_cube();
        let group = comptime!(CopyGroup::Values);
        copy_group_async::<F, X, E, G, N>(&mut tiles, x, saved, &place, group, plan);
        values.commit_copy_async();
        values.arrive();
        let group = comptime!(CopyGroup::Start);
        copy_group_async::<F, X, E, G, N>(&mut tiles, x, saved, &place, group, plan);
        start.commit_copy_async();
        start.arrive();
        let group = comptime!(CopyGroup::End);
        copy_group_async::<F, X, E, G, N>(&mut tiles, x, saved, &place, group, plan);
        end.commit_copy_async();
        end.arrive();
        prepare::<F, X, G, N, M>(&mut d_scores, &mut tiles, &mut sums, x, &place, plan);
        values.wait_parity(0u32);
        fill_weights::<F, X, E, G, N, M>(&mut d_scores, &mut tiles, x, saved, &sums, &place, plan);
        start.wait_parity(0u32);
        let d_erase = query_and_erase_gradients::<F, X, E, G, N, M, W>(
            out,
            &mut sums_of_unit,
            &mut tiles,
            x,
            pairs,
            saved,
            &d_scores,
            &sums,
            &place,
            0usize,
            plan,
        );
        end.wait_parity(0u32);
        key_and_write_gradients::<F, X, E, G, N, M, W>(
            &d_erase,
            out,
            &mut sums_of_unit,
            &mut tiles,
            x,
            pairs,
            saved,
            &d_scores,
            &sums,
            &place,
            0usize,
            plan,
        );
    } else {
        prepare::<F, X, G, N, M>(&mut d_scores, &mut tiles, &mut sums, x, &place, plan);
        fill_weights::<F, X, E, G, N, M>(&mut d_scores, &mut tiles, x, saved, &sums, &place, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            let first = slice * comptime!(plan.key_slice);
            if comptime!(variant.vector()) {
                sync_cube();
                let decays = comptime!(plan.adjoint_takes_decays());
                sum_vectors::<G>(&mut sums, &x.gates, &place.rows, first, decays, plan);
                clear_gates::<X, N>(&mut tiles, plan);
            }
            let d_erase = query_and_erase_gradients::<F, X, E, G, N, M, W>(
                out,
                &mut sums_of_unit,
                &mut tiles,
                x,
                pairs,
                saved,
                &d_scores,
                &sums,
                &place,
                first,
                plan,
            );
            key_and_write_gradients::<F, X, E, G, N, M, W>(
                &d_erase,
                out,
                &mut sums_of_unit,
                &mut tiles,
                x,
                pairs,
                saved,
                &d_scores,
                &sums,
                &place,
                first,
                plan,
            );
            if comptime!(variant.vector()) {
                keep_vector_gates::<F, X, E, G, N, W>(
                    out, &mut tiles, saved, &sums, &place, first, plan,
                );
            }
        }
    }
    if comptime!(variant.scalar()) {
        keep_scalar_gates::<F, X, E, G, N, W>(
            out,
            &mut tiles,
            &sums_of_unit,
            saved,
            &sums,
            &place,
            plan,
        );
    }
    if comptime!(variant.delta()) {
        keep_values::<F, X, E, G, N, W>(out, &mut tiles, &sums_of_unit, x, saved, &place, plan);
    }
}

/// `X S^T` over slices of values for one slice of keys: [C, key_slice], where S^T is stored [V, K].
#[cube]
#[allow(clippy::too_many_arguments)]
fn state_term<F: Float, X: Float, E: Float, G: Size, N: Size>(
    tiles: &mut GradientTiles<X, N>,
    x: &Operands<F, G>,
    saved: &SavedTensors<F, E, G>,
    place: &Place,
    key: usize,
    #[comptime] values: Values,
    #[comptime] states: States,
    #[comptime] plan: Plan,
) -> Acc {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.rows_grid());
    let mut acc = zeros(comptime!(grid.fragments()));
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        load_state_operands::<F, X, E, G, N>(
            tiles, x, saved, place, first, key, values, states, plan,
        );
        let left = values_tile::<X, N>(tiles, values, false, plan);
        let right = state_tile::<X, N>(tiles, states);
        let spec =
            comptime!(plan.mul(grid, columns, row_major(columns), row_major(plan.key_slice)));
        mul::<X, N, N>(&mut acc, &left, 0usize, &right, 0usize, spec);
    }
    acc
}

/// `acc += d_scores rows`, or `d_scores^T rows` for gradients of the rows on the right (`of_y`).
#[cube]
fn adjoint<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    d_scores: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] of_y: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.vector()) {
        scores_adjoint::<X, N, M>(acc, d_scores, rows, sums, of_y, before, plan);
    } else {
        let chunk = comptime!(plan.chunk);
        let slice = comptime!(plan.key_slice);
        let how = comptime!(if of_y { transposed(chunk) } else { row_major(chunk) });
        let spec = comptime!(plan.mul(plan.rows_grid(), chunk, how, row_major(slice)));
        mul::<X, M, N>(acc, d_scores, 0usize, rows, 0usize, spec);
    }
}

/// Multiplies gradients by e^{G_i}, or (`ends`) by e^{G_C - G_i}.
#[cube]
fn scale_reach(
    acc: &mut Acc,
    sums: &Sums,
    #[comptime] ends: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.rows_grid());
    let stride = comptime!(plan.stride(plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let mut by = Pair::new(1.0f32);
            if comptime!(plan.variant.vector()) {
                #[unroll]
                for l in 0..2usize {
                    if comptime!(ends) {
                        let end = comptime!((plan.chunk - 1) * stride) + d + l;
                        by[l] = f32::exp(between(sums, end, i * stride + d + l));
                    } else {
                        by[l] = vector_reach(sums, i, d + l, before, plan);
                    }
                }
            } else if comptime!(ends) {
                by = Pair::new(left(sums, 0usize, i, plan));
            } else {
                by = Pair::new(reach(sums, 0usize, i, before, plan));
            }
            let x = acc.index(f)[h] * by;
            set(acc.index_mut(f), h, x);
        }
    }
}

/// The gradient of one slice of a row, as far as `role` goes; e and a of a delta rule before -beta.
#[cube]
#[allow(clippy::too_many_arguments)]
fn gradient<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    sums_of_unit: &mut PartialSums,
    tiles: &mut GradientTiles<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    saved: &SavedTensors<F, E, G>,
    d_scores: &ScoreGradients<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] role: Role,
    #[comptime] plan: Plan,
) -> Acc {
    let writes = comptime!(role.writes());
    let values = comptime!(plan.state_factor(role));
    let states = comptime!(role.states());
    let own = comptime!(plan.rows(role));
    let gated = comptime!(plan.gated());
    let mut acc = state_term::<F, X, E, G, N>(tiles, x, saved, place, first, values, states, plan);
    let before = comptime!(
        role == Role::Query && plan.variant.reads_before()
            || role == Role::Erase && plan.variant.erases_before()
    );
    scale_reach(&mut acc, sums, writes, before, plan);
    let valid = place.valid;
    if comptime!(gated && writes) {
        let rows = load_fragments::<F, X, N, M>(
            tiles,
            pairs,
            place,
            first,
            own,
            comptime!(TokenOffset::Same),
            plan,
        );
        gate_products::<X, N>(
            sums_of_unit,
            tiles,
            &acc,
            &rows,
            valid,
            comptime!(Gate::ChunkEnd),
            plan,
        );
    }
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        let of = comptime!(term.rows);
        load_key_rows::<F, X, G, N>(tiles, x, place, first, of, plan);
        let rows = keys_tile::<X, N>(tiles, of, plan);
        let scores = scored_tile::<X, M>(d_scores, comptime!(term.scored));
        let before = comptime!(plan.before(term.scored));
        adjoint::<X, N, M>(&mut acc, &scores, &rows, sums, writes, before, plan);
    }
    if gated {
        let rows = load_fragments::<F, X, N, M>(
            tiles,
            pairs,
            place,
            first,
            own,
            comptime!(TokenOffset::Same),
            plan,
        );
        let gate = comptime!(plan.gate(role));
        gate_products::<X, N>(sums_of_unit, tiles, &acc, &rows, valid, gate, plan);
    }
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        if comptime!(plan.excludes_zero_exponents(term.scored)) {
            let offset = comptime!(plan.offset(term, role.writes()));
            let of = comptime!(term.rows);
            let rows = load_fragments::<F, X, N, M>(tiles, pairs, place, first, of, offset, plan);
            let scored = comptime!(term.scored);
            let zero_exponent = &d_scores.zero_exponent;
            add_zero_exponents(
                &mut acc,
                zero_exponent,
                &rows,
                &tiles.scales,
                valid,
                scored,
                offset,
                plan,
            );
        }
    }
    if comptime!(role == Role::Erase && plan.variant.delta()) {
        let rows = load_fragments::<F, X, N, M>(
            tiles,
            pairs,
            place,
            first,
            own,
            comptime!(TokenOffset::Same),
            plan,
        );
        beta_products(sums_of_unit, &acc, &rows, plan);
    }
    acc
}

/// Gradients of the rows that read the chunk's first state: dq and da. If the erase key is k, de is returned,
/// to be added to dk.
#[cube]
#[allow(clippy::too_many_arguments)]
fn query_and_erase_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    out: &mut Gradients<F, G, W>,
    sums_of_unit: &mut PartialSums,
    tiles: &mut GradientTiles<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    saved: &SavedTensors<F, E, G>,
    d_scores: &ScoreGradients<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) -> Acc {
    let variant = comptime!(plan.variant);
    let grid = comptime!(plan.rows_grid());
    let role = comptime!(Role::Query);
    let d_query = gradient::<F, X, E, G, N, M>(
        sums_of_unit,
        tiles,
        x,
        pairs,
        saved,
        d_scores,
        sums,
        place,
        first,
        role,
        plan,
    );
    keep_rows::<F, W>(&mut out.q, &d_query, &place.rows, first, plan);
    if comptime!(variant.solves()) {
        let role = comptime!(Role::Erase);
        let mut d_erase = gradient::<F, X, E, G, N, M>(
            sums_of_unit,
            tiles,
            x,
            pairs,
            saved,
            d_scores,
            sums,
            place,
            first,
            role,
            plan,
        );
        if comptime!(variant.delta()) {
            scale_erase_rows(&mut d_erase, &tiles.scales, grid, plan);
        }
        if comptime!(variant.own_a()) {
            keep_rows::<F, W>(&mut out.a, &d_erase, &place.rows, first, plan);
        }
        d_erase
    } else {
        zeros(0usize)
    }
}

/// Gradients of the rows that write: dk, to which `d_erase` is added if the erase key is k, and db.
#[cube]
#[allow(clippy::too_many_arguments)]
fn key_and_write_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    d_erase: &Acc,
    out: &mut Gradients<F, G, W>,
    sums_of_unit: &mut PartialSums,
    tiles: &mut GradientTiles<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    saved: &SavedTensors<F, E, G>,
    d_scores: &ScoreGradients<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let role = comptime!(Role::Key);
    let mut written = gradient::<F, X, E, G, N, M>(
        sums_of_unit,
        tiles,
        x,
        pairs,
        saved,
        d_scores,
        sums,
        place,
        first,
        role,
        plan,
    );
    if comptime!(variant.delta() && !variant.own_a()) {
        add(&mut written, d_erase, comptime!(plan.rows_grid().fragments()));
    }
    keep_rows::<F, W>(&mut out.k, &written, &place.rows, first, plan);
    if comptime!(variant.low_rank()) {
        let role = comptime!(Role::Write);
        let written = gradient::<F, X, E, G, N, M>(
            sums_of_unit,
            tiles,
            x,
            pairs,
            saved,
            d_scores,
            sums,
            place,
            first,
            role,
            plan,
        );
        keep_rows::<F, W>(&mut out.b, &written, &place.rows, first, plan);
    }
}

/// Writes gradients of rows to their tensor, from column `first` on; with tensor cores in whole
/// sectors.
#[cube]
fn keep_rows<F: Float, W: Size>(
    out: &mut Array<Vector<F, W>>,
    acc: &Acc,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.rows_grid());
    if comptime!(grid.engine == Engine::Mma) {
        let across = comptime!(grid.fragment_columns());
        let lane = UNIT_POS as usize % 32;
        let top = row(0usize, 0usize, grid);
        let columns = UNIT_POS as usize / comptime!(32 * grid.down())
            * comptime!(grid.n / grid.across())
            + lane % 2 * 8
            + lane % 4 / 2 * 4;
        let start = (rows.start + top * rows.stride + first + columns) / 4;
        if inside(0usize, grid) {
            #[unroll]
            for r in 0..comptime!(grid.fragment_rows()) {
                #[unroll]
                for h in 0..2usize {
                    let down = comptime!(grid.step(r * across, h)[0]);
                    let there = top + down < rows.valid;
                    let at = start + rows.stride / 4 * down;
                    #[unroll]
                    for c in 0..comptime!(across / 2) {
                        let left = acc.index(comptime!(r * across + 2 * c))[h];
                        let right = acc.index(comptime!(r * across + 2 * c + 1))[h];
                        let at = at + comptime!(c * 4);
                        put_four::<F, W>(out, at, left, right, lane % 2 == 1, there, 1u32);
                    }
                }
            }
        }
    } else {
        keep::<F, W>(out, acc, rows, first, comptime!(plan.key_width), grid);
    }
}
