//! Tiles of a mini-batch's rows in shared memory, and products and sums of them.

use super::arguments::{Form, LANES, Operands, SUMS, Sizes, TOGETHER};
use cubecl::prelude::*;

/// Shared memory that both passes have.
#[derive(CubeType)]
pub(in crate::fused) struct Tiles {
    /// Tiles, `[b, K]`.
    pub(in crate::fused) q: SharedMemory<f32>,
    pub(in crate::fused) k: SharedMemory<f32>,
    /// Z, then X.
    pub(in crate::fused) x: SharedMemory<f32>,
    /// H, then G.
    pub(in crate::fused) g: SharedMemory<f32>,
    /// O, then N and in a pass back dO.
    pub(in crate::fused) n: SharedMemory<f32>,
    /// P, `[b, b]`.
    pub(in crate::fused) p: SharedMemory<f32>,
    /// rate and t, `[b]`.
    pub(in crate::fused) rate: SharedMemory<f32>,
    pub(in crate::fused) scale: SharedMemory<f32>,
    /// Sums over rows, `[SUMS, b]`.
    pub(in crate::fused) sums: SharedMemory<f32>,
    /// Sums of parts that meet.
    pub(in crate::fused) meeting: SharedMemory<f32>,
}

#[cube]
pub(in crate::fused) fn tiles(#[comptime] form: Form) -> Tiles {
    Tiles {
        q: tile(form),
        k: tile(form),
        x: tile(form),
        g: tile(form),
        n: tile(form),
        p: SharedMemory::<f32>::new(comptime!(form.rows * form.rows)),
        rate: SharedMemory::<f32>::new(comptime!(form.rows)),
        scale: SharedMemory::<f32>::new(comptime!(form.rows)),
        sums: SharedMemory::<f32>::new(comptime!(SUMS * form.rows)),
        meeting: SharedMemory::<f32>::new(comptime!(form.meeting())),
    }
}

/// A tile of zeros; its numbers are seen after the next barrier.
#[cube]
pub(in crate::fused) fn tile(#[comptime] form: Form) -> SharedMemory<f32> {
    let mut tile = SharedMemory::<f32>::new(comptime!(form.tile()));
    for turn in 0..comptime!(form.tile().div_ceil(form.units())) {
        let at = turn * comptime!(form.units()) + UNIT_POS as usize;
        if at < comptime!(form.tile()) {
            tile[at] = 0.0f32;
        }
    }
    tile
}

/// A unit's place, and what it needs at every token.
#[derive(CubeType, Clone, Copy)]
pub(in crate::fused) struct Own {
    /// Its column of W and of tiles.
    pub(in crate::fused) column: usize,
    /// Its run of the column's rows; of tiles it owns rows `part`, `part + parts`, ...
    pub(in crate::fused) part: usize,
    /// gamma and beta of its column.
    pub(in crate::fused) gamma: f32,
    pub(in crate::fused) beta: f32,
    pub(in crate::fused) epsilon: f32,
    /// Number of the cube's sequence and head in `[B, H]`.
    pub(in crate::fused) pair: usize,
    pub(in crate::fused) sizes: Sizes,
}

#[cube]
pub(in crate::fused) fn own(x: &Operands, sizes: Sizes, #[comptime] form: Form) -> Own {
    let column = UNIT_POS as usize % form.width;
    let part = UNIT_POS as usize / form.width;
    let of_head = CUBE_POS_Y as usize * form.width + column;
    Own {
        column,
        part,
        gamma: x.norm_weight[of_head],
        beta: x.norm_bias[of_head],
        epsilon: x.epsilon,
        pair: CUBE_POS_X as usize * sizes.heads as usize + CUBE_POS_Y as usize,
        sizes,
    }
}

/// A mini-batch of a cube's head.
#[derive(CubeType, Clone, Copy)]
pub(in crate::fused) struct MiniBatch {
    pub(in crate::fused) own: Own,
    /// Place of its first token in `[B, T, H]`.
    pub(in crate::fused) first: usize,
    /// Place of its first weight in `[B, H, T / b, K + 1, K]`.
    pub(in crate::fused) start: usize,
}

#[cube]
pub(in crate::fused) fn mini_batch(own: Own, number: usize, #[comptime] form: Form) -> MiniBatch {
    let count = own.sizes.mini_batches as usize;
    let before = (CUBE_POS_X as usize * count + number) * form.rows;
    MiniBatch {
        own,
        first: before * own.sizes.heads as usize + CUBE_POS_Y as usize,
        start: (own.pair * count + number) * comptime!(form.weights()),
    }
}

/// Place of one of its tokens in `[B, T, H]`.
#[cube]
pub(in crate::fused) fn token(of: MiniBatch, row: usize) -> usize {
    of.first + row * of.own.sizes.heads as usize
}

/// A number that a unit owns.
#[derive(CubeType, Clone, Copy)]
pub(in crate::fused) struct Number {
    /// Its row in the mini-batch.
    pub(in crate::fused) row: usize,
    /// Whether there is such a row.
    pub(in crate::fused) there: bool,
    /// Place in a tile.
    pub(in crate::fused) at: usize,
    /// Place in `[B, T, H, K]`; of rows of F numbers, nothing.
    pub(in crate::fused) from: usize,
}

#[cube]
pub(in crate::fused) fn number(of: MiniBatch, turn: usize, #[comptime] form: Form) -> Number {
    let row = turn * form.parts + of.own.part;
    Number {
        row,
        there: row < form.rows,
        at: row * comptime!(form.stride()) + of.own.column,
        from: token(of, row) * form.width + of.own.column,
    }
}

/// The part of W, or of its transpose, that a unit owns: numbers of its column, as `at` begins it.
#[cube]
pub(in crate::fused) fn load_run(
    weights: &Array<f32>,
    at: usize,
    own: Own,
    #[comptime] transposed: bool,
    #[comptime] form: Form,
) -> Array<f32> {
    let mut run = Array::<f32>::new(comptime!(form.run()));
    #[unroll]
    for r in 0..comptime!(form.run()) {
        let row = own.part * comptime!(form.run()) + r;
        let inside = min(row, comptime!(form.width - 1));
        let place = if comptime!(transposed) {
            own.column * form.width + inside
        } else {
            inside * form.width + own.column
        };
        let number = weights[at + place];
        run[r] = select(row < form.width, number, 0.0f32);
    }
    run
}

/// Writes a unit's part of W from `at` on, and its number of c behind it.
#[cube]
pub(in crate::fused) fn store_run(
    to: &mut Array<f32>,
    at: usize,
    run: &Array<f32>,
    bias: f32,
    own: Own,
    #[comptime] form: Form,
) {
    #[unroll]
    for r in 0..comptime!(form.run()) {
        let row = own.part * comptime!(form.run()) + r;
        if row < form.width {
            to[at + row * form.width + own.column] = run[r];
        }
    }
    if own.part == 0 {
        to[at + comptime!(form.width * form.width) + own.column] = bias;
    }
}

/// A tile times a matrix, of which a unit has `run`, plus `bias` of its column in every row. Ends with a barrier.
#[cube]
pub(in crate::fused) fn multiply(
    to: &mut SharedMemory<f32>,
    x: &SharedMemory<f32>,
    run: &Array<f32>,
    bias: f32,
    meeting: &mut SharedMemory<f32>,
    #[comptime] form: Form,
) {
    let (stride, units) = comptime!((form.stride(), form.units()));
    let column = UNIT_POS as usize % form.width;
    let own_part = UNIT_POS as usize / form.width;
    let first = own_part * comptime!(form.run());
    for block in 0..comptime!(form.rows.div_ceil(TOGETHER)) {
        #[unroll]
        for u in 0..TOGETHER {
            let row = min(block * TOGETHER + u, comptime!(form.rows - 1));
            let at = row * stride + first;
            let mut sum = 0.0f32;
            #[unroll]
            for r in 0..comptime!(form.run()) {
                sum += x[at + r] * run[r];
            }
            meeting[comptime!(u * units) + UNIT_POS as usize] = sum;
        }
        sync_cube();
        #[unroll]
        for turn in 0..comptime!(TOGETHER.div_ceil(form.parts)) {
            let u = comptime!(turn * form.parts) + own_part;
            let row = block * TOGETHER + u;
            if u < TOGETHER && row < form.rows {
                let mut sum = bias;
                #[unroll]
                for part in 0..comptime!(form.parts) {
                    sum += meeting[u * units + comptime!(part * form.width) + column];
                }
                to[row * stride + column] = sum;
            }
        }
        sync_cube();
    }
}

/// Adds `x^T y` of two tiles to a matrix, of which a unit has `run`.
#[cube]
pub(in crate::fused) fn add_product(
    run: &mut Array<f32>,
    x: &SharedMemory<f32>,
    y: &SharedMemory<f32>,
    own: Own,
    #[comptime] form: Form,
) {
    let stride = comptime!(form.stride());
    let first = own.part * comptime!(form.run());
    for row in 0..comptime!(form.rows) {
        let number = y[row * stride + own.column];
        #[unroll]
        for r in 0..comptime!(form.run()) {
            run[r] += x[row * stride + first + r] * number;
        }
    }
}

/// The sum of a tile's column.
#[cube]
pub(in crate::fused) fn column_sum(x: &SharedMemory<f32>, own: Own, #[comptime] form: Form) -> f32 {
    let mut sum = 0.0f32;
    for row in 0..comptime!(form.rows) {
        sum += x[row * comptime!(form.stride()) + own.column];
    }
    sum
}

/// Where [`row_sums`] puts its sums, and of what they are: compile-time values.
#[derive(Clone, Copy)]
pub(in crate::fused) struct RowSums {
    /// Place in [`Tiles::sums`].
    pub(in crate::fused) place: usize,
    /// Whether products of two tiles are summed, or the first one's numbers.
    pub(in crate::fused) products: bool,
    pub(in crate::fused) form: Form,
}

/// Sums over each row, of products of two tiles or of the first tile alone. Ends with a barrier.
#[cube]
pub(in crate::fused) fn row_sums(
    sums: &mut SharedMemory<f32>,
    x: &SharedMemory<f32>,
    y: &SharedMemory<f32>,
    meeting: &mut SharedMemory<f32>,
    #[comptime] of: RowSums,
) {
    let (rows, width, stride) = comptime!((of.form.rows, of.form.width, of.form.stride()));
    let units = comptime!(of.form.units());
    for turn in 0..comptime!((rows * LANES).div_ceil(units)) {
        let at = turn * units + UNIT_POS as usize;
        if at < comptime!(rows * LANES) {
            let first = at / LANES * stride;
            let lane = at % LANES;
            let mut sum = 0.0f32;
            for step in 0..comptime!(width.div_ceil(LANES)) {
                let column = step * LANES + lane;
                if column < width {
                    let number = x[first + column];
                    let by =
                        if comptime!(of.products) { y[first + column] } else { 1.0f32.runtime() };
                    sum += number * by;
                }
            }
            meeting[at] = sum;
        }
    }
    sync_cube();
    for turn in 0..comptime!(rows.div_ceil(units)) {
        let row = turn * units + UNIT_POS as usize;
        if row < rows {
            let mut sum = 0.0f32;
            #[unroll]
            for lane in 0..LANES {
                sum += meeting[row * LANES + lane];
            }
            sums[comptime!(of.place * rows) + row] = sum;
        }
    }
    sync_cube();
}

/// Products of the rows of two tiles, `[b, b]`, plus `more`; zeros above the diagonal. The caller waits.
#[cube]
pub(in crate::fused) fn meet(
    to: &mut SharedMemory<f32>,
    x: &SharedMemory<f32>,
    y: &SharedMemory<f32>,
    more: f32,
    #[comptime] form: Form,
) {
    let (rows, stride, units) = comptime!((form.rows, form.stride(), form.units()));
    for turn in 0..comptime!((rows * rows).div_ceil(units)) {
        let at = turn * units + UNIT_POS as usize;
        if at < comptime!(rows * rows) {
            let i = at / rows;
            let j = at % rows;
            let mut sum = more;
            if j <= i {
                for column in 0..comptime!(form.width) {
                    sum += x[i * stride + column] * y[j * stride + column];
                }
            }
            to[at] = select(j <= i, sum, 0.0f32);
        }
    }
}
