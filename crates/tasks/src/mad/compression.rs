//! Compression: say a random sequence again, from one vector.
//! ```text
//! V ids, L tokens; V - 1 ends the sequence.
//!
//! input   L - 1 ids, uniform over 0..V - 1, then V - 1
//! target  the input itself, at every position
//!
//! V = 16, L = 6:
//! input   3 0 14 7 7 15
//! target  3 0 14 7 7 15
//! ```
//! It measures a memory only with a model that has to answer from what it knows at the last position,
//! as the published auto-encoder does. A model that answers each position from its own token just
//! repeats it and scores 1.

use rand::Rng;
use rand::distr::Uniform;
use serde::{Deserialize, Serialize};

use super::{Sizes, check_examples, check_vocab, expect, score, share_seen};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

#[cfg(test)]
mod tests;

/// Compression, as TOML spells it.
///
/// ```toml
/// [task.compression]
/// train = [{ length = 32, examples = 12_800 }]
/// test = [{ length = 32, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressionConfig {
    /// Token ids, V; the last ends every sequence. Default 16.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Sets to learn from. `length` is the number of tokens of an example, with the last.
    pub train: Vec<Sizes>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<Sizes>,
    /// Sets to report.
    pub test: Vec<Sizes>,
}

fn default_vocab() -> u32 {
    16
}

impl CompressionConfig {
    /// The published baseline: 16 ids, length 32, 12 800 examples to train and 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_vocab(), 32, 12_800)
    }

    /// A published setting, with 1 280 examples to test.
    pub fn published(vocab: u32, length: usize, examples: u64) -> Self {
        let [train, test] = Sizes::published(length, examples);
        Self { vocab, train, validation: Vec::new(), test }
    }

    fn lists(&self) -> [&[Sizes]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    fn check(&self) -> Result<(), TaskError> {
        check_vocab("compression", self.vocab, 2)?;
        check_sets("compression", self.lists(), |at, sizes| {
            require(sizes.length >= 2, format!("{at}.length"), sizes.length, "2 or more")?;
            check_examples(at, sizes.examples)
        })
    }
}

/// Compression, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct Compression {
    vocab: u32,
    seed: u64,
    /// By set, the length of its examples.
    sets: Splits<usize>,
}

impl Compression {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &CompressionConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let set = |sizes: &Sizes| (sizes.info(sizes.length, sizes.length), sizes.length);
        Ok(Self { vocab: config.vocab, seed, sets: Splits::new(config.lists(), set) })
    }
}

/// Random part of an example: the ids before the last.
#[derive(Debug)]
struct Draws {
    ids: Vec<u32>,
}

impl Draws {
    fn lay_out(self, compress: u32) -> Example {
        let mut input = self.ids;
        input.push(compress);
        let target = input.iter().copied().map(Some).collect();
        Example { input, target }
    }
}

impl Task for Compression {
    fn vocab(&self) -> usize {
        self.vocab as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let rng = &mut example_rng(*b"mad-comp", self.seed, split, set, index);
        let compress = self.vocab - 1;
        let length = self.sets.shape(split, set);
        let ids = Uniform::new(0, compress).expect("`check` asked for a vocabulary");
        Draws { ids: rng.sample_iter(ids).take(length - 1).collect() }.lay_out(compress)
    }

    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        score::add(batch, predicted, tally);
    }

    fn rows_of_a_score(&self) -> usize {
        score::ROWS
    }

    fn needs_auto_encoder(&self) -> bool {
        true
    }

    fn score_name(&self) -> &'static str {
        "accuracy"
    }

    fn token(&self, id: u32) -> String {
        if id + 1 < self.vocab { id.to_string() } else { "compress".into() }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let length = *self.sets.shape(split, set) as f64;
        let mut figures =
            statistics::common((0..count).map(|index| self.example(split, set, index)));
        let (ids, draws) = (self.vocab - 1, count as f64 * (length - 1.0));
        expect(&mut figures, "scored positions, mean", length);
        let different = f64::from(ids) * share_seen(ids, draws) + 1.0;
        expect(&mut figures, "different answers", different);
        figures
    }
}
