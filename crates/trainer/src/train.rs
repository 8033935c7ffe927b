//! The loop: batches, steps, evaluations, checkpoints, and what is left when it ends.

use crate::checkpoint::{Checkpoint, Position};
use crate::config::{ConfigError, Precision, RunConfig, of_lora};
use crate::dashboard::Interrupter;
use crate::evaluate::{Evaluation, Testing};
use crate::folder::{RunFolder, Start};
use crate::folder_error::FolderError;
use crate::health::Panics;
use crate::learner::Learner;
use crate::optimizer::Optimizer;
use crate::progress::{Progress, ProgressStyle};
use crate::schedule::{Plan, learning_rate};
use crate::step::{Step, StepNumbers};
use crate::stored::{StoredError, StoredModel};
use crate::weights::{self, Part};
use burn::module::{AutodiffModule, Module};
use burn::tensor::{DType, ElementConversion};
use linattn::backend::TrainBackend;
use linattn::nn::{LanguageModel, materialize};
use linattn::ops::LinearAttentionBackend;
use linattn_plot::{Curve, PictureError};
use linattn_tasks::{Batch, Goal, Split, Task};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A run, and how it is to be carried out.
pub struct TrainJob {
    /// The run.
    pub run: RunConfig,
    /// Folder that holds one folder a run.
    pub output: PathBuf,
    /// Treatment of that folder if it is there.
    pub start: Start,
    /// The devices, as a person names them.
    pub device: String,
    /// The commit that the program was started in, if it is known.
    pub commit: Option<String>,
    /// Display of the run under way.
    pub progress: ProgressStyle,
    /// Ends the run after the current step, with everything saved.
    pub stop: Interrupter,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All steps are done.
    Completed,
    /// The score was good enough, or no longer rose.
    StoppedEarly,
    /// Someone asked it to stop; it can be resumed.
    Interrupted,
}

impl Status {
    /// As in `summary.json`.
    pub fn name(self) -> &'static str {
        match self {
            Status::Completed => "completed",
            Status::StoppedEarly => "stopped_early",
            Status::Interrupted => "interrupted",
        }
    }
}

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Its folder.
    pub folder: PathBuf,
    /// Contents of `summary.json`.
    pub summary: Value,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The run's folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The run that it starts from cannot be used.
    #[error(transparent)]
    Base(#[from] StoredError),
    /// The picture cannot be drawn.
    #[error(transparent)]
    Curve(#[from] PictureError),
    /// Something could not be written in the middle of the run.
    #[error("{source}; {kept}")]
    Cut {
        /// The action that failed, and why.
        source: FolderError,
        /// The checkpoints to go on from.
        kept: String,
    },
    /// The loss or its gradient is no number any more.
    #[error(
        "the loss is {loss} and the global gradient norm {norm} at step {step}: training has diverged; \
         {kept}. A lower optimizer.learning_rate or a train.clip_norm may help"
    )]
    Diverged {
        /// The loss.
        loss: f64,
        /// Length of the gradient.
        norm: f64,
        /// The step it was seen at.
        step: u64,
        /// Where the last good checkpoint is, if there is one.
        kept: String,
    },
}

impl TrainError {
    /// Whether nothing was begun: it is for a person to put right what was asked for.
    pub fn is_input(&self) -> bool {
        matches!(self, Self::Config(_) | Self::Folder(_) | Self::Base(_))
    }
}

/// Carries a run out. The first device holds the weights; a step's parts go round all of them. One
/// device may be named several times: then so many threads work on it.
/// # Errors
/// [`TrainError`]; what was saved before stays.
pub fn train<B: TrainBackend>(
    job: &TrainJob,
    devices: &[B::Device],
) -> Result<Outcome, TrainError> {
    let root = run_folder(&job.output, &job.run);
    let task = job.run.task.build(job.run.seed).map_err(ConfigError::from)?;
    job.run.check_model(task.as_ref())?;
    let source = source(job, &root)?;
    // Before anything is written: only the model knows whether its adapters have their projections.
    let begun =
        source.as_ref().map(|source| build_from(&job.run, source, &devices[0])).transpose()?;
    let keep = source.map(|source| source.keepsakes(&job.run)).unwrap_or_default();
    let (folder, checkpoint) = RunFolder::open(&root, &job.run, job.start, &keep)?;
    let start = match (checkpoint, begun) {
        (Some(checkpoint), _) => Beginning::Checkpoint(checkpoint),
        (None, Some(learner)) => Beginning::Model(learner),
        (None, None) => Beginning::Fresh,
    };
    let mut training = Training::<B>::new(job, devices, task.as_ref(), folder, start)?;
    let status = training.run_on();
    let kept = training.kept();
    status.and_then(|status| training.conclude(status)).map_err(|e| match e {
        TrainError::Folder(source) => TrainError::Cut { source, kept },
        e => e,
    })
}

/// The model that a new run starts from, where it does not start from fresh weights.
fn source(job: &TrainJob, root: &Path) -> Result<Option<StoredModel>, TrainError> {
    match &job.run.base {
        Some(base) if job.start != Start::Resume => {
            if same_file::is_same_file(&base.run, root).unwrap_or(false) {
                return Err(FolderError::OwnBase { path: base.run.clone() }.into());
            }
            Ok(Some(base.open()?))
        }
        _ => Ok(None),
    }
}

/// Source of the weights before the first step.
#[allow(clippy::large_enum_variant)] // a run has one
enum Beginning<B: TrainBackend> {
    Fresh,
    Model(Learner<B>),
    Checkpoint(Checkpoint),
}

/// Held from a seed to the last number that is drawn from it: Burn has one generator a process, and runs
/// may be threads of one.
static RANDOM: Mutex<()> = Mutex::new(());

/// Builds the model of a run as training would, for ids 0 to `vocab` - 1.
/// # Errors
/// [`ConfigError`] names the first key that does not fit.
pub fn build<B: LinearAttentionBackend>(
    run: &RunConfig,
    vocab: usize,
    device: &B::Device,
) -> Result<Learner<B>, ConfigError> {
    let drawing = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    B::seed(device, run.seed);
    let model = run.model.init(vocab, device)?;
    materialize(&model);
    drop(drawing);
    Ok(learner(run, model))
}

/// The model of a run as training has it.
fn learner<B: LinearAttentionBackend>(run: &RunConfig, model: LanguageModel<B>) -> Learner<B> {
    let model = match run.train.precision {
        Precision::F32 => model,
        Precision::Bf16 => model.with_precision(DType::BF16),
    };
    let model = model.with_recomputation(run.train.checkpoint_activations);
    weights::with_stable_ids(Learner { model })
}

/// `learner` with fresh adapters, where its run trains some.
fn adapted<B: LinearAttentionBackend>(
    run: &RunConfig,
    learner: Learner<B>,
    device: &B::Device,
) -> Result<Learner<B>, ConfigError> {
    let Some(lora) = &run.train.lora else { return Ok(learner) };
    let drawing = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    B::seed(device, run.seed);
    let model = learner.model.with_lora(lora).map_err(of_lora)?;
    materialize(&model);
    drop(drawing);
    Ok(weights::with_stable_ids(Learner { model }))
}

/// The learner of a run that goes on: adapters stand beside the weights that its folder keeps.
fn based<B: TrainBackend>(
    run: &RunConfig,
    root: &Path,
    checkpoint: &Checkpoint,
    fresh: Learner<B>,
    device: &B::Device,
) -> Result<Learner<B>, TrainError> {
    if run.train.lora.is_none() {
        return Ok(fresh);
    }
    let path = run.weights(root, checkpoint)?;
    let model = weights::load(fresh.model, Part::Whole, &path)
        .map_err(|why| checkpoint.corrupt(path, why))?;
    Ok(adapted(run, Learner { model }, device)?)
}

/// As [`build`], with the weights of a model that is there already.
pub(crate) fn build_from<B: LinearAttentionBackend>(
    run: &RunConfig,
    source: &StoredModel,
    device: &B::Device,
) -> Result<Learner<B>, StoredError> {
    Ok(adapted(run, learner(run, source.load_as(&run.model, device)?), device)?)
}

/// A run under way.
struct Training<'a, B: TrainBackend> {
    job: &'a TrainJob,
    devices: &'a [B::Device],
    task: &'a dyn Task,
    plan: Plan,
    folder: RunFolder,
    learner: Learner<B>,
    optimizer: Optimizer<B>,
    position: Position,
    progress: Option<Progress>,
    /// Metrics of the last evaluation, and its step.
    evaluated: Option<(u64, Map<String, Value>)>,
    started: Instant,
    wall_before: f64,
    /// From the run's beginning.
    panics: Panics,
}

impl<'a, B: TrainBackend> Training<'a, B> {
    fn new(
        job: &'a TrainJob,
        devices: &'a [B::Device],
        task: &'a dyn Task,
        folder: RunFolder,
        start: Beginning<B>,
    ) -> Result<Self, TrainError> {
        let panics = Panics::from_now();
        let run = &job.run;
        let fresh = || build::<B>(run, run.vocab(task.vocab()), &devices[0]);
        let mut optimizer = Optimizer::new(&run.optimizer);
        let mut position = Position::default();
        let learner = match start {
            Beginning::Fresh => fresh()?,
            Beginning::Model(learner) => learner,
            Beginning::Checkpoint(checkpoint) => {
                let learner = based(run, folder.root(), &checkpoint, fresh()?, &devices[0])?;
                let (learner, state) = load(&checkpoint, learner, run, &devices[0])?;
                (optimizer, position) = (state, checkpoint.position);
                learner
            }
        };
        let plan = Plan::new(&job.run, task);
        let progress =
            Progress::new(plan.total_steps, position.step, job.progress, job.stop.clone());
        Ok(Self {
            job,
            devices,
            task,
            plan,
            folder,
            learner,
            optimizer,
            wall_before: position.wall_seconds,
            position,
            progress: Some(progress),
            evaluated: None,
            started: Instant::now(),
            panics,
        })
    }

    fn run_on(&mut self) -> Result<Status, TrainError> {
        let (from, to) = (self.position.step, self.plan.total_steps);
        if self.position.stopped_early {
            return Ok(Status::StoppedEarly);
        }
        if self.position.evaluation_due {
            let enough = self.evaluate()?;
            self.save()?;
            match enough {
                None => return Ok(Status::Interrupted),
                Some(true) if from < to => return Ok(Status::StoppedEarly),
                Some(_) => {}
            }
        }
        std::thread::scope(|scope| {
            let (sender, batches) = sync_channel(2);
            let mut plan = Plan::new(&self.job.run, self.task);
            let (task, parts) = (self.task, self.parts());
            scope.spawn(move || {
                for step in from..to {
                    let batch = plan.batch_indices(step);
                    let part = batch.indices.len().div_ceil(parts).max(1);
                    let batches: Vec<Batch> = batch
                        .indices
                        .chunks(part)
                        .map(|indices| task.batch(Split::Train, batch.set, indices))
                        .collect();
                    if sender.send(batches).is_err() {
                        break; // the loop has ended
                    }
                }
            });
            self.steps(&batches)
        })
    }

    /// How many parts a step's batch falls into.
    fn parts(&self) -> usize {
        self.job.run.train.accumulate.max(self.devices.len())
    }

    fn steps(&mut self, batches: &Receiver<Vec<Batch>>) -> Result<Status, TrainError> {
        let run = &self.job.run;
        let once_an_epoch = self.plan.steps_per_epoch;
        let evaluate_every = run.evaluate.every_steps.unwrap_or(once_an_epoch);
        let save_every = run.checkpoint.every_steps.unwrap_or(once_an_epoch);
        let mut unchecked = None;
        while self.position.step < self.plan.total_steps {
            if self.job.stop.should_stop() {
                if let Some(numbers) = unchecked.take() {
                    self.checked(numbers)?;
                }
                self.save()?;
                return Ok(Status::Interrupted);
            }
            let Ok(parts) = batches.recv() else { unreachable!("the sender makes every step") };
            let started = Instant::now();
            let numbers = self.step(&parts);
            let step = self.position.step;
            let last = step == self.plan.total_steps;
            let (evaluate, save) =
                (step.is_multiple_of(evaluate_every), step.is_multiple_of(save_every));
            let log = step.is_multiple_of(run.train.log_every);
            let values = match log || evaluate || save || last {
                true => Some(self.checked(numbers)?),
                false => {
                    unchecked = Some(numbers);
                    None
                }
            };
            self.position.train_seconds += started.elapsed().as_secs_f64();
            if let Some(values) = values.filter(|_| log || last) {
                self.log(values)?;
            }
            let good_enough = match evaluate || last {
                true => self.evaluate()?,
                false => Some(false),
            };
            let Some(good_enough) = good_enough else {
                self.save()?;
                return Ok(Status::Interrupted);
            };
            if save || good_enough || last {
                self.save()?;
            }
            if good_enough && !last {
                return Ok(Status::StoppedEarly);
            }
        }
        Ok(Status::Completed)
    }

    /// One optimizer step.
    /// # Panics
    /// If a device has failed before.
    fn step(&mut self, parts: &[Batch]) -> StepNumbers<B::InnerBackend> {
        self.panics.check();
        let run = &self.job.run;
        let drops = run.model.has_dropout();
        let drawing = drops.then(|| RANDOM.lock().unwrap_or_else(PoisonError::into_inner));
        for device in self.devices.iter().filter(|_| drops) {
            // Dropout is a function of seed and step, so that a resumed run draws the same.
            B::seed(device, run.seed.wrapping_add((self.position.step + 1) << 20));
        }
        let step = Step {
            parts,
            devices: self.devices,
            // While one device goes back through a graph none may build one.
            may_overlap: !drops && !run.train.checkpoint_activations,
            learning_rate: self.learning_rate(self.position.step),
            clip: run.train.clip_norm,
        };
        let (learner, numbers) = step.take(&self.learner, &mut self.optimizer);
        drop(drawing);
        self.learner = learner;
        self.position.step += 1;
        self.position.tokens += parts.iter().map(|part| part.input.len() as u64).sum::<u64>();
        numbers
    }

    fn learning_rate(&self, step: u64) -> f64 {
        let run = &self.job.run;
        run.optimizer.learning_rate * learning_rate(&run.schedule, &self.plan, step)
    }

    /// Loss and gradient length, if they are numbers.
    /// # Panics
    /// If a device has failed.
    fn checked(&self, numbers: StepNumbers<B::InnerBackend>) -> Result<(f64, f64), TrainError> {
        let loss: f64 = numbers.loss.into_scalar().elem();
        let norm: f64 = numbers.norm.into_scalar().elem();
        // A device without memory gives numbers all the same, out of memory that was never written.
        self.panics.check();
        if loss.is_finite() && norm.is_finite() {
            return Ok((loss, norm));
        }
        let kept = match self.folder.has_checkpoint() {
            true => format!("the last good checkpoint is kept in {}", self.checkpoints().display()),
            false => "there was no checkpoint yet".into(),
        };
        self.folder.write_summary(&json!({
            "status": "diverged", "step": self.position.step, "seed": self.job.run.seed,
            "best_score": self.position.best_score, "best_step": self.position.best_step,
            "device": self.job.device, "commit": self.job.commit,
        }))?;
        Err(TrainError::Diverged { loss, norm, step: self.position.step, kept })
    }

    fn checkpoints(&self) -> PathBuf {
        self.folder.root().join("checkpoints")
    }

    /// The checkpoints to go on from after a failure, in words.
    fn kept(&self) -> String {
        match self.folder.has_checkpoint() {
            true => format!("--resume goes on from the last of {}", self.checkpoints().display()),
            false => "there is no checkpoint yet, and --overwrite starts the run again".into(),
        }
    }

    fn log(&mut self, (loss, norm): (f64, f64)) -> Result<(), TrainError> {
        let step = self.position.step;
        let epoch = self.plan.epoch(step - 1) + 1;
        let rate = self.learning_rate(step - 1);
        let speed = self.tokens_per_second();
        self.folder.append(&json!({
            "kind": "train", "step": step, "epoch": epoch, "loss": loss, "gradient_norm": norm,
            "learning_rate": rate, "tokens_per_second": speed, "seconds": self.wall_seconds(),
        }))?;
        if let Some(progress) = &mut self.progress {
            progress.train(step, epoch, loss, rate, speed);
        }
        Ok(())
    }

    /// Tests the model and takes note of the best. Tells whether training should end; nothing if
    /// someone asked to stop before the test was over.
    fn evaluate(&mut self) -> Result<Option<bool>, TrainError> {
        let tested = self.test();
        self.position.evaluation_due = tested.is_none();
        let Some(evaluation) = tested else { return Ok(None) };
        let score = evaluation.score(self.job.run.evaluate.select_on, self.task);
        let better = self.position.best_score.is_none_or(|best| match self.task.goal() {
            Goal::Highest => score > best,
            Goal::Lowest => score < best,
        });
        if better {
            self.position.best_score = Some(score);
            self.position.best_step = self.position.step;
            self.position.evaluations_since_best = 0;
        } else {
            self.position.evaluations_since_best += 1;
        }
        let metrics = evaluation.metrics;
        let mut line = json!({ "kind": "evaluation", "step": self.position.step });
        if let Some(line) = line.as_object_mut() {
            line.extend(metrics.clone());
            line.insert("seconds".into(), self.wall_seconds().into());
        }
        self.folder.append(&line)?;
        if let Some(progress) = &mut self.progress {
            let list: Vec<(String, f64)> =
                metrics.iter().map(|(k, v)| (k.clone(), v.as_f64().unwrap_or(f64::NAN))).collect();
            progress.evaluated(self.position.step, &list, better);
        }
        self.evaluated = Some((self.position.step, metrics));
        let limits = &self.job.run.evaluate;
        let good = limits.is_enough(score);
        let stale = limits.patience.is_some_and(|n| self.position.evaluations_since_best >= n);
        self.position.stopped_early = (good || stale) && self.position.step < self.plan.total_steps;
        if better {
            self.save()?;
        }
        Ok(Some(good || stale))
    }

    /// # Panics
    /// If a device has failed.
    fn test(&self) -> Option<Evaluation> {
        let run = &self.job.run;
        let testing = Testing::new(run, self.task, &[Split::Validation, Split::Test]);
        let testing = testing.on(self.devices);
        let tested =
            testing.evaluate_until(&self.job.stop, &self.learner.valid(), &self.devices[0]);
        self.panics.check();
        tested
    }

    /// # Panics
    /// If a device has failed: what it computed since is not to be kept.
    fn save(&mut self) -> Result<(), TrainError> {
        self.panics.settle::<B>(self.devices);
        self.position.wall_seconds = self.wall_seconds();
        self.folder.save(&self.position, |model, optimizer| {
            let written = weights::save(&self.learner.model, Part::of(&self.job.run), model)
                .and_then(|()| self.optimizer.save(optimizer));
            // A device that fails while it is read is no fault of the disk.
            self.panics.settle::<B>(self.devices);
            written
        })?;
        self.folder.prune(self.job.run.checkpoint.keep, self.position.best_step)?;
        Ok(())
    }

    fn wall_seconds(&self) -> f64 {
        self.wall_before + self.started.elapsed().as_secs_f64()
    }

    fn tokens_per_second(&self) -> f64 {
        self.position.tokens as f64 / self.position.train_seconds.max(1e-9)
    }

    /// Evaluates if the last step was not, draws the curve, writes the summary.
    fn conclude(mut self, mut status: Status) -> Result<Outcome, TrainError> {
        let current = self.evaluated.as_ref().is_some_and(|(step, _)| *step == self.position.step);
        // Someone who has pressed Ctrl-C does not want to wait for one more evaluation.
        if !current && status != Status::Interrupted {
            match self.test() {
                Some(tested) => self.evaluated = Some((self.position.step, tested.metrics)),
                None => status = Status::Interrupted,
            }
        }
        if let Some(progress) = self.progress.take() {
            progress.finish();
        }
        let metrics = self.evaluated.take().map(|(_, metrics)| metrics).unwrap_or_default();
        self.panics.settle::<B>(self.devices);
        let summary = self.summary(status, metrics);
        self.folder.write_summary(&summary)?;
        curve(&self.job.run, &self.folder.metrics()?, &summary).draw(self.folder.root())?;
        Ok(Outcome { status, folder: self.folder.root().into(), summary })
    }

    fn summary(&self, status: Status, metrics: Map<String, Value>) -> Value {
        let run = &self.job.run;
        let longest = self.task.sets(Split::Test).iter().map(|set| set.length).max().unwrap_or(1);
        let cost = run.model.cost(longest).expect("checked before training");
        let score_name = self.task.score_name();
        json!({
            "status": status.name(),
            "score": metrics.get(&format!("test/{score_name}")),
            "score_name": score_name,
            "best_score": self.position.best_score,
            "best_step": self.position.best_step,
            "metrics": metrics,
            "name": run.name,
            "seed": run.seed,
            "steps": self.position.step,
            "epochs": self.position.step as f64 / self.plan.steps_per_epoch as f64,
            "tokens": self.position.tokens,
            "parameters": self.learner.num_params(),
            "state_bytes": cost.state_bytes,
            "device": self.job.device,
            "path": linattn::ops::path::<B>(&self.devices[0]).to_string(),
            "tokens_per_second": self.tokens_per_second(),
            "wall_seconds": self.wall_seconds(),
            "commit": self.job.commit,
            "version": env!("CARGO_PKG_VERSION"),
        })
    }
}

/// A learner and its optimizer as a checkpoint has them.
fn load<B: TrainBackend>(
    checkpoint: &Checkpoint,
    learner: Learner<B>,
    run: &RunConfig,
    device: &B::Device,
) -> Result<(Learner<B>, Optimizer<B>), FolderError> {
    let (model, path) = (checkpoint.model(), checkpoint.optimizer());
    let model = weights::load(learner.model, Part::of(run), &model)
        .map_err(|e| checkpoint.corrupt(model, e))?;
    let learner = Learner { model };
    let optimizer = Optimizer::load(&run.optimizer, &learner, &path, device)
        .map_err(|e| checkpoint.corrupt(path, e))?;
    Ok((learner, optimizer))
}

/// The picture of a run, from its metrics.
fn curve(run: &RunConfig, metrics: &[Value], summary: &Value) -> Curve {
    let score_name = summary["score_name"].as_str().unwrap_or("score");
    let points = |key: &str| -> Vec<(u64, f64)> {
        metrics
            .iter()
            .filter_map(|line| Some((line["step"].as_u64()?, line.get(key)?.as_f64()?)))
            .collect()
    };
    let sets: Vec<String> = summary["metrics"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(key, _)| key.strip_suffix(&format!("/{score_name}")))
        .filter(|prefix| prefix.contains('/'))
        .map(str::to_string)
        .collect();
    let scores = sets
        .into_iter()
        .map(|set| {
            let points = points(&format!("{set}/{score_name}"));
            (set, points)
        })
        .collect();
    Curve {
        title: run.name.clone(),
        subtitle: format!(
            "test {score_name} {:.4} after {} steps, {:.0} s on {}",
            summary["score"].as_f64().unwrap_or(f64::NAN),
            summary["steps"],
            summary["wall_seconds"].as_f64().unwrap_or(f64::NAN),
            summary["device"].as_str().unwrap_or("an unknown device"),
        ),
        loss: points("loss"),
        score_name: score_name.to_string(),
        scores,
    }
}

/// The folder that a run writes.
pub fn run_folder(output: &Path, run: &RunConfig) -> PathBuf {
    output.join(&run.name)
}
