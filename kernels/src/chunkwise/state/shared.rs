//! State and published blocks in shared memory, in f32: each unit has its share of a block in registers besides.

use super::{Block, State, StateEngine};
use crate::chunkwise::plan::{StatePlan, row_major, transposed};
use crate::tile::{
    Acc, Pair, Rows, Zeros, column, inside, mul, own_element, put_out, row, row_in, set, zeros,
};
use cubecl::prelude::*;
use std::marker::PhantomData;

/// The state is in shared memory.
pub(crate) struct InSharedMemory<F, E, G, N, M, W>(PhantomData<(F, E, G, N, M, W)>);

#[cube]
impl<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size> StateEngine
    for InSharedMemory<F, E, G, N, M, W>
{
    type F = F;
    type E = E;
    type G = G;
    type N = N;
    type M = M;
    type W = W;

    fn token(
        #[comptime] f: usize,
        #[comptime] h: usize,
        #[comptime] _l: usize,
        #[comptime] plan: StatePlan,
    ) -> usize {
        row_in(f, h, comptime!(plan.block_grid()))
    }

    fn output_row(
        #[comptime] f: usize,
        #[comptime] h: usize,
        #[comptime] plan: StatePlan,
    ) -> usize {
        row_in(f, h, comptime!(plan.block_grid()))
    }

    fn load_block(
        block: &mut Block<Self>,
        from: &SharedMemory<Vector<E, N>>,
        at: usize,
        #[comptime] plan: StatePlan,
    ) {
        let stride = comptime!(plan.stride(plan.value_slice));
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let mut x = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let here = Self::token(f, h, l, plan) * stride + value(f, l, plan);
                    x[l] = f32::cast_from(from[at + here]);
                }
                set(block.acc.index_mut(f), h, x);
            }
        }
    }

    /// A barrier before and after.
    fn publish(block: &mut Block<Self>, #[comptime] plan: StatePlan) {
        let stride = comptime!(plan.stride(plan.value_slice));
        sync_cube();
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            if inside(f, comptime!(plan.block_grid())) {
                #[unroll]
                for h in 0..2usize {
                    #[unroll]
                    for l in 0..2usize {
                        let at = Self::token(f, h, l, plan) * stride + value(f, l, plan);
                        block.tile[at] = Vector::<E, M>::cast_from(block.acc.index(f)[h][l]);
                    }
                }
            }
        }
        sync_cube();
    }

    /// Ends with a barrier.
    fn fill_state(
        state: &mut State<Self>,
        from: &Array<f32>,
        start: usize,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let width = comptime!(plan.value_width);
        let columns = comptime!(plan.value_slice);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = own_element(turn, comptime!(plan.keys()), columns, comptime!(plan.units));
            if n.there {
                let mut x = 0.0f32;
                if comptime!(plan.task.given) {
                    if is_in_state(n.row, first + n.column, plan) {
                        x = from[start + n.row * width + first + n.column];
                    }
                }
                let at = n.row * comptime!(plan.stride(columns)) + n.column;
                state.tile[at] = Vector::<E, M>::cast_from(x);
            }
        }
        sync_cube();
    }

    /// Ends with a barrier.
    fn reset_state(
        state: &mut State<Self>,
        stay: bool,
        diagonal: bool,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let columns = comptime!(plan.value_slice);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = own_element(turn, comptime!(plan.keys()), columns, comptime!(plan.units));
            if n.there && !stay {
                let one = diagonal && n.row == first + n.column;
                let at = n.row * comptime!(plan.stride(columns)) + n.column;
                state.tile[at] = Vector::<E, M>::cast_from(select(one, 1.0f32, 0.0f32));
            }
        }
        sync_cube();
    }

    fn write_state(
        state: &State<Self>,
        to: &mut Array<f32>,
        start: usize,
        first: usize,
        #[comptime] transposed: bool,
        #[comptime] plan: StatePlan,
    ) {
        let width = comptime!(plan.value_width);
        let keys = comptime!(plan.key_width);
        let down = comptime!(if transposed { 1 } else { width });
        let right = comptime!(if transposed { keys } else { 1 });
        let columns = comptime!(plan.value_slice);
        let all = comptime!(plan.keys() * columns);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            let n = own_element(turn, comptime!(plan.keys()), columns, comptime!(plan.units));
            let v = first + n.column;
            if n.there && is_in_state(n.row, v, plan) {
                let at = n.row * comptime!(plan.stride(columns)) + n.column;
                to[start + n.row * down + v * right] = f32::cast_from(state.tile[at]);
            }
        }
    }

    fn save_chunk_state(
        state: &State<Self>,
        to: &mut Array<Vector<E, W>>,
        chunk: usize,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let keys = comptime!(plan.key_width);
        let start = chunk * comptime!(plan.key_width * plan.value_width);
        let all = comptime!(plan.keys() * plan.value_slice);
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(plan.units)) {
            // The transpose: a value's keys lie side by side.
            let n = own_element(
                turn,
                comptime!(plan.value_slice),
                comptime!(plan.keys()),
                comptime!(plan.units),
            );
            let (v, d) = (first + n.row, n.column);
            if n.there && is_in_state(d, v, plan) {
                let at = d * comptime!(plan.stride(plan.value_slice)) + n.row;
                let to_at = start + v * keys + d;
                to[to_at] = Vector::<E, W>::cast_from(state.tile[at]);
            }
        }
    }

    /// A barrier before and after.
    fn decay_state(
        state: &mut State<Self>,
        total: f32,
        totals: &Array<f32>,
        start: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.variant.decay != crate::Decay::None) {
            sync_cube();
            let columns = comptime!(plan.value_slice);
            let all = comptime!(plan.keys() * columns);
            #[unroll]
            for turn in 0..comptime!(all.div_ceil(plan.units)) {
                let n = own_element(turn, comptime!(plan.keys()), columns, comptime!(plan.units));
                if n.there && is_in_state(n.row, 0usize, plan) {
                    let mut by = total;
                    if comptime!(plan.variant.vector()) {
                        by = totals[start + n.row];
                    }
                    let at = n.row * comptime!(plan.stride(columns)) + n.column;
                    state.tile[at] = Vector::<E, M>::cast_from(f32::cast_from(state.tile[at]) * by);
                }
            }
            sync_cube();
        }
    }

    fn state_product(
        acc: &mut Acc,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        state: &State<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        let columns = comptime!(plan.key_slice);
        let tile = comptime!(plan.value_slice);
        let spec =
            comptime!(plan.mul(plan.block_grid(), columns, row_major(columns), row_major(tile)));
        let from = slice * comptime!(columns * plan.stride(tile));
        mul::<E, N, M>(acc, x, at, &state.tile, from, spec);
    }

    fn block_product<T: Size>(
        acc: &mut Acc,
        matrix: &SharedMemory<Vector<E, T>>,
        at: usize,
        block: &Block<Self>,
        #[comptime] adjoint: bool,
        #[comptime] plan: StatePlan,
    ) {
        let chunk = comptime!(plan.chunk);
        let tile = comptime!(plan.value_slice);
        let how = comptime!(if adjoint { transposed(chunk) } else { row_major(chunk) });
        let zeros = comptime!(if adjoint { Zeros::Below } else { Zeros::Above });
        let spec = comptime!(plan.mul(plan.block_grid(), chunk, how, row_major(tile)));
        let spec = comptime!(spec.with_zeros(zeros));
        mul::<E, T, M>(acc, matrix, at, &block.tile, 0usize, spec);
    }

    fn outer_update(
        state: &mut State<Self>,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        block: &Block<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        let columns = comptime!(plan.key_slice);
        let tile = comptime!(plan.value_slice);
        let stride = comptime!(plan.stride(tile));
        let grid = comptime!(plan.grid(columns, tile));
        let mut sum = zeros(comptime!(grid.fragments()));
        let spec = comptime!(plan.mul(grid, plan.chunk, transposed(columns), row_major(tile)));
        mul::<E, N, M>(&mut sum, x, at, &block.tile, 0usize, spec);
        #[unroll]
        for f in 0..comptime!(grid.fragments()) {
            if inside(f, grid) {
                #[unroll]
                for h in 0..2usize {
                    #[unroll]
                    for l in 0..2usize {
                        let d = slice * columns + row(f, h, grid);
                        let at = d * stride + column(f, grid) + l;
                        let old = f32::cast_from(state.tile[at]);
                        state.tile[at] = Vector::<E, M>::cast_from(old + sum.index(f)[h][l]);
                    }
                }
            }
        }
    }

    fn state_product_out(
        acc: &mut Acc,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        state: &State<Self>,
        slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        Self::state_product(acc, x, at, state, slice, plan);
    }

    fn block_product_out<T: Size>(
        acc: &mut Acc,
        matrix: &SharedMemory<Vector<E, T>>,
        at: usize,
        block: &Block<Self>,
        #[comptime] plan: StatePlan,
    ) {
        Self::block_product::<T>(acc, matrix, at, block, false, plan);
    }

    fn write_output<T: Float>(
        to: &mut Array<Vector<T, W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let width = comptime!(plan.value_width);
        #[unroll]
        for f in 0..comptime!(plan.output_fragments()) {
            let j = first + column(f, comptime!(plan.block_grid()));
            #[unroll]
            for h in 0..2usize {
                let i = row(f, h, comptime!(plan.block_grid()));
                if inside(f, comptime!(plan.block_grid())) && i < rows.valid && j < width {
                    let at = rows.start + i * rows.stride + j;
                    put_out::<T, W>(to, at, acc.index(f)[h], width - j);
                }
            }
        }
    }

    fn write_block<T: Float>(
        to: &mut Array<Vector<T, W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        Self::write_output::<T>(to, acc, rows, first, plan);
    }
}

/// Value column, within the cube's, of element (.., l) of fragment `f` of a block.
#[cube]
fn value(#[comptime] f: usize, #[comptime] l: usize, #[comptime] plan: StatePlan) -> usize {
    column(f, comptime!(plan.block_grid())) + comptime!(l)
}

/// Whether key and value are of the state, and not of what fills up the last slice.
#[cube]
fn is_in_state(key: usize, value: usize, #[comptime] plan: StatePlan) -> bool {
    let mut is_in = true.runtime();
    if comptime!(plan.keys() != plan.key_width) {
        is_in = key < comptime!(plan.key_width);
    }
    if comptime!(!plan.value_width.is_multiple_of(plan.value_slice)) {
        is_in = is_in && value < comptime!(plan.value_width);
    }
    is_in
}
