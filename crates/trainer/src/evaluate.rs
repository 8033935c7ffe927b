//! Testing a model on a task's validation and test sets.

use crate::learner::{Learner, TensorBatch};
use burn_train::{InferenceStep, ItemLazy};
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::{Split, Tally, Task};
use serde_json::{Map, Value};

/// Counts of one evaluation.
#[derive(Debug, Default)]
pub struct Evaluation {
    /// `split/metric` over all sets of a split and `split/set/metric` for each, with the mean loss.
    pub metrics: Map<String, Value>,
}

impl Evaluation {
    /// The headline metric over all sets of a split; NaN if it has none.
    pub fn score(&self, split: Split, task: &dyn Task) -> f64 {
        let key = format!("{}/{}", split_name(split), task.score_name());
        self.metrics.get(&key).and_then(Value::as_f64).unwrap_or(f64::NAN)
    }

    fn insert(&mut self, prefix: &str, tally: &Tally, loss: f64, scored: u64) {
        for (name, value) in tally.metrics() {
            self.metrics.insert(format!("{prefix}/{name}"), value.into());
        }
        self.metrics.insert(format!("{prefix}/loss"), (loss / scored.max(1) as f64).into());
    }
}

fn split_name(split: Split) -> &'static str {
    match split {
        Split::Train => "train",
        Split::Validation => "validation",
        Split::Test => "test",
    }
}

/// Tests a model on every validation and test set.
pub fn evaluate<B: LinearAttentionBackend>(
    learner: &Learner<B>,
    task: &dyn Task,
    batch_size: usize,
    device: &B::Device,
) -> Evaluation {
    let mut evaluation = Evaluation::default();
    for split in [Split::Validation, Split::Test] {
        let (mut all, mut all_loss, mut all_scored) = (Tally::default(), 0.0, 0);
        for (set, info) in task.sets(split).iter().enumerate() {
            let (mut tally, mut loss, mut scored) = (Tally::default(), 0.0, 0u64);
            let indices: Vec<u64> = (0..info.examples).collect();
            for indices in indices.chunks(batch_size) {
                let batch = task.batch(split, set, indices);
                let answers =
                    InferenceStep::step(learner, TensorBatch::new(&batch, 1.0, device)).sync();
                task.tally(&batch, &answers.predicted, &mut tally);
                loss += answers.loss * batch.scored.len() as f64;
                scored += batch.scored.len() as u64;
            }
            let prefix = format!("{}/{}", split_name(split), info.name);
            evaluation.insert(&prefix, &tally, loss, scored);
            all.merge(&tally);
            all_loss += loss;
            all_scored += scored;
        }
        if !task.sets(split).is_empty() {
            evaluation.insert(split_name(split), &all, all_loss, all_scored);
        }
    }
    evaluation
}
