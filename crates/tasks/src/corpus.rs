//! Text files, and where their words and sentences lie.

use std::fs;
use std::path::{Path, PathBuf};

use rand::Rng;

use crate::tokenizer::{Encoded, Tokenizer};
use crate::{Example, TaskError};

/// A file of text, whole.
#[derive(Debug, Clone)]
pub(crate) struct TextFile {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Reads one file of UTF-8.
pub(crate) fn read_file(key: &str, path: &Path) -> Result<TextFile, TaskError> {
    let bytes = fs::read(path).map_err(|error| TaskError::file(key, path, error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        TaskError::file(key, path, format!("byte {at} is not UTF-8; convert the file to UTF-8"))
    })?;
    Ok(TextFile { path: path.into(), text })
}

/// Reads the `.txt` files of a folder, sorted by name; those in folders within are left out.
pub(crate) fn read_folder(key: &str, folder: &Path) -> Result<Vec<TextFile>, TaskError> {
    let failed = |error: std::io::Error| TaskError::file(key, folder, error.to_string());
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "txt") && path.is_file() {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(TaskError::file(key, folder, "it has no .txt file; put the text into some"));
    }
    paths.sort();
    paths.iter().map(|path| read_file(key, path)).collect()
}

/// Reads files, and folders as [`read_folder`] does, in the order given.
pub(crate) fn read_texts(key: &str, paths: &[PathBuf]) -> Result<Vec<TextFile>, TaskError> {
    let mut files = Vec::new();
    for (i, path) in paths.iter().enumerate() {
        let key = format!("{key}[{i}]");
        if path.is_dir() {
            files.extend(read_folder(&key, path)?);
        } else {
            files.push(read_file(&key, path)?);
        }
    }
    Ok(files)
}

/// The files one after another, nothing between them.
pub(crate) fn join(files: &[TextFile]) -> String {
    files.iter().map(|file| file.text.as_str()).collect()
}

/// The text with each run of white space as one space, and none at its ends.
pub(crate) fn collapse(text: &str) -> String {
    let mut collapsed = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        if !collapsed.is_empty() {
            collapsed.push(' ');
        }
        collapsed.push_str(word);
    }
    collapsed
}

/// A text whose words are parted by single spaces.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prose {
    pub(crate) text: String,
    /// Where each word ends.
    ends: Vec<usize>,
    /// Where each sentence but the first starts: after `.`, `?` or `!` and a space.
    sentences: Vec<usize>,
}

impl Prose {
    pub(crate) fn new(text: &str) -> Self {
        let text = collapse(text);
        let bytes = text.as_bytes();
        let mut ends: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i] == b' ').collect();
        let stop = |&&end: &&usize| end > 0 && matches!(bytes[end - 1], b'.' | b'?' | b'!');
        let sentences = ends.iter().filter(stop).map(|end| end + 1).collect();
        if !bytes.is_empty() {
            ends.push(bytes.len());
        }
        Self { text, ends, sentences }
    }

    /// How many words there are.
    pub(crate) fn words(&self) -> usize {
        self.ends.len()
    }

    /// How many words, from word `first` on, end within `bytes` of its start.
    pub(crate) fn words_within(&self, first: usize, bytes: usize) -> usize {
        let last = self.start(first) + bytes;
        self.ends[first..].partition_point(|&end| end <= last)
    }

    /// Words that start in the first `bytes` of the text.
    pub(crate) fn words_from(&self, bytes: usize) -> usize {
        if bytes == 0 { 0 } else { 1 + self.ends.partition_point(|&end| end + 1 < bytes) }
    }

    fn start(&self, word: usize) -> usize {
        if word == 0 { 0 } else { self.ends[word - 1] + 1 }
    }

    /// `count` words from word `first` on, cut in two after `depth` percent of their sentences. The
    /// space at the cut belongs to neither part.
    pub(crate) fn cut(&self, first: usize, count: usize, depth: u32) -> (&str, &str) {
        if count == 0 {
            return ("", "");
        }
        let (start, end) = (self.start(first), self.ends[first + count - 1]);
        let before = self.sentences.partition_point(|&at| at <= start);
        let inside = &self.sentences[before..self.sentences.partition_point(|&at| at < end)];
        // As published: a float, rounded down.
        let sentences = ((inside.len() + 1) as f64 * (f64::from(depth) / 100.0)) as usize;
        match sentences {
            0 => ("", &self.text[start..end]),
            n if n > inside.len() => (&self.text[start..end], ""),
            n => (&self.text[start..inside[n - 1] - 1], &self.text[inside[n - 1]..end]),
        }
    }
}

/// A text as ids, to cut windows from. Inputs of neighbouring windows don't overlap; every target
/// is the id after its input, so the first id of the text is read and never asked for.
#[derive(Debug, Clone)]
pub(crate) struct Windows {
    encoded: Encoded,
}

impl Windows {
    pub(crate) fn new(encoded: Encoded) -> Self {
        Self { encoded }
    }

    /// Ids of the text.
    pub(crate) fn tokens(&self) -> usize {
        self.encoded.ids.len()
    }

    /// How many windows cover the text once; the last of them may be padded.
    pub(crate) fn count(&self, length: usize) -> usize {
        (self.tokens() - 1).div_ceil(length)
    }

    /// Bytes that the ids of `range` stand for.
    pub(crate) fn bytes(&self, range: std::ops::Range<usize>) -> usize {
        self.encoded.bytes(range)
    }

    /// The ids that a window reads: fewer than `length` at the end of the text.
    pub(crate) fn ids(&self, start: usize, length: usize) -> &[u32] {
        &self.encoded.ids[start..(start + length).min(self.tokens() - 1)]
    }

    /// The window from `start` on; what the text lacks is filled with `padding`, and not scored.
    pub(crate) fn example(&self, start: usize, length: usize, padding: u32) -> Example {
        let mut input = self.ids(start, length).to_vec();
        let answers = &self.encoded.ids[start + 1..][..input.len()];
        let mut target: Vec<_> = answers.iter().copied().map(Some).collect();
        input.resize(length, padding);
        target.resize(length, None);
        Example { input, target }
    }

    /// Where a random window starts; each place that has `length` ids and one more is as likely.
    pub(crate) fn draw(&self, length: usize, rng: &mut impl Rng) -> usize {
        rng.random_range(0..self.tokens() - length)
    }
}

/// Encodes a text that windows of `length` are to be cut from.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    key: &str,
    path: &Path,
) -> Result<Windows, TaskError> {
    let encoded = tokenizer.encode(text);
    encoded.map(Windows::new).map_err(|why| TaskError::file(key, path, why))
}
