//! UT transform: the inverse T of a unit lower triangular matrix, by substitution in blocks of 16 and merges. T
//! gives the WY form of a chunk's delta steps: U = T (beta V) - W S with W = T E~.
//!
//! With T = (I - M)^-1 and M strictly lower triangular, T = I + M T gives the rows of a 16 x 16 block
//! one after another; and of two neighbouring blocks,
//! ```text
//! [ I - M11        ]^-1   [ T11              ]
//! [  -M21   I - M22]    = [ T22 M21 T11  T22 ]
//! ```
//! All in f32, or closer to it than the 16 bits that the result is kept in: tensor cores get each number
//! as a sum of two of 16 bits, and leave out the product of the two small ones. In f16 such numbers
//! end at 65504. A doubling series (I + M)(I + M^2).. would be shorter, and
//! wrong: with equal keys the powers of M reach 1e17 before they cancel.

use crate::chunkwise::plan::Plan;
use crate::tile::{Engine, Pair, execute, execute_tf32, parts, put_parts};
use cubecl::prelude::*;

/// Side of a block that is solved row by row.
const BLOCK: usize = 16;

/// Numbers from one row to the next, for [`invert`].
pub(crate) fn stride(plan: &Plan) -> usize {
    plan.chunk + 1
}

/// `t = (I - m)^-1`, both [C, C]; `m` is used up. E: what tensor cores multiply. Starts and ends with a
/// barrier.
#[cube]
pub(crate) fn invert<E: Float>(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] plan: Plan,
) {
    sync_cube();
    solve_blocks(m, t, plan);
    sync_cube();
    #[unroll]
    for level in 0..comptime!((plan.chunk / BLOCK).ilog2()) {
        if comptime!(plan.engine.by_planes()) {
            merge_by_planes::<E>(m, t, comptime!(BLOCK << level), plan);
        } else {
            merge(m, t, comptime!(BLOCK << level), plan);
        }
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

/// As [`merge`], by tensor cores: a plane 16 rows by 8 columns.
#[cube]
fn merge_by_planes<E: Float>(
    m: &mut SharedMemory<f32>,
    t: &mut SharedMemory<f32>,
    #[comptime] side: usize,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(stride(&plan));
    let down = comptime!(side / 16);
    let tiles = comptime!(down * (side / 8));
    let used = comptime!(plan.chunk / side / 2 * tiles);
    comptime!(assert!(used <= plan.units / 32, "a plane for each piece of the product"));
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
        add_product::<E>(&mut x, m, a, t, low * stride + j, side, plan);
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
        add_product::<E>(&mut x, t, a, m, (low + side) * stride + j, side, plan);
        put_block(t, &x, i * stride + j, stride);
    }
    sync_cube();
}

/// `x += A B` for 16 rows of A and 8 columns of B, `depth` deep, which start `a_at` and `b_at` numbers
/// into their matrices.
#[cube]
fn add_product<E: Float>(
    x: &mut Array<Pair>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(stride(&plan));
    if comptime!(plan.engine == Engine::Tf32) {
        add_tf32(x, a, a_at, b, b_at, depth, stride);
    } else {
        add_16_bits::<E>(x, a, a_at, b, b_at, depth, stride);
    }
}

/// As [`add_product`]. Who holds which number: PTX, `mma.m16n8k8`.
#[cube]
fn add_tf32(
    x: &mut Array<Pair>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] depth: usize,
    #[comptime] stride: usize,
) {
    let lane = UNIT_POS as usize % 32;
    let a_lane = a_at + lane / 4 * stride + lane % 4;
    let b_lane = b_at + lane % 4 * stride + lane / 4;
    #[unroll]
    for k in 0..comptime!(depth / 8) {
        let mut left = parts(4usize);
        #[unroll]
        for n in 0..4usize {
            let at = comptime!(n % 2 * 8 * stride + n / 2 * 4 + k * 8);
            put_parts(&mut left, n, a[a_lane + at]);
        }
        let mut right = parts(2usize);
        #[unroll]
        for n in 0..2usize {
            put_parts(&mut right, n, b[b_lane + comptime!((n * 4 + k * 8) * stride)]);
        }
        #[unroll]
        for term in 0..3usize {
            execute_tf32(&left, &right, x, term);
        }
    }
}

/// As [`add_product`]. Who holds which number: PTX, `mma.m16n8k16`.
#[cube]
fn add_16_bits<E: Float>(
    x: &mut Array<Pair>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] depth: usize,
    #[comptime] stride: usize,
) {
    let lane = UNIT_POS as usize % 32;
    let a_lane = a_at + lane / 4 * stride + lane % 4 * 2;
    let b_lane = b_at + lane % 4 * 2 * stride + lane / 4;
    #[unroll]
    for k in 0..comptime!(depth / 16) {
        let mut a_high = Array::<Vector<E, Const<2>>>::new(4usize);
        let mut a_low = Array::<Vector<E, Const<2>>>::new(4usize);
        let mut b_high = Array::<Vector<E, Const<2>>>::new(2usize);
        let mut b_low = Array::<Vector<E, Const<2>>>::new(2usize);
        #[unroll]
        for n in 0..4usize {
            let at = a_lane + comptime!(n % 2 * 8 * stride + n / 2 * 8 + k * 16);
            split::<E>(&mut a_high, &mut a_low, n, a[at], a[at + 1]);
        }
        #[unroll]
        for n in 0..2usize {
            let at = b_lane + comptime!((n * 8 + k * 16) * stride);
            split::<E>(&mut b_high, &mut b_low, n, b[at], b[at + stride]);
        }
        execute::<E>(&a_low, &b_high, x);
        execute::<E>(&a_high, &b_low, x);
        execute::<E>(&a_high, &b_high, x);
    }
}

/// Two numbers as register `n` of two fragments, whose sum they nearly are.
#[cube]
fn split<E: Float>(
    high: &mut Array<Vector<E, Const<2>>>,
    low: &mut Array<Vector<E, Const<2>>>,
    #[comptime] n: usize,
    first: f32,
    second: f32,
) {
    let mut large = Vector::<E, Const<2>>::empty();
    large[0] = E::cast_from(first);
    large[1] = E::cast_from(second);
    let mut small = Vector::<E, Const<2>>::empty();
    small[0] = E::cast_from(first - f32::cast_from(large[0]));
    small[1] = E::cast_from(second - f32::cast_from(large[1]));
    high[n] = large;
    low[n] = small;
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
