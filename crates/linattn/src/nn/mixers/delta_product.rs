//! DeltaProduct and Gated DeltaProduct. Recurrence, shapes and source: [`DeltaProduct`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, Widths, head_widths, linear_flops, memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::delta_rule;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{Decay, DeltaRuleInputs, LinearAttentionBackend, cat};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`DeltaProduct`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaProductConfig {
    /// Steps of the delta rule for every token, n.
    pub householder_steps: usize,
    /// Heads.
    pub heads: usize,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a decay that depends on the data comes before the steps: Gated DeltaProduct.
    pub forget_gate: bool,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Lets beta reach 2: a step can reflect, and n of them rotate.
    pub allow_neg_eigval: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for DeltaProductConfig {
    fn default() -> Self {
        Self {
            householder_steps: 2,
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            conv_size: 4,
            forget_gate: false,
            output_gate: false,
            allow_neg_eigval: true,
            norm_eps: 1e-5,
        }
    }
}

impl DeltaProductConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        positive("householder_steps", self.householder_steps)?;
        let widths = head_widths(self.heads, None, self.key_width, self.expand_v, d_model)?;
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
    ) -> Result<DeltaProduct<B>, ConfigError> {
        let Widths { value, keys, values, .. } = self.resolve(d_model)?;
        let n = self.householder_steps;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        let gated = self.forget_gate;
        Ok(DeltaProduct {
            q_proj: project(keys),
            k_proj: project(n * keys),
            v_proj: project(n * values),
            b_proj: project(n * self.heads),
            a_proj: gated.then(|| project(self.heads)),
            a_log: gated.then(|| fresh_a_log(self.heads, 0.0, device)),
            dt_bias: gated.then(|| fresh_dt_bias(self.heads, device)),
            q_conv1d: conv(keys),
            k_conv1d: conv(n * keys),
            v_conv1d: conv(n * values),
            g_proj: self.output_gate.then(|| project(values)),
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            steps: n,
            beta_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let n = self.householder_steps;
        let mut cost = memory_cost(self.heads, key, value, true);
        cost.flops_per_token *= n as u64;
        let gates = self.heads * (n + usize::from(self.forget_gate));
        let inward = keys + n * (keys + values) + gates + if self.output_gate { values } else { 0 };
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, keys + n * (keys + values));
        Ok(cost)
    }
}

/// DeltaProduct: several steps of the delta rule for every token, so that a token turns the state by a
/// product of reflections.
///
/// Gated DeltaProduct, with `forget_gate`, decays the state first.
///
/// # Recurrence
/// ```text
/// for j = 1..n      k_j, v_j, beta_j from projections of their own
///     S = a_j (I - beta_j k_j^T k_j) S + beta_j k_j^T v_j      a_1 = e^g, the others 1
/// y     = (rms_norm(q S) [silu(x W_g)]) W_o                    read once, after the last
/// ```
/// ```text
/// x_t ──> q, g and k_j, v_j, beta_j for j = 1..n
///            ┌─ decay ┐   ┌─ erase ──────────────┐   ┌─ write ────────────┐
/// S_{t-1} ──>│ e^g S  │──>│ - beta_j k_j^T k_j S │──>│ + beta_j k_j^T v_j │──┬──> S_t
///            └────────┘   └──────────────────────┘   └────────────────────┘  │
///                                                                 ┌─ read ┐  │
///                                   y_t <── W_o <── norm, gate <──│ q S   │<─┘
///                                                                 └───────┘
/// ```
/// Erase and write take turns n times, once for each j. The n steps are n tokens to the operation, of which
/// only the last is read.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. beta is a share of the error
/// that is corrected, 0 to 1, or to 2 with `allow_neg_eigval`. g is a natural log of the share kept, for each
/// token and head, at most 0.
/// # Errors
/// [`DeltaProductConfig::init`] gives a [`ConfigError`] with the first key that does not fit:
/// `householder_steps` of 0, `heads` of 0, `heads` that do not divide D while `key_width` is left out, an
/// `expand_v` that makes V no whole number, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2502.10297.
#[derive(Module, Debug)]
pub struct DeltaProduct<B: Backend> {
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
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    steps: usize,
    #[module(skip)]
    beta_scale: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for DeltaProduct<B> {
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
        let beta = Projection::beta(&self.b_proj, self.beta_scale);
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [beta], [g, gate]) =
            self.qkv().project_some(&x, [beta], [self.decay(), gate], &mut past.conv_states);
        let (k, v) = (self.each_step(k), self.each_step(v));
        let beta = self.each_step(beta.unsqueeze_dim(3)).squeeze_dim(3);
        let g = g.map(|g| Decay::Scalar(self.pad(g.unsqueeze_dim(3), false).squeeze_dim(3)));
        let inputs = DeltaRuleInputs { g, ..DeltaRuleInputs::new(self.pad(q, true), k, v, beta) };
        let memory = past.memory.take();
        let lengths = past.conv_states.lengths().map(|lengths| lengths.repeated(self.steps));
        let (o, memory) = match tokens {
            1 => one_after_another(inputs, memory),
            _ => delta_rule(inputs, memory, lengths.as_ref()),
        };
        let o = self.last_steps(o, tokens);
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(o, gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> DeltaProduct<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let several = self.steps * self.heads;
        let heads = [self.heads, several, several];
        ConvQkv::convolved(projections, convolutions, heads).silu().scaled()
    }

    fn decay(&self) -> Option<Projection<'_, B>> {
        let parameters = LogDecayParams::optional(&self.a_log, &self.dt_bias)?;
        Some(Projection::log_decay(self.a_proj.as_ref()?, parameters))
    }

    /// `[B, T, n H, X]` to `[B, T n, H, X]`.
    fn each_step(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, tokens, _, width] = x.dims();
        x.reshape([batch, tokens * self.steps, self.heads, width])
    }

    /// `[B, T, H, X]` to `[B, T n, H, X]`, zeros at every step but the last of a token, or the first.
    fn pad(&self, x: Tensor<B, 4>, last: bool) -> Tensor<B, 4> {
        let [batch, tokens, heads, width] = x.dims();
        let others = [batch, tokens, self.steps - 1, heads, width];
        let x = x.unsqueeze_dim::<5>(2);
        if self.steps > 1 {
            let zeros = Tensor::zeros(others, (&x.device(), x.dtype()));
            let parts = if last { vec![zeros, x] } else { vec![x, zeros] };
            return cat(parts, 2).reshape([batch, tokens * self.steps, heads, width]);
        }
        x.reshape([batch, tokens, heads, width])
    }

    /// `[B, T n, H, V]` to `[B, T, H, V]`: what a token reads.
    fn last_steps(&self, o: Tensor<B, 4>, tokens: usize) -> Tensor<B, 4> {
        let [batch, _, heads, width] = o.dims();
        let o = o.reshape([batch, tokens, self.steps, heads, width]);
        o.narrow(2, self.steps - 1, 1).squeeze_dim(2)
    }
}

/// The steps of one token, each by the recurrence.
fn one_after_another<B: LinearAttentionBackend>(
    x: DeltaRuleInputs<B>,
    mut state: Option<Tensor<B, 4>>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let mut outputs = vec![];
    for j in 0..x.k.dims()[1] {
        let at = |x: &Tensor<B, 4>| x.clone().narrow(1, j, 1);
        let g = x.g.as_ref().map(|g| match g {
            Decay::Scalar(g) => Decay::Scalar(g.clone().narrow(1, j, 1)),
            Decay::Vector(g) => Decay::Vector(at(g)),
        });
        let beta = x.beta.clone().narrow(1, j, 1);
        let step =
            DeltaRuleInputs { g, ..DeltaRuleInputs::new(at(&x.q), at(&x.k), at(&x.v), beta) };
        let (o, next) = delta_rule(step, state, None);
        outputs.push(o);
        state = Some(next);
    }
    let state = state.expect("a token has at least one step");
    (cat(outputs, 1), state)
}
