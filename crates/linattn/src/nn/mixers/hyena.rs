//! Hyena and multihead Hyena. Recurrence, shapes and source: [`Hyena`].

use super::{TokenMixer, linear_flops};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost, with_tap};
use crate::nn::layers::{ResidualLinear, linear_with_bias, merge_heads, split_heads};
use crate::nn::long_filter::{
    ConvolutionState, SineFilter, SineFilterSize, check_length, with_past,
};
use crate::nn::projection::split_columns;
use crate::nn::{ConfigError, Cost, Kept, LARGEST, Linear, Shared, positive};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Hyena`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HyenaConfig {
    /// N, channels of a group; 1 where there are none.
    pub group_width: usize,
    /// Width inside, over d_model.
    pub expand: usize,
    /// Parts of q, k and v together that are repeats of one projection; a divisor of `3 expand d_model`.
    pub projection_groups: usize,
    /// Tokens the short convolution sees, at least 2.
    pub conv_size: usize,
    /// Width of the filter's network.
    pub filter_order: usize,
    /// Layers of that network between the first and the last.
    pub filter_depth: usize,
    /// Where the frequency of its sines starts.
    pub filter_frequency: f64,
    /// L, the length that lags are told as shares of.
    pub length: usize,
    /// Whether features of lags are learnt: no sequence is longer than `length` then.
    // Left out where it is false: rows of experiments name configs by their text, which had no such key before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub learn_lags: bool,
}

impl Default for HyenaConfig {
    fn default() -> Self {
        Self {
            group_width: 1,
            expand: 1,
            projection_groups: 1,
            conv_size: 3,
            filter_order: 64,
            filter_depth: 2,
            filter_frequency: 1.0,
            length: 1024,
            learn_lags: false,
        }
    }
}

/// Config of [`MultiheadHyena`]: the keys of [`HyenaConfig`], of which `group_width` is at least 2.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MultiheadHyenaConfig(pub HyenaConfig);

/// Sizes that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    inner: usize,
    projected: usize,
    filter: SineFilterSize,
}

impl HyenaConfig {
    fn resolve_as(&self, d_model: usize, multihead: bool) -> Result<Sizes, ConfigError> {
        let group = positive("group_width", self.group_width)?;
        let inner = positive("expand", self.expand)? * d_model;
        if inner > LARGEST {
            let want = format!("at most {}", LARGEST / d_model.max(1));
            return Err(ConfigError::new("expand", self.expand, want));
        }
        if (group > 1) != multihead || !inner.is_multiple_of(group) {
            let want = match multihead {
                true => format!("a divisor of {inner}, the width inside, and at least 2"),
                false => "1: `multihead_hyena` has wider groups".to_string(),
            };
            return Err(ConfigError::new("group_width", group, want));
        }
        let parts = positive("projection_groups", self.projection_groups)?;
        if !(3 * inner).is_multiple_of(parts) {
            let want = format!("a divisor of {}, three times the width inside", 3 * inner);
            return Err(ConfigError::new("projection_groups", parts, want));
        }
        check_window(self.conv_size, 2)?;
        super::check_divisor("filter_frequency", self.filter_frequency)?;
        let filter = SineFilterSize {
            order: positive("filter_order", self.filter_order)?,
            depth: positive("filter_depth", self.filter_depth)?,
            channels: inner / group,
            length: check_length(self.length)?,
            learns_lags: self.learn_lags,
        };
        Ok(Sizes { inner, projected: 3 * inner / parts, filter })
    }

    fn build<B: Backend>(&self, sizes: Sizes, d_model: usize, device: &B::Device) -> Hyena<B> {
        let Sizes { inner, projected, filter } = sizes;
        Hyena {
            in_proj: linear_with_bias(d_model, projected, device),
            conv1d: ShortConvolution::new(3 * inner, self.conv_size, true, device),
            filter: filter.init(self.filter_frequency, device),
            d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([filter.channels], device),
            out_proj: linear_with_bias(inner, d_model, device).into(),
        }
    }

    fn count(&self, sizes: Sizes, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        if self.learn_lags {
            super::aft::check_known(self.length, length)?;
        }
        let Sizes { inner, projected, filter } = sizes;
        // Of earlier tokens: a product with a tap; or scores, their taps, and their sum over values.
        let (kept, met) = match self.group_width {
            1 => (1, 2 * inner),
            _ => (2, 4 * inner + filter.channels),
        };
        let mut cost = convolution_cost(self.conv_size, 3 * inner);
        cost += Cost {
            state_bytes: 4 * (kept * inner * length) as u64,
            flops_per_token: linear_flops(d_model, projected)
                + linear_flops(inner, d_model)
                + filter.flops()
                + (length.div_ceil(2) * met) as u64,
        };
        Ok(cost)
    }
}

macro_rules! config {
    ($name:ident, $layer:ident, $multihead:literal, |$self:ident| $plain:expr) => {
        impl $name {
            pub(super) fn resolve(&self, d_model: usize) -> Result<Sizes, ConfigError> {
                let $self = self;
                $plain.resolve_as(d_model, $multihead)
            }

            /// Builds the layer for a model of width `d_model`.
            /// # Errors
            /// [`ConfigError`] names the first key that does not fit.
            pub fn init<B: Backend>(
                &self,
                d_model: usize,
                device: &B::Device,
            ) -> Result<$layer<B>, ConfigError> {
                let $self = self;
                Ok($plain.build(self.resolve(d_model)?, d_model, device))
            }

            /// Cost in a model of width `d_model`, over sequences of `length` tokens.
            /// # Errors
            /// As [`init`](Self::init); and sequences longer than there are learnt lags.
            pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
                let $self = self;
                $plain.count(self.resolve(d_model)?, d_model, length)
            }
        }
    };
}

config!(HyenaConfig, Hyena, false, |config| config);
config!(MultiheadHyenaConfig, MultiheadHyena, true, |config| config.0);

/// Hyena: a convolution as long as the sequence, between two gates.
///
/// [`MultiheadHyena`] convolves outer products of groups of channels.
///
/// # Recurrence
/// ```text
/// q, k, v = conv(x W + b)                    a short convolution with a bias, no activation
/// u    = k v
/// y    = (q (h * u + d u)) W_o + b_o      h: a tap for each lag and channel, of a network: see `long_filter`
/// ```
/// ```text
/// x_t ──> q, k, v
///                                          ┌─ write ────┐
/// u_1 .. u_{t-1} ─────────────────────────>│ append k v │──┬──> u_1 .. u_t
///                                          └────────────┘  │
///                      ┌─ read ─────────────────────────┐  │
///  y_t <── W_o, b_o <──│ q (sum of h_{t-s} u_s + d u_t) │<─┘
///                      └────────────────────────────────┘
/// ```
/// h comes from a network over features of the lag and a decay of each channel. Nothing decays in the state:
/// taps weigh it anew at every token. Widened in MAD (`expand = 4`, `projection_groups = 4`), q, k and v are
/// repeats of a projection a fourth as wide. With `learn_lags` the lags' features are learnt, three numbers for
/// each of `length` lags, and no sequence is longer.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`ConvolutionState`]: `inputs`, all u so far,
/// `[B, T, E D]` of E `expand`, which grows with T; `conv_states`, the last W - 1 inputs of the short convolution.
/// Lags are told as shares of `length` tokens.
/// # Errors
/// [`HyenaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a size of 0, a
/// `group_width` other than 1, `projection_groups` that do not divide 3 E D, a `conv_size` below 2, a
/// `filter_frequency` that is not above 0 or a `length` below 2. With `learn_lags`, `cost` refuses sequences longer
/// than `length`; `run` panics where one goes past it.
/// # Source
/// Poli et al., arXiv 2302.10866, and the code of MAD and Zoology.
/// # Departures
/// The features of lags are not learnt unless `learn_lags` says so. The authors learn them at a rate of 1e-5; the
/// code of MAD and Zoology asks for that too, but its trainers give every parameter the one rate. The filter learns
/// as fast and decays as much as everything else, as it does there; order 2 alone.
#[derive(Module, Debug)]
pub struct Hyena<B: Backend> {
    in_proj: Linear<B>,
    conv1d: ShortConvolution<B>,
    filter: SineFilter<B>,
    /// Added to the tap of lag 0, `[channels]`.
    d: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
}

#[doc = include_str!("pages/multihead_hyena.md")]
pub type MultiheadHyena<B> = Hyena<B>;

impl<B: LinearAttentionBackend> TokenMixer<B> for Hyena<B> {
    type State = ConvolutionState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn positions(&self) -> Option<usize> {
        self.filter.positions()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<ConvolutionState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, ConvolutionState<B>) {
        let (past, mut conv_states) = ConvolutionState::parts(state);
        let inner = self.out_proj.weight.dims()[0];
        let projected = self.in_proj.forward(x);
        let repeats = 3 * inner / projected.dims()[2];
        let all = if repeats > 1 { projected.repeat_dim(2, repeats) } else { projected };
        let all = self.conv1d.linear_between(all, Kept::Input, &mut conv_states);
        let [q, k, v] = split_columns(all, [inner; 3]);
        let (y, inputs) = match self.d.dims()[0] == inner {
            true => self.convolve(q, k * v, past),
            false => self.attend(q, k, v, past),
        };
        (
            self.out_proj.forward(y),
            ConvolutionState { inputs: Some(inputs), conv_states: conv_states.into_next() },
        )
    }
}

impl<B: LinearAttentionBackend> Hyena<B> {
    /// The gated convolution of `u`; and all inputs so far.
    fn convolve(
        &self,
        q: Tensor<B, 3>,
        u: Tensor<B, 3>,
        past: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let inputs = with_past(past.clone(), u.clone());
        let taps = self.taps(inputs.dims()[1]);
        let y = ops::long_convolution(u, taps, past).expect("the filter has the channels of `u`");
        (q * y, inputs)
    }

    /// The groups' outer products convolved; and all keys and values so far.
    fn attend(
        &self,
        q: Tensor<B, 3>,
        k: Tensor<B, 3>,
        v: Tensor<B, 3>,
        past: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let ([_, tokens, inner], dtype) = (q.dims(), q.dtype());
        let inputs = with_past(past, cat(vec![k, v], 2));
        let (seen, groups) = (inputs.dims()[1], self.d.dims()[0]);
        let of_groups = |x| accumulator(split_heads(x, groups)).swap_dims(1, 2);
        let [k, v] = [0, 1].map(|part| of_groups(inputs.clone().narrow(2, part * inner, inner)));
        let weights = ops::tap_matrices(self.taps(seen), tokens).unsqueeze::<4>();
        let scores = of_groups(q).matmul(k.transpose());
        let o = (scores * typed(weights, v.dtype())).matmul(v);
        (typed(merge_heads(o.swap_dims(1, 2)), dtype), inputs)
    }

    /// The first `count` taps, `[count, channels]`.
    fn taps(&self, count: usize) -> Tensor<B, 2> {
        with_tap(self.filter.taps(count), 0, |first| first + self.d.val().unsqueeze::<2>())
    }
}
