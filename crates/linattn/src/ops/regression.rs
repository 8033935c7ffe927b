//! Ridge regression of all values so far on their keys, by two states of linear attention.
//! ```text
//! H_t = e^{g_t} H_{t-1} + k_t^T m_t      [K, K]     m, u: keys and values by how much they count
//! G_t = e^{g_t} G_{t-1} + k_t^T u_t      [K, V]
//! x_t = q_t (H_t + lambda_t)^-1          [K]        by iterations
//! ```
//! A product with H of all tokens at once is linear attention too: an iteration is one pass of it, whose
//! queries are the rows so far.
//!
//! The gradient doesn't go through the iterations: with `w = dx (H + lambda)^-1`, the matrix being symmetric, it is
//! w for q and `-(w x^T)` for the matrix. That is one more solve, whatever the iterations were, and one backward
//! pass of linear attention.

use super::backend::{Composite, LinearAttentionBackend};
use super::pass::{BackwardPass, Pass};
use super::recurrence::{Forward, LogDecay, Read, Recurrence, Transition};
use super::tensors::{Along, cat, primitive, tensor};
use super::{LinearAttentionInputs, OpError, OpResult};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Added to what iterations divide by: rows that are solved exactly stay where they are.
pub(super) const TINY: f64 = 1e-30;

/// Linear attention, over whole sequences or one token.
pub(super) trait Attend<B: Backend>:
    Fn(LinearAttentionInputs<B>, Option<Tensor<B, 4>>) -> OpResult<B>
{
}

impl<B, F> Attend<B> for F
where
    B: Backend,
    F: Fn(LinearAttentionInputs<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
{
}

/// A name, the shape that its tensor has, and that which it should have.
pub(super) type Shapes = Vec<(&'static str, Vec<usize>, Vec<usize>)>;

/// Refuses the first tensor of another shape; `state` goes with queries and values.
pub(super) fn check_shapes<B: Backend>(
    op: &'static str,
    mut shapes: Shapes,
    (q, v): (&Tensor<B, 4>, &Tensor<B, 4>),
    state: Option<&Tensor<B, 4>>,
) -> Result<(), OpError> {
    let ([batch, _, heads, key_width], [.., value_width]) = (q.dims(), v.dims());
    if let Some(state) = state {
        let want = vec![batch, heads, key_width, key_width + value_width];
        shapes.push(("state", state.dims().to_vec(), want));
    }
    match shapes.into_iter().find(|(_, got, want)| got != want) {
        Some((tensor, got, want)) => Err(OpError::Shape { op, tensor, got, want }),
        None => Ok(()),
    }
}

/// The two states' inputs, in f32 at least.
pub(super) struct Regression<B: Backend> {
    /// Keys, `[B, T, H, K]`.
    pub(super) k: Tensor<B, 4>,
    /// Keys and values by how much they count, `[B, T, H, K]` and `[B, T, H, V]`.
    pub(super) keys: Tensor<B, 4>,
    pub(super) values: Tensor<B, 4>,
    /// Log decay, `[B, T, H]`.
    pub(super) g: Tensor<B, 3>,
    /// H and G before the first token, side by side, `[B, H, K, K + V]`.
    pub(super) state: Option<Tensor<B, 4>>,
}

impl<B: LinearAttentionBackend> Regression<B> {
    /// H before the first token.
    pub(super) fn first_of_keys(&self) -> Option<Tensor<B, 4>> {
        let width = self.k.dims()[3];
        self.state.clone().map(|state| state.narrow(3, 0, width))
    }

    /// `rows` times H of each token, `[B, T, H, K]`, and the last H.
    pub(super) fn times_keys(&self, rows: Tensor<B, 4>, attend: &impl Attend<B>) -> OpResult<B> {
        let inputs = LinearAttentionInputs::new(rows, self.k.clone(), self.keys.clone());
        attend(inputs.with_decay(self.g.clone()), self.first_of_keys())
    }

    /// `x` times G of each token, `[B, T, H, V]`, and the state, of which `of_keys` is H.
    pub(super) fn read(
        self,
        x: Tensor<B, 4>,
        of_keys: Tensor<B, 4>,
        attend: &impl Attend<B>,
    ) -> OpResult<B> {
        let (width, value_width) = (self.k.dims()[3], self.values.dims()[3]);
        let first = self.state.map(|state| state.narrow(3, width, value_width));
        let inputs = LinearAttentionInputs::new(x, self.k, self.values).with_decay(self.g);
        let (o, of_values) = attend(inputs, first)?;
        Ok((o, cat(vec![of_keys, of_values], 3)))
    }

    /// x of `x_t (H_t + lambda_t) = q_t` for all tokens. `lambda` is as large as `q` or 1 along each dimension.
    pub(super) fn solve(
        &self,
        q: Tensor<B, 4>,
        lambda: Tensor<B, 4>,
        solver: Solver,
    ) -> Tensor<B, 4> {
        let recurrence = Recurrence {
            q: primitive(q),
            k: primitive(self.k.clone()),
            v: primitive(self.keys.clone()),
            decay: Some(LogDecay::Scalar(primitive(self.g.clone()))),
            transition: Transition::Identity { read: Read::After },
            state: self.first_of_keys().map(primitive),
            lengths: None,
        };
        let (places, mut inputs) = recurrence.into_list();
        inputs.push(primitive(lambda));
        tensor(B::composite(Solve { places, solver }, inputs).remove(0))
    }
}

/// How equations are solved.
#[derive(Debug, Clone, Copy)]
pub(super) enum Solver {
    /// Conjugate gradients from zero, every row by itself.
    ConjugateGradients {
        /// How many.
        iterations: usize,
    },
    /// Chebyshev's semi-iteration, for eigenvalues in lambda to lambda (1 + 1 / share), one lambda for a token.
    Chebyshev {
        /// How many, after a first step that needs no product.
        iterations: usize,
        /// lambda over the largest eigenvalue that H can have.
        share: f64,
    },
}

/// The equations of all tokens as one operation, of the tensors of H and lambda.
struct Solve {
    places: Recurrence<usize>,
    solver: Solver,
}

impl Composite for Solve {
    fn run<B: LinearAttentionBackend>(
        self,
        mut inputs: Vec<FloatTensor<B>>,
        keep: bool,
    ) -> Pass<B> {
        let lambda = tensor(inputs.pop().expect("lambda is the last"));
        let recurrence = self.places.fill(inputs);
        let x = Equations::<B> { recurrence, lambda, solver: self.solver };
        let found = x.solve(tensor(x.recurrence.q.clone()));
        let output = primitive(found.clone());
        let backward = keep.then(|| -> BackwardPass<B> {
            Box::new(move |gradients, _| {
                let d = gradients.into_iter().next().flatten().expect("of the one output");
                let (recurrence, lambda) = x.gradients(found, tensor(d));
                recurrence.into_list().1.into_iter().chain([lambda]).map(Some).collect()
            })
        });
        Pass { outputs: vec![output], backward }
    }
}

/// The equations of all tokens on a backend.
struct Equations<B: Backend> {
    /// H of every token, whose queries are the right-hand sides.
    recurrence: Recurrence<FloatTensor<B>>,
    /// Ridge, 1 along some dimensions.
    lambda: Tensor<B, 4>,
    solver: Solver,
}

impl<B: LinearAttentionBackend> Equations<B> {
    /// `rows` times H of each token with its ridge, `[B, T, H, K]`.
    fn times_matrix(&self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        let tokens = rows.dims()[1];
        let recurrence = Recurrence { q: primitive(rows.clone()), ..self.recurrence.clone() };
        let by_state: Tensor<B, 4> = tensor(match tokens {
            1 => B::recurrent_step(recurrence).0,
            _ => B::chunkwise(recurrence, false).o,
        });
        by_state + rows * self.lambda.clone()
    }

    /// Solutions for the right-hand sides `rows`.
    fn solve(&self, rows: Tensor<B, 4>) -> Tensor<B, 4> {
        match self.solver {
            Solver::ConjugateGradients { iterations } => self.by_directions(rows, iterations),
            Solver::Chebyshev { iterations, share } => self.by_bounds(rows, iterations, share),
        }
    }

    /// By conjugate gradients.
    fn by_directions(&self, rows: Tensor<B, 4>, iterations: usize) -> Tensor<B, 4> {
        let dot = |a: &Tensor<B, 4>, b: &Tensor<B, 4>| (a.clone() * b.clone()).sum_along(3);
        // Rows of about length 1: squares of small gradients would be lost beside TINY.
        let scale = rows.clone().abs().max_dim(3) + TINY;
        let mut rest = rows / scale.clone();
        let mut found = rest.zeros_like();
        let mut direction = rest.clone();
        let mut size = dot(&rest, &rest);
        for _ in 0..iterations {
            let image = self.times_matrix(direction.clone());
            let length = size.clone() / (dot(&direction, &image) + TINY);
            found = found + direction.clone() * length.clone();
            rest = rest - image * length;
            let next = dot(&rest, &rest);
            direction = rest.clone() + direction * (next.clone() / (size + TINY));
            size = next;
        }
        found * scale
    }

    /// By Chebyshev's semi-iteration: steps and weights follow from bounds of the eigenvalues alone.
    fn by_bounds(&self, rows: Tensor<B, 4>, iterations: usize, share: f64) -> Tensor<B, 4> {
        // The middle of the bounds, and half their distance over it.
        let step = (self.lambda.clone() * (1.0 + 0.5 / share)).recip();
        let spread = 1.0 / (1.0 + 2.0 * share);
        let mut before = rows.zeros_like();
        let mut found = rows.clone() * step.clone();
        let mut weight = 2.0;
        for _ in 0..iterations {
            weight = 1.0 / (1.0 - 0.25 * spread * spread * weight);
            let rest = rows.clone() - self.times_matrix(found.clone());
            let next = (found.clone() + rest * step.clone()) * weight - before * (weight - 1.0);
            before = found;
            found = next;
        }
        found
    }

    /// Gradients of the tensors of H, right-hand sides among them, and of lambda, from that of the solutions.
    fn gradients(
        self,
        found: Tensor<B, 4>,
        d: Tensor<B, 4>,
    ) -> (Recurrence<FloatTensor<B>>, FloatTensor<B>) {
        let w = self.solve(d);
        let by_row = (w.clone() * found.clone()).neg();
        let shape = self.lambda.dims();
        let alike = (0..4).filter(|&dim| shape[dim] == 1);
        let d_lambda = primitive(alike.fold(by_row, |sum, dim| sum.sum_along(dim)));
        let recurrence = Recurrence { q: primitive(found), ..self.recurrence };
        let Forward { saved, .. } = B::chunkwise(recurrence.clone(), true);
        let d_answers = primitive(w.clone().neg());
        let d_recurrence = B::chunkwise_backward(recurrence, saved, Some(d_answers), None);
        (Recurrence { q: primitive(w), ..d_recurrence }, d_lambda)
    }
}
