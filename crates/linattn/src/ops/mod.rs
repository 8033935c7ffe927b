//! Recurrences with a matrix for a state, over whole sequences or one token.
//!
//! ```text
//! S_t = e^{g_t} S_{t-1} + k_t^T u_t        [K, V]   forget, then write
//! o_t = q_t S_t                            [V]      read, after the write
//! u_t = v_t                                         linear_attention
//! u_t = beta_t (v_t - e_t e^{g_t} S_{t-1}) [V]      delta_rule; e_t is k_t, or a row of its own
//! S_t also has b_t^T (a_t S_{t-1})                  low_rank, where u_t = v_t
//! ```
//!
//! g is one number a token and head, or one for each row of S. [`Read::Before`] takes `o_t` of linear
//! attention, and the retrieved value that a delta rule corrects, from `S_{t-1}` itself.
//!
//! Devices work sequences off in chunks, so that nearly all arithmetic is matrix products. State, log decays and sums
//! are f32 whatever the inputs are (f64 for f64 inputs).
//!
//! Where the state is a vector and each channel goes by itself there is [`linear_scan`]. What only authors of
//! backends need is in [`backend`].

mod autodiff;
pub mod backend;
#[cfg(feature = "cpu")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
mod error;
mod folded;
mod fused;
#[cfg(feature = "fusion")]
mod fusion;
mod halving;
mod kalman;
mod lengths;
mod long_convolution;
mod mesa;
mod pass;
#[cfg(feature = "ndarray")]
mod plain;
mod quantized;
mod recurrence;
mod reference;
mod regression;
mod scan;
mod tensors;

pub use backend::{LinearAttentionBackend, Path};
#[cfg(feature = "cpu")]
pub(crate) use cpu::one_of_threads;
pub use error::OpError;
pub(crate) use folded::{Matrices, gated_linear, head_norm_linear, normalized_linear};
pub(crate) use fused::{
    Activation, Column, ColumnKind, ConvSplit, ConvStep, ConvolvedStep, GateActivation, HIDDEN,
    HeadNorm, LOWEST, LinearLayer, MOST_PACKED, Measure, Seen, TttInputs, activate, add_normalize,
    block_linear, by_distance, causal_mask, conv_split, conv_step, convolved_step, diagonal_taps,
    embedding, gate, gated_halves, l2_normalize, linear_cross_entropy, log_sigmoid, lstm_cells,
    next_conv_states, pack, reshape, rms_normalize, rotary, select_rows, softmax, softplus,
    standardize, ttt, turned,
};
pub use fused::{
    AdamW, AdamWStep, Clip, Discretization, LstmCells, LstmInputs, Moments, SelectiveScanInputs,
    SlstmCells, SlstmInputs, lstm, selective_scan, slstm,
};
pub use halving::Complex;
pub use kalman::{KalmanInputs, gated_kalman, gated_kalman_step};
pub use lengths::SequenceLengths;
pub use long_convolution::long_convolution;
pub(crate) use long_convolution::tap_matrices;
pub use mesa::{MesaInputs, mesa, mesa_step};
pub use quantized::{GROUP, QuantizedMatrix, WeightBits};
pub(crate) use quantized::{quantized_tensor, quantizes};
pub use recurrence::Read;
pub(crate) use reference::solve_unit_lower;
pub use scan::{complex_scan, linear_scan, linear_scan_step};

use burn::tensor::{Int, Tensor, backend::Backend, ops::FloatTensor};
use recurrence::{Forward, LogDecay, Recurrence, Transition};
pub(crate) use tensors::{
    Along, accumulator, cat, each_part, in_one_row, stack, sum_in_order, typed,
};
use tensors::{primitive, tensor};

/// Result of an operation: its outputs, and the state after the last token.
pub type OpResult<B> = Result<(Tensor<B, 4>, Tensor<B, 4>), OpError>;

/// How much of its state a head keeps: natural logs, finite and at most 0 (0 keeps all, -0.69 half).
#[derive(Debug, Clone)]
pub enum Decay<B: Backend> {
    /// One number a token and head, `[B, T, H]`, as in Mamba-2, arXiv 2405.21060.
    Scalar(Tensor<B, 3>),
    /// One number for each row of the state, `[B, T, H, K]`, as in GLA, arXiv 2312.06635.
    Vector(Tensor<B, 4>),
}

impl<B: Backend> From<Tensor<B, 3>> for Decay<B> {
    fn from(g: Tensor<B, 3>) -> Self {
        Self::Scalar(g)
    }
}

impl<B: Backend> From<Tensor<B, 4>> for Decay<B> {
    fn from(g: Tensor<B, 4>) -> Self {
        Self::Vector(g)
    }
}

impl<B: Backend> Decay<B> {
    fn log_decay(self) -> LogDecay<FloatTensor<B>> {
        match self {
            Self::Scalar(g) => LogDecay::Scalar(primitive(g)),
            Self::Vector(g) => LogDecay::Vector(primitive(g)),
        }
    }
}

/// Inputs of [`linear_attention`].
#[derive(Debug, Clone)]
pub struct LinearAttentionInputs<B: Backend> {
    /// Queries, `[B, T, Hk, K]`, already scaled (by K^-1/2 as a rule).
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, Hk, K]`. Value head j reads key head j / (H / Hk).
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// Decay.
    pub g: Option<Decay<B>>,
    /// Which state the output is taken from.
    pub read: Read,
}

impl<B: Backend> LinearAttentionInputs<B> {
    /// Without decay, read after the write.
    pub fn new(q: Tensor<B, 4>, k: Tensor<B, 4>, v: Tensor<B, 4>) -> Self {
        Self { q, k, v, g: None, read: Read::After }
    }

    /// The same with a decay.
    #[must_use]
    pub fn with_decay(self, g: impl Into<Decay<B>>) -> Self {
        Self { g: Some(g.into()), ..self }
    }

    fn recurrence(self, state: Option<Tensor<B, 4>>) -> Recurrence<FloatTensor<B>> {
        let Self { q, k, v, g, read } = self;
        let transition = Transition::Identity { read };
        recurrence([q, k, v], g, transition, state)
    }
}

/// Inputs of [`delta_rule`]. Named, because `beta` and a scalar decay have one shape: swapped, they
/// would run and be wrong.
#[derive(Debug, Clone)]
pub struct DeltaRuleInputs<B: Backend> {
    /// Queries, `[B, T, Hk, K]`, already scaled (by K^-1/2 as a rule).
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, Hk, K]`, of length 1: longer rows can make the state grow without end.
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// Share of the error to correct, `[B, T, H]`: 0 to 1, or to 2 for negative eigenvalues.
    pub beta: Tensor<B, 3>,
    /// Erase keys, whose retrieved values are corrected, `[B, T, H, K]`; the keys if absent.
    pub erase: Option<Tensor<B, 4>>,
    /// Decay.
    pub g: Option<Decay<B>>,
    /// The state that the erase keys read.
    pub read: Read,
}

impl<B: Backend> DeltaRuleInputs<B> {
    /// Without decay, erasing with the keys.
    pub fn new(q: Tensor<B, 4>, k: Tensor<B, 4>, v: Tensor<B, 4>, beta: Tensor<B, 3>) -> Self {
        Self { q, k, v, beta, erase: None, g: None, read: Read::After }
    }

    /// The same with a decay.
    #[must_use]
    pub fn with_decay(self, g: impl Into<Decay<B>>) -> Self {
        Self { g: Some(g.into()), ..self }
    }

    fn recurrence(self, state: Option<Tensor<B, 4>>) -> Recurrence<FloatTensor<B>> {
        let Self { q, k, v, beta, erase, g, read } = self;
        let transition =
            Transition::Delta { beta: primitive(beta), erase: erase.map(primitive), read };
        recurrence([q, k, v], g, transition, state)
    }
}

/// Inputs of [`low_rank`].
#[derive(Debug, Clone)]
pub struct LowRankInputs<B: Backend> {
    /// Queries, `[B, T, Hk, K]`, already scaled.
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, Hk, K]`.
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// Rows that read the state before its decay, `[B, T, H, K]`.
    pub a: Tensor<B, 4>,
    /// Rows under which the retrieved value is written, `[B, T, H, K]`.
    pub b: Tensor<B, 4>,
    /// Decay.
    pub g: Option<Decay<B>>,
}

impl<B: Backend> LowRankInputs<B> {
    fn recurrence(self, state: Option<Tensor<B, 4>>) -> Recurrence<FloatTensor<B>> {
        let Self { q, k, v, a, b, g } = self;
        let transition = Transition::LowRank { a: primitive(a), b: primitive(b) };
        recurrence([q, k, v], g, transition, state)
    }
}

/// Tensors as a backend has them, q, k and v first.
fn recurrence<B: Backend>(
    rows: [Tensor<B, 4>; 3],
    g: Option<Decay<B>>,
    transition: Transition<FloatTensor<B>>,
    state: Option<Tensor<B, 4>>,
) -> Recurrence<FloatTensor<B>> {
    let [q, k, v] = rows.map(primitive);
    let (decay, state) = (g.map(Decay::log_decay), state.map(primitive));
    Recurrence { q, k, v, decay, transition, state, lengths: None }
}

/// Decayed linear attention over whole sequences. Gradients reach every tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token, `[B, H, K, V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// Katharopoulos et al., arXiv 2006.16236; the scalar decay as in Mamba-2, arXiv 2405.21060.
pub fn linear_attention<B: LinearAttentionBackend>(
    x: LinearAttentionInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    chunked("linear_attention", x.recurrence(state))
}

/// The delta rule, gated if `g` is given, over whole sequences. Gradients reach every tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token, `[B, H, K, V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// Chunks as in DeltaNet, arXiv 2406.06484, with the decay of Gated DeltaNet, arXiv 2412.06464.
pub fn delta_rule<B: LinearAttentionBackend>(
    x: DeltaRuleInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    chunked("delta_rule", x.recurrence(state))
}

/// A decay and a transition of rank one more than the identity, `S + b^T (a S)`, over whole sequences.
/// Gradients reach every tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token, `[B, H, K, V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// RWKV-7, arXiv 2503.14456.
pub fn low_rank<B: LinearAttentionBackend>(
    x: LowRankInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    chunked("low_rank", x.recurrence(state))
}

/// [`linear_attention`] of N sequences that lie one after another in one row: B is 1, the states are `[N, H, K, V]`,
/// and no sequence sees another.
/// # Errors
/// As [`linear_attention`], and [`OpError`] where the lengths do not divide the row.
pub fn linear_attention_varlen<B: LinearAttentionBackend>(
    x: LinearAttentionInputs<B>,
    lengths: &SequenceLengths,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    varlen("linear_attention_varlen", x.recurrence(state), lengths)
}

/// [`delta_rule`] of N sequences that lie one after another in one row: B is 1, the states are `[N, H, K, V]`, and
/// no sequence sees another.
/// # Errors
/// As [`delta_rule`], and [`OpError`] where the lengths do not divide the row.
pub fn delta_rule_varlen<B: LinearAttentionBackend>(
    x: DeltaRuleInputs<B>,
    lengths: &SequenceLengths,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    varlen("delta_rule_varlen", x.recurrence(state), lengths)
}

/// [`low_rank`] of N sequences that lie one after another in one row: B is 1, the states are `[N, H, K, V]`, and no
/// sequence sees another.
/// # Errors
/// As [`low_rank`], and [`OpError`] where the lengths do not divide the row.
pub fn low_rank_varlen<B: LinearAttentionBackend>(
    x: LowRankInputs<B>,
    lengths: &SequenceLengths,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    varlen("low_rank_varlen", x.recurrence(state), lengths)
}

/// One token of [`low_rank`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`low_rank`], and [`OpError::Step`] if T is not 1.
pub fn low_rank_step<B: LinearAttentionBackend>(
    x: LowRankInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    step("low_rank_step", x.recurrence(state))
}

/// One token of [`linear_attention`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`linear_attention`], and [`OpError::Step`] if T is not 1.
pub fn linear_attention_step<B: LinearAttentionBackend>(
    x: LinearAttentionInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    step("linear_attention_step", x.recurrence(state))
}

/// One token of [`delta_rule`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`delta_rule`], and [`OpError::Step`] if T is not 1.
pub fn delta_rule_step<B: LinearAttentionBackend>(
    x: DeltaRuleInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    step("delta_rule_step", x.recurrence(state))
}

/// Causal depthwise convolution over time, `y_t = sum_w weight_w * x_{t-W+1+w}`, each channel by
/// itself. Gradients reach all inputs.
///
/// `x` is `[B, T, D]`, `weight` `[W, D]` with the newest token's row last, W at least 2, `conv_state` the W - 1 tokens
/// before `x`, `[B, W - 1, D]`, zeros if absent. Gives `[B, T, D]` and the next conv state, in the type of `x`.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn short_convolution<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    conv_state: Option<Tensor<B, 3>>,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    convolve(x, weight, None, conv_state, None, None)
}

/// As [`short_convolution`], of sequences one after another in one row: B is 1, each sees its own tokens alone, and
/// conv states, before and next, are `[N, W - 1, D]`.
///
/// In one launch whatever N on GPUs. Without padding it costs what its tokens do.
/// # Errors
/// As [`short_convolution`], and if `lengths` do not divide the one row.
pub fn short_convolution_varlen<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    conv_state: Option<Tensor<B, 3>>,
    lengths: &SequenceLengths,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    convolve(x, weight, None, conv_state, None, Some(lengths))
}

/// As [`short_convolution`], or [`short_convolution_varlen`] where there are lengths; then a bias, `[D]`, and an
/// activation, where they are given.
pub(crate) fn convolve<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    conv_state: Option<Tensor<B, 3>>,
    activation: Option<Activation>,
    lengths: Option<&SequenceLengths>,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    let op = "short_convolution";
    let ([batch, tokens, channels], [width, _]) = (x.dims(), weight.dims());
    for (tensor, dims) in [("x", x.dims().as_slice()), ("weight", weight.dims().as_slice())] {
        if dims.contains(&0) {
            return Err(OpError::Empty { op, tensor, got: dims.to_vec() });
        }
    }
    if width < 2 {
        return Err(OpError::Window { op, window: width });
    }
    if let Some(lengths) = lengths {
        lengths.check(op, batch, tokens)?;
    }
    let sequences = lengths.map_or(batch, SequenceLengths::count);
    let before = [sequences, width - 1, channels];
    let conv_state_dims = conv_state.as_ref().map_or(before, |conv_state| conv_state.dims());
    let bias_dims = bias.as_ref().map_or([channels], |bias| bias.dims());
    let shapes: [(&str, &[usize], &[usize]); 3] = [
        ("weight", &weight.dims(), &[width, channels]),
        ("conv_state", &conv_state_dims, &before),
        ("bias", &bias_dims, &[channels]),
    ];
    for (tensor, got, want) in shapes {
        if got != want {
            return Err(OpError::Shape { op, tensor, got: got.into(), want: want.into() });
        }
    }
    let conv_state = conv_state.map(|conv_state| typed(conv_state, x.dtype()));
    let next = next_conv_states(&x, &[channels], conv_state.as_slice(), width, lengths).remove(0);
    let y = weighted_tokens(x, weight, bias, (conv_state, lengths), activation);
    Ok((y, next))
}

/// As [`convolve`], of widths that go together, without what is left for the next tokens.
pub(crate) fn through_taps<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    conv_state: Option<Tensor<B, 3>>,
    lengths: Option<&SequenceLengths>,
) -> Tensor<B, 3> {
    let conv_state = conv_state.map(|conv_state| typed(conv_state, x.dtype()));
    weighted_tokens(x, weight, None, (conv_state, lengths), None)
}

/// Widest window that kernels of short convolutions keep in registers. They go through a wider one far slower than
/// those of long ones.
const SHORT: usize = 8;

/// Each channel of `x`, `[B, T, D]`, through the window of `weight`, `[W, D]`.
fn weighted_tokens<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    (conv_state, lengths): (Option<Tensor<B, 3>>, Option<&SequenceLengths>),
    activation: Option<Activation>,
) -> Tensor<B, 3> {
    if weight.dims()[0] > SHORT
        && lengths.is_none()
        && let Some(y) = long_convolution::through_window(&x, &weight, conv_state.as_ref())
    {
        let y = match bias {
            Some(bias) => y + typed(bias, x.dtype()).unsqueeze::<3>(),
            None => y,
        };
        return match activation {
            Some(activation) => activation.apply(y),
            None => y,
        };
    }
    let width = x.dims()[2];
    let kind = ColumnKind::Conv { activation, norm: None };
    let mut outputs = conv_split::<B>(ConvSplit {
        x: primitive(x),
        weight: Some(primitive(weight)),
        bias: bias.map(primitive),
        conv_state: conv_state.map(primitive),
        a_log: None,
        dt_bias: None,
        columns: vec![Column { width, kind }],
        lengths: lengths.cloned(),
    });
    outputs.remove(0)
}

/// `activation(x * weight + bias)`, a number of `weight` and `bias`, `[D]`, for each channel of `x`, `[B, T, D]`: a
/// convolution whose window is one token. Sums over tokens for gradients of `weight` and `bias` are part of it.
/// # Panics
/// If the widths do not go together.
pub(crate) fn scale_channels<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 1>,
    bias: Option<Tensor<B, 1>>,
    activation: Option<Activation>,
) -> Tensor<B, 3> {
    let width = x.dims()[2];
    assert_eq!(weight.dims(), [width], "a factor for each channel of `x`");
    assert!(bias.as_ref().is_none_or(|bias| bias.dims() == [width]), "and a bias");
    weighted_tokens(x, weight.unsqueeze::<2>(), bias, (None, None), activation)
}

/// `-e^{a_log} softplus(x + dt_bias)`: log decays, in f32 (f64 for f64 inputs), of `x`, `[B, T, W]`. There
/// is a bias for each column, `[W]`, and a number `a_log` for each head, `[H]`, W / H columns of `x`.
/// # Panics
/// If the widths do not go together.
pub(crate) fn log_decays<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
) -> Tensor<B, 3> {
    let ([_, _, width], [heads]) = (x.dims(), a_log.dims());
    assert_eq!(dt_bias.dims(), [width], "a bias for each column of `x`");
    assert!(width.is_multiple_of(heads), "{width} columns are no multiple of {heads} heads");
    let mut outputs = conv_split::<B>(ConvSplit {
        x: primitive(x),
        weight: None,
        bias: None,
        conv_state: None,
        a_log: Some(primitive(a_log)),
        dt_bias: Some(primitive(dt_bias)),
        columns: vec![Column { width, kind: ColumnKind::LogDecay }],
        lengths: None,
    });
    outputs.remove(0)
}

/// A linear layer's `x W + b` over the last dimension of `x`. Gradients reach all inputs.
///
/// `x` is `[.., from]`, `weight` `[from, to]`, `bias` `[to]`. Gives `[.., to]`, in the type of `x`.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn affine<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Result<Tensor<B, D>, OpError> {
    let [from, to] = weight.dims();
    let mut wanted = x.dims();
    wanted[D - 1] = from;
    let of_bias = bias.as_ref().map(|bias| ("bias", bias.dims().to_vec(), vec![to]));
    for (tensor, got, want) in
        [("x", x.dims().to_vec(), wanted.to_vec())].into_iter().chain(of_bias)
    {
        if got != want {
            return Err(OpError::Shape { op: "affine", tensor, got, want });
        }
    }
    let (weight, bias) = (primitive(weight), bias.map(primitive));
    if D == 1 {
        // Backends multiply matrices: a vector is one of one row.
        let x = primitive(x.unsqueeze::<2>());
        return Ok(fused::linear::<B, 2>(LinearLayer { x, weight, bias }).squeeze_dim(0));
    }
    Ok(fused::linear(LinearLayer { x: primitive(x), weight, bias }))
}

/// `x [W_1 W_2 ..]` over the last dimension of `x`, `[.., from]` by `[from, to_i]` each, with every matrix where it
/// lies; `None` where this backend has no such product for these tensors, or packing the matrices costs little.
/// No gradient flows through it.
pub(crate) fn side_by_side<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    weights: Vec<Tensor<B, 2>>,
) -> Option<Tensor<B, D>> {
    let weights: Vec<_> = weights.into_iter().map(primitive).collect();
    B::side_by_side(primitive(x), &weights).map(tensor)
}

/// `x [W_1^T W_2^T ..]` over the last dimension of `x` for quantized matrices of the same bits, `[to, from]`, as
/// they are; `None` where this backend has no such product for this `x`. No gradient flows through it.
/// # Panics
/// If `x` is not as wide as each matrix, or their bits differ.
pub fn quantized_linear<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    weights: &[&QuantizedMatrix<B>],
) -> Option<Tensor<B, D>> {
    mixed_linear(x, weights, std::iter::empty())
}

/// The place of the largest number of each row of `x`, `[M, N]`: `[M]`, the first of several. NaN is never the largest
/// where a kernel finds it.
pub fn argmax<B: LinearAttentionBackend>(x: Tensor<B, 2>) -> Tensor<B, 1, Int> {
    match B::argmax_of_rows(primitive(x.clone())) {
        Some(places) => Tensor::new(places),
        None => x.argmax(1).squeeze_dim(1),
    }
}

/// As [`quantized_linear`], with narrow matrices of floats, `[from, to]`, behind the quantized ones.
pub(crate) fn mixed_linear<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    weights: &[&QuantizedMatrix<B>],
    floats: impl Iterator<Item = Tensor<B, 2>>,
) -> Option<Tensor<B, D>> {
    let from = x.dims()[D - 1];
    for weight in weights {
        assert_eq!(from, weight.size()[1], "`x` is as wide as each matrix");
        assert_eq!(weight.bits(), weights[0].bits(), "matrices have the same bits");
    }
    let inside = |matrix: Tensor<B, 2>| {
        assert_eq!(from, matrix.dims()[0], "`x` is as wide as each matrix");
        primitive(matrix)
    };
    let floats: Vec<_> = floats.map(inside).collect();
    B::quantized_linear(primitive(x), weights, &floats).map(tensor)
}

/// Parameters after one step of AdamW (arXiv 1711.05101), and their states.
///
/// `m = beta_1 m + (1 - beta_1) g`, `v = beta_2 v + (1 - beta_2) g^2`, and
/// `p = (1 - rate decay) p - rate (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)`.
pub fn adamw_step<B: LinearAttentionBackend>(
    steps: Vec<AdamWStep<FloatTensor<B>>>,
    adamw: AdamW,
    clip: Option<Clip<FloatTensor<B>>>,
) -> Vec<(FloatTensor<B>, Moments<FloatTensor<B>>)> {
    B::adamw_step(steps, adamw, clip)
}

/// Length of the gradient over all parameters together, `[1]`.
/// # Panics
/// If there is no gradient.
pub fn global_norm<B: LinearAttentionBackend>(gradients: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    assert!(!gradients.is_empty(), "a model has parameters that its loss depends on");
    B::global_norm(gradients)
}

/// The way the operations take on this backend: written kernels or tensor operations.
pub fn path<B: LinearAttentionBackend>(device: &B::Device) -> Path {
    B::path(device)
}

fn chunked<B: LinearAttentionBackend>(
    op: &'static str,
    x: Recurrence<FloatTensor<B>>,
) -> OpResult<B> {
    x.check(op)?;
    let Forward { o, state, .. } = B::chunkwise(x, false);
    Ok((tensor(o), tensor(state)))
}

fn varlen<B: LinearAttentionBackend>(
    op: &'static str,
    x: Recurrence<FloatTensor<B>>,
    lengths: &SequenceLengths,
) -> OpResult<B> {
    chunked(op, Recurrence { lengths: Some(lengths.clone()), ..x })
}

fn step<B: LinearAttentionBackend>(op: &'static str, x: Recurrence<FloatTensor<B>>) -> OpResult<B> {
    x.check(op)?;
    check_one_token(op, x.dims().tokens)?;
    let (o, state) = B::recurrent_step(x);
    Ok((tensor(o), tensor(state)))
}

fn check_one_token(op: &'static str, tokens: usize) -> Result<(), OpError> {
    match tokens {
        1 => Ok(()),
        tokens => Err(OpError::Step { op, tokens }),
    }
}
