//! The Mesa layer: every output solves the least-squares problem of all keys and values so far.
//! ```text
//! H_t = e^{g_t} H_{t-1} + beta_t k_t^T k_t     [K, K]
//! G_t = e^{g_t} G_{t-1} + beta_t k_t^T v_t     [K, V]
//! x_t = q_t (H_t + diag(lambda))^-1            [K]     by conjugate gradients
//! o_t = x_t G_t                                [V]
//! ```
//! Both memories are those of linear attention, and so is a product with H of all tokens at once: a
//! step of the conjugate gradients is one pass of linear attention whose queries are the
//! directions.
//!
//! The gradient doesn't go through the iterations: with `w = dx (H + diag(lambda))^-1`, the matrix being
//! symmetric, it is w for q and `-(w x^T)` for the matrix. That is one more solve, whatever the iterations were, and
//! one backward pass of linear attention.

use super::backend::{Composite, LinearAttentionBackend};
use super::pass::{BackwardPass, Pass};
use super::recurrence::{Forward, LogDecay, Read, Recurrence, Transition};
use super::tensors::{accumulator, primitive, tensor};
use super::{LinearAttentionInputs, OpError, OpResult, check_one_token, chunked, step};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Added to what conjugate gradients divide by: rows that are solved exactly stay where they are.
const TINY: f64 = 1e-30;

/// Inputs of [`mesa`].
#[derive(Debug, Clone)]
pub struct MesaInputs<B: Backend> {
    /// Queries, `[B, T, H, K]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, H, K]`, of length 1.
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// How much a token counts, `[B, T, H]`, at least 0.
    pub beta: Tensor<B, 3>,
    /// Log decay of both memories, `[B, T, H]`, at most 0.
    pub g: Tensor<B, 3>,
    /// Ridge, `[H, K]`, above 0.
    pub lambda: Tensor<B, 2>,
    /// Iterations of the conjugate gradients, as many again in the backward pass.
    pub iterations: usize,
}

impl<B: Backend> MesaInputs<B> {
    fn check(&self, op: &'static str, state: Option<&Tensor<B, 4>>) -> Result<(), OpError> {
        let x = LinearAttentionInputs::new(self.q.clone(), self.k.clone(), self.v.clone());
        x.with_decay(self.g.clone()).recurrence(None).check(op)?;
        let [batch, tokens, heads, key_width] = self.q.dims();
        let value_width = self.v.dims()[3];
        let mut shapes = vec![
            ("v", self.v.dims().to_vec(), vec![batch, tokens, heads, value_width]),
            ("beta", self.beta.dims().to_vec(), vec![batch, tokens, heads]),
            ("lambda", self.lambda.dims().to_vec(), vec![heads, key_width]),
        ];
        if let Some(state) = state {
            let want = vec![batch, heads, key_width, key_width + value_width];
            shapes.push(("state", state.dims().to_vec(), want));
        }
        match shapes.into_iter().find(|(_, got, want)| got != want) {
            Some((tensor, got, want)) => Err(OpError::Shape { op, tensor, got, want }),
            None => Ok(()),
        }
    }
}

/// The Mesa layer over whole sequences. Gradients reach every tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token: H and G side
/// by side, `[B, H, K, K + V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// MesaNet, arXiv 2506.05233.
pub fn mesa<B: LinearAttentionBackend>(
    x: MesaInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let op = "mesa";
    x.check(op, state.as_ref())?;
    run(x, state, |x, memory| chunked(op, x.recurrence(memory)))
}

/// One token of [`mesa`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`mesa`], and [`OpError::Step`] if T is not 1.
pub fn mesa_step<B: LinearAttentionBackend>(
    x: MesaInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let op = "mesa_step";
    x.check(op, state.as_ref())?;
    check_one_token(op, x.q.dims()[1])?;
    run(x, state, |x, memory| step(op, x.recurrence(memory)))
}

/// `attend` is linear attention, over whole sequences or one token.
fn run<B: LinearAttentionBackend>(
    x: MesaInputs<B>,
    state: Option<Tensor<B, 4>>,
    attend: impl Fn(LinearAttentionInputs<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
) -> OpResult<B> {
    let MesaInputs { q, k, v, beta, g, lambda, iterations } = x;
    let (dtype, key_width, value_width) = (v.dtype(), k.dims()[3], v.dims()[3]);
    let [q, k, v] = [q, k, v].map(accumulator);
    let (lambda, beta) = (accumulator(lambda), accumulator(beta).unsqueeze_dim::<4>(3));
    let weighted = k.clone() * beta.clone();
    let part = |from, width| state.clone().map(|s| s.narrow(3, from, width));
    let (of_keys, of_values) = (part(0, key_width), part(key_width, value_width));
    let read = |q: Tensor<B, 4>, v: Tensor<B, 4>, memory| {
        attend(LinearAttentionInputs::new(q, k.clone(), v).with_decay(g.clone()), memory)
    };
    let memory = Recurrence {
        q: primitive(q),
        k: primitive(k.clone()),
        v: primitive(weighted.clone()),
        decay: Some(LogDecay::Scalar(primitive(g.clone()))),
        transition: Transition::Identity { read: Read::After },
        state: of_keys.clone().map(primitive),
    };
    let (places, mut inputs) = memory.into_list();
    inputs.push(primitive(lambda));
    let x = tensor(B::composite(Solve { places, iterations }, inputs).remove(0));
    // Which rows read is all the same: this is for the state.
    let (_, last_of_keys) = read(k.clone(), weighted, of_keys)?;
    let (o, last_of_values) = read(x, v * beta, of_values)?;
    Ok((o.cast(dtype), Tensor::cat(vec![last_of_keys, last_of_values], 3)))
}

/// The equations `x_t (H_t + diag(lambda)) = q_t` of all tokens as one operation, of the tensors of H and lambda.
struct Solve {
    places: Recurrence<usize>,
    iterations: usize,
}

impl Composite for Solve {
    fn run<B: LinearAttentionBackend>(
        self,
        mut inputs: Vec<FloatTensor<B>>,
        keep: bool,
    ) -> Pass<B> {
        let lambda = tensor(inputs.pop().expect("lambda is the last"));
        let memory = self.places.fill(inputs);
        let x = Equations::<B> { memory, lambda, iterations: self.iterations };
        let found = x.solve(tensor(x.memory.q.clone()));
        let output = primitive(found.clone());
        let backward = keep.then(|| -> BackwardPass<B> {
            Box::new(move |gradients, _| {
                let d = gradients.into_iter().next().flatten().expect("of the one output");
                let (memory, lambda) = x.gradients(found, tensor(d));
                memory.into_list().1.into_iter().chain([lambda]).map(Some).collect()
            })
        });
        Pass { outputs: vec![output], backward }
    }
}

/// The equations of all tokens on a backend.
struct Equations<B: Backend> {
    /// H of every token, whose queries are the right-hand sides.
    memory: Recurrence<FloatTensor<B>>,
    /// Ridge, `[H, K]`.
    lambda: Tensor<B, 2>,
    iterations: usize,
}

impl<B: LinearAttentionBackend> Equations<B> {
    /// `rows` times H of each token, `[B, T, H, K]`.
    fn times_memory(&self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        let tokens = rows.dims()[1];
        let memory = Recurrence { q: primitive(rows), ..self.memory.clone() };
        tensor(match tokens {
            1 => B::recurrent_step(memory).0,
            _ => B::chunkwise(memory, false).o,
        })
    }

    /// Solutions for the right-hand sides `rows`, by conjugate gradients from zero, every row by itself.
    fn solve(&self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        let lambda = self.lambda.clone().unsqueeze::<4>();
        let dot = |a: &Tensor<B, 4>, b: &Tensor<B, 4>| (a.clone() * b.clone()).sum_dim(3);
        // Rows of about length 1: squares of small gradients would be lost beside TINY.
        let scale = rows.clone().abs().max_dim(3) + TINY;
        let mut rest = rows / scale.clone();
        let mut found = rest.zeros_like();
        let mut direction = rest.clone();
        let mut size = dot(&rest, &rest);
        for _ in 0..self.iterations {
            let image = self.times_memory(direction.clone()) + direction.clone() * lambda.clone();
            let length = size.clone() / (dot(&direction, &image) + TINY);
            found = found + direction.clone() * length.clone();
            rest = rest - image * length;
            let next = dot(&rest, &rest);
            direction = rest.clone() + direction * (next.clone() / (size + TINY));
            size = next;
        }
        found * scale
    }

    /// Gradients of the tensors of H, right-hand sides among them, and of lambda, from that of the solutions.
    fn gradients(
        self,
        found: Tensor<B, 4>,
        d: Tensor<B, 4>,
    ) -> (Recurrence<FloatTensor<B>>, FloatTensor<B>) {
        let w = self.solve(d);
        let by_lambda = (w.clone() * found.clone()).neg().sum_dim(0).sum_dim(1);
        let d_lambda = primitive(by_lambda.reshape(self.lambda.dims()));
        let memory = Recurrence { q: primitive(found), ..self.memory };
        let Forward { saved, .. } = B::chunkwise(memory.clone(), true);
        let d_answers = primitive(w.clone().neg());
        let d_memory = B::chunkwise_backward(memory, saved, Some(d_answers), None);
        (Recurrence { q: primitive(w), ..d_memory }, d_lambda)
    }
}
