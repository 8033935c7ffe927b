//! One chunk of the state pass, forward and backward.

use crate::chunkwise::arguments::{IntraChunk, Operands, StatePass};
use crate::chunkwise::chunk::Place;
use crate::chunkwise::intra_chunk::{ProducerTiles, decay_factors};
use crate::chunkwise::plan::Plan;
use crate::chunkwise::state::{
    Block, State, add, decay_state, load_block, output_column, output_row, own_columns, publish,
    reduce_split_k, save_chunk_state, scale_tokens, stores, token,
};
use crate::chunkwise::state_products::{
    block_product, block_product_out, outer_update, state_product, state_product_out,
};
use crate::chunkwise::state_tiles::{
    StateTiles, load_a_ak_v, load_chunk, load_erase_rows, load_key_rows, load_query_rows,
    load_square, load_values, load_write_rows,
};
use crate::chunkwise::task::Task;
use crate::tile::{Acc, Pair, Rows, put_four, put_out, set, zeros};
use cubecl::prelude::*;

/// One chunk forward.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step_forward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    u: &mut Block<E, M>,
    tiles: &mut StateTiles<E, N>,
    produced: &ProducerTiles<E, M>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    o: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let fragments = comptime!(plan.block_fragments());
    let outputs = comptime!(!task.local());
    load_chunk::<F, E, G, N>(tiles, intra, &x.v, place, first, plan);
    if comptime!(task.keep && outputs) {
        save_chunk_state::<E, E, M, W>(s, &mut pass.states, place.index, first, plan);
    }
    load_block::<E, N, M>(u, &tiles.values, tiles.at_values, plan);
    if comptime!(variant.solves()) {
        let mut retrieved = zeros(fragments);
        for slice in 0..comptime!(plan.key_slices()) {
            load_erase_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            state_product::<E, N, M>(
                &mut retrieved,
                &tiles.erase_rows,
                tiles.at_rows,
                s,
                slice,
                plan,
            );
        }
        reduce_split_k::<E, M>(&mut retrieved, s, 0usize, true, plan);
        scale::<E, N>(&mut retrieved, tiles, comptime!(decay_factors::ERASE), plan);
        if comptime!(variant.low_rank()) {
            load_a_ak_v::<E, G, N>(tiles, intra, place, first, plan);
            load_block::<E, N, M>(u, &tiles.a_ak_v, tiles.at_values, plan);
        } else {
            scale::<E, N>(&mut u.acc, tiles, comptime!(decay_factors::BETA), plan);
        }
        add(&mut u.acc, &retrieved, fragments);
        load_square::<E, G, N>(&mut tiles.inverse, &intra.inverse, place, plan);
        publish::<E, M>(u, plan);
        let mut solved = zeros(fragments);
        block_product::<E, N, M>(&mut solved, &tiles.inverse, tiles.at_square, u, false, plan);
        replace(&mut u.acc, &solved, plan);
        if comptime!(task.keep && outputs) {
            keep_block::<E, W>(&mut pass.block, &u.acc, &place.values, first, plan);
        }
    }
    publish::<E, M>(u, plan);
    let mut out = zeros(comptime!(if outputs { fragments } else { 0 }));
    if comptime!(outputs) {
        for slice in 0..comptime!(plan.key_slices()) {
            load_query_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            state_product_out::<E, N, M>(
                &mut out,
                &tiles.query_rows,
                tiles.at_rows,
                s,
                slice,
                plan,
            );
        }
        let from = comptime!(plan.output_fragments());
        reduce_split_k::<E, M>(&mut out, s, from, comptime!(!variant.solves()), plan);
        scale_rows::<E, N>(&mut out, tiles, plan);
        if comptime!(variant.low_rank()) {
            load_square::<E, G, N>(&mut tiles.a_qu, &intra.a_qb, place, plan);
        } else {
            load_square::<E, G, N>(&mut tiles.a_qu, &intra.a_qk, place, plan);
        }
        if comptime!(plan.has_producers()) {
            block_product_out::<E, M, M>(&mut out, &produced.a_qk, tiles.at_square, u, plan);
        } else {
            block_product_out::<E, N, M>(&mut out, &tiles.a_qu, tiles.at_square, u, plan);
        }
        if comptime!(!variant.low_rank()) {
            // Before the write: its registers are free then.
            keep_output::<F, W>(o, &out, &place.values, first, plan);
        }
    }
    decay_state::<E, M>(
        s,
        last_scale::<E, N>(tiles, plan),
        &intra.chunk_decay,
        total_start(place, plan),
        plan,
    );
    scale::<E, N>(&mut u.acc, tiles, comptime!(decay_factors::KEY_TO_END), plan);
    publish::<E, M>(u, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_write_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
        outer_update::<E, N, M>(s, &tiles.write_rows, tiles.at_rows, u, slice, plan);
    }
    if comptime!(variant.low_rank()) {
        // k^T v, which no a S enters.
        load_values::<F, E, G, N>(tiles, &x.v, place, first, plan);
        load_block::<E, N, M>(u, &tiles.values, tiles.at_values, plan);
        publish::<E, M>(u, plan);
        if comptime!(outputs) {
            load_square::<E, G, N>(&mut tiles.a_qv, &intra.a_qk, place, plan);
            block_product_out::<E, N, M>(&mut out, &tiles.a_qv, tiles.at_square, u, plan);
        }
        scale::<E, N>(&mut u.acc, tiles, comptime!(decay_factors::KEY_TO_END), plan);
        publish::<E, M>(u, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            load_key_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            outer_update::<E, N, M>(s, &tiles.key_rows, tiles.at_rows, u, slice, plan);
        }
        if comptime!(outputs) {
            keep_output::<F, W>(o, &out, &place.values, first, plan);
        }
    }
}

/// One chunk backward.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step_backward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    r: &mut Block<E, M>,
    tiles: &mut StateTiles<E, N>,
    produced: &ProducerTiles<E, M>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    d_o: &Array<Vector<F, G>>,
    d_v: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let fragments = comptime!(plan.block_fragments());
    load_chunk::<F, E, G, N>(tiles, intra, d_o, place, first, plan);
    let outputs = comptime!(!task.local());
    let with_a_qk = comptime!(task.applies_a_qk(variant));
    if comptime!(outputs) {
        save_chunk_state::<E, E, M, W>(s, &mut pass.states, place.index, first, plan);
    }
    let mut retrieved = zeros(comptime!(if with_a_qk { fragments } else { 0 }));
    if comptime!(with_a_qk) {
        for slice in 0..comptime!(plan.key_slices()) {
            load_write_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            state_product::<E, N, M>(
                &mut retrieved,
                &tiles.write_rows,
                tiles.at_rows,
                s,
                slice,
                plan,
            );
        }
        reduce_split_k::<E, M>(&mut retrieved, s, 0usize, true, plan);
        scale::<E, N>(&mut retrieved, tiles, comptime!(decay_factors::KEY_TO_END), plan);
    }
    load_block::<E, N, M>(r, &tiles.values, tiles.at_values, plan);
    if comptime!(with_a_qk) {
        if comptime!(variant.low_rank()) {
            load_square::<E, G, N>(&mut tiles.a_qu, &intra.a_qb, place, plan);
        } else {
            load_square::<E, G, N>(&mut tiles.a_qu, &intra.a_qk, place, plan);
        }
        publish::<E, M>(r, plan);
        if comptime!(plan.has_producers()) {
            block_product::<E, M, M>(
                &mut retrieved,
                &produced.a_qk,
                tiles.at_square,
                r,
                true,
                plan,
            );
        } else {
            block_product::<E, N, M>(&mut retrieved, &tiles.a_qu, tiles.at_square, r, true, plan);
        }
    }
    if comptime!(outputs && !variant.solves()) {
        // Before the write: its registers are free then.
        keep_block::<F, W>(d_v, &retrieved, &place.values, first, plan);
    }
    // Low rank: v is also written as it is, with k.
    let passes = comptime!(variant.low_rank() && outputs);
    let mut plain = zeros(comptime!(if passes { fragments } else { 0 }));
    if comptime!(passes) {
        for slice in 0..comptime!(plan.key_slices()) {
            load_key_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            state_product::<E, N, M>(&mut plain, &tiles.key_rows, tiles.at_rows, s, slice, plan);
        }
        reduce_split_k::<E, M>(&mut plain, s, 0usize, false, plan);
        scale::<E, N>(&mut plain, tiles, comptime!(decay_factors::KEY_TO_END), plan);
        load_square::<E, G, N>(&mut tiles.a_qv, &intra.a_qk, place, plan);
        block_product::<E, N, M>(&mut plain, &tiles.a_qv, tiles.at_square, r, true, plan);
    }
    // dS += Q~^T dO.
    decay_state::<E, M>(
        s,
        last_scale::<E, N>(tiles, plan),
        &intra.chunk_decay,
        total_start(place, plan),
        plan,
    );
    scale::<E, N>(&mut r.acc, tiles, comptime!(decay_factors::QUERY), plan);
    publish::<E, M>(r, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_query_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
        outer_update::<E, N, M>(s, &tiles.query_rows, tiles.at_rows, r, slice, plan);
    }
    if comptime!(variant.solves()) {
        replace(&mut r.acc, &retrieved, plan);
        load_square::<E, G, N>(&mut tiles.inverse, &intra.inverse, place, plan);
        publish::<E, M>(r, plan);
        let mut solved = zeros(fragments);
        block_product::<E, N, M>(&mut solved, &tiles.inverse, tiles.at_square, r, true, plan);
        replace(&mut r.acc, &solved, plan);
        if comptime!(outputs) {
            keep_block::<E, W>(&mut pass.block, &r.acc, &place.values, first, plan);
        }
        if comptime!(passes) {
            load_square::<E, G, N>(&mut tiles.a_ak, &intra.a_ak, place, plan);
            publish::<E, M>(r, plan);
            block_product::<E, N, M>(&mut plain, &tiles.a_ak, tiles.at_square, r, true, plan);
            keep_block::<F, W>(d_v, &plain, &place.values, first, plan);
        }
        scale::<E, N>(&mut r.acc, tiles, comptime!(decay_factors::ERASE), plan);
        publish::<E, M>(r, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            load_erase_rows::<F, E, G, N>(tiles, x, intra, place, slice, plan);
            outer_update::<E, N, M>(s, &tiles.erase_rows, tiles.at_rows, r, slice, plan);
        }
    }
}

#[cube]
fn replace(acc: &mut Acc, by: &Acc, #[comptime] plan: Plan) {
    #[unroll]
    for f in 0..comptime!(plan.block_fragments()) {
        set(acc.index_mut(f), 0usize, by.index(f)[0usize]);
        set(acc.index_mut(f), 1usize, by.index(f)[1usize]);
    }
}

/// Multiplies each token's row of a block by its entry in row `which` of the decay factors.
#[cube]
fn scale<E: Float, N: Size>(
    acc: &mut Acc,
    tiles: &StateTiles<E, N>,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let by_beta = comptime!(
        which == decay_factors::BETA || (which == decay_factors::ERASE && plan.variant.delta())
    );
    if comptime!(plan.variant.scalar() || by_beta) {
        scale_tokens(
            acc,
            &tiles.decay_factors,
            tiles.at_decay_factors + comptime!(which * plan.chunk),
            plan,
        );
    }
}

/// Chunk decay e^{G_C} of a scalar decay.
#[cube]
pub(crate) fn last_scale<E: Float, N: Size>(
    tiles: &StateTiles<E, N>,
    #[comptime] plan: Plan,
) -> f32 {
    tiles.decay_factors[tiles.at_decay_factors
        + comptime!(decay_factors::FROM_START * plan.chunk + plan.chunk - 1)]
}

#[cube]
pub(crate) fn total_start(place: &Place, #[comptime] plan: Plan) -> usize {
    place.index * comptime!(plan.key_width)
}

/// Multiplies the rows of an output block by the queries' decay.
#[cube]
fn scale_rows<E: Float, N: Size>(acc: &mut Acc, tiles: &StateTiles<E, N>, #[comptime] plan: Plan) {
    if comptime!(plan.variant.scalar()) {
        #[unroll]
        for f in 0..comptime!(plan.output_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let i = min(output_row(f, h, plan), comptime!(plan.chunk - 1));
                let at = tiles.at_decay_factors + comptime!(decay_factors::QUERY * plan.chunk) + i;
                let x = acc.index(f)[h] * Pair::new(tiles.decay_factors[at]);
                set(acc.index_mut(f), h, x);
            }
        }
    }
}

#[cube]
fn keep_output<F: Float, W: Size>(
    o: &mut Array<Vector<F, W>>,
    acc: &Acc,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.value_width);
    if comptime!(plan.staged()) {
        let lane = UNIT_POS as usize % 32;
        let row = output_row(0usize, 0usize, plan);
        let column = own_columns(plan) + lane % 2 * 8 + lane % 4 / 2 * 4;
        let start = (rows.start + row * rows.stride + first + column) / 4;
        #[unroll]
        for m in 0..comptime!(plan.output_fragments() / 2) {
            #[unroll]
            for h in 0..2usize {
                let down = comptime!(m * 16 + h * 8);
                let left = acc.index(comptime!(2 * m))[h];
                let right = acc.index(comptime!(2 * m + 1))[h];
                let there = row + down < rows.valid;
                let at = start + rows.stride / 4 * down;
                put_four::<F, W>(o, at, left, right, lane % 2 == 1, there, 1u32);
            }
        }
    } else {
        #[unroll]
        for f in 0..comptime!(plan.output_fragments()) {
            let j = first + output_column(f, plan);
            #[unroll]
            for h in 0..2usize {
                let i = output_row(f, h, plan);
                if i < rows.valid && j < width {
                    let at = rows.start + i * rows.stride + j;
                    put_out::<F, W>(o, at, acc.index(f)[h], width - j);
                }
            }
        }
    }
}

/// Writes a block to `[B, T, H, V]`.
#[cube]
fn keep_block<E: Float, W: Size>(
    to: &mut Array<Vector<E, W>>,
    acc: &Acc,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.engine == crate::Engine::Mma) {
        // The block is transposed: neighbouring lanes swap pairs, so that each holds two neighbouring
        // columns of one token, and then four.
        let lane = UNIT_POS as usize % 32;
        let odd = lane / 4 % 2;
        let second = lane / 8 % 2 == 1;
        let row = token(0usize, 0usize, 0usize, plan) + odd;
        let column = own_columns(plan) + lane / 8 % 2 * 8 + lane / 16 * 4;
        let start = (rows.start + row * rows.stride + first + column) / 4;
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            let low = to_row_major(acc.index(f)[0usize], odd == 1);
            let high = to_row_major(acc.index(f)[1usize], odd == 1);
            let there = row + comptime!(f * 8) < rows.valid && stores(f, plan);
            let at = start + rows.stride / 4 * comptime!(f * 8);
            put_four::<E, W>(to, at, low, high, second, there, 8u32);
        }
    } else {
        keep_output::<E, W>(to, acc, rows, first, plan);
    }
}

/// Of two columns by two tokens on two lanes, four apart: both columns of one token.
#[cube]
fn to_row_major(x: Pair, odd: bool) -> Pair {
    let other = plane_shuffle_xor(select(odd, x[0], x[1]), 4u32);
    let mut y = Pair::empty();
    y[0] = select(odd, other, x[0]);
    y[1] = select(odd, x[1], other);
    y
}
