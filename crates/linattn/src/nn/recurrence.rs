//! The operations as layers call them: a single token by the recurrence, several by chunks, sequences of
//! different lengths in one row where there are lengths.

use crate::ops::{
    self, DeltaRuleInputs, KalmanInputs, LinearAttentionBackend, LinearAttentionInputs,
    LowRankInputs, MesaInputs, OpResult, SequenceLengths,
};
use burn::tensor::{Tensor, backend::Backend};

/// Outputs, `[B, T, H, V]`, and the memory after the last token.
type Outputs<B> = (Tensor<B, 4>, Tensor<B, 4>);

/// [`ops::linear_attention`], or its step, or [`ops::linear_attention_varlen`].
pub(crate) fn linear_attention<B: LinearAttentionBackend>(
    x: LinearAttentionInputs<B>,
    memory: Option<Tensor<B, 4>>,
    lengths: Option<&SequenceLengths>,
) -> Outputs<B> {
    made(match lengths {
        _ if is_step(&x.q) => ops::linear_attention_step(x, memory),
        Some(lengths) => ops::linear_attention_varlen(x, lengths, memory),
        None => ops::linear_attention(x, memory),
    })
}

/// [`ops::delta_rule`], or its step, or [`ops::delta_rule_varlen`].
pub(crate) fn delta_rule<B: LinearAttentionBackend>(
    x: DeltaRuleInputs<B>,
    memory: Option<Tensor<B, 4>>,
    lengths: Option<&SequenceLengths>,
) -> Outputs<B> {
    made(match lengths {
        _ if is_step(&x.q) => ops::delta_rule_step(x, memory),
        Some(lengths) => ops::delta_rule_varlen(x, lengths, memory),
        None => ops::delta_rule(x, memory),
    })
}

/// [`ops::low_rank`], or its step, or [`ops::low_rank_varlen`].
pub(crate) fn low_rank<B: LinearAttentionBackend>(
    x: LowRankInputs<B>,
    memory: Option<Tensor<B, 4>>,
    lengths: Option<&SequenceLengths>,
) -> Outputs<B> {
    made(match lengths {
        _ if is_step(&x.q) => ops::low_rank_step(x, memory),
        Some(lengths) => ops::low_rank_varlen(x, lengths, memory),
        None => ops::low_rank(x, memory),
    })
}

/// [`ops::mesa`], or its step.
pub(crate) fn mesa<B: LinearAttentionBackend>(
    x: MesaInputs<B>,
    memory: Option<Tensor<B, 4>>,
) -> Outputs<B> {
    made(match is_step(&x.q) {
        true => ops::mesa_step(x, memory),
        false => ops::mesa(x, memory),
    })
}

/// [`ops::gated_kalman`], or its step.
pub(crate) fn gated_kalman<B: LinearAttentionBackend>(
    x: KalmanInputs<B>,
    memory: Option<Tensor<B, 4>>,
) -> Outputs<B> {
    made(match is_step(&x.q) {
        true => ops::gated_kalman_step(x, memory),
        false => ops::gated_kalman(x, memory),
    })
}

fn is_step<B: Backend>(q: &Tensor<B, 4>) -> bool {
    q.dims()[1] == 1
}

fn made<B: Backend>(result: OpResult<B>) -> Outputs<B> {
    result.expect("the projections made the shapes")
}
