//! Random calls of the recurrences on a device, outputs and gradients, against the same in f64.
//!
//! `cargo run --release --example fuzz --features cuda -- --device cuda --cases 10000 --seed 1`
//!
//! A case is a function of its own seed: the family, its gates, corrections and reads, sizes, the type of
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

use burn::tensor::DType;
use case::Case;
use clap::Parser;
use linattn_cli::device::{self, Job};
use linattn_sweep::Shard;
use linattn_trainer::TrainBackend;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use verdict::Tally;

#[path = "../../tests/call.rs"]
mod call;
mod case;
mod problem;
mod verdict;

/// Random calls of the recurrences against f64.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// auto, cpu (or flex), cuda:N, rocm:N, vulkan:N (or wgpu) or metal:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Cases to try
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    cases: u64,
    /// Seed of the first case; the next has the next
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Draws widths of keys and values from 1 to 256
    #[arg(long, conflicts_with = "widths")]
    free_widths: bool,
    /// Widths of keys and values to draw from, such as 64x64,128x256
    #[arg(long, value_delimiter = ',', value_parser = widths)]
    widths: Vec<(usize, usize)>,
    /// Runs the cases of one part of the kernels, I/N
    #[arg(long, default_value = "1/1")]
    shard: Shard,
    /// Types of q, k and v to draw from: f32, bf16, f16
    #[arg(long, value_delimiter = ',', default_values_t = [String::from("f32")])]
    types: Vec<String>,
    /// Runs every case as sequences of different lengths in one row
    #[arg(long)]
    packed: bool,
    /// The most sequences in a batch
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    batch: u64,
}

/// Widths of keys and values, such as 64x128.
fn widths(text: &str) -> Result<(usize, usize), String> {
    let (k, v) = text.split_once('x').ok_or("it has to be two widths, such as 64x128")?;
    let width = |text: &str| match text.parse() {
        Ok(width @ 1..=256) => Ok(width),
        _ => Err(format!("a width is 1 to 256, not `{text}`")),
    };
    Ok((width(k)?, width(v)?))
}

impl Args {
    fn dtypes(&self) -> Result<Vec<DType>, String> {
        let dtype = |name: &String| match name.as_str() {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::BF16),
            "f16" => Ok(DType::F16),
            other => Err(format!("`--types` has `{other}`; it has to be of f32, bf16 and f16")),
        };
        self.types.iter().map(dtype).collect()
    }

    /// The command that runs the case of `seed` alone.
    fn again(&self, seed: u64) -> String {
        let named: Vec<String> = self.widths.iter().map(|(k, v)| format!("{k}x{v}")).collect();
        let widths = match self.free_widths {
            true => " --free-widths".into(),
            false if named.is_empty() => String::new(),
            false => format!(" --widths {}", named.join(",")),
        };
        let features = if cfg!(feature = "cuda") { " --features cuda" } else { "" };
        let packed = if self.packed { " --packed" } else { "" };
        let (device, types, batch) = (&self.device, self.types.join(","), self.batch);
        format!(
            "cargo run --release --example fuzz{features} -- --device {device} --types {types} \
             --batch {batch} --cases 1 --seed {seed}{widths}{packed}"
        )
    }
}

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
            if tally.cases.is_multiple_of(100) {
                eprintln!("{}", tally.line(self.args));
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
