//! `config.json` written, read again, and compared with the config that it was made from.

use super::keys::{json_of, whole};
use super::read::read;
use super::rule::Rule;
use crate::families::{BOUND, Channels, FAMILIES, Fallback, Family};
use crate::faults::Faults;
use crate::format::Format;
use crate::hub::View;
use crate::tensors::Precision;
use linattn::nn::LanguageModelConfig;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// A model's config as a checkpoint of that layout says it, `config.json`.
pub(crate) fn export(
    config: &LanguageModelConfig,
    vocab: usize,
    format: Format,
    precision: Precision,
) -> Result<Map<String, Value>, Faults> {
    let model = canonical(config, format);
    let layers = model["layers"].as_array().cloned().unwrap_or_default();
    let mixers = format.mixers();
    let has = |mixer: &str| layers.iter().any(|layer| layer["mixer"][mixer].is_object());
    if !mixers.iter().any(|mixer| has(mixer)) {
        let text = format!("`{}` has layers of {}", format.name(), mixers.join(" or "));
        let text = format!("{text}; the model has none");
        return Err(vec![text]);
    }
    let table = match format {
        Format::Fla(family) => fla(family, &model, &layers, vocab, precision),
        Format::Hub(hub) => {
            let view = View { model: &model, layers: &layers, vocab, dtype: precision.name() };
            let mut table = (hub.write)(&view);
            if !hub.model_type.is_empty() {
                table.insert("model_type".into(), hub.model_type.into());
            }
            table
        }
    };
    let mut faults = Faults::default();
    if let Some((.., back)) = read(format, &table, &mut faults) {
        differences("", &model, &canonical(&back, format), format, &mut faults);
    }
    match faults.is_empty() {
        true => Ok(table),
        false => Err(faults),
    }
}

/// The config of flash-linear-attention.
fn fla(
    family: &Family,
    model: &Value,
    layers: &[Value],
    vocab: usize,
    precision: Precision,
) -> Map<String, Value> {
    let mixer = layers.iter().find_map(|layer| layer["mixer"][family.mixer].as_object());
    let mixer = mixer.cloned().unwrap_or_default();
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
    let d_model = model["d_model"].as_u64().unwrap_or(0) as usize;
    for rule in family.rules {
        write_rule(rule, &mixer, d_model, &mut table);
    }
    if family.mixer != "attention" {
        write_attention(layers, &mut table);
    }
    table
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

/// Keys of a model that only its fresh weights and its training go by.
const OF_TRAINING: &[&str] = &[
    "initializer",
    "initializer_range",
    "embedding_initializer_range",
    "rescale_residual",
    "embedding_dropout",
];

/// A config with every layer by itself, every width spelled out, and nothing of training.
fn canonical(config: &LanguageModelConfig, format: Format) -> Value {
    let mut model = serde_json::to_value(config).expect("a config is JSON");
    let d_model = config.d_model;
    let Some(table) = model.as_object_mut() else { return model };
    for key in OF_TRAINING {
        table.shift_remove(*key);
    }
    let mut layers = vec![];
    for mut layer in each_layer(table.get("layers").unwrap_or(&Value::Null)) {
        for (name, mlp) in layer["mlp"].as_object_mut().into_iter().flatten() {
            if mlp["width"].is_null() {
                mlp["width"] = match name.as_str() {
                    "swiglu" | "geglu" => (8 * d_model).div_ceil(3).next_multiple_of(8),
                    "rwkv6" => (7 * d_model / 2).next_multiple_of(32),
                    _ => 4 * d_model,
                }
                .into();
            }
        }
        for (name, mixer) in layer["mixer"].as_object_mut().into_iter().flatten() {
            let Some(mixer) = mixer.as_object_mut() else { continue };
            mixer.shift_remove("chunk");
            mixer.shift_remove("dropout");
            if let Some(family) = FAMILIES.iter().find(|family| family.mixer == name) {
                spell_out(mixer, family, d_model);
            }
            spell_out_alone(name, mixer, d_model);
            if format.bounds().is_some() {
                spell_out_bound(mixer);
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
}

/// A bound above 0 is learnt, and only says so.
fn spell_out_bound(mixer: &mut Map<String, Value>) {
    if mixer.get("lower_bound").and_then(Value::as_f64).is_some_and(|bound| bound > 0.0) {
        let (key, some) = BOUND[0];
        mixer.insert(key.to_string(), json_of(some));
    }
}

/// Widths of mixers that are said in more than one way.
fn spell_out_alone(name: &str, mixer: &mut Map<String, Value>, d_model: usize) {
    let get = |key: &str| mixer.get(key).and_then(Value::as_u64);
    match name {
        "rg_lru" if get("width").is_none() => {
            mixer.insert("width".into(), d_model.into());
        }
        "mamba2" => {
            let (expand, width) =
                (get("expand").unwrap_or(2), get("head_width").unwrap_or(1).max(1));
            let model = d_model.max(1) as u64;
            let inner = get("heads").map_or(expand * model, |heads| heads * width);
            let expand = inner.is_multiple_of(model).then_some(inner / model);
            mixer.insert("expand".into(), expand.into());
            mixer.insert("heads".into(), (inner / width).into());
        }
        _ => {}
    }
}

/// The nearest multiple of 32, at least 32.
fn near_32(width: f64) -> usize {
    (32.0 * (width / 32.0).round()).max(32.0) as usize
}

/// Every key that a checkpoint of the family would say otherwise.
fn differences(key: &str, ours: &Value, theirs: &Value, format: Format, faults: &mut Faults) {
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
                differences(&at, a.unwrap_or(&null), b.unwrap_or(&null), format, faults);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{key}[{i}]"), a, b, format, faults);
            }
        }
        _ => faults.push(format!(
            "`{key}` is {ours}; a checkpoint of `{}` can only have {theirs}",
            format.name()
        )),
    }
}
