//! Normalised rows.

use super::gated_product::activated;
use super::linear::sum_of_rows;
use super::parallel::for_each;
use super::product::Matrix;
use super::real::{Job, Machine, Real, add, dispatch, dot, sum};
use super::shared::{Fresh, Rows, RowsMut};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed};
use crate::ops::fused::{Activation, Measure, Normalization};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Numbers of a piece, roughly.
const PIECE: usize = 8192;
/// Pieces at most, where each has sums of its own.
const SLICES: usize = 32;

type Norm = Normalization<FlexTensor>;

/// Treatment of every row.
#[derive(Clone, Copy)]
struct Plan<R> {
    measure: Measure,
    epsilon: R,
    factor: R,
    activation: Activation,
}

/// Rows of one piece, of everything that there is.
#[derive(Clone, Copy)]
struct Given<'a, R> {
    plan: Plan<R>,
    count: usize,
    x: Rows<'a, R>,
    residual: Option<Rows<'a, R>>,
    weight: Option<&'a [R]>,
    bias: Option<&'a [R]>,
    gate: Option<Rows<'a, R>>,
}

/// The norm, of one type throughout.
pub(super) fn normalize(n: Norm, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(n.clone().into_vec().iter())?;
    if dtype != n.dtype {
        return None;
    }
    let n = n.refill(n.clone().into_vec().into_iter().map(contiguous));
    typed!(dtype, normalize_of(n, keep))
}

impl<R: Real> Plan<R> {
    fn new(n: &Norm) -> Self {
        Self {
            measure: n.measure,
            epsilon: R::of(n.epsilon),
            factor: R::of(n.factor),
            activation: n.activation,
        }
    }

    /// The number to take off a row, and the factor to multiply it by then.
    #[inline(always)]
    fn measure<M: Machine>(self, h: &[R], spare: &mut [R]) -> (R, R) {
        let count = R::of(h.len() as f64);
        let (mean, size) = match self.measure {
            Measure::Length => (R::ZERO, dot::<M, R>(h, h)),
            Measure::RootMeanSquare => (R::ZERO, dot::<M, R>(h, h) / count),
            Measure::Standard => {
                let mean = sum(h) / count;
                for (spare, &h) in spare.iter_mut().zip(h) {
                    *spare = h - mean;
                }
                (mean, dot::<M, R>(spare, spare) / count)
            }
        };
        (mean, R::ONE / (size + self.epsilon).sqrt())
    }
}

impl<'a, R: Number> Given<'a, R> {
    /// Rows `first` to `first + count`.
    fn new(n: &'a Norm, first: usize, count: usize) -> Self {
        let width = width(n);
        let rows = |x: &'a FlexTensor| Rows::new(slice(x), first * width, [width, width]);
        Self {
            plan: Plan::new(n),
            count,
            x: rows(&n.x),
            residual: n.residual.as_ref().map(rows),
            weight: maybe(&n.weight),
            bias: maybe(&n.bias),
            gate: n.gate.as_ref().map(rows),
        }
    }
}

/// `to = (x - mean) size`.
#[inline(always)]
fn scale<R: Real>(to: &mut [R], x: &[R], (mean, size): (R, R)) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to = (x - mean) * size;
    }
}

/// `to = x + y`.
#[inline(always)]
fn sum_into<R: Real>(to: &mut [R], x: &[R], y: &[R]) {
    for ((to, &x), &y) in to.iter_mut().zip(x).zip(y) {
        *to = x + y;
    }
}

/// `x *= y`.
#[inline(always)]
fn multiply<R: Real>(x: &mut [R], y: &[R]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x *= y;
    }
}

/// `y *= activation(gate)`.
#[inline(always)]
fn apply_gate<R: Real>(activation: Activation, y: &mut [R], gate: &[R]) {
    for (y, &gate) in y.iter_mut().zip(gate) {
        *y *= activated(activation, gate).0;
    }
}

/// Scales and shifts normalised rows: the output before the gate.
#[inline(always)]
fn affine<R: Real>(y: &mut [R], factor: R, weight: Option<&[R]>, bias: Option<&[R]>) {
    if factor != R::ONE {
        y.iter_mut().for_each(|y| *y *= factor);
    }
    if let Some(weight) = weight {
        multiply(y, weight);
    }
    if let Some(bias) = bias {
        add(y, bias);
    }
}

struct Forward<'a, R> {
    given: Given<'a, R>,
    y: RowsMut<'a, R>,
    h: Option<RowsMut<'a, R>>,
    width: usize,
}

impl<R: Real> Job for Forward<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Given { plan, count, x, residual, weight, bias, gate } = self.given;
        let mut spare = vec![R::ZERO; self.width];
        for i in 0..count {
            let h = match (&mut self.h, residual) {
                (Some(h), Some(residual)) => {
                    sum_into(h.at(i), x.at(i), residual.at(i));
                    &*h.at(i)
                }
                _ => x.at(i),
            };
            let y = self.y.at(i);
            scale(y, h, plan.measure::<M>(h, &mut spare));
            affine(y, plan.factor, weight, bias);
            if let Some(gate) = gate {
                apply_gate(plan.activation, y, gate.at(i));
            }
        }
    }
}

fn width(n: &Norm) -> usize {
    let shape = n.x.shape();
    shape[shape.num_dims() - 1]
}

/// Rows of all, rows of a piece, and pieces.
fn pieces(n: &Norm) -> [usize; 3] {
    let rows = n.x.shape().num_elements().checked_div(width(n)).unwrap_or(0);
    let some = (PIECE / width(n).max(1)).max(1).max(rows.div_ceil(SLICES));
    [rows, some, rows.div_ceil(some)]
}

fn normalize_of<R: Number>(n: Norm, keep: bool) -> Pass<Flex> {
    let (width, [rows, some, pieces]) = (width(&n), pieces(&n));
    let shape = n.x.shape();
    let mut y = Fresh::<R>::new(shape.num_elements());
    let mut h = n.residual.as_ref().map(|_| Fresh::<R>::new(shape.num_elements()));
    let (to_y, to_h) = (y.shared(), h.as_mut().map(Fresh::shared));
    for_each(pieces, 16 * some * width, |i| {
        let (first, count) = (i * some, some.min(rows - i * some));
        let place = (first * width, [count, width, width]);
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let (y, h) = unsafe { (to_y.rows(place), to_h.as_ref().map(|h| h.rows(place))) };
        dispatch(Forward { given: Given::new(&n, first, count), y, h, width });
    });
    let h = h.map(|h| tensor(h.filled(), shape.clone()));
    let outputs = std::iter::once(tensor(y.filled(), shape)).chain(h.clone()).collect();
    let backward = keep.then(|| -> BackwardPass<Flex> {
        // From here on the rows are their sum with the residual.
        let has_residual = h.is_some();
        let n = Normalization { x: h.unwrap_or(n.x), residual: None, ..n };
        Box::new(move |gradients, _| {
            let mut gradients = gradients.into_iter().map(|d| d.map(contiguous));
            let (d_y, d_h) = (gradients.next().flatten(), gradients.next().flatten());
            normalize_backward::<R>(&n, has_residual, d_y, d_h)
        })
    });
    Pass { outputs, backward }
}

struct Backward<'a, R> {
    given: Given<'a, R>,
    d_y: Option<Rows<'a, R>>,
    d_h: Option<Rows<'a, R>>,
    d_x: RowsMut<'a, R>,
    d_gate: Option<RowsMut<'a, R>>,
    /// Sums over the piece's rows.
    d_weight: RowsMut<'a, R>,
    d_bias: RowsMut<'a, R>,
    width: usize,
}

/// The gate's gradient, and in `d`, from the output's, that of what it multiplied, `y`.
#[inline(always)]
fn gate_backward<R: Real>(
    activation: Activation,
    d: &mut [R],
    d_gate: &mut [R],
    y: &[R],
    gate: &[R],
) {
    for (((d, d_gate), &y), &gate) in d.iter_mut().zip(d_gate).zip(y).zip(gate) {
        let (value, slope) = activated(activation, gate);
        *d_gate = *d * y * slope;
        *d *= value;
    }
}

/// `to += by x y`.
#[inline(always)]
fn add_products<R: Real>(to: &mut [R], by: R, x: &[R], y: &[R]) {
    for ((to, &x), &y) in to.iter_mut().zip(x).zip(y) {
        *to += by * x * y;
    }
}

/// `to = size (d - mean - along x)`.
#[inline(always)]
fn project<R: Real>(to: &mut [R], d: &[R], x: &[R], [size, mean, along]: [R; 3]) {
    for ((to, &d), &x) in to.iter_mut().zip(d).zip(x) {
        *to = size * (d - mean - along * x);
    }
}

impl<R: Real> Job for Backward<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Given { plan, count, x, weight, bias, gate, .. } = self.given;
        let [mut normal, mut spare, mut d] = [(); 3].map(|()| vec![R::ZERO; self.width]);
        let columns = R::of(self.width as f64);
        for i in 0..count {
            let d_x = self.d_x.at(i);
            match self.d_y {
                Some(d_y) => d.copy_from_slice(d_y.at(i)),
                None => d.fill(R::ZERO),
            }
            let measured = plan.measure::<M>(x.at(i), &mut spare);
            scale(&mut normal, x.at(i), measured);
            if let (Some(gate), Some(d_gate)) = (gate, &mut self.d_gate) {
                spare.copy_from_slice(&normal);
                affine(&mut spare, plan.factor, weight, bias);
                gate_backward(plan.activation, &mut d, d_gate.at(i), &spare, gate.at(i));
            }
            if bias.is_some() {
                add(self.d_bias.at(0), &d);
            }
            if let Some(weight) = weight {
                add_products(self.d_weight.at(0), plan.factor, &d, &normal);
                multiply(&mut d, weight);
            }
            if plan.factor != R::ONE {
                d.iter_mut().for_each(|d| *d *= plan.factor);
            }
            let along = dot::<M, R>(&d, &normal);
            let [mean, along] = match plan.measure {
                Measure::Length => [R::ZERO, along],
                Measure::RootMeanSquare => [R::ZERO, along / columns],
                Measure::Standard => [sum(&d) / columns, along / columns],
            };
            project(d_x, &d, &normal, [measured.1, mean, along]);
            if let Some(d_h) = self.d_h {
                add(d_x, d_h.at(i));
            }
        }
    }
}

fn normalize_backward<R: Number>(
    n: &Norm,
    has_residual: bool,
    d_y: Option<FlexTensor>,
    d_h: Option<FlexTensor>,
) -> Vec<Option<FlexTensor>> {
    let (width, [rows, some, pieces]) = (width(n), pieces(n));
    let shape = n.x.shape();
    let mut d_x = Fresh::<R>::new(shape.num_elements());
    let mut d_gate = n.gate.as_ref().map(|_| Fresh::<R>::new(shape.num_elements()));
    let [mut d_weight, mut d_bias] = [(); 2].map(|()| Fresh::<R>::new(pieces * width));
    let to_gate = d_gate.as_mut().map(Fresh::shared);
    let to = [&mut d_x, &mut d_weight, &mut d_bias].map(Fresh::shared);
    let [d_y, d_h] = [&d_y, &d_h].map(maybe::<R>);
    for_each(pieces, 24 * some * width, |i| {
        let (first, count) = (i * some, some.min(rows - i * some));
        let (place, own) = ((first * width, [count, width, width]), (i * width, [1, width, width]));
        let read = |d| Rows::new(d, first * width, [width, width]);
        // SAFETY: pieces do not overlap, and each has sums of its own.
        #[allow(unsafe_code)]
        let (d_x, d_weight, d_bias, d_gate) = unsafe {
            let d_gate = to_gate.as_ref().map(|d| d.rows(place));
            (to[0].rows(place), to[1].rows(own), to[2].rows(own), d_gate)
        };
        let given = Given::new(n, first, count);
        let (d_y, d_h) = (d_y.map(read), d_h.map(read));
        dispatch(Backward { given, d_y, d_h, d_x, d_gate, d_weight, d_bias, width });
    });
    let over_pieces = |d: Fresh<R>| {
        let sums = d.filled();
        tensor(sum_of_rows(Matrix::new(&sums, [pieces, width])), [width])
    };
    let d_x = tensor(d_x.filled(), shape.clone());
    let mut found = vec![Some(d_x.clone())];
    found.extend(has_residual.then_some(Some(d_x)));
    found.extend(n.weight.as_ref().map(|_| Some(over_pieces(d_weight))));
    found.extend(n.bias.as_ref().map(|_| Some(over_pieces(d_bias))));
    found.extend(d_gate.map(|d| Some(tensor(d.filled(), shape))));
    found
}
