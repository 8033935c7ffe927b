//! Memorization: know the values of keys that no example shows.
//! ```text
//! V ids, L tokens. W = V - 1: keys are 0..W/2, values W/2..W, and V - 1 is where a value is missing.
//!
//! map     each key has a value of its own; one map for every V, whatever the seed, as published: runs of
//!         different seeds learn the same facts from different examples
//! keys    L/2, uniform, also again
//!
//! input   k_0 insert k_1 insert ...
//! target  at each insert the value of the key before it; nothing at the keys
//!
//! V = 8, L = 6, map 0 -> 5, 1 -> 3, 2 -> 6:
//! input   1 7 0 7 2 7
//! target  . 3 . 5 . 6
//! ```
//! A key that training never drew cannot be known. 256 examples of length 32 draw 4 096 keys, and
//! show (1 - 1/K)^4096 of K keys not at all.

use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::{Sizes, check_even, check_examples, check_vocab, expect, score, share_seen};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

#[cfg(test)]
mod tests;

/// Memorization, as TOML spells it.
///
/// ```toml
/// [task.memorization]
/// train = [{ length = 32, examples = 256 }]
/// test = [{ length = 32, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorizationConfig {
    /// Token ids, V; the last marks a missing value, half of the others are keys. Default 256.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Sets to learn from. `length` is the number of tokens of an example; even.
    pub train: Vec<Sizes>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<Sizes>,
    /// Sets to report.
    pub test: Vec<Sizes>,
}

fn default_vocab() -> u32 {
    256
}

impl MemorizationConfig {
    /// The published baseline: 256 ids, length 32, 256 examples to train and 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_vocab(), 32, 256)
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
        check_vocab("memorization", self.vocab, 3)?;
        check_sets("memorization", self.lists(), |at, sizes| {
            check_even(at, sizes.length, 2)?;
            check_examples(at, sizes.examples)
        })
    }
}

/// Memorization, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct Memorization {
    vocab: u32,
    seed: u64,
    /// By key.
    values: Vec<u32>,
    /// By set, the length of its examples.
    sets: Splits<usize>,
}

impl Memorization {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &MemorizationConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let set = |sizes: &Sizes| (sizes.info(sizes.length, sizes.length / 2), sizes.length);
        let values = draw_values(config.vocab, MAP_SEED);
        let sets = Splits::new(config.lists(), set);
        Ok(Self { vocab: config.vocab, seed, values, sets })
    }

    fn keys(&self) -> u32 {
        self.values.len() as u32
    }

    /// The share of keys that the first `count` examples of a set show.
    fn share_shown(&self, split: Split, set: usize, count: u64) -> f64 {
        let mut shown = vec![false; self.values.len()];
        for example in (0..count).map(|index| self.example(split, set, index)) {
            example.input.iter().step_by(2).for_each(|&key| shown[key as usize] = true);
        }
        shown.iter().filter(|&&shown| shown).count() as f64 / shown.len() as f64
    }
}

/// The seed of the map, as the reference has it.
const MAP_SEED: u64 = 12345;

/// A value for each key, all different. One is left over where V is even.
fn draw_values(vocab: u32, seed: u64) -> Vec<u32> {
    let keys = (vocab - 1) / 2;
    let mut values: Vec<u32> = (keys..vocab - 1).collect();
    values.shuffle(&mut example_rng(*b"mad-map\0", seed, Split::Train, 0, 0));
    values.truncate(keys as usize);
    values
}

/// Random part of an example.
#[derive(Debug)]
struct Draws {
    keys: Vec<u32>,
}

impl Draws {
    fn lay_out(self, values: &[u32], insert: u32) -> Example {
        let input = self.keys.iter().flat_map(|&key| [key, insert]).collect();
        let value = |&key: &u32| [None, Some(values[key as usize])];
        Example { input, target: self.keys.iter().flat_map(value).collect() }
    }
}

impl Task for Memorization {
    fn vocab(&self) -> usize {
        self.vocab as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let rng = &mut example_rng(*b"mad-memo", self.seed, split, set, index);
        let pairs = self.sets.shape(split, set) / 2;
        let keys = (0..pairs).map(|_| rng.random_range(0..self.keys())).collect();
        Draws { keys }.lay_out(&self.values, self.vocab - 1)
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
            _ if id < self.keys() => format!("k{id}"),
            _ if id < self.vocab - 1 => format!("v{}", id - self.keys()),
            _ => "insert".into(),
        }
    }

    // Of a training set, the share of keys shown is the highest `micro_accuracy` that can be learnt
    // from it, but for luck.
    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let pairs = self.sets.shape(split, set) / 2;
        let examples = (0..count).map(|index| self.example(split, set, index));
        let mut figures = statistics::common(examples);
        expect(&mut figures, "scored positions, mean", pairs as f64);
        let expected = share_seen(self.keys(), pairs as f64 * count as f64);
        let shown = self.share_shown(split, set, count);
        figures.push(Statistic::expected("share of keys shown", shown, expected));
        figures
    }
}
