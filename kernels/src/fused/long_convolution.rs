//! A causal convolution as long as its sequences, each channel by itself, and its gradients.
//! ```text
//! y_t     = sum_(l <= t) taps_l x_(t - l)
//! dx_s    = sum_l taps_l dy_(s + l)              the same over tokens in reverse
//! dtaps_l = sum_b sum_t dy_t x_(t - l)
//!
//! x, y: [B, T, D]  F     taps: [L, D]  f32, L up to T
//!
//! Work:   a unit has 16 tokens of y of one channel, and goes back through x 16 tokens at a time: 256 products of 16
//!         numbers of x by 31 taps, of which it has 16 from the step before. Of dtaps a unit has 16 taps of one channel,
//!         and goes through all tokens of some sequences. The last tile of y takes T / 16 steps, the first takes one:
//!         where units are enough, each has a tile from either end. Side by side stand `lanes` channels, then tiles.
//! Cost:   B T min(T / 2, L) D multiplications each, T rounded up to 16; half an instruction beside each of them reads
//!         and counts, a whole one where T or L are no multiples of 16. x is read T / 32 times, from cache.
//! Sums:   of dtaps over the sequences of a unit, then by `column_sums` over units: equal inputs give equal bits.
//! Edges:  all sizes are run-time values. Tokens past T and taps past L are zeros.
//! ```
//! Source: as `y_t` says; the long convolutions of Hyena, arXiv 2302.10866, H3, arXiv 2212.14052, and their kin.

use super::column_sums::{check_matrix, column_sums, grid, multiprocessors};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens, or taps, of a unit.
const TILE: usize = 16;
/// Units of each multiprocessor that are wanted for gradients of taps.
const ENOUGH: usize = 1024;
/// As many times that, and units get pairs of tiles.
const LEAST_PAIRS: usize = 4;
/// Most sums of a tap that are summed by a second launch.
const MOST_SPLITS: usize = 1024;
/// Channels side by side: with them a cube has tiles that read the same numbers.
const LANES: usize = 32;

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

    fn numbers(self) -> usize {
        self.batch * self.tokens * self.channels
    }

    fn sizes<R: Runtime>(self, sequences: usize) -> SizesLaunch<R> {
        let lanes = if self.channels.is_multiple_of(LANES) { LANES } else { self.channels };
        SizesLaunch::new(
            self.batch as u32,
            self.tokens as u32,
            self.channels as u32,
            self.length as u32,
            sequences as u32,
            lanes as u32,
        )
    }

    fn form(self, back: bool, pairs: bool) -> Form {
        let whole = self.tokens.is_multiple_of(TILE) && self.length.is_multiple_of(TILE);
        Form { source: SOURCE, whole, back, pairs }
    }
}

/// Whether units have pairs of tiles: half as many units are enough still.
fn pairs<R: Runtime>(
    client: &ComputeClient<R>,
    batch: usize,
    tiles: usize,
    channels: usize,
) -> bool {
    let units = batch.saturating_mul(tiles).saturating_mul(channels);
    tiles > 1 && units >= LEAST_PAIRS * multiprocessors(client) * ENOUGH
}

/// Units of so many tiles.
fn in_units(tiles: usize, pairs: bool) -> usize {
    if pairs { tiles.div_ceil(2) } else { tiles }
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Whether T and L are multiples of [`TILE`].
    whole: bool,
    /// Whether tokens are taken in reverse.
    back: bool,
    /// Whether a unit has a tile from the front and the one as far from the end: where taps are as many as tokens, all
    /// pairs take as many steps.
    pairs: bool,
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
    let pairs = pairs(client, dims.batch, dims.tokens.div_ceil(TILE), dims.channels);
    convolve_in(client, dims, [x, taps], [back, pairs], dtype)
}

/// As [`convolve`], of these x and taps; whether back, and whether by pairs of tiles.
fn convolve_in<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    [x, taps]: [&Handle; 2],
    [back, pairs]: [bool; 2],
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    dims.check(client, dtype)?;
    let tiles = dims.tokens.div_ceil(TILE);
    let units = dims.batch * in_units(tiles, pairs) * dims.channels;
    let cubes = grid(client, units.div_ceil(UNITS))?;
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
            dims.form(back, pairs),
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
    let splits = dims.batch.min(MOST_SPLITS);
    let pairs = pairs(client, splits, dims.length.div_ceil(TILE), dims.channels);
    tap_gradients_in(client, dims, [x, d_y], pairs, dtype)
}

/// As [`tap_gradients`], of these x and gradients of y; whether by pairs of tiles.
fn tap_gradients_in<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    [x, d_y]: [&Handle; 2],
    pairs: bool,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    dims.check(client, dtype)?;
    let Dims { batch, channels, length, .. } = dims;
    let tiles = length.div_ceil(TILE);
    let of_a_split = in_units(tiles, pairs) * channels;
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
            dims.form(false, pairs),
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
    /// Channels side by side, a divisor of all.
    lanes: u32,
}

/// The share of a unit: its channel, and its tile, of `tiles`, of a sequence or some of them.
#[derive(CubeType, Clone, Copy)]
struct Share {
    channel: usize,
    tile: usize,
    group: usize,
}

#[cube]
fn share(tiles: usize, sizes: Sizes, #[comptime] form: Form) -> Share {
    let tiles = if comptime!(form.pairs) { (tiles - 1) / 2 + 1 } else { tiles };
    let lanes = sizes.lanes as usize;
    let blocks = sizes.channels as usize / lanes;
    let rest = ABSOLUTE_POS / lanes;
    let tile = rest % tiles;
    let rest = rest / tiles;
    let channel = rest % blocks * lanes + ABSOLUTE_POS % lanes;
    Share { channel, tile, group: rest / blocks }
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

/// [`TILE`] numbers of a channel from `from` on, zeros behind its end, which a `whole` one has behind them all; in
/// reverse where it is taken so.
#[cube]
fn load<F: Float>(
    values: &mut Array<f32>,
    from_array: &Array<F>,
    channel: &Channel,
    from: usize,
    #[comptime] whole: bool,
    #[comptime] back: bool,
) {
    let last = channel.count - 1;
    #[unroll]
    for i in 0..TILE {
        let n = from + i;
        let held = if comptime!(whole) { n } else { min(n, last) };
        let row = if comptime!(back) { last - held } else { held };
        let value = f32::cast_from(from_array[channel.first + row * channel.stride]);
        if comptime!(whole) {
            values[i] = value;
        } else {
            values[i] = select(n < channel.count, value, 0.0f32);
        }
    }
}

/// Adds `sum_j b_(i - j) a_j` to each of [`TILE`] sums, or `sum_i b_(i - j) a_i` to each sum j where they are `of_taps`;
/// `low` has the numbers of b below place 0.
#[cube]
fn multiply_add(
    sums: &mut Array<f32>,
    a: &Array<f32>,
    low: &Array<f32>,
    high: &Array<f32>,
    #[comptime] of_taps: bool,
) {
    #[unroll]
    for j in 0..TILE {
        #[unroll]
        for i in 0..TILE {
            let (to, from) = comptime!(if of_taps { (j, i) } else { (i, j) });
            if comptime!(i >= j) {
                sums[to] += high[comptime!(i - j)] * a[from];
            } else {
                sums[to] += low[comptime!(TILE + i - j)] * a[from];
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

/// How many tiles a unit has: its own, and where there are `pairs` the one as far from the end.
#[cube]
fn tiles_of_unit(tile: usize, tiles: usize, #[comptime] pairs: bool) -> usize {
    if comptime!(pairs) {
        // The middle one of an odd number stands alone.
        select(2 * tile + 1 == tiles, 1, 2)
    } else {
        1usize.runtime()
    }
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
    let share = share(tiles, sizes, form);
    let (d, sequence) = (share.channel, share.group);
    if sequence >= sizes.batch as usize {
        terminate!();
    }
    let rows = Channel { first: sequence * tokens * channels + d, stride: channels, count: tokens };
    let of_taps = Channel { first: d, stride: channels, count: sizes.length as usize };
    let steps_of_taps = (sizes.length as usize + TILE - 2) / TILE;
    for half in 0..tiles_of_unit(share.tile, tiles, form.pairs) {
        let tile = select(half == 0, share.tile, tiles - 1 - share.tile);
        let mut sums = zeros();
        let mut a = zeros();
        let mut even = zeros();
        let mut odd = zeros();
        // The last step whose lowest taps are there.
        let steps = min(tile, steps_of_taps) + 1;
        // What is high in one step is low in the next.
        for turn in 0..(steps - 1) / 2 + 1 {
            let step = 2 * turn;
            load_taps(&mut even, taps, &of_taps, step, form);
            load::<F>(&mut a, x, &rows, (tile - step) * TILE, form.whole, form.back);
            multiply_add(&mut sums, &a, &odd, &even, false);
            if step + 1 < steps {
                load_taps(&mut odd, taps, &of_taps, step + 1, form);
                load::<F>(&mut a, x, &rows, (tile - step - 1) * TILE, form.whole, form.back);
                multiply_add(&mut sums, &a, &even, &odd, false);
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
}

/// The taps of one step, zeros where none is left.
#[cube]
fn load_taps(
    values: &mut Array<f32>,
    taps: &Array<f32>,
    of_taps: &Channel,
    step: usize,
    #[comptime] form: Form,
) {
    if step * TILE < of_taps.count {
        load::<f32>(values, taps, of_taps, step * TILE, form.whole, false);
    } else {
        #[unroll]
        for i in 0..TILE {
            values[i] = 0.0f32;
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
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
) {
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    let (length, batch) = (sizes.length as usize, sizes.batch as usize);
    let tiles = (length - 1) / TILE + 1;
    let share = share(tiles, sizes, form);
    let (d, split) = (share.channel, share.group);
    let first = split * sizes.sequences as usize;
    if first >= batch {
        terminate!();
    }
    let end = min(first + sizes.sequences as usize, batch);
    for half in 0..tiles_of_unit(share.tile, tiles, form.pairs) {
        let tile = select(half == 0, share.tile, tiles - 1 - share.tile);
        let mut of_taps = zeros();
        let mut a = zeros();
        let mut even = zeros();
        for sequence in first..end {
            let place = sequence * tokens * channels + d;
            let rows = Channel { first: place, stride: channels, count: tokens };
            let mut odd = zeros();
            // Tokens from the first tap of the tile on: those before it meet nothing.
            let steps = (tokens - 1) / TILE + 1 - tile;
            for turn in 0..(steps - 1) / 2 + 1 {
                let step = 2 * turn;
                load::<F>(&mut even, x, &rows, step * TILE, form.whole, false);
                load::<F>(&mut a, d_y, &rows, (tile + step) * TILE, form.whole, false);
                multiply_add(&mut of_taps, &a, &odd, &even, true);
                if step + 1 < steps {
                    load::<F>(&mut odd, x, &rows, (step + 1) * TILE, form.whole, false);
                    load::<F>(&mut a, d_y, &rows, (tile + step + 1) * TILE, form.whole, false);
                    multiply_add(&mut of_taps, &a, &even, &odd, true);
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
}

#[cfg(test)]
#[path = "long_convolution_tests.rs"]
mod tests;
