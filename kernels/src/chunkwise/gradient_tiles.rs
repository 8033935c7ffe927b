//! Shared-memory tiles of the input gradients: a chunk's matrices, and how sums over rows of gradients are collected.
//!
//! ```text
//! whole    every matrix of a chunk has a tile of its own, filled by asynchronous copies in three
//!          groups, in the order of use: values | S, keys | dS'. `Mma` works on one group while the next
//!          arrives, with one barrier a group. Where keys are too wide for that, or for two cubes a
//!          multiprocessor, tiles of keys and states hold a slice of them, and the next slice takes
//!          the place of one that is through; S and dS' may take turns in one tile.
//! sliced   two tiles hold slices of whatever is multiplied next, each filled between two barriers (gradient_slices.rs):
//!          `Plain` and `Tf32`, and `Mma` where a chunk is too large for shared memory. Where gradients are made
//!          together (`by_blocks`), both factors of products over values may have two, and so may keys.
//!          Around a state pass on `Mma` keys have tiles of their own, in f32; values and states keep their 16 bits.
//! ```
//! Everything else is the same: a product takes a matrix by its name.

use crate::chunkwise::arguments::{Operands, RowPairs, SavedTensors, StageTypes};
use crate::chunkwise::chunk::Place;
use crate::chunkwise::gradient_products::ValueProducts;
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{CopyGroup, Keys, Right, Side, States, TokenOffset, Values};
use crate::tile::{
    Acc, Grid, Pair, Rows, Window, column, computed_here, inside, load_async, load_matrix,
    load_matrix_at, own_or, row, same_tile, set, swizzled, tile, tile_aligned, zeros,
};
use cubecl::prelude::*;

/// Tensors that the input gradients of a chunk read.
#[derive(CubeType)]
pub(crate) struct GradientInputs<P: StageTypes> {
    pub x: Operands<P::F, P::G>,
    pub pairs: RowPairs<P::F, P::T>,
    pub saved: SavedTensors<P::F, P::E, P::G>,
    pub place: Place,
}

/// Most partial sums of a row.
const SLOTS: usize = 16;

/// Tiles, and scratch.
#[derive(CubeType)]
pub(crate) struct GradientTiles<P: StageTypes> {
    /// Sliced: left and right operands of products over values.
    left: SharedMemory<Vector<P::E, P::L>>,
    right: SharedMemory<Vector<P::E, P::L>>,
    /// Sliced: operands beside these, where products are made together.
    other_left: SharedMemory<Vector<P::E, P::L>>,
    other_right: SharedMemory<Vector<P::E, P::L>>,
    /// Sliced: rows of keys, in the right tile if numbers and vectors are the same.
    pub keys: SharedMemory<Vector<P::X, P::N>>,
    /// Sliced: rows of keys beside the others, where gradients are made of two kinds of rows.
    pub other_keys: SharedMemory<Vector<P::X, P::N>>,
    q: SharedMemory<Vector<P::X, P::N>>,
    k: SharedMemory<Vector<P::X, P::N>>,
    a: SharedMemory<Vector<P::X, P::N>>,
    b: SharedMemory<Vector<P::X, P::N>>,
    pub v: SharedMemory<Vector<P::E, P::L>>,
    u: SharedMemory<Vector<P::E, P::L>>,
    pub r: SharedMemory<Vector<P::E, P::L>>,
    d_o: SharedMemory<Vector<P::E, P::L>>,
    pub start: SharedMemory<Vector<P::E, P::L>>,
    pub end: SharedMemory<Vector<P::E, P::L>>,
    /// -beta in a delta rule, else 1, [C].
    pub scales: SharedMemory<f32>,
    /// Partial sums of rows, [C, [`GradientPlan::partial_stride`]].
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

    /// A chunk's rows of values.
    pub fn values_window(&self) -> Window {
        self.factor(self.unscaled().value_window())
    }

    pub fn states_window(&self) -> Window {
        self.factor(self.unscaled().window(self.value_slice, self.key_slice, self.key_width))
    }

    /// A chunk's rows of keys.
    fn keys_window(&self) -> Window {
        self.factor(self.key_window())
    }

    /// Whether rows of keys have a tile beside the two of products over values.
    fn keys_apart(&self) -> bool {
        self.unscaled().engine != self.engine
    }

    /// Rows of terms that reach the end of the chunk: a plane sums up those of its 16 tokens.
    pub fn end_rows(&self) -> usize {
        if self.has_planes() { self.chunk / 16 } else { self.chunk }
    }

    /// Units that share out the products of a row of values.
    pub fn value_slots(&self) -> usize {
        (self.units / self.chunk).min(SLOTS)
    }

    /// From the partial sums of one row to those of the next: one more than there are, so that rows side by side do not
    /// share a bank.
    fn partial_stride(&self) -> usize {
        self.rows_grid().slots().max(self.value_slots()) + 1
    }

    /// Whether v has a tile. A delta rule wants it for the gradient of beta alone: from the tensor where room is short.
    pub fn holds_v(&self) -> bool {
        self.whole && (self.key_slices() == 1 || !self.variant.delta())
    }

    /// Tiles of a chunk, in numbers.
    fn gradient_tile_numbers(&self) -> Tiles {
        let variant = self.variant;
        let [values, states, by_key] =
            [self.values_window(), self.states_window(), self.keys_window()]
                .map(|tile| tile.rows * tile.stride);
        // [C, value_slice], [value_slice, key_slice] or [C, key_slice].
        let any = values.max(states).max(if self.keys_apart() { 0 } else { by_key });
        let own = |there: bool, numbers: usize| (self.whole && there).then_some(numbers);
        Tiles {
            left: values,
            right: if self.whole { states } else { any },
            other_left: (self.most_together().max(self.most_factors(Side::Left)) > 1)
                .then_some(values),
            other_right: (self.most_factors(Side::Right) > 1).then_some(values),
            keys: self.keys_apart().then_some(by_key),
            other_keys: (self.most_others() > 1).then_some(by_key),
            end: own(!self.one_state, states),
            v: own(self.holds_v(), values),
            u_and_r: own(variant.solves(), values),
            q_and_k: own(true, by_key),
            a: own(variant.own_a(), by_key),
            b: own(variant.low_rank(), by_key),
            scales: self.chunk,
            partial: (self.chunk * self.partial_stride()).max(self.units),
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
        let [u_and_r, q_and_k] = [tiles.u_and_r, tiles.q_and_k].map(|n| 2 * n.unwrap_or(0));
        let all = |own: &[Option<usize>]| own.iter().flatten().sum::<usize>();
        let others = all(&[tiles.other_left, tiles.other_right]);
        let values = tiles.left + tiles.right + others + all(&[tiles.end, tiles.v]) + u_and_r;
        let keys = all(&[tiles.keys, tiles.other_keys, tiles.a, tiles.b]) + q_and_k;
        let scratch = tiles.scales + tiles.partial + tiles.d_decays + tiles.ends;
        values * self.unscaled().engine.bytes() + keys * self.engine.bytes() + 4 * scratch
    }

    /// Whether the next slice is under way while one is multiplied, and the rows that a gradient is of are held while
    /// it is made, as where decays make products long. It costs registers. On the plain engine CubeCL 0.10 does not
    /// compile a delta rule so through SPIR-V.
    pub fn requests_ahead(&self) -> bool {
        self.by_blocks()
    }
}

/// Numbers of the tiles. A role without one of its own shares `left`, where it is value-wide, `keys`, where it
/// is key-wide, or `right`.
struct Tiles {
    left: usize,
    right: usize,
    other_left: Option<usize>,
    other_right: Option<usize>,
    keys: Option<usize>,
    other_keys: Option<usize>,
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
pub(crate) fn gradient_tiles<P: StageTypes>(#[comptime] plan: GradientPlan) -> GradientTiles<P> {
    let aligned = comptime!(plan.aligned());
    let left = tile_aligned::<P::E, P::L>(comptime!(plan.gradient_tile_numbers().left), aligned);
    let right = tile_aligned::<P::E, P::L>(comptime!(plan.gradient_tile_numbers().right), aligned);
    let keys = own_keys_or::<P>(right, plan);
    let other_left = comptime!(plan.gradient_tile_numbers().other_left);
    let other_right = comptime!(plan.gradient_tile_numbers().other_right);
    let other_keys = comptime!(plan.gradient_tile_numbers().other_keys);
    GradientTiles::<P> {
        left,
        right,
        other_left: own_or::<P::E, P::L>(left, other_left, aligned),
        other_right: own_or::<P::E, P::L>(right, other_right, aligned),
        keys,
        other_keys: own_or::<P::X, P::N>(keys, other_keys, aligned),
        end: own_or::<P::E, P::L>(right, comptime!(plan.gradient_tile_numbers().end), aligned),
        v: own_or::<P::E, P::L>(left, comptime!(plan.gradient_tile_numbers().v), aligned),
        u: own_or::<P::E, P::L>(left, comptime!(plan.gradient_tile_numbers().u_and_r), aligned),
        r: own_or::<P::E, P::L>(left, comptime!(plan.gradient_tile_numbers().u_and_r), aligned),
        q: own_or::<P::X, P::N>(keys, comptime!(plan.gradient_tile_numbers().q_and_k), aligned),
        k: own_or::<P::X, P::N>(keys, comptime!(plan.gradient_tile_numbers().q_and_k), aligned),
        a: own_or::<P::X, P::N>(keys, comptime!(plan.gradient_tile_numbers().a), aligned),
        b: own_or::<P::X, P::N>(keys, comptime!(plan.gradient_tile_numbers().b), aligned),
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
pub(crate) fn state_rows(place: &Place, first: usize, #[comptime] plan: GradientPlan) -> Rows {
    let width = comptime!(plan.key_width);
    Rows {
        start: (place.index * comptime!(plan.value_width) + first) * width,
        stride: width,
        valid: comptime!(plan.value_width) - first,
    }
}

/// The tile of rows of keys: `right` if its numbers and vectors are the same.
#[cube]
fn own_keys_or<P: StageTypes>(
    right: SharedMemory<Vector<P::E, P::L>>,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<P::X, P::N>> {
    let apart = comptime!(plan.gradient_tile_numbers().keys);
    if comptime!(apart.is_some()) {
        tile::<P::X, P::N>(comptime!(apart.unwrap_or(1)))
    } else {
        same_tile::<P::E, P::L, P::X, P::N>(&right)
    }
}

/// Whole: starts copying one group of tiles, of keys from `first` on.
#[cube]
pub(crate) fn copy_group_async<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    first: usize,
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
    // A delta rule wants v last.
    let values = comptime!(if variant.delta() { CopyGroup::End } else { CopyGroup::Values });
    if comptime!(group == values && plan.holds_v()) {
        copy_values::<P, P::F>(&mut tiles.v, &from.x.v, rows, plan);
    }
    let states = state_rows(&from.place, 0usize, plan);
    if comptime!(group == CopyGroup::Start) {
        let to = &mut tiles.start;
        let starts = &from.saved.states;
        load_async::<P::E, P::G, P::E, P::L>(to, 0usize, starts, &states, first, square);
    }
    if comptime!(group == CopyGroup::Keys) {
        copy_keys::<P>(&mut tiles.k, &from.x.k, &from.place.keys, first, plan);
        copy_keys::<P>(&mut tiles.q, &from.x.q, &from.place.keys, first, plan);
        if comptime!(variant.own_a()) {
            copy_keys::<P>(&mut tiles.a, &from.x.a, &from.place.rows, first, plan);
        }
        if comptime!(variant.low_rank()) {
            copy_keys::<P>(&mut tiles.b, &from.x.b, &from.place.rows, first, plan);
        }
    }
    if comptime!(group == CopyGroup::End) {
        let to = &mut tiles.end;
        let ends = &from.saved.d_states;
        load_async::<P::E, P::G, P::E, P::L>(to, 0usize, ends, &states, first, square);
    }
}

#[cube]
fn copy_values<P: StageTypes, T: Float>(
    to: &mut SharedMemory<Vector<P::E, P::L>>,
    from: &Array<Vector<T, P::G>>,
    rows: &Rows,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.values_window());
    load_async::<T, P::G, P::E, P::L>(to, 0usize, from, rows, 0usize, window);
}

#[cube]
fn copy_keys<P: StageTypes>(
    to: &mut SharedMemory<Vector<P::X, P::N>>,
    from: &Array<Vector<P::F, P::G>>,
    rows: &Rows,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.keys_window());
    load_async::<P::F, P::G, P::X, P::N>(to, 0usize, from, rows, first, window);
}

/// The tile of a value-wide matrix, sliced that of its place among the factors of a side.
#[cube]
pub(crate) fn values_tile<P: StageTypes>(
    tiles: &GradientTiles<P>,
    #[comptime] which: Values,
    #[comptime] side: Side,
    #[comptime] place: usize,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<P::E, P::L>> {
    if comptime!(plan.whole) {
        match comptime!(which) {
            Values::V => tiles.v,
            Values::U => tiles.u,
            Values::R => tiles.r,
            Values::DO => tiles.d_o,
        }
    } else {
        match comptime!((side, place)) {
            (Side::Left, 0) => tiles.left,
            (Side::Left, _) => tiles.other_left,
            (Side::Right, 0) => tiles.right,
            (Side::Right, _) => tiles.other_right,
        }
    }
}

/// The tile of the left factor at `place` in products over values.
#[cube]
pub(crate) fn left_tile<P: StageTypes>(
    tiles: &GradientTiles<P>,
    #[comptime] place: usize,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<P::E, P::L>> {
    let which = comptime!(plan.lefts(products).get(place));
    values_tile::<P>(tiles, which, comptime!(Side::Left), place, plan)
}

/// The tile of the right factor at `place`, or of the state.
#[cube]
pub(crate) fn right_tile<P: StageTypes>(
    tiles: &GradientTiles<P>,
    #[comptime] place: usize,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<P::E, P::L>> {
    match comptime!(plan.right(products)) {
        Right::Factors(factors) => {
            let which = comptime!(factors.get(place));
            values_tile::<P>(tiles, which, comptime!(Side::Right), place, plan)
        }
        Right::State(which) => state_tile::<P>(tiles, comptime!(which)),
    }
}

/// The tile of a key-wide matrix, sliced that of kind `n` of rows that are there together.
#[cube]
pub(crate) fn keys_tile<P: StageTypes>(
    tiles: &GradientTiles<P>,
    #[comptime] which: Keys,
    #[comptime] n: usize,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<P::X, P::N>> {
    if comptime!(!plan.whole && n > 0) {
        tiles.other_keys
    } else if comptime!(!plan.whole) {
        tiles.keys
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
pub(crate) fn state_tile<P: StageTypes>(
    tiles: &GradientTiles<P>,
    #[comptime] which: States,
) -> SharedMemory<Vector<P::E, P::L>> {
    // Sliced or in turn, both are the right tile.
    if comptime!(which == States::Start) { tiles.start } else { tiles.end }
}

/// One slice of a key-wide matrix where the gradients of its rows lie in registers, or of the rows
/// next to these. Whole: from its tile, by `ldmatrix`, which deals out a 16 x 16 block as two fragments
/// side by side lie. Sliced: from the tensor.
#[cube]
pub(crate) fn load_fragments<P: StageTypes>(
    tiles: &GradientTiles<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Keys,
    #[comptime] offset: TokenOffset,
    #[comptime] plan: GradientPlan,
) -> Acc {
    let mut acc = zeros(comptime!(plan.rows_grid().fragments()));
    if comptime!(plan.whole) {
        let tile = keys_tile::<P>(tiles, which, 0usize, plan);
        fragments_of_tile::<P::X, P::N>(&mut acc, &tile, offset, plan);
    } else if comptime!(which == Keys::Q) {
        fragments_of_tensor::<P::F, P::T>(
            &mut acc,
            &from.pairs.q,
            &from.place.keys,
            first,
            offset,
            plan,
        );
    } else if comptime!(which == Keys::K) {
        fragments_of_tensor::<P::F, P::T>(
            &mut acc,
            &from.pairs.k,
            &from.place.keys,
            first,
            offset,
            plan,
        );
    } else if comptime!(which == Keys::A) {
        fragments_of_tensor::<P::F, P::T>(
            &mut acc,
            &from.pairs.a,
            &from.place.rows,
            first,
            offset,
            plan,
        );
    } else {
        fragments_of_tensor::<P::F, P::T>(
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
    let mut unit = UNIT_POS as usize;
    if comptime!(plan.warpgroups) {
        unit = computed_here(UNIT_POS) as usize;
    }
    let lane = unit % 32;
    let plane = unit / 32;
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
                let x = if comptime!(plan.warpgroups) {
                    let vector = columns / 8 + comptime!(c * 2);
                    load_matrix_at::<X, N>(from, swizzled(i, vector, comptime!(plan.chunk)), false)
                } else {
                    load_matrix::<X, N>(from, i * stride + columns, comptime!(c * 16), false)
                };
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
fn fragments_of_tensor<F: Float, T: Size>(
    acc: &mut Acc,
    from: &Array<Vector<F, T>>,
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
            set(acc.index_mut(f), h, pair_at::<F, T>(from, rows, i, d, plan));
        }
    }
}

/// Two numbers of a row; zeros where there is no row, or no such column.
#[cube]
fn pair_at<F: Float, T: Size>(
    from: &Array<Vector<F, T>>,
    rows: &Rows,
    i: usize,
    d: usize,
    #[comptime] plan: GradientPlan,
) -> Pair {
    let width = T::value();
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
    #[comptime] plan: GradientPlan,
) -> f32 {
    let mut sum = 0.0f32;
    if i < valid {
        #[unroll]
        for n in 0..slots {
            sum += partial[partial_at(i, n, plan)];
        }
    }
    sum
}

/// Where a unit's partial sum of a row goes.
#[cube]
pub(crate) fn partial_at(i: usize, slot: usize, #[comptime] plan: GradientPlan) -> usize {
    i * comptime!(plan.partial_stride()) + slot
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
