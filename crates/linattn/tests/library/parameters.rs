//! Kinds of parameters: which decay with `decay = "matrices"`, by the name of each mixer.

use crate::layers::{B, D, MIXERS};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use linattn::nn::mixers::MixerConfig;
use linattn::nn::{LanguageModelConfig, ParamKind};
use std::collections::{BTreeMap, BTreeSet};

/// Parameters of a module by kind, under the names that files give them, numbers of layers left out.
#[derive(Default)]
struct Kinds {
    path: Vec<(String, ParamKind)>,
    matrices: BTreeSet<String>,
    vectors: BTreeSet<String>,
    embeddings: BTreeSet<String>,
}

impl ModuleVisitor<B> for Kinds {
    fn enter_module(&mut self, name: &str, container: &str) {
        let name = if container.starts_with("Enum:") { "" } else { name };
        self.path.push((name.to_string(), ParamKind::of(container, name)));
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
    fn visit_float<const R: usize>(&mut self, _param: &Param<Tensor<B, R>>) {
        let names: Vec<_> = self
            .path
            .iter()
            .map(|(name, _)| name.as_str())
            .filter(|name| !name.is_empty())
            .collect();
        let kinds = match self.path.last().unwrap().1 {
            ParamKind::Matrix => &mut self.matrices,
            ParamKind::Vector => &mut self.vectors,
            ParamKind::Embedding => &mut self.embeddings,
        };
        kinds.insert(names.join("."));
    }
}

fn kinds<M: Module<B>>(module: &M) -> Kinds {
    let mut kinds = Kinds::default();
    module.visit(&mut kinds);
    kinds
}

/// Layers of each mixer whose `weight` is a matrix, in any of its configs; every other parameter is a vector.
const MATRICES: &[(&str, &str)] = &[
    ("aft", "k_proj o_proj q_proj v_proj"),
    ("atlas", "context_proj g_proj k_proj keep_proj momentum_proj o_proj q_proj rate_proj v_proj"),
    ("attention", "g_proj k_proj o_proj q_proj v_proj"),
    ("base_conv", "filter.0 filter.1 projection"),
    ("comba", "a_proj b_proj g_proj k_proj o_proj q_proj v_proj"),
    ("cyfa", "a_proj b_proj d_proj g_proj.0 g_proj.1 k_proj o_proj q_proj v_proj"),
    ("decaying_fast_weights", "f_proj k_proj o_proj q_proj v_proj z_proj"),
    ("deltaformer", "k_proj o_proj q_proj v_proj"),
    (
        "deltanet",
        "b_proj g_proj k_proj o_proj preconditioner.a_atk_proj \
         preconditioner.b_atk_proj q_proj v_proj",
    ),
    ("deltaproduct", "a_proj b_proj g_proj k_proj o_proj q_proj v_proj"),
    ("forgetting_attention", "f_proj g_proj k_proj k_shift_proj o_proj q_proj v_proj v_shift_proj"),
    (
        "gated_deltanet",
        "a_proj b_proj g_proj k_proj o_proj preconditioner.a_atk_proj \
         preconditioner.b_atk_proj q_proj v_proj",
    ),
    (
        "gated_deltanet2",
        "b_proj f_proj.0 f_proj.1 g_proj.0 g_proj.1 k_proj o_proj q_proj v_proj \
         w_proj",
    ),
    ("gated_kalmanet", "a_proj alpha_proj b_proj g_proj k_proj o_proj q_proj v_proj"),
    ("gated_retention", "g_proj gk_proj k_proj o_proj q_proj v_proj"),
    ("gateloop", "a_proj g_proj k_proj o_proj q_proj theta_proj v_proj"),
    ("gau", "o_proj u_proj v_proj z_proj"),
    ("gla", "g_proj gk_proj.0 gk_proj.1 k_proj o_proj q_proj v_proj"),
    ("goru", "h_proj o_proj x_proj"),
    ("gru", "h_proj o_proj x_proj"),
    ("gsa", "f_proj k_proj o_proj q_proj v_proj"),
    ("h3", "k_proj out_proj q_proj v_proj"),
    ("hgrn", "f_proj g_proj i_proj o_proj"),
    ("hgrn2", "f_proj i_proj o_proj q_proj"),
    ("hyena", "filter.inner.0 filter.inner.1 filter.inner.2 filter.last in_proj out_proj"),
    (
        "kda",
        "b_proj f_proj.0 f_proj.1 g_proj.0 g_proj.1 k_proj o_proj preconditioner.a_atk_proj \
         preconditioner.b_atk_proj q_proj v_proj",
    ),
    ("lact", "k_proj lr_proj momentum_proj o_proj q_proj scale_proj v_proj"),
    ("lightning_attention", "out_proj output_gate qkv_proj"),
    (
        "linear_attention",
        "f_proj feature_map_k.layer feature_map_k.layer1 feature_map_k.layer2 \
         feature_map_q.layer feature_map_q.layer1 feature_map_q.layer2 k_proj \
         o_proj q_proj v_proj",
    ),
    ("log_linear_attention", "a_proj b_proj g_proj k_proj l_proj o_proj q_proj v_proj"),
    ("longhorn", "b_proj g_proj k_proj o_proj q_proj v_proj"),
    ("lru", "c_proj in_proj out_proj"),
    ("lstm", "h_proj o_proj x_proj"),
    ("mamba", "dt_proj in_proj out_proj x_proj"),
    ("mamba2", "in_proj out_proj"),
    ("mamba3", "in_proj out_proj"),
    ("mesa_net", "a_proj b_proj g_proj k_proj o_proj q_proj v_proj"),
    ("metala", "g_proj k_gate out_proj q_proj v_proj"),
    ("mla", "k_rope kv_proj.0 kv_proj.2 o_proj q_proj.0 q_proj.2 q_proj"),
    ("mlstm", "fgate_preact igate_preact k ogate_preact out_proj q v"),
    ("mlstm_v1", "down_proj fgate_preact igate_preact k q up_proj v"),
    (
        "multihead_hyena",
        "filter.inner.0 filter.inner.1 filter.inner.2 filter.last in_proj out_proj",
    ),
    ("path_attention", "bt_proj g_proj k_proj o_proj q_proj v_proj w_proj.0 w_proj.1"),
    ("pooling", ""),
    ("qrnn", "in_proj o_proj"),
    ("retnet", "g_proj k_proj o_proj q_proj v_proj"),
    ("rg_lru", "a_gate input_gate linear_x linear_y out_proj"),
    ("rwkv4", "key o_proj receptance value"),
    (
        "rwkv6",
        "g_proj.linear k_proj.linear o_proj r_proj.linear v_proj.linear \
         w_proj.linear.lora.0 w_proj.linear.lora.2 x_proj.0.linear x_proj.2",
    ),
    (
        "rwkv7",
        "a_lora.lora.0 a_lora.lora.2 g_lora.lora.0 g_lora.lora.2 k_proj o_proj \
         r_proj v_proj w_lora.lora.0 w_lora.lora.2",
    ),
    ("s4", "out_proj"),
    ("s4d", "out_proj"),
    ("slstm", "fgate igate ogate recurrent zgate"),
    (
        "titans",
        "attention.k_proj attention.q_proj attention.v_proj g_proj k_proj keep_proj momentum_proj \
         o_proj q_proj rate_proj v_proj",
    ),
    ("token_mlp", ""),
    ("ttt", "g_proj k_proj o_proj q_proj rate_proj v_proj"),
];

#[test]
fn the_parameters_that_decay_are_these() {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let mut found: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for text in MIXERS {
        let Holder { mixer } = toml::from_str(&format!("mixer.{text}")).unwrap();
        let kinds = kinds(&mixer.init::<B>(D, &Default::default()).unwrap());
        assert!(kinds.embeddings.is_empty(), "{text}");
        found.entry(mixer.name()).or_default().extend(kinds.matrices);
    }
    for (name, wanted) in MATRICES {
        let got = found.remove(name).into_iter().flatten();
        let got: Vec<String> = got.map(|path| path.replace(".weight", "")).collect();
        assert_eq!(got.join(" "), *wanted, "{name}");
    }
    assert!(found.is_empty(), "{:?}", found.keys());
}

#[test]
fn tables_norms_and_biases_of_a_model_do_not_decay() {
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 24\ntie_embeddings = false\nhead_bias = true\npositions = 9\npre_norm = true\nnorm = 'layer'\n\
         [[layers]]\nmixer.deltanet = {}\nmlp = { gelu = { bias = true } }\ncanon = { before_mlp = 2 }\n",
    )
    .unwrap();
    let found = kinds(&config.init::<B>(7, &Default::default()).unwrap());
    let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(list(&found.embeddings), "embeddings.weight positions.weight");
    let attn =
        ["b", "k", "o", "q", "v"].map(|x| format!("layers.0.attn.{x}_proj.weight")).join(" ");
    let mlp = "layers.0.mlp.1.down_proj.weight layers.0.mlp.1.up_proj.weight";
    assert_eq!(list(&found.matrices), format!("{attn} {mlp} lm_head.weight"));
}
