//! The kernel of a forward pass.

use super::arguments::{Form, Operands, ResultArrays, Sizes};
use super::inner::{learn, load, o_size};
use super::tiles::{
    MiniBatch, Tiles, add_product, column_sum, load_run, mini_batch, number, own, store_run, tiles,
};
use cubecl::prelude::*;

/// Writes y, and turns G into -F. Ends with a barrier.
#[cube]
pub(in crate::fused) fn answer(
    tiles: &mut Tiles,
    y: &mut Array<f32>,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let n = tiles.n[own.at] / o_size(tiles, of, own.row, form);
            y[own.from] = tiles.q[own.at] + of.own.gamma * n + of.own.beta;
            tiles.g[own.at] *= -(tiles.scale[comptime!(form.rows - 1)] * tiles.rate[own.row]);
        }
    }
    sync_cube();
}

/// The kernel of [`forward`](super::forward).
#[cube(launch_unchecked)]
pub(in crate::fused) fn ttt_linear_forward(
    x: &Operands,
    to: &mut ResultArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let own = own(x, sizes, form);
    let first = own.pair * comptime!(form.weights());
    let mut tiles = tiles(form);
    let mut run = load_run(&x.weights, first, own, false, form);
    let mut bias = x.weights[first + comptime!(form.width * form.width) + own.column];
    for batch in 0..sizes.mini_batches as usize {
        let of = mini_batch(own, batch, form);
        if comptime!(form.keep) {
            store_run(&mut to.starts, of.start, &run, bias, own, form);
        }
        load(&mut tiles, x, of, form);
        learn(&mut tiles, x, &run, bias, of, form);
        answer(&mut tiles, &mut to.y, of, form);
        add_product(&mut run, &tiles.k, &tiles.g, own, form);
        bias += column_sum(&tiles.g, own, form);
    }
    store_run(&mut to.weights, first, &run, bias, own, form);
}
