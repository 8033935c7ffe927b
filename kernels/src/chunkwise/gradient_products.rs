//! Products of the input gradients: over values, of value-wide matrices with each other or with a state, and over the
//! tokens of a chunk.

use crate::chunkwise::arguments::StageTypes;
use crate::chunkwise::gradient_rows::Together;
use crate::chunkwise::gradient_slices::{coming_operands, lay_operands, request_operands};
use crate::chunkwise::gradient_tiles::{GradientInputs, GradientTiles, left_tile, right_tile};
use crate::chunkwise::plan::{GradientPlan, row_major, transposed};
use crate::chunkwise::roles::{Factors, Right, Side};
use crate::chunkwise::score_gradients::ScoresTogether;
use crate::tile::{
    Acc, Grid, LeftFactor, Pair, Source, Swizzled, Zeros, add_warpgroup_product, computed_here,
    load_a, mul, multiply_by_warpgroups, zeros,
};
use cubecl::prelude::*;

/// Products over values that are made together, from operands that are loaded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ValueProducts {
    /// `X Y^T` of value-wide matrices, [C, C]: gradients of scores.
    Scores(ScoresTogether),
    /// `X S^T` for one slice of keys, [C, key_slice], where S^T is stored [V, K]: terms of gradients of rows.
    State(Together),
}

impl GradientPlan {
    /// Value-wide matrices on the left, each once.
    pub fn lefts(&self, products: ValueProducts) -> Factors {
        match products {
            ValueProducts::Scores(scores) => self.score_factors(scores, Side::Left),
            ValueProducts::State(rows) => self.state_factors(rows),
        }
    }

    /// The operands on the right: value-wide matrices, each once, or a state.
    pub fn right(&self, products: ValueProducts) -> Right {
        match products {
            ValueProducts::Scores(scores) => {
                Right::Factors(self.score_factors(scores, Side::Right))
            }
            ValueProducts::State(rows) => Right::State(self.roles(rows)[0].states()),
        }
    }

    /// The places of each product's factors among those of their side.
    fn places(&self, products: ValueProducts) -> Vec<[usize; 2]> {
        match products {
            ValueProducts::Scores(scores) => self.score_places(scores),
            ValueProducts::State(rows) => (0..self.roles(rows).len()).map(|n| [n, 0]).collect(),
        }
    }

    /// Where a unit holds a product.
    fn value_products_grid(&self, products: ValueProducts) -> Grid {
        let width = match products {
            ValueProducts::Scores(_) => self.chunk,
            ValueProducts::State(_) => self.key_slice,
        };
        self.unscaled().grid(self.chunk, width)
    }
}

/// Sums over all values, without a decay; those with a state for keys from `key` on.
#[cube]
pub(crate) fn value_products<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    key: usize,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let columns = comptime!(plan.value_slice);
    let count = comptime!(plan.places(products).len());
    let grid = comptime!(plan.value_products_grid(products));
    let mut accs = Sequence::<Acc>::new();
    #[unroll]
    for _ in 0..count {
        accs.push(zeros(comptime!(grid.fragments())));
    }
    let mut coming = coming_operands::<P>(products, plan);
    if comptime!(plan.requests_ahead()) {
        request_operands::<P>(&mut coming, from, 0usize, key, products, plan);
    }
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        if comptime!(!plan.requests_ahead()) {
            request_operands::<P>(&mut coming, from, first, key, products, plan);
        }
        lay_operands::<P>(tiles, &coming, products, plan);
        if comptime!(plan.requests_ahead()) {
            request_operands::<P>(&mut coming, from, first + columns, key, products, plan);
        }
        #[unroll]
        for n in 0..count {
            let [left, right] = comptime!(plan.places(products)[n]);
            let left = left_tile::<P>(tiles, left, products, plan);
            let right = right_tile::<P>(tiles, right, products, plan);
            add_value_product::<P>(accs.index_mut(n), &left, &right, products, plan);
        }
    }
    accs
}

/// `acc += X Y^T`, or `X S^T`, for the values that the tiles hold, without a decay.
#[cube]
fn add_value_product<P: StageTypes>(
    acc: &mut Acc,
    left: &SharedMemory<Vector<P::E, P::L>>,
    right: &SharedMemory<Vector<P::E, P::L>>,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) {
    let columns = comptime!(plan.value_slice);
    let of_state = comptime!(matches!(products, ValueProducts::State(_)));
    let grid = comptime!(plan.value_products_grid(products));
    if comptime!(plan.warpgroups) {
        let rows = comptime!(if of_state { columns } else { plan.chunk });
        let layout = comptime!(Swizzled { rows, transposed: !of_state });
        let steps = comptime!(columns / 16);
        multiply_by_warpgroups::<P::E, P::L>(acc, left, right, 0usize, steps, layout, grid);
    } else {
        let right_as =
            comptime!(if of_state { row_major(plan.key_slice) } else { transposed(columns) });
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
