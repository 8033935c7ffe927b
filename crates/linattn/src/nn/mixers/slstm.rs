//! sLSTM. Recurrence, shapes and source: [`Slstm`].

use super::mlstm::MultiHeadNorm;
use super::{TokenMixer, VectorPast, VectorState, block_width, linear_flops};
use crate::nn::convolution::{ConvPast, ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{BlockDiagonal, INIT_STD, check_epsilon, merge_heads, split_heads};
use crate::nn::{ConfigError, Cost, Kept, Shared};
use crate::ops::{self, LinearAttentionBackend, SlstmCells, SlstmInputs, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Slstm`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlstmConfig {
    /// Heads; a divisor of d_model.
    pub heads: usize,
    /// Tokens the short convolution before input and forget gates sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a variance before its root.
    pub norm_eps: f64,
}

impl Default for SlstmConfig {
    fn default() -> Self {
        Self { heads: 1, conv_size: 4, norm_eps: 1e-5 }
    }
}

impl SlstmConfig {
    /// Width of a head.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        let width = block_width(self.heads, d_model)?;
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
    ) -> Result<Slstm<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        // As if all heads were one matrix.
        let std = (0.4 / d_model as f64).sqrt();
        let gate = || BlockDiagonal::normal([self.heads, width, width], std, device);
        let zeros = || Initializer::Zeros.init([d_model], device);
        let last = (width - 1).max(1) as f32;
        let forget: Vec<f32> =
            (0..d_model).map(|n| 5.0 - 12.0 * ((n % width) as f32 / last).powf(0.3)).collect();
        let forget = Tensor::<B, 1>::from_data(TensorData::new(forget, [d_model]), device);
        Ok(Slstm {
            conv1d: ShortConvolution::optional(d_model, self.conv_size, device),
            igate: gate(),
            fgate: gate().with_bias(Param::from_tensor(forget)),
            zgate: gate().with_bias(zeros()),
            ogate: gate().with_bias(zeros()),
            recurrent: BlockDiagonal::normal([self.heads, width, 4 * width], INIT_STD, device),
            group_norm: MultiHeadNorm::new(d_model, self.norm_eps, device),
            heads: self.heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let mut cost = Cost {
            state_bytes: 4 * 4 * d_model as u64,
            flops_per_token: 2 * linear_flops(d_model, 4 * width),
        };
        cost += convolution_cost(self.conv_size, d_model);
        Ok(cost)
    }
}

/// sLSTM: an LSTM with an exponential input gate, and a sum of weights that cells are divided by.
///
/// Gates see the last output of their own head alone. Tokens go one after another: time grows with T whatever
/// the device.
///
/// # Recurrence
/// ```text
/// i, f  = u W_i + h R_i, u W_f + h R_f + b_f          u = silu(conv(x)), or x without convolution
/// z, o  = x W_z + h R_z + b_z, x W_o + h R_o + b_o    W and R: H blocks on the diagonal
/// c     = sigmoid(f) c + e^i tanh(z)                  n = sigmoid(f) n + e^i
/// h     = sigmoid(o) c / n
/// y     = layer_norm(h)                               over each head
/// ```
/// ```text
/// x_t, h_{t-1} ──> i, f, z, o
///                     ┌─ decay ──────┐   ┌─ write ───────┐
/// c_{t-1}, n_{t-1} ──>│ sigmoid(f) c │──>│ + e^i tanh(z) │──┬──> c_t, n_t
///                     │ sigmoid(f) n │   │ + e^i         │  │
///                     └──────────────┘   └───────────────┘  │
///                               ┌─ read ─────────────────┐  │
///               y_t <── norm <──│ h_t = sigmoid(o) c / n │<─┘
///                               └────────────────────────┘
/// ```
/// e^i can be too large for a float, so c and n are kept as e^m times smaller numbers, with
/// `m_t = max(ln sigmoid(f_t) + m_{t-1}, i_t)`; no gradient is taken through m, since h does not depend on
/// it. n over e^m is at least 1. The input gate has no bias: c / n would not depend on it.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, h, c over e^m, n over e^m and
/// m, `[B, 1, D]` each; `conv_states`, the last W - 1 inputs of the short convolution; `position`, tokens seen. i
/// and ln sigmoid(f) are natural logs, the second at most 0.
/// # Errors
/// [`SlstmConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` that do not
/// divide D, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Beck et al., arXiv 2405.04517, where no projection follows the norm. Weights W start from N(0, 2 / (5 D)),
/// forget gates' biases from 5 for the first cell of a head to -7 for its last, as the authors' code has them
/// in its first layer.
/// # Departures
/// R, which the authors' code starts from zero, is small and random here; the short convolution has none of
/// the bias that it has there.
#[derive(Module, Debug)]
pub struct Slstm<B: Backend> {
    conv1d: Option<ShortConvolution<B>>,
    igate: BlockDiagonal<B>,
    fgate: BlockDiagonal<B>,
    zgate: BlockDiagonal<B>,
    ogate: BlockDiagonal<B>,
    /// R: of every head i, f, z and o.
    recurrent: BlockDiagonal<B>,
    group_norm: MultiHeadNorm<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Slstm<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, dtype) = (x.dims()[1], x.dtype());
        let mut past = VectorPast::of(state);
        let state = self.cells(&mut past);
        let x = self.inward(x, &mut past.conv_states);
        let (h, last) = ops::slstm(SlstmInputs { x, r: self.recurrent.blocks(), state })
            .expect("the projections made the shapes");
        let SlstmCells { h: last, c, n, m } = last;
        let cells =
            [(Kept::Hidden, last), (Kept::Cell, c), (Kept::Normalizer, n), (Kept::Maximum, m)];
        let memory = cells.map(|(name, cell)| (name, typed(merge_heads(cell), dtype)));
        (self.group_norm.forward(typed(h, dtype)), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Slstm<B> {
    /// The cells before the first token; none at the start of a sequence.
    fn cells(&self, past: &mut VectorPast<B>) -> Option<SlstmCells<B>> {
        let mut cell = |name| Some(split_heads(past.draw(name)?, self.heads));
        Some(SlstmCells {
            h: cell(Kept::Hidden)?,
            c: cell(Kept::Cell)?,
            n: cell(Kept::Normalizer)?,
            m: cell(Kept::Maximum)?,
        })
    }

    /// The inputs' part of the gates: i, f, z and o of every head, `[B, T, H, 4 D / H]`.
    fn inward(&self, x: Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Tensor<B, 4> {
        let [i, f, z, o] = [&self.igate, &self.fgate, &self.zgate, &self.ogate];
        let Some(convolution) = &self.conv1d else {
            return BlockDiagonal::forward_by_head(&[i, f, z, o], x);
        };
        let mixed = convolution.forward_between(x.clone(), Kept::Input, conv_states);
        let both = [([i, f], mixed), ([z, o], x)];
        cat(both.map(|(gates, x)| BlockDiagonal::forward_by_head(&gates, x)).into(), 3)
    }
}
