//! The operations as nodes of Burn's autodiff graph.

mod node;

use super::backend::{Composite, LinearAttentionBackend, Path};
use super::fused::{
    ConvSplit, DiagonalTaps, Embedding, GatedProduct, LinearCrossEntropy, LinearLayer,
    LongConvolution, LstmRecurrence, Normalization, Pack, Rotary, SelectiveScan, SoftmaxRows, Ttt,
};
use super::pass::{BackwardPass, Pass};
use super::recurrence::{Forward, Recurrence, Saved};
use super::reference;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::tensor::Shape;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use node::node;

/// The recurrence and its backward pass.
fn recurrence<B: LinearAttentionBackend>(x: Recurrence<FloatTensor<B>>, keep: bool) -> Pass<B> {
    let inputs = keep.then(|| x.clone());
    let Forward { o, state, saved } = B::chunkwise(x, keep);
    let backward = inputs.map(|x| -> BackwardPass<B> {
        Box::new(move |gradients, _| {
            let mut gradients = gradients.into_iter();
            let (d_o, d_state) = (gradients.next().flatten(), gradients.next().flatten());
            let d = B::chunkwise_backward(x, saved, d_o, d_state);
            d.into_list().1.into_iter().map(Some).collect()
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
    fn chunkwise(x: Recurrence<FloatTensor<Self>>, keep: bool) -> Forward<FloatTensor<Self>> {
        if keep {
            return reference::forward::<Self>(x, keep);
        }
        let (places, list) = x.into_list();
        let outputs =
            node::<B, C>(list, |tensors, keep| Some(recurrence::<B>(places.fill(tensors), keep)));
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

    fn fused_block_linear(x: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_block_linear(places.refill(tensors), keep)
        })
    }

    fn fused_rotary(x: Rotary<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let Rotary { x, table } = x;
        tracked::<B, C>(vec![x], keep, |tensors, keep| {
            let x = tensors.into_iter().next().expect("rows");
            B::fused_rotary(Rotary { x, table: table.primitive }, keep)
        })
    }

    fn fused_long_convolution(
        x: LongConvolution<FloatTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        let LongConvolution { x, taps } = x;
        tracked::<B, C>(vec![x, taps], keep, |tensors, keep| {
            let mut tensors = tensors.into_iter();
            let mut next = || tensors.next().expect("rows and taps");
            let (x, taps) = (next(), next());
            B::fused_long_convolution(LongConvolution { x, taps }, keep)
        })
    }

    fn fused_diagonal_taps(x: DiagonalTaps<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_diagonal_taps(places.refill(tensors), keep)
        })
    }

    fn fused_reshape(x: FloatTensor<Self>, shape: Shape, keep: bool) -> Option<Pass<Self>> {
        tracked::<B, C>(vec![x], keep, |tensors, keep| {
            let x = tensors.into_iter().next().expect("numbers");
            B::fused_reshape(x, shape, keep)
        })
    }

    fn fused_softmax(x: SoftmaxRows<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let SoftmaxRows { scores, seen } = x;
        tracked::<B, C>(vec![scores], keep, |tensors, keep| {
            let scores = tensors.into_iter().next().expect("scores");
            B::fused_softmax(SoftmaxRows { scores, seen }, keep)
        })
    }

    fn fused_selective_scan(x: SelectiveScan<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_selective_scan(places.refill(tensors), keep)
        })
    }

    fn fused_lstm(x: LstmRecurrence<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_lstm(places.refill(tensors), keep)
        })
    }

    fn fused_ttt(x: Ttt<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let places = x.refill(std::iter::repeat(()));
        tracked::<B, C>(x.into_vec(), keep, |tensors, keep| {
            B::fused_ttt(places.refill(tensors), keep)
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

    fn composite(
        operation: impl Composite,
        inputs: Vec<FloatTensor<Self>>,
    ) -> Vec<FloatTensor<Self>> {
        let made = node::<B, C>(inputs, |tensors, keep| Some(operation.run::<B>(tensors, keep)));
        made.expect("no composite operation refuses")
    }

    fn path(device: &Self::Device) -> Path {
        B::path(device)
    }
}
