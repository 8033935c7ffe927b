//! Random calls of the recurrences on a device, outputs and gradients, against the same in f64.
//!
//! `cargo run --release --example fuzz --features cuda -- --device cuda --cases 10000 --seed 1`
//!
//! A case is a function of its own seed: the family, its gates, corrections and reads, sizes, the type of
//! q, k and v, and how the sequence is run: whole with every gradient, in pieces that hand the
//! state over, or token by token. Widths of keys and values come from [`WIDTHS`], since a GPU compiles a
//! pair of widths for seconds; `--widths` names others, `--free-widths` draws them all. An error is RMS over
//! the RMS of the truth.
//!
//! `--shard 1/4` runs the cases of a quarter of the kernels, so that four processes compile no kernel twice.
//!
//! The last line counts cases and numbers and says the largest error. A wrong case is shown with the
//! command that repeats it, and makes the exit code 1.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use call::{Call, download, upload};
use clap::Parser;
use linattn::ops::{self, OpResult};
use linattn_cli::device::{self, Job};
use linattn_oracle::{
    Dims, Family, Gate, Inputs, Read, Recipe, Rng, Strength, backward, forward, slice_tokens,
};
use linattn_sweep::Shard;
use linattn_trainer::TrainBackend;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

#[path = "../tests/call.rs"]
mod call;

/// Widths of keys and of values: powers of two, one beside them, and odd ones.
const WIDTHS: [(usize, usize); 24] = [
    (1, 1),
    (1, 17),
    (3, 64),
    (5, 7),
    (8, 8),
    (12, 20),
    (15, 33),
    (16, 16),
    (16, 64),
    (17, 31),
    (20, 24),
    (32, 32),
    (32, 64),
    (33, 1),
    (48, 48),
    (63, 65),
    (64, 64),
    (64, 128),
    (65, 63),
    (96, 32),
    (128, 128),
    (160, 96),
    (200, 40),
    (256, 256),
];
/// The largest error that counts as right, in f32 and with q, k and v of 16 bits.
const LIMITS: (f64, f64) = (1e-5, 5e-2);
/// Most that rounding of a truth of zero would leave.
const NOTHING: f64 = 1e-12;

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
        let (device, types, batch) = (&self.device, self.types.join(","), self.batch);
        format!(
            "cargo run --release --example fuzz{features} -- --device {device} --types {types} \
             --batch {batch} --cases 1 --seed {seed}{widths}"
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
            let found = catch_unwind(AssertUnwindSafe(|| case.run::<B>(&devices[0])));
            let found = found.unwrap_or_else(|panic| Err(said(panic.as_ref())));
            if let Err(why) = tally.add(&case, found) {
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

/// How a sequence is run.
#[derive(Debug, Clone, PartialEq)]
enum Form {
    /// At once, with every gradient of the outputs, the state, or both.
    Whole { outputs: bool, state: bool },
    /// In pieces that end before these tokens.
    Cut(Vec<usize>),
    /// A token at a time.
    Steps,
}

/// One call.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    dims: Dims,
    recipe: Recipe,
    dtype: DType,
    form: Form,
}

fn width(draw: &mut Rng) -> usize {
    let most = draw.of(&[16, 70, 130, 256]);
    draw.between(1, most)
}

/// Around the edges of chunks as often as anywhere.
fn tokens(draw: &mut Rng) -> usize {
    match draw.between(0, 4) {
        0 => draw.between(1, 5),
        1 => draw.between(1, 130),
        2 => draw.of(&[15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129]),
        3 => draw.between(130, 400),
        _ => 64,
    }
}

fn recipe(draw: &mut Rng) -> Recipe {
    let family = draw.of(&[Family::LinearAttention, Family::DeltaRule, Family::LowRank]);
    let gates = [Gate::None, Gate::KeepAll, Gate::Typical, Gate::ForgetAll, Gate::Mixed];
    let strengths = [Strength::Zero, Strength::One, Strength::Typical, Strength::Typical];
    let before = family != Family::LowRank && draw.chance(0.3);
    Recipe {
        gate: draw.of(&gates),
        vector_decay: draw.chance(0.4),
        strength: draw.of(&strengths),
        erase: family == Family::DeltaRule && draw.chance(0.3),
        read: if before { Read::Before } else { Read::After },
        state: draw.chance(0.5),
        ..Recipe::new(family)
    }
}

fn form(draw: &mut Rng, tokens: usize) -> Form {
    match draw.between(0, 9) {
        0 => Form::Steps,
        1 | 2 if tokens > 1 => {
            let count = draw.between(1, 3);
            let mut cuts: Vec<usize> =
                (0..count).map(|_| draw.between(1, tokens - 1)).chain([tokens]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            Form::Cut(cuts)
        }
        3 => Form::Whole { outputs: true, state: false },
        4 => Form::Whole { outputs: false, state: true },
        _ => Form::Whole { outputs: true, state: true },
    }
}

impl Case {
    fn draw(seed: u64, args: &Args, dtypes: &[DType]) -> Self {
        let mut draw = Rng::named(seed, "case");
        let (key_width, value_width) = match args.free_widths {
            true => (width(&mut draw), width(&mut draw)),
            false if args.widths.is_empty() => draw.of(&WIDTHS),
            false => draw.of(&args.widths),
        };
        let key_heads = draw.between(1, 3);
        let heads = key_heads * draw.between(1, 2);
        let (batch, tokens) = (draw.between(1, args.batch as usize), tokens(&mut draw));
        Self {
            seed,
            dims: Dims { batch, tokens, key_heads, heads, key_width, value_width },
            recipe: recipe(&mut draw),
            dtype: draw.of(dtypes),
            form: form(&mut draw, tokens),
        }
    }

    /// Whether the kernels that it takes are of this part.
    fn is_of(&self, shard: Shard) -> bool {
        let Recipe { family, gate, vector_decay, erase, read, .. } = self.recipe;
        let Dims { key_width, value_width, .. } = self.dims;
        let decay = (gate != Gate::None).then_some(vector_decay);
        let kernels = format!(
            "{family:?} {decay:?} {erase} {read:?} {key_width} {value_width} {:?}",
            self.dtype
        );
        let mut hash = DefaultHasher::new();
        kernels.hash(&mut hash);
        shard.takes(hash.finish() as usize)
    }

    /// Of q, k and v, and of the rest.
    fn dtypes(&self) -> [DType; 2] {
        [self.dtype, DType::F32]
    }

    fn limit(&self) -> f64 {
        if self.dtype == DType::F32 { LIMITS.0 } else { LIMITS.1 }
    }

    /// Computed tensors and their truth, by name.
    fn run<B: TrainBackend>(&self, device: &B::Device) -> Result<Vec<Compared>, String> {
        let mut x = Inputs::random(self.seed, self.dims, &self.recipe);
        for rows in [&mut x.q, &mut x.k, &mut x.v] {
            // The truth starts from what the device gets.
            let data = TensorData::new(rows.clone(), [rows.len()]);
            *rows = data.convert_dtype(self.dtype).iter::<f64>().collect();
        }
        match &self.form {
            Form::Whole { outputs, state } => {
                self.differentiate::<B>(device, &x, (*outputs, *state))
            }
            Form::Cut(ends) => self.pieces::<B::InnerBackend>(device, &x, ends, Call::run),
            Form::Steps => {
                let ends: Vec<usize> = (1..=self.dims.tokens).collect();
                self.pieces::<B::InnerBackend>(device, &x, &ends, Call::step)
            }
        }
    }

    /// Runs pieces of the sequence one after another.
    fn pieces<B: ops::LinearAttentionBackend>(
        &self,
        device: &B::Device,
        x: &Inputs,
        ends: &[usize],
        run: impl Fn(Call<B>) -> OpResult<B>,
    ) -> Result<Vec<Compared>, String> {
        let mut state = Call::<B>::new(x, self.dtypes(), device).state;
        let (mut outputs, mut from) = (vec![], 0);
        for &to in ends {
            let piece = slice_tokens(x, from, to, None);
            let call = Call { state, ..Call::<B>::new(&piece, self.dtypes(), device) };
            let (o, next) = run(call).map_err(|e| e.to_string())?;
            outputs.push(o);
            (state, from) = (Some(next), to);
        }
        let truth = forward(x);
        let state = state.ok_or("no piece")?;
        Ok(vec![
            Compared::new("o", truth.o, Tensor::cat(outputs, 1)),
            Compared::new("state", truth.state, state),
        ])
    }

    fn differentiate<B: TrainBackend>(
        &self,
        device: &B::Device,
        x: &Inputs,
        (outputs, states): (bool, bool),
    ) -> Result<Vec<Compared>, String> {
        let truth = forward(x);
        let weights = |name: &str, count: usize, used: bool| -> Vec<f64> {
            let mut rng = Rng::named(self.seed, name);
            (0..count).map(|_| if used { rng.normal() } else { 0.0 }).collect()
        };
        let d_o = weights("d_o", truth.o.len(), outputs);
        let d_state = weights("d_state", truth.state.len(), states);
        let want = backward(x, &d_o, &d_state);

        let call = Call::<B>::new(x, self.dtypes(), device).require_grad();
        let (o, state) = call.clone().run().map_err(|e| e.to_string())?;
        let weigh = |y: &Tensor<B, 4>, d: &[f64]| {
            let d = upload::<B, 4>(d, y.dims(), DType::F32, device);
            (y.clone().cast(DType::F32) * d).sum()
        };
        let loss = match (outputs, states) {
            (true, false) => weigh(&o, &d_o),
            (false, true) => weigh(&state, &d_state),
            _ => weigh(&o, &d_o) + weigh(&state, &d_state),
        };
        let found = loss.backward();
        let [erase, a, b] = call.rows();
        let (scalar, vector) = match call.g.clone() {
            Some(ops::Decay::Scalar(g)) => (Some(g), None),
            Some(ops::Decay::Vector(g)) => (None, Some(g)),
            None => (None, None),
        };
        let gradients = [
            gradient("dq", Some(want.q), Some(&call.q), &found),
            gradient("dk", Some(want.k), Some(&call.k), &found),
            gradient("dv", Some(want.v), Some(&call.v), &found),
            gradient("derase", want.erase, erase, &found),
            gradient("da", want.a, a, &found),
            gradient("db", want.b, b, &found),
            gradient("dg", want.g.clone(), scalar.as_ref(), &found),
            gradient("dg", want.g, vector.as_ref(), &found),
            gradient("dbeta", want.beta, call.beta(), &found),
            gradient("dstate", Some(want.state), call.state.as_ref(), &found),
        ];
        let outputs = [
            Compared::new("o", truth.o, o.inner()),
            Compared::new("state", truth.state, state.inner()),
        ];
        Ok(outputs.into_iter().chain(gradients.into_iter().flatten()).collect())
    }
}

/// The gradient of an input, where there is such an input. One that is missing has no numbers.
fn gradient<B: TrainBackend, const D: usize>(
    name: &'static str,
    want: Option<Vec<f64>>,
    input: Option<&Tensor<B, D>>,
    found: &B::Gradients,
) -> Option<Compared> {
    let got = input?.grad(found).map(download).unwrap_or_default();
    Some(Compared { name, want: want.unwrap_or_default(), got })
}

/// A tensor that was computed, and what it has to be.
#[derive(Debug, Clone)]
struct Compared {
    name: &'static str,
    want: Vec<f64>,
    got: Vec<f64>,
}

impl Compared {
    fn new<B: Backend, const D: usize>(
        name: &'static str,
        want: Vec<f64>,
        got: Tensor<B, D>,
    ) -> Self {
        Self { name, want, got: download(got) }
    }

    /// RMS of the error and of the truth.
    fn error(&self) -> Result<(f64, f64), String> {
        if self.want.len() != self.got.len() {
            let (name, got, want) = (self.name, self.got.len(), self.want.len());
            return Err(format!("{name} has {got} numbers; it has to have {want}"));
        }
        let count = self.want.len().max(1) as f64;
        let rms = |sum: f64| (sum / count).sqrt();
        let errors = self.want.iter().zip(&self.got).map(|(want, got)| (got - want).powi(2));
        Ok((rms(errors.sum()), rms(self.want.iter().map(|x| x * x).sum())))
    }
}

/// The largest error of cases in one type.
#[derive(Debug, Clone, Copy, Default)]
struct Worst {
    error: f64,
    name: &'static str,
    seed: u64,
    cases: u64,
}

/// Results so far.
#[derive(Debug, Clone, Default)]
struct Tally {
    cases: u64,
    numbers: u64,
    wrong: u64,
    /// In f32, and with q, k and v of 16 bits.
    worst: [Worst; 2],
}

impl Tally {
    /// Counts a case.
    /// # Errors
    /// A description of what it got wrong.
    fn add(&mut self, case: &Case, found: Result<Vec<Compared>, String>) -> Result<(), String> {
        self.cases += 1;
        let checked = found.and_then(|list| list.iter().try_for_each(|x| self.compare(case, x)));
        self.worst[usize::from(case.dtype != DType::F32)].cases += 1;
        self.wrong += u64::from(checked.is_err());
        checked
    }

    fn compare(&mut self, case: &Case, x: &Compared) -> Result<(), String> {
        let (error, size) = x.error()?;
        self.numbers += x.want.len() as u64;
        let limit = case.limit();
        // NaN and infinity are wrong.
        if !(error.is_finite() && error <= limit * size + NOTHING) {
            return Err(format!("{}: error {error:.2e} of {size:.2e}, limit {limit:.0e}", x.name));
        }
        let worst = &mut self.worst[usize::from(case.dtype != DType::F32)];
        if size > NOTHING / limit && error / size > worst.error {
            (worst.error, worst.name, worst.seed) = (error / size, x.name, case.seed);
        }
        Ok(())
    }

    fn line(&self, args: &Args) -> String {
        let worst = self.worst.iter().zip(["f32", "16 bits"]).filter(|(worst, _)| worst.cases > 0);
        let worst: Vec<String> = worst
            .map(|(worst, kind)| {
                let &Worst { error, name, seed, cases } = worst;
                format!("{cases} in {kind}: worst error {error:.2e} ({name}, seed {seed})")
            })
            .collect();
        let Self { cases, numbers, wrong, .. } = self;
        format!(
            "{cases} cases on {} from seed {}, {numbers} numbers, {wrong} wrong; {}",
            args.device,
            args.seed,
            worst.join("; ")
        )
    }
}
