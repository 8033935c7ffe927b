//! `config.json` under reading: each key that is asked for, and those that nobody asked for.

use crate::faults::Faults;
use serde_json::{Map, Value};
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
pub(super) const LARGEST: f64 = (1 << 24) as f64;
/// Layers are tables of the config, and fewer.
pub(crate) const MOST_LAYERS: usize = 1 << 16;
/// Whole numbers of JSON are exact up to here.
pub(super) const LARGEST_EXACT: f64 = (1_u64 << 53) as f64;

/// Python writes infinities into JSON, which has none: null in their place.
pub(super) fn without_infinities(text: &str) -> String {
    let mut parts: Vec<String> = text.split('"').map(str::to_string).collect();
    // A part between two quotes is a string; one before an escaped quote ends in a backslash.
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

/// Whether a size is one that a model can have.
pub(super) fn possible(size: f64) -> bool {
    (0.0..=LARGEST).contains(&size)
}

/// A table of a config under reading.
pub(crate) struct Keys<'a> {
    pub(super) table: &'a Map<String, Value>,
    /// The table's own name and a dot, where it stands in another.
    within: String,
    pub(super) seen: BTreeSet<String>,
    pub(super) faults: &'a mut Faults,
}

impl<'a> Keys<'a> {
    /// Of the whole file.
    pub(crate) fn new(table: &'a Map<String, Value>, faults: &'a mut Faults) -> Self {
        Self { table, within: String::new(), seen: BTreeSet::new(), faults }
    }
}

impl Keys<'_> {
    /// Asks for a key that is a table itself: `read` takes its keys, and those that it leaves are faults.
    /// None where the key is left out or null, or no table.
    pub(crate) fn table<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&mut Keys<'_>) -> T,
    ) -> Option<T> {
        let value = self.get(key, "null");
        let Value::Object(table) = &value else {
            if !value.is_null() {
                self.fault(key, &value, "a table");
            }
            return None;
        };
        let within = format!("{}{key}.", self.within);
        let mut keys = Keys { table, within, seen: BTreeSet::new(), faults: &mut *self.faults };
        let answer = read(&mut keys);
        keys.complain_of_unseen();
        Some(answer)
    }

    /// How much is wrong so far.
    pub(crate) fn faults(&self) -> usize {
        self.faults.len()
    }

    /// Keys that may be there and change nothing here.
    pub(crate) fn idle(&mut self, keys: &[&str]) {
        self.seen.extend(keys.iter().map(|key| (*key).to_string()));
    }

    /// A number that has to be `want` where it is there, as `other` says.
    pub(crate) fn same(&mut self, key: &str, want: &Value, other: &str) {
        let value = self.get(key, "null");
        if !value.is_null() && value.as_f64() != want.as_f64() {
            self.fault(key, &value, format!("{want}, as `{other}` says"));
        }
    }

    /// Limits of a step size that are none: from 0 to infinity, which is left as null or spelled out.
    pub(crate) fn endless(&mut self, key: &str) {
        let spelled = "[0.0,{\"__float__\":\"Infinity\"}]";
        self.only(key, &["[0.0,null]", "[0,null]", "null", spelled]);
    }

    /// Whether the key is there, and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(|value| !value.is_null())
    }

    /// A list of words, each of `allowed`; empty where the key is left out or no such list.
    pub(crate) fn words(&mut self, key: &str, allowed: &[&str]) -> Vec<String> {
        let value = self.get(key, "null");
        let word = |value: &Value| {
            value.as_str().filter(|word| allowed.contains(word)).map(str::to_string)
        };
        let words: Option<Vec<String>> =
            value.as_array().and_then(|list| list.iter().map(word).collect());
        if words.is_none() && !value.is_null() {
            self.fault(key, &value, format!("a list of {}", allowed.join(", ")));
        }
        words.unwrap_or_default()
    }

    /// A number above 0.
    pub(crate) fn positive(&mut self, key: &str, default: &str) -> f64 {
        let number = self.number(key, default);
        if number > 0.0 && number.is_finite() {
            return number;
        }
        let value = self.get(key, default);
        self.fault(key, &value, "above 0");
        1.0
    }

    pub(crate) fn fault(&mut self, key: &str, got: &Value, want: impl std::fmt::Display) {
        let key = format!("{}{key}", self.within);
        self.faults.push(format!("config.json: `{key}` is {got}; it has to be {want}"));
    }

    pub(crate) fn get(&mut self, key: &str, default: &str) -> Value {
        self.seen.insert(key.to_string());
        match self.table.get(key) {
            None | Some(Value::Null) => json_of(default),
            Some(value) => value.clone(),
        }
    }

    pub(crate) fn number(&mut self, key: &str, default: &str) -> f64 {
        let value = self.get(key, default);
        value.as_f64().unwrap_or_else(|| {
            self.fault(key, &value, "a number");
            1.0
        })
    }

    pub(crate) fn count(&mut self, key: &str, default: &str) -> usize {
        self.count_to(LARGEST as usize, key, default)
    }

    pub(crate) fn count_to(&mut self, most: usize, key: &str, default: &str) -> usize {
        let value = self.get(key, default);
        whole(&value).filter(|count| *count <= most).unwrap_or_else(|| {
            self.fault(key, &value, format!("a whole number above 0, and {most} at most"));
            1
        })
    }

    /// A share of the model's width.
    pub(crate) fn share(&mut self, key: &str, default: &str, d_model: usize) -> f64 {
        let share = self.number(key, default);
        if possible(share * d_model as f64) {
            return share;
        }
        let value = self.get(key, default);
        self.fault(key, &value, format!("at least 0, and at most {LARGEST} / {d_model}"));
        1.0
    }

    /// `vocab_size`, where it is there.
    pub(crate) fn vocabulary(&mut self) -> Option<usize> {
        let value = self.get("vocab_size", "null");
        let vocab = whole(&value);
        if vocab.is_none() && !value.is_null() {
            self.fault("vocab_size", &value, "a whole number above 0");
        }
        vocab
    }

    pub(crate) fn flag(&mut self, key: &str, default: &str) -> bool {
        let value = self.get(key, default);
        value.as_bool().unwrap_or_else(|| {
            self.fault(key, &value, "true or false");
            false
        })
    }

    pub(crate) fn only(&mut self, key: &str, allowed: &[&str]) {
        self.seen.insert(key.to_string());
        if let Some(value) = self.table.get(key)
            && !allowed.iter().any(|text| json_of(text) == *value)
        {
            self.fault(key, value, format!("{}: nothing else is known here", allowed.join(" or ")));
        }
    }

    /// Every key that was not asked for and is not known to be idle.
    pub(crate) fn complain_of_unseen(&mut self) {
        for (key, value) in self.table {
            let seen = self.seen.contains(key) || key.starts_with('_');
            if !seen && !IDLE.contains(&key.as_str()) {
                let key = format!("{}{key}", self.within);
                let text = format!("config.json: `{key}` is {value}; nothing is known of this key");
                self.faults.push(text);
            }
        }
    }
}

pub(super) fn json_of(text: &str) -> Value {
    serde_json::from_str(text).expect("the tables of families are JSON")
}

/// A number without a fraction, above 0.
pub(super) fn whole(value: &Value) -> Option<usize> {
    let number = value.as_f64().filter(|x| *x >= 1.0 && x.fract() == 0.0)?;
    Some(number as usize)
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
