//! Taps of the convolution that a diagonal state-space model is, and their gradients.
//! ```text
//! A      = -exp(log_a_real) + i a_imag,  dt = exp(log_dt)
//! zoh        e^z = exp(dt A)                           q = (e^z - 1) / A
//! bilinear   e^z = (1 + h) / (1 - h)   h = dt A / 2    q = dt / (1 - h)
//! w      = c b q                                       for each channel d and mode n
//! taps_l = 2 Re(sum_n w_n e^{l z_n}) + [l = 0] d
//!
//! log_dt, d: [D]     log_a_real, a_imag: [D, M]     c, b: [2, D, M], real and imaginary parts; b is 1 if it is not there
//! taps: [L, D]                                      all f32
//! ```
//! Backward, of g, the gradient of the taps, with complex gradients G_x whose real part of G_x dx is what x adds:
//! ```text
//! G_w = 2 sum_l g_l e^{l z}         G_z = 2 w sum_l g_l l e^{l z}
//! zoh        G_A = (G_z + G_w c b dt f(z)) dt      f the derivative of (e^z - 1) / z      G_c = G_w b q
//! bilinear   G_h = G_z 2 / (1 - h^2) + G_w w / (1 - h)          G_A = G_h dt / 2
//! ```
//! Work:   forward a cube has 16 channels and 16 lags; 256 modes at a time are made steps of by all units. Backward a cube
//!         has a channel; 16 modes at a time have 16 units each, which deal the lags out among them.
//! Sums:   over lags and modes in one order: equal inputs give equal bits.
//! Edges:  D, M and L are run-time values. Angles come less whole turns, since shaders' sines are exact near 0 alone.
//! Source: S4D, arXiv 2206.11893; H3, arXiv 2212.14052.

use super::column_sums::{check_matrix, grid};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{F32, Refusal};
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::f32::consts::TAU;

/// Channels of a forward cube, modes of a backward one, and units of each.
const SIDE: usize = 16;
/// Units of a cube.
const UNITS: usize = SIDE * SIDE;
/// Lags that a unit requests the gradients of before it uses the first.
const AHEAD: usize = 4;
/// Buffers of the backward kernel: parameters, their gradients, that of the taps, and the sizes. The forward pass is
/// refused with it.
const BUFFERS: usize = 14;
/// Square of the least size of a number that is divided by, or whose logarithm is taken.
const LEAST_SQUARE: f32 = 1e-30;

/// Terms of a series, (k + 1) / (k + 2)!, for numbers whose square is below [`NEAR_SQUARE`].
const TERMS: usize = 9;
const SERIES: [f32; TERMS] = [
    1.0 / 2.0,
    1.0 / 3.0,
    1.0 / 8.0,
    1.0 / 30.0,
    1.0 / 144.0,
    1.0 / 840.0,
    1.0 / 5760.0,
    1.0 / 45_360.0,
    1.0 / 403_200.0,
];
const NEAR_SQUARE: f32 = 0.5;

/// Sizes of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// D.
    pub channels: usize,
    /// M, half of N.
    pub modes: usize,
    /// L.
    pub length: usize,
}

impl Dims {
    fn check<R: Runtime>(self, client: &ComputeClient<R>) -> Result<(), Refusal> {
        let (got, most) = (BUFFERS, client.properties().hardware.max_bindings as usize);
        if got > most {
            return Err(Refusal::TooLarge { what: "buffers of a kernel", got, most });
        }
        check_matrix(client, 2 * self.channels, self.modes)?;
        check_matrix(client, self.length, self.channels)
    }

    fn launch<R: Runtime>(self) -> SizesLaunch<R> {
        SizesLaunch::new(self.channels as u32, self.modes as u32, self.length as u32)
    }
}

/// How steps are made of a continuous system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Steps {
    /// Inputs constant over a step.
    Zoh,
    /// The trapezoidal rule.
    Bilinear,
}

/// Parameters, contiguous, shaped as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Logarithms of step sizes.
    pub log_dt: &'a Handle,
    /// Logarithms of decay rates.
    pub log_a_real: &'a Handle,
    /// Frequencies.
    pub a_imag: &'a Handle,
    /// The output vector.
    pub c: &'a Handle,
    /// The input vector.
    pub b: Option<&'a Handle>,
    /// D of the model, the weight of a token's own input.
    pub d: &'a Handle,
}

/// Gradients, shaped as what they belong to.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of `log_dt`.
    pub log_dt: Buffer,
    /// Of `log_a_real`.
    pub log_a_real: Buffer,
    /// Of `a_imag`.
    pub a_imag: Buffer,
    /// Of `c`.
    pub c: Buffer,
    /// Of `b`, where there is one.
    pub b: Option<Buffer>,
    /// Of `d`.
    pub d: Buffer,
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    steps: Steps,
    /// Whether there is an input vector.
    driven: bool,
}

impl Form {
    fn new(steps: Steps, inputs: &Inputs<'_>) -> Self {
        Self { source: SOURCE, steps, driven: inputs.b.is_some() }
    }
}

impl Inputs<'_> {
    fn launch<R: Runtime>(&self, dims: Dims) -> ModelLaunch<R> {
        let Dims { channels, modes, .. } = dims;
        let all = channels * modes;
        let mut b = SequenceArg::new();
        self.b.into_iter().for_each(|given| b.push(array(given, 2 * all)));
        ModelLaunch::new(
            array(self.log_dt, channels),
            array(self.log_a_real, all),
            array(self.a_imag, all),
            array(self.c, 2 * all),
            b,
            array(self.d, channels),
        )
    }
}

/// The taps, `[L, D]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn taps<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    steps: Steps,
    inputs: Inputs<'_>,
) -> Result<Buffer, Refusal> {
    dims.check(client)?;
    let across = dims.channels.div_ceil(SIDE);
    let cubes = grid(client, across * dims.length.div_ceil(SIDE))?;
    let taps = buffer(client, &[dims.length, dims.channels], F32);
    // SAFETY: channels, modes and lags past the ends repeat the last ones and are not kept; the caller promises the sizes
    // of `dims`.
    #[allow(unsafe_code)]
    unsafe {
        modes_as_taps::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            inputs.launch(dims),
            whole(&taps),
            dims.launch(),
            Form::new(steps, &inputs),
        );
    }
    Ok(taps)
}

/// Gradients of all parameters from `d_taps`, that of the taps.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn gradients<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    steps: Steps,
    inputs: Inputs<'_>,
    d_taps: &Handle,
) -> Result<Gradients, Refusal> {
    dims.check(client)?;
    let Dims { channels, modes, length } = dims;
    let cubes = grid(client, channels)?;
    let vector = || buffer(client, &[channels], F32);
    let matrix = || buffer(client, &[channels, modes], F32);
    let both = || buffer(client, &[2, channels, modes], F32);
    let found = Gradients {
        log_dt: vector(),
        log_a_real: matrix(),
        a_imag: matrix(),
        c: both(),
        b: inputs.b.map(|_| both()),
        d: vector(),
    };
    let mut b = SequenceArg::new();
    found.b.iter().for_each(|found| b.push(whole(found)));
    let to = ModelLaunch::new(
        whole(&found.log_dt),
        whole(&found.log_a_real),
        whole(&found.a_imag),
        whole(&found.c),
        b,
        whole(&found.d),
    );
    // SAFETY: as of `taps`.
    #[allow(unsafe_code)]
    unsafe {
        gradients_of_modes::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            inputs.launch(dims),
            array(d_taps, length * channels),
            to,
            dims.launch(),
            Form::new(steps, &inputs),
        );
    }
    Ok(found)
}

/// [`Inputs`], or [`Gradients`].
#[derive(CubeType, CubeLaunch)]
struct Model {
    log_dt: Array<f32>,
    log_a_real: Array<f32>,
    a_imag: Array<f32>,
    c: Array<f32>,
    b: Sequence<Array<f32>>,
    d: Array<f32>,
}

/// [`Dims`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    channels: u32,
    modes: u32,
    length: u32,
}

/// A complex number.
#[derive(CubeType, Clone, Copy)]
struct Complex {
    re: f32,
    im: f32,
}

#[cube]
fn times(x: Complex, y: Complex) -> Complex {
    Complex { re: x.re * y.re - x.im * y.im, im: x.re * y.im + x.im * y.re }
}

#[cube]
fn plus(x: Complex, y: Complex) -> Complex {
    Complex { re: x.re + y.re, im: x.im + y.im }
}

#[cube]
fn scaled(x: Complex, by: f32) -> Complex {
    Complex { re: x.re * by, im: x.im * by }
}

#[cube]
fn over(x: Complex, y: Complex) -> Complex {
    let square = max(y.re * y.re + y.im * y.im, LEAST_SQUARE);
    let conjugate = Complex { re: y.re, im: -y.im };
    scaled(times(x, conjugate), 1.0f32 / square)
}

/// e^{l z}, the angle less whole turns: shaders' sines are exact near 0 alone.
#[cube]
fn power(z: Complex, lag: f32) -> Complex {
    let turns = lag * (z.im * comptime!(1.0 / TAU));
    let angle = (turns - f32::round(turns)) * TAU;
    let size = f32::exp(lag * z.re);
    Complex { re: size * f32::cos(angle), im: size * f32::sin(angle) }
}

/// e^z.
#[cube]
fn exponential(z: Complex) -> Complex {
    power(z, 1.0f32)
}

/// A mode: what it adds to the taps, w and z, and the parameters of these.
#[derive(CubeType, Clone, Copy)]
struct Mode {
    dt: f32,
    a: Complex,
    c: Complex,
    b: Complex,
    /// What c b is times.
    q: Complex,
    w: Complex,
    z: Complex,
}

/// Mode `n` of channel `d`.
#[cube]
fn mode(x: &Model, d: usize, n: usize, sizes: Sizes, #[comptime] form: Form) -> Mode {
    let (at, all) = (d * sizes.modes as usize + n, sizes.channels as usize * sizes.modes as usize);
    let dt = f32::exp(x.log_dt[d]);
    let a = Complex { re: -f32::exp(x.log_a_real[at]), im: x.a_imag[at] };
    let c = Complex { re: x.c[at], im: x.c[all + at] };
    let b = if comptime!(form.driven) {
        let given = x.b.index(0usize);
        Complex { re: given[at], im: given[all + at] }
    } else {
        Complex { re: 1.0f32, im: 0.0f32 }
    };
    let (z, q) = match comptime!(form.steps) {
        Steps::Zoh => held(dt, a),
        Steps::Bilinear => trapezoidal(dt, a),
    };
    Mode { dt, a, c, b, q, w: times(times(c, b), q), z }
}

/// z and q of a step over which inputs stay the same.
#[cube]
fn held(dt: f32, a: Complex) -> (Complex, Complex) {
    let z = scaled(a, dt);
    // e^z - 1 without cancelling: e^s cos t - 1 = (e^s - 1) cos t - 2 sin^2(t / 2), and
    // e^s - 1 = (e^s + 1) tanh(s / 2).
    let half = exponential(Complex { re: 0.0f32, im: z.im * 0.5f32 });
    let full = exponential(Complex { re: 0.0f32, im: z.im });
    let size = f32::exp(z.re);
    let shrinking = (size + 1.0f32) * f32::tanh(z.re * 0.5f32) * full.re;
    let change = Complex { re: shrinking - 2.0f32 * half.im * half.im, im: size * full.im };
    (z, over(change, a))
}

/// z and q of a step by the trapezoidal rule.
#[cube]
fn trapezoidal(dt: f32, a: Complex) -> (Complex, Complex) {
    let h = scaled(a, 0.5f32 * dt);
    let (above, below) = (1.0f32 + h.re, 1.0f32 - h.re);
    let turned = h.im * h.im;
    let sizes = (above * above + turned) / (below * below + turned);
    let z = Complex {
        re: f32::ln(max(sizes, LEAST_SQUARE)) * 0.5f32,
        im: f32::atan2(2.0f32 * h.im, above * below - turned),
    };
    let step = Complex { re: dt, im: 0.0f32 };
    (z, over(step, Complex { re: below, im: -h.im }))
}

/// The kernel of [`taps`].
#[cube(launch_unchecked)]
fn modes_as_taps(x: &Model, taps: &mut Array<f32>, sizes: Sizes, #[comptime] form: Form) {
    let (channels, modes) = (sizes.channels as usize, sizes.modes as usize);
    let across = (channels - 1) / SIDE + 1;
    let (own, other) = (UNIT_POS as usize % SIDE, UNIT_POS as usize / SIDE);
    let channel = CUBE_POS % across * SIDE + own;
    let lag = CUBE_POS / across * SIDE + other;
    let d = min(channel, channels - 1);
    let mut shared = SharedMemory::<f32>::new(comptime!(4 * UNITS));
    let mut sum = 0.0f32;
    for turn in 0..(modes - 1) / SIDE + 1 {
        let made = mode(x, d, min(turn * SIDE + other, modes - 1), sizes, form);
        let there = turn * SIDE + other < modes;
        let at = UNIT_POS as usize;
        shared[at] = select(there, made.w.re, 0.0f32);
        shared[at + UNITS] = select(there, made.w.im, 0.0f32);
        shared[at + comptime!(2 * UNITS)] = made.z.re;
        shared[at + comptime!(3 * UNITS)] = made.z.im;
        sync_cube();
        for n in 0..SIDE {
            let at = n * SIDE + own;
            let z = Complex {
                re: shared[at + comptime!(2 * UNITS)],
                im: shared[at + comptime!(3 * UNITS)],
            };
            let e = power(z, f32::cast_from(lag as u32));
            sum += shared[at] * e.re - shared[at + UNITS] * e.im;
        }
        sync_cube();
    }
    if channel < channels && lag < sizes.length as usize {
        let same = select(lag == 0, x.d[d], 0.0f32);
        taps[lag * channels + channel] = 2.0f32 * sum + same;
    }
}

/// The kernel of [`gradients`].
#[cube(launch_unchecked)]
fn gradients_of_modes(
    x: &Model,
    d_taps: &Array<f32>,
    to: &mut Model,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let (channels, modes) = (sizes.channels as usize, sizes.modes as usize);
    let d = CUBE_POS;
    if d < channels {
        let (own, slice) = (UNIT_POS as usize % SIDE, UNIT_POS as usize / SIDE);
        let mut shared = SharedMemory::<f32>::new(comptime!(4 * UNITS));
        let mut of_step = 0.0f32;
        for turn in 0..(modes - 1) / SIDE + 1 {
            let place = turn * SIDE + own;
            let n = min(place, modes - 1);
            let made = mode(x, d, n, sizes, form);
            add_lags(&mut shared, d_taps, made.z, d, slice, sizes);
            sync_cube();
            if slice == 0 && place < modes {
                let sums = lag_sums(&shared, own);
                of_step += keep(to, &made, sums, d, n, sizes, form);
            }
            sync_cube();
        }
        // The sums of each unit's modes meet.
        if slice == 0 {
            shared[own] = of_step;
        }
        sync_cube();
        if UNIT_POS == 0 {
            let mut sum = 0.0f32;
            #[unroll]
            for n in 0..SIDE {
                sum += shared[n];
            }
            to.log_dt[d] = sum;
            to.d[d] = d_taps[d];
        }
    }
}

/// The sums of a slice of lags of a mode, in shared memory: of g e^{l z}, then of g l e^{l z}.
#[cube]
fn add_lags(
    shared: &mut SharedMemory<f32>,
    d_taps: &Array<f32>,
    z: Complex,
    d: usize,
    slice: usize,
    sizes: Sizes,
) {
    let (channels, length) = (sizes.channels as usize, sizes.length as usize);
    let mut sum_re = 0.0f32;
    let mut sum_im = 0.0f32;
    let mut later_re = 0.0f32;
    let mut later_im = 0.0f32;
    let mut given = Array::<f32>::new(AHEAD);
    for turn in 0..(length - 1) / comptime!(SIDE * AHEAD) + 1 {
        #[unroll]
        for n in 0..AHEAD {
            let lag = turn * comptime!(SIDE * AHEAD) + comptime!(n * SIDE) + slice;
            let value = d_taps[min(lag, length - 1) * channels + d];
            given[n] = select(lag < length, value, 0.0f32);
        }
        #[unroll]
        for n in 0..AHEAD {
            let lag = turn * comptime!(SIDE * AHEAD) + comptime!(n * SIDE) + slice;
            let lag = f32::cast_from(lag as u32);
            let e = scaled(power(z, lag), given[n]);
            sum_re += e.re;
            sum_im += e.im;
            later_re += lag * e.re;
            later_im += lag * e.im;
        }
    }
    let at = UNIT_POS as usize;
    shared[at] = sum_re;
    shared[at + UNITS] = sum_im;
    shared[at + comptime!(2 * UNITS)] = later_re;
    shared[at + comptime!(3 * UNITS)] = later_im;
}

/// The sums over all slices of the cube's mode `own`, each doubled.
#[cube]
fn lag_sums(shared: &SharedMemory<f32>, own: usize) -> (Complex, Complex) {
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for part in 0..4usize {
        sums[part] = 0.0f32;
        #[unroll]
        for slice in 0..SIDE {
            sums[part] += shared[own + comptime!(part * UNITS + slice * SIDE)];
        }
        sums[part] = 2.0f32 * sums[part];
    }
    (Complex { re: sums[0], im: sums[1] }, Complex { re: sums[2], im: sums[3] })
}

/// Keeps the gradients of mode `n` of channel `d`, from the sums over lags, and gives its part of that of `log_dt`.
#[cube]
fn keep(
    to: &mut Model,
    made: &Mode,
    sums: (Complex, Complex),
    d: usize,
    n: usize,
    sizes: Sizes,
    #[comptime] form: Form,
) -> f32 {
    let (of_w, later) = sums;
    let of_z = times(made.w, later);
    let (of_a, of_dt) = match comptime!(form.steps) {
        Steps::Zoh => of_held(made, of_w, of_z),
        Steps::Bilinear => of_trapezoidal(made, of_w, of_z),
    };
    let (at, all) = (d * sizes.modes as usize + n, sizes.channels as usize * sizes.modes as usize);
    // What a real or imaginary part adds is the real part of G times 1 or i.
    to.log_a_real[at] = of_a.re * made.a.re;
    to.a_imag[at] = -of_a.im;
    let of_c = times(of_w, times(made.b, made.q));
    to.c[at] = of_c.re;
    to.c[all + at] = -of_c.im;
    if comptime!(form.driven) {
        let of_b = times(of_w, times(made.c, made.q));
        let to = to.b.index_mut(0usize);
        to[at] = of_b.re;
        to[all + at] = -of_b.im;
    }
    of_dt * made.dt
}

/// G_A and the gradient of dt, of a step over which inputs stay the same.
#[cube]
fn of_held(made: &Mode, of_w: Complex, of_z: Complex) -> (Complex, f32) {
    let ends = times(of_w, times(made.c, made.b));
    let by_q = scaled(times(ends, slope(made.z)), made.dt);
    let of_dt = times(of_z, made.a).re + times(ends, exponential(made.z)).re;
    (scaled(plus(of_z, by_q), made.dt), of_dt)
}

/// The derivative of `(e^z - 1) / z`, which near 0 cancels all its digits but for its series.
#[cube]
fn slope(z: Complex) -> Complex {
    let square = times(z, z);
    // e^z (z - 1) + 1
    let grown = times(exponential(z), Complex { re: z.re - 1.0f32, im: z.im });
    let direct = over(Complex { re: grown.re + 1.0f32, im: grown.im }, square);
    // sum_k (k + 1) / (k + 2)! z^k, from the last term on.
    let mut re = SERIES[TERMS - 1].runtime();
    let mut im = 0.0f32;
    #[unroll]
    for n in 1..TERMS {
        let next = times(Complex { re, im }, z);
        re = next.re + comptime!(SERIES[TERMS - 1 - n]);
        im = next.im;
    }
    let near = z.re * z.re + z.im * z.im < NEAR_SQUARE;
    Complex { re: select(near, re, direct.re), im: select(near, im, direct.im) }
}

/// G_A and the gradient of dt, of a step by the trapezoidal rule.
#[cube]
fn of_trapezoidal(made: &Mode, of_w: Complex, of_z: Complex) -> (Complex, f32) {
    let h = scaled(made.a, 0.5f32 * made.dt);
    let above = Complex { re: 1.0f32 + h.re, im: h.im };
    let below = Complex { re: 1.0f32 - h.re, im: -h.im };
    let added = times(of_w, made.w);
    let of_h = plus(over(scaled(of_z, 2.0f32), times(above, below)), over(added, below));
    let of_dt = 0.5f32 * times(of_h, made.a).re + added.re / made.dt;
    (scaled(of_h, 0.5f32 * made.dt), of_dt)
}

#[cfg(test)]
#[path = "diagonal_taps_tests.rs"]
mod tests;
