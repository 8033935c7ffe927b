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

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: memory::Allocator = memory::Allocator;

/// Someone's mistake, said in one line; exit code 2.
pub(crate) const BAD_INPUT: u8 = 2;
/// The run itself failed; exit code 1.
pub(crate) const FAILED: u8 = 1;
/// Stopped by Ctrl-C, with everything saved; exit code 130, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;

pub(crate) fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    output::note(&format!("error: {error}"));
    ExitCode::from(code)
}
