//! Errors of reading and writing checkpoints.

use crate::format::Format;
use std::path::PathBuf;

/// Why a checkpoint cannot be read or written. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder holds no model that is known here.
    #[error("{folder} cannot be imported: {}", .faults.join("; "))]
    Import {
        /// The folder.
        folder: PathBuf,
        /// All that is wrong.
        faults: Vec<String>,
    },
    /// The model is none that a checkpoint of this family could hold.
    #[error("the model cannot be exported as `{family}`: {}", .faults.join("; "))]
    Export {
        /// The family.
        family: String,
        /// All that is wrong.
        faults: Vec<String>,
    },
    /// There is no such family, or the model is of none.
    #[error("no checkpoints of `{family}` are known; it has to be one of {}", Format::known().join(", "))]
    Family {
        /// The family, or the model's mixer.
        family: String,
    },
    /// The folder holds a checkpoint already.
    #[error("{folder} holds a checkpoint already; add --overwrite to replace it")]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// Writing failed.
    #[error("can't write {path}: {why}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        why: String,
    },
}
