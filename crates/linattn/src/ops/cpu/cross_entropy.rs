//! The loss of a last product, with its gradients in the forward pass: logits live for some rows at a
//! time.

use super::linear::sum_of_rows;
use super::parallel::for_each;
use super::product::{Matrix, Put, product_here};
use super::real::{Job, Machine, Real, add, dispatch, largest, sum};
use super::shared::Fresh;
use super::tensors::{
    Number, contiguous, indices, matrix, maybe, one_type, slice, strided, tensor, typed,
};
use crate::ops::fused::LinearCrossEntropy;
use crate::ops::pass::Pass;
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Logits of a piece, roughly: they stay in the second cache.
const LOGITS: usize = 65_536;
/// Slices of rows, each with a gradient of the weight of its own, at most.
const SLICES: usize = 16;

type Loss = LinearCrossEntropy<FlexTensor, FlexTensor>;

/// The loss, of one type throughout.
pub(super) fn cross_entropy(x: Loss, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type([&x.hidden, &x.weight].into_iter().chain(&x.bias))?;
    let target = indices(x.target.clone())?;
    let x = LinearCrossEntropy {
        hidden: contiguous(x.hidden),
        weight: strided(x.weight),
        bias: x.bias.map(contiguous),
        ..x
    };
    typed!(dtype, cross_entropy_of(&x, &target, keep))
}

/// Everything that is read, and how it is cut.
#[derive(Clone, Copy)]
struct Given<'a, R> {
    hidden: Matrix<'a, R>,
    /// `[V, D]`.
    weight: Matrix<'a, R>,
    bias: Option<&'a [R]>,
    target: &'a [usize],
    scale: R,
    /// Rows of a piece.
    rows: usize,
}

/// Results of a slice of rows.
struct Found<'a, R> {
    loss: &'a mut R,
    d_hidden: &'a mut [R],
    /// Of no numbers where it is not asked for.
    d_weight: &'a mut [R],
    d_bias: &'a mut [R],
}

/// From logits to the gradients of logits; gives the sum of the rows' losses.
struct Softmax<'a, R> {
    logits: &'a mut [R],
    bias: Option<&'a [R]>,
    target: &'a [usize],
    scale: R,
    d_bias: &'a mut [R],
}

impl<R: Real> Job for Softmax<'_, R> {
    type Output = R;

    #[inline(always)]
    fn run<M: Machine>(self) -> R {
        let width = self.logits.len() / self.target.len().max(1);
        let mut loss = R::ZERO;
        for (row, &target) in self.logits.chunks_exact_mut(width.max(1)).zip(self.target) {
            if let Some(bias) = self.bias {
                add(row, bias);
            }
            let (largest, right) = (largest(row), row[target]);
            for z in row.iter_mut() {
                *z = (*z - largest).exp();
            }
            let total = sum(row);
            loss += total.ln() - (right - largest);
            let by = self.scale / total;
            row.iter_mut().for_each(|z| *z *= by);
            row[target] -= self.scale;
            if self.bias.is_some() {
                add(self.d_bias, row);
            }
        }
        loss
    }
}

impl<R: Real> Given<'_, R> {
    /// Rows `first` to `end`, a piece at a time; gradients where `keep`.
    fn slice(&self, [first, end]: [usize; 2], found: Found<'_, R>, keep: bool) {
        let [vocab, width] = self.weight.size();
        let mut logits = vec![R::ZERO; self.rows.min(end - first) * vocab];
        for row in (first..end).step_by(self.rows) {
            let count = self.rows.min(end - row);
            let (logits, hidden) = (&mut logits[..count * vocab], self.hidden.rows(row, count));
            product_here(logits, hidden, self.weight.transposed(), Put::Instead);
            *found.loss += dispatch(Softmax {
                logits,
                bias: self.bias,
                target: &self.target[row..row + count],
                scale: self.scale,
                d_bias: found.d_bias,
            });
            if keep {
                let d_logits = Matrix::new(logits, [count, vocab]);
                let d_hidden = &mut found.d_hidden[(row - first) * width..][..count * width];
                product_here(d_hidden, d_logits, self.weight, Put::Instead);
                if !found.d_weight.is_empty() {
                    product_here(found.d_weight, d_logits.transposed(), hidden, Put::OnTop);
                }
            }
        }
    }
}

fn cross_entropy_of<R: Number>(x: &Loss, target: &[usize], keep: bool) -> Pass<Flex> {
    let weight = matrix::<R>(&x.weight);
    let weight = if x.by_rows { weight } else { weight.transposed() };
    let ([vocab, width], count) = (weight.size(), target.len());
    let given = Given {
        hidden: Matrix::new(slice::<R>(&x.hidden), [count, width]),
        weight,
        bias: maybe(&x.bias),
        target,
        scale: R::of(x.scale),
        rows: (LOGITS / vocab.max(1)).clamp(32, 64),
    };
    let some = count.div_ceil(SLICES).next_multiple_of(given.rows);
    let slices = count.div_ceil(some.max(1));
    let kept = |numbers: usize| if keep { numbers } else { 0 };
    let of_bias = x.bias.as_ref().map_or(0, |_| vocab);
    let of_weight = if x.frozen { 0 } else { kept(vocab * width) };
    let mut losses = Fresh::<R>::new(slices);
    let mut d_hidden = Fresh::<R>::new(kept(count * width));
    let mut d_weight = Fresh::<R>::new(slices * of_weight);
    let mut d_bias = Fresh::<R>::new(slices * of_bias);
    let to = [&mut losses, &mut d_hidden, &mut d_weight, &mut d_bias].map(Fresh::shared);
    for_each(slices, some * vocab * width, |i| {
        let (first, end) = (i * some, ((i + 1) * some).min(count));
        let row = |i: usize, width: usize| (i * width, [1, width, width]);
        let part = kept((end - first) * width);
        // SAFETY: slices do not overlap, and each has sums of its own.
        #[allow(unsafe_code)]
        let mut rows = unsafe {
            [
                to[0].rows(row(i, 1)),
                to[1].rows((kept(first * width), [1, part, part])),
                to[2].rows(row(i, of_weight)),
                to[3].rows(row(i, of_bias)),
            ]
        };
        let [loss, d_hidden, d_weight, d_bias] = rows.each_mut().map(|rows| rows.at(0));
        given.slice([first, end], Found { loss: &mut loss[0], d_hidden, d_weight, d_bias }, keep);
    });
    let loss: f64 = losses.filled().iter().map(|loss| loss.wide()).sum();
    let outputs = vec![tensor(vec![R::of(loss * x.scale)], [1])];
    if !keep {
        return Pass { outputs, backward: None };
    }
    let over_slices = |d: Fresh<R>, width: usize| match slices {
        1 => d.filled(),
        _ => sum_of_rows(Matrix::new(&d.filled(), [slices, width])),
    };
    let d_weight = (!x.frozen).then(|| {
        let d_weight = over_slices(d_weight, vocab * width);
        let d_weight = match x.by_rows {
            true => d_weight,
            false => transposed(&d_weight, [vocab, width]),
        };
        tensor(d_weight, x.weight.shape())
    });
    let mut found = vec![Some(tensor(d_hidden.filled(), x.hidden.shape())), d_weight];
    found
        .extend(x.bias.as_ref().map(|bias| Some(tensor(over_slices(d_bias, vocab), bias.shape()))));
    Pass { outputs, backward: Some(Box::new(move |gradients, _| scaled::<R>(found, gradients))) }
}

fn transposed<R: Real>(x: &[R], [rows, columns]: [usize; 2]) -> Vec<R> {
    let at = |i: usize| x[i % rows * columns + i / rows];
    (0..rows * columns).map(at).collect()
}

/// Gradients for a loss whose own gradient is not 1.
fn scaled<R: Number>(
    found: Vec<Option<FlexTensor>>,
    gradients: Vec<Option<FlexTensor>>,
) -> Vec<Option<FlexTensor>> {
    let Some(d_loss) = gradients.into_iter().next().flatten() else { return vec![] };
    let by = slice::<R>(&contiguous(d_loss))[0];
    let scale = |mut d: FlexTensor| {
        if by != R::ONE {
            d.storage_mut::<R>().iter_mut().for_each(|d| *d *= by);
        }
        d
    };
    found.into_iter().map(|d| d.map(scale)).collect()
}
