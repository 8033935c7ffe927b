//! Flex's tensors as slices, and back.

use super::product::Matrix;
use super::real::Real;
use burn::tensor::{Bytes, DType, Element, Shape, TensorMetadata};
use burn_flex::{FlexTensor, Layout};

/// A number of Flex's tensors that the loops of this folder take.
pub(super) trait Number: Real + Element + bytemuck::Pod {}

impl Number for f32 {}
impl Number for f64 {}

/// The one type of these tensors, if the loops of this folder take it.
pub(super) fn one_type<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> Option<DType> {
    let mut tensors = tensors.into_iter();
    let dtype = tensors.next()?.dtype();
    let known = matches!(dtype, DType::F32 | DType::F64);
    (known && tensors.all(|x| x.dtype() == dtype)).then_some(dtype)
}

/// A function for f32 or f64, as `dtype` says; nothing for another type.
macro_rules! typed {
    ($dtype:expr, $function:ident($($x:expr),* $(,)?)) => {
        match $dtype {
            burn::tensor::DType::F32 => Some($function::<f32>($($x),*)),
            burn::tensor::DType::F64 => Some($function::<f64>($($x),*)),
            _ => None,
        }
    };
}
pub(super) use typed;

/// The tensor with its numbers in a row: itself, if they are.
pub(super) fn contiguous(x: FlexTensor) -> FlexTensor {
    if x.is_contiguous() {
        return x;
    }
    typed!(x.dtype(), in_a_row(&x)).flatten().unwrap_or_else(|| x.to_contiguous())
}

/// The numbers of a tensor of three dimensions or more, which Flex copies one by one; nothing for what it copies as fast.
fn in_a_row<R: Number>(x: &FlexTensor) -> Option<FlexTensor> {
    let layout = x.layout();
    let dims = joined(&layout.shape()[..], layout.strides())?;
    if dims.len() < 3 {
        return None;
    }
    let mut row = Vec::with_capacity(layout.num_elements());
    append(&mut row, x.storage(), layout.start_offset(), &dims);
    Some(tensor::<R>(row, layout.shape().clone()))
}

/// Sizes and strides of dimensions, those in one that lie like one; nothing if some lie backwards.
fn joined(sizes: &[usize], strides: &[isize]) -> Option<Vec<[usize; 2]>> {
    let mut dims: Vec<[usize; 2]> = vec![];
    for (&size, &stride) in sizes.iter().zip(strides) {
        let stride = usize::try_from(stride).ok()?;
        match dims.last_mut() {
            _ if size == 1 => {}
            Some(outer) if outer[1] == size * stride => *outer = [outer[0] * size, stride],
            _ => dims.push([size, stride]),
        }
    }
    Some(dims)
}

/// Adds the numbers of `from` of these dimensions, the first of them at `first`.
fn append<R: Copy>(row: &mut Vec<R>, from: &[R], first: usize, dims: &[[usize; 2]]) {
    match *dims {
        [] => row.push(from[first]),
        [[size, 1]] => row.extend_from_slice(&from[first..][..size]),
        [[size, stride]] => row.extend((0..size).map(|i| from[first + i * stride])),
        [[size, stride], ref inner @ ..] => {
            for i in 0..size {
                append(row, from, first + i * stride, inner);
            }
        }
    }
}

/// The numbers of a tensor that went through [`contiguous`].
pub(super) fn slice<R: Number>(x: &FlexTensor) -> &[R] {
    x.as_slice().expect("contiguous, and of the type that was asked for")
}

/// The numbers of a tensor that went through [`contiguous`], if there is one.
pub(super) fn maybe<R: Number>(x: &Option<FlexTensor>) -> Option<&[R]> {
    x.as_ref().map(slice)
}

/// A tensor of two dimensions whose rows and columns are any steps apart.
pub(super) fn strided(x: FlexTensor) -> FlexTensor {
    if x.layout().has_positive_strides() { x } else { x.to_contiguous() }
}

/// A tensor that went through [`strided`].
pub(super) fn matrix<R: Number>(x: &FlexTensor) -> Matrix<'_, R> {
    let (layout, shape) = (x.layout(), x.shape());
    let strides = [layout.strides()[0], layout.strides()[1]].map(|stride| stride as usize);
    let data = &x.storage::<R>()[layout.start_offset()..];
    Matrix::with_strides(data, [shape[0], shape[1]], strides)
}

/// A tensor of these numbers.
pub(super) fn tensor<R: Number>(data: Vec<R>, shape: impl Into<Shape>) -> FlexTensor {
    let shape = shape.into();
    debug_assert_eq!(data.len(), shape.num_elements());
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape), R::dtype())
}

/// Zeros for a tensor to be.
pub(super) fn zeros<R: Number>(count: usize) -> Vec<R> {
    vec![R::ZERO; count]
}

/// Row numbers, of any type that Flex has for them.
pub(super) fn indices(x: FlexTensor) -> Option<Vec<usize>> {
    fn of<I: Element + bytemuck::Pod>(
        x: &FlexTensor,
        to: impl Fn(I) -> usize,
    ) -> Option<Vec<usize>> {
        Some(x.as_slice::<I>()?.iter().map(|&i| to(i)).collect())
    }
    let x = contiguous(x);
    match x.dtype() {
        DType::I32 => of::<i32>(&x, |i| i as usize),
        DType::I64 => of::<i64>(&x, |i| i as usize),
        DType::U32 => of::<u32>(&x, |i| i as usize),
        _ => None,
    }
}
