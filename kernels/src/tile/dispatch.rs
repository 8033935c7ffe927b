//! The arithmetic of an engine, picked at compile time. Its numbers and properties are methods of [`Engine`], its tile
//! layout those of [`Grid`].

use super::engine::{Engine, Inverse, Mul, TileEngine};
use super::mma::Mma;
use super::plain::{self, Plain};
use super::planes;
use super::tf32::Tf32;
use super::{Acc, Grid};
use cubecl::prelude::*;

/// [`TileEngine::row`] of the grid's engine.
#[cube]
pub(crate) fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
    match comptime!(grid.engine) {
        Engine::Plain => Plain::row(f, h, grid),
        Engine::Tf32 => Tf32::row(f, h, grid),
        Engine::Mma => Mma::row(f, h, grid),
    }
}

/// [`row`], or the last row for a unit of the plain engine whose own would lie behind it: it repeats that row, and its
/// results are not used.
#[cube]
pub(crate) fn row_in(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
    if comptime!(grid.engine.by_planes()) {
        row(f, h, grid)
    } else {
        min(row(f, h, grid), comptime!(grid.m - 1))
    }
}

/// [`TileEngine::column`] of the grid's engine.
#[cube]
pub(crate) fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize {
    match comptime!(grid.engine) {
        Engine::Plain => Plain::column(f, grid),
        Engine::Tf32 => Tf32::column(f, grid),
        Engine::Mma => Mma::column(f, grid),
    }
}

/// [`TileEngine::inside`] of the grid's engine.
#[cube]
pub(crate) fn inside(#[comptime] f: usize, #[comptime] grid: Grid) -> bool {
    match comptime!(grid.engine) {
        Engine::Plain => Plain::inside(f, grid),
        Engine::Tf32 => Tf32::inside(f, grid),
        Engine::Mma => Mma::inside(f, grid),
    }
}

/// [`TileEngine::slot`] of the grid's engine.
#[cube]
pub(crate) fn slot(#[comptime] grid: Grid) -> usize {
    match comptime!(grid.engine) {
        Engine::Plain => Plain::slot(grid),
        Engine::Tf32 => Tf32::slot(grid),
        Engine::Mma => Mma::slot(grid),
    }
}

/// [`TileEngine::mul`] of the grid's engine.
#[cube]
pub(crate) fn mul<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    match comptime!(spec.grid.engine) {
        Engine::Plain => Plain::mul::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Tf32 => Tf32::mul::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Mma => Mma::mul::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
    }
}

/// Joins neighbouring blocks of `side` rows of an inverse.
#[cube]
pub(crate) fn merge(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] side: usize,
    #[comptime] inverse: Inverse,
) {
    match comptime!(inverse.engine) {
        Engine::Plain => plain::merge(m, t, side, inverse),
        Engine::Tf32 => planes::merge(m, t, side, inverse),
        Engine::Mma => {
            comptime!(unreachable!("split_inverse.rs inverts on tensor cores of 16 bits"))
        }
    }
}
