//! The kernel of a backward pass: the adjoint of each line of the forward pass, last line first.

use super::super::ttt_linear::arguments::{GivenArrays, GradientArrays, Operands, Sizes};
use super::super::ttt_linear::backward::{
    Adjoint, D_BETA, D_GAMMA, U_G, above, add_tile, below, loss_gradients, no_scale_gradients,
    output_gradients, rate_gradients, share_out, slope_gradients, store_total,
};
use super::super::ttt_linear::inner::load;
use super::super::ttt_linear::tiles::{RowSums, meet, number, own, row_sums, tile, tiles};
use super::arguments::{Form, Way};
use super::inner::{Turn, Wide, gelu_bend, gelu_slope, learn, turn, wide};
use super::products::{add_outer, copy, product};
use cubecl::prelude::*;

/// Shared memory of a pass back.
#[derive(CubeType)]
struct Back {
    adjoint: Adjoint,
    wide: Wide,
    /// dB, then dO1, `[b, F]`.
    d: SharedMemory<f32>,
}

/// The gradient of weights at the end, or zeros.
#[cube]
fn begin(
    from: &Array<f32>,
    to: &mut Array<f32>,
    at: usize,
    #[comptime] there: bool,
    #[comptime] count: usize,
    #[comptime] units: usize,
) {
    if comptime!(there) {
        copy(from, at, to, at, count, units);
    } else {
        for turn in 0..comptime!(count.div_ceil(units)) {
            let place = turn * units + UNIT_POS as usize;
            if place < count {
                to[at + place] = 0.0f32;
            }
        }
    }
}

/// The second layer from dO2 on: E2, the gradients of rates and t, dO1, and dA without what goes through Z2, in the
/// place of O1. Adds B^T dO2 to `d_second`, which is of the mini-batch's end. Ends with a barrier.
#[cube]
fn second_layer(
    back: &mut Back,
    second: &Array<f32>,
    d_second: &mut Array<f32>,
    to: &mut GradientArrays,
    now: Turn,
    #[comptime] form: Form,
) {
    let (of, wider) = (now.of, now.wider);
    let (at, d_at) = (now.at.second, now.end.second);
    let adjoint = &mut back.adjoint;
    let wide = &mut back.wide;
    let tiles = &mut adjoint.tiles;
    let narrow = comptime!(form.narrow(Way::Biased));
    let turned = comptime!(form.widen(Way::Transposed));
    meet(&mut adjoint.d_s, &tiles.n, &tiles.g, 0.0f32, form.head);
    product(&mut adjoint.e, &wide.a, d_second, d_at, &mut tiles.meeting, narrow);
    let of_u = comptime!(RowSums { place: U_G, products: true, form: form.head });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.g, &mut tiles.meeting, of_u);
    rate_gradients(tiles, &adjoint.d_s, &tiles.p, to, of, false, form.head);
    slope_gradients(&mut adjoint.e, &tiles.n, &tiles.p, tiles, of, form.head);
    share_out(&mut adjoint.d_s, tiles, form.head);

    product(&mut back.d, &tiles.n, second, at, &mut tiles.meeting, turned);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            let more = above(&adjoint.d_s, &wide.a, own.row, wider.own.column, form.wide);
            back.d[own.at] = (back.d[own.at] + more) * gelu_slope(wide.o[own.at]);
        }
    }
    sync_cube();
    product(&mut wide.o, &tiles.g, d_second, d_at, &mut tiles.meeting, turned);
    let all = tiles.scale[comptime!(form.wide.rows - 1)];
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            let read = below(&adjoint.d_s, &wide.b, own.row, wider.own.column, form.wide);
            wide.o[own.at] = read - all * tiles.rate[own.row] * wide.o[own.at];
        }
    }
    add_outer(d_second, d_at, &wide.b, &tiles.n, true, narrow);
    sync_cube();
}

/// The first layer from dO1 on: the gradients of rates and t, dY in the place of G1, E1 Y gelu''(Z1) in that of Y, and
/// dG2. U1 and E1 take the place of B, and the product of G1 with dW1', which is in `to.weights`, that of dO2. Adds
/// dY^T G2 to `d_second`. Ends with a barrier.
#[cube]
fn first_layer(
    back: &mut Back,
    second: &Array<f32>,
    d_second: &mut Array<f32>,
    to: &mut GradientArrays,
    now: Turn,
    #[comptime] form: Form,
) {
    let (of, wider, at, d_at) = (now.of, now.wider, now.at, now.end);
    let adjoint = &mut back.adjoint;
    let wide = &mut back.wide;
    let tiles = &mut adjoint.tiles;
    let widen = comptime!(form.widen(Way::Biased));
    let (narrow, turned) = comptime!((form.narrow(Way::Added), form.narrow(Way::Transposed)));
    meet(&mut adjoint.d_s, &back.d, &wide.g, 0.0f32, form.wide);
    product(&mut wide.b, &tiles.k, &to.weights, d_at.first, &mut tiles.meeting, widen);
    let of_u = comptime!(RowSums { place: U_G, products: true, form: form.wide });
    row_sums(&mut tiles.sums, &wide.b, &wide.g, &mut tiles.meeting, of_u);
    rate_gradients(tiles, &adjoint.d_s, &wide.p, to, of, true, form.wide);
    slope_gradients(&mut wide.b, &back.d, &wide.p, tiles, wider, form.wide);
    share_out(&mut adjoint.d_s, tiles, form.wide);

    product(&mut tiles.n, &wide.g, &to.weights, d_at.first, &mut tiles.meeting, turned);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            let (z, e) = (wide.z[own.at], wide.b[own.at]);
            wide.g[own.at] = e * gelu_slope(z);
            wide.y[own.at] *= e * gelu_bend(z);
        }
    }
    sync_cube();
    add_outer(d_second, d_at.second, &wide.g, &tiles.g, false, narrow);
    product(&mut adjoint.e, &wide.g, second, at.second, &mut tiles.meeting, narrow);
}

/// dZ1, once dZ2 is there, and with it all of dW1, dW2, dQ and dK. Ends with a barrier of the storage.
#[cube]
fn inputs(
    back: &mut Back,
    first: &Array<f32>,
    second: &Array<f32>,
    d_second: &mut Array<f32>,
    to: &mut GradientArrays,
    now: Turn,
    #[comptime] form: Form,
) {
    let (of, wider, at, d_at) = (now.of, now.wider, now.at, now.end);
    let adjoint = &mut back.adjoint;
    let wide = &mut back.wide;
    let tiles = &mut adjoint.tiles;
    let (widen, narrow) = comptime!((form.widen(Way::Biased), form.narrow(Way::Biased)));
    let more = comptime!(form.widen(Way::TransposedAdded));
    let turned = comptime!(form.narrow(Way::Transposed));
    add_outer(d_second, d_at.second, &wide.a, &adjoint.e, true, narrow);
    product(&mut wide.o, &adjoint.e, second, at.second, &mut tiles.meeting, more);
    for pass in 0..comptime!(form.wide.turns()) {
        let own = number(wider, pass, form.wide);
        if own.there {
            wide.y[own.at] += wide.o[own.at] * gelu_slope(wide.z[own.at]);
        }
    }
    sync_cube();
    add_outer(&mut to.weights, d_at.first, &tiles.q, &back.d, true, widen);
    add_outer(&mut to.weights, d_at.first, &tiles.k, &wide.y, true, widen);
    let all = tiles.scale[comptime!(form.head.rows - 1)];
    for pass in 0..comptime!(form.head.turns()) {
        let own = number(of, pass, form.head);
        if own.there {
            let (row, column) = (own.row, of.own.column);
            let met = below(&adjoint.d_s, &tiles.q, row, column, form.head);
            to.k[own.from] += met - all * tiles.rate[row] * tiles.n[own.at];
            to.q[own.from] += above(&adjoint.d_s, &tiles.k, row, column, form.head);
        }
    }
    product(&mut tiles.x, &back.d, first, at.first, &mut tiles.meeting, turned);
    add_tile(&mut to.q, &tiles.x, of, form.head);
    product(&mut tiles.x, &wide.y, first, at.first, &mut tiles.meeting, turned);
    add_tile(&mut to.k, &tiles.x, of, form.head);
    sync_storage();
}

/// The kernel of [`backward`](super::backward). `x` has the first layer's weights of each mini-batch's start, `second`
/// those of the other.
#[cube(launch_unchecked)]
pub(super) fn ttt_mlp_backward(
    x: &Operands,
    second: &Array<f32>,
    given: &GivenArrays,
    given_second: &Array<f32>,
    to: &mut GradientArrays,
    to_second: &mut Array<f32>,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let head = comptime!(form.head);
    let (units, weights) = comptime!((head.units(), form.weights()));
    let own = own(x, sizes, head);
    let mut back = Back {
        adjoint: Adjoint {
            tiles: tiles(head),
            e: tile(head),
            d_s: SharedMemory::<f32>::new(comptime!(head.rows * head.rows)),
        },
        wide: wide(form),
        d: tile(form.wide),
    };
    let mut totals = Array::<f32>::new(3usize);
    totals[D_GAMMA] = 0.0f32;
    totals[D_BETA] = 0.0f32;
    let batches = sizes.mini_batches as usize;
    let d_at = turn(own, 0usize, own.pair, form).end;
    no_scale_gradients(to, own, head);
    begin(&given.d_weights, &mut to.weights, d_at.first, form.there[0], weights[0], units);
    begin(given_second, to_second, d_at.second, form.there[1], weights[1], units);
    sync_storage();
    for step in 0..batches {
        let batch = batches - 1 - step;
        let now = turn(own, batch, own.pair * batches + batch, form);
        load(&mut back.adjoint.tiles, x, now.of, head);
        learn(&mut back.adjoint.tiles, &mut back.wide, x, &x.weights, second, now, form);
        output_gradients(&mut back.adjoint, &mut totals, given, to, now.of, head);
        second_layer(&mut back, second, to_second, to, now, form);
        first_layer(&mut back, second, to_second, to, now, form);
        loss_gradients(&mut back.adjoint, &mut totals, x, to, now.of, head);
        inputs(&mut back, &x.weights, second, to_second, to, now, form);
    }
    let meeting = &mut back.adjoint.tiles.meeting;
    store_total(&mut to.norm_weight, totals[D_GAMMA], meeting, own, head);
    store_total(&mut to.norm_bias, totals[D_BETA], meeting, own, head);
}
