//! Quantized matrices on CubeCL backends.

use super::super::quantized::{QuantizedMatrix, WeightBits};
use super::super::tensors::primitive;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use linattn_kernels::quantized::{self, Bits, Dims, Input, Matrix};

/// A matrix's numbers and scales, each row after row.
pub(super) struct Parts<R: CubeRuntime> {
    values: CubeTensor<R>,
    scales: CubeTensor<R>,
    rows: usize,
}

impl<R: CubeRuntime> Parts<R> {
    pub(super) fn new<F, I, BT>(matrix: &QuantizedMatrix<CubeBackend<R, F, I, BT>>) -> Self
    where
        F: FloatElement,
        I: IntElement,
        BT: BoolElement,
    {
        let values = into_contiguous(matrix.values().into_primitive());
        let scales = into_contiguous(primitive(matrix.scales()));
        Self { values, scales, rows: matrix.size()[0] }
    }

    pub(super) fn matrix(&self) -> Matrix<'_> {
        let Self { values, scales, rows } = self;
        Matrix { values: &values.handle, scales: &scales.handle, rows: *rows }
    }
}

pub(super) fn bits(bits: WeightBits) -> Bits {
    match bits {
        WeightBits::Int8 => Bits::Eight,
        WeightBits::Int4 => Bits::Four,
    }
}

/// `x [W_1^T W_2^T ..]`, in the type of `x`; nothing where the kernel does not take it.
pub(super) fn linear<R, F, I, BT>(
    x: CubeTensor<R>,
    weights: &[&QuantizedMatrix<CubeBackend<R, F, I, BT>>],
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let of_weights = bits(weights.first()?.bits());
    let (mut shape, dtype) = (x.meta.shape.clone(), x.dtype);
    let last = shape.num_dims() - 1;
    let dims = Dims { rows: shape[..last].iter().product(), inner: shape[last] };
    let rows: Vec<usize> = weights.iter().map(|weight| weight.size()[0]).collect();
    quantized::check(&x.client, dims, of_weights, &rows, dtype.into()).ok()?;
    let x = into_contiguous(x);
    let parts: Vec<_> = weights.iter().map(|weight| Parts::new(weight)).collect();
    let matrices: Vec<_> = parts.iter().map(Parts::matrix).collect();
    let given = (of_weights, matrices.as_slice());
    let x_rows = Input::Rows(&x.handle);
    let y = quantized::product(&x.client, dims, dtype.into(), x_rows, given).ok()?.y;
    shape[last] = rows.iter().sum();
    Some(CubeTensor::new_contiguous(x.client, x.device, shape, y.handle, dtype))
}

/// The matrix as floats; by the host where no kernel takes it.
pub(super) fn dequantize<R, F, I, BT>(
    matrix: &QuantizedMatrix<CubeBackend<R, F, I, BT>>,
    dtype: DType,
) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (parts, [_, columns]) = (Parts::new(matrix), matrix.size());
    let CubeTensor { client, device, .. } = parts.values.clone();
    let of_matrix = bits(matrix.bits());
    match quantized::dequantize(&client, columns, dtype.into(), of_matrix, parts.matrix()) {
        Ok(floats) => {
            let shape = matrix.size().into();
            CubeTensor::new_contiguous(client, device, shape, floats.handle, dtype)
        }
        Err(_) => primitive(matrix.dequantized_by_host(dtype)),
    }
}
