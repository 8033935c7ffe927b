//! MetaLA. Recurrence, shapes and source: [`MetaLa`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_divisor, half_key_width, linear_flops,
    memory_cost, value_width,
};
use crate::nn::convolution::{ShortConvolution, check_window, convolve_if_any};
use crate::nn::layers::{
    INIT_STD, ResidualLinear, check_epsilon, linear, linear_with_bias, merge_heads, split_heads,
    standardize,
};
use crate::nn::projection::{Projection, project};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{self, Along, GateActivation, LinearAttentionBackend, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`MetaLa`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetaLaConfig {
    /// Heads.
    pub heads: usize,
    /// K, rows of a head's memory; half of d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Divisor of the log decays: the larger, the longer a fresh layer remembers.
    pub gate_normalizer: f64,
    /// Whether a token sees itself once more.
    pub self_augmentation: bool,
    /// Tokens the short convolution before all projections sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a variance before its root.
    pub norm_eps: f64,
}

impl Default for MetaLaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 2.0,
            gate_normalizer: 16.0,
            self_augmentation: true,
            conv_size: 4,
            norm_eps: 1e-5,
        }
    }
}

impl MetaLaConfig {
    /// K and V.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("heads", self.heads)?;
        let key = half_key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        check_divisor("gate_normalizer", self.gate_normalizer)?;
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
    ) -> Result<MetaLa<B>, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let small = Initializer::Normal { mean: 0.0, std: INIT_STD };
        Ok(MetaLa {
            q_proj: linear(d_model, keys, device),
            k_gate: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            g_proj: linear_with_bias(d_model, values, device),
            aug_balance: self.self_augmentation.then(|| small.init([keys], device)),
            conv1d: ShortConvolution::optional(d_model, self.conv_size, device),
            out_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            gate_normalizer: self.gate_normalizer,
            norm_eps: self.norm_eps,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let mut cost = memory_cost(self.heads, key, value, false);
        cost.flops_per_token +=
            linear_flops(d_model, 2 * keys + 2 * values) + linear_flops(values, d_model);
        cost.flops_per_token += 2 * (self.conv_size * d_model) as u64;
        cost.state_bytes += 4 * (self.conv_size.saturating_sub(1) * d_model) as u64;
        Ok(cost)
    }
}

/// MetaLA: linear attention without keys, in which a row is written by as much as it forgets.
///
/// Every token sees itself once more, besides the state.
///
/// # Recurrence
/// ```text
/// x       = silu(conv(x))
/// q, v    = x W_q, x W_v
/// a       = sigmoid(x W_k)^(1/16)
/// S       = diag(a) S + (1 - a)^T v
/// o       = q S / sqrt(K) + sigmoid((q . w (1 - a)) v)       w: one learnt number a channel
/// y       = (layer_norm(o) silu(x W_g + b)) W_o              over each head, without weights
/// ```
/// ```text
/// x_t ──> q, a, v
///                                             ┌─ decay ───┐   ┌─ write ───────┐
/// S_{t-1} ───────────────────────────────────>│ diag(a) S │──>│ + (1 - a)^T v │──┬──> S_t
///                                             └───────────┘   └───────────────┘  │
///                                ┌─ read ─────────────────────────────────────┐  │
///  y_t <── W_o <── norm, gate <──│ q S / sqrt(K) + sigmoid((q . w (1 - a)) v) │<─┘
///                                └────────────────────────────────────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of the short convolution; `position`, tokens seen. a is a share of a row that is
/// kept, for each token, head and row, 0 to 1.
/// # Errors
/// [`MetaLaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D / 2 while `key_width` is left out, an `expand_v` that makes V no whole number, a
/// `gate_normalizer` that is not above 0, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Chou et al., arXiv 2411.10741, details as in the authors' code.
/// # Departures
/// There w starts from zero; here it is small and random.
#[derive(Module, Debug)]
pub struct MetaLa<B: Backend> {
    q_proj: Linear<B>,
    k_gate: Linear<B>,
    v_proj: Linear<B>,
    g_proj: Linear<B>,
    /// w, `[H K]`.
    aug_balance: Option<Param<Tensor<B, 1>>>,
    conv1d: Option<ShortConvolution<B>>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    gate_normalizer: f64,
    #[module(skip)]
    norm_eps: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for MetaLa<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let x = convolve_if_any(&self.conv1d, x, Kept::Input, &mut past.conv_states);
        let projections = [&self.q_proj, &self.v_proj, &self.k_gate, &self.g_proj];
        let [q, v, g, gate] =
            project(&x, projections.map(Projection::plain), &mut past.conv_states);
        let dtype = q.dtype();
        let (q, v) = (split_heads(q, self.heads), split_heads(v, self.heads));
        let g = split_heads(ops::log_sigmoid(g, self.gate_normalizer), self.heads);
        let k = g.clone().exp().neg() + 1.0;
        let own = self.aug_balance.as_ref().map(|w| {
            let w: Tensor<B, 4> = w.val().reshape([1, 1, self.heads, q.dims()[3]]);
            let share = (accumulator(q.clone()) * k.clone() * w).sum_along(3);
            typed(sigmoid(share * accumulator(v.clone())), dtype)
        });
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let inputs = ops::LinearAttentionInputs::new(q * scale, typed(k, dtype), v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let o = match own {
            Some(own) => o + own,
            None => o,
        };
        let o = merge_heads(standardize(o, self.norm_eps));
        let y = self.out_proj.forward(ops::gate(o, gate, GateActivation::Silu));
        (y, past.then(memory, tokens))
    }
}
