//! One training step: gradients, global gradient norm, clipping and AdamW.

use crate::learner::{Learner, gradients};
use crate::optimizer::Optimizer;
use burn::tensor::{Tensor, backend::AutodiffBackend, backend::Backend};
use linattn::backend::TrainBackend;
use linattn_tasks::Batch;

/// Batch, devices and rates of one step.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a, B: TrainBackend> {
    /// The batch, in parts that go round the devices.
    pub parts: &'a [Batch],
    /// Devices; weights and optimizer are on the first.
    pub devices: &'a [B::Device],
    /// Devices may work at the same time; dropout must not.
    pub may_overlap: bool,
    /// Of this step.
    pub learning_rate: f64,
    /// Largest global gradient norm.
    pub clip: Option<f64>,
}

/// Loss and global gradient norm of a step, on the device until they are asked for.
#[derive(Debug)]
pub struct StepNumbers<B: Backend> {
    /// Mean cross-entropy over the scored positions, in nats.
    pub loss: Tensor<B, 1>,
    /// Before clipping.
    pub norm: Tensor<B, 1>,
}

type Stepped<B> = (Learner<B>, StepNumbers<<B as AutodiffBackend>::InnerBackend>);

impl<B: TrainBackend> Step<'_, B> {
    /// The learner after the step. Nothing is read back.
    ///
    /// Steps whose batch has the shape of the first one take their memory from a pool of buffers by size,
    /// which costs the host less than cutting pages: shapes that change all the time would fill it.
    /// # Panics
    /// If nothing is scored.
    pub fn take(&self, learner: &Learner<B>, optimizer: &mut Optimizer<B>) -> Stepped<B> {
        let usual = optimizer.is_usual(&self.shapes());
        match (usual, self.devices) {
            (true, [device]) => {
                let run = |optimizer: &mut Optimizer<B>| self.run(learner, optimizer);
                B::memory_persistent_allocations(device, optimizer, run)
            }
            _ => self.run(learner, optimizer),
        }
    }

    /// Rows, length and scored positions of each part.
    fn shapes(&self) -> Vec<[usize; 3]> {
        self.parts.iter().map(|part| [part.rows, part.length, part.scored.len()]).collect()
    }

    fn run(&self, learner: &Learner<B>, optimizer: &mut Optimizer<B>) -> Stepped<B> {
        let (found, loss) = gradients(learner, self.parts, self.devices, self.may_overlap);
        let (learner, norm) = optimizer.step(self.learning_rate, learner.clone(), found, self.clip);
        (learner, StepNumbers { loss, norm })
    }
}
