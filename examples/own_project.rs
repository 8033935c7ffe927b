//! Linear-attention layers in a Burn project of one's own: a classifier of sequences, some training
//! steps, and the same layer token by token.
//!
//! In another project's Cargo.toml:
//! ```toml
//! burn = { version = "=0.21.0", default-features = false }
//! linattn = { path = "linattn/crates/linattn" } # a clone; features = ["cuda"], ["wgpu"], ["rocm"]
//! ```

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Distribution, ElementConversion, Int, Tensor, backend::Backend};
use linattn::backend::{Autodiff, Flex, LinearAttentionBackend, TrainBackend};
use linattn::nn::ConfigError;
use linattn::nn::mixers::{GatedDeltaNet, GatedDeltaNetConfig, MatrixState, TokenMixer};

const WIDTH: usize = 32;
const CLASSES: usize = 5;
/// Enough for the loss to fall from whatever weights were drawn.
const STEPS: usize = 10;

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    mixer: GatedDeltaNet<B>,
    head: Linear<B>,
}

impl<B: LinearAttentionBackend> Classifier<B> {
    fn new(device: &B::Device) -> Result<Self, ConfigError> {
        Ok(Self {
            mixer: GatedDeltaNetConfig::new(2, 16).init(WIDTH, device)?,
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        })
    }

    /// Whole sequences, `[B, T, D]`, to logits of their last token, `[B, classes]`.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let last = x.dims()[1] - 1;
        let (y, _state) = self.mixer.forward(x, None);
        self.head.forward(y.narrow(1, last, 1).squeeze_dim::<2>(1))
    }

    /// The same, one token at a time: memory stays the same size however long the sequence is.
    fn stream(&self, tokens: impl Iterator<Item = Tensor<B, 2>>) -> Option<Tensor<B, 2>> {
        let mut state: Option<MatrixState<B>> = None;
        let mut last = None;
        for token in tokens {
            let (y, next) = self.mixer.step(token, state);
            (state, last) = (Some(next), Some(y));
        }
        last.map(|y| self.head.forward(y))
    }
}

fn train_and_stream<B: TrainBackend>(device: &B::Device) -> Result<(f32, f32), ConfigError> {
    let mut model = Classifier::<B>::new(device)?;
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::random([8, 100, WIDTH], Distribution::Default, device);
    let classes = Tensor::<B, 1, Int>::from_data([0, 1, 2, 3, 4, 0, 1, 2], device);
    let loss_of = |model: &Classifier<B>| {
        let loss = CrossEntropyLossConfig::new().init(device);
        loss.forward(model.forward(x.clone()), classes.clone())
    };
    let (mut first, mut last) = (0.0, 0.0);
    for step in 0..STEPS {
        let loss = loss_of(&model);
        last = loss.clone().into_scalar().elem();
        if step == 0 {
            first = last;
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    let whole = model.forward(x.clone());
    let tokens = (0..100).map(|t| x.clone().narrow(1, t, 1).squeeze_dim(1));
    let streamed = model.stream(tokens).expect("there are tokens");
    let apart: f32 = (whole - streamed).abs().max().into_scalar().elem();
    println!("logits of a stream differ from those at once by {apart:.1e}");
    assert!(apart < 1e-4, "a stream computes what a whole sequence does");
    Ok((first, last))
}

/// Swap `Flex` for `Cuda`, `Wgpu` or `Rocm` of `linattn::backend` to run the same on a GPU. Through CUDA, Burn
/// multiplies in TF32: there the stream needs a wider limit.
pub fn main() -> Result<(), ConfigError> {
    let (first, last) = train_and_stream::<Autodiff<Flex>>(&Default::default())?;
    println!("loss {first:.4} before, {last:.4} after {} steps", STEPS - 1);
    assert!(last < first, "training makes the loss smaller");
    Ok(())
}
