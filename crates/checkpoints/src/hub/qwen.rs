//! Qwen3.5, of text alone and as the text part of the multimodal models, and dense Qwen3-Next: Gated
//! DeltaNet, and attention with a gate and a partial rotation, between norms whose weights count from 1.
//! ```text
//! Qwen3.5      in_proj_qkv rows   q of all heads, k of all heads, v of all heads;  z, b and a apart
//! Qwen3-Next   in_proj_qkvz rows  for each key head: q, k, v and z of its value heads
//!              in_proj_ba rows    for each key head: b, then a of its value heads
//! both         q_proj rows        for each head: q, then its gate
//!              conv1d             q, k, v of all heads
//! ```

use super::keys::{NO, SILU, rope_parameters};
use super::layout::{
    ForeignConfig, Hub, Rows, Theirs, View, always, given_or, in_part, joined, stacked, value_width,
};
use crate::config::keys::{Keys, MOST_LAYERS};
use crate::paths::parameter;
use linattn::nn::LayerConfig;
use linattn::nn::mixers::{AttentionConfig, DeltaNetConfig, GatedDeltaNetConfig, MixerConfig};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Qwen3.5's text model.
pub(super) static TEXT: Hub = Hub { name: "qwen3_5_text", model_type: "qwen3_5_text", ..QWEN };

/// Qwen3.5 with eyes, which are left out.
pub(super) static MULTIMODAL: Hub = Hub {
    name: "qwen3_5",
    model_type: "qwen3_5",
    root: "model.language_model.",
    read: multimodal,
    write: |view| {
        let mut text = text_table(view);
        text.insert("model_type".into(), TEXT.model_type.into());
        let tied = text.get("tie_word_embeddings").cloned();
        let mut table = Map::new();
        table.insert("architectures".into(), json!(["Qwen3_5ForConditionalGeneration"]));
        table.insert("text_config".into(), text.into());
        table.insert("tie_word_embeddings".into(), tied.into());
        table
    },
    ..QWEN
};

/// Parts that they have in common.
const QWEN: Hub = Hub {
    name: "",
    model_type: "",
    recognize: always,
    mixers: &["gated_deltanet"],
    root: "model.",
    embeddings: &["embed_tokens"],
    pre_norm: None,
    norm: "norm",
    head: "lm_head",
    layers: "layers.",
    left_out: &["mtp.", "model.visual."],
    unused: &[],
    read: text,
    write: |view| {
        let mut table = text_table(view);
        table.insert("architectures".into(), json!(["Qwen3_5ForCausalLM"]));
        table
    },
    place,
};

/// Qwen3-Next without experts.
pub(super) static NEXT: Hub = Hub {
    name: "qwen3_next",
    model_type: "qwen3_next",
    left_out: &["mtp."],
    read: |keys| {
        let layers = keys.get("num_hidden_layers", "0").as_u64().unwrap_or(0);
        refuse_experts(keys, layers);
        keys.idle(OF_EXPERTS);
        text(keys)
    },
    write: |view| {
        let all: Vec<usize> = (0..view.layers.len()).collect();
        let experts = json!({
            "architectures": ["Qwen3NextForCausalLM"], "num_experts": 0, "mlp_only_layers": all,
        });
        joined(text_table(view), experts)
    },
    place: |layer, d_model, path| match (&layer.mixer, path) {
        (MixerConfig::GatedDeltaNet(GatedDeltaNetConfig(config)), ["attn", inner @ ..]) => {
            Some(grouped(&Widths::of(config, d_model), inner))
        }
        _ => place(layer, d_model, path),
    },
    ..QWEN
};

/// Keys that only drive training, caching or generation, and parts that are left out.
const IDLE: &[&str] = &[
    "attention_dropout",
    "full_attention_interval",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
];

/// Keys of experts that no layer has.
const OF_EXPERTS: &[&str] = &[
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
];

/// Keys of the part that sees.
const OF_VISION: &[&str] = &[
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
];

const TYPES: &[&str] = &["linear_attention", "full_attention"];

fn text(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(IDLE);
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    let eps = keys.positive("rms_norm_eps", "1e-6");
    keys.only("hidden_act", SILU);
    keys.only("attention_bias", NO);
    keys.only("attn_output_gate", &["true"]);
    let head = keys.count("head_dim", "256");
    let rope = keys.rotation("0.25");
    if rope.is_none() {
        keys.fault("rope_theta", &Value::Null, "above 0, here or in `rope_parameters`");
    }
    let mut attention = keys.attention_heads(Some(head), rope);
    for (key, value) in [
        ("qk_norm", true.into()),
        ("qk_norm_kind", "zero_centered_rms".into()),
        ("norm_eps", json!(eps)),
        ("output_gate", true.into()),
    ] {
        attention[key] = value;
    }
    let linear = keys.delta_net(eps);
    let every = keys.get("full_attention_interval", "4").as_u64().unwrap_or(4).max(1) as usize;
    let usual = |i: usize| TYPES[usize::from((i + 1).is_multiple_of(every))];
    let types = keys.words_of_layers("layer_types", TYPES, layers, usual);
    let width = keys.count("intermediate_size", "null");
    let list = types.iter().map(|word| {
        let mixer = match word.as_str() {
            "full_attention" => json!({ "attention": attention }),
            _ => json!({ "gated_deltanet": linear }),
        };
        json!({ "mixer": mixer, "mlp": { "swiglu": { "width": width } } })
    });
    let model = json!({
        "d_model": d_model, "layers": stacked(list), "norm": "zero_centered_rms", "norm_eps": eps,
        "tie_embeddings": keys.flag("tie_word_embeddings", "false"),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config: model, vocab })
}

/// The text model's config stands in `text_config`; whether weights are tied may be said beside it.
fn multimodal(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(OF_VISION);
    let said = keys.get("tie_word_embeddings", "null");
    let read = keys.table("text_config", |inner| {
        inner.only("model_type", &["\"qwen3_5_text\""]);
        let own = inner.get("tie_word_embeddings", "null");
        if !said.is_null() && !own.is_null() && said != own {
            inner.fault("tie_word_embeddings", &own, format!("{said}, as beside `text_config`"));
        }
        text(inner)
    });
    let Some(read) = read else {
        if !keys.has("text_config") {
            keys.fault("text_config", &Value::Null, "a table");
        }
        return None;
    };
    let mut read = read?;
    if let Some(tied) = said.as_bool() {
        read.config["tie_embeddings"] = tied.into();
    }
    Some(read)
}

/// Refuses layers of experts.
fn refuse_experts(keys: &mut Keys<'_>, layers: u64) {
    let experts = keys.get("num_experts", "512");
    let step = keys.get("decoder_sparse_step", "1").as_u64().unwrap_or(1).max(1);
    let listed = keys.get("mlp_only_layers", "[]");
    let dense: BTreeSet<u64> =
        listed.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    // More layers are refused by their number.
    let mut layers = 0..layers.min(MOST_LAYERS as u64);
    let is_dense = |i: u64| dense.contains(&i) || !(i + 1).is_multiple_of(step);
    if experts != json!(0) && !layers.all(is_dense) {
        let want = "0, or `mlp_only_layers` has to list every layer: experts are not known here";
        keys.fault("num_experts", &experts, want);
    }
}

fn text_table(view: &View<'_>) -> Map<String, Value> {
    let (linear, attention) = (view.mixer("gated_deltanet"), view.mixer("attention"));
    let table = json!({
        "hidden_act": "silu",
        "rms_norm_eps": view.model["norm_eps"],
        "intermediate_size": view.mlp("swiglu")["width"],
        "num_attention_heads": attention["heads"],
        "num_key_value_heads": given_or(&attention["key_value_heads"], &attention["heads"]),
        "head_dim": attention["key_width"],
        "rope_parameters": rope_parameters(&attention),
        "linear_num_key_heads": linear["heads"],
        "linear_num_value_heads": given_or(&linear["value_heads"], &linear["heads"]),
        "linear_key_head_dim": linear["key_width"],
        "linear_value_head_dim": value_width(&linear),
        "linear_conv_kernel_dim": linear["conv_size"],
        "layer_types": view.layer_types(|mixer| match mixer {
            "attention" => "full_attention",
            _ => "linear_attention",
        }),
    });
    joined(view.common(), table)
}

/// Sizes of a Gated DeltaNet.
struct Widths {
    heads: usize,
    /// Value heads of a key head.
    group: usize,
    key: usize,
    value: usize,
}

impl Widths {
    fn of(config: &DeltaNetConfig, d_model: usize) -> Self {
        let heads = config.heads.max(1);
        let key = config.key_width.unwrap_or(d_model / heads);
        let value = (key as f64 * config.expand_v.unwrap_or(2.0)).round() as usize;
        let group = config.value_heads.unwrap_or(heads) / heads;
        Self { heads, group, key, value }
    }

    /// Rows of queries, of keys and of values, of all heads.
    fn parts(&self) -> [usize; 3] {
        let (keys, values) = (self.heads * self.key, self.heads * self.group * self.value);
        [keys, keys, values]
    }
}

/// Rows of queries, of keys and of values in a Gated DeltaNet, of all heads.
pub(super) fn parts(config: &DeltaNetConfig, d_model: usize) -> [usize; 3] {
    Widths::of(config, d_model).parts()
}

fn place(layer: &LayerConfig, d_model: usize, path: &[&str]) -> Option<Theirs> {
    Some(match (path, &layer.mixer) {
        (["attn_norm", kind], _) => Theirs::plain(format!("input_layernorm.{}", parameter(kind))),
        (["mlp", "0", kind], _) => {
            Theirs::plain(format!("post_attention_layernorm.{}", parameter(kind)))
        }
        (["mlp", "1", inner @ ..], _) => in_part("mlp", inner, &[]),
        (["attn", inner @ ..], MixerConfig::GatedDeltaNet(GatedDeltaNetConfig(config))) => {
            apart(&Widths::of(config, d_model), inner)
        }
        (["attn", inner @ ..], MixerConfig::Attention(config)) => attention(config, d_model, inner),
        _ => return None,
    })
}

/// Which of queries, keys and values a layer's projection or convolution is of.
fn part_of(name: &str) -> Option<(usize, &str)> {
    let (part, kind) = name.split_once('_')?;
    Some((["q", "k", "v"].iter().position(|known| *known == part)?, kind))
}

/// A linear layer's weight, where queries, keys and values stand together, and gates apart.
fn apart(widths: &Widths, path: &[&str]) -> Theirs {
    let rows = |i| Rows::of_parts(&widths.parts(), i);
    match path {
        [name, "weight"] => match part_of(name) {
            Some((i, "proj")) => Theirs::rows("linear_attn.in_proj_qkv.weight", rows(i)),
            Some((i, _)) => Theirs::rows("linear_attn.conv1d.weight", rows(i)),
            None => in_part("linear_attn", path, NAMES),
        },
        _ => in_part("linear_attn", path, NAMES),
    }
}

const NAMES: &[(&str, &str)] = &[
    ("g_proj", "in_proj_z"),
    ("b_proj", "in_proj_b"),
    ("a_proj", "in_proj_a"),
    ("o_norm", "norm"),
    ("o_proj", "out_proj"),
];

/// A linear layer's weight, where all of a key head stands together.
fn grouped(widths: &Widths, path: &[&str]) -> Theirs {
    let &Widths { heads, group, key, value } = widths;
    let block = 2 * key + 2 * group * value;
    let of_qkvz = |first, count| {
        let rows = Rows::of_heads(heads, block, first, count);
        Theirs::rows("linear_attn.in_proj_qkvz.weight", rows)
    };
    let of_ba = |first| {
        let rows = Rows::of_heads(heads, 2 * group, first, group);
        Theirs::rows("linear_attn.in_proj_ba.weight", rows)
    };
    match path {
        ["q_proj", "weight"] => of_qkvz(0, key),
        ["k_proj", "weight"] => of_qkvz(key, key),
        ["v_proj", "weight"] => of_qkvz(2 * key, group * value),
        ["g_proj", "weight"] => of_qkvz(2 * key + group * value, group * value),
        ["b_proj", "weight"] => of_ba(0),
        ["a_proj", "weight"] => of_ba(group),
        _ => apart(widths, path),
    }
}

/// An attention layer's weight: a head's gate stands behind its query.
fn attention(config: &AttentionConfig, d_model: usize, path: &[&str]) -> Theirs {
    let width = config.key_width.unwrap_or(d_model / config.heads.max(1));
    let rows = |first| Rows::of_heads(config.heads, 2 * width, first, width);
    match path {
        ["q_proj", "weight"] => Theirs::rows("self_attn.q_proj.weight", rows(0)),
        ["g_proj", "weight"] => Theirs::rows("self_attn.q_proj.weight", rows(width)),
        _ => in_part("self_attn", path, &[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::layout::expand_v;

    #[test]
    fn shares_of_any_widths_make_layers_of_these_widths() {
        for key in 1..200 {
            for value in (1..400).step_by(7) {
                let share = Some(expand_v(key, value));
                let config =
                    DeltaNetConfig { key_width: Some(key), expand_v: share, ..Default::default() };
                assert_eq!(parts(&config, 8), [key, key, value], "{value} / {key}");
                let mixer = MixerConfig::GatedDeltaNet(GatedDeltaNetConfig(config));
                mixer.check(8).unwrap_or_else(|e| panic!("{value} / {key}: {e}"));
            }
        }
    }
}
