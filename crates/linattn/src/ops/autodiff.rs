//! The operations as one node of Burn's autodiff graph.
//!
//! A node has one output, the operations have two. So the node proper is a hub with a dummy value,
//! whose parents are the inputs, and each output is a leaf of the hub: a leaf leaves its gradient in a
//! slot and passes a dummy on, which makes the hub run once, after both. A slot left empty means that
//! nobody used that output.

use super::backend::{self, Forward, LinearAttentionBackend, Operands, Path, Saved};
use super::convolution::{self, Convolution};
use super::mesa::{self, Normal};
use super::scan::{self, Scan};
use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::tensor::{FloatDType, backend::AutodiffBackend, ops::FloatTensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Gradients of `o` and of the last state, as they arrive.
type Slots<B> = Arc<Mutex<[Option<FloatTensor<B>>; 2]>>;

#[derive(Debug)]
struct Hub;

#[derive(Debug)]
struct Leaf;

#[derive(Clone, Debug)]
struct HubState<B: LinearAttentionBackend> {
    /// Nodes of the inputs; which inputs there are.
    inputs: Operands<NodeId>,
    saved: Saved<FloatTensor<B>>,
    slots: Slots<B>,
    chunk: usize,
}

#[derive(Clone, Debug)]
struct LeafState<B: LinearAttentionBackend> {
    output: usize,
    slots: Slots<B>,
}

impl<B: LinearAttentionBackend, const N: usize> Backward<B, N> for Hub {
    type State = HubState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let _dummy = gradients.consume::<B>(&ops.node);
        let HubState { inputs, saved, slots, chunk } = ops.state;
        let tensors: Vec<FloatTensor<B>> = inputs
            .clone()
            .into_vec()
            .into_iter()
            .map(|id| checkpointer.retrieve_node_output(id))
            .collect();
        let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
        let [d_o, d_state] = std::mem::take(&mut *slots);
        let d = B::chunkwise_backward(inputs.refill(tensors), saved, d_o, d_state, chunk);
        for (parent, gradient) in ops.parents.into_iter().zip(d.into_vec()) {
            if let Some(parent) = parent {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: LinearAttentionBackend> Backward<B, 1> for Leaf {
    type State = LeafState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = gradients.consume::<B>(&ops.node);
        let dummy = dummy::<B>(&gradient);
        let LeafState { output, slots } = ops.state;
        slots.lock().unwrap_or_else(PoisonError::into_inner)[output] = Some(gradient);
        if let [Some(hub)] = ops.parents {
            gradients.register::<B>(hub.id, dummy);
        }
    }
}

/// Of one type, whatever that of the output is: the hub adds up what its two leaves pass on.
fn dummy<B: LinearAttentionBackend>(on: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros([1].into(), &B::float_device(on), FloatDType::F32)
}

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// N is how many inputs there are: 3 to 8.
fn track<B: LinearAttentionBackend, C: CheckpointStrategy, const N: usize>(
    x: Operands<Tracked<B, C>>,
    chunk: usize,
) -> Forward<Tracked<B, C>> {
    let list = x.clone().into_vec();
    let nodes: [_; N] = std::array::from_fn(|i| list[i].node.clone());
    match Hub.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut hub) => {
            let ids: Vec<_> = list.iter().map(|input| hub.checkpoint(input)).collect();
            let inputs = x.refill(ids);
            let plain = x.refill(list.into_iter().map(|input| input.primitive));
            let value = dummy::<B>(&plain.q);
            let Forward { o, state, saved } = B::chunkwise(plain, chunk, true);
            let slots = Slots::<B>::default();
            let state_of_hub = HubState { inputs, saved, slots: slots.clone(), chunk };
            let hub = hub.finish(state_of_hub, value);
            let leaf = |output, value| {
                let state = LeafState { output, slots: slots.clone() };
                match Leaf.prepare::<C>([hub.node.clone()]).compute_bound().stateful() {
                    OpsKind::Tracked(leaf) => leaf.finish(state, value),
                    OpsKind::UnTracked(_) => unreachable!("its only parent, the hub, is tracked"),
                }
            };
            Forward { o: leaf(0, o), state: leaf(1, state), saved: Saved::default() }
        }
        OpsKind::UnTracked(_) => {
            let plain = x.refill(list.into_iter().map(|input| input.primitive));
            let Forward { o, state, .. } = B::chunkwise(plain, chunk, false);
            Forward {
                o: Autodiff::<B, C>::from_inner(o),
                state: Autodiff::<B, C>::from_inner(state),
                saved: Saved::default(),
            }
        }
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
        match x.clone().into_vec().len() {
            3 => track::<B, C, 3>(x, chunk),
            4 => track::<B, C, 4>(x, chunk),
            5 => track::<B, C, 5>(x, chunk),
            6 => track::<B, C, 6>(x, chunk),
            7 => track::<B, C, 7>(x, chunk),
            8 => track::<B, C, 8>(x, chunk),
            n => unreachable!("`Operands` holds 3 to 8 tensors, not {n}"),
        }
    }

    fn short_convolution(c: Convolution<FloatTensor<Self>>) -> FloatTensor<Self> {
        convolution::track::<B, C>(c)
    }

    fn solve(x: Normal<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::from_inner(B::solve(mesa::inner::<B, C>(x)))
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
