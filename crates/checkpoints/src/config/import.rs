//! `config.json` read: a model's config, and everything in the file that is wrong or not known here.

use super::{Rule, json_of, whole};
use crate::Faults;
use crate::families::{Channels, Family, family, known};
use linattn::nn::LanguageModelConfig;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Keys that say nothing of what is computed.
const IDLE: &[&str] = &[
    "add_cross_attention",
    "architectures",
    "attn_mode",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
    "fuse_swiglu",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
    "use_l2warp",
];

/// Larger sizes are slips of the pen, and their products would not fit a number.
const LARGEST: f64 = (1 << 24) as f64;
/// Layers are tables of the config, and fewer.
const MOST_LAYERS: usize = 1 << 16;
/// Whole numbers of JSON are exact up to here.
const LARGEST_EXACT: f64 = (1_u64 << 53) as f64;

/// Keys that any family may have, and must have so.
const EVERYWHERE: &[(&str, &[&str])] = &[
    ("attnres_block_size", &["null"]),
    ("conv_bias", &["false"]),
    ("elementwise_affine", &["true"]),
    ("share_conv_kernel", &["false"]),
    ("use_elu", &["false"]),
    ("use_rope", &["false"]),
];

/// Facts about the tensors that a foreign config has and ours do not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said {
    /// Rows of the embedding, where it says so.
    pub(crate) vocab: Option<usize>,
}

/// Reads a `config.json`. None where not even the family is known, or no model could be so large.
pub(crate) fn import(
    text: &str,
    faults: &mut Faults,
) -> Option<(&'static Family, Said, LanguageModelConfig)> {
    let table: Map<String, Value> = match serde_json::from_str(&without_infinities(text)) {
        Ok(table) => table,
        Err(e) => {
            faults.push(format!("config.json: {e}"));
            return None;
        }
    };
    let model_type = table.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(family) = family(model_type) else {
        faults.push(format!(
            "config.json: `model_type` is {model_type:?}; it has to be one of {}",
            known().join(", ")
        ));
        return None;
    };
    let mut keys = Keys { table: &table, seen: BTreeSet::new(), faults: &mut *faults };
    let config = keys.model(family);
    let said = Said { vocab: keys.vocabulary() };
    keys.complain_of_the_rest(family);
    match serde_json::from_value(config?) {
        Ok(config) => Some((family, said, config)),
        Err(e) => {
            faults.push(format!("config.json: {e}"));
            None
        }
    }
}

/// Python writes infinities into JSON, which has none: null in their place.
fn without_infinities(text: &str) -> String {
    let mut parts: Vec<String> = text.split('"').map(str::to_string).collect();
    // What stands between two quotes is a string; an escaped quote ends in a backslash.
    let mut inside = false;
    for part in &mut parts {
        if !inside {
            for number in ["-Infinity", "Infinity", "NaN"] {
                *part = part.replace(number, "null");
            }
        }
        let slashes = part.chars().rev().take_while(|&c| c == '\\').count();
        if !(inside && slashes % 2 == 1) {
            inside = !inside;
        }
    }
    parts.join("\"")
}

/// `256 ceil(int(d_model * ratio * 2 / 3) / 256)`, as the published models have it.
fn inner_width(d_model: usize, ratio: f64) -> usize {
    ((d_model as f64 * ratio * 2.0 / 3.0) as usize).div_ceil(256) * 256
}

/// Whether a size is one that a model can have.
fn possible(size: f64) -> bool {
    (0.0..=LARGEST).contains(&size)
}

/// A config under reading.
struct Keys<'a> {
    table: &'a Map<String, Value>,
    seen: BTreeSet<String>,
    faults: &'a mut Faults,
}

impl Keys<'_> {
    fn fault(&mut self, key: &str, got: &Value, want: impl std::fmt::Display) {
        self.faults.push(format!("config.json: `{key}` is {got}; it has to be {want}"));
    }

    fn get(&mut self, key: &str, default: &str) -> Value {
        self.seen.insert(key.to_string());
        match self.table.get(key) {
            None | Some(Value::Null) => json_of(default),
            Some(value) => value.clone(),
        }
    }

    fn number(&mut self, key: &str, default: &str) -> f64 {
        let value = self.get(key, default);
        value.as_f64().unwrap_or_else(|| {
            self.fault(key, &value, "a number");
            1.0
        })
    }

    fn count(&mut self, key: &str, default: &str) -> usize {
        self.count_to(LARGEST as usize, key, default)
    }

    fn count_to(&mut self, most: usize, key: &str, default: &str) -> usize {
        let value = self.get(key, default);
        whole(&value).filter(|count| *count <= most).unwrap_or_else(|| {
            self.fault(key, &value, format!("a whole number above 0, and {most} at most"));
            1
        })
    }

    /// A share of the model's width.
    fn share(&mut self, key: &str, default: &str, d_model: usize) -> f64 {
        let share = self.number(key, default);
        if possible(share * d_model as f64) {
            return share;
        }
        let value = self.get(key, default);
        self.fault(key, &value, format!("at least 0, and at most {LARGEST} / {d_model}"));
        1.0
    }

    /// `vocab_size`, where it is there.
    fn vocabulary(&mut self) -> Option<usize> {
        let value = self.get("vocab_size", "null");
        let vocab = whole(&value);
        if vocab.is_none() && !value.is_null() {
            self.fault("vocab_size", &value, "a whole number above 0");
        }
        vocab
    }

    fn flag(&mut self, key: &str, default: &str) -> bool {
        let value = self.get(key, default);
        value.as_bool().unwrap_or_else(|| {
            self.fault(key, &value, "true or false");
            false
        })
    }

    fn only(&mut self, key: &str, allowed: &[&str]) {
        self.seen.insert(key.to_string());
        if let Some(value) = self.table.get(key)
            && !allowed.iter().any(|text| json_of(text) == *value)
        {
            self.fault(key, value, format!("{}: nothing else is known here", allowed.join(" or ")));
        }
    }

    /// The whole model, as our config spells it. None where its sizes have no bounds.
    fn model(&mut self, family: &Family) -> Option<Value> {
        let before = self.faults.len();
        let d_model = self.count("hidden_size", "2048");
        let layers = self.count_to(MOST_LAYERS, "num_hidden_layers", "24");
        let bounded = self.faults.len() == before;
        let norm_eps = self.number("norm_eps", &family.norm_eps.to_string());
        let tied = self.flag("tie_word_embeddings", "false");
        for (key, allowed) in EVERYWHERE {
            self.only(key, allowed);
        }
        let mlp = self.mlp(family, d_model);
        let mixer = self.mixer(family, d_model);
        let attention = self.attention(family, layers);
        let later = self.later(family);
        let mut list: Vec<Value> = vec![];
        for (i, attention) in attention.into_iter().enumerate() {
            let mixer = match attention {
                Some(attention) => json!({ "attention": attention }),
                None => {
                    let mut mixer = mixer.clone();
                    if i > 0 {
                        mixer.extend(later.clone());
                    }
                    json!({ family.mixer: mixer })
                }
            };
            let layer = json!({ "repeat": 1, "mixer": mixer, "mlp": mlp });
            match list.last_mut() {
                Some(last) if last["mixer"] == layer["mixer"] => {
                    last["repeat"] = (last["repeat"].as_u64().unwrap_or(0) + 1).into();
                }
                _ => list.push(layer),
            }
        }
        let mut model = json!({
            "d_model": d_model, "layers": list, "tie_embeddings": tied, "norm_eps": norm_eps,
        });
        if family.frame.layer_norm {
            self.only("norm_bias", &["true"]);
            model["norm"] = "layer".into();
            if self.flag("norm_first", "true") {
                model["pre_norm"] = true.into();
            }
        }
        bounded.then_some(model)
    }

    /// Keys that all layers' mixers have but the first's.
    fn later(&mut self, family: &Family) -> Map<String, Value> {
        let mut later = Map::new();
        if family.bounds && !self.flag("use_lower_bound", "true") {
            return later;
        }
        for (ours, value) in family.later {
            later.insert((*ours).to_string(), json_of(value));
        }
        for (theirs, ours, default) in family.later_keys {
            later.insert((*ours).to_string(), self.get(theirs, default));
        }
        later
    }

    fn mlp(&mut self, family: &Family, d_model: usize) -> Value {
        let channels = family.frame.channels;
        let swiglu = channels == Channels::SwiGlu;
        if channels == Channels::None {
            return json!(channels.name());
        }
        let allowed: &[&str] = if swiglu { &["\"swish\"", "\"silu\""] } else { &["\"sqrelu\""] };
        self.only("hidden_act", allowed);
        let ratio = self.share("hidden_ratio", &family.hidden_ratio.to_string(), d_model);
        let width = match self.get("intermediate_size", "null").is_null() {
            true if swiglu => inner_width(d_model, ratio),
            true => ((d_model as f64 * ratio) as usize).next_multiple_of(32),
            false => self.count("intermediate_size", "null"),
        };
        json!({ channels.name(): { "width": width } })
    }

    /// The keys of our mixer.
    fn mixer(&mut self, family: &Family, d_model: usize) -> Map<String, Value> {
        let mut ours = Map::new();
        for rule in family.rules {
            let heads = ours.get("heads").and_then(whole).unwrap_or(1);
            match *rule {
                Rule::Key(theirs, name, default) => {
                    let value = self.get(theirs, default);
                    if value.as_f64().is_some_and(|x| x.abs() > LARGEST_EXACT) {
                        self.fault(theirs, &value, format!("at most {LARGEST_EXACT}"));
                    } else if !value.is_null() && value != "auto" {
                        ours.insert(name.into(), value);
                    }
                }
                Rule::OneOf(theirs, name, allowed, default) => {
                    self.only(theirs, allowed);
                    ours.insert(name.into(), self.get(theirs, default));
                }
                Rule::Flag(key) => {
                    if self.flag(key, "false") {
                        ours.insert(key.into(), true.into());
                    }
                }
                Rule::Twin(theirs, name) => {
                    let (value, own) = (self.get(theirs, "null"), ours.get(name));
                    if let Some(own) = own.filter(|own| !value.is_null() && value != **own) {
                        self.fault(theirs, &value, format!("{own}, as its like is"));
                    }
                }
                Rule::Same(key) => {
                    let value = self.number(key, &family.norm_eps.to_string());
                    ours.insert(key.into(), value.into());
                }
                Rule::Ours(name, value) => {
                    ours.insert(name.into(), json_of(value));
                }
                Rule::Only(key, allowed) => self.only(key, allowed),
                Rule::AsHeads(key) => {
                    let value = self.get(key, "null");
                    if !value.is_null() && whole(&value) != Some(heads) {
                        self.fault(key, &value, format!("null, or as many as heads, {heads}"));
                    }
                }
                Rule::Convolution(default) => {
                    let (used, size) =
                        (self.flag("use_short_conv", default), self.count("conv_size", "4"));
                    ours.insert("conv_size".into(), if used { size } else { 0 }.into());
                }
                Rule::Shares(keys, values) => {
                    let share = |x: f64| (d_model as f64 * x) as usize;
                    let keys = share(self.share("expand_k", keys, d_model));
                    let values = share(self.share("expand_v", values, d_model));
                    if keys == 0 || keys % heads != 0 {
                        let given = self.get("expand_k", "null");
                        let want =
                            format!("such that {heads} heads share {d_model} times it evenly");
                        self.fault("expand_k", &given, want);
                    }
                    ours.insert("key_width".into(), (keys / heads).into());
                    ours.insert("expand_v".into(), (values as f64 / keys.max(1) as f64).into());
                }
                Rule::Split(theirs, default) => {
                    let heads = self.get("num_heads", "null");
                    let width = match (self.table.get(theirs), whole(&heads)) {
                        (Some(Value::Null), Some(heads)) => d_model / heads,
                        _ => self.count(theirs, default),
                    };
                    self.seen.insert(theirs.to_string());
                    ours.insert("heads".into(), (d_model / width.max(1)).into());
                    ours.insert("key_width".into(), width.into());
                }
                Rule::AllOfModel(key) => {
                    let value = self.get(key, "null");
                    let right = |value: &Value| whole(value) == Some(d_model);
                    let all = value.as_array().is_some_and(|list| list.iter().all(right));
                    if !value.is_null() && !right(&value) && !all {
                        self.fault(key, &value, format!("{d_model} in every layer"));
                    }
                }
                Rule::Groups(theirs, name, flag) => {
                    let groups = self.count(theirs, "1");
                    ours.insert(name.into(), groups.into());
                    ours.insert(flag.into(), (groups > 1).into());
                }
                Rule::Correction => {
                    let used = self.flag("use_output_correction", "true");
                    let factor = self.number("correction_factor", "1.0");
                    ours.insert("output_correction".into(), if used { factor } else { 0.0 }.into());
                }
            }
        }
        ours
    }

    /// For each layer, our attention where the model has some in place of its own mixer.
    fn attention(&mut self, family: &Family, layers: usize) -> Vec<Option<Value>> {
        let mut list = vec![None; layers];
        let given = self.get("attn", "null");
        let specs = match &given {
            Value::Null => vec![],
            Value::Array(specs) => specs.clone(),
            spec => vec![spec.clone()],
        };
        if !specs.is_empty() && family.mixer == "attention" {
            self.fault("attn", &given, "left out");
            return list;
        }
        for spec in specs {
            let Value::Object(table) = &spec else {
                self.fault("attn", &spec, "a table, or a list of tables");
                continue;
            };
            let mut before = std::mem::take(self.faults);
            let mut keys = Keys { table, seen: BTreeSet::new(), faults: &mut before };
            let attention = keys.hybrid();
            let places = keys.get("layers", "null");
            keys.complain_of_unseen(&[]);
            *self.faults = before;
            for place in places.as_array().into_iter().flatten() {
                match place.as_u64().and_then(|i| list.get_mut(i as usize)) {
                    Some(layer) => *layer = Some(attention.clone()),
                    None => {
                        self.fault("attn.layers", place, format!("a layer of {layers}, from 0"));
                    }
                }
            }
            if !places.is_array() {
                self.fault("attn.layers", &places, "a list of layers");
            }
        }
        list
    }

    /// Our attention, from the table of a hybrid.
    fn hybrid(&mut self) -> Value {
        let heads = self.count("num_heads", "null");
        let mut attention = json!({
            "heads": heads, "rope": true, "rope_theta": self.number("rope_theta", "10000.0"),
        });
        if self.flag("qkv_bias", "false") {
            attention["qkv_bias"] = true.into();
        }
        for (theirs, ours) in [("num_kv_heads", "key_value_heads"), ("window_size", "window")] {
            let value = self.get(theirs, "null");
            if !value.is_null() {
                attention[ours] = value;
            }
        }
        attention
    }

    fn complain_of_the_rest(&mut self, family: &Family) {
        self.complain_of_unseen(family.idle);
    }

    fn complain_of_unseen(&mut self, idle: &[&str]) {
        for (key, value) in self.table {
            let seen = self.seen.contains(key) || key.starts_with('_');
            if !seen && !IDLE.contains(&key.as_str()) && !idle.contains(&key.as_str()) {
                let text = format!("config.json: `{key}` is {value}; nothing is known of this key");
                self.faults.push(text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_outside_strings_are_null() {
        assert_eq!(
            without_infinities(r#"{"a\"Infinity": [0.0, Infinity], "b": "NaN"}"#),
            r#"{"a\"Infinity": [0.0, null], "b": "NaN"}"#
        );
    }
}
