//! Errors of the tasks.

use std::path::{Path, PathBuf};

/// Why a task refused its config.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// A value that parses and still makes no task.
    #[error("`{key}` is {got}; it has to be {want}")]
    Value {
        /// Where it stands in the run's TOML, for instance `task.mqar.train[0].pairs`.
        key: String,
        /// The value that stands there.
        got: String,
        /// The values that would be accepted.
        want: String,
    },
    /// A file or folder that a task is made from cannot be used.
    #[error("`{key}` names {path}: {why}")]
    File {
        /// Where it stands in the run's TOML, for instance `task.s_niah.haystack`.
        key: String,
        /// The file or folder.
        path: PathBuf,
        /// The fault, and the remedy.
        why: String,
    },
}

impl TaskError {
    /// A file of the key `key` that cannot be used.
    pub(crate) fn file(key: &str, path: &Path, why: impl Into<String>) -> Self {
        Self::File { key: key.into(), path: path.into(), why: why.into() }
    }
}
