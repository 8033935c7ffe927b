//! Causal softmax attention with rotary positions: the reference that linear attention is held to.
//! ```text
//! q, k = rope(x W_q), rope(x W_k);  v = x W_v      biases, Canon layers and norms before rope, where asked for
//! o    = softmax(q k^T / sqrt(K) + b_ij + causal mask) v               b, of positions, and dropout where asked for
//! y    = (o * sigmoid(x W_g)) W_o                                      gate and bias where asked for
//! ```
//! b is slopes (ALiBi), a strided pattern (Sparse Transformer), contextual positions (CoPE): see `score_bias.rs`.
//! Source: Vaswani et al., arXiv 1706.03762; fewer key than query heads as in arXiv 2305.13245, a
//! window as in arXiv 2004.05150, the gate as in arXiv 2505.06708.

use super::retnet::{check_rotated, check_theta};
use super::score_bias::{ContextualPositions, fall, strided_mask};
pub(super) use super::score_bias::{causal_mask, pairs};
use super::{TokenMixer, key_width, linear_flops};
use crate::nn::canon::{CanonQkv, check_canon};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{Tails, convolution_cost};
use crate::nn::layers::{
    Norm, NormKind, ResidualLinear, check_epsilon, linear, linear_with_bias, merge_heads, rms_norm,
    split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::{
    ConfigError, Cost, Linear, RecurrentState, Rope, Shared, StateTensors, is_default, positive,
};
use crate::ops::{self, Activation, LinearAttentionBackend, accumulator, typed};
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Tensor, backend::Backend};
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
    /// Channels of a head that are rotated, the first ones, an even number; all by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_width: Option<usize>,
    /// Tokens that a query sees, itself and those just before it, at least 2; all by default. The
    /// state then stops growing.
    pub window: Option<usize>,
    /// Whether scores fall with the distance, at a fixed rate for each head; in place of rotation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
    /// Tokens s such that a query sees itself and those just before it, s in all, and every s-th
    /// before them, at least 2; in place of a window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Contextual positions that there are, 0 among them, at least 2; in place of rotation and slopes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cope: Option<usize>,
    /// Whether queries and keys are normalised, before rotation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qk_norm: bool,
    /// The norm of queries and keys.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm_kind: NormKind,
    /// Channels that such a norm takes together.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm_span: QkNormSpan,
    /// Added to a mean square before its root, where queries and keys are normalised.
    #[serde(skip_serializing_if = "is_usual")]
    pub norm_eps: f64,
    /// Whether queries, keys and values have a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qkv_bias: bool,
    /// Whether the answers of the heads are multiplied by the sigmoid of a projection, before the last one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_gate: bool,
    /// Whether the output has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_bias: bool,
    /// Share of the weights of keys that training sets to zero.
    #[serde(skip_serializing_if = "is_default")]
    pub dropout: f64,
    /// Tokens that Canon layers of queries, keys and values see, at least 2; 0 for none.
    #[serde(skip_serializing_if = "is_default")]
    pub canon: usize,
}

/// Channels of queries and keys that are normalised together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNormSpan {
    /// Those of a head; the heads share their weights.
    #[default]
    Head,
    /// Those of all heads, with a weight for each.
    Projection,
}

const USUAL_EPSILON: f64 = 1e-5;

fn is_usual(epsilon: &f64) -> bool {
    *epsilon == USUAL_EPSILON
}

impl Default for AttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            rope: true,
            rope_theta: 10_000.0,
            rope_width: None,
            window: None,
            alibi: false,
            stride: None,
            cope: None,
            qk_norm: false,
            qk_norm_kind: NormKind::Rms,
            qk_norm_span: QkNormSpan::Head,
            norm_eps: USUAL_EPSILON,
            qkv_bias: false,
            output_gate: false,
            output_bias: false,
            dropout: 0.0,
            canon: 0,
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
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        self.check_rope(width)?;
        check_canon("canon", self.canon)?;
        check_epsilon(self.norm_eps)?;
        let normed = self.qk_norm_kind != NormKind::Rms || self.qk_norm_span != QkNormSpan::Head;
        if normed && !self.qk_norm {
            let want = "true where `qk_norm_kind` or `qk_norm_span` is given";
            return Err(ConfigError::new("qk_norm", false, want));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ConfigError::new("dropout", self.dropout, "at least 0 and below 1"));
        }
        self.check_seen()?;
        Ok((width, shared))
    }

    /// Checks what bears on which keys a query sees, and how it tells where they stand.
    fn check_seen(&self) -> Result<(), ConfigError> {
        for (key, value) in [("window", self.window), ("stride", self.stride), ("cope", self.cope)]
        {
            match value {
                Some(value) if value < 2 => Err(ConfigError::new(key, value, "at least 2")),
                value => positive(key, value.unwrap_or(1)),
            }?;
        }
        let refused = |key, want| Err(ConfigError::new(key, true, want));
        match (self.cope, self.stride.and(self.window)) {
            _ if self.rope && self.alibi => refused("rope", "false where `alibi` is true"),
            (Some(_), _) if self.rope => refused("rope", "false where `cope` is given"),
            (Some(_), _) if self.alibi => refused("alibi", "false where `cope` is given"),
            (_, Some(window)) => {
                Err(ConfigError::new("window", window, "left out where `stride` is given"))
            }
            _ => Ok(()),
        }
    }

    /// Checks the keys of the rotation, for heads of `width` channels.
    fn check_rope(&self, width: usize) -> Result<(), ConfigError> {
        match self.rope_width {
            Some(part) if !self.rope => {
                Err(ConfigError::new("rope_width", part, "left out, unless `rope` is true"))
            }
            Some(part) if part == 0 || part > width => {
                let want = format!("from 2 to {width}, the width of a head");
                Err(ConfigError::new("rope_width", part, want))
            }
            Some(part) => check_rotated("rope_width", part),
            None if self.rope => check_rotated("key_width", width),
            None => Ok(()),
        }?;
        if self.rope { check_theta(self.rope_theta) } else { Ok(()) }
    }

    fn rotation(&self) -> Option<Rope> {
        self.rope.then_some(Rope { theta: self.rope_theta, width: self.rope_width })
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Attention<B>, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let biased = |bias, from, to| match bias {
            true => linear_with_bias(from, to, device),
            false => linear(from, to, device),
        };
        let project = |to| biased(self.qkv_bias, d_model, to);
        let norm = |heads: usize| {
            let together = match self.qk_norm_span {
                QkNormSpan::Head => width,
                QkNormSpan::Projection => heads * width,
            };
            self.qk_norm.then(|| Norm::new(self.qk_norm_kind, together, self.norm_eps, device))
        };
        Ok(Attention {
            q_proj: project(self.heads * width),
            k_proj: project(shared * width),
            v_proj: project(shared * width),
            q_norm: norm(self.heads),
            k_norm: norm(shared),
            g_proj: self.output_gate.then(|| linear(d_model, self.heads * width, device)),
            o_proj: biased(self.output_bias, self.heads * width, d_model).into(),
            dropout: DropoutConfig::new(self.dropout).init(),
            canon: CanonQkv::optional(
                self.canon,
                [self.heads * width, shared * width, shared * width],
                device,
            ),
            heads: self.heads,
            key_value_heads: shared,
            rope: self.rotation(),
            window: self.window,
            alibi: self.alibi,
            stride: self.stride,
            cope: self.cope.map(|count| ContextualPositions::new(count, width, device)),
            norm_span: self.qk_norm_span,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence: scores and their sum over values.
        let seen = self.window.unwrap_or(length).min(length.div_ceil(2));
        let positions = self.cope.unwrap_or(0);
        let look_back = 2 * 2 * queries as u64 * seen as u64 + 2 * (queries * positions) as u64;
        let kept = self.window.map_or(length, |window| length.min(window - 1));
        let gate = if self.output_gate { queries } else { 0 };
        let mut cost = convolution_cost(self.canon, queries + 2 * keys);
        cost.state_bytes += 4 * 2 * (keys * kept) as u64;
        cost.flops_per_token += linear_flops(d_model, queries + 2 * keys + gate)
            + linear_flops(queries, d_model)
            + look_back;
        Ok(cost)
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
    /// The last inputs of Canon layers, of those that there are.
    pub tails: Vec<Tensor<B, 3>>,
}

impl<B: Backend> RecurrentState<B> for KeyValueCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_growing("keys", &self.keys, 2)
            .with_growing("values", &self.values, 2)
            .with_list("tails", &self.tails)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let (position, tails) = (tensors.position(), tensors.take_list("tails"));
        Self { keys: tensors.take("keys"), values: tensors.take("values"), position, tails }
    }
}

impl<B: Backend> KeyValueCache<B> {
    /// `before`, and then these.
    pub(super) fn after(before: Option<Self>, keys: Tensor<B, 4>, values: Tensor<B, 4>) -> Self {
        let tokens = keys.dims()[2];
        match before {
            Some(before) => Self {
                keys: Tensor::cat(vec![before.keys, keys], 2),
                values: Tensor::cat(vec![before.values, values], 2),
                position: before.position + tokens,
                tails: before.tails,
            },
            None => Self { keys, values, position: tokens, tails: vec![] },
        }
    }

    /// The part of the cache that later tokens see through `window`.
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
    q_norm: Option<Norm<B>>,
    k_norm: Option<Norm<B>>,
    g_proj: Option<Linear<B>>,
    o_proj: ResidualLinear<B>,
    dropout: Dropout,
    cope: Option<ContextualPositions<B>>,
    canon: Option<CanonQkv<B>>,
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
    #[module(skip)]
    stride: Option<usize>,
    #[module(skip)]
    norm_span: QkNormSpan,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Attention<B> {
    type State = KeyValueCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    /// Leaves its cache in `shared`.
    fn run(
        &self,
        x: Tensor<B, 3>,
        mut state: Option<KeyValueCache<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let position = state.as_ref().map_or(0, |cache| cache.position);
        let before = state.as_mut().map(|cache| std::mem::take(&mut cache.tails));
        let mut tails = Tails::after(before.unwrap_or_default());
        let rotation = self.rope.map(|rope| (rope, position));
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let heads = [self.heads, self.key_value_heads, self.key_value_heads];
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let qkv = ConvQkv::plain(projections, heads).canon(&self.canon);
        let (Qkv { q, k, v }, [], [gate]) = qkv.project_some(&x, [], [gate], &mut tails);
        let q = turned(self.normalized(q, &self.q_norm), &None, rotation);
        let k = turned(self.normalized(k, &self.k_norm), &None, rotation);
        let v = v.swap_dims(1, 2);

        let (o, cache) = through_window([q, k, v], self.window, state, |q, cache, hidden| {
            let shares = softmax(self.scores(q, &cache.keys, hidden), 4);
            merge(blend(self.dropout.forward(shares), &cache.values))
        });
        shared.keys_values = Some(cache.clone());
        let cache = KeyValueCache { tails: tails.into_next(), ..cache };
        let o = match gate {
            Some(gate) => ops::gate(o, gate, Activation::Sigmoid),
            None => o,
        };
        (self.o_proj.forward(o), cache)
    }
}

impl<B: LinearAttentionBackend> Attention<B> {
    /// Scores of `q` with all keys, `[B, Hk, H / Hk, T, S]`, very negative where `hidden` is or the stride skips
    /// a key.
    fn scores(&self, q: Tensor<B, 4>, keys: &Tensor<B, 4>, hidden: Tensor<B, 5>) -> Tensor<B, 5> {
        let seen = keys.dims()[2];
        let hidden = match self.stride {
            Some(stride) => hidden + strided_mask(&q, seen, stride),
            None => hidden,
        };
        let q = scaled(q);
        let scores = scores(q.clone(), keys);
        let bias = match &self.cope {
            Some(cope) => cope.forward(q, scores.clone(), hidden.clone()) + hidden,
            None if self.alibi => hidden - fall(&q, seen, self.key_value_heads),
            None => hidden,
        };
        scores + bias
    }

    /// Queries or keys, `[B, T, heads, K]`, through their norm where there is one.
    fn normalized(&self, x: Tensor<B, 4>, norm: &Option<Norm<B>>) -> Tensor<B, 4> {
        let heads = x.dims()[2];
        match norm {
            Some(norm) if self.norm_span == QkNormSpan::Projection => {
                split_heads(norm.forward(merge_heads(x)), heads)
            }
            Some(norm) => norm.forward(x),
            None => x,
        }
    }
}

/// Attention of queries over keys and values, `[B, .., T, ..]` each and in this order, and over a cache before
/// them. `weigh` is given queries, what they may see, and a mask, and gives their outputs, `[B, .., H V]`. Gives
/// these, and what of the cache is left after them.
pub(super) fn through_window<B: Backend>(
    [q, k, v]: [Tensor<B, 4>; 3],
    window: Option<usize>,
    state: Option<KeyValueCache<B>>,
    weigh: impl Fn(Tensor<B, 4>, &KeyValueCache<B>, Tensor<B, 5>) -> Tensor<B, 3>,
) -> (Tensor<B, 3>, KeyValueCache<B>) {
    let tokens = q.dims()[2];
    // Through a window, a long sequence is seen piece by piece: the scores outside are not formed.
    let piece = window.map_or(tokens, |window| window.max(PIECE));
    in_pieces(tokens, piece, state, |(from, size), before| {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(2, from, size);
        let q = part(&q);
        let cache = KeyValueCache::after(before, part(&k), part(&v));
        let hidden = causal_mask(&q, cache.keys.dims()[2], window);
        (weigh(q, &cache, hidden), cache.within(window))
    })
}

/// RMSNorm with a weight for every channel of a head, if it is `wanted`.
pub(super) fn head_norm<B: Backend>(
    wanted: bool,
    width: usize,
    epsilon: f64,
    device: &B::Device,
) -> Option<RmsNorm<B>> {
    wanted.then(|| RmsNormConfig::new(width).with_epsilon(epsilon).init(device))
}

/// Heads `x`, `[B, T, heads, X]`, as `[B, heads, T, X]`: normalised if there is a norm, then rotated if
/// there is a rotation, given with the position of the first token.
pub(super) fn turned<B: LinearAttentionBackend>(
    x: Tensor<B, 4>,
    norm: &Option<RmsNorm<B>>,
    rotation: Option<(Rope, usize)>,
) -> Tensor<B, 4> {
    let x = match norm {
        Some(norm) => rms_norm(norm, x, None),
        None => x,
    };
    let x = match rotation {
        Some((rope, position)) => rope.forward(x, position),
        None => x,
    };
    x.swap_dims(1, 2)
}

/// Works `tokens` tokens off, `piece` at a time: `attend` is given a piece, `(first, how many)`,
/// and the state before it. Gives the outputs in a row, and the state after the last.
pub(super) fn in_pieces<B: Backend, S>(
    tokens: usize,
    piece: usize,
    mut state: Option<S>,
    attend: impl Fn((usize, usize), Option<S>) -> (Tensor<B, 3>, S),
) -> (Tensor<B, 3>, S) {
    let mut outputs = vec![];
    for from in (0..tokens).step_by(piece) {
        let (o, next) = attend((from, piece.min(tokens - from)), state.take());
        outputs.push(o);
        state = Some(next);
    }
    (Tensor::cat(outputs, 1), state.expect("a sequence has at least one token"))
}

/// Softmax attention of `q`, `[B, H, T, K]`, over keys and values, `[B, Hk, S, ..]`, where `bias`,
/// `[.., .., .., T, S]`, is added to the scores of each group of heads. Gives `[B, T, H V]`.
pub(super) fn weigh<B: Backend>(
    q: Tensor<B, 4>,
    keys: &Tensor<B, 4>,
    values: &Tensor<B, 4>,
    bias: Tensor<B, 5>,
) -> Tensor<B, 3> {
    merge(gather(scores(scaled(q), keys) + bias, values))
}

/// Queries over sqrt(K).
fn scaled<B: Backend>(q: Tensor<B, 4>) -> Tensor<B, 4> {
    let scale = (q.dims()[3] as f64).powf(-0.5);
    q * scale
}

/// Products of `q`, `[B, H, T, K]`, with keys, `[B, Hk, S, K]`: `[B, Hk, H / Hk, T, S]`, in f32 at least.
pub(super) fn scores<B: Backend>(q: Tensor<B, 4>, keys: &Tensor<B, 4>) -> Tensor<B, 5> {
    let [batch, heads, tokens, width] = q.dims();
    let shared = keys.dims()[1];
    let q = q.reshape([batch, shared, heads / shared, tokens, width]);
    accumulator(q.matmul(keys.clone().unsqueeze_dim::<5>(2).transpose()))
}

/// Values, `[B, Hk, S, V]`, weighed by the softmax of [`scores`]: `[B, H, T, V]`.
pub(super) fn gather<B: Backend>(scores: Tensor<B, 5>, values: &Tensor<B, 4>) -> Tensor<B, 4> {
    blend(softmax(scores, 4), values)
}

/// Values, `[B, Hk, S, V]`, in shares, `[B, Hk, H / Hk, T, S]`: `[B, H, T, V]`, in the type of the values.
pub(super) fn blend<B: Backend>(shares: Tensor<B, 5>, values: &Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, shared, group, tokens, _] = shares.dims();
    let o = typed(shares, values.dtype()).matmul(values.clone().unsqueeze_dim::<5>(2));
    o.reshape([batch, shared * group, tokens, values.dims()[3]])
}

/// `[B, H, T, V]` to `[B, T, H V]`.
pub(super) fn merge<B: Backend>(o: Tensor<B, 4>) -> Tensor<B, 3> {
    merge_heads(o.swap_dims(1, 2))
}
