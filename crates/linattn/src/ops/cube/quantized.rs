//! Quantized matrices on CubeCL backends.

use super::super::quantized::{QuantizedMatrix, WeightBits};
use super::super::tensors::primitive;
use super::columns;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use linattn_kernels::quantized::{self, Bits, Dims, Floats, Input, Matrices, Matrix};

/// A matrix in the kernels' words: its numbers and scales are of one dimension, and so in one piece.
pub(super) fn parts<R, F, I, BT>(matrix: &QuantizedMatrix<CubeBackend<R, F, I, BT>>) -> Matrix<'_>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (values, scales) = matrix.primitives();
    debug_assert!(values.is_contiguous() && scales.is_contiguous(), "one dimension has no gaps");
    Matrix { values: &values.handle, scales: &scales.handle, rows: matrix.size()[0] }
}

pub(super) fn bits(bits: WeightBits) -> Bits {
    match bits {
        WeightBits::Int8 => Bits::Eight,
        WeightBits::Int4 => Bits::Four,
    }
}

/// Matrices of floats, where each row lies in one piece.
pub(super) fn narrow<R: CubeRuntime>(floats: &[CubeTensor<R>]) -> Option<Vec<Floats<'_>>> {
    floats
        .iter()
        .map(|matrix| Some(Floats { numbers: &matrix.handle, columns: columns(matrix)? }))
        .collect()
}

/// `x [W_1^T .. U_1 ..]`, in the type of `x`; nothing where the kernel does not take it.
pub(super) fn linear<R, F, I, BT>(
    x: CubeTensor<R>,
    weights: &[&QuantizedMatrix<CubeBackend<R, F, I, BT>>],
    floats: &[CubeTensor<R>],
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (mut shape, dtype) = (x.meta.shape.clone(), x.dtype);
    let last = shape.num_dims() - 1;
    let dims = Dims { rows: shape[..last].iter().product(), inner: shape[last] };
    if dims.rows > quantized::MOST_ROWS || floats.iter().any(|matrix| matrix.dtype != dtype) {
        return None;
    }
    let x = into_contiguous(x);
    let matrices: Vec<_> = weights.iter().map(|weight| parts(weight)).collect();
    let floats = narrow(floats)?;
    let bits = bits(weights.first()?.bits());
    let all = Matrices { bits, quantized: &matrices, floats: &floats };
    let done = quantized::product(&x.client, dims, dtype.into(), Input::Rows(&x.handle), all);
    let y = done.ok()?.y;
    shape[last] = y.shape[1];
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
    as_floats(matrix, None, dtype).unwrap_or_else(|| primitive(matrix.dequantized_by_host(dtype)))
}

/// These rows of the matrix as floats, `[M]` to `[M, columns]`; nothing where no kernel takes it.
pub(super) fn rows<R, F, I, BT>(
    matrix: &QuantizedMatrix<CubeBackend<R, F, I, BT>>,
    rows: CubeTensor<R>,
    dtype: DType,
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let ids = into_contiguous(rows);
    let count = ids.meta.shape().num_elements();
    let rows = quantized::Rows { ids: &ids.handle, count, dtype: ids.dtype.into() };
    as_floats(matrix, Some(rows), dtype)
}

fn as_floats<R, F, I, BT>(
    matrix: &QuantizedMatrix<CubeBackend<R, F, I, BT>>,
    rows: Option<quantized::Rows<'_>>,
    dtype: DType,
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let ([all, columns], of_matrix) = (matrix.size(), bits(matrix.bits()));
    let CubeTensor { client, device, .. } = matrix.primitives().0;
    let count = rows.map_or(all, |rows| rows.count);
    let (parts, to) = (parts(matrix), dtype.into());
    let floats = quantized::dequantize(client, columns, to, of_matrix, parts, rows).ok()?;
    let (client, device, shape) = (client.clone(), device.clone(), [count, columns].into());
    Some(CubeTensor::new_contiguous(client, device, shape, floats.handle, dtype))
}
