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

/// The output of a command, as JSON.
fn printed(desk: &Desk, program: &str, args: &[&str]) -> Value {
    let output = desk.program(program, args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}"))
}

#[test]
fn scripts_get_the_figures_that_people_get() {
    let desk = Desk::new();
    let train = |args: &[&str]| {
        let fixed = ["--config", "tiny.toml", "--device", "cpu", "--json"];
        printed(&desk, env!("CARGO_BIN_EXE_train"), &[&fixed, args].concat())
    };
    let cost = train(&["--dry-run"]);
    assert_eq!((&cost["name"], &cost["device"]), (&"tiny".into(), &"cpu".into()));
    assert_eq!(cost["cost"]["steps"], 60, "{cost}");
    let summary = train(&["--progress", "quiet"]);
    assert_eq!(summary, desk.summary("tiny"));
    assert_eq!(summary["parameters"], cost["cost"]["parameters"]);
    let fixed = ["--run", "runs/tiny", "--device", "cpu"];
    let evaluated = [&fixed[..], &["--checkpoint", "last", "--json", "-"]].concat();
    let evaluated = printed(&desk, env!("CARGO_BIN_EXE_eval"), &evaluated);
    assert_eq!(evaluated["metrics"]["test/accuracy"], summary["metrics"]["test/accuracy"]);
    let figures = data(&desk, &["--stats", "--format", "jsonl"]);
    let figures = text(&figures.stdout);
    let lines: Vec<Value> = figures.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let scored = lines.iter().find(|line| line["name"] == "scored positions, mean").unwrap();
    assert_eq!(scored["value"], 2.0, "two pairs are asked for");
}

#[test]
fn a_plan_for_scripts_says_what_is_done_and_what_is_left() {
    let desk = Desk::new();
    let plan = |folder: &str| {
        let config = format!("{folder}/sweep.toml");
        let args = ["--config", &config, "--dry-run", "--json"];
        printed(&desk, env!("CARGO_BIN_EXE_sweep"), &args)
    };
    fs::create_dir(desk.path("fresh")).unwrap();
    fs::write(desk.path("fresh/sweep.toml"), SWEEP).unwrap();
    let fresh = plan("fresh");
    assert_eq!(
        (&fresh["left"], &fresh["unknown"], &fresh["steps"]),
        (&4.into(), &4.into(), &240.into())
    );
    assert_eq!(fresh["runs"][0]["status"], Value::Null);
    let (_rows, _said) = swept(&desk, "1");
    let done = plan("jobs_1");
    assert_eq!((&done["left"], &done["steps"]), (&0.into(), &0.into()));
    let runs = done["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    assert!(runs.iter().all(|run| run["status"] == "completed"), "{done}");
    assert_eq!(runs[0]["settings"]["seed"], "0");
}

#[test]
fn a_report_is_also_one_page_that_loads_nothing() {
    let desk = Desk::new();
    let (_rows, _said) = swept(&desk, "1");
    let figure = "\n[[report.figures]]\nkind = \"bars\"\n";
    let sweep = fs::read_to_string(desk.path("jobs_1/sweep.toml")).unwrap() + figure;
    fs::write(desk.path("jobs_1/sweep.toml"), sweep).unwrap();
    let args = ["jobs_1", "--html", "page.html"];
    let output = desk.program(env!("CARGO_BIN_EXE_report"), &args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("wrote page.html"), "{}", text(&output.stdout));
    let page = fs::read_to_string(desk.path("page.html")).unwrap();
    assert!(
        page.contains("<table>") && page.contains("src=\"data:image/svg+xml;base64,"),
        "{page}"
    );
    for source in page.split("src=\"").skip(1) {
        assert!(source.starts_with("data:"), "{:?}", &source[..40]);
    }
}

#[test]
fn the_doctor_tries_the_processor() {
    let desk = Desk::new();
    let doctor = |args: &[&str]| printed(&desk, env!("CARGO_BIN_EXE_doctor"), args);
    let tried = doctor(&["--devices", "cpu", "--json"]);
    let cpu = &tried["devices"][0];
    assert_eq!(cpu["name"], "cpu");
    let found = &cpu["found"];
    assert!(found["types"].as_array().unwrap().contains(&"f32".into()), "{found}");
    for figure in ["product_gflops", "first_step_seconds", "step_seconds", "tokens_per_second"] {
        assert!(found[figure].as_f64().unwrap() > 0.0, "{figure}: {found}");
    }
    let listed = doctor(&["--list", "--json"]);
    assert_eq!(listed["devices"][0]["name"], "cpu");
    assert!(listed["devices"].as_array().unwrap().iter().all(|d| d["found"] == Value::Null));
    let missing = |feature: &str| {
        listed["without"].as_array().unwrap().iter().any(|w| w["feature"] == feature)
    };
    assert_eq!(missing("rocm"), cfg!(not(feature = "rocm")));
    let program = env!("CARGO_BIN_EXE_doctor");
    let wrong = desk.program(program, &["--devices", "gpu"]).output().unwrap();
    refused(&wrong, &["`gpu`", "cuda:N"]);
}

#[test]
fn a_command_writes_its_own_pages() {
    let desk = Desk::new();
    let page = |program: &str, kind: &str| {
        let output = desk.program(program, &["--generate-page", kind]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert!(page(env!("CARGO_BIN_EXE_train"), "man").contains(".TH train 1"));
    assert!(page(env!("CARGO_BIN_EXE_convert"), "man").contains(".TH convert-import 1"));
    assert!(page(env!("CARGO_BIN_EXE_sweep"), "complete-fish").contains("retry-failed"));
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
