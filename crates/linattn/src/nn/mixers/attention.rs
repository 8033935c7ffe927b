//! Softmax attention. Recurrence, shapes and source: [`Attention`].

use super::attention_config::{AttentionConfig, QkNormSpan};
use super::{TokenMixer, linear_flops};
use crate::nn::canon::CanonQkv;
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ConvPast, convolution_cost};
use crate::nn::layers::{Norm, ResidualLinear, linear, linear_with_bias, merge_heads, split_heads};
use crate::nn::projection::Projection;
use crate::nn::score_bias::{ContextualPositions, causal_mask, fall, strided_mask};
use crate::nn::softmax::{KeyValueCache, blend, merge, scaled, scores, through_window, turned};
use crate::nn::{ConfigError, Cost, Linear, Rope, Shared};
use crate::ops::{self, GateActivation, LinearAttentionBackend};
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{Tensor, backend::Backend};

impl AttentionConfig {
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

/// Causal softmax attention with rotary positions: the reference that linear attention is held to.
///
/// # Recurrence
/// ```text
/// q, k = rope(x W_q), rope(x W_k);  v = x W_v    biases, Canon layers and norms before rope, where asked for
/// o    = softmax(q k^T / sqrt(K) + b_ij + causal mask) v        b, of positions, and dropout where asked for
/// y    = (o * sigmoid(x W_g)) W_o                               gate and bias where asked for
/// ```
/// ```text
/// x_t, position ──> q, k, v
///                          ┌─ write ────────────────────────────────┐
/// keys, values ───────────>│ append k, v; a window drops the oldest │──┬──> keys, values
///                          └────────────────────────────────────────┘  │
///                          ┌─ read ─────────────────────────────────┐  │
///  y_t <── W_o <── gate <──│ softmax(q keys^T / sqrt(K) + b) values │<─┘
///                          └────────────────────────────────────────┘
/// ```
/// b is slopes (ALiBi), a strided pattern (Sparse Transformer) or contextual positions (CoPE). The cache is
/// left to later layers, for [`CrossAttention`](super::CrossAttention).
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`KeyValueCache`]: `keys`, `[B, Hk, T, K]`, rotated;
/// `values`, `[B, Hk, T, K]`; `position`, tokens seen; `conv_states`, the last W - 1 inputs of Canon layers. It
/// grows with T, unless there is a window of w tokens, which keeps w - 1. `window` and `stride` count tokens.
/// # Errors
/// [`AttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `key_value_heads` that do not divide `heads`,
/// an odd width that is rotated, a `rope_width` without `rope` or beyond the head, a `rope_theta` below 1, a
/// `window`, `stride` or `cope` below 2, two ways of telling positions, a `canon` of 1, a `dropout` outside 0
/// to 1, a key of `qk_norm` without it or a `norm_eps` below 1e-37.
/// # Source
/// Vaswani et al., arXiv 1706.03762; fewer key than query heads as in arXiv 2305.13245, a window as in arXiv
/// 2004.05150, the gate as in arXiv 2505.06708. ALiBi is from arXiv 2108.12409, the strided pattern from
/// arXiv 1904.10509, CoPE from arXiv 2405.18719.
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
        let before = state.as_mut().map(|cache| std::mem::take(&mut cache.conv_states));
        let mut conv_states = ConvPast::after(before.unwrap_or_default());
        let rotation = self.rope.map(|rope| (rope, position));
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let heads = [self.heads, self.key_value_heads, self.key_value_heads];
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let qkv = ConvQkv::plain(projections, heads).canon(&self.canon);
        let (Qkv { q, k, v }, [], [gate]) = qkv.project_some(&x, [], [gate], &mut conv_states);
        let q = turned(self.normalized(q, &self.q_norm), &None, rotation);
        let k = turned(self.normalized(k, &self.k_norm), &None, rotation);
        let v = v.swap_dims(1, 2);

        let (o, cache) = through_window([q, k, v], self.window, state, |q, cache, seen| {
            let shares = ops::softmax(self.scores(q, &cache.keys), seen);
            merge(blend(self.dropout.forward(shares), &cache.values))
        });
        shared.keys_values = Some(cache.clone());
        let cache = KeyValueCache { conv_states: conv_states.into_next(), ..cache };
        let o = match gate {
            Some(gate) => ops::gate(o, gate, GateActivation::Sigmoid),
            None => o,
        };
        (self.o_proj.forward(o), cache)
    }
}

impl<B: LinearAttentionBackend> Attention<B> {
    /// Scores of `q` with all keys, `[B, Hk, H / Hk, T, S]`, very negative where the stride skips a key.
    fn scores(&self, q: Tensor<B, 4>, keys: &Tensor<B, 4>) -> Tensor<B, 5> {
        let seen = keys.dims()[2];
        let q = scaled(q);
        let skipped = self.stride.map(|stride| strided_mask(&q, seen, stride));
        let scores = scores(q.clone(), keys);
        let scores = match &self.cope {
            Some(cope) => {
                let hidden = causal_mask(&q, seen, self.window);
                let hidden =
                    skipped.iter().fold(hidden, |hidden, skipped| hidden + skipped.clone());
                scores.clone() + cope.forward(q, scores, hidden)
            }
            None if self.alibi => scores - fall(&q, seen, self.key_value_heads),
            None => scores,
        };
        skipped.into_iter().fold(scores, |scores, skipped| scores + skipped)
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
