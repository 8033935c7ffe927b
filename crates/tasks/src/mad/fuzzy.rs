//! Fuzzy in-context recall: keys and values are motifs of several tokens, with nothing between them.
//! ```text
//! V ids, L tokens; motifs of at most A tokens for keys and B for values, 3 and 3 as published.
//! W = V - 1: keys are made of 0..W/2, values of W/2..W, and V - 1 pads.
//!
//! motif   different ids, uniform over all such tuples of its length
//! length  of a key uniform over 1..=A in training, A else; of a value uniform over 1..=B
//! probe   a pair of P tokens and the place, uniform over 0..L - 2P, from which it is due
//! pairs   while there are fewer than L - P - A - B tokens: the probe, if it is due and was not shown
//!         yet; else a key, with the value it had before or a new one. The key may be the probe's,
//!         which shows the probe too.
//! end     the probe, and pads on the left, 2 to 1 + A + B of them, up to L + 1 tokens
//!
//! input   all tokens but the last, so L
//! target  the next token, also where that is a pad; in validation and test only the values of keys
//!         that were shown before, and the probe's, whether or not it was shown
//!
//! L = 24, probe (2 5 0) (9 11), another pair (1 4 6) (8), in a test:
//! input   7 pads |  1  4  6  8 |  2  5  0  9 11 |  1  4  6  8 |  2  5  0  9
//! target          |  .  .  .  . |  .  .  .  .  . |  .  .  8  . |  .  .  9 11
//! ```
//! A value's later tokens are asked for with its earlier ones in view. Where the probe is due within
//! the last pairs it may never be shown: 2.3 % of the baseline's tests can't be answered.

use std::ops::Range;

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::sequence::Sequence;
use super::{Sizes, check_examples, check_vocab, expect, leading, score};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

#[cfg(test)]
mod tests;

/// Tokens of the longest motif there can be.
const LONGEST: usize = 4;

/// Fuzzy in-context recall, as TOML spells it.
///
/// ```toml
/// [task.fuzzy_in_context_recall]
/// train = [{ length = 128, examples = 12_800 }]
/// test = [{ length = 128, examples = 1_280 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FuzzyInContextRecallConfig {
    /// Token ids, V: the last is the pad, half of the others make keys. Default 16.
    #[serde(default = "default_vocab")]
    pub vocab: u32,
    /// Tokens of the longest key, and of every key outside training; 4 at most. Default 3.
    #[serde(default = "default_motif")]
    pub key_motif: usize,
    /// Tokens of the longest value; 4 at most. Default 3.
    #[serde(default = "default_motif")]
    pub value_motif: usize,
    /// Sets to learn from. `length` is the number of tokens of an example, and more than two pairs
    /// of the longest motifs take.
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

fn default_motif() -> usize {
    3
}

impl FuzzyInContextRecallConfig {
    /// The published baseline: 16 ids, length 128, 12 800 examples to train and 1 280 to test.
    pub fn baseline() -> Self {
        Self::published(default_vocab(), 128, 12_800)
    }

    /// A published setting: motifs of up to three tokens, and 1 280 examples to test.
    pub fn published(vocab: u32, length: usize, examples: u64) -> Self {
        let [train, test] = Sizes::published(length, examples);
        let (key_motif, value_motif) = (default_motif(), default_motif());
        Self { vocab, key_motif, value_motif, train, validation: Vec::new(), test }
    }

    fn lists(&self) -> [&[Sizes]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    fn check(&self) -> Result<(), TaskError> {
        let motifs = [("key_motif", self.key_motif), ("value_motif", self.value_motif)];
        for (name, motif) in motifs {
            let key = format!("task.fuzzy_in_context_recall.{name}");
            let want = format!("between 1 and {LONGEST}");
            require((1..=LONGEST).contains(&motif), key, motif, want)?;
        }
        // Of W = V - 1 ids, keys have half, rounded down, and values the rest.
        let least = (2 * self.key_motif + 1).max(2 * self.value_motif);
        check_vocab("fuzzy_in_context_recall", self.vocab, least as u32)?;
        check_sets("fuzzy_in_context_recall", self.lists(), |at, sizes| self.check_sizes(at, sizes))
    }

    fn check_sizes(&self, at: &str, sizes: &Sizes) -> Result<(), TaskError> {
        let pairs = 2 * (self.key_motif + self.value_motif);
        let want = format!("above {pairs}, what two pairs of the longest motifs take");
        require(sizes.length > pairs, format!("{at}.length"), sizes.length, want)?;
        check_examples(at, sizes.examples)
    }
}

/// Fuzzy in-context recall, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct FuzzyInContextRecall {
    seed: u64,
    motifs: Motifs,
    /// By set, the length of its examples.
    sets: Splits<usize>,
}

/// Ids and widths that motifs are made of.
#[derive(Debug, Clone, Copy)]
struct Motifs {
    /// Ids of keys, `0..keys`.
    keys: u32,
    pad: u32,
    /// Tokens of the longest key and value.
    key: usize,
    value: usize,
}

impl FuzzyInContextRecall {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &FuzzyInContextRecallConfig, seed: u64) -> Result<Self, TaskError> {
        config.check()?;
        let motifs = Motifs::new(config);
        let set = |split, sizes: &Sizes| {
            let scored = motifs.most_scored(split, sizes.length);
            (sizes.info(sizes.length, scored), sizes.length)
        };
        Ok(Self { seed, motifs, sets: Splits::by_split(config.lists(), set) })
    }
}

/// Different ids, in order.
// Those past the end are `NO_ID`, so that equal motifs are equal arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Motif {
    ids: [u32; LONGEST],
    length: usize,
}

const NO_ID: u32 = u32::MAX;

impl Motif {
    /// Of a length in `lengths`; one random number for all of it, since drawing is what an example
    /// mostly costs.
    fn draw(rng: &mut impl Rng, ids: Range<u32>, lengths: Range<u32>) -> Self {
        let mut numbers = Numbers(rng.random());
        let length = (lengths.start + numbers.below(lengths.end - lengths.start)) as usize;
        let mut motif = Self { ids: [NO_ID; LONGEST], length };
        for i in 0..length {
            let mut id = ids.start + numbers.below(ids.end - ids.start - i as u32);
            // The number counts the ids that are not used yet: it passes over the others in order.
            let mut used = motif.ids;
            used[..i].sort_unstable();
            used[..i].iter().for_each(|&before| id += u32::from(before <= id));
            motif.ids[i] = id;
        }
        motif
    }

    fn ids(&self) -> &[u32] {
        &self.ids[..self.length]
    }

    /// One number for the whole, which is found sooner than an array.
    fn code(&self) -> u128 {
        self.ids.iter().fold(0, |code, &id| code << 32 | u128::from(id))
    }
}

/// A random fraction, from which small numbers are taken one by one. With `n` the product of their
/// bounds, none is likelier than another by more than n / 2^64.
struct Numbers(u64);

impl Numbers {
    /// Uniform in `0..bound`.
    fn below(&mut self, bound: u32) -> u32 {
        let scaled = u128::from(self.0) * u128::from(bound);
        self.0 = scaled as u64;
        (scaled >> 64) as u32
    }
}

/// A key and its value.
#[derive(Debug, Clone, Copy)]
struct Pair {
    key: Motif,
    value: Motif,
}

impl Pair {
    fn length(&self) -> usize {
        self.key.length + self.value.length
    }
}

impl Motifs {
    fn new(config: &FuzzyInContextRecallConfig) -> Self {
        let pad = config.vocab - 1;
        Self { keys: pad / 2, pad, key: config.key_motif, value: config.value_motif }
    }

    /// Of L + 1 tokens two or more are pads. Outside training the first pair, of A + 1 tokens or
    /// more, is not asked for, and neither are the keys of later ones.
    fn most_scored(&self, split: Split, length: usize) -> usize {
        match split {
            Split::Train => length,
            _ => (length - 1 - self.key - 1) * self.value / (self.key + self.value),
        }
    }

    fn draw_key(&self, rng: &mut impl Rng, split: Split) -> Motif {
        let longest = self.key as u32;
        let shortest = if split == Split::Train { 1 } else { longest };
        Motif::draw(rng, 0..self.keys, shortest..longest + 1)
    }

    fn draw_value(&self, rng: &mut impl Rng) -> Motif {
        Motif::draw(rng, self.keys..self.pad, 1..self.value as u32 + 1)
    }

    /// Which of `pairs` to show next, the probe aside. A key that none of them has joins them.
    /// `codes` are those of their keys.
    fn draw_pair(
        &self,
        rng: &mut impl Rng,
        split: Split,
        pairs: &mut Vec<Pair>,
        codes: &mut Vec<u128>,
    ) -> usize {
        let key = self.draw_key(rng, split);
        let code = key.code();
        codes.iter().position(|&known| known == code).unwrap_or_else(|| {
            codes.push(code);
            pairs.push(Pair { key, value: self.draw_value(rng) });
            pairs.len() - 1
        })
    }

    fn draw(&self, rng: &mut impl Rng, split: Split, length: usize) -> Draws {
        let probe = Pair { key: self.draw_key(rng, split), value: self.draw_value(rng) };
        let due = rng.random_range(0..length - 2 * probe.length());
        let end = length - probe.length() - self.key - self.value;
        let most = length / 2 + 1;
        let (mut pairs, mut order) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut codes = Vec::with_capacity(most);
        pairs.push(probe);
        codes.push(probe.key.code());
        let (mut tokens, mut probe_shown) = (0, false);
        while tokens < end {
            let probe_now = tokens >= due && !probe_shown;
            let pair =
                if probe_now { 0 } else { self.draw_pair(rng, split, &mut pairs, &mut codes) };
            probe_shown |= pair == 0;
            tokens += pairs[pair].length();
            order.push(pair);
        }
        Draws { pairs, order }
    }

    /// The keys of an example, in order; the last is the probe's.
    fn keys<'a>(&self, input: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
        let keys = self.keys;
        let runs = input.chunk_by(move |&a, &b| (a < keys) == (b < keys));
        runs.filter(move |run| run[0] < keys)
    }

    fn is_answerable(&self, input: &[u32]) -> bool {
        let keys: Vec<_> = self.keys(input).collect();
        let (probe, shown) = keys.split_last().expect("an example ends with the probe");
        shown.contains(probe)
    }
}

/// Random part of an example.
#[derive(Debug)]
struct Draws {
    /// With different keys. The first is the probe.
    pairs: Vec<Pair>,
    /// Which of them are shown before the probe is asked.
    order: Vec<usize>,
}

impl Draws {
    fn lay_out(self, pad: u32, length: usize, split: Split) -> Example {
        let Self { pairs, order } = self;
        let tokens: usize = order.iter().chain(&[0]).map(|&pair| pairs[pair].length()).sum();
        let mut sequence = Sequence::with_capacity(length + 1);
        (tokens..length + 1).for_each(|_| sequence.push(pad, false));
        let mut shown = vec![false; pairs.len()];
        for pair in order {
            let again = std::mem::replace(&mut shown[pair], true);
            push_pair(&mut sequence, &pairs[pair], again);
        }
        push_pair(&mut sequence, &pairs[0], true);
        sequence.cut(split)
    }
}

fn push_pair(sequence: &mut Sequence, pair: &Pair, recalled: bool) {
    sequence.extend(pair.key.ids(), false);
    sequence.extend(pair.value.ids(), recalled);
}

impl Task for FuzzyInContextRecall {
    fn vocab(&self) -> usize {
        self.motifs.pad as usize + 1
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let rng = &mut example_rng(*b"mad-fuzz", self.seed, split, set, index);
        let length = *self.sets.shape(split, set);
        self.motifs.draw(rng, split, length).lay_out(self.motifs.pad, length, split)
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
        let Motifs { keys, pad, .. } = self.motifs;
        match id {
            _ if id < keys => format!("k{id}"),
            _ if id < pad => format!("v{}", id - keys),
            _ => "pad".into(),
        }
    }

    // Outside training there are figures for the baseline alone, counted over a million sequences of
    // a separate implementation: no formula is at hand, since how often a key comes again depends on
    // how long the pairs before it were.
    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let length = *self.sets.shape(split, set);
        let examples: Vec<_> = (0..count).map(|index| self.example(split, set, index)).collect();
        let mut figures = statistics::common(examples.iter().cloned());
        let Motifs { pad, key, value, .. } = self.motifs;
        let counted = (pad, key, value, length) == (15, 3, 3, 128) && split != Split::Train;
        let answerable =
            examples.iter().filter(|example| self.motifs.is_answerable(&example.input));
        let share = 1.0 - answerable.count() as f64 / count.max(1) as f64;
        let mut unanswerable = Statistic::new("share of probes never shown", share);
        if counted {
            expect(&mut figures, "scored positions, mean", 4.395);
            unanswerable.expected = Some(0.0229);
        } else if split == Split::Train {
            expect(&mut figures, "scored positions, mean", length as f64);
        }
        let pads = || examples.iter().map(|example| leading(&example.input, pad));
        let (fewest, most) = (pads().min().unwrap_or(0), pads().max().unwrap_or(0));
        figures.push(unanswerable);
        figures.push(Statistic::expected("pads, fewest", fewest as f64, 2.0));
        figures.push(Statistic::expected("pads, most", most as f64, (1 + key + value) as f64));
        figures
    }
}
