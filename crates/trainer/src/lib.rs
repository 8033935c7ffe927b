//! Trains linattn models on linattn tasks, from one TOML file to a folder with everything a run
//! leaves: resolved config, metrics, checkpoints, summary and learning curve.
//!
//! A run is a pure function of its config on one device: weights, data, order and dropout come from
//! `(seed, purpose, index)` and nothing that happened to be drawn before, so that a run that was cut
//! off goes on to the same bits. Gradients, norms and losses are added in a fixed order, on GPUs too.
#![deny(missing_docs)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // they panic where nobody reads

mod base;
mod bounds;
mod checkpoint;
mod config;
mod config_error;
mod config_file;
mod cost;
#[cfg_attr(not(feature = "dashboard"), path = "no_dashboard.rs")]
mod dashboard;
mod evaluate;
mod folder;
mod folder_error;
mod health;
mod learner;
mod lock;
mod optimizer;
mod progress;
mod schedule;
mod step;
mod stored;
#[cfg(feature = "dashboard")]
mod terminal;
mod train;
mod weights;

pub use checkpoint::{Checkpoint, Position, Which};
pub use config::{
    AdamWConfig, BaseConfig, CheckpointConfig, ConfigError, EvaluateConfig, Order, Per, Precision,
    RunConfig, ScheduleConfig, Shape, TrainConfig, WeightDecay,
};
pub use cost::{DryRun, dry_run, host_memory, least_memory};
pub use dashboard::{Interrupter, dashboard_is_up, restore_terminal};
pub use evaluate::{Evaluation, Testing};
pub use folder::{COMPANIONS, Start, read_summary};
pub use folder_error::FolderError;
pub use health::{Panics, note_panic};
pub use learner::{Answers, HostAnswers, Learner, TensorBatch, gradients};
pub use linattn::backend::TrainBackend;
pub use optimizer::Optimizer;
pub use progress::{Progress, ProgressStyle};
pub use schedule::{BatchIndices, Plan, learning_rate};
pub use step::{Step, StepNumbers};
pub use stored::{ImportedModel, StoredError, StoredModel, StoredRun, companions, store_model};
pub use train::{Outcome, Status, TrainError, TrainJob, build, run_folder, train};

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
