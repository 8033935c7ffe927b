//! Gated slot attention. Recurrence, shapes and source: [`Gsa`].

use super::{
    TokenMixer, Varlen, check_divisor, check_heads, key_width, linear_flops, memory_cost,
    value_width,
};
use crate::nn::conv_qkv::ConvQkv;
use crate::nn::convolution::{ConvPast, ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, linear, merge_heads, rms_norm, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::state::CONV_STATES;
use crate::nn::{
    ConfigError, Cost, KeptTensors, Linear, RecurrentState, Shared, StateTensors, positive,
};
use crate::ops::{self, LinearAttentionBackend, Seen, accumulator, typed};
use burn::module::Module;
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Gsa`], gated slot attention. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GsaConfig {
    /// Heads.
    pub heads: usize,
    /// M, slots of a head; as many as a key is wide by default.
    pub slots: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Divisor of the log decays: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a mean square before its root. Released models have 1e-5 here, whatever other norms
    /// of theirs have.
    pub norm_eps: f64,
}

impl Default for GsaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            slots: None,
            key_width: None,
            expand_v: 1.0,
            gate_normalizer: 8.0,
            conv_size: 0,
            norm_eps: 1e-5,
        }
    }
}

/// Widths of one head that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    slots: usize,
    key: usize,
    value: usize,
}

impl GsaConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        check_heads(self.heads, None)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        let slots = positive("slots", self.slots.unwrap_or(key))?;
        check_divisor("gate_normalizer", self.gate_normalizer)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok(Widths { slots, key, value })
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Gsa<B>, ConfigError> {
        let Widths { slots, key, value } = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(Gsa {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            f_proj: linear(d_model, self.heads * slots, device),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            g_norm: RmsNormConfig::new(values).with_epsilon(self.norm_eps).init(device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            gate_normalizer: self.gate_normalizer,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { slots, key, value } = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let mut cost = memory_cost(self.heads, slots, key, false);
        cost += memory_cost(self.heads, slots, value, false);
        cost.flops_per_token += linear_flops(d_model, 2 * keys + values + self.heads * slots)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// State of a mixer with slots between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct SlotState<B: Backend> {
    /// `[B, H, M, K]`.
    pub keys: Tensor<B, 4>,
    /// `[B, H, M, V]`.
    pub values: Tensor<B, 4>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, and CyFA's clock, an angle, `[B, 1, H]`; empty
    /// without either.
    pub conv_states: KeptTensors<B>,
}

/// A state taken apart: slots of keys and of values, and conv states.
pub(super) type Parts<B> = (Option<Tensor<B, 4>>, Option<Tensor<B, 4>>, KeptTensors<B>);

impl<B: Backend> SlotState<B> {
    pub(super) fn parts(state: Option<Self>) -> Parts<B> {
        match state {
            Some(s) => (Some(s.keys), Some(s.values), s.conv_states),
            None => (None, None, KeptTensors::default()),
        }
    }
}

impl<B: Backend> RecurrentState<B> for SlotState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None)
            .with("keys", &self.keys)
            .with("values", &self.values)
            .with_kept(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self {
            keys: tensors.take("keys"),
            values: tensors.take("values"),
            conv_states: tensors.take_kept(CONV_STATES),
        }
    }
}

/// Gated slot attention (GSA): a fixed number of slots for keys and values, each with a decay, and a softmax
/// over slots.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(x W_q), silu(x W_k), silu(x W_v)      (of convolutions, where there are any)
/// a       = sigmoid(x W_f)^(1/8)                       [M], one number a slot
/// K       = diag(a) K + (1 - a)^T k                    [M, K]
/// V       = diag(a) V + (1 - a)^T v                    [M, V]
/// o       = softmax(q K^T) V
/// y       = rms_norm(silu(o)) W_o                      one norm over all heads
/// ```
/// ```text
/// x_t ──> q, k, v, a
///                     ┌─ decay ───┐   ┌─ write ───────┐
/// K_{t-1}, V_{t-1} ──>│ diag(a) K │──>│ + (1 - a)^T k │──┬──> K_t, V_t
///                     │ diag(a) V │   │ + (1 - a)^T v │  │
///                     └───────────┘   └───────────────┘  │
///                                  ┌─ read ───────────┐  │
///    y_t <── W_o <── silu, norm <──│ softmax(q K^T) V │<─┘
///                                  └──────────────────┘
/// ```
/// This is two passes of linear attention. The second has the slots for its key channels and a decay for each
/// of them. The first asks from the other side, `K q^T`, and no operation decays the channels of values:
/// there every slot is a value head of width 1 with a scalar decay, and the slots share keys and queries. The
/// power 1/8 is 1 / `gate_normalizer`.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`SlotState`]: `keys`, `[B, H, M, K]`; `values`,
/// `[B, H, M, V]`; `conv_states`, the last W - 1 inputs of each short convolution. a is a share of a slot that is
/// kept, for each token, head and slot, 0 to 1.
/// # Errors
/// [`GsaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, an `expand_v` that makes V no whole number, `slots` of
/// 0, a `gate_normalizer` that is not above 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Zhang et al., arXiv 2409.07146.
#[derive(Module, Debug)]
pub struct Gsa<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    f_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    g_norm: RmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_normalizer: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Gsa<B> {
    type State = SlotState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<SlotState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, SlotState<B>) {
        let [batch, tokens, _] = x.dims();
        let (keys, values, conv_states) = SlotState::parts(state);
        let mut conv_states = ConvPast::after(conv_states).among(shared);
        let (qkv, [f]) =
            self.qkv().project(&x, [Projection::plain(&self.f_proj)], &mut conv_states);
        let [q, k, v] = [qkv.q, qkv.k, qkv.v].map(|x| self.activated(x));
        let dtype = q.dtype();
        let g = ops::log_sigmoid(f, self.gate_normalizer); // [B, T, H M]
        let written = typed(g.clone().exp().neg() + 1.0, dtype);

        let [rows, key_width] = [g.dims()[2], k.dims()[3]];
        let keys = keys.map(|keys| {
            let states = keys.dims()[0];
            keys.reshape([states, rows, key_width, 1])
        });
        let slots = written.clone().unsqueeze_dim::<4>(3);
        let inputs = ops::LinearAttentionInputs::new(q, k, slots).with_decay(g.clone());
        let (scores, keys) = linear_attention(inputs, keys, conv_states.lengths());
        let scores = scores.reshape([batch, tokens, self.heads, rows / self.heads]);
        let shares = typed(ops::softmax(accumulator(scores), Seen::All), dtype);

        let (g, written) = (split_heads(g, self.heads), split_heads(written, self.heads));
        let inputs = ops::LinearAttentionInputs::new(shares, written, v).with_decay(g);
        let (o, values) = linear_attention(inputs, values, conv_states.lengths());
        let y = self.o_proj.forward(rms_norm(&self.g_norm, merge_heads(silu(o)), None));
        let states = keys.dims()[0]; // N where sequences of different lengths lie in one row
        let keys = keys.reshape([states, self.heads, rows / self.heads, key_width]);
        (y, SlotState { keys, values, conv_states: conv_states.into_next() })
    }
}

impl<B: LinearAttentionBackend> Gsa<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3]).silu()
    }

    /// SiLU once more behind a convolution, which has one of its own.
    fn activated(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        if self.q_conv1d.is_some() { silu(x) } else { x }
    }
}
