//! [`Engine::Plain`](super::Engine::Plain): f32 arithmetic. A unit has fragments of 2 x 2 numbers of its own.

use super::engine::{Inverse, Mul, TileEngine};
use super::{Acc, Grid, Pair};
use cubecl::prelude::*;

/// f32 arithmetic.
pub(super) struct Plain;

#[cube]
impl TileEngine for Plain {
    fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
        let down = comptime!(grid.step(f, h)[0]);
        UNIT_POS as usize / comptime!(grid.across()) * 2 + down
    }

    fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize {
        let right = comptime!(grid.step(f, 0)[1]);
        UNIT_POS as usize % comptime!(grid.across()) * 2 + right
    }

    fn inside(#[comptime] f: usize, #[comptime] grid: Grid) -> bool {
        Self::row(f, 0usize, grid) < comptime!(grid.m)
    }

    fn slot(#[comptime] grid: Grid) -> usize {
        UNIT_POS as usize % comptime!(grid.across())
    }

    fn mul<E: Float, NA: Size, NB: Size>(
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
                let i = Self::row(comptime!(r * columns), h, spec.grid);
                // Units without work repeat the last row; their results are not used.
                a_from[comptime!(2 * r + h)] =
                    a_at + min(i, comptime!(spec.grid.m - 1)) * comptime!(a_row);
            }
        }
        let b_from = b_at + Self::column(0usize, spec.grid) * comptime!(b_column);
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
}

/// [`merge`](super::dispatch::merge): a unit two rows by two columns.
#[cube]
pub(super) fn merge(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] side: usize,
    #[comptime] inverse: Inverse,
) {
    let stride = comptime!(inverse.stride());
    let half = comptime!(side / 2);
    let unit = UNIT_POS as usize;
    let low = unit / comptime!(half * half) * comptime!(2 * side);
    let i = low + side + unit / half % half * 2;
    let j = low + unit % half * 2;
    let works = unit < comptime!(inverse.chunk / side / 2 * half * half);
    let mut x = Array::<f32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        x[n] = 0.0f32;
    }
    if works {
        for p in j..low + side {
            add_square(
                &mut x,
                m[i * stride + p],
                m[(i + 1) * stride + p],
                t[p * stride + j],
                t[p * stride + j + 1],
            );
        }
    }
    sync_cube();
    if works {
        put_square(m, &x, i * stride + j, stride);
    }
    sync_cube();
    #[unroll]
    for n in 0..4usize {
        x[n] = 0.0f32;
    }
    if works {
        for p in low + side..i + 2 {
            add_square(
                &mut x,
                t[i * stride + p],
                t[(i + 1) * stride + p],
                m[p * stride + j],
                m[p * stride + j + 1],
            );
        }
        put_square(t, &x, i * stride + j, stride);
    }
    sync_cube();
}

#[cube]
fn add_outer(acc: &mut Array<Pair>, x0: f32, x1: f32, y: Pair) {
    acc[0] = acc[0] + Pair::new(x0) * y;
    acc[1] = acc[1] + Pair::new(x1) * y;
}

#[cube]
fn add_square(x: &mut Array<f32>, a0: f32, a1: f32, b0: f32, b1: f32) {
    x[0] = x[0] + a0 * b0;
    x[1] = x[1] + a0 * b1;
    x[2] = x[2] + a1 * b0;
    x[3] = x[3] + a1 * b1;
}

#[cube]
fn put_square(to: &mut SharedMemory<f32>, x: &Array<f32>, at: usize, #[comptime] stride: usize) {
    to[at] = x[0];
    to[at + 1] = x[1];
    to[at + stride] = x[2];
    to[at + stride + 1] = x[3];
}
