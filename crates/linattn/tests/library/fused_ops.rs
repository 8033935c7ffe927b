//! The fused layers around a recurrence, on GPUs as on the CPU: numbers, gradients, and the decoding of
//! whole models.

use crate::call::{download, upload};
use crate::layers::drawn_by;
use crate::ops::F32_LIMIT;
use crate::support::{alone, normal_by};
use crate::weights::Weights;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn::ops::backend::{
    Activation, Column, ColumnKind, ConvSplit, Embedding, GateActivation, GatedProduct, GatedValue,
    HeadNorm, LinearCrossEntropy, LinearLayer, LstmCell, LstmRecurrence, Measure, Normalization,
    Pack, Pass, Rotary, Seen, SoftmaxRows,
};
use linattn::ops::{AdamW, AdamWStep, LinearAttentionBackend, Moments, SequenceLengths};
use linattn_oracle::{Rng, assert_close};
use std::marker::PhantomData;

/// Results by name.
type Found = Vec<(String, Vec<f64>)>;

/// The same numbers on every backend.
fn draw<B: Backend, const D: usize>(
    name: &str,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    let mut rng = Rng::named(5, name);
    let values: Vec<f64> = (0..shape.iter().product::<usize>()).map(|_| rng.normal()).collect();
    upload(&values, shape, DType::F32, device)
}

fn inside<B: Backend, const D: usize>(x: &Tensor<B, D>) -> FloatTensor<B> {
    x.clone().into_primitive().tensor()
}

fn outside<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// Inputs of an operation: rows that lie as `[T, B, W]`, so that they are not contiguous, tensors of their
/// shape, and vectors.
struct Inputs<B: Backend> {
    x: Tensor<B, 3>,
    gate: Tensor<B, 3>,
    conv_state: Tensor<B, 3>,
    taps: Tensor<B, 2>,
    weight: Tensor<B, 1>,
    heads: Tensor<B, 1>,
}

impl<B: Backend> Inputs<B> {
    fn new(tokens: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x: draw::<B, 3>("x", [tokens, 2, width], device).swap_dims(0, 1),
            gate: draw("gate", [2, tokens, width], device),
            conv_state: draw("conv_state", [2, 3, width], device),
            taps: draw("taps", [4, width], device),
            weight: draw("weight", [width], device),
            heads: draw("heads", [width / 5], device),
        }
    }
}

impl<B: LinearAttentionBackend> Inputs<B> {
    /// Every operation, by name.
    fn run(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let mut found = self.norms();
        found.extend(self.products());
        found.extend(self.convolutions());
        found.extend(self.losses());
        found.extend(self.recurrence());
        found.extend(self.rotations());
        found.extend(self.shares());
        found
    }

    /// Heads of five channels, of which four and two are rotated.
    fn rotations(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let ([batch, tokens, width], device) = (self.x.dims(), self.x.device());
        let heads = self.x.clone().reshape([batch, tokens, width / 5, 5]);
        let rotated = [("four channels rotated", 2), ("two channels rotated", 1)];
        let one = |(name, half)| {
            let table = draw::<B, 3>(name, [2, tokens, half], &device);
            let rotary = Rotary { x: inside(&heads), table: inside(&table) };
            let y = outside::<B, 4>(only(B::fused_rotary(rotary, false)));
            (name, y.flatten::<3>(2, 3))
        };
        rotated.map(one).into()
    }

    /// Shares of scores: of all keys, and of those before a query, some of them and all.
    fn shares(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let queries = self.x.dims()[1].min(self.x.dims()[2]);
        let scores = self.x.clone().narrow(1, 0, queries);
        let causal = |window| Seen::Causal { window };
        [
            ("softmax", Seen::All),
            ("causal softmax", causal(None)),
            ("softmax in a window", causal(Some(3))),
        ]
        .map(|(name, seen)| {
            let rows = SoftmaxRows { scores: inside(&scores), seen };
            (name, outside::<B, 3>(only(B::fused_softmax(rows, false))))
        })
        .into()
    }

    /// The recurrences of LSTM and sLSTM with heads of five cells.
    fn recurrence(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let ([batch, tokens, width], device) = (self.x.dims(), self.x.device());
        let (heads, cells) = (width / 5, [batch, 1, width / 5, 5]);
        let by_head = |x: &Tensor<B, 3>| x.clone().reshape([batch, tokens, heads, 5]);
        let [x, gate] = [by_head(&self.x), by_head(&self.gate)];
        let gates = Tensor::cat(vec![gate.clone(), x.clone(), x, gate], 3);
        let weights = self.taps.clone().reshape([4, heads, 5]).permute([1, 2, 0]);
        let r = weights.repeat_dim(2, 5) * 0.3;
        let state = ["h", "c", "n", "m"].map(|name| inside(&draw::<B, 4>(name, cells, &device)));
        let mut found = vec![];
        // What was written is more than 0.
        let [h, c, n, m] = state;
        let state = vec![h, c, inside(&outside::<B, 4>(n).exp()), m];
        let half = state[..2].to_vec();
        for (cell, state, names) in [
            (LstmCell::Sigmoid, None, &["LSTM", "its last c"][..]),
            (LstmCell::Sigmoid, Some(half), &["LSTM with a state", "its c after it"]),
            (LstmCell::Exponential, None, &["sLSTM", "last c", "last n", "last m"]),
            (
                LstmCell::Exponential,
                Some(state),
                &["sLSTM with a state", "c after it", "n after it", "m after it"],
            ),
        ] {
            let x = LstmRecurrence { cell, x: inside(&gates), r: inside(&r), state };
            let outputs = B::fused_lstm(x, false).expect("an operation in one piece").outputs;
            let flat = |x| outside::<B, 4>(x).flatten::<3>(2, 3);
            found.extend(names.iter().copied().zip(outputs.into_iter().map(flat)));
        }
        found
    }

    fn norms(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let root_mean_square = Normalization {
            x: inside(&self.x),
            residual: None,
            weight: Some(inside(&self.weight)),
            bias: None,
            gate: None,
            activation: Activation::Silu,
            measure: Measure::RootMeanSquare,
            epsilon: 1e-5,
            factor: 1.0,
            dtype: DType::F32,
        };
        let (plain, gate) = (root_mean_square.clone(), || Some(inside(&self.gate)));
        let length =
            Normalization { measure: Measure::Length, weight: None, factor: -0.3, ..plain.clone() };
        let silu = Normalization { gate: gate(), ..plain.clone() };
        let sigmoid =
            Normalization { gate: gate(), activation: Activation::Sigmoid, ..plain.clone() };
        let layer = Normalization {
            measure: Measure::Standard,
            residual: gate(),
            bias: Some(inside(&self.weight)),
            ..plain
        };
        let all = [
            ("rms", root_mean_square),
            ("l2", length),
            ("silu", silu),
            ("sigmoid", sigmoid),
            ("layer norm of a sum", layer),
        ];
        let run = |(name, n)| outputs::<B>(B::fused_normalize(n, false)).map(move |y| (name, y));
        all.into_iter().flat_map(run).collect()
    }

    fn products(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let product = |gate, value, activation| {
            B::fused_gated_product(GatedProduct { gate, value, activation }, false)
        };
        let gate = || inside(&self.gate);
        let both = inside(&Tensor::cat(vec![self.x.clone(), self.gate.clone()], 2));
        let value = GatedValue::Tensor(inside(&self.x));
        let matrix = inside(&self.taps);
        let pack = Pack { matrices: vec![matrix.clone(), matrix], padding: 0, dtype: DType::F32 };
        let [_, _, width] = self.x.dims();
        let square = draw::<B, 2>("square", [width, 3], &self.x.device());
        let linear = LinearLayer { x: inside(&self.x), weight: inside(&square), bias: None };
        let packed_taps = outside::<B, 2>(only(B::fused_pack(pack, false)));
        let mut found = vec![("packed matrices", packed_taps.unsqueeze::<3>())];
        let passes = [
            ("product", product(gate(), value, GateActivation::Silu)),
            ("product of halves", product(both, GatedValue::Packed, GateActivation::Gelu)),
            ("log sigmoid", product(gate(), GatedValue::Number(0.5), GateActivation::LogSigmoid)),
            ("GELU by a tanh", product(gate(), GatedValue::Number(1.0), GateActivation::GeluTanh)),
            ("ReLU squared", product(gate(), GatedValue::Number(2.0), GateActivation::SquaredRelu)),
            ("linear layer", B::fused_linear(linear, false)),
        ];
        for (name, pass) in passes {
            found.extend(outputs::<B>(pass).map(|y| (name, y)));
        }
        found
    }

    fn convolutions(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let [_, _, width] = self.x.dims();
        let bare = ConvSplit {
            x: inside(&self.x),
            weight: None,
            bias: None,
            conv_state: None,
            a_log: None,
            dt_bias: None,
            columns: vec![],
            lengths: None,
        };
        let column = |width, kind| Column { width, kind };
        let mut found = vec![];
        for (name, a_log) in [("one rate a column", &self.weight), ("five", &self.heads)] {
            let decay = ConvSplit {
                a_log: Some(inside(a_log)),
                dt_bias: Some(inside(&self.weight)),
                columns: vec![column(width, ColumnKind::LogDecay)],
                ..bare.clone()
            };
            found.extend(outputs::<B>(B::fused_conv_split(decay, false)).map(|y| (name, y)));
        }
        let kind = |activation, norm| ColumnKind::Conv { activation, norm };
        let convolution = ConvSplit {
            weight: Some(inside(&self.taps)),
            bias: Some(inside(&self.weight)),
            conv_state: Some(inside(&self.conv_state)),
            columns: vec![column(width, kind(Some(Activation::Silu), None))],
            ..bare.clone()
        };
        let pass = B::fused_conv_split(convolution, false);
        found.extend(outputs::<B>(pass).map(|y| ("convolution, bias, SiLU", y)));
        let [batch, tokens, _] = self.x.dims();
        let row = self.x.clone().reshape([1, batch * tokens, width]);
        let lengths = ConvSplit {
            x: inside(&row),
            weight: Some(inside(&self.taps)),
            bias: Some(inside(&self.weight)),
            conv_state: Some(inside(&self.conv_state)),
            columns: vec![column(width, kind(Some(Activation::Silu), None))],
            lengths: Some(SequenceLengths::new(&[1, batch * tokens - 1])),
            ..bare.clone()
        };
        let pass = B::fused_conv_split(lengths, false);
        found.extend(outputs::<B>(pass).map(|y| ("convolution of two sequences", y)));
        // A fifth each: normalised heads, a convolution alone, beta, copies, and copies again.
        let fifth = width / 5;
        // Kernels take heads of up to 256 columns.
        let norm =
            Some(HeadNorm { width: if fifth > 256 { fifth / 2 } else { fifth }, factor: 0.7 });
        let split = ConvSplit {
            weight: Some(inside(&self.taps.clone().narrow(1, 0, 2 * fifth))),
            columns: vec![
                column(fifth, kind(Some(Activation::Sigmoid), norm)),
                column(fifth, kind(None, None)),
                column(fifth, ColumnKind::Beta { scale: 2.0 }),
                column(2 * fifth, ColumnKind::Copy),
            ],
            ..bare
        };
        let pass = B::fused_conv_split(split, false);
        found.extend(outputs::<B>(pass).map(|y| ("columns of all kinds", y)));
        found
    }

    fn losses(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let device = self.x.device();
        let [batch, tokens, width] = self.x.dims();
        let count = batch * tokens;
        let rows: Tensor<B, 2> = self.gate.clone().reshape([count, width]);
        let ids = |modulus: usize| -> Tensor<B, 1, Int> {
            let ids: Vec<i32> = (0..count).map(|n| (n * n % modulus) as i32).collect();
            Tensor::from_data(TensorData::new(ids, [count]), &device)
        };
        let embedding = Embedding {
            table: inside(&self.taps),
            ids: ids(4).into_primitive(),
            dtype: DType::F32,
        };
        let embedded = outside::<B, 2>(only(B::fused_embedding(embedding, false)));
        let loss = LinearCrossEntropy {
            hidden: inside(&rows),
            weight: inside(&self.taps),
            by_rows: true,
            bias: None,
            target: ids(3).into_primitive(),
            scale: 0.3,
            frozen: false,
        };
        // Of so many tokens that their logits are filled up to 16 bytes: by rows, and by columns with a bias.
        let three = LinearCrossEntropy {
            weight: inside(&self.taps.clone().narrow(0, 0, 3)),
            ..loss.clone()
        };
        let by_columns = LinearCrossEntropy {
            hidden: inside(&rows.narrow(1, 0, 4)),
            weight: inside(&self.taps),
            by_rows: false,
            bias: Some(inside(&self.weight)),
            target: ids(5).into_primitive(),
            ..loss.clone()
        };
        let losses = [
            ("cross-entropy", loss),
            ("cross-entropy of three", three),
            ("cross-entropy by columns", by_columns),
        ];
        let found = losses.map(|(name, loss)| {
            let loss = outside::<B, 1>(only(B::fused_cross_entropy(loss, false)));
            (name, loss.unsqueeze())
        });
        [("embeddings", embedded.unsqueeze())].into_iter().chain(found).collect()
    }
}

/// Outputs of an operation in one piece: every backend here has such a piece for f32.
fn outputs<B: Backend>(pass: Option<Pass<B>>) -> impl Iterator<Item = Tensor<B, 3>> {
    pass.expect("an operation in one piece").outputs.into_iter().map(outside::<B, 3>)
}

fn only<B: Backend>(pass: Option<Pass<B>>) -> FloatTensor<B> {
    pass.expect("an operation in one piece").outputs.remove(0)
}

/// Tokens and widths, multiples of 5 and of nothing that kernels are fond of.
const SIZES: [[usize; 2]; 4] = [[1, 5], [3, 35], [9, 130], [2, 2050]];

fn results<B: LinearAttentionBackend>(device: &B::Device) -> Found {
    let mut found = vec![];
    for [tokens, width] in SIZES {
        for (name, y) in Inputs::<B>::new(tokens, width, device).run() {
            found.push((format!("{name}, {tokens} x {width}"), download(y)));
        }
    }
    found
}

/// Gradients of the sum of all results, each number with a weight of its own.
fn gradients<B: AutodiffBackend + LinearAttentionBackend>(device: &B::Device) -> Found {
    let _alone = alone();
    let Inputs { x, gate, conv_state, taps, weight, heads } = Inputs::<B>::new(3, 35, device);
    let inputs = Inputs {
        x: x.require_grad(),
        gate: gate.require_grad(),
        conv_state: conv_state.require_grad(),
        taps: taps.require_grad(),
        weight: weight.require_grad(),
        heads: heads.require_grad(),
    };
    let weighed = inputs.run().into_iter().map(|(name, y)| {
        let weights = draw::<B, 3>(name, y.dims(), device);
        (y * weights).sum()
    });
    let found = weighed.reduce(|sum, y| sum + y).unwrap().backward();
    let of3 = |x: &Tensor<B, 3>| download(x.grad(&found).expect("it is tracked"));
    let of1 = |x: &Tensor<B, 1>| download(x.grad(&found).expect("it is tracked"));
    vec![
        ("dx".into(), of3(&inputs.x)),
        ("dgate".into(), of3(&inputs.gate)),
        ("dconv_state".into(), of3(&inputs.conv_state)),
        ("dtaps".into(), download(inputs.taps.grad(&found).expect("it is tracked"))),
        ("dweight".into(), of1(&inputs.weight)),
        ("dheads".into(), of1(&inputs.heads)),
    ]
}

/// Parameters and moments after each of three steps of AdamW from the first one on. Rows of many widths, since a
/// device may leave gaps between those of a new tensor; what lies in its memory is no number.
fn adamw<B: LinearAttentionBackend>(device: &B::Device) -> Found {
    let shapes = [[3, 5], [128, 352], [1, 7], [64, 100], [2, 1]];
    let mut parameters = shapes.map(|shape| draw::<B, 2>("parameter", shape, device));
    let mut moments: Vec<Option<Moments<FloatTensor<B>>>> = vec![None; shapes.len()];
    drop((0..8).map(|_| Tensor::<B, 2>::full([512, 512], f32::NAN, device)).collect::<Vec<_>>());
    let numbers = AdamW { learning_rate: 0.01, beta_1: 0.9, beta_2: 0.99, epsilon: 1e-8 };
    let mut found = vec![];
    for time in 0..3 {
        let steps = parameters.iter().zip(moments).map(|(parameter, moments)| {
            let gradient = draw::<B, 2>(&format!("gradient {time}"), parameter.dims(), device);
            let (parameter, gradient) = (inside(parameter), inside(&gradient));
            AdamWStep { parameter, gradient, moments, decay: 0.1 }
        });
        let done = linattn::ops::adamw_step::<B>(steps.collect(), numbers, None);
        let (mut next, mut kept) = (vec![], vec![]);
        for (place, (parameter, moments)) in done.into_iter().enumerate() {
            let parameter = outside::<B, 2>(parameter);
            for (name, x) in [
                ("parameter", parameter.clone()),
                ("first moment", outside(moments.first.clone())),
                ("second moment", outside(moments.second.clone())),
            ] {
                found.push((format!("{name} of {:?}, step {time}", shapes[place]), download(x)));
            }
            next.push(parameter);
            kept.push(Some(moments));
        }
        parameters = next.try_into().expect("as many as before");
        moments = kept;
    }
    found
}

#[track_caller]
fn hold(want: &[(String, Vec<f64>)], got: &[(String, Vec<f64>)], limit: f64) {
    assert_eq!(want.len(), got.len());
    for ((name, want), (_, got)) in want.iter().zip(got) {
        assert_close(name, want, got, limit);
    }
}

/// A model of every layer that has kernels around its recurrence.
fn config() -> LanguageModelConfig {
    let layers = [
        "gated_deltanet = { heads = 2 }",
        "kda = { heads = 2 }",
        "mamba2 = { d_state = 8, head_width = 8 }",
        "gated_retention = { heads = 2 }",
        "attention = { heads = 2, qk_norm = true }",
    ];
    let layers = layers
        .map(|mixer| format!("[[layers]]\nmixer.{mixer}\nmlp = {{ swiglu = {{ width = 20 }} }}\n"));
    let head = "d_model = 16\ntie_embeddings = false\ninitializer_range = 0.2\n";
    toml::from_str(&format!("{head}{}", layers.concat())).unwrap()
}

/// Models of one layer whose MLP cannot be folded into its products as it usually is, or has another gate.
fn around_an_mlp() -> impl Iterator<Item = LanguageModelConfig> {
    let cases = [
        ("", "mlp = { geglu = { width = 20 } }"),
        ("", "mlp = { swiglu = { width = 20, bias = true } }"),
        ("", "mlp = { swiglu = { width = 20 } }\npost_norm = true"),
        ("", "mlp = { swiglu = { width = 20 } }\ncanon = { before_mlp = 3 }"),
        ("", "mlp = { swiglu = { width = 20 } }\ncanon = { inside_mlp = 3 }"),
        ("", "mlp = { swiglu = { width = 20 } }\ncanon = { before_mixer = 3 }"),
        ("norm = \"layer\"", "mlp = { swiglu = { width = 20 } }"),
        ("norm = \"zero_centered_rms\"", "mlp = { swiglu = { width = 20 } }"),
    ];
    cases.into_iter().map(|(model, layer)| {
        let head = "d_model = 16\ninitializer_range = 0.2";
        let layer = format!("[[layers]]\nmixer.deltanet = {{ heads = 2 }}\n{layer}\n");
        toml::from_str(&format!("{head}\n{model}\n{layer}")).unwrap()
    })
}

const VOCAB: usize = 11;

/// Logits of a prompt of five ids, and of six more, one after another.
fn decoded<B: LinearAttentionBackend>(model: &LanguageModel<B>, device: &B::Device) -> Found {
    let ids = |from: i32, count: usize| -> Tensor<B, 2, Int> {
        let ids: Vec<i32> = (from..).map(|i| i * i * 7 % VOCAB as i32).take(2 * count).collect();
        Tensor::from_data(TensorData::new(ids, [2, count]), device)
    };
    let (logits, mut state) = model.forward(ids(0, 5), None);
    let mut found = vec![("prompt".to_string(), download(logits))];
    for token in 0..6 {
        let (logits, next) = model.step(ids(10 + token, 1).squeeze_dim(1), Some(state));
        found.push((format!("token {token}"), download(logits)));
        state = next;
    }
    found
}

/// Logits of a model that trains on eleven tokens, of a memory two mini-batches of four and three more, and gradients of
/// all parameters.
fn learnt<B: AutodiffBackend + LinearAttentionBackend>(
    model: &LanguageModel<B>,
    device: &B::Device,
) -> Found {
    struct Gradients<B: AutodiffBackend>(GradientsParams, Found, PhantomData<B>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<B> {
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let gradient = self.0.get::<B::InnerBackend, R>(param.id).expect("it is learnt");
            self.1.push((
                format!("gradient {}, {:?}", self.1.len(), param.dims()),
                download(gradient),
            ));
        }
    }
    let _alone = alone();
    let ids: Vec<i32> = (0..22).map(|i| i * i * 7 % VOCAB as i32).collect();
    let ids = Tensor::from_data(TensorData::new(ids, [2, 11]), device);
    let logits = model.logits(model.hidden_alone(ids));
    let weights = draw::<B, 3>("weights of logits", logits.dims(), device);
    let found = vec![("logits".to_string(), download(logits.clone()))];
    let gradients = GradientsParams::from_grads((logits * weights).sum().backward(), model);
    let mut gradients = Gradients(gradients, found, PhantomData);
    model.visit(&mut gradients);
    gradients.1
}

/// Memories that do not come so close to their targets that rounding is all that is left to learn from, and diagonal
/// models, whose taps are made otherwise where nobody reads a state.
const LEARNERS: [&str; 6] = [
    "ttt = { heads = 2, mini_batch = 4, base_lr = 0.2, conv_size = 0 }",
    "ttt = { heads = 2, mini_batch = 4, base_lr = 0.2, conv_size = 3, output_gate = true }",
    "ttt = { heads = 2, mini_batch = 4, base_lr = 0.2, inner = 'mlp' }",
    "s4d = { d_state = 6 }",
    "s4d = { d_state = 4, discretization = 'bilinear' }",
    "h3 = { head_width = 2, d_state = 6, learn_inputs = true }",
];

fn learner(mixer: &str) -> LanguageModelConfig {
    let head = "d_model = 16\ntie_embeddings = false\ninitializer_range = 0.2\n[[layers]]\n";
    toml::from_str(&format!("{head}mixer.{mixer}\n")).unwrap()
}

/// The same on GPUs; a module for each backend that is compiled in.
macro_rules! on_gpu {
    ($module:ident, $backend:ty, $device:path, $operation:expr, $model:expr) => {
        mod $module {
            use super::*;

            #[test]
            fn every_operation_gives_what_the_cpu_gives() {
                let Some(device) = $device() else { return };
                let want = results::<Flex>(&Default::default());
                hold(&want, &results::<$backend>(&device), $operation);
            }

            #[test]
            fn every_operation_has_the_gradients_of_the_cpu() {
                let Some(device) = $device() else { return };
                let want = gradients::<Autodiff<Flex>>(&Default::default());
                hold(&want, &gradients::<Autodiff<$backend>>(&device), $operation);
            }

            #[test]
            fn adamw_takes_the_steps_of_the_cpu() {
                let Some(device) = $device() else { return };
                let want = adamw::<Flex>(&Default::default());
                hold(&want, &adamw::<$backend>(&device), F32_LIMIT);
            }

            #[test]
            fn memories_and_taps_learn_as_on_the_cpu() {
                let Some(device) = $device() else { return };
                for mixer in LEARNERS {
                    let (config, cpu) = (learner(mixer), Default::default());
                    let model = config.init::<Autodiff<Flex>>(VOCAB, &cpu).unwrap();
                    let model = normal_by(1, 0.3, model);
                    let mut weights = Weights::default();
                    model.visit(&mut weights);
                    let there = config.init::<Autodiff<$backend>>(VOCAB, &device).unwrap();
                    let there = there.map(&mut weights);
                    hold(&learnt(&model, &cpu), &learnt(&there, &device), $model);
                }
            }

            #[test]
            fn models_decode_as_on_the_cpu() {
                let Some(device) = $device() else { return };
                for config in [config()].into_iter().chain(around_an_mlp()) {
                    let cpu = Default::default();
                    let model = drawn_by(1, config.init::<Flex>(VOCAB, &cpu).unwrap());
                    let mut weights = Weights::default();
                    model.visit(&mut weights);
                    let there = config.init::<$backend>(VOCAB, &device).unwrap().map(&mut weights);
                    hold(&decoded(&model, &cpu), &decoded(&there, &device), $model);
                }
            }
        }
    };
}

#[cfg(feature = "wgpu")]
on_gpu!(on_wgpu, burn::backend::Wgpu, crate::support::wgpu, F32_LIMIT, 1e-4);
// Matrices of f32 are multiplied in TF32 on CUDA, ten bits of mantissa.
#[cfg(feature = "cuda")]
on_gpu!(on_cuda, burn::backend::Cuda, crate::support::cuda, 2e-3, 1e-2);
