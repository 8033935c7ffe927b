//! Tensors as Burn has them and as backends have them, and their types.

use burn::tensor::{DType, Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

/// The tensor around a backend's own.
pub(super) fn tensor<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// A backend's own tensor.
pub(super) fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// f32 for everything narrower: states, log decays and sums lose too much in 16 bits.
pub(crate) fn accumulator<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::F64 | DType::F32 => x,
        _ => x.cast(DType::F32),
    }
}

/// `x` in another type. Backends take two tensors of different types for two of one, so what meets has to
/// be of one.
pub(crate) fn typed<B: Backend, const D: usize>(x: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// The N parts of `x` along a dimension, each one wide. Halved again and again, because the gradient of a
/// slice is as large as what it was cut from: so all of them are O(N log N) numbers, not O(N^2).
pub(crate) fn each_part<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    dim: usize,
) -> Vec<Tensor<B, D>> {
    let parts = x.dims()[dim];
    if parts == 1 {
        return vec![x];
    }
    let half = parts / 2;
    let mut list = each_part(x.clone().narrow(dim, 0, half), dim);
    list.extend(each_part(x.narrow(dim, half, parts - half), dim));
    list
}

/// The sum of all numbers, `[1]`. Burn's own sum of a whole tensor is made of atomic additions on some GPUs, in any
/// order.
pub(crate) fn sum_in_order<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    let count = x.dims().iter().product();
    x.reshape([1, count]).sum_dim(1).reshape([1])
}

/// `ln(1 + e^x)` without an infinity where x is large, in f32 at least. It is as good as the backend's `log1p`, which
/// shaders make of a logarithm.
pub(super) fn softplus_in_tensor_ops<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    let x = accumulator(x);
    let low = x.clone().clamp_max(20.0);
    typed(low.clone().exp().log1p() + (x - low), dtype)
}
