//! Decaying fast weights. Recurrence, shapes and source: [`DecayingFastWeights`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Widths, check_divisor, head_widths, linear_flops,
    memory_cost,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, merge_heads, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Tokens of a piece.
const PIECE: usize = 16;
/// Least log decay of a column: 16 tokens make e^64 at most, where f32 ends at e^88.
const FASTEST_COLUMN: f64 = -4.0;

/// Config of [`DecayingFastWeights`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DecayingFastWeightsConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// n, what log decays are divided by: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for DecayingFastWeightsConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            gate_normalizer: 1.0,
            conv_size: 0,
            norm_eps: 1e-5,
        }
    }
}

impl DecayingFastWeightsConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths = head_widths(self.heads, None, self.key_width, self.expand_v, d_model)?;
        check_divisor("gate_normalizer", self.gate_normalizer)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok(widths)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<DecayingFastWeights<B>, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        let gate = |width| Linear {
            bias: Some(spread_bias(self.heads, width, device)),
            ..linear(d_model, self.heads * width, device)
        };
        Ok(DecayingFastWeights {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            f_proj: gate(key),
            z_proj: gate(value),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            gate_normalizer: self.gate_normalizer,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let mut cost = memory_cost(self.heads, key, value, false);
        cost.flops_per_token +=
            linear_flops(d_model, 3 * keys + 2 * values) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Biases of gates that keep the shares 1 / (width + 1), 2 / (width + 1) and so on, in every head.
fn spread_bias<B: Backend>(heads: usize, width: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
    // The share is n / (width + 1): its odds are n to width + 1 - n.
    let log_odds = |n: usize| (n as f64 / (width + 1 - n) as f64).ln() as f32;
    let values: Vec<f32> = (0..heads).flat_map(|_| (1..=width).map(log_odds)).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(values, [heads * width]), device))
}

/// Decaying fast weights: linear attention whose rows and columns both have a decay that depends on the data.
///
/// # Recurrence
/// ```text
/// q, k, v = x W_q, x W_k, x W_v          (silu(conv(.)) where there are convolutions)
/// f       = log_sigmoid(x W_f + b_f) / n        [K], of rows
/// z       = max(log_sigmoid(x W_z + b_z) / n, -4)   [V], of columns
/// S       = (e^f)^T e^z * S + k^T v             elementwise
/// y       = rms_norm(q S / sqrt(K)) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, f, z
///            ┌─ decay ─────────┐   ┌─ write ─┐
/// S_{t-1} ──>│ (e^f)^T e^z * S │──>│ + k^T v │──┬──> S_t
///            └─────────────────┘   └─────────┘  │
///                            ┌─ read ────────┐  │
///    y_t <── W_o <── norm <──│ q S / sqrt(K) │<─┘
///                            └───────────────┘
/// ```
/// n is `gate_normalizer`.
///
/// Over a piece of few tokens the columns' decay is taken out of the memory: with Z_t the sum of z up to t,
/// `S_t e^{-Z_t}` decays by rows alone, is written with `v_t e^{-Z_t}`, and answers q_t with `o_t e^{-Z_t}`.
/// The bound of z keeps `e^{-Z_t}` within f32's range.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. f and z are natural logs of the
/// share of a row and of a column that is kept, for each token and head, at most 0, and z at least -4.
/// # Errors
/// [`DecayingFastWeightsConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads`
/// of 0, `heads` that do not divide D while `key_width` is left out, an `expand_v` that makes V no whole
/// number, a `gate_normalizer` that is not above 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Mao, arXiv 2210.04243, with n = 1, and biases as in its gates: spread so that a head's channels start out
/// by keeping every share from none to all.
/// # Departures
/// The bound of z is ours.
#[derive(Module, Debug)]
pub struct DecayingFastWeights<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    f_proj: Linear<B>,
    z_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_normalizer: f64,
}

/// Inputs of the recurrence.
struct Inputs<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    /// Log decay of rows, `[B, T, H, K]`.
    rows: Tensor<B, 4>,
    /// Log decay of columns, `[B, T, H, V]`.
    columns: Tensor<B, 4>,
}

impl<B: LinearAttentionBackend> Inputs<B> {
    /// Tokens `from` to `from + count`.
    fn piece(&self, from: usize, count: usize) -> Self {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(1, from, count);
        Self {
            q: part(&self.q),
            k: part(&self.k),
            v: part(&self.v),
            rows: part(&self.rows),
            columns: part(&self.columns),
        }
    }

    /// Through an operation whose columns do not decay: the outputs, and the next memory.
    fn run(self, memory: Option<Tensor<B, 4>>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let last = self.columns.dims()[1] - 1;
        let kept = self.columns.cumsum(1);
        let v = self.v * kept.clone().neg().exp();
        let inputs = ops::LinearAttentionInputs::new(self.q, self.k, v).with_decay(self.rows);
        let (o, memory) = linear_attention(inputs, memory, None);
        let kept = kept.exp();
        // [B, 1, H, V] to [B, H, 1, V].
        let at_end = kept.clone().narrow(1, last, 1).swap_dims(1, 2);
        (o * kept, memory * at_end)
    }
}

/// Whole sequences, a piece at a time.
fn in_pieces<B: LinearAttentionBackend>(
    x: Inputs<B>,
    mut memory: Option<Tensor<B, 4>>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let tokens = x.q.dims()[1];
    let mut outputs = vec![];
    for from in (0..tokens).step_by(PIECE) {
        let (o, next) = x.piece(from, PIECE.min(tokens - from)).run(memory);
        outputs.push(o);
        memory = Some(next);
    }
    (cat(outputs, 1), memory.expect("a sequence has a token"))
}

impl<B: LinearAttentionBackend> TokenMixer<B> for DecayingFastWeights<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let gates = [&self.f_proj, &self.z_proj].map(Projection::plain);
        let (Qkv { q, k, v }, [f, z]) = self.qkv().project(&x, gates, &mut past.conv_states);
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let decay = |x| split_heads(ops::log_sigmoid(x, self.gate_normalizer), self.heads);
        let columns = decay(z).clamp_min(FASTEST_COLUMN);
        // Values go over what is left of their columns: 16 bits would hold too little of that.
        let [q, k, v] = [q * scale, k, v].map(accumulator);
        let inputs = Inputs { q, k, v, rows: decay(f), columns };
        let (o, memory) = in_pieces(inputs, past.memory.take());
        let o = typed(o, x.dtype());
        (self.o_proj.forward(merge_heads(self.norm.forward(o, None))), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> DecayingFastWeights<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3])
    }
}
