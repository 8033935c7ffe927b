//! Errors of reading and writing checkpoints.

use crate::format::Format;
use std::path::PathBuf;

/// Why a checkpoint cannot be read or written. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder holds no model that is known here.
    #[error("{folder} cannot be imported: {}", in_a_line(.faults))]
    Import {
        /// The folder.
        folder: PathBuf,
        /// All that is wrong.
        faults: Vec<String>,
    },
    /// The model is none that a checkpoint of this family could hold.
    #[error("the model cannot be exported as `{family}`: {}", in_a_line(.faults))]
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

/// All faults in one line, whatever names in a file have in them.
fn in_a_line(faults: &[String]) -> String {
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().collect(),
        false => String::from(c),
    };
    faults.join("; ").chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_line_breaks_stay_in_the_line() {
        let faults = vec!["`num_hidde\n_layers` is 2".into(), "`\u{1b}[2J` is \"é\"".into()];
        let text = CheckpointError::Import { folder: "there".into(), faults }.to_string();
        let want = r#"there cannot be imported: `num_hidde\n_layers` is 2; `\u{1b}[2J` is "é""#;
        assert_eq!(text, want);
    }
}
