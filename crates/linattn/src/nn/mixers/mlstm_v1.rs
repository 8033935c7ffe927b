//! mLSTM in the block of the first xLSTM. Recurrence, shapes and source: [`MlstmV1`].

use super::mlstm::{MultiHeadNorm, fresh_forget_bias};
use super::{
    MatrixPast, MatrixState, Stack, TokenMixer, block_width, check_divisor, linear_flops,
    memory_cost,
};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::exponential_gates::Asked;
use crate::nn::layers::{
    BlockDiagonal, ResidualLinear, check_epsilon, fresh, normal_linear, split_heads,
};
use crate::nn::projection::{Projection, convolved_half, project};
use crate::nn::{ConfigError, Cost, LARGEST, Linear, Shared};
use crate::ops::{self, GateActivation, LinearAttentionBackend, accumulator, cat};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Channels of a block of W_q, W_k and W_v.
const BLOCK: usize = 4;
/// The inner width is a multiple of it.
const MULTIPLE: usize = 64;
/// Standard deviation of the input gates' fresh biases.
const INPUT_BIAS_STD: f64 = 0.1;

/// Config of [`MlstmV1`], mLSTM in the block of the first xLSTM. The layer's page has recurrence, shapes,
/// errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MlstmV1Config {
    /// Heads; a divisor of the inner width.
    pub heads: usize,
    /// Inner width over d_model; what comes out is rounded up to a multiple of 64.
    pub expand: f64,
    /// Tokens the short convolution sees, at least 2.
    pub conv_size: usize,
    /// Added to a variance before its root.
    pub norm_eps: f64,
}

impl Default for MlstmV1Config {
    fn default() -> Self {
        Self { heads: 4, expand: 2.0, conv_size: 4, norm_eps: 1e-5 }
    }
}

impl MlstmV1Config {
    /// I, and the width of a head.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        check_divisor("expand", self.expand)?;
        let inner = (self.expand * d_model as f64 / MULTIPLE as f64).ceil() * MULTIPLE as f64;
        if inner > LARGEST as f64 {
            let want = format!("such that the inner width is at most {LARGEST}");
            return Err(ConfigError::new("expand", self.expand, want));
        }
        let width = block_width(self.heads, inner as usize)?;
        check_window(self.conv_size, 2)?;
        check_epsilon(self.norm_eps)?;
        Ok((inner as usize, width))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<MlstmV1<B>, ConfigError> {
        let (inner, _) = self.resolve(d_model)?;
        let heads = self.heads;
        let std = (0.4 / d_model as f64).sqrt();
        let blocks = || BlockDiagonal::normal([inner / BLOCK, BLOCK, BLOCK], std, device);
        let gate = |bias| Linear {
            bias: Some(bias),
            ..Linear::new(fresh(Initializer::Zeros, [3 * inner, heads], device))
        };
        let forget = TensorData::new(fresh_forget_bias(heads), [heads]);
        let input = Initializer::Normal { mean: 0.0, std: INPUT_BIAS_STD };
        Ok(MlstmV1 {
            up_proj: normal_linear(d_model, 2 * inner, std, device),
            conv1d: ShortConvolution::new(inner, self.conv_size, true, device),
            q: blocks(),
            k: blocks(),
            v: blocks(),
            igate_preact: gate(input.init([heads], device)),
            fgate_preact: gate(Param::from_tensor(Tensor::from_data(forget, device))),
            multihead_norm: MultiHeadNorm::new(inner, self.norm_eps, device),
            skip: Initializer::Ones.init([inner], device),
            down_proj: normal_linear(inner, d_model, 2.0 * (d_model as f64).powf(-0.5), device)
                .into(),
            heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (inner, width) = self.resolve(d_model)?;
        let mut cost = memory_cost(self.heads, width, width + 1, false);
        cost.flops_per_token += linear_flops(d_model, 2 * inner)
            + 3 * linear_flops(inner, BLOCK)
            + linear_flops(3 * inner, 2 * self.heads)
            + linear_flops(inner, d_model);
        cost.state_bytes += 4 * self.heads as u64;
        cost += convolution_cost(self.conv_size, inner);
        Ok(cost)
    }
}

/// mLSTM in the block of the first xLSTM: twice as wide as the model, between two projections, behind a short
/// convolution.
///
/// A way around the memory and a gate of the block's own come with it.
///
/// # Recurrence
/// ```text
/// u, z  = x W_up                                  [I] each, I twice D, rounded up to a multiple of 64
/// c     = silu(conv(u))
/// q, k  = c W_q, c W_k;  v = u W_v                 blocks of 4 channels on the diagonal
/// i, f  = (q, k, v) W_i + b_i, (q, k, v) W_f + b_f a number a head
/// h     = mLSTM's answer to q, k, v, i and f       as in `mlstm`, gates not capped
/// y     = ((layer_norm(h) + s c) silu(z)) W_down   over each head; s: a learnt number a channel
/// ```
/// ```text
/// x_t ──> z, c, q, k, v, i, f
///                                   ┌─ decay ──────┐   ┌─ write ─────┐
/// C_{t-1}, n_{t-1} ────────────────>│ sigmoid(f) C │──>│ + e^i k^T v │──┬──> C_t, n_t
///                                   │ sigmoid(f) n │   │ + e^i k     │  │
///                                   └──────────────┘   └─────────────┘  │
///                                            ┌─ read ────────────────┐  │
///  y_t <── W_down <── norm, + s c, gate z <──│ q C / max(|q . n|, 1) │<─┘
///                                            └───────────────────────┘
/// ```
/// The recurrence, and how C and n are kept over e^m, are on the page of [`Mlstm`](super::Mlstm).
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, K + 1]` of
/// K = I / H, n the last column, over e^m, f32; `conv_states`, the last W - 1 inputs of the short convolution and
/// m, `[B, 1, H]`; `position`, tokens seen. i and ln sigmoid(f) are natural logs for each token and head, the
/// second at most 0.
/// # Errors
/// [`MlstmV1Config::init`] gives a [`ConfigError`] with the first key that does not fit: an `expand` that is
/// not above 0 or too large, `heads` that do not divide the inner width, a `conv_size` below 2 or a
/// `norm_eps` below 1e-37.
/// # Source
/// Beck et al., arXiv 2405.04517, whose residual block has neither an MLP nor an output gate besides. As in
/// the authors' code W_up, W_q, W_k and W_v start from N(0, 2 / (5 D)), W_down from N(0, 4 / D) over the
/// square of the number of layers, W_i and W_f from zero, b_i from N(0, 0.01), b_f from 3 for the first head
/// to 6 for the last, s from 1.
#[derive(Module, Debug)]
pub struct MlstmV1<B: Backend> {
    up_proj: Linear<B>,
    conv1d: ShortConvolution<B>,
    q: BlockDiagonal<B>,
    k: BlockDiagonal<B>,
    v: BlockDiagonal<B>,
    igate_preact: Linear<B>,
    fgate_preact: Linear<B>,
    multihead_norm: MultiHeadNorm<B>,
    /// s, `[I]`.
    skip: Param<Tensor<B, 1>>,
    down_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for MlstmV1<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const SCALES_ITSELF: bool = true;

    fn shrink(stack: Stack) -> f64 {
        (stack.layers as f64).recip()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let [inner] = self.skip.dims();
        let both = self.up_proj.forward(x);
        let u = both.clone().narrow(2, 0, inner);
        let [c, z] = convolved_half(both, &self.conv1d, &mut past.conv_states);
        let (q, k) = (self.q.forward(c.clone()), self.k.forward(c.clone()));
        let v = self.v.forward(u);
        let all = cat(vec![q.clone(), k.clone(), v.clone()], 2);
        let gates = [&self.igate_preact, &self.fgate_preact].map(Projection::plain);
        let [i, f] = project(&all, gates, &mut past.conv_states).map(accumulator);
        let heads = |x| split_heads(x, self.heads);
        let asked = Asked {
            q: heads(q),
            k: heads(k),
            v: heads(v),
            log_write: i,
            log_keep: ops::log_sigmoid(f, 1.0),
        };
        let (h, memory) = asked.answer(past.memory.take(), &mut past.conv_states);
        let around = ops::scale_channels(c, self.skip.val(), None, None);
        let y = ops::gate(self.multihead_norm.forward(h) + around, z, GateActivation::Silu);
        (self.down_proj.forward(y), past.then(memory, tokens))
    }
}
