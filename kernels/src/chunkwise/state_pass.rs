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
use crate::chunkwise::intra_chunk::{ProducerTiles, produce_scores, producer_tiles};
use crate::chunkwise::plan::Plan;
use crate::chunkwise::sequence_parallel::{WorkRange, nth_chunk, work_range};
use crate::chunkwise::state::{Block, State, block, is_consumer, reset_state, state, store_state};
use crate::chunkwise::state_step::{last_scale, step_backward, step_forward, total_start};
use crate::chunkwise::state_tiles::{StateTiles, copy_chunk_async, select_chunk, state_tiles};
use crate::chunkwise::task::{Span, Task};
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
