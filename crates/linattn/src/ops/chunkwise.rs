//! The chunkwise forward and backward pass in tensor operations, for every Burn backend.
//!
//! Per head and chunk of C tokens, with S the state at its start, `(X|Y)_ij = x_i y_j^T e^{G_i - G_j}`
//! for i >= j (`strict`: i > j), `q~_i = q_i e^{G_i}`, `k^_j = k_j e^{G_C - G_j}`, `e = beta k`:
//! ```text
//! U  = v                                            linear attention
//! U  = T (beta v) - T e~ S,  T = (I + strict(e|k))^-1   delta rule
//! O  = q~ S + (q|k) U
//! S' = e^{G_C} S + k^^T U
//! ```
//! Only U and S' need the chunk before; everything else is computed for all chunks at once. The
//! backward pass runs the same two recurrences in reverse:
//! ```text
//! dU = (q|k)^T dO + k^ dS'
//! dS = e^{G_C} dS' + q~^T dO - (T e~)^T dU
//! ```
//! and then, for all chunks at once, with R = T^T dU and D_ij = e^{G_i - G_j}:
//! ```text
//! dA = dO U^T D,  dN = -R U^T D (strict)
//! dq = dA k + e^{G_i} dO S^T          dk = dA^T q + dN^T e + e^{G_C - G_j} U dS'^T
//! de = dN k - e^{G_i} R S^T           d(beta v) = R
//! ```

use super::backend::{Forward, Saved};
use super::decay::{Decay, ExponentGradients};
use super::mask::Mask;
use super::recurrence::{LogDecay, Read, Recurrence, Transition};
use super::tensors::{accumulator, primitive, tensor};
use super::triangular::unit_lower_inverse;
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Whether this is one of the recurrences of this file: linear attention or a delta rule on its keys, with a
/// scalar decay or none, read after the decay.
pub(super) fn takes<T>(x: &Recurrence<T>) -> bool {
    let transition = matches!(
        x.transition,
        Transition::Identity { read: Read::After }
            | Transition::Delta { erase: None, read: Read::After, .. }
    );
    transition && !matches!(x.decay, Some(LogDecay::Vector(_)))
}

/// Sizes of one call, and the two layouts: `[B, T, H, X]` outside, `[chunks, B H, C, X]` inside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    tokens: usize,
    key_heads: usize,
    pub(super) heads: usize,
    pub(super) key_width: usize,
    pub(super) value_width: usize,
    chunk: usize,
}

impl Sizes {
    pub(super) fn new<B: Backend>(q: &Tensor<B, 4>, v: &Tensor<B, 4>, chunk: usize) -> Self {
        let [batch, tokens, key_heads, key_width] = q.dims();
        let [_, _, heads, value_width] = v.dims();
        Self { batch, tokens, key_heads, heads, key_width, value_width, chunk }
    }

    pub(super) fn rows(&self) -> usize {
        self.batch * self.heads
    }

    pub(super) fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk)
    }

    /// Into chunks. The tail is filled with zeros, which write nothing and, as log gates, keep all.
    /// Chunks and then heads are cut out and stacked: each cut is a run of rows, which copies faster
    /// than one permutation of four dimensions. Key heads are shared out over value heads.
    pub(super) fn split<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, tokens, heads, width] = x.dims();
        let padded = self.chunks() * self.chunk;
        let mut x = accumulator(x);
        if padded > tokens {
            let shape = [batch, padded - tokens, heads, width];
            x = Tensor::cat(vec![x.clone(), Tensor::zeros(shape, (&x.device(), x.dtype()))], 1);
        }
        if self.chunks() > 1 {
            let cut = |c| x.clone().narrow(1, c * self.chunk, self.chunk);
            x = Tensor::cat((0..self.chunks()).map(cut).collect(), 0);
        }
        let many = self.chunks() * batch;
        let x = x.reshape([many, self.chunk, heads, width]);
        let group = self.heads / heads;
        let cut = |h| x.clone().narrow(2, h / group, 1).reshape([many, 1, self.chunk, width]);
        let x = match self.heads {
            1 => cut(0),
            heads => Tensor::cat((0..heads).map(cut).collect(), 1),
        };
        x.reshape([self.chunks(), self.rows(), self.chunk, width])
    }

    /// Out of chunks, back to `[B, T, H, X]`.
    pub(super) fn join<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let (many, width) = (self.chunks() * self.batch, x.dims()[3]);
        let x = x.reshape([many, self.heads, self.chunk, width]);
        let cut = |h| x.clone().narrow(1, h, 1).reshape([many, self.chunk, 1, width]);
        let mut x = match self.heads {
            1 => cut(0),
            heads => Tensor::cat((0..heads).map(cut).collect(), 2),
        };
        if self.chunks() > 1 {
            let cut = |c| x.clone().narrow(0, c * self.batch, self.batch);
            x = Tensor::cat((0..self.chunks()).map(cut).collect(), 1);
        }
        x.narrow(1, 0, self.tokens)
    }

    /// As [`join`](Self::join), adding up the value heads that share a key head.
    pub(super) fn join_key_heads<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let x = self.join(x);
        if self.key_heads == self.heads {
            return x;
        }
        let group = self.heads / self.key_heads;
        x.reshape([self.batch, self.tokens, self.key_heads, group, self.key_width])
            .sum_dim(3)
            .squeeze_dim(3)
    }
}

/// Operands of both passes, for all chunks at once.
struct Chunks<B: Backend> {
    sizes: Sizes,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    decay: Option<Decay<B>>,
    delta: Option<Delta<B>>,
    /// State before the first token, `[1, B H, K, V]`.
    start: Option<Tensor<B, 4>>,
    /// Lower triangle, with and without its diagonal.
    causal: Mask<B>,
    strict: Mask<B>,
}

/// Parts of the delta rule alone.
struct Delta<B: Backend> {
    /// `[.., C, 1]`.
    beta: Tensor<B, 4>,
    /// beta k, `[.., C, K]`.
    erase: Tensor<B, 4>,
}

impl<B: Backend> Chunks<B> {
    fn new(x: Recurrence<FloatTensor<B>>, chunk: usize) -> Self {
        let (q, k, v) = (tensor::<B, 4>(x.q), tensor(x.k), tensor(x.v));
        let sizes = Sizes::new(&q, &v, chunk);
        let gate = |x: FloatTensor<B>| sizes.split(tensor::<B, 3>(x).unsqueeze_dim(3));
        let (q, k, v) = (sizes.split(q), sizes.split(k), sizes.split(v));
        let delta = match x.transition {
            Transition::Delta { beta, .. } => {
                let beta = gate(beta);
                Some(Delta { erase: k.clone() * beta.clone(), beta })
            }
            _ => None,
        };
        let start = [1, sizes.rows(), sizes.key_width, sizes.value_width];
        Self {
            causal: Mask::lower(&q, chunk, 0),
            strict: Mask::lower(&q, chunk, 1),
            decay: x.decay.map(|g| Decay::new(gate(g.into_inner()))),
            start: x.state.map(|s| accumulator(tensor::<B, 4>(s)).reshape(start)),
            sizes,
            q,
            k,
            v,
            delta,
        }
    }

    /// `(x|y)`: scores with decay, zero above the diagonal.
    fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>) -> Tensor<B, 4> {
        let scores = x.clone().matmul(y.clone().transpose());
        match &self.decay {
            Some(decay) => scores * decay.within.clone(),
            None => self.causal.apply(scores),
        }
    }

    /// As [`scores`](Self::scores), zero on the diagonal too.
    fn strict_scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>) -> Tensor<B, 4> {
        self.strict.apply(self.scores(x, y))
    }

    /// `x_i e^{G_i}`: as a query at the start of the chunk would have to be.
    fn since_start(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.decay {
            Some(decay) => x.clone() * decay.from_start.clone(),
            None => x.clone(),
        }
    }

    /// `x_j e^{G_C - G_j}`: what is left of a key at the end of the chunk.
    fn to_end(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.decay {
            Some(decay) => x.clone() * decay.to_end.clone(),
            None => x.clone(),
        }
    }

    /// A state, `[1, B H, K, V]`, carried over chunk `c`.
    fn carry(&self, state: Tensor<B, 4>, c: usize) -> Tensor<B, 4> {
        match &self.decay {
            Some(decay) => state * decay.total.clone().narrow(0, c, 1),
            None => state,
        }
    }

    fn zero_state(&self) -> Tensor<B, 4> {
        let Sizes { key_width, value_width, .. } = self.sizes;
        Tensor::zeros(
            [1, self.sizes.rows(), key_width, value_width],
            (&self.q.device(), self.q.dtype()),
        )
    }

    fn start(&self) -> Tensor<B, 4> {
        self.start.clone().unwrap_or_else(|| self.zero_state())
    }

    /// States at the chunks' starts and after the last, and U.
    fn scan(&self, solved: Option<&Solved<B>>) -> Scan<B> {
        let kept = self.to_end(&self.k).transpose();
        let (mut state, mut states, mut written) = (self.start(), vec![], vec![]);
        // Without a delta rule the writes need no state: one product for all chunks.
        let writes = match solved {
            Some(_) => None,
            None => Some(kept.clone().matmul(self.v.clone())),
        };
        for c in 0..self.sizes.chunks() {
            states.push(state.clone());
            let write = match (solved, &writes) {
                (Some(solved), _) => {
                    let u = solved.values.clone().narrow(0, c, 1)
                        - solved.erase.clone().narrow(0, c, 1).matmul(state.clone());
                    written.push(u.clone());
                    kept.clone().narrow(0, c, 1).matmul(u)
                }
                (None, Some(writes)) => writes.clone().narrow(0, c, 1),
                (None, None) => unreachable!("`writes` is there whenever `solved` is not"),
            };
            state = self.carry(state, c) + write;
        }
        let written = solved.map(|_| Tensor::cat(written, 0));
        Scan { states: Tensor::cat(states, 0), written, last: state }
    }

    /// T e~, T (beta v) and T itself.
    fn solve(&self, delta: &Delta<B>) -> Solved<B> {
        let n = self.strict_scores(&delta.erase, &self.k);
        let [chunks, rows, chunk, _] = n.dims();
        let inverse = unit_lower_inverse(n.reshape([chunks * rows, chunk, chunk]))
            .reshape([chunks, rows, chunk, chunk]);
        self.apply(delta, inverse)
    }

    fn apply(&self, delta: &Delta<B>, inverse: Tensor<B, 4>) -> Solved<B> {
        Solved {
            values: inverse.clone().matmul(self.v.clone() * delta.beta.clone()),
            erase: inverse.clone().matmul(self.since_start(&delta.erase)),
            inverse,
        }
    }
}

/// The triangular system of every chunk, solved.
struct Solved<B: Backend> {
    inverse: Tensor<B, 4>,
    values: Tensor<B, 4>,
    erase: Tensor<B, 4>,
}

struct Scan<B: Backend> {
    states: Tensor<B, 4>,
    written: Option<Tensor<B, 4>>,
    last: Tensor<B, 4>,
}

pub(super) fn forward<B: Backend>(
    x: Recurrence<FloatTensor<B>>,
    chunk: usize,
    keep: bool,
) -> Forward<FloatTensor<B>> {
    let dtype = tensor::<B, 4>(x.v.clone()).dtype();
    let x = Chunks::<B>::new(x, chunk);
    let solved = x.delta.as_ref().map(|delta| x.solve(delta));
    let Scan { states, written, last } = x.scan(solved.as_ref());
    let u = written.clone().unwrap_or_else(|| x.v.clone());
    let o = x.scores(&x.q, &x.k).matmul(u) + x.since_start(&x.q).matmul(states.clone());
    let Sizes { batch, heads, key_width, value_width, .. } = x.sizes;
    let state = last.reshape([batch, heads, key_width, value_width]);
    Forward {
        o: primitive(x.sizes.join(o).cast(dtype)),
        state: primitive(state),
        saved: Saved::from(match keep {
            true => {
                let inverse = solved.map(|s| s.inverse);
                [Some(states), written, inverse].into_iter().flatten().map(primitive).collect()
            }
            false => vec![],
        }),
    }
}

pub(super) fn backward<B: Backend>(
    given: Recurrence<FloatTensor<B>>,
    saved: Saved<FloatTensor<B>>,
    d_o: Option<FloatTensor<B>>,
    d_state: Option<FloatTensor<B>>,
    chunk: usize,
) -> Recurrence<FloatTensor<B>> {
    let x = Chunks::<B>::new(given.clone(), chunk);
    let mut saved = saved.tensors.into_iter().map(tensor::<B, 4>);
    let states = saved.next().expect("a forward pass that keeps saves its states");
    let u = saved.next().unwrap_or_else(|| x.v.clone());
    let d_o = match d_o {
        Some(d_o) => x.sizes.split(tensor(d_o)),
        None => x.v.zeros_like(),
    };
    let d_last = match d_state {
        Some(d) => accumulator(tensor::<B, 4>(d)).reshape(x.zero_state().shape()),
        None => x.zero_state(),
    };
    let solved = match (&x.delta, saved.next()) {
        (Some(delta), Some(inverse)) => Some(x.apply(delta, inverse)),
        _ => None,
    };

    let reads = x.scores(&x.q, &x.k);
    let Reverse { d_states, d_written, d_start } =
        reverse(&x, reads.clone().transpose().matmul(d_o.clone()), &d_o, d_last, solved.as_ref());
    let kept_by_state = x.to_end(&u.clone().matmul(d_states.clone().transpose()));
    let read_of_state = x.since_start(&d_o.clone().matmul(states.clone().transpose()));

    let d_reads = d_o.matmul(u.clone().transpose());
    let d_scores = decayed(&x, d_reads.clone(), false);
    let mut d_q = d_scores.clone().matmul(x.k.clone()) + read_of_state.clone();
    let mut d_k = d_scores.transpose().matmul(x.q.clone()) + kept_by_state.clone();
    let mut d_v = d_written.clone();
    let mut d_beta = None;
    let mut within = d_reads * reads;
    let mut from_start = (x.q.clone() * read_of_state).sum_dim(3);

    if let (Some(delta), Some(solved)) = (&x.delta, &solved) {
        let r = solved.inverse.clone().transpose().matmul(d_written);
        let d_n = r.clone().matmul(u.transpose()).neg();
        let erased = x.since_start(&r.clone().matmul(states.clone().transpose()));
        let d_pairs = decayed(&x, d_n.clone(), true);
        let d_erase = d_pairs.clone().matmul(x.k.clone()) - erased.clone();
        d_k = d_k
            + d_pairs.transpose().matmul(delta.erase.clone())
            + d_erase.clone() * delta.beta.clone();
        d_beta = Some((d_erase * x.k.clone()).sum_dim(3) + (r.clone() * x.v.clone()).sum_dim(3));
        d_v = r * delta.beta.clone();
        if x.decay.is_some() {
            within = within + d_n * x.strict_scores(&delta.erase, &x.k);
            from_start = from_start - (delta.erase.clone() * erased).sum_dim(3);
        }
    }
    let d_g = x.decay.as_ref().map(|decay| {
        let total = (states * d_states).sum_dim(3).sum_dim(2) * decay.total.clone();
        let to_end = (x.k.clone() * kept_by_state).sum_dim(3);
        ExponentGradients { within, from_start, to_end, total }.log_gates()
    });
    d_q = x.sizes.join_key_heads(d_q);
    d_k = x.sizes.join_key_heads(d_k);
    let outside = |x4: Tensor<B, 4>, like: FloatTensor<B>| {
        let like = tensor::<B, 4>(like);
        primitive(x4.cast(like.dtype()))
    };
    let gate = |d: Tensor<B, 4>, like: &FloatTensor<B>| {
        let dtype = tensor::<B, 3>(like.clone()).dtype();
        primitive(x.sizes.join(d).squeeze_dim::<3>(3).cast(dtype))
    };
    let transition = match (given.transition, d_beta) {
        (Transition::Delta { beta, erase, read }, Some(d)) => {
            Transition::Delta { beta: gate(d, &beta), erase, read }
        }
        (transition, _) => transition,
    };
    Recurrence {
        q: outside(d_q, given.q),
        k: outside(d_k, given.k),
        v: outside(x.sizes.join(d_v), given.v),
        decay: given.decay.zip(d_g).map(|(g, d)| g.map(|like| gate(d, &like))),
        transition,
        state: given.state.map(|s| {
            let s = tensor::<B, 4>(s);
            primitive(d_start.reshape(s.dims()).cast(s.dtype()))
        }),
    }
}

struct Reverse<B: Backend> {
    /// Gradient of the state at the end of each chunk.
    d_states: Tensor<B, 4>,
    /// Gradient of U.
    d_written: Tensor<B, 4>,
    /// Gradient of the state before the first token.
    d_start: Tensor<B, 4>,
}

/// The two recurrences of the backward pass, last chunk first. `by_reads` is (q|k)^T dO.
fn reverse<B: Backend>(
    x: &Chunks<B>,
    by_reads: Tensor<B, 4>,
    d_o: &Tensor<B, 4>,
    mut d_state: Tensor<B, 4>,
    solved: Option<&Solved<B>>,
) -> Reverse<B> {
    let kept = x.to_end(&x.k);
    let by_outputs = x.since_start(&x.q).transpose().matmul(d_o.clone());
    let (mut d_states, mut d_written) = (vec![], vec![]);
    for c in (0..x.sizes.chunks()).rev() {
        let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
        d_states.push(d_state.clone());
        let mut before = x.carry(d_state.clone(), c) + at(&by_outputs);
        if let Some(solved) = solved {
            let d_u = at(&by_reads) + at(&kept).matmul(d_state);
            before = before - at(&solved.erase).transpose().matmul(d_u.clone());
            d_written.push(d_u);
        }
        d_state = before;
    }
    let forwards = |mut list: Vec<_>| {
        list.reverse();
        Tensor::cat(list, 0)
    };
    let d_states = forwards(d_states);
    let d_written = match solved {
        Some(_) => forwards(d_written),
        None => by_reads + kept.matmul(d_states.clone()),
    };
    Reverse { d_states, d_written, d_start: d_state }
}

/// Gradient of scores to gradient of plain products: the decay and the mask once more.
fn decayed<B: Backend>(x: &Chunks<B>, d: Tensor<B, 4>, strict: bool) -> Tensor<B, 4> {
    let d = match &x.decay {
        Some(decay) => d * decay.within.clone(),
        None => x.causal.apply(d),
    };
    if strict { x.strict.apply(d) } else { d }
}
