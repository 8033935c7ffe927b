//! Test-time training over whole mini-batches in one piece, where a backend has such a piece.

use super::Ttt;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{accumulator, primitive, tensor};
use burn::tensor::{Tensor, backend::Backend};

/// Inputs of [`ttt`].
#[derive(Debug, Clone)]
pub(crate) struct TttInputs<B: Backend> {
    /// Queries, keys and values, `[B, T, H, K]`, the first two rotated by the place in the mini-batch.
    pub(crate) rows: [Tensor<B, 4>; 3],
    /// Inner learning rates, `[B, T, H]`.
    pub(crate) rate: Tensor<B, 3>,
    /// Their factor by the place in a mini-batch, `[b]`; b divides T.
    pub(crate) scale: Tensor<B, 1>,
    /// Weight and bias of the norm, `[H, K]`.
    pub(crate) norm: [Tensor<B, 2>; 2],
    /// Weights over biases of each layer, `[B, H, from + 1, to]`.
    pub(crate) weights: Vec<Tensor<B, 4>>,
    /// epsilon of the norms: added to the mean of z^2 before its root.
    pub(crate) epsilon: f64,
}

/// `q + LN(f(q))` of every token, `[B, T, H, K]`, and f after the last one, in f32; the layer
/// [`Ttt`](crate::nn::mixers::Ttt) has the recurrence. Gradients reach all inputs. None where the backend has no such piece for
/// these tensors.
pub(crate) fn ttt<B: LinearAttentionBackend>(
    inputs: TttInputs<B>,
) -> Option<(Tensor<B, 4>, Vec<Tensor<B, 4>>)> {
    let TttInputs { rows, rate, scale, norm, weights, epsilon } = inputs;
    let [q, k, v] = rows.map(|x| primitive(accumulator(x)));
    let [norm_weight, norm_bias] = norm.map(|x| primitive(accumulator(x)));
    let (rate, scale) = (primitive(accumulator(rate)), primitive(accumulator(scale)));
    let weights = weights.into_iter().map(|x| primitive(accumulator(x))).collect();
    let x = Ttt { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon };
    let mut outputs = B::fused_ttt(x, false)?.outputs.into_iter();
    Some((tensor(outputs.next()?), outputs.map(tensor).collect()))
}
