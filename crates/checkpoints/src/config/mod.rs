//! `config.json` as a model's config, and back.
//!
//! A family's [`Rule`](rule::Rule)s are read in both directions. What is written is read again and compared with
//! what it was made from, so that nothing that a checkpoint cannot say is lost in silence.

mod export;
mod import;
pub(crate) mod keys;
mod read;
pub(crate) mod rule;

use crate::faults::Faults;
use linattn::nn::LanguageModelConfig;
use serde_json::{Map, Value};

pub(crate) use export::export;
pub(crate) use read::import;

const END_IDS: &str = "eos_token_id";

/// The ids that end a text, of a `config.json` or of the model within it that writes: one, or a list.
pub(crate) fn end_ids(text: &str, faults: &mut Faults) -> Vec<u32> {
    let table: Value = serde_json::from_str(&keys::without_infinities(text)).unwrap_or_default();
    let given = [&table, &table["text_config"]].map(|table| &table[END_IDS]);
    let Some(given) = given.into_iter().find(|given| !given.is_null()) else { return vec![] };
    let list = given.as_array().map_or(std::slice::from_ref(given), Vec::as_slice);
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids: Option<Vec<u32>> = list.iter().map(id).collect();
    ids.unwrap_or_else(|| {
        faults.push(format!(
            "config.json: `{END_IDS}` is {given}; it has to be a token's id, or a list of them"
        ));
        vec![]
    })
}

/// The same in a table that is to be written: a single id stands there without a list.
pub(crate) fn put_end_ids(table: &mut Map<String, Value>, ids: &[u32]) {
    match ids {
        [] => {}
        [id] => drop(table.insert(END_IDS.into(), (*id).into())),
        ids => drop(table.insert(END_IDS.into(), ids.into())),
    }
}

/// Names of the mixers of every layer.
pub(crate) fn mixers(config: &LanguageModelConfig) -> Vec<&'static str> {
    config.each_layer().map(|(_, layer)| layer.mixer.name()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::family;
    use crate::format::Format;
    use crate::tensors::{Precision, Tensors};
    use serde_json::json;

    fn read(text: &str) -> (Option<LanguageModelConfig>, Faults) {
        let mut faults = Faults::default();
        let config = import(text, &Tensors::new(), &mut faults).map(|(_, _, config)| config);
        (config, faults)
    }

    #[test]
    fn the_ids_that_end_a_text_are_one_or_several_at_either_place() {
        let mut faults = Faults::default();
        for (text, want) in [
            (r#"{"eos_token_id": 7}"#, vec![7]),
            (r#"{"eos_token_id": [7, 9]}"#, vec![7, 9]),
            (r#"{"eos_token_id": null, "text_config": {"eos_token_id": 3}}"#, vec![3]),
            (r#"{"eos_token_id": null}"#, vec![]),
            ("{}", vec![]),
        ] {
            assert_eq!(end_ids(text, &mut faults), want, "{text}");
            let mut table = Map::new();
            put_end_ids(&mut table, &want);
            assert_eq!(end_ids(&Value::Object(table).to_string(), &mut faults), want);
        }
        assert!(faults.is_empty(), "{faults:?}");
        for wrong in ["-1", "\"end\"", "[7, 1.5]", "99999999999"] {
            let mut faults = Faults::default();
            end_ids(&format!(r#"{{"eos_token_id": {wrong}}}"#), &mut faults);
            assert!(faults.len() == 1 && faults[0].contains("eos_token_id"), "{wrong}: {faults:?}");
        }
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
            let read = import(&text, &Tensors::new(), &mut faults);
            faults.retain(|fault| !fault.contains("nothing is known"));
            let (_, _, config) = read.unwrap_or_else(|| panic!("{name}: {faults:?}"));
            assert!(faults.is_empty(), "{name}: {faults:?}");
            config.cost(1).unwrap_or_else(|e| panic!("{name}: {e}"));
            let table = export(&config, 7, Format::Fla(family), Precision::F32);
            let table = table.unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
            let text = Value::Object(table.clone()).to_string();
            let mut faults = Faults::default();
            let (_, _, again) =
                import(&text, &Tensors::new(), &mut faults).expect("what was written can be read");
            assert!(faults.is_empty(), "{name}: {faults:?}");
            // Widths that were left to their defaults are spelled out by now: what is said is the same.
            assert_eq!(
                export(&again, 7, Format::Fla(family), Precision::F32).ok(),
                Some(table),
                "{name}"
            );
        }
    }

    #[test]
    fn sizes_without_bounds_are_refused_by_key() {
        for (key, value) in [
            ("num_hidden_layers", "1e18"),
            ("hidden_size", "1e18"),
            ("hidden_ratio", "1e300"),
            ("expand_k", "1e300"),
            ("num_heads", "1e19"),
            ("intermediate_size", "1e12"),
        ] {
            let (_, faults) = read(&format!(r#"{{"model_type": "gla", "{key}": {value}}}"#));
            let text = faults.join("; ");
            assert!(text.contains(&format!("`{key}` is")), "{key}: {text}");
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
        let table = export(&config, 7, Format::Fla(family), Precision::F32).unwrap_or_default();
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
        let faults = export(&config, 7, Format::Fla(family), Precision::F32)
            .expect_err("rank 16 is built in");
        let text = faults.join("; ");
        assert!(text.contains("layers[0].mixer.gla.gate_low_rank` is 8"), "{text}");
    }
}
