//! One layer of a model: a mixer, then an MLP, each with a norm before and a residual around.

use super::layers::{Norm, NormKind, linear, shift_tokens};
use super::mixers::{Mixer, MixerConfig, MixerState};
use super::{ConfigError, Cost, positive};
use crate::ops::LinearAttentionBackend;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{relu, silu};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// What a layer is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// How many such layers stand in a row.
    #[serde(default = "one")]
    pub repeat: usize,
    /// The token mixer.
    pub mixer: MixerConfig,
    /// What comes after it.
    #[serde(default)]
    pub mlp: MlpConfig,
}

fn one() -> usize {
    1
}

/// What comes after the mixer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MlpConfig {
    /// Nothing.
    #[default]
    None,
    /// The norm alone, added to the residual: what an MLP of identity amounts to.
    Identity,
    /// `(silu(x W_gate) * x W_up) W_down`.
    Swiglu(SwiGluConfig),
    /// RWKV-7's channel mix, `relu((x + (x_before - x) mu) W_key)^2 W_value`.
    Rwkv7(Rwkv7MlpConfig),
}

/// SwiGLU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SwiGluConfig {
    /// Inner width; by default 8/3 of d_model, rounded up to a multiple of 8.
    pub width: Option<usize>,
}

impl SwiGluConfig {
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("width", self.width.unwrap_or((8 * d_model).div_ceil(3).next_multiple_of(8)))
            .map_err(|e| e.within("swiglu"))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<SwiGlu<B>, ConfigError> {
        let width = self.width(d_model)?;
        Ok(SwiGlu {
            gate_proj: linear(d_model, width, device),
            up_proj: linear(d_model, width, device),
            down_proj: linear(width, d_model, device),
        })
    }
}

/// `(silu(x W_gate) * x W_up) W_down`. Source: Shazeer, arXiv 2002.05202.
#[derive(Module, Debug)]
pub struct SwiGlu<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> SwiGlu<B> {
    /// Token by token, over the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let gate = silu(self.gate_proj.forward(x.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(x))
    }
}

/// RWKV-7's channel mix.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7MlpConfig {
    /// Inner width; by default 4 d_model.
    pub width: Option<usize>,
}

impl Rwkv7MlpConfig {
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("width", self.width.unwrap_or(4 * d_model)).map_err(|e| e.within("rwkv7"))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Rwkv7Mlp<B>, ConfigError> {
        let width = self.width(d_model)?;
        // From the token before alone in the first channel, to hardly any of it in the last.
        let shares: Vec<f32> = (0..d_model).map(|n| 1.0 - n as f32 / d_model as f32).collect();
        let shares = Tensor::<B, 1>::from_data(TensorData::new(shares, [d_model]), device);
        Ok(Rwkv7Mlp {
            x_k: Param::from_tensor(shares),
            key: linear(d_model, width, device),
            down_proj: linear(width, d_model, device),
        })
    }
}

/// RWKV-7's channel mix: `relu((x + (x_before - x) mu) W_key)^2 W_value`, where `W_value` is
/// `down_proj`. Source: arXiv 2503.14456.
#[derive(Module, Debug)]
pub struct Rwkv7Mlp<B: Backend> {
    x_k: Param<Tensor<B, 1>>,
    key: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> Rwkv7Mlp<B> {
    /// `x`: `[B, T, D]`, and the token before it, `[B, 1, D]`. Gives `[B, T, D]` and the last token.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        last: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (before, last) = shift_tokens(&x, last);
        let mixed = x.clone() + (before - x) * self.x_k.val().unsqueeze::<3>();
        let hidden = relu(self.key.forward(mixed));
        (self.down_proj.forward(hidden.clone() * hidden), last)
    }
}

/// Any MLP, with the norm before it.
#[allow(clippy::large_enum_variant)] // a model holds a few
#[derive(Module, Debug)]
pub enum Mlp<B: Backend> {
    /// The norm alone.
    Identity(Norm<B>),
    /// The norm, then SwiGLU.
    SwiGlu((Norm<B>, SwiGlu<B>)),
    /// The norm, then RWKV-7's channel mix.
    Rwkv7((Norm<B>, Rwkv7Mlp<B>)),
}

impl<B: Backend> Mlp<B> {
    /// What is added to the residual, `[B, T, D]`, and the last token where the next one sees it.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        last: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        match self {
            Mlp::Identity(norm) => (norm.forward(x), None),
            Mlp::SwiGlu((norm, mlp)) => (mlp.forward(norm.forward(x)), None),
            Mlp::Rwkv7((norm, mlp)) => {
                let (y, last) = mlp.forward(norm.forward(x), last);
                (y, Some(last))
            }
        }
    }
}

/// What a layer keeps between tokens.
#[derive(Debug, Clone)]
pub struct BlockState<B: Backend> {
    /// The mixer's.
    pub mixer: MixerState<B>,
    /// The last token that the MLP saw, `[B, 1, D]`, if it mixes tokens.
    pub mlp: Option<Tensor<B, 3>>,
}

impl<B: Backend> BlockState<B> {
    fn parts(state: Option<Self>) -> (Option<MixerState<B>>, Option<Tensor<B, 3>>) {
        match state {
            Some(state) => (Some(state.mixer), state.mlp),
            None => (None, None),
        }
    }
}

/// A mixer and an MLP, each with a norm before and a residual around. `D -> D`.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    attn_norm: Norm<B>,
    attn: Mixer<B>,
    mlp: Option<Mlp<B>>,
}

impl LayerConfig {
    /// Builds one such layer (`repeat` is the model's affair).
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: LinearAttentionBackend>(
        &self,
        d_model: usize,
        norm: NormKind,
        norm_eps: f64,
        device: &B::Device,
    ) -> Result<Block<B>, ConfigError> {
        let new_norm = || Norm::new(norm, d_model, norm_eps, device);
        Ok(Block {
            attn_norm: new_norm(),
            attn: self.mixer.init(d_model, device).map_err(|e| e.within("mixer"))?,
            mlp: match &self.mlp {
                MlpConfig::None => None,
                MlpConfig::Identity => Some(Mlp::Identity(new_norm())),
                MlpConfig::Swiglu(config) => {
                    let mlp = config.init(d_model, device).map_err(|e| e.within("mlp"))?;
                    Some(Mlp::SwiGlu((new_norm(), mlp)))
                }
                MlpConfig::Rwkv7(config) => {
                    let mlp = config.init(d_model, device).map_err(|e| e.within("mlp"))?;
                    Some(Mlp::Rwkv7((new_norm(), mlp)))
                }
            },
        })
    }

    /// What one such layer costs.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let mut cost = self.mixer.cost(d_model, length).map_err(|e| e.within("mixer"))?;
        match &self.mlp {
            MlpConfig::None | MlpConfig::Identity => {}
            MlpConfig::Swiglu(config) => {
                let width = config.width(d_model).map_err(|e| e.within("mlp"))?;
                cost.flops_per_token += 3 * 2 * d_model as u64 * width as u64;
            }
            MlpConfig::Rwkv7(config) => {
                let width = config.width(d_model).map_err(|e| e.within("mlp"))?;
                cost.flops_per_token += 2 * 2 * d_model as u64 * width as u64;
                cost.state_bytes += 4 * d_model as u64;
            }
        }
        Ok(cost)
    }
}

impl<B: LinearAttentionBackend> Block<B> {
    /// Its mixer.
    pub fn mixer(&self) -> &Mixer<B> {
        &self.attn
    }

    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T.
    /// # Panics
    /// If `state` is another kind of mixer's.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<BlockState<B>>,
    ) -> (Tensor<B, 3>, BlockState<B>) {
        let (mixer, last) = BlockState::parts(state);
        let (y, mixer) = self.attn.forward(self.attn_norm.forward(x.clone()), mixer);
        let (y, mlp) = self.after_mixer(x + y, last);
        (y, BlockState { mixer, mlp })
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
    /// # Panics
    /// If `state` is another kind of mixer's.
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<BlockState<B>>,
    ) -> (Tensor<B, 2>, BlockState<B>) {
        let (mixer, last) = BlockState::parts(state);
        let (y, mixer) = self.attn.step(self.attn_norm.forward(x.clone()), mixer);
        let (y, mlp) = self.after_mixer((x + y).unsqueeze_dim(1), last);
        (y.squeeze_dim(1), BlockState { mixer, mlp })
    }

    fn after_mixer(
        &self,
        x: Tensor<B, 3>,
        last: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        match &self.mlp {
            Some(mlp) => {
                let (y, last) = mlp.forward(x.clone(), last);
                (x + y, last)
            }
            None => (x, None),
        }
    }
}
