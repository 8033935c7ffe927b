//! Griffin's recurrent block. Recurrence, shapes and source: [`RgLru`].

use super::{
    Stack, TokenMixer, VectorPast, VectorState, block_width, linear_flops, recurrent_width,
    scan_cost,
};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{BlockDiagonal, ResidualLinear, gelu_activation, normal_linear, softplus};
use crate::nn::log_decay::inverse_softplus;
use crate::nn::projection::{Projection, project};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, GateActivation, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Distribution, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// c: how much stronger than its parameter the decay is where its gate is open.
const DECAY_POWER: f64 = 8.0;
/// Variance of the convolution's fresh taps, all of a channel's together.
const CONVOLUTION_VARIANCE: f64 = 0.01;
/// Least 1 - a^2 that a root is taken of: below it the root's slope has no bound.
const LEAST_SQUARE: f64 = 1e-8;

/// Config of [`RgLru`], Griffin's recurrent block. The layer's page has recurrence, shapes, errors and
/// source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RgLruConfig {
    /// Width of the memory; d_model by default.
    pub width: Option<usize>,
    /// Blocks of the gates' matrices.
    pub heads: usize,
    /// Tokens the short convolution sees, at least 2.
    pub conv_size: usize,
    /// Whether GELU is its approximation by a tanh.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gelu_tanh: bool,
    /// Whether the first token of a text is written as it is, without the root of 1 - a^2.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub first_unscaled: bool,
}

impl Default for RgLruConfig {
    fn default() -> Self {
        Self { width: None, heads: 1, conv_size: 4, gelu_tanh: false, first_unscaled: false }
    }
}

impl RgLruConfig {
    /// Widths of the memory and of a block.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let width = recurrent_width(self.width, d_model)?;
        let block = block_width(self.heads, width)?;
        check_window(self.conv_size, 2)?;
        Ok((width, block))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<RgLru<B>, ConfigError> {
        let (width, block) = self.resolve(d_model)?;
        let zeros = |width: usize| Initializer::Zeros.init([width], device);
        let gate = || BlockDiagonal::new(self.heads, block, block, device).with_bias(zeros(width));
        let linear = |from: usize, to| Linear {
            bias: Some(zeros(to)),
            ..normal_linear(from, to, (from as f64).powf(-0.5), device)
        };
        let std = (CONVOLUTION_VARIANCE / self.conv_size as f64).sqrt();
        let taps = Initializer::Normal { mean: 0.0, std };
        let conv1d = ShortConvolution {
            weight: taps.init([self.conv_size, width], device),
            bias: Some(zeros(width)),
        };
        Ok(RgLru {
            linear_y: linear(d_model, width),
            linear_x: linear(d_model, width),
            conv1d,
            input_gate: gate(),
            a_gate: gate(),
            a_param: Param::from_tensor(fresh_decay(width, device)),
            out_proj: linear(width, d_model).into(),
            gelu: gelu_activation(self.gelu_tanh),
            first_unscaled: self.first_unscaled,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (width, block) = self.resolve(d_model)?;
        let mut cost = scan_cost(width);
        cost.flops_per_token += linear_flops(d_model, 2 * width)
            + linear_flops(width, d_model)
            + 2 * linear_flops(width, block);
        cost += convolution_cost(self.conv_size, width);
        Ok(cost)
    }
}

/// A, `[width]`.
fn fresh_decay<B: Backend>(width: usize, device: &B::Device) -> Tensor<B, 1> {
    let kept = Tensor::<B, 1>::random([width], Distribution::Uniform(0.9, 0.999), device);
    inverse_softplus(kept.log() / -DECAY_POWER)
}

/// Griffin's recurrent block: the real-gated linear recurrent unit (RG-LRU) behind a short convolution.
///
/// A branch of GELU multiplies its output.
///
/// # Recurrence
/// ```text
/// u      = conv(x W_x + b_x)                            no activation
/// r, i   = sigmoid(u W_a + b_a), sigmoid(u W_i + b_i)   W_a, W_i: H blocks on the diagonal
/// ln a   = -8 r softplus(A)
/// h      = a h + sqrt(1 - a^2) (i u)
/// y      = (h gelu(x W_y + b_y)) W_out + b_out
/// ```
/// ```text
/// x_t ──> u, r, i, a
///            ┌─ decay ┐   ┌─ write ───────────────┐
/// h_{t-1} ──>│ a h    │──>│ + sqrt(1 - a^2) (i u) │──┬──> h_t
///            └────────┘   └───────────────────────┘  │
///                                         ┌─ read ┐  │
///  y_t <── W_out <── gelu(x W_y + b_y) <──│ h     │<─┘
///                                         └───────┘
/// ```
/// The released models write the first token of a text without the root before it, as `first_unscaled` asks
/// for; by default it is like any other.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, one vector, `[B, 1, width]`;
/// `conv_states`, the last W - 1 inputs of the short convolution; `position`, tokens seen. a is the share of a
/// channel that is kept, 0 to 1; r and i are gates, 0 to 1.
/// # Errors
/// [`RgLruConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `width` of 0,
/// `heads` that do not divide the width or a `conv_size` below 2.
/// # Source
/// De et al., arXiv 2402.19427; `e^{-8 softplus(A)}` starts uniform in 0.9 to 0.999, as the paper says.
/// Matrices start normal, of variance 1 / fan-in, that of the output 2 / layers times as much where a model
/// rescales what is added to its residual stream; the convolution N(0, 0.01 / W), biases from zero.
/// # Departures
/// The authors' code has `e^{-softplus(A)}` start there, which forgets sooner.
#[derive(Module, Debug)]
pub struct RgLru<B: Backend> {
    linear_y: Linear<B>,
    linear_x: Linear<B>,
    conv1d: ShortConvolution<B>,
    input_gate: BlockDiagonal<B>,
    a_gate: BlockDiagonal<B>,
    /// A, `[width]`.
    a_param: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    gelu: GateActivation,
    #[module(skip)]
    first_unscaled: bool,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for RgLru<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;
    const SCALES_ITSELF: bool = true;

    fn shrink(stack: Stack) -> f64 {
        (2.0 / stack.layers as f64).sqrt()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, mut past) = (x.dims()[1], VectorPast::of(state));
        let projections = [
            Projection::convolved(&self.linear_x, Some((Kept::Input, &self.conv1d)), None, None),
            Projection::plain(&self.linear_y),
        ];
        let [u, gate] = project(&x, projections, &mut past.conv_states);
        let gates = [&self.a_gate, &self.input_gate].map(|gate| gate.forward(u.clone()));
        let [forget, input] = gates.map(|gate| sigmoid(accumulator(gate)));
        let rate: Tensor<B, 3> = softplus(self.a_param.val()).unsqueeze();
        let forget = forget * rate * DECAY_POWER; // -ln a
        let a = forget.clone().neg().exp();
        // 1 - a^2 = (1 + a^2) tanh(-ln a), which is exact where a is nearly 1.
        let square = (a.clone() * a.clone() + 1.0) * forget.tanh();
        let scale = square.clamp_min(LEAST_SQUARE).sqrt();
        let scale = match self.first_unscaled && past.position == 0 {
            true => after_one(scale),
            false => scale,
        };
        let written = scale * (input * accumulator(u));
        let (h, last) = ops::linear_scan(a, written, past.draw(Kept::Hidden))
            .expect("the projections made the shapes");
        let h = typed(h, gate.dtype());
        let y = self.out_proj.forward(ops::gate(h, gate, self.gelu));
        (y, past.then([(Kept::Hidden, last)], tokens))
    }
}

/// `[B, T, D]` with ones in place of the first token.
fn after_one<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    let tokens = x.dims()[1];
    let first = x.clone().narrow(1, 0, 1).ones_like();
    match tokens {
        1 => first,
        _ => cat(vec![first, x.narrow(1, 1, tokens - 1)], 1),
    }
}
