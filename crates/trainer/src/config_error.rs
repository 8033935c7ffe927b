//! Errors of a run's config, in its own terms.

use linattn::nn::ConfigError as ModelError;
use linattn_tasks::TaskError;
use std::path::PathBuf;
use std::string::FromUtf8Error;

/// A config that no run can be made from. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("can't read the run config {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no TOML, or no run config.
    #[error("{path} is no run config\n{why}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where, and what would do.
        why: String,
    },
    /// An override is not of the form `key=value`.
    #[error("`--set {given}`: {want}")]
    Override {
        /// As given.
        given: String,
        /// The values that would be accepted.
        want: String,
    },
    /// An override makes the config wrong.
    #[error("{path} with {overrides} is no run config\n{why}")]
    ParseOverrides {
        /// The file.
        path: PathBuf,
        /// All overrides.
        overrides: String,
        /// The fault, and the remedy.
        why: String,
    },
    /// A file or folder that the config names cannot be used.
    #[error(transparent)]
    File(TaskError),
    /// A run that the config starts from cannot be used.
    #[error("`{key}` names {path}: {why}")]
    Source {
        /// The key.
        key: &'static str,
        /// The run's folder.
        path: PathBuf,
        /// The fault, and the remedy.
        why: String,
    },
    /// A value is out of range.
    #[error("`{key}` is {got}; it has to be {want}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        got: String,
        /// The values that would be accepted.
        want: String,
    },
}

impl ConfigError {
    pub(crate) fn value(key: &str, got: impl ToString, want: impl ToString) -> Self {
        Self::Value { key: key.to_string(), got: got.to_string(), want: want.to_string() }
    }
}

/// Where a file ceases to be text.
pub(crate) fn no_text(e: &FromUtf8Error) -> String {
    let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    format!("TOML parse error at line {line}: it is no text in UTF-8")
}

/// A parser's error, in the terms of a config.
pub(crate) fn parse_error(e: &toml::de::Error) -> String {
    e.to_string()
        .replace(
            "invalid type: unit variant, expected newtype variant",
            "a name alone; it has to be a table: NAME = {}, for instance mixer.deltanet = {}",
        )
        .replace(
            "invalid type: unit variant, expected struct variant",
            "a name alone; it has to be a table",
        )
        .replace("wanted exactly 1 element, ", "exactly one name has to stand here, ")
}

impl From<ModelError> for ConfigError {
    fn from(e: ModelError) -> Self {
        Self::Value { key: format!("model.{}", e.key), got: e.got, want: e.want }
    }
}

impl From<TaskError> for ConfigError {
    fn from(e: TaskError) -> Self {
        match e {
            TaskError::Value { key, got, want } => Self::Value { key, got, want },
            TaskError::File { .. } => Self::File(e),
        }
    }
}
