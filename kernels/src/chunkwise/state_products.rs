//! Products of a chunk's rows and matrices with the state and with blocks, which state.rs holds.
//!
//! ```text
//! state_product     block += X S            retrieved values of every token of a chunk
//! block_product     block += M block'       M is [C, C]: T, A_qk, ..
//! outer_update      S     += X^T block      every token's outer product
//! ```
//! `state_product_out` and `block_product_out` are the first two for an output block, which is row-major on all
//! engines.

use crate::chunkwise::plan::{Plan, row_major, transposed};
use crate::chunkwise::state::{Block, State, at_own_keys, output_tokens};
use crate::tile::{Acc, Engine, column, execute, inside, load_a, load_b, mul, pair, row, zeros};
use cubecl::prelude::*;

/// `acc += X S`, over slice `slice` of keys; `x` holds [C, key_slice].
#[cube]
pub(crate) fn state_product<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    state: &State<X, M>,
    slice: usize,
    #[comptime] plan: Plan,
) {
    let columns = comptime!(plan.key_slice);
    if comptime!(plan.engine == Engine::Mma) {
        let stride = comptime!(plan.stride(columns));
        let at = at_own_keys(at, plan);
        #[unroll]
        for k in 0..comptime!(plan.state_fragments() / 2) {
            let left = operand::<X>(&state.acc, k);
            add_transposed::<X, N>(acc, &left, x, at, k, [0, plan.chunk / 16], stride, true);
        }
    } else {
        let tile = comptime!(plan.value_tile);
        let spec =
            comptime!(plan.mul(plan.block_grid(), columns, row_major(columns), row_major(tile)));
        let from = slice * comptime!(columns * plan.stride(tile));
        mul::<X, N, M>(acc, x, at, &state.tile, from, spec);
    }
}

/// `acc += M block`, or M^T block (`adjoint`), with M lower triangular, [C, C]. The block is published.
#[cube]
pub(crate) fn block_product<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    matrix: &SharedMemory<Vector<X, N>>,
    at: usize,
    block: &Block<X, M>,
    #[comptime] adjoint: bool,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    if comptime!(plan.engine == Engine::Mma) {
        let stride = comptime!(plan.stride(chunk));
        let transposed = comptime!(!adjoint);
        #[unroll]
        for k in 0..comptime!(chunk / 16) {
            let left = operand::<X>(&block.acc, k);
            // The rest of the matrix is zero, or was never written.
            let from = comptime!(if adjoint { 0 } else { k });
            let to = comptime!(if adjoint { k + 1 } else { chunk / 16 });
            add_transposed::<X, N>(acc, &left, matrix, at, k, [from, to], stride, transposed);
        }
    } else {
        let tile = comptime!(plan.value_tile);
        let how = comptime!(if adjoint { transposed(chunk) } else { row_major(chunk) });
        let spec = comptime!(plan.mul(plan.block_grid(), chunk, how, row_major(tile)));
        mul::<X, N, M>(acc, matrix, at, &block.tile, 0usize, spec);
    }
}

/// `S += X^T block` over slice `slice` of keys. The block is published.
#[cube]
pub(crate) fn outer_update<X: Float, N: Size, M: Size>(
    state: &mut State<X, M>,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    block: &Block<X, M>,
    slice: usize,
    #[comptime] plan: Plan,
) {
    let columns = comptime!(plan.key_slice);
    if comptime!(plan.engine == Engine::Mma) {
        let stride = comptime!(plan.stride(columns));
        let at = at_own_keys(at, plan);
        #[unroll]
        for k in 0..comptime!(plan.chunk / 16) {
            let left = operand::<X>(&block.acc, k);
            let to = comptime!(plan.state_fragments() / 2);
            add_transposed::<X, N>(&mut state.acc, &left, x, at, k, [0, to], stride, false);
        }
    } else {
        let tile = comptime!(plan.value_tile);
        let stride = comptime!(plan.stride(tile));
        let grid = comptime!(plan.grid(columns, tile));
        let mut sum = zeros(comptime!(grid.fragments()));
        let spec = comptime!(plan.mul(grid, plan.chunk, transposed(columns), row_major(tile)));
        mul::<X, N, M>(&mut sum, x, at, &block.tile, 0usize, spec);
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
                        state.tile[at] = Vector::<X, M>::cast_from(old + sum.index(f)[h][l]);
                    }
                }
            }
        }
    }
}

/// `acc += X S` for an output block, over slice `slice` of keys.
#[cube]
pub(crate) fn state_product_out<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    state: &State<X, M>,
    slice: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.engine == Engine::Mma) {
        let stride = comptime!(plan.stride(plan.key_slice));
        let at = at_own_keys(at, plan);
        #[unroll]
        for k in 0..comptime!(plan.state_fragments() / 2) {
            let rows = comptime!([0, plan.chunk / 16]);
            add_row_major::<X, N>(acc, x, at, &state.acc, k, rows, stride, plan);
        }
    } else {
        state_product::<X, N, M>(acc, x, at, state, slice, plan);
    }
}

/// `acc += M block` for an output block, M lower triangular. The block is published.
#[cube]
pub(crate) fn block_product_out<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    matrix: &SharedMemory<Vector<X, N>>,
    at: usize,
    block: &Block<X, M>,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.engine == Engine::Mma) {
        let stride = comptime!(plan.stride(plan.chunk));
        #[unroll]
        for k in 0..comptime!(plan.chunk / 16) {
            // With split-K the rows above the diagonal depend on the plane, which is known at run time: their zeros
            // are multiplied too. Producers would leave those unwritten, and never meet split-K.
            let from = comptime!(if plan.split_k > 1 { 0 } else { k });
            let rows = comptime!([from, plan.output_fragments() / 2]);
            add_row_major::<X, N>(acc, matrix, at, &block.acc, k, rows, stride, plan);
        }
    } else {
        block_product::<X, N, M>(acc, matrix, at, block, false, plan);
    }
}

/// Two fragments of a transposed accumulator as a left operand, [16, 16], in 16 bits.
#[cube]
fn operand<X: Float>(acc: &Acc, #[comptime] k: usize) -> Array<Vector<X, Const<2>>> {
    let low = acc.index(comptime!(2 * k));
    let high = acc.index(comptime!(2 * k + 1));
    let mut left = Array::<Vector<X, Const<2>>>::new(4usize);
    left[0] = Vector::<X, Const<2>>::cast_from(low[0usize]);
    left[1] = Vector::<X, Const<2>>::cast_from(low[1usize]);
    left[2] = Vector::<X, Const<2>>::cast_from(high[0usize]);
    left[3] = Vector::<X, Const<2>>::cast_from(high[1usize]);
    left
}

/// Two fragments of a transposed accumulator as a right operand, [16, 8]: columns `8 half..`.
#[cube]
fn right_operand<X: Float>(
    acc: &Acc,
    #[comptime] k: usize,
    #[comptime] half: usize,
) -> Array<Vector<X, Const<2>>> {
    let low = acc.index(comptime!(2 * k));
    let high = acc.index(comptime!(2 * k + 1));
    let mut right = Array::<Vector<X, Const<2>>>::new(2usize);
    right[0] = Vector::<X, Const<2>>::cast_from(low[half]);
    right[1] = Vector::<X, Const<2>>::cast_from(high[half]);
    right
}

/// Mma: `acc += left X` for one step of 16, `k`, of what is summed over, and 16 columns of X at a time, those
/// from the first of `range` on and before its second.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_transposed<X: Float, N: Size>(
    acc: &mut Acc,
    left: &Array<Vector<X, Const<2>>>,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    #[comptime] k: usize,
    #[comptime] range: [usize; 2],
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) {
    let [from, to] = range;
    #[unroll]
    for n in from..to {
        let [inner, across] = comptime!([k * 16, n * 16]);
        let right = load_b::<X, N>(x, at, inner, 0usize, across, stride, transposed);
        let f = comptime!(2 * n);
        execute::<X>(left, &pair(&right, 0usize, 1usize), acc.index_mut(f));
        let f = comptime!(2 * n + 1);
        execute::<X>(left, &pair(&right, 2usize, 3usize), acc.index_mut(f));
    }
}

/// Mma: the same for an output block, `acc += X right`, 16 rows of X at a time; `right` is transposed.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_row_major<X: Float, N: Size>(
    acc: &mut Acc,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    right: &Acc,
    #[comptime] k: usize,
    #[comptime] range: [usize; 2],
    #[comptime] stride: usize,
    #[comptime] plan: Plan,
) {
    let left_half = right_operand::<X>(right, k, 0usize);
    let right_half = right_operand::<X>(right, k, 1usize);
    let [from, to] = range;
    #[unroll]
    for m in from..to {
        let i = output_tokens(m, plan);
        let [down, inner] = comptime!([plan.output_offset(m), k * 16]);
        let left = load_a::<X, N>(x, at, i, down, inner, stride, false);
        execute::<X>(&left, &left_half, acc.index_mut(comptime!(2 * m)));
        execute::<X>(&left, &right_half, acc.index_mut(comptime!(2 * m + 1)));
    }
}
