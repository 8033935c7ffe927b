//! Forgetting attention. Recurrence, shapes and source: [`ForgettingAttention`].

use super::{TokenMixer, key_width, linear_flops};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{
    ResidualLinear, check_epsilon, linear, linear_with_bias, merge_heads, rms_normalize,
    shift_tokens, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::score_bias::forget;
use crate::nn::softmax::{check_shared, weigh};
use crate::nn::{
    ConfigError, Cost, Kept, KeptTensors, Linear, RecurrentState, Shared, StateTensors,
};
use crate::ops::{self, GateActivation, LinearAttentionBackend, Seen, accumulator, cat, typed};
use burn::module::Module;
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`ForgettingAttention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForgettingAttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`; as many by default.
    pub key_value_heads: Option<usize>,
    /// Width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Whether each head's queries and keys are normalised.
    pub qk_norm: bool,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Whether each head's answers are normalised, before the gate.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_norm: bool,
    /// Whether keys are mixed with those of the token before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub key_shift: bool,
    /// Whether values are mixed with those of the token before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_shift: bool,
    /// Added to a mean square before its root, wherever something is normalised.
    pub norm_eps: f64,
}

impl Default for ForgettingAttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            qk_norm: false,
            output_gate: false,
            output_norm: false,
            key_shift: false,
            value_shift: false,
            norm_eps: 1e-5,
        }
    }
}

impl ForgettingAttentionConfig {
    /// Width of a head, and heads of keys and values.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        check_epsilon(self.norm_eps)?;
        Ok((width, shared))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<ForgettingAttention<B>, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        let norm = |width, is_there: bool| -> Option<RmsNorm<B>> {
            let config = RmsNormConfig::new(width).with_epsilon(self.norm_eps);
            is_there.then(|| config.init(device))
        };
        let shift = |is_there: bool| is_there.then(|| linear(d_model, shared, device));
        Ok(ForgettingAttention {
            q_proj: linear(d_model, queries, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, keys, device),
            f_proj: linear_with_bias(d_model, self.heads, device),
            g_proj: self.output_gate.then(|| linear(d_model, queries, device)),
            k_shift_proj: shift(self.key_shift),
            v_shift_proj: shift(self.value_shift),
            q_norm: norm(queries, self.qk_norm),
            k_norm: norm(keys, self.qk_norm),
            output_norm: norm(queries, self.output_norm),
            o_proj: linear(queries, d_model, device).into(),
            heads: self.heads,
            key_value_heads: shared,
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let (width, shared) = self.resolve(d_model)?;
        let (queries, keys) = (self.heads * width, shared * width);
        // On average a token looks at half the sequence: scores and their sum over values.
        let look_back = 2 * 2 * queries as u64 * (length as u64).div_ceil(2);
        let gate = if self.output_gate { queries } else { 0 };
        let shifts = usize::from(self.key_shift) + usize::from(self.value_shift);
        let inward = queries + 2 * keys + self.heads + gate + shifts * shared;
        Ok(Cost {
            state_bytes: 4 * ((2 * keys + self.heads) * length + shifts * keys) as u64,
            flops_per_token: linear_flops(d_model, inward)
                + linear_flops(queries, d_model)
                + look_back,
        })
    }
}

/// Every key and value so far, and how much of each is left: a state that grows with the sequence.
#[derive(Debug, Clone)]
pub struct ForgettingCache<B: Backend> {
    /// `[B, Hk, T, K]`.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
    /// The sum of log gates up to each token, less that up to the last: `[B, H, T]`, 0 at the end.
    pub gates: Tensor<B, 3>,
    /// Keys and values of the last token as projected, `[B, 1, Hk K]`, those of them that are shifted.
    pub last: KeptTensors<B>,
}

impl<B: Backend> RecurrentState<B> for ForgettingCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None)
            .with_growing("keys", &self.keys, 2)
            .with_growing("values", &self.values, 2)
            .with_growing("gates", &self.gates, 2)
            .with_kept("last", &self.last)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self {
            keys: tensors.take("keys"),
            values: tensors.take("values"),
            gates: tensors.take("gates"),
            last: tensors.take_kept("last"),
        }
    }
}

/// Forgetting attention (FoX): softmax attention whose scores decay by gates of the tokens in between.
///
/// # Recurrence
/// ```text
/// q, k, v = x W               [q, k of mean square 1 in each head]
/// f       = sigmoid(x W_f + b_f)                              a number for every head
/// scores  = q_i k_j^T / sqrt(K) + log f_{j+1} + .. + log f_i
/// y       = ([norm of each head] softmax(scores + causal mask) v [* sigmoid(x W_g)]) W_o
/// ```
/// ```text
/// x_t ──> q, k, v, f
///                                   ┌─ decay ───────┐   ┌─ write ─────┐
/// k, v, gates ─────────────────────>│ gates - log f │──>│ append k, v │──┬──> k, v, gates
///                                   └───────────────┘   └─────────────┘  │
///                                ┌─ read ─────────────────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ softmax(q k^T / sqrt(K) - gates) v │<─┘
///                                └────────────────────────────────────┘
/// ```
/// Positions need no other encoding. Where asked for, keys and values are mixed with those of the token
/// before, `k_t = a_t (x_{t-1} W_k) + (1 - a_t) x_t W_k` with `a = sigmoid(x W_a)`, a number for every head,
/// before their norm. All five options together are the authors' "Pro" block.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`ForgettingCache`]: `keys` and `values`,
/// `[B, Hk, T, K]`; `gates`, the sum of log f up to each token less that up to the last, `[B, H, T]`; `last`,
/// keys and values of the last token as projected, where they are shifted. It grows with T. log f is a
/// natural log of the share that is kept, for each token and head, at most 0.
/// # Errors
/// [`ForgettingAttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads`
/// of 0, `heads` that do not divide D while `key_width` is left out, `key_value_heads` that do not divide
/// `heads` or a `norm_eps` below 1e-37.
/// # Source
/// arXiv 2503.02130.
#[derive(Module, Debug)]
pub struct ForgettingAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    f_proj: Linear<B>,
    g_proj: Option<Linear<B>>,
    k_shift_proj: Option<Linear<B>>,
    v_shift_proj: Option<Linear<B>>,
    q_norm: Option<RmsNorm<B>>,
    k_norm: Option<RmsNorm<B>>,
    output_norm: Option<RmsNorm<B>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_value_heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for ForgettingAttention<B> {
    type State = ForgettingCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ForgettingCache<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ForgettingCache<B>) {
        let shared = self.key_value_heads;
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let qkv = ConvQkv::plain(projections, [self.heads, shared, shared]);
        let optional = [&self.g_proj, &self.k_shift_proj, &self.v_shift_proj]
            .map(|layer| layer.as_ref().map(Projection::plain));
        let f = Projection::plain(&self.f_proj);
        let (Qkv { q, k, v }, [f], [gate, of_keys, of_values]) =
            qkv.project_some(&x, [f], optional, &mut ConvPast::none());
        let (mut conv_states, state) = match state {
            Some(ForgettingCache { keys, values, gates, last }) => {
                (ConvPast::after(last), Some((keys, values, gates)))
            }
            None => (ConvPast::none(), None),
        };
        let both = [(Kept::Key, k, of_keys), (Kept::Value, v, of_values)];
        let [k, v] = both.map(|(name, x, share)| match share {
            Some(share) => shifted(x, share, name, &mut conv_states),
            None => x,
        });
        let q = normalize_heads(&self.q_norm, q).swap_dims(1, 2);
        let k = normalize_heads(&self.k_norm, k).swap_dims(1, 2);
        let v = v.swap_dims(1, 2);
        let gates = ops::log_sigmoid(f, 1.0).swap_dims(1, 2);
        let (keys, values, before) = match state {
            Some((keys, values, gates)) => {
                (cat(vec![keys, k], 2), cat(vec![values, v], 2), Some(gates))
            }
            None => (k, v, None),
        };
        let (forgotten, gates) = forget(gates, before, self.key_value_heads);
        let seen = Seen::Causal { window: None };
        let o = weigh(q, [&keys, &values], Some(forgotten), seen);
        let o = match &self.output_norm {
            Some(_) => merge_heads(normalize_heads(&self.output_norm, split_heads(o, self.heads))),
            None => o,
        };
        let o = match gate {
            Some(gate) => ops::gate(o, gate, GateActivation::Sigmoid),
            None => o,
        };
        let state = ForgettingCache { keys, values, gates, last: conv_states.into_next() };
        (self.o_proj.forward(o), state)
    }
}

/// `x`, `[B, T, H, K]`, mixed with the token before by the sigmoid of `share`, `[B, T, H]`.
fn shifted<B: LinearAttentionBackend>(
    x: Tensor<B, 4>,
    share: Tensor<B, 3>,
    name: Kept,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 4> {
    let heads = x.dims()[2];
    let rows = merge_heads(x.clone());
    let before = conv_states.through(name, |last| shift_tokens(&rows, last));
    let share = typed(sigmoid(accumulator(share)), x.dtype()).unsqueeze_dim::<4>(3);
    x.clone() + (split_heads(before, heads) - x) * share
}

/// RMSNorm over each head of `x`, `[B, T, H, K]`, with a weight for every channel of every head; nothing
/// without a norm.
fn normalize_heads<B: LinearAttentionBackend>(
    norm: &Option<RmsNorm<B>>,
    x: Tensor<B, 4>,
) -> Tensor<B, 4> {
    let Some(norm) = norm else { return x };
    let [_, _, heads, width] = x.dims();
    let weight = typed(norm.gamma.val(), x.dtype()).reshape([1, 1, heads, width]);
    rms_normalize(x, norm.epsilon) * weight
}
