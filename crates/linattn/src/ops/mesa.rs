//! The Mesa layer: every output solves the least-squares problem of all keys and values so far.
//! ```text
//! H_t = e^{g_t} H_{t-1} + beta_t k_t^T k_t     [K, K]
//! G_t = e^{g_t} G_{t-1} + beta_t k_t^T v_t     [K, V]
//! x_t = q_t (H_t + diag(lambda))^-1            [K]     by conjugate gradients
//! o_t = x_t G_t                                [V]
//! ```
//! regression.rs has the two states, the solve and its gradient.

use super::backend::LinearAttentionBackend;
use super::regression::{Attend, Regression, Solver, check_shapes};
use super::tensors::accumulator;
use super::{LinearAttentionInputs, OpError, OpResult, check_one_token, chunked, step};
use burn::tensor::{Tensor, backend::Backend};

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
    /// Log decay of both states, `[B, T, H]`, at most 0.
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
        let shapes = vec![
            ("v", self.v.dims().to_vec(), vec![batch, tokens, heads, value_width]),
            ("beta", self.beta.dims().to_vec(), vec![batch, tokens, heads]),
            ("lambda", self.lambda.dims().to_vec(), vec![heads, key_width]),
        ];
        check_shapes(op, shapes, (&self.q, &self.v), state)
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
    run(x, state, |x, state| chunked(op, x.recurrence(state)))
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
    run(x, state, |x, state| step(op, x.recurrence(state)))
}

/// `attend` is linear attention, over whole sequences or one token.
fn run<B: LinearAttentionBackend>(
    x: MesaInputs<B>,
    state: Option<Tensor<B, 4>>,
    attend: impl Attend<B>,
) -> OpResult<B> {
    let MesaInputs { q, k, v, beta, g, lambda, iterations } = x;
    let dtype = v.dtype();
    let [q, k, v] = [q, k, v].map(accumulator);
    let (lambda, beta) = (accumulator(lambda), accumulator(beta).unsqueeze_dim::<4>(3));
    let (keys, values) = (k.clone() * beta.clone(), v * beta);
    let regression = Regression { k: k.clone(), keys, values, g, state };
    let solver = Solver::ConjugateGradients { iterations };
    let x = regression.solve(q, lambda.unsqueeze(), solver);
    // Which rows read is all the same: this is for the state.
    let (_, of_keys) = regression.times_keys(k, &attend)?;
    let (o, state) = regression.read(x, of_keys, &attend)?;
    Ok((o.cast(dtype), state))
}
