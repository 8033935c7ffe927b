//! Norm, log decay, gate and convolution around a recurrence, token by token: each is one launch, which is what decoding
//! waits for. In tensor operations they are three to six.
//! ```text
//! normalize       y = x / size(x) * factor [* weight] [* f(gate)]       over rows of W numbers
//!                 size(x) = sqrt(mean x^2 + epsilon) or sqrt(sum x^2 + epsilon)
//! log_decay       g = -e^{a_log} softplus(x + dt_bias)
//! gated_product   y = x * f(gate)                                       f: SiLU or sigmoid
//!
//! x, gate, y: [N, W]  F     weight, dt_bias: [W]  F     a_log: [H]  F   W / H columns share a number
//! g:          [N, W]  f32   gates stay f32 whatever the rows are
//!
//! Work:   normalize: a team of units a row, several rows a cube where rows are short; sums of x^2
//!         meet in shared memory. The others: a unit a number. No plane operations.
//! Cost:   one read of each input (normalize reads x again, from cache) and one write; all arithmetic
//!         is f32 whatever F is.
//! Edges:  any N and W; rows past the last one are computed and not stored. Sizes are run-time values:
//!         a new one compiles nothing, unless W passes 256.
//! Source: RMSNorm, arXiv 1910.07467; the decay of Mamba-2, arXiv 2405.21060. No gradient.
//! ```

use crate::SOURCE;
use crate::refusal::check_type;
use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Units that share a short row, and the longest such row, in numbers.
const FEW: usize = 32;
const SHORT: usize = 256;

/// Activation of a gate, or of a finished sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    Identity,
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `ln(1 + e^z)`.
    Softplus,
}

/// Divisor of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// `sqrt(mean x^2 + epsilon)`.
    RootMeanSquare,
    /// `sqrt(sum x^2 + epsilon)`.
    Length,
}

/// Whether the device has cubes of 256 units and the type of the tensors.
pub fn runs<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    let units = client.properties().hardware.max_units_per_cube as usize;
    units >= UNITS && check_type(client, dtype).is_ok()
}

/// Cubes for `count` of them, or for as many runs of [`UNITS`] numbers; `None` if there are none, the
/// device's counters cannot hold them or a unit's number would pass 32 bits.
pub(crate) fn spread(count: usize, largest: (u32, u32, u32)) -> Option<CubeCount> {
    let x = count.min(largest.0 as usize);
    let y = count.checked_next_multiple_of(x)? / x;
    // The last row of cubes may be longer than what is left.
    let fits = y <= largest.1 as usize && u32::try_from(x * y * UNITS).is_ok();
    fits.then_some(CubeCount::Static(x as u32, y as u32, 1))
}

/// Rows to normalise, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows {
    /// N, how many there are.
    pub rows: usize,
    /// W, numbers of a row.
    pub width: usize,
    /// Divisor of a row.
    pub measure: Measure,
    /// Added to the mean or the sum of x^2.
    pub epsilon: f64,
    /// Multiplies all.
    pub factor: f64,
    /// Activation of the gate, where there is one.
    pub activation: Activation,
}

impl Rows {
    /// Units that share a row.
    fn team(&self) -> usize {
        if self.width <= SHORT { FEW } else { UNITS }
    }

    /// Cubes of a launch; `None` if there is nothing to do, the device's counters cannot hold them or
    /// an index would pass 32 bits.
    pub fn cubes(&self, largest: (u32, u32, u32)) -> Option<CubeCount> {
        u32::try_from(self.rows * self.width).ok().filter(|numbers| *numbers > 0)?;
        spread(self.rows.div_ceil(UNITS / self.team()), largest)
    }
}

/// Tensors of [`normalize`], contiguous, of one type, shaped as the module says.
pub struct RowArgs<R: Runtime> {
    /// Rows.
    pub x: TensorArg<R>,
    /// A weight for each column.
    pub weight: Option<TensorArg<R>>,
    /// A gate for each number.
    pub gate: Option<TensorArg<R>>,
    /// Output; filled.
    pub y: TensorArg<R>,
}

/// Compile-time values of kernels that have no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source(pub &'static str);

/// Compile-time values of [`normalize_rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    source: &'static str,
    team: usize,
    weighted: bool,
    gated: bool,
    activation: Activation,
}

/// Normalises rows of type `dtype`. `stand_in` is any tensor of that type; it takes the place of those
/// that are not there, and is not read.
pub fn normalize<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: CubeCount,
    rows: Rows,
    args: RowArgs<R>,
    stand_in: impl Fn() -> TensorArg<R>,
    dtype: StorageType,
) {
    let form = Form {
        source: SOURCE,
        team: rows.team(),
        weighted: args.weight.is_some(),
        gated: args.gate.is_some(),
        activation: rows.activation,
    };
    let share = match rows.measure {
        Measure::RootMeanSquare => 1.0 / rows.width as f32,
        Measure::Length => 1.0,
    };
    // SAFETY: units past the last row repeat it and store nothing, and all else stays within the sizes
    // of `rows`, which the caller promises; `form` says which stand-ins are not read.
    #[allow(unsafe_code)]
    unsafe {
        normalize_rows::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            NormInputsLaunch::new(
                args.x,
                args.weight.unwrap_or_else(&stand_in),
                args.gate.unwrap_or_else(&stand_in),
            ),
            args.y,
            NormSizesLaunch::new(
                rows.rows as u32,
                rows.width as u32,
                share,
                rows.epsilon as f32,
                rows.factor as f32,
            ),
            form,
            dtype,
        );
    }
}

/// Inputs of [`normalize_rows`]; `form` says which are stand-ins.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NormInputs<F: Float> {
    /// `[N, W]`.
    pub x: Tensor<F>,
    /// `[W]`.
    pub weight: Tensor<F>,
    /// `[N, W]`.
    pub gate: Tensor<F>,
}

/// Numbers of [`normalize_rows`] that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct NormSizes {
    /// N.
    pub rows: u32,
    /// W.
    pub width: u32,
    /// Factor of a sum of x^2: 1 / W where the divisor is a mean's root.
    pub share: f32,
    pub epsilon: f32,
    pub factor: f32,
}

/// A unit's share of a row: every `team`th number.
#[derive(CubeType, Clone, Copy)]
struct RowShare {
    /// The first number of the row.
    start: usize,
    /// The unit's number in its team, which is its first column too.
    own: usize,
    /// W.
    width: usize,
    /// Numbers of the unit that has most of them.
    turns: usize,
}

/// The kernel of [`normalize`].
#[cube(launch_unchecked)]
pub(crate) fn normalize_rows<F: Float>(
    x: &NormInputs<F>,
    y: &mut Tensor<F>,
    sizes: NormSizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
) {
    let rows = sizes.rows as usize;
    let width = sizes.width as usize;
    let team = comptime!(form.team);
    let unit = UNIT_POS as usize;
    let own = unit % team;
    let row = CUBE_POS * comptime!(UNITS / form.team) + unit / team;
    // Units past the last row repeat it: none may miss a barrier.
    let start = min(row, rows - 1) * width;
    let share = RowShare { start, own, width, turns: (width - 1) / team + 1 };
    let sum = team_sum(squared_share::<F>(&x.x, &share, form), own, form);
    let scale = sizes.factor / f32::sqrt(sum * sizes.share + sizes.epsilon);
    if row < rows {
        store_scaled::<F>(x, y, scale, &share, form);
    }
}

/// The sum of x^2 over a unit's share of a row.
#[cube]
fn squared_share<F: Float>(x: &Tensor<F>, share: &RowShare, #[comptime] form: Form) -> f32 {
    let mut sum = 0.0f32;
    for turn in 0..share.turns {
        let i = share.own + turn * comptime!(form.team);
        if i < share.width {
            let value = f32::cast_from(x[share.start + i]);
            sum += value * value;
        }
    }
    sum
}

/// The sum over a team of a number of each unit, in shared memory, halving.
#[cube]
fn team_sum(number: f32, own: usize, #[comptime] form: Form) -> f32 {
    let unit = UNIT_POS as usize;
    let mut partial = SharedMemory::<f32>::new(UNITS);
    partial[unit] = number;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(form.team.ilog2()) {
        let half = comptime!(form.team >> (level + 1));
        if own < half {
            partial[unit] += partial[unit + half];
        }
        sync_cube();
    }
    partial[unit - own]
}

/// Writes `x scale [* weight] [* f(gate)]` over a unit's share of a row.
#[cube]
fn store_scaled<F: Float>(
    x: &NormInputs<F>,
    y: &mut Tensor<F>,
    scale: f32,
    share: &RowShare,
    #[comptime] form: Form,
) {
    for turn in 0..share.turns {
        let i = share.own + turn * comptime!(form.team);
        if i < share.width {
            let mut value = f32::cast_from(x.x[share.start + i]) * scale;
            if comptime!(form.weighted) {
                value *= f32::cast_from(x.weight[i]);
            }
            if comptime!(form.gated) {
                let gate = f32::cast_from(x.gate[share.start + i]);
                value *= activate(gate, comptime!(form.activation));
            }
            y[share.start + i] = F::cast_from(value);
        }
    }
}

/// Log gates to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decays {
    /// N, tokens of all sequences.
    pub rows: usize,
    /// W, gates of a token.
    pub width: usize,
    /// H, numbers of `a_log`, a divisor of `width`.
    pub heads: usize,
}

impl Decays {
    /// Cubes of a launch; `None` if there is nothing to do, the device's counters cannot hold them or
    /// an index would pass 32 bits.
    pub fn cubes(&self, largest: (u32, u32, u32)) -> Option<CubeCount> {
        spread((self.rows * self.width).div_ceil(UNITS), largest)
    }
}

/// Tensors of [`log_decay`], contiguous, shaped as the module says.
pub struct DecayArgs<R: Runtime> {
    /// Outputs of the layer's projection.
    pub x: TensorArg<R>,
    /// ln A.
    pub a_log: TensorArg<R>,
    /// The bias of step sizes.
    pub dt_bias: TensorArg<R>,
    /// Output, f32; filled.
    pub g: TensorArg<R>,
}

/// Log gates from rows of type `dtype`.
pub fn log_decay<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: CubeCount,
    decays: Decays,
    args: DecayArgs<R>,
    dtype: StorageType,
) {
    // SAFETY: units past the last gate stop, and all else stays within the sizes of `decays`, which the
    // caller promises.
    #[allow(unsafe_code)]
    unsafe {
        decay_rates::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            DecayInputsLaunch::new(args.x, args.a_log, args.dt_bias),
            args.g,
            DecaySizesLaunch::new(
                (decays.rows * decays.width) as u32,
                decays.width as u32,
                (decays.width / decays.heads) as u32,
            ),
            Source(SOURCE),
            dtype,
        );
    }
}

/// Inputs of [`decay_rates`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DecayInputs<F: Float> {
    /// `[N, W]`.
    pub x: Tensor<F>,
    /// `[H]`.
    pub a_log: Tensor<F>,
    /// `[W]`.
    pub dt_bias: Tensor<F>,
}

/// Sizes of [`decay_rates`] that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DecaySizes {
    /// N W.
    pub count: u32,
    /// W.
    pub width: u32,
    /// Columns that share a number of `a_log`, W / H.
    pub group: u32,
}

/// The kernel of [`log_decay`].
#[cube(launch_unchecked)]
pub(crate) fn decay_rates<F: Float>(
    x: &DecayInputs<F>,
    g: &mut Tensor<f32>,
    sizes: DecaySizes,
    #[comptime] _source: Source,
    #[define(F)] _dtype: StorageType,
) {
    let n = ABSOLUTE_POS;
    if n >= sizes.count as usize {
        terminate!();
    }
    let column = n % sizes.width as usize;
    let rate = f32::exp(f32::cast_from(x.a_log[column / sizes.group as usize]));
    g[n] = -(rate * softplus(f32::cast_from(x.x[n]) + f32::cast_from(x.dt_bias[column])));
}

/// Cubes of [`gated_product`] over `count` numbers; `None` if there are none, the device's counters
/// cannot hold them or an index would pass 32 bits.
pub fn product_cubes(count: usize, largest: (u32, u32, u32)) -> Option<CubeCount> {
    spread(count.div_ceil(UNITS), largest)
}

/// Tensors of [`gated_product`], contiguous, of one type and shape.
pub struct ProductArgs<R: Runtime> {
    /// Rows.
    pub x: TensorArg<R>,
    /// The gate.
    pub gate: TensorArg<R>,
    /// Output; filled.
    pub y: TensorArg<R>,
}

/// Products of `count` numbers of type `dtype` and their gates.
pub fn gated_product<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: CubeCount,
    count: usize,
    activation: Activation,
    args: ProductArgs<R>,
    dtype: StorageType,
) {
    // SAFETY: units past the last number stop; the caller promises that there are `count` in each.
    #[allow(unsafe_code)]
    unsafe {
        multiply_by_gates::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            args.x,
            args.gate,
            args.y,
            count as u32,
            activation,
            Source(SOURCE),
            dtype,
        );
    }
}

/// The kernel of [`gated_product`].
#[cube(launch_unchecked)]
pub(crate) fn multiply_by_gates<F: Float>(
    x: &Tensor<F>,
    gate: &Tensor<F>,
    y: &mut Tensor<F>,
    count: u32,
    #[comptime] activation: Activation,
    #[comptime] _source: Source,
    #[define(F)] _dtype: StorageType,
) {
    let n = ABSOLUTE_POS;
    if n >= count as usize {
        terminate!();
    }
    let open = activate(f32::cast_from(gate[n]), activation);
    y[n] = F::cast_from(f32::cast_from(x[n]) * open);
}

/// `activation` of `z`.
#[cube]
pub(crate) fn activate(z: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Silu) {
        z * sigmoid(z)
    } else if comptime!(activation == Activation::Sigmoid) {
        sigmoid(z)
    } else if comptime!(activation == Activation::Softplus) {
        softplus(z)
    } else {
        z
    }
}

/// `1 / (1 + e^-z)`, with an exponent that is never above 0: nothing overflows.
#[cube]
pub(crate) fn sigmoid(z: f32) -> f32 {
    let e = f32::exp(-f32::abs(z));
    select(z >= 0.0f32, 1.0f32, e) / (e + 1.0f32)
}

/// `ln(1 + e^z)`, as `max(z, 0) + ln(1 + e^-|z|)`: nothing overflows, and small values keep their
/// digits.
#[cube]
pub(crate) fn softplus(z: f32) -> f32 {
    max(z, 0.0f32) + log_1p(f32::exp(-f32::abs(z)))
}

/// `ln(1 + e)` for e from 0 to 1, as 2 artanh(s) with s = e / (2 + e), at most 1/3: the series ends
/// where f32 does. Shaders have no such function, and their logarithms near 1 lose what e is small by.
#[cube]
fn log_1p(e: f32) -> f32 {
    let s = e / (e + 2.0f32);
    let square = s * s;
    // 1 + s^2/3 + s^4/5 + .. + s^16/17, innermost first.
    let mut series = 0.0f32;
    #[unroll]
    for n in 0..9usize {
        series = series * square + comptime!(1.0 / (17 - 2 * n) as f32);
    }
    (s + s) * series
}
