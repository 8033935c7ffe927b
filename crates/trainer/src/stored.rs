//! A model that is there already: of a run that was trained, or from elsewhere.
//! ```toml
//! # The config of a model from elsewhere: no task, no training.
//! name = "gla"
//! tokenizer = "tokenizer.json"    # beside this file; left out where there is none
//! end_ids = [2]                   # tokens that end a text; left out where there are none
//! [model]
//! d_model = 1024
//! ```

use crate::checkpoint::{BASE, Checkpoint, KEPT, Which, base, find_checkpoint};
use crate::config::{
    AdamWConfig, CheckpointConfig, ConfigError, EvaluateConfig, Order, Precision, RunConfig,
    ScheduleConfig, TrainConfig, of_lora,
};
use crate::config_error::parse_error;
use crate::evaluate::{Evaluation, Testing};
use crate::folder::{Arrival, COMPANIONS, CONFIG, TOKENIZER, write_arrival};
use crate::folder_error::{FolderError, io_error};
use crate::learner::Learner;
use crate::weights::{self, Part, Sizes};
use burn::tensor::backend::Backend;
use linattn::nn::{LanguageModel, LanguageModelConfig, LoraConfig};
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::{Task, TaskConfig, TokenizerConfig};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Why a run cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    /// Its config, or what was to be put in place of it, is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The model was made for another vocabulary.
    #[error(
        "the task has {task} token ids, and the model was trained with {model}; `task` has to have \
         as many"
    )]
    Vocabulary {
        /// Of the task.
        task: usize,
        /// Of the model.
        model: usize,
    },
    /// A model from elsewhere knows fewer ids than the task has.
    #[error(
        "the task has {task} token ids, and the model knows {model}; `task` has to have no more"
    )]
    UnknownIds {
        /// Of the task.
        task: usize,
        /// Of the model.
        model: usize,
    },
    /// A model from elsewhere has no task to be tested on.
    #[error(
        "{path} was imported and has no task of its own; name one with --task-from CONFIG or \
         --set 'task.NAME={{ .. }}'"
    )]
    NoTask {
        /// The model's folder.
        path: PathBuf,
    },
}

/// The config of a model that was not trained here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImportedConfig {
    name: String,
    /// A file in the same folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokenizer: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    end_ids: Vec<u32>,
    model: LanguageModelConfig,
}

impl ImportedConfig {
    /// A run of this model: a task is all that it lacks, and its training is nobody's concern.
    fn table(&self) -> Table {
        let value = |x: Result<Value, toml::ser::Error>| x.expect("a config is a table");
        let mut table = Table::new();
        table.insert("name".to_string(), Value::String(self.name.clone()));
        table.insert("model".to_string(), value(Value::try_from(&self.model)));
        table.insert("train".to_string(), value(Value::try_from(untrained())));
        table
    }

    /// The same with a task.
    fn run(&self, task: TaskConfig) -> RunConfig {
        RunConfig {
            name: self.name.clone(),
            seed: 0,
            tensorboard: false,
            task,
            model: self.model.clone(),
            base: None,
            train: untrained(),
            optimizer: AdamWConfig::default(),
            schedule: ScheduleConfig::default(),
            evaluate: EvaluateConfig::default(),
            checkpoint: CheckpointConfig::default(),
        }
    }
}

fn untrained() -> TrainConfig {
    TrainConfig {
        epochs: None,
        steps: Some(1),
        batch_size: 8,
        accumulate: 1,
        order: Order::default(),
        clip_norm: None,
        precision: Precision::default(),
        checkpoint_activations: false,
        lora: None,
        log_every: 10,
    }
}

/// Kinds of `config.toml` that a run may have.
#[derive(Debug)]
enum Origin {
    Trained(Box<RunConfig>),
    Imported(Box<ImportedConfig>),
}

impl Origin {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let parse =
            |e: toml::de::Error| ConfigError::Parse { path: path.into(), why: parse_error(&e) };
        let table: Table = toml::from_str(&text).map_err(parse)?;
        if table.contains_key("task") || table.contains_key("train") {
            // The texts that it was trained on may be anywhere by now, and its model needs none.
            let run = toml::from_str::<RunConfig>(&text).map_err(parse)?;
            run.check_alone()?;
            return Ok(Origin::Trained(Box::new(run)));
        }
        Ok(Origin::Imported(Box::new(toml::from_str(&text).map_err(parse)?)))
    }
}

impl RunConfig {
    /// The file with the weights of a checkpoint of the run in `root`, adapters aside.
    pub(crate) fn weights(
        &self,
        root: &Path,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf, FolderError> {
        match (&self.train.lora, &self.base) {
            (Some(_), Some(run)) => base(root, &run.checksum),
            _ => Ok(checkpoint.model()),
        }
    }
}

/// A model of a run's folder, opened to be looked at. Nothing in the folder changes.
#[derive(Debug)]
pub struct StoredModel {
    /// Its config.
    pub config: LanguageModelConfig,
    /// Ids that it knows, from 0.
    pub vocab: usize,
    /// The `tokenizer.json` that made its ids from text; none where they are bytes, or no text at all.
    pub tokenizer: Option<PathBuf>,
    /// Ids that end a text, as the checkpoint that it came from says.
    pub end_ids: Vec<u32>,
    /// Those of [`COMPANIONS`] that are in its folder.
    pub companions: Vec<PathBuf>,
    /// Where its weights come from.
    pub checkpoint: Checkpoint,
    /// Its weights, or those that its adapters stand beside.
    pub(crate) weights: PathBuf,
    /// Contents of the checkpoint that it was imported from besides its weights, if there were any.
    pub kept: Option<PathBuf>,
    origin: Origin,
}

impl StoredModel {
    /// Opens the run in `root`.
    /// # Errors
    /// [`StoredError`] names the file or the key.
    pub fn open(root: &Path, which: Which) -> Result<Self, StoredError> {
        let checkpoint = find_checkpoint(root, which)?;
        let origin = Origin::read(&root.join(CONFIG))?;
        let (config, tokenizer, end_ids) = match &origin {
            Origin::Trained(run) => {
                let theirs = file_of(run.task.tokenizer());
                let kept = theirs.map(|path| kept_tokenizer(root).unwrap_or(path));
                let end_ids = run.base.as_ref().map(|base| base.end_ids.clone());
                (run.model.clone(), kept, end_ids.unwrap_or_default())
            }
            Origin::Imported(imported) => {
                let beside = imported.tokenizer.as_ref().map(|name| root.join(name));
                (imported.model.clone(), beside, imported.end_ids.clone())
            }
        };
        let path = match &origin {
            Origin::Trained(run) => run.weights(root, &checkpoint)?,
            Origin::Imported(_) => checkpoint.model(),
        };
        let sizes = weights::sizes(&path).map_err(|why| checkpoint.corrupt(path.clone(), why))?;
        check_sizes(&config, &sizes, &path)?;
        let vocab = sizes.vocab;
        let beside = Some(root.join(KEPT)).filter(|path| path.exists());
        let kept = checkpoint.kept().or(beside);
        let companions = companions(root);
        Ok(Self {
            config,
            vocab,
            tokenizer,
            end_ids,
            companions,
            checkpoint,
            weights: path,
            kept,
            origin,
        })
    }

    /// Contents of the file [`kept`](Self::kept), where there is one.
    /// # Errors
    /// [`StoredError`] names the file.
    pub fn kept_bytes(&self) -> Result<Option<Vec<u8>>, StoredError> {
        let read = |path: &PathBuf| std::fs::read(path).map_err(io_error("read", path));
        Ok(self.kept.as_ref().map(read).transpose()?)
    }

    /// Files that a run which starts from it keeps copies of, under their names there.
    pub(crate) fn keepsakes(&self, run: &RunConfig) -> Vec<(&'static str, PathBuf)> {
        let weights = run.train.lora.as_ref().map(|_| (BASE, self.weights.clone()));
        let companions = COMPANIONS.iter().filter_map(|name| {
            let path = self.companions.iter().find(|path| path.ends_with(name))?;
            Some((*name, path.clone()))
        });
        let kept = self.kept.iter().map(|path| (KEPT, path.clone()));
        kept.chain(companions).chain(weights).collect()
    }

    /// How text becomes its ids; none where nothing is known of that.
    pub(crate) fn text(&self) -> Option<TokenizerConfig> {
        match (&self.tokenizer, &self.origin) {
            (Some(path), _) => Some(TokenizerConfig::File(path.clone())),
            (None, Origin::Trained(run)) => run.task.tokenizer().cloned(),
            (None, Origin::Imported(_)) => None,
        }
    }

    /// The model, on a device.
    /// # Errors
    /// [`StoredError`] if the checkpoint is not what the config describes.
    pub fn load<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, StoredError> {
        self.load_as(&self.config, device)
    }

    /// As [`load`](Self::load), of a config that differs in nothing that weights know of.
    pub(crate) fn load_as<B: LinearAttentionBackend>(
        &self,
        config: &LanguageModelConfig,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, StoredError> {
        match self.adapters() {
            None => self.load_from(&self.checkpoint.model(), config, device),
            Some(lora) => Ok(self.load_adapted(config, device)?.merged(lora)),
        }
    }

    /// The low-rank adapters that were trained, where the rest of the model was not.
    pub fn adapters(&self) -> Option<&LoraConfig> {
        match &self.origin {
            Origin::Trained(run) => run.train.lora.as_ref(),
            Origin::Imported(_) => None,
        }
    }

    /// The model with its adapters beside the weights that they were trained with; as
    /// [`load`](Self::load) where it has none.
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with_adapters<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, StoredError> {
        match self.adapters() {
            None => self.load(device),
            Some(_) => self.load_adapted(&self.config, device),
        }
    }

    fn load_adapted<B: LinearAttentionBackend>(
        &self,
        config: &LanguageModelConfig,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, StoredError> {
        let lora = self.adapters().expect("of a model that has some");
        let model = self.load_from(&self.weights, config, device)?;
        let model = model.with_lora(lora).map_err(of_lora)?;
        let path = self.checkpoint.model();
        let loaded = weights::load(model, Part::Adapters, &path);
        loaded.map_err(|why| self.checkpoint.corrupt(path, why).into())
    }

    fn load_from<B: LinearAttentionBackend>(
        &self,
        path: &Path,
        config: &LanguageModelConfig,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, StoredError> {
        let fresh = config.init::<B>(self.vocab, device).map_err(ConfigError::from)?;
        let loaded = weights::load(fresh, Part::Whole, path);
        loaded.map_err(|why| self.checkpoint.corrupt(path.into(), why).into())
    }
}

/// Refuses a config of another model than that of the file `path`, before any memory is asked for it.
fn check_sizes(
    config: &LanguageModelConfig,
    sizes: &Sizes,
    path: &Path,
) -> Result<(), ConfigError> {
    let want = |want: String| format!("{want}, as in {}", path.display());
    for (key, got, there) in [
        ("model.d_model", config.d_model, sizes.width),
        ("model.layers", config.depth(), sizes.layers),
    ] {
        if got != there {
            return Err(ConfigError::value(key, got, want(there.to_string())));
        }
    }
    // A weight is a multiplication and an addition; up to half of the rest is the recurrence.
    let least = config.cost(1)?.flops_per_token as f64 / 4.0;
    let numbers = sizes.numbers as f64;
    match least <= 4.0 * numbers + f64::from(1 << 22) {
        true => Ok(()),
        false => {
            let got = format!("a model of {least:.0} weights at the least");
            Err(ConfigError::value("model", got, want(format!("one of {numbers:.0}"))))
        }
    }
}

/// Those of [`COMPANIONS`] that a folder has.
pub fn companions(folder: &Path) -> Vec<PathBuf> {
    COMPANIONS.iter().map(|name| folder.join(name)).filter(|path| path.exists()).collect()
}

/// The tokenizer that a run keeps beside its config.
fn kept_tokenizer(root: &Path) -> Option<PathBuf> {
    Some(root.join(TOKENIZER)).filter(|path| path.exists())
}

fn file_of(tokenizer: Option<&TokenizerConfig>) -> Option<PathBuf> {
    match tokenizer {
        Some(TokenizerConfig::File(path)) => Some(path.clone()),
        _ => None,
    }
}

/// Contents of a folder that [`store_model`] writes, besides the weights.
#[derive(Debug, Clone)]
pub struct ImportedModel<'a> {
    /// The model's config.
    pub config: &'a LanguageModelConfig,
    /// Its `tokenizer.json`, to be copied.
    pub tokenizer: Option<&'a Path>,
    /// Ids that end a text.
    pub end_ids: &'a [u32],
    /// Files of the names of [`COMPANIONS`], to be copied.
    pub companions: &'a [PathBuf],
    /// Bytes of a safetensors file with what the checkpoint it came from held besides; see
    /// [`Checkpoint::kept`].
    pub kept: Option<&'a [u8]>,
}

/// Makes `root` a run's folder whose model was not trained here: [`StoredModel::open`] opens it.
/// # Errors
/// [`FolderError`] if there is a run already and it is not to be overwritten, or writing fails.
pub fn store_model<B: Backend>(
    root: &Path,
    overwrite: bool,
    imported: &ImportedModel<'_>,
    model: &LanguageModel<B>,
) -> Result<(), FolderError> {
    let name = root.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let config = ImportedConfig {
        name,
        tokenizer: imported.tokenizer.map(|_| TOKENIZER.into()),
        end_ids: imported.end_ids.to_vec(),
        model: imported.config.clone(),
    };
    let arrival = Arrival {
        config: toml::to_string(&config).expect("a config is made of tables, numbers and strings"),
        tokenizer: imported.tokenizer,
        companions: imported.companions,
        kept: imported.kept,
    };
    write_arrival(root, overwrite, &arrival, |path| weights::save(model, Part::Whole, path))
}

/// A run, opened to be tested. Nothing in its folder changes.
#[derive(Debug)]
pub struct StoredRun {
    /// Its config, with what is to be evaluated in place of what it was trained on.
    pub run: RunConfig,
    /// The task of `run`.
    pub task: Box<dyn Task>,
    /// The model.
    pub model: StoredModel,
}

impl StoredRun {
    /// Opens the run in `root`. `task_from` is the config of another run, whose task is put in place of
    /// its own; then `overrides` are, which may change `task`, `evaluate` and `seed`.
    /// # Errors
    /// [`StoredError`] names the file or the key.
    pub fn open(
        root: &Path,
        which: Which,
        task_from: Option<&Path>,
        overrides: &[String],
    ) -> Result<Self, StoredError> {
        let model = StoredModel::open(root, which)?;
        let run = model.run(root, task_from, overrides)?;
        let task = run.task.build(run.seed).map_err(ConfigError::from)?;
        let trained = match &model.origin {
            Origin::Trained(trained) => {
                RunConfig { task: run.task.clone(), ..RunConfig::clone(trained) }
            }
            Origin::Imported(imported) => imported.run(run.task.clone()),
        };
        let allowed = RunConfig { seed: run.seed, evaluate: run.evaluate.clone(), ..trained };
        if let Some((key, got, there)) = run.difference(&allowed) {
            let want =
                format!("{there}, as it was trained; `task`, `evaluate` and `seed` may change");
            return Err(ConfigError::Value { key, got, want }.into());
        }
        let (ids, known) = (task.vocab(), model.vocab);
        match &model.origin {
            Origin::Trained(run) if run.base.is_none() && ids != known => {
                Err(StoredError::Vocabulary { task: ids, model: known })
            }
            // Released vocabularies are padded, and of any size.
            _ if ids > known => Err(StoredError::UnknownIds { task: ids, model: known }),
            _ => Ok(Self { run, task, model }),
        }
    }

    /// The model, on a device.
    /// # Errors
    /// [`StoredError`] if the checkpoint is not what the config describes.
    pub fn learner<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
    ) -> Result<Learner<B>, StoredError> {
        Ok(Learner { model: self.model.load(device)? })
    }

    /// Tests the model on the sets of `testing`.
    /// # Errors
    /// As [`learner`](Self::learner).
    pub fn evaluate<B: LinearAttentionBackend>(
        &self,
        testing: &Testing<'_>,
        writing: bool,
        device: &B::Device,
    ) -> Result<Evaluation, StoredError> {
        let learner = self.learner::<B>(device)?;
        Ok(match writing {
            true => testing.evaluate_writing(&learner, device),
            false => testing.evaluate(&learner, device),
        })
    }
}

impl StoredModel {
    /// The run to be tested: this model's, with what is put in place of its parts.
    fn run(
        &self,
        root: &Path,
        task_from: Option<&Path>,
        overrides: &[String],
    ) -> Result<RunConfig, StoredError> {
        let path = root.join(CONFIG);
        let other = match task_from {
            Some(other) => Some(RunConfig::read(other, overrides)?.task),
            None => None,
        };
        Ok(match (&self.origin, other) {
            (Origin::Trained(trained), None) => {
                let mut run = RunConfig::parsed(&path, table_of(trained), overrides)?;
                // Its own tokenizer is the one that it was trained with, wherever the first is now.
                let own = trained.task.tokenizer();
                if let (Some(tokenizer), Some(kept)) = (run.task.tokenizer_mut(), &self.tokenizer)
                    && own == Some(&*tokenizer)
                {
                    *tokenizer = TokenizerConfig::File(kept.clone());
                }
                run.checked()?
            }
            (Origin::Trained(trained), Some(task)) => {
                let own = RunConfig::parsed(&path, table_of(trained), &without_tasks(overrides))?;
                own.check_alone()?;
                RunConfig { task, ..own }
            }
            (Origin::Imported(imported), None) => {
                if overrides == without_tasks(overrides) {
                    return Err(StoredError::NoTask { path: root.into() });
                }
                RunConfig::from_table(&path, imported.table(), overrides)?
            }
            (Origin::Imported(imported), Some(task)) => {
                let mut table = imported.table();
                let task = Value::try_from(&task).expect("a task's config is a table");
                table.insert("task".to_string(), task);
                RunConfig::from_table(&path, table, &without_tasks(overrides))?
            }
        })
    }
}

fn table_of(run: &RunConfig) -> Table {
    Table::try_from(run).expect("a run config is a table")
}

/// Overrides that a run takes whose task comes from elsewhere.
fn without_tasks(overrides: &[String]) -> Vec<String> {
    overrides.iter().filter(|given| !given.trim_start().starts_with("task")).cloned().collect()
}
