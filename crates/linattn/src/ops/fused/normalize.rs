//! Normalised rows: RMSNorm, LayerNorm and L2 norm, with a residual sum before and a gate behind.

use super::{Activation, Measure, Normalization};
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{Along, primitive, tensor};
use crate::ops::{accumulator, typed};
use burn::tensor::{DType, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};

/// Added to a sum of squares before its root.
const LENGTH_EPSILON: f64 = 1e-6;

/// In tensor operations: `y`, and `h` where there is a residual. Squares are summed in f32, or f64 for f64
/// rows, and the root is taken and divided by there.
pub(in crate::ops) fn normalize_in_tensor_ops<B: Backend, const D: usize>(
    n: Normalization<FloatTensor<B>>,
) -> (Tensor<B, D>, Option<Tensor<B, D>>) {
    let x = tensor::<B, D>(n.x);
    let h = n.residual.map(|residual| {
        let residual = tensor::<B, D>(residual);
        typed(x.clone(), residual.dtype()) + residual
    });
    let mut rows = accumulator(h.clone().unwrap_or(x));
    if n.measure == Measure::Standard {
        rows = rows.clone() - rows.mean_along(D - 1);
    }
    let squares = rows.clone().square();
    let size = match n.measure {
        Measure::RootMeanSquare | Measure::Standard => squares.mean_along(D - 1),
        Measure::Length => squares.sum_along(D - 1),
    };
    let mut y = typed(rows / size.add_scalar(n.epsilon).sqrt(), n.dtype);
    if let Some(weight) = n.weight {
        y = y * typed(tensor::<B, 1>(weight), n.dtype).unsqueeze::<D>();
    }
    if n.factor != 1.0 {
        y = y * n.factor;
    }
    if let Some(bias) = n.bias {
        y = y + typed(tensor::<B, 1>(bias), n.dtype).unsqueeze::<D>();
    }
    if let Some(gate) = n.gate {
        y = y * n.activation.apply(typed(tensor::<B, D>(gate), n.dtype));
    }
    (y, h)
}

/// `y`, and `h` where there is a residual.
/// # Panics
/// If weight, bias, gate or residual do not have the shape that goes with `x`.
pub(crate) fn normalize<B: LinearAttentionBackend, const D: usize>(
    n: Normalization<FloatTensor<B>>,
) -> (Tensor<B, D>, Option<Tensor<B, D>>) {
    let shape = n.x.shape();
    for (what, row) in [("weight", &n.weight), ("bias", &n.bias)] {
        let fits = row.as_ref().is_none_or(|row| row.shape()[0] == shape[D - 1]);
        assert!(fits, "a {what} for each column of `x`");
    }
    for (what, rows) in [("gate", &n.gate), ("residual", &n.residual)] {
        let fits = rows.as_ref().is_none_or(|rows| rows.shape() == shape);
        assert!(fits, "a {what} for each number of `x`");
    }
    match B::fused_normalize(n.clone(), false) {
        Some(pass) => {
            let mut outputs = pass.outputs.into_iter().map(tensor);
            let y = outputs.next().expect("every norm has an output");
            (y, outputs.next())
        }
        None => normalize_in_tensor_ops::<B, D>(n),
    }
}

/// Rows of `x` normalised in its own type, without residual, weight, bias or gate.
fn plain<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    measure: Measure,
    epsilon: f64,
) -> Normalization<FloatTensor<B>> {
    let dtype = x.dtype();
    Normalization {
        x: primitive(x),
        residual: None,
        weight: None,
        bias: None,
        gate: None,
        activation: Activation::Silu,
        measure,
        epsilon,
        factor: 1.0,
        dtype,
    }
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
    let dtype = x.dtype();
    let activation = gate.as_ref().map_or(Activation::Silu, |(activation, _)| *activation);
    normalize(Normalization {
        weight: weight.map(primitive),
        gate: gate.map(|(_, gate)| primitive(typed(gate, dtype))),
        activation,
        ..plain(x, Measure::RootMeanSquare, epsilon)
    })
    .0
}

/// LayerNorm over the last dimension without weight and bias.
pub(crate) fn standardize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    epsilon: f64,
) -> Tensor<B, D> {
    normalize(plain(x, Measure::Standard, epsilon)).0
}

/// Rows of length `factor`: `factor x / sqrt(sum x^2 + 1e-6)` over the last dimension.
pub(crate) fn l2_normalize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    factor: f64,
) -> Tensor<B, D> {
    normalize(Normalization { factor, ..plain(x, Measure::Length, LENGTH_EPSILON) }).0
}

/// A norm with weight and bias in front of a layer: `h = x + residual` and `y`, its normalised rows in
/// type `dtype`. Without a residual `h` is `x`.
/// # Panics
/// If shapes do not go together.
pub(crate) fn add_normalize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    residual: Option<Tensor<B, D>>,
    (measure, epsilon): (Measure, f64),
    (weight, bias): (Tensor<B, 1>, Option<Tensor<B, 1>>),
    dtype: DType,
) -> (Tensor<B, D>, Tensor<B, D>) {
    let n = Normalization {
        residual: residual.map(primitive),
        weight: Some(primitive(weight)),
        bias: bias.map(primitive),
        dtype,
        ..plain(x.clone(), measure, epsilon)
    };
    let (y, h) = normalize(n);
    (y, h.unwrap_or(x))
}
