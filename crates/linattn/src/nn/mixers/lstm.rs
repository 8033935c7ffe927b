//! LSTM. Recurrence, shapes and source: [`Lstm`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, recurrent_width};
use crate::nn::layers::{ResidualLinear, linear, merge_heads, split_heads};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, LinearAttentionBackend, LstmCells, LstmInputs, lstm_cells, typed};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Lstm`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LstmConfig {
    /// Width of the memory; d_model by default.
    pub width: Option<usize>,
}

impl LstmConfig {
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
    ) -> Result<Lstm<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let forget = width..2 * width;
        let bias: Vec<f32> = (0..4 * width).map(|n| f32::from(forget.contains(&n))).collect();
        let bias = Tensor::<B, 1>::from_data(TensorData::new(bias, [4 * width]), device);
        Ok(Lstm {
            x_proj: Linear {
                bias: Some(Param::from_tensor(bias)),
                ..linear(d_model, 4 * width, device)
            },
            h_proj: linear(width, 4 * width, device),
            o_proj: linear(width, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 2 * 4 * width as u64,
            flops_per_token: linear_flops(d_model + width, 4 * width)
                + linear_flops(width, d_model),
        })
    }
}

/// LSTM: the reference for recurrences that are not linear in their state.
///
/// Its gates see the last output, so tokens go one after another: time grows with T whatever the device.
///
/// # Recurrence
/// ```text
/// i, f, g, o = x W_x + b + h W_h                      four parts
/// c          = sigmoid(f) c + sigmoid(i) tanh(g)
/// h          = sigmoid(o) tanh(c)
/// y          = h W_out
/// ```
/// ```text
/// x_t, h_{t-1} ──> i, f, g, o
///            ┌─ decay ──────┐   ┌─ write ──────────────┐
/// c_{t-1} ──>│ sigmoid(f) c │──>│ + sigmoid(i) tanh(g) │──┬──> c_t
///            └──────────────┘   └──────────────────────┘  │
///                           ┌─ read ───────────────────┐  │
///          y_t <── W_out <──│ h_t = sigmoid(o) tanh(c) │<─┘
///                           └──────────────────────────┘
/// ```
/// The product with x is one for all tokens; that with h is one a token, of as many rows as the batch has sequences.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, h and c, `[B, 1, width]` each;
/// `position`, tokens seen. sigmoid(f) is the share of c that is kept, 0 to 1.
/// # Errors
/// [`LstmConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `width` of 0.
/// # Source
/// Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, whose bias starts at 1.
/// # Departures
/// Weights start as N(0, 0.02^2), as everywhere here; elsewhere +-H^-1/2 is customary.
#[derive(Module, Debug)]
pub struct Lstm<B: Backend> {
    x_proj: Linear<B>,
    h_proj: Linear<B>,
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Lstm<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, dtype) = (x.dims()[1], x.dtype());
        let mut past = VectorPast::of(state);
        let mut cell = |name| Some(split_heads(past.draw(name)?, 1));
        let state = cell(Kept::Hidden).zip(cell(Kept::Cell)).map(|(h, c)| LstmCells { h, c });
        let x = split_heads(self.x_proj.forward(x), 1);
        let (h, last) = match state {
            Some(state) if tokens == 1 && !self.is_plain() => self.one_token(x, state),
            state => {
                let r = self.h_proj.matrix(x.dtype()).unsqueeze_dim(0);
                ops::lstm(LstmInputs { x, r, state }).expect("the projections made the shapes")
            }
        };
        let memory = [(Kept::Hidden, last.h), (Kept::Cell, last.c)];
        let memory = memory.map(|(name, cell)| (name, typed(merge_heads(cell), dtype)));
        let y = self.o_proj.forward(merge_heads(typed(h, dtype)));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Lstm<B> {
    /// Whether the recurrent weights are one matrix of floats. Others are not made one for a single token.
    fn is_plain(&self) -> bool {
        self.h_proj.weight_alone().is_some_and(|weight| weight.quantized().is_none())
    }

    /// h after one token, and the cells.
    fn one_token(&self, x: Tensor<B, 4>, state: LstmCells<B>) -> (Tensor<B, 4>, LstmCells<B>) {
        let next = lstm_cells(x + self.h_proj.forward(state.h), state.c);
        (next.h.clone(), next)
    }
}
