//! A run that was trained before: its config, and the model of one of its checkpoints.

use crate::config::{ConfigError, RunConfig};
use crate::evaluate::{Evaluation, Testing};
use crate::folder::{Checkpoint, FolderError, Which, find_checkpoint};
use crate::learner::Learner;
use crate::train::build;
use burn::module::Module;
use burn::record::{BinFileRecorder, FullPrecisionSettings, Recorder};
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::Task;
use std::path::Path;

/// A trained run, opened to be looked at. Nothing in its folder changes.
#[derive(Debug)]
pub struct StoredRun {
    /// Its config, with what is to be evaluated in place of what it was trained on.
    pub run: RunConfig,
    /// The task of `run`.
    pub task: Box<dyn Task>,
    /// Where the model comes from.
    pub checkpoint: Checkpoint,
    /// Ids that the model knows.
    vocab: usize,
}

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
        let checkpoint = find_checkpoint(root, which)?;
        let path = root.join("config.toml");
        let trained = RunConfig::read(&path, &[])?;
        let run = match task_from {
            None => RunConfig::read(&path, overrides)?,
            Some(other) => {
                let task = RunConfig::read(other, overrides)?.task;
                RunConfig { task, ..RunConfig::read(&path, &without_tasks(overrides))? }
            }
        };
        let task = run.task.build(run.seed).map_err(ConfigError::from)?;
        let evaluate = run.evaluate.clone();
        let allowed =
            RunConfig { task: run.task.clone(), seed: run.seed, evaluate, ..trained.clone() };
        if let Some((key, got, there)) = run.difference(&allowed) {
            let want =
                format!("{there}, as it was trained; `task`, `evaluate` and `seed` may change");
            return Err(ConfigError::Value { key, got, want }.into());
        }
        let vocab = trained.task.build(trained.seed).map_err(ConfigError::from)?.vocab();
        if task.vocab() != vocab {
            return Err(StoredError::Vocabulary { task: task.vocab(), model: vocab });
        }
        Ok(Self { run, task, checkpoint, vocab })
    }

    /// The model, on a device.
    /// # Errors
    /// [`StoredError`] if the checkpoint is not what the config describes.
    pub fn learner<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
    ) -> Result<Learner<B>, StoredError> {
        let learner = build::<B>(&self.run, self.vocab, device)?;
        let path = self.checkpoint.model();
        let recorder = BinFileRecorder::<FullPrecisionSettings>::new();
        let record = Recorder::<B>::load(&recorder, path.clone(), device)
            .map_err(|e| self.checkpoint.corrupt(path, e))?;
        Ok(learner.load_record(record))
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

/// Overrides that a run takes whose task comes from elsewhere.
fn without_tasks(overrides: &[String]) -> Vec<String> {
    overrides.iter().filter(|given| !given.trim_start().starts_with("task")).cloned().collect()
}
