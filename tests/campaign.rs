//! Campaigns: promises about runs, each tried at many random moments, and results held to the bits of a
//! run that nothing disturbed.
//!
//! `cargo test` makes a few tries of each. `HOSTILE_TRIES` says how many, `HOSTILE_SEED` which is the first:
//! `HOSTILE_TRIES=100 cargo test --test tests campaign:: -- --nocapture --test-threads 1`.
#![cfg(target_os = "linux")] // terminals, limits of memory

use crate::configs::small;
use crate::desk::{Desk, TINY, signal, text};
use crate::hostile::{RUN, Terminal, dead_pipe, ended, lost_nothing, on_a_terminal, refused};
use crate::untrusted::{apply, some_changes};
use linattn_oracle::Rng;
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|number| number.parse().unwrap())
}

/// Makes tries, each with random numbers of its own, whatever comes of the others. Says how many failed.
fn tries(what: &str, usual: u64, attempt: impl Fn(&mut Rng)) {
    let (first, count) =
        (asked("HOSTILE_SEED").unwrap_or(1), asked("HOSTILE_TRIES").unwrap_or(usual));
    let began = Instant::now();
    let fails = |seed: &u64| {
        let mut rng = Rng::named(*seed, what);
        let failed = catch_unwind(AssertUnwindSafe(|| attempt(&mut rng))).is_err();
        if failed {
            eprintln!("{what}: HOSTILE_SEED={seed} HOSTILE_TRIES=1 tries this again");
        }
        failed
    };
    let failed = (first..first + count).filter(fails).count();
    println!("{what}: {count} tries from seed {first}, {failed} failed, {:.0?}", began.elapsed());
    assert_eq!(failed, 0, "{what}");
}

/// A run of 20 steps, four checkpoints and three evaluations.
fn desk() -> Desk {
    Desk::with(&TINY.replace("epochs = 3", "epochs = 1"))
}

/// Results of a run, without those that depend on the clock.
#[derive(PartialEq)]
struct Left {
    metrics: Vec<Value>,
    scores: Value,
    weights: Vec<u8>,
    optimizer: Vec<u8>,
}

impl Left {
    fn by(desk: &Desk) -> Self {
        let summary = desk.summary("tiny");
        assert_eq!(summary["status"], "completed");
        let checkpoint = desk.path("runs/tiny/checkpoints/step-0000000020");
        let bytes = |name| fs::read(checkpoint.join(name)).unwrap();
        Self {
            metrics: desk.metrics("tiny"),
            scores: summary["metrics"].clone(),
            weights: bytes("model.safetensors"),
            optimizer: bytes("optimizer.safetensors"),
        }
    }
}

/// A run that nothing disturbed.
struct Undisturbed {
    left: Left,
    took: Duration,
}

impl Undisturbed {
    fn new(seed: &str) -> Self {
        let desk = desk();
        let began = Instant::now();
        desk.run_well(&["--set", &format!("seed={seed}")]);
        Self { took: began.elapsed(), left: Left::by(&desk) }
    }

    /// Waits for any moment of such a run, or a little longer.
    fn wait(&self, rng: &mut Rng) {
        sleep(self.took.mul_f64(1.1 * rng.uniform()));
    }

    fn is_like(&self, desk: &Desk) {
        assert!(Left::by(desk) == self.left, "not the bits of a run that nothing disturbed");
    }
}

/// Carries a run to its end as the command itself advises.
fn carry_on(desk: &Desk, more: &[&str]) {
    let resumed = desk.run(&[&["--resume"][..], more].concat());
    if resumed.status.success() {
        return;
    }
    refused(&resumed, &[]);
    match text(&resumed.stderr).contains("leave out --resume") {
        true => desk.run_well(more),
        false => {
            refused(&resumed, &["--overwrite"]);
            desk.run_well(&[&["--overwrite"][..], more].concat());
        }
    }
}

fn has_checkpoint(desk: &Desk) -> bool {
    let checkpoints = fs::read_dir(desk.path("runs/tiny/checkpoints"));
    let names = checkpoints.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| name.to_string_lossy().starts_with("step-"))
}

#[test]
fn kills_at_random_moments_cost_no_bit() {
    let undisturbed = Undisturbed::new("3");
    let kills = Cell::new(0);
    tries("kills", 3, |rng| {
        let desk = desk();
        for _ in 0..rng.between(1, 3) {
            let how = if has_checkpoint(&desk) { "--resume" } else { "--overwrite" };
            let mut command = desk.command(&[&RUN[..], &[how]].concat());
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            undisturbed.wait(rng);
            let over = child.try_wait().unwrap().is_some();
            kills.set(kills.get() + u32::from(!over));
            child.kill().unwrap();
            child.wait().unwrap();
        }
        carry_on(&desk, &[]);
        undisturbed.is_like(&desk);
    });
    println!("{} of the runs were killed", kills.get());
}

/// A run that a signal ended, or that came to its end before: nothing is lost, and it goes on to the same bits.
fn is_whole(desk: &Desk, status: ExitStatus, undisturbed: &Undisturbed) {
    match status.code() {
        Some(0) => {}
        Some(130) => lost_nothing(desk),
        Some(code) => panic!("exit code {code}"),
        None => assert!(!desk.path("runs/tiny/config.toml").exists(), "{status}"),
    }
    carry_on(desk, &[]);
    undisturbed.is_like(desk);
}

#[test]
fn terminals_closed_at_random_moments_cost_no_step() {
    let undisturbed = Undisturbed::new("3");
    tries("closed terminals", 2, |rng| {
        let (desk, terminal) = (desk(), Terminal::new());
        let mut child = on_a_terminal(&desk, &terminal, rng.chance(0.5));
        undisturbed.wait(rng);
        terminal.close();
        is_whole(&desk, ended(&mut child), &undisturbed);
    });
}

/// A pipe whose reader goes away at once or later, and a signal at any moment.
#[test]
fn readers_that_die_at_random_moments_cost_no_step() {
    let undisturbed = Undisturbed::new("3");
    tries("dead readers", 2, |rng| {
        let desk = desk();
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = desk.command(&[&RUN[..], &["--progress", "lines"]].concat());
        command.stdout(dead_pipe()).stderr(writer);
        let mut child = command.spawn().unwrap();
        drop(command);
        if rng.chance(0.5) {
            undisturbed.wait(rng);
        }
        drop(reader);
        undisturbed.wait(rng);
        signal(rng.of(&["INT", "TERM", "HUP"]), &child);
        is_whole(&desk, ended(&mut child), &undisturbed);
    });
}

const SWEEP: &str = "base = \"tiny.toml\"\nscaled_down = \"a test\"\n[grid]\nseed = [3, 9]\n\
                     [select]\nrule = \"published\"\nreplicate = \"seed\"\n";

#[test]
fn a_sweep_that_nobody_reads_can_be_ended_at_any_moment() {
    let undisturbed = Undisturbed::new("3");
    tries("sweeps without a reader", 1, |rng| {
        let desk = desk();
        fs::write(desk.path("sweep.toml"), SWEEP).unwrap();
        let sweep = |stderr: Stdio| {
            let args = ["--config", "sweep.toml", "--devices", "cpu"];
            let mut command = desk.program(env!("CARGO_BIN_EXE_sweep"), &args);
            command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
        };
        let mut child = sweep(dead_pipe());
        undisturbed.wait(rng);
        signal(rng.of(&["INT", "TERM", "HUP"]), &child);
        let first = ended(&mut child);
        assert!(matches!(first.code(), Some(0 | 130) | None), "{first}");
        assert!(ended(&mut sweep(dead_pipe())).success());
        let rows = fs::read_to_string(desk.path("rows.csv")).unwrap();
        assert_eq!(rows.matches("completed").count(), 2, "{rows}");
    });
}

#[test]
fn folders_deleted_under_a_run_are_not_taken_for_a_new_runs() {
    let other = Undisturbed::new("9");
    tries("deleted folders", 2, |rng| {
        let desk = desk();
        let child =
            desk.command(&RUN).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        other.wait(rng);
        // It may fail, since the run goes on writing.
        let _removed = fs::remove_dir_all(desk.path("runs/tiny"));
        let output = child.wait_with_output().unwrap();
        assert!(matches!(output.status.code(), Some(0..=2)), "{}", output.status);
        is_clear(&output);
        let again = desk.run(&["--set", "seed=9"]);
        if !again.status.success() {
            refused(&again, &["--overwrite"]);
            desk.run_well(&["--set", "seed=9", "--overwrite"]);
        }
        other.is_like(&desk);
    });
}

/// No panic and no abort; an error has one line, or is TOML's with the place in the file.
fn is_clear(output: &Output) {
    let said = text(&output.stderr);
    let status = output.status;
    assert!(matches!(status.code(), Some(0..=2 | 130)), "{status}: {said}");
    assert!(!said.contains("panicked") && !said.contains("is a bug"), "{said}");
    let errors = said.lines().skip_while(|line| !line.starts_with("error: ")).count();
    let expected = usize::from(matches!(status.code(), Some(1 | 2)));
    assert!(errors == expected || said.contains("TOML parse error"), "{status}: {said}");
}

#[test]
fn processes_that_share_a_folder_never_mix_two_runs() {
    let undisturbed = ["3", "9"].map(Undisturbed::new);
    tries("shared folders", 2, |rng| {
        let desk = desk();
        let start = |more: &[&str]| {
            let mut command = desk.command(&[&RUN[..], more].concat());
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let first = start(&[]);
        undisturbed[0].wait(rng);
        let seed = rng.of(&["seed=3", "seed=9"]);
        let how = rng.of(&[&["--overwrite"][..], &["--resume"], &[]]);
        let second = start(&[&["--set", seed][..], how].concat());
        for child in [first, second] {
            let output = child.wait_with_output().unwrap();
            if !output.status.success() {
                refused(&output, &["runs/tiny"]);
            }
        }
        // Both may have been refused, each because of the other.
        if let Ok(config) = fs::read_to_string(desk.path("runs/tiny/config.toml")) {
            undisturbed[usize::from(config.contains("seed = 9"))].is_like(&desk);
        }
    });
}

/// The small configs of `configs/` with less to do.
fn bases() -> Vec<String> {
    let less = |line: &str| match line.split(' ').next() {
        Some("steps" | "epochs") => "steps = 2\n".to_string(),
        Some("batch_size") => "batch_size = 4\n".to_string(),
        _ => ["_000", "_200", "_280"]
            .iter()
            .fold(format!("{line}\n"), |line, end| line.replace(end, "")),
    };
    let texts = small().into_iter().map(|path| fs::read_to_string(path).unwrap());
    texts.map(|text| text.lines().map(less).collect()).collect()
}

/// Words of a config outside comments.
fn words(config: &str) -> BTreeSet<&str> {
    let lines = config.lines().map(|line| line.split('#').next().unwrap_or_default());
    let words = lines.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
    words.filter(|word| word.len() > 1).collect()
}

/// Whether an error says where: a line of the file, or a name of it in backticks.
fn names_a_key(said: &str, config: &str) -> bool {
    let quoted = said.split('`').skip(1).step_by(2);
    let known = words(config);
    said.contains("TOML parse error at line")
        || quoted.flat_map(words).any(|word| known.contains(word))
}

/// Ends a process that goes on after a while, as a person would: a signal, and another.
fn patiently(mut child: Child) -> Output {
    let mut said = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![];
        said.read_to_end(&mut bytes).unwrap();
        bytes
    });
    for seconds in [5, 10] {
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until && child.try_wait().unwrap().is_none() {
            sleep(Duration::from_millis(5));
        }
        if child.try_wait().unwrap().is_none() {
            signal("INT", &child);
        }
    }
    let status = ended(&mut child);
    Output { status, stdout: vec![], stderr: reader.join().unwrap() }
}

/// Address space of a run, in KiB, so that no config takes all of a computer's memory.
const MOST_MEMORY: u64 = 4 << 20;

#[test]
fn mutated_configs_train_two_steps_or_are_refused_by_key() {
    let (bases, codes) = (bases(), Cell::new([0; 4]));
    tries("mutated configs", 20, |rng| {
        let base = rng.of(&bases);
        let changes = some_changes(rng.between(0, 1 << 22) as u64);
        let folder = tempfile::tempdir().unwrap();
        let config = apply(base.as_bytes(), &changes);
        fs::write(folder.path().join("mutated.toml"), &config).unwrap();
        let limited = format!(r#"ulimit -v {MOST_MEMORY} && exec "$0" "$@""#);
        let mut command = Command::new("sh");
        command.args(["-c", &limited, env!("CARGO_BIN_EXE_train"), "--device", "cpu"]);
        command.args(["--progress", "quiet", "--config"]);
        command.arg(folder.path().join("mutated.toml")).arg("--out").arg(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let output = patiently(command.spawn().unwrap());
        let (said, config) = (text(&output.stderr), text(&config));
        let code = output.status.code();
        let kind = [Some(0), Some(1), Some(2), Some(130)].iter().position(|one| *one == code);
        let mut counts = codes.get();
        kind.into_iter().for_each(|kind| counts[kind] += 1);
        codes.set(counts);
        let shown = || format!("{changes:?}\n{config}\n{said}");
        let clear = catch_unwind(AssertUnwindSafe(|| is_clear(&output)));
        assert!(clear.is_ok(), "{}", shown());
        let names = code != Some(2) || names_a_key(&said, &format!("{base}\n{config}"));
        assert!(names, "it names no key: {}", shown());
    });
    let [trained, failed, refused, stopped] = codes.get();
    println!("{trained} trained, {failed} failed, {refused} refused, {stopped} stopped after 5 s");
}

/// Resident memory in MiB, and open files.
fn held(child: &Child) -> (f64, usize) {
    let process = std::path::Path::new("/proc").join(child.id().to_string());
    let status = fs::read_to_string(process.join("status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kibibytes: f64 = resident.trim().strip_suffix("kB").unwrap().trim().parse().unwrap();
    (kibibytes / 1024.0, fs::read_dir(process.join("fd")).unwrap().count())
}

/// `SOAK_MINUTES` and `SOAK_DEVICE` say how long and where.
#[test]
#[ignore = "an hour"]
fn a_long_run_takes_no_more_memory_and_no_more_files() {
    let desk = Desk::with(&TINY.replace("epochs = 3", "epochs = 1_000_000"));
    let device = std::env::var("SOAK_DEVICE").unwrap_or_else(|_| "cpu".into());
    let mut command = desk.command(&["--config", "tiny.toml", "--device", &device]);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let samples = 2 * asked("SOAK_MINUTES").unwrap_or(60);
    let mut seen = vec![];
    for sample in 1..=samples {
        sleep(Duration::from_secs(30));
        let (memory, files) = held(&child);
        println!("{:6.1} min {memory:8.1} MiB {files:4} files", sample as f64 / 2.0);
        seen.push((memory, files));
    }
    signal("INT", &child);
    assert_eq!(ended(&mut child).code(), Some(130));
    lost_nothing(&desk);
    println!("{} steps", desk.summary("tiny")["steps"]);
    let (early, late) = seen.split_at(seen.len() / 2);
    let most = |half: &[(f64, usize)]| {
        let memory = half.iter().map(|sample| sample.0).fold(0.0, f64::max);
        (memory, half.iter().map(|sample| sample.1).max().unwrap_or(0))
    };
    let ((early, early_files), (late, late_files)) = (most(early), most(late));
    assert!(late <= 1.05 * early + 2.0, "{early} MiB, then {late}");
    assert!(late_files <= early_files, "{early_files} files, then {late_files}");
}
