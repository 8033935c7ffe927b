//! Stage 2: one walk over the chunks of a sequence, and in the backward pass one walk back.
//!
//! ```text
//! forward, per chunk                              backward, from the last chunk to the first
//!   U  = T (beta v + A~ S)     delta                R' = reads^T dO + B^ dS'
//!   U  = T (local + A~ S)      low rank             R  = T^T R'                 delta, low rank
//!   U  = v                     linear attention     R  = R'                     linear attention
//!   O  = Q~ S + reads U  (+ reads v, low rank)      dS = e^{G_C} dS' + Q~^T dO + A~^T R
//!   S' = e^{G_C} S + B^^T U  (+ K^^T v)
//! ```
//! with S the state at the chunk's start, T = inverse, and for low rank reads_b in front of U. R is
//! the gradient of what the solve was given; in linear attention it is that of v. Low rank has
//! `dv = reads^T dO + K^ dS' + coupling^T R` besides.
//!
//! Work:   a cube a `value_tile` columns of a (sequence, head), or of a segment of it (segments.rs):
//!         columns of S never meet. In linear attention, where one tile holds all values, the first
//!         planes of a cube are *scorers*: they copy what chunks bring along and make the next chunk's
//!         scores and table, which need no state, while the others, the walkers, are at work on the
//!         present one; stage 1 is not run.
//!         Tiles, and how they are filled: feed.rs.
//! Source: DeltaNet's chunk form, arXiv 2406.06484, with the decay of arXiv 2412.06464; the adjoint
//!         goes through the solve, so that neither dW nor dT is ever formed.

use crate::chunk::{Place, Sizes};
use crate::feed::{
    Feed, begin, feed, issue, ready_asks, ready_keys, ready_local, ready_reads, ready_square,
    ready_values, ready_writes, turn_to,
};
use crate::plan::{Decay, Plan, Variant};
use crate::products::{apply, apply_out, ask, read_out, write};
use crate::scores::{Ahead, Operands, ahead, score_ahead, table};
use crate::segments::{Stretch, nth, stretch};
use crate::state::{
    Block, State, add, block, fade, give, keep_state, output_column, output_row, own_columns,
    restart, scale_tokens, settle, share, state, stores, take, token, walks,
};
use crate::tile::{Acc, Pair, Rows, put_four, put_out, zeros};
use crate::vector::set;
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// What stage 1 left, as this stage reads it.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Local<E: Float, G: Size> {
    pub reads: Array<Vector<E, G>>,
    pub reads_b: Array<Vector<E, G>>,
    pub inverse: Array<Vector<E, G>>,
    pub coupling: Array<Vector<E, G>>,
    pub local: Array<Vector<E, G>>,
    pub table: Array<f32>,
    pub q: Array<Vector<E, G>>,
    pub a: Array<Vector<E, G>>,
    pub b: Array<Vector<E, G>>,
    pub k: Array<Vector<E, G>>,
    pub totals: Array<f32>,
}

/// What the walk starts from and where it is kept.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Walk<E: Float, W: Size> {
    /// `[B, H, K, V]`; where segments walk, their slots, `[B, H, P, K, V]`.
    pub start: Array<f32>,
    /// `[B, H, K, V]`; the slots, where segments are summed up.
    pub end: Array<f32>,
    /// [V, K] at the start of every chunk (forward), at its end (backward).
    pub states: Array<Vector<E, W>>,
    /// U or R, `[B, T, H, V]`.
    pub block: Array<Vector<E, W>>,
    /// Summaries: M^T and, if it is kept, M, each `[B, H, P, K, K]`; where nothing is solved its
    /// diagonal, `[B, H, P]` or `[B, H, P, K]`.
    pub transfers: Array<f32>,
}

/// What cubes walk over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Span {
    /// Sequences.
    Whole,
    /// Segments, each from its own start.
    Segment,
    /// Segments too, for nothing but what they do to a state.
    Summary,
}

/// What a launch of this stage does, besides its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Task {
    pub backward: bool,
    pub span: Span,
    /// There is a state to start from.
    pub given: bool,
    /// States and blocks are kept; of a summary, what a backward pass needs of it.
    pub keep: bool,
}

/// What decay has left of the state since a segment's start: this unit's share of it.
type Left = Sequence<Array<f32>>;

impl Task {
    /// Numbers of [`Left`]: none where M is a matrix, or 1.
    fn left(&self, plan: Plan) -> usize {
        match plan.variant.decay {
            _ if !self.summary() || plan.variant.solves() => 0,
            Decay::None => 0,
            Decay::Scalar => 1,
            Decay::Vector => plan.key_width.div_ceil(plan.units),
        }
    }

    pub fn summary(&self) -> bool {
        self.span == Span::Summary
    }

    /// Whether queries play a part.
    pub fn reads(&self) -> bool {
        self.backward || !self.summary()
    }

    /// Whether k does: back, for dS, only as the rows of a delta rule.
    pub fn keys(&self, variant: Variant) -> bool {
        !(self.backward && self.summary()) || variant.delta()
    }

    /// Whether a block goes through the matrix that outputs were mixed by.
    pub fn mixes(&self, variant: Variant) -> bool {
        !self.summary() || (self.backward && variant.solves())
    }
}

/// The scorers' part of a chunk. Summaries of linear attention read the table alone.
#[cube]
fn score<E: Float, N: Size, M: Size>(
    next: &mut Ahead<E, M>,
    feed: &mut Feed<E, N>,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    score_ahead::<E, N, M>(
        next,
        feed.at_square,
        &mut feed.scales,
        feed.at_scales,
        &feed.reads,
        &feed.keys,
        feed.at_rows,
        &feed.gates,
        feed.at_gates,
        comptime!(task.mixes(plan.variant)),
        plan,
    );
}

/// The walk forward.
#[cube(launch_unchecked)]
pub(crate) fn walk_forward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    o: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    over_chunks::<F, E, G, N, M, W>(x, local, walk, &x.v, o, sizes, task, plan);
}

/// The walk back. `walk.start` is the gradient of the last state, `walk.end` that of the first.
#[cube(launch_unchecked)]
pub(crate) fn walk_backward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    d_o: &Array<Vector<F, G>>,
    d_v: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
    #[define(F, E)] _types: [StorageType; 2],
    #[define(G, N, M, W)] _widths: [usize; 4],
) {
    over_chunks::<F, E, G, N, M, W>(x, local, walk, d_o, d_v, sizes, task, plan);
}

/// A walk, from the state that it starts from to where its last state belongs. `values` come with
/// every chunk, v or dO; `out` is o or dv.
#[cube]
#[allow(clippy::too_many_arguments)]
fn over_chunks<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    values: &Array<Vector<F, G>>,
    out: &mut Array<Vector<F, W>>,
    sizes: &Sizes,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let stretch = stretch(sizes, task, plan);
    let first = stretch.first;
    let chunks = stretch.chunks;
    let mut feed = feed::<E, N>(task, plan);
    let mut scored = ahead::<E, M>(comptime!(task.mixes(plan.variant)), plan);
    let mut block = block::<E, M>(plan);
    let mut s = begin_state::<E, M, W>(walk, &stretch, task, plan);
    let mut left = Left::new();
    #[unroll]
    for _ in 0..comptime!(task.left(plan)) {
        let mut one = Array::<f32>::new(1usize);
        one[0] = 1.0f32;
        left.push(one);
    }
    if comptime!(plan.scores()) {
        let barrier = Barrier::shared(comptime!(plan.copiers() as u32), UNIT_POS == 0);
        sync_cube();
        if !walks(plan) {
            let here = nth(&stretch, 0usize, task, plan);
            issue::<F, E, G, N>(
                &mut feed, &barrier, x, local, values, &here, first, 0usize, task, plan,
            );
        }
        // Scorers are a chunk ahead: of three chunks one is copied, one scored, one walked. Copies start before
        // the branch: within it they were seen to cost walkers registers.
        for c in 0..chunks + 1 {
            if c < chunks {
                barrier.wait_parity((c % 2) as u32);
            }
            sync_cube();
            if !walks(plan) && c + 1 < chunks {
                let next = nth(&stretch, c + 1, task, plan);
                let third = (c + 1) % 3;
                issue::<F, E, G, N>(
                    &mut feed, &barrier, x, local, values, &next, first, third, task, plan,
                );
            }
            if walks(plan) {
                if c > 0 {
                    turn_to::<E, N>(&mut feed, c - 1, plan);
                    let place = nth(&stretch, c - 1, task, plan);
                    step::<F, E, G, N, M, W>(
                        &mut s, &mut block, &mut feed, &scored, &mut left, x, local, walk, values,
                        out, &place, first, task, plan,
                    );
                }
            } else if c < chunks {
                turn_to::<E, N>(&mut feed, c, plan);
                score::<E, N, M>(&mut scored, &mut feed, task, plan);
            }
        }
    } else if comptime!(plan.staged()) {
        let barrier = Barrier::shared(comptime!(plan.copiers() as u32), UNIT_POS == 0);
        sync_cube();
        if comptime!(plan.halves == 2) {
            let here = nth(&stretch, 0usize, task, plan);
            issue::<F, E, G, N>(
                &mut feed, &barrier, x, local, values, &here, first, 0usize, task, plan,
            );
        }
        for c in 0..chunks {
            if comptime!(plan.halves == 2) {
                barrier.wait_parity((c % 2) as u32);
                // The other half is free when every plane is through with the chunk before.
                sync_cube();
                if c + 1 < chunks {
                    let next = nth(&stretch, c + 1, task, plan);
                    let half = (c + 1) % 2;
                    issue::<F, E, G, N>(
                        &mut feed, &barrier, x, local, values, &next, first, half, task, plan,
                    );
                }
                turn_to::<E, N>(&mut feed, c, plan);
            } else {
                sync_cube();
                let here = nth(&stretch, c, task, plan);
                issue::<F, E, G, N>(
                    &mut feed, &barrier, x, local, values, &here, first, 0usize, task, plan,
                );
                barrier.wait_parity((c % 2) as u32);
            }
            let place = nth(&stretch, c, task, plan);
            step::<F, E, G, N, M, W>(
                &mut s, &mut block, &mut feed, &scored, &mut left, x, local, walk, values, out,
                &place, first, task, plan,
            );
        }
    } else {
        for c in 0..chunks {
            let place = nth(&stretch, c, task, plan);
            step::<F, E, G, N, M, W>(
                &mut s, &mut block, &mut feed, &scored, &mut left, x, local, walk, values, out,
                &place, first, task, plan,
            );
        }
    }
    sync_cube();
    if walks(plan) {
        end_state::<E, M, W>(&s, &left, walk, &stretch, task, plan);
    }
}

/// One chunk of a walk.
#[cube]
#[allow(clippy::too_many_arguments)]
fn step<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    block: &mut Block<E, M>,
    feed: &mut Feed<E, N>,
    scored: &Ahead<E, M>,
    left: &mut Left,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    values: &Array<Vector<F, G>>,
    out: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    if comptime!(task.backward) {
        step_backward::<F, E, G, N, M, W>(
            s, block, feed, scored, x, local, walk, values, out, place, first, task, plan,
        );
    } else {
        step_forward::<F, E, G, N, M, W>(
            s, block, feed, scored, x, local, walk, out, place, first, task, plan,
        );
    }
    #[unroll]
    for t in 0..comptime!(task.left(plan)) {
        let mut share = last_scale::<E, N>(feed, plan);
        if comptime!(plan.variant.vector()) {
            let d = UNIT_POS as usize + comptime!(t * plan.units);
            share = local.totals[total_start(place, plan) + min(d, comptime!(plan.key_width - 1))];
        }
        let old = left.index(t)[0usize];
        fold(left.index_mut(t), old * share);
    }
}

#[cube]
fn fold(to: &mut Array<f32>, x: f32) {
    to[0] = x;
}

/// The state that a walk starts from.
#[cube]
fn begin_state<E: Float, M: Size, W: Size>(
    walk: &mut Walk<E, W>,
    stretch: &Stretch,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) -> State<E, M> {
    let numbers = comptime!(plan.key_width * plan.value_width);
    let slot = (stretch.memory * stretch.segments + stretch.segment) * numbers;
    let mut start = stretch.memory * numbers;
    let mut first = stretch.first;
    if comptime!(task.span == Span::Segment) {
        start = slot;
    }
    if comptime!(task.summary()) {
        if stretch.transfer {
            // M may be wider than S, and what is read here is not used.
            first = 0usize;
        }
    }
    let mut s = state::<E, M>(&walk.start, start, first, task.given, plan);
    if comptime!(task.summary()) {
        let foremost =
            if comptime!(task.backward) { stretch.segments - 1 } else { 0usize.runtime() };
        let stay = stretch.segment == foremost && !stretch.transfer;
        // Scorers have registers for this as well, and never use them.
        restart::<E, M>(&mut s, stay, stretch.transfer, stretch.first, plan);
        if stay && walks(plan) {
            give::<E, M>(&s, &mut walk.end, slot, first, false, plan);
        }
    }
    s
}

/// Writes the state that a walk ends with to where it belongs.
#[cube]
fn end_state<E: Float, M: Size, W: Size>(
    s: &State<E, M>,
    left: &Left,
    walk: &mut Walk<E, W>,
    stretch: &Stretch,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let keys = comptime!(plan.key_width);
    let numbers = comptime!(keys * plan.value_width);
    let first = stretch.first;
    if comptime!(task.summary()) {
        let segment = stretch.memory * stretch.segments + stretch.segment;
        if stretch.transfer {
            if comptime!(variant.solves() && !task.backward) {
                let square = comptime!(Plan { value_width: keys, ..plan });
                let at = segment * comptime!(keys * keys);
                give::<E, M>(s, &mut walk.transfers, at, first, true, square);
                if comptime!(task.keep) {
                    let half = CUBE_COUNT_Y as usize * stretch.segments * comptime!(keys * keys);
                    give::<E, M>(s, &mut walk.transfers, half + at, first, false, square);
                }
            }
        } else {
            if comptime!(task.backward) {
                give::<E, M>(s, &mut walk.end, (segment - 1) * numbers, first, false, plan);
            } else {
                give::<E, M>(s, &mut walk.end, (segment + 1) * numbers, first, false, plan);
            }
            if first == 0 {
                #[unroll]
                for t in 0..comptime!(task.left(plan)) {
                    // The first walkers, since scorers have not followed decay.
                    let unit = UNIT_POS as usize - comptime!(plan.scorers * 32);
                    let d = unit + comptime!(t * plan.units);
                    if comptime!(variant.vector()) {
                        if d < keys {
                            walk.transfers[segment * keys + d] = left.index(t)[0usize];
                        }
                    } else if d == 0 {
                        walk.transfers[segment] = left.index(t)[0usize];
                    }
                }
            }
        }
    } else {
        let last = if comptime!(task.backward) { 0usize.runtime() } else { stretch.segments - 1 };
        if stretch.segment == last {
            give::<E, M>(s, &mut walk.end, stretch.memory * numbers, first, false, plan);
        }
    }
}

/// One chunk forward.
#[cube]
#[allow(clippy::too_many_arguments)]
fn step_forward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    u: &mut Block<E, M>,
    feed: &mut Feed<E, N>,
    scored: &Ahead<E, M>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    o: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let fragments = comptime!(plan.block_fragments());
    let answers = comptime!(!task.summary());
    begin::<F, E, G, N>(feed, local, &x.v, place, first, plan);
    if comptime!(task.keep && answers) {
        keep_state::<E, E, M, W>(s, &mut walk.states, place.index, first, plan);
    }
    take::<E, N, M>(u, &feed.values, feed.at_values, plan);
    if comptime!(variant.solves()) {
        let mut asked = zeros(fragments);
        for slice in 0..comptime!(plan.key_slices()) {
            ready_asks::<F, E, G, N>(feed, x, local, place, slice, plan);
            ask::<E, N, M>(&mut asked, &feed.asks, feed.at_rows, s, slice, plan);
        }
        share::<E, M>(&mut asked, s, 0usize, true, plan);
        scale::<E, N>(&mut asked, feed, comptime!(table::ASKS), plan);
        if comptime!(variant.low_rank()) {
            ready_local::<E, G, N>(feed, local, place, first, plan);
            take::<E, N, M>(u, &feed.local, feed.at_values, plan);
        } else {
            scale::<E, N>(&mut u.acc, feed, comptime!(table::GAINS), plan);
        }
        add(&mut u.acc, &asked, fragments);
        ready_square::<E, G, N>(&mut feed.inverse, &local.inverse, place, plan);
        settle::<E, M>(u, plan);
        let mut solved = zeros(fragments);
        apply::<E, N, M>(&mut solved, &feed.inverse, feed.at_square, u, false, plan);
        replace(&mut u.acc, &solved, plan);
        if comptime!(task.keep && answers) {
            keep_block::<E, W>(&mut walk.block, &u.acc, &place.values, first, plan);
        }
    }
    settle::<E, M>(u, plan);
    let mut out = zeros(comptime!(if answers { fragments } else { 0 }));
    if comptime!(answers) {
        for slice in 0..comptime!(plan.key_slices()) {
            ready_reads::<F, E, G, N>(feed, x, local, place, slice, plan);
            read_out::<E, N, M>(&mut out, &feed.reads, feed.at_rows, s, slice, plan);
        }
        let from = comptime!(plan.output_fragments());
        share::<E, M>(&mut out, s, from, comptime!(!variant.solves()), plan);
        scale_rows::<E, N>(&mut out, feed, plan);
        if comptime!(variant.low_rank()) {
            ready_square::<E, G, N>(&mut feed.mix, &local.reads_b, place, plan);
        } else {
            ready_square::<E, G, N>(&mut feed.mix, &local.reads, place, plan);
        }
        if comptime!(plan.scores()) {
            apply_out::<E, M, M>(&mut out, &scored.reads, feed.at_square, u, plan);
        } else {
            apply_out::<E, N, M>(&mut out, &feed.mix, feed.at_square, u, plan);
        }
        if comptime!(!variant.low_rank()) {
            // Before the write: its registers are free then.
            keep_output::<F, W>(o, &out, &place.values, first, plan);
        }
    }
    fade::<E, M>(s, last_scale::<E, N>(feed, plan), &local.totals, total_start(place, plan), plan);
    scale::<E, N>(&mut u.acc, feed, comptime!(table::KEEPS), plan);
    settle::<E, M>(u, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        ready_writes::<F, E, G, N>(feed, x, local, place, slice, plan);
        write::<E, N, M>(s, &feed.writes, feed.at_rows, u, slice, plan);
    }
    if comptime!(variant.low_rank()) {
        // The write that does not pass through the memory: k and v.
        ready_values::<F, E, G, N>(feed, &x.v, place, first, plan);
        take::<E, N, M>(u, &feed.values, feed.at_values, plan);
        settle::<E, M>(u, plan);
        if comptime!(answers) {
            ready_square::<E, G, N>(&mut feed.mix_values, &local.reads, place, plan);
            apply_out::<E, N, M>(&mut out, &feed.mix_values, feed.at_square, u, plan);
        }
        scale::<E, N>(&mut u.acc, feed, comptime!(table::KEEPS), plan);
        settle::<E, M>(u, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            ready_keys::<F, E, G, N>(feed, x, local, place, slice, plan);
            write::<E, N, M>(s, &feed.keys, feed.at_rows, u, slice, plan);
        }
        if comptime!(answers) {
            keep_output::<F, W>(o, &out, &place.values, first, plan);
        }
    }
}

/// One chunk back.
#[cube]
#[allow(clippy::too_many_arguments)]
fn step_backward<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>(
    s: &mut State<E, M>,
    r: &mut Block<E, M>,
    feed: &mut Feed<E, N>,
    scored: &Ahead<E, M>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    walk: &mut Walk<E, W>,
    d_o: &Array<Vector<F, G>>,
    d_v: &mut Array<Vector<F, W>>,
    place: &Place,
    first: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let fragments = comptime!(plan.block_fragments());
    begin::<F, E, G, N>(feed, local, d_o, place, first, plan);
    let answers = comptime!(!task.summary());
    let mixes = comptime!(task.mixes(variant));
    if comptime!(answers) {
        keep_state::<E, E, M, W>(s, &mut walk.states, place.index, first, plan);
    }
    let mut asked = zeros(comptime!(if mixes { fragments } else { 0 }));
    if comptime!(mixes) {
        for slice in 0..comptime!(plan.key_slices()) {
            ready_writes::<F, E, G, N>(feed, x, local, place, slice, plan);
            ask::<E, N, M>(&mut asked, &feed.writes, feed.at_rows, s, slice, plan);
        }
        share::<E, M>(&mut asked, s, 0usize, true, plan);
        scale::<E, N>(&mut asked, feed, comptime!(table::KEEPS), plan);
    }
    take::<E, N, M>(r, &feed.values, feed.at_values, plan);
    if comptime!(mixes) {
        if comptime!(variant.low_rank()) {
            ready_square::<E, G, N>(&mut feed.mix, &local.reads_b, place, plan);
        } else {
            ready_square::<E, G, N>(&mut feed.mix, &local.reads, place, plan);
        }
        settle::<E, M>(r, plan);
        if comptime!(plan.scores()) {
            apply::<E, M, M>(&mut asked, &scored.reads, feed.at_square, r, true, plan);
        } else {
            apply::<E, N, M>(&mut asked, &feed.mix, feed.at_square, r, true, plan);
        }
    }
    if comptime!(answers && !variant.solves()) {
        // Before the write: its registers are free then.
        keep_block::<F, W>(d_v, &asked, &place.values, first, plan);
    }
    // Low rank: v is also written as it is, with k.
    let passes = comptime!(variant.low_rank() && answers);
    let mut plain = zeros(comptime!(if passes { fragments } else { 0 }));
    if comptime!(passes) {
        for slice in 0..comptime!(plan.key_slices()) {
            ready_keys::<F, E, G, N>(feed, x, local, place, slice, plan);
            ask::<E, N, M>(&mut plain, &feed.keys, feed.at_rows, s, slice, plan);
        }
        share::<E, M>(&mut plain, s, 0usize, false, plan);
        scale::<E, N>(&mut plain, feed, comptime!(table::KEEPS), plan);
        ready_square::<E, G, N>(&mut feed.mix_values, &local.reads, place, plan);
        apply::<E, N, M>(&mut plain, &feed.mix_values, feed.at_square, r, true, plan);
    }
    // What was read from the state: dO, as the queries saw it.
    fade::<E, M>(s, last_scale::<E, N>(feed, plan), &local.totals, total_start(place, plan), plan);
    scale::<E, N>(&mut r.acc, feed, comptime!(table::READS), plan);
    settle::<E, M>(r, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        ready_reads::<F, E, G, N>(feed, x, local, place, slice, plan);
        write::<E, N, M>(s, &feed.reads, feed.at_rows, r, slice, plan);
    }
    if comptime!(variant.solves()) {
        replace(&mut r.acc, &asked, plan);
        ready_square::<E, G, N>(&mut feed.inverse, &local.inverse, place, plan);
        settle::<E, M>(r, plan);
        let mut solved = zeros(fragments);
        apply::<E, N, M>(&mut solved, &feed.inverse, feed.at_square, r, true, plan);
        replace(&mut r.acc, &solved, plan);
        if comptime!(answers) {
            keep_block::<E, W>(&mut walk.block, &r.acc, &place.values, first, plan);
        }
        if comptime!(passes) {
            ready_square::<E, G, N>(&mut feed.coupling, &local.coupling, place, plan);
            settle::<E, M>(r, plan);
            apply::<E, N, M>(&mut plain, &feed.coupling, feed.at_square, r, true, plan);
            keep_block::<F, W>(d_v, &plain, &place.values, first, plan);
        }
        scale::<E, N>(&mut r.acc, feed, comptime!(table::ASKS), plan);
        settle::<E, M>(r, plan);
        for slice in 0..comptime!(plan.key_slices()) {
            ready_asks::<F, E, G, N>(feed, x, local, place, slice, plan);
            write::<E, N, M>(s, &feed.asks, feed.at_rows, r, slice, plan);
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

/// Multiplies each token's row of a block by its entry in row `which` of the table.
#[cube]
fn scale<E: Float, N: Size>(
    acc: &mut Acc,
    feed: &Feed<E, N>,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let gains = comptime!(which == table::GAINS || (which == table::ASKS && plan.variant.delta()));
    if comptime!(plan.variant.scalar() || gains) {
        scale_tokens(acc, &feed.scales, feed.at_scales + comptime!(which * plan.chunk), plan);
    }
}

/// What is left of the chunk's start at its end.
#[cube]
fn last_scale<E: Float, N: Size>(feed: &Feed<E, N>, #[comptime] plan: Plan) -> f32 {
    feed.scales[feed.at_scales + comptime!(table::SINCE_START * plan.chunk + plan.chunk - 1)]
}

#[cube]
fn total_start(place: &Place, #[comptime] plan: Plan) -> usize {
    place.index * comptime!(plan.key_width)
}

/// Multiplies the rows of an output block by what queries see.
#[cube]
fn scale_rows<E: Float, N: Size>(acc: &mut Acc, feed: &Feed<E, N>, #[comptime] plan: Plan) {
    if comptime!(plan.variant.scalar()) {
        #[unroll]
        for f in 0..comptime!(plan.output_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let i = min(output_row(f, h, plan), comptime!(plan.chunk - 1));
                let at = feed.at_scales + comptime!(table::READS * plan.chunk) + i;
                let x = acc.index(f)[h] * Pair::new(feed.scales[at]);
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
        // The block lies on its side: neighbouring lanes swap halves, so that each holds two
        // neighbouring columns of one token, and then four.
        let lane = UNIT_POS as usize % 32;
        let odd = lane / 4 % 2;
        let second = lane / 8 % 2 == 1;
        let row = token(0usize, 0usize, 0usize, plan) + odd;
        let column = own_columns(plan) + lane / 8 % 2 * 8 + lane / 16 * 4;
        let start = (rows.start + row * rows.stride + first + column) / 4;
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            let low = upright(acc.index(f)[0usize], odd == 1);
            let high = upright(acc.index(f)[1usize], odd == 1);
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
fn upright(x: Pair, odd: bool) -> Pair {
    let other = plane_shuffle_xor(select(odd, x[0], x[1]), 4u32);
    let mut y = Pair::empty();
    y[0] = select(odd, other, x[0]);
    y[1] = select(odd, x[1], other);
    y
}
