//! Terms of softmax attention's scores that depend on where a query and a key stand: masks, slopes (ALiBi), the
//! strided pattern, contextual positions (CoPE).
//! ```text
//! slope   = -m_h (i - j)                                    m_h = 2^{-8 h / H}
//! strided = 0 if i - j < s or (i - j) mod s = 0, else -1e9
//! g_ij    = sigmoid(q_i k_j^T / sqrt(K)), 0 for hidden keys
//! p_ij    = min(g_ij + g_{i,j+1} + .. + g_ii, P - 1)
//! cope    = q_i e(p_ij)^T / sqrt(K)                         e(p): between those of the whole numbers around p
//! ```
//! Source: slopes, arXiv 2108.12409; the strided pattern, Sparse Transformer, arXiv 1904.10509, both of its parts
//! seen by every head; contextual positions, arXiv 2405.18719, divided by sqrt(K) like the scores, as in its authors'
//! code. Their vectors start from zero there; here as N(0, 0.02^2).

use super::layers::{INIT_STD, wide_type};
use crate::ops::{self, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, TensorData, backend::Backend};

/// A number for each query of `q`, the last of as many tokens as there are keys, and each key; given
/// how many tokens the key lies back (the key's own lead, if it is ahead). `[1, 1, 1, T, S]`, in the type of
/// scores.
pub(crate) fn pairs<B: Backend>(
    q: &Tensor<B, 4>,
    keys: usize,
    f: impl Fn(isize) -> f32,
) -> Tensor<B, 5> {
    let of = (&q.device(), wide_type(q.dtype()));
    ops::by_distance([q.dims()[2], keys], f, of).unsqueeze()
}

/// Zero where a query may see a key, and very negative where not.
pub(crate) fn causal_mask<B: Backend>(
    q: &Tensor<B, 4>,
    keys: usize,
    window: Option<usize>,
) -> Tensor<B, 5> {
    let of = (&q.device(), wide_type(q.dtype()));
    ops::causal_mask([q.dims()[2], keys], window, of).unsqueeze()
}

/// Zero for the last `stride` keys and for every `stride`-th before them, and very negative between.
pub(crate) fn strided_mask<B: Backend>(
    q: &Tensor<B, 4>,
    keys: usize,
    stride: usize,
) -> Tensor<B, 5> {
    let stride = stride as isize;
    pairs(q, keys, |back| if back < stride || back % stride == 0 { 0.0 } else { ops::HIDDEN })
}

/// How much scores of each head of `q` fall with the distance, `[1, Hk, H / Hk, T, S]`.
pub(crate) fn fall<B: Backend>(q: &Tensor<B, 4>, keys: usize, shared: usize) -> Tensor<B, 5> {
    pairs(q, keys, |back| back.max(0) as f32) * slopes(q, shared)
}

/// How fast the scores of each head of `q` fall, `[1, Hk, H / Hk, 1, 1]`: a geometric series from
/// 2^(-8 / H) to 2^-8, filled up from that of twice as many heads where H is no power of two.
fn slopes<B: Backend>(q: &Tensor<B, 4>, shared: usize) -> Tensor<B, 5> {
    let heads = q.dims()[1];
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let series = |count: usize| (1..=count).map(move |h| (-8.0 * h as f64 / count as f64).exp2());
    let values: Vec<f32> = series(whole)
        .chain(series(2 * whole).step_by(2))
        .take(heads)
        .map(|slope| slope as f32)
        .collect();
    let data = TensorData::new(values, [1, shared, heads / shared, 1, 1]);
    Tensor::from_data(data, (&q.device(), wide_type(q.dtype())))
}

/// From log gates, `[B, H, T]`, and a cache's `gates` before them: the sums of those behind each
/// key, `[B, Hk, H / Hk, T, S]`, 0 or more ahead of the query; and the cache's `gates`.
pub(crate) fn forget<B: Backend>(
    log_gates: Tensor<B, 3>,
    before: Option<Tensor<B, 3>>,
    shared: usize,
) -> (Tensor<B, 5>, Tensor<B, 3>) {
    let [batch, heads, tokens] = log_gates.dims();
    // Counted from the last token before these.
    let gates = log_gates.cumsum(2);
    let all = match before {
        Some(before) => cat(vec![before, gates.clone()], 2),
        None => gates.clone(),
    };
    let last = gates.clone().narrow(2, tokens - 1, 1);
    let forgotten = gates.unsqueeze_dim::<4>(3) - all.clone().unsqueeze_dim::<4>(2);
    let grouped = [batch, shared, heads / shared, tokens, all.dims()[2]];
    (forgotten.reshape(grouped), all - last)
}

/// Vectors of contextual positions, shared by the heads.
#[derive(Module, Debug)]
pub struct ContextualPositions<B: Backend> {
    /// e, `[P, K]`.
    embeddings: Param<Tensor<B, 2>>,
}

impl<B: Backend> ContextualPositions<B> {
    pub(crate) fn new(positions: usize, width: usize, device: &B::Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: INIT_STD };
        Self { embeddings: normal.init([positions, width], device) }
    }

    /// The term of contextual positions, `[B, Hk, H / Hk, T, S]`: of `q`, `[B, H, T, K]` and scaled, and of its
    /// `scores` with all keys, of which those are visible whose `hidden` is 0.
    pub(crate) fn forward(
        &self,
        q: Tensor<B, 4>,
        scores: Tensor<B, 5>,
        hidden: Tensor<B, 5>,
    ) -> Tensor<B, 5> {
        let [batch, shared, group, tokens, _] = scores.dims();
        let [count, width] = self.embeddings.dims();
        let visible = hidden.detach().exp();
        let gates = sigmoid(scores) * visible;
        let positions = gates.flip([4]).cumsum(4).flip([4]).clamp_max((count - 1) as f64);

        let table = typed(self.embeddings.val(), q.dtype()).transpose().unsqueeze::<5>();
        let q = q.reshape([batch, shared, group, tokens, width]);
        let at = accumulator(q.matmul(table));
        let lower = positions.clone().detach().floor();
        let upper = (lower.clone() + 1.0).clamp_max((count - 1) as f64);
        let rest = positions - lower.clone();
        let below = at.clone().gather(4, lower.int());
        let above = at.gather(4, upper.int());
        below.clone() + (above - below) * rest
    }
}
