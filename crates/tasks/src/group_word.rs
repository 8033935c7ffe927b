//! Group words: after each of a row of group elements, their product so far.
//! ```text
//! G elements x_1 .. x_k, uniform over the allowed ones; ids after the elements: |G| PAD, |G| + 1 BOS,
//! then UNK, EOS, SEP, CLS, MASK, of which BOS alone is used
//!
//! state   s_0 = 0, the identity; s_j = s_{j-1} o x_j: a new element multiplies from the right
//! input   BOS  x_1 .. x_k
//! target  BOS  s_1 .. s_k    nothing is shifted: the answer to an element stands on it
//!
//! with n tokens an element, L tokens in all: each element stands n times, and its state is asked
//! from its last time on
//! input   BOS  x_{ceil(t / n)}    for t = 1 .. L
//! target  BOS  s_{floor(t / n)}
//!
//! S3, n = 1:            S3, n = 2:
//! input   7 1 2 3 4 5   input   7 1 1 2 2 3
//! target  7 1 4 0 4 2   target  7 0 1 1 4 4
//!
//! sequence_accuracy_t  the share of sequences with BOS and all of the first t tokens right
//! exact                the same for whole sequences; token_accuracy: the share of right positions
//!
//! Source: jopetty/word-problem for data and metric, automl/DeltaProduct for n tokens and for the
//! allowed elements (arXiv 2411.12537, 2502.10297).
//! ```
//! The published files hold no sequence twice. Ours are independent draws: of the 120^16 sequences of
//! the smallest published setting, 1.6 million draws hold one twice with a probability below 10^-20. A
//! set of short words is a sample with repeats of all there are.

use std::ops::Range;

use rand::Rng;
use rand::distr::Uniform;
use serde::{Deserialize, Serialize};

use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::{Batch, Example, SetInfo, Split, Statistic, Tally, Task, TaskError, statistics};

mod group;
#[cfg(test)]
mod tests;

use group::Group;

/// Group words, as TOML spells it.
///
/// ```toml
/// [task.group_word]
/// group = "S5"
/// train = [{ length = 128, examples = 2_000_000 }]
/// test = [{ length = 512, examples = 500_000 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupWordConfig {
    /// The group: `S5`, `A5`, `Z60`, or a product, `Z2_x_S3`.
    pub group: String,
    /// Which elements an input has. Default `all`.
    #[serde(default)]
    pub inputs: WordInputs,
    /// Tokens of an element, n. Default 1.
    #[serde(default = "default_tokens")]
    pub tokens: usize,
    /// The accuracy of the first t tokens is reported for t at each multiple of this, and at the end.
    /// Default 32.
    #[serde(default = "default_report_every")]
    pub report_every: usize,
    /// Sets to learn from.
    pub train: Vec<WordSet>,
    /// Sets to choose settings by. Default none, as published, where the test is used to choose.
    #[serde(default)]
    pub validation: Vec<WordSet>,
    /// Sets to report.
    pub test: Vec<WordSet>,
}

/// Which elements of a group an input has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WordInputs {
    /// Every element, also the identity.
    #[default]
    All,
    /// Those that move two points at most: swaps and the identity, 11 in S5. A product moves the
    /// points of both factors; `Z<n>` turns n points.
    Swaps,
    /// Those that move three points at most: 31 in S5.
    #[serde(rename = "swaps_and_3_cycles")]
    SwapsAnd3Cycles,
}

/// One set of examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WordSet {
    /// Tokens after BOS, L.
    pub length: usize,
    /// Examples in the set.
    pub examples: u64,
}

fn default_tokens() -> usize {
    1
}

fn default_report_every() -> usize {
    32
}

impl GroupWordConfig {
    /// The setting of arXiv 2502.10297 for S3, S4, A5 or S5: words of 128 to learn from, 512 to
    /// report.
    pub fn deltaproduct(group: &str) -> Self {
        let set = |length, examples| vec![WordSet { length, examples }];
        Self {
            group: group.into(),
            inputs: WordInputs::All,
            tokens: default_tokens(),
            report_every: default_report_every(),
            train: set(128, 2_000_000),
            validation: Vec::new(),
            test: set(512, 500_000),
        }
    }

    /// A setting of arXiv 2411.12537 for S5: words of 32 to learn from, or of 64 where an element has
    /// 4 `tokens`, and 500 to report.
    pub fn s5(inputs: WordInputs, tokens: usize) -> Self {
        let length = if tokens == 1 { 32 } else { 64 };
        let train = vec![WordSet { length, examples: 1_600_000 }];
        let test = vec![WordSet { length: 500, examples: 40_000 }];
        Self { inputs, tokens, train, test, ..Self::deltaproduct("S5") }
    }

    fn lists(&self) -> [&[WordSet]; 3] {
        [&self.train, &self.validation, &self.test]
    }

    /// The group and its allowed elements.
    fn elements(&self) -> Result<(Group, Vec<u32>), TaskError> {
        let refused = |key: &str, got: &str, want: &str| TaskError::Value {
            key: format!("task.group_word.{key}"),
            got: got.into(),
            want: want.into(),
        };
        let group = Group::parse(&self.group)
            .ok_or_else(|| refused("group", &format!("`{}`", self.group), Group::SYNTAX))?;
        let (got, most) = match self.inputs {
            WordInputs::All => ("all", usize::MAX),
            WordInputs::Swaps => ("swaps", 2),
            WordInputs::SwapsAnd3Cycles => ("swaps_and_3_cycles", 3),
        };
        let allowed = group.moving(most);
        if allowed.len() > 1 {
            return Ok((group, allowed));
        }
        Err(refused("inputs", got, "one that leaves more than the identity, as `all` does"))
    }

    fn check(&self) -> Result<(), TaskError> {
        let positive = |key: &str, value: usize| {
            require(value >= 1, format!("task.group_word.{key}"), value, "1 or more")
        };
        positive("tokens", self.tokens)?;
        positive("report_every", self.report_every)?;
        let want = format!("{} or more, the `tokens` of an element", self.tokens);
        check_sets("group_word", self.lists(), |at, &WordSet { length, examples }| {
            require(length >= self.tokens, format!("{at}.length"), length, want.as_str())?;
            require(examples >= 1, format!("{at}.examples"), examples, "1 or more")
        })
    }
}

/// Group words, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct GroupWord {
    group: Group,
    allowed: Vec<u32>,
    tokens: usize,
    report_every: usize,
    seed: u64,
    sets: Splits<usize>,
}

impl GroupWord {
    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError::Value`] names the first key that cannot be used.
    pub fn new(config: &GroupWordConfig, seed: u64) -> Result<Self, TaskError> {
        let (group, allowed) = config.elements()?;
        config.check()?;
        let sets = Splits::new(config.lists(), |set| (set.info(), set.length));
        let &GroupWordConfig { tokens, report_every, .. } = config;
        Ok(Self { group, allowed, tokens, report_every, seed, sets })
    }

    fn bos(&self) -> u32 {
        self.group.order() as u32 + 1
    }

    /// A word of `length` tokens. The last element's tokens may be cut.
    fn lay_out(&self, elements: &[u32], length: usize) -> Example {
        let (mut input, mut target) =
            (Vec::with_capacity(length + 1), Vec::with_capacity(length + 1));
        input.push(self.bos());
        target.push(Some(self.bos()));
        let mut state = 0;
        for &element in elements {
            let tokens = self.tokens.min(length + 1 - input.len());
            input.resize(input.len() + tokens, element);
            target.resize(target.len() + tokens, Some(state as u32));
            if tokens == self.tokens {
                state = self.group.product(state, element as usize);
                *target.last_mut().expect("BOS at least is in it") = Some(state as u32);
            }
        }
        Example { input, target }
    }

    /// How many tokens after BOS an accuracy is reported for.
    fn reported(&self, length: usize) -> impl Iterator<Item = usize> {
        let end = (!length.is_multiple_of(self.report_every)).then_some(length);
        (1..=length / self.report_every).map(|i| i * self.report_every).chain(end)
    }

    /// How likely each state is after so many elements.
    fn state_shares(&self, elements: usize) -> Vec<f64> {
        let mut shares = vec![0.0; self.group.order()];
        shares[0] = 1.0;
        for _ in 0..elements {
            let mut next = vec![0.0; shares.len()];
            for (state, share) in shares.iter().enumerate() {
                for &element in &self.allowed {
                    let product = self.group.product(state, element as usize);
                    next[product] += share / self.allowed.len() as f64;
                }
            }
            shares = next;
        }
        shares
    }

    fn figures(&self, length: usize, words: impl Iterator<Item = Example>) -> [Statistic; 3] {
        let (mut elements, mut ends) =
            (vec![0u64; self.group.order()], vec![0u64; self.group.order()]);
        for Example { input, target } in words {
            // Each element at its first token.
            input[1..].iter().step_by(self.tokens).for_each(|x| elements[*x as usize] += 1);
            ends[target[length].expect("every position is asked") as usize] += 1;
        }
        let due = self.state_shares(length / self.tokens);
        let identity = ends[0] as f64 / ends.iter().sum::<u64>().max(1) as f64;
        let name = |what| format!("chi-square of {what}, per degree of freedom");
        let uniform = chi_square(&elements, &self.state_shares(1));
        [
            Statistic::expected(name("the elements"), uniform, 1.0),
            Statistic::expected(name("the last states"), chi_square(&ends, &due), 1.0),
            Statistic::expected("share of the identity as the last state", identity, due[0]),
        ]
    }
}

impl WordSet {
    fn info(&self) -> SetInfo {
        let &Self { length, examples } = self;
        SetInfo { name: length.to_string(), length: length + 1, examples, scored: length + 1 }
    }
}

/// Pearson's chi-square of counts per degree of freedom: about 1 where the shares are right.
fn chi_square(counts: &[u64], shares: &[f64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let cell = |(&count, &share): (&u64, &f64)| {
        let (count, due) = (count as f64, total * share);
        if count == due { 0.0 } else { (count - due).powi(2) / due }
    };
    let possible = shares.iter().filter(|share| **share > 0.0).count();
    counts.iter().zip(shares).map(cell).sum::<f64>() / (possible as f64 - 1.0)
}

impl Task for GroupWord {
    fn vocab(&self) -> usize {
        self.group.order() + SPECIAL.len()
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let length = *self.sets.shape(split, set);
        let rng = &mut example_rng(*b"groupwrd", self.seed, split, set, index);
        let draws = Uniform::new(0, self.allowed.len()).expect("`elements` asked for two or more");
        let word = rng.sample_iter(draws).take(length.div_ceil(self.tokens));
        let elements: Vec<_> = word.map(|drawn| self.allowed[drawn]).collect();
        self.lay_out(&elements, length)
    }

    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        tally.add_sequences(batch, predicted);
        let right =
            |row: Range<usize>| row.take_while(|&i| predicted[i] == batch.target[i]).count();
        let right: Vec<_> = batch.scored_rows().map(right).collect();
        for t in self.reported(batch.length - 1) {
            // BOS is one of them.
            let whole = right.iter().filter(|right| **right > t).count();
            tally.add(format!("sequence_accuracy_{t}"), whole as f64, batch.rows as u64);
        }
    }

    fn score_name(&self) -> &'static str {
        "exact"
    }

    fn token(&self, id: u32) -> String {
        match (id as usize).checked_sub(self.group.order()) {
            None => self.group.name(id as usize).into(),
            Some(i) => SPECIAL.get(i).map_or_else(|| id.to_string(), ToString::to_string),
        }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let examples = || (0..count).map(|index| self.example(split, set, index));
        let mut figures = statistics::common(examples());
        figures.extend(self.figures(*self.sets.shape(split, set), examples()));
        figures
    }
}

/// Ids after the elements.
const SPECIAL: [&str; 7] = ["PAD", "BOS", "UNK", "EOS", "SEP", "CLS", "MASK"];
