//! Shared-memory tiles of the state pass: a chunk's rows and matrices, and how they are filled.
//!
//! ```text
//! staged, specialized   every role has a tile of its own. `copy_chunk_async` starts the copies of a
//!                       chunk, where they fit while another chunk is in use, and `select_chunk` points to the chunk
//!                       in use.
//! direct                f32 tiles, one of each shape. `load_chunk` and `load_..` fill one with the operand that is
//!                       used next, between two barriers; on other schedules they do nothing.
//! ```
//! Either way the state pass takes a tile by its role.

use crate::chunkwise::arguments::{IntraChunk, Operands};
use crate::chunkwise::chunk::{Place, own};
use crate::chunkwise::decay::decay_factors;
use crate::chunkwise::plan::{Plan, Schedule, StatePlan, UNUSED};
use crate::chunkwise::state::StateEngine;
use crate::tile::{
    Rows, Window, commit_copies, copy_async, copy_async_or_zeros, load, load_async, own_or,
    tile_aligned,
};
use cubecl::prelude::*;

/// Tensors that a pass reads.
#[derive(CubeType)]
pub(crate) struct PassInputs<P: StateEngine> {
    pub x: Operands<P::F, P::G>,
    pub intra: IntraChunk<P::E, P::G>,
    /// v, or dO backward.
    pub values: Array<Vector<P::F, P::G>>,
    /// First column of values.
    pub first: usize,
}

/// Tiles of a chunk. Filled directly, there is one of each shape. Else every role has a tile of its own in each pipeline
/// stage, of which there are two: while one chunk is in use, the next one is copied into the other stage. With producers
/// rows and values have three.
#[derive(CubeType)]
pub(crate) struct StateTiles<P: StateEngine> {
    pub query_rows: SharedMemory<Vector<P::E, P::N>>,
    pub erase_rows: SharedMemory<Vector<P::E, P::N>>,
    pub write_rows: SharedMemory<Vector<P::E, P::N>>,
    pub key_rows: SharedMemory<Vector<P::E, P::N>>,
    pub values: SharedMemory<Vector<P::E, P::N>>,
    pub a_ak_v: SharedMemory<Vector<P::E, P::N>>,
    pub inverse: SharedMemory<Vector<P::E, P::N>>,
    /// A_qk, which multiplies U; in a low rank transition A_qb.
    pub a_of_u: SharedMemory<Vector<P::E, P::N>>,
    /// Low rank: A_qk, which multiplies v.
    pub a_of_v: SharedMemory<Vector<P::E, P::N>>,
    /// Low rank, backward: A_ak.
    pub a_ak: SharedMemory<Vector<P::E, P::N>>,
    pub decay_factors: SharedMemory<f32>,
    /// For producers that do not invert: log decays.
    pub log_decays: SharedMemory<f32>,
    /// Where the chunk in use lies in tiles of rows, of values, of [C, C], in decay factors and in log decays.
    pub at_rows: usize,
    pub at_values: usize,
    pub at_square: usize,
    pub at_decay_factors: usize,
    pub at_log_decays: usize,
}

impl StatePlan {
    fn direct(&self) -> bool {
        self.schedule == Schedule::Direct
    }

    /// A window, shared out over the units that call [`copy_chunk_async`].
    fn copied(&self, window: Window) -> Window {
        let Plan { units, first, .. } = self.of_copying();
        Window { units, first, ..window }
    }

    /// The same of a right factor of products.
    fn copied_factor(&self, window: Window) -> Window {
        self.factor(self.copied(window))
    }
}

/// TileRole of a tile of the state pass: the matrix that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum TileRole {
    KeyRows,
    Values,
    /// The one [C, C] matrix of tiles that are filled directly; else A_qk, or A_qb in a low rank transition.
    Square,
    QueryRows,
    EraseRows,
    WriteRows,
    AAkV,
    Inverse,
    AOfV,
    AAk,
}

impl TileRole {
    const ALL: [Self; 10] = [
        Self::KeyRows,
        Self::Values,
        Self::Square,
        Self::QueryRows,
        Self::EraseRows,
        Self::WriteRows,
        Self::AAkV,
        Self::Inverse,
        Self::AOfV,
        Self::AAk,
    ];
}

impl StatePlan {
    /// Numbers of a role's tile in all pipeline stages; None where it has none of its own.
    fn numbers(&self, role: TileRole) -> Option<usize> {
        let (variant, task) = (self.variant, self.task);
        let staged = !self.direct();
        let low_rank = staged && variant.low_rank();
        let own_erase = variant.own_a() || (variant.vector() && variant.solves());
        let applies_a_qk = task.applies_a_qk(variant);
        if role == TileRole::Inverse && self.inverts_ahead() {
            return None;
        }
        let (there, numbers) = match role {
            TileRole::KeyRows => (true, self.key_numbers()),
            TileRole::Values => (true, self.value_numbers()),
            TileRole::Square => {
                let read = variant.solves() || applies_a_qk;
                (read && self.producers() == 0, self.square_numbers())
            }
            TileRole::QueryRows => {
                (staged && task.queries() && task.has_keys(variant), self.key_numbers())
            }
            TileRole::EraseRows => (staged && own_erase, self.key_numbers()),
            TileRole::WriteRows => (low_rank, self.key_numbers()),
            TileRole::AAkV => (low_rank && !task.backward, self.value_numbers()),
            TileRole::Inverse => {
                (staged && variant.solves() && applies_a_qk, self.square_numbers())
            }
            TileRole::AOfV => (low_rank && !task.local(), self.square_numbers()),
            TileRole::AAk => (low_rank && task.backward && !task.local(), self.square_numbers()),
        };
        there.then_some(self.stages() * numbers)
    }

    fn decay_factor_numbers(&self) -> usize {
        self.decay_factor_stages() * self.decay_factor_rows() * self.chunk
    }

    /// Log decays that producers sum up.
    fn log_decay_numbers(&self) -> usize {
        let read = self.producers() > 0 && !self.inverts_ahead();
        if read { self.stages() * self.chunk } else { 1 }
    }

    /// Bytes of [`state_tiles`].
    pub fn tile_memory(&self) -> usize {
        let bytes = |role: &TileRole| {
            self.numbers(*role).map(|n| (n * self.engine.bytes()).next_multiple_of(self.aligned()))
        };
        TileRole::ALL.iter().filter_map(bytes).sum::<usize>()
            + 4 * (self.decay_factor_numbers() + self.log_decay_numbers())
    }
}

/// The tiles of a plan. Roles that the plan lacks, or that are filled directly, share a tile with others.
#[cube]
pub(crate) fn state_tiles<P: StateEngine>(#[comptime] plan: StatePlan) -> StateTiles<P> {
    let aligned = comptime!(plan.aligned());
    let rows = tile_aligned::<P::E, P::N>(
        comptime!(plan.numbers(TileRole::KeyRows).unwrap_or(UNUSED)),
        aligned,
    );
    let values = tile_aligned::<P::E, P::N>(
        comptime!(plan.numbers(TileRole::Values).unwrap_or(UNUSED)),
        aligned,
    );
    let square = tile_aligned::<P::E, P::N>(
        comptime!(plan.numbers(TileRole::Square).unwrap_or(UNUSED)),
        aligned,
    );
    StateTiles::<P> {
        query_rows: own_or::<P::E, P::N>(
            rows,
            comptime!(plan.numbers(TileRole::QueryRows)),
            aligned,
        ),
        erase_rows: own_or::<P::E, P::N>(
            rows,
            comptime!(plan.numbers(TileRole::EraseRows)),
            aligned,
        ),
        write_rows: own_or::<P::E, P::N>(
            rows,
            comptime!(plan.numbers(TileRole::WriteRows)),
            aligned,
        ),
        key_rows: rows,
        values,
        a_ak_v: own_or::<P::E, P::N>(values, comptime!(plan.numbers(TileRole::AAkV)), aligned),
        inverse: own_or::<P::E, P::N>(square, comptime!(plan.numbers(TileRole::Inverse)), aligned),
        a_of_u: square,
        a_of_v: own_or::<P::E, P::N>(square, comptime!(plan.numbers(TileRole::AOfV)), aligned),
        a_ak: own_or::<P::E, P::N>(square, comptime!(plan.numbers(TileRole::AAk)), aligned),
        decay_factors: SharedMemory::<f32>::new_aligned(
            comptime!(plan.decay_factor_numbers()),
            16usize,
        ),
        log_decays: SharedMemory::<f32>::new(comptime!(plan.log_decay_numbers())),
        at_rows: 0usize.runtime(),
        at_values: 0usize.runtime(),
        at_square: 0usize.runtime(),
        at_decay_factors: 0usize.runtime(),
        at_log_decays: 0usize.runtime(),
    }
}

/// Starts copying a chunk's operands into pipeline stage `stage` of the tiles: one group of copies of each of the
/// [`StatePlan::of_copying`], which call this, and no others.
#[cube]
pub(crate) fn copy_chunk_async<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    copy_rows_async::<P>(tiles, from, place, stage, plan);
    copy_values_and_matrices_async::<P>(tiles, from, place, stage, plan);
    if comptime!(plan.producers() > 0) {
        if comptime!(plan.variant.scalar() && !plan.inverts_ahead()) {
            let (to, rows) = (&mut tiles.log_decays, &place.scalars);
            copy_log_decays_async(to, &from.x.scalar_g, rows, stage, plan);
        }
    } else {
        copy_decay_factors_async::<P>(tiles, from, place, stage, plan);
    }
    commit_copies();
}

/// Rows of keys and queries: under a vector decay those that the intra-chunk stage scaled.
#[cube]
fn copy_rows_async<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let task = comptime!(plan.task);
    let at = stage * comptime!(plan.key_numbers());
    let scaled = &place.rows;
    let keys = &place.keys;
    if comptime!(variant.vector()) {
        if comptime!(task.has_keys(variant)) {
            copy_keys::<P, P::E>(&mut tiles.key_rows, at, &from.intra.k, scaled, plan);
        }
        if comptime!(task.queries()) {
            copy_keys::<P, P::E>(&mut tiles.query_rows, at, &from.intra.q, scaled, plan);
        }
        if comptime!(variant.solves()) {
            copy_keys::<P, P::E>(&mut tiles.erase_rows, at, &from.intra.a, scaled, plan);
        }
        if comptime!(variant.low_rank()) {
            copy_keys::<P, P::E>(&mut tiles.write_rows, at, &from.intra.b, scaled, plan);
        }
    } else {
        if comptime!(task.has_keys(variant)) {
            copy_keys::<P, P::F>(&mut tiles.key_rows, at, &from.x.k, keys, plan);
        }
        if comptime!(task.queries()) {
            copy_keys::<P, P::F>(&mut tiles.query_rows, at, &from.x.q, keys, plan);
        }
        if comptime!(variant.own_a()) {
            copy_keys::<P, P::F>(&mut tiles.erase_rows, at, &from.x.a, &place.rows, plan);
        }
        if comptime!(variant.low_rank()) {
            copy_keys::<P, P::F>(&mut tiles.write_rows, at, &from.x.b, &place.rows, plan);
        }
    }
}

#[cube]
fn copy_keys<P: StateEngine, T: Float>(
    to: &mut SharedMemory<Vector<P::E, P::N>>,
    at: usize,
    from: &Array<Vector<T, P::G>>,
    rows: &Rows,
    #[comptime] plan: StatePlan,
) {
    let window = comptime!(plan.copied_factor(plan.key_window()));
    load_async::<T, P::G, P::E, P::N>(to, at, from, rows, 0usize, window);
}

/// Value-wide and [C, C] matrices.
#[cube]
fn copy_values_and_matrices_async<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let task = comptime!(plan.task);
    let wide = comptime!(plan.copied(plan.value_window()));
    let own = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    let at = stage * comptime!(plan.square_numbers());
    let values_at = stage * comptime!(plan.value_numbers());
    let values = &place.values;
    let to = &mut tiles.values;
    load_async::<P::F, P::G, P::E, P::N>(to, values_at, &from.values, values, from.first, wide);
    if comptime!(variant.solves() && plan.producers() == 0) {
        copy_square::<P>(&mut tiles.inverse, at, &from.intra.inverse, &own, plan);
    }
    if comptime!(task.applies_a_qk(variant) && plan.producers() == 0) {
        if comptime!(variant.low_rank()) {
            copy_square::<P>(&mut tiles.a_of_u, at, &from.intra.a_qb, &own, plan);
        } else {
            copy_square::<P>(&mut tiles.a_of_u, at, &from.intra.a_qk, &own, plan);
        }
    }
    if comptime!(variant.low_rank() && !task.local()) {
        copy_square::<P>(&mut tiles.a_of_v, at, &from.intra.a_qk, &own, plan);
    }
    if comptime!(variant.low_rank() && task.backward && !task.local()) {
        copy_square::<P>(&mut tiles.a_ak, at, &from.intra.a_ak, &own, plan);
    }
    if comptime!(variant.low_rank() && !task.backward) {
        let to = &mut tiles.a_ak_v;
        let a_ak_v = &from.intra.a_ak_v;
        load_async::<P::E, P::G, P::E, P::N>(to, values_at, a_ak_v, values, from.first, wide);
    }
}

#[cube]
fn copy_square<P: StateEngine>(
    to: &mut SharedMemory<Vector<P::E, P::N>>,
    at: usize,
    from: &Array<Vector<P::E, P::G>>,
    own: &Rows,
    #[comptime] plan: StatePlan,
) {
    let window = comptime!(plan.copied_factor(plan.square_window()));
    load_async::<P::E, P::G, P::E, P::N>(to, at, from, own, 0usize, window);
}

/// Decay factors of a chunk, four numbers a copy.
#[cube]
fn copy_decay_factors_async<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    let all = comptime!(decay_factors::ROWS * plan.chunk / 4);
    #[unroll]
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + comptime!(turn * plan.units);
        if n < all {
            let begin = (place.index * all + n) * 4;
            let to = (stage * all + n) * 4;
            copy_async(&from.intra.decay_factors, begin, &mut tiles.decay_factors, to, 16usize);
        }
    }
}

/// Starts copying the scalar log decays of a chunk, one a unit; zeros where there is no token. Producers are units enough.
#[cube]
fn copy_log_decays_async(
    to: &mut SharedMemory<f32>,
    from: &Array<f32>,
    rows: &Rows,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    let i = UNIT_POS as usize;
    if i < comptime!(plan.chunk) {
        let at = stage * comptime!(plan.chunk) + i;
        let from_at = rows.start + i * rows.stride;
        copy_async_or_zeros(from, from_at, to, at, i < rows.valid, 4usize);
    }
}

/// Points to chunk `c` of the pass.
#[cube]
pub(crate) fn select_chunk<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    c: usize,
    #[comptime] plan: StatePlan,
) {
    let stage = c % comptime!(plan.stages());
    let square = c % comptime!(plan.score_stages());
    tiles.at_rows = stage * comptime!(plan.key_numbers());
    tiles.at_values = stage * comptime!(plan.value_numbers());
    tiles.at_square = square * comptime!(plan.square_stride());
    let factors = c % comptime!(plan.decay_factor_stages());
    tiles.at_decay_factors = factors * comptime!(plan.decay_factor_rows() * plan.chunk);
    tiles.at_log_decays = stage * comptime!(plan.chunk);
}

/// Loads decay factors and values of a chunk. Ends with a barrier.
#[cube]
pub(crate) fn load_chunk<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.direct()) {
        sync_cube();
        let all = comptime!(decay_factors::ROWS * plan.chunk);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                tiles.decay_factors[n] = from.intra.decay_factors[place.index * all + n];
            }
        }
        let window = comptime!(plan.value_window());
        load::<P::F, P::G, P::E, P::N>(
            &mut tiles.values,
            &from.values,
            &place.values,
            from.first,
            window,
        );
        sync_cube();
    }
}

/// Loads a [C, C] matrix.
#[cube]
pub(crate) fn load_square<P: StateEngine>(
    to: &mut SharedMemory<Vector<P::E, P::N>>,
    from: &Array<Vector<P::E, P::G>>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.direct()) {
        sync_cube();
        let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
        let window = comptime!(plan.square_window());
        load::<P::E, P::G, P::E, P::N>(to, from, &rows, 0usize, window);
        sync_cube();
    }
}

/// Loads A_qk, or A_qb in a low rank transition: the matrix that multiplies U.
#[cube]
pub(crate) fn load_a_of_u<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.variant.low_rank()) {
        load_square::<P>(&mut tiles.a_of_u, &from.intra.a_qb, place, plan);
    } else {
        load_square::<P>(&mut tiles.a_of_u, &from.intra.a_qk, place, plan);
    }
}

/// Loads values.
#[cube]
pub(crate) fn load_values<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.direct()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<P::F, P::G, P::E, P::N>(
            &mut tiles.values,
            &from.values,
            &place.values,
            from.first,
            window,
        );
        sync_cube();
    }
}

/// Loads A_ak V.
#[cube]
pub(crate) fn load_a_ak_v<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.direct()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<P::E, P::G, P::E, P::N>(
            &mut tiles.a_ak_v,
            &from.intra.a_ak_v,
            &place.values,
            from.first,
            window,
        );
        sync_cube();
    }
}

/// Loads one slice of rows of keys out of a tensor.
#[cube]
fn load_slice<P: StateEngine, T: Float>(
    to: &mut SharedMemory<Vector<P::E, P::N>>,
    from: &Array<Vector<T, P::G>>,
    rows: &Rows,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.direct()) {
        sync_cube();
        let first = slice * comptime!(plan.key_slice);
        load::<T, P::G, P::E, P::N>(to, from, rows, first, comptime!(plan.key_window()));
        sync_cube();
    }
}

/// Rows of the query: q, or what the intra-chunk stage multiplied by a vector decay, as of all rows below.
#[cube]
pub(crate) fn load_query_rows<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    let to = &mut tiles.query_rows;
    if comptime!(plan.variant.vector()) {
        load_slice::<P, P::E>(to, &from.intra.q, &place.rows, slice, plan);
    } else {
        load_slice::<P, P::F>(to, &from.x.q, &place.keys, slice, plan);
    }
}

/// Rows of the erase key: a, e or k.
#[cube]
pub(crate) fn load_erase_rows<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    let to = &mut tiles.erase_rows;
    if comptime!(plan.variant.vector()) {
        load_slice::<P, P::E>(to, &from.intra.a, &place.rows, slice, plan);
    } else if comptime!(plan.variant.own_a()) {
        load_slice::<P, P::F>(to, &from.x.a, &place.rows, slice, plan);
    } else {
        load_slice::<P, P::F>(to, &from.x.k, &place.keys, slice, plan);
    }
}

/// Rows where U is written: b, or k.
#[cube]
pub(crate) fn load_write_rows<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.variant.low_rank()) {
        let to = &mut tiles.write_rows;
        if comptime!(plan.variant.vector()) {
            load_slice::<P, P::E>(to, &from.intra.b, &place.rows, slice, plan);
        } else {
            load_slice::<P, P::F>(to, &from.x.b, &place.rows, slice, plan);
        }
    } else {
        load_key_rows_into::<P>(&mut tiles.write_rows, from, place, slice, plan);
    }
}

/// Rows where v is written, k.
#[cube]
pub(crate) fn load_key_rows<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    place: &Place,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    load_key_rows_into::<P>(&mut tiles.key_rows, from, place, slice, plan);
}

#[cube]
fn load_key_rows_into<P: StateEngine>(
    to: &mut SharedMemory<Vector<P::E, P::N>>,
    from: &PassInputs<P>,
    place: &Place,
    slice: usize,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.variant.vector()) {
        load_slice::<P, P::E>(to, &from.intra.k, &place.rows, slice, plan);
    } else {
        load_slice::<P, P::F>(to, &from.x.k, &place.keys, slice, plan);
    }
}
