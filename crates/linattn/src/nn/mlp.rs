//! Channel mixers: what follows the token mixer in a layer.

use super::canon::{Canon, Channels, canon};
use super::convolution::ConvPast;
use super::layers::{
    Linear, Norm, ResidualLinear, gelu_activation, linear, linear_with_bias, shift_tokens,
};
use super::projection::packed_product;
use super::weight::Weight;
use super::{ConfigError, Cost, Kept, positive};
use crate::ops::{self, GateActivation, LinearAttentionBackend, typed};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Channel mixer that follows the mixer.
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
    /// RWKV-6's: RWKV-7's times `sigmoid((x + (x_before - x) mu_r) W_receptance)`. Its width is 3.5
    /// d_model by default, rounded up to a multiple of 32.
    Rwkv6(Rwkv7MlpConfig),
    /// RWKV-4's: as RWKV-6's, 4 d_model wide by default. The paper's mu counts the share of the token
    /// itself, which is 1 less ours.
    Rwkv4(Rwkv7MlpConfig),
    /// `(gelu(x W_gate) * x W_up) W_down`.
    Geglu(SwiGluConfig),
    /// `gelu(x W_up) W_down`.
    Gelu(GeluMlpConfig),
    /// `relu(x W_up)^2 W_down`.
    Relu2(GeluMlpConfig),
}

impl MlpConfig {
    /// The inner width, and how many projections lead there; zeros without an inner part.
    pub(super) fn inner(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let (key, width, projections) = match self {
            Self::None | Self::Identity => return Ok((0, 0)),
            Self::Swiglu(config) => ("swiglu", config.width(d_model), 2),
            Self::Geglu(config) => ("geglu", config.width(d_model), 2),
            Self::Gelu(config) => ("gelu", config.width(d_model), 1),
            Self::Relu2(config) => ("relu2", config.width(d_model), 1),
            Self::Rwkv7(config) => ("rwkv7", config.width(4 * d_model), 1),
            Self::Rwkv6(config) => {
                ("rwkv6", config.width((7 * d_model / 2).next_multiple_of(32)), 1)
            }
            Self::Rwkv4(config) => ("rwkv4", config.width(4 * d_model), 1),
        };
        if let Self::Swiglu(SwiGluConfig { gelu_tanh: true, .. }) = self {
            let error = ConfigError::new("gelu_tanh", true, "left out: there is no GELU in it");
            return Err(error.within(key).within("mlp"));
        }
        Ok((width.map_err(|e| e.within(key).within("mlp"))?, projections))
    }

    /// Channels of a layer with this MLP, for Canon layers.
    pub(super) fn channels(&self, d_model: usize) -> Result<Channels, ConfigError> {
        let (width, projections) = self.inner(d_model)?;
        let takes =
            matches!(self, Self::Swiglu(_) | Self::Geglu(_) | Self::Gelu(_) | Self::Relu2(_));
        let mlp = if *self == Self::None { 0 } else { d_model };
        let inside = if takes { width } else { 0 };
        Ok(Channels { mixer: d_model, mlp, inside, projections })
    }

    pub(super) fn init<B: Backend>(
        &self,
        d_model: usize,
        new_norm: impl Fn() -> Norm<B>,
        device: &B::Device,
    ) -> Result<Option<Mlp<B>>, ConfigError> {
        let (width, _) = self.inner(d_model)?;
        Ok(match self {
            Self::None => None,
            Self::Identity => Some(Mlp::Identity(new_norm())),
            Self::Swiglu(config) => {
                let mlp = SwiGlu::new(d_model, width, GateActivation::Silu, config.bias, device);
                Some(Mlp::SwiGlu((new_norm(), mlp)))
            }
            Self::Geglu(config) => {
                let activation = gelu_activation(config.gelu_tanh);
                let mlp = SwiGlu::new(d_model, width, activation, config.bias, device);
                Some(Mlp::SwiGlu((new_norm(), mlp)))
            }
            Self::Rwkv7(_) => Some(Mlp::Rwkv7((new_norm(), Rwkv7Mlp::new(d_model, width, device)))),
            Self::Rwkv6(_) | Self::Rwkv4(_) => {
                Some(Mlp::Rwkv6((new_norm(), Rwkv6Mlp::new(d_model, width, device))))
            }
            Self::Gelu(config) => {
                let mlp = GeluMlp::new(d_model, width, GateActivation::Gelu, config.bias, device);
                Some(Mlp::Gelu((new_norm(), mlp)))
            }
            Self::Relu2(config) => {
                let activation = GateActivation::SquaredRelu;
                let mlp = GeluMlp::new(d_model, width, activation, config.bias, device);
                Some(Mlp::Gelu((new_norm(), mlp)))
            }
        })
    }

    pub(super) fn cost(&self, d_model: usize) -> Result<Cost, ConfigError> {
        let (width, projections) = self.inner(d_model)?;
        let (model, width) = (d_model as u64, width as u64);
        let products = 2 * model * width * (projections as u64 + u64::from(projections > 0));
        let (receptance, conv_state) = match self {
            Self::Rwkv4(_) | Self::Rwkv6(_) => (2 * model * model, 4 * model),
            Self::Rwkv7(_) => (0, 4 * model),
            _ => (0, 0),
        };
        Ok(Cost { state_bytes: conv_state, flops_per_token: products + receptance })
    }
}

/// SwiGLU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SwiGluConfig {
    /// Inner width; by default 8/3 of d_model, rounded up to a multiple of 8.
    pub width: Option<usize>,
    /// Whether all three layers have a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
    /// Whether GELU is its approximation by a tanh; of GEGLU alone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gelu_tanh: bool,
}

impl SwiGluConfig {
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("width", self.width.unwrap_or((8 * d_model).div_ceil(3).next_multiple_of(8)))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<SwiGlu<B>, ConfigError> {
        Ok(SwiGlu::new(d_model, self.width(d_model)?, GateActivation::Silu, self.bias, device))
    }
}

/// `(silu(x W_gate) * x W_up) W_down`, or GELU in place of SiLU: GEGLU. Input and output are `[.., D]`, of
/// any rank. Source: Shazeer, arXiv 2002.05202.
#[derive(Module, Debug)]
pub struct SwiGlu<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: ResidualLinear<B>,
    #[module(skip)]
    activation: GateActivation,
}

impl<B: Backend> SwiGlu<B> {
    fn new(
        d_model: usize,
        width: usize,
        activation: GateActivation,
        bias: bool,
        device: &B::Device,
    ) -> Self {
        Self {
            gate_proj: maybe_biased(d_model, width, bias, device),
            up_proj: maybe_biased(d_model, width, bias, device),
            down_proj: maybe_biased(width, d_model, bias, device).into(),
            activation,
        }
    }
}

fn maybe_biased<B: Backend>(from: usize, to: usize, bias: bool, device: &B::Device) -> Linear<B> {
    match bias {
        true => linear_with_bias(from, to, device),
        false => linear(from, to, device),
    }
}

impl<B: LinearAttentionBackend> SwiGlu<B> {
    /// Token by token, over the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.through(x, |x, _| x)
    }

    /// As [`forward`](Self::forward), with `canon` after each of the two inner projections.
    fn through<const D: usize>(
        &self,
        x: Tensor<B, D>,
        mut canon: impl FnMut(Tensor<B, D>, Kept) -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        let gate = canon(self.gate_proj.forward(x.clone()), Kept::CanonGate);
        let up = canon(self.up_proj.forward(x), Kept::CanonUp);
        self.down_proj.forward(ops::gate(up, gate, self.activation))
    }

    /// What is added to the stream `x + addend`, and that stream, of a token or two: the norm and this in two launches,
    /// or three where the second product refuses. Nothing where a backend has no such products, or more operations
    /// are faster.
    fn folded(
        &self,
        norm: &Norm<B>,
        x: &Tensor<B, 3>,
        addend: Option<&Tensor<B, 3>>,
    ) -> Option<(Tensor<B, 3>, Tensor<B, 3>)> {
        let Norm::Rms(norm) = norm else { return None };
        let inner = [self.gate_proj.weight_alone()?, self.up_proj.weight_alone()?];
        let down = Weight::side_by_side(&[self.down_proj.weight_alone()?])?;
        let norm = (norm.gamma.val(), norm.epsilon);
        let inner = Weight::side_by_side(&inner)?;
        let (both, sum) = ops::normalized_linear(x.clone(), addend.cloned(), norm, inner)?;
        let y = ops::gated_linear(both.clone(), self.activation, down);
        let apart = || self.down_proj.forward(ops::gated_halves(both, self.activation));
        Some((y.unwrap_or_else(apart), sum))
    }

    /// As [`forward`](Self::forward), gate and value by one product; nothing where that is another operation, or
    /// slower.
    fn packed(&self, x: &Tensor<B, 3>, canon: &Canon<B>) -> Option<Tensor<B, 3>> {
        if !canon.inside_mlp.is_empty() {
            return None;
        }
        let both = packed_product(x, &[&self.gate_proj, &self.up_proj], 0)?;
        Some(self.down_proj.forward(ops::gated_halves(both, self.activation)))
    }
}

/// Two linear layers with GELU, or a squared ReLU, between them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GeluMlpConfig {
    /// Inner width; by default 4 d_model.
    pub width: Option<usize>,
    /// Whether both layers have a bias.
    pub bias: bool,
}

impl GeluMlpConfig {
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("width", self.width.unwrap_or(4 * d_model))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GeluMlp<B>, ConfigError> {
        Ok(GeluMlp::new(d_model, self.width(d_model)?, GateActivation::Gelu, self.bias, device))
    }
}

/// `gelu(x W_up) W_down`, the MLP of Vaswani et al., arXiv 1706.03762, with GELU, arXiv 1606.08415; or
/// `relu(x W_up)^2 W_down`, arXiv 2109.08668. Input and output are `[.., D]`, of any rank.
#[derive(Module, Debug)]
pub struct GeluMlp<B: Backend> {
    up_proj: Linear<B>,
    down_proj: ResidualLinear<B>,
    /// GELU, or a squared ReLU.
    #[module(skip)]
    activation: GateActivation,
}

impl<B: Backend> GeluMlp<B> {
    fn new(
        d_model: usize,
        width: usize,
        activation: GateActivation,
        bias: bool,
        device: &B::Device,
    ) -> Self {
        Self {
            up_proj: maybe_biased(d_model, width, bias, device),
            down_proj: maybe_biased(width, d_model, bias, device).into(),
            activation,
        }
    }
}

impl<B: LinearAttentionBackend> GeluMlp<B> {
    /// Token by token, over the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.through(x, |x, _| x)
    }

    /// As [`forward`](Self::forward), with `canon` after the inner projection.
    fn through<const D: usize>(
        &self,
        x: Tensor<B, D>,
        canon: impl FnOnce(Tensor<B, D>, Kept) -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        let inner = canon(self.up_proj.forward(x), Kept::CanonUp);
        self.down_proj.forward(ops::activate(inner, self.activation, 1.0))
    }
}

/// RWKV's channel mix.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7MlpConfig {
    /// Inner width; by default 4 d_model.
    pub width: Option<usize>,
}

impl Rwkv7MlpConfig {
    fn width(&self, by_default: usize) -> Result<usize, ConfigError> {
        positive("width", self.width.unwrap_or(by_default))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Rwkv7Mlp<B>, ConfigError> {
        Ok(Rwkv7Mlp::new(d_model, self.width(4 * d_model)?, device))
    }
}

/// From the token before alone in the first channel, to hardly any of it in the last: `[D]`.
fn fresh_shares<B: Backend>(d_model: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
    let shares: Vec<f32> = (0..d_model).map(|n| 1.0 - n as f32 / d_model as f32).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(shares, [d_model]), device))
}

/// RWKV-7's channel mix: `relu((x + (x_before - x) mu) W_key)^2 W_value`, where `W_value` is
/// `down_proj`. Input and output are `[B, T, D]`, and the token before, `[B, 1, D]`, is its state. Source:
/// arXiv 2503.14456.
#[derive(Module, Debug)]
pub struct Rwkv7Mlp<B: Backend> {
    x_k: Param<Tensor<B, 1>>,
    key: Linear<B>,
    down_proj: ResidualLinear<B>,
}

impl<B: Backend> Rwkv7Mlp<B> {
    fn new(d_model: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x_k: fresh_shares(d_model, device),
            key: linear(d_model, width, device),
            down_proj: linear(width, d_model, device).into(),
        }
    }
}

impl<B: LinearAttentionBackend> Rwkv7Mlp<B> {
    /// `x`: `[B, T, D]`, and the token before it, `[B, 1, D]`. Gives `[B, T, D]` and the last token.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        last: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (before, last) = shift_tokens(&x, last);
        (self.mixed(x, before), last)
    }

    /// Of each token and the one before it, `[B, T, D]` both.
    fn mixed(&self, x: Tensor<B, 3>, before: Tensor<B, 3>) -> Tensor<B, 3> {
        let back = before - x.clone();
        let share = typed(self.x_k.val(), x.dtype()).unsqueeze::<3>();
        let hidden = self.key.forward(x + back * share);
        self.down_proj.forward(ops::activate(hidden, GateActivation::SquaredRelu, 1.0))
    }
}

/// The channel mix of RWKV-4 to RWKV-6: RWKV-7's, and a gate for every channel,
/// `sigmoid((x + (x_before - x) mu_r) W_receptance)`. Shapes are [`Rwkv7Mlp`]'s. Source: arXiv 2305.13048,
/// 2404.05892.
#[derive(Module, Debug)]
pub struct Rwkv6Mlp<B: Backend> {
    x_k: Param<Tensor<B, 1>>,
    x_r: Param<Tensor<B, 1>>,
    key: Linear<B>,
    receptance: Linear<B>,
    down_proj: ResidualLinear<B>,
}

impl<B: Backend> Rwkv6Mlp<B> {
    fn new(d_model: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x_k: fresh_shares(d_model, device),
            x_r: fresh_shares(d_model, device),
            key: linear(d_model, width, device),
            receptance: linear(d_model, d_model, device),
            down_proj: linear(width, d_model, device).into(),
        }
    }
}

impl<B: LinearAttentionBackend> Rwkv6Mlp<B> {
    /// `x`: `[B, T, D]`, and the token before it, `[B, 1, D]`. Gives `[B, T, D]` and the last token.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        last: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (before, last) = shift_tokens(&x, last);
        (self.mixed(x, before), last)
    }

    /// Of each token and the one before it, `[B, T, D]` both.
    fn mixed(&self, x: Tensor<B, 3>, before: Tensor<B, 3>) -> Tensor<B, 3> {
        let back = before - x.clone();
        let mixed = |share: &Param<Tensor<B, 1>>| {
            x.clone() + back.clone() * typed(share.val(), x.dtype()).unsqueeze::<3>()
        };
        let gate = self.receptance.forward(mixed(&self.x_r));
        let hidden = self.key.forward(mixed(&self.x_k));
        let hidden = ops::activate(hidden, GateActivation::SquaredRelu, 1.0);
        ops::gate(self.down_proj.forward(hidden), gate, GateActivation::Sigmoid)
    }
}

/// Any MLP, with the norm before it.
#[allow(clippy::large_enum_variant)] // a model holds a few
#[derive(Module, Debug)]
pub enum Mlp<B: Backend> {
    /// The norm alone.
    Identity(Norm<B>),
    /// The norm, then SwiGLU or GEGLU.
    SwiGlu((Norm<B>, SwiGlu<B>)),
    /// The norm, then RWKV-7's channel mix.
    Rwkv7((Norm<B>, Rwkv7Mlp<B>)),
    /// The norm, then RWKV-6's or RWKV-4's channel mix.
    Rwkv6((Norm<B>, Rwkv6Mlp<B>)),
    /// The norm, then two linear layers.
    Gelu((Norm<B>, GeluMlp<B>)),
}

impl<B: Backend> Mlp<B> {
    pub(super) fn norm(&self) -> &Norm<B> {
        match self {
            Mlp::Identity(norm)
            | Mlp::SwiGlu((norm, _))
            | Mlp::Rwkv7((norm, _))
            | Mlp::Rwkv6((norm, _))
            | Mlp::Gelu((norm, _)) => norm,
        }
    }
}

impl<B: LinearAttentionBackend> Mlp<B> {
    /// A few tokens through the norm and this at once: what is added to the stream `x + addend`, and that stream;
    /// nothing where they go one after the other.
    pub(super) fn folded(
        &self,
        x: &Tensor<B, 3>,
        addend: Option<&Tensor<B, 3>>,
        layers: &Canon<B>,
    ) -> Option<(Tensor<B, 3>, Tensor<B, 3>)> {
        match self {
            Mlp::SwiGlu((norm, mlp))
                if layers.before_mlp.is_none() && layers.inside_mlp.is_empty() =>
            {
                mlp.folded(norm, x, addend)
            }
            _ => None,
        }
    }

    /// Addition to the residual, `[B, T, D]`, from normalised rows.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        layers: &Canon<B>,
        conv_states: &mut ConvPast<B>,
    ) -> Tensor<B, 3> {
        let x = canon(layers.before_mlp.as_ref(), x, Kept::CanonMlp, conv_states);
        let mut inside = layers.inside_mlp.iter();
        match self {
            Mlp::Identity(_) => x,
            Mlp::SwiGlu((_, mlp)) => match mlp.packed(&x, layers) {
                Some(y) => y,
                None => mlp.through(x, |x, name| canon(inside.next(), x, name, conv_states)),
            },
            Mlp::Gelu((_, mlp)) => {
                mlp.through(x, |x, name| canon(inside.next(), x, name, conv_states))
            }
            Mlp::Rwkv7((_, mlp)) => {
                let before = conv_states.shifted(&x);
                mlp.mixed(x, before)
            }
            Mlp::Rwkv6((_, mlp)) => {
                let before = conv_states.shifted(&x);
                mlp.mixed(x, before)
            }
        }
    }
}
