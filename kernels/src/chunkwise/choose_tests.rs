//! Plans of an H200, from what its driver reports: no GPU is there.

use crate::chunkwise::choose::plans_on;
use crate::chunkwise::plan::Schedule;
use crate::refusal::F32;
use crate::tile::Engine;
use crate::variant::{Decay, Dims, Read, Transition, Variant};
use cubecl::ir::features::{Features, MmaConfig, Tma};
use cubecl::ir::{
    DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, StorageType,
    VectorSize,
};
use cubecl::profile::TimingMethod;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const TF32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::TF32));

const GATED_DELTA: Variant = Variant {
    decay: Decay::Scalar,
    transition: Transition::Delta { erase: false },
    read: Read::After,
};
const DELTA: Variant = Variant { decay: Decay::None, ..GATED_DELTA };
const SCALAR_DECAY: Variant = Variant { transition: Transition::Identity, ..GATED_DELTA };

fn h200() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 227 * 1024,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 1024),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let memory = MemoryDeviceProperties { max_page_size: 1 << 34, alignment: 256 };
    let mut features = Features::default();
    for (input, k) in [(BF16, 16), (TF32, 8)] {
        let shape = MmaConfig { a_type: input, b_type: input, cd_type: F32, m: 16, n: 8, k };
        features.matmul.mma.insert(shape);
    }
    features.matmul.ldmatrix.insert(BF16);
    features.copy_async = true;
    features.tma.insert(Tma::Base);
    DeviceProperties::new(features, memory, hardware, TimingMethod::System)
}

/// Sequences of 2048 tokens.
fn dims(batch: usize, heads: usize, [key_width, value_width]: [usize; 2]) -> Dims {
    Dims { batch, tokens: 2048, key_heads: heads, heads, key_width, value_width }
}

/// Value tile, planes of split-K and schedule of a state pass in bf16.
#[track_caller]
fn state_pass(variant: Variant, dims: Dims) -> (usize, usize, Schedule) {
    let plan = plans_on(&h200(), variant, dims, BF16).expect("an H200 takes it").state_pass;
    assert_eq!(plan.engine, Engine::Mma);
    (plan.value_slice, plan.split_k, plan.schedule)
}

#[test]
fn wide_keys_are_split_in_tiles_of_64_and_not_in_wider_ones() {
    let got = |batch, widths| state_pass(GATED_DELTA, dims(batch, 8, widths));
    let staged = Schedule::Staged { stages: 2 };
    assert_eq!(got(16, [128, 128]), (128, 1, staged));
    assert_eq!(got(8, [256, 64]), (64, 2, staged));
    assert_eq!(got(8, [256, 256]), (128, 1, staged));
    // Fewer heads than fill the device: narrow tiles.
    assert_eq!(got(8, [128, 128]), (64, 1, staged));
    assert_eq!(got(4, [256, 256]), (64, 2, staged));
}

#[test]
fn scores_without_a_solve_are_made_by_producer_planes() {
    let got = |widths| state_pass(SCALAR_DECAY, dims(8, 16, widths));
    assert_eq!(got([64, 64]), (64, 1, Schedule::Specialized { producers: 8 }));
    assert_eq!(got([128, 128]), (128, 1, Schedule::Specialized { producers: 4 }));
    let (_, _, wide) = got([256, 128]);
    assert!(matches!(wide, Schedule::Staged { .. }), "{wide:?}: the state needs the registers");
}

#[test]
fn a_delta_rule_that_saves_nothing_is_one_launch_on_hopper_where_a_cube_has_all_values() {
    let of = |device: &DeviceProperties, variant, dims| {
        let plans = plans_on(device, variant, dims, BF16).expect("it fits");
        let own = plans.of_inference(plans.segments).state_pass;
        own.inverts_ahead().then_some((own.value_slice, own.units))
    };
    let got = |variant, dims| of(&h200(), variant, dims);
    // Eight producer planes, and four consumers for each 64 columns of values.
    assert_eq!(got(GATED_DELTA, dims(8, 16, [128, 128])), Some((128, 512)));
    assert_eq!(got(DELTA, dims(32, 4, [64, 64])), Some((64, 384)));
    assert_eq!(got(DELTA, dims(64, 4, [64, 128])), Some((128, 512)));
    // Values in two tiles: few heads, or many values.
    assert_eq!(got(DELTA, dims(8, 8, [128, 128])), None);
    assert_eq!(got(DELTA, dims(16, 16, [128, 256])), None);
    // Segments, a state for which registers do not suffice, another way to erase, another GPU.
    let long = Dims { tokens: 16384, ..dims(1, 16, [128, 128]) };
    assert_eq!(got(GATED_DELTA, long), None);
    assert_eq!(got(GATED_DELTA, dims(16, 8, [256, 128])), None);
    let erase = Variant { transition: Transition::Delta { erase: true }, ..GATED_DELTA };
    assert_eq!(got(erase, dims(8, 16, [128, 128])), None);
    let mut after = h200();
    after.features.tma.insert(Tma::Im2colWide);
    assert_eq!(of(&after, GATED_DELTA, dims(8, 16, [128, 128])), None);
}

#[test]
fn warpgroups_multiply_on_hopper_alone_and_64_columns_of_values_each() {
    let of = |device: &DeviceProperties, variant, dims| {
        let plans = plans_on(device, variant, dims, BF16).expect("it fits");
        [plans.intra_chunk, *plans.state_pass, *plans.local_pass].map(|plan| plan.warpgroups)
    };
    let got = |device: &DeviceProperties, variant, widths| of(device, variant, dims(8, 16, widths));
    let hopper = h200();
    assert_eq!(got(&hopper, GATED_DELTA, [128, 128]), [true; 3]);
    assert_eq!(
        got(&hopper, GATED_DELTA, [64, 64]),
        [false, true, true],
        "more cubes a multiprocessor"
    );
    assert_eq!(got(&hopper, GATED_DELTA, [96, 64]), [false; 3], "tiles of keys are not whole");
    assert_eq!(got(&hopper, GATED_DELTA, [64, 96]), [false; 3]);
    assert_eq!(got(&hopper, GATED_DELTA, [256, 256]), [false; 3], "registers");
    let few = dims(4, 8, [256, 256]);
    assert_eq!(of(&hopper, GATED_DELTA, few), [false, true, true], "two planes share the keys");
    assert_eq!(
        got(&hopper, SCALAR_DECAY, [128, 128]),
        [true, false, false],
        "producers read by `ldmatrix`"
    );
    let mut after = h200();
    after.features.tma.insert(Tma::Im2colWide);
    assert_eq!(got(&after, GATED_DELTA, [128, 128]), [false; 3]);
}

#[test]
fn f32_takes_tf32_in_chunks_by_what_is_solved() {
    let chunk = |variant| {
        let plan = plans_on(&h200(), variant, dims(8, 16, [128, 128]), F32).expect("it fits");
        (plan.state_pass.engine, plan.state_pass.chunk)
    };
    assert_eq!(chunk(SCALAR_DECAY), (Engine::Tf32, 64));
    assert_eq!(chunk(GATED_DELTA), (Engine::Tf32, 32));
}

#[test]
fn factors_are_rounded_around_a_state_pass_of_16_bits_alone() {
    let vector_delta = Variant { decay: Decay::Vector, ..GATED_DELTA };
    let stages = |dtype| {
        let plans = plans_on(&h200(), vector_delta, dims(8, 16, [128, 128]), dtype);
        let plans = plans.expect("an H200 takes it");
        [plans.intra_chunk, *plans.input_gradients].map(|plan| (plan.engine, plan.rounded))
    };
    assert_eq!(stages(BF16), [(Engine::Tf32, true); 2]);
    assert_eq!(stages(F32), [(Engine::Tf32, false); 2]);
}

#[test]
fn f32_loads_once_for_many_values_or_copies_ahead() {
    let got = |variant, dims| {
        let plan = plans_on(&h200(), variant, dims, F32).expect("it fits").state_pass;
        (plan.value_slice, plan.units, plan.schedule)
    };
    let staged = |stages| Schedule::Staged { stages };
    assert_eq!(got(GATED_DELTA, dims(8, 16, [128, 128])), (64, 128, staged(1)));
    assert_eq!(got(GATED_DELTA, dims(64, 2, [64, 64])), (64, 256, staged(2)));
    assert_eq!(got(GATED_DELTA, dims(8, 16, [256, 256])), (64, 128, Schedule::Direct));
    assert_eq!(got(GATED_DELTA, dims(8, 16, [128, 80])), (64, 128, Schedule::Direct));
    assert_eq!(got(SCALAR_DECAY, dims(8, 16, [128, 128])), (128, 512, Schedule::Direct));
    assert_eq!(got(SCALAR_DECAY, dims(1, 16, [128, 128])), (64, 256, Schedule::Direct));
}

#[test]
fn input_gradients_hold_all_values_where_there_is_room() {
    let got = |device: &DeviceProperties, variant, widths| {
        let plans = plans_on(device, variant, dims(8, 8, widths), BF16);
        let plan = plans.expect("there is room for it").input_gradients;
        (plan.whole, plan.key_slice, plan.units, plan.warpgroups, plan.one_state)
    };
    let hopper = |variant, widths| got(&h200(), variant, widths);
    // Two cubes a multiprocessor: all keys, or a slice, or one with a tile for both states.
    assert_eq!(hopper(GATED_DELTA, [64, 64]), (true, 64, 256, true, false));
    assert_eq!(hopper(SCALAR_DECAY, [128, 128]), (true, 64, 256, true, false));
    assert_eq!(hopper(GATED_DELTA, [128, 128]), (true, 64, 256, true, true));
    // One.
    let erase = Variant { transition: Transition::Delta { erase: true }, ..GATED_DELTA };
    assert_eq!(hopper(erase, [128, 128]), (true, 128, 512, true, false));
    assert_eq!(hopper(GATED_DELTA, [256, 256]), (true, 64, 512, true, false));
    assert_eq!(hopper(GATED_DELTA, [256, 512]), (false, 128, 512, false, false));
    // Rows that do not fill swizzled tiles, and a GPU without warpgroups' products.
    assert_eq!(hopper(GATED_DELTA, [96, 64]), (true, 48, 256, false, false));
    let mut after = h200();
    after.features.tma.insert(Tma::Im2colWide);
    assert_eq!(got(&after, GATED_DELTA, [128, 128]), (true, 32, 256, false, false));
}

#[test]
fn input_gradients_of_a_vector_decay_are_wide_where_a_multiprocessor_has_one_cube() {
    let got = |device: &DeviceProperties, transition, widths| {
        let variant = Variant { decay: Decay::Vector, transition, ..GATED_DELTA };
        let plans = plans_on(device, variant, dims(8, 16, widths), BF16);
        let plan = plans.expect("there is room for it").input_gradients;
        (plan.engine, plan.key_slice, plan.units)
    };
    let hopper = |transition, widths| got(&h200(), transition, widths);
    let delta = Transition::Delta { erase: false };
    let tf32 = |key_slice, units| (Engine::Tf32, key_slice, units);
    assert_eq!(hopper(Transition::Identity, [128, 128]), tf32(32, 256), "two cubes");
    assert_eq!(hopper(delta, [128, 128]), tf32(64, 512));
    assert_eq!(hopper(delta, [64, 64]), tf32(64, 512));
    assert_eq!(hopper(delta, [32, 64]), tf32(32, 256), "half of a wide slice would be empty");
    assert_eq!(hopper(delta, [96, 64]), tf32(32, 256), "so would that of the last one");
    assert_eq!(hopper(delta, [48, 64]), tf32(64, 512));
    assert_eq!(hopper(Transition::LowRank, [128, 128]), tf32(64, 512));
    // An A100 has room for the narrow one.
    let mut smaller = h200();
    smaller.hardware.max_shared_memory_size = 163 * 1024;
    assert_eq!(got(&smaller, Transition::LowRank, [128, 128]), tf32(32, 256));
}
