//! Every recurrence there is in one form, in tensor operations: what a backend without kernels gets
//! for vector decay, erase rows, low rank transitions and reads before the decay.
//!
//! Per head and chunk of C tokens, S the state at its start, G the cumulative sum of the log decay g,
//! `(x|y)_ij = sum_d x_id y_jd e^{G_id - G_jd}` for j <= i, and `(x|y)'_ij` the same with `G_{i-1}` in
//! the place of `G_i`, for j < i (a row that asks before its own decay):
//! ```text
//! S_t = e^{g_t} S_{t-1} + b_t^T z_t + k_t^T v_t,   z_t = a_t S_{t-1}
//!
//! Z  = T (a~ S + (a|k)' v),  T = (I - (a|b)')^-1,  a~_i = a_i e^{G_{i-1}}
//! O  = q~ S + (q|k) v + (q|b) Z                    primed throughout where q reads before the decay
//! S' = e^{G_C} S + k^^T v + b^^T Z                 k^_j = k_j e^{G_C - G_j}
//! ```
//! A delta rule, `u_t = beta_t (v_t - e_t S)`, is `b = k`, v scaled by beta, and `a = -beta e`, times
//! `e^{g_t}` where it erases after the decay. Backwards, with R = T^T dZ:
//! ```text
//! dZ = (q|b)^T dO + b^ dS'                dv = (q|k)^T dO + k^ dS' + (a|k)'^T R
//! dS = e^{G_C} dS' + q~^T dO + (T a~)^T dZ
//! ```
//! and the rows from dO v^T, dO Z^T, R v^T and R Z^T, each through its decay.

use super::backend::{Forward, Operands, Read, Saved, primitive, tensor};
use super::chunkwise::{Sizes, accumulator};
use super::triangular::unit_lower_inverse;
use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};

/// Scores with a decay of their own for every d take C C K numbers a chunk: short chunks cost least.
const LONGEST_CHUNK: usize = 16;

/// The log decay, `[B, T, H]` or `[B, T, H, K]`, as `[B, T, H, 1 or K]`.
pub(super) fn gates<B: Backend>(g: FloatTensor<B>) -> Tensor<B, 4> {
    match g.rank() {
        3 => tensor::<B, 3>(g).unsqueeze_dim(3),
        _ => tensor::<B, 4>(g),
    }
}

/// Whether a row asks before its own token's decay, or after it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Asks {
    After,
    Before,
}

/// Decay between the tokens of every chunk.
struct Decays<B: Backend> {
    /// `[M, N, C, C, 1 or K]`: `e^{G_i - G_j}` on and below the diagonal, 0 above.
    after: Tensor<B, 5>,
    /// The same with `G_{i-1}`: below the diagonal, 0 on it and above.
    before: Tensor<B, 5>,
    /// `[M, N, C, 1 or K]`: `e^{G_i}`, `e^{G_{i-1}}`, `e^{G_C - G_j}`.
    start_after: Tensor<B, 4>,
    start_before: Tensor<B, 4>,
    to_end: Tensor<B, 4>,
    /// `[M, N, 1 or K, 1]`: `e^{G_C}`.
    total: Tensor<B, 4>,
}

/// `x` at and below the diagonal of its dimensions 2 and 3, or `offset` below it.
fn lower<B: Backend>(x: Tensor<B, 5>, offset: i64) -> Tensor<B, 5> {
    let size = x.dims()[2];
    let mask = Tensor::<B, 2>::ones([size, size], (&x.device(), x.dtype())).tril(-offset);
    x * mask.reshape([1, 1, size, size, 1])
}

/// Row i of dimension 2 at i + 1, `first` in its place.
fn later<B: Backend, const D: usize>(x: Tensor<B, D>, first: f64) -> Tensor<B, D> {
    let size = x.dims()[2];
    let first = x.clone().narrow(2, 0, 1).zeros_like() + first;
    match size {
        1 => first,
        _ => Tensor::cat(vec![first, x.narrow(2, 0, size - 1)], 2),
    }
}

/// Row i of dimension 2 at i - 1, zeros at the end.
fn earlier<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let size = x.dims()[2];
    let last = x.clone().narrow(2, 0, 1).zeros_like();
    match size {
        1 => last,
        _ => Tensor::cat(vec![x.narrow(2, 1, size - 1), last], 2),
    }
}

impl<B: Backend> Decays<B> {
    /// `g`: `[M, N, C, 1 or K]`. Exponents are sums of gates between two tokens and never differences
    /// of long sums, which would have lost the small gates behind a large one.
    fn new(g: Tensor<B, 4>) -> Self {
        let [chunks, rows, size, width] = g.dims();
        let between = g.clone().unsqueeze_dim::<5>(3).expand([chunks, rows, size, size, width]);
        let after = lower(lower(between, 1).cumsum(2).exp(), 0);
        let start_after = g.cumsum(2).exp();
        let last = |x: &Tensor<B, 4>| x.clone().narrow(2, size - 1, 1);
        Self {
            before: later(after.clone(), 0.0),
            to_end: after.clone().narrow(2, size - 1, 1).reshape([chunks, rows, size, width]),
            start_before: later(start_after.clone(), 1.0),
            total: last(&start_after).swap_dims(2, 3),
            start_after,
            after,
        }
    }

    fn pairs(&self, asks: Asks) -> Tensor<B, 5> {
        match asks {
            Asks::After => self.after.clone(),
            Asks::Before => self.before.clone(),
        }
    }

    fn since_start(&self, x: &Tensor<B, 4>, asks: Asks) -> Tensor<B, 4> {
        match asks {
            Asks::After => x.clone() * self.start_after.clone(),
            Asks::Before => x.clone() * self.start_before.clone(),
        }
    }

    fn to_end(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        x.clone() * self.to_end.clone()
    }

    /// Whether every d has a decay of its own.
    fn is_vector(&self) -> bool {
        self.after.dims()[4] > 1
    }

    /// Scores `[M, N, C, C]` of rows x against rows y.
    fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, asks: Asks) -> Tensor<B, 4> {
        if !self.is_vector() {
            return x.clone().matmul(y.clone().transpose()) * self.pairs(asks).squeeze_dim(4);
        }
        let products = x.clone().unsqueeze_dim::<5>(3) * y.clone().unsqueeze_dim::<5>(2);
        (products * self.pairs(asks)).sum_dim(4).squeeze_dim(4)
    }

    /// Gradients of x and y from that of their scores, `d`, and that of the exponents, `[.., C, C, 1
    /// or K]`.
    fn scores_backward(
        &self,
        x: &Tensor<B, 4>,
        y: &Tensor<B, 4>,
        d: Tensor<B, 4>,
        asks: Asks,
    ) -> ScoreGradients<B> {
        let decayed = d.unsqueeze_dim::<5>(4) * self.pairs(asks);
        if !self.is_vector() {
            let decayed = decayed.squeeze_dim::<4>(4);
            let products = x.clone().matmul(y.clone().transpose());
            return ScoreGradients {
                x: decayed.clone().matmul(y.clone()),
                y: decayed.clone().transpose().matmul(x.clone()),
                exponents: (decayed * products).unsqueeze_dim(4),
            };
        }
        let to_x = decayed.clone() * y.clone().unsqueeze_dim::<5>(2);
        let to_y = decayed * x.clone().unsqueeze_dim::<5>(3);
        let exponents = to_x.clone() * x.clone().unsqueeze_dim::<5>(3);
        ScoreGradients {
            x: to_x.sum_dim(3).squeeze_dim(3),
            y: to_y.sum_dim(2).squeeze_dim(2),
            exponents,
        }
    }

    /// The sum over d where there is one decay for all of them.
    fn own(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        if self.is_vector() { x } else { x.sum_dim(3) }
    }
}

struct ScoreGradients<B: Backend> {
    x: Tensor<B, 4>,
    y: Tensor<B, 4>,
    exponents: Tensor<B, 5>,
}

/// Gradients of the exponents of a chunk.
struct ExponentGradients<B: Backend> {
    /// Between tokens, of rows that ask after their decay and before it.
    after: Tensor<B, 5>,
    before: Option<Tensor<B, 5>>,
    /// From the start, likewise.
    start_after: Option<Tensor<B, 4>>,
    start_before: Option<Tensor<B, 4>>,
    /// To the end, and over the whole chunk, `[.., 1, 1 or K]`.
    to_end: Tensor<B, 4>,
    total: Tensor<B, 4>,
}

impl<B: Backend> ExponentGradients<B> {
    /// Gradient of the log decay: gate m is in the exponents at (i, j) with j < m <= i, in those to the
    /// end with j < m, and in those from the start with m <= i. Asking before the decay is asking after
    /// that of the token before.
    fn log_gates(self) -> Tensor<B, 4> {
        let [chunks, rows, size, _, width] = self.after.dims();
        let pairs = match self.before {
            Some(before) => self.after + earlier(before),
            None => self.after,
        };
        let crossing = lower(lower(pairs, 1).cumsum(3), 1).sum_dim(2);
        let behind = crossing.reshape([chunks, rows, size, width]) + self.to_end.cumsum(2);
        let starts = [self.start_after, self.start_before.map(earlier)];
        let ahead = starts.into_iter().flatten().reduce(|sum, part| sum + part);
        let ahead = ahead.map(|x| x.flip([2]).cumsum(2).flip([2]));
        let sum = later(behind, 0.0) + self.total;
        match ahead {
            Some(ahead) => sum + ahead,
            None => sum,
        }
    }
}

/// A low rank transition, or what a delta rule amounts to.
struct Asked<B: Backend> {
    a: Tensor<B, 4>,
    b: Tensor<B, 4>,
}

/// What a delta rule was made of, in chunks: kept to take its gradients apart again.
struct Delta<B: Backend> {
    beta: Tensor<B, 4>,
    /// The row that asks, before beta; the keys where there is none of its own.
    erase: Tensor<B, 4>,
    has_erase: bool,
    v: Tensor<B, 4>,
    /// `e^{g}` where it erases after the decay.
    kept: Option<Tensor<B, 4>>,
}

impl<B: Backend> Delta<B> {
    /// The erase row with beta and its decay, as `a` has it but for the sign.
    fn asking(&self) -> Tensor<B, 4> {
        let rows = self.erase.clone() * self.beta.clone();
        match &self.kept {
            Some(kept) => rows * kept.clone(),
            None => rows,
        }
    }
}

struct Chunks<B: Backend> {
    sizes: Sizes,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    /// Already scaled by beta.
    v: Tensor<B, 4>,
    asked: Option<Asked<B>>,
    delta: Option<Delta<B>>,
    decays: Decays<B>,
    /// How q reads.
    reads: Asks,
    start: Tensor<B, 4>,
}

impl<B: Backend> Chunks<B> {
    fn new(x: Operands<FloatTensor<B>>, chunk: usize) -> Self {
        let (q, k, v) = (tensor::<B, 4>(x.q), tensor::<B, 4>(x.k), tensor::<B, 4>(x.v));
        let sizes = Sizes::new(&q, &v, chunk.min(LONGEST_CHUNK));
        let (q, k, v) = (sizes.split(q), sizes.split(k), sizes.split(v));
        let g = x.g.map(|g| sizes.split(gates::<B>(g)));
        let split = |x: FloatTensor<B>| sizes.split(tensor::<B, 4>(x));
        let (a, b) = (x.a.map(split), x.b.map(split));
        let delta = x.beta.map(|beta| {
            let beta = sizes.split(tensor::<B, 3>(beta).unsqueeze_dim(3));
            let kept = match x.read {
                Read::After => g.clone().map(Tensor::exp),
                Read::Before => None,
            };
            let (has_erase, erase) = (a.is_some(), a.clone().unwrap_or_else(|| k.clone()));
            Delta { beta, erase, has_erase, v: v.clone(), kept }
        });
        let asked = match (&delta, a, b) {
            (Some(delta), _, _) => Some(Asked { a: delta.asking().neg(), b: k.clone() }),
            (None, Some(a), Some(b)) => Some(Asked { a, b }),
            _ => None,
        };
        let reads = match (x.read, &asked) {
            (Read::Before, None) => Asks::Before,
            _ => Asks::After,
        };
        let none = || v.clone().narrow(3, 0, 1).zeros_like();
        let state = [1, sizes.rows(), sizes.key_width, sizes.value_width];
        let start = x.state.map(|s| accumulator(tensor::<B, 4>(s)).reshape(state));
        Self {
            start: start.unwrap_or_else(|| Tensor::zeros(state, (&q.device(), q.dtype()))),
            decays: Decays::new(g.unwrap_or_else(none)),
            v: match &delta {
                Some(delta) => v * delta.beta.clone(),
                None => v,
            },
            sizes,
            q,
            k,
            asked,
            delta,
            reads,
        }
    }

    fn carry(&self, state: Tensor<B, 4>, c: usize) -> Tensor<B, 4> {
        state * self.decays.total.clone().narrow(0, c, 1)
    }

    fn solve(&self) -> Option<Solved<B>> {
        let Asked { a, b } = self.asked.as_ref()?;
        let n = self.decays.scores(a, b, Asks::Before).neg();
        let [chunks, rows, size, _] = n.dims();
        let inverse = unit_lower_inverse(n.reshape([chunks * rows, size, size]))
            .reshape([chunks, rows, size, size]);
        let asking = self.decays.since_start(a, Asks::Before);
        let values = self.decays.scores(a, &self.k, Asks::Before).matmul(self.v.clone());
        Some(Solved {
            asking: inverse.clone().matmul(asking),
            values: inverse.clone().matmul(values),
            inverse,
        })
    }

    /// States at the chunks' starts, Z, and the state after the last chunk.
    fn scan(
        &self,
        solved: Option<&Solved<B>>,
    ) -> (Tensor<B, 4>, Option<Tensor<B, 4>>, Tensor<B, 4>) {
        let writes = self.decays.to_end(&self.k).transpose().matmul(self.v.clone());
        let answers = self.asked.as_ref().map(|x| self.decays.to_end(&x.b).transpose());
        let (mut state, mut states, mut answered) = (self.start.clone(), vec![], vec![]);
        for c in 0..self.sizes.chunks() {
            let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
            states.push(state.clone());
            let mut next = self.carry(state.clone(), c) + at(&writes);
            if let (Some(solved), Some(answers)) = (solved, &answers) {
                let z = at(&solved.asking).matmul(state) + at(&solved.values);
                next = next + at(answers).matmul(z.clone());
                answered.push(z);
            }
            state = next;
        }
        let answered = solved.map(|_| Tensor::cat(answered, 0));
        (Tensor::cat(states, 0), answered, state)
    }
}

/// T a~, T (a|k)' v and T.
struct Solved<B: Backend> {
    asking: Tensor<B, 4>,
    values: Tensor<B, 4>,
    inverse: Tensor<B, 4>,
}

pub(super) fn forward<B: Backend>(
    x: Operands<FloatTensor<B>>,
    chunk: usize,
    keep: bool,
) -> Forward<FloatTensor<B>> {
    let dtype = x.v.dtype();
    let x = Chunks::<B>::new(x, chunk);
    let solved = x.solve();
    let (states, z, last) = x.scan(solved.as_ref());
    let decays = &x.decays;
    let mut o = decays.since_start(&x.q, x.reads).matmul(states.clone())
        + decays.scores(&x.q, &x.k, x.reads).matmul(x.v.clone());
    if let (Some(asked), Some(z)) = (&x.asked, &z) {
        o = o + decays.scores(&x.q, &asked.b, x.reads).matmul(z.clone());
    }
    let Sizes { batch, heads, key_width, value_width, .. } = x.sizes;
    let kept = [Some(states), z].into_iter().flatten().map(primitive).collect();
    Forward {
        o: primitive(x.sizes.join(o).cast(dtype)),
        state: primitive(last.reshape([batch, heads, key_width, value_width])),
        saved: Saved::from(if keep { kept } else { vec![] }),
    }
}

pub(super) fn backward<B: Backend>(
    operands: Operands<FloatTensor<B>>,
    saved: Saved<FloatTensor<B>>,
    d_o: Option<FloatTensor<B>>,
    d_state: Option<FloatTensor<B>>,
    chunk: usize,
) -> Operands<FloatTensor<B>> {
    let x = Chunks::<B>::new(operands.clone(), chunk);
    let decays = &x.decays;
    let mut saved = saved.tensors.into_iter().map(tensor::<B, 4>);
    let states = saved.next().expect("a forward pass that keeps saves its states");
    let z = saved.next();
    let d_o = match d_o {
        Some(d_o) => x.sizes.split(tensor::<B, 4>(d_o)),
        None => x.v.zeros_like(),
    };
    let d_last = match d_state {
        Some(d) => accumulator(tensor::<B, 4>(d)).reshape(x.start.shape()),
        None => x.start.zeros_like(),
    };
    let solved = x.solve();
    let (d_states, d_z, d_start) = reverse(&x, &d_o, d_last, solved.as_ref());

    let transposed = states.clone().transpose();
    let read_of_state = decays.since_start(&d_o.clone().matmul(transposed.clone()), x.reads);
    let kept_by = |y: &Tensor<B, 4>| decays.to_end(&y.clone().matmul(d_states.clone().transpose()));
    let d_scores = d_o.clone().matmul(x.v.clone().transpose());
    let reads = decays.scores_backward(&x.q, &x.k, d_scores, x.reads);
    let kept = kept_by(&x.v);
    let mut d = Gradients {
        q: reads.x + read_of_state.clone(),
        k: reads.y + kept.clone(),
        v: decays.scores(&x.q, &x.k, x.reads).transpose().matmul(d_o.clone())
            + decays.to_end(&x.k).matmul(d_states.clone()),
        asked: None,
    };
    let total = (states * d_states.clone()).sum_dim(3) * decays.total.clone();
    let total = total.swap_dims(2, 3); // [.., 1, K]
    let read_start = decays.own(x.q.clone() * read_of_state);
    let (start_after, start_before) = match x.reads {
        Asks::After => (Some(read_start), None),
        Asks::Before => (None, Some(read_start)),
    };
    let (after, before) = match x.reads {
        Asks::After => (reads.exponents, None),
        Asks::Before => (reads.exponents.zeros_like(), Some(reads.exponents)),
    };
    let to_end = decays.own(x.k.clone() * kept);
    let total = decays.own(total);
    let mut exponents =
        ExponentGradients { after, before, start_after, start_before, to_end, total };

    if let (Some(asked), Some(solved), Some(z), Some(d_z)) = (&x.asked, &solved, z, d_z) {
        let Asked { a, b } = asked;
        let r = solved.inverse.clone().transpose().matmul(d_z);
        d.v = d.v + decays.scores(a, &x.k, Asks::Before).transpose().matmul(r.clone());
        let z_t = z.clone().transpose();
        let by_q = decays.scores_backward(&x.q, b, d_o.matmul(z_t.clone()), Asks::After);
        let by_b = decays.scores_backward(a, b, r.clone().matmul(z_t), Asks::Before);
        let d_pairs = r.clone().matmul(x.v.clone().transpose());
        let by_k = decays.scores_backward(a, &x.k, d_pairs, Asks::Before);
        let asked_of_state = decays.since_start(&r.matmul(transposed), Asks::Before);
        let answers_kept = kept_by(&z);
        d.q = d.q + by_q.x;
        d.k = d.k + by_k.y;
        d.asked = Some(Asked {
            a: by_b.x + by_k.x + asked_of_state.clone(),
            b: by_q.y + by_b.y + answers_kept.clone(),
        });
        exponents.after = exponents.after + by_q.exponents;
        exponents.before = Some(by_b.exponents + by_k.exponents);
        exponents.start_before = Some(decays.own(a.clone() * asked_of_state));
        exponents.to_end = exponents.to_end + decays.own(b.clone() * answers_kept);
    }
    let d_g = operands.g.is_some().then(|| exponents.log_gates());
    hand_back(&x, operands, d, d_g, d_start)
}

/// Gradients of rows, in chunks.
struct Gradients<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    asked: Option<Asked<B>>,
}

/// From chunks to the operands' own shapes and types; a delta rule's parts taken apart.
fn hand_back<B: Backend>(
    x: &Chunks<B>,
    operands: Operands<FloatTensor<B>>,
    mut d: Gradients<B>,
    mut d_g: Option<Tensor<B, 4>>,
    d_start: Tensor<B, 4>,
) -> Operands<FloatTensor<B>> {
    let (mut d_a, mut d_b) = (None, None);
    let mut d_beta = None;
    match (&x.delta, d.asked) {
        (Some(delta), Some(Asked { a, b })) => {
            d.k = d.k + b;
            // a = -beta e [e^g]
            let d_asking = match &delta.kept {
                Some(kept) => a.clone().neg() * kept.clone(),
                None => a.clone().neg(),
            };
            if delta.kept.is_some() {
                d_g = d_g.map(|g| g + x.decays.own(a * delta.asking().neg()));
            }
            let d_erase = d_asking.clone() * delta.beta.clone();
            d_beta = Some(
                (d_asking * delta.erase.clone()).sum_dim(3)
                    + (d.v.clone() * delta.v.clone()).sum_dim(3),
            );
            d.v = d.v * delta.beta.clone();
            match delta.has_erase {
                true => d_a = Some(d_erase),
                false => d.k = d.k + d_erase,
            }
        }
        (None, Some(Asked { a, b })) => (d_a, d_b) = (Some(a), Some(b)),
        _ => {}
    }
    let rows = |d: Tensor<B, 4>, like: &FloatTensor<B>| primitive(d.cast(like.dtype()));
    let join = |d: Tensor<B, 4>, like: &FloatTensor<B>| rows(x.sizes.join(d), like);
    let gates = |d: Tensor<B, 4>, like: &FloatTensor<B>| match like.rank() {
        3 => primitive(x.sizes.join(d).squeeze_dim::<3>(3).cast(like.dtype())),
        _ => join(d, like),
    };
    Operands {
        q: rows(x.sizes.join_key_heads(d.q), &operands.q),
        k: rows(x.sizes.join_key_heads(d.k), &operands.k),
        v: join(d.v, &operands.v),
        a: d_a.zip(operands.a.as_ref()).map(|(d, like)| join(d, like)),
        b: d_b.zip(operands.b.as_ref()).map(|(d, like)| join(d, like)),
        g: d_g.zip(operands.g.as_ref()).map(|(d, like)| gates(d, like)),
        beta: d_beta.zip(operands.beta.as_ref()).map(|(d, like)| gates(d, like)),
        state: operands.state.as_ref().map(|like| rows(d_start.reshape(like.shape()), like)),
        read: operands.read,
    }
}

/// The recurrence of the backward pass, last chunk first: gradients of the states at the chunks' ends,
/// of Z, and of the state before the first token.
fn reverse<B: Backend>(
    x: &Chunks<B>,
    d_o: &Tensor<B, 4>,
    mut d_state: Tensor<B, 4>,
    solved: Option<&Solved<B>>,
) -> (Tensor<B, 4>, Option<Tensor<B, 4>>, Tensor<B, 4>) {
    let decays = &x.decays;
    let by_outputs = decays.since_start(&x.q, x.reads).transpose().matmul(d_o.clone());
    let answers = x.asked.as_ref().map(|asked| {
        let scores = decays.scores(&x.q, &asked.b, Asks::After);
        (scores.transpose().matmul(d_o.clone()), decays.to_end(&asked.b))
    });
    let (mut d_states, mut d_answers) = (vec![], vec![]);
    for c in (0..x.sizes.chunks()).rev() {
        let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
        d_states.push(d_state.clone());
        let mut before = x.carry(d_state.clone(), c) + at(&by_outputs);
        if let (Some(solved), Some((by_reads, kept))) = (solved, &answers) {
            let d_z = at(by_reads) + at(kept).matmul(d_state);
            before = before + at(&solved.asking).transpose().matmul(d_z.clone());
            d_answers.push(d_z);
        }
        d_state = before;
    }
    let forwards = |mut list: Vec<_>| {
        list.reverse();
        Tensor::cat(list, 0)
    };
    let d_answers = solved.map(|_| forwards(d_answers));
    (forwards(d_states), d_answers, d_state)
}
