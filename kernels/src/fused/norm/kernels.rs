//! The kernels of the norm.

use super::form::{Form, SUMS};
use crate::fused::team::over_team;
use crate::pointwise::{UNITS, activate, activation_slope};
use cubecl::ir::StorageType;
use cubecl::prelude::*;

/// Inputs of [`normalize`], each `[N, W]`; `form` says which are there.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands<X: Float, S: Float, Y: Float, N: Size> {
    pub x: Array<Vector<X, N>>,
    pub residual: Array<Vector<S, N>>,
    pub gate: Array<Vector<Y, N>>,
}

/// Weight and bias, `[W]`; `form` says which are there.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Affine<P: Float, N: Size> {
    pub weight: Array<Vector<P, N>>,
    pub bias: Array<Vector<P, N>>,
}

/// Outputs of [`normalize`], each `[N, W]`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Outputs<S: Float, Y: Float, N: Size> {
    pub y: Array<Vector<Y, N>>,
    /// x + residual, where there is a residual.
    pub h: Array<Vector<S, N>>,
}

/// Inputs of [`differentiate`], `[N, W]` but for weight and bias; `form` says which are there.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Saved<S: Float, Y: Float, P: Float, N: Size> {
    pub h: Array<Vector<S, N>>,
    pub gate: Array<Vector<Y, N>>,
    pub affine: Affine<P, N>,
    pub d_y: Array<Vector<Y, N>>,
    /// Gradient of h from elsewhere.
    pub d_h: Array<Vector<S, N>>,
}

/// Outputs of [`differentiate`].
#[derive(CubeType, CubeLaunch)]
pub(super) struct Gradients<X: Float, S: Float, Y: Float, N: Size> {
    /// Of h, `[N, W]`.
    pub h: Array<Vector<S, N>>,
    /// The same numbers in the type of x.
    pub narrow: Array<Vector<X, N>>,
    /// `[N, W]`.
    pub gate: Array<Vector<Y, N>>,
    /// Sums of a cube for weight and bias, `[cubes, partials]`.
    pub partial: Array<Vector<f32, N>>,
}

/// Numbers that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Numbers {
    /// N.
    pub rows: u32,
    pub epsilon: f32,
    pub factor: f32,
}

/// A unit's place in a row.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The unit's first vector in `[N, W]`; its others are a team apart.
    start: usize,
    /// The unit's number in its team, which is its first vector in the row too.
    own: usize,
    /// Whether there is such a row: units past the last one repeat that, since none may miss a barrier.
    stored: bool,
}

#[cube]
fn place(row: usize, rows: usize, own: usize, #[comptime] form: Form) -> Place {
    let stored = row < rows;
    let start = min(row, rows - 1) * comptime!(form.vectors()) + own;
    Place { start, own, stored }
}

/// The kernel of [`super::forward`].
#[cube(launch_unchecked)]
pub(super) fn normalize<X: Float, S: Float, Y: Float, P: Float, N: Size>(
    x: &Operands<X, S, Y, N>,
    weights: &Affine<P, N>,
    out: &mut Outputs<S, Y, N>,
    numbers: Numbers,
    #[comptime] form: Form,
    #[define(X, S, Y, P)] _types: [StorageType; 4],
    #[define(N)] _width: usize,
) {
    let rows = numbers.rows as usize;
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team.units);
    let row = CUBE_POS * comptime!(form.teams()) + unit / comptime!(form.team.units);
    let at = place(row, rows, own, form);

    // All inputs are asked for before the first is used.
    let mut values = load::<X, N>(&x.x, at.start, own, true, form);
    let added = load::<S, N>(&x.residual, at.start, own, comptime!(form.residual), form);
    let gates = load::<Y, N>(&x.gate, at.start, own, comptime!(form.gate.is_some()), form);
    let parameters = parameters::<P, N>(weights, own, form);
    if comptime!(form.residual) {
        add_residual::<S, N>(&mut values, &added, &mut out.h, at, form);
    }

    // c, r and y.
    let mut scratch = SharedMemory::<f32>::new(comptime!(form.scratch()));
    center::<N>(&mut values, own, &mut scratch, form);
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = inner::<N>(&values, &values, form);
    over_team(&mut sums, &mut scratch, 1usize, false, comptime!(form.team));
    let size = f32::sqrt(sums[0] * comptime!(form.share()) + numbers.epsilon);
    let scale = Vector::<f32, N>::new(numbers.factor / size);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let normal = values[turn] * scale;
        let z = affine::<N>(normal, parameters.weight[turn], parameters.bias[turn], form);
        values[turn] = gated::<N>(z, gates[turn], form);
    }
    if at.stored {
        store::<Y, N>(&mut out.y, &values, at.start, own, form);
    }
}

/// `h = x + residual`, in `values` and in memory: rounded as it is stored, so that the backward pass starts
/// from the same numbers.
#[cube]
fn add_residual<S: Float, N: Size>(
    values: &mut Array<Vector<f32, N>>,
    residual: &Array<Vector<f32, N>>,
    h: &mut Array<Vector<S, N>>,
    at: Place,
    #[comptime] form: Form,
) {
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let sum = Vector::<S, N>::cast_from(values[turn] + residual[turn]);
        values[turn] = Vector::<f32, N>::cast_from(sum);
    }
    if at.stored {
        store::<S, N>(h, values, at.start, at.own, form);
    }
}

/// A unit's vectors of weight and bias, in f32.
#[derive(CubeType)]
struct Parameters<N: Size> {
    weight: Array<Vector<f32, N>>,
    bias: Array<Vector<f32, N>>,
}

#[cube]
fn parameters<P: Float, N: Size>(
    affine: &Affine<P, N>,
    own: usize,
    #[comptime] form: Form,
) -> Parameters<N> {
    Parameters::<N> {
        weight: load::<P, N>(&affine.weight, own, own, comptime!(form.weighted), form),
        bias: load::<P, N>(&affine.bias, own, own, comptime!(form.biased), form),
    }
}

/// A unit's vectors of one row on the way back, in f32.
#[derive(CubeType)]
struct RowGradients<N: Size> {
    /// c.
    c: Array<Vector<f32, N>>,
    /// d_y, then dz.
    d_z: Array<Vector<f32, N>>,
    gates: Array<Vector<f32, N>>,
    /// The gradient of h from elsewhere, then all of it.
    d_h: Array<Vector<f32, N>>,
    d_gates: Array<Vector<f32, N>>,
}

/// The kernel of [`super::backward`]. `run` is the rows of a team; X is the narrow type of the gradient,
/// S the type of h, which a residual stream may have of its own.
#[cube(launch_unchecked)]
pub(super) fn differentiate<X: Float, S: Float, Y: Float, P: Float, N: Size>(
    x: &Saved<S, Y, P, N>,
    out: &mut Gradients<X, S, Y, N>,
    numbers: Numbers,
    run: u32,
    #[comptime] form: Form,
    #[define(X, S, Y, P)] _types: [StorageType; 4],
    #[define(N)] _width: usize,
) {
    let rows = numbers.rows as usize;
    let run = run as usize;
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team.units);
    let first = CUBE_POS * run * comptime!(form.teams());
    let parameters = parameters::<P, N>(&x.affine, own, form);
    let mut sums = Parameters::<N> { weight: zeros::<N>(form), bias: zeros::<N>(form) };
    let mut scratch = SharedMemory::<f32>::new(comptime!(form.scratch()));

    for n in 0..run {
        let row = first + n * comptime!(form.teams()) + unit / comptime!(form.team.units);
        let at = place(row, rows, own, form);
        let mut row = load_row::<S, Y, P, N>(x, at, form);
        center::<N>(&mut row.c, own, &mut scratch, form);
        if comptime!(form.gate.is_some()) {
            gate_gradients::<N>(&mut row, form);
        }
        let norm = through_norm::<N>(&row, &parameters, &mut scratch, numbers, form);
        row_gradients::<N>(&mut row, &mut sums, &parameters, &norm, at, form);
        if at.stored {
            store_row::<X, S, Y, N>(out, &row, at, form);
        }
    }
    let to = CUBE_POS * comptime!(form.partials());
    let there = first < rows;
    if comptime!(form.weighted) {
        store_sums::<N>(&mut out.partial, &sums.weight, to, there, form);
    }
    if comptime!(form.biased) {
        let before = comptime!(form.partials() - form.vectors());
        store_sums::<N>(&mut out.partial, &sums.bias, to + before, there, form);
    }
}

#[cube]
fn load_row<S: Float, Y: Float, P: Float, N: Size>(
    x: &Saved<S, Y, P, N>,
    at: Place,
    #[comptime] form: Form,
) -> RowGradients<N> {
    RowGradients::<N> {
        c: load::<S, N>(&x.h, at.start, at.own, true, form),
        d_z: load::<Y, N>(&x.d_y, at.start, at.own, true, form),
        gates: load::<Y, N>(&x.gate, at.start, at.own, comptime!(form.gate.is_some()), form),
        d_h: load::<S, N>(&x.d_h, at.start, at.own, comptime!(form.given), form),
        d_gates: zeros::<N>(form),
    }
}

#[cube]
fn store_row<X: Float, S: Float, Y: Float, N: Size>(
    out: &mut Gradients<X, S, Y, N>,
    row: &RowGradients<N>,
    at: Place,
    #[comptime] form: Form,
) {
    store::<S, N>(&mut out.h, &row.d_h, at.start, at.own, form);
    if comptime!(form.narrow) {
        store::<X, N>(&mut out.narrow, &row.d_h, at.start, at.own, form);
    }
    if comptime!(form.gate.is_some()) {
        store::<Y, N>(&mut out.gate, &row.d_gates, at.start, at.own, form);
    }
}

/// `d_z`, which is d_y, becomes the gradient of z, and `d_gates` that of the gate over z.
#[cube]
fn gate_gradients<N: Size>(row: &mut RowGradients<N>, #[comptime] form: Form) {
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        row.d_gates[turn] = row.d_z[turn] * slopes::<N>(row.gates[turn], form);
        row.d_z[turn] = gated::<N>(row.d_z[turn], row.gates[turn], form);
    }
}

/// Gradient of the normalised row, and what turns it into that of h.
#[derive(CubeType)]
struct NormGradient<N: Size> {
    /// dn.
    d_n: Array<Vector<f32, N>>,
    /// Sums over the row of c^2, c dn and, for LayerNorm, dn.
    sums: Array<f32>,
    /// r.
    scale: f32,
    factor: f32,
    /// r^2 mean(dn c), in every number.
    along: Vector<f32, N>,
}

#[cube]
fn through_norm<N: Size>(
    row: &RowGradients<N>,
    parameters: &Parameters<N>,
    scratch: &mut SharedMemory<f32>,
    numbers: Numbers,
    #[comptime] form: Form,
) -> NormGradient<N> {
    let d_n = normal_gradients::<N>(&row.d_z, &parameters.weight, numbers.factor, form);
    let sums = row_sums::<N>(&row.c, &d_n, scratch, form);
    let share = comptime!(form.share());
    let scale = 1.0f32 / f32::sqrt(sums[0] * share + numbers.epsilon);
    let along = Vector::<f32, N>::new(sums[1] * scale * scale * share);
    NormGradient::<N> { d_n, sums, scale, factor: numbers.factor, along }
}

/// `dn = dz weight factor`.
#[cube]
fn normal_gradients<N: Size>(
    d_z: &Array<Vector<f32, N>>,
    weights: &Array<Vector<f32, N>>,
    factor: f32,
    #[comptime] form: Form,
) -> Array<Vector<f32, N>> {
    let mut d_n = zeros::<N>(form);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        d_n[turn] = d_z[turn] * Vector::<f32, N>::new(factor);
        if comptime!(form.weighted) {
            d_n[turn] = d_n[turn] * weights[turn];
        }
    }
    d_n
}

/// The gradients of h, of the gate and, added to `sums`, of weight and bias.
#[cube]
fn row_gradients<N: Size>(
    row: &mut RowGradients<N>,
    sums: &mut Parameters<N>,
    parameters: &Parameters<N>,
    norm: &NormGradient<N>,
    at: Place,
    #[comptime] form: Form,
) {
    let scales = Vector::<f32, N>::new(norm.scale);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let normal = row.c[turn] * Vector::<f32, N>::new(norm.scale * norm.factor);
        let mut change = norm.d_n[turn] - row.c[turn] * norm.along;
        if comptime!(form.centered()) {
            change -= Vector::<f32, N>::new(norm.sums[2] * comptime!(form.share()));
        }
        row.d_h[turn] = row.d_h[turn] + change * scales;
        if comptime!(form.gate.is_some()) {
            let z = affine::<N>(normal, parameters.weight[turn], parameters.bias[turn], form);
            row.d_gates[turn] = row.d_gates[turn] * z;
        }
        if at.stored {
            if comptime!(form.weighted) {
                sums.weight[turn] = sums.weight[turn] + row.d_z[turn] * normal;
            }
            if comptime!(form.biased) {
                sums.bias[turn] = sums.bias[turn] + row.d_z[turn];
            }
        }
    }
}

/// Sums over a row: `c^2`, `c dn`, and for LayerNorm `dn`.
#[cube]
fn row_sums<N: Size>(
    values: &Array<Vector<f32, N>>,
    d_n: &Array<Vector<f32, N>>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] form: Form,
) -> Array<f32> {
    let count = comptime!(if form.centered() { 3usize } else { 2usize });
    let mut sums = Array::<f32>::new(SUMS);
    sums[0] = inner::<N>(values, values, form);
    sums[1] = inner::<N>(values, d_n, form);
    sums[2] = total::<N>(d_n, form);
    over_team(&mut sums, scratch, count, false, comptime!(form.team));
    sums
}

/// A unit's vectors of a row in f32, from `start` on: its own, and each that is a team further. Zeros
/// past the row's end, and all where nothing is `there`.
#[cube]
fn load<F: Float, N: Size>(
    from: &Array<Vector<F, N>>,
    start: usize,
    own: usize,
    #[comptime] there: bool,
    #[comptime] form: Form,
) -> Array<Vector<f32, N>> {
    let mut values = zeros::<N>(form);
    if comptime!(there) {
        #[unroll]
        for turn in 0..comptime!(form.turns()) {
            let further = comptime!(turn * form.team.units);
            if inside(own, turn, form) {
                values[turn] = Vector::<f32, N>::cast_from(from[start + further]);
            }
        }
    }
    values
}

/// Adjoint of [`load`].
#[cube]
fn store<F: Float, N: Size>(
    to: &mut Array<Vector<F, N>>,
    values: &Array<Vector<f32, N>>,
    start: usize,
    own: usize,
    #[comptime] form: Form,
) {
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let further = comptime!(turn * form.team.units);
        if inside(own, turn, form) {
            to[start + further] = Vector::<F, N>::cast_from(values[turn]);
        }
    }
}

/// Whether a unit has a vector in this turn.
#[cube]
fn inside(own: usize, #[comptime] turn: usize, #[comptime] form: Form) -> bool {
    if comptime!(form.fills(turn)) {
        true.runtime()
    } else {
        own + comptime!(turn * form.team.units) < comptime!(form.vectors())
    }
}

/// A row of zeros.
#[cube]
fn zeros<N: Size>(#[comptime] form: Form) -> Array<Vector<f32, N>> {
    let mut values = Array::<Vector<f32, N>>::new(comptime!(form.turns()));
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        values[turn] = Vector::<f32, N>::new(0.0f32);
    }
    values
}

/// LayerNorm: subtracts the mean of a row. Else nothing.
#[cube]
fn center<N: Size>(
    values: &mut Array<Vector<f32, N>>,
    own: usize,
    scratch: &mut SharedMemory<f32>,
    #[comptime] form: Form,
) {
    if comptime!(form.centered()) {
        let mut sums = Array::<f32>::new(1usize);
        sums[0] = total::<N>(values, form);
        over_team(&mut sums, scratch, 1usize, false, comptime!(form.team));
        let mean = Vector::<f32, N>::new(sums[0] * comptime!(form.share()));
        #[unroll]
        for turn in 0..comptime!(form.turns()) {
            if inside(own, turn, form) {
                values[turn] -= mean;
            }
        }
    }
}

/// `z = normal weight + bias`.
#[cube]
fn affine<N: Size>(
    normal: Vector<f32, N>,
    weight: Vector<f32, N>,
    bias: Vector<f32, N>,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let mut z = normal;
    if comptime!(form.weighted) {
        z *= weight;
    }
    if comptime!(form.biased) {
        z += bias;
    }
    z
}

/// `z f(gate)`.
#[cube]
fn gated<N: Size>(
    z: Vector<f32, N>,
    gate: Vector<f32, N>,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let mut y = z;
    if comptime!(form.gate.is_some()) {
        #[unroll]
        for l in 0..comptime!(form.vector) {
            y[l] = z[l] * activate(gate[l], comptime!(form.activation()));
        }
    }
    y
}

/// `f'(gate)`.
#[cube]
fn slopes<N: Size>(gate: Vector<f32, N>, #[comptime] form: Form) -> Vector<f32, N> {
    let mut slope = Vector::<f32, N>::empty();
    #[unroll]
    for l in 0..comptime!(form.vector) {
        slope[l] = activation_slope(gate[l], comptime!(form.activation()));
    }
    slope
}

/// A unit's share of the inner product of two rows.
#[cube]
fn inner<N: Size>(
    a: &Array<Vector<f32, N>>,
    b: &Array<Vector<f32, N>>,
    #[comptime] form: Form,
) -> f32 {
    let mut sums = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        sums += a[turn] * b[turn];
    }
    across::<N>(sums, form)
}

/// A unit's share of the sum of a row.
#[cube]
fn total<N: Size>(values: &Array<Vector<f32, N>>, #[comptime] form: Form) -> f32 {
    let mut sums = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        sums += values[turn];
    }
    across::<N>(sums, form)
}

/// The sum of a vector's numbers.
#[cube]
fn across<N: Size>(values: Vector<f32, N>, #[comptime] form: Form) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for l in 0..comptime!(form.vector) {
        sum += values[l];
    }
    sum
}

/// Writes a row of sums over the teams of a cube, from `to` on, if it is to be `there`.
#[cube]
fn store_sums<N: Size>(
    partial: &mut Array<Vector<f32, N>>,
    sums: &Array<Vector<f32, N>>,
    to: usize,
    there: bool,
    #[comptime] form: Form,
) {
    let team = comptime!(form.team.units);
    let teams = comptime!(form.teams());
    let unit = UNIT_POS as usize;
    let mut joined = SharedMemory::<Vector<f32, N>>::new(UNITS);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let column = unit % team + comptime!(turn * form.team.units);
        let mut sum = sums[turn];
        if comptime!(teams > 1) {
            joined[unit] = sum;
            sync_cube();
            #[unroll]
            for level in 0..comptime!(teams.ilog2()) {
                let half = comptime!((teams >> (level + 1)) * team);
                if unit < half {
                    let other = joined[unit + half];
                    joined[unit] += other;
                }
                sync_cube();
            }
            sum = joined[unit];
            sync_cube();
        }
        if there && unit < team && column < comptime!(form.vectors()) {
            partial[to + column] = sum;
        }
    }
}
