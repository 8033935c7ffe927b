//! Linear layers of blocks on Burn's CubeCL backends. `None` where the kernels refuse: blocks that are large enough
//! for Burn's products, f64, nothing to do, or more than they can count.

use super::fused::{Backward, CubePass, as_given, flat, is_float, only, shaped};
use crate::ops::fused::LinearLayer;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::Refusal;
use linattn_kernels::fused::block_linear as kernels;
use linattn_kernels::fused::column_sums::column_sums;

pub(super) fn block_linear<R: CubeRuntime>(
    x: LinearLayer<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(x.into_vec().into_iter().map(flat));
    let (dtype, weights) = (x.x.dtype, x.weight.dtype);
    let bias = x.bias.as_ref().map_or(weights, |bias| bias.dtype);
    if !is_float(dtype) || !is_float(weights) || bias != weights {
        return None;
    }
    let y = product(&x).ok()?;
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, wanted| {
            let d_y = as_given(only(gradients), dtype);
            gradients_of(&x, &d_y, wanted).expect("the forward pass took these sizes and types")
        })
    });
    Some(CubePass::new(vec![y], backward))
}

/// Sizes of a layer of contiguous tensors.
fn dims<R: CubeRuntime>(x: &CubeTensor<R>, weight: &CubeTensor<R>) -> kernels::Dims {
    let (x, weight) = (x.meta.shape(), weight.meta.shape());
    let [heads, from, to] = [0, 1, 2].map(|d| weight[d]);
    let rows = x.num_elements().checked_div(heads * from).unwrap_or(0);
    kernels::Dims { rows, heads, from, to }
}

/// `x W + b`.
fn product<R: CubeRuntime>(layer: &LinearLayer<CubeTensor<R>>) -> Result<CubeTensor<R>, Refusal> {
    let LinearLayer { x, weight, bias } = layer;
    let dims = dims(x, weight);
    let bias = bias.as_ref().map(|bias| &bias.handle);
    let types = [x.dtype, weight.dtype].map(DType::into);
    let y = kernels::multiply(&x.client, dims, &x.handle, &weight.handle, bias, types)?;
    let shape = x.meta.shape();
    let shape = Shape::from([shape[0], shape[1], dims.heads * dims.to]);
    Ok(shaped(x, y, shape, x.dtype))
}

/// Gradients of x, W and, where there is one, b, as far as they are wanted.
fn gradients_of<R: CubeRuntime>(
    layer: &LinearLayer<CubeTensor<R>>,
    d_y: &CubeTensor<R>,
    wanted: &[bool],
) -> Result<Vec<Option<CubeTensor<R>>>, Refusal> {
    let LinearLayer { x, weight, bias } = layer;
    let (dims, client) = (dims(x, weight), &x.client);
    let types = [x.dtype, weight.dtype].map(DType::into);
    let of_x = || {
        let mut transposed = weight.clone();
        transposed.meta.swap(1, 2);
        product(&LinearLayer { x: d_y.clone(), weight: flat(transposed), bias: None })
    };
    let of_weight = || {
        let d_w = kernels::weight_gradient(client, dims, &x.handle, &d_y.handle, types)?;
        Ok(shaped(weight, d_w, weight.meta.shape().clone(), weight.dtype))
    };
    let of_bias = |bias: &CubeTensor<R>| {
        let ([from, to], width) = (types, dims.heads * dims.to);
        let d_b = column_sums(client, &d_y.handle, dims.rows, width, from, to)?;
        Ok(shaped(bias, d_b, bias.meta.shape().clone(), bias.dtype))
    };
    let mut found = vec![wanted[0].then(of_x).transpose()?, wanted[1].then(of_weight).transpose()?];
    if let Some(bias) = bias {
        found.push(wanted[2].then(|| of_bias(bias)).transpose()?);
    }
    Ok(found)
}
