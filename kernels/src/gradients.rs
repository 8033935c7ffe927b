//! Stage 3 of the backward pass, for all chunks at once: gradients of every row and gate.
//!
//! With D_ij the decay from j to i, `weights` the gradients of scores and S, dS' the state at the
//! chunk's start and the gradient of the one at its end:
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
//! memory whole (desk.rs). Gradients of gates and beta: gates.rs.

use crate::chunk::{Place, Sizes, Sums, between, place, sum_scalars, sum_vectors, sums};
use crate::desk::{
    Desk, Group, Keys, RowPairs, Side, States, Values, desk, held, issue, keys_tile, ready_keys,
    ready_state, ready_values, state_tile, values_tile,
};
use crate::gates::{
    Gate, Shares, add_apart, beta_products, clear_gates, gate_products, keep_scalar_gates,
    keep_values, keep_vector_gates, shares,
};
use crate::plan::{Plan, transposed, upright};
use crate::scores::{Operands, ask_scale, below, keep, left, reach, store, vector_reach, weight};
use crate::state::add;
use crate::tile::{Acc, Engine, Grid, Pair, Rows, column, inside, mul, put_four, row, tile, zeros};
use crate::vector::{scores_adjoint, set};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Everything the stages before left, and the gradient of the outputs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Traces<F: Float, E: Float, G: Size> {
    pub d_o: Array<Vector<F, G>>,
    /// U, `[B, T, H, V]`; not read in linear attention.
    pub u: Array<Vector<E, G>>,
    /// R, `[B, T, H, V]`; not read in linear attention.
    pub r: Array<Vector<E, G>>,
    /// [V, K] at the start of every chunk.
    pub states: Array<Vector<E, G>>,
    /// Gradients of the states at the end of every chunk.
    pub d_states: Array<Vector<E, G>>,
}

/// What is filled: all `[B, T, H, ..]`, key heads not yet summed up.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Gradients<F: Float, G: Size, W: Size> {
    pub q: Array<Vector<F, W>>,
    pub k: Array<Vector<F, W>>,
    pub a: Array<Vector<F, W>>,
    pub b: Array<Vector<F, W>>,
    pub v: Array<Vector<F, G>>,
    /// Scalar or vector gates.
    pub g: Array<f32>,
    pub beta: Array<f32>,
}

/// Gradients of the scores, and what is kept apart from the gates.
#[derive(CubeType)]
struct Weights<X: Float, M: Size> {
    qk: SharedMemory<Vector<X, M>>,
    qb: SharedMemory<Vector<X, M>>,
    ab: SharedMemory<Vector<X, M>>,
    ak: SharedMemory<Vector<X, M>>,
    /// Delta: ab times -beta.
    scaled: SharedMemory<Vector<X, M>>,
    /// [4, C], in the order of [`Scored::apart`].
    apart: SharedMemory<f32>,
}

/// A [C, C] block of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scored {
    Qk,
    Qb,
    Ab,
    Ak,
    /// Delta: ab times -beta.
    Scaled,
}

impl Scored {
    /// Row of `Weights::apart`.
    pub fn apart(self) -> usize {
        match self {
            Self::Qk => 0,
            Self::Qb => 1,
            Self::Ab | Self::Scaled => 2,
            Self::Ak => 3,
        }
    }

    /// Whether queries read, rather than rows ask.
    fn reads(self) -> bool {
        matches!(self, Self::Qk | Self::Qb)
    }
}

/// A row whose gradient is computed, by what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// q.
    Reads,
    /// a, or e of a delta rule.
    Asks,
    /// k, as it writes.
    Keys,
    /// Low rank: b.
    Writes,
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

    /// Whether the row on the left of these scores sees the token before it.
    fn before(&self, scored: Scored) -> bool {
        if scored.reads() { self.variant.reads_before() } else { self.variant.asks_before() }
    }

    /// Whether scores with an empty exponent are kept apart.
    fn apart(&self, scored: Scored) -> bool {
        if scored.reads() { self.reads_apart() } else { self.asks_apart() }
    }

    /// The value-wide matrices whose product is the gradient of scores.
    fn sides(&self, scored: Scored) -> [Values; 2] {
        match scored {
            Scored::Qk => [Values::DO, self.key_values()],
            Scored::Qb => [Values::DO, Values::U],
            Scored::Ab | Scored::Scaled => [Values::R, Values::U],
            Scored::Ak => [Values::R, Values::V],
        }
    }

    fn terms(&self, role: Role) -> Vec<Term> {
        let low_rank = self.variant.low_rank();
        let term = |scored, rows| Term { scored, rows };
        match role {
            Role::Reads if low_rank => vec![term(Scored::Qk, Keys::K), term(Scored::Qb, Keys::B)],
            Role::Reads => vec![term(Scored::Qk, Keys::K)],
            Role::Asks if low_rank => vec![term(Scored::Ab, Keys::B), term(Scored::Ak, Keys::K)],
            Role::Asks => vec![term(Scored::Ab, self.writing())],
            Role::Keys if low_rank => vec![term(Scored::Qk, Keys::Q), term(Scored::Ak, Keys::A)],
            Role::Keys if self.variant.delta() => {
                vec![term(Scored::Qk, Keys::Q), term(Scored::Scaled, self.asking())]
            }
            Role::Keys => vec![term(Scored::Qk, Keys::Q)],
            Role::Writes => vec![term(Scored::Qb, Keys::Q), term(Scored::Ab, Keys::A)],
        }
    }

    /// The row itself.
    fn rows(&self, role: Role) -> Keys {
        match role {
            Role::Reads => Keys::Q,
            Role::Asks => self.asking(),
            Role::Keys => Keys::K,
            Role::Writes => Keys::B,
        }
    }

    /// What the row is multiplied with in its term with a state.
    fn met(&self, role: Role) -> Values {
        match role {
            Role::Reads => Values::DO,
            Role::Asks => Values::R,
            Role::Keys => self.key_values(),
            Role::Writes => Values::U,
        }
    }

    fn gate(&self, role: Role) -> Gate {
        match role {
            Role::Reads => Gate::Reads { before: self.variant.reads_before() },
            Role::Asks => Gate::Asks { before: self.variant.asks_before() },
            Role::Keys | Role::Writes => Gate::Writes,
        }
    }

    /// The row that a term's own row is paired with where the exponent is empty.
    fn side(&self, term: Term, writes: bool) -> Side {
        match (self.before(term.scored), writes) {
            (false, _) => Side::Own,
            (true, false) => Side::Last,
            (true, true) => Side::Next,
        }
    }
}

impl Role {
    /// Whether the row writes: its gradient comes from rows after it, and from the state's at the end.
    fn writes(self) -> bool {
        matches!(self, Self::Keys | Self::Writes)
    }

    fn states(self) -> States {
        if self.writes() { States::End } else { States::Start }
    }
}

/// The kernel. F: the tensors' type; E: what the stages before kept; X: what tiles hold.
#[cube(launch_unchecked)]
pub(crate) fn row_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    traces: &Traces<F, E, G>,
    out: &mut Gradients<F, G, W>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    let variant = comptime!(plan.variant);
    let chunk = comptime!(plan.chunk);
    let place = place(sizes, CUBE_POS_Y as usize, CUBE_POS_X as usize, plan);
    let mut sums = sums(comptime!(match variant.decay {
        crate::Decay::None => 1,
        crate::Decay::Scalar => chunk,
        crate::Decay::Vector => chunk * plan.stride(plan.key_slice),
    }));
    let mut desk = desk::<X, N>(plan);
    let square = comptime!(chunk * plan.stride(chunk));
    let low_rank = comptime!(if variant.low_rank() { square } else { 16 });
    let solves = comptime!(if variant.solves() { square } else { 16 });
    let delta = comptime!(if variant.delta() { square } else { 16 });
    let mut weights = Weights::<X, M> {
        qk: tile::<X, M>(square),
        qb: tile::<X, M>(low_rank),
        ab: tile::<X, M>(solves),
        ak: tile::<X, M>(low_rank),
        scaled: tile::<X, M>(delta),
        apart: SharedMemory::<f32>::new(comptime!(4 * chunk)),
    };
    let mut shares = shares(plan);
    if comptime!(plan.whole()) {
        let values = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        let start = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        let end = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
        sync_cube();
        let group = comptime!(Group::Values);
        issue::<F, X, E, G, N>(&mut desk, x, traces, &place, group, plan);
        values.commit_copy_async();
        values.arrive();
        let group = comptime!(Group::Start);
        issue::<F, X, E, G, N>(&mut desk, x, traces, &place, group, plan);
        start.commit_copy_async();
        start.arrive();
        let group = comptime!(Group::End);
        issue::<F, X, E, G, N>(&mut desk, x, traces, &place, group, plan);
        end.commit_copy_async();
        end.arrive();
        prepare::<F, X, G, N, M>(&mut weights, &mut desk, &mut sums, x, &place, plan);
        values.wait_parity(0u32);
        fill_weights::<F, X, E, G, N, M>(&mut weights, &mut desk, x, traces, &sums, &place, plan);
        start.wait_parity(0u32);
        let asked = before_writes::<F, X, E, G, N, M, W>(
            out,
            &mut shares,
            &mut desk,
            x,
            pairs,
            traces,
            &weights,
            &sums,
            &place,
            0usize,
            plan,
        );
        end.wait_parity(0u32);
        writes::<F, X, E, G, N, M, W>(
            &asked,
            out,
            &mut shares,
            &mut desk,
            x,
            pairs,
            traces,
            &weights,
            &sums,
            &place,
            0usize,
            plan,
        );
    } else {
        prepare::<F, X, G, N, M>(&mut weights, &mut desk, &mut sums, x, &place, plan);
        fill_weights::<F, X, E, G, N, M>(&mut weights, &mut desk, x, traces, &sums, &place, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            let first = slice * comptime!(plan.key_slice);
            if comptime!(variant.vector()) {
                sync_cube();
                sum_vectors::<G>(&mut sums, &x.gates, &place.rows, first, plan);
                clear_gates::<X, N>(&mut desk, plan);
            }
            let asked = before_writes::<F, X, E, G, N, M, W>(
                out,
                &mut shares,
                &mut desk,
                x,
                pairs,
                traces,
                &weights,
                &sums,
                &place,
                first,
                plan,
            );
            writes::<F, X, E, G, N, M, W>(
                &asked,
                out,
                &mut shares,
                &mut desk,
                x,
                pairs,
                traces,
                &weights,
                &sums,
                &place,
                first,
                plan,
            );
            if comptime!(variant.vector()) {
                keep_vector_gates::<F, X, E, G, N, W>(
                    out, &mut desk, traces, &sums, &place, first, plan,
                );
            }
        }
    }
    if comptime!(variant.scalar()) {
        keep_scalar_gates::<F, X, E, G, N, W>(out, &mut desk, &shares, traces, &sums, &place, plan);
    }
    if comptime!(variant.delta()) {
        keep_values::<F, X, E, G, N, W>(out, &mut desk, &shares, x, traces, &place, plan);
    }
}

/// What products need besides tiles. Ends with everything visible to all.
#[cube]
fn prepare<F: Float, X: Float, G: Size, N: Size, M: Size>(
    weights: &mut Weights<X, M>,
    desk: &mut Desk<X, N>,
    sums: &mut Sums,
    x: &Operands<F, G>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let unit = UNIT_POS as usize;
    if unit < chunk {
        desk.scales[unit] = ask_scale(&x.beta, &place.gates, unit, plan);
        #[unroll]
        for n in 0..4usize {
            weights.apart[unit + comptime!(n * chunk)] = 0.0f32;
        }
    }
    sync_cube();
    if comptime!(plan.variant.scalar()) {
        sum_scalars(sums, &x.g, &place.gates, plan);
    }
}

/// Gradients of the scores: `[C, C]` products of value-wide matrices.
#[cube]
fn fill_weights<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    weights: &mut Weights<X, M>,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    sums: &Sums,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.chunk));
    let apart = &mut weights.apart;
    let scored = comptime!(Scored::Qk);
    let acc = weigh::<F, X, E, G, N>(apart, desk, x, traces, sums, place, scored, plan);
    store::<X, M>(&mut weights.qk, &acc, stride, grid);
    if comptime!(variant.low_rank()) {
        let scored = comptime!(Scored::Qb);
        let acc = weigh::<F, X, E, G, N>(apart, desk, x, traces, sums, place, scored, plan);
        store::<X, M>(&mut weights.qb, &acc, stride, grid);
        let scored = comptime!(Scored::Ak);
        let acc = weigh::<F, X, E, G, N>(apart, desk, x, traces, sums, place, scored, plan);
        store::<X, M>(&mut weights.ak, &acc, stride, grid);
    }
    if comptime!(variant.solves()) {
        let scored = comptime!(Scored::Ab);
        let mut acc = weigh::<F, X, E, G, N>(apart, desk, x, traces, sums, place, scored, plan);
        store::<X, M>(&mut weights.ab, &acc, stride, grid);
        if comptime!(variant.delta()) {
            scale_asks(&mut acc, &desk.scales, grid, plan);
            store::<X, M>(&mut weights.scaled, &acc, stride, grid);
        }
    }
    sync_cube();
}

/// Multiplies rows by what stands before asking rows.
#[cube]
fn scale_asks(
    acc: &mut Acc,
    scales: &SharedMemory<f32>,
    #[comptime] grid: Grid,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        #[unroll]
        for h in 0..2usize {
            let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let scaled = acc.index(f)[h] * Pair::new(scales[i]);
            set(acc.index_mut(f), h, scaled);
        }
    }
}

/// `X Y^T` over slices of values, [C, C].
#[cube]
fn value_product<F: Float, X: Float, E: Float, G: Size, N: Size>(
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    place: &Place,
    #[comptime] sides: [Values; 2],
    #[comptime] plan: Plan,
) -> Acc {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.pairs());
    let a = comptime!(sides[0]);
    let b = comptime!(sides[1]);
    let mut acc = zeros(comptime!(grid.fragments()));
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        ready_values::<F, X, E, G, N>(desk, x, traces, place, first, a, b, plan);
        let left = values_tile::<X, N>(desk, a, false, plan);
        let right = values_tile::<X, N>(desk, b, true, plan);
        let spec = comptime!(plan.mul(grid, columns, upright(columns), transposed(columns)));
        mul::<X, N, N>(&mut acc, &left, 0usize, &right, 0usize, spec);
    }
    acc
}

/// Gradients of scores, masked and weighed by a scalar decay. Those of empty exponents go to `apart`
/// where a gate would feel them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn weigh<F: Float, X: Float, E: Float, G: Size, N: Size>(
    apart: &mut SharedMemory<f32>,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    sums: &Sums,
    place: &Place,
    #[comptime] scored: Scored,
    #[comptime] plan: Plan,
) -> Acc {
    let sides = comptime!(plan.sides(scored));
    let before = comptime!(plan.before(scored));
    let strict = comptime!(before || !scored.reads());
    let exclude = comptime!(plan.apart(scored));
    let grid = comptime!(plan.pairs());
    let mut acc = value_product::<F, X, E, G, N>(desk, x, traces, place, sides, plan);
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid);
        let low = below(f, j, grid);
        #[unroll]
        for h in 0..2usize {
            let mut x = Pair::new(0.0);
            if low {
                let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
                x = acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    x[l] = x[l] * weight(sums, i, j + l, strict, before, plan);
                    if comptime!(exclude) {
                        let empty = if comptime!(before) { j + l + 1 == i } else { j + l == i };
                        if empty {
                            if inside(f, grid) {
                                apart[comptime!(scored.apart() * plan.chunk) + i] = x[l];
                            }
                            x[l] = 0.0f32;
                        }
                    }
                }
            }
            set(acc.index_mut(f), h, x);
        }
    }
    acc
}

/// `X S^T` over slices of values for one slice of keys: [C, key_slice], where S^T is stored [V, K].
#[cube]
#[allow(clippy::too_many_arguments)]
fn state_product<F: Float, X: Float, E: Float, G: Size, N: Size>(
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
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
        ready_state::<F, X, E, G, N>(desk, x, traces, place, first, key, values, states, plan);
        let left = values_tile::<X, N>(desk, values, false, plan);
        let right = state_tile::<X, N>(desk, states);
        let spec = comptime!(plan.mul(grid, columns, upright(columns), upright(plan.key_slice)));
        mul::<X, N, N>(&mut acc, &left, 0usize, &right, 0usize, spec);
    }
    acc
}

/// `acc += weights rows`, or `weights^T rows` for gradients of what was written (`of_y`).
#[cube]
fn adjoint<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] of_y: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.vector()) {
        scores_adjoint::<X, N, M>(acc, weights, rows, sums, of_y, before, plan);
    } else {
        let chunk = comptime!(plan.chunk);
        let slice = comptime!(plan.key_slice);
        let how = comptime!(if of_y { transposed(chunk) } else { upright(chunk) });
        let spec = comptime!(plan.mul(plan.rows_grid(), chunk, how, upright(slice)));
        mul::<X, M, N>(acc, weights, 0usize, rows, 0usize, spec);
    }
}

/// Multiplies gradients by what reaches row i from the chunk's start (`ends`: by what is left of
/// row i at its end).
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
    shares: &mut Shares,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    traces: &Traces<F, E, G>,
    weights: &Weights<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] role: Role,
    #[comptime] plan: Plan,
) -> Acc {
    let writes = comptime!(role.writes());
    let values = comptime!(plan.met(role));
    let states = comptime!(role.states());
    let own = comptime!(plan.rows(role));
    let gated = comptime!(plan.gated());
    let mut acc =
        state_product::<F, X, E, G, N>(desk, x, traces, place, first, values, states, plan);
    let before = comptime!(
        role == Role::Reads && plan.variant.reads_before()
            || role == Role::Asks && plan.variant.asks_before()
    );
    scale_reach(&mut acc, sums, writes, before, plan);
    let valid = place.valid;
    if comptime!(gated && writes) {
        let rows = held::<F, X, N, M>(desk, pairs, place, first, own, comptime!(Side::Own), plan);
        gate_products::<X, N>(shares, desk, &acc, &rows, valid, comptime!(Gate::Ends), plan);
    }
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        let of = comptime!(term.rows);
        ready_keys::<F, X, G, N>(desk, x, place, first, of, plan);
        let rows = keys_tile::<X, N>(desk, of, plan);
        let scores = scored_tile::<X, M>(weights, comptime!(term.scored));
        let before = comptime!(plan.before(term.scored));
        adjoint::<X, N, M>(&mut acc, &scores, &rows, sums, writes, before, plan);
    }
    if gated {
        let rows = held::<F, X, N, M>(desk, pairs, place, first, own, comptime!(Side::Own), plan);
        let gate = comptime!(plan.gate(role));
        gate_products::<X, N>(shares, desk, &acc, &rows, valid, gate, plan);
    }
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        if comptime!(plan.apart(term.scored)) {
            let side = comptime!(plan.side(term, role.writes()));
            let of = comptime!(term.rows);
            let rows = held::<F, X, N, M>(desk, pairs, place, first, of, side, plan);
            let scored = comptime!(term.scored);
            let apart = &weights.apart;
            add_apart(&mut acc, apart, &rows, &desk.scales, valid, scored, side, plan);
        }
    }
    if comptime!(role == Role::Asks && plan.variant.delta()) {
        let rows = held::<F, X, N, M>(desk, pairs, place, first, own, comptime!(Side::Own), plan);
        beta_products(shares, &acc, &rows, plan);
    }
    acc
}

#[cube]
fn scored_tile<X: Float, M: Size>(
    weights: &Weights<X, M>,
    #[comptime] which: Scored,
) -> SharedMemory<Vector<X, M>> {
    if comptime!(which == Scored::Qk) {
        weights.qk
    } else if comptime!(which == Scored::Qb) {
        weights.qb
    } else if comptime!(which == Scored::Ab) {
        weights.ab
    } else if comptime!(which == Scored::Ak) {
        weights.ak
    } else {
        weights.scaled
    }
}

/// dq and da: what the state at the chunk's start has to do with. de of a delta rule whose erase rows
/// are k is handed on.
#[cube]
#[allow(clippy::too_many_arguments)]
fn before_writes<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    out: &mut Gradients<F, G, W>,
    shares: &mut Shares,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    traces: &Traces<F, E, G>,
    weights: &Weights<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) -> Acc {
    let variant = comptime!(plan.variant);
    let grid = comptime!(plan.rows_grid());
    let role = comptime!(Role::Reads);
    let read = gradient::<F, X, E, G, N, M>(
        shares, desk, x, pairs, traces, weights, sums, place, first, role, plan,
    );
    keep_rows::<F, W>(&mut out.q, &read, &place.rows, first, plan);
    if comptime!(variant.solves()) {
        let role = comptime!(Role::Asks);
        let mut asked = gradient::<F, X, E, G, N, M>(
            shares, desk, x, pairs, traces, weights, sums, place, first, role, plan,
        );
        if comptime!(variant.delta()) {
            scale_asks(&mut asked, &desk.scales, grid, plan);
        }
        if comptime!(variant.own_a()) {
            keep_rows::<F, W>(&mut out.a, &asked, &place.rows, first, plan);
        }
        asked
    } else {
        zeros(0usize)
    }
}

/// dk, to which `asked` is added where k is also the erase row, and db.
#[cube]
#[allow(clippy::too_many_arguments)]
fn writes<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    asked: &Acc,
    out: &mut Gradients<F, G, W>,
    shares: &mut Shares,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    traces: &Traces<F, E, G>,
    weights: &Weights<X, M>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let role = comptime!(Role::Keys);
    let mut written = gradient::<F, X, E, G, N, M>(
        shares, desk, x, pairs, traces, weights, sums, place, first, role, plan,
    );
    if comptime!(variant.delta() && !variant.own_a()) {
        add(&mut written, asked, comptime!(plan.rows_grid().fragments()));
    }
    keep_rows::<F, W>(&mut out.k, &written, &place.rows, first, plan);
    if comptime!(variant.low_rank()) {
        let role = comptime!(Role::Writes);
        let written = gradient::<F, X, E, G, N, M>(
            shares, desk, x, pairs, traces, weights, sums, place, first, role, plan,
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
