//! The backward kernels.

use super::forward::clipped;
use super::parts::{Form, Part};
use super::runs::{
    Operands, Place, RowsAndGates, Sizes, Taps, activated, add_across, convolved, in_conv_state,
    in_part, in_x, load, look_back, move_on, number, place, put, rate_and_bias, store, taps,
};
use crate::pointwise::{Activation, UNITS, activate, softplus};
use cubecl::prelude::*;

/// Columns of sums that a cube has.
pub(super) const COLUMNS: usize = 8;
/// Units that split the rows of one column (split-K) and add their partial sums.
const SPLIT_K: usize = UNITS / COLUMNS;
/// Numbers that a unit requests at once.
const AHEAD: usize = 4;

/// Outputs of the kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct XGradients<F: Float, N: Size> {
    pub x: Array<Vector<F, N>>,
    /// The same memory, number by number, as in [`Operands`].
    pub numbers: Sequence<Array<F>>,
    pub conv_state: Sequence<Array<Vector<F, N>>>,
    /// Sums of weight gradients over each chunk, `[chunks, sums]`.
    pub partials: Sequence<Array<f32>>,
}

/// The kernel.
#[cube(launch_unchecked)]
pub(super) fn column_gradients<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    d_y: &RowsAndGates<F, N>,
    d_x: &mut XGradients<F, N>,
    sizes: &Sizes,
    #[comptime] form: Form,
    #[define(F, G)] _types: [StorageType; 2],
    #[define(N)] _vector: usize,
) {
    if CUBE_POS < sizes.cubes as usize {
        let mut shared = SharedMemory::<f32>::new(comptime!(form.shared));
        let slot = CUBE_POS % comptime!(form.slots);
        #[unroll]
        for p in 0..comptime!(form.parts.len()) {
            let part = comptime!(form.parts[p]);
            if slot >= comptime!(part.slot) && slot < comptime!(part.slot + part.slots) {
                let at = place::<F, G, N>(x, sizes, part);
                if comptime!(part.is_gate()) {
                    gates_backward::<F, G, N>(x, &d_y.gates, d_x, &mut shared, &at, part);
                } else {
                    rows_backward::<F, G, N>(x, &d_y.rows, d_x, &mut shared, &at, part);
                }
            }
        }
    }
}

/// A run of tokens, and the W - 1 after it for the gradients of z that they have. The gradient of a token
/// is complete W - 1 tokens later.
#[cube]
fn rows_backward<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    d_y: &Sequence<Array<Vector<F, N>>>,
    d_x: &mut XGradients<F, N>,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (own, tile, before) = comptime!((part.own(), part.tile(true), part.before()));
    let taps = taps::<F, G, N>(x, at, part);
    let mut seen = zeros(comptime!((before + tile) * own));
    let mut d_z = zeros(comptime!((before + tile) * own));
    let mut sums = zeros(comptime!(max_of(part.sum_count() * own, 1)));
    if comptime!(part.reads_x()) {
        look_back::<F, G, N>(&mut seen, x, at, part);
    }
    // Past the end of the run, and of the tokens that its own ones touch.
    let past = select(at.start < at.end, min(at.end + before, at.tokens), 0usize);
    for turn in 0..(at.length + comptime!(before + tile - 1)) / tile {
        let first = at.start + turn * tile;
        #[unroll]
        for j in 0..tile {
            let token = first + j;
            let there = token < past;
            if comptime!(part.reads_x()) {
                let row = load::<F, N>(&x.x, in_x(at, token, part), there, at, part);
                put(&mut seen, comptime!(before + j), &row, own);
            }
            if comptime!(part.tensor.is_some()) {
                let d = d_y.index(comptime!(part.tensor.unwrap_or(0)));
                let row = load::<F, N>(d, in_part(at, token, part), there, at, part);
                put(&mut d_z, comptime!(before + j), &row, own);
            }
        }
        if comptime!(part.tensor.is_some() && part.reads_x()) {
            through_activation(&mut d_z, &seen, &taps, shared, at, part);
            if comptime!(part.norm().is_some_and(|norm| norm.epsilon() == 0.0)) {
                #[unroll]
                for j in 0..tile {
                    drop_past(&mut d_z, first + j < past, comptime!((before + j) * own), own);
                }
            }
        }
        #[unroll]
        for j in 0..tile {
            add_weights(&mut sums, &d_z, &seen, first + j < at.end, j, part);
            let row = through_window(&d_z, &taps, j, part);
            keep_row::<F, N>(d_x, &row, turn * tile + j, at, part);
        }
        move_on(&mut seen, tile, part);
        move_on(&mut d_z, tile, part);
    }
    if comptime!(part.sum_count() > 0) {
        keep_sums(&sums, d_x.partials.index_mut(0usize), shared, at, part);
    }
}

/// The larger of two sizes.
fn max_of(a: usize, b: usize) -> usize {
    a.max(b)
}

#[cube]
fn zeros(#[comptime] length: usize) -> Array<f32> {
    let mut values = Array::<f32>::new(length);
    for n in 0..length {
        values[n] = 0.0f32;
    }
    values
}

/// Makes gradients of z of those of y, in their place, for a tile:
/// ```text
/// y = f(z), l^2 = sum y^2 + epsilon:   d = factor / l (dy - y (y . dy) / l^2),   dz = f'(z) d
/// ```
#[cube]
fn through_activation(
    d_z: &mut Array<f32>,
    seen: &Array<f32>,
    taps: &Taps,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (own, tile) = comptime!((part.own(), part.tile(true)));
    let start = comptime!(part.before() * own);
    let mut y = Array::<f32>::new(comptime!(tile * own));
    let mut slope = Array::<f32>::new(comptime!(tile * own));
    #[unroll]
    for j in 0..tile {
        #[unroll]
        for i in 0..own {
            let n = comptime!(j * own + i);
            let z = convolved(seen, taps, j, i, part);
            let (value, rise) = activated(z, comptime!(part.activation()));
            y[n] = clipped(value, comptime!(i / part.vector), at, part);
            slope[n] = rise;
        }
    }
    if comptime!(part.norm().is_some()) {
        through_norm(d_z, &y, shared, part);
    }
    #[unroll]
    for n in 0..comptime!(tile * own) {
        d_z[comptime!(start + n)] *= slope[n];
    }
}

/// The part of the norm in [`through_activation`].
#[cube]
fn through_norm(
    d: &mut Array<f32>,
    y: &Array<f32>,
    shared: &mut SharedMemory<f32>,
    #[comptime] part: Part,
) {
    let (own, tile) = comptime!((part.own(), part.tile(true)));
    let start = comptime!(part.before() * own);
    let norm = comptime!(part.norm());
    let factor = comptime!(norm.map_or(1.0, |norm| norm.factor()));
    let epsilon = comptime!(norm.map_or(0.0, |norm| norm.epsilon()));
    // Sums of y^2, and then of products with dy.
    let mut sums = zeros(comptime!(2 * tile));
    #[unroll]
    for j in 0..tile {
        #[unroll]
        for i in 0..own {
            let value = y[comptime!(j * own + i)];
            sums[j] += value * value;
            sums[comptime!(tile + j)] += value * d[comptime!(start + j * own + i)];
        }
    }
    add_across(&mut sums, shared, comptime!(2 * tile), part);
    #[unroll]
    for j in 0..tile {
        let inverse = f32::inverse_sqrt(sums[j] + epsilon);
        let share = sums[comptime!(tile + j)] * inverse * inverse;
        let scale = factor * inverse;
        #[unroll]
        for i in 0..own {
            let n = comptime!(start + j * own + i);
            d[n] = (d[n] - y[comptime!(j * own + i)] * share) * scale;
        }
    }
}

/// Sets the gradients of a token past the end to 0: a norm without epsilon makes NaN of zeros.
#[cube]
fn drop_past(d_z: &mut Array<f32>, there: bool, #[comptime] start: usize, #[comptime] own: usize) {
    #[unroll]
    for i in 0..own {
        d_z[comptime!(start + i)] = select(there, d_z[comptime!(start + i)], 0.0f32);
    }
}

/// Adds what token `j` of the tile has for the gradients of weights and biases, if it is one of the run's
/// own.
#[cube]
fn add_weights(
    sums: &mut Array<f32>,
    d_z: &Array<f32>,
    seen: &Array<f32>,
    own_token: bool,
    #[comptime] j: usize,
    #[comptime] part: Part,
) {
    let own = comptime!(part.own());
    let unrolled = comptime!(part.written_out());
    #[unroll]
    for i in 0..own {
        let d = select(own_token, d_z[comptime!((part.before() + j) * own + i)], 0.0f32);
        if comptime!(part.weighted) {
            #[unroll(unrolled)]
            for w in 0..comptime!(part.window) {
                sums[w * own + i] += d * seen[(w + j) * own + i];
            }
        }
        if comptime!(part.biased) {
            sums[comptime!((part.sum_count() - 1) * own + i)] += d;
        }
    }
}

/// The gradient of the token W - 1 before token `j` of the tile: `sum_w weight_w dz_{j-w}`.
#[cube]
fn through_window(
    d_z: &Array<f32>,
    taps: &Taps,
    #[comptime] j: usize,
    #[comptime] part: Part,
) -> Array<f32> {
    let own = comptime!(part.own());
    let unrolled = comptime!(part.written_out());
    let newest = comptime!(part.before() + j);
    let mut row = Array::<f32>::new(own);
    #[unroll]
    for i in 0..own {
        let mut sum = 0.0f32;
        if comptime!(part.weighted) {
            #[unroll(unrolled)]
            for w in 0..comptime!(part.window) {
                sum += taps.weight[w * own + i] * d_z[(newest - w) * own + i];
            }
        } else {
            sum = d_z[comptime!(newest * own + i)];
        }
        row[i] = sum;
    }
    row
}

/// Stores the gradient that step `step` of a run completes: of a token, or, in the steps before the first
/// one of a sequence, of the conv state.
#[cube]
fn keep_row<F: Float, N: Size>(
    d_x: &mut XGradients<F, N>,
    row: &Array<f32>,
    step: usize,
    at: &Place,
    #[comptime] part: Part,
) {
    let before = comptime!(part.before());
    if step >= before {
        let token = at.start + step - before;
        if token < at.end {
            store::<F, N>(&mut d_x.x, in_x(at, token, part), row, 0usize, at, part);
        }
    } else if comptime!(part.has_conv_state) {
        if at.start == 0 {
            let conv_state = d_x.conv_state.index_mut(0usize);
            store::<F, N>(conv_state, in_conv_state(at, step, part), row, 0usize, at, part);
        }
    }
}

/// Adds the sums of gradients up over the runs of the cube, and keeps them.
#[cube]
fn keep_sums(
    sums: &Array<f32>,
    partials: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (own, lanes, team) = comptime!((part.own(), part.lanes, part.team));
    let vector = comptime!(part.vector);
    let unrolled = comptime!(part.written_out());
    let unit = UNIT_POS as usize;
    // The column of the cube whose sum this unit makes; where it lies is as in `place`.
    let lane = unit / own;
    let within = lane % team * vector + unit % own / vector * comptime!(part.team * part.vector);
    let within = within + unit % own % vector;
    let column = at.cube_column + lane / team * comptime!(part.block) + within;
    let mine = lane < lanes && within < comptime!(part.block) && column < comptime!(part.width);
    let to = at.chunk * comptime!(part.all_sums) + comptime!(part.sums) + column;
    #[unroll(unrolled)]
    for q in 0..comptime!(part.sum_count()) {
        sync_cube();
        #[unroll]
        for i in 0..own {
            shared[unit * own + i] = sums[q * own + i];
        }
        sync_cube();
        if mine {
            let mut sum = 0.0f32;
            for run in 0..comptime!(part.runs()) {
                sum += shared[run * comptime!(lanes * own) + unit];
            }
            partials[to + q * comptime!(part.sum_stride)] = sum;
        }
    }
}

/// Every `runs`th token of a column.
#[cube]
fn gates_backward<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    d_y: &Sequence<Array<f32>>,
    d_x: &mut XGradients<F, N>,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (rate, bias) = rate_and_bias::<F, G, N>(x, at, part);
    let mut sums = zeros(2usize);
    for turn in 0..at.length {
        let token = at.start + turn * comptime!(part.runs());
        if token < at.end && at.column < comptime!(part.width) {
            let value = number::<F, G, N>(x, in_x(at, token, part), part);
            let mut d = 0.0f32;
            if comptime!(part.tensor.is_some()) {
                d = d_y.index(comptime!(part.tensor.unwrap_or(0)))[in_part(at, token, part)];
            }
            let open = activate(value + bias, Activation::Sigmoid);
            let gradient = if comptime!(part.is_decay()) {
                sums[0] -= d * rate * open;
                sums[1] -= d * rate * softplus(value + bias);
                -(d * rate * open)
            } else {
                d * open * (1.0f32 - open) * comptime!(part.scale())
            };
            keep_number::<F, N>(d_x, gradient, in_x(at, token, part), part);
        }
    }
    if comptime!(part.is_decay()) {
        keep_sums(&sums, d_x.partials.index_mut(0usize), shared, at, part);
    }
}

/// Stores a number of the gradient of x.
#[cube]
fn keep_number<F: Float, N: Size>(
    d_x: &mut XGradients<F, N>,
    value: f32,
    n: usize,
    #[comptime] part: Part,
) {
    if comptime!(part.numbers) {
        let numbers = d_x.numbers.index_mut(0usize);
        numbers[n] = F::cast_from(value);
    } else {
        d_x.x[n] = Vector::<F, N>::new(F::cast_from(value));
    }
}

/// Compile-time values of [`add_rows`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SumForm {
    pub source: &'static str,
    /// Numbers of each output.
    pub lengths: Vec<usize>,
    /// Columns of the partial sums.
    pub columns: usize,
    /// Numbers of the last output, if each is the sum of `group` columns.
    pub last: usize,
    pub group: usize,
}

impl SumForm {
    /// Numbers of all outputs.
    pub fn all(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Of output `n`, its first number among those of all, and one past its last.
    fn range(&self, n: usize) -> (usize, usize) {
        let start = self.lengths[..n].iter().sum();
        (start, start + self.lengths[n])
    }
}

/// Adds up the rows of the partial sums, and for the last output groups of columns.
#[cube(launch_unchecked)]
pub(super) fn add_rows<G: Float>(
    partials: &Array<f32>,
    out: &mut Sequence<Array<G>>,
    rows: u32,
    #[comptime] form: SumForm,
    #[define(G)] _dtype: StorageType,
) {
    let all = comptime!(form.all());
    let plain = comptime!(form.all() - form.last);
    let unit = UNIT_POS as usize;
    let split = unit / COLUMNS;
    let index = CUBE_POS * COLUMNS + unit % COLUMNS;
    let mut first = index;
    let mut group = 1usize;
    if comptime!(form.group > 1) {
        if index >= plain {
            first = plain + (index - plain) * comptime!(form.group);
            group = comptime!(form.group).runtime();
        }
    }
    let items = rows as usize * group;
    let mut sums = zeros(AHEAD);
    if index < all {
        for turn in 0..(items + comptime!(SPLIT_K * AHEAD - 1)) / comptime!(SPLIT_K * AHEAD) {
            #[unroll]
            for n in 0..AHEAD {
                let item = turn * comptime!(SPLIT_K * AHEAD) + comptime!(n * SPLIT_K) + split;
                if item < items {
                    let row = item / group * comptime!(form.columns);
                    sums[n] += partials[row + first + item % group];
                }
            }
        }
    }
    let mut shared = SharedMemory::<f32>::new(UNITS);
    shared[unit] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sync_cube();
    #[unroll]
    for level in 0..comptime!(SPLIT_K.ilog2()) {
        let half = comptime!(UNITS >> (level + 1));
        if unit < half {
            shared[unit] += shared[unit + half];
        }
        sync_cube();
    }
    if split == 0 {
        #[unroll]
        for n in 0..comptime!(form.lengths.len()) {
            let (start, past) = comptime!(form.range(n));
            if index >= start && index < past {
                let to = out.index_mut(n);
                to[index - start] = G::cast_from(shared[unit]);
            }
        }
    }
}
