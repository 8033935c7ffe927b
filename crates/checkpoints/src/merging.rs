//! Low-rank adapters of Hugging Face's PEFT, added to the weights of the checkpoint beside which they were
//! trained: `W + scale B A`, with `scale = alpha / r`, or `alpha / sqrt(r)` where `use_rslora` says so.

use crate::adapters::{CONFIG, PREFIX, WEIGHTS};
use crate::faults::Faults;
use crate::tensors::{self, Stored, Tensors};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Keys of `adapter_config.json` that say how adapters add up.
#[derive(Deserialize)]
struct AdapterConfig {
    peft_type: String,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    /// Every other key.
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// Keys that make an adapter more than two matrices, with what they have to be.
const PLAIN: [(&str, &[&str]); 12] = [
    ("alora_invocation_tokens", &["null"]),
    ("arrow_config", &["null"]),
    ("bias", &["\"none\""]),
    ("fan_in_fan_out", &["false"]),
    // Other starts take a part of W away, which the adapter's files do not have.
    ("init_lora_weights", &["true", "false", "\"gaussian\"", "\"eva\"", "\"orthogonal\""]),
    ("layer_replication", &["null"]),
    ("lora_bias", &["false"]),
    ("modules_to_save", &["null", "[]"]),
    ("trainable_token_indices", &["null", "[]"]),
    ("use_dora", &["false"]),
    ("use_qalora", &["false"]),
    ("target_parameters", &["null", "[]"]),
];

impl AdapterConfig {
    fn read(path: &Path, faults: &mut Faults) -> Option<Self> {
        let text = fs::read_to_string(path).map_err(|e| e.to_string());
        let config =
            text.and_then(|text| serde_json::from_str::<Self>(&text).map_err(|e| e.to_string()));
        match config {
            Ok(config) => {
                config.check(faults);
                Some(config)
            }
            Err(why) => {
                faults.push(format!("{CONFIG}: {why}"));
                None
            }
        }
    }

    fn check(&self, faults: &mut Faults) {
        if self.peft_type != "LORA" {
            let kind = &self.peft_type;
            faults.push(format!("{CONFIG}: `peft_type` is {kind:?}; it has to be \"LORA\""));
        }
        for (key, plain) in PLAIN {
            let said = self.rest.get(key).map(Value::to_string);
            if let Some(said) =
                said.filter(|said| said != "null" && !plain.contains(&said.as_str()))
            {
                let plain = plain.join(" or ");
                faults.push(format!("{CONFIG}: `{key}` is {said}; it has to be {plain}"));
            }
        }
        for key in self.alpha_pattern.keys().filter(|key| key.contains(|c| !is_of_names(c))) {
            faults.push(format!(
                "{CONFIG}: `alpha_pattern` has {key:?}; its keys have to be names of modules or their ends"
            ));
        }
    }

    /// Factor of B A of a module.
    fn scale(&self, module: &str, rank: usize) -> f64 {
        let ends = |key: &str| match module.strip_suffix(key) {
            Some(before) => before.is_empty() || before.ends_with('.'),
            None => false,
        };
        let own = self.alpha_pattern.iter().find(|(key, _)| ends(key)).map(|(_, alpha)| *alpha);
        let rank = rank as f64;
        own.unwrap_or(self.lora_alpha) / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// Whether a key of a pattern with this letter is still a name and no regular expression.
fn is_of_names(letter: char) -> bool {
    letter.is_alphanumeric() || "._-".contains(letter)
}

/// Adds the adapters in `folder` to `tensors`. What does not fit is among `faults` afterwards.
pub(crate) fn add(folder: &Path, tensors: &mut Tensors, faults: &mut Faults) {
    let Some(config) = AdapterConfig::read(&folder.join(CONFIG), faults) else { return };
    let adapters = match tensors::read_one(&folder.join(WEIGHTS)) {
        Ok((adapters, _)) => adapters,
        Err(why) => return faults.push(format!("{WEIGHTS}: {why}")),
    };
    let modules = modules(&adapters, faults);
    if modules.is_empty() && faults.is_empty() {
        faults.push(format!("{WEIGHTS} has no adapters"));
    }
    for module in modules {
        let merged = merged(&config, &module, &adapters, tensors);
        match merged {
            Ok(weight) => drop(tensors.insert(format!("{module}.weight"), weight)),
            Err(fault) => faults.push(fault),
        }
    }
}

const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Names of the modules that have adapters; complains of tensors that are no part of one.
fn modules(adapters: &Tensors, faults: &mut Faults) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    for name in adapters.keys() {
        let own = name.strip_prefix(PREFIX).and_then(|name| name.strip_prefix('.'));
        match own.and_then(|own| ENDS.iter().find_map(|end| own.strip_suffix(end))) {
            Some(module) => drop(modules.insert(module.to_string())),
            None => faults.push(format!(
                "{WEIGHTS}: {name} is no low-rank matrix; names have to be {PREFIX}.NAME{} or {}",
                ENDS[0], ENDS[1]
            )),
        }
    }
    modules
}

/// The weight of a module with its adapter in it.
fn merged(
    config: &AdapterConfig,
    module: &str,
    adapters: &Tensors,
    tensors: &Tensors,
) -> Result<Stored, String> {
    let matrix = |name: String, of: &Tensors, file: &str| match of.get(&name) {
        None => Err(format!("{file}{name} is missing")),
        Some(Stored { shape, .. }) if shape.len() != 2 => {
            Err(format!("{file}{name} is {shape:?}; it has to be a matrix"))
        }
        Some(tensor) => Ok((tensor.values(), [tensor.shape[0], tensor.shape[1]])),
    };
    let [a, b] = ENDS
        .map(|end| matrix(format!("{PREFIX}.{module}{end}"), adapters, &format!("{WEIGHTS}: ")));
    let ((a, of_a), (b, of_b)) = (a?, b?);
    let (mut weight, [out, width]) = matrix(format!("{module}.weight"), tensors, "")
        .map_err(|why| format!("{why}, and {WEIGHTS} has an adapter of it"))?;
    let rank = of_a[0];
    if rank == 0 || of_a != [rank, width] || of_b != [out, rank] {
        return Err(format!(
            "{WEIGHTS}: the adapter of {module} is {of_a:?} and {of_b:?}; it has to be [r, {width}] and \
             [{out}, r]"
        ));
    }
    let scale = config.scale(module, rank);
    for (row, shares) in weight.chunks_exact_mut(width).zip(b.chunks_exact(rank)) {
        for (share, narrow) in shares.iter().zip(a.chunks_exact(width)) {
            let factor = (scale * f64::from(*share)) as f32;
            row.iter_mut().zip(narrow).for_each(|(w, a)| *w += factor * a);
        }
    }
    Ok(Stored::of(&weight, vec![out, width]))
}
