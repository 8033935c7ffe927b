//! The recurrences of LSTM and sLSTM on Burn's CubeCL backends. `None` where the kernels refuse: types other than f32,
//! heads wider than 256 cells, or more numbers than they can count.

use super::fused::{CubePass, flat, flat_f32, shaped};
use super::linear::{block_weight_gradient, blocks_transposed};
use crate::ops::fused::{LstmCell, LstmRecurrence};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::fused::lstm as kernels;
use linattn_kernels::{Buffer, Refusal};

type Tensors<R> = LstmRecurrence<CubeTensor<R>>;

fn dims<R: CubeRuntime>(x: &Tensors<R>) -> kernels::Dims {
    let [batch, tokens, heads] = [0, 1, 2].map(|d| x.x.meta.shape[d]);
    let cell = match x.cell {
        LstmCell::Sigmoid => kernels::Cell::Sigmoid,
        LstmCell::Exponential => kernels::Cell::Exponential,
    };
    kernels::Dims { cell, batch, tokens, heads, width: x.r.meta.shape[1] }
}

pub(super) fn lstm<R: CubeRuntime>(x: Tensors<R>, keep: bool) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(flat_f32(x.into_vec())?);
    let dims = dims(&x);
    let vector = |n: usize| Some(&x.state.as_ref()?.get(n)?.handle);
    let state = vector(0).zip(vector(1)).map(|(h, c)| kernels::State {
        h,
        c,
        scale: vector(2).zip(vector(3)).map(|(n, m)| [n, m]),
    });
    let inputs = kernels::Inputs { x: &x.x.handle, r: &x.r.handle, state };
    let found = kernels::forward(&x.x.client, dims, &inputs, keep).ok()?;
    let kernels::Dims { batch, tokens, heads, width, .. } = dims;
    let new = |buffer, tokens| {
        shaped(&x.x, buffer, Shape::from([batch, tokens, heads, width]), DType::F32)
    };
    let last = |buffer| new(buffer, 1);
    let mut outputs = vec![new(found.h, tokens), last(found.c)];
    outputs.extend(found.scale.into_iter().flatten().map(last));
    let backward = found.kept.map(|kept| -> super::fused::Backward<R> {
        Box::new(move |gradients, wanted| {
            let given = gradients.into_iter().map(|d| d.map(flat)).collect();
            gradients_of(x, kept, given, wanted[1]).expect("the forward pass was taken")
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// Gradients of all inputs, that of R where it is asked for and that of m being 0, from those of h and the last
/// vectors.
fn gradients_of<R: CubeRuntime>(
    x: Tensors<R>,
    kept: kernels::Kept,
    gradients: Vec<Option<CubeTensor<R>>>,
    of_r: bool,
) -> Result<Vec<Option<CubeTensor<R>>>, Refusal> {
    let dims = dims(&x);
    let kernels::Dims { batch, tokens, heads, width, .. } = dims;
    let [d_h, d_c, d_n] = [0, 1, 2].map(|n| Some(&gradients.get(n)?.as_ref()?.handle));
    let r_transposed = flat(blocks_transposed(x.r.clone()));
    let vector = |n: usize| Some(&x.state.as_ref()?.get(n)?.handle);
    let given = kernels::Given {
        saved: &kept.saved.handle,
        r_transposed: &r_transposed.handle,
        c: vector(1),
        n: vector(2),
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
    if x.state.is_some() {
        let of_state = [found.h, found.c].into_iter().chain(found.n);
        all.extend(of_state.map(|d| Some(shaped(d, &[batch, 1, heads, width]))));
    }
    if let Some(m) = x.state.as_ref().and_then(|state| state.get(3)) {
        let (client, device, shape) = (m.client.clone(), m.device.clone(), m.meta.shape().clone());
        all.push(Some(zeros_client(client, device, shape, DType::F32)));
    }
    Ok(all)
}
