//! One node of Burn's autodiff graph for an operation with any number of inputs and outputs.
//!
//! Burn's nodes have one output. An operation with several is a hub with a dummy value, whose parents are
//! the inputs, and a leaf of the hub for each output. A leaf leaves its gradient in a slot and passes a
//! dummy on, so the hub runs once, after all its leaves. A slot left empty belongs to an output without a
//! gradient. Dummies are memory that nothing fills or reads: they cost no launch.

use crate::ops::pass::{BackwardPass, Pass};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::tensor::{FloatDType, backend::Backend, ops::FloatTensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Something that the graph, which wants to clone and print, keeps and one backward pass takes out.
struct Kept<T>(Arc<Mutex<T>>);

impl<T> Kept<T> {
    fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(value)))
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Kept<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> std::fmt::Debug for Kept<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}

/// Gradients of the outputs, as they arrive.
type Slots<B> = Kept<Vec<Option<FloatTensor<B>>>>;

/// The operation itself, where it has one output; else what its leaves meet in.
#[derive(Debug)]
struct Operation;

#[derive(Clone, Debug)]
struct OperationState<B: Backend> {
    backward: Kept<Option<BackwardPass<B>>>,
    /// None for an operation of one output, whose gradient is the node's own.
    slots: Option<Slots<B>>,
}

impl<B: Backend, const N: usize> Backward<B, N> for Operation {
    type State = OperationState<B>;

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let own = gradients.consume::<B>(&ops.node);
        let OperationState { backward, slots } = ops.state;
        let outputs = match slots {
            Some(slots) => std::mem::take(&mut *slots.lock()),
            None => vec![Some(own)],
        };
        let backward = backward.lock().take().expect("a graph is walked back once");
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let found = backward(outputs, &wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

#[derive(Debug)]
struct Leaf;

#[derive(Clone, Debug)]
struct LeafState<B: Backend> {
    output: usize,
    slots: Slots<B>,
}

impl<B: Backend> Backward<B, 1> for Leaf {
    type State = LeafState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let first = {
            let mut slots = ops.state.slots.lock();
            let first = slots.iter().all(Option::is_none);
            slots[ops.state.output] = Some(gradient.clone());
            first
        };
        // The hub runs if any leaf has reached it; a second dummy would only be added to the first.
        if let ([Some(hub)], true) = (ops.parents, first) {
            gradients.register::<B>(hub.id, dummy::<B>(&gradient));
        }
    }
}

fn dummy<B: Backend>(beside: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_empty([1].into(), &B::float_device(beside), FloatDType::F32)
}

/// Runs `forward` on the tensors inside and makes a node of it; None if it refuses. `forward` is told
/// whether a backward pass is asked for.
/// # Panics
/// If there are no inputs, or more than 10.
pub(in crate::ops) fn node<B: Backend, C: CheckpointStrategy>(
    inputs: Vec<Tracked<B, C>>,
    forward: impl FnOnce(Vec<FloatTensor<B>>, bool) -> Option<Pass<B>>,
) -> Option<Vec<Tracked<B, C>>> {
    match inputs.len() {
        1 => of::<B, C, 1>(inputs, forward),
        2 => of::<B, C, 2>(inputs, forward),
        3 => of::<B, C, 3>(inputs, forward),
        4 => of::<B, C, 4>(inputs, forward),
        5 => of::<B, C, 5>(inputs, forward),
        6 => of::<B, C, 6>(inputs, forward),
        7 => of::<B, C, 7>(inputs, forward),
        8 => of::<B, C, 8>(inputs, forward),
        9 => of::<B, C, 9>(inputs, forward),
        10 => of::<B, C, 10>(inputs, forward),
        count => unreachable!("an operation has 1 to 10 inputs, not {count}"),
    }
}

fn of<B: Backend, C: CheckpointStrategy, const N: usize>(
    inputs: Vec<Tracked<B, C>>,
    forward: impl FnOnce(Vec<FloatTensor<B>>, bool) -> Option<Pass<B>>,
) -> Option<Vec<Tracked<B, C>>> {
    let nodes: [_; N] = std::array::from_fn(|i| inputs[i].node.clone());
    let plain = inputs.iter().map(|input| input.primitive.clone()).collect();
    let prepared = match Operation.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::UnTracked(_) => {
            let outputs = forward(plain, false)?.outputs;
            return Some(outputs.into_iter().map(Autodiff::<B, C>::from_inner_float).collect());
        }
        OpsKind::Tracked(prepared) => prepared,
    };
    let Pass { mut outputs, backward } = forward(plain, true)?;
    let backward =
        Kept::new(Some(backward.expect("a forward pass that is asked for one gives it")));
    if outputs.len() == 1 {
        let state = OperationState { backward, slots: None };
        return Some(vec![prepared.finish(state, outputs.remove(0))]);
    }
    let slots: Slots<B> = Kept::new(outputs.iter().map(|_| None).collect());
    let value = dummy::<B>(&outputs[0]);
    // Held until every leaf is there: another thread's backward pass frees what no tensor holds.
    let hub = prepared.finish(OperationState { backward, slots: Some(slots.clone()) }, value);
    let leaf = |(output, value)| {
        let state = LeafState { output, slots: slots.clone() };
        match Leaf.prepare::<C>([hub.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(leaf) => leaf.finish(state, value),
            OpsKind::UnTracked(_) => unreachable!("its only parent, the hub, is tracked"),
        }
    };
    Some(outputs.into_iter().enumerate().map(leaf).collect())
}

/// A tensor that the graph does not know.
trait FromInner<B: Backend>: Backend {
    fn from_inner_float(inner: FloatTensor<B>) -> FloatTensor<Self>;
}

impl<B: Backend, C: CheckpointStrategy> FromInner<B> for Autodiff<B, C> {
    fn from_inner_float(inner: FloatTensor<B>) -> FloatTensor<Self> {
        <Self as burn::tensor::backend::AutodiffBackend>::from_inner(inner)
    }
}
