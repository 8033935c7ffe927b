//! TTT-Linear: a linear map that learns to tell values from keys by gradient descent, whole sequences of
//! mini-batches in one launch forward and one back.
//! ```text
//! Z   = K W + c                              W [K, K], c [K]: of the mini-batch's start, no mean over outputs
//! X   = Z / s             s = sqrt(mean Z^2 + epsilon), of each row
//! H   = gamma^2 X - gamma (V - K - beta)
//! G   = (H - mean H - X m) / s               m = mean(H X): the inner loss's gradient by Z
//! P   = Q K^T + 1         share_ij = t_i rate_j, j <= i
//! O   = Q W + c - (share P) G                each query through the weights after its own token
//! y   = Q + gamma N + beta                   N = O / u, u = sqrt(mean O^2 + epsilon)
//! W' -= K^T F             c' -= sum F        F = t_b rate G, b the last token
//!
//! dN  = gamma dy                             dO = (dN - N mean(dN N)) / u
//! dS  = - dO G^T, j <= i                     S = share P
//! U   = K dW' + dc'
//! E   = - t_b rate U - S^T dO                dG
//! dH  = (E - mean E - X mean(E X)) / s
//! dX  = gamma^2 dH - (E m + H mean(E X)) / s
//! dZ  = dX / s - X (sum(E G) + sum(dX X)) / (s K)
//! dW  = dW' + Q^T dO + K^T dZ                dc = dc' + sum(dO + dZ)
//! dQ  = dy + dO W^T + (share dS) K
//! dK  = dZ W^T + (share dS)^T Q - F dW'^T + gamma dH
//! dV  = - gamma dH
//! dgamma = sum(dy N + 2 gamma X dH - dH (V - K - beta))       dbeta = sum(dy + gamma dH)
//! dt_i   = sum_j dS_ij rate_j P_ij, and of t_b - sum_j rate_j u_j        u_j = U_j . G_j
//! drate_j = sum_i dS_ij t_i P_ij - t_b u_j
//!
//! q, k, v, y: [B, T, H, K]   rate: [B, T, H]   t: [b]   gamma, beta: [H, K]   W over c: [B, H, K + 1, K]
//! ```
//! q and k are rotated already. All numbers are f32, products too. Source: Sun et al., arXiv 2407.04620.
//!
//! Work:   a cube has a head of one sequence and takes it through all mini-batches. A unit owns a column of W
//!         and one of `parts` runs of its rows, in registers; a pass back owns the same of dW and of its
//!         transpose. Rows of a mini-batch lie in shared memory, and sums of the parts meet there.
//! Bytes:  forward reads q, k, v and rates, writes y and, for a backward pass, W of each mini-batch's start. A
//!         backward pass reads these and dy, makes the mini-batch's numbers anew and writes the gradients; those
//!         of t, gamma and beta once for each sequence: the caller adds them up.
//! Edges:  K up to [`WIDEST`] and b are compiled in; B, T, a multiple of b, and H are run-time values. Shared
//!         memory bounds b K: 16 tokens of 64 numbers take 30 KiB.

pub(super) mod arguments;
pub(super) mod backward;
pub(super) mod forward;
pub(super) mod inner;
pub(super) mod tiles;

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use arguments::{
    Form, GivenArraysLaunch, GradientArraysLaunch, OperandsLaunch, ResultArraysLaunch, SizesLaunch,
};
use backward::ttt_linear_backward;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::ttt_linear_forward;

/// Channels of the widest head.
pub const WIDEST: usize = 128;
/// Units of a cube, where a head has a number for each.
const UNITS: usize = 256;
/// Rows of a column that a unit owns, where the device has cubes as large.
const RUN: usize = 16;
/// Rows of a column that a unit owns at most: of two matrices in a pass back, in registers.
const LONGEST_RUN: usize = 64;
/// Tensors of a pass back, and what counts their numbers.
const BINDINGS: usize = 19;

/// Sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// T, a multiple of b.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// K.
    pub width: usize,
    /// b, tokens of a mini-batch.
    pub rows: usize,
}

impl Dims {
    pub(super) fn mini_batches(&self) -> usize {
        self.tokens / self.rows
    }

    /// Numbers of q.
    pub(super) fn numbers(&self) -> usize {
        self.batch * self.tokens * self.heads * self.width
    }

    /// Numbers of W and c of all heads.
    fn weights(&self) -> usize {
        self.batch * self.heads * (self.width + 1) * self.width
    }
}

/// Inputs, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// q.
    pub q: &'a Handle,
    /// k.
    pub k: &'a Handle,
    /// v.
    pub v: &'a Handle,
    /// rate.
    pub rate: &'a Handle,
    /// t.
    pub scale: &'a Handle,
    /// gamma.
    pub norm_weight: &'a Handle,
    /// beta.
    pub norm_bias: &'a Handle,
    /// W over c at the start.
    pub weights: &'a Handle,
    /// epsilon.
    pub epsilon: f64,
}

/// Outputs of a forward pass.
#[derive(Debug)]
pub struct Outputs {
    /// y.
    pub y: Buffer,
    /// W over c after the last token.
    pub weights: Buffer,
    /// W over c of each mini-batch's start, `[B, H, T / b, K + 1, K]`, where they are kept.
    pub starts: Option<Buffer>,
}

/// Given to a backward pass beside the inputs, of which it does not read the weights.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// [`Outputs::starts`].
    pub starts: &'a Handle,
    /// dy; zeros if absent.
    pub d_y: Option<&'a Handle>,
    /// Gradient of the last W and c; zeros if absent.
    pub d_weights: Option<&'a Handle>,
}

/// Gradients, some of them of each sequence, which are to be added up.
#[derive(Debug)]
pub struct Gradients {
    /// dq.
    pub q: Buffer,
    /// dk.
    pub k: Buffer,
    /// dv.
    pub v: Buffer,
    /// drate.
    pub rate: Buffer,
    /// dt of each sequence and head, `[B H, b]`.
    pub scale: Buffer,
    /// dgamma of each sequence, `[B, H, K]`.
    pub norm_weight: Buffer,
    /// dbeta likewise.
    pub norm_bias: Buffer,
    /// Gradient of the first W and c.
    pub weights: Buffer,
}

impl Gradients {
    /// New ones, with `weights` for those of the first weights.
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, dims: Dims, weights: Buffer) -> Self {
        let Dims { batch, tokens, heads, width, rows } = dims;
        let new = |shape: &[usize]| buffer(client, shape, F32);
        let [q, k, v] = [(); 3].map(|()| new(&[batch, tokens, heads, width]));
        Self {
            q,
            k,
            v,
            rate: new(&[batch, tokens, heads]),
            scale: new(&[batch * heads, rows]),
            norm_weight: new(&[batch, heads, width]),
            norm_bias: new(&[batch, heads, width]),
            weights,
        }
    }

    pub(super) fn launch<R: Runtime>(&self) -> GradientArraysLaunch<R> {
        GradientArraysLaunch::new(
            whole(&self.q),
            whole(&self.k),
            whole(&self.v),
            whole(&self.rate),
            whole(&self.scale),
            whole(&self.norm_weight),
            whole(&self.norm_bias),
            whole(&self.weights),
        )
    }
}

/// A tensor, or where there is none one that is not read.
pub(super) fn given_or<R: Runtime>(
    x: &Inputs<'_>,
    tensor: Option<&Handle>,
    numbers: usize,
) -> ArrayArg<R> {
    tensor.map_or_else(|| array(x.q, 1), |tensor| array(tensor, numbers))
}

/// Whether the kernels take this.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<(), Refusal> {
    form(client, dims).map(|_| ())
}

/// Why kernels with so many tensors, and so many weights a head, do not take these sizes, whatever their plan is.
pub(super) fn refused<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    weights: usize,
    bindings: usize,
) -> Option<Refusal> {
    let Dims { batch, tokens, heads, width, rows } = dims;
    if [batch, tokens, heads, width, rows].contains(&0) {
        return Some(Refusal::Empty { batch: batch * heads, tokens: tokens * width * rows });
    }
    if !tokens.is_multiple_of(rows) {
        return Some(Refusal::Lengths { batch, tokens });
    }
    let hardware = &client.properties().hardware;
    let per_head = dims.mini_batches().saturating_mul(weights).max(tokens * width);
    let (across, deep, _) = hardware.max_cube_count;
    let limits = [
        ("channels of a head", width, WIDEST),
        ("numbers in a tensor", per_head.saturating_mul(batch * heads), u32::MAX as usize),
        ("buffers of a kernel", bindings, hardware.max_bindings as usize),
        ("sequences", batch, across as usize),
        ("heads", heads, deep as usize),
    ];
    let beyond = limits.into_iter().find(|(_, got, most)| got > most);
    beyond.map(|(what, got, most)| Refusal::TooLarge { what, got, most })
}

/// The plan, without what depends on the tensors that are there.
fn form<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<Form, Refusal> {
    let Dims { width, rows, .. } = dims;
    if let Some(refusal) = refused(client, dims, (width + 1) * width, BINDINGS) {
        return Err(refusal);
    }
    let hardware = &client.properties().hardware;
    let units = hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize;
    // Narrow heads have shorter runs, so that cubes do not get small.
    let parts = width.div_ceil(RUN).max((UNITS / width).min(width / 4));
    let parts = parts.min(units / width).max(1);
    let form = Form { source: SOURCE, width, rows, parts, keep: false, given: [false; 2] };
    let shared_memory = hardware.max_shared_memory_size;
    if form.units() > units || form.run() > LONGEST_RUN || form.bytes() > shared_memory {
        return Err(Refusal::Device { shared_memory, units: hardware.max_units_per_cube });
    }
    Ok(form)
}

fn cubes(dims: Dims, form: &Form) -> (CubeCount, CubeDim) {
    let count = CubeCount::Static(dims.batch as u32, dims.heads as u32, 1);
    (count, CubeDim::new_1d(form.units() as u32))
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
    let form = Form { keep, ..form(client, dims)? };
    let Dims { batch, tokens, heads, width, .. } = dims;
    let new = |shape: &[usize]| buffer(client, shape, F32);
    let starts = || new(&[batch, heads, dims.mini_batches(), width + 1, width]);
    let found = Outputs {
        y: new(&[batch, tokens, heads, width]),
        weights: new(&[batch, heads, width + 1, width]),
        starts: keep.then(starts),
    };
    let unwritten = new(&[1]);
    let to = ResultArraysLaunch::new(
        whole(&found.y),
        whole(&found.weights),
        whole(found.starts.as_ref().unwrap_or(&unwritten)),
    );
    let (count, dim) = cubes(dims, &form);
    let x = operands(dims, x, array(x.weights, dims.weights()));
    // SAFETY: units read and write within the sizes, which the caller promises.
    #[allow(unsafe_code)]
    unsafe {
        ttt_linear_forward::launch_unchecked::<R>(client, count, dim, x, to, sizes(dims), form);
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
    let there = [given.d_y.is_some(), given.d_weights.is_some()];
    let form = Form { given: there, ..form(client, dims)? };
    let weights = buffer(client, &[dims.batch, dims.heads, dims.width + 1, dims.width], F32);
    let found = Gradients::new(client, dims, weights);
    let from = GivenArraysLaunch::new(
        given_or(x, given.d_y, dims.numbers()),
        given_or(x, given.d_weights, dims.weights()),
    );
    let to = found.launch();
    let (count, dim) = cubes(dims, &form);
    let starts = array(given.starts, dims.weights() * dims.mini_batches());
    let x = operands(dims, x, starts);
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        ttt_linear_backward::launch_unchecked::<R>(
            client,
            count,
            dim,
            x,
            from,
            to,
            sizes(dims),
            form,
        );
    }
    Ok(found)
}

pub(super) fn operands<R: Runtime>(
    dims: Dims,
    x: &Inputs<'_>,
    weights: ArrayArg<R>,
) -> OperandsLaunch<R> {
    let Dims { batch, tokens, heads, width, rows } = dims;
    OperandsLaunch::new(
        array(x.q, dims.numbers()),
        array(x.k, dims.numbers()),
        array(x.v, dims.numbers()),
        array(x.rate, batch * tokens * heads),
        array(x.scale, rows),
        array(x.norm_weight, heads * width),
        array(x.norm_bias, heads * width),
        weights,
        x.epsilon as f32,
    )
}

pub(super) fn sizes<R: Runtime>(dims: Dims) -> SizesLaunch<R> {
    SizesLaunch::new(dims.mini_batches() as u32, dims.heads as u32)
}

#[cfg(test)]
#[path = "ttt_linear_tests.rs"]
pub(super) mod tests;
