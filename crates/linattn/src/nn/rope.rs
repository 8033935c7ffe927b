//! Rotary position encoding.

use crate::ops::{accumulator, typed};
use burn::tensor::{Tensor, TensorData, backend::Backend};

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
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let (a, b) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let real = a.clone() * cos.clone() - b.clone() * sin.clone();
        let imaginary = a * sin + b * cos;
        typed(Tensor::cat(vec![real, imaginary], 3), dtype)
    }
}
