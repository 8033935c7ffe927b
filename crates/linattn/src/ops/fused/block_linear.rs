//! Linear layers of blocks.

use super::LinearLayer;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::typed;
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// `x`, `[B, T, H from]`, through a matrix for each head, `[H, from, to]`, and a bias, `[H to]`, where there is one:
/// `[B, T, H to]` in the type of `x`. Shapes are the caller's promise.
pub(crate) fn block_linear<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 3>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, 3> {
    let layer =
        LinearLayer { x: primitive(x), weight: primitive(weight), bias: bias.map(primitive) };
    match B::fused_block_linear(layer.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("a product has an output")),
        None => block_linear_in_tensor_ops::<B>(layer),
    }
}

/// [`block_linear`] in tensor operations.
pub(in crate::ops) fn block_linear_in_tensor_ops<B: Backend>(
    layer: LinearLayer<FloatTensor<B>>,
) -> Tensor<B, 3> {
    let (x, weight) = (tensor::<B, 3>(layer.x), tensor::<B, 3>(layer.weight));
    let ([batch, tokens, _], [heads, from, to]) = (x.dims(), weight.dims());
    let rows: Tensor<B, 3> = x.reshape([batch * tokens, heads, from]);
    let dtype = rows.dtype();
    let y = rows.swap_dims(0, 1).matmul(typed(weight, dtype)).swap_dims(0, 1);
    let y: Tensor<B, 3> = y.reshape([batch, tokens, heads * to]);
    match layer.bias {
        Some(bias) => y + typed(tensor::<B, 1>(bias), dtype).unsqueeze::<3>(),
        None => y,
    }
}
