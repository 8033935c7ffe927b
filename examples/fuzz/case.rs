//! A call: how it is drawn from its seed, run on a device, and solved in f64.

use crate::args::Args;
use crate::call::{Call, download, upload};
use crate::problem::{Named, Problem};
use burn::tensor::{DType, Tensor, TensorData};
use linattn::ops::{self, OpResult, SequenceLengths};
use linattn_oracle::{DecayLevel, Dims, Family, Inputs, Read, Recipe, Rng, Strength, slice_tokens};
use linattn_sweep::Shard;
use linattn_trainer::TrainBackend;
use std::hash::{DefaultHasher, Hash, Hasher};

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

/// How a sequence is run.
#[derive(Debug, Clone, PartialEq)]
enum Form {
    /// At once, with every gradient of the outputs, the state, or both.
    Whole { outputs: bool, state: bool },
    /// As [`Form::Whole`] of both, sequences of these lengths in one row.
    Packed(Vec<usize>),
    /// In pieces that end before these tokens.
    Cut(Vec<usize>),
    /// A token at a time.
    Steps,
}

/// One call.
#[derive(Debug, Clone)]
pub struct Case {
    pub seed: u64,
    /// Of [`Form::Packed`], a batch of one with the tokens of all sequences.
    dims: Dims,
    recipe: Recipe,
    /// Of q, k and v.
    pub dtype: DType,
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
    let decays = [
        DecayLevel::None,
        DecayLevel::KeepAll,
        DecayLevel::Typical,
        DecayLevel::ForgetAll,
        DecayLevel::Mixed,
    ];
    let strengths = [Strength::Zero, Strength::One, Strength::Typical, Strength::Typical];
    let before = family != Family::LowRank && draw.chance(0.3);
    Recipe {
        decay: draw.of(&decays),
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

/// Up to seven sequences, those of a few tokens among them.
fn lengths(draw: &mut Rng) -> Vec<usize> {
    let count = draw.between(1, 7);
    (0..count).map(|_| tokens(draw)).collect()
}

impl Case {
    pub fn draw(seed: u64, args: &Args, dtypes: &[DType]) -> Self {
        let mut draw = Rng::named(seed, "case");
        let (key_width, value_width) = match args.free_widths {
            true => (width(&mut draw), width(&mut draw)),
            false if args.widths.is_empty() => draw.of(&WIDTHS),
            false => draw.of(&args.widths),
        };
        let key_heads = draw.between(1, 3);
        let heads = key_heads * draw.between(1, 2);
        let (batch, tokens) = (draw.between(1, args.batch as usize), tokens(&mut draw));
        let mut case = Self {
            seed,
            dims: Dims { batch, tokens, key_heads, heads, key_width, value_width },
            recipe: recipe(&mut draw),
            dtype: draw.of(dtypes),
            form: form(&mut draw, tokens),
        };
        if args.packed {
            let lengths = lengths(&mut Rng::named(seed, "lengths"));
            case.dims = Dims { batch: 1, tokens: lengths.iter().sum(), ..case.dims };
            case.form = Form::Packed(lengths);
        }
        case
    }

    /// Whether the kernels that it takes are of this part.
    pub fn is_of(&self, shard: Shard) -> bool {
        let Recipe { family, decay, vector_decay, erase, read, .. } = self.recipe;
        let Dims { key_width, value_width, .. } = self.dims;
        let decay = (decay != DecayLevel::None).then_some(vector_decay);
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

    pub fn limit(&self) -> f64 {
        if self.dtype == DType::F32 { LIMITS.0 } else { LIMITS.1 }
    }

    /// Inputs and loss, rounded as the device gets them.
    pub fn problem(&self) -> Problem {
        let sequences = match &self.form {
            Form::Packed(lengths) => {
                let own = |(n, &tokens): (usize, &usize)| {
                    let seed = Rng::named(self.seed, &format!("sequence {n}")).between(0, 1 << 20);
                    Inputs::random(seed as u64, Dims { tokens, ..self.dims }, &self.recipe)
                };
                lengths.iter().enumerate().map(own).collect()
            }
            _ => vec![Inputs::random(self.seed, self.dims, &self.recipe)],
        };
        let mut problem = Problem::new(sequences);
        for numbers in problem.sequences.iter_mut().flat_map(|x| [&mut x.q, &mut x.k, &mut x.v]) {
            let data = TensorData::new(numbers.clone(), [numbers.len()]);
            *numbers = data.convert_dtype(self.dtype).iter::<f64>().collect();
        }
        match self.form {
            Form::Whole { outputs, state } => problem.differentiate(self.seed, outputs, state),
            Form::Packed(_) => problem.differentiate(self.seed, true, true),
            Form::Cut(_) | Form::Steps => {}
        }
        problem
    }

    /// Results of the device, by name.
    /// # Errors
    /// The refusal of the operation.
    pub fn run<B: TrainBackend>(
        &self,
        problem: &Problem,
        device: &B::Device,
    ) -> Result<Named, String> {
        let x = problem.joined();
        match &self.form {
            Form::Whole { .. } => self.differentiate::<B>(device, &x, problem, None),
            Form::Packed(lengths) => {
                let lengths = SequenceLengths::new(lengths);
                self.differentiate::<B>(device, &x, problem, Some(&lengths))
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
    ) -> Result<Named, String> {
        let mut state = Call::<B>::new(x, self.dtypes(), device).state;
        let (mut outputs, mut from) = (vec![], 0);
        for &to in ends {
            let piece = slice_tokens(x, from, to, None);
            let call = Call { state, ..Call::<B>::new(&piece, self.dtypes(), device) };
            let (o, next) = run(call).map_err(|e| e.to_string())?;
            outputs.push(o);
            (state, from) = (Some(next), to);
        }
        let state = state.ok_or("no piece")?;
        Ok(vec![("o", download(Tensor::cat(outputs, 1))), ("state", download(state))])
    }

    fn differentiate<B: TrainBackend>(
        &self,
        device: &B::Device,
        x: &Inputs,
        problem: &Problem,
        lengths: Option<&SequenceLengths>,
    ) -> Result<Named, String> {
        let call = Call::<B>::new(x, self.dtypes(), device).require_grad();
        let (o, state) = call.clone().run_sequences(lengths).map_err(|e| e.to_string())?;
        let weigh = |y: &Tensor<B, 4>, d: Vec<f64>| {
            (!d.is_empty()).then(|| {
                let d = upload::<B, 4>(&d, y.dims(), DType::F32, device);
                (y.clone().cast(DType::F32) * d).sum()
            })
        };
        let losses = [weigh(&o, problem.d_o()), weigh(&state, problem.d_state())];
        let loss = losses.into_iter().flatten().reduce(|a, b| a + b).ok_or("no loss")?;
        let found = loss.backward();
        let [erase, a, b] = call.rows();
        let (scalar, vector) = match &call.g {
            Some(ops::Decay::Scalar(g)) => (Some(g), None),
            Some(ops::Decay::Vector(g)) => (None, Some(g)),
            None => (None, None),
        };
        let gradients = [
            gradient("dq", Some(&call.q), &found),
            gradient("dk", Some(&call.k), &found),
            gradient("dv", Some(&call.v), &found),
            gradient("derase", erase, &found),
            gradient("da", a, &found),
            gradient("db", b, &found),
            gradient("dg", scalar, &found),
            gradient("dg", vector, &found),
            gradient("dbeta", call.beta(), &found),
            gradient("dstate", call.state.as_ref(), &found),
        ];
        let outputs = [("o", download(o)), ("state", download(state))];
        Ok(outputs.into_iter().chain(gradients.into_iter().flatten()).collect())
    }
}

/// The gradient of an input, where there is such an input. One that is missing has no numbers.
fn gradient<B: TrainBackend, const D: usize>(
    name: &'static str,
    input: Option<&Tensor<B, D>>,
    found: &B::Gradients,
) -> Option<(&'static str, Vec<f64>)> {
    Some((name, input?.grad(found).map(download).unwrap_or_default()))
}
