//! `train`: one TOML file, one run.

use crate::device::{self, Choice, Job, Kind};
use crate::signals::{self, Asked};
use crate::{BAD_INPUT, FAILED, INTERRUPTED, fail, memory, output};
use linattn_sweep::{has_checkpoint, write_events};
use linattn_trainer::{
    DryRun, Interrupter, Outcome, Panics, ProgressStyle, RunConfig, Start, Status, StoredError,
    TrainBackend, TrainError, TrainJob, dashboard_is_up, dry_run, host_memory, least_memory,
    note_panic, restore_terminal, run_folder, train as run_training,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Trains a model from a TOML file; writes a folder with its config, metrics, checkpoints, summary
/// and learning curve.
#[derive(Debug, clap::Parser)]
#[command(name = "train", version)]
pub struct TrainArgs {
    /// The run's TOML file
    #[arg(long)]
    config: PathBuf,
    /// Puts a value in place of the file's: optimizer.learning_rate=3e-3, model.layers.0.repeat=4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// auto, cpu, cuda:N, rocm:N, vulkan:N, metal:N, or several of one kind: cuda:0,cuda:1
    #[arg(long, default_value = "auto")]
    device: String,
    /// Folder that gets one folder a run
    #[arg(long, default_value = "runs")]
    out: PathBuf,
    /// Goes on with the run in that folder, to the same bits
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Deletes the run in that folder first
    #[arg(long)]
    overwrite: bool,
    /// Prints the resolved config and ends
    #[arg(long)]
    print_config: bool,
    /// Builds model and first batch, prints what the run would cost, and ends
    #[arg(long)]
    dry_run: bool,
    /// Display: lines, or a dashboard on a terminal if it was built in
    #[arg(long, value_enum, default_value_t = Show::Auto)]
    progress: Show,
    /// Prints the summary in the end, or the cost that `--dry-run` finds, as one JSON object
    #[arg(long, conflicts_with = "print_config")]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Show {
    /// A dashboard on a terminal if it was built in, lines elsewhere
    Auto,
    /// A dashboard, of a build with `--features dashboard`
    Tui,
    /// Lines
    Lines,
    /// Nothing
    Quiet,
}

impl From<Show> for ProgressStyle {
    fn from(show: Show) -> Self {
        match show {
            Show::Auto => ProgressStyle::Auto,
            Show::Tui => ProgressStyle::Tui,
            Show::Lines => ProgressStyle::Lines,
            Show::Quiet => ProgressStyle::Quiet,
        }
    }
}

/// Runs the command and gives its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.
pub fn train(args: TrainArgs) -> ExitCode {
    if args.progress == Show::Tui && !cfg!(feature = "dashboard") {
        let why = "`--progress` is tui, and this program was built without `--features dashboard`; \
                   auto, lines and quiet are there";
        return fail(BAD_INPUT, &why);
    }
    let read = match args.resume {
        true => RunConfig::read_to_resume(&args.config, &args.overrides, &args.out),
        false => RunConfig::read(&args.config, &args.overrides),
    };
    let run = match read {
        Ok(run) => run,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    if args.print_config {
        return output::show(&run.to_toml());
    }
    let choice = match device::choose(&args.device) {
        Ok(choice) => choice,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    if let Err(e) = fits_in_memory(&run, &choice) {
        return fail(BAD_INPUT, &e);
    }
    match args.dry_run {
        true => show_cost(run, &choice, args.json),
        false => start(args, run, &choice),
    }
}

/// Refuses a run that this computer's memory cannot hold: the allocator would end the program
/// without a word about why. GPUs say so themselves of what is on them.
fn fits_in_memory(run: &RunConfig, choice: &Choice) -> Result<(), String> {
    let Some(free) = memory::free() else { return Ok(()) };
    let (host, remedy) = host_memory(run).map_err(|e| e.to_string())?;
    if host > free {
        return Err(format!(
            "the run's data need {:.1} GiB of memory at the least, and {:.1} GiB are free; {remedy} \
             would do",
            memory::gibibytes(host),
            memory::gibibytes(free)
        ));
    }
    let needed = least_memory(run).map_err(|e| e.to_string())?;
    if choice.kind != Kind::Cpu || needed <= free {
        return Ok(());
    }
    Err(format!(
        "the run needs {:.1} GiB of memory at the least, and {:.1} GiB are free; a smaller \
         `model.d_model`, `model.layers` or `train.batch_size`, or a larger `train.accumulate`, \
         would do",
        memory::gibibytes(needed),
        memory::gibibytes(free)
    ))
}

fn start(args: TrainArgs, run: RunConfig, choice: &Choice) -> ExitCode {
    memory::advise(
        "--resume goes on from the last checkpoint, if there is one, where more can be had; a run \
         with a smaller train.batch_size or a larger train.accumulate needs less",
    );
    let stop = Interrupter::new();
    if let Err(e) = signals::watch(on_signal(&stop)) {
        return fail(FAILED, &format!("can't watch for Ctrl-C: {e}"));
    }
    let folder = run_folder(&args.out, &run);
    if args.progress != Show::Quiet {
        choice.advise();
        output::note(&format!("{} on {choice}, into {}", run.name, folder.display()));
    }
    let job = TrainJob {
        run,
        output: args.out,
        start: match (args.resume, args.overwrite) {
            (true, _) => Start::Resume,
            (_, true) => Start::Overwrite,
            _ => Start::New,
        },
        device: choice.to_string(),
        commit: commit(),
        progress: args.progress.into(),
        stop,
    };
    match guarded_run(choice, Train(&job), || kept(&folder)) {
        Ok(Ok(outcome)) => match job.run.tensorboard.then(|| write_events(&outcome.folder)) {
            Some(Err(e)) => fail(FAILED, &e),
            _ => conclude(&outcome, args.json),
        },
        Ok(Err(e)) => fail(if e.is_input() { BAD_INPUT } else { FAILED }, &e),
        Err(code) => code,
    }
}

/// The checkpoints that a run can go on from, in words.
fn kept(folder: &Path) -> String {
    match has_checkpoint(folder) {
        true => {
            format!("--resume goes on from the last of {}", folder.join("checkpoints").display())
        }
        false => "there is no checkpoint yet, and --overwrite starts the run again".into(),
    }
}

/// The first Ctrl-C ends the run after its step, saved; the second ends the program at once. A closed
/// terminal is a first Ctrl-C, however often it is told.
fn on_signal(stop: &Interrupter) -> impl FnMut(Asked) + Send + 'static {
    let (stop, mut pressed) = (stop.clone(), false);
    move |asked| {
        stop.stop(Some("a signal"));
        if pressed && asked == Asked::Key {
            restore_terminal();
            std::process::exit(INTERRUPTED.into());
        }
        if !pressed && !dashboard_is_up() {
            output::note("stopping after this step and saving it; Ctrl-C once more stops at once");
        }
        pressed |= asked == Asked::Key;
    }
}

fn conclude(outcome: &Outcome, json: bool) -> ExitCode {
    let summary = &outcome.summary;
    let folder = outcome.folder.display();
    let interrupted = outcome.status == Status::Interrupted;
    let text = match (json, interrupted) {
        (true, _) => format!("{summary:#}\n"),
        (false, true) => {
            format!("interrupted at step {}; --resume goes on: {folder}\n", summary["steps"])
        }
        (false, false) => format!(
            "{}: test {} {:.4} after {} steps, {:.0} s; curve and summary in {folder}\n",
            outcome.status.name().replace('_', " "),
            summary["score_name"].as_str().unwrap_or("score"),
            summary["score"].as_f64().unwrap_or(f64::NAN),
            summary["steps"],
            summary["wall_seconds"].as_f64().unwrap_or(f64::NAN),
        ),
    };
    match (output::show(&text), interrupted) {
        (_, true) => ExitCode::from(INTERRUPTED),
        (shown, false) => shown,
    }
}

pub(crate) struct Train<'a>(pub(crate) &'a TrainJob);

impl Job for Train<'_> {
    type Output = Result<Outcome, TrainError>;

    /// A GPU's memory is given back, whatever comes of the run: CubeCL keeps the buffers of a thread that trained, and a
    /// sweep's next run in that thread wants other sizes.
    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let trained = catch_unwind(AssertUnwindSafe(|| run_training::<B>(self.0, devices)));
        devices.iter().for_each(|device| B::memory_cleanup(device));
        trained.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

struct Cost(RunConfig);

impl Job for Cost {
    type Output = Result<DryRun, StoredError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        dry_run::<B::InnerBackend>(&self.0, &devices[0])
    }
}

fn show_cost(run: RunConfig, choice: &Choice, json: bool) -> ExitCode {
    let name = run.name.clone();
    let cost = match guarded(choice, Cost(run)) {
        Ok(Ok(cost)) => cost,
        Ok(Err(e)) => return fail(BAD_INPUT, &e),
        Err(code) => return code,
    };
    if json {
        let mut object = serde_json::json!({ "name": name, "device": choice.to_string() });
        object["cost"] = serde_json::json!(cost);
        return output::show(&format!("{object:#}\n"));
    }
    let lines = [
        format!("{name} on {choice}"),
        format!("  parameters          {}{}", cost.parameters, learnt(&cost)),
        format!("  state               {} bytes a sequence", cost.state_bytes),
        format!("  forward pass        {} FLOPs a token", cost.flops_per_token),
        format!("  first batch         {} tokens, {} scored", cost.batch_tokens, cost.batch_scored),
        format!("  steps               {}", cost.steps),
        format!("  weights                           {}", mebibytes(cost.weight_memory)),
        format!("  gradients                         {}", mebibytes(cost.gradient_memory)),
        format!("  optimizer                         {}", mebibytes(cost.optimizer_memory)),
        format!("  intermediate results, roughly     {}", mebibytes(cost.activation_memory)),
    ];
    output::show(&(lines.join("\n") + "\n"))
}

/// How many parameters learn, where not all do.
fn learnt(cost: &DryRun) -> String {
    match cost.learnt == cost.parameters {
        true => String::new(),
        false => format!(", {} of them learnt", cost.learnt),
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Runs a job. A device that fails in the middle of one panics, in whichever thread; that too becomes one
/// line.
pub(crate) fn guarded<J: Job>(choice: &Choice, job: J) -> Result<J::Output, ExitCode> {
    guarded_run(choice, job, || "what was saved before is kept".into())
}

/// As [`guarded`]; `kept` says what there is to go on from.
fn guarded_run<J: Job>(
    choice: &Choice,
    job: J,
    kept: impl FnOnce() -> String,
) -> Result<J::Output, ExitCode> {
    let panics = Panics::from_now();
    std::panic::set_hook(Box::new(note_panic));
    let result = catch_unwind(AssertUnwindSafe(|| device::dispatch(choice, job)));
    let panics = panics.all();
    // What is still asked of a device that failed fails too, after the line that is all there is to say.
    if panics.is_empty() {
        let _ours = std::panic::take_hook();
    }
    match result {
        Ok(Ok(output)) if panics.is_empty() => Ok(output),
        Ok(Err(e)) => Err(fail(BAD_INPUT, &e)),
        _ => Err(fail(FAILED, &device_failure(choice, &panics, &kept()))),
    }
}

/// Words of drivers and libraries for too little memory, in small letters.
const NO_MEMORY: [&str; 6] = [
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "can't allocate",
    "not enough memory",
    "maximum buffer size",
];

/// CubeCL's words for a driver that gives no memory for another reason, which it leaves out.
const REFUSED: &str = "Unknown error happened during execution";

/// One line about a device that panicked: once, or at everything asked of it after it was lost.
pub(crate) fn device_failure(choice: &Choice, panics: &[String], kept: &str) -> String {
    let first = panics.first().map_or("an unknown failure", String::as_str);
    let what = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let small = what.to_lowercase();
    if NO_MEMORY.iter().any(|words| small.contains(words)) {
        return format!("{choice} is out of memory: {}; {}", shortage(&what), memory::advice());
    }
    let why = match panics.iter().find_map(|panic| drivers_word(panic)) {
        Some(word) => format!("its driver says {word}"),
        None if what.contains(REFUSED) => "its driver gives an error without a name".into(),
        None => match compilers_word(&what) {
            Some(word) => format!("a kernel does not compile: {word}"),
            None => what,
        },
    };
    let why = shortened(&why);
    format!("{choice} failed: {why}; {kept}. Unless the device was lost, this is a bug")
}

/// Whether a driver has failed, and not for want of memory: it does no more work for this process then.
pub(crate) fn is_lost(panics: &[String]) -> bool {
    let lost = |panic: &String| match drivers_word(panic) {
        Some(word) => word != "CUDA_ERROR_OUT_OF_MEMORY",
        None => panic.contains(REFUSED),
    };
    panics.iter().any(lost)
}

/// The name that CUDA gives its error, out of the words of libraries.
fn drivers_word(what: &str) -> Option<&str> {
    let word = &what[what.find("CUDA_ERROR_")?..];
    let end = word.find(|c: char| c != '_' && !c.is_ascii_alphanumeric());
    Some(&word[..end.unwrap_or(word.len())])
}

/// The compiler's words about a kernel, without the kernel's source behind them.
fn compilers_word(what: &str) -> Option<&str> {
    let (_, word) = what.split_once("[Compilation Error]")?;
    Some(word.split("[Source]").next()?.trim())
}

/// The first so many characters of a library's words: rows and terminals hold no more.
fn shortened(why: &str) -> String {
    const MOST: usize = 1000;
    match why.char_indices().nth(MOST) {
        Some((end, _)) => format!("{} ..", &why[..end]),
        None => why.into(),
    }
}

/// The bytes that were wanted, where CubeCL says them among words for its own authors.
fn shortage(what: &str) -> String {
    let size = what.split_once("can't allocate buffer of size: ");
    let bytes = size.and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
    match bytes {
        Some(bytes) => format!("{:.3} GiB more are not there", memory::gibibytes(bytes as f64)),
        None => what.into(),
    }
}

/// The commit of the folder the program was started in, with a mark if files differ from it.
pub(crate) fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let head = git(&["rev-parse", "HEAD"])?;
    match git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() {
        true => Some(head),
        false => Some(format!("{head}, with changes")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Choice, Kind, device_failure, shortage};

    #[test]
    fn a_shortage_is_said_without_the_words_of_a_library() {
        let cuda = "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: \
                    1610612736 No backtrace available (server.rs:124:46)";
        assert_eq!(shortage(cuda), "1.500 GiB more are not there");
        assert_eq!(shortage("Out of Memory (lib.rs:1:1)"), "Out of Memory (lib.rs:1:1)");
    }

    #[test]
    fn a_lost_device_is_said_in_its_drivers_word() {
        let (indices, name) = (vec![0], "cuda:0".to_string());
        let choice = Choice { kind: Kind::Cuda, indices, name, advice: None };
        let said = |panics: &[&str]| {
            let panics: Vec<String> = panics.iter().copied().map(String::from).collect();
            device_failure(&choice, &panics, "--resume goes on")
        };
        let end = "; --resume goes on. Unless the device was lost, this is a bug";
        let lost = "[Launch(An unknown error\nCaused by:\n  DriverError(CUDA_ERROR_LAUNCH_FAILED, \
                    \"unspecified launch failure\")\nBacktrace";
        let word = format!("cuda:0 failed: its driver says CUDA_ERROR_LAUNCH_FAILED{end}");
        assert_eq!(said(&[lost]), word);
        let refused = "Unknown error happened during execution\nNo backtrace (server.rs:124:46)";
        assert_eq!(said(&[refused, lost]), word);
        let nameless = format!("cuda:0 failed: its driver gives an error without a name{end}");
        assert_eq!(said(&[refused]), nameless);
        let kernel = "Error while reading data\nCaused by:\n [Compilation Error]\na.cu(5): error: no operator\n\
                      [Source]\n#include <mma.h>";
        let compiler = "a kernel does not compile: a.cu(5): error: no operator";
        assert_eq!(said(&[kernel]), format!("cuda:0 failed: {compiler}{end}"));
        let long = "so long ".repeat(1000);
        assert_eq!(said(&[&long]).len(), format!("cuda:0 failed:  ..{end}").len() + 1000);
        assert_eq!(said(&["ours\n(a.rs:1:1)"]), format!("cuda:0 failed: ours (a.rs:1:1){end}"));
    }
}
