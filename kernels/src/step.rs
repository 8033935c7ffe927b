//! One token of any variant: decoding, in one launch.
//! ```text
//! Each (sequence, head) owns a state S: [K, V]. With D = 1, e^g or diag(e^g):
//!     S' = D S + k^T v               identity
//!     S' = D S + k^T u               delta       u = beta (v - e D S)    before: e S
//!     S' = D S + k^T v + b^T z       low rank    z = a S
//!     o  = q S'                      identity, before: q S
//!
//! q, k:  [B, Hk, K]    F    value head j reads key head j / (H / Hk)
//! a, b:  [B, H, K]     F    a is also e, where that is not k
//! v, o:  [B, H, V]     F
//! g:     [B, H(, K)]   f32  natural log of the share kept, at most 0
//! beta:  [B, H]        f32  share of the error to correct
//! S, S': [B, H, K, V]  f32  two tensors
//!
//! Work:   a cube COLUMNS columns of a (sequence, head); R slices of units, of which each has every
//!         R-th row of S. Slices meet in shared memory, to sum up the retrieved value (not in identity) and
//!         the output: there is no plane operation.
//! Cost:   4 to 10 K V flops for 8 K V bytes of state, which all but identity read once more, from
//!         cache, where K is above 128; bound by memory, with few heads by its latency: a unit requests ROWS numbers
//!         of S before it waits for one, and all it has up to 128 keys, which it then keeps; up to 256 where there are
//!         few cubes. Half as many where a cube may have 256 units.
//! Edges:  any K and V. Columns past V and rows past K repeat the last one, and do not count: every
//!         unit has to reach the barriers. K and V are run-time values: a new size compiles nothing,
//!         but for the R that K leads to, one of five, and for whether rows stay in registers.
//! Source: arXiv 2412.06464, whose S is ours transposed, for delta; arXiv 2503.14456 for low rank. No
//!         gradient: decoding has none.
//! ```

pub mod convolved;

use crate::SOURCE;
use crate::buffer::{array, buffer, whole};
use crate::fused::column_sums::multiprocessors;
use crate::refusal::{F32, Refusal, check_heads, check_type};
use crate::tensors::{Forward, Inputs, check_tensors};
use crate::variant::{Decay, Dims, Variant};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Columns of S that a cube owns.
const COLUMNS: usize = 32;
/// Buffers that the kernel is given, whatever the variant, and one of sizes.
const BUFFERS: usize = 11;
/// Rows of S that a unit requests at once.
const ROWS: usize = 8;
/// Most slices of a cube.
const SLICES: usize = 16;
/// Most turns whose rows a unit keeps in registers from the first read to the write.
const KEPT: usize = 2;

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    pub source: &'static str,
    pub variant: Variant,
    /// R, units that share a column of S.
    pub slices: usize,
    /// Turns of a unit, if all its rows stay in registers.
    pub kept: Option<usize>,
}

impl Split {
    /// As many slices as have [`ROWS`] rows each, if there are not too many: a power of two, so that
    /// there are few kernels.
    fn new<R: Runtime>(client: &ComputeClient<R>, variant: Variant, dims: Dims) -> Self {
        let units = client.properties().hardware.max_units_per_cube as usize;
        let wanted = dims.key_width.div_ceil(ROWS).next_power_of_two();
        let slices = wanted.min(SLICES).min(units / COLUMNS);
        let turns = dims.key_width.div_ceil(slices * ROWS);
        // Registers for two turns leave room for half as many cubes, which matters where there are many.
        let cubes = dims.batch * dims.heads * dims.value_width.div_ceil(COLUMNS);
        let keeps = turns == 1 || turns <= KEPT && cubes <= multiprocessors(client);
        Self { source: SOURCE, variant, slices, kept: keeps.then_some(turns) }
    }

    /// Numbers of S that a unit holds.
    fn held(&self) -> usize {
        ROWS * self.kept.unwrap_or(1)
    }

    fn units(&self) -> usize {
        COLUMNS * self.slices
    }
}

/// The kernel of one token, planned.
pub struct Step<R: Runtime> {
    client: ComputeClient<R>,
    split: Split,
    dims: Dims,
    dtype: StorageType,
}

impl<R: Runtime> Step<R> {
    /// For tokens of these sizes: T is 1; `dtype` is that of the rows.
    ///
    /// # Errors
    /// [`Refusal`] names what is too large, or of a type that the device does not have.
    pub fn new(
        client: &ComputeClient<R>,
        variant: Variant,
        dims: Dims,
        dtype: StorageType,
    ) -> Result<Self, Refusal> {
        check(client, dims, dtype)?;
        let split = Split::new(client, variant, dims);
        Ok(Self { client: client.clone(), split, dims, dtype })
    }

    /// One token: T is 1 in every tensor of `x`. Gives `o` and the state after `state`; nothing is saved.
    ///
    /// # Panics
    /// If `x` has other tensors than the variant.
    pub fn run(&self, x: &Inputs, state: &Handle) -> Forward {
        let Self { client, split, dims, dtype } = self;
        if let Err(why) = check_tensors(split.variant, x) {
            panic!("tensors of {:?}: {why}", split.variant);
        }
        let Dims { batch, tokens, key_heads, heads, key_width, value_width } = *dims;
        let o = buffer(client, &[batch, tokens, heads, value_width], *dtype);
        let next = buffer(client, &[batch, heads, key_width, value_width], F32);
        let (x_cubes, y_cubes) = (batch * heads, value_width.div_ceil(COLUMNS));
        // SAFETY: units read and write within the sizes of `dims`, which the caller promises; `split` says
        // which tensors are not there.
        #[allow(unsafe_code)]
        unsafe {
            recurrent_step::launch_unchecked::<R>(
                client,
                CubeCount::Static(x_cubes as u32, y_cubes as u32, 1),
                CubeDim::new_1d(split.units() as u32),
                token(split.variant, *dims, x, state),
                whole(&next),
                whole(&o),
                SizesLaunch::new((heads / key_heads) as u32, key_width as u32, value_width as u32),
                *split,
                *dtype,
            );
        }
        Forward { o, state: next, saved: vec![] }
    }
}

pub(crate) fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    dtype: StorageType,
) -> Result<(), Refusal> {
    check_type(client, dtype)?;
    check_heads(dims)?;
    let Dims { batch, tokens, heads, key_width, value_width, .. } = dims;
    let numbers = u32::MAX as usize;
    for (name, got) in [("K", key_width), ("V", value_width)] {
        if !(1..=numbers).contains(&got) {
            return Err(Refusal::Width { name, got, most: numbers });
        }
    }
    let hardware = &client.properties().hardware;
    let (x, y, _) = hardware.max_cube_count;
    let batch_heads = batch * heads;
    for (what, got, most) in [
        ("tokens of a step", tokens, 1),
        ("numbers in a tensor", batch_heads * key_width * value_width, numbers),
        ("sequences x heads", batch_heads, x as usize),
        ("columns of a state", value_width, (y as usize).saturating_mul(COLUMNS)),
        ("buffers of a kernel", BUFFERS, hardware.max_bindings as usize),
    ] {
        if got > most {
            return Err(Refusal::TooLarge { what, got, most });
        }
    }
    let (shared_memory, units) = (hardware.max_shared_memory_size, hardware.max_units_per_cube);
    match units as usize >= COLUMNS {
        true => Ok(()),
        false => Err(Refusal::Device { shared_memory, units }),
    }
}

/// [`Step::new`] and [`Step::run`], from the state of `x`.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    x: &Inputs,
) -> Result<Forward, Refusal> {
    check_tensors(variant, x)?;
    let state = x.state.as_ref().ok_or(Refusal::Tensor { name: "state", wanted: true })?;
    Ok(Step::new(client, variant, dims, dtype)?.run(x, state))
}

/// The tensors of one launch.
fn token<F: Float, R: Runtime>(
    variant: Variant,
    dims: Dims,
    x: &Inputs,
    state: &Handle,
) -> TokenLaunch<F, R> {
    let Dims { batch, key_heads, heads, key_width, value_width, .. } = dims;
    let (keys, batch_heads) = (batch * key_heads * key_width, batch * heads);
    let (rows, values) = (batch_heads * key_width, batch_heads * value_width);
    let decays = if variant.decay == Decay::Vector { rows } else { batch_heads };
    // A tensor that the variant does not have is bound to a number of another one that is not read.
    let or = |handle: &Option<Handle>, len, other: &Handle| match handle {
        Some(handle) => array(handle, len),
        None => array(other, 1),
    };
    TokenLaunch::new(
        array(&x.q, keys),
        array(&x.k, keys),
        or(&x.a, rows, &x.q),
        or(&x.b, rows, &x.q),
        array(&x.v, values),
        or(&x.g, decays, state),
        or(&x.beta, batch_heads, state),
        array(state, rows * value_width),
    )
}

/// Tensors of one token, as the kernel sees them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Token<F: Float> {
    pub q: Array<F>,
    pub k: Array<F>,
    /// The erase rows of a delta rule, or a.
    pub a: Array<F>,
    pub b: Array<F>,
    pub v: Array<F>,
    /// Scalar or vector log decays.
    pub g: Array<f32>,
    pub beta: Array<f32>,
    /// S.
    pub state: Array<f32>,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    /// Value heads of a key head.
    pub group: u32,
    pub key_width: u32,
    pub value_width: u32,
}

/// Work of a unit: every R-th row of one column of S.
#[derive(CubeType, Clone, Copy)]
struct Share {
    /// Number of the (sequence, head).
    batch_head: usize,
    /// Its slice, which is its first row too.
    slice: usize,
    /// Its column among those of the cube.
    lane: usize,
    /// Whether S has that column.
    there: bool,
    /// Where its numbers begin: q and k; a, b and vector log decays; v and o; S.
    keys: usize,
    rows: usize,
    value: usize,
    state: usize,
    /// K and V.
    key_width: usize,
    value_width: usize,
}

/// The kernel.
#[cube(launch_unchecked)]
pub(crate) fn recurrent_step<F: Float>(
    x: &Token<F>,
    next: &mut Array<f32>,
    o: &mut Array<F>,
    sizes: &Sizes,
    #[comptime] split: Split,
    #[define(F)] _dtype: StorageType,
) {
    let variant = comptime!(split.variant);
    let share = share(sizes);
    let mut parts = SharedMemory::<f32>::new(comptime!(split.units()));
    let mut held = Array::<f32>::new(comptime!(split.held()));
    request_kept(&mut held, &x.state, &share, split);
    let mut decay = 1.0f32;
    if comptime!(variant.scalar()) {
        decay = f32::exp(x.g[share.batch_head]);
    }
    let mut sums = Array::<f32>::new(1usize);
    let mut retrieved = 0.0f32;
    if comptime!(variant.solves()) {
        sums[0] = retrieve::<F>(x, &mut held, &share, decay, split);
        sum_slices(&mut parts, &mut sums, &share, 1usize, split);
        retrieved = sums[0];
    }
    let mut u = f32::cast_from(x.v[share.value]);
    if comptime!(variant.delta()) {
        u = x.beta[share.batch_head] * (u - retrieved);
    }
    let written = Written { u, retrieved, decay };
    sums[0] = write::<F>(x, next, &mut held, &share, &written, split);
    sum_slices(&mut parts, &mut sums, &share, 1usize, split);
    if share.there && share.slice == 0 {
        o[share.value] = F::cast_from(sums[0]);
    }
}

/// The share of this unit.
#[cube]
fn share(sizes: &Sizes) -> Share {
    let batch_head = CUBE_POS_X as usize;
    let key_width = sizes.key_width as usize;
    let value_width = sizes.value_width as usize;
    let lane = UNIT_POS as usize % COLUMNS;
    let column = CUBE_POS_Y as usize * COLUMNS + lane;
    let stored = min(column, value_width - 1);
    Share {
        batch_head,
        slice: UNIT_POS as usize / COLUMNS,
        lane,
        there: column < value_width,
        keys: batch_head / sizes.group as usize * key_width,
        rows: batch_head * key_width,
        value: batch_head * value_width + stored,
        state: batch_head * key_width * value_width + stored,
        key_width,
        value_width,
    }
}

/// How often a unit requests [`ROWS`] rows. All do equally often.
#[cube]
fn turns(share: &Share, #[comptime] split: Split) -> usize {
    (share.key_width - 1) / comptime!(split.slices * ROWS) + 1
}

/// Row `n` of a turn; it may be past K.
#[cube]
fn row(share: &Share, turn: usize, #[comptime] n: usize, #[comptime] split: Split) -> usize {
    share.slice + (turn * ROWS + n) * comptime!(split.slices)
}

/// `s` of row `i` after this token's decay; `decay` is e^g where that is a scalar.
#[cube]
fn decayed<F: Float>(
    x: &Token<F>,
    share: &Share,
    i: usize,
    s: f32,
    decay: f32,
    #[comptime] split: Split,
) -> f32 {
    let mut left = s;
    if comptime!(split.variant.scalar()) {
        left = decay * s;
    }
    if comptime!(split.variant.vector()) {
        left = f32::exp(x.g[share.rows + i]) * s;
    }
    left
}

/// Requests this unit's rows of a turn, the one that is held at `place`.
#[cube]
fn request(
    held: &mut Array<f32>,
    state: &Array<f32>,
    share: &Share,
    turn: usize,
    #[comptime] place: usize,
    #[comptime] split: Split,
) {
    #[unroll]
    for n in 0..ROWS {
        let at = min(row(share, turn, n, split), share.key_width - 1);
        held[comptime!(place * ROWS + n)] = state[share.state + at * share.value_width];
    }
}

/// Requests all of this unit's rows, where they stay in registers.
#[cube]
fn request_kept(
    held: &mut Array<f32>,
    state: &Array<f32>,
    share: &Share,
    #[comptime] split: Split,
) {
    #[unroll]
    for turn in 0..comptime!(split.kept.unwrap_or(0)) {
        request(held, state, share, turn, turn, split);
    }
}

/// This unit's part of the retrieved value: a S, or a D S.
#[cube]
fn retrieve<F: Float>(
    x: &Token<F>,
    held: &mut Array<f32>,
    share: &Share,
    decay: f32,
    #[comptime] split: Split,
) -> f32 {
    let mut retrieved = 0.0f32;
    if comptime!(split.kept.is_some()) {
        #[unroll]
        for turn in 0..comptime!(split.kept.unwrap_or(0)) {
            retrieved += retrieve_rows::<F>(x, held, share, decay, turn, turn, split);
        }
    } else {
        for turn in 0..turns(share, split) {
            request(held, &x.state, share, turn, 0usize, split);
            retrieved += retrieve_rows::<F>(x, held, share, decay, turn, 0usize, split);
        }
    }
    retrieved
}

/// As [`retrieve`], of the rows of a turn, which are held at `place`.
#[cube]
fn retrieve_rows<F: Float>(
    x: &Token<F>,
    held: &Array<f32>,
    share: &Share,
    decay: f32,
    turn: usize,
    #[comptime] place: usize,
    #[comptime] split: Split,
) -> f32 {
    let mut retrieved = 0.0f32;
    #[unroll]
    for n in 0..ROWS {
        let i = row(share, turn, n, split);
        let at = min(i, share.key_width - 1);
        let mut s = held[comptime!(place * ROWS + n)];
        if comptime!(!split.variant.erases_before()) {
            s = decayed::<F>(x, share, at, s, decay, split);
        }
        let a = if comptime!(split.variant.own_a()) {
            f32::cast_from(x.a[share.rows + at])
        } else {
            f32::cast_from(x.k[share.keys + at])
        };
        retrieved += select(i < share.key_width, a * s, 0.0f32);
    }
    retrieved
}

/// A token's write to its state.
#[derive(CubeType, Clone, Copy)]
struct Written {
    /// Under k.
    u: f32,
    /// Low rank: under b.
    retrieved: f32,
    /// e^g of a scalar decay.
    decay: f32,
}

/// Fills this unit's rows of S'. Gives its part of the output.
#[cube]
fn write<F: Float>(
    x: &Token<F>,
    next: &mut Array<f32>,
    held: &mut Array<f32>,
    share: &Share,
    written: &Written,
    #[comptime] split: Split,
) -> f32 {
    let mut read = 0.0f32;
    if comptime!(split.kept.is_some()) {
        #[unroll]
        for turn in 0..comptime!(split.kept.unwrap_or(0)) {
            read += write_rows::<F>(x, next, held, share, written, turn, turn, split);
        }
    } else {
        for turn in 0..turns(share, split) {
            request(held, &x.state, share, turn, 0usize, split);
            read += write_rows::<F>(x, next, held, share, written, turn, 0usize, split);
        }
    }
    read
}

/// As [`write`], of the rows of a turn, which are held at `place`.
#[cube]
fn write_rows<F: Float>(
    x: &Token<F>,
    next: &mut Array<f32>,
    held: &Array<f32>,
    share: &Share,
    written: &Written,
    turn: usize,
    #[comptime] place: usize,
    #[comptime] split: Split,
) -> f32 {
    let mut read = 0.0f32;
    // Stored when all are there: a store between two rows would keep the second one's loads waiting.
    let mut rows = Array::<f32>::new(ROWS);
    #[unroll]
    for n in 0..ROWS {
        let i = row(share, turn, n, split);
        let at = min(i, share.key_width - 1);
        let before = held[comptime!(place * ROWS + n)];
        let mut after = decayed::<F>(x, share, at, before, written.decay, split);
        after += f32::cast_from(x.k[share.keys + at]) * written.u;
        if comptime!(split.variant.low_rank()) {
            after += f32::cast_from(x.b[share.rows + at]) * written.retrieved;
        }
        rows[n] = after;
        let q = f32::cast_from(x.q[share.keys + at]);
        if comptime!(split.variant.reads_before()) {
            read += select(i < share.key_width, q * before, 0.0f32);
        } else {
            read += select(i < share.key_width, q * after, 0.0f32);
        }
    }
    store(next, &rows, share, turn, split);
    read
}

/// Stores this unit's rows of a turn.
#[cube]
fn store(
    next: &mut Array<f32>,
    rows: &Array<f32>,
    share: &Share,
    turn: usize,
    #[comptime] split: Split,
) {
    #[unroll]
    for n in 0..ROWS {
        let i = row(share, turn, n, split);
        if share.there && i < share.key_width {
            next[share.state + i * share.value_width] = rows[n];
        }
    }
}

/// Adds up `count` numbers of a column's units over all slices: each of them has the sums then. Begins with a
/// barrier, so that an earlier sum has been read by all.
#[cube]
fn sum_slices(
    parts: &mut SharedMemory<f32>,
    sums: &mut Array<f32>,
    share: &Share,
    #[comptime] count: usize,
    #[comptime] split: Split,
) {
    let units = comptime!(split.units());
    sync_cube();
    #[unroll]
    for n in 0..count {
        parts[share.slice * COLUMNS + share.lane + comptime!(n * units)] = sums[n];
    }
    sync_cube();
    #[unroll]
    for n in 0..count {
        let mut sum = 0.0f32;
        #[unroll]
        for slice in 0..comptime!(split.slices) {
            sum += parts[share.lane + comptime!(n * units + slice * COLUMNS)];
        }
        sums[n] = sum;
    }
}
