//! Checkpoints of other models than flash-linear-attention's: they answer as they did there, by whole
//! sequences and by steps, and go back as they came.

use crate::checkpoints::{
    Contents, WEIGHTS, altered, answers, contents, expected, refused, set, there_and_back, write,
};
use crate::desk::{Desk, TINY, text};
use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use linattn::ops::LinearAttentionBackend;
use linattn_checkpoints::{Exported, Precision, export, import};
use linattn_oracle::{assert_close, relative_error};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MODELS: &[&str] = &[
    "qwen3_5",
    "qwen3_5_multimodal",
    "qwen3_next",
    "mamba",
    "mamba2",
    "olmo_hybrid",
    "recurrent_gemma",
    "nemotron_h",
    "xlstm",
];

/// RMS error over RMS logits, in f32 on the CPU.
const LIMIT: f64 = 1e-5;
/// Tokens of the greedy text that were given.
const PROMPT: usize = 9;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/transformers").join(name)
}

fn changed(name: &str, change: impl FnOnce(&Path, &mut Contents)) -> TempDir {
    altered(&folder(name), change)
}

fn greedy(folder: &Path) -> Vec<i32> {
    let (dtype, _, bytes) = &contents(&folder.join("expected.safetensors"))["greedy"];
    assert_eq!(*dtype, Dtype::I32);
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn likeliest<B: LinearAttentionBackend>(logits: Tensor<B, 2>) -> Vec<i32> {
    logits.argmax(1).into_data().iter::<i32>().collect()
}

/// Logits and greedy tokens as there, whole and token by token.
fn answer_as_there<B: LinearAttentionBackend>(device: &B::Device, limit: f64) {
    for name in MODELS {
        let folder = folder(name);
        let model = import::<B>(&folder, device).unwrap_or_else(|e| panic!("{e}")).model;
        let (list, shape, want) = expected(&folder);
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(list, shape), device);
        let numbers = |x: Tensor<B, 3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
        let whole = numbers(model.forward(ids.clone(), None).0);
        println!("{name}: {:.1e}", relative_error(&want, &whole));
        assert_close(name, &want, &whole, limit);
        let (mut steps, mut state) = (vec![], None);
        for t in 0..shape[1] {
            let id = ids.clone().narrow(1, t, 1).squeeze_dim(1);
            let (logits, next) = model.step(id, state);
            steps.push(logits);
            state = Some(next);
        }
        assert_close(name, &want, &numbers(Tensor::stack::<3>(steps, 1)), limit);

        let want = greedy(&folder);
        let prompt = TensorData::new(want[..PROMPT].to_vec(), [1, PROMPT]);
        let (logits, mut state) = model.forward(Tensor::from_data(prompt, device), None);
        let mut next = likeliest::<B>(logits.narrow(1, PROMPT - 1, 1).squeeze_dim(1));
        let mut text = want[..PROMPT].to_vec();
        while text.len() < want.len() {
            text.extend(&next);
            let id = Tensor::from_data(TensorData::new(next, [1]), device);
            let (logits, after) = model.step(id, Some(state));
            (next, state) = (likeliest::<B>(logits), after);
        }
        assert_eq!(text, want, "{name}: greedy");
    }
}

#[test]
fn models_of_the_hub_answer_as_they_did_there_whole_and_by_steps() {
    answer_as_there::<Flex>(&Default::default(), LIMIT);
}

#[cfg(feature = "wgpu")]
mod on_wgpu {
    #[test]
    fn models_of_the_hub_answer_as_they_did_there_whole_and_by_steps() {
        let Some(device) = crate::support::wgpu() else { return };
        super::answer_as_there::<burn::backend::Wgpu>(&device, 1e-4);
    }
}

/// Tensors that no model here has.
fn is_left_out(name: &str) -> bool {
    name.starts_with("mtp.") || name.starts_with("model.visual.")
}

#[test]
fn weights_of_the_hub_go_there_and_back_to_the_last_bit() {
    for name in MODELS {
        let folder = folder(name);
        let out = there_and_back(&folder, Precision::F32);
        let (mut want, got) =
            (contents(&folder.join(WEIGHTS)), contents(&out.path().join(WEIGHTS)));
        want.retain(|name, _| !is_left_out(name));
        let names = |contents: &Contents| contents.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&want), names(&got), "{name}");
        for (key, tensor) in &want {
            assert_eq!(tensor, &got[key], "{name}: {key}");
        }
        let device = Default::default();
        assert_eq!(answers::<Flex>(&folder, &device), answers::<Flex>(out.path(), &device));
        // What is written says the same model.
        let configs = [folder.as_path(), out.path()]
            .map(|path| import::<Flex>(path, &device).unwrap_or_else(|e| panic!("{e}")).config);
        assert_eq!(configs[0], configs[1], "{name}");
    }
}

#[test]
fn parts_that_no_model_here_has_are_left_out_by_name() {
    let device = Default::default();
    let folder = folder("qwen3_5_multimodal");
    let imported = import::<Flex>(&folder, &device).unwrap();
    let left_out = ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"];
    assert_eq!(imported.left_out, left_out);
    let desk = TempDir::new().unwrap();
    let kept = desk.path().join("kept.safetensors");
    fs::write(&kept, imported.kept.as_ref().unwrap()).unwrap();
    let exported = Exported {
        model: &imported.model,
        config: &imported.config,
        vocab: imported.vocab,
        tokenizer: None,
        end_ids: &[],
        companions: &[],
        kept: Some(&kept),
    };
    let out = |name: &str, family| {
        export(&exported, family, Precision::F32, &desk.path().join(name), false).unwrap()
    };
    let outcome = out("same", None);
    assert_eq!((outcome.family, outcome.left_out), ("qwen3_5", left_out.map(String::from).into()));
    // The text model alone has other names for the same tensors.
    assert_eq!(out("text", Some("qwen3_5_text")).family, "qwen3_5_text");
    let names = contents(&desk.path().join("text").join(WEIGHTS));
    assert!(names.contains_key("model.layers.2.self_attn.q_proj.weight"), "{:?}", names.keys());
    let desk = Desk::new();
    let convert =
        |args: &[&str]| desk.program(env!("CARGO_BIN_EXE_convert"), args).output().unwrap();
    let output = convert(&["import", folder.to_str().unwrap(), "--out", "runs/qwen"]);
    for output in [output, convert(&["export", "runs/qwen", "--out", "there"])] {
        let said = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(said.contains("without model.visual (1 tensors), mtp.fc (1 tensors)"), "{said}");
    }
}

#[test]
fn models_without_what_only_fla_has_are_exported_by_what_they_are() {
    let device = Default::default();
    for (name, family) in [
        ("qwen3_5", "qwen3_5_text"),
        ("olmo_hybrid", "olmo_hybrid"),
        ("recurrent_gemma", "recurrent_gemma"),
        ("nemotron_h", "nemotron_h"),
        ("xlstm", "xlstm"),
    ] {
        let imported = import::<Flex>(&folder(name), &device).unwrap();
        let exported = Exported {
            model: &imported.model,
            config: &imported.config,
            vocab: imported.vocab,
            tokenizer: None,
            end_ids: &[],
            companions: &[],
            kept: None,
        };
        let out = TempDir::new().unwrap();
        let outcome = export(&exported, None, Precision::F32, out.path(), false).unwrap();
        assert_eq!(outcome.family, family);
        let again = import::<Flex>(out.path(), &device).unwrap();
        assert_eq!(again.config, imported.config, "{name}");
        let why = export(&exported, Some("gla"), Precision::F32, &out.path().join("x"), false);
        assert!(why.unwrap_err().to_string().contains("the model has none"), "{name}");
    }
}

#[test]
fn files_in_parts_and_of_sixteen_bits_are_read() {
    let device = Default::default();
    for name in MODELS {
        let folder = folder(name);
        let out = there_and_back(&folder, Precision::Bf16);
        assert!(contents(&out.path().join(WEIGHTS)).values().all(|t| t.0 == Dtype::BF16));
        let want = answers::<Flex>(&folder, &device);
        // transformers departs by as much with the same rounded weights: a query that meets a small sum of keys.
        let limit = if *name == "xlstm" { 7e-2 } else { 5e-2 };
        assert_close(name, &want, &answers::<Flex>(out.path(), &device), limit);
        // Rounded numbers stay, and so they do in several files.
        let parts = altered(out.path(), |folder, tensors| {
            let mut map = BTreeMap::new();
            let middle = tensors.keys().nth(tensors.len() / 2).unwrap().clone();
            let rest = tensors.split_off(&middle);
            for (i, part) in [&*tensors, &rest].into_iter().enumerate() {
                let file = format!("model-0000{}-of-00002.safetensors", i + 1);
                write(&folder.join(&file), part);
                map.extend(part.keys().map(|name| (name.clone(), file.clone())));
            }
            let index = json!({ "metadata": {}, "weight_map": map });
            fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
        });
        fs::remove_file(parts.path().join(WEIGHTS)).unwrap();
        fs::write(parts.path().join("origin"), folder.to_str().unwrap()).unwrap();
        assert_eq!(answers::<Flex>(parts.path(), &device), answers::<Flex>(out.path(), &device));
    }
}

#[test]
fn all_that_is_wrong_with_a_checkpoint_of_the_hub_is_said_at_once() {
    let wrong = changed("qwen3_5", |folder, tensors| {
        let key = |i: usize, name: &str| format!("model.layers.{i}.{name}.weight");
        tensors.remove(&key(0, "linear_attn.in_proj_qkv")).unwrap();
        tensors.remove(&key(2, "self_attn.k_norm")).unwrap();
        tensors.get_mut(&key(1, "linear_attn.conv1d")).unwrap().1 = vec![32, 1, 8];
        tensors.insert(key(1, "linear_attn.x_proj"), (Dtype::F32, vec![1], vec![0; 4]));
        set(folder, "hidden_act", "gelu".into());
        set(folder, "attention_bias", true.into());
        set(folder, "colour", "red".into());
        set(
            folder,
            "rope_parameters",
            json!({ "rope_theta": 1e4, "rope_type": "yarn", "factor": 4 }),
        );
    });
    let parts = [
        "model.layers.0.linear_attn.in_proj_qkv.weight is missing",
        "model.layers.2.self_attn.k_norm.weight is missing",
        "model.layers.1.linear_attn.conv1d.weight is [32, 1, 8]; it has to be [64, 1, 4]",
        "model.layers.1.linear_attn.x_proj.weight is no weight of this model",
        "`hidden_act` is \"gelu\"",
        "`attention_bias` is true",
        "`colour` is \"red\"",
        "`rope_parameters.rope_type` is \"yarn\"",
        "`rope_parameters.factor` is 4",
    ];
    refused(wrong.path(), &parts);
    let error = import::<Flex>(wrong.path(), &Default::default()).unwrap_err().to_string();
    assert_eq!(error.matches("in_proj_qkv.weight is missing").count(), 1, "{error}");
    for (name, key, value, part) in [
        ("qwen3_5", "hidden_size", json!(64), "as `hidden_size` says"),
        ("qwen3_5", "layer_types", json!(["full_attention"]), "`layer_types` is"),
        ("qwen3_5", "layer_types", json!(["sliding_attention"]), "`layer_types` is"),
        ("qwen3_5_multimodal", "text_config", Value::Null, "`text_config` is"),
        (
            "qwen3_5_multimodal",
            "tie_word_embeddings",
            json!(false),
            "text_config.tie_word_embeddings",
        ),
        ("qwen3_next", "mlp_only_layers", json!([0, 2]), "`mlp_only_layers`"),
        ("qwen3_next", "partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 0.5"),
        ("mamba", "layer_norm_epsilon", json!(0), "`layer_norm_epsilon` is 0"),
        ("mamba", "use_bias", json!(true), "`use_bias` is true"),
        ("mamba", "intermediate_size", json!(65), "`intermediate_size` is 65"),
        ("mamba2", "n_groups", json!(2), "`n_groups` is 2"),
        ("mamba2", "time_step_limit", json!([0.0, 0.1]), "`time_step_limit` is"),
        ("mamba2", "num_heads", json!(3), "`expand` is 2"),
        ("olmo_hybrid", "linear_num_key_heads", json!("four"), "`linear_num_key_heads` is"),
        ("recurrent_gemma", "block_types", json!(["recurrent", "mamba"]), "`block_types` is"),
        ("recurrent_gemma", "logits_soft_cap", json!(-1.0), "`logits_soft_cap` is -1"),
        (
            "nemotron_h",
            "layers_block_type",
            json!(["linear_attention", "moe"]),
            "`layers_block_type`",
        ),
        ("nemotron_h", "mlp_hidden_act", json!("silu"), "`mlp_hidden_act` is"),
    ] {
        // Experts count where some layers are not of MLPs alone.
        let wrong = changed(name, |folder, _| {
            set(folder, key, value.clone());
            if key == "mlp_only_layers" {
                set(folder, "num_experts", json!(8));
            }
        });
        refused(wrong.path(), &[part]);
    }
}

/// A copy with another config.
fn said_otherwise(name: &str, config: Value, rename: impl Fn(&str) -> String) -> TempDir {
    changed(name, |folder, tensors| {
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        *tensors =
            std::mem::take(tensors).into_iter().map(|(name, t)| (rename(&name), t)).collect();
    })
}

fn same_answers(name: &str, other: &Path) {
    let device = Default::default();
    let want = answers::<Flex>(&folder(name), &device);
    assert_eq!(want, answers::<Flex>(other, &device), "{name}");
}

#[test]
fn mamba_of_its_authors_is_read_and_written() {
    let rename = |name: &str| name.replace("backbone.embeddings.", "backbone.embedding.");
    let mamba = json!({
        "d_model": 32, "d_intermediate": 0, "n_layer": 2, "vocab_size": 61, "rms_norm": true,
        "ssm_cfg": { "d_state": 8 }, "attn_layer_idx": [], "attn_cfg": {},
        "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 1,
        "tie_embeddings": true,
    });
    let mut mamba2 = mamba.clone();
    mamba2["ssm_cfg"] = json!({ "layer": "Mamba2", "d_state": 16, "headdim": 16 });
    mamba2["tie_embeddings"] = false.into();
    for (name, config) in [("mamba", mamba), ("mamba2", mamba2)] {
        let there = said_otherwise(name, config, rename);
        same_answers(name, there.path());
        let out = there_and_back(there.path(), Precision::F32);
        let weights = [there.path(), out.path()].map(|path| contents(&path.join(WEIGHTS)));
        assert_eq!(weights[0], weights[1], "{name}");
        set(there.path(), "d_intermediate", json!(64));
        set(there.path(), "attn_layer_idx", json!([1]));
        refused(there.path(), &["`d_intermediate` is 64", "`attn_layer_idx` is [1]"]);
    }
}

#[test]
fn older_words_for_the_same_are_known() {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(folder(name).join("config.json")).unwrap()).unwrap()
    };
    let same = |name: &str| name.to_string();
    // Rotation beside the table, and layers by an interval.
    let mut config = read("qwen3_next");
    let table = config.as_object_mut().unwrap();
    table.remove("rope_parameters");
    table.insert("rope_theta".into(), json!(10_000));
    table.insert("rope_scaling".into(), Value::Null);
    same_answers("qwen3_next", said_otherwise("qwen3_next", config, same).path());
    // A pattern of letters.
    let mut config = read("nemotron_h");
    let table = config.as_object_mut().unwrap();
    table.remove("layers_block_type");
    table.insert("hybrid_override_pattern".into(), "M-*M".into());
    table.insert("num_hidden_layers".into(), 4.into());
    same_answers("nemotron_h", said_otherwise("nemotron_h", config.clone(), same).path());
    config["hybrid_override_pattern"] = "MEM*".into();
    let wrong = said_otherwise("nemotron_h", config, same);
    refused(wrong.path(), &["`hybrid_override_pattern` is", "experts are not known"]);
    // Transformers' own names of norms.
    let rename = |name: &str| match name.contains("layers.2") {
        true => name.replace("feedforward_layer_norm", "post_attention_layernorm"),
        false => name
            .replace("attention_layer_norm", "input_layernorm")
            .replace("feedforward_layer_norm", "post_attention_layernorm"),
    };
    same_answers("olmo_hybrid", said_otherwise("olmo_hybrid", read("olmo_hybrid"), rename).path());
}

/// RWKV-7 in its authors' names: the weights of flash-linear-attention's model under the other names. What
/// the authors' code would answer is not at hand.
#[test]
fn rwkv7_of_its_authors_is_told_from_that_of_the_same_type() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/RWKV7");
    let said: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let native = altered(&from, |folder, tensors| {
        let mut config = json!({ "model_type": "rwkv7", "use_deep_embed": false });
        for key in [
            "hidden_size",
            "num_hidden_layers",
            "head_dim",
            "decay_low_rank_dim",
            "a_low_rank_dim",
            "v_low_rank_dim",
            "gate_low_rank_dim",
            "intermediate_size",
            "norm_eps",
            "vocab_size",
        ] {
            config[key] = said[key].clone();
        }
        let heads = said["hidden_size"].as_u64().unwrap() / said["head_dim"].as_u64().unwrap();
        config["num_heads"] = heads.into();
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(name, tensor)| native_rwkv7(&name, tensor))
            .collect();
        // What the first layer has besides, and nobody reads.
        for name in ["v0", "v1", "v2"] {
            let tensor = tensors[&format!("rwkv7.blocks.1.att.{name}")].clone();
            tensors.insert(format!("rwkv7.blocks.0.att.{name}"), tensor);
        }
    });
    let device = Default::default();
    assert_eq!(import::<Flex>(native.path(), &device).unwrap().family, "rwkv7_native");
    assert_eq!(answers::<Flex>(&from, &device), answers::<Flex>(native.path(), &device));
    let out = there_and_back(native.path(), Precision::F32);
    let weights = [native.path(), out.path()].map(|path| contents(&path.join(WEIGHTS)));
    assert_eq!(weights[0], weights[1]);
}

type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// A tensor of flash-linear-attention's RWKV-7 under its authors' name and in their form.
fn native_rwkv7(name: &str, (dtype, shape, bytes): Stored) -> (String, Stored) {
    let name = name
        .replace("model.layers.0.pre_norm", "rwkv7.blocks.0.ln0")
        .replace("model.layers.", "rwkv7.blocks.")
        .replace("model.embeddings", "rwkv7.emb")
        .replace("model.norm", "rwkv7.ln_out")
        .replace("lm_head", "head")
        .replace("attn_norm", "ln1")
        .replace("ffn_norm", "ln2")
        .replace(".attn.", ".att.")
        .replace("r_proj", "receptance")
        .replace("k_proj", "key")
        .replace("v_proj", "value")
        .replace("o_proj", "output")
        .replace("g_norm", "ln_x");
    let Some((start, end)) = name.split_once("_lora.lora.") else {
        let wide = [".k_k", ".k_a", ".x_k", ".x_r", ".x_w", ".x_v", ".x_a", ".x_g"];
        let wide = wide.iter().any(|end| name.ends_with(end));
        let width = shape.iter().product();
        return (name, (dtype, if wide { vec![1, 1, width] } else { shape }, bytes));
    };
    match end {
        "2.bias" => (format!("{start}0"), (dtype, vec![1, 1, shape[0]], bytes)),
        _ => {
            let (rows, columns) = (shape[0], shape[1]);
            let four: Vec<&[u8]> = bytes.chunks_exact(4).collect();
            let turned = (0..columns).flat_map(|c| (0..rows).map(move |r| r * columns + c));
            let turned = turned.flat_map(|i| four[i].to_vec()).collect();
            let name = format!("{start}{}", if end.starts_with('0') { 1 } else { 2 });
            (name, (dtype, vec![columns, rows], turned))
        }
    }
}

/// The convolutions of a released OLMo-Hybrid are cut where its widths are.
#[test]
fn convolutions_are_read_however_they_are_cut() {
    let released = changed("olmo_hybrid", |_, tensors| {
        for i in 0..2 {
            let name = |part: &str| format!("model.layers.{i}.linear_attn.{part}_conv1d.weight");
            let all: Vec<u8> =
                ["q", "k", "v"].iter().flat_map(|part| tensors[&name(part)].2.clone()).collect();
            let mut from = 0;
            for (part, width) in [("q", 24), ("k", 24), ("v", 48)] {
                let bytes = width * 4 * 4;
                let numbers = all[from..from + bytes].to_vec();
                tensors.insert(name(part), (Dtype::F32, vec![width, 1, 4], numbers));
                from += bytes;
            }
        }
    });
    same_answers("olmo_hybrid", released.path());
    let out = there_and_back(released.path(), Precision::F32);
    let weights = [released.path(), out.path()].map(|path| contents(&path.join(WEIGHTS)));
    assert_eq!(weights[0], weights[1]);
}

/// An imported model's config is a run's config: it can be shown, and trained.
#[test]
fn configs_of_imported_models_are_configs_of_runs() {
    for name in MODELS {
        let config = import::<Flex>(&folder(name), &Default::default()).unwrap().config;
        let text = toml::to_string(&config).unwrap();
        let again: linattn::nn::LanguageModelConfig = toml::from_str(&text).unwrap();
        assert_eq!(config, again, "{name}: {text}");
        let mut run: toml::Table = toml::from_str(TINY).unwrap();
        run["model"] = toml::Value::try_from(&config).unwrap();
        let desk = Desk::with(&toml::to_string(&run).unwrap());
        desk.run_well(&["--dry-run"]);
        desk.run_well(&["--set", "train={ steps = 2, batch_size = 2 }"]);
        assert!(desk.summary("tiny")["score"].is_number(), "{name}");
    }
}
