//! DeltaFormer. Recurrence, shapes and source: [`DeltaFormer`].

use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, key_width, linear_flops};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{ResidualLinear, check_epsilon, linear};
use crate::nn::score_bias::pairs;
use crate::nn::softmax::{
    KeyValueCache, check_shared, head_norm, in_pieces, scores, turned, weigh,
};
use crate::nn::{ConfigError, Cost, DEFAULT_CHUNK, Linear, Rope, Shared, check_chunk};
use crate::ops::{LinearAttentionBackend, Seen, accumulator, cat, solve_unit_lower, typed};
use burn::module::Module;
use burn::nn::RmsNorm;
use burn::tensor::activation::softmax;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`DeltaFormer`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaFormerConfig {
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
    /// Whether each head's queries and keys are normalised.
    pub qk_norm: bool,
    /// Added to a mean square before its root, where queries and keys are normalised.
    pub norm_eps: f64,
    /// Tokens that are solved for together. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for DeltaFormerConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            rope: true,
            rope_theta: 10_000.0,
            qk_norm: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl DeltaFormerConfig {
    /// Width of a head, and heads of keys and values.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if self.rope {
            check_rotated("key_width", width)?;
            check_theta(self.rope_theta)?;
        }
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        Ok((width, shared))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<DeltaFormer<B>, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let norm = || head_norm(self.qk_norm, width, self.norm_eps, device);
        Ok(DeltaFormer {
            q_proj: linear(d_model, self.heads * width, device),
            k_proj: linear(d_model, shared * width, device),
            v_proj: linear(d_model, shared * width, device),
            q_norm: norm(),
            k_norm: norm(),
            o_proj: linear(self.heads * width, d_model, device).into(),
            heads: self.heads,
            key_value_heads: shared,
            rope: self.rope.then_some(Rope::whole(self.rope_theta)),
            chunk: self.chunk,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence, once to read and once to write.
        let look_back = 2 * 2 * (queries + keys) as u64 * length.div_ceil(2) as u64;
        Ok(Cost {
            state_bytes: 4 * 2 * (keys * length) as u64,
            flops_per_token: linear_flops(d_model, queries + 2 * keys)
                + linear_flops(queries, d_model)
                + look_back,
        })
    }
}

/// DeltaFormer: softmax attention over values less those that their keys recalled already.
///
/// # Recurrence
/// ```text
/// q, k = rope(x W_q), rope(x W_k);  v = x W_v
/// u_i  = v_i - sum_{j<i} p_ij u_j       p_i = softmax over j < i of k_i k_j^T / sqrt(K)
/// y    = softmax(q k^T / sqrt(K) + causal mask) u W_o
/// ```
/// ```text
/// x_t, position ──> q, k, v
///            ┌─ erase ───────────────────┐   ┌─ write ───────┐
/// keys, u ──>│ u_t = v - sum of p_tj u_j │──>│ append k, u_t │──┬──> keys, u
///            └───────────────────────────┘   └───────────────┘  │
///                            ┌─ read ────────────────────────┐  │
///             y_t <── W_o <──│ softmax(q keys^T / sqrt(K)) u │<─┘
///                            └───────────────────────────────┘
/// ```
/// That is `u = (I + P)^-1 v`, P strictly lower triangular: the delta rule with the kernel of softmax
/// attention in place of the product of keys. The inverse is taken block by block, `chunk` tokens each; the
/// first token has nothing to recall.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`KeyValueCache`]: `keys`, `[B, Hk, T, K]`, rotated;
/// `values`, u, `[B, Hk, T, K]`; `position`, tokens seen. It grows with T. Both are f32. p is a share of a
/// value that is recalled, 0 to 1.
/// # Errors
/// [`DeltaFormerConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `key_value_heads` that do not divide `heads`,
/// an odd `key_width` that is rotated, a `rope_theta` below 1, a `norm_eps` below 1e-37 or a `chunk` that is
/// no power of 2 up to 128.
/// # Source
/// arXiv 2505.19488.
/// # Departures
/// flash-linear-attention's layer looks for the recalled values with the query instead of the key, and
/// multiplies them by a number for every token and head, x W_b + b.
#[derive(Module, Debug)]
pub struct DeltaFormer<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_norm: Option<RmsNorm<B>>,
    k_norm: Option<RmsNorm<B>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_value_heads: usize,
    #[module(skip)]
    rope: Option<Rope>,
    #[module(skip)]
    chunk: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for DeltaFormer<B> {
    type State = KeyValueCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<KeyValueCache<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let (tokens, dtype) = (x.dims()[1], x.dtype());
        let position = state.as_ref().map_or(0, |cache| cache.position);
        let rotation = self.rope.map(|rope| (rope, position));
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let heads = [self.heads, self.key_value_heads, self.key_value_heads];
        let (Qkv { q, k, v }, []) =
            ConvQkv::plain(projections, heads).project(&x, [], &mut ConvPast::none());
        // Values are solved for in f32 at least.
        let q = accumulator(turned(q, &self.q_norm, rotation));
        let k = accumulator(turned(k, &self.k_norm, rotation));
        let v = accumulator(v.swap_dims(1, 2));
        let (o, cache) = in_pieces(tokens, self.chunk, state, |(from, size), before| {
            let part = |x: &Tensor<B, 4>| x.clone().narrow(2, from, size);
            attend(part(&q), part(&k), part(&v), before)
        });
        (self.o_proj.forward(typed(o, dtype)), cache)
    }
}

/// One piece of a sequence: `q` is `[B, H, C, K]`, `k` and `v` `[B, Hk, C, K]`. Gives
/// `[B, C, H K]`.
fn attend<B: LinearAttentionBackend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    before: Option<KeyValueCache<B>>,
) -> (Tensor<B, 3>, KeyValueCache<B>) {
    let size = k.dims()[2];
    let (keys, known) = match &before {
        Some(cache) => (cat(vec![cache.keys.clone(), k.clone()], 2), cache.keys.dims()[2]),
        None => (k.clone(), 0),
    };
    let shares = recall(&k, &keys);
    let v = match &before {
        Some(cache) => v - shares.clone().narrow(3, 0, known).matmul(cache.values.clone()),
        None => v,
    };
    let u = solve_unit_lower(shares.narrow(3, known, size), v);
    let cache = KeyValueCache::after(before, k, u);
    let o = weigh(q, [&cache.keys, &cache.values], None, Seen::Causal { window: None });
    (o, cache)
}

/// The shares in which `k`, the last of `keys`, recall what came before them, `[B, Hk, C, S]`.
fn recall<B: LinearAttentionBackend>(k: &Tensor<B, 4>, keys: &Tensor<B, 4>) -> Tensor<B, 4> {
    let ([batch, heads, size, width], seen) = (k.dims(), keys.dims()[2]);
    let scores = scores(k.clone() * (width as f64).powf(-0.5), keys);
    let earlier = pairs(k, seen, |back| if back > 0 { 1.0 } else { 0.0 });
    let hidden = (earlier.clone() - 1.0) * 1e9;
    // The product empties the row of the first token, where everything is hidden.
    let shares = softmax(scores + hidden, 4) * earlier;
    shares.reshape([batch, heads, size, seen])
}
