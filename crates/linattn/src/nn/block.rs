//! One layer of a model: a mixer, then an MLP, each with a norm before and a residual around.
//! ```text
//! x = x + mixer(canon(norm(x)))
//! x = x + mlp(canon(norm(x)))          canon(h) = h + conv(h), where asked for
//! ```

use super::convolution::{ShortConvolution, convolution_cost};
use super::layers::{Linear, Norm, NormKind, linear, linear_with_bias, shift_tokens};
use super::mixers::{Mixer, MixerConfig, MixerState};
use super::{ConfigError, Cost, LARGEST, Shared, positive};
use crate::ops::{self, Activation, LinearAttentionBackend};
use burn::module::{Module, Param};
use burn::tensor::activation::{gelu, relu, sigmoid};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// An entry of a model's list of layers: a layer, or several that are repeated together.
#[allow(clippy::large_enum_variant)] // a config holds a few
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, try_from = "Spelled")]
pub enum LayerEntry {
    /// `{ repeat = 2, mixer = .., mlp = .. }`.
    Layer(LayerConfig),
    /// `{ repeat = 2, group = [ { mixer = .. }, .. ] }`.
    Group(LayerGroup),
}

/// Layers that are repeated together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerGroup {
    /// How many such groups stand in a row.
    pub repeat: usize,
    /// The layers of one.
    pub group: Vec<LayerConfig>,
}

/// The keys of either kind of entry.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spelled {
    #[serde(default = "one")]
    repeat: usize,
    mixer: Option<MixerConfig>,
    mlp: Option<MlpConfig>,
    canon: Option<CanonConfig>,
    group: Option<Vec<LayerConfig>>,
}

impl TryFrom<Spelled> for LayerEntry {
    type Error = &'static str;

    fn try_from(entry: Spelled) -> Result<Self, Self::Error> {
        let Spelled { repeat, mixer, mlp, canon, group } = entry;
        match (mixer, group) {
            (Some(mixer), None) => {
                let (mlp, canon) = (mlp.unwrap_or_default(), canon.unwrap_or_default());
                Ok(Self::Layer(LayerConfig { repeat, mixer, mlp, canon }))
            }
            (None, Some(group)) if mlp.is_none() && canon.is_none() => {
                Ok(Self::Group(LayerGroup { repeat, group }))
            }
            (None, None) => Err("a layer wants a `mixer`, or a `group` of layers"),
            _ => Err("beside `group` only `repeat` may stand: each layer of it has its own keys"),
        }
    }
}

impl LayerEntry {
    /// Refuses what repeats nothing.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        match self {
            Self::Layer(layer) => positive("repeat", layer.repeat).map(|_| ()),
            Self::Group(LayerGroup { repeat, group }) => {
                positive("repeat", *repeat)?;
                if group.is_empty() {
                    return Err(ConfigError::new("group", "empty", "at least one layer"));
                }
                group.iter().enumerate().try_for_each(|(j, layer)| {
                    let repeat = positive("repeat", layer.repeat);
                    repeat.map(|_| ()).map_err(|e| e.within(format!("group[{j}]")))
                })
            }
        }
    }

    /// How many layers it stands for.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Layer(layer) => layer.repeat,
            Self::Group(LayerGroup { repeat, group }) => {
                let once =
                    group.iter().fold(0, |sum: usize, layer| sum.saturating_add(layer.repeat));
                once.saturating_mul(*repeat)
            }
        }
    }

    /// Each layer with the key it stands under, where the entry stands under `key`; repeated ones
    /// repeated.
    pub(super) fn each_layer(&self, key: String) -> Vec<(String, &LayerConfig)> {
        match self {
            Self::Layer(layer) => vec![(key, layer); layer.repeat],
            Self::Group(LayerGroup { repeat, group }) => {
                let once: Vec<_> = group
                    .iter()
                    .enumerate()
                    .flat_map(|(j, layer)| vec![(format!("{key}.group[{j}]"), layer); layer.repeat])
                    .collect();
                std::iter::repeat_n(once, *repeat).flatten().collect()
            }
        }
    }
}

impl From<LayerConfig> for LayerEntry {
    fn from(layer: LayerConfig) -> Self {
        Self::Layer(layer)
    }
}

/// Parts of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// How many such layers stand in a row.
    #[serde(default = "one")]
    pub repeat: usize,
    /// The token mixer.
    pub mixer: MixerConfig,
    /// The channel mixer that follows the mixer.
    #[serde(default)]
    pub mlp: MlpConfig,
    /// Short convolutions before the mixer and in the MLP.
    #[serde(default, skip_serializing_if = "CanonConfig::is_none")]
    pub canon: CanonConfig,
}

fn one() -> usize {
    1
}

/// Canon layers: how many tokens each short convolution sees, at least 2, or 0 for none. Inside a
/// mixer (point B of the paper) the mixer's own `conv_size` does the like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CanonConfig {
    /// Point A: between the norm and the mixer.
    pub before_mixer: usize,
    /// Point C: between the norm and the MLP.
    pub before_mlp: usize,
    /// Point D: inside the MLP, before its activation.
    pub inside_mlp: usize,
}

impl CanonConfig {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Window and channels of points A, C and D.
    fn points(&self, mlp: &MlpConfig, d_model: usize) -> Result<[(usize, usize); 3], ConfigError> {
        let inside = match mlp {
            MlpConfig::Swiglu(_) | MlpConfig::Geglu(_) | MlpConfig::Gelu(_) => {
                let (width, projections) = mlp.inner(d_model)?;
                width * projections
            }
            _ => 0,
        };
        let before_mlp = if *mlp == MlpConfig::None { 0 } else { d_model };
        let points = [
            ("before_mixer", self.before_mixer, d_model, ""),
            ("before_mlp", self.before_mlp, before_mlp, "0 where there is no `mlp`"),
            ("inside_mlp", self.inside_mlp, inside, "0, unless `mlp` is swiglu, geglu or gelu"),
        ];
        for (key, window, channels, want) in points {
            let fits = window == 0 || (2..=LARGEST).contains(&window);
            if !fits || (window > 0 && channels == 0) {
                let range = format!("0, or from 2 to {LARGEST}");
                let want = if fits { want } else { range.as_str() };
                return Err(ConfigError::new(key, window, want).within("canon"));
            }
        }
        Ok(points.map(|(_, window, channels, _)| (window, channels)))
    }

    fn init<B: Backend>(
        &self,
        mlp: &MlpConfig,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Canon<B>, ConfigError> {
        let [(before_mixer, _), (before_mlp, _), (inside, _)] = self.points(mlp, d_model)?;
        let (width, projections) = mlp.inner(d_model)?;
        let convolution = |channels, window| ShortConvolution::optional(channels, window, device);
        Ok(Canon {
            before_mixer: convolution(d_model, before_mixer),
            before_mlp: convolution(d_model, before_mlp),
            inside_mlp: (0..projections).filter_map(|_| convolution(width, inside)).collect(),
        })
    }

    fn cost(&self, mlp: &MlpConfig, d_model: usize) -> Result<Cost, ConfigError> {
        let mut cost = Cost::default();
        for (window, channels) in self.points(mlp, d_model)? {
            cost += convolution_cost(window, channels);
        }
        Ok(cost)
    }
}

/// Canon layers, `h + conv(h)`, a convolution of each channel over the last few tokens without
/// activation. Source: Allen-Zhu, Physics of Language Models, part 4.1, arXiv 2512.17351.
#[derive(Module, Debug)]
pub struct Canon<B: Backend> {
    before_mixer: Option<ShortConvolution<B>>,
    before_mlp: Option<ShortConvolution<B>>,
    /// One for each projection in front of the activation, or none.
    inside_mlp: Vec<ShortConvolution<B>>,
}

/// The last inputs of whatever in a layer looks back a few tokens, its mixer aside: those from before,
/// to draw from, and those for what comes next, in the same order.
struct Tails<B: Backend> {
    before: std::vec::IntoIter<Tensor<B, 3>>,
    next: Vec<Tensor<B, 3>>,
}

impl<B: LinearAttentionBackend> Tails<B> {
    /// The output of `layer`, which takes its tail and gives the next.
    fn through(
        &mut self,
        layer: impl FnOnce(Option<Tensor<B, 3>>) -> (Tensor<B, 3>, Tensor<B, 3>),
    ) -> Tensor<B, 3> {
        let (y, tail) = layer(self.before.next());
        self.next.push(tail);
        y
    }

    /// A Canon layer, where there is one.
    fn canon(
        &mut self,
        convolution: Option<&ShortConvolution<B>>,
        x: Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        match convolution {
            Some(convolution) => x.clone() + self.through(|tail| convolution.linear(x, tail)),
            None => x,
        }
    }
}

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
}

impl MlpConfig {
    /// The inner width, and how many projections lead there; zeros without an inner part.
    fn inner(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let (key, width, projections) = match self {
            Self::None | Self::Identity => return Ok((0, 0)),
            Self::Swiglu(config) => ("swiglu", config.width(d_model), 2),
            Self::Geglu(config) => ("geglu", config.width(d_model), 2),
            Self::Gelu(config) => ("gelu", config.width(d_model), 1),
            Self::Rwkv7(config) => ("rwkv7", config.width(4 * d_model), 1),
            Self::Rwkv6(config) => {
                ("rwkv6", config.width((7 * d_model / 2).next_multiple_of(32)), 1)
            }
            Self::Rwkv4(config) => ("rwkv4", config.width(4 * d_model), 1),
        };
        Ok((width.map_err(|e| e.within(key).within("mlp"))?, projections))
    }

    fn init<B: Backend>(
        &self,
        d_model: usize,
        new_norm: impl Fn() -> Norm<B>,
        device: &B::Device,
    ) -> Result<Option<Mlp<B>>, ConfigError> {
        let (width, _) = self.inner(d_model)?;
        Ok(match self {
            Self::None => None,
            Self::Identity => Some(Mlp::Identity(new_norm())),
            Self::Swiglu(_) | Self::Geglu(_) => {
                let smooth = matches!(self, Self::Geglu(_));
                Some(Mlp::SwiGlu((new_norm(), SwiGlu::new(d_model, width, smooth, device))))
            }
            Self::Rwkv7(_) => Some(Mlp::Rwkv7((new_norm(), Rwkv7Mlp::new(d_model, width, device)))),
            Self::Rwkv6(_) | Self::Rwkv4(_) => {
                Some(Mlp::Rwkv6((new_norm(), Rwkv6Mlp::new(d_model, width, device))))
            }
            Self::Gelu(config) => {
                Some(Mlp::Gelu((new_norm(), GeluMlp::new(d_model, width, config.bias, device))))
            }
        })
    }

    fn cost(&self, d_model: usize) -> Result<Cost, ConfigError> {
        let (width, projections) = self.inner(d_model)?;
        let (model, width) = (d_model as u64, width as u64);
        let products = 2 * model * width * (projections as u64 + u64::from(projections > 0));
        let (receptance, tail) = match self {
            Self::Rwkv4(_) | Self::Rwkv6(_) => (2 * model * model, 4 * model),
            Self::Rwkv7(_) => (0, 4 * model),
            _ => (0, 0),
        };
        Ok(Cost { state_bytes: tail, flops_per_token: products + receptance })
    }
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
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<SwiGlu<B>, ConfigError> {
        Ok(SwiGlu::new(d_model, self.width(d_model)?, false, device))
    }
}

/// `(silu(x W_gate) * x W_up) W_down`, or GELU in place of SiLU: GEGLU. Source: Shazeer, arXiv
/// 2002.05202.
#[derive(Module, Debug)]
pub struct SwiGlu<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: Linear<B>,
    /// Whether it is GELU.
    #[module(skip)]
    smooth: bool,
}

impl<B: Backend> SwiGlu<B> {
    fn new(d_model: usize, width: usize, smooth: bool, device: &B::Device) -> Self {
        Self {
            gate_proj: linear(d_model, width, device),
            up_proj: linear(d_model, width, device),
            down_proj: linear(width, d_model, device),
            smooth,
        }
    }
}

impl<B: LinearAttentionBackend> SwiGlu<B> {
    /// Token by token, over the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.through(x, |x| x)
    }

    /// As [`forward`](Self::forward), with `canon` after each of the two inner projections.
    fn through<const D: usize>(
        &self,
        x: Tensor<B, D>,
        mut canon: impl FnMut(Tensor<B, D>) -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        let gate = canon(self.gate_proj.forward(x.clone()));
        let up = canon(self.up_proj.forward(x));
        let inner = match self.smooth {
            true => gelu(gate) * up,
            false => ops::gate(up, gate, Activation::Silu),
        };
        self.down_proj.forward(inner)
    }

    /// Whether [`packed`](Self::packed) does the same, and is faster.
    fn packs(&self, canon: &Canon<B>, x: &Tensor<B, 3>) -> bool {
        !self.smooth && canon.inside_mlp.is_empty() && x.dims()[1] > 1
    }

    /// As [`forward`](Self::forward), gate and value by one product. For a few rows that would only read
    /// all weights twice.
    fn packed<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let weights = vec![self.gate_proj.weight.val(), self.up_proj.weight.val()];
        let both = ops::affine(x.clone(), ops::pack(weights, 0, x.dtype()), None)
            .expect("`x` has the width that the layer was made for");
        self.down_proj.forward(ops::gated_halves(both, Activation::Silu))
    }
}

/// Two linear layers with GELU between them.
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
        Ok(GeluMlp::new(d_model, self.width(d_model)?, self.bias, device))
    }
}

/// `gelu(x W_up) W_down`, the MLP of Vaswani et al., arXiv 1706.03762, with GELU, arXiv 1606.08415.
#[derive(Module, Debug)]
pub struct GeluMlp<B: Backend> {
    up_proj: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> GeluMlp<B> {
    fn new(d_model: usize, width: usize, bias: bool, device: &B::Device) -> Self {
        let new = |from, to| match bias {
            true => linear_with_bias(from, to, device),
            false => linear(from, to, device),
        };
        Self { up_proj: new(d_model, width), down_proj: new(width, d_model) }
    }
}

impl<B: LinearAttentionBackend> GeluMlp<B> {
    /// Token by token, over the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.through(x, |x| x)
    }

    /// As [`forward`](Self::forward), with `canon` after the inner projection.
    fn through<const D: usize>(
        &self,
        x: Tensor<B, D>,
        canon: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        self.down_proj.forward(gelu(canon(self.up_proj.forward(x))))
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
/// `down_proj`. Source: arXiv 2503.14456.
#[derive(Module, Debug)]
pub struct Rwkv7Mlp<B: Backend> {
    x_k: Param<Tensor<B, 1>>,
    key: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> Rwkv7Mlp<B> {
    fn new(d_model: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x_k: fresh_shares(d_model, device),
            key: linear(d_model, width, device),
            down_proj: linear(width, d_model, device),
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
        let back = before - x.clone();
        let hidden = relu(self.key.forward(x + back * self.x_k.val().unsqueeze::<3>()));
        (self.down_proj.forward(hidden.clone() * hidden), last)
    }
}

/// The channel mix of RWKV-4 to RWKV-6: RWKV-7's, and a gate for every channel,
/// `sigmoid((x + (x_before - x) mu_r) W_receptance)`. Source: arXiv 2305.13048, 2404.05892.
#[derive(Module, Debug)]
pub struct Rwkv6Mlp<B: Backend> {
    x_k: Param<Tensor<B, 1>>,
    x_r: Param<Tensor<B, 1>>,
    key: Linear<B>,
    receptance: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> Rwkv6Mlp<B> {
    fn new(d_model: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x_k: fresh_shares(d_model, device),
            x_r: fresh_shares(d_model, device),
            key: linear(d_model, width, device),
            receptance: linear(d_model, d_model, device),
            down_proj: linear(width, d_model, device),
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
        let back = before - x.clone();
        let mixed =
            |share: &Param<Tensor<B, 1>>| x.clone() + back.clone() * share.val().unsqueeze::<3>();
        let gate = sigmoid(self.receptance.forward(mixed(&self.x_r)));
        let hidden = relu(self.key.forward(mixed(&self.x_k)));
        (gate * self.down_proj.forward(hidden.clone() * hidden), last)
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
    /// Whether it takes rows of a narrower type than its weights.
    fn takes_bf16(&self) -> bool {
        matches!(self, Mlp::Identity(_) | Mlp::SwiGlu(_) | Mlp::Gelu(_))
    }

    fn norm(&self) -> &Norm<B> {
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
    /// Addition to the residual, `[B, T, D]`, from normalised rows.
    fn forward(&self, x: Tensor<B, 3>, canon: &Canon<B>, tails: &mut Tails<B>) -> Tensor<B, 3> {
        let x = tails.canon(canon.before_mlp.as_ref(), x);
        let mut inside = canon.inside_mlp.iter();
        match self {
            Mlp::Identity(_) => x,
            Mlp::SwiGlu((_, mlp)) if mlp.packs(canon, &x) => mlp.packed(x),
            Mlp::SwiGlu((_, mlp)) => mlp.through(x, |x| tails.canon(inside.next(), x)),
            Mlp::Gelu((_, mlp)) => mlp.through(x, |x| tails.canon(inside.next(), x)),
            Mlp::Rwkv7((_, mlp)) => tails.through(|last| mlp.forward(x, last)),
            Mlp::Rwkv6((_, mlp)) => tails.through(|last| mlp.forward(x, last)),
        }
    }
}

/// State of a layer between two tokens.
#[derive(Debug, Clone)]
pub struct BlockState<B: Backend> {
    /// The mixer's.
    pub mixer: MixerState<B>,
    /// The last inputs of the convolution before the mixer, `[B, W - 1, D]`, of the one before the
    /// MLP, and what the MLP itself saw last: of each convolution inside it, `[B, W - 1, width]`, or
    /// the last token, `[B, 1, D]`. Of those that there are.
    pub tails: Vec<Tensor<B, 3>>,
}

/// A mixer and an MLP, each with a norm before and a residual around. `D -> D`.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    attn_norm: Norm<B>,
    attn: Mixer<B>,
    mlp: Option<Mlp<B>>,
    canon: Canon<B>,
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
            mlp: self.mlp.init(d_model, new_norm, device)?,
            canon: self.canon.init(&self.mlp, d_model, device)?,
        })
    }

    /// Cost of one such layer.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let mut cost = self.mixer.cost(d_model, length).map_err(|e| e.within("mixer"))?;
        cost += self.mlp.cost(d_model)?;
        cost += self.canon.cost(&self.mlp, d_model)?;
        Ok(cost)
    }
}

impl<B: LinearAttentionBackend> Block<B> {
    /// Its mixer.
    pub fn mixer(&self) -> &Mixer<B> {
        &self.attn
    }

    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. What layers
    /// read of one another comes and goes by `shared`, which starts empty before the first layer.
    /// # Panics
    /// If `state` is another kind of mixer's, or `shared` lacks what the mixer reads.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, BlockState<B>) {
        let (x, state) = self.forward_residual(Residual::new(x), state, shared);
        (x.sum(), state)
    }

    /// As [`forward`](Self::forward); what the layer adds last waits for the next norm.
    pub(super) fn forward_residual(
        &self,
        x: Residual<B>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Residual<B>, BlockState<B>) {
        self.run(x, state, |x, state| self.attn.forward_shared(x, state, shared))
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 2>, BlockState<B>) {
        let (x, state) = self.step_residual(Residual::new(x.unsqueeze_dim(1)), state, shared);
        (x.sum().squeeze_dim(1), state)
    }

    /// As [`step`](Self::step), over `[B, 1, D]`.
    pub(super) fn step_residual(
        &self,
        x: Residual<B>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Residual<B>, BlockState<B>) {
        self.run(x, state, |x, state| {
            let (y, state) = self.attn.step_shared(x.squeeze_dim(1), state, shared);
            (y.unsqueeze_dim(1), state)
        })
    }

    fn run(
        &self,
        x: Residual<B>,
        state: Option<BlockState<B>>,
        mix: impl FnOnce(Tensor<B, 3>, Option<MixerState<B>>) -> (Tensor<B, 3>, MixerState<B>),
    ) -> (Residual<B>, BlockState<B>) {
        let (mixer, before) = match state {
            Some(state) => (Some(state.mixer), state.tails),
            None => (None, vec![]),
        };
        let mut tails = Tails { before: before.into_iter(), next: vec![] };
        let (h, mut x) = x.normalized(&self.attn_norm, self.attn.takes_bf16());
        let (y, mixer) = mix(tails.canon(self.canon.before_mixer.as_ref(), h), mixer);
        x.addend = Some(y);
        if let Some(mlp) = &self.mlp {
            let (h, sum) = x.normalized(mlp.norm(), mlp.takes_bf16());
            let y = mlp.forward(h, &self.canon, &mut tails);
            x = Residual { addend: Some(y), ..sum };
        }
        (x, BlockState { mixer, tails: tails.next })
    }
}

/// The residual stream between layers. The sum with the last layer's output is left to the next norm,
/// which does both at once.
#[derive(Debug, Clone)]
pub(super) struct Residual<B: Backend> {
    /// The sum so far, `[B, T, D]`.
    stream: Tensor<B, 3>,
    /// Added to it before anything reads it; of any type.
    addend: Option<Tensor<B, 3>>,
    /// Type of products and recurrences, for layers that take it.
    dtype: DType,
}

impl<B: LinearAttentionBackend> Residual<B> {
    /// A stream whose layers compute in its own type.
    pub(super) fn new(stream: Tensor<B, 3>) -> Self {
        let dtype = stream.dtype();
        Self { stream, addend: None, dtype }
    }

    /// A stream whose layers compute in type `dtype` where they can.
    pub(super) fn computed_in(stream: Tensor<B, 3>, dtype: DType) -> Self {
        Self { stream, addend: None, dtype }
    }

    /// The sum through `norm`, and the stream with nothing left to add.
    pub(super) fn normalized(self, norm: &Norm<B>, narrow: bool) -> (Tensor<B, 3>, Self) {
        let Self { stream, addend, dtype } = self;
        let own = if narrow { dtype } else { stream.dtype() };
        let (y, stream) = norm.add_forward(stream, addend, own);
        (y, Self { stream, addend: None, dtype })
    }

    /// The sum, with nothing left to add.
    pub(super) fn sum(self) -> Tensor<B, 3> {
        let dtype = self.stream.dtype();
        match self.addend {
            Some(addend) => self.stream + ops::typed(addend, dtype),
            None => self.stream,
        }
    }
}
