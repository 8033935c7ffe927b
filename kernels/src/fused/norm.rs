//! Normalised rows, forward and backward: RMSNorm, L2 norm and LayerNorm, with a residual before and a gate
//! after.
//! ```text
//! h     = x + residual                                 [N, W]; x itself where there is no residual
//! c     = h                                            LayerNorm: h - mean h
//! r     = 1 / sqrt(mean c^2 + epsilon)                 L2 norm: the sum of c^2
//! z     = c r factor weight + bias                     weight, bias: [W]
//! y     = z f(gate)                                    f: SiLU, sigmoid or the identity
//!
//! d_gate   = d_y z f'(gate)                            dz = d_y f(gate)     dn = dz weight factor
//! d_weight = sum over rows of dz c r factor            d_bias = sum over rows of dz
//! d_h'     = r (dn - c r^2 mean(dn c)) + d_h           L2 norm: the sum. LayerNorm: - r mean(dn) too
//!
//! x: X   residual, h: R   gate, y: Y   weight, bias: P      each f32, f16 or bf16
//!
//! Work:   a team of 1 to 256 units a row, two vectors a unit while that is enough, several rows a cube
//!         where rows are short. A row stays in registers between its sums and its output. Sums of a
//!         team meet through plane shuffles on devices whose planes have 32 units, else in shared
//!         memory. Backward, a team goes over a run of rows and keeps its sums for weight and bias in
//!         registers; a cube writes one row of partial sums, and a second launch sums these.
//! Cost:   forward, one read of each input and one write of each output; backward likewise, and
//!         statistics are computed again.
//! Edges:  W up to 8192. N is a run-time value, W is compiled in. Units past the last row repeat it, and
//!         store nothing.
//! Source: RMSNorm, arXiv 1910.07467; LayerNorm, arXiv 1607.06450.
//! ```
//! Tensors begin at multiples of 16 bytes.

mod form;
mod kernels;

pub use form::Measure;

use super::column_sums::{
    check_matrix, column_sums_at_once, column_sums_in_two, grid, multiprocessors, vector_width,
};
use super::team::Team;
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{Activation, UNITS};
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use form::Form;
use kernels::{
    AffineLaunch, GradientsLaunch, NumbersLaunch, OperandsLaunch, OutputsLaunch, SavedLaunch,
    differentiate, normalize,
};

/// Most numbers of a row.
pub const WIDEST: usize = 8192;
/// Vectors of a unit, while teams are smaller than cubes.
const VECTORS: usize = 2;
/// Cubes for each multiprocessor, where every cube writes partial sums of columns.
const CUBES: usize = 4;

/// Sizes of a norm, and its kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// N, rows.
    pub rows: usize,
    /// W, numbers of a row.
    pub width: usize,
    /// Divisor of a row.
    pub measure: Measure,
    /// Added to the mean or the sum of c^2.
    pub epsilon: f32,
    /// Multiplies all but the bias.
    pub factor: f32,
    /// f, applied to the gate if there is one.
    pub activation: Activation,
}

/// Types of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// X: rows.
    pub x: StorageType,
    /// R: the residual, and h where there is one.
    pub residual: StorageType,
    /// Y: gates and outputs.
    pub y: StorageType,
    /// P: weights and biases.
    pub weights: StorageType,
}

/// Inputs of a forward pass.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Rows, `[N, W]`, X.
    pub x: &'a Handle,
    /// Added to rows, `[N, W]`, R.
    pub residual: Option<&'a Handle>,
    /// `[N, W]`, Y.
    pub gate: Option<&'a Handle>,
    /// `[W]`, P.
    pub weight: Option<&'a Handle>,
    /// `[W]`, P.
    pub bias: Option<&'a Handle>,
}

/// Outputs of a forward pass.
#[derive(Debug, Clone)]
pub struct Forward {
    /// `[N, W]`, Y.
    pub y: Buffer,
    /// `x + residual`, `[N, W]`, R; where there is a residual.
    pub h: Option<Buffer>,
}

/// Inputs of a backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// [`Forward::h`], `[N, W]`, R; without a residual x, `[N, W]`, X.
    pub h: &'a Handle,
    /// Whether the forward pass had a residual.
    pub residual: bool,
    /// As in [`Inputs`].
    pub gate: Option<&'a Handle>,
    /// As in [`Inputs`].
    pub weight: Option<&'a Handle>,
    /// As in [`Inputs`].
    pub bias: Option<&'a Handle>,
    /// Gradient of y, `[N, W]`, Y.
    pub d_y: &'a Handle,
    /// Gradient of h from elsewhere, `[N, W]`, of the type of `h`; zeros if absent.
    pub d_h: Option<&'a Handle>,
}

/// Gradients.
#[derive(Debug, Clone)]
pub struct Backward {
    /// Of x, and of the residual if there was one: `[N, W]`, of the type of h.
    pub x: Buffer,
    /// The same numbers in type X, where there was a residual and its type is not X.
    pub x_narrow: Option<Buffer>,
    /// `[N, W]`, Y.
    pub gate: Option<Buffer>,
    /// `[W]`, P.
    pub weight: Option<Buffer>,
    /// `[W]`, P.
    pub bias: Option<Buffer>,
}

/// Units that share a row of `vectors`.
fn team(vectors: usize) -> usize {
    vectors.div_ceil(VECTORS).next_power_of_two().min(UNITS)
}

/// Rows of a team, and cubes, where `cubes` are wanted at most.
fn runs(rows: usize, teams: usize, most: usize) -> [usize; 2] {
    let all = rows.div_ceil(teams);
    let run = all.div_ceil(most);
    [run, all.div_ceil(run)]
}

impl Norm {
    fn check<R: Runtime>(&self, client: &ComputeClient<R>, types: Types) -> Result<(), Refusal> {
        for dtype in [types.x, types.residual, types.y, types.weights] {
            check_type(client, dtype)?;
        }
        check_matrix(client, self.rows, self.width)?;
        match self.width > WIDEST {
            true => Err(Refusal::Width { name: "W", got: self.width, most: WIDEST }),
            false => Ok(()),
        }
    }

    fn form<R: Runtime>(&self, client: &ComputeClient<R>, gated: bool) -> Form {
        let vector = vector_width(client, self.width);
        Form {
            source: SOURCE,
            width: self.width,
            vector,
            team: Team::of(client, team(self.width / vector)),
            measure: self.measure,
            residual: false,
            gate: gated.then_some(self.activation),
            weighted: false,
            biased: false,
            given: false,
            narrow: false,
        }
    }

    fn numbers(&self) -> usize {
        self.rows * self.width
    }

    /// Numbers that are not compiled in.
    fn launched_numbers<R: Runtime>(&self) -> NumbersLaunch<R> {
        NumbersLaunch::new(self.rows as u32, self.epsilon, self.factor)
    }
}

/// Normalised rows, in one launch.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    norm: Norm,
    types: Types,
    inputs: Inputs<'_>,
) -> Result<Forward, Refusal> {
    norm.check(client, types)?;
    let Inputs { x, residual, gate, weight, bias } = inputs;
    let form = Form {
        residual: residual.is_some(),
        weighted: weight.is_some(),
        biased: bias.is_some(),
        ..norm.form(client, gate.is_some())
    };
    let cubes = grid(client, norm.rows.div_ceil(form.teams()))?;
    let shape = [norm.rows, norm.width];
    let y = buffer(client, &shape, types.y);
    let h = buffer(client, if form.residual { &shape } else { &[16] }, types.residual);
    let all = norm.numbers();
    // SAFETY: rows end at `rows`, and the caller promises the sizes of `norm`; `form` says which
    // stand-ins are neither read nor written.
    #[allow(unsafe_code)]
    unsafe {
        normalize::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            OperandsLaunch::new(array(x, all), or(residual, x, all), or(gate, x, all)),
            AffineLaunch::new(or(weight, x, norm.width), or(bias, x, norm.width)),
            OutputsLaunch::new(whole(&y), whole(&h)),
            norm.launched_numbers(),
            form,
            [types.x, types.residual, types.y, types.weights],
            form.vector,
        );
    }
    Ok(Forward { y, h: form.residual.then_some(h) })
}

/// A tensor that may not be there. `any` takes its place, and is not read.
fn or<R: Runtime>(handle: Option<&Handle>, any: &Handle, numbers: usize) -> ArrayArg<R> {
    array(handle.unwrap_or(any), if handle.is_some() { numbers } else { 1 })
}

/// Gradients, in one launch, and a second one where there is a weight or a bias.
///
/// # Errors
/// As [`forward`].
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    norm: Norm,
    types: Types,
    given: Given<'_>,
) -> Result<Backward, Refusal> {
    norm.check(client, types)?;
    let Given { h, residual, gate, weight, bias, d_y, d_h } = given;
    let wide = if residual { types.residual } else { types.x };
    let form = Form {
        weighted: weight.is_some(),
        biased: bias.is_some(),
        given: d_h.is_some(),
        narrow: wide != types.x,
        ..norm.form(client, gate.is_some())
    };
    let summed = form.partials() > 0;
    let most = if summed { CUBES * multiprocessors(client) } else { norm.rows };
    let [run, cubes] = runs(norm.rows, form.teams(), most);
    let counts = grid(client, cubes)?;
    let shape = [norm.rows, norm.width];
    let new = |there: bool, dtype| buffer(client, if there { &shape } else { &[16] }, dtype);
    let x = new(true, wide);
    let [narrow, d_gate] = [new(form.narrow, types.x), new(gate.is_some(), types.y)];
    let partials = [cubes, form.partials() * form.vector];
    let partial = buffer(client, if summed { &partials } else { &[16] }, F32);
    let all = norm.numbers();
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        differentiate::launch_unchecked::<R>(
            client,
            counts,
            CubeDim::new_1d(UNITS as u32),
            SavedLaunch::new(
                array(h, all),
                or(gate, h, all),
                AffineLaunch::new(or(weight, h, norm.width), or(bias, h, norm.width)),
                array(d_y, all),
                or(d_h, h, all),
            ),
            GradientsLaunch::new(whole(&x), whole(&narrow), whole(&d_gate), whole(&partial)),
            norm.launched_numbers(),
            run as u32,
            form,
            [types.x, wide, types.y, types.weights],
            form.vector,
        );
    }
    let [d_weight, d_bias] = column_gradients(client, norm, &form, &partial, types.weights)?;
    Ok(Backward {
        x,
        x_narrow: form.narrow.then_some(narrow),
        gate: gate.map(|_| d_gate),
        weight: d_weight,
        bias: d_bias,
    })
}

/// Gradients of weight and bias from partial sums, `[cubes, W]` for each that is there, side by side.
fn column_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    norm: Norm,
    form: &Form,
    partial: &Buffer,
    dtype: StorageType,
) -> Result<[Option<Buffer>; 2], Refusal> {
    let (x, rows, width) = (&partial.handle, partial.shape[0], norm.width);
    Ok(match (form.weighted, form.biased) {
        (false, false) => [None, None],
        (true, true) => column_sums_in_two(client, x, rows, [width; 2], dtype)?.map(Some),
        (true, false) => [Some(column_sums_at_once(client, x, rows, width, dtype)?), None],
        (false, true) => [None, Some(column_sums_at_once(client, x, rows, width, dtype)?)],
    })
}

#[cfg(test)]
#[path = "norm_tests.rs"]
mod tests;
