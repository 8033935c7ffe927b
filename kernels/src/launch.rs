//! The host's side: checks, cuts and buffers, and the launches of one forward or backward pass.

use crate::chunk::SizesLaunch;
use crate::desk::RowPairsLaunch;
use crate::gradients::{GradientsLaunch, TracesLaunch, row_gradients};
use crate::pass::{LocalLaunch, Task, WalkLaunch, walk_backward, walk_forward};
use crate::plan::{Dims, Plan, Transition, VERSION, Variant};
use crate::scores::{OperandsLaunch, ScoresLaunch, score_chunks, table};
use crate::tile::Engine;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Widest key and value.
pub const WIDEST: usize = 256;

/// Why nothing was launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// A width that no plan covers.
    Width {
        /// `K` or `V`.
        name: &'static str,
        /// Its size.
        got: usize,
    },
    /// There is nothing to compute.
    Empty {
        /// Sequences.
        batch: usize,
        /// Tokens of a sequence.
        tokens: usize,
    },
    /// A size that the device's counters, or indices of 32 bits, cannot hold.
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest that would do.
        most: usize,
    },
    /// A type of number that the kernels do not take, or the device does not.
    Type {
        /// The type.
        got: StorageType,
    },
    /// Value heads cannot be shared out over key heads.
    Heads {
        /// Heads of values.
        heads: usize,
        /// Heads of keys.
        key_heads: usize,
    },
    /// The device has too little shared memory, or too few units a cube.
    Device {
        /// Bytes of shared memory a cube may have.
        shared_memory: usize,
        /// Units a cube may have.
        units: u32,
    },
    /// The variant asks for a tensor that is not there, or the other way round.
    Tensor {
        /// The tensor.
        name: &'static str,
        /// Whether the variant has it.
        wanted: bool,
    },
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Width { name, got } => {
                write!(f, "{name} is {got}; the kernels take 1 to {WIDEST}")
            }
            Self::Empty { batch, tokens } => {
                write!(f, "{batch} sequences of {tokens} tokens; both have to be at least 1")
            }
            Self::TooLarge { what, got, most } => {
                write!(f, "{what}: {got}; the most on this device is {most}")
            }
            Self::Type { got } => {
                write!(
                    f,
                    "numbers of type {got}; the kernels take f32, and f16 and bf16 where the device has them"
                )
            }
            Self::Heads { heads, key_heads } => {
                write!(f, "{heads} value heads are no multiple of {key_heads} key heads")
            }
            Self::Device { shared_memory, units } => write!(
                f,
                "a cube may have {shared_memory} bytes of shared memory and {units} units on this \
                 device; no plan is so small"
            ),
            Self::Tensor { name, wanted: true } => write!(f, "`{name}` is missing"),
            Self::Tensor { name, wanted: false } => {
                write!(f, "`{name}` is given, and the variant has none")
            }
        }
    }
}

impl core::error::Error for Refusal {}

/// A tensor that was made here: contiguous.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// The memory.
    pub handle: Handle,
    /// The shape.
    pub shape: Vec<usize>,
    /// The type.
    pub dtype: StorageType,
}

impl Buffer {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Tensors of an operation, contiguous. Rows are of one type; gates and states are f32.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries, `[B, T, Hk, K]`.
    pub q: Handle,
    /// Keys, `[B, T, Hk, K]`.
    pub k: Handle,
    /// Values, `[B, T, H, V]`.
    pub v: Handle,
    /// Erase rows of a delta rule, or a of a low rank transition: `[B, T, H, K]`.
    pub a: Option<Handle>,
    /// b of a low rank transition, `[B, T, H, K]`.
    pub b: Option<Handle>,
    /// Log decay, `[B, T, H]` or `[B, T, H, K]`.
    pub g: Option<Handle>,
    /// Share of the error to correct, `[B, T, H]`.
    pub beta: Option<Handle>,
    /// State before the first token, `[B, H, K, V]`; zeros if absent.
    pub state: Option<Handle>,
}

/// What a forward pass gives.
#[derive(Debug, Clone)]
pub struct Forward {
    /// Outputs, `[B, T, H, V]`.
    pub o: Buffer,
    /// State after the last token, `[B, H, K, V]`, f32.
    pub state: Buffer,
    /// For [`backward`], in its order; empty if nothing was to be kept.
    pub saved: Vec<Buffer>,
}

/// What a backward pass starts from, besides gradients.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// The inputs of the forward pass.
    pub x: &'a Inputs,
    /// Memory of [`Forward::saved`].
    pub saved: &'a [Handle],
}

/// What a backward pass gives. Rows are per value head: where heads share keys, those of q and k are
/// still to be added up.
#[derive(Debug, Clone)]
pub struct Backward {
    /// `[B, T, H, K]`.
    pub q: Buffer,
    /// `[B, T, H, K]`.
    pub k: Buffer,
    /// `[B, T, H, V]`.
    pub v: Buffer,
    /// `[B, T, H, K]`.
    pub a: Option<Buffer>,
    /// `[B, T, H, K]`.
    pub b: Option<Buffer>,
    /// As the gates, f32.
    pub g: Option<Buffer>,
    /// `[B, T, H]`, f32.
    pub beta: Option<Buffer>,
    /// Of the state before the first token, `[B, H, K, V]`, f32.
    pub state: Buffer,
}

/// How one operation is cut up on one device: the same for the same device and widths, whatever the
/// batch and the length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plans {
    scores: Plan,
    walk: Plan,
    gradients: Plan,
    /// Type of what stages hand over to each other.
    between: StorageType,
    /// Numbers a vector in the tensors, in tiles that are loaded, in what is computed.
    widths: [usize; 3],
}

/// Which engine a call would take.
///
/// # Errors
/// [`Refusal`] where the kernels cannot run.
pub fn engine<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<Engine, Refusal> {
    plans(client, variant, dims, dtype).map(|plans| plans.walk.engine)
}

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

fn plans<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<Plans, Refusal> {
    check_sizes(client, dims)?;
    let kind = match dtype {
        StorageType::Scalar(ElemType::Float(kind)) => kind,
        got => return Err(Refusal::Type { got }),
    };
    if !matches!(kind, FloatKind::F32 | FloatKind::F16 | FloatKind::BF16) {
        return Err(Refusal::Type { got: dtype });
    }
    let usable = client.properties().type_usage(dtype);
    if !usable.contains(cubecl::ir::features::TypeUsage::Conversion) {
        return Err(Refusal::Type { got: dtype });
    }
    if kind != FloatKind::F32
        && has_mma(client, dtype)
        && let Some(plans) = mma(client, variant, dims, dtype)
    {
        return Ok(plans);
    }
    plain(client, variant, dims)
}

fn check_sizes<R: Runtime>(client: &ComputeClient<R>, dims: Dims) -> Result<(), Refusal> {
    let Dims { batch, tokens, key_heads, heads, key_width, value_width } = dims;
    for (name, got) in [("K", key_width), ("V", value_width)] {
        if !(1..=WIDEST).contains(&got) {
            return Err(Refusal::Width { name, got });
        }
    }
    if key_heads == 0 || !heads.is_multiple_of(key_heads) || heads == 0 {
        return Err(Refusal::Heads { heads, key_heads });
    }
    if batch == 0 || tokens == 0 {
        return Err(Refusal::Empty { batch, tokens });
    }
    // Rows, squares and states of chunks; a chunk has 16 to 64 tokens.
    let widest = key_width.max(value_width).max(64);
    let states = tokens.div_ceil(16) * batch * heads * key_width * value_width;
    let numbers = (batch * tokens.next_multiple_of(64) * heads * widest).max(states);
    let most = u32::MAX as usize;
    if numbers > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got: numbers, most });
    }
    let (x, y, _) = client.properties().hardware.max_cube_count;
    if tokens.div_ceil(16) > x as usize {
        let most = x as usize * 16;
        return Err(Refusal::TooLarge { what: "tokens of a sequence", got: tokens, most });
    }
    if batch * heads > y as usize {
        return Err(Refusal::TooLarge {
            what: "sequences x heads",
            got: batch * heads,
            most: y as usize,
        });
    }
    Ok(())
}

/// Whether `mma.m16n8k16` and `ldmatrix` are there for this type.
fn has_mma<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    let properties = client.properties();
    let matmul = &properties.features.matmul;
    let planes =
        properties.hardware.plane_size_min == 32 && properties.hardware.plane_size_max == 32;
    let shape = matmul
        .mma
        .iter()
        .any(|c| (c.a_type, c.b_type, c.cd_type, c.m, c.n, c.k) == (dtype, dtype, F32, 16, 8, 16));
    planes && shape && matmul.ldmatrix.contains(&dtype)
}

/// Tensor cores: chunks of 64, keys in one piece.
fn mma<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Option<Plans> {
    let Dims { key_width, value_width, .. } = dims;
    if !key_width.is_multiple_of(16) || !value_width.is_multiple_of(16) {
        return None;
    }
    // The widest part of at most `most` columns that a width falls into.
    let part = |width: usize, most: usize| {
        (1..=most / 16).rev().map(|n| n * 16).find(|n| width.is_multiple_of(*n))
    };
    // The walk has a cube for each tile of values: narrow tiles where there are too few sequences and
    // heads to fill the device, wide ones otherwise, because every tile loads all keys. Below 64 too
    // few units are left to load them.
    let memories = dims.batch * dims.heads;
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors;
    let enough = multiprocessors.map_or(1, |n| n as usize * 3 / 4);
    let value_slice = part(value_width, 128)?;
    let value_tile = [128, 64]
        .into_iter()
        .filter_map(|most| part(value_width, most))
        .find(|tile| memories * (value_width / tile) >= enough)
        .or(part(value_width, 64))?;
    let walk = Plan {
        version: VERSION,
        variant,
        engine: Engine::Mma,
        key_width,
        value_width,
        chunk: 64,
        key_slice: key_width,
        value_tile,
        value_slice,
        halves: 2,
        units: value_tile * 2,
    };
    // A vector decay does not factor out of products: those stages multiply in f32.
    let narrow = |width: usize| if width <= 16 { 16 } else { 32 };
    let plain = Plan {
        engine: Engine::Plain,
        key_slice: narrow(key_width),
        value_slice: narrow(value_width),
        units: 256,
        ..walk
    };
    let most = client.properties().hardware.max_shared_memory_size;
    let (scores, gradients) = match variant.vector() {
        true => (plain, plain),
        false => (
            Plan { units: 256, ..walk },
            // Many units, so that few registers hold each one's share.
            roomy(most, Plan { key_slice: part(key_width, 128)?, halves: 0, units: 512, ..walk }),
        ),
    };
    [2, 1].into_iter().find_map(|halves| {
        let walk = Plan { halves, ..walk };
        let plans = Plans { scores, walk, gradients, between: dtype, widths: [8, 8, 2] };
        fits(client, &plans).then_some(plans)
    })
}

/// f32 arithmetic, in chunks as long as shared memory allows.
fn plain<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
) -> Result<Plans, Refusal> {
    let Dims { key_width, value_width, .. } = dims;
    let narrow = |width: usize| if width <= 16 { 16 } else { 32 };
    let whole = key_width.is_multiple_of(4) && value_width.is_multiple_of(4);
    let widths = [if whole { 4 } else { 1 }, 1, 1];
    let hardware = &client.properties().hardware;
    for chunk in [32, 16] {
        for value_tile in [32, 16] {
            let plan = Plan {
                version: VERSION,
                variant,
                engine: Engine::Plain,
                key_width,
                value_width,
                chunk,
                key_slice: narrow(key_width),
                value_tile,
                value_slice: narrow(value_width),
                halves: 1,
                units: 256,
            };
            let plans = Plans { scores: plan, walk: plan, gradients: plan, between: F32, widths };
            let useful = value_tile == 16 || value_width > 16;
            if useful && fits(client, &plans) {
                return Ok(plans);
            }
        }
    }
    Err(Refusal::Device {
        shared_memory: hardware.max_shared_memory_size,
        units: hardware.max_units_per_cube,
    })
}

fn fits<R: Runtime>(client: &ComputeClient<R>, plans: &Plans) -> bool {
    let hardware = &client.properties().hardware;
    let most = hardware.max_shared_memory_size;
    [
        (plans.scores, scores_memory(&plans.scores)),
        (plans.walk, walk_memory(&plans.walk)),
        (plans.gradients, plans.gradients.gradients_memory()),
    ]
    .into_iter()
    .all(|(plan, bytes)| bytes <= most && plan.units <= hardware.max_units_per_cube as usize)
}

/// Bytes of a tile.
fn tile_bytes(plan: &Plan, rows: usize, columns: usize) -> usize {
    let number = match plan.engine {
        Engine::Plain => 4,
        Engine::Mma => 2,
    };
    rows * plan.stride(columns) * number
}

fn sums_memory(plan: &Plan) -> usize {
    match plan.variant.decay {
        crate::Decay::None => 8,
        crate::Decay::Scalar => 8 * plan.chunk,
        crate::Decay::Vector => 8 * plan.chunk * plan.stride(plan.key_slice),
    }
}

fn scores_memory(plan: &Plan) -> usize {
    let variant = plan.variant;
    let tiles = 2 + usize::from(variant.own_a()) + usize::from(variant.low_rank());
    let rows = tiles * tile_bytes(plan, plan.chunk, plan.key_slice);
    let inverse = if variant.solves() { 8 * plan.chunk * (plan.chunk + 1) } else { 0 };
    let local = match variant.low_rank() {
        true => {
            tile_bytes(plan, plan.chunk, plan.chunk)
                + tile_bytes(plan, plan.chunk, plan.value_slice)
        }
        false => 0,
    };
    rows + inverse + local + sums_memory(plan) + 256
}

fn walk_memory(plan: &Plan) -> usize {
    let variant = plan.variant;
    let rows = tile_bytes(plan, plan.chunk, plan.key_slice);
    let values = tile_bytes(plan, plan.chunk, plan.value_tile);
    let square = tile_bytes(plan, plan.chunk, plan.chunk);
    let scales = 4 * table::ROWS * plan.chunk;
    match plan.engine {
        Engine::Plain => {
            let state = tile_bytes(plan, plan.keys(), plan.value_tile);
            state + rows + 2 * values + square + scales
        }
        Engine::Mma => {
            let asks = variant.own_a() || (variant.vector() && variant.solves());
            let low_rank = usize::from(variant.low_rank());
            let all = rows * (2 + usize::from(asks) + low_rank)
                + values * (1 + low_rank)
                + square * (1 + usize::from(variant.solves()) + 2 * low_rank);
            plan.halves * (all + scales) + 256
        }
    }
}

/// Stage 3 on tensor cores: all tiles of a chunk in shared memory at once where there is room; where
/// there is room for two chunks, two smaller cubes share a multiprocessor and cover each other's loads.
fn roomy(most: usize, sliced: Plan) -> Plan {
    let whole = Plan { halves: 1, ..sliced };
    let bytes = whole.gradients_memory();
    let one_slice = whole.key_slices() == 1 && whole.value_slices() == 1;
    match one_slice && bytes <= most {
        true if 2 * bytes + 1024 <= most => Plan { units: 256, ..whole },
        true => whole,
        false => sliced,
    }
}

/// One call: what every launch needs.
struct Call<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    plans: Plans,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    x: &'a Inputs,
}

/// What stage 1 leaves, in the order of the kernel's fields.
const SCORES: usize = 11;

impl<'a, R: Runtime> Call<'a, R> {
    fn new(
        client: &'a ComputeClient<R>,
        variant: Variant,
        dims: Dims,
        dtype: StorageType,
        x: &'a Inputs,
    ) -> Result<Self, Refusal> {
        let tensors = [
            ("a", x.a.is_some(), variant.own_a()),
            ("b", x.b.is_some(), variant.low_rank()),
            ("g", x.g.is_some(), variant.decay != crate::Decay::None),
            ("beta", x.beta.is_some(), variant.delta()),
        ];
        for (name, there, wanted) in tensors {
            if there != wanted {
                return Err(Refusal::Tensor { name, wanted });
            }
        }
        let plans = plans(client, variant, dims, dtype)?;
        Ok(Self { client, plans, variant, dims, dtype, x })
    }

    fn chunks(&self) -> usize {
        self.dims.tokens.div_ceil(self.plans.walk.chunk)
    }

    fn memories(&self) -> usize {
        self.dims.batch * self.dims.heads
    }

    fn buffer(&self, shape: &[usize], dtype: StorageType) -> Buffer {
        let numbers: usize = shape.iter().product();
        let bytes = numbers * dtype.size();
        // Tests fill every buffer with NaN, so that what a kernel forgets to write is seen.
        let handle = match cfg!(test) {
            true => self.client.create_from_slice(&vec![0xff; bytes]),
            false => self.client.empty(bytes),
        };
        Buffer { handle, shape: shape.to_vec(), dtype }
    }

    fn buffer_if(&self, there: bool, shape: &[usize], dtype: StorageType) -> Buffer {
        // What a variant does not have is bound to a few numbers that are neither read nor written.
        if there { self.buffer(shape, dtype) } else { self.buffer(&[16], dtype) }
    }

    fn sizes(&self) -> SizesLaunch<R> {
        let Dims { tokens, heads, key_heads, .. } = self.dims;
        SizesLaunch::new(tokens as u32, heads as u32, key_heads as u32, self.chunks() as u32)
    }

    fn keys_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, key_heads, key_width, .. } = self.dims;
        [batch, tokens, key_heads, key_width]
    }

    fn rows_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, heads, key_width, .. } = self.dims;
        [batch, tokens, heads, key_width]
    }

    fn values_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, heads, value_width, .. } = self.dims;
        [batch, tokens, heads, value_width]
    }

    fn gates_shape(&self) -> [usize; 3] {
        let Dims { batch, tokens, heads, .. } = self.dims;
        [batch, tokens, heads]
    }

    fn state_shape(&self) -> [usize; 4] {
        let Dims { batch, heads, key_width, value_width, .. } = self.dims;
        [batch, heads, key_width, value_width]
    }

    /// A matrix of a chunk's own.
    fn own_shape(&self, rows: usize, columns: usize) -> [usize; 5] {
        let Dims { batch, heads, .. } = self.dims;
        [batch, heads, self.chunks(), rows, columns]
    }

    fn cubes(&self, across: usize) -> CubeCount {
        CubeCount::Static(across as u32, self.memories() as u32, 1)
    }

    fn operands<F: Float, G: Size>(&self) -> OperandsLaunch<F, G, R> {
        let numbers = |shape: &[usize]| shape.iter().product::<usize>();
        let (keys, rows) = (numbers(&self.keys_shape()), numbers(&self.rows_shape()));
        let (values, gates) = (numbers(&self.values_shape()), numbers(&self.gates_shape()));
        let x = self.x;
        let or_q = |handle: &Option<Handle>, len| match handle {
            Some(handle) => array(handle, len),
            None => array(&x.q, 16),
        };
        let vector = self.variant.vector();
        // Gates that are not there: any f32 tensor would do; none is sure to be f32, and none is read.
        let scalar_gates = x.g.as_ref().filter(|_| !vector);
        let vector_gates = x.g.as_ref().filter(|_| vector);
        OperandsLaunch::new(
            array(&x.q, keys),
            array(&x.k, keys),
            or_q(&x.a, rows),
            or_q(&x.b, rows),
            array(&x.v, values),
            array(scalar_gates.unwrap_or(&x.q), if scalar_gates.is_some() { gates } else { 1 }),
            array(vector_gates.unwrap_or(&x.q), if vector_gates.is_some() { rows } else { 1 }),
            array(x.beta.as_ref().unwrap_or(&x.q), if x.beta.is_some() { gates } else { 1 }),
        )
    }

    /// Stage 1.
    fn scores(&self) -> [Buffer; SCORES] {
        let plan = self.plans.scores;
        let e = self.plans.between;
        let (solves, low_rank) = (self.variant.solves(), self.variant.low_rank());
        let vector = self.variant.vector();
        let square = self.own_shape(plan.chunk, plan.chunk);
        let rows = self.rows_shape();
        let scaled = |there| self.buffer_if(there, &rows, e);
        let out = [
            self.buffer(&square, e),
            self.buffer_if(low_rank, &square, e),
            self.buffer_if(solves, &square, e),
            self.buffer_if(low_rank, &square, e),
            self.buffer_if(low_rank, &self.values_shape(), e),
            self.buffer(&self.own_shape(table::ROWS, plan.chunk), F32),
            scaled(vector),
            scaled(vector && solves),
            scaled(vector && low_rank),
            scaled(vector),
            self.buffer_if(vector, &self.own_shape(1, plan.key_width), F32),
        ];
        let [g, n, m] = self.plans.widths;
        // Tiles of this stage hold f32 where it multiplies in f32.
        let (tiles, n, m_tiles) = match plan.engine {
            Engine::Plain => (F32, 1, 1),
            Engine::Mma => (e, n, m),
        };
        let launched = ScoresLaunch::new(
            whole(&out[0]),
            whole(&out[1]),
            whole(&out[2]),
            whole(&out[3]),
            whole(&out[4]),
            whole(&out[5]),
            whole(&out[6]),
            whole(&out[7]),
            whole(&out[8]),
            whole(&out[9]),
            whole(&out[10]),
        );
        // SAFETY: every index is below the lengths that `check_sizes` and the shapes above fix.
        #[allow(unsafe_code)]
        unsafe {
            score_chunks::launch_unchecked::<R>(
                self.client,
                self.cubes(self.chunks()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                launched,
                self.sizes(),
                plan,
                [self.dtype, tiles, e],
                [g, n, m_tiles],
            );
        }
        out
    }

    fn local<E: Float, G: Size>(&self, scores: &[Handle]) -> LocalLaunch<E, G, R> {
        let chunk = self.plans.walk.chunk;
        let numbers = |shape: &[usize]| shape.iter().product::<usize>();
        let square = numbers(&self.own_shape(chunk, chunk));
        let (rows, values) = (numbers(&self.rows_shape()), numbers(&self.values_shape()));
        let (solves, low_rank) = (self.variant.solves(), self.variant.low_rank());
        let vector = self.variant.vector();
        let of = |n: usize, there, len| array(&scores[n], if there { len } else { 16 });
        LocalLaunch::new(
            of(0, true, square),
            of(1, low_rank, square),
            of(2, solves, square),
            of(3, low_rank, square),
            of(4, low_rank, values),
            of(5, true, numbers(&self.own_shape(table::ROWS, chunk))),
            of(6, vector, rows),
            of(7, vector && solves, rows),
            of(8, vector && low_rank, rows),
            of(9, vector, rows),
            of(10, vector, numbers(&self.own_shape(1, self.dims.key_width))),
        )
    }

    /// Tensor cores leave four numbers in a row to a unit, arithmetic any number.
    fn walk_widths(&self) -> [usize; 4] {
        let [g, n, m] = self.plans.widths;
        let w = match self.plans.walk.engine {
            Engine::Plain => 1,
            Engine::Mma => 4,
        };
        [g, n, m, w]
    }

    /// Stage 2, forward.
    fn walk_forward(&self, scores: &[Handle], keep: bool) -> (Buffer, Buffer, [Buffer; 2]) {
        let plan = self.plans.walk;
        let e = self.plans.between;
        let o = self.buffer(&self.values_shape(), self.dtype);
        let end = self.buffer(&self.state_shape(), F32);
        let states = self.own_shape(plan.value_width, plan.key_width);
        let kept = [
            self.buffer_if(keep, &states, e),
            self.buffer_if(keep && self.variant.solves(), &self.values_shape(), e),
        ];
        let start = self.x.state.as_ref().unwrap_or(&end.handle);
        let walk =
            WalkLaunch::new(array(start, end.len()), whole(&end), whole(&kept[0]), whole(&kept[1]));
        let task = Task { given: self.x.state.is_some(), keep };
        // SAFETY: as in `scores`.
        #[allow(unsafe_code)]
        unsafe {
            walk_forward::launch_unchecked::<R>(
                self.client,
                self.cubes(plan.value_tiles()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                self.local(scores),
                walk,
                whole(&o),
                self.sizes(),
                task,
                plan,
                [self.dtype, e],
                self.walk_widths(),
            );
        }
        (o, end, kept)
    }

    /// Stage 2, backward: dv of linear attention, dS of the start, and the states' and solves'
    /// gradients.
    fn walk_backward(
        &self,
        scores: &[Handle],
        d_o: &Handle,
        d_state: Option<&Handle>,
    ) -> (Buffer, Buffer, [Buffer; 2]) {
        let plan = self.plans.walk;
        let e = self.plans.between;
        let solves = self.variant.solves();
        let d_v = self.buffer_if(!self.variant.delta(), &self.values_shape(), self.dtype);
        let end = self.buffer(&self.state_shape(), F32);
        let states = self.own_shape(plan.value_width, plan.key_width);
        let kept = [self.buffer(&states, e), self.buffer_if(solves, &self.values_shape(), e)];
        let start = d_state.unwrap_or(&end.handle);
        let walk =
            WalkLaunch::new(array(start, end.len()), whole(&end), whole(&kept[0]), whole(&kept[1]));
        let task = Task { given: d_state.is_some(), keep: true };
        let values = self.values_shape().iter().product();
        // SAFETY: as in `scores`.
        #[allow(unsafe_code)]
        unsafe {
            walk_backward::launch_unchecked::<R>(
                self.client,
                self.cubes(plan.value_tiles()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                self.local(scores),
                walk,
                array(d_o, values),
                whole(&d_v),
                self.sizes(),
                task,
                plan,
                [self.dtype, e],
                self.walk_widths(),
            );
        }
        (d_v, end, kept)
    }

    /// Stage 3.
    fn gradients(
        &self,
        states: &Handle,
        u: &Handle,
        d_states: &Buffer,
        r: &Buffer,
        d_o: &Handle,
        d_v: Buffer,
    ) -> GradientBuffers {
        let plan = self.plans.gradients;
        let (variant, e) = (self.variant, self.plans.between);
        let rows = self.rows_shape();
        let gated = variant.decay != crate::Decay::None;
        let gates = if variant.vector() { rows.to_vec() } else { self.gates_shape().to_vec() };
        let values = self.values_shape().iter().product();
        let out = GradientBuffers {
            q: self.buffer(&rows, self.dtype),
            k: self.buffer(&rows, self.dtype),
            a: self.buffer_if(variant.own_a(), &rows, self.dtype),
            b: self.buffer_if(variant.low_rank(), &rows, self.dtype),
            v: match variant.delta() {
                true => self.buffer(&self.values_shape(), self.dtype),
                false => d_v,
            },
            g: self.buffer_if(gated, &gates, F32),
            beta: self.buffer_if(variant.delta(), &self.gates_shape(), F32),
        };
        let blocks = if variant.solves() { values } else { 16 };
        let traces = TracesLaunch::new(
            array(d_o, values),
            array(u, blocks),
            array(&r.handle, blocks),
            array(states, d_states.len()),
            whole(d_states),
        );
        let keys = self.keys_shape().iter().product();
        let of = |handle: &Option<Handle>| match handle {
            Some(handle) => array(handle, rows.iter().product()),
            None => array(&self.x.q, 16),
        };
        let pairs = RowPairsLaunch::new(
            array(&self.x.q, keys),
            array(&self.x.k, keys),
            of(&self.x.a),
            of(&self.x.b),
        );
        let launched = GradientsLaunch::new(
            whole(&out.q),
            whole(&out.k),
            whole(&out.a),
            whole(&out.b),
            whole(&out.v),
            whole(&out.g),
            whole(&out.beta),
        );
        let [g, n, m] = self.plans.widths;
        // Four numbers a vector in what tensor cores write.
        let (tiles, n, m, w) = match plan.engine {
            Engine::Plain => (F32, 1, 1, 1),
            Engine::Mma => (e, n, m, 4),
        };
        // SAFETY: as in `scores`.
        #[allow(unsafe_code)]
        unsafe {
            row_gradients::launch_unchecked::<R>(
                self.client,
                self.cubes(self.chunks()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                pairs,
                traces,
                launched,
                self.sizes(),
                plan,
                [self.dtype, tiles, e],
                [g, n, m, w],
            );
        }
        out
    }
}

struct GradientBuffers {
    q: Buffer,
    k: Buffer,
    a: Buffer,
    b: Buffer,
    v: Buffer,
    g: Buffer,
    beta: Buffer,
}

/// A whole tensor, as an argument.
fn whole<R: Runtime>(buffer: &Buffer) -> ArrayArg<R> {
    array(&buffer.handle, buffer.len())
}

fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: callers pass the length that the memory was made for, or less.
    #[allow(unsafe_code)]
    unsafe {
        ArrayArg::from_raw_parts(handle.clone(), len)
    }
}

/// Whole sequences. `keep` leaves in `saved` what [`backward`] needs.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    x: &Inputs,
    keep: bool,
) -> Result<Forward, Refusal> {
    let call = Call::new(client, variant, dims, dtype, x)?;
    let scores = call.scores();
    let handles: Vec<Handle> = scores.iter().map(|buffer| buffer.handle.clone()).collect();
    let (o, state, kept) = call.walk_forward(&handles, keep);
    let saved = if keep { scores.into_iter().chain(kept).collect() } else { vec![] };
    Ok(Forward { o, state, saved })
}

/// Gradients of every input, from those of the outputs and (zeros if absent) of the last state.
///
/// # Errors
/// As [`forward`].
/// # Panics
/// If `saved` is not what a forward pass of the same variant left.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    given: Given<'_>,
    d_o: &Handle,
    d_state: Option<&Handle>,
) -> Result<Backward, Refusal> {
    let Given { x, saved } = given;
    assert_eq!(saved.len(), SCORES + 2, "tensors that a forward pass saves");
    let call = Call::new(client, variant, dims, dtype, x)?;
    let (scores, kept) = saved.split_at(SCORES);
    let (d_v, d_start, [d_states, r]) = call.walk_backward(scores, d_o, d_state);
    let out = call.gradients(&kept[0], &kept[1], &d_states, &r, d_o, d_v);
    let own_a = variant.own_a();
    Ok(Backward {
        q: out.q,
        k: out.k,
        v: out.v,
        a: own_a.then_some(out.a),
        b: variant.low_rank().then_some(out.b),
        g: (variant.decay != crate::Decay::None).then_some(out.g),
        beta: matches!(variant.transition, Transition::Delta { .. }).then_some(out.beta),
        state: d_start,
    })
}
