//! Times training steps of a model on random ids: forward, backward, global gradient norm and AdamW, as the
//! trainer does them.
//!
//! `cargo run --release --features cuda,measure --example train_step -- --device cuda --launches`
//!
//! Prints one line of `experiments/speed/step_h200.csv`: milliseconds, tokens per second and, with `--launches`,
//! launches of a step, which standard error has by kernel, with the GPU's time.

mod launches;

use burn::tensor::DType;
use clap::Parser;
use linattn::nn::{LanguageModelConfig, materialize};
use linattn_cli::device::{self, Job};
use linattn_tasks::Batch;
use linattn_trainer::{AdamWConfig, Learner, Optimizer, Step, TrainBackend, gradients};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Instant;

#[derive(Debug, Parser, Clone)]
struct Args {
    /// auto, cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Type of products and recurrences: f32 or bf16.
    #[arg(long, default_value = "f32")]
    precision: String,
    #[arg(long, default_value_t = 2)]
    layers: usize,
    #[arg(long, default_value_t = 128)]
    width: usize,
    #[arg(long, default_value_t = 8192)]
    vocab: usize,
    /// A mixer and its keys, as in a config.
    #[arg(long, default_value = "gated_deltanet = { heads = 2, expand_v = 1.0 }")]
    mixer: String,
    /// An MLP and its keys, as in a config; `"none"` for none.
    #[arg(long, default_value = "{ swiglu = {} }")]
    mlp: String,
    #[arg(long, default_value_t = 256)]
    batch: usize,
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Scored positions a sequence; 0 is all.
    #[arg(long, default_value_t = 0)]
    scored: usize,
    /// Steps that are timed, after as many as it takes to warm up.
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Threads that train a model each, on the same device.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Leaves out the optimizer.
    #[arg(long)]
    no_optimizer: bool,
    /// Counts the launches of a step too, in a second process that logs each.
    #[arg(long)]
    launches: bool,
    /// Runs steps for the process that counts: CubeCL logs launches to this file.
    #[arg(long, hide = true)]
    logged: Option<PathBuf>,
}

const WARM_UP: usize = 10;

/// One model that learns, and what it learns from.
struct Run<B: TrainBackend> {
    learner: Learner<B>,
    optimizer: Optimizer<B>,
    batches: Vec<Batch>,
    device: B::Device,
    last: f64,
}

impl<B: TrainBackend> Run<B> {
    fn new(args: &Args, seed: usize, device: &B::Device) -> Result<Self, Box<dyn Error>> {
        let text = format!(
            "d_model = {}\n[[layers]]\nrepeat = {}\nmlp = {}\nmixer.{}\n",
            args.width, args.layers, args.mlp, args.mixer
        );
        let config: LanguageModelConfig = toml::from_str(&text)?;
        let mut model = config.init::<B>(args.vocab, device)?;
        materialize(&model);
        match args.precision.as_str() {
            "f32" => {}
            "bf16" => model = model.with_precision(DType::BF16),
            other => return Err(format!("--precision {other}: f32 or bf16").into()),
        }
        let adamw = AdamWConfig { learning_rate: 1e-3, ..toml::from_str("learning_rate = 1e-3")? };
        let batches = (0..4).map(|n| batch(args, 4 * seed + n)).collect();
        let (learner, optimizer) = (Learner { model }, Optimizer::new(&adamw));
        Ok(Self { learner, optimizer, batches, device: device.clone(), last: f64::NAN })
    }

    fn steps(&mut self, args: &Args, count: usize) {
        for n in 0..count {
            let step = Step {
                parts: std::slice::from_ref(&self.batches[n % 4]),
                devices: std::slice::from_ref(&self.device),
                may_overlap: true,
                learning_rate: 1e-3,
                clip: Some(1.0),
            };
            let loss = if args.no_optimizer {
                gradients(&self.learner, step.parts, step.devices, true).1
            } else {
                let (learner, numbers) = step.take(&self.learner, &mut self.optimizer);
                self.learner = learner;
                numbers.loss
            };
            if n + 1 == count {
                self.last = loss.into_data().iter::<f64>().next().unwrap_or(f64::NAN);
            }
        }
    }
}

/// Random ids, the same every time.
fn batch(args: &Args, seed: usize) -> Batch {
    let (rows, length) = (args.batch, args.length);
    let count = rows * length;
    let mut state = seed as u64 * 2 + 1;
    let mut draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % args.vocab as u64) as u32
    };
    let input = (0..count).map(|_| draw()).collect();
    let scored: Vec<u32> = match args.scored {
        0 => (0..count as u32).collect(),
        some => {
            (0..rows * length).filter(|i| i % length >= length - some).map(|i| i as u32).collect()
        }
    };
    let target = scored.iter().map(|_| draw()).collect();
    Batch { rows, length, input, scored, target }
}

/// Times steps and prints the line, or runs steps whose launches are logged.
fn measure<B: TrainBackend>(args: &Args, device: &B::Device) -> Result<(), Box<dyn Error>> {
    match &args.logged {
        Some(log) => {
            let mut run = Run::<B>::new(args, 0, device)?;
            run.steps(args, WARM_UP);
            launches::between(log, || run.steps(args, launches::STEPS))
        }
        None => time::<B>(args, device),
    }
}

fn time<B: TrainBackend>(args: &Args, device: &B::Device) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let mut runs =
        (0..args.jobs).map(|n| Run::<B>::new(args, n, device)).collect::<Result<Vec<_>, _>>()?;
    // Each thread has a stream and memory of its own, so it warms up itself.
    let warm = Barrier::new(args.jobs + 1);
    let mut first = 0.0;
    let mut timed = start;
    std::thread::scope(|scope| {
        for run in &mut runs {
            scope.spawn(|| {
                run.steps(args, WARM_UP);
                warm.wait();
                run.steps(args, args.steps);
            });
        }
        warm.wait();
        first = start.elapsed().as_secs_f64();
        timed = Instant::now();
    });
    let seconds = timed.elapsed().as_secs_f64() / (args.steps * args.jobs) as f64;
    let tokens = (args.batch * args.length) as f64;
    let name = args.mixer.split(' ').next().unwrap_or_default();
    let launches = if args.launches { launches::count()?.to_string() } else { String::new() };
    println!(
        "{name},{},{},{},{},{},{},{},{},{},{:.4},{:.0},{launches} # first {} steps {first:.1} s, loss {:.4}",
        args.batch,
        args.length,
        args.width,
        args.layers,
        args.vocab,
        if args.scored == 0 { args.length } else { args.scored },
        args.precision,
        args.device,
        args.jobs,
        1e3 * seconds,
        tokens / seconds,
        WARM_UP,
        runs[0].last,
    );
    Ok(())
}

struct Measure<'a>(&'a Args);

impl Job for Measure<'_> {
    type Output = Result<(), Box<dyn Error>>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        measure::<B>(self.0, &devices[0])
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let choice = device::choose(&args.device).map_err(Into::into);
    let done = choice.and_then(|choice| device::dispatch(&choice, Measure(&args))?);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::from(2)
        }
    }
}
