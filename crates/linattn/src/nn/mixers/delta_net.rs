//! DeltaNet and Gated DeltaNet. Recurrence, shapes and source: `pages/delta_net.md`, the page of
//! [`DeltaNet`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Optional, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::delta_keys::{DeltaKeys, QkActivation, QkNorm};
use crate::nn::gated_output::GatedOutput;
use crate::nn::key_preconditioner::{KeyPreconditioner, preconditioner_cost, written};
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::{Projected, Projection};
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, MixerInput, Shared, is_default};
use crate::ops::{Decay, DeltaRuleInputs, LinearAttentionBackend, accumulator};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`DeltaNet`]. The layer's page has recurrence, shapes, errors and source.
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
    /// Whether a delta step is the exact solution of its differential equation; keys then keep their length.
    #[serde(skip_serializing_if = "is_default")]
    pub exact_step: bool,
    /// Whether keys are written on the scale of those before them.
    #[serde(skip_serializing_if = "is_default")]
    pub preconditioner: bool,
    /// Function of queries and keys.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_activation: QkActivation,
    /// Norm of each head's queries and keys.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm: QkNorm,
    /// Whether beta is learnt; 1 otherwise, or 2 with `allow_neg_eigval`.
    #[serde(skip_serializing_if = "bool::clone")]
    pub use_beta: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
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
            exact_step: false,
            preconditioner: false,
            qk_activation: QkActivation::Silu,
            qk_norm: QkNorm::L2,
            use_beta: true,
            norm_eps: 1e-5,
        }
    }
}

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

    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        self.resolve_as(d_model, false)
    }

    /// `gated` sets defaults.
    pub(super) fn resolve_as(&self, d_model: usize, gated: bool) -> Result<Widths, ConfigError> {
        let expand_v = self.expand_v.unwrap_or(if gated { 2.0 } else { 1.0 });
        let widths = head_widths(self.heads, self.value_heads, self.key_width, expand_v, d_model)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        self.keys().check(widths.key)?;
        match self.preconditioner && self.exact_step {
            true => Err(ConfigError::new("preconditioner", true, "false beside `exact_step`")),
            false => Ok(widths),
        }
    }

    fn keys(&self) -> DeltaKeys {
        let Self { qk_activation: activation, qk_norm: norm, exact_step, .. } = *self;
        DeltaKeys { activation, norm, exact_step }
    }

    pub(super) fn build<B: Backend>(
        &self,
        d_model: usize,
        gated: bool,
        device: &B::Device,
    ) -> Result<DeltaNet<B>, ConfigError> {
        let Widths { heads, value, keys, values, .. } = self.resolve_as(d_model, gated)?;
        let output_gate = self.output_gate.unwrap_or(gated);
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(DeltaNet {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            b_proj: self.use_beta.then(|| project(heads)),
            a_proj: gated.then(|| project(heads)),
            a_log: gated.then(|| fresh_a_log(heads, 0.0, device)),
            dt_bias: gated.then(|| fresh_dt_bias(heads, device)),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            preconditioner: self
                .preconditioner
                .then(|| KeyPreconditioner::new(d_model, self.heads, 0.0, device)),
            key_heads: self.heads,
            heads,
            beta_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
            keys: self.keys(),
        })
    }

    pub(super) fn count(&self, d_model: usize, gated: bool) -> Result<Cost, ConfigError> {
        let Widths { heads, key, value, keys, values } = self.resolve_as(d_model, gated)?;
        let output_gate = self.output_gate.unwrap_or(gated);
        let width = self.keys().check(key)?;
        let mut cost = memory_cost(heads, width, value, true);
        let gates = heads * (usize::from(gated) + usize::from(self.use_beta));
        let inward = 2 * keys + values * if output_gate { 2 } else { 1 } + gates;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        if self.preconditioner {
            cost += preconditioner_cost(d_model, self.heads, width);
        }
        Ok(cost)
    }
}

#[doc = include_str!("pages/delta_net.md")]
#[derive(Module, Debug)]
pub struct DeltaNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    b_proj: Option<Linear<B>>,
    a_proj: Option<Linear<B>>,
    a_log: Option<Param<Tensor<B, 1>>>,
    dt_bias: Option<Param<Tensor<B, 1>>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    preconditioner: Option<KeyPreconditioner<B>>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    beta_scale: f64,
    #[module(skip)]
    keys: DeltaKeys,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for DeltaNet<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn varlen(&self) -> Varlen {
        // The preconditioner's scan has one start.
        if self.preconditioner.is_some() { Varlen::PerSequence } else { Varlen::Packed }
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        self.run_input(&mut MixerInput::of(x), state, shared)
    }

    fn run_input(
        &self,
        x: &mut MixerInput<'_, B>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.tokens(), MatrixPast::of(state, shared));
        let [keep, share] = KeyPreconditioner::projections(&self.preconditioner);
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let optional = [self.beta(), self.decay(), gate, keep, share];
        let memory = self.takes_projected_keys().then_some(&past.memory);
        let (o, memory, gate) = match self.qkv().answer(x, optional, memory, &mut past.conv_states)
        {
            Projected::Answer { o, memory, copied } => (o, memory, copied),
            Projected::Outputs((qkv, optional)) => self.recall(qkv, optional, &mut past),
        };
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> DeltaNet<B> {
    /// Whether keys, queries and beta go into the recurrence as the projections make them.
    fn takes_projected_keys(&self) -> bool {
        self.keys.are_whole() && self.preconditioner.is_none() && self.b_proj.is_some()
    }

    /// The memory's answer, the memory after it, and the gate.
    fn recall(
        &self,
        Qkv { q, k, v }: Qkv<B>,
        [beta, g, gate, keep, share]: Optional<B, 5>,
        past: &mut MatrixPast<B>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>, Option<Tensor<B, 3>>) {
        let [q, k] = self.keys.of([q, k]);
        let beta = beta.unwrap_or_else(|| {
            accumulator(v.clone().narrow(3, 0, 1)).ones_like().squeeze_dim::<3>(3) * self.beta_scale
        });
        let beta = self.keys.step(beta, &k);
        let gates = [keep, share];
        let (k, erase) = written(&self.preconditioner, gates, k, self.heads, &mut past.conv_states);
        let g = g.map(Decay::Scalar);
        let inputs = DeltaRuleInputs { g, erase, ..DeltaRuleInputs::new(q, k, v, beta) };
        let (o, memory) = delta_rule(inputs, past.memory.take(), past.conv_states.lengths());
        (o, memory, gate)
    }

    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        self.keys.projected(ConvQkv::convolved(projections, convolutions, heads))
    }

    fn beta(&self) -> Option<Projection<'_, B>> {
        Some(Projection::beta(self.b_proj.as_ref()?, self.beta_scale))
    }

    fn decay(&self) -> Option<Projection<'_, B>> {
        let parameters = LogDecayParams::optional(&self.a_log, &self.dt_bias)?;
        Some(Projection::log_decay(self.a_proj.as_ref()?, parameters))
    }
}
