//! Which checkpoints are known, and what their configs say in our words.

use crate::config::rule::Rule::{
    self, Convolution, Correction, Key, Only, Ours, Same, Shares, Split,
};

/// One kind of model, by its `model_type`.
#[derive(Debug)]
pub(crate) struct Family {
    /// As `config.json` has it.
    pub(crate) model_type: &'static str,
    /// Our mixer.
    pub(crate) mixer: &'static str,
    pub(crate) frame: Frame,
    /// Keys of the config that are about the mixer.
    pub(crate) rules: &'static [Rule],
    /// Widths that ours takes where its config does not say, as `[key, meaning]`.
    pub(crate) defaults: &'static [(&'static str, Fallback)],
    /// `hidden_ratio` where the config leaves it out.
    pub(crate) hidden_ratio: f64,
    /// `norm_eps` where the config leaves it out.
    pub(crate) norm_eps: f64,
    /// Keys of the config that change nothing here.
    pub(crate) idle: &'static [&'static str],
    /// First parts of weights' names that differ: ours, theirs.
    pub(crate) names: &'static [(&'static str, &'static str)],
    /// Names of a norm with an output gate, and without.
    pub(crate) name_without_gate: Option<(&'static str, &'static str)>,
    /// Names as they are, and as they were once.
    pub(crate) old_names: &'static [(&'static str, &'static str)],
    /// Ends of names that older checkpoints have and no model uses.
    pub(crate) unused: &'static [&'static str],
    /// Whether forget gates of all layers have bounds that are learnt together.
    pub(crate) bounds: bool,
    /// Keys of ours, as JSON, that all layers but the first have.
    pub(crate) later: &'static [(&'static str, &'static str)],
    /// The same with values that the config has: theirs, ours, default.
    pub(crate) later_keys: &'static [(&'static str, &'static str, &'static str)],
}

/// Names of a checkpoint's parts.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) root: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) mixer_norm: &'static str,
    pub(crate) mixer: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) mlp: &'static str,
    pub(crate) mlp_names: &'static [(&'static str, &'static str)],
    pub(crate) channels: Channels,
    /// LayerNorm in place of RMSNorm, one of them before the first layer where `norm_first` says so.
    pub(crate) layer_norm: bool,
}

/// Channel mixer that follows the mixer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channels {
    /// Nothing.
    None,
    /// SwiGLU.
    SwiGlu,
    /// RWKV's channel mix, by our name of it.
    Rwkv(&'static str),
}

impl Channels {
    /// As our configs name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Channels::None => "none",
            Channels::SwiGlu => "swiglu",
            Channels::Rwkv(name) => name,
        }
    }
}

/// Value of a key of ours where a config leaves it out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fallback {
    /// d_model / heads.
    Share,
    /// Half of that.
    HalfShare,
    /// As wide as a key.
    KeyWidth,
    /// As wide as a value.
    ValueWidth,
    /// This, as JSON.
    Json(&'static str),
    /// Left out, where it is as many as `heads`.
    Heads,
    /// A sixteenth of d_model, rounded up.
    Sixteenth,
    /// So many times the root of d_model, rounded to a multiple of 32 above 0.
    Rank(f64),
    /// The same, times K / 64.
    RankByKey(f64),
}

const PLAIN: Family = Family {
    model_type: "",
    mixer: "",
    frame: Frame::USUAL,
    rules: &[],
    defaults: &[],
    hidden_ratio: 4.0,
    norm_eps: 1e-6,
    idle: &[],
    names: &[],
    name_without_gate: None,
    old_names: &[],
    unused: &[],
    bounds: false,
    later: &[],
    later_keys: &[],
};

/// The family of a `model_type`.
pub(crate) fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

const MAPS: &[&str] = &["\"elementwise_product\"", "\"elu\"", "\"relu\"", "\"identity\""];
const NO: &[&str] = &["false"];
const NOTHING: &[&str] = &["null"];
/// Where a learnt bound starts, which a checkpoint's own numbers replace.
pub(crate) const BOUND: &[(&str, &str)] = &[("lower_bound", "0.5")];
const SWISH: &[&str] = &["\"swish\"", "\"silu\""];

pub(crate) static FAMILIES: &[Family] = &[
    Family {
        model_type: "delta_net",
        mixer: "deltanet",
        rules: &[
            Key("num_heads", "heads", "16"),
            Shares("1.0", "1.0"),
            Convolution("true"),
            Key("use_gate", "output_gate", "false"),
            Key("allow_neg_eigval", "allow_neg_eigval", "false"),
            Same("norm_eps"),
            Only("use_beta", &["true"]),
            Only("qk_norm", &["\"l2\""]),
            Only("qk_activation", SWISH),
        ],
        defaults: &[
            ("key_width", Fallback::Share),
            ("value_heads", Fallback::Heads),
            ("expand_v", Fallback::Json("1.0")),
            ("output_gate", Fallback::Json("false")),
        ],
        idle: &["use_output_norm"],
        old_names: &[("o_norm.weight", "norm.weight")],
        ..PLAIN
    },
    Family {
        model_type: "gated_deltanet",
        mixer: "gated_deltanet",
        rules: &[
            Key("num_heads", "heads", "6"),
            Key("head_dim", "key_width", "256"),
            Key("num_v_heads", "value_heads", "null"),
            Key("expand_v", "expand_v", "2.0"),
            Convolution("true"),
            Key("use_gate", "output_gate", "true"),
            Key("allow_neg_eigval", "allow_neg_eigval", "false"),
            Same("norm_eps"),
            Only("output_gate_activation", SWISH),
        ],
        defaults: &[
            ("key_width", Fallback::Share),
            ("value_heads", Fallback::Heads),
            ("expand_v", Fallback::Json("2.0")),
            ("output_gate", Fallback::Json("true")),
        ],
        old_names: &[("o_norm.weight", "norm.weight")],
        unused: &[".attn.D"],
        ..PLAIN
    },
    Family {
        model_type: "gla",
        mixer: "gla",
        rules: &[
            Key("num_heads", "heads", "4"),
            Shares("0.5", "1.0"),
            Convolution("false"),
            Key("use_output_gate", "output_gate", "true"),
            Same("norm_eps"),
            Ours("gate_low_rank", "16"),
            Ours("gate_normalizer", "16.0"),
            Rule::AsHeads("num_kv_heads"),
            Only("feature_map", NOTHING),
            Only("clamp_min", NOTHING),
            Only("use_gk", &["true"]),
            Only("use_gv", NO),
        ],
        defaults: &[("key_width", Fallback::HalfShare)],
        name_without_gate: Some(("g_norm_swish_gate", "g_norm")),
        ..PLAIN
    },
    Family {
        model_type: "gsa",
        mixer: "gsa",
        rules: &[
            Key("num_heads", "heads", "4"),
            Shares("1.0", "1.0"),
            Key("num_slots", "slots", "64"),
            Key("gate_logit_normalizer", "gate_normalizer", "8"),
            Convolution("false"),
            // Its norm never sees the config's epsilon.
            Ours("norm_eps", "1e-5"),
            Rule::AsHeads("num_kv_heads"),
            Only("feature_map", SWISH),
            Only("use_norm", &["true"]),
            Only("use_output_gate", NO),
            Only("clamp_min", NOTHING),
            Only("clamp_max", NOTHING),
        ],
        defaults: &[("key_width", Fallback::Share), ("slots", Fallback::KeyWidth)],
        ..PLAIN
    },
    Family {
        model_type: "hgrn2",
        mixer: "hgrn2",
        rules: &[Split("expand_ratio", "128"), Convolution("false"), Ours("norm_eps", "1e-5")],
        defaults: &[("key_width", Fallback::Share)],
        bounds: true,
        later: BOUND,
        ..PLAIN
    },
    Family {
        model_type: "kda",
        mixer: "kda",
        rules: &[
            Key("num_heads", "heads", "16"),
            Key("head_dim", "key_width", "128"),
            Key("num_v_heads", "value_heads", "null"),
            Key("expand_v", "expand_v", "1.0"),
            Convolution("true"),
            Key("allow_neg_eigval", "allow_neg_eigval", "false"),
            Same("norm_eps"),
            Only("safe_gate", NO),
            Only("lower_bound", NOTHING),
        ],
        defaults: &[
            ("key_width", Fallback::Share),
            ("value_heads", Fallback::Heads),
            ("gate_rank", Fallback::ValueWidth),
        ],
        ..PLAIN
    },
    Family {
        model_type: "linear_attn",
        mixer: "linear_attention",
        rules: &[
            Key("num_heads", "heads", "4"),
            Shares("1.0", "1.0"),
            Rule::OneOf("feature_map", "feature_map", MAPS, "\"elementwise_product\""),
            Key("norm_feature_map", "normalize", "false"),
            Ours("conv_size", "0"),
            Same("norm_eps"),
            Rule::AsHeads("num_kv_heads"),
            Only("tie_feature_map_qk", NO),
            Only("norm_q", NO),
            Only("norm_k", NO),
        ],
        defaults: &[("key_width", Fallback::Share), ("value_heads", Fallback::Heads)],
        ..PLAIN
    },
    Family {
        model_type: "mamba2",
        mixer: "mamba2",
        frame: Frame::MAMBA,
        rules: &[
            Key("state_size", "d_state", "128"),
            Key("expand", "expand", "2"),
            Key("head_dim", "head_width", "64"),
            Rule::Groups("n_groups", "groups", "group_norm"),
            Key("conv_kernel", "conv_size", "4"),
            Same("norm_eps"),
            Only("hidden_act", SWISH),
            Only("use_bias", NO),
            Only("use_conv_bias", &["true"]),
            Only("rmsnorm", &["true"]),
            Only("D_has_hdim", NO),
            Only("norm_before_gate", NO),
            // The second is what is left of an infinity.
            Only("dt_limit", &["[0.0,null]", "[0,null]", "null"]),
        ],
        norm_eps: 1e-5,
        idle: &[
            "num_heads",
            "conv_init",
            "A_init_range",
            "dt_min",
            "dt_max",
            "dt_init_floor",
            "residual_in_fp32",
            "rescale_prenorm_residual",
            "chunk_size",
        ],
        ..PLAIN
    },
    Family {
        model_type: "retnet",
        mixer: "retnet",
        rules: &[
            Key("num_heads", "heads", "8"),
            Shares("1.0", "2.0"),
            Key("use_output_gate", "output_gate", "true"),
            Same("norm_eps"),
            Ours("rope_theta", "10000.0"),
            Rule::AsHeads("num_kv_heads"),
            Only("feature_map", NOTHING),
        ],
        defaults: &[("key_width", Fallback::Share), ("value_heads", Fallback::Heads)],
        hidden_ratio: 2.0,
        // Its layers are built without convolutions, whatever the config says.
        idle: &["use_short_conv", "conv_size"],
        names: &[("g_norm", "g_norm_swish_gate")],
        name_without_gate: Some(("g_norm_swish_gate", "g_norm")),
        ..PLAIN
    },
    Family {
        model_type: "gated_deltaproduct",
        mixer: "deltaproduct",
        rules: &[
            Key("num_heads", "heads", "6"),
            Key("head_dim", "key_width", "256"),
            Key("expand_v", "expand_v", "2.0"),
            Key("num_householder", "householder_steps", "1"),
            Key("use_forget_gate", "forget_gate", "false"),
            Key("use_output_gate", "output_gate", "true"),
            Key("allow_neg_eigval", "allow_neg_eigval", "false"),
            Convolution("true"),
            Same("norm_eps"),
        ],
        defaults: &[("key_width", Fallback::Share)],
        ..PLAIN
    },
    Family {
        model_type: "comba",
        mixer: "comba",
        rules: &[
            Key("num_heads", "heads", "6"),
            Key("head_dim", "key_width", "256"),
            Key("num_v_heads", "value_heads", "null"),
            Key("expand_v", "expand_v", "2.0"),
            Key("use_output_gate", "output_gate", "true"),
            Key("use_inner_decay", "inner_decay", "true"),
            Correction,
            Convolution("true"),
            Same("norm_eps"),
            Ours("norm_last", "true"),
        ],
        defaults: &[("key_width", Fallback::Share), ("value_heads", Fallback::Heads)],
        ..PLAIN
    },
    Family {
        model_type: "transformer",
        mixer: "attention",
        rules: &[
            Key("num_heads", "heads", "32"),
            Key("num_kv_heads", "key_value_heads", "null"),
            Key("window_size", "window", "null"),
            Key("rope_theta", "rope_theta", "10000.0"),
            Ours("rope", "true"),
            Rule::Flag("qkv_bias"),
            Rule::Flag("qk_norm"),
        ],
        defaults: &[("key_width", Fallback::Share), ("key_value_heads", Fallback::Heads)],
        ..PLAIN
    },
    Family {
        model_type: "hgrn",
        mixer: "hgrn",
        rules: &[Key("expand_ratio", "expand", "1"), Convolution("false"), Same("norm_eps")],
        bounds: true,
        later: BOUND,
        ..PLAIN
    },
    Family {
        model_type: "mamba",
        mixer: "mamba",
        frame: Frame::MAMBA,
        rules: &[
            Key("state_size", "d_state", "16"),
            Key("expand", "expand", "2"),
            Key("dt_rank", "dt_rank", "null"),
            Key("conv_kernel", "conv_size", "4"),
            Only("hidden_act", SWISH),
            Only("use_bias", NO),
            Only("use_conv_bias", &["true"]),
        ],
        defaults: &[("dt_rank", Fallback::Sixteenth)],
        norm_eps: 1e-5,
        idle: &[
            "intermediate_size",
            "dt_scale",
            "dt_min",
            "dt_max",
            "dt_init_scheme",
            "dt_init_floor",
            "residual_in_fp32",
            "rescale_prenorm_residual",
        ],
        ..PLAIN
    },
    Family {
        model_type: "mesa_net",
        mixer: "mesa_net",
        rules: &[
            Key("num_heads", "heads", "16"),
            Key("head_dim", "key_width", "128"),
            Key("use_output_gate", "output_gate", "false"),
            Key("lambda_lower_bound", "lambda_lower_bound", "0.25"),
            Key("max_cg_step_training", "cg_steps", "30"),
            Rule::Twin("max_cg_step_decoding", "cg_steps"),
            Convolution("true"),
            Same("norm_eps"),
        ],
        defaults: &[("key_width", Fallback::Share)],
        ..PLAIN
    },
    Family {
        model_type: "rwkv6",
        mixer: "rwkv6",
        frame: Frame::RWKV6,
        rules: &[
            Key("num_heads", "heads", "4"),
            Shares("0.5", "1.0"),
            Key("proj_low_rank_dim", "mix_low_rank", "32"),
            Key("gate_low_rank_dim", "gate_low_rank", "64"),
            Same("norm_eps"),
        ],
        defaults: &[("key_width", Fallback::Share)],
        hidden_ratio: 3.5,
        norm_eps: 1e-5,
        ..PLAIN
    },
    Family {
        model_type: "rwkv7",
        mixer: "rwkv7",
        frame: Frame::RWKV,
        rules: &[
            Split("head_dim", "64"),
            Rule::AllOfModel("value_dim"),
            Key("decay_low_rank_dim", "decay_rank", "64"),
            Key("a_low_rank_dim", "rate_rank", "64"),
            Key("gate_low_rank_dim", "gate_rank", "128"),
            Same("norm_eps"),
        ],
        defaults: &[
            ("key_width", Fallback::Share),
            ("decay_rank", Fallback::RankByKey(2.5)),
            ("rate_rank", Fallback::RankByKey(2.5)),
            ("gate_rank", Fallback::Rank(5.0)),
            ("value_rank", Fallback::RankByKey(1.7)),
        ],
        norm_eps: 1e-5,
        later: &[("value_residual", "true")],
        later_keys: &[("v_low_rank_dim", "value_rank", "16")],
        ..PLAIN
    },
];
