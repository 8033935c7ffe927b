//! How fast models with random weights are decoded, beside what reading their weights and states from
//! memory would take.
//!
//! `cargo run --release --features cuda --example decode_speed -- --device cuda:0 --bandwidth 4300`
//!
//! One CSV row for each type and batch. A step is one token of every sequence; the likeliest id goes on
//! to the next step on the device, which is waited for once in the end. `floor_ms` is what the device
//! would need to read each weight once, and read and write each state once, at `--bandwidth`.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use clap::Parser;
use linattn::nn::{LanguageModel, LanguageModelConfig, LanguageModelState};
use linattn::ops::{self, GROUP, LinearAttentionBackend, WeightBits};
use linattn_cli::device::{self, Job};
use linattn_trainer::TrainBackend;
use std::process::ExitCode;
use std::time::Instant;

/// Times the decoding of a model with random weights.
#[derive(Debug, Parser)]
struct Args {
    /// auto, cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Layers
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Width of the model
    #[arg(long, default_value_t = 2048)]
    width: usize,
    /// Ids
    #[arg(long, default_value_t = 32_000)]
    vocab: usize,
    /// The mixer, as a config spells it
    #[arg(long, default_value = "gated_deltanet = { heads = 8, expand_v = 1.0 }")]
    mixer: String,
    /// Channel mixer after it, as a config spells it
    #[arg(long, default_value = "{ swiglu = {} }")]
    mlp: String,
    /// Sequences in a batch; several are timed one after another
    #[arg(long, value_delimiter = ',', default_values_t = [1_usize, 64])]
    batch: Vec<usize>,
    /// f32, bf16, f16, int8 or int4; several are timed one after another
    #[arg(long = "type", value_delimiter = ',', default_values_t = [String::from("f32"), String::from("bf16")])]
    types: Vec<String>,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Steps that are timed, after as many to warm up
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Bytes a second that the device's memory gives, in 10^9
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let timed = device::choose(&args.device)
        .map_err(|e| e.to_string())
        .and_then(|choice| {
            eprintln!("on {choice}");
            device::dispatch(&choice, Speed(&args)).map_err(|e| e.to_string())
        })
        .and_then(|result| result);
    match timed {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

struct Speed<'a>(&'a Args);

impl Job for Speed<'_> {
    type Output = Result<(), String>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        time_all::<B::InnerBackend>(self.0, &devices[0])
    }
}

fn time_all<B: LinearAttentionBackend>(args: &Args, device: &B::Device) -> Result<(), String> {
    if args.prompt == 0 || args.steps == 0 || args.batch.contains(&0) {
        return Err("`--prompt`, `--steps` and `--batch` have to be at least 1".to_string());
    }
    let types = args.types.iter().map(|name| number_type::<B>(name, device));
    let types = types.collect::<Result<Vec<_>, _>>()?;
    println!(
        "type,batch,parameters,state_bytes,step_ms,tokens_per_second,floor_ms,prompt_ms,prompt_tokens_per_second"
    );
    for numbers in types {
        let started = Instant::now();
        let model = build::<B>(args, &numbers, device)?;
        let weights = Weights { parameters: model.num_params(), bytes: numbers.bytes(&model) };
        let model = match numbers.quantized {
            Some(bits) => model.quantized(bits),
            None => model,
        };
        wait::<B>(device)?;
        let name = &numbers.name;
        eprintln!("{name}: weights in {:.1} s", started.elapsed().as_secs_f64());
        for &batch in &args.batch {
            println!("{name},{batch},{}", time(&model, args, &weights, batch, device)?);
        }
    }
    Ok(())
}

/// Numbers that weights are kept in.
struct Numbers {
    name: String,
    dtype: DType,
    quantized: Option<WeightBits>,
}

/// Size of a model.
struct Weights {
    parameters: usize,
    bytes: f64,
}

impl Numbers {
    /// Bytes of a model's weights; of quantized ones a scale for each group, too.
    fn bytes<B: Backend>(&self, model: &LanguageModel<B>) -> f64 {
        let bits = match self.quantized {
            Some(WeightBits::Int8) => 8.0 + 32.0 / GROUP as f64,
            Some(WeightBits::Int4) => 4.0 + 32.0 / GROUP as f64,
            None => 8.0 * self.dtype.size() as f64,
        };
        model.num_params() as f64 * bits / 8.0
    }
}

fn number_type<B: LinearAttentionBackend>(
    name: &str,
    device: &B::Device,
) -> Result<Numbers, String> {
    let (dtype, quantized) = match name {
        "f32" => (DType::F32, None),
        "bf16" => (DType::BF16, None),
        "f16" => (DType::F16, None),
        "int8" => (DType::F32, Some(WeightBits::Int8)),
        "int4" => (DType::F32, Some(WeightBits::Int4)),
        _ => return Err(format!("`--type` is {name}; it has to be f32, bf16, f16, int8 or int4")),
    };
    match B::supports_dtype(device, dtype) && (quantized.is_none() || B::takes_quantized()) {
        true => Ok(Numbers { name: name.to_string(), dtype, quantized }),
        false => Err(format!("`--type`: this device does not compute in {name}")),
    }
}

fn wait<B: Backend>(device: &B::Device) -> Result<(), String> {
    B::sync(device).map_err(|e| format!("the device failed: {e}"))
}

fn build<B: LinearAttentionBackend>(
    args: &Args,
    numbers: &Numbers,
    device: &B::Device,
) -> Result<LanguageModel<B>, String> {
    let text = format!(
        "d_model = {}\n[[layers]]\nrepeat = {}\nmlp = {}\nmixer.{}\n",
        args.width, args.layers, args.mlp, args.mixer
    );
    let config: LanguageModelConfig = toml::from_str(&text).map_err(|e| e.to_string())?;
    let model = config.init::<B>(args.vocab, device).map_err(|e| e.to_string())?;
    Ok(model.map(&mut Cast(numbers.dtype)))
}

/// Weights in another type. One by one, so that no more than one of them is there twice.
struct Cast(DType);

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|weight| weight.cast(self.0))
    }
}

/// The rest of a row.
fn time<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    args: &Args,
    weights: &Weights,
    batch: usize,
    device: &B::Device,
) -> Result<String, String> {
    let ids: Vec<i32> = (0..batch * args.prompt).map(|i| (i * 7919 % args.vocab) as i32).collect();
    let prompt = TensorData::new(ids, [batch, args.prompt]);
    let prompt = Tensor::<B, 2, Int>::from_data(prompt, device);
    let read = || {
        let (hidden, state) = model.hidden(prompt.clone(), None);
        let last = hidden.narrow(1, args.prompt - 1, 1).squeeze_dim::<2>(1);
        (ops::argmax(model.logits(last)), state)
    };
    let _first_use = read();
    wait::<B>(device)?;
    let started = Instant::now();
    let text = read();
    wait::<B>(device)?;
    let prompt_seconds = started.elapsed().as_secs_f64();

    let text = steps(model, text, args.steps);
    wait::<B>(device)?;
    let started = Instant::now();
    let (ids, state) = steps(model, text, args.steps);
    let last = ids.into_data();
    let step = started.elapsed().as_secs_f64() / args.steps as f64;
    if last.iter::<i64>().any(|id| id < 0 || id >= args.vocab as i64) {
        return Err("the model gave an id that it does not have".to_string());
    }

    let (parameters, state_bytes) = (weights.parameters, state.bytes() / batch as u64);
    let moved = weights.bytes + 2.0 * state.bytes() as f64;
    let floor = args.bandwidth.map(|bandwidth| moved / (bandwidth * 1e9));
    let floor = floor.map_or(String::new(), |seconds| format!("{:.4}", 1e3 * seconds));
    let (step_ms, prompt_ms) = (1e3 * step, 1e3 * prompt_seconds);
    let speed = batch as f64 / step;
    let prompt_speed = (batch * args.prompt) as f64 / prompt_seconds;
    Ok(format!(
        "{parameters},{state_bytes},{step_ms:.4},{speed:.1},{floor},{prompt_ms:.3},{prompt_speed:.0}"
    ))
}

/// Ids that come next, and the state before them.
type Text<B> = (Tensor<B, 1, Int>, LanguageModelState<B>);

fn steps<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    (mut ids, mut state): Text<B>,
    count: usize,
) -> Text<B> {
    for _ in 0..count {
        let (logits, next) = model.step(ids, Some(state));
        (ids, state) = (ops::argmax(logits), next);
    }
    (ids, state)
}
