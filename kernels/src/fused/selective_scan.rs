//! Mamba's recurrence, whose step sizes, input and output vectors depend on the data, in one launch forward and
//! one back.
//! ```text
//! k_tin   = f(e^{dt_ti A_in})            f(e) = e, or 2 e - 1 where states may change their sign
//! h_tin   = k_tin h_{t-1,in} + dt_ti x_ti b_tn
//! y_ti    = sum_n c_tn h_tin
//!
//! dh_tin  = dy_ti c_tn + k_{t+1,in} dh_{t+1,in}       from the last state's gradient on
//! dx_ti   = sum_n dh dt b        ddt_ti = sum_n dh (h_{t-1} f' e^{dt A} A + x b)
//! db_tn   = sum_i dh dt x        dc_tn  = sum_i dy h        dA_in = sum_t dh h_{t-1} f' e^{dt A} dt
//!
//! x, dt, y: [B, T, I]   A: [I, N]   b, c: [B, T, N]   h_0, h_T: [B, I, N]   kept h: [B, ceil(T / 4), I, N]
//! ```
//! All numbers are f32; A, b, c and states begin at a multiple of 16 bytes. Source: Gu and Dao, arXiv 2312.00752.
//!
//! Work:   a unit has some numbers of one channel's state in registers, all of them up to 16 where there are many
//!         channels, and takes them through all tokens. Units that share a channel, and those of the channels that
//!         share b and c, add up in shared memory.
//! Bytes:  forward reads x, dt, b, c, writes y and, for a backward pass, every fourth h; backward reads all of these,
//!         makes the h between again, and writes the gradients, db and dc once for each cube of channels and dA once
//!         for each sequence: the caller adds them up.
//! Edges:  N is a power of two up to 256, and compiled in; B, T and I are run-time values. Channels and tokens
//!         past the ends repeat the last ones and count for nothing.

mod scan;

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use cubecl::prelude::*;
use cubecl::server::Handle;
use scan::{
    GivenArraysLaunch, GradientArraysLaunch, OperandsLaunch, SizesLaunch, scan_backward,
    scan_forward,
};

/// Units of a cube.
const UNITS: usize = 64;
/// Tokens between two states that are kept.
const BLOCK: usize = 4;
/// Tokens whose terms wait in shared memory at once.
const TOGETHER: usize = 2;
/// Most states of a channel.
const MOST_STATES: usize = 256;
/// Numbers of a state that a unit has: where there are many channels, and where there are few.
const NUMBERS: [usize; 2] = [16, 4];
/// Units that a GPU wants before a unit should have many numbers.
const MANY_UNITS: usize = 1 << 15;

/// Sizes of one scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// I.
    pub channels: usize,
    /// N.
    pub states: usize,
}

impl Dims {
    /// Numbers of a channel's state that are a unit's, on a device of so much shared memory.
    fn numbers(&self, shared_memory: usize) -> usize {
        let [many, few] = NUMBERS.map(|most| self.states.min(most));
        let units = self.batch.saturating_mul(self.channels * self.states / many);
        let fits = self.memory(many) <= shared_memory;
        if units < MANY_UNITS || !fits { few } else { many }
    }

    /// Bytes of shared memory where so many numbers are a unit's: of db and dc, and, where units share a channel, of
    /// dx and ddt.
    fn memory(&self, numbers: usize) -> usize {
        let of_channels = if numbers == self.states { 1 } else { 2 * BLOCK * UNITS };
        4 * (2 * TOGETHER * numbers * UNITS + of_channels)
    }

    /// States of a channel that a forward pass keeps.
    fn blocks(&self) -> usize {
        self.tokens.div_ceil(BLOCK)
    }
}

/// Inputs, laid out as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// x.
    pub x: &'a Handle,
    /// dt.
    pub dt: &'a Handle,
    /// A.
    pub a: &'a Handle,
    /// b.
    pub b: &'a Handle,
    /// c.
    pub c: &'a Handle,
    /// h_0; zeros if absent.
    pub state: Option<&'a Handle>,
    /// Whether states may change their sign.
    pub signed: bool,
}

/// Outputs of a forward pass.
#[derive(Debug)]
pub struct Outputs {
    /// y.
    pub y: Buffer,
    /// h_T.
    pub state: Buffer,
    /// The states before the first of every four tokens, `[B, ceil(T / 4), I, N]`, where they are kept.
    pub h: Option<Buffer>,
}

/// Given to a backward pass beside the inputs.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// The states that the forward pass kept.
    pub h: &'a Handle,
    /// dy; zeros if absent.
    pub d_y: Option<&'a Handle>,
    /// Gradient of h_T; zeros if absent.
    pub d_state: Option<&'a Handle>,
}

/// Gradients, some of them in parts that are to be added up.
#[derive(Debug)]
pub struct Gradients {
    /// dx.
    pub x: Buffer,
    /// ddt.
    pub dt: Buffer,
    /// dA of each sequence, `[B, I, N]`.
    pub a: Buffer,
    /// db of each cube's channels, `[parts, B, T, N]`.
    pub b: Buffer,
    /// dc likewise.
    pub c: Buffer,
    /// Gradient of h_0.
    pub state: Buffer,
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// N.
    states: usize,
    /// Numbers of a state that are a unit's.
    numbers: usize,
    /// Numbers of a vector.
    vector: usize,
    signed: bool,
    /// Whether there is a state before the first token.
    state: bool,
    /// Whether states are kept.
    keep: bool,
    /// Whether there is a gradient of y.
    d_y: bool,
    /// Whether there is a gradient of the last state.
    d_state: bool,
}

impl Form {
    fn new<R: Runtime>(client: &ComputeClient<R>, dims: Dims, x: &Inputs<'_>) -> Self {
        let numbers = dims.numbers(client.properties().hardware.max_shared_memory_size);
        Self {
            source: SOURCE,
            states: dims.states,
            numbers,
            vector: numbers.min(4),
            signed: x.signed,
            state: x.state.is_some(),
            keep: false,
            d_y: false,
            d_state: false,
        }
    }

    /// Units of a channel.
    fn lanes(&self) -> usize {
        self.states / self.numbers
    }

    /// Channels of a cube.
    fn each(&self) -> usize {
        UNITS / self.lanes()
    }

    /// Cubes that share the channels of a sequence.
    fn parts(&self, dims: Dims) -> usize {
        dims.channels.div_ceil(self.each())
    }

    /// Vectors of a unit.
    fn vectors(&self) -> usize {
        self.numbers / self.vector
    }

    /// Numbers of shared memory for sums over units of a channel, dx and ddt behind each other.
    fn channel_terms(&self) -> usize {
        if self.lanes() == 1 { 1 } else { 2 * BLOCK * UNITS }
    }
}

/// Whether the kernels take this.
///
/// # Errors
/// [`Refusal`] names what is wrong.
pub fn check<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<(), Refusal> {
    let Dims { batch, tokens, channels, states } = dims;
    if [batch, tokens, channels, states].contains(&0) {
        return Err(Refusal::Empty { batch: batch * channels, tokens: tokens * states });
    }
    if !states.is_power_of_two() || states > MOST_STATES {
        let what = "states of a channel, a power of two";
        return Err(Refusal::TooLarge { what, got: states, most: MOST_STATES });
    }
    // The largest are rows, kept states, and db and dc of parts of at least four channels.
    let per_token = channels.max(channels.div_ceil(4) * states);
    let (got, most) = (batch.saturating_mul((tokens + BLOCK) * per_token), u32::MAX as usize);
    if got > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got, most });
    }
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    let [_, few] = NUMBERS.map(|most| states.min(most));
    if shared_memory < dims.memory(few) || units < UNITS as u32 {
        return Err(Refusal::Device { shared_memory, units });
    }
    let (across, deep, _) = hardware.max_cube_count;
    // A cube has a channel or more.
    for (what, got, most) in [("channels", channels, across), ("sequences", batch, deep)] {
        if got > most as usize {
            return Err(Refusal::TooLarge { what, got, most: most as usize });
        }
    }
    Ok(())
}

/// y and the last state; every fourth h where `keep` wants what [`backward`] needs.
///
/// # Errors
/// As [`check`]; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Inputs<'_>,
    keep: bool,
) -> Result<Outputs, Refusal> {
    check(client, dims)?;
    let Dims { batch, tokens, channels, states } = dims;
    let y = buffer(client, &[batch, tokens, channels], F32);
    let state = buffer(client, &[batch, channels, states], F32);
    let h = keep.then(|| buffer(client, &[batch, dims.blocks(), channels, states], F32));
    let unwritten = buffer(client, &[4], F32);
    let form = Form { keep, ..Form::new(client, dims, x) };
    // SAFETY: units past the ends read the last numbers and write nothing; the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        scan_forward::launch_unchecked::<R>(
            client,
            CubeCount::Static(form.parts(dims) as u32, batch as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            operands(dims, x),
            whole(&y),
            whole(&state),
            whole(h.as_ref().unwrap_or(&unwritten)),
            sizes(dims),
            form,
            form.vector,
        );
    }
    Ok(Outputs { y, state, h })
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
    check(client, dims)?;
    let Dims { batch, tokens, channels, states } = dims;
    let (d_y, d_state) = (given.d_y.is_some(), given.d_state.is_some());
    let form = Form { d_y, d_state, ..Form::new(client, dims, x) };
    let rows = || buffer(client, &[batch, tokens, channels], F32);
    let parts = || buffer(client, &[form.parts(dims), batch, tokens, states], F32);
    let per_sequence = || buffer(client, &[batch, channels, states], F32);
    let found = Gradients {
        x: rows(),
        dt: rows(),
        a: per_sequence(),
        b: parts(),
        c: parts(),
        state: per_sequence(),
    };
    let state = batch * channels * states;
    let given = GivenArraysLaunch::new(
        array(given.h, state * dims.blocks()),
        optional(given.d_y, x, batch * tokens * channels),
        optional(given.d_state, x, state),
    );
    let to = GradientArraysLaunch::new(
        whole(&found.x),
        whole(&found.dt),
        whole(&found.a),
        whole(&found.b),
        whole(&found.c),
        whole(&found.state),
    );
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        scan_backward::launch_unchecked::<R>(
            client,
            CubeCount::Static(form.parts(dims) as u32, batch as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            operands(dims, x),
            given,
            to,
            sizes(dims),
            form,
            form.vector,
        );
    }
    Ok(found)
}

/// A tensor, or any other where it is absent and not read.
fn optional<R: Runtime>(tensor: Option<&Handle>, x: &Inputs<'_>, numbers: usize) -> ArrayArg<R> {
    tensor.map_or_else(|| array(x.a, 1), |tensor| array(tensor, numbers))
}

fn operands<W: Size, R: Runtime>(dims: Dims, x: &Inputs<'_>) -> OperandsLaunch<W, R> {
    let Dims { batch, tokens, channels, states } = dims;
    OperandsLaunch::new(
        array(x.x, batch * tokens * channels),
        array(x.dt, batch * tokens * channels),
        array(x.a, channels * states),
        array(x.b, batch * tokens * states),
        array(x.c, batch * tokens * states),
        optional(x.state, x, batch * channels * states),
    )
}

fn sizes<R: Runtime>(dims: Dims) -> SizesLaunch<R> {
    SizesLaunch::new(dims.batch as u32, dims.tokens as u32, dims.channels as u32)
}

#[cfg(test)]
#[path = "selective_scan_tests.rs"]
mod tests;
