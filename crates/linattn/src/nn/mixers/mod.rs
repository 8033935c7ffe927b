//! Token mixers: the part of a layer that looks back.
//!
//! A mixer is one file here, and one line in the list at the end of this one.

// Of any mixer a model holds a few, whose tensors are on the heap already.
#![allow(clippy::large_enum_variant)]

mod aft;
mod atlas;
mod attention;
mod attention_config;
mod base_conv;
mod comba;
mod cross_attention;
mod cyfa;
mod decaying_fast_weights;
mod delta_net;
mod delta_product;
mod deltaformer;
mod forgetting_attention;
mod gated_delta_net;
mod gated_delta_net_2;
mod gated_kalmanet;
mod gated_retention;
mod gateloop;
mod gau;
mod gla;
mod goru;
mod gru;
mod gsa;
mod h3;
mod hgrn;
mod hgrn2;
mod hyena;
mod kda;
mod lact;
mod lightning_attention;
mod linear_attention;
mod log_linear_attention;
mod longhorn;
mod lru;
mod lstm;
mod mamba;
mod mamba2;
mod mamba3;
mod mesa_net;
mod metala;
mod mla;
mod mlstm;
mod mlstm_v1;
mod path_attention;
mod pooling;
mod qrnn;
mod retnet;
mod rg_lru;
mod rwkv4;
mod rwkv6;
mod rwkv7;
mod rwkv7_parts;
mod s4;
mod s4d;
mod sizes;
mod slstm;
mod state;
mod titans;
mod token_mixer;
mod token_mlp;
mod ttt;
mod varlen;
mod window_attention;

pub use aft::{Aft, AftConfig, AftForm, AftState};
pub use atlas::{Atlas, AtlasConfig};
pub use attention::Attention;
pub use attention_config::{AttentionConfig, QkNormSpan};
pub use base_conv::{BaseConv, BaseConvConfig};
pub use comba::{Comba, CombaConfig};
pub use cross_attention::{CrossAttention, CrossAttentionConfig, NoState};
pub use cyfa::{CyFa, CyFaConfig};
pub use decaying_fast_weights::{DecayingFastWeights, DecayingFastWeightsConfig};
pub use delta_net::{DeltaNet, DeltaNetConfig};
pub use delta_product::{DeltaProduct, DeltaProductConfig};
pub use deltaformer::{DeltaFormer, DeltaFormerConfig};
pub use forgetting_attention::{ForgettingAttention, ForgettingAttentionConfig, ForgettingCache};
pub use gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig};
pub use gated_delta_net_2::{GatedDeltaNet2, GatedDeltaNet2Config};
pub use gated_kalmanet::{GatedKalmaNet, GatedKalmaNetConfig};
pub use gated_retention::{GatedRetention, GatedRetentionConfig};
pub use gateloop::{GateLoop, GateLoopConfig};
pub use gau::{Gau, GauConfig};
pub use gla::{Gla, GlaConfig};
pub use goru::{Goru, GoruConfig};
pub use gru::{Gru, GruConfig};
pub use gsa::{Gsa, GsaConfig, SlotState};
pub use h3::{H3, H3Config};
pub use hgrn::{Hgrn, HgrnConfig};
pub use hgrn2::{Hgrn2, Hgrn2Config};
pub use hyena::{Hyena, HyenaConfig, MultiheadHyena, MultiheadHyenaConfig};
pub use kda::{Kda, KdaConfig};
pub use lact::{Lact, LactConfig};
pub use lightning_attention::{LightningAttention, LightningAttentionConfig};
pub use linear_attention::{LinearAttention, LinearAttentionConfig, OutputNorm};
pub use log_linear_attention::{LogLinearAttention, LogLinearAttentionConfig};
pub use longhorn::{Longhorn, LonghornConfig};
pub use lru::{Lru, LruConfig};
pub use lstm::{Lstm, LstmConfig};
pub use mamba::{Mamba, MambaConfig};
pub use mamba2::{Mamba2, Mamba2Config};
pub use mamba3::{Mamba3, Mamba3Config};
pub use mesa_net::{MesaNet, MesaNetConfig};
pub use metala::{MetaLa, MetaLaConfig};
pub use mla::{LatentCache, Mla, MlaConfig};
pub use mlstm::{Mlstm, MlstmConfig};
pub use mlstm_v1::{MlstmV1, MlstmV1Config};
pub use path_attention::{PathAttention, PathAttentionConfig};
pub use pooling::{Pooling, PoolingConfig};
pub use qrnn::{Qrnn, QrnnConfig};
pub use retnet::{RetNet, RetNetConfig};
pub use rg_lru::{RgLru, RgLruConfig};
pub use rwkv4::{Rwkv4, Rwkv4Config};
pub use rwkv6::{Rwkv6, Rwkv6Config};
pub use rwkv7::{Rwkv7, Rwkv7Config};
pub use rwkv7_parts::LowRankMap;
pub use s4::{S4, S4Config};
pub use s4d::{S4d, S4dConfig};
pub use slstm::{Slstm, SlstmConfig};
pub use state::MatrixState;
pub use titans::{Titans, TitansConfig};
pub use token_mixer::{Stack, TokenMixer};
pub use token_mlp::{PositionLayer, TokenMlp, TokenMlpConfig};
pub use ttt::{Ttt, TttConfig};
pub use window_attention::{WindowAttention, WindowAttentionConfig};

pub use super::FeatureMap;
pub use super::diagonal_ssm::Spectrum;
pub use super::fast_weights::InnerModel;
pub use super::lengths::Varlen;
pub use super::long_filter::ConvolutionState;
pub use super::reflections::PathCache;
pub use super::score_bias::ContextualPositions;
pub use super::softmax::KeyValueCache;
pub use super::state::{NetworkState, VectorState};
pub use super::swiglu_memory::LactState;
use super::{ConfigError, Cost, RecurrentState, Shared, StateTensors};
pub use crate::ops::Discretization;
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};
use sizes::{
    Widths, block_width, check_divisor, check_groups, check_heads, expanded_heads, half_key_width,
    head_widths, key_width, linear_flops, memory_cost, recurrent_width, scan_cost, value_width,
};
use state::{MatrixPast, VectorPast};

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

            /// That of a mixer which keeps nothing.
            pub(in crate::nn) fn nothing() -> Self {
                NoState::default().into()
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
    /// Keys and values whose bias is learnt, and sums of the others.
    Aft(AftState);
    /// Keys and values so far, and how much of each is left.
    Forgetting(ForgettingCache);
    /// Latents so far, from which keys and values are made.
    Latents(LatentCache);
    /// Reflected keys, and values, so far.
    Path(PathCache);
    /// The last few inputs, or all of them.
    Inputs(ConvolutionState);
    /// Weights of a network, and what goes with them.
    Network(NetworkState);
    /// The same, and keys and values in a window.
    Lact(LactState);
    /// Nothing of its own.
    Nothing(NoState);
    /// Vectors of fixed size.
    Vector(VectorState);
}

macro_rules! mixers {
    ($($(#[$doc:meta])* $key:literal $name:ident($config:ident);)+) => {
        /// Which mixer, by its name in a config.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        pub enum MixerConfig {
            /// None: a layer of an MLP alone.
            #[serde(rename = "none")]
            None,
            $($(#[$doc])* #[serde(rename = $key)] $name($config),)+
        }

        impl MixerConfig {
            /// Names of the mixers that a config may use.
            pub const NAMES: &'static [&'static str] = &[$($key),+];

            /// Its name in a config.
            pub fn name(&self) -> &'static str {
                match self { Self::None => "none", $(Self::$name(_) => $key,)+ }
            }

            /// Checks every key, in a model of width `d_model`.
            /// # Errors
            /// [`ConfigError`] names the first key that does not fit.
            pub fn check(&self, d_model: usize) -> Result<(), ConfigError> {
                match self {
                    Self::None => Ok(()),
                    $(Self::$name(config) => {
                        config.resolve(d_model).map(drop).map_err(|e| e.within($key))
                    })+
                }
            }

            /// Builds the mixer for a model of width `d_model`.
            /// # Errors
            /// As [`check`](Self::check); and where there is none to be built.
            pub fn init<B: LinearAttentionBackend>(
                &self,
                d_model: usize,
                device: &B::Device,
            ) -> Result<Mixer<B>, ConfigError> {
                match self {
                    Self::None => Err(ConfigError::new("mixer", "none", "a mixer")),
                    $(Self::$name(config) => config
                        .init(d_model, device)
                        .map(|mixer| Mixer::$name(crate::nn::Erased::from(mixer)))
                        .map_err(|e| e.within($key)),)+
                }
            }

            /// Cost in a model of width `d_model`, over sequences of `length` tokens.
            /// # Errors
            /// As [`init`](Self::init).
            pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
                match self {
                    Self::None => Ok(Cost::default()),
                    $(Self::$name(config) => {
                        config.cost(d_model, length).map_err(|e| e.within($key))
                    })+
                }
            }
        }

        /// Any mixer.
        #[derive(Module, Debug)]
        pub enum Mixer<B: Backend> {
            $($(#[$doc])* $name(crate::nn::Erased<$name<B>>),)+
        }

        impl<B: LinearAttentionBackend> Mixer<B> {
            /// Whether the state has a fixed size and no count of tokens: the output depends on the tokens before
            /// through the state's tensors alone. Sequences of different lengths can then go on in one batch.
            pub fn fixed_size_state(&self) -> bool {
                match self { $(Self::$name(mixer) => !mixer.counts_tokens(),)+ }
            }

            /// Whether it takes sequences of different lengths in one row, and also their states where
            /// `with_states` says so.
            /// # Errors
            /// [`LengthsError`](crate::nn::LengthsError) with its name, and what would be accepted.
            pub fn check_varlen(&self, with_states: bool) -> Result<(), crate::nn::LengthsError> {
                use crate::nn::mixers::token_mixer::check;
                match self { $(Self::$name(mixer) => check(&**mixer, $key, with_states),)+ }
            }

            /// How many positions it has learnt, where it has: no sequence may be longer.
            pub fn positions(&self) -> Option<usize> {
                match self { $(Self::$name(mixer) => mixer.positions(),)+ }
            }

            /// Whether it takes activations of 16 bits beside weights of 32. The others work in the type of
            /// their weights.
            pub fn takes_bf16(&self) -> bool {
                match self { $(Self::$name(_) => <$name<B> as TokenMixer<B>>::TAKES_BF16,)+ }
            }

            /// Whether its linear layers start on a scale of their own.
            pub(in crate::nn) fn scales_itself(&self) -> bool {
                match self { $(Self::$name(_) => <$name<B> as TokenMixer<B>>::SCALES_ITSELF,)+ }
            }

            /// Factor of the weights that write to the residual stream.
            pub(in crate::nn) fn shrink(&self, stack: Stack) -> f64 {
                match self { $(Self::$name(_) => <$name<B> as TokenMixer<B>>::shrink(stack),)+ }
            }

            /// One or more tokens: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. Tensors
            /// that layers read of one another come and go by `shared`.
            /// # Panics
            /// If `state` is another kind of mixer's, or `shared` lacks a tensor that the mixer reads.
            pub fn forward_shared(
                &self,
                x: Tensor<B, 3>,
                state: Option<MixerState<B>>,
                shared: &mut Shared<B>,
            ) -> (Tensor<B, 3>, MixerState<B>) {
                self.forward_input(&mut crate::nn::MixerInput::of(x), state, shared)
            }

            /// As [`forward_shared`](Self::forward_shared), of an input whose norm may be still to come.
            pub(crate) fn forward_input(
                &self,
                x: &mut crate::nn::MixerInput<'_, B>,
                state: Option<MixerState<B>>,
                shared: &mut Shared<B>,
            ) -> (Tensor<B, 3>, MixerState<B>) {
                match self {
                    $(Self::$name(mixer) => {
                        let state = state.map(Into::into);
                        let (y, state) = crate::nn::mixers::token_mixer::run(&**mixer, x, state, shared);
                        (y, state.map_or_else(MixerState::nothing, Into::into))
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
                let (y, state) = self.forward(x.unsqueeze_dim(1), state);
                (y.squeeze_dim(1), state)
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
    /// Log-linear attention.
    "log_linear_attention" LogLinearAttention(LogLinearAttentionConfig);
    /// Mamba-2 as state-space duality.
    "mamba2" Mamba2(Mamba2Config);
    /// Mamba-3.
    "mamba3" Mamba3(Mamba3Config);
    /// mLSTM.
    "mlstm" Mlstm(MlstmConfig);
    /// mLSTM in the block of the first xLSTM.
    "mlstm_v1" MlstmV1(MlstmV1Config);
    /// Gated linear attention.
    "gla" Gla(GlaConfig);
    /// HGRN2.
    "hgrn2" Hgrn2(Hgrn2Config);
    /// MetaLA.
    "metala" MetaLa(MetaLaConfig);
    /// RWKV-6.
    "rwkv6" Rwkv6(Rwkv6Config);
    /// Decaying fast weights.
    "decaying_fast_weights" DecayingFastWeights(DecayingFastWeightsConfig);
    /// GateLoop.
    "gateloop" GateLoop(GateLoopConfig);
    /// Gated slot attention.
    "gsa" Gsa(GsaConfig);
    /// Cyclic flow attention.
    "cyfa" CyFa(CyFaConfig);
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
    /// MesaNet.
    "mesa_net" MesaNet(MesaNetConfig);
    /// Gated KalmaNet.
    "gated_kalmanet" GatedKalmaNet(GatedKalmaNetConfig);
    /// HGRN.
    "hgrn" Hgrn(HgrnConfig);
    /// Griffin's real-gated linear recurrent unit.
    "rg_lru" RgLru(RgLruConfig);
    /// The linear recurrent unit.
    "lru" Lru(LruConfig);
    /// S4, a diagonal and low-rank state-space model.
    "s4" S4(S4Config);
    /// S4D, a diagonal state-space model.
    "s4d" S4d(S4dConfig);
    /// Mamba's selective state-space model.
    "mamba" Mamba(MambaConfig);
    /// The quasi-recurrent network.
    "qrnn" Qrnn(QrnnConfig);
    /// RWKV-4's time mix.
    "rwkv4" Rwkv4(Rwkv4Config);
    /// Attention Free Transformer.
    "aft" Aft(AftConfig);
    /// LSTM, one token after another.
    "lstm" Lstm(LstmConfig);
    /// GRU, one token after another.
    "gru" Gru(GruConfig);
    /// The gated orthogonal recurrent unit, one token after another.
    "goru" Goru(GoruConfig);
    /// sLSTM, one token after another.
    "slstm" Slstm(SlstmConfig);
    /// Test-time training.
    "ttt" Ttt(TttConfig);
    /// Titans' neural memory.
    "titans" Titans(TitansConfig);
    /// Atlas.
    "atlas" Atlas(AtlasConfig);
    /// LaCT.
    "lact" Lact(LactConfig);
    /// Hyena.
    "hyena" Hyena(HyenaConfig);
    /// Multihead Hyena.
    "multihead_hyena" MultiheadHyena(MultiheadHyenaConfig);
    /// H3.
    "h3" H3(H3Config);
    /// Zoology's gated convolution.
    "base_conv" BaseConv(BaseConvConfig);
    /// Pooling.
    "pooling" Pooling(PoolingConfig);
    /// Token MLP.
    "token_mlp" TokenMlp(TokenMlpConfig);
    /// Softmax attention, the reference.
    "attention" Attention(AttentionConfig);
    /// Forgetting attention.
    "forgetting_attention" ForgettingAttention(ForgettingAttentionConfig);
    /// Attention over the keys and values of an earlier layer.
    "cross_attention" CrossAttention(CrossAttentionConfig);
    /// Multi-head latent attention.
    "mla" Mla(MlaConfig);
    /// DeltaFormer.
    "deltaformer" DeltaFormer(DeltaFormerConfig);
    /// PaTH attention.
    "path_attention" PathAttention(PathAttentionConfig);
    /// Gated attention unit.
    "gau" Gau(GauConfig);
}

#[cfg(test)]
#[cfg(feature = "cpu")]
mod guide;
