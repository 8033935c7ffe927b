//! A block-diagonal linear layer: every head has a small matrix of its own, and sees nothing of the others.
//! ```text
//! y[n, h, j]  = b[h, j] + sum_e x[n, h, e] W[h, e, j]
//! dx[n, h, e] = sum_j dy[n, h, j] W[h, e, j]              the same with every block transposed
//! dW[h, e, j] = sum_n x[n, h, e] dy[n, h, j]
//!
//! x: [N, H, E]  F     W: [H, E, J]     b: [H, J], of the type of W     y: [N, H, J]  F
//!
//! Work:   a product: a unit makes a vector of y in `ROWS` rows, so that a vector of W serves them all. A gradient
//!         of W: a unit sums a vector of dW over a run of rows; a second launch sums the runs.
//! Cost:   x, W and the other numbers of a head come from cache after their first read. Arithmetic is f32.
//! Edges:  a block has at most `LARGEST` numbers: larger ones are products for tensor cores. All sizes are run-time
//!         values but E; a J that 4 does not divide is written in pairs or number by number.
//! ```
//! Tensors begin at multiples of 16 bytes.

use super::column_sums::{check_matrix, column_sums_at_once, grid, multiprocessors, vector_width};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{Source, UNITS};
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most numbers of a block.
const LARGEST: usize = 4096;
/// Rows of a unit.
const ROWS: usize = 4;
/// Cubes of a gradient's first launch, for each multiprocessor.
const CUBES: usize = 4;
/// Fewest rows of a run.
const RUN: usize = 32;
/// Most runs.
const MOST_RUNS: usize = 256;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// N.
    pub rows: usize,
    /// H.
    pub heads: usize,
    /// E, numbers of a head that come in.
    pub from: usize,
    /// J, numbers of a head that come out.
    pub to: usize,
}

impl Dims {
    /// The layer whose product is this one's gradient of x.
    pub fn transposed(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    fn weights(&self) -> usize {
        self.heads * self.from * self.to
    }

    fn check<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        types: [StorageType; 2],
    ) -> Result<(), Refusal> {
        types.into_iter().try_for_each(|dtype| check_type(client, dtype))?;
        check_matrix(client, self.rows, self.heads * self.from)?;
        check_matrix(client, self.rows, self.heads * self.to)?;
        let got = self.from * self.to;
        match got > LARGEST {
            true => Err(Refusal::TooLarge { what: "numbers of a block", got, most: LARGEST }),
            false => check_matrix(client, self.heads, got),
        }
    }
}

/// Compile-time values of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// E.
    from: usize,
    bias: bool,
}

/// `x W + b`, `[N, H, J]` in the type of `x`. `weight` and `bias` are of the type `weights`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Handle,
    weight: &Handle,
    bias: Option<&Handle>,
    [dtype, weights]: [StorageType; 2],
) -> Result<Buffer, Refusal> {
    dims.check(client, [dtype, weights])?;
    let Dims { rows, heads, from, to } = dims;
    let vector = vector_width(client, to);
    let (across, down) = (heads * to / vector, rows.div_ceil(ROWS));
    let y = buffer(client, &[rows, heads, to], dtype);
    let sizes = SizesLaunch::new(
        rows as u32,
        heads as u32,
        (to / vector) as u32,
        down as u32,
        across as u32,
    );
    let form = Form { source: SOURCE, from, bias: bias.is_some() };
    // SAFETY: units past the last vector stop, rows past the last are not written, and the caller promises the sizes
    // of `dims`; the bias is read where `form` has one.
    #[allow(unsafe_code)]
    unsafe {
        multiply_blocks::launch_unchecked::<R>(
            client,
            grid(client, (across * down).div_ceil(UNITS))?,
            CubeDim::new_1d(UNITS as u32),
            array(x, rows * heads * from),
            array(weight, dims.weights()),
            array(bias.unwrap_or(weight), heads * to),
            whole(&y),
            sizes,
            form,
            [dtype, weights],
            vector,
        );
    }
    Ok(y)
}

/// The gradient of W, `[H, E, J]` of the type `weights`, from `x` and that of y, both of the type `dtype`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn weight_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Handle,
    d_y: &Handle,
    [dtype, weights]: [StorageType; 2],
) -> Result<Buffer, Refusal> {
    dims.check(client, [dtype, weights])?;
    let Dims { rows, heads, from, to } = dims;
    let vector = vector_width(client, to);
    let vectors = dims.weights() / vector;
    let tiles = vectors.div_ceil(UNITS);
    let wanted = (CUBES * multiprocessors(client)).div_ceil(tiles).min(MOST_RUNS);
    let run = rows.div_ceil(wanted).max(RUN);
    let runs = rows.div_ceil(run);
    check_matrix(client, runs, dims.weights())?;
    let partial = buffer(client, &[runs, dims.weights()], F32);
    let sizes = RunsLaunch::new(
        rows as u32,
        heads as u32,
        from as u32,
        (to / vector) as u32,
        run as u32,
        runs as u32,
    );
    // SAFETY: units past the last vector and cubes past the last run stop, and the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        sum_outer_products::launch_unchecked::<R>(
            client,
            grid(client, tiles * runs)?,
            CubeDim::new_1d(UNITS as u32),
            array(x, rows * heads * from),
            array(d_y, rows * heads * to),
            whole(&partial),
            sizes,
            Source(SOURCE),
            dtype,
            vector,
        );
    }
    let sums = column_sums_at_once(client, &partial.handle, runs, dims.weights(), weights)?;
    Ok(Buffer { shape: vec![heads, from, to], ..sums })
}

/// Sizes of a product that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    heads: u32,
    /// Vectors of a head's J.
    to: u32,
    /// Groups of [`ROWS`].
    down: u32,
    /// Vectors of a row of y.
    across: u32,
}

/// The kernel of [`multiply`].
#[cube(launch_unchecked)]
fn multiply_blocks<F: Float, W: Float, N: Size>(
    x: &Array<F>,
    weight: &Array<Vector<W, N>>,
    bias: &Array<Vector<W, N>>,
    y: &mut Array<Vector<F, N>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F, W)] _types: [StorageType; 2],
    #[define(N)] _width: usize,
) {
    let across = sizes.across as usize;
    let down = ABSOLUTE_POS / across;
    if down >= sizes.down as usize {
        terminate!();
    }
    let column = ABSOLUTE_POS % across;
    let to = sizes.to as usize;
    let head = column / to;
    let first = down * comptime!(ROWS);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(ROWS));
    #[unroll]
    for r in 0..comptime!(ROWS) {
        sums[r] = Vector::<f32, N>::new(0.0f32);
        if comptime!(form.bias) {
            sums[r] = Vector::<f32, N>::cast_from(bias[column]);
        }
    }
    let last = sizes.rows as usize - 1;
    let width = sizes.heads as usize * comptime!(form.from);
    let place = head * comptime!(form.from);
    for e in 0..comptime!(form.from) {
        let w = Vector::<f32, N>::cast_from(weight[(place + e) * to + column % to]);
        #[unroll]
        for r in 0..comptime!(ROWS) {
            let row = min(first + r, last);
            sums[r] += Vector::<f32, N>::new(f32::cast_from(x[row * width + place + e])) * w;
        }
    }
    #[unroll]
    for r in 0..comptime!(ROWS) {
        if first + r <= last {
            y[(first + r) * across + column] = Vector::<F, N>::cast_from(sums[r]);
        }
    }
}

/// Sizes of a gradient that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Runs {
    rows: u32,
    heads: u32,
    /// E.
    from: u32,
    /// Vectors of a head's J.
    to: u32,
    /// Rows of a run.
    run: u32,
    runs: u32,
}

/// The kernel of [`weight_gradient`].
#[cube(launch_unchecked)]
fn sum_outer_products<F: Float, N: Size>(
    x: &Array<F>,
    d_y: &Array<Vector<F, N>>,
    partial: &mut Array<Vector<f32, N>>,
    sizes: Runs,
    #[comptime] _source: Source,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let (from, to) = (sizes.from as usize, sizes.to as usize);
    let (width, across) = (sizes.heads as usize * from, sizes.heads as usize * to);
    let vectors = width * to;
    let tiles = vectors.div_ceil(comptime!(UNITS));
    let run = CUBE_POS / tiles;
    let vector = CUBE_POS % tiles * comptime!(UNITS) + UNIT_POS as usize;
    if vector >= vectors || run >= sizes.runs as usize {
        terminate!();
    }
    let entry = vector / to;
    let column = entry / from * to + vector % to;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let first = run * sizes.run as usize;
    for row in first..min(first + sizes.run as usize, sizes.rows as usize) {
        let number = f32::cast_from(x[row * width + entry]);
        sum +=
            Vector::<f32, N>::new(number) * Vector::<f32, N>::cast_from(d_y[row * across + column]);
    }
    partial[run * vectors + vector] = sum;
}

#[cfg(test)]
#[path = "block_linear_tests.rs"]
mod tests;
