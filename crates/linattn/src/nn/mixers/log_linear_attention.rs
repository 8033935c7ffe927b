//! Log-linear attention. Recurrence, shapes and source: [`LogLinearAttention`].

use super::{MatrixPast, MatrixState, TokenMixer, Widths, head_widths, linear_flops, memory_cost};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::fenwick::Leveled;
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, softplus, split_heads,
};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{LinearAttentionBackend, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`LogLinearAttention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogLinearAttentionConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// L, levels, the token itself among them: L of them tell 2^(L - 1) tokens apart.
    pub levels: usize,
    /// Whether memories are written by the delta rule.
    pub delta_rule: bool,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LogLinearAttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            levels: 12,
            delta_rule: false,
            conv_size: 4,
            output_gate: true,
            norm_eps: 1e-5,
        }
    }
}

impl LogLinearAttentionConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths = head_widths(self.heads, None, self.key_width, self.expand_v, d_model)?;
        if !(2..=32).contains(&self.levels) {
            return Err(ConfigError::new("levels", self.levels, "2 to 32"));
        }
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
    ) -> Result<LogLinearAttention<B>, ConfigError> {
        let Widths { value, keys, values, .. } = self.resolve(d_model)?;
        let (heads, levels) = (self.heads, self.levels);
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(LogLinearAttention {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            a_proj: project(heads),
            b_proj: self.delta_rule.then(|| project(heads)),
            l_proj: project(heads * levels),
            a_log: fresh_a_log(heads, 0.0, device),
            dt_bias: fresh_dt_bias(heads, device),
            level_scale: Initializer::Ones.init([heads * levels], device),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: self.output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let memories = self.heads * (self.levels - 1);
        let mut cost = memory_cost(memories, key, value, self.delta_rule);
        let gates = if self.output_gate { values } else { 0 };
        let numbers = self.heads * (self.levels + if self.delta_rule { 2 } else { 1 });
        cost.flops_per_token += linear_flops(d_model, 2 * keys + values + gates + numbers)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Log-linear attention: a state for each level of a Fenwick tree over the tokens, read by weights from the
/// data.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W))                    with the delta rule q and k of length 1
/// g       = -exp(A_log) softplus(x W_a + dt_bias),  beta = sigmoid(x W_b)
/// w^l     = softplus(scale^l * x W_l)          a number for every head and level
/// o_i     = sum over tokens j of w_i^{level(i, j)} q_i P_ij k_j^T v_j / sqrt(K)
/// P_ij    = e^{g_i + .. + g_{j+1}}             or products of e^g (I - beta k^T k), and beta v for v
/// y       = (rms_norm(o) silu(x W_g)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, g, beta, w^l
///              ┌─ decay ─┐   ┌─ erase ──────────────────────┐   ┌─ write ────────────────┐
/// S_{t-1}^l ──>│ e^g S^l │──>│ - k^T beta k S^l, delta rule │──>│ + k^T v, or k^T beta v │──┬──> S_t^l
///              └─────────┘   └──────────────────────────────┘   └────────────────────────┘  │
///                                                                     ┌─ read ───────────┐  │
///                                       y_t <── W_o <── norm, gate <──│ sum of w^l q S^l │<─┘
///                                                                     └──────────────────┘
/// ```
/// Erasing is of the delta rule alone. The levels of the tokens before one are the blocks of a Fenwick tree:
/// two blocks that become one are added. Tokens too far back for L levels are all of the last.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, (L - 1) V]`, the
/// levels side by side, f32; `conv_states`, the last W - 1 inputs of each short convolution; `position`, tokens
/// seen. After T tokens those levels hold something whose powers of 2 T is a sum of. g is a natural log of
/// the share kept, for each token and head, at most 0. beta is a share of the error that is corrected, 0 to
/// 1.
/// # Errors
/// [`LogLinearAttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads`
/// of 0, `heads` that do not divide D while `key_width` is left out, an `expand_v` that makes V no whole
/// number, `levels` outside 2 to 32, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Guo et al., arXiv 2506.04761, and flash-linear-attention. `scale` starts as 1, A uniform in 0 to 16, steps
/// log-uniform in 0.001 to 0.1.
/// # Departures
/// Without the delta rule it is the recurrence of log-linear Mamba-2, but for its factor dt of values; with
/// it log-linear Gated DeltaNet. The block is Gated DeltaNet's for both.
#[derive(Module, Debug)]
pub struct LogLinearAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    b_proj: Option<Linear<B>>,
    l_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    /// `[H L]`.
    level_scale: Param<Tensor<B, 1>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for LogLinearAttention<B> {
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
        let decay = LogDecayParams::new(&self.a_log, &self.dt_bias);
        let gates = [Projection::log_decay(&self.a_proj, decay), Projection::plain(&self.l_proj)];
        let optional = [
            self.b_proj.as_ref().map(|proj| Projection::beta(proj, 1.0)),
            self.g_proj.as_ref().map(Projection::plain),
        ];
        let (Qkv { q, k, v }, [g, levels], [beta, gate]) =
            self.qkv().project_some(&x, gates, optional, &mut past.conv_states);
        let (scale, dtype) = ((q.dims()[3] as f64).powf(-0.5), v.dtype());
        let weights = softplus(accumulator(levels) * self.level_scale.val().unsqueeze());
        let weights = split_heads(weights, self.heads);
        let (o, memory) = Leveled { q: q * scale, k, v, weights, g, beta }
            .attend(past.position, past.memory.take());
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(typed(o, dtype), gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> LogLinearAttention<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let qkv = ConvQkv::convolved(projections, convolutions, [self.heads; 3]).silu();
        if self.b_proj.is_some() { qkv.unit(1.0) } else { qkv }
    }
}
