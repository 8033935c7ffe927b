//! Forgetting attention (FoX): softmax attention whose scores decay by what the tokens in between say.
//! ```text
//! q, k, v = x W               [q, k of mean square 1 in each head]
//! f       = sigmoid(x W_f + b_f)                              a number for every head
//! scores  = q_i k_j^T / sqrt(K) + log f_{j+1} + .. + log f_i
//! y       = (softmax(scores + causal mask) v [* sigmoid(x W_g)]) W_o
//! ```
//! Positions need no other encoding. Source: arXiv 2503.02130.

use super::attention::{causal_mask, check_shared, weigh};
use super::{key_width, linear_flops};
use crate::nn::layers::{check_epsilon, linear, linear_with_bias, rms_normalize, split_heads};
use crate::nn::{ConfigError, Cost, Linear, RecurrentState, StateTensors};
use crate::ops::{self, Activation, LinearAttentionBackend};
use burn::module::Module;
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::log_sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Forgetting attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForgettingAttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`; as many by default.
    pub key_value_heads: Option<usize>,
    /// Width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Whether each head's queries and keys are normalised.
    pub qk_norm: bool,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root, where queries and keys are normalised.
    pub norm_eps: f64,
}

impl Default for ForgettingAttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            qk_norm: false,
            output_gate: false,
            norm_eps: 1e-5,
        }
    }
}

impl ForgettingAttentionConfig {
    /// Width of a head, and heads of keys and values.
    fn widths(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        check_epsilon(self.norm_eps)?;
        Ok((width, shared))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<ForgettingAttention<B>, ConfigError> {
        let (width, shared) = self.widths(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        let norm = |width| -> Option<RmsNorm<B>> {
            let config = RmsNormConfig::new(width).with_epsilon(self.norm_eps);
            self.qk_norm.then(|| config.init(device))
        };
        Ok(ForgettingAttention {
            q_proj: linear(d_model, queries, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, keys, device),
            f_proj: linear_with_bias(d_model, self.heads, device),
            g_proj: self.output_gate.then(|| linear(d_model, queries, device)),
            q_norm: norm(queries),
            k_norm: norm(keys),
            o_proj: linear(queries, d_model, device),
            heads: self.heads,
            key_value_heads: shared,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.widths(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence: scores and their sum over values.
        let look_back = 2 * 2 * queries as u64 * (length as u64).div_ceil(2);
        let gate = if self.output_gate { queries } else { 0 };
        Ok(Cost {
            state_bytes: 4 * ((2 * keys + self.heads) * length) as u64,
            flops_per_token: linear_flops(d_model, queries + 2 * keys + self.heads + gate)
                + linear_flops(queries, d_model)
                + look_back,
        })
    }
}

/// Every key and value so far, and how much of each is left: a state that grows with the sequence.
#[derive(Debug, Clone)]
pub struct ForgettingCache<B: Backend> {
    /// `[B, Hk, T, K]`.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
    /// The sum of log gates up to each token, less that up to the last: `[B, H, T]`, 0 at the end.
    pub gates: Tensor<B, 3>,
}

impl<B: Backend> RecurrentState<B> for ForgettingCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None)
            .with_growing("keys", &self.keys, 2)
            .with_growing("values", &self.values, 2)
            .with_growing("gates", &self.gates, 2)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self {
            keys: tensors.take("keys"),
            values: tensors.take("values"),
            gates: tensors.take("gates"),
        }
    }
}

/// Forgetting attention. `D -> D`.
#[derive(Module, Debug)]
pub struct ForgettingAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    f_proj: Linear<B>,
    g_proj: Option<Linear<B>>,
    q_norm: Option<RmsNorm<B>>,
    k_norm: Option<RmsNorm<B>>,
    o_proj: Linear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_value_heads: usize,
}

impl<B: LinearAttentionBackend> ForgettingAttention<B> {
    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the cache after token T.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<ForgettingCache<B>>,
    ) -> (Tensor<B, 3>, ForgettingCache<B>) {
        let project = |proj: &Linear<B>, norm: &Option<RmsNorm<B>>, heads| {
            let x = split_heads(proj.forward(x.clone()), heads);
            let x = match norm {
                Some(norm) => normalize_heads(norm, x),
                None => x,
            };
            x.swap_dims(1, 2)
        };
        let q = project(&self.q_proj, &self.q_norm, self.heads);
        let k = project(&self.k_proj, &self.k_norm, self.key_value_heads);
        let v = project(&self.v_proj, &None, self.key_value_heads);
        let gates = log_sigmoid(self.f_proj.forward(x.clone())).swap_dims(1, 2);
        let (keys, values, before) = match state {
            Some(before) => (
                Tensor::cat(vec![before.keys, k], 2),
                Tensor::cat(vec![before.values, v], 2),
                Some(before.gates),
            ),
            None => (k, v, None),
        };
        let (forgotten, gates) = forget(gates, before, self.key_value_heads);
        let bias = forgotten + causal_mask(&q, keys.dims()[2], None);
        let o = weigh(q, &keys, &values, bias);
        let o = match &self.g_proj {
            Some(gate) => ops::gate(o, gate.forward(x), Activation::Sigmoid),
            None => o,
        };
        let state = ForgettingCache { keys, values, gates };
        (self.o_proj.forward(o), state)
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the grown cache.
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<ForgettingCache<B>>,
    ) -> (Tensor<B, 2>, ForgettingCache<B>) {
        let (y, state) = self.forward(x.unsqueeze_dim(1), state);
        (y.squeeze_dim(1), state)
    }
}

/// From log gates, `[B, H, T]`, and a cache's `gates` before them: the sums of those behind each
/// key, `[B, Hk, H / Hk, T, S]`, 0 or more ahead of the query; and the cache's `gates`.
pub(super) fn forget<B: Backend>(
    log_gates: Tensor<B, 3>,
    before: Option<Tensor<B, 3>>,
    shared: usize,
) -> (Tensor<B, 5>, Tensor<B, 3>) {
    let [batch, heads, tokens] = log_gates.dims();
    // Counted from the last token before these.
    let gates = log_gates.cumsum(2);
    let all = match before {
        Some(before) => Tensor::cat(vec![before, gates.clone()], 2),
        None => gates.clone(),
    };
    let last = gates.clone().narrow(2, tokens - 1, 1);
    let forgotten = gates.unsqueeze_dim::<4>(3) - all.clone().unsqueeze_dim::<4>(2);
    let grouped = [batch, shared, heads / shared, tokens, all.dims()[2]];
    (forgotten.reshape(grouped), all - last)
}

/// RMSNorm over each head of `x`, `[B, T, H, K]`, with a weight for every channel of every head.
fn normalize_heads<B: LinearAttentionBackend>(norm: &RmsNorm<B>, x: Tensor<B, 4>) -> Tensor<B, 4> {
    let [_, _, heads, width] = x.dims();
    rms_normalize(x, norm.epsilon) * norm.gamma.val().reshape([1, 1, heads, width])
}
