//! Sequence-parallel scan: a state pass cut into segments of whole chunks that run at once, for long sequences
//! of few heads.
//!
//! ```text
//! S_{p+1}  = M_p S_p + E_p              S_p: state at the start of segment p
//! dS_{p-1} = M_p^T dS_p + dE_p          dS_p: gradient of the state at the end of segment p
//!
//! local pass   E_p, dE_p: the pass over one segment from zeros, without outputs. The segment that the
//!              sequence begins (ends) with starts from the state that the call was given.
//!              M_p, the transition matrix: where a system is solved, the same pass from the identity, with
//!              v = 0; else e^G over the segment, a number or one for each key.
//! combine      the recurrence above, over segments
//! state pass   every segment from its own state (gradient)
//! ```
//! P segments have P initial states, `[B, H, P, K, V]`. State 0 (backward: P - 1) is the one that was given.
//! The local pass of segment p fills state p + 1 (p - 1) with E_p, so that the first needs no M, the last
//! no local pass at all, and `combine` only adds M_p times state p. M is kept for the backward pass.
//!
//! Work:   local pass: a cube a `value_slice` columns of E_p or M_p; combine: a cube a few columns of S.
//! Cost:   local pass: the pass without outputs, twice where M_p is a matrix; combine: 2 K K V flops a
//!         segment, in f32 throughout: rounding is that of the state pass, with or without a cut.
//! Source: local passes and combine are those of a parallel scan, <https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf>,
//!         one level deep.

use crate::chunkwise::chunk::{HeadOffsets, Place, Sizes, head_offsets, place_in};
use crate::chunkwise::plan::{Plan, StatePlan};
use crate::chunkwise::task::Span;
use crate::chunkwise::varlen::{offsets_in_row, sequence};
use crate::tile::{Rows, tile};
use cubecl::prelude::*;

/// Columns of S that a cube of [`combine_matrices`] owns.
pub(crate) const COLUMNS: usize = 16;
/// Units of a cube that combines.
pub(crate) const UNITS: usize = 256;
/// Numbers of M that a cube of [`combine_matrices`] holds in shared memory at most: one slab of rows is worked on
/// while the next one is on its way to registers.
const SLAB: usize = 2048;

/// Work range of a cube of the state pass: a run of chunks of a (sequence, head).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WorkRange {
    /// Number of the (sequence, head).
    pub batch_head: usize,
    /// Its offsets.
    pub head_offsets: HeadOffsets,
    /// First column of S, or of M.
    pub first: usize,
    /// Its first chunk.
    pub from: usize,
    /// How many there are.
    pub chunks: usize,
    pub segment: usize,
    pub segments: usize,
    /// Columns are those of M.
    pub transition: bool,
}

/// The work range of this cube.
#[cube]
pub(crate) fn work_range(sizes: &Sizes, #[comptime] plan: StatePlan) -> WorkRange {
    if comptime!(plan.varlen) { sequence_range(sizes, plan) } else { segment_range(sizes, plan) }
}

/// A whole sequence of a length of its own.
#[cube]
fn sequence_range(sizes: &Sizes, #[comptime] plan: StatePlan) -> WorkRange {
    let heads = sizes.heads as usize;
    let (place, head) = (CUBE_POS_Y as usize / heads, CUBE_POS_Y as usize % heads);
    let sequence = sequence(sizes, place);
    WorkRange {
        batch_head: sequence.number * heads + head,
        head_offsets: offsets_in_row(sizes, &sequence, head),
        first: CUBE_POS_X as usize * comptime!(plan.value_slice),
        from: 0usize.runtime(),
        chunks: (sequence.tokens - 1) / comptime!(plan.chunk) + 1,
        segment: 0usize.runtime(),
        segments: 1usize.runtime(),
        transition: false.runtime(),
    }
}

/// A whole sequence, or a segment. Cubes of a local pass lie in a row: all of E, then all of M.
#[cube]
fn segment_range(sizes: &Sizes, #[comptime] plan: StatePlan) -> WorkRange {
    let task = comptime!(plan.task);
    let all = sizes.chunks as usize;
    let length = sizes.segment as usize;
    let mut tile = CUBE_POS_X as usize;
    let mut segment = 0usize;
    let mut segments = 1usize;
    let mut from = 0usize;
    let mut chunks = all;
    let mut transition = false;
    if comptime!(task.span != Span::Sequence) {
        segments = (all - 1) / length + 1;
        segment = CUBE_POS_Z as usize;
        if comptime!(task.span == Span::Local) {
            let tiles = comptime!(plan.value_slices());
            let of_states = (segments - 1) * tiles;
            if tile < of_states {
                segment = tile / tiles + comptime!(if task.backward { 1 } else { 0 });
                tile %= tiles;
            } else {
                let n = tile - of_states;
                let tiles = comptime!(plan.key_tiles());
                transition = true;
                segment = n / tiles + 1;
                tile = n % tiles;
            }
        }
        from = segment * length;
        chunks = min(length, all - from);
    }
    WorkRange {
        batch_head: CUBE_POS_Y as usize,
        head_offsets: head_offsets(sizes, CUBE_POS_Y as usize),
        first: tile * comptime!(plan.value_slice),
        from,
        chunks,
        segment,
        segments,
        transition,
    }
}

/// Chunk `n` of a range. A pass for M has no values.
#[cube]
pub(crate) fn nth_chunk(range: &WorkRange, n: usize, #[comptime] plan: StatePlan) -> Place {
    let task = comptime!(plan.task);
    let mut chunk = range.from + n;
    if comptime!(task.backward) {
        chunk = range.from + range.chunks - 1 - n;
    }
    let place = place_in(&range.head_offsets, chunk, comptime!(*plan));
    if comptime!(task.span == Span::Local) {
        let mut valid = place.valid;
        if range.transition {
            valid = 0usize;
        }
        Place {
            keys: place.keys,
            values: Rows { start: place.values.start, stride: place.values.stride, valid },
            rows: place.rows,
            scalars: place.scalars,
            index: place.index,
            valid: place.valid,
        }
    } else {
        place
    }
}

/// The state that step `n` of the recurrence reads, and the segment whose M it takes. The next step's is
/// the state that it adds to.
#[cube]
fn source(n: usize, segments: usize, #[comptime] backward: bool) -> usize {
    if comptime!(backward) { segments - 2 - n } else { n + 1 }
}

/// Adds M_p times state p to the next state, one segment after another. `transitions` holds M^T for the
/// recurrence forward and M for that back, from number `start` on: either way rows are what is summed
/// over, and neighbouring units read neighbouring numbers.
#[cube(launch_unchecked)]
pub(crate) fn combine_matrices<N: Size>(
    transitions: &Array<Vector<f32, N>>,
    states: &mut Array<f32>,
    start: u32,
    segments: u32,
    #[comptime] backward: bool,
    #[comptime] plan: Plan,
    #[define(N)] _width: usize,
) {
    let keys = comptime!(plan.key_width);
    let width = comptime!(plan.value_width);
    let read = N::value();
    let across = comptime!(keys / read);
    let down = comptime!(UNITS / COLUMNS);
    let turns = comptime!(across.div_ceil(down));
    let slab = comptime!(slab(keys));
    let segments = segments as usize;
    let first_segment = CUBE_POS_Y as usize * segments;
    let own = UNIT_POS as usize / COLUMNS;
    let v = UNIT_POS as usize % COLUMNS;
    // Columns past V repeat the last one, and are not stored.
    let column = min(CUBE_POS_X as usize * COLUMNS + v, comptime!(width - 1));
    let there = CUBE_POS_X as usize * COLUMNS + v < width;
    let mut carried = SharedMemory::<f32>::new(comptime!(keys * COLUMNS));
    let mut rows = tile::<f32, N>(comptime!(slab * keys));
    let mut coming = Array::<Vector<f32, N>>::new(comptime!((slab * across).div_ceil(UNITS)));
    let begin = source(0usize, segments, backward);
    #[unroll]
    for t in 0..comptime!((keys * COLUMNS).div_ceil(UNITS)) {
        let d = own + comptime!(t * down);
        if d < keys {
            carried[d * COLUMNS + v] =
                states[((first_segment + begin) * keys + d) * width + column];
        }
    }
    let matrix = (start as usize + (first_segment + begin) * comptime!(keys * keys)) / read;
    fetch(&mut coming, transitions, matrix, plan);
    for n in 0..segments - 2 {
        let from = source(n, segments, backward);
        let to = source(n + 1, segments, backward);
        let matrix = (start as usize + (first_segment + from) * comptime!(keys * keys)) / read;
        let after = (start as usize + (first_segment + to) * comptime!(keys * keys)) / read;
        let mut sums = next_state::<N>(states, (first_segment + to) * keys, column, plan);
        for s in 0..comptime!(keys / slab) {
            sync_cube();
            lay_down(&mut rows, &coming, plan);
            sync_cube();
            // The slab after this one, or the first of the next matrix; behind the last nobody looks.
            let last = s == comptime!(keys / slab - 1);
            let next = matrix + (s + 1) * comptime!(slab * across);
            fetch(&mut coming, transitions, select(last, after, next), plan);
            #[unroll]
            for row in 0..slab {
                let x = Vector::<f32, N>::new(carried[(s * slab + row) * COLUMNS + v]);
                #[unroll]
                for t in 0..turns {
                    let d = min(own + comptime!(t * down), comptime!(across - 1));
                    add_product(sums.index_mut(t), rows[row * across + d], x);
                }
            }
        }
        sync_cube();
        #[unroll]
        for t in 0..turns {
            let d = (own + comptime!(t * down)) * read;
            if d < keys {
                #[unroll]
                for l in 0..read {
                    let x = sums.index(t)[0usize][l];
                    carried[(d + l) * COLUMNS + v] = x;
                    if there {
                        states[((first_segment + to) * keys + d + l) * width + column] = x;
                    }
                }
            }
        }
    }
}

/// This unit's numbers of the state whose rows begin with row `first`, as E_p left it.
#[cube]
fn next_state<N: Size>(
    states: &Array<f32>,
    first: usize,
    column: usize,
    #[comptime] plan: Plan,
) -> Sequence<Array<Vector<f32, N>>> {
    let read = N::value();
    let across = comptime!(plan.key_width / read);
    let down = comptime!(UNITS / COLUMNS);
    let own = UNIT_POS as usize / COLUMNS;
    let mut sums = Sequence::<Array<Vector<f32, N>>>::new();
    #[unroll]
    for t in 0..comptime!(across.div_ceil(down)) {
        let d = min(own + comptime!(t * down), comptime!(across - 1)) * read;
        let mut x = Vector::<f32, N>::empty();
        #[unroll]
        for l in 0..read {
            x[l] = states[(first + d + l) * comptime!(plan.value_width) + column];
        }
        let mut sum = Array::<Vector<f32, N>>::new(1usize);
        sum[0] = x;
        sums.push(sum);
    }
    sums
}

/// Rows of M that [`combine_matrices`] holds in shared memory: a power of two that divides K, [`SLAB`] numbers at most.
fn slab(keys: usize) -> usize {
    let most = (SLAB / keys).max(1).ilog2();
    (0..=most).rev().map(|n| 1 << n).find(|rows| keys.is_multiple_of(*rows)).unwrap_or(1)
}

/// Loads the slab of M at vector `at` into registers, a part for each unit.
#[cube]
fn fetch<N: Size>(
    coming: &mut Array<Vector<f32, N>>,
    transitions: &Array<Vector<f32, N>>,
    at: usize,
    #[comptime] plan: Plan,
) {
    let read = N::value();
    let vectors = comptime!(slab(plan.key_width) * plan.key_width / read);
    #[unroll]
    for t in 0..comptime!(vectors.div_ceil(UNITS)) {
        let n = min(UNIT_POS as usize + comptime!(t * UNITS), comptime!(vectors - 1));
        coming[t] = transitions[at + n];
    }
}

/// Writes a loaded slab to shared memory.
#[cube]
fn lay_down<N: Size>(
    rows: &mut SharedMemory<Vector<f32, N>>,
    coming: &Array<Vector<f32, N>>,
    #[comptime] plan: Plan,
) {
    let read = N::value();
    let vectors = comptime!(slab(plan.key_width) * plan.key_width / read);
    #[unroll]
    for t in 0..comptime!(vectors.div_ceil(UNITS)) {
        let n = UNIT_POS as usize + comptime!(t * UNITS);
        if n < vectors {
            rows[n] = coming[t];
        }
    }
}

#[cube]
fn add_product<N: Size>(sum: &mut Array<Vector<f32, N>>, x: Vector<f32, N>, y: Vector<f32, N>) {
    sum[0] = sum[0] + x * y;
}

/// As [`combine_matrices`] where M_p is a cumulative decay: a unit a number of S.
#[cube(launch_unchecked)]
pub(crate) fn combine_decays(
    decay: &Array<f32>,
    states: &mut Array<f32>,
    segments: u32,
    #[comptime] backward: bool,
    #[comptime] plan: Plan,
) {
    let keys = comptime!(plan.key_width);
    let width = comptime!(plan.value_width);
    let segments = segments as usize;
    let first_segment = CUBE_POS_Y as usize * segments;
    let n = CUBE_POS_X as usize * UNITS + UNIT_POS as usize;
    if n < comptime!(keys * width) {
        let begin = source(0usize, segments, backward);
        let mut carried = states[(first_segment + begin) * comptime!(keys * width) + n];
        for step in 0..segments - 2 {
            let from = source(step, segments, backward);
            let to = source(step + 1, segments, backward);
            if comptime!(plan.variant.scalar()) {
                carried *= decay[first_segment + from];
            }
            if comptime!(plan.variant.vector()) {
                carried *= decay[(first_segment + from) * keys + n / width];
            }
            let at = (first_segment + to) * comptime!(keys * width) + n;
            carried += states[at];
            states[at] = carried;
        }
    }
}
