//! `eval`: a trained run, tested again: on its own task, on another, or on longer sequences.

use crate::device::{self, Choice, Job};
use crate::train::guarded;
use crate::{BAD_INPUT, FAILED, fail, output};
use linattn_tasks::Split;
use linattn_trainer::{Evaluation, StoredError, StoredRun, Testing, TrainBackend, Which};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Tests a trained model on any task or length. Long sequences are worked off in parts, with the
/// recurrent state between them, so that memory does not grow with their length.
#[derive(Debug, clap::Parser)]
#[command(name = "eval", version)]
pub struct EvalArgs {
    /// The folder that `train` wrote
    #[arg(long)]
    run: PathBuf,
    /// Puts a value in place of the run's: 'task.mqar.test=[{ length = 512, pairs = 64, examples = 1000 }]'
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Takes the task from this run config instead
    #[arg(long, value_name = "CONFIG")]
    task_from: Option<PathBuf>,
    /// Which checkpoint: best, last, or a step
    #[arg(long, default_value = "best", value_parser = checkpoint)]
    checkpoint: Which,
    /// auto, cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Which splits, with commas between: train, validation, test
    #[arg(long, default_value = "test", value_delimiter = ',', value_parser = split)]
    split: Vec<Split>,
    /// The most examples of each set
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    examples: Option<u64>,
    /// Lets the model write its answers, and scores what it writes
    #[arg(long)]
    generate: bool,
    /// Also writes the figures to this file, as JSON; `-` prints them in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn checkpoint(text: &str) -> Result<Which, String> {
    match text {
        "best" => Ok(Which::Best),
        "last" => Ok(Which::Last),
        text => text.parse().map(Which::Step).map_err(|_| "best, last or a step".to_string()),
    }
}

pub(crate) fn split(text: &str) -> Result<Split, String> {
    match text {
        "train" => Ok(Split::Train),
        "validation" => Ok(Split::Validation),
        "test" => Ok(Split::Test),
        _ => Err("train, validation or test".to_string()),
    }
}

/// Runs the command and gives its exit code: 0 done, 1 failed, 2 bad input.
pub fn eval(args: EvalArgs) -> ExitCode {
    let from = args.task_from.as_deref();
    let stored = match StoredRun::open(&args.run, args.checkpoint, from, &args.overrides) {
        Ok(stored) => stored,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    if let Err(e) = can_be_tested(&args, &stored) {
        return fail(BAD_INPUT, &e);
    }
    let choice = match device::choose(&args.device) {
        Ok(choice) => choice,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    choice.advise();
    let started = Instant::now();
    let job = Evaluate { args: &args, stored: &stored };
    let evaluation = match guarded(&choice, job) {
        Ok(Ok(evaluation)) => evaluation,
        Ok(Err(e)) => return fail(BAD_INPUT, &e),
        Err(code) => return code,
    };
    let report = report(&args, &stored, &choice, evaluation, started.elapsed().as_secs_f64());
    if args.json.as_deref() == Some(Path::new("-")) {
        return output::show(&format!("{report:#}\n"));
    }
    // The file first: there may be nobody who reads the rest.
    if let Some(path) = &args.json
        && let Err(e) = std::fs::write(path, format!("{report:#}\n"))
    {
        return fail(FAILED, &format!("can't write {}: {e}", path.display()));
    }
    output::show(&table(&report))
}

/// Refuses what would end in an empty table.
fn can_be_tested(args: &EvalArgs, stored: &StoredRun) -> Result<(), String> {
    let task = stored.task.as_ref();
    for &split in &args.split {
        let sets = task.sets(split);
        if sets.is_empty() {
            return Err(format!("`--split`: the task has no sets of {split:?}").to_lowercase());
        }
        let asks = |set: usize| task.question(split, set, 0).is_some();
        if args.generate && !(0..sets.len()).any(asks) {
            let why = "`--generate`: this task asks nothing that a model could write an answer to; \
                       leave it out";
            return Err(why.to_string());
        }
    }
    let whole = stored.run.model.head == linattn::nn::HeadKind::AutoEncoder;
    if args.generate && whole {
        return Err("`--generate`: an auto-encoder cannot write; leave it out".to_string());
    }
    Ok(())
}

struct Evaluate<'a> {
    args: &'a EvalArgs,
    stored: &'a StoredRun,
}

impl Job for Evaluate<'_> {
    type Output = Result<Evaluation, StoredError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let Self { args, stored } = self;
        let mut testing = Testing::new(&stored.run, stored.task.as_ref(), &args.split).on(devices);
        testing.limit = args.examples;
        stored.evaluate::<B::InnerBackend>(&testing, args.generate, &devices[0])
    }
}

fn report(
    args: &EvalArgs,
    stored: &StoredRun,
    choice: &Choice,
    evaluation: Evaluation,
    seconds: f64,
) -> Value {
    json!({
        "run": args.run,
        "name": stored.run.name,
        "checkpoint": stored.model.checkpoint.position.step,
        "seed": stored.run.seed,
        "task": stored.run.task,
        "generated": args.generate,
        "examples": args.examples,
        "score_name": stored.task.score_name(),
        "metrics": evaluation.metrics,
        "device": choice.to_string(),
        "seconds": seconds,
        "version": env!("CARGO_PKG_VERSION"),
    })
}

/// One line a metric, under a line for each set.
fn table(report: &Value) -> String {
    let mut text = format!(
        "{} after {} steps, on {}, {:.1} s\n",
        report["name"].as_str().unwrap_or("?"),
        report["checkpoint"],
        report["device"].as_str().unwrap_or("?"),
        report["seconds"].as_f64().unwrap_or(f64::NAN),
    );
    let mut last = "";
    for (key, value) in report["metrics"].as_object().into_iter().flatten() {
        let (set, metric) = key.rsplit_once('/').unwrap_or(("", key));
        if set != last {
            text.push_str(&format!("{set}\n"));
            last = set;
        }
        let value = value.as_f64().unwrap_or(f64::NAN);
        text.push_str(&format!("  {metric:<28} {value:.4}\n"));
    }
    text
}
