//! Score blocks under a decay of its own for every key column, where the decay does not factor out
//! of the product:
//! ```text
//! (X|Y)_ij = sum_d x_id y_jd e^{G_id - G_jd}
//! ```
//! Each term is weighted by itself, in f32, with an exponent that is never above 0: nothing can
//! overflow, whatever the gates are.

use crate::chunk::Sums;
use crate::plan::Plan;
use crate::tile::{Acc, Pair, column, row};
use cubecl::prelude::*;

/// The row of sums that reader `i` sees: its own, or the one before it.
#[cube]
pub(crate) fn seen(i: usize, #[comptime] before: bool) -> usize {
    if comptime!(before) { max(i, 1usize) - 1 } else { i }
}

/// `acc[i, j] += (X|Y)_ij` for one slice of keys.
#[cube]
pub(crate) fn scores<X: Float, N: Size>(
    acc: &mut Acc,
    x: &SharedMemory<Vector<X, N>>,
    y: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid) * stride;
        #[unroll]
        for h in 0..2usize {
            let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let from = seen(i, before) * stride;
            let mut sum = acc.index(f)[h];
            for d in 0..comptime!(plan.key_slice) {
                let mut w = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let at = j + l * stride + d;
                    let coarse = sums.coarse[from + d] - sums.coarse[at];
                    let fine = sums.fine[from + d] - sums.fine[at];
                    w[l] = f32::exp(min(coarse + fine, 0.0f32)) * f32::cast_from(y[at]);
                }
                sum += Pair::new(f32::cast_from(x[i * stride + d])) * w;
            }
            set(acc.index_mut(f), h, sum);
        }
    }
}

/// Adjoint of [`scores`] for one slice of keys, `acc[n, d]` over [C, key_slice]: gradients of X from
/// the rows of Y, or (`of_y`) of Y from those of X. `weights` is the gradient of the scores, zero
/// where there is no score.
#[cube]
pub(crate) fn scores_adjoint<X: Float, N: Size, M: Size>(
    acc: &mut Acc,
    weights: &SharedMemory<Vector<X, M>>,
    rows: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] of_y: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.grid(plan.chunk, plan.key_slice));
    let stride = comptime!(plan.stride(plan.key_slice));
    let pairs = comptime!(plan.stride(plan.chunk));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let n = min(row(f, h, grid), comptime!(plan.chunk - 1));
            let mut sum = acc.index(f)[h];
            for m in 0..comptime!(plan.chunk) {
                let i = if comptime!(of_y) { m } else { n };
                let j = if comptime!(of_y) { n } else { m };
                let weight = f32::cast_from(weights[i * pairs + j]);
                let reader = seen(i, before) * stride + d;
                let writer = j * stride + d;
                let mut w = Pair::empty();
                #[unroll]
                for l in 0..2usize {
                    let coarse = sums.coarse[reader + l] - sums.coarse[writer + l];
                    let fine = sums.fine[reader + l] - sums.fine[writer + l];
                    let y = f32::cast_from(rows[m * stride + d + l]);
                    w[l] = f32::exp(min(coarse + fine, 0.0f32)) * y;
                }
                sum += Pair::new(weight) * w;
            }
            set(acc.index_mut(f), h, sum);
        }
    }
}

/// Puts a pair into a fragment.
#[cube]
pub(crate) fn set(fragment: &mut Array<Pair>, #[comptime] h: usize, x: Pair) {
    fragment[h] = x;
}
