//! Mamba and Mamba-2, as transformers has them and as their authors have them. The tensors have the same
//! names, but for the authors' embedding; only the keys of the configs differ.

use super::keys::{NO, SILU};
use super::layout::{ForeignConfig, Hub, Theirs, View, has_any, in_part, joined, stacked};
use crate::config::keys::Keys;
use crate::paths::parameter;
use crate::tensors::Tensors;
use linattn::nn::LayerConfig;
use serde_json::{Map, Value, json};

/// Mamba of the repositories whose names end in `-hf`.
pub(super) static MAMBA: Hub = Hub {
    name: "mamba_hf",
    model_type: "mamba",
    mixers: &["mamba"],
    read: read_mamba,
    write: |view| {
        let mamba = view.mixer("mamba");
        let inner = mamba["expand"].as_u64().zip(view.model["d_model"].as_u64());
        let table = json!({
            "architectures": ["MambaForCausalLM"],
            "hidden_act": "silu",
            "layer_norm_epsilon": view.model["norm_eps"],
            "state_size": mamba["d_state"],
            "expand": mamba["expand"],
            "intermediate_size": inner.map(|(expand, d_model)| expand * d_model),
            "conv_kernel": mamba["conv_size"],
            "time_step_rank": mamba["dt_rank"],
            "use_bias": false,
            "use_conv_bias": true,
        });
        joined(view.common(), table)
    },
    ..OURS
};

/// Mamba-2 of the repositories whose names end in `-hf`.
pub(super) static MAMBA2: Hub = Hub {
    name: "mamba2_hf",
    model_type: "mamba2",
    mixers: &["mamba2"],
    read: read_mamba2,
    write: |view| {
        let mamba = view.mixer("mamba2");
        let inner = mamba["heads"].as_u64().zip(mamba["head_width"].as_u64());
        let inner = inner.map(|(heads, width)| (heads * width) as f64);
        let expand = inner.zip(view.model["d_model"].as_f64()).map(|(inner, d)| inner / d);
        let table = json!({
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_act": "silu",
            "layer_norm_epsilon": view.model["norm_eps"],
            "state_size": mamba["d_state"],
            "expand": expand.map(|x| if x.fract() == 0.0 { json!(x as u64) } else { json!(x) }),
            "num_heads": mamba["heads"],
            "head_dim": mamba["head_width"],
            "n_groups": mamba["groups"],
            "conv_kernel": mamba["conv_size"],
            "use_bias": false,
            "use_conv_bias": true,
        });
        joined(view.common(), table)
    },
    ..OURS
};

/// Both, as their authors' own repositories have them.
pub(super) static ORIGINAL: Hub = Hub {
    name: "mamba_ssm",
    model_type: "",
    recognize: |table, _| has_any(table, &["ssm_cfg"]) && has_any(table, &["n_layer"]),
    mixers: &["mamba", "mamba2"],
    embeddings: &["embedding", "embeddings"],
    read: read_original,
    write: write_original,
    ..OURS
};

/// Parts that they have in common.
const OURS: Hub = Hub {
    name: "",
    model_type: "",
    recognize: transformers,
    mixers: &[],
    root: "backbone.",
    embeddings: &["embeddings", "embedding"],
    pre_norm: None,
    norm: "norm_f",
    head: "lm_head",
    layers: "layers.",
    left_out: &[],
    unused: &[],
    read: read_mamba,
    write: |view| view.common(),
    place,
};

/// Keys that flash-linear-attention's configs of the same `model_type` do not have.
fn transformers(table: &Map<String, Value>, _: &Tensors) -> bool {
    has_any(table, &["layer_norm_epsilon", "time_step_rank", "time_step_min", "time_step_floor"])
}

/// Keys that only drive fresh weights, training, caching or kernels.
const IDLE: &[&str] = &[
    "chunk_size",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mambapy",
];

/// A model of one kind of layer, all of it a mixer.
fn model(keys: &mut Keys<'_>, mixer: Value, tied: &str) -> Option<ForeignConfig> {
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    // Keys of the authors, which some of these repositories still have.
    keys.same("d_model", &d_model.into(), "hidden_size");
    keys.same("n_layer", &layers.into(), "num_hidden_layers");
    keys.only("ssm_cfg", &["{}"]);
    keys.only("rms_norm", &["true"]);
    let layer = json!({ "mixer": mixer, "mlp": "none" });
    let config = json!({
        "d_model": d_model, "layers": stacked(std::iter::repeat_n(layer, layers)),
        "norm_eps": keys.positive("layer_norm_epsilon", "1e-5"),
        "tie_embeddings": keys.flag("tie_word_embeddings", tied),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config, vocab })
}

fn common(keys: &mut Keys<'_>) {
    keys.idle(IDLE);
    keys.only("hidden_act", SILU);
    keys.only("use_bias", NO);
    keys.only("use_conv_bias", &["true"]);
}

fn read_mamba(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    common(keys);
    let (d_model, expand) = (keys.count("hidden_size", "null"), keys.count("expand", "2"));
    for key in ["intermediate_size", "d_inner"] {
        keys.same(key, &(expand * d_model).into(), "expand times hidden_size");
    }
    let mut mamba = json!({
        "d_state": keys.count("state_size", "16"), "expand": expand,
        "conv_size": keys.count("conv_kernel", "4"),
    });
    if keys.get("time_step_rank", "\"auto\"") != "auto" {
        mamba["dt_rank"] = keys.count("time_step_rank", "null").into();
    }
    model(keys, json!({ "mamba": mamba }), "true")
}

fn read_mamba2(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    common(keys);
    // A remnant of Mamba that nothing reads.
    keys.idle(&["time_step_rank"]);
    keys.endless("time_step_limit");
    let d_model = keys.count("hidden_size", "null");
    let (heads, width) = (keys.count("num_heads", "128"), keys.count("head_dim", "64"));
    let expand = keys.number("expand", "2");
    if expand * d_model as f64 != (heads * width) as f64 {
        let want = format!("{heads} heads of {width} over `hidden_size`, {d_model}");
        keys.fault("expand", &expand.into(), want);
    }
    let groups = keys.get("n_groups", "1");
    if groups != 1 {
        let want = "1: the norm of several groups is one over all in transformers, and one for each \
                    group in the authors' code";
        keys.fault("n_groups", &groups, want);
    }
    let mamba = json!({
        "d_state": keys.count("state_size", "128"), "heads": heads, "head_width": width,
        "conv_size": keys.count("conv_kernel", "4"),
        "norm_eps": keys.positive("layer_norm_epsilon", "1e-5"),
    });
    model(keys, json!({ "mamba2": mamba }), "false")
}

/// Keys of `ssm_cfg` that only drive fresh weights or kernels.
const OF_START: &[&str] = &[
    "A_init_range",
    "chunk_size",
    "conv_init",
    "dt_init",
    "dt_init_floor",
    "dt_max",
    "dt_min",
    "dt_scale",
    "use_fast_path",
    "use_mem_eff_path",
];

/// Epsilon of every norm, which the authors' configs leave to their code.
const EPS: f64 = 1e-5;

fn read_original(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(&["attn_cfg", "fused_add_norm", "residual_in_fp32"]);
    keys.only("attn_layer_idx", &["[]"]);
    keys.only("d_intermediate", &["0"]);
    keys.only("rms_norm", &["true"]);
    let before = keys.faults();
    let d_model = keys.count("d_model", "null");
    let layers = keys.count_to(crate::config::keys::MOST_LAYERS, "n_layer", "null");
    let bounded = keys.faults() == before;
    let mixer = keys.table("ssm_cfg", |inner| {
        inner.idle(OF_START);
        inner.only("layer", &["\"Mamba1\"", "\"Mamba2\""]);
        inner.only("bias", NO);
        inner.only("conv_bias", &["true"]);
        match inner.get("layer", "\"Mamba1\"") == "Mamba2" {
            true => original_mamba2(inner),
            false => original_mamba(inner),
        }
    });
    let layer = json!({ "mixer": mixer, "mlp": "none" });
    let config = json!({
        "d_model": d_model, "layers": stacked(std::iter::repeat_n(layer, layers)),
        "norm_eps": EPS, "tie_embeddings": keys.flag("tie_embeddings", "true"),
    });
    let multiple = keys.count("pad_vocab_size_multiple", "8");
    let padded = |vocab: usize| vocab.checked_next_multiple_of(multiple).unwrap_or(usize::MAX);
    let vocab = keys.vocabulary().map(padded);
    bounded.then_some(ForeignConfig { config, vocab })
}

fn original_mamba(keys: &mut Keys<'_>) -> Value {
    let mut mamba = json!({
        "d_state": keys.count("d_state", "16"), "expand": keys.count("expand", "2"),
        "conv_size": keys.count("d_conv", "4"),
    });
    if keys.get("dt_rank", "\"auto\"") != "auto" {
        mamba["dt_rank"] = keys.count("dt_rank", "null").into();
    }
    json!({ "mamba": mamba })
}

fn original_mamba2(keys: &mut Keys<'_>) -> Value {
    for (key, allowed) in [
        ("D_has_hdim", "false"),
        ("d_ssm", "null"),
        ("norm_before_gate", "false"),
        ("rmsnorm", "true"),
    ] {
        keys.only(key, &[allowed]);
    }
    keys.endless("dt_limit");
    let groups = keys.count("ngroups", "1");
    json!({ "mamba2": {
        "d_state": keys.count("d_state", "128"), "expand": keys.count("expand", "2"),
        "head_width": keys.count("headdim", "64"), "conv_size": keys.count("d_conv", "4"),
        "groups": groups, "group_norm": groups > 1, "norm_eps": EPS,
    } })
}

fn write_original(view: &View<'_>) -> Map<String, Value> {
    let (mamba, mamba2) = (view.mixer("mamba"), view.mixer("mamba2"));
    let inner = mamba2["heads"].as_u64().zip(mamba2["head_width"].as_u64());
    let inner = inner.zip(view.model["d_model"].as_u64());
    let layer = match mamba2.is_null() {
        true => json!({
            "layer": "Mamba1", "d_state": mamba["d_state"], "expand": mamba["expand"],
            "d_conv": mamba["conv_size"], "dt_rank": mamba["dt_rank"],
        }),
        false => json!({
            "layer": "Mamba2", "d_state": mamba2["d_state"],
            "expand": inner.map(|((heads, width), d_model)| heads * width / d_model.max(1)),
            "headdim": mamba2["head_width"], "ngroups": mamba2["groups"],
            "d_conv": mamba2["conv_size"],
        }),
    };
    let table = json!({
        "d_model": view.model["d_model"], "n_layer": view.layers.len(), "vocab_size": view.vocab,
        "pad_vocab_size_multiple": 1, "ssm_cfg": layer, "rms_norm": true, "residual_in_fp32": true,
        "fused_add_norm": true, "tie_embeddings": view.model["tie_embeddings"],
    });
    joined(Map::new(), table)
}

fn place(_layer: &LayerConfig, _d_model: usize, path: &[&str]) -> Option<Theirs> {
    Some(match path {
        ["attn_norm", kind] => Theirs::plain(format!("norm.{}", parameter(kind))),
        ["attn", inner @ ..] => in_part("mixer", inner, &[]),
        _ => return None,
    })
}
