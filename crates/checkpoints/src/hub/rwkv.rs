//! RWKV-7 as transformers has it, in the names of its authors. flash-linear-attention's has the same
//! `model_type` and other names, so the tensors tell the two apart.
//!
//! Low-rank maps stand there as they multiply, `[in, out]`. The first layer has a value residual that nothing
//! reads.

use super::layout::{ForeignConfig, Form, Hub, Theirs, View, in_part, joined, stacked};
use crate::config::keys::Keys;
use crate::paths::parameter;
use linattn::nn::LayerConfig;
use serde_json::{Map, Value, json};

pub(super) static NATIVE: Hub = Hub {
    name: "rwkv7_native",
    model_type: "rwkv7",
    recognize: |_, tensors| tensors.keys().any(|name| name.starts_with("rwkv7.blocks.")),
    mixers: &["rwkv7"],
    root: "rwkv7.",
    embeddings: &["emb"],
    pre_norm: Some("blocks.0.ln0"),
    norm: "ln_out",
    head: "head",
    layers: "blocks.",
    left_out: &[],
    unused: &[".blocks.0.att.v0", ".blocks.0.att.v1", ".blocks.0.att.v2"],
    read,
    write,
    place,
};

fn read(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    keys.only("norm_bias", &["true"]);
    keys.only("use_deep_embed", &["false"]);
    keys.only("wkv_state_dtype", &["\"float32\""]);
    let eps = keys.positive("norm_eps", "1e-5");
    let width = keys.count("head_dim", "64");
    let heads = keys.count("num_heads", "12");
    keys.same("num_heads", &(d_model / width).into(), "hidden_size over head_dim");
    let first = json!({
        "heads": heads, "key_width": width, "norm_eps": eps,
        "decay_rank": keys.count("decay_low_rank_dim", "64"),
        "rate_rank": keys.count("a_low_rank_dim", "64"),
        "gate_rank": keys.count("gate_low_rank_dim", "128"),
    });
    let mut later = first.clone();
    later["value_residual"] = true.into();
    later["value_rank"] = keys.count("v_low_rank_dim", "32").into();
    let inner = match keys.has("intermediate_size") {
        true => keys.count("intermediate_size", "null"),
        false => {
            let _asked_for = keys.get("intermediate_size", "null");
            4 * d_model
        }
    };
    let list = (0..layers).map(|i| {
        let mixer = if i == 0 { &first } else { &later };
        json!({ "mixer": { "rwkv7": mixer }, "mlp": { "rwkv7": { "width": inner } } })
    });
    let config = json!({
        "d_model": d_model, "layers": stacked(list), "norm": "layer", "pre_norm": true,
        "norm_eps": eps, "tie_embeddings": keys.flag("tie_word_embeddings", "false"),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config, vocab })
}

fn write(view: &View<'_>) -> Map<String, Value> {
    let mixer = view.mixer("rwkv7");
    let last = view.layers.last().map(|layer| layer["mixer"]["rwkv7"].clone()).unwrap_or_default();
    let table = json!({
        "architectures": ["Rwkv7ForCausalLM"],
        "head_dim": mixer["key_width"],
        "num_heads": mixer["heads"],
        "decay_low_rank_dim": mixer["decay_rank"],
        "a_low_rank_dim": mixer["rate_rank"],
        "v_low_rank_dim": last["value_rank"],
        "gate_low_rank_dim": mixer["gate_rank"],
        "intermediate_size": view.mlp("rwkv7")["width"],
        "norm_eps": view.model["norm_eps"],
        "norm_bias": true,
    });
    joined(view.common(), table)
}

fn place(_layer: &LayerConfig, _d_model: usize, path: &[&str]) -> Option<Theirs> {
    let channels = |name: String| Theirs { form: Form::Channels, ..Theirs::plain(name) };
    Some(match path {
        ["attn_norm", kind] => Theirs::plain(format!("ln1.{}", parameter(kind))),
        ["mlp", "0", kind] => Theirs::plain(format!("ln2.{}", parameter(kind))),
        ["mlp", "1", "x_k"] => channels("ffn.x_k".into()),
        ["mlp", "1", inner @ ..] => in_part("ffn", inner, &[("down_proj", "value")]),
        ["attn", name @ ("k_k" | "k_a"), ..] => channels(format!("att.{name}")),
        // `w_lora.lora.0.weight` is w1, `w_lora.lora.2.weight` w2 and its bias w0.
        ["attn", name, "lora", i, kind] => {
            let letter = name.split('_').next()?;
            match (*i, *kind) {
                ("2", "bias") => channels(format!("att.{letter}0")),
                ("0", _) => {
                    Theirs { form: Form::Upright, ..Theirs::plain(format!("att.{letter}1")) }
                }
                _ => Theirs { form: Form::Upright, ..Theirs::plain(format!("att.{letter}2")) },
            }
        }
        ["attn", inner @ ..] => in_part("att", inner, NAMES),
        _ => return None,
    })
}

const NAMES: &[(&str, &str)] = &[
    ("r_proj", "receptance"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("o_proj", "output"),
    ("g_norm", "ln_x"),
];
