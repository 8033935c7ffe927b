//! Memories that are small networks, trained by gradient descent while a sequence goes by.
//! ```text
//! z_l          = x_l W_l                       x_1 = [k, 1], x_l = [gelu(z_{l-1}), 1]; no 1 without bias
//! g_L          = dloss / dz_L                  g_l = (g_{l+1} W_{l+1}^T) gelu'(z_l)
//! dloss / dW_l = x_l^T g_l                     of one token: a product of two rows
//! W_i          = sum_n keep_ni P_n - sum_{j <= i} share_ij x_j^T g_j
//! x W_i        = sum_n keep_ni x P_n - sum_{j <= i} share_ij (x x_j^T) g_j
//! ```
//! All gradients of a mini-batch are taken at the weights it began with, so that they are products of
//! matrices; the weights W_i after token i are sums of tensors P_n from before and of those gradients, and are
//! not formed inside a mini-batch. Gradients are written out, so that the backward pass of training goes
//! through them like through anything else.

use super::convolution::ConvPast;
use super::layers::{INIT_STD, each_part};
use super::{NetworkMemory, NetworkState, Rope};
use crate::ops::{Along, LinearAttentionBackend, accumulator, cat};
use burn::module::Param;
use burn::tensor::{Distribution, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// The square root of 2 / pi.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044_715;

/// A network's shape: layers with GELU between them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Network {
    /// Whether the last row of each weight is a bias.
    pub(crate) bias: bool,
}

/// The network that is the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InnerModel {
    /// One linear layer.
    #[default]
    Linear,
    /// Two layers, four times as wide between them, with GELU.
    Mlp,
}

impl InnerModel {
    /// Inputs and outputs of each layer, from `inputs` numbers to `width`.
    pub(crate) fn layers(self, inputs: usize, width: usize) -> Vec<[usize; 2]> {
        match self {
            Self::Linear => vec![[inputs, width]],
            Self::Mlp => vec![[inputs, 4 * width], [4 * width, width]],
        }
    }
}

/// Weights N(0, 0.02^2), `[H, from, to]`, over a row of zeros where they have a bias.
pub(crate) fn fresh<B: Backend>(
    heads: usize,
    [from, to]: [usize; 2],
    network: Network,
    device: &B::Device,
) -> Param<Tensor<B, 3>> {
    let normal = Distribution::Normal(0.0, INIT_STD);
    let weight = Tensor::<B, 3>::random([heads, from, to], normal, device);
    Param::from_tensor(match network.bias {
        true => cat(vec![weight, Tensor::zeros([heads, 1, to], device)], 1),
        false => weight,
    })
}

/// The weights of each layer at the start of sequences, `[B, H, from, to]`.
pub(crate) fn start<B: Backend>(
    weights: &[Param<Tensor<B, 3>>],
    batch: usize,
) -> Vec<Tensor<B, 4>> {
    let of_all = |weight: &Param<Tensor<B, 3>>| {
        let [heads, from, to] = weight.dims();
        accumulator(weight.val()).unsqueeze::<4>().expand([batch, heads, from, to])
    };
    weights.iter().map(of_all).collect()
}

/// Factors of one layer's gradients, `x^T g`: its inputs, `[B, H, C, from]`, and the loss's gradient by its
/// outputs, `[B, H, C, to]`.
pub(crate) struct Factors<B: Backend> {
    x: Tensor<B, 4>,
    g: Tensor<B, 4>,
}

/// Tensors of earlier mini-batches that weights have a part of.
pub(crate) struct Past<'a, B: Backend> {
    /// Of each layer, `[B, H, from, to]`.
    pub(crate) tensors: &'a [Tensor<B, 4>],
    /// Their factor in the weights after each token, `[.., .., C, 1]`; one if absent.
    pub(crate) keep: Option<Tensor<B, 4>>,
}

impl<B: Backend> Past<'_, B> {
    /// `x` times the part that the tensor of a layer has in each token's weights.
    fn read(&self, x: &Tensor<B, 4>, layer: usize) -> Tensor<B, 4> {
        let z = x.clone().matmul(self.tensors[layer].clone());
        match &self.keep {
            Some(keep) => z * keep.clone(),
            None => z,
        }
    }

    /// The part that it has in the weights after the last token.
    fn last(&self, layer: usize) -> Tensor<B, 4> {
        let tensor = self.tensors[layer].clone();
        match &self.keep {
            Some(keep) => tensor * last_row(keep),
            None => tensor,
        }
    }
}

impl Network {
    /// Gradients of a loss by the weights of each layer at `keys`, [`rows`](Self::rows) of `[B, H, C, K]`; `slope`
    /// gives the loss's gradient by the network's outputs.
    pub(crate) fn gradients<B: Backend>(
        self,
        keys: Tensor<B, 4>,
        weights: &[Tensor<B, 4>],
        slope: impl FnOnce(Tensor<B, 4>) -> Tensor<B, 4>,
    ) -> Vec<Factors<B>> {
        let (mut inputs, mut slopes) = (vec![keys], vec![]);
        let mut z = inputs[0].clone().matmul(weights[0].clone());
        for weight in &weights[1..] {
            let (x, slope) = gelu_and_slope(z);
            slopes.push(slope);
            let x = self.rows(x);
            z = x.clone().matmul(weight.clone());
            inputs.push(x);
        }
        let mut g = slope(z);
        let mut factors = vec![];
        while let Some(x) = inputs.pop() {
            let below = slopes.pop().map(|slope| {
                let [_, _, from, _] = weights[inputs.len()].dims();
                let from = from - usize::from(self.bias);
                let weight = weights[inputs.len()].clone().narrow(2, 0, from);
                g.clone().matmul(weight.transpose()) * slope
            });
            factors.push(Factors { x, g: g.clone() });
            g = below.unwrap_or(g);
        }
        factors.reverse();
        factors
    }

    /// Outputs for queries, [`rows`](Self::rows) of `[B, H, C, K]`, each through the weights after its own token.
    /// `share`, `[B, H, C, keys]`, is zero for later keys; `met` is it times the first layer's products of queries and
    /// keys, which do not wait for any weights.
    pub(crate) fn read<B: Backend>(
        self,
        (queries, met): (Tensor<B, 4>, Tensor<B, 4>),
        past: &[Past<'_, B>],
        factors: &[Factors<B>],
        share: &Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let through = |layer: usize, rows: Tensor<B, 4>, met: Tensor<B, 4>| {
            let written = met.matmul(factors[layer].g.clone());
            let kept = past.iter().map(|past| past.read(&rows, layer)).reduce(|a, b| a + b);
            match kept {
                Some(kept) => kept - written,
                None => written.neg(),
            }
        };
        let first = through(0, queries, met);
        (1..factors.len()).fold(first, |z, layer| {
            let rows = self.rows(gelu(z));
            let met = rows.clone().matmul(factors[layer].x.clone().transpose()) * share.clone();
            through(layer, rows, met)
        })
    }

    /// Outputs for queries, [`rows`](Self::rows) of `[B, H, C, K]`, each through weights of its own,
    /// `[B, H, C, from, to]` for each layer.
    pub(crate) fn apply_each<B: Backend>(
        self,
        queries: Tensor<B, 4>,
        weights: &[Tensor<B, 5>],
    ) -> Tensor<B, 4> {
        let through = |rows: Tensor<B, 4>, weight: &Tensor<B, 5>| -> Tensor<B, 4> {
            rows.unsqueeze_dim::<5>(3).matmul(weight.clone()).squeeze_dim(3)
        };
        let first = through(queries, &weights[0]);
        weights[1..].iter().fold(first, |z, weight| through(self.rows(gelu(z)), weight))
    }

    /// Of a memory of these layers, whose queries meet `size` keys at most: how many weights it has, and floating-point
    /// operations of a token.
    pub(crate) fn cost(self, layers: &[[usize; 2]], heads: usize, size: usize) -> (u64, u64) {
        let weights =
            |[from, to]: &[usize; 2]| (heads * (from + usize::from(self.bias)) * to) as u64;
        let weights = layers.iter().map(weights).sum();
        // Every weight answers a key and a query, and passes on and takes a gradient; a query meets half a
        // mini-batch.
        let met = layers.iter().map(|[from, to]| (heads * (from + to)) as u64).sum::<u64>();
        (weights, 8 * weights + met * size as u64)
    }

    /// `x` with a one behind each row, where weights have a bias.
    pub(crate) fn rows<B: Backend, const D: usize>(self, x: Tensor<B, D>) -> Tensor<B, D> {
        if !self.bias {
            return x;
        }
        let mut shape = x.dims();
        shape[D - 1] = 1;
        let ones = Tensor::ones(shape, (&x.device(), x.dtype()));
        cat(vec![x, ones], D - 1)
    }
}

/// Sums of each layer's gradients for each of C tokens, `[B, H, C, from, to]`; `share`, `[B, H, C, keys]`, is what they
/// have of each key's.
pub(crate) fn sums<B: Backend>(factors: &[Factors<B>], share: &Tensor<B, 4>) -> Vec<Tensor<B, 5>> {
    let share = share.clone().unsqueeze_dim::<5>(3);
    let layer = |Factors { x, g }: &Factors<B>| {
        // In this order: as in `Piece::of`.
        let x = x.clone().unsqueeze_dim::<5>(2).swap_dims(3, 4);
        (x * share.clone()).matmul(g.clone().unsqueeze_dim::<5>(2))
    };
    factors.iter().map(layer).collect()
}

/// The weights of each layer after the last token; `share`, `[B, H, 1, C]`, is what they have of each token's
/// gradient.
pub(crate) fn write<B: Backend>(
    past: &[Past<'_, B>],
    factors: &[Factors<B>],
    share: &Tensor<B, 4>,
) -> Vec<Tensor<B, 4>> {
    let layer = |(layer, Factors { x, g }): (usize, &Factors<B>)| {
        let written = (x.clone().transpose() * share.clone()).matmul(g.clone());
        match past.iter().map(|past| past.last(layer)).reduce(|a, b| a + b) {
            Some(kept) => kept - written,
            None => written.neg(),
        }
    };
    factors.iter().enumerate().map(layer).collect()
}

/// The gradient by z of `1/2 |gamma h(z) + beta - target|^2`, h being z over the root of its mean square, z having
/// no mean: [`TttConfig`](super::mixers::TttConfig)'s file has the formula. `squared` is gamma^2, `target` gamma
/// (target - beta).
pub(crate) fn regression_slope<B: Backend>(
    z: Tensor<B, 4>,
    squared: Tensor<B, 4>,
    target: Tensor<B, 4>,
    epsilon: f64,
) -> Tensor<B, 4> {
    let size = ((z.clone() * z.clone()).mean_along(3) + epsilon).sqrt();
    let h = z / size.clone();
    let d = squared * h.clone() - target;
    let along = (d.clone() * h.clone()).mean_along(3);
    (d.clone() - d.mean_along(3) - h * along) / size
}

/// The last of C rows, `[.., .., C, X]`.
pub(crate) fn last_row<B: Backend>(x: &Tensor<B, 4>) -> Tensor<B, 4> {
    let rows = x.dims()[2];
    x.clone().narrow(2, rows - 1, 1)
}

/// GELU in its form with a hyperbolic tangent.
fn gelu<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let t = gelu_tanh(&x);
    x * (t + 1.0) * 0.5
}

/// [`gelu`] and its derivative.
fn gelu_and_slope<B: Backend, const D: usize>(x: Tensor<B, D>) -> (Tensor<B, D>, Tensor<B, D>) {
    let t = gelu_tanh(&x);
    let inner = (x.clone() * x.clone() * (3.0 * GELU_CUBE) + 1.0) * GELU_SCALE;
    let steep = (t.clone() * t.clone()).neg() + 1.0;
    let slope = (t.clone() + 1.0 + x.clone() * steep * inner) * 0.5;
    (x * (t + 1.0) * 0.5, slope)
}

fn gelu_tanh<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Tensor<B, D> {
    let cube = x.clone() * x.clone() * GELU_CUBE + 1.0;
    (x.clone() * cube * GELU_SCALE).tanh()
}

/// A part of a sequence: whole mini-batches, or some tokens of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its first token, among those at hand.
    pub(crate) from: usize,
    /// Mini-batches.
    pub(crate) batches: usize,
    /// Tokens of each.
    pub(crate) rows: usize,
    /// Place of its first token in its mini-batch.
    pub(crate) place: usize,
    /// Whether its last token is the last of a mini-batch.
    pub(crate) ends: bool,
}

impl Piece {
    /// The pieces of `tokens` tokens behind `position` others, in mini-batches of `size`: the rest of one that
    /// was begun, whole ones, and the beginning of the last.
    pub(crate) fn all(position: usize, tokens: usize, size: usize) -> Vec<Self> {
        let place = position % size;
        let rest = if place == 0 { 0 } else { tokens.min(size - place) };
        let (whole, begun) = ((tokens - rest) / size, (tokens - rest) % size);
        let of = |from, batches, rows, place| {
            let ends = place + rows == size;
            (batches * rows > 0).then_some(Self { from, batches, rows, place, ends })
        };
        let list =
            [of(0, 1, rest, place), of(rest, whole, size, 0), of(rest + whole * size, 1, begun, 0)];
        list.into_iter().flatten().collect()
    }

    /// Whether it is whole mini-batches.
    pub(crate) fn is_whole(self) -> bool {
        self.place == 0 && self.ends
    }

    /// `max(1 / i + learnt_i, 0)` of each place i, from 1, of its mini-batches.
    pub(crate) fn scales<B: Backend>(self, learnt: Tensor<B, 1>) -> Tensor<B, 1> {
        let all = learnt.dims()[0];
        let learnt =
            if self.rows == all { learnt } else { learnt.narrow(0, self.place, self.rows) };
        let harmonic = (1..=self.rows).map(|row| 1.0 / (self.place + row) as f64);
        let data = TensorData::new(harmonic.collect::<Vec<f64>>(), [self.rows]);
        let harmonic = Tensor::<B, 1>::from_data(data, (&learnt.device(), learnt.dtype()));
        (learnt + harmonic).clamp_min(0.0)
    }

    /// Its part of `x`, `[B, T, H, X]`, as `[B, batches, rows, H, X]`.
    pub(crate) fn of<B: Backend>(self, x: &Tensor<B, 4>) -> Tensor<B, 5> {
        let [batch, all, heads, width] = x.dims();
        let tokens = self.batches * self.rows;
        // A slice of everything would still cost launches, its gradient most.
        let part = if tokens == all { x.clone() } else { x.clone().narrow(1, self.from, tokens) };
        // By way of a row: Burn 0.21 loses strides of a slice whose last dimension is 1 where a reshape adds dimensions.
        let part: Tensor<B, 1> = part.reshape([batch * tokens * heads * width]);
        part.reshape([batch, self.batches, self.rows, heads, width])
    }

    /// The same turned by its place in the mini-batch.
    pub(crate) fn rotated<B: LinearAttentionBackend>(
        self,
        rope: Rope,
        x: &Tensor<B, 4>,
    ) -> Tensor<B, 5> {
        let x = self.of(x);
        let shape @ [batch, batches, rows, heads, width] = x.dims();
        let flat: Tensor<B, 4> = x.reshape([batch * batches, rows, heads, width]);
        rope.forward(flat, self.place).reshape(shape)
    }

    /// Its part of `x` with heads in front, `[B, H, batches, rows, X]`.
    pub(crate) fn by_head<B: Backend>(self, x: &Tensor<B, 4>) -> Tensor<B, 5> {
        heads_in_front(self.of(x))
    }
}

/// `[B, batches, rows, H, X]` to `[B, H, batches, rows, X]`.
pub(crate) fn heads_in_front<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 5> {
    x.permute([0, 3, 1, 2, 4])
}

/// `[B, H, batches, rows, X]` to `[B, T, H, X]`.
pub(crate) fn in_a_row<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 4> {
    let [batch, heads, batches, rows, width] = x.dims();
    x.permute([0, 2, 3, 1, 4]).reshape([batch, batches * rows, heads, width])
}

/// Each mini-batch of `[B, H, batches, rows, X]` by itself.
pub(crate) fn each_batch<B: Backend>(x: Tensor<B, 5>) -> impl Iterator<Item = Tensor<B, 4>> {
    each_part(x, 2).into_iter().map(|part| part.squeeze_dim(2))
}

/// Of logarithms, `[B, H, batches, C, 1]`: the products from after each column's token up to each row's,
/// `[.., C, C]`, zero above the diagonal; and from the first token on, `[.., C, 1]`.
pub(crate) fn decays<B: Backend>(log: Tensor<B, 5>) -> (Tensor<B, 5>, Tensor<B, 5>) {
    let rows = log.dims()[3];
    let sums = log.cumsum(3);
    let [batch, heads, batches, ..] = sums.dims();
    let lower = Tensor::<B, 5>::ones([1, 1, 1, rows, rows], (&sums.device(), sums.dtype())).tril(0);
    let lower = lower.expand([batch, heads, batches, rows, rows]);
    // Above the diagonal differences grow, and could overflow: they are taken off before the exponential.
    let between = (sums.clone() - sums.clone().swap_dims(3, 4)) * lower.clone();
    (between.exp() * lower, sums.exp())
}

/// A [`NetworkState`] taken apart, to become the next.
pub(crate) struct NetworkPast<B: Backend> {
    pub(crate) memory: NetworkMemory<B>,
    pub(crate) conv_states: ConvPast<B>,
    pub(crate) position: usize,
}

impl<B: Backend> NetworkPast<B> {
    /// Of a state, or of what `start` gives at the start of a sequence.
    pub(crate) fn of(
        state: Option<NetworkState<B>>,
        start: impl FnOnce() -> NetworkMemory<B>,
    ) -> Self {
        match state {
            Some(NetworkState { memory, conv_states, position }) => {
                Self { memory, conv_states: ConvPast::after(conv_states), position }
            }
            None => Self { memory: start(), conv_states: ConvPast::none(), position: 0 },
        }
    }

    /// The state `tokens` tokens later.
    pub(crate) fn then(self, tokens: usize) -> NetworkState<B> {
        let Self { memory, conv_states, position } = self;
        NetworkState { memory, conv_states: conv_states.into_next(), position: position + tokens }
    }
}

/// Tensors of zeros like these.
pub(crate) fn zeros_like<B: Backend>(tensors: &[Tensor<B, 4>]) -> Vec<Tensor<B, 4>> {
    tensors.iter().map(Tensor::zeros_like).collect()
}
