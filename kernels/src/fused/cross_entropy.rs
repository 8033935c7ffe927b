//! Cross-entropy of logits, and its gradient in their place.
//! ```text
//! z_m      = logits_m + bias
//! loss_m   = scale (logsumexp(z_m) - z_m[target_m])
//! dz_m     = scale (softmax(z_m) - onehot(target_m))           overwrites logits_m
//!
//! logits: [M, V]    bias: [V]    target: [M]  integers    loss: [M]  f32
//!
//! Columns of padding may lie behind the V of logits and bias: they count for nothing, and their gradient is 0.
//!
//! Work:   a team of 8 to 256 units a row, so many that their registers hold the row where 256 can. Each
//!         unit keeps a maximum and a sum of e^{z - maximum} (online softmax); those of a team meet in
//!         shared memory.
//! Cost:   one launch. logits are read once (a row too long for registers: twice, from cache) and
//!         written once. e^{z - maximum} is computed once for a row in registers.
//! Order:  fixed by V: the same inputs give the same bits.
//! Edges:  a target outside [0, V) gives a loss and a gradient of NaN. A gradient in f16 needs a `scale`
//!         that keeps it above 6e-8. M is a run-time value.
//! ```

use super::embedding::{check_ids, check_numbers, grid, index_of, vector_width};
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Numbers of a row that a unit's registers hold, and most vectors.
const HELD: usize = 32;
const MOST_VECTORS: usize = 8;
/// Fewest units of a team: their vectors fill a sector of memory or more.
const FEWEST: usize = 8;
/// Stands for no logit: below all others, and finite.
const LOWEST: f32 = -3.0e38;

/// Sizes of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// M, rows.
    pub rows: usize,
    /// V, logits of a row.
    pub vocab: usize,
    /// Columns behind them.
    pub padding: usize,
}

impl Dims {
    /// Numbers from one row to the next.
    fn columns(&self) -> usize {
        self.vocab + self.padding
    }
}

/// Types of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Of logits, and of their gradient.
    pub logits: StorageType,
    /// Of the bias; not looked at where there is none.
    pub bias: StorageType,
    /// Of target ids: an integer.
    pub target: StorageType,
}

/// Tensors of one call, shaped as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Logits; overwritten where there is a gradient.
    pub logits: &'a Handle,
    /// Added to every row of logits.
    pub bias: Option<&'a Handle>,
    /// Target ids.
    pub target: &'a Handle,
}

/// How losses are counted, and what else is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Factor of each loss: 1 / M makes their sum a mean.
    pub scale: f32,
    /// Whether the gradient overwrites the logits.
    pub gradient: bool,
}

/// Compile-time values of [`loss_rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Numbers of a vector.
    width: usize,
    /// Units of a row.
    team: usize,
    /// Vectors that a unit holds at once.
    held: usize,
    /// Whether a team holds a whole row at once.
    whole: bool,
    biased: bool,
    padded: bool,
    gradient: bool,
}

impl Form {
    fn new(dims: Dims, width: usize, biased: bool, gradient: bool) -> Self {
        let vectors = dims.columns() / width;
        let most = (HELD / width).min(MOST_VECTORS);
        let team = vectors.div_ceil(most).next_power_of_two().clamp(FEWEST, UNITS);
        let held = vectors.div_ceil(team).min(most);
        let whole = vectors <= team * held;
        let padded = dims.padding > 0;
        Self { source: crate::SOURCE, width, team, held, whole, biased, padded, gradient }
    }

    /// Rows of a cube.
    fn rows(&self) -> usize {
        UNITS / self.team
    }
}

/// Losses of all rows, `[M]`, f32, in one launch.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn losses<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    inputs: Inputs<'_>,
    loss: Loss,
    types: Types,
) -> Result<Buffer, Refusal> {
    let (rows, columns) = (dims.rows, dims.columns());
    let Inputs { logits, bias, target } = inputs;
    check_numbers(rows, dims.vocab)?;
    check_numbers(rows, columns)?;
    check_type(client, types.logits)?;
    check_ids(client, types.target)?;
    // A bias that is not there: any tensor would do, and none is read.
    let (bias_type, biases) =
        if bias.is_some() { (types.bias, columns) } else { (types.logits, 1) };
    check_type(client, bias_type)?;
    let given = bias.unwrap_or(logits);
    let width = vector_width(client, columns, &[(logits, types.logits), (given, bias_type)]);
    let form = Form::new(dims, width, bias.is_some(), loss.gradient);
    let cubes = grid(client, rows.div_ceil(form.rows()))?;
    let losses = buffer(client, &[rows], F32);
    // SAFETY: units past the last row or vector repeat it and store nothing, and no target outside the
    // row is looked up.
    #[allow(unsafe_code)]
    unsafe {
        loss_rows::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(logits, rows * columns),
            GivenLaunch::new(array(given, biases.max(width)), array(target, rows)),
            whole(&losses),
            SizesLaunch::new(
                rows as u32,
                (columns / width) as u32,
                dims.vocab as u32,
                loss.scale,
                f32::NAN,
            ),
            form,
            [types.logits, bias_type, types.target],
            width,
        );
    }
    Ok(losses)
}

/// The sum of the first `len` numbers of `x`, f32: `[1]`. One launch, or two for a long vector.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn total<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    len: usize,
) -> Result<Buffer, Refusal> {
    super::adamw::total(client, x, len)
}

/// Inputs besides logits; `form` says whether the bias is read.
#[derive(CubeType, CubeLaunch)]
struct Given<B: Float, I: Int, N: Size> {
    /// `[V]`.
    bias: Array<Vector<B, N>>,
    /// `[M]`.
    target: Array<I>,
}

/// Numbers that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// M.
    rows: u32,
    /// Vectors of a row.
    vectors: u32,
    /// V.
    vocab: u32,
    scale: f32,
    /// Takes the place of `scale` where a target is none: a shader has no constant for it.
    nan: f32,
}

/// Vectors of a row that a unit has at once.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The first vector of the row.
    start: usize,
    /// The unit's first vector, in the row; the others are a team apart.
    first: usize,
    /// Vectors of the row.
    vectors: usize,
    /// V.
    vocab: usize,
}

/// State of online softmax: a maximum, and the sum of all e^{z - maximum}.
#[derive(CubeType, Clone, Copy)]
struct Softmax {
    maximum: f32,
    sum: f32,
}

/// Numbers that make a gradient of exponentials.
#[derive(CubeType, Clone, Copy)]
struct Slope {
    /// Factor of an exponential.
    factor: f32,
    /// Taken off at the target.
    scale: f32,
    /// The target.
    goal: usize,
}

/// The kernel of [`losses`].
#[cube(launch_unchecked)]
fn loss_rows<F: Float, B: Float, I: Int, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    x: &Given<B, I, N>,
    loss: &mut Array<f32>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F, B, I)] _types: [StorageType; 3],
    #[define(N)] _width: usize,
) {
    let team = comptime!(form.team);
    let vectors = sizes.vectors as usize;
    let own = UNIT_POS as usize % team;
    let row = CUBE_POS * comptime!(form.rows()) + UNIT_POS as usize / team;
    // Units past the last row repeat it: none may miss a barrier.
    let row_read = min(row, sizes.rows as usize - 1);
    let start = row_read * vectors;
    let vocab = sizes.vocab as usize;
    let index = index_of::<I>(x.target[row_read], sizes.vocab);
    let valid = index < sizes.vocab;
    let goal = min(index, sizes.vocab - 1) as usize;
    let scale = select(valid, sizes.scale, sizes.nan);
    // Read before any unit writes: barriers follow.
    let at_goal = value_at::<F, B, N>(logits, &x.bias, start, goal, form);

    // Online softmax over the unit's vectors: the sum shrinks where the maximum grows.
    let mut held = Array::<Vector<f32, N>>::new(comptime!(form.held));
    let mut maximum = f32::new(LOWEST);
    let mut sum = 0.0f32;
    let stride = comptime!(form.team * form.held);
    let turns = if comptime!(form.whole) { 1usize.runtime() } else { (vectors - 1) / stride + 1 };
    for turn in 0..turns {
        let place = Place { start, first: turn * stride + own, vectors, vocab };
        load::<F, B, N>(&mut held, logits, &x.bias, place, form);
        let larger = largest::<N>(&held, maximum, form);
        sum *= f32::exp(maximum - larger);
        maximum = larger;
        sum += exponentials::<N>(&mut held, maximum, form);
    }

    // Loss.
    let softmax = team_softmax(maximum, sum, form);
    if own == 0 && row < sizes.rows as usize {
        loss[row] = scale * (softmax.maximum - at_goal + f32::ln(softmax.sum));
    }

    // Gradient: of the exponentials in registers, or of those of a second reading.
    if comptime!(form.gradient) {
        let mut factor = scale / softmax.sum;
        if comptime!(form.whole) {
            factor *= f32::exp(maximum - softmax.maximum);
        }
        let slope = Slope { factor, scale, goal };
        // Rows past the last one store nothing.
        let stored = select(row < sizes.rows as usize, vectors, 0usize);
        for turn in 0..turns {
            let first = turn * stride + own;
            if comptime!(!form.whole) {
                let place = Place { start, first, vectors, vocab };
                load::<F, B, N>(&mut held, logits, &x.bias, place, form);
                exponentials::<N>(&mut held, softmax.maximum, form);
            }
            let place = Place { start, first, vectors: stored, vocab };
            store::<F, N>(logits, &held, place, slope, form);
        }
    }
}

/// The logit, with its bias, at one place of a row.
#[cube]
fn value_at<F: Float, B: Float, N: Size>(
    logits: &Array<Vector<F, N>>,
    bias: &Array<Vector<B, N>>,
    start: usize,
    at: usize,
    #[comptime] form: Form,
) -> f32 {
    let width = comptime!(form.width);
    let mut around = Vector::<f32, N>::cast_from(logits[start + at / width]);
    if comptime!(form.biased) {
        around += Vector::<f32, N>::cast_from(bias[at / width]);
    }
    let mut value = 0.0f32;
    #[unroll]
    for l in 0..width {
        value = select(at % width == l, around[l], value);
    }
    value
}

/// Fills `held` with a unit's logits, and the lowest number past the row's V.
#[cube]
fn load<F: Float, B: Float, N: Size>(
    held: &mut Array<Vector<f32, N>>,
    logits: &Array<Vector<F, N>>,
    bias: &Array<Vector<B, N>>,
    place: Place,
    #[comptime] form: Form,
) {
    #[unroll]
    for n in 0..comptime!(form.held) {
        let at = min(place.first + comptime!(n * form.team), place.vectors - 1);
        held[n] = Vector::<f32, N>::cast_from(logits[place.start + at]);
    }
    #[unroll]
    for n in 0..comptime!(form.held) {
        let at = place.first + comptime!(n * form.team);
        if comptime!(form.biased) {
            held[n] += Vector::<f32, N>::cast_from(bias[min(at, place.vectors - 1)]);
        }
        if at >= place.vectors {
            held[n] = Vector::<f32, N>::new(LOWEST);
        } else if comptime!(form.padded) {
            let mut vector = held[n];
            #[unroll]
            for l in 0..comptime!(form.width) {
                let there = at * comptime!(form.width) + l < place.vocab;
                vector[l] = select(there, vector[l], f32::new(LOWEST));
            }
            held[n] = vector;
        }
    }
}

/// The largest of `held` and `least`.
#[cube]
fn largest<N: Size>(held: &Array<Vector<f32, N>>, least: f32, #[comptime] form: Form) -> f32 {
    let mut most = least;
    #[unroll]
    for n in 0..comptime!(form.held) {
        let vector = held[n];
        #[unroll]
        for l in 0..comptime!(form.width) {
            most = max(most, vector[l]);
        }
    }
    most
}

/// Makes `held` e^{held - maximum}, and returns the sum.
#[cube]
fn exponentials<N: Size>(
    held: &mut Array<Vector<f32, N>>,
    maximum: f32,
    #[comptime] form: Form,
) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for n in 0..comptime!(form.held) {
        let powers = Vector::exp(held[n] - Vector::<f32, N>::new(maximum));
        #[unroll]
        for l in 0..comptime!(form.width) {
            sum += powers[l];
        }
        held[n] = powers;
    }
    sum
}

/// The maximum and sum of a team, from those of its units.
#[cube]
fn team_softmax(maximum: f32, sum: f32, #[comptime] form: Form) -> Softmax {
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(form.team);
    let mut maxima = SharedMemory::<f32>::new(UNITS);
    let mut sums = SharedMemory::<f32>::new(UNITS);
    maxima[unit] = maximum;
    sums[unit] = sum;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(form.team.ilog2()) {
        let half = comptime!(form.team >> (level + 1));
        if own < half {
            let most = max(maxima[unit], maxima[unit + half]);
            let mine = sums[unit] * f32::exp(maxima[unit] - most);
            sums[unit] = mine + sums[unit + half] * f32::exp(maxima[unit + half] - most);
            maxima[unit] = most;
        }
        sync_cube();
    }
    Softmax { maximum: maxima[unit - own], sum: sums[unit - own] }
}

/// Writes a unit's gradients, from its exponentials.
#[cube]
fn store<F: Float, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    held: &Array<Vector<f32, N>>,
    place: Place,
    slope: Slope,
    #[comptime] form: Form,
) {
    let width = comptime!(form.width);
    #[unroll]
    for n in 0..comptime!(form.held) {
        let at = place.first + comptime!(n * form.team);
        let powers = held[n];
        let mut out = Vector::<f32, N>::empty();
        #[unroll]
        for l in 0..width {
            let value = powers[l] * slope.factor;
            let is_goal = at * width + l == slope.goal;
            out[l] = select(is_goal, value - slope.scale, value);
        }
        if at < place.vectors {
            logits[place.start + at] = Vector::<F, N>::cast_from(out);
        }
    }
}

#[cfg(test)]
#[path = "cross_entropy_tests.rs"]
mod tests;
