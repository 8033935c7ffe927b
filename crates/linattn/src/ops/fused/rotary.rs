//! Rotary embedding. Source: Su et al., arXiv 2104.09864.

use super::Rotary;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{accumulator, cat, primitive, tensor, typed};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// `x`, `[B, T, H, K]`, whose channels i and i + R/2 of the first R are turned by the angles whose cosines and sines
/// `table` has, `[2, T, R / 2]`, in f32 at least. No gradient is taken of them.
pub(crate) fn rotary<B: LinearAttentionBackend>(
    x: Tensor<B, 4>,
    table: Tensor<B, 3>,
) -> Tensor<B, 4> {
    let rotary = Rotary { x: primitive(x), table: primitive(table) };
    match B::fused_rotary(rotary.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("rotated rows")),
        None => rotary_in_tensor_ops::<B>(rotary),
    }
}

/// [`rotary`] in tensor operations.
pub(in crate::ops) fn rotary_in_tensor_ops<B: Backend>(
    rotary: Rotary<FloatTensor<B>>,
) -> Tensor<B, 4> {
    let (x, table) = (tensor::<B, 4>(rotary.x), tensor::<B, 3>(rotary.table));
    let [_, tokens, half] = table.dims();
    let part = |i: usize| table.clone().narrow(0, i, 1).reshape([1, tokens, 1, half]);
    let (cos, sin) = (part(0), part(1));
    let (channels, width) = (x.dims()[3], 2 * half);
    if width == channels {
        return turned(x, cos, sin);
    }
    let rest = x.clone().narrow(3, width, channels - width);
    cat(vec![turned(x.narrow(3, 0, width), cos, sin), rest], 3)
}

/// Pairs of channels i and i + K / 2 of `x`, `[B, T, H, K]`, turned by angles of these cosines and sines,
/// `[.., .., .., K / 2]`, through which gradients go.
pub(crate) fn turned<B: Backend>(
    x: Tensor<B, 4>,
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
) -> Tensor<B, 4> {
    let (half, dtype) = (x.dims()[3] / 2, x.dtype());
    let x = accumulator(x);
    let (real, imaginary) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let turned = [
        real.clone() * cos.clone() - imaginary.clone() * sin.clone(),
        real * sin + imaginary * cos,
    ];
    typed(cat(turned.into(), 3), dtype)
}
