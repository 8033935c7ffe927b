//! Backends of Burn without loops or kernels of ours give what Flex gives: outputs, gradients and steps of whole models.

use crate::layers::widened;
use crate::ops::F32_LIMIT;
use crate::support::{alone, normal_by};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::AutodiffBackend};
use linattn::backend::{Autodiff, Flex, TrainBackend};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn_oracle::assert_close;

const VOCAB: usize = 13;
const TOKENS: usize = 37;
/// Tensors are of f64, and NdArray rounds the numbers that scale them to f32; decays multiply that error
/// token by token, and a norm by group divides it by a small deviation: 1.3e-6 was seen.
const LIMIT: f64 = F32_LIMIT;
/// Gradients of gates are small differences.
const GRADIENT_LIMIT: f64 = 1e-4;

/// One of each kind of recurrence.
const MIXERS: &[&str] = &[
    "linear_attention = { heads = 2 }",
    "retnet = { heads = 2 }",
    "gla = { heads = 2 }",
    "gated_deltanet = { heads = 2 }",
    "kda = { heads = 2 }",
    "rwkv7 = { heads = 2 }",
    "mamba = { d_state = 4 }",
    "mamba2 = { head_width = 8 }",
    "mlstm = { heads = 2 }",
    "mesa_net = { heads = 2 }",
    "hgrn = {}",
    "lstm = {}",
    "slstm = { heads = 2 }",
    "ttt = { heads = 2 }",
    "hyena = { length = 64 }",
    "attention = { heads = 2 }",
];

fn config(mixer: &str) -> LanguageModelConfig {
    let text = format!(
        "d_model = 16\ninitializer_range = 0.2\n[[layers]]\nrepeat = 2\nmlp = {{ swiglu = {{}} }}\nmixer.{mixer}\n"
    );
    toml::from_str(&text).unwrap()
}

/// The weights of a model, in order.
#[derive(Default)]
struct Weights(Vec<TensorData>);

impl<B: burn::tensor::backend::Backend> ModuleVisitor<B> for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.val().into_data());
    }
}

/// Gives a model these weights, the last one first.
struct Given(Vec<TensorData>);

impl<B: burn::tensor::backend::Backend> ModuleMapper<B> for Given {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let given = Tensor::from_data(self.0.pop().unwrap(), (&tensor.device(), DType::F64));
        Param::from_mapped_value(id, given.require_grad(), mapper)
    }
}

/// The gradient of each weight, in order.
struct Gradients<'a, B: AutodiffBackend>(&'a B::Gradients, Vec<Vec<f64>>);

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.1.push(numbers(param.val().grad(self.0).unwrap()));
    }
}

fn numbers<B: burn::tensor::backend::Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn ids<B: burn::tensor::backend::Backend>(tokens: usize) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..2 * tokens).map(|i| ((i * i + 3 * i) % VOCAB) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, tokens]), &Default::default())
}

/// Logits, gradients of a sum of them, and logits token by token.
fn results<B: TrainBackend>(model: &LanguageModel<B>) -> (Vec<f64>, Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let logits = model.forward(ids(TOKENS), None).0;
    let shares: Vec<f64> = (0..logits.dims().iter().product()).map(|i| (i as f64).sin()).collect();
    let shares = TensorData::new(shares, logits.dims());
    let shares = Tensor::from_data(shares, (&logits.device(), DType::F64));
    let gradients = (logits.clone() * shares).sum().backward();
    let mut found = Gradients(&gradients, vec![]);
    model.visit(&mut found);

    let (plain, all) = (model.valid(), ids(TOKENS));
    let (mut state, mut steps) = (None, vec![]);
    for token in 0..TOKENS {
        let (next, after) = plain.step(all.clone().narrow(1, token, 1).squeeze_dim(1), state);
        steps.push(numbers(next));
        state = Some(after);
    }
    (numbers(logits), found.1, steps)
}

fn agree<B: TrainBackend>() {
    for mixer in MIXERS {
        let reference: LanguageModel<Autodiff<Flex>> =
            config(mixer).init(VOCAB, &Default::default()).unwrap();
        let reference = normal_by(1, 0.2, widened(reference));
        let mut weights = Weights::default();
        reference.visit(&mut weights);
        weights.0.reverse();
        let other: LanguageModel<B> = config(mixer).init(VOCAB, &Default::default()).unwrap();
        let other = other.map(&mut Given(weights.0));

        let (want, got) = (results(&reference), results(&other));
        assert_close(&format!("{mixer}: logits"), &want.0, &got.0, LIMIT);
        assert_eq!(want.1.len(), got.1.len(), "{mixer}");
        for (n, (want, got)) in want.1.iter().zip(&got.1).enumerate() {
            assert_close(&format!("{mixer}: gradient {n}"), want, got, GRADIENT_LIMIT);
        }
        for (token, (want, got)) in want.2.iter().zip(&got.2).enumerate() {
            assert_close(&format!("{mixer}: token {token}"), want, got, LIMIT);
        }
    }
}

#[test]
fn ndarray_gives_what_flex_gives() {
    let _alone = alone();
    agree::<Autodiff<linattn::backend::NdArray>>();
}
