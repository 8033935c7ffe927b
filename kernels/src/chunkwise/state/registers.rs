//! State and blocks in registers, in 16 bits as operands, transposed: a plane owns 16 columns of values, so that
//! S^T [16, K] and block^T [16, C] are accumulators of the tensor cores and, rounded to 16 bits, at once their left
//! operands (or, two fragments paired, right operands). Neither passes through shared memory, but for what
//! warpgroups write out, and planes do not wait for each other within a chunk, but for the four of a warpgroup and where consumers make
//! scores. Where keys are wide, two planes own the same 16 columns and half of the
//! keys each (split-K); [`reduce_split_k`] adds their partial products.

use super::{Block, State, StateEngine, is_consumer};
use crate::chunkwise::plan::StatePlan;
use crate::tile::{
    Acc, Pair, Rows, Source, Swizzled, execute, load_a, load_b, pair, put_four, set,
    store_transposed, warpgroup_mul, warpgroup_mul_both,
};
use cubecl::prelude::*;
use std::marker::PhantomData;

/// The state is in registers.
pub(crate) struct InRegisters<F, E, G, N, M, W>(PhantomData<(F, E, G, N, M, W)>);

#[cube]
impl<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size> StateEngine
    for InRegisters<F, E, G, N, M, W>
{
    type F = F;
    type E = E;
    type G = G;
    type N = N;
    type M = M;
    type W = W;

    fn token(
        #[comptime] f: usize,
        #[comptime] _h: usize,
        #[comptime] l: usize,
        #[comptime] _plan: StatePlan,
    ) -> usize {
        UNIT_POS as usize % 4 * 2 + comptime!(f * 8 + l)
    }

    fn output_row(
        #[comptime] f: usize,
        #[comptime] h: usize,
        #[comptime] plan: StatePlan,
    ) -> usize {
        let lane = UNIT_POS as usize % 32;
        output_tokens(comptime!(f / 2), plan)
            + lane / 4
            + comptime!(plan.output_offset(f / 2) + h * 8)
    }

    fn load_block(
        block: &mut Block<Self>,
        from: &SharedMemory<Vector<E, N>>,
        at: usize,
        #[comptime] plan: StatePlan,
    ) {
        let stride = comptime!(plan.stride(plan.value_slice));
        let first = own_columns(plan);
        #[unroll]
        for k in 0..comptime!(plan.chunk / 16) {
            let block_at = comptime!(Source { down: 0, right: k * 16, stride, transposed: true });
            let x = load_a::<E, N>(from, at, first, block_at);
            #[unroll]
            for n in 0..2usize {
                let fragment = block.acc.index_mut(comptime!(2 * k + n));
                set(fragment, 0usize, Pair::cast_from(x[comptime!(2 * n)]));
                set(fragment, 1usize, Pair::cast_from(x[comptime!(2 * n + 1)]));
            }
        }
    }

    /// Registers are the operand.
    fn publish(_block: &mut Block<Self>, #[comptime] _plan: StatePlan) {}

    fn fill_state(
        state: &mut State<Self>,
        from: &Array<f32>,
        start: usize,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let width = comptime!(plan.value_width);
        if comptime!(plan.task.given) {
            if is_consumer(plan) {
                #[unroll]
                for f in 0..comptime!(plan.state_fragments()) {
                    #[unroll]
                    for h in 0..2usize {
                        let mut x = Pair::empty();
                        #[unroll]
                        for l in 0..2usize {
                            let d = key(f, l, plan);
                            x[l] = from[start + d * width + first + value(h, plan)];
                        }
                        set(state.acc.index_mut(f), h, x);
                    }
                }
            }
        }
    }

    fn reset_state(
        state: &mut State<Self>,
        stay: bool,
        diagonal: bool,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        #[unroll]
        for f in 0..comptime!(plan.state_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let mut x = state.acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    let d = key(f, l, plan);
                    let one = diagonal && d == first + value(h, plan);
                    x[l] = select(stay, x[l], select(one, 1.0f32, 0.0f32));
                }
                set(state.acc.index_mut(f), h, x);
            }
        }
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
        #[unroll]
        for f in 0..comptime!(plan.state_fragments()) {
            #[unroll]
            for h in 0..2usize {
                #[unroll]
                for l in 0..2usize {
                    let d = key(f, l, plan);
                    let v = first + value(h, plan);
                    to[start + d * down + v * right] = state.acc.index(f)[h][l];
                }
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
                put_four::<E, W>(to, at, left, right, true, 1u32);
            }
        }
    }

    fn decay_state(
        state: &mut State<Self>,
        total: f32,
        totals: &Array<f32>,
        start: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.variant.decay != crate::Decay::None) {
            #[unroll]
            for f in 0..comptime!(plan.state_fragments()) {
                let d = at_own_keys(comptime!(f * 8) + UNIT_POS as usize % 4 * 2, plan);
                let mut by = Pair::new(total);
                if comptime!(plan.variant.vector()) {
                    by[0] = totals[start + d];
                    by[1] = totals[start + d + 1];
                }
                let x = state.acc.index(f)[0usize] * by;
                let y = state.acc.index(f)[1usize] * by;
                set(state.acc.index_mut(f), 0usize, x);
                set(state.acc.index_mut(f), 1usize, y);
            }
        }
    }

    fn state_product(
        acc: &mut Acc,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        state: &State<Self>,
        _slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.warpgroups) {
            let left = operands::<E>(&state.acc, 0usize, comptime!(plan.state_fragments() / 2));
            let at = at_own_groups(at, plan);
            warpgroup_mul::<E, N>(acc, &left, x, at, comptime!(plan.swizzled(true)));
        } else {
            let stride = comptime!(plan.stride(plan.key_slice));
            let at = at_own_keys(at, plan);
            #[unroll]
            for k in 0..comptime!(plan.state_fragments() / 2) {
                let left = operand::<E>(&state.acc, k);
                let part =
                    comptime!(Part { k, from: 0, to: plan.chunk / 16, stride, transposed: true });
                add_transposed::<E, N>(acc, &left, x, at, part);
            }
        }
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
        if comptime!(plan.warpgroups) {
            let left = operands::<E>(&block.acc, 0usize, comptime!(chunk / 16));
            warpgroup_mul::<E, T>(acc, &left, matrix, at, comptime!(plan.swizzled(!adjoint)));
        } else {
            let stride = comptime!(plan.stride(chunk));
            #[unroll]
            for k in 0..comptime!(chunk / 16) {
                let left = operand::<E>(&block.acc, k);
                // The rest of the matrix is zero, or was never written.
                let from = comptime!(if adjoint { 0 } else { k });
                let to = comptime!(if adjoint { k + 1 } else { chunk / 16 });
                let part = comptime!(Part { k, from, to, stride, transposed: !adjoint });
                add_transposed::<E, T>(acc, &left, matrix, at, part);
            }
        }
    }

    fn outer_update(
        state: &mut State<Self>,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        block: &Block<Self>,
        _slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.warpgroups) {
            let left = operands::<E>(&block.acc, 0usize, comptime!(plan.chunk / 16));
            let at = at_own_groups(at, plan);
            warpgroup_mul::<E, N>(&mut state.acc, &left, x, at, comptime!(plan.swizzled(false)));
        } else {
            let stride = comptime!(plan.stride(plan.key_slice));
            let at = at_own_keys(at, plan);
            #[unroll]
            for k in 0..comptime!(plan.chunk / 16) {
                let left = operand::<E>(&block.acc, k);
                let to = comptime!(plan.state_fragments() / 2);
                let part = comptime!(Part { k, from: 0, to, stride, transposed: false });
                add_transposed::<E, N>(&mut state.acc, &left, x, at, part);
            }
        }
    }

    fn state_product_out(
        acc: &mut Acc,
        x: &SharedMemory<Vector<E, N>>,
        at: usize,
        state: &State<Self>,
        _slice: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.warpgroups) {
            Self::state_product(acc, x, at, state, _slice, plan);
        } else {
            let stride = comptime!(plan.stride(plan.key_slice));
            let at = at_own_keys(at, plan);
            #[unroll]
            for k in 0..comptime!(plan.state_fragments() / 2) {
                let to = comptime!(plan.chunk / 16);
                let part = comptime!(Part { k, from: 0, to, stride, transposed: false });
                add_row_major::<E, N>(acc, x, at, &state.acc, part, plan);
            }
        }
    }

    fn block_product_out<T: Size>(
        acc: &mut Acc,
        matrix: &SharedMemory<Vector<E, T>>,
        at: usize,
        block: &Block<Self>,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.warpgroups) {
            Self::block_product::<T>(acc, matrix, at, block, false, plan);
        } else {
            let stride = comptime!(plan.stride(plan.chunk));
            #[unroll]
            for k in 0..comptime!(plan.chunk / 16) {
                // With split-K the rows above the diagonal depend on the plane, which is known at run time: their zeros
                // are multiplied too. Producers would leave those unwritten, and never meet split-K.
                let from = comptime!(if plan.split_k > 1 { 0 } else { k });
                let to = comptime!(plan.output_fragments() / 2);
                let part = comptime!(Part { k, from, to, stride, transposed: false });
                add_row_major::<E, T>(acc, matrix, at, &block.acc, part, plan);
            }
        }
    }

    fn write_output<T: Float>(
        to: &mut Array<Vector<T, W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        if comptime!(plan.warpgroups) {
            Self::write_block::<T>(to, acc, rows, first, plan);
        } else {
            let lane = UNIT_POS as usize % 32;
            let row = Self::output_row(0usize, 0usize, plan);
            let column = own_columns(plan) + lane % 2 * 8 + lane % 4 / 2 * 4;
            let start = (rows.start + row * rows.stride + first + column) / 4;
            #[unroll]
            for m in 0..comptime!(plan.output_fragments() / 2) {
                #[unroll]
                for h in 0..2usize {
                    let down = comptime!(m * 16 + h * 8);
                    let left = acc.index(comptime!(2 * m))[h];
                    let right = acc.index(comptime!(2 * m + 1))[h];
                    let there = row + down < rows.valid;
                    let at = start + rows.stride / 4 * down;
                    put_four::<T, W>(to, at, left, right, there, 1u32);
                }
            }
        }
    }

    /// The block is transposed: neighbouring lanes swap pairs, so that each holds two neighbouring columns of one
    /// token, and then four.
    fn write_block<T: Float>(
        to: &mut Array<Vector<T, W>>,
        acc: &Acc,
        rows: &Rows,
        first: usize,
        #[comptime] plan: StatePlan,
    ) {
        let lane = UNIT_POS as usize % 32;
        let odd = lane / 4 % 2;
        let row = Self::token(0usize, 0usize, 0usize, plan) + odd;
        let column = own_columns(plan) + lane / 8 % 2 * 8 + lane / 16 * 4;
        let start = (rows.start + row * rows.stride + first + column) / 4;
        #[unroll]
        for f in 0..comptime!(plan.block_fragments()) {
            let low = to_row_major(acc.index(f)[0usize], odd == 1);
            let high = to_row_major(acc.index(f)[1usize], odd == 1);
            let there = row + comptime!(f * 8) < rows.valid && stores(f, plan);
            let at = start + rows.stride / 4 * comptime!(f * 8);
            put_four::<T, W>(to, at, low, high, there, 8u32);
        }
    }
}

/// Writes a block through the plane's own columns of a tile [C, value_slice] that nobody needs any more and that begins at
/// `at`: a token's 16 columns by four lanes.
#[cube]
pub(crate) fn write_block_through<P: StateEngine, T: Float>(
    to: &mut Array<Vector<T, P::W>>,
    acc: &Acc,
    tile: &mut SharedMemory<Vector<P::E, P::N>>,
    at: usize,
    rows: &Rows,
    first: usize,
    #[comptime] plan: StatePlan,
) {
    let stride = comptime!(plan.stride(plan.value_slice));
    let lane = UNIT_POS as usize % 32;
    let start = at + own_columns(plan);
    let row = start + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
    #[unroll]
    for m in 0..comptime!(plan.block_fragments() / 2) {
        let four = operand::<P::E>(acc, m);
        store_transposed::<P::E, P::N>(tile, row / 8 + comptime!(m * 16 * stride / 8), &four);
    }
    sync_plane();
    let fours = tile.to_slice().into_vectorized().with_vector_size::<P::W>();
    let (token, column) = (lane / 4, lane % 4 * 4);
    let from = (start + token * stride + column) / 4;
    let start = (rows.start + token * rows.stride + first + own_columns(plan) + column) / 4;
    #[unroll]
    for turn in 0..comptime!(plan.chunk / 8) {
        let x = fours[from + comptime!(turn * 8 * stride / 4)];
        if token + comptime!(turn * 8) < rows.valid {
            to[start + rows.stride / 4 * comptime!(turn * 8)] = Vector::cast_from(x);
        }
    }
    // Before the tile is written again.
    sync_plane();
}

/// `retrieved += E S` and `out += Q S` by warpgroups. Half of the keys at a time: rounded once for both products, the state is
/// in registers no longer than it takes.
#[cube]
pub(crate) fn state_products<P: StateEngine>(
    retrieved: &mut Acc,
    out: &mut Acc,
    erase_rows: &SharedMemory<Vector<P::E, P::N>>,
    query_rows: &SharedMemory<Vector<P::E, P::N>>,
    at: usize,
    state: &State<P>,
    #[comptime] plan: StatePlan,
) {
    let layout = comptime!(plan.swizzled(true));
    let half = comptime!(plan.state_fragments() / 4);
    #[unroll]
    for part in 0..2usize {
        let first = comptime!(part * half);
        let left = operands::<P::E>(&state.acc, first, half);
        let at = at + comptime!(layout.at_step(first));
        warpgroup_mul_both::<P::E, P::N>(retrieved, out, &left, erase_rows, query_rows, at, layout);
    }
}

impl StatePlan {
    /// Planes side by side, 16 columns of values each.
    fn columns_of_planes(&self) -> usize {
        self.value_slice / 16
    }

    /// A tile of a chunk's rows as a right factor of warpgroups.
    fn swizzled(&self, transposed: bool) -> Swizzled {
        Swizzled { rows: self.chunk, transposed }
    }

    /// Tokens from the start of a plane's part to the 16 in row `m` of fragments of an output block.
    fn output_offset(&self, m: usize) -> usize {
        m * 16 % (self.chunk / self.split_k)
    }
}

/// One step of 16, `k`, of what a product sums over, and the blocks of 16 of its other side, from `from` on and before
/// `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Part {
    k: usize,
    from: usize,
    to: usize,
    /// From one row of the tile to the next.
    stride: usize,
    /// How the tile is read.
    transposed: bool,
}

/// First of the 16 value columns of this unit's plane. The first planes are producers.
#[cube]
fn own_columns(#[comptime] plan: StatePlan) -> usize {
    let plane = UNIT_POS as usize / 32;
    if comptime!(plan.split_k > 1) {
        plane % comptime!(plan.columns_of_planes()) * 16
    } else {
        (plane - comptime!(plan.producers())) * 16
    }
}

/// Value column, within the cube's, of element (h, ..) of a fragment of a block.
#[cube]
fn value(#[comptime] h: usize, #[comptime] plan: StatePlan) -> usize {
    own_columns(plan) + UNIT_POS as usize % 32 / 4 + comptime!(h * 8)
}

/// Key of element (.., l) of fragment `f` of the state.
#[cube]
fn key(#[comptime] f: usize, #[comptime] l: usize, #[comptime] plan: StatePlan) -> usize {
    at_own_keys(comptime!(f * 8 + l) + UNIT_POS as usize % 4 * 2, plan)
}

/// Number of this unit's plane among those of the same columns.
#[cube]
fn own_split(#[comptime] plan: StatePlan) -> usize {
    UNIT_POS as usize / comptime!(32 * plan.columns_of_planes())
}

/// `at`, moved to the first of this unit's plane's keys.
#[cube]
fn at_own_keys(at: usize, #[comptime] plan: StatePlan) -> usize {
    if comptime!(plan.split_k > 1) {
        at + own_split(plan) * comptime!(plan.keys() / plan.split_k)
    } else {
        at
    }
}

/// The same in a swizzled tile of a chunk's rows, where 64 columns of all rows lie together.
#[cube]
fn at_own_groups(at: usize, #[comptime] plan: StatePlan) -> usize {
    if comptime!(plan.split_k > 1) {
        at + own_split(plan) * comptime!(plan.keys() / plan.split_k * plan.chunk)
    } else {
        at
    }
}

/// First token of the part in which the 16 in row `m` of fragments of an output block lie, the plane's own part
/// first; [`StatePlan::output_offset`] tokens on, the 16 begin.
#[cube]
fn output_tokens(#[comptime] m: usize, #[comptime] plan: StatePlan) -> usize {
    if comptime!(plan.split_k > 1) {
        let tokens = comptime!(plan.chunk / plan.split_k);
        (own_split(plan) * tokens + comptime!(m * 16 / tokens * tokens)) % comptime!(plan.chunk)
    } else {
        0usize.runtime()
    }
}

/// Whether fragment `f` of a block that planes have in common is this unit's plane's to store.
#[cube]
fn stores(#[comptime] f: usize, #[comptime] plan: StatePlan) -> bool {
    if comptime!(plan.split_k > 1) {
        own_split(plan) == comptime!(f * plan.split_k / plan.block_fragments())
    } else {
        true.runtime()
    }
}

/// Split-K reduction between the two planes that own the same value columns. After
/// [`state_product`](StateEngine::state_product) both need all tokens (`from` is 0), after
/// [`state_product_out`](StateEngine::state_product_out) only the tokens they store (`from` is the number
/// of their own fragments), but for warpgroups. One barrier; a second one first unless `fresh`: none is needed if one has passed since
/// the scratch was last used.
#[cube]
pub(crate) fn reduce_split_k(
    acc: &mut Acc,
    scratch: &mut SharedMemory<Pair>,
    #[comptime] from: usize,
    #[comptime] fresh: bool,
    #[comptime] plan: StatePlan,
) {
    if comptime!(plan.split_k > 1) {
        if comptime!(!fresh) {
            sync_cube();
        }
        let fragments = comptime!(plan.block_fragments() - from);
        let units = comptime!(plan.units);
        let unit = UNIT_POS as usize;
        #[unroll]
        for f in 0..fragments {
            #[unroll]
            for h in 0..2usize {
                let at = comptime!((2 * f + h) * units) + unit;
                scratch[at] = acc.index(comptime!(from + f))[h];
            }
        }
        sync_cube();
        let other = (unit + comptime!(units / 2)) % units;
        #[unroll]
        for f in 0..fragments {
            #[unroll]
            for h in 0..2usize {
                let at = comptime!((2 * f + h) * units) + other;
                let x = acc.index(f)[h] + scratch[at];
                set(acc.index_mut(f), h, x);
            }
        }
    }
}

/// `16 steps` columns of a transposed accumulator, from step `first` on, as left operands.
#[cube]
fn operands<X: Float>(
    acc: &Acc,
    #[comptime] first: usize,
    #[comptime] steps: usize,
) -> Sequence<Array<Vector<X, Const<2>>>> {
    let mut all = Sequence::<Array<Vector<X, Const<2>>>>::new();
    #[unroll]
    for k in first..comptime!(first + steps) {
        all.push(operand::<X>(acc, k));
    }
    all
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

/// `acc += left X` for one part, 16 columns of X at a time.
#[cube]
fn add_transposed<X: Float, N: Size>(
    acc: &mut Acc,
    left: &Array<Vector<X, Const<2>>>,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    #[comptime] part: Part,
) {
    let k = comptime!(part.k);
    let from = comptime!(part.from);
    let to = comptime!(part.to);
    let stride = comptime!(part.stride);
    let transposed = comptime!(part.transposed);
    #[unroll]
    for n in from..to {
        let from = comptime!(Source { down: k * 16, right: n * 16, stride, transposed });
        let right = load_b::<X, N>(x, at, 0usize, from);
        let f = comptime!(2 * n);
        execute::<X>(left, &pair(&right, 0usize, 1usize), acc.index_mut(f));
        let f = comptime!(2 * n + 1);
        execute::<X>(left, &pair(&right, 2usize, 3usize), acc.index_mut(f));
    }
}

/// The same for an output block, `acc += X right`, 16 rows of X at a time; `right` is transposed.
#[cube]
fn add_row_major<X: Float, N: Size>(
    acc: &mut Acc,
    x: &SharedMemory<Vector<X, N>>,
    at: usize,
    right: &Acc,
    #[comptime] part: Part,
    #[comptime] plan: StatePlan,
) {
    let k = comptime!(part.k);
    let from = comptime!(part.from);
    let to = comptime!(part.to);
    let stride = comptime!(part.stride);
    let transposed = comptime!(part.transposed);
    let left_half = right_operand::<X>(right, k, 0usize);
    let right_half = right_operand::<X>(right, k, 1usize);
    #[unroll]
    for m in from..to {
        let i = output_tokens(m, plan);
        let down = comptime!(plan.output_offset(m));
        let from = comptime!(Source { down, right: k * 16, stride, transposed });
        let left = load_a::<X, N>(x, at, i, from);
        execute::<X>(&left, &left_half, acc.index_mut(comptime!(2 * m)));
        execute::<X>(&left, &right_half, acc.index_mut(comptime!(2 * m + 1)));
    }
}

/// Of two columns by two tokens on two lanes, four apart: both columns of one token.
#[cube]
fn to_row_major(x: Pair, odd: bool) -> Pair {
    let other = plane_shuffle_xor(select(odd, x[0], x[1]), 4u32);
    let mut y = Pair::empty();
    y[0] = select(odd, other, x[0]);
    y[1] = select(odd, x[1], other);
    y
}
