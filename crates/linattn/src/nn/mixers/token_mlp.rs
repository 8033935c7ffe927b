//! Token MLP. Recurrence, shapes and source: [`TokenMlp`].

use super::TokenMixer;
use super::aft::check_known;
use crate::nn::layers::gelu;
use crate::nn::long_filter::{ConvolutionState, with_past};
use crate::nn::{ConfigError, Cost, KeptTensors, Shared, positive};
use crate::ops::{LinearAttentionBackend, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`TokenMlp`], the token MLP. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenMlpConfig {
    /// Positions that there are, at least the tokens of the longest sequence.
    pub length: usize,
}

impl Default for TokenMlpConfig {
    fn default() -> Self {
        Self { length: 1024 }
    }
}

impl TokenMlpConfig {
    pub(super) fn resolve(&self, _d_model: usize) -> Result<usize, ConfigError> {
        positive("length", self.length)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<TokenMlp<B>, ConfigError> {
        let length = self.resolve(d_model)?;
        let normal = Initializer::Normal { mean: 0.0, std: (length as f64).powf(-0.5) };
        let layer = || PositionLayer {
            mixing: normal.init([length, length], device),
            bias: Initializer::Zeros.init([length], device),
        };
        Ok(TokenMlp { hidden: layer(), output: layer() })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init); and sequences longer than there are positions.
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        check_known(self.resolve(d_model)?, length)?;
        Ok(Cost {
            state_bytes: 4 * (2 * d_model * length) as u64,
            // On average a token looks at half the sequence, in each matrix.
            flops_per_token: 2 * 2 * (d_model * length.div_ceil(2)) as u64,
        })
    }
}

/// A matrix and a bias of positions.
#[derive(Module, Debug)]
pub struct PositionLayer<B: Backend> {
    /// `[L, L]`, of which the part above the diagonal is not used.
    mixing: Param<Tensor<B, 2>>,
    /// `[L]`.
    bias: Param<Tensor<B, 1>>,
}

impl<B: Backend> PositionLayer<B> {
    /// Rows for the last `tokens` of `x`, `[B, S, D]`.
    fn forward(&self, x: Tensor<B, 3>, tokens: usize) -> Tensor<B, 3> {
        let (seen, dtype) = (x.dims()[1], x.dtype());
        let first = seen - tokens;
        let weight = self.mixing.val().narrow(0, first, tokens).narrow(1, 0, seen);
        let weight = typed(weight.tril(first as i64), dtype).unsqueeze::<3>();
        let bias = typed(self.bias.val(), dtype).narrow(0, first, tokens);
        weight.matmul(x) + bias.reshape([1, tokens, 1])
    }
}

/// Token MLP: two learnt matrices of positions with GELU between them, the same for every channel.
///
/// # Recurrence
/// ```text
/// h_t = gelu(sum_{j <= t} A_tj x_j + a_t)
/// y_t = sum_{j <= t} C_tj h_j + c_t
/// ```
/// ```text
/// x_t, position t ──> rows t of A and C
///                     ┌─ write, x ─┐   ┌─ write, h ─┐
/// x, h of 1 .. t-1 ──>│ append x_t │──>│ append h_t │──┬──> x, h of 1 .. t
///                     └────────────┘   └────────────┘  │
///                           ┌─ read ────────────────┐  │
///                    y_t <──│ sum of C_tj h_j + c_t │<─┘
///                           └───────────────────────┘
/// ```
/// h_t is read from x_1 to x_t by row t of A. No weight depends on a token's values. A model knows as many
/// positions as `length` says, and no more.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`ConvolutionState`]: `inputs`, x and h side by side,
/// `[B, T, 2 D]`, which grows with T.
/// # Errors
/// [`TokenMlpConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `length` of 0.
/// `cost` refuses sequences longer than there are positions; `run` panics where one goes past them.
/// # Source
/// MLP-Mixer, arXiv 2105.01601.
/// # Departures
/// Its matrices are full, and h has another width than there are positions; here both are lower triangular, a
/// row of h for each position, so that nothing looks ahead.
#[derive(Module, Debug)]
pub struct TokenMlp<B: Backend> {
    hidden: PositionLayer<B>,
    output: PositionLayer<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for TokenMlp<B> {
    type State = ConvolutionState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn positions(&self) -> Option<usize> {
        Some(self.hidden.bias.dims()[0])
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ConvolutionState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ConvolutionState<B>) {
        let [_, tokens, width] = x.dims();
        let (past, _) = ConvolutionState::parts(state);
        let part = |from: usize| past.clone().map(|past| past.narrow(2, from, width));
        let x = with_past(part(0), x);
        let (end, known) = (x.dims()[1], self.hidden.bias.dims()[0]);
        assert!(end <= known, "position {end} of {known} that the mixer has learnt");
        let h = gelu(self.hidden.forward(x.clone(), tokens));
        let h = with_past(part(width), h);
        let y = self.output.forward(h.clone(), tokens);
        let inputs = cat(vec![x, h], 2);
        (y, ConvolutionState { inputs: Some(inputs), conv_states: KeptTensors::default() })
    }
}
