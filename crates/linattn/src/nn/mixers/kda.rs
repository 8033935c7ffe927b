//! Kimi Delta Attention. Recurrence, shapes and source: [`Kda`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::key_preconditioner::{KeyPreconditioner, preconditioner_cost, written};
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, Shared, is_default, positive};
use crate::ops::{Decay, DeltaRuleInputs, LinearAttentionBackend};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Kda`], Kimi Delta Attention. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KdaConfig {
    /// Heads of queries and keys.
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
    /// Lets beta reach 2, and the state's eigenvalues -1.
    pub allow_neg_eigval: bool,
    /// Whether keys are written on the scale of those before them.
    #[serde(skip_serializing_if = "is_default")]
    pub preconditioner: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for KdaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            gate_rank: None,
            conv_size: 4,
            allow_neg_eigval: false,
            preconditioner: false,
            norm_eps: 1e-5,
        }
    }
}

impl KdaConfig {
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
    ) -> Result<Kda<B>, ConfigError> {
        let (Widths { heads, key, value, keys, values }, rank) = self.resolve(d_model)?;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(Kda {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            f_proj: vec![project(rank), linear(rank, heads * key, device)],
            b_proj: project(heads),
            a_log: fresh_a_log(heads, 1.0, device),
            dt_bias: fresh_dt_bias(heads * key, device),
            g_proj: vec![project(rank), linear_with_bias(rank, values, device)],
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            preconditioner: self
                .preconditioner
                .then(|| KeyPreconditioner::new(d_model, self.heads, 1.0, device)),
            key_heads: self.heads,
            heads,
            beta_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (Widths { heads, key, value, keys, values }, rank) = self.resolve(d_model)?;
        let mut cost = memory_cost(heads, key, value, true);
        cost.flops_per_token += linear_flops(d_model, 2 * keys + values + heads + 2 * rank)
            + linear_flops(rank, heads * key + values)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        if self.preconditioner {
            cost += preconditioner_cost(d_model, self.heads, key);
        }
        Ok(cost)
    }
}

/// Kimi Delta Attention (KDA): Gated DeltaNet with a decay for every row of the state.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W))   k, q of length 1, q / sqrt(K)
/// beta    = sigmoid(x W_b)    (times 2 for eigenvalues down to -1)
/// g       = -exp(A_log) softplus(x W_f0 W_f1 + dt_bias)      [K] for every head
/// S       = (I - beta k^T k) diag(e^g) S + beta k^T v
/// y       = (rms_norm(q S) sigmoid(x W_g0 W_g1 + b)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, beta, g
///            ┌─ decay ─────┐   ┌─ erase ────────┐   ┌─ write ──────┐
/// S_{t-1} ──>│ diag(e^g) S │──>│ - beta k^T k S │──>│ + beta k^T v │──┬──> S_t
///            └─────────────┘   └────────────────┘   └──────────────┘  │
///                                                          ┌─ read ┐  │
///                            y_t <── W_o <── norm, gate <──│ q S   │<─┘
///                                                          └───────┘
/// ```
/// Decays and beta belong to value heads; keys, to key heads. `preconditioner` writes a key on the scale of
/// those before it, and the key itself erases.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution, and of the preconditioner its sums, `[B, 1, H K]` of key
/// heads; `position`, tokens seen. beta is a share of the error that is corrected, 0 to 1, or to 2 with
/// `allow_neg_eigval`. g is a natural log of the share of a row that is kept, for each token, head and key
/// channel, at most 0.
/// # Errors
/// [`KdaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an
/// `expand_v` that makes V no whole number, a `gate_rank` of 0, a `conv_size` of 1 or a `norm_eps` below
/// 1e-37.
/// # Source
/// Kimi Linear, arXiv 2510.26692; the preconditioner from arXiv 2604.21100.
#[derive(Module, Debug)]
pub struct Kda<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    f_proj: Vec<Linear<B>>,
    b_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    g_proj: Vec<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    preconditioner: Option<KeyPreconditioner<B>>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    beta_scale: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Kda<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn varlen(&self) -> Varlen {
        match self.preconditioner {
            Some(_) => Varlen::PerSequence, // its scan has one start
            None => Varlen::Packed,
        }
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let beta = Projection::beta(&self.b_proj, self.beta_scale);
        let [f, gate] = [&self.f_proj[0], &self.g_proj[0]].map(Projection::plain);
        let optional = KeyPreconditioner::projections(&self.preconditioner);
        let (Qkv { q, k, v }, [beta, f, gate], gates) =
            self.qkv().project_some(&x, [beta, f, gate], optional, &mut past.conv_states);
        let (k, erase) = written(&self.preconditioner, gates, k, self.heads, &mut past.conv_states);
        let g = LogDecayParams::new(&self.a_log, &self.dt_bias).of_rows(self.f_proj[1].forward(f));
        let inputs = DeltaRuleInputs { erase, ..DeltaRuleInputs::new(q, k, v, beta) };
        let inputs = inputs.with_decay(Decay::Vector(g));
        let (o, memory) = delta_rule(inputs, past.memory.take(), past.conv_states.lengths());
        let gate = self.g_proj[1].forward(gate);
        let y = GatedOutput::sigmoid(&self.o_norm, &self.o_proj).forward(o, Some(gate));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Kda<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        ConvQkv::convolved(projections, convolutions, heads).silu().scaled()
    }
}
