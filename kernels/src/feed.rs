//! What the walk of stage 2 works on: the tiles of a chunk, and how they are filled.
//!
//! ```text
//! staged      tensor cores: every role has a tile of its own. `issue` starts copies of everything that
//!             a chunk brings along, where they fit while another chunk is at work, and `turn_to` points
//!             to the chunk at work.
//! otherwise   the plain engine: one tile of each shape. `begin` and `ready_..` fill it with what is
//!             used next, between two barriers; for tensor cores they do nothing.
//! ```
//! Either way the walk asks for a tile by its role.

use crate::chunk::{Place, own};
use crate::pass::{Local, Task};
use crate::plan::Plan;
use crate::scores::{Operands, table};
use crate::tile::{Rows, Window, load, load_async, tile};
use cubecl::prelude::barrier::{Barrier, copy_async};
use cubecl::prelude::*;

/// Tiles of what a chunk brings along. The plain engine loads one slice at a time into one tile of
/// each shape, right before it is used. With tensor cores every role has a tile of its own, twice: while
/// one chunk is worked on, the next one is copied into the other half. With scorers rows and values
/// have it three times.
#[derive(CubeType)]
pub(crate) struct Feed<E: Float, N: Size> {
    pub reads: SharedMemory<Vector<E, N>>,
    pub asks: SharedMemory<Vector<E, N>>,
    pub writes: SharedMemory<Vector<E, N>>,
    pub keys: SharedMemory<Vector<E, N>>,
    pub values: SharedMemory<Vector<E, N>>,
    pub local: SharedMemory<Vector<E, N>>,
    pub inverse: SharedMemory<Vector<E, N>>,
    /// What is in front of U: reads, or in a low rank transition reads_b.
    pub mix: SharedMemory<Vector<E, N>>,
    /// Low rank: reads.
    pub mix_values: SharedMemory<Vector<E, N>>,
    /// Low rank, backward: coupling.
    pub coupling: SharedMemory<Vector<E, N>>,
    pub scales: SharedMemory<f32>,
    /// For scorers: gates.
    pub gates: SharedMemory<f32>,
    /// Where the chunk at work lies in tiles of rows, of values, of squares, in scales and in gates.
    pub at_rows: usize,
    pub at_values: usize,
    pub at_square: usize,
    pub at_scales: usize,
    pub at_gates: usize,
}

impl Plan {
    pub fn staged(&self) -> bool {
        self.engine == crate::Engine::Mma
    }

    /// Whether the walk makes scores itself.
    pub fn scores(&self) -> bool {
        self.scorers > 0
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
        Window { units: self.copiers(), ..window }
    }

    /// Whether a role has a tile of its own.
    fn own_tile(&self, role: bool) -> bool {
        self.staged() && role
    }
}

#[cube]
pub(crate) fn feed<E: Float, N: Size>(
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) -> Feed<E, N> {
    let variant = comptime!(plan.variant);
    let halves = comptime!(plan.halves);
    let rows = tile::<E, N>(comptime!(halves * plan.row_numbers()));
    let values = tile::<E, N>(comptime!(halves * plan.value_numbers()));
    let squares = comptime!(variant.solves() || (task.mixes(variant) && !plan.scores()));
    let square = tile::<E, N>(comptime!(if squares { halves * plan.square_numbers() } else { 16 }));
    let own_asks = comptime!(variant.own_a() || (variant.vector() && variant.solves()));
    let low_rank = comptime!(plan.own_tile(variant.low_rank()));
    let reads = if comptime!(plan.own_tile(task.reads() && task.keys(variant))) {
        tile::<E, N>(comptime!(halves * plan.row_numbers()))
    } else {
        rows
    };
    let asks = if comptime!(plan.own_tile(own_asks)) {
        tile::<E, N>(comptime!(halves * plan.row_numbers()))
    } else {
        rows
    };
    let writes = if low_rank { tile::<E, N>(comptime!(halves * plan.row_numbers())) } else { rows };
    let local = if comptime!(low_rank && !task.backward) {
        tile::<E, N>(comptime!(halves * plan.value_numbers()))
    } else {
        values
    };
    let inverse = if comptime!(plan.own_tile(variant.solves() && task.mixes(variant))) {
        tile::<E, N>(comptime!(halves * plan.square_numbers()))
    } else {
        square
    };
    let mix_values = if comptime!(low_rank && !task.summary()) {
        tile::<E, N>(comptime!(halves * plan.square_numbers()))
    } else {
        square
    };
    let coupling = if comptime!(low_rank && task.backward && !task.summary()) {
        tile::<E, N>(comptime!(halves * plan.square_numbers()))
    } else {
        square
    };
    Feed::<E, N> {
        reads,
        asks,
        writes,
        keys: rows,
        values,
        local,
        inverse,
        mix: square,
        mix_values,
        coupling,
        scales: SharedMemory::<f32>::new_aligned(
            comptime!(plan.squares() * table::ROWS * plan.chunk),
            16usize,
        ),
        gates: SharedMemory::<f32>::new(comptime!(if plan.scores() {
            halves * plan.chunk
        } else {
            1
        })),
        at_rows: 0usize.runtime(),
        at_values: 0usize.runtime(),
        at_square: 0usize.runtime(),
        at_scales: 0usize.runtime(),
        at_gates: 0usize.runtime(),
    }
}

/// Starts copying everything that a chunk brings along into half `half` of the tiles, and promises it to
/// `barrier`, which counts the [`Plan::copiers`]: they call this, and no others.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn issue<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    barrier: &Shared<Barrier>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    values: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    half: usize,
    #[comptime] task: Task,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let keys = comptime!(plan.copied(plan.key_window()));
    let wide = comptime!(plan.copied(plan.value_window()));
    let square = comptime!(plan.copied(plan.square_window()));
    let rows = half * comptime!(plan.row_numbers());
    let own = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    let at = half * comptime!(plan.square_numbers());
    let values_at = half * comptime!(plan.value_numbers());
    if comptime!(variant.vector()) {
        if comptime!(task.keys(variant)) {
            load_async::<E, G, E, N>(&mut feed.keys, rows, &local.k, &place.rows, 0usize, keys);
        }
        if comptime!(task.reads()) {
            load_async::<E, G, E, N>(&mut feed.reads, rows, &local.q, &place.rows, 0usize, keys);
        }
        if comptime!(variant.solves()) {
            load_async::<E, G, E, N>(&mut feed.asks, rows, &local.a, &place.rows, 0usize, keys);
        }
        if comptime!(variant.low_rank()) {
            load_async::<E, G, E, N>(&mut feed.writes, rows, &local.b, &place.rows, 0usize, keys);
        }
    } else {
        if comptime!(task.keys(variant)) {
            load_async::<F, G, E, N>(&mut feed.keys, rows, &x.k, &place.keys, 0usize, keys);
        }
        if comptime!(task.reads()) {
            load_async::<F, G, E, N>(&mut feed.reads, rows, &x.q, &place.keys, 0usize, keys);
        }
        if comptime!(variant.own_a()) {
            load_async::<F, G, E, N>(&mut feed.asks, rows, &x.a, &place.rows, 0usize, keys);
        }
        if comptime!(variant.low_rank()) {
            load_async::<F, G, E, N>(&mut feed.writes, rows, &x.b, &place.rows, 0usize, keys);
        }
    }
    load_async::<F, G, E, N>(&mut feed.values, values_at, values, &place.values, first, wide);
    if comptime!(variant.solves()) {
        load_async::<E, G, E, N>(&mut feed.inverse, at, &local.inverse, &own, 0usize, square);
    }
    if comptime!(task.mixes(variant) && !plan.scores()) {
        if comptime!(variant.low_rank()) {
            load_async::<E, G, E, N>(&mut feed.mix, at, &local.reads_b, &own, 0usize, square);
        } else {
            load_async::<E, G, E, N>(&mut feed.mix, at, &local.reads, &own, 0usize, square);
        }
    }
    if comptime!(variant.low_rank() && !task.summary()) {
        load_async::<E, G, E, N>(&mut feed.mix_values, at, &local.reads, &own, 0usize, square);
    }
    if comptime!(variant.low_rank() && task.backward && !task.summary()) {
        load_async::<E, G, E, N>(&mut feed.coupling, at, &local.coupling, &own, 0usize, square);
    }
    if comptime!(variant.low_rank() && !task.backward) {
        let from = &place.values;
        load_async::<E, G, E, N>(&mut feed.local, values_at, &local.local, from, first, wide);
    }
    if comptime!(plan.scores()) {
        if comptime!(variant.scalar()) {
            issue_gates(&mut feed.gates, &x.g, &place.gates, half, plan);
        }
    } else {
        let all = comptime!(table::ROWS * plan.chunk / 4);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                let from = (place.index * all + n) * 4;
                let to = (half * all + n) * 4;
                copy_async(
                    &local.table.slice(from, from + 4),
                    &mut feed.scales.slice_mut(to, to + 4),
                    4u32,
                );
            }
        }
    }
    barrier.commit_copy_async();
    barrier.arrive();
}

/// Starts copying the scalar gates of a chunk, one a unit. Scorers are units enough.
#[cube]
fn issue_gates(
    to: &mut SharedMemory<f32>,
    from: &Array<f32>,
    rows: &Rows,
    half: usize,
    #[comptime] plan: Plan,
) {
    let i = UNIT_POS as usize;
    if i < comptime!(plan.chunk) {
        let at = half * comptime!(plan.chunk) + i;
        if i < rows.valid {
            let from_at = rows.start + i * rows.stride;
            copy_async(&from.slice(from_at, from_at + 1), &mut to.slice_mut(at, at + 1), 1u32);
        } else {
            to[at] = 0.0f32;
        }
    }
}

/// Points to chunk `c` of the walk.
#[cube]
pub(crate) fn turn_to<E: Float, N: Size>(feed: &mut Feed<E, N>, c: usize, #[comptime] plan: Plan) {
    let half = c % comptime!(plan.halves);
    let square = c % comptime!(plan.squares());
    feed.at_rows = half * comptime!(plan.row_numbers());
    feed.at_values = half * comptime!(plan.value_numbers());
    feed.at_square = square * comptime!(plan.square_numbers());
    feed.at_scales = square * comptime!(table::ROWS * plan.chunk);
    feed.at_gates = half * comptime!(plan.chunk);
}

/// Plain engine: loads scales and values of a chunk. Ends with a barrier.
#[cube]
pub(crate) fn begin<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    local: &Local<E, G>,
    values: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let all = comptime!(table::ROWS * plan.chunk);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                feed.scales[n] = local.table[place.index * all + n];
            }
        }
        let window = comptime!(plan.value_window());
        load::<F, G, E, N>(&mut feed.values, values, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads a [C, C] matrix.
#[cube]
pub(crate) fn ready_square<E: Float, G: Size, N: Size>(
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
pub(crate) fn ready_values<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    from: &Array<Vector<F, G>>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<F, G, E, N>(&mut feed.values, from, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads what tokens of a chunk leave in each other's answers.
#[cube]
pub(crate) fn ready_local<E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    local: &Local<E, G>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.staged()) {
        sync_cube();
        let window = comptime!(plan.value_window());
        load::<E, G, E, N>(&mut feed.local, &local.local, &place.values, first, window);
        sync_cube();
    }
}

/// Plain engine: loads one slice of rows of keys; `scaled` are those that stage 1 multiplied by a vector
/// decay, `given` the tensor's own, which lie in `rows`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn ready_slice<F: Float, E: Float, G: Size, N: Size>(
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

/// Rows that read the state, q.
#[cube]
pub(crate) fn ready_reads<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    ready_slice::<F, E, G, N>(&mut feed.reads, &local.q, &x.q, place, &place.keys, slice, plan);
}

/// Rows that ask the state: a, e or k.
#[cube]
pub(crate) fn ready_asks<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.own_a()) {
        ready_slice::<F, E, G, N>(&mut feed.asks, &local.a, &x.a, place, &place.rows, slice, plan);
    } else {
        ready_slice::<F, E, G, N>(&mut feed.asks, &local.a, &x.k, place, &place.keys, slice, plan);
    }
}

/// Rows where U is written: b, or k.
#[cube]
pub(crate) fn ready_writes<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.low_rank()) {
        ready_slice::<F, E, G, N>(
            &mut feed.writes,
            &local.b,
            &x.b,
            place,
            &place.rows,
            slice,
            plan,
        );
    } else {
        ready_slice::<F, E, G, N>(
            &mut feed.writes,
            &local.k,
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
pub(crate) fn ready_keys<F: Float, E: Float, G: Size, N: Size>(
    feed: &mut Feed<E, N>,
    x: &Operands<F, G>,
    local: &Local<E, G>,
    place: &Place,
    slice: usize,
    #[comptime] plan: Plan,
) {
    ready_slice::<F, E, G, N>(&mut feed.keys, &local.k, &x.k, place, &place.keys, slice, plan);
}
