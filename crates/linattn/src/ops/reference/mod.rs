//! Every recurrence there is in tensor operations, for every Burn backend: the reference of kernels and loops,
//! and what runs where those refuse. [`step`] has the recurrence itself.
//!
//! Per head and chunk of C tokens, S the state at its start, G the cumulative sum of the log decay g,
//! `(x|y)_ij = sum_d x_id y_jd e^{G_id - G_jd}` for j <= i, and `(x|y)'_ij` the same with `G_{i-1}` in
//! the place of `G_i`, for j < i (a row that reads before its own decay):
//! ```text
//! X~_i = x_i e^{G_i}, or e^{G_{i-1}} for a       X^_j = x_j e^{G_C - G_j}
//!
//! identity    O  = q~ S + (q|k) v                  primed where q reads before the decay
//!             S' = e^{G_C} S + k^^T v
//! delta       U  = T (v + a~ S),                   T = (I - (a|k)')^-1
//!             O  = q~ S + (q|k) U
//!             S' = e^{G_C} S + k^^T U
//! low rank    U  = T ((a|k)' v + a~ S),            T = (I - (a|b)')^-1
//!             O  = q~ S + (q|k) v + (q|b) U
//!             S' = e^{G_C} S + k^^T v + b^^T U
//! ```
//! A delta rule, `u_t = beta_t (v_t - e_t S)`, has v scaled by beta and `a = -beta e`, times `e^{g_t}` where it
//! erases after the decay. Only U and S' need the chunk before; everything else is computed for all chunks at once.
//! Backwards, with y the rows that write U (k or b), `R = T^T dU` and S' the state at the chunk's end:
//! ```text
//! dU = (q|y)^T dO + y^ dS'
//! dS = e^{G_C} dS' + q~^T dO + (T a~)^T dU
//! dv = (q|k)^T dO + k^ dS' + (a|k)'^T R            delta: dv = R
//! ```
//! and the rows from dO v^T, dO U^T, R v^T and R U^T, each through its decay.

mod decay;
mod exponents;
mod in_row;
mod layout;
mod mask;
mod scalar_decay;
mod step;
#[cfg(all(test, feature = "cpu"))]
mod tests;
mod triangular;
mod vector_decay;

pub(in crate::ops) use step::step;
pub(crate) use triangular::solve_unit_lower;

use crate::ops::recurrence::{Forward, LogDecay, Read, Recurrence, Saved, Transition};
use crate::ops::tensors::{Along, accumulator, cat, primitive, tensor};
use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};
use decay::{DecayFactors, Exponents};
use layout::Layout;
use triangular::unit_lower_inverse;

/// Fewest and most tokens of a chunk: products of a size that processors are fast at.
const CHUNKS: [usize; 2] = [16, 64];

/// Tokens of a chunk, or less for sequences so short that it would only compute padding. A token costs C numbers for
/// scores and K V / C for states; with vector decay (C + K) log2 C for scores, so that the shortest chunks cost least.
fn chunk_of<T: TensorMetadata>(x: &Recurrence<T>) -> usize {
    let (dims, [fewest, most]) = (x.dims(), CHUNKS);
    let even = (dims.key_width * dims.value_width).isqrt().next_power_of_two();
    let chunk = match x.decay {
        Some(LogDecay::Vector(_)) => fewest,
        Some(LogDecay::Scalar(_)) | None => even.clamp(fewest, most),
    };
    chunk.min(dims.tokens.next_power_of_two())
}

/// [`LinearAttentionBackend::chunkwise`](crate::ops::LinearAttentionBackend::chunkwise) in tensor operations.
pub(in crate::ops) fn forward<B: Backend>(
    x: Recurrence<FloatTensor<B>>,
    keep: bool,
) -> Forward<FloatTensor<B>> {
    let alone = |x: Recurrence<FloatTensor<B>>, keep| {
        let chunk = chunk_of(&x);
        forward_by::<B>(x, chunk, keep)
    };
    match x.lengths.clone() {
        // The backward pass makes anew what it needs of each sequence.
        Some(lengths) => in_row::forward::<B>(&x, &lengths, |x| alone(x, false)),
        None => alone(x, keep),
    }
}

/// [`LinearAttentionBackend::chunkwise_backward`](crate::ops::LinearAttentionBackend::chunkwise_backward) in tensor
/// operations.
pub(in crate::ops) fn backward<B: Backend>(
    x: Recurrence<FloatTensor<B>>,
    saved: Saved<FloatTensor<B>>,
    d_o: Option<FloatTensor<B>>,
    d_state: Option<FloatTensor<B>>,
) -> Recurrence<FloatTensor<B>> {
    match x.lengths.clone() {
        Some(lengths) => in_row::backward::<B>(&x, &lengths, [d_o, d_state], |x, gradients| {
            let chunk = chunk_of(&x);
            let saved = forward_by::<B>(x.clone(), chunk, true).saved;
            backward_by::<B>(x, saved, gradients, chunk)
        }),
        None => {
            let chunk = chunk_of(&x);
            backward_by::<B>(x, saved, [d_o, d_state], chunk)
        }
    }
}

/// The transition of a token, in chunks.
enum Rule<B: Backend> {
    Identity { read: Read },
    Delta(Delta<B>),
    LowRank { a: Tensor<B, 4>, b: Tensor<B, 4> },
}

/// A delta rule: kept to take its gradients apart again.
struct Delta<B: Backend> {
    a: Tensor<B, 4>,
    beta: Tensor<B, 4>,
    /// The erase key, before beta.
    erase: Tensor<B, 4>,
    /// Before beta.
    v: Tensor<B, 4>,
    /// `e^{g}` where it erases after the decay.
    decay: Option<Tensor<B, 4>>,
}

/// Tensors of a recurrence, in chunks.
struct Chunks<B: Backend> {
    layout: Layout,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    /// Scaled by beta in a delta rule.
    v: Tensor<B, 4>,
    rule: Rule<B>,
    decay: DecayFactors<B>,
    /// State before the first token, `[1, B H, K, V]`.
    start: Tensor<B, 4>,
}

impl<B: Backend> Chunks<B> {
    fn new(x: Recurrence<FloatTensor<B>>, chunk: usize) -> Self {
        let layout = Layout::new(x.dims(), chunk);
        let rows = |x: FloatTensor<B>| layout.split(tensor::<B, 4>(x));
        let scalars = |x: FloatTensor<B>| layout.split(tensor::<B, 3>(x).unsqueeze_dim(3));
        let (q, k, v) = (rows(x.q), rows(x.k), rows(x.v));
        let g = x.decay.map(|g| match g {
            LogDecay::Scalar(g) => LogDecay::Scalar(scalars(g)),
            LogDecay::Vector(g) => LogDecay::Vector(rows(g)),
        });
        let rule = match x.transition {
            Transition::Identity { read } => Rule::Identity { read },
            Transition::LowRank { a, b } => Rule::LowRank { a: rows(a), b: rows(b) },
            Transition::Delta { beta, erase, read } => {
                let (beta, erase) = (scalars(beta), erase.map_or(k.clone(), rows));
                let decay = match read {
                    Read::After => g.clone().map(|g| g.into_inner().exp()),
                    Read::Before => None,
                };
                let by_beta = (erase.clone() * beta.clone()).neg();
                let a = match &decay {
                    Some(decay) => by_beta * decay.clone(),
                    None => by_beta,
                };
                Rule::Delta(Delta { a, beta, erase, v: v.clone(), decay })
            }
        };
        let state = layout.state_shape();
        let start = x.state.map(|s| accumulator(tensor::<B, 4>(s)).reshape(state));
        Self {
            start: start.unwrap_or_else(|| Tensor::zeros(state, (&q.device(), q.dtype()))),
            decay: DecayFactors::new(g, &q),
            v: match &rule {
                Rule::Delta(delta) => v * delta.beta.clone(),
                Rule::Identity { .. } | Rule::LowRank { .. } => v,
            },
            layout,
            q,
            k,
            rule,
        }
    }

    /// The read position of q.
    fn read(&self) -> Read {
        match self.rule {
            Rule::Identity { read } => read,
            Rule::Delta(_) | Rule::LowRank { .. } => Read::After,
        }
    }

    /// a, and the rows y that write U.
    fn solved(&self) -> Option<(&Tensor<B, 4>, &Tensor<B, 4>)> {
        match &self.rule {
            Rule::Identity { .. } => None,
            Rule::Delta(delta) => Some((&delta.a, &self.k)),
            Rule::LowRank { a, b } => Some((a, b)),
        }
    }

    /// Whether k writes v as it is.
    fn writes_values(&self) -> bool {
        !matches!(self.rule, Rule::Delta(_))
    }

    fn scores(&self) -> Scores<B> {
        let solve = self.solved().map(|(a, y)| {
            let n = self.decay.scores(a, y, Read::Before).neg();
            let [chunks, rows, size, _] = n.dims();
            let inverse = unit_lower_inverse(n.reshape([chunks * rows, size, size]));
            Solve {
                inverse: inverse.reshape([chunks, rows, size, size]),
                of_values: self.writes_values().then(|| OfValues {
                    a_ak: self.decay.scores(a, &self.k, Read::Before),
                    a_qb: self.decay.scores(&self.q, y, Read::After),
                }),
            }
        });
        Scores { a_qk: self.decay.scores(&self.q, &self.k, self.read()), solve }
    }

    /// T a~, by which U reads the state (-W of the WY representation), and y^, by which U is written.
    fn wy_rows(&self, solve: &Solve<B>) -> Option<[Tensor<B, 4>; 2]> {
        let (a, y) = self.solved()?;
        let minus_w = solve.inverse.clone().matmul(self.decay.since_start(a, Read::Before));
        Some([minus_w, self.decay.to_end(y)])
    }

    /// States at the chunks' starts, U, and the state after the last chunk.
    fn scan(&self, scores: &Scores<B>) -> Scan<B> {
        // Writes without a state are one product for all chunks.
        let writes = self
            .writes_values()
            .then(|| self.decay.to_end(&self.k).transpose().matmul(self.v.clone()));
        let solve = scores.solve.as_ref().and_then(|solve| {
            let right = match &solve.of_values {
                Some(scores) => scores.a_ak.clone().matmul(self.v.clone()),
                None => self.v.clone(),
            };
            let [minus_w, written] = self.wy_rows(solve)?;
            Some((solve.inverse.clone().matmul(right), minus_w, written.transpose()))
        });
        let (mut state, mut states, mut solved) = (self.start.clone(), vec![], vec![]);
        for c in 0..self.layout.chunks() {
            let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
            states.push(state.clone());
            let mut next = self.decay.carry(state.clone(), c);
            if let Some(writes) = &writes {
                next = next + at(writes);
            }
            if let Some((values, minus_w, written)) = &solve {
                let u = at(values) + at(minus_w).matmul(state);
                next = next + at(written).matmul(u.clone());
                solved.push(u);
            }
            state = next;
        }
        let u = solve.map(|_| cat(solved, 0));
        Scan { states: cat(states, 0), u, last: state }
    }
}

/// Scores of every chunk, `[M, N, C, C]`. C numbers a token each: the backward pass is given them.
struct Scores<B: Backend> {
    /// `(q|k)`, primed where q reads before the decay.
    a_qk: Tensor<B, 4>,
    solve: Option<Solve<B>>,
}

impl<B: Backend> Scores<B> {
    /// `(q|y)`, the matrix in front of U.
    fn a_of_u(&self) -> &Tensor<B, 4> {
        let of_values = self.solve.as_ref().and_then(|solve| solve.of_values.as_ref());
        of_values.map_or(&self.a_qk, |of_values| &of_values.a_qb)
    }
}

/// Matrices that U is solved with.
struct Solve<B: Backend> {
    /// T.
    inverse: Tensor<B, 4>,
    /// Where values are written beside U.
    of_values: Option<OfValues<B>>,
}

struct OfValues<B: Backend> {
    /// `(a|k)'`.
    a_ak: Tensor<B, 4>,
    /// `(q|b)`.
    a_qb: Tensor<B, 4>,
}

struct Scan<B: Backend> {
    states: Tensor<B, 4>,
    u: Option<Tensor<B, 4>>,
    last: Tensor<B, 4>,
}

struct SavedTensors<B: Backend> {
    /// At the chunks' starts.
    states: Tensor<B, 4>,
    scores: Scores<B>,
    u: Option<Tensor<B, 4>>,
}

impl<B: Backend> SavedTensors<B> {
    fn save(self) -> Saved<FloatTensor<B>> {
        let Scores { a_qk, solve } = self.scores;
        let mut tensors = vec![self.states, a_qk];
        if let Some(Solve { inverse, of_values }) = solve {
            tensors.extend(self.u);
            tensors.push(inverse);
            tensors.extend(
                of_values.map(|OfValues { a_ak, a_qb }| [a_ak, a_qb]).into_iter().flatten(),
            );
        }
        Saved::from(tensors.into_iter().map(primitive).collect::<Vec<_>>())
    }

    fn restore(saved: Saved<FloatTensor<B>>) -> Self {
        let mut tensors = saved.tensors.into_iter().map(tensor::<B, 4>);
        let mut next = || tensors.next();
        let missing = "a forward pass that keeps saves its states and scores";
        let (states, a_qk) = (next().expect(missing), next().expect(missing));
        let (u, inverse) = (next(), next());
        let of_values = next().zip(next()).map(|(a_ak, a_qb)| OfValues { a_ak, a_qb });
        let solve = inverse.map(|inverse| Solve { inverse, of_values });
        Self { states, scores: Scores { a_qk, solve }, u }
    }
}

fn forward_by<B: Backend>(
    x: Recurrence<FloatTensor<B>>,
    chunk: usize,
    keep: bool,
) -> Forward<FloatTensor<B>> {
    let (dtype, dims) = (x.v.dtype(), x.dims());
    let x = Chunks::<B>::new(x, chunk);
    let scores = x.scores();
    let Scan { states, u, last } = x.scan(&scores);
    let mut o = x.decay.since_start(&x.q, x.read()).matmul(states.clone());
    if x.writes_values() {
        o = o + scores.a_qk.clone().matmul(x.v.clone());
    }
    if let Some(u) = &u {
        o = o + scores.a_of_u().clone().matmul(u.clone());
    }
    Forward {
        o: primitive(x.layout.join(o).cast(dtype)),
        state: primitive(last.reshape(dims.state_shape())),
        saved: match keep {
            true => SavedTensors { states, scores, u }.save(),
            false => Saved::default(),
        },
    }
}

/// Gradients of rows, in chunks.
struct Gradients<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    /// Of a and y, where U is solved for.
    solved: Option<[Tensor<B, 4>; 2]>,
    /// Of the log decay.
    g: Option<Tensor<B, 4>>,
}

/// `[d_o, d_state]` are gradients of o and of the last state, zeros if absent.
fn backward_by<B: Backend>(
    given: Recurrence<FloatTensor<B>>,
    saved: Saved<FloatTensor<B>>,
    [d_o, d_state]: [Option<FloatTensor<B>>; 2],
    chunk: usize,
) -> Recurrence<FloatTensor<B>> {
    let x = Chunks::<B>::new(given.clone(), chunk);
    let saved = SavedTensors::<B>::restore(saved);
    let d_o = match d_o {
        Some(d_o) => x.layout.split(tensor::<B, 4>(d_o)),
        None => x.v.zeros_like(),
    };
    let d_last = match d_state {
        Some(d) => accumulator(tensor::<B, 4>(d)).reshape(x.start.shape()),
        None => x.start.zeros_like(),
    };
    let reverse = x.reverse(&saved.scores, &d_o, d_last);
    let d_start = reverse.d_start.clone();
    let d = x.gradients(saved, reverse, d_o);
    x.hand_back(given, d, d_start)
}

struct Reverse<B: Backend> {
    /// Gradient of the state at the end of each chunk.
    d_states: Tensor<B, 4>,
    /// Gradient of U.
    d_u: Option<Tensor<B, 4>>,
    /// Gradient of the state before the first token.
    d_start: Tensor<B, 4>,
}

impl<B: Backend> Chunks<B> {
    /// The recurrence of the backward pass, last chunk first.
    fn reverse(
        &self,
        scores: &Scores<B>,
        d_o: &Tensor<B, 4>,
        mut d_state: Tensor<B, 4>,
    ) -> Reverse<B> {
        let by_outputs =
            self.decay.since_start(&self.q, self.read()).transpose().matmul(d_o.clone());
        let solve = scores.solve.as_ref().and_then(|solve| {
            let [minus_w, written] = self.wy_rows(solve)?;
            let by_reads = scores.a_of_u().clone().transpose().matmul(d_o.clone());
            Some((minus_w.transpose(), written, by_reads))
        });
        let (mut d_states, mut d_solved) = (vec![], vec![]);
        for c in (0..self.layout.chunks()).rev() {
            let at = |x: &Tensor<B, 4>| x.clone().narrow(0, c, 1);
            d_states.push(d_state.clone());
            let mut before = self.decay.carry(d_state.clone(), c) + at(&by_outputs);
            if let Some((minus_w, written, by_reads)) = &solve {
                let d_u = at(by_reads) + at(written).matmul(d_state);
                before = before + at(minus_w).matmul(d_u.clone());
                d_solved.push(d_u);
            }
            d_state = before;
        }
        let forwards = |mut list: Vec<_>| {
            list.reverse();
            cat(list, 0)
        };
        let d_u = solve.map(|_| forwards(d_solved));
        Reverse { d_states: forwards(d_states), d_u, d_start: d_state }
    }

    /// Gradients of all rows, and of the log decay.
    fn gradients(
        &self,
        saved: SavedTensors<B>,
        reverse: Reverse<B>,
        d_o: Tensor<B, 4>,
    ) -> Gradients<B> {
        let (x, decay) = (self, &self.decay);
        let SavedTensors { states, scores, u } = saved;
        let Reverse { d_states, d_u, .. } = reverse;
        let transposed = states.clone().transpose();
        let d_transposed = d_states.clone().transpose();
        let by_end =
            |values: &Tensor<B, 4>| decay.to_end(&values.clone().matmul(d_transposed.clone()));
        let mut exponents = Exponents::new(decay, &states, &d_states);

        let q_of_state = decay.since_start(&d_o.clone().matmul(transposed.clone()), x.read());
        exponents.add_from_start(&x.q, &q_of_state, x.read());
        let mut d = Gradients {
            q: q_of_state,
            k: x.k.zeros_like(),
            v: x.v.zeros_like(),
            solved: None,
            g: None,
        };
        if x.writes_values() {
            let d_a_qk = d_o.clone().matmul(x.v.clone().transpose());
            let qk = decay.scores_backward((&x.q, &x.k), Some(&scores.a_qk), d_a_qk, x.read());
            let k_of_state = by_end(&x.v);
            exponents.add_to_end(&x.k, &k_of_state);
            exponents.add_within(qk.within);
            d.q = d.q + qk.x;
            d.k = qk.y + k_of_state;
            d.v = scores.a_qk.clone().transpose().matmul(d_o.clone())
                + decay.to_end(&x.k).matmul(d_states);
        }
        if let (Some((a, y)), Some(solve), Some(u), Some(d_u)) = (x.solved(), &scores.solve, u, d_u)
        {
            let r = solve.inverse.clone().transpose().matmul(d_u);
            let u_t = u.clone().transpose();
            let d_a_qy = d_o.matmul(u_t.clone());
            let qy = decay.scores_backward((&x.q, y), Some(scores.a_of_u()), d_a_qy, Read::After);
            let ay = decay.scores_backward((a, y), None, r.clone().matmul(u_t), Read::Before);
            let a_of_state = decay.since_start(&r.clone().matmul(transposed), Read::Before);
            let y_of_state = by_end(&u);
            exponents.add_from_start(a, &a_of_state, Read::Before);
            exponents.add_to_end(y, &y_of_state);
            exponents.add_within(qy.within);
            exponents.add_within(ay.within);
            d.q = d.q + qy.x;
            let mut d_a = ay.x + a_of_state;
            match &solve.of_values {
                Some(OfValues { a_ak, .. }) => {
                    let d_a_ak = r.clone().matmul(x.v.clone().transpose());
                    let ak = decay.scores_backward((a, &x.k), Some(a_ak), d_a_ak, Read::Before);
                    exponents.add_within(ak.within);
                    d_a = d_a + ak.x;
                    d.k = d.k + ak.y;
                    d.v = d.v + a_ak.clone().transpose().matmul(r);
                }
                None => d.v = r,
            }
            d.solved = Some([d_a, qy.y + ay.y + y_of_state]);
        }
        d.g = exponents.d_log_decays();
        d
    }

    /// From chunks to the tensors' own shapes and types; a delta rule's parts taken apart.
    fn hand_back(
        &self,
        given: Recurrence<FloatTensor<B>>,
        d: Gradients<B>,
        d_start: Tensor<B, 4>,
    ) -> Recurrence<FloatTensor<B>> {
        let Gradients { q, mut k, mut v, solved, mut g } = d;
        let like = |d: Tensor<B, 4>, like: &FloatTensor<B>| primitive(d.cast(like.dtype()));
        let rows = |d, of: &FloatTensor<B>| like(self.layout.join(d), of);
        let scalars = |d, of: &FloatTensor<B>| {
            primitive(self.layout.join(d).squeeze_dim::<3>(3).cast(of.dtype()))
        };
        let transition = match (given.transition, &self.rule, solved) {
            (Transition::Delta { beta, erase, read }, Rule::Delta(delta), Some([d_a, d_k])) => {
                let d = delta.gradients(d_a, v);
                v = d.v;
                k = match erase {
                    Some(_) => d_k,
                    None => d_k + d.erase.clone(),
                };
                g = g.map(|g| match d.decay {
                    Some(d_g) => g + self.decay.own(d_g),
                    None => g,
                });
                let erase = erase.map(|of| rows(d.erase, &of));
                Transition::Delta { beta: scalars(d.beta, &beta), erase, read }
            }
            (Transition::LowRank { a, b }, _, Some([d_a, d_b])) => {
                Transition::LowRank { a: rows(d_a, &a), b: rows(d_b, &b) }
            }
            (transition, ..) => transition,
        };
        Recurrence {
            q: like(self.layout.join_key_heads(q), &given.q),
            k: like(self.layout.join_key_heads(k), &given.k),
            v: rows(v, &given.v),
            decay: given.decay.zip(g).map(|(decay, d)| match decay {
                LogDecay::Scalar(of) => LogDecay::Scalar(scalars(d, &of)),
                LogDecay::Vector(of) => LogDecay::Vector(rows(d, &of)),
            }),
            transition,
            state: given.state.map(|of| like(d_start.reshape(of.shape()), &of)),
            lengths: None,
        }
    }
}

/// Gradients of a delta rule's inputs.
struct DeltaGradients<B: Backend> {
    beta: Tensor<B, 4>,
    erase: Tensor<B, 4>,
    v: Tensor<B, 4>,
    /// Of the exponents of `decay`, `[.., C, K]`.
    decay: Option<Tensor<B, 4>>,
}

impl<B: Backend> Delta<B> {
    /// From those of a and of v scaled by beta.
    fn gradients(&self, d_a: Tensor<B, 4>, d_v: Tensor<B, 4>) -> DeltaGradients<B> {
        let decay = self.decay.as_ref().map(|_| d_a.clone() * self.a.clone());
        // a = -beta e [e^g]
        let d_rows = match &self.decay {
            Some(decay) => d_a.neg() * decay.clone(),
            None => d_a.neg(),
        };
        let by_rows = (d_rows.clone() * self.erase.clone()).sum_along(3);
        let by_values = (d_v.clone() * self.v.clone()).sum_along(3);
        DeltaGradients {
            beta: by_rows + by_values,
            erase: d_rows * self.beta.clone(),
            v: d_v * self.beta.clone(),
            decay,
        }
    }
}
