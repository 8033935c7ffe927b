//! The recurrences with a matrix for a state on Flex's tensors.

use super::recurrence::{self, Given, Gradients, Inputs, Sizes};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed, zeros};
use crate::ops::backend::{Forward, Operands, Saved};
use burn::tensor::{DType, Shape, TensorMetadata};
use burn_flex::FlexTensor;

type Tensors = Operands<FlexTensor>;

/// The one type of all operands.
fn dtype(x: &Tensors) -> Option<DType> {
    one_type(x.clone().into_vec().iter())
}

fn in_rows(x: &Tensors) -> Tensors {
    x.refill(x.clone().into_vec().into_iter().map(contiguous))
}

fn sizes(x: &Tensors) -> Sizes {
    let (q, v) = (x.q.shape(), x.v.shape());
    Sizes {
        batch: q[0],
        tokens: q[1],
        key_heads: q[2],
        heads: v[2],
        key_width: q[3],
        value_width: v[3],
    }
}

fn inputs<R: Number>(x: &Tensors) -> Inputs<'_, R> {
    Inputs {
        sizes: sizes(x),
        q: slice(&x.q),
        k: slice(&x.k),
        v: slice(&x.v),
        a: maybe(&x.a),
        b: maybe(&x.b),
        g: maybe(&x.g),
        beta: maybe(&x.beta),
        state: maybe(&x.state),
        read: x.read,
    }
}

fn state_shape(s: &Sizes) -> Shape {
    Shape::from([s.batch, s.heads, s.key_width, s.value_width])
}

/// The forward pass; nothing where the operands are of other types than f32 or f64, or of several.
pub(super) fn forward(x: &Tensors, keep: bool) -> Option<Forward<FlexTensor>> {
    typed!(dtype(x)?, forward_of(in_rows(x), keep))
}

fn forward_of<R: Number>(x: Tensors, keep: bool) -> Forward<FlexTensor> {
    let inputs = inputs::<R>(&x);
    let s = inputs.sizes;
    let (mut o, mut last) = (zeros::<R>(inputs.v.len()), zeros(s.states()));
    let mut kept = keep.then(|| zeros(s.kept()));
    recurrence::forward(inputs, &mut o, &mut last, kept.as_deref_mut());
    let count = s.kept();
    let kept = kept.map(|kept| tensor(kept, [count]));
    Forward {
        o: tensor(o, x.v.shape()),
        state: tensor(last, state_shape(&s)),
        saved: Saved::from(kept.into_iter().collect::<Vec<_>>()),
    }
}

/// The backward pass of what [`forward`] did.
pub(super) fn backward(
    x: &Tensors,
    saved: &Saved<FlexTensor>,
    d_o: Option<FlexTensor>,
    d_state: Option<FlexTensor>,
) -> Option<Tensors> {
    let given = [d_o, d_state].map(|d| d.map(contiguous));
    typed!(dtype(x)?, backward_of(in_rows(x), saved, given))
}

fn backward_of<R: Number>(
    x: Tensors,
    saved: &Saved<FlexTensor>,
    [d_o, d_state]: [Option<FlexTensor>; 2],
) -> Tensors {
    let inputs = inputs::<R>(&x);
    let new = |x: &FlexTensor| zeros::<R>(x.shape().num_elements());
    let mut d = Gradients {
        q: new(&x.q),
        k: new(&x.k),
        v: new(&x.v),
        a: x.a.as_ref().map(new),
        b: x.b.as_ref().map(new),
        g: x.g.as_ref().map(new),
        beta: x.beta.as_ref().map(new),
        state: x.state.as_ref().map(new),
    };
    let kept = saved.tensors.first().expect("a forward pass that keeps saves its states");
    let given = Given { kept: slice(kept), d_o: maybe(&d_o), d_state: maybe(&d_state) };
    recurrence::backward(inputs, given, d.each_mut());
    let found = d.into_vec();
    let shapes = x.clone().into_vec();
    let tensors = found.into_iter().zip(shapes).map(|(d, like)| tensor(d, like.shape()));
    x.refill(tensors)
}
