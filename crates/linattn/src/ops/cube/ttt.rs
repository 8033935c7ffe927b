//! Test-time training on Burn's CubeCL backends. `None` where the kernels refuse: types other than f32, memories of more
//! than two layers, heads wider than 128 channels, mini-batches that the device's shared memory does not hold, or
//! more numbers than they can count.

use super::fused::{Backward, CubePass, flat, flat_f32, shaped};
use crate::ops::fused::Ttt;
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use linattn_kernels::fused::{column_sums::column_sums, ttt_linear as linear, ttt_mlp as mlp};
use linattn_kernels::{Buffer, Refusal};

type Tensors<R> = Ttt<CubeTensor<R>>;

/// Outputs of a forward pass: y, each layer's last weights, and those of each mini-batch's start where they are kept.
struct Found {
    y: Buffer,
    weights: Vec<Buffer>,
    starts: Option<Vec<Buffer>>,
}

fn dims<R: CubeRuntime>(x: &Tensors<R>) -> linear::Dims {
    let [batch, tokens, heads, width] = [0, 1, 2, 3].map(|d| x.q.meta.shape[d]);
    linear::Dims { batch, tokens, heads, width, rows: x.scale.meta.shape[0] }
}

/// The sizes of a memory of two layers, if the hidden one is as wide as some heads.
fn dims_of_two<R: CubeRuntime>(x: &Tensors<R>, first: &CubeTensor<R>) -> Option<mlp::Dims> {
    let (rows, hidden) = (dims(x), first.meta.shape[3]);
    let expand = hidden / rows.width;
    (expand * rows.width == hidden).then_some(mlp::Dims { rows, expand })
}

/// The inputs in the kernels' words, with the first layer's weights.
fn inputs<'a, R: CubeRuntime>(x: &'a Tensors<R>, first: &'a CubeTensor<R>) -> linear::Inputs<'a> {
    linear::Inputs {
        q: &x.q.handle,
        k: &x.k.handle,
        v: &x.v.handle,
        rate: &x.rate.handle,
        scale: &x.scale.handle,
        norm_weight: &x.norm_weight.handle,
        norm_bias: &x.norm_bias.handle,
        weights: &first.handle,
        epsilon: x.epsilon,
    }
}

fn forward<R: CubeRuntime>(x: &Tensors<R>, keep: bool) -> Option<Found> {
    let client = &x.q.client;
    match &x.weights[..] {
        [first] => {
            let found = linear::forward(client, dims(x), &inputs(x, first), keep).ok()?;
            let starts = found.starts.map(|starts| vec![starts]);
            Some(Found { y: found.y, weights: vec![found.weights], starts })
        }
        [first, second] => {
            let given = mlp::Inputs { rows: inputs(x, first), second: &second.handle };
            let found = mlp::forward(client, dims_of_two(x, first)?, &given, keep).ok()?;
            let starts = found.starts.map(|starts| starts.to_vec());
            Some(Found { y: found.y, weights: found.weights.to_vec(), starts })
        }
        _ => None,
    }
}

/// Gradients of all inputs, those of a second layer's weights apart.
fn backward<R: CubeRuntime>(
    x: &Tensors<R>,
    starts: &[Buffer],
    d_y: Option<&Handle>,
    d_weights: &[Option<&Handle>],
) -> Result<(linear::Gradients, Option<Buffer>), Refusal> {
    let client = &x.q.client;
    match (&x.weights[..], starts, d_weights) {
        ([first, second], [first_starts, second_starts], [d_first, d_second]) => {
            let given = mlp::Given {
                starts: [&first_starts.handle, &second_starts.handle],
                d_y,
                d_weights: [*d_first, *d_second],
            };
            let of = mlp::Inputs { rows: inputs(x, first), second: &second.handle };
            let dims = dims_of_two(x, first).expect("the forward pass was taken");
            let found = mlp::backward(client, dims, &of, given)?;
            Ok((found.rows, Some(found.second)))
        }
        ([first], [starts], [d_weights]) => {
            let given = linear::Given { starts: &starts.handle, d_y, d_weights: *d_weights };
            Ok((linear::backward(client, dims(x), &inputs(x, first), given)?, None))
        }
        _ => unreachable!("the forward pass took these layers"),
    }
}

pub(super) fn ttt<R: CubeRuntime>(x: Tensors<R>, keep: bool) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(flat_f32(x.into_vec())?);
    let found = forward(&x, keep)?;
    let like = |of: &CubeTensor<R>, buffer| shaped(of, buffer, of.meta.shape().clone(), DType::F32);
    let weights = x.weights.iter().zip(found.weights).map(|(of, last)| like(of, last));
    let outputs = std::iter::once(like(&x.q, found.y)).chain(weights).collect();
    let backward = found.starts.map(|starts| -> Backward<R> {
        Box::new(move |gradients, _| {
            let found = gradients_of(&x, &starts, gradients);
            let found = found.expect("the forward pass was taken");
            found.into_vec().into_iter().map(Some).collect()
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// Gradients of all inputs, from those of the outputs and of each layer's last weights.
fn gradients_of<R: CubeRuntime>(
    x: &Tensors<R>,
    starts: &[Buffer],
    gradients: Vec<Option<CubeTensor<R>>>,
) -> Result<Tensors<R>, Refusal> {
    let (dims, client) = (dims(x), &x.q.client);
    let gradients: Vec<_> = gradients.into_iter().map(|gradient| gradient.map(flat)).collect();
    let mut given = gradients.iter().map(|d| d.as_ref().map(|d| &d.handle));
    let d_y = given.next().flatten();
    let d_weights: Vec<_> = given.collect();
    let (found, second) = backward(x, starts, d_y, &d_weights)?;
    // Sums over sequences, and for t over heads too.
    let summed = |parts: Buffer, count: usize| -> Result<Buffer, Refusal> {
        let (f32, numbers) = (DType::F32.into(), parts.shape.iter().product::<usize>());
        column_sums(client, &parts.handle, count, numbers / count, f32, f32)
    };
    let like =
        |of: &CubeTensor<R>, gradient| shaped(of, gradient, of.meta.shape().clone(), DType::F32);
    let layers = std::iter::once(found.weights).chain(second);
    Ok(Ttt {
        q: like(&x.q, found.q),
        k: like(&x.k, found.k),
        v: like(&x.v, found.v),
        rate: like(&x.rate, found.rate),
        scale: like(&x.scale, summed(found.scale, dims.batch * dims.heads)?),
        norm_weight: like(&x.norm_weight, summed(found.norm_weight, dims.batch)?),
        norm_bias: like(&x.norm_bias, summed(found.norm_bias, dims.batch)?),
        weights: x.weights.iter().zip(layers).map(|(of, gradient)| like(of, gradient)).collect(),
        epsilon: x.epsilon,
    })
}
