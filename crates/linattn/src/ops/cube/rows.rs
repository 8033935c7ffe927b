//! Pieces of tensors, and sums of them, on CubeCL backends.

use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, slice};
use burn_cubecl::ops::numeric::{add, empty_device_contiguous_dtype, mul};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime};

/// Rows of a matrix `[N, W]`, from `from` on.
pub(super) fn rows_of<R: CubeRuntime>(
    x: &CubeTensor<R>,
    from: usize,
    rows: usize,
) -> CubeTensor<R> {
    let (count, width) = (x.meta.shape()[0], x.meta.shape()[1]);
    match rows == count {
        true => x.clone(),
        false => slice(x.clone(), &[from..from + rows, 0..width]),
    }
}

/// Entries of a vector, from `from` on.
pub(super) fn entries_of<R: CubeRuntime>(
    x: &CubeTensor<R>,
    from: usize,
    entries: usize,
) -> CubeTensor<R> {
    match entries == x.meta.shape()[0] {
        true => x.clone(),
        false => slice(x.clone(), std::slice::from_ref(&(from..from + entries))),
    }
}

/// The sum of what there is.
pub(super) fn sum<R: CubeRuntime>(
    a: Option<CubeTensor<R>>,
    b: Option<CubeTensor<R>>,
) -> Option<CubeTensor<R>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(add(a, b)),
        (a, b) => a.or(b),
    }
}

/// Matrices below one another, of `shape` together.
pub(super) fn joined<R: CubeRuntime>(mut parts: Vec<CubeTensor<R>>, shape: Shape) -> CubeTensor<R> {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let like = &parts[0];
    let (client, device) = (like.client.clone(), like.device.clone());
    let mut whole = empty_device_contiguous_dtype(client, device, shape, like.dtype);
    let (mut from, width) = (0, whole.meta.shape()[1]);
    for part in parts {
        let rows = part.meta.shape()[0];
        let place = [(from..from + rows).into(), (0..width).into()];
        // The element types of the backend say nothing of the tensor's own.
        whole = CubeBackend::<R, f32, i32, u8>::float_slice_assign(whole, &place, part);
        from += rows;
    }
    whole
}

/// `x` times one number, `[1]` in f32, in the type of `x`.
pub(super) fn scaled<R: CubeRuntime>(x: CubeTensor<R>, factor: &CubeTensor<R>) -> CubeTensor<R> {
    let (dtype, rank) = (x.dtype, x.meta.shape().num_dims());
    let ones = Shape::from(vec![1; rank]);
    let factor = CubeTensor::new_contiguous(
        factor.client.clone(),
        factor.device.clone(),
        ones,
        factor.handle.clone(),
        factor.dtype,
    );
    match dtype {
        DType::F32 => mul(x, factor),
        // The factor has digits that 16 bits would lose.
        _ => cast(mul(cast(x, DType::F32), factor), dtype),
    }
}
