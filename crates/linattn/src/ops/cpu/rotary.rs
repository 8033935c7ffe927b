//! Rotary embedding.

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch};
use super::shared::{Fresh, Rows, RowsMut};
use super::tensors::{Number, contiguous, one_type, slice, tensor, typed};
use crate::ops::fused::Rotary;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Numbers of a piece.
const PIECE: usize = 4096;

/// Rows rotated by their positions; turned back for the backward pass.
pub(super) fn rotary(x: Rotary<FlexTensor>, keep: bool) -> Option<Pass<Flex>> {
    let Rotary { x, table } = x;
    let dtype = one_type([&x, &table])?;
    typed!(dtype, rotary_of(contiguous(x), contiguous(table), keep))
}

fn rotary_of<R: Number>(x: FlexTensor, table: FlexTensor, keep: bool) -> Pass<Flex> {
    let y = rotated::<R>(&x, &table, R::ONE);
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| {
            let d_y = gradients.into_iter().next().flatten();
            vec![d_y.map(|d_y| rotated::<R>(&contiguous(d_y), &table, -R::ONE))]
        })
    });
    Pass { outputs: vec![y], backward }
}

/// `x` turned by the angles of `table` times `sign`, 1 or -1.
fn rotated<R: Number>(x: &FlexTensor, table: &FlexTensor, sign: R) -> FlexTensor {
    let shape = x.shape();
    let [batch, tokens, heads, width] = [0, 1, 2, 3].map(|d| shape[d]);
    let half = table.shape()[2];
    let row = heads * width;
    let each = (PIECE / row.max(1)).max(1);
    let (numbers, table) = (slice::<R>(x), slice::<R>(table));
    let mut y = Fresh::<R>::new(numbers.len());
    let shared = y.shared();
    for_each((batch * tokens).div_ceil(each), 6 * PIECE, |i| {
        let first = i * each;
        let count = each.min(batch * tokens - first);
        let x = Rows::new(numbers, first * row, [row, row]);
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let y = unsafe { shared.rows((first * row, [count, row, row])) };
        dispatch(Turn { x, y, count, first: first % tokens, tokens, width, half, table, sign });
    });
    tensor(y.filled(), shape)
}

/// Some tokens.
struct Turn<'a, R> {
    x: Rows<'a, R>,
    y: RowsMut<'a, R>,
    count: usize,
    /// Place of the first one in its sequence.
    first: usize,
    tokens: usize,
    width: usize,
    half: usize,
    table: &'a [R],
    sign: R,
}

impl<R: Real> Job for Turn<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let (sines, half) = (self.tokens * self.half, self.half);
        for i in 0..self.count {
            let at = (self.first + i) % self.tokens * half;
            let (cos, sin) = (&self.table[at..][..half], &self.table[sines + at..][..half]);
            let heads = self.x.at(i).chunks_exact(self.width);
            for (x, y) in heads.zip(self.y.at(i).chunks_exact_mut(self.width)) {
                turn(x, [cos, sin], self.sign, y);
            }
        }
    }
}

#[inline(always)]
fn turn<R: Real>(x: &[R], [cos, sin]: [&[R]; 2], sign: R, y: &mut [R]) {
    let half = cos.len();
    let (pairs, rest) = x.split_at(2 * half);
    let (to_pairs, to_rest) = y.split_at_mut(2 * half);
    let (first, second) = pairs.split_at(half);
    let (to_first, to_second) = to_pairs.split_at_mut(half);
    let from = first.iter().zip(second).zip(cos.iter().zip(sin));
    for ((to_a, to_b), ((&a, &b), (&cos, &sin))) in to_first.iter_mut().zip(to_second).zip(from) {
        let sin = sin * sign;
        *to_a = a * cos - b * sin;
        *to_b = a * sin + b * cos;
    }
    to_rest.copy_from_slice(rest);
}
