//! UT transform: the inverse T of a unit lower triangular matrix, by substitution in blocks of 16 and merges. T
//! gives the WY form of a chunk's delta steps: U = T (beta V) - W S with W = T (beta E~), which is never formed
//! (state_chunk.rs).
//!
//! With T = (I - M)^-1 and M strictly lower triangular, T = I + M T gives the rows of a 16 x 16 block
//! one after another; and of two neighbouring blocks,
//! ```text
//! [ I - M11        ]^-1   [ T11              ]
//! [  -M21   I - M22]    = [ T22 M21 T11  T22 ]
//! ```
//! The plain engine computes in f32. On tensor cores each number is the sum of two, of 16 bits with `Mma` and of
//! TF32 with `Tf32`, and the product of the two small ones is left out. In f16 such numbers end at 65504. A
//! doubling series (I + M)(I + M^2).. would be shorter, and wrong: with equal keys the powers of M reach 1e17
//! before they cancel.

use super::dispatch::merge;
use super::engine::Inverse;
use cubecl::prelude::*;

/// Side of a block that is solved row by row.
const BLOCK: usize = 16;

/// `t = (I - m)^-1`, both [C, C]; `m` is used up. E: what tensor cores multiply. Starts and ends with a
/// barrier.
#[cube]
pub(crate) fn invert<E: Float>(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] inverse: Inverse,
) {
    sync_cube();
    solve_blocks(m, t, inverse);
    sync_cube();
    #[unroll]
    for level in 0..comptime!((inverse.chunk / BLOCK).ilog2()) {
        merge::<E>(m, t, comptime!(BLOCK << level), inverse);
    }
}

/// Inverts the blocks on the diagonal: a unit a column, which it keeps in registers.
#[cube]
fn solve_blocks(m: &SharedMemory<f32>, t: &mut SharedMemory<f32>, #[comptime] inverse: Inverse) {
    let stride = comptime!(inverse.stride());
    let j = UNIT_POS as usize;
    if j < comptime!(inverse.chunk) {
        let block = j / BLOCK * BLOCK;
        for i in 0..block {
            t[i * stride + j] = 0.0f32;
        }
        let from = block * comptime!(stride + 1);
        let mut x = Array::<f32>::new(BLOCK);
        #[unroll]
        for i in 0..BLOCK {
            x[i] = select(j % BLOCK == i, 1.0f32, 0.0f32);
        }
        // A row that is known goes into all rows below it at once: these do not wait for each other.
        #[unroll]
        for n in 0..BLOCK {
            #[unroll]
            for i in comptime!(n + 1)..BLOCK {
                x[i] = x[i] + m[from + comptime!(i * stride + n)] * x[n];
            }
            t[(block + n) * stride + j] = x[n];
        }
    }
}
