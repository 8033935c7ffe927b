//! Rotary position encoding.

use crate::ops::{LinearAttentionBackend, rotary, turned};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use std::f64::consts::TAU;

/// Positions of a block, whose angles from its first one are made once.
const TABULATED: usize = 64;

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
    pub fn forward<B: LinearAttentionBackend>(
        &self,
        x: Tensor<B, 4>,
        offset: usize,
    ) -> Tensor<B, 4> {
        let [_, tokens, _, channels] = x.dims();
        let half = self.width.map_or(channels, |width| width.min(channels)) / 2;
        let data = TensorData::new(self.table(offset, tokens, half), [2, tokens, half]);
        let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let table = Tensor::from_data(data, (&x.device(), dtype));
        rotary(x, table)
    }

    /// Cosines, then sines, of the angles of each position and pair of channels.
    fn table(&self, offset: usize, tokens: usize, half: usize) -> Vec<f64> {
        let mut table = vec![0.0; 2 * tokens * half];
        let (cosines, sines) = table.split_at_mut(tokens * half);
        for i in 0..half {
            let frequency = self.theta.powf(-(i as f64) / half as f64);
            let turns = (0..TABULATED.min(tokens)).map(|t| (t as f64 * frequency).sin_cos());
            let turns: Vec<_> = turns.collect();
            // A position of a block is its first one, turned on: no function is taken of each.
            for first in (0..tokens).step_by(TABULATED) {
                let (sin, cos) = ((offset + first) as f64 * frequency).sin_cos();
                for (t, (by_sin, by_cos)) in (first..tokens).zip(&turns) {
                    cosines[t * half + i] = cos * by_cos - sin * by_sin;
                    sines[t * half + i] = sin * by_cos + cos * by_sin;
                }
            }
        }
        table
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
        turned(x, self.cos.clone(), self.sin.clone())
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
