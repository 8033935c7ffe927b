//! PaTH attention. Recurrence, shapes and source: [`PathAttention`].

use super::{TokenMixer, key_width, linear_flops};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{
    ConvPast, ShortConvolution, check_window, convolution_cost, convolve_if_any,
};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, l2_normalize, linear, linear_with_bias, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::reflections::{PathCache, Tokens, attend};
use crate::nn::softmax::{check_shared, head_norm, in_pieces, turned};
use crate::nn::{
    ConfigError, Cost, DEFAULT_CHUNK, Kept, KeptTensors, Linear, Shared, check_chunk, positive,
};
use crate::ops::{self, LinearAttentionBackend, accumulator, typed};
use burn::module::Module;
use burn::nn::RmsNorm;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`PathAttention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PathAttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, values and reflections, a divisor of `heads`; as many by default.
    pub key_value_heads: Option<usize>,
    /// Width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Inner width of the projection that makes w.
    pub w_rank: usize,
    /// Tokens the short convolution of w sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether scores decay by what the tokens in between say.
    pub forget_gate: bool,
    /// Whether each head's queries and keys are normalised.
    pub qk_norm: bool,
    /// Added to a mean square before its root, where queries and keys are normalised.
    pub norm_eps: f64,
    /// Tokens a piece. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for PathAttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            w_rank: 32,
            conv_size: 3,
            forget_gate: false,
            qk_norm: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl PathAttentionConfig {
    /// Width of a head, and heads of keys and values.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        positive("w_rank", self.w_rank)?;
        check_window(self.conv_size, 0)?;
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
    ) -> Result<PathAttention<B>, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        let norm = || head_norm(self.qk_norm, width, self.norm_eps, device);
        let gate = || linear_with_bias(d_model, self.heads, device);
        Ok(PathAttention {
            q_proj: linear(d_model, queries, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, keys, device),
            w_proj: (linear(d_model, self.w_rank, device), linear(self.w_rank, keys, device)),
            w_conv1d: ShortConvolution::optional(keys, self.conv_size, device),
            bt_proj: linear_with_bias(d_model, shared, device),
            g_proj: self.forget_gate.then(gate),
            maybe_q_norm: norm(),
            maybe_k_norm: norm(),
            o_proj: linear(queries, d_model, device).into(),
            heads: self.heads,
            key_value_heads: shared,
            chunk: self.chunk,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        let gates = if self.forget_gate { self.heads } else { 0 };
        // On average a token looks at half the sequence: scores, their sum over values, and a
        // reflection of every key.
        let look_back = 2 * 2 * (queries + keys) as u64 * length.div_ceil(2) as u64;
        let inward = queries + 2 * keys + self.w_rank + shared + gates;
        let mut cost = convolution_cost(self.conv_size, keys);
        cost += Cost {
            state_bytes: 4 * ((2 * keys + gates) * length) as u64,
            flops_per_token: linear_flops(d_model, inward)
                + linear_flops(self.w_rank, keys)
                + linear_flops(queries, d_model)
                + look_back,
        };
        Ok(cost)
    }
}

/// PaTH attention: softmax attention whose positions are products of data-dependent reflections.
///
/// # Recurrence
/// ```text
/// q, k, v = x W                                        [q, k of mean square 1 in each head]
/// w       = silu(conv(x W_1 W_2)), of length 1         W_1: D -> 32
/// beta    = 2 sigmoid(x W_b + b_b)                     a number for every head of keys
/// H_t     = I - beta_t w_t^T w_t
/// scores  = q_i H_i H_{i-1} .. H_{j+1} k_j^T / sqrt(K)  [+ log f_{j+1} + .. + log f_i]
/// y       = softmax(scores + causal mask) v W_o        [f = sigmoid(x W_g + b_g)]
/// ```
/// ```text
/// x_t ──> q, k, v, w, beta, f
///                 ┌─ erase ────────────────┐   ┌─ write ─────┐
/// keys, values ──>│ keys - beta keys w^T w │──>│ append k, v │──┬──> keys, values
///                 └────────────────────────┘   └─────────────┘  │
///                       ┌─ read ─────────────────────────────┐  │
///        y_t <── W_o <──│ softmax(q keys^T / sqrt(K)) values │<─┘
///                       └────────────────────────────────────┘
/// ```
/// Each key is multiplied by the reflection H_t of every later token; a piece of tokens is worked off at
/// once. With `forget_gate`, gates decay the scores as in
/// [`ForgettingAttention`](super::ForgettingAttention).
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`PathCache`]: `keys`, `[B, Hk, T, K]`, as the last token
/// sees them; `values`, `[B, Hk, T, K]`; `gates`, the sum of log f up to each token less that up to the last,
/// `[B, H, T]`, with `forget_gate`; `conv_states`, the last W - 1 inputs of the short convolution. It grows with T.
/// beta is 0 to 2: at 2 H_t is a reflection. log f is a natural log of the share that is kept, at most 0.
/// # Errors
/// [`PathAttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `key_value_heads` that do not divide `heads`,
/// a `w_rank` of 0, a `conv_size` of 1, a `norm_eps` below 1e-37 or a `chunk` that is no power of 2 up to
/// 128.
/// # Source
/// arXiv 2505.16381; with the forget gate (PaTH-FoX) after arXiv 2503.02130.
/// # Departures
/// Log gates are unscaled, where flash-linear-attention divides them by sqrt(K) like the scores.
#[derive(Module, Debug)]
pub struct PathAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    w_proj: (Linear<B>, Linear<B>),
    w_conv1d: Option<ShortConvolution<B>>,
    bt_proj: Linear<B>,
    g_proj: Option<Linear<B>>,
    maybe_q_norm: Option<RmsNorm<B>>,
    maybe_k_norm: Option<RmsNorm<B>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_value_heads: usize,
    #[module(skip)]
    chunk: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for PathAttention<B> {
    type State = PathCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<PathCache<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, PathCache<B>) {
        let (tokens, dtype) = (x.dims()[1], x.dtype());
        let conv_states =
            state.as_ref().map_or_else(KeptTensors::default, |cache| cache.conv_states.clone());
        let mut conv_states = ConvPast::after(conv_states);
        let inputs = self.project(&x, &mut conv_states);
        let (o, cache) = in_pieces(tokens, self.chunk, state, |(from, size), before| {
            attend(inputs.part(from, size), before)
        });
        let conv_states = conv_states.into_next();
        (self.o_proj.forward(typed(o, dtype)), PathCache { conv_states, ..cache })
    }
}

impl<B: LinearAttentionBackend> PathAttention<B> {
    /// Rows of each token of `x`, in f32 at least: reflections are solved for.
    fn project(&self, x: &Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Tokens<B> {
        let (heads, shared) = (self.heads, self.key_value_heads);
        let (narrow, widen) = &self.w_proj;
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let gates = [Projection::plain(narrow), Projection::beta(&self.bt_proj, 2.0)];
        let log_gates = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [w, beta], [log_gates]) = ConvQkv::plain(
            projections,
            [heads, shared, shared],
        )
        .project_some(x, gates, [log_gates], conv_states);
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let w = convolve_if_any(&self.w_conv1d, widen.forward(w), Kept::Direction, conv_states);
        let w = l2_normalize(split_heads(w, shared)).swap_dims(1, 2);
        Tokens {
            q: accumulator(turned(q, &self.maybe_q_norm, None)) * scale,
            k: accumulator(turned(k, &self.maybe_k_norm, None)),
            v: accumulator(v.swap_dims(1, 2)),
            w: accumulator(w),
            // In this order: Burn 0.21 loses strides where a reshape adds dimensions to one token with its heads in front.
            beta: beta.unsqueeze_dim::<4>(3).swap_dims(1, 2),
            gates: log_gates.map(|gates| ops::log_sigmoid(gates, 1.0).swap_dims(1, 2)),
        }
    }
}
