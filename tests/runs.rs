//! The command as a person uses it: runs, cuts, resumes, and every mistake they can make.

use crate::desk::{Desk, TINY, comes, signal, text};
use std::fs;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

#[test]
fn a_run_leaves_everything_it_should() {
    let desk = Desk::new();
    desk.run_well(&[]);
    let summary = desk.summary("tiny");
    assert_eq!(summary["status"], "completed");
    assert_eq!(summary["steps"], 60);
    assert_eq!((&summary["seed"], &summary["device"]), (&3.into(), &"cpu".into()));
    assert_eq!(summary["path"], "tensor ops");
    for key in ["score", "best_score", "tokens_per_second", "wall_seconds"] {
        assert!(summary[key].is_number(), "{key}: {}", summary[key]);
    }
    assert_eq!(summary["score"], summary["metrics"]["test/accuracy"]);
    assert!(summary["metrics"]["test/24x3/accuracy"].is_number(), "each set has its metrics");
    assert!(summary["parameters"].as_u64().unwrap() > 1000);
    assert!(summary["state_bytes"].as_u64().unwrap() > 100);
    let metrics = desk.metrics("tiny");
    let of_kind = |kind: &str| metrics.iter().filter(|line| line["kind"] == kind).count();
    assert_eq!((of_kind("train"), of_kind("evaluation")), (60, 9));
    for file in ["config.toml", "curve.svg", "curve.png"] {
        assert!(desk.path("runs/tiny").join(file).metadata().unwrap().len() > 100, "{file}");
    }
    let kept = fs::read_dir(desk.path("runs/tiny/checkpoints")).unwrap().count();
    assert!((2..=3).contains(&kept), "{kept} checkpoints: the two newest, and the best");
}

#[test]
fn one_seed_gives_one_result_and_another_gives_another() {
    let desk = Desk::new();
    desk.run_well(&["--set", "name=a"]);
    desk.run_well(&["--set", "name=b"]);
    desk.run_well(&["--set", "name=c", "--set", "seed=4"]);
    assert_eq!(desk.metrics("a"), desk.metrics("b"));
    assert_eq!(desk.summary("a")["metrics"], desk.summary("b")["metrics"]);
    assert_ne!(desk.metrics("a"), desk.metrics("c"));
}

/// Of everything that a step on the processor goes through, with as many threads as a batch has parts, fewer and more.
#[test]
fn the_number_of_threads_changes_no_bit_of_a_run() {
    let layers = r#"
[[model.layers]]
mixer.gated_deltanet = { heads = 2 }
mlp = { swiglu = {} }
[[model.layers]]
mixer.attention = { heads = 2, rope_theta = 1e4 }
[[model.layers]]
mixer.gla = { heads = 2 }
mlp = { geglu = {} }
[[model.layers]]
mixer.mamba = {}
[[model.layers]]
mixer.slstm = { heads = 2 }
"#;
    let desk = Desk::with(
        &TINY
            .replace(
                "length = 16, pairs = 2, examples = 160",
                "length = 64, pairs = 4, examples = 160",
            )
            .replace("vocab = 64", "vocab = 256")
            .replace("d_model = 16", "d_model = 64")
            .replace("[[model.layers]]\nrepeat = 2\nmixer.gated_deltanet = { heads = 2 }\n", layers)
            .replace("epochs = 3\nbatch_size = 8", "epochs = 1\nbatch_size = 32"),
    );
    let weights = |threads: &str| {
        let name = format!("name=threads_{threads}");
        let mut command =
            desk.command(&["--config", "tiny.toml", "--device", "cpu", "--set", &name]);
        let output = command.env("RAYON_NUM_THREADS", threads).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let run = format!("runs/threads_{threads}/checkpoints/step-0000000005/model.safetensors");
        fs::read(desk.path(&run)).unwrap()
    };
    let one = weights("1");
    for threads in ["4", "6"] {
        assert!(weights(threads) == one, "{threads} threads give other weights than one");
        let name = format!("threads_{threads}");
        assert_eq!(desk.metrics(&name), desk.metrics("threads_1"), "{threads} threads");
    }
}

#[test]
fn dropout_and_clipping_and_order_repeat_too() {
    for order in ["fixed", "fresh", "shuffled"] {
        let order = format!("train.order={order}");
        let desk = Desk::new();
        let changes = [
            "--set",
            "model.embedding_dropout=0.1",
            "--set",
            "train.clip_norm=0.5",
            "--set",
            "optimizer.decay=matrices",
            "--set",
            &order,
        ];
        desk.run_well(&[&changes[..], &["--set", "name=a"]].concat());
        desk.run_well(&[&changes[..], &["--set", "name=b"]].concat());
        assert_eq!(desk.metrics("a"), desk.metrics("b"), "{order}");
    }
}

#[test]
fn a_batch_in_parts_is_the_same_batch() {
    let desk = Desk::new();
    desk.run_well(&["--set", "name=whole"]);
    desk.run_well(&["--set", "name=parts", "--set", "train.accumulate=8"]);
    let loss = |name| desk.metrics(name)[10]["loss"].as_f64().unwrap();
    let (whole, parts) = (loss("whole"), loss("parts"));
    assert!((whole - parts).abs() < 1e-3 * whole, "{whole} and {parts}");
}

#[cfg(unix)]
#[test]
fn a_killed_run_goes_on_to_the_same_bits() {
    let desk = Desk::new();
    desk.run_well(&["--set", "name=unbroken"]);
    let wanted = desk.summary("unbroken");
    // Kill it as soon as it has something to go on with, whatever the machine's speed; then again
    // and again, each time a little later, until it gets through.
    let args = ["--config", "tiny.toml", "--device", "cpu", "--set", "name=broken"];
    let has_checkpoint = || {
        let begun = desk.path("runs/broken/checkpoints").read_dir();
        begun.is_ok_and(|mut list| list.any(|entry| whole_checkpoint(&entry)))
    };
    let mut kills = 0;
    for attempt in 0.. {
        let how = if has_checkpoint() { "--resume" } else { "--overwrite" };
        let mut child = desk
            .command(&[&args[..], &[how]].concat())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        match attempt {
            0 => assert!(comes(has_checkpoint), "there is no checkpoint after five minutes"),
            _ => sleep(Duration::from_millis(150 + 90 * attempt)),
        }
        if child.try_wait().unwrap().is_some() {
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        assert!(kills < 60, "it never gets through");
    }
    assert!(kills > 0, "the run was over before it could be killed");
    let got = desk.summary("broken");
    assert_eq!(got["status"], "completed");
    assert_eq!(got["metrics"], wanted["metrics"]);
    assert_eq!(got["best_step"], wanted["best_step"]);
    assert_eq!(desk.metrics("broken"), desk.metrics("unbroken"));
}

#[cfg(unix)]
fn whole_checkpoint(entry: &std::io::Result<fs::DirEntry>) -> bool {
    entry.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().starts_with("step-"))
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_resuming_gives_the_same_bits() {
    let desk = Desk::new();
    desk.run_well(&["--set", "name=unbroken"]);
    let args = ["--config", "tiny.toml", "--device", "cpu", "--set", "name=broken"];
    let child = desk.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = desk.path("runs/broken/metrics.jsonl");
    let lines = || fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
    assert!(comes(|| lines() > 8), "{} lines of metrics after five minutes", lines());
    signal("INT", &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("--resume"), "{}", text(&output.stdout));
    let summary = desk.summary("broken");
    assert_eq!(summary["status"], "interrupted");
    assert!(summary["steps"].as_u64().unwrap() < 60);
    desk.run_well(&["--set", "name=broken", "--resume"]);
    assert_eq!(desk.metrics("broken"), desk.metrics("unbroken"));
    assert_eq!(desk.summary("broken")["metrics"], desk.summary("unbroken")["metrics"]);
}

#[test]
fn a_finished_run_can_be_resumed_and_stays_as_it_is() {
    let desk = Desk::new();
    desk.run_well(&[]);
    let before = (desk.metrics("tiny"), desk.summary("tiny")["metrics"].clone());
    desk.run_well(&["--resume"]);
    assert_eq!(before, (desk.metrics("tiny"), desk.summary("tiny")["metrics"].clone()));
}

#[test]
fn training_ends_early_when_the_score_is_good_enough_or_stale() {
    let desk = Desk::new();
    desk.run_well(&["--set", "name=good", "--set", "evaluate.stop_above=-1"]);
    let good = desk.summary("good");
    assert_eq!((&good["status"], &good["steps"]), (&"stopped_early".into(), &7.into()));
    let still = ["--set", "optimizer.learning_rate=1e-12", "--set", "evaluate.patience=2"];
    desk.run_well(&[&still[..], &["--set", "name=stale"]].concat());
    let stale = desk.summary("stale");
    assert_eq!((&stale["status"], &stale["steps"]), (&"stopped_early".into(), &21.into()));
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint() {
    let desk = Desk::new();
    let output = desk.run(&["--set", "optimizer.learning_rate=1e38"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("diverged"), "{}", text(&output.stderr));
    assert_eq!(desk.summary("tiny")["status"], "diverged");
    assert!(!desk.path("runs/tiny/checkpoints/unfinished").exists());
}

#[test]
fn the_printed_config_makes_the_same_run() {
    let desk = Desk::new();
    let output = desk.run(&["--print-config", "--set", "train.clip_norm=1.0"]);
    assert!(output.status.success());
    let printed = text(&output.stdout);
    fs::write(desk.path("tiny.toml"), &printed).unwrap();
    assert_eq!(text(&desk.run(&["--print-config"]).stdout), printed);
    assert!(printed.contains("clip_norm = 1.0"), "{printed}");
}

#[test]
fn a_dry_run_counts_and_writes_nothing() {
    let desk = Desk::new();
    let before = desk.files();
    let output = desk.run(&["--dry-run"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for part in ["parameters", "bytes a sequence", "FLOPs a token", "128 tokens, 16 scored", "MiB"]
    {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
    assert_eq!(desk.files(), before);
}

/// Refused with exit code 2, one clear error that says each of `parts`, no panic, and nothing
/// written that was not there.
fn refused(desk: &Desk, args: &[&str], parts: &[&str]) {
    let before = desk.files();
    let output = desk.run(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "{args:?}: {said:?} does not say {part:?}");
    }
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    let errors = said.lines().filter(|line| line.starts_with("error")).count();
    assert_eq!(errors, 1, "{args:?}: {said}");
    assert_eq!(desk.files(), before, "{args:?} left files");
}

#[test]
fn wrong_values_are_refused_by_key() {
    let desk = Desk::new();
    let layer = |mixer: &str| format!("model.layers.0.mixer={{ {mixer} }}");
    let cell = |cell: &str| format!("task.mqar.train=[{{ {cell} }}]");
    let cases: Vec<(String, Vec<&str>)> = vec![
        ("train.batchsize=8".into(), vec!["batchsize", "batch_size"]),
        ("train.batch_size='many'".into(), vec!["many", "usize"]),
        ("train.batch_size=0".into(), vec!["`train.batch_size` is 0", "at least 1"]),
        ("train.steps=10".into(), vec!["`train.steps`", "train.epochs"]),
        ("train.accumulate=9".into(), vec!["`train.accumulate` is 9", "at most"]),
        ("train.clip_norm=-1".into(), vec!["`train.clip_norm` is -1", "above 0"]),
        ("train.order=sorted".into(), vec!["sorted", "shuffled"]),
        ("optimizer.learning_rate=-0.1".into(), vec!["`optimizer.learning_rate` is -0.1"]),
        ("optimizer.beta_2=1.0".into(), vec!["`optimizer.beta_2` is 1", "below 1"]),
        ("schedule.floor=2".into(), vec!["`schedule.floor` is 2", "0 to 1"]),
        ("evaluate.select_on=validation".into(), vec!["`evaluate.select_on` is validation"]),
        ("checkpoint.keep=0".into(), vec!["`checkpoint.keep` is 0"]),
        ("name=a/b".into(), vec!["`name`", "folder"]),
        ("model.d_model=0".into(), vec!["`model.d_model` is 0"]),
        ("model.d_model=9999999".into(), vec!["`model.d_model` is 9999999", "at most"]),
        ("model.layers=[]".into(), vec!["`model.layers` is empty"]),
        ("model.layers.0.repeat=0".into(), vec!["`model.layers[0].repeat` is 0"]),
        (
            layer("gated_deltanet = { heads = 3 }"),
            vec!["gated_deltanet.heads` is 3", "d_model = 16"],
        ),
        (layer("gated_deltanet = { heads = 2, value_heads = 3 }"), vec!["value_heads` is 3"]),
        (
            layer("gated_deltanet = { heads = 2, chunk = 48 }"),
            vec!["unknown field `chunk`", "`conv_size`"],
        ),
        (layer("deltanet = { expand_v = 0.3 }"), vec!["deltanet.expand_v` is 0.3", "whole"]),
        (layer("mamba2 = { head_width = 5 }"), vec!["mamba2.head_width` is 5", "32"]),
        (layer("retnet = { key_width = 5 }"), vec!["retnet.key_width` is 5", "even"]),
        (layer("attention = { heads = 2, key_value_heads = 4 }"), vec!["key_value_heads` is 4"]),
        (layer("gated_delta = { heads = 2 }"), vec!["gated_delta", "gated_deltanet"]),
        (layer("deltanet = { head = 2 }"), vec!["head", "heads"]),
        (cell("length = 16, pairs = 5, examples = 8"), vec!["task.mqar.train[0].pairs"]),
        (cell("length = 15, pairs = 2, examples = 8"), vec!["task.mqar.train[0].length"]),
        ("task.mqar.vocab=8".into(), vec!["task.mqar.vocab"]),
        ("task.mqar.filler=noise".into(), vec!["noise", "random"]),
        ("seed".into(), vec!["--set seed", "key=value"]),
        ("model.layers.1.repeat=2".into(), vec!["`1` has to be a place in a list of 1"]),
        ("seed.x=1".into(), vec!["below a plain value"]),
    ];
    for (change, parts) in &cases {
        refused(&desk, &["--set", change], parts);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_that_no_memory_holds_is_refused_before_it_starts() {
    let desk = Desk::new();
    refused(&desk, &["--set", "model.d_model=1000000"], &["GiB of memory", "`model.d_model`"]);
    let batch = ["--set", "train.batch_size=100000000000"];
    refused(&desk, &batch, &["GiB of memory", "`train.batch_size`"]);
}

#[test]
fn files_and_devices_that_are_not_there_are_refused_by_name() {
    let desk = Desk::new();
    let output = desk.command(&["--config", "absent.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("absent.toml"), "{}", text(&output.stderr));

    let device = |name: &str, parts: &[&str]| {
        let output = desk.command(&["--config", "tiny.toml", "--device", name]).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "{name}: {said}"));
    };
    device("gpu", &["`gpu`", "cuda:N"]);
    device("cpu:1", &["`cpu:1`", "only one"]);
    device("cuda:x", &["`x` is no number"]);
    device("cpu,cpu", &["named twice"]);
    if cfg!(not(feature = "cuda")) {
        device("cuda", &["not compiled in", "--features cuda"]);
    }
    if cfg!(not(feature = "rocm")) {
        device("rocm:0", &["not compiled in", "--features rocm"]);
    }
    if cfg!(all(feature = "wgpu", not(target_vendor = "apple"))) {
        device("vulkan:99", &["`vulkan:99`", "adapters are there"]);
        device("metal", &["vulkan:N"]);
    }
    assert!(!desk.path("runs").exists());

    fs::write(desk.path("file"), "").unwrap();
    refused(&desk, &["--out", "file"], &["can't create the folder", "file"]);
    fs::write(desk.path("tiny.toml"), "seed = = 3").unwrap();
    refused(&desk, &[], &["tiny.toml is no run config", "line 1"]);
    fs::write(desk.path("tiny.toml"), TINY.replace("log_every", "log_evry")).unwrap();
    refused(&desk, &[], &["log_evry", "log_every"]);
}

#[test]
fn a_folder_with_another_run_or_a_broken_one_is_left_alone() {
    let desk = Desk::new();
    refused(&desk, &["--resume"], &["no checkpoint to resume", "leave out --resume"]);
    desk.run_well(&[]);
    refused(&desk, &[], &["holds a run already (completed)", "--resume", "--overwrite"]);
    refused(&desk, &["--resume", "--set", "model.d_model=32"], &["`model.d_model` = 16", "32"]);
    refused(&desk, &["--resume", "--set", "seed=9"], &["`seed` = 3", "9"]);

    let newest = desk.path("runs/tiny/checkpoints/step-0000000060");
    let damage = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = newest.join(name);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        change(&mut bad);
        fs::write(&path, bad).unwrap();
        let parts = [name, "is corrupt", "step-0000000060"];
        refused(&desk, &["--resume"], &parts);
        fs::write(&path, good).unwrap();
    };
    damage("model.safetensors", &|bytes| bytes[1000] ^= 1);
    damage("optimizer.safetensors", &|bytes| bytes.truncate(50));
    damage("state.json", &|bytes| bytes.truncate(20));
    desk.run_well(&["--resume"]);
    desk.run_well(&["--overwrite"]);
}

#[test]
fn batches_that_are_tested_together_give_the_same_bits() {
    use burn::backend::Flex;
    use linattn_tasks::Split;
    use linattn_trainer::{RunConfig, Testing, build};
    let desk = Desk::new();
    let sets = ["evaluate.batch_size=7".to_string()];
    let run = RunConfig::read(&desk.path("tiny.toml"), &sets).unwrap();
    let task = run.task.build(run.seed).unwrap();
    let learner = build::<Flex>(&run, task.vocab(), &Default::default()).unwrap();
    let found = |at_once| {
        let splits = [Split::Train, Split::Test];
        let testing = Testing { at_once, ..Testing::new(&run, task.as_ref(), &splits) };
        testing.evaluate(&learner, &Default::default()).metrics
    };
    let want = found(1);
    assert!(want.contains_key("test/24x3/loss"), "{want:?}");
    for at_once in [2, 3, 50] {
        assert_eq!(found(at_once), want, "{at_once} at once");
    }
    let testing = Testing::new(&run, task.as_ref(), &[Split::Test]);
    assert_eq!(testing.clone().on(&["cpu"; 4]).at_once, 4);
    assert_eq!(testing.on(&["first", "second"]).at_once, 1);
}

#[test]
fn both_published_variants_of_mqar_can_be_written_down() {
    use linattn_tasks::{MqarConfig, TaskConfig};
    let read = |text: &str| -> TaskConfig { toml::from_str(text).unwrap() };
    let figure = "[mqar]\ntrain = [{ length = 512, pairs = 64, examples = 100_000 }]\n\
                  test = [{ length = 512, pairs = 64, examples = 3_000 }]\n";
    assert_eq!(read(figure), TaskConfig::Mqar(MqarConfig::figure2(512, 64)));
    let cells = |cells: &[(usize, usize, usize)]| -> String {
        let cell = |&(length, pairs, examples): &(usize, usize, usize)| {
            format!("{{ length = {length}, pairs = {pairs}, examples = {examples} }}")
        };
        cells.iter().map(cell).collect::<Vec<_>>().join(", ")
    };
    let train = cells(&[
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    ]);
    let test = cells(&[
        (64, 4, 1000),
        (64, 8, 1000),
        (64, 16, 1000),
        (128, 32, 1000),
        (256, 64, 1000),
        (512, 128, 1000),
        (1024, 256, 1000),
    ]);
    let mix = format!("[mqar]\nfiller = 'random'\ntrain = [{train}]\ntest = [{test}]\n");
    assert_eq!(read(&mix), TaskConfig::Mqar(MqarConfig::based_mix()));
}
