//! HGRN2. Recurrence, shapes and source: [`Hgrn2`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_heads, key_width, linear_flops, memory_cost,
    value_width,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, linear, merge_heads, rms_norm, split_heads,
};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{self, Activation, LinearAttentionBackend, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Least f whose log is taken: a bound that small is none, and ln 0 no number.
const LEAST_KEPT: f64 = 1e-30;

/// Config of [`Hgrn2`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hgrn2Config {
    /// Heads.
    pub heads: usize,
    /// K, rows of a head's memory; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Least share that a forget gate keeps, where learning starts, below 1; 0 for no bound at all.
    pub lower_bound: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a mean square before its root. Released models have 1e-5 here, whatever other norms
    /// of theirs have.
    pub norm_eps: f64,
}

impl Default for Hgrn2Config {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            lower_bound: 0.0,
            conv_size: 0,
            norm_eps: 1e-5,
        }
    }
}

impl Hgrn2Config {
    /// K and V.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        check_heads(self.heads, None)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        check_lower_bound(self.lower_bound)?;
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
    ) -> Result<Hgrn2<B>, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(Hgrn2 {
            q_proj: linear(d_model, keys, device),
            f_proj: linear(d_model, keys, device),
            i_proj: linear(d_model, values, device),
            lower_bound: fresh_bound(self.lower_bound, keys, device),
            q_conv1d: conv(keys),
            f_conv1d: conv(keys),
            i_conv1d: conv(values),
            g_norm: RmsNormConfig::new(values).with_epsilon(self.norm_eps).init(device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
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
            linear_flops(d_model, 2 * keys + values) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Refuses what a forget gate cannot be kept above.
pub(super) fn check_lower_bound(share: f64) -> Result<(), ConfigError> {
    match (0.0..1.0).contains(&share) {
        true => Ok(()),
        false => Err(ConfigError::new("lower_bound", share, "at least 0 and below 1")),
    }
}

/// The inverse sigmoid of a bound, `[width]`; none for a bound of 0.
pub(super) fn fresh_bound<B: Backend>(
    share: f64,
    width: usize,
    device: &B::Device,
) -> Option<Param<Tensor<B, 1>>> {
    let logit = Initializer::Constant { value: (share / (1.0 - share)).ln() };
    (share > 0.0).then(|| logit.init([width], device))
}

/// 1 - f of a forget gate f = b + (1 - b) sigmoid(x), in a form that keeps its small values exact.
pub(super) fn forgotten<B: Backend>(
    x: Tensor<B, 3>,
    bound: &Option<Param<Tensor<B, 1>>>,
) -> Tensor<B, 3> {
    let written = sigmoid(x.neg());
    match bound {
        Some(bound) => {
            let rest = sigmoid(typed(bound.val(), written.dtype()).neg()); // 1 - b
            written * rest.unsqueeze::<3>()
        }
        None => written,
    }
}

/// HGRN2: a linear RNN whose forget gate also says how much is written, so that there are no keys.
///
/// # Recurrence
/// ```text
/// q, f, v = silu(x W_q), b + (1 - b) sigmoid(x W_f), x W_i
/// S       = diag(f) S + (1 - f)^T v
/// y       = rms_norm(q S / sqrt(K)) W_o        one norm over all heads
/// ```
/// ```text
/// x_t ──> q, f, v
///            ┌─ decay ───┐   ┌─ write ───────┐
/// S_{t-1} ──>│ diag(f) S │──>│ + (1 - f)^T v │──┬──> S_t
///            └───────────┘   └───────────────┘  │
///                            ┌─ read ────────┐  │
///    y_t <── W_o <── norm <──│ q S / sqrt(K) │<─┘
///                            └───────────────┘
/// ```
/// b is the lower bound of the forget gate: 0, or one learnt number a channel.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]`, f32; `conv_states`,
/// the last W - 1 inputs of each short convolution; `position`, tokens seen. f is a share of a row that is
/// kept, for each token, head and row, b to 1.
/// # Errors
/// [`Hgrn2Config::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0, `heads`
/// that do not divide D while `key_width` is left out, an `expand_v` that makes V no whole number, a
/// `lower_bound` outside 0 to 1, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Qin et al., arXiv 2404.07904.
/// # Departures
/// There the bounds of all layers are learnt together so that they rise with depth; here each layer learns
/// its own, from where its config lets it start.
#[derive(Module, Debug)]
pub struct Hgrn2<B: Backend> {
    q_proj: Linear<B>,
    f_proj: Linear<B>,
    i_proj: Linear<B>,
    /// `[H K]`: the inverse sigmoid of the bound.
    lower_bound: Option<Param<Tensor<B, 1>>>,
    q_conv1d: Option<ShortConvolution<B>>,
    f_conv1d: Option<ShortConvolution<B>>,
    i_conv1d: Option<ShortConvolution<B>>,
    g_norm: RmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Hgrn2<B> {
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
        let projections = [&self.q_proj, &self.f_proj, &self.i_proj];
        let convolutions = [&self.q_conv1d, &self.f_conv1d, &self.i_conv1d];
        let qfi = ConvQkv::convolved(projections, convolutions, [self.heads; 3]);
        let (Qkv { q, k: f, v }, []) = qfi.activated([Some(Activation::Silu), None, None]).project(
            &x,
            [],
            &mut past.conv_states,
        );
        let (g, k) = self.forget(merge_heads(f));
        let (g, k) = (split_heads(g, self.heads), split_heads(k, self.heads));
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let y = self.o_proj.forward(rms_norm(&self.g_norm, merge_heads(o), None));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Hgrn2<B> {
    /// ln f and 1 - f, each from what keeps its small values exact; in f32 at least, where f is not rounded
    /// to 0 by as much as a bound has.
    fn forget(&self, x: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let dtype = x.dtype();
        let x = accumulator(x);
        let written = forgotten(x.clone(), &self.lower_bound);
        let g = match self.lower_bound {
            Some(_) => (written.clone().neg() + 1.0).clamp_min(LEAST_KEPT).log(),
            None => ops::log_sigmoid(x, 1.0),
        };
        (g, typed(written, dtype))
    }
}
