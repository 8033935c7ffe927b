//! One training run on two paths: tensor operations on the processor and kernels on a GPU take the
//! same first steps, but for rounding.
//!
//! A run draws its first weights on its own device, so two runs of one config differ from the start.
//! Here one run is stopped before its first step, and every device goes on from what it saved: the same
//! weights, batches and learning rates.

use crate::desk::Desk;
use crate::support::{Numbers, alone, safetensors};
use burn::backend::{Autodiff, Flex};
use linattn::ops::Path;
use linattn_trainer::{
    Interrupter, ProgressStyle, RunConfig, Start, Status, TrainBackend, TrainJob, train,
};
use std::fmt;
use std::fs;

const STEPS: usize = 50;
const RUN: &str = "runs/gated_deltanet";
const FIRST: &str = "runs/gated_deltanet/checkpoints/step-0000000000";
const LAST: &str = "runs/gated_deltanet/checkpoints/step-0000000050";

/// How far two runs may part.
struct Limits {
    /// Relative difference of the losses at the first step and at the last. In between the limit grows
    /// geometrically, as the distance of two runs that start side by side does.
    loss: [f64; 2],
    /// Distance of the last weights, as a share of the way from the first ones.
    weights: f64,
}

/// At the first step a dozen units in the last place of a loss of 6.2 nats, each 8e-8 of it. Every
/// step's rounding is carried on by all steps after it, and two more digits are left to that.
const F32: Limits = Limits { loss: [1e-6, 1e-4], weights: 1e-3 };

/// Burn multiplies f32 matrices in TF32 on CUDA, 13 bits fewer, whatever path the operations take: two
/// digits are left to that everywhere.
#[cfg(feature = "cuda")]
const TF32: Limits = Limits { loss: [1e-4, 1e-2], weights: 1e-1 };

impl Limits {
    /// The limit on the loss at a step, from 1.
    fn loss(&self, step: usize) -> f64 {
        let [first, last] = self.loss;
        first * (last / first).powf((step - 1) as f64 / (STEPS - 1) as f64)
    }
}

/// The main job with fewer sequences a step, as many steps for its schedule, and an end after the first
/// evaluation, which any score passes.
fn main_job(changes: &[&str]) -> RunConfig {
    let smaller = [
        "train={ steps = 800, batch_size = 8, order = 'fixed', log_every = 1 }",
        "task.mqar.test=[{ length = 32, pairs = 4, examples = 8 }]",
        "evaluate={ every_steps = 50, stop_above = -1.0 }",
    ];
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/gated_deltanet.toml");
    let overrides: Vec<String> = smaller.iter().chain(changes).map(ToString::to_string).collect();
    RunConfig::read(config.as_ref(), &overrides).unwrap()
}

fn job(desk: &Desk, run: RunConfig, start: Start) -> TrainJob {
    TrainJob {
        run,
        output: desk.path("runs"),
        start,
        device: "a test's".into(),
        commit: None,
        progress: ProgressStyle::Quiet,
        stop: Interrupter::new(),
    }
}

/// A run that was stopped before its first step.
struct Beginning(Desk);

impl Beginning {
    fn new() -> Self {
        // Tests beside this one draw from the same generator of Burn's: what comes twice is the seed's own.
        let weights = |start: &Self| safetensors(&start.0.path(FIRST).join("model.safetensors"));
        let mut last = Self::draw();
        for _ in 0..50 {
            let next = Self::draw();
            if weights(&next) == weights(&last) {
                return next;
            }
            last = next;
        }
        panic!("one seed gives other weights each time");
    }

    fn draw() -> Self {
        let desk = Desk::new();
        let job = job(&desk, main_job(&[]), Start::New);
        job.stop.stop(None);
        let outcome = train::<Autodiff<Flex>>(&job, &[Default::default()]).unwrap();
        assert_eq!(outcome.status, Status::Interrupted);
        Self(desk)
    }

    /// The first steps of `run` from these weights.
    fn go_on<B: TrainBackend>(&self, run: RunConfig, device: &B::Device, path: Path) -> Run {
        let _alone = alone();
        self.go_on_beside::<B>(run, device, path)
    }

    /// As [`go_on`](Self::go_on), for runs beside one another.
    fn go_on_beside<B: TrainBackend>(&self, run: RunConfig, device: &B::Device, path: Path) -> Run {
        let desk = Desk::new();
        fs::create_dir_all(desk.path(FIRST)).unwrap();
        fs::write(desk.path(RUN).join("config.toml"), run.to_toml()).unwrap();
        for file in fs::read_dir(self.0.path(FIRST)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), desk.path(FIRST).join(file.file_name())).unwrap();
        }
        let job = job(&desk, run, Start::Resume);
        let outcome = train::<B>(&job, std::slice::from_ref(device)).unwrap();
        assert_eq!(outcome.summary["steps"], STEPS);
        assert_eq!(outcome.summary["path"], path.to_string());
        Run::read(&desk)
    }

    fn on_cpu(&self, changes: &[&str]) -> Run {
        self.go_on::<Autodiff<Flex>>(main_job(changes), &Default::default(), Path::TensorOps)
    }
}

/// Losses and weights of a run.
struct Run {
    /// Loss of each step, in nats.
    losses: Vec<f64>,
    first: Numbers,
    last: Numbers,
}

impl Run {
    fn read(desk: &Desk) -> Self {
        let lines = desk.metrics("gated_deltanet");
        let steps = lines.iter().filter(|line| line["kind"] == "train");
        let losses: Vec<f64> = steps.map(|line| line["loss"].as_f64().unwrap()).collect();
        assert_eq!(losses.len(), STEPS);
        let weights = |step: &str| safetensors(&desk.path(step).join("model.safetensors"));
        Self { losses, first: weights(FIRST), last: weights(LAST) }
    }

    /// How far `other` is from this run.
    fn parting(&self, other: &Self) -> Parting {
        assert!(self.first == other.first, "runs from different weights");
        let losses = self.losses.iter().zip(&other.losses);
        Parting {
            losses: losses.map(|(mine, other)| (other - mine).abs() / mine.abs()).collect(),
            weights: distance(&self.last, &other.last) / distance(&self.first, &self.last),
        }
    }
}

/// Length of the difference over all weights together.
fn distance(a: &Numbers, b: &Numbers) -> f64 {
    assert!(a.keys().eq(b.keys()), "weights of different models");
    let pairs = a.values().flatten().zip(b.values().flatten());
    pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

/// Differences of two runs, in the units of [`Limits`].
struct Parting {
    losses: Vec<f64>,
    weights: f64,
}

impl Parting {
    /// The first step whose loss is beyond its limit. Losses are numbers: training ends at any other.
    fn step_beyond(&self, limits: &Limits) -> Option<usize> {
        let mut steps = (1..).zip(&self.losses);
        steps.find(|&(step, &loss)| loss > limits.loss(step)).map(|(step, _)| step)
    }

    #[track_caller]
    fn assert_within(&self, limits: &Limits) {
        assert_eq!(self.step_beyond(limits), None, "the first step beyond its limit: {self}");
        assert!(self.weights <= limits.weights, "{self}, limit {:.0e}", limits.weights);
    }
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in [1, 10, STEPS] {
            let largest = self.losses[..step].iter().copied().fold(0.0, f64::max);
            write!(f, "loss to step {step} {largest:.1e}, ")?;
        }
        write!(f, "weights {:.1e} of the way", self.weights)
    }
}

/// A step in two parts is the same mathematics in another order: what it changes is rounding, and shows
/// what rounding does to a run.
#[test]
fn rounding_stays_within_the_limits_and_another_learning_rate_does_not() {
    let beginning = Beginning::new();
    let run = beginning.on_cpu(&[]);
    let parts = run.parting(&beginning.on_cpu(&["train.accumulate=2"]));
    println!("steps in two parts: {parts}");
    assert!(parts.losses.iter().any(|&loss| loss > 0.0), "the order of sums makes a difference");
    parts.assert_within(&F32);

    let faster = run.parting(&beginning.on_cpu(&["optimizer.learning_rate=3.03e-3"]));
    println!("learning rate 1.01 times as high: {faster}");
    assert!(faster.step_beyond(&F32).is_some(), "{faster}");
    assert!(faster.weights > F32.weights, "{faster}");
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn hold_on<B: TrainBackend>(device: &B::Device, limits: &Limits) {
    let beginning = Beginning::new();
    let kernels = beginning.go_on::<B>(main_job(&[]), device, Path::Kernels);
    let parting = beginning.on_cpu(&[]).parting(&kernels);
    println!("{}: {parting}", B::name(device));
    parting.assert_within(limits);
}

/// One run alone, and so many beside one another in threads of one process.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn gives_the_same_bits<B: TrainBackend>(device: &B::Device, beside: usize) {
    let beginning = Beginning::new();
    let _alone = alone();
    let run = || beginning.go_on_beside::<B>(main_job(&[]), device, Path::Kernels);
    let first = run();
    let others: Vec<Run> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..beside).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a run")).collect()
    });
    for (n, other) in others.iter().enumerate() {
        assert!(other.losses == first.losses, "run {n} of {beside} has other losses");
        assert!(other.last == first.last, "run {n} of {beside} has other weights");
    }
}

#[cfg(feature = "wgpu")]
mod on_wgpu {
    use super::*;

    #[test]
    fn a_run_has_the_same_bits_alone_and_beside_others() {
        let Some(device) = crate::support::wgpu() else { return };
        gives_the_same_bits::<Autodiff<burn::backend::Wgpu>>(&device, 3);
    }

    #[test]
    fn kernels_take_the_steps_of_tensor_operations() {
        let Some(device) = crate::support::wgpu() else { return };
        hold_on::<Autodiff<burn::backend::Wgpu>>(&device, &F32);
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;

    #[test]
    fn kernels_take_the_steps_of_tensor_operations() {
        let Some(device) = crate::support::cuda() else { return };
        hold_on::<Autodiff<burn::backend::Cuda>>(&device, &TF32);
    }

    #[test]
    fn a_run_has_the_same_bits_alone_and_beside_others() {
        let Some(device) = crate::support::cuda() else { return };
        gives_the_same_bits::<Autodiff<burn::backend::Cuda>>(&device, 16);
    }
}
