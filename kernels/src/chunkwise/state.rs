//! The state of one (sequence, head) during a state pass, and blocks of a chunk's tokens: here their layout and
//! storage, in state_products.rs their products.
//!
//! A cube owns `value_tile` columns of S, [K, V]. A *block* is a matrix of a chunk's tokens over
//! those columns: values, errors, writes.
//!
//! [`Engine::Plain`] keeps S and the block that is read last in shared memory. [`Engine::Mma`] keeps
//! both in registers, transposed: a plane owns 16 columns of values, so that S^T [16, K] and
//! block^T [16, C] are accumulators of the tensor cores and, rounded to 16 bits, at once their left
//! operands (or, two fragments paired, right operands): nothing of either passes through shared memory,
//! and planes never wait for each other within a chunk. Where keys are wide, two planes own the same 16
//! columns and half of the keys each (split-K); [`reduce_split_k`] adds their partial products.

use crate::chunkwise::plan::Plan;
use crate::tile::{
    Acc, Engine, Grid, Pair, column, inside, load_a, put_four, row, set, tile, zeros,
};
use cubecl::prelude::*;

/// The state.
#[derive(CubeType)]
pub(crate) struct State<X: Float, M: Size> {
    /// Mma: S^T.
    pub acc: Acc,
    /// Plain: S, [K, value_tile].
    pub tile: SharedMemory<Vector<X, M>>,
    /// Split-K: partial products of the other plane.
    scratch: SharedMemory<Pair>,
}

/// Tokens over value columns.
#[derive(CubeType)]
pub(crate) struct Block<X: Float, M: Size> {
    /// The numbers, wherever [`token`] and [`value`] say.
    pub acc: Acc,
    /// Plain: the same as an operand, [C, value_tile].
    pub tile: SharedMemory<Vector<X, M>>,
}

impl Plan {
    fn mma(&self) -> bool {
        self.engine == Engine::Mma
    }

    /// A block's grid on the plain engine.
    pub fn block_grid(&self) -> Grid {
        self.grid(self.chunk, self.value_tile)
    }

    /// Fragments of a block.
    pub fn block_fragments(&self) -> usize {
        if self.mma() { self.chunk / 8 } else { self.block_grid().fragments() }
    }

    /// Fragments of an output block, which is row-major on all engines. With split-K each plane has a part of
    /// its tokens.
    pub fn output_fragments(&self) -> usize {
        self.block_fragments() / self.split_k
    }

    /// Tokens from the start of a plane's part to the 16 in row `m` of fragments of an output block.
    pub fn output_offset(&self, m: usize) -> usize {
        m * 16 % (self.chunk / self.split_k)
    }

    pub fn state_fragments(&self) -> usize {
        if self.mma() { self.keys() / self.split_k / 8 } else { 0 }
    }

    /// Planes side by side, 16 columns of values each.
    fn columns_of_planes(&self) -> usize {
        self.value_tile / 16
    }

    /// Split-K: pairs of numbers in scratch, a block for each plane.
    pub fn split_k_scratch(&self) -> usize {
        if self.split_k > 1 { self.units * self.block_fragments() * 2 } else { 0 }
    }

    fn state_numbers(&self) -> usize {
        if self.mma() { 16 } else { self.keys() * self.stride(self.value_tile) }
    }

    fn block_numbers(&self) -> usize {
        if self.mma() { 16 } else { self.chunk * self.stride(self.value_tile) }
    }
}

/// Whether this unit has a part of the state: producers have none.
#[cube]
pub(crate) fn is_consumer(#[comptime] plan: Plan) -> bool {
    if comptime!(plan.producers == 0) {
        true.runtime()
    } else {
        UNIT_POS as usize >= comptime!(plan.producers * 32)
    }
}

/// Mma: first of the 16 value columns of this unit's plane. The first planes are producers.
#[cube]
pub(crate) fn own_columns(#[comptime] plan: Plan) -> usize {
    let plane = UNIT_POS as usize / 32;
    if comptime!(plan.split_k > 1) {
        plane % comptime!(plan.columns_of_planes()) * 16
    } else {
        (plane - comptime!(plan.producers)) * 16
    }
}

/// Number of this unit's plane among those of the same columns.
#[cube]
fn own_split(#[comptime] plan: Plan) -> usize {
    UNIT_POS as usize / comptime!(32 * plan.columns_of_planes())
}

/// `at`, moved to the first of this unit's plane's keys.
#[cube]
pub(crate) fn at_own_keys(at: usize, #[comptime] plan: Plan) -> usize {
    if comptime!(plan.split_k > 1) {
        at + own_split(plan) * comptime!(plan.keys() / plan.split_k)
    } else {
        at
    }
}

/// First token of the part in which the 16 in row `m` of fragments of an output block lie, the plane's own part
/// first; [`Plan::output_offset`] tokens on, the 16 begin.
#[cube]
pub(crate) fn output_tokens(#[comptime] m: usize, #[comptime] plan: Plan) -> usize {
    if comptime!(plan.split_k > 1) {
        let tokens = comptime!(plan.chunk / plan.split_k);
        (own_split(plan) * tokens + comptime!(m * 16 / tokens * tokens)) % comptime!(plan.chunk)
    } else {
        0usize.runtime()
    }
}

/// Whether fragment `f` of a block that planes have in common is this unit's plane's to store.
#[cube]
pub(crate) fn stores(#[comptime] f: usize, #[comptime] plan: Plan) -> bool {
    if comptime!(plan.split_k > 1) {
        own_split(plan) == comptime!(f * plan.split_k / plan.block_fragments())
    } else {
        true.runtime()
    }
}

/// Split-K reduction between the two planes that own the same value columns. After
/// [`state_product`](super::state_products::state_product) both need all tokens (`from` is 0), after
/// [`state_product_out`](super::state_products::state_product_out) only the tokens they store (`from` is the number
/// of their own fragments). One barrier; a second one first unless `fresh`: none is needed if one has passed since
/// the scratch was last used.
#[cube]
pub(crate) fn reduce_split_k<X: Float, M: Size>(
    acc: &mut Acc,
    state: &mut State<X, M>,
    #[comptime] from: usize,
    #[comptime] fresh: bool,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.split_k > 1) {
        if comptime!(!fresh) {
            sync_cube();
        }
        let kept = comptime!(plan.block_fragments() - from);
        let units = comptime!(plan.units);
        let unit = UNIT_POS as usize;
        #[unroll]
        for f in 0..kept {
            #[unroll]
            for h in 0..2usize {
                let at = comptime!((2 * f + h) * units) + unit;
                state.scratch[at] = acc.index(comptime!(from + f))[h];
            }
        }
        sync_cube();
        let other = (unit + comptime!(units / 2)) % units;
        #[unroll]
        for f in 0..kept {
            #[unroll]
            for h in 0..2usize {
                let at = comptime!((2 * f + h) * units) + other;
                let x = acc.index(f)[h] + state.scratch[at];
                set(acc.index_mut(f), h, x);
            }
        }
    }
}

/// Token of element (h, l) of fragment `f` of a block.
#[cube]
pub(crate) fn token(
    #[comptime] f: usize,
    #[comptime] h: usize,
    #[comptime] l: usize,
    #[comptime] plan: Plan,
) -> usize {
    if comptime!(plan.engine == Engine::Mma) {
        UNIT_POS as usize % 4 * 2 + comptime!(f * 8 + l)
    } else {
        // Units without work repeat the last token; their results are not used.
        min(row(f, h, comptime!(plan.block_grid())), comptime!(plan.chunk - 1))
    }
}

/// Value column, within the cube's, of element (h, l) of fragment `f` of a block.
#[cube]
pub(crate) fn value(
    #[comptime] f: usize,
    #[comptime] h: usize,
    #[comptime] l: usize,
    #[comptime] plan: Plan,
) -> usize {
    if comptime!(plan.engine == Engine::Mma) {
        own_columns(plan) + UNIT_POS as usize % 32 / 4 + comptime!(h * 8)
    } else {
        column(f, comptime!(plan.block_grid())) + comptime!(l)
    }
}

/// Whether fragment `f` of a block is this unit's to store.
#[cube]
fn owned(#[comptime] f: usize, #[comptime] plan: Plan) -> bool {
    if comptime!(plan.engine == Engine::Mma) {
        true.runtime()
    } else {
        inside(f, comptime!(plan.block_grid()))
    }
}

/// A block of zeros.
#[cube]
pub(crate) fn block<X: Float, M: Size>(#[comptime] plan: Plan) -> Block<X, M> {
    Block::<X, M> {
        acc: zeros(comptime!(plan.block_fragments())),
        tile: tile::<X, M>(comptime!(plan.block_numbers())),
    }
}

/// Loads a block from a tile [C, value_tile].
#[cube]
pub(crate) fn load_block<X: Float, N: Size, M: Size>(
    block: &mut Block<X, M>,
    from: &SharedMemory<Vector<X, N>>,
    at: usize,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(plan.stride(plan.value_tile));
    if comptime!(plan.engine == Engine::Mma) {
        let first = own_columns(plan);
        #[unroll]
        for k in 0..comptime!(plan.chunk / 16) {
            let x = load_a::<X, N>(from, at, first, 0usize, comptime!(k * 16), stride, true);
            #[unroll]
            for n in 0..2usize {
                let fragment = block.acc.index_mut(comptime!(2 * k + n));
                set(fragment, 0usize, Pair::cast_from(x[comptime!(2 * n)]));
                set(fragment, 1usize, Pair::cast_from(x[comptime!(2 * n + 1)]));
            }
        }
    } else {
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let mut x = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let here = token(f, h, l, plan) * stride + value(f, h, l, plan);
                    x[l] = f32::cast_from(from[at + here]);
                }
                set(block.acc.index_mut(f), h, x);
            }
        }
    }
}

/// Publishes a block to shared memory, as an operand of products. A barrier before and after; on `Engine::Mma`
/// registers are the operand, and nothing is done.
#[cube]
pub(crate) fn publish<X: Float, M: Size>(block: &mut Block<X, M>, #[comptime] plan: Plan) {
    if comptime!(plan.engine != Engine::Mma) {
        let stride = comptime!(plan.stride(plan.value_tile));
        sync_cube();
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            if owned(f, plan) {
                #[unroll]
                for h in 0..2usize {
                    #[unroll]
                    for l in 0..2usize {
                        let at = token(f, h, l, plan) * stride + value(f, h, l, plan);
                        block.tile[at] = Vector::<X, M>::cast_from(block.acc.index(f)[h][l]);
                    }
                }
            }
        }
        sync_cube();
    }
}

/// Multiplies each token's row of a block by its number of `scales`, which start at `at`.
#[cube]
pub(crate) fn scale_tokens(
    acc: &mut Acc,
    scales: &SharedMemory<f32>,
    at: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for f in 0..comptime!(plan.block_fragments()) {
        #[unroll]
        for h in 0..2usize {
            let mut x = acc.index(f)[h];
            #[unroll]
            for l in 0..2usize {
                x[l] = x[l] * scales[at + token(f, h, l, plan)];
            }
            set(acc.index_mut(f), h, x);
        }
    }
}

/// `acc += other`.
#[cube]
pub(crate) fn add(acc: &mut Acc, other: &Acc, #[comptime] fragments: usize) {
    #[unroll]
    for f in 0..fragments {
        let x = acc.index(f)[0usize] + other.index(f)[0usize];
        let y = acc.index(f)[1usize] + other.index(f)[1usize];
        set(acc.index_mut(f), 0usize, x);
        set(acc.index_mut(f), 1usize, y);
    }
}

/// The state before the first chunk: zeros, or rows of `from`, `[B, H, K, V]`, beginning at `start`.
#[cube]
pub(crate) fn state<X: Float, M: Size>(
    from: &Array<f32>,
    start: usize,
    first: usize,
    #[comptime] given: bool,
    #[comptime] plan: Plan,
) -> State<X, M> {
    let mut state = State::<X, M> {
        acc: zeros(comptime!(plan.state_fragments())),
        tile: tile::<X, M>(comptime!(plan.state_numbers())),
        scratch: SharedMemory::<Pair>::new(comptime!(plan.split_k_scratch().max(1))),
    };
    let width = comptime!(plan.value_width);
    if comptime!(plan.engine == Engine::Mma) {
        if comptime!(given) {
            if is_consumer(plan) {
                #[unroll]
                for f in 0..comptime!(plan.state_fragments()) {
                    #[unroll]
                    for h in 0..2usize {
                        let mut x = Pair::empty();
                        #[unroll]
                        for l in 0..2usize {
                            let d =
                                at_own_keys(comptime!(f * 8 + l) + UNIT_POS as usize % 4 * 2, plan);
                            x[l] = from[start + d * width + first + value(f, h, l, plan)];
                        }
                        set(state.acc.index_mut(f), h, x);
                    }
                }
            }
        }
    } else {
        let columns = comptime!(plan.value_tile);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all {
                let d = n / columns;
                let v = first + n % columns;
                let mut x = 0.0f32;
                if comptime!(given) {
                    if d < comptime!(plan.key_width) && v < width {
                        x = from[start + d * width + v];
                    }
                }
                let at = d * comptime!(plan.stride(columns)) + n % columns;
                state.tile[at] = Vector::<X, M>::cast_from(x);
            }
        }
        sync_cube();
    }
    state
}

/// Sets a state to zeros, or (`diagonal`) to columns of the identity, unless it is to `stay`.
#[cube]
pub(crate) fn reset_state<X: Float, M: Size>(
    state: &mut State<X, M>,
    stay: bool,
    diagonal: bool,
    first: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.engine == Engine::Mma) {
        #[unroll]
        for f in 0..comptime!(plan.state_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let mut x = state.acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    let d = at_own_keys(comptime!(f * 8 + l) + UNIT_POS as usize % 4 * 2, plan);
                    let one = diagonal && d == first + value(f, h, l, plan);
                    x[l] = select(stay, x[l], select(one, 1.0f32, 0.0f32));
                }
                set(state.acc.index_mut(f), h, x);
            }
        }
    } else {
        let columns = comptime!(plan.value_tile);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            if n < all && !stay {
                let d = n / columns;
                let one = diagonal && d == first + n % columns;
                let at = d * comptime!(plan.stride(columns)) + n % columns;
                state.tile[at] = Vector::<X, M>::cast_from(select(one, 1.0f32, 0.0f32));
            }
        }
        sync_cube();
    }
}

/// Writes the state, from number `start` on: [K, V], or `transposed`, [V, K].
#[cube]
pub(crate) fn store_state<X: Float, M: Size>(
    state: &State<X, M>,
    to: &mut Array<f32>,
    start: usize,
    first: usize,
    #[comptime] transposed: bool,
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.value_width);
    let keys = comptime!(plan.key_width);
    let down = comptime!(if transposed { 1 } else { width });
    let right = comptime!(if transposed { keys } else { 1 });
    if comptime!(plan.engine == Engine::Mma) {
        #[unroll]
        for f in 0..comptime!(plan.state_fragments()) {
            #[unroll]
            for h in 0..2usize {
                #[unroll]
                for l in 0..2usize {
                    let d = at_own_keys(comptime!(f * 8 + l) + UNIT_POS as usize % 4 * 2, plan);
                    let v = first + value(f, h, l, plan);
                    to[start + d * down + v * right] = state.acc.index(f)[h][l];
                }
            }
        }
    } else {
        let columns = comptime!(plan.value_tile);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            let d = n / columns;
            let v = first + n % columns;
            if n < all && d < keys && v < width {
                let at = d * comptime!(plan.stride(columns)) + n % columns;
                to[start + d * down + v * right] = f32::cast_from(state.tile[at]);
            }
        }
    }
}

/// Saves the state for the other stages, transposed: [V, K] for every chunk.
#[cube]
pub(crate) fn save_chunk_state<X: Float, E: Float, M: Size, W: Size>(
    state: &State<X, M>,
    to: &mut Array<Vector<E, W>>,
    chunk: usize,
    first: usize,
    #[comptime] plan: Plan,
) {
    let keys = comptime!(plan.key_width);
    let start = chunk * comptime!(plan.key_width * plan.value_width);
    if comptime!(plan.engine == Engine::Mma) {
        let lane = UNIT_POS as usize % 32;
        let row = first + own_columns(plan) + lane / 4;
        let at = at_own_keys(start + row * keys + lane % 2 * 8 + lane % 4 / 2 * 4, plan) / 4;
        #[unroll]
        for f in 0..comptime!(plan.state_fragments() / 2) {
            #[unroll]
            for h in 0..2usize {
                let left = state.acc.index(comptime!(2 * f))[h];
                let right = state.acc.index(comptime!(2 * f + 1))[h];
                let at = at + comptime!((f * 16 + h * 8 * keys) / 4);
                put_four::<E, W>(to, at, left, right, lane % 2 == 1, true, 1u32);
            }
        }
    } else {
        let all = comptime!(plan.keys() * plan.value_tile);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = UNIT_POS as usize + comptime!(turn * plan.units);
            let d = n % comptime!(plan.keys());
            let v = n / comptime!(plan.keys());
            if n < all && d < keys && first + v < comptime!(plan.value_width) {
                let at = d * comptime!(plan.stride(plan.value_tile)) + v;
                to[start + (first + v) * keys + d] = Vector::<E, W>::cast_from(state.tile[at]);
            }
        }
    }
}

/// Decays the state over a chunk: all of it by `total`, or its rows by `totals` where the decay is a vector. A
/// barrier on the plain engine, before and after.
#[cube]
pub(crate) fn decay_state<X: Float, M: Size>(
    state: &mut State<X, M>,
    total: f32,
    totals: &Array<f32>,
    start: usize,
    #[comptime] plan: Plan,
) {
    let vector = comptime!(plan.variant.vector());
    if comptime!(plan.variant.decay != crate::Decay::None) {
        if comptime!(plan.engine == Engine::Mma) {
            #[unroll]
            for f in 0..comptime!(plan.state_fragments()) {
                let d = at_own_keys(comptime!(f * 8) + UNIT_POS as usize % 4 * 2, plan);
                let mut by = Pair::new(total);
                if comptime!(vector) {
                    by[0] = totals[start + d];
                    by[1] = totals[start + d + 1];
                }
                let x = state.acc.index(f)[0usize] * by;
                let y = state.acc.index(f)[1usize] * by;
                set(state.acc.index_mut(f), 0usize, x);
                set(state.acc.index_mut(f), 1usize, y);
            }
        } else {
            sync_cube();
            let columns = comptime!(plan.value_tile);
            let all = comptime!(plan.keys() * columns);
            #[unroll]
            for turn in 0..comptime!(all.div_ceil(plan.units)) {
                let n = UNIT_POS as usize + comptime!(turn * plan.units);
                let d = n / columns;
                if n < all && d < comptime!(plan.key_width) {
                    let mut by = total;
                    if comptime!(vector) {
                        by = totals[start + d];
                    }
                    let at = d * comptime!(plan.stride(columns)) + n % columns;
                    state.tile[at] = Vector::<X, M>::cast_from(f32::cast_from(state.tile[at]) * by);
                }
            }
            sync_cube();
        }
    }
}

/// Row of pair `h` of fragment `f` of an output block.
#[cube]
pub(crate) fn output_row(
    #[comptime] f: usize,
    #[comptime] h: usize,
    #[comptime] plan: Plan,
) -> usize {
    if comptime!(plan.engine == Engine::Mma) {
        let lane = UNIT_POS as usize % 32;
        output_tokens(comptime!(f / 2), plan)
            + lane / 4
            + comptime!(plan.output_offset(f / 2) + h * 8)
    } else {
        row(f, h, comptime!(plan.block_grid()))
    }
}

/// First column, within the cube's, of the pairs of fragment `f` of an output block.
#[cube]
pub(crate) fn output_column(#[comptime] f: usize, #[comptime] plan: Plan) -> usize {
    if comptime!(plan.engine == Engine::Mma) {
        own_columns(plan) + UNIT_POS as usize % 4 * 2 + comptime!(f % 2 * 8)
    } else {
        column(f, comptime!(plan.block_grid()))
    }
}
