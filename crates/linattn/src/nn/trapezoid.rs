//! Linear attention by the trapezoidal rule: a token is written in its own step and once more in the next.
//! ```text
//! S   = e^g (S + sum_r before k_{t-1,r}^T v_{t-1,r}) + sum_r now k_r^T v_r        over the R rows of a token
//! o_r = q_r S
//! ```
//! One pass of linear attention over R T rows writes each row once: by `now` and, ahead of time, by the `before` of
//! the next token. Outputs are put right for what their row should not see yet, and for later rows of their token
//! that it should. The last token has no next one: the next call adds it to the memory first.
//! Source: Mamba-3, arXiv 2603.15569.

use super::recurrence::linear_attention;
use crate::ops::{Along, LinearAttentionBackend, LinearAttentionInputs, accumulator, cat, typed};
use burn::tensor::{Tensor, backend::Backend};

/// Keys, values, gates and queries of tokens.
pub(crate) struct Trapezoid<B: Backend> {
    /// Queries and keys, `[B, T, R, H, K]`.
    pub(crate) q: Tensor<B, 5>,
    pub(crate) k: Tensor<B, 5>,
    /// Values, `[B, T, R, H, V]`.
    pub(crate) v: Tensor<B, 5>,
    /// Share of a token's write in its own step, and of the token before it, `[B, T, H]`.
    pub(crate) now: Tensor<B, 3>,
    pub(crate) before: Tensor<B, 3>,
    /// Log decay, `[B, T, H]`.
    pub(crate) g: Tensor<B, 3>,
}

impl<B: LinearAttentionBackend> Trapezoid<B> {
    /// Goes on from a memory, `[B, H, K, V]`, and the keys and values of the last token, `[B, 1, R, H, ..]`. Gives
    /// outputs, `[B, T, R, H, V]`, and the memory.
    pub(crate) fn attend(
        self,
        last: Option<(Tensor<B, 5>, Tensor<B, 5>)>,
        memory: Option<Tensor<B, 4>>,
    ) -> (Tensor<B, 5>, Tensor<B, 4>) {
        let Self { q, k, v, now, before, g } = self;
        let ([batch, tokens, rank, heads, _], dtype) = (v.dims(), v.dtype());
        let memory = match (memory, last) {
            (Some(memory), Some((k, v))) => {
                let share = before.clone().narrow(1, 0, 1).reshape([batch, heads, 1, 1]);
                Some(memory + outer_products(k, v) * share)
            }
            (memory, _) => memory,
        };
        let later = next_of(before);
        let column = |x: Tensor<B, 3>| typed(x, dtype).reshape([batch, tokens, 1, heads, 1]);
        let written = v.clone() * column(now.clone() + later.clone());

        let rows = |x: Tensor<B, 5>| {
            let width = x.dims()[4];
            x.reshape([batch, tokens * rank, heads, width])
        };
        let (q_rows, k_rows, g) = (rows(q.clone()), rows(k.clone()), first_of_rows(g, rank));
        let inputs = LinearAttentionInputs::new(q_rows, k_rows, rows(written)).with_decay(g);
        let (o, memory) = linear_attention(inputs, memory, None);
        let mut o = o.reshape(v.dims());
        for row in 0..rank {
            let [k, v] = [k.clone(), v.clone()].map(|x| x.narrow(2, row, 1));
            // Rows from this one on have seen it, by both shares; the others have not.
            let unseen = column(now.clone()).repeat_dim(2, row);
            let seen = column(later.clone().neg()).repeat_dim(2, rank - row);
            let share = if row == 0 { seen } else { cat(vec![unseen, seen], 2) };
            o = o + (q.clone() * k).sum_along(4) * share * v;
        }
        (o, memory)
    }
}

/// `sum_r k_r^T v_r` of one token, `[B, H, K, V]`, in f32 at least.
fn outer_products<B: Backend>(k: Tensor<B, 5>, v: Tensor<B, 5>) -> Tensor<B, 4> {
    let [k, v] = [k, v].map(|x| accumulator(x).squeeze_dim::<4>(1));
    k.permute([0, 2, 3, 1]).matmul(v.swap_dims(1, 2))
}

/// Each token's next number, 0 for the last, `[B, T, H]`.
fn next_of<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    let tokens = x.dims()[1];
    let zero = x.clone().narrow(1, 0, 1).zeros_like();
    match tokens {
        1 => zero,
        _ => cat(vec![x.narrow(1, 1, tokens - 1), zero], 1),
    }
}

/// Log decays of rows, `[B, T R, H]`: a token's first row decays the memory, the others leave it.
fn first_of_rows<B: Backend>(g: Tensor<B, 3>, rank: usize) -> Tensor<B, 3> {
    let [batch, tokens, heads] = g.dims();
    if rank == 1 {
        return g;
    }
    let first = g.unsqueeze_dim::<4>(2);
    let others = first.zeros_like().repeat_dim(2, rank - 1);
    cat(vec![first, others], 2).reshape([batch, tokens * rank, heads])
}
