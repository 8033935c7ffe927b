//! Burn's fusion of elementwise operations changes no number: whole models, logits and gradients,
//! fused against unfused on the same adapter, and unfused against the processor.

use crate::call::download;
use crate::layers::drawn_by;
use crate::support::{alone, wgpu};
use crate::weights::Weights;
use burn::backend::wgpu::{CubeBackend, WgpuRuntime};
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use linattn::nn::LanguageModelConfig;
use linattn::ops::LinearAttentionBackend;
use linattn_oracle::assert_close;

type Plain = CubeBackend<WgpuRuntime, f32, i32, u32>;
type Fused = burn::backend::Wgpu;

/// Gradients by path.
struct Collect<'a, B: AutodiffBackend> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: Vec<(String, Vec<f64>)>,
    backend: std::marker::PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        let gradient = self.gradients.get::<B::InnerBackend, R>(param.id).unwrap();
        self.found.push((self.path.join("."), download(gradient)));
    }
}

/// Logits, loss and every gradient of one step on a model with these weights.
fn step<B>(
    config: &LanguageModelConfig,
    weights: &Weights,
    device: &B::Device,
) -> Vec<(String, Vec<f64>)>
where
    B: AutodiffBackend + LinearAttentionBackend,
{
    let _alone = alone();
    let (rows, tokens, vocab) = (3, 37, 11);
    let model = config.init::<B>(vocab, device).unwrap().map(&mut weights.clone());
    let ids: Vec<i32> = (0..rows * tokens).map(|i| i * i * 7 % vocab as i32).collect();
    let ids = TensorData::new(ids, [rows as usize, tokens as usize]);
    let ids = Tensor::<B, 2, Int>::from_data(ids, device);
    let logits = model.forward(ids.clone(), None).0;
    let flat = logits.clone().reshape([(rows * tokens) as usize, vocab]);
    let targets = (ids + 1).remainder_scalar(vocab as i32).reshape([(rows * tokens) as usize]);
    let loss = CrossEntropyLossConfig::new().init(device).forward(flat, targets);
    let mut found =
        vec![("logits".into(), download(logits)), ("loss".into(), download(loss.clone()))];
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    let mut collect =
        Collect { gradients: &gradients, path: vec![], found: vec![], backend: Default::default() };
    model.visit(&mut collect);
    found.extend(collect.found);
    found
}

#[test]
fn a_training_step_is_the_same_fused_and_unfused() {
    let Some(device) = wgpu() else { return };
    for mixer in [
        "gated_deltanet = { heads = 2 }",
        "deltanet = { heads = 2 }",
        "retnet = { heads = 2 }",
        "gla = { heads = 2 }",
        "mamba2 = { d_state = 8, head_width = 8 }",
        "attention = { heads = 2 }",
    ] {
        let text = format!(
            "d_model = 16\ntie_embeddings = false\n\
             [[layers]]\nrepeat = 2\nmixer.{mixer}\nmlp = {{ swiglu = {{}} }}\n"
        );
        let config: LanguageModelConfig = toml::from_str(&text).unwrap();
        let mut weights = Weights::default();
        drawn_by(1, config.init::<Flex>(11, &Default::default()).unwrap()).visit(&mut weights);
        let cpu = step::<Autodiff<Flex>>(&config, &weights, &Default::default());
        let plain = step::<Autodiff<Plain>>(&config, &weights, &device);
        let fused = step::<Autodiff<Fused>>(&config, &weights, &device);
        for ((name, want), (_, got)) in cpu.iter().zip(&plain) {
            assert_close(&format!("{mixer}: {name}, on the adapter"), want, got, 1e-3);
        }
        for ((name, want), (_, got)) in plain.iter().zip(&fused) {
            assert_close(&format!("{mixer}: {name}, fused"), want, got, 1e-4);
        }
    }
}
