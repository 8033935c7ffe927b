//! Gated retention. Recurrence, shapes and source: [`GatedRetention`].

use super::retnet::{check_rotated, check_theta};
use super::{
    MatrixPast, MatrixState, TokenMixer, check_divisor, check_heads, key_width, linear_flops,
    memory_cost, value_width,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::layers::{ResidualLinear, check_epsilon, linear, merge_heads, rms_normalize};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Rope, Shared};
use crate::ops::{self, GateActivation, LinearAttentionBackend};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`GatedRetention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedRetentionConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key, even; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Divisor of the log decays: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for GatedRetentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            gate_normalizer: 16.0,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
        }
    }
}

impl GatedRetentionConfig {
    /// K, V and the number of value heads.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize, usize), ConfigError> {
        let heads = check_heads(self.heads, self.value_heads)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        check_rotated("key_width", key)?;
        check_theta(self.rope_theta)?;
        check_divisor("gate_normalizer", self.gate_normalizer)?;
        check_epsilon(self.norm_eps)?;
        Ok((key, value_width(key, self.expand_v)?, heads))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GatedRetention<B>, ConfigError> {
        let (key, value, heads) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        Ok(GatedRetention {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            g_proj: linear(d_model, values, device),
            gk_proj: linear(d_model, heads, device),
            o_proj: linear(values, d_model, device).into(),
            key_heads: self.heads,
            heads,
            rope: Rope::whole(self.rope_theta),
            gate_normalizer: self.gate_normalizer,
            norm_eps: self.norm_eps,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value, heads) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        let mut cost = memory_cost(heads, key, value, false);
        cost.flops_per_token +=
            linear_flops(d_model, 2 * keys + 2 * values + heads) + linear_flops(values, d_model);
        Ok(cost)
    }
}

/// Gated retention, YOCO's self-decoder: RetNet with a decay that depends on the data.
///
/// # Recurrence
/// ```text
/// q, k = rope(x W_q), rope(x W_k);  v = x W_v
/// g    = log_sigmoid(x W_gk) / 16                      one number a head
/// S    = e^g S + k^T v
/// y    = (rms_norm(q S / sqrt(K)) silu(x W_g)) W_o     over each head, without a weight
/// ```
/// ```text
/// x_t, position ──> q, k, v, g
///                         ┌─ decay ┐   ┌─ write ─┐
/// S_{t-1} ───────────────>│ e^g S  │──>│ + k^T v │──┬──> S_t
///                         └────────┘   └─────────┘  │
///                                ┌─ read ────────┐  │
///  y_t <── W_o <── norm, gate <──│ q S / sqrt(K) │<─┘
///                                └───────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32;
/// `position`, tokens seen. g is a natural log of the share kept, for each token and head, at most 0. 16 is
/// the default of `gate_normalizer`.
/// # Errors
/// [`GatedRetentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an
/// odd `key_width`, an `expand_v` that makes V no whole number, a `gate_normalizer` that is not above 0, a
/// `rope_theta` below 1 or a `norm_eps` below 1e-37.
/// # Source
/// Sun et al., arXiv 2405.05254.
/// # Departures
/// Rotation pairs channel i with i + K/2, where the authors' code pairs neighbours: the same layer, the
/// columns of `W_q` and `W_k` in another order. Its angles are RoPE's, theta^{-2 i / K} a token; the authors'
/// code has theta^{-i / (K/2 - 1)}.
#[derive(Module, Debug)]
pub struct GatedRetention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    g_proj: Linear<B>,
    gk_proj: Linear<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    rope: Rope,
    #[module(skip)]
    gate_normalizer: f64,
    #[module(skip)]
    norm_eps: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for GatedRetention<B> {
    type State = MatrixState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let gates = [&self.gk_proj, &self.g_proj].map(Projection::plain);
        let (Qkv { q, k, v }, [g, gate]) = ConvQkv::plain(
            projections,
            [self.key_heads, self.key_heads, self.heads],
        )
        .project(&x, gates, &mut past.conv_states);
        let rotated = |x| self.rope.forward(x, past.position);
        let (q, k) = (rotated(q), rotated(k));
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let g = ops::log_sigmoid(g, self.gate_normalizer);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let o = merge_heads(rms_normalize(o, self.norm_eps));
        let y = self.o_proj.forward(ops::gate(o, gate, GateActivation::Silu));
        (y, past.then(memory, tokens))
    }
}
