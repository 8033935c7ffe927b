//! Products of a few rows by quantized matrices, which are read once and as they are.

use super::real::{Job, LANES, Machine, dispatch, total};
use super::tensors::{contiguous, slice, tensor};
use crate::ops::quantized::{GROUP, QuantizedMatrix, WeightBits};
use burn::tensor::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;
use std::borrow::Cow;

/// Rows of `x` at most: more are worth the dequantising of the matrix.
const ROWS: usize = 64;
/// Rows of the matrix that are summed side by side.
const SIDE_BY_SIDE: usize = 4;
/// Rows of the matrix that are a thread's while.
const PIECE: usize = 64;
const HALF: usize = GROUP / 2;

/// `x [W_1^T W_2^T ..]` for quantized `W_i`, `[to, from]`: `[.., from]` to `[.., to_1 + to_2 ..]`, in f32. Nothing
/// where `x` has other numbers or many rows.
pub(super) fn linear(x: FlexTensor, weights: &[&QuantizedMatrix<Flex>]) -> Option<FlexTensor> {
    let from = weights.first()?.size()[1];
    let to: usize = weights.iter().map(|weight| weight.size()[0]).sum();
    let mut shape = x.shape();
    let last = shape.num_dims() - 1;
    let rows = shape.num_elements() / from;
    if x.dtype() != DType::F32 || rows > ROWS || rows == 0 {
        return None;
    }
    let x = contiguous(x);
    let groups = from.div_ceil(GROUP);
    let x = whole_groups(slice(&x), from, groups);
    // A piece's outputs for each row of `x`, then in their order.
    let mut found = vec![0.0; rows * to];
    let mut rest = found.as_mut_slice();
    for weight in weights {
        let (own, others) = rest.split_at_mut(rows * weight.size()[0]);
        let (values, scales) = weight.primitives();
        let (values, scales) = (contiguous(values.clone()), contiguous(scales.clone()));
        let words: &[u32] = values.as_slice().expect("words of 32 bits");
        let (values, scales) = (bytemuck::cast_slice(words), slice(&scales));
        let weight = Numbers { bits: weight.bits(), values, scales };
        own.par_chunks_mut(PIECE * rows).enumerate().for_each(|(i, sums)| {
            dispatch(Piece { x: &x, weight, groups, first: i * PIECE, sums });
        });
        rest = others;
    }
    shape[last] = to;
    Some(tensor(in_order(found, rows, to), shape))
}

/// Rows of whole groups, with zeros behind their ends where they have to be filled up.
fn whole_groups(x: &[f32], from: usize, groups: usize) -> Cow<'_, [f32]> {
    if from.is_multiple_of(GROUP) {
        return x.into();
    }
    let mut whole = vec![0.0; x.len() / from * groups * GROUP];
    for (whole, x) in whole.chunks_exact_mut(groups * GROUP).zip(x.chunks_exact(from)) {
        whole[..from].copy_from_slice(x);
    }
    whole.into()
}

/// `[to, rows]` to `[rows, to]`.
fn in_order(found: Vec<f32>, rows: usize, to: usize) -> Vec<f32> {
    if rows == 1 {
        return found;
    }
    let row = |row: usize| found.iter().skip(row).step_by(rows).copied().take(to);
    (0..rows).flat_map(row).collect()
}

/// A quantized matrix: its numbers, row after row, and a scale for each group.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    bits: WeightBits,
    values: &'a [u8],
    scales: &'a [f32],
}

/// Some rows of the matrix by all rows of `x`.
struct Piece<'a> {
    x: &'a [f32],
    weight: Numbers<'a>,
    /// Groups of a row.
    groups: usize,
    first: usize,
    /// For a row of the matrix after the other, those of all rows of `x`.
    sums: &'a mut [f32],
}

impl Job for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        match self.weight.bits {
            WeightBits::Int8 => self.with::<M, GROUP>(|group, numbers| {
                for i in 0..GROUP {
                    numbers[i] = f32::from(group[i] as i8);
                }
            }),
            WeightBits::Int4 => self.with::<M, HALF>(|group, numbers| {
                for i in 0..HALF {
                    numbers[i] = f32::from((group[i] & 15) as i8 - 8);
                    numbers[HALF + i] = f32::from((group[i] >> 4) as i8 - 8);
                }
            }),
        }
    }
}

impl Piece<'_> {
    /// Groups are of so many bytes, and `dequantize` makes numbers of one.
    #[inline(always)]
    fn with<M: Machine, const BYTES: usize>(
        self,
        dequantize: impl Fn(&[u8; BYTES], &mut [f32; GROUP]),
    ) {
        let Self { x, weight, groups, first, sums } = self;
        let (values, _) = weight.values.as_chunks::<BYTES>();
        let (x, _) = x.as_chunks::<GROUP>();
        let rows = x.len() / groups;
        for (block, sums) in sums.chunks_mut(SIDE_BY_SIDE * rows).enumerate() {
            let first = first + block * SIDE_BY_SIDE;
            let count = sums.len() / rows;
            for (row, x) in x.chunks_exact(groups).enumerate() {
                let mut lanes = [[0.0_f32; LANES]; SIDE_BY_SIDE];
                for (j, lanes) in lanes.iter_mut().enumerate().take(count) {
                    let values = &values[(first + j) * groups..][..groups];
                    let scales = &weight.scales[(first + j) * groups..][..groups];
                    for ((group, x), &scale) in values.iter().zip(x).zip(scales) {
                        let mut numbers = [0.0; GROUP];
                        dequantize(group, &mut numbers);
                        let mut part = [0.0; LANES];
                        for i in 0..LANES {
                            part[i] = numbers[i] * x[i];
                        }
                        for i in 0..LANES {
                            part[i] = M::mul_add(numbers[LANES + i], x[LANES + i], part[i]);
                        }
                        for i in 0..LANES {
                            lanes[i] = M::mul_add(part[i], scale, lanes[i]);
                        }
                    }
                }
                for j in 0..count {
                    sums[j * rows + row] = total(&lanes[j]);
                }
            }
        }
    }
}
