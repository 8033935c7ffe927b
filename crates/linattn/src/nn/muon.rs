//! Muon's steps: a matrix made orthogonal, or nearly so, by products alone.
//! ```text
//! X = X / |X|, then a few times X = a X + (b A + c A^2) X, A = X X^T
//! ```
//! Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

use crate::ops::Along;
use burn::tensor::{Tensor, backend::Backend};

/// a, b, c of each step.
pub(crate) type Steps = [[f64; 3]; 5];

/// Of Jordan et al.
pub(crate) const JORDAN_STEPS: Steps = [[3.4445, -4.7750, 2.0315]; 5];
/// Of the code of arXiv 2505.23884.
pub(crate) const LACT_STEPS: Steps = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
];
/// Added to the size of a matrix before the steps.
const EPSILON: f64 = 1e-7;

/// `x`, `[.., from, to]`, with singular values near 1.
pub(crate) fn orthogonal<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    steps: Steps,
) -> Tensor<B, D> {
    let shape = x.dims();
    let tall = shape[D - 2] > shape[D - 1];
    let x = if tall { x.transpose() } else { x };
    let size =
        (x.clone() * x.clone()).sum_along(D - 1).sum_along(D - 2) + f64::from(f32::MIN_POSITIVE);
    let x = x / (size.sqrt() + EPSILON);
    let step = |x: Tensor<B, D>, [a, b, c]: [f64; 3]| {
        let square = x.clone().matmul(x.clone().transpose());
        let mixed = square.clone() * b + square.clone().matmul(square) * c;
        x.clone() * a + mixed.matmul(x)
    };
    let x = steps.into_iter().fold(x, step);
    if tall { x.transpose() } else { x }
}

/// Multiplications and additions of the steps of a matrix.
pub(crate) fn flops([from, to]: [usize; 2]) -> u64 {
    let (short, long) = (from.min(to) as u64, from.max(to) as u64);
    5 * (4 * short * short * long + 2 * short * short * short)
}
