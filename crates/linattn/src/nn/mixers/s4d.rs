//! S4D. Recurrence, shapes and source: [`S4d`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops};
use crate::nn::diagonal_ssm::{DiagonalSsm, DiagonalStart, Parts, Spectrum};
use crate::nn::layers::{ResidualLinear, gelu, linear_with_bias};
use crate::nn::{ConfigError, Cost, Shared};
use crate::ops::{Discretization, LinearAttentionBackend};
use burn::module::Module;
use burn::tensor::activation::glu;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`S4d`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S4dConfig {
    /// N, even: real numbers in the memory of a channel.
    pub d_state: usize,
    /// Where A starts.
    pub spectrum: Spectrum,
    /// How time steps are made.
    pub discretization: Discretization,
    /// Least step size, where learning starts.
    pub dt_min: f64,
    /// Largest step size, where learning starts.
    pub dt_max: f64,
}

impl Default for S4dConfig {
    fn default() -> Self {
        Self {
            d_state: 64,
            spectrum: Spectrum::default(),
            discretization: Discretization::default(),
            dt_min: 0.001,
            dt_max: 0.1,
        }
    }
}

impl S4dConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<DiagonalStart, ConfigError> {
        let start = DiagonalStart {
            channels: d_model,
            modes: self.d_state / 2,
            spectrum: self.spectrum,
            discretization: self.discretization,
            dt: [self.dt_min, self.dt_max],
            learns_input: false,
        };
        start.check(self.d_state)?;
        Ok(start)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<S4d<B>, ConfigError> {
        let ssm = self.resolve(d_model)?.init(device);
        Ok(S4d { ssm, out_proj: linear_with_bias(d_model, 2 * d_model, device).into() })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let start = self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 4 * (self.d_state * d_model) as u64,
            flops_per_token: start.flops() + linear_flops(d_model, 2 * d_model),
        })
    }
}

/// S4D: in each channel a diagonal state-space model of the channel's own past.
///
/// A channel has N / 2 complex modes and their conjugates.
///
/// # Recurrence
/// ```text
/// A      = -exp(log_a_real) + i a_imag            [D, N / 2], step sizes dt = exp(log_dt), [D]
/// zoh        a = exp(dt A)                        b = (a - 1) / A
/// bilinear   a = (1 + dt A / 2) / (1 - dt A / 2)  b = dt / (1 - dt A / 2)
/// h      = a h + b x                              [D, N / 2] complex
/// u      = 2 Re(C h) + d x                        summed over a channel's modes
/// y      = glu(gelu(u) W_out)                     glu(a, b) = a sigmoid(b)
/// ```
/// ```text
/// x_t ──> each channel
///                 ┌─ decay and turn ┐   ┌─ write ┐
/// h_{t-1} ───────>│ a h             │──>│ + b x  │──┬──> h_t
///                 └─────────────────┘   └────────┘  │
///                              ┌─ read ──────────┐  │
///  y_t <── gelu, W_out, glu <──│ 2 Re(C h) + d x │<─┘
///                              └─────────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, real and imaginary parts of h,
/// `[B, 1, D N / 2]` each; `position`, tokens seen. dt is a step size above 0, N is `d_state`. The size of a
/// is the share that is kept, its angle a turn in radians for each token.
/// # Errors
/// [`S4dConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `d_state` that is 0 or
/// odd, a `dt_min` that is not above 0 or a `dt_max` that is not above it.
/// # Source
/// Gu et al., arXiv 2206.11893. A starts as `-1/2 + i pi n` (S4D-Lin) or
/// `-1/2 + i (N / pi) (N / (2 n + 1) - 1)` (S4D-Inv).
#[derive(Module, Debug)]
pub struct S4d<B: Backend> {
    ssm: DiagonalSsm<B>,
    out_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for S4d<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let [_, tokens, width] = x.dims();
        let mut past = VectorPast::of(state);
        let before = past.draw_parts().map(|pair| Parts::unpack(pair, 1, width));
        let (u, after) = self.ssm.run(x, before, shared);
        let y = glu(self.out_proj.forward(gelu(u)), 2);
        (y, past.then(after.into_iter().flat_map(|h| h.pack(1)), tokens))
    }
}
