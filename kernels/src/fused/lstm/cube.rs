//! The shares that units have of a cube's cells and columns, and the product that both passes make of them.

use super::arguments::{Form, GATES, Sizes};
use cubecl::prelude::*;

/// The cell that is a unit's own; units that have none stand beside the first one of the cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Own {
    /// The cube's head, and its first sequence.
    pub(super) head: usize,
    pub(super) first: usize,
    /// Whether the unit owns a cell of the cube.
    pub(super) cell: bool,
    /// Whether that cell is of a sequence that is there.
    pub(super) there: bool,
    /// Place of the cell's sequence in the cube, times 4 D, and its place in the head.
    pub(super) gates: usize,
    pub(super) place: usize,
    /// b.
    pub(super) sequence: usize,
    /// Place of the cell in `[B, H, D]`.
    pub(super) at: usize,
    pub(super) sizes: Sizes,
}

#[cube]
pub(super) fn own(sizes: Sizes, #[comptime] form: Form) -> Own {
    let (width, cells, together) = comptime!((form.width, form.cells(), form.together));
    let (batch, heads) = (sizes.batch as usize, sizes.heads as usize);
    let (head, first) = (CUBE_POS_Y as usize, CUBE_POS_X as usize * together);
    let cell = (UNIT_POS as usize) < cells;
    let unit = select(cell, UNIT_POS as usize, 0usize);
    let slot = unit / width;
    let place = unit % width;
    let sequence = min(first + slot, batch - 1);
    Own {
        head,
        first,
        cell,
        there: cell && first + slot < batch,
        gates: slot * comptime!(GATES * form.width),
        place,
        sequence,
        at: (sequence * heads + head) * width + place,
        sizes,
    }
}

/// Place of a token of a sequence in `[B, T, H]`.
#[cube]
pub(super) fn row(own: Own, sequence: usize, t: usize) -> usize {
    (sequence * own.sizes.tokens as usize + t) * own.sizes.heads as usize + own.head
}

/// `tanh(z)`: a polynomial near 0, where a quotient of exponentials would lose digits.
#[cube]
pub(super) fn tanh(z: f32) -> f32 {
    let square = z * z;
    let mut sum = 2.063_909e-2f32 - 5.704_988_7e-3f32 * square;
    sum = sum * square - 5.373_971_5e-2f32;
    sum = sum * square + 1.333_144_2e-1f32;
    sum = sum * square - 3.333_328e-1f32;
    let near = sum * square * z + z;
    let size = f32::abs(z);
    let e = f32::exp(-(size + size));
    let far = (1.0f32 - e) / (1.0f32 + e);
    let far = select(z < 0.0f32, -far, far);
    select(size < 0.625f32, near, far)
}

/// The column of `[4 D]` that a unit has in a turn, the last one where there is none.
#[cube]
pub(super) fn column(#[comptime] turn: usize, #[comptime] form: Form) -> usize {
    min(comptime!(turn * form.units) + UNIT_POS as usize, comptime!(GATES * form.width - 1))
}

/// Whether there is one.
#[cube]
pub(super) fn has_column(#[comptime] turn: usize, #[comptime] form: Form) -> bool {
    comptime!(turn * form.units) + (UNIT_POS as usize) < comptime!(GATES * form.width)
}

/// `array[at]` where there is such an array, else `otherwise`.
#[cube]
pub(super) fn number_or(
    array: &Array<f32>,
    at: usize,
    otherwise: f32,
    #[comptime] given: bool,
) -> f32 {
    let mut number = otherwise;
    if comptime!(given) {
        number = array[at];
    }
    number
}

/// The numbers that a unit multiplies: D in shared memory, and D weights, `stride` apart.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Terms {
    /// Place of the first number.
    pub(super) number: usize,
    /// Place of the first weight.
    pub(super) weight: usize,
    pub(super) stride: usize,
}

/// How sequences share the weights: compile-time values of [`accumulate`].
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub(super) form: Form,
    /// From a number of one sequence to that of the next.
    pub(super) apart: usize,
}

/// The weights of a unit, where it holds them.
#[cube]
pub(super) fn held(weights: &Array<f32>, terms: Terms, #[comptime] form: Form) -> Array<f32> {
    let mut part = Array::<f32>::new(comptime!(if form.held() { form.width } else { 1 }));
    if comptime!(form.held()) {
        #[unroll]
        for e in 0..comptime!(form.width) {
            part[e] = weights[terms.weight + e * terms.stride];
        }
    }
    part
}

/// Adds the products of its terms to the sums of a unit, one for each sequence.
#[cube]
pub(super) fn accumulate(
    sums: &mut Array<f32>,
    numbers: &SharedMemory<f32>,
    part: &Array<f32>,
    weights: &Array<f32>,
    terms: Terms,
    #[comptime] shared: Shared,
) {
    let (form, apart) = comptime!((shared.form, shared.apart));
    if comptime!(form.held()) {
        #[unroll]
        for e in 0..comptime!(form.width) {
            #[unroll]
            for s in 0..comptime!(form.together) {
                sums[s] += numbers[terms.number + comptime!(s * apart + e)] * part[e];
            }
        }
    } else {
        for e in 0..comptime!(form.width) {
            let weight = weights[terms.weight + e * terms.stride];
            #[unroll]
            for s in 0..comptime!(form.together) {
                sums[s] += numbers[terms.number + comptime!(s * apart) + e] * weight;
            }
        }
    }
}
