//! The recurrences of LSTM and sLSTM, whose gates see the last output of their head, in one launch forward and one back.
//! ```text
//! i, f, z, o = x_t + h_{t-1} R                     [4 D]
//!
//! LSTM
//! k, w       = sigmoid(f), sigmoid(i)
//! c_t        = k c_{t-1} + w tanh(z)
//! h_t        = sigmoid(o) tanh(c_t)
//!
//! dh_t  += dx_{t+1} R^T
//! do     = dh tanh(c) s (1 - s)                    s = sigmoid(o)
//! dc    += dh s (1 - tanh(c)^2)
//! di     = dc tanh(z) w (1 - w)                    df = dc c_{t-1} k sigmoid(-f)
//! dz     = dc w (1 - tanh(z)^2)
//! dc_{t-1} = k dc                                  dx_t = di, df, dz, do
//!
//! sLSTM
//! l          = ln sigmoid(f)
//! m_t        = max(l + m_{t-1}, i)
//! k, w       = e^{l + m_{t-1} - m_t}, e^{i - m_t}
//! c_t        = k c_{t-1} + w tanh(z)
//! n_t        = k n_{t-1} + w
//! h_t        = sigmoid(o) c_t / n_t
//!
//! do     = dh c / n s (1 - s)                      dh and dz as above
//! dc    += dh s / n        dn -= dh h / n          no gradient is taken through m
//! di     = (dc tanh(z) + dn) w                     df = (dc c_{t-1} + dn n_{t-1}) k sigmoid(-f)
//! dc_{t-1}, dn_{t-1} = k dc, k dn
//!
//! x: [B, T, H, 4 D]   R: [H, D, 4 D]   h: [B, T, H, D]   h_0, c, n, m: [B, H, D]
//! ```
//! All numbers are f32. Sources: Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000; Beck et al.,
//! arXiv 2405.04517.
//!
//! Work:   a cube has a head of `together` sequences and takes it through all tokens. A unit owns a column of
//!         `h R`, or several where the device has small cubes, for all of its sequences; then some units own a
//!         cell each, with c, n and m in registers. h and the gates meet in shared memory, two barriers a token.
//!         The unit's part of R stays in registers up to `HELD` cells a head, and comes from cache beyond.
//! Bytes:  forward reads x, writes h and, for a backward pass, seven numbers a cell and token, and each h_{t-1}
//!         once more, head by head. Backward reads the seven and dh, and writes dx. dR is a product of the two
//!         that lie in memory then: the caller's.
//! Edges:  D up to [`WIDEST`], compiled in; B, T and H are run-time values. Sequences past the end repeat the
//!         last one and write nothing. Sums do not depend on `together`.

mod arguments;
mod backward;
mod cube;
mod forward;

use super::column_sums::multiprocessors;
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use arguments::{
    Form, GATES, GivenArraysLaunch, GradientArraysLaunch, OperandsLaunch, ResultArraysLaunch,
    SAVED, SizesLaunch,
};
use backward::lstm_backward;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::lstm_forward;

/// Cells of the widest head.
pub const WIDEST: usize = 256;
/// Units of a cube at most.
const MOST_UNITS: usize = 1024;
/// Sequences of a cube, the most first.
const TOGETHER: [usize; 3] = [4, 2, 1];

/// Which cells the recurrence has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cell {
    /// LSTM's: all gates are sigmoids, and h is c through a tanh.
    Sigmoid,
    /// sLSTM's: the input gate is an exponential, and h is c over n.
    Exponential,
}

/// A recurrence: its cells and sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Of LSTM or sLSTM.
    pub cell: Cell,
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub width: usize,
}

impl Dims {
    /// Numbers of one vector of the state.
    fn state(&self) -> usize {
        self.batch * self.heads * self.width
    }

    /// Numbers of all h.
    fn cells(&self) -> usize {
        self.tokens * self.state()
    }

    /// Numbers of R.
    fn weights(&self) -> usize {
        GATES * self.heads * self.width * self.width
    }
}

/// Vectors before the first token, `[B, H, D]` each.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// h.
    pub h: &'a Handle,
    /// c.
    pub c: &'a Handle,
    /// n and m, of sLSTM alone.
    pub scale: Option<[&'a Handle; 2]>,
}

/// Inputs, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// x.
    pub x: &'a Handle,
    /// R.
    pub r: &'a Handle,
    /// Zeros, and the lowest m, if absent.
    pub state: Option<State<'a>>,
}

/// Outputs of a forward pass.
#[derive(Debug)]
pub struct Outputs {
    /// All h, `[B, T, H, D]`.
    pub h: Buffer,
    /// c after the last token, `[B, H, D]`.
    pub c: Buffer,
    /// n and m likewise, of sLSTM alone.
    pub scale: Option<[Buffer; 2]>,
    /// Tensors that a backward pass needs, where they are kept.
    pub kept: Option<Kept>,
}

/// Kept for a backward pass.
#[derive(Debug)]
pub struct Kept {
    /// Seven numbers of each cell, `[B, T, H, 7, D]`.
    pub saved: Buffer,
    /// h before each token, `[H, B, T, D]`.
    pub before: Buffer,
}

/// Given to a backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// [`Kept::saved`].
    pub saved: &'a Handle,
    /// R with rows and columns of each head swapped, `[H, 4 D, D]`.
    pub r_transposed: &'a Handle,
    /// c before the first token; zeros if absent.
    pub c: Option<&'a Handle>,
    /// n likewise, of sLSTM alone.
    pub n: Option<&'a Handle>,
    /// dh of all tokens; zeros if absent.
    pub d_h: Option<&'a Handle>,
    /// Gradient of the last c; zeros if absent.
    pub d_c: Option<&'a Handle>,
    /// Gradient of the last n, of sLSTM alone; zeros if absent.
    pub d_n: Option<&'a Handle>,
}

/// Gradients.
#[derive(Debug)]
pub struct Gradients {
    /// dx.
    pub x: Buffer,
    /// Of h before the first token.
    pub h: Buffer,
    /// Of c likewise.
    pub c: Buffer,
    /// Of n likewise, of sLSTM alone.
    pub n: Option<Buffer>,
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
    let Dims { cell, batch, tokens, heads, width } = dims;
    if [batch, tokens, heads, width].contains(&0) {
        return Err(Refusal::Empty { batch: batch * heads, tokens: tokens * width });
    }
    if width > WIDEST {
        return Err(Refusal::TooLarge { what: "cells of a head", got: width, most: WIDEST });
    }
    let got = batch.saturating_mul(tokens).saturating_mul(heads * width * SAVED);
    let most = u32::MAX as usize;
    if got > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got, most });
    }
    let hardware = &client.properties().hardware;
    let (shared_memory, most) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    let most = (most.min(hardware.max_cube_dim.0) as usize).min(MOST_UNITS);
    let units = (GATES * width).next_multiple_of(32).min(most);
    // A pass back has gradients and sums of every gate in shared memory.
    let fits = |n: usize| n * width <= units && 8 * GATES * n * width <= shared_memory;
    let fills = |n: usize| n == 1 || batch.div_ceil(n) * heads >= multiprocessors(client);
    let Some(together) = TOGETHER.into_iter().find(|&n| fits(n) && fills(n)) else {
        return Err(Refusal::Device { shared_memory, units: hardware.max_units_per_cube });
    };
    let (across, deep, _) = hardware.max_cube_count;
    for (what, got, most) in
        [("sequences", batch.div_ceil(together), across), ("heads", heads, deep)]
    {
        if got > most as usize {
            return Err(Refusal::TooLarge { what, got, most: most as usize });
        }
    }
    let (keep, given) = (false, [false; 3]);
    Ok(Form { source: SOURCE, cell, width, together, units, state: false, keep, given })
}

fn cubes(dims: Dims, form: &Form) -> (CubeCount, CubeDim) {
    let tiles = dims.batch.div_ceil(form.together) as u32;
    (CubeCount::Static(tiles, dims.heads as u32, 1), CubeDim::new_1d(form.units as u32))
}

/// h and the last state; what [`backward`] needs where `keep` wants it.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Inputs<'_>,
    keep: bool,
) -> Result<Outputs, Refusal> {
    let form = Form { keep, state: x.state.is_some(), ..form(client, dims)? };
    let scaled = dims.cell == Cell::Exponential;
    assert!(x.state.is_none_or(|state| state.scale.is_some() == scaled), "n and m are sLSTM's");
    let Dims { cell, batch, tokens, heads, width } = dims;
    let new = |shape: &[usize]| buffer(client, shape, F32);
    let last = || new(&[batch, heads, width]);
    let found = Outputs {
        h: new(&[batch, tokens, heads, width]),
        c: last(),
        scale: (cell == Cell::Exponential).then(|| [last(), last()]),
        kept: keep.then(|| Kept {
            saved: new(&[batch, tokens, heads, SAVED, width]),
            before: new(&[heads, batch, tokens, width]),
        }),
    };
    let unwritten = [(); 4].map(|()| new(&[1]));
    let [a, b, c, d] = &unwritten;
    let kept = found.kept.as_ref().map(|kept| [&kept.saved, &kept.before]);
    let [saved, before] = kept.unwrap_or([a, b]);
    let [n, m] = found.scale.as_ref().map_or([c, d], |[n, m]| [n, m]);
    let to = ResultArraysLaunch::new(
        whole(&found.h),
        whole(&found.c),
        whole(n),
        whole(m),
        whole(saved),
        whole(before),
    );
    let (count, dim) = cubes(dims, &form);
    // SAFETY: units past the ends read the last numbers and write nothing; the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        lstm_forward::launch_unchecked::<R>(
            client,
            count,
            dim,
            operands(dims, x),
            to,
            sizes(dims),
            form,
        );
    }
    Ok(found)
}

/// Gradients of x and of the state before the first token.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    given: Given<'_>,
) -> Result<Gradients, Refusal> {
    let there = [given.d_h, given.d_c, given.d_n].map(|d| d.is_some());
    let scaled = given.c.is_some() && dims.cell == Cell::Exponential;
    assert_eq!(given.n.is_some(), scaled, "n before the first token is sLSTM's, beside c");
    let form = Form { state: given.c.is_some(), given: there, ..form(client, dims)? };
    let Dims { cell, batch, tokens, heads, width } = dims;
    let first = || buffer(client, &[batch, heads, width], F32);
    let found = Gradients {
        x: buffer(client, &[batch, tokens, heads, GATES * width], F32),
        h: first(),
        c: first(),
        n: (cell == Cell::Exponential).then(first),
    };
    let unwritten = buffer(client, &[1], F32);
    let to = GradientArraysLaunch::new(
        whole(&found.x),
        whole(&found.h),
        whole(&found.c),
        whole(found.n.as_ref().unwrap_or(&unwritten)),
    );
    let (count, dim) = cubes(dims, &form);
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        lstm_backward::launch_unchecked::<R>(
            client,
            count,
            dim,
            given_arrays(dims, given),
            to,
            sizes(dims),
            form,
        );
    }
    Ok(found)
}

/// A tensor, or another where it is absent and not read.
fn optional<R: Runtime>(tensor: Option<&Handle>, other: &Handle, numbers: usize) -> ArrayArg<R> {
    tensor.map_or_else(|| array(other, 1), |tensor| array(tensor, numbers))
}

fn operands<R: Runtime>(dims: Dims, x: &Inputs<'_>) -> OperandsLaunch<R> {
    let state = |part: Option<&Handle>| optional(part, x.x, dims.state());
    OperandsLaunch::new(
        array(x.x, GATES * dims.cells()),
        array(x.r, dims.weights()),
        state(x.state.map(|state| state.h)),
        state(x.state.map(|state| state.c)),
        state(x.state.and_then(|state| Some(state.scale?[0]))),
        state(x.state.and_then(|state| Some(state.scale?[1]))),
    )
}

fn given_arrays<R: Runtime>(dims: Dims, given: Given<'_>) -> GivenArraysLaunch<R> {
    let other = |tensor, numbers| optional(tensor, given.saved, numbers);
    GivenArraysLaunch::new(
        array(given.saved, SAVED * dims.cells()),
        array(given.r_transposed, dims.weights()),
        other(given.c, dims.state()),
        other(given.n, dims.state()),
        other(given.d_h, dims.cells()),
        other(given.d_c, dims.state()),
        other(given.d_n, dims.state()),
    )
}

fn sizes<R: Runtime>(dims: Dims) -> SizesLaunch<R> {
    SizesLaunch::new(dims.batch as u32, dims.tokens as u32, dims.heads as u32)
}

#[cfg(test)]
#[path = "lstm_tests.rs"]
mod tests;
