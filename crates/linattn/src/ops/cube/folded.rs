//! Products of a token's rows with the operation before them folded in, on CubeCL backends.

use super::super::folded::{FoldedInput, FoldedOutput, Matrices};
use super::quantized::{bits, narrow, parts};
use super::{columns, loads_are_wide};
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use linattn_kernels::few_rows::{self, Dims, Input, Reading};
use linattn_kernels::quantized;

/// The product; nothing where types differ or there are many rows: every cube does the operation again for all of them.
pub(super) fn product<R, F, I, BT>(
    x: FoldedInput<CubeTensor<R>>,
    matrices: Matrices<'_, CubeBackend<R, F, I, BT>>,
) -> Option<FoldedOutput<CubeTensor<R>>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (tensors, reading) = (x.tensors(), input(&x).reading());
    let (like, dtype) = (tensors[0], tensors[0].dtype);
    let mut shape = like.meta.shape.clone();
    let last = shape.num_dims() - 1;
    let halves = if matches!(reading, Reading::Gated(_)) { 2 } else { 1 };
    let dims = Dims { rows: shape[..last].iter().product(), inner: shape[last] / halves };
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let alike = float && tensors.iter().all(|tensor| tensor.dtype == dtype);
    if !alike || dims.rows > few_rows::MOST_FOLDED {
        return None;
    }
    let x = x.map(into_contiguous);
    let like = x.tensors()[0];
    let client = &like.client;
    let done = match matrices {
        Matrices::Floats(weights) => {
            if weights.iter().any(|weight| weight.dtype != dtype) || !loads_are_wide(&weights) {
                return None;
            }
            let sizes = weights.iter().map(columns).collect::<Option<Vec<_>>>()?;
            let product =
                few_rows::Product::new(client, dims, reading, &sizes, dtype.into()).ok()?;
            let weights: Vec<_> = weights.iter().map(|weight| &weight.handle).collect();
            product.launch(client, input(&x), &weights, None)
        }
        Matrices::Quantized { matrices, floats } => {
            if floats.iter().any(|matrix| matrix.dtype != dtype) {
                return None;
            }
            let of_weights = bits(matrices.first()?.bits());
            let matrices: Vec<_> = matrices.iter().map(|matrix| parts(matrix)).collect();
            let floats = narrow(&floats)?;
            let given =
                quantized::Matrices { bits: of_weights, quantized: &matrices, floats: &floats };
            quantized::product(client, dims, dtype.into(), input(&x), given).ok()?
        }
    };
    let mut made = |width, handle| {
        shape[last] = width;
        let (client, device) = (like.client.clone(), like.device.clone());
        CubeTensor::new_contiguous(client, device, shape.clone(), handle, dtype)
    };
    let sum = done.sum.map(|sum| made(dims.inner, sum.handle));
    Some(FoldedOutput { y: made(done.y.shape[1], done.y.handle), sum })
}

/// The kernel's input.
fn input<R: CubeRuntime>(x: &FoldedInput<CubeTensor<R>>) -> Input<'_> {
    match x {
        FoldedInput::Gated { both, activation } => {
            Input::Gated { both: &both.handle, activation: (*activation).into() }
        }
        FoldedInput::Normalized { x, addend, weight, epsilon } => Input::Normalized {
            x: &x.handle,
            addend: addend.as_ref().map(|addend| &addend.handle),
            weight: &weight.handle,
            epsilon: *epsilon as f32,
        },
        FoldedInput::Heads { o, gate, weight, epsilon, heads } => Input::Heads {
            o: &o.handle,
            gate: gate.as_ref().map(|(activation, gate)| (&gate.handle, (*activation).into())),
            weight: &weight.handle,
            epsilon: *epsilon as f32,
            heads: *heads,
        },
    }
}
