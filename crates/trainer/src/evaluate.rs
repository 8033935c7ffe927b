//! Testing a model on a task's sets: by its answers at the scored positions, or by what it writes.

use crate::config::RunConfig;
use crate::dashboard::Interrupter;
use crate::learner::{Answers, HostAnswers, Learner, TensorBatch, together};
use linattn::generate::{GenerateConfig, GenerateError, Next, SamplingConfig, Sequence, generate};
use linattn::nn::LanguageModel;
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::{Batch, Question, Split, Tally, Task};
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

    fn insert(&mut self, prefix: &str, count: &Count) {
        for (name, value) in count.tally.metrics() {
            self.metrics.insert(format!("{prefix}/{name}"), value.into());
        }
        if count.scored > 0 {
            let loss = count.nats / count.scored as f64;
            self.metrics.insert(format!("{prefix}/loss"), loss.into());
        }
    }
}

/// Counts over a set, or over several.
#[derive(Debug, Default)]
struct Count {
    tally: Tally,
    /// Cross-entropy, summed.
    nats: f64,
    scored: u64,
}

impl Count {
    fn merge(&mut self, other: &Self) {
        self.tally.merge(&other.tally);
        self.nats += other.nats;
        self.scored += other.scored;
    }
}

pub(crate) fn split_name(split: Split) -> &'static str {
    match split {
        Split::Train => "train",
        Split::Validation => "validation",
        Split::Test => "test",
    }
}

/// Sets to test, and in which portions.
#[derive(Debug, Clone)]
pub struct Testing<'a> {
    /// The task.
    pub task: &'a dyn Task,
    /// The splits to go through.
    pub splits: Vec<Split>,
    /// Sequences a batch.
    pub batch_size: usize,
    /// Tokens a part; longer sequences are worked off in parts.
    pub window: usize,
    /// The most examples of a set, from its first; `None` for all.
    pub limit: Option<u64>,
    /// Batches that are tested at the same time, a thread each. It changes no bit.
    pub at_once: usize,
}

impl<'a> Testing<'a> {
    /// As the run's config has it.
    pub fn new(run: &RunConfig, task: &'a dyn Task, splits: &[Split]) -> Self {
        Self {
            task,
            splits: splits.to_vec(),
            batch_size: run.evaluate.batch_size.unwrap_or(run.train.batch_size),
            window: run.evaluate.window,
            limit: None,
            at_once: 1,
        }
    }

    /// As many batches at a time as one device is named: the processor's cores share the work so. Of several
    /// devices only the first tests.
    pub fn on<D: PartialEq>(self, devices: &[D]) -> Self {
        let one = devices.iter().all(|device| *device == devices[0]);
        Self { at_once: if one { devices.len().max(1) } else { 1 }, ..self }
    }

    /// Tests a model by its answers at every scored position, given the right tokens before it.
    pub fn evaluate<B: LinearAttentionBackend>(
        &self,
        learner: &Learner<B>,
        device: &B::Device,
    ) -> Evaluation {
        let never = Interrupter::new();
        self.evaluate_until(&never, learner, device).expect("nobody stops it")
    }

    /// As [`evaluate`](Self::evaluate); nothing if someone asks to stop before the end.
    pub(crate) fn evaluate_until<B: LinearAttentionBackend>(
        &self,
        stop: &Interrupter,
        learner: &Learner<B>,
        device: &B::Device,
    ) -> Option<Evaluation> {
        let rows = self.batch_size.next_multiple_of(self.task.rows_of_a_score());
        self.each_set(rows.saturating_mul(self.at_once), stop, |split, set, indices, count| {
            let batch = |indices| self.task.batch(split, set, indices);
            let mut batches: Vec<Batch> = indices.chunks(rows).map(batch).collect();
            batches.retain(|batch| !batch.scored.is_empty()); // a mean over nothing
            let answers = self.all_answers(learner, &batches, device);
            for (batch, answers) in batches.iter().zip(answers) {
                let scored = batch.scored.len() as u64;
                let nats = answers.loss * scored as f64;
                self.task.tally(batch, &answers.predicted, &mut count.tally);
                self.task.tally_loss(split, set, nats, scored, &mut count.tally);
                count.nats += nats;
                count.scored += scored;
            }
        })
    }

    /// Tests a model by what it writes after every prompt, always its likeliest token.
    ///
    /// Sets whose examples are no questions have no metrics.
    pub fn evaluate_writing<B: LinearAttentionBackend>(
        &self,
        learner: &Learner<B>,
        device: &B::Device,
    ) -> Evaluation {
        let each = |split, set, indices: &[u64], count: &mut Count| {
            let question = |&index: &u64| Some((index, self.task.question(split, set, index)?));
            let mut questions: Vec<(u64, Question)> = indices.iter().filter_map(question).collect();
            questions.sort_by_key(|(_, question)| question.new_tokens);
            for group in questions.chunk_by(|a, b| a.1.new_tokens == b.1.new_tokens) {
                let prompts: Vec<&[u32]> = group.iter().map(|(_, q)| q.prompt.as_slice()).collect();
                let new_tokens = group[0].1.new_tokens;
                let answers = write(&learner.model, &prompts, new_tokens, self.window, device);
                for ((index, _), answer) in group.iter().zip(&answers) {
                    self.task.tally_answer(split, set, *index, answer, &mut count.tally);
                }
            }
        };
        let never = Interrupter::new();
        self.each_set(self.batch_size, &never, each).expect("nobody stops it")
    }

    /// Goes through the sets, `rows` examples at a time; nothing if someone asks to stop before the
    /// end.
    fn each_set(
        &self,
        rows: usize,
        stop: &Interrupter,
        mut test: impl FnMut(Split, usize, &[u64], &mut Count),
    ) -> Option<Evaluation> {
        let mut evaluation = Evaluation::default();
        for &split in &self.splits {
            let mut all = Count::default();
            for (set, info) in self.task.sets(split).iter().enumerate() {
                let mut count = Count::default();
                let examples = info.examples.min(self.limit.unwrap_or(u64::MAX));
                for from in (0..examples).step_by(rows) {
                    if stop.should_stop() {
                        return None;
                    }
                    let to = examples.min(from.saturating_add(rows as u64));
                    test(split, set, &(from..to).collect::<Vec<_>>(), &mut count);
                }
                evaluation.insert(&format!("{}/{}", split_name(split), info.name), &count);
                all.merge(&count);
            }
            evaluation.insert(split_name(split), &all);
        }
        Some(evaluation)
    }

    /// The answers to each of some batches, at the same time.
    fn all_answers<B: LinearAttentionBackend>(
        &self,
        learner: &Learner<B>,
        batches: &[Batch],
        device: &B::Device,
    ) -> Vec<HostAnswers> {
        match batches {
            [batch] => vec![self.answers(learner, batch, device)],
            batches => {
                let work = |batch| move || self.answers(learner, batch, device);
                together(batches.iter().map(work).collect())
            }
        }
    }

    fn answers<B: LinearAttentionBackend>(
        &self,
        learner: &Learner<B>,
        batch: &Batch,
        device: &B::Device,
    ) -> HostAnswers {
        if batch.length <= self.window || learner.model.needs_whole_sequences() {
            return learner.answers(TensorBatch::new(batch, 1.0, device)).into_host();
        }
        let (mut state, mut nats) = (None, 0.0);
        let mut predicted = vec![0; batch.scored.len()];
        for from in (0..batch.length).step_by(self.window) {
            let (part, places) = cut(batch, from, (from + self.window).min(batch.length));
            let tensors = TensorBatch::new(&part, 1.0, device);
            let (answers, next) = learner.answer_part(tensors, state);
            state = Some(next);
            if let Some(answers) = answers.map(Answers::into_host) {
                nats += answers.loss * places.len() as f64;
                places.iter().zip(answers.predicted).for_each(|(&i, id)| predicted[i] = id);
            }
        }
        HostAnswers { loss: nats / predicted.len().max(1) as f64, predicted }
    }
}

/// Tokens `from..to` of every row, and where their scored positions stand in the whole batch's list.
fn cut(batch: &Batch, from: usize, to: usize) -> (Batch, Vec<usize>) {
    let rows = batch.input.chunks_exact(batch.length);
    let input = rows.flat_map(|row| row[from..to].iter().copied()).collect();
    let (mut scored, mut target, mut places) = (vec![], vec![], vec![]);
    for (i, (&position, &answer)) in batch.scored.iter().zip(&batch.target).enumerate() {
        let (row, t) = (position as usize / batch.length, position as usize % batch.length);
        if (from..to).contains(&t) {
            scored.push((row * (to - from) + t - from) as u32);
            target.push(answer);
            places.push(i);
        }
    }
    (Batch { rows: batch.rows, length: to - from, input, scored, target }, places)
}

/// `new_tokens` ids after each of some prompts, always the likeliest next one; nothing where the
/// model's numbers have overflowed. The prompts are read `window` tokens at a time.
/// # Panics
/// If a prompt is empty or has ids that the model does not know, or the model is an auto-encoder.
fn write<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    prompts: &[&[u32]],
    new_tokens: usize,
    window: usize,
    device: &B::Device,
) -> Vec<Vec<u32>> {
    let sampling = SamplingConfig::greedy();
    let config = GenerateConfig { sampling, new_tokens, window, keep_states: false };
    let sequences = prompts.iter().map(|prompt| Sequence::new(prompt.to_vec())).collect();
    match generate(model, sequences, &config, device, |_| Next::Continue) {
        Ok(generated) => generated.rows.iter().map(|row| row.new_tokens().to_vec()).collect(),
        Err(GenerateError::NotFinite { .. }) => vec![vec![]; prompts.len()],
        Err(e) => panic!("the task's questions are for this model: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_batch_have_every_scored_position_once_and_in_its_place() {
        let batch = Batch {
            rows: 2,
            length: 5,
            input: (0..10).collect(),
            scored: vec![0, 3, 4, 6, 9],
            target: vec![10, 13, 14, 16, 19],
        };
        let (first, places) = cut(&batch, 0, 2);
        assert_eq!((first.input, first.scored), (vec![0, 1, 5, 6], vec![0, 3]));
        assert_eq!((first.target, places), (vec![10, 16], vec![0, 3]));
        let (rest, places) = cut(&batch, 2, 5);
        assert_eq!((rest.input, rest.scored), (vec![2, 3, 4, 7, 8, 9], vec![1, 2, 5]));
        assert_eq!((rest.target, places), (vec![13, 14, 19], vec![1, 2, 4]));
    }
}
