//! Checkpoints on disk: each a folder `step-0000000200` that is there whole or not at all.
//!
//! ```text
//! model.safetensors    weights
//! optimizer.safetensors  the optimizer's record
//! state.json           where the run stood, with checksums of both files, of metrics.jsonl up to
//!                      there, and of itself
//! ```
//! Whoever reads a checkpoint checks all of it first.

use crate::folder_error::{FolderError, io_error, replace, write_synced};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

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
    /// Whether the evaluation after this step was interrupted, and comes first when the run goes on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evaluation_due: bool,
    /// Length of `metrics.jsonl`, in bytes.
    pub metrics_bytes: u64,
}

/// A checkpoint's own description.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    position: Position,
    /// CRC-32 of each file.
    model: u32,
    /// None where nothing was trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    optimizer: Option<u32>,
    /// CRC-32 of `metrics.jsonl` as far as `position` has it; none where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metrics: Option<u32>,
    /// CRC-32 of all the rest, as JSON without spaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<u32>,
}

impl Manifest {
    /// With its own checksum.
    fn signed(self) -> Result<Self, serde_json::Error> {
        let bare = Self { checksum: None, ..self };
        let checksum = crc32fast::hash(&serde_json::to_vec(&bare)?);
        Ok(Self { checksum: Some(checksum), ..bare })
    }

    /// Whether it is as it was written. Those of older versions have no checksum.
    fn holds(&self) -> bool {
        let signed = || self.clone().signed().ok().and_then(|signed| signed.checksum);
        self.checksum.is_none() || self.checksum == signed()
    }
}

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const MANIFEST: &str = "state.json";
/// Weights that a run with adapters leaves as they are, in the run's folder.
pub(crate) const BASE: &str = "base.safetensors";
/// File with the other contents of an imported model's own checkpoint, for the way back.
pub(crate) const KEPT: &str = "kept.safetensors";
/// A checkpoint that is being written.
const DRAFT: &str = "unfinished";
/// One that is being deleted.
const REMOVED: &str = "removed";

/// A checkpoint that was found whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Where the run stood.
    pub position: Position,
    /// CRC-32 of `metrics.jsonl` up to there.
    pub(crate) metrics: Option<u32>,
    /// CRC-32 of the model's weights.
    pub(crate) checksum: u32,
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

    /// Contents of an imported model's own checkpoint besides its weights, if there were any.
    pub fn kept(&self) -> Option<PathBuf> {
        Some(self.path.join(KEPT)).filter(|path| path.exists())
    }

    /// The error for a record that cannot be read although its checksum is right.
    pub fn corrupt(&self, path: PathBuf, why: impl ToString) -> FolderError {
        corrupt(&self.path, path, why)
    }
}

fn corrupt(checkpoint: &Path, path: PathBuf, why: impl ToString) -> FolderError {
    let earlier = || {
        let all = list(checkpoint.parent()?.parent()?).ok()?;
        Some(all.first().is_some_and(|first| first.1 != checkpoint))
    };
    let remedy = match earlier() {
        Some(true) => {
            let checkpoint = checkpoint.display();
            format!("delete {checkpoint} to resume from the checkpoint before it")
        }
        _ => "there is no checkpoint before it; --overwrite starts the run again".into(),
    };
    FolderError::Corrupt { path, why: why.to_string(), remedy }
}

/// Contents of a checkpoint besides its manifest.
pub(crate) struct Contents<'a, W> {
    /// Writes weights and optimizer where it is told.
    pub(crate) write: W,
    /// Whether there is an optimizer.
    pub(crate) trained: bool,
    /// CRC-32 of `metrics.jsonl`.
    pub(crate) metrics: Option<u32>,
    /// See [`Checkpoint::kept`].
    pub(crate) kept: Option<&'a [u8]>,
}

/// Writes the checkpoint of a position of the run in `root`. If it is there already, only what was
/// found out about it since is written: a step has one state.
/// # Errors
/// [`FolderError::Io`]; earlier checkpoints are as they were.
pub(crate) fn write<W: FnOnce(&Path, &Path) -> Result<(), String>>(
    root: &Path,
    position: Position,
    contents: Contents<'_, W>,
) -> Result<(), FolderError> {
    let Contents { write, trained, metrics, kept } = contents;
    let target = folder(root).join(folder_name(position.step));
    if target.exists() {
        return amend(&target, position, metrics);
    }
    let draft = folder(root).join(DRAFT);
    clear(&draft)?;
    fs::create_dir(&draft).map_err(io_error("create the folder", &draft))?;
    let (model, optimizer) = (draft.join(MODEL), draft.join(OPTIMIZER));
    let failed = |why: String| io_error("write", &target)(plain(why));
    if let Err(e) = write(&model, &optimizer).map_err(failed) {
        let _on_a_full_disk_it_is_in_the_way = clear(&draft);
        return Err(e);
    }
    if let Some(kept) = kept {
        write_synced(&draft.join(KEPT), kept)?;
    }
    let optimizer = trained.then(|| seal(&optimizer)).transpose()?;
    let manifest = Manifest { position, model: seal(&model)?, optimizer, metrics, checksum: None };
    write_synced(&draft.join(MANIFEST), &text(manifest, &draft)?)?;
    fs::rename(&draft, &target).map_err(io_error("write", &target))?;
    sync_folder(&folder(root));
    Ok(())
}

/// The system's own error, out of a text in which a library wrapped it; or that text, as one line.
fn plain(why: String) -> io::Error {
    let code = ["os error ", "Os { code: "].iter().find_map(|mark| {
        let code = why.split(mark).nth(1)?;
        code.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    });
    let line = || why.split_whitespace().collect::<Vec<_>>().join(" ");
    code.map_or_else(|| io::Error::other(line()), io::Error::from_raw_os_error)
}

/// Puts the result of an evaluation that was due into a checkpoint.
fn amend(checkpoint: &Path, position: Position, metrics: Option<u32>) -> Result<(), FolderError> {
    let old = read_manifest(checkpoint)?;
    if !old.position.evaluation_due || position.evaluation_due {
        return Ok(());
    }
    let bytes = text(Manifest { position, metrics, ..old }, checkpoint)?;
    replace(checkpoint, MANIFEST, &bytes)
}

fn text(manifest: Manifest, checkpoint: &Path) -> Result<Vec<u8>, FolderError> {
    let path = checkpoint.join(MANIFEST);
    let text = manifest.signed().and_then(|manifest| serde_json::to_vec_pretty(&manifest));
    text.map_err(|e| io_error("write", &path)(e.into()))
}

/// Has a file's bytes on the disk, and gives their CRC-32.
fn seal(path: &Path) -> Result<u32, FolderError> {
    let file = fs::OpenOptions::new().append(true).open(path);
    file.and_then(|file| file.sync_all()).map_err(io_error("write", path))?;
    checksum(path)
}

fn checksum(path: &Path) -> Result<u32, FolderError> {
    Ok(crc32fast::hash(&fs::read(path).map_err(io_error("read", path))?))
}

/// The weights that the adapters of the run in `root` stand beside.
/// # Errors
/// [`FolderError::Corrupt`] if they are not those of this checksum, in hexadecimal digits.
pub(crate) fn base(root: &Path, want: &str) -> Result<PathBuf, FolderError> {
    let path = root.join(BASE);
    let remedy = || format!("--overwrite starts {} again", root.display());
    if !path.exists() {
        return Err(FolderError::Corrupt { path, why: "it is missing".into(), remedy: remedy() });
    }
    let got = format!("{:08x}", checksum(&path)?);
    if got != want {
        let why = format!("its checksum is {got}, not {want}");
        return Err(FolderError::Corrupt { path, why, remedy: remedy() });
    }
    Ok(path)
}

/// Has names on the disk too, where the system can.
fn sync_folder(path: &Path) {
    if cfg!(unix) {
        // Some file systems refuse it, and the names are there all the same.
        let _refused = fs::File::open(path).and_then(|folder| folder.sync_all());
    }
}

/// The folder that holds the checkpoints of the run in `root`.
pub(crate) fn folder(root: &Path) -> PathBuf {
    root.join("checkpoints")
}

fn folder_name(step: u64) -> String {
    format!("step-{step:010}")
}

/// Steps and folders of whole checkpoints, oldest first.
pub(crate) fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>, FolderError> {
    let folder = folder(root);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(io_error("read", &folder)(e)),
    };
    let mut list = vec![];
    for entry in entries {
        let entry = entry.map_err(io_error("read", &folder))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        list.extend(step.map(|step| (step, entry.path())));
    }
    list.sort();
    Ok(list)
}

/// Deletes all checkpoints but the `keep` newest and the one of step `best`.
/// # Errors
/// [`FolderError::Io`].
pub(crate) fn prune(root: &Path, keep: usize, best: u64) -> Result<(), FolderError> {
    for (step, path) in list(root)?.iter().rev().skip(keep) {
        if *step != best {
            remove(root, path)?;
        }
    }
    Ok(())
}

/// Deletes a checkpoint. Whenever that is cut off, no half of one is left under its name.
fn remove(root: &Path, path: &Path) -> Result<(), FolderError> {
    let removed = folder(root).join(REMOVED);
    clear(&removed)?;
    fs::rename(path, &removed).map_err(io_error("remove", path))?;
    clear(&removed)
}

/// Deletes what a cut left of checkpoints that were being written or deleted.
/// # Errors
/// [`FolderError::Io`].
pub(crate) fn tidy(root: &Path) -> Result<(), FolderError> {
    for (_, checkpoint) in list(root)? {
        let _there_is_none = fs::remove_file(checkpoint.join(format!("{MANIFEST}.unfinished")));
    }
    [DRAFT, REMOVED].iter().try_for_each(|name| clear(&folder(root).join(name)))
}

fn clear(folder: &Path) -> Result<(), FolderError> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("remove", folder)(e)),
        _ => Ok(()),
    }
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
    let step = match which {
        Which::Last => return newest(root)?.ok_or_else(nothing),
        Which::Best => newest(root)?.ok_or_else(nothing)?.position.best_step,
        Which::Step(step) => step,
    };
    let all = list(root)?;
    match all.iter().find(|(there, _)| *there == step) {
        Some((_, path)) => open(path.clone()),
        None if all.is_empty() => Err(nothing()),
        None => {
            let have: Vec<String> = all.iter().map(|(step, _)| step.to_string()).collect();
            Err(FolderError::NoCheckpoint { path: root.into(), step, have: have.join(", ") })
        }
    }
}

/// The newest checkpoint of the run in `root`, checked.
/// # Errors
/// [`FolderError::Corrupt`] names a file.
pub(crate) fn newest(root: &Path) -> Result<Option<Checkpoint>, FolderError> {
    list(root)?.pop().map(|(_, path)| open(path)).transpose()
}

fn read_manifest(checkpoint: &Path) -> Result<Manifest, FolderError> {
    let path = checkpoint.join(MANIFEST);
    let wrong = |why: String| corrupt(checkpoint, path.clone(), why);
    let bytes = read(checkpoint, MANIFEST)?;
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    if !manifest.holds() {
        return Err(wrong("its own checksum is another".into()));
    }
    let step = manifest.position.step;
    match checkpoint.file_name().is_some_and(|name| *name == *folder_name(step)) {
        true => Ok(manifest),
        false => Err(wrong(format!("it is of step {step}"))),
    }
}

fn read(checkpoint: &Path, name: &str) -> Result<Vec<u8>, FolderError> {
    let path = checkpoint.join(name);
    fs::read(&path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => corrupt(checkpoint, path, "it is missing"),
        _ => io_error("read", &path)(e),
    })
}

fn open(path: PathBuf) -> Result<Checkpoint, FolderError> {
    let Manifest { position, model, optimizer, metrics, checksum: _ } = read_manifest(&path)?;
    let optimizer = optimizer.map(|optimizer| (OPTIMIZER, optimizer));
    for (name, want) in [(MODEL, model)].into_iter().chain(optimizer) {
        let got = crc32fast::hash(&read(&path, name)?);
        if got != want {
            let why = format!("its checksum is {got:08x}, not {want:08x}");
            return Err(corrupt(&path, path.join(name), why));
        }
    }
    Ok(Checkpoint { path, position, metrics, checksum: model })
}
