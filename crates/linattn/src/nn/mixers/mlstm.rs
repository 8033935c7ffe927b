//! mLSTM. Recurrence, shapes and source: [`Mlstm`].

use super::{
    MatrixPast, MatrixState, TokenMixer, half_key_width, linear_flops, memory_cost, value_width,
};
use crate::nn::convolution::{ConvPast, ShortConvolution, check_window, convolve_if_any};
use crate::nn::exponential_gates::Asked;
use crate::nn::layers::{
    ResidualLinear, check_epsilon, linear, merge_heads, split_heads, standardize,
};
use crate::nn::projection::{Projection, project};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{self, GateActivation, LinearAttentionBackend, accumulator};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Mlstm`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MlstmConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key; half of d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Where the bias of the input gates starts: their share is e to this power.
    pub input_gate_bias: f64,
    /// Largest size of what goes into an exponential or a forget gate; 0 for no cap.
    pub gate_cap: f64,
    /// Tokens the short convolution before queries and keys sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a variance before its root.
    pub norm_eps: f64,
}

impl Default for MlstmConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 2.0,
            input_gate_bias: 0.0,
            gate_cap: 15.0,
            conv_size: 0,
            norm_eps: 1e-5,
        }
    }
}

impl MlstmConfig {
    /// K and V.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("heads", self.heads)?;
        let key = half_key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        if !self.input_gate_bias.is_finite() {
            return Err(ConfigError::new("input_gate_bias", self.input_gate_bias, "finite"));
        }
        if !(self.gate_cap >= 0.0 && self.gate_cap.is_finite()) {
            return Err(ConfigError::new("gate_cap", self.gate_cap, "at least 0"));
        }
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok((key, value))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mlstm<B>, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let heads = self.heads;
        let gate = |bias: Vec<f32>| {
            let bias = Tensor::<B, 1>::from_data(TensorData::new(bias, [heads]), device);
            Linear { bias: Some(Param::from_tensor(bias)), ..linear(d_model, heads, device) }
        };
        Ok(Mlstm {
            q: linear(d_model, keys, device),
            k: linear(d_model, keys, device),
            v: linear(d_model, values, device),
            ogate_preact: linear(d_model, values, device),
            igate_preact: gate(vec![self.input_gate_bias as f32; heads]),
            fgate_preact: gate(fresh_forget_bias(heads)),
            conv1d: ShortConvolution::optional(d_model, self.conv_size, device),
            multihead_norm: MultiHeadNorm::new(values, self.norm_eps, device),
            out_proj: linear(values, d_model, device).into(),
            heads,
            gate_cap: self.gate_cap,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let mut cost = memory_cost(self.heads, key, value + 1, false);
        let inward = 2 * keys + 2 * values + 2 * self.heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(values, d_model);
        cost.flops_per_token += 2 * (self.conv_size * d_model) as u64;
        let conv_state = self.conv_size.saturating_sub(1) * d_model;
        cost.state_bytes += 4 * (self.heads + conv_state) as u64;
        Ok(cost)
    }
}

/// From 3 for the first head to 6 for the last.
pub(super) fn fresh_forget_bias(heads: usize) -> Vec<f32> {
    let last = (heads - 1).max(1) as f32;
    (0..heads).map(|h| 3.0 + 3.0 * h as f32 / last).collect()
}

/// LayerNorm over each head, with a weight for every value of every head.
#[derive(Module, Debug)]
pub struct MultiHeadNorm<B: Backend> {
    /// `[H V]`.
    weight: Param<Tensor<B, 1>>,
    #[module(skip)]
    epsilon: f64,
}

impl<B: Backend> MultiHeadNorm<B> {
    /// Weights of one over `values` values of all heads.
    pub(super) fn new(values: usize, epsilon: f64, device: &B::Device) -> Self {
        Self { weight: Initializer::Ones.init([values], device), epsilon }
    }
}

impl<B: LinearAttentionBackend> MultiHeadNorm<B> {
    /// `[B, T, H, V]` to `[B, T, H V]`.
    pub(super) fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 3> {
        let heads = merge_heads(standardize(x, self.epsilon));
        ops::scale_channels(heads, self.weight.val(), None, None)
    }
}

/// mLSTM: a state with an exponential input gate, and a sum of keys that outputs are divided by.
///
/// # Recurrence
/// ```text
/// q, k  = x W_q, x W_k                        (of silu(conv(x)), where there is a convolution)
/// v     = x W_v
/// i, f  = cap(x W_i + b_i), cap(x W_f + b_f)  one number a head; cap(z) = c tanh(z / c)
/// C     = sigmoid(f) C + e^i k^T v            n = sigmoid(f) n + e^i k
/// h     = q C / max(|q . n|, 1)               q / sqrt(K)
/// y     = (layer_norm(h) sigmoid(x W_og)) W_o over each head
/// ```
/// e^i can be too large for a float, so C and n are kept as e^m times smaller matrices, m being
/// ```text
/// m_t   = max(ln sigmoid(f_t) + m_{t-1}, i_t)   m_0 = 0
/// C_t   = e^{g_t} C_{t-1} + e^{i_t - m_t} k^T v      g_t = ln sigmoid(f_t) + m_{t-1} - m_t <= 0
/// h_t   = q C_t / (max(|q . n_t|, e^{-m_t}) + 1e-6)
/// ```
/// ```text
/// x_t ──> q, k, v, i, f
///                       ┌─ decay ──────┐   ┌─ write ─────┐
/// C_{t-1}, n_{t-1} ────>│ sigmoid(f) C │──>│ + e^i k^T v │──┬──> C_t, n_t
///                       │ sigmoid(f) n │   │ + e^i k     │  │
///                       └──────────────┘   └─────────────┘  │
///                                ┌─ read ────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ q C / max(|q . n|, 1) │<─┘
///                                └───────────────────────┘
/// ```
/// This is linear attention with a scalar decay, n one more column of its memory. m does not depend on the
/// memory: with F the running sum of ln sigmoid(f), it is `F_t + max(m_0, max_{j <= t} i_j - F_j)`, so that a
/// whole sequence has it by one running sum and one running maximum. The last m is part of the state, the m_0
/// of what comes next; so it does not matter where a sequence is cut. h does not depend on m but for the
/// 1e-6, and no gradient is taken through it.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V + 1]`, n the last
/// column, over e^m, f32; `conv_states`, the last W - 1 inputs of the short convolution, where there is one, and m,
/// `[B, 1, H]`; `position`, tokens seen. i and ln sigmoid(f) are natural logs for each token and head, the
/// second at most 0.
/// # Errors
/// [`MlstmConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D / 2 while `key_width` is left out, an `expand_v` that makes V no whole number, an
/// `input_gate_bias` that is not finite, a `gate_cap` below 0, a `conv_size` of 1 or a `norm_eps` below
/// 1e-37.
/// # Source
/// Beck et al., arXiv 2405.04517; caps, the sigmoid of the output and the order of layers as in arXiv
/// 2503.13427, where the input gates' bias starts at -10. The block of arXiv 2405.04517 itself is another
/// mixer, `mlstm_v1`.
/// # Departures
/// The weights of the gates, which the authors start from zero, are small and random here.
#[derive(Module, Debug)]
pub struct Mlstm<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    ogate_preact: Linear<B>,
    igate_preact: Linear<B>,
    fgate_preact: Linear<B>,
    conv1d: Option<ShortConvolution<B>>,
    multihead_norm: MultiHeadNorm<B>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_cap: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Mlstm<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let Preactivations { q, k, v, i, f, o } = self.project(x, &mut past.conv_states);
        let heads = |x| split_heads(x, self.heads);
        let log_write = self.capped(accumulator(i));
        let log_keep = ops::log_sigmoid(self.capped(accumulator(f)), 1.0);
        let asked = Asked { q: heads(q), k: heads(k), v: heads(v), log_write, log_keep };
        let (h, memory) = asked.answer(past.memory.take(), &mut past.conv_states);
        let y = ops::gate(self.multihead_norm.forward(h), o, GateActivation::Sigmoid);
        (self.out_proj.forward(y), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Mlstm<B> {
    /// All projections of `x`; queries and keys see the convolution, where there is one.
    fn project(&self, x: Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Preactivations<B> {
        let asking = [&self.q, &self.k];
        let others = [&self.v, &self.igate_preact, &self.fgate_preact, &self.ogate_preact];
        if self.conv1d.is_some() {
            let mixed = convolve_if_any(&self.conv1d, x.clone(), Kept::Input, conv_states);
            let [q, k] = project(&mixed, asking.map(Projection::plain), conv_states);
            let [v, i, f, o] = project(&x, others.map(Projection::plain), conv_states);
            return Preactivations { q, k, v, i, f, o };
        }
        let ([q, k], [v, i, f, o]) = (asking, others);
        let [q, k, v, i, f, o] =
            project(&x, [q, k, v, i, f, o].map(Projection::plain), conv_states);
        Preactivations { q, k, v, i, f, o }
    }

    fn capped(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        match self.gate_cap > 0.0 {
            true => (x / self.gate_cap).tanh() * self.gate_cap,
            false => x,
        }
    }
}

/// Projections of the input, `[B, T, ..]`: queries, keys, values; of the gates, input, forget and output.
struct Preactivations<B: Backend> {
    q: Tensor<B, 3>,
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
    i: Tensor<B, 3>,
    f: Tensor<B, 3>,
    o: Tensor<B, 3>,
}
