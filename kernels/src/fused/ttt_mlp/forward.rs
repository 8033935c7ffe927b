//! The kernel of a forward pass.

use super::super::ttt_linear::arguments::{Operands, ResultArrays, Sizes};
use super::super::ttt_linear::forward::answer;
use super::super::ttt_linear::inner::load;
use super::super::ttt_linear::tiles::{Tiles, number, own, tiles};
use super::arguments::{Form, LayerArrays, Way};
use super::inner::{Turn, Wide, learn, turn, wide_in_passing};
use super::products::{add_outer, copy};
use cubecl::prelude::*;

/// Turns G1 into -F1. Ends with a barrier.
#[cube]
fn write(wide: &mut Wide, tiles: &Tiles, turn: Turn, #[comptime] form: Form) {
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(turn.wider, pass, form.wide);
        if own.there {
            wide.g[own.at] *= -(tiles.scale[comptime!(form.wide.rows - 1)] * tiles.rate[own.row]);
        }
    }
    sync_cube();
}

/// The kernel of [`forward`](super::forward).
#[cube(launch_unchecked)]
pub(super) fn ttt_mlp_forward(
    x: &Operands,
    second: &Array<f32>,
    to: &mut ResultArrays,
    to_second: &mut LayerArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let (units, weights) = comptime!((form.head.units(), form.weights()));
    let (of_first, of_second) = comptime!((weights[0], weights[1]));
    let (widen, narrow) = comptime!((form.widen(Way::Biased), form.narrow(Way::Biased)));
    let own = own(x, sizes, form.head);
    let mut tiles = tiles(form.head);
    let mut wide = wide_in_passing(form);
    let batches = sizes.mini_batches as usize;
    let begin = turn(own, 0usize, own.pair, form).at;
    copy(&x.weights, begin.first, &mut to.weights, begin.first, of_first, units);
    copy(second, begin.second, &mut to_second.weights, begin.second, of_second, units);
    sync_storage();
    for batch in 0..batches {
        let now = turn(own, batch, own.pair, form);
        let at = now.at;
        if comptime!(form.head.keep) {
            let kept = turn(own, batch, own.pair * batches + batch, form).at;
            copy(&to.weights, at.first, &mut to.starts, kept.first, of_first, units);
            let start = &mut to_second.starts;
            copy(&to_second.weights, at.second, start, kept.second, of_second, units);
            // Others write these weights below.
            sync_storage();
        }
        load(&mut tiles, x, now.of, form.head);
        learn(&mut tiles, &mut wide, x, &to.weights, &to_second.weights, now, form);
        answer(&mut tiles, &mut to.y, now.of, form.head);
        write(&mut wide, &tiles, now, form);
        add_outer(&mut to.weights, at.first, &tiles.k, &wide.g, true, widen);
        add_outer(&mut to_second.weights, at.second, &wide.a, &tiles.g, true, narrow);
        sync_storage();
    }
}
