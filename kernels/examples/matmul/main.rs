//! Times cubek's strategies for a matrix product, on the shapes of a linear layer and its gradients, on
//! one CUDA device. The table of `crates/linattn/src/ops/cube_linear.rs` is made of its rows.
//!
//! `cargo run --release -p linattn-kernels --features cuda --example matmul -- [options]`
//!
//! ```text
//! --filter A|B   only jobs whose `shape,layout,types,strategy` contains A or B; may be given several times
//! --full         every strategy, not only the likely ones
//! --seconds N    starts no job after N seconds (230)
//! --parts N      compiles in N processes at once, which take turns at the GPU (8)
//! --list         prints the jobs
//! ```
//!
//! One CSV row a job, sorted by time within a shape and type. `shape` is MxKxN, with `bS` for a batch of S
//! such products. `layout` is n or t for each side: t is a transposed view. `types` names input and output.
//! `ms` is the GPU's time a product: the median of rows of calls over rotated buffers, queued behind a busy
//! GPU. `max_relative_error` is the largest error of sampled entries over the RMS of an f64 product.
//! Strategies that cannot be set up are noted on stderr. A job that hangs or kills the CUDA context is noted
//! too, and its process starts itself again behind it.

mod cases;
mod gpu;
mod strategies;

use cases::{Case, Types, cases};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use gpu::{Gpu, Measured, Tensors};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, exit};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use strategies::Choice;

/// A job that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(45);

/// One strategy on one case.
struct Job {
    case: Case,
    types: Types,
    name: String,
    choice: Choice,
}

impl Job {
    fn key(&self) -> String {
        format!("{},{}", self.case.name(), self.types.name)
    }
}

/// The jobs of one case and type, which share their inputs.
fn groups(options: &Options) -> Vec<Vec<Job>> {
    let mut all = Vec::new();
    for case in cases() {
        for types in Types::of(&case) {
            let named = strategies::all(&case, &types, options.full);
            let mut jobs: Vec<Job> = named
                .into_iter()
                .map(|(name, choice)| Job { case, types, name, choice })
                .filter(|job| options.wants(&format!("{},{}", job.key(), job.name)))
                .collect();
            if !jobs.is_empty() {
                all.push(std::mem::take(&mut jobs));
            }
        }
    }
    all
}

/// The command line.
#[derive(Debug)]
struct Options {
    filters: Vec<String>,
    full: bool,
    list: bool,
    seconds: f64,
    parts: usize,
    /// Which of the processes this one is; none if it is the one that starts them.
    part: Option<usize>,
    /// Jobs of this part that an earlier process has done.
    skip: usize,
}

impl Options {
    fn read() -> Self {
        let mut options = Self {
            filters: Vec::new(),
            full: false,
            list: false,
            seconds: 230.0,
            parts: 8,
            part: None,
            skip: 0,
        };
        let mut args = std::env::args().skip(1);
        while let Some(name) = args.next() {
            let mut value = || args.next().unwrap_or_else(|| panic!("{name} takes a value"));
            let count = |text: String| -> usize {
                text.parse().unwrap_or_else(|_| panic!("{text} is no count"))
            };
            match name.as_str() {
                "--filter" => options.filters.push(value()),
                "--full" => options.full = true,
                "--list" => options.list = true,
                "--seconds" => options.seconds = value().parse().expect("seconds are a number"),
                "--parts" => options.parts = count(value()).max(1),
                "--part" => options.part = Some(count(value())),
                "--skip" => options.skip = count(value()),
                other => panic!("no option {other}"),
            }
        }
        options
    }

    fn wants(&self, text: &str) -> bool {
        self.filters.iter().all(|filter| filter.split('|').any(|part| text.contains(part)))
    }

    /// Starts the process of a part, without its first `skip` jobs.
    fn start(&self, part: usize, skip: usize, seconds: f64) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program is a file"));
        for filter in &self.filters {
            command.args(["--filter", filter]);
        }
        if self.full {
            command.arg("--full");
        }
        let numbers = [("--parts", self.parts), ("--part", part), ("--skip", skip)];
        for (name, number) in numbers {
            command.args([name, &number.to_string()]);
        }
        command.args(["--seconds", &seconds.to_string()]);
        command.spawn().expect("this program starts")
    }
}

fn main() {
    let options = Options::read();
    if options.list {
        let all = groups(&options);
        for job in all.iter().flatten() {
            println!("{},{}", job.key(), job.name);
        }
        eprintln!("{} jobs, {} inputs", all.iter().flatten().count(), all.len());
        return;
    }
    if let Some(part) = options.part {
        return work(options, part);
    }
    println!("shape,layout,types,strategy,ms,tflops,max_relative_error");
    let parts = options.parts.min(groups(&options).len());
    let start = |part| options.start(part, 0, options.seconds);
    let options = &options;
    let children: Vec<Child> = (0..parts).map(start).collect();
    eprintln!("{parts} processes, {} s", options.seconds);
    for mut child in children {
        child.wait().expect("it was started");
    }
}

/// State for the thread that looks out for hanging jobs.
struct Progress {
    began: Instant,
    /// Jobs of this part done, those of earlier processes too.
    done: usize,
    job: String,
    /// Since when the job runs; none while its process waits for the GPU.
    since: Option<Instant>,
    /// Rows of this case and type: milliseconds and text.
    rows: Vec<(f64, String)>,
}

impl Progress {
    fn print(&mut self) {
        self.rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        let text: String = self.rows.drain(..).map(|(_, row)| row + "\n").collect();
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).expect("stdout is open");
    }

    /// Goes on in a new process behind the running job, and ends this one.
    fn give_up(&mut self, options: &Options, part: usize, why: &str) -> ! {
        eprintln!("{}: {why}; a new process goes on behind it", self.job);
        self.print();
        let left = options.seconds - self.began.elapsed().as_secs_f64();
        let mut child = options.start(part, self.done + 1, left);
        child.wait().expect("it was started");
        exit(0)
    }
}

fn watch(options: &Options, part: usize, progress: &Mutex<Progress>) {
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let mut now = progress.lock().unwrap_or_else(PoisonError::into_inner);
        if now.since.is_some_and(|since| since.elapsed() > PATIENCE) {
            now.give_up(options, part, "it hangs");
        }
    }
}

/// One part's jobs: every `parts`th case and type.
fn work(options: Options, part: usize) {
    let progress = Mutex::new(Progress {
        began: Instant::now(),
        done: options.skip,
        job: String::new(),
        since: None,
        rows: Vec::new(),
    });
    let (options, progress): (&'static Options, &'static Mutex<Progress>) =
        (Box::leak(Box::new(options)), Box::leak(Box::new(progress)));
    std::thread::spawn(move || watch(options, part, progress));
    let lock = File::create(lock_path()).expect("the temporary folder takes files");
    let gpu = Gpu::new(CudaRuntime::client(&Default::default()));
    let mut number = 0;
    for group in groups(options).into_iter().skip(part).step_by(options.parts) {
        let first = number;
        number += group.len();
        if number <= options.skip {
            continue;
        }
        let tensors = gpu.tensors(&group[0].case, &group[0].types);
        let mut best = f64::INFINITY;
        for job in group.iter().skip(options.skip.saturating_sub(first)) {
            let mut now = progress.lock().unwrap_or_else(PoisonError::into_inner);
            if now.began.elapsed().as_secs_f64() > options.seconds {
                now.print();
                return eprintln!("part {part} is out of time after {} jobs", now.done);
            }
            (now.since, now.job) = (Some(Instant::now()), format!("{},{}", job.key(), job.name));
            drop(now);
            let measured = one(&gpu, job, &tensors, best, &lock, progress);
            let dead = measured.is_err() && !gpu.healthy();
            let mut now = progress.lock().unwrap_or_else(PoisonError::into_inner);
            now.since = None;
            match measured {
                Ok(measured) => {
                    best = best.min(measured.milliseconds);
                    now.rows.push(row(job, &measured));
                }
                Err(why) if dead => now.give_up(options, part, &why),
                Err(why) => eprintln!("{}: {}", now.job, why.replace('\n', " ")),
            }
            now.done += 1;
        }
        progress.lock().unwrap_or_else(PoisonError::into_inner).print();
    }
}

fn lock_path() -> PathBuf {
    std::env::temp_dir().join("linattn_matmul_example.lock")
}

/// Compiles without the lock, and measures with it: then no other process uses the GPU for long.
fn one<R: Runtime>(
    gpu: &Gpu<R>,
    job: &Job,
    tensors: &Tensors,
    best: f64,
    lock: &File,
    progress: &Mutex<Progress>,
) -> Result<Measured, String> {
    let (strategy, input) = job.choice.strategy(&job.case, &job.types);
    let kinds = [input, job.types.output];
    gpu.first(&strategy, &job.case, kinds, tensors)?;
    let since = |since| progress.lock().unwrap_or_else(PoisonError::into_inner).since = since;
    since(None);
    lock.lock().map_err(|why| why.to_string())?;
    since(Some(Instant::now()));
    let measured = gpu.measure(&strategy, &job.case, kinds, tensors, best);
    lock.unlock().map_err(|why| why.to_string())?;
    measured
}

fn row(job: &Job, measured: &Measured) -> (f64, String) {
    let Measured { milliseconds, error } = *measured;
    let speed = job.case.flops() / milliseconds / 1e9;
    let (key, name) = (job.key(), &job.name);
    (milliseconds, format!("{key},{name},{milliseconds:.4},{speed:.1},{error:.1e}"))
}
