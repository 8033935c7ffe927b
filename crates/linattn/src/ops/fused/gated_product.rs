//! Products with an activated gate: SwiGLU, the gates of mixers, and activations alone.

use super::{GateActivation, GatedProduct, GatedValue};
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::{accumulator, typed};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

fn gated<B: LinearAttentionBackend, const D: usize>(
    p: GatedProduct<FloatTensor<B>>,
) -> Tensor<B, D> {
    if let Some(pass) = B::fused_gated_product(p.clone(), false) {
        return tensor(pass.outputs.into_iter().next().expect("a product has an output"));
    }
    gated_in_tensor_ops(p)
}

/// [`gated`] in tensor operations.
pub(in crate::ops) fn gated_in_tensor_ops<B: Backend, const D: usize>(
    p: GatedProduct<FloatTensor<B>>,
) -> Tensor<B, D> {
    let gate = tensor::<B, D>(p.gate);
    match p.value {
        GatedValue::Tensor(value) => p.activation.apply(gate) * tensor::<B, D>(value),
        GatedValue::Number(factor) => p.activation.apply(gate) * factor,
        GatedValue::Packed => {
            let width = gate.dims()[D - 1] / 2;
            let value = gate.clone().narrow(D - 1, width, width);
            p.activation.apply(gate.narrow(D - 1, 0, width)) * value
        }
    }
}

/// `x * activation(gate)`, in the type of `x`.
/// # Panics
/// If the shapes differ.
pub(crate) fn gate<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    gate: Tensor<B, D>,
    activation: GateActivation,
) -> Tensor<B, D> {
    assert_eq!(gate.dims(), x.dims(), "a gate for each number of `x`");
    let gate = primitive(typed(gate, x.dtype()));
    gated(GatedProduct { gate, value: GatedValue::Tensor(primitive(x)), activation })
}

/// `activation(x) * factor`, in the type of `x`.
pub(crate) fn activate<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    activation: GateActivation,
    factor: f64,
) -> Tensor<B, D> {
    gated(GatedProduct { gate: primitive(x), value: GatedValue::Number(factor), activation })
}

/// `ln(1 + e^x)`, to the last digits also where it is small, in f32 at least: e^12 is more than f16 holds. Shaders
/// have no `ln(1 + x)`, and `ln` of 1 + x loses what x is small by.
pub(crate) fn softplus<B: LinearAttentionBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    typed(activate(accumulator(x), GateActivation::Softplus, 1.0), dtype)
}

/// `ln(sigmoid(x)) / divisor`, in f32 at least, as exact as [`softplus`].
pub(crate) fn log_sigmoid<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    divisor: f64,
) -> Tensor<B, D> {
    activate(accumulator(x), GateActivation::LogSigmoid, 1.0 / divisor)
}

/// `activation(first half) * second half` of the last dimension: `[.., 2 W]` to `[.., W]`.
/// # Panics
/// If the width is odd.
pub(crate) fn gated_halves<B: LinearAttentionBackend, const D: usize>(
    packed: Tensor<B, D>,
    activation: GateActivation,
) -> Tensor<B, D> {
    assert!(packed.dims()[D - 1].is_multiple_of(2), "a gate and a value, of one width");
    gated(GatedProduct { gate: primitive(packed), value: GatedValue::Packed, activation })
}
