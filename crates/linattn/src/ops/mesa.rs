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
//! The gradient doesn't go through the iterations. x is found outside the graph; the residual
//! `r = q - x (H + diag(lambda))` is formed inside it, with x a constant: its value is rounding, and
//! its gradients are those of every input. A node with the value x then hands r the gradient
//! `dx (H + diag(lambda))^-1`, the matrix being symmetric: one more solve, whatever the iterations
//! were.

use super::backend::LinearAttentionBackend;
use super::recurrence::{LogDecay, Read, Recurrence, Transition};
use super::tensors::{accumulator, primitive, tensor};
use super::{LinearAttention, OpError, OpResult, check_one_token, chunked, step};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Added to what conjugate gradients divide by: rows that are solved exactly stay where they are.
const TINY: f64 = 1e-30;

/// Inputs of [`mesa`].
#[derive(Debug, Clone)]
pub struct Mesa<B: Backend> {
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

/// The equations `x_t (H_t + diag(lambda)) = rows_t` of all tokens, as a backend holds them.
#[derive(Debug, Clone)]
pub struct Normal<T> {
    /// Right-hand sides, `[B, T, H, K]`.
    pub rows: T,
    /// Keys, `[B, T, H, K]`.
    pub keys: T,
    /// Keys times beta, `[B, T, H, K]`.
    pub values: T,
    /// Log decay, `[B, T, H]`.
    pub g: T,
    /// Ridge, `[H, K]`.
    pub lambda: T,
    /// H before the first token, `[B, H, K, K]`; zeros if absent.
    pub state: Option<T>,
    /// Iterations.
    pub iterations: usize,
}

impl<T> Normal<T> {
    fn map<U>(self, f: impl Fn(T) -> U) -> Normal<U> {
        Normal {
            rows: f(self.rows),
            keys: f(self.keys),
            values: f(self.values),
            g: f(self.g),
            lambda: f(self.lambda),
            state: self.state.map(&f),
            iterations: self.iterations,
        }
    }
}

impl<B: Backend> Mesa<B> {
    fn check(&self, op: &'static str, state: Option<&Tensor<B, 4>>) -> Result<(), OpError> {
        let x = LinearAttention::new(self.q.clone(), self.k.clone(), self.v.clone());
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
pub fn mesa<B: LinearAttentionBackend>(x: Mesa<B>, state: Option<Tensor<B, 4>>) -> OpResult<B> {
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
    x: Mesa<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let op = "mesa_step";
    x.check(op, state.as_ref())?;
    check_one_token(op, x.q.dims()[1])?;
    run(x, state, |x, memory| step(op, x.recurrence(memory)))
}

/// `attend` is linear attention, over whole sequences or one token.
fn run<B: LinearAttentionBackend>(
    x: Mesa<B>,
    state: Option<Tensor<B, 4>>,
    attend: impl Fn(LinearAttention<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
) -> OpResult<B> {
    let Mesa { q, k, v, beta, g, lambda, iterations } = x;
    let (dtype, key_width, value_width) = (v.dtype(), k.dims()[3], v.dims()[3]);
    let [q, k, v] = [q, k, v].map(accumulator);
    let (lambda, beta) = (accumulator(lambda), accumulator(beta).unsqueeze_dim::<4>(3));
    let weighted = k.clone() * beta.clone();
    let part = |from, width| state.clone().map(|s| s.narrow(3, from, width));
    let (of_keys, of_values) = (part(0, key_width), part(key_width, value_width));
    let read = |q: Tensor<B, 4>, v: Tensor<B, 4>, memory| {
        attend(LinearAttention::new(q, k.clone(), v).with_decay(g.clone()), memory)
    };
    let equations = |rows: Tensor<B, 4>| Normal {
        rows: primitive(rows),
        keys: primitive(k.clone()),
        values: primitive(weighted.clone()),
        g: primitive(g.clone()),
        lambda: primitive(lambda.clone()),
        state: of_keys.clone().map(primitive),
        iterations,
    };

    let found: Tensor<B, 4> = tensor(B::solve(equations(q.clone())));
    let (answers, last_of_keys) = read(found.clone(), weighted.clone(), of_keys.clone())?;
    let residual = q - answers - found.clone() * lambda.clone().unsqueeze::<4>();
    let x = tensor(B::implicit(primitive(found), equations(residual)));
    let (o, last_of_values) = read(x, v * beta, of_values)?;
    Ok((o.cast(dtype), Tensor::cat(vec![last_of_keys, last_of_values], 3)))
}

/// `rows` times H of each token, `[B, T, H, K]`.
fn times_memory<B: LinearAttentionBackend>(
    x: &Normal<FloatTensor<B>>,
    rows: Tensor<B, 4>,
) -> Tensor<B, 4> {
    let tokens = rows.dims()[1];
    let memory = Recurrence {
        q: primitive(rows),
        k: x.keys.clone(),
        v: x.values.clone(),
        decay: Some(LogDecay::Scalar(x.g.clone())),
        transition: Transition::Identity { read: Read::After },
        state: x.state.clone(),
    };
    tensor(match tokens {
        1 => B::recurrent_step(memory).0,
        _ => B::chunkwise(memory, false).o,
    })
}

/// [`LinearAttentionBackend::solve`] by conjugate gradients from zero, every row by itself.
pub(super) fn solve<B: LinearAttentionBackend>(x: Normal<FloatTensor<B>>) -> FloatTensor<B> {
    let rows: Tensor<B, 4> = tensor(x.rows.clone());
    let lambda = tensor::<B, 2>(x.lambda.clone()).unsqueeze::<4>();
    let dot = |a: &Tensor<B, 4>, b: &Tensor<B, 4>| (a.clone() * b.clone()).sum_dim(3);
    // Rows of about length 1: squares of small gradients would be lost beside TINY.
    let scale = rows.clone().abs().max_dim(3) + TINY;
    let mut rest = rows / scale.clone();
    let mut found = rest.zeros_like();
    let mut direction = rest.clone();
    let mut size = dot(&rest, &rest);
    for _ in 0..x.iterations {
        let image = times_memory::<B>(&x, direction.clone()) + direction.clone() * lambda.clone();
        let length = size.clone() / (dot(&direction, &image) + TINY);
        found = found + direction.clone() * length.clone();
        rest = rest - image * length;
        let next = dot(&rest, &rest);
        direction = rest.clone() + direction * (next.clone() / (size + TINY));
        size = next;
    }
    primitive(found * scale)
}

#[derive(Debug)]
struct Implicit;

impl<B: LinearAttentionBackend> Backward<B, 1> for Implicit {
    type State = Normal<FloatTensor<B>>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let rows = gradients.consume::<B>(&ops.node);
        let gradient = B::solve(Normal { rows, ..ops.state });
        if let [Some(parent)] = ops.parents {
            gradients.register::<B>(parent.id, gradient);
        }
    }
}

/// `found` as a function of the residuals, one node of the autodiff graph.
pub(super) fn track<B: LinearAttentionBackend, C: CheckpointStrategy>(
    found: FloatTensor<Autodiff<B, C>>,
    x: Normal<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    // Held until the node is there: another thread's backward pass frees what no tensor holds.
    let rows = x.rows.clone();
    let prepared = Implicit.prepare::<C>([rows.node.clone()]).compute_bound().stateful();
    match prepared {
        OpsKind::Tracked(node) => node.finish(inner::<B, C>(x), found.primitive),
        OpsKind::UnTracked(node) => node.finish(found.primitive),
    }
}

/// The same equations outside the autodiff graph.
pub(super) fn inner<B: LinearAttentionBackend, C: CheckpointStrategy>(
    x: Normal<FloatTensor<Autodiff<B, C>>>,
) -> Normal<FloatTensor<B>> {
    x.map(|tensor| tensor.primitive)
}
