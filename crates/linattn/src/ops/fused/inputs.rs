//! Inputs of the fused layers, which backends and the layers themselves both know.

use crate::ops::SequenceLengths;
use crate::ops::tensors::softplus_in_tensor_ops;
use burn::tensor::activation::{gelu, gelu_approximate, relu, sigmoid, silu};
use burn::tensor::{DType, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Activation of a convolution, and of the gate behind a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
}

impl Activation {
    pub(in crate::ops) fn apply<B: Backend, const D: usize>(self, z: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Silu => silu(z),
            Self::Sigmoid => sigmoid(z),
        }
    }
}

/// Activation of the gate of a [`GatedProduct`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `ln(1 + e^z)`.
    Softplus,
    /// `ln(sigmoid(z))`.
    LogSigmoid,
    /// `z P(z)`, P the normal distribution's share below z. Source: arXiv 1606.08415.
    Gelu,
    /// `z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2`, which is near GELU.
    GeluTanh,
    /// `max(z, 0)^2`. Source: arXiv 2109.08668.
    SquaredRelu,
}

impl From<Activation> for GateActivation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::Silu,
            Activation::Sigmoid => Self::Sigmoid,
        }
    }
}

impl GateActivation {
    pub(in crate::ops) fn apply<B: Backend, const D: usize>(self, z: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Silu => silu(z),
            Self::Sigmoid => sigmoid(z),
            Self::Softplus => softplus_in_tensor_ops(z),
            Self::LogSigmoid => softplus_in_tensor_ops(z.neg()).neg(),
            Self::Gelu => gelu(z),
            Self::GeluTanh => gelu_approximate(z),
            Self::SquaredRelu => {
                let z = relu(z);
                z.clone() * z
            }
        }
    }
}

/// Divisor of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// `sqrt(mean h^2 + epsilon)`.
    RootMeanSquare,
    /// `sqrt(sum h^2 + epsilon)`.
    Length,
    /// The mean is taken off first, then `sqrt(variance + epsilon)`: LayerNorm.
    Standard,
}

/// `h = x + residual`, and `y = h / size(h) * factor * weight + bias`, times `activation(gate)`, over the
/// last dimension.
#[derive(Debug, Clone)]
pub struct Normalization<T> {
    /// Rows.
    pub x: T,
    /// Added to `x` first; shaped as `x`, of any type.
    pub residual: Option<T>,
    /// A weight for each column, a tensor of one dimension of any type.
    pub weight: Option<T>,
    /// A bias for each column, likewise.
    pub bias: Option<T>,
    /// A gate for each number, shaped as `x`.
    pub gate: Option<T>,
    /// Applied to the gate.
    pub activation: Activation,
    /// Divisor of a row.
    pub measure: Measure,
    /// Added to the mean or the sum of squares, above 0.
    pub epsilon: f64,
    /// Multiplies every number.
    pub factor: f64,
    /// Type of `y`; `h` has the type of the residual.
    pub dtype: DType,
}

impl<T> Normalization<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let Self { x, residual, weight, bias, gate, .. } = self;
        [Some(x), residual, weight, bias, gate].into_iter().flatten().collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> Normalization<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        Normalization {
            x: next(),
            residual: self.residual.is_some().then(&mut next),
            weight: self.weight.is_some().then(&mut next),
            bias: self.bias.is_some().then(&mut next),
            gate: self.gate.is_some().then(&mut next),
            activation: self.activation,
            measure: self.measure,
            epsilon: self.epsilon,
            factor: self.factor,
            dtype: self.dtype,
        }
    }
}

/// Heads of unit length: rows of `width` consecutive columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNorm {
    /// Columns of a head.
    pub width: usize,
    /// Length that rows get.
    pub factor: f64,
}

/// Treatment of some columns of a packed projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ColumnKind {
    /// Convolved over time where there is a weight, then activated, then normalised.
    Conv {
        /// Applied to the convolution's sum.
        activation: Option<Activation>,
        /// The norm of its heads.
        norm: Option<HeadNorm>,
    },
    /// As they are.
    Copy,
    /// `scale * sigmoid(x)`, in f32 at least.
    Beta {
        /// 1, or 2 for negative eigenvalues.
        scale: f64,
    },
    /// `-e^{a_log} softplus(x + dt_bias)`, in f32 at least.
    LogDecay,
}

/// Some columns of a packed projection, which become a tensor of their own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Column {
    /// How many there are.
    pub width: usize,
    /// Their treatment.
    pub kind: ColumnKind,
}

/// A packed projection and the parameters of what follows it. Columns that are convolved come first;
/// there are C of them.
#[derive(Debug, Clone)]
pub struct ConvSplit<T> {
    /// `[B, T, P]`.
    pub x: T,
    /// `[W, C]`; the last row meets the newest token. Without it W is 1.
    pub weight: Option<T>,
    /// `[C]`.
    pub bias: Option<T>,
    /// The W - 1 tokens before `x`, `[B, W - 1, C]`, or `[N, W - 1, C]` of N sequences in one row; zeros if
    /// absent.
    pub conv_state: Option<T>,
    /// ln A, `[H]`; columns of the log decay share a number in groups.
    pub a_log: Option<T>,
    /// The bias of step sizes, one for each column of the log decay.
    pub dt_bias: Option<T>,
    /// All P columns, first to last.
    pub columns: Vec<Column>,
    /// Sequences of lengths of their own in the one row of `x`; absent where every row is a sequence.
    pub lengths: Option<SequenceLengths>,
}

impl<T> ConvSplit<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let Self { x, weight, bias, conv_state, a_log, dt_bias, columns: _, lengths: _ } = self;
        [Some(x), weight, bias, conv_state, a_log, dt_bias].into_iter().flatten().collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> ConvSplit<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        ConvSplit {
            x: next(),
            weight: self.weight.is_some().then(&mut next),
            bias: self.bias.is_some().then(&mut next),
            conv_state: self.conv_state.is_some().then(&mut next),
            a_log: self.a_log.is_some().then(&mut next),
            dt_bias: self.dt_bias.is_some().then(&mut next),
            columns: self.columns.clone(),
            lengths: self.lengths.clone(),
        }
    }

    /// C, columns that are convolved.
    pub fn convolved(&self) -> usize {
        let convolved = |column: &&Column| matches!(column.kind, ColumnKind::Conv { .. });
        self.columns.iter().filter(convolved).map(|column| column.width).sum()
    }
}

/// Convolutions of one window over the first columns of a packed projection, side by side.
#[derive(Debug, Clone)]
pub struct ConvStates<T> {
    /// `[B, T, P]`.
    pub x: T,
    /// C_i, columns of each convolution.
    pub widths: Vec<usize>,
    /// W, at least 2.
    pub window: usize,
    /// The W - 1 tokens before `x`, `[B, W - 1, C_i]` each, or `[N, W - 1, C_i]` of N sequences in one row; empty
    /// at the start of a sequence.
    pub states: Vec<T>,
    /// Sequences of lengths of their own in the one row of `x`; absent where every row is a sequence.
    pub lengths: Option<SequenceLengths>,
}

/// As [`ConvSplit`], of one token of each sequence, with the tensors of each convolution by itself, as layers and
/// states have them. Convolutions are the first columns, one for each `Conv`.
#[derive(Debug, Clone)]
pub struct ConvStep<T> {
    /// `[B, 1, P]`.
    pub x: T,
    /// `[W, C_i]` each.
    pub weights: Vec<T>,
    /// `[C_i]` each; empty where there are none.
    pub biases: Vec<T>,
    /// `[B, W - 1, C_i]` each; empty at the start of a sequence.
    pub conv_states: Vec<T>,
    /// As in [`ConvSplit`].
    pub a_log: Option<T>,
    /// As in [`ConvSplit`].
    pub dt_bias: Option<T>,
    /// All P columns, first to last.
    pub columns: Vec<Column>,
}

/// Outputs of a [`ConvStep`].
#[derive(Debug, Clone)]
pub struct ConvStepOutputs<T> {
    /// `[B, 1, width]` for each entry of `columns`.
    pub outputs: Vec<T>,
    /// The next conv state of each convolution, `[B, W - 1, C_i]`.
    pub conv_states: Vec<T>,
}

/// A [`ConvStep`] and, behind it, the step of a recurrence: linear attention, or a delta rule where there is a beta.
/// The first three of its columns are those of queries, keys and values, each through a convolution; then, in any order,
/// one a head of beta and of a log decay, where there are any, and at most one part that is copied. Columns behind the
/// last are padding.
#[derive(Debug, Clone)]
pub struct ConvolvedStep<T> {
    /// The packed projection, its convolutions and gates.
    pub token: ConvStep<T>,
    /// Hk, heads of queries and keys.
    pub key_heads: usize,
    /// H, heads of values.
    pub heads: usize,
    /// `[B, H, K, V]`; absent at the start of a sequence.
    pub state: Option<T>,
}

/// Outputs of a [`ConvolvedStep`].
#[derive(Debug, Clone)]
pub struct ConvolvedStepOutputs<T> {
    /// `[B, 1, H, V]`.
    pub o: T,
    /// `[B, H, K, V]`.
    pub state: T,
    /// Of queries, keys and values, `[B, W - 1, C_i]`.
    pub conv_states: Vec<T>,
    /// The columns that are copied, `[B, 1, width]`.
    pub copied: Option<T>,
}

/// `activation(gate) * value`.
#[derive(Debug, Clone)]
pub struct GatedProduct<T> {
    /// The gate, `[.., W]`; or gate and value side by side, `[.., 2 W]`.
    pub gate: T,
    /// The value, which the gate multiplies.
    pub value: GatedValue<T>,
    /// Applied to the gate.
    pub activation: GateActivation,
}

/// The value of a [`GatedProduct`], which its gate multiplies.
#[derive(Debug, Clone)]
pub enum GatedValue<T> {
    /// The second half of the gate's own tensor.
    Packed,
    /// A tensor of the gate's shape and type.
    Tensor(T),
    /// One number.
    Number(f64),
}

impl<T> GatedProduct<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let value = match self.value {
            GatedValue::Tensor(value) => Some(value),
            GatedValue::Packed | GatedValue::Number(_) => None,
        };
        std::iter::once(self.gate).chain(value).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> GatedProduct<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        let gate = next();
        let value = match &self.value {
            GatedValue::Packed => GatedValue::Packed,
            GatedValue::Tensor(_) => GatedValue::Tensor(next()),
            GatedValue::Number(factor) => GatedValue::Number(*factor),
        };
        GatedProduct { gate, value, activation: self.activation }
    }
}

/// `x W + bias` over the last dimension of `x`; block-diagonal where the weight has a block for each head.
#[derive(Debug, Clone)]
pub struct LinearLayer<T> {
    /// `[.., from]`.
    pub x: T,
    /// `[from, to]`, or blocks, `[H, from, to]`; of any type. What comes out is of the type of `x`.
    pub weight: T,
    /// `[to]`, or `[H to]`.
    pub bias: Option<T>,
}

impl<T> LinearLayer<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        [self.x, self.weight].into_iter().chain(self.bias).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> LinearLayer<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        let (x, weight) = (next(), next());
        LinearLayer { x, weight, bias: self.bias.is_some().then(next) }
    }
}

/// Matrices of equally many rows, `[R, C_i]`, side by side.
#[derive(Debug, Clone)]
pub struct Pack<T> {
    /// The matrices, first columns first; at most [`MOST_PACKED`].
    pub matrices: Vec<T>,
    /// Columns of zeros after the last matrix.
    pub padding: usize,
    /// Type of the result.
    pub dtype: DType,
}

/// Matrices that a pack can hold.
pub const MOST_PACKED: usize = 8;

/// Rows of a table by number. A number may come several times.
#[derive(Debug, Clone)]
pub struct Embedding<T, I> {
    /// `[V, D]`.
    pub table: T,
    /// Row numbers, `[N]`.
    pub ids: I,
    /// Type of the rows that come out.
    pub dtype: DType,
}

/// `scale * sum_m (logsumexp(z_m) - z_m[target_m])` of the logits `z = hidden W + bias`.
#[derive(Debug, Clone)]
pub struct LinearCrossEntropy<T, I> {
    /// Rows that are scored, `[M, D]`.
    pub hidden: T,
    /// `[V, D]` where `by_rows`, an embedding's table; else `[D, V]`, a linear layer's.
    pub weight: T,
    /// Whether a row of the weight belongs to an id.
    pub by_rows: bool,
    /// `[V]`.
    pub bias: Option<T>,
    /// The right ids, `[M]`.
    pub target: I,
    /// Multiplies the sum; 1 / M for a mean.
    pub scale: f64,
    /// Whether the weight needs no gradient, which would be as large as the weight.
    pub frozen: bool,
}

/// Rows to rotate.
#[derive(Debug, Clone)]
pub struct Rotary<T> {
    /// `[B, T, H, K]`; channels i and i + R/2 of the first R turn together.
    pub x: T,
    /// Cosines, then sines, `[2, T, R / 2]`, f32, or of the type of `x` where that has more digits. No gradient is
    /// taken of them.
    pub table: T,
}

/// Sequences through a causal convolution as long as they are, from their start, each channel by itself.
#[derive(Debug, Clone)]
pub struct LongConvolution<T> {
    /// `[B, T, D]`.
    pub x: T,
    /// `[L, D]`, L up to T, the first for a token itself; f32, or of the type of `x` where that has more digits.
    pub taps: T,
}

/// How time steps are made of a continuous system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Discretization {
    /// Inputs constant over a step.
    #[default]
    Zoh,
    /// The trapezoidal rule.
    Bilinear,
}

/// The taps of the convolution that a diagonal state-space model is, `[L, D]`, of M complex modes and their conjugates
/// for each channel. Formula: `nn/diagonal_ssm.rs`.
#[derive(Debug, Clone)]
pub struct DiagonalTaps<T> {
    /// Logarithms of step sizes, `[D]`; all are f32.
    pub log_dt: T,
    /// Logarithms of decay rates, `[D, M]`.
    pub log_a_real: T,
    /// Frequencies, `[D, M]`.
    pub a_imag: T,
    /// The output vector, `[2, D, M]`: real parts, imaginary parts.
    pub c: T,
    /// D of the model, the weight of a token's own input, `[D]`.
    pub d: T,
    /// The input vector, as `c`; 1 where there is none.
    pub b: Option<T>,
    /// How steps are made.
    pub steps: Discretization,
    /// L.
    pub length: usize,
}

impl<T> DiagonalTaps<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let Self { log_dt, log_a_real, a_imag, c, d, b, .. } = self;
        [log_dt, log_a_real, a_imag, c, d].into_iter().chain(b).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> DiagonalTaps<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        DiagonalTaps {
            log_dt: next(),
            log_a_real: next(),
            a_imag: next(),
            c: next(),
            d: next(),
            b: self.b.is_some().then(&mut next),
            steps: self.steps,
            length: self.length,
        }
    }
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// All.
    All,
    /// The queries are the last of as many tokens as there are keys. Each sees itself and those before it, so many in
    /// all as the window says, where there is one.
    Causal {
        /// At least 1.
        window: Option<usize>,
    },
}

/// Rows of scores.
#[derive(Debug, Clone)]
pub struct SoftmaxRows<T> {
    /// `[.., T, S]`, a row for each query.
    pub scores: T,
    /// Which of the keys count.
    pub seen: Seen,
}

/// Inputs of a selective scan, of one type, f32 at least.
#[derive(Debug, Clone)]
pub struct SelectiveScan<T> {
    /// `[B, T, I]`.
    pub x: T,
    /// Step sizes, 0 or more, `[B, T, I]`.
    pub dt: T,
    /// A, 0 or less, `[I, N]`.
    pub a: T,
    /// `[B, T, N]`.
    pub b: T,
    /// `[B, T, N]`.
    pub c: T,
    /// h before the first token, `[B, 1, I N]`; zeros if absent.
    pub state: Option<T>,
    /// Whether states may change their sign.
    pub signed: bool,
}

impl<T> SelectiveScan<T> {
    /// The tensors that are there, in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let Self { x, dt, a, b, c, state, signed: _ } = self;
        [x, dt, a, b, c].into_iter().chain(state).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> SelectiveScan<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        SelectiveScan {
            x: next(),
            dt: next(),
            a: next(),
            b: next(),
            c: next(),
            state: self.state.is_some().then(&mut next),
            signed: self.signed,
        }
    }
}

/// Inputs of test-time training over whole mini-batches, of one type, f32 at least.
#[derive(Debug, Clone)]
pub struct Ttt<T> {
    /// Rotated by the place in the mini-batch, `[B, T, H, K]`.
    pub q: T,
    /// Likewise.
    pub k: T,
    /// `[B, T, H, K]`.
    pub v: T,
    /// Inner learning rates, `[B, T, H]`.
    pub rate: T,
    /// Their factor by the place in a mini-batch, `[b]`; b divides T.
    pub scale: T,
    /// Of the norm, `[H, K]`.
    pub norm_weight: T,
    /// Likewise.
    pub norm_bias: T,
    /// Weights over biases of each layer of the memory, `[B, H, from + 1, to]`, the last layer's without means over its
    /// outputs. One layer is TTT-Linear, `[B, H, K + 1, K]`; two, with GELU between them, TTT-MLP.
    pub weights: Vec<T>,
    /// epsilon of the norms: added to the mean of z^2 before its root.
    pub epsilon: f64,
}

impl<T> Ttt<T> {
    /// The tensors in the order of the fields.
    pub fn into_vec(self) -> Vec<T> {
        let Self { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon: _ } = self;
        [q, k, v, rate, scale, norm_weight, norm_bias].into_iter().chain(weights).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> Ttt<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("seven tensors and one a layer");
        Ttt {
            q: next(),
            k: next(),
            v: next(),
            rate: next(),
            scale: next(),
            norm_weight: next(),
            norm_bias: next(),
            weights: self.weights.iter().map(|_| next()).collect(),
            epsilon: self.epsilon,
        }
    }
}

/// Which cells a recurrence has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LstmCell {
    /// LSTM's, with h and c: all gates are sigmoids.
    Sigmoid,
    /// sLSTM's, with h, c, n and m: the input gate is an exponential.
    Exponential,
}

impl LstmCell {
    /// Vectors of a state.
    pub fn vectors(self) -> usize {
        match self {
            Self::Sigmoid => 2,
            Self::Exponential => 4,
        }
    }
}

/// Inputs of LSTM's or sLSTM's recurrence, of one type, f32 at least.
#[derive(Debug, Clone)]
pub struct LstmRecurrence<T> {
    /// Whose recurrence it is.
    pub cell: LstmCell,
    /// i, f, z and o of each head, without what h adds to them, `[B, T, H, 4 D]`.
    pub x: T,
    /// R, `[H, D, 4 D]`.
    pub r: T,
    /// The cell's vectors before the first token, `[B, 1, H, D]` each; zeros, and -1e30 for m, if absent. No gradient
    /// is taken through m.
    pub state: Option<Vec<T>>,
}

impl<T> LstmRecurrence<T> {
    /// The tensors that are there, in the order of the fields.
    /// # Panics
    /// If there is a state that has not the cell's vectors.
    pub fn into_vec(self) -> Vec<T> {
        let Self { cell, x, r, state } = self;
        let vectors = state.as_ref().map_or(cell.vectors(), Vec::len);
        assert_eq!(vectors, cell.vectors(), "a state has the vectors of its cell");
        [x, r].into_iter().chain(state.into_iter().flatten()).collect()
    }

    /// The same operation on other tensors, in the order of the fields.
    pub fn refill<U>(&self, tensors: impl IntoIterator<Item = U>) -> LstmRecurrence<U> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as `self` holds");
        let (x, r) = (next(), next());
        let state = self.state.as_ref().map(|state| state.iter().map(|_| next()).collect());
        LstmRecurrence { cell: self.cell, x, r, state }
    }
}
