//! Formal languages: a row of symbols, and one answer that a small automaton knows.
//! ```text
//! A set [low, high] draws a size; the size counts the answer's place, which comes last and is cut.
//! n is the tokens left, N the most that the set can draw.
//!
//! input   s_1 .. s_n PAD ..    N tokens; a causal model cannot tell how many PADs follow
//! target  the answer at n      the position just before its place; nothing elsewhere
//!
//! accuracy         the share of examples answered rightly, over all sizes together
//! scaled_accuracy  (accuracy - r) / (1 - r), where r is 1 / (possible answers); may be below 0
//! scaled_accuracy_40_64, _65_128, _129_256, ...  the same over these sizes; below 40 there is none
//!
//! Source: arXiv 2405.04517 for the languages, arXiv 2411.12537 for sizes and scores, and their data
//! in automl/unlocking_state_tracking, which puts id 0 at the answer's place where we have PAD: a
//! causal model has answered by then. The distribution is the published one, the random numbers are
//! our own.
//! ```

use std::fmt::Debug;
use std::ops::RangeInclusive;

use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

mod cycle_navigation;
mod even_pairs;
mod modular_arithmetic;
mod parity;
#[cfg(test)]
mod tests;

pub use cycle_navigation::CycleNavigationConfig;
pub use even_pairs::EvenPairsConfig;
pub use modular_arithmetic::ModularArithmeticConfig;
pub use parity::ParityConfig;

/// One set of examples of a formal language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeRange {
    /// The smallest size and the largest, 3 or more. Twice the same is a fixed size.
    pub sizes: [usize; 2],
    /// Examples in the set.
    pub examples: u64,
}

/// How much of a sequence is answered.
///
/// Labels everywhere teach much more than one label: scores of the two do not belong in one column.
/// Modular arithmetic has the one alone, as the prefix of an expression need not be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Supervision {
    /// One answer, at the end, as in arXiv 2411.12537.
    #[default]
    Last,
    /// An answer after each prefix, in training and in scores, as in arXiv 2505.17761. `accuracy`
    /// is then a mean over examples of the share of their prefixes answered rightly.
    Every,
}

/// The sets of training, validation and test with the published sizes; `train` examples to learn
/// from, 8 192 in each of the others.
fn published(train: u64) -> [Vec<SizeRange>; 3] {
    let set = |low, high, examples| vec![SizeRange { sizes: [low, high], examples }];
    [set(3, 40, train), set(40, 256, 8_192), set(40, 256, 8_192)]
}

fn check_ranges(task: &str, lists: [&[SizeRange]; 3]) -> Result<(), TaskError> {
    check_sets(task, lists, |at, &SizeRange { sizes: [low, high], examples }| {
        let got = format!("[{low}, {high}]");
        let want = "[low, high] with 3 <= low <= high";
        require(3 <= low && low <= high, format!("{at}.sizes"), got, want)?;
        require(examples >= 1, format!("{at}.examples"), examples, "1 or more")
    })
}

// The exact shares of the answers take time with the square of their number.
fn check_answers(key: &str, answers: u32) -> Result<(), TaskError> {
    require((2..=64).contains(&answers), key, answers, "between 2 and 64")
}

/// The part of a language that differs from the others; [`Formal`] does the rest.
pub(crate) trait Language: Debug + Send + Sync {
    /// Marks the language's random numbers.
    const TAG: [u8; 8];

    fn vocab(&self) -> u32;

    fn pad(&self) -> u32;

    /// Possible answers are the ids from the first of these on, as many as the second says.
    fn answer_ids(&self) -> (u32, u32);

    fn token(&self, id: u32) -> String;

    /// Numbers to draw from, all with the same weight, for sizes from `low` to `high`.
    fn drawn(&self, [low, high]: [usize; 2]) -> RangeInclusive<usize> {
        low..=high
    }

    /// Tokens of an input, n, for a number drawn. Does not fall where the number grows.
    fn tokens(&self, drawn: usize) -> usize {
        drawn - 1
    }

    /// The size that n tokens belong to.
    fn size(&self, tokens: usize) -> usize {
        tokens + 1
    }

    /// Draws an input of n tokens to the end of `row`.
    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>);

    /// How many prefixes of n tokens ask for an answer.
    fn asked(&self, tokens: usize) -> usize {
        tokens
    }

    /// The answers to the [`Language::asked`] longest prefixes of a row, ending with the whole row's.
    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32>;

    /// For each count of tokens up to `longest`, how likely each answer is, exactly. Counts that are
    /// never drawn may have any list.
    fn shares(&self, longest: usize) -> Vec<Vec<f64>>;
}

/// A formal language, checked and ready to draw from.
#[derive(Debug, Clone)]
pub(crate) struct Formal<L> {
    language: L,
    supervision: Supervision,
    seed: u64,
    sets: Splits<Shape>,
}

/// Values that all examples of one set share.
#[derive(Debug, Clone)]
struct Shape {
    drawn: RangeInclusive<usize>,
    longest: usize,
}

impl<L: Language> Formal<L> {
    /// Makes the task from lists that [`check_ranges`] has passed.
    fn new(language: L, supervision: Supervision, lists: [&[SizeRange]; 3], seed: u64) -> Self {
        let make = |set: &SizeRange| {
            let drawn = language.drawn(set.sizes);
            let longest = language.tokens(*drawn.end());
            let scored = match supervision {
                Supervision::Last => 1,
                Supervision::Every => language.asked(longest),
            };
            (set.info(longest, scored), Shape { drawn, longest })
        };
        let sets = Splits::new(lists, make);
        Self { language, supervision, seed, sets }
    }

    fn lay_out(&self, mut row: Vec<u32>, longest: usize) -> Example {
        let end = row.len();
        let mut target = vec![None; longest];
        match self.supervision {
            Supervision::Last => target[end - 1] = self.language.answers(&row).last(),
            Supervision::Every => {
                let asked = &mut target[end - self.language.asked(end)..end];
                for (target, answer) in asked.iter_mut().zip(self.language.answers(&row)) {
                    *target = Some(answer);
                }
            }
        }
        row.resize(longest, self.language.pad());
        Example { input: row, target }
    }

    /// `accuracy` on the scale where guessing is 0.
    fn scaled(&self, accuracy: f64) -> f64 {
        let chance = 1.0 / f64::from(self.language.answer_ids().1);
        (accuracy - chance) / (1.0 - chance)
    }

    /// How likely each answer at the end is, over all sizes of a set.
    fn shares(&self, shape: &Shape) -> Vec<f64> {
        let by_tokens = self.language.shares(shape.longest);
        let weight = 1.0 / shape.drawn.clone().count() as f64;
        let mut shares = vec![0.0; self.language.answer_ids().1 as usize];
        for drawn in shape.drawn.clone() {
            for (share, part) in shares.iter_mut().zip(&by_tokens[self.language.tokens(drawn)]) {
                *share += weight * part;
            }
        }
        shares
    }

    /// Of examples given by their tokens and their last answer.
    fn figures(&self, shape: &Shape, ends: &[(usize, u32)]) -> Vec<Statistic> {
        let due: Vec<_> = shape.drawn.clone().map(|drawn| self.language.tokens(drawn)).collect();
        let found: Vec<_> = ends.iter().map(|&(tokens, _)| tokens).collect();
        let fewest = |list: &[usize]| share(list, |&tokens| tokens == due[0]);
        let name = |what| format!("tokens before the answer, {what}");
        let mut figures = vec![
            Statistic::expected(name("mean"), mean(&found), mean(&due)),
            Statistic::expected(name("share of the fewest"), fewest(&found), fewest(&due)),
        ];
        figures.extend(self.answer_figures(&self.shares(shape), ends));
        figures
    }

    fn answer_figures(&self, due: &[f64], ends: &[(usize, u32)]) -> Vec<Statistic> {
        let (first, _) = self.language.answer_ids();
        let mut figures = Vec::new();
        let (mut most, mut likeliest): (f64, f64) = (0.0, 0.0);
        for (id, &due) in (first..).zip(due) {
            let found = share(ends, |&(_, answer)| answer == id);
            let name = format!("share of answer {}", self.language.token(id));
            figures.push(Statistic::expected(name, found, due));
            (most, likeliest) = (most.max(found), likeliest.max(due));
        }
        let name = "scaled accuracy of the commonest answer everywhere";
        figures.push(Statistic::expected(name, self.scaled(most), self.scaled(likeliest)));
        figures
    }
}

impl SizeRange {
    fn info(&self, length: usize, scored: usize) -> SetInfo {
        let [low, high] = self.sizes;
        let name = if low == high { low.to_string() } else { format!("{low}-{high}") };
        SetInfo { name, length, examples: self.examples, scored }
    }
}

/// The sizes that are reported together with `size`.
fn bucket(size: usize) -> Option<(usize, usize)> {
    match size {
        0..40 => None,
        40..=64 => Some((40, 64)),
        _ => Some((size.next_power_of_two() / 2 + 1, size.next_power_of_two())),
    }
}

fn mean(list: &[usize]) -> f64 {
    list.iter().sum::<usize>() as f64 / list.len().max(1) as f64
}

fn share<T>(list: &[T], holds: impl Fn(&T) -> bool) -> f64 {
    list.iter().filter(|item| holds(item)).count() as f64 / list.len().max(1) as f64
}

impl<L: Language> Task for Formal<L> {
    fn vocab(&self) -> usize {
        self.language.vocab() as usize
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let shape = self.sets.shape(split, set);
        let rng = &mut example_rng(L::TAG, self.seed, split, set, index);
        let tokens = self.language.tokens(rng.random_range(shape.drawn.clone()));
        let mut row = Vec::with_capacity(shape.longest);
        self.language.draw(rng, tokens, &mut row);
        self.lay_out(row, shape.longest)
    }

    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        assert_eq!(
            predicted.len(),
            batch.scored.len(),
            "the caller predicts every scored position"
        );
        for row in batch.scored_rows() {
            let (scored, end) = (row.len(), batch.scored[row.end - 1] as usize % batch.length);
            let right = row.filter(|&i| predicted[i] == batch.target[i]).count();
            let accuracy = right as f64 / scored as f64;
            tally.add("accuracy", accuracy, 1);
            tally.add("scaled_accuracy", self.scaled(accuracy), 1);
            if let Some((low, high)) = bucket(self.language.size(end + 1)) {
                let name = format!("scaled_accuracy_{low}_{high}");
                tally.add(name, self.scaled(accuracy), 1);
            }
        }
    }

    fn score_name(&self) -> &'static str {
        "scaled_accuracy"
    }

    fn token(&self, id: u32) -> String {
        if id < self.language.vocab() { self.language.token(id) } else { id.to_string() }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let examples = || (0..count).map(|index| self.example(split, set, index));
        let end = |Example { target, .. }: Example| {
            let last = target.iter().rposition(Option::is_some).expect("every row has an answer");
            (last + 1, target[last].expect("`last` is where an answer stands"))
        };
        let mut figures = statistics::common(examples());
        let ends: Vec<_> = examples().map(end).collect();
        figures.extend(self.figures(self.sets.shape(split, set), &ends));
        figures
    }
}
