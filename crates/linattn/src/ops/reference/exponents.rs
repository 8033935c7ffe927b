//! Exponents of a decay inside a chunk: which of them a row takes, and their gradients.

use crate::ops::recurrence::Read;
use crate::ops::tensors::cat;
use burn::tensor::{Tensor, backend::Backend};

/// Gradients of rows, of columns and of the exponents in between, from that of their scores.
#[derive(Debug)]
pub(super) struct ScoreGradients<B: Backend> {
    pub(super) x: Tensor<B, 4>,
    pub(super) y: Tensor<B, 4>,
    /// As in [`ExponentGradients::within`].
    pub(super) within: Vec<Tensor<B, 4>>,
}

/// Gradients of the exponents, that is, of each factor times that factor. Those of rows that read before
/// their decay are at the token before.
#[derive(Debug)]
pub(super) struct ExponentGradients<B: Backend> {
    /// Inside scores. A scalar decay has one tensor, `[.., C, C]`, for pairs of tokens, of which only what is below
    /// the diagonal counts; a vector decay one `[.., C, K]` for each width.
    pub(super) within: Vec<Tensor<B, 4>>,
    /// From the start, `[.., C, 1 or K]`.
    pub(super) from_start: Tensor<B, 4>,
    /// To the end, `[.., C, 1 or K]`.
    pub(super) to_end: Tensor<B, 4>,
    /// Over the whole chunk, `[.., 1, 1 or K]`.
    pub(super) total: Tensor<B, 4>,
}

/// The read position of a row: q of an identity transition, or the erase key a of a solve.
impl Read {
    /// Factors, `[.., C, X]`, as rows take them: to read before the decay is to read after that of the
    /// token before, and the first row takes `first`.
    pub(super) fn rows<B: Backend>(self, factors: Tensor<B, 4>, first: f64) -> Tensor<B, 4> {
        match self {
            Read::After => factors,
            Read::Before => later(factors, first),
        }
    }

    /// Gradients of what rows took, back at the tokens they took it from.
    pub(super) fn factors<B: Backend>(self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        match self {
            Read::After => rows,
            Read::Before => earlier(rows),
        }
    }
}

/// Row i of dimension 2 at i + 1, `first` in its place.
pub(super) fn later<B: Backend>(x: Tensor<B, 4>, first: f64) -> Tensor<B, 4> {
    let size = x.dims()[2];
    let first = x.clone().narrow(2, 0, 1).zeros_like() + first;
    match size {
        1 => first,
        _ => cat(vec![first, x.narrow(2, 0, size - 1)], 2),
    }
}

/// Row i of dimension 2 at i - 1, zeros at the end.
fn earlier<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let size = x.dims()[2];
    let last = x.clone().narrow(2, 0, 1).zeros_like();
    match size {
        1 => last,
        _ => cat(vec![x.narrow(2, 1, size - 1), last], 2),
    }
}
