//! S4D: in each channel a diagonal state-space model, N / 2 complex modes and their conjugates, of the
//! channel's own past.
//! ```text
//! u      = ssm(x)                      see `diagonal_ssm`
//! y      = glu(gelu(u) W_out)          glu(a, b) = a sigmoid(b)
//! ```
//! A starts as `-1/2 + i pi n` (S4D-Lin) or `-1/2 + i (N / pi) (N / (2 n + 1) - 1)` (S4D-Inv).
//! Source: Gu et al., arXiv 2206.11893.

use super::{TokenMixer, VectorPast, VectorState, linear_flops};
use crate::nn::diagonal_ssm::{DiagonalSsm, DiagonalStart, Discretization, Parts, Spectrum};
use crate::nn::layers::{ResidualLinear, linear_with_bias};
use crate::nn::{ConfigError, Cost, Shared};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::activation::{gelu, glu};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// S4D.
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

/// S4D. `D -> D`.
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
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let [_, tokens, width] = x.dims();
        let mut past = VectorPast::of(state);
        let before = past.draw_pair().map(|pair| Parts::unpack(pair, 1, width));
        let (u, after) = self.ssm.run(x, before);
        let y = glu(self.out_proj.forward(gelu(u)), 2);
        (y, past.then(after.pack(1), tokens))
    }
}
