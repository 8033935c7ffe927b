//! Events that must not lose or spoil a run: other processes, dead readers, closed terminals, kills.
#![cfg(unix)]

use crate::desk::{Desk, TINY, comes, signal, text};
#[cfg(target_os = "linux")]
use nix::{
    fcntl::OFlag,
    pty::{grantpt, posix_openpt, ptsname_r, unlockpt},
};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::process::{Child, ExitStatus, Output, Stdio};
#[cfg(target_os = "linux")]
use std::{
    fs::File,
    io::Read,
    process::Command,
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
};

/// A run that lasts until somebody ends it.
fn endless() -> Desk {
    Desk::with(&TINY.replace("epochs = 3", "epochs = 100_000"))
}

pub(crate) const RUN: [&str; 4] = ["--config", "tiny.toml", "--device", "cpu"];

/// Waits until the run has something to lose.
fn has_begun(desk: &Desk, child: &mut Child) {
    let metrics = desk.path("runs/tiny/metrics.jsonl");
    let lines = || fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
    let begun = comes(|| lines() > 12);
    assert!(begun, "{} lines after five minutes, ended: {:?}", lines(), child.try_wait());
}

/// Waits for a process to end, and kills one that does not within five minutes.
pub(crate) fn ended(child: &mut Child) -> ExitStatus {
    let mut ended = None;
    let over = comes(|| {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    if !over {
        child.kill().unwrap();
    }
    ended.expect("it ends within five minutes")
}

/// A summary that says `interrupted`, and a checkpoint of the very last step.
pub(crate) fn lost_nothing(desk: &Desk) {
    let summary = desk.summary("tiny");
    assert_eq!(summary["status"], "interrupted");
    let step = summary["steps"].as_u64().unwrap();
    assert!(desk.path(&format!("runs/tiny/checkpoints/step-{step:010}")).exists(), "step {step}");
    let last = desk.metrics("tiny").iter().filter_map(|line| line["step"].as_u64()).max();
    assert_eq!(last.unwrap_or(0), step, "no step is lost");
}

/// Exit code 130, and nothing is lost.
fn ended_orderly(desk: &Desk, child: &mut Child) {
    assert_eq!(ended(child).code(), Some(130));
    lost_nothing(desk);
}

/// Exit code 2, and one line of error that says all of this.
pub(crate) fn refused(output: &Output, parts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
    parts.iter().for_each(|part| assert!(said.contains(part), "{said:?} does not say {part:?}"));
}

#[test]
fn checkpoints_whose_config_is_gone_are_not_taken_for_a_new_runs() {
    let desk = Desk::new();
    desk.run_well(&[]);
    fs::remove_file(desk.path("runs/tiny/config.toml")).unwrap();
    for how in [&["--set", "seed=9"][..], &["--resume"]] {
        refused(&desk.run(how), &["config.toml is gone", "--overwrite"]);
    }
    desk.run_well(&["--set", "seed=9", "--overwrite"]);
    desk.run_well(&["--set", "seed=9", "--set", "name=fresh"]);
    assert_eq!(desk.metrics("tiny"), desk.metrics("fresh"));
}

#[test]
fn two_processes_never_write_to_one_folder() {
    let desk = endless();
    let mut first = desk.command(&RUN).stderr(Stdio::null()).spawn().unwrap();
    has_begun(&desk, &mut first);
    let owner = format!("process {} is writing", first.id());
    for how in ["--overwrite", "--resume"] {
        refused(&desk.run(&[how]), &[&owner, "runs/tiny"]);
    }
    refused(&desk.run(&[]), &[&owner]);
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = desk.command(&[&RUN[..], &["--resume"]].concat()).spawn().unwrap();
    let owner = desk.path("runs/tiny/.run.pid");
    let id = second.id().to_string();
    assert!(comes(|| fs::read_to_string(&owner).is_ok_and(|owner| owner == id)));
    signal("INT", &second);
    ended_orderly(&desk, &mut second);
    assert!(!owner.exists(), "it leaves nothing of its lock");
}

/// A terminal's two ends. Closing the first, as a window's closing does, kills the terminal.
#[cfg(target_os = "linux")]
pub(crate) struct Terminal {
    open: Arc<AtomicBool>,
    reader: Option<std::thread::JoinHandle<Vec<u8>>>,
    end: File,
}

#[cfg(target_os = "linux")]
impl Terminal {
    pub(crate) fn new() -> Self {
        // No child may hold its other end, or it never closes.
        let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let mut master = posix_openpt(flags).unwrap();
        grantpt(&master).and_then(|()| unlockpt(&master)).unwrap();
        let end = OpenOptions::new().read(true).write(true).open(ptsname_r(&master).unwrap());
        let end = end.unwrap();
        let size = ["rows", "40", "cols", "120"];
        let sized = Command::new("stty").args(size).stdin(end.try_clone().unwrap()).status();
        assert!(sized.unwrap().success());
        let open = Arc::new(AtomicBool::new(true));
        let reading = open.clone();
        // The dashboard draws all the time, so that no read lasts.
        let reader = std::thread::spawn(move || {
            let (mut seen, mut bytes) = (vec![], [0; 4096]);
            while reading.load(Ordering::SeqCst) {
                match master.read(&mut bytes) {
                    Ok(count) if count > 0 => seen.extend(&bytes[..count]),
                    _ => break,
                }
            }
            seen
        });
        Self { open, reader: Some(reader), end }
    }

    fn stdio(&self) -> Stdio {
        self.end.try_clone().unwrap().into()
    }

    /// Closes it; gives what stood on it.
    pub(crate) fn close(mut self) -> Vec<u8> {
        self.open.store(false, Ordering::SeqCst);
        let reader = self.reader.take().unwrap();
        drop(self);
        reader.join().unwrap()
    }
}

/// A run under the dashboard: with a terminal of its own, to whose closing belongs a signal, or without.
#[cfg(target_os = "linux")] // for `setsid`
pub(crate) fn on_a_terminal(desk: &Desk, terminal: &Terminal, own: bool) -> Child {
    let setsid = ["--ctty", "--wait", env!("CARGO_BIN_EXE_train")];
    let mut command = match own {
        true => desk.program("setsid", &[&setsid[..], &RUN].concat()),
        false => desk.command(&RUN),
    };
    command.stdin(terminal.stdio()).stdout(terminal.stdio()).stderr(terminal.stdio());
    command.env("TERM", "xterm").spawn().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn a_closed_terminal_ends_a_run_saved() {
    // Without a terminal of its own no signal comes: the dashboard asks the terminal, lines go nowhere as `nohup` has them.
    let owns: &[bool] = if cfg!(feature = "dashboard") { &[true, false] } else { &[true] };
    for &own in owns {
        let desk = endless();
        let terminal = Terminal::new();
        let mut child = on_a_terminal(&desk, &terminal, own);
        has_begun(&desk, &mut child);
        let seen = terminal.close();
        let dashboard = text(&seen).contains("\x1b[?1049h");
        assert_eq!(dashboard, cfg!(feature = "dashboard"), "the dashboard was up, if there is one");
        ended_orderly(&desk, &mut child);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_terminal_that_can_show_nothing_gets_lines() {
    let desk = Desk::new();
    let terminal = Terminal::new();
    let mut command = desk.command(&RUN);
    command.stdin(terminal.stdio()).stdout(terminal.stdio()).stderr(Stdio::piped());
    let output = command.env("TERM", "dumb").spawn().unwrap().wait_with_output().unwrap();
    assert!(text(&output.stderr).contains("step"), "{}", text(&output.stderr));
    drop(terminal);
}

/// The end of a pipe that nobody reads.
pub(crate) fn dead_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_run_that_nobody_reads_can_be_ended_and_goes_to_its_end() {
    for name in ["INT", "TERM", "HUP"] {
        let desk = endless();
        let mut command = desk.command(&[&RUN[..], &["--progress", "lines"]].concat());
        let mut child = command.stdout(dead_pipe()).stderr(dead_pipe()).spawn().unwrap();
        has_begun(&desk, &mut child);
        signal(name, &child);
        ended_orderly(&desk, &mut child);
    }
    let desk = Desk::new();
    let mut command = desk.command(&[&RUN[..], &["--progress", "lines"]].concat());
    let status = command.stdout(dead_pipe()).stderr(dead_pipe()).status().unwrap();
    assert_eq!((status.code(), &desk.summary("tiny")["status"]), (Some(0), &"completed".into()));
}

#[test]
fn a_shell_that_tells_of_a_closed_terminal_again_costs_no_step() {
    let desk = endless();
    let mut child = desk.command(&RUN).stderr(dead_pipe()).spawn().unwrap();
    has_begun(&desk, &mut child);
    for _ in 0..20 {
        signal("HUP", &child);
    }
    ended_orderly(&desk, &mut child);
}

#[test]
fn nohup_keeps_a_run_alive() {
    let desk = Desk::new();
    let program = env!("CARGO_BIN_EXE_train");
    let script = ["-c", r#"trap "" HUP; exec "$0" "$@""#, program];
    let mut command = desk.program("sh", &[&script[..], &RUN].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    has_begun(&desk, &mut child);
    signal("HUP", &child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(desk.summary("tiny")["status"], "completed");
}

#[test]
fn output_that_nobody_reads_or_no_disk_holds_is_no_panic() {
    let desk = Desk::new();
    desk.run_well(&[]);
    let run = ["--run", "runs/tiny", "--device", "cpu", "--json", "out.json"];
    let commands: [(&str, &[&str]); 4] = [
        (env!("CARGO_BIN_EXE_eval"), &run),
        (env!("CARGO_BIN_EXE_train"), &["--config", "tiny.toml", "--device", "cpu", "--dry-run"]),
        (env!("CARGO_BIN_EXE_train"), &["--config", "tiny.toml", "--print-config"]),
        (env!("CARGO_BIN_EXE_data"), &["--config", "tiny.toml"]),
    ];
    for (program, args) in commands {
        let status = |stdout: Stdio, stderr: Stdio| {
            let child = desk.program(program, args).stdout(stdout).stderr(stderr).spawn().unwrap();
            let output = child.wait_with_output().unwrap();
            (output.status.code(), text(&output.stderr))
        };
        let (code, said) = status(dead_pipe(), Stdio::piped());
        assert_eq!(code, Some(0), "{args:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("error"), "{args:?}: {said}");
        assert_eq!(status(dead_pipe(), dead_pipe()).0, Some(0), "{args:?}");
        let full = || OpenOptions::new().write(true).open("/dev/full").unwrap().into();
        if cfg!(target_os = "linux") {
            let (code, said) = status(full(), Stdio::piped());
            assert_eq!(code, Some(1), "{args:?}: {said}");
            assert!(said.contains("error: can't write the output: No space left"), "{said}");
        }
    }
    let written: Value = crate::desk::json(&desk.path("out.json"));
    assert!(written["metrics"].is_object(), "the file is whole whoever reads the rest");
    let wrong = desk.program(env!("CARGO_BIN_EXE_train"), &["--config", "absent.toml"]);
    assert_eq!({ wrong }.stderr(dead_pipe()).status().unwrap().code(), Some(2));
}

/// A language model with a tokenizer of its own, trained on a text, and a mixer that has a family.
fn speaks() -> Desk {
    let lm = TINY
        .replace("vocab = 64", "tokenizer = { file = \"data/tokenizer.json\" }")
        .replace("[task.mqar]", "[task.language_modelling]")
        .replace("{ length = 16, pairs = 2, examples = 160 }", &window("text.txt"))
        .replace(
            "{ length = 16, pairs = 2, examples = 40 }, { length = 24, pairs = 3, examples = 20 }",
            &window("text.txt"),
        )
        .replace(
            "gated_deltanet = { heads = 2 }",
            "gated_deltanet = { heads = 2 }\nmlp.swiglu = {}",
        )
        .replace("epochs = 3", "steps = 10");
    let desk = Desk::with(&lm);
    fs::create_dir(desk.path("data")).unwrap();
    fs::write(desk.path("data/tokenizer.json"), crate::untrusted::tokenizer_json()).unwrap();
    for name in ["text.txt", "other.txt"] {
        let text = "the cat sat on the mat, and so on. ".repeat(20);
        fs::write(desk.path("data").join(name), text).unwrap();
    }
    desk
}

fn window(name: &str) -> String {
    format!("{{ text = [\"data/{name}\"], length = 16, examples = 16 }}")
}

#[test]
fn a_model_outlives_the_texts_that_it_was_trained_on() {
    let desk = speaks();
    desk.run_well(&["--set", "train.steps=5"]);
    let other = crate::untrusted::tokenizer_json() + "\n";
    let resume = || desk.run(&["--set", "train.steps=5", "--resume"]);
    for file in ["text.txt", "tokenizer.json"] {
        fs::rename(desk.path("data").join(file), desk.path(file)).unwrap();
    }
    let run = ["--run", "runs/tiny", "--device", "cpu"];
    let generate = env!("CARGO_BIN_EXE_generate");
    let args = [&run[..], &["--prompt", "the cat", "--tokens", "8"]].concat();
    let output = desk.program(generate, &args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let convert = env!("CARGO_BIN_EXE_convert");
    let output =
        desk.program(convert, &["export", "runs/tiny", "--out", "there"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let exported = fs::read_to_string(desk.path("there/tokenizer.json")).unwrap();
    assert_eq!(exported, crate::untrusted::tokenizer_json());

    let eval = env!("CARGO_BIN_EXE_eval");
    refused(&desk.program(eval, &run).output().unwrap(), &["data/text.txt"]);
    let set = |split: &str| format!("task.language_modelling.{split}=[{}]", window("other.txt"));
    let (train, test) = (set("train"), set("test"));
    let args = [&run[..], &["--set", &train, "--set", &test]].concat();
    let output = desk.program(eval, &args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));

    // Going on with training needs both, and the tokenizer as it was.
    refused(&resume(), &["data/"]);
    fs::rename(desk.path("text.txt"), desk.path("data/text.txt")).unwrap();
    fs::write(desk.path("data/tokenizer.json"), other).unwrap();
    refused(&resume(), &["runs/tiny/tokenizer.json", "data/tokenizer.json"]);
    fs::rename(desk.path("tokenizer.json"), desk.path("data/tokenizer.json")).unwrap();
    let output = resume();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// A run's config that was changed by hand is held against the weights before a model is made of it.
#[test]
fn a_runs_config_of_another_size_is_refused_by_key() {
    let desk = Desk::new();
    desk.run_well(&["--set", "train.epochs=1"]);
    let path = desk.path("runs/tiny/config.toml");
    let right = fs::read_to_string(&path).unwrap();
    for (from, to, key) in [
        ("d_model = 16", "d_model = 1048576", "`model.d_model` is 1048576"),
        ("repeat = 2", "repeat = 1000000", "`model.layers` is 1000000"),
        ("heads = 2", "heads = 2, key_width = 100000", "weights at the least"),
    ] {
        let to = to.replace(", ", "\n");
        assert!(right.contains(from), "{right}");
        fs::write(&path, right.replace(from, &to)).unwrap();
        let run = ["--run", "runs/tiny", "--device", "cpu"];
        refused(&desk.program(env!("CARGO_BIN_EXE_eval"), &run).output().unwrap(), &[key]);
    }
}

/// An evaluation that needs more memory than the training before it.
#[cfg(target_os = "linux")]
fn desk_of_a_hungry_evaluation() -> Desk {
    Desk::with(
        &TINY
            .replace("vocab = 64", "vocab = 8200")
            .replace("{ length = 16, pairs = 2, examples = 40 }, ", "")
            .replace(
                "length = 24, pairs = 3, examples = 20",
                "length = 4096, pairs = 3, examples = 256",
            )
            .replace("epochs = 3", "epochs = 1")
            .replace("every_steps = 7", "every_steps = 20\nbatch_size = 256"),
    )
}

/// The run in 640 MiB of addresses.
#[cfg(target_os = "linux")]
fn in_little_memory(desk: &Desk) -> std::process::Command {
    let limited = ["-c", r#"ulimit -v 655360 && exec "$0" "$@""#, env!("CARGO_BIN_EXE_train")];
    let mut command = desk.program("sh", &[&limited, &RUN[..], &["--progress", "quiet"]].concat());
    command.env("RAYON_NUM_THREADS", "2");
    command
}

/// Stacks are so large there that the system refuses threads for parts of a step.
#[cfg(target_os = "linux")]
#[test]
fn a_run_that_gets_no_threads_says_so_in_a_line() {
    let desk = desk_of_a_hungry_evaluation();
    let output = in_little_memory(&desk).env("RUST_MIN_STACK", "33554432").output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("out of memory") && said.contains("--resume"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_whose_memory_ends_says_so_in_a_line_and_goes_on_to_the_same_bits() {
    let desk = desk_of_a_hungry_evaluation();
    let output = in_little_memory(&desk).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with("error: out of memory") && said.contains("--resume"), "{said}");
    desk.run_well(&["--resume"]);
    desk.run_well(&["--set", "name=whole"]);
    assert_eq!(desk.metrics("tiny"), desk.metrics("whole"));
    assert_eq!(desk.summary("tiny")["metrics"], desk.summary("whole")["metrics"]);
}

#[cfg(all(feature = "wgpu", target_os = "linux"))]
#[test]
fn a_machine_without_a_display_gets_no_lines_about_one() {
    let desk = Desk::new();
    let mut command = desk.command(&["--config", "tiny.toml", "--device", "auto", "--dry-run"]);
    command.env_remove("XDG_RUNTIME_DIR").env_remove("NODEVICE_SELECT");
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}
