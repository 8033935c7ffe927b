//! The loss of a language model's last product, without keeping its logits.

use super::LinearCrossEntropy;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, sum_in_order, tensor};
use crate::ops::{accumulator, typed};
use burn::tensor::activation::log_softmax;
use burn::tensor::{
    Int, Tensor,
    ops::{FloatTensor, IntTensor},
};

/// The loss, `[1]`, in f32 (f64 for f64 rows). Logits are products in the type of `hidden`.
pub(crate) fn linear_cross_entropy<B: LinearAttentionBackend>(
    hidden: Tensor<B, 2>,
    (weight, by_rows): (Tensor<B, 2>, bool),
    bias: Option<Tensor<B, 1>>,
    target: Tensor<B, 1, Int>,
    scale: f64,
) -> Tensor<B, 1> {
    let x = LinearCrossEntropy {
        hidden: primitive(hidden),
        weight: primitive(weight),
        by_rows,
        bias: bias.map(primitive),
        target: target.into_primitive(),
        scale,
        frozen: false,
    };
    match B::fused_cross_entropy(x.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("a loss")),
        None => cross_entropy_in_tensor_ops::<B>(x),
    }
}

/// [`linear_cross_entropy`] in tensor operations.
pub(in crate::ops) fn cross_entropy_in_tensor_ops<B: LinearAttentionBackend>(
    x: LinearCrossEntropy<FloatTensor<B>, IntTensor<B>>,
) -> Tensor<B, 1> {
    let hidden = tensor::<B, 2>(x.hidden);
    let weight = typed(tensor::<B, 2>(x.weight), hidden.dtype());
    let weight = if x.by_rows { weight.transpose() } else { weight };
    let mut logits = accumulator(hidden.matmul(weight));
    if let Some(bias) = x.bias {
        logits = logits.clone() + typed(tensor::<B, 1>(bias), logits.dtype()).unsqueeze::<2>();
    }
    let target = Tensor::<B, 1, Int>::from_primitive(x.target).unsqueeze_dim::<2>(1);
    let chosen = log_softmax(logits, 1).gather(1, target);
    sum_in_order(chosen).neg() * x.scale
}
