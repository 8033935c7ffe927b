//! OLMo-Hybrid: Gated DeltaNet between norms that stand before, and attention between norms that stand
//! behind, whose queries and keys have a norm over all heads.
//!
//! A checkpoint that transformers has saved again cuts the three short convolutions of a layer elsewhere: it
//! joins them, and parts the whole in three of one size. Both forms are read.

use super::keys::{NO, SILU, rope_parameters};
use super::layout::{
    ForeignConfig, Hub, Rows, Theirs, View, always, given_or, in_part, joined, stacked, value_width,
};
use crate::config::keys::Keys;
use crate::paths::parameter;
use linattn::nn::LayerConfig;
use linattn::nn::mixers::{GatedDeltaNetConfig, MixerConfig};
use serde_json::{Map, Value, json};

pub(super) static HYBRID: Hub = Hub {
    name: "olmo_hybrid",
    model_type: "olmo_hybrid",
    recognize: always,
    mixers: &["gated_deltanet"],
    root: "model.",
    embeddings: &["embed_tokens"],
    pre_norm: None,
    norm: "norm",
    head: "lm_head",
    layers: "layers.",
    left_out: &[],
    unused: &[],
    read,
    write,
    place,
};

/// Keys that only drive fresh weights and training.
const IDLE: &[&str] = &[
    "attention_dropout",
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
];

/// Epsilon of the norm behind the memory, which no config says.
const OUTPUT_EPS: f64 = 1e-5;
const TYPES: &[&str] = &["linear_attention", "full_attention"];

fn read(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(IDLE);
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    let eps = keys.positive("rms_norm_eps", "1e-6");
    keys.only("hidden_act", SILU);
    keys.only("attention_bias", NO);
    let rope = keys.rotation("1.0");
    if let Some((_, share)) = rope.filter(|(_, share)| *share != 1.0) {
        keys.fault("partial_rotary_factor", &share.into(), "1.0: all of a head is rotated");
    }
    let mut attention = keys.attention_heads(None, rope);
    for (key, value) in
        [("qk_norm", true.into()), ("qk_norm_span", "projection".into()), ("norm_eps", json!(eps))]
    {
        attention[key] = value;
    }
    let mut linear = keys.delta_net(OUTPUT_EPS);
    linear["allow_neg_eigval"] = keys.flag("linear_allow_neg_eigval", "true").into();
    let usual = |i: usize| TYPES[usize::from(i % 4 == 3)];
    let types = keys.words_of_layers("layer_types", TYPES, layers, usual);
    let mlp = json!({ "swiglu": { "width": keys.count("intermediate_size", "null") } });
    let list = types.iter().map(|word| match word.as_str() {
        "full_attention" => {
            json!({ "mixer": { "attention": attention }, "mlp": mlp, "post_norm": true })
        }
        _ => json!({ "mixer": { "gated_deltanet": linear }, "mlp": mlp }),
    });
    let config = json!({
        "d_model": d_model, "layers": stacked(list), "norm_eps": eps,
        "tie_embeddings": keys.flag("tie_word_embeddings", "false"),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config, vocab })
}

fn write(view: &View<'_>) -> Map<String, Value> {
    let (linear, attention) = (view.mixer("gated_deltanet"), view.mixer("attention"));
    let rope = match &attention["rope"] {
        Value::Bool(true) => rope_parameters(&attention),
        _ => Value::Null,
    };
    let table = json!({
        "architectures": ["OlmoHybridForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": view.model["norm_eps"],
        "intermediate_size": view.mlp("swiglu")["width"],
        "num_attention_heads": attention["heads"],
        "num_key_value_heads": given_or(&attention["key_value_heads"], &attention["heads"]),
        "rope_parameters": rope,
        "linear_num_key_heads": linear["heads"],
        "linear_num_value_heads": given_or(&linear["value_heads"], &linear["heads"]),
        "linear_key_head_dim": linear["key_width"],
        "linear_value_head_dim": value_width(&linear),
        "linear_conv_kernel_dim": linear["conv_size"],
        "linear_allow_neg_eigval": linear["allow_neg_eigval"] == json!(true),
        "layer_types": view.layer_types(|mixer| match mixer {
            "attention" => "full_attention",
            _ => "linear_attention",
        }),
    });
    joined(view.common(), table)
}

fn place(layer: &LayerConfig, d_model: usize, path: &[&str]) -> Option<Theirs> {
    let linear = match &layer.mixer {
        MixerConfig::GatedDeltaNet(GatedDeltaNetConfig(config)) => Some(config),
        _ => None,
    };
    // Transformers' own names of the norms, and those of the released files, in either kind of layer.
    let [first, second] = match linear {
        Some(_) => [
            ["attention_layer_norm", "input_layernorm"],
            ["feedforward_layer_norm", "post_attention_layernorm"],
        ],
        None => [
            ["post_attention_layernorm", "feedforward_layer_norm"],
            ["post_feedforward_layernorm", "post_feedforward_layernorm"],
        ],
    };
    let norm = |[name, other]: [&str; 2], kind: &str| {
        let kind = parameter(kind);
        Theirs::plain(format!("{name}.{kind}")).or(format!("{other}.{kind}"))
    };
    Some(match (path, linear) {
        (["attn_norm", kind], _) => norm(first, kind),
        (["mlp", "0", kind], _) => norm(second, kind),
        (["mlp", "1", inner @ ..], _) => in_part("mlp", inner, &[]),
        (["attn", inner @ ..], Some(config)) => {
            let theirs = in_part("linear_attn", inner, &[]);
            let convolutions = ["q_conv1d", "k_conv1d", "v_conv1d"];
            match convolutions.iter().position(|name| inner.first() == Some(name)) {
                Some(i) => {
                    let rows = Rows::of_parts(&super::qwen::parts(config, d_model), i);
                    let names = convolutions.map(|name| format!("linear_attn.{name}.weight"));
                    Theirs { cut: Some((names.into(), rows)), ..theirs }
                }
                None => theirs,
            }
        }
        (["attn", inner @ ..], None) => in_part("self_attn", inner, &[]),
        _ => return None,
    })
}
