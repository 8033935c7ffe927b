//! A run's folder: what is in it, and how it stays whole whenever the program is cut off.
//!
//! Everything but `metrics.jsonl` is written under another name and renamed; metrics only grow, and a
//! checkpoint remembers how long they were and their checksum, so that resuming cuts off what came
//! after it and nothing else.

use crate::checkpoint::{self, BASE, Checkpoint, Contents, KEPT, Position};
use crate::config::RunConfig;
use crate::folder_error::{FolderError, io_error, replace};
use crate::lock::FolderLock;
use linattn_tasks::TokenizerConfig;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Treatment of a folder that holds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Refuse.
    New,
    /// Delete it.
    Overwrite,
    /// Go on.
    Resume,
}

const METRICS: &str = "metrics.jsonl";
pub(crate) const CONFIG: &str = "config.toml";
/// The tokenizer of a model that came from elsewhere, or a copy of the one that a run is trained with.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Files of a model that came from elsewhere which say how it is talked to; they are kept as they came.
pub const COMPANIONS: [&str; 4] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
];
const SUMMARY: &str = "summary.json";
/// TensorBoard's file, which the command writes where the config asks for it.
const EVENTS: &str = "events.out.tfevents.0000000000.linattn";

/// A run's folder, open for writing.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    metrics: File,
    metrics_bytes: u64,
    /// CRC-32 of the metrics.
    hasher: crc32fast::Hasher,
    lock: FolderLock,
}

/// A model from elsewhere, to be put into a folder as if it had been trained there.
pub(crate) struct Arrival<'a> {
    /// `config.toml`.
    pub(crate) config: String,
    /// A file to be copied.
    pub(crate) tokenizer: Option<&'a Path>,
    /// Files of the names of [`COMPANIONS`], to be copied.
    pub(crate) companions: &'a [PathBuf],
    /// Bytes to be kept beside the weights.
    pub(crate) kept: Option<&'a [u8]>,
}

/// Writes the folder `root` of a model that was not trained here. `write` puts the weights where it is
/// told. The config comes last: without it, nothing in the folder is a run's.
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
        Holding::Nothing => tidy(root)?,
        _ if overwrite => remove_run(root)?,
        _ => return Err(FolderError::Taken { path: root.into(), status: status(root) }),
    }
    let folder = checkpoint::folder(root);
    fs::create_dir_all(&folder).map_err(io_error("create the folder", &folder))?;
    let contents = Contents {
        write: |model: &Path, _: &Path| write(model),
        trained: false,
        metrics: None,
        kept: arrival.kept,
    };
    checkpoint::write(root, Position::default(), contents)?;
    let named = |name: &'static str| {
        Some((name, arrival.companions.iter().find(|path| path.ends_with(name))?.as_path()))
    };
    let companions = COMPANIONS.into_iter().filter_map(named);
    for (name, from) in companions.chain(arrival.tokenizer.map(|path| (TOKENIZER, path))) {
        let bytes = fs::read(from).map_err(io_error("read", from))?;
        replace(root, name, &bytes)?;
    }
    replace(root, CONFIG, arrival.config.as_bytes())
}

/// Copies a file under another name and renames it.
fn copy(from: &Path, root: &Path, name: &str) -> Result<(), FolderError> {
    let (path, draft) = (root.join(name), root.join(format!("{name}.unfinished")));
    let synced = || File::open(&draft)?.sync_all();
    let copied =
        fs::copy(from, &draft).and_then(|_| synced()).and_then(|()| fs::rename(&draft, &path));
    copied.map_err(|e| {
        let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
        io_error("write", &path)(e)
    })
}

impl RunFolder {
    /// Opens the folder `root` for `run`. Gives the newest checkpoint when resuming; else `keep` are the
    /// files of the model to start from that the folder gets copies of, under their names there.
    /// # Errors
    /// [`FolderError`] says what stands in the way; then nothing was changed.
    pub fn open(
        root: &Path,
        run: &RunConfig,
        start: Start,
        keep: &[(&'static str, PathBuf)],
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
                same_tokenizer(root, run)?;
                checkpoint::newest(root)?
            }
        };
        let (metrics, metrics_bytes, hasher) = open_metrics(root, checkpoint.as_ref())?;
        let checkpoints = checkpoint::folder(root);
        fs::create_dir_all(&checkpoints).map_err(io_error("create the folder", &checkpoints))?;
        tidy(root)?;
        let folder = Self { root: root.into(), metrics, metrics_bytes, hasher, lock };
        if checkpoint.is_none() {
            if let Some(TokenizerConfig::File(tokenizer)) = run.task.tokenizer() {
                let bytes = fs::read(tokenizer).map_err(io_error("read", tokenizer))?;
                replace(root, TOKENIZER, &bytes)?;
            }
            keep.iter().try_for_each(|(name, from)| copy(from, root, name))?;
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
        self.hasher.update(text.as_bytes());
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
        self.metrics.sync_data().map_err(io_error("write", &self.root.join(METRICS)))?;
        let position = Position { metrics_bytes: self.metrics_bytes, ..position.clone() };
        let metrics = Some(self.hasher.clone().finalize());
        checkpoint::write(
            &self.root,
            position,
            Contents { write, trained: true, metrics, kept: None },
        )
    }

    /// Whether there is a checkpoint to go on from.
    pub fn has_checkpoint(&self) -> bool {
        checkpoint::list(&self.root).is_ok_and(|list| !list.is_empty())
    }

    /// Deletes all checkpoints but the `keep` newest and the one of step `best`.
    /// # Errors
    /// [`FolderError::Io`] or [`FolderError::Lost`].
    pub fn prune(&self, keep: usize, best: u64) -> Result<(), FolderError> {
        self.check_lock()?;
        checkpoint::prune(&self.root, keep, best)
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

/// Contents of a folder before a run begins there.
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
        let checkpoints = !checkpoint::list(root)?.is_empty();
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
    let imported =
        || checkpoint::list(root).is_ok_and(|list| list.first().is_some_and(|first| first.0 == 0));
    known.unwrap_or_else(|| if imported() { "imported" } else { "unfinished" }.to_string())
}

/// Deletes what a run writes, and nothing else that a person may have put beside it.
fn remove_run(root: &Path) -> Result<(), FolderError> {
    tidy(root)?;
    checkpoint::prune(root, 0, u64::MAX)?;
    let own = [SUMMARY, METRICS, "curve.svg", "curve.png", EVENTS, TOKENIZER, KEPT, BASE, CONFIG];
    for name in own.into_iter().chain(COMPANIONS) {
        let path = root.join(name);
        if path.exists() {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
    }
    Ok(())
}

/// Opens the metrics, as long as the checkpoint has them; gives their length and checksum.
fn open_metrics(
    root: &Path,
    checkpoint: Option<&Checkpoint>,
) -> Result<(File, u64, crc32fast::Hasher), FolderError> {
    let path = root.join(METRICS);
    let keep = checkpoint.map_or(0, |checkpoint| checkpoint.position.metrics_bytes);
    let mut hasher = crc32fast::Hasher::new();
    if keep > 0 {
        let bytes = fs::read(&path).map_err(io_error("read", &path))?;
        let wrong = |why: String| Err(FolderError::Metrics { path: path.clone(), why });
        let known = usize::try_from(keep).ok().and_then(|keep| bytes.get(..keep));
        let Some(known) = known else {
            let length = bytes.len();
            return wrong(format!("it has {length} bytes, and had {keep} at the checkpoint"));
        };
        hasher.update(known);
        let (got, want) = (hasher.clone().finalize(), checkpoint.and_then(|c| c.metrics));
        if let Some(want) = want.filter(|want| *want != got) {
            return wrong(format!("its checksum is {got:08x}, not {want:08x}"));
        }
    }
    let error = || io_error("write", &path);
    let file = OpenOptions::new().create(true).append(true).open(&path).map_err(error())?;
    file.set_len(keep).map_err(error())?;
    Ok((file, keep, hasher))
}

/// Deletes what a cut left of files that were being written.
fn tidy(root: &Path) -> Result<(), FolderError> {
    let names = [SUMMARY, CONFIG, TOKENIZER, KEPT, BASE].into_iter().chain(COMPANIONS);
    let files: Vec<String> = names.map(|name| format!("{name}.unfinished")).collect();
    let pictures = ["curve.svg", "curve.png"].map(|name| format!(".unfinished-{name}"));
    for name in files.iter().chain(&pictures).chain([&format!(".{EVENTS}.unfinished")]) {
        let _there_is_none = fs::remove_file(root.join(name));
    }
    checkpoint::tidy(root)
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
    let mut stored: RunConfig = toml::from_str(&text)
        .map_err(|e| other("config.toml".into(), e.message().to_string(), "a run config".into()))?;
    keep_tokenizer(&mut stored, run, root);
    match stored.difference(run) {
        Some((key, there, here)) => Err(other(key, there, here)),
        None => Ok(()),
    }
}

/// A run that started from another's model reads its own copy of that one's tokenizer.
fn keep_tokenizer(stored: &mut RunConfig, run: &RunConfig, root: &Path) {
    let own = TokenizerConfig::File(root.join(TOKENIZER));
    if run.base.is_some()
        && run.task.tokenizer() == Some(&own)
        && let Some(TokenizerConfig::File(path)) = stored.task.tokenizer_mut()
    {
        *path = root.join(TOKENIZER);
    }
}

/// Refuses to go on with ids of another meaning. Runs of older versions kept no tokenizer.
fn same_tokenizer(root: &Path, run: &RunConfig) -> Result<(), FolderError> {
    let kept = root.join(TOKENIZER);
    let Some(TokenizerConfig::File(path)) = run.task.tokenizer() else { return Ok(()) };
    if !kept.exists() {
        return Ok(());
    }
    let bytes = |path: &Path| fs::read(path).map_err(io_error("read", path));
    match bytes(&kept)? == bytes(path)? {
        true => Ok(()),
        false => Err(FolderError::OtherTokenizer { path: path.clone(), kept }),
    }
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
