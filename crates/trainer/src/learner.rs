//! The model as something that learns: batches as tensors, the loss, and gradients over several devices.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, Transaction};
use linattn::backend::{TrainBackend, one_of_threads};
use linattn::nn::{LanguageModel, LanguageModelState};
use linattn::ops::{self, LinearAttentionBackend};
use linattn_tasks::Batch;
use std::sync::{Condvar, Mutex, PoisonError};

/// A language model that learns.
#[derive(Module, Debug)]
pub struct Learner<B: Backend> {
    /// The model.
    pub model: LanguageModel<B>,
}

/// A batch on a device.
#[derive(Debug, Clone)]
pub struct TensorBatch<B: Backend> {
    /// Ids, `[rows, T]`.
    pub ids: Tensor<B, 2, Int>,
    /// Flat positions that are scored, `[M]`; none where all are, in their order.
    pub scored: Option<Tensor<B, 1, Int>>,
    /// The right ids there, `[M]`.
    pub target: Tensor<B, 1, Int>,
    /// Factor of the mean loss: this batch's share of the step's scored positions.
    pub weight: f64,
}

impl<B: Backend> TensorBatch<B> {
    /// Uploads a task's batch.
    pub fn new(batch: &Batch, weight: f64, device: &B::Device) -> Self {
        let ints = |list: &[u32]| {
            let list: Vec<i32> = list.iter().map(|&x| x as i32).collect();
            let length = list.len();
            Tensor::<B, 1, Int>::from_data(TensorData::new(list, [length]), device)
        };
        let all = batch.scored.iter().map(|&i| i as usize).eq(0..batch.input.len());
        Self {
            ids: ints(&batch.input).reshape([batch.rows, batch.length]),
            scored: (!all).then(|| ints(&batch.scored)),
            target: ints(&batch.target),
            weight,
        }
    }
}

impl<B: LinearAttentionBackend> Learner<B> {
    /// Normalised rows at the scored positions, `[M, D]`: with large vocabularies the last product is
    /// most of the work.
    fn scored_rows(&self, batch: &TensorBatch<B>) -> Tensor<B, 2> {
        let hidden = self.model.hidden_alone(batch.ids.clone());
        self.model.rows_at(hidden, batch.scored.clone())
    }

    /// Answers to a batch.
    pub fn answers(&self, batch: TensorBatch<B>) -> Answers<B> {
        let rows = self.scored_rows(&batch);
        self.evaluate(rows, batch.target)
    }

    /// Answers to a part of longer sequences, and the state after it; nothing where none of the part
    /// is scored.
    pub(crate) fn answer_part(
        &self,
        part: TensorBatch<B>,
        state: Option<LanguageModelState<B>>,
    ) -> (Option<Answers<B>>, LanguageModelState<B>) {
        let (hidden, state) = self.model.hidden(part.ids, state);
        if part.target.dims()[0] == 0 {
            return (None, state);
        }
        let rows = self.model.rows_at(hidden, part.scored);
        (Some(self.evaluate(rows, part.target)), state)
    }

    fn evaluate(&self, rows: Tensor<B, 2>, target: Tensor<B, 1, Int>) -> Answers<B> {
        let predicted = ops::argmax(self.model.logits(rows.clone()));
        Answers { loss: self.loss(rows, target, 1.0), predicted }
    }

    /// `weight` times the mean loss.
    fn loss(&self, rows: Tensor<B, 2>, target: Tensor<B, 1, Int>, weight: f64) -> Tensor<B, 1> {
        let scale = weight / rows.dims()[0] as f64;
        self.model.cross_entropy(rows, target, scale)
    }
}

/// Gradients of a batch and its loss, on their device.
struct Differentiated<B: TrainBackend> {
    gradients: GradientsParams,
    loss: Tensor<B::InnerBackend, 1>,
}

/// Answers to a batch, on the device until they are asked for.
#[derive(Debug)]
pub struct Answers<B: Backend> {
    loss: Tensor<B, 1>,
    predicted: Tensor<B, 1, Int>,
}

/// The same, on the host.
#[derive(Debug, Clone)]
pub struct HostAnswers {
    /// Mean cross-entropy over the scored positions, in nats.
    pub loss: f64,
    /// The most likely id at each.
    pub predicted: Vec<u32>,
}

impl<B: Backend> Answers<B> {
    /// Waits for them.
    pub fn into_host(self) -> HostAnswers {
        let [loss, predicted] = Transaction::default()
            .register(self.loss)
            .register(self.predicted)
            .execute()
            .try_into()
            .expect("two tensors were asked for");
        let loss = loss.iter::<f64>().next().unwrap_or(f64::NAN);
        HostAnswers { loss, predicted: predicted.iter::<i64>().map(|id| id as u32).collect() }
    }
}

impl<B: TrainBackend> Learner<B> {
    /// The mean loss of a batch, as heavy as the batch says.
    fn weighted_loss(&self, batch: TensorBatch<B>) -> Tensor<B, 1> {
        let rows = self.scored_rows(&batch);
        self.loss(rows, batch.target, batch.weight)
    }

    /// Loss and gradients of a batch; `forward` is dropped between the two.
    fn differentiate<T>(&self, batch: TensorBatch<B>, forward: T) -> Differentiated<B> {
        if self.model.recomputes() {
            return self.differentiate_by_layers(batch);
        }
        let loss = self.weighted_loss(batch);
        drop(forward);
        let gradients = GradientsParams::from_grads(loss.backward(), self);
        Differentiated { gradients, loss: loss.inner() }
    }

    /// As [`differentiate`](Self::differentiate), with intermediate results of one layer at a time.
    fn differentiate_by_layers(&self, batch: TensorBatch<B>) -> Differentiated<B> {
        let TensorBatch { ids, scored, target, weight } = batch;
        let mut sum = GradientsAccumulator::new();
        let loss = |hidden| self.loss(self.model.rows_at(hidden, scored), target, weight);
        let loss = self.model.differentiate_by_layers(ids, loss, |gradients| {
            sum.accumulate(self, GradientsParams::from_grads(gradients, self));
        });
        Differentiated { gradients: sum.grads(), loss }
    }
}

/// Where parts of a step wait for each other.
struct Meeting {
    missing: Mutex<usize>,
    all: Condvar,
}

impl Meeting {
    fn of(parts: usize) -> Self {
        Self { missing: Mutex::new(parts), all: Condvar::new() }
    }

    fn arrive(&self) {
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        *missing -= 1;
        if *missing == 0 {
            self.all.notify_all();
        }
    }

    fn wait(&self) {
        let missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        let met = self.all.wait_while(missing, |missing| *missing > 0);
        drop(met.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Arrives when it is dropped, so that neither a device that panics nor one that was never begun keeps others waiting; one
/// that was begun waits for them there.
///
/// No backward pass ends while another thread still builds its graph: at its end Burn 0.21 frees what no tensor
/// holds in any graph, and gradients of a thread that is inside `Tensor::cat` are lost without a word
/// (tracel-ai/burn#5573). linattn's layers hold what they join; a layer from elsewhere may not. Joining the
/// threads parts one round from the next.
struct Meet<'a> {
    meeting: &'a Meeting,
    begun: bool,
}

impl Meet<'_> {
    fn begin(mut self) -> Self {
        self.begun = true;
        self
    }
}

impl Drop for Meet<'_> {
    fn drop(&mut self) {
        self.meeting.arrive();
        if self.begun {
            self.meeting.wait();
        }
    }
}

/// Does pieces of work at the same time, a thread each. Results are in the order of the work.
/// # Panics
/// Where the system gives no more threads, once those that it gave have ended.
pub(crate) fn together<T: Send>(work: Vec<impl FnOnce() -> T + Send>) -> Vec<T> {
    let threads = work.len();
    std::thread::scope(|scope| {
        let start = |work| {
            let thread = std::thread::Builder::new();
            let started = thread.spawn_scoped(scope, move || one_of_threads(threads, work));
            started.unwrap_or_else(|e| {
                panic!("not enough memory, or too many threads, for {threads} parts of a step: {e}")
            })
        };
        let started: Vec<_> = work.into_iter().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        started.into_iter().map(join).collect()
    })
}

/// Gradients and loss of one step, whose parts go round the devices. All end on the first device.
/// Devices work at the same time if they `may_overlap`, which dropout must not: its random numbers
/// are drawn from one stream in the process, and their order would be left to chance. Models that recompute
/// must not either: a device would end a backward pass while another builds a graph.
pub fn gradients<B: TrainBackend>(
    learner: &Learner<B>,
    parts: &[Batch],
    devices: &[B::Device],
    may_overlap: bool,
) -> (GradientsParams, Tensor<B::InnerBackend, 1>) {
    let scored: usize = parts.iter().map(|part| part.scored.len()).sum();
    let run = |device: &B::Device, part: &Batch, others: Option<Meet<'_>>| {
        let forward = others.map(Meet::begin);
        let weight = part.scored.len() as f64 / scored as f64;
        let batch = TensorBatch::new(part, weight, device);
        let own = (devices.len() > 1).then(|| learner.clone().fork(device));
        let learner = own.as_ref().unwrap_or(learner);
        learner.differentiate(batch, forward)
    };
    if let ([part], [device, ..]) = (parts, devices) {
        let Differentiated { gradients, loss } = run(device, part, None);
        return (gradients, loss);
    }
    let mut sum = GradientsAccumulator::new();
    let mut loss: Option<Tensor<B::InnerBackend, 1>> = None;
    for round in parts.chunks(devices.len()) {
        let meeting = Meeting::of(round.len());
        let outputs: Vec<_> = match round {
            round if round.len() == 1 || !may_overlap => {
                devices.iter().zip(round).map(|(device, part)| run(device, part, None)).collect()
            }
            round => {
                let (run, meeting) = (&run, &meeting);
                let work = |(device, part)| {
                    let others = Meet { meeting, begun: false };
                    move || run(device, part, Some(others))
                };
                together(devices.iter().zip(round).map(work).collect())
            }
        };
        for output in outputs {
            sum.accumulate(learner, output.gradients.to_device(&devices[0], learner));
            let part = output.loss.to_device(&devices[0]);
            loss = Some(match loss {
                Some(loss) => loss + part,
                None => part,
            });
        }
    }
    (sum.grads(), loss.expect("a step has at least one part"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Optimizer, Step};
    use burn::backend::{Autodiff, Flex};
    use burn::module::{ModuleVisitor, Param};
    use linattn::nn::{LanguageModelConfig, materialize};

    type B = Autodiff<Flex>;

    #[test]
    fn parts_that_never_begin_keep_no_other_waiting() {
        let meeting = Meeting::of(4);
        let part = || Meet { meeting: &meeting, begun: false };
        let waiting = [part(), part()].map(|part| move || drop(part.begin()));
        let never_begun = [part(), part()].map(|part| move || drop(part.begin()));
        std::thread::scope(|scope| {
            let threads = waiting.map(|work| scope.spawn(work));
            drop(never_begun);
            assert!(threads.map(|thread| thread.join().is_ok()).iter().all(|ended| *ended));
        });
    }

    /// The gradients of one step, over all weights.
    fn numbers(learner: &Learner<B>, gradients: &GradientsParams) -> Vec<f32> {
        struct Numbers<'a>(&'a GradientsParams, Vec<f32>);
        impl ModuleVisitor<B> for Numbers<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let gradient = self.0.get::<Flex, D>(param.id).expect("every weight is learnt");
                self.1.extend(gradient.into_data().iter::<f32>());
            }
        }
        let mut found = Numbers(gradients, vec![]);
        Module::<B>::visit(learner, &mut found);
        found.1
    }

    #[test]
    fn devices_that_share_a_step_find_what_one_finds() {
        let config: LanguageModelConfig = toml::from_str(
            "d_model = 8\ntie_embeddings = false\nlayers = [{ repeat = 4, mixer.retnet = {} }]",
        )
        .expect("a config");
        let learner = Learner::<B> { model: config.init(5, &Default::default()).expect("a model") };
        let part = |n: u32| Batch {
            rows: 1,
            // Of several lengths, so that devices are not done at the same time.
            length: 4 + 8 * n as usize,
            input: (0..4 + 8 * n).map(|i| i * (n + 1) % 5).collect(),
            scored: vec![1, 3],
            target: vec![n, 2],
        };
        let parts: Vec<Batch> = (0..4).map(part).collect();
        let device = burn::backend::flex::FlexDevice;
        let of = |devices: usize| {
            let (found, _) = gradients(&learner, &parts, &vec![device; devices], true);
            numbers(&learner, &found)
        };
        let want = of(1);
        for turn in 0..20 {
            let far = want.iter().zip(of(4)).map(|(w, g)| (w - g).abs()).fold(0.0, f32::max);
            assert!(far < 1e-5, "turn {turn}: {far}");
        }
    }

    /// All weights after 40 steps, each of so many parts.
    fn trained(learner: Learner<B>, parts: usize) -> Vec<f32> {
        let adamw = toml::from_str("learning_rate = 1e-2").expect("a config");
        let mut optimizer = Optimizer::<B>::new(&adamw);
        let mut learner = learner;
        for step in 0..40 {
            let part = |n: u32| Batch {
                rows: 2,
                length: 6,
                input: (0..12).map(|i| (i * 3 + n + step) % 5).collect(),
                scored: vec![1, 3, 8],
                target: vec![n % 5, step % 5, 2],
            };
            let parts: Vec<Batch> = (0..parts as u32).map(part).collect();
            let step = Step {
                parts: &parts,
                devices: &[burn::backend::flex::FlexDevice],
                may_overlap: true,
                learning_rate: 1e-2,
                clip: Some(1.0),
            };
            learner = step.take(&learner, &mut optimizer).0;
        }
        struct Numbers(Vec<f32>);
        impl ModuleVisitor<B> for Numbers {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                self.0.extend(param.val().into_data().iter::<f32>());
            }
        }
        let mut found = Numbers(vec![]);
        Module::<B>::visit(&learner, &mut found);
        found.0
    }

    /// As runs that are threads of one sweep.
    #[test]
    fn runs_side_by_side_find_what_each_finds_alone() {
        let config: LanguageModelConfig = toml::from_str(
            "d_model = 8\nlayers = [{ repeat = 2, mixer.gated_deltanet = { heads = 2 }, mlp = { swiglu = {} } }]",
        )
        .expect("a config");
        for parts in [1, 2] {
            let model = config.init(5, &Default::default()).expect("a model");
            // Copies of weights that are not drawn yet draw numbers of their own.
            materialize(&model);
            let learner = Learner::<B> { model };
            let alone = trained(learner.clone(), parts);
            for turn in 0..5 {
                let together: Vec<Vec<f32>> = std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..8)
                        .map(|_| (learner.clone(), parts))
                        .map(|(learner, parts)| {
                            // A run has leaves of its own.
                            let learner = learner.fork(&Default::default());
                            scope.spawn(move || trained(learner, parts))
                        })
                        .collect();
                    threads.into_iter().map(|thread| thread.join().expect("a run")).collect()
                });
                for run in together {
                    assert!(run == alone, "turn {turn}, {parts} parts: other weights than alone");
                }
            }
        }
    }
}
