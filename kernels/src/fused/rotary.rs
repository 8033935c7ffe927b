//! Rotary embedding, one launch, which turned back is its backward pass too.
//! ```text
//! y_i         = x_i cos_ti - x_{i + R/2} sin_ti        i < R / 2
//! y_{i + R/2} = x_i sin_ti + x_{i + R/2} cos_ti
//! y_i         = x_i                                    i >= R
//! dx is dy turned by the opposite angles
//!
//! x, y: [B, T, H, K]  F     table: [2, T, R / 2]  f32, cosines before sines
//!
//! Work:   a unit a vector of up to 16 bytes of x_i with the one of x_{i + R/2}, or one of the rest.
//! Cost:   one read of x and one write of y; tables come from cache. Arithmetic is f32.
//! Edges:  all sizes are run-time values; odd ones are read number by number.
//! Source: Su et al., arXiv 2104.09864.
//! ```
//! Tensors begin at multiples of 16 bytes.

use super::column_sums::{check_matrix, grid};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes of the widest load.
const LOAD: usize = 16;

/// Sizes of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// K.
    pub width: usize,
    /// R, even, up to K.
    pub rotated: usize,
}

impl Dims {
    fn rows(&self) -> usize {
        self.batch * self.tokens * self.heads
    }
}

/// Compile-time values of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Whether it turns by the opposite angles.
    back: bool,
}

/// `x` turned, or turned `back`: `[B, T, H, K]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn rotate<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    x: &Handle,
    table: &Handle,
    back: bool,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    let Dims { batch, tokens, heads, width, rotated } = dims;
    check_type(client, dtype)?;
    check_matrix(client, dims.rows(), width)?;
    if rotated == 0 || rotated > width || !rotated.is_multiple_of(2) {
        let what = "channels that are rotated, an even number";
        return Err(Refusal::TooLarge { what, got: rotated, most: width / 2 * 2 });
    }
    let half = rotated / 2;
    let most = (LOAD / dtype.size()).min(client.properties().hardware.max_vector_size);
    let fits = |n: &usize| *n <= most && half.is_multiple_of(*n) && width.is_multiple_of(*n);
    let vector = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
    let units = dims.rows() * (width - half) / vector;
    let y = buffer(client, &[batch, tokens, heads, width], dtype);
    let sizes = SizesLaunch::new(
        units as u32,
        tokens as u32,
        heads as u32,
        (half / vector) as u32,
        (width / vector) as u32,
    );
    // SAFETY: units past the last vector stop, and the caller promises the sizes of `dims`.
    #[allow(unsafe_code)]
    unsafe {
        turn::launch_unchecked::<R>(
            client,
            grid(client, units.div_ceil(UNITS))?,
            CubeDim::new_1d(UNITS as u32),
            array(x, dims.rows() * width),
            array(table, 2 * tokens * half),
            whole(&y),
            sizes,
            Form { source: SOURCE, back },
            dtype,
            vector,
        );
    }
    Ok(y)
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Vectors of y, without the second of each pair.
    units: u32,
    tokens: u32,
    heads: u32,
    /// Vectors of R / 2 and of K channels.
    half: u32,
    width: u32,
}

/// The kernel of [`rotate`].
#[cube(launch_unchecked)]
fn turn<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    table: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<F, N>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let n = ABSOLUTE_POS;
    if n >= sizes.units as usize {
        terminate!();
    }
    let half = sizes.half as usize;
    let of_row = sizes.width as usize - half;
    let row = n / of_row;
    let place = n % of_row;
    let first = row * sizes.width as usize + place;
    if place < half {
        let tokens = sizes.tokens as usize;
        let angle = row / sizes.heads as usize % tokens * half + place;
        let cos = table[angle];
        let mut sin = table[tokens * half + angle];
        if comptime!(form.back) {
            // CUDA has no unary minus of vectors.
            sin = Vector::<f32, N>::new(0.0f32) - sin;
        }
        let a = Vector::<f32, N>::cast_from(x[first]);
        let b = Vector::<f32, N>::cast_from(x[first + half]);
        y[first] = Vector::<F, N>::cast_from(a * cos - b * sin);
        y[first + half] = Vector::<F, N>::cast_from(a * sin + b * cos);
    } else {
        // Behind the second of all pairs.
        y[first + half] = x[first + half];
    }
}

#[cfg(test)]
#[path = "rotary_tests.rs"]
mod tests;
