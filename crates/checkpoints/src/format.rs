//! Layouts of checkpoints: flash-linear-attention's, and those of other models on the Hugging Face hub.

use crate::families::{self, Family};
use crate::hub::{self, Hub};
use crate::tensors::Tensors;
use serde_json::{Map, Value};

/// How a checkpoint says what a model is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Format {
    /// As flash-linear-attention has it.
    Fla(&'static Family),
    /// As another model of the hub has it.
    Hub(&'static Hub),
}

impl Format {
    /// Every layout, those of flash-linear-attention first.
    pub(crate) fn all() -> impl Iterator<Item = Format> {
        let fla = families::FAMILIES.iter().map(Format::Fla);
        fla.chain(hub::FORMATS.iter().copied().map(Format::Hub))
    }

    /// The layout that `--family` names so.
    pub(crate) fn named(name: &str) -> Option<Format> {
        Format::all().find(|format| format.name() == name)
    }

    /// Names of all layouts.
    pub(crate) fn known() -> Vec<&'static str> {
        Format::all().map(|format| format.name()).collect()
    }

    /// The layout of a `config.json` and the tensors beside it.
    /// # Errors
    /// Says what the config would have to say.
    pub(crate) fn of(table: &Map<String, Value>, tensors: &Tensors) -> Result<Format, String> {
        let model_type = table.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let hub = hub::FORMATS
            .iter()
            .find(|hub| hub.model_type == model_type && (hub.recognize)(table, tensors));
        if let Some(hub) = hub {
            return Ok(Format::Hub(hub));
        }
        families::family(model_type).map(Format::Fla).ok_or_else(|| {
            let known = Format::known().join(", ");
            format!("config.json: `model_type` is {model_type:?}; it has to be one of {known}")
        })
    }

    /// Its name: the `model_type`, where no other layout has the same.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::Fla(family) => family.model_type,
            Format::Hub(hub) => hub.name,
        }
    }

    /// Our mixers that only such checkpoints' models have, besides attention.
    pub(crate) fn mixers(self) -> Vec<&'static str> {
        match self {
            Format::Fla(family) => vec![family.mixer],
            Format::Hub(hub) => hub.mixers.to_vec(),
        }
    }

    /// Names that the embedding has there.
    pub(crate) fn embeddings(self) -> Vec<String> {
        match self {
            Format::Fla(family) => ["embeddings", "embedding"]
                .map(|name| format!("{}.{name}.weight", family.frame.root))
                .to_vec(),
            Format::Hub(hub) => {
                hub.embeddings.iter().map(|name| hub.named(&format!("{name}.weight"))).collect()
            }
        }
    }

    /// Name of a layer's tensors, before the layer's number.
    pub(crate) fn layers(self) -> String {
        match self {
            Format::Fla(family) => format!("{}.layers.", family.frame.root),
            Format::Hub(hub) => hub.named(hub.layers),
        }
    }

    /// Name of the logits' weights, where they are not the embedding's.
    pub(crate) fn head(self) -> &'static str {
        match self {
            Format::Fla(_) => "lm_head",
            Format::Hub(hub) => hub.head,
        }
    }

    /// Whether a tensor belongs to a part that no model here has, and that is left out by its name.
    pub(crate) fn leaves_out(self, name: &str) -> bool {
        match self {
            Format::Fla(_) => false,
            Format::Hub(hub) => hub.left_out.iter().any(|start| name.starts_with(start)),
        }
    }

    /// Whether a tensor is one that no model uses.
    pub(crate) fn is_idle(self, name: &str) -> bool {
        let ends = match self {
            Format::Fla(family) => family.unused,
            Format::Hub(hub) => hub.unused,
        };
        ends.iter().any(|end| name.ends_with(end))
    }

    /// Whether forget gates of all layers have bounds that are learnt together, under `root`.
    pub(crate) fn bounds(self) -> Option<&'static str> {
        match self {
            Format::Fla(family) => family.bounds.then_some(family.frame.root),
            Format::Hub(_) => None,
        }
    }
}
