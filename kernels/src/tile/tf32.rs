//! [`Engine::Tf32`](super::Engine::Tf32): f32 on tensor cores, each number as a sum of two of TF32, or rounded to one.

use super::engine::{Mul, TileEngine, Zeros};
use super::planes::{self, BlockMul};
use super::{Acc, Grid, Pair};
use cubecl::prelude::cmma::MmaDefinition;
use cubecl::prelude::*;

/// f32 on tensor cores.
pub(super) struct Tf32;

#[cube]
impl TileEngine for Tf32 {
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
        let [a_row, a_k] = comptime!(spec.a_steps());
        let [b_k, b_column] = comptime!(spec.b_steps());
        let by_lane = comptime!(spec.k_of_lane()[0]);
        let lane = UNIT_POS as usize % 32;
        let top = Self::row(0usize, 0usize, grid);
        let left_column = Self::column(0usize, grid) - lane % 4 * 2;
        let a_from = a_at + top * a_row + lane % 4 * comptime!(by_lane * a_k);
        let b_from =
            b_at + (left_column + lane / 4) * b_column + lane % 4 * comptime!(by_lane * b_k);
        if Self::inside(0usize, grid) {
            let top = top - lane / 4;
            for step in first_step(top, spec)..end_step(top, spec) {
                let a_from = a_from + step * comptime!(8 * a_k);
                let b_from = b_from + step * comptime!(8 * b_k);
                add_step::<E, NA, NB>(acc, a, a_from, b, b_from, spec);
            }
        }
    }
}

/// The first step, of eight numbers of k each, that a plane multiplies; its rows begin at `top`.
#[cube]
fn first_step(top: usize, #[comptime] spec: Mul) -> usize {
    if comptime!(spec.zeros == Zeros::Below) { top / 8 } else { 0usize.runtime() }
}

/// The step after the last. A number of run time even where it is known: compilers unroll loops whose number they know,
/// and then hold twice the registers.
#[cube]
fn end_step(top: usize, #[comptime] spec: Mul) -> usize {
    let all = CUBE_DIM as usize / comptime!(spec.grid.units) * comptime!(spec.k / 8);
    if comptime!(spec.zeros == Zeros::Above) {
        let rows = comptime!((spec.grid.fragment_rows() - 1) * spec.grid.down() * 16 + 16);
        min(all, (top + rows) / 8)
    } else {
        all
    }
}

/// Eight numbers of k more; a lane's numbers begin at `a_from` and `b_from`.
#[cube]
fn add_step<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_from: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_from: usize,
    #[comptime] spec: Mul,
) {
    let grid = comptime!(spec.grid);
    let rows = comptime!(grid.fragment_rows());
    let columns = comptime!(grid.fragment_columns());
    let first_term = comptime!(grid.first_term());
    let [a_row, a_k] = comptime!(spec.a_steps());
    let [b_k, b_column] = comptime!(spec.b_steps());
    let by_register = comptime!(spec.k_of_lane()[1]);
    let mut left = Sequence::<Parts>::new();
    #[unroll]
    for r in 0..rows {
        let mut block = parts(4usize, first_term);
        #[unroll]
        for n in 0..4usize {
            let down = comptime!(grid.step(r * columns, 0)[0] + n % 2 * 8);
            let at = comptime!(down * a_row + n / 2 * by_register * a_k);
            put_parts(&mut block, n, f32::cast_from(a[a_from + at]), first_term);
        }
        left.push(block);
    }
    let mut right = Sequence::<Parts>::new();
    #[unroll]
    for c in 0..columns {
        let mut block = parts(2usize, first_term);
        #[unroll]
        for n in 0..2usize {
            let at = comptime!(c * 8 * b_column + n * by_register * b_k);
            put_parts(&mut block, n, f32::cast_from(b[b_from + at]), first_term);
        }
        right.push(block);
    }
    // Fragments in the inner loop: products into one fragment wait for each other.
    #[unroll]
    for term in first_term..3usize {
        #[unroll]
        for f in 0..comptime!(rows * columns) {
            let x = left.index(comptime!(f / columns));
            let y = right.index(comptime!(f % columns));
            execute_tf32(x, y, acc.index_mut(f), term);
        }
    }
}

/// `x += A B` of one plane for 16 rows of A and 8 columns of B, which start `a_at` and `b_at` numbers into their matrices, close
/// to f32. Who holds which number: PTX, `mma.m16n8k8`.
#[cube]
pub(super) fn add_product(
    x: &mut Array<Pair>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] spec: BlockMul,
) {
    let depth = comptime!(spec.depth);
    let stride = comptime!(spec.stride);
    let lane = UNIT_POS as usize % 32;
    let a_lane = a_at + lane / 4 * stride + lane % 4;
    let b_lane = b_at + lane % 4 * stride + lane / 4;
    #[unroll]
    for k in 0..comptime!(depth / 8) {
        let mut left = parts(4usize, 0usize);
        #[unroll]
        for n in 0..4usize {
            let at = comptime!(n % 2 * 8 * stride + n / 2 * 4 + k * 8);
            put_parts(&mut left, n, a[a_lane + at], 0usize);
        }
        let mut right = parts(2usize, 0usize);
        #[unroll]
        for n in 0..2usize {
            put_parts(&mut right, n, b[b_lane + comptime!((n * 4 + k * 8) * stride)], 0usize);
        }
        #[unroll]
        for term in 0..3usize {
            execute_tf32(&left, &right, x, term);
        }
    }
}

/// A left or right operand of `mma.m16n8k8`: its numbers as sums of two of TF32, or rounded to one.
#[derive(CubeType)]
pub(crate) struct Parts {
    high: Array<Vector<tf32, Const<1>>>,
    low: Array<Vector<tf32, Const<1>>>,
}

/// Room for an operand of so many registers, for the products from `first_term` on.
#[cube]
pub(crate) fn parts(#[comptime] registers: usize, #[comptime] first_term: usize) -> Parts {
    Parts {
        high: Array::<Vector<tf32, Const<1>>>::new(registers),
        low: Array::<Vector<tf32, Const<1>>>::new(comptime!(if first_term < 2 {
            registers
        } else {
            1
        })),
    }
}

/// 1 + 2^-11 ln 2. Tensor cores cut a number to the 11 bits of TF32, which PTX leaves open and an H100 and an H200 do. Of a
/// number that was made larger by this factor the mean relative error over all mantissas is 0, and none is above 0.7 of a
/// unit in the last place. Numbers of 11 bits, infinities and NaN stay. It is one multiplication; the device's own rounding
/// is a comparison and an addition.
const ROUNDING: f32 = 1.0 + core::f32::consts::LN_2 / 2048.0;

/// Number `n` of an operand: `high` is x cut to 11 bits, `low` the rest, of 13 bits, which tensor cores cut to 11.
#[cube]
pub(crate) fn put_parts(
    to: &mut Parts,
    #[comptime] n: usize,
    x: f32,
    #[comptime] first_term: usize,
) {
    if comptime!(first_term < 2) {
        let high = u32::reinterpret(x) & 0xffff_e000u32;
        to.high[n] = Vector::<tf32, Const<1>>::reinterpret(high);
        to.low[n] = Vector::<tf32, Const<1>>::reinterpret(x - f32::reinterpret(high));
    } else {
        to.high[n] = Vector::<tf32, Const<1>>::reinterpret(x * ROUNDING);
    }
}

/// `c +=` one of the three products that `a b` is made of, for one 16 x 8 x 8 block; the least comes first.
#[cube]
pub(crate) fn execute_tf32(a: &Parts, b: &Parts, c: &mut Array<Pair>, #[comptime] term: usize) {
    let mma = MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize);
    match comptime!(term) {
        0usize => mma.execute_inplace(&a.low, &b.high, c),
        1usize => mma.execute_inplace(&a.high, &b.low, c),
        _ => mma.execute_inplace(&a.high, &b.high, c),
    }
}
