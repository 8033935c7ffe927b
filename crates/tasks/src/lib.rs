//! Synthetic benchmarks for sequence models, without tensors: the tokens of each example, and which
//! answers count as right.
//!
//! A [`TaskConfig`] and a seed make a [`Task`]. A task hands out [`Batch`]es of tokens with their
//! targets, and counts predictions into a [`Tally`]. Any example can be made on its own, in any
//! order and on any thread: it is a pure function of (seed, split, set, index).
//!
//! ```
//! use linattn_tasks::{MqarConfig, Split, Tally, TaskConfig};
//!
//! let task = TaskConfig::Mqar(MqarConfig::figure2(64, 4)).build(7)?;
//! let batch = task.batch(Split::Test, 0, &[0, 1, 2]);
//! // A model would give an id for each position in `batch.scored`.
//! let perfect = batch.target.clone();
//! let mut tally = Tally::default();
//! task.tally(&batch, &perfect, &mut tally);
//! assert_eq!(tally.metric(task.score_name()), Some(1.0));
//! # Ok::<(), linattn_tasks::TaskError>(())
//! ```
//!
//! A new task is a file, an arm of [`TaskConfig`] and a TOML.

#![deny(missing_docs)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod corpus;
mod error;
mod example;
mod formal;
mod group_word;
mod language_modelling;
pub mod mad;
mod mqar;
mod rng;
mod s_niah;
mod sets;
pub mod statistics;
mod tally;
mod task;
mod tokenizer;

use serde::{Deserialize, Serialize};

pub use error::TaskError;
pub use example::{Batch, Example};
pub use formal::{
    CycleNavigationConfig, EvenPairsConfig, ModularArithmeticConfig, ParityConfig, SizeRange,
    Supervision,
};
pub use group_word::{GroupWord, GroupWordConfig, WordInputs, WordSet};
pub use language_modelling::{LanguageModelling, LanguageModellingConfig, TextSet};
pub use mqar::{Cell, Filler, Mqar, MqarConfig};
pub use s_niah::{Needle, NeedleSet, SNiah, SNiahConfig, Track, TrainSet};
pub use statistics::Statistic;
pub use tally::Tally;
pub use task::{Goal, Question, SetInfo, Split, Task, Text};
pub use tokenizer::{TextStream, Tokenizer, TokenizerConfig};

/// Which task, as the TOML's table name: `[task.mqar]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum TaskConfig {
    /// Multi-query associative recall.
    Mqar(MqarConfig),
    /// Is the number of ones odd?
    Parity(ParityConfig),
    /// Do the first and the last letter agree?
    EvenPairs(EvenPairsConfig),
    /// Where steps around a cycle lead.
    CycleNavigation(CycleNavigationConfig),
    /// The value of an expression mod m.
    ModularArithmetic(ModularArithmeticConfig),
    /// Running products in a finite group.
    GroupWord(GroupWordConfig),
    /// A single needle in a haystack.
    SNiah(SNiahConfig),
    /// The next token of plain text.
    LanguageModelling(LanguageModellingConfig),
    /// MAD: say a random sequence again from one vector.
    Compression(mad::CompressionConfig),
    /// MAD: recall values of several tokens by keys of several tokens.
    FuzzyInContextRecall(mad::FuzzyInContextRecallConfig),
    /// MAD: recall a key's value.
    InContextRecall(mad::InContextRecallConfig),
    /// MAD: know values that no example shows.
    Memorization(mad::MemorizationConfig),
    /// MAD: recall a key's value among noise.
    NoisyInContextRecall(mad::NoisyInContextRecallConfig),
    /// MAD: say tokens again that were scattered among blanks.
    SelectiveCopying(mad::SelectiveCopyingConfig),
}

impl TaskConfig {
    /// How text becomes ids, where the task is made of text.
    pub fn tokenizer(&self) -> Option<&TokenizerConfig> {
        match self {
            Self::SNiah(config) => Some(&config.tokenizer),
            Self::LanguageModelling(config) => Some(&config.tokenizer),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn tokenizer_mut(&mut self) -> Option<&mut TokenizerConfig> {
        match self {
            Self::SNiah(config) => Some(&mut config.tokenizer),
            Self::LanguageModelling(config) => Some(&mut config.tokenizer),
            _ => None,
        }
    }

    /// Checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError`] names the first key that cannot be used.
    pub fn build(&self, seed: u64) -> Result<Box<dyn Task>, TaskError> {
        match self {
            Self::Mqar(config) => Ok(Box::new(Mqar::new(config, seed)?)),
            Self::Parity(config) => Ok(Box::new(config.task(seed)?)),
            Self::EvenPairs(config) => Ok(Box::new(config.task(seed)?)),
            Self::CycleNavigation(config) => Ok(Box::new(config.task(seed)?)),
            Self::ModularArithmetic(config) => config.task(seed),
            Self::GroupWord(config) => Ok(Box::new(GroupWord::new(config, seed)?)),
            Self::SNiah(config) => Ok(Box::new(SNiah::new(config, seed)?)),
            Self::LanguageModelling(config) => Ok(Box::new(LanguageModelling::new(config, seed)?)),
            Self::Compression(config) => Ok(Box::new(mad::Compression::new(config, seed)?)),
            Self::FuzzyInContextRecall(config) => {
                Ok(Box::new(mad::FuzzyInContextRecall::new(config, seed)?))
            }
            Self::InContextRecall(config) => Ok(Box::new(mad::InContextRecall::new(config, seed)?)),
            Self::Memorization(config) => Ok(Box::new(mad::Memorization::new(config, seed)?)),
            Self::NoisyInContextRecall(config) => {
                Ok(Box::new(mad::InContextRecall::noisy(config, seed)?))
            }
            Self::SelectiveCopying(config) => {
                Ok(Box::new(mad::SelectiveCopying::new(config, seed)?))
            }
        }
    }
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
