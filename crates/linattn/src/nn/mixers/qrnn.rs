//! QRNN. Recurrence, shapes and source: [`Qrnn`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, recurrent_width, scan_cost};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{ResidualLinear, linear, linear_with_bias};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::Module;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Qrnn`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QrnnConfig {
    /// Width of the memory; d_model by default.
    pub width: Option<usize>,
    /// Tokens the gates see, itself counted.
    pub window: usize,
}

impl Default for QrnnConfig {
    fn default() -> Self {
        Self { width: None, window: 2 }
    }
}

impl QrnnConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("window", self.window)?;
        recurrent_width(self.width, d_model)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Qrnn<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        Ok(Qrnn {
            in_proj: linear_with_bias(self.window * d_model, 3 * width, device),
            o_proj: linear(width, d_model, device).into(),
            window: self.window,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let mut cost = scan_cost(width);
        cost.flops_per_token +=
            linear_flops(self.window * d_model, 3 * width) + linear_flops(width, d_model);
        cost.state_bytes += 4 * ((self.window - 1) * d_model) as u64;
        Ok(cost)
    }
}

/// QRNN: gates from a convolution over the last few tokens, and pooling that forgets (fo-pooling).
///
/// # Recurrence
/// ```text
/// z, f, o = tanh(s W_z + b_z), sigmoid(s W_f + b_f), sigmoid(s W_o + b_o)    s: the last W tokens
/// c       = f c + (1 - f) z
/// y       = (o c) W_out
/// ```
/// ```text
/// x_{t-W+1}, .., x_t ──> z, f, o
///            ┌─ decay ┐   ┌─ write ─────┐
/// c_{t-1} ──>│ f c    │──>│ + (1 - f) z │──┬──> c_t
///            └────────┘   └─────────────┘  │
///                               ┌─ read ┐  │
///              y_t <── W_out <──│ o c   │<─┘
///                               └───────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, one vector, `[B, 1, width]`;
/// `conv_states`, the last W - 1 inputs, `[B, W - 1, D]`; `position`, tokens seen. f is the share of a channel that
/// is kept, 0 to 1; W is `window`.
/// # Errors
/// [`QrnnConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `window` of 0 or a
/// `width` of 0.
/// # Source
/// Bradbury et al., arXiv 1611.01576.
/// # Departures
/// The projection out is an addition, so that the layer has a width of its own.
#[derive(Module, Debug)]
pub struct Qrnn<B: Backend> {
    /// `W D -> 3 width`, oldest token first: z, f, o.
    in_proj: Linear<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    window: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Qrnn<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, mut past) = (x.dims()[1], VectorPast::of(state));
        let dtype = x.dtype();
        let gates = accumulator(self.in_proj.forward(self.windows(x, &mut past.conv_states)));
        let width = gates.dims()[2] / 3;
        let part = |j: usize| gates.clone().narrow(2, j * width, width);
        let (z, f, o) = (part(0).tanh(), sigmoid(part(1)), sigmoid(part(2)));
        let written = (f.clone().neg() + 1.0) * z;
        let (c, last) = ops::linear_scan(f, written, past.draw(Kept::Cell))
            .expect("the projection made the shapes");
        let y = self.o_proj.forward(typed(o * c, dtype));
        (y, past.then([(Kept::Cell, last)], tokens))
    }
}

impl<B: LinearAttentionBackend> Qrnn<B> {
    /// The last W tokens of every token, `[B, T, W D]`.
    fn windows(&self, x: Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Tensor<B, 3> {
        let [batch, tokens, width] = x.dims();
        let before = self.window - 1;
        if before == 0 {
            return x;
        }
        let zeros = || Tensor::zeros([batch, before, width], (&x.device(), x.dtype()));
        conv_states.through(Kept::Input, |conv_state| {
            let conv_state = typed(conv_state.unwrap_or_else(zeros), x.dtype());
            let all = cat(vec![conv_state, x.clone()], 1);
            let taps = (0..self.window).map(|w| all.clone().narrow(1, w, tokens)).collect();
            (cat(taps, 2), all.narrow(1, tokens, before))
        })
    }
}
