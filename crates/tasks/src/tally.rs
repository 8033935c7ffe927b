//! Scores, summed over batches.

use std::borrow::Cow;

use crate::Batch;

/// Named means that grow batch by batch. It knows no metric by itself, so a task adds scores of its
/// own under names of its own: a value a sequence, a value a batch, or anything else that is a mean
/// in the end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tally {
    means: Vec<Mean>,
}

#[derive(Debug, Clone, PartialEq)]
struct Mean {
    name: Cow<'static, str>,
    /// Whether the values are logs, and the geometric mean is reported.
    logs: bool,
    sum: f64,
    count: u64,
}

impl Mean {
    fn value(&self) -> f64 {
        let mean = self.sum / self.count as f64;
        if self.logs { mean.exp() } else { mean }
    }
}

impl Tally {
    /// Adds `count` values, `sum` in total, to the mean called `name`.
    pub fn add(&mut self, name: impl Into<Cow<'static, str>>, sum: f64, count: u64) {
        self.grow(Mean { name: name.into(), logs: false, sum, count });
    }

    /// Adds `count` natural logs, `sum` in total, to the geometric mean called `name`. A perplexity
    /// is one, of the inverse probabilities.
    pub fn add_logs(&mut self, name: impl Into<Cow<'static, str>>, sum: f64, count: u64) {
        self.grow(Mean { name: name.into(), logs: true, sum, count });
    }

    fn grow(&mut self, more: Mean) {
        match self.means.iter_mut().find(|mean| mean.name == more.name) {
            Some(mean) => {
                mean.sum += more.sum;
                mean.count += more.count;
            }
            None => self.means.push(more),
        }
    }

    /// Adds the scores that every task can have, where `predicted[i]` belongs to `batch.scored[i]`:
    /// - `accuracy`: the share of a sequence's scored positions that are right, as a mean over
    ///   sequences;
    /// - `token_accuracy`: the share of all scored positions that are right;
    /// - `exact`: the share of sequences with every scored position right.
    ///
    /// A sequence with nothing scored does not count.
    /// # Panics
    /// If there is not one prediction for each scored position.
    pub fn add_sequences(&mut self, batch: &Batch, predicted: &[u32]) {
        assert_eq!(
            predicted.len(),
            batch.scored.len(),
            "the caller predicts every scored position"
        );
        for row in batch.scored_rows() {
            let scored = row.len();
            let right = row.filter(|&i| predicted[i] == batch.target[i]).count();
            self.add("accuracy", right as f64 / scored as f64, 1);
            self.add("token_accuracy", right as f64, scored as u64);
            self.add("exact", f64::from(right == scored), 1);
        }
    }

    /// Adds all that `other` has counted.
    pub fn merge(&mut self, other: &Self) {
        for mean in &other.means {
            self.grow(mean.clone());
        }
    }

    /// Every mean, in the order in which they were first added; a mean of no values is left out.
    pub fn metrics(&self) -> Vec<(&str, f64)> {
        let known = self.means.iter().filter(|mean| mean.count > 0);
        known.map(|mean| (mean.name.as_ref(), mean.value())).collect()
    }

    /// The mean called `name`, if anything was added to it.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics().into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Example;

    /// A row for each list of targets, all scored up to the list's end.
    fn batch(rows: &[&[u32]]) -> Batch {
        let length = 4;
        let row = |targets: &&[u32]| {
            let mut target: Vec<_> = targets.iter().copied().map(Some).collect();
            target.resize(length, None);
            Example { input: vec![0; length], target }
        };
        Batch::stack(length, rows.iter().map(row))
    }

    #[test]
    fn a_long_sequence_weighs_more_in_token_accuracy_and_no_more_in_accuracy() {
        let mut tally = Tally::default();
        tally.add_sequences(&batch(&[&[1, 2, 3, 4], &[5]]), &[1, 2, 3, 0, 5]);
        assert_eq!(tally.metrics(), [("accuracy", 0.875), ("token_accuracy", 0.8), ("exact", 0.5)]);
    }

    #[test]
    fn merged_batches_score_as_one_batch_does() {
        let (mut parts, mut whole) = (Tally::default(), Tally::default());
        for (row, predicted) in [([1, 2], [1, 2]), ([3, 4], [3, 0]), ([5, 6], [0, 0])] {
            let mut part = Tally::default();
            part.add_sequences(&batch(&[&row]), &predicted);
            parts.merge(&part);
        }
        whole.add_sequences(&batch(&[&[1, 2], &[3, 4], &[5, 6]]), &[1, 2, 3, 0, 0, 0]);
        assert_eq!(parts, whole);
    }

    #[test]
    fn a_sequence_with_nothing_scored_does_not_count() {
        let mut tally = Tally::default();
        tally.add_sequences(&batch(&[&[], &[1]]), &[1]);
        assert_eq!(tally.metric("accuracy"), Some(1.0));
    }

    #[test]
    fn nothing_counted_gives_no_score_rather_than_a_zero() {
        let mut tally = Tally::default();
        tally.add("mine", 0.0, 0);
        assert_eq!((tally.metrics(), tally.metric("accuracy")), (vec![], None));
    }

    #[test]
    fn a_task_can_add_a_score_of_its_own() {
        let mut tally = Tally::default();
        tally.add("macro", 0.25, 1);
        tally.add("macro", 0.75, 1);
        assert_eq!(tally.metric("macro"), Some(0.5));
    }

    #[test]
    fn logs_are_reported_as_a_geometric_mean_over_all_batches() {
        let (mut tally, mut more) = (Tally::default(), Tally::default());
        tally.add_logs("perplexity", 2f64.ln(), 1);
        more.add_logs("perplexity", 8f64.ln() + 4f64.ln(), 2);
        tally.merge(&more);
        assert!((tally.metric("perplexity").unwrap() - 4.0).abs() < 1e-12);
    }

    #[test]
    #[should_panic(expected = "the caller predicts every scored position")]
    fn a_missing_prediction_is_refused() {
        Tally::default().add_sequences(&batch(&[&[1, 2]]), &[1]);
    }
}
