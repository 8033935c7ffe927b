//! Linear layers of blocks.

use super::linear::sum_of_rows;
use super::product::{Matrix, product_by_blocks, sum_of_products};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed};
use crate::ops::fused::LinearLayer;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

type Layer = LinearLayer<FlexTensor>;

/// A block-diagonal linear layer, of one type throughout.
pub(super) fn block_linear(l: Layer, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(l.clone().into_vec().iter())?;
    let [x, weight] = [l.x, l.weight].map(contiguous);
    let l = LinearLayer { x, weight, bias: l.bias.map(contiguous) };
    typed!(dtype, block_linear_of(l, keep))
}

fn block_linear_of<R: Number>(l: Layer, keep: bool) -> Pass<Flex> {
    let [heads, from, to] = l.weight.shape().dims();
    let x = slice::<R>(&l.x);
    let x = Matrix::new(x, [x.len().checked_div(heads * from).unwrap_or(0), heads * from]);
    let y = product_by_blocks(x, &blocks::<R>(&l.weight), maybe(&l.bias));
    let mut shape = l.x.shape();
    let last = shape.num_dims() - 1;
    shape[last] = heads * to;
    let outputs = vec![tensor(y, shape)];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, wanted| match gradients.into_iter().next().flatten() {
            Some(d_y) => block_linear_backward::<R>(&l, contiguous(d_y), wanted),
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

/// The matrix of each head.
fn blocks<R: Number>(weight: &FlexTensor) -> Vec<Matrix<'_, R>> {
    let [_, from, to] = weight.shape().dims();
    let each = slice::<R>(weight).chunks_exact((from * to).max(1));
    each.map(|block| Matrix::new(block, [from, to])).collect()
}

fn block_linear_backward<R: Number>(
    l: &Layer,
    d_y: FlexTensor,
    wanted: &[bool],
) -> Vec<Option<FlexTensor>> {
    let [heads, from, to] = l.weight.shape().dims();
    let (x, d_y) = (slice::<R>(&l.x), slice::<R>(&d_y));
    let rows = x.len().checked_div(heads * from).unwrap_or(0);
    let (x, d_y) = (Matrix::new(x, [rows, heads * from]), Matrix::new(d_y, [rows, heads * to]));
    let d_x = || {
        let blocks: Vec<_> = blocks::<R>(&l.weight).into_iter().map(Matrix::transposed).collect();
        tensor(product_by_blocks(d_y, &blocks, None), l.x.shape())
    };
    let d_weight = || {
        let of_head = |h| sum_of_products(x.columns(h * from, from), d_y.columns(h * to, to));
        tensor((0..heads).flat_map(of_head).collect(), [heads, from, to])
    };
    let mut found = vec![wanted[0].then(d_x), wanted[1].then(d_weight)];
    if l.bias.is_some() {
        found.push(wanted[2].then(|| tensor(sum_of_rows(d_y), [heads * to])));
    }
    found
}
