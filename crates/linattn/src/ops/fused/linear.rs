//! Linear layers.

use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::typed;
use burn::tensor::{Tensor, TensorMetadata, ops::FloatTensor};

/// `x W + bias` over the last dimension of `x`.
#[derive(Debug, Clone)]
pub struct LinearLayer<T> {
    /// `[.., from]`.
    pub x: T,
    /// `[from, to]`, of any type: products are in the type of `x`.
    pub weight: T,
    /// `[to]`.
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
