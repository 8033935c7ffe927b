//! Products of a mini-batch's rows with matrices in memory, and sums of outer products into them.

use super::super::ttt_linear::arguments::TOGETHER;
use super::arguments::Product;
use cubecl::prelude::*;

/// `x W + c` or `x W^T`, or what is there and `x W` or `x W^T`, for the matrix that begins at `at`. Ends with a barrier.
#[cube]
pub(super) fn product(
    to: &mut SharedMemory<f32>,
    x: &SharedMemory<f32>,
    weights: &Array<f32>,
    at: usize,
    meeting: &mut SharedMemory<f32>,
    #[comptime] product: Product,
) {
    let (inputs, outputs) = comptime!((product.from.width, product.to.width));
    let (rows, stride) = comptime!((product.from.rows, product.from.stride()));
    let (run, count) = comptime!((product.run(), product.at_once()));
    let column = UNIT_POS as usize % outputs;
    let part = UNIT_POS as usize / outputs;
    let first = part * run;
    let end = min(first + run, inputs);
    for block in 0..comptime!(rows.div_ceil(count)) {
        let mut sums = Array::<f32>::new(count);
        #[unroll]
        for u in 0..count {
            sums[u] = 0.0f32;
        }
        for input in first..end {
            let place = if comptime!(product.transposed()) {
                column * inputs + input
            } else {
                input * outputs + column
            };
            let weight = weights[at + place];
            #[unroll]
            for u in 0..count {
                let row = min(block * count + u, comptime!(rows - 1));
                sums[u] += x[row * stride + input] * weight;
            }
        }
        let mut bias = 0.0f32;
        if comptime!(!product.transposed() && !product.added()) {
            bias = weights[at + comptime!(product.matrix()) + column];
        }
        #[unroll]
        for turn in 0..comptime!(count.div_ceil(TOGETHER)) {
            let from = comptime!(turn * TOGETHER);
            join(to, &sums, from, block * count + from, bias, meeting, product);
        }
    }
}

/// Adds up the parts' sums of rows from `row` on, `sums[from]` of each unit and some behind it. Ends with a barrier.
#[cube]
fn join(
    to: &mut SharedMemory<f32>,
    sums: &Array<f32>,
    #[comptime] from: usize,
    row: usize,
    bias: f32,
    meeting: &mut SharedMemory<f32>,
    #[comptime] product: Product,
) {
    let (rows, stride, units) =
        comptime!((product.to.rows, product.to.stride(), product.to.units()));
    let (outputs, parts) = comptime!((product.to.width, product.to.parts));
    let there = comptime!(TOGETHER.min(product.at_once() - from));
    let column = UNIT_POS as usize % outputs;
    let part = UNIT_POS as usize / outputs;
    #[unroll]
    for u in 0..there {
        meeting[comptime!(u * units) + UNIT_POS as usize] = sums[comptime!(from + u)];
    }
    sync_cube();
    #[unroll]
    for turn in 0..comptime!(there.div_ceil(parts)) {
        let u = comptime!(turn * parts) + part;
        if u < there && row + u < rows {
            let mut sum = bias;
            #[unroll]
            for part in 0..parts {
                sum += meeting[u * units + comptime!(part * outputs) + column];
            }
            let place = (row + u) * stride + column;
            if comptime!(product.added()) {
                sum += to[place];
            }
            to[place] = sum;
        }
    }
    sync_cube();
}

/// Adds `x^T y` to the matrix that begins at `at` and, where it has a bias, the sum of y's rows to that. A unit has
/// the same numbers of a matrix in every call; others read them after a barrier of the storage.
#[cube]
pub(super) fn add_outer(
    weights: &mut Array<f32>,
    at: usize,
    x: &SharedMemory<f32>,
    y: &SharedMemory<f32>,
    #[comptime] bias: bool,
    #[comptime] product: Product,
) {
    let (inputs, outputs) = comptime!((product.from.width, product.to.width));
    let (rows, stride, of_y) =
        comptime!((product.from.rows, product.from.stride(), product.to.stride()));
    let (run, count) = comptime!((product.run(), product.at_once()));
    let column = UNIT_POS as usize % outputs;
    let part = UNIT_POS as usize / outputs;
    let first = part * run;
    let end = min(first + run, inputs);
    for block in 0..comptime!(rows.div_ceil(count)) {
        let mut numbers = Array::<f32>::new(count);
        #[unroll]
        for u in 0..count {
            let row = block * count + u;
            let inside = min(row, comptime!(rows - 1));
            numbers[u] = select(row < rows, y[inside * of_y + column], 0.0f32);
        }
        for input in first..end {
            let mut sum = 0.0f32;
            #[unroll]
            for u in 0..count {
                let row = min(block * count + u, comptime!(rows - 1));
                sum += x[row * stride + input] * numbers[u];
            }
            weights[at + input * outputs + column] += sum;
        }
        if comptime!(bias) {
            if part == 0 {
                let mut sum = 0.0f32;
                #[unroll]
                for u in 0..count {
                    sum += numbers[u];
                }
                weights[at + comptime!(product.matrix()) + column] += sum;
            }
        }
    }
}

/// Copies `count` numbers from one place in memory to another.
#[cube]
pub(super) fn copy(
    from: &Array<f32>,
    from_at: usize,
    to: &mut Array<f32>,
    to_at: usize,
    #[comptime] count: usize,
    #[comptime] units: usize,
) {
    for turn in 0..comptime!(count.div_ceil(units)) {
        let place = turn * units + UNIT_POS as usize;
        if place < count {
            to[to_at + place] = from[from_at + place];
        }
    }
}
