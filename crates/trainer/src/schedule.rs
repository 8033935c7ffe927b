//! What happens at which step: pure functions of the config, so that a resumed run needs no memory.

use crate::config::{Order, Per, RunConfig, ScheduleConfig, Shape};
use linattn_tasks::{SetInfo, Split, Task};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// The examples of one step: indices into one training set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pick {
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
    pub fn pick(&mut self, step: u64) -> Pick {
        let (epoch, place) = (self.epoch(step), step % self.steps_per_epoch);
        if self.order != Order::Shuffled {
            return self.in_order(place, epoch);
        }
        if self.drawn.as_ref().is_none_or(|drawn| drawn.epoch != epoch) {
            self.drawn = Some(self.draw(epoch));
        }
        let Some(drawn) = &self.drawn else { unreachable!("drawn above") };
        let mut pick = self.in_order(drawn.batches[place as usize], 0);
        for index in &mut pick.indices {
            *index = drawn.examples[pick.set][*index as usize];
        }
        pick
    }

    /// The batch at `place`, set after set.
    fn in_order(&self, mut place: u64, epoch: u64) -> Pick {
        for (set, info) in self.sets.iter().enumerate() {
            let batches = info.examples.div_ceil(self.batch_size);
            if place < batches {
                let from = place * self.batch_size;
                let to = (from + self.batch_size).min(info.examples);
                let offset = match self.order {
                    Order::Fresh => epoch * info.examples,
                    Order::Fixed | Order::Shuffled => 0,
                };
                return Pick { set, indices: (offset + from..offset + to).collect() };
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
        let examples =
            (1u64..).zip(&self.sets).map(|(i, set)| shuffled(set.examples, i)).collect();
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
