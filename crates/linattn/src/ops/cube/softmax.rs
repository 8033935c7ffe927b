//! Softmax of rows of scores on Burn's CubeCL backends. `None` where the kernels refuse: another type than f32, rows
//! that are too wide, or nothing to do.

use super::fused::{Backward, CubePass, as_given, flat, only, shaped};
use crate::ops::fused::{Seen, SoftmaxRows};
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::fused::softmax as kernel;

pub(super) fn softmax<R: CubeRuntime>(
    rows: SoftmaxRows<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let SoftmaxRows { scores, seen } = rows;
    if scores.dtype != DType::F32 {
        return None;
    }
    let x = flat(scores);
    let shape = x.meta.shape().clone();
    let [queries, keys] = [2, 1].map(|from_end| shape[shape.num_dims() - from_end]);
    let seen = match seen {
        Seen::All => kernel::Seen::All,
        Seen::Causal { window } => kernel::Seen::Causal { window: window.unwrap_or(keys) },
    };
    let count = shape.num_elements().checked_div(keys)?;
    let rows = kernel::Rows { count, queries, keys, seen };
    let y = kernel::forward(&x.client, rows, &x.handle).ok()?;
    let y = shaped(&x, y, shape.clone(), DType::F32);
    let kept = keep.then(|| y.clone());
    let backward = kept.map(|y| -> Backward<R> {
        Box::new(move |gradients, _| {
            let d_y = as_given(only(gradients), DType::F32);
            let d_x = kernel::backward(&y.client, rows, &y.handle, &d_y.handle)
                .expect("the forward pass took these sizes");
            vec![Some(shaped(&y, d_x, shape, DType::F32))]
        })
    });
    Some(CubePass::new(vec![y], backward))
}
