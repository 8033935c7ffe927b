//! `eval`, `data` and `sweep` as a person uses them.

use crate::desk::{Desk, TINY, json, text};
use serde_json::Value;
use std::fs;
use std::process::Output;

/// A desk with the tiny run trained.
fn trained() -> Desk {
    let desk = Desk::new();
    desk.run_well(&[]);
    desk
}

fn eval(desk: &Desk, args: &[&str]) -> Output {
    let fixed = ["--run", "runs/tiny", "--device", "cpu"];
    desk.program(env!("CARGO_BIN_EXE_eval"), &[&fixed, args].concat()).output().unwrap()
}

/// The metrics of an evaluation.
fn evaluated(desk: &Desk, args: &[&str]) -> Value {
    let output = eval(desk, &[args, &["--json", "out.json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    json(&desk.path("out.json"))["metrics"].clone()
}

fn data(desk: &Desk, args: &[&str]) -> Output {
    let fixed = ["--config", "tiny.toml"];
    desk.program(env!("CARGO_BIN_EXE_data"), &[&fixed, args].concat()).output().unwrap()
}

fn refused(output: &Output, parts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: ") && !said.contains("panicked"), "{said}");
    for part in parts {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

#[test]
fn an_evaluation_afterwards_gives_what_the_run_gave() {
    let desk = trained();
    let summary = desk.summary("tiny");
    let last = evaluated(&desk, &["--checkpoint", "last"]);
    for (key, value) in last.as_object().unwrap() {
        assert_eq!(value, &summary["metrics"][key], "{key}");
    }
    let best = evaluated(&desk, &[]);
    assert_eq!(best["test/accuracy"], summary["best_score"], "the best checkpoint by default");
}

#[test]
fn sequences_in_parts_have_the_scores_of_whole_ones() {
    let desk = trained();
    let whole = evaluated(&desk, &[]);
    for window in [1, 5, 16, 23] {
        let parts = evaluated(&desk, &["--set", &format!("evaluate.window={window}")]);
        for (key, want) in whole.as_object().unwrap() {
            let (want, got) = (want.as_f64().unwrap(), parts[key].as_f64().unwrap());
            assert!((want - got).abs() < 1e-4, "{key} in parts of {window}: {got}, not {want}");
        }
    }
}

#[test]
fn a_model_can_be_tested_on_other_data_than_it_was_trained_on() {
    let desk = trained();
    let longer = "task.mqar.test=[{ length = 40, pairs = 2, examples = 12 }]";
    let metrics = evaluated(&desk, &["--set", longer]);
    assert!(metrics["test/40x2/accuracy"].is_number(), "{metrics}");
    std::fs::write(
        desk.path("other.toml"),
        TINY.replace("length = 24, pairs = 3", "length = 32, pairs = 1"),
    )
    .unwrap();
    let metrics = evaluated(&desk, &["--task-from", "other.toml", "--examples", "4"]);
    assert!(metrics["test/32x1/exact"].is_number(), "{metrics}");
    let both = evaluated(&desk, &["--split", "train,test", "--examples", "8"]);
    assert!(both["train/16x2/loss"].is_number() && both["test/loss"].is_number(), "{both}");
}

#[test]
fn an_evaluation_that_cannot_be_is_refused_by_name() {
    let desk = trained();
    refused(&eval(&desk, &["--set", "model.d_model=32"]), &["model.d_model", "32", "16"]);
    refused(&eval(&desk, &["--set", "train.batch_size=2"]), &["train.batch_size"]);
    refused(&eval(&desk, &["--set", "task.mqar.vocab=128"]), &["128", "64"]);
    refused(&eval(&desk, &["--set", "task.mqar.test=[]"]), &["task.mqar.test"]);
    refused(&eval(&desk, &["--checkpoint", "7"]), &["step 7", "there are"]);
    refused(&eval(&desk, &["--split", "validation"]), &["--split", "validation"]);
    refused(&eval(&desk, &["--generate"]), &["--generate"]);
    let nowhere = desk
        .program(env!("CARGO_BIN_EXE_eval"), &["--run", "runs/none", "--device", "cpu"])
        .output()
        .unwrap();
    refused(&nowhere, &["runs/none"]);
}

#[test]
fn examples_are_shown_with_their_answers_under_them() {
    let output = data(&Desk::new(), &["--count", "2"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(said.matches("16 tokens, 2 scored").count(), 2, "{said}");
    assert!(text(&output.stderr).contains("24x3"), "the other set is named");
}

#[test]
fn examples_for_programs_are_one_object_a_line() {
    let desk = Desk::new();
    let lines = |args: &[&str]| -> Vec<Value> {
        let output = data(&desk, &[&["--format", "jsonl"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let five = lines(&["--subset", "24x3"]);
    assert_eq!(five.len(), 5);
    for (i, line) in five.iter().enumerate() {
        assert_eq!(line["index"], i);
        let (input, target) =
            (line["input"].as_array().unwrap(), line["target"].as_array().unwrap());
        assert_eq!((input.len(), target.len()), (24, 24));
        assert_eq!(target.iter().filter(|t| **t != -100).count(), 3);
    }
    assert_eq!(lines(&["--subset", "24x3", "--first", "3", "--count", "2"]), five[3..]);
    assert_eq!(lines(&["--count", "300"]).len(), 300, "more than the set has");
}

#[test]
fn figures_and_mistakes_of_data() {
    let desk = Desk::new();
    let output = data(&desk, &["--stats", "--count", "100"]);
    assert!(text(&output.stdout).contains("scored positions, mean"), "{}", text(&output.stdout));
    refused(&data(&desk, &["--subset", "8x1"]), &["--subset", "8x1", "16x2"]);
    refused(&data(&desk, &["--split", "validation"]), &["validation"]);
    refused(&data(&desk, &["--set", "task.mqar.vocab=3"]), &["task.mqar"]);
}

/// Four runs, two of them with dropout, whose random numbers come with every step.
const SWEEP: &str = r#"
base = "../tiny.toml"
scaled_down = "a test"

[grid]
model.embedding_dropout = [0.1, 0.0]
seed = [0, 1]

[select]
rule = "published"
replicate = "seed"
"#;

/// The rows of a sweep by so many jobs, without what depends on the clock, and what it said.
fn swept(desk: &Desk, jobs: &str) -> (Vec<String>, String) {
    let folder = desk.path(&format!("jobs_{jobs}"));
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("sweep.toml"), SWEEP).unwrap();
    let config = format!("jobs_{jobs}/sweep.toml");
    let args = ["--config", &config, "--devices", "cpu", "--jobs", jobs];
    let output = desk.program(env!("CARGO_BIN_EXE_sweep"), &args).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let rows = fs::read_to_string(folder.join("rows.csv")).unwrap();
    let columns: Vec<&str> = rows.lines().next().unwrap().split(',').collect();
    let timed = |i: &usize| ["wall_seconds", "tokens_per_second"].contains(&columns[*i]);
    let line = |line: &str| {
        let values: Vec<&str> = line.split(',').collect();
        assert_eq!(values.len(), columns.len(), "{line}");
        let kept = (0..values.len()).filter(|i| !timed(i)).map(|i| values[i]);
        kept.collect::<Vec<_>>().join(",")
    };
    (rows.lines().map(line).collect(), said)
}

#[test]
fn rows_are_the_same_however_many_runs_go_on_at_once() {
    let desk = Desk::new();
    let (one, _) = swept(&desk, "1");
    let (three, said) = swept(&desk, "3");
    assert_eq!(one.len(), 5, "{one:?}");
    assert_eq!(one, three);
    for seed in [0, 1] {
        let run = format!("model.embedding_dropout = 0.1, seed = {seed}");
        assert!(said.contains(&format!("started on cpu: {run}\n")), "{said}");
        assert!(said.contains(&format!("{run}: accuracy ")), "{said}");
    }
}
