//! `doctor`: what this computer's devices can run, and how fast.

use crate::device::{self, Job, Listed};
use crate::train::guarded;
use crate::{FAILED, fail, gpus, output};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, Tensor};
use linattn::backend::TrainBackend;
use linattn::ops;
use linattn_tasks::Split;
use linattn_trainer::{ConfigError, Optimizer, RunConfig, Step, build};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Says which devices are here, what each can run, and how fast a small product and a small training
/// step are.
#[derive(Debug, clap::Parser)]
#[command(name = "doctor", version)]
pub struct DoctorArgs {
    /// Only these, with commas between: cpu, cuda:0. All by default; a software adapter is tried only
    /// when it is named
    #[arg(long, value_delimiter = ',')]
    devices: Vec<String>,
    /// Lists the devices and tries none
    #[arg(long, conflicts_with = "devices")]
    list: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// All that is found.
#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    system: String,
    features: Vec<&'static str>,
    /// Makers of the GPUs that the system lists, whether this build can use them or not.
    gpus: Vec<&'static str>,
    nvidia_driver: Option<String>,
    devices: Vec<Patient>,
    /// Features without a device, and why.
    without: Vec<Without>,
    advice: Option<String>,
}

#[derive(Debug, Serialize)]
struct Patient {
    #[serde(flatten)]
    device: Listed,
    /// `None` where it was not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<Found>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

#[derive(Debug, Serialize)]
struct Without {
    feature: &'static str,
    why: String,
}

/// Measurements of a device.
#[derive(Debug, Serialize)]
struct Found {
    /// Types of numbers that all tensor operations take.
    types: Vec<&'static str>,
    /// How recurrences run: kernels, or tensor operations (on the CPU, loops included).
    path: String,
    /// Seconds of a product of two f32 matrices, [`WIDTH`] x [`WIDTH`].
    product_seconds: f64,
    product_gflops: f64,
    /// Seconds until the first step was done, kernels being compiled or loaded on the way.
    first_step_seconds: f64,
    step_seconds: f64,
    tokens_per_second: f64,
}

/// Runs the command and gives its exit code: 0 every device that was tried did its work, 1 one failed,
/// 2 bad input.
pub fn doctor(args: DoctorArgs) -> ExitCode {
    for name in &args.devices {
        if let Err(e) = device::choose(name) {
            return fail(crate::BAD_INPUT, &e);
        }
    }
    let findings = Findings::new(&args);
    let failed = findings.devices.iter().any(|patient| patient.failure.is_some());
    let text = match args.json {
        true => serde_json::to_string_pretty(&findings).unwrap_or_else(|e| e.to_string()) + "\n",
        false => findings.text(),
    };
    match (output::show(&text), failed) {
        (_, true) => ExitCode::from(FAILED),
        (code, false) => code,
    }
}

impl Findings {
    fn new(args: &DoctorArgs) -> Self {
        let (mut devices, mut without) = (vec![], vec![]);
        for (feature, listed) in device::list() {
            match listed {
                Ok(list) if list.is_empty() => {
                    without.push(Without { feature, why: "no device answers".into() });
                }
                Ok(list) => devices.extend(list),
                Err(why) => without.push(Without { feature, why }),
            }
        }
        let vendors = gpus::vendors();
        let usable = |device: &Listed| device.name != "cpu" && !device.software;
        let advice = match devices.iter().any(usable) {
            true => None,
            false => gpus::advice(&vendors, gpus::COMPILED_IN),
        };
        let features = [("cpu", cfg!(feature = "cpu"))];
        let features = features.iter().chain(gpus::COMPILED_IN);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            system: format!("{}, {}", std::env::consts::OS, std::env::consts::ARCH),
            features: features.filter(|(_, there)| *there).map(|(name, _)| *name).collect(),
            gpus: vendors.iter().map(|vendor| vendor.name()).collect(),
            nvidia_driver: gpus::nvidia_driver(),
            devices: devices.into_iter().map(|device| examine(device, args)).collect(),
            without,
            advice,
        }
    }

    fn text(&self) -> String {
        let mut lines = vec![
            format!("linattn {} on {}", self.version, self.system),
            format!("compiled in: {}", self.features.join(", ")),
        ];
        if let Some(version) = &self.nvidia_driver {
            lines.push(format!("NVIDIA driver {version}"));
        }
        for Patient { device, found, failure } in &self.devices {
            let driver = device.driver.iter().map(|driver| format!(", driver {}", driver.trim()));
            let driver = driver.collect::<String>();
            lines.push(format!("\n{}: {}{driver}", device.name, device.model));
            match (found, failure) {
                (Some(found), _) => lines.extend(found.lines()),
                (None, Some(why)) => lines.push(format!("  failed: {why}")),
                (None, None) if device.software => {
                    lines.push(format!(
                        "  a software adapter, slower than `cpu`; --devices {} tries it",
                        device.name
                    ));
                }
                (None, None) => lines.push("  not tried".into()),
            }
        }
        lines.push(String::new());
        lines.extend(self.without.iter().map(|w| format!("no {}: {}", w.feature, w.why)));
        lines.extend(self.advice.iter().map(|advice| format!("note: {advice}")));
        lines.join("\n") + "\n"
    }
}

impl Found {
    fn lines(&self) -> [String; 4] {
        let ms = |seconds: f64| format!("{:.2} ms", 1e3 * seconds);
        [
            format!("  numbers        {}", self.types.join(", ")),
            format!("  recurrences    {}", self.path),
            format!(
                "  product        {}, {:.0} GFLOP/s: f32, {WIDTH} x {WIDTH}",
                ms(self.product_seconds),
                self.product_gflops
            ),
            format!(
                "  training step  {}, {:.0} tokens/s: the main job's; {:.1} s to the first",
                ms(self.step_seconds),
                self.tokens_per_second,
                self.first_step_seconds
            ),
        ]
    }
}

/// Tries a device, unless it is only to be listed.
fn examine(device: Listed, args: &DoctorArgs) -> Patient {
    let asked = match args.devices.is_empty() {
        true => !args.list && !device.software,
        false => args.devices.iter().any(|name| name == &device.name),
    };
    if !asked {
        return Patient { device, found: None, failure: None };
    }
    let tried = device::choose(&device.name).map_err(|e| e.to_string()).and_then(|choice| {
        match guarded(&choice, Examination) {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("it failed, as was said above".to_string()),
        }
    });
    match tried {
        Ok(found) => Patient { device, found: Some(found), failure: None },
        Err(why) => Patient { device, found: None, failure: Some(why) },
    }
}

/// Rows and columns of the product.
const WIDTH: usize = 1024;
/// Each measurement goes on for so long at the least, after it has warmed up.
const PATIENCE: Duration = Duration::from_millis(500);
/// The run whose steps are timed.
const MAIN_JOB: &str = include_str!("../../configs/gated_deltanet.toml");

struct Examination;

impl Job for Examination {
    type Output = Result<Found, ConfigError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let device = &devices[0];
        let types =
            [("f64", DType::F64), ("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];
        let product_seconds = product::<B::InnerBackend>(device);
        let (first_step_seconds, step_seconds, tokens) = training_step::<B>(devices)?;
        Ok(Found {
            types: types
                .into_iter()
                .filter(|(_, dtype)| B::supports_dtype(device, *dtype))
                .map(|(name, _)| name)
                .collect(),
            path: ops::path::<B>(device).to_string(),
            product_seconds,
            product_gflops: 2.0 * (WIDTH as f64).powi(3) / product_seconds / 1e9,
            first_step_seconds,
            step_seconds,
            tokens_per_second: tokens as f64 / step_seconds,
        })
    }
}

/// Seconds of `work`, the mean of as many as there is patience for; `done` waits for the device.
fn mean_seconds(mut work: impl FnMut(), done: impl Fn()) -> f64 {
    (0..3).for_each(|_| work());
    done();
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < PATIENCE {
        // Several before each wait, as in training.
        (0..5).for_each(|_| work());
        count += 5;
        done();
    }
    start.elapsed().as_secs_f64() / f64::from(count)
}

fn product<B: Backend>(device: &B::Device) -> f64 {
    let matrix = || Tensor::<B, 2>::random([WIDTH, WIDTH], Distribution::Default, device);
    let (a, b) = (matrix(), matrix());
    let work = || drop(a.clone().matmul(b.clone()));
    mean_seconds(work, || wait::<B>(device))
}

/// Until the device has done what it was given. One that cannot panics, and is reported.
fn wait<B: Backend>(device: &B::Device) {
    B::sync(device).expect("the device answers");
}

/// Seconds to the end of the first training step, and of each later one, and the tokens of a step.
fn training_step<B: TrainBackend>(devices: &[B::Device]) -> Result<(f64, f64, usize), ConfigError> {
    let start = Instant::now();
    let run = main_job()?;
    let task = run.task.build(run.seed)?;
    let mut learner = build::<B>(&run, task.vocab(), &devices[0])?;
    let mut optimizer = Optimizer::<B>::new(&run.optimizer);
    let indices: Vec<u64> = (0..run.train.batch_size as u64).collect();
    let parts: Vec<_> = indices
        .chunks(indices.len().div_ceil(devices.len()))
        .map(|part| task.batch(Split::Train, 0, part))
        .collect();
    let step = Step {
        parts: &parts,
        devices,
        may_overlap: true,
        learning_rate: run.optimizer.learning_rate,
        clip: run.train.clip_norm,
    };
    let mut work = || learner = step.take(&learner, &mut optimizer).0;
    let done = || devices.iter().for_each(|device| wait::<B>(device));
    work();
    done();
    let first = start.elapsed().as_secs_f64();
    let tokens = parts.iter().map(|part| part.input.len()).sum();
    Ok((first, mean_seconds(work, done), tokens))
}

fn main_job() -> Result<RunConfig, ConfigError> {
    let table = toml::from_str(MAIN_JOB).expect("a test reads it");
    RunConfig::from_table(Path::new("configs/gated_deltanet.toml"), table, &[])
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_main_job_is_a_run() {
        assert_eq!(super::main_job().expect("a run").name, "gated_deltanet");
    }
}
