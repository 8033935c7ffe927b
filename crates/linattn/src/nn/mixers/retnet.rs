//! RetNet's multi-scale retention. Recurrence, shapes and source: [`RetNet`].

use super::{
    MatrixPast, MatrixState, TokenMixer, check_heads, key_width, linear_flops, memory_cost,
    value_width,
};
use crate::nn::canon::{CanonQkv, check_canon};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::convolution_cost;
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear, wide_type};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Rope, Shared, is_default};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::Module;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`RetNet`], RetNet's multi-scale retention. The layer's page has recurrence, shapes, errors and
/// source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetNetConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key, even; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
    /// Tokens that Canon layers of queries, keys and values see, at least 2; 0 for none.
    #[serde(skip_serializing_if = "is_default")]
    pub canon: usize,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for RetNetConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 2.0,
            output_gate: true,
            rope_theta: 10_000.0,
            canon: 0,
            norm_eps: 1e-5,
        }
    }
}

impl RetNetConfig {
    /// K, V and the number of value heads.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize, usize), ConfigError> {
        let heads = check_heads(self.heads, self.value_heads)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        check_rotated("key_width", key)?;
        check_theta(self.rope_theta)?;
        check_canon("canon", self.canon)?;
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
    ) -> Result<RetNet<B>, ConfigError> {
        let (key, value, heads) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        Ok(RetNet {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            g_proj: self.output_gate.then(|| linear(d_model, values, device)),
            g_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            canon: CanonQkv::optional(self.canon, [keys, keys, values], device),
            key_heads: self.heads,
            heads,
            rope: Rope::whole(self.rope_theta),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value, heads) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        let mut cost = memory_cost(heads, key, value, false);
        cost += convolution_cost(self.canon, 2 * keys + values);
        let gates = if self.output_gate { values } else { 0 };
        cost.flops_per_token +=
            linear_flops(d_model, 2 * keys + values + gates) + linear_flops(values, d_model);
        Ok(cost)
    }
}

/// Rotation pairs channels up.
pub(super) fn check_rotated(key: &str, width: usize) -> Result<(), ConfigError> {
    match width.is_multiple_of(2) {
        true => Ok(()),
        false => Err(ConfigError::new(key, width, "even, for rotation to pair channels up")),
    }
}

/// Refuses a base that gives no wavelengths.
pub(super) fn check_theta(theta: f64) -> Result<(), ConfigError> {
    match theta >= 1.0 && theta.is_finite() {
        true => Ok(()),
        false => Err(ConfigError::new("rope_theta", theta, "at least 1")),
    }
}

/// RetNet's multi-scale retention: linear attention with rotated queries and keys and a fixed decay per head.
///
/// # Recurrence
/// ```text
/// q, k = rope(x W_q), rope(x W_k);  v = x W_v          Canon layers before rope, where asked for
/// S    = (1 - 2^{-5-h}) S + k^T v
/// y    = (rms_norm(q S / sqrt(K)) silu(x W_g)) W_o
/// ```
/// ```text
/// x_t, position ──> q, k, v
///               ┌─ decay ──────────┐   ┌─ write ─┐
/// S_{t-1} ─────>│ (1 - 2^{-5-h}) S │──>│ + k^T v │──┬──> S_t
///               └──────────────────┘   └─────────┘  │
///                                ┌─ read ────────┐  │
///  y_t <── W_o <── norm, gate <──│ q S / sqrt(K) │<─┘
///                                └───────────────┘
/// ```
/// h is the head, from 0.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of Canon layers, of those that there are; `position`, tokens seen. The decay is a
/// share, the same for every token.
/// # Errors
/// [`RetNetConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an odd
/// `key_width`, an `expand_v` that makes V no whole number, a `rope_theta` below 1, a `canon` of 1 or a
/// `norm_eps` below 1e-37.
/// # Source
/// Sun et al., arXiv 2307.08621.
#[derive(Module, Debug)]
pub struct RetNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    g_proj: Option<Linear<B>>,
    g_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    canon: Option<CanonQkv<B>>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    rope: Rope,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for RetNet<B> {
    type State = MatrixState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, _], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let heads = [self.key_heads, self.key_heads, self.heads];
        let qkv = ConvQkv::plain(projections, heads).canon(&self.canon);
        let (Qkv { q, k, v }, [], [gate]) = qkv.project_some(&x, [], [gate], &mut past.conv_states);
        let rotated = |x| self.rope.forward(x, past.position);
        let (q, k) = (rotated(q), rotated(k));
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let g = log_decay(&x, self.heads).expand([batch, tokens, self.heads]);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::silu(&self.g_norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

/// ln(1 - 2^{-5-h}) for head h, `[1, 1, H]`.
fn log_decay<B: Backend>(like: &Tensor<B, 3>, heads: usize) -> Tensor<B, 3> {
    let logs: Vec<f32> = (0..heads).map(|h| (-(2f64.powi(-5 - h as i32))).ln_1p() as f32).collect();
    Tensor::from_data(
        TensorData::new(logs, [1, 1, heads]),
        (&like.device(), wide_type(like.dtype())),
    )
}
