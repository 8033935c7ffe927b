//! Linear layers.

use super::one_row::one_row;
use super::product::{Matrix, product, sum_of_products, sum_of_slices};
use super::real::{Job, Machine, Real, add, dispatch};
use super::tensors::{Number, contiguous, matrix, maybe, one_type, slice, strided, tensor, typed};
use crate::ops::fused::LinearLayer;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Rows of a piece.
const ROWS: usize = 256;

type Layer = LinearLayer<FlexTensor>;

/// A linear layer, of one type throughout.
pub(super) fn linear(l: Layer, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(l.clone().into_vec().iter())?;
    let [x, weight] = [contiguous(l.x), strided(l.weight)];
    let l = LinearLayer { x, weight, bias: l.bias.map(contiguous) };
    typed!(dtype, linear_of(l, keep))
}

fn linear_of<R: Number>(l: Layer, keep: bool) -> Pass<Flex> {
    let weight = matrix::<R>(&l.weight);
    let [from, to] = weight.size();
    let x = slice::<R>(&l.x);
    let rows = x.len().checked_div(from).unwrap_or(0);
    let bias = maybe(&l.bias);
    // Bits of what is learnt are those of the general product.
    let alone = (!keep && rows == 1).then(|| one_row(bias, x, weight)).flatten();
    let y = alone.unwrap_or_else(|| product(Matrix::new(x, [rows, from]), weight, bias));
    let mut shape = l.x.shape();
    let last = shape.num_dims() - 1;
    shape[last] = to;
    let outputs = vec![tensor(y, shape)];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, wanted| match gradients.into_iter().next().flatten() {
            Some(d_y) => linear_backward::<R>(&l, contiguous(d_y), wanted),
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

fn linear_backward<R: Number>(
    l: &Layer,
    d_y: FlexTensor,
    wanted: &[bool],
) -> Vec<Option<FlexTensor>> {
    let weight = matrix::<R>(&l.weight);
    let [from, to] = weight.size();
    let (x, d_y) = (slice::<R>(&l.x), slice::<R>(&d_y));
    let rows = x.len().checked_div(from).unwrap_or(0);
    let (x, d_y) = (Matrix::new(x, [rows, from]), Matrix::new(d_y, [rows, to]));
    let d_x = || {
        let d_x = product(d_y, weight.transposed(), None);
        tensor(d_x, l.x.shape())
    };
    let d_weight = || tensor(sum_of_products(x, d_y), [from, to]);
    let mut found = vec![wanted[0].then(d_x), wanted[1].then(d_weight)];
    if l.bias.is_some() {
        found.push(wanted[2].then(|| tensor(sum_of_rows(d_y), [to])));
    }
    found
}

/// The sum over rows.
pub(super) fn sum_of_rows<R: Real>(x: Matrix<'_, R>) -> Vec<R> {
    struct Rows<'a, R>(Matrix<'a, R>, &'a mut [R]);
    impl<R: Real> Job for Rows<'_, R> {
        type Output = ();

        #[inline(always)]
        fn run<M: Machine>(self) {
            let Self(x, sum) = self;
            for row in x.each_row() {
                add(sum, row);
            }
        }
    }
    let [rows, width] = x.size();
    let slice = rows.div_ceil(16).max(ROWS);
    sum_of_slices(rows.div_ceil(slice), width, slice * width / 4, |i, sum| {
        dispatch(Rows(x.rows(i * slice, slice.min(rows - i * slice)), sum));
    })
}
