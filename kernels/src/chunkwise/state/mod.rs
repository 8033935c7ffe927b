//! The state of one (sequence, head) during a state pass, and blocks of a chunk's tokens: their layout, storage and
//! products, one implementation for each place that holds them.
//!
//! A cube owns `value_slice` columns of S, [K, V]. A *block* is a matrix of a chunk's tokens over
//! those columns: values, errors, writes.
//!
//! ```text
//! state_product     block += X S            retrieved values of every token of a chunk
//! block_product     block += M block'       M is [C, C]: T, A_qk, ..
//! outer_update      S     += X^T block      every token's outer product
//! ```
//! `state_product_out` and `block_product_out` are the first two for an output block, which is row-major wherever the
//! state is, but transposed as other blocks are where warpgroups multiply.
//!
//! [`SharedMemoryState`] serves f32, with or without tensor cores; [`RegisterState`] serves 16 bits.

mod place;
mod registers;
mod shared;

pub(crate) use place::{RegisterState, SharedMemoryState, StatePlace};
pub(crate) use registers::{reduce_split_k, state_products, write_block_through};

use crate::chunkwise::plan::{StatePlan, UNUSED};
use crate::tile::{Acc, Grid, Pair, Rows, set, tile, zeros};
use cubecl::prelude::*;

/// Types of a state pass, and the place of its state.
#[cube]
pub(crate) trait StateEngine: Send + Sync + Sized + 'static {
    /// Numbers of the operation's tensors.
    type F: Float;
    /// Numbers between stages and in tiles.
    type E: Float;
    /// Width of a vector that is loaded.
    type G: Size;
    /// Width of a vector in a tile that is loaded.
    type N: Size;
    /// Width of a vector in a tile of products.
    type M: Size;
    /// Width of a vector that is written.
    type W: Size;

    /// Token of element (h, l) of fragment `f` of a block.
    fn token(
        #[comptime] f: usize,
        #[comptime] h: usize,
        #[comptime] l: usize,
        #[comptime] plan: StatePlan,
    ) -> usize;

    /// Row of pair `h` of fragment `f` of an output block; units without work repeat the last one.
    fn output_row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] plan: StatePlan)
    -> usize;

    /// Loads a block from a tile [C, value_slice].
    fn load_block(
        block: &mut Block<Self>,
        from: &SharedMemory<Vector<Self::E, Self::N>>,
        at: usize,
        #[comptime] plan: StatePlan,
    );

    /// Publishes a block, as an operand of products.
    fn publish(block: &mut Block<Self>, #[comptime] plan: StatePlan);

    /// Fills the state before the first chunk from rows of `from`, `[B, H, K, V]`, beginning at `start`, where the
    /// plan says that there are any; else with zeros.
    fn fill_state(
        state: &mut State<Self>,
        from: &Array<f32>,
        start: usize,
        first: usize,
        #[comptime] plan: StatePlan,
    );

    /// Sets a state to zeros, or (`diagonal`) to columns of the identity, unless it is to `stay`.
    fn reset_state(
        state: &mut State<Self>,
        stay: bool,
        diagonal: bool,
        first: usize,
        #[comptime] plan: StatePlan,
    );

    /// Writes the state, from number `start` on: [K, V], or `transposed`, [V, K].
    fn write_state(
        state: &State<Self>,
        to: &mut Array<f32>,
        start: usize,
        first: usize,
        #[comptime] transposed: bool,
        #[comptime] plan: StatePlan,
    );

    /// Saves the state for the other stages, transposed: [V, K] for every chunk.
    fn save_chunk_state(
        state: &State<Self>,
        to: &mut Array<Vector<Self::E, Self::W>>,
        chunk: usize,
        first: usize,
        #[comptime] plan: StatePlan,
    );

    /// Decays the state over a chunk: all of it by `total`, or its rows by `totals` where the decay is a vector.
    fn decay_state(
        state: &mut State<Self>,
        total: f32,
        totals: &Array<f32>,
        start: usize,
        #[comptime] plan: StatePlan,
    );

    /// `acc += X S`, over slice `slice` of keys; `x` holds [C, key_slice].
    fn state_product(
        acc: &mut Acc,
        x: &SharedMemory<Vector<Self::E, Self::N>>,
        at: usize,
        state: &State<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    );

    /// `acc += M block`, or M^T block (`adjoint`), with M lower triangular, [C, C]. The block is published.
    fn block_product<T: Size>(
        acc: &mut Acc,
        matrix: &SharedMemory<Vector<Self::E, T>>,
        at: usize,
        block: &Block<Self>,
        #[comptime] adjoint: bool,
        #[comptime] plan: StatePlan,
    );

    /// `S += X^T block` over slice `slice` of keys. The block is published.
    fn outer_update(
        state: &mut State<Self>,
        x: &SharedMemory<Vector<Self::E, Self::N>>,
        at: usize,
        block: &Block<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    );

    /// `acc += X S` for an output block, over slice `slice` of keys.
    fn state_product_out(
        acc: &mut Acc,
        x: &SharedMemory<Vector<Self::E, Self::N>>,
        at: usize,
        state: &State<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    );

    /// `acc += M block` for an output block, M lower triangular. The block is published.
    fn block_product_out<T: Size>(
        acc: &mut Acc,
        matrix: &SharedMemory<Vector<Self::E, T>>,
        at: usize,
        block: &Block<Self>,
        #[comptime] plan: StatePlan,
    );

    /// Writes an output block to `[B, T, H, V]`.
    fn write_output<T: Float>(
        to: &mut Array<Vector<T, Self::W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    );

    /// Writes a block to `[B, T, H, V]`.
    fn write_block<T: Float>(
        to: &mut Array<Vector<T, Self::W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    );
}

/// The state.
#[derive(CubeType)]
pub(crate) struct State<P: StateEngine> {
    /// In registers: S^T.
    pub acc: Acc,
    /// In shared memory: S, [K, value_slice].
    pub tile: SharedMemory<Vector<P::E, P::M>>,
    /// Split-K: partial products of the other plane.
    pub scratch: SharedMemory<Pair>,
}

/// Tokens over value columns.
#[derive(CubeType)]
pub(crate) struct Block<P: StateEngine> {
    /// The numbers, wherever [`StateEngine::token`] says.
    pub acc: Acc,
    /// In shared memory: the same as an operand, [C, value_slice].
    pub tile: SharedMemory<Vector<P::E, P::M>>,
}

impl StatePlan {
    /// A block's grid where the state is in shared memory.
    pub fn block_grid(&self) -> Grid {
        self.grid(self.chunk, self.value_slice)
    }

    /// Fragments of a block.
    pub fn block_fragments(&self) -> usize {
        if self.in_registers() { self.chunk / 8 } else { self.block_grid().fragments() }
    }

    /// Fragments of an output block, but of warpgroups, whose planes have those of a block. With split-K each plane has a part
    /// of its tokens.
    pub fn output_fragments(&self) -> usize {
        self.block_fragments() / self.split_k
    }

    /// Fragments of the state.
    pub fn state_fragments(&self) -> usize {
        if self.in_registers() { self.keys() / self.split_k / 8 } else { 0 }
    }

    /// Split-K: pairs of numbers in scratch, a block for each plane.
    fn split_k_scratch(&self) -> usize {
        if self.split_k > 1 { self.units * self.block_fragments() * 2 } else { 1 }
    }

    /// Bytes of [`state`] and [`block`].
    pub fn state_memory(&self) -> usize {
        let numbers = self.state_numbers() + self.block_numbers();
        numbers * self.engine.bytes() + 8 * self.split_k_scratch()
    }

    /// Numbers of the state in shared memory.
    fn state_numbers(&self) -> usize {
        if self.in_registers() { UNUSED } else { self.keys() * self.stride(self.value_slice) }
    }

    /// Numbers of a block in shared memory.
    fn block_numbers(&self) -> usize {
        if self.in_registers() { UNUSED } else { self.value_numbers() }
    }
}

/// Whether this unit has a part of the state: producers have none.
#[cube]
pub(crate) fn is_consumer(#[comptime] plan: StatePlan) -> bool {
    if comptime!(plan.producers() == 0) {
        true.runtime()
    } else {
        UNIT_POS as usize >= comptime!(plan.producers() * 32)
    }
}

/// A block of zeros.
#[cube]
pub(crate) fn block<P: StateEngine>(#[comptime] plan: StatePlan) -> Block<P> {
    Block::<P> {
        acc: zeros(comptime!(plan.block_fragments())),
        tile: tile::<P::E, P::M>(comptime!(plan.block_numbers())),
    }
}

/// The state before the first chunk.
#[cube]
pub(crate) fn state<P: StateEngine>(
    from: &Array<f32>,
    start: usize,
    first: usize,
    #[comptime] plan: StatePlan,
) -> State<P> {
    let mut state = State::<P> {
        acc: zeros(comptime!(plan.state_fragments())),
        tile: tile::<P::E, P::M>(comptime!(plan.state_numbers())),
        scratch: SharedMemory::<Pair>::new(comptime!(plan.split_k_scratch())),
    };
    P::fill_state(&mut state, from, start, first, plan);
    state
}

/// Multiplies each token's row of a block by its number of `scales`, which start at `at`.
#[cube]
pub(crate) fn scale_tokens<P: StateEngine>(
    acc: &mut Acc,
    scales: &SharedMemory<f32>,
    at: usize,
    #[comptime] plan: StatePlan,
) {
    #[unroll]
    for f in 0..comptime!(plan.block_fragments()) {
        #[unroll]
        for h in 0..2usize {
            let mut x = acc.index(f)[h];
            #[unroll]
            for l in 0..2usize {
                x[l] = x[l] * scales[at + P::token(f, h, l, plan)];
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
