//! From what a memory answers to a mixer's output: a norm of heads, a gate and a projection.
//! ```text
//! y = (rms_norm(o) [f(gate)]) W_o        f: SiLU or a sigmoid
//! ```

use super::layers::{GatedRmsNorm, ResidualLinear, merge_heads, split_heads};
use super::weight::Weight;
use crate::ops::{self, Activation, LinearAttentionBackend};
use burn::tensor::{Tensor, backend::Backend};

/// The layers behind a memory.
pub(crate) struct GatedOutput<'a, B: Backend> {
    /// Over each head's values.
    pub(crate) norm: &'a GatedRmsNorm<B>,
    /// Applied to the gate.
    pub(crate) activation: Activation,
    /// `H V -> D`.
    pub(crate) projection: &'a ResidualLinear<B>,
}

impl<'a, B: Backend> GatedOutput<'a, B> {
    /// With SiLU of the gate.
    pub(crate) fn silu(norm: &'a GatedRmsNorm<B>, projection: &'a ResidualLinear<B>) -> Self {
        Self { norm, activation: Activation::Silu, projection }
    }

    /// With a sigmoid of the gate.
    pub(crate) fn sigmoid(norm: &'a GatedRmsNorm<B>, projection: &'a ResidualLinear<B>) -> Self {
        Self { norm, activation: Activation::Sigmoid, projection }
    }
}

impl<B: LinearAttentionBackend> GatedOutput<'_, B> {
    /// Of answers, `[B, T, H, V]`, and a gate, `[B, T, H V]`, where there is one: `[B, T, D]`.
    pub(crate) fn forward(&self, o: Tensor<B, 4>, gate: Option<Tensor<B, 3>>) -> Tensor<B, 3> {
        if let Some(y) = self.folded(&o, gate.as_ref()) {
            return y;
        }
        let heads = o.dims()[2];
        let gate = gate.map(|gate| (self.activation, split_heads(gate, heads)));
        self.projection.forward(merge_heads(self.norm.gated(o, gate)))
    }

    /// All of it in one launch, for a token; nothing where a backend has no such product, or more operations are
    /// faster.
    fn folded(&self, o: &Tensor<B, 4>, gate: Option<&Tensor<B, 3>>) -> Option<Tensor<B, 3>> {
        // Of several tokens answers may lie apart, and would be copied for nothing.
        if o.dims()[1] > 1 {
            return None;
        }
        let matrices = Weight::side_by_side(&[self.projection.weight_alone()?])?;
        let gate = gate.map(|gate| (self.activation.into(), gate.clone()));
        let o = merge_heads(o.clone());
        let norm = self.norm.weight();
        let heads = o.dims()[2] / norm.0.dims()[0];
        ops::head_norm_linear(o, heads, gate, norm, matrices)
    }
}
