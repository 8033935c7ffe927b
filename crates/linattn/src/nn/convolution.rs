//! Short convolution: what lets a layer see its last few tokens.

use super::layers::split_heads;
use super::{ConfigError, Cost, LARGEST, Linear};
use crate::ops::{self, Activation, LinearAttentionBackend};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, activation::silu, backend::Backend};

/// Causal depthwise convolution over time, then SiLU.
///
/// `y_t = silu(sum_w weight_w * x_{t-W+1+w} + bias)`: each channel sees itself, W tokens wide. The
/// state is the last W - 1 inputs, `[B, W - 1, D]`. A window of one token is a factor and a bias for each
/// channel, and has no state: [`forward`](Self::forward) and [`linear`](Self::linear) are of two and more.
#[derive(Module, Debug)]
pub struct ShortConvolution<B: Backend> {
    /// `[W, D]`; the last row meets the newest token.
    pub weight: Param<Tensor<B, 2>>,
    /// `[D]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
}

impl<B: Backend> ShortConvolution<B> {
    /// Fresh weights, uniform within 1 / sqrt(W), for `channels` channels and a window of `width`
    /// tokens.
    pub fn new(channels: usize, width: usize, bias: bool, device: &B::Device) -> Self {
        let bound = 1.0 / (width as f64).sqrt();
        let uniform = Initializer::Uniform { min: -bound, max: bound };
        Self {
            weight: uniform.init([width, channels], device),
            bias: bias.then(|| uniform.init([channels], device)),
        }
    }
}

impl<B: Backend> ShortConvolution<B> {
    /// As [`new`](Self::new), without bias; none for a window of 0.
    pub(crate) fn optional(channels: usize, width: usize, device: &B::Device) -> Option<Self> {
        (width > 0).then(|| Self::new(channels, width, false, device))
    }
}

/// Cost of convolutions of `channels` channels in all; nothing for a window of 0.
pub(crate) fn convolution_cost(width: usize, channels: usize) -> Cost {
    Cost {
        state_bytes: 4 * (width.saturating_sub(1) * channels) as u64,
        flops_per_token: 2 * (width * channels) as u64,
    }
}

impl<B: LinearAttentionBackend> ShortConvolution<B> {
    /// `x`: `[B, T, D]`, and the tail of what came before. Gives `[B, T, D]` and the next tail.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        tail: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        self.run(x, tail, Some(Activation::Silu))
    }

    /// As [`forward`](Self::forward), without SiLU.
    pub fn linear(
        &self,
        x: Tensor<B, 3>,
        tail: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        self.run(x, tail, None)
    }

    /// As [`forward`](Self::forward). The tail comes from `before`, the next goes to `tails`; a window of one
    /// token has none.
    pub(crate) fn forward_between(
        &self,
        x: Tensor<B, 3>,
        before: &mut impl Iterator<Item = Tensor<B, 3>>,
        tails: &mut Vec<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        if self.weight.dims()[0] == 1 {
            let scaled = x * self.weight.val().unsqueeze::<3>();
            return silu(match &self.bias {
                Some(bias) => scaled + bias.val().unsqueeze::<3>(),
                None => scaled,
            });
        }
        let (y, tail) = self.forward(x, before.next());
        tails.push(tail);
        y
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        tail: Option<Tensor<B, 3>>,
        activation: Option<Activation>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        ops::convolve(x, self.weight.val(), bias, tail, activation)
            .expect("`x` has the channels that the layer was made for, and the tail is its own")
    }
}

/// Applies `convolution` if there is one, else SiLU alone. The convolution's tail comes from `before`,
/// the next goes to `tails`.
pub(crate) fn convolve<B: LinearAttentionBackend>(
    convolution: &Option<ShortConvolution<B>>,
    x: Tensor<B, 3>,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    match convolution {
        Some(convolution) => convolution.forward_between(x, before, tails),
        None => silu(x),
    }
}

/// As [`convolve`], but nothing at all where there is no convolution.
pub(crate) fn convolve_if_any<B: LinearAttentionBackend>(
    convolution: &Option<ShortConvolution<B>>,
    x: Tensor<B, 3>,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    match convolution {
        Some(_) => convolve(convolution, x, before, tails),
        None => x,
    }
}

/// As [`convolve_if_any`], without SiLU.
pub(crate) fn convolve_linearly<B: LinearAttentionBackend>(
    convolution: &Option<ShortConvolution<B>>,
    x: Tensor<B, 3>,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    match convolution {
        Some(convolution) => {
            let (y, tail) = convolution.linear(x, before.next());
            tails.push(tail);
            y
        }
        None => x,
    }
}

/// Queries, keys or values: `x`, `[B, T, D]`, projected, through [`convolve`], and taken apart into
/// heads, `[B, T, heads, X]`.
pub(crate) fn convolved_heads<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projection: &Linear<B>,
    convolution: &Option<ShortConvolution<B>>,
    heads: usize,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Tensor<B, 4> {
    split_heads(convolve(convolution, projection.forward(x.clone()), before, tails), heads)
}

/// As [`convolved_heads`], through [`convolve_if_any`].
pub(crate) fn convolved_heads_if_any<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projection: &Linear<B>,
    convolution: &Option<ShortConvolution<B>>,
    heads: usize,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Tensor<B, 4> {
    split_heads(convolve_if_any(convolution, projection.forward(x.clone()), before, tails), heads)
}

/// A window of 0 stands for no convolution; one token would be no convolution either.
pub(crate) fn check_window(size: usize, least: usize) -> Result<(), ConfigError> {
    match size {
        0 if least == 0 => Ok(()),
        2..=LARGEST => Ok(()),
        _ => {
            let none = if least == 0 { "0, or " } else { "" };
            Err(ConfigError::new("conv_size", size, format!("{none}from 2 to {LARGEST}")))
        }
    }
}
