//! Cyclic flow attention. Recurrence, shapes and source: [`CyFa`].

use super::{SlotState, TokenMixer, Widths, head_widths, linear_flops, memory_cost};
use crate::nn::conv_qkv::ConvQkv;
use crate::nn::convolution::{ConvPast, ShortConvolution, check_window, convolution_cost};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, rms_norm,
};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::rope::{Turn, sum_of_angles};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, LinearAttentionBackend, LinearAttentionInputs, Seen, accumulator, typed};
use burn::module::{Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::TAU;

/// Most rows of slots: a head learns a square of them.
const MOST_SLOTS: usize = 4096;

/// Config of [`CyFa`], cyclic flow attention. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CyFaConfig {
    /// Heads.
    pub heads: usize,
    /// M, rows of slots of a head, even, at least 4; M - 1 relative times.
    pub slots: usize,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for CyFaConfig {
    fn default() -> Self {
        Self { heads: 1, slots: 128, key_width: None, expand_v: 1.0, conv_size: 4, norm_eps: 1e-5 }
    }
}

impl CyFaConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let widths = head_widths(self.heads, None, self.key_width, self.expand_v, d_model)?;
        if !(4..=MOST_SLOTS).contains(&self.slots) || !self.slots.is_multiple_of(2) {
            let want = format!("even, for pairs of them to turn, and from 4 to {MOST_SLOTS}");
            return Err(ConfigError::new("slots", self.slots, want));
        }
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
    ) -> Result<CyFa<B>, ConfigError> {
        let Widths { key, value, keys, values, .. } = self.resolve(d_model)?;
        let (heads, times) = (self.heads, self.slots - 1);
        let project = |to| linear(d_model, to, device);
        let gate = || linear_with_bias(d_model, heads, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        let norm = || RmsNormConfig::new(key).with_epsilon(self.norm_eps).init(device);
        let readout = Tensor::eye(times, device).unsqueeze_dim::<3>(0).repeat_dim(0, heads);
        Ok(CyFa {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            a_proj: project(heads),
            b_proj: gate(),
            d_proj: gate(),
            a_log: fresh_a_log(heads, 0.0, device),
            dt_bias: fresh_dt_bias(heads, device),
            readout: Param::from_tensor(readout),
            q_norm: norm(),
            k_norm: norm(),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_proj: vec![project(value), linear_with_bias(value, values, device)],
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { heads, key, value, keys, values } = self.resolve(d_model)?;
        let mut cost = memory_cost(heads, self.slots, key, false);
        cost += memory_cost(heads, self.slots, value, false);
        cost.state_bytes += 4 * heads as u64;
        cost.flops_per_token += (4 * heads * self.slots * (self.slots - 1)) as u64;
        cost.flops_per_token += linear_flops(d_model, 2 * keys + values + 3 * heads + value)
            + linear_flops(value, values)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Cyclic flow attention (CyFA): slots for relative times, that a clock of the data turns, and a softmax over
/// them.
///
/// # Recurrence
/// ```text
/// q, k    = rms_norm(conv(x W_q)), rms_norm(conv(x W_k)),  v = conv(x W_v)
/// g       = -exp(A_log) softplus(x W_a + dt_bias),  beta = sigmoid(x W_b + b_b)
/// clock   = clock + sigmoid(x W_d + b_d)    a number for every head; no gradient to x
/// R       = turn of pair f, channels f and f + M / 2, by 2 pi f clock / (M - 1)
/// a       = beta w R^-1                     [M], w_f = sqrt(2 / (M - 1)), of f = 0 sqrt(1 / (M - 1)), else 0
/// K       = e^g K + a^T k                   [M, K]
/// V       = e^g V + a^T v                   [M, V]
/// E       = readout F                       [M - 1, M], F_rf = w_f cos and w_f sin of 2 pi f r / (M - 1)
/// o       = softmax((q K^T / sqrt(K)) R E^T) E R^-1 V
/// y       = (rms_norm((M - 1) o) sigmoid((x W_g) W_g' + b)) W_o
/// ```
/// ```text
/// x_t, clock_t ──> q, k, v, g, a, R
///                                                     ┌─ decay ┐   ┌─ write ─┐
/// K_{t-1}, V_{t-1} ──────────────────────────────────>│ e^g K  │──>│ + a^T k │──┬──> K_t, V_t
///                                                     │ e^g V  │   │ + a^T v │  │
///                                                     └────────┘   └─────────┘  │
///                                ┌─ read ────────────────────────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ softmax((q K^T / sqrt(K)) R E^T) E R^-1 V │<─┘
///                                └───────────────────────────────────────────┘
/// ```
/// Channel M / 2, the sine of f = 0, is always 0. This is two passes of linear attention with one decay.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`SlotState`]: `keys`, `[B, H, M, K]`; `values`,
/// `[B, H, M, V]`; `conv_states`, the last W - 1 inputs of each short convolution, and the clock as an angle in
/// radians, `[B, 1, H]`. g is a natural log of the share kept, for each token and head, at most 0. beta is
/// the share of a token that is written, 0 to 1.
/// # Errors
/// [`CyFaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, an `expand_v` that makes V no whole number, `slots`
/// that are odd or outside 4 to 4096, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// CyFA, arXiv 2609.36259, and flash-linear-attention. `readout` starts as 1, A uniform in 0 to 16, steps
/// log-uniform in 0.001 to 0.1.
/// # Departures
/// There the two channels of a pair stand side by side; here they are M / 2 apart.
#[derive(Module, Debug)]
pub struct CyFa<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    b_proj: Linear<B>,
    d_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    /// `[H, M - 1, M - 1]`.
    readout: Param<Tensor<B, 3>>,
    q_norm: RmsNorm<B>,
    k_norm: RmsNorm<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_proj: Vec<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for CyFa<B> {
    type State = SlotState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<SlotState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, SlotState<B>) {
        let (keys, values, conv_states) = SlotState::parts(state);
        let mut conv_states = ConvPast::after(conv_states);
        let gates = [
            Projection::log_decay(&self.a_proj, LogDecayParams::new(&self.a_log, &self.dt_bias)),
            Projection::beta(&self.b_proj, 1.0),
            Projection::plain(&self.g_proj[0]),
        ];
        let (qkv, [g, beta, gate]) = self.qkv().project(&x, gates, &mut conv_states);
        let dtype = qkv.v.dtype();
        let scale = (qkv.q.dims()[3] as f64).powf(-0.5);
        let q = rms_norm(&self.q_norm, qkv.q, None) * scale;
        let k = rms_norm(&self.k_norm, qkv.k, None);

        let times = self.readout.dims()[1];
        let ticks =
            sigmoid(accumulator(self.d_proj.forward(x.clone().detach()))) * (TAU / times as f64);
        let clock = conv_states.through(Kept::Angles, |before| sum_of_angles(ticks, before));
        let angles = pair_angles(clock, times);
        let (forward, back) = (Turn::by(angles.clone()), Turn::by(angles.neg()));
        let [batch, tokens, heads] = beta.dims();
        let weights = pair_weights(times, (&x.device(), beta.dtype()));
        let atom = weights.unsqueeze::<4>().expand([batch, tokens, heads, times + 1]);
        let atom = typed(back.forward(atom) * beta.unsqueeze_dim(3), dtype);

        let inputs = LinearAttentionInputs::new(q, k, atom.clone()).with_decay(g.clone());
        let keys = keys.map(|keys| keys.swap_dims(2, 3));
        let (scores, keys) = linear_attention(inputs, keys, None);
        let shares = back.forward(self.shares(forward.forward(accumulator(scores))));
        let inputs = LinearAttentionInputs::new(typed(shares, dtype), atom, qkv.v).with_decay(g);
        let (o, values) = linear_attention(inputs, values, None);
        let gate = self.g_proj[1].forward(gate);
        let output = GatedOutput::sigmoid(&self.o_norm, &self.o_proj);
        let y = output.forward(o * times as f64, Some(gate));
        (y, SlotState { keys: keys.swap_dims(2, 3), values, conv_states: conv_states.into_next() })
    }
}

impl<B: LinearAttentionBackend> CyFa<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.a_log.dims()[0]; 3];
        ConvQkv::convolved(projections, convolutions, heads).activated([None; 3])
    }

    /// How much of each row is read, by a softmax over relative times, of scores of rows, `[B, T, H, M]`.
    fn shares(&self, scores: Tensor<B, 4>) -> Tensor<B, 4> {
        let times = self.readout.dims()[1];
        let readout = typed(self.readout.val(), scores.dtype());
        let basis = fourier_basis(times, (&scores.device(), scores.dtype()));
        let table = readout.matmul(basis.unsqueeze()).unsqueeze::<4>(); // [1, H, M - 1, M]
        let logits = scores.swap_dims(1, 2).matmul(table.clone().swap_dims(2, 3));
        ops::softmax(logits, Seen::All).matmul(table).swap_dims(1, 2)
    }
}

/// Angles of each pair, `[B, T, H, M / 2]`, of the clock as an angle, `[B, T, H]`.
fn pair_angles<B: Backend>(clock: Tensor<B, 3>, times: usize) -> Tensor<B, 4> {
    let pairs: Vec<f32> = (0..times.div_ceil(2)).map(|pair| pair as f32).collect();
    let data = TensorData::new(pairs, [1, 1, 1, times.div_ceil(2)]);
    clock.clone().unsqueeze_dim::<4>(3) * Tensor::from_data(data, (&clock.device(), clock.dtype()))
}

/// w of pair `pair`.
fn weight(pair: usize, times: usize) -> f64 {
    (if pair == 0 { 1.0 } else { 2.0 } / times as f64).sqrt()
}

/// w, `[M]`: a weight for each pair, then zeros.
fn pair_weights<B: Backend>(times: usize, options: (&B::Device, DType)) -> Tensor<B, 1> {
    let pairs = times.div_ceil(2);
    let weights = (0..2 * pairs).map(|i| if i < pairs { weight(i, times) } else { 0.0 });
    let weights: Vec<f64> = weights.collect();
    Tensor::from_data(TensorData::new(weights, [2 * pairs]), options)
}

/// F, `[M - 1, M]`.
fn fourier_basis<B: Backend>(times: usize, options: (&B::Device, DType)) -> Tensor<B, 2> {
    let pairs = times.div_ceil(2);
    let cell = |time: usize, i: usize| {
        let (pair, turn) = (i % pairs, (i % pairs * time % times) as f64 / times as f64 * TAU);
        weight(pair, times) * if i < pairs { turn.cos() } else { turn.sin() }
    };
    let cells = (0..times).flat_map(|time| (0..2 * pairs).map(move |i| cell(time, i)));
    let cells: Vec<f64> = cells.collect();
    Tensor::from_data(TensorData::new(cells, [times, 2 * pairs]), options)
}
