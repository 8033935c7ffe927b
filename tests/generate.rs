//! The command `generate`: text goes on from its state, ends where it has to, and is refused by name.

use crate::desk::{Desk, json, text};
use serde_json::Value;
use std::fs;
use std::process::{Command, Output};

/// A run of bytes that takes seconds; too few steps to learn more than which letters there are.
const BYTES: &str = r#"
seed = 3
[task.language_modelling]
train = [{ text = ["text.txt"], length = 32, examples = 320 }]
test = [{ text = ["text.txt"], length = 32, examples = 4 }]
[model]
d_model = 16
[[model.layers]]
mixer.gated_deltanet = { heads = 2 }
[train]
steps = 40
batch_size = 8
[optimizer]
learning_rate = 1e-2
[evaluate]
every_steps = 40
"#;

fn of_bytes() -> Desk {
    let desk = Desk::with(BYTES);
    fs::write(desk.path("text.txt"), "a cat sat on a mat, and so on. ".repeat(40)).unwrap();
    desk.run_well(&[]);
    desk
}

fn command(desk: &Desk, args: &[&str]) -> Command {
    let fixed = ["--run", "runs/tiny", "--device", "cpu"];
    desk.program(env!("CARGO_BIN_EXE_generate"), &[&fixed, args].concat())
}

fn written(desk: &Desk, args: &[&str]) -> String {
    let output = command(desk, args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn refused(output: &Output, parts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: ") && !said.contains("panicked"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(text(&output.stdout), "");
    for part in parts {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

#[test]
fn the_command_writes_text_and_goes_on_from_its_state() {
    let desk = of_bytes();
    let of = |args: &[&str]| -> Value {
        serde_json::from_str(&written(&desk, &[args, &["--json"]].concat())).unwrap()
    };
    // Likely ids alone: letters.
    let (prompt, sampling) = (["--prompt", "a cat "], ["--seed", "7", "--top-k", "6"]);
    let whole = [&prompt[..], &sampling, &["--tokens", "40"]].concat();
    let first = [&prompt[..], &sampling, &["--tokens", "15", "--save-state", "cat"]].concat();
    let rest = [&["--state", "cat"][..], &sampling, &["--tokens", "25"]].concat();
    let (whole_text, first_text) = (written(&desk, &whole), written(&desk, &first));
    let rest_text = written(&desk, &rest);
    assert_eq!(whole_text.len(), 41, "a line: {whole_text:?}");
    assert_eq!(format!("{}{rest_text}", first_text.trim_end_matches('\n')), whole_text);
    let (whole, rest) = (of(&whole), of(&rest));
    assert_eq!(whole["texts"][0]["text"], whole_text.trim_end_matches('\n'));
    let ids = |report: &Value| report["texts"][0]["ids"].as_array().unwrap().clone();
    assert_eq!(ids(&whole)[15..], ids(&rest)[..]);

    let two = ["--prompt", "a", "--prompt", "on a mat", "--tokens", "5", "--top-k", "6"];
    let report = of(&two);
    assert_eq!(report["texts"].as_array().unwrap().len(), 2);
    assert_eq!(report["texts"][1]["prompt"], "on a mat");
    assert_eq!((&report["prompt_tokens"], &report["path"]), (&9.into(), &"tensor ops".into()));
    assert_eq!(report["texts"][0]["finish"], "length");
    let state = json(&desk.path("runs/tiny/summary.json"))["state_bytes"].clone();
    assert_eq!(report["state_bytes"], state);
    fs::write(desk.path("prompt.txt"), "on a mat").unwrap();
    let both = ["--prompt", "a", "--prompt-file", "prompt.txt", "--tokens", "5"];
    let several = written(&desk, &both);
    assert!(several.contains("[1] ") && several.contains("\n[2] "), "{several}");
}

#[test]
fn the_command_ends_a_text_before_a_stop() {
    let desk = of_bytes();
    let greedy = ["--prompt", "a cat", "--tokens", "30", "--temperature", "0"];
    let whole = written(&desk, &greedy);
    let whole = whole.trim_end_matches('\n');
    // Cut at a letter that comes somewhere in the middle.
    let stop = whole.chars().nth(4).unwrap().to_string();
    let cut = written(&desk, &[&greedy[..], &["--stop", &stop]].concat());
    assert_eq!(cut, format!("{}\n", whole.split(&stop).next().unwrap()));
    let cut = written(&desk, &[&greedy[..], &["--stop", &stop, "--json"]].concat());
    let report: Value = serde_json::from_str(&cut).unwrap();
    assert_eq!(report["texts"][0]["finish"], "stopped");
}

#[test]
fn a_model_of_ids_takes_and_writes_ids() {
    let desk = Desk::new();
    desk.run_well(&[]);
    let line = written(&desk, &["--prompt", "1, 2 40", "--tokens", "7", "--top-k", "5"]);
    let ids: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert!(ids.len() == 7 && ids.iter().all(|&id| id < 64), "{line}");
    let refuse = |args: &[&str], parts: &[&str]| {
        refused(&command(&desk, args).output().unwrap(), parts);
    };
    refuse(&["--prompt", "1 64"], &["token 64", "below 64"]);
    refuse(&["--prompt", "1 two"], &["--prompt", "two", "0 to 63"]);
    refuse(&["--prompt", " "], &["--prompt", "empty"]);
    refuse(&[], &["--prompt", "--state"]);
    refuse(&["--prompt", "1", "--stop", "2"], &["--stop"]);
    refuse(&["--prompt", "1", "--top-p", "0"], &["top_p", "above 0"]);
    refuse(&["--prompt", "1", "--temperature=-1"], &["temperature"]);
    refuse(&["--prompt", "1", "--prompt", "2", "--save-state", "x"], &["--save-state"]);
    refuse(&["--prompt", "1", "--state", "none.state"], &["none.state"]);
    fs::write(desk.path("bad.state"), "no state").unwrap();
    refuse(&["--prompt", "1", "--state", "bad.state"], &["bad.state"]);
    refuse(&["--prompt-file", "none.txt"], &["none.txt"]);
    refuse(&["--prompt", "1", "--checkpoint", "7"], &["step 7"]);
    let elsewhere = ["--run", "runs/none", "--prompt", "1", "--device", "cpu"];
    let program = env!("CARGO_BIN_EXE_generate");
    refused(&desk.program(program, &elsewhere).output().unwrap(), &["runs/none"]);
}

#[cfg(unix)]
#[test]
fn a_state_takes_the_place_of_nothing_but_a_file() {
    use std::os::unix::fs::FileTypeExt;
    let desk = of_bytes();
    let args = |path: &'static str| ["--prompt", "a", "--tokens", "3", "--save-state", path];
    let made = desk.program("mkfifo", &["pipe"]).status().unwrap();
    assert!(made.success());
    fs::create_dir(desk.path("folder")).unwrap();
    std::os::unix::fs::symlink("/dev/null", desk.path("null")).unwrap();
    std::os::unix::fs::symlink("kept", desk.path("link")).unwrap();
    std::os::unix::fs::symlink("nothing", desk.path("dangling")).unwrap();
    fs::write(desk.path("kept"), "").unwrap();
    for path in ["pipe", "folder", "null", "dangling", "/dev/null"] {
        let output = command(&desk, &args(path)).output().unwrap();
        refused(&output, &[path, "it is no file"]);
    }
    assert!(fs::symlink_metadata(desk.path("pipe")).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(desk.path("null")).unwrap().is_symlink());
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    written(&desk, &args("link"));
    assert!(fs::symlink_metadata(desk.path("link")).unwrap().is_symlink());
    written(&desk, &["--state", "kept", "--tokens", "3"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_text_and_saves_its_state() {
    use std::io::Read;
    use std::process::Stdio;

    let desk = of_bytes();
    let args = ["--prompt", "a", "--tokens", "100000000", "--temperature", "0"];
    let mut child = command(&desk, &[&args[..], &["--save-state", "long.state"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0]).unwrap(); // it has begun
    let id = child.id().to_string();
    let kill = ["-c", r#"kill -INT "$1""#, "sh", &id];
    let killed = Command::new("sh").args(kill).status().unwrap();
    assert!(killed.success());
    let mut rest = vec![];
    out.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_eq!(rest.last(), Some(&b'\n'));
    written(&desk, &["--state", "long.state", "--tokens", "3", "--top-k", "6"]);
}
