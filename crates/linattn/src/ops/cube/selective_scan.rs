//! Mamba's recurrence on Burn's CubeCL backends. `None` where the kernels refuse: types other than f32, states
//! that are no power of two, or more numbers than they can count.

use super::fused::{CubePass, flat, flat_f32, shaped};
use crate::ops::fused::SelectiveScan;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use linattn_kernels::fused::{column_sums::column_sums, selective_scan as kernels};
use linattn_kernels::{Buffer, Refusal};

fn dims<R: CubeRuntime>(x: &SelectiveScan<CubeTensor<R>>) -> kernels::Dims {
    let [batch, tokens, channels] = [0, 1, 2].map(|d| x.x.meta.shape[d]);
    kernels::Dims { batch, tokens, channels, states: x.b.meta.shape[2] }
}

/// The scan in the kernels' words.
fn inputs<R: CubeRuntime>(x: &SelectiveScan<CubeTensor<R>>) -> kernels::Inputs<'_> {
    let SelectiveScan { x, dt, a, b, c, state, signed } = x;
    let [x, dt, a, b, c] = [x, dt, a, b, c].map(|tensor| &tensor.handle);
    let state = state.as_ref().map(|state| &state.handle);
    kernels::Inputs { x, dt, a, b, c, state, signed: *signed }
}

pub(super) fn selective_scan<R: CubeRuntime>(
    x: SelectiveScan<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(flat_f32(x.into_vec())?);
    let dims = dims(&x);
    let found = kernels::forward(&x.x.client, dims, &inputs(&x), keep).ok()?;
    let state = Shape::from([dims.batch, 1, dims.channels * dims.states]);
    let y = shaped(&x.x, found.y, x.x.meta.shape().clone(), DType::F32);
    let outputs = vec![y, shaped(&x.x, found.state, state, DType::F32)];
    let backward = found.h.map(|h| -> super::fused::Backward<R> {
        Box::new(move |gradients, _| {
            let found = gradients_of(&x, &h.handle, gradients);
            let found = found.expect("the forward pass was taken");
            found.into_vec().into_iter().map(Some).collect()
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// Gradients of all inputs, from those of y and the last state.
fn gradients_of<R: CubeRuntime>(
    x: &SelectiveScan<CubeTensor<R>>,
    h: &Handle,
    gradients: Vec<Option<CubeTensor<R>>>,
) -> Result<SelectiveScan<CubeTensor<R>>, Refusal> {
    let (dims, client) = (dims(x), &x.x.client);
    let mut gradients = gradients.into_iter().map(|gradient| gradient.map(flat));
    let (d_y, d_state) = (gradients.next().flatten(), gradients.next().flatten());
    let [d_y, d_state] =
        [&d_y, &d_state].map(|gradient| gradient.as_ref().map(|gradient| &gradient.handle));
    let found = kernels::backward(client, dims, &inputs(x), kernels::Given { h, d_y, d_state })?;
    // Sums over sequences, and over the parts of the channels.
    let summed = |parts: Buffer, count: usize| -> Result<Buffer, Refusal> {
        let (f32, numbers) = (DType::F32.into(), parts.shape.iter().product::<usize>());
        column_sums(client, &parts.handle, count, numbers / count, f32, f32)
    };
    let like =
        |of: &CubeTensor<R>, gradient| shaped(of, gradient, of.meta.shape().clone(), DType::F32);
    let parts = found.b.shape[0];
    Ok(SelectiveScan {
        dt: like(&x.dt, found.dt),
        a: like(&x.a, summed(found.a, dims.batch)?),
        b: like(&x.b, summed(found.b, parts)?),
        c: like(&x.c, summed(found.c, parts)?),
        state: x.state.as_ref().map(|state| like(state, found.state)),
        x: like(&x.x, found.x),
        signed: x.signed,
    })
}
