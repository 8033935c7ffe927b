//! Short causal depthwise convolution: `y_t = sum_w weight_w * seen_{t+w}`, where `seen` is the tail
//! of the sequence so far, W - 1 tokens, and then `x`.
//!
//! Forward and backward are written out, because the gradients of W overlapping slices are W sparse
//! tensors of full size each, and their sums the dearest part of a small model's step.

use super::backend::{LinearAttentionBackend, primitive, tensor};
use super::rowwise::Activation;
use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// `x`: `[B, T, D]`; `weight`: `[W, D]`, the last row for the newest token; `tail`: `[B, W - 1, D]`.
#[derive(Debug, Clone)]
pub struct Convolution<T> {
    /// Inputs.
    pub x: T,
    /// Weights.
    pub weight: T,
    /// What came before `x`.
    pub tail: T,
}

/// The tail and then `x`: `[B, W - 1 + T, D]`.
fn seen<B: Backend>(tail: Tensor<B, 3>, x: Tensor<B, 3>) -> Tensor<B, 3> {
    Tensor::cat(vec![tail, x], 1)
}

/// `sum_w weight_{order(w)} * x_{t+w}`, `tokens` long.
fn correlate<B: Backend>(
    x: &Tensor<B, 3>,
    weight: &Tensor<B, 2>,
    tokens: usize,
    order: impl Fn(usize) -> usize,
) -> Tensor<B, 3> {
    let tap = |w: usize| {
        let weight = weight.clone().narrow(0, order(w), 1).unsqueeze::<3>();
        x.clone().narrow(1, w, tokens) * weight
    };
    (1..weight.dims()[0]).fold(tap(0), |sum, w| sum + tap(w))
}

pub(super) fn forward<B: Backend>(c: Convolution<FloatTensor<B>>) -> FloatTensor<B> {
    let (x, weight) = (tensor::<B, 3>(c.x), tensor::<B, 2>(c.weight));
    let tokens = x.dims()[1];
    primitive(correlate(&seen(tensor(c.tail), x), &weight, tokens, |w| w))
}

/// The last W - 1 tokens of what was seen, which may reach back into the old tail.
fn next_tail<B: Backend>(c: &Convolution<FloatTensor<B>>) -> FloatTensor<B> {
    let (x, tail) = (tensor::<B, 3>(c.x.clone()), tensor::<B, 3>(c.tail.clone()));
    let (tokens, before) = (x.dims()[1], tail.dims()[1]);
    primitive(match tokens <= before {
        true => seen(tail, x).narrow(1, tokens, before),
        false => x.narrow(1, tokens - before, before),
    })
}

/// The convolution, what follows it, and the next tail.
pub(super) fn convolve<B: LinearAttentionBackend>(
    c: Convolution<FloatTensor<B>>,
    bias: Option<FloatTensor<B>>,
    activation: Option<Activation>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let next = next_tail::<B>(&c);
    let mut y = tensor::<B, 3>(B::short_convolution(c));
    if let Some(bias) = bias {
        y = y + tensor::<B, 1>(bias).unsqueeze::<3>();
    }
    if let Some(activation) = activation {
        y = activation.apply(y);
    }
    (primitive(y), next)
}

pub(super) fn backward<B: Backend>(
    c: Convolution<FloatTensor<B>>,
    d_y: FloatTensor<B>,
) -> Convolution<FloatTensor<B>> {
    let (x, weight, tail) = (tensor::<B, 3>(c.x), tensor::<B, 2>(c.weight), tensor::<B, 3>(c.tail));
    let d_y = tensor::<B, 3>(d_y);
    let ([batch, tokens, channels], width) = (x.dims(), weight.dims()[0]);
    let before = width - 1;

    // seen_s went into y_{s-w}: the same sum over the gradient, padded, with the taps reversed.
    let padding = Tensor::zeros([batch, before, channels], (&d_y.device(), d_y.dtype()));
    let padded = seen(padding.clone(), seen(d_y.clone(), padding));
    let d_seen = correlate(&padded, &weight, before + tokens, |w| before - w);

    let rows = [batch * tokens, channels];
    let (seen, d_y) = (seen(tail, x), d_y.reshape(rows));
    let d_tap = |w| (seen.clone().narrow(1, w, tokens).reshape(rows) * d_y.clone()).sum_dim(0);
    let d_weight = Tensor::cat((0..width).map(d_tap).collect(), 0);
    Convolution {
        x: primitive(d_seen.clone().narrow(1, before, tokens)),
        weight: primitive(d_weight),
        tail: primitive(d_seen.narrow(1, 0, before)),
    }
}

#[derive(Debug)]
struct ConvolutionNode;

impl<B: LinearAttentionBackend> Backward<B, 3> for ConvolutionNode {
    type State = Convolution<NodeId>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_y = gradients.consume::<B>(&ops.node);
        let Convolution { x, weight, tail } = ops.state;
        let [x, weight, tail] = [x, weight, tail].map(|id| checkpointer.retrieve_node_output(id));
        let d = B::short_convolution_backward(Convolution { x, weight, tail }, d_y);
        for (parent, gradient) in ops.parents.into_iter().zip([d.x, d.weight, d.tail]) {
            if let Some(parent) = parent {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// The convolution as one node of the autodiff graph.
pub(super) fn track<B: LinearAttentionBackend, C: CheckpointStrategy>(
    c: Convolution<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = [&c.x, &c.weight, &c.tail].map(|input| input.node.clone());
    let prepared = ConvolutionNode.prepare::<C>(nodes).compute_bound().stateful();
    let Convolution { x, weight, tail } = c;
    match prepared {
        OpsKind::Tracked(mut node) => {
            let state = Convolution {
                x: node.checkpoint(&x),
                weight: node.checkpoint(&weight),
                tail: node.checkpoint(&tail),
            };
            let plain =
                Convolution { x: x.primitive, weight: weight.primitive, tail: tail.primitive };
            node.finish(state, B::short_convolution(plain))
        }
        OpsKind::UnTracked(node) => {
            let plain =
                Convolution { x: x.primitive, weight: weight.primitive, tail: tail.primitive };
            node.finish(B::short_convolution(plain))
        }
    }
}
