//! AdamW and the global gradient norm.

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch, dot};
use super::shared::Fresh;
use super::tensors::{Number, contiguous, one_type, slice, tensor, typed};
use crate::ops::fused::{AdamW, AdamWStep, Clip, Moments};
use burn::tensor::TensorMetadata;
use burn_flex::FlexTensor;

/// Numbers of a piece.
const PIECE: usize = 4096;

type Step = AdamWStep<FlexTensor>;
type Stepped = (FlexTensor, Moments<FlexTensor>);

/// Parameters and their states after a step, of one type throughout.
pub(super) fn adamw_step(
    steps: &[Step],
    adamw: AdamW,
    clip: Option<&Clip<FlexTensor>>,
) -> Option<Vec<Stepped>> {
    let tensors = steps.iter().flat_map(|step| {
        let moments = step.moments.iter().flat_map(|m| [&m.first, &m.second]);
        [&step.parameter, &step.gradient].into_iter().chain(moments)
    });
    let dtype = one_type(tensors.chain(clip.map(|clip| &clip.norm)))?;
    typed!(dtype, adamw_step_of(steps, adamw, clip))
}

/// Numbers that a parameter's step has.
#[derive(Clone, Copy)]
struct Factors<R> {
    /// Of the gradient.
    scale: R,
    /// Shares of the old means.
    beta: [R; 2],
    /// Shares of the new numbers in the means.
    rest: [R; 2],
    /// `1 / (1 - beta^t)`.
    corrections: [R; 2],
    epsilon: R,
    rate: R,
    /// Share of the parameter that is left.
    left: R,
}

impl<R: Real> Factors<R> {
    fn new(adamw: AdamW, time: u32, decay: f64, scale: R) -> Self {
        let beta = [adamw.beta_1, adamw.beta_2];
        let correction = |beta: f64| R::of(1.0 / (1.0 - beta.powf(f64::from(time))));
        Self {
            scale,
            beta: beta.map(R::of),
            rest: beta.map(|beta| R::of(1.0 - beta)),
            corrections: beta.map(correction),
            epsilon: R::of(adamw.epsilon),
            rate: R::of(adamw.learning_rate),
            left: R::of(1.0 - adamw.learning_rate * decay),
        }
    }
}

/// Some numbers of one parameter.
struct Piece<'a, R> {
    factors: Factors<R>,
    parameter: &'a [R],
    gradient: &'a [R],
    /// Old means; none before the first step.
    means: Option<[&'a [R]; 2]>,
    next: &'a mut [R],
    next_means: [&'a mut [R]; 2],
}

impl<R: Real> Job for Piece<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let (f, [first, second]) = (self.factors, self.next_means);
        match self.means {
            Some(means) => {
                average(first, means[0], self.gradient, [f.beta[0], f.rest[0] * f.scale]);
                squares(second, means[1], self.gradient, [f.beta[1], f.rest[1]], f.scale);
            }
            None => {
                average(first, self.gradient, self.gradient, [R::ZERO, f.rest[0] * f.scale]);
                squares(second, self.gradient, self.gradient, [R::ZERO, f.rest[1]], f.scale);
            }
        }
        advance(f, self.next, self.parameter, [first, second]);
    }
}

/// `to = kept old + share g`.
#[inline(always)]
fn average<R: Real>(to: &mut [R], old: &[R], g: &[R], [kept, share]: [R; 2]) {
    for ((to, &old), &g) in to.iter_mut().zip(old).zip(g) {
        *to = kept * old + share * g;
    }
}

/// `to = kept old + share (scale g)^2`.
#[inline(always)]
fn squares<R: Real>(to: &mut [R], old: &[R], g: &[R], [kept, share]: [R; 2], scale: R) {
    for ((to, &old), &g) in to.iter_mut().zip(old).zip(g) {
        let g = scale * g;
        *to = kept * old + share * (g * g);
    }
}

#[inline(always)]
fn advance<R: Real>(f: Factors<R>, to: &mut [R], parameter: &[R], [first, second]: [&mut [R]; 2]) {
    let old = parameter.iter().zip(first).zip(second);
    for (to, ((&parameter, first), second)) in to.iter_mut().zip(old) {
        let size = (*second * f.corrections[1]).sqrt() + f.epsilon;
        *to = f.left * parameter - f.rate * (*first * f.corrections[0] / size);
    }
}

fn adamw_step_of<R: Number>(
    steps: &[Step],
    adamw: AdamW,
    clip: Option<&Clip<FlexTensor>>,
) -> Vec<Stepped> {
    let scale = clip.map_or(R::ONE, |clip| {
        let norm = slice::<R>(&contiguous(clip.norm.clone()))[0];
        (R::of(clip.longest) / (norm + R::of(1e-6))).smaller(R::ONE)
    });
    let rows = |x: &FlexTensor| contiguous(x.clone());
    let given: Vec<_> = steps
        .iter()
        .map(|step| {
            let means = step.moments.as_ref().map(|m| [rows(&m.first), rows(&m.second)]);
            (rows(&step.parameter), rows(&step.gradient), means)
        })
        .collect();
    let time = |step: &Step| step.moments.as_ref().map_or(1, |moments| moments.time + 1);
    let count = |step: &Step| step.parameter.shape().num_elements();
    let mut found: Vec<[Fresh<R>; 3]> =
        steps.iter().map(|step| [(); 3].map(|()| Fresh::new(count(step)))).collect();
    let shared: Vec<_> = found.iter_mut().map(|x| x.each_mut().map(Fresh::shared)).collect();
    let pieces: Vec<(usize, usize)> = steps
        .iter()
        .enumerate()
        .flat_map(|(i, step)| (0..count(step)).step_by(PIECE).map(move |first| (i, first)))
        .collect();
    for_each(pieces.len(), 8 * PIECE, |n| {
        let (i, first) = pieces[n];
        let at = first..(first + PIECE).min(count(&steps[i]));
        let (parameter, gradient, means) = &given[i];
        let part = |x| &slice::<R>(x)[at.clone()];
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let mut to =
            shared[i].each_ref().map(|x| unsafe { x.rows((first, [1, at.len(), at.len()])) });
        let [next, first, second] = to.each_mut().map(|rows| rows.at(0));
        dispatch(Piece {
            factors: Factors::new(adamw, time(&steps[i]), steps[i].decay, scale),
            parameter: part(parameter),
            gradient: part(gradient),
            means: means.as_ref().map(|means| means.each_ref().map(part)),
            next,
            next_means: [first, second],
        });
    });
    let all = found.into_iter().zip(steps);
    let one = |(found, step): ([Fresh<R>; 3], &Step)| {
        let [next, first, second] = found.map(|x| tensor(x.filled(), step.parameter.shape()));
        (next, Moments { first, second, time: time(step) })
    };
    all.map(one).collect()
}

/// The root of the sum of all squares, of one type throughout.
pub(super) fn global_norm(gradients: &[FlexTensor]) -> Option<FlexTensor> {
    typed!(one_type(gradients)?, global_norm_of(gradients))
}

struct Squares<'a, R>(&'a [R]);

impl<R: Real> Job for Squares<'_, R> {
    type Output = R;

    #[inline(always)]
    fn run<M: Machine>(self) -> R {
        dot::<M, R>(self.0, self.0)
    }
}

fn global_norm_of<R: Number>(gradients: &[FlexTensor]) -> FlexTensor {
    let rows: Vec<_> = gradients.iter().map(|x| contiguous(x.clone())).collect();
    let pieces: Vec<&[R]> = rows.iter().flat_map(|x| slice::<R>(x).chunks(PIECE)).collect();
    let mut sums = Fresh::<R>::new(pieces.len());
    let shared = sums.shared();
    for_each(pieces.len(), PIECE / 4, |n| {
        // SAFETY: every piece has a sum of its own.
        #[allow(unsafe_code)]
        let mut sum = unsafe { shared.rows((n, [1, 1, 1])) };
        sum.at(0)[0] = dispatch(Squares(pieces[n]));
    });
    let sum: f64 = sums.filled().iter().map(|sum| sum.wide()).sum();
    tensor(vec![R::of(sum.sqrt())], [1])
}
