//! Small parts that mixers and blocks share.

use super::ConfigError;
use super::lora::Adapter;
use super::weight::Weight;
use crate::ops::{
    self, Activation, GateActivation, LinearAttentionBackend, Measure, accumulator, cat, typed,
};
pub(crate) use crate::ops::{each_part, softplus};
use burn::module::{Initializer, Module, Param};
use burn::nn::{GroupNorm, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Distribution, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Standard deviation of fresh weights.
pub(crate) const INIT_STD: f64 = 0.02;

/// A weight `[from, to]` that is drawn when it is first used.
pub(crate) fn fresh<B: Backend>(
    initializer: Initializer,
    [from, to]: [usize; 2],
    device: &B::Device,
) -> Weight<B> {
    let param: Param<Tensor<B, 2>> = initializer.init([from, to], device);
    param.into()
}

/// A linear layer without bias, weights N(0, 0.02^2).
pub(crate) fn linear<B: Backend>(from: usize, to: usize, device: &B::Device) -> Linear<B> {
    let normal = Initializer::Normal { mean: 0.0, std: INIT_STD };
    Linear::new(fresh(normal, [from, to], device))
}

/// As [`linear`], with a bias of zeros.
pub(crate) fn linear_with_bias<B: Backend>(
    from: usize,
    to: usize,
    device: &B::Device,
) -> Linear<B> {
    let bias = Initializer::Zeros.init([to], device);
    Linear { bias: Some(bias), ..linear(from, to, device) }
}

/// A linear layer without bias, weights N(0, std^2), for layers that start on a scale of their own.
pub(crate) fn normal_linear<B: Backend>(
    from: usize,
    to: usize,
    std: f64,
    device: &B::Device,
) -> Linear<B> {
    Linear::new(fresh(Initializer::Normal { mean: 0.0, std }, [from, to], device))
}

/// A linear layer without bias, weights as PyTorch draws them by default: see [`torch_uniform`].
pub(crate) fn torch_linear<B: Backend>(from: usize, to: usize, device: &B::Device) -> Linear<B> {
    let bound = torch_bound(from);
    let uniform = Initializer::Uniform { min: -bound, max: bound };
    Linear::new(fresh(uniform, [from, to], device))
}

/// Fresh numbers in place of `weight`, `[from, to]`: uniform within 1 / sqrt(from), which has the
/// standard deviation 1 / sqrt(3 from). That is what PyTorch draws for a linear layer that nobody asks
/// it to draw otherwise.
pub(crate) fn torch_uniform<B: Backend, const D: usize>(weight: &Tensor<B, D>) -> Tensor<B, D> {
    let bound = torch_bound(weight.dims()[0]);
    weight.random_like(Distribution::Uniform(-bound, bound))
}

fn torch_bound(from: usize) -> f64 {
    (from as f64).powf(-0.5)
}

/// How linear layers start that do not draw their weights on a scale of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitializerKind {
    /// Weights normal, of standard deviation `initializer_range`; biases zero.
    #[default]
    Normal,
    /// Weights uniform within 1 / sqrt(fan-in), as PyTorch draws them by default; biases zero.
    Torch,
}

impl InitializerKind {
    pub(crate) fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// A linear layer, `x W + b`, which starts as its model says. Burn's own, in everything but the product of a
/// few rows: that is [`ops::affine`]'s.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[from, to]`.
    pub weight: Weight<B>,
    /// `[to]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// Low-rank matrices beside the weight, where there are some.
    pub adapter: Adapter<B>,
}

impl<B: Backend> Linear<B> {
    /// A layer of this weight, `[from, to]`, without bias.
    pub fn new(weight: impl Into<Weight<B>>) -> Self {
        Self { weight: weight.into(), bias: None, adapter: Adapter::default() }
    }
}

impl<B: LinearAttentionBackend> Linear<B> {
    /// `[.., from]` to `[.., to]`.
    /// # Panics
    /// If `x` is not as wide as the layer was made for.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.adapter.affine(x, &self.weight, self.bias.as_ref().map(Param::val))
    }

    /// Its weight, if that is all that it has.
    pub(crate) fn weight_alone(&self) -> Option<&Weight<B>> {
        (self.bias.is_none() && self.adapter.is_none()).then_some(&self.weight)
    }

    /// Its weight, with that of its adapter, in type `dtype`.
    pub(crate) fn matrix(&self, dtype: DType) -> Tensor<B, 2> {
        self.adapter.matrix(self.weight.val(), dtype)
    }
}

/// A [`Linear`] layer whose type says how a model starts it.
macro_rules! kind_of_linear {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Module, Debug)]
        pub struct $name<B: Backend> {
            /// `[from, to]`.
            pub weight: Weight<B>,
            /// `[to]`.
            pub bias: Option<Param<Tensor<B, 1>>>,
            /// Low-rank matrices beside the weight, where there are some.
            pub adapter: Adapter<B>,
        }

        impl<B: LinearAttentionBackend> $name<B> {
            /// `[.., from]` to `[.., to]`.
            /// # Panics
            /// If `x` is not as wide as the layer was made for.
            pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
                self.adapter.affine(x, &self.weight, self.bias.as_ref().map(Param::val))
            }
        }

        impl<B: Backend> From<Linear<B>> for $name<B> {
            fn from(layer: Linear<B>) -> Self {
                Self { weight: layer.weight, bias: layer.bias, adapter: layer.adapter }
            }
        }
    };
}

kind_of_linear! {
    /// A linear layer that writes to the residual stream: a model of many layers starts it smaller.
    ResidualLinear
}

impl<B: Backend> ResidualLinear<B> {
    /// Its weight, if that is all that it has.
    pub(crate) fn weight_alone(&self) -> Option<&Weight<B>> {
        (self.bias.is_none() && self.adapter.is_none()).then_some(&self.weight)
    }
}

kind_of_linear! {
    /// A linear layer that starts on a scale of its source, which a model leaves as it is.
    ScaledLinear
}

impl<B: Backend> From<burn::nn::Linear<B>> for Linear<B> {
    fn from(layer: burn::nn::Linear<B>) -> Self {
        Self { bias: layer.bias, ..Self::new(layer.weight) }
    }
}

/// `[B, T, H X]` to `[B, T, H, X]`.
pub(crate) fn split_heads<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    heads: usize,
) -> Tensor<B, 4> {
    let [batch, tokens, width] = x.dims();
    ops::reshape(x, [batch, tokens, heads, width / heads])
}

/// `[B, T, H, X]` to `[B, T, H X]`.
pub(crate) fn merge_heads<B: LinearAttentionBackend>(x: Tensor<B, 4>) -> Tensor<B, 3> {
    let [batch, tokens, heads, width] = x.dims();
    ops::reshape(x, [batch, tokens, heads * width])
}

/// `[B, T, Hk, X]` to `[B, T, H, X]`: each head as often as value heads share it.
pub(crate) fn share_heads<B: Backend>(x: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [batch, tokens, key_heads, width] = x.dims();
    if key_heads == heads {
        return x;
    }
    x.unsqueeze_dim::<5>(3)
        .expand([batch, tokens, key_heads, heads / key_heads, width])
        .reshape([batch, tokens, heads, width])
}

/// The token before each token of `x`, `[B, T, D]`, zeros before the first of all; and the last token,
/// `[B, 1, D]`, which is the `last` of the next call.
pub(crate) fn shift_tokens<B: Backend>(
    x: &Tensor<B, 3>,
    last: Option<Tensor<B, 3>>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let [batch, tokens, width] = x.dims();
    let zeros = || Tensor::zeros([batch, 1, width], (&x.device(), x.dtype()));
    let first = last.map_or_else(zeros, |last| typed(last, x.dtype()));
    let before = match tokens {
        1 => first,
        _ => cat(vec![first, x.clone().narrow(1, 0, tokens - 1)], 1),
    };
    (before, x.clone().narrow(1, tokens - 1, 1))
}

/// Each token of `[B, T, D]` by itself, `[B, 1, D]`.
pub(crate) fn each_token<B: Backend>(x: Tensor<B, 3>) -> Vec<Tensor<B, 3>> {
    each_part(x, 1)
}

/// A linear layer of blocks: each of H heads has a matrix of its own, and sees nothing of the others.
#[derive(Module, Debug)]
pub struct BlockDiagonal<B: Backend> {
    /// `[H, from, to]`.
    weight: Param<Tensor<B, 3>>,
    /// `[H to]`.
    bias: Option<Param<Tensor<B, 1>>>,
}

impl<B: Backend> BlockDiagonal<B> {
    /// Weights N(0, 1 / from), `from` and `to` being the widths of one head; no bias.
    pub(crate) fn new(heads: usize, from: usize, to: usize, device: &B::Device) -> Self {
        Self::normal([heads, from, to], (from as f64).powf(-0.5), device)
    }

    /// Weights N(0, std^2), `[H, from, to]`; no bias.
    pub(crate) fn normal(shape: [usize; 3], std: f64, device: &B::Device) -> Self {
        Self { weight: Initializer::Normal { mean: 0.0, std }.init(shape, device), bias: None }
    }

    /// The same with a bias.
    pub(crate) fn with_bias(self, bias: Param<Tensor<B, 1>>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// The matrices, `[H, from, to]`.
    pub(crate) fn blocks(&self) -> Tensor<B, 3> {
        self.weight.val()
    }
}

impl<B: LinearAttentionBackend> BlockDiagonal<B> {
    /// `[B, T, H from]` to `[B, T, H to]`.
    pub(crate) fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        ops::block_linear(x, self.weight.val(), self.bias.as_ref().map(Param::val))
    }

    /// As [`forward`](Self::forward), of layers of equally many heads that all read `x`, one after another within a
    /// head: `[B, T, H, to to ..]`. One product of blocks side by side; of a single token, for which that would copy
    /// all weights, a product each.
    pub(crate) fn forward_by_head(layers: &[&Self], x: Tensor<B, 3>) -> Tensor<B, 4> {
        let heads = layers[0].weight.dims()[0];
        if x.dims()[1] == 1 {
            let each = layers.iter().map(|layer| split_heads(layer.forward(x.clone()), heads));
            return cat(each.collect(), 3);
        }
        let weights = layers.iter().map(|layer| layer.weight.val()).collect();
        let bias = layers.iter().any(|layer| layer.bias.is_some()).then(|| {
            let biases = layers.iter().map(|layer| {
                let [heads, _, to] = layer.weight.dims();
                match &layer.bias {
                    Some(bias) => bias.val().reshape([heads, to]),
                    None => Tensor::zeros([heads, to], (&x.device(), layer.weight.val().dtype())),
                }
            });
            cat(biases.collect(), 1).flatten(0, 1)
        });
        split_heads(ops::block_linear(x, cat(weights, 2), bias), heads)
    }
}

/// Rows of length 1: `x / sqrt(sum x^2 + 1e-6)` over the last dimension.
pub fn l2_normalize<B: LinearAttentionBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    ops::l2_normalize(x, 1.0)
}

/// The type of gates, scores and sums beside rows of type `dtype`: f32 at least.
pub(crate) fn wide_type(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// `x / sqrt(mean x^2 + epsilon)` over the last dimension: RMSNorm without a weight.
pub(crate) fn rms_normalize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    epsilon: f64,
) -> Tensor<B, D> {
    ops::rms_normalize(x, epsilon, None, None)
}

/// [`RmsNorm`] over the last dimension of `x`, times an activated gate where there is one.
pub(crate) fn rms_norm<B: LinearAttentionBackend, const D: usize>(
    norm: &RmsNorm<B>,
    x: Tensor<B, D>,
    gate: Option<(Activation, Tensor<B, D>)>,
) -> Tensor<B, D> {
    ops::rms_normalize(x, norm.epsilon, Some(norm.gamma.val()), gate)
}

/// As [`rms_normalize`], the mean taken off first: LayerNorm without weight and bias.
pub(crate) fn standardize<B: LinearAttentionBackend, const D: usize>(
    x: Tensor<B, D>,
    epsilon: f64,
) -> Tensor<B, D> {
    ops::standardize(x, epsilon)
}

/// RMSNorm over each head's values, times SiLU (or a sigmoid) of a gate where there is one.
///
/// `x` and `gate` are `[B, T, H, V]`; the weight is `[V]`, shared by the heads.
#[derive(Module, Debug)]
pub struct GatedRmsNorm<B: Backend> {
    norm: RmsNorm<B>,
}

impl<B: Backend> GatedRmsNorm<B> {
    /// Weights of one over `width` values.
    pub fn new(width: usize, epsilon: f64, device: &B::Device) -> Self {
        Self { norm: RmsNormConfig::new(width).with_epsilon(epsilon).init(device) }
    }
}

impl<B: LinearAttentionBackend> GatedRmsNorm<B> {
    /// Normalises `x`; multiplies by `silu(gate)` if there is a gate.
    pub fn forward<const D: usize>(
        &self,
        x: Tensor<B, D>,
        gate: Option<Tensor<B, D>>,
    ) -> Tensor<B, D> {
        self.gated(x, gate.map(|gate| (Activation::Silu, gate)))
    }

    /// Normalises `x`; multiplies by `sigmoid(gate)`.
    pub fn forward_sigmoid<const D: usize>(
        &self,
        x: Tensor<B, D>,
        gate: Tensor<B, D>,
    ) -> Tensor<B, D> {
        self.gated(x, Some((Activation::Sigmoid, gate)))
    }

    /// Weight and epsilon.
    pub(crate) fn weight(&self) -> (Tensor<B, 1>, f64) {
        (self.norm.gamma.val(), self.norm.epsilon)
    }

    /// As [`forward`](Self::forward), with the activation of the gate.
    pub(crate) fn gated<const D: usize>(
        &self,
        x: Tensor<B, D>,
        gate: Option<(Activation, Tensor<B, D>)>,
    ) -> Tensor<B, D> {
        rms_norm(&self.norm, x, gate)
    }
}

/// Which normalisation stands before mixers, MLPs and the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Root mean square, with a weight.
    #[default]
    Rms,
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with a weight that counts from 1: times 1 + w, where w starts from 0.
    ZeroCenteredRms,
}

/// The norm before the logits, where it is another than that of the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinalNormKind {
    /// Root mean square, with a weight.
    Rms,
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with a weight that counts from 1.
    ZeroCenteredRms,
    /// None at all.
    None,
}

impl FinalNormKind {
    /// The norm that it stands for.
    pub(crate) fn norm(self) -> Option<NormKind> {
        match self {
            Self::Rms => Some(NormKind::Rms),
            Self::Layer => Some(NormKind::Layer),
            Self::ZeroCenteredRms => Some(NormKind::ZeroCenteredRms),
            Self::None => None,
        }
    }
}

/// LayerNorm, `(x - mean) / sqrt(variance + epsilon) * gamma + beta` over the last dimension. Source:
/// arXiv 1607.06450.
#[derive(Module, Debug)]
pub struct LayerNorm<B: Backend> {
    /// `[D]`.
    pub gamma: Param<Tensor<B, 1>>,
    /// `[D]`.
    pub beta: Param<Tensor<B, 1>>,
    #[module(skip)]
    epsilon: f64,
}

/// RMSNorm whose weight counts from 1: `x / sqrt(mean x^2 + epsilon) * (1 + gamma)` over the last
/// dimension. Weight decay then draws the factor to 1, not to 0.
#[derive(Module, Debug)]
pub struct ZeroCenteredRmsNorm<B: Backend> {
    /// `[D]`.
    pub gamma: Param<Tensor<B, 1>>,
    #[module(skip)]
    epsilon: f64,
}

/// A normalisation over the last dimension.
#[derive(Module, Debug)]
pub enum Norm<B: Backend> {
    /// Root mean square.
    Rms(RmsNorm<B>),
    /// Mean and variance.
    Layer(LayerNorm<B>),
    /// Root mean square, times 1 + w.
    ZeroCenteredRms(ZeroCenteredRmsNorm<B>),
}

impl<B: Backend> Norm<B> {
    /// Fresh weights over `width` values.
    pub fn new(kind: NormKind, width: usize, epsilon: f64, device: &B::Device) -> Self {
        match kind {
            NormKind::Rms => {
                Norm::Rms(RmsNormConfig::new(width).with_epsilon(epsilon).init(device))
            }
            NormKind::Layer => Norm::Layer(LayerNorm {
                gamma: Initializer::Ones.init([width], device),
                beta: Initializer::Zeros.init([width], device),
                epsilon,
            }),
            NormKind::ZeroCenteredRms => Norm::ZeroCenteredRms(ZeroCenteredRmsNorm {
                gamma: Initializer::Zeros.init([width], device),
                epsilon,
            }),
        }
    }
}

impl<B: Backend> Norm<B> {
    /// Whether its weight learns.
    pub(crate) fn learns(&self) -> bool {
        let gamma = match self {
            Norm::Rms(norm) => &norm.gamma,
            Norm::Layer(norm) => &norm.gamma,
            Norm::ZeroCenteredRms(norm) => &norm.gamma,
        };
        gamma.val().is_require_grad()
    }
}

impl<B: LinearAttentionBackend> Norm<B> {
    /// Normalises the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let dtype = x.dtype();
        self.add_forward(x, None, dtype).0
    }

    /// Adds `addend` to `x`, where there is one: gives the sum normalised, in type `dtype`, and the sum
    /// itself, in the type of `x`.
    pub(crate) fn add_forward<const D: usize>(
        &self,
        x: Tensor<B, D>,
        addend: Option<Tensor<B, D>>,
        dtype: DType,
    ) -> (Tensor<B, D>, Tensor<B, D>) {
        let (measure, weight, bias) = match self {
            Norm::Rms(norm) => ((Measure::RootMeanSquare, norm.epsilon), norm.gamma.val(), None),
            Norm::Layer(norm) => {
                ((Measure::Standard, norm.epsilon), norm.gamma.val(), Some(norm.beta.val()))
            }
            Norm::ZeroCenteredRms(norm) => {
                ((Measure::RootMeanSquare, norm.epsilon), norm.gamma.val() + 1.0, None)
            }
        };
        match addend {
            Some(addend) => ops::add_normalize(addend, Some(x), measure, (weight, bias), dtype),
            None => ops::add_normalize(x, None, measure, (weight, bias), dtype),
        }
    }
}

/// GELU, by a tanh or exact.
pub(crate) fn gelu_activation(tanh: bool) -> GateActivation {
    if tanh { GateActivation::GeluTanh } else { GateActivation::Gelu }
}

/// GELU of every number.
pub(crate) fn gelu<B: LinearAttentionBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    ops::activate(x, GateActivation::Gelu, 1.0)
}

/// Burn's group norm of every token by itself, `[B, T, C]`, in f32 at least. Sums over tokens for gradients of its
/// weight and bias are part of it. A group of one number becomes its bias.
pub(crate) fn group_norm<B: LinearAttentionBackend>(
    norm: &GroupNorm<B>,
    x: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let dtype = x.dtype();
    let groups = split_heads(accumulator(x), norm.num_groups);
    let rows = merge_heads(standardize(groups, norm.epsilon));
    let bias = norm.beta.as_ref().map(Param::val);
    let rows = match &norm.gamma {
        Some(weight) => ops::scale_channels(rows, weight.val(), bias, None),
        None => rows,
    };
    typed(rows, dtype)
}

/// Refuses an epsilon that would divide by zero, in f32 too.
pub(crate) fn check_epsilon(epsilon: f64) -> Result<(), ConfigError> {
    check_small("norm_eps", epsilon)
}

/// As [`check_epsilon`], of the key `key`.
pub(crate) fn check_small(key: &str, epsilon: f64) -> Result<(), ConfigError> {
    if epsilon >= f64::from(f32::MIN_POSITIVE) && epsilon.is_finite() {
        return Ok(());
    }
    Err(ConfigError::new(key, epsilon, "above 0, and 1e-37 or more"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that cannot go on has failed
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::nn::GroupNormConfig;

    fn numbers<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
        x.into_data().iter::<f32>().collect()
    }

    /// Squares of 300, 64 of them, and e^12 are more than f16 holds.
    #[test]
    fn large_numbers_of_16_bits_overflow_nothing() {
        let device = Default::default();
        let row = [300.0, -300.0].repeat(32);
        let data = burn::tensor::TensorData::new(row, [1, 64]).convert_dtype(DType::F16);
        let x = Tensor::<Flex, 2>::from_data(data, (&device, DType::F16));
        let layer = Norm::<Flex>::new(NormKind::Layer, 64, 1e-5, &device);
        let group = GroupNormConfig::new(1, 64).init::<Flex>(&device);
        let ones = [1.0, -1.0].repeat(32);
        assert_eq!(numbers(layer.forward(x.clone())), ones);
        assert_eq!(numbers(group_norm(&group, x.clone().unsqueeze())), ones);
        let pair = Tensor::<Flex, 3>::from_data([[[3.0, -1.0]]], &device);
        let two = GroupNormConfig::new(1, 2).init::<Flex>(&device);
        let twice = numbers(group_norm(&two, cat(vec![pair.clone(), pair.clone()], 1)));
        let once = numbers(group_norm(&two, pair));
        assert_eq!(once, twice[..2], "two numbers alone are normalised as beside others");
        assert!((once[0] - 1.0).abs() < 1e-5 && (once[1] + 1.0).abs() < 1e-5, "{once:?}");
        let y = softplus(x.narrow(1, 0, 1) / 25.0);
        assert_eq!((y.dtype(), numbers(y)), (DType::F16, vec![12.0]));
    }
}
