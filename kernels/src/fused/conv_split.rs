//! The packed projection of a mixer: short convolution, SiLU, L2 norm of heads, beta and log decay.
//! One launch makes every input of a recurrence from the columns of one matrix product.
//! ```text
//! x         [B, T, P]       F    the packed projection; parts lie side by side in its columns
//! Conv      z_t = bias + sum_w weight_w seen_{t+w}     seen: the conv state, and then x
//!           y = f(z)                                   f: SiLU, sigmoid or nothing
//!           y = factor y / sqrt(sum y^2 + epsilon)     over the columns of a head, if there are heads
//! Copy      y = x
//! Beta      y = scale sigmoid(x)                                          f32
//! LogDecay  y = -e^{a_log} softplus(x + dt_bias)                          f32
//!
//! y         [B, T, width]   F or f32, a tensor for each part
//! conv_state [B, W - 1, C]  F    C: columns of all Conv parts, which are the first ones
//! weight    [W, C]          G    the last row meets the newest token
//! bias      [C]             G
//! a_log     [H]             G    width / H columns share a number
//! dt_bias   [width]         G
//! ```
//! Sequences of lengths of their own lie one after another in one row, B = 1, as `cu_seqlens` says. Each
//! has a conv state of its own, `[N, W - 1, C]`, and none sees another: a chunk of tokens lies in one sequence.
//! Backward: dz is what the norm and f make of dy, from z computed again.
//! ```text
//! dx_t = sum_w weight_w dz_{t+W-1-w}     dweight_w = sum_t dz_t seen_{t+w}     dbias = sum_t dz_t
//! ```
//! A single token of each sequence ([`step`]) has weights and conv states as layers and states have them, a tensor for each
//! convolution, and leaves the next conv states, so that a decoded token is one launch.
//!
//! Work:   a cube has a chunk of tokens and one part, or some of its heads. A group of `lanes` units goes
//!         a run of tokens, with the last W - 1 tokens (backward: and their dz) in registers. A team
//!         within the group has a head, and sums y^2 by shuffles, or through shared memory where
//!         planes are not 32 or 64 units.
//! Bytes:  forward one read of x and one write; backward a read of x, of dy, and a write. A run reads
//!         W - 1 tokens of its neighbours again, from cache.
//! Sums:   of weight gradients: in registers over a run, in shared memory over the runs of a cube, and
//!         by a second launch over cubes, each in a fixed order.
//! Edges:  any T, also below W; a window past [`UNROLLED`] is not kept in registers. B, T and `cu_seqlens` are
//!         run-time values; widths and W are compiled in. Sequences of few tokens leave units without work,
//!         as short rows of a batch do.

mod backward;
mod chunks;
mod forward;
mod inputs;
mod parts;
mod runs;

#[cfg(test)]
#[path = "conv_split_tests.rs"]
mod tests;

pub use inputs::{Apart, Columns, Dims, Head, Inputs, Kind, UNROLLED};
pub(crate) use parts::Norm;

use super::column_sums::multiprocessors;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::{UNITS, spread};
use crate::refusal::{F32, Refusal, check_type};
use backward::{COLUMNS, SumForm, XGradientsLaunch, add_rows, column_gradients};
use chunks::{Chunks, ENTRY};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::split_columns;
use inputs::Tensors;
use parts::{Form, Pass};
use runs::{OperandsLaunch, RowsAndGatesLaunch, SizesLaunch};

/// Types of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// F, of x, the conv state and the rows made from them.
    pub rows: StorageType,
    /// G, of weights and biases.
    pub weights: StorageType,
}

/// Gradients, shaped and typed as what they belong to.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of the packed projection, all columns.
    pub x: Buffer,
    /// Of the weights.
    pub weight: Option<Buffer>,
    /// Of the bias.
    pub bias: Option<Buffer>,
    /// Of the conv state; `None` also where the window is 1.
    pub conv_state: Option<Buffer>,
    /// Of the logarithms of the decay rates.
    pub a_log: Option<Buffer>,
    /// Of the bias of step sizes.
    pub dt_bias: Option<Buffer>,
}

/// One call: what a launch needs.
struct Call<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    dims: Dims,
    columns: &'a [Columns],
    x: Tensors<'a>,
    types: Types,
    form: Form,
    chunks: Chunks,
    cubes: CubeCount,
}

/// The outputs of all parts, in their order.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
/// # Panics
/// If a convolution follows another kind, heads do not divide their columns, or `cu_seqlens` does not divide one
/// row of T tokens into sequences of at least one.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &[Columns],
    inputs: Inputs<'_>,
    types: Types,
) -> Result<Vec<Buffer>, Refusal> {
    let x = inputs.into();
    let form = form(client, dims, columns, &x, types, Pass::Forward)?;
    Ok(Call::new(client, dims, columns, x, types, form)?.forward().0)
}

/// As [`forward`], of one token of each sequence, with the convolutions' tensors from `apart` alone. The next conv
/// states, `[B, W - 1, width]` of each convolution, come behind the outputs.
///
/// # Errors
/// As [`forward`], and where W is above [`UNROLLED`].
/// # Panics
/// As [`forward`], and if there is more than one token, or not a tensor for each convolution.
pub fn step<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &[Columns],
    inputs: Inputs<'_>,
    apart: Apart<'_>,
    types: Types,
) -> Result<(Vec<Buffer>, Vec<Buffer>), Refusal> {
    let convolutions = columns.iter().filter(|part| part.is_conv()).count();
    let counts = [apart.weights.len(), apart.biases.len(), apart.conv_states.len()];
    assert!(
        counts.iter().all(|count| [0, convolutions].contains(count)),
        "{counts:?} of {convolutions}"
    );
    assert_eq!((dims.tokens, counts[0]), (1, convolutions), "one token, and weights");
    if dims.window > UNROLLED {
        return Err(Refusal::Width { name: "window", got: dims.window, most: UNROLLED });
    }
    let x = Tensors::of_step(inputs, apart);
    let form = form(client, dims, columns, &x, types, Pass::Forward)?;
    Ok(Call::new(client, dims, columns, x, types, form)?.forward())
}

/// Gradients of every input, from those of the outputs, in the order of the parts; an absent one counts
/// as zeros.
///
/// # Errors
/// As [`forward`].
/// # Panics
/// As [`forward`], and if there are more or fewer gradients than parts.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &[Columns],
    inputs: Inputs<'_>,
    d_out: &[Option<&Handle>],
    types: Types,
) -> Result<Gradients, Refusal> {
    assert_eq!(columns.len(), d_out.len(), "parts, and gradients of their outputs");
    let given: Vec<bool> = d_out.iter().map(Option::is_some).collect();
    let x = inputs.into();
    let form = form(client, dims, columns, &x, types, Pass::Backward { given: &given })?;
    Call::new(client, dims, columns, x, types, form)?.backward(d_out)
}

/// Compile-time values of a launch.
fn form<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &[Columns],
    inputs: &Tensors<'_>,
    types: Types,
    pass: Pass<'_>,
) -> Result<Form, Refusal> {
    check_tensors(dims, columns, inputs)?;
    check_type(client, types.rows)?;
    check_type(client, types.weights)?;
    let hardware = &client.properties().hardware;
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    if units < UNITS as u32 {
        return Err(Refusal::Device { shared_memory, units });
    }
    let gates = columns.iter().any(Columns::is_gate);
    // Gates are no vectors: their numbers in x are reached through a second view of the same memory, and
    // WebGPU forbids two of what is written.
    let one = gates && R::name(client).starts_with("wgpu");
    let widest = if one { 1 } else { hardware.max_vector_size.min(4) };
    let form = Form::new(dims, columns, inputs, pass, widest, has_planes(client));
    let (got, most) = (form.bindings(inputs), hardware.max_bindings as usize);
    if got > most {
        return Err(Refusal::TooLarge { what: "tensors of a launch", got, most });
    }
    Ok(form)
}

/// Whether 32 units that lie side by side are in one plane, which can shuffle.
fn has_planes<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let properties = client.properties();
    let (least, most) = (properties.hardware.plane_size_min, properties.hardware.plane_size_max);
    let shuffles = properties.features.plane.contains(cubecl::ir::features::Plane::Ops);
    let name = R::name(client);
    // Vulkan and WebGPU leave open which units a plane has.
    shuffles && least == most && most.is_multiple_of(32) && most > 0 && !name.starts_with("wgpu")
}

/// The tensors that the parts ask for are there.
fn check_tensors(dims: Dims, columns: &[Columns], x: &Tensors<'_>) -> Result<(), Refusal> {
    let Dims { batch, tokens, window } = dims;
    if batch == 0 || tokens == 0 || window == 0 || columns.iter().any(|part| part.width == 0) {
        return Err(Refusal::Empty { batch, tokens });
    }
    let divides = |offsets: &[usize]| {
        let grows = offsets.len() > 1 && offsets.windows(2).all(|pair| pair[0] < pair[1]);
        batch == 1 && grows && offsets[0] == 0 && offsets.last() == Some(&tokens)
    };
    assert!(x.cu_seqlens.is_none_or(divides), "{:?} divide {dims:?}", x.cu_seqlens);
    let convolved = columns.iter().take_while(|part| part.is_conv()).count();
    assert!(!columns[convolved..].iter().any(Columns::is_conv), "convolutions are the first parts");
    let decays = columns.iter().filter(|part| part.is_decay()).count();
    assert!(decays <= 1, "one part of log decays");
    let needs = [
        ("weight", !x.weights().is_empty(), convolved > 0 && window > 1, convolved > 0),
        ("bias", !x.biases().is_empty(), false, convolved > 0),
        ("conv_state", !x.conv_states().is_empty(), false, convolved > 0),
        ("a_log", x.a_log.is_some(), decays > 0, decays > 0),
        ("dt_bias", x.dt_bias.is_some(), decays > 0, decays > 0),
    ];
    for (name, there, needed, taken) in needs {
        if there && !taken || needed && !there {
            return Err(Refusal::Tensor { name, wanted: needed });
        }
    }
    for part in columns {
        part.check()?;
    }
    Ok(())
}

impl Columns {
    fn is_conv(&self) -> bool {
        matches!(self.kind, Kind::Conv { .. })
    }

    fn is_decay(&self) -> bool {
        matches!(self.kind, Kind::LogDecay { .. })
    }

    /// Whether outputs are f32.
    fn is_gate(&self) -> bool {
        matches!(self.kind, Kind::Beta { .. } | Kind::LogDecay { .. })
    }

    fn check(&self) -> Result<(), Refusal> {
        let heads = match self.kind {
            Kind::Conv { head: Some(Head { width, .. }), .. } => {
                if !(1..=crate::WIDEST).contains(&width) {
                    return Err(Refusal::Width { name: "head", got: width, most: crate::WIDEST });
                }
                width
            }
            Kind::LogDecay { heads } => heads,
            _ => 1,
        };
        assert!(heads > 0 && self.width.is_multiple_of(heads), "{heads} divides {}", self.width);
        Ok(())
    }
}

impl<'a, R: Runtime> Call<'a, R> {
    fn new(
        client: &'a ComputeClient<R>,
        dims: Dims,
        columns: &'a [Columns],
        x: Tensors<'a>,
        types: Types,
        form: Form,
    ) -> Result<Self, Refusal> {
        let Dims { batch, tokens, window } = dims;
        let before = x.sequences(dims).saturating_mul(window);
        let rows = batch.saturating_mul(tokens).saturating_add(before);
        let most = u32::MAX as usize / 2;
        let fits = |got| match got > most {
            true => Err(Refusal::TooLarge { what: "numbers in a tensor", got, most }),
            false => Ok(()),
        };
        // A run may end a chunk past the last token.
        fits(rows.saturating_mul(form.columns))?;
        let hardware = &client.properties().hardware;
        let enough = multiprocessors(client) * 8;
        let chunks = Chunks::new(dims, x.cu_seqlens, enough.div_ceil(form.slots.max(1)));
        fits(form.sums.saturating_mul(chunks.count))?;
        let count = chunks.count * form.slots;
        let Some(cubes) = spread(count, hardware.max_cube_count) else {
            return Err(Refusal::TooLarge { what: "cubes", got: count, most: most / UNITS });
        };
        Ok(Self { client, dims, columns, x, types, form, chunks, cubes })
    }

    /// The outputs of all parts, and the next conv states where weights are apart.
    fn forward(&self) -> (Vec<Buffer>, Vec<Buffer>) {
        let Self { client, dims, columns, types, .. } = *self;
        let new = |part: &Columns| {
            let dtype = if part.is_gate() { F32 } else { types.rows };
            buffer(client, &[dims.batch, dims.tokens, part.width], dtype)
        };
        let out: Vec<Buffer> = columns.iter().map(new).collect();
        let kept =
            |part: &Columns| buffer(client, &[dims.batch, dims.window - 1, part.width], types.rows);
        let leaves = self.x.apart.is_some() && dims.window > 1;
        let convolutions = columns.iter().filter(|part| leaves && part.is_conv());
        let next: Vec<Buffer> = convolutions.map(kept).collect();
        let of = |gates: bool| {
            let parts = columns.iter().zip(&out).filter(move |(part, _)| part.is_gate() == gates);
            parts.map(|(_, buffer)| whole(buffer))
        };
        // SAFETY: units past the last token or column load and store nothing, and all else stays within
        // the sizes of `dims` and `columns`, which the caller promises.
        #[allow(unsafe_code)]
        unsafe {
            split_columns::launch_unchecked::<R>(
                client,
                self.cubes.clone(),
                CubeDim::new_1d(UNITS as u32),
                self.operands(),
                RowsAndGatesLaunch::new(of(false).collect(), of(true).collect()),
                next.iter().map(whole).collect(),
                self.sizes(),
                self.form.clone(),
                [types.rows, types.weights],
                self.form.vector,
            );
        }
        (out, next)
    }

    /// Gradients of every input, in one launch or two.
    fn backward(&self, d_out: &[Option<&Handle>]) -> Result<Gradients, Refusal> {
        let Self { client, dims, columns, types, .. } = *self;
        let rows = self.chunks.count;
        let partials = (self.form.sums > 0).then(|| buffer(client, &[rows, self.form.sums], F32));
        let out = self.gradients();
        let of = |gates: bool| {
            let parts = columns.iter().zip(d_out).filter(move |(part, _)| part.is_gate() == gates);
            let numbers = dims.batch * dims.tokens;
            parts.filter_map(move |(part, d)| d.map(|d| array(d, numbers * part.width)))
        };
        let d_x = XGradientsLaunch::new(
            whole(&out.x),
            self.form.has_numbers().then(|| whole(&out.x)).into_iter().collect(),
            out.conv_state.iter().map(whole).collect(),
            partials.iter().map(whole).collect(),
        );
        // SAFETY: as in `forward`. Where x has two views, their numbers are different ones.
        #[allow(unsafe_code)]
        unsafe {
            column_gradients::launch_unchecked::<R>(
                client,
                self.cubes.clone(),
                CubeDim::new_1d(UNITS as u32),
                self.operands(),
                RowsAndGatesLaunch::new(of(false).collect(), of(true).collect()),
                d_x,
                self.sizes(),
                self.form.clone(),
                [types.rows, types.weights],
                self.form.vector,
            );
        }
        if let Some(partials) = &partials {
            self.add_partials(partials, &out, rows)?;
        }
        Ok(out)
    }

    fn sizes(&self) -> SizesLaunch<R> {
        let Chunks { length, each, count, .. } = self.chunks;
        let cubes = count * self.form.slots;
        let [tokens, chunk, chunks, cubes] =
            [self.dims.tokens, length, each, cubes].map(|size| size as u32);
        SizesLaunch::new(tokens, chunk, chunks, cubes)
    }

    fn operands<F: Float, G: Float, N: Size>(&self) -> OperandsLaunch<F, G, N, R> {
        let Dims { batch, tokens, window } = self.dims;
        let Form { columns, convolved, .. } = self.form;
        let all = batch * tokens * columns;
        let numbers = self.form.has_numbers();
        let (rates, steps) = self.decays().unwrap_or((0, 0));
        let of = |handle: Option<&Handle>, len: usize| handle.map(|handle| array(handle, len));
        let widths: Vec<usize> = match self.x.apart {
            Some(_) => self.columns.iter().filter(|part| part.is_conv()).map(|c| c.width).collect(),
            None => vec![convolved],
        };
        let of_convolutions = |handles: &[&Handle], rows: usize| {
            let each = handles.iter().zip(&widths).filter(|_| rows > 0);
            each.map(|(handle, width)| array(handle, rows * width)).collect::<Vec<_>>()
        };
        let before = self.x.sequences(self.dims) * (window - 1);
        let table = self.chunks.table.as_ref().map(|table| {
            let handle = self.client.create_from_slice(u32::as_bytes(table));
            array(&handle, self.chunks.count * ENTRY)
        });
        OperandsLaunch::new(
            array(self.x.x, all),
            numbers.then(|| array(self.x.x, all)).into_iter().collect(),
            of_convolutions(self.x.weights(), window).into_iter().collect(),
            of_convolutions(self.x.biases(), 1).into_iter().collect(),
            of_convolutions(self.x.conv_states(), before).into_iter().collect(),
            of(self.x.a_log, rates).into_iter().collect(),
            of(self.x.dt_bias, steps).into_iter().collect(),
            table.into_iter().collect(),
        )
    }

    /// Heads and columns of the log decays.
    fn decays(&self) -> Option<(usize, usize)> {
        self.columns.iter().find_map(|part| match part.kind {
            Kind::LogDecay { heads } => Some((heads, part.width)),
            _ => None,
        })
    }

    /// Memory of all gradients.
    fn gradients(&self) -> Gradients {
        let Dims { batch, tokens, window } = self.dims;
        let Form { columns, convolved, .. } = self.form;
        let Types { rows, weights } = self.types;
        let (heads, steps) = self.decays().unwrap_or((0, 0));
        let new =
            |there: bool, shape: &[usize], dtype| there.then(|| buffer(self.client, shape, dtype));
        let has = |handle: Option<&Handle>| handle.is_some();
        let sequences = self.x.sequences(self.dims);
        Gradients {
            x: buffer(self.client, &[batch, tokens, columns], rows),
            weight: new(has(self.x.weight), &[window, convolved], weights),
            bias: new(has(self.x.bias), &[convolved], weights),
            conv_state: new(
                has(self.x.conv_state) && window > 1,
                &[sequences, window - 1, convolved],
                rows,
            ),
            a_log: new(has(self.x.a_log), &[heads], weights),
            dt_bias: new(has(self.x.dt_bias), &[steps], weights),
        }
    }

    /// The second launch backward. `a_log` comes last: its columns are added up by heads.
    fn add_partials(&self, partials: &Buffer, out: &Gradients, rows: usize) -> Result<(), Refusal> {
        let tensors = [&out.weight, &out.bias, &out.dt_bias, &out.a_log];
        let (heads, steps) = self.decays().unwrap_or((1, 1));
        let form = SumForm {
            source: crate::SOURCE,
            lengths: tensors.into_iter().flatten().map(Buffer::len).collect(),
            columns: self.form.sums,
            last: if out.a_log.is_some() { heads } else { 0 },
            group: steps / heads,
        };
        let largest = self.client.properties().hardware.max_cube_count;
        let count = form.all().div_ceil(COLUMNS);
        let most = u32::MAX as usize / UNITS;
        let cubes = spread(count, largest);
        let cubes = cubes.ok_or(Refusal::TooLarge { what: "cubes", got: count, most })?;
        // SAFETY: units past the last column or row read and store nothing.
        #[allow(unsafe_code)]
        unsafe {
            add_rows::launch_unchecked::<R>(
                self.client,
                cubes,
                CubeDim::new_1d(UNITS as u32),
                whole(partials),
                tensors.into_iter().flatten().map(whole).collect(),
                rows as u32,
                form,
                self.types.weights,
            );
        }
        Ok(())
    }
}
