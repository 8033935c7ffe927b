//! The weights of a model, and where they stand in a checkpoint.

use crate::format::Format;
use crate::names::{Names, Place};
use crate::tensors::{Stored, Tensors};
use burn::tensor::backend::Backend;
use burn_store::{ModuleSnapshot, TensorSnapshot};
use linattn::nn::{LanguageModel, LanguageModelConfig, LayerConfig};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const BOUNDS: &str = "lower_bounds";

/// Name, place and shape of every weight of a model; the weight itself.
pub(crate) fn weights<B: Backend>(
    format: Format,
    config: &LanguageModelConfig,
    model: &LanguageModel<B>,
) -> Vec<(TensorSnapshot, Option<Place>)> {
    let snapshots = ModuleSnapshot::<B>::collect(model, None, None, true);
    let paths: BTreeSet<String> = snapshots.iter().map(TensorSnapshot::full_path).collect();
    let gated = |path: &[String]| match path {
        [layers, i, attn, ..] => paths.contains(&format!("{layers}.{i}.{attn}.g_proj.weight")),
        _ => false,
    };
    let layers: Vec<&LayerConfig> = config.each_layer().map(|(_, layer)| layer).collect();
    let names = Names { format, layers: &layers, d_model: config.d_model };
    snapshots
        .into_iter()
        .map(|snapshot| {
            let path = snapshot.path_stack.clone().unwrap_or_default();
            let module = snapshot.module_type().unwrap_or_default();
            let place = names.place(&path, &module, &snapshot.shape, gated(&path));
            (snapshot, place)
        })
        .collect()
}

/// The checkpoint's bounds of forget gates, for all layers.
pub(crate) fn joint_bounds(format: Format, tensors: &Tensors) -> Option<(String, &Stored)> {
    let name = format!("{}.{BOUNDS}", format.bounds()?);
    let tensor = tensors.get(&name)?;
    Some((name, tensor))
}

/// Our bounds' names, and how many channels each has.
pub(crate) fn bound_names(weights: &[(TensorSnapshot, Option<Place>)]) -> BTreeMap<String, usize> {
    weights
        .iter()
        .filter(|(ours, place)| place.is_none() && ours.full_path().ends_with(".lower_bound"))
        .map(|(ours, _)| (ours.full_path(), ours.shape.iter().product()))
        .collect()
}

/// The number in `layers.3.attn.lower_bound`.
pub(crate) fn layer_of(name: &str) -> usize {
    name.split('.').nth(1).and_then(|i| i.parse().ok()).unwrap_or(0)
}
