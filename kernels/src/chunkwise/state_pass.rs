//! Inter-chunk state pass: S moves from chunk to chunk of a sequence, dS back in the backward pass.
//!
//! ```text
//! forward, per chunk                              backward, from the last chunk to the first
//!   U  = T (beta v + A~ S)     delta                R' = A_qk^T dO + B^ dS'
//!   U  = T (A_ak v + A~ S)     low rank             R  = T^T R'                 delta, low rank
//!   U  = v                     identity             R  = R'                     identity
//!   O  = Q~ S + A_qk U  (+ A_qk v, low rank)        dS = e^{G_C} dS' + Q~^T dO + A~^T R
//!   S' = e^{G_C} S + B^^T U  (+ K^^T v)
//! ```
//! S is the state at the chunk's start. A low rank transition has A_qb in front of U. R is the adjoint of the
//! solve; in an identity transition it is dv. Low rank has `dv = A_qk^T dO + K^ dS' + A_ak^T R` besides.
//!
//! Work:   a cube a `value_slice` columns of a (sequence, head), or of a segment of it (sequence_parallel.rs):
//!         columns of S never meet. Warp specialisation: in an identity transition, where one tile holds all
//!         values, the first planes of a cube are *producers*. They copy tiles and make the next chunk's
//!         A_qk and decay factors, which need no state, while the *consumers* move the state over the
//!         present chunk; the intra-chunk stage is not launched. So it is in a forward pass of a delta rule that
//!         saves nothing, where warpgroups multiply and erase keys are k: producers make T as well.
//!         Tiles, and how they are filled: state_tiles.rs.
//! Source: DeltaNet's chunk form, arXiv 2406.06484, with the decay of arXiv 2412.06464; the adjoint
//!         goes through the solve, so that neither dW nor dT is ever formed.

use crate::chunkwise::arguments::{IntraChunk, Operands, StatePass};
use crate::chunkwise::chunk::{Place, Sizes};
use crate::chunkwise::plan::{Plan, Schedule, StatePlan};
use crate::chunkwise::producers::{
    NextChunk, prepare_first, produce_inverse, produce_scores, producer_tiles, score_queries,
};
use crate::chunkwise::sequence_parallel::{WorkRange, nth_chunk, work_range};
use crate::chunkwise::state::{State, StateEngine, StatePlace, block, is_consumer, state};
use crate::chunkwise::state_chunk::{
    Pass, PassOutputs, chunk_backward, chunk_decay, chunk_decays_at, chunk_forward,
};
use crate::chunkwise::state_tiles::{PassInputs, copy_chunk_async, select_chunk, state_tiles};
use crate::chunkwise::task::Span;
use crate::tile::{forget_unit, resize_registers, wait_for_copies, wait_for_factors};
use cubecl::intrinsic;
use cubecl::prelude::*;

/// Cumulative decay since a segment's start: this unit's part of it.
type Carried = Sequence<Array<f32>>;

/// The state pass forward.
#[cube(launch_unchecked)]
#[allow(unused_mut)] // it marks what is written
pub(crate) fn state_pass_forward<
    F: Float,
    E: Float,
    G: Size,
    N: Size,
    M: Size,
    W: Size,
    S: StatePlace,
>(
    x: Operands<F, G>,
    intra: IntraChunk<E, G>,
    mut tensors: StatePass<E, W>,
    mut o: Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] plan: StatePlan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    let range = work_range(sizes, plan);
    let values = alias(&x.v);
    let from = inputs::<S::Engine<F, E, G, N, M, W>>(x, intra, values, range.first);
    let to = outputs::<S::Engine<F, E, G, N, M, W>>(tensors, o);
    pass_over_chunks::<S::Engine<F, E, G, N, M, W>>(from, to, &range, plan);
}

/// The state pass backward. `tensors.start` is the gradient of the last state, `tensors.end` that of the first.
#[cube(launch_unchecked)]
#[allow(unused_mut)] // it marks what is written
pub(crate) fn state_pass_backward<
    F: Float,
    E: Float,
    G: Size,
    N: Size,
    M: Size,
    W: Size,
    S: StatePlace,
>(
    x: Operands<F, G>,
    intra: IntraChunk<E, G>,
    mut tensors: StatePass<E, W>,
    d_o: Array<Vector<F, G>>,
    mut d_v: Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] plan: StatePlan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    let range = work_range(sizes, plan);
    let from = inputs::<S::Engine<F, E, G, N, M, W>>(x, intra, d_o, range.first);
    let to = outputs::<S::Engine<F, E, G, N, M, W>>(tensors, d_v);
    pass_over_chunks::<S::Engine<F, E, G, N, M, W>>(from, to, &range, plan);
}

/// The same tensor under a second name.
#[cube]
#[allow(unused_variables)] // an intrinsic's
fn alias<T: CubePrimitive>(x: &Array<T>) -> Array<T> {
    intrinsic!(|_scope| x.clone())
}

#[cube]
fn inputs<P: StateEngine>(
    x: Operands<P::F, P::G>,
    intra: IntraChunk<P::E, P::G>,
    values: Array<Vector<P::F, P::G>>,
    first: usize,
) -> PassInputs<P> {
    PassInputs::<P> { x, intra, values, first }
}

#[cube]
fn outputs<P: StateEngine>(
    tensors: StatePass<P::E, P::W>,
    values: Array<Vector<P::F, P::W>>,
) -> PassOutputs<P> {
    PassOutputs::<P> { tensors, values }
}

/// A pass over chunks, from the first state to the last.
#[cube]
fn pass_over_chunks<P: StateEngine>(
    from: PassInputs<P>,
    to: PassOutputs<P>,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    let mut to = to;
    let tiles = state_tiles::<P>(plan);
    let produced = producer_tiles::<P>(plan);
    let block = block::<P>(plan);
    let state = begin_state::<P>(&mut to, range, plan);
    let mut carried = Carried::new();
    #[unroll]
    for _ in 0..comptime!(plan.carried_decays()) {
        let mut one = Array::<f32>::new(1usize);
        one[0] = 1.0f32;
        carried.push(one);
    }
    let mut pass = Pass::<P> { from, to, tiles, produced, block, state };
    match comptime!(plan.schedule) {
        Schedule::Direct => {
            for c in 0..range.chunks {
                pass_chunk::<P>(&mut pass, &mut carried, range, c, plan);
            }
        }
        Schedule::Staged { stages } => {
            if comptime!(stages == 2) {
                pass_ahead::<P>(&mut pass, &mut carried, range, plan);
            } else {
                pass_in_place::<P>(&mut pass, &mut carried, range, plan);
            }
        }
        Schedule::Specialized { .. } => {
            if comptime!(plan.inverts_ahead()) {
                pass_apart::<P>(&mut pass, &mut carried, range, plan);
            } else {
                pass_specialized::<P>(&mut pass, &mut carried, range, plan);
            }
        }
    }
    if comptime!(!plan.inverts_ahead()) {
        sync_cube();
        if is_consumer(plan) {
            end_state::<P>(&mut pass, &carried, range, plan);
        }
    }
}

/// Waits until the chunk that was copied last is in all units' tiles.
#[cube]
fn wait_for_chunk(#[comptime] plan: StatePlan) {
    if comptime!(plan.warpgroups) {
        wait_for_factors(0usize);
    } else {
        wait_for_copies(0usize);
    }
}

/// Copies a chunk right before it is used.
#[cube]
fn pass_in_place<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &mut Carried,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    for c in 0..range.chunks {
        sync_cube();
        let here = nth_chunk(range, c, plan);
        copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &here, 0usize, plan);
        wait_for_chunk(plan);
        pass_chunk::<P>(pass, carried, range, c, plan);
    }
}

/// Copies the next chunk while one is in use.
#[cube]
fn pass_ahead<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &mut Carried,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    let here = nth_chunk(range, 0usize, plan);
    copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &here, 0usize, plan);
    for c in 0..range.chunks {
        // The other stage is free as well: every plane is through with the chunk before.
        wait_for_chunk(plan);
        if c + 1 < range.chunks {
            let next = nth_chunk(range, c + 1, plan);
            let half = (c + 1) % 2;
            copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &next, half, plan);
        }
        select_chunk::<P>(&mut pass.tiles, c, plan);
        pass_chunk::<P>(pass, carried, range, c, plan);
    }
}

/// Producers are a chunk ahead: of three chunks one is copied, one scored, one consumed. Copies start before the branch:
/// within it they were seen to cost consumers registers.
#[cube]
fn pass_specialized<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &mut Carried,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    if !is_consumer(plan) {
        let here = nth_chunk(range, 0usize, plan);
        copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &here, 0usize, plan);
    }
    for c in 0..range.chunks + 1 {
        wait_for_copies(0usize);
        if !is_consumer(plan) && c + 1 < range.chunks {
            let next = nth_chunk(range, c + 1, plan);
            let third = (c + 1) % 3;
            copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &next, third, plan);
        }
        if is_consumer(plan) {
            if c > 0 {
                select_chunk::<P>(&mut pass.tiles, c - 1, plan);
                pass_chunk::<P>(pass, carried, range, c - 1, plan);
            }
        } else if c < range.chunks {
            select_chunk::<P>(&mut pass.tiles, c, plan);
            produce_scores::<P>(&mut pass.produced, &mut pass.tiles, plan);
        }
    }
}

/// As [`pass_specialized`], but producers and consumers each have a loop, and a register file, of their own: they meet at
/// one barrier a chunk. Consumers write the last state before they end, since registers never come together again.
#[cube]
fn pass_apart<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &mut Carried,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    if is_consumer(plan) {
        resize_registers(comptime!(plan.registers().map(|[_, consumer]| consumer)), true);
        let here = nth_chunk(range, 0usize, plan);
        copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &here, 0usize, plan);
        for c in 0..range.chunks + 1 {
            forget_unit();
            wait_for_chunk(plan);
            if c + 1 < range.chunks {
                let next = nth_chunk(range, c + 1, plan);
                let third = (c + 1) % 3;
                copy_chunk_async::<P>(&mut pass.tiles, &pass.from, &next, third, plan);
            }
            if c > 0 {
                select_chunk::<P>(&mut pass.tiles, c - 1, plan);
                score_queries::<P>(&mut pass.produced, &pass.tiles, plan);
                pass_chunk::<P>(pass, carried, range, c - 1, plan);
            }
        }
        end_state::<P>(pass, carried, range, plan);
    } else {
        resize_registers(comptime!(plan.registers().map(|[producer, _]| producer)), false);
        let (out, tiles) = (&mut pass.produced, &mut pass.tiles);
        let first = nth_chunk(range, 0usize, plan);
        prepare_first::<P>(out, tiles, &pass.from, &first.scalars, plan);
        for c in 0..range.chunks + 1 {
            forget_unit();
            wait_for_chunk(plan);
            if c < range.chunks {
                select_chunk::<P>(tiles, c, plan);
                let there = c + 1 < range.chunks;
                let next = nth_chunk(range, min(c + 1, range.chunks - 1), plan);
                let next = NextChunk { scalars: next.scalars, stage: (c + 1) % 3, there };
                produce_inverse::<P>(out, tiles, &pass.from, &next, plan);
            }
        }
    }
}

/// Chunk `c` of a pass.
#[cube]
fn pass_chunk<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &mut Carried,
    range: &WorkRange,
    c: usize,
    #[comptime] plan: StatePlan,
) {
    let place = nth_chunk(range, c, plan);
    if comptime!(plan.task.backward) {
        chunk_backward::<P>(pass, &place, plan);
    } else {
        chunk_forward::<P>(pass, &place, plan);
    }
    carry::<P>(carried, pass, &place, plan);
}

/// Multiplies the cumulative decay by the chunk's.
#[cube]
fn carry<P: StateEngine>(
    carried: &mut Carried,
    pass: &Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    #[unroll]
    for t in 0..comptime!(plan.carried_decays()) {
        let mut share = chunk_decay::<P>(&pass.tiles, plan);
        if comptime!(plan.variant.vector()) {
            let d = UNIT_POS as usize + comptime!(t * plan.units);
            let last = comptime!(plan.key_width - 1);
            share = pass.from.intra.chunk_decay[chunk_decays_at(place, plan) + min(d, last)];
        }
        let old = carried.index(t)[0usize];
        assign(carried.index_mut(t), old * share);
    }
}

#[cube]
fn assign(to: &mut Array<f32>, x: f32) {
    to[0] = x;
}

/// The state that a pass starts from.
#[cube]
fn begin_state<P: StateEngine>(
    to: &mut PassOutputs<P>,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) -> State<P> {
    let task = comptime!(plan.task);
    let numbers = comptime!(plan.key_width * plan.value_width);
    let slot = (range.batch_head * range.segments + range.segment) * numbers;
    let mut start = range.batch_head * numbers;
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
    let mut s = state::<P>(&to.tensors.start, start, first, plan);
    if comptime!(task.local()) {
        let foremost = if comptime!(task.backward) { range.segments - 1 } else { 0usize.runtime() };
        let stay = range.segment == foremost && !range.transition;
        // Producers have registers for this as well, and never use them.
        P::reset_state(&mut s, stay, range.transition, range.first, plan);
        if stay && is_consumer(plan) {
            P::write_state(&s, &mut to.tensors.end, slot, first, false, plan);
        }
    }
    s
}

/// Writes the last state of a pass.
#[cube]
fn end_state<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &Carried,
    range: &WorkRange,
    #[comptime] plan: StatePlan,
) {
    let task = comptime!(plan.task);
    let numbers = comptime!(plan.key_width * plan.value_width);
    let first = range.first;
    let end = &mut pass.to.tensors.end;
    if comptime!(task.local()) {
        let segment = range.batch_head * range.segments + range.segment;
        if range.transition {
            write_transition::<P>(pass, range, segment, plan);
        } else {
            if comptime!(task.backward) {
                P::write_state(&pass.state, end, (segment - 1) * numbers, first, false, plan);
            } else {
                P::write_state(&pass.state, end, (segment + 1) * numbers, first, false, plan);
            }
            if first == 0 {
                write_carried::<P>(pass, carried, segment, plan);
            }
        }
    } else {
        let last = if comptime!(task.backward) { 0usize.runtime() } else { range.segments - 1 };
        if range.segment == last {
            P::write_state(&pass.state, end, range.batch_head * numbers, first, false, plan);
        }
    }
}

/// Writes M^T of a segment, and M where it is saved.
#[cube]
fn write_transition<P: StateEngine>(
    pass: &mut Pass<P>,
    range: &WorkRange,
    segment: usize,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.variant.solves() && !plan.task.backward) {
        let keys = comptime!(plan.key_width);
        let square =
            comptime!(StatePlan { common: Plan { value_width: keys, ..plan.common }, ..plan });
        let at = segment * comptime!(keys * keys);
        let to = &mut pass.to.tensors.transitions;
        P::write_state(&pass.state, to, at, range.first, true, square);
        if comptime!(plan.task.save) {
            let half = CUBE_COUNT_Y as usize * range.segments * comptime!(keys * keys);
            P::write_state(&pass.state, to, half + at, range.first, false, square);
        }
    }
}

/// Writes the decay of a segment.
#[cube]
fn write_carried<P: StateEngine>(
    pass: &mut Pass<P>,
    carried: &Carried,
    segment: usize,
    #[comptime] plan: StatePlan,
) {
    let keys = comptime!(plan.key_width);
    let to = &mut pass.to.tensors.transitions;
    #[unroll]
    for t in 0..comptime!(plan.carried_decays()) {
        // The first consumers, since producers have not followed decay.
        let unit = UNIT_POS as usize - comptime!(plan.producers() * 32);
        let d = unit + comptime!(t * plan.units);
        if comptime!(plan.variant.vector()) {
            if d < keys {
                to[segment * keys + d] = carried.index(t)[0usize];
            }
        } else if d == 0 {
            to[segment] = carried.index(t)[0usize];
        }
    }
}
