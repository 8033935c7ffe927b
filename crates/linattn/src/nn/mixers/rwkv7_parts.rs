//! Parts of RWKV-7's time mix: its projections of low rank, and where its vectors start.

use crate::nn::Linear;
use crate::nn::layers::linear;
use crate::ops::LinearAttentionBackend;
use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};

/// Two linear layers with a narrow middle, named as where a function stands between them: `lora.0`
/// and `lora.2`.
#[derive(Module, Debug)]
pub struct LowRankMap<B: Backend> {
    lora: Vec<Option<Linear<B>>>,
}

impl<B: Backend> LowRankMap<B> {
    /// Without bias.
    pub(super) fn new(from: usize, rank: usize, to: usize, device: &B::Device) -> Self {
        Self { lora: vec![Some(linear(from, rank, device)), None, Some(linear(rank, to, device))] }
    }

    /// The same with a bias on the outer layer.
    pub(super) fn with_bias(self, bias: Param<Tensor<B, 1>>) -> Self {
        let mut layers = self.lora.into_iter().flatten();
        let (inner, outer) = (layers.next(), layers.next());
        let outer = outer.map(|outer| Linear { bias: Some(bias), ..outer });
        Self { lora: vec![inner, None, outer] }
    }
}

impl<B: LinearAttentionBackend> LowRankMap<B> {
    /// `[B, T, from]` to `[B, T, to]`, with `between` in the middle.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        between: impl Fn(Tensor<B, 3>) -> Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        let mut layers = self.lora.iter().flatten();
        let narrow = layers.next().into_iter().fold(x, |x, inner| inner.forward(x));
        layers.fold(between(narrow), |x, outer| outer.forward(x))
    }
}

/// Place `n` of `count`, from 0 to 1.
pub(super) fn ramp(n: usize, count: usize) -> f64 {
    n as f64 / count.saturating_sub(1).max(1) as f64
}

/// Place `n` of `count` from -1 to 1, squared with its sign.
pub(super) fn bend(n: usize, count: usize) -> f64 {
    let place = 2.0 * ramp(n, count) - 1.0;
    place * place.abs()
}

/// `f` of every place.
pub(super) fn from_places<B: Backend>(
    count: usize,
    f: &dyn Fn(usize) -> f64,
    device: &B::Device,
) -> Param<Tensor<B, 1>> {
    let values: Vec<f32> = (0..count).map(|n| f(n) as f32).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(values, [count]), device))
}

/// Shares of the token before, `1 - (n / D)^power` for channel n: `[1, 1, D]`.
pub(super) fn fresh_share<B: Backend>(
    d_model: usize,
    power: f64,
    device: &B::Device,
) -> Param<Tensor<B, 3>> {
    let shares: Vec<f32> =
        (0..d_model).map(|n| (1.0 - (n as f64 / d_model as f64).powf(power)) as f32).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(shares, [1, 1, d_model]), device))
}
