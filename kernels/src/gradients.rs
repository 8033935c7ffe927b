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
//! Gates: e^{G_i - G_j} feels g_t for j < t <= i, so that
//! ```text
//! dG = q dq + a da - k dk - b db,   dg_t = sum_{i >= t} dG_i + what reaches the end of the chunk
//! ```
//! Terms whose exponent is empty (a token's own score, the last token's write as the chunk ends) are
//! left out of dG and added to the gradients afterwards (`apart`): they would cancel, and under a
//! gate of -50 what they cancel to is all there is.
//!
//! Work: a cube a chunk of a (sequence, head). Two tiles hold whatever is multiplied next.

use crate::chunk::{
    Place, Sizes, Sums, between, place, since_start, sum_scalars, sum_vectors, sums,
};
use crate::plan::{Plan, transposed, upright};
use crate::scores::{Operands, ask_scale, keep, left, reach, store, vector_reach, weight};
use crate::state::add;
use crate::tile::{Acc, Grid, Pair, Rows, column, inside, load, mul, row, tile, zeros};
use crate::vector::{scores_adjoint, set};
use cubecl::prelude::*;

/// Partial sums of a row.
const SLOTS: usize = 16;

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

/// Rows again, two numbers a vector where accumulators hold pairs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowPairs<F: Float, M: Size> {
    pub q: Array<Vector<F, M>>,
    pub k: Array<Vector<F, M>>,
    pub a: Array<Vector<F, M>>,
    pub b: Array<Vector<F, M>>,
}

/// What is filled: all `[B, T, H, ..]`, key heads not yet summed up.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Gradients<F: Float, G: Size, M: Size> {
    pub q: Array<Vector<F, M>>,
    pub k: Array<Vector<F, M>>,
    pub a: Array<Vector<F, M>>,
    pub b: Array<Vector<F, M>>,
    pub v: Array<Vector<F, G>>,
    /// Scalar or vector gates.
    pub g: Array<f32>,
    pub beta: Array<f32>,
}

/// A value-wide matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Values {
    V,
    U,
    R,
    DO,
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
    /// [4, C], in the order of [`apart`].
    apart: SharedMemory<f32>,
}

/// Rows of `Weights::apart`.
mod apart {
    pub const QK: usize = 0;
    pub const QB: usize = 1;
    pub const AB: usize = 2;
    pub const AK: usize = 3;
}

/// What is loaded next, and scratch.
#[derive(CubeType)]
struct Desk<X: Float, N: Size> {
    left: SharedMemory<Vector<X, N>>,
    right: SharedMemory<Vector<X, N>>,
    /// Partial sums of rows, [C, SLOTS].
    partial: SharedMemory<f32>,
    /// dG, [C]; vector decay: [C, key_slice].
    gates: SharedMemory<f32>,
    /// What reaches the end of the chunk, shaped as `gates`.
    ends: SharedMemory<f32>,
    /// dbeta, [C].
    beta: SharedMemory<f32>,
}

impl Plan {
    fn rows_grid(&self) -> Grid {
        self.grid(self.chunk, self.key_slice)
    }

    /// Whether empty exponents of queries' scores are kept apart.
    fn reads_apart(&self) -> bool {
        self.variant.decay != crate::Decay::None
    }

    fn asks_apart(&self) -> bool {
        self.variant.decay != crate::Decay::None && self.variant.asks_before()
    }

    /// The values that k writes.
    fn key_values(&self) -> Values {
        if self.variant.delta() { Values::U } else { Values::V }
    }

    /// Numbers of the left tile: [C, value_slice].
    pub fn left_numbers(&self) -> usize {
        self.chunk * self.stride(self.value_slice)
    }

    /// Numbers of the right tile: [C, value_slice], [value_slice, key_slice] or [C, key_slice].
    pub fn right_numbers(&self) -> usize {
        let rows = self.chunk.max(self.value_slice);
        self.left_numbers().max(rows * self.stride(self.key_slice))
    }
}

/// The kernel. F: the tensors' type; E: what the stages before kept; X: what tiles hold.
#[cube(launch_unchecked)]
pub(crate) fn row_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    x: &Operands<F, G>,
    pairs: &RowPairs<F, M>,
    traces: &Traces<F, E, G>,
    out: &mut Gradients<F, G, M>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M)] _widths: [usize; 3],
) {
    let variant = comptime!(plan.variant);
    let chunk = comptime!(plan.chunk);
    let place = place(sizes, CUBE_POS_Y as usize, CUBE_POS_X as usize, plan);
    let by_key = comptime!(chunk * plan.stride(plan.key_slice));
    let mut sums = sums(comptime!(match variant.decay {
        crate::Decay::None => 1,
        crate::Decay::Scalar => chunk,
        crate::Decay::Vector => by_key,
    }));
    let gates = comptime!(if variant.vector() { by_key } else { chunk });
    let mut desk = Desk::<X, N> {
        left: tile::<X, N>(comptime!(plan.left_numbers())),
        right: tile::<X, N>(comptime!(plan.right_numbers())),
        partial: SharedMemory::<f32>::new(comptime!(chunk * SLOTS)),
        gates: SharedMemory::<f32>::new(gates),
        ends: SharedMemory::<f32>::new(gates),
        beta: SharedMemory::<f32>::new(chunk),
    };
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
    let unit = UNIT_POS as usize;
    if unit < chunk {
        desk.beta[unit] = 0.0f32;
        #[unroll]
        for n in 0..4usize {
            weights.apart[unit + comptime!(n * chunk)] = 0.0f32;
        }
        if comptime!(!variant.vector()) {
            desk.gates[unit] = 0.0f32;
            desk.ends[unit] = 0.0f32;
        }
    }
    sync_cube();
    if comptime!(variant.scalar()) {
        sum_scalars(&mut sums, &x.g, &place.gates, plan);
    }
    fill_weights::<F, X, E, G, N, M>(&mut weights, &mut desk, x, traces, &sums, &place, plan);
    if comptime!(variant.delta()) {
        value_gradients::<F, X, E, G, N, M>(out, &mut desk, x, traces, &place, plan);
    }
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        sync_cube();
        if comptime!(variant.vector()) {
            sum_vectors::<G>(&mut sums, &x.gates, &place.rows, first, plan);
            clear_gates::<X, N>(&mut desk, plan);
        }
        query_gradients::<F, X, E, G, N, M>(
            out, &mut desk, x, pairs, traces, &weights, &sums, &place, first, plan,
        );
        let fragments = comptime!(plan.rows_grid().fragments());
        let mut asked = zeros(fragments);
        if comptime!(variant.solves()) {
            ask_gradients::<F, X, E, G, N, M>(
                &mut asked, out, &mut desk, x, pairs, traces, &weights, &sums, &place, first, plan,
            );
        }
        key_gradients::<F, X, E, G, N, M>(
            &asked, out, &mut desk, x, pairs, traces, &weights, &sums, &place, first, plan,
        );
        if comptime!(variant.low_rank()) {
            write_gradients::<F, X, E, G, N, M>(
                out, &mut desk, x, pairs, traces, &weights, &sums, &place, first, plan,
            );
        }
        if comptime!(variant.vector()) {
            keep_vector_gates::<F, X, E, G, N, M>(
                out, &mut desk, traces, &sums, &place, first, plan,
            );
        }
    }
    sync_cube();
    if comptime!(variant.scalar()) {
        keep_scalar_gates::<F, X, E, G, N, M>(out, &mut desk, traces, &sums, &place, plan);
    }
    if comptime!(variant.delta()) {
        if unit < place.valid {
            out.beta[place.gates.start + unit * place.gates.stride] = desk.beta[unit];
        }
    }
}

/// Loads columns `first..` of a value-wide matrix, [C, value_slice].
#[cube]
fn load_values<F: Float, X: Float, E: Float, G: Size, N: Size>(
    to: &mut SharedMemory<Vector<X, N>>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    place: &Place,
    first: usize,
    #[comptime] which: Values,
    #[comptime] plan: Plan,
) {
    let window = comptime!(plan.window(plan.chunk, plan.value_slice, plan.value_width));
    if comptime!(which == Values::V) {
        load::<F, G, X, N>(to, &x.v, &place.values, first, window);
    } else if comptime!(which == Values::DO) {
        load::<F, G, X, N>(to, &traces.d_o, &place.values, first, window);
    } else if comptime!(which == Values::U) {
        load::<E, G, X, N>(to, &traces.u, &place.values, first, window);
    } else {
        load::<E, G, X, N>(to, &traces.r, &place.values, first, window);
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
    let reads = comptime!(variant.reads_before());
    let asks = comptime!(variant.asks_before());
    let keys = comptime!(plan.key_values());
    let mut acc = value_product::<F, X, E, G, N>(desk, x, traces, place, Values::DO, keys, plan);
    let apart = comptime!(plan.reads_apart());
    weigh(&mut acc, &mut weights.apart, sums, comptime!(apart::QK), reads, reads, apart, plan);
    store::<X, M>(
        &mut weights.qk,
        &acc,
        comptime!(plan.stride(plan.chunk)),
        comptime!(plan.pairs()),
    );
    if comptime!(variant.low_rank()) {
        let mut acc =
            value_product::<F, X, E, G, N>(desk, x, traces, place, Values::DO, Values::U, plan);
        weigh(&mut acc, &mut weights.apart, sums, comptime!(apart::QB), reads, reads, apart, plan);
        store::<X, M>(
            &mut weights.qb,
            &acc,
            comptime!(plan.stride(plan.chunk)),
            comptime!(plan.pairs()),
        );
        let mut acc =
            value_product::<F, X, E, G, N>(desk, x, traces, place, Values::R, Values::V, plan);
        let apart = comptime!(plan.asks_apart());
        weigh(&mut acc, &mut weights.apart, sums, comptime!(apart::AK), true, asks, apart, plan);
        store::<X, M>(
            &mut weights.ak,
            &acc,
            comptime!(plan.stride(plan.chunk)),
            comptime!(plan.pairs()),
        );
    }
    if comptime!(variant.solves()) {
        let mut acc =
            value_product::<F, X, E, G, N>(desk, x, traces, place, Values::R, Values::U, plan);
        let apart = comptime!(plan.asks_apart());
        weigh(&mut acc, &mut weights.apart, sums, comptime!(apart::AB), true, asks, apart, plan);
        store::<X, M>(
            &mut weights.ab,
            &acc,
            comptime!(plan.stride(plan.chunk)),
            comptime!(plan.pairs()),
        );
        if comptime!(variant.delta()) {
            let grid = comptime!(plan.pairs());
            #[unroll]
            for f in 0..comptime!(grid.fragments()) {
                #[unroll]
                for h in 0..2usize {
                    let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
                    let scaled =
                        acc.index(f)[h] * Pair::new(ask_scale(&x.beta, &place.gates, i, plan));
                    set(acc.index_mut(f), h, scaled);
                }
            }
            store::<X, M>(&mut weights.scaled, &acc, comptime!(plan.stride(plan.chunk)), grid);
        }
    }
    sync_cube();
}

/// `X Y^T` over slices of values, [C, C].
#[cube]
fn value_product<F: Float, X: Float, E: Float, G: Size, N: Size>(
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    place: &Place,
    #[comptime] left: Values,
    #[comptime] right: Values,
    #[comptime] plan: Plan,
) -> Acc {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.pairs());
    let mut acc = zeros(comptime!(grid.fragments()));
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        sync_cube();
        load_values::<F, X, E, G, N>(&mut desk.left, x, traces, place, first, left, plan);
        load_values::<F, X, E, G, N>(&mut desk.right, x, traces, place, first, right, plan);
        sync_cube();
        let spec = comptime!(plan.mul(grid, columns, upright(columns), transposed(columns)));
        mul::<X, N, N>(&mut acc, &desk.left, 0usize, &desk.right, 0usize, spec);
    }
    acc
}

/// Masks gradients of scores and weighs them by a scalar decay. Those of empty exponents go to
/// `apart`, in its row `at`, where `exclude` is set.
#[cube]
#[allow(clippy::too_many_arguments)]
fn weigh(
    acc: &mut Acc,
    apart: &mut SharedMemory<f32>,
    sums: &Sums,
    #[comptime] at: usize,
    #[comptime] strict: bool,
    #[comptime] before: bool,
    #[comptime] exclude: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let mut x = acc.index(f)[h];
            #[unroll]
            for l in 0..2usize {
                x[l] = x[l] * weight(sums, i, j + l, strict, before, plan);
                if comptime!(exclude) {
                    let empty = if comptime!(before) { j + l + 1 == i } else { j + l == i };
                    if empty {
                        if inside(f, grid) {
                            apart[comptime!(at * plan.chunk) + i] = x[l];
                        }
                        x[l] = 0.0f32;
                    }
                }
            }
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Delta: dv = beta R, dbeta += v R.
#[cube]
fn value_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Gradients<F, G, M>,
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let read = G::value();
    let side = comptime!((plan.units / plan.chunk).min(SLOTS));
    let i = UNIT_POS as usize / side;
    let vectors = comptime!(plan.value_width / read);
    if i < comptime!(plan.chunk) {
        let mut dot = Vector::<f32, G>::new(0.0);
        if i < place.valid {
            let beta = x.beta[place.gates.start + i * place.gates.stride];
            let start = (place.values.start + i * place.values.stride) / read;
            for n in 0..comptime!(vectors.div_ceil(side)) {
                let c = n * side + UNIT_POS as usize % side;
                if c < vectors {
                    let r = Vector::<f32, G>::cast_from(traces.r[start + c]);
                    dot += r * Vector::<f32, G>::cast_from(x.v[start + c]);
                    out.v[start + c] = Vector::<F, G>::cast_from(r * Vector::new(beta));
                }
            }
        }
        let mut sum = 0.0f32;
        #[unroll]
        for l in 0..read {
            sum += dot[l];
        }
        desk.partial[i * SLOTS + UNIT_POS as usize % side] = sum;
    }
    sync_cube();
    let unit = UNIT_POS as usize;
    if unit < comptime!(plan.chunk) {
        desk.beta[unit] = collect(&desk.partial, unit, side);
    }
    sync_cube();
}

/// Sum of the first `slots` partial sums of row `i`.
#[cube]
fn collect(partial: &SharedMemory<f32>, i: usize, #[comptime] slots: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for n in 0..slots {
        sum += partial[i * SLOTS + n];
    }
    sum
}

#[cube]
fn clear_gates<X: Float, N: Size>(desk: &mut Desk<X, N>, #[comptime] plan: Plan) {
    let all = comptime!(plan.chunk * plan.stride(plan.key_slice));
    #[unroll]
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + comptime!(turn * plan.units);
        if n < all {
            desk.gates[n] = 0.0f32;
            desk.ends[n] = 0.0f32;
        }
    }
    sync_cube();
}

/// `X S^T` over slices of values for one slice of keys: [C, key_slice], where S^T is stored [V, K].
#[cube]
#[allow(clippy::too_many_arguments)]
fn state_product<F: Float, X: Float, E: Float, G: Size, N: Size>(
    desk: &mut Desk<X, N>,
    x: &Operands<F, G>,
    traces: &Traces<F, E, G>,
    states: &Array<Vector<E, G>>,
    place: &Place,
    key: usize,
    #[comptime] left: Values,
    #[comptime] plan: Plan,
) -> Acc {
    let columns = comptime!(plan.value_slice);
    let width = comptime!(plan.key_width);
    let grid = comptime!(plan.rows_grid());
    let mut acc = zeros(comptime!(grid.fragments()));
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        sync_cube();
        load_values::<F, X, E, G, N>(&mut desk.left, x, traces, place, first, left, plan);
        let rows = Rows {
            start: (place.index * comptime!(plan.value_width) + first) * width,
            stride: width,
            valid: comptime!(plan.value_width) - first,
        };
        let window = comptime!(plan.window(columns, plan.key_slice, width));
        load::<E, G, X, N>(&mut desk.right, states, &rows, key, window);
        sync_cube();
        let spec = comptime!(plan.mul(grid, columns, upright(columns), upright(plan.key_slice)));
        mul::<X, N, N>(&mut acc, &desk.left, 0usize, &desk.right, 0usize, spec);
    }
    acc
}

/// `acc += weights rows`, or `weights^T rows` for gradients of what was written (`of_y`). The rows
/// lie in the desk's right tile.
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

/// Loads one slice of rows of keys into the desk's right tile.
#[cube]
fn load_rows<F: Float, X: Float, G: Size, N: Size>(
    to: &mut SharedMemory<Vector<X, N>>,
    from: &Array<Vector<F, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    sync_cube();
    load::<F, G, X, N>(to, from, rows, first, comptime!(plan.key_window()));
    sync_cube();
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
                by = Pair::new(left(sums, i, plan));
            } else {
                by = Pair::new(reach(sums, i, before, plan));
            }
            let x = acc.index(f)[h] * by;
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Two numbers of a row; zeros where there is no row, or no such column.
#[cube]
fn pair_at<F: Float, M: Size>(
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    i: usize,
    d: usize,
    #[comptime] plan: Plan,
) -> Pair {
    let width = M::value();
    let mut x = Pair::new(0.0f32);
    if i < rows.valid && d < comptime!(plan.key_width) {
        let at = rows.start + i * rows.stride + d;
        if comptime!(width == 1) {
            x[0] = f32::cast_from(from[at]);
            if d + 1 < comptime!(plan.key_width) {
                x[1] = f32::cast_from(from[at + 1]);
            }
        } else {
            x = Pair::cast_from(from[at / 2]);
        }
    }
    x
}

/// Partial sums of `x_i acc_i` over this unit's columns. Vector decay: adds the products to `gates`,
/// in row i or (`before`) the one above, with a sign.
#[cube]
#[allow(clippy::too_many_arguments)]
fn gate_products<F: Float, X: Float, N: Size, M: Size>(
    desk: &mut Desk<X, N>,
    acc: &Acc,
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    first: usize,
    scale: &Array<f32>,
    gates: &Rows,
    #[comptime] role: Role,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.rows_grid());
    let across = comptime!(grid.fragment_columns());
    let stride = comptime!(plan.stride(plan.key_slice));
    sync_cube();
    #[unroll]
    for r in 0..comptime!(grid.fragment_rows()) {
        #[unroll]
        for h in 0..2usize {
            let i = row(comptime!(r * across), h, grid);
            let mut sum = 0.0f32;
            if inside(comptime!(r * across), grid) {
                let mut by = 1.0f32;
                if comptime!(role.asks) {
                    by = ask_scale(scale, gates, i, plan);
                }
                #[unroll]
                for c in 0..across {
                    let f = comptime!(r * across + c);
                    let d = column(f, grid);
                    let x = pair_at::<F, M>(from, rows, i, first + d, plan) * acc.index(f)[h];
                    sum += x[0] + x[1];
                    if comptime!(plan.variant.vector()) {
                        #[unroll]
                        for l in 0..2usize {
                            if comptime!(role.ends) {
                                if i + 1 < rows.valid {
                                    desk.ends[i * stride + d + l] += x[l];
                                }
                            } else if comptime!(role.writes) {
                                if i + 1 < rows.valid {
                                    desk.gates[i * stride + d + l] -= x[l];
                                }
                            } else if comptime!(role.before) {
                                if i > 0 {
                                    desk.gates[(i - 1) * stride + d + l] += x[l] * by;
                                }
                            } else {
                                desk.gates[i * stride + d + l] += x[l] * by;
                            }
                        }
                    }
                }
                desk.partial[i * SLOTS + slot(grid)] = sum;
            }
        }
    }
    sync_cube();
    if comptime!(plan.variant.scalar()) {
        let i = UNIT_POS as usize;
        let slots = comptime!(slots(&grid));
        if comptime!(role.ends) {
            if i + 1 < rows.valid {
                desk.ends[i] += collect(&desk.partial, i, slots);
            }
        } else if comptime!(role.writes) {
            if i + 1 < rows.valid {
                desk.gates[i] -= collect(&desk.partial, i, slots);
            }
        } else if comptime!(role.before) {
            if i + 1 < rows.valid {
                let by = ask_scale(scale, gates, i + 1, plan);
                let by = if comptime!(role.asks) { by } else { 1.0f32.runtime() };
                desk.gates[i] += collect(&desk.partial, i + 1, slots) * by;
            }
        } else if i < rows.valid {
            let by = ask_scale(scale, gates, i, plan);
            let by = if comptime!(role.asks) { by } else { 1.0f32.runtime() };
            desk.gates[i] += collect(&desk.partial, i, slots) * by;
        }
    }
}

/// Whose products [`gate_products`] adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Role {
    /// Rows that ask, times -beta.
    asks: bool,
    /// Rows that write: subtracted, and nothing of the last one.
    writes: bool,
    /// What reaches the end of the chunk.
    ends: bool,
    /// The row sees the token before it.
    before: bool,
}

const READS: Role = Role { asks: false, writes: false, ends: false, before: false };

/// Partial sums of a row.
fn slots(grid: &Grid) -> usize {
    match grid.engine {
        crate::Engine::Plain => grid.across(),
        crate::Engine::Mma => 4 * grid.across(),
    }
}

/// Which of them is this unit's.
#[cube]
fn slot(#[comptime] grid: Grid) -> usize {
    if comptime!(grid.engine == crate::Engine::Mma) {
        UNIT_POS as usize / comptime!(32 * grid.down()) * 4 + UNIT_POS as usize % 4
    } else {
        UNIT_POS as usize % comptime!(grid.across())
    }
}

/// Adds what was kept apart: row i gets `apart_i` times its own row or the last one, or what was kept
/// for the next row times that row, as [`Side`] says.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_apart<F: Float, M: Size>(
    acc: &mut Acc,
    apart: &SharedMemory<f32>,
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    first: usize,
    scale: &Array<f32>,
    gates: &Rows,
    #[comptime] at: usize,
    #[comptime] side: Side,
    #[comptime] scaled: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.rows_grid());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = first + column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = row(f, h, grid);
            let mut other = i;
            let mut reader = i;
            if comptime!(side == Side::Last) {
                other = max(i, 1usize) - 1;
            } else if comptime!(side == Side::Next) {
                other = i + 1;
                reader = i + 1;
            }
            let mut by = 0.0f32;
            if reader < rows.valid && reader < comptime!(plan.chunk) {
                by = apart[comptime!(at * plan.chunk) + reader];
                if comptime!(scaled) {
                    by *= ask_scale(scale, gates, reader, plan);
                }
            }
            let x = acc.index(f)[h] + pair_at::<F, M>(from, rows, other, d, plan) * Pair::new(by);
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Which row a row is paired with where an exponent is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Side {
    Own,
    Last,
    Next,
}

/// dq.
#[cube]
#[allow(clippy::too_many_arguments)]
fn query_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Gradients<F, G, M>,
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
    let before = comptime!(variant.reads_before());
    let side = comptime!(if before { Side::Last } else { Side::Own });
    let mut acc = state_product::<F, X, E, G, N>(
        desk,
        x,
        traces,
        &traces.states,
        place,
        first,
        Values::DO,
        plan,
    );
    scale_reach(&mut acc, sums, false, before, plan);
    load_rows::<F, X, G, N>(&mut desk.right, &x.k, &place.keys, first, plan);
    adjoint::<X, N, M>(&mut acc, &weights.qk, &desk.right, sums, false, before, plan);
    if comptime!(variant.low_rank()) {
        load_rows::<F, X, G, N>(&mut desk.right, &x.b, &place.rows, first, plan);
        adjoint::<X, N, M>(&mut acc, &weights.qb, &desk.right, sums, false, before, plan);
    }
    if comptime!(plan.reads_apart()) {
        let role = comptime!(Role { before, ..READS });
        gate_products::<F, X, N, M>(
            desk,
            &acc,
            &pairs.q,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            role,
            plan,
        );
        add_apart::<F, M>(
            &mut acc,
            &weights.apart,
            &pairs.k,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            comptime!(apart::QK),
            side,
            false,
            plan,
        );
        if comptime!(variant.low_rank()) {
            add_apart::<F, M>(
                &mut acc,
                &weights.apart,
                &pairs.b,
                &place.rows,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::QB),
                side,
                false,
                plan,
            );
        }
    }
    let grid = comptime!(plan.rows_grid());
    keep::<F, M>(&mut out.q, &acc, &place.rows, first, comptime!(plan.key_width), grid);
}

/// da, or de of a delta rule, which is left in `acc`; dbeta.
#[cube]
#[allow(clippy::too_many_arguments)]
fn ask_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    acc: &mut Acc,
    out: &mut Gradients<F, G, M>,
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
    let before = comptime!(variant.asks_before());
    let grid = comptime!(plan.rows_grid());
    let fragments = comptime!(grid.fragments());
    let mut sum = state_product::<F, X, E, G, N>(
        desk,
        x,
        traces,
        &traces.states,
        place,
        first,
        Values::R,
        plan,
    );
    scale_reach(&mut sum, sums, false, before, plan);
    if comptime!(variant.low_rank()) {
        load_rows::<F, X, G, N>(&mut desk.right, &x.b, &place.rows, first, plan);
        adjoint::<X, N, M>(&mut sum, &weights.ab, &desk.right, sums, false, before, plan);
        load_rows::<F, X, G, N>(&mut desk.right, &x.k, &place.keys, first, plan);
        adjoint::<X, N, M>(&mut sum, &weights.ak, &desk.right, sums, false, before, plan);
    } else {
        load_rows::<F, X, G, N>(&mut desk.right, &x.k, &place.keys, first, plan);
        adjoint::<X, N, M>(&mut sum, &weights.ab, &desk.right, sums, false, before, plan);
    }
    let role = comptime!(Role { asks: true, before, ..READS });
    if comptime!(variant.decay != crate::Decay::None) {
        if comptime!(variant.own_a()) {
            gate_products::<F, X, N, M>(
                desk,
                &sum,
                &pairs.a,
                &place.rows,
                first,
                &x.beta,
                &place.gates,
                role,
                plan,
            );
        } else {
            gate_products::<F, X, N, M>(
                desk,
                &sum,
                &pairs.k,
                &place.keys,
                first,
                &x.beta,
                &place.gates,
                role,
                plan,
            );
        }
    }
    if comptime!(plan.asks_apart()) {
        if comptime!(variant.low_rank()) {
            add_apart::<F, M>(
                &mut sum,
                &weights.apart,
                &pairs.b,
                &place.rows,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AB),
                Side::Last,
                false,
                plan,
            );
            add_apart::<F, M>(
                &mut sum,
                &weights.apart,
                &pairs.k,
                &place.keys,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AK),
                Side::Last,
                false,
                plan,
            );
        } else {
            add_apart::<F, M>(
                &mut sum,
                &weights.apart,
                &pairs.k,
                &place.keys,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AB),
                Side::Last,
                false,
                plan,
            );
        }
    }
    if comptime!(variant.delta()) {
        if comptime!(variant.own_a()) {
            beta_gradients::<F, X, N, M>(desk, &sum, &pairs.a, &place.rows, first, plan);
        } else {
            beta_gradients::<F, X, N, M>(desk, &sum, &pairs.k, &place.keys, first, plan);
        }
        #[unroll]
        for f in 0..fragments {
            #[unroll]
            for h in 0..2usize {
                let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
                let scaled = sum.index(f)[h] * Pair::new(ask_scale(&x.beta, &place.gates, i, plan));
                set(sum.index_mut(f), h, scaled);
            }
        }
    }
    if comptime!(variant.own_a()) {
        keep::<F, M>(&mut out.a, &sum, &place.rows, first, comptime!(plan.key_width), grid);
    } else {
        add(acc, &sum, fragments);
    }
}

/// Delta: dbeta -= e (what da is before -beta).
#[cube]
fn beta_gradients<F: Float, X: Float, N: Size, M: Size>(
    desk: &mut Desk<X, N>,
    acc: &Acc,
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.rows_grid());
    let across = comptime!(grid.fragment_columns());
    sync_cube();
    #[unroll]
    for r in 0..comptime!(grid.fragment_rows()) {
        #[unroll]
        for h in 0..2usize {
            let i = row(comptime!(r * across), h, grid);
            if inside(comptime!(r * across), grid) {
                let mut sum = 0.0f32;
                #[unroll]
                for c in 0..across {
                    let f = comptime!(r * across + c);
                    let d = first + column(f, grid);
                    let x = pair_at::<F, M>(from, rows, i, d, plan) * acc.index(f)[h];
                    sum += x[0] + x[1];
                }
                desk.partial[i * SLOTS + slot(grid)] = sum;
            }
        }
    }
    sync_cube();
    let i = UNIT_POS as usize;
    if i < comptime!(plan.chunk) {
        desk.beta[i] -= collect(&desk.partial, i, comptime!(slots(&grid)));
    }
}

/// dk, to which `asked` is added: what k got as the erase row.
#[cube]
#[allow(clippy::too_many_arguments)]
fn key_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    asked: &Acc,
    out: &mut Gradients<F, G, M>,
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
    let grid = comptime!(plan.rows_grid());
    let reads = comptime!(variant.reads_before());
    let asks = comptime!(variant.asks_before());
    let values = comptime!(plan.key_values());
    let mut acc = state_product::<F, X, E, G, N>(
        desk,
        x,
        traces,
        &traces.d_states,
        place,
        first,
        values,
        plan,
    );
    scale_reach(&mut acc, sums, true, false, plan);
    let gated = comptime!(variant.decay != crate::Decay::None);
    if gated {
        let role = comptime!(Role { ends: true, ..READS });
        gate_products::<F, X, N, M>(
            desk,
            &acc,
            &pairs.k,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            role,
            plan,
        );
    }
    load_rows::<F, X, G, N>(&mut desk.right, &x.q, &place.keys, first, plan);
    adjoint::<X, N, M>(&mut acc, &weights.qk, &desk.right, sums, true, reads, plan);
    if comptime!(variant.low_rank()) {
        load_rows::<F, X, G, N>(&mut desk.right, &x.a, &place.rows, first, plan);
        adjoint::<X, N, M>(&mut acc, &weights.ak, &desk.right, sums, true, asks, plan);
    } else if comptime!(variant.own_a()) {
        load_rows::<F, X, G, N>(&mut desk.right, &x.a, &place.rows, first, plan);
        adjoint::<X, N, M>(&mut acc, &weights.scaled, &desk.right, sums, true, asks, plan);
    } else if comptime!(variant.delta()) {
        load_rows::<F, X, G, N>(&mut desk.right, &x.k, &place.keys, first, plan);
        adjoint::<X, N, M>(&mut acc, &weights.scaled, &desk.right, sums, true, asks, plan);
    }
    if gated {
        let role = comptime!(Role { writes: true, ..READS });
        gate_products::<F, X, N, M>(
            desk,
            &acc,
            &pairs.k,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            role,
            plan,
        );
        let side = comptime!(if reads { Side::Next } else { Side::Own });
        add_apart::<F, M>(
            &mut acc,
            &weights.apart,
            &pairs.q,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            comptime!(apart::QK),
            side,
            false,
            plan,
        );
    }
    if comptime!(plan.asks_apart()) {
        if comptime!(variant.low_rank()) {
            add_apart::<F, M>(
                &mut acc,
                &weights.apart,
                &pairs.a,
                &place.rows,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AK),
                Side::Next,
                false,
                plan,
            );
        } else if comptime!(variant.own_a()) {
            add_apart::<F, M>(
                &mut acc,
                &weights.apart,
                &pairs.a,
                &place.rows,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AB),
                Side::Next,
                true,
                plan,
            );
        } else {
            add_apart::<F, M>(
                &mut acc,
                &weights.apart,
                &pairs.k,
                &place.keys,
                first,
                &x.beta,
                &place.gates,
                comptime!(apart::AB),
                Side::Next,
                true,
                plan,
            );
        }
    }
    add(&mut acc, asked, comptime!(grid.fragments()));
    keep::<F, M>(&mut out.k, &acc, &place.rows, first, comptime!(plan.key_width), grid);
}

/// Low rank: db.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_gradients<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Gradients<F, G, M>,
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
    let grid = comptime!(plan.rows_grid());
    let mut acc = state_product::<F, X, E, G, N>(
        desk,
        x,
        traces,
        &traces.d_states,
        place,
        first,
        Values::U,
        plan,
    );
    scale_reach(&mut acc, sums, true, false, plan);
    let gated = comptime!(variant.decay != crate::Decay::None);
    if gated {
        let role = comptime!(Role { ends: true, ..READS });
        gate_products::<F, X, N, M>(
            desk,
            &acc,
            &pairs.b,
            &place.rows,
            first,
            &x.beta,
            &place.gates,
            role,
            plan,
        );
    }
    load_rows::<F, X, G, N>(&mut desk.right, &x.q, &place.keys, first, plan);
    adjoint::<X, N, M>(&mut acc, &weights.qb, &desk.right, sums, true, false, plan);
    load_rows::<F, X, G, N>(&mut desk.right, &x.a, &place.rows, first, plan);
    adjoint::<X, N, M>(&mut acc, &weights.ab, &desk.right, sums, true, true, plan);
    if gated {
        let role = comptime!(Role { writes: true, ..READS });
        gate_products::<F, X, N, M>(
            desk,
            &acc,
            &pairs.b,
            &place.rows,
            first,
            &x.beta,
            &place.gates,
            role,
            plan,
        );
        add_apart::<F, M>(
            &mut acc,
            &weights.apart,
            &pairs.q,
            &place.keys,
            first,
            &x.beta,
            &place.gates,
            comptime!(apart::QB),
            Side::Own,
            false,
            plan,
        );
        add_apart::<F, M>(
            &mut acc,
            &weights.apart,
            &pairs.a,
            &place.rows,
            first,
            &x.beta,
            &place.gates,
            comptime!(apart::AB),
            Side::Next,
            false,
            plan,
        );
    }
    keep::<F, M>(&mut out.b, &acc, &place.rows, first, comptime!(plan.key_width), grid);
}

/// dg of a scalar decay: sums of dG from each token on, and what reaches the end of the chunk.
#[cube]
fn keep_scalar_gates<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Gradients<F, G, M>,
    desk: &mut Desk<X, N>,
    traces: &Traces<F, E, G>,
    sums: &Sums,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let unit = UNIT_POS as usize;
    let read = G::value();
    let all = comptime!(plan.key_width * plan.value_width / read);
    let start = place.index * all;
    let mut kept = Vector::<f32, G>::new(0.0);
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = unit + turn * comptime!(plan.units);
        if n < all {
            kept += Vector::<f32, G>::cast_from(traces.states[start + n])
                * Vector::<f32, G>::cast_from(traces.d_states[start + n]);
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for l in 0..read {
        sum += kept[l];
    }
    desk.partial[unit] = sum;
    sync_cube();
    if unit < place.valid {
        let mut through = 0.0f32;
        for n in 0..comptime!(plan.units) {
            through += desk.partial[n];
        }
        let mut d = through * f32::exp(since_start(sums, comptime!(plan.chunk - 1)));
        for i in unit..place.valid {
            d += desk.gates[i];
        }
        for i in 0..place.valid {
            d += desk.ends[i];
        }
        out.g[place.gates.start + unit * place.gates.stride] = d;
    }
}

/// As [`keep_scalar_gates`], for one slice of a vector decay.
#[cube]
fn keep_vector_gates<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Gradients<F, G, M>,
    desk: &mut Desk<X, N>,
    traces: &Traces<F, E, G>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    sync_cube();
    let d = UNIT_POS as usize;
    let read = G::value();
    let stride = comptime!(plan.stride(plan.key_slice));
    if d < comptime!(plan.key_slice / read) && first + d * read < comptime!(plan.key_width) {
        let width = comptime!(plan.key_width);
        let start = (place.index * comptime!(plan.key_width * plan.value_width) + first) / read + d;
        let mut through = Vector::<f32, G>::new(0.0);
        for v in 0..comptime!(plan.value_width) {
            let at = start + v * width / read;
            through += Vector::<f32, G>::cast_from(traces.states[at])
                * Vector::<f32, G>::cast_from(traces.d_states[at]);
        }
        #[unroll]
        for l in 0..read {
            let column = d * read + l;
            let end = comptime!((plan.chunk - 1) * stride) + column;
            let mut sum = through[l] * f32::exp(since_start(sums, end));
            for i in 0..place.valid {
                sum += desk.ends[i * stride + column];
            }
            for back in 0..place.valid {
                let i = place.valid - 1 - back;
                sum += desk.gates[i * stride + column];
                out.g[place.rows.start + i * place.rows.stride + first + column] = sum;
            }
        }
    }
    sync_cube();
}
