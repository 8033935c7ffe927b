//! Inter-chunk state pass: S moves from chunk to chunk of a sequence, dS back in the backward pass.
//!
//! ```text
//! forward, per chunk                              backward, from the last chunk to the first
//!   U  = T (beta v + A~ S)     delta                R' = A_qk^T dO + B^ dS'
//!   U  = T (A_ak v + A~ S)     low rank             R  = T^T R'                 delta, low rank
//!   U  = v                     linear attention     R  = R'                     linear attention
//!   O  = Q~ S + A_qk U  (+ A_qk v, low rank)        dS = e^{G_C} dS' + Q~^T dO + A~^T R
//!   S' = e^{G_C} S + B^^T U  (+ K^^T v)
//! ```
//! S is the state at the chunk's start. A low rank transition has A_qb in front of U. R is the adjoint of the
//! solve; in linear attention it is dv. Low rank has `dv = A_qk^T dO + K^ dS' + A_ak^T R` besides.
//!
//! Work:   a cube a `value_tile` columns of a (sequence, head), or of a segment of it (sequence_parallel.rs):
//!         columns of S never meet. Warp specialisation: in linear attention, where one tile holds all
//!         values, the first planes of a cube are *producers*. They copy tiles and make the next chunk's
//!         A_qk and decay factors, which need no state, while the *consumers* move the state over the
//!         present chunk; the intra-chunk stage is not launched.
//!         Tiles, and how they are filled: state_tiles.rs.
//! Source: DeltaNet's chunk form, arXiv 2406.06484, with the decay of arXiv 2412.06464; the adjoint
//!         goes through the solve, so that neither dW nor dT is ever formed.

use crate::chunkwise::arguments::{IntraChunk, Operands, StatePass};
use crate::chunkwise::chunk::{Place, Sizes};
use crate::chunkwise::intra_chunk::{ProducerTiles, decay_factors, produce_scores, producer_tiles};
use crate::chunkwise::plan::Plan;
use crate::chunkwise::sequence_parallel::{WorkRange, nth_chunk, work_range};
use crate::chunkwise::state::{
    Block, State, add, block, decay_state, is_consumer, load_block, output_column, output_row,
    own_columns, publish, reduce_split_k, reset_state, save_chunk_state, scale_tokens, state,
    store_state, stores, token,
};
use crate::chunkwise::state_products::{
    block_product, block_product_out, outer_update, state_product, state_product_out,
};
use crate::chunkwise::state_tiles::{
    StateTiles, copy_chunk_async, load_a_ak_v, load_chunk, load_erase_rows, load_key_rows,
    load_query_rows, load_square, load_values, load_write_rows, select_chunk, state_tiles,
};
use crate::chunkwise::task::{Span, Task};
use crate::tile::{Acc, Pair, Rows, put_four, put_out, set, zeros};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Cumulative decay since a segment's start: this unit's part of it.
type Left = Sequence<Array<f32>>;

/// The producers' part of a chunk. A local pass of linear attention reads the decay factors alone.
#[cube]
fn produce<E: Float, N: Size, M: Size>(
    next: &mut ProducerTiles<E, M>,
    tiles: &mut StateTiles<E, N>,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    produce_scores::<E, N, M>(
        next,
        tiles.at_square,
        &mut tiles.decay_factors,
        tiles.at_decay_factors,
        &tiles.query_rows,
        &tiles.key_rows,
        tiles.at_rows,
        &tiles.gates,
        tiles.at_gates,
        comptime!(task.applies_a_qk(plan.variant)),
        plan,
    );
}

/// The state pass forward.
#[cube(launch_unchecked)]
pub(crate) fn state_pass_forward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    o: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    pass_over_chunks::<F, E, G, N, M, W>(x, intra, pass, &x.v, o, sizes, task, plan);
}

/// The state pass backward. `pass.start` is the gradient of the last state, `pass.end` that of the first.
#[cube(launch_unchecked)]
pub(crate) fn state_pass_backward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    d_o: &Array<Vector<F, G>>,
    d_v: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    pass_over_chunks::<F, E, G, N, M, W>(x, intra, pass, d_o, d_v, sizes, task, plan);
}

/// A pass over chunks, from the first state to the last. `values` is v or dO; `out` is o or dv.
#[cube]
#[allow(clippy::too_many_arguments)]
fn pass_over_chunks<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    values: &Array<Vector<F, G>>,
    out: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let range = work_range(sizes, task, plan);
    let first = range.first;
    let chunks = range.chunks;
    let mut tiles = state_tiles::<E, N>(task, plan);
    let mut produced = producer_tiles::<E, M>(comptime!(task.applies_a_qk(plan.variant)), plan);
    let mut block = block::<E, M>(plan);
    let mut s = begin_state::<E, M, W>(pass, &range, task, plan);
    let mut left = Left::new();
    #[unroll]
    for _ in 0..comptime!(task.left(plan)) {
        let mut one = Array::<f32>::new(1usize);
        one[0] = 1.0f32;
        left.push(one);
    }
    if comptime!(plan.has_producers()) {
        let barrier = Barrier::shared(comptime!(plan.copying_units() as u32), UNIT_POS == 0);
        sync_cube();
        if !is_consumer(plan) {
            let here = nth_chunk(&range, 0usize, task, plan);
            copy_chunk_async::<F, E, G, N>(
                &mut tiles, &barrier, x, intra, values, &here, first, 0usize, task, plan,
            );
        }
        // Producers are a chunk ahead: of three chunks one is copied, one scored, one consumed. Copies start before
        // the branch: within it they were seen to cost consumers registers.
        for c in 0..chunks + 1 {
            if c < chunks {
                barrier.wait_parity((c % 2) as u32);
            }
            sync_cube();
            if !is_consumer(plan) && c + 1 < chunks {
                let next = nth_chunk(&range, c + 1, task, plan);
                let third = (c + 1) % 3;
                copy_chunk_async::<F, E, G, N>(
                    &mut tiles, &barrier, x, intra, values, &next, first, third, task, plan,
                );
            }
            if is_consumer(plan) {
                if c > 0 {
                    select_chunk::<E, N>(&mut tiles, c - 1, plan);
                    let place = nth_chunk(&range, c - 1, task, plan);
                    step::<F, E, G, N, M, W>(
                        &mut s, &mut block, &mut tiles, &produced, &mut left, x, intra, pass,
                        values, out, &place, first, task, plan,
                    );
                }
            } else if c < chunks {
                select_chunk::<E, N>(&mut tiles, c, plan);
                produce::<E, N, M>(&mut produced, &mut tiles, task, plan);
            }
        }
    } else if comptime!(plan.staged()) {
        let barrier = Barrier::shared(comptime!(plan.copying_units() as u32), UNIT_POS == 0);
        sync_cube();
        if comptime!(plan.stages == 2) {
            let here = nth_chunk(&range, 0usize, task, plan);
            copy_chunk_async::<F, E, G, N>(
                &mut tiles, &barrier, x, intra, values, &here, first, 0usize, task, plan,
            );
        }
        for c in 0..chunks {
            if comptime!(plan.stages == 2) {
                barrier.wait_parity((c % 2) as u32);
                // The other stage is free when every plane is through with the chunk before.
                sync_cube();
                if c + 1 < chunks {
                    let next = nth_chunk(&range, c + 1, task, plan);
                    let half = (c + 1) % 2;
                    copy_chunk_async::<F, E, G, N>(
                        &mut tiles, &barrier, x, intra, values, &next, first, half, task, plan,
                    );
                }
                select_chunk::<E, N>(&mut tiles, c, plan);
            } else {
                sync_cube();
                let here = nth_chunk(&range, c, task, plan);
                copy_chunk_async::<F, E, G, N>(
                    &mut tiles, &barrier, x, intra, values, &here, first, 0usize, task, plan,
                );
                barrier.wait_parity((c % 2) as u32);
            }
            let place = nth_chunk(&range, c, task, plan);
            step::<F, E, G, N, M, W>(
                &mut s, &mut block, &mut tiles, &produced, &mut left, x, intra, pass, values, out,
                &place, first, task, plan,
            );
        }
    } else {
        for c in 0..chunks {
            let place = nth_chunk(&range, c, task, plan);
            step::<F, E, G, N, M, W>(
                &mut s, &mut block, &mut tiles, &produced, &mut left, x, intra, pass, values, out,
                &place, first, task, plan,
            );
        }
    }
    sync_cube();
    if is_consumer(plan) {
        end_state::<E, M, W>(&s, &left, pass, &range, task, plan);
    }
}

/// One chunk of a pass.
#[cube]
#[allow(clippy::too_many_arguments)]
fn step<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    block: &mut Block<E, M>,
    tiles: &mut StateTiles<E, N>,
    produced: &ProducerTiles<E, M>,
    left: &mut Left,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    pass: &mut StatePass<E, W>,
    values: &Array<Vector<F, G>>,
    out: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    if comptime!(task.backward) {
        step_backward::<F, E, G, N, M, W>(
            s, block, tiles, produced, x, intra, pass, values, out, place, first, task, plan,
        );
    } else {
        step_forward::<F, E, G, N, M, W>(
            s, block, tiles, produced, x, intra, pass, out, place, first, task, plan,
        );
    }
    #[unroll]
    for t in 0..comptime!(task.left(plan)) {
        let mut share = last_scale::<E, N>(tiles, plan);
        if comptime!(plan.variant.vector()) {
            let d = UNIT_POS as usize + comptime!(t * plan.units);
            share =
                intra.chunk_decay[total_start(place, plan) + min(d, comptime!(plan.key_width - 1))];
        }
        let old = left.index(t)[0usize];
        fold(left.index_mut(t), old * share);
    }
}

#[cube]
fn fold(to: &mut Array<f32>, x: f32) {
    to[0] = x;
}

/// The state that a pass starts from.
#[cube]
fn begin_state<E: Float, M: Size, W: Size>(
    pass: &mut StatePass<E, W>,
    range: &WorkRange,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) -> State<E, M> {
    let numbers = comptime!(plan.key_width * plan.value_width);
    let slot = (range.memory * range.segments + range.segment) * numbers;
    let mut start = range.memory * numbers;
    let mut first = range.first;
    if comptime!(task.span == Span::Segment) {
        start = slot;
    }
    if comptime!(task.local()) {
        if range.transition {
            // M may be wider than S, and what is read here is not used.
            first = 0usize;
        }
    }
    let mut s = state::<E, M>(&pass.start, start, first, task.given, plan);
    if comptime!(task.local()) {
        let foremost = if comptime!(task.backward) { range.segments - 1 } else { 0usize.runtime() };
        let stay = range.segment == foremost && !range.transition;
        // Producers have registers for this as well, and never use them.
        reset_state::<E, M>(&mut s, stay, range.transition, range.first, plan);
        if stay && is_consumer(plan) {
            store_state::<E, M>(&s, &mut pass.end, slot, first, false, plan);
        }
    }
    s
}

/// Writes the last state of a pass.
#[cube]
fn end_state<E: Float, M: Size, W: Size>(
    s: &State<E, M>,
    left: &Left,
    pass: &mut StatePass<E, W>,
    range: &WorkRange,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let keys = comptime!(plan.key_width);
    let numbers = comptime!(keys * plan.value_width);
    let first = range.first;
    if comptime!(task.local()) {
        let segment = range.memory * range.segments + range.segment;
        if range.transition {
            if comptime!(variant.solves() && !task.backward) {
                let square = comptime!(Plan { value_width: keys, ..plan });
                let at = segment * comptime!(keys * keys);
                store_state::<E, M>(s, &mut pass.transitions, at, first, true, square);
                if comptime!(task.keep) {
                    let half = CUBE_COUNT_Y as usize * range.segments * comptime!(keys * keys);
                    store_state::<E, M>(s, &mut pass.transitions, half + at, first, false, square);
                }
            }
        } else {
            if comptime!(task.backward) {
                store_state::<E, M>(s, &mut pass.end, (segment - 1) * numbers, first, false, plan);
            } else {
                store_state::<E, M>(s, &mut pass.end, (segment + 1) * numbers, first, false, plan);
            }
            if first == 0 {
                #[unroll]
                for t in 0..comptime!(task.left(plan)) {
                    // The first consumers, since producers have not followed decay.
                    let unit = UNIT_POS as usize - comptime!(plan.producers * 32);
                    let d = unit + comptime!(t * plan.units);
                    if comptime!(variant.vector()) {
                        if d < keys {
                            pass.transitions[segment * keys + d] = left.index(t)[0usize];
                        }
                    } else if d == 0 {
                        pass.transitions[segment] = left.index(t)[0usize];
                    }
                }
            }
        }
    } else {
        let last = if comptime!(task.backward) { 0usize.runtime() } else { range.segments - 1 };
        if range.segment == last {
            store_state::<E, M>(s, &mut pass.end, range.memory * numbers, first, false, plan);
        }
    }
}

/// One chunk forward.
#[cube]
#[allow(clippy::too_many_arguments)]
fn step_forward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
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
fn step_backward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
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
fn last_scale<E: Float, N: Size>(tiles: &StateTiles<E, N>, #[comptime] plan: Plan) -> f32 {
    tiles.decay_factors[tiles.at_decay_factors
        + comptime!(decay_factors::FROM_START * plan.chunk + plan.chunk - 1)]
}

#[cube]
fn total_start(place: &Place, #[comptime] plan: Plan) -> usize {
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
