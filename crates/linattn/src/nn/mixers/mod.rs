//! Token mixers: the part of a layer that looks back.
//!
//! A mixer is one file here, and one line in the list at the end of this one.

// Of any mixer a model holds a few, whose tensors are on the heap already.
#![allow(clippy::large_enum_variant)]

/// `forward` and `step` of a mixer whose `run` does both, with the operation over whole sequences or
/// the one over a single token: so the two cannot drift apart.
macro_rules! forward_and_step {
    // Where one and the same operation runs over whole sequences and over one token.
    ($mixer:ident) => {
        impl<B: LinearAttentionBackend> $mixer<B> {
            /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T.
            pub fn forward(
                &self,
                x: Tensor<B, 3>,
                state: Option<VectorState<B>>,
            ) -> (Tensor<B, 3>, VectorState<B>) {
                self.run(x, state)
            }

            /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
            pub fn step(
                &self,
                x: Tensor<B, 2>,
                state: Option<VectorState<B>>,
            ) -> (Tensor<B, 2>, VectorState<B>) {
                let (y, state) = self.run(x.unsqueeze_dim(1), state);
                (y.squeeze_dim(1), state)
            }
        }
    };
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
mod cross_attention;
mod decaying_fast_weights;
mod delta_net;
mod delta_product;
mod deltaformer;
mod forgetting_attention;
mod gated_delta_net_2;
mod gated_retention;
mod gateloop;
mod gla;
mod gru;
mod gsa;
mod hgrn;
mod hgrn2;
mod kda;
mod lightning_attention;
mod linear_attention;
mod longhorn;
mod lru;
mod lstm;
mod mamba;
mod mamba2;
mod mesa_net;
mod metala;
mod mla;
mod mlstm;
mod mlstm_v1;
mod path_attention;
mod qrnn;
mod retnet;
mod rg_lru;
mod rwkv4;
mod rwkv6;
mod rwkv7;
mod s4d;
mod slstm;

pub use attention::{Attention, AttentionConfig, KeyValueCache};
pub use base_conv::{BaseConv, BaseConvConfig, ConvolutionTail};
pub use comba::{Comba, CombaConfig};
pub use cross_attention::{CrossAttention, CrossAttentionConfig, NoState};
pub use decaying_fast_weights::{DecayingFastWeights, DecayingFastWeightsConfig};
pub use delta_net::{DeltaNet, DeltaNetConfig, GatedDeltaNet, GatedDeltaNetConfig};
pub use delta_product::{DeltaProduct, DeltaProductConfig};
pub use deltaformer::{DeltaFormer, DeltaFormerConfig};
pub use forgetting_attention::{ForgettingAttention, ForgettingAttentionConfig, ForgettingCache};
pub use gated_delta_net_2::{GatedDeltaNet2, GatedDeltaNet2Config};
pub use gated_retention::{GatedRetention, GatedRetentionConfig};
pub use gateloop::{GateLoop, GateLoopConfig};
pub use gla::{Gla, GlaConfig};
pub use gru::{Gru, GruConfig};
pub use gsa::{Gsa, GsaConfig, SlotState};
pub use hgrn::{Hgrn, HgrnConfig};
pub use hgrn2::{Hgrn2, Hgrn2Config};
pub use kda::{Kda, KdaConfig};
pub use lightning_attention::{LightningAttention, LightningAttentionConfig};
pub use linear_attention::{LinearAttention, LinearAttentionConfig, OutputNorm};
pub use longhorn::{Longhorn, LonghornConfig};
pub use lru::{Lru, LruConfig};
pub use lstm::{Lstm, LstmConfig};
pub use mamba::{Mamba, MambaConfig};
pub use mamba2::{Mamba2, Mamba2Config};
pub use mesa_net::{MesaNet, MesaNetConfig};
pub use metala::{MetaLa, MetaLaConfig};
pub use mla::{LatentCache, Mla, MlaConfig};
pub use mlstm::{Mlstm, MlstmConfig};
pub use mlstm_v1::{MlstmV1, MlstmV1Config};
pub use path_attention::{PathAttention, PathAttentionConfig, PathCache};
pub use qrnn::{Qrnn, QrnnConfig};
pub use retnet::{RetNet, RetNetConfig};
pub use rg_lru::{RgLru, RgLruConfig};
pub use rwkv4::{Rwkv4, Rwkv4Config};
pub use rwkv6::{Rwkv6, Rwkv6Config};
pub use rwkv7::{LowRankMap, Rwkv7, Rwkv7Config};
pub use s4d::{Discretization, S4d, S4dConfig, Spectrum};
pub use slstm::{Slstm, SlstmConfig};

pub use super::FeatureMap;
use super::{ConfigError, Cost, RecurrentState, Shared, StateTensors};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// State of a mixer with a matrix memory between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct MatrixState<B: Backend> {
    /// `[B, H, K, V]`.
    pub memory: Tensor<B, 4>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, in the order of the layer's
    /// fields; then what else a mixer needs of its last token: RWKV-6 and RWKV-7 the token itself, `[B, 1, D]`,
    /// mLSTM its running maximum, `[B, 1, H]`, GateLoop its angles, `[B, 1, H K / 2]`. Empty where there is
    /// nothing of the kind.
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

/// State of a mixer with a memory of vectors between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct VectorState<B: Backend> {
    /// Vectors, `[B, 1, channels]`: one as a rule; real and imaginary parts; numerator and denominator
    /// over the exponential of a maximum, and that; hidden and cell state.
    pub memory: Vec<Tensor<B, 3>>,
    /// Last inputs of a convolution, `[B, W - 1, channels]`, or the last token, `[B, 1, D]`, where the
    /// next one sees it.
    pub tails: Vec<Tensor<B, 3>>,
    /// Tokens seen.
    pub position: usize,
}

impl<B: Backend> RecurrentState<B> for VectorState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_list("memory", &self.memory)
            .with_list("tails", &self.tails)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self { memory: tensors.take_list("memory"), tails: tensors.take_list("tails"), position }
    }
}

/// A state taken apart: memory and tails to draw from, position.
type VectorParts<B> = (std::vec::IntoIter<Tensor<B, 3>>, std::vec::IntoIter<Tensor<B, 3>>, usize);

impl<B: Backend> VectorState<B> {
    fn parts(state: Option<Self>) -> VectorParts<B> {
        match state {
            Some(s) => (s.memory.into_iter(), s.tails.into_iter(), s.position),
            None => (vec![].into_iter(), vec![].into_iter(), 0),
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
        /// State of any mixer between two tokens.
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
    /// Latents so far, from which keys and values are made.
    Latents(LatentCache);
    /// Reflected keys, and values, so far.
    Path(PathCache);
    /// The last few inputs.
    Tail(ConvolutionTail);
    /// Nothing of its own.
    Nothing(NoState);
    /// Vectors of fixed size.
    Vector(VectorState);
}

/// A mixer that draws the weights of its linear layers on the scale of its source, which the keys
/// `initializer` and `initializer_range` of a model then leave alone.
pub(super) struct OwnStart {
    /// Its type, as modules spell it.
    pub(super) mixer: &'static str,
    /// Factor of its output's weights in a stack of so many layers, which write to the residual stream so
    /// many times.
    pub(super) shrink: fn(layers: usize, writes: usize) -> f64,
}

impl OwnStart {
    /// All there are.
    pub(super) const ALL: &'static [Self] = &[
        Self { mixer: "Mamba", shrink: |_, writes| (writes as f64).powf(-0.5) },
        Self { mixer: "Mamba2", shrink: |_, writes| (writes as f64).powf(-0.5) },
        Self { mixer: "RgLru", shrink: |layers, _| (2.0 / layers as f64).sqrt() },
        Self { mixer: "MlstmV1", shrink: |layers, _| (layers as f64).recip() },
    ];
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

/// Widths that follow from a config.
#[derive(Debug, Clone, Copy)]
struct Widths {
    /// Value heads.
    heads: usize,
    /// Of one head.
    key: usize,
    value: usize,
    /// Of all heads.
    keys: usize,
    values: usize,
}

/// The widths of queries, keys and values, from the keys of a config that bear on them.
fn head_widths(
    heads: usize,
    value_heads: Option<usize>,
    given: Option<usize>,
    expand_v: f64,
    d_model: usize,
) -> Result<Widths, ConfigError> {
    let value_heads = check_heads(heads, value_heads)?;
    let key = key_width(given, d_model, heads)?;
    let value = value_width(key, expand_v)?;
    let (keys, values) = (heads * key, value_heads * value);
    Ok(Widths { heads: value_heads, key, value, keys, values })
}

/// State and arithmetic of a memory of `heads` matrices K x V: decay, write, read, and for a delta
/// rule the answer that is subtracted.
fn memory_cost(heads: usize, key_width: usize, value_width: usize, delta: bool) -> Cost {
    let size = (heads * key_width * value_width) as u64;
    Cost { state_bytes: 4 * size, flops_per_token: size * if delta { 7 } else { 5 } }
}

/// State and arithmetic of a linear recurrence of `channels` numbers: decay and write.
fn scan_cost(channels: usize) -> Cost {
    Cost { state_bytes: 4 * channels as u64, flops_per_token: 2 * channels as u64 }
}

/// The width of a recurrence: as given, or the model's.
fn recurrent_width(given: Option<usize>, d_model: usize) -> Result<usize, ConfigError> {
    super::positive("width", given.unwrap_or(d_model))
}

/// Width of one of `heads` blocks that `width` falls into.
fn block_width(heads: usize, width: usize) -> Result<usize, ConfigError> {
    match super::positive("width", width)?.is_multiple_of(super::positive("heads", heads)?) {
        true => Ok(width / heads),
        false => Err(ConfigError::new("heads", heads, format!("a divisor of the width, {width}"))),
    }
}

/// Multiplications and additions of a linear layer, for one token.
fn linear_flops(from: usize, to: usize) -> u64 {
    2 * from as u64 * to as u64
}

/// `forward` or `step` of a mixer. In the list below, one that is marked `shared` also takes what layers
/// share, and one that is marked `lends` leaves its keys and values to later layers. The mark
/// `ignores_position` says nothing of the call.
macro_rules! call_mixer {
    ($mixer:ident.$method:ident($x:ident, $state:ident, $shared:ident)) => {
        $mixer.$method($x, $state.map(Into::into))
    };
    ($mixer:ident.$method:ident($x:ident, $state:ident, $shared:ident) shared $($mark:ident)*) => {
        $mixer.$method($x, $state.map(Into::into), $shared)
    };
    ($mixer:ident.$method:ident($x:ident, $state:ident, $shared:ident) lends $($mark:ident)*) => {{
        let (y, state) = $mixer.$method($x, $state.map(Into::into));
        $shared.keys_values = Some(state.clone());
        (y, state)
    }};
    (
        $mixer:ident.$method:ident($x:ident, $state:ident, $shared:ident)
        ignores_position $($mark:ident)*
    ) => {
        call_mixer!($mixer.$method($x, $state, $shared) $($mark)*)
    };
    ($mixer:ident.$method:ident($x:ident, $state:ident, $shared:ident) bf16 $($mark:ident)*) => {
        call_mixer!($mixer.$method($x, $state, $shared) $($mark)*)
    };
}

/// Whether `ignores_position` is among the marks of a mixer in the list below. One that is not marked so
/// is taken to count its tokens.
macro_rules! ignores_position {
    () => {
        false
    };
    (ignores_position $($mark:ident)*) => {
        true
    };
    ($other:ident $($mark:ident)*) => {
        ignores_position!($($mark)*)
    };
}

/// Whether `bf16` is among the marks of a mixer in the list below.
macro_rules! takes_bf16 {
    () => {
        false
    };
    (bf16 $($mark:ident)*) => {
        true
    };
    ($other:ident $($mark:ident)*) => {
        takes_bf16!($($mark)*)
    };
}

macro_rules! mixers {
    ($($(#[$doc:meta])* $key:literal $name:ident($config:ident) $($mark:ident)*;)+) => {
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

            /// Cost in a model of width `d_model`, over sequences of `length` tokens.
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

        impl<B: Backend> Mixer<B> {
            /// Whether what it gives depends on the tokens before through its tensors alone, and not on
            /// how many they were. The tensors then keep their size, and sequences of different lengths
            /// can go on in one batch.
            pub fn ignores_position(&self) -> bool {
                match self { $(Self::$name(_) => ignores_position!($($mark)*),)+ }
            }
        }

        impl<B: Backend> Mixer<B> {
            /// Whether it takes activations of 16 bits beside weights of 32. The others work in the type of
            /// their weights.
            #[cfg_attr(test, allow(dead_code))] // the guide's own list, in tests, is asked by nobody
            pub fn takes_bf16(&self) -> bool {
                match self { $(Self::$name(_) => takes_bf16!($($mark)*),)+ }
            }
        }

        impl<B: LinearAttentionBackend> Mixer<B> {
            /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. What
            /// layers read of one another comes and goes by `shared`.
            /// # Panics
            /// If `state` is another kind of mixer's, or `shared` lacks what the mixer reads.
            pub fn forward_shared(
                &self,
                x: Tensor<B, 3>,
                state: Option<MixerState<B>>,
                shared: &mut Shared<B>,
            ) -> (Tensor<B, 3>, MixerState<B>) {
                match self {
                    $(Self::$name(mixer) => {
                        let (y, state) = call_mixer!(mixer.forward(x, state, shared) $($mark)*);
                        (y, state.into())
                    })+
                }
            }

            /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
            /// # Panics
            /// As [`forward_shared`](Self::forward_shared).
            pub fn step_shared(
                &self,
                x: Tensor<B, 2>,
                state: Option<MixerState<B>>,
                shared: &mut Shared<B>,
            ) -> (Tensor<B, 2>, MixerState<B>) {
                match self {
                    $(Self::$name(mixer) => {
                        let (y, state) = call_mixer!(mixer.step(x, state, shared) $($mark)*);
                        (y, state.into())
                    })+
                }
            }

            /// Whole sequences through a mixer that reads of no other layer: `x` is `[B, T, D]`; gives
            /// `[B, T, D]` and the state after token T.
            /// # Panics
            /// If `state` is another kind of mixer's, or the mixer does read of another layer.
            pub fn forward(
                &self,
                x: Tensor<B, 3>,
                state: Option<MixerState<B>>,
            ) -> (Tensor<B, 3>, MixerState<B>) {
                self.forward_shared(x, state, &mut Shared::default())
            }

            /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
            /// # Panics
            /// As [`forward`](Self::forward).
            pub fn step(
                &self,
                x: Tensor<B, 2>,
                state: Option<MixerState<B>>,
            ) -> (Tensor<B, 2>, MixerState<B>) {
                self.step_shared(x, state, &mut Shared::default())
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
    "lightning_attention" LightningAttention(LightningAttentionConfig) ignores_position;
    /// YOCO's gated retention.
    "gated_retention" GatedRetention(GatedRetentionConfig);
    /// Mamba-2 as state-space duality.
    "mamba2" Mamba2(Mamba2Config) ignores_position;
    /// mLSTM.
    "mlstm" Mlstm(MlstmConfig) ignores_position;
    /// mLSTM in the block of the first xLSTM.
    "mlstm_v1" MlstmV1(MlstmV1Config) ignores_position;
    /// Gated linear attention.
    "gla" Gla(GlaConfig) ignores_position;
    /// HGRN2.
    "hgrn2" Hgrn2(Hgrn2Config) ignores_position;
    /// MetaLA.
    "metala" MetaLa(MetaLaConfig) ignores_position;
    /// RWKV-6.
    "rwkv6" Rwkv6(Rwkv6Config) ignores_position;
    /// Decaying fast weights.
    "decaying_fast_weights" DecayingFastWeights(DecayingFastWeightsConfig) ignores_position;
    /// GateLoop.
    "gateloop" GateLoop(GateLoopConfig) ignores_position;
    /// Gated slot attention.
    "gsa" Gsa(GsaConfig) ignores_position;
    /// DeltaNet.
    "deltanet" DeltaNet(DeltaNetConfig) ignores_position bf16;
    /// Gated DeltaNet.
    "gated_deltanet" GatedDeltaNet(GatedDeltaNetConfig) ignores_position bf16;
    /// DeltaProduct.
    "deltaproduct" DeltaProduct(DeltaProductConfig) ignores_position;
    /// Kimi Delta Attention.
    "kda" Kda(KdaConfig) ignores_position;
    /// Comba.
    "comba" Comba(CombaConfig) ignores_position;
    /// Longhorn.
    "longhorn" Longhorn(LonghornConfig) ignores_position;
    /// Gated DeltaNet-2.
    "gated_deltanet2" GatedDeltaNet2(GatedDeltaNet2Config) ignores_position;
    /// RWKV-7's time mix.
    "rwkv7" Rwkv7(Rwkv7Config) shared ignores_position;
    /// MesaNet.
    "mesa_net" MesaNet(MesaNetConfig) ignores_position;
    /// HGRN.
    "hgrn" Hgrn(HgrnConfig) ignores_position;
    /// Griffin's real-gated linear recurrent unit.
    "rg_lru" RgLru(RgLruConfig) ignores_position;
    /// The linear recurrent unit.
    "lru" Lru(LruConfig) ignores_position;
    /// S4D, a diagonal state-space model.
    "s4d" S4d(S4dConfig) ignores_position;
    /// Mamba's selective state-space model.
    "mamba" Mamba(MambaConfig) ignores_position;
    /// The quasi-recurrent network.
    "qrnn" Qrnn(QrnnConfig) ignores_position;
    /// RWKV-4's time mix.
    "rwkv4" Rwkv4(Rwkv4Config) ignores_position;
    /// LSTM, one token after another.
    "lstm" Lstm(LstmConfig) ignores_position;
    /// GRU, one token after another.
    "gru" Gru(GruConfig) ignores_position;
    /// sLSTM, one token after another.
    "slstm" Slstm(SlstmConfig) ignores_position;
    /// Zoology's gated short convolution.
    "base_conv" BaseConv(BaseConvConfig) ignores_position;
    /// Softmax attention, the reference.
    "attention" Attention(AttentionConfig) lends;
    /// Forgetting attention.
    "forgetting_attention" ForgettingAttention(ForgettingAttentionConfig);
    /// Attention over the keys and values of an earlier layer.
    "cross_attention" CrossAttention(CrossAttentionConfig) shared;
    /// Multi-head latent attention.
    "mla" Mla(MlaConfig);
    /// DeltaFormer.
    "deltaformer" DeltaFormer(DeltaFormerConfig);
    /// PaTH attention.
    "path_attention" PathAttention(PathAttentionConfig);
}

#[cfg(test)]
#[cfg(feature = "cpu")]
mod guide;
