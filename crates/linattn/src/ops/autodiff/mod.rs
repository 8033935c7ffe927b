//! The operations as nodes of Burn's autodiff graph.

mod node;

pub use node::{BackwardPass, Pass};

use super::backend::{self, Forward, LinearAttentionBackend, Operands, Path, Saved};
use super::fused::{
    ConvSplit, Embedding, GatedProduct, LinearCrossEntropy, LinearLayer, Normalization, Pack,
};
use super::mesa::{self, Normal};
use super::scan::{self, Scan};
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use node::node;

/// The recurrence and its backward pass.
fn recurrence<B: LinearAttentionBackend>(
    x: Operands<FloatTensor<B>>,
    chunk: usize,
    keep: bool,
) -> Pass<B> {
    let inputs = keep.then(|| x.clone());
    let Forward { o, state, saved } = B::chunkwise(x, chunk, keep);
    let backward = inputs.map(|x| -> BackwardPass<B> {
        Box::new(move |gradients, _| {
            let mut gradients = gradients.into_iter();
            let (d_o, d_state) = (gradients.next().flatten(), gradients.next().flatten());
            let d = B::chunkwise_backward(x, saved, d_o, d_state, chunk);
            d.into_vec().into_iter().map(Some).collect()
        })
    });
    Pass { outputs: vec![o, state], backward }
}

/// Tracked outputs, whose backward pass is in the graph; nothing where another graph around this one asks
/// for a backward pass, which is to have gradients itself: tensor operations have.
fn tracked<B: Backend, C: CheckpointStrategy>(
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
    keep: bool,
    forward: impl FnOnce(Vec<FloatTensor<B>>, bool) -> Option<Pass<B>>,
) -> Option<Pass<Autodiff<B, C>>> {
    match keep {
        true => None,
        false => node::<B, C>(inputs, forward).map(Pass::forward),
    }
}

impl<B: LinearAttentionBackend, C: CheckpointStrategy> LinearAttentionBackend for Autodiff<B, C> {
    /// Keeps what is needed in the graph, not in what it gives; unless it is asked to `keep`, by another
    /// graph around this one, whose backward pass is to have gradients too: tensor operations have.
    fn chunkwise(
        x: Operands<FloatTensor<Self>>,
        chunk: usize,
        keep: bool,
    ) -> Forward<FloatTensor<Self>> {
        if keep {
            return backend::forward::<Self>(x, chunk, keep);
        }
        let places = x.refill(std::iter::repeat(()));
        let outputs = node::<B, C>(x.into_vec(), |tensors, keep| {
            Some(recurrence::<B>(places.refill(tensors), chunk, keep))
        });
        let mut outputs = outputs.into_iter().flatten();
        let mut next = || outputs.next().expect("an output and a state");
        Forward { o: next(), state: next(), saved: Saved::default() }
    }

    fn fused_normalize(x: Normalization<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_normalize(places.refill(tensors), keep)
        })
    }

    fn fused_conv_split(x: ConvSplit<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_conv_split(places.refill(tensors), keep)
        })
    }

    fn fused_gated_product(x: GatedProduct<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_gated_product(places.refill(tensors), keep)
        })
    }

    fn fused_linear(x: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_linear(places.refill(tensors), keep)
        })
    }

    fn fused_pack(x: Pack<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let Pack { matrices, padding, dtype } = x;
        tracked::<B, C>(matrices, keep, |matrices, keep| {
            B::fused_pack(Pack { matrices, padding, dtype }, keep)
        })
    }

    fn fused_embedding(
        x: Embedding<FloatTensor<Self>, IntTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        let Embedding { table, ids, dtype } = x;
        tracked::<B, C>(vec![table], keep, |tensors, keep| {
            let table = tensors.into_iter().next().expect("a table");
            B::fused_embedding(Embedding { table, ids, dtype }, keep)
        })
    }

    fn fused_cross_entropy(
        x: LinearCrossEntropy<FloatTensor<Self>, IntTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        let LinearCrossEntropy { hidden, weight, by_rows, bias, target, scale, .. } = x;
        let (biased, frozen) = (bias.is_some(), weight.node.requirement.is_none());
        let inputs = [hidden, weight].into_iter().chain(bias).collect();
        tracked::<B, C>(inputs, keep, |tensors, keep| {
            let mut tensors = tensors.into_iter();
            let mut next = || tensors.next().expect("as many as there were");
            let (hidden, weight) = (next(), next());
            let bias = biased.then(next);
            let x = LinearCrossEntropy { hidden, weight, by_rows, bias, target, scale, frozen };
            B::fused_cross_entropy(x, keep)
        })
    }

    fn solve(x: Normal<FloatTensor<Self>>) -> FloatTensor<Self> {
        <Self as AutodiffBackend>::from_inner(B::solve(mesa::inner::<B, C>(x)))
    }

    fn implicit(found: FloatTensor<Self>, x: Normal<FloatTensor<Self>>) -> FloatTensor<Self> {
        mesa::track::<B, C>(found, x)
    }

    fn linear_scan(x: Scan<FloatTensor<Self>>) -> FloatTensor<Self> {
        scan::track::<B, C>(x)
    }

    fn path(device: &Self::Device) -> Path {
        B::path(device)
    }
}
