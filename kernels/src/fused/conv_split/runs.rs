//! The tensors and the place of a unit, and what forward and backward have in common.

use super::chunks::ENTRY;
use super::parts::Part;
use crate::pointwise::{Activation, UNITS};
use cubecl::prelude::*;

/// The inputs; those that are not there are empty.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands<F: Float, G: Float, N: Size> {
    pub x: Array<Vector<F, N>>,
    /// The same memory, number by number, where vectors are longer and there are gates.
    pub numbers: Sequence<Array<F>>,
    pub weight: Sequence<Array<Vector<G, N>>>,
    pub bias: Sequence<Array<Vector<G, N>>>,
    pub conv_state: Sequence<Array<Vector<F, N>>>,
    pub a_log: Sequence<Array<G>>,
    pub dt_bias: Sequence<Array<G>>,
    /// [`ENTRY`] numbers for each chunk, where sequences have lengths of their own.
    pub chunks: Sequence<Array<u32>>,
}

/// Outputs of all parts, or their gradients: those of type F, and those in f32.
#[derive(CubeType, CubeLaunch)]
pub(super) struct RowsAndGates<F: Float, N: Size> {
    pub rows: Sequence<Array<Vector<F, N>>>,
    pub gates: Sequence<Array<f32>>,
}

/// Sizes that are not compiled in.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub tokens: u32,
    /// Tokens of a chunk, and chunks of a sequence, where sequences have one length.
    pub chunk: u32,
    pub chunks: u32,
    /// Cubes with work.
    pub cubes: u32,
}

/// Work of a unit.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// Number of the sequence, and of the chunk among all.
    pub sequence: usize,
    pub chunk: usize,
    /// The sequence's first row, and its tokens.
    pub row: usize,
    pub tokens: usize,
    /// The run's first token, the one past its last, and how many the longest run of the cube has.
    pub start: usize,
    pub end: usize,
    pub length: usize,
    /// First column of the cube, and of the unit, within the part.
    pub cube_column: usize,
    pub column: usize,
    /// The unit's number in its team.
    pub own: usize,
}

/// Tokens of a cube, all of one sequence: an entry of the table of chunks.
#[derive(CubeType, Clone, Copy)]
struct Chunk {
    sequence: usize,
    row: usize,
    tokens: usize,
    first: usize,
    length: usize,
}

/// Chunk `n` of all.
#[cube]
fn chunk<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    sizes: &Sizes,
    n: usize,
    #[comptime] part: Part,
) -> Chunk {
    if comptime!(part.varlen) {
        let table = x.chunks.index(0usize);
        let entry = n * ENTRY;
        Chunk {
            sequence: table[entry] as usize,
            row: table[entry + 1] as usize,
            tokens: table[entry + 2] as usize,
            first: table[entry + 3] as usize,
            length: table[entry + 4] as usize,
        }
    } else {
        let (sequence, tokens) = (n / sizes.chunks as usize, sizes.tokens as usize);
        let length = sizes.chunk as usize;
        let first = n % sizes.chunks as usize * length;
        Chunk { sequence, row: sequence * tokens, tokens, first, length }
    }
}

/// The place of this unit.
#[cube]
pub(super) fn place<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    sizes: &Sizes,
    #[comptime] part: Part,
) -> Place {
    let (runs, lanes, team) = comptime!((part.runs(), part.lanes, part.team));
    let number = CUBE_POS / comptime!(part.all_slots);
    let slot = CUBE_POS % comptime!(part.all_slots) - comptime!(part.slot);
    let chunk = chunk::<F, G, N>(x, sizes, number, part);
    let first = chunk.first;
    let unit = UNIT_POS as usize;
    let lane = unit % lanes;
    let run = unit / lanes;
    let past = min(first + chunk.length, chunk.tokens);
    let length = (chunk.length + comptime!(runs - 1)) / runs;
    let mut start = first + run * length;
    let mut end = min(start + length, past);
    if comptime!(part.is_gate()) {
        // Every `runs`th token: units side by side write numbers side by side.
        start = first + run;
        end = past;
    }
    let cube_column = slot * comptime!(part.span());
    let own = lane % team;
    Place {
        sequence: chunk.sequence,
        chunk: number,
        row: chunk.row,
        tokens: chunk.tokens,
        start,
        end,
        length,
        cube_column,
        column: cube_column + lane / team * comptime!(part.block) + own * comptime!(part.vector),
        own,
    }
}

/// Whether the unit's vector `k` is in its block and in the part.
#[cube]
pub(super) fn inside(at: &Place, #[comptime] k: usize, #[comptime] part: Part) -> bool {
    let ahead = comptime!(k * part.team);
    let in_block = (at.own + ahead) * comptime!(part.vector) < comptime!(part.block);
    let in_part = at.column + comptime!(k * part.team * part.vector) < comptime!(part.width);
    comptime!(part.exact()) || (in_block && in_part)
}

/// The unit's columns of one row, whose first vector is number `start`; zeros if not `there`.
#[cube]
pub(super) fn load<F: Float, N: Size>(
    from: &Array<Vector<F, N>>,
    start: usize,
    there: bool,
    at: &Place,
    #[comptime] part: Part,
) -> Array<f32> {
    let mut values = Array::<f32>::new(comptime!(part.own()));
    #[unroll]
    for k in 0..comptime!(part.vectors) {
        let mut value = Vector::<f32, N>::new(0.0f32);
        if there && inside(at, k, part) {
            value = Vector::<f32, N>::cast_from(from[start + comptime!(k * part.team)]);
        }
        #[unroll]
        for l in 0..comptime!(part.vector) {
            values[comptime!(k * part.vector + l)] = value[l];
        }
    }
    values
}

/// Stores the numbers from `slot` on into the unit's columns of the row whose first vector is number
/// `start`.
#[cube]
pub(super) fn store<F: Float, N: Size>(
    to: &mut Array<Vector<F, N>>,
    start: usize,
    values: &Array<f32>,
    #[comptime] slot: usize,
    at: &Place,
    #[comptime] part: Part,
) {
    #[unroll]
    for k in 0..comptime!(part.vectors) {
        if inside(at, k, part) {
            let mut value = Vector::<f32, N>::empty();
            #[unroll]
            for l in 0..comptime!(part.vector) {
                value[l] = values[comptime!(slot + k * part.vector + l)];
            }
            to[start + comptime!(k * part.team)] = Vector::<F, N>::cast_from(value);
        }
    }
}

/// Copies a row into row `to` of an array of rows.
#[cube]
pub(super) fn put(rows: &mut Array<f32>, to: usize, row: &Array<f32>, #[comptime] own: usize) {
    #[unroll]
    for i in 0..own {
        rows[to * own + i] = row[i];
    }
}

/// The vector of x at which the unit's columns of a token begin.
#[cube]
pub(super) fn in_x(at: &Place, token: usize, #[comptime] part: Part) -> usize {
    let row = (at.row + token) * comptime!(part.columns / part.vector);
    row + (at.column + comptime!(part.first)) / comptime!(part.vector)
}

/// The vector of an output at which the unit's columns of a token begin.
#[cube]
pub(super) fn in_part(at: &Place, token: usize, #[comptime] part: Part) -> usize {
    let row = (at.row + token) * comptime!(part.width / part.vector);
    row + at.column / comptime!(part.vector)
}

/// The vector of the conv state at which the unit's columns of its token `n` begin.
#[cube]
pub(super) fn in_conv_state(at: &Place, n: usize, #[comptime] part: Part) -> usize {
    let (first, columns) = comptime!(part.in_tensor());
    let row = (at.sequence * comptime!(part.before()) + n) * comptime!(columns / part.vector);
    row + (at.column + first) / comptime!(part.vector)
}

/// The unit's weights, `[W, own]`, and biases.
#[derive(CubeType)]
pub(super) struct Taps {
    pub weight: Array<f32>,
    pub bias: Array<f32>,
}

/// Loads the weights; stand-ins where there are none.
#[cube]
pub(super) fn taps<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    at: &Place,
    #[comptime] part: Part,
) -> Taps {
    let own = comptime!(part.own());
    let mut weight = Array::<f32>::new(comptime!(part.window * own));
    let mut bias = Array::<f32>::new(own);
    let (first, columns) = comptime!(part.in_tensor());
    let tensor = comptime!(part.own_tensor());
    let column = (at.column + first) / comptime!(part.vector);
    if comptime!(part.weighted) {
        let unrolled = comptime!(part.written_out());
        #[unroll(unrolled)]
        for w in 0..comptime!(part.window) {
            let start = column + w * comptime!(columns / part.vector);
            let row = load::<G, N>(x.weight.index(tensor), start, true, at, part);
            put(&mut weight, w, &row, own);
        }
    }
    if comptime!(part.biased) {
        let row = load::<G, N>(x.bias.index(tensor), column, true, at, part);
        put(&mut bias, 0usize, &row, own);
    }
    Taps { weight, bias }
}

/// Fills the first W - 1 rows of the window with the tokens before the run.
#[cube]
pub(super) fn look_back<F: Float, G: Float, N: Size>(
    seen: &mut Array<f32>,
    x: &Operands<F, G, N>,
    at: &Place,
    #[comptime] part: Part,
) {
    let own = comptime!(part.own());
    let before = comptime!(part.before());
    let unrolled = comptime!(part.written_out());
    #[unroll(unrolled)]
    for w in 0..before {
        let position = at.start + w;
        let token = max(position, before) - before;
        let there = position >= before && token < at.tokens;
        let mut row = load::<F, N>(&x.x, in_x(at, token, part), there, at, part);
        if comptime!(part.has_conv_state) {
            // One of the two is zeros.
            let there = position < before;
            let start = in_conv_state(at, min(position, comptime!(before - 1)), part);
            let tensor = comptime!(part.own_tensor());
            let conv_state = load::<F, N>(x.conv_state.index(tensor), start, there, at, part);
            #[unroll]
            for i in 0..own {
                row[i] += conv_state[i];
            }
        }
        put(seen, w, &row, own);
    }
}

/// z of token `j` of the tile, column `i`.
#[cube]
pub(super) fn convolved(
    seen: &Array<f32>,
    taps: &Taps,
    #[comptime] j: usize,
    #[comptime] i: usize,
    #[comptime] part: Part,
) -> f32 {
    let own = comptime!(part.own());
    let unrolled = comptime!(part.written_out());
    let mut z = 0.0f32;
    if comptime!(part.biased) {
        z = taps.bias[i];
    }
    if comptime!(part.weighted) {
        #[unroll(unrolled)]
        for w in 0..comptime!(part.window) {
            z += taps.weight[w * own + i] * seen[(w + j) * own + i];
        }
    } else {
        z += seen[comptime!(j * own + i)];
    }
    z
}

/// Moves a window on by a tile: its last W - 1 rows come first.
#[cube]
pub(super) fn move_on(window: &mut Array<f32>, #[comptime] tile: usize, #[comptime] part: Part) {
    let own = comptime!(part.own());
    let unrolled = comptime!(part.written_out());
    #[unroll(unrolled)]
    for w in 0..comptime!(part.before()) {
        #[unroll]
        for i in 0..own {
            window[w * own + i] = window[(w + tile) * own + i];
        }
    }
}

/// Adds up `count` numbers of each unit over its team. Without planes every unit of the cube has to come
/// here.
#[cube]
pub(super) fn add_across(
    values: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] part: Part,
) {
    let team = comptime!(part.team);
    if comptime!(part.planes) {
        #[unroll]
        for level in 0..comptime!(team.ilog2()) {
            #[unroll]
            for n in 0..count {
                values[n] += plane_shuffle_xor(values[n], comptime!(1u32 << level));
            }
        }
    } else if comptime!(team > 1) {
        let unit = UNIT_POS as usize;
        // The numbers of the tile before may still be read.
        sync_cube();
        #[unroll]
        for n in 0..count {
            shared[unit + comptime!(n * UNITS)] = values[n];
        }
        sync_cube();
        let first = unit - unit % team;
        #[unroll]
        for n in 0..count {
            let mut sum = 0.0f32;
            for m in 0..team {
                sum += shared[first + m + comptime!(n * UNITS)];
            }
            values[n] = sum;
        }
    }
}

/// A number of x.
#[cube]
pub(super) fn number<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    n: usize,
    #[comptime] part: Part,
) -> f32 {
    if comptime!(part.numbers) {
        f32::cast_from(x.numbers.index(0usize)[n])
    } else {
        let value = Vector::<f32, N>::cast_from(x.x[n]);
        value[0]
    }
}

/// The rate of decay and the step bias of the unit's column; zeros in other parts.
#[cube]
pub(super) fn rate_and_bias<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    at: &Place,
    #[comptime] part: Part,
) -> (f32, f32) {
    let mut rate = 0.0f32;
    let mut bias = 0.0f32;
    if comptime!(part.is_decay()) {
        let column = min(at.column, comptime!(part.width - 1));
        rate = f32::exp(f32::cast_from(x.a_log.index(0usize)[column / comptime!(part.group())]));
        bias = f32::cast_from(x.dt_bias.index(0usize)[column]);
    }
    (rate, bias)
}

/// An activation and its derivative.
#[cube]
pub(super) fn activated(z: f32, #[comptime] activation: Activation) -> (f32, f32) {
    let mut value = z;
    let mut slope = 1.0f32;
    if comptime!(activation != Activation::Identity) {
        let open = sigmoid(z);
        if comptime!(activation == Activation::Silu) {
            value = z * open;
            slope = open + value * (1.0f32 - open);
        } else {
            value = open;
            slope = open * (1.0f32 - open);
        }
    }
    (value, slope)
}

/// `1 / (1 + e^-z)` by the device's short exponential and division, which are right to 2e-7 (1 + |z|). The
/// exponent is never above 0: nothing overflows.
#[cube(fast_math = FastMath::ReducedPrecision
    | FastMath::AllowReciprocal
    | FastMath::UnsignedZero
    | FastMath::NotNaN
    | FastMath::NotInf)]
fn sigmoid(z: f32) -> f32 {
    let e = f32::exp(-f32::abs(z));
    select(z >= 0.0f32, 1.0f32, e) / (e + 1.0f32)
}
