//! A model's weights under their names in a checkpoint.

use crate::checkpoint::Exported;
use crate::config;
use crate::error::CheckpointError;
use crate::faults::Faults;
use crate::format::Format;
use crate::kept::Kept;
use crate::names::{Layout, Place, transpose};
use crate::tensors::{Precision, Written};
use crate::weights::{BOUNDS, joint_bounds, layer_of, weights};
use crate::{bounds, kept};
use burn::tensor::backend::Backend;
use linattn::ops::LinearAttentionBackend;
use std::collections::BTreeMap;

/// The layout of that name; without one, the first that can say the model.
/// # Errors
/// [`CheckpointError`] if there is no such layout, or says why the first that has the model's mixer cannot
/// say it.
pub(crate) fn find_format<B: Backend>(
    exported: &Exported<'_, B>,
    family: Option<&str>,
    precision: Precision,
) -> Result<Format, CheckpointError> {
    let unknown = |family: &str| CheckpointError::Family { family: family.to_string() };
    if let Some(name) = family {
        return Format::named(name).ok_or_else(|| unknown(name));
    }
    let mixers = config::mixers(exported.config);
    // Attention is a part of hybrids of any other family.
    let own = mixers.iter().find(|mixer| !["attention", "none"].contains(mixer));
    let own = own.or_else(|| mixers.first()).copied().unwrap_or_default();
    let formats: Vec<Format> =
        Format::all().filter(|format| format.mixers().contains(&own)).collect();
    let can_say = |format: &&Format| {
        config::export(exported.config, exported.vocab, **format, precision).is_ok()
    };
    let found = formats.iter().find(can_say).or_else(|| formats.first());
    found.copied().ok_or_else(|| unknown(own))
}

/// Every tensor of the checkpoint.
pub(crate) fn written<B: LinearAttentionBackend>(
    format: Format,
    exported: &Exported<'_, B>,
    kept: &Kept,
) -> Result<Vec<Written>, Faults> {
    let (mut list, mut faults) = (vec![], Faults::new());
    let mut packed = Packed::default();
    let mut bounds: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    let mut cuts: Vec<Vec<String>> = vec![];
    for (ours, place) in weights(format, exported.config, exported.model) {
        let name = ours.full_path();
        let data = match ours.to_data() {
            Ok(data) => data.iter::<f32>().collect::<Vec<f32>>(),
            Err(e) => {
                faults.push(format!("{name}: {e}"));
                continue;
            }
        };
        match place {
            Some(place) => {
                let values = match (place.layout, &ours.shape[..]) {
                    (Layout::Transposed, &[rows, columns]) => transpose(&data, rows, columns),
                    _ => data,
                };
                if let Some((names, _)) = &place.cut
                    && !cuts.contains(names)
                {
                    cuts.push(names.clone());
                }
                match place.rows {
                    Some(_) => packed.put(&place, &values),
                    None => list.push((kept_name(&place, &values, kept), place.shape, values)),
                }
            }
            None if format.bounds().is_some() && name.ends_with(".lower_bound") => {
                bounds.insert(layer_of(&name), data);
            }
            None => faults.push(format!("{name} has no place in such a checkpoint")),
        }
    }
    match packed.finish() {
        Ok(tensors) => list.extend(tensors),
        Err(fault) => faults.push(fault),
    }
    cuts.iter().for_each(|names| cut_again(names, &mut list, kept));
    list.extend(unused(format, kept));
    if !bounds.is_empty() {
        match joint(format, bounds, exported, kept) {
            Ok(tensor) => list.push(tensor),
            Err(fault) => faults.push(fault),
        }
    }
    if faults.is_empty() { Ok(list) } else { Err(faults) }
}

/// The name that a tensor had where it came from, if its numbers are still the same; else the usual one.
fn kept_name(place: &Place, values: &[f32], kept: &Kept) -> String {
    let same =
        |name: &&String| kept.tensors.get(*name).is_some_and(|tensor| tensor.values() == values);
    place.old.iter().find(same).unwrap_or(&place.name).clone()
}

/// Tensors that the checkpoint has and no model uses.
fn unused(format: Format, kept: &Kept) -> Vec<Written> {
    let unused = kept.tensors.iter().filter(|(name, _)| format.is_idle(name));
    unused.map(|(name, tensor)| (name.clone(), tensor.shape.clone(), tensor.values())).collect()
}

/// Tensors that several weights share.
#[derive(Default)]
struct Packed {
    /// Shape, numbers, and how many rows have theirs.
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>, usize)>,
}

impl Packed {
    /// Puts a weight into its rows.
    fn put(&mut self, place: &Place, values: &[f32]) {
        let Some(rows) = &place.rows else { return };
        let (whole, count) = (place.whole(), rows.count());
        let width = values.len() / count.max(1);
        let (_, numbers, filled) = self
            .tensors
            .entry(place.name.clone())
            .or_insert_with(|| (whole, vec![0.0; rows.total * width], 0));
        let mut from = 0;
        for range in &rows.ranges {
            let size = range.len() * width;
            let place = range.start * width;
            numbers[place..place + size].copy_from_slice(&values[from..from + size]);
            from += size;
        }
        *filled += count;
    }

    /// The tensors, each of them whole.
    fn finish(self) -> Result<Vec<Written>, String> {
        let tensors = self.tensors.into_iter();
        tensors
            .map(|(name, (shape, values, filled))| match shape.first() {
                Some(&rows) if rows == filled => Ok((name, shape, values)),
                rows => {
                    let rows = rows.copied().unwrap_or(0);
                    Err(format!("{name} has {rows} rows, and the model has {filled} of them"))
                }
            })
            .collect()
    }
}

/// Tensors cut where those of the checkpoint that the model came from were, if their numbers are still the
/// same.
fn cut_again(names: &[String], list: &mut [Written], kept: &Kept) {
    let before: Option<Vec<_>> = names.iter().map(|name| kept.tensors.get(name)).collect();
    let places: Option<Vec<usize>> =
        names.iter().map(|name| list.iter().position(|(known, ..)| known == name)).collect();
    let (Some(before), Some(places)) = (before, places) else { return };
    let old: Vec<f32> = before.iter().flat_map(|tensor| tensor.values()).collect();
    let new: Vec<f32> = places.iter().flat_map(|&i| list[i].2.clone()).collect();
    if old == new {
        for (tensor, i) in before.iter().zip(places) {
            (list[i].1, list[i].2) = (tensor.shape.clone(), tensor.values());
        }
    }
}

/// Bounds of all layers in one tensor: the one that they came from, if they are still the same.
fn joint<B: Backend>(
    format: Format,
    bounds: BTreeMap<usize, Vec<f32>>,
    exported: &Exported<'_, B>,
    kept: &Kept,
) -> Result<Written, String> {
    let layers = exported.config.depth();
    if let Some((name, tensor)) = joint_bounds(format, &kept.tensors) {
        let values = tensor.values();
        let rows = bounds::inverse_sigmoids(&values, layers);
        let same = |(l, row): (&usize, &Vec<f32>)| {
            l.checked_sub(1).map(|l| rows.get(l)) == Some(Some(row))
        };
        if bounds.iter().all(same) {
            return Ok((name, tensor.shape.clone(), values));
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
    let root = format.bounds().unwrap_or_default();
    Ok((format!("{root}.{BOUNDS}"), vec![layers, width], values))
}

/// Settings of the checkpoint that the model came from, in its own words.
pub(crate) fn read_kept<B: Backend>(
    exported: &Exported<'_, B>,
    family: Option<&str>,
) -> Result<Kept, CheckpointError> {
    match exported.kept.map(|path| (path, kept::read(path))) {
        None => Ok(Kept::default()),
        Some((_, Ok(kept))) => Ok(kept),
        Some((path, Err(why))) => {
            let faults = vec![format!("{}: {why}", path.display())];
            Err(CheckpointError::Export { family: family.unwrap_or("any").into(), faults })
        }
    }
}
