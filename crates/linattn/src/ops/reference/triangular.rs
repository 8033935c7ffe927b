//! (I + N)^-1 for strictly lower triangular N, batched.
//!
//! By exact block elimination, small blocks first:
//! `[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]`. A power series in N would be shorter
//! and wrong: with equal keys and beta = 1 the powers of N reach 1e17 at 64 rows before they cancel.

use super::mask::Mask;
use crate::ops::tensors::{cat, stack};
use burn::tensor::{Tensor, backend::Backend};

/// Blocks up to this size are inverted inside one matrix, by masks; larger ones are cut out.
const BASE: usize = 16;

/// `(I + n)^-1 y`. `n`: `[B, H, C, C]`, zero on and above the diagonal, any C; `y`: `[B, H, C, X]`.
pub(crate) fn solve_unit_lower<B: Backend>(n: Tensor<B, 4>, y: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, size, _] = n.dims();
    let width = size.next_power_of_two();
    let n = enlarge(n.reshape([batch * heads, size, size]), width);
    let inverse = unit_lower_inverse(n).narrow(1, 0, size).narrow(2, 0, size);
    inverse.reshape([batch, heads, size, size]).matmul(y)
}

/// `[M, C, C]` to `[M, width, width]`, zeros behind: the inverse's first C rows stay what they are.
fn enlarge<B: Backend>(n: Tensor<B, 3>, width: usize) -> Tensor<B, 3> {
    let [many, size, _] = n.dims();
    if size == width {
        return n;
    }
    let zeros = |shape: [usize; 3]| Tensor::<B, 3>::zeros(shape, (&n.device(), n.dtype()));
    let (right, below) = (zeros([many, size, width - size]), zeros([many, width - size, width]));
    cat(vec![cat(vec![n.clone(), right], 2), below], 1)
}

/// `n`: `[M, C, C]`, C a power of two; entries on and above the diagonal have to be zero.
pub(super) fn unit_lower_inverse<B: Backend>(n: Tensor<B, 3>) -> Tensor<B, 3> {
    let [many, size, _] = n.dims();
    if size <= BASE {
        return invert_base(n);
    }
    let diagonal = blocks(&n, BASE, 0).reshape([many * (size / BASE), BASE, BASE]);
    let mut inverse = invert_base(diagonal);
    let mut width = BASE;
    while width < size {
        inverse = merge(inverse, &n, width);
        width *= 2;
    }
    inverse
}

/// Inverts `[M, C, C]`, C at most [`BASE`], doubling the size of the blocks that are done.
fn invert_base<B: Backend>(n: Tensor<B, 3>) -> Tensor<B, 3> {
    let size = n.dims()[1];
    let below = |width: usize| {
        let mask = Mask::new(&n, size, |i, j| i / width == j / width + 1 && (i / width) % 2 == 1);
        mask.apply(n.clone())
    };
    let diagonal = Mask::new(&n, size, |i, j| i == j);
    if size == 1 {
        return diagonal.add_to(n.zeros_like());
    }
    // Blocks of one are ones: the first product is the corner itself.
    let mut inverse = diagonal.add_to(below(1).neg());
    let mut width = 2;
    while width < size {
        let step = inverse.clone().matmul(below(width)).matmul(inverse.clone());
        inverse = inverse - step;
        width *= 2;
    }
    inverse
}

/// From the inverses of diagonal blocks `width` wide to those twice as wide.
fn merge<B: Backend>(inverse: Tensor<B, 3>, n: &Tensor<B, 3>, width: usize) -> Tensor<B, 3> {
    let [many, size, _] = n.dims();
    let pairs = many * size / (2 * width);
    let inverse = inverse.reshape([pairs, 2, width, width]);
    let half = |i| inverse.clone().narrow(1, i, 1).reshape([pairs, width, width]);
    let (above, below) = (half(0), half(1));
    let corner = blocks(n, 2 * width, width).reshape([pairs, width, width]);
    let corner = below.clone().matmul(corner).matmul(above.clone()).neg();
    let upper = cat(vec![above.clone(), above.zeros_like()], 2);
    let lower = cat(vec![corner, below], 2);
    cat(vec![upper, lower], 1)
}

/// Of every diagonal block `stride` wide, the square at `offset` rows down and at its left edge:
/// `[M, C / stride, w, w]`, w = stride - offset.
fn blocks<B: Backend>(n: &Tensor<B, 3>, stride: usize, offset: usize) -> Tensor<B, 4> {
    let (size, width) = (n.dims()[1], stride - offset);
    let cut =
        |i: usize| n.clone().narrow(1, i * stride + offset, width).narrow(2, i * stride, width);
    stack((0..size / stride).map(cut).collect(), 1)
}
