//! Shared-memory tiles of the input gradients: a chunk's matrices, how they are filled, and how sums over
//! rows of gradients are collected.
//!
//! ```text
//! whole    every matrix of a chunk has a tile of its own, filled once by asynchronous copies in three
//!          groups, in the order of use: values | S, keys | dS'. `Mma` works on one group while the next
//!          arrives, and no barrier stands between two products.
//! sliced   two tiles hold slices of whatever is multiplied next, each filled between two barriers:
//!          `Plain` and `Tf32`, and `Mma` where a chunk is too large for shared memory.
//! ```
//! Everything else is the same: a product takes a matrix by its name.

use crate::chunkwise::arguments::{Operands, RowPairs, SavedTensors, StageTypes};
use crate::chunkwise::chunk::Place;
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{CopyGroup, Keys, States, TokenOffset, Values};
use crate::tile::{
    Acc, Grid, Pair, Rows, Window, column, inside, lay, load, load_async, load_matrix, own_or,
    request, row, set, tile, width_of, zeros,
};
use cubecl::prelude::*;

/// Tensors that the input gradients of a chunk read.
#[derive(CubeType)]
pub(crate) struct GradientInputs<P: StageTypes> {
    pub x: Operands<P::F, P::G>,
    pub pairs: RowPairs<P::F, P::M>,
    pub saved: SavedTensors<P::F, P::E, P::G>,
    pub place: Place,
}

/// Factors of a term with a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StateFactors {
    pub values: Values,
    pub states: States,
}

/// Partial sums of a row.
pub(crate) const SLOTS: usize = 16;
/// From the partial sums of one row to those of the next: rows side by side do not share a bank.
const NEXT: usize = SLOTS + 1;

/// Tiles, and scratch.
#[derive(CubeType)]
pub(crate) struct GradientTiles<X: Float, N: Size> {
    /// Sliced: left and right operands.
    pub left: SharedMemory<Vector<X, N>>,
    pub right: SharedMemory<Vector<X, N>>,
    q: SharedMemory<Vector<X, N>>,
    k: SharedMemory<Vector<X, N>>,
    a: SharedMemory<Vector<X, N>>,
    b: SharedMemory<Vector<X, N>>,
    pub v: SharedMemory<Vector<X, N>>,
    u: SharedMemory<Vector<X, N>>,
    pub r: SharedMemory<Vector<X, N>>,
    d_o: SharedMemory<Vector<X, N>>,
    pub start: SharedMemory<Vector<X, N>>,
    pub end: SharedMemory<Vector<X, N>>,
    /// -beta in a delta rule, else 1, [C].
    pub scales: SharedMemory<f32>,
    /// Partial sums of rows, [C, NEXT].
    pub partial: SharedMemory<f32>,
    /// dG, [C]; vector decay: [C, key_slice].
    pub d_decays: SharedMemory<f32>,
    /// Vector decay: terms of dG that reach the end of the chunk, [`Plan::end_rows`] rows of key_slice.
    pub ends: SharedMemory<f32>,
}

impl GradientPlan {
    pub fn rows_grid(&self) -> Grid {
        self.grid(self.chunk, self.key_slice)
    }

    /// The values that k writes.
    pub fn key_values(&self) -> Values {
        if self.variant.delta() { Values::U } else { Values::V }
    }

    /// The erase key: e or a, or k.
    pub fn erase_key(&self) -> Keys {
        if self.variant.own_a() { Keys::A } else { Keys::K }
    }

    /// The rows that U is written with.
    pub fn write_key(&self) -> Keys {
        if self.variant.low_rank() { Keys::B } else { Keys::K }
    }

    fn states_numbers(&self) -> usize {
        self.value_slice * self.stride(self.key_slice)
    }

    /// Rows of terms that reach the end of the chunk: a plane sums up those of its 16 tokens.
    pub fn end_rows(&self) -> usize {
        if self.has_planes() { self.chunk / 16 } else { self.chunk }
    }

    /// Tiles of a chunk, in numbers.
    fn gradient_tile_numbers(&self) -> Tiles {
        let variant = self.variant;
        let by_key = self.key_numbers();
        let states = self.states_numbers();
        // [C, value_slice], [value_slice, key_slice] or [C, key_slice].
        let any = self.value_numbers().max(by_key).max(states);
        let own = |there: bool, numbers: usize| (self.whole && there).then_some(numbers);
        Tiles {
            left: self.value_numbers(),
            right: if self.whole { states } else { any },
            end: own(true, states),
            v: own(true, self.value_numbers()),
            u_and_r: own(variant.solves(), self.value_numbers()),
            q_and_k: own(true, by_key),
            a: own(variant.own_a(), by_key),
            b: own(variant.low_rank(), by_key),
            scales: self.chunk,
            partial: self.chunk * NEXT,
            d_decays: if variant.vector() { by_key } else { self.chunk },
            ends: match variant.vector() {
                true => self.end_rows() * self.stride(self.key_slice),
                false => 1,
            },
        }
    }

    /// Bytes of [`gradient_tiles`].
    pub fn gradient_tile_memory(&self) -> usize {
        let tiles = self.gradient_tile_numbers();
        let pairs = [tiles.u_and_r, tiles.q_and_k].into_iter().flatten().sum::<usize>();
        let single = [tiles.end, tiles.v, tiles.a, tiles.b].into_iter().flatten().sum::<usize>();
        let rows = tiles.left + tiles.right + 2 * pairs + single;
        let scratch = tiles.scales + tiles.partial + tiles.d_decays + tiles.ends;
        rows * self.engine.bytes() + 4 * scratch
    }

    /// Whether the next slice is under way while one is multiplied, and the rows that a gradient is of are held while
    /// it is made, as where decays make products long. It costs registers. On the plain engine CubeCL 0.10 does not
    /// compile a delta rule so through SPIR-V.
    pub fn requests_ahead(&self) -> bool {
        self.by_blocks()
    }

    fn states_window(&self) -> Window {
        self.window(self.value_slice, self.key_slice, self.key_width)
    }
}

/// Numbers of the tiles. A role without one of its own shares `left`, where it is value-wide, or `right`.
struct Tiles {
    left: usize,
    right: usize,
    end: Option<usize>,
    v: Option<usize>,
    /// U and R, each.
    u_and_r: Option<usize>,
    /// q and k, each.
    q_and_k: Option<usize>,
    a: Option<usize>,
    b: Option<usize>,
    scales: usize,
    partial: usize,
    d_decays: usize,
    ends: usize,
}

/// The tiles of a plan: roles that the plan lacks share a tile with others and are never filled.
#[cube]
pub(crate) fn gradient_tiles<X: Float, N: Size>(
    #[comptime] plan: GradientPlan,
) -> GradientTiles<X, N> {
    let left = tile::<X, N>(comptime!(plan.gradient_tile_numbers().left));
    let right = tile::<X, N>(comptime!(plan.gradient_tile_numbers().right));
    GradientTiles::<X, N> {
        left,
        right,
        end: own_or::<X, N>(right, comptime!(plan.gradient_tile_numbers().end)),
        v: own_or::<X, N>(left, comptime!(plan.gradient_tile_numbers().v)),
        u: own_or::<X, N>(left, comptime!(plan.gradient_tile_numbers().u_and_r)),
        r: own_or::<X, N>(left, comptime!(plan.gradient_tile_numbers().u_and_r)),
        q: own_or::<X, N>(right, comptime!(plan.gradient_tile_numbers().q_and_k)),
        k: own_or::<X, N>(right, comptime!(plan.gradient_tile_numbers().q_and_k)),
        a: own_or::<X, N>(right, comptime!(plan.gradient_tile_numbers().a)),
        b: own_or::<X, N>(right, comptime!(plan.gradient_tile_numbers().b)),
        d_o: left,
        start: right,
        scales: SharedMemory::<f32>::new(comptime!(plan.gradient_tile_numbers().scales)),
        partial: SharedMemory::<f32>::new(comptime!(plan.gradient_tile_numbers().partial)),
        d_decays: SharedMemory::<f32>::new(comptime!(plan.gradient_tile_numbers().d_decays)),
        ends: SharedMemory::<f32>::new(comptime!(plan.gradient_tile_numbers().ends)),
    }
}

/// The state's rows of a chunk, from value `first` on.
#[cube]
fn state_rows(place: &Place, first: usize, #[comptime] plan: GradientPlan) -> Rows {
    let width = comptime!(plan.key_width);
    Rows {
        start: (place.index * comptime!(plan.value_width) + first) * width,
        stride: width,
        valid: comptime!(plan.value_width) - first,
    }
}

/// Whole: starts copying one group of tiles.
#[cube]
pub(crate) fn copy_group_async<P: StageTypes>(
    tiles: &mut GradientTiles<P::X, P::N>,
    from: &GradientInputs<P>,
    #[comptime] group: CopyGroup,
    #[comptime] plan: GradientPlan,
) {
    let variant = comptime!(plan.variant);
    let square = comptime!(plan.states_window());
    let rows = &from.place.values;
    if comptime!(group == CopyGroup::Values) {
        copy_values::<P, P::F>(&mut tiles.d_o, &from.saved.d_o, rows, plan);
        if comptime!(variant.solves()) {
            copy_values::<P, P::E>(&mut tiles.u, &from.saved.u, rows, plan);
            copy_values::<P, P::E>(&mut tiles.r, &from.saved.r, rows, plan);
        }
    }
    // A delta rule wants v for the gradient of beta alone, which comes last.
    let values = comptime!(if variant.delta() { CopyGroup::End } else { CopyGroup::Values });
    if comptime!(group == values) {
        copy_values::<P, P::F>(&mut tiles.v, &from.x.v, rows, plan);
    }
    let states = state_rows(&from.place, 0usize, plan);
    if comptime!(group == CopyGroup::Start) {
        let to = &mut tiles.start;
        let starts = &from.saved.states;
        load_async::<P::E, P::G, P::X, P::N>(to, 0usize, starts, &states, 0usize, square);
        copy_keys::<P>(&mut tiles.k, &from.x.k, &from.place.keys, plan);
        copy_keys::<P>(&mut tiles.q, &from.x.q, &from.place.keys, plan);
        if comptime!(variant.own_a()) {
            copy_keys::<P>(&mut tiles.a, &from.x.a, &from.place.rows, plan);
        }
        if comptime!(variant.low_rank()) {
            copy_keys::<P>(&mut tiles.b, &from.x.b, &from.place.rows, plan);
        }
    }
    if comptime!(group == CopyGroup::End) {
        let to = &mut tiles.end;
        let ends = &from.saved.d_states;
        load_async::<P::E, P::G, P::X, P::N>(to, 0usize, ends, &states, 0usize, square);
    }
}

#[cube]
fn copy_values<P: StageTypes, T: Float>(
    to: &mut SharedMemory<Vector<P::X, P::N>>,
    from: &Array<Vector<T, P::G>>,
    rows: &Rows,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.value_window());
    load_async::<T, P::G, P::X, P::N>(to, 0usize, from, rows, 0usize, window);
}

#[cube]
fn copy_keys<P: StageTypes>(
    to: &mut SharedMemory<Vector<P::X, P::N>>,
    from: &Array<Vector<P::F, P::G>>,
    rows: &Rows,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.key_window());
    load_async::<P::F, P::G, P::X, P::N>(to, 0usize, from, rows, 0usize, window);
}

/// The tile of a value-wide matrix, as the left or right operand.
#[cube]
pub(crate) fn values_tile<X: Float, N: Size>(
    tiles: &GradientTiles<X, N>,
    #[comptime] which: Values,
    #[comptime] right: bool,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<X, N>> {
    if comptime!(!plan.whole) {
        if comptime!(right) { tiles.right } else { tiles.left }
    } else if comptime!(which == Values::V) {
        tiles.v
    } else if comptime!(which == Values::U) {
        tiles.u
    } else if comptime!(which == Values::R) {
        tiles.r
    } else {
        tiles.d_o
    }
}

/// The tile of a key-wide matrix.
#[cube]
pub(crate) fn keys_tile<X: Float, N: Size>(
    tiles: &GradientTiles<X, N>,
    #[comptime] which: Keys,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<X, N>> {
    if comptime!(!plan.whole) {
        tiles.right
    } else if comptime!(which == Keys::Q) {
        tiles.q
    } else if comptime!(which == Keys::K) {
        tiles.k
    } else if comptime!(which == Keys::A) {
        tiles.a
    } else {
        tiles.b
    }
}

/// The tile of a state.
#[cube]
pub(crate) fn state_tile<X: Float, N: Size>(
    tiles: &GradientTiles<X, N>,
    #[comptime] which: States,
) -> SharedMemory<Vector<X, N>> {
    // Sliced, both are the right tile.
    if comptime!(which == States::Start) { tiles.start } else { tiles.end }
}

/// Sliced: this unit's part of a slice of a value-wide matrix, requested and not yet waited for; the matrix is of the
/// tensors' type or of that between stages.
#[derive(CubeType)]
pub(crate) struct ComingValues<P: StageTypes> {
    of_tensors: Array<Vector<P::F, P::G>>,
    between: Array<Vector<P::E, P::G>>,
}

#[cube]
pub(crate) fn coming_values<P: StageTypes>(#[comptime] plan: GradientPlan) -> ComingValues<P> {
    let read = width_of::<P::G>();
    let all = comptime!(if plan.whole { 1 } else { plan.value_window().turns(read) });
    ComingValues::<P> { of_tensors: Array::new(all), between: Array::new(all) }
}

/// Sliced: requests columns `first..` of a value-wide matrix, [C, value_slice].
#[cube]
pub(crate) fn request_values<P: StageTypes>(
    coming: &mut ComingValues<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Values,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.value_window());
    let rows = &from.place.values;
    if comptime!(!plan.whole) {
        if comptime!(which == Values::V) {
            request::<P::F, P::G>(&mut coming.of_tensors, &from.x.v, rows, first, window);
        } else if comptime!(which == Values::DO) {
            request::<P::F, P::G>(&mut coming.of_tensors, &from.saved.d_o, rows, first, window);
        } else if comptime!(which == Values::U) {
            request::<P::E, P::G>(&mut coming.between, &from.saved.u, rows, first, window);
        } else {
            request::<P::E, P::G>(&mut coming.between, &from.saved.r, rows, first, window);
        }
    }
}

#[cube]
fn lay_values<P: StageTypes>(
    to: &mut SharedMemory<Vector<P::X, P::N>>,
    coming: &ComingValues<P>,
    #[comptime] which: Values,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.value_window());
    if comptime!(which == Values::V || which == Values::DO) {
        lay::<P::F, P::G, P::X, P::N>(to, &coming.of_tensors, window);
    } else {
        lay::<P::E, P::G, P::X, P::N>(to, &coming.between, window);
    }
}

/// Sliced: puts two value-wide matrices into their tiles, between two barriers.
#[cube]
pub(crate) fn lay_value_operands<P: StageTypes>(
    tiles: &mut GradientTiles<P::X, P::N>,
    left: &ComingValues<P>,
    right: &ComingValues<P>,
    #[comptime] factors: [Values; 2],
    #[comptime] plan: GradientPlan,
) {
    if comptime!(!plan.whole) {
        sync_cube();
        lay_values::<P>(&mut tiles.left, left, factors[0], plan);
        lay_values::<P>(&mut tiles.right, right, factors[1], plan);
        sync_cube();
    }
}

/// Sliced: as [`ComingValues`], of a state.
#[cube]
pub(crate) fn coming_state<P: StageTypes>(
    #[comptime] plan: GradientPlan,
) -> Array<Vector<P::E, P::G>> {
    let read = width_of::<P::G>();
    Array::new(comptime!(if plan.whole { 1 } else { plan.states_window().turns(read) }))
}

/// Sliced: requests a state's values from `first` on and keys from `key` on.
#[cube]
pub(crate) fn request_state<P: StageTypes>(
    coming: &mut Array<Vector<P::E, P::G>>,
    from: &GradientInputs<P>,
    first: usize,
    key: usize,
    #[comptime] which: States,
    #[comptime] plan: GradientPlan,
) {
    // Behind the last value there is none.
    let first = min(first, comptime!(plan.value_width));
    let rows = state_rows(&from.place, first, plan);
    let window = comptime!(plan.states_window());
    if comptime!(!plan.whole) {
        if comptime!(which == States::Start) {
            request::<P::E, P::G>(coming, &from.saved.states, &rows, key, window);
        } else {
            request::<P::E, P::G>(coming, &from.saved.d_states, &rows, key, window);
        }
    }
}

/// Sliced: puts a value-wide matrix and a state into their tiles, between two barriers.
#[cube]
pub(crate) fn lay_state_operands<P: StageTypes>(
    tiles: &mut GradientTiles<P::X, P::N>,
    values: &ComingValues<P>,
    state: &Array<Vector<P::E, P::G>>,
    #[comptime] factors: StateFactors,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(!plan.whole) {
        sync_cube();
        lay_values::<P>(&mut tiles.left, values, factors.values, plan);
        let window = comptime!(plan.states_window());
        lay::<P::E, P::G, P::X, P::N>(&mut tiles.right, state, window);
        sync_cube();
    }
}

/// Sliced: loads one slice of rows of keys between two barriers.
#[cube]
pub(crate) fn load_key_rows<P: StageTypes>(
    tiles: &mut GradientTiles<P::X, P::N>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Keys,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(!plan.whole) {
        let window = comptime!(plan.key_window());
        let (keys, rows) = (&from.place.keys, &from.place.rows);
        let to = &mut tiles.right;
        sync_cube();
        if comptime!(which == Keys::Q) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.q, keys, first, window);
        } else if comptime!(which == Keys::K) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.k, keys, first, window);
        } else if comptime!(which == Keys::A) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.a, rows, first, window);
        } else {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.b, rows, first, window);
        }
        sync_cube();
    }
}

/// One slice of a key-wide matrix where the gradients of its rows lie in registers, or of the rows
/// next to these. Whole: from its tile, by `ldmatrix`, which deals out a 16 x 16 block as two fragments
/// side by side lie. Sliced: from the tensor.
#[cube]
pub(crate) fn load_fragments<P: StageTypes>(
    tiles: &GradientTiles<P::X, P::N>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Keys,
    #[comptime] offset: TokenOffset,
    #[comptime] plan: GradientPlan,
) -> Acc {
    let mut acc = zeros(comptime!(plan.rows_grid().fragments()));
    if comptime!(plan.whole) {
        let tile = keys_tile::<P::X, P::N>(tiles, which, plan);
        fragments_of_tile::<P::X, P::N>(&mut acc, &tile, offset, plan);
    } else if comptime!(which == Keys::Q) {
        fragments_of_tensor::<P::F, P::M>(
            &mut acc,
            &from.pairs.q,
            &from.place.keys,
            first,
            offset,
            plan,
        );
    } else if comptime!(which == Keys::K) {
        fragments_of_tensor::<P::F, P::M>(
            &mut acc,
            &from.pairs.k,
            &from.place.keys,
            first,
            offset,
            plan,
        );
    } else if comptime!(which == Keys::A) {
        fragments_of_tensor::<P::F, P::M>(
            &mut acc,
            &from.pairs.a,
            &from.place.rows,
            first,
            offset,
            plan,
        );
    } else {
        fragments_of_tensor::<P::F, P::M>(
            &mut acc,
            &from.pairs.b,
            &from.place.rows,
            first,
            offset,
            plan,
        );
    }
    acc
}

#[cube]
fn fragments_of_tile<X: Float, N: Size>(
    acc: &mut Acc,
    from: &SharedMemory<Vector<X, N>>,
    #[comptime] offset: TokenOffset,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let across = comptime!(grid.fragment_columns());
    let stride = comptime!(plan.stride(plan.key_slice));
    let lane = UNIT_POS as usize % 32;
    let plane = UNIT_POS as usize / 32;
    let columns =
        plane / comptime!(grid.down()) * comptime!(grid.n / grid.across()) + lane / 16 * 8;
    if inside(0usize, grid) {
        #[unroll]
        for r in 0..comptime!(grid.fragment_rows()) {
            let i = plane % comptime!(grid.down()) * 16
                + lane % 16
                + comptime!(grid.step(r * across, 0)[0]);
            let i = at_offset(i, offset, plan);
            #[unroll]
            for c in 0..comptime!(across / 2) {
                let at = i * stride + columns;
                let x = load_matrix::<X, N>(from, at, comptime!(c * 16), false);
                #[unroll]
                for n in 0..2usize {
                    let fragment = acc.index_mut(comptime!(r * across + 2 * c + n));
                    set(fragment, 0usize, Pair::cast_from(x[comptime!(2 * n)]));
                    set(fragment, 1usize, Pair::cast_from(x[comptime!(2 * n + 1)]));
                }
            }
        }
    }
}

/// Row `i` plus the offset, or the chunk's first or last row where there is none.
#[cube]
fn at_offset(i: usize, #[comptime] offset: TokenOffset, #[comptime] plan: GradientPlan) -> usize {
    if comptime!(offset == TokenOffset::Previous) {
        max(i, 1usize) - 1
    } else if comptime!(offset == TokenOffset::Next) {
        min(i + 1, comptime!(plan.chunk - 1))
    } else {
        i
    }
}

#[cube]
fn fragments_of_tensor<F: Float, M: Size>(
    acc: &mut Acc,
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    first: usize,
    #[comptime] offset: TokenOffset,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = first + column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = at_offset(row(f, h, grid), offset, plan);
            set(acc.index_mut(f), h, pair_at::<F, M>(from, rows, i, d, plan));
        }
    }
}

/// Two numbers of a row; zeros where there is no row, or no such column.
#[cube]
fn pair_at<F: Float, M: Size>(
    from: &Array<Vector<F, M>>,
    rows: &Rows,
    i: usize,
    d: usize,
    #[comptime] plan: GradientPlan,
) -> Pair {
    let width = M::value();
    let mut x = Pair::new(0.0f32);
    if i < rows.valid && d < comptime!(plan.key_width) {
        let at = rows.start + i * rows.stride + d;
        if comptime!(width == 1) {
            x[0] = f32::cast_from(from[at]);
            if d + 1 < comptime!(plan.key_width) {
                x[1] = f32::cast_from(from[at + 1]);
            }
        } else {
            x = Pair::cast_from(from[at / 2]);
        }
    }
    x
}

/// Sum of the first `slots` partial sums of row `i`; 0 where there is no such row.
#[cube]
pub(crate) fn row_sum(
    partial: &SharedMemory<f32>,
    i: usize,
    valid: usize,
    #[comptime] slots: usize,
) -> f32 {
    let mut sum = 0.0f32;
    if i < valid {
        #[unroll]
        for n in 0..slots {
            sum += partial[i * NEXT + n];
        }
    }
    sum
}

/// Where a unit's partial sum of a row goes.
#[cube]
pub(crate) fn partial_at(i: usize, slot: usize) -> usize {
    i * NEXT + slot
}

/// The sum of every unit's number. Barriers in between; `partial` is free before and after.
#[cube]
pub(crate) fn cube_sum(
    partial: &mut SharedMemory<f32>,
    x: f32,
    #[comptime] plan: GradientPlan,
) -> f32 {
    let unit = UNIT_POS as usize;
    sync_cube();
    partial[unit] = x;
    sync_cube();
    if unit < 16 {
        let mut sum = 0.0f32;
        for n in 0..comptime!(plan.units / 16) {
            sum += partial[unit + n * 16];
        }
        partial[unit] = sum;
    }
    sync_cube();
    let mut sum = 0.0f32;
    #[unroll]
    for n in 0..16usize {
        sum += partial[n];
    }
    sync_cube();
    sum
}
