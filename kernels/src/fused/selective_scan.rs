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
//! x, dt, y: [B, T, I]   A: [I, N]   b, c: [B, T, N]   h_0, h_T: [B, I, N]   all h: [B, T, I, N]
//! ```
//! All numbers are f32. Source: Gu and Dao, arXiv 2312.00752.
//!
//! Work:   a unit a number of the state, which it takes through all tokens; a cube has UNITS / N channels of one
//!         sequence. Sums over n and over the cube's channels go through shared memory, BLOCK tokens at a time.
//! Bytes:  forward reads x, dt, b, c, writes y and, for a backward pass, every h; backward reads all of these and
//!         writes the gradients, db and dc once for each cube of channels and dA once for each sequence:
//!         the caller adds them up.
//! Edges:  N is a power of two up to UNITS, and compiled in; B, T and I are run-time values. Channels and tokens
//!         past the ends repeat the last ones and count for nothing.

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube.
const UNITS: usize = 256;
/// Tokens whose terms wait in shared memory at once.
const BLOCK: usize = 4;
/// Kinds of sums of a backward pass: dx, ddt, db, dc.
const SUMS: usize = 4;

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
    /// Channels of a cube.
    fn each(&self) -> usize {
        UNITS / self.states
    }

    /// Cubes that share the channels of a sequence.
    pub fn parts(&self) -> usize {
        self.channels.div_ceil(self.each())
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
    /// All h, where they are kept.
    pub h: Option<Buffer>,
}

/// Given to a backward pass beside the inputs.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// All h.
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
    signed: bool,
    /// Whether there is a state before the first token.
    state: bool,
    /// Whether all h are kept.
    keep: bool,
    /// Whether there is a gradient of y.
    d_y: bool,
    /// Whether there is a gradient of the last state.
    d_state: bool,
}

impl Form {
    fn new(dims: Dims, x: &Inputs<'_>) -> Self {
        let (states, signed, state) = (dims.states, x.signed, x.state.is_some());
        Self { source: SOURCE, states, signed, state, keep: false, d_y: false, d_state: false }
    }

    /// Channels of a cube.
    fn each(&self) -> usize {
        UNITS / self.states
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
    if !states.is_power_of_two() || states > UNITS {
        let what = "states of a channel, a power of two";
        return Err(Refusal::TooLarge { what, got: states, most: UNITS });
    }
    let (got, most) = (batch.saturating_mul(tokens * channels * states), u32::MAX as usize);
    if got > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got, most });
    }
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    if shared_memory < 4 * SUMS * BLOCK * UNITS || units < UNITS as u32 {
        return Err(Refusal::Device { shared_memory, units });
    }
    let (across, deep, _) = hardware.max_cube_count;
    for (what, got, most) in [("channels", dims.parts(), across), ("sequences", batch, deep)] {
        if got > most as usize {
            return Err(Refusal::TooLarge { what, got, most: most as usize });
        }
    }
    Ok(())
}

/// y and the last state; every h where `keep` wants what [`backward`] needs.
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
    let h = keep.then(|| buffer(client, &[batch, tokens, channels, states], F32));
    let unwritten = buffer(client, &[1], F32);
    let form = Form { keep, ..Form::new(dims, x) };
    // SAFETY: units past the ends read the last numbers and write nothing; the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        scan_forward::launch_unchecked::<R>(
            client,
            CubeCount::Static(dims.parts() as u32, batch as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            operands(dims, x),
            whole(&y),
            whole(&state),
            whole(h.as_ref().unwrap_or(&unwritten)),
            sizes(dims),
            form,
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
    let rows = || buffer(client, &[batch, tokens, channels], F32);
    let parts = || buffer(client, &[dims.parts(), batch, tokens, states], F32);
    let per_sequence = || buffer(client, &[batch, channels, states], F32);
    let found = Gradients {
        x: rows(),
        dt: rows(),
        a: per_sequence(),
        b: parts(),
        c: parts(),
        state: per_sequence(),
    };
    let (d_y, d_state) = (given.d_y.is_some(), given.d_state.is_some());
    let form = Form { d_y, d_state, ..Form::new(dims, x) };
    let state = batch * channels * states;
    let given = GivenArraysLaunch::new(
        array(given.h, state * tokens),
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
            CubeCount::Static(dims.parts() as u32, batch as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            operands(dims, x),
            given,
            to,
            sizes(dims),
            form,
        );
    }
    Ok(found)
}

/// A tensor, or any other where it is absent and not read.
fn optional<R: Runtime>(tensor: Option<&Handle>, x: &Inputs<'_>, numbers: usize) -> ArrayArg<R> {
    tensor.map_or_else(|| array(x.a, 1), |tensor| array(tensor, numbers))
}

fn operands<R: Runtime>(dims: Dims, x: &Inputs<'_>) -> OperandsLaunch<R> {
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

/// [`Inputs`].
#[derive(CubeType, CubeLaunch)]
struct Operands {
    x: Array<f32>,
    dt: Array<f32>,
    a: Array<f32>,
    b: Array<f32>,
    c: Array<f32>,
    state: Array<f32>,
}

/// [`Given`].
#[derive(CubeType, CubeLaunch)]
struct GivenArrays {
    h: Array<f32>,
    d_y: Array<f32>,
    d_state: Array<f32>,
}

/// [`Gradients`].
#[derive(CubeType, CubeLaunch)]
struct GradientArrays {
    x: Array<f32>,
    dt: Array<f32>,
    a: Array<f32>,
    b: Array<f32>,
    c: Array<f32>,
    state: Array<f32>,
}

/// B, T and I.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: u32,
    tokens: u32,
    channels: u32,
}

/// The number of the state that is a unit's own.
#[derive(CubeType, Clone, Copy)]
struct Own {
    sequence: usize,
    /// The cube's first channel.
    first: usize,
    /// i, at most I - 1.
    channel: usize,
    /// n.
    place: usize,
    /// Whether there is such a channel.
    there: bool,
    /// Place of the number in `[B, I, N]`.
    at: usize,
    sizes: Sizes,
}

/// The inputs of one token for one number of the state.
#[derive(CubeType, Clone, Copy)]
struct Token {
    x: f32,
    dt: f32,
    b: f32,
    c: f32,
    /// e^{dt A}.
    e: f32,
    /// Share of the state that is kept.
    kept: f32,
}

#[cube]
fn own(sizes: Sizes, #[comptime] form: Form) -> Own {
    let (states, each) = comptime!((form.states, form.each()));
    let sequence = CUBE_POS_Y as usize;
    let first = CUBE_POS_X as usize * each;
    let channels = sizes.channels as usize;
    let wanted = first + UNIT_POS as usize / states;
    let channel = min(wanted, channels - 1);
    let place = UNIT_POS as usize % states;
    let at = (sequence * channels + channel) * states + place;
    Own { sequence, first, channel, place, there: wanted < channels, at, sizes }
}

#[cube]
fn token(x: &Operands, rate: f32, own: Own, t: usize, #[comptime] form: Form) -> Token {
    let row = own.sequence * own.sizes.tokens as usize + t;
    let of_channel = row * own.sizes.channels as usize + own.channel;
    let of_place = row * comptime!(form.states) + own.place;
    let dt = x.dt[of_channel];
    let e = f32::exp(dt * rate);
    let kept = if comptime!(form.signed) { 2.0f32 * e - 1.0f32 } else { e };
    Token { x: x.x[of_channel], dt, b: x.b[of_place], c: x.c[of_place], e, kept }
}

/// The kernel of [`forward`].
#[cube(launch_unchecked)]
fn scan_forward(
    x: &Operands,
    y: &mut Array<f32>,
    last: &mut Array<f32>,
    all: &mut Array<f32>,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let own = own(sizes, form);
    let rate = x.a[own.channel * comptime!(form.states) + own.place];
    let tokens = sizes.tokens as usize;
    let numbers = sizes.channels as usize * comptime!(form.states);
    let mut terms = SharedMemory::<f32>::new(comptime!(BLOCK * UNITS));
    let mut h = 0.0f32;
    if comptime!(form.state) {
        h = x.state[own.at];
    }
    for block in 0..(tokens - 1) / BLOCK + 1 {
        #[unroll]
        for r in 0..BLOCK {
            let t = block * BLOCK + r;
            let now = token(x, rate, own, min(t, tokens - 1), form);
            if t < tokens {
                h = now.kept * h + now.dt * now.x * now.b;
                if comptime!(form.keep) {
                    if own.there {
                        let row = own.sequence * tokens + t;
                        all[row * numbers + own.channel * comptime!(form.states) + own.place] = h;
                    }
                }
            }
            terms[comptime!(r * UNITS) + UNIT_POS as usize] = now.c * h;
        }
        sync_cube();
        sum_states(&terms, 0usize.runtime(), y, own, block * BLOCK, form);
        sync_cube();
    }
    if own.there {
        last[own.at] = h;
    }
}

/// Sums over the states of each of the cube's channels, of the tokens from `t` on: numbers of `[B, T, I]`.
#[cube]
fn sum_states(
    terms: &SharedMemory<f32>,
    from: usize,
    to: &mut Array<f32>,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let (states, each) = comptime!((form.states, form.each()));
    let sizes = own.sizes;
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    #[unroll]
    for turn in 0..comptime!((BLOCK * each).div_ceil(UNITS)) {
        let at = comptime!(turn * UNITS) + UNIT_POS as usize;
        let (r, i) = (at / each, at % each);
        if r < BLOCK && t + r < tokens && own.first + i < channels {
            let mut sum = 0.0f32;
            for n in 0..states {
                // Neighbours begin at other places, so that they do not wait for one bank.
                let place = (n + i) % states;
                sum += terms[from + r * UNITS + i * states + place];
            }
            to[(own.sequence * tokens + t + r) * channels + own.first + i] = sum;
        }
    }
}

/// Sums over the cube's channels: numbers of `[parts, B, T, N]`.
#[cube]
fn sum_channels(
    terms: &SharedMemory<f32>,
    from: usize,
    to: &mut Array<f32>,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let (states, each) = comptime!((form.states, form.each()));
    let sizes = own.sizes;
    let (batch, tokens) = (sizes.batch as usize, sizes.tokens as usize);
    #[unroll]
    for turn in 0..comptime!((BLOCK * states).div_ceil(UNITS)) {
        let at = comptime!(turn * UNITS) + UNIT_POS as usize;
        let (r, n) = (at / states, at % states);
        if r < BLOCK && t + r < tokens {
            let mut sum = 0.0f32;
            for i in 0..each {
                sum += terms[from + r * UNITS + i * states + n];
            }
            let row = (CUBE_POS_X as usize * batch + own.sequence) * tokens + t + r;
            to[row * states + n] = sum;
        }
    }
}

/// The kernel of [`backward`].
#[cube(launch_unchecked)]
fn scan_backward(
    x: &Operands,
    given: &GivenArrays,
    to: &mut GradientArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let states = comptime!(form.states);
    let own = own(sizes, form);
    let rate = x.a[own.channel * states + own.place];
    let tokens = sizes.tokens as usize;
    let numbers = sizes.channels as usize * states;
    let mut terms = SharedMemory::<f32>::new(comptime!(SUMS * BLOCK * UNITS));
    let mut first = 0.0f32;
    if comptime!(form.state) {
        first = x.state[own.at];
    }
    let mut d_h = 0.0f32;
    if comptime!(form.d_state) {
        d_h = given.d_state[own.at];
    }
    let mut d_rate = 0.0f32;
    let blocks = (tokens - 1) / BLOCK + 1;
    for back in 0..blocks {
        let block = blocks - 1 - back;
        #[unroll]
        for back in 0..BLOCK {
            let r = comptime!(BLOCK - 1 - back);
            let t = block * BLOCK + r;
            let held = min(t, tokens - 1);
            let now = token(x, rate, own, held, form);
            let row = own.sequence * tokens + held;
            let mut d_y = 0.0f32;
            if comptime!(form.d_y) {
                d_y = given.d_y[row * sizes.channels as usize + own.channel];
            }
            let mut before = first;
            if held > 0 {
                before = given.h[(row - 1) * numbers + own.channel * states + own.place];
            }
            // Tokens and channels that are not there count for nothing.
            let mut count = 0.0f32;
            if t < tokens && own.there {
                count = 1.0f32;
            }
            let added = now.dt * now.x * now.b;
            let whole = d_h + d_y * now.c;
            let of_e = if comptime!(form.signed) { 2.0f32 * whole } else { whole };
            let d_exponent = of_e * before * now.e;
            d_rate += count * d_exponent * now.dt;
            let at = comptime!(r * UNITS) + UNIT_POS as usize;
            terms[at] = count * whole * now.dt * now.b;
            terms[at + comptime!(BLOCK * UNITS)] =
                count * (d_exponent * rate + whole * now.x * now.b);
            terms[at + comptime!(2 * BLOCK * UNITS)] = count * whole * now.dt * now.x;
            terms[at + comptime!(3 * BLOCK * UNITS)] = count * d_y * (now.kept * before + added);
            if t < tokens {
                d_h = now.kept * whole;
            }
        }
        sync_cube();
        let t = block * BLOCK;
        sum_states(&terms, 0usize.runtime(), &mut to.x, own, t, form);
        sum_states(&terms, comptime!(BLOCK * UNITS).runtime(), &mut to.dt, own, t, form);
        sum_channels(&terms, comptime!(2 * BLOCK * UNITS).runtime(), &mut to.b, own, t, form);
        sum_channels(&terms, comptime!(3 * BLOCK * UNITS).runtime(), &mut to.c, own, t, form);
        sync_cube();
    }
    if own.there {
        to.a[own.at] = d_rate;
        to.state[own.at] = d_h;
    }
}

#[cfg(test)]
#[path = "selective_scan_tests.rs"]
mod tests;
