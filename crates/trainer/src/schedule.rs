//! Batches and learning rates by step: pure functions of the config, so that a resumed run needs no memory.

use crate::config::{Order, Per, RunConfig, ScheduleConfig, Shape};
use linattn_tasks::{SetInfo, Split, Task};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// The examples of one step: indices into one training set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchIndices {
    /// The training set.
    pub set: usize,
    /// Its examples.
    pub indices: Vec<u64>,
}

/// Which examples come at which step, and how many steps there are.
#[derive(Debug)]
pub struct Plan {
    seed: u64,
    order: Order,
    batch_size: u64,
    sets: Vec<SetInfo>,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Orders drawn for one epoch, kept while it lasts.
    drawn: Option<Drawn>,
}

#[derive(Debug)]
struct Drawn {
    epoch: u64,
    batches: Vec<u64>,
    examples: Vec<Vec<u64>>,
}

impl Plan {
    /// The plan of `run` over the training sets of `task`.
    pub fn new(run: &RunConfig, task: &dyn Task) -> Self {
        let batch_size = run.train.batch_size as u64;
        let sets = task.sets(Split::Train).to_vec();
        let steps_per_epoch = sets.iter().map(|set| set.examples.div_ceil(batch_size)).sum();
        let by_epochs = run.train.epochs.map(|epochs| epochs.saturating_mul(steps_per_epoch));
        Self {
            seed: run.seed,
            order: run.train.order,
            batch_size,
            sets,
            steps_per_epoch,
            total_steps: run.train.steps.or(by_epochs).unwrap_or(0),
            drawn: None,
        }
    }

    /// The epoch of a step, from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch
    }

    /// The examples of a step, from 0.
    pub fn batch_indices(&mut self, step: u64) -> BatchIndices {
        let (epoch, place) = (self.epoch(step), step % self.steps_per_epoch);
        if self.order != Order::Shuffled {
            return self.in_order(place, epoch);
        }
        if self.drawn.as_ref().is_none_or(|drawn| drawn.epoch != epoch) {
            self.drawn = Some(self.draw(epoch));
        }
        let Some(drawn) = &self.drawn else { unreachable!("drawn above") };
        let mut batch = self.in_order(drawn.batches[place as usize], 0);
        for index in &mut batch.indices {
            *index = drawn.examples[batch.set][*index as usize];
        }
        batch
    }

    /// The batch at `place`, set after set.
    fn in_order(&self, mut place: u64, epoch: u64) -> BatchIndices {
        for (set, info) in self.sets.iter().enumerate() {
            let batches = info.examples.div_ceil(self.batch_size);
            if place < batches {
                let from = place * self.batch_size;
                let to = (from + self.batch_size).min(info.examples);
                let offset = match self.order {
                    Order::Fresh => epoch * info.examples,
                    Order::Fixed | Order::Shuffled => 0,
                };
                return BatchIndices { set, indices: (offset + from..offset + to).collect() };
            }
            place -= batches;
        }
        unreachable!("a step's place is below the steps of an epoch")
    }

    fn draw(&self, epoch: u64) -> Drawn {
        let shuffled = |count: u64, purpose: u64| {
            let mut list: Vec<u64> = (0..count).collect();
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed ^ 0x006f_7264_6572);
            rng.set_stream(epoch.wrapping_mul(1 << 20).wrapping_add(purpose));
            list.shuffle(&mut rng);
            list
        };
        let examples = (1u64..).zip(&self.sets).map(|(i, set)| shuffled(set.examples, i)).collect();
        Drawn { epoch, batches: shuffled(self.steps_per_epoch, 0), examples }
    }
}

/// The learning rate of a step, as a share of the highest.
pub fn learning_rate(schedule: &ScheduleConfig, plan: &Plan, step: u64) -> f64 {
    let warmup = schedule.warmup_steps;
    if step < warmup {
        return (step + 1) as f64 / warmup as f64;
    }
    let after = plan.total_steps.saturating_sub(warmup).max(1);
    let done = match schedule.per {
        Per::Step => (step - warmup) as f64 / after as f64,
        Per::Epoch => {
            let epochs = plan.total_steps.div_ceil(plan.steps_per_epoch);
            plan.epoch(step) as f64 / epochs as f64
        }
    };
    let share = match schedule.shape {
        Shape::Constant => 1.0,
        Shape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()),
        Shape::Linear => 1.0 - done.min(1.0),
    };
    schedule.floor + (1.0 - schedule.floor) * share
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn plan(order: &str, steps: &str) -> (RunConfig, Plan) {
        let text = format!(
            "[task.mqar]\nvocab = 64\n\
             train = [{{ length = 16, pairs = 2, examples = 20 }}, {{ length = 32, pairs = 2, examples = 9 }}]\n\
             test = [{{ length = 16, pairs = 2, examples = 2 }}]\n\
             [model]\nd_model = 8\n[[model.layers]]\nmixer.deltanet = {{}}\n\
             [train]\nbatch_size = 4\norder = '{order}'\n{steps}\n"
        );
        let run: RunConfig = toml::from_str(&text).unwrap();
        let task = run.task.build(run.seed).unwrap();
        let plan = Plan::new(&run, task.as_ref());
        (run, plan)
    }

    fn epoch(plan: &mut Plan, epoch: u64) -> Vec<(usize, u64)> {
        let from = epoch * plan.steps_per_epoch;
        (from..from + plan.steps_per_epoch)
            .map(|step| plan.batch_indices(step))
            .flat_map(|batch| batch.indices.into_iter().map(move |index| (batch.set, index)))
            .collect()
    }

    #[test]
    fn every_example_comes_once_an_epoch_in_every_order() {
        for order in ["fixed", "shuffled", "fresh"] {
            let (_, mut plan) = plan(order, "epochs = 3");
            assert_eq!((plan.steps_per_epoch, plan.total_steps), (8, 24), "5 batches and 3");
            for e in 0..3 {
                let offset = |set: usize| if order == "fresh" { e * [20, 9][set] } else { 0 };
                let got: BTreeSet<_> = epoch(&mut plan, e)
                    .into_iter()
                    .map(|(set, index)| (set, index - offset(set)))
                    .collect();
                assert_eq!(got.len(), 29, "{order}, epoch {e}");
                assert!(got.iter().all(|&(set, index)| index < [20, 9][set]), "{order}");
            }
        }
    }

    #[test]
    fn shuffling_differs_between_epochs_and_repeats_from_any_step() {
        let (_, mut a) = plan("shuffled", "epochs = 3");
        let (first, second) = (epoch(&mut a, 0), epoch(&mut a, 1));
        assert_ne!(first, second);
        let (_, mut b) = plan("shuffled", "epochs = 3");
        assert_eq!(b.batch_indices(11), a.batch_indices(11), "without those before");
        assert_eq!(epoch(&mut b, 0), first);
    }

    #[test]
    fn fixed_order_is_set_after_set() {
        let (_, mut plan) = plan("fixed", "steps = 5");
        assert_eq!(plan.total_steps, 5);
        let order: Vec<_> = (0..20).map(|i| (0, i)).chain((0..9).map(|i| (1, i))).collect();
        assert_eq!(epoch(&mut plan, 0), order);
        assert_eq!(epoch(&mut plan, 7), order);
    }

    #[test]
    fn the_rate_warms_up_falls_and_ends_at_its_floor() {
        let (_, plan) = plan("fixed", "steps = 100");
        for shape in [Shape::Cosine, Shape::Linear, Shape::Constant] {
            let schedule = ScheduleConfig { shape, warmup_steps: 10, floor: 0.1, per: Per::Step };
            let rate = |step| learning_rate(&schedule, &plan, step);
            assert!((rate(0) - 0.1).abs() < 1e-12 && (rate(9) - 1.0).abs() < 1e-12, "{shape:?}");
            assert!((rate(10) - 1.0).abs() < 1e-12, "{shape:?}");
            let end = if shape == Shape::Constant { 1.0 } else { 0.1 };
            assert!((rate(100) - end).abs() < 1e-12, "{shape:?}: {}", rate(100));
            assert!((10..99).all(|step| rate(step + 1) <= rate(step)), "{shape:?}");
        }
    }

    #[test]
    fn a_rate_per_epoch_is_the_same_throughout_one() {
        let (_, plan) = plan("fixed", "epochs = 4");
        let schedule = ScheduleConfig { per: Per::Epoch, ..Default::default() };
        let rates: Vec<f64> = (0..32).map(|step| learning_rate(&schedule, &plan, step)).collect();
        for (epoch, rates) in rates.chunks(8).enumerate() {
            let want = 0.5 * (1.0 + (std::f64::consts::PI * epoch as f64 / 4.0).cos());
            assert!(rates.iter().all(|rate| (rate - want).abs() < 1e-12), "epoch {epoch}");
        }
    }
}
