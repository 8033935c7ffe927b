//! One layout of a checkpoint on the hub: names of its weights, and its config in our words and back.

use crate::config::keys::Keys;
use crate::paths::{parameter, renamed};
use crate::tensors::Tensors;
use linattn::nn::LayerConfig;
use serde_json::{Map, Value};
use std::ops::Range;

/// One layout.
#[derive(Debug)]
pub(crate) struct Hub {
    /// The `model_type`, or a name of its own where another layout has the same.
    pub(crate) name: &'static str,
    /// As `config.json` has it; empty where it has none.
    pub(crate) model_type: &'static str,
    /// Whether a config of this `model_type` and the tensors beside it are of this layout.
    pub(crate) recognize: fn(&Map<String, Value>, &Tensors) -> bool,
    /// Our mixers that such models have, besides attention.
    pub(crate) mixers: &'static [&'static str],
    /// Where the model stands among the tensors, with a dot; may be empty.
    pub(crate) root: &'static str,
    /// Names that the embedding has or had, the present one first.
    pub(crate) embeddings: &'static [&'static str],
    /// The norm behind the embedding, where there is one.
    pub(crate) pre_norm: Option<&'static str>,
    /// The norm before the logits.
    pub(crate) norm: &'static str,
    /// The weights of the logits, which stand beside the root.
    pub(crate) head: &'static str,
    /// Names of the layers, up to the number.
    pub(crate) layers: &'static str,
    /// Starts of names of parts that are left out.
    pub(crate) left_out: &'static [&'static str],
    /// Ends of names of tensors that no model uses.
    pub(crate) unused: &'static [&'static str],
    /// Our config from theirs; None where its sizes have no bounds.
    pub(crate) read: fn(&mut Keys<'_>) -> Option<ForeignConfig>,
    /// Their config from ours, all but what every config has.
    pub(crate) write: fn(&View<'_>) -> Map<String, Value>,
    /// Where a weight of a layer stands, after the layer's number.
    pub(crate) place: fn(&LayerConfig, usize, &[&str]) -> Option<Theirs>,
}

/// A foreign config as read.
#[derive(Debug)]
pub(crate) struct ForeignConfig {
    /// The model's config, as ours spells it.
    pub(crate) config: Value,
    /// Rows of the embedding, where it says so.
    pub(crate) vocab: Option<usize>,
}

impl Hub {
    /// A name under the root.
    pub(crate) fn named(&self, name: &str) -> String {
        format!("{}{name}", self.root)
    }

    /// Where the weight at `path` of a model stands, whose layers are `layers`.
    pub(crate) fn find(
        &self,
        layers: &[&LayerConfig],
        d_model: usize,
        path: &[&str],
    ) -> Option<Theirs> {
        let outer = |name: &str| self.named(name);
        Some(match path {
            ["embeddings", kind] => {
                let mut names = self.embeddings.iter().map(|name| outer(&format!("{name}.{kind}")));
                let name = names.next()?;
                Theirs { old: names.collect(), ..Theirs::plain(name) }
            }
            ["norm", kind] => Theirs::plain(outer(&format!("{}.{}", self.norm, parameter(kind)))),
            ["pre_norm", kind] => {
                Theirs::plain(outer(&format!("{}.{}", self.pre_norm?, parameter(kind))))
            }
            ["lm_head", kind] => Theirs::plain(format!("{}.{kind}", self.head)),
            ["layers", i, inner @ ..] => {
                let layer = layers.get(i.parse::<usize>().ok()?)?;
                (self.place)(layer, d_model, inner)?.within(&outer(&format!("{}{i}.", self.layers)))
            }
            _ => return None,
        })
    }
}

/// A weight of ours in such a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Theirs {
    /// The tensor that holds it.
    pub(crate) name: String,
    /// Names that the tensor has or had elsewhere.
    pub(crate) old: Vec<String>,
    /// The rows of the tensor that are ours; all of them if absent.
    pub(crate) rows: Option<Rows>,
    /// Tensors which, one after another, hold it in these rows, however they are cut.
    pub(crate) cut: Option<(Vec<String>, Rows)>,
    /// How its numbers lie there.
    pub(crate) form: Form,
}

/// How a weight's numbers lie in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As PyTorch's layers have them.
    Usual,
    /// A matrix as ours is, `[in, out]`.
    Upright,
    /// A vector as one row for each of so many heads.
    Heads(usize),
    /// A vector, `[1, 1, D]`.
    Channels,
}

/// Rows of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rows {
    /// How many the tensor has.
    pub(crate) total: usize,
    /// Its rows that are meant, in order.
    pub(crate) ranges: Vec<Range<usize>>,
}

impl Rows {
    /// `count` rows from `first` on, in each of `heads` blocks of `block` rows.
    pub(crate) fn of_heads(heads: usize, block: usize, first: usize, count: usize) -> Self {
        let start = |head: usize| head * block + first;
        let ranges = (0..heads).map(|head| start(head)..start(head) + count).collect();
        Self { total: heads * block, ranges }
    }

    /// The `i`th of parts of `widths`, one after another.
    pub(crate) fn of_parts(widths: &[usize], i: usize) -> Self {
        let first = widths[..i].iter().sum();
        Self::of_heads(1, widths.iter().sum(), first, widths[i])
    }

    /// How many are meant.
    pub(crate) fn count(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }
}

impl Theirs {
    /// A tensor that is ours as a whole.
    pub(crate) fn plain(name: impl Into<String>) -> Self {
        Self { name: name.into(), old: vec![], rows: None, cut: None, form: Form::Usual }
    }

    /// Rows of a tensor.
    pub(crate) fn rows(name: impl Into<String>, rows: Rows) -> Self {
        Self { rows: Some(rows), ..Self::plain(name) }
    }

    /// The same, also under another name.
    pub(crate) fn or(mut self, name: impl Into<String>) -> Self {
        self.old.push(name.into());
        self
    }

    /// The same with every name behind `start`.
    pub(super) fn within(mut self, start: &str) -> Self {
        let cut = self.cut.iter_mut().flat_map(|(names, _)| names);
        for name in std::iter::once(&mut self.name).chain(&mut self.old).chain(cut) {
            name.insert_str(0, start);
        }
        self
    }
}

/// A weight of a part: its path in the part, with the first name replaced, under `part` there.
pub(super) fn in_part(part: &str, path: &[&str], names: &[(&str, &str)]) -> Theirs {
    Theirs::plain(format!("{part}.{}", renamed(path, names)))
}

/// Our config, every layer by itself and every width spelled out, to be said in other words.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub(crate) model: &'a Value,
    pub(crate) layers: &'a [Value],
    /// Ids that the model knows.
    pub(crate) vocab: usize,
    /// Type of the numbers, as their configs name it.
    pub(crate) dtype: &'static str,
}

impl View<'_> {
    /// Keys that most configs have.
    pub(super) fn common(&self) -> Map<String, Value> {
        let pairs = [
            ("dtype", self.dtype.into()),
            ("hidden_size", self.model["d_model"].clone()),
            ("num_hidden_layers", self.layers.len().into()),
            // A default of its family may be an id that the model has not.
            ("pad_token_id", Value::Null),
            ("tie_word_embeddings", self.model["tie_embeddings"].clone()),
            ("vocab_size", self.vocab.into()),
        ];
        pairs.map(|(key, value)| (key.to_string(), value)).into_iter().collect()
    }

    /// The first mixer of that name, null if there is none.
    pub(super) fn mixer(&self, name: &str) -> Value {
        let mut mixers = self.layers.iter().map(|layer| &layer["mixer"][name]);
        mixers.find(|mixer| !mixer.is_null()).cloned().unwrap_or_default()
    }

    /// The first MLP of that name, null if there is none.
    pub(super) fn mlp(&self, name: &str) -> Value {
        let mut mlps = self.layers.iter().map(|layer| &layer["mlp"][name]);
        mlps.find(|mlp| !mlp.is_null()).cloned().unwrap_or_default()
    }

    /// A word for each layer, by the name of its mixer.
    pub(super) fn layer_types(&self, word: impl Fn(&str) -> &'static str) -> Value {
        let name = |layer: &Value| match &layer["mixer"] {
            Value::Object(mixer) => mixer.keys().next().cloned().unwrap_or_default(),
            other => other.as_str().unwrap_or_default().to_string(),
        };
        self.layers.iter().map(|layer| word(&name(layer))).collect()
    }
}

/// Whether a config has one of these keys.
pub(super) fn has_any(table: &Map<String, Value>, keys: &[&str]) -> bool {
    keys.iter().any(|key| table.contains_key(*key))
}

pub(super) fn always(_: &Map<String, Value>, _: &Tensors) -> bool {
    true
}

/// V / K.
pub(super) fn expand_v(key: usize, value: usize) -> f64 {
    value as f64 / key as f64
}

/// Width of a value, from K and V / K.
pub(super) fn value_width(mixer: &Value) -> Value {
    let (key, share) = (mixer["key_width"].as_f64(), mixer["expand_v"].as_f64());
    match (key, share) {
        (Some(key), Some(share)) => ((key * share).round() as u64).into(),
        _ => Value::Null,
    }
}

/// A value, or another where it is null.
pub(super) fn given_or(value: &Value, other: &Value) -> Value {
    if value.is_null() { other.clone() } else { value.clone() }
}

/// One table of two, where both have a key, the second's.
pub(super) fn joined(mut table: Map<String, Value>, more: Value) -> Map<String, Value> {
    table.extend(more.as_object().cloned().unwrap_or_default());
    table
}

/// A list of layers with equal neighbours as one that is repeated.
pub(super) fn stacked(layers: impl IntoIterator<Item = Value>) -> Vec<Value> {
    let mut list: Vec<Value> = vec![];
    for mut layer in layers {
        layer["repeat"] = 1.into();
        match list.last_mut() {
            Some(last) if same_but_for_count(last, &layer) => {
                last["repeat"] = (last["repeat"].as_u64().unwrap_or(0) + 1).into();
            }
            _ => list.push(layer),
        }
    }
    list
}

fn same_but_for_count(a: &Value, b: &Value) -> bool {
    let without = |value: &Value| {
        let mut value = value.clone();
        value["repeat"] = Value::Null;
        value
    };
    without(a) == without(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_heads_and_of_parts_cover_a_tensor_once() {
        let blocks = [(0, 3), (3, 3), (6, 4)];
        let heads = blocks.map(|(first, count)| Rows::of_heads(2, 10, first, count));
        let parts = [0, 1, 2].map(|i| Rows::of_parts(&[4, 4, 12], i));
        for set in [heads, parts] {
            let mut seen: Vec<usize> =
                set.iter().flat_map(|r| r.ranges.iter().cloned().flatten()).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..20) && set.iter().all(|rows| rows.total == 20));
        }
    }
}
