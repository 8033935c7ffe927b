//! The taps of a diagonal state-space model.

use super::super::backend::LinearAttentionBackend;
use super::super::tensors::{primitive, tensor};
use super::{DiagonalTaps, Discretization};
use burn::tensor::Tensor;

/// The first `length` taps of a model, `[L, D]`: of log_dt and d, `[D]`, of log_a_real and a_imag, `[D, M]`, and of c and
/// the input vector where there is one, `[2, D, M]`. Nothing where this backend has no piece for them.
pub(crate) fn diagonal_taps<B: LinearAttentionBackend>(
    [log_dt, d]: [Tensor<B, 1>; 2],
    [log_a_real, a_imag]: [Tensor<B, 2>; 2],
    (c, b): (Tensor<B, 3>, Option<Tensor<B, 3>>),
    steps: Discretization,
    length: usize,
) -> Option<Tensor<B, 2>> {
    let [log_a_real, a_imag] = [log_a_real, a_imag].map(primitive);
    let (log_dt, c, d, b) = (primitive(log_dt), primitive(c), primitive(d), b.map(primitive));
    let x = DiagonalTaps { log_dt, log_a_real, a_imag, c, d, b, steps, length };
    let pass = B::fused_diagonal_taps(x, false)?;
    pass.outputs.into_iter().next().map(tensor)
}
