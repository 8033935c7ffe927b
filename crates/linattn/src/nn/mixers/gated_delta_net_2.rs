//! Gated DeltaNet-2. Recurrence, shapes and source: [`GatedDeltaNet2`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, share_heads, split_heads,
};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{self, Decay, DeltaRuleInputs, GateActivation, LinearAttentionBackend};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`GatedDeltaNet2`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedDeltaNet2Config {
    /// Heads of queries and keys, and of what belongs to them: erasing and decay.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Inner width of the two-layer projections of decay and output gate; V by default.
    pub gate_rank: Option<usize>,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Lets the erase gate reach 2, and the state's eigenvalues -1.
    pub allow_neg_eigval: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for GatedDeltaNet2Config {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            gate_rank: None,
            conv_size: 4,
            allow_neg_eigval: false,
            norm_eps: 1e-5,
        }
    }
}

impl GatedDeltaNet2Config {
    /// Widths, and the inner width of the two-layer projections.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(Widths, usize), ConfigError> {
        let widths =
            head_widths(self.heads, self.value_heads, self.key_width, self.expand_v, d_model)?;
        let rank = positive("gate_rank", self.gate_rank.unwrap_or(widths.value))?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok((widths, rank))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GatedDeltaNet2<B>, ConfigError> {
        let (Widths { heads, value, keys, values, .. }, rank) = self.resolve(d_model)?;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(GatedDeltaNet2 {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            f_proj: vec![project(rank), linear(rank, keys, device)],
            b_proj: project(keys),
            w_proj: project(values),
            a_log: fresh_a_log(self.heads, 1.0, device),
            dt_bias: fresh_dt_bias(keys, device),
            g_proj: vec![project(rank), linear_with_bias(rank, values, device)],
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            key_heads: self.heads,
            heads,
            erase_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (Widths { heads, key, value, keys, values }, rank) = self.resolve(d_model)?;
        let mut cost = memory_cost(heads, key, value, true);
        cost.flops_per_token += linear_flops(d_model, 3 * keys + 2 * values + 2 * rank)
            + linear_flops(rank, keys + values)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Gated DeltaNet-2: a delta rule that gates erasing and writing apart, channel by channel.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W))   k, q of length 1, q / sqrt(K)
/// b       = sigmoid(x W_b)    [K]  erase     (times 2 for eigenvalues down to -1)
/// w       = sigmoid(x W_w)    [V]  write
/// g       = -exp(A_log) softplus(x W_f0 W_f1 + dt_bias)      [K] for every head
/// S       = (I - k^T (b * k)) diag(e^g) S + k^T (w * v)
/// y       = (rms_norm(q S) sigmoid(x W_g0 W_g1 + c)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, b, w, g
///            ┌─ decay ─────┐   ┌─ erase ─────────┐   ┌─ write ───────┐
/// S_{t-1} ──>│ diag(e^g) S │──>│ - k^T (b * k) S │──>│ + k^T (w * v) │──┬──> S_t
///            └─────────────┘   └─────────────────┘   └───────────────┘  │
///                                                            ┌─ read ┐  │
///                              y_t <── W_o <── norm, gate <──│ q S   │<─┘
///                                                            └───────┘
/// ```
/// With b and w equal to one number it is Kimi Delta Attention.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. b and w are shares that are
/// erased and written, for each channel of a key and of a value, 0 to 1, b to 2 with `allow_neg_eigval`. g is
/// a natural log of the share of a row that is kept, for each token, head and key channel, at most 0.
/// # Errors
/// [`GatedDeltaNet2Config::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an
/// `expand_v` that makes V no whole number, a `gate_rank` of 0, a `conv_size` of 1 or a `norm_eps` below
/// 1e-37.
/// # Source
/// arXiv 2605.22791.
#[derive(Module, Debug)]
pub struct GatedDeltaNet2<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    f_proj: Vec<Linear<B>>,
    b_proj: Linear<B>,
    w_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    g_proj: Vec<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    erase_scale: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for GatedDeltaNet2<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, _], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let gates = [&self.b_proj, &self.w_proj, &self.f_proj[0], &self.g_proj[0]];
        let (Qkv { q, k, v }, [erase, write, f, gate]) =
            self.qkv().project(&x, gates.map(Projection::plain), &mut past.conv_states);
        let gated = |x: Tensor<B, 4>, gate| {
            let heads = x.dims()[2];
            ops::gate(x, split_heads(gate, heads), GateActivation::Sigmoid)
        };
        let erase = share_heads(gated(k.clone(), erase) * self.erase_scale, self.heads);
        let g = LogDecayParams::new(&self.a_log, &self.dt_bias).of_rows(self.f_proj[1].forward(f));
        // Erasing and writing have their gates already: all of the rest is corrected.
        let beta = Tensor::ones([batch, tokens, self.heads], (&x.device(), g.dtype()));
        let inputs = DeltaRuleInputs {
            erase: Some(erase),
            g: Some(Decay::Vector(share_heads(g, self.heads))),
            ..DeltaRuleInputs::new(q, k, gated(v, write), beta)
        };
        let (o, memory) = delta_rule(inputs, past.memory.take(), past.conv_states.lengths());
        let gate = self.g_proj[1].forward(gate);
        let y = GatedOutput::sigmoid(&self.o_norm, &self.o_proj).forward(o, Some(gate));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> GatedDeltaNet2<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        ConvQkv::convolved(projections, convolutions, heads).silu().scaled()
    }
}
