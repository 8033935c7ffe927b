//! The inverse of a unit lower triangular matrix, by substitution in blocks of 16 and exact merges.
//!
//! With T = (I - M)^-1 and M strictly lower triangular, T = I + M T gives the rows of a 16 x 16 block
//! one after another; and of two neighbouring blocks,
//! ```text
//! [ I - M11        ]^-1   [ T11              ]
//! [  -M21   I - M22]    = [ T22 M21 T11  T22 ]
//! ```
//! All in f32. A doubling series (I + M)(I + M^2).. would be shorter, and wrong: with equal keys the
//! powers of M reach 1e17 before they cancel.

use crate::plan::Plan;
use cubecl::prelude::*;

/// Side of a block that is solved row by row.
const BLOCK: usize = 16;

/// Numbers from one row to the next, for [`invert`].
pub(crate) fn stride(plan: &Plan) -> usize {
    plan.chunk + 1
}

/// `t = (I - m)^-1`, both [C, C]; `m` is used up. Starts and ends with a barrier.
#[cube]
pub(crate) fn invert(m: &mut SharedMemory<f32>, t: &mut SharedMemory<f32>, #[comptime] plan: Plan) {
    sync_cube();
    solve_blocks(m, t, plan);
    sync_cube();
    #[unroll]
    for level in 0..comptime!((plan.chunk / BLOCK).ilog2()) {
        merge(m, t, comptime!(BLOCK << level), plan);
    }
}

/// Inverts the blocks on the diagonal: a unit a column, which it keeps in registers.
#[cube]
fn solve_blocks(m: &SharedMemory<f32>, t: &mut SharedMemory<f32>, #[comptime] plan: Plan) {
    let stride = comptime!(stride(&plan));
    let j = UNIT_POS as usize;
    if j < comptime!(plan.chunk) {
        let block = j / BLOCK * BLOCK;
        for i in 0..block {
            t[i * stride + j] = 0.0f32;
        }
        let from = block * comptime!(stride + 1);
        let mut x = Array::<f32>::new(BLOCK);
        #[unroll]
        for i in 0..BLOCK {
            let mut sum = select(j % BLOCK == i, 1.0f32, 0.0f32);
            #[unroll]
            for n in 0..i {
                sum += m[from + comptime!(i * stride + n)] * x[n];
            }
            x[i] = sum;
            t[(block + i) * stride + j] = sum;
        }
    }
}

/// Joins neighbouring blocks of `side` rows: a unit two rows by two columns.
#[cube]
fn merge(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] side: usize,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(stride(&plan));
    let half = comptime!(side / 2);
    let unit = UNIT_POS as usize;
    let low = unit / comptime!(half * half) * comptime!(2 * side);
    let i = low + side + unit / half % half * 2;
    let j = low + unit % half * 2;
    let works = unit < comptime!(plan.chunk / side / 2 * half * half);
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
