//! Causal softmax attention with rotary positions: the reference that linear attention is held to.
//! ```text
//! q, k = rope(x W_q), rope(x W_k);  v = x W_v
//! y    = softmax(q k^T / sqrt(K) - slope (i - j) + causal mask) v W_o      the slope where asked for
//! ```
//! Source: Vaswani et al., arXiv 1706.03762; fewer key than query heads as in arXiv 2305.13245, a
//! window as in arXiv 2004.05150, slopes (ALiBi) as in arXiv 2108.12409.

use super::retnet::{check_rotated, check_theta};
use super::{key_width, linear_flops};
use crate::nn::layers::{linear, merge_heads, split_heads};
use crate::nn::{ConfigError, Cost, RecurrentState, Rope, StateTensors, positive};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::softmax;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Tokens of a windowed sequence that are worked off together, at least.
const PIECE: usize = 128;

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
    /// Tokens that a query sees, itself and those just before it, at least 2; all by default. The
    /// state then stops growing.
    pub window: Option<usize>,
    /// Whether scores fall with the distance, at a fixed rate for each head; in place of rotation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
}

impl Default for AttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            rope: true,
            rope_theta: 10_000.0,
            window: None,
            alibi: false,
        }
    }
}

/// Heads of keys and values: as given, or as many as there are of queries.
pub(super) fn check_shared(heads: usize, shared: Option<usize>) -> Result<usize, ConfigError> {
    positive("heads", heads)?;
    let shared = positive("key_value_heads", shared.unwrap_or(heads))?;
    if heads.is_multiple_of(shared) {
        return Ok(shared);
    }
    let want = format!("a divisor of heads = {heads}");
    Err(ConfigError::new("key_value_heads", shared, want))
}

impl AttentionConfig {
    /// Width of a head, and heads of keys and values.
    fn widths(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if self.rope {
            check_rotated("key_width", width)?;
            check_theta(self.rope_theta)?;
        }
        if self.rope && self.alibi {
            return Err(ConfigError::new("rope", true, "false where `alibi` is true"));
        }
        match self.window {
            Some(window) if window < 2 => Err(ConfigError::new("window", window, "at least 2")),
            window => {
                positive("window", window.unwrap_or(1))?;
                Ok((width, shared))
            }
        }
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
            window: self.window,
            alibi: self.alibi,
        })
    }

    /// What it costs in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.widths(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence: scores and their sum over values.
        let seen = self.window.unwrap_or(length).min(length.div_ceil(2));
        let look_back = 2 * 2 * queries as u64 * seen as u64;
        let kept = self.window.map_or(length, |window| length.min(window - 1));
        Ok(Cost {
            state_bytes: 4 * 2 * (keys * kept) as u64,
            flops_per_token: linear_flops(d_model, queries + 2 * keys)
                + linear_flops(queries, d_model)
                + look_back,
        })
    }
}

/// Every key and value that a later token may see: a state that grows with the sequence, unless
/// there is a window.
#[derive(Debug, Clone)]
pub struct KeyValueCache<B: Backend> {
    /// `[B, Hk, T, K]`, rotated. With a window, the last of them, one less than it has tokens.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
    /// Tokens seen.
    pub position: usize,
}

impl<B: Backend> RecurrentState<B> for KeyValueCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position)).with_growing("keys", &self.keys, 2).with_growing(
            "values",
            &self.values,
            2,
        )
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self { keys: tensors.take("keys"), values: tensors.take("values"), position }
    }
}

impl<B: Backend> KeyValueCache<B> {
    /// `before`, and then these.
    fn after(before: Option<Self>, keys: Tensor<B, 4>, values: Tensor<B, 4>) -> Self {
        let tokens = keys.dims()[2];
        match before {
            Some(before) => Self {
                keys: Tensor::cat(vec![before.keys, keys], 2),
                values: Tensor::cat(vec![before.values, values], 2),
                position: before.position + tokens,
            },
            None => Self { keys, values, position: tokens },
        }
    }

    /// What the tokens after these see through `window`.
    fn within(self, window: Option<usize>) -> Self {
        let tokens = self.keys.dims()[2];
        match window {
            Some(window) if tokens >= window => {
                let last = |x: Tensor<B, 4>| x.narrow(2, tokens + 1 - window, window - 1);
                Self { keys: last(self.keys), values: last(self.values), ..self }
            }
            _ => self,
        }
    }
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
    #[module(skip)]
    window: Option<usize>,
    #[module(skip)]
    alibi: bool,
}

impl<B: Backend> Attention<B> {
    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the cache after token T.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let tokens = x.dims()[1];
        let position = state.as_ref().map_or(0, |cache| cache.position);
        let rotated = |proj: &Linear<B>, heads| {
            let x = split_heads(proj.forward(x.clone()), heads);
            self.rope.map_or(x.clone(), |rope| rope.forward(x, position)).swap_dims(1, 2)
        };
        let q = rotated(&self.q_proj, self.heads);
        let k = rotated(&self.k_proj, self.key_value_heads);
        let v = split_heads(self.v_proj.forward(x), self.key_value_heads).swap_dims(1, 2);

        // Through a window, a long sequence is seen piece by piece: the scores outside are not formed.
        let piece = self.window.map_or(tokens, |window| window.max(PIECE)).min(tokens);
        let (first, mut cache) = self.attend(&q, &k, &v, (0, piece), state);
        let mut outputs = vec![first];
        for from in (piece..tokens).step_by(piece) {
            let part = (from, piece.min(tokens - from));
            let (o, next) = self.attend(&q, &k, &v, part, Some(cache));
            outputs.push(o);
            cache = next;
        }
        let o = Tensor::cat(outputs, 1);
        (self.o_proj.forward(o), cache)
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next cache.
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 2>, KeyValueCache<B>) {
        let (y, state) = self.forward(x.unsqueeze_dim(1), state);
        (y.squeeze_dim(1), state)
    }

    /// The tokens of a part, `(first, how many)`, and what of the cache is left after them.
    fn attend(
        &self,
        q: &Tensor<B, 4>,
        k: &Tensor<B, 4>,
        v: &Tensor<B, 4>,
        (from, tokens): (usize, usize),
        before: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(2, from, tokens);
        let q = part(q);
        let cache = KeyValueCache::after(before, part(k), part(v));
        let keys = cache.keys.dims()[2];
        let hidden = causal_mask(&q, keys, self.window);
        let bias = match self.alibi {
            true => hidden - distances(&q, keys) * slopes(&q, self.key_value_heads),
            false => hidden,
        };
        let o = weigh(q, &cache.keys, &cache.values, bias);
        (o, cache.within(self.window))
    }
}

/// Softmax attention of `q`, `[B, H, T, K]`, over keys and values, `[B, Hk, S, K]`, where `bias`,
/// `[.., .., .., T, S]`, is added to the scores of each group of heads. Gives `[B, T, H K]`.
pub(super) fn weigh<B: Backend>(
    q: Tensor<B, 4>,
    keys: &Tensor<B, 4>,
    values: &Tensor<B, 4>,
    bias: Tensor<B, 5>,
) -> Tensor<B, 3> {
    let [batch, heads, tokens, width] = q.dims();
    let shared = keys.dims()[1];
    let q = (q * (width as f64).powf(-0.5)).reshape([batch, shared, heads / shared, tokens, width]);
    let grouped = |x: &Tensor<B, 4>| x.clone().unsqueeze_dim::<5>(2);
    let scores = q.matmul(grouped(keys).transpose()) + bias;
    let o = softmax(scores, 4).matmul(grouped(values));
    merge_heads(o.reshape([batch, heads, tokens, width]).swap_dims(1, 2))
}

/// A number for each query of `q`, the last of as many tokens as there are keys, and each key; given
/// how many tokens the key lies back (the key's own lead, if it is ahead). `[1, 1, 1, T, S]`.
fn for_each_pair<B: Backend>(
    q: &Tensor<B, 4>,
    keys: usize,
    f: impl Fn(isize) -> f32,
) -> Tensor<B, 5> {
    let queries = q.dims()[2];
    let first = (keys - queries) as isize;
    let values: Vec<f32> =
        (0..queries * keys).map(|x| f(first + (x / keys) as isize - (x % keys) as isize)).collect();
    let data = TensorData::new(values, [1, 1, 1, queries, keys]);
    Tensor::from_data(data, (&q.device(), q.dtype()))
}

/// Zero where a query may see a key, and very negative where not.
pub(super) fn causal_mask<B: Backend>(
    q: &Tensor<B, 4>,
    keys: usize,
    window: Option<usize>,
) -> Tensor<B, 5> {
    let reach = window.unwrap_or(keys) as isize;
    for_each_pair(q, keys, |back| if (0..reach).contains(&back) { 0.0 } else { -1e9 })
}

/// How far each key lies back.
fn distances<B: Backend>(q: &Tensor<B, 4>, keys: usize) -> Tensor<B, 5> {
    for_each_pair(q, keys, |back| back.max(0) as f32)
}

/// How fast the scores of each head of `q` fall, `[1, Hk, H / Hk, 1, 1]`: a geometric series from
/// 2^(-8 / H) to 2^-8, filled up from that of twice as many heads where H is no power of two.
fn slopes<B: Backend>(q: &Tensor<B, 4>, shared: usize) -> Tensor<B, 5> {
    let heads = q.dims()[1];
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let series = |count: usize| (1..=count).map(move |h| (-8.0 * h as f64 / count as f64).exp2());
    let values: Vec<f32> = series(whole)
        .chain(series(2 * whole).step_by(2))
        .take(heads)
        .map(|slope| slope as f32)
        .collect();
    let data = TensorData::new(values, [1, shared, heads / shared, 1, 1]);
    Tensor::from_data(data, (&q.device(), q.dtype()))
}
