//! `config.json` as a model's config, and back.
//!
//! A family's [`Rule`]s are read in both directions. What is written is read again and compared with
//! what it was made from, so that nothing that a checkpoint cannot say is lost in silence.

use crate::Faults;
use crate::families::{Channels, Fallback, Family, family, known};
use crate::tensors::Precision;
use linattn::nn::LanguageModelConfig;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// What a key of `config.json` says of our mixer. Defaults are JSON, for where the key is left out.
#[derive(Debug)]
pub(crate) enum Rule {
    /// Theirs, ours, default: one value under two names.
    Key(&'static str, &'static str, &'static str),
    /// One name, and the family's own default.
    Same(&'static str),
    /// Ours has this value.
    Ours(&'static str, &'static str),
    /// Theirs has to be one of these: ours has no other way.
    Only(&'static str, &'static [&'static str]),
    /// Theirs has to be as many as the heads, or left out.
    AsHeads(&'static str),
    /// `use_short_conv`, of this default, and `conv_size`: our `conv_size`.
    Convolution(&'static str),
    /// `expand_k` and `expand_v`, of these defaults, shares of the model's width: our `key_width` and
    /// `expand_v`.
    Shares(&'static str, &'static str),
    /// Theirs, default: our `key_width`, which says how many heads there are.
    Split(&'static str, &'static str),
    /// Theirs, ours, what is known, default: one value under two names, if it is one of these.
    OneOf(&'static str, &'static str, &'static [&'static str], &'static str),
    /// One name: ours is there only where it is true.
    Flag(&'static str),
    /// Theirs has to be what ours is already.
    Twin(&'static str, &'static str),
    /// Theirs has to be the model's width, in every layer.
    AllOfModel(&'static str),
    /// Theirs, ours, and our flag that is set where there are several.
    Groups(&'static str, &'static str, &'static str),
    /// `use_output_correction` and `correction_factor`: our `output_correction`.
    Correction,
}

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
    "vocab_size",
];

/// Keys that any family may have, and must have so.
const EVERYWHERE: &[(&str, &[&str])] = &[
    ("attnres_block_size", &["null"]),
    ("conv_bias", &["false"]),
    ("elementwise_affine", &["true"]),
    ("share_conv_kernel", &["false"]),
    ("use_elu", &["false"]),
    ("use_rope", &["false"]),
];

/// Reads a `config.json`. None where not even the family is known.
pub(crate) fn import(
    text: &str,
    faults: &mut Faults,
) -> Option<(&'static Family, LanguageModelConfig)> {
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
    keys.complain_of_the_rest(family);
    match serde_json::from_value(config) {
        Ok(config) => Some((family, config)),
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
        let value = self.get(key, default);
        whole(&value).unwrap_or_else(|| {
            self.fault(key, &value, "a whole number above 0");
            1
        })
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

    /// The whole model, as our config spells it.
    fn model(&mut self, family: &Family) -> Value {
        let d_model = self.count("hidden_size", "2048");
        let layers = self.count("num_hidden_layers", "24");
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
        model
    }

    /// What all layers' mixers have but the first's.
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
        let ratio = self.number("hidden_ratio", &family.hidden_ratio.to_string());
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
                    if !value.is_null() && value != "auto" {
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
                    let keys = share(self.number("expand_k", keys));
                    let values = share(self.number("expand_v", values));
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

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).expect("the tables of families are JSON")
}

/// A number without a fraction, above 0.
fn whole(value: &Value) -> Option<usize> {
    let number = value.as_f64().filter(|x| *x >= 1.0 && x.fract() == 0.0)?;
    Some(number as usize)
}

/// A model's config as the checkpoint of a family says it, `config.json`.
pub(crate) fn export(
    config: &LanguageModelConfig,
    vocab: usize,
    family: &Family,
    precision: Precision,
) -> Result<Map<String, Value>, Faults> {
    let model = canonical(config, family);
    let layers = model["layers"].as_array().cloned().unwrap_or_default();
    let mixer = layers.iter().find_map(|layer| layer["mixer"][family.mixer].as_object());
    let Some(mixer) = mixer else {
        let text = format!("`{}` has layers of {}", family.model_type, family.mixer);
        let text = format!("{text}; the model has none");
        return Err(vec![text]);
    };
    let mut table = Map::new();
    let mut put = |key: &str, value: Value| table.insert(key.to_string(), value);
    put("model_type", family.model_type.into());
    put("hidden_size", model["d_model"].clone());
    put("num_hidden_layers", layers.len().into());
    put("vocab_size", vocab.into());
    put("norm_eps", model["norm_eps"].clone());
    put("tie_word_embeddings", model["tie_embeddings"].clone());
    put("torch_dtype", precision.name().into());
    let channels = family.frame.channels;
    if let Some(width) = layers[0]["mlp"][channels.name()]["width"].as_u64() {
        let swiglu = channels == Channels::SwiGlu;
        put("hidden_act", if swiglu { "swish" } else { "sqrelu" }.into());
        put("intermediate_size", width.into());
    }
    if family.frame.layer_norm {
        put("norm_bias", true.into());
        put("norm_first", (model["pre_norm"] == json!(true)).into());
    }
    let last = layers.iter().rev().find_map(|layer| layer["mixer"][family.mixer].as_object());
    for (theirs, ours, _) in family.later_keys {
        put(theirs, last.and_then(|mixer| mixer.get(*ours)).cloned().unwrap_or(Value::Null));
    }
    if family.bounds {
        let bounded = layers.iter().any(|layer| {
            let bound = &layer["mixer"][family.mixer]["lower_bound"];
            bound.as_f64().is_some_and(|bound| bound > 0.0)
        });
        put("use_lower_bound", bounded.into());
    }
    let d_model = config.d_model;
    for rule in family.rules {
        write_rule(rule, mixer, d_model, &mut table);
    }
    if family.mixer != "attention" {
        write_attention(&layers, &mut table);
    }
    let text = Value::Object(table.clone()).to_string();
    let mut faults = Faults::default();
    let back = import(&text, &mut faults);
    if let Some((_, back)) = back {
        differences("", &model, &canonical(&back, family), family, &mut faults);
    }
    match faults.is_empty() {
        true => Ok(table),
        false => Err(faults),
    }
}

fn write_rule(
    rule: &Rule,
    ours: &Map<String, Value>,
    d_model: usize,
    table: &mut Map<String, Value>,
) {
    let value = |key: &str| ours.get(key).cloned().unwrap_or(Value::Null);
    let number = |key: &str| value(key).as_f64().unwrap_or(0.0);
    let mut put = |key: &str, value: Value| table.insert(key.to_string(), value);
    match *rule {
        Rule::Key(theirs, name, _) | Rule::OneOf(theirs, name, ..) | Rule::Twin(theirs, name) => {
            put(theirs, value(name));
        }
        Rule::Flag(key) => {
            put(key, (value(key) == json!(true)).into());
        }
        Rule::Only(key, allowed) => {
            let only = json_of(allowed[0]);
            if !only.is_null() && !only.is_array() {
                put(key, only);
            }
        }
        Rule::Same(_) | Rule::Ours(..) | Rule::AsHeads(_) | Rule::AllOfModel(_) => {}
        Rule::Convolution(_) => {
            let size = number("conv_size") as usize;
            put("use_short_conv", (size > 0).into());
            put("conv_size", if size > 0 { size } else { 4 }.into());
        }
        Rule::Shares(..) => {
            let keys = number("heads") * number("key_width");
            put("expand_k", share_of(keys, d_model).into());
            put("expand_v", share_of(keys * number("expand_v"), d_model).into());
        }
        Rule::Split(theirs, _) => {
            put("num_heads", value("heads"));
            put(theirs, value("key_width"));
        }
        Rule::Groups(theirs, name, _) => {
            put(theirs, value(name));
        }
        Rule::Correction => {
            let factor = number("output_correction");
            put("use_output_correction", (factor != 0.0).into());
            put("correction_factor", if factor == 0.0 { 1.0 } else { factor }.into());
        }
    }
}

/// x such that `d_model` times it, cut to a whole number, is `width`.
fn share_of(width: f64, d_model: usize) -> f64 {
    let share = width / d_model as f64;
    match (d_model as f64 * share).floor() < width {
        true => share.next_up(),
        false => share,
    }
}

/// `attn`: which layers attend, and how.
fn write_attention(layers: &[Value], table: &mut Map<String, Value>) {
    let mut specs: Vec<(Value, Vec<usize>)> = vec![];
    for (i, layer) in layers.iter().enumerate() {
        let attention = &layer["mixer"]["attention"];
        if attention.is_null() {
            continue;
        }
        match specs.iter_mut().find(|(known, _)| known == attention) {
            Some((_, places)) => places.push(i),
            None => specs.push((attention.clone(), vec![i])),
        }
    }
    let list: Vec<Value> = specs
        .iter()
        .map(|(attention, places)| {
            json!({
                "layers": places,
                "num_heads": attention["heads"],
                "num_kv_heads": attention["key_value_heads"],
                "qkv_bias": attention["qkv_bias"] == json!(true),
                "window_size": attention["window"],
                "rope_theta": attention["rope_theta"],
            })
        })
        .collect();
    let attn = match list.as_slice() {
        [] => Value::Null,
        [one] => one.clone(),
        _ => Value::Array(list),
    };
    table.insert("attn".to_string(), attn);
}

/// A config with every layer by itself, every width spelled out, and nothing of training.
fn canonical(config: &LanguageModelConfig, family: &Family) -> Value {
    let mut model = serde_json::to_value(config).expect("a config is JSON");
    let d_model = config.d_model;
    let Some(table) = model.as_object_mut() else { return model };
    for key in ["initializer_range", "embedding_dropout"] {
        table.shift_remove(key);
    }
    let mut layers = vec![];
    for mut layer in each_layer(table.get("layers").unwrap_or(&Value::Null)) {
        for (name, mlp) in layer["mlp"].as_object_mut().into_iter().flatten() {
            if mlp["width"].is_null() {
                mlp["width"] = match name.as_str() {
                    "swiglu" => (8 * d_model).div_ceil(3).next_multiple_of(8),
                    "rwkv6" => (7 * d_model / 2).next_multiple_of(32),
                    _ => 4 * d_model,
                }
                .into();
            }
        }
        for (name, mixer) in layer["mixer"].as_object_mut().into_iter().flatten() {
            let Some(mixer) = mixer.as_object_mut() else { continue };
            mixer.shift_remove("chunk");
            let attention = crate::families::family("transformer");
            let spelled = match name.as_str() {
                name if name == family.mixer => Some(family),
                "attention" => attention,
                _ => None,
            };
            if let Some(family) = spelled {
                spell_out(mixer, family, d_model);
            }
        }
        layers.push(layer);
    }
    table.insert("layers".to_string(), layers.into());
    model
}

/// Layers in a list of them, repeated ones and groups spelled out.
fn each_layer(list: &Value) -> Vec<Value> {
    let mut layers = vec![];
    for entry in list.as_array().into_iter().flatten() {
        let repeat = entry["repeat"].as_u64().unwrap_or(1) as usize;
        let once = match &entry["group"] {
            Value::Null => {
                let mut layer = entry.clone();
                layer["repeat"] = 1.into();
                vec![layer]
            }
            group => each_layer(group),
        };
        layers.extend(std::iter::repeat_n(once, repeat).flatten());
    }
    layers
}

/// Names of the mixers of every layer.
pub(crate) fn mixers(config: &LanguageModelConfig) -> Vec<&'static str> {
    config.each_layer().map(|(_, layer)| layer.mixer.name()).collect()
}

/// Widths that a mixer's config leaves to their defaults.
fn spell_out(mixer: &mut Map<String, Value>, family: &Family, d_model: usize) {
    let heads = mixer.get("heads").and_then(whole).unwrap_or(1);
    let root = (d_model as f64).sqrt();
    for (key, fallback) in family.defaults {
        let get = |key: &str| mixer.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let given = mixer.get(*key).cloned().unwrap_or(Value::Null);
        let value = match *fallback {
            Fallback::Heads if whole(&given) == Some(heads) => Value::Null,
            _ if !given.is_null() => continue,
            Fallback::Heads => Value::Null,
            Fallback::Share => (d_model / heads).into(),
            Fallback::HalfShare => (d_model / (2 * heads)).into(),
            Fallback::KeyWidth => (get("key_width") as usize).into(),
            Fallback::ValueWidth => ((get("key_width") * get("expand_v")) as usize).into(),
            Fallback::Json(text) => json_of(text),
            Fallback::Sixteenth => d_model.div_ceil(16).into(),
            // Of the layers after the first alone.
            _ if *key == "value_rank" && mixer.get("value_residual") != Some(&json!(true)) => {
                continue;
            }
            Fallback::Rank(times) => near_32(times * root).into(),
            Fallback::RankByKey(times) => near_32(times * root * get("key_width") / 64.0).into(),
        };
        mixer.insert((*key).to_string(), value);
    }
    if family.bounds
        && mixer.get("lower_bound").and_then(Value::as_f64).is_some_and(|bound| bound > 0.0)
    {
        let (key, some) = family.later[0];
        mixer.insert(key.to_string(), json_of(some));
    }
}

/// The nearest multiple of 32, at least 32.
fn near_32(width: f64) -> usize {
    (32.0 * (width / 32.0).round()).max(32.0) as usize
}

/// Every key that a checkpoint of the family would say otherwise.
fn differences(key: &str, ours: &Value, theirs: &Value, family: &Family, faults: &mut Faults) {
    if ours == theirs {
        return;
    }
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in keys {
                let at = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                let (a, b) = (a.get(name), b.get(name));
                let null = Value::Null;
                differences(&at, a.unwrap_or(&null), b.unwrap_or(&null), family, faults);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{key}[{i}]"), a, b, family, faults);
            }
        }
        _ => faults.push(format!(
            "`{key}` is {ours}; a checkpoint of `{}` can only have {theirs}",
            family.model_type
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Option<LanguageModelConfig>, Faults) {
        let mut faults = Faults::default();
        let config = import(text, &mut faults).map(|(_, config)| config);
        (config, faults)
    }

    #[test]
    fn every_family_can_be_said_in_both_directions() {
        for family in crate::families::FAMILIES {
            if !linattn::nn::mixers::MixerConfig::NAMES.contains(&family.mixer) {
                continue;
            }
            let name = family.model_type;
            let text = format!(
                r#"{{"model_type": "{name}", "hidden_size": 512, "num_hidden_layers": 3,
                    "feature_map": {}, "num_heads": 8, "head_dim": 64}}"#,
                match name {
                    "linear_attn" => "\"elu\"",
                    "gsa" => "\"swish\"",
                    _ => "null",
                }
            );
            let mut faults = Faults::default();
            let read = import(&text, &mut faults);
            faults.retain(|fault| !fault.contains("nothing is known"));
            let (_, config) = read.unwrap_or_else(|| panic!("{name}: {faults:?}"));
            assert!(faults.is_empty(), "{name}: {faults:?}");
            config.cost(1).unwrap_or_else(|e| panic!("{name}: {e}"));
            let table = export(&config, 7, family, Precision::F32);
            let table = table.unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
            let text = Value::Object(table.clone()).to_string();
            let mut faults = Faults::default();
            let (_, again) = import(&text, &mut faults).expect("what was written can be read");
            assert!(faults.is_empty(), "{name}: {faults:?}");
            // Widths that were left to their defaults are spelled out by now: what is said is the same.
            assert_eq!(export(&again, 7, family, Precision::F32).ok(), Some(table), "{name}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once() {
        let (_, faults) = read(
            r#"{"model_type": "gla", "hidden_size": 64, "num_heads": 2, "use_gv": true,
                "clamp_min": -3, "attnres_block_size": 4, "hidden_act": "gelu", "colour": "red",
                "num_hidden_layers": "two"}"#,
        );
        let text = faults.join("; ");
        for part in ["use_gv", "clamp_min", "attnres_block_size", "hidden_act", "colour", "two"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let (config, faults) = read(r#"{"model_type": "gpt2"}"#);
        assert!(config.is_none() && faults.join("").contains("gated_deltanet"));
    }

    #[test]
    fn hybrids_have_attention_where_they_say() {
        let (config, faults) = read(
            r#"{"model_type": "delta_net", "hidden_size": 64, "num_heads": 2,
                "num_hidden_layers": 4, "attn": {"layers": [1, 3], "num_heads": 4,
                "num_kv_heads": 2, "window_size": 16}}"#,
        );
        let config = config.unwrap_or_else(|| panic!("{faults:?}"));
        assert_eq!(mixers(&config), ["deltanet", "attention", "deltanet", "attention"]);
        let family = family("delta_net").expect("known");
        let table = export(&config, 7, family, Precision::F32).unwrap_or_default();
        assert_eq!(table["attn"]["layers"], json!([1, 3]));
        assert_eq!(table["attn"]["window_size"], 16);
    }

    #[test]
    fn what_a_checkpoint_cannot_say_is_refused_by_name() {
        let (config, _) = read(r#"{"model_type": "gla", "hidden_size": 64, "num_heads": 2}"#);
        let mut value = serde_json::to_value(config.expect("a config")).expect("JSON");
        value["layers"][0]["mixer"]["gla"]["gate_low_rank"] = 8.into();
        let config = serde_json::from_value(value).expect("a config");
        let family = family("gla").expect("known");
        let faults = export(&config, 7, family, Precision::F32).expect_err("rank 16 is built in");
        let text = faults.join("; ");
        assert!(text.contains("layers[0].mixer.gla.gate_low_rank` is 8"), "{text}");
    }

    #[test]
    fn infinities_outside_strings_are_null() {
        assert_eq!(
            without_infinities(r#"{"a\"Infinity": [0.0, Infinity], "b": "NaN"}"#),
            r#"{"a\"Infinity": [0.0, null], "b": "NaN"}"#
        );
    }
}
