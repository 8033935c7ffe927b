//! `sweep`: one TOML file, many runs.

use crate::device::{Choice, Kind};
use crate::signals::{self, Asked};
use crate::train::{Train, commit, device_failure, is_lost};
use crate::{BAD_INPUT, FAILED, INTERRUPTED, device, fail, output};
use linattn_sweep::{
    Assignment, ChildProcess, Done, Ending, Only, Plan, Runner, Shard, Stop, Sweep, SweepError,
    SweepJob, Warmed, dry_run, finished, has_checkpoint,
};
use linattn_trainer::{
    Interrupter, Panics, ProgressStyle, RunConfig, Start, Status, TrainJob, note_panic,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use toml::{Table, Value};

/// Does every run of a grid that has no row yet, and adds a row to the sweep's folder for each.
#[derive(Debug, clap::Parser)]
#[command(name = "sweep", version)]
pub struct SweepArgs {
    /// The sweep's TOML file; its folder gets rows.csv
    #[arg(long)]
    config: PathBuf,
    /// Devices with commas between; each does runs of its own: cpu, or cuda:0,cuda:1
    #[arg(long, default_value = "auto", value_delimiter = ',')]
    devices: Vec<String>,
    /// Runs at once on one device; 2 on the CPU, where each gets its share of the cores, 1 on a GPU,
    /// where several are threads of this process. Rows are the same with any number
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Runs on a GPU are processes too: under NVIDIA's Multi-Process Service, which has to be started
    /// before, they share it far better than threads do, and want two cores each
    #[arg(long)]
    processes: bool,
    /// Folder that gets a folder with the runs
    #[arg(long, default_value = "runs")]
    out: PathBuf,
    /// Only every N-th run from the I-th: I/N, one for each of N machines
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Only runs with this value of a key of the grid or an axis, for instance seed=0; given twice for
    /// one key, either
    #[arg(long, value_name = "KEY=VALUE")]
    only: Vec<String>,
    /// Does runs again that failed before, from their start
    #[arg(long)]
    retry_failed: bool,
    /// Compiles what the runs to do need and keeps it, and ends: each model takes two steps and is tested, as many at
    /// once as `--jobs` says; no rows are written
    #[arg(long, conflicts_with_all = ["join", "dry_run", "retry_failed"])]
    warm: bool,
    /// Adds the rows of another machine's rows.csv, and ends
    #[arg(long, value_name = "ROWS.CSV")]
    join: Vec<PathBuf>,
    /// Lists the runs with their times, as far as others of their kind were measured, and ends
    #[arg(long)]
    dry_run: bool,
    /// With `--dry-run`: one JSON object
    #[arg(long, requires = "dry_run")]
    json: bool,
}

/// Runs are of this program, and therefore of one commit with it.
enum TrainRuns {
    /// Each in a process of its own.
    Processes(ChildProcess),
    /// Each in a thread of this process, or in one of its own once this one has lost a device. Panics
    /// count from the sweep's beginning.
    Threads(ChildProcess, Panics),
}

impl Runner for TrainRuns {
    fn resolve(&self, base: &Path, overrides: &[(String, Value)]) -> Result<Table, String> {
        let overrides: Vec<String> =
            overrides.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let run = RunConfig::read(base, &overrides).map_err(|e| e.to_string())?;
        toml::from_str(&run.to_toml()).map_err(|e| e.to_string())
    }

    fn run(&self, run: &Assignment, stop: &Stop) -> Result<Ending, String> {
        match self {
            Self::Processes(child) => child.run(run, stop),
            Self::Threads(child, panics) if is_lost(&panics.all()) => child.run(run, stop),
            Self::Threads(..) => run_here(run, stop),
        }
    }
}

/// Does a run in this thread; takes over the result of one that ended unseen, and goes on with one that
/// was cut off.
fn run_here(run: &Assignment, stop: &Stop) -> Result<Ending, String> {
    let folder = run.out.join(run.id);
    if let Some(summary) = finished(&folder).filter(|_| !run.anew) {
        return Ok(Ending::Done(summary));
    }
    let name = run.out.join(format!("{}.toml", run.id));
    let resume = has_checkpoint(&folder) && !run.anew;
    let choice = device::choose(run.device).map_err(|e| e.to_string())?;
    let job = TrainJob {
        run: RunConfig::from_table(&name, run.config.clone(), &[]).map_err(|e| e.to_string())?,
        output: run.out.to_path_buf(),
        start: if resume { Start::Resume } else { Start::Overwrite },
        device: choice.to_string(),
        commit: commit(),
        progress: ProgressStyle::Quiet,
        stop: Interrupter::new(),
    };
    let panics = Panics::from_now();
    let ended = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| pass_on(stop, &job.stop, &ended));
        let outcome = catch_unwind(AssertUnwindSafe(|| device::dispatch(&choice, Train(&job))));
        ended.store(true, Ordering::SeqCst);
        outcome
    });
    match outcome {
        Ok(Ok(Ok(outcome))) if outcome.status == Status::Interrupted => Ok(Ending::Interrupted),
        Ok(Ok(Ok(_))) => finished(&folder)
            .map(Ending::Done)
            .ok_or_else(|| format!("it ended well and left no summary in {}", folder.display())),
        Ok(Ok(Err(e))) => Err(e.to_string()),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => {
            let kept = "--retry-failed does the run again";
            Err(device_failure(&choice, &panics.all(), kept))
        }
    }
}

/// Asks a run to stop as soon as the sweep's runs should, until it has ended.
fn pass_on(stop: &Stop, run: &Interrupter, ended: &AtomicBool) {
    while !ended.load(Ordering::SeqCst) {
        if stop.interrupt() {
            return run.stop(Some("the sweep stops"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs the command and gives its exit code: 0 done, 1 runs failed, 2 bad input, 130 stopped before
/// the end.
pub fn sweep(args: SweepArgs) -> ExitCode {
    let runner = match this_program() {
        Ok(program) => {
            TrainRuns::Processes(ChildProcess { program, arguments: vec!["train".into()] })
        }
        Err(e) => return fail(FAILED, &format!("can't find this program's own file: {e}")),
    };
    let planned = Sweep::read(&args.config).and_then(|sweep| {
        let plan = sweep.plan(&runner)?;
        let only = Only::new(&args.only, &plan.runs)?;
        Ok((sweep, plan, only))
    });
    let (sweep, plan, only) = match planned {
        Ok(planned) => planned,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    match (args.join.is_empty(), args.dry_run) {
        (false, _) => join(&args.join, &sweep, &plan),
        (true, true) => show_plan(&sweep, &plan, &only, args.json),
        (true, false) => start(args, &sweep, &plan, only, runner),
    }
}

fn join(files: &[PathBuf], sweep: &Sweep, plan: &Plan) -> ExitCode {
    let mut said = String::new();
    for file in files {
        match sweep.join(plan, file) {
            Ok(new) => said.push_str(&format!("{new} rows of {}\n", file.display())),
            Err(e) => {
                let _the_error_counts = output::write(&said);
                return fail(BAD_INPUT, &e);
            }
        }
    }
    output::show(&said)
}

/// The program's file. It may be built anew while a sweep goes on; Linux still finds the one that
/// started.
fn this_program() -> std::io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

fn show_plan(sweep: &Sweep, plan: &Plan, only: &Only, json: bool) -> ExitCode {
    let shown = sweep.rows(plan).and_then(|rows| {
        rows.repair.iter().for_each(|repair| output::note(repair));
        dry_run(sweep, plan, &rows.rows, only)
    });
    match shown {
        Ok(ahead) if json => output::show(&format!("{:#}\n", serde_json::json!(ahead))),
        Ok(ahead) => output::show(&ahead.to_string()),
        Err(e) => fail(BAD_INPUT, &e),
    }
}

fn start(
    args: SweepArgs,
    sweep: &Sweep,
    plan: &Plan,
    only: Only,
    processes: TrainRuns,
) -> ExitCode {
    let choices: Result<Vec<_>, _> = args.devices.iter().map(|name| device::choose(name)).collect();
    let choices = match choices {
        Ok(choices) => choices,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    choices.iter().for_each(Choice::advise);
    let on_processor = choices.iter().all(|choice| choice.kind == Kind::Cpu);
    let jobs = args.jobs.map_or(if on_processor { 2 } else { 1 }, usize::from);
    let runner = match processes {
        TrainRuns::Processes(child) if !on_processor && jobs > 1 && !args.processes => {
            threads_of_this_process(child)
        }
        processes => processes,
    };
    let threads = on_processor.then(|| share_of_cores(jobs * args.devices.len()));
    let stop = Stop::default();
    if let Err(e) = signals::watch(on_signal(&stop)) {
        return fail(FAILED, &format!("can't watch for Ctrl-C: {e}"));
    }
    let job = SweepJob {
        sweep,
        plan,
        devices: args.devices,
        jobs,
        threads,
        shard: args.shard.unwrap_or(Shard::WHOLE),
        only,
        out: args.out.join(sweep.name()),
        retry_failed: args.retry_failed,
        commit: commit(),
        stop,
    };
    let ended = match args.warm {
        true => {
            let warmed = job.warm(&runner, &mut output::note);
            warmed.map(|warmed| conclude_warming(&job, warmed, on_processor))
        }
        false => job.run(&runner, &mut output::note).map(|done| conclude(&job, done)),
    };
    match ended {
        Ok(code) => code,
        // A disk that is full is nobody's mistake.
        Err(e @ SweepError::Io { doing: "write", .. }) => fail(FAILED, &e),
        Err(e) => fail(BAD_INPUT, &e),
    }
}

fn conclude_warming(
    job: &SweepJob,
    Warmed { models, done, failed }: Warmed,
    on_processor: bool,
) -> ExitCode {
    let kept = match on_processor {
        true => "a processor compiles nothing that could be kept",
        false => "what they compiled is kept for GPUs of this model",
    };
    let shown = output::show(&format!("{done} of {models} models took their steps; {kept}\n"));
    match (failed, job.stop.no_more() && done + failed < models) {
        (_, true) => ExitCode::from(INTERRUPTED),
        (0, false) => shown,
        (_, false) => ExitCode::from(FAILED),
    }
}

/// Threads of this process, whose runs have to know of panics in each other's.
fn threads_of_this_process(child: ChildProcess) -> TrainRuns {
    std::panic::set_hook(Box::new(note_panic));
    TrainRuns::Threads(child, Panics::from_now())
}

/// Cores for each of so many runs at once, 1 at the least.
fn share_of_cores(runs: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / runs).max(1)
}

/// The first Ctrl-C lets runs end and starts no more, the second interrupts them, saved; the third
/// ends the program at once. A closed terminal interrupts them too.
fn on_signal(stop: &Stop) -> impl FnMut(Asked) + Send + 'static {
    let stop = stop.clone();
    move |asked| {
        while asked == Asked::End && !stop.interrupt() {
            stop.press();
        }
        if asked == Asked::End {
            return;
        }
        match stop.press() {
            0 => output::note(
                "no more runs start; those at work go on to their end. Once more to stop them",
            ),
            1 => output::note(
                "stopping the runs at work; they are saved. Once more to leave them alone",
            ),
            _ => std::process::exit(INTERRUPTED.into()),
        }
    }
}

fn conclude(job: &SweepJob, done: Done) -> ExitCode {
    let Done { runs, skipped, failed_before, finished, failed, elsewhere } = done;
    let folder = job.sweep.folder.display();
    let rows = skipped + finished + elsewhere;
    let before = match failed_before {
        0 => String::new(),
        count => format!(" and {count} before, which --retry-failed does again"),
    };
    let shown = output::show(&format!(
        "{rows} of {runs} runs have a row, {failed} failed now{before}; report {folder} makes \
         tables\n"
    ));
    match (failed + failed_before, job.stop.no_more() && !done.complete()) {
        (_, true) => ExitCode::from(INTERRUPTED),
        (0, false) => shown,
        (_, false) => ExitCode::from(FAILED),
    }
}
