//! GateLoop. Recurrence, shapes and source: [`GateLoop`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Widths, check_divisor, head_widths, linear_flops,
    memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::rope::{Turn, sum_of_angles};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`GateLoop`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GateLoopConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key, even; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// n, what log decays are divided by: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for GateLoopConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            gate_normalizer: 1.0,
            conv_size: 0,
            output_gate: true,
            norm_eps: 1e-5,
        }
    }
}

impl GateLoopConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths = head_widths(self.heads, None, self.key_width, self.expand_v, d_model)?;
        if !widths.key.is_multiple_of(2) {
            let want = "even: pairs of channels are complex numbers";
            return Err(ConfigError::new("key_width", widths.key, want));
        }
        check_divisor("gate_normalizer", self.gate_normalizer)?;
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
    ) -> Result<GateLoop<B>, ConfigError> {
        let Widths { value, keys, values, .. } = self.resolve(d_model)?;
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(GateLoop {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            a_proj: linear_with_bias(d_model, keys / 2, device),
            theta_proj: linear(d_model, keys / 2, device),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: self.output_gate.then(|| linear(d_model, values, device)),
            norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            gate_normalizer: self.gate_normalizer,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let mut cost = memory_cost(self.heads, key, value, false);
        let gates = if self.output_gate { values } else { 0 };
        cost.flops_per_token +=
            linear_flops(d_model, 3 * keys + values + gates) + linear_flops(values, d_model);
        cost.state_bytes += 4 * (keys / 2) as u64;
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// GateLoop: linear attention whose rows each have a complex decay that depends on the data.
///
/// # Recurrence
/// ```text
/// q, k, v = x W_q, x W_k, x W_v          (silu(conv(.)) where there are convolutions)
/// q, k as K / 2 complex numbers: channel i and channel i + K / 2
/// g       = log_sigmoid(x W_a + b) / n          [K / 2]
/// theta   = x W_theta                           [K / 2]
/// S       = diag(e^{g + i theta}) S + k^T v     complex, [K / 2, V]
/// y       = (rms_norm(Re(conj(q) S) / sqrt(K)) silu(x W_g)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, g, theta
///                  ┌─ decay and turn ────────┐   ┌─ write ─┐
/// S_{t-1} ────────>│ diag(e^{g + i theta}) S │──>│ + k^T v │──┬──> S_t
///                  └─────────────────────────┘   └─────────┘  │
///                                ┌─ read ──────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ Re(conj(q) S) / sqrt(K) │<─┘
///                                └─────────────────────────┘
/// ```
/// n is `gate_normalizer`.
///
/// `Re(conj(q_t) e^{i (A_t - A_s)} k_s)`, with A_t the sum of theta up to t, is the product of q_t and k_s as
/// pairs of real numbers, q_t turned by -A_t and k_s by -A_s: so the memory is real, `[K, V]`, and decays by
/// rows. A is kept between -pi and pi, which changes no turn.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution, and A, `[B, 1, H K / 2]`; `position`, tokens seen. g is
/// a natural log of the share of a row that is kept, at most 0, theta an angle in radians, both for each
/// token, head and pair of channels.
/// # Errors
/// [`GateLoopConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, an odd `key_width`, an `expand_v` that makes V
/// no whole number, a `gate_normalizer` that is not above 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Katsch, arXiv 2311.01927, with n = 1.
#[derive(Module, Debug)]
pub struct GateLoop<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    theta_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_normalizer: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for GateLoop<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let gates = [&self.a_proj, &self.theta_proj].map(Projection::plain);
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [a, theta], [gate]) =
            self.qkv().project_some(&x, gates, [gate], &mut past.conv_states);
        let angles = past
            .conv_states
            .through(Kept::Angles, |before| sum_of_angles(accumulator(theta), before));
        let back = Turn::by(split_heads(angles, self.heads).neg());
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let g = split_heads(ops::log_sigmoid(a, self.gate_normalizer), self.heads);
        // Both halves of a complex number decay alike.
        let g = cat(vec![g.clone(), g], 3);
        let [q, k] = [q * scale, k].map(|x| back.forward(x));
        let inputs = ops::LinearAttentionInputs::new(q, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::silu(&self.norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> GateLoop<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3])
    }
}
