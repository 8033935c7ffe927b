//! The scores of MAD.
//! ```text
//! recall of an id = right / asked, over 128 rows; 0 for an id that was answered and never asked
//! macro           = mean recall over the ids that were asked or answered in those rows
//! accuracy        = mean macro over the rows' groups, each weighted by its rows
//! ```
//! So one wrong answer costs more if nobody else gives that answer or is asked for it. This is what
//! torchmetrics' `MulticlassAccuracy` gives by default for batches of 128, averaged as Lightning
//! does; the weights matter only where the last group of a set is short.

use crate::{Batch, Tally};

#[cfg(test)]
mod tests;

/// Rows that are averaged together: the published batch.
pub(super) const ROWS: usize = 128;

/// Adds `accuracy`, `micro_accuracy` (the share of scored positions that are right) and `exact`
/// (the share of sequences with every scored position right). Groups start at the first row.
/// # Panics
/// If there is not one prediction for each scored position.
pub(super) fn add(batch: &Batch, predicted: &[u32], tally: &mut Tally) {
    assert_eq!(predicted.len(), batch.scored.len(), "the caller predicts every scored position");
    add_macro(batch, predicted, tally);
    for row in batch.scored_rows() {
        let scored = row.len();
        let right = row.filter(|&i| predicted[i] == batch.target[i]).count();
        tally.add("micro_accuracy", right as f64, scored as u64);
        tally.add("exact", f64::from(right == scored), 1);
    }
}

fn add_macro(batch: &Batch, predicted: &[u32], tally: &mut Tally) {
    let group = |position: &u32| *position as usize / batch.length / ROWS;
    let mut start = 0;
    for positions in batch.scored.chunk_by(|a, b| group(a) == group(b)) {
        let end = start + positions.len();
        let rows = ROWS.min(batch.rows - group(&positions[0]) * ROWS);
        let average = macro_average(&batch.target[start..end], &predicted[start..end]);
        tally.add("accuracy", average * rows as f64, rows as u64);
        start = end;
    }
}

/// How often an id was asked for, and with what success.
#[derive(Clone, Default)]
struct Answers {
    asked: u32,
    right: u32,
    /// Whether it was given as an answer at all.
    given: bool,
}

impl Answers {
    fn recall(&self) -> f64 {
        f64::from(self.right) / f64::from(self.asked.max(1))
    }
}

fn macro_average(target: &[u32], predicted: &[u32]) -> f64 {
    let ids = target.iter().chain(predicted).max().map_or(0, |&id| id as usize + 1);
    let mut answers = vec![Answers::default(); ids];
    for (&target, &predicted) in target.iter().zip(predicted) {
        answers[predicted as usize].given = true;
        let asked = &mut answers[target as usize];
        asked.asked += 1;
        asked.right += u32::from(target == predicted);
    }
    let present = answers.iter().filter(|answers| answers.given || answers.asked > 0);
    let (sum, count) = present.fold((0.0, 0), |(sum, count), id| (sum + id.recall(), count + 1));
    sum / f64::from(count)
}
