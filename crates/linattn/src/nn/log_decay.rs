//! Log decays of a rate and a step size: `g = -exp(A_log) softplus(x + dt_bias)`.
//!
//! A starts uniform in 0 or 1 to 16, steps log-uniform in 0.001 to 0.1. Source: Dao and Gu, arXiv 2405.21060.

use super::layers::split_heads;
use crate::ops::{self, LinearAttentionBackend, accumulator, typed};
use burn::module::Param;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Distribution, Tensor, backend::Backend};

/// Least A: the logarithm of 0 is no number.
const LEAST_A: f64 = 1e-6;

/// Parameters of a log decay.
#[derive(Debug, Clone)]
pub(crate) struct LogDecayParams<B: Backend> {
    /// ln A, `[H]`.
    pub(crate) a_log: Tensor<B, 1>,
    /// The bias of step sizes: `[H]`, or `[H K]` for a decay of its own for each row of the memory.
    pub(crate) dt_bias: Tensor<B, 1>,
}

impl<B: Backend> LogDecayParams<B> {
    /// Of a layer's parameters.
    pub(crate) fn new(a_log: &Param<Tensor<B, 1>>, dt_bias: &Param<Tensor<B, 1>>) -> Self {
        Self { a_log: a_log.val(), dt_bias: dt_bias.val() }
    }

    /// As [`new`](Self::new), of a layer that may have none.
    pub(crate) fn optional(
        a_log: &Option<Param<Tensor<B, 1>>>,
        dt_bias: &Option<Param<Tensor<B, 1>>>,
    ) -> Option<Self> {
        Some(Self::new(a_log.as_ref()?, dt_bias.as_ref()?))
    }
}

impl<B: LinearAttentionBackend> LogDecayParams<B> {
    /// A decay for each row of the memory: `[B, T, H K]` to `[B, T, H, K]`, with an A for each head; f32 at
    /// least.
    pub(crate) fn of_rows(self, x: Tensor<B, 3>) -> Tensor<B, 4> {
        let [heads] = self.a_log.dims();
        split_heads(ops::log_decays(x, self.a_log, self.dt_bias), heads)
    }
}

/// `(1 - a) v` of values `[B, T, H, V]`, and `ln a`, for `a = sigmoid(gate)`, `[B, T, H]`; values alone without
/// a gate.
pub(crate) fn gated_write<B: LinearAttentionBackend>(
    v: Tensor<B, 4>,
    gate: Option<Tensor<B, 3>>,
) -> (Tensor<B, 4>, Option<Tensor<B, 3>>) {
    let Some(gate) = gate else { return (v, None) };
    // 1 - a in a form that keeps its small values exact.
    let share = sigmoid(accumulator(gate.clone()).neg()).unsqueeze_dim::<4>(3);
    let dtype = v.dtype();
    (v * typed(share, dtype), Some(ops::log_sigmoid(gate, 1.0)))
}

/// ln A, A uniform in `least` to 16: how fast a head forgets at most. Where it is in 0 to 16, one head in
/// sixteen hardly forgets.
pub(crate) fn fresh_a_log<B: Backend>(
    heads: usize,
    least: f64,
    device: &B::Device,
) -> Param<Tensor<B, 1>> {
    let a = Tensor::random([heads], Distribution::Uniform(least, 16.0), device);
    Param::from_tensor(a.clamp_min(LEAST_A).log())
}

/// The inverse softplus of step sizes that are log-uniform in 0.001 to 0.1.
pub(crate) fn fresh_dt_bias<B: Backend>(width: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
    let log_steps = Distribution::Uniform(0.001f64.ln(), 0.1f64.ln());
    Param::from_tensor(inverse_softplus(Tensor::random([width], log_steps, device).exp()))
}

/// ln(e^x - 1), as x + ln(1 - e^-x), which does not overflow.
pub(crate) fn inverse_softplus<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    x.clone() + (x.neg().exp().neg() + 1.0).log()
}
