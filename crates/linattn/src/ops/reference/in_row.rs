//! Sequences that lie one after another in one row, in tensor operations: one by one.

use crate::ops::lengths::SequenceLengths;
use crate::ops::recurrence::{Forward, Recurrence, Saved};
use crate::ops::tensors::float_cat;
use burn::tensor::{Slice, TensorMetadata, backend::Backend, ops::FloatTensor};
use std::ops::Range;

/// These places of a dimension.
fn slice<B: Backend>(x: &FloatTensor<B>, dimension: usize, range: &Range<usize>) -> FloatTensor<B> {
    let shape = x.shape();
    let all = |(d, length): (usize, &usize)| match d == dimension {
        true => Slice::from(range.clone()),
        false => Slice::from(0..*length),
    };
    let slices: Vec<Slice> = shape.iter().enumerate().map(all).collect();
    B::float_slice(x.clone(), &slices)
}

/// Sequence `n` of a row, which has these tokens.
fn sequence<B: Backend>(
    x: &Recurrence<FloatTensor<B>>,
    n: usize,
    tokens: &Range<usize>,
) -> Recurrence<FloatTensor<B>> {
    let state = x.state.as_ref().map(|state| slice::<B>(state, 0, &(n..n + 1)));
    let rows = Recurrence { state: None, lengths: None, ..x.clone() };
    Recurrence { state, ..rows.map(|x| slice::<B>(&x, 1, tokens)) }
}

/// Outputs of all sequences, and their last states, where `one` is the forward pass of a sequence.
pub(super) fn forward<B: Backend>(
    x: &Recurrence<FloatTensor<B>>,
    lengths: &SequenceLengths,
    one: impl Fn(Recurrence<FloatTensor<B>>) -> Forward<FloatTensor<B>>,
) -> Forward<FloatTensor<B>> {
    let of_sequence = |(n, tokens): (usize, Range<usize>)| {
        let done = one(sequence::<B>(x, n, &tokens));
        (done.o, done.state)
    };
    let (o, states) = lengths.ranges().enumerate().map(of_sequence).unzip();
    Forward { o: float_cat::<B>(o, 1), state: float_cat::<B>(states, 0), saved: Saved::default() }
}

/// Gradients of all sequences' tensors, where `one` is the backward pass of a sequence.
pub(super) fn backward<B: Backend>(
    x: &Recurrence<FloatTensor<B>>,
    lengths: &SequenceLengths,
    [d_o, d_state]: [Option<FloatTensor<B>>; 2],
    one: impl Fn(Recurrence<FloatTensor<B>>, [Option<FloatTensor<B>>; 2]) -> Recurrence<FloatTensor<B>>,
) -> Recurrence<FloatTensor<B>> {
    let of_sequence = |(n, tokens): (usize, Range<usize>)| {
        let x = sequence::<B>(x, n, &tokens);
        let d_o = d_o.as_ref().map(|d| slice::<B>(d, 1, &tokens));
        let d_state = d_state.as_ref().map(|d| slice::<B>(d, 0, &(n..n + 1)));
        one(x, [d_o, d_state])
    };
    let gradients: Vec<_> = lengths.ranges().enumerate().map(of_sequence).collect();
    let states = gradients.iter().filter_map(|d| d.state.clone()).collect::<Vec<_>>();
    let rows = gradients.into_iter().map(|d| Recurrence { state: None, ..d }.into_list());
    let (mut places, mut columns) = (None, vec![]);
    for (found, list) in rows {
        columns.resize_with(list.len(), Vec::new);
        columns.iter_mut().zip(list).for_each(|(column, x)| column.push(x));
        places = Some(found);
    }
    let joined = columns.into_iter().map(|column| float_cat::<B>(column, 1)).collect();
    let rows: Recurrence<FloatTensor<B>> = places.expect("a sequence").fill(joined);
    let state = x.state.as_ref().map(|_| float_cat::<B>(states, 0));
    Recurrence { state, lengths: x.lengths.clone(), ..rows }
}
