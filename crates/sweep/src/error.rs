//! Errors, each said in one line.

use std::io;
use std::path::{Path, PathBuf};

/// Why a sweep or a report stopped before or outside its runs.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
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
    /// A file is no TOML, or not the TOML it should be.
    #[error("{path} is no {what}\n{source}")]
    Parse {
        /// The kind of file that it should be.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Where, and what would do.
        source: Box<toml::de::Error>,
    },
    /// A value that parses and still makes no sweep.
    #[error("`{key}` is {got}; it has to be {want}")]
    Value {
        /// Where it stands in the sweep's TOML, for instance `grid.seed`.
        key: String,
        /// The value that stands there.
        got: String,
        /// The values that would be accepted.
        want: String,
    },
    /// The base config with a run's settings in place makes no run.
    #[error("{base} with {settings}: {why}")]
    Resolve {
        /// The base config.
        base: PathBuf,
        /// The settings that were put in place.
        settings: String,
        /// The error of the run's own check.
        why: String,
    },
    /// The folder's rows were made from something else.
    #[error(
        "{path} has rows whose {what} is {there}, this sweep has {here}; go back to that one, or \
         start a folder of its own"
    )]
    OtherRows {
        /// The table of rows.
        path: PathBuf,
        /// The label that differs.
        what: &'static str,
        /// The rows' value.
        there: String,
        /// The sweep's value.
        here: String,
    },
    /// The table of rows is not what was written.
    #[error("{path}, line {line}: {why}")]
    Rows {
        /// The table of rows.
        path: PathBuf,
        /// From 1, the header.
        line: usize,
        /// The fault, and the remedy.
        why: String,
    },
    /// A README's marks for the report are not a pair.
    #[error("{path}: {why}")]
    Readme {
        /// The README.
        path: PathBuf,
        /// The fault, and the remedy.
        why: String,
    },
    /// A picture that could not be drawn or written.
    #[error(transparent)]
    Picture(#[from] linattn_plot::PictureError),
}

impl SweepError {
    pub(crate) fn value(
        key: impl Into<String>,
        got: impl ToString,
        want: impl Into<String>,
    ) -> Self {
        Self::Value { key: key.into(), got: got.to_string(), want: want.into() }
    }

    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.into(), source }
    }
}
