//! One token from a mixer's packed projection to what its memory answers, in one launch: short convolutions, gates and
//! the step of linear attention or a delta rule.
//! ```text
//! z_c  = bias_c + sum_w weight_wc seen_wc        seen: the conv state, and then y; channels of q, k and v
//! q, k = factor f(z) / sqrt(sum f(z)^2 + epsilon)    over a head; f(z) where no norm is asked for
//! v    = f(z)
//! beta = scale sigmoid(y_beta)                   g = -e^{a_log} softplus(y_decay + dt_bias)
//! S'   = e^g S + k^T u                           u = v, or beta (v - e^g k S)
//! o    = q S'
//!
//! y:          [B, P]           F    the columns of q, k and v come first
//! weight_i:   [W, C_i]         G    of q, k and v; the last row meets the newest token
//! bias_i:     [C_i]            G
//! state_i:    [B, W - 1, C_i]  F    before the token, and after it; zeros if there are none
//! a_log, dt_bias: [H]          G
//! S, S':      [B, H, K, V]     f32
//! o:          [B, H, V]        F
//! copied:     [B, R]           F    R other columns of y, as they are
//! ```
//! Work:   cubes and units as [`step`](super). Each cube makes q and k of its head again, in shared memory, and each unit the
//!         value of its column. The first cube of a head leaves the next conv states of its q and k.
//! Sums:   lengths of q and k are summed beside the retrieved value and the output, and multiply these sums:
//!         there is no barrier for them.
//! Edges:  K up to [`WIDEST`]; W from 2 to 8. Rows past K are zeros of q and k.

use super::{
    COLUMNS, ROWS, Share, Sizes, SizesLaunch, Split, request, request_kept, row, share, store,
    sum_slices, turns,
};
use crate::buffer::{Buffer, array, together, whole};
use crate::fused::conv_split::{Head, Norm, UNROLLED};
use crate::launch::launch_light;
use crate::pointwise::{Activation, activate, softplus};
use crate::refusal::{F32, Refusal, check_type};
use crate::variant::{Decay, Dims, Read, Transition, Variant};
use crate::{SOURCE, WIDEST};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::ops::Range;

/// Convolutions: of q, of k and of v.
pub const CONVOLUTIONS: usize = 3;

/// Columns of a packed projection, and what is made of them. The first ones are those of q, k and v.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// P.
    pub all: usize,
    /// W.
    pub window: usize,
    /// f, of q, k and v.
    pub activations: [Activation; CONVOLUTIONS],
    /// Norms of q and k, whose heads are those of the state.
    pub norms: [Option<Head>; 2],
    /// The first column of beta and the sigmoid's factor, for a delta rule.
    pub beta: Option<(usize, f64)>,
    /// The first column that becomes a log decay, one a head.
    pub decay: Option<usize>,
    /// Columns that are copied.
    pub copied: Range<usize>,
}

/// Tensors, contiguous, shaped as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The packed projection.
    pub y: &'a Handle,
    /// Of q, k and v.
    pub weights: [&'a Handle; CONVOLUTIONS],
    /// Of q, k and v.
    pub biases: Option<[&'a Handle; CONVOLUTIONS]>,
    /// Of q, k and v.
    pub conv_states: Option<[&'a Handle; CONVOLUTIONS]>,
    /// `a_log` and `dt_bias`, where there is a decay.
    pub decay: Option<[&'a Handle; 2]>,
    /// S.
    pub state: &'a Handle,
}

/// Outputs of a token.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[B, H, V]`.
    pub o: Buffer,
    /// S'.
    pub state: Buffer,
    /// Of q, k and v.
    pub conv_states: [Buffer; CONVOLUTIONS],
    /// Columns of y, where any are copied.
    pub copied: Option<Buffer>,
}

/// Types of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// F.
    pub rows: StorageType,
    /// G.
    pub weights: StorageType,
}

/// Compile-time values of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    split: Split,
    window: usize,
    activations: [Activation; CONVOLUTIONS],
    norms: [Option<Norm>; 2],
    /// Bits of the sigmoid's factor.
    beta: u32,
    biased: bool,
    /// Whether there are conv states from before.
    given: bool,
    copies: bool,
    /// Rows of q and of k in shared memory: K, up to whole turns of all units.
    padded: usize,
}

impl Form {
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        columns: &Columns,
        inputs: &Inputs<'_>,
    ) -> Self {
        let decay = if columns.decay.is_some() { Decay::Scalar } else { Decay::None };
        let transition = match columns.beta {
            Some(_) => Transition::Delta { erase: false },
            None => Transition::Identity,
        };
        let split = Split::new(client, Variant { decay, transition, read: Read::After }, dims);
        Self {
            source: SOURCE,
            split,
            window: columns.window,
            activations: columns.activations,
            norms: columns.norms.map(|head| head.map(Norm::new)),
            beta: columns.beta.map_or(0, |(_, scale)| (scale as f32).to_bits()),
            biased: inputs.biases.is_some(),
            given: inputs.conv_states.is_some(),
            copies: !columns.copied.is_empty(),
            padded: dims.key_width.next_multiple_of(split.slices * ROWS),
        }
    }

    /// Numbers in shared memory: q and k, and two of each unit.
    fn shared(&self) -> usize {
        2 * (self.padded + self.split.units())
    }

    fn delta(&self) -> bool {
        self.split.variant.delta()
    }

    fn scalar(&self) -> bool {
        self.split.variant.scalar()
    }

    /// W - 1.
    fn kept(&self) -> usize {
        self.window - 1
    }

    /// Turns in which all units fill q and k.
    fn fills(&self) -> usize {
        (2 * self.padded).div_ceil(self.split.units())
    }

    fn beta(&self) -> f32 {
        f32::from_bits(self.beta)
    }
}

/// Columns of each convolution.
fn widths(dims: Dims) -> [usize; CONVOLUTIONS] {
    let keys = dims.key_heads * dims.key_width;
    [keys, keys, dims.heads * dims.value_width]
}

/// One token of each sequence.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
/// # Panics
/// If columns lie outside of y, or `a_log` and `dt_bias` are there without a decay or not there with one.
pub fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &Columns,
    inputs: Inputs<'_>,
    types: Types,
) -> Result<Outputs, Refusal> {
    let form = check(client, dims, columns, &inputs, types)?;
    let Dims { batch, key_heads, heads, key_width, value_width, .. } = dims;
    let widths = widths(dims);
    let Outputs { o, state, conv_states, copied } =
        outputs(client, dims, columns, form, types.rows);

    let [a_log, dt_bias] = [0, 1].map(|n| inputs.decay.map(|handles| array(handles[n], heads)));
    let (x_cubes, y_cubes) = (batch * heads, value_width.div_ceil(COLUMNS));
    // SAFETY: units read and write within the sizes of `dims` and `columns`, which the caller promises; `form` says
    // which tensors are not there.
    #[allow(unsafe_code)]
    unsafe {
        launch_light!(
            client,
            CubeCount::Static(x_cubes as u32, y_cubes as u32, 1),
            CubeDim::new_1d(form.split.units() as u32),
            convolved_step::ConvolvedStep<R>,
            types: [F: types.rows, G: types.weights], sizes: [],
            arguments: [
                x: Operands<convolved_step::F, convolved_step::G> = OperandsLaunch::new(
                    array(inputs.y, batch * columns.all),
                    each(Some(inputs.weights), widths, columns.window),
                    each(inputs.biases, widths, 1),
                    each(inputs.conv_states, widths, batch * form.kept()),
                    a_log.into_iter().collect(),
                    dt_bias.into_iter().collect(),
                    array(inputs.state, batch * heads * key_width * value_width),
                ),
                to: Results<convolved_step::F> = ResultsLaunch::new(
                    whole(&o),
                    whole(&state),
                    conv_states.iter().map(whole).collect(),
                    copied.iter().map(whole).collect(),
                ),
                places: Places = places(dims, columns),
                sizes: Sizes = SizesLaunch::new(
                    (heads / key_heads) as u32,
                    key_width as u32,
                    value_width as u32,
                ),
            ],
            comptime: [form, [types.rows, types.weights]],
        );
    }
    Ok(Outputs { o, state, conv_states, copied })
}

/// Memory of the outputs, by one request: the conv states and S' live as long, and are nearly all of it.
fn outputs<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &Columns,
    form: Form,
    rows: StorageType,
) -> Outputs {
    let Dims { batch, heads, key_width, value_width, .. } = dims;
    let mut shapes = vec![
        (vec![batch, heads, key_width, value_width], F32),
        (vec![batch, heads, value_width], rows),
    ];
    shapes.extend(widths(dims).map(|width| (vec![batch, form.kept(), width], rows)));
    shapes.extend(form.copies.then(|| (vec![batch, columns.copied.len()], rows)));
    let sizes = shapes.iter().map(|(shape, dtype)| (shape.iter().product(), *dtype));
    let made = together(client, &sizes.collect::<Vec<_>>()).into_iter().zip(shapes);
    let mut made = made.map(|(buffer, (shape, _))| Buffer { shape, ..buffer });
    let mut next = || made.next().expect("a buffer for each that was asked for");
    let (state, o) = (next(), next());
    let conv_states = [next(), next(), next()];
    Outputs { o, state, conv_states, copied: form.copies.then(next) }
}

/// The tensors of all convolutions that there are, of `rows` rows.
fn each<F: CubePrimitive, R: Runtime>(
    handles: Option<[&Handle; CONVOLUTIONS]>,
    widths: [usize; CONVOLUTIONS],
    rows: usize,
) -> SequenceArg<R, Array<F>> {
    let handles = handles.into_iter().flatten().zip(widths);
    handles.map(|(handle, width)| array(handle, rows * width)).collect()
}

/// The kernel's form, if the device takes this.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    columns: &Columns,
    inputs: &Inputs<'_>,
    types: Types,
) -> Result<Form, Refusal> {
    super::check(client, dims, types.rows)?;
    check_type(client, types.weights)?;
    for (name, got, most) in [("K", dims.key_width, WIDEST), ("window", columns.window, UNROLLED)] {
        if got > most {
            return Err(Refusal::Width { name, got, most });
        }
    }
    if columns.window < 2 {
        return Err(Refusal::Empty { batch: dims.batch, tokens: columns.window });
    }
    assert_eq!(columns.decay.is_some(), inputs.decay.is_some(), "a decay and its parameters");
    let convolved: usize = widths(dims).iter().sum();
    let gates = [columns.beta.map(|(first, _)| first), columns.decay];
    let ends = gates.into_iter().flatten().map(|first| first + dims.heads);
    let last = ends.chain([convolved, columns.copied.end]).max().unwrap_or(0);
    assert!(last <= columns.all, "columns up to {last} of {}", columns.all);
    let form = Form::new(client, dims, columns, inputs);
    let hardware = &client.properties().hardware;
    let sets = 2 + usize::from(form.biased) + usize::from(form.given);
    let bindings =
        5 + sets * CONVOLUTIONS + 2 * usize::from(form.scalar()) + usize::from(form.copies);
    let numbers = dims.batch.saturating_mul(columns.all).saturating_mul(columns.window);
    for (what, got, most) in [
        ("buffers of a kernel", bindings, hardware.max_bindings as usize),
        ("numbers in a tensor", numbers, u32::MAX as usize),
    ] {
        if got > most {
            return Err(Refusal::TooLarge { what, got, most });
        }
    }
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    match 4 * form.shared() > shared_memory {
        true => Err(Refusal::Device { shared_memory, units }),
        false => Ok(form),
    }
}

fn places<R: Runtime>(dims: Dims, columns: &Columns) -> PlacesLaunch<R> {
    PlacesLaunch::new(
        columns.all as u32,
        dims.heads as u32,
        (dims.key_heads * dims.key_width) as u32,
        columns.beta.map_or(0, |(first, _)| first) as u32,
        columns.decay.unwrap_or(0) as u32,
        columns.copied.start as u32,
        columns.copied.len() as u32,
    )
}

/// The inputs; those that are not there are empty.
#[derive(CubeType, CubeLaunch)]
struct Operands<F: Float, G: Float> {
    y: Array<F>,
    weights: Sequence<Array<G>>,
    biases: Sequence<Array<G>>,
    conv_states: Sequence<Array<F>>,
    a_log: Sequence<Array<G>>,
    dt_bias: Sequence<Array<G>>,
    state: Array<f32>,
}

/// The outputs; what is not copied is empty.
#[derive(CubeType, CubeLaunch)]
struct Results<F: Float> {
    o: Array<F>,
    state: Array<f32>,
    conv_states: Sequence<Array<F>>,
    copied: Sequence<Array<F>>,
}

/// Places in a row of y, and sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Places {
    /// P.
    all: u32,
    /// H.
    heads: u32,
    /// Columns of q, and of k.
    keys: u32,
    /// The first columns of beta, of the log decay and of what is copied, and how many are copied.
    beta: u32,
    decay: u32,
    copied: u32,
    copies: u32,
}

/// A channel of a convolution of one token.
#[derive(CubeType, Clone, Copy)]
struct Channel {
    /// Its sequence, and its place in y.
    batch: usize,
    place: usize,
    /// Its place among the convolution's channels, and how many these are.
    own: usize,
    width: usize,
    /// Whether this unit leaves its next conv state.
    keeps: bool,
}

/// The kernel.
#[cube(launch_unchecked)]
fn convolved_step<F: Float, G: Float>(
    x: &Operands<F, G>,
    to: &mut Results<F>,
    places: &Places,
    sizes: &Sizes,
    #[comptime] form: Form,
    #[define(F, G)] _types: [StorageType; 2],
) {
    let (split, padded) = comptime!((form.split, form.padded));
    let share = share(sizes);
    let mut held = Array::<f32>::new(comptime!(split.held()));
    request_kept(&mut held, &x.state, &share, split);
    let mut keys = SharedMemory::<f32>::new(comptime!(2 * padded));
    let mut parts = SharedMemory::<f32>::new(comptime!(2 * split.units()));
    fill_keys::<F, G>(&mut keys, x, to, &share, places, sizes, form);
    let v = value::<F, G>(x, to, &share, places, form);
    if comptime!(form.copies) {
        copy::<F, G>(x, to.copied.index_mut(0usize), &share, places, form);
    }
    let (beta, decay) = gates::<F, G>(x, &share, places, form);
    sync_cube();

    let mut sums = Array::<f32>::new(2usize);
    retrieve(&mut sums, &mut held, &x.state, &keys, &share, form);
    sum_slices(&mut parts, &mut sums, &share, 2usize, split);
    let length = scale(sums[1], comptime!(form.norms[1]));
    let mut u = v * length;
    if comptime!(form.delta()) {
        u = beta * (v - decay * length * sums[0]) * length;
    }
    write(&mut sums, &mut to.state, &mut held, &x.state, &keys, &share, u, decay, form);
    sum_slices(&mut parts, &mut sums, &share, 2usize, split);
    if share.there && share.slice == 0 {
        to.o[share.value] = F::cast_from(sums[0] * scale(sums[1], comptime!(form.norms[0])));
    }
}

/// Factor of a head whose squares have this sum, which its norm multiplies it by; 1 without a norm.
#[cube]
fn scale(squares: f32, #[comptime] norm: Option<Norm>) -> f32 {
    let mut scale = 1.0f32;
    if comptime!(norm.is_some()) {
        let factor = comptime!(norm.map_or(1.0, |norm| norm.factor()));
        let epsilon = comptime!(norm.map_or(0.0, |norm| norm.epsilon()));
        scale = factor * f32::inverse_sqrt(squares + epsilon);
    }
    scale
}

/// q and k of this cube's head before their norms, with zeros up to whole turns.
#[cube]
fn fill_keys<F: Float, G: Float>(
    keys: &mut SharedMemory<f32>,
    x: &Operands<F, G>,
    to: &mut Results<F>,
    share: &Share,
    places: &Places,
    sizes: &Sizes,
    #[comptime] form: Form,
) {
    let (padded, units) = comptime!((form.padded, form.split.units()));
    let heads = places.heads as usize;
    let batch = share.batch_head / heads;
    let head = share.batch_head % heads;
    let group = sizes.group as usize;
    let width = places.keys as usize;
    let line = batch * places.all as usize;
    // One cube of those that share a head's keys leaves their conv states.
    let member = head % group;
    let keeps = member == 0 && CUBE_POS_Y == 0;
    for turn in 0..comptime!(form.fills()) {
        let place = turn * units + UNIT_POS as usize;
        let i = place % padded;
        let own = head / group * share.key_width + i;
        let mut z = 0.0f32;
        if i < share.key_width {
            if place < padded {
                let at = Channel { batch, place: line + own, own, width, keeps };
                z = convolved::<F, G>(x, to, &at, 0usize, form);
            } else if place < comptime!(2 * padded) {
                let at = Channel { batch, place: line + width + own, own, width, keeps };
                z = convolved::<F, G>(x, to, &at, 1usize, form);
            }
        }
        if place < comptime!(2 * padded) {
            keys[place] = z;
        }
    }
}

/// The value of this unit's column.
#[cube]
fn value<F: Float, G: Float>(
    x: &Operands<F, G>,
    to: &mut Results<F>,
    share: &Share,
    places: &Places,
    #[comptime] form: Form,
) -> f32 {
    let width = places.heads as usize * share.value_width;
    let batch = share.batch_head / places.heads as usize;
    let own = share.value - batch * width;
    let keeps = share.slice == 0 && share.there;
    let place = batch * places.all as usize + 2 * places.keys as usize + own;
    let at = Channel { batch, place, own, width, keeps };
    convolved::<F, G>(x, to, &at, 2usize, form)
}

/// A channel of convolution `n` through its activation. Leaves its next conv state.
#[cube]
fn convolved<F: Float, G: Float>(
    x: &Operands<F, G>,
    to: &mut Results<F>,
    at: &Channel,
    #[comptime] n: usize,
    #[comptime] form: Form,
) -> f32 {
    let (window, kept) = comptime!((form.window, form.kept()));
    let first = at.batch * kept * at.width + at.own;
    let mut seen = Array::<f32>::new(window);
    #[unroll]
    for w in 0..kept {
        seen[w] = 0.0f32;
        if comptime!(form.given) {
            seen[w] = f32::cast_from(x.conv_states.index(n)[first + w * at.width]);
        }
    }
    seen[kept] = f32::cast_from(x.y[at.place]);
    let mut z = 0.0f32;
    if comptime!(form.biased) {
        z = f32::cast_from(x.biases.index(n)[at.own]);
    }
    #[unroll]
    for w in 0..window {
        z += f32::cast_from(x.weights.index(n)[at.own + w * at.width]) * seen[w];
    }
    if at.keeps {
        let next = to.conv_states.index_mut(n);
        #[unroll]
        for w in 0..kept {
            next[first + w * at.width] = F::cast_from(seen[comptime!(w + 1)]);
        }
    }
    activate(z, comptime!(form.activations[n]))
}

/// beta, and e^g: 1 where there is none.
#[cube]
fn gates<F: Float, G: Float>(
    x: &Operands<F, G>,
    share: &Share,
    places: &Places,
    #[comptime] form: Form,
) -> (f32, f32) {
    let heads = places.heads as usize;
    let head = share.batch_head % heads;
    let first = share.batch_head / heads * places.all as usize + head;
    let mut beta = 1.0f32;
    if comptime!(form.delta()) {
        let open = activate(f32::cast_from(x.y[first + places.beta as usize]), Activation::Sigmoid);
        beta = open * comptime!(form.beta());
    }
    let mut decay = 1.0f32;
    if comptime!(form.scalar()) {
        let rate = f32::exp(f32::cast_from(x.a_log.index(0usize)[head]));
        let bias = f32::cast_from(x.dt_bias.index(0usize)[head]);
        decay =
            f32::exp(-rate * softplus(f32::cast_from(x.y[first + places.decay as usize]) + bias));
    }
    (beta, decay)
}

/// This cube's share of the columns that are copied.
#[cube]
fn copy<F: Float, G: Float>(
    x: &Operands<F, G>,
    to: &mut Array<F>,
    share: &Share,
    places: &Places,
    #[comptime] form: Form,
) {
    let (heads, count) = (places.heads as usize, places.copies as usize);
    let batch = share.batch_head / heads;
    let cube = share.batch_head % heads * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize;
    let units = comptime!(form.split.units());
    let all = heads * CUBE_COUNT_Y as usize * units;
    let own = cube * units + UNIT_POS as usize;
    let from = batch * places.all as usize + places.copied as usize;
    for turn in 0..(count - 1) / all + 1 {
        let n = turn * all + own;
        if n < count {
            to[batch * count + n] = x.y[from + n];
        }
    }
}

/// This unit's parts of k S, for a delta rule, and of the sum of squares of k, where k has a norm.
#[cube]
fn retrieve(
    sums: &mut Array<f32>,
    held: &mut Array<f32>,
    state: &Array<f32>,
    keys: &SharedMemory<f32>,
    share: &Share,
    #[comptime] form: Form,
) {
    let split = comptime!(form.split);
    sums[0] = 0.0f32;
    sums[1] = 0.0f32;
    if comptime!(form.delta() || form.norms[1].is_some()) {
        if comptime!(split.kept.is_some()) {
            #[unroll]
            for turn in 0..comptime!(split.kept.unwrap_or(0)) {
                retrieve_rows(sums, held, keys, share, turn, turn, form);
            }
        } else {
            for turn in 0..turns(share, split) {
                if comptime!(form.delta()) {
                    request(held, state, share, turn, 0usize, split);
                }
                retrieve_rows(sums, held, keys, share, turn, 0usize, form);
            }
        }
    }
}

/// As [`retrieve`], of the rows of a turn, which are held at `place`.
#[cube]
fn retrieve_rows(
    sums: &mut Array<f32>,
    held: &Array<f32>,
    keys: &SharedMemory<f32>,
    share: &Share,
    turn: usize,
    #[comptime] place: usize,
    #[comptime] form: Form,
) {
    #[unroll]
    for n in 0..ROWS {
        let k = keys[row(share, turn, n, comptime!(form.split)) + comptime!(form.padded)];
        if comptime!(form.delta()) {
            sums[0] += k * held[comptime!(place * ROWS + n)];
        }
        sums[1] += k * k;
    }
}

/// Fills this unit's rows of S', with `u` under k. Leaves its parts of q S' and of the sum of squares of q.
#[cube]
fn write(
    sums: &mut Array<f32>,
    next: &mut Array<f32>,
    held: &mut Array<f32>,
    state: &Array<f32>,
    keys: &SharedMemory<f32>,
    share: &Share,
    u: f32,
    decay: f32,
    #[comptime] form: Form,
) {
    let split = comptime!(form.split);
    sums[0] = 0.0f32;
    sums[1] = 0.0f32;
    if comptime!(split.kept.is_some()) {
        #[unroll]
        for turn in 0..comptime!(split.kept.unwrap_or(0)) {
            write_rows(sums, next, held, keys, share, u, decay, turn, turn, form);
        }
    } else {
        for turn in 0..turns(share, split) {
            request(held, state, share, turn, 0usize, split);
            write_rows(sums, next, held, keys, share, u, decay, turn, 0usize, form);
        }
    }
}

/// As [`write`], of the rows of a turn, which are held at `place`.
#[cube]
fn write_rows(
    sums: &mut Array<f32>,
    next: &mut Array<f32>,
    held: &Array<f32>,
    keys: &SharedMemory<f32>,
    share: &Share,
    u: f32,
    decay: f32,
    turn: usize,
    #[comptime] place: usize,
    #[comptime] form: Form,
) {
    let mut rows = Array::<f32>::new(ROWS);
    #[unroll]
    for n in 0..ROWS {
        let i = row(share, turn, n, comptime!(form.split));
        let q = keys[i];
        let mut after = held[comptime!(place * ROWS + n)];
        if comptime!(form.scalar()) {
            after *= decay;
        }
        after += keys[i + comptime!(form.padded)] * u;
        rows[n] = after;
        // Rows past K repeat its last one, times 0.
        sums[0] += q * after;
        sums[1] += q * q;
    }
    store(next, &rows, share, turn, comptime!(form.split));
}

#[cfg(test)]
#[path = "convolved_tests.rs"]
mod tests;
