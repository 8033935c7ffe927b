//! Gated linear attention. Recurrence, shapes and source: [`Gla`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_divisor, half_key_width, linear_flops,
    memory_cost, value_width,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Gla`], gated linear attention. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GlaConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key; half of d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Inner width of the projection that makes the decay.
    pub gate_low_rank: usize,
    /// Divisor of the log decays: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for GlaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 2.0,
            gate_low_rank: 16,
            gate_normalizer: 16.0,
            conv_size: 0,
            output_gate: true,
            norm_eps: 1e-5,
        }
    }
}

impl GlaConfig {
    /// K and V.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("heads", self.heads)?;
        let key = half_key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        positive("gate_low_rank", self.gate_low_rank)?;
        check_divisor("gate_normalizer", self.gate_normalizer)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok((key, value))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Gla<B>, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(Gla {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            gk_proj: (
                linear(d_model, self.gate_low_rank, device),
                linear_with_bias(self.gate_low_rank, keys, device),
            ),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: self.output_gate.then(|| linear(d_model, values, device)),
            g_norm_swish_gate: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            gate_normalizer: self.gate_normalizer,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let mut cost = memory_cost(self.heads, key, value, false);
        let gates = if self.output_gate { values } else { 0 };
        let inward = 2 * keys + values + gates + self.gate_low_rank;
        cost.flops_per_token += linear_flops(d_model, inward)
            + linear_flops(self.gate_low_rank, keys)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Gated linear attention (GLA): every row of the state has a decay of its own, that depends on the data.
///
/// # Recurrence
/// ```text
/// q, k, v = x W_q, x W_k, x W_v          (silu(conv(.)) where there are convolutions)
/// g       = log_sigmoid(x W_1 W_2 + b) / 16              W_1: D -> 16
/// S       = diag(e^g) S + k^T v
/// y       = (rms_norm(q S / sqrt(K)) silu(x W_g)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, g
///                    ┌─ decay ─────┐   ┌─ write ─┐
/// S_{t-1} ──────────>│ diag(e^g) S │──>│ + k^T v │──┬──> S_t
///                    └─────────────┘   └─────────┘  │
///                                ┌─ read ────────┐  │
///  y_t <── W_o <── norm, gate <──│ q S / sqrt(K) │<─┘
///                                └───────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. g is a natural log of the share
/// of a row that is kept, for each token, head and key channel, at most 0.
/// # Errors
/// [`GlaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D / 2 while `key_width` is left out, an `expand_v` that makes V no whole number, a
/// `gate_low_rank` of 0, a `gate_normalizer` that is not above 0, a `conv_size` of 1 or a `norm_eps` below
/// 1e-37.
/// # Source
/// Yang et al., arXiv 2312.06635. As there, all keys together are half as wide as the model by default, and
/// all values as wide.
#[derive(Module, Debug)]
pub struct Gla<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    gk_proj: (Linear<B>, Linear<B>),
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    g_norm_swish_gate: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_normalizer: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Gla<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let (narrow, widen) = &self.gk_proj;
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [g], [gate]) =
            self.qkv().project_some(&x, [Projection::plain(narrow)], [gate], &mut past.conv_states);
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let g = split_heads(ops::log_sigmoid(widen.forward(g), self.gate_normalizer), self.heads);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::silu(&self.g_norm_swish_gate, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Gla<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3])
    }
}
