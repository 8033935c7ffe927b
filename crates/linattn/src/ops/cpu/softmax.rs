//! Softmax of rows of scores.

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch, dot, largest, sum};
use super::shared::{Fresh, Rows, RowsMut};
use super::tensors::{Number, contiguous, one_type, slice, tensor, typed};
use crate::ops::fused::{Seen, SoftmaxRows};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use std::ops::Range;

/// Numbers of a piece.
const PIECE: usize = 4096;

/// Shares of the keys that each query sees.
pub(super) fn softmax(rows: SoftmaxRows<FlexTensor>, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type([&rows.scores])?;
    typed!(dtype, softmax_of(contiguous(rows.scores), rows.seen, keep))
}

fn softmax_of<R: Number>(x: FlexTensor, seen: Seen, keep: bool) -> Pass<Flex> {
    let y = worked::<R>([&x, &x], seen, false);
    let kept = keep.then(|| y.clone());
    let backward = kept.map(|y| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| {
            let d_y = gradients.into_iter().next().flatten();
            vec![d_y.map(|d_y| worked::<R>([&y, &contiguous(d_y)], seen, true))]
        })
    });
    Pass { outputs: vec![y], backward }
}

/// Shares from scores, or the gradient of scores from shares and their gradient.
fn worked<R: Number>([x, second]: [&FlexTensor; 2], seen: Seen, back: bool) -> FlexTensor {
    let shape = x.shape();
    let last = shape.num_dims() - 1;
    let (queries, keys) = (shape[last - 1], shape[last]);
    let (x, second) = (slice::<R>(x), slice::<R>(second));
    let mut y = Fresh::<R>::new(x.len());
    let shared = y.shared();
    let count = x.len().checked_div(keys).unwrap_or(0);
    let each = (PIECE / keys.max(1)).max(1);
    for_each(count.div_ceil(each), 8 * PIECE, |i| {
        let first = i * each;
        let count = each.min(count - first);
        let of = |x| Rows::new(x, first * keys, [keys, keys]);
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let y = unsafe { shared.rows((first * keys, [count, keys, keys])) };
        let piece = Piece { x: of(x), second: of(second), y, count, first, queries, keys, seen };
        match back {
            false => dispatch(Shares(piece)),
            true => dispatch(Gradient(piece)),
        }
    });
    tensor(y.filled(), shape)
}

/// Some rows, of which the unseen numbers stay zeros.
struct Piece<'a, R> {
    x: Rows<'a, R>,
    /// Gradients of shares.
    second: Rows<'a, R>,
    y: RowsMut<'a, R>,
    count: usize,
    first: usize,
    queries: usize,
    keys: usize,
    seen: Seen,
}

impl<R> Piece<'_, R> {
    /// The keys that row `i` sees.
    #[inline(always)]
    fn seen(&self, i: usize) -> Range<usize> {
        match self.seen {
            Seen::All => 0..self.keys,
            Seen::Causal { window } => {
                let end = self.keys - self.queries + (self.first + i) % self.queries + 1;
                end.saturating_sub(window.unwrap_or(end))..end
            }
        }
    }
}

struct Shares<'a, R>(Piece<'a, R>);
struct Gradient<'a, R>(Piece<'a, R>);

impl<R: Real> Job for Shares<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let Self(mut rows) = self;
        for i in 0..rows.count {
            let seen = rows.seen(i);
            let (x, y) = (&rows.x.at(i)[seen.clone()], &mut rows.y.at(i)[seen]);
            if x.is_empty() {
                continue;
            }
            let most = largest(x);
            for (y, &x) in y.iter_mut().zip(x) {
                *y = (x - most).exp();
            }
            let scale = R::ONE / sum(y);
            for y in y {
                *y *= scale;
            }
        }
    }
}

impl<R: Real> Job for Gradient<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let Self(mut rows) = self;
        for i in 0..rows.count {
            let seen = rows.seen(i);
            let (shares, d_y) = (&rows.x.at(i)[seen.clone()], &rows.second.at(i)[seen.clone()]);
            let mean = dot::<M, R>(shares, d_y);
            let d_x = &mut rows.y.at(i)[seen][..shares.len()];
            for j in 0..shares.len() {
                d_x[j] = shares[j] * (d_y[j] - mean);
            }
        }
    }
}
