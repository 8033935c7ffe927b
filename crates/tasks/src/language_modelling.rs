//! Language modelling: the next token of a plain text.
//! ```text
//! training     windows from random places of the text, each as likely
//! evaluation   windows one after another from the text's start; the last is padded, and padding is
//!              not scored
//!
//! L = 4:       a b c d | e f g h | ...
//! target       b c d e | f g h i | ...
//!
//! bits per byte = loss in bits a target * targets / bytes of the targets
//! ```
//! Windows overlap by nothing, and a window knows nothing of the one before it. The first token of
//! the text is read and never asked for; every other token is asked for once.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::corpus::{Windows, encode, join, read_texts};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::tokenizer::{Tokenizer, TokenizerConfig};
use crate::{
    Batch, Example, Goal, SetInfo, Split, Statistic, Tally, Task, TaskError, Text, statistics,
};

#[cfg(test)]
mod tests;

/// Language modelling, as TOML spells it.
///
/// ```toml
/// [task.language_modelling]
/// train = [{ text = ["data/tinyshakespeare.txt"], length = 1024, examples = 100_000 }]
/// test = [{ text = ["data/wikitext2-test.txt"], length = 1024 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageModellingConfig {
    /// Unit of text that is a token. Default `bytes`.
    #[serde(default)]
    pub tokenizer: TokenizerConfig,
    /// Sets to learn from.
    pub train: Vec<TextSet>,
    /// Sets to choose settings by. Default none.
    #[serde(default)]
    pub validation: Vec<TextSet>,
    /// Sets to report.
    pub test: Vec<TextSet>,
}

/// One set of windows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextSet {
    /// Files, and folders of `.txt` files sorted by name; one after another, nothing between them.
    pub text: Vec<PathBuf>,
    /// Tokens of a window, L.
    pub length: usize,
    /// Windows in the set. Default as many as cover the text once, and no more than these to
    /// evaluate with.
    #[serde(default)]
    pub examples: Option<u64>,
}

impl TextSet {
    /// Reads the text and says what of it is used.
    fn shape(&self, at: &str, tokenizer: &Tokenizer) -> Result<Shape, TaskError> {
        let key = format!("{at}.text");
        let length = self.length;
        require(length >= 1, format!("{at}.length"), length, "1 or more")?;
        require(!self.text.is_empty(), &key, "empty", "a list of files and folders")?;
        let text = join(&read_texts(&key, &self.text)?);
        let windows = encode(tokenizer, &text, &key, &self.text[0])?;
        let tokens = windows.tokens();
        if tokens <= length {
            let why = format!("all text has {tokens} tokens, and more than {length} are needed");
            return Err(TaskError::file(&key, &self.text[0], why));
        }
        let all = windows.count(length) as u64;
        Ok(Shape { length, all, examples: self.examples.unwrap_or(all), windows })
    }
}

/// Values that all windows of one set share.
#[derive(Debug, Clone)]
struct Shape {
    length: usize,
    /// Windows that cover the text once.
    all: u64,
    examples: u64,
    windows: Windows,
}

impl Shape {
    fn check(&self, at: &str) -> Result<(), TaskError> {
        let (examples, key) = (self.examples, format!("{at}.examples"));
        require(examples >= 1, &key, examples, "1 or more")?;
        let random = at.starts_with("task.language_modelling.train");
        let want = format!("{} at most, which cover the text once", self.all);
        require(random || examples <= self.all, key, examples, want)
    }

    fn info(&self) -> SetInfo {
        let &Self { length, examples, .. } = self;
        SetInfo { name: format!("text_{length}"), length, examples, scored: length }
    }

    /// Targets of the set's windows, and their bytes; of the whole text, where windows are random.
    fn extent(&self, split: Split) -> (usize, usize) {
        let asked = match split {
            Split::Train => usize::MAX,
            _ => self.length.saturating_mul(self.examples as usize),
        };
        let targets = asked.min(self.windows.tokens() - 1);
        (targets, self.windows.bytes(1..1 + targets))
    }
}

/// Language modelling, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct LanguageModelling {
    seed: u64,
    tokenizer: Tokenizer,
    sets: Splits<Shape>,
}

impl LanguageModelling {
    /// Reads the text, checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError`] names the first key that cannot be used.
    pub fn new(config: &LanguageModellingConfig, seed: u64) -> Result<Self, TaskError> {
        let tokenizer = Tokenizer::new(&config.tokenizer, "task.language_modelling.tokenizer")?;
        let lists = [&config.train[..], &config.validation, &config.test];
        let mut shapes = Vec::new();
        check_sets("language_modelling", lists, |at, set| {
            let shape = set.shape(at, &tokenizer)?;
            shape.check(at)?;
            shapes.push(shape);
            Ok(())
        })?;
        let (train, rest) = shapes.split_at(config.train.len());
        let (validation, test) = rest.split_at(config.validation.len());
        let sets = Splits::new([train, validation, test], |shape| (shape.info(), shape.clone()));
        Ok(Self { seed, tokenizer, sets })
    }

    fn start(&self, split: Split, set: usize, index: u64) -> usize {
        let shape = self.sets.shape(split, set);
        if split != Split::Train {
            return index as usize * shape.length;
        }
        let rng = &mut example_rng(*b"language", self.seed, split, set, index);
        shape.windows.draw(shape.length, rng)
    }
}

impl Task for LanguageModelling {
    fn vocab(&self) -> usize {
        self.tokenizer.vocab()
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let shape = self.sets.shape(split, set);
        let start = self.start(split, set, index);
        shape.windows.example(start, shape.length, self.tokenizer.end())
    }

    /// Counts `accuracy`, the share of all tokens that are right.
    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        assert_eq!(predicted.len(), batch.target.len(), "the caller predicts every position");
        let right = predicted.iter().zip(&batch.target).filter(|(a, b)| a == b).count();
        tally.add("accuracy", right as f64, batch.target.len() as u64);
    }

    /// Counts `bits_per_byte` and `perplexity`. With tokens from a file, a part of a set is taken to
    /// have the set's bytes a token.
    fn tally_loss(&self, split: Split, set: usize, nats: f64, scored: u64, tally: &mut Tally) {
        let (targets, bytes) = self.sets.shape(split, set).extent(split);
        let bytes = (scored as f64 * bytes as f64 / targets as f64).round() as u64;
        tally.add("bits_per_byte", nats / std::f64::consts::LN_2, bytes);
        tally.add_logs("perplexity", nats, scored);
    }

    fn score_name(&self) -> &'static str {
        "bits_per_byte"
    }

    fn goal(&self) -> Goal {
        Goal::Lowest
    }

    fn token(&self, id: u32) -> String {
        self.tokenizer.token(id)
    }

    /// The window; its answer is empty.
    fn text(&self, split: Split, set: usize, index: u64) -> Option<Text> {
        let shape = self.sets.shape(split, set);
        let ids = shape.windows.ids(self.start(split, set, index), shape.length);
        Some(Text { prompt: self.tokenizer.decode(ids), answer: String::new() })
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let shape = self.sets.shape(split, set);
        let (targets, bytes) = shape.extent(split);
        let mut figures = statistics::common((0..count).map(|i| self.example(split, set, i)));
        figures.push(Statistic::new("text tokens", shape.windows.tokens() as f64));
        figures.push(Statistic::new("bytes a target", bytes as f64 / targets as f64));
        figures
    }
}
