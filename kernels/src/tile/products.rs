//! Products of tiles, one for each [`Engine`].

use super::{Acc, Engine, Grid, Pair, column, inside, row};
use cubecl::prelude::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// How [`mul`] finds its operands. `a` is [m, k] or, transposed, [k, m]; `b` is [k, n] or [n, k].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Mul {
    pub grid: Grid,
    pub k: usize,
    /// Numbers from one stored row to the next.
    pub a_stride: usize,
    pub b_stride: usize,
    pub a_transposed: bool,
    pub b_transposed: bool,
}

impl Mul {
    /// Numbers from one row of A to the next, and from one column to the next.
    fn a_steps(&self) -> [usize; 2] {
        if self.a_transposed { [1, self.a_stride] } else { [self.a_stride, 1] }
    }

    /// The same of B.
    fn b_steps(&self) -> [usize; 2] {
        if self.b_transposed { [1, self.b_stride] } else { [self.b_stride, 1] }
    }
}

/// `acc += A B`. `a` and `b` start `a_at` and `b_at` numbers into their tiles.
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
        Engine::Plain => mul_plain::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Tf32 => mul_tf32::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Mma => mul_mma::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
    }
}

#[cube]
fn mul_plain<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    let rows = comptime!(spec.grid.fragment_rows());
    let columns = comptime!(spec.grid.fragment_columns());
    let [a_row, a_k] = comptime!(spec.a_steps());
    let [b_k, b_column] = comptime!(spec.b_steps());
    let mut a_from = Array::<usize>::new(comptime!(2 * rows));
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for h in 0..2usize {
            let i = row(comptime!(r * columns), h, spec.grid);
            // Units without work repeat the last row; their results are not used.
            a_from[comptime!(2 * r + h)] =
                a_at + min(i, comptime!(spec.grid.m - 1)) * comptime!(a_row);
        }
    }
    let b_from = b_at + column(0usize, spec.grid) * comptime!(b_column);
    for k in 0..comptime!(spec.k) {
        let mut x = Array::<f32>::new(comptime!(2 * rows));
        #[unroll]
        for r in 0..comptime!(2 * rows) {
            x[r] = f32::cast_from(a[a_from[r] + k * comptime!(a_k)]);
        }
        let b_row = b_from + k * comptime!(b_k);
        #[unroll]
        for c in 0..columns {
            let j = b_row + comptime!(c * spec.grid.across() * 2 * b_column);
            let mut y = Pair::empty();
            y[0] = f32::cast_from(b[j]);
            y[1] = f32::cast_from(b[j + comptime!(b_column)]);
            #[unroll]
            for r in 0..rows {
                let x0 = x[comptime!(2 * r)];
                let x1 = x[comptime!(2 * r + 1)];
                add_outer(acc.index_mut(comptime!(r * columns + c)), x0, x1, y);
            }
        }
    }
}

#[cube]
fn add_outer(acc: &mut Array<Pair>, x0: f32, x1: f32, y: Pair) {
    acc[0] = acc[0] + Pair::new(x0) * y;
    acc[1] = acc[1] + Pair::new(x1) * y;
}

/// A left or right operand of `mma.m16n8k8`: its numbers as sums of two of TF32.
#[derive(CubeType)]
pub(crate) struct Parts {
    high: Array<Vector<tf32, Const<1>>>,
    low: Array<Vector<tf32, Const<1>>>,
}

/// Room for an operand of so many registers.
#[cube]
pub(crate) fn parts(#[comptime] registers: usize) -> Parts {
    Parts {
        high: Array::<Vector<tf32, Const<1>>>::new(registers),
        low: Array::<Vector<tf32, Const<1>>>::new(registers),
    }
}

/// Number `n` of an operand: `high` is x to 11 bits, `low` the rest, which tensor cores read to 11 bits.
#[cube]
pub(crate) fn put_parts(to: &mut Parts, #[comptime] n: usize, x: f32) {
    let high = (u32::reinterpret(x) + 0x1000u32) & 0xffff_e000u32;
    to.high[n] = Vector::<tf32, Const<1>>::reinterpret(high);
    to.low[n] = Vector::<tf32, Const<1>>::reinterpret(x - f32::reinterpret(high));
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

/// f32 on tensor cores.
#[cube]
fn mul_tf32<E: Float, NA: Size, NB: Size>(
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
    let [a_row, a_k] = comptime!(spec.a_steps());
    let [b_k, b_column] = comptime!(spec.b_steps());
    let lane = UNIT_POS as usize % 32;
    let left_column = column(0usize, grid) - lane % 4 * 2;
    let a_from = a_at + row(0usize, 0usize, grid) * a_row + lane % 4 * a_k;
    let b_from = b_at + (left_column + lane / 4) * b_column + lane % 4 * b_k;
    if inside(0usize, grid) {
        #[unroll]
        for step in 0..comptime!(spec.k / 8) {
            let mut left = Sequence::<Parts>::new();
            #[unroll]
            for r in 0..rows {
                let mut block = parts(4usize);
                #[unroll]
                for n in 0..4usize {
                    let down = comptime!(grid.step(r * columns, 0)[0] + n % 2 * 8);
                    let at = comptime!(down * a_row + (step * 8 + n / 2 * 4) * a_k);
                    put_parts(&mut block, n, f32::cast_from(a[a_from + at]));
                }
                left.push(block);
            }
            let mut right = Sequence::<Parts>::new();
            #[unroll]
            for c in 0..columns {
                let mut block = parts(2usize);
                #[unroll]
                for n in 0..2usize {
                    let at = comptime!(c * 8 * b_column + (step * 8 + n * 4) * b_k);
                    put_parts(&mut block, n, f32::cast_from(b[b_from + at]));
                }
                right.push(block);
            }
            // Fragments in the inner loop: products into one fragment wait for each other.
            #[unroll]
            for term in 0..3usize {
                #[unroll]
                for f in 0..comptime!(rows * columns) {
                    let x = left.index(comptime!(f / columns));
                    let y = right.index(comptime!(f % columns));
                    execute_tf32(x, y, acc.index_mut(f), term);
                }
            }
        }
    }
}

#[cube]
fn mul_mma<E: Float, NA: Size, NB: Size>(
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
                left.push(load_a::<E, NA>(
                    a,
                    a_at,
                    m0,
                    comptime!(grid.step(r * columns, 0)[0]),
                    comptime!(k * 16),
                    comptime!(spec.a_stride),
                    comptime!(spec.a_transposed),
                ));
            }
            #[unroll]
            for c in 0..comptime!(columns / 2) {
                let right = load_b::<E, NB>(
                    b,
                    b_at,
                    comptime!(k * 16),
                    n0,
                    comptime!(c * 16),
                    comptime!(spec.b_stride),
                    comptime!(spec.b_transposed),
                );
                #[unroll]
                for r in 0..rows {
                    let f = comptime!(r * columns + c * 2);
                    execute::<E>(left.index(r), &pair(&right, 0usize, 1usize), acc.index_mut(f));
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

/// The 16 x 16 block of A at (i + down, k), as four registers.
#[cube]
pub(crate) fn load_a<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    i: usize,
    #[comptime] down: usize,
    #[comptime] k: usize,
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let lane = UNIT_POS as usize % 32;
    if comptime!(transposed) {
        let stored = (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored + i, comptime!(k * stride + down), true)
    } else {
        let stored = (i + lane % 16) * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(down * stride + k), false)
    }
}

/// The 16 x 16 block of B at (k, j + right): registers 0 and 1 are its left half, 2 and 3 its right half.
#[cube]
pub(crate) fn load_b<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] k: usize,
    j: usize,
    #[comptime] right: usize,
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let lane = UNIT_POS as usize % 32;
    if comptime!(transposed) {
        let stored = (j + lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(right * stride + k), false)
    } else {
        let stored = lane % 16 * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored + j, comptime!(k * stride + right), true)
    }
}

/// Four 8 x 8 matrices; this lane's row of 16 bytes starts `offset` numbers after `at`, whole vectors both.
/// Compile-time offsets come apart from run-time ones, here and in [`put`]: once the sum of both is divided by a
/// vector's width no compiler parts them again, and each load computes an address.
#[cube]
pub(crate) fn load_matrix<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] offset: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let width = N::value();
    let at = at / width + comptime!(offset / width);
    mma.load_matrix::<Vector<E, N>, Const<2>>(
        &tile.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}
