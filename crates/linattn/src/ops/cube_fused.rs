//! What stands around a recurrence, on Burn's CubeCL backends: one launch each. `None` where the kernels
//! refuse (f64, tensors of different types, a type or cubes that the device does not have, nothing to
//! do, or more than it can count).

use super::convolution::Convolution;
use super::rowwise::{Activation, Gated, LogDecay, Measure, Normalization};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorArg;
use linattn_kernels::{convolution, rowwise};

impl From<Activation> for rowwise::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::Silu,
            Activation::Sigmoid => Self::Sigmoid,
        }
    }
}

impl From<Measure> for rowwise::Measure {
    fn from(measure: Measure) -> Self {
        match measure {
            Measure::RootMeanSquare => Self::RootMeanSquare,
            Measure::Length => Self::Length,
        }
    }
}

fn or_identity(activation: Option<Activation>) -> rowwise::Activation {
    activation.map_or(rowwise::Activation::Identity, Into::into)
}

/// The one type of these tensors, if the kernels take it and the device runs them.
fn one_type<'a, R: CubeRuntime>(
    tensors: impl IntoIterator<Item = &'a CubeTensor<R>>,
) -> Option<DType> {
    let mut tensors = tensors.into_iter();
    let first = tensors.next()?;
    let dtype = first.dtype;
    let alike = tensors.all(|x| x.dtype == dtype);
    (alike && rowwise::runs(&first.client, dtype.into())).then_some(dtype)
}

/// Contiguous, because the kernels count in whole tensors.
fn arg<R: CubeRuntime>(x: &CubeTensor<R>) -> TensorArg<R> {
    into_contiguous(x.clone()).into_tensor_arg()
}

/// A tensor to fill, on the device of `like`.
fn new<R: CubeRuntime>(like: &CubeTensor<R>, shape: Shape, dtype: DType) -> CubeTensor<R> {
    // Not `empty_device_dtype`: on CUDA that pads rows.
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

fn largest<R: CubeRuntime>(x: &CubeTensor<R>) -> (u32, u32, u32) {
    x.client.properties().hardware.max_cube_count
}

pub(super) fn normalize<R: CubeRuntime>(n: &Normalization<CubeTensor<R>>) -> Option<CubeTensor<R>> {
    let gate = n.gate.as_ref().map(|(_, gate)| gate);
    let dtype = one_type([Some(&n.x), n.weight.as_ref(), gate].into_iter().flatten())?;
    let shape = n.x.meta.shape.clone();
    let width = *shape.last()?;
    let rows = rowwise::Rows {
        rows: shape.num_elements().checked_div(width)?,
        width,
        measure: n.measure.into(),
        epsilon: n.epsilon,
        factor: n.factor,
        activation: or_identity(n.gate.as_ref().map(|(activation, _)| *activation)),
    };
    let cubes = rows.cubes(largest(&n.x))?;
    let y = new(&n.x, shape, dtype);
    let x = into_contiguous(n.x.clone());
    let args = rowwise::RowArgs {
        x: arg(&x),
        weight: n.weight.as_ref().map(arg),
        gate: gate.map(arg),
        y: arg(&y),
    };
    rowwise::normalize(&n.x.client, cubes, rows, args, || arg(&x), dtype.into());
    Some(y)
}

pub(super) fn gated_product<R: CubeRuntime>(p: &Gated<CubeTensor<R>>) -> Option<CubeTensor<R>> {
    let dtype = one_type([&p.x, &p.gate])?;
    let shape = p.x.meta.shape.clone();
    let count = shape.num_elements();
    let cubes = rowwise::product_cubes(count, largest(&p.x))?;
    let y = new(&p.x, shape, dtype);
    let args = rowwise::ProductArgs { x: arg(&p.x), gate: arg(&p.gate), y: arg(&y) };
    let activation = p.activation.into();
    rowwise::gated_product(&p.x.client, cubes, count, activation, args, dtype.into());
    Some(y)
}

pub(super) fn log_decay<R: CubeRuntime>(d: &LogDecay<CubeTensor<R>>) -> Option<CubeTensor<R>> {
    let dtype = one_type([&d.x, &d.a_log, &d.dt_bias])?;
    let shape = d.x.meta.shape.clone();
    let (width, heads) = (*shape.last()?, d.a_log.meta.shape.num_elements());
    let rows = shape.num_elements().checked_div(width)?;
    let decays = rowwise::Decays { rows, width, heads };
    let cubes = decays.cubes(largest(&d.x))?;
    let g = new(&d.x, shape, DType::F32);
    let args = rowwise::DecayArgs {
        x: arg(&d.x),
        a_log: arg(&d.a_log),
        dt_bias: arg(&d.dt_bias),
        g: arg(&g),
    };
    rowwise::log_decay(&d.x.client, cubes, decays, args, dtype.into());
    Some(g)
}

/// Gives y and the next tail.
pub(super) fn convolve<R: CubeRuntime>(
    c: &Convolution<CubeTensor<R>>,
    bias: Option<&CubeTensor<R>>,
    activation: Option<Activation>,
) -> Option<(CubeTensor<R>, CubeTensor<R>)> {
    let Convolution { x, weight, tail } = c;
    let dtype = one_type([x, weight, tail].into_iter().chain(bias))?;
    let dims = convolution::Dims {
        batch: x.meta.shape[0],
        tokens: x.meta.shape[1],
        channels: x.meta.shape[2],
        window: weight.meta.shape[0],
        activation: or_identity(activation),
    };
    let cubes = dims.cubes(largest(x))?;
    let [y, next] = [x, tail].map(|like| new(like, like.meta.shape.clone(), dtype));
    let args = convolution::Args {
        x: arg(x),
        weight: arg(weight),
        bias: bias.map(arg),
        tail: arg(tail),
        y: arg(&y),
        next: arg(&next),
    };
    convolution::launch(&x.client, cubes, dims, args, || arg(weight), dtype.into());
    Some((y, next))
}
