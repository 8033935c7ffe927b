//! The gated delta rule by chunks, as simply as it can be written: the text to read before the fast kernels.
//!
//! Each (sequence, head) owns a state S: [K, V]. Vectors are rows, g is a log decay, at most 0.
//! ```text
//! S_t = e^{g_t} S_{t-1} + k_t^T u_t     u_t = beta_t (v_t - e^{g_t} k_t S_{t-1})     o_t = q_t S_t
//! ```
//! A chunk of C tokens is computed at once. G is the sum of g from its start, S the state there, S' at its end; dS' is the
//! gradient of S', from the chunk behind:
//! ```text
//! A_qk_ij = q_i k_j^T e^{G_i - G_j}, i >= j          M_ij = -beta_i k_i k_j^T e^{G_i - G_j}, i > j
//! T  = (I - M)^-1                                    UT transform
//! U  = beta (V - e^G K S) + M U                      u_t, its S_{t-1} unrolled to S
//!    = T beta (V - e^G K S)                          pseudo-values
//! O  = e^G Q S + A_qk U
//! S' = e^{G_C} S + (e^{G_C - G} K)^T U               state pass
//!
//! R' = A_qk^T dO + e^{G_C - G} K dS'                 gradient of U
//! R  = T^T R'                                        adjoint of the solve
//! dv_i    = beta_i R_i
//! dA_qk_ij = dO_i U_j^T, i >= j                      dM_ij = R_i U_j^T, i > j        D_ij = e^{G_i - G_j}
//! dq_i    = sum_j D_ij dA_qk_ij k_j + e^{G_i} dO_i S^T
//! da_i    = sum_j D_ij dM_ij k_j + e^{G_i} R_i S^T
//! dk_i    = sum_l D_li (dA_qk_li q_l - dM_li beta_l k_l) + e^{G_C - G_i} U_i dS'^T - beta_i da_i
//! dbeta_i = v_i R_i^T - k_i da_i^T
//! dS      = e^{G_C} dS' + (e^G Q)^T dO - (e^G beta K)^T R
//! ```
//! a_i = -beta_i k_i is the row that erases: its gradient goes on to k_i and beta_i.
//! g_t is in every e^{G_i - G_j} with j < t <= i: dG_i gathers each term with G_i, and dg_t is the sum of dG_i from t
//! on, with the terms of G_C. backward.rs has three arrays of terms:
//! ```text
//! pairs_ij = dA_qk_ij A_qk_ij + dM_ij M_ij, i > j
//! tokens_i = e^{G_i} (q_i S dO_i^T + a_i S R_i^T) - e^{G_C - G_i} k_i dS' U_i^T
//! ends     = e^{G_C} (S . dS') and, for each i, e^{G_C - G_i} k_i dS' U_i^T
//! dG_i     = tokens_i + sum_j (pairs_ij - pairs_ji)
//! dg_t     = sum_{i >= t} dG_i + sum of ends
//! ```
//!
//! Read forward.rs, then backward.rs; here are the launches.
//!
//! Work:  a cube has one (sequence, head). Unit v has column v of S, U, O and R, which never meet other columns.
//!        f32 throughout; rows come from device memory each time they are used.
//! Edges: K and V up to 64; a last chunk may have fewer tokens.

mod backward;
mod forward;

use crate::SOURCE;
use crate::buffer::{array, buffer, whole};
use crate::refusal::{F32, Refusal, check_heads};
use crate::tensors::{Backward, Forward, Given, Inputs, check_tensors};
use crate::variant::{Decay, Dims, Read, Transition, Variant};
use backward::{GradientsLaunch, SavedLaunch, simple_backward};
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::{C, Form, OutputsLaunch, SizesLaunch, TensorsLaunch, UNITS, simple_forward};

/// Widest key and value.
pub const WIDEST: usize = UNITS;
/// The one variant of this file: Gated DeltaNet.
pub const VARIANT: Variant = Variant {
    decay: Decay::Scalar,
    transition: Transition::Delta { erase: false },
    read: Read::After,
};

/// Form and sizes of a call that the kernels take.
fn check(dims: Dims, x: &Inputs) -> Result<Form, Refusal> {
    check_heads(dims)?;
    check_tensors(VARIANT, x)?;
    let widths = [("K", dims.key_width), ("V", dims.value_width)];
    match widths.into_iter().find(|(_, got)| !(1..=WIDEST).contains(got)) {
        Some((name, got)) => Err(Refusal::Width { name, got, most: WIDEST }),
        None => Ok(Form { source: SOURCE, k: dims.key_width, v: dims.value_width }),
    }
}

fn tensors<R: Runtime>(dims: Dims, x: &Inputs, start: Option<&Handle>) -> TensorsLaunch<R> {
    let Dims { batch, tokens, key_heads, heads, key_width, value_width } = dims;
    let (rows, keys) = (batch * tokens * heads, batch * tokens * key_heads * key_width);
    let state = batch * heads * key_width * value_width;
    // A tensor that is not there is bound to a number of another one that is not read.
    let or_q = |handle: Option<&Handle>, len| match handle {
        Some(handle) => array(handle, len),
        None => array(&x.q, 1),
    };
    TensorsLaunch::new(
        array(&x.q, keys),
        array(&x.k, keys),
        array(&x.v, rows * value_width),
        or_q(x.g.as_ref(), rows),
        or_q(x.beta.as_ref(), rows),
        or_q(start, state),
    )
}

/// The forward pass of [`VARIANT`] in f32.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Inputs,
) -> Result<Forward, Refusal> {
    let form = check(dims, x)?;
    let Dims { batch, tokens, key_heads, heads, key_width, value_width } = dims;
    let values = [batch, tokens, heads, value_width];
    let o = buffer(client, &values, F32);
    let state = buffer(client, &[batch, heads, key_width, value_width], F32);
    let chunks = [batch, heads, tokens.div_ceil(C), key_width, value_width];
    let [states, u] = [buffer(client, &chunks, F32), buffer(client, &values, F32)];
    // SAFETY: tokens, heads and columns end within the shapes above, which the caller promises of `x`.
    #[allow(unsafe_code)]
    unsafe {
        simple_forward::launch_unchecked::<R>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tensors(dims, x, x.state.as_ref()),
            OutputsLaunch::new(whole(&o), whole(&state), whole(&states), whole(&u)),
            SizesLaunch::new(tokens as u32, heads as u32, key_heads as u32),
            x.state.is_some(),
            form,
        );
    }
    Ok(Forward { o, state, saved: vec![states, u] })
}

/// Gradients of every input, from [`Forward::saved`], the gradient of the outputs and (zeros if absent) that of the
/// last state.
///
/// # Errors
/// As [`forward`].
/// # Panics
/// If `saved` is not what [`forward`] left.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    given: Given<'_>,
) -> Result<Backward, Refusal> {
    let Given { x, saved, d_o, d_state } = given;
    let form = check(dims, x)?;
    let Dims { batch, tokens, key_heads, heads, key_width, value_width } = dims;
    let keys = [batch, tokens, heads, key_width];
    let values = [batch, tokens, heads, value_width];
    let [q, k] = [buffer(client, &keys, F32), buffer(client, &keys, F32)];
    let v = buffer(client, &values, F32);
    let [g, beta] = [buffer(client, &values[..3], F32), buffer(client, &values[..3], F32)];
    let state = buffer(client, &[batch, heads, key_width, value_width], F32);
    let [states, u] = saved else { panic!("states and pseudo-values of a forward pass") };
    let saved = SavedLaunch::new(
        array(states, tokens.div_ceil(C) * state.len()),
        array(u, v.len()),
        array(d_o, v.len()),
    );
    let out = GradientsLaunch::new(
        whole(&q),
        whole(&k),
        whole(&v),
        whole(&g),
        whole(&beta),
        whole(&state),
    );
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        simple_backward::launch_unchecked::<R>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            tensors(dims, x, d_state),
            saved,
            out,
            SizesLaunch::new(tokens as u32, heads as u32, key_heads as u32),
            d_state.is_some(),
            form,
        );
    }
    Ok(Backward { q, k, v, a: None, b: None, g: Some(g), beta: Some(beta), state })
}
