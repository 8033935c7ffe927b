//! A folder to run the commands in.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
#[cfg(unix)]
use std::process::Child;
use std::process::{Command, Output, Stdio};
#[cfg(unix)]
use std::thread::sleep;
#[cfg(unix)]
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A run of seconds.
pub const TINY: &str = r#"
seed = 3

[task.mqar]
vocab = 64
train = [{ length = 16, pairs = 2, examples = 160 }]
test = [{ length = 16, pairs = 2, examples = 40 }, { length = 24, pairs = 3, examples = 20 }]

[model]
d_model = 16

[[model.layers]]
repeat = 2
mixer.gated_deltanet = { heads = 2 }

[train]
epochs = 3
batch_size = 8
log_every = 1

[optimizer]
learning_rate = 1e-2

[evaluate]
every_steps = 7

[checkpoint]
every_steps = 5
"#;

/// A folder with the tiny run's config, and the command.
pub struct Desk {
    folder: TempDir,
}

impl Desk {
    pub fn new() -> Self {
        Self::with(TINY)
    }

    pub fn with(config: &str) -> Self {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("tiny.toml"), config).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command `train`.
    pub fn command(&self, args: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_train"), args)
    }

    /// Any of the commands, started in the folder.
    pub fn program(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).args(args).stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        let config = ["--config", "tiny.toml", "--device", "cpu"];
        self.command(&[&config, args].concat()).output().unwrap()
    }

    pub fn run_well(&self, args: &[&str]) {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }

    pub fn summary(&self, name: &str) -> Value {
        json(&self.path("runs").join(name).join("summary.json"))
    }

    /// Metrics without what depends on the clock.
    pub fn metrics(&self, name: &str) -> Vec<Value> {
        let path = self.path("runs").join(name).join("metrics.jsonl");
        let mut lines: Vec<Value> = fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        for line in lines.iter_mut().filter_map(Value::as_object_mut) {
            line.shift_remove("seconds");
            line.shift_remove("tokens_per_second");
        }
        lines
    }

    /// Names of all files below the folder.
    pub fn files(&self) -> Vec<PathBuf> {
        fn walk(folder: &Path, list: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, list);
                } else {
                    list.push(path);
                }
            }
        }
        let mut list = vec![];
        walk(self.folder.path(), &mut list);
        list.sort();
        list
    }
}

/// Longer than a busy machine's disk takes for the checkpoints of a test: what has not come by then hangs.
#[cfg(unix)]
const PATIENCE: Duration = Duration::from_secs(300);

/// Whether a condition holds within five minutes.
#[cfg(unix)]
pub fn comes(mut condition: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !condition() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        sleep(Duration::from_millis(2));
    }
    true
}

/// Sends a signal, `INT` for instance, to a child.
#[cfg(unix)]
pub fn signal(name: &str, child: &Child) {
    let (name, id) = (format!("-{name}"), child.id().to_string());
    let kill = ["-c", r#"kill "$1" "$2""#, "sh", &name, &id];
    assert!(Command::new("sh").args(kill).status().unwrap().success());
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
