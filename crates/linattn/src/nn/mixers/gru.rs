//! GRU. Recurrence, shapes and source: [`Gru`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, recurrent_width};
use crate::nn::layers::{ResidualLinear, each_token, linear, linear_with_bias};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{LinearAttentionBackend, cat};
use burn::module::Module;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Gru`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GruConfig {
    /// Width of the memory; d_model by default.
    pub width: Option<usize>,
}

impl GruConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        recurrent_width(self.width, d_model)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Gru<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        Ok(Gru {
            x_proj: linear_with_bias(d_model, 3 * width, device),
            h_proj: linear_with_bias(width, 3 * width, device),
            o_proj: linear(width, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 4 * width as u64,
            flops_per_token: linear_flops(d_model + width, 3 * width)
                + linear_flops(width, d_model),
        })
    }
}

/// GRU: a reference like LSTM, with one vector and two gates.
///
/// Its gates see the last output, so tokens go one after another: time grows with T whatever the device.
///
/// # Recurrence
/// ```text
/// a, b = x W_x + b_x, h W_h + b_h                 three parts each: r, z, n
/// r, z = sigmoid(a_r + b_r), sigmoid(a_z + b_z)
/// n    = tanh(a_n + r b_n)
/// h    = (1 - z) n + z h
/// y    = h W_out
/// ```
/// ```text
/// x_t, h_{t-1} ──> r, z, n
///            ┌─ decay ┐   ┌─ write ─────┐
/// h_{t-1} ──>│ z h    │──>│ + (1 - z) n │──┬──> h_t
///            └────────┘   └─────────────┘  │
///                               ┌─ read ┐  │
///              y_t <── W_out <──│ h     │<─┘
///                               └───────┘
/// ```
/// The product with x is one for all tokens; that with h is one a token.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, h, `[B, 1, width]`;
/// `position`, tokens seen. z is the share of h that is kept, 0 to 1.
/// # Errors
/// [`GruConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `width` of 0.
/// # Source
/// Cho et al., arXiv 1406.1078.
/// # Departures
/// The reset gate stands behind the product, as is customary. Weights start as N(0, 0.02^2), as everywhere
/// here; elsewhere +-H^-1/2 is customary.
#[derive(Module, Debug)]
pub struct Gru<B: Backend> {
    x_proj: Linear<B>,
    h_proj: Linear<B>,
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Gru<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let tokens = x.dims()[1];
        let mut past = VectorPast::of(state);
        let inward = self.x_proj.forward(x);
        let width = inward.dims()[2] / 3;
        let start = || inward.clone().detach().narrow(1, 0, 1).narrow(2, 0, width).zeros_like();
        let mut h = past.draw(Kept::Hidden).unwrap_or_else(start);
        let mut outputs = Vec::with_capacity(tokens);
        for token in each_token(inward.clone()) {
            let recurrent = self.h_proj.forward(h.clone());
            let part = |x: &Tensor<B, 3>, j: usize| x.clone().narrow(2, j * width, width);
            let gate = |j| sigmoid(part(&token, j) + part(&recurrent, j));
            let new = (part(&token, 2) + gate(0) * part(&recurrent, 2)).tanh();
            h = new.clone() + gate(1) * (h - new);
            outputs.push(h.clone());
        }
        let y = self.o_proj.forward(cat(outputs, 1));
        (y, past.then([(Kept::Hidden, h)], tokens))
    }
}
