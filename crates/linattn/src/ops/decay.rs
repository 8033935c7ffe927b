//! Scalar decay inside a chunk: the factors, and the way back to the log gates.
//!
//! With G the cumulative sum of g inside a chunk of C tokens, the chunk needs `e^{G_i - G_j}` for
//! i >= j, `e^{G_i}` and `e^{G_C - G_j}`. Every exponent here is a sum of gates between two tokens and
//! never the difference of two long sums: after a gate of -50 such a difference would have lost the
//! digits of all small gates behind it. For the same reason the gradient adds up each gate's own
//! terms instead of cancelling q dq against k dk.
//!
//! Rows may also ask before their own token's decay, with `G_{i-1}` in the place of `G_i`: [`Asks`].

use super::mask::Mask;
use burn::tensor::{Tensor, backend::Backend};

/// Factors of one decay, `[chunks, N, ..]`.
#[derive(Debug, Clone)]
pub(super) struct Decay<B: Backend> {
    /// `[.., C, C]`: `e^{G_i - G_j}` on and below the diagonal, 0 above.
    pub(super) within: Tensor<B, 4>,
    /// `[.., C, 1]`: `e^{G_i}`, from the start of the chunk through token i.
    pub(super) from_start: Tensor<B, 4>,
    /// `[.., C, 1]`: `e^{G_C - G_j}`, from behind token j to the end of the chunk.
    pub(super) to_end: Tensor<B, 4>,
    /// `[.., 1, 1]`: `e^{G_C}`, over the whole chunk.
    pub(super) total: Tensor<B, 4>,
}

impl<B: Backend> Decay<B> {
    /// `g`: `[chunks, N, C, 1]`.
    pub(super) fn new(g: Tensor<B, 4>) -> Self {
        let [chunks, rows, size, _] = g.dims();
        let (causal, strict) = (Mask::lower(&g, size, 0), Mask::lower(&g, size, 1));
        // At [i, j] the sum of g over j < m <= i.
        let sums = strict.apply(g.clone().expand([chunks, rows, size, size])).cumsum(2);
        let within = causal.apply(sums.exp());
        let from_start = g.cumsum(2).exp();
        let to_end = within.clone().narrow(2, size - 1, 1).reshape([chunks, rows, size, 1]);
        let total = from_start.clone().narrow(2, size - 1, 1).reshape([chunks, rows, 1, 1]);
        Self { within, from_start, to_end, total }
    }
}

/// Gradients of the exponents of a [`Decay`], that is, of each factor times that factor.
#[derive(Debug)]
pub(super) struct ExponentGradients<B: Backend> {
    /// `[.., C, C]`; only what is below the diagonal counts, where the exponent isn't always zero.
    pub(super) within: Tensor<B, 4>,
    /// `[.., C, 1]`.
    pub(super) from_start: Tensor<B, 4>,
    /// `[.., C, 1]`.
    pub(super) to_end: Tensor<B, 4>,
    /// `[.., 1, 1]`.
    pub(super) total: Tensor<B, 4>,
}

impl<B: Backend> ExponentGradients<B> {
    /// Gradient of the log gates, `[chunks, N, C, 1]`. Gate m is in the exponents at [i, j] with
    /// j < m <= i, in those to the end from all j < m, and in those from the start to all i >= m.
    pub(super) fn log_gates(self) -> Tensor<B, 4> {
        let [chunks, rows, size, _] = self.within.dims();
        let strict = Mask::lower(&self.within, size, 1);
        // Column m - 1 of the running sums holds the sum over j < m; the rows i >= m are below it.
        let crossing = strict.apply(strict.apply(self.within).cumsum(3)).sum_dim(2);
        let behind = crossing.reshape([chunks, rows, size, 1]) + self.to_end.cumsum(2);
        let ahead = self.from_start.flip([2]).cumsum(2).flip([2]) + self.total;
        ahead + later(behind, 0.0)
    }
}

/// Whether a row asks before its own token's decay, or after it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asks {
    After,
    Before,
}

impl Asks {
    /// Factors, `[.., C, X]`, as rows take them: asking before the decay is asking after that of the
    /// token before, and the first row takes `first`.
    pub(super) fn rows<B: Backend>(self, factors: Tensor<B, 4>, first: f64) -> Tensor<B, 4> {
        match self {
            Asks::After => factors,
            Asks::Before => later(factors, first),
        }
    }

    /// Gradients of what rows took, back at the tokens they took it from.
    pub(super) fn factors<B: Backend>(self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        match self {
            Asks::After => rows,
            Asks::Before => earlier(rows),
        }
    }
}

/// Row i of dimension 2 at i + 1, `first` in its place.
fn later<B: Backend>(x: Tensor<B, 4>, first: f64) -> Tensor<B, 4> {
    let size = x.dims()[2];
    let first = x.clone().narrow(2, 0, 1).zeros_like() + first;
    match size {
        1 => first,
        _ => Tensor::cat(vec![first, x.narrow(2, 0, size - 1)], 2),
    }
}

/// Row i of dimension 2 at i - 1, zeros at the end.
fn earlier<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let size = x.dims()[2];
    let last = x.clone().narrow(2, 0, 1).zeros_like();
    match size {
        1 => last,
        _ => Tensor::cat(vec![x.narrow(2, 1, size - 1), last], 2),
    }
}
