//! Low-rank adapters in the files of Hugging Face's PEFT.
//! ```text
//! adapter_model.safetensors   base_model.model.NAME.lora_A.weight   [r, in]
//!                             base_model.model.NAME.lora_B.weight   [out, r]
//! adapter_config.json         r, lora_alpha, target_modules
//! ```
//! NAME is the layer's in the checkpoint that the model itself would be exported as. A layer there that
//! several of ours are parts of has the adapters of all of them: A one above the other, B in the rows of each;
//! its rank is the sum of theirs, and `rank_pattern` and `alpha_pattern` say so.

use crate::checkpoint::Exported;
use crate::error::CheckpointError;
use crate::faults::Faults;
use crate::files::put;
use crate::format::Format;
use crate::names::{Place, transpose};
use crate::tensors::{self, Precision, Written};
use crate::weights::weights;
use crate::writing;
use burn::tensor::backend::Backend;
use burn_store::TensorSnapshot;
use linattn::nn::LoraConfig;
use linattn::ops::LinearAttentionBackend;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

pub(crate) const CONFIG: &str = "adapter_config.json";
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
pub(crate) const PREFIX: &str = "base_model.model";

/// Writes the adapters of a model, which has them beside its weights, as PEFT reads them. Gives the family
/// whose names they have.
/// # Errors
/// [`CheckpointError`] names what such files cannot say.
pub fn export_adapters<B: LinearAttentionBackend>(
    exported: &Exported<'_, B>,
    lora: &LoraConfig,
    family: Option<&str>,
    folder: &Path,
    overwrite: bool,
) -> Result<&'static str, CheckpointError> {
    let kept = writing::read_kept(exported, family)?;
    let family = family.or(kept.family.as_deref());
    let format = writing::find_format(exported, family, Precision::F32)?;
    if folder.join(CONFIG).exists() && !overwrite {
        return Err(CheckpointError::Exists { folder: folder.into() });
    }
    let wrong = |faults| CheckpointError::Export { family: format.name().into(), faults };
    let (layers, all) = layers(format, exported).map_err(wrong)?;
    let list: Vec<Written> = layers.iter().flat_map(|(name, layer)| layer.written(name)).collect();
    let bytes = tensors::to_bytes(&list, Precision::F32, &[]).map_err(|e| wrong(vec![e]))?;
    let text = format!("{:#}\n", config(&layers, &all, lora));
    let failed = |path: &Path, e: std::io::Error| CheckpointError::Write {
        path: path.into(),
        why: e.to_string(),
    };
    fs::create_dir_all(folder).map_err(|e| failed(folder, e))?;
    for (name, bytes) in [(WEIGHTS, bytes), (CONFIG, text.into_bytes())] {
        put(folder, name, bytes)?;
    }
    Ok(format.name())
}

/// A layer of the checkpoint, with the adapters of all layers of ours that are parts of it.
#[derive(Default)]
struct Layer {
    /// Its rows, and its columns.
    size: [usize; 2],
    parts: Vec<Part>,
}

/// The adapter of one layer of ours.
struct Part {
    rank: usize,
    /// `[r, in]`.
    a: Vec<f32>,
    /// `[out, r]`.
    b: Vec<f32>,
    /// Rows of the layer's weight that are ours.
    rows: Vec<usize>,
}

impl Layer {
    fn rank(&self) -> usize {
        self.parts.iter().map(|part| part.rank).sum()
    }

    fn written(&self, name: &str) -> [Written; 2] {
        let ([out, width], rank) = (self.size, self.rank());
        let a = self.parts.iter().flat_map(|part| part.a.clone()).collect();
        let (mut b, mut first) = (vec![0.0; out * rank], 0);
        for part in &self.parts {
            for (row, from) in part.rows.iter().zip(part.b.chunks_exact(part.rank)) {
                b[row * rank + first..][..part.rank].copy_from_slice(from);
            }
            first += part.rank;
        }
        let tensor =
            |end: &str, shape, values| (format!("{PREFIX}.{name}.{end}.weight"), shape, values);
        [tensor("lora_A", vec![rank, width], a), tensor("lora_B", vec![out, rank], b)]
    }
}

/// Layers with an adapter by their names, and the names of all.
type Layers = (BTreeMap<String, Layer>, BTreeSet<String>);

fn layers<B: Backend>(format: Format, exported: &Exported<'_, B>) -> Result<Layers, Faults> {
    let snapshots = weights(format, exported.config, exported.model);
    let matrix = |path: &str| snapshots.iter().find(|(ours, _)| ours.full_path() == path);
    let (mut layers, mut all, mut faults) = (BTreeMap::new(), BTreeSet::new(), Faults::new());
    for (ours, place) in &snapshots {
        all.extend(
            place.as_ref().and_then(|place| place.name.strip_suffix(".weight")).map(String::from),
        );
        let path = ours.full_path();
        let Some(layer) = path.strip_suffix(".adapter.lora_a") else { continue };
        let weight = matrix(&format!("{layer}.weight")).and_then(|(_, place)| place.as_ref());
        let widening = matrix(&format!("{layer}.adapter.lora_b"));
        let found = match (weight, widening) {
            (Some(place), Some((widening, _))) => part(place, ours, widening),
            _ => Err(format!("{layer} has no place in such a checkpoint")),
        };
        match found {
            Err(fault) => faults.push(fault),
            Ok((name, size, part)) => {
                let layer: &mut Layer = layers.entry(name).or_default();
                layer.size = size;
                layer.parts.push(part);
            }
        }
    }
    if layers.is_empty() && faults.is_empty() {
        faults.push("the model has no adapters".to_string());
    }
    if faults.is_empty() { Ok((layers, all)) } else { Err(faults) }
}

/// Name and size of the checkpoint's layer, and what an adapter is of it.
fn part(
    place: &Place,
    a: &TensorSnapshot,
    b: &TensorSnapshot,
) -> Result<(String, [usize; 2], Part), String> {
    let values = |tensor: &TensorSnapshot| match tensor.to_data() {
        Ok(data) => Ok(data.iter::<f32>().collect::<Vec<f32>>()),
        Err(e) => Err(format!("{}: {e}", tensor.full_path())),
    };
    let (&[from, rank], &[_, to]) = (&a.shape[..], &b.shape[..]) else {
        return Err(format!("{} is no matrix", a.full_path()));
    };
    let name = place.name.strip_suffix(".weight");
    let name = name.ok_or_else(|| format!("{} is no layer's weight", place.name))?;
    let (rows, total) = match &place.rows {
        None => ((0..to).collect(), to),
        Some(rows) => (rows.ranges.iter().cloned().flatten().collect(), rows.total),
    };
    let (a, b) = (transpose(&values(a)?, from, rank), transpose(&values(b)?, rank, to));
    Ok((name.to_string(), [total, from], Part { rank, a, b, rows }))
}

fn config(layers: &BTreeMap<String, Layer>, all: &BTreeSet<String>, lora: &LoraConfig) -> Value {
    let own = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
    let short: BTreeSet<String> = layers.keys().map(|name| own(name)).collect();
    let others = all.iter().filter(|name| !layers.contains_key(*name));
    let clash = others.map(|name| own(name)).any(|name| short.contains(&name));
    let targets = if clash { layers.keys().cloned().collect() } else { short };
    let wide = layers.iter().filter(|(_, layer)| layer.rank() != lora.rank);
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for (name, layer) in wide {
        let rank = layer.rank();
        ranks.insert(name.clone(), rank.into());
        alphas.insert(name.clone(), (lora.scale() * rank as f64).into());
    }
    json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": null,
        "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets,
        "rank_pattern": ranks, "alpha_pattern": alphas,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": false, "modules_to_save": null,
        "init_lora_weights": true, "use_rslora": false, "use_dora": false, "inference_mode": true,
    })
}
