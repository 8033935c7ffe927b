//! A call of a recurrence on a device, from the oracle's inputs. `examples/fuzz` includes this file too.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use linattn::ops::{
    self, DeltaRuleInputs, LinearAttentionBackend, LinearAttentionInputs, LowRankInputs, OpResult,
    SequenceLengths,
};
use linattn_oracle::{Decay, Dims, Inputs, Read, Transition};

/// A tensor of the oracle's numbers.
pub fn upload<B: Backend, const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, D> {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The numbers of a tensor.
pub fn download<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Inputs on a device.
#[derive(Debug, Clone)]
pub struct Call<B: Backend> {
    pub q: Tensor<B, 4>,
    pub k: Tensor<B, 4>,
    pub v: Tensor<B, 4>,
    pub g: Option<ops::Decay<B>>,
    pub rule: Rule<B>,
    pub state: Option<Tensor<B, 4>>,
}

/// The operation of a call, with the tensors that others do not have.
#[derive(Debug, Clone)]
pub enum Rule<B: Backend> {
    LinearAttention { read: ops::Read },
    Delta { beta: Tensor<B, 3>, erase: Option<Tensor<B, 4>>, read: ops::Read },
    LowRank { a: Tensor<B, 4>, b: Tensor<B, 4> },
}

impl<B: Backend> Call<B> {
    /// The first type is that of q, k and v, the second that of the rest.
    pub fn new(x: &Inputs, [dtype, rest]: [DType; 2], device: &B::Device) -> Self {
        let Dims { batch, tokens, key_heads, heads, key_width, value_width } = x.dims;
        let scalars = |values: &[f64]| upload::<B, 3>(values, [batch, tokens, heads], rest, device);
        let wide = [batch, tokens, heads, key_width];
        let rows = |values: &[f64]| upload::<B, 4>(values, wide, rest, device);
        let keys = [batch, tokens, key_heads, key_width];
        let state = |values: &[f64]| {
            // Of sequences in one row there are more than rows.
            let sequences = values.len() / (heads * key_width * value_width);
            upload(values, [sequences, heads, key_width, value_width], rest, device)
        };
        let read = match x.read {
            Read::After => ops::Read::After,
            Read::Before => ops::Read::Before,
        };
        Self {
            q: upload(&x.q, keys, dtype, device),
            k: upload(&x.k, keys, dtype, device),
            v: upload(&x.v, [batch, tokens, heads, value_width], dtype, device),
            g: x.decay.as_ref().map(|decay| match decay {
                Decay::Scalar(g) => scalars(g).into(),
                Decay::Vector(g) => rows(g).into(),
            }),
            rule: match &x.transition {
                Transition::Identity => Rule::LinearAttention { read },
                Transition::Delta { beta, erase } => {
                    Rule::Delta { beta: scalars(beta), erase: erase.as_deref().map(rows), read }
                }
                Transition::LowRank { a, b } => Rule::LowRank { a: rows(a), b: rows(b) },
            },
            state: x.state.as_deref().map(state),
        }
    }

    /// The share of the error that a delta rule corrects.
    pub fn beta(&self) -> Option<&Tensor<B, 3>> {
        match &self.rule {
            Rule::Delta { beta, .. } => Some(beta),
            Rule::LinearAttention { .. } | Rule::LowRank { .. } => None,
        }
    }

    /// The erase keys of a delta rule, a and b of a low rank transition.
    pub fn rows(&self) -> [Option<&Tensor<B, 4>>; 3] {
        match &self.rule {
            Rule::LinearAttention { .. } => [None; 3],
            Rule::Delta { erase, .. } => [erase.as_ref(), None, None],
            Rule::LowRank { a, b } => [None, Some(a), Some(b)],
        }
    }
}

impl<B: LinearAttentionBackend> Call<B> {
    /// Over the whole sequence.
    pub fn run(self) -> OpResult<B> {
        self.run_sequences(None)
    }

    /// Over whole sequences: a batch of one length, or one row of several.
    pub fn run_sequences(self, lengths: Option<&SequenceLengths>) -> OpResult<B> {
        let Self { q, k, v, g, rule, state } = self;
        match rule {
            Rule::LinearAttention { read } => {
                let x = LinearAttentionInputs { q, k, v, g, read };
                match lengths {
                    Some(lengths) => ops::linear_attention_varlen(x, lengths, state),
                    None => ops::linear_attention(x, state),
                }
            }
            Rule::Delta { beta, erase, read } => {
                let x = DeltaRuleInputs { q, k, v, beta, erase, g, read };
                match lengths {
                    Some(lengths) => ops::delta_rule_varlen(x, lengths, state),
                    None => ops::delta_rule(x, state),
                }
            }
            Rule::LowRank { a, b } => {
                let x = LowRankInputs { q, k, v, a, b, g };
                match lengths {
                    Some(lengths) => ops::low_rank_varlen(x, lengths, state),
                    None => ops::low_rank(x, state),
                }
            }
        }
    }

    /// Of a single token.
    pub fn step(self) -> OpResult<B> {
        let Self { q, k, v, g, rule, state } = self;
        match rule {
            Rule::LinearAttention { read } => {
                ops::linear_attention_step(LinearAttentionInputs { q, k, v, g, read }, state)
            }
            Rule::Delta { beta, erase, read } => {
                ops::delta_rule_step(DeltaRuleInputs { q, k, v, beta, erase, g, read }, state)
            }
            Rule::LowRank { a, b } => ops::low_rank_step(LowRankInputs { q, k, v, a, b, g }, state),
        }
    }
}

impl<B: AutodiffBackend> Call<B> {
    /// With a gradient of every input.
    pub fn require_grad(self) -> Self {
        Self {
            q: self.q.require_grad(),
            k: self.k.require_grad(),
            v: self.v.require_grad(),
            g: self.g.map(|g| match g {
                ops::Decay::Scalar(g) => g.require_grad().into(),
                ops::Decay::Vector(g) => g.require_grad().into(),
            }),
            rule: match self.rule {
                Rule::LinearAttention { read } => Rule::LinearAttention { read },
                Rule::Delta { beta, erase, read } => {
                    let erase = erase.map(Tensor::require_grad);
                    Rule::Delta { beta: beta.require_grad(), erase, read }
                }
                Rule::LowRank { a, b } => {
                    Rule::LowRank { a: a.require_grad(), b: b.require_grad() }
                }
            },
            state: self.state.map(Tensor::require_grad),
        }
    }
}
