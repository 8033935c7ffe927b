//! Convolutions as long as their sequences on Burn's CubeCL backends. `None` where the kernels refuse: f64, nothing to
//! do, or more than they can count.

use super::fused::{Backward, CubePass, as_given, flat, is_float, only, shaped};
use crate::ops::fused::LongConvolution;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::fused::long_convolution as kernels;

pub(super) fn long_convolution<R: CubeRuntime>(
    x: LongConvolution<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let (x, taps) = (flat(x.x), flat(x.taps));
    let dtype = x.dtype;
    if !is_float(dtype) || taps.dtype != DType::F32 {
        return None;
    }
    let shape = x.meta.shape().clone();
    let [batch, tokens, channels] = [0, 1, 2].map(|d| shape[d]);
    let dims = kernels::Dims { batch, tokens, channels, length: taps.meta.shape()[0] };
    let y = kernels::convolve(&x.client, dims, &x.handle, &taps.handle, false, dtype.into());
    let outputs = vec![shaped(&x, y.ok()?, shape.clone(), dtype)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, wanted| {
            let d_y = as_given(only(gradients), dtype);
            let (client, rows, of_y) = (&x.client, dtype.into(), &d_y.handle);
            let of_x = wanted[0].then(|| {
                let d_x = kernels::convolve(client, dims, of_y, &taps.handle, true, rows);
                shaped(&x, d_x.expect("the forward pass took these sizes"), shape, dtype)
            });
            let of_taps = wanted[1].then(|| {
                let d_taps = kernels::tap_gradients(client, dims, &x.handle, of_y, rows);
                let d_taps = d_taps.expect("the forward pass took these sizes");
                shaped(&x, d_taps, Shape::from([dims.length, channels]), DType::F32)
            });
            vec![of_x, of_taps]
        })
    });
    Some(CubePass::new(outputs, backward))
}
