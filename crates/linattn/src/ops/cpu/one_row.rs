//! Products of one row by a matrix, which is what decoding one text is made of: the matrix is read once, in
//! the order that it lies in.

use super::product::Matrix;
use super::real::{Job, Machine, Real, dispatch, dot};
use rayon::prelude::*;

/// Columns of a piece where the matrix lies row by row: as many as stay at hand while its rows go by.
const COLUMNS: usize = 256;
/// Columns of a piece where it lies column by column.
const DOTS: usize = 64;
/// Rows that are added together.
const ROWS: usize = 4;

/// `x W + b`; nothing where the matrix lies in neither order.
pub(super) fn one_row<R: Real>(
    bias: Option<&[R]>,
    x: &[R],
    weight: Matrix<'_, R>,
) -> Option<Vec<R>> {
    let across = weight.transposed();
    let mut y = bias.map_or_else(|| vec![R::ZERO; weight.size()[1]], <[R]>::to_vec);
    if weight.lies_by_rows() {
        y.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, y)| {
            let weight = weight.columns(i * COLUMNS, y.len());
            dispatch(Rows { x, weight, y });
        });
    } else if across.lies_by_rows() {
        y.par_chunks_mut(DOTS).enumerate().for_each(|(i, y)| {
            let columns = across.rows(i * DOTS, y.len());
            dispatch(Dots { x, columns, y });
        });
    } else {
        return None;
    }
    Some(y)
}

/// Rows of the matrix, each times a number.
struct Rows<'a, R> {
    x: &'a [R],
    weight: Matrix<'a, R>,
    y: &'a mut [R],
}

impl<R: Real> Job for Rows<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let Self { x, weight, y } = self;
        let width = y.len();
        let mut rows = weight.each_row();
        let (fours, rest) = x.as_chunks::<ROWS>();
        for x in fours {
            let four: [Option<&[R]>; ROWS] = std::array::from_fn(|_| rows.next());
            let [Some(a), Some(b), Some(c), Some(d)] = four else { return };
            let (a, b, c, d, y) =
                (&a[..width], &b[..width], &c[..width], &d[..width], &mut y[..width]);
            for i in 0..width {
                let low = M::mul_add(x[0], a[i], M::mul_add(x[1], b[i], y[i]));
                y[i] = M::mul_add(x[2], c[i], M::mul_add(x[3], d[i], low));
            }
        }
        for (&x, row) in rest.iter().zip(rows) {
            for (y, &w) in y.iter_mut().zip(row) {
                *y = M::mul_add(x, w, *y);
            }
        }
    }
}

/// Columns of the matrix, each by the whole of `x`.
struct Dots<'a, R> {
    x: &'a [R],
    columns: Matrix<'a, R>,
    y: &'a mut [R],
}

impl<R: Real> Job for Dots<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let Self { x, columns, y } = self;
        for (y, column) in y.iter_mut().zip(columns.each_row()) {
            *y += dot::<M, R>(x, column);
        }
    }
}
