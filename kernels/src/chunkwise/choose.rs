//! Plans of an operation on a device, from the device's own report: the engine first, then tiles with which
//! every stage fits into shared memory, then segments, as many as run at once. Nothing is timed.

use crate::SOURCE;
use crate::chunkwise::plan::{GradientPlan, Plan, Schedule, StatePlan};
use crate::chunkwise::task::{Span, Task};
use crate::refusal::{F32, Refusal, check_heads, check_type};
use crate::tile::{Engine, INVERTING_UNITS, SWIZZLED};
use crate::variant::{Dims, Variant};
use cubecl::ir::features::Tma;
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, StorageType};
use cubecl::prelude::*;

/// Widest key.
pub const WIDEST: usize = 256;
/// Widest value: columns of the state never meet, so that values are worked on in tiles of at most 128.
pub const WIDEST_VALUE: usize = 4096;

/// How one operation is cut up on one device. Batch and length decide only which of two widths the tiles
/// of values have, and into how many segments sequences are cut, which is not compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Plans {
    pub intra_chunk: Plan,
    pub state_pass: StatePlan,
    /// The state pass forward of a call that saves nothing and cuts no sequence: where producers do the intra-chunk stage of a
    /// delta rule.
    pub one_launch: Option<StatePlan>,
    /// The local pass forward: where a system is solved, in tiles of its own.
    pub local_pass: StatePlan,
    pub input_gradients: GradientPlan,
    /// Segments of each sequence in the state pass, at most.
    pub segments: usize,
    /// Type of tensors between stages.
    pub between: StorageType,
    /// Numbers of a vector that is loaded from a tensor.
    pub load_width: usize,
}

impl Plans {
    /// Chunks of a segment.
    pub fn segment(&self, dims: Dims) -> usize {
        dims.tokens.div_ceil(self.state_pass.chunk).div_ceil(self.segments)
    }

    /// The same for sequences with lengths of their own.
    fn set_varlen(&mut self) {
        let Self { intra_chunk, state_pass, one_launch, local_pass, input_gradients, .. } = self;
        let passes = [state_pass, local_pass].into_iter().chain(one_launch);
        let stages = [intra_chunk, &mut input_gradients.common].into_iter();
        stages.chain(passes.map(|pass| &mut pass.common)).for_each(|plan| plan.varlen = true);
    }

    /// Plans of a forward pass that saves nothing.
    pub fn of_inference(&self, segments: usize) -> Self {
        let one_launch = self.one_launch.filter(|_| segments == 1);
        Self { state_pass: one_launch.unwrap_or(self.state_pass), ..*self }
    }
}

/// Plans for sequences with lengths of their own, `cu_seqlens`, in one row: no sequence is cut into segments.
pub(crate) fn varlen_plans<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    cu_seqlens: &[usize],
) -> Result<Plans, Refusal> {
    let sequences = cu_seqlens.len().saturating_sub(1);
    let device = client.properties();
    check_sizes(device, dims)?;
    check_row(device, dims, cu_seqlens)?;
    check_type(client, dtype)?;
    // Of so short sequences that none is cut.
    let mut plans = plans_on(device, variant, Dims { batch: sequences, tokens: 1, ..dims }, dtype)?;
    plans.set_varlen();
    Ok(plans)
}

/// The offsets divide one row into sequences of at least one token, of which the device takes so many.
fn check_row(device: &DeviceProperties, dims: Dims, cu_seqlens: &[usize]) -> Result<(), Refusal> {
    let grows = cu_seqlens.windows(2).all(|pair| pair[0] < pair[1]);
    let ends = cu_seqlens.first() == Some(&0) && cu_seqlens.last() == Some(&dims.tokens);
    if !grows || !ends || dims.batch != 1 {
        return Err(Refusal::Lengths { batch: dims.batch, tokens: dims.tokens });
    }
    let sequences = cu_seqlens.len() - 1;
    check_sizes(device, Dims { batch: sequences, tokens: 1, ..dims })?;
    // A chunk may have one token alone.
    let chunks = dims.tokens.div_ceil(16) + sequences;
    let states = chunks * dims.heads * dims.key_width * dims.value_width;
    let most = u32::MAX as usize;
    match states > most {
        true => Err(Refusal::TooLarge { what: "numbers in a tensor", got: states, most }),
        false => Ok(()),
    }
}

/// Launches of a forward pass, and of one with a backward pass.
///
/// # Errors
/// [`Refusal`] where the kernels cannot run.
pub fn launches<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<[usize; 2], Refusal> {
    let plans = plans(client, variant, dims, dtype)?;
    let segments = dims.tokens.div_ceil(plans.state_pass.chunk).div_ceil(plans.segment(dims));
    // The local pass, and the combine of three segments or more.
    let more = match segments {
        1 => 0,
        2 => 1,
        _ => 2,
    };
    let forward = |plans: &Plans| usize::from(plans.state_pass.producers() == 0) + 1 + more;
    Ok([forward(&plans.of_inference(segments)), forward(&plans) + 2 + more])
}

/// The engine that a call would take.
///
/// # Errors
/// [`Refusal`] where the kernels cannot run.
pub fn engine<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<Engine, Refusal> {
    plans(client, variant, dims, dtype).map(|plans| plans.state_pass.engine)
}

const TF32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::TF32));

pub(crate) fn plans<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<Plans, Refusal> {
    let device = client.properties();
    check_sizes(device, dims)?;
    check_type(client, dtype)?;
    plans_on(device, variant, dims, dtype)
}

/// As [`plans`], of a device that is known by its report alone.
pub(super) fn plans_on(
    device: &DeviceProperties,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Result<Plans, Refusal> {
    if dtype != F32
        && has_mma(device, dtype)
        && let Some(plans) = mma(device, variant, dims, dtype)
    {
        return Ok(plans);
    }
    if has_tf32(device)
        && let Some(plans) = tf32(device, variant, dims, dtype)
    {
        return Ok(plans);
    }
    plain(device, variant, dims)
}

/// Buffers that a state pass is given, whatever the variant, and one of sizes: more than any other stage. A
/// browser may have 8 or 10, native drivers have dozens and more.
const BUFFERS: usize = 28;

fn check_sizes(device: &DeviceProperties, dims: Dims) -> Result<(), Refusal> {
    let Dims { batch, tokens, heads, key_width, value_width, .. } = dims;
    for (name, got, most) in [("K", key_width, WIDEST), ("V", value_width, WIDEST_VALUE)] {
        if !(1..=most).contains(&got) {
            return Err(Refusal::Width { name, got, most });
        }
    }
    check_heads(dims)?;
    // Rows, [C, C] matrices and states of chunks; a chunk has 16 to 64 tokens.
    let widest = key_width.max(value_width).max(64);
    let states = tokens.div_ceil(16) * batch * heads * key_width * value_width;
    let numbers = (batch * tokens.next_multiple_of(64) * heads * widest).max(states);
    let most = u32::MAX as usize;
    if numbers > most {
        return Err(Refusal::TooLarge { what: "numbers in a tensor", got: numbers, most });
    }
    let hardware = &device.hardware;
    let most = hardware.max_bindings as usize;
    if BUFFERS > most {
        return Err(Refusal::TooLarge { what: "buffers of a kernel", got: BUFFERS, most });
    }
    let (x, y, _) = hardware.max_cube_count;
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
fn has_mma(device: &DeviceProperties, dtype: StorageType) -> bool {
    has_shape(device, dtype, 16) && device.features.matmul.ldmatrix.contains(&dtype)
}

/// Whether `mma.m16n8k8` of TF32 is there.
fn has_tf32(device: &DeviceProperties) -> bool {
    has_shape(device, TF32, 8)
}

/// Whether `wgmma` is there: of all that have bulk copies of tensors, GPUs after Hopper lack it.
fn has_wgmma(device: &DeviceProperties) -> bool {
    let copies = &device.features.tma;
    copies.contains(Tma::Base) && !copies.contains(Tma::Im2colWide)
}

impl Plan {
    /// A plan of the intra-chunk stage, with products of warpgroups where there are any and keys fill swizzled tiles. With 64
    /// keys little is read: these products take registers, and more cubes a multiprocessor are worth more.
    fn scores_by_warpgroups(self, device: &DeviceProperties) -> Self {
        let whole = self.key_slices() == 1 && self.key_width == 128;
        Self { warpgroups: whole && has_wgmma(device), ..self }
    }

    /// A plan of the intra-chunk stage that fits: of a low rank transition with fewer values at a time where shared memory has no
    /// room for all of a tile beside M and T.
    fn roomy(self, device: &DeviceProperties) -> Option<Self> {
        let most = device.hardware.max_shared_memory_size;
        let narrow = Self { value_slice: part(self.value_width, 64)?, ..self };
        let fits = |plan: &Self| plan.intra_chunk_memory() + slack(plan) <= most;
        Some(if fits(&self) { self } else { narrow })
    }
}

impl StatePlan {
    /// This plan, with products of warpgroups where there are any: 64 columns of values each, and keys that fill swizzled
    /// tiles and for whose state and operands there are registers.
    fn by_warpgroups(self, device: &DeviceProperties) -> Self {
        let staged = matches!(self.schedule, Schedule::Staged { .. });
        let keys = self.key_width / self.split_k;
        let whole = self.value_slice.is_multiple_of(64) && [64, 128].contains(&keys);
        let warpgroups = staged && whole && has_wgmma(device);
        Self { common: Plan { warpgroups, ..self.common }, ..self }
    }

    /// This plan with producers that do the intra-chunk stage of a delta rule, where one cube has all values: two that made the
    /// same T twice were slower than two launches, even on multiprocessors that would have had nothing to do.
    fn in_one_launch(self, device: &DeviceProperties) -> Option<Self> {
        let producers = 8;
        let variant = self.variant;
        let erases_by_k = variant.delta() && !variant.own_a() && !variant.vector();
        let alone = self.value_slices() == 1;
        let units = (self.value_slice / 16 + producers) * 32;
        let plan = Self { schedule: Schedule::Specialized { producers }, ..self }.by_units(units);
        debug_assert_eq!(plan.of_producers().units, INVERTING_UNITS);
        let fits = pass_memory(&plan) <= device.hardware.max_shared_memory_size;
        (erases_by_k && self.warpgroups && self.split_k == 1 && alone && fits).then_some(plan)
    }
}

/// Whether planes are of 32 and multiply 16 x 8 x `k` blocks of this type into f32.
fn has_shape(device: &DeviceProperties, input: StorageType, k: u32) -> bool {
    let hardware = &device.hardware;
    let planes = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    let shape = (input, input, F32, 16, 8, k);
    let mut shapes = device.features.matmul.mma.iter();
    // Their tiles are copied asynchronously, as CUDA alone does.
    planes
        && device.features.copy_async
        && shapes.any(|c| (c.a_type, c.b_type, c.cd_type, c.m, c.n, c.k) == shape)
}

/// The widest part of at most `most` columns, a multiple of 16, that a width falls into.
fn part(width: usize, most: usize) -> Option<usize> {
    (1..=most / 16).rev().map(|n| n * 16).find(|n| width.is_multiple_of(*n))
}

/// Tensor cores: chunks of 64, keys in one piece.
fn mma(
    device: &DeviceProperties,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Option<Plans> {
    let Dims { key_width, value_width, .. } = dims;
    let by_sixteen = key_width.is_multiple_of(16) && value_width.is_multiple_of(16);
    // A vector decay scales rows in f32.
    if !by_sixteen || variant.vector() && !has_tf32(device) {
        return None;
    }
    // The state pass has a cube for each tile of values: wide ones where those fill the device or sequences
    // are cut until they do, because every tile loads all keys; else narrow ones. Below 64 too few
    // units are left to load keys.
    let batch_heads = dims.batch * dims.heads;
    let enough = enough(device);
    let [wide, narrow] = [part(value_width, 128)?, part(value_width, 64)?];
    // M of a segment has K columns and E has V, in tiles of one width. There are many of them, and three
    // cubes of 64 columns a multiprocessor keep more planes busy than one of 128.
    let both = |n: &usize| key_width.is_multiple_of(*n) && value_width.is_multiple_of(*n);
    let shared = [64, 48, 32, 16].into_iter().find(both)?;
    let cut = |value_tile| mma_cut(device, variant, dims, dtype, [value_tile, wide, shared]);
    cut(wide)
        .filter(|plans| plans.segments > 1 || batch_heads * (value_width / wide) >= enough)
        .or_else(|| cut(narrow))
}

/// Cubes that nearly fill a device.
fn enough(device: &DeviceProperties) -> usize {
    let multiprocessors = device.hardware.num_streaming_multiprocessors;
    multiprocessors.map_or(1, |n| n as usize * 3 / 4)
}

/// As [`mma`], for tiles of so many values: in the state pass, elsewhere, in local passes.
fn mma_cut(
    device: &DeviceProperties,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    [value_tile, value_slice, shared]: [usize; 3],
) -> Option<Plans> {
    let Dims { key_width, value_width, .. } = dims;
    let common = Plan {
        source: SOURCE,
        variant,
        varlen: false,
        engine: Engine::Mma,
        rounded: false,
        warpgroups: false,
        key_width,
        value_width,
        chunk: 64,
        key_slice: key_width,
        value_slice,
        units: 256,
        first: 0,
    };
    let (intra_chunk, input_gradients) = match variant.vector() {
        true => {
            let stage = in_f32(common);
            (stage, vector_gradients(device, stage))
        }
        false => {
            // Many units, so that few registers hold each one's share.
            let sliced = Plan { key_slice: part(key_width, 128)?, units: 512, ..common };
            // Few numbers a slice would be many slices, with two barriers each.
            let few = sliced.key_slice < 48;
            let scores =
                Plan { key_slice: if few { key_width } else { sliced.key_slice }, ..common };
            (scores.scores_by_warpgroups(device).roomy(device)?, roomy(device, sliced))
        }
    };
    // Scores of an identity transition need no state: where no other cube of a segment would make them again,
    // and registers of that many planes hold the state, producer planes of the state pass make them.
    let alone = !variant.solves() && !variant.vector() && value_tile == value_width;
    let producers = (alone && key_width <= 128).then_some(if value_tile <= 64 { 8 } else { 4 });
    // One plane's registers would be full of a wide state, and four planes leave tensor cores waiting.
    let split_k = match key_width > 128 && key_width.is_multiple_of(32) && value_tile <= 64 {
        true => 2,
        false => 1,
    };
    let specialized = producers.map(|producers| (Schedule::Specialized { producers }, 1));
    let staged = |stages, split_k| (Schedule::Staged { stages }, split_k);
    let others = [staged(2, split_k), staged(2, 1), staged(1, split_k), staged(1, 1)];
    specialized.into_iter().chain(others).find_map(|(schedule, split_k)| {
        let common = Plan { value_slice: value_tile, ..common };
        let state_pass = StatePlan { common, schedule, split_k, task: Task::PLAIN };
        let units = (value_tile / 16 * split_k + state_pass.producers()) * 32;
        let state_pass = state_pass.by_units(units).by_warpgroups(device);
        // Where no system is solved, a local pass has the state pass's planes, producers for the decay factors.
        let local_pass = match variant.solves() {
            true => {
                state_pass.of_columns(shared).by_units(shared * 2 * split_k).by_warpgroups(device)
            }
            false => state_pass,
        };
        let plans = Plans {
            intra_chunk,
            state_pass,
            one_launch: state_pass.in_one_launch(device),
            local_pass,
            input_gradients,
            segments: 1,
            between: dtype,
            load_width: 8,
        };
        let segments = segments(device, &plans, dims);
        fits(device, &plans).then_some(Plans { segments, ..plans })
    })
}

/// The stages around a state pass where a vector decay weights rows before they are multiplied: on f32 tiles. Planes of 16
/// rows in two columns, so that every plane has a part of every product. Where the state pass rounds to 16 bits, scaled
/// rows and gradients of scores may be rounded to TF32.
fn in_f32(common: Plan) -> Plan {
    Plan {
        engine: Engine::Tf32,
        rounded: common.engine == Engine::Mma,
        key_slice: 32,
        value_slice: 32,
        units: common.chunk * 4,
        ..common
    }
}

/// Input gradients around a state pass of 16 bits, where a vector decay weights rows.
fn vector_gradients(device: &DeviceProperties, stage: Plan) -> GradientPlan {
    // Values and states of 16 bits take half the room, so that twice as many fit.
    let narrow = Plan { value_slice: stage.value_width.min(64), ..stage };
    let wide = Plan { key_slice: 64, units: 2 * narrow.units, ..narrow };
    let [narrow, wide] = [narrow, wide].map(GradientPlan::sliced);
    let most = device.hardware.max_shared_memory_size;
    // Where one narrow cube fills a multiprocessor, a wide one has twice the planes and half the barriers.
    let alone = !fits_twice(gradients_memory(&narrow), most);
    // A wide slice more than half empty would be work for nothing.
    let fills = wide.keys() == narrow.keys() && gradients_memory(&wide) <= most;
    if alone && fills { wide } else { narrow }
}

/// f32 on tensor cores. A plane has 16 rows and half of the columns, so that each has a part of every product.
///
/// Chunks of 64 where a chunk is two products and a mask, else of 32: with more tiles a chunk, fewer cubes fit on
/// a multiprocessor to wait for memory in turn (gated delta rule, 8 x 2048 x 16 x 128: 4.75 ms, in 64 5.21).
fn tf32(
    device: &DeviceProperties,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
) -> Option<Plans> {
    let Dims { key_width, value_width, .. } = dims;
    let narrow = |width: usize| if width <= 32 { 32 } else { 64 };
    let light = !variant.solves() && !variant.vector();
    let chunk = if light { 64 } else { 32 };
    let common = Plan {
        source: SOURCE,
        variant,
        varlen: false,
        engine: Engine::Tf32,
        rounded: false,
        warpgroups: false,
        key_width,
        value_width,
        chunk,
        key_slice: narrow(key_width),
        value_slice: narrow(value_width),
        units: chunk * 4,
        first: 0,
    };
    let outer = if variant.vector() { in_f32(common) } else { common };
    let units = if light && (33..=64).contains(&key_width) { 512 } else { outer.units };
    let gradients = Plan { units, ..outer };
    let passes = match variant.vector() {
        true => Vec::new(),
        false if light => wide_pass(device, common, dims),
        false => staged_passes(device, common, dtype),
    };
    let sliced = [64, 32].into_iter().filter(|n| *n <= common.value_slice);
    let sliced = sliced.map(|value_slice| directly(Plan { value_slice, ..common }));
    passes.into_iter().chain(sliced).find_map(|state_pass| {
        let plans = f32_plans(outer, state_pass, gradients);
        fits(device, &plans).then(|| Plans { segments: segments(device, &plans, dims), ..plans })
    })
}

/// State passes of f32 whose cubes own 128 columns of values, so that every slice of keys is loaded once for them: where
/// those fill the device.
fn wide_pass(device: &DeviceProperties, common: Plan, dims: Dims) -> Vec<StatePlan> {
    let Dims { batch, heads, key_width, value_width, .. } = dims;
    let fills = batch * heads * (value_width / 128) >= enough(device);
    let wide = Plan { key_slice: key_width, value_slice: 128, units: 512, ..common };
    // Of other widths registers spill, or planes have no rows of the state.
    let fits = key_width == 128 && value_width.is_multiple_of(128);
    (fills && fits).then(|| directly(wide)).into_iter().collect()
}

/// State passes of f32 whose tiles are copied asynchronously, two cubes a multiprocessor, best first: two pipeline stages,
/// or one and so one wait a chunk. For delta rules that erase by k, with which that was measured.
fn staged_passes(device: &DeviceProperties, common: Plan, dtype: StorageType) -> Vec<StatePlan> {
    let Plan { key_width, value_width, value_slice, .. } = common;
    let whole = key_width.is_multiple_of(16) && value_width.is_multiple_of(value_slice);
    let measured = common.variant.delta() && !common.variant.own_a();
    if dtype != F32 || key_width > 128 || !whole || !measured {
        return Vec::new();
    }
    let most = device.hardware.max_shared_memory_size;
    let staged = |(stages, units)| StatePlan {
        schedule: Schedule::Staged { stages },
        ..directly(Plan { key_slice: key_width, units, ..common })
    };
    let twice = |pass: &StatePlan| fits_twice(state_pass_memory(pass), most);
    [(2, 256), (1, 128)].map(staged).into_iter().filter(twice).collect()
}

/// A state pass whose tiles are filled slice by slice.
fn directly(common: Plan) -> StatePlan {
    StatePlan { common, schedule: Schedule::Direct, split_k: 1, task: Task::PLAIN }
}

/// Plans of f32 engines.
fn f32_plans(intra_chunk: Plan, state_pass: StatePlan, gradients: Plan) -> Plans {
    let Plan { key_width, value_width, .. } = gradients;
    let whole = key_width.is_multiple_of(4) && value_width.is_multiple_of(4);
    Plans {
        intra_chunk,
        state_pass,
        one_launch: None,
        local_pass: state_pass,
        input_gradients: GradientPlan::sliced(gradients),
        segments: 1,
        between: F32,
        load_width: if whole { 4 } else { 1 },
    }
}

/// f32 arithmetic, in chunks as long as shared memory allows.
fn plain(device: &DeviceProperties, variant: Variant, dims: Dims) -> Result<Plans, Refusal> {
    let Dims { key_width, value_width, .. } = dims;
    let narrow = |width: usize| if width <= 16 { 16 } else { 32 };
    let hardware = &device.hardware;
    for chunk in [32, 16] {
        let common = Plan {
            source: SOURCE,
            variant,
            varlen: false,
            engine: Engine::Plain,
            rounded: false,
            warpgroups: false,
            key_width,
            value_width,
            chunk,
            key_slice: narrow(key_width),
            value_slice: narrow(value_width),
            units: 256,
            first: 0,
        };
        for value_slice in [32, 16] {
            let state_pass = directly(Plan { value_slice, ..common });
            let plans = f32_plans(common, state_pass, common);
            let useful = value_slice == 16 || value_width > 16;
            if useful && fits(device, &plans) {
                return Ok(Plans { segments: segments(device, &plans, dims), ..plans });
            }
        }
    }
    Err(Refusal::Device {
        shared_memory: hardware.max_shared_memory_size,
        units: hardware.max_units_per_cube,
    })
}

fn fits(device: &DeviceProperties, plans: &Plans) -> bool {
    let hardware = &device.hardware;
    let most = hardware.max_shared_memory_size;
    let units = hardware.max_units_per_cube as usize;
    [
        (
            plans.intra_chunk.units,
            plans.intra_chunk.intra_chunk_memory() + slack(&plans.intra_chunk),
        ),
        (plans.state_pass.units, state_pass_memory(&plans.state_pass)),
        (plans.input_gradients.units, gradients_memory(&plans.input_gradients)),
    ]
    .into_iter()
    .all(|(of_cube, bytes)| bytes <= most && of_cube <= units)
}

/// Units of state passes that a multiprocessor holds: 170 of 65536 registers each.
const HELD: usize = 384;
/// The same of f32 that is copied ahead: 128 registers each.
const HELD_AHEAD: usize = 512;
/// Shared memory that a cube takes besides its own.
const OVERHEAD: usize = 1024;
/// A segment's fewest chunks: below, its start is a good part of it.
const SHORTEST: usize = 4;

/// Whether a multiprocessor, whose cubes may have `most` bytes, holds two of so many.
fn fits_twice(bytes: usize, most: usize) -> bool {
    2 * (bytes + OVERHEAD) <= most + OVERHEAD
}

/// Segments of a sequence: as many as run at once, as far as the device is known to hold their cubes and those
/// of the local pass. A local pass costs about as much as a state pass where a system is solved, and less than
/// half of that elsewhere, so that few segments would gain nothing.
fn segments(device: &DeviceProperties, plans: &Plans, dims: Dims) -> usize {
    let hardware = &device.hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(0) as usize;
    let held = |plan: &StatePlan, bytes: usize| {
        let memory = hardware.max_shared_memory_size + OVERHEAD;
        let most = memory / (bytes + OVERHEAD);
        let units = if plan.in_registers() || plan.schedule == Schedule::Direct {
            HELD
        } else {
            HELD_AHEAD
        };
        multiprocessors * most.min(units / plan.units).max(1)
    };
    let (state_pass, local_pass) = (&plans.state_pass, &plans.local_pass);
    let local = Task { span: Span::Local, ..local_pass.task };
    let held_locally = held(local_pass, pass_memory(&StatePlan { task: local, ..*local_pass }));
    let held = held(state_pass, state_pass_memory(state_pass));
    let solves = state_pass.variant.solves();
    let batch_heads = dims.batch * dims.heads;
    let at_once = |n: &usize| {
        let states = local_pass.value_slices() * (n - 1);
        let transitions = if solves { local_pass.key_tiles() * (n - 2) } else { 0 };
        batch_heads * state_pass.value_slices() * n <= held
            && batch_heads * (states + transitions) <= held_locally
    };
    let most = (dims.tokens.div_ceil(state_pass.chunk) / SHORTEST).min(held);
    let fewest = if solves { 3 } else { 2 };
    (fewest..=most).rev().find(at_once).unwrap_or(1)
}

/// Bytes that a cube takes for alignment: small tiles may lie between those that are aligned to more.
fn slack(plan: &Plan) -> usize {
    if plan.warpgroups { 4 * SWIZZLED } else { 256 }
}

/// Of a state pass in either direction.
fn state_pass_memory(plan: &StatePlan) -> usize {
    let task = |backward| Task { backward, ..plan.task };
    let of = |task| pass_memory(&StatePlan { task, ..*plan });
    of(task(false)).max(of(task(true)))
}

/// Of one launch of the state pass.
fn pass_memory(plan: &StatePlan) -> usize {
    let slack = match plan.schedule {
        Schedule::Direct => 0,
        _ => slack(plan),
    };
    plan.tile_memory() + plan.produced_memory() + plan.state_memory() + slack
}

/// Of the input gradients.
fn gradients_memory(plan: &GradientPlan) -> usize {
    plan.gradients_memory() + slack(plan)
}

/// Input gradients of `Mma`: all values of a chunk in shared memory at once, and the widest slice of keys with which two
/// cubes share a multiprocessor and cover each other's loads; else the widest with which one fits; else slice by slice of
/// both. Timed on an H200 with K = V of 64, 128 and 256.
fn roomy(device: &DeviceProperties, sliced: Plan) -> GradientPlan {
    let most = device.hardware.max_shared_memory_size;
    let plan = |key_slice, wide, one_state| {
        // In narrow slices more planes would have no work.
        let units = if key_slice < 64 { 256 } else { wide };
        let common = Plan { key_slice, units, value_slice: sliced.value_width, ..sliced };
        let plan = GradientPlan { whole: true, ..GradientPlan::sliced(common) };
        let plan = plan.by_warpgroups(device);
        GradientPlan { one_state: one_state && plan.warpgroups, ..plan }
    };
    let slices = [128, 64, 32].into_iter().filter_map(|widest| part(sliced.key_width, widest));
    let slices = slices.filter(|slice| *slice >= 32.min(sliced.key_width));
    let small = |key_slice| [false, true].map(|one_state| plan(key_slice, 256, one_state));
    let twice = |plan: &GradientPlan| fits_twice(gradients_memory(plan), most);
    let mut large = slices.clone().map(|key_slice| plan(key_slice, 512, false));
    slices
        .flat_map(small)
        .find(twice)
        .or_else(|| large.find(|plan| gradients_memory(plan) <= most))
        .unwrap_or(GradientPlan::sliced(sliced))
}

impl GradientPlan {
    /// A plan whose tiles are filled slice by slice.
    fn sliced(common: Plan) -> Self {
        Self { common, whole: false, one_state: false }
    }

    /// This plan, with products of warpgroups where there are any and rows fill swizzled tiles.
    fn by_warpgroups(self, device: &DeviceProperties) -> Self {
        let fills =
            [64, 128].contains(&self.key_slice) && [64, 128, 256].contains(&self.value_width);
        let warpgroups = fills && has_wgmma(device);
        Self { common: Plan { warpgroups, ..self.common }, ..self }
    }
}
