//! [`Engine::Mma`](super::Engine::Mma): tensor cores, 16 bits in and f32 out.

use super::engine::{Mul, TileEngine};
use super::planes;
use super::ptx::{local, name, ptx, rounded_pair, use_tile};
use super::{Acc, Grid, Pair};
use cubecl::prelude::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// Tensor cores.
pub(super) struct Mma;

/// Where a 16 x 16 block begins in a matrix, and how the matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    pub down: usize,
    pub right: usize,
    /// From one stored row to the next.
    pub stride: usize,
    pub transposed: bool,
}

impl Source {
    fn of_a(spec: Mul, down: usize, right: usize) -> Self {
        Self { down, right, stride: spec.a_stride, transposed: spec.a_transposed }
    }

    fn of_b(spec: Mul, down: usize, right: usize) -> Self {
        Self { down, right, stride: spec.b_stride, transposed: spec.b_transposed }
    }
}

#[cube]
impl TileEngine for Mma {
    fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
        planes::row(f, h, grid)
    }

    fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize {
        planes::column(f, grid)
    }

    fn inside(#[comptime] _f: usize, #[comptime] grid: Grid) -> bool {
        planes::inside(grid)
    }

    fn slot(#[comptime] grid: Grid) -> usize {
        planes::slot(grid)
    }

    fn mul<E: Float, NA: Size, NB: Size>(
        acc: &mut Acc,
        a: &SharedMemory<Vector<E, NA>>,
        a_at: usize,
        b: &SharedMemory<Vector<E, NB>>,
        b_at: usize,
        #[comptime] spec: Mul,
    ) {
        let grid = comptime!(spec.grid);
        let rows = comptime!(grid.fragment_rows());
        let columns = comptime!(grid.fragment_columns());
        let plane = UNIT_POS as usize / 32;
        let m0 = plane % comptime!(grid.down()) * 16;
        let n0 = plane / comptime!(grid.down()) * comptime!(grid.n / grid.across());
        if plane / comptime!(grid.down()) < comptime!(grid.across()) {
            #[unroll]
            for k in 0..comptime!(spec.k / 16) {
                let mut left = Sequence::<Array<Vector<E, Const<2>>>>::new();
                #[unroll]
                for r in 0..rows {
                    let down = comptime!(grid.step(r * columns, 0)[0]);
                    let from = comptime!(Source::of_a(spec, down, k * 16));
                    left.push(load_a::<E, NA>(a, a_at, m0, from));
                }
                #[unroll]
                for c in 0..comptime!(columns / 2) {
                    let from = comptime!(Source::of_b(spec, k * 16, c * 16));
                    let right = load_b::<E, NB>(b, b_at, n0, from);
                    #[unroll]
                    for r in 0..rows {
                        let f = comptime!(r * columns + c * 2);
                        execute::<E>(
                            left.index(r),
                            &pair(&right, 0usize, 1usize),
                            acc.index_mut(f),
                        );
                        execute::<E>(
                            left.index(r),
                            &pair(&right, 2usize, 3usize),
                            acc.index_mut(comptime!(f + 1)),
                        );
                    }
                }
            }
        }
    }
}

/// Two numbers in two parts each, whose sums they nearly are: large ones first.
#[cube]
pub(super) fn split<E: Float>(first: f32, second: f32) -> Array<Vector<E, Const<2>>> {
    let mut parts = Array::<Vector<E, Const<2>>>::new(2usize);
    let large = rounded_pair::<E>(first, second);
    parts[0] = large;
    parts[1] =
        rounded_pair::<E>(first - f32::cast_from(large[0]), second - f32::cast_from(large[1]));
    parts
}

/// `c += a b` for one 16 x 8 x 16 block.
#[cube]
pub(crate) fn execute<E: Float>(
    a: &Array<Vector<E, Const<2>>>,
    b: &Array<Vector<E, Const<2>>>,
    c: &mut Array<Pair>,
) {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    mma.execute_inplace(a, b, c);
}

/// Two registers of four.
#[cube]
pub(crate) fn pair<E: Float>(
    registers: &Array<Vector<E, Const<2>>>,
    #[comptime] i: usize,
    #[comptime] j: usize,
) -> Array<Vector<E, Const<2>>> {
    let mut two = Array::<Vector<E, Const<2>>>::new(2usize);
    two[0] = registers[i];
    two[1] = registers[j];
    two
}

/// The 16 x 16 block of A at (i + down, right), as four registers.
#[cube]
pub(crate) fn load_a<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    i: usize,
    #[comptime] from: Source,
) -> Array<Vector<E, Const<2>>> {
    let [down, k, stride] = comptime!([from.down, from.right, from.stride]);
    let lane = UNIT_POS as usize % 32;
    if comptime!(from.transposed) {
        let stored = (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored + i, comptime!(k * stride + down), true)
    } else {
        let stored = (i + lane % 16) * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(down * stride + k), false)
    }
}

/// The 16 x 16 block of B at (down, j + right): registers 0 and 1 are its left half, 2 and 3 its right half.
#[cube]
pub(crate) fn load_b<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    j: usize,
    #[comptime] from: Source,
) -> Array<Vector<E, Const<2>>> {
    let [k, right, stride] = comptime!([from.down, from.right, from.stride]);
    let lane = UNIT_POS as usize % 32;
    if comptime!(from.transposed) {
        let stored = (j + lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(right * stride + k), false)
    } else {
        let stored = lane % 16 * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored + j, comptime!(k * stride + right), true)
    }
}

/// Four 8 x 8 matrices; this lane's row of 16 bytes starts `offset` numbers after `at`, whole vectors both.
/// Compile-time offsets come apart from run-time ones, here and in [`put`]: once the sum of both is divided by a
/// vector's width compilers cannot separate them again, and each load computes an address.
#[cube]
pub(crate) fn load_matrix<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] offset: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let width = N::value();
    load_matrix_at::<E, N>(tile, at / width + comptime!(offset / width), transposed)
}

/// The same, of a place in whole vectors.
#[cube]
pub(crate) fn load_matrix_at<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    mma.load_matrix::<Vector<E, N>, Const<2>>(
        &tile.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}

/// Four 8 x 8 matrices, each transposed, to shared memory (`stmatrix`, compute capability 9.0 on): their rows are columns of
/// what registers hold, and this lane's row of 16 bytes is vector `at` of the tile.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(crate) fn store_transposed<E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    at: usize,
    four: &Array<Vector<E, Const<2>>>,
) {
    intrinsic!(|scope| {
        let (tile, four) = (*tile.expand, name(*four.expand));
        use_tile(scope, tile);
        let address = format!("{} + {}", name(tile), local(scope, *at.expand));
        let words = (0..4).map(|n| format!("\"r\"(reinterpret_cast<const uint32*>({four})[{n}])"));
        let words = words.collect::<Vec<_>>().join(", ");
        ptx(
            scope,
            &format!(
                "asm volatile(\"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {{%1, %2, %3, %4}};\" :: \
                 \"r\"(static_cast<uint32>(__cvta_generic_to_shared({address}))), {words} : \"memory\");"
            ),
        );
    })
}
