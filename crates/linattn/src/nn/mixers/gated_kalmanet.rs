//! Gated KalmaNet. Recurrence, shapes and source: [`GatedKalmaNet`].

use super::{MatrixPast, MatrixState, TokenMixer, key_width, linear_flops, memory_cost};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::gated_kalman;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{KalmanInputs, LinearAttentionBackend, accumulator, typed};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Added to beta: a token that counts for nothing would leave the first H without an inverse.
const LEAST_BETA: f64 = 1e-6;

/// Config of [`GatedKalmaNet`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedKalmaNetConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// The ridge over the norm of H.
    pub ridge: f64,
    /// Iterations of the solve.
    pub iterations: usize,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for GatedKalmaNetConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            ridge: 0.02,
            iterations: 30,
            conv_size: 4,
            output_gate: true,
            norm_eps: 1e-6,
        }
    }
}

impl GatedKalmaNetConfig {
    /// K.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if !(self.ridge > 0.0 && self.ridge.is_finite()) {
            return Err(ConfigError::new("ridge", self.ridge, "above 0"));
        }
        positive("iterations", self.iterations)?;
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
    ) -> Result<GatedKalmaNet<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let (heads, inner) = (self.heads, self.heads * width);
        let project = || linear(d_model, inner, device);
        let conv = || ShortConvolution::optional(inner, self.conv_size, device);
        Ok(GatedKalmaNet {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            a_proj: linear(d_model, heads, device),
            b_proj: linear_with_bias(d_model, heads, device),
            alpha_proj: linear_with_bias(d_model, heads, device),
            a_log: fresh_a_log(heads, 0.0, device),
            dt_bias: fresh_dt_bias(heads, device),
            q_conv1d: conv(),
            k_conv1d: conv(),
            v_conv1d: conv(),
            g_proj: self.output_gate.then(project),
            o_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(inner, d_model, device).into(),
            heads,
            ridge: self.ridge,
            iterations: self.iterations,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let inner = self.heads * width;
        let mut cost = memory_cost(self.heads, width, 2 * width, false);
        // The norm's product with H; of each iteration a product, and four passes over rows.
        cost.flops_per_token += (2 * inner * width) as u64;
        cost.flops_per_token += (self.iterations * inner * (2 * width + 8)) as u64;
        let inward = inner * if self.output_gate { 4 } else { 3 } + 3 * self.heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(inner, d_model);
        cost += convolution_cost(self.conv_size, 3 * inner);
        Ok(cost)
    }
}

/// Gated KalmaNet: a query moves, by a share, to where it reads the ridge regression of all values so far.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(conv(x W)), q and k of length 1
/// beta    = sigmoid(x W_b + b_b),  alpha = sigmoid(x W_alpha + b_alpha)      numbers for every head
/// g       = -exp(A_log) softplus(x W_a + dt_bias)                            a number for every head
/// H       = e^g H + (beta k)^T (beta k)
/// U       = e^g U + (beta k)^T (beta v)
/// x       = q (H + ridge |H| I)^-1           the Frobenius norm; by Chebyshev's iteration
/// y       = (rms_norm((q + alpha (x - q)) U / sqrt(K)) [silu(x W_g)]) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, beta, alpha, g
///                             ┌─ decay ┐   ┌─ write ───────────────┐
/// H_{t-1}, U_{t-1} ──────────>│ e^g H  │──>│ + (beta k)^T (beta k) │──┬──> H_t, U_t
///                             │ e^g U  │   │ + (beta k)^T (beta v) │  │
///                             └────────┘   └───────────────────────┘  │
///                                ┌─ read ──────────────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ x = q (H + ridge |H| I)^-1      │<─┘
///                                │ (q + alpha (x - q)) U / sqrt(K) │
///                                └─────────────────────────────────┘
/// ```
/// The iterations stop short of the solution, by at most 1 / 1000 with as many as by default; their gradient
/// is that of the solution, as in the authors' code: see [`ops::gated_kalman`](crate::ops::gated_kalman).
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, 2 K]`, H and U side
/// by side, f32; `conv_states`, the last W - 1 inputs of each short convolution; `position`, tokens seen. g is a
/// natural log of the share kept, for each token and head, at most 0. beta is the weight of a token and alpha
/// the share of the solution, 0 to 1.
/// # Errors
/// [`GatedKalmaNetConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, a `ridge` that is not above 0, `iterations` of
/// 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2511.21016 and its authors' code in awslabs' Hybrid Model Factory, which too adds 1e-6 to beta. A
/// starts uniform in 0 to 16, steps log-uniform in 0.001 to 0.1.
/// # Departures
/// The authors' code adds 1e-6 to the length of q and k; here it is added to its square.
#[derive(Module, Debug)]
pub struct GatedKalmaNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    b_proj: Linear<B>,
    alpha_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    ridge: f64,
    #[module(skip)]
    iterations: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for GatedKalmaNet<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let gates = [
            Projection::beta(&self.b_proj, 1.0),
            Projection::beta(&self.alpha_proj, 1.0),
            Projection::log_decay(&self.a_proj, LogDecayParams::new(&self.a_log, &self.dt_bias)),
        ];
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [beta, alpha, g], [gate]) =
            self.qkv().project_some(&x, gates, [gate], &mut past.conv_states);
        let dtype = v.dtype();
        // The equations are solved in f32 at least.
        let [q, k, v] = [q, k, v].map(accumulator);
        let beta = beta.unsqueeze_dim::<4>(3) + LEAST_BETA;
        let (k, v) = (k * beta.clone(), v * beta);
        let inputs =
            KalmanInputs { q, k, v, alpha, g, ridge: self.ridge, iterations: self.iterations };
        let (o, memory) = gated_kalman(inputs, past.memory.take());
        let scale = (o.dims()[3] as f64).powf(-0.5);
        let y =
            GatedOutput::silu(&self.o_norm, &self.o_proj).forward(typed(o * scale, dtype), gate);
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> GatedKalmaNet<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3]).silu().unit(1.0)
    }
}
