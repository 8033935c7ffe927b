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

#[cfg(all(test, feature = "cpu", feature = "wgpu"))]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Wgpu};
    use burn::tensor::Distribution;

    type B = Autodiff<Wgpu>;

    /// y, and the gradients of a number made of it.
    fn outputs(
        [x, weight, bias]: &[Tensor<Wgpu, 3>; 3],
        biased: bool,
        layer: impl Fn(LinearLayer<FloatTensor<B>>) -> Tensor<B, 3>,
    ) -> Vec<Tensor<Wgpu, 3>> {
        let leaves =
            [x, weight, bias].map(|x| Tensor::<B, 3>::from_inner(x.clone()).require_grad());
        let [x, weight, bias] = leaves.clone();
        let y = layer(LinearLayer {
            x: primitive(x),
            weight: primitive(weight),
            bias: biased.then(|| primitive(bias.flatten::<1>(0, 2))),
        });
        let gradients = (y.clone() * y.clone()).sum().backward();
        let found = leaves.iter().filter_map(|leaf| leaf.grad(&gradients));
        std::iter::once(y.inner()).chain(found).collect()
    }

    #[test]
    fn one_piece_gives_what_tensor_operations_give() {
        let device = Default::default();
        let draw = |shape: [usize; 3]| {
            Tensor::<Wgpu, 3>::random(shape, Distribution::Uniform(-1.0, 1.0), &device)
        };
        for [heads, from, to] in [[16, 4, 4], [4, 8, 32], [3, 5, 7]] {
            let inputs =
                [draw([2, 19, heads * from]), draw([heads, from, to]), draw([1, heads, to])];
            for biased in [false, true] {
                let one = outputs(&inputs, biased, |layer| {
                    let taken = B::fused_block_linear(layer.clone(), false).is_some();
                    assert!(taken, "the kernels take this");
                    let [x, weight] = [layer.x, layer.weight].map(tensor::<B, 3>);
                    block_linear(x, weight, layer.bias.map(tensor::<B, 1>))
                });
                let many = outputs(&inputs, biased, block_linear_in_tensor_ops::<B>);
                assert_eq!(one.len(), 3 + usize::from(biased), "as many gradients");
                assert_eq!(one.len(), many.len(), "as many gradients");
                for (n, (one, many)) in one.into_iter().zip(many).enumerate() {
                    let size = many.clone().abs().max().into_scalar();
                    let error = (one - many).abs().max().into_scalar();
                    assert!(error <= 1e-5 * size, "{heads} {from} {to}, tensor {n}: {error}");
                }
            }
        }
    }
}
