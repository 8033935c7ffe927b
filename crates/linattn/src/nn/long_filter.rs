//! Filters as long as the sequence whose taps a small network gives, and what layers that convolve with them keep.
//! ```text
//! z_l   = [l / (L - 1), cos(f w_l), -sin(f w_l)]       w_l = 2 pi l / L, a pair for each f of N bands
//! h_l   = M_n(sin(a M_{n-1}( .. sin(a M_1(z_l)))))     exp(-|d| l / (L - 1)) times it, a d for each channel
//! ```

use super::convolution::ConvPast;
use super::layers::{linear, linear_with_bias};
use super::state::CONV_STATES;
use super::{ConfigError, KeptTensors, Linear, RecurrentState, StateTensors, positive};
use crate::ops::{LinearAttentionBackend, cat};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use std::f64::consts::PI;

/// Features of a lag: itself, and a cosine and a sine for each of one band.
pub(crate) const FEATURES: usize = 3;
/// The one band's frequency, where the sources' series of them starts.
const LOWEST_FREQUENCY: f64 = 1e-4;
/// Rest of a tap that decay leaves after a share of the length: FASTEST of it for one channel, SLOWEST for another.
const TARGET: f64 = 1e-2;
const FASTEST: f64 = 0.3;
const SLOWEST: f64 = 1.5;

/// L, of at least two tokens: lags are told as shares of it.
pub(crate) fn check_length(length: usize) -> Result<usize, ConfigError> {
    match positive("length", length)? {
        1 => Err(ConfigError::new("length", 1, "at least 2")),
        length => Ok(length),
    }
}

/// Features of the lags 0, 1 .. `count` - 1, `[count, 3]`, on the device and in the type of `like`.
pub(crate) fn lags<B: Backend>(
    count: usize,
    length: usize,
    like: &Tensor<B, 2>,
    dtype: DType,
) -> Tensor<B, 2> {
    let features = |lag: usize| {
        let angle = LOWEST_FREQUENCY * 2.0 * PI * lag as f64 / length as f64;
        [share(lag, length), angle.cos(), -angle.sin()]
    };
    let values: Vec<f64> = (0..count).flat_map(features).collect();
    Tensor::from_data(TensorData::new(values, [count, FEATURES]), (&like.device(), dtype))
}

fn share(lag: usize, length: usize) -> f64 {
    lag as f64 / (length - 1) as f64
}

/// Hyena's filter: a network of sines, and a decay of each channel. Source: arXiv 2302.10866, as its authors'
/// code and MAD's have it.
#[derive(Module, Debug)]
pub struct SineFilter<B: Backend> {
    inner: Vec<Linear<B>>,
    last: Linear<B>,
    /// a, shared by all sines, `[1, order]`.
    frequency: Param<Tensor<B, 1>>,
    /// z of each lag, `[L, 3]`, where it is learnt.
    lags: Option<Param<Tensor<B, 2>>>,
    #[module(skip)]
    length: usize,
}

/// Sizes of a [`SineFilter`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct SineFilterSize {
    /// Width between its layers.
    pub(crate) order: usize,
    /// Layers between the first and the last.
    pub(crate) depth: usize,
    pub(crate) channels: usize,
    /// L.
    pub(crate) length: usize,
    /// Whether features of lags are learnt.
    pub(crate) learns_lags: bool,
}

impl SineFilterSize {
    /// Multiplications and additions of one tap of every channel.
    pub(crate) fn flops(self) -> u64 {
        let weights = FEATURES * self.order
            + self.depth * self.order * self.order
            + self.order * self.channels;
        2 * weights as u64
    }

    pub(crate) fn init<B: Backend>(self, frequency: f64, device: &B::Device) -> SineFilter<B> {
        let Self { order, depth, channels, length, learns_lags } = self;
        let first = linear_with_bias(FEATURES, order, device);
        let others = (0..depth).map(|_| linear_with_bias(order, order, device));
        SineFilter {
            inner: std::iter::once(first).chain(others).collect(),
            last: linear(order, channels, device),
            frequency: Initializer::Constant { value: frequency }.init([order], device),
            lags: learns_lags.then(|| {
                let like = Tensor::<B, 2>::zeros([1, 1], device);
                Param::from_tensor(lags(length, length, &like, like.dtype()))
            }),
            length,
        }
    }
}

impl<B: LinearAttentionBackend> SineFilter<B> {
    /// How many lags it has learnt, where it learns them: there are no more.
    pub(crate) fn positions(&self) -> Option<usize> {
        self.lags.as_ref().map(|lags| lags.dims()[0])
    }

    /// The first `count` taps, `[count, channels]`.
    pub(crate) fn taps(&self, count: usize) -> Tensor<B, 2> {
        let frequency = self.frequency.val().unsqueeze::<2>();
        let first = match &self.lags {
            Some(lags) => lags.val().narrow(0, 0, count),
            None => lags(count, self.length, &frequency, frequency.dtype()),
        };
        let sines = |x, layer: &Linear<B>| (layer.forward(x) * frequency.clone()).sin();
        let taps = self.last.forward(self.inner.iter().fold(first, sines));
        let decay = self.decay(count, taps.dims()[1]);
        taps * Tensor::from_data(decay, (&frequency.device(), frequency.dtype()))
    }

    /// `exp(-|d| l / (L - 1))`, d evenly spaced over the channels.
    fn decay(&self, count: usize, channels: usize) -> TensorData {
        let [slow, fast] = [SLOWEST, FASTEST].map(|part| TARGET.ln().abs() / part);
        let step = (fast - slow) / channels.saturating_sub(1).max(1) as f64;
        let at = |lag: usize, channel: usize| {
            (-(slow + step * channel as f64) * share(lag, self.length)).exp()
        };
        let values: Vec<f64> =
            (0..count * channels).map(|i| at(i / channels, i % channels)).collect();
        TensorData::new(values, [count, channels])
    }
}

/// Inputs of convolutions that a layer has to know of.
#[derive(Debug, Clone)]
pub struct ConvolutionState<B: Backend> {
    /// Every input of a long convolution so far, `[B, T, channels]`: it grows with the sequence. `None` without one.
    pub inputs: Option<Tensor<B, 3>>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`.
    pub conv_states: KeptTensors<B>,
}

impl<B: Backend> ConvolutionState<B> {
    /// Taken apart, or of the start of a sequence.
    pub(crate) fn parts(state: Option<Self>) -> (Option<Tensor<B, 3>>, ConvPast<B>) {
        match state {
            Some(Self { inputs, conv_states }) => (inputs, ConvPast::after(conv_states)),
            None => (None, ConvPast::none()),
        }
    }
}

impl<B: Backend> RecurrentState<B> for ConvolutionState<B> {
    fn tensors(&self) -> StateTensors<B> {
        let tensors = StateTensors::new(None).with_kept(CONV_STATES, &self.conv_states);
        match &self.inputs {
            Some(inputs) => tensors.with_growing("inputs", inputs, 1),
            None => tensors,
        }
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self { inputs: tensors.take_if_any("inputs"), conv_states: tensors.take_kept(CONV_STATES) }
    }
}

/// Inputs so far, `x` last.
pub(crate) fn with_past<B: Backend>(past: Option<Tensor<B, 3>>, x: Tensor<B, 3>) -> Tensor<B, 3> {
    match past {
        Some(past) => cat(vec![past, x], 1),
        None => x,
    }
}
