//! Vector decay inside a chunk: every key column d has a decay of its own, and a pair of tokens weighs
//! each term of its score by itself, `(x|y)_ij = sum_d x_id y_jd e^{G_id - G_jd}`. Term by term that is
//! an exponential and several passes for each of C C K numbers a chunk.
//!
//! Here pairs go by where they part. For j < i there is one width w, a power of two, with j in the first
//! half and i in the second half of one block of 2w tokens. With M the cumulative sum at the middle of
//! that block,
//! ```text
//! e^{G_i - G_j} = e^{G_i - M} e^{M - G_j}
//! ```
//! is a factor of the row times one of the column: C K numbers for all blocks of a width, since a token
//! is in one half only. So scores are log2 C products of decayed rows with decayed columns, each kept
//! where its pairs are, and the diagonal. No exponent is above 0: no factor overflows, and one
//! underflows only where the weight does.
//!
//! As in [`scalar_decay`](super::scalar_decay), exponents are sums of the log decays between two tokens and never
//! differences of long sums, and the gradient adds up each log decay's own terms. The sums are products with
//! zeros and ones, and their gradients products with the transposes. Where a device multiplies f32 in
//! TF32 that rounds them too: a weight `e^-s` moves by no more than `s e^-s / 2048`, below 2e-4.

use super::exponents::{ExponentGradients, ScoreGradients};
use super::mask::Mask;
use crate::ops::recurrence::Read;
use crate::ops::tensors::Along;
use burn::tensor::{Tensor, backend::Backend};

/// Factors of one decay, in chunks.
#[derive(Debug, Clone)]
pub(super) struct VectorDecay<B: Backend> {
    /// From the start of the chunk through the token.
    from_start: Span<B>,
    /// From behind the token to the end of the chunk.
    to_end: Span<B>,
    /// `[chunks, N, K, 1]`: over the whole chunk.
    total: Tensor<B, 4>,
    levels: Vec<Level<B>>,
    diagonal: Mask<B>,
}

/// Sums of log decays, one for each token.
#[derive(Debug, Clone)]
struct Span<B: Backend> {
    /// `[1, 1, C, C]`: one where the column's log decay is in the row's sum.
    sums: Tensor<B, 4>,
    /// `[chunks, N, C, K]`: e to the power of the sums.
    factors: Tensor<B, 4>,
}

/// The pairs that part at one width.
#[derive(Debug, Clone)]
struct Level<B: Backend> {
    pairs: Mask<B>,
    /// Between the token and the middle of its block.
    to_middle: Span<B>,
}

impl<B: Backend> Span<B> {
    /// `counts(token, decay)`: whether the log decay is in the token's sum.
    fn new(g: &Tensor<B, 4>, counts: impl Fn(usize, usize) -> bool) -> Self {
        let sums = Mask::new(g, g.dims()[2], counts).matrix();
        Self { factors: sums.clone().matmul(g.clone()).exp(), sums }
    }

    /// Gradient of the log decays from that of the sums.
    fn adjoint(&self, d: Tensor<B, 4>) -> Tensor<B, 4> {
        self.sums.clone().transpose().matmul(d)
    }
}

impl<B: Backend> Level<B> {
    fn new(g: &Tensor<B, 4>, width: usize) -> Self {
        let half = |token: usize| token / width;
        let second = |token: usize| half(token) % 2 == 1;
        let pairs = |i: usize, j: usize| second(i) && half(i) == half(j) + 1;
        let between = |token: usize, decay: usize| {
            half(token) == half(decay) && second(token) == (decay <= token)
        };
        Self { pairs: Mask::new(g, g.dims()[2], pairs), to_middle: Span::new(g, between) }
    }

    /// Factors of rows that are in second halves. Before its decay the first row of a half takes that
    /// of the last token of the half before, whose sum is empty.
    fn rows(&self, read: Read) -> Tensor<B, 4> {
        read.rows(self.to_middle.factors.clone(), 1.0)
    }

    /// Factors of columns that are in first halves.
    fn columns(&self) -> Tensor<B, 4> {
        self.to_middle.factors.clone()
    }

    fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        let (rows, columns) = (x.clone() * self.rows(read), y.clone() * self.columns());
        self.pairs.apply(rows.matmul(columns.transpose()))
    }

    /// Gradients of x, of y and of the exponents to the middle.
    fn scores_backward(
        &self,
        x: &Tensor<B, 4>,
        y: &Tensor<B, 4>,
        d: &Tensor<B, 4>,
        read: Read,
    ) -> [Tensor<B, 4>; 3] {
        let d = self.pairs.apply(d.clone());
        let (rows, columns) = (self.rows(read), self.columns());
        let d_x = d.clone().matmul(y.clone() * columns.clone()) * rows.clone();
        let d_y = d.transpose().matmul(x.clone() * rows) * columns;
        let exponents = read.factors(x.clone() * d_x.clone()) + y.clone() * d_y.clone();
        [d_x, d_y, exponents]
    }
}

impl<B: Backend> VectorDecay<B> {
    /// `g`: `[chunks, N, C, K]`, C a power of two.
    pub(super) fn new(g: Tensor<B, 4>) -> Self {
        let [chunks, rows, size, width] = g.dims();
        let from_start = Span::new(&g, |token, decay| decay <= token);
        let last = from_start.factors.clone().narrow(2, size - 1, 1);
        Self {
            total: last.reshape([chunks, rows, width, 1]),
            to_end: Span::new(&g, |token, decay| decay > token),
            levels: (0..size.ilog2()).map(|level| Level::new(&g, 1 << level)).collect(),
            diagonal: Mask::new(&g, size, |i, j| i == j),
            from_start,
        }
    }

    /// `[.., C, K]`: `e^{G_i}`.
    pub(super) fn since_start(&self) -> Tensor<B, 4> {
        self.from_start.factors.clone()
    }

    /// `[.., C, K]`: `e^{G_C - G_j}`.
    pub(super) fn to_end(&self) -> Tensor<B, 4> {
        self.to_end.factors.clone()
    }

    /// `[.., K, 1]`: `e^{G_C}`.
    pub(super) fn total(&self) -> Tensor<B, 4> {
        self.total.clone()
    }

    /// Scores of rows x against rows y, `[.., C, C]`.
    pub(super) fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        let own = match read {
            Read::After => Some(self.diagonal.apply(x.clone().matmul(y.clone().transpose()))),
            Read::Before => None,
        };
        let others = self.levels.iter().map(|level| level.scores(x, y, read));
        let [chunks, rows, size, _] = x.dims();
        let none = || Tensor::zeros([chunks, rows, size, size], (&x.device(), x.dtype()));
        own.into_iter().chain(others).reduce(|sum, part| sum + part).unwrap_or_else(none)
    }

    /// The way back through [`scores`](Self::scores).
    pub(super) fn scores_backward(
        &self,
        x: &Tensor<B, 4>,
        y: &Tensor<B, 4>,
        d: &Tensor<B, 4>,
        read: Read,
    ) -> ScoreGradients<B> {
        let (mut d_x, mut d_y) = match read {
            Read::After => {
                let own = self.diagonal.apply(d.clone()).sum_along(3);
                (y.clone() * own.clone(), x.clone() * own)
            }
            Read::Before => (x.zeros_like(), y.zeros_like()),
        };
        let mut within = vec![];
        for level in &self.levels {
            let [to_x, to_y, exponents] = level.scores_backward(x, y, d, read);
            (d_x, d_y) = (d_x + to_x, d_y + to_y);
            within.push(exponents);
        }
        ScoreGradients { x: d_x, y: d_y, within }
    }

    /// Gradient of the log decays, `[.., C, K]`.
    pub(super) fn d_log_decays(&self, d: ExponentGradients<B>) -> Tensor<B, 4> {
        let size = d.to_end.dims()[2];
        // Repeated, because adding a row to every row of a matrix is slow on CPUs.
        let total = d.total.repeat_dim(2, size);
        let over_chunk =
            self.from_start.adjoint(d.from_start) + self.to_end.adjoint(d.to_end) + total;
        let levels = self.levels.iter().zip(d.within);
        levels.fold(over_chunk, |sum, (level, d)| sum + level.to_middle.adjoint(d))
    }
}
