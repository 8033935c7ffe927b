//! A mini-batch's own numbers, which both passes make: X, G, P and O.

use super::arguments::{Form, Operands};
use super::tiles::{MiniBatch, Number, RowSums, Tiles, meet, multiply, number, row_sums, token};
use cubecl::prelude::*;

/// Places of sums over rows that [`learn`] leaves: of Z^2, H, H X and O^2.
const Z_SQUARED: usize = 0;
const H: usize = 1;
pub(in crate::fused) const H_X: usize = 2;
const O_SQUARED: usize = 3;

/// Brings q, k, rates and t of a mini-batch. Begins and ends with a barrier.
#[cube]
pub(in crate::fused) fn load(
    tiles: &mut Tiles,
    x: &Operands,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    sync_cube();
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            tiles.q[own.at] = x.q[own.from];
            tiles.k[own.at] = x.k[own.from];
        }
    }
    for turn in 0..comptime!(form.rows.div_ceil(form.units())) {
        let row = turn * comptime!(form.units()) + UNIT_POS as usize;
        if row < form.rows {
            tiles.rate[row] = x.rate[token(of, row)];
            tiles.scale[row] = x.scale[row];
        }
    }
    sync_cube();
}

/// The mean that a sum over a row gives.
#[cube]
pub(in crate::fused) fn mean(
    tiles: &Tiles,
    row: usize,
    #[comptime] place: usize,
    #[comptime] form: Form,
) -> f32 {
    tiles.sums[comptime!(place * form.rows) + row] * comptime!(1.0f32 / form.width as f32)
}

/// s of a row.
#[cube]
pub(in crate::fused) fn z_size(
    tiles: &Tiles,
    of: MiniBatch,
    row: usize,
    #[comptime] form: Form,
) -> f32 {
    f32::sqrt(mean(tiles, row, Z_SQUARED, form) + of.own.epsilon)
}

/// u of a row.
#[cube]
pub(in crate::fused) fn o_size(
    tiles: &Tiles,
    of: MiniBatch,
    row: usize,
    #[comptime] form: Form,
) -> f32 {
    f32::sqrt(mean(tiles, row, O_SQUARED, form) + of.own.epsilon)
}

/// `V - K - beta` of one number.
#[cube]
pub(in crate::fused) fn target(tiles: &Tiles, x: &Operands, of: MiniBatch, own: Number) -> f32 {
    x.v[own.from] - tiles.k[own.at] - of.own.beta
}

/// X, G, P and O of the rows that [`load`] brought, at the weights of which a unit has `run` and `bias`. Ends with a
/// barrier.
#[cube]
pub(in crate::fused) fn learn(
    tiles: &mut Tiles,
    x: &Operands,
    run: &Array<f32>,
    bias: f32,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    multiply(&mut tiles.x, &tiles.k, run, bias, &mut tiles.meeting, form);
    multiply(&mut tiles.n, &tiles.q, run, bias, &mut tiles.meeting, form);
    meet(&mut tiles.p, &tiles.q, &tiles.k, 1.0f32, form);
    slopes(tiles, x, of, form);
    read(tiles, of, form);
}

/// X in place of Z, and G. Ends with a barrier.
#[cube]
pub(in crate::fused) fn slopes(
    tiles: &mut Tiles,
    x: &Operands,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    let of_z = comptime!(RowSums { place: Z_SQUARED, products: true, form });
    row_sums(&mut tiles.sums, &tiles.x, &tiles.x, &mut tiles.meeting, of_z);
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let normal = tiles.x[own.at] / z_size(tiles, of, own.row, form);
            let wanted = of.own.gamma * target(tiles, x, of, own);
            tiles.x[own.at] = normal;
            tiles.g[own.at] = of.own.gamma * of.own.gamma * normal - wanted;
        }
    }
    sync_cube();
    let of_h = comptime!(RowSums { place: H, products: false, form });
    row_sums(&mut tiles.sums, &tiles.g, &tiles.x, &mut tiles.meeting, of_h);
    let of_h_x = comptime!(RowSums { place: H_X, products: true, form });
    row_sums(&mut tiles.sums, &tiles.g, &tiles.x, &mut tiles.meeting, of_h_x);
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let along = tiles.x[own.at] * mean(tiles, own.row, H_X, form);
            let h = tiles.g[own.at] - mean(tiles, own.row, H, form) - along;
            tiles.g[own.at] = h / z_size(tiles, of, own.row, form);
        }
    }
    sync_cube();
}

/// O, from Q W + c, and its size. Ends with a barrier.
#[cube]
pub(in crate::fused) fn read(tiles: &mut Tiles, of: MiniBatch, #[comptime] form: Form) {
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let sum = written(&tiles.g, &tiles.p, &tiles.rate, own.row, of.own.column, form);
            tiles.n[own.at] -= tiles.scale[own.row] * sum;
        }
    }
    sync_cube();
    let of_o = comptime!(RowSums { place: O_SQUARED, products: true, form });
    row_sums(&mut tiles.sums, &tiles.n, &tiles.n, &mut tiles.meeting, of_o);
}

/// The sum of rows of G that tokens up to a row's own have written, as that row reads it and not yet times t.
#[cube]
pub(in crate::fused) fn written(
    g: &SharedMemory<f32>,
    p: &SharedMemory<f32>,
    rate: &SharedMemory<f32>,
    row: usize,
    column: usize,
    #[comptime] form: Form,
) -> f32 {
    let mut sum = 0.0f32;
    for j in 0..row + 1 {
        sum += p[row * form.rows + j] * rate[j] * g[j * comptime!(form.stride()) + column];
    }
    sum
}
