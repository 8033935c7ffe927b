//! Canon layers: short convolutions around a layer's norms, and of a mixer's queries, keys and values.

use super::convolution::{ConvPast, ShortConvolution, convolution_cost};
use super::{ConfigError, Cost, Kept, LARGEST};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Canon layers: how many tokens each short convolution sees, at least 2, or 0 for none. Inside a mixer (point B
/// of the paper) they are its own affair: `canon` of those that have [`CanonQkv`], or `conv_size`, which does the
/// like.
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

/// Channels of a layer where Canon layers may stand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Channels {
    /// In front of the mixer.
    pub(super) mixer: usize,
    /// In front of the MLP; 0 without one.
    pub(super) mlp: usize,
    /// Of each projection in front of the MLP's activation; 0 in MLPs that Canon layers are not for.
    pub(super) inside: usize,
    /// How many projections these are.
    pub(super) projections: usize,
}

impl CanonConfig {
    pub(super) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Window and channels of points A, C and D.
    pub(super) fn points(&self, layer: Channels) -> Result<[(usize, usize); 3], ConfigError> {
        let Channels { mixer, mlp, inside, projections } = layer;
        let points = [
            ("before_mixer", self.before_mixer, mixer, ""),
            ("before_mlp", self.before_mlp, mlp, "0 where there is no `mlp`"),
            (
                "inside_mlp",
                self.inside_mlp,
                inside * projections,
                "0, unless `mlp` is swiglu, geglu or gelu",
            ),
        ];
        for (key, window, channels, want) in points {
            check_canon(key, window).map_err(|e| e.within("canon"))?;
            if window > 0 && channels == 0 {
                return Err(ConfigError::new(key, window, want).within("canon"));
            }
        }
        Ok(points.map(|(_, window, channels, _)| (window, channels)))
    }

    pub(super) fn init<B: Backend>(
        &self,
        layer: Channels,
        device: &B::Device,
    ) -> Result<Canon<B>, ConfigError> {
        let [(before_mixer, _), (before_mlp, _), (inside, _)] = self.points(layer)?;
        let convolution = |channels, window| ShortConvolution::optional(channels, window, device);
        Ok(Canon {
            before_mixer: convolution(layer.mixer, before_mixer),
            before_mlp: convolution(layer.mlp, before_mlp),
            inside_mlp: (0..layer.projections)
                .filter_map(|_| convolution(layer.inside, inside))
                .collect(),
        })
    }

    pub(super) fn cost(&self, layer: Channels) -> Result<Cost, ConfigError> {
        let mut cost = Cost::default();
        for (window, channels) in self.points(layer)? {
            cost += convolution_cost(window, channels);
        }
        Ok(cost)
    }
}

/// Canon layers, `h + conv(h)`, a convolution of each channel over the last few tokens without
/// activation. h is `[B, T, D]`, and the last W - 1 rows, `[B, W - 1, D]`, are a convolution's state. Source:
/// Allen-Zhu, Physics of Language Models, part 4.1, arXiv 2512.17351.
#[derive(Module, Debug)]
pub struct Canon<B: Backend> {
    pub(super) before_mixer: Option<ShortConvolution<B>>,
    pub(super) before_mlp: Option<ShortConvolution<B>>,
    /// One for each projection in front of the activation, or none.
    pub(super) inside_mlp: Vec<ShortConvolution<B>>,
}

/// Refuses windows of one token, which would be no convolution, and slips of the pen.
pub(super) fn check_canon(key: &str, window: usize) -> Result<(), ConfigError> {
    match window {
        0 | 2..=LARGEST => Ok(()),
        _ => Err(ConfigError::new(key, window, format!("0, or from 2 to {LARGEST}"))),
    }
}

/// Canon layers of a mixer's queries, keys and values: point B.
#[derive(Module, Debug)]
pub struct CanonQkv<B: Backend> {
    q: ShortConvolution<B>,
    k: ShortConvolution<B>,
    v: ShortConvolution<B>,
}

impl<B: Backend> CanonQkv<B> {
    /// Of so many channels each; none for a window of 0.
    pub(super) fn optional(
        window: usize,
        channels: [usize; 3],
        device: &B::Device,
    ) -> Option<Self> {
        let convolution = |channels| ShortConvolution::optional(channels, window, device);
        let [q, k, v] = channels.map(convolution);
        Some(Self { q: q?, k: k?, v: v? })
    }
}

impl<B: LinearAttentionBackend> CanonQkv<B> {
    /// Of queries, keys and values, `[B, T, width]` each.
    pub(super) fn forward(
        &self,
        [q, k, v]: [Tensor<B, 3>; 3],
        conv_states: &mut ConvPast<B>,
    ) -> [Tensor<B, 3>; 3] {
        [
            (Kept::CanonQuery, &self.q, q),
            (Kept::CanonKey, &self.k, k),
            (Kept::CanonValue, &self.v, v),
        ]
        .map(|(name, convolution, x)| canon(Some(convolution), x, name, conv_states))
    }
}

/// `x` through a Canon layer, where there is one.
pub(super) fn canon<B: LinearAttentionBackend>(
    convolution: Option<&ShortConvolution<B>>,
    x: Tensor<B, 3>,
    name: Kept,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 3> {
    match convolution {
        Some(convolution) => x.clone() + convolution.linear_between(x, name, conv_states),
        None => x,
    }
}
