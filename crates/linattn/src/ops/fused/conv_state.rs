//! The states of short convolutions: the last tokens that they saw.

use super::ConvStates;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{cat, primitive, tensor};
use crate::ops::{SequenceLengths, typed};
use burn::tensor::{Bool, Int, Tensor, TensorData, backend::Backend};

/// The last W - 1 tokens that each convolution of `widths` columns of `x` saw, `[B, W - 1, C_i]` in the type of
/// `x`: its state for what comes next. `[N, W - 1, C_i]` of N sequences with lengths of their own.
pub(crate) fn next_conv_states<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    widths: &[usize],
    states: &[Tensor<B, 3>],
    window: usize,
    lengths: Option<&SequenceLengths>,
) -> Vec<Tensor<B, 3>> {
    let all = ConvStates {
        x: primitive(x.clone()),
        widths: widths.to_vec(),
        window,
        states: states.iter().cloned().map(primitive).collect(),
        lengths: lengths.cloned(),
    };
    if let Some(next) = B::conv_states(&all) {
        return next.into_iter().map(tensor).collect();
    }
    let last = lengths.map(|lengths| LastTokens::new(lengths, x, widths.iter().sum(), window - 1));
    let mut first = 0;
    let mut state = |(n, &width): (usize, &usize)| {
        let next = match &last {
            Some(last) => last.state((first, width), states.get(n)),
            None => next_state(x, states.get(n), (first, width), window),
        };
        first += width;
        next
    };
    widths.iter().enumerate().map(&mut state).collect()
}

/// As [`next_conv_states`], of one convolution: its first column, and how many it has.
fn next_state<B: Backend>(
    x: &Tensor<B, 3>,
    state: Option<&Tensor<B, 3>>,
    (first, columns): (usize, usize),
    window: usize,
) -> Tensor<B, 3> {
    let ([batch, tokens, _], before) = (x.dims(), window - 1);
    let new = before.min(tokens);
    let part = [0..batch, tokens - new..tokens, first..first + columns];
    let x = x.clone().slice(part);
    if new == before {
        return x;
    }
    let zeros = || Tensor::zeros([batch, before, columns], (&x.device(), x.dtype()));
    let state = typed(state.cloned().unwrap_or_else(zeros), x.dtype());
    cat(vec![state.narrow(1, new, before - new), x], 1)
}

/// The last tokens of sequences with lengths of their own: of each sequence in turn, from its rows, and from its
/// state where it has fewer tokens.
struct LastTokens<B: Backend> {
    /// `[N (W - 1), columns]`; any row stands where a token is one of the state.
    rows: Tensor<B, 2>,
    old: Option<OldTokens<B>>,
    /// N and W - 1.
    shape: [usize; 2],
}

/// Tokens that are still those of the states.
struct OldTokens<B: Backend> {
    /// Rows of the states, `[N (W - 1)]`; any where a token is none of the state.
    places: Tensor<B, 1, Int>,
    /// `[N (W - 1), 1]`.
    there: Tensor<B, 2, Bool>,
}

impl<B: Backend> LastTokens<B> {
    /// Of the first `columns` columns of `x`, `[1, T, P]`; `kept` tokens of each sequence.
    fn new(lengths: &SequenceLengths, x: &Tensor<B, 3>, columns: usize, kept: usize) -> Self {
        let mut places = vec![];
        for (n, range) in lengths.ranges().enumerate() {
            // Places in the state and the sequence behind it.
            for place in range.len()..range.len() + kept {
                places.push(match place.checked_sub(kept) {
                    Some(token) => (range.start + token, 0, false),
                    None => (range.start, n * kept + place, true),
                });
            }
        }
        let (count, device) = (places.len(), x.device());
        let index = |of: fn(&(usize, usize, bool)) -> usize| {
            let numbers: Vec<i32> = places.iter().map(|place| of(place) as i32).collect();
            Tensor::<B, 1, Int>::from_data(TensorData::new(numbers, [count]), &device)
        };
        let there: Vec<bool> = places.iter().map(|place| place.2).collect();
        let old = there.contains(&true).then(|| OldTokens {
            places: index(|place| place.1),
            there: Tensor::from_data(TensorData::new(there, [count, 1]), &device),
        });
        let rows =
            x.clone().narrow(2, 0, columns).squeeze_dim::<2>(0).select(0, index(|place| place.0));
        Self { rows, old, shape: [lengths.count(), kept] }
    }

    /// The next state of a convolution: its first column, and how many it has.
    fn state(
        &self,
        (first, columns): (usize, usize),
        state: Option<&Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let mut rows = self.rows.clone().narrow(1, first, columns);
        if let Some(OldTokens { places, there }) = &self.old {
            let there = there.clone().expand(rows.dims());
            rows = match state {
                Some(state) => {
                    let state = typed(state.clone(), rows.dtype()).flatten::<2>(0, 1);
                    rows.mask_where(there, state.select(0, places.clone()))
                }
                None => rows.mask_fill(there, 0.0),
            };
        }
        let [sequences, kept] = self.shape;
        rows.reshape([sequences, kept, columns])
    }
}
