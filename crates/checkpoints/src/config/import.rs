//! `config.json` read: a model's config, and everything in the file that is wrong or not known here.

use super::keys::{Keys, LARGEST_EXACT, MOST_LAYERS, json_of, whole};
use super::rule::Rule;
use crate::families::{Channels, Family};
use crate::hub::ForeignConfig;
use serde_json::{Map, Value, json};

/// Keys that any family may have, and must have so.
const EVERYWHERE: &[(&str, &[&str])] = &[
    ("attnres_block_size", &["null"]),
    ("conv_bias", &["false"]),
    ("elementwise_affine", &["true"]),
    ("share_conv_kernel", &["false"]),
    ("use_elu", &["false"]),
    ("use_rope", &["false"]),
];

/// Reads the table of a `config.json` of flash-linear-attention. None where no model could be so large.
pub(super) fn read(keys: &mut Keys<'_>, family: &Family) -> Option<ForeignConfig> {
    keys.idle(family.idle);
    let config = keys.model(family);
    let vocab = keys.vocabulary();
    Some(ForeignConfig { config: config?, vocab })
}

/// `256 ceil(int(d_model * ratio * 2 / 3) / 256)`, as the published models have it.
fn inner_width(d_model: usize, ratio: f64) -> usize {
    ((d_model as f64 * ratio * 2.0 / 3.0) as usize).div_ceil(256) * 256
}

impl Keys<'_> {
    /// The whole model, as our config spells it. None where its sizes have no bounds.
    fn model(&mut self, family: &Family) -> Option<Value> {
        let before = self.faults();
        let d_model = self.count("hidden_size", "2048");
        let layers = self.count_to(MOST_LAYERS, "num_hidden_layers", "24");
        let bounded = self.faults() == before;
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
            let mut keys = Keys::new(table, &mut *self.faults);
            let attention = keys.hybrid();
            let places = keys.get("layers", "null");
            keys.complain_of_unseen();
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
}
