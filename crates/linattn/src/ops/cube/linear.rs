//! Matrix products of linear layers on Burn's CubeCL backends.
//!
//! ```text
//! y  = x W            x: [N, I]   W: [I, O]
//! dx = dy W^T         dy: [N, O]
//! dW = x^T dy         = sum over S of x_s^T dy_s, slices of N / S rows (split-K)
//! ```
//! [`linattn_kernels::matmul`] computes a product where the device has its instructions and the widths are
//! multiples of 16 bytes. Elsewhere cubek's default runs, which is what Burn runs; dW is then a batched
//! product over slices, and a sum.
//!
//! Sums are f32. f32 inputs go through TF32 tensor cores where the device has them, as in Burn.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::{cast, into_contiguous, slice};
use burn_cubecl::ops::numeric::{add, empty_device_contiguous_dtype};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::StorageType;
use cubecl::zspace::{Strides, metadata::Metadata};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::{InputBinding, MatrixLayout};
use linattn_kernels::fused::column_sums::column_sums;
use linattn_kernels::matmul::{Layout, Product, matmul};

/// A view with one contiguous axis among the last two, which is `x` itself where it has one.
fn readable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    match layout(&x) {
        Some(_) => x,
        None => into_contiguous(x),
    }
}

fn layout<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<MatrixLayout> {
    MatrixLayout::from_shape_and_strides(x.meta.shape(), x.meta.strides(), None).ok()
}

/// One side of a product of two matrices, in the kernel's words: `k_axis` is the one that is summed over.
fn side<R: CubeRuntime>(x: &CubeTensor<R>, k_axis: usize) -> Option<Layout> {
    let contiguous = if layout(x)? == MatrixLayout::RowMajor { 1 } else { 0 };
    let strides = x.meta.strides();
    Some(Layout { stride: strides[1 - contiguous], along_k: contiguous == k_axis })
}

/// The product by [`matmul`]; `None` where that does not take it. Both tensors are [`readable`].
fn by_tensor_cores<R: CubeRuntime>(
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    output: DType,
) -> Option<CubeTensor<R>> {
    let ([left, right], input) = ([lhs.meta.shape(), rhs.meta.shape()], lhs.dtype.into());
    if left.num_dims() != 2 || (output != lhs.dtype && output != DType::F32) {
        return None;
    }
    let (m, k, n) = (left[0], left[1], right[1]);
    let (lhs_layout, rhs_layout) = (side(lhs, 1)?, side(rhs, 0)?);
    let product =
        Product { m, n, k, lhs: lhs_layout, rhs: rhs_layout, input, output: output.into() };
    let y = matmul(&lhs.client, &lhs.handle, &rhs.handle, product).ok()??;
    let (client, device) = (lhs.client.clone(), lhs.device.clone());
    Some(CubeTensor::new_contiguous(client, device, Shape::from([m, n]), y.handle, output))
}

/// The product by cubek's default.
///
/// # Panics
/// Where that cannot run, as in Burn.
fn by_cubek<R: CubeRuntime>(
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    output: DType,
) -> CubeTensor<R> {
    let input: StorageType = lhs.dtype.into();
    let mut shape = lhs.meta.shape().to_vec();
    if let (Some(last), Some(columns)) = (shape.last_mut(), rhs.meta.shape().last()) {
        *last = *columns;
    }
    let (client, device) = (lhs.client.clone(), lhs.device.clone());
    let out = empty_device_contiguous_dtype(client, device, shape.into(), output);
    let binding = |x: &CubeTensor<R>| InputBinding::new(x.clone().binding(), input);
    let globals = MatmulGlobalElems { lhs: input, rhs: input, out: output.into() };
    let mut types = MatmulElems::from_globals(&globals);
    let strategy = Strategy::default();
    let (lhs, rhs, to) = (binding(lhs), binding(rhs), out.clone().binding());
    launch_ref(&strategy, &out.client, lhs, rhs, to, &mut types).expect("cubek's default runs");
    out
}

/// `[m, k] x [k, n]`, or a batch of them, `[B, m, k] x [B, k, n]`, in `out_dtype`.
///
/// Transposed views are read where they lie. No size is 0. `rhs` is cast if its type is not that of `lhs`.
///
/// # Panics
/// Where cubek's default cannot run either, as in Burn.
pub(super) fn product<R: CubeRuntime>(
    lhs: CubeTensor<R>,
    rhs: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    let rhs = if rhs.dtype == lhs.dtype { rhs } else { cast(rhs, lhs.dtype) };
    let (lhs, rhs) = (readable(lhs), readable(rhs));
    by_tensor_cores(&lhs, &rhs, out_dtype).unwrap_or_else(|| by_cubek(&lhs, &rhs, out_dtype))
}

/// The same memory with another shape and other strides.
fn view<R: CubeRuntime>(x: CubeTensor<R>, shape: &[usize], strides: &[usize]) -> CubeTensor<R> {
    let meta = Metadata::new(Shape::from(shape.to_vec()), Strides::new(strides));
    CubeTensor { meta: Box::new(meta), ..x }
}

/// `x^T` of a matrix, in the same memory.
pub(super) fn transposed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let ([rows, columns], [down, right]) = matrix(&x);
    view(x, &[columns, rows], &[right, down])
}

/// Shape and strides of a matrix.
fn matrix<R: CubeRuntime>(x: &CubeTensor<R>) -> ([usize; 2], [usize; 2]) {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    debug_assert_eq!(shape.len(), 2);
    ([shape[0], shape[1]], [strides[0], strides[1]])
}

/// `y = x W`: `x: [N, I]`, `w: [I, O]`, gives `[N, O]` in `out_dtype`. One launch.
pub(super) fn linear<R: CubeRuntime>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    product(x, w, out_dtype)
}

/// `dx = dy W^T`: `d_y: [N, O]`, `w: [I, O]`, gives `[N, I]` in `out_dtype`. One launch.
pub(super) fn linear_x_gradient<R: CubeRuntime>(
    d_y: CubeTensor<R>,
    w: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    product(d_y, transposed(w), out_dtype)
}

/// `dW = x^T dy`: `x: [N, I]`, `d_y: [N, O]`, gives `[I, O]` in `out_dtype`.
///
/// Split-K where the output alone is too small: sums of slices of the rows, in f32, and the sum of these in
/// a fixed order.
pub(super) fn linear_weight_gradient<R: CubeRuntime>(
    x: CubeTensor<R>,
    d_y: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    let (x, d_y) = (readable(x), readable(d_y));
    if x.dtype == d_y.dtype
        && let Some(sums) = by_tensor_cores(&transposed(x.clone()), &d_y, out_dtype)
    {
        return sums;
    }
    weight_gradient_by_slices(x, d_y, out_dtype)
}

/// [`linear_weight_gradient`] as a batched product over [`slices`]; the rows that slices leave over are added.
fn weight_gradient_by_slices<R: CubeRuntime>(
    x: CubeTensor<R>,
    d_y: CubeTensor<R>,
    out_dtype: DType,
) -> CubeTensor<R> {
    let (([rows, inputs], _), ([_, outputs], _)) = (matrix(&x), matrix(&d_y));
    let slices = slices(rows, inputs, outputs, multiprocessors(&x));
    let whole = |x, d_y| product(transposed(x), d_y, out_dtype);
    if slices == 1 {
        return whole(x, d_y);
    }
    let covered = rows / slices * slices;
    let parts =
        product(sliced(x.clone(), slices, true), sliced(d_y.clone(), slices, false), DType::F32);
    let (from, to) = (parts.dtype.into(), out_dtype.into());
    let sums = column_sums(&parts.client, &parts.handle, slices, inputs * outputs, from, to);
    let Ok(sums) = sums else { return whole(x, d_y) };
    let shape = Shape::from(vec![inputs, outputs]);
    let (client, device) = (x.client.clone(), x.device.clone());
    let sums = CubeTensor::new_contiguous(client, device, shape, sums.handle, out_dtype);
    if covered == rows {
        return sums;
    }
    let rest = |x: CubeTensor<R>, width: usize| slice(x, &[covered..rows, 0..width]);
    add(sums, whole(rest(x, inputs), rest(d_y, outputs)))
}

/// Multiprocessors of the device of `x`.
fn multiprocessors<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    let known = x.client.properties().hardware.num_streaming_multiprocessors;
    known.map_or(UNKNOWN, |count| count as usize)
}

/// Multiprocessors of a device that does not say how many it has.
const UNKNOWN: usize = 132;

/// The first `slices * (N / slices)` rows of a matrix `[N, W]` as `[slices, N / slices, W]`, or with the last
/// two axes swapped, in the same memory.
fn sliced<R: CubeRuntime>(x: CubeTensor<R>, slices: usize, transposed: bool) -> CubeTensor<R> {
    let ([rows, width], [down, right]) = matrix(&x);
    let each = rows / slices;
    match transposed {
        true => view(x, &[slices, width, each], &[each * down, right, down]),
        false => view(x, &[slices, each, width], &[each * down, down, right]),
    }
}

/// Fewest rows of a slice: shorter ones spend more on writing their results than on computing them.
const SHORTEST_SLICE: usize = 256;

/// Slices of the rows of `x^T dy`: a power of two, the fewest that give each multiprocessor a cube of
/// 128 x 128, as far as slices of [`SHORTEST_SLICE`] rows go. 1 where the output alone is large enough.
fn slices(rows: usize, inputs: usize, outputs: usize, multiprocessors: usize) -> usize {
    let cubes = inputs.div_ceil(128) * outputs.div_ceil(128);
    let wanted = multiprocessors.div_ceil(cubes).next_power_of_two();
    let most = (rows / SHORTEST_SLICE).max(1);
    // The largest power of two that is at most `most`.
    wanted.min(1 << most.ilog2())
}

/// Blocks `[H, I, O]` as `[H, O, I]`, in the same memory.
pub(super) fn blocks_transposed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let (shape, strides) = (x.meta.shape().to_vec(), x.meta.strides().to_vec());
    view(x, &[shape[0], shape[2], shape[1]], &[strides[0], strides[2], strides[1]])
}

/// `dW_h = x_h^T dy_h` of blocks: `x: [H, N, I]`, `d_y: [B, T, H, O]` with B T = N, gives `[H, I, O]` in f32. Both
/// are contiguous, and f32.
///
/// A batched product over slices of the rows, as many as divide them, and the sum of these in a fixed order.
pub(super) fn block_weight_gradient<R: CubeRuntime>(
    x: CubeTensor<R>,
    d_y: CubeTensor<R>,
) -> CubeTensor<R> {
    let [heads, rows, inputs] = [0, 1, 2].map(|d| x.meta.shape[d]);
    let outputs = d_y.meta.shape[3];
    let wanted = slices(rows, inputs, heads * outputs, multiprocessors(&x));
    let slices = wanted.min(1 << rows.trailing_zeros());
    let each = rows / slices;
    let lhs = [[slices, heads, inputs, each], [each * inputs, rows * inputs, 1, inputs]];
    let stride = heads * outputs;
    let rhs = [[slices, heads, each, outputs], [each * stride, outputs, stride, 1]];
    let (lhs, rhs) = (view(x, &lhs[0], &lhs[1]), view(d_y, &rhs[0], &rhs[1]));
    let parts = product(lhs, rhs, DType::F32);
    let (f32, numbers) = (DType::F32.into(), heads * inputs * outputs);
    let sums = column_sums(&parts.client, &parts.handle, slices, numbers, f32, f32)
        .expect("there are fewer numbers than in `d_y`");
    let shape = Shape::from([heads, inputs, outputs]);
    CubeTensor::new_contiguous(parts.client, parts.device, shape, sums.handle, DType::F32)
}

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
