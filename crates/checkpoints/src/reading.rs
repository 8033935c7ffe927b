//! A checkpoint's tensors as the weights of a model.

use crate::checkpoint::Imported;
use crate::config;
use crate::faults::Faults;
use crate::files::{CONFIG, TOKENIZER};
use crate::format::Format;
use crate::names::{Layout, Place, transpose};
use crate::tensors::{self, Stored, Tensors, Written};
use crate::weights::{BOUNDS, bound_names, joint_bounds, layer_of, weights};
use crate::{bounds, kept, merging};
use burn::tensor::backend::Backend;
use burn::tensor::{Element, TensorData};
use burn_store::{ModuleSnapshot, TensorSnapshot, TensorSnapshotError};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn::ops::LinearAttentionBackend;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::rc::Rc;

/// Reads the checkpoint in `folder`, with the adapters of another folder in its weights; None, or something among
/// `faults`, if it cannot be taken.
pub(crate) fn read<B: LinearAttentionBackend>(
    folder: &Path,
    adapters: Option<&Path>,
    device: &B::Device,
    faults: &mut Faults,
) -> Option<Imported<B>> {
    let mut tensors = tensors::read(folder, faults);
    if let Some(adapters) = adapters {
        merging::add(adapters, &mut tensors, faults);
    }
    let text = match fs::read_to_string(folder.join(CONFIG)) {
        Ok(text) => text,
        Err(e) => {
            faults.push(format!("{CONFIG}: {e}"));
            return None;
        }
    };
    let (format, said, config) = config::import(&text, &tensors, faults)?;
    let end_ids = config::end_ids(&text, faults);
    let vocab = check_sizes(format, said, &config, &tensors, faults)?;
    let mut model = match config.init::<B>(vocab, device) {
        Ok(model) => model,
        Err(e) => {
            faults.push(impossible(e));
            return None;
        }
    };
    let mut found = Found {
        format,
        tensors: &tensors,
        used: BTreeSet::new(),
        otherwise: BTreeSet::new(),
        faults: &mut *faults,
    };
    let snapshots = found.all::<B>(&config, &model);
    let left_out = found.rest(config.tie_embeddings);
    let kept = found.kept(&left_out);
    found.complain_of_what_is_not_finite();
    if !faults.is_empty() {
        return None;
    }
    let result = ModuleSnapshot::<B>::apply(&mut model, snapshots, None, None, true);
    faults.extend(result.errors.iter().map(ToString::to_string));
    let tokenizer = Some(folder.join(TOKENIZER)).filter(|path| path.exists());
    Some(Imported {
        family: format.name(),
        config,
        vocab,
        model,
        tokenizer,
        end_ids,
        kept,
        left_out,
    })
}

/// A config that no model has.
fn impossible(e: impl std::fmt::Display) -> String {
    format!("{CONFIG} makes a model that cannot be: {e}")
}

/// Ids that the model knows: rows of the embedding, or one where there is none, so that the other tensors
/// can be looked at. None, with the reason among `faults`, where the config's sizes are not those of the
/// tensors: then there is no model to hold the tensors against, and its memory may be more than there is.
fn check_sizes(
    format: Format,
    said: Option<usize>,
    config: &LanguageModelConfig,
    tensors: &Tensors,
    faults: &mut Faults,
) -> Option<usize> {
    let names = format.embeddings();
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
        if let Some(said) = said.filter(|said| *said != rows) {
            faults.push(format!("{CONFIG}: `vocab_size` is {said}; {name} has {rows} rows"));
        }
        vocab = rows;
    }
    let layers = format.layers();
    let last = tensors.keys().filter_map(|name| {
        let rest = name.strip_prefix(&layers)?;
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
    format: Format,
    tensors: &'a Tensors,
    used: BTreeSet<String>,
    /// Tensors that stand there in other words than a model of ours would be written in.
    otherwise: BTreeSet<String>,
    faults: &'a mut Faults,
}

/// Numbers that are read when they are wanted.
type Later = Box<dyn Fn() -> Vec<f32>>;

impl Found<'_> {
    /// The numbers of every weight of `model`, under our names.
    fn all<B: LinearAttentionBackend>(
        &mut self,
        config: &LanguageModelConfig,
        model: &LanguageModel<B>,
    ) -> Vec<TensorSnapshot> {
        let mut snapshots = vec![];
        let weights = weights(self.format, config, model);
        let bounds = self.bounds(bound_names(&weights));
        for (ours, place) in weights {
            let name = ours.full_path();
            let values: Later = match place {
                Some(place) => match self.values(&place) {
                    Some(values) => values,
                    None => continue,
                },
                None => match bounds.get(&name).cloned() {
                    Some(row) => Box::new(move || row.clone()),
                    None => {
                        let format = self.format.name();
                        self.faults.push(format!("`{format}` has nothing for {name}"));
                        continue;
                    }
                },
            };
            snapshots.push(snapshot::<B>(&ours, values));
        }
        snapshots
    }

    /// A weight's numbers in our order, read when they are wanted.
    fn values(&mut self, place: &Place) -> Option<Later> {
        let (tensors, mut names) = (self.tensors, std::iter::once(&place.name).chain(&place.old));
        let found = names.find_map(|name| Some((name, tensors.get(name)?)));
        let Some((name, tensor)) = found else { return self.half(place) };
        self.used.insert(name.clone());
        if *name != place.name {
            self.otherwise.insert(name.clone());
        }
        let want = place.whole();
        if !same_but_for_ones(&tensor.shape, &want) {
            let other = self.cut(place).or_else(|| self.half(place));
            if other.is_none() {
                let got = &tensor.shape;
                self.faults.push(format!("{name} is {got:?}; it has to be {want:?}"));
            }
            return other;
        }
        let (tensor, place) = (tensor.clone(), place.clone());
        Some(Box::new(move || {
            let values = match &place.rows {
                Some(rows) => tensor.rows(&rows.ranges),
                None => tensor.values(),
            };
            ordered(values, &place)
        }))
    }

    /// A weight of tensors that are cut elsewhere.
    fn cut(&mut self, place: &Place) -> Option<Later> {
        let (names, rows) = place.cut.as_ref()?;
        let parts: Option<Vec<&Stored>> = names.iter().map(|name| self.tensors.get(name)).collect();
        let parts: Vec<Stored> = parts?.into_iter().cloned().collect();
        let fits = |part: &Stored| same_but_for_ones(&part.shape[1..], &place.shape[1..]);
        let count =
            parts.iter().map(|part| part.shape.first().copied().unwrap_or(0)).sum::<usize>();
        if count != rows.total || !parts.iter().all(fits) {
            return None;
        }
        self.used.extend(names.iter().cloned());
        self.otherwise.extend(names.iter().cloned());
        let (place, ranges) = (place.clone(), rows.ranges.clone());
        Some(Box::new(move || {
            let all: Vec<f32> = parts.iter().flat_map(Stored::values).collect();
            let width = all.len() / count.max(1);
            let rows = ranges.iter().flat_map(|r| &all[r.start * width..r.end * width]);
            ordered(rows.copied().collect(), &place)
        }))
    }

    /// A part of what was once one matrix: the MLP's gate, and what it multiplies below.
    fn half(&mut self, place: &Place) -> Option<Later> {
        let tensors = self.tensors;
        let gate = place.name.replace(".mlp.up_proj.", ".mlp.gate_proj.");
        let up = gate.replace(".mlp.gate_proj.", ".mlp.up_proj.");
        let fla = matches!(self.format, Format::Fla(_));
        let whole = tensors.get(&gate).filter(|_| fla && gate != up && !tensors.contains_key(&up));
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

    /// Our bounds of forget gates by their names, `places`, each with its channels.
    fn bounds(&mut self, places: BTreeMap<String, usize>) -> BTreeMap<String, Vec<f32>> {
        let Some((name, tensor)) = joint_bounds(self.format, self.tensors) else {
            if let Some(root) = self.format.bounds().filter(|_| !places.is_empty()) {
                self.faults.push(format!("{root}.{BOUNDS} is missing"));
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

    /// The checkpoint's own words, where a model of ours would be written in others.
    fn kept(&mut self, left_out: &[String]) -> Option<Vec<u8>> {
        let mut tensors: Vec<Written> = vec![];
        match self.format {
            Format::Fla(_) => {
                let (name, tensor) = joint_bounds(self.format, self.tensors)?;
                self.used.insert(name.clone());
                tensors.push((name, tensor.shape.clone(), tensor.values()));
            }
            Format::Hub(_) => {
                for name in &self.otherwise {
                    if let Some(tensor) = self.tensors.get(name) {
                        tensors.push((name.clone(), tensor.shape.clone(), tensor.values()));
                    }
                }
            }
        }
        match kept::to_bytes(self.format.name(), left_out, &tensors) {
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

    /// Names of tensors that are left out; complains of those that no part accounts for.
    fn rest(&mut self, tied: bool) -> Vec<String> {
        let mut left_out = vec![];
        let head = format!("{}.weight", self.format.head());
        let bounds = joint_bounds(self.format, self.tensors).map(|(name, _)| name);
        for name in self.tensors.keys().filter(|name| !self.used.contains(*name)) {
            if self.format.is_idle(name) {
                self.otherwise.insert(name.clone());
            } else if self.format.leaves_out(name) {
                left_out.push(name.clone());
            } else if bounds.as_ref() != Some(name)
                && !name.ends_with(".rotary.inv_freq")
                && !(tied && *name == head)
            {
                self.faults.push(format!("{name} is no weight of this model"));
            }
        }
        left_out
    }
}

/// A checkpoint's numbers in our order.
fn ordered(values: Vec<f32>, place: &Place) -> Vec<f32> {
    let (first, last) = (place.shape.first().copied(), place.shape.last().copied());
    match (place.layout, first, last) {
        (Layout::Transposed, Some(rows), Some(columns)) => transpose(&values, rows, columns),
        _ => values,
    }
}

fn same_but_for_ones(a: &[usize], b: &[usize]) -> bool {
    let sizes = |shape: &[usize]| -> Vec<usize> {
        shape.iter().copied().filter(|&size| size != 1).collect()
    };
    sizes(a) == sizes(b)
}

/// Numbers for a weight of ours.
fn snapshot<B: Backend>(ours: &TensorSnapshot, values: Later) -> TensorSnapshot {
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
