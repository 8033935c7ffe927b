//! Matrices side by side.

use super::tensors::{Number, contiguous, one_type, slice, tensor, typed};
use crate::ops::fused::Pack;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Matrices of one type, the result's.
pub(super) fn pack(x: Pack<FlexTensor>, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(&x.matrices)?;
    let matrices: Vec<_> = x.matrices.into_iter().map(contiguous).collect();
    match dtype == x.dtype {
        true => typed!(dtype, pack_of(&matrices, x.padding, keep)),
        false => None,
    }
}

fn pack_of<R: Number>(matrices: &[FlexTensor], padding: usize, keep: bool) -> Pass<Flex> {
    let rows = matrices[0].shape()[0];
    let widths: Vec<usize> = matrices.iter().map(|x| x.shape()[1]).collect();
    let width = widths.iter().sum::<usize>() + padding;
    let slices: Vec<&[R]> = matrices.iter().map(slice).collect();
    let mut packed = Vec::with_capacity(rows * width);
    for i in 0..rows {
        for (x, width) in slices.iter().zip(&widths) {
            packed.extend_from_slice(&x[i * width..(i + 1) * width]);
        }
        packed.resize((i + 1) * width, R::default());
    }
    let outputs = vec![tensor(packed, [rows, width])];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| match gradients.into_iter().next().flatten() {
            Some(d) => unpack(slice::<R>(&contiguous(d)), rows, (&widths, width)),
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

fn unpack<R: Number>(
    d: &[R],
    rows: usize,
    (widths, width): (&[usize], usize),
) -> Vec<Option<FlexTensor>> {
    let mut parts: Vec<Vec<R>> = widths.iter().map(|w| Vec::with_capacity(rows * w)).collect();
    for mut row in d.chunks_exact(width.max(1)) {
        for (part, &width) in parts.iter_mut().zip(widths) {
            part.extend_from_slice(&row[..width]);
            row = &row[width..];
        }
    }
    parts.into_iter().zip(widths).map(|(part, &w)| Some(tensor(part, [rows, w]))).collect()
}
