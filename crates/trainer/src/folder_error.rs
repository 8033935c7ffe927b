//! Failures of a run's folder, and files that are whole or absent.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a run's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Reading or writing failed.
    #[error("can't {doing} {path}: {source}")]
    Io {
        /// The action that was tried.
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
        /// The files that are left.
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
    /// The run to start from is not the one that was meant.
    #[error(
        "{path} is another run than the one to start from: {why}; name it by `model.from` again"
    )]
    OtherBase {
        /// The run's folder.
        path: PathBuf,
        /// The difference.
        why: String,
    },
    /// A run cannot start from the folder that it writes to.
    #[error(
        "`model.from` names {path}, which the run itself writes to; it has to be another: --set name=NAME"
    )]
    OwnBase {
        /// The folder.
        path: PathBuf,
    },
    /// The run was trained with another tokenizer so far.
    #[error(
        "{path} is not what it was when the run began; {kept} is, and has to be in its place to resume"
    )]
    OtherTokenizer {
        /// The tokenizer that the config names.
        path: PathBuf,
        /// The run's own copy.
        kept: PathBuf,
    },
    /// A checkpoint's file is not what was written.
    #[error("{path} is corrupt: {why}; {remedy}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
        /// The remedy.
        remedy: String,
    },
    /// The metrics are not those that the checkpoint was written beside.
    #[error(
        "{path} is corrupt: {why}; put it back as it was to resume, or start the run again with \
         --overwrite"
    )]
    Metrics {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
}

pub(crate) fn io_error<'a>(
    doing: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> FolderError + 'a {
    move |source| FolderError::Io { doing, path: path.into(), source }
}

/// Writes a file under another name and renames it.
/// # Errors
/// [`FolderError::Io`]; then the file is as it was.
pub(crate) fn replace(root: &Path, name: &str, bytes: &[u8]) -> Result<(), FolderError> {
    let (path, draft) = (root.join(name), root.join(format!("{name}.unfinished")));
    let written = write_synced(&draft, bytes)
        .and_then(|()| fs::rename(&draft, &path).map_err(io_error("write", &path)));
    if written.is_err() {
        let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
    }
    written
}

/// Writes a file and has its bytes on the disk.
/// # Errors
/// [`FolderError::Io`].
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
    let mut file = File::create(path).map_err(io_error("write", path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io_error("write", path))
}
