//! AdamW and the global gradient norm over many tensors at once.

use burn::tensor::{Scalar, TensorMetadata, backend::Backend, ops::FloatTensor};

/// The state AdamW keeps of a parameter.
#[derive(Debug, Clone)]
pub struct Moments<T> {
    /// Mean of gradients.
    pub first: T,
    /// Mean of squared gradients.
    pub second: T,
    /// Steps that this parameter has made.
    pub time: u32,
}

/// One parameter of a step.
#[derive(Debug, Clone)]
pub struct AdamWStep<T> {
    /// The parameter.
    pub parameter: T,
    /// Its gradient.
    pub gradient: T,
    /// Its state; none before the first step.
    pub moments: Option<Moments<T>>,
    /// Weight decay, 0 for none.
    pub decay: f64,
}

/// Numbers that all parameters of a step share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Share of the old mean of gradients.
    pub beta_1: f64,
    /// Share of the old mean of squares.
    pub beta_2: f64,
    /// Added to the root of the mean of squares.
    pub epsilon: f64,
}

/// Limit of the global gradient norm: longer gradients are scaled down to it.
#[derive(Debug, Clone)]
pub struct Clip<T> {
    /// The global gradient norm, `[1]`.
    pub norm: T,
    /// The longest that stays as it is.
    pub longest: f64,
}

/// [`adamw_step`](crate::ops::adamw_step) in tensor operations.
pub(in crate::ops) fn step_in_tensor_ops<B: Backend>(
    steps: Vec<AdamWStep<FloatTensor<B>>>,
    adamw: AdamW,
    clip: Option<Clip<FloatTensor<B>>>,
) -> Vec<(FloatTensor<B>, Moments<FloatTensor<B>>)> {
    let scale = clip.map(|Clip { norm, longest }| {
        let factor = B::float_recip(B::float_add_scalar(norm, number(1e-6)));
        B::float_clamp_max(B::float_mul_scalar(factor, number(longest)), number(1.0))
    });
    let one = |step: AdamWStep<FloatTensor<B>>| {
        let AdamWStep { parameter, mut gradient, moments, decay } = step;
        if let Some(scale) = &scale {
            let ones = vec![1; gradient.shape().num_dims()];
            gradient = B::float_mul(gradient, B::float_reshape(scale.clone(), ones.into()));
        }
        one_in_tensor_ops::<B>(parameter, gradient, moments, (adamw, decay))
    };
    steps.into_iter().map(one).collect()
}

fn number(value: f64) -> Scalar {
    Scalar::from(value)
}

fn one_in_tensor_ops<B: Backend>(
    parameter: FloatTensor<B>,
    gradient: FloatTensor<B>,
    moments: Option<Moments<FloatTensor<B>>>,
    (adamw, decay): (AdamW, f64),
) -> (FloatTensor<B>, Moments<FloatTensor<B>>) {
    let mean = |old: Option<FloatTensor<B>>, new: FloatTensor<B>, share: f64| {
        let new = B::float_mul_scalar(new, number(1.0 - share));
        match old {
            Some(old) => B::float_add(B::float_mul_scalar(old, number(share)), new),
            None => new,
        }
    };
    let square = B::float_mul(gradient.clone(), gradient.clone());
    let (first, second, time) = match moments {
        Some(Moments { first, second, time }) => (Some(first), Some(second), time + 1),
        None => (None, None, 1),
    };
    let first = mean(first, gradient, adamw.beta_1);
    let second = mean(second, square, adamw.beta_2);
    let correction = |beta: f64| number(1.0 / (1.0 - beta.powf(f64::from(time))));
    let size = B::float_sqrt(B::float_mul_scalar(second.clone(), correction(adamw.beta_2)));
    let delta = B::float_div(
        B::float_mul_scalar(first.clone(), correction(adamw.beta_1)),
        B::float_add_scalar(size, number(adamw.epsilon)),
    );
    let kept = match decay {
        0.0 => parameter,
        _ => B::float_mul_scalar(parameter, number(1.0 - adamw.learning_rate * decay)),
    };
    let delta = B::float_mul_scalar(delta, number(adamw.learning_rate));
    (B::float_sub(kept, delta), Moments { first, second, time })
}

/// [`global_norm`](crate::ops::global_norm) in tensor operations.
pub(in crate::ops) fn norm_in_tensor_ops<B: Backend>(
    gradients: Vec<FloatTensor<B>>,
) -> FloatTensor<B> {
    let square = |x: FloatTensor<B>| B::float_sum(B::float_mul(x.clone(), x));
    let sum = gradients.into_iter().map(square).reduce(B::float_add);
    B::float_sqrt(sum.expect("`global_norm` has checked that there are some"))
}
