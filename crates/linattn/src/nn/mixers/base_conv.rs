//! BaseConv: a short convolution, gated by a projection of the token.
//! ```text
//! y = (conv(x) + b) * (x W + c) + x      conv: depthwise, causal, without activation
//! ```
//! Source: Zoology, arXiv 2312.04927, which sets it before the mixer under test.

use super::{TokenMixer, linear_flops};
use crate::nn::convolution::{ShortConvolution, check_window};
use crate::nn::layers::linear_with_bias;
use crate::nn::{ConfigError, Cost, Linear, RecurrentState, Shared, StateTensors};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// BaseConv.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BaseConvConfig {
    /// Tokens the convolution sees, at least 2.
    pub conv_size: usize,
}

impl Default for BaseConvConfig {
    fn default() -> Self {
        Self { conv_size: 3 }
    }
}

impl BaseConvConfig {
    pub(super) fn resolve(&self, _d_model: usize) -> Result<(), ConfigError> {
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
        Ok(BaseConv {
            projection: linear_with_bias(d_model, d_model, device),
            conv1d: ShortConvolution::new(d_model, self.conv_size, true, device),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        self.resolve(d_model)?;
        let taps = (self.conv_size * d_model) as u64;
        Ok(Cost {
            state_bytes: 4 * (taps - d_model as u64),
            flops_per_token: linear_flops(d_model, d_model) + 2 * taps,
        })
    }
}

/// Conv state of [`BaseConv`]: the last inputs of its convolution, `[B, W - 1, D]`.
#[derive(Debug, Clone)]
pub struct ConvolutionTail<B: Backend>(pub Tensor<B, 3>);

impl<B: Backend> RecurrentState<B> for ConvolutionTail<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None).with("tail", &self.0)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self(tensors.take("tail"))
    }
}

/// BaseConv. `D -> D`.
#[derive(Module, Debug)]
pub struct BaseConv<B: Backend> {
    projection: Linear<B>,
    conv1d: ShortConvolution<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for BaseConv<B> {
    type State = ConvolutionTail<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ConvolutionTail<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ConvolutionTail<B>) {
        let tail = state.map(|state| state.0);
        let (seen, tail) = self.conv1d.linear(x.clone(), tail);
        let y = seen * self.projection.forward(x.clone()) + x;
        (y, ConvolutionTail(tail))
    }
}
