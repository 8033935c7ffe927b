//! Gated products, forward and backward, one launch each.
//! ```text
//! y       = f(gate) value              f: SiLU, sigmoid, softplus, log sigmoid, GELU or a squared ReLU
//! d_value = f(gate) d_y
//! d_gate  = f'(gate) value d_y
//!
//! gate, value, y: [N, W]               all of one type; or one number is the value of all, and has no gradient
//! packed: [N, 2W], gate columns first, value columns second
//!
//! Work:   a unit a vector of up to 16 bytes. Separate tensors are one long row.
//! Cost:   one read of each input and one write of each output.
//! Edges:  any N and W, which are run-time values; odd widths of packed rows are read number by number.
//! Source: GLU variants, arXiv 2002.05202; GELU, arXiv 1606.08415; squared ReLU, arXiv 2109.08668.
//! ```
//! Tensors begin at multiples of 16 bytes.

use super::column_sums::{check_matrix, grid};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{UNITS, sigmoid, sigmoid_slope, softplus};
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Bytes of the widest load.
const LOAD: usize = 16;

/// `sqrt(2 / pi)`.
pub(crate) const SQRT_2_OVER_PI: f32 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

/// f of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateActivation {
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `ln(1 + e^z)`.
    Softplus,
    /// `ln(sigmoid(z))`.
    LogSigmoid,
    /// `z P(z)`, P the normal distribution's share below z.
    Gelu,
    /// `z sigmoid(2 u)` with `u = sqrt(2 / pi) (z + 0.044715 z^3)`, which is near GELU.
    GeluTanh,
    /// `max(z, 0)^2`.
    SquaredRelu,
}

impl GateActivation {
    /// All there are.
    pub const ALL: [Self; 7] = [
        Self::Silu,
        Self::Sigmoid,
        Self::Softplus,
        Self::LogSigmoid,
        Self::Gelu,
        Self::GeluTanh,
        Self::SquaredRelu,
    ];
}

/// Sizes of a gated product, and its activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedProduct {
    /// N, rows.
    pub rows: usize,
    /// W, columns of the output.
    pub width: usize,
    /// f, applied to the gate.
    pub activation: GateActivation,
    /// The value of gates alone.
    pub factor: f32,
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
    /// Gates `[N, W]`; the value of all is one number.
    Alone(T),
}

/// How gates and values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Layout {
    Packed,
    Separate,
    Alone,
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Numbers of a vector.
    vector: usize,
    layout: Layout,
    activation: GateActivation,
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
        layout: Layout,
        dtype: StorageType,
    ) -> Result<LaunchPlan, Refusal> {
        let Self { rows, width, activation, .. } = *self;
        check_type(client, dtype)?;
        check_matrix(client, rows, width.saturating_mul(2))?;
        let columns = if layout == Layout::Packed { width } else { rows * width };
        let most = (LOAD / dtype.size()).min(client.properties().hardware.max_vector_size);
        let fits = |n: &usize| *n <= most && columns.is_multiple_of(*n);
        let vector = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let vectors = rows * width / vector;
        Ok(LaunchPlan {
            form: Form { source: SOURCE, vector, layout, activation },
            cubes: grid(client, vectors.div_ceil(UNITS))?,
            vectors,
            columns: columns / vector,
        })
    }
}

impl Operands<&Handle> {
    fn layout(&self) -> Layout {
        match self {
            Self::Packed(_) => Layout::Packed,
            Self::Separate { .. } => Layout::Separate,
            Self::Alone(_) => Layout::Alone,
        }
    }

    /// Arguments for gates and values, each of `numbers`: what is both, or has no values, is passed twice, and read
    /// once.
    fn gated<F: Float, N: Size, R: Runtime>(&self, numbers: usize) -> GatedLaunch<F, N, R> {
        match *self {
            Self::Packed(both) => {
                GatedLaunch::new(array(both, 2 * numbers), array(both, 2 * numbers))
            }
            Self::Separate { gate, value } => {
                GatedLaunch::new(array(gate, numbers), array(value, numbers))
            }
            Self::Alone(gate) => GatedLaunch::new(array(gate, numbers), array(gate, numbers)),
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
    let plan = product.plan(client, operands.layout(), dtype)?;
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
            SizesLaunch::new(plan.vectors as u32, plan.columns as u32, product.factor),
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
    let plan = product.plan(client, operands.layout(), dtype)?;
    let GatedProduct { rows, width, .. } = product;
    let new = |shape: &[usize]| buffer(client, shape, dtype);
    // WebGPU has no two bindings of memory that is written.
    let none = 16;
    let (first, second) = match operands {
        Operands::Packed(_) => (new(&[rows, 2 * width]), new(&[none])),
        Operands::Separate { .. } => (new(&[rows, width]), new(&[rows, width])),
        Operands::Alone(_) => (new(&[rows, width]), new(&[none])),
    };
    let gated = operands.gated(rows * width);
    // SAFETY: as in `forward`; without a second tensor of gradients nothing is written to it.
    #[allow(unsafe_code)]
    unsafe {
        differentiate::launch_unchecked::<R>(
            client,
            plan.cubes,
            CubeDim::new_1d(UNITS as u32),
            gated,
            array(d_y, rows * width),
            GatedLaunch::new(whole(&first), whole(&second)),
            SizesLaunch::new(plan.vectors as u32, plan.columns as u32, product.factor),
            plan.form,
            dtype,
            plan.form.vector,
        );
    }
    Ok(match operands {
        Operands::Packed(_) => Operands::Packed(first),
        Operands::Separate { .. } => Operands::Separate { gate: first, value: second },
        Operands::Alone(_) => Operands::Alone(first),
    })
}

/// Gates and values, or their gradients. Packed ones are one tensor, and gates alone have no values: inputs are the
/// one tensor twice, gradients are all in `gate`.
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
    /// The value of gates alone.
    factor: f32,
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
    let values = values_at::<F, N>(gated, at, sizes, form);
    let mut product = Vector::<f32, N>::empty();
    #[unroll]
    for l in 0..comptime!(form.vector) {
        product[l] = activate(z[l], comptime!(form.activation)) * value_of(values, l, sizes, form);
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
    let z = Vector::<f32, N>::cast_from(gated.gate[at]);
    let values = values_at::<F, N>(gated, at, sizes, form);
    let d = Vector::<f32, N>::cast_from(d_y[n]);
    let mut d_z = Vector::<f32, N>::empty();
    let mut d_x = Vector::<f32, N>::empty();
    #[unroll]
    for l in 0..comptime!(form.vector) {
        let x = value_of(values, l, sizes, form);
        d_z[l] = activation_slope(z[l], comptime!(form.activation)) * x * d[l];
        if comptime!(form.layout != Layout::Alone) {
            d_x[l] = activate(z[l], comptime!(form.activation)) * d[l];
        }
    }
    d_gated.gate[at] = Vector::<F, N>::cast_from(d_z);
    if comptime!(form.layout == Layout::Packed) {
        d_gated.gate[at + sizes.columns as usize] = Vector::<F, N>::cast_from(d_x);
    } else if comptime!(form.layout == Layout::Separate) {
        d_gated.value[at] = Vector::<F, N>::cast_from(d_x);
    }
}

/// Place of the gates of vector `n`.
#[cube]
fn gate_index(n: usize, columns: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.layout == Layout::Packed) { n + n / columns * columns } else { n }
}

/// The values whose gates are at `at`; the gates themselves where there are none.
#[cube]
fn values_at<F: Float, N: Size>(
    gated: &Gated<F, N>,
    at: usize,
    sizes: Sizes,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    if comptime!(form.layout == Layout::Packed) {
        Vector::<f32, N>::cast_from(gated.value[at + sizes.columns as usize])
    } else {
        Vector::<f32, N>::cast_from(gated.value[at])
    }
}

/// The value number `l` of a vector.
#[cube]
fn value_of<N: Size>(
    values: Vector<f32, N>,
    #[comptime] l: usize,
    sizes: Sizes,
    #[comptime] form: Form,
) -> f32 {
    if comptime!(form.layout == Layout::Alone) { sizes.factor } else { values[l] }
}

/// f of `z`.
#[cube]
pub(crate) fn activate(z: f32, #[comptime] activation: GateActivation) -> f32 {
    match comptime!(activation) {
        GateActivation::Silu => z * sigmoid(z),
        GateActivation::Sigmoid => sigmoid(z),
        GateActivation::Softplus => softplus(z),
        GateActivation::LogSigmoid => -softplus(-z),
        GateActivation::Gelu => z * normal_share(z),
        GateActivation::GeluTanh => z * sigmoid(near_gelu(z)),
        GateActivation::SquaredRelu => relu(z) * relu(z),
    }
}

/// The derivative of [`activate`] at `z`.
#[cube]
pub(crate) fn activation_slope(z: f32, #[comptime] activation: GateActivation) -> f32 {
    match comptime!(activation) {
        GateActivation::Silu => sigmoid(z) + z * sigmoid_slope(z),
        GateActivation::Sigmoid => sigmoid_slope(z),
        GateActivation::Softplus => sigmoid(z),
        GateActivation::LogSigmoid => sigmoid(-z),
        GateActivation::Gelu => normal_share(z) + z * normal_density(z),
        GateActivation::GeluTanh => {
            let u = near_gelu(z);
            sigmoid(u) + z * sigmoid_slope(u) * near_gelu_slope(z)
        }
        GateActivation::SquaredRelu => 2.0f32 * relu(z),
    }
}

/// `max(z, 0)`, which is no number where `z` is none: a maximum is 0 there on some devices.
#[cube]
fn relu(z: f32) -> f32 {
    select(z <= 0.0f32, 0.0f32, z)
}

/// The normal distribution's share below `z`.
#[cube]
#[allow(unstable_name_collisions)] // CubeCL's, whatever the standard library will have
fn normal_share(z: f32) -> f32 {
    0.5f32 + 0.5f32 * f32::erf(z * comptime!(FRAC_1_SQRT_2))
}

/// The normal distribution's density at `z`.
#[cube]
fn normal_density(z: f32) -> f32 {
    f32::exp(-0.5f32 * z * z) * comptime!(0.5 * SQRT_2_OVER_PI)
}

/// `2 sqrt(2 / pi) (z + 0.044715 z^3)`.
#[cube]
pub(crate) fn near_gelu(z: f32) -> f32 {
    z * (0.044715f32 * z * z + 1.0f32) * comptime!(2.0 * SQRT_2_OVER_PI)
}

/// The derivative of [`near_gelu`].
#[cube]
pub(crate) fn near_gelu_slope(z: f32) -> f32 {
    (0.134145f32 * z * z + 1.0f32) * comptime!(2.0 * SQRT_2_OVER_PI)
}

#[cfg(test)]
#[path = "gated_product_tests.rs"]
mod tests;
