//! How a run is checked and how it is done: by whoever starts the sweep, or by a program of its
//! own.
//!
//! A run in a process of its own takes nothing else down when it fails. Processes on one GPU take turns,
//! so small runs that share one are threads of one process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value as Json;
use toml::{Table, Value};

/// Operations on runs that a sweep needs.
pub trait Runner: Sync {
    /// The run config at `base` with `overrides` in place, checked, and with every default filled
    /// in.
    /// # Errors
    /// One line that names the key, its value, and what would do.
    fn resolve(&self, base: &Path, overrides: &[(String, Value)]) -> Result<Table, String>;

    /// Does a run. Called from several threads at once.
    /// # Errors
    /// One line for the run's row: it failed, and the sweep goes on.
    fn run(&self, run: &Assignment, stop: &Stop) -> Result<Ending, String>;
}

/// A run that a worker has taken.
#[derive(Debug)]
pub struct Assignment<'a> {
    /// The resolved config, with the run's id as `name`.
    pub config: &'a Table,
    /// The run's id.
    pub id: &'a str,
    /// The folder that gets the run's folder, called by its id.
    pub out: &'a Path,
    /// The device, as the command line had it.
    pub device: &'a str,
    /// Threads of the processor for its products; by default as many as there are cores.
    pub threads: Option<usize>,
    /// Held while the run lasts. Whoever else holds a copy of it, as a child process does, keeps
    /// others from starting the run.
    pub lock: &'a File,
    /// Whether to start anew even if there is something to go on with.
    pub anew: bool,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// Done, with its summary: the columns of its row by name, and `metrics`.
    Done(Json),
    /// Stopped before its end; it goes on some other time.
    Interrupted,
}

/// Wish of the person at the keyboard: nothing, no more runs, or no run at all.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicU8>);

impl Stop {
    /// Once: runs that have started are finished, and no more start. Twice: they are interrupted.
    /// Gives how often it was pressed before.
    pub fn press(&self) -> u8 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    /// Whether no more runs should start.
    pub fn no_more(&self) -> bool {
        self.0.load(Ordering::SeqCst) >= 1
    }

    /// Whether those that run should stop.
    pub fn interrupt(&self) -> bool {
        self.0.load(Ordering::SeqCst) >= 2
    }
}

/// Runs as processes of a program that takes `--config --device --out --progress quiet`, and
/// `--overwrite` or `--resume`; that writes `OUT/NAME/summary.json`; and that exits with 0 when
/// done and with 130 when interrupted.
#[derive(Debug, Clone)]
pub struct ChildProcess {
    /// The program.
    pub program: PathBuf,
    /// Arguments before those named above.
    pub arguments: Vec<String>,
}

/// Where Rayon, which shares a matrix product out among cores, reads the number of its threads.
const THREADS: &str = "RAYON_NUM_THREADS";

/// The exit code of a program that was interrupted, as shells have it.
const INTERRUPTED: i32 = 130;

impl ChildProcess {
    /// Does a run in a process of its own; takes over the result of one that ended unseen, and goes
    /// on with one that was cut off. The process outlives a killed sweep and keeps the run's lock
    /// until it ends.
    /// # Errors
    /// The last line that the program wrote, or why it could not be started.
    pub fn run(&self, run: &Assignment, stop: &Stop) -> Result<Ending, String> {
        let folder = run.out.join(run.id);
        if let Some(summary) = finished(&folder).filter(|_| !run.anew) {
            return Ok(Ending::Done(summary));
        }
        let config = run.out.join(format!("{}.toml", run.id));
        let text = toml::to_string(run.config).map_err(|e| e.to_string())?;
        crate::rows::replace(&config, text.as_bytes()).map_err(|e| e.to_string())?;
        let log = run.out.join(format!("{}.log", run.id));
        let mut child = self.start(run, &config, &folder, &log)?;
        let code = wait(&mut child, stop).map_err(|e| format!("can't wait for the run: {e}"))?;
        match (code, finished(&folder)) {
            (Some(0), Some(summary)) => Ok(Ending::Done(summary)),
            (Some(0), None) => {
                Err(format!("it ended well and left no summary in {}", folder.display()))
            }
            (Some(INTERRUPTED), _) => Ok(Ending::Interrupted),
            (code, _) => Err(last_line(&log).unwrap_or_else(|| silence(code))),
        }
    }

    fn start(
        &self,
        run: &Assignment,
        config: &Path,
        folder: &Path,
        log: &Path,
    ) -> Result<Child, String> {
        let error = |e| format!("can't start {}: {e}", self.program.display());
        let output = File::create(log).map_err(error)?;
        let resume = has_checkpoint(folder) && !run.anew;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
            .arg("--config")
            .arg(config)
            .args(["--device", run.device])
            .arg("--out")
            .arg(run.out);
        command.arg(if resume { "--resume" } else { "--overwrite" }).args(["--progress", "quiet"]);
        if let Some(threads) = run.threads {
            command.env(THREADS, threads.to_string());
        }
        // Nobody reads it there: it is how the process gets a copy of the lock.
        command.stdin(run.lock.try_clone().map_err(error)?);
        command.stdout(output.try_clone().map_err(error)?).stderr(output);
        own_group(&mut command);
        command.spawn().map_err(error)
    }
}

fn silence(code: Option<i32>) -> String {
    match code {
        Some(code) => format!("exit code {code}, without a word"),
        None => "ended by a signal, without a word".into(),
    }
}

/// Ctrl-C is for the sweep, which decides what becomes of its runs.
#[cfg(unix)]
fn own_group(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn own_group(_command: &mut Command) {}

/// Waits for the end, and asks for it once if the person wants it. No code: a signal ended it.
fn wait(child: &mut Child, stop: &Stop) -> std::io::Result<Option<i32>> {
    let mut asked = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code().or(asked.then_some(INTERRUPTED)));
        }
        if stop.interrupt() && !asked {
            asked = true;
            ask_to_stop(child)?;
        }
        sleep(Duration::from_millis(20));
    }
}

/// As Ctrl-C would. The program saves its run. Every `sh` has `kill` built in; as a program of its
/// own it is missing from small images.
#[cfg(unix)]
fn ask_to_stop(child: &mut Child) -> std::io::Result<()> {
    let id = child.id().to_string();
    let kill = ["-c", r#"kill -INT "$1""#, "sh", &id];
    let asked = Command::new("sh").args(kill).stderr(Stdio::null()).status();
    match asked {
        Ok(status) if status.success() => Ok(()),
        _ => child.kill(),
    }
}

#[cfg(not(unix))]
fn ask_to_stop(child: &mut Child) -> std::io::Result<()> {
    child.kill()
}

/// The summary of a run that came to its end.
pub fn finished(folder: &Path) -> Option<Json> {
    let summary: Json =
        serde_json::from_slice(&fs::read(folder.join("summary.json")).ok()?).ok()?;
    matches!(summary["status"].as_str(), Some("completed" | "stopped_early")).then_some(summary)
}

/// Whether there is a run that can be gone on with.
pub fn has_checkpoint(folder: &Path) -> bool {
    if !folder.join("config.toml").exists() {
        return false;
    }
    let entries = fs::read_dir(folder.join("checkpoints"));
    let step = |name: std::ffi::OsString| name.to_string_lossy().starts_with("step-");
    entries.is_ok_and(|list| list.flatten().any(|entry| step(entry.file_name())))
}

/// The last line with `error:`, or else the last line.
fn last_line(log: &Path) -> Option<String> {
    let bytes = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let error = lines.iter().rev().find(|line| line.starts_with("error:"));
    let line = error.or(lines.last())?;
    Some(line.trim_start_matches("error:").trim().to_string())
}
