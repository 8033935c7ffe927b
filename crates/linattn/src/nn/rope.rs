//! Rotary position encoding.

use crate::ops::{accumulator, typed};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use std::f64::consts::TAU;

/// Rotates pairs of channels by an angle that grows with the position, so that a query and a key
/// meet at their distance. Channel i is paired with channel i + R/2, of the first R channels.
///
/// Source: Su et al., arXiv 2104.09864.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// R, channels of a head that are rotated, an even number; all of them by default.
    pub width: Option<usize>,
}

impl Rope {
    /// Of all channels.
    pub fn whole(theta: f64) -> Self {
        Self { theta, width: None }
    }

    /// `x`: `[B, T, H, K]`, whose first token stands at position `offset`.
    pub fn forward<B: Backend>(&self, x: Tensor<B, 4>, offset: usize) -> Tensor<B, 4> {
        let channels = x.dims()[3];
        match self.width {
            Some(width) if width < channels => {
                let rest = x.clone().narrow(3, width, channels - width);
                Tensor::cat(vec![self.rotate(x.narrow(3, 0, width), offset), rest], 3)
            }
            _ => self.rotate(x, offset),
        }
    }

    /// As [`forward`](Self::forward), of channels that are all rotated.
    fn rotate<B: Backend>(&self, x: Tensor<B, 4>, offset: usize) -> Tensor<B, 4> {
        let ([_, tokens, _, width], dtype) = (x.dims(), x.dtype());
        let x = accumulator(x);
        let half = width / 2;
        let angles: Vec<f64> = (offset..offset + tokens)
            .flat_map(|t| (0..half).map(move |i| (t, i)))
            .map(|(t, i)| t as f64 * self.theta.powf(-(i as f64) / half as f64))
            .collect();
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&a| f(a) as f32).collect();
            let data = TensorData::new(values, [1, tokens, 1, half]);
            Tensor::<B, 4>::from_data(data, (&x.device(), x.dtype()))
        };
        typed(Turn { cos: table(f64::cos), sin: table(f64::sin) }.forward(x), dtype)
    }
}

/// Cosine and sine of angles, `[B, T, H, K / 2]`, that pairs of channels are turned by.
pub(crate) struct Turn<B: Backend> {
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
}

impl<B: Backend> Turn<B> {
    /// By these angles.
    pub(crate) fn by(angles: Tensor<B, 4>) -> Self {
        Self { cos: angles.clone().cos(), sin: angles.sin() }
    }

    /// Pairs of channels i and i + K / 2 of `x`, `[B, T, H, K]`, turned by the angles.
    pub(crate) fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let (half, dtype) = (x.dims()[3] / 2, x.dtype());
        let x = accumulator(x);
        let (real, imaginary) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let turned = [
            real.clone() * cos.clone() - imaginary.clone() * sin.clone(),
            real * sin + imaginary * cos,
        ];
        typed(Tensor::cat(turned.into(), 3), dtype)
    }
}

/// Angles summed over tokens, `[B, T, C]`, going on from `before`, `[B, 1, C]`; and the last sum, `[B, 1, C]`,
/// which is the `before` of the next call. Whole turns are left out.
pub(crate) fn sum_of_angles<B: Backend>(
    angles: Tensor<B, 3>,
    before: Option<Tensor<B, 3>>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let last = angles.dims()[1] - 1;
    let sums = angles.cumsum(1);
    let sums = match before {
        Some(before) => sums + before,
        None => sums,
    };
    // Constant wherever it has a derivative.
    let turns = (sums.clone().detach() / TAU).round();
    let sums = sums - turns * TAU;
    (sums.clone(), sums.narrow(1, last, 1))
}
