//! Short convolution: what lets a layer see its last few tokens.

use super::layers::shift_tokens;
use super::lengths::shift_sequences;
use super::shared::Shared;
use super::{ConfigError, Cost, Kept, KeptTensors, LARGEST};
use crate::ops::{self, Activation, LinearAttentionBackend, SequenceLengths, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};

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
    /// `x`: `[B, T, D]`, and the conv state of what came before. Gives `[B, T, D]` and the next conv state.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        conv_state: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        self.run(x, conv_state, Some(Activation::Silu), None)
    }

    /// As [`forward`](Self::forward), of sequences one after another in one row: B is 1, each sees its own tokens
    /// alone, and conv states, before and next, are `[N, W - 1, D]`.
    /// # Panics
    /// If `lengths` do not divide the one row.
    pub fn forward_varlen(
        &self,
        x: Tensor<B, 3>,
        conv_state: Option<Tensor<B, 3>>,
        lengths: &SequenceLengths,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        self.run(x, conv_state, Some(Activation::Silu), Some(lengths))
    }

    /// As [`forward`](Self::forward), without SiLU.
    pub fn linear(
        &self,
        x: Tensor<B, 3>,
        conv_state: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        self.run(x, conv_state, None, None)
    }

    /// As [`forward`](Self::forward), its conv state kept as `name`; a window of one token has none.
    pub(crate) fn forward_between(
        &self,
        x: Tensor<B, 3>,
        name: Kept,
        conv_states: &mut ConvPast<B>,
    ) -> Tensor<B, 3> {
        self.between(x, Some(Activation::Silu), name, conv_states)
    }

    /// As [`linear`](Self::linear), its conv state kept as `name`.
    pub(crate) fn linear_between(
        &self,
        x: Tensor<B, 3>,
        name: Kept,
        conv_states: &mut ConvPast<B>,
    ) -> Tensor<B, 3> {
        self.between(x, None, name, conv_states)
    }

    fn between(
        &self,
        x: Tensor<B, 3>,
        activation: Option<Activation>,
        name: Kept,
        conv_states: &mut ConvPast<B>,
    ) -> Tensor<B, 3> {
        if self.weight.dims()[0] == 1 {
            let bias = self.bias.as_ref().map(Param::val);
            return ops::scale_channels(x, self.weight.val().squeeze_dim(0), bias, activation);
        }
        let lengths = conv_states.lengths().cloned();
        let run = |conv_state| self.run(x, conv_state, activation, lengths.as_ref());
        conv_states.through(name, run)
    }

    /// The output and the next conv state, of sequences with lengths of their own where these are given.
    pub(crate) fn run(
        &self,
        x: Tensor<B, 3>,
        conv_state: Option<Tensor<B, 3>>,
        activation: Option<Activation>,
        lengths: Option<&SequenceLengths>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        convolved(x, (self.weight.val(), bias), conv_state, activation, lengths)
    }
}

/// `x`, `[B, T, D]`, through taps of two tokens and more, `[W, D]`, as [`ShortConvolution`] has them, its conv state kept
/// as `name`.
pub(crate) fn through_weight<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    name: Kept,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 3> {
    let lengths = conv_states.lengths().cloned();
    if conv_states.drops {
        return ops::through_taps(x, weight, conv_states.draw(name), lengths.as_ref());
    }
    conv_states.through(name, |conv_state| {
        convolved(x, (weight, None), conv_state, None, lengths.as_ref())
    })
}

/// `taps`, `[L, D]`, with tap `place` changed: what a token itself adds to its output costs no operation over all tokens.
pub(crate) fn with_tap<B: Backend>(
    taps: Tensor<B, 2>,
    place: usize,
    change: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
) -> Tensor<B, 2> {
    let [length, _] = taps.dims();
    let others =
        |from: usize, to: usize| (to > from).then(|| taps.clone().narrow(0, from, to - from));
    let tap = change(taps.clone().narrow(0, place, 1));
    let parts = [others(0, place), Some(tap), others(place + 1, length)];
    ops::cat(parts.into_iter().flatten().collect(), 0)
}

/// [`ops::convolve`] of a layer's own taps, bias and conv state.
fn convolved<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    (weight, bias): (Tensor<B, 2>, Option<Tensor<B, 1>>),
    conv_state: Option<Tensor<B, 3>>,
    activation: Option<Activation>,
    lengths: Option<&SequenceLengths>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    ops::convolve(x, weight, bias, conv_state, activation, lengths).expect(
        "`x` has the channels that the layer was made for and the tokens of its sequences, and the conv \
         state is its own",
    )
}

/// The conv states of a layer, and whatever else of it looks back a few tokens: those from before, to draw from,
/// and those for what comes next, under the same names.
#[derive(Debug)]
pub(crate) struct ConvPast<B: Backend> {
    before: KeptTensors<B>,
    next: KeptTensors<B>,
    lengths: Option<SequenceLengths>,
    /// Whether nobody reads those for what comes next: there are none then.
    drops: bool,
}

impl<B: Backend> ConvPast<B> {
    /// With those of earlier tokens.
    pub(crate) fn after(before: KeptTensors<B>) -> Self {
        Self { before, next: KeptTensors::default(), lengths: None, drops: false }
    }

    /// Of the tokens that `shared` goes with. Of sequences with lengths of their own in one row, convolutions keep
    /// them apart, and their conv states are `[N, W - 1, D]`.
    pub(crate) fn among(self, shared: &Shared<B>) -> Self {
        Self { lengths: shared.lengths.clone(), drops: shared.drops_states, ..self }
    }

    /// The lengths of sequences in one row.
    pub(crate) fn lengths(&self) -> Option<&SequenceLengths> {
        self.lengths.as_ref()
    }

    /// At the start of a sequence, or of a layer that has none.
    pub(crate) fn none() -> Self {
        Self::after(KeptTensors::default())
    }

    /// The tensor that earlier tokens left as `name`.
    pub(crate) fn draw(&mut self, name: Kept) -> Option<Tensor<B, 3>> {
        self.before.take(name)
    }

    /// Leaves a tensor for the next token.
    pub(crate) fn keep(&mut self, name: Kept, tensor: Tensor<B, 3>) {
        if !self.drops {
            self.next.keep(name, tensor);
        }
    }

    /// Leaves what convolutions side by side in the first columns of `y` saw last, for the next token: of a
    /// window, a name and a width and, where there are any, a conv state each. A window of one token leaves nothing.
    pub(crate) fn keep_last(
        &mut self,
        y: &Tensor<B, 3>,
        window: usize,
        (names, widths): (&[Kept], &[usize]),
        before: &[Tensor<B, 3>],
    ) where
        B: LinearAttentionBackend,
    {
        if !self.drops && window > 1 {
            let lengths = self.lengths.as_ref();
            let next = ops::next_conv_states(y, widths, before, window, lengths);
            names.iter().zip(next).for_each(|(name, tensor)| self.next.keep(*name, tensor));
        }
    }

    /// The output of `layer`, which takes its conv state and gives the next.
    pub(crate) fn through<T>(
        &mut self,
        name: Kept,
        layer: impl FnOnce(Option<Tensor<B, 3>>) -> (T, Tensor<B, 3>),
    ) -> T {
        let (y, conv_state) = layer(self.draw(name));
        self.keep(name, conv_state);
        y
    }

    /// The token before each token of `x`, `[B, T, D]`, zeros before the first of a sequence. The last token is the
    /// conv state, `[B, 1, D]`.
    pub(crate) fn shifted(&mut self, x: &Tensor<B, 3>) -> Tensor<B, 3> {
        let lengths = self.lengths.clone();
        self.through(Kept::Token, |last| match &lengths {
            Some(lengths) => shift_sequences(x, last, lengths),
            None => shift_tokens(x, last),
        })
    }

    /// `x`, `[B, T, D]`, mixed with the token before each token, zeros before the first of a sequence, once for
    /// each of `shares`, `[1, 1, D]`: `before share + x (1 - share)`. The last token is the conv state, `[B, 1, D]`.
    pub(crate) fn mixed<const N: usize>(
        &mut self,
        x: &Tensor<B, 3>,
        shares: [Tensor<B, 3>; N],
    ) -> [Tensor<B, 3>; N]
    where
        B: LinearAttentionBackend,
    {
        let last = self.draw(Kept::Token);
        let sequences = self.lengths.as_ref().map_or(x.dims()[0], SequenceLengths::count);
        let token = [sequences, 1, x.dims()[2]];
        assert!(
            last.as_ref().is_none_or(|last| last.dims() == token),
            "the state is the layer's own"
        );
        self.keep_last(x, 2, (&[Kept::Token], &[x.dims()[2]]), last.as_slice());
        // Of one token there are fewer operations than taps would take.
        if x.dims()[1] == 1 && self.lengths.is_none() {
            let back = last.map(|last| typed(last, x.dtype())).unwrap_or_else(|| x.zeros_like());
            let back = back - x.clone();
            return shares.map(|share| x.clone() + back.clone() * typed(share, x.dtype()));
        }
        shares.map(|share| {
            let share: Tensor<B, 2> = share.squeeze_dim(0);
            let taps = cat(vec![share.clone(), share.neg() + 1.0], 0);
            ops::through_taps(x.clone(), taps, last.clone(), self.lengths.as_ref())
        })
    }

    /// Those for what comes next.
    pub(crate) fn into_next(self) -> KeptTensors<B> {
        self.next
    }
}

/// `x` through `convolution` and SiLU where there is a convolution, else `x` itself.
pub(crate) fn convolve_if_any<B: LinearAttentionBackend>(
    convolution: &Option<ShortConvolution<B>>,
    x: Tensor<B, 3>,
    name: Kept,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 3> {
    match convolution {
        Some(convolution) => convolution.forward_between(x, name, conv_states),
        None => x,
    }
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
