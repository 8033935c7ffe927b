//! Averages of values weighted by exponentials of keys and of a bias of two positions, channel by channel.
//! ```text
//! a_t = sum_{j <= t} e^{k_j + w_tj} v_j,  b_t = sum_{j <= t} e^{k_j + w_tj},  o_t = a_t / b_t
//! ```
//! Sums of tokens whose bias is 0 are a recurrence; those of the others are taken pair by pair. Both are kept over
//! the exponential of their largest term, through which no gradient is taken.

use super::exponential_gates::exponential_sums;
use super::score_bias::causal_mask;
use super::{Kept, KeptTensors};
use crate::ops::{Along, LOWEST, LinearAttentionBackend, cat, typed};
use burn::tensor::{Tensor, backend::Backend};

/// Queries whose pairs are worked off together.
const PIECE: usize = 16;

/// A sum of weighted values over e^top, that of the weights, and top, `[B, T, D]` each.
pub(crate) struct Partial<B: Backend> {
    above: Tensor<B, 3>,
    below: Tensor<B, 3>,
    top: Tensor<B, 3>,
}

impl<B: Backend> Partial<B> {
    /// Of sums side by side, `[B, T, 2 D]`.
    fn of(sums: Tensor<B, 3>, top: Tensor<B, 3>) -> Self {
        let width = top.dims()[2];
        let [above, below] = halves(&sums, width);
        Self { above, below, top }
    }

    /// The sums over the tokens of both.
    pub(crate) fn with(self, other: Self) -> Self {
        let top = self.top.clone().max_pair(other.top.clone());
        let (a, b) = ((self.top - top.clone()).exp(), (other.top - top.clone()).exp());
        let sum = |x: Tensor<B, 3>, y: Tensor<B, 3>| x * a.clone() + y * b.clone();
        Self { above: sum(self.above, other.above), below: sum(self.below, other.below), top }
    }

    /// The weighted average of values.
    pub(crate) fn mean(self) -> Tensor<B, 3> {
        self.above / self.below
    }
}

/// The first and the last `width` channels.
fn halves<B: Backend>(x: &Tensor<B, 3>, width: usize) -> [Tensor<B, 3>; 2] {
    [0, width].map(|from| x.clone().narrow(2, from, width))
}

/// `[.., 2 D]` of keys that weigh nothing and of values that are zero, as many as `rows`.
pub(crate) fn nothing<B: Backend>(like: &Tensor<B, 3>, rows: usize) -> Tensor<B, 3> {
    let [batch, _, both] = like.dims();
    let zeros = Tensor::zeros([batch, rows, both / 2], (&like.device(), like.dtype()));
    cat(vec![zeros.full_like(LOWEST), zeros], 2)
}

/// Sums over all of `both`, keys and values side by side, up to each token; and the memory after the last.
pub(crate) fn summed<B: LinearAttentionBackend>(
    both: Tensor<B, 3>,
    mut before: KeptTensors<B>,
) -> (Partial<B>, KeptTensors<B>) {
    let [k, v] = halves(&both, both.dims()[2] / 2);
    let memory = before.take(Kept::Sums).zip(before.take(Kept::Maximum));
    let sums = exponential_sums(k.zeros_like(), k, v, memory);
    (Partial::of(sums.all, sums.largest), sums.next.into_iter().collect())
}

/// u and p: a learnt vector for each position of a query and of a key, `[positions, rank]`.
pub(crate) struct Biases<B: Backend> {
    pub(crate) queries: Tensor<B, 2>,
    pub(crate) keys: Tensor<B, 2>,
}

impl<B: Backend> Biases<B> {
    /// Sums over pairs, for the last `tokens` of `all`, keys and values side by side, of which the first stands at
    /// `position`.
    pub(crate) fn paired(
        &self,
        all: &Tensor<B, 3>,
        position: usize,
        tokens: usize,
        window: Option<usize>,
    ) -> Partial<B> {
        let (end, known) = (position + tokens, self.queries.dims()[0]);
        assert!(end <= known, "position {end} of {known} that the mixer has learnt");
        let earlier = all.dims()[1] - tokens;
        let pieces = (0..tokens).step_by(PIECE).map(|piece| {
            let size = PIECE.min(tokens - piece);
            let from = window.map_or(0, |window| earlier + piece + 1 - window);
            let seen = all.clone().narrow(1, from, earlier + piece + size - from);
            self.piece(seen, position + piece, size, window)
        });
        let list = |part: fn(&Partial<B>) -> &Tensor<B, 3>, pieces: &[Partial<B>]| {
            cat(pieces.iter().map(|piece| part(piece).clone()).collect(), 1)
        };
        let pieces: Vec<_> = pieces.collect();
        Partial {
            above: list(|piece| &piece.above, &pieces),
            below: list(|piece| &piece.below, &pieces),
            top: list(|piece| &piece.top, &pieces),
        }
    }

    /// For `size` queries from position `first` on, the last of the tokens `seen`.
    fn piece(
        &self,
        seen: Tensor<B, 3>,
        first: usize,
        size: usize,
        window: Option<usize>,
    ) -> Partial<B> {
        let [_, keys, both] = seen.dims();
        let [k, v] = halves(&seen, both / 2);
        // Tokens before the first of all have no position, and no weight.
        let absent = keys.saturating_sub(first + size);
        let p = self.keys.clone().narrow(0, first + size + absent - keys, keys - absent);
        let p = match absent {
            0 => p,
            _ => {
                let none = Tensor::zeros([absent, p.dims()[1]], (&p.device(), p.dtype()));
                cat(vec![none, p], 0)
            }
        };
        let w = self.queries.clone().narrow(0, first, size).matmul(p.transpose());
        let queries = k.clone().narrow(1, keys - size, size).unsqueeze_dim::<4>(1);
        let hidden = causal_mask(&queries, keys, window).reshape([1, size, keys, 1]);
        let bias = typed(w, k.dtype()).reshape([1, size, keys, 1]) + hidden;
        let exponents = k.unsqueeze_dim::<4>(1) + bias;
        let top = exponents.clone().detach().max_dim(2);
        let weights = (exponents - top.clone()).exp();
        Partial {
            above: (weights.clone() * v.unsqueeze_dim::<4>(1)).sum_along(2).squeeze_dim(2),
            below: weights.sum_along(2).squeeze_dim(2),
            top: top.squeeze_dim(2),
        }
    }
}
