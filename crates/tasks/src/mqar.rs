//! Multi-query associative recall: remember pairs, then answer each key with its value.
//! ```text
//! V ids, L tokens, n pairs; the context is C = 2n tokens, then come S = (L - C) / 2 slots of two.
//!
//! keys    n distinct ids, uniform over 1..V/2
//! values  n distinct ids, uniform over V/2..V
//! slots   n distinct numbers of 0..S, drawn one after another with P(slot i) ~ (i + 1)^(power - 1)
//!         among those left; the j-th drawn is where the j-th key is asked, so early keys tend to
//!         be asked early
//!
//! input   k_0 v_0 k_1 v_1 ... | filler, with k_j at C + 2 slot_j; no value is given there
//! target  v_j at C + 2 slot_j, on the key itself and not one token later; nothing elsewhere
//!
//! V = 16, L = 12, n = 2, keys (5, 2), values (9, 14), slots (1, 0), zeros as filler:
//! input   5  9  2 14  2  0  5  0  0  0  0  0
//! target  .  .  .  . 14  .  9  .  .  .  .  .
//!
//! Guessing a value of the context at random scores 1/n.
//! Source: arXiv 2312.04927; the distribution is the published one, the random numbers are our own.
//! ```

use rand::Rng;
use rand::distr::{Open01, Uniform};
use serde::{Deserialize, Serialize};

use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Example, SetInfo, Split, Task, TaskError};

#[cfg(test)]
mod tests;

/// Multi-query associative recall, as TOML spells it.
///
/// ```toml
/// [task.mqar]
/// filler = "zero"
/// train = [{ length = 64, pairs = 4, examples = 100_000 }]
/// test = [{ length = 64, pairs = 4, examples = 3_000 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MqarConfig {
    /// Token ids, V; more than the longest `length`. Default 8192.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Tokens between the queries. Default `zero`.
    #[serde(default)]
    pub filler: Filler,
    /// How evenly queries spread: slot i, from 1, has weight i^(power - 1), so 1 is even and less
    /// asks sooner. Default 0.01.
    #[serde(default = "default_power")]
    pub power: f64,
    /// Sets to learn from.
    pub train: Vec<Cell>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<Cell>,
    /// Sets to report.
    pub test: Vec<Cell>,
}

/// One set of examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Tokens of an example, L; even.
    pub length: usize,
    /// Pairs to remember, n, and queries to answer; a quarter of `length` at most.
    pub pairs: usize,
    /// Examples in the set.
    pub examples: u64,
}

/// Tokens after the context where no query stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filler {
    /// Id 0, which is neither key nor value.
    #[default]
    Zero,
    /// Any id of the vocabulary, also the keys and values in play.
    Random,
}

fn default_vocab() -> u32 {
    8192
}

fn default_power() -> f64 {
    0.01
}

impl MqarConfig {
    /// One cell of the figure in arXiv 2312.04927, where (length, pairs) is (64, 4), (128, 8),
    /// (256, 16) or (512, 64): zeros as filler, 100 000 examples to train and 3 000 to test.
    pub fn figure2(length: usize, pairs: usize) -> Self {
        let cell = |examples| vec![Cell { length, pairs, examples }];
        Self::published(Filler::Zero, cell(100_000), cell(3_000))
    }

    /// The mixed benchmark of arXiv 2402.18668: random filler, five training sets from easy to hard
    /// and seven test sets, the last two longer than any training sequence. Its score is the mean
    /// over all 7 000 test examples.
    pub fn based_mix() -> Self {
        let cell = |(length, pairs, examples)| Cell { length, pairs, examples };
        let cells = |list: &[(usize, usize, u64)]| list.iter().copied().map(cell).collect();
        let train = cells(&[
            (64, 4, 100_000),
            (128, 8, 20_000),
            (256, 16, 20_000),
            (256, 32, 20_000),
            (256, 64, 20_000),
        ]);
        let test = cells(&[
            (64, 4, 1_000),
            (64, 8, 1_000),
            (64, 16, 1_000),
            (128, 32, 1_000),
            (256, 64, 1_000),
            (512, 128, 1_000),
            (1024, 256, 1_000),
        ]);
        Self::published(Filler::Random, train, test)
    }

    fn published(filler: Filler, train: Vec<Cell>, test: Vec<Cell>) -> Self {
        Self {
            vocab: default_vocab(),
            filler,
            power: default_power(),
            train,
            validation: Vec::new(),
            test,
        }
    }

    fn lists(&self) -> [&[Cell]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    fn check(&self) -> Result<(), TaskError> {
        let sound = self.power.is_finite() && self.power > 0.0;
        require(sound, "task.mqar.power", self.power, "finite and above 0")?;
        check_sets("mqar", self.lists(), |at, cell| self.check_cell(at, cell))
    }

    // That there are keys enough for the pairs follows: n <= L/4 < V/4.
    fn check_cell(&self, at: &str, cell: &Cell) -> Result<(), TaskError> {
        let &Cell { length, pairs, examples } = cell;
        let even = length >= 4 && length.is_multiple_of(2);
        require(even, format!("{at}.length"), length, "even, and 4 or more")?;
        let most = length / 4;
        let want = format!("between 1 and {most}, a quarter of the length");
        require((1..=most).contains(&pairs), format!("{at}.pairs"), pairs, want)?;
        require(examples >= 1, format!("{at}.examples"), examples, "1 or more")?;
        let want = format!("above {length}, the length in `{at}`");
        require(self.vocab as usize > length, "task.mqar.vocab", self.vocab, want)
    }
}

/// Multi-query associative recall, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct Mqar {
    vocab: u32,
    filler: Filler,
    seed: u64,
    sets: Splits<Shape>,
}

/// Values that all examples of one set share.
#[derive(Debug, Clone)]
struct Shape {
    length: usize,
    pairs: usize,
    /// For each slot, minus the log of its weight.
    delays: Vec<f64>,
}

impl Mqar {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &MqarConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let shape = |cell: &Cell| (cell.info(), Shape::new(cell, config.power));
        Ok(Self {
            vocab: config.vocab,
            filler: config.filler,
            seed,
            sets: Splits::new(config.lists(), shape),
        })
    }
}

impl Cell {
    fn info(&self) -> SetInfo {
        let &Self { length, pairs, examples } = self;
        SetInfo { name: format!("{length}x{pairs}"), length, examples, scored: pairs }
    }
}

impl Shape {
    fn new(cell: &Cell, power: f64) -> Self {
        let slots = (cell.length - 2 * cell.pairs) / 2;
        let delays = (1..=slots).map(|i| (1.0 - power) * (i as f64).ln()).collect();
        Self { length: cell.length, pairs: cell.pairs, delays }
    }

    /// Slots for the queries, in the order in which they are drawn.
    ///
    /// A race gives the same distribution as drawing with these weights, one after another, among
    /// the slots left: slot i finishes at a time that is exponential with its weight as the rate,
    /// and the first to finish is drawn first. Times are compared by their logs, where no weight
    /// can underflow.
    fn draw_slots(&self, rng: &mut impl Rng) -> Vec<usize> {
        let time = |delay: &f64| (-rng.sample::<f64, _>(Open01).ln()).ln() + delay;
        let times: Vec<f64> = self.delays.iter().map(time).collect();
        let mut slots: Vec<usize> = (0..times.len()).collect();
        let earlier = |a: &usize, b: &usize| times[*a].total_cmp(&times[*b]);
        if self.pairs < slots.len() {
            slots.select_nth_unstable_by(self.pairs, earlier);
            slots.truncate(self.pairs);
        }
        slots.sort_unstable_by(earlier);
        slots
    }
}

/// Random part of an example.
#[derive(Debug)]
struct Draws {
    /// Of the pairs, in the order of the context; `slots[j]` is where `keys[j]` is asked.
    keys: Vec<u32>,
    values: Vec<u32>,
    slots: Vec<usize>,
    /// A token for each position after the context; queries replace some.
    filler: Vec<u32>,
}

impl Draws {
    fn lay_out(self) -> Example {
        let Self { keys, values, slots, filler } = self;
        let context = 2 * keys.len();
        let pairs = keys.iter().zip(&values);
        let mut input: Vec<u32> = pairs.flat_map(|(&key, &value)| [key, value]).collect();
        input.extend(filler);
        let mut target = vec![None; input.len()];
        for ((key, value), slot) in keys.into_iter().zip(values).zip(slots) {
            input[context + 2 * slot] = key;
            target[context + 2 * slot] = Some(value);
        }
        Example { input, target }
    }
}

/// `count` distinct ids of `low..high`, uniform, in the order drawn. There have to be as many.
fn draw_distinct(rng: &mut impl Rng, low: u32, high: u32, count: usize) -> Vec<u32> {
    let mut taken = vec![false; (high - low) as usize];
    let mut ids = Vec::with_capacity(count);
    while ids.len() < count {
        let id = rng.random_range(low..high);
        if !std::mem::replace(&mut taken[(id - low) as usize], true) {
            ids.push(id);
        }
    }
    ids
}

fn draw_filler(rng: &mut impl Rng, filler: Filler, vocab: u32, count: usize) -> Vec<u32> {
    match filler {
        Filler::Zero => vec![0; count],
        Filler::Random => {
            let ids = Uniform::new(0, vocab).expect("`check` asked for a vocabulary");
            rng.sample_iter(ids).take(count).collect()
        }
    }
}

impl Task for Mqar {
    fn vocab(&self) -> usize {
        self.vocab as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    // Filler comes last, so that the two kinds of filler surround the same pairs and queries.
    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let shape = self.sets.shape(split, set);
        let rng = &mut example_rng(*b"mqar\0\0\0\0", self.seed, split, set, index);
        let half = self.vocab / 2;
        let keys = draw_distinct(rng, 1, half, shape.pairs);
        let values = draw_distinct(rng, half, self.vocab, shape.pairs);
        let slots = shape.draw_slots(rng);
        let filler = draw_filler(rng, self.filler, self.vocab, shape.length - 2 * shape.pairs);
        Draws { keys, values, slots, filler }.lay_out()
    }

    fn score_name(&self) -> &'static str {
        "accuracy"
    }
}
