//! What stands around a recurrence, token by token: normalised rows, gates, and decays from what a layer
//! says.
//!
//! As tensor operations, which is the default, each of these is three to six launches on a GPU, and a
//! step of decoding little else. A backend can do each at once; what learns keeps to tensor operations,
//! whose gradients Burn knows.

use super::backend::{LinearAttentionBackend, primitive, tensor};
use super::chunkwise::{accumulator, typed};
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Added to a sum of squares before its root.
const LENGTH_EPSILON: f64 = 1e-6;

/// What a gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
}

impl Activation {
    pub(super) fn apply<B: Backend, const D: usize>(self, z: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Silu => silu(z),
            Self::Sigmoid => sigmoid(z),
        }
    }
}

/// What a row is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// `sqrt(mean x^2 + epsilon)`.
    RootMeanSquare,
    /// `sqrt(sum x^2 + epsilon)`.
    Length,
}

/// `x / size(x) * weight * factor * activation(gate)`, over the last dimension of `x`.
#[derive(Debug, Clone)]
pub struct Normalization<T> {
    /// Rows.
    pub x: T,
    /// What each of them is divided by.
    pub measure: Measure,
    /// Added to the mean or the sum of squares, above 0.
    pub epsilon: f64,
    /// A weight for each column, a tensor of one dimension.
    pub weight: Option<T>,
    /// What all is multiplied by.
    pub factor: f64,
    /// A gate for each number, shaped as `x`.
    pub gate: Option<(Activation, T)>,
}

/// `x * activation(gate)`, two tensors of one shape.
#[derive(Debug, Clone)]
pub struct Gated<T> {
    /// What is gated.
    pub x: T,
    /// The gate.
    pub gate: T,
    /// What the gate goes through.
    pub activation: Activation,
}

/// `-e^{a_log} softplus(x + dt_bias)`.
#[derive(Debug, Clone)]
pub struct LogDecay<T> {
    /// What the layer says, `[B, T, W]`.
    pub x: T,
    /// ln A, `[H]`; W / H columns share a number.
    pub a_log: T,
    /// The bias of step sizes, `[W]`.
    pub dt_bias: T,
}

/// `ln(1 + e^x)`, to the last digits also where it is small, and no infinity where x is large. In f32 at
/// least: e^12 is more than f16 holds.
pub(crate) fn softplus<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    let x = accumulator(x);
    let low = x.clone().clamp_max(20.0);
    typed(low.clone().exp().log1p() + (x - low), dtype)
}

/// Squares are summed in f32, or f64 for f64 rows, and the root is taken and divided by there.
pub(super) fn normalize<B: Backend, const D: usize>(
    n: Normalization<FloatTensor<B>>,
) -> FloatTensor<B> {
    let x = tensor::<B, D>(n.x);
    let dtype = x.dtype();
    let x = accumulator(x);
    let squares = x.clone().square();
    let size = match n.measure {
        Measure::RootMeanSquare => squares.mean_dim(D - 1),
        Measure::Length => squares.sum_dim(D - 1),
    };
    let mut y = typed(x / size.add_scalar(n.epsilon).sqrt(), dtype);
    if let Some(weight) = n.weight {
        y = y * tensor::<B, 1>(weight).unsqueeze::<D>();
    }
    if n.factor != 1.0 {
        y = y * n.factor;
    }
    if let Some((activation, gate)) = n.gate {
        y = y * activation.apply(tensor::<B, D>(gate));
    }
    primitive(y)
}

pub(super) fn gated_product<B: Backend, const D: usize>(
    p: Gated<FloatTensor<B>>,
) -> FloatTensor<B> {
    primitive(p.activation.apply(tensor::<B, D>(p.gate)) * tensor::<B, D>(p.x))
}

/// In f32, or f64 for f64 rows: 16 bits hold too little of a logarithm near 0.
pub(super) fn log_decay<B: Backend>(d: LogDecay<FloatTensor<B>>) -> FloatTensor<B> {
    let x = accumulator(tensor::<B, 3>(d.x));
    let rate = accumulator(tensor::<B, 1>(d.a_log)).exp().neg();
    let step = softplus(x + accumulator(tensor::<B, 1>(d.dt_bias)).unsqueeze::<3>());
    let ([batch, tokens, width], [heads]) = (step.dims(), rate.dims());
    if width == heads {
        return primitive(step * rate.unsqueeze::<3>());
    }
    let by_head: Tensor<B, 4> = step.reshape([batch, tokens, heads, width / heads]);
    let g = by_head * rate.reshape([1, 1, heads, 1]);
    primitive(g.reshape([batch, tokens, width]))
}

/// RMSNorm over the last dimension, `x / sqrt(mean x^2 + epsilon)`, times a weight for each column and an
/// activated gate, where they are given, in the type of `x`.
/// # Panics
/// If the weight has another width than `x`, or the gate another shape.
pub(crate) fn rms_normalize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    epsilon: f64,
    weight: Option<Tensor<B, 1>>,
    gate: Option<(Activation, Tensor<B, D>)>,
) -> Tensor<B, D> {
    if let Some(weight) = &weight {
        assert_eq!(weight.dims()[0], x.dims()[D - 1], "a weight for each column of `x`");
    }
    if let Some((_, gate)) = &gate {
        assert_eq!(gate.dims(), x.dims(), "a gate for each number of `x`");
    }
    tensor(B::normalize::<D>(Normalization {
        measure: Measure::RootMeanSquare,
        epsilon,
        weight: weight.map(|weight| primitive(typed(weight, x.dtype()))),
        factor: 1.0,
        gate: gate.map(|(activation, gate)| (activation, primitive(typed(gate, x.dtype())))),
        x: primitive(x),
    }))
}

/// Rows of length `factor`: `factor x / sqrt(sum x^2 + 1e-6)` over the last dimension.
pub(crate) fn l2_normalize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    factor: f64,
) -> Tensor<B, D> {
    tensor(B::normalize::<D>(Normalization {
        x: primitive(x),
        measure: Measure::Length,
        epsilon: LENGTH_EPSILON,
        weight: None,
        factor,
        gate: None,
    }))
}

/// `x * activation(gate)`, in the type of `x`.
/// # Panics
/// If the shapes differ.
pub(crate) fn gate<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    gate: Tensor<B, D>,
    activation: Activation,
) -> Tensor<B, D> {
    assert_eq!(gate.dims(), x.dims(), "a gate for each number of `x`");
    let gate = primitive(typed(gate, x.dtype()));
    tensor(B::gated_product::<D>(Gated { x: primitive(x), gate, activation }))
}

/// `-e^{a_log} softplus(x + dt_bias)`: log gates, in f32 (f64 for f64 inputs), of `x`, `[B, T, W]`. There
/// is a bias for each column, `[W]`, and a number `a_log` for each head, `[H]`, W / H columns of `x`.
/// # Panics
/// If the widths do not go together.
pub(crate) fn log_gates<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
) -> Tensor<B, 3> {
    let ([_, _, width], [heads]) = (x.dims(), a_log.dims());
    assert_eq!(dt_bias.dims(), [width], "a bias for each column of `x`");
    assert!(width.is_multiple_of(heads), "{width} columns are no multiple of {heads} heads");
    let (x, a_log, dt_bias) = (primitive(x), primitive(a_log), primitive(dt_bias));
    tensor(B::log_decay(LogDecay { x, a_log, dt_bias }))
}
