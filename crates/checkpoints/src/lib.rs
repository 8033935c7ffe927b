//! Checkpoints of [flash-linear-attention](https://github.com/fla-org/flash-linear-attention) as
//! linattn models, and back.
//!
//! A checkpoint is a folder with `config.json` and `model.safetensors`, or several such files and
//! `model.safetensors.index.json`; its numbers are f32, bf16 or f16. [`import`] takes it whole or
//! refuses it with everything that is wrong at once. [`export`] writes one that says exactly what the
//! model is, or refuses. Numbers of 32 bits go there and back to the last bit.
//!
//! Nobody vouches for the files that are read. A model is put together only if its sizes go with those
//! of the tensors, so that an import holds no more than the files and 16 bytes for each of their numbers,
//! and 16 MiB.
#![deny(missing_docs)]

mod bounds;
mod config;
mod families;
mod names;
mod tensors;

pub use tensors::Precision;

use burn::tensor::backend::Backend;
use burn::tensor::{Element, TensorData};
use burn_store::{ModuleSnapshot, TensorSnapshot, TensorSnapshotError};
use config::Said;
use families::Family;
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn::ops::LinearAttentionBackend;
use names::{Layout, Place, place, transpose};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tensors::{Stored, Tensors, Written};

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

/// Every family that is known, by the `model_type` of its configs.
pub fn known() -> Vec<&'static str> {
    families::known()
}

/// A checkpoint as a model.
#[derive(Debug)]
pub struct Imported<B: Backend> {
    /// The `model_type`.
    pub family: &'static str,
    /// The model's config.
    pub config: LanguageModelConfig,
    /// Ids that it knows.
    pub vocab: usize,
    /// The model.
    pub model: LanguageModel<B>,
    /// The `tokenizer.json` beside the checkpoint.
    pub tokenizer: Option<PathBuf>,
    /// A safetensors file with what the checkpoint says in other words than the model, so that
    /// [`export`] can say it in the same.
    pub kept: Option<Vec<u8>>,
}

/// Reads the checkpoint in `folder`.
/// # Errors
/// [`CheckpointError::Import`] names every key and every tensor that is unknown, missing or of the wrong
/// shape.
pub fn import<B: LinearAttentionBackend>(
    folder: &Path,
    device: &B::Device,
) -> Result<Imported<B>, CheckpointError> {
    let mut faults = Faults::new();
    let read = read::<B>(folder, device, &mut faults);
    match (read, faults.is_empty()) {
        (Some(imported), true) => Ok(imported),
        _ => Err(CheckpointError::Import { folder: folder.into(), faults }),
    }
}

fn read<B: LinearAttentionBackend>(
    folder: &Path,
    device: &B::Device,
    faults: &mut Faults,
) -> Option<Imported<B>> {
    let tensors = tensors::read(folder, faults);
    let text = match fs::read_to_string(folder.join(CONFIG)) {
        Ok(text) => text,
        Err(e) => {
            faults.push(format!("{CONFIG}: {e}"));
            return None;
        }
    };
    let (family, said, config) = config::import(&text, faults)?;
    let vocab = check_sizes(family, said, &config, &tensors, faults)?;
    let mut model = match config.init::<B>(vocab, device) {
        Ok(model) => model,
        Err(e) => {
            faults.push(impossible(e));
            return None;
        }
    };
    let mut found = Found { tensors: &tensors, used: BTreeSet::new(), faults: &mut *faults };
    let snapshots = found.all::<B>(family, &model);
    let kept = found.kept(family);
    found.complain_of_the_rest(family, config.tie_embeddings);
    found.complain_of_what_is_not_finite();
    if !faults.is_empty() {
        return None;
    }
    let result = ModuleSnapshot::<B>::apply(&mut model, snapshots, None, None, true);
    faults.extend(result.errors.iter().map(ToString::to_string));
    let tokenizer = Some(folder.join(TOKENIZER)).filter(|path| path.exists());
    Some(Imported { family: family.model_type, config, vocab, model, tokenizer, kept })
}

/// A config that no model has.
fn impossible(e: impl std::fmt::Display) -> String {
    format!("{CONFIG} makes a model that cannot be: {e}")
}

/// Ids that the model knows: rows of the embedding, or one where there is none, so that the other tensors
/// can be looked at. None, with the reason among `faults`, where the config's sizes are not those of the
/// tensors: then there is no model to hold the tensors against, and its memory may be more than there is.
fn check_sizes(
    family: &Family,
    said: Said,
    config: &LanguageModelConfig,
    tensors: &Tensors,
    faults: &mut Faults,
) -> Option<usize> {
    let root = family.frame.root;
    let names = [format!("{root}.embeddings.weight"), format!("{root}.embedding.weight")];
    let embedding = names.iter().find_map(|name| Some((name, &tensors.get(name)?.shape)));
    let mut vocab = 1;
    if let Some((name, shape)) = embedding {
        let &[rows, width] = &shape[..] else {
            faults.push(format!("{name} is {shape:?}; it has to be [ids, {}]", config.d_model));
            return None;
        };
        if width != config.d_model {
            let want = format!("[{rows}, {}], as `hidden_size` says", config.d_model);
            faults.push(format!("{name} is {shape:?}; it has to be {want}"));
            return None;
        }
        if said.vocab.is_some_and(|said| said != rows) {
            let said = said.vocab.unwrap_or_default();
            faults.push(format!("{CONFIG}: `vocab_size` is {said}; {name} has {rows} rows"));
        }
        vocab = rows;
    }
    let last = tensors.keys().filter_map(|name| {
        let rest = name.strip_prefix(root)?.strip_prefix(".layers.")?;
        rest.split('.').next()?.parse::<usize>().ok()
    });
    let (depth, there) = (config.depth(), last.max().map_or(0, |last| last.saturating_add(1)));
    // A few that are missing are named one by one.
    if depth > there.max(4).saturating_mul(4) {
        let there = format!("the tensors have {there} layers");
        faults.push(format!("{CONFIG}: `num_hidden_layers` is {depth}; {there}"));
        return None;
    }
    check_count(config, vocab, tensors).map_err(|fault| faults.push(fault)).ok()?;
    Some(vocab)
}

/// Refuses a config whose model has many more weights than there are numbers.
fn check_count(
    config: &LanguageModelConfig,
    vocab: usize,
    tensors: &Tensors,
) -> Result<(), String> {
    let cost = config.cost(1).map_err(impossible)?;
    let sizes = tensors.values().map(|t| t.shape.iter().map(|&size| size as f64).product::<f64>());
    let numbers: f64 = sizes.sum();
    // A weight is a multiplication and an addition; up to half of the rest is the recurrence.
    let layers = cost.flops_per_token as f64 / 4.0;
    let weights = layers + vocab as f64 * config.d_model as f64;
    if weights <= 4.0 * numbers + f64::from(1 << 22) {
        return Ok(());
    }
    Err(format!(
        "{CONFIG} makes a model of {weights:.0} weights at the least, and the tensors have {numbers:.0} \
         numbers; `hidden_size`, `num_heads`, `head_dim`, `intermediate_size` and the like have to be \
         those of the tensors"
    ))
}

/// Weights of a model as the files have them.
struct Found<'a> {
    tensors: &'a Tensors,
    used: BTreeSet<String>,
    faults: &'a mut Faults,
}

/// Name, place and shape of every weight of a model; the weight itself.
fn weights<B: Backend>(
    family: &Family,
    model: &LanguageModel<B>,
) -> Vec<(TensorSnapshot, Option<Place>)> {
    let snapshots = ModuleSnapshot::<B>::collect(model, None, None, true);
    let names: BTreeSet<String> = snapshots.iter().map(TensorSnapshot::full_path).collect();
    let gated = |path: &[String]| match path {
        [layers, i, attn, ..] => names.contains(&format!("{layers}.{i}.{attn}.g_proj.weight")),
        _ => false,
    };
    snapshots
        .into_iter()
        .map(|snapshot| {
            let path = snapshot.path_stack.clone().unwrap_or_default();
            let module = snapshot.module_type().unwrap_or_default();
            let place = place(family, &path, &module, &snapshot.shape, gated(&path));
            (snapshot, place)
        })
        .collect()
}

impl Found<'_> {
    /// The numbers of every weight of `model`, under our names.
    fn all<B: LinearAttentionBackend>(
        &mut self,
        family: &Family,
        model: &LanguageModel<B>,
    ) -> Vec<TensorSnapshot> {
        let mut snapshots = vec![];
        let bounds = self.bounds(family, model);
        for (ours, place) in weights(family, model) {
            let name = ours.full_path();
            let values: Box<dyn Fn() -> Vec<f32>> = match place {
                Some(place) => match self.values(&place) {
                    Some(values) => values,
                    None => continue,
                },
                None => match bounds.get(&name).cloned() {
                    Some(row) => Box::new(move || row.clone()),
                    None => {
                        self.faults.push(format!("`{}` has nothing for {name}", family.model_type));
                        continue;
                    }
                },
            };
            snapshots.push(snapshot::<B>(&ours, values));
        }
        snapshots
    }

    /// A weight's numbers in our order, read when they are wanted.
    fn values(&mut self, place: &Place) -> Option<Box<dyn Fn() -> Vec<f32>>> {
        let (tensors, mut names) = (self.tensors, std::iter::once(&place.name).chain(&place.old));
        let found = names.find_map(|name| Some((name, tensors.get(name)?)));
        let Some((name, tensor)) = found else { return self.half(place) };
        self.used.insert(name.clone());
        if !same_but_for_ones(&tensor.shape, &place.shape) {
            let wide = self.half(place);
            if wide.is_none() {
                let (got, want) = (&tensor.shape, &place.shape);
                self.faults.push(format!("{name} is {got:?}; it has to be {want:?}"));
            }
            return wide;
        }
        Some(ordered(tensor.clone(), place))
    }

    /// A part of what was once one matrix: the MLP's gate, and what it multiplies below.
    fn half(&mut self, place: &Place) -> Option<Box<dyn Fn() -> Vec<f32>>> {
        let tensors = self.tensors;
        let gate = place.name.replace(".mlp.up_proj.", ".mlp.gate_proj.");
        let up = gate.replace(".mlp.gate_proj.", ".mlp.up_proj.");
        let whole = tensors.get(&gate).filter(|_| gate != up && !tensors.contains_key(&up));
        if let (Some(tensor), [rows, columns]) = (whole, &place.shape[..])
            && tensor.shape == [2 * rows, *columns]
        {
            let (tensor, rows, columns) = (tensor.clone(), *rows, *columns);
            let start = if gate == place.name { 0 } else { rows * columns };
            self.used.insert(gate);
            return Some(Box::new(move || {
                let values = tensor.values();
                transpose(&values[start..start + rows * columns], rows, columns)
            }));
        }
        if !tensors.contains_key(&place.name) {
            self.faults.push(format!("{} is missing", place.name));
        }
        None
    }

    /// Our bounds of forget gates by their names.
    fn bounds<B: Backend>(
        &mut self,
        family: &Family,
        model: &LanguageModel<B>,
    ) -> BTreeMap<String, Vec<f32>> {
        let places = bound_names(family, model);
        let Some((name, tensor)) = joint_bounds(family, self.tensors) else {
            if !places.is_empty() {
                self.faults.push(format!("{}.{BOUNDS} is missing", family.frame.root));
            }
            return BTreeMap::new();
        };
        if places.is_empty() {
            return BTreeMap::new(); // of a single layer, or unknown to the config
        }
        self.used.insert(name.clone());
        let layers = tensor.shape.first().copied().unwrap_or(0);
        let width = places.values().next().copied().unwrap_or(0);
        if tensor.shape[..] != [layers, width] {
            let want = format!("as many rows as layers of {width}");
            self.faults.push(format!("{name} is {:?}; it has to be {want}", tensor.shape));
            return BTreeMap::new();
        }
        let rows = bounds::inverse_sigmoids(&tensor.values(), layers);
        places
            .into_keys()
            .filter_map(|name| {
                let row = layer_of(&name).checked_sub(1).and_then(|l| rows.get(l))?;
                Some((name, row.clone()))
            })
            .collect()
    }

    /// Tensors of the checkpoint that no weight of ours holds in the same form.
    fn kept(&mut self, family: &Family) -> Option<Vec<u8>> {
        let (name, tensor) = joint_bounds(family, self.tensors)?;
        self.used.insert(name.clone());
        let written = (name, tensor.shape.clone(), tensor.values());
        match tensors::to_bytes(&[written], Precision::F32) {
            Ok(bytes) => Some(bytes),
            Err(e) => {
                self.faults.push(e);
                None
            }
        }
    }

    /// A weight that is no number makes every answer none.
    fn complain_of_what_is_not_finite(&mut self) {
        for name in &self.used {
            let values = self.tensors.get(name).map(Stored::values).unwrap_or_default();
            if let Some(place) = values.iter().position(|x| !x.is_finite()) {
                let value = values[place];
                self.faults
                    .push(format!("{name} is {value} at place {place}; it has to be finite"));
            }
        }
    }

    fn complain_of_the_rest(&mut self, family: &Family, tied: bool) {
        for name in self.tensors.keys().filter(|name| !self.used.contains(*name)) {
            let idle = name.ends_with(".rotary.inv_freq")
                || (tied && name == "lm_head.weight")
                || family.unused.iter().any(|end| name.ends_with(end));
            if !idle {
                self.faults.push(format!("{name} is no weight of this model"));
            }
        }
    }
}

/// A checkpoint's tensor in our order.
fn ordered(tensor: Stored, place: &Place) -> Box<dyn Fn() -> Vec<f32>> {
    let (first, last) = (place.shape.first().copied(), place.shape.last().copied());
    match (place.layout, first, last) {
        (Layout::Transposed, Some(rows), Some(columns)) => {
            Box::new(move || transpose(&tensor.values(), rows, columns))
        }
        _ => Box::new(move || tensor.values()),
    }
}

fn same_but_for_ones(a: &[usize], b: &[usize]) -> bool {
    let sizes = |shape: &[usize]| -> Vec<usize> {
        shape.iter().copied().filter(|&size| size != 1).collect()
    };
    sizes(a) == sizes(b)
}

/// Numbers for a weight of ours.
fn snapshot<B: Backend>(
    ours: &TensorSnapshot,
    values: Box<dyn Fn() -> Vec<f32>>,
) -> TensorSnapshot {
    let (shape, dtype) = (ours.shape.clone(), <B::FloatElem as Element>::dtype());
    let data = {
        let shape = shape.clone();
        move || -> Result<TensorData, TensorSnapshotError> {
            Ok(TensorData::new(values(), shape.clone()).convert_dtype(dtype))
        }
    };
    TensorSnapshot::from_closure(
        Rc::new(data),
        dtype,
        shape,
        ours.path_stack.clone().unwrap_or_default(),
        ours.container_stack.clone().unwrap_or_default(),
        ours.tensor_id.unwrap_or_default(),
    )
}

/// The checkpoint's bounds of forget gates, for all layers.
fn joint_bounds<'a>(family: &Family, tensors: &'a Tensors) -> Option<(String, &'a Stored)> {
    let name = format!("{}.{BOUNDS}", family.frame.root);
    let tensor = tensors.get(&name).filter(|_| family.bounds)?;
    Some((name, tensor))
}

/// Our bounds' names, and how many channels each has.
fn bound_names<B: Backend>(family: &Family, model: &LanguageModel<B>) -> BTreeMap<String, usize> {
    let list = weights(family, model).into_iter();
    list.filter(|(ours, place)| place.is_none() && ours.full_path().ends_with(".lower_bound"))
        .map(|(ours, _)| (ours.full_path(), ours.shape.iter().product()))
        .collect()
}

/// The number in `layers.3.attn.lower_bound`.
fn layer_of(name: &str) -> usize {
    name.split('.').nth(1).and_then(|i| i.parse().ok()).unwrap_or(0)
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
    /// The file of [`Imported::kept`], if the model came from a checkpoint.
    pub kept: Option<&'a Path>,
}

/// Writes a model as a checkpoint of `family`, by default the one of its first mixer that has any.
/// Gives the family.
/// # Errors
/// [`CheckpointError`] names every key that such a checkpoint would say otherwise.
pub fn export<B: LinearAttentionBackend>(
    exported: &Exported<'_, B>,
    family: Option<&str>,
    precision: Precision,
    folder: &Path,
    overwrite: bool,
) -> Result<&'static str, CheckpointError> {
    let family = find_family(exported.config, family)?;
    if folder.join(CONFIG).exists() && !overwrite {
        return Err(CheckpointError::Exists { folder: folder.into() });
    }
    let wrong = |faults| CheckpointError::Export { family: family.model_type.into(), faults };
    let table = config::export(exported.config, exported.vocab, family, precision);
    let table = table.map_err(wrong)?;
    let tensors = written(family, exported).map_err(wrong)?;
    let bytes = tensors::to_bytes(&tensors, precision).map_err(|e| wrong(vec![e]))?;
    let failed = |path: &Path, why: String| CheckpointError::Write { path: path.into(), why };
    fs::create_dir_all(folder).map_err(|e| failed(folder, e.to_string()))?;
    if let Some(tokenizer) = exported.tokenizer {
        let path = folder.join(TOKENIZER);
        fs::copy(tokenizer, &path).map_err(|e| failed(&path, e.to_string()))?;
    }
    let text = format!("{:#}\n", serde_json::Value::Object(table));
    for (name, bytes) in [(WEIGHTS, bytes), (CONFIG, text.into_bytes())] {
        let (path, draft) = (folder.join(name), folder.join(format!("{name}.unfinished")));
        let done = fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, &path));
        done.map_err(|e| {
            let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
            failed(&path, e.to_string())
        })?;
    }
    Ok(family.model_type)
}

fn find_family(
    config: &LanguageModelConfig,
    family: Option<&str>,
) -> Result<&'static Family, CheckpointError> {
    let unknown = |family: &str| CheckpointError::Family { family: family.to_string() };
    if let Some(name) = family {
        return families::family(name).ok_or_else(|| unknown(name));
    }
    let mixers = config::mixers(config);
    // Attention is a part of hybrids of any other family.
    let own = mixers.iter().find(|mixer| **mixer != "attention").or_else(|| mixers.first());
    let own = own.copied().unwrap_or_default();
    families::FAMILIES.iter().find(|family| family.mixer == own).ok_or_else(|| unknown(own))
}

/// Every weight under its name there.
fn written<B: LinearAttentionBackend>(
    family: &Family,
    exported: &Exported<'_, B>,
) -> Result<Vec<Written>, Faults> {
    let (mut list, mut faults) = (vec![], Faults::new());
    let mut bounds: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    for (ours, place) in weights(family, exported.model) {
        let name = ours.full_path();
        let data = match ours.to_data() {
            Ok(data) => data.iter::<f32>().collect::<Vec<f32>>(),
            Err(e) => {
                faults.push(format!("{name}: {e}"));
                continue;
            }
        };
        match place {
            Some(Place { name, shape, layout, .. }) => {
                let own: &[usize] = &ours.shape;
                let values = match (layout, own) {
                    (Layout::Transposed, &[rows, columns]) => transpose(&data, rows, columns),
                    _ => data,
                };
                list.push((name, shape, values));
            }
            None if family.bounds && name.ends_with(".lower_bound") => {
                bounds.insert(layer_of(&name), data);
            }
            None => faults.push(format!("{name} has no place in such a checkpoint")),
        }
    }
    if family.bounds && !bounds.is_empty() {
        match joint(family, bounds, exported) {
            Ok(tensor) => list.push(tensor),
            Err(fault) => faults.push(fault),
        }
    }
    if faults.is_empty() { Ok(list) } else { Err(faults) }
}

/// Bounds of all layers in one tensor: the one that they came from, if they are still the same.
fn joint<B: Backend>(
    family: &Family,
    bounds: BTreeMap<usize, Vec<f32>>,
    exported: &Exported<'_, B>,
) -> Result<Written, String> {
    let layers = exported.config.depth();
    if let Some(path) = exported.kept {
        let kept = tensors::read_one(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if let Some((name, tensor)) = joint_bounds(family, &kept) {
            let values = tensor.values();
            let rows = bounds::inverse_sigmoids(&values, layers);
            let same = |(l, row): (&usize, &Vec<f32>)| {
                l.checked_sub(1).map(|l| rows.get(l)) == Some(Some(row))
            };
            if bounds.iter().all(same) {
                return Ok((name, tensor.shape.clone(), values));
            }
        }
    }
    if bounds.len() + 1 != layers {
        return Err(
            "a hybrid's layers of attention have lower bounds in such a checkpoint, and none \
                    in the model"
                .to_string(),
        );
    }
    let rows: Vec<Vec<f32>> = bounds.into_values().collect();
    let width = rows.first().map_or(0, Vec::len);
    let values = bounds::joint(&rows).ok_or_else(|| {
        "the lower bounds do not rise from layer to layer, as such a checkpoint's do".to_string()
    })?;
    Ok((format!("{}.{BOUNDS}", family.frame.root), vec![layers, width], values))
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
