//! A model's list of layers: single ones, groups, and how often they are repeated.

use super::block::{LayerConfig, one};
use super::canon::CanonConfig;
use super::mixers::MixerConfig;
use super::mlp::MlpConfig;
use super::{ConfigError, positive};
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
    post_norm: Option<bool>,
    canon: Option<CanonConfig>,
    group: Option<Vec<LayerConfig>>,
}

impl TryFrom<Spelled> for LayerEntry {
    type Error = &'static str;

    fn try_from(entry: Spelled) -> Result<Self, Self::Error> {
        let Spelled { repeat, mixer, mlp, post_norm, canon, group } = entry;
        let alone = mlp.is_none() && post_norm.is_none() && canon.is_none();
        match (mixer, group) {
            (Some(mixer), None) => {
                let (mlp, canon) = (mlp.unwrap_or_default(), canon.unwrap_or_default());
                let post_norm = post_norm.unwrap_or_default();
                Ok(Self::Layer(LayerConfig { repeat, mixer, mlp, post_norm, canon }))
            }
            (None, Some(group)) if alone => Ok(Self::Group(LayerGroup { repeat, group })),
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
