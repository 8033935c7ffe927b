//! sLSTM's recurrence on Burn's CubeCL backends. `None` where the kernels refuse: types other than f32, heads wider
//! than 256 cells, or more numbers than they can count.

use super::fused::{CubePass, flat, flat_f32, shaped};
use super::linear::{block_weight_gradient, blocks_transposed};
use crate::ops::fused::SlstmRecurrence;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::fused::slstm as kernels;
use linattn_kernels::{Buffer, Refusal};

type Tensors<R> = SlstmRecurrence<CubeTensor<R>>;

fn dims<R: CubeRuntime>(x: &Tensors<R>) -> kernels::Dims {
    let [batch, tokens, heads] = [0, 1, 2].map(|d| x.x.meta.shape[d]);
    kernels::Dims { batch, tokens, heads, width: x.r.meta.shape[1] }
}

pub(super) fn slstm<R: CubeRuntime>(x: Tensors<R>, keep: bool) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(flat_f32(x.into_vec())?);
    let dims = dims(&x);
    let state = x.state.as_ref().map(|state| {
        let [h, c, n, m] = state.each_ref().map(|tensor| &tensor.handle);
        kernels::State { h, c, n, m }
    });
    let inputs = kernels::Inputs { x: &x.x.handle, r: &x.r.handle, state };
    let found = kernels::forward(&x.x.client, dims, &inputs, keep).ok()?;
    let kernels::Dims { batch, tokens, heads, width } = dims;
    let new = |buffer, tokens| {
        shaped(&x.x, buffer, Shape::from([batch, tokens, heads, width]), DType::F32)
    };
    let last = |buffer| new(buffer, 1);
    let outputs = vec![new(found.h, tokens), last(found.c), last(found.n), last(found.m)];
    let backward = found.kept.map(|kept| -> super::fused::Backward<R> {
        Box::new(move |gradients, wanted| {
            let given = gradients.into_iter().map(|d| d.map(flat)).collect();
            gradients_of(x, kept, given, wanted[1]).expect("the forward pass was taken")
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// Gradients of all inputs, that of R where it is asked for and that of m being 0, from those of h and the last c,
/// n and m.
fn gradients_of<R: CubeRuntime>(
    x: Tensors<R>,
    kept: kernels::Kept,
    gradients: Vec<Option<CubeTensor<R>>>,
    of_r: bool,
) -> Result<Vec<Option<CubeTensor<R>>>, Refusal> {
    let dims = dims(&x);
    let kernels::Dims { batch, tokens, heads, width } = dims;
    let [d_h, d_c, d_n] = [0, 1, 2].map(|n| gradients[n].as_ref().map(|d| &d.handle));
    let r_transposed = flat(blocks_transposed(x.r.clone()));
    let state = x.state.as_ref();
    let given = kernels::Given {
        saved: &kept.saved.handle,
        r_transposed: &r_transposed.handle,
        state: state.map(|[_, c, n, _]| [&c.handle, &n.handle]),
        d_h,
        d_c,
        d_n,
    };
    let found = kernels::backward(&x.x.client, dims, given)?;
    let shaped = |buffer: Buffer, shape: &[usize]| {
        shaped(&x.x, buffer, Shape::from(shape.to_vec()), DType::F32)
    };
    let d_x = shaped(found.x, &[batch, tokens, heads, 4 * width]);
    let d_r = of_r.then(|| {
        let before = shaped(kept.before, &[heads, batch * tokens, width]);
        block_weight_gradient(before, d_x.clone())
    });
    let mut all = vec![Some(d_x), d_r];
    if let Some([_, _, _, m]) = state {
        let of_state = [found.h, found.c, found.n];
        all.extend(of_state.map(|d| Some(shaped(d, &[batch, 1, heads, width]))));
        let (client, device, shape) = (m.client.clone(), m.device.clone(), m.meta.shape().clone());
        all.push(Some(zeros_client(client, device, shape, DType::F32)));
    }
    Ok(all)
}
