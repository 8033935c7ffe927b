//! In-context recall: answer a key that was shown before with the value it had then; plainly, or
//! with noise in between.
//! ```text
//! V ids, L tokens, n = L/2 pairs: n - 1 to show, then the probe. W = V ids without noise, or
//! W = V - 16 with it.
//!
//! keys    0..W/2; drawn for each pair, uniform, also again
//! values  W/2..W; drawn for each new key, uniform, so that two keys may share one
//! noise   W..V; each pair to show is two independent ids of it with probability `noise`, but for
//!         one pair, whose number is uniform over 0..n, the probe included, and which is never noise
//! probe   a key, uniform among the different ones shown, and its value
//!
//! input   all tokens but the last, so L - 1
//! target  the next token; in validation and test only the value of each key that was shown before
//!
//! V = 16, L = 8:      3 12 | 5  9 | 3 12 | 5  9
//! input               3 12   5  9   3 12   5
//! target, training   12  5   9  3  12  5   9
//! target, test        .  .   .  .  12  .   9
//!
//! Guessing a value at random scores 2/W.
//! ```
//! If all n - 1 pairs come out as noise, none is left to ask for, and which are noise is drawn anew.

use std::ops::Range;

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::sequence::Sequence;
use super::{Sizes, TEST_EXAMPLES, check_even, check_examples, check_vocab, expect, score};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

#[cfg(test)]
mod tests;

/// Ids that only noise has, in the noisy task.
const NOISE_IDS: u32 = 16;

/// In-context recall, as TOML spells it.
///
/// ```toml
/// [task.in_context_recall]
/// train = [{ length = 128, examples = 12_800 }]
/// test = [{ length = 128, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InContextRecallConfig {
    /// Token ids, V: half are keys. Default 16.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Sets to learn from. `length` is even, 4 or more; an example has one token less.
    pub train: Vec<Sizes>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<Sizes>,
    /// Sets to report.
    pub test: Vec<Sizes>,
}

/// In-context recall among noise, as TOML spells it.
///
/// ```toml
/// [task.noisy_in_context_recall]
/// train = [{ length = 128, noise = 0.2, examples = 12_800 }]
/// test = [{ length = 128, noise = 0.2, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoisyInContextRecallConfig {
    /// Token ids, V: the last 16 are noise, half of the others keys. Default 32.
    #[serde(default = "default_noisy_vocab")]
    pub vocab: u32,
    /// Sets to learn from.
    pub train: Vec<NoisySizes>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<NoisySizes>,
    /// Sets to report.
    pub test: Vec<NoisySizes>,
}

/// One set of examples among noise.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoisySizes {
    /// The published length, L; even, 4 or more. An example has one token less.
    pub length: usize,
    /// How probable it is that a pair is noise; at least 0 and below 1.
    pub noise: f64,
    /// Examples in the set.
    pub examples: u64,
}

fn default_vocab() -> u32 {
    16
}

fn default_noisy_vocab() -> u32 {
    32
}

impl InContextRecallConfig {
    /// The published baseline: 16 ids, length 128, 12 800 examples to train and 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_vocab(), 128, 12_800)
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
        check_vocab("in_context_recall", self.vocab, 2)?;
        check_sets("in_context_recall", self.lists(), |at, sizes| {
            check_even(at, sizes.length, 4)?;
            check_examples(at, sizes.examples)
        })
    }
}

impl NoisyInContextRecallConfig {
    /// The published baseline: 32 ids, length 128, a fifth of the pairs noise, 12 800 examples to
    /// train and 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_noisy_vocab(), 128, 0.2, 12_800)
    }

    /// A published setting, with 1 280 examples to test.
    pub fn published(vocab: u32, length: usize, noise: f64, examples: u64) -> Self {
        let sets = |examples| vec![NoisySizes { length, noise, examples }];
        let (train, test) = (sets(examples), sets(TEST_EXAMPLES));
        Self { vocab, train, validation: Vec::new(), test }
    }

    fn lists(&self) -> [&[NoisySizes]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    fn check(&self) -> Result<(), TaskError> {
        check_vocab("noisy_in_context_recall", self.vocab, NOISE_IDS + 2)?;
        check_sets("noisy_in_context_recall", self.lists(), |at, sizes| {
            check_even(at, sizes.length, 4)?;
            let sound = (0.0..1.0).contains(&sizes.noise);
            require(sound, format!("{at}.noise"), sizes.noise, "at least 0 and below 1")?;
            check_examples(at, sizes.examples)
        })
    }
}

/// In-context recall, plain or among noise, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct InContextRecall {
    /// Tag of its random numbers: the two tasks share none.
    purpose: [u8; 8],
    seed: u64,
    ids: Ids,
    sets: Splits<Shape>,
}

/// Which ids mean what: keys are `0..keys`, values end where noise starts.
#[derive(Debug, Clone, Copy)]
struct Ids {
    keys: u32,
    noise: u32,
    vocab: u32,
}

/// Values that all examples of one set share.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// With the probe.
    pairs: usize,
    noise: f64,
}

impl InContextRecall {
    /// Checks every value, then makes the task without noise whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &InContextRecallConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let set = |split, sizes: &Sizes| {
            let shape = Shape { pairs: sizes.length / 2, noise: 0.0 };
            (sizes.info(sizes.length - 1, shape.most_scored(split)), shape)
        };
        let sets = Splits::by_split(config.lists(), set);
        Ok(Self { purpose: *b"mad-icr\0", seed, ids: Ids::new(config.vocab, 0), sets })
    }

    /// Checks every value, then makes the task with noise whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn noisy(config: &NoisyInContextRecallConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let set = |split, sizes: &NoisySizes| {
            let shape = Shape { pairs: sizes.length / 2, noise: sizes.noise };
            (sizes.info(shape.most_scored(split)), shape)
        };
        let sets = Splits::by_split(config.lists(), set);
        Ok(Self { purpose: *b"mad-nicr", seed, ids: Ids::new(config.vocab, NOISE_IDS), sets })
    }

    fn draw(&self, rng: &mut impl Rng, shape: &Shape) -> Draws {
        let mut shown = Shown::nothing(self.ids);
        let mut pairs = Vec::with_capacity(shape.pairs);
        for noise in shape.draw_noise(rng) {
            pairs.push(if noise { self.ids.draw_noise(rng) } else { shown.draw_pair(rng) });
        }
        pairs.push(shown.draw_probe(rng));
        Draws { pairs }
    }
}

impl NoisySizes {
    fn info(&self, scored: usize) -> SetInfo {
        let &Self { length, noise, examples } = self;
        SetInfo { name: format!("{length}x{noise}"), length: length - 1, examples, scored }
    }
}

impl Ids {
    fn new(vocab: u32, noise: u32) -> Self {
        let noise = vocab - noise;
        Self { keys: noise / 2, noise, vocab }
    }

    fn values(&self) -> Range<u32> {
        self.keys..self.noise
    }

    fn count_noise(&self, example: &Example) -> usize {
        example.input.iter().step_by(2).filter(|&&id| id >= self.noise).count()
    }

    fn draw_noise(&self, rng: &mut impl Rng) -> [u32; 2] {
        let ids = self.noise..self.vocab;
        [rng.random_range(ids.clone()), rng.random_range(ids)]
    }
}

impl Shape {
    /// A test asks for every pair but the first, where it shows one and the same key.
    fn most_scored(&self, split: Split) -> usize {
        if split == Split::Train { 2 * self.pairs - 1 } else { self.pairs - 1 }
    }

    /// Which of the pairs to show are noise; not all of them.
    fn draw_noise(&self, rng: &mut impl Rng) -> Vec<bool> {
        loop {
            let spared = rng.random_range(0..self.pairs);
            let mut draw = |pair| rng.random_bool(self.noise) && pair != spared;
            let noise: Vec<bool> = (0..self.pairs - 1).map(&mut draw).collect();
            if noise.contains(&false) {
                return noise;
            }
        }
    }

    /// The expected share of the pairs to show that are noise, and the expected power `q^m` where m
    /// of them are not.
    ///
    /// Each of the n - 1 pairs is spared with probability 1/n, and so is the probe. Only with the
    /// probe spared can all be noise: that case is drawn anew, so it is taken out.
    fn expected_noise(&self, q: f64) -> (f64, f64) {
        let (n, p) = (self.pairs as f64, self.noise);
        let all_noise = p.powf(n - 1.0) / n;
        let share = p * (n - 1.0) / n;
        let one = p + (1.0 - p) * q;
        let power = (n - 1.0) / n * q * one.powf(n - 2.0) + one.powf(n - 1.0) / n;
        ((share - all_noise) / (1.0 - all_noise), (power - all_noise) / (1.0 - all_noise))
    }

    /// The expected number of scored positions outside training: pairs shown, less the different
    /// keys among them, and the probe.
    fn expected_scored(&self, keys: u32) -> f64 {
        let keys = f64::from(keys);
        let (noise, unseen) = self.expected_noise(1.0 - 1.0 / keys);
        (self.pairs - 1) as f64 * (1.0 - noise) - keys * (1.0 - unseen) + 1.0
    }
}

/// The pairs shown so far.
struct Shown {
    ids: Ids,
    /// By key.
    values: Vec<Option<u32>>,
    /// Each once.
    keys: Vec<u32>,
}

impl Shown {
    fn nothing(ids: Ids) -> Self {
        Self { ids, values: vec![None; ids.keys as usize], keys: Vec::new() }
    }

    fn draw_pair(&mut self, rng: &mut impl Rng) -> [u32; 2] {
        let key = rng.random_range(0..self.ids.keys);
        let value = *self.values[key as usize].get_or_insert_with(|| {
            self.keys.push(key);
            rng.random_range(self.ids.values())
        });
        [key, value]
    }

    fn draw_probe(&self, rng: &mut impl Rng) -> [u32; 2] {
        let key = self.keys[rng.random_range(0..self.keys.len())];
        [key, self.values[key as usize].expect("a key is shown with its value")]
    }
}

/// Random part of an example: a key with its value, or noise with noise. The last is the probe.
#[derive(Debug)]
struct Draws {
    pairs: Vec<[u32; 2]>,
}

impl Draws {
    /// With ids below `keys` as keys. The probe needs no rule of its own: its key was shown before.
    fn lay_out(self, keys: u32, split: Split) -> Example {
        let mut shown = vec![false; keys as usize];
        let mut sequence = Sequence::with_capacity(2 * self.pairs.len());
        for [first, second] in self.pairs {
            let again = first < keys && std::mem::replace(&mut shown[first as usize], true);
            sequence.push(first, false);
            sequence.push(second, again);
        }
        sequence.cut(split)
    }
}

impl Task for InContextRecall {
    fn vocab(&self) -> usize {
        self.ids.vocab as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let rng = &mut example_rng(self.purpose, self.seed, split, set, index);
        self.draw(rng, self.sets.shape(split, set)).lay_out(self.ids.keys, split)
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
        let Ids { keys, noise, .. } = self.ids;
        match id {
            _ if id < keys => format!("k{id}"),
            _ if id < noise => format!("v{}", id - keys),
            _ => format!("noise{}", id - noise),
        }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let shape = self.sets.shape(split, set);
        let examples = || (0..count).map(|index| self.example(split, set, index));
        let mut figures = statistics::common(examples());
        let scored = match split {
            Split::Train => shape.most_scored(split) as f64,
            _ => shape.expected_scored(self.ids.keys),
        };
        expect(&mut figures, "scored positions, mean", scored);
        let pairs = (shape.pairs - 1) as u64 * count;
        let noise: usize = examples().map(|example| self.ids.count_noise(&example)).sum();
        let share = noise as f64 / pairs.max(1) as f64;
        let expected = shape.expected_noise(1.0).0;
        figures.push(Statistic::expected("share of noise pairs", share, expected));
        figures
    }
}
