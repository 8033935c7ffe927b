//! TTT-Linear on Burn's CubeCL backends. `None` where the kernels refuse: types other than f32, heads wider than 128
//! channels, mini-batches that the device's shared memory does not hold, or more numbers than they can count.

use super::fused::{CubePass, flat, shaped};
use crate::ops::fused::TttLinear;
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use linattn_kernels::fused::{column_sums::column_sums, ttt_linear as kernels};
use linattn_kernels::{Buffer, Refusal};

type Tensors<R> = TttLinear<CubeTensor<R>>;

fn dims<R: CubeRuntime>(x: &Tensors<R>) -> kernels::Dims {
    let [batch, tokens, heads, width] = [0, 1, 2, 3].map(|d| x.q.meta.shape[d]);
    kernels::Dims { batch, tokens, heads, width, rows: x.scale.meta.shape[0] }
}

/// The inputs in the kernels' words.
fn inputs<R: CubeRuntime>(x: &Tensors<R>) -> kernels::Inputs<'_> {
    kernels::Inputs {
        q: &x.q.handle,
        k: &x.k.handle,
        v: &x.v.handle,
        rate: &x.rate.handle,
        scale: &x.scale.handle,
        norm_weight: &x.norm_weight.handle,
        norm_bias: &x.norm_bias.handle,
        weights: &x.weights.handle,
        epsilon: x.epsilon,
    }
}

pub(super) fn ttt_linear<R: CubeRuntime>(x: Tensors<R>, keep: bool) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let tensors: Vec<_> = x.into_vec().into_iter().map(flat).collect();
    if tensors.iter().any(|tensor| tensor.dtype != DType::F32) {
        return None;
    }
    let x = places.refill(tensors);
    let found = kernels::forward(&x.q.client, dims(&x), &inputs(&x), keep).ok()?;
    let like = |of: &CubeTensor<R>, buffer| shaped(of, buffer, of.meta.shape().clone(), DType::F32);
    let outputs = vec![like(&x.q, found.y), like(&x.weights, found.weights)];
    let backward = found.starts.map(|starts| -> super::fused::Backward<R> {
        Box::new(move |gradients, _| {
            let found = gradients_of(&x, &starts.handle, gradients);
            let found = found.expect("the forward pass was taken");
            found.into_vec().into_iter().map(Some).collect()
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// Gradients of all inputs, from those of the outputs and of the last map.
fn gradients_of<R: CubeRuntime>(
    x: &Tensors<R>,
    starts: &Handle,
    gradients: Vec<Option<CubeTensor<R>>>,
) -> Result<Tensors<R>, Refusal> {
    let (dims, client) = (dims(x), &x.q.client);
    let mut gradients = gradients.into_iter().map(|gradient| gradient.map(flat));
    let (d_y, d_weights) = (gradients.next().flatten(), gradients.next().flatten());
    let [d_y, d_weights] = [&d_y, &d_weights].map(|d| d.as_ref().map(|d| &d.handle));
    let given = kernels::Given { starts, d_y, d_weights };
    let found = kernels::backward(client, dims, &inputs(x), given)?;
    // Sums over sequences, and for t over heads too.
    let summed = |parts: Buffer, count: usize| -> Result<Buffer, Refusal> {
        let (f32, numbers) = (DType::F32.into(), parts.shape.iter().product::<usize>());
        column_sums(client, &parts.handle, count, numbers / count, f32, f32)
    };
    let like =
        |of: &CubeTensor<R>, gradient| shaped(of, gradient, of.meta.shape().clone(), DType::F32);
    Ok(TttLinear {
        q: like(&x.q, found.q),
        k: like(&x.k, found.k),
        v: like(&x.v, found.v),
        rate: like(&x.rate, found.rate),
        scale: like(&x.scale, summed(found.scale, dims.batch * dims.heads)?),
        norm_weight: like(&x.norm_weight, summed(found.norm_weight, dims.batch)?),
        norm_bias: like(&x.norm_bias, summed(found.norm_bias, dims.batch)?),
        weights: like(&x.weights, found.weights),
        epsilon: x.epsilon,
    })
}
