//! The kernels of the norm.

use super::{Form, PLANE, SUMS};
use crate::fused::gated_product::activation_slope;
use crate::rowwise::{UNITS, activate};
use cubecl::ir::StorageType;
use cubecl::prelude::*;

/// The kernel of [`super::forward`].
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)] // a launch takes what the kernel reads, one by one
pub(super) fn normalize<X: Float, H: Float, Y: Float, P: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    residual: &Array<Vector<H, N>>,
    gate: &Array<Vector<Y, N>>,
    weight: &Array<Vector<P, N>>,
    bias: &Array<Vector<P, N>>,
    y: &mut Array<Vector<Y, N>>,
    h: &mut Array<Vector<H, N>>,
    rows: u32,
    epsilon: f32,
    factor: f32,
    #[comptime] form: Form,
    #[define(X, H, Y, P)] _types: [StorageType; 4],
    #[define(N)] _width: usize,
) {
    let rows = rows as usize;
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team);
    let row = CUBE_POS * comptime!(form.teams()) + unit / comptime!(form.team);
    let stored = row < rows;
    // Units past the last row repeat it: none may miss a barrier.
    let start = min(row, rows - 1) * comptime!(form.vectors()) + own;

    // All inputs are asked for before the first is used.
    let mut values = load::<X, N>(x, start, own, true, form);
    let added = load::<H, N>(residual, start, own, comptime!(form.residual), form);
    let gates = load::<Y, N>(gate, start, own, comptime!(form.gate.is_some()), form);
    let weights = load::<P, N>(weight, own, own, comptime!(form.weighted), form);
    let biases = load::<P, N>(bias, own, own, comptime!(form.biased), form);
    if comptime!(form.residual) {
        #[unroll]
        for turn in 0..comptime!(form.turns()) {
            // Rounded as it is stored: the backward pass starts from the same numbers.
            let sum = Vector::<H, N>::cast_from(values[turn] + added[turn]);
            values[turn] = Vector::<f32, N>::cast_from(sum);
        }
        if stored {
            store::<H, N>(h, &values, start, own, form);
        }
    }

    let mut scratch = SharedMemory::<f32>::new(comptime!(form.scratch()));
    center::<N>(&mut values, own, &mut scratch, form);
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = inner::<N>(&values, &values, form);
    team_sums(&mut sums, &mut scratch, 1usize, form);
    let size = f32::sqrt(sums[0] * comptime!(form.share()) + epsilon);
    let scale = Vector::<f32, N>::new(factor / size);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let z = affine::<N>(values[turn] * scale, weights[turn], biases[turn], form);
        values[turn] = gated::<N>(z, gates[turn], form);
    }
    if stored {
        store::<Y, N>(y, &values, start, own, form);
    }
}

/// The kernel of [`super::backward`]. `run` is the rows of a team; X is the narrow type of the gradient,
/// H the type of h.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)] // a launch takes what the kernel reads, one by one
pub(super) fn differentiate<X: Float, H: Float, Y: Float, P: Float, N: Size>(
    h: &Array<Vector<H, N>>,
    gate: &Array<Vector<Y, N>>,
    weight: &Array<Vector<P, N>>,
    bias: &Array<Vector<P, N>>,
    d_y: &Array<Vector<Y, N>>,
    d_h: &Array<Vector<H, N>>,
    d_x: &mut Array<Vector<H, N>>,
    narrow: &mut Array<Vector<X, N>>,
    d_gate: &mut Array<Vector<Y, N>>,
    partial: &mut Array<Vector<f32, N>>,
    rows: u32,
    run: u32,
    epsilon: f32,
    factor: f32,
    #[comptime] form: Form,
    #[define(X, H, Y, P)] _types: [StorageType; 4],
    #[define(N)] _width: usize,
) {
    let rows = rows as usize;
    let run = run as usize;
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team);
    let first = CUBE_POS * run * comptime!(form.teams());
    let weights = load::<P, N>(weight, own, own, comptime!(form.weighted), form);
    let biases = load::<P, N>(bias, own, own, comptime!(form.biased), form);
    let mut weight_sums = zeros::<N>(form);
    let mut bias_sums = zeros::<N>(form);
    let mut scratch = SharedMemory::<f32>::new(comptime!(form.scratch()));

    for n in 0..run {
        let row = first + n * comptime!(form.teams()) + unit / comptime!(form.team);
        let stored = row < rows;
        let start = min(row, rows - 1) * comptime!(form.vectors()) + own;
        let mut values = load::<H, N>(h, start, own, true, form);
        let mut d_z = load::<Y, N>(d_y, start, own, true, form);
        let gates = load::<Y, N>(gate, start, own, comptime!(form.gate.is_some()), form);
        let mut d = load::<H, N>(d_h, start, own, comptime!(form.given), form);
        let mut d_gates = zeros::<N>(form);
        center::<N>(&mut values, own, &mut scratch, form);

        if comptime!(form.gate.is_some()) {
            gate_gradients::<N>(&mut d_z, &mut d_gates, &gates, form);
        }
        let d_n = normal_gradients::<N>(&d_z, &weights, factor, form);
        let sums = row_sums::<N>(&values, &d_n, &mut scratch, form);
        let share = comptime!(form.share());
        let scale = 1.0f32 / f32::sqrt(sums[0] * share + epsilon);
        let along = Vector::<f32, N>::new(sums[1] * scale * scale * share);
        let scales = Vector::<f32, N>::new(scale);
        #[unroll]
        for turn in 0..comptime!(form.turns()) {
            let normal = values[turn] * Vector::<f32, N>::new(scale * factor);
            let mut change = d_n[turn] - values[turn] * along;
            if comptime!(form.centered()) {
                change -= Vector::<f32, N>::new(sums[2] * share);
            }
            d[turn] = d[turn] + change * scales;
            if comptime!(form.gate.is_some()) {
                let z = affine::<N>(normal, weights[turn], biases[turn], form);
                d_gates[turn] = d_gates[turn] * z;
            }
            if stored {
                if comptime!(form.weighted) {
                    weight_sums[turn] = weight_sums[turn] + d_z[turn] * normal;
                }
                if comptime!(form.biased) {
                    bias_sums[turn] = bias_sums[turn] + d_z[turn];
                }
            }
        }
        if stored {
            store::<H, N>(d_x, &d, start, own, form);
            if comptime!(form.narrow) {
                store::<X, N>(narrow, &d, start, own, form);
            }
            if comptime!(form.gate.is_some()) {
                store::<Y, N>(d_gate, &d_gates, start, own, form);
            }
        }
    }
    let to = CUBE_POS * comptime!(form.partials());
    let there = first < rows;
    if comptime!(form.weighted) {
        store_sums::<N>(partial, &weight_sums, to, there, form);
    }
    if comptime!(form.biased) {
        let before = comptime!(form.partials() - form.vectors());
        store_sums::<N>(partial, &bias_sums, to + before, there, form);
    }
}

/// `d_z`, which is d_y, becomes the gradient of z, and `d_gates` that of the gate over z.
#[cube]
fn gate_gradients<N: Size>(
    d_z: &mut Array<Vector<f32, N>>,
    d_gates: &mut Array<Vector<f32, N>>,
    gates: &Array<Vector<f32, N>>,
    #[comptime] form: Form,
) {
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        d_gates[turn] = d_z[turn] * slopes::<N>(gates[turn], form);
        d_z[turn] = gated::<N>(d_z[turn], gates[turn], form);
    }
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
    team_sums(&mut sums, scratch, count, form);
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
            let further = comptime!(turn * form.team);
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
        let further = comptime!(turn * form.team);
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
        own + comptime!(turn * form.team) < comptime!(form.vectors())
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
        team_sums(&mut sums, scratch, 1usize, form);
        let mean = Vector::<f32, N>::new(sums[0] * comptime!(form.share()));
        #[unroll]
        for turn in 0..comptime!(form.turns()) {
            if inside(own, turn, form) {
                values[turn] -= mean;
            }
        }
    }
}

/// `normal weight + bias`.
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

/// The first `count` numbers of every unit become their sums over its team. Every unit of the cube has to
/// come here.
#[cube]
fn team_sums(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    if comptime!(form.planes) {
        #[unroll]
        for level in 0..comptime!(form.team.min(PLANE).ilog2()) {
            #[unroll]
            for n in 0..count {
                let mask = comptime!(1u32 << level);
                let other = plane_shuffle_xor(values[n], mask);
                values[n] += other;
            }
        }
        if comptime!(form.team > PLANE) {
            sums_of_planes(values, scratch, count, form);
        }
    } else if comptime!(form.team > 1) {
        sums_of_units(values, scratch, count, form);
    }
}

/// As [`team_sums`], where every unit of a plane has the plane's sum.
#[cube]
fn sums_of_planes(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let planes = comptime!(UNITS / PLANE);
    let unit = UNIT_POS as usize;
    #[unroll]
    for n in 0..count {
        if unit.is_multiple_of(PLANE) {
            scratch[comptime!(n * planes) + unit / PLANE] = values[n];
        }
    }
    sync_cube();
    let first = unit / comptime!(form.team) * comptime!(form.team / PLANE);
    #[unroll]
    for n in 0..count {
        let mut sum = 0.0f32;
        #[unroll]
        for plane in 0..comptime!(form.team / PLANE) {
            sum += scratch[first + comptime!(n * planes + plane)];
        }
        values[n] = sum;
    }
    // The next sums go to the same places.
    sync_cube();
}

/// As [`team_sums`], in shared memory alone, halving.
#[cube]
fn sums_of_units(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team);
    #[unroll]
    for n in 0..count {
        scratch[unit + comptime!(n * UNITS)] = values[n];
    }
    sync_cube();
    #[unroll]
    for level in 0..comptime!(form.team.ilog2()) {
        let half = comptime!(form.team >> (level + 1));
        if own < half {
            #[unroll]
            for n in 0..count {
                let other = scratch[unit + comptime!(n * UNITS + half)];
                scratch[unit + comptime!(n * UNITS)] += other;
            }
        }
        sync_cube();
    }
    #[unroll]
    for n in 0..count {
        values[n] = scratch[unit - own + comptime!(n * UNITS)];
    }
    sync_cube();
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
    let team = comptime!(form.team);
    let teams = comptime!(form.teams());
    let unit = UNIT_POS as usize;
    let mut joined = SharedMemory::<Vector<f32, N>>::new(UNITS);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        let column = unit % team + comptime!(turn * form.team);
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
