//! RecurrentGemma: Griffin's recurrent blocks and attention through a window, between norms whose weights
//! count from 1, with scaled embeddings and a soft cap on the logits.

use super::keys::{NO, rope_parameters};
use super::layout::{
    ForeignConfig, Form, Hub, Theirs, View, always, given_or, in_part, joined, stacked,
};
use crate::config::keys::Keys;
use crate::paths::parameter;
use half::bf16;
use linattn::nn::LayerConfig;
use linattn::nn::mixers::MixerConfig;
use serde_json::{Map, Value, json};

pub(super) static RECURRENT: Hub = Hub {
    name: "recurrent_gemma",
    model_type: "recurrent_gemma",
    recognize: always,
    mixers: &["rg_lru"],
    root: "model.",
    embeddings: &["embed_tokens"],
    pre_norm: None,
    norm: "final_norm",
    head: "lm_head",
    layers: "layers.",
    left_out: &[],
    unused: &[],
    read,
    write,
    place,
};

/// Keys that only drive fresh weights and training.
const IDLE: &[&str] =
    &["attention_dropout", "final_w_init_variance_scale", "w_init_variance_scale"];

const TYPES: &[&str] = &["recurrent", "attention"];

/// The factor of embeddings: the root of the width, rounded as the released models keep it.
fn embedding_scale(d_model: usize) -> f64 {
    bf16::from_f64((d_model as f64).sqrt()).to_f64()
}

fn read(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(IDLE);
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    let eps = keys.positive("rms_norm_eps", "1e-6");
    keys.only("hidden_activation", &["\"gelu_pytorch_tanh\""]);
    keys.only("embeddings_scale_by_sqrt_dim", &["true"]);
    let heads = keys.count("num_attention_heads", "null");
    let head = match keys.has("head_dim") {
        true => keys.count("head_dim", "null"),
        false => d_model / heads,
    };
    let rope = Some(keys.rotation("0.5").unwrap_or((10_000.0, 0.5)));
    let mut attention = keys.attention_heads(Some(head), rope);
    attention["window"] = keys.count("attention_window_size", "2048").into();
    attention["output_bias"] = true.into();
    keys.only("attention_bias", NO);
    let lru_width = match keys.has("lru_width") {
        true => keys.count("lru_width", "null"),
        false => {
            let _asked_for = keys.get("lru_width", "null");
            d_model
        }
    };
    let recurrent = json!({
        "width": lru_width, "heads": heads, "conv_size": keys.count("conv1d_width", "4"),
        "gelu_tanh": true, "first_unscaled": true,
    });
    let mut pattern = keys.words("block_types", TYPES);
    if pattern.is_empty() {
        pattern = ["recurrent", "recurrent", "attention"].map(str::to_string).into();
    }
    let width = keys.count("intermediate_size", "null");
    if !width.is_multiple_of(2) {
        keys.fault("intermediate_size", &width.into(), "even: a half for the gate, and one beside");
    }
    let mlp = json!({ "geglu": { "width": width / 2, "bias": true, "gelu_tanh": true } });
    let list = pattern.iter().cycle().take(layers).map(|word| {
        let mixer = match word.as_str() {
            "attention" => json!({ "attention": attention }),
            _ => json!({ "rg_lru": recurrent }),
        };
        json!({ "mixer": mixer, "mlp": mlp })
    });
    let config = json!({
        "d_model": d_model, "layers": stacked(list), "norm": "zero_centered_rms", "norm_eps": eps,
        "tie_embeddings": keys.flag("tie_word_embeddings", "true"),
        "embedding_scale": embedding_scale(d_model),
        "logit_soft_cap": keys.positive("logits_soft_cap", "30.0"),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config, vocab })
}

fn write(view: &View<'_>) -> Map<String, Value> {
    let (recurrent, attention) = (view.mixer("rg_lru"), view.mixer("attention"));
    let rope = rope_parameters(&attention);
    let table = json!({
        "architectures": ["RecurrentGemmaForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": view.model["norm_eps"],
        "intermediate_size": view.mlp("geglu")["width"].as_u64().map(|width| 2 * width),
        "num_attention_heads": recurrent["heads"],
        "num_key_value_heads": given_or(&attention["key_value_heads"], &attention["heads"]),
        "head_dim": attention["key_width"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_parameters": rope,
        "attention_window_size": attention["window"],
        "attention_bias": false,
        "lru_width": recurrent["width"],
        "conv1d_width": recurrent["conv_size"],
        "logits_soft_cap": view.model["logit_soft_cap"],
        "block_types": view.layer_types(|mixer| match mixer {
            "attention" => "attention",
            _ => "recurrent",
        }),
    });
    joined(view.common(), table)
}

fn place(layer: &LayerConfig, _d_model: usize, path: &[&str]) -> Option<Theirs> {
    let heads = match &layer.mixer {
        MixerConfig::RgLru(config) => Some(config.heads),
        _ => None,
    };
    Some(match (path, heads) {
        (["attn_norm", kind], _) => Theirs::plain(format!("temporal_pre_norm.{}", parameter(kind))),
        (["mlp", "0", kind], _) => Theirs::plain(format!("channel_pre_norm.{}", parameter(kind))),
        (["mlp", "1", inner @ ..], _) => in_part("mlp_block", inner, &[]),
        (["attn", gate @ ("input_gate" | "a_gate"), kind], Some(heads)) => {
            let gate = if *gate == "a_gate" { "recurrent_gate" } else { "input_gate" };
            let theirs = Theirs::plain(format!("temporal_block.rg_lru.{gate}_{kind}"));
            match *kind {
                // The biases of a head are a row there.
                "bias" => Theirs { form: Form::Heads(heads), ..theirs },
                _ => theirs,
            }
        }
        (["attn", "a_param"], Some(_)) => Theirs::plain("temporal_block.rg_lru.recurrent_param"),
        (["attn", inner @ ..], _) => {
            in_part("temporal_block", inner, &[("conv1d", "conv_1d"), ("out_proj", "linear_out")])
        }
        _ => return None,
    })
}
