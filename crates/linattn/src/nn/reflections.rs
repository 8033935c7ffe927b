//! Softmax attention through reflections `H_t = I - beta_t w_t^T w_t`, a piece of tokens at a time.
//! With the rows of a piece of C tokens as matrices, all its products together are
//! ```text
//! R       = (I + strictly lower(diag(beta) W W^T))^-1 later(diag(beta) W K^T)
//! scores  = Q K^T - lower(Q W^T) R
//! K       = K - R^T W                                  behind the piece
//! ```
//! K being all keys so far, those before the piece as the last piece left them, and `later` zero
//! but where a row's token comes after the column's. A single token is the case C = 1: each key is
//! multiplied by H_t, and the scores are plain products. Source: arXiv 2505.16381.

use super::score_bias::{forget, pairs};
use super::softmax::{gather, merge, scores};
use super::state::CONV_STATES;
use super::{KeptTensors, RecurrentState, StateTensors};
use crate::ops::{LinearAttentionBackend, Seen, cat, solve_unit_lower};
use burn::tensor::{Tensor, backend::Backend};

/// Every key and value so far, the keys as the last token sees them: a state that grows with the
/// sequence.
#[derive(Debug, Clone)]
pub struct PathCache<B: Backend> {
    /// `[B, Hk, T, K]`, each multiplied by the reflections of all tokens after it.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
    /// With a forget gate, the sum of log gates up to each token, less that up to the last:
    /// `[B, H, T]`.
    pub gates: Option<Tensor<B, 3>>,
    /// Last inputs of the short convolution, `[B, W - 1, channels]`; empty without one.
    pub conv_states: KeptTensors<B>,
}

impl<B: Backend> RecurrentState<B> for PathCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        let tensors = StateTensors::new(None)
            .with_growing("keys", &self.keys, 2)
            .with_growing("values", &self.values, 2)
            .with_kept(CONV_STATES, &self.conv_states);
        match &self.gates {
            Some(gates) => tensors.with_growing("gates", gates, 2),
            None => tensors,
        }
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self {
            keys: tensors.take("keys"),
            values: tensors.take("values"),
            gates: tensors.take_if_any("gates"),
            conv_states: tensors.take_kept(CONV_STATES),
        }
    }
}

/// Rows of each token: `q` is `[B, H, T, K]` and scaled; `k`, `v` and `w` are `[B, Hk, T, K]`,
/// `beta` `[B, Hk, T, 1]`, log gates `[B, H, T]`.
pub(crate) struct Tokens<B: Backend> {
    pub(crate) q: Tensor<B, 4>,
    pub(crate) k: Tensor<B, 4>,
    pub(crate) v: Tensor<B, 4>,
    pub(crate) w: Tensor<B, 4>,
    pub(crate) beta: Tensor<B, 4>,
    pub(crate) gates: Option<Tensor<B, 3>>,
}

impl<B: Backend> Tokens<B> {
    /// `size` tokens from number `from` on.
    pub(crate) fn part(&self, from: usize, size: usize) -> Self {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(2, from, size);
        Self {
            q: part(&self.q),
            k: part(&self.k),
            v: part(&self.v),
            w: part(&self.w),
            beta: part(&self.beta),
            gates: self.gates.clone().map(|gates| gates.narrow(2, from, size)),
        }
    }
}

/// One piece of a sequence: `[B, C, H K]`, and the cache behind it, without conv states.
pub(crate) fn attend<B: LinearAttentionBackend>(
    x: Tokens<B>,
    before: Option<PathCache<B>>,
) -> (Tensor<B, 3>, PathCache<B>) {
    let Tokens { q, k, v, w, beta, gates } = x;
    let [batch, shared, size, _] = w.dims();
    let (keys, values, log_gates) = match before {
        Some(before) => {
            (cat(vec![before.keys, k], 2), cat(vec![before.values, v], 2), before.gates)
        }
        None => (k, v, None),
    };
    let weighted = w.clone() * beta;
    let later = |columns: &Tensor<B, 4>| {
        let seen = columns.dims()[2];
        let mask = pairs(&w, seen, |back| if back > 0 { 1.0 } else { 0.0 });
        let products = scores(weighted.clone(), columns) * mask;
        products.reshape([batch, shared, size, seen])
    };
    let reflected = solve_unit_lower(later(&w), later(&keys)); // R
    let mask = pairs(&q, size, |back| if back >= 0 { 1.0 } else { 0.0 });
    let met = scores(q.clone(), &w) * mask;
    let scores = scores(q.clone(), &keys) - met.matmul(reflected.clone().unsqueeze_dim::<5>(2));

    let (scores, gates) = match gates {
        Some(gates) => {
            let (forgotten, gates) = forget(gates, log_gates, shared);
            (scores + forgotten, Some(gates))
        }
        None => (scores, None),
    };
    let o = merge(gather(scores, &values, Seen::Causal { window: None }));
    let keys = keys - reflected.transpose().matmul(w);
    (o, PathCache { keys, values, gates, conv_states: KeptTensors::default() })
}
