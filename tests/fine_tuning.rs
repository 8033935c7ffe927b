//! Runs that start from the weights of others.

use crate::checkpoints::{contents, floats};
#[cfg(unix)]
use crate::desk::comes;
use crate::desk::{Desk, json, text};
use linattn_oracle::assert_close;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

/// Text of a model with 61 ids, which `tokenizer` spells by letters.
const CONFIG: &str = r#"
seed = 5

[task.language_modelling]
train = [{ text = ["text.txt"], length = 24, examples = 64 }]
test = [{ text = ["text.txt"], length = 24, examples = 8 }]

[model]
from = "runs/qwen"

[train]
steps = 12
batch_size = 4
log_every = 1
accumulate = 2

[optimizer]
learning_rate = 1e-2
weight_decay = 0.0

[schedule]
shape = "constant"

[checkpoint]
every_steps = 4
keep = 9
"#;

const TEXT: &str = "the cat sat on the mat, and the rat sat on the cat; then all of them ran. ";

/// Small letters, digits and a few signs, each an id.
fn tokenizer() -> String {
    let letters: Vec<String> = "abcdefghijklmnopqrstuvwxyz0123456789 .,;:-"
        .chars()
        .enumerate()
        .map(|(id, letter)| format!("\"{letter}\": {id}"))
        .collect();
    format!(
        r#"{{ "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": {{ "type": "Fuse" }}, "truncation": null, "padding": null,
            "model": {{ "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": false,
                "vocab": {{ {} }}, "merges": [] }} }}"#,
        letters.join(", ")
    )
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/transformers/qwen3_5")
}

/// The tiny Qwen3.5 in `runs/qwen`, with a tokenizer, and a config that starts from it.
pub(crate) fn desk(more: &str) -> Desk {
    let desk = Desk::with(&format!("{CONFIG}{more}"));
    let there = desk.path("there");
    fs::create_dir(&there).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model().join(name), there.join(name)).unwrap();
    }
    let config = fs::read_to_string(there.join("config.json")).unwrap();
    let ends = config.replacen("\"eos_token_id\": null", "\"eos_token_id\": [7, 9]", 1);
    assert_ne!(config, ends, "the file says what ends a text");
    fs::write(there.join("config.json"), ends).unwrap();
    fs::write(there.join("tokenizer.json"), tokenizer()).unwrap();
    fs::write(desk.path("text.txt"), TEXT.repeat(20)).unwrap();
    well(&convert(&desk, &["import", "there", "--out", "runs/qwen"]));
    desk
}

pub(crate) fn convert(desk: &Desk, args: &[&str]) -> Output {
    desk.program(env!("CARGO_BIN_EXE_convert"), args).output().unwrap()
}

pub(crate) fn well(output: &Output) {
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Refused in one line that says each of `parts`.
pub(crate) fn refused(output: &Output, parts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error")).count(), 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

pub(crate) fn losses(desk: &Desk, name: &str) -> Vec<f64> {
    let lines = desk.metrics(name);
    lines.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

fn weights(desk: &Desk, name: &str, step: u64) -> PathBuf {
    desk.path(&format!("runs/{name}/checkpoints/step-{step:010}/model.safetensors"))
}

#[test]
fn training_starts_from_an_imported_models_weights_and_tokenizer() {
    let desk = desk("");
    // The loss before any step is that of the model as it was imported.
    let set = format!(
        "task={{ language_modelling = {{ tokenizer = {{ file = 'runs/qwen/tokenizer.json' }}, {} }} }}",
        "train = [{ text = ['text.txt'], length = 24, examples = 64 }], test = [{ text = ['text.txt'], length = 24, examples = 8 }]"
    );
    let args = ["--run", "runs/qwen", "--device", "cpu", "--set", &set, "--json", "before.json"];
    well(&desk.program(env!("CARGO_BIN_EXE_eval"), &args).output().unwrap());
    desk.run_well(&["--set", "optimizer.learning_rate=1e-30", "--set", "name=still"]);
    let key = "test/bits_per_byte";
    assert_eq!(
        json(&desk.path("before.json"))["metrics"][key],
        desk.summary("still")["metrics"][key]
    );

    desk.run_well(&[]);
    let found = losses(&desk, "tiny");
    assert!(found[11] < 0.8 * found[0], "{found:?}");
    // What it writes is spelled by the tokenizer that came along.
    let args = ["--run", "runs/tiny", "--device", "cpu", "--prompt", "the c", "--tokens", "4"];
    well(&desk.program(env!("CARGO_BIN_EXE_generate"), &args).output().unwrap());
    // And it goes back to where its model came from.
    well(&convert(&desk, &["export", "runs/tiny", "--out", "back"]));
    assert_eq!(json(&desk.path("back/config.json"))["model_type"], "qwen3_5_text");
    assert_eq!(fs::read_to_string(desk.path("back/tokenizer.json")).unwrap(), tokenizer());
    // A model that was trained here is as good a start.
    desk.run_well(&["--set", "model.from=runs/tiny", "--set", "name=again"]);
    assert!(losses(&desk, "again")[0] < 0.9 * found[0], "{:?}", losses(&desk, "again"));
}

#[test]
fn a_batch_in_parts_and_sixteen_bits_start_from_another_run_too() {
    let desk = desk("");
    desk.run_well(&["--set", "train.steps=2", "--set", "name=parts"]);
    desk.run_well(&[
        "--set",
        "train.steps=2",
        "--set",
        "train.accumulate=1",
        "--set",
        "name=whole",
    ]);
    let (parts, whole) = (losses(&desk, "parts"), losses(&desk, "whole"));
    assert!((parts[1] - whole[1]).abs() < 1e-4, "{parts:?} {whole:?}");
    desk.run_well(&[
        "--set",
        "train.steps=2",
        "--set",
        "train.precision=bf16",
        "--set",
        "name=bf16",
    ]);
    let narrow = losses(&desk, "bf16");
    assert!((narrow[1] - whole[1]).abs() < 0.05, "{narrow:?} {whole:?}");
}

#[test]
fn a_resumed_run_needs_the_run_it_started_from_no_more() {
    let desk = desk("");
    desk.run_well(&["--set", "name=unbroken"]);
    desk.run_well(&[]);
    // As if it had been cut off after its second checkpoint.
    fs::remove_dir_all(desk.path("runs/tiny/checkpoints/step-0000000012")).unwrap();
    fs::remove_file(desk.path("runs/tiny/summary.json")).unwrap();
    fs::remove_dir_all(desk.path("runs/qwen")).unwrap();
    desk.run_well(&["--resume"]);
    assert_eq!(desk.metrics("tiny"), desk.metrics("unbroken"));
    let bytes = |name| fs::read(weights(&desk, name, 12)).unwrap();
    assert!(bytes("tiny") == bytes("unbroken"), "other weights");
    // The resolved config says all of it, and makes the same run.
    let config = fs::read_to_string(desk.path("runs/tiny/config.toml")).unwrap();
    let parts = [
        "[base]",
        "run = \"runs/qwen\"",
        "checksum = ",
        "vocab = 61",
        "end_ids = [",
        "d_model = 32",
    ];
    for part in parts {
        assert!(config.contains(part), "{config}");
    }
    // Training changes nothing about what ends a text.
    well(&convert(&desk, &["export", "runs/tiny", "--out", "back"]));
    let back = json(&desk.path("back/config.json"));
    assert_eq!(back["eos_token_id"], serde_json::json!([7, 9]));
    refused(&desk.run(&["--set", "name=new"]), &["`model.from` names runs/qwen", "no run"]);
    let again = desk.command(&["--config", "runs/tiny/config.toml", "--resume"]).output().unwrap();
    well(&again);
    let anew = ["--config", "runs/tiny/config.toml", "--overwrite"];
    refused(&desk.command(&anew).output().unwrap(), &["runs/qwen"]);
    assert!(desk.path("runs/tiny/summary.json").exists(), "a refused start deletes nothing");
}

#[test]
fn what_contradicts_the_run_to_start_from_is_refused_by_key() {
    let desk = desk("");
    let with = |change: &str| desk.run(&["--dry-run", "--set", change]);
    for (change, parts) in [
        ("model.d_model=64", ["`model.d_model` is 64", "32, as in runs/qwen"].as_slice()),
        (
            "model.norm=layer",
            &["`model.norm` is \"layer\"", "\"zero_centered_rms\", as in runs/qwen"],
        ),
        ("model.colour=red", &["unknown field", "colour"]),
        ("model.from=3", &["`model.from` is 3", "runs/NAME"]),
        ("model.from=runs/none", &["`model.from` names runs/none", "no run"]),
        (
            "base={ run = 'x', step = 0, vocab = 61, checksum = '00000000' }",
            &["`base`", "`model.from`"],
        ),
        (
            "task.language_modelling.tokenizer=bytes",
            &["`task.language_modelling.tokenizer` is \"bytes\"", "runs/qwen/tokenizer.json"],
        ),
        (
            "task={ mqar = { vocab = 64, train = [{ length = 16, pairs = 2, examples = 8 }], \
             test = [{ length = 16, pairs = 2, examples = 8 }] } }",
            &["`task` is one of 64 token ids", "at most 61", "runs/qwen"],
        ),
    ] {
        refused(&with(change), parts);
    }
    // The same once more is no contradiction, and dropout is training's affair.
    for same in ["model.d_model=32", "model.embedding_dropout=0.1"] {
        well(&with(same));
    }
    refused(&desk.run(&["--set", "name=qwen", "--overwrite"]), &["runs/qwen", "writes to"]);
    assert!(weights(&desk, "qwen", 0).exists());

    // A source that is not what it was: by its own checksum, and by the one that was written down.
    desk.run_well(&["--set", "train.steps=1", "--set", "name=first"]);
    let config = fs::read_to_string(desk.path("runs/first/config.toml")).unwrap();
    fs::write(desk.path("copy.toml"), config.replace("first", "second")).unwrap();
    let copy = ["--config", "copy.toml", "--dry-run"];
    well(&desk.command(&copy).output().unwrap());
    well(&convert(&desk, &["import", "there", "--out", "runs/qwen", "--overwrite"]));
    well(&desk.command(&copy).output().unwrap());
    let other = fs::read(weights(&desk, "first", 1)).unwrap();
    let config = config.split("checksum = ").collect::<Vec<_>>().join("checksum = \"00000000\" # ");
    fs::write(desk.path("copy.toml"), config.replace("first", "third")).unwrap();
    refused(&desk.command(&copy).output().unwrap(), &["runs/qwen", "checksum", "00000000"]);
    fs::write(weights(&desk, "qwen", 0), other).unwrap();
    refused(&desk.run(&["--dry-run"]), &["runs/qwen", "corrupt", "checksum"]);
}

#[test]
fn a_dry_run_counts_the_model_to_start_from() {
    let desk = desk("");
    let before = desk.files();
    let output = desk.run(&["--dry-run"]);
    well(&output);
    let said = text(&output.stdout);
    assert!(said.contains("MiB"), "{said}");
    assert_eq!(desk.files(), before);
}

const LORA: &str = "train.lora={ rank = 4, alpha = 8.0, targets = ['q_proj', 'k_proj', 'v_proj', \
                    'o_proj', 'gate_proj', 'up_proj', 'down_proj'] }";

/// A run with adapters, in `runs/NAME`.
fn adapted(desk: &Desk, name: &str, more: &[&str]) {
    let name = format!("name={name}");
    desk.run_well(&[&["--set", LORA, "--set", &name], more].concat());
}

fn names(path: &Path) -> Vec<String> {
    contents(path).into_keys().collect()
}

#[test]
fn adapters_learn_and_nothing_else_does() {
    let desk = desk("");
    adapted(&desk, "tiny", &["--set", "train.steps=30", "--set", "optimizer.learning_rate=2e-2"]);
    let found = losses(&desk, "tiny");
    assert!(found[29] < 0.8 * found[0], "{found:?}");
    // It starts from the model as it was: the first loss is that of a run that trains all of it.
    desk.run_well(&["--set", "name=full", "--set", "train.steps=1"]);
    assert!((losses(&desk, "full")[0] - found[0]).abs() < 1e-6);
    // The weights stand beside the adapters as they were, to the last bit, and the files hold no more.
    let base = fs::read(desk.path("runs/tiny/base.safetensors")).unwrap();
    assert!(base == fs::read(weights(&desk, "qwen", 0)).unwrap(), "the base is another");
    let adapters = names(&weights(&desk, "tiny", 30));
    assert_eq!(adapters.len(), 2 * 4 * 7, "{adapters:?}");
    assert!(adapters.contains(&"layers.2.attn.q_proj.adapter.lora_a".to_string()), "{adapters:?}");
    let state = names(&weights(&desk, "tiny", 30).with_file_name("optimizer.safetensors"));
    assert_eq!(state.len(), 3 * adapters.len());
    assert!(state.iter().all(|name| name.contains(".adapter.lora_")), "{state:?}");
}

#[test]
fn adapters_learn_in_parts_in_sixteen_bits_and_layer_by_layer() {
    let desk = desk("");
    let steps = ["--set", "train.steps=3"];
    adapted(&desk, "parts", &steps);
    adapted(&desk, "whole", &[&steps[..], &["--set", "train.accumulate=1"]].concat());
    adapted(&desk, "bf16", &[&steps[..], &["--set", "train.precision=bf16"]].concat());
    adapted(
        &desk,
        "layers",
        &[&steps[..], &["--set", "train.checkpoint_activations=true"]].concat(),
    );
    let run = |name: &str| losses(&desk, name);
    let near =
        |a: &[f64], b: &[f64], limit: f64| a.iter().zip(b).all(|(a, b)| (a - b).abs() < limit);
    assert!(near(&run("parts"), &run("whole"), 1e-4), "{:?} {:?}", run("parts"), run("whole"));
    assert!(near(&run("parts")[..2], &run("bf16"), 0.05), "{:?} {:?}", run("parts"), run("bf16"));
    // Layer by layer results differ by rounding: Flex has a softmax of its own where there is no graph.
    let first = |name: &str| run(name)[..1].to_vec();
    assert!(
        near(&first("parts"), &first("layers"), 2e-6),
        "{:?} {:?}",
        run("parts"),
        run("layers")
    );
    assert!(near(&run("parts"), &run("layers"), 1e-4), "{:?} {:?}", run("parts"), run("layers"));
    desk.run_well(&["--set", "name=full", "--set", "train.steps=3"]);
    let recompute = ["--set", "name=again", "--set", "train.checkpoint_activations=true"];
    desk.run_well(&[&recompute[..], &steps].concat());
    assert!(near(&first("full"), &first("again"), 2e-6), "{:?} {:?}", run("full"), run("again"));
    assert!(near(&run("full"), &run("again"), 1e-4), "{:?} {:?}", run("full"), run("again"));
}

#[cfg(unix)]
#[test]
fn a_killed_run_with_adapters_goes_on_to_the_same_bits_without_its_source() {
    let desk = desk("");
    let steps = ["--set", "train.steps=60"];
    adapted(&desk, "unbroken", &steps);
    let args = ["--config", "tiny.toml", "--device", "cpu", "--set", LORA, "--set", "name=broken"];
    let begin = [&args[..], &steps].concat();
    let mut child =
        desk.command(&begin).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let first = desk.path("runs/broken/checkpoints/step-0000000004");
    assert!(comes(|| first.exists()), "there is no checkpoint after five minutes");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!desk.path("runs/broken/summary.json").exists(), "it was over before it was killed");
    fs::rename(desk.path("runs/qwen"), desk.path("elsewhere")).unwrap();
    well(&desk.command(&[&begin[..], &["--resume"]].concat()).output().unwrap());
    assert_eq!(desk.metrics("broken"), desk.metrics("unbroken"));
    let bytes = |name| fs::read(weights(&desk, name, 60)).unwrap();
    assert!(bytes("broken") == bytes("unbroken"), "other adapters");

    // A base that is not what it was is not gone on with, nor read by anything else.
    let base = desk.path("runs/broken/base.safetensors");
    let mut damaged = fs::read(&base).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&base, damaged).unwrap();
    let resume = desk.command(&[&begin[..], &["--resume"]].concat()).output().unwrap();
    refused(&resume, &["base.safetensors is corrupt", "checksum"]);
    let generate = ["--run", "runs/broken", "--device", "cpu", "--prompt", "the", "--tokens", "2"];
    let generate = desk.program(env!("CARGO_BIN_EXE_generate"), &generate).output().unwrap();
    refused(&generate, &["base.safetensors is corrupt"]);
    fs::remove_file(&base).unwrap();
    refused(
        &convert(&desk, &["export", "runs/broken", "--out", "x"]),
        &["base.safetensors", "missing"],
    );
}

/// Numbers and shape of a tensor.
type Matrix = (Vec<f64>, Vec<usize>);

fn matrices(path: &Path) -> BTreeMap<String, Matrix> {
    let tensors = contents(path).into_iter();
    tensors.map(|(name, (_, shape, bytes))| (name, (floats(&bytes), shape))).collect()
}

/// The weights that PEFT merges from its two files: `W + alpha / r B A` for each module that a target names.
fn merged_as_in_peft(
    folder: &Path,
    mut base: BTreeMap<String, Matrix>,
) -> BTreeMap<String, Matrix> {
    let config = json(&folder.join("adapter_config.json"));
    assert_eq!(
        (config["peft_type"].as_str(), config["fan_in_fan_out"].as_bool()),
        (Some("LORA"), Some(false))
    );
    let adapters = matrices(&folder.join("adapter_model.safetensors"));
    let targets: Vec<&str> =
        config["target_modules"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    let mut used = 0;
    for (name, (weight, shape)) in &mut base {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        if !targets.iter().any(|t| module == *t || module.ends_with(&format!(".{t}"))) {
            continue;
        }
        let of = |end: &str| &adapters[&format!("base_model.model.{module}.{end}.weight")];
        let ((a, of_a), (b, of_b)) = (of("lora_A"), of("lora_B"));
        let rank =
            config["rank_pattern"][module].as_u64().or(config["r"].as_u64()).unwrap() as usize;
        let alpha =
            config["alpha_pattern"][module].as_f64().or(config["lora_alpha"].as_f64()).unwrap();
        assert_eq!((of_a, of_b), (&vec![rank, shape[1]], &vec![shape[0], rank]), "{module}");
        for (row, weights) in weight.chunks_exact_mut(shape[1]).enumerate() {
            for (column, weight) in weights.iter_mut().enumerate() {
                let product = |k: usize| b[row * rank + k] * a[k * of_a[1] + column];
                *weight += alpha / rank as f64 * (0..rank).map(product).sum::<f64>();
            }
        }
        used += 2;
    }
    assert_eq!(used, adapters.len(), "{:?}", adapters.keys());
    base
}

#[test]
fn adapters_go_to_peft_and_merge_into_the_weights() {
    let desk = desk("");
    adapted(&desk, "tiny", &[]);
    for (from, to, more) in [
        ("runs/qwen", "base", &[][..]),
        ("runs/tiny", "merged", &[]),
        ("runs/tiny", "peft", &["--adapters"]),
    ] {
        well(&convert(&desk, &[&["export", from, "--out", to], more].concat()));
    }
    let file = |name: &str| desk.path(name).join("model.safetensors");
    let want = merged_as_in_peft(&desk.path("peft"), matrices(&file("base")));
    let got = matrices(&file("merged"));
    assert_eq!(want.keys().collect::<Vec<_>>(), got.keys().collect::<Vec<_>>());
    for (name, (numbers, _)) in &want {
        assert_close(name, numbers, &got[name].0, 1e-6);
    }
    let names = names(&desk.path("peft/adapter_model.safetensors"));
    for module in [
        "0.linear_attn.in_proj_qkv",
        "0.linear_attn.out_proj",
        "2.self_attn.q_proj",
        "3.mlp.up_proj",
    ] {
        let name = format!("base_model.model.model.layers.{module}.lora_A.weight");
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    // PEFT's files come back into the weights that they were trained beside.
    well(&convert(&desk, &["import", "base", "--adapters", "peft", "--out", "runs/back"]));
    well(&convert(&desk, &["export", "runs/back", "--out", "back"]));
    let got = matrices(&file("back"));
    for (name, (numbers, _)) in &want {
        assert_close(name, numbers, &got[name].0, 1e-6);
    }
    // As a run: the same figures, and a start for other runs.
    well(&convert(&desk, &["merge", "runs/tiny", "--out", "runs/one"]));
    let test = "task={ language_modelling = { tokenizer = { file = 'runs/qwen/tokenizer.json' }, \
                train = [{ text = ['text.txt'], length = 24, examples = 64 }], \
                test = [{ text = ['text.txt'], length = 24, examples = 8 }] } }";
    let eval = |run: &str, more: &[&str]| {
        let fixed = ["--run", run, "--device", "cpu", "--json", "figures.json"];
        well(&desk.program(env!("CARGO_BIN_EXE_eval"), &[&fixed, more].concat()).output().unwrap());
        json(&desk.path("figures.json"))["metrics"]["test/bits_per_byte"].as_f64().unwrap()
    };
    let want = desk.summary("tiny")["metrics"]["test/bits_per_byte"].as_f64().unwrap();
    for got in [eval("runs/tiny", &[]), eval("runs/one", &["--set", test])] {
        assert!((want - got).abs() < 1e-5 * want, "{want} {got}");
    }
    desk.run_well(&["--set", "model.from=runs/one", "--set", "train.steps=1", "--set", "name=on"]);
    // It goes back to the family that the first model came from.
    well(&convert(&desk, &["export", "runs/one", "--out", "one"]));
    assert!(fs::read(file("one")).unwrap() == fs::read(file("merged")).unwrap(), "other weights");
    let generate = ["--run", "runs/tiny", "--device", "cpu", "--prompt", "the c", "--tokens", "4"];
    well(&desk.program(env!("CARGO_BIN_EXE_generate"), &generate).output().unwrap());

    for (args, parts) in [
        (
            &["export", "runs/qwen", "--out", "x", "--adapters"][..],
            ["runs/qwen", "no low-rank adapters"],
        ),
        (&["merge", "runs/qwen", "--out", "x"], ["runs/qwen", "no low-rank adapters"]),
        (&["merge", "runs/tiny", "--out", "runs/tiny", "--overwrite"], ["runs/tiny", "`--out`"]),
        (&["merge", "runs/tiny", "--out", "runs/one"], ["runs/one", "--overwrite"]),
        (&["export", "runs/tiny", "--out", "peft", "--adapters"], ["peft", "--overwrite"]),
    ] {
        refused(&convert(&desk, args), &parts);
    }
    let from = desk.run(&["--set", "model.from=runs/tiny", "--set", "name=next"]);
    refused(&from, &["`model.from` names runs/tiny", "convert merge"]);
}

#[test]
fn adapters_of_peft_that_are_more_or_fit_nothing_are_refused_by_name() {
    let desk = desk("");
    adapted(&desk, "tiny", &[]);
    well(&convert(&desk, &["export", "runs/qwen", "--out", "base"]));
    well(&convert(&desk, &["export", "runs/tiny", "--out", "peft", "--adapters"]));
    let (config, weights) =
        (desk.path("peft/adapter_config.json"), desk.path("peft/adapter_model.safetensors"));
    let (text, bytes) = (fs::read_to_string(&config).unwrap(), fs::read(&weights).unwrap());
    let import = ["import", "base", "--adapters", "peft", "--out", "runs/back"];
    for (from, to, parts) in [
        ("\"LORA\"", "\"IA3\"", ["`peft_type` is \"IA3\"", "\"LORA\""]),
        ("\"use_dora\": false", "\"use_dora\": true", ["`use_dora` is true", "false"]),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", ["`bias` is \"all\"", "none"]),
        ("\"alpha_pattern\": {", "\"alpha_pattern\": { \"q.*\": 1.0, ", ["\"q.*\"", "names"]),
        ("\"lora_alpha\"", "\"alpha\"", ["adapter_config.json", "lora_alpha"]),
    ] {
        assert!(text.contains(from), "{from} is not in {text}");
        fs::write(&config, text.replace(from, to).replace(", }", " }")).unwrap();
        refused(&convert(&desk, &import), &parts);
    }
    fs::write(&config, &text).unwrap();
    // Names have the same length, so that the header stays right.
    let renamed = |from: &str, to: &str| {
        let text = |bytes: &str| bytes.as_bytes().to_vec();
        let (from, to) = (text(from), text(to));
        let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(&to);
        fs::write(&weights, bytes).unwrap();
    };
    renamed("q_proj.lora_A", "x_proj.lora_A");
    refused(&convert(&desk, &import), &["q_proj.lora_A.weight is missing", "x_proj"]);
    renamed("lora_A.weight", "lora_M.weight");
    refused(&convert(&desk, &import), &["lora_M.weight is no low-rank matrix", "NAME.lora_A"]);
    fs::write(&weights, &bytes[..bytes.len() - 8]).unwrap();
    refused(&convert(&desk, &import), &["adapter_model.safetensors", "cut off"]);
    fs::remove_file(&weights).unwrap();
    refused(&convert(&desk, &import), &["adapter_model.safetensors", "No such file"]);
}

#[test]
fn adapters_that_fit_nothing_are_refused_by_key_before_anything_is_written() {
    let desk = desk("");
    let before = desk.files();
    let lora = |keys: &str| format!("train.lora={{ {keys} }}");
    for (change, parts) in [
        (
            lora("targets = ['q_proj', 'query']"),
            ["`train.lora.targets` is \"query\"", "down_proj, "],
        ),
        (lora("targets = []"), ["`train.lora.targets` is empty", "projection"]),
        (lora("rank = 0, targets = ['q_proj']"), ["`train.lora.rank` is 0", "at least 1"]),
        (lora("alpha = -1.0, targets = ['q_proj']"), ["`train.lora.alpha` is -1", "above 0"]),
        (lora("rank = 4"), ["targets", "missing"]),
        (lora("r = 4, targets = ['q_proj']"), ["unknown field", "rank"]),
        ("train.checkpoint_activations=1".into(), ["checkpoint_activations", "boolean"]),
    ] {
        refused(&desk.run(&["--set", &change]), &parts);
    }
    let dropout =
        ["--set", "train.checkpoint_activations=true", "--set", "model.embedding_dropout=0.1"];
    refused(&desk.run(&dropout), &["`model.embedding_dropout` is 0.1", "checkpoint_activations"]);
    assert_eq!(desk.files(), before, "something was written");
    let own = Desk::new();
    let given = own.run(&["--set", &lora("targets = ['q_proj']")]);
    refused(&given, &["`train.lora` is given", "`model.from`"]);
}

#[test]
fn a_dry_run_counts_what_learns() {
    let desk = desk("");
    let cost = |more: &[&str]| {
        let output = desk.run(&[&["--dry-run", "--json"], more].concat());
        well(&output);
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        said["cost"].clone()
    };
    let full = cost(&[]);
    let adapters = cost(&["--set", LORA]);
    let count = |cost: &serde_json::Value, key: &str| cost[key].as_u64().unwrap();
    assert_eq!(count(&full, "learnt"), count(&full, "parameters"));
    for (cost, learnt) in
        [(&full, count(&full, "parameters")), (&adapters, count(&adapters, "learnt"))]
    {
        assert_eq!(count(cost, "weight_memory"), 4 * count(cost, "parameters"));
        assert_eq!(count(cost, "gradient_memory"), 4 * learnt);
        assert_eq!(count(cost, "optimizer_memory"), 8 * learnt);
    }
    let extra = count(&adapters, "parameters") - count(&full, "parameters");
    assert_eq!(extra, count(&adapters, "learnt"));
    let recomputed = cost(&["--set", "train.checkpoint_activations=true"]);
    assert!(count(&recomputed, "activation_memory") < count(&full, "activation_memory"));
}

/// Adapters learn through Vulkan as they do on the CPU.
#[cfg(feature = "wgpu")]
#[test]
fn adapters_learn_on_wgpu() {
    if crate::support::wgpu().is_none() {
        return;
    }
    let desk = desk("");
    let losses = |device: &str| {
        let name = format!("name={device}").replace(':', "");
        let args = ["--config", "tiny.toml", "--device", device, "--set", LORA, "--set", &name];
        well(&desk.command(&args).output().unwrap());
        losses(&desk, name.strip_prefix("name=").unwrap())
    };
    // Devices draw other numbers for A, which counts from the second loss on.
    let (gpu, cpu) = (losses("vulkan:0"), losses("cpu"));
    assert!((gpu[0] - cpu[0]).abs() < 1e-4, "{gpu:?} {cpu:?}");
    assert!(gpu[11] < 0.8 * gpu[0] && cpu[11] < 0.8 * cpu[0], "{gpu:?} {cpu:?}");
}

/// The config of a released model, on the tiny one of its family.
#[test]
fn the_config_for_a_released_model_runs() {
    let desk = desk("");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/lm/qwen3_5_0_8b_lora.toml");
    let set = |split: &str| {
        format!(
            "task.language_modelling.{split}=[{{ text = ['text.txt'], length = 24, examples = 8 }}]"
        )
    };
    let sets = [set("train"), set("test"), "model.from=runs/qwen".into(), "train.steps=2".into()];
    let sets = sets.iter().flat_map(|set| ["--set", set.as_str()]);
    let fixed = ["--config", config.to_str().unwrap(), "--device", "cpu"];
    let args: Vec<&str> = fixed.into_iter().chain(sets).collect();
    well(&desk.command(&args).output().unwrap());
    assert!(desk.path("runs/qwen3_5_0_8b_lora/base.safetensors").exists());
}
