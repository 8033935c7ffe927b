//! Parts that engines with tensor cores share: a plane of 32 has fragments of 16 rows, four lanes side by side.

use super::engine::Inverse;
use super::tf32::add_product;
use super::{Grid, Pair};
use cubecl::prelude::*;

/// How many numbers a plane's product sums over, and from one row of its matrices to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockMul {
    pub depth: usize,
    pub stride: usize,
}

/// [`TileEngine::row`](super::engine::TileEngine::row).
#[cube]
pub(super) fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
    let down = comptime!(grid.step(f, h)[0]);
    let plane = own_plane(grid) % comptime!(grid.down());
    let lane = UNIT_POS as usize % 32;
    plane * 16 + lane / 4 + down
}

/// [`TileEngine::column`](super::engine::TileEngine::column).
#[cube]
pub(super) fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize {
    let right = comptime!(grid.step(f, 0)[1]);
    let (down, across) = comptime!((grid.down(), grid.across()));
    let mut plane = own_plane(grid) / down;
    if comptime!(32 * down * across < grid.units) {
        // A plane that has no part of the product reads what another one does, and nothing behind a tile's end.
        plane %= across;
    }
    let lane = UNIT_POS as usize % 32;
    plane * comptime!(grid.n / grid.across()) + lane % 4 * 2 + right
}

/// [`TileEngine::inside`](super::engine::TileEngine::inside).
#[cube]
pub(super) fn inside(#[comptime] grid: Grid) -> bool {
    own_plane(grid) / comptime!(grid.down()) < comptime!(grid.across())
}

/// [`TileEngine::slot`](super::engine::TileEngine::slot).
#[cube]
pub(super) fn slot(#[comptime] grid: Grid) -> usize {
    own_plane(grid) / comptime!(grid.down()) * 4 + UNIT_POS as usize % 4
}

/// Number of this unit's plane among those of a grid.
#[cube]
fn own_plane(#[comptime] grid: Grid) -> usize {
    let plane = UNIT_POS as usize / 32;
    if comptime!(grid.first > 0) { plane - comptime!(grid.first / 32) } else { plane }
}

/// [`merge`](super::dispatch::merge): a plane 16 rows by 8 columns.
#[cube]
pub(super) fn merge(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] side: usize,
    #[comptime] inverse: Inverse,
) {
    let stride = comptime!(inverse.stride());
    let depth = comptime!(BlockMul { depth: side, stride });
    let down = comptime!(side / 16);
    let tiles = comptime!(down * (side / 8));
    let used = comptime!(inverse.chunk / side / 2 * tiles);
    comptime!(assert!(used <= inverse.units / 32, "a plane for each piece of the product"));
    let plane = UNIT_POS as usize / 32;
    let low = plane / tiles * comptime!(2 * side);
    let i = low + side + plane % down * 16;
    let j = low + plane % tiles / down * 8;
    let works = plane < used;
    let mut x = Array::<Pair>::new(2usize);
    x[0] = Pair::new(0.0);
    x[1] = Pair::new(0.0);
    if works {
        let a = i * stride + low;
        add_product(&mut x, m, a, t, low * stride + j, depth);
    }
    sync_cube();
    if works {
        put_block(m, &x, i * stride + j, stride);
    }
    sync_cube();
    x[0] = Pair::new(0.0);
    x[1] = Pair::new(0.0);
    if works {
        let a = i * stride + low + side;
        add_product(&mut x, t, a, m, (low + side) * stride + j, depth);
        put_block(t, &x, i * stride + j, stride);
    }
    sync_cube();
}

/// Writes a plane's 16 x 8 numbers, which begin at `at`.
#[cube]
fn put_block(to: &mut SharedMemory<f32>, x: &Array<Pair>, at: usize, #[comptime] stride: usize) {
    let lane = UNIT_POS as usize % 32;
    #[unroll]
    for h in 0..2usize {
        let here = at + lane / 4 * stride + lane % 4 * 2 + comptime!(h * 8 * stride);
        to[here] = x[h][0];
        to[here + 1] = x[h][1];
    }
}

/// Two pairs of this unit and of its neighbour across `lanes`, exchanged so that each writes four
/// neighbouring numbers, vector `at` of the tensor: the unit with the higher number the second pairs, the other one
/// the first. Planes that write whole sectors of 32 bytes write half as often.
#[cube]
pub(crate) fn put_four<S: Float, W: Size>(
    tensor: &mut Array<Vector<S, W>>,
    at: usize,
    first: Pair,
    other: Pair,
    there: bool,
    #[comptime] lanes: u32,
) {
    let second = UNIT_POS % 32 / lanes % 2 == 1;
    let a = u32::reinterpret(Vector::<S, Const<2>>::cast_from(first));
    let b = u32::reinterpret(Vector::<S, Const<2>>::cast_from(other));
    let got = plane_shuffle_xor(select(second, a, b), lanes);
    let low = Vector::<S, Const<2>>::reinterpret(select(second, got, a));
    let high = Vector::<S, Const<2>>::reinterpret(select(second, b, got));
    let mut x = Vector::<S, W>::empty();
    x[0] = low[0];
    x[1] = low[1];
    x[2] = high[0];
    x[3] = high[1];
    if there {
        tensor[at] = x;
    }
}

#[cfg(test)]
#[path = "planes_tests.rs"]
mod tests;
