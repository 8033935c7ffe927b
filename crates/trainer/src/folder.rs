//! A run's folder: what is in it, and how it stays whole whenever the program is cut off.
//!
//! Everything but `metrics.jsonl` is written under another name and renamed; metrics only grow, and a
//! checkpoint remembers how long they were, so that resuming cuts off what came after it.

use crate::config::RunConfig;
use crate::lock::FolderLock;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a run's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Reading or writing failed.
    #[error("can't {doing} {path}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The folder holds a run already.
    #[error(
        "{path} holds a run already ({status}); add --resume to go on with it, --overwrite to \
         delete it and start again, or choose another folder with --set name=NAME"
    )]
    Exists {
        /// The folder.
        path: PathBuf,
        /// How that run stands.
        status: String,
    },
    /// The folder that a model is to be put into holds something already.
    #[error(
        "{path} holds a run already ({status}); add --overwrite to delete it first, or choose \
         another folder"
    )]
    Taken {
        /// The folder.
        path: PathBuf,
        /// How that run stands.
        status: String,
    },
    /// Another process writes to the folder.
    #[error("{owner} is writing to {path}; wait for its end, or choose another folder")]
    InUse {
        /// The folder.
        path: PathBuf,
        /// `process 123`.
        owner: String,
    },
    /// The folder was taken away from under a run.
    #[error("{path} was deleted or made anew while the run wrote to it; the run ends here")]
    Lost {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume, and nothing in the way of a start.
    #[error("{path} holds no checkpoint to resume from; leave out --resume to start the run")]
    Nothing {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds a run that cannot be gone on with.
    #[error(
        "{path} holds a run without a checkpoint ({status}), which nothing can go on from; \
         --overwrite, and no --resume, starts it again, or choose another folder with \
         --set name=NAME"
    )]
    Barren {
        /// The folder.
        path: PathBuf,
        /// How that run stands.
        status: String,
    },
    /// The folder holds parts of a run, and nothing says of which.
    #[error(
        "{path} holds {what} of a run whose config.toml is gone; put that file back, add \
         --overwrite to delete what is left, or choose another folder with --set name=NAME"
    )]
    Remains {
        /// The folder.
        path: PathBuf,
        /// What is left.
        what: &'static str,
    },
    /// The folder holds no trained run.
    #[error(
        "{path} holds no run with a checkpoint; it has to be a folder that `train` or \
         `convert import` has written"
    )]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// There is no checkpoint of that step.
    #[error("{path} has no checkpoint of step {step}; there are {have}")]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
        /// The step asked for.
        step: u64,
        /// The steps that there are.
        have: String,
    },
    /// The folder's run was made from another config.
    #[error(
        "{path} was made with `{key}` = {there}, the run to resume has {here}; it has to be the \
         same, or another folder: --set name=NAME"
    )]
    OtherRun {
        /// The folder's own config.
        path: PathBuf,
        /// The first key that differs.
        key: String,
        /// Its value there.
        there: String,
        /// Its value now.
        here: String,
    },
    /// A file is not what was written.
    #[error(
        "{path} is corrupt: {why}; delete {checkpoint} to resume from the checkpoint before it"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// The checkpoint it belongs to.
        checkpoint: PathBuf,
    },
}

/// What to do with a folder that holds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Refuse.
    New,
    /// Delete it.
    Overwrite,
    /// Go on.
    Resume,
}

/// Everything outside the weights that decides how a run goes on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Optimizer steps done.
    pub step: u64,
    /// Best score so far.
    pub best_score: Option<f64>,
    /// The step it was reached at.
    pub best_step: u64,
    /// Evaluations since.
    pub evaluations_since_best: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Seconds spent in training steps.
    pub train_seconds: f64,
    /// Seconds spent altogether.
    pub wall_seconds: f64,
    /// Whether early stopping ended the run here.
    pub stopped_early: bool,
    /// Length of `metrics.jsonl`, in bytes.
    pub metrics_bytes: u64,
}

/// A checkpoint's own description.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    position: Position,
    /// CRC-32 of each file.
    model: u32,
    /// None where nothing was trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    optimizer: Option<u32>,
}

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.bin";
const MANIFEST: &str = "state.json";
const METRICS: &str = "metrics.jsonl";
pub(crate) const CONFIG: &str = "config.toml";
/// The tokenizer of a model that came from elsewhere.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// What else that model's own checkpoint held, for the way back.
const KEPT: &str = "kept.safetensors";
const SUMMARY: &str = "summary.json";
/// TensorBoard's file, which the command writes where the config asks for it.
const EVENTS: &str = "events.out.tfevents.0000000000.linattn";

/// A run's folder, open for writing.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    metrics: File,
    metrics_bytes: u64,
    lock: FolderLock,
}

/// A checkpoint that was found whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Where the run stood.
    pub position: Position,
}

impl Checkpoint {
    /// The model's weights, a safetensors file.
    pub fn model(&self) -> PathBuf {
        self.path.join(MODEL)
    }

    /// The optimizer's record.
    pub fn optimizer(&self) -> PathBuf {
        self.path.join(OPTIMIZER)
    }

    /// What an imported model's own checkpoint held besides its weights, if there was anything.
    pub fn kept(&self) -> Option<PathBuf> {
        Some(self.path.join(KEPT)).filter(|path| path.exists())
    }

    /// The error for a record that cannot be read although its checksum is right.
    pub fn corrupt(&self, path: PathBuf, why: impl ToString) -> FolderError {
        FolderError::Corrupt { path, why: why.to_string(), checkpoint: self.path.clone() }
    }
}

/// A model from elsewhere, to be put into a folder as if it had been trained there.
pub(crate) struct Arrival<'a> {
    /// `config.toml`.
    pub(crate) config: String,
    /// A file to be copied.
    pub(crate) tokenizer: Option<&'a Path>,
    /// Bytes to be kept beside the weights.
    pub(crate) kept: Option<&'a [u8]>,
}

/// Writes the folder `root` of a model that was not trained here. `write` puts the weights where it is
/// told. The config comes last: without it, the folder is none.
/// # Errors
/// [`FolderError`] says what stands in the way.
pub(crate) fn write_arrival(
    root: &Path,
    overwrite: bool,
    arrival: &Arrival<'_>,
    write: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), FolderError> {
    fs::create_dir_all(root).map_err(io_error("create the folder", root))?;
    let _lock = FolderLock::take(root)?;
    match Holding::of(root)? {
        Holding::Nothing => {}
        _ if overwrite => remove_run(root)?,
        _ => return Err(FolderError::Taken { path: root.into(), status: status(root) }),
    }
    let position = Position::default();
    let (draft, target) = new_checkpoint(root, position.step)?;
    let model = draft.join(MODEL);
    write(&model).map_err(|why| io_error("write", &draft)(io::Error::other(why)))?;
    if let Some(kept) = arrival.kept {
        write_synced(&draft.join(KEPT), kept)?;
    }
    write_manifest(&draft, &Manifest { position, model: checksum(&model)?, optimizer: None })?;
    fs::rename(&draft, &target).map_err(io_error("write", &target))?;
    if let Some(tokenizer) = arrival.tokenizer {
        let bytes = fs::read(tokenizer).map_err(io_error("read", tokenizer))?;
        write_synced(&root.join(TOKENIZER), &bytes)?;
    }
    replace(root, CONFIG, arrival.config.as_bytes())
}

/// Where a checkpoint is drafted, an empty folder, and where it belongs.
fn new_checkpoint(root: &Path, step: u64) -> Result<(PathBuf, PathBuf), FolderError> {
    let checkpoints = root.join("checkpoints");
    let draft = checkpoints.join("unfinished");
    if draft.exists() {
        fs::remove_dir_all(&draft).map_err(io_error("remove", &draft))?;
    }
    fs::create_dir_all(&draft).map_err(io_error("create the folder", &draft))?;
    Ok((draft, checkpoints.join(folder_name(step))))
}

fn write_manifest(draft: &Path, manifest: &Manifest) -> Result<(), FolderError> {
    let path = draft.join(MANIFEST);
    let text =
        serde_json::to_vec_pretty(manifest).map_err(|e| io_error("write", &path)(e.into()))?;
    write_synced(&path, &text)
}

fn replace(root: &Path, name: &str, bytes: &[u8]) -> Result<(), FolderError> {
    let (path, draft) = (root.join(name), root.join(format!("{name}.unfinished")));
    write_synced(&draft, bytes)?;
    fs::rename(&draft, &path).map_err(io_error("write", &path))
}

impl RunFolder {
    /// Opens the folder `root` for `run`. Gives the newest checkpoint when resuming.
    /// # Errors
    /// [`FolderError`] says what stands in the way; then nothing was changed.
    pub fn open(
        root: &Path,
        run: &RunConfig,
        start: Start,
    ) -> Result<(Self, Option<Checkpoint>), FolderError> {
        if start == Start::Resume && !root.exists() {
            return Err(FolderError::Nothing { path: root.into() });
        }
        fs::create_dir_all(root).map_err(io_error("create the folder", root))?;
        let lock = FolderLock::take(root)?;
        let checkpoint = match (start, Holding::of(root)?) {
            (Start::Overwrite, Holding::Nothing) | (Start::New, Holding::Nothing) => None,
            (Start::Overwrite, _) => {
                remove_run(root)?;
                None
            }
            (Start::Resume, Holding::Nothing) => {
                return Err(FolderError::Nothing { path: root.into() });
            }
            (_, Holding::Remains(what)) => {
                return Err(FolderError::Remains { path: root.into(), what });
            }
            (Start::New, Holding::Run) => {
                return Err(FolderError::Exists { path: root.into(), status: status(root) });
            }
            (start, Holding::Barren) => {
                if start == Start::Resume {
                    same_run(root, run)?;
                }
                return Err(FolderError::Barren { path: root.into(), status: status(root) });
            }
            (Start::Resume, Holding::Run) => {
                same_run(root, run)?;
                newest_checkpoint(root)?
            }
        };
        let checkpoints = root.join("checkpoints");
        fs::create_dir_all(&checkpoints).map_err(io_error("create the folder", &checkpoints))?;
        let metrics_bytes = checkpoint.as_ref().map_or(0, |c| c.position.metrics_bytes);
        let metrics = open_metrics(&root.join(METRICS), metrics_bytes)?;
        let folder = Self { root: root.into(), metrics, metrics_bytes, lock };
        if checkpoint.is_none() {
            replace(root, CONFIG, run.to_toml().as_bytes())?;
        }
        Ok((folder, checkpoint))
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Refuses to write where another run may be by now.
    fn check_lock(&self) -> Result<(), FolderError> {
        match self.lock.holds() {
            true => Ok(()),
            false => Err(FolderError::Lost { path: self.root.clone() }),
        }
    }

    /// Adds a line to `metrics.jsonl`.
    /// # Errors
    /// [`FolderError::Io`].
    pub fn append(&mut self, line: &serde_json::Value) -> Result<(), FolderError> {
        let text = format!("{line}\n");
        let path = self.root.join(METRICS);
        self.metrics.write_all(text.as_bytes()).map_err(io_error("write", &path))?;
        self.metrics_bytes += text.len() as u64;
        Ok(())
    }

    /// Every line of `metrics.jsonl` so far.
    /// # Errors
    /// [`FolderError::Io`].
    pub fn metrics(&self) -> Result<Vec<serde_json::Value>, FolderError> {
        let path = self.root.join(METRICS);
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Writes a checkpoint; `write` puts the model's weights and the optimizer's record where it is told.
    /// # Errors
    /// [`FolderError::Io`] or [`FolderError::Lost`]; earlier checkpoints are as they were.
    pub fn save(
        &self,
        position: &Position,
        write: impl FnOnce(&Path, &Path) -> Result<(), String>,
    ) -> Result<(), FolderError> {
        self.check_lock()?;
        if self.root.join("checkpoints").join(folder_name(position.step)).exists() {
            return Ok(()); // a step has one state
        }
        let (draft, target) = new_checkpoint(&self.root, position.step)?;
        let (model, optimizer) = (draft.join(MODEL), draft.join(OPTIMIZER));
        write(&model, &optimizer)
            .map_err(|why| io_error("write", &draft)(io::Error::other(why)))?;
        let manifest = Manifest {
            position: Position { metrics_bytes: self.metrics_bytes, ..position.clone() },
            model: checksum(&model)?,
            optimizer: Some(checksum(&optimizer)?),
        };
        write_manifest(&draft, &manifest)?;
        self.metrics.sync_data().map_err(io_error("write", &self.root.join(METRICS)))?;
        fs::rename(&draft, &target).map_err(io_error("write", &target))
    }

    /// Deletes all checkpoints but the `keep` newest and the one of step `best`.
    /// # Errors
    /// [`FolderError::Io`].
    pub fn prune(&self, keep: usize, best: u64) -> Result<(), FolderError> {
        self.check_lock()?;
        let list = checkpoints(&self.root)?;
        for path in list.iter().rev().skip(keep) {
            if path.file_name().is_none_or(|name| *name != *folder_name(best)) {
                fs::remove_dir_all(path).map_err(io_error("remove", path))?;
            }
        }
        Ok(())
    }

    /// Writes `summary.json`.
    /// # Errors
    /// [`FolderError::Io`] or [`FolderError::Lost`].
    pub fn write_summary(&self, summary: &serde_json::Value) -> Result<(), FolderError> {
        self.check_lock()?;
        replace(&self.root, SUMMARY, format!("{summary:#}\n").as_bytes())
    }
}

/// The summary that a run left, if it ended in any way.
pub fn read_summary(root: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&fs::read(root.join(SUMMARY)).ok()?).ok()
}

/// What a folder holds before a run begins there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holding {
    /// Nothing of a run.
    Nothing,
    /// A run with a checkpoint.
    Run,
    /// A run without one.
    Barren,
    /// Parts of a run, and no config that says of which.
    Remains(&'static str),
}

impl Holding {
    fn of(root: &Path) -> Result<Self, FolderError> {
        // A run that was cut off while it began may have left this file with nothing in it.
        let metrics = root.join(METRICS).metadata().is_ok_and(|file| file.len() > 0);
        let checkpoints = !checkpoints(root)?.is_empty();
        Ok(match (root.join(CONFIG).exists(), checkpoints) {
            (true, true) => Self::Run,
            (true, false) => Self::Barren,
            (false, true) => Self::Remains("checkpoints"),
            (false, false) if metrics => Self::Remains("metrics"),
            (false, false) => Self::Nothing,
        })
    }
}

fn status(root: &Path) -> String {
    let known = read_summary(root).and_then(|s| s["status"].as_str().map(str::to_string));
    let imported = || root.join("checkpoints").join(folder_name(0)).exists();
    known.unwrap_or_else(|| if imported() { "imported" } else { "unfinished" }.to_string())
}

/// Deletes what a run writes, and nothing else that a person may have put beside it.
fn remove_run(root: &Path) -> Result<(), FolderError> {
    let checkpoints = root.join("checkpoints");
    if checkpoints.exists() {
        fs::remove_dir_all(&checkpoints).map_err(io_error("remove", &checkpoints))?;
    }
    for name in [SUMMARY, METRICS, "curve.svg", "curve.png", EVENTS, TOKENIZER, CONFIG] {
        let path = root.join(name);
        if path.exists() {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
    }
    Ok(())
}

fn folder_name(step: u64) -> String {
    format!("step-{step:010}")
}

pub(crate) fn io_error<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> FolderError + 'a {
    move |source| FolderError::Io { doing, path: path.into(), source }
}

fn open_metrics(path: &Path, keep: u64) -> Result<File, FolderError> {
    let error = || io_error("write", path);
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(error())?;
    let length = file.metadata().map_err(error())?.len();
    file.set_len(keep.min(length)).map_err(error())?;
    Ok(file)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
    let mut file = File::create(path).map_err(io_error("write", path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io_error("write", path))
}

fn checksum(path: &Path) -> Result<u32, FolderError> {
    Ok(crc32fast::hash(&fs::read(path).map_err(io_error("read", path))?))
}

/// Whole checkpoints, oldest first.
fn checkpoints(root: &Path) -> Result<Vec<PathBuf>, FolderError> {
    let folder = root.join("checkpoints");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(io_error("read", &folder)(e)),
    };
    let mut list = vec![];
    for entry in entries {
        let entry = entry.map_err(io_error("read", &folder))?;
        if entry.file_name().to_string_lossy().starts_with("step-") {
            list.push(entry.path());
        }
    }
    list.sort();
    Ok(list)
}

/// One of a run's checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The newest.
    Last,
    /// The one with the best score.
    Best,
    /// The one after so many steps.
    Step(u64),
}

/// Finds a checkpoint of the run in `root` and checks that it is whole.
/// # Errors
/// [`FolderError::NoCheckpoint`] lists those that there are; [`FolderError::Corrupt`] names a file.
pub fn find_checkpoint(root: &Path, which: Which) -> Result<Checkpoint, FolderError> {
    let nothing = || FolderError::NoRun { path: root.into() };
    let newest = newest_checkpoint(root)?.ok_or_else(nothing)?;
    let step = match which {
        Which::Last => return Ok(newest),
        Which::Best => newest.position.best_step,
        Which::Step(step) => step,
    };
    let path = root.join("checkpoints").join(folder_name(step));
    if !path.exists() {
        let name = |path: &PathBuf| {
            let name = path.file_name()?.to_str()?;
            Some(name.strip_prefix("step-")?.parse::<u64>().ok()?.to_string())
        };
        let have = checkpoints(root)?.iter().filter_map(name).collect::<Vec<_>>().join(", ");
        return Err(FolderError::NoCheckpoint { path: root.into(), step, have });
    }
    open_checkpoint(path)
}

fn newest_checkpoint(root: &Path) -> Result<Option<Checkpoint>, FolderError> {
    checkpoints(root)?.pop().map(open_checkpoint).transpose()
}

fn open_checkpoint(path: PathBuf) -> Result<Checkpoint, FolderError> {
    let manifest = path.join(MANIFEST);
    let text = fs::read(&manifest).map_err(io_error("read", &manifest))?;
    let corrupt = |file: PathBuf, why: String| FolderError::Corrupt {
        path: file,
        why,
        checkpoint: path.clone(),
    };
    let Manifest { position, model, optimizer } =
        serde_json::from_slice(&text).map_err(|e| corrupt(manifest, e.to_string()))?;
    let optimizer = optimizer.map(|optimizer| (OPTIMIZER, optimizer));
    for (name, want) in [(MODEL, model)].into_iter().chain(optimizer) {
        let file = path.join(name);
        let got = checksum(&file)?;
        if got != want {
            return Err(corrupt(file, format!("its checksum is {got:08x}, not {want:08x}")));
        }
    }
    Ok(Checkpoint { path, position })
}

fn same_run(root: &Path, run: &RunConfig) -> Result<(), FolderError> {
    let path = root.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    let other = |key: String, there: String, here: String| FolderError::OtherRun {
        path: path.clone(),
        key,
        there,
        here,
    };
    let stored: RunConfig = toml::from_str(&text)
        .map_err(|e| other("config.toml".into(), e.message().to_string(), "a run config".into()))?;
    match stored.difference(run) {
        Some((key, there, here)) => Err(other(key, there, here)),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
