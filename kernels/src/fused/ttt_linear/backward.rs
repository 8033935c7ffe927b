//! The kernel of a backward pass: the adjoint of each line of the forward pass, last line first.

use super::arguments::{Form, GivenArrays, GradientArrays, Operands, Sizes};
use super::inner::{H_X, learn, load, mean, o_size, target, z_size};
use super::tiles::{
    MiniBatch, Own, RowSums, Tiles, add_product, column_sum, load_run, meet, mini_batch, multiply,
    number, own, row_sums, store_run, tile, tiles, token,
};
use cubecl::prelude::*;

/// Places of sums over rows, each used again once its readers are done: of dN N and of E; of U G, E X and dX X; of
/// E G.
const D_N_N: usize = 4;
const E: usize = 4;
pub(in crate::fused) const U_G: usize = 5;
const E_X: usize = 5;
const D_X_X: usize = 5;
const E_G: usize = 6;

/// Places in a unit's [`Carried::totals`]: dc, dgamma and dbeta of its column.
const D_C: usize = 0;
pub(in crate::fused) const D_GAMMA: usize = 1;
pub(in crate::fused) const D_BETA: usize = 2;

/// Shared memory of a pass back.
#[derive(CubeType)]
pub(in crate::fused) struct Adjoint {
    pub(in crate::fused) tiles: Tiles,
    /// dN, U, E, dX and dZ, one after the other, `[b, K]`.
    pub(in crate::fused) e: SharedMemory<f32>,
    /// dO G^T, then share dS, `[b, b]`.
    pub(in crate::fused) d_s: SharedMemory<f32>,
}

/// Numbers that a unit carries from a mini-batch to the one before.
#[derive(CubeType)]
struct Carried {
    /// Its parts of dW and of dW's transpose.
    d_w: Array<f32>,
    d_w_transposed: Array<f32>,
    totals: Array<f32>,
}

#[cube]
fn carried(given: &GivenArrays, own: Own, #[comptime] form: Form) -> Carried {
    let at = own.pair * comptime!(form.weights());
    let mut totals = Array::<f32>::new(3usize);
    totals[D_C] = 0.0f32;
    totals[D_GAMMA] = 0.0f32;
    totals[D_BETA] = 0.0f32;
    if comptime!(form.given[1]) {
        totals[D_C] = given.d_weights[at + comptime!(form.width * form.width) + own.column];
        Carried {
            d_w: load_run(&given.d_weights, at, own, false, form),
            d_w_transposed: load_run(&given.d_weights, at, own, true, form),
            totals,
        }
    } else {
        Carried { d_w: zeros(form), d_w_transposed: zeros(form), totals }
    }
}

#[cube]
fn zeros(#[comptime] form: Form) -> Array<f32> {
    let mut run = Array::<f32>::new(comptime!(form.run()));
    #[unroll]
    for r in 0..comptime!(form.run()) {
        run[r] = 0.0f32;
    }
    run
}

/// dO, in place of O. Ends with a barrier.
#[cube]
pub(in crate::fused) fn output_gradients(
    adjoint: &mut Adjoint,
    totals: &mut Array<f32>,
    given: &GivenArrays,
    to: &mut GradientArrays,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let n = adjoint.tiles.n[own.at] / o_size(&adjoint.tiles, of, own.row, form);
            let mut d_y = 0.0f32;
            if comptime!(form.given[0]) {
                d_y = given.d_y[own.from];
            }
            adjoint.tiles.n[own.at] = n;
            adjoint.e[own.at] = of.own.gamma * d_y;
            totals[D_GAMMA] += d_y * n;
            totals[D_BETA] += d_y;
            to.q[own.from] = d_y;
        }
    }
    sync_cube();
    let tiles = &mut adjoint.tiles;
    let of_n = comptime!(RowSums { place: D_N_N, products: true, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.n, &mut tiles.meeting, of_n);
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let along = tiles.n[own.at] * mean(tiles, own.row, D_N_N, form);
            let size = o_size(tiles, of, own.row, form);
            tiles.n[own.at] = (adjoint.e[own.at] - along) / size;
        }
    }
    sync_cube();
}

/// E and share dS, and the gradients of rates and t. Ends with a barrier.
#[cube]
fn inner_gradients(
    adjoint: &mut Adjoint,
    carried: &Carried,
    to: &mut GradientArrays,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    let tiles = &mut adjoint.tiles;
    meet(&mut adjoint.d_s, &tiles.n, &tiles.g, 0.0f32, form);
    let d_c = carried.totals[D_C];
    multiply(&mut adjoint.e, &tiles.k, &carried.d_w, d_c, &mut tiles.meeting, form);
    let of_u = comptime!(RowSums { place: U_G, products: true, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.g, &mut tiles.meeting, of_u);
    rate_gradients(tiles, &adjoint.d_s, &tiles.p, to, of, false, form);
    slope_gradients(&mut adjoint.e, &tiles.n, &tiles.p, tiles, of, form);
    share_out(&mut adjoint.d_s, tiles, form);
}

/// dG in place of U, of rows that `p` has met and whose gradients of O are `d_o`. Ends with a barrier.
#[cube]
pub(in crate::fused) fn slope_gradients(
    u: &mut SharedMemory<f32>,
    d_o: &SharedMemory<f32>,
    p: &SharedMemory<f32>,
    tiles: &Tiles,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    let (rows, stride) = comptime!((form.rows, form.stride()));
    let last = tiles.scale[comptime!(rows - 1)];
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let mut sum = last * u[own.at];
            for i in own.row..rows {
                let share = tiles.scale[i] * p[i * rows + own.row];
                sum += share * d_o[i * stride + of.own.column];
            }
            u[own.at] = -(tiles.rate[own.row] * sum);
        }
    }
    sync_cube();
}

/// share dS, from products of dO and G. Ends with a barrier.
#[cube]
pub(in crate::fused) fn share_out(
    d_s: &mut SharedMemory<f32>,
    tiles: &Tiles,
    #[comptime] form: Form,
) {
    let rows = comptime!(form.rows);
    for turn in 0..comptime!((rows * rows).div_ceil(form.units())) {
        let at = turn * comptime!(form.units()) + UNIT_POS as usize;
        if at < comptime!(rows * rows) {
            d_s[at] *= -(tiles.scale[at / rows] * tiles.rate[at % rows]);
        }
    }
    sync_cube();
}

/// Zeros where [`rate_gradients`] adds up dt, by the units that do.
#[cube]
pub(in crate::fused) fn no_scale_gradients(
    to: &mut GradientArrays,
    own: Own,
    #[comptime] form: Form,
) {
    for turn in 0..comptime!(form.rows.div_ceil(form.units())) {
        let row = turn * comptime!(form.units()) + UNIT_POS as usize;
        if row < form.rows {
            to.scale[own.pair * form.rows + row] = 0.0f32;
        }
    }
}

/// drate of each token, and this mini-batch's part of dt, from products of dO and G, from P and from sums of U G;
/// added where `more` says that another layer's are there.
#[cube]
pub(in crate::fused) fn rate_gradients(
    tiles: &Tiles,
    products: &SharedMemory<f32>,
    p: &SharedMemory<f32>,
    to: &mut GradientArrays,
    of: MiniBatch,
    #[comptime] more: bool,
    #[comptime] form: Form,
) {
    let (rows, units) = comptime!((form.rows, form.units()));
    let u = comptime!(U_G * form.rows);
    for turn in 0..comptime!(rows.div_ceil(units)) {
        let row = turn * units + UNIT_POS as usize;
        if row < rows {
            let mut of_rate = tiles.scale[rows - 1] * tiles.sums[u + row];
            for i in row..rows {
                let at = i * rows + row;
                of_rate += tiles.scale[i] * products[at] * p[at];
            }
            let place = token(of, row);
            if comptime!(more) {
                to.rate[place] -= of_rate;
            } else {
                to.rate[place] = -of_rate;
            }
            let mut of_scale = 0.0f32;
            for j in 0..row + 1 {
                let at = row * rows + j;
                of_scale += tiles.rate[j] * products[at] * p[at];
                if row == comptime!(form.rows - 1) {
                    of_scale += tiles.rate[j] * tiles.sums[u + j];
                }
            }
            to.scale[of.own.pair * rows + row] -= of_scale;
        }
    }
}

/// dZ in place of E, dv, and the parts of dk, dgamma and dbeta that go through the inner loss. Ends with a barrier.
#[cube]
pub(in crate::fused) fn loss_gradients(
    adjoint: &mut Adjoint,
    totals: &mut Array<f32>,
    x: &Operands,
    to: &mut GradientArrays,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    let tiles = &mut adjoint.tiles;
    let of_e = comptime!(RowSums { place: E, products: false, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.x, &mut tiles.meeting, of_e);
    let of_e_x = comptime!(RowSums { place: E_X, products: true, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.x, &mut tiles.meeting, of_e_x);
    let of_e_g = comptime!(RowSums { place: E_G, products: true, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.g, &mut tiles.meeting, of_e_g);
    let gamma = of.own.gamma;
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let normal = tiles.x[own.at];
            let e = adjoint.e[own.at];
            let target = target(tiles, x, of, own);
            let size = z_size(tiles, of, own.row, form);
            let h = gamma * (gamma * normal - target);
            let along = mean(tiles, own.row, E_X, form);
            let d_h = (e - mean(tiles, own.row, E, form) - normal * along) / size;
            let through = (e * mean(tiles, own.row, H_X, form) + h * along) / size;
            adjoint.e[own.at] = gamma * gamma * d_h - through;
            totals[D_GAMMA] += d_h * (2.0f32 * gamma * normal - target);
            totals[D_BETA] += gamma * d_h;
            to.v[own.from] = -(gamma * d_h);
            to.k[own.from] = gamma * d_h;
        }
    }
    sync_cube();
    let of_x = comptime!(RowSums { place: D_X_X, products: true, form });
    row_sums(&mut tiles.sums, &adjoint.e, &tiles.x, &mut tiles.meeting, of_x);
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let along = mean(tiles, own.row, E_G, form) + mean(tiles, own.row, D_X_X, form);
            let d_z = adjoint.e[own.at] - tiles.x[own.at] * along;
            adjoint.e[own.at] = d_z / z_size(tiles, of, own.row, form);
        }
    }
    sync_cube();
}

/// Adds what products with weights, with their gradients and with other rows give dq and dk. The tile of X holds the
/// products. Ends with a barrier.
#[cube]
fn key_gradients(
    adjoint: &mut Adjoint,
    d_w_transposed: &Array<f32>,
    transposed: &Array<f32>,
    to: &mut GradientArrays,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    let tiles = &mut adjoint.tiles;
    let rows = comptime!(form.rows);
    multiply(&mut tiles.x, &tiles.g, d_w_transposed, 0.0f32, &mut tiles.meeting, form);
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            let row = own.row;
            let mut d_k = -(tiles.scale[rows - 1] * tiles.rate[row] * tiles.x[own.at]);
            d_k += below(&adjoint.d_s, &tiles.q, row, of.own.column, form);
            to.k[own.from] += d_k;
            to.q[own.from] += above(&adjoint.d_s, &tiles.k, row, of.own.column, form);
        }
    }
    sync_cube();
    multiply(&mut tiles.x, &tiles.n, transposed, 0.0f32, &mut tiles.meeting, form);
    add_tile(&mut to.q, &tiles.x, of, form);
    multiply(&mut tiles.x, &adjoint.e, transposed, 0.0f32, &mut tiles.meeting, form);
    add_tile(&mut to.k, &tiles.x, of, form);
}

/// A sum of rows up to this one, by this row of a matrix `[b, b]`.
#[cube]
pub(in crate::fused) fn above(
    by: &SharedMemory<f32>,
    x: &SharedMemory<f32>,
    row: usize,
    column: usize,
    #[comptime] form: Form,
) -> f32 {
    let mut sum = 0.0f32;
    for j in 0..row + 1 {
        sum += by[row * form.rows + j] * x[j * comptime!(form.stride()) + column];
    }
    sum
}

/// A sum of rows from this one on, by this column of a matrix `[b, b]`.
#[cube]
pub(in crate::fused) fn below(
    by: &SharedMemory<f32>,
    x: &SharedMemory<f32>,
    row: usize,
    column: usize,
    #[comptime] form: Form,
) -> f32 {
    let rows = comptime!(form.rows);
    let mut sum = 0.0f32;
    for i in row..rows {
        sum += by[i * rows + row] * x[i * comptime!(form.stride()) + column];
    }
    sum
}

/// Adds a tile to rows of `[B, T, H, K]`. Ends with a barrier.
#[cube]
pub(in crate::fused) fn add_tile(
    to: &mut Array<f32>,
    tile: &SharedMemory<f32>,
    of: MiniBatch,
    #[comptime] form: Form,
) {
    for turn in 0..comptime!(form.turns()) {
        let own = number(of, turn, form);
        if own.there {
            to[own.from] += tile[own.at];
        }
    }
    sync_cube();
}

/// Sums over the parts of a column, `[B, H, K]`.
#[cube]
pub(in crate::fused) fn store_total(
    to: &mut Array<f32>,
    total: f32,
    meeting: &mut SharedMemory<f32>,
    own: Own,
    #[comptime] form: Form,
) {
    meeting[UNIT_POS as usize] = total;
    sync_cube();
    if own.part == 0 {
        let mut sum = 0.0f32;
        for part in 0..comptime!(form.parts) {
            sum += meeting[part * form.width + own.column];
        }
        to[own.pair * form.width + own.column] = sum;
    }
    sync_cube();
}

/// The kernel of [`backward`](super::backward).
#[cube(launch_unchecked)]
pub(in crate::fused) fn ttt_linear_backward(
    x: &Operands,
    given: &GivenArrays,
    to: &mut GradientArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let own = own(x, sizes, form);
    let mut adjoint = Adjoint {
        tiles: tiles(form),
        e: tile(form),
        d_s: SharedMemory::<f32>::new(comptime!(form.rows * form.rows)),
    };
    let mut carried = carried(given, own, form);
    no_scale_gradients(to, own, form);
    let batches = sizes.mini_batches as usize;
    for back in 0..batches {
        let of = mini_batch(own, batches - 1 - back, form);
        let run = load_run(&x.weights, of.start, own, false, form);
        let bias = x.weights[of.start + comptime!(form.width * form.width) + own.column];
        load(&mut adjoint.tiles, x, of, form);
        learn(&mut adjoint.tiles, x, &run, bias, of, form);
        output_gradients(&mut adjoint, &mut carried.totals, given, to, of, form);
        inner_gradients(&mut adjoint, &carried, to, of, form);
        loss_gradients(&mut adjoint, &mut carried.totals, x, to, of, form);
        let transposed = load_run(&x.weights, of.start, own, true, form);
        key_gradients(&mut adjoint, &carried.d_w_transposed, &transposed, to, of, form);
        let tiles = &adjoint.tiles;
        add_product(&mut carried.d_w, &tiles.q, &tiles.n, own, form);
        add_product(&mut carried.d_w, &tiles.k, &adjoint.e, own, form);
        add_product(&mut carried.d_w_transposed, &tiles.n, &tiles.q, own, form);
        add_product(&mut carried.d_w_transposed, &adjoint.e, &tiles.k, own, form);
        let more = column_sum(&tiles.n, own, form) + column_sum(&adjoint.e, own, form);
        carried.totals[D_C] += more;
    }
    let at = own.pair * comptime!(form.weights());
    store_run(&mut to.weights, at, &carried.d_w, carried.totals[D_C], own, form);
    sync_cube();
    let meeting = &mut adjoint.tiles.meeting;
    store_total(&mut to.norm_weight, carried.totals[D_GAMMA], meeting, own, form);
    store_total(&mut to.norm_bias, carried.totals[D_BETA], meeting, own, form);
}
