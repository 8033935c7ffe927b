//! Files of a checkpoint's folder.

use crate::error::CheckpointError;
use std::fs;
use std::path::Path;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Writes a file under another name and renames it.
pub(crate) fn put(folder: &Path, name: &str, bytes: Vec<u8>) -> Result<(), CheckpointError> {
    let (path, draft) = (folder.join(name), folder.join(format!("{name}.unfinished")));
    let done = fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, &path));
    done.map_err(|e| {
        let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
        CheckpointError::Write { path: path.clone(), why: e.to_string() }
    })
}
