//! The kernel of [`super`]: one cube computes one tile of the output.
//!
//! ```text
//! prologue     stages 0 .. S - 2 are on their way
//! mainloop     step i: wait for stage i; every unit is through with stage i - 1, which takes step i + S - 1
//!              fragments of A and B from shared memory, 16 x 8 products on tensor cores
//! epilogue     accumulators in 32-byte sectors to the output
//! ```
//! Copies are asynchronous, 16 bytes each, and a step's are a group. Fragments of 16 bits come by
//! `ldmatrix`, of 32 bits by single loads. Rows in shared memory are padded so that neither meets bank
//! conflicts.

use super::form::{Form, Side};
use crate::tile::{
    Acc, Pair, Source, commit_copies, copy_async_or_zeros, execute, load_a, load_b, pair, put_four,
    wait_for_copies, zeros,
};
use cubecl::ir::StorageType;
use cubecl::prelude::cmma::MmaDefinition;
use cubecl::prelude::*;

/// Rows of tiles that cubes go through together, column by column: they share what they read through L2.
const GROUP: usize = 8;

/// Both sides in device memory.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Sides<E: Float, N: Size> {
    pub lhs: Array<Vector<E, N>>,
    pub rhs: Array<Vector<E, N>>,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Numbers from one stored row to the next.
    pub lhs_stride: u32,
    pub rhs_stride: u32,
    /// Numbers along K of a slice (split-K).
    pub k_slice: u32,
}

/// The rows of A, or the columns of B, that a cube multiplies.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// First row of A, or column of B.
    first: usize,
    /// Where the matrix ends.
    end: usize,
    /// Numbers from one stored row to the next.
    stride: usize,
}

/// A cube's tile of the output: rows of A times columns of B.
#[derive(CubeType, Clone, Copy)]
struct OutputTile {
    a: Part,
    b: Part,
}

/// A range of K.
#[derive(CubeType, Clone, Copy)]
struct Range {
    from: usize,
    to: usize,
}

/// Both sides in shared memory, every stage: the only shared memory of the kernel.
#[derive(CubeType)]
struct Stages<E: Float, N: Size> {
    lhs: SharedMemory<Vector<E, N>>,
    rhs: SharedMemory<Vector<E, N>>,
}

/// `out = lhs rhs` over `k_slice` of the sum for each slice; `out` is `[slices, m, n]`.
#[cube(launch_unchecked)]
pub(super) fn multiply<E: Float, O: Float, N: Size, W: Size>(
    sides: &Sides<E, N>,
    out: &mut Array<Vector<O, W>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(E, O)] _types: [StorageType; 2],
    #[define(N, W)] _widths: [usize; 2],
) {
    let tile = output_tile(sizes, form);
    let slice = CUBE_POS_Y as usize;
    let from = slice * sizes.k_slice as usize;
    let range = Range { from, to: min(from + sizes.k_slice as usize, sizes.k as usize) };
    let mut stages = stages::<E, N>(form);
    let mut acc = zeros(comptime!(form.fragments()));
    mainloop::<E, N>(&mut acc, &mut stages, sides, &tile, &range, form);
    epilogue::<O, W>(&acc, out, &tile, slice * sizes.m as usize, form);
}

/// The tile of this cube.
#[cube]
fn output_tile(sizes: Sizes, #[comptime] form: Form) -> OutputTile {
    let m = sizes.m as usize;
    let n = sizes.n as usize;
    let (down, across) = tile_position(m, n, form);
    OutputTile {
        a: Part {
            first: down * comptime!(form.tiling.m),
            end: m,
            stride: sizes.lhs_stride as usize,
        },
        b: Part {
            first: across * comptime!(form.tiling.n),
            end: n,
            stride: sizes.rhs_stride as usize,
        },
    }
}

/// Tiles above and to the left of this cube's.
#[cube]
fn tile_position(m: usize, n: usize, #[comptime] form: Form) -> (usize, usize) {
    let down = (m - 1) / comptime!(form.tiling.m) + 1;
    let across = (n - 1) / comptime!(form.tiling.n) + 1;
    let cube = CUBE_POS_X as usize;
    let first = cube / (across * GROUP) * GROUP;
    let height = min(down - first, GROUP);
    let within = cube % (across * GROUP);
    (first + within % height, within / height)
}

/// Shared memory, as [`Form::staged_numbers`] describes it.
#[cube]
fn stages<E: Float, N: Size>(#[comptime] form: Form) -> Stages<E, N> {
    let [lhs, rhs] = comptime!(form.staged_numbers());
    Stages::<E, N> { lhs: room::<E, N>(lhs), rhs: room::<E, N>(rhs) }
}

#[cube]
fn room<E: Float, N: Size>(#[comptime] numbers: usize) -> SharedMemory<Vector<E, N>> {
    let width = N::value();
    SharedMemory::<Vector<E, N>>::new_aligned(comptime!(numbers / width), 16usize)
}

/// Prologue and main loop: adds up the products of a range of K.
#[cube]
fn mainloop<E: Float, N: Size>(
    acc: &mut Acc,
    stages: &mut Stages<E, N>,
    sides: &Sides<E, N>,
    tile: &OutputTile,
    range: &Range,
    #[comptime] form: Form,
) {
    let count = comptime!(form.tiling.stages);
    let depth = comptime!(form.tiling.k);
    let steps = (max(range.to, range.from) - range.from + comptime!(depth - 1)) / depth;
    #[unroll]
    for stage in 0..comptime!(count - 1) {
        if stage < steps {
            let k = Range { from: range.from + comptime!(stage * depth), to: range.to };
            copy_stage::<E, N>(stages, sides, tile, &k, stage, form);
        }
        // A step that has nothing to copy has a group too, so that waits can count them.
        commit_copies();
    }
    for turn in 0..(steps + comptime!(count - 1)) / count {
        #[unroll]
        for stage in 0..count {
            let step = turn * count + stage;
            if step < steps {
                // Every unit is through with the stage that the next copies go to.
                wait_for_copies(comptime!(count - 2));
                let next = step + comptime!(count - 1);
                let free = comptime!((stage + count - 1) % count);
                if next < steps {
                    let k = Range { from: range.from + next * depth, to: range.to };
                    copy_stage::<E, N>(stages, sides, tile, &k, free, form);
                }
                commit_copies();
                if comptime!(form.half) {
                    add_half::<E, N>(acc, stages, stage, form);
                } else {
                    add_tf32::<E, N>(acc, stages, stage, form);
                }
            }
        }
    }
}

/// Starts copying one stage of both sides.
#[cube]
fn copy_stage<E: Float, N: Size>(
    stages: &mut Stages<E, N>,
    sides: &Sides<E, N>,
    tile: &OutputTile,
    k: &Range,
    #[comptime] stage: usize,
    #[comptime] form: Form,
) {
    copy_side::<E, N>(&mut stages.lhs, &sides.lhs, &tile.a, k, stage, comptime!(form.lhs_side()));
    copy_side::<E, N>(&mut stages.rhs, &sides.rhs, &tile.b, k, stage, comptime!(form.rhs_side()));
}

/// Starts copying one stage of a side; pieces past the end are filled with zeros.
#[cube]
fn copy_side<E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    source: &Array<Vector<E, N>>,
    part: &Part,
    k: &Range,
    #[comptime] stage: usize,
    #[comptime] side: Side,
) {
    let width = N::value();
    let pieces = comptime!(side.columns / side.piece);
    let down = comptime!(side.units / pieces);
    let i = UNIT_POS as usize / pieces;
    let c = UNIT_POS as usize % pieces * comptime!(side.piece);
    let along_k = comptime!(side.along_k);
    let stride = part.stride / width;
    let (row, column, row_end, column_end, from) = if along_k {
        let row = part.first + i;
        (row, k.from + c, part.end, k.to, row * stride + c / width + k.from / width)
    } else {
        let column = part.first + c;
        (k.from + i, column, k.to, part.end, i * stride + column / width + k.from * stride)
    };
    let to = (i * comptime!(side.stride) + c) / width;
    let step = stride * down;
    let inside = column < column_end;
    #[unroll]
    for turn in 0..comptime!(side.rows / down) {
        let there = inside && row + comptime!(turn * down) < row_end;
        let kept = comptime!(stage * side.numbers() + turn * down * side.stride);
        let from = from + step * turn;
        let to = to + comptime!(kept / width);
        copy_async_or_zeros(source, from, tile, to, there, 16usize);
    }
}

/// First row and first column of this plane in the cube's tile.
#[cube]
fn plane_at(#[comptime] form: Form) -> (usize, usize) {
    let plane = UNIT_POS as usize / 32;
    let down = comptime!(form.tiling.planes[0]);
    (plane % down * comptime!(form.plane_rows()), plane / down * comptime!(form.plane_columns()))
}

/// One stage's products of 16-bit numbers.
#[cube]
fn add_half<E: Float, N: Size>(
    acc: &mut Acc,
    stages: &Stages<E, N>,
    #[comptime] stage: usize,
    #[comptime] form: Form,
) {
    let (i, j) = plane_at(form);
    let (a, b) = comptime!((form.lhs_side(), form.rhs_side()));
    let rows = comptime!(form.plane_rows() / 16);
    let columns = comptime!(form.plane_columns() / 16);
    #[unroll]
    for step in 0..comptime!(form.tiling.k / 16) {
        let k = comptime!(step * 16);
        let mut left = Sequence::<Array<Vector<E, Const<2>>>>::new();
        #[unroll]
        for r in 0..rows {
            let at = comptime!(stage * a.numbers()).runtime();
            let (stride, transposed) = comptime!((a.stride, !a.along_k));
            let from = comptime!(Source { down: r * 16, right: k, stride, transposed });
            left.push(load_a::<E, N>(&stages.lhs, at, i, from));
        }
        #[unroll]
        for c in 0..columns {
            let at = comptime!(stage * b.numbers()).runtime();
            let (stride, transposed) = comptime!((b.stride, b.along_k));
            let from = comptime!(Source { down: k, right: c * 16, stride, transposed });
            let block = load_b::<E, N>(&stages.rhs, at, j, from);
            #[unroll]
            for r in 0..rows {
                let f = comptime!(2 * (r * columns + c));
                execute::<E>(left.index(r), &pair(&block, 0usize, 1usize), acc.index_mut(f));
                let f = comptime!(f + 1);
                execute::<E>(left.index(r), &pair(&block, 2usize, 3usize), acc.index_mut(f));
            }
        }
    }
}

/// One stage's products of 32-bit numbers, which tensor cores read as TF32.
#[cube]
fn add_tf32<E: Float, N: Size>(
    acc: &mut Acc,
    stages: &Stages<E, N>,
    #[comptime] stage: usize,
    #[comptime] form: Form,
) {
    let (i, j) = plane_at(form);
    let (a, b) = comptime!((form.lhs_side(), form.rhs_side()));
    let rows = comptime!(form.plane_rows() / 16);
    let columns = comptime!(form.plane_columns() / 8);
    let lane = UNIT_POS as usize % 32;
    let from_a = a_index(i + lane / 4, lane % 4, a) + comptime!(stage * a.numbers());
    let from_b = a_index(j + lane / 4, lane % 4, b) + comptime!(stage * b.numbers());
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 8usize);
    #[unroll]
    for step in 0..comptime!(form.tiling.k / 8) {
        let mut left = Sequence::<Array<Vector<E, Const<1>>>>::new();
        #[unroll]
        for r in 0..rows {
            let mut block = Array::<Vector<E, Const<1>>>::new(4usize);
            #[unroll]
            for part in 0..4usize {
                let at = comptime!(a.offset(r * 16 + part % 2 * 8, step * 8 + part / 2 * 4));
                block[part] = Vector::<E, Const<1>>::cast_from(stages.lhs[from_a + at]);
            }
            left.push(block);
        }
        #[unroll]
        for c in 0..columns {
            let mut block = Array::<Vector<E, Const<1>>>::new(2usize);
            #[unroll]
            for part in 0..2usize {
                let at = comptime!(b.offset(c * 8, step * 8 + part * 4));
                block[part] = Vector::<E, Const<1>>::cast_from(stages.rhs[from_b + at]);
            }
            #[unroll]
            for r in 0..rows {
                let f = comptime!(r * columns + c);
                mma.execute_inplace(left.index(r), &block, acc.index_mut(f));
            }
        }
    }
}

/// Where row `outer` of A, or column `outer` of B, has its number `k`.
#[cube]
fn a_index(outer: usize, k: usize, #[comptime] side: Side) -> usize {
    if comptime!(side.along_k) {
        outer * comptime!(side.stride) + k
    } else {
        k * comptime!(side.stride) + outer
    }
}

/// Writes the accumulators to the tile, whose matrix begins at row `above` of the output.
#[cube]
fn epilogue<O: Float, W: Size>(
    acc: &Acc,
    out: &mut Array<Vector<O, W>>,
    tile: &OutputTile,
    above: usize,
    #[comptime] form: Form,
) {
    let (i, j) = plane_at(form);
    let lane = UNIT_POS as usize % 32;
    let width = W::value();
    let columns = comptime!(form.plane_columns() / 8);
    // Two fragments at a time, where lanes exchange pairs to write four numbers each.
    let together = comptime!(if form.narrow_out { 2 } else { 1 });
    let own =
        if comptime!(form.narrow_out) { lane % 2 * 8 + lane % 4 / 2 * 4 } else { lane % 4 * 2 };
    let first = tile.b.first + j + own;
    let top = tile.a.first + i + lane / 4;
    let from = ((above + top) * tile.b.end + first) / width;
    let step = 8 * tile.b.end / width;
    #[unroll]
    for r in 0..comptime!(form.plane_rows() / 16) {
        #[unroll]
        for h in 0..2usize {
            let inside = top + comptime!(r * 16 + h * 8) < tile.a.end;
            let from = from + step * comptime!(2 * r + h);
            #[unroll]
            for c in 0..comptime!(columns / together) {
                let there = inside && first + comptime!(c * together * 8) < tile.b.end;
                let at = from + comptime!(c * together * 8 / width);
                let f = comptime!(r * columns + c * together);
                if comptime!(form.narrow_out) {
                    let other = acc.index(comptime!(f + 1))[h];
                    let one: Pair = acc.index(f)[h];
                    put_four::<O, W>(out, at, one, other, there, 1u32);
                } else if there {
                    out[at] = Vector::<O, W>::cast_from(acc.index(f)[h]);
                }
            }
        }
    }
}
