//! Linear layers.

use super::LinearLayer;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::typed;
use burn::tensor::{Tensor, TensorMetadata, ops::FloatTensor};

/// `[.., from]` to `[.., to]`, in the type of `x`. Shapes are the caller's promise.
pub(crate) fn linear<B: LinearAttentionBackend, const D: usize>(
    l: LinearLayer<FloatTensor<B>>,
) -> Tensor<B, D> {
    tensor(linear_primitive::<B>(l))
}

/// As [`linear`], of any number of dimensions.
pub(in crate::ops) fn linear_primitive<B: LinearAttentionBackend>(
    l: LinearLayer<FloatTensor<B>>,
) -> FloatTensor<B> {
    if let Some(pass) = B::fused_linear(l.clone(), false) {
        return pass.outputs.into_iter().next().expect("a product has an output");
    }
    let dtype = l.x.dtype();
    let weight = primitive(typed(tensor::<B, 2>(l.weight), dtype));
    let bias = l.bias.map(|bias| primitive(typed(tensor::<B, 1>(bias), dtype)));
    B::linear(l.x, weight, bias)
}
