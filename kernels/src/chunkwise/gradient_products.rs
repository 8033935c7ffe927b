//! Products of the input gradients: over values, of value-wide matrices with each other or with a state, and over the
//! tokens of a chunk.

use crate::chunkwise::arguments::StageTypes;
use crate::chunkwise::gradient_rows::Together;
use crate::chunkwise::gradient_slices::{
    coming_factors, coming_state, lay_state_operands, request_factors, request_state,
};
use crate::chunkwise::gradient_tiles::{GradientInputs, GradientTiles, state_tile, values_tile};
use crate::chunkwise::plan::{GradientPlan, row_major, transposed};
use crate::chunkwise::roles::{FactorTile, Side};
use crate::tile::{
    Acc, LeftFactor, Pair, Source, Swizzled, Zeros, add_warpgroup_product, computed_here, load_a,
    mul, multiply_by_warpgroups, zeros,
};
use cubecl::prelude::*;

/// Right factor of a product over values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RightKind {
    /// A value-wide matrix, transposed: the product is [C, C].
    Values,
    /// A slice of S^T, which is stored [V, K]: the product is [C, key_slice].
    State,
}

/// `X S^T` over slices of values for one slice of keys, [C, key_slice] each, where S^T is stored [V, K].
#[cube]
pub(crate) fn state_terms<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    key: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let columns = comptime!(plan.value_slice);
    let grid = comptime!(plan.unscaled().grid(plan.chunk, plan.key_slice));
    let factors = comptime!(plan.state_factors(together));
    let states = comptime!(plan.roles(together)[0].states());
    let mut accs = Sequence::<Acc>::new();
    #[unroll]
    for _ in 0..comptime!(factors.len()) {
        accs.push(zeros(comptime!(grid.fragments())));
    }
    let mut on_the_left = coming_factors::<P>(factors, plan);
    let mut on_the_right = coming_state::<P>(plan);
    if comptime!(plan.requests_ahead()) {
        request_factors::<P>(&mut on_the_left, from, 0usize, factors, plan);
        request_state::<P>(&mut on_the_right, from, 0usize, key, states, plan);
    }
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        if comptime!(!plan.requests_ahead()) {
            request_factors::<P>(&mut on_the_left, from, first, factors, plan);
            request_state::<P>(&mut on_the_right, from, first, key, states, plan);
        }
        lay_state_operands::<P>(tiles, &on_the_left, &on_the_right, factors, plan);
        if comptime!(plan.requests_ahead()) {
            let next = first + columns;
            request_factors::<P>(&mut on_the_left, from, next, factors, plan);
            request_state::<P>(&mut on_the_right, from, next, key, states, plan);
        }
        let right = state_tile::<P>(tiles, states);
        #[unroll]
        for n in 0..comptime!(factors.len()) {
            let operand = comptime!(FactorTile::new(Side::Left, n));
            let left = values_tile::<P>(tiles, comptime!(factors.get(n)), operand, plan);
            let state = comptime!(RightKind::State);
            add_product_over_values::<P>(accs.index_mut(n), &left, &right, state, plan);
        }
    }
    accs
}

/// `acc += X Y^T`, or `X S^T`, for the values that the tiles hold, without a decay.
#[cube]
pub(crate) fn add_product_over_values<P: StageTypes>(
    acc: &mut Acc,
    left: &SharedMemory<Vector<P::E, P::L>>,
    right: &SharedMemory<Vector<P::E, P::L>>,
    #[comptime] factor: RightKind,
    #[comptime] plan: GradientPlan,
) {
    let columns = comptime!(plan.value_slice);
    let of_state = comptime!(factor == RightKind::State);
    let width = comptime!(if of_state { plan.key_slice } else { plan.chunk });
    let grid = comptime!(plan.unscaled().grid(plan.chunk, width));
    if comptime!(plan.warpgroups) {
        let rows = comptime!(if of_state { columns } else { plan.chunk });
        let layout = comptime!(Swizzled { rows, transposed: !of_state });
        let steps = comptime!(columns / 16);
        multiply_by_warpgroups::<P::E, P::L>(acc, left, right, 0usize, steps, layout, grid);
    } else {
        let right_as = comptime!(if of_state { row_major(width) } else { transposed(columns) });
        let spec = comptime!(plan.unscaled().mul(grid, columns, row_major(columns), right_as));
        mul::<P::E, P::L, P::L>(acc, left, 0usize, right, 0usize, spec);
    }
}

/// `acc += d_scores rows`, or (`of_y`) `d_scores^T rows`, under a decay that is not a vector.
#[cube]
pub(crate) fn add_product_over_tokens<P: StageTypes>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<P::X, P::M>>,
    rows: &SharedMemory<Vector<P::X, P::N>>,
    #[comptime] of_y: bool,
    #[comptime] plan: GradientPlan,
) {
    let chunk = comptime!(plan.chunk);
    let slice = comptime!(plan.key_slice);
    let how = comptime!(if of_y { transposed(chunk) } else { row_major(chunk) });
    let zeros = comptime!(if of_y { Zeros::Below } else { Zeros::Above });
    let spec = comptime!(plan.mul(plan.rows_grid(), chunk, how, row_major(slice)));
    let spec = comptime!(spec.with_zeros(zeros));
    mul::<P::X, P::M, P::N>(acc, weights, 0usize, rows, 0usize, spec);
}

/// [`add_product_over_tokens`] by warpgroups; `d_scores` times `scales` where these are `scaled`.
#[cube]
pub(crate) fn add_by_warpgroups<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    scales: &SharedMemory<f32>,
    #[comptime] transposed: bool,
    #[comptime] scaled: bool,
    #[comptime] plan: GradientPlan,
) {
    comptime!(assert!(transposed || !scaled));
    let chunk = comptime!(plan.chunk);
    let stride = comptime!(plan.stride(chunk));
    let row = computed_here(UNIT_POS) as usize / 32 % 4 * 16;
    let mut left = LeftFactor::<X>::new();
    #[unroll]
    for k in 0..comptime!(chunk / 16) {
        let source = comptime!(Source { down: 0, right: k * 16, stride, transposed });
        let factor = load_a::<X, M>(weights, 0usize, row, source);
        if comptime!(scaled) {
            left.push(scale_columns::<X>(&factor, scales, k));
        } else {
            left.push(factor);
        }
    }
    let layout = comptime!(Swizzled { rows: chunk, transposed: false });
    let grid = comptime!(plan.rows_grid());
    add_warpgroup_product::<X, N>(acc, &left, rows, 0usize, 0usize, layout, grid);
}

/// Step `k` of a left factor, its columns times their scales.
#[cube]
fn scale_columns<X: Float>(
    factor: &Array<Vector<X, Const<2>>>,
    scales: &SharedMemory<f32>,
    #[comptime] k: usize,
) -> Array<Vector<X, Const<2>>> {
    let mut scaled = Array::<Vector<X, Const<2>>>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        // Registers 2 and 3 are eight columns on.
        let column = UNIT_POS as usize % 4 * 2 + comptime!(k * 16 + n / 2 * 8);
        let mut by = Pair::empty();
        by[0] = scales[column];
        by[1] = scales[column + 1];
        scaled[n] = Vector::cast_from(Pair::cast_from(factor[n]) * by);
    }
    scaled
}
