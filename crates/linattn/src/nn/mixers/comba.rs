//! Comba. Recurrence, shapes and source: [`Comba`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, l2_normalize, linear, share_heads,
};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{Decay, DeltaRuleInputs, LinearAttentionBackend, Read, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Comba`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CombaConfig {
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
    /// Whether each head learns what share of its key erases; else the whole key does.
    pub inner_decay: bool,
    /// Where D starts, the share of the key that is taken off the query; 0 for none. Large models
    /// start at 1, small ones do better with 0.02.
    pub output_correction: f64,
    /// Whether queries, keys and what erases are brought to length 1 only after the correction, as
    /// released models have it: `q - D p` with `p = sigmoid(decay) k` of any length, and then all
    /// three. Of the inner decay nothing is then left but its share in the correction.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub norm_last: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for CombaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 2.0,
            conv_size: 4,
            output_gate: true,
            inner_decay: true,
            output_correction: 0.02,
            norm_last: false,
            norm_eps: 1e-5,
        }
    }
}

impl CombaConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths =
            head_widths(self.heads, self.value_heads, self.key_width, self.expand_v, d_model)?;
        check_window(self.conv_size, 0)?;
        if !self.output_correction.is_finite() {
            return Err(ConfigError::new("output_correction", self.output_correction, "finite"));
        }
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
    ) -> Result<Comba<B>, ConfigError> {
        let Widths { heads, value, keys, values, .. } = self.resolve(d_model)?;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        let correction = self.output_correction;
        let constant = |value| -> Param<Tensor<B, 1>> {
            Initializer::Constant { value }.init([self.heads], device)
        };
        Ok(Comba {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            a_proj: project(heads),
            b_proj: project(heads),
            decay: self.inner_decay.then(|| constant(1.0)),
            d: (correction != 0.0).then(|| constant(correction)),
            a_log: fresh_a_log(heads, 0.0, device),
            dt_bias: fresh_dt_bias(heads, device),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: self.output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            key_heads: self.heads,
            heads,
            norm_last: self.norm_last,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { heads, key, value, keys, values } = self.resolve(d_model)?;
        let mut cost = memory_cost(heads, key, value, true);
        let inward = 2 * keys + values * if self.output_gate { 2 } else { 1 } + 2 * heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Comba: a delta rule whose erase key reads the state before its decay, and whose query is corrected by the
/// key.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W))   k, q of length 1
/// beta    = sigmoid(x W_b)
/// g       = -exp(A_log) softplus(x W_a + dt_bias)
/// p       = sigmoid(decay) k                  the erase key, its share learnt for each head
/// S       = e^g S + beta k^T (v - p S)        p S from before the decay
/// y       = (rms_norm((q - D k) S / sqrt(K)) [sigmoid(x W_g)]) W_o
/// ```
/// ```text
/// x_t ──> q, k, p, v, beta, g
///            ┌─ decay ┐   ┌─ erase ──────────────┐   ┌─ write ──────┐
/// S_{t-1} ──>│ e^g S  │──>│ - beta k^T p S_{t-1} │──>│ + beta k^T v │──┬──> S_t
///            └────────┘   └──────────────────────┘   └──────────────┘  │
///                                           ┌─ read ────────────────┐  │
///             y_t <── W_o <── norm, gate <──│ (q - D k) S / sqrt(K) │<─┘
///                                           └───────────────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. beta is a share of the error
/// that is corrected, 0 to 1. g is a natural log of the share kept, for each token and head, at most 0.
/// # Errors
/// [`CombaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, `value_heads` that `heads` do not divide, an
/// `expand_v` that makes V no whole number, a `conv_size` of 1, an `output_correction` that is not finite or
/// a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2506.02475.
#[derive(Module, Debug)]
pub struct Comba<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    b_proj: Linear<B>,
    decay: Option<Param<Tensor<B, 1>>>,
    d: Option<Param<Tensor<B, 1>>>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
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
    #[module(skip)]
    norm_last: bool,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Comba<B> {
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
        let decay = LogDecayParams::new(&self.a_log, &self.dt_bias);
        let gates =
            [Projection::log_decay(&self.a_proj, decay), Projection::beta(&self.b_proj, 1.0)];
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [g, beta], [gate]) =
            self.qkv().project_some(&x, gates, [gate], &mut past.conv_states);
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let (q, k, erase) = self.correct(q, k);
        let erase = erase.map(|erase| share_heads(erase, self.heads));
        let inputs = DeltaRuleInputs {
            erase,
            g: Some(Decay::Scalar(g)),
            read: Read::Before,
            ..DeltaRuleInputs::new(q * scale, k, v, beta)
        };
        let (o, memory) = delta_rule(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::sigmoid(&self.o_norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Comba<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        let qkv = ConvQkv::convolved(projections, convolutions, heads).silu();
        if self.norm_last { qkv } else { qkv.unit(1.0) }
    }

    /// Queries less their correction, keys, and the rows that erase where these are not the keys,
    /// `[B, T, H, K]`. Lengths are 1 already, unless that comes last.
    fn correct(
        &self,
        q: Tensor<B, 4>,
        k: Tensor<B, 4>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>, Option<Tensor<B, 4>>) {
        let dtype = q.dtype();
        let each_head = |share: Tensor<B, 1>| -> Tensor<B, 4> {
            typed(share, dtype).reshape([1, 1, self.key_heads, 1])
        };
        let decay = self.decay.as_ref().map(|decay| each_head(sigmoid(decay.val())));
        let erase = decay.map(|decay| k.clone() * decay);
        let corrected = |q: Tensor<B, 4>, by: &Tensor<B, 4>| match &self.d {
            Some(d) => q - by.clone() * each_head(d.val()),
            None => q,
        };
        if self.norm_last {
            let q = corrected(q, erase.as_ref().unwrap_or(&k));
            return (l2_normalize(q), l2_normalize(k), erase.map(l2_normalize));
        }
        (corrected(q, &k), k, erase)
    }
}
