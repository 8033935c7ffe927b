//! Token mixers: the part of a layer that looks back.
//!
//! A mixer is one file here, and one line in the list at the end of this one.

// Of any mixer a model holds a few, whose tensors are on the heap already.
#![allow(clippy::large_enum_variant)]

/// `forward` and `step` of a mixer whose `run` does both, with the operation over whole sequences or
/// the one over a single token: so the two cannot drift apart.
macro_rules! forward_and_step {
    ($mixer:ident, $chunked:path, $step:path) => {
        forward_and_step!($mixer, MatrixState, $chunked, $step);
    };
    ($mixer:ident, $state:ident, $chunked:path, $step:path) => {
        impl<B: LinearAttentionBackend> $mixer<B> {
            /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T.
            pub fn forward(
                &self,
                x: Tensor<B, 3>,
                state: Option<$state<B>>,
            ) -> (Tensor<B, 3>, $state<B>) {
                self.run(x, state, |x, memory| $chunked(x, memory, self.chunk))
            }

            /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
            pub fn step(
                &self,
                x: Tensor<B, 2>,
                state: Option<$state<B>>,
            ) -> (Tensor<B, 2>, $state<B>) {
                let (y, state) = self.run(x.unsqueeze_dim(1), state, $step);
                (y.squeeze_dim(1), state)
            }
        }
    };
}

mod attention;
mod base_conv;
mod comba;
mod delta_net;
mod delta_product;
mod forgetting_attention;
mod gated_delta_net_2;
mod gated_retention;
mod gla;
mod gsa;
mod hgrn2;
mod kda;
mod lightning_attention;
mod linear_attention;
mod longhorn;
mod mamba2;
mod metala;
mod mlstm;
mod retnet;
mod rwkv6;
mod rwkv7;

pub use attention::{Attention, AttentionConfig, KeyValueCache};
pub use base_conv::{BaseConv, BaseConvConfig, ConvolutionTail};
pub use comba::{Comba, CombaConfig};
pub use delta_net::{DeltaNet, DeltaNetConfig, GatedDeltaNet, GatedDeltaNetConfig};
pub use delta_product::{DeltaProduct, DeltaProductConfig};
pub use forgetting_attention::{ForgettingAttention, ForgettingAttentionConfig, ForgettingCache};
pub use gated_delta_net_2::{GatedDeltaNet2, GatedDeltaNet2Config};
pub use gated_retention::{GatedRetention, GatedRetentionConfig};
pub use gla::{Gla, GlaConfig};
pub use gsa::{Gsa, GsaConfig, SlotState};
pub use hgrn2::{Hgrn2, Hgrn2Config};
pub use kda::{Kda, KdaConfig};
pub use lightning_attention::{LightningAttention, LightningAttentionConfig};
pub use linear_attention::{FeatureMap, LinearAttention, LinearAttentionConfig};
pub use longhorn::{Longhorn, LonghornConfig};
pub use mamba2::{Mamba2, Mamba2Config};
pub use metala::{MetaLa, MetaLaConfig};
pub use mlstm::{Mlstm, MlstmConfig};
pub use retnet::{RetNet, RetNetConfig};
pub use rwkv6::{Rwkv6, Rwkv6Config};
pub use rwkv7::{LowRankMap, Rwkv7, Rwkv7Config};

use super::{ConfigError, Cost, RecurrentState, StateTensors};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// What a mixer with a matrix memory keeps between tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct MatrixState<B: Backend> {
    /// `[B, H, K, V]`.
    pub memory: Tensor<B, 4>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, in the order of the layer's
    /// fields; then what else a mixer needs of its last token: RWKV-6 and RWKV-7 the token itself, `[B, 1, D]`,
    /// mLSTM its running maximum, `[B, 1, H]`. Empty where there is nothing of the kind.
    pub tails: Vec<Tensor<B, 3>>,
    /// Tokens seen.
    pub position: usize,
}

/// A state taken apart: memory, tails to draw from, position.
type Parts<B> = (Option<Tensor<B, 4>>, std::vec::IntoIter<Tensor<B, 3>>, usize);

impl<B: Backend> MatrixState<B> {
    fn parts(state: Option<Self>) -> Parts<B> {
        match state {
            Some(s) => (Some(s.memory), s.tails.into_iter(), s.position),
            None => (None, vec![].into_iter(), 0),
        }
    }
}

impl<B: Backend> RecurrentState<B> for MatrixState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with("memory", &self.memory)
            .with_list("tails", &self.tails)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self { memory: tensors.take("memory"), tails: tensors.take_list("tails"), position }
    }
}

macro_rules! mixer_states {
    ($($(#[$doc:meta])* $name:ident($state:ident);)+) => {
        /// What any mixer keeps between tokens.
        #[derive(Debug, Clone)]
        pub enum MixerState<B: Backend> {
            $($(#[$doc])* $name($state<B>),)+
        }

        impl<B: Backend> MixerState<B> {
            /// Which kind of state it is.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => stringify!($name),)+ }
            }

            /// Its tensors.
            pub fn tensors(&self) -> StateTensors<B> {
                match self { $(Self::$name(state) => state.tensors(),)+ }
            }

            /// A state of the same kind, of other tensors.
            /// # Panics
            /// If they are not named as [`tensors`](Self::tensors) names its own.
            #[must_use]
            pub fn of(&self, tensors: StateTensors<B>) -> Self {
                match self {
                    $(Self::$name(_) => Self::$name(<$state<B>>::from_tensors(tensors)),)+
                }
            }
        }

        $(
            impl<B: Backend> From<$state<B>> for MixerState<B> {
                fn from(state: $state<B>) -> Self {
                    Self::$name(state)
                }
            }

            impl<B: Backend> From<MixerState<B>> for $state<B> {
                fn from(state: MixerState<B>) -> Self {
                    match state {
                        MixerState::$name(state) => state,
                        _ => panic!("a mixer was given the state of another kind of mixer"),
                    }
                }
            }
        )+
    };
}

mixer_states! {
    /// A memory of fixed size.
    Matrix(MatrixState);
    /// Slots of keys and values.
    Slots(SlotState);
    /// Keys and values so far.
    Cache(KeyValueCache);
    /// Keys and values so far, and how much of each is left.
    Forgetting(ForgettingCache);
    /// The last few inputs.
    Tail(ConvolutionTail);
}

/// Value heads, and heads of queries and keys, must divide.
fn check_heads(heads: usize, value_heads: Option<usize>) -> Result<usize, ConfigError> {
    super::positive("heads", heads)?;
    let value_heads = super::positive("value_heads", value_heads.unwrap_or(heads))?;
    if value_heads.is_multiple_of(heads) {
        return Ok(value_heads);
    }
    Err(ConfigError::new("value_heads", value_heads, format!("a multiple of heads = {heads}")))
}

/// K: as given, or an even share of the model's width.
fn key_width(given: Option<usize>, d_model: usize, heads: usize) -> Result<usize, ConfigError> {
    match given {
        Some(width) => super::positive("key_width", width),
        None if d_model.is_multiple_of(heads) && d_model > 0 => Ok(d_model / heads),
        None => Err(ConfigError::new(
            "heads",
            heads,
            format!("a divisor of d_model = {d_model}, unless `key_width` is given"),
        )),
    }
}

/// K: as given, or half of an even share of the model's width, as where keys are half as wide as values.
fn half_key_width(
    given: Option<usize>,
    d_model: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    match given {
        Some(width) => super::positive("key_width", width),
        None if d_model.is_multiple_of(2 * heads) && d_model > 0 => Ok(d_model / (2 * heads)),
        None => Err(ConfigError::new(
            "heads",
            heads,
            format!("a divisor of half of d_model = {d_model}, unless `key_width` is given"),
        )),
    }
}

/// Refuses a divisor that is not above 0.
fn check_divisor(key: &str, value: f64) -> Result<(), ConfigError> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(ConfigError::new(key, value, "above 0")),
    }
}

/// V = K * `expand_v`, a whole number.
fn value_width(key_width: usize, expand_v: f64) -> Result<usize, ConfigError> {
    let width = key_width as f64 * expand_v;
    if width >= 1.0 && width.fract() == 0.0 && width <= super::LARGEST as f64 {
        return Ok(width as usize);
    }
    let want = format!("such that {key_width} (the key width) times it is a whole number above 0");
    Err(ConfigError::new("expand_v", expand_v, want))
}

/// State and arithmetic of a memory of `heads` matrices K x V: decay, write, read, and for a delta
/// rule the answer that is subtracted.
fn memory_cost(heads: usize, key_width: usize, value_width: usize, delta: bool) -> Cost {
    let size = (heads * key_width * value_width) as u64;
    Cost { state_bytes: 4 * size, flops_per_token: size * if delta { 7 } else { 5 } }
}

/// Multiplications and additions of a linear layer, for one token.
fn linear_flops(from: usize, to: usize) -> u64 {
    2 * from as u64 * to as u64
}

macro_rules! mixers {
    ($($(#[$doc:meta])* $key:literal $name:ident($config:ident);)+) => {
        /// Which mixer, by its name in a config.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        pub enum MixerConfig {
            $($(#[$doc])* #[serde(rename = $key)] $name($config),)+
        }

        impl MixerConfig {
            /// Names that a config may use.
            pub const NAMES: &'static [&'static str] = &[$($key),+];

            /// Its name in a config.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => $key,)+ }
            }

            /// Builds the mixer for a model of width `d_model`.
            /// # Errors
            /// [`ConfigError`] names the first key that does not fit.
            pub fn init<B: LinearAttentionBackend>(
                &self,
                d_model: usize,
                device: &B::Device,
            ) -> Result<Mixer<B>, ConfigError> {
                match self {
                    $(Self::$name(config) => config
                        .init(d_model, device)
                        .map(Mixer::$name)
                        .map_err(|e| e.within($key)),)+
                }
            }

            /// What it costs in a model of width `d_model`, over sequences of `length` tokens.
            /// # Errors
            /// As [`init`](Self::init).
            pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
                match self {
                    $(Self::$name(config) => {
                        config.cost(d_model, length).map_err(|e| e.within($key))
                    })+
                }
            }
        }

        /// Any mixer.
        #[derive(Module, Debug)]
pub enum Mixer<B: Backend> {
            $($(#[$doc])* $name($name<B>),)+
        }

        impl<B: LinearAttentionBackend> Mixer<B> {
            /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T.
            /// # Panics
            /// If `state` is another kind of mixer's.
            pub fn forward(
                &self,
                x: Tensor<B, 3>,
                state: Option<MixerState<B>>,
            ) -> (Tensor<B, 3>, MixerState<B>) {
                match self {
                    $(Self::$name(mixer) => {
                        let (y, state) = mixer.forward(x, state.map(Into::into));
                        (y, state.into())
                    })+
                }
            }

            /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
            /// # Panics
            /// If `state` is another kind of mixer's.
            pub fn step(
                &self,
                x: Tensor<B, 2>,
                state: Option<MixerState<B>>,
            ) -> (Tensor<B, 2>, MixerState<B>) {
                match self {
                    $(Self::$name(mixer) => {
                        let (y, state) = mixer.step(x, state.map(Into::into));
                        (y, state.into())
                    })+
                }
            }
        }
    };
}

mixers! {
    /// Linear attention.
    "linear_attention" LinearAttention(LinearAttentionConfig);
    /// RetNet's multi-scale retention.
    "retnet" RetNet(RetNetConfig);
    /// Lightning attention.
    "lightning_attention" LightningAttention(LightningAttentionConfig);
    /// YOCO's gated retention.
    "gated_retention" GatedRetention(GatedRetentionConfig);
    /// Mamba-2 as state-space duality.
    "mamba2" Mamba2(Mamba2Config);
    /// mLSTM.
    "mlstm" Mlstm(MlstmConfig);
    /// Gated linear attention.
    "gla" Gla(GlaConfig);
    /// HGRN2.
    "hgrn2" Hgrn2(Hgrn2Config);
    /// MetaLA.
    "metala" MetaLa(MetaLaConfig);
    /// RWKV-6.
    "rwkv6" Rwkv6(Rwkv6Config);
    /// Gated slot attention.
    "gsa" Gsa(GsaConfig);
    /// DeltaNet.
    "deltanet" DeltaNet(DeltaNetConfig);
    /// Gated DeltaNet.
    "gated_deltanet" GatedDeltaNet(GatedDeltaNetConfig);
    /// DeltaProduct.
    "deltaproduct" DeltaProduct(DeltaProductConfig);
    /// Kimi Delta Attention.
    "kda" Kda(KdaConfig);
    /// Comba.
    "comba" Comba(CombaConfig);
    /// Longhorn.
    "longhorn" Longhorn(LonghornConfig);
    /// Gated DeltaNet-2.
    "gated_deltanet2" GatedDeltaNet2(GatedDeltaNet2Config);
    /// RWKV-7's time mix.
    "rwkv7" Rwkv7(Rwkv7Config);
    /// Zoology's gated short convolution.
    "base_conv" BaseConv(BaseConvConfig);
    /// Softmax attention, the reference.
    "attention" Attention(AttentionConfig);
    /// Forgetting attention.
    "forgetting_attention" ForgettingAttention(ForgettingAttentionConfig);
}

impl<B: Backend> Mixer<B> {
    /// Whether what it gives depends on the tokens before through its tensors alone, and not on how many
    /// they were. The tensors then keep their size, and sequences of different lengths can go on in
    /// one batch. A mixer that is not listed is taken to count.
    pub fn ignores_position(&self) -> bool {
        matches!(
            self,
            Self::LightningAttention(_)
                | Self::Mamba2(_)
                | Self::Mlstm(_)
                | Self::Gla(_)
                | Self::Hgrn2(_)
                | Self::MetaLa(_)
                | Self::Rwkv6(_)
                | Self::Gsa(_)
                | Self::DeltaNet(_)
                | Self::GatedDeltaNet(_)
                | Self::DeltaProduct(_)
                | Self::Kda(_)
                | Self::Comba(_)
                | Self::Longhorn(_)
                | Self::GatedDeltaNet2(_)
                | Self::Rwkv7(_)
                | Self::BaseConv(_)
        )
    }
}
