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
mod checkpoint;
mod config;
mod error;
mod families;
mod faults;
mod files;
mod format;
mod hub;
mod kept;
mod merging;
mod names;
mod paths;
mod reading;
mod tensors;
mod weights;
mod writing;

pub use adapters::export_adapters;
pub use checkpoint::{Exported, Imported, Outcome};
pub use error::CheckpointError;
pub use tensors::Precision;

use faults::Faults;
use files::{CONFIG, TOKENIZER, WEIGHTS, put};
use format::Format;
use linattn::ops::LinearAttentionBackend;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every family that is known, by the `model_type` of its configs, or by a name of its own where two have the
/// same.
pub fn known() -> Vec<&'static str> {
    Format::known()
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
    let kept = writing::read_kept(exported, family)?;
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

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
