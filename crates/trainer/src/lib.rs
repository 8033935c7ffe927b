//! Trains linattn models on linattn tasks, from one TOML file to a folder with everything a run
//! leaves: resolved config, metrics, checkpoints, summary and learning curve.
//!
//! A run is a pure function of its config on one device: weights, data, order and dropout come from
//! `(seed, purpose, index)` and nothing that happened to be drawn before, so that a run that was cut
//! off goes on to the same bits.
#![deny(missing_docs)]

mod config;
mod curve;
mod folder;
mod learner;
mod progress;
mod schedule;
mod train;

pub use burn_train::Interrupter;
pub use config::{
    AdamWConfig, CheckpointConfig, ConfigError, Decay, EvaluateConfig, Order, Per, RunConfig,
    ScheduleConfig, Shape, TrainConfig,
};
pub use curve::{Curve, CurveError};
pub use folder::{FolderError, Position, Start, read_summary};
pub use learner::{Answers, HostAnswers, Learner, TensorBatch, TrainBackend, TrainLoss};
pub use progress::{Progress, ProgressStyle};
pub use schedule::{Pick, Plan, learning_rate};
pub use train::{
    DryRun, Evaluation, Outcome, Status, TrainError, TrainJob, build, dry_run, evaluate,
    run_folder, train,
};
