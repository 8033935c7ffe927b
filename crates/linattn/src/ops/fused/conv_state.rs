//! The states of short convolutions: the last tokens that they saw.

use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::typed;
use burn::tensor::{Tensor, backend::Backend};

/// Convolutions of one window over the first columns of a packed projection, side by side.
#[derive(Debug, Clone)]
pub struct ConvStates<T> {
    /// `[B, T, P]`.
    pub x: T,
    /// C_i, columns of each convolution.
    pub widths: Vec<usize>,
    /// W, at least 2.
    pub window: usize,
    /// The W - 1 tokens before `x`, `[B, W - 1, C_i]` each; empty at the start of a sequence.
    pub states: Vec<T>,
}

/// The last W - 1 tokens that each convolution of `widths` columns of `x` saw, `[B, W - 1, C_i]` in the type of
/// `x`: its state for what comes next.
pub(crate) fn next_conv_states<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    widths: &[usize],
    states: &[Tensor<B, 3>],
    window: usize,
) -> Vec<Tensor<B, 3>> {
    let all = ConvStates {
        x: primitive(x.clone()),
        widths: widths.to_vec(),
        window,
        states: states.iter().cloned().map(primitive).collect(),
    };
    if let Some(next) = B::conv_states(&all) {
        return next.into_iter().map(tensor).collect();
    }
    let mut first = 0;
    let mut state = |(n, &width): (usize, &usize)| {
        let next = next_state(x, states.get(n), (first, width), window);
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
    Tensor::cat(vec![state.narrow(1, new, before - new), x], 1)
}
