//! The model as something that learns: batches as tensors, the loss, gradients over several devices,
//! and the optimizer.

use crate::config::{AdamWConfig, Decay};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Int, Tensor, TensorData, Transaction};
use burn_train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};
use linattn::nn::{LanguageModel, LanguageModelState};
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::Batch;
use std::collections::HashSet;
use std::sync::Barrier;

/// The one bound that training code carries.
pub trait TrainBackend:
    AutodiffBackend<InnerBackend: LinearAttentionBackend> + LinearAttentionBackend
{
}

impl<B> TrainBackend for B where
    B: AutodiffBackend<InnerBackend: LinearAttentionBackend> + LinearAttentionBackend
{
}

/// A language model with Burn's train and inference steps: it works in a `burn_train::Learner` too.
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
    /// Flat positions that are scored, `[M]`.
    pub scored: Tensor<B, 1, Int>,
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
        Self {
            ids: ints(&batch.input).reshape([batch.rows, batch.length]),
            scored: ints(&batch.scored),
            target: ints(&batch.target),
            weight,
        }
    }
}

impl<B: LinearAttentionBackend> Learner<B> {
    /// Logits at the scored positions alone, `[M, vocab]`: with large vocabularies the last product
    /// is most of the work.
    fn answers(&self, batch: &TensorBatch<B>) -> Tensor<B, 2> {
        let (hidden, _) = self.model.hidden(batch.ids.clone(), None);
        let [rows, tokens, width] = hidden.dims();
        self.model.logits(hidden.reshape([rows * tokens, width]).select(0, batch.scored.clone()))
    }

    /// Answers to a part of longer sequences, and the state after it; nothing where none of the part
    /// is scored.
    pub(crate) fn answer_part(
        &self,
        part: TensorBatch<B>,
        state: Option<LanguageModelState<B>>,
    ) -> (Option<Answers<B>>, LanguageModelState<B>) {
        let (hidden, state) = self.model.hidden(part.ids, state);
        if part.scored.dims()[0] == 0 {
            return (None, state);
        }
        let [rows, tokens, width] = hidden.dims();
        let chosen = hidden.reshape([rows * tokens, width]).select(0, part.scored);
        (Some(self.judge(self.model.logits(chosen), part.target)), state)
    }

    fn judge(&self, logits: Tensor<B, 2>, target: Tensor<B, 1, Int>) -> Answers<B> {
        let count = logits.dims()[0];
        let predicted = logits.clone().argmax(1).reshape([count]);
        Answers { loss: self.loss(logits, target), predicted }
    }

    fn loss(&self, logits: Tensor<B, 2>, target: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, target)
    }
}

/// What a training step leaves: the loss, on the device until it is asked for.
#[derive(Debug)]
pub struct TrainLoss<B: Backend>(pub Tensor<B, 1>);

impl<B: Backend> ItemLazy for TrainLoss<B> {
    type ItemSync = f64;

    fn sync(self) -> f64 {
        self.0.into_scalar().elem()
    }
}

/// What an inference step leaves.
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

impl<B: Backend> ItemLazy for Answers<B> {
    type ItemSync = HostAnswers;

    fn sync(self) -> HostAnswers {
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
    fn weighed_loss(&self, batch: TensorBatch<B>) -> Tensor<B, 1> {
        let logits = self.answers(&batch);
        self.loss(logits, batch.target) * batch.weight
    }

    fn differentiate(&self, loss: Tensor<B, 1>) -> TrainOutput<TrainLoss<B::InnerBackend>> {
        TrainOutput::new(self, loss.backward(), TrainLoss(loss.inner()))
    }
}

impl<B: TrainBackend> TrainStep for Learner<B> {
    type Input = TensorBatch<B>;
    type Output = TrainLoss<B::InnerBackend>;

    fn step(&self, batch: TensorBatch<B>) -> TrainOutput<Self::Output> {
        self.differentiate(self.weighed_loss(batch))
    }
}

impl<B: LinearAttentionBackend> InferenceStep for Learner<B> {
    type Input = TensorBatch<B>;
    type Output = Answers<B>;

    fn step(&self, batch: TensorBatch<B>) -> Answers<B> {
        let logits = self.answers(&batch);
        self.judge(logits, batch.target)
    }
}

/// Waits for the other devices when it is dropped, so that a device that panics keeps none waiting.
///
/// No backward pass may end while another thread still builds its graph: at its end Burn 0.21 frees what
/// no tensor holds in any graph, including steps of a thread that is between two operations, and their
/// gradients are lost without a word (tracel-ai/burn#5573). Joining the threads parts one round from the
/// next.
struct Meet<'a>(&'a Barrier);

impl Drop for Meet<'_> {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// Gradients and loss of one step, whose parts go round the devices. All end on the first device.
/// Devices work at the same time if they `may_overlap`, which dropout must not: its random numbers
/// are drawn from one stream in the process, and their order would be left to chance.
pub fn gradients<B: TrainBackend>(
    learner: &Learner<B>,
    parts: &[Batch],
    devices: &[B::Device],
    may_overlap: bool,
) -> (GradientsParams, Tensor<B::InnerBackend, 1>) {
    let scored: usize = parts.iter().map(|part| part.scored.len()).sum();
    let run = |device: &B::Device, part: &Batch, others: Option<&Barrier>| {
        let forward = others.map(Meet);
        let weight = part.scored.len() as f64 / scored as f64;
        let batch = TensorBatch::new(part, weight, device);
        let own = (devices.len() > 1).then(|| learner.clone().fork(device));
        let learner = own.as_ref().unwrap_or(learner);
        let loss = learner.weighed_loss(batch);
        drop(forward);
        learner.differentiate(loss)
    };
    let mut sum = GradientsAccumulator::new();
    let mut loss: Option<Tensor<B::InnerBackend, 1>> = None;
    for round in parts.chunks(devices.len()) {
        let others = Barrier::new(round.len());
        let outputs: Vec<_> = match round {
            round if round.len() == 1 || !may_overlap => {
                devices.iter().zip(round).map(|(device, part)| run(device, part, None)).collect()
            }
            round => std::thread::scope(|scope| {
                let (run, others) = (&run, &others);
                let threads: Vec<_> = devices
                    .iter()
                    .zip(round)
                    .map(|(device, part)| scope.spawn(move || run(device, part, Some(others))))
                    .collect();
                let join = |thread: std::thread::ScopedJoinHandle<_>| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                };
                threads.into_iter().map(join).collect()
            }),
        };
        for output in outputs {
            sum.accumulate(learner, output.grads.to_device(&devices[0], learner));
            let part = output.item.0.to_device(&devices[0]);
            loss = Some(match loss {
                Some(loss) => loss + part,
                None => part,
            });
        }
    }
    (sum.grads(), loss.expect("a step has at least one part"))
}

/// Length of the gradient over all parameters together.
pub fn gradient_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    gradients: &GradientsParams,
) -> Tensor<B::InnerBackend, 1> {
    struct Sum<'a, B: AutodiffBackend> {
        gradients: &'a GradientsParams,
        squares: Option<Tensor<B::InnerBackend, 1>>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Sum<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.gradients.get::<B::InnerBackend, D>(param.id) {
                let square = gradient.square().sum();
                self.squares = Some(match self.squares.take() {
                    Some(sum) => sum + square,
                    None => square,
                });
            }
        }
    }
    let mut sum = Sum::<B> { gradients, squares: None };
    module.visit(&mut sum);
    sum.squares.expect("every model has parameters that its loss depends on").sqrt()
}

/// Shortens the gradient to `longest`, if it is longer. Burn's own clipping would shorten each
/// parameter's gradient by itself, and so turn the whole. Stays on the device.
pub fn clip<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    mut gradients: GradientsParams,
    norm: &Tensor<B::InnerBackend, 1>,
    longest: f64,
) -> GradientsParams {
    struct Scale<'a, B: AutodiffBackend> {
        gradients: &'a mut GradientsParams,
        factor: Tensor<B::InnerBackend, 1>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
                let scaled = gradient * self.factor.clone().reshape([1; D]);
                self.gradients.register::<B::InnerBackend, D>(param.id, scaled);
            }
        }
    }
    let factor = (norm.clone() + 1e-6).recip().mul_scalar(longest).clamp_max(1.0);
    module.visit(&mut Scale::<B> { gradients: &mut gradients, factor });
    gradients
}

type Adaptor<B> = OptimizerAdaptor<AdamW, Learner<B>, B>;
/// What an optimizer remembers, as Burn records it.
pub type OptimizerRecord<B> = (
    <Adaptor<B> as Optimizer<Learner<B>, B>>::Record,
    <Adaptor<B> as Optimizer<Learner<B>, B>>::Record,
);

/// AdamW in two groups: weights that decay and weights that do not.
#[derive(Clone)]
pub struct Grouped<B: TrainBackend> {
    decaying: Adaptor<B>,
    plain: Adaptor<B>,
    /// Which weights do not decay.
    without_decay: HashSet<ParamId>,
}

impl<B: TrainBackend> Grouped<B> {
    /// A fresh optimizer for `learner`.
    pub fn new(config: &AdamWConfig, learner: &Learner<B>) -> Self {
        let adamw = |decay: f64| {
            burn::optim::AdamWConfig::new()
                .with_beta_1(config.beta_1 as f32)
                .with_beta_2(config.beta_2 as f32)
                .with_epsilon(config.epsilon as f32)
                .with_weight_decay(decay as f32)
                .init()
        };
        let without_decay = match config.decay {
            Decay::All => HashSet::new(),
            Decay::Matrices => vectors_and_embeddings(learner),
        };
        Self { decaying: adamw(config.weight_decay), plain: adamw(0.0), without_decay }
    }

    /// One step.
    pub fn step(
        &mut self,
        learning_rate: f64,
        learner: Learner<B>,
        mut gradients: GradientsParams,
    ) -> Learner<B> {
        if self.without_decay.is_empty() {
            return self.decaying.step(learning_rate, learner, gradients);
        }
        let plain = take(&learner, &mut gradients, &self.without_decay);
        let learner = self.decaying.step(learning_rate, learner, gradients);
        self.plain.step(learning_rate, learner, plain)
    }

    /// What it remembers.
    pub fn to_record(&self) -> OptimizerRecord<B> {
        (self.decaying.to_record(), self.plain.to_record())
    }

    /// Goes on from what another remembered.
    pub fn load_record(mut self, (decaying, plain): OptimizerRecord<B>) -> Self {
        self.decaying = self.decaying.load_record(decaying);
        self.plain = self.plain.load_record(plain);
        self
    }
}

/// Weights that customarily do not decay: everything that is no matrix, and embeddings.
fn vectors_and_embeddings<B: TrainBackend>(learner: &Learner<B>) -> HashSet<ParamId> {
    struct Collect {
        path: Vec<String>,
        found: HashSet<ParamId>,
    }
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            // Some mixers have vectors of other ranks.
            let vectors = ["embeddings", "r_k", "a_log", "log_a_real", "a_imag"];
            let aside = |name: &String| vectors.contains(&name.as_str());
            if D != 2 || self.path.iter().any(aside) {
                self.found.insert(param.id);
            }
        }
    }
    let mut collect = Collect { path: vec![], found: HashSet::new() };
    Module::<B>::visit(learner, &mut collect);
    collect.found
}

/// Moves the gradients of `chosen` out of `from`.
fn take<B: TrainBackend>(
    learner: &Learner<B>,
    from: &mut GradientsParams,
    chosen: &HashSet<ParamId>,
) -> GradientsParams {
    struct Take<'a> {
        from: &'a mut GradientsParams,
        to: GradientsParams,
        chosen: &'a HashSet<ParamId>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Take<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if !self.chosen.contains(&param.id) {
                return;
            }
            if let Some(gradient) = self.from.remove::<B::InnerBackend, D>(param.id) {
                self.to.register::<B::InnerBackend, D>(param.id, gradient);
            }
        }
    }
    let mut take = Take { from, to: GradientsParams::new(), chosen };
    Module::<B>::visit(learner, &mut take);
    take.to
}

impl<B: TrainBackend> std::fmt::Debug for Grouped<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grouped").field("without_decay", &self.without_decay.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use linattn::nn::LanguageModelConfig;

    type B = Autodiff<Flex>;

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
}
