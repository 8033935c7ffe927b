//! Gated KalmaNet's recurrence: queries are taken to the ridge regression of all values so far, by a share.
//! ```text
//! H_t      = e^{g_t} H_{t-1} + k_t^T k_t     [K, K]
//! U_t      = e^{g_t} U_{t-1} + k_t^T v_t     [K, V]
//! lambda_t = ridge |H_t|                     of the Frobenius norm
//! x_t      = q_t (H_t + lambda_t I)^-1       [K]     by Chebyshev's iteration
//! o_t      = (q_t + alpha_t (x_t - q_t)) U_t [V]
//! ```
//! The norm is a recurrence of its own, of what H answers for the token's key:
//! `|H_t|^2 = e^{2 g_t} |H_{t-1}|^2 + 2 k_t H_t k_t^T - |k_t|^4`. No eigenvalue of H is larger than it.
//! regression.rs has the two states, the solve and its gradient.

use super::backend::LinearAttentionBackend;
use super::regression::{Attend, Regression, Solver, TINY, check_shapes};
use super::tensors::{Along, accumulator};
use super::{
    LinearAttentionInputs, OpError, OpResult, check_one_token, chunked, linear_scan, step,
};
use burn::tensor::{Tensor, backend::Backend};

/// Inputs of [`gated_kalman`].
#[derive(Debug, Clone)]
pub struct KalmanInputs<B: Backend> {
    /// Queries, `[B, T, H, K]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, H, K]`, of length 1 at most.
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// How far queries go to the solution, `[B, T, H]`, 0 to 1.
    pub alpha: Tensor<B, 3>,
    /// Log decay of both states, `[B, T, H]`, at most 0.
    pub g: Tensor<B, 3>,
    /// The ridge over the norm of H, above 0.
    pub ridge: f64,
    /// Chebyshev iterations, as many again in the backward pass.
    pub iterations: usize,
}

impl<B: Backend> KalmanInputs<B> {
    fn check(&self, op: &'static str, state: Option<&Tensor<B, 4>>) -> Result<(), OpError> {
        let x = LinearAttentionInputs::new(self.q.clone(), self.k.clone(), self.v.clone());
        x.with_decay(self.g.clone()).recurrence(None).check(op)?;
        let [batch, tokens, heads, _] = self.q.dims();
        let value_width = self.v.dims()[3];
        let shapes = vec![
            ("v", self.v.dims().to_vec(), vec![batch, tokens, heads, value_width]),
            ("alpha", self.alpha.dims().to_vec(), vec![batch, tokens, heads]),
        ];
        check_shapes(op, shapes, (&self.q, &self.v), state)
    }
}

/// Gated KalmaNet's recurrence over whole sequences. Gradients reach every tensor of `x`, and `state`; through the
/// iterations they are those of exact solutions.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token: H and U side
/// by side, `[B, H, K, K + V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// Gated KalmaNet, arXiv 2511.21016.
pub fn gated_kalman<B: LinearAttentionBackend>(
    x: KalmanInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let op = "gated_kalman";
    x.check(op, state.as_ref())?;
    run(x, state, |x, state| chunked(op, x.recurrence(state)))
}

/// One token of [`gated_kalman`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`gated_kalman`], and [`OpError::Step`] if T is not 1.
pub fn gated_kalman_step<B: LinearAttentionBackend>(
    x: KalmanInputs<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let op = "gated_kalman_step";
    x.check(op, state.as_ref())?;
    check_one_token(op, x.q.dims()[1])?;
    run(x, state, |x, state| step(op, x.recurrence(state)))
}

fn run<B: LinearAttentionBackend>(
    x: KalmanInputs<B>,
    state: Option<Tensor<B, 4>>,
    attend: impl Attend<B>,
) -> OpResult<B> {
    let KalmanInputs { q, k, v, alpha, g, ridge, iterations } = x;
    let dtype = v.dtype();
    let [q, k, v] = [q, k, v].map(accumulator);
    let regression = Regression { k: k.clone(), keys: k.clone(), values: v, g, state };
    let (answers, of_keys) = regression.times_keys(k, &attend)?;
    let lambda = norms(&regression, answers)? * ridge;
    let solver = Solver::Chebyshev { iterations, share: ridge };
    let x = regression.solve(q.clone(), lambda, solver);
    let alpha = accumulator(alpha).unsqueeze_dim::<4>(3);
    let x = q.clone() + (x - q) * alpha;
    let (o, state) = regression.read(x, of_keys, &attend)?;
    Ok((o.cast(dtype), state))
}

/// Frobenius norms of H of each token, `[B, T, H, 1]`, from what it answers for the token's key.
fn norms<B: LinearAttentionBackend>(
    x: &Regression<B>,
    answers: Tensor<B, 4>,
) -> Result<Tensor<B, 4>, OpError> {
    let [batch, tokens, heads, _] = x.k.dims();
    let per_head = |x: Tensor<B, 4>| x.sum_along(3).reshape([batch, tokens, heads]);
    let own = per_head(x.k.clone().square()).square();
    let added = per_head(answers * x.k.clone()) * 2.0 - own;
    let first = x
        .first_of_keys()
        .map(|state| state.square().sum_along(3).sum_along(2).reshape([batch, 1, heads]));
    let (squares, _) = linear_scan((x.g.clone() * 2.0).exp(), added, first)?;
    Ok((squares + TINY).sqrt().unsqueeze_dim(3))
}
