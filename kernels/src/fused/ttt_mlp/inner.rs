//! A mini-batch's own numbers, which both passes make.

use super::super::gated_product::{
    GateActivation, SQRT_2_OVER_PI, activate, activation_slope, near_gelu, near_gelu_slope,
};
use super::super::ttt_linear::arguments::Operands;
use super::super::ttt_linear::inner::{read, slopes, written};
use super::super::ttt_linear::tiles::{MiniBatch, Own, Tiles, meet, mini_batch, number, tile};
use super::arguments::{Form, Way};
use super::products::product;
use crate::pointwise::{sigmoid, sigmoid_slope};
use cubecl::prelude::*;

/// Tiles `[b, F]`, and P1.
#[derive(CubeType)]
pub(super) struct Wide {
    /// Z1.
    pub(super) z: SharedMemory<f32>,
    /// A.
    pub(super) a: SharedMemory<f32>,
    /// Y.
    pub(super) y: SharedMemory<f32>,
    /// G1.
    pub(super) g: SharedMemory<f32>,
    /// O1.
    pub(super) o: SharedMemory<f32>,
    /// B.
    pub(super) b: SharedMemory<f32>,
    /// P1, `[b, b]`.
    pub(super) p: SharedMemory<f32>,
}

/// Of a pass back, which needs each of them later.
#[cube]
pub(super) fn wide(#[comptime] form: Form) -> Wide {
    Wide {
        z: tile(form.wide),
        a: tile(form.wide),
        y: tile(form.wide),
        g: tile(form.wide),
        o: tile(form.wide),
        b: tile(form.wide),
        p: SharedMemory::<f32>::new(comptime!(form.head.rows * form.head.rows)),
    }
}

/// Of a forward pass: G1 takes the place of Y, and O1 and B that of Z1.
#[cube]
pub(super) fn wide_in_passing(#[comptime] form: Form) -> Wide {
    let (z, g) = (tile(form.wide), tile(form.wide));
    Wide {
        z,
        a: tile(form.wide),
        y: g,
        g,
        o: z,
        b: z,
        p: SharedMemory::<f32>::new(comptime!(form.head.rows * form.head.rows)),
    }
}

#[cube]
fn gelu(z: f32) -> f32 {
    activate(z, GateActivation::GeluTanh)
}

/// gelu'.
#[cube]
pub(super) fn gelu_slope(z: f32) -> f32 {
    activation_slope(z, GateActivation::GeluTanh)
}

/// gelu'', of z sigmoid(u(z)).
#[cube]
pub(super) fn gelu_bend(z: f32) -> f32 {
    let (inner, steep) = (near_gelu(z), near_gelu_slope(z));
    let steeper = comptime!(12.0 * 0.044715 * SQRT_2_OVER_PI) * z;
    let turned = 1.0f32 - 2.0f32 * sigmoid(inner);
    sigmoid_slope(inner) * (2.0f32 * steep + z * (steeper + turned * steep * steep))
}

/// A mini-batch, and where its weights lie.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Turn {
    pub(super) of: MiniBatch,
    /// For rows of F numbers.
    pub(super) wider: MiniBatch,
    /// Of its weights.
    pub(super) at: Place,
    /// Of the weights after the last one, and of their gradients.
    pub(super) end: Place,
}

/// A cube's mini-batch, whose weights are the set `set` of all.
#[cube]
pub(super) fn turn(own: Own, batch: usize, set: usize, #[comptime] form: Form) -> Turn {
    let of = mini_batch(own, batch, form.head);
    Turn { of, wider: widened(of, form), at: place(set, form), end: place(own.pair, form) }
}

/// The same mini-batch for rows of F numbers, with a unit's column and part of those; gamma and beta are not theirs.
#[cube]
fn widened(of: MiniBatch, #[comptime] form: Form) -> MiniBatch {
    let own = of.own;
    MiniBatch {
        own: Own {
            column: UNIT_POS as usize % form.wide.width,
            part: UNIT_POS as usize / form.wide.width,
            gamma: own.gamma,
            beta: own.beta,
            epsilon: own.epsilon,
            pair: own.pair,
            sizes: own.sizes,
        },
        first: of.first,
        start: of.start,
    }
}

/// Where the weights of both layers begin.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub(super) first: usize,
    pub(super) second: usize,
}

/// Of one of several sets of weights.
#[cube]
fn place(number: usize, #[comptime] form: Form) -> Place {
    Place {
        first: number * comptime!(form.weights()[0]),
        second: number * comptime!(form.weights()[1]),
    }
}

/// X, G2, P1, P2, O2 and the wide tiles, of the rows that `load` brought, at the weights that begin at `turn.at`. Ends
/// with a barrier.
#[cube]
pub(super) fn learn(
    tiles: &mut Tiles,
    wide: &mut Wide,
    x: &Operands,
    first: &Array<f32>,
    second: &Array<f32>,
    turn: Turn,
    #[comptime] form: Form,
) {
    let (of, wider, at) = (turn.of, turn.wider, turn.at);
    let (widen, narrow) = comptime!((form.widen(Way::Biased), form.narrow(Way::Biased)));
    let back = comptime!(form.widen(Way::Transposed));
    product(&mut wide.z, &tiles.k, first, at.first, &mut tiles.meeting, widen);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            wide.a[own.at] = gelu(wide.z[own.at]);
        }
    }
    meet(&mut wide.p, &tiles.q, &tiles.k, 1.0f32, form.head);
    sync_cube();
    product(&mut tiles.x, &wide.a, second, at.second, &mut tiles.meeting, narrow);
    slopes(tiles, x, of, form.head);
    product(&mut wide.y, &tiles.g, second, at.second, &mut tiles.meeting, back);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            wide.g[own.at] = wide.y[own.at] * gelu_slope(wide.z[own.at]);
        }
    }
    sync_cube();
    product(&mut wide.o, &tiles.q, first, at.first, &mut tiles.meeting, widen);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            let column = wider.own.column;
            let sum = written(&wide.g, &wide.p, &tiles.rate, own.row, column, form.wide);
            let o = wide.o[own.at] - tiles.scale[own.row] * sum;
            wide.o[own.at] = o;
            wide.b[own.at] = gelu(o);
        }
    }
    sync_cube();
    meet(&mut tiles.p, &wide.b, &wide.a, 1.0f32, form.wide);
    product(&mut tiles.n, &wide.b, second, at.second, &mut tiles.meeting, narrow);
    read(tiles, of, form.head);
}
