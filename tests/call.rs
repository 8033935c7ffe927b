//! A call of a recurrence on a device, from the oracle's inputs. `examples/fuzz.rs` includes this file too.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use linattn::ops::{self, DeltaRule, LinearAttention, LinearAttentionBackend, LowRank, OpResult};
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
    /// Erase keys, or a.
    pub a: Option<Tensor<B, 4>>,
    pub b: Option<Tensor<B, 4>>,
    pub g: Option<ops::Decay<B>>,
    pub beta: Option<Tensor<B, 3>>,
    pub state: Option<Tensor<B, 4>>,
    pub read: ops::Read,
}

impl<B: Backend> Call<B> {
    /// The first type is that of q, k and v, the second that of the rest.
    pub fn new(x: &Inputs, [dtype, rest]: [DType; 2], device: &B::Device) -> Self {
        let Dims { batch, tokens, key_heads, heads, key_width, value_width } = x.dims;
        let gates = |values: &[f64]| upload::<B, 3>(values, [batch, tokens, heads], rest, device);
        let wide = [batch, tokens, heads, key_width];
        let rows = |values: &[f64]| upload::<B, 4>(values, wide, rest, device);
        let (a, b, beta) = match &x.transition {
            Transition::Identity => (None, None, None),
            Transition::Delta { beta, erase } => {
                (erase.as_deref().map(rows), None, Some(gates(beta)))
            }
            Transition::LowRank { a, b } => (Some(rows(a)), Some(rows(b)), None),
        };
        let keys = [batch, tokens, key_heads, key_width];
        let state = [batch, heads, key_width, value_width];
        Self {
            q: upload(&x.q, keys, dtype, device),
            k: upload(&x.k, keys, dtype, device),
            v: upload(&x.v, [batch, tokens, heads, value_width], dtype, device),
            a,
            b,
            g: x.decay.as_ref().map(|decay| match decay {
                Decay::Scalar(g) => gates(g).into(),
                Decay::Vector(g) => rows(g).into(),
            }),
            beta,
            state: x.state.as_ref().map(|values| upload(values, state, rest, device)),
            read: match x.read {
                Read::After => ops::Read::After,
                Read::Before => ops::Read::Before,
            },
        }
    }
}

impl<B: LinearAttentionBackend> Call<B> {
    /// Over the whole sequence.
    pub fn run(self) -> OpResult<B> {
        let Self { q, k, v, a, b, g, beta, state, read } = self;
        match (beta, a, b) {
            (Some(beta), erase, _) => {
                ops::delta_rule(DeltaRule { q, k, v, beta, erase, g, read }, state)
            }
            (None, Some(a), Some(b)) => ops::low_rank(LowRank { q, k, v, a, b, g }, state),
            _ => ops::linear_attention(LinearAttention { q, k, v, g, read }, state),
        }
    }

    /// Of a single token.
    pub fn step(self) -> OpResult<B> {
        let Self { q, k, v, a, b, g, beta, state, read } = self;
        match (beta, a, b) {
            (Some(beta), erase, _) => {
                ops::delta_rule_step(DeltaRule { q, k, v, beta, erase, g, read }, state)
            }
            (None, Some(a), Some(b)) => ops::low_rank_step(LowRank { q, k, v, a, b, g }, state),
            _ => ops::linear_attention_step(LinearAttention { q, k, v, g, read }, state),
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
            a: self.a.map(Tensor::require_grad),
            b: self.b.map(Tensor::require_grad),
            g: self.g.map(|g| match g {
                ops::Decay::Scalar(g) => g.require_grad().into(),
                ops::Decay::Vector(g) => g.require_grad().into(),
            }),
            beta: self.beta.map(Tensor::require_grad),
            state: self.state.map(Tensor::require_grad),
            read: self.read,
        }
    }
}
