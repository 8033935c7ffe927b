//! Checkpoints of [flash-linear-attention](https://github.com/fla-org/flash-linear-attention), and of other
//! models of the Hugging Face hub, as linattn models, and back.
//!
//! A checkpoint is a folder with `config.json` and `model.safetensors`, or several such files and
//! `model.safetensors.index.json`; its numbers are f32, bf16 or f16. [`import`] takes it whole or
//! refuses it with everything that is wrong at once; parts that no model here has, such as the eyes of a
//! multimodal one, are left out by their names, which it gives. [`export`] writes one that says exactly what
//! the model is, or refuses. Numbers of 32 bits go there and back to the last bit.
//!
//! Nobody vouches for the files that are read. A model is put together only if its sizes go with those
//! of the tensors, so that an import holds no more than the files and 16 bytes for each of their numbers,
//! and 16 MiB.
#![deny(missing_docs)]

mod adapters;
mod bounds;
mod config;
mod families;
mod format;
mod hub;
mod kept;
mod merging;
mod names;
mod paths;
mod reading;
mod tensors;
mod writing;

pub use adapters::export_adapters;
pub use tensors::Precision;

use burn::tensor::backend::Backend;
use burn_store::{ModuleSnapshot, TensorSnapshot};
use format::Format;
use linattn::nn::{LanguageModel, LanguageModelConfig, LayerConfig};
use linattn::ops::LinearAttentionBackend;
use names::{Names, Place};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Everything that is wrong, one sentence each.
type Faults = Vec<String>;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
const BOUNDS: &str = "lower_bounds";

/// Why a checkpoint cannot be read or written. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder holds no model that is known here.
    #[error("{folder} cannot be imported: {}", .faults.join("; "))]
    Import {
        /// The folder.
        folder: PathBuf,
        /// All that is wrong.
        faults: Vec<String>,
    },
    /// The model is none that a checkpoint of this family could hold.
    #[error("the model cannot be exported as `{family}`: {}", .faults.join("; "))]
    Export {
        /// The family.
        family: String,
        /// All that is wrong.
        faults: Vec<String>,
    },
    /// There is no such family, or the model is of none.
    #[error("no checkpoints of `{family}` are known; it has to be one of {}", known().join(", "))]
    Family {
        /// The family, or the model's mixer.
        family: String,
    },
    /// The folder holds a checkpoint already.
    #[error("{folder} holds a checkpoint already; add --overwrite to replace it")]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// Writing failed.
    #[error("can't write {path}: {why}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// Every family that is known, by the `model_type` of its configs, or by a name of its own where two have the
/// same.
pub fn known() -> Vec<&'static str> {
    Format::known()
}

/// A checkpoint as a model.
#[derive(Debug)]
pub struct Imported<B: Backend> {
    /// The family, as [`known`] names it.
    pub family: &'static str,
    /// The model's config.
    pub config: LanguageModelConfig,
    /// Ids that it knows.
    pub vocab: usize,
    /// The model.
    pub model: LanguageModel<B>,
    /// The `tokenizer.json` beside the checkpoint.
    pub tokenizer: Option<PathBuf>,
    /// Ids that end a text, as `config.json` says.
    pub end_ids: Vec<u32>,
    /// A safetensors file with what the checkpoint says in other words than the model, so that
    /// [`export`] can say it in the same.
    pub kept: Option<Vec<u8>>,
    /// Tensors of parts that no model here has.
    pub left_out: Vec<String>,
}

/// Reads the checkpoint in `folder`.
/// # Errors
/// [`CheckpointError::Import`] names every key and every tensor that is unknown, missing or of the wrong
/// shape.
pub fn import<B: LinearAttentionBackend>(
    folder: &Path,
    device: &B::Device,
) -> Result<Imported<B>, CheckpointError> {
    imported(folder, None, device)
}

/// Reads the checkpoint in `folder` with low-rank adapters that Hugging Face's PEFT trained beside it, those of
/// the folder `adapters`, added to its weights.
/// # Errors
/// [`CheckpointError::Import`] as [`import`], and names every adapter that fits no weight and every key of
/// `adapter_config.json` that makes it more than two matrices.
pub fn import_with_adapters<B: LinearAttentionBackend>(
    folder: &Path,
    adapters: &Path,
    device: &B::Device,
) -> Result<Imported<B>, CheckpointError> {
    imported(folder, Some(adapters), device)
}

fn imported<B: LinearAttentionBackend>(
    folder: &Path,
    adapters: Option<&Path>,
    device: &B::Device,
) -> Result<Imported<B>, CheckpointError> {
    let mut faults = Faults::new();
    let read = reading::read::<B>(folder, adapters, device, &mut faults);
    match (read, faults.is_empty()) {
        (Some(imported), true) => Ok(imported),
        _ => Err(CheckpointError::Import { folder: folder.into(), faults: once(faults) }),
    }
}

/// The same faults, each of them once: parts of one tensor are missing together.
fn once(faults: Faults) -> Faults {
    let mut said = BTreeSet::new();
    faults.into_iter().filter(|fault| said.insert(fault.clone())).collect()
}

/// A model to be written as a checkpoint.
#[derive(Debug)]
pub struct Exported<'a, B: Backend> {
    /// The model.
    pub model: &'a LanguageModel<B>,
    /// Its config.
    pub config: &'a LanguageModelConfig,
    /// Ids that it knows.
    pub vocab: usize,
    /// A `tokenizer.json` to be copied.
    pub tokenizer: Option<&'a Path>,
    /// Ids that end a text.
    pub end_ids: &'a [u32],
    /// Files to be copied as they are, under their own names: a chat template and the like.
    pub companions: &'a [PathBuf],
    /// The file of [`Imported::kept`], if the model came from a checkpoint.
    pub kept: Option<&'a Path>,
}

/// A checkpoint as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The family.
    pub family: &'static str,
    /// Tensors that the checkpoint it came from has besides, of parts that no model here has.
    pub left_out: Vec<String>,
}

/// Writes a model as a checkpoint of `family`: by default the one that it came from, else the first that can
/// say it.
/// # Errors
/// [`CheckpointError`] names every key that such a checkpoint would say otherwise.
pub fn export<B: LinearAttentionBackend>(
    exported: &Exported<'_, B>,
    family: Option<&str>,
    precision: Precision,
    folder: &Path,
    overwrite: bool,
) -> Result<Outcome, CheckpointError> {
    let kept = read_kept(exported, family)?;
    let format = writing::find_format(exported, family.or(kept.family.as_deref()), precision)?;
    if folder.join(CONFIG).exists() && !overwrite {
        return Err(CheckpointError::Exists { folder: folder.into() });
    }
    let wrong = |faults| CheckpointError::Export { family: format.name().into(), faults };
    let table = config::export(exported.config, exported.vocab, format, precision);
    let mut table = table.map_err(wrong)?;
    config::put_end_ids(&mut table, exported.end_ids);
    let tensors = writing::written(format, exported, &kept).map_err(wrong)?;
    let bytes = tensors::to_bytes(&tensors, precision, &[]).map_err(|e| wrong(vec![e]))?;
    let failed = |path: &Path, why: String| CheckpointError::Write { path: path.into(), why };
    fs::create_dir_all(folder).map_err(|e| failed(folder, e.to_string()))?;
    let named = |path: &PathBuf| Some((path.clone(), PathBuf::from(path.file_name()?)));
    let tokenizer = exported.tokenizer.map(|path| (path.to_path_buf(), TOKENIZER.into()));
    for (from, name) in exported.companions.iter().filter_map(named).chain(tokenizer) {
        let path = folder.join(name);
        fs::copy(from, &path).map_err(|e| failed(&path, e.to_string()))?;
    }
    let text = format!("{:#}\n", serde_json::Value::Object(table));
    for (name, bytes) in [(WEIGHTS, bytes), (CONFIG, text.into_bytes())] {
        put(folder, name, bytes)?;
    }
    Ok(Outcome { family: format.name(), left_out: kept.left_out })
}

/// Settings of the checkpoint that the model came from, in its own words.
fn read_kept<B: Backend>(
    exported: &Exported<'_, B>,
    family: Option<&str>,
) -> Result<kept::Kept, CheckpointError> {
    match exported.kept.map(|path| (path, kept::read(path))) {
        None => Ok(kept::Kept::default()),
        Some((_, Ok(kept))) => Ok(kept),
        Some((path, Err(why))) => {
            let faults = vec![format!("{}: {why}", path.display())];
            Err(CheckpointError::Export { family: family.unwrap_or("any").into(), faults })
        }
    }
}

/// Writes a file under another name and renames it.
fn put(folder: &Path, name: &str, bytes: Vec<u8>) -> Result<(), CheckpointError> {
    let (path, draft) = (folder.join(name), folder.join(format!("{name}.unfinished")));
    let done = fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, &path));
    done.map_err(|e| {
        let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
        CheckpointError::Write { path: path.clone(), why: e.to_string() }
    })
}

/// Name, place and shape of every weight of a model; the weight itself.
fn weights<B: Backend>(
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
fn joint_bounds(format: Format, tensors: &tensors::Tensors) -> Option<(String, &tensors::Stored)> {
    let name = format!("{}.{BOUNDS}", format.bounds()?);
    let tensor = tensors.get(&name)?;
    Some((name, tensor))
}

/// Our bounds' names, and how many channels each has.
fn bound_names(weights: &[(TensorSnapshot, Option<Place>)]) -> BTreeMap<String, usize> {
    weights
        .iter()
        .filter(|(ours, place)| place.is_none() && ours.full_path().ends_with(".lower_bound"))
        .map(|(ours, _)| (ours.full_path(), ours.shape.iter().product()))
        .collect()
}

/// The number in `layers.3.attn.lower_bound`.
fn layer_of(name: &str) -> usize {
    name.split('.').nth(1).and_then(|i| i.parse().ok()).unwrap_or(0)
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
