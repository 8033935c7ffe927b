//! Pooling. Recurrence, shapes and source: [`Pooling`].

use super::TokenMixer;
use crate::nn::long_filter::ConvolutionState;
use crate::nn::{ConfigError, Cost, Kept, Shared, positive};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Where s starts.
const FIRST_SCALE: f64 = 1e-5;

/// Config of [`Pooling`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PoolingConfig {
    /// W, tokens that are averaged, at least 2.
    pub window: usize,
}

impl Default for PoolingConfig {
    fn default() -> Self {
        Self { window: 3 }
    }
}

impl PoolingConfig {
    pub(super) fn resolve(&self, _d_model: usize) -> Result<(), ConfigError> {
        match positive("window", self.window)? {
            1 => Err(ConfigError::new("window", 1, "at least 2")),
            _ => Ok(()),
        }
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Pooling<B>, ConfigError> {
        self.resolve(d_model)?;
        let scale = Initializer::Constant { value: FIRST_SCALE };
        Ok(Pooling { scale: scale.init([d_model], device), window: self.window })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 4 * ((self.window - 1) * (d_model + 1)) as u64,
            flops_per_token: ((self.window + 3) * d_model) as u64,
        })
    }
}

/// Pooling: the mean of the last tokens less the token itself, a reference whose mixing learns next to
/// nothing.
///
/// # Recurrence
/// ```text
/// y_t = s * (mean of x_{t-W+1}, .., x_t - x_t)        s: a number for each channel
/// ```
/// ```text
/// x_t
///                      ┌─ write ───────────────────┐
/// last W - 1 inputs ──>│ append x, drop the oldest │──┬──> last W - 1 inputs
///                      └───────────────────────────┘  │
///                           ┌─ read ───────────────┐  │
///            y_t <── * s <──│ mean of W inputs - x │<─┘
///                           └──────────────────────┘
/// ```
/// Fewer tokens are averaged where fewer were seen.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`ConvolutionState`]: `conv_states`, the last W - 1 inputs and
/// a channel of ones, whose sum counts tokens, `[B, W - 1, D + 1]`, f32. W is `window`.
/// # Errors
/// [`PoolingConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `window` below 2.
/// # Source
/// PoolFormer, arXiv 2111.11418. s is the scale of its block's residual branch, 1e-5 at the start.
/// # Departures
/// PoolFormer's window is a square of an image around the pixel; here it is the token and those just before
/// it, so that nothing looks ahead.
#[derive(Module, Debug)]
pub struct Pooling<B: Backend> {
    /// s, `[D]`.
    scale: Param<Tensor<B, 1>>,
    #[module(skip)]
    window: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Pooling<B> {
    type State = ConvolutionState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ConvolutionState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ConvolutionState<B>) {
        let ([_, _, width], dtype) = (x.dims(), x.dtype());
        let (_, mut conv_states) = ConvolutionState::parts(state);
        let x = accumulator(x);
        let counted = cat(vec![x.clone(), x.clone().narrow(2, 0, 1).ones_like()], 2);
        let ones = Tensor::ones([self.window, width + 1], (&x.device(), x.dtype()));
        let lengths = conv_states.lengths().cloned();
        let sums = conv_states.through(Kept::Input, |conv_state| {
            ops::convolve(counted, ones, None, conv_state, None, lengths.as_ref())
                .expect("the weights were made for it")
        });
        let mean = sums.clone().narrow(2, 0, width) / sums.narrow(2, width, 1);
        let y = (mean - x) * self.scale.val().unsqueeze::<3>();
        (typed(y, dtype), ConvolutionState { inputs: None, conv_states: conv_states.into_next() })
    }
}
