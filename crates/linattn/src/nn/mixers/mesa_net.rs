//! MesaNet. Recurrence, shapes and source: [`MesaNet`].

use super::{MatrixPast, MatrixState, TokenMixer, key_width, linear_flops, memory_cost};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, softplus,
};
use crate::nn::projection::Projection;
use crate::nn::recurrence::mesa;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{self, Activation, LinearAttentionBackend, MesaInputs, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`MesaNet`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MesaNetConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Lower bound of lambda, which starts at 1.
    pub lambda_lower_bound: f64,
    /// Iterations of the conjugate gradients.
    pub cg_steps: usize,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether memories decay.
    pub forget_gate: bool,
    /// Whether tokens count by a gate, or all alike.
    pub input_gate: bool,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for MesaNetConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            lambda_lower_bound: 0.25,
            cg_steps: 30,
            conv_size: 4,
            forget_gate: true,
            input_gate: true,
            output_gate: false,
            norm_eps: 1e-5,
        }
    }
}

impl MesaNetConfig {
    /// K.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if !(0.0..1.0).contains(&self.lambda_lower_bound) {
            let want = "at least 0 and below 1";
            return Err(ConfigError::new("lambda_lower_bound", self.lambda_lower_bound, want));
        }
        positive("cg_steps", self.cg_steps)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<MesaNet<B>, ConfigError> {
        let keys = self.heads * self.resolve(d_model)?;
        let project = || linear(d_model, keys, device);
        let gate = || linear_with_bias(d_model, self.heads, device);
        let conv = || ShortConvolution::optional(keys, self.conv_size, device);
        // The softplus of this is 1 less the bound.
        let ridge = (1.0 - self.lambda_lower_bound).exp_m1().ln();
        Ok(MesaNet {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            a_proj: self.forget_gate.then(gate),
            b_proj: self.input_gate.then(gate),
            lambda_params: Initializer::Constant { value: ridge }.init([keys], device),
            q_conv1d: conv(),
            k_conv1d: conv(),
            g_proj: self.output_gate.then(project),
            o_norm: GatedRmsNorm::new(keys / self.heads, self.norm_eps, device),
            o_proj: linear(keys, d_model, device).into(),
            heads: self.heads,
            lambda_lower_bound: self.lambda_lower_bound,
            cg_steps: self.cg_steps,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let keys = self.heads * width;
        let mut cost = memory_cost(self.heads, width, 2 * width, false);
        // Of each iteration: the product with H, and five passes over rows.
        cost.flops_per_token += (self.cg_steps * keys * (2 * width + 10)) as u64;
        let gates = usize::from(self.forget_gate) + usize::from(self.input_gate);
        let inward = keys * if self.output_gate { 4 } else { 3 } + gates * self.heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(keys, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys);
        Ok(cost)
    }
}

/// MesaNet: a query reads the least-squares fit of all values so far to their keys.
///
/// # Recurrence
/// ```text
/// q, k   = silu(conv(x W)), each of length 1
/// v      = x W_v
/// beta   = sigmoid(x W_b + b_b)                a number for every head
/// g      = log_sigmoid(x W_a + b_a)            a number for every head
/// lambda = softplus(lambda_params) + lambda_lower_bound
/// H      = e^g H + beta k^T k
/// G      = e^g G + beta k^T v
/// y      = (rms_norm(q (H + diag(lambda))^-1 G) [silu(x W_g)]) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, beta, g
///                                ┌─ decay ┐   ┌─ write ──────┐
/// H_{t-1}, G_{t-1} ─────────────>│ e^g H  │──>│ + beta k^T k │──┬──> H_t, G_t
///                                │ e^g G  │   │ + beta k^T v │  │
///                                └────────┘   └──────────────┘  │
///                                ┌─ read ────────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ q (H + diag(lambda))^-1 G │<─┘
///                                └───────────────────────────┘
/// ```
/// The equations are solved by conjugate gradients from zero, over whole sequences as token by token, with a
/// fixed number of iterations; there is no scaling of q, which the norm would undo. The gradient is that of
/// the solution, by one more solve: see [`ops::mesa`](fn@crate::ops::mesa).
///
/// Without its two gates, g = 0 and beta = 1, it is the Mesa layer of von Oswald et al., arXiv 2309.05858,
/// there computed as recursive least squares: `P = P - P k^T k P / (1 + k P k^T)`, P from `diag(lambda)^-1`.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, 2 K]`, H and G side
/// by side, f32; `conv_states`, the last W - 1 inputs of the short convolutions of q and k; `position`, tokens
/// seen. g is a natural log of the share kept, for each token and head, at most 0. beta is the weight of a
/// token, 0 to 1; lambda is added to the diagonal of H, for each head and channel.
/// # Errors
/// [`MesaNetConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, a `lambda_lower_bound` outside 0 to 1,
/// `cg_steps` of 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2506.05233.
/// # Departures
/// flash-linear-attention adds 1e-5 to what its iterations divide by, and stops short of the solution; these
/// go on to it.
#[derive(Module, Debug)]
pub struct MesaNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Option<Linear<B>>,
    b_proj: Option<Linear<B>>,
    /// `[H K]`.
    lambda_params: Param<Tensor<B, 1>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    lambda_lower_bound: f64,
    #[module(skip)]
    cg_steps: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for MesaNet<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, _], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let optional = [
            self.b_proj.as_ref().map(|proj| Projection::beta(proj, 1.0)),
            self.a_proj.as_ref().map(Projection::plain),
            self.g_proj.as_ref().map(Projection::plain),
        ];
        let (Qkv { q, k, v }, [], [beta, g, gate]) =
            self.qkv().project_some(&x, [], optional, &mut past.conv_states);
        let (key_width, dtype) = (k.dims()[3], v.dtype());
        let lambda = softplus(self.lambda_params.val()) + self.lambda_lower_bound;
        // The equations are solved in f32 at least.
        let [q, k, v] = [q, k, v].map(accumulator);
        let zeros = || Tensor::zeros([batch, tokens, self.heads], (&x.device(), q.dtype()));
        let inputs = MesaInputs {
            beta: beta.unwrap_or_else(|| zeros() + 1.0),
            g: g.map_or_else(zeros, |g| ops::log_sigmoid(g, 1.0)),
            q,
            k,
            v,
            lambda: lambda.reshape([self.heads, key_width]),
            iterations: self.cg_steps,
        };
        let (o, memory) = mesa(inputs, past.memory.take());
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(typed(o, dtype), gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> MesaNet<B> {
    /// Values have neither convolution nor activation.
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &None];
        let silu = Some(Activation::Silu);
        ConvQkv::convolved(projections, convolutions, [self.heads; 3])
            .activated([silu, silu, None])
            .unit(1.0)
    }
}
