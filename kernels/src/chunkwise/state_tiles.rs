//! Shared-memory tiles of the state pass: a chunk's rows and matrices, and how they are filled.
//!
//! ```text
//! staged      `Engine::Mma`: every role has a tile of its own. `copy_chunk_async` starts the copies of a
//!             chunk, where they fit while another chunk is in use, and `select_chunk` points to the chunk
//!             in use.
//! otherwise   f32 tiles, one of each shape. `load_chunk` and `load_..` fill one with the operand that is
//!             used next, between two barriers; on `Engine::Mma` they do nothing.
//! ```
//! Either way the state pass takes a tile by its role.

use crate::chunkwise::arguments::{IntraChunk, Operands};
use crate::chunkwise::chunk::{Place, own};
use crate::chunkwise::intra_chunk::decay_factors;
use crate::chunkwise::plan::Plan;
use crate::chunkwise::task::Task;
use crate::tile::{Rows, Window, load, load_async, tile};
use cubecl::prelude::barrier::{Barrier, copy_async};
use cubecl::prelude::*;

/// Tiles of a chunk. f32 engines load one slice at a time into one tile of each shape, right before it is used.
/// With 16 bits every role has a tile of its own in each pipeline stage, of which there are two: while one chunk
/// is in use, the next one is copied into the other stage. With producers rows and values have three.
#[derive(CubeType)]
pub(crate) struct StateTiles<E: Float, N: Size> {
    pub query_rows: SharedMemory<Vector<E, N>>,
    pub erase_rows: SharedMemory<Vector<E, N>>,
    pub write_rows: SharedMemory<Vector<E, N>>,
    pub key_rows: SharedMemory<Vector<E, N>>,
    pub values: SharedMemory<Vector<E, N>>,
    pub a_ak_v: SharedMemory<Vector<E, N>>,
    pub inverse: SharedMemory<Vector<E, N>>,
    /// Matrix in front of U: A_qk, or A_qb in a low rank transition.
    pub a_qu: SharedMemory<Vector<E, N>>,
    /// Low rank: A_qk, in front of v.
    pub a_qv: SharedMemory<Vector<E, N>>,
    /// Low rank, backward: A_ak.
    pub a_ak: SharedMemory<Vector<E, N>>,
    pub decay_factors: SharedMemory<f32>,
    /// For producers: gates.
    pub gates: SharedMemory<f32>,
    /// Where the chunk in use lies in tiles of rows, of values, of [C, C], in decay factors and in gates.
    pub at_rows: usize,
    pub at_values: usize,
    pub at_square: usize,
    pub at_decay_factors: usize,
    pub at_gates: usize,
}

impl Plan {
    pub fn staged(&self) -> bool {
        self.engine == crate::Engine::Mma
    }

    /// Whether producer planes of the state pass make scores.
    pub fn has_producers(&self) -> bool {
        self.producers > 0
    }

    fn row_numbers(&self) -> usize {
        self.chunk * self.stride(self.key_slice)
    }

    fn value_numbers(&self) -> usize {
        self.chunk * self.stride(self.value_tile)
    }

    fn square_numbers(&self) -> usize {
        self.chunk * self.stride(self.chunk)
    }

    fn value_window(&self) -> Window {
        self.window(self.chunk, self.value_tile, self.value_width)
    }

    fn square_window(&self) -> Window {
        self.window(self.chunk, self.chunk, self.chunk)
    }

    /// A window, shared out over the units that call [`issue`].
    fn copied(&self, window: Window) -> Window {
        Window { units: self.copying_units(), ..window }
    }

    /// Whether a role has a tile of its own.
    fn own_tile(&self, role: bool) -> bool {
        self.staged() && role
    }
}

#[cube]
pub(crate) fn state_tiles<E: Float, N: Size>(
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) -> StateTiles<E, N> {
    let variant = comptime!(plan.variant);
    let stages = comptime!(plan.stages);
    let rows = tile::<E, N>(comptime!(stages * plan.row_numbers()));
    let values = tile::<E, N>(comptime!(stages * plan.value_numbers()));
    let with_square =
        comptime!(variant.solves() || (task.applies_a_qk(variant) && !plan.has_producers()));
    let square =
        tile::<E, N>(comptime!(if with_square { stages * plan.square_numbers() } else { 16 }));
    let own_erase = comptime!(variant.own_a() || (variant.vector() && variant.solves()));
    let low_rank = comptime!(plan.own_tile(variant.low_rank()));
    let query_rows = if comptime!(plan.own_tile(task.queries() && task.has_keys(variant))) {
        tile::<E, N>(comptime!(stages * plan.row_numbers()))
    } else {
        rows
    };
    let erase_rows = if comptime!(plan.own_tile(own_erase)) {
        tile::<E, N>(comptime!(stages * plan.row_numbers()))
    } else {
        rows
    };
    let write_rows =
        if low_rank { tile::<E, N>(comptime!(stages * plan.row_numbers())) } else { rows };
    let a_ak_v = if comptime!(low_rank && !task.backward) {
        tile::<E, N>(comptime!(stages * plan.value_numbers()))
    } else {
        values
    };
    let inverse = if comptime!(plan.own_tile(variant.solves() && task.applies_a_qk(variant))) {
        tile::<E, N>(comptime!(stages * plan.square_numbers()))
    } else {
        square
    };
    let a_qv = if comptime!(low_rank && !task.local()) {
        tile::<E, N>(comptime!(stages * plan.square_numbers()))
    } else {
        square
    };
    let a_ak = if comptime!(low_rank && task.backward && !task.local()) {
        tile::<E, N>(comptime!(stages * plan.square_numbers()))
    } else {
        square
    };
    StateTiles::<E, N> {
        query_rows,
        erase_rows,
        write_rows,
        key_rows: rows,
        values,
        a_ak_v,
        inverse,
        a_qu: square,
        a_qv,
        a_ak,
        decay_factors: SharedMemory::<f32>::new_aligned(
            comptime!(plan.score_stages() * decay_factors::ROWS * plan.chunk),
            16usize,
        ),
        gates: SharedMemory::<f32>::new(comptime!(if plan.has_producers() {
            stages * plan.chunk
        } else {
            1
        })),
        at_rows: 0usize.runtime(),
        at_values: 0usize.runtime(),
        at_square: 0usize.runtime(),
        at_decay_factors: 0usize.runtime(),
        at_gates: 0usize.runtime(),
    }
}

/// Starts copying a chunk's operands into pipeline stage `stage` of the tiles, and commits the copies to
/// `barrier`, which counts the [`Plan::copying_units`]: they call this, and no others.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn copy_chunk_async<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    barrier: &Shared<Barrier>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    values: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    stage: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let keys = comptime!(plan.copied(plan.key_window()));
    let wide = comptime!(plan.copied(plan.value_window()));
    let square = comptime!(plan.copied(plan.square_window()));
    let rows = stage * comptime!(plan.row_numbers());
    let own = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    let at = stage * comptime!(plan.square_numbers());
    let values_at = stage * comptime!(plan.value_numbers());
    if comptime!(variant.vector()) {
        if comptime!(task.has_keys(variant)) {
            load_async::<E, G, E, N>(
                &mut tiles.key_rows,
                rows,
                &intra.k,
                &place.rows,
                0usize,
                keys,
            );
        }
        if comptime!(task.queries()) {
            load_async::<E, G, E, N>(
                &mut tiles.query_rows,
                rows,
                &intra.q,
                &place.rows,
                0usize,
                keys,
            );
        }
        if comptime!(variant.solves()) {
            load_async::<E, G, E, N>(
                &mut tiles.erase_rows,
                rows,
                &intra.a,
                &place.rows,
                0usize,
                keys,
            );
        }
        if comptime!(variant.low_rank()) {
            load_async::<E, G, E, N>(
                &mut tiles.write_rows,
                rows,
                &intra.b,
                &place.rows,
                0usize,
                keys,
            );
        }
    } else {
        if comptime!(task.has_keys(variant)) {
            load_async::<F, G, E, N>(&mut tiles.key_rows, rows, &x.k, &place.keys, 0usize, keys);
        }
        if comptime!(task.queries()) {
            load_async::<F, G, E, N>(&mut tiles.query_rows, rows, &x.q, &place.keys, 0usize, keys);
        }
        if comptime!(variant.own_a()) {
            load_async::<F, G, E, N>(&mut tiles.erase_rows, rows, &x.a, &place.rows, 0usize, keys);
        }
        if comptime!(variant.low_rank()) {
            load_async::<F, G, E, N>(&mut tiles.write_rows, rows, &x.b, &place.rows, 0usize, keys);
        }
    }
    load_async::<F, G, E, N>(&mut tiles.values, values_at, values, &place.values, first, wide);
    if comptime!(variant.solves()) {
        load_async::<E, G, E, N>(&mut tiles.inverse, at, &intra.inverse, &own, 0usize, square);
    }
    if comptime!(task.applies_a_qk(variant) && !plan.has_producers()) {
        if comptime!(variant.low_rank()) {
            load_async::<E, G, E, N>(&mut tiles.a_qu, at, &intra.a_qb, &own, 0usize, square);
        } else {
            load_async::<E, G, E, N>(&mut tiles.a_qu, at, &intra.a_qk, &own, 0usize, square);
        }
    }
    if comptime!(variant.low_rank() && !task.local()) {
        load_async::<E, G, E, N>(&mut tiles.a_qv, at, &intra.a_qk, &own, 0usize, square);
    }
    if comptime!(variant.low_rank() && task.backward && !task.local()) {
        load_async::<E, G, E, N>(&mut tiles.a_ak, at, &intra.a_ak, &own, 0usize, square);
    }
    if comptime!(variant.low_rank() && !task.backward) {
        let from = &place.values;
        load_async::<E, G, E, N>(&mut tiles.a_ak_v, values_at, &intra.a_ak_v, from, first, wide);
    }
    if comptime!(plan.has_producers()) {
        if comptime!(variant.scalar()) {
            copy_gates_async(&mut tiles.gates, &x.g, &place.gates, stage, plan);
        }
    } else {
        let all = comptime!(decay_factors::ROWS * plan.chunk / 4);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                let from = (place.index * all + n) * 4;
                let to = (stage * all + n) * 4;
                copy_async(
                    &intra.decay_factors.slice(from, from + 4),
                    &mut tiles.decay_factors.slice_mut(to, to + 4),
                    4u32,
                );
            }
        }
    }
    barrier.commit_copy_async();
    barrier.arrive();
}

/// Starts copying the scalar gates of a chunk, one a unit. Producers are units enough.
#[cube]
fn copy_gates_async(
    to: &mut SharedMemory<f32>,
    from: &Array<f32>,
    rows: &Rows,
    stage: usize,
    #[comptime] plan: Plan,
) {
    let i = UNIT_POS as usize;
    if i < comptime!(plan.chunk) {
        let at = stage * comptime!(plan.chunk) + i;
        if i < rows.valid {
            let from_at = rows.start + i * rows.stride;
            copy_async(&from.slice(from_at, from_at + 1), &mut to.slice_mut(at, at + 1), 1u32);
        } else {
            to[at] = 0.0f32;
        }
    }
}

/// Points to chunk `c` of the pass.
#[cube]
pub(crate) fn select_chunk<E: Float, N: Size>(
    tiles: &mut StateTiles<E, N>,
    c: usize,
    #[comptime] plan: Plan,
) {
    let stage = c % comptime!(plan.stages);
    let square = c % comptime!(plan.score_stages());
    tiles.at_rows = stage * comptime!(plan.row_numbers());
    tiles.at_values = stage * comptime!(plan.value_numbers());
    tiles.at_square = square * comptime!(plan.square_numbers());
    tiles.at_decay_factors = square * comptime!(decay_factors::ROWS * plan.chunk);
    tiles.at_gates = stage * comptime!(plan.chunk);
}

/// Plain engine: loads scales and values of a chunk. Ends with a barrier.
#[cube]
pub(crate) fn load_chunk<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    intra: &IntraChunk<E, G>,
    values: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let all = comptime!(decay_factors::ROWS * plan.chunk);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                tiles.decay_factors[n] = intra.decay_factors[place.index * all + n];
            }
        }
        let window = comptime!(plan.value_window());
        load::<F, G, E, N>(&mut tiles.values, values, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads a [C, C] matrix.
#[cube]
pub(crate) fn load_square<E: Float, G: Size, N: Size>(
    to: &mut SharedMemory<Vector<E, N>>,
    from: &Array<Vector<E, G>>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
        load::<E, G, E, N>(to, from, &rows, 0usize, comptime!(plan.square_window()));
        sync_cube();
    }
}

/// Plain engine: loads values.
#[cube]
pub(crate) fn load_values<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    from: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<F, G, E, N>(&mut tiles.values, from, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads A_ak V.
#[cube]
pub(crate) fn load_a_ak_v<E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    intra: &IntraChunk<E, G>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<E, G, E, N>(&mut tiles.a_ak_v, &intra.a_ak_v, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads one slice of rows of keys; `scaled` are those that the intra-chunk stage multiplied by a
/// vector decay, `given` the tensor's own, which lie in `rows`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_slice<F: Float, E: Float, G: Size, N: Size>(
    to: &mut SharedMemory<Vector<E, N>>,
    scaled: &Array<Vector<E, G>>,
    given: &Array<Vector<F, G>>,
    place: &Place,
    rows: &Rows,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let first = slice * comptime!(plan.key_slice);
        let window = comptime!(plan.key_window());
        if comptime!(plan.variant.vector()) {
            load::<E, G, E, N>(to, scaled, &place.rows, first, window);
        } else {
            load::<F, G, E, N>(to, given, rows, first, window);
        }
        sync_cube();
    }
}

/// Rows of the query, q.
#[cube]
pub(crate) fn load_query_rows<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    load_slice::<F, E, G, N>(
        &mut tiles.query_rows,
        &intra.q,
        &x.q,
        place,
        &place.keys,
        slice,
        plan,
    );
}

/// Rows of the erase key: a, e or k.
#[cube]
pub(crate) fn load_erase_rows<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.own_a()) {
        load_slice::<F, E, G, N>(
            &mut tiles.erase_rows,
            &intra.a,
            &x.a,
            place,
            &place.rows,
            slice,
            plan,
        );
    } else {
        load_slice::<F, E, G, N>(
            &mut tiles.erase_rows,
            &intra.a,
            &x.k,
            place,
            &place.keys,
            slice,
            plan,
        );
    }
}

/// Rows where U is written: b, or k.
#[cube]
pub(crate) fn load_write_rows<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.low_rank()) {
        load_slice::<F, E, G, N>(
            &mut tiles.write_rows,
            &intra.b,
            &x.b,
            place,
            &place.rows,
            slice,
            plan,
        );
    } else {
        load_slice::<F, E, G, N>(
            &mut tiles.write_rows,
            &intra.k,
            &x.k,
            place,
            &place.keys,
            slice,
            plan,
        );
    }
}

/// Rows where v is written, k.
#[cube]
pub(crate) fn load_key_rows<F: Float, E: Float, G: Size, N: Size>(
    tiles: &mut StateTiles<E, N>,
    x: &Operands<F, G>,
    intra: &IntraChunk<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    load_slice::<F, E, G, N>(&mut tiles.key_rows, &intra.k, &x.k, place, &place.keys, slice, plan);
}
