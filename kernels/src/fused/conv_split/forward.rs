//! The forward kernel.

use super::parts::{Form, Part};
use super::runs::{
    Operands, Place, RowsAndGates, Sizes, activated, add_across, convolved, in_conv_state, in_part,
    in_x, inside, load, look_back, move_on, number, place, put, rate_and_bias, store, taps,
};
use crate::pointwise::{Activation, activate, softplus};
use cubecl::prelude::*;

/// The kernel.
#[cube(launch_unchecked)]
pub(super) fn split_columns<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    y: &mut RowsAndGates<F, N>,
    next: &mut Sequence<Array<Vector<F, N>>>,
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
                let tensor = comptime!(part.tensor.unwrap_or(0));
                if comptime!(part.is_gate()) {
                    gates_forward::<F, G, N>(x, y.gates.index_mut(tensor), &at, part);
                } else {
                    let y = y.rows.index_mut(tensor);
                    rows_forward::<F, G, N>(x, y, next, &mut shared, &at, part);
                }
            }
        }
    }
}

/// A run of tokens.
#[cube]
fn rows_forward<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    y: &mut Array<Vector<F, N>>,
    next: &mut Sequence<Array<Vector<F, N>>>,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (own, tile, before) = comptime!((part.own(), part.tile(false), part.before()));
    let taps = taps::<F, G, N>(x, at, part);
    let mut seen = Array::<f32>::new(comptime!((before + tile) * own));
    let mut values = Array::<f32>::new(comptime!(tile * own));
    look_back::<F, G, N>(&mut seen, x, at, part);
    for turn in 0..(at.length + comptime!(tile - 1)) / tile {
        let first = at.start + turn * tile;
        #[unroll]
        for j in 0..tile {
            let token = first + j;
            let row = load::<F, N>(&x.x, in_x(at, token, part), token < at.end, at, part);
            put(&mut seen, comptime!(before + j), &row, own);
        }
        #[unroll]
        for j in 0..tile {
            #[unroll]
            for i in 0..own {
                let z = convolved(&seen, &taps, j, i, part);
                let (value, _) = activated(z, comptime!(part.activation()));
                values[comptime!(j * own + i)] = value;
            }
        }
        if comptime!(part.norm().is_some()) {
            normalize(&mut values, shared, at, part);
        }
        #[unroll]
        for j in 0..tile {
            let token = first + j;
            if token < at.end {
                store::<F, N>(y, in_part(at, token, part), &values, comptime!(j * own), at, part);
            }
        }
        if comptime!(part.apart.is_some()) {
            keep_last::<F, N>(next, &seen, first < at.end, at, part);
        }
        move_on(&mut seen, tile, part);
    }
}

/// Leaves the conv state after the one token of a sequence, the first of the tile: what is seen but for the oldest.
#[cube]
fn keep_last<F: Float, N: Size>(
    next: &mut Sequence<Array<Vector<F, N>>>,
    seen: &Array<f32>,
    there: bool,
    at: &Place,
    #[comptime] part: Part,
) {
    if there {
        let own = comptime!(part.own());
        #[unroll]
        for w in 0..comptime!(part.before()) {
            let next = next.index_mut(comptime!(part.own_tensor()));
            store::<F, N>(
                next,
                in_conv_state(at, w, part),
                seen,
                comptime!((w + 1) * own),
                at,
                part,
            );
        }
    }
}

/// Divides the rows of a tile by their lengths.
#[cube]
fn normalize(
    values: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (own, tile) = comptime!((part.own(), part.tile(false)));
    let norm = comptime!(part.norm());
    let factor = comptime!(norm.map_or(1.0, |norm| norm.factor()));
    let epsilon = comptime!(norm.map_or(0.0, |norm| norm.epsilon()));
    let mut norms = Array::<f32>::new(tile);
    #[unroll]
    for j in 0..tile {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..own {
            let value = values[comptime!(j * own + i)];
            sum += clipped(value, comptime!(i / part.vector), at, part) * value;
        }
        norms[j] = sum;
    }
    add_across(&mut norms, shared, tile, part);
    #[unroll]
    for j in 0..tile {
        let scale = factor * f32::inverse_sqrt(norms[j] + epsilon);
        #[unroll]
        for i in 0..own {
            values[comptime!(j * own + i)] *= scale;
        }
    }
}

/// An activated number of the unit's vector `k`; 0 where that is past the head. Of 0 only the sigmoid is
/// anything else already.
#[cube]
pub(super) fn clipped(value: f32, #[comptime] k: usize, at: &Place, #[comptime] part: Part) -> f32 {
    if comptime!(part.exact() || part.activation() != Activation::Sigmoid && !part.biased) {
        value
    } else {
        select(inside(at, k, part), value, 0.0f32)
    }
}

/// Every `runs`th token of a column.
#[cube]
fn gates_forward<F: Float, G: Float, N: Size>(
    x: &Operands<F, G, N>,
    y: &mut Array<f32>,
    at: &Place,
    #[comptime] part: Part,
) {
    let (rate, bias) = rate_and_bias::<F, G, N>(x, at, part);
    if at.column < comptime!(part.width) {
        for turn in 0..at.length {
            let token = at.start + turn * comptime!(part.runs());
            if token < at.end {
                let value = number::<F, G, N>(x, in_x(at, token, part), part);
                let gate = if comptime!(part.is_decay()) {
                    -(rate * softplus(value + bias))
                } else {
                    activate(value, Activation::Sigmoid) * comptime!(part.scale())
                };
                y[in_part(at, token, part)] = gate;
            }
        }
    }
}
