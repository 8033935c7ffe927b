//! xLSTM-7B as transformers has it: mLSTM and SwiGLU in every block, projections with weights of their own.

use super::keys::NO;
use super::layout::{
    ForeignConfig, Hub, Theirs, View, always, expand_v, in_part, joined, stacked, value_width,
};
use crate::config::keys::Keys;
use crate::paths::parameter;
use linattn::nn::LayerConfig;
use serde_json::{Map, Value, json};

pub(super) static LARGE: Hub = Hub {
    name: "xlstm",
    model_type: "xlstm",
    recognize: always,
    mixers: &["mlstm"],
    root: "backbone.",
    embeddings: &["embeddings"],
    pre_norm: None,
    norm: "out_norm",
    head: "lm_head",
    layers: "blocks.",
    left_out: &[],
    unused: &[],
    read,
    write,
    place,
};

/// Keys that only choose kernels, their numbers and how a text is cut.
const IDLE: &[&str] = &[
    "autocast_kernel_dtype",
    "chunk_size",
    "chunkwise_kernel",
    "inference_state_dtype",
    "max_inference_chunksize",
    "mode",
    "norm_reduction_force_float32",
    "return_last_states",
    "sequence_kernel",
    "step_kernel",
];

/// The least that answers are divided by, beside e^-m: ours has no other.
const DIVISOR_EPS: &[&str] = &["1e-6"];

fn read(keys: &mut Keys<'_>) -> Option<ForeignConfig> {
    keys.idle(IDLE);
    let sizes = keys.sizes();
    let (d_model, layers) = sizes.unwrap_or((1, 1));
    keys.same("embedding_dim", &d_model.into(), "hidden_size");
    keys.same("num_blocks", &layers.into(), "num_hidden_layers");
    keys.only("use_bias", NO);
    keys.only("add_out_norm", &["true"]);
    keys.only("weight_mode", &["\"single\""]);
    keys.only("eps", DIVISOR_EPS);
    let heads = keys.count("num_heads", "8");
    let [key, value] = [("qk_dim_factor", "0.5"), ("v_dim_factor", "1.0")]
        .map(|(key, share)| head_width(keys, key, share, (d_model, heads)));
    let eps = keys.positive("norm_eps", "1e-6");
    let mixer = json!({ "mlstm": {
        "heads": heads, "key_width": key, "expand_v": expand_v(key, value), "norm_eps": eps,
        "gate_cap": keys.positive("gate_soft_cap", "15.0"),
    } });
    let factor = keys.share("ffn_proj_factor", "2.667", d_model);
    let multiple = keys.count("ffn_round_up_to_multiple_of", "64");
    let layer = json!({
        "mixer": mixer, "mlp": { "swiglu": { "width": rounded_up(factor * d_model as f64, multiple) } },
    });
    let config = json!({
        "d_model": d_model, "layers": stacked(std::iter::repeat_n(layer, layers)), "norm_eps": eps,
        "tie_embeddings": keys.flag("tie_word_embeddings", "false"),
        "logit_soft_cap": keys.positive("output_logit_soft_cap", "30.0"),
    });
    let vocab = keys.vocabulary();
    sizes.map(|_| ForeignConfig { config, vocab })
}

/// Width of a head whose heads together are a share of the model's width.
fn head_width(
    keys: &mut Keys<'_>,
    key: &str,
    usual: &str,
    (d_model, heads): (usize, usize),
) -> usize {
    let share = keys.share(key, usual, d_model);
    let all = (share * d_model as f64) as usize;
    if all == 0 || !all.is_multiple_of(heads) {
        let want = format!("a share of `hidden_size`, {d_model}, that {heads} heads divide");
        keys.fault(key, &share.into(), want);
    }
    (all / heads).max(1)
}

/// The next multiple of a width with a fraction, as the reference rounds.
fn rounded_up(width: f64, multiple: usize) -> usize {
    ((width + multiple as f64 - 1.0) / multiple as f64) as usize * multiple
}

fn write(view: &View<'_>) -> Map<String, Value> {
    let (mlstm, d_model) = (view.mixer("mlstm"), view.model["d_model"].as_f64().unwrap_or(1.0));
    let share = |width: &Value| {
        let all = width.as_f64().zip(mlstm["heads"].as_f64()).map(|(width, heads)| width * heads);
        all.map(|all| all / d_model)
    };
    let width = view.mlp("swiglu")["width"].as_u64().unwrap_or(0);
    let table = json!({
        "architectures": ["xLSTMForCausalLM"],
        "add_out_norm": true,
        "embedding_dim": view.model["d_model"],
        "eps": 1e-6,
        // A quarter more than it is: what rounds down to it however the factor is rounded.
        "ffn_proj_factor": (width as f64 + 0.25) / d_model,
        "ffn_round_up_to_multiple_of": 1,
        "gate_soft_cap": mlstm["gate_cap"],
        "norm_eps": view.model["norm_eps"],
        "num_blocks": view.layers.len(),
        "num_heads": mlstm["heads"],
        "output_logit_soft_cap": view.model["logit_soft_cap"],
        "qk_dim_factor": share(&mlstm["key_width"]),
        "use_bias": false,
        "v_dim_factor": share(&value_width(&mlstm)),
        "weight_mode": "single",
    });
    joined(view.common(), table)
}

fn place(_layer: &LayerConfig, _d_model: usize, path: &[&str]) -> Option<Theirs> {
    Some(match path {
        ["attn_norm", kind] => Theirs::plain(format!("norm_mlstm.{}", parameter(kind))),
        ["mlp", "0", kind] => Theirs::plain(format!("norm_ffn.{}", parameter(kind))),
        ["mlp", "1", inner @ ..] => in_part("ffn", inner, MLP),
        ["attn", inner @ ..] => in_part("mlstm_layer", inner, &[]),
        _ => return None,
    })
}

const MLP: &[(&str, &str)] =
    &[("gate_proj", "proj_up_gate"), ("up_proj", "proj_up"), ("down_proj", "proj_down")];
