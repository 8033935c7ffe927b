//! Text to ids and back.
//! ```text
//! bytes   ids 0..256 are the bytes, 256 starts a prompt, 257 ends an answer
//! file    ids of the file's vocabulary, then two more that start and end as above
//! ```

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TaskError;

/// Unit of text that is a token, as TOML spells it: `tokenizer = "bytes"`, or
/// `tokenizer = { file = "tokenizer.json" }`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerConfig {
    /// The bytes of the text and two ids more: 258.
    #[default]
    Bytes,
    /// A `tokenizer.json` as the `tokenizers` library writes it, and two ids more. The special
    /// tokens that it would put around a text are left out.
    File(PathBuf),
}

/// Ids of a file; a model has a row of weights for each.
const MOST_IDS: u32 = 1 << 24;

/// A tokenizer that is ready for use.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// `None` is bytes.
    file: Option<Box<tokenizers::Tokenizer>>,
    /// Ids before the two of our own.
    ids: u32,
}

/// A text as ids, and where in the text each of them ends.
#[derive(Debug, Clone, Default)]
pub(crate) struct Encoded {
    pub(crate) ids: Vec<u32>,
    ends: Vec<usize>,
}

impl Encoded {
    /// Bytes of text that the ids of `range` stand for.
    pub(crate) fn bytes(&self, range: Range<usize>) -> usize {
        let end = |count: usize| if count == 0 { 0 } else { self.ends[count - 1] };
        end(range.end) - end(range.start)
    }

    /// How many ids stand for no more than the first `bytes` of the text.
    pub(crate) fn ids_within(&self, bytes: usize) -> usize {
        self.ends.partition_point(|&end| end <= bytes)
    }
}

impl Tokenizer {
    /// Reads what the config names; `key` is where it stands in the run's TOML.
    pub(crate) fn new(config: &TokenizerConfig, key: &str) -> Result<Self, TaskError> {
        match config {
            TokenizerConfig::Bytes => Ok(Self::bytes()),
            TokenizerConfig::File(path) => Self::read(path, &format!("{key}.file")),
        }
    }

    /// Bytes and the two ids of our own.
    pub fn bytes() -> Self {
        Self { file: None, ids: 256 }
    }

    /// A `tokenizer.json` of any alphabet, and the two ids of our own; `key` is what errors call it.
    /// # Errors
    /// [`TaskError::File`] if it is no tokenizer.
    pub fn open(path: &Path, key: &str) -> Result<Self, TaskError> {
        let refused = |why: String| refusal(key, path, why);
        let text = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
        let none = |error: &dyn std::fmt::Display| refused(format!("it is no tokenizer: {error}"));
        // The library takes JSON that ends early for a mistake of its own, and panics.
        let _whole: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| none(&error))?;
        let mut file = tokenizers::Tokenizer::from_bytes(text).map_err(|error| none(&error))?;
        file.with_padding(None);
        file.with_truncation(None).map_err(|error| refused(error.to_string()))?;
        let last = file.get_vocab(true).into_values().max();
        let last = last.ok_or_else(|| refused("it has no tokens".into()))?;
        if last >= MOST_IDS {
            return Err(refused(format!("its last id is {last}; it has to be below {MOST_IDS}")));
        }
        Ok(Self { file: Some(Box::new(file)), ids: last + 1 })
    }

    /// As [`open`](Self::open); it has to have the alphabet that answers are made of, too.
    fn read(path: &Path, key: &str) -> Result<Self, TaskError> {
        let tokenizer = Self::open(path, key)?;
        tokenizer.check_alphabet().map_err(|why| refusal(key, path, why))?;
        Ok(tokenizer)
    }

    /// A tokenizer without digits or letters would make every answer the same unknown token.
    fn check_alphabet(&self) -> Result<(), String> {
        let alphabet = "is: 0123456789 abcdefghijklmnopqrstuvwxyz-";
        let back = self.decode(&self.encode(alphabet)?.ids);
        if back.contains(alphabet) {
            return Ok(());
        }
        Err(format!("it reads {alphabet:?} and writes {back:?}"))
    }

    /// How many ids there are, with the two of our own.
    pub fn vocab(&self) -> usize {
        self.ids as usize + 2
    }

    /// The id that starts a prompt.
    pub(crate) fn start(&self) -> u32 {
        self.ids
    }

    /// The id that ends an answer, and fills what is left after it.
    pub fn end(&self) -> u32 {
        self.ids + 1
    }

    /// The id of a token of a file, by its own name.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.file.as_ref()?.token_to_id(token)
    }

    /// The ids of a text. Fails where a file's normalizer or model cannot take the text.
    pub(crate) fn encode(&self, text: &str) -> Result<Encoded, String> {
        let Some(file) = &self.file else {
            let ids = text.bytes().map(u32::from).collect();
            return Ok(Encoded { ids, ends: (1..=text.len()).collect() });
        };
        let encoding = file.encode(text, false).map_err(|error| error.to_string())?;
        let ends = encoding.get_offsets().iter().map(|&(_, end)| end).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), ends })
    }

    /// The ids of a text.
    /// # Errors
    /// Error of a file's normalizer or model about a text that it cannot take.
    pub fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.encode(text)?.ids)
    }

    /// Turns ids to text as they come.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: vec![], shown: 0 }
    }

    /// The ids of a text that is known to be fit for it: of the alphabet, or of files that were
    /// encoded when the task was made.
    pub(crate) fn known(&self, text: &str) -> Encoded {
        self.encode(text).expect("`read` tried the alphabet, and the task its files")
    }

    /// How many ids a text has.
    pub(crate) fn count(&self, text: &str) -> usize {
        if self.file.is_none() { text.len() } else { self.known(text).ids.len() }
    }

    /// The text that ids stand for. Bytes that are no UTF-8 read `\xff`; the two ids of our own read
    /// as nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let known: Vec<u32> = ids.iter().copied().filter(|&id| id < self.ids).collect();
        match &self.file {
            None => show_bytes(&known.iter().map(|&id| id as u8).collect::<Vec<_>>()),
            Some(file) => file.decode(&known, false).unwrap_or_else(|error| format!("<{error}>")),
        }
    }

    /// A readable name of an id.
    pub(crate) fn token(&self, id: u32) -> String {
        match &self.file {
            _ if id == self.start() => "<start>".into(),
            _ if id == self.end() => "<end>".into(),
            None if id == u32::from(b' ') => "<space>".into(),
            None if id < 256 => [id as u8].escape_ascii().to_string(),
            Some(file) => file.id_to_token(id).unwrap_or_else(|| id.to_string()),
            None => id.to_string(),
        }
    }
}

fn refusal(key: &str, path: &Path, why: String) -> TaskError {
    let why = format!("{why}; a `tokenizer.json` of the `tokenizers` library would do");
    TaskError::file(key, path, why)
}

/// Ids to text as they come, whole characters only. All pieces together are what the ids read at once.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Those that are not shown yet, and before them the last that were: what an id reads as can depend
    /// on the one before it.
    ids: Vec<u32>,
    shown: usize,
}

impl TextStream<'_> {
    /// Text that can be shown now that this id has come; nothing in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        if id < self.tokenizer.ids {
            self.ids.push(id);
        }
        match &self.tokenizer.file {
            None => self.show(self.ids.len() - unfinished(&self.ids)),
            Some(_) if self.tokenizer.decode(&self.ids).ends_with('\u{fffd}') => String::new(),
            Some(_) => self.show(self.ids.len()),
        }
    }

    /// The rest of the text: half a character, perhaps.
    pub fn finish(mut self) -> String {
        self.show(self.ids.len())
    }

    /// Text that the first `to` ids add to the text shown so far.
    fn show(&mut self, to: usize) -> String {
        let before = self.tokenizer.decode(&self.ids[..self.shown]);
        let all = self.tokenizer.decode(&self.ids[..to]);
        let new = all.get(before.len()..).unwrap_or_default().to_string();
        if !new.is_empty() {
            self.ids.drain(..self.shown);
            self.shown = to - self.shown;
        }
        new
    }
}

/// How many bytes at the end are the beginning of a character.
fn unfinished(ids: &[u32]) -> usize {
    let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
    let last = bytes.utf8_chunks().last();
    let cut = last.map_or(&[][..], |chunk| chunk.invalid());
    // Bytes that no others could make a character of are as finished as they will be.
    let hopeless = std::str::from_utf8(cut).is_err_and(|e| e.error_len().is_some());
    if hopeless { 0 } else { cut.len() }
}

fn show_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A tokenizer of words that are split at every character, as a file: byte-level, with `the`
    /// and ` the` merged.
    pub(crate) fn write_small(path: &Path) {
        let alphabet = (b'!'..=b'~').map(|byte| (byte as char).to_string());
        let more = ["Ġ", "Ċ", "th", "the", "Ġthe"].map(String::from);
        let entry = |(id, token): (usize, String)| format!("{token:?}: {id}");
        let vocab: Vec<_> = alphabet.chain(more).enumerate().map(entry).collect();
        let text = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "post_processor": null,
            "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}},
            "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}},
            "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": {{{}}}, "merges": [["t", "h"], ["th", "e"], ["Ġ", "the"]]}}}}"#,
            vocab.join(", ")
        );
        std::fs::write(path, text).unwrap();
    }

    fn bytes() -> Tokenizer {
        Tokenizer::new(&TokenizerConfig::Bytes, "task.x.tokenizer").unwrap()
    }

    #[test]
    fn bytes_are_their_own_ids_and_come_back() {
        let tokenizer = bytes();
        let encoded = tokenizer.encode("aé").unwrap();
        assert_eq!(encoded.ids, [97, 0xc3, 0xa9]);
        assert_eq!((encoded.bytes(0..3), encoded.bytes(1..2), tokenizer.vocab()), (3, 1, 258));
        assert_eq!(tokenizer.decode(&[97, 0xc3, 0xa9, 256, 257, 98]), "aéb");
    }

    #[test]
    fn bytes_that_are_no_text_are_shown_and_not_lost() {
        assert_eq!(bytes().decode(&[97, 0xff, 0xc3, 98]), "a\\xff\\xc3b");
    }

    /// The pieces that ids come in, and the rest.
    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = tokenizer.stream();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
        pieces.push(stream.finish());
        pieces
    }

    #[test]
    fn a_stream_shows_whole_characters_and_loses_nothing() {
        let read = pieces(&bytes(), &[97, 0xc3, 0xa9, 256, 98, 0xe2, 0x82, 0xac]);
        assert_eq!(read, ["a", "", "é", "", "b", "", "", "€", ""]);
        // A character that never ends, one that others cut short, and bytes that begin none.
        for ids in [&[97, 0xe2, 0x82][..], &[0xe2, 0x82, 97], &[0xff, 0xc3, 98, 0x80], &[]] {
            let read = pieces(&bytes(), ids);
            assert_eq!(read.concat(), bytes().decode(ids), "{read:?}");
        }
        assert_eq!(pieces(&bytes(), &[97, 0xe2, 0x82]), ["a", "", "", "\\xe2\\x82"]);
    }

    #[test]
    fn a_stream_of_a_files_ids_reads_as_they_do_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        write_small(&path);
        let tokenizer = Tokenizer::open(&path, "tokenizer").unwrap();
        let text = "the other the, then: no more of the\nrest";
        let ids = tokenizer.ids(text).unwrap();
        let read = pieces(&tokenizer, &ids);
        assert_eq!(read.concat(), text);
        assert_eq!(read[0], "the");
        assert!(read.iter().filter(|piece| !piece.is_empty()).count() > 10, "{read:?}");
    }

    #[test]
    fn every_byte_has_a_name_of_its_own() {
        let names = |ids: &[u32]| ids.iter().map(|&id| bytes().token(id)).collect::<Vec<_>>();
        let some = names(&[97, 32, 10, 255, 256, 257]);
        assert_eq!(some, ["a", "<space>", "\\n", "\\xff", "<start>", "<end>"]);
        let all: std::collections::HashSet<_> =
            names(&Vec::from_iter(0..258)).into_iter().collect();
        assert_eq!(all.len(), 258);
    }

    #[test]
    fn a_file_gives_its_ids_and_two_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        write_small(&path);
        let tokenizer = Tokenizer::new(&TokenizerConfig::File(path), "task.x.tokenizer").unwrap();
        let encoded = tokenizer.encode("the other the").unwrap();
        assert_eq!(tokenizer.vocab(), 94 + 5 + 2);
        assert_eq!(encoded.ids.len(), 1 + 4 + 1);
        assert_eq!((encoded.bytes(0..1), encoded.bytes(5..6), encoded.bytes(0..6)), (3, 4, 13));
        assert_eq!(tokenizer.decode(&encoded.ids), "the other the");
        let names = [98, 99, 100].map(|id| tokenizer.token(id));
        assert_eq!(names, ["Ġthe", "<start>", "<end>"]);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused_by_key_and_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        let config = TokenizerConfig::File(path.clone());
        let refused = || Tokenizer::new(&config, "task.x.tokenizer").unwrap_err();
        assert!(matches!(refused(), TaskError::File { key, path: named, .. }
            if key == "task.x.tokenizer.file" && named == path));
        write_small(&path);
        let text = std::fs::read(&path).unwrap();
        for end in (0..text.len()).step_by(37) {
            std::fs::write(&path, &text[..end]).unwrap();
            assert!(refused().to_string().contains("it is no tokenizer: "), "{end}");
        }
        std::fs::write(&path, "not even JSON").unwrap();
        assert!(refused().to_string().contains("notes.txt: it is no tokenizer: "));
        assert!(refused().to_string().ends_with("of the `tokenizers` library would do"));
    }

    #[test]
    fn a_tokenizer_that_cannot_write_digits_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        write_small(&path);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"7\"", "\"µ\"")).unwrap();
        let refused = Tokenizer::new(&TokenizerConfig::File(path), "x").unwrap_err();
        assert!(refused.to_string().contains("0123456789"), "{refused}");
    }
}
