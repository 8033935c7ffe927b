//! BaseConv. Recurrence, shapes and source: [`BaseConv`].

use super::{TokenMixer, linear_flops};
use crate::nn::convolution::{ShortConvolution, check_window, with_tap};
use crate::nn::layers::linear_with_bias;
use crate::nn::long_filter::{ConvolutionState, FEATURES, check_length, lags, with_past};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::Module;
use burn::tensor::activation::relu;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Width of the network that makes taps.
const HIDDEN: usize = 16;

/// Config of [`BaseConv`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BaseConvConfig {
    /// Tokens the convolution sees, at least 2, unless it is implicit.
    pub conv_size: usize,
    /// Whether the convolution is as long as the sequence.
    pub implicit: bool,
    /// L, the length that lags of an implicit convolution are told as shares of.
    pub length: usize,
}

impl Default for BaseConvConfig {
    fn default() -> Self {
        Self { conv_size: 3, implicit: false, length: 1024 }
    }
}

impl BaseConvConfig {
    pub(super) fn resolve(&self, _d_model: usize) -> Result<(), ConfigError> {
        check_length(self.length)?;
        check_window(self.conv_size, 2)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<BaseConv<B>, ConfigError> {
        self.resolve(d_model)?;
        let short = || ShortConvolution::new(d_model, self.conv_size, true, device);
        let long = || [(FEATURES, HIDDEN), (HIDDEN, d_model)];
        Ok(BaseConv {
            projection: linear_with_bias(d_model, d_model, device),
            conv1d: (!self.implicit).then(short),
            filter: self
                .implicit
                .then(|| long().map(|(from, to)| linear_with_bias(from, to, device)).into()),
            length: self.length,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        self.resolve(d_model)?;
        let (kept, taps) = match self.implicit {
            true => (length, length.div_ceil(2)),
            false => (self.conv_size - 1, self.conv_size),
        };
        let filter = match self.implicit {
            true => linear_flops(FEATURES, HIDDEN) + linear_flops(HIDDEN, d_model),
            false => 0,
        };
        Ok(Cost {
            state_bytes: 4 * (kept * d_model) as u64,
            flops_per_token: linear_flops(d_model, d_model) + filter + 2 * (taps * d_model) as u64,
        })
    }
}

/// BaseConv: a convolution, gated by a projection of the token.
///
/// # Recurrence
/// ```text
/// y = (conv(x) + b) * (x W + c) + x      conv: depthwise, causal, without activation
/// ```
/// With `implicit`, the convolution is as long as the sequence, its taps from a network, and x is added to
/// it:
/// ```text
/// y = (h * x + x) * (x W + c) + x        h_l = relu(z_l M_1 + c_1) M_2 + c_2, of the lag's features z_l
/// ```
/// ```text
/// x_t ──> x W + c
///                              ┌─ write ───────────────────┐
/// last W - 1 inputs, or all ──>│ append x, drop the oldest │──┬──> last inputs
///                              └───────────────────────────┘  │
///                              ┌─ read ────────────────────┐  │
///  y_t <── * (x W + c), + x <──│ conv(x) + b, or h * x + x │<─┘
///                              └───────────────────────────┘
/// ```
/// An implicit convolution drops nothing.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`ConvolutionState`]: `conv_states`, the last W - 1 inputs of
/// the convolution, `[B, W - 1, D]`; of an implicit one `inputs`, all inputs so far, `[B, T, D]`, which grows
/// with T. Lags are told as shares of `length` tokens.
/// # Errors
/// [`BaseConvConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `length` below 2
/// or a `conv_size` below 2.
/// # Source
/// Zoology, arXiv 2312.04927, which sets it before the mixer under test, and whose own model has a long
/// convolution in every second layer. Its lags' features, too, are parameters there that it does not train.
#[derive(Module, Debug)]
pub struct BaseConv<B: Backend> {
    projection: Linear<B>,
    conv1d: Option<ShortConvolution<B>>,
    /// Two layers, of an implicit convolution.
    filter: Option<Vec<Linear<B>>>,
    #[module(skip)]
    length: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for BaseConv<B> {
    type State = ConvolutionState<B>;
    const TAKES_BF16: bool = true;

    fn counts_tokens(&self) -> bool {
        self.filter.is_some()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ConvolutionState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ConvolutionState<B>) {
        let (past, mut conv_states) = ConvolutionState::parts(state);
        let (seen, inputs) = match &self.conv1d {
            Some(conv1d) => (conv1d.linear_between(x.clone(), Kept::Input, &mut conv_states), None),
            None => {
                let inputs = with_past(past.clone(), x.clone());
                let y = ops::long_convolution(x.clone(), self.taps(inputs.dims()[1]), past)
                    .expect("the filter has the channels of `x`");
                (y, Some(inputs))
            }
        };
        let y = seen * self.projection.forward(x.clone()) + x;
        (y, ConvolutionState { inputs, conv_states: conv_states.into_next() })
    }
}

impl<B: LinearAttentionBackend> BaseConv<B> {
    /// The first `count` taps of an implicit convolution and what it is added to, `[count, D]`.
    fn taps(&self, count: usize) -> Tensor<B, 2> {
        let weight = self.projection.weight.val();
        let z = lags(count, self.length, &weight, weight.dtype());
        let layers = self.filter.iter().flatten().enumerate();
        let taps =
            layers.fold(z, |z, (place, layer)| layer.forward(if place == 0 { z } else { relu(z) }));
        with_tap(taps, 0, |first| first + 1.0)
    }
}
