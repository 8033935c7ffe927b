//! Causal softmax attention with rotary positions: the reference that linear attention is held to.
//! ```text
//! q, k = rope(x W_q), rope(x W_k);  v = x W_v
//! y    = softmax(q k^T / sqrt(K) + causal mask) v W_o
//! ```
//! Source: Vaswani et al., arXiv 1706.03762; fewer key than query heads as in arXiv 2305.13245.

use super::retnet::{check_rotated, check_theta};
use super::{key_width, linear_flops};
use crate::nn::layers::{linear, merge_heads, split_heads};
use crate::nn::{ConfigError, Cost, Rope, positive};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::softmax;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Softmax attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`; as many by default.
    pub key_value_heads: Option<usize>,
    /// Width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Whether queries and keys are rotated by their position.
    pub rope: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
}

impl Default for AttentionConfig {
    fn default() -> Self {
        Self { heads: 1, key_value_heads: None, key_width: None, rope: true, rope_theta: 10_000.0 }
    }
}

impl AttentionConfig {
    /// Width of a head, and heads of keys and values.
    fn widths(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("heads", self.heads)?;
        let shared = positive("key_value_heads", self.key_value_heads.unwrap_or(self.heads))?;
        if !self.heads.is_multiple_of(shared) {
            let want = format!("a divisor of heads = {}", self.heads);
            return Err(ConfigError::new("key_value_heads", shared, want));
        }
        let width = key_width(self.key_width, d_model, self.heads)?;
        if self.rope {
            check_rotated("key_width", width)?;
            check_theta(self.rope_theta)?;
        }
        Ok((width, shared))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Attention<B>, ConfigError> {
        let (width, shared) = self.widths(d_model)?;
        Ok(Attention {
            q_proj: linear(d_model, self.heads * width, device),
            k_proj: linear(d_model, shared * width, device),
            v_proj: linear(d_model, shared * width, device),
            o_proj: linear(self.heads * width, d_model, device),
            heads: self.heads,
            key_value_heads: shared,
            rope: self.rope.then_some(Rope { theta: self.rope_theta }),
        })
    }

    /// What it costs in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.widths(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence: scores and their sum over values.
        let look_back = 2 * 2 * queries as u64 * (length as u64).div_ceil(2);
        Ok(Cost {
            state_bytes: 4 * 2 * (keys * length) as u64,
            flops_per_token: linear_flops(d_model, queries + 2 * keys)
                + linear_flops(queries, d_model)
                + look_back,
        })
    }
}

/// Every key and value so far: a state that grows with the sequence.
#[derive(Debug, Clone)]
pub struct KeyValueCache<B: Backend> {
    /// `[B, Hk, T, K]`, rotated.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
}

/// Softmax attention. `D -> D`.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    o_proj: Linear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_value_heads: usize,
    #[module(skip)]
    rope: Option<Rope>,
}

impl<B: Backend> Attention<B> {
    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the cache after token T.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let [batch, tokens, _] = x.dims();
        let offset = state.as_ref().map_or(0, |cache| cache.keys.dims()[2]);
        let rotated = |proj: &Linear<B>, heads| {
            let x = split_heads(proj.forward(x.clone()), heads);
            self.rope.map_or(x.clone(), |rope| rope.forward(x, offset)).swap_dims(1, 2)
        };
        let q = rotated(&self.q_proj, self.heads);
        let k = rotated(&self.k_proj, self.key_value_heads);
        let v = split_heads(self.v_proj.forward(x), self.key_value_heads).swap_dims(1, 2);
        let cache = match state {
            Some(before) => KeyValueCache {
                keys: Tensor::cat(vec![before.keys, k], 2),
                values: Tensor::cat(vec![before.values, v], 2),
            },
            None => KeyValueCache { keys: k, values: v },
        };

        let width = q.dims()[3];
        let group = self.heads / self.key_value_heads;
        let q = (q * (width as f64).powf(-0.5)).reshape([
            batch,
            self.key_value_heads,
            group,
            tokens,
            width,
        ]);
        let shared = |x: &Tensor<B, 4>| x.clone().unsqueeze_dim::<5>(2);
        let scores = q.matmul(shared(&cache.keys).transpose());
        let scores = scores.clone() + causal_mask(&scores, offset);
        let o = softmax(scores, 4).matmul(shared(&cache.values));
        let o = o.reshape([batch, self.heads, tokens, width]).swap_dims(1, 2);
        (self.o_proj.forward(merge_heads(o)), cache)
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the grown cache.
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 2>, KeyValueCache<B>) {
        let (y, state) = self.forward(x.unsqueeze_dim(1), state);
        (y.squeeze_dim(1), state)
    }
}

/// Zero where query i, at position `offset` + i, may see key j, and very negative where not.
fn causal_mask<B: Backend>(scores: &Tensor<B, 5>, offset: usize) -> Tensor<B, 5> {
    let [.., queries, keys] = scores.dims();
    let mask: Vec<f32> = (0..queries * keys)
        .map(|x| if x % keys <= offset + x / keys { 0.0 } else { -1e9 })
        .collect();
    let data = TensorData::new(mask, [1, 1, 1, queries, keys]);
    Tensor::from_data(data, (&scores.device(), scores.dtype()))
}
