//! DeltaNet and Gated DeltaNet.
//! ```text
//! q, k, v = silu(conv(x W))   k, q of length 1, q / sqrt(K)
//! beta    = sigmoid(x W_b)    (times 2 for eigenvalues down to -1)
//! g       = -exp(A_log) softplus(x W_a + dt_bias)        gated only
//! S       = e^g (I - beta k^T k) S + beta k^T v
//! y       = (rms_norm(q S) [silu(x W_g)]) W_o
//! ```
//! Sources: arXiv 2406.06484 (DeltaNet), 2412.06464 (Gated DeltaNet), 2411.12537 (negative
//! eigenvalues). A starts uniform in 0 to 16, as the authors' code has it, steps log-uniform in 0.001 to
//! 0.1.

use super::{MatrixState, Widths, head_widths, linear_flops, memory_cost};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{GatedRmsNorm, check_epsilon, linear, merge_heads, split_heads};
use crate::nn::projection::{DecayParams, Projection, head_norm, project};
use crate::nn::{ConfigError, Cost, Linear, check_chunk};
use crate::ops::{
    self, ColumnKind, DEFAULT_CHUNK, Decay, DeltaRule, LinearAttentionBackend, OpResult,
};
use burn::module::{Module, Param};
use burn::tensor::{Distribution, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Least A: the logarithm of 0 is no number.
const LEAST_A: f64 = 1e-6;

/// DeltaNet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaNetConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K; by default 1, and 2 when gated.
    pub expand_v: Option<f64>,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output; by default only when gated.
    pub output_gate: Option<bool>,
    /// Lets beta reach 2, and the state's eigenvalues -1.
    pub allow_neg_eigval: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
    /// Tokens a chunk. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for DeltaNetConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: None,
            conv_size: 4,
            output_gate: None,
            allow_neg_eigval: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

/// Gated DeltaNet: the same keys as [`DeltaNetConfig`], and a decay that depends on the data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GatedDeltaNetConfig(pub DeltaNetConfig);

/// A [`DeltaNet`] with a decay.
pub type GatedDeltaNet<B> = DeltaNet<B>;

impl DeltaNetConfig {
    /// `heads` heads of `key_width`, everything else as by default.
    pub fn new(heads: usize, key_width: usize) -> Self {
        Self { heads, key_width: Some(key_width), ..Default::default() }
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<DeltaNet<B>, ConfigError> {
        self.build(d_model, false, device)
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        self.count(d_model, false)
    }

    fn widths(&self, d_model: usize, gated: bool) -> Result<Widths, ConfigError> {
        let expand_v = self.expand_v.unwrap_or(if gated { 2.0 } else { 1.0 });
        let widths = head_widths(self.heads, self.value_heads, self.key_width, expand_v, d_model)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        Ok(widths)
    }

    fn build<B: Backend>(
        &self,
        d_model: usize,
        gated: bool,
        device: &B::Device,
    ) -> Result<DeltaNet<B>, ConfigError> {
        let Widths { heads, value, keys, values, .. } = self.widths(d_model, gated)?;
        let output_gate = self.output_gate.unwrap_or(gated);
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(DeltaNet {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            b_proj: project(heads),
            a_proj: gated.then(|| project(heads)),
            a_log: gated.then(|| Param::from_tensor(fresh_a_log(heads, 0.0, device))),
            dt_bias: gated.then(|| Param::from_tensor(fresh_dt_bias(heads, device))),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device),
            key_heads: self.heads,
            heads,
            beta_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
            chunk: self.chunk,
        })
    }

    fn count(&self, d_model: usize, gated: bool) -> Result<Cost, ConfigError> {
        let Widths { heads, key, value, keys, values } = self.widths(d_model, gated)?;
        let output_gate = self.output_gate.unwrap_or(gated);
        let mut cost = memory_cost(heads, key, value, true);
        let gates = heads * if gated { 2 } else { 1 };
        let inward = 2 * keys + values * if output_gate { 2 } else { 1 } + gates;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

impl GatedDeltaNetConfig {
    /// `heads` heads of `key_width`, everything else as by default.
    pub fn new(heads: usize, key_width: usize) -> Self {
        Self(DeltaNetConfig::new(heads, key_width))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GatedDeltaNet<B>, ConfigError> {
        self.0.build(d_model, true, device)
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        self.0.count(d_model, true)
    }
}

/// ln A, A uniform in `least` to 16: how fast a head forgets at most. Where it is in 0 to 16, one head in
/// sixteen hardly forgets.
pub(super) fn fresh_a_log<B: Backend>(
    heads: usize,
    least: f64,
    device: &B::Device,
) -> Tensor<B, 1> {
    let a = Tensor::random([heads], Distribution::Uniform(least, 16.0), device);
    a.clamp_min(LEAST_A).log()
}

/// The inverse softplus of step sizes that are log-uniform in 0.001 to 0.1.
pub(super) fn fresh_dt_bias<B: Backend>(heads: usize, device: &B::Device) -> Tensor<B, 1> {
    let log_steps = Distribution::Uniform(0.001f64.ln(), 0.1f64.ln());
    inverse_softplus(Tensor::random([heads], log_steps, device).exp())
}

/// ln(e^x - 1), as x + ln(1 - e^-x), which does not overflow.
pub(super) fn inverse_softplus<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    x.clone() + (x.neg().exp().neg() + 1.0).log()
}

/// DeltaNet, and Gated DeltaNet where `a_proj` is there. `D -> D`.
#[derive(Module, Debug)]
pub struct DeltaNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    b_proj: Linear<B>,
    a_proj: Option<Linear<B>>,
    a_log: Option<Param<Tensor<B, 1>>>,
    dt_bias: Option<Param<Tensor<B, 1>>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: Linear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    beta_scale: f64,
    #[module(skip)]
    chunk: usize,
}

forward_and_step!(DeltaNet, ops::delta_rule, ops::delta_rule_step);

impl<B: LinearAttentionBackend> DeltaNet<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        op: impl FnOnce(DeltaRule<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let tokens = x.dims()[1];
        let (memory, mut before, position) = MatrixState::parts(state);
        let mut tails = vec![];
        let inputs =
            project(&x, &self.projections(), self.decay().as_ref(), &mut before, &mut tails);
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("an output for each projection");
        let heads = |x, heads| split_heads(x, heads);
        let (q, k) = (heads(next(), self.key_heads), heads(next(), self.key_heads));
        let (v, beta) = (heads(next(), self.heads), next());
        let g = self.a_proj.as_ref().map(|_| Decay::Scalar(next()));
        let gate = self.g_proj.as_ref().map(|_| heads(next(), self.heads));
        let (o, memory) = op(DeltaRule { g, ..DeltaRule::new(q, k, v, beta) }, memory)
            .expect("the projections made the shapes");
        let y = self.o_proj.forward(merge_heads(self.o_norm.forward(o, gate)));
        (y, MatrixState { memory, tails, position: position + tokens })
    }

    /// q, k, v, beta, then log decay and output gate where there are any.
    fn projections(&self) -> Vec<Projection<'_, B>> {
        let keys = self.q_proj.weight.dims()[1];
        let scale = ((keys / self.key_heads) as f64).powf(-0.5);
        let norm = |factor| head_norm(keys, self.key_heads, factor);
        let beta = ColumnKind::Beta { scale: self.beta_scale };
        let convolved = [
            Projection::silu(&self.q_proj, &self.q_conv1d, norm(scale)),
            Projection::silu(&self.k_proj, &self.k_conv1d, norm(1.0)),
            Projection::silu(&self.v_proj, &self.v_conv1d, None),
            Projection::plain(&self.b_proj, beta),
        ];
        let decay = self.a_proj.as_ref().map(|a| Projection::plain(a, ColumnKind::LogDecay));
        let gate = self.g_proj.as_ref().map(|g| Projection::plain(g, ColumnKind::Copy));
        convolved.into_iter().chain(decay).chain(gate).collect()
    }

    fn decay(&self) -> Option<DecayParams<'_, B>> {
        let (a_log, dt_bias) = (self.a_log.as_ref()?, self.dt_bias.as_ref()?);
        Some(DecayParams { a_log, dt_bias })
    }
}

/// `-exp(a_log) softplus(x + dt_bias)`, `[B, T, H]`, f32 at least.
pub(super) fn log_decay<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    a_log: &Param<Tensor<B, 1>>,
    dt_bias: &Param<Tensor<B, 1>>,
) -> Tensor<B, 3> {
    ops::log_gates(x, a_log.val(), dt_bias.val())
}
