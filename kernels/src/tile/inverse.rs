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
//! The plain engine computes in f32. On tensor cores each number is the sum of two, of TF32 with `Tf32` and of 16 bits
//! with `Mma` (split_inverse.rs), and the product of the two small ones is left out. In f16 such numbers end at 65504. A
//! doubling series (I + M)(I + M^2).. would be shorter, and wrong: with equal keys the powers of M reach 1e17
//! before they cancel.

use super::dispatch::merge;
use super::engine::Inverse;
use cubecl::prelude::*;

/// Side of a block that is solved row by row.
const BLOCK: usize = 16;

/// Begins `t = (I - m)^-1`, both [C, C]: inverts the blocks on the diagonal, a unit a column, which it keeps in registers.
/// Starts with a barrier; units from C on are free until [`finish_inverse`].
#[cube]
pub(crate) fn begin_inverse(
    m: &SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] inverse: Inverse,
) {
    sync_cube();
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
        #[unroll]
        for four in 0..comptime!(BLOCK / 4) {
            solve_four(&mut x, m, from, comptime!(four * 4), inverse);
            #[unroll]
            for n in comptime!(four * 4)..comptime!(four * 4 + 4) {
                t[(block + n) * stride + j] = x[n];
            }
        }
    }
}

/// Adds four rows of a block that begins at `from` to all rows below them: a row that is known goes into these at once, so
/// that they do not wait for each other.
#[cube]
fn solve_four(
    x: &mut Array<f32>,
    m: &SharedMemory<f32>,
    from: usize,
    #[comptime] first: usize,
    #[comptime] inverse: Inverse,
) {
    let stride = comptime!(inverse.stride());
    let mut rows = Sequence::<Array<f32>>::new();
    #[unroll]
    for i in comptime!(first + 1)..BLOCK {
        let mut four = Array::<f32>::new(4usize);
        #[unroll]
        for l in 0..4usize {
            four[l] = m[from + comptime!(i * stride + first + l)];
        }
        rows.push(four);
    }
    #[unroll]
    for n in 0..4usize {
        let known = x[comptime!(first + n)];
        #[unroll]
        for i in comptime!(first + n + 1)..BLOCK {
            x[i] = x[i] + rows.index(comptime!(i - first - 1))[n] * known;
        }
    }
}

/// Merges the inverted blocks; `m` is used up. Starts and ends with a barrier.
#[cube]
pub(crate) fn finish_inverse(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] inverse: Inverse,
) {
    sync_cube();
    #[unroll]
    for level in 0..comptime!((inverse.chunk / BLOCK).ilog2()) {
        merge(m, t, comptime!(BLOCK << level), inverse);
    }
}
