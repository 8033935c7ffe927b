//! The head of an auto-encoder: a whole sequence out of its last vector.
//! ```text
//! z_t = x_T + p_t                                p: fixed sines and cosines of the position
//! y_t = gelu(norm(gelu(norm(z_t) W + b)) U + c)
//! ```
//! Source: MAD, arXiv 2403.17844, whose compression task asks for it.

use super::layers::{Linear, Norm, NormKind, gelu, linear_with_bias};
use crate::ops::{LinearAttentionBackend, cat, typed};
use burn::module::Module;
use burn::tensor::{Int, Tensor, backend::Backend};

/// Longest wave of the positions, in tokens over 2 pi.
const LONGEST: f64 = 10_000.0;

/// From the layers' last vector to one vector a position.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    norm_1: Norm<B>,
    linear_1: Linear<B>,
    norm_2: Norm<B>,
    linear_2: Linear<B>,
}

impl<B: Backend> Decoder<B> {
    /// Fresh weights for a model of width `d_model`, even and at least 4.
    pub(super) fn new(d_model: usize, norm: NormKind, epsilon: f64, device: &B::Device) -> Self {
        let norm = || Norm::new(norm, d_model, epsilon, device);
        let linear = || linear_with_bias(d_model, d_model, device);
        Self { norm_1: norm(), linear_1: linear(), norm_2: norm(), linear_2: linear() }
    }
}

impl<B: LinearAttentionBackend> Decoder<B> {
    /// `[B, T, D]` to `[B, T, D]`, of which only the last position is read.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [_, tokens, width] = x.dims();
        let code = x.narrow(1, tokens - 1, 1);
        let positions = typed(positions(tokens, width, &code.device()), code.dtype());
        let z = positions.unsqueeze::<3>() + code;
        let z = gelu(self.linear_1.forward(self.norm_1.forward(z)));
        gelu(self.linear_2.forward(self.norm_2.forward(z)))
    }
}

/// `[T, D]`: sines in the first half of a row, cosines in the second, their frequencies falling from 1
/// to 1 / [`LONGEST`].
fn positions<B: Backend>(tokens: usize, width: usize, device: &B::Device) -> Tensor<B, 2> {
    let half = width / 2;
    let arange = |n: usize| Tensor::<B, 1, Int>::arange(0..n as i64, device).float();
    let frequencies = (arange(half) * (-LONGEST.ln() / (half - 1) as f64)).exp();
    let angles = arange(tokens).unsqueeze_dim::<2>(1) * frequencies.unsqueeze_dim::<2>(0);
    cat(vec![angles.clone().sin(), angles.cos()], 1)
}
