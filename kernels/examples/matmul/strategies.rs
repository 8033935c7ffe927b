//! How it is multiplied: cubek's kernels with its own settings, and with forced blueprints.

use crate::cases::{Case, Types, globals, storage};
use cubecl::ir::{AddressType, FloatKind};
use cubecl::zspace::Shape;
use cubek::matmul::components::global::{InputLoadFlow, LoadFlows};
use cubek::matmul::components::stage::PartitionBuffering;
use cubek::matmul::components::tile::TileMatmulKind;
use cubek::matmul::definition::{MatmulProblem, TilingBlueprint, TilingScheme};
use cubek::matmul::launch::Strategy;
use cubek::matmul::routines::double_buffering::DoubleBufferingArgs;
use cubek::matmul::routines::double_unit::DoubleUnitSelectionArgs;
use cubek::matmul::routines::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::routines::simple::SimpleArgs;
use cubek::matmul::routines::simple_unit::SimpleUnitSelectionArgs;
use cubek::matmul::routines::{BlueprintStrategy, TileSizeSelection};
use cubek::std::cube_count::{CubeCountStrategy, GlobalOrder, HypercubeBlueprint};
use cubek::std::stage::SwizzleMode;
use cubek::std::{MatrixLayout, PartitionSize, StageSize, SwizzleModes, TileSize};

/// Which of cubek's kernels loads the tiles of a forced blueprint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reader {
    SimpleCyclic,
    SimpleAsyncCyclic,
    SimpleTma,
    DoubleCyclic,
    DoubleAsyncCyclic,
    DoubleAsyncStrided,
    DoubleTma,
    SpecializedCyclic,
    SpecializedStrided,
    SpecializedTma,
    Ordered,
}

/// Sizes of a forced blueprint: of an instruction in numbers, of a plane's share in instructions, and of a
/// cube's in planes.
#[derive(Debug, Clone, Copy)]
pub struct Tiling {
    kind: TileMatmulKind,
    tile: [u32; 3],
    partition: [u32; 3],
    planes: [u32; 2],
}

impl Tiling {
    fn sizes(&self) -> [u32; 3] {
        let planes = [self.planes[0], self.planes[1], 1];
        [0, 1, 2].map(|axis| self.tile[axis] * self.partition[axis] * planes[axis])
    }

    fn name(&self) -> String {
        let [m, n, k] = self.sizes();
        let kind = if self.kind == TileMatmulKind::Cmma { "cmma" } else { "mma" };
        format!("{kind}_{m}x{n}x{k}_p{}x{}", self.planes[0], self.planes[1])
    }

    fn scheme(&self) -> TilingScheme {
        let [[tm, tn, tk], [pm, pn, pk]] = [self.tile, self.partition];
        TilingScheme::builder()
            .with_tile_size(TileSize::new(tm, tn, tk))
            .with_partition_size(PartitionSize::new(pm, pn, pk))
            .with_stage_size(StageSize::new(self.planes[0], self.planes[1], 1))
            .build()
            .expect("all sizes are given")
    }
}

/// Swizzles with which neither side's shared memory has bank conflicts, as far as the reader takes them.
fn swizzles(reader: Reader, tiling: &Tiling, problem: &MatmulProblem, size: u32) -> SwizzleModes {
    if tiling.kind == TileMatmulKind::Cmma {
        return SwizzleModes::default();
    }
    let [m, n, k] = match reader {
        // These keep whole rows of a stage together, the others whole rows of a tile.
        Reader::DoubleAsyncStrided
        | Reader::SpecializedStrided
        | Reader::SimpleTma
        | Reader::DoubleTma
        | Reader::SpecializedTma => tiling.sizes(),
        _ => tiling.tile,
    };
    let tma = matches!(reader, Reader::SimpleTma | Reader::DoubleTma | Reader::SpecializedTma);
    let mode = |row: u32| match row * size {
        32 => SwizzleMode::B32,
        64 => SwizzleMode::B64,
        128 => SwizzleMode::B128,
        // TMA swizzles only rows that are exactly as long as the pattern.
        bytes if bytes > 128 && !tma => SwizzleMode::B128,
        _ => SwizzleMode::None,
    };
    let row_major = |layout| layout == MatrixLayout::RowMajor;
    SwizzleModes {
        lhs: mode(if row_major(problem.lhs_layout) { k } else { m }),
        rhs: mode(if row_major(problem.rhs_layout) { n } else { k }),
        ..SwizzleModes::default()
    }
}

fn blueprint(reader: Reader, tiling: &Tiling, case: &Case, types: &Types) -> TilingBlueprint {
    let layout =
        |transposed| if transposed { MatrixLayout::ColMajor } else { MatrixLayout::RowMajor };
    let batches = || Shape::from(if case.batch > 1 { vec![case.batch] } else { vec![] });
    let problem = MatmulProblem::from_parameters(
        case.m,
        case.n,
        case.k,
        batches(),
        batches(),
        layout(case.lhs_transposed),
        layout(case.rhs_transposed),
        MatrixLayout::RowMajor,
        None,
        None,
        globals(types.forced, types.output),
        AddressType::U32,
    );
    let hypercube = HypercubeBlueprint::builder()
        .global_order(GlobalOrder::SwizzleRow(4))
        .cube_count_strategy(CubeCountStrategy::Flattened)
        .build();
    let specialized = matches!(
        reader,
        Reader::SpecializedCyclic | Reader::SpecializedStrided | Reader::SpecializedTma
    );
    let flow = if specialized { InputLoadFlow::LoadOnly } else { InputLoadFlow::MainOnly };
    let size = storage(types.input).size() as u32;
    let builder = TilingBlueprint::builder(tiling.kind, tiling.scheme(), 32, &problem)
        .partition_buffering(PartitionBuffering::Single)
        .hypercube_blueprint(hypercube)
        .shared_swizzle(swizzles(reader, tiling, &problem, size))
        .load_specialization_config(LoadFlows { lhs: flow, rhs: flow });
    let mut blueprint = builder.build();
    // Kernels with two stages load an even number of them; cubek checks bounds as if for one at a time.
    let simple =
        matches!(reader, Reader::SimpleCyclic | Reader::SimpleAsyncCyclic | Reader::SimpleTma);
    let depth = tiling.sizes()[2] as usize * if simple { 1 } else { 2 };
    blueprint.check_k_bounds = !case.k.is_multiple_of(depth);
    blueprint
}

fn forced(reader: Reader, blueprint: TilingBlueprint) -> Strategy {
    // Cmma and Mma are one and the same where a blueprint is forced: it says which.
    match reader {
        Reader::SimpleCyclic => Strategy::SimpleCyclicMma(BlueprintStrategy::Forced(blueprint)),
        Reader::SimpleAsyncCyclic => {
            Strategy::SimpleAsyncCyclicMma(BlueprintStrategy::Forced(blueprint))
        }
        Reader::SimpleTma => Strategy::SimpleTmaMma(BlueprintStrategy::Forced(blueprint)),
        Reader::DoubleCyclic => Strategy::DoubleCyclicMma(BlueprintStrategy::Forced(blueprint)),
        Reader::DoubleAsyncCyclic => {
            Strategy::DoubleAsyncCyclicMma(BlueprintStrategy::Forced(blueprint))
        }
        Reader::DoubleAsyncStrided => {
            Strategy::DoubleAsyncStridedMma(BlueprintStrategy::Forced(blueprint))
        }
        Reader::DoubleTma => Strategy::DoubleTmaMma(BlueprintStrategy::Forced(blueprint)),
        Reader::SpecializedCyclic => {
            Strategy::SpecializedCyclicMma(BlueprintStrategy::Forced(blueprint))
        }
        Reader::SpecializedStrided => {
            Strategy::SpecializedStridedMma(BlueprintStrategy::Forced(blueprint))
        }
        Reader::SpecializedTma => Strategy::SpecializedTmaMma(BlueprintStrategy::Forced(blueprint)),
        Reader::Ordered => Strategy::OrderedDoubleMma(BlueprintStrategy::Forced(blueprint)),
    }
}

/// How a job finds its strategy.
pub enum Choice {
    Inferred(Strategy),
    Forced(Reader, Tiling),
}

impl Choice {
    /// The strategy, and what it calls the inputs.
    pub fn strategy(&self, case: &Case, types: &Types) -> (Strategy, FloatKind) {
        match self {
            Self::Inferred(strategy) => (strategy.clone(), types.input),
            Self::Forced(reader, tiling) => {
                (forced(*reader, blueprint(*reader, tiling, case, types)), types.forced)
            }
        }
    }
}

/// Cubek's own settings for some of its kernels.
macro_rules! inferred {
    ($($variant:ident),*) => {
        vec![$((
            stringify!($variant).to_string(),
            Choice::Inferred(Strategy::$variant(Default::default())),
        )),*]
    };
}

/// A strategy and its name.
pub type Named = (String, Choice);

fn auto() -> Named {
    ("Auto".to_string(), Choice::Inferred(Strategy::Auto))
}

fn inferred_on_tensor_cores(types: &Types, full: bool) -> Vec<Named> {
    let mut all = vec![auto()];
    all.extend(inferred![SimpleCyclicMma, DoubleCyclicMma, DoubleTmaMma, SpecializedTmaMma]);
    if types.input == FloatKind::F32 {
        all.extend(inferred![DoubleCyclicCmma, DoubleTmaCmma, SpecializedTmaCmma]);
    }
    let ordered = OrderedSelectionArgs {
        row_count: Some(8),
        rows_per_plane: Some(2),
        partition_k: Some(2),
        ..Default::default()
    };
    let ordered = |make: fn(_) -> Strategy| Choice::Inferred(make(ordered.clone()));
    all.push((
        "OrderedDoubleCmma_8_2_2".to_string(),
        ordered(|args| Strategy::OrderedDoubleCmma(BlueprintStrategy::Inferred(args))),
    ));
    if full {
        all.push((
            "OrderedDoubleMma_8_2_2".to_string(),
            ordered(|args| Strategy::OrderedDoubleMma(BlueprintStrategy::Inferred(args))),
        ));
        all.extend(more_inferred());
    }
    all
}

fn more_inferred() -> Vec<Named> {
    let rows = || SimpleArgs { multi_rows: true, ..Default::default() };
    let loaders = || DoubleBufferingArgs { specialized: true, ..Default::default() };
    let mut all = vec![
        (
            "SimpleCyclicMma_multi_rows".to_string(),
            Choice::Inferred(Strategy::SimpleCyclicMma(BlueprintStrategy::Inferred(rows()))),
        ),
        (
            "SimpleCyclicCmma_multi_rows".to_string(),
            Choice::Inferred(Strategy::SimpleCyclicCmma(BlueprintStrategy::Inferred(rows()))),
        ),
        (
            "DoubleCyclicMma_specialized".to_string(),
            Choice::Inferred(Strategy::DoubleCyclicMma(BlueprintStrategy::Inferred(loaders()))),
        ),
    ];
    all.extend(inferred![
        SimpleStridedMma,
        SimpleTilewiseMma,
        SimpleAsyncCyclicMma,
        SimpleAsyncStridedMma,
        SimpleTmaMma,
        DoubleTilewiseMma,
        DoubleHybridMma,
        DoubleAsyncCyclicMma,
        DoubleAsyncStridedMma,
        SpecializedCyclicMma,
        SpecializedStridedMma,
        SimpleStridedCmma,
        SimpleTilewiseCmma,
        SimpleTmaCmma,
        DoubleCyclicCmma,
        DoubleTilewiseCmma,
        DoubleAsyncCyclicCmma,
        DoubleTmaCmma,
        SpecializedCyclicCmma,
        SpecializedTmaCmma
    ]);
    all
}

/// Forced blueprints. `[m, n, k]` of a plane in instructions, `[m, n]` planes; of a few sizes every reader.
fn forced_on_tensor_cores(case: &Case, types: &Types, full: bool) -> Vec<Named> {
    use Reader::*;
    let half = types.input == FloatKind::BF16;
    let mma = |partition: [u32; 3], planes| {
        let tile = if half { [16, 8, 16] } else { [16, 8, 8] };
        Tiling { kind: TileMatmulKind::Mma, tile, partition, planes }
    };
    let cmma = |partition: [u32; 3], planes| {
        let tile = if half { [16, 16, 16] } else { [16, 16, 8] };
        Tiling { kind: TileMatmulKind::Cmma, tile, partition, planes }
    };
    // Stages are as deep in bytes whatever the type: 64 numbers of two bytes.
    let square = mma([4, 8, 4], [2, 2]);
    let shallow = mma([4, 8, 2], [2, 2]);
    let eight = mma([4, 4, 4], [2, 4]);
    let wide = mma([4, 8, 2], [2, 4]);
    let odd = mma([2, 11, 4], [4, 2]);
    let narrow = mma([2, 8, 4], [4, 1]);
    let small = mma([2, 4, 4], [2, 2]);
    let mut all = vec![
        (DoubleAsyncCyclic, square),
        (DoubleAsyncCyclic, shallow),
        (DoubleAsyncCyclic, eight),
        (DoubleCyclic, shallow),
        (DoubleCyclic, eight),
        (SimpleCyclic, square),
        (SimpleCyclic, eight),
        (SimpleCyclic, small),
        (DoubleAsyncCyclic, small),
        (SpecializedCyclic, square),
        (DoubleAsyncStrided, square),
        (SimpleAsyncCyclic, square),
    ];
    if case.n.is_multiple_of(176) || case.n == 516 {
        all.extend([(SimpleCyclic, odd), (DoubleCyclic, odd), (DoubleAsyncCyclic, odd)]);
    }
    if case.m.min(case.n) >= 2048 || case.n >= 8192 || full {
        all.extend([(DoubleAsyncCyclic, wide), (SpecializedCyclic, wide), (DoubleCyclic, wide)]);
    }
    // TMA swizzles a stage whose rows, along what is contiguous, are 128 bytes.
    let for_tma = match (case.rhs_transposed, half) {
        (true, _) => square,
        (false, true) => small,
        (false, false) => mma([2, 4, 4], [4, 1]),
    };
    all.extend([(SpecializedTma, for_tma), (DoubleTma, for_tma)]);
    let cmma_square = cmma([4, 4, 4], [2, 2]);
    all.push((DoubleCyclic, cmma_square));
    if !half {
        let cmma_eight = cmma([4, 2, 4], [2, 4]);
        all.extend([(DoubleAsyncCyclic, cmma_square), (DoubleAsyncCyclic, cmma_eight)]);
    }
    if full {
        let readers = [SimpleTma, SpecializedStrided, SimpleAsyncCyclic, SpecializedCyclic];
        all.extend(readers.map(|reader| (reader, eight)));
        // This one loads its rows plane by plane.
        all.push((Ordered, narrow));
        let tall = mma([4, 8, 2], [4, 2]);
        let deep = mma([4, 4, 8], [2, 4]);
        all.extend([tall, deep, narrow].into_iter().flat_map(|tiling| {
            [SimpleCyclic, DoubleCyclic, DoubleAsyncCyclic].map(|reader| (reader, tiling))
        }));
    }
    let name = |(reader, tiling): (Reader, Tiling)| {
        (format!("{reader:?}_{}", tiling.name()), Choice::Forced(reader, tiling))
    };
    all.into_iter().map(name).collect()
}

fn exact() -> Vec<Named> {
    use TileSizeSelection::{MaxTileSize, MinTileSize};
    let simple = |tile_size| {
        let args = SimpleUnitSelectionArgs { tile_size };
        Choice::Inferred(Strategy::SimpleUnit(BlueprintStrategy::Inferred(args)))
    };
    let double = |tile_size| {
        let args = DoubleUnitSelectionArgs { tile_size };
        Choice::Inferred(Strategy::DoubleUnit(BlueprintStrategy::Inferred(args)))
    };
    [
        ("DoubleUnit_max", double(MaxTileSize)),
        ("SimpleUnit_max", simple(MaxTileSize)),
        ("DoubleUnit_min", double(MinTileSize)),
        ("SimpleUnit_min", simple(MinTileSize)),
    ]
    .map(|(name, choice)| (name.to_string(), choice))
    .into()
}

/// All that suit a case and its types; `full`: also the unlikely ones.
pub fn all(case: &Case, types: &Types, full: bool) -> Vec<Named> {
    if types.exact {
        return exact();
    }
    let mut all = inferred_on_tensor_cores(types, full);
    all.extend(forced_on_tensor_cores(case, types, full));
    all
}
