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

use super::backend::{Forward, Saved};
use super::chunkwise::Sizes;
use super::decay::{self, Asks, Decay};
use super::recurrence::{LogDecay, Read, Recurrence, Transition};
use super::tensors::{accumulator, primitive, tensor};
use super::triangular::unit_lower_inverse;
use super::vector_decay::{ExponentGradients, ScoreGradients, VectorDecay};
use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};

/// A token costs K V / C numbers for states, and (C + K) log2 C for scores with vector decay: short
/// chunks cost least, but not the shortest.
const LONGEST_CHUNK: usize = 16;

/// The log decay, `[B, T, H]` or `[B, T, H, K]`, as `[B, T, H, 1 or K]`.
pub(super) fn gates<B: Backend>(g: LogDecay<FloatTensor<B>>) -> Tensor<B, 4> {
    match g {
        LogDecay::Scalar(g) => tensor::<B, 3>(g).unsqueeze_dim(3),
        LogDecay::Vector(g) => tensor::<B, 4>(g),
    }
}

/// Decay between the tokens of every chunk: factors, scores, and the way back.
enum Decays<B: Backend> {
    /// One for every d.
    Scalar(Decay<B>),
    /// Every d has its own.
    Vector(VectorDecay<B>),
}

impl<B: Backend> Decays<B> {
    /// `g`: `[M, N, C, 1 or K]`.
    fn new(g: Tensor<B, 4>) -> Self {
        match g.dims()[3] {
            1 => Self::Scalar(Decay::new(g)),
            _ => Self::Vector(VectorDecay::new(g)),
        }
    }

    /// `x_i e^{G_i}`, or with `G_{i-1}`.
    fn since_start(&self, x: &Tensor<B, 4>, asks: Asks) -> Tensor<B, 4> {
        let factors = match self {
            Self::Scalar(decay) => decay.from_start.clone(),
            Self::Vector(decay) => decay.since_start(),
        };
        x.clone() * asks.rows(factors, 1.0)
    }

    /// `x_j e^{G_C - G_j}`.
    fn to_end(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        let factors = match self {
            Self::Scalar(decay) => decay.to_end.clone(),
            Self::Vector(decay) => decay.to_end(),
        };
        x.clone() * factors
    }

    /// `[M, N, 1 or K, 1]`: `e^{G_C}`.
    fn total(&self) -> Tensor<B, 4> {
        match self {
            Self::Scalar(decay) => decay.total.clone(),
            Self::Vector(decay) => decay.total(),
        }
    }

    /// Scores `[M, N, C, C]` of rows x against rows y.
    fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, asks: Asks) -> Tensor<B, 4> {
        match self {
            Self::Scalar(decay) => {
                let products = x.clone().matmul(y.clone().transpose());
                products * asks.rows(decay.within.clone(), 0.0)
            }
            Self::Vector(decay) => decay.scores(x, y, asks),
        }
    }

    /// Gradients of x, y and the exponents from that of the scores.
    fn scores_backward(
        &self,
        x: &Tensor<B, 4>,
        y: &Tensor<B, 4>,
        d: Tensor<B, 4>,
        asks: Asks,
    ) -> ScoreGradients<B> {
        let decay = match self {
            Self::Scalar(decay) => decay,
            Self::Vector(decay) => return decay.scores_backward(x, y, &d, asks),
        };
        let products = x.clone().matmul(y.clone().transpose());
        let d = d * asks.rows(decay.within.clone(), 0.0);
        ScoreGradients {
            x: d.clone().matmul(y.clone()),
            y: d.clone().transpose().matmul(x.clone()),
            within: vec![asks.factors(d * products)],
        }
    }

    /// The sum over d where there is one decay for all of them.
    fn own(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        match self {
            Self::Scalar(_) => x.sum_dim(3),
            Self::Vector(_) => x,
        }
    }

    /// Gradient of the log decay, `[M, N, C, 1 or K]`.
    fn log_gates(&self, d: ExponentGradients<B>) -> Tensor<B, 4> {
        if let Self::Vector(decay) = self {
            return decay.log_gates(d);
        }
        let ExponentGradients { within, from_start, to_end, total } = d;
        let within = within.into_iter().next().expect("a scalar decay has one");
        decay::ExponentGradients { within, from_start, to_end, total }.log_gates()
    }
}

/// A low rank transition, or what a delta rule amounts to.
struct Asked<B: Backend> {
    a: Tensor<B, 4>,
    b: Tensor<B, 4>,
}

/// Inputs of a delta rule, in chunks: kept to take its gradients apart again.
struct Delta<B: Backend> {
    beta: Tensor<B, 4>,
    /// The row that asks, before beta; the keys where there is none of its own.
    erase: Tensor<B, 4>,
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
    fn new(x: Recurrence<FloatTensor<B>>, chunk: usize) -> Self {
        let (q, k, v) = (tensor::<B, 4>(x.q), tensor::<B, 4>(x.k), tensor::<B, 4>(x.v));
        let sizes = Sizes::new(&q, &v, chunk.min(LONGEST_CHUNK));
        let (q, k, v) = (sizes.split(q), sizes.split(k), sizes.split(v));
        let g = x.decay.map(|g| sizes.split(gates::<B>(g)));
        let split = |x: FloatTensor<B>| sizes.split(tensor::<B, 4>(x));
        let (asked, delta, reads) = match x.transition {
            Transition::Identity { read: Read::After } => (None, None, Asks::After),
            Transition::Identity { read: Read::Before } => (None, None, Asks::Before),
            Transition::Delta { beta, erase, read } => {
                let kept = match read {
                    Read::After => g.clone().map(Tensor::exp),
                    Read::Before => None,
                };
                let erase = erase.map_or(k.clone(), split);
                let beta = sizes.split(tensor::<B, 3>(beta).unsqueeze_dim(3));
                let delta = Delta { beta, erase, v: v.clone(), kept };
                (Some(Asked { a: delta.asking().neg(), b: k.clone() }), Some(delta), Asks::After)
            }
            Transition::LowRank { a, b } => {
                (Some(Asked { a: split(a), b: split(b) }), None, Asks::After)
            }
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
        state * self.decays.total().narrow(0, c, 1)
    }

    fn scores(&self) -> Scores<B> {
        let decays = &self.decays;
        let answers = self.asked.as_ref().map(|Asked { a, b }| {
            let n = decays.scores(a, b, Asks::Before).neg();
            let [chunks, rows, size, _] = n.dims();
            let inverse = unit_lower_inverse(n.reshape([chunks * rows, size, size]));
            AnswerScores {
                asked: decays.scores(a, &self.k, Asks::Before),
                read: decays.scores(&self.q, b, Asks::After),
                inverse: inverse.reshape([chunks, rows, size, size]),
            }
        });
        Scores { read: decays.scores(&self.q, &self.k, self.reads), answers }
    }

    /// T a~ and b^: how Z reads the state, and how it is written.
    fn answers(&self, scores: &Scores<B>) -> Option<Answers<B>> {
        let (Asked { a, b }, scores) = self.asked.as_ref().zip(scores.answers.as_ref())?;
        let asking = self.decays.since_start(a, Asks::Before);
        Some(Answers { asking: scores.inverse.clone().matmul(asking), kept: self.decays.to_end(b) })
    }

    /// States at the chunks' starts, Z, and the state after the last chunk.
    fn scan(&self, scores: &Scores<B>) -> (Tensor<B, 4>, Option<Tensor<B, 4>>, Tensor<B, 4>) {
        let writes = self.decays.to_end(&self.k).transpose().matmul(self.v.clone());
        let values = scores.answers.as_ref().map(|scores| {
            scores.inverse.clone().matmul(scores.asked.clone().matmul(self.v.clone()))
        });
        let answers = self.answers(scores).zip(values);
        let (mut state, mut states, mut answered) = (self.start.clone(), vec![], vec![]);
        for c in 0..self.sizes.chunks() {
            let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
            states.push(state.clone());
            let mut next = self.carry(state.clone(), c) + at(&writes);
            if let Some((Answers { asking, kept }, values)) = &answers {
                let z = at(asking).matmul(state) + at(values);
                next = next + at(kept).transpose().matmul(z.clone());
                answered.push(z);
            }
            state = next;
        }
        let answered = answers.map(|_| Tensor::cat(answered, 0));
        (Tensor::cat(states, 0), answered, state)
    }
}

/// Scores of every chunk, `[M, N, C, C]`. C numbers a token each: the backward pass is given them.
struct Scores<B: Backend> {
    /// `(q|k)`, primed where q reads before the decay.
    read: Tensor<B, 4>,
    answers: Option<AnswerScores<B>>,
}

struct AnswerScores<B: Backend> {
    /// `(a|k)'`.
    asked: Tensor<B, 4>,
    /// `(q|b)`.
    read: Tensor<B, 4>,
    /// T.
    inverse: Tensor<B, 4>,
}

/// T a~ and b^.
struct Answers<B: Backend> {
    asking: Tensor<B, 4>,
    kept: Tensor<B, 4>,
}

/// Saved tensors.
struct Kept<B: Backend> {
    /// At the chunks' starts.
    states: Tensor<B, 4>,
    scores: Scores<B>,
    z: Option<Tensor<B, 4>>,
}

impl<B: Backend> Kept<B> {
    fn save(self) -> Saved<FloatTensor<B>> {
        let Scores { read, answers } = self.scores;
        let mut tensors = vec![self.states, read];
        if let Some(AnswerScores { asked, read, inverse }) = answers {
            tensors.extend([asked, read, inverse]);
        }
        tensors.extend(self.z);
        Saved::from(tensors.into_iter().map(primitive).collect::<Vec<_>>())
    }

    fn restore(saved: Saved<FloatTensor<B>>) -> Self {
        let mut tensors = saved.tensors.into_iter().map(tensor::<B, 4>);
        let mut next = || tensors.next();
        let missing = "a forward pass that keeps saves its states and scores";
        let (states, read) = (next().expect(missing), next().expect(missing));
        let answers = match (next(), next(), next()) {
            (Some(asked), Some(read), Some(inverse)) => Some(AnswerScores { asked, read, inverse }),
            _ => None,
        };
        Self { states, scores: Scores { read, answers }, z: next() }
    }
}

pub(super) fn forward<B: Backend>(
    x: Recurrence<FloatTensor<B>>,
    chunk: usize,
    keep: bool,
) -> Forward<FloatTensor<B>> {
    let dtype = x.v.dtype();
    let x = Chunks::<B>::new(x, chunk);
    let scores = x.scores();
    let (states, z, last) = x.scan(&scores);
    let mut o = x.decays.since_start(&x.q, x.reads).matmul(states.clone())
        + scores.read.clone().matmul(x.v.clone());
    if let (Some(answers), Some(z)) = (&scores.answers, &z) {
        o = o + answers.read.clone().matmul(z.clone());
    }
    let Sizes { batch, heads, key_width, value_width, .. } = x.sizes;
    Forward {
        o: primitive(x.sizes.join(o).cast(dtype)),
        state: primitive(last.reshape([batch, heads, key_width, value_width])),
        saved: match keep {
            true => Kept { states, scores, z }.save(),
            false => Saved::default(),
        },
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
    let decays = &x.decays;
    let Kept { states, scores, z } = Kept::<B>::restore(saved);
    let d_o = match d_o {
        Some(d_o) => x.sizes.split(tensor::<B, 4>(d_o)),
        None => x.v.zeros_like(),
    };
    let d_last = match d_state {
        Some(d) => accumulator(tensor::<B, 4>(d)).reshape(x.start.shape()),
        None => x.start.zeros_like(),
    };
    let (d_states, d_z, d_start) = reverse(&x, &d_o, d_last, &scores);

    let transposed = states.clone().transpose();
    let read_of_state = decays.since_start(&d_o.clone().matmul(transposed.clone()), x.reads);
    let kept_by = |y: &Tensor<B, 4>| decays.to_end(&y.clone().matmul(d_states.clone().transpose()));
    let d_scores = d_o.clone().matmul(x.v.clone().transpose());
    let reads = decays.scores_backward(&x.q, &x.k, d_scores, x.reads);
    let kept = kept_by(&x.v);
    let mut d = Gradients {
        q: reads.x + read_of_state.clone(),
        k: reads.y + kept.clone(),
        v: scores.read.transpose().matmul(d_o.clone())
            + decays.to_end(&x.k).matmul(d_states.clone()),
        asked: None,
    };
    let total = (states * d_states.clone()).sum_dim(3) * decays.total();
    let mut exponents = ExponentGradients {
        within: reads.within,
        from_start: x.reads.factors(decays.own(x.q.clone() * read_of_state)),
        to_end: decays.own(x.k.clone() * kept),
        total: decays.own(total.swap_dims(2, 3)), // of [.., 1, K]
    };

    if let (Some(Asked { a, b }), Some(answers), Some(z), Some(d_z)) =
        (&x.asked, scores.answers, z, d_z)
    {
        let r = answers.inverse.transpose().matmul(d_z);
        d.v = d.v + answers.asked.transpose().matmul(r.clone());
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
        for within in [by_q.within, by_b.within, by_k.within] {
            exponents.add_within(within);
        }
        let asked_of_start = decays.own(a.clone() * asked_of_state);
        exponents.from_start = exponents.from_start + Asks::Before.factors(asked_of_start);
        exponents.to_end = exponents.to_end + decays.own(b.clone() * answers_kept);
    }
    let d_g = given.decay.is_some().then(|| decays.log_gates(exponents));
    hand_back(&x, given, d, d_g, d_start)
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
    given: Recurrence<FloatTensor<B>>,
    mut d: Gradients<B>,
    mut d_g: Option<Tensor<B, 4>>,
    d_start: Tensor<B, 4>,
) -> Recurrence<FloatTensor<B>> {
    let rows = |d: Tensor<B, 4>, like: &FloatTensor<B>| primitive(d.cast(like.dtype()));
    let join = |d: Tensor<B, 4>, like: &FloatTensor<B>| rows(x.sizes.join(d), like);
    let gates = |d: Tensor<B, 4>, like: &FloatTensor<B>| match like.rank() {
        3 => primitive(x.sizes.join(d).squeeze_dim::<3>(3).cast(like.dtype())),
        _ => join(d, like),
    };
    let transition = match (given.transition, &x.delta, d.asked) {
        (Transition::Delta { beta, erase, read }, Some(delta), Some(Asked { a, b })) => {
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
            let d_beta = (d_asking * delta.erase.clone()).sum_dim(3)
                + (d.v.clone() * delta.v.clone()).sum_dim(3);
            d.v = d.v * delta.beta.clone();
            if erase.is_none() {
                d.k = d.k + d_erase.clone();
            }
            let erase = erase.map(|like| join(d_erase, &like));
            Transition::Delta { beta: gates(d_beta, &beta), erase, read }
        }
        (Transition::LowRank { a, b }, None, Some(d)) => {
            Transition::LowRank { a: join(d.a, &a), b: join(d.b, &b) }
        }
        (transition, ..) => transition,
    };
    Recurrence {
        q: rows(x.sizes.join_key_heads(d.q), &given.q),
        k: rows(x.sizes.join_key_heads(d.k), &given.k),
        v: join(d.v, &given.v),
        decay: given.decay.zip(d_g).map(|(g, d)| g.map(|like| gates(d, &like))),
        transition,
        state: given.state.as_ref().map(|like| rows(d_start.reshape(like.shape()), like)),
    }
}

/// The recurrence of the backward pass, last chunk first: gradients of the states at the chunks' ends,
/// of Z, and of the state before the first token.
fn reverse<B: Backend>(
    x: &Chunks<B>,
    d_o: &Tensor<B, 4>,
    mut d_state: Tensor<B, 4>,
    scores: &Scores<B>,
) -> (Tensor<B, 4>, Option<Tensor<B, 4>>, Tensor<B, 4>) {
    let by_outputs = x.decays.since_start(&x.q, x.reads).transpose().matmul(d_o.clone());
    let by_reads = |answers: &AnswerScores<B>| answers.read.clone().transpose().matmul(d_o.clone());
    let answers = x.answers(scores).zip(scores.answers.as_ref().map(by_reads));
    let (mut d_states, mut d_answers) = (vec![], vec![]);
    for c in (0..x.sizes.chunks()).rev() {
        let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
        d_states.push(d_state.clone());
        let mut before = x.carry(d_state.clone(), c) + at(&by_outputs);
        if let Some((Answers { asking, kept }, by_reads)) = &answers {
            let d_z = at(by_reads) + at(kept).matmul(d_state);
            before = before + at(asking).transpose().matmul(d_z.clone());
            d_answers.push(d_z);
        }
        d_state = before;
    }
    let forwards = |mut list: Vec<_>| {
        list.reverse();
        Tensor::cat(list, 0)
    };
    let d_answers = answers.map(|_| forwards(d_answers));
    (forwards(d_states), d_answers, d_state)
}
