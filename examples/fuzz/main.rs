//! Random calls of the recurrences on a device, outputs and gradients, against the same in f64.
//!
//! `cargo run --release --example fuzz --features cuda -- --device cuda --cases 10000 --seed 1`
//!
//! A case is a function of its own seed: the family, its decays, corrections and reads, sizes, the type of
//! q, k and v, and how the sequence is run: whole with every gradient, in pieces that hand the
//! state over, or token by token; with `--packed`, sequences of different lengths in one row. Widths of keys
//! and values come from 24 pairs, since a GPU compiles a pair of widths for seconds; `--widths` names others,
//! `--free-widths` draws them all. An error is RMS over the RMS of the truth, or of what the truth cancels:
//! `verdict.rs` says when it counts as right.
//!
//! `--shard 1/4` runs the cases of a quarter of the kernels, so that four processes compile no kernel twice.
//!
//! The last line counts cases and numbers and says the largest error. A wrong case is shown with the
//! command that repeats it, and makes the exit code 1.

use args::Args;
use burn::tensor::DType;
use case::Case;
use clap::Parser;
use linattn_cli::device::{self, Job};
use linattn_trainer::TrainBackend;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use verdict::Tally;

mod args;
#[path = "../../crates/linattn/tests/library/call.rs"]
mod call;
mod case;
mod problem;
mod verdict;

fn main() -> ExitCode {
    let mut args = Args::parse();
    if args.device == "flex" {
        args.device = "cpu".into();
    }
    let run = || {
        let dtypes = args.dtypes()?;
        let choice = device::choose(&args.device).map_err(|e| e.to_string())?;
        eprintln!("on {choice}");
        device::dispatch(&choice, Fuzz { args: &args, dtypes }).map_err(|e| e.to_string())
    };
    match run() {
        Ok(tally) => {
            println!("{}", tally.line(&args));
            if tally.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

struct Fuzz<'a> {
    args: &'a Args,
    dtypes: Vec<DType>,
}

impl Job for Fuzz<'_> {
    type Output = Tally;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Tally {
        let mut tally = Tally::default();
        let mut spoken = Instant::now();
        // A panic is a wrong case, and is shown as one.
        std::panic::set_hook(Box::new(|_| {}));
        for seed in self.args.seed..self.args.seed.saturating_add(self.args.cases) {
            let case = Case::draw(seed, self.args, &self.dtypes);
            if !case.is_of(self.args.shard) {
                continue;
            }
            let problem = case.problem();
            let found = catch_unwind(AssertUnwindSafe(|| case.run::<B>(&problem, &devices[0])));
            let found = found.unwrap_or_else(|panic| Err(said(panic.as_ref())));
            if let Err(why) = tally.add(&case, &problem, found) {
                println!("WRONG {case:?}\n  {why}\n  again: {}", self.args.again(seed));
            }
            // A process that is stopped has said what it had done.
            if spoken.elapsed() >= Duration::from_secs(30) {
                eprintln!("{}", tally.line(self.args));
                spoken = Instant::now();
            }
        }
        drop(std::panic::take_hook());
        tally
    }
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
    format!("panic: {}", text.unwrap_or_default())
}
