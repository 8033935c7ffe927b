//! The interface between a task and whoever trains on it.

use std::fmt::Debug;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{Batch, Example, Statistic, Tally, statistics};

/// Purpose of a set of examples. The splits of a task share no random numbers.
// The numbers are part of the key that examples are drawn with: changing one changes the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// To learn from.
    Train = 0,
    /// To choose settings and the moment to stop by, so that the test need not be used for it. May
    /// have no sets.
    Validation = 1,
    /// To report.
    Test = 2,
}

/// One set of a split: examples of one shape and difficulty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetInfo {
    /// A short name for tables, for instance `64x4`.
    pub name: String,
    /// Tokens of every example. A task whose sequences differ in length pads them at their end.
    pub length: usize,
    /// Examples in the set: the indices are `0..examples`.
    pub examples: u64,
    /// The most positions that one example has scored.
    pub scored: usize,
}

/// Which way a score is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The higher the better, as accuracies are.
    Highest,
    /// The lower the better, as bits per byte are.
    Lowest,
}

/// An example as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Text that the model reads.
    pub prompt: String,
    /// Text to write after it; empty where nothing is asked.
    pub answer: String,
}

/// A prompt and how much a model may write after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Ids to generate, greedily.
    pub new_tokens: usize,
}

/// A benchmark: a source of examples and the judge of their answers. Nothing in it changes after it
/// is made.
pub trait Task: Send + Sync + Debug {
    /// How many token ids there are: inputs and targets are in `0..vocab`.
    fn vocab(&self) -> usize;

    /// The sets of a split, in the config's order. `Train` and `Test` have at least one.
    fn sets(&self, split: Split) -> &[SetInfo];

    /// Example `index` of a set: a pure function of the task's seed and these arguments.
    /// # Panics
    /// If the split has no such set.
    fn example(&self, split: Split, set: usize, index: u64) -> Example;

    /// The examples named by `indices`, as [`Task::example`] gives them, in that order. They are made
    /// on all cores.
    /// # Panics
    /// If the split has no such set.
    fn batch(&self, split: Split, set: usize, indices: &[u64]) -> Batch {
        let length = self.sets(split)[set].length;
        let rows = (TOKENS_A_TASK / length.max(1)).max(1);
        let part = |indices: &[u64]| {
            Batch::stack(length, indices.iter().map(|&index| self.example(split, set, index)))
        };
        Batch::join(length, indices.par_chunks(rows).map(part).collect())
    }

    /// Counts predictions: `predicted[i]` is the id with the largest logit of the whole vocabulary
    /// at `batch.scored[i]`. Counts [`Tally::add_sequences`] unless the task has scores of its own.
    /// # Panics
    /// If there is not one prediction for each scored position.
    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        tally.add_sequences(batch, predicted);
    }

    /// Rows that belong together in a score that is no mean over rows: [`Task::tally`] gets batches of
    /// a multiple of so many, the last of a set aside.
    fn rows_of_a_score(&self) -> usize {
        1
    }

    /// Counts scores that follow from the loss: `nats` of cross-entropy, summed over `scored`
    /// positions of a set.
    fn tally_loss(&self, _split: Split, _set: usize, _nats: f64, _scored: u64, _tally: &mut Tally) {
    }

    /// Which of [`Tally::metrics`] is the headline.
    fn score_name(&self) -> &'static str;

    /// Which way the headline is better.
    fn goal(&self) -> Goal {
        Goal::Highest
    }

    /// Whether the answers stand in the input at their own positions, so that only a model that has to
    /// put the whole sequence into one vector first, an auto-encoder, is asked anything.
    fn needs_auto_encoder(&self) -> bool {
        false
    }

    /// Name of an id, for people.
    fn token(&self, id: u32) -> String {
        id.to_string()
    }

    /// An example as text, where the task is made of text.
    /// # Panics
    /// If the split has no such set.
    fn text(&self, _split: Split, _set: usize, _index: u64) -> Option<Text> {
        None
    }

    /// An example as something to answer in one's own words, where the task is scored by what a model
    /// writes.
    /// # Panics
    /// If the split has no such set.
    fn question(&self, _split: Split, _set: usize, _index: u64) -> Option<Question> {
        None
    }

    /// Counts what a model wrote to [`Task::question`]: the ids after the prompt.
    /// # Panics
    /// If the split has no such set.
    fn tally_answer(
        &self,
        _split: Split,
        _set: usize,
        _index: u64,
        _answer: &[u32],
        _tally: &mut Tally,
    ) {
    }

    /// Figures of the first `count` examples of a set, beside what theory says. Tasks add their own
    /// to [`statistics::common`].
    /// # Panics
    /// If the split has no such set.
    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        statistics::common((0..count).map(|index| self.example(split, set, index)))
    }
}

/// Tokens that are worth a hand-over to another core.
const TOKENS_A_TASK: usize = 1 << 13;

#[cfg(test)]
mod tests {
    use super::*;

    fn example(input: [u32; 3], target: [Option<u32>; 3]) -> Example {
        Example { input: input.into(), target: target.into() }
    }

    #[test]
    fn a_batch_keeps_rows_in_order_and_flattens_what_is_scored() {
        let rows = [
            example([1, 2, 3], [None, Some(7), Some(8)]),
            example([4, 5, 6], [None, None, None]),
            example([7, 8, 9], [Some(9), None, None]),
        ];
        let batch = Batch::stack(3, rows);
        assert_eq!((batch.rows, batch.length), (3, 3));
        assert_eq!(batch.input, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(batch.scored, [1, 2, 6]);
        assert_eq!(batch.target, [7, 8, 9]);
        assert_eq!(batch.scored_rows().collect::<Vec<_>>(), [0..2, 2..3]);
    }

    #[test]
    fn batches_joined_are_the_batch_of_all_their_rows() {
        let row = |x| example([x, x + 1, x + 2], [None, (x != 3).then_some(x), Some(x + 9)]);
        let part = |from: u32, to: u32| Batch::stack(3, (from..to).map(row));
        let parts = vec![part(0, 2), part(2, 2), part(2, 5)];
        assert_eq!(Batch::join(3, parts), part(0, 5));
    }

    #[test]
    fn a_batch_of_nothing_is_empty() {
        let batch = Batch::stack(3, []);
        assert_eq!((batch.rows, batch.input.len(), batch.scored_rows().count()), (0, 0, 0));
    }

    #[test]
    #[should_panic(expected = "a task keeps the length")]
    fn a_row_of_another_length_is_refused() {
        Batch::stack(4, [example([1, 2, 3], [None; 3])]);
    }
}
