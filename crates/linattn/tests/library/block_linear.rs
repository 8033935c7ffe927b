//! A linear layer of blocks in one piece against tensor operations, on a GPU: outputs and gradients.

use crate::support::{alone, wgpu};
use burn::backend::{Autodiff, Wgpu};
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use linattn::ops::LinearAttentionBackend;
use linattn::ops::backend::LinearLayer;

type B = Autodiff<Wgpu>;

/// A layer of x, `[B, T, H from]`, its weight, `[H, from, to]`, and a bias, `[1, H, to]`, where there is one.
type Layer = fn([Tensor<B, 3>; 2], Option<Tensor<B, 3>>) -> Tensor<B, 3>;

fn in_one_piece([x, weight]: [Tensor<B, 3>; 2], bias: Option<Tensor<B, 3>>) -> Tensor<B, 3> {
    let layer = LinearLayer {
        x: x.into_primitive().tensor(),
        weight: weight.into_primitive().tensor(),
        bias: bias.map(|bias| bias.flatten::<1>(0, 2).into_primitive().tensor()),
    };
    let pass = B::fused_block_linear(layer, false).expect("the kernels take this");
    let [y] = <[_; 1]>::try_from(pass.outputs).expect("one output");
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

fn in_tensor_operations(
    [x, weight]: [Tensor<B, 3>; 2],
    bias: Option<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    let ([batch, tokens, _], [heads, from, to]) = (x.dims(), weight.dims());
    let rows: Tensor<B, 3> = x.reshape([batch * tokens, heads, from]);
    let y = rows.swap_dims(0, 1).matmul(weight).swap_dims(0, 1);
    let y = match bias {
        Some(bias) => y + bias,
        None => y,
    };
    y.reshape([batch, tokens, heads * to])
}

/// y, and the gradients of a number made of it.
fn outputs(inputs: &[Tensor<Wgpu, 3>; 3], biased: bool, layer: Layer) -> Vec<Tensor<Wgpu, 3>> {
    let leaves = inputs.each_ref().map(|x| Tensor::<B, 3>::from_inner(x.clone()).require_grad());
    let [x, weight, bias] = leaves.clone();
    let y = layer([x, weight], biased.then_some(bias));
    let gradients = (y.clone() * y.clone()).sum().backward();
    let found = leaves.iter().filter_map(|leaf| leaf.grad(&gradients));
    std::iter::once(y.inner()).chain(found).collect()
}

#[test]
fn one_piece_gives_what_tensor_operations_give() {
    let Some(device) = wgpu() else { return };
    let _alone = alone();
    let draw = |shape: [usize; 3]| {
        Tensor::<Wgpu, 3>::random(shape, Distribution::Uniform(-1.0, 1.0), &device)
    };
    for [heads, from, to] in [[16, 4, 4], [4, 8, 32], [3, 5, 7]] {
        let inputs = [draw([2, 19, heads * from]), draw([heads, from, to]), draw([1, heads, to])];
        for biased in [false, true] {
            let one = outputs(&inputs, biased, in_one_piece);
            let many = outputs(&inputs, biased, in_tensor_operations);
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
