//! The six tasks of MAD: compress, recall (plainly, fuzzily, among noise), memorize and copy.
//!
//! Each has a baseline setting, and [`published_settings`] lists the 66 that change one knob of it.
//! They share a score: `accuracy` is the published one, a macro average over the answers of 128
//! sequences at a time; `micro_accuracy` is the share of scored positions that are right; `exact` is
//! the share of sequences without a mistake. Published models learn for 200 epochs in batches of
//! 128.
//!
//! Source: arXiv 2403.17844 and github.com/athms/mad-lab; the distributions are the published ones,
//! the random numbers are our own.

use serde::{Deserialize, Serialize};

use crate::sets::require;
use crate::{SetInfo, Statistic, TaskError};

mod compression;
mod fuzzy;
mod in_context_recall;
mod memorization;
mod score;
mod selective_copying;
mod sequence;
mod settings;
#[cfg(test)]
mod tests;

pub use compression::{Compression, CompressionConfig};
pub use fuzzy::{FuzzyInContextRecall, FuzzyInContextRecallConfig};
pub use in_context_recall::{
    InContextRecall, InContextRecallConfig, NoisyInContextRecallConfig, NoisySizes,
};
pub use memorization::{Memorization, MemorizationConfig};
pub use selective_copying::{CopySizes, SelectiveCopying, SelectiveCopyingConfig};
pub use settings::{Setting, published_settings};

/// Test examples of every published setting.
const TEST_EXAMPLES: u64 = 1_280;

/// One set of examples of a task that has no other knob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// The published length, L. The task says how many tokens an example then has.
    pub length: usize,
    /// Examples in the set.
    pub examples: u64,
}

impl Sizes {
    /// The training and the test list of a published setting.
    fn published(length: usize, examples: u64) -> [Vec<Self>; 2] {
        [examples, TEST_EXAMPLES].map(|examples| vec![Self { length, examples }])
    }

    /// With `tokens` an example, the most `scored` of which are.
    fn info(&self, tokens: usize, scored: usize) -> SetInfo {
        SetInfo { name: self.length.to_string(), length: tokens, examples: self.examples, scored }
    }
}

fn check_vocab(task: &str, vocab: u32, least: u32) -> Result<(), TaskError> {
    require(vocab >= least, format!("task.{task}.vocab"), vocab, format!("{least} or more"))
}

fn check_examples(at: &str, examples: u64) -> Result<(), TaskError> {
    require(examples >= 1, format!("{at}.examples"), examples, "1 or more")
}

fn check_even(at: &str, length: usize, least: usize) -> Result<(), TaskError> {
    let even = length >= least && length.is_multiple_of(2);
    require(even, format!("{at}.length"), length, format!("even, and {least} or more"))
}

/// The expected share of `kinds` equally likely kinds that turn up in so many draws.
fn share_seen(kinds: u32, draws: f64) -> f64 {
    1.0 - (1.0 - 1.0 / f64::from(kinds)).powf(draws)
}

/// Says what a figure of [`crate::statistics::common`] should be.
fn expect(figures: &mut [Statistic], name: &str, expected: f64) {
    let figure = figures.iter_mut().find(|figure| figure.name == name);
    figure.expect("`common` counts it for every task").expected = Some(expected);
}

/// How many tokens stand before the first that is not `id`.
fn leading(input: &[u32], id: u32) -> usize {
    input.iter().take_while(|&&token| token == id).count()
}
