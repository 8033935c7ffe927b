//! One run, complete, as one TOML file.

use crate::bounds;
use linattn::nn::{ConfigError as ModelError, HeadKind, LanguageModelConfig, LoraConfig};
use linattn_tasks::{Goal, Split, Task, TaskConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use toml::Value;

pub use crate::config_error::ConfigError;

/// One run. With the commit and the device it can be repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder under the output folder; by default the config file's name.
    #[serde(default)]
    pub name: String,
    /// Where every random number starts from: weights, data, order, dropout.
    #[serde(default)]
    pub seed: u64,
    /// Whether the metrics are also written as TensorBoard's event files when the run ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tensorboard: bool,
    /// The benchmark.
    pub task: TaskConfig,
    /// The model.
    pub model: LanguageModelConfig,
    /// The run whose weights it starts from, where it is not to start from fresh ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseConfig>,
    /// How.
    pub train: TrainConfig,
    /// How gradients become steps.
    #[serde(default)]
    pub optimizer: AdamWConfig,
    /// How the learning rate changes.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// When and how it is tested.
    #[serde(default)]
    pub evaluate: EvaluateConfig,
    /// When the run is saved.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// The run whose weights training starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseConfig {
    /// Its folder, which is read once, when training starts.
    pub run: PathBuf,
    /// The steps of its checkpoint.
    pub step: u64,
    /// Ids that its model knows.
    pub vocab: usize,
    /// CRC-32 of the checkpoint's weights, eight hexadecimal digits.
    pub checksum: String,
    /// Ids that end a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub end_ids: Vec<u32>,
}

/// How training goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Passes over the training sets. Either this or `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Optimizer steps. Either this or `epochs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Sequences a step.
    pub batch_size: usize,
    /// Parts that a step's batch is worked off in, to save memory. The result is the same but for
    /// rounding.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// In what order examples come.
    #[serde(default)]
    pub order: Order,
    /// Largest length of the gradient over all parameters together; longer ones are shortened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Type of matrix products and recurrences.
    #[serde(default, skip_serializing_if = "Precision::is_f32")]
    pub precision: Precision,
    /// Whether layers are computed once more on the way back, which saves their intermediate results.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoint_activations: bool,
    /// Low-rank adapters, which then learn alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// Steps between two lines of metrics.
    #[serde(default = "ten")]
    pub log_every: u64,
}

/// Type of matrix products and recurrences in training. Weights, residual stream, statistics of norms,
/// gates, states, losses and the optimizer are f32 in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32; on CUDA matrix products are TF32, with 10 bits of mantissa.
    #[default]
    F32,
    /// bf16, in the layers that take it: see `LanguageModel::with_precision`.
    Bf16,
}

impl Precision {
    fn is_f32(&self) -> bool {
        *self == Self::F32
    }
}

fn one() -> usize {
    1
}

fn ten() -> u64 {
    10
}

/// In what order examples come. A batch never mixes two sets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Set after set, each from its first example, the same in every epoch.
    Fixed,
    /// Batches of all sets mixed, and the examples of each set; another order in every epoch.
    #[default]
    Shuffled,
    /// As `fixed`, but no example ever comes twice: the second epoch draws new ones.
    Fresh,
}

/// AdamW. Source: Loshchilov and Hutter, arXiv 1711.05101.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate at its highest.
    pub learning_rate: f64,
    /// Share of a weight that is taken off in a step of learning rate 1.
    pub weight_decay: f64,
    /// Which weights decay.
    pub decay: WeightDecay,
    /// Memory of the mean gradient.
    pub beta_1: f64,
    /// Memory of the mean squared gradient.
    pub beta_2: f64,
    /// Added to the root of the mean square.
    pub epsilon: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            weight_decay: 0.1,
            decay: WeightDecay::default(),
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
        }
    }
}

/// Which weights decay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDecay {
    /// All of them, norms, biases, gates and embeddings too.
    #[default]
    All,
    /// Only matrices, and not the embedding.
    Matrices,
}

/// How the learning rate changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Its shape after the warm-up.
    pub shape: Shape,
    /// Steps in which it rises from zero.
    pub warmup_steps: u64,
    /// Where it ends, as a share of `optimizer.learning_rate`.
    pub floor: f64,
    /// Whether it changes with every step or every epoch.
    pub per: Per,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self { shape: Shape::default(), warmup_steps: 0, floor: 0.0, per: Per::default() }
    }
}

/// The schedule after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Stays.
    Constant,
    /// Falls along half a cosine.
    #[default]
    Cosine,
    /// Falls along a line.
    Linear,
}

/// Unit that a schedule counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// Steps.
    #[default]
    Step,
    /// Whole epochs: the rate is the same throughout one.
    Epoch,
}

/// When and how the model is tested.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluateConfig {
    /// Steps between two evaluations; by default one an epoch. The last step is always followed by
    /// one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Sequences a batch; by default as in training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Training ends early once the score is above this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_above: Option<f64>,
    /// Training ends early once the score is below this, where a low score is a good one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_below: Option<f64>,
    /// Longer sequences are worked off in parts of so many tokens, with the state carried from one to
    /// the next: memory then does not grow with their length.
    pub window: usize,
    /// Training ends early after so many evaluations without a better score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// The split whose score decides on stopping and on the best checkpoint.
    pub select_on: Split,
}

impl Default for EvaluateConfig {
    fn default() -> Self {
        Self {
            every_steps: None,
            batch_size: None,
            stop_above: None,
            stop_below: None,
            window: 1024,
            patience: None,
            select_on: Split::Test,
        }
    }
}

/// When the run is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between two checkpoints; by default one an epoch. There is always one at the end, and
    /// on Ctrl-C.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// How many of the newest are kept, besides the best.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, keep: 2 }
    }
}

impl RunConfig {
    /// Checks every value, and makes the task once.
    pub(crate) fn checked(self) -> Result<Self, ConfigError> {
        self.check_alone()?;
        let task = self.task.build(self.seed)?;
        self.check_model(task.as_ref())?;
        self.check_base(task.as_ref())?;
        self.check_head(task.as_ref())?;
        bounds::check_batches(self.train.batch_size, self.evaluate.batch_size, task.as_ref())?;
        self.evaluate.check(task.as_ref())?;
        Ok(self)
    }

    /// The file that makes this run again.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a run config is made of tables, numbers and strings")
    }

    /// The first key whose value is not the same in `other`, with both values.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let value = |x: &Self| Value::try_from(x).expect("a run config is a table");
        first_difference("", &value(self), &value(other))
    }

    /// Checks what no task has a part in.
    pub(crate) fn check_alone(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        let no_name = |c: char| c == '/' || c == '\\' || c.is_control();
        if name.is_empty() || name == "." || name == ".." || name.contains(no_name) {
            return Err(ConfigError::value("name", format!("{name:?}"), "one folder's name"));
        }
        self.train.check()?;
        self.check_lora()?;
        self.check_recomputation()?;
        self.optimizer.check()?;
        if !(0.0..=1.0).contains(&self.schedule.floor) {
            return Err(ConfigError::value("schedule.floor", self.schedule.floor, "0 to 1"));
        }
        self.evaluate.check_counts()?;
        let at_least_one = |key, value| match value {
            Some(0) => Err(ConfigError::value(key, 0, "at least 1")),
            _ => Ok(()),
        };
        at_least_one("checkpoint.every_steps", self.checkpoint.every_steps)?;
        at_least_one("checkpoint.keep", Some(self.checkpoint.keep as u64))
    }
}

impl RunConfig {
    /// The model can be built, and for the task's longest sequence too.
    pub(crate) fn check_model(&self, task: &dyn Task) -> Result<(), ConfigError> {
        let sets = [Split::Train, Split::Validation, Split::Test].map(|split| task.sets(split));
        let longest = sets.into_iter().flatten().map(|set| set.length).max().unwrap_or(1);
        self.model.cost(longest)?;
        Ok(())
    }

    /// Layers that are computed twice compute the same twice.
    fn check_recomputation(&self) -> Result<(), ConfigError> {
        if !self.train.checkpoint_activations {
            return Ok(());
        }
        self.model.can_recompute().map_err(|e| {
            let want = format!("{}, which `train.checkpoint_activations` does", e.want);
            ConfigError::from(ModelError { want, ..e })
        })
    }

    /// Adapters want a model that is there already.
    fn check_lora(&self) -> Result<(), ConfigError> {
        let Some(lora) = &self.train.lora else { return Ok(()) };
        lora.check().map_err(of_lora)?;
        match &self.base {
            Some(_) => Ok(()),
            None => {
                let want = "left out, unless `model.from` names the run whose weights it adapts";
                Err(ConfigError::value("train.lora", "given", want))
            }
        }
    }

    /// Ids of the model, for a task of `task` ids: one that is there already may know more.
    pub fn vocab(&self, task: usize) -> usize {
        self.base.as_ref().map_or(task, |base| base.vocab)
    }

    /// The model that it starts from knows the task's ids.
    pub(crate) fn check_base(&self, task: &dyn Task) -> Result<(), ConfigError> {
        let Some(BaseConfig { run, vocab, checksum, .. }) = &self.base else { return Ok(()) };
        if checksum.len() != 8 || u32::from_str_radix(checksum, 16).is_err() {
            return Err(ConfigError::value("base.checksum", checksum, "eight hexadecimal digits"));
        }
        match task.vocab() {
            ids if ids > *vocab => {
                let want =
                    format!("of at most {vocab}, which the model of {} knows", run.display());
                Err(ConfigError::value("task", format!("one of {ids} token ids"), want))
            }
            _ => Ok(()),
        }
    }

    /// An auto-encoder sees its whole input before it answers: right where that is asked for, and
    /// nowhere else.
    fn check_head(&self, task: &dyn Task) -> Result<(), ConfigError> {
        let (got, want) = match (self.model.head, task.needs_auto_encoder()) {
            (HeadKind::Position, true) => ("position", "auto_encoder for this task"),
            (HeadKind::AutoEncoder, false) => ("auto_encoder", "position for this task"),
            _ => return Ok(()),
        };
        Err(ConfigError::value("model.head", got, want))
    }
}

/// An error in the table of adapters.
pub(crate) fn of_lora(e: ModelError) -> ConfigError {
    ConfigError::Value { key: format!("train.lora.{}", e.key), got: e.got, want: e.want }
}

impl TrainConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let count = match (self.epochs, self.steps) {
            (Some(epochs), None) => ("train.epochs", epochs),
            (None, Some(steps)) => ("train.steps", steps),
            (Some(_), Some(_)) => {
                let want = "left out where `train.epochs` is given";
                return Err(ConfigError::value("train.steps", "given too", want));
            }
            (None, None) => {
                let want = "given, or `train.steps`";
                return Err(ConfigError::value("train.epochs", "missing", want));
            }
        };
        let counts = [
            count,
            ("train.batch_size", self.batch_size as u64),
            ("train.accumulate", self.accumulate as u64),
            ("train.log_every", self.log_every),
        ];
        if let Some((key, _)) = counts.into_iter().find(|&(_, value)| value == 0) {
            return Err(ConfigError::value(key, 0, "at least 1"));
        }
        if self.accumulate > self.batch_size {
            let want = format!("at most train.batch_size = {}", self.batch_size);
            return Err(ConfigError::value("train.accumulate", self.accumulate, want));
        }
        match self.clip_norm {
            Some(norm) if norm <= 0.0 || !norm.is_finite() => {
                Err(ConfigError::value("train.clip_norm", norm, "above 0"))
            }
            _ => Ok(()),
        }
    }
}

impl AdamWConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let ranges = [
            ("learning_rate", self.learning_rate, 0.0, f64::MAX, "above 0"),
            ("epsilon", self.epsilon, 0.0, f64::MAX, "above 0"),
            ("weight_decay", self.weight_decay, -f64::MIN_POSITIVE, f64::MAX, "at least 0"),
            ("beta_1", self.beta_1, -f64::MIN_POSITIVE, 1.0, "at least 0 and below 1"),
            ("beta_2", self.beta_2, -f64::MIN_POSITIVE, 1.0, "at least 0 and below 1"),
        ];
        for (key, value, above, below, want) in ranges {
            if !(value > above && value < below) {
                return Err(ConfigError::value(&format!("optimizer.{key}"), value, want));
            }
        }
        Ok(())
    }
}

impl EvaluateConfig {
    /// Whether a score is good enough to end training.
    pub fn is_enough(&self, score: f64) -> bool {
        self.stop_above.is_some_and(|enough| score > enough)
            || self.stop_below.is_some_and(|enough| score < enough)
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        let counts = [
            ("evaluate.every_steps", self.every_steps),
            ("evaluate.batch_size", self.batch_size.map(|n| n as u64)),
            ("evaluate.window", Some(self.window as u64)),
            ("evaluate.patience", self.patience),
        ];
        match counts.into_iter().find(|&(_, value)| value == Some(0)) {
            Some((key, _)) => Err(ConfigError::value(key, 0, "at least 1")),
            None => Ok(()),
        }
    }

    fn check(&self, task: &dyn Task) -> Result<(), ConfigError> {
        let name = task.score_name();
        let (right, wrong) = match task.goal() {
            Goal::Highest => (self.stop_above, ("evaluate.stop_below", self.stop_below)),
            Goal::Lowest => (self.stop_below, ("evaluate.stop_above", self.stop_above)),
        };
        if let (key, Some(value)) = wrong {
            let (better, other) = match task.goal() {
                Goal::Highest => ("higher", "evaluate.stop_above"),
                Goal::Lowest => ("lower", "evaluate.stop_below"),
            };
            let want = format!("left out: {name} is better the {better}; use `{other}`");
            return Err(ConfigError::value(key, value, want));
        }
        if right.is_some_and(f64::is_nan) {
            return Err(ConfigError::value("evaluate.stop_above", "nan", "a number"));
        }
        if task.sets(self.select_on).is_empty() {
            let want = format!("a split that the task has sets of; {:?} has none", self.select_on);
            let got = format!("{:?}", self.select_on).to_lowercase();
            return Err(ConfigError::value("evaluate.select_on", got, want));
        }
        Ok(())
    }
}

/// The first key below `key` with two values, and both.
pub(crate) fn first_difference(
    key: &str,
    a: &Value,
    b: &Value,
) -> Option<(String, String, String)> {
    if a == b {
        return None;
    }
    let below = |name: &str| match key {
        "" => name.to_string(),
        key => format!("{key}.{name}"),
    };
    match (a, b) {
        (Value::Table(a), Value::Table(b)) => {
            let missing = Value::String("absent".to_string());
            a.keys().chain(b.keys()).find_map(|name| {
                let (a, b) = (a.get(name).unwrap_or(&missing), b.get(name).unwrap_or(&missing));
                first_difference(&below(name), a, b)
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(i, (a, b))| first_difference(&below(&i.to_string()), a, b)),
        _ => Some((key.to_string(), a.to_string(), b.to_string())),
    }
}
