//! A causal convolution as long as its sequences, each channel by itself, and its gradients.
//! ```text
//! y_t     = sum_(l <= t) taps_l x_(t - l)
//! dx_s    = sum_l taps_l dy_(s + l)              the same over tokens in reverse
//! dtaps_l = sum_b sum_t dy_t x_(t - l)
//!
//! x, y: [B, T, D]  F     taps: [L, D]  f32, L up to T
//!
//! Work:   a unit has 16 tokens of y of one channel, and goes back through x 16 tokens at a time: 256 products of 16
//!         numbers of x by 31 taps, of which it has 16 from the step before. Units side by side have channels side by
//!         side. Of dtaps a unit has 16 taps of one channel, and goes through all tokens of some sequences.
//! Cost:   B T min(T / 2, L) D multiplications each, T rounded up to 16; an eighth of an instruction beside each of
//!         them reads. x is read T / 32 times, from cache.
//! Sums:   of dtaps over the sequences of a unit, then by `column_sums` over units: equal inputs give equal bits.
//! Edges:  all sizes are run-time values. Tokens past T and taps past L are zeros.
//! ```
//! Source: as `y_t` says; the long convolutions of Hyena, arXiv 2302.10866, H3, arXiv 2212.14052, and their kin.

use super::column_sums::{check_matrix, column_sums, grid, multiprocessors};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{Source, UNITS};
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens, or taps, of a unit.
const TILE: usize = 16;
/// Units of each multiprocessor that are wanted for gradients of taps.
const ENOUGH: usize = 1024;
/// Most sums of a tap that are summed by a second launch.
const MOST_SPLITS: usize = 512;

/// Sizes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// D.
    pub channels: usize,
    /// L.
    pub length: usize,
}

impl Dims {
    /// Refuses what the kernels cannot count.
    fn check<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        dtype: StorageType,
    ) -> Result<(), Refusal> {
        let Self { batch, tokens, channels, length } = self;
        check_type(client, dtype)?;
        check_matrix(client, batch.saturating_mul(tokens.next_multiple_of(TILE)), channels)?;
        match (1..=tokens).contains(&length) {
            true => Ok(()),
            false => Err(Refusal::TooLarge { what: "taps", got: length, most: tokens }),
        }
    }

    /// Units of y, or of x's gradient.
    fn units(self) -> usize {
        self.batch * self.tokens.div_ceil(TILE) * self.channels
    }

    fn numbers(self) -> usize {
        self.batch * self.tokens * self.channels
    }

    fn sizes<R: Runtime>(self, sequences: usize) -> SizesLaunch<R> {
        SizesLaunch::new(
            self.batch as u32,
            self.tokens as u32,
            self.channels as u32,
            self.length as u32,
            sequences as u32,
        )
    }
}

/// Compile-time values of [`convolve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Whether tokens are taken in reverse.
    back: bool,
}

/// y of `x`, or with `back` the gradient of x from that of y: `[B, T, D]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn convolve<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Handle,
    taps: &Handle,
    back: bool,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    dims.check(client, dtype)?;
    let cubes = grid(client, dims.units().div_ceil(UNITS))?;
    let y = buffer(client, &[dims.batch, dims.tokens, dims.channels], dtype);
    // SAFETY: units past the last stop, reads past the ends repeat the last token and tap, and the caller promises the
    // sizes of `dims`.
    #[allow(unsafe_code)]
    unsafe {
        tokens_by_taps::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(x, dims.numbers()),
            array(taps, dims.length * dims.channels),
            whole(&y),
            dims.sizes(dims.batch),
            Form { source: SOURCE, back },
            dtype,
        );
    }
    Ok(y)
}

/// The gradient of the taps, `[L, D]` in f32, from `x` and the gradient of y.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn tap_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Handle,
    d_y: &Handle,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    dims.check(client, dtype)?;
    let Dims { batch, channels, length, .. } = dims;
    let of_a_split = length.div_ceil(TILE) * channels;
    let wanted = (multiprocessors(client) * ENOUGH).div_ceil(of_a_split);
    let sequences = batch.div_ceil(wanted.clamp(1, MOST_SPLITS));
    let splits = batch.div_ceil(sequences);
    check_matrix(client, splits, length * channels)?;
    let cubes = grid(client, (splits * of_a_split).div_ceil(UNITS))?;
    let shape = if splits == 1 { vec![length, channels] } else { vec![splits, length, channels] };
    let sums = buffer(client, &shape, F32);
    // SAFETY: as of `convolve`.
    #[allow(unsafe_code)]
    unsafe {
        taps_of_tokens::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(x, dims.numbers()),
            array(d_y, dims.numbers()),
            whole(&sums),
            dims.sizes(sequences),
            Source(SOURCE),
            dtype,
        );
    }
    if splits == 1 {
        return Ok(sums);
    }
    let sum = column_sums(client, &sums.handle, splits, length * channels, F32, F32)?;
    Ok(Buffer { shape: vec![length, channels], ..sum })
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: u32,
    tokens: u32,
    channels: u32,
    length: u32,
    /// Sequences of a unit.
    sequences: u32,
}

/// A column of a matrix, one channel of a sequence or of the taps.
#[derive(CubeType, Clone, Copy)]
struct Channel {
    /// Place of its first number.
    first: usize,
    /// Numbers from one to the next.
    stride: usize,
    /// How many it has.
    count: usize,
}

/// [`TILE`] numbers of a channel from `from` on, zeros behind its end; in reverse where it is taken so.
#[cube]
fn load<F: Float>(
    values: &mut Array<f32>,
    from_array: &Array<F>,
    channel: &Channel,
    from: usize,
    #[comptime] back: bool,
) {
    #[unroll]
    for i in 0..TILE {
        let n = from + i;
        let last = channel.count - 1;
        let held = min(n, last);
        let row = if comptime!(back) { last - held } else { held };
        let value = f32::cast_from(from_array[channel.first + row * channel.stride]);
        values[i] = select(n < channel.count, value, 0.0f32);
    }
}

/// Adds `sum_j b_(i - j) a_j` to each of [`TILE`] sums, of which `low` has the numbers of b below place 0.
#[cube]
fn multiply_add(sums: &mut Array<f32>, a: &Array<f32>, low: &Array<f32>, high: &Array<f32>) {
    #[unroll]
    for j in 0..TILE {
        #[unroll]
        for i in 0..TILE {
            if comptime!(i >= j) {
                sums[i] += high[comptime!(i - j)] * a[j];
            } else {
                sums[i] += low[comptime!(TILE + i - j)] * a[j];
            }
        }
    }
}

/// Fresh zeros.
#[cube]
fn zeros() -> Array<f32> {
    let mut values = Array::<f32>::new(TILE);
    #[unroll]
    for i in 0..TILE {
        values[i] = 0.0f32;
    }
    values
}

/// The kernel of [`convolve`].
#[cube(launch_unchecked)]
fn tokens_by_taps<F: Float>(
    x: &Array<F>,
    taps: &Array<f32>,
    y: &mut Array<F>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
) {
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    let tiles = (tokens - 1) / TILE + 1;
    let d = ABSOLUTE_POS % channels;
    let rest = ABSOLUTE_POS / channels;
    let sequence = rest / tiles;
    if sequence >= sizes.batch as usize {
        terminate!();
    }
    // The longest work begins first.
    let tile = tiles - 1 - rest % tiles;
    let rows = Channel { first: sequence * tokens * channels + d, stride: channels, count: tokens };
    let of_taps = Channel { first: d, stride: channels, count: sizes.length as usize };
    let mut sums = zeros();
    let mut low = zeros();
    let mut high = zeros();
    let mut a = zeros();
    // The last step whose lowest taps are there.
    let steps = min(tile, (sizes.length as usize + TILE - 2) / TILE) + 1;
    for step in 0..steps {
        load::<f32>(&mut high, taps, &of_taps, step * TILE, false);
        load::<F>(&mut a, x, &rows, (tile - step) * TILE, form.back);
        multiply_add(&mut sums, &a, &low, &high);
        #[unroll]
        for i in 0..TILE {
            low[i] = high[i];
        }
    }
    #[unroll]
    for i in 0..TILE {
        let t = tile * TILE + i;
        if t < tokens {
            let row = if comptime!(form.back) { tokens - 1 - t } else { t };
            y[rows.first + row * channels] = F::cast_from(sums[i]);
        }
    }
}

/// The kernel of [`tap_gradients`].
#[cube(launch_unchecked)]
fn taps_of_tokens<F: Float>(
    x: &Array<F>,
    d_y: &Array<F>,
    sums: &mut Array<f32>,
    sizes: Sizes,
    #[comptime] _source: Source,
    #[define(F)] _dtype: StorageType,
) {
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    let (length, batch) = (sizes.length as usize, sizes.batch as usize);
    let tiles = (length - 1) / TILE + 1;
    let d = ABSOLUTE_POS % channels;
    let rest = ABSOLUTE_POS / channels;
    let tile = rest % tiles;
    let split = rest / tiles;
    let first = split * sizes.sequences as usize;
    if first >= batch {
        terminate!();
    }
    let end = min(first + sizes.sequences as usize, batch);
    let mut of_taps = zeros();
    let mut a = zeros();
    let mut high = zeros();
    for sequence in first..end {
        let place = sequence * tokens * channels + d;
        let rows = Channel { first: place, stride: channels, count: tokens };
        let mut low = zeros();
        // Tokens from the first tap of the tile on: those before it meet nothing.
        for step in 0..(tokens - 1) / TILE + 1 - tile {
            load::<F>(&mut high, x, &rows, step * TILE, false);
            load::<F>(&mut a, d_y, &rows, (tile + step) * TILE, false);
            add_products_of_tokens(&mut of_taps, &a, &low, &high);
            #[unroll]
            for i in 0..TILE {
                low[i] = high[i];
            }
        }
    }
    #[unroll]
    for i in 0..TILE {
        let tap = tile * TILE + i;
        if tap < length {
            sums[(split * length + tap) * channels + d] = of_taps[i];
        }
    }
}

/// Adds `sum_i b_(i - j) a_i` to the sum of each tap j.
#[cube]
fn add_products_of_tokens(
    sums: &mut Array<f32>,
    a: &Array<f32>,
    low: &Array<f32>,
    high: &Array<f32>,
) {
    #[unroll]
    for i in 0..TILE {
        #[unroll]
        for j in 0..TILE {
            if comptime!(i >= j) {
                sums[j] += high[comptime!(i - j)] * a[i];
            } else {
                sums[j] += low[comptime!(TILE + i - j)] * a[i];
            }
        }
    }
}

#[cfg(test)]
#[path = "long_convolution_tests.rs"]
mod tests;
