//! From a packed projection to the inputs of a recurrence.
//!
//! Work is cut into units, some tokens of one sequence: a batch row, or one of several in the one row. A unit's
//! gradients need those of the sums of the W - 1 tokens behind it, which are computed again.

use super::gated_product::activated;
use super::linear::sum_of_rows;
use super::parallel::for_each;
use super::product::Matrix;
use super::real::{Job, Machine, Real, add, dispatch, dot};
use super::shared::{Fresh, RowsMut, Shared};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed, zeros};
use crate::ops::SequenceLengths;
use crate::ops::fused::{Activation, Column, ColumnKind, ConvSplit, HeadNorm};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use std::ops::Range;

/// Tokens of a unit.
const TOKENS: usize = 64;
/// Slices of units, each with sums of its own, at most.
const SLICES: usize = 32;
/// Added to a sum of squares before its root.
const EPSILON: f64 = 1e-6;

type Split = ConvSplit<FlexTensor>;

/// Sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    /// P, columns of the projection.
    packed: usize,
    /// C, columns that are convolved.
    channels: usize,
    /// W.
    window: usize,
}

impl Sizes {
    /// All tokens, a sequence after another.
    fn units(self, lengths: Option<&SequenceLengths>) -> Vec<Unit> {
        let tokens = self.tokens;
        match lengths {
            Some(lengths) => lengths.ranges().enumerate().flat_map(Unit::all).collect(),
            None => (0..self.batch)
                .map(|b| (b, b * tokens..(b + 1) * tokens))
                .flat_map(Unit::all)
                .collect(),
        }
    }
}

/// Some tokens of a sequence.
#[derive(Debug, Clone, Copy)]
struct Unit {
    /// Number of the sequence, its first row, and its tokens.
    sequence: usize,
    row: usize,
    tokens: usize,
    /// First token within the sequence, and the token behind the last.
    first: usize,
    end: usize,
}

impl Unit {
    /// All units of a sequence, which has these rows.
    fn all((sequence, rows): (usize, Range<usize>)) -> impl Iterator<Item = Self> {
        let (row, tokens) = (rows.start, rows.len());
        (0..tokens).step_by(TOKENS).map(move |first| {
            let end = (first + TOKENS).min(tokens);
            Self { sequence, row, tokens, first, end }
        })
    }

    /// Its rows of `width` numbers.
    fn place(self, width: usize) -> (usize, [usize; 3]) {
        ((self.row + self.first) * width, [self.end - self.first, width, width])
    }
}

/// Everything that is read.
#[derive(Clone, Copy)]
struct Given<'a, R> {
    sizes: Sizes,
    columns: &'a [Column],
    x: &'a [R],
    weight: Option<&'a [R]>,
    bias: Option<&'a [R]>,
    conv_state: Option<&'a [R]>,
    a_log: Option<&'a [R]>,
    dt_bias: Option<&'a [R]>,
}

/// All of it in one type, in columns that fill the projection.
pub(super) fn conv_split(x: Split, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(x.clone().into_vec().iter())?;
    let decays = x.columns.iter().filter(|column| column.kind == ColumnKind::LogDecay).count();
    let fits = |column: &Column| match column.kind {
        ColumnKind::Conv { norm: Some(norm), .. } => column.width.is_multiple_of(norm.width),
        _ => true,
    };
    let width: usize = x.columns.iter().map(|column| column.width).sum();
    if decays > 1 || x.x.shape()[2] != width || !x.columns.iter().all(fits) {
        return None;
    }
    let x = x.refill(x.clone().into_vec().into_iter().map(contiguous));
    typed!(dtype, conv_split_of(x, keep))
}

impl<'a, R: Number> Given<'a, R> {
    fn new(x: &'a Split) -> Self {
        let shape = x.x.shape();
        let sizes = Sizes {
            batch: shape[0],
            tokens: shape[1],
            packed: shape[2],
            channels: x.convolved(),
            window: x.weight.as_ref().map_or(1, |weight| weight.shape()[0]),
        };
        Self {
            sizes,
            columns: &x.columns,
            x: slice(&x.x),
            weight: maybe(&x.weight),
            bias: maybe(&x.bias),
            conv_state: maybe(&x.conv_state),
            a_log: maybe(&x.a_log),
            dt_bias: maybe(&x.dt_bias),
        }
    }
}

impl<'a, R: Real> Given<'a, R> {
    /// Token `t` of a unit's sequence, all columns.
    #[inline(always)]
    fn token(&self, of: Unit, t: usize) -> &'a [R] {
        let packed = self.sizes.packed;
        &self.x[(of.row + t) * packed..][..packed]
    }

    /// The token that tap `w` of token `t` reads, `[C]`: nothing before the first where there is no conv state.
    #[inline(always)]
    fn met(&self, of: Unit, t: usize, w: usize) -> Option<&'a [R]> {
        let Sizes { channels, window, .. } = self.sizes;
        match (t + w + 1).checked_sub(window) {
            Some(t) => Some(&self.token(of, t)[..channels]),
            None => {
                let row = of.sequence * (window - 1) + t + w;
                self.conv_state.map(|conv_state| &conv_state[row * channels..][..channels])
            }
        }
    }

    /// The convolution's sum of one token, `[C]`.
    #[inline(always)]
    fn convolve<M: Machine>(&self, of: Unit, t: usize, z: &mut [R]) {
        let Sizes { channels, window, .. } = self.sizes;
        match self.bias {
            Some(bias) => z.copy_from_slice(bias),
            None => z.fill(R::ZERO),
        }
        let Some(weight) = self.weight else {
            return add(z, &self.token(of, t)[..channels]);
        };
        for (w, weight) in weight.chunks_exact(channels.max(1)).enumerate().take(window) {
            if let Some(x) = self.met(of, t, w) {
                add_products::<M, R>(z, weight, x);
            }
        }
    }

    /// Columns that share one number `a_log`.
    fn group(&self, width: usize) -> usize {
        width / self.a_log.map_or(1, <[R]>::len).max(1)
    }

    fn decay_parameters(&self) -> (&'a [R], &'a [R]) {
        (self.a_log.expect("a log decay has its rates"), self.dt_bias.expect("and its biases"))
    }
}

/// `to += x y`.
#[inline(always)]
fn add_products<M: Machine, R: Real>(to: &mut [R], x: &[R], y: &[R]) {
    for ((to, &x), &y) in to.iter_mut().zip(x).zip(y) {
        *to = M::mul_add(x, y, *to);
    }
}

/// `y = activation(z)`.
#[inline(always)]
fn activate<R: Real>(activation: Option<Activation>, z: &[R], y: &mut [R]) {
    match activation {
        Some(activation) => {
            for (y, &z) in y.iter_mut().zip(z) {
                *y = activated(activation, z).0;
            }
        }
        None => y.copy_from_slice(z),
    }
}

/// The factor that gives a head unit length.
#[inline(always)]
fn size<M: Machine, R: Real>(head: &[R]) -> R {
    R::ONE / (dot::<M, R>(head, head) + R::of(EPSILON)).sqrt()
}

/// Makes every head as long as `norm` says.
#[inline(always)]
fn normalize<M: Machine, R: Real>(y: &mut [R], norm: HeadNorm) {
    for head in y.chunks_exact_mut(norm.width) {
        let by = size::<M, R>(head) * R::of(norm.factor);
        head.iter_mut().for_each(|y| *y *= by);
    }
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus<R: Real>(x: R) -> R {
    let low = x.smaller(R::of(20.0));
    low.exp().ln_1p() + (x - low)
}

struct Forward<'a, 's, R> {
    given: Given<'a, R>,
    unit: Unit,
    /// Rows of each output, from the unit's first token on.
    outputs: &'s mut [RowsMut<'a, R>],
}

impl<R: Real> Job for Forward<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let (given, unit @ Unit { first, end, .. }) = (self.given, self.unit);
        let mut z = vec![R::ZERO; given.sizes.channels];
        for t in first..end {
            given.convolve::<M>(unit, t, &mut z);
            let (x, mut from) = (given.token(unit, t), 0);
            for (column, output) in given.columns.iter().zip(self.outputs.iter_mut()) {
                let at = from..from + column.width;
                from += column.width;
                let y = output.at(t - first);
                match column.kind {
                    ColumnKind::Conv { activation, norm } => {
                        activate(activation, &z[at], y);
                        if let Some(norm) = norm {
                            normalize::<M, R>(y, norm);
                        }
                    }
                    ColumnKind::Copy => y.copy_from_slice(&x[at]),
                    ColumnKind::Beta { scale } => {
                        let scale = R::of(scale);
                        y.iter_mut().zip(&x[at]).for_each(|(y, x)| *y = scale * x.sigmoid());
                    }
                    ColumnKind::LogDecay => decay(&given, &x[at], y),
                }
            }
        }
    }
}

/// Log decays of one token.
#[inline(always)]
fn decay<R: Real>(given: &Given<'_, R>, x: &[R], y: &mut [R]) {
    let ((a_log, dt_bias), group) = (given.decay_parameters(), given.group(x.len()));
    for (i, (y, &x)) in y.iter_mut().zip(x).enumerate() {
        *y = -(a_log[i / group].exp() * softplus(x + dt_bias[i]));
    }
}

fn conv_split_of<R: Number>(x: Split, keep: bool) -> Pass<Flex> {
    let given = Given::<R>::new(&x);
    let sizes = given.sizes;
    let rows = sizes.batch * sizes.tokens;
    let mut outputs: Vec<Fresh<R>> = x.columns.iter().map(|c| Fresh::new(rows * c.width)).collect();
    let shared: Vec<_> = outputs.iter_mut().map(Fresh::shared).collect();
    let units = sizes.units(x.lengths.as_ref());
    for_each(units.len(), 16 * TOKENS.min(sizes.tokens) * sizes.packed, |n| {
        let unit = units[n];
        let columns = shared.iter().zip(&x.columns);
        // SAFETY: units do not overlap.
        #[allow(unsafe_code)]
        let rows = columns.map(|(y, column)| unsafe { y.rows(unit.place(column.width)) });
        let mut outputs: Vec<_> = rows.collect();
        dispatch(Forward { given, unit, outputs: &mut outputs });
    });
    let shape = |width| [sizes.batch, sizes.tokens, width];
    let columns = outputs.into_iter().zip(&x.columns);
    let outputs = columns.map(|(y, column)| tensor(y.filled(), shape(column.width))).collect();
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| {
            let gradients: Vec<_> = gradients.into_iter().map(|d| d.map(contiguous)).collect();
            conv_split_backward::<R>(&x, &gradients)
        })
    });
    Pass { outputs, backward }
}

/// Gradients of parameters, of one slice of units.
struct Sums<'a, R> {
    weight: &'a mut [R],
    bias: &'a mut [R],
    a_log: &'a mut [R],
    dt_bias: &'a mut [R],
}

struct Backward<'a, 's, R> {
    given: Given<'a, R>,
    unit: Unit,
    /// Of each output, all rows.
    d_outputs: &'s [Option<&'a [R]>],
    /// Rows of the unit.
    d_x: RowsMut<'a, R>,
    /// The sequence's conv state.
    d_conv_state: Option<RowsMut<'a, R>>,
    sums: &'s mut Sums<'s, R>,
}

impl<R: Real> Job for Backward<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let (given, unit @ Unit { tokens, first, end, .. }) = (self.given, self.unit);
        let Sizes { channels, window, .. } = given.sizes;
        let behind = (end + window - 1).min(tokens);
        // Gradients of the convolution's sums, of the unit's tokens and those that see them.
        let mut d_z = vec![R::ZERO; (behind - first) * channels];
        let mut spare = [(); 2].map(|()| vec![R::ZERO; channels]);
        for (t, d_z) in (first..behind).zip(d_z.chunks_exact_mut(channels.max(1))) {
            self.sum_gradients::<M>(t, d_z, &mut spare);
        }
        for t in first..end {
            self.other_columns(t);
            if channels == 0 {
                continue;
            }
            let of = |t: usize| &d_z[(t - first) * channels..][..channels];
            let d_x = &mut self.d_x.at(t - first)[..channels];
            match given.weight {
                None => add(d_x, of(t)),
                Some(weight) => {
                    for (w, weight) in weight.chunks_exact(channels).enumerate() {
                        let seen = t + window - 1 - w;
                        if seen < tokens {
                            add_products::<M, R>(d_x, weight, of(seen));
                        }
                        if let Some(x) = given.met(unit, t, w) {
                            let sum = &mut self.sums.weight[w * channels..][..channels];
                            add_products::<M, R>(sum, of(t), x);
                        }
                    }
                }
            }
            if given.bias.is_some() {
                add(self.sums.bias, of(t));
            }
        }
        if let (Some(d_conv_state), Some(weight), 0) = (&mut self.d_conv_state, given.weight, first)
        {
            for (w, weight) in weight.chunks_exact(channels.max(1)).enumerate() {
                for t in 0..(window - 1 - w).min(tokens) {
                    add_products::<M, R>(
                        d_conv_state.at(t + w),
                        weight,
                        &d_z[t * channels..][..channels],
                    );
                }
            }
        }
    }
}

impl<R: Real> Backward<'_, '_, R> {
    /// Gradients of one token's sums, `[C]`.
    #[inline(always)]
    fn sum_gradients<M: Machine>(&self, t: usize, d_z: &mut [R], [z, y]: &mut [Vec<R>; 2]) {
        let (given, unit) = (self.given, self.unit);
        given.convolve::<M>(unit, t, z);
        let mut from = 0;
        for (column, d_y) in given.columns.iter().zip(self.d_outputs) {
            let ColumnKind::Conv { activation, norm } = column.kind else { continue };
            let at = from..from + column.width;
            from += column.width;
            let Some(d_y) = d_y else { continue };
            let d_y = &d_y[(unit.row + t) * column.width..][..column.width];
            let (z, y, d_z) = (&z[at.clone()], &mut y[at.clone()], &mut d_z[at]);
            d_z.copy_from_slice(d_y);
            if let Some(norm) = norm {
                activate(activation, z, y);
                normalize_backward::<M, R>(norm, y, d_z);
            }
            if let Some(activation) = activation {
                for (d, &z) in d_z.iter_mut().zip(z) {
                    *d *= activated(activation, z).1;
                }
            }
        }
    }

    /// Gradients of one token's columns that are not convolved.
    #[inline(always)]
    fn other_columns(&mut self, t: usize) {
        let (given, unit) = (self.given, self.unit);
        let (x, d_x, mut from) = (given.token(unit, t), self.d_x.at(t - unit.first), 0);
        for (column, d_y) in given.columns.iter().zip(self.d_outputs) {
            let at = from..from + column.width;
            from += column.width;
            let Some(d_y) = d_y else { continue };
            let d_y = &d_y[(unit.row + t) * column.width..][..column.width];
            let (x, d_x) = (&x[at.clone()], &mut d_x[at]);
            match column.kind {
                ColumnKind::Conv { .. } => {}
                ColumnKind::Copy => d_x.copy_from_slice(d_y),
                ColumnKind::Beta { scale } => {
                    for ((d_x, &x), &d_y) in d_x.iter_mut().zip(x).zip(d_y) {
                        *d_x = R::of(scale) * d_y * activated(Activation::Sigmoid, x).1;
                    }
                }
                ColumnKind::LogDecay => decay_backward(&given, x, d_y, d_x, self.sums),
            }
        }
    }
}

/// From the gradient of normalised heads to that of heads, in `d`.
#[inline(always)]
fn normalize_backward<M: Machine, R: Real>(norm: HeadNorm, y: &[R], d: &mut [R]) {
    for (y, d) in y.chunks_exact(norm.width).zip(d.chunks_exact_mut(norm.width)) {
        let size = size::<M, R>(y);
        let along = dot::<M, R>(y, d) * size * size;
        let by = size * R::of(norm.factor);
        for (d, &y) in d.iter_mut().zip(y) {
            *d = by * (*d - along * y);
        }
    }
}

#[inline(always)]
fn decay_backward<R: Real>(
    given: &Given<'_, R>,
    x: &[R],
    d_y: &[R],
    d_x: &mut [R],
    sums: &mut Sums<'_, R>,
) {
    let ((a_log, dt_bias), group) = (given.decay_parameters(), given.group(x.len()));
    for i in 0..x.len() {
        let (step, rate) = (x[i] + dt_bias[i], -a_log[i / group].exp());
        d_x[i] = d_y[i] * rate * step.sigmoid();
        sums.dt_bias[i] += d_x[i];
        sums.a_log[i / group] += d_y[i] * rate * softplus(step);
    }
}

fn conv_split_backward<R: Number>(
    x: &Split,
    d_outputs: &[Option<FlexTensor>],
) -> Vec<Option<FlexTensor>> {
    let given = Given::<R>::new(x);
    let sizes @ Sizes { tokens, packed, channels, window, .. } = given.sizes;
    let d_outputs: Vec<_> = d_outputs.iter().map(maybe::<R>).collect();
    let widths = [&x.weight, &x.bias, &x.a_log, &x.dt_bias]
        .map(|x| x.as_ref().map_or(0, |x| x.shape().num_elements()));
    let width: usize = widths.iter().sum();
    let units = sizes.units(x.lengths.as_ref());
    let some = units.len().div_ceil(SLICES).max(1);
    let slices = units.len().div_ceil(some);
    let mut d_x = Fresh::<R>::new(given.x.len());
    let mut d_conv_state = given.conv_state.map(|conv_state| zeros::<R>(conv_state.len()));
    let mut sums = Fresh::<R>::new(slices * width);
    let to_conv_state = d_conv_state.as_mut().map(|d| Shared::new(d));
    let (to_x, to_sums) = (d_x.shared(), sums.shared());
    for_each(slices, 32 * some * TOKENS.min(tokens) * packed, |slice| {
        // SAFETY: every slice has sums of its own.
        #[allow(unsafe_code)]
        let mut sums = unsafe { to_sums.rows((slice * width, [1, width, width])) };
        let (weight, rest) = sums.at(0).split_at_mut(widths[0]);
        let (bias, rest) = rest.split_at_mut(widths[1]);
        let (a_log, dt_bias) = rest.split_at_mut(widths[2]);
        for &unit in units.iter().skip(slice * some).take(some) {
            let before = unit.sequence * (window - 1);
            let conv_state = (before * channels, [window - 1, channels, channels]);
            // SAFETY: units do not overlap, and a sequence's first one alone has its conv state.
            #[allow(unsafe_code)]
            let (d_x, d_conv_state) = unsafe {
                let d_conv_state = to_conv_state.as_ref().filter(|_| unit.first == 0);
                (to_x.rows(unit.place(packed)), d_conv_state.map(|d| d.rows(conv_state)))
            };
            let sums = &mut Sums { weight, bias, a_log, dt_bias };
            dispatch(Backward { given, unit, d_outputs: &d_outputs, d_x, d_conv_state, sums });
        }
    });
    let sums = sum_of_rows(Matrix::new(&sums.filled(), [slices, width]));
    let mut found = vec![Some(tensor(d_x.filled(), x.x.shape()))];
    let mut from = 0;
    let mut part = |like: &Option<FlexTensor>| {
        let like = like.as_ref()?;
        let count = like.shape().num_elements();
        from += count;
        Some(Some(tensor(sums[from - count..from].to_vec(), like.shape())))
    };
    let [weight, bias, a_log, dt_bias] = [&x.weight, &x.bias, &x.a_log, &x.dt_bias].map(&mut part);
    let conv_state =
        d_conv_state.zip(x.conv_state.as_ref()).map(|(d, like)| Some(tensor(d, like.shape())));
    found.extend([weight, bias, conv_state, a_log, dt_bias].into_iter().flatten());
    found
}
