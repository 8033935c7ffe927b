//! The commands' common part: arguments to jobs, devices to backends, errors to exit codes.
//!
//! Backends are chosen here and nowhere else, and generic code is made for them once.
#![deny(clippy::print_stdout, clippy::print_stderr)] // `output` writes, and cannot panic

mod chat;
mod companions;
mod convert;
mod data;
pub mod device;
mod doctor;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod driver;
mod eval;
mod exit;
mod generate;
mod gpus;
mod manual;
mod memory;
mod output;
mod page;
mod report;
mod sampling;
mod signals;
mod sweep;
mod train;

pub use convert::{ConvertArgs, convert};
pub use data::{DataArgs, data};
pub use doctor::{DoctorArgs, doctor};
pub use eval::{EvalArgs, eval};
pub use generate::{GenerateArgs, generate};
pub use manual::{run, run_from};
pub use report::{ReportArgs, report};
pub use sweep::{SweepArgs, sweep};
pub use train::{TrainArgs, train};

pub(crate) use exit::{BAD_INPUT, FAILED, INTERRUPTED};
pub(crate) use output::fail;

#[global_allocator]
static ALLOCATOR: memory::Allocator = memory::Allocator;
