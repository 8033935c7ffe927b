//! A checkpoint's own words, kept beside a model that came from it: the family, the names of parts that were
//! left out, and tensors that stood there under another name, cut elsewhere or in another form.

use crate::tensors::{self, Precision, Tensors, Written};
use serde_json::json;
use std::path::Path;

const FAMILY: &str = "family";
const LEFT_OUT: &str = "left_out";

/// Facts of a checkpoint that its model does not hold, kept beside it.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// The family, where it was written down.
    pub(crate) family: Option<String>,
    /// Names of tensors that were left out.
    pub(crate) left_out: Vec<String>,
    /// Tensors as they were.
    pub(crate) tensors: Tensors,
}

/// The bytes of a file with these.
/// # Errors
/// Names a tensor that cannot be written.
pub(crate) fn to_bytes(
    family: &str,
    left_out: &[String],
    tensors: &[Written],
) -> Result<Vec<u8>, String> {
    let words = [(FAMILY, family.to_string()), (LEFT_OUT, json!(left_out).to_string())];
    tensors::to_bytes(tensors, Precision::F32, &words)
}

/// Reads such a file; one without words has tensors alone.
/// # Errors
/// Says what is wrong with it.
pub(crate) fn read(path: &Path) -> Result<Kept, String> {
    let (tensors, mut words) = tensors::read_one(path)?;
    let left_out = words.remove(LEFT_OUT).unwrap_or_else(|| "[]".to_string());
    let left_out = serde_json::from_str(&left_out).map_err(|e| format!("{LEFT_OUT}: {e}"))?;
    Ok(Kept { family: words.remove(FAMILY), left_out, tensors })
}
