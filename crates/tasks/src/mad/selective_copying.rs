//! Selective copying: read tokens scattered among blanks, then say them in order.
//! ```text
//! V ids, L tokens, n of them to copy; V - 2 is the blank, V - 1 says that the copy begins.
//!
//! tokens  n ids, uniform over 0..V - 2, also again
//! blanks  L - 2n - 1, each before a token of its own choice, uniform; so none stands between the
//!         last token and the copy
//!
//! input   tokens with their blanks, then V - 1, then n blanks
//! target  the tokens, in order, at the last n positions; nothing elsewhere
//!
//! V = 16, L = 12, n = 3, tokens (4, 0, 9) behind (2, 1, 2) blanks:
//! input   14 14  4 14  0 14 14  9 15 14 14 14
//! target   .  .  .  .  .  .  .  .  .  4  0  9
//! ```
//! Until December 2024 the published code always copied 16 tokens, whatever the setting said, so
//! older results for more are results for 16.

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{TEST_EXAMPLES, check_examples, check_vocab, expect, leading, score, share_seen};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

#[cfg(test)]
mod tests;

/// Selective copying, as TOML spells it.
///
/// ```toml
/// [task.selective_copying]
/// train = [{ length = 256, copy = 16, examples = 12_800 }]
/// test = [{ length = 256, copy = 16, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectiveCopyingConfig {
    /// Token ids, V; the last two are the blank and the sign to copy. Default 16.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Sets to learn from.
    pub train: Vec<CopySizes>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<CopySizes>,
    /// Sets to report.
    pub test: Vec<CopySizes>,
}

/// One set of examples to copy from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopySizes {
    /// Tokens of an example, L, with the copy; above 2n + 1.
    pub length: usize,
    /// Tokens to copy, n.
    pub copy: usize,
    /// Examples in the set.
    pub examples: u64,
}

fn default_vocab() -> u32 {
    16
}

impl SelectiveCopyingConfig {
    /// The published baseline: 16 ids, length 256, 16 tokens to copy, 12 800 examples to train and
    /// 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_vocab(), 256, 16, 12_800)
    }

    /// A published setting, with 1 280 examples to test.
    pub fn published(vocab: u32, length: usize, copy: usize, examples: u64) -> Self {
        let sets = |examples| vec![CopySizes { length, copy, examples }];
        let (train, test) = (sets(examples), sets(TEST_EXAMPLES));
        Self { vocab, train, validation: Vec::new(), test }
    }

    fn lists(&self) -> [&[CopySizes]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    fn check(&self) -> Result<(), TaskError> {
        check_vocab("selective_copying", self.vocab, 3)?;
        check_sets("selective_copying", self.lists(), |at, sizes| sizes.check(at))
    }
}

impl CopySizes {
    fn check(&self, at: &str) -> Result<(), TaskError> {
        let &Self { length, copy, examples } = self;
        require(length >= 4, format!("{at}.length"), length, "4 or more")?;
        let most = (length - 2) / 2;
        let want = format!("between 1 and {most}, so that twice that, a sign and a blank fit");
        require((1..=most).contains(&copy), format!("{at}.copy"), copy, want)?;
        check_examples(at, examples)
    }

    fn info(&self) -> SetInfo {
        let &Self { length, copy, examples } = self;
        SetInfo { name: format!("{length}x{copy}"), length, examples, scored: copy }
    }
}

/// Selective copying, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct SelectiveCopying {
    vocab: u32,
    seed: u64,
    sets: Splits<Shape>,
}

/// Values that all examples of one set share.
#[derive(Debug, Clone, Copy)]
struct Shape {
    copy: usize,
    /// Before the sign to copy.
    blanks: usize,
}

impl SelectiveCopying {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &SelectiveCopyingConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let set = |sizes: &CopySizes| {
            let &CopySizes { length, copy, .. } = sizes;
            (sizes.info(), Shape { copy, blanks: length - 2 * copy - 1 })
        };
        Ok(Self { vocab: config.vocab, seed, sets: Splits::new(config.lists(), set) })
    }

    fn draw(&self, rng: &mut impl Rng, shape: &Shape) -> Draws {
        let tokens = (0..shape.copy).map(|_| rng.random_range(0..self.vocab - 2)).collect();
        let mut blanks = vec![0; shape.copy];
        for _ in 0..shape.blanks {
            blanks[rng.random_range(0..shape.copy)] += 1;
        }
        Draws { tokens, blanks }
    }

    fn blank(&self) -> u32 {
        self.vocab - 2
    }
}

/// Random part of an example.
#[derive(Debug)]
struct Draws {
    tokens: Vec<u32>,
    /// How many stand before each token.
    blanks: Vec<usize>,
}

impl Draws {
    fn lay_out(self, vocab: u32) -> Example {
        let Self { tokens, blanks } = self;
        let (blank, copy) = (vocab - 2, vocab - 1);
        let before = tokens.len() + blanks.iter().sum::<usize>() + 1;
        let mut input = Vec::with_capacity(before + tokens.len());
        for (&token, blanks) in tokens.iter().zip(blanks) {
            input.resize(input.len() + blanks, blank);
            input.push(token);
        }
        input.push(copy);
        input.resize(before + tokens.len(), blank);
        let mut target = vec![None; before];
        target.extend(tokens.into_iter().map(Some));
        Example { input, target }
    }
}

impl Task for SelectiveCopying {
    fn vocab(&self) -> usize {
        self.vocab as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let rng = &mut example_rng(*b"mad-copy", self.seed, split, set, index);
        self.draw(rng, self.sets.shape(split, set)).lay_out(self.vocab)
    }

    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        score::add(batch, predicted, tally);
    }

    fn rows_of_a_score(&self) -> usize {
        score::ROWS
    }

    fn score_name(&self) -> &'static str {
        "accuracy"
    }

    fn token(&self, id: u32) -> String {
        match id {
            _ if id < self.blank() => id.to_string(),
            _ if id == self.blank() => "blank".into(),
            _ => "copy".into(),
        }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let &Shape { copy, blanks } = self.sets.shape(split, set);
        let examples = || (0..count).map(|index| self.example(split, set, index));
        let mut figures = statistics::common(examples());
        expect(&mut figures, "scored positions, mean", copy as f64);
        let ids = self.vocab - 2;
        let different = f64::from(ids) * share_seen(ids, count as f64 * copy as f64);
        expect(&mut figures, "different answers", different);
        let first = examples().map(|example| leading(&example.input, self.blank()) as u64);
        let mean = first.sum::<u64>() as f64 / count.max(1) as f64;
        let expected = blanks as f64 / copy as f64;
        figures.push(Statistic::expected("blanks before the first token, mean", mean, expected));
        figures
    }
}
