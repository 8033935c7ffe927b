//! Checkpoints of flash-linear-attention: they answer as they did there, and go back as they came.

use crate::desk::{Desk, TINY, text};
use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use linattn::ops::LinearAttentionBackend;
use linattn_checkpoints::{CheckpointError, Exported, Precision, export, import, known};
use linattn_oracle::{assert_close, skipped};
use linattn_trainer::{ImportedModel, StoredModel, Which, store_model};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Models beside this file.
const HERE: &[&str] = &["GLA", "GatedDeltaNet", "KDA", "Mamba2", "RWKV7"];
/// Models that are only there where `LINATTN_FIXTURES` says.
const ELSEWHERE: &[&str] =
    &["DeltaNet", "GSA", "GatedDeltaProduct", "HGRN", "LinearAttention", "MesaNet", "RetNet"];
/// RMS error over RMS logits.
const LIMIT: f64 = 1e-4;
/// For MesaNet, whose equations are solved to the end here, and until a small residual there.
const LIMIT_OF_SOLVES: f64 = 2e-3;

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints").join(name)
}

/// Folders of all models that are at hand.
fn models() -> Vec<(String, PathBuf)> {
    let mut list: Vec<(String, PathBuf)> =
        HERE.iter().map(|name| ((*name).to_string(), here(name))).collect();
    let Some(folder) = std::env::var_os("LINATTN_FIXTURES").map(PathBuf::from) else {
        skipped(format_args!("{ELSEWHERE:?}; LINATTN_FIXTURES names no folder"));
        return list;
    };
    for name in ELSEWHERE {
        let paths = [folder.join(name), folder.join(format!("model_a_{name}"))];
        match paths.into_iter().find(|path| path.exists()) {
            Some(path) => list.push(((*name).to_string(), path)),
            None => skipped(format_args!("{name} is not in {}", folder.display())),
        }
    }
    list
}

/// Name, shape and bytes of each tensor of a file.
pub(crate) type Contents = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub(crate) fn contents(path: &Path) -> Contents {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |view: &TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    file.tensors().iter().map(|(name, view)| (name.clone(), owned(view))).collect()
}

pub(crate) fn write(path: &Path, contents: &Contents) {
    let views: Vec<(&String, TensorView<'_>)> = contents
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f64> {
    let four = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    bytes.chunks_exact(4).map(four).collect()
}

/// Ids that a model was given, and its logits there.
pub(crate) fn expected(folder: &Path) -> (Vec<i32>, [usize; 2], Vec<f64>) {
    let tensors = contents(&folder.join("expected.safetensors"));
    let (dtype, shape, bytes) = &tensors["input_ids"];
    assert_eq!(*dtype, Dtype::I32);
    let four = |b: &[u8]| i32::from_le_bytes(b.try_into().unwrap());
    let ids = bytes.chunks_exact(4).map(four).collect();
    (ids, [shape[0], shape[1]], floats(&tensors["logits"].2))
}

pub(crate) fn answers<B: LinearAttentionBackend>(folder: &Path, device: &B::Device) -> Vec<f64> {
    let imported = import::<B>(folder, device).unwrap_or_else(|e| panic!("{e}"));
    let (ids, shape, _) = expected(&here_or(folder));
    let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, shape), device);
    imported.model.forward(ids, None).0.into_data().iter::<f64>().collect()
}

/// The folder with a model's answers: its own, or that of the model it was made from.
fn here_or(folder: &Path) -> PathBuf {
    match folder.join("expected.safetensors").exists() {
        true => folder.to_path_buf(),
        false => PathBuf::from(fs::read_to_string(folder.join("origin")).unwrap()),
    }
}

fn answer_as_there<B: LinearAttentionBackend>(device: &B::Device) {
    for (name, folder) in models() {
        let (_, _, want) = expected(&folder);
        let limit = if name == "MesaNet" { LIMIT_OF_SOLVES } else { LIMIT };
        assert_close(&name, &want, &answers::<B>(&folder, device), limit);
    }
}

#[test]
fn imported_models_answer_as_they_did_there() {
    answer_as_there::<Flex>(&Default::default());
}

#[cfg(feature = "wgpu")]
mod on_wgpu {
    use super::*;

    #[test]
    fn imported_models_answer_as_they_did_there() {
        let Some(device) = crate::support::wgpu() else { return };
        answer_as_there::<burn::backend::Wgpu>(&device);
    }
}

/// Puts a model into a run's folder and takes it out again.
pub(crate) fn there_and_back(folder: &Path, precision: Precision) -> TempDir {
    let device = Default::default();
    let desk = TempDir::new().unwrap();
    let run = desk.path().join("run");
    let imported = import::<Flex>(folder, &device).unwrap_or_else(|e| panic!("{e}"));
    let parts = ImportedModel {
        config: &imported.config,
        tokenizer: imported.tokenizer.as_deref(),
        end_ids: &imported.end_ids,
        companions: &[],
        kept: imported.kept.as_deref(),
    };
    store_model(&run, false, &parts, &imported.model).unwrap();
    let stored = StoredModel::open(&run, Which::Best).unwrap();
    assert_eq!((&stored.config, stored.vocab), (&imported.config, imported.vocab));
    let model = stored.load::<Flex>(&device).unwrap();
    let kept = stored.kept.clone();
    let exported = Exported {
        model: &model,
        config: &stored.config,
        vocab: stored.vocab,
        tokenizer: stored.tokenizer.as_deref(),
        end_ids: &stored.end_ids,
        companions: &stored.companions,
        kept: kept.as_deref(),
    };
    let out = TempDir::new().unwrap();
    let family = export(&exported, Some(imported.family), precision, out.path(), false);
    assert_eq!(family.unwrap_or_else(|e| panic!("{e}")).family, imported.family);
    fs::write(out.path().join("origin"), folder.to_str().unwrap()).unwrap();
    out
}

#[test]
fn weights_go_there_and_back_to_the_last_bit() {
    for (name, folder) in models() {
        let out = there_and_back(&folder, Precision::F32);
        let (want, got) = (contents(&folder.join(WEIGHTS)), contents(&out.path().join(WEIGHTS)));
        assert!(want.keys().eq(got.keys()), "{name}: other names");
        for (key, tensor) in &want {
            assert_eq!(tensor, &got[key], "{name}: {key}");
        }
        let device = Default::default();
        assert_eq!(answers::<Flex>(&folder, &device), answers::<Flex>(out.path(), &device));
    }
}

pub(crate) const WEIGHTS: &str = "model.safetensors";

#[test]
fn half_precision_is_written_and_read() {
    let device = Default::default();
    for (precision, dtype) in [(Precision::Bf16, Dtype::BF16), (Precision::F16, Dtype::F16)] {
        let folder = here("GatedDeltaNet");
        let out = there_and_back(&folder, precision);
        assert!(contents(&out.path().join(WEIGHTS)).values().all(|tensor| tensor.0 == dtype));
        let want = answers::<Flex>(&folder, &device);
        assert_close("rounded", &want, &answers::<Flex>(out.path(), &device), 3e-2);
        // What is rounded already stays as it is.
        let again = there_and_back(out.path(), precision);
        let (a, b) = (out.path().join(WEIGHTS), again.path().join(WEIGHTS));
        assert_eq!(contents(&a), contents(&b));
    }
}

/// A copy of a model, changed.
fn changed(name: &str, change: impl FnOnce(&Path, &mut Contents)) -> TempDir {
    altered(&here(name), change)
}

/// A copy of the model in a folder, changed.
pub(crate) fn altered(from: &Path, change: impl FnOnce(&Path, &mut Contents)) -> TempDir {
    let desk = TempDir::new().unwrap();
    let mut tensors = contents(&from.join(WEIGHTS));
    fs::copy(from.join("config.json"), desk.path().join("config.json")).unwrap();
    fs::write(desk.path().join("origin"), from.to_str().unwrap()).unwrap();
    change(desk.path(), &mut tensors);
    write(&desk.path().join(WEIGHTS), &tensors);
    desk
}

fn same_answers(name: &str, folder: &Path) {
    let device = Default::default();
    assert_eq!(answers::<Flex>(folder, &device), answers::<Flex>(&here(name), &device), "{name}");
}

#[test]
fn old_names_are_known() {
    let old = changed("GatedDeltaNet", |_, tensors| {
        for i in 0..2 {
            let at = format!("model.layers.{i}.attn");
            let norm = tensors.remove(&format!("{at}.o_norm.weight")).unwrap();
            tensors.insert(format!("{at}.norm.weight"), norm);
            tensors.insert(format!("{at}.D"), (Dtype::F32, vec![2], vec![0; 8]));
        }
    });
    same_answers("GatedDeltaNet", old.path());
    let old = changed("GLA", |_, tensors| {
        for i in 0..2 {
            let at = format!("model.layers.{i}");
            let norm = tensors.remove(&format!("{at}.attn.g_norm_swish_gate.weight")).unwrap();
            tensors.insert(format!("{at}.attn.g_norm.weight"), norm);
            let up = tensors.remove(&format!("{at}.mlp.up_proj.weight")).unwrap();
            let gate = tensors.get_mut(&format!("{at}.mlp.gate_proj.weight")).unwrap();
            gate.1[0] *= 2;
            gate.2.extend(up.2);
        }
    });
    same_answers("GLA", old.path());
    let old = changed("Mamba2", |_, tensors| {
        let embedding = tensors.remove("backbone.embeddings.weight").unwrap();
        tensors.insert("backbone.embedding.weight".into(), embedding);
    });
    same_answers("Mamba2", old.path());
}

#[test]
fn a_checkpoint_in_several_files_is_one() {
    let parts = changed("KDA", |folder, tensors| {
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
    same_answers("KDA", parts.path());
    fs::remove_file(parts.path().join("model-00002-of-00002.safetensors")).unwrap();
    refused(parts.path(), &["model-00002-of-00002.safetensors", "is missing"]);
}

/// The one error holds all of these.
pub(crate) fn refused(folder: &Path, parts: &[&str]) {
    let refusal = import::<Flex>(folder, &Default::default());
    let error = refusal.err().unwrap_or_else(|| panic!("nothing of {parts:?}")).to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    assert!(!error.contains('\n'), "{error}");
}

pub(crate) fn set(folder: &Path, key: &str, value: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn all_that_is_wrong_with_a_checkpoint_is_said_at_once() {
    let wrong = changed("GLA", |folder, tensors| {
        let key = |name: &str| format!("model.layers.1.{name}.weight");
        tensors.remove(&key("attn.k_proj")).unwrap();
        tensors.remove(&key("mlp.up_proj")).unwrap();
        tensors.get_mut(&key("attn.q_proj")).unwrap().1 = vec![16, 128];
        tensors.insert(key("attn.x_proj"), (Dtype::F32, vec![1], vec![0; 4]));
        tensors.insert(key("attn.y_proj"), (Dtype::I32, vec![1], vec![0; 4]));
        set(folder, "use_gv", true.into());
        set(folder, "clamp_min", (-5).into());
        set(folder, "colour", "red".into());
    });
    let parts = [
        "model.layers.1.attn.k_proj.weight is missing",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.1.attn.q_proj.weight is [16, 128]; it has to be [32, 64]",
        "model.layers.1.attn.x_proj.weight is no weight of this model",
        "model.layers.1.attn.y_proj.weight is I32",
        "`use_gv` is true",
        "`clamp_min` is -5",
        "`colour` is \"red\"",
    ];
    refused(wrong.path(), &parts);
    for (name, key, value) in [
        ("GatedDeltaNet", "attnres_block_size", json!(4)),
        ("GatedDeltaNet", "hidden_act", json!("powlu")),
        ("GatedDeltaNet", "output_gate_activation", json!("sigmoid")),
        ("GatedDeltaNet", "attn", json!({ "layers": [7], "num_heads": 2 })),
        ("KDA", "safe_gate", json!(true)),
        ("KDA", "hidden_size", json!(2.5)),
        ("Mamba2", "D_has_hdim", json!(true)),
        ("Mamba2", "dt_limit", json!([0.0, 0.5])),
        ("Mamba2", "model_type", json!("bert")),
    ] {
        let wrong = changed(name, |_, _| {});
        // Infinities are no JSON.
        let path = wrong.path().join("config.json");
        let plain = fs::read_to_string(&path).unwrap().replace("Infinity", "null");
        fs::write(&path, plain).unwrap();
        set(wrong.path(), key, value);
        let key = if key == "attn" { "attn.layers" } else { key };
        refused(wrong.path(), &[&format!("`{key}` is")]);
    }
    let short = changed("KDA", |_, _| {});
    let bytes = fs::read(short.path().join(WEIGHTS)).unwrap();
    fs::write(short.path().join(WEIGHTS), &bytes[..bytes.len() - 10]).unwrap();
    refused(short.path(), &["model.safetensors", "cut off"]);
    refused(Path::new("/nowhere"), &["/nowhere", "config.json", "model.safetensors"]);
}

#[test]
fn sizes_that_are_not_the_tensors_are_refused_before_there_is_a_model() {
    for (key, value, parts) in [
        (
            "hidden_size",
            json!(65536),
            ["embeddings.weight is [97, 64]", "65536], as `hidden_size`"],
        ),
        (
            "num_hidden_layers",
            json!(60000),
            ["`num_hidden_layers` is 60000", "the tensors have 2 layers"],
        ),
        (
            "num_hidden_layers",
            json!(3),
            ["model.layers.2.attn.q_proj.weight is missing", "layers.2.mlp"],
        ),
        ("num_hidden_layers", json!(1e15), ["`num_hidden_layers` is", "65536 at most"]),
        ("intermediate_size", json!(1 << 20), ["weights at the least", "`intermediate_size`"]),
        ("expand_v", json!(1e6), ["`expand_v` is", "at most"]),
        ("vocab_size", json!(5), ["`vocab_size` is 5", "model.embeddings.weight has 97 rows"]),
        ("vocab_size", json!("many"), ["`vocab_size` is \"many\"", "whole number"]),
    ] {
        let wrong = changed("GLA", |_, _| {});
        set(wrong.path(), key, value);
        refused(wrong.path(), &parts);
    }
}

/// Four GiB would not hold a matrix of that width.
#[cfg(target_os = "linux")]
#[test]
fn the_command_refuses_a_model_that_no_memory_holds_in_one_line() {
    let wrong = changed("GatedDeltaNet", |_, _| {});
    set(wrong.path(), "hidden_size", 65536.into());
    let desk = Desk::new();
    let limited = r#"ulimit -v 4194304 && exec "$0" "$@""#;
    let convert = env!("CARGO_BIN_EXE_convert");
    let from = wrong.path().to_str().unwrap();
    let args = ["-c", limited, convert, "import", from, "--out", "runs/x"];
    let output = desk.program("sh", &args).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
    assert!(said.contains("model.embeddings.weight") && said.contains("`hidden_size`"), "{said}");
    assert!(!desk.path("runs/x").exists());
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name_in_both_directions() {
    let name = "model.layers.1.attn.q_proj.weight";
    for (value, says) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let wrong = changed("GLA", |_, tensors| {
            tensors.get_mut(name).unwrap().2[28..32].copy_from_slice(&value.to_le_bytes());
        });
        refused(wrong.path(), &[&format!("{name} is {says} at place 7; it has to be finite")]);
    }
    let large = changed("GLA", |_, tensors| {
        tensors.get_mut(name).unwrap().2[28..32].copy_from_slice(&1e6_f32.to_le_bytes());
    });
    let imported = import::<Flex>(large.path(), &Default::default()).unwrap();
    let exported = Exported {
        model: &imported.model,
        config: &imported.config,
        vocab: imported.vocab,
        tokenizer: None,
        end_ids: &[],
        companions: &[],
        kept: None,
    };
    let desk = TempDir::new().unwrap();
    let out = |precision: Precision| {
        export(
            &exported,
            Some("gla"),
            precision,
            &desk.path().join(format!("{precision:?}")),
            false,
        )
    };
    let why = out(Precision::F16).unwrap_err().to_string();
    for part in [name, "is 1000000 at place 7", "the largest float16 is 65504"] {
        assert!(why.contains(part), "{part:?} is not in {why}");
    }
    assert!(!desk.path().join("F16").exists());
    assert!(out(Precision::Bf16).is_ok() && out(Precision::F32).is_ok());
}

#[test]
fn a_model_that_no_checkpoint_can_hold_is_not_exported() {
    let device = Default::default();
    let config: linattn::nn::LanguageModelConfig = toml::from_str(
        "d_model = 16\nhead_bias = true\ntie_embeddings = false\n\
         layers = [{ mixer.gla = { heads = 2, gate_low_rank = 3 }, mlp.swiglu = {} }]",
    )
    .unwrap();
    let model = config.init::<Flex>(7, &device).unwrap();
    let exported = Exported {
        model: &model,
        config: &config,
        vocab: 7,
        tokenizer: None,
        end_ids: &[],
        companions: &[],
        kept: None,
    };
    let desk = TempDir::new().unwrap();
    let out = desk.path().join("out");
    let refusal = |family| export(&exported, family, Precision::F32, &out, false).unwrap_err();
    let text = refusal(None).to_string();
    for part in ["`gla`", "head_bias", "layers[0].mixer.gla.gate_low_rank` is 3"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(matches!(refusal(Some("bert")), CheckpointError::Family { .. }));
    assert!(refusal(Some("kda")).to_string().contains("the model has none"));
    assert!(!out.exists());
    assert!(known().contains(&"gated_deltanet"));
}

#[test]
fn the_command_imports_tests_and_exports() {
    let desk = Desk::new();
    let convert =
        |args: &[&str]| desk.program(env!("CARGO_BIN_EXE_convert"), args).output().unwrap();
    let eval = |args: &[&str]| {
        let fixed = ["--run", "runs/gdn", "--device", "cpu"];
        desk.program(env!("CARGO_BIN_EXE_eval"), &[&fixed, args].concat()).output().unwrap()
    };
    let failed = |output: &std::process::Output, parts: &[&str]| {
        let text = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    };
    let model = here("GatedDeltaNet");
    let model = model.to_str().unwrap();
    let output = convert(&["import", model, "--out", "runs/gdn"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("gated_deltanet"), "{}", text(&output.stdout));
    failed(&convert(&["import", model, "--out", "runs/gdn"]), &["imported", "--overwrite"]);
    assert!(convert(&["import", model, "--out", "runs/gdn", "--overwrite"]).status.success());

    failed(&eval(&[]), &["no task of its own", "--task-from"]);
    let sets = "train = [{ length = 16, pairs = 2, examples = 8 }], \
                test = [{ length = 16, pairs = 2, examples = 8 }]";
    let small = format!("task.mqar={{ vocab = 64, {sets} }}");
    let large = format!("task.mqar={{ vocab = 128, {sets} }}");
    assert!(eval(&["--set", &small]).status.success());
    assert!(eval(&["--task-from", "tiny.toml"]).status.success());
    failed(&eval(&["--set", &large]), &["128", "97"]);
    failed(&eval(&["--set", &small, "--set", "model.d_model=32"]), &["model.d_model", "32", "64"]);

    let output = convert(&["export", "runs/gdn", "--out", "there", "--dtype", "bf16"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(desk.path("there/config.json").exists());
    failed(&convert(&["export", "runs/gdn", "--out", "there"]), &["there", "--overwrite"]);
    failed(&convert(&["export", "runs/none", "--out", "x"]), &["runs/none", "no run"]);
    failed(
        &convert(&["export", "runs/gdn", "--out", "x", "--family", "gpt"]),
        &["`gpt`", "gated_deltanet"],
    );
    // A run of our own goes there too.
    desk.run_well(&[]);
    failed(&convert(&["export", "runs/tiny", "--out", "tiny"]), &["mlp"]);
    assert!(!desk.path("tiny").exists() && !desk.path("x").exists());
}

#[test]
fn a_trained_run_goes_there_and_comes_back_to_the_last_bit() {
    let mixer = "mixer.gated_deltanet = { heads = 2 }";
    let desk = Desk::with(&TINY.replace(mixer, &format!("{mixer}\nmlp.swiglu = {{}}")));
    desk.run_well(&[]);
    for args in [
        ["export", "runs/tiny", "--out", "there", "--checkpoint", "last"].as_slice(),
        &["import", "there", "--out", "runs/back"],
    ] {
        let output = desk.program(env!("CARGO_BIN_EXE_convert"), args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let weights = |run: &str, step: u64| {
        let folder = desk.path("runs").join(run).join("checkpoints");
        fs::read(folder.join(format!("step-{step:010}")).join(WEIGHTS)).unwrap()
    };
    assert_eq!(weights("tiny", 60), weights("back", 0));
}
