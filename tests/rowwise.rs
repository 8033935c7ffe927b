//! What stands around a recurrence, on GPUs as on the CPU: numbers, gradients, and the decoding of whole
//! models.

use crate::support::{F32_LIMIT, Weights, alone, download, upload};
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use linattn::nn::{LanguageModel, LanguageModelConfig, force};
use linattn::ops::{
    Activation, Convolution, Gated, LinearAttentionBackend, LogDecay, Measure, Normalization,
};
use linattn_oracle::{Rng, assert_close};

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

/// What an operation is given: rows that lie as `[T, B, W]`, so that they are not contiguous, what is
/// shaped as they are, and vectors.
struct Inputs<B: Backend> {
    x: Tensor<B, 3>,
    gate: Tensor<B, 3>,
    tail: Tensor<B, 3>,
    taps: Tensor<B, 2>,
    weight: Tensor<B, 1>,
    heads: Tensor<B, 1>,
}

impl<B: Backend> Inputs<B> {
    fn new(tokens: usize, width: usize, device: &B::Device) -> Self {
        Self {
            x: draw::<B, 3>("x", [tokens, 2, width], device).swap_dims(0, 1),
            gate: draw("gate", [2, tokens, width], device),
            tail: draw("tail", [2, 3, width], device),
            taps: draw("taps", [4, width], device),
            weight: draw("weight", [width], device),
            heads: draw("heads", [width / 5], device),
        }
    }
}

impl<B: LinearAttentionBackend> Inputs<B> {
    /// Every operation, by name.
    fn run(&self) -> Vec<(&'static str, Tensor<B, 3>)> {
        let gate = |activation| Some((activation, inside(&self.gate)));
        let root_mean_square = Normalization {
            x: inside(&self.x),
            measure: Measure::RootMeanSquare,
            epsilon: 1e-5,
            weight: Some(inside(&self.weight)),
            factor: 1.0,
            gate: None,
        };
        let length = Normalization {
            measure: Measure::Length,
            weight: None,
            factor: -0.3,
            ..root_mean_square.clone()
        };
        let silu = Normalization { gate: gate(Activation::Silu), ..root_mean_square.clone() };
        let sigmoid = Normalization { gate: gate(Activation::Sigmoid), ..root_mean_square.clone() };
        let mut found: Vec<(&'static str, Tensor<B, 3>)> =
            [("rms", root_mean_square), ("l2", length), ("silu", silu), ("sigmoid", sigmoid)]
                .map(|(name, n)| (name, outside::<B, 3>(B::normalize::<3>(n))))
                .into();

        let (x, gate) = (inside(&self.x), inside(&self.gate));
        let gated = Gated { x: x.clone(), gate, activation: Activation::Silu };
        found.push(("product", outside::<B, 3>(B::gated_product::<3>(gated))));

        let dt_bias = inside(&self.weight);
        for (name, a_log) in [("one gate a head", &self.weight), ("five", &self.heads)] {
            let decay = LogDecay { x: x.clone(), a_log: inside(a_log), dt_bias: dt_bias.clone() };
            found.push((name, outside::<B, 3>(B::log_decay(decay))));
        }

        let convolution = Convolution { x, weight: inside(&self.taps), tail: inside(&self.tail) };
        let (y, next) = B::convolve(convolution.clone(), Some(dt_bias), Some(Activation::Silu));
        found.push(("convolution, bias, SiLU", outside::<B, 3>(y)));
        found.push(("its tail", outside::<B, 3>(next)));
        let (y, next) = B::convolve(convolution, None, None);
        found.push(("convolution", outside::<B, 3>(y)));
        found.push(("the tail", outside::<B, 3>(next)));
        found
    }
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
    let Inputs { x, gate, tail, taps, weight, heads } = Inputs::<B>::new(3, 35, device);
    let inputs = Inputs {
        x: x.require_grad(),
        gate: gate.require_grad(),
        tail: tail.require_grad(),
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
        ("dtail".into(), of3(&inputs.tail)),
        ("dtaps".into(), download(inputs.taps.grad(&found).expect("it is tracked"))),
        ("dweight".into(), of1(&inputs.weight)),
        ("dheads".into(), of1(&inputs.heads)),
    ]
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

/// The same on GPUs; a module for each backend that is compiled in.
macro_rules! on_gpu {
    ($module:ident, $backend:ty, $device:path, $limit:expr) => {
        mod $module {
            use super::*;

            #[test]
            fn every_operation_gives_what_the_cpu_gives() {
                let Some(device) = $device() else { return };
                let want = results::<Flex>(&Default::default());
                hold(&want, &results::<$backend>(&device), F32_LIMIT);
            }

            #[test]
            fn every_operation_has_the_gradients_of_the_cpu() {
                let Some(device) = $device() else { return };
                let want = gradients::<Autodiff<Flex>>(&Default::default());
                hold(&want, &gradients::<Autodiff<$backend>>(&device), F32_LIMIT);
            }

            #[test]
            fn models_decode_as_on_the_cpu() {
                let Some(device) = $device() else { return };
                let (config, cpu) = (config(), Default::default());
                let model = config.init::<Flex>(VOCAB, &cpu).unwrap();
                force(&model);
                let mut weights = Weights::default();
                model.visit(&mut weights);
                let there = config.init::<$backend>(VOCAB, &device).unwrap().map(&mut weights);
                hold(&decoded(&model, &cpu), &decoded(&there, &device), $limit);
            }
        }
    };
}

#[cfg(feature = "wgpu")]
on_gpu!(on_wgpu, burn::backend::Wgpu, crate::support::wgpu, 1e-4);
// Burn multiplies f32 matrices in TF32 on CUDA, ten bits of mantissa.
#[cfg(feature = "cuda")]
on_gpu!(on_cuda, burn::backend::Cuda, crate::support::cuda, 1e-2);
