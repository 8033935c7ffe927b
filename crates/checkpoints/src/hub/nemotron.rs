//! Nemotron-H without experts: layers of one part each, which is Mamba-2 with a norm of groups, attention
//! without positions, or an MLP of a squared ReLU.

use super::keys::{NO, SILU};
use super::layout::{ForeignConfig, Hub, Theirs, View, always, given_or, in_part, joined, stacked};
use crate::config::keys::{Keys, MOST_LAYERS};
use crate::paths::parameter;
use linattn::nn::LayerConfig;
use serde_json::{Map, Value, json};

pub(super) static HYBRID: Hub = Hub {
    name: "nemotron_h",
    model_type: "nemotron_h",
    recognize: always,
    mixers: &["mamba2"],
    root: "backbone.",
    embeddings: &["embeddings", "embedding"],
    pre_norm: None,
    norm: "norm_f",
    head: "lm_head",
    layers: "layers.",
    left_out: &["mtp."],
    unused: &[],
    read,
    write,
    place,
};

/// Keys that only drive fresh weights, training, caching or kernels, and those of experts that no layer has.
const IDLE: &[&str] = &[
    "attention_dropout",
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_ssm_cache_dtype",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "routed_scaling_factor",
    "time_step_floor",
    "time_step_max",
    "time_step_rank",
    "topk_group",
    "use_mamba_kernels",
];

/// Words for a kind of layer, present and past, and its letter in a pattern.
const TYPES: &[(&str, &str, char)] = &[
    ("linear_attention", "mamba", 'M'),
    ("full_attention", "attention", '*'),
    ("mlp", "mlp", '-'),
];

fn read(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(IDLE);
    let before = keys.faults();
    let d_model = keys.count("hidden_size", "null");
    let bounded = keys.faults() == before;
    let eps = keys.positive("layer_norm_epsilon", "1e-5");
    for key in ["rms_norm_eps", "norm_eps"] {
        keys.same(key, &eps.into(), "layer_norm_epsilon");
    }
    for key in ["use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"] {
        keys.only(key, NO);
    }
    keys.only("use_conv_bias", &["true"]);
    keys.only("mamba_hidden_act", SILU);
    keys.only("mlp_hidden_act", &["\"relu2\""]);
    keys.only("sliding_window", &["null"]);
    keys.endless("time_step_limit");
    let groups = keys.count("n_groups", "8");
    // The reference in PyTorch raises smaller steps to this, its kernels do not.
    let step_min = keys.number("time_step_min", "0.001");
    let mamba = json!({
        "heads": keys.count("mamba_num_heads", "null"),
        "head_width": keys.count("mamba_head_dim", "null"),
        "d_state": keys.count("ssm_state_size", "null"),
        "conv_size": keys.count("conv_kernel", "4"),
        "groups": groups, "group_norm": groups > 1, "step_min": step_min, "norm_eps": eps,
    });
    let head = match keys.has("head_dim") {
        true => keys.count("head_dim", "null"),
        false => keys.count("attention_head_dim", "128"),
    };
    keys.same("attention_head_dim", &head.into(), "head_dim");
    let attention = keys.attention_heads(Some(head), None);
    let width = keys.count("intermediate_size", "null");
    let kinds = kinds(keys);
    let list = kinds.iter().map(|kind| match *kind {
        "mlp" => json!({ "mixer": "none", "mlp": { "relu2": { "width": width } } }),
        "attention" => json!({ "mixer": { "attention": attention }, "mlp": "none" }),
        _ => json!({ "mixer": { "mamba2": mamba }, "mlp": "none" }),
    });
    let config = json!({
        "d_model": d_model, "layers": stacked(list), "norm_eps": eps,
        "tie_embeddings": keys.flag("tie_word_embeddings", "false"),
    });
    let vocab = keys.vocabulary();
    if kinds.len() > MOST_LAYERS {
        let want = format!("at most {MOST_LAYERS} words");
        keys.fault("layers_block_type", &json!(format!("{} words", kinds.len())), want);
        return None;
    }
    bounded.then_some(ForeignConfig { config, vocab })
}

/// The kind of each layer, from the list or from the older pattern.
fn kinds(keys: &mut Keys<'_>) -> Vec<&'static str> {
    let known: Vec<&str> = TYPES.iter().flat_map(|(word, old, _)| [*word, *old]).collect();
    let mut kinds = vec![];
    let pattern = keys.get("hybrid_override_pattern", "null");
    for word in keys.words("layers_block_type", &known) {
        kinds.extend(TYPES.iter().find(|(new, old, _)| word == *new || word == *old));
    }
    if kinds.is_empty() {
        for letter in pattern.as_str().unwrap_or_default().chars() {
            match TYPES.iter().find(|(.., known)| letter == *known) {
                Some(kind) => kinds.push(kind),
                None => {
                    let want = "made of M, * and -: experts are not known here";
                    keys.fault("hybrid_override_pattern", &pattern, want);
                    break;
                }
            }
        }
    }
    let kinds: Vec<&str> = kinds.into_iter().map(|(_, kind, _)| *kind).collect();
    if kinds.is_empty() {
        let want = "a list of linear_attention, full_attention and mlp";
        keys.fault("layers_block_type", &Value::Null, want);
    }
    keys.same("num_hidden_layers", &kinds.len().into(), "layers_block_type");
    kinds
}

fn write(view: &View<'_>) -> Map<String, Value> {
    let (mamba, attention) = (view.mixer("mamba2"), view.mixer("attention"));
    let table = json!({
        "architectures": ["NemotronHForCausalLM"],
        "layer_norm_epsilon": view.model["norm_eps"],
        "intermediate_size": view.mlp("relu2")["width"],
        "mlp_hidden_act": "relu2",
        "num_attention_heads": attention["heads"],
        "num_key_value_heads": given_or(&attention["key_value_heads"], &attention["heads"]),
        "head_dim": attention["key_width"],
        "mamba_num_heads": mamba["heads"],
        "mamba_head_dim": mamba["head_width"],
        "ssm_state_size": mamba["d_state"],
        "conv_kernel": mamba["conv_size"],
        "n_groups": mamba["groups"],
        "time_step_min": given_or(&mamba["step_min"], &json!(0.0)),
        "layers_block_type": view.layer_types(|mixer| match mixer {
            "mamba2" => "linear_attention",
            "attention" => "full_attention",
            _ => "mlp",
        }),
    });
    let mut table = joined(view.common(), table);
    table.shift_remove("num_hidden_layers");
    table
}

fn place(_layer: &LayerConfig, _d_model: usize, path: &[&str]) -> Option<Theirs> {
    Some(match path {
        ["attn_norm", kind] | ["mlp", "0", kind] => {
            Theirs::plain(format!("norm.{}", parameter(kind)))
        }
        ["attn", inner @ ..] | ["mlp", "1", inner @ ..] => in_part("mixer", inner, &[]),
        _ => return None,
    })
}
