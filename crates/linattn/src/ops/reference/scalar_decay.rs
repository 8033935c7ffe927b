//! Scalar decay inside a chunk: the factors, and the way back to the log decays.
//!
//! With G the cumulative sum of g inside a chunk of C tokens, the chunk needs `e^{G_i - G_j}` for
//! i >= j, `e^{G_i}` and `e^{G_C - G_j}`. Every exponent here is a sum of log decays between two tokens and
//! never the difference of two long sums: after a log decay of -50 such a difference would have lost the
//! digits of all small ones behind it. For the same reason the gradient adds up each log decay's own
//! terms instead of cancelling q dq against k dk.

use super::exponents::{ExponentGradients, ScoreGradients, later};
use super::mask::Mask;
use crate::ops::recurrence::Read;
use crate::ops::tensors::Along;
use burn::tensor::{Tensor, backend::Backend};

/// Factors of one decay, `[chunks, N, ..]`.
#[derive(Debug, Clone)]
pub(super) struct ScalarDecay<B: Backend> {
    /// `[.., C, C]`: `e^{G_i - G_j}` on and below the diagonal, 0 above.
    within: Tensor<B, 4>,
    /// `[.., C, 1]`: `e^{G_i}`, from the start of the chunk through token i.
    from_start: Tensor<B, 4>,
    /// `[.., C, 1]`: `e^{G_C - G_j}`, from behind token j to the end of the chunk.
    to_end: Tensor<B, 4>,
    /// `[.., 1, 1]`: `e^{G_C}`, over the whole chunk.
    total: Tensor<B, 4>,
}

impl<B: Backend> ScalarDecay<B> {
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

    /// Gradient of the log decays, `[chunks, N, C, 1]`. Log decay m is in the exponents at [i, j] with
    /// j < m <= i, in those to the end from all j < m, and in those from the start to all i >= m.
    pub(super) fn d_log_decays(d: ExponentGradients<B>) -> Tensor<B, 4> {
        let ExponentGradients { within, from_start, to_end, total } = d;
        let within = within.into_iter().next().expect("scores have pairs of tokens");
        let [chunks, rows, size, _] = within.dims();
        let strict = Mask::lower(&within, size, 1);
        // Column m - 1 of the running sums holds the sum over j < m; the rows i >= m are below it.
        let crossing = strict.apply(strict.apply(within).cumsum(3)).sum_along(2);
        let behind = crossing.reshape([chunks, rows, size, 1]) + to_end.cumsum(2);
        let ahead = from_start.flip([2]).cumsum(2).flip([2]) + total;
        ahead + later(behind, 0.0)
    }

    /// `[.., C, 1]`: `e^{G_i}`.
    pub(super) fn since_start(&self) -> Tensor<B, 4> {
        self.from_start.clone()
    }

    /// `[.., C, 1]`: `e^{G_C - G_j}`.
    pub(super) fn to_end(&self) -> Tensor<B, 4> {
        self.to_end.clone()
    }

    /// `[.., 1, 1]`: `e^{G_C}`.
    pub(super) fn total(&self) -> Tensor<B, 4> {
        self.total.clone()
    }

    /// Scores of rows x against rows y, `[.., C, C]`.
    pub(super) fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        x.clone().matmul(y.clone().transpose()) * read.rows(self.within.clone(), 0.0)
    }

    /// The way back through [`scores`](Self::scores), whose result spares a product where it is at hand.
    pub(super) fn scores_backward(
        &self,
        (x, y): (&Tensor<B, 4>, &Tensor<B, 4>),
        scores: Option<&Tensor<B, 4>>,
        d: Tensor<B, 4>,
        read: Read,
    ) -> ScoreGradients<B> {
        let scores = scores.cloned().unwrap_or_else(|| self.scores(x, y, read));
        let within = read.factors(d.clone() * scores);
        let d = d * read.rows(self.within.clone(), 0.0);
        ScoreGradients {
            x: d.clone().matmul(y.clone()),
            y: d.transpose().matmul(x.clone()),
            within: vec![within],
        }
    }
}
