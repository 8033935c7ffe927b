//! TTT-MLP: a network of two layers that learns to tell values from keys by gradient descent, whole sequences of
//! mini-batches in one launch forward and one back.
//! ```text
//! Z1  = K W1 + c1         A = gelu(Z1)       W1 [K, F], c1 [F]: of the mini-batch's start
//! Z2  = A W2 + c2                            W2 [F, K], c2 [K]: likewise, no mean over outputs
//! X, G2                                      from Z2 as in TTT-Linear: the inner loss's gradient by Z2
//! G1  = Y gelu'(Z1)       Y = G2 W2^T
//! P1  = Q K^T + 1         share_ij = t_i rate_j, j <= i
//! O1  = Q W1 + c1 - (share P1) G1            B = gelu(O1)
//! P2  = B A^T + 1
//! O2  = B W2 + c2 - (share P2) G2            each query through the weights after its own token
//! y   = Q + gamma N + beta                   N = O2 / u, as in TTT-Linear
//! W1' -= K^T F1           W2' -= A^T F2      F = t_b rate G, b the last token; c' -= sum F
//!
//! dO2                                        from dy as in TTT-Linear
//! dB  = dO2 W2^T + (share dS2) A             dS = - dO G^T, j <= i        dO1 = dB gelu'(O1)
//! U2  = A dW2' + dc2'     U1 = K dW1' + dc1'
//! E2  = - t_b rate U2 - (share P2)^T dO2     E1 = - t_b rate U1 - (share P1)^T dO1
//! dY  = E1 gelu'(Z1)      dG2 = E2 + dY W2   dZ2 from it as in TTT-Linear
//! dA  = (share dS2)^T B - F2 dW2'^T + dZ2 W2^T
//! dZ1 = dA gelu'(Z1) + E1 Y gelu''(Z1)
//! dW2 = dW2' + B^T dO2 + dY^T G2 + A^T dZ2   dc2 = dc2' + sum(dO2 + dZ2)
//! dW1 = dW1' + Q^T dO1 + K^T dZ1             dc1 = dc1' + sum(dO1 + dZ1)
//! dQ  = dy + dO1 W1^T + (share dS1) K
//! dK  = dZ1 W1^T + (share dS1)^T Q - F1 dW1'^T + what goes through the inner loss
//! dv, dgamma, dbeta, dt, drate as in TTT-Linear, the last two of both layers
//!
//! q, k, v, y: [B, T, H, K]   rate: [B, T, H]   t: [b]   gamma, beta: [H, K]
//! W1 over c1: [B, H, K + 1, F]   W2 over c2: [B, H, F + 1, K]
//! ```
//! q and k are rotated already. gelu is the form with a hyperbolic tangent. All numbers are f32, products too.
//! Source: Sun et al., arXiv 2407.04620.
//!
//! Work:   a cube has a head of one sequence and takes it through all mini-batches. Rows of a mini-batch lie in
//!         shared memory, `[b, K]` and `[b, F]`; weights and their gradients in memory, where a cube alone reads and
//!         writes its own, between barriers of the storage. A product gives a unit a column of the result and a run
//!         of what is summed over, and keeps sums of up to eight rows in registers.
//! Bytes:  forward reads q, k, v and rates and writes y and, for a backward pass, the weights of each mini-batch's
//!         start. A backward pass reads these and dy and makes the mini-batch's numbers anew. A product, or what a
//!         product adds to weights, reads its matrix once for eight rows: of 16 rows, forward 14 times and a backward
//!         pass 38 times a mini-batch, from cache.
//! Edges:  K up to 128, F / K and b are compiled in; B, T, a multiple of b, and H are run-time values. F is at most the
//!         units of a cube. Shared memory bounds b F: a backward pass of 16 tokens of K = 32 and F = 128 takes
//!         76 KiB, of 64 and 256 144.

mod arguments;
mod backward;
mod forward;
mod inner;
mod products;

use super::ttt_linear::arguments::{GivenArraysLaunch, ResultArraysLaunch};
use super::ttt_linear::{self, given_or, operands, refused, sizes};
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use arguments::{Form, LayerArraysLaunch};
use backward::ttt_mlp_backward;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::ttt_mlp_forward;

/// Units of a cube, where F is no larger.
const UNITS: usize = 256;
/// Tensors of a pass back, and what counts their numbers.
const BINDINGS: usize = 22;

/// Sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, T, H, K and b.
    pub rows: ttt_linear::Dims,
    /// F / K.
    pub expand: usize,
}

impl Dims {
    /// F.
    fn hidden(&self) -> usize {
        self.expand * self.rows.width
    }

    /// Numbers of the weights of both layers of all heads.
    fn weights(&self, form: &Form) -> [usize; 2] {
        form.weights().map(|numbers| numbers * self.rows.batch * self.rows.heads)
    }
}

/// Inputs, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Inputs that TTT-Linear has too; its weights are W1 over c1 at the start.
    pub rows: ttt_linear::Inputs<'a>,
    /// W2 over c2 at the start.
    pub second: &'a Handle,
}

/// Outputs of a forward pass.
#[derive(Debug)]
pub struct Outputs {
    /// y.
    pub y: Buffer,
    /// W1 over c1 and W2 over c2 after the last token.
    pub weights: [Buffer; 2],
    /// The same at each mini-batch's start, `[B, H, T / b, ..]`, where they are kept.
    pub starts: Option<[Buffer; 2]>,
}

/// Given to a backward pass beside the inputs, of which it does not read the weights.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// [`Outputs::starts`].
    pub starts: [&'a Handle; 2],
    /// dy; zeros if absent.
    pub d_y: Option<&'a Handle>,
    /// Gradients of the last weights; zeros if absent.
    pub d_weights: [Option<&'a Handle>; 2],
}

/// Gradients, some of them of each sequence, which are to be added up.
#[derive(Debug)]
pub struct Gradients {
    /// Gradients that TTT-Linear has too; its weights are W1 over c1.
    pub rows: ttt_linear::Gradients,
    /// Gradient of the first W2 and c2.
    pub second: Buffer,
}

/// Whether the kernels take this.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<(), Refusal> {
    form(client, dims).map(|_| ())
}

/// The plan, without what depends on the tensors that are there.
fn form<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<Form, Refusal> {
    let (of, hidden) = (dims.rows, dims.hidden());
    let numbers = (of.width + 1).saturating_mul(hidden + 1);
    if let Some(refusal) = refused(client, of, numbers, BINDINGS) {
        return Err(refusal);
    }
    if hidden == 0 {
        return Err(Refusal::Empty { batch: of.batch * of.heads, tokens: 0 });
    }
    let hardware = &client.properties().hardware;
    let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize;
    if hidden > most {
        return Err(Refusal::TooLarge { what: "hidden numbers of a head", got: hidden, most });
    }
    // Narrow heads have cubes that are small: a unit sums over four numbers at least.
    let units = hidden * (UNITS.min(most) / hidden).min(of.width / 4).max(1);
    let form = Form::new(of, hidden, units);
    // A pass back is what decides: a forward pass that none can follow would be lost.
    let shared_memory = hardware.max_shared_memory_size;
    match form.bytes() <= shared_memory {
        true => Ok(form),
        false => Err(Refusal::Device { shared_memory, units: hardware.max_units_per_cube }),
    }
}

fn cubes(dims: Dims, form: &Form) -> (CubeCount, CubeDim) {
    let count = CubeCount::Static(dims.rows.batch as u32, dims.rows.heads as u32, 1);
    (count, CubeDim::new_1d(form.head.units() as u32))
}

/// New tensors of both layers' weights, `[B, H, .., from + 1, to]`.
fn layers<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    mini_batches: Option<usize>,
) -> [Buffer; 2] {
    let (of, hidden) = (dims.rows, dims.hidden());
    [[of.width + 1, hidden], [hidden + 1, of.width]].map(|layer| {
        let pair = [of.batch, of.heads].into_iter();
        let shape: Vec<usize> = pair.chain(mini_batches).chain(layer).collect();
        buffer(client, &shape, F32)
    })
}

/// y and the last weights; what [`backward`] needs where `keep` wants it.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Inputs<'_>,
    keep: bool,
) -> Result<Outputs, Refusal> {
    let mut form = form(client, dims)?;
    form.head.keep = keep;
    let ttt_linear::Dims { batch, tokens, heads, width, .. } = dims.rows;
    let found = Outputs {
        y: buffer(client, &[batch, tokens, heads, width], F32),
        weights: layers(client, dims, None),
        starts: keep.then(|| layers(client, dims, Some(dims.rows.mini_batches()))),
    };
    let unwritten = [(); 2].map(|()| buffer(client, &[1], F32));
    let [first, second] = &found.weights;
    let [first_starts, second_starts] = found.starts.as_ref().unwrap_or(&unwritten);
    let to = ResultArraysLaunch::new(whole(&found.y), whole(first), whole(first_starts));
    let to_second = LayerArraysLaunch::new(whole(second), whole(second_starts));
    let (count, dim) = cubes(dims, &form);
    let [of_first, of_second] = dims.weights(&form);
    let x_rows = operands(dims.rows, &x.rows, array(x.rows.weights, of_first));
    let from_second = array(x.second, of_second);
    // SAFETY: units read and write within the sizes, which the caller promises.
    #[allow(unsafe_code)]
    unsafe {
        ttt_mlp_forward::launch_unchecked::<R>(
            client,
            count,
            dim,
            x_rows,
            from_second,
            to,
            to_second,
            sizes(dims.rows),
            form,
        );
    }
    Ok(found)
}

/// Gradients of every input.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Inputs<'_>,
    given: Given<'_>,
) -> Result<Gradients, Refusal> {
    let mut form = form(client, dims)?;
    form.head.given[0] = given.d_y.is_some();
    form.there = given.d_weights.map(|d| d.is_some());
    let [weights, second] = layers(client, dims, None);
    let rows = ttt_linear::Gradients::new(client, dims.rows, weights);
    let [of_first, of_second] = dims.weights(&form);
    let [d_first, d_second] = given.d_weights;
    let from = GivenArraysLaunch::new(
        given_or(&x.rows, given.d_y, dims.rows.numbers()),
        given_or(&x.rows, d_first, of_first),
    );
    let from_second = given_or(&x.rows, d_second, of_second);
    let batches = dims.rows.mini_batches();
    let [first_starts, second_starts] = given.starts;
    let x_rows = operands(dims.rows, &x.rows, array(first_starts, of_first * batches));
    let second_starts = array(second_starts, of_second * batches);
    let (count, dim) = cubes(dims, &form);
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        ttt_mlp_backward::launch_unchecked::<R>(
            client,
            count,
            dim,
            x_rows,
            second_starts,
            from,
            from_second,
            rows.launch(),
            whole(&second),
            sizes(dims.rows),
            form,
        );
    }
    Ok(Gradients { rows, second })
}

#[cfg(test)]
#[path = "ttt_mlp_tests.rs"]
mod tests;
