//! Gated products, forward and backward, one launch each.
//! ```text
//! y       = f(gate) value                              f: SiLU, sigmoid, softplus or the identity
//! d_value = f(gate) d_y
//! d_gate  = f'(gate) value d_y
//!
//! gate, value, y: [N, W]                               all of one type
//! packed: [N, 2W], gate columns first, value columns second
//!
//! Work:   a unit a vector of up to 16 bytes. Separate tensors are one long row.
//! Cost:   one read of each input and one write of each output.
//! Edges:  any N and W, which are run-time values; odd widths of packed rows are read number by number.
//! Source: GLU variants, arXiv 2002.05202.
//! ```
//! Tensors begin at multiples of 16 bytes.

use super::column_sums::{check_matrix, grid};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::refusal::{Refusal, check_type};
use crate::rowwise::{Activation, UNITS, activate};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes of the widest load.
const LOAD: usize = 16;

/// Sizes of a gated product, and its activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedProduct {
    /// N, rows.
    pub rows: usize,
    /// W, columns of the output.
    pub width: usize,
    /// f, applied to the gate.
    pub activation: Activation,
}

/// Gates and values, or where their gradients go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands<T> {
    /// One tensor `[N, 2W]`: gates in the first W columns, values in the others.
    Packed(T),
    /// Two tensors `[N, W]`.
    Separate {
        /// Gates.
        gate: T,
        /// Values.
        value: T,
    },
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Numbers of a vector.
    vector: usize,
    packed: bool,
    activation: Activation,
}

/// A launch: its cubes, and its rows and columns in vectors.
struct LaunchPlan {
    form: Form,
    cubes: CubeCount,
    vectors: usize,
    columns: usize,
}

impl GatedProduct {
    fn plan<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        packed: bool,
        dtype: StorageType,
    ) -> Result<LaunchPlan, Refusal> {
        let Self { rows, width, activation } = *self;
        check_type(client, dtype)?;
        check_matrix(client, rows, width.saturating_mul(2))?;
        let columns = if packed { width } else { rows * width };
        let most = (LOAD / dtype.size()).min(client.properties().hardware.max_vector_size);
        let fits = |n: &usize| *n <= most && columns.is_multiple_of(*n);
        let vector = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let vectors = rows * width / vector;
        Ok(LaunchPlan {
            form: Form { source: SOURCE, vector, packed, activation },
            cubes: grid(client, vectors.div_ceil(UNITS))?,
            vectors,
            columns: columns / vector,
        })
    }
}

impl Operands<&Handle> {
    fn packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Arguments for gates and values, each of `numbers`: packed rows are passed twice, and read once.
    fn gated<F: Float, N: Size, R: Runtime>(&self, numbers: usize) -> GatedLaunch<F, N, R> {
        match *self {
            Self::Packed(both) => {
                GatedLaunch::new(array(both, 2 * numbers), array(both, 2 * numbers))
            }
            Self::Separate { gate, value } => {
                GatedLaunch::new(array(gate, numbers), array(value, numbers))
            }
        }
    }
}

/// `f(gate) value`, `[N, W]`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    product: GatedProduct,
    operands: Operands<&Handle>,
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    let plan = product.plan(client, operands.packed(), dtype)?;
    let GatedProduct { rows, width, .. } = product;
    let y = buffer(client, &[rows, width], dtype);
    let gated = operands.gated(rows * width);
    // SAFETY: units past the last vector stop, and the caller promises the sizes of `product`.
    #[allow(unsafe_code)]
    unsafe {
        multiply::launch_unchecked::<R>(
            client,
            plan.cubes,
            CubeDim::new_1d(UNITS as u32),
            gated,
            whole(&y),
            SizesLaunch::new(plan.vectors as u32, plan.columns as u32),
            plan.form,
            dtype,
            plan.form.vector,
        );
    }
    Ok(y)
}

/// Gradients of gates and values from `d_y`, `[N, W]`, laid out as `operands`.
///
/// # Errors
/// As [`forward`].
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    product: GatedProduct,
    operands: Operands<&Handle>,
    d_y: &Handle,
    dtype: StorageType,
) -> Result<Operands<Buffer>, Refusal> {
    let plan = product.plan(client, operands.packed(), dtype)?;
    let GatedProduct { rows, width, .. } = product;
    let new = |shape: &[usize]| buffer(client, shape, dtype);
    let (first, second) = match operands.packed() {
        // WebGPU has no two bindings of memory that is written.
        true => (new(&[rows, 2 * width]), new(&[16])),
        false => (new(&[rows, width]), new(&[rows, width])),
    };
    let gated = operands.gated(rows * width);
    // SAFETY: as in `forward`; packed gradients are all in the first output.
    #[allow(unsafe_code)]
    unsafe {
        differentiate::launch_unchecked::<R>(
            client,
            plan.cubes,
            CubeDim::new_1d(UNITS as u32),
            gated,
            array(d_y, rows * width),
            GatedLaunch::new(whole(&first), whole(&second)),
            SizesLaunch::new(plan.vectors as u32, plan.columns as u32),
            plan.form,
            dtype,
            plan.form.vector,
        );
    }
    Ok(match operands.packed() {
        true => Operands::Packed(first),
        false => Operands::Separate { gate: first, value: second },
    })
}

/// Gates and values, or their gradients. Packed ones are one tensor: inputs are it twice, gradients are all
/// in `gate`.
#[derive(CubeType, CubeLaunch)]
struct Gated<F: Float, N: Size> {
    gate: Array<Vector<F, N>>,
    value: Array<Vector<F, N>>,
}

/// Sizes that are no part of the compiled code, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Vectors of y.
    vectors: u32,
    /// Vectors of a row of y.
    columns: u32,
}

/// The kernel of [`forward`].
#[cube(launch_unchecked)]
fn multiply<F: Float, N: Size>(
    gated: &Gated<F, N>,
    y: &mut Array<Vector<F, N>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let n = ABSOLUTE_POS;
    if n >= sizes.vectors as usize {
        terminate!();
    }
    let at = gate_index(n, sizes.columns as usize, form);
    let z = Vector::<f32, N>::cast_from(gated.gate[at]);
    let at_value = value_index(at, sizes.columns as usize, form);
    let x = Vector::<f32, N>::cast_from(gated.value[at_value]);
    let mut product = Vector::<f32, N>::empty();
    #[unroll]
    for l in 0..comptime!(form.vector) {
        product[l] = activate(z[l], comptime!(form.activation)) * x[l];
    }
    y[n] = Vector::<F, N>::cast_from(product);
}

/// The kernel of [`backward`].
#[cube(launch_unchecked)]
fn differentiate<F: Float, N: Size>(
    gated: &Gated<F, N>,
    d_y: &Array<Vector<F, N>>,
    d_gated: &mut Gated<F, N>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let n = ABSOLUTE_POS;
    if n >= sizes.vectors as usize {
        terminate!();
    }
    let at = gate_index(n, sizes.columns as usize, form);
    let at_value = value_index(at, sizes.columns as usize, form);
    let z = Vector::<f32, N>::cast_from(gated.gate[at]);
    let x = Vector::<f32, N>::cast_from(gated.value[at_value]);
    let d = Vector::<f32, N>::cast_from(d_y[n]);
    let mut d_z = Vector::<f32, N>::empty();
    let mut d_x = Vector::<f32, N>::empty();
    #[unroll]
    for l in 0..comptime!(form.vector) {
        d_z[l] = activation_slope(z[l], comptime!(form.activation)) * x[l] * d[l];
        d_x[l] = activate(z[l], comptime!(form.activation)) * d[l];
    }
    d_gated.gate[at] = Vector::<F, N>::cast_from(d_z);
    if comptime!(form.packed) {
        d_gated.gate[at_value] = Vector::<F, N>::cast_from(d_x);
    } else {
        d_gated.value[at_value] = Vector::<F, N>::cast_from(d_x);
    }
}

/// Place of the gates of vector `n`.
#[cube]
fn gate_index(n: usize, columns: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.packed) { n + n / columns * columns } else { n }
}

/// Place of the values whose gates are at `at`.
#[cube]
fn value_index(at: usize, columns: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.packed) { at + columns } else { at }
}

/// The derivative of [`activate`] at `z`. `sigmoid(z) (1 - sigmoid(z))` is `e / (1 + e)^2` with
/// `e = e^-|z|`: nothing overflows, and small slopes keep their digits.
#[cube]
pub(crate) fn activation_slope(z: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Identity) {
        1.0f32.runtime()
    } else if comptime!(activation == Activation::Softplus) {
        activate(z, Activation::Sigmoid)
    } else {
        let e = f32::exp(-f32::abs(z));
        let slope = e / ((e + 1.0f32) * (e + 1.0f32));
        if comptime!(activation == Activation::Silu) {
            activate(z, Activation::Sigmoid) + z * slope
        } else {
            slope
        }
    }
}

#[cfg(test)]
#[path = "gated_product_tests.rs"]
mod tests;
