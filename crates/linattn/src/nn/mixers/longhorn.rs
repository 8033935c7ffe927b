//! Longhorn. Recurrence, shapes and source: [`Longhorn`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear, share_heads};
use crate::nn::projection::Projection;
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{Along, DeltaRuleInputs, LinearAttentionBackend, accumulator};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Longhorn`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LonghornConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LonghornConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            conv_size: 4,
            output_gate: true,
            norm_eps: 1e-5,
        }
    }
}

impl LonghornConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths =
            head_widths(self.heads, self.value_heads, self.key_width, self.expand_v, d_model)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok(widths)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Longhorn<B>, ConfigError> {
        let Widths { heads, value, keys, values, .. } = self.resolve(d_model)?;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(Longhorn {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            b_proj: project(heads),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: self.output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            key_heads: self.heads,
            heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { heads, key, value, keys, values } = self.resolve(d_model)?;
        let mut cost = memory_cost(heads, key, value, true);
        let inward = 2 * keys + values * if self.output_gate { 2 } else { 1 } + heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Longhorn: a delta rule whose step solves for the state that stays close to the last and answers the key.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W))   q of length 1; k as long as it likes
/// beta    = sigmoid(x W_b)
/// eps     = beta / (1 + beta k k^T)
/// S       = (I - eps k^T k) S + eps k^T v     = argmin |S - S_before|^2 + beta |v - k S|^2
/// y       = (rms_norm(q S) [silu(x W_g)]) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, eps
///            ┌─ erase ───────┐   ┌─ write ─────┐
/// S_{t-1} ──>│ - eps k^T k S │──>│ + eps k^T v │──┬──> S_t
///            └───────────────┘   └─────────────┘  │
///                                      ┌─ read ┐  │
///        y_t <── W_o <── norm, gate <──│ q S   │<─┘
///                                      └───────┘
/// ```
/// Keys need no norm: `eps k k^T` is below 1 whatever their length.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. beta weighs the error of the
/// answer against the change of the state, 0 to 1; eps k k^T is the share of the error that is corrected.
/// # Errors
/// [`LonghornConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an
/// `expand_v` that makes V no whole number, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2407.14207.
/// # Departures
/// This is the exact solution, a delta rule. The released models approximate it by its diagonal, with a beta
/// for every channel, in Mamba's frame: one convolution before all, no norms, and `D x` added.
#[derive(Module, Debug)]
pub struct Longhorn<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    b_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Longhorn<B> {
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
        let beta = Projection::beta(&self.b_proj, 1.0);
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [beta], [gate]) =
            self.qkv().project_some(&x, [beta], [gate], &mut past.conv_states);
        let length = share_heads(accumulator(k.clone()).square().sum_along(3), self.heads);
        let eps = beta.clone() / (beta * length.squeeze_dim::<3>(3) + 1.0);
        let inputs = DeltaRuleInputs::new(q, k, v, eps);
        let (o, memory) = delta_rule(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Longhorn<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        ConvQkv::convolved(projections, convolutions, heads).silu().unit_queries()
    }
}
