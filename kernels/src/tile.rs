//! Tiles in shared memory, and their products in registers: all that differs between GPUs.
//!
//! ```text
//! Tile   rows of a matrix in shared memory, a little longer than they need to be, so that the
//!        numbers of a column do not share one bank
//! Acc    this unit's share of an [m, n] product in f32: a sequence of 2 x 2 fragments, each two
//!        pairs of neighbouring columns
//! mul    Acc += A B, with A and B as they lie or transposed
//! ```
//! [`Engine::Plain`] multiplies numbers; [`Engine::Mma`] lets a plane's tensor cores multiply
//! 16 x 8 x 16 blocks (`mma.m16n8k16`, whose fragments `ldmatrix` loads); [`Engine::Tf32`] multiplies f32 on
//! tensor cores, 16 x 8 x 8 at a time and each number as a sum of two, or rounded to one. Only
//! [`Grid`] and the engine know which unit holds which element: a kernel calls [`row`] and [`column`].
//!
//! ```text
//! engine, dispatch      what an engine does; the choice of one at compile time
//! plain, tf32, mma      the engines; planes: what the two with tensor cores share
//! copies, async_copies  tensors to tiles and back; without waiting
//! warpgroup             products of four planes at once, in place of `mma`'s where a GPU has them; ptx: how it is said
//! inverse               UT transform; split_inverse: on tensor cores of 16 bits
//! ```

use cubecl::prelude::*;

mod async_copies;
mod copies;
mod dispatch;
mod engine;
mod inverse;
mod mma;
mod plain;
mod planes;
mod ptx;
mod split_inverse;
mod tf32;
mod warpgroup;

pub(crate) use async_copies::{commit_copies, copy_async, copy_async_or_zeros, wait_for_copies};
pub(crate) use copies::{
    Requested, Rows, Window, lay, load, load_async, own_element, own_or, put_out, request,
    room_for, same_tile, store, store_at, tile, tile_aligned, width_of, write_out_by_four,
};
pub(crate) use dispatch::{column, inside, mul, row, row_in, slot};
pub use engine::Engine;
pub(crate) use engine::{Grid, Inverse, Mul, Zeros};
pub(crate) use inverse::{begin_inverse, finish_inverse};
pub(crate) use mma::{
    Source, execute, load_a, load_b, load_matrix, load_matrix_at, pair, store_transposed,
};
pub(crate) use planes::put_four;
pub(crate) use ptx::{computed_here, forget_unit};
pub(crate) use split_inverse::{
    INVERSE, INVERTING_UNITS, SYSTEM_MEMORY, SplitSystem, begin_split_inverse, fill_split_system,
    finish_split_inverse, split_system,
};
pub(crate) use tf32::{Parts, execute_tf32, parts, put_parts};
pub(crate) use warpgroup::{
    LeftFactor, SWIZZLED, Swizzled, add_warpgroup_product, multiply_by_warpgroups,
    resize_registers, show_factors, store_swizzled, swizzled, wait_for_factors, warpgroup_mul,
    warpgroup_mul_both,
};

/// Two neighbouring columns of one row.
pub(crate) type Pair = Vector<f32, Const<2>>;
/// A unit's share of a product: fragments of two [`Pair`]s.
pub(crate) type Acc = Sequence<Array<Pair>>;

/// Nothing yet.
#[cube]
pub(crate) fn zeros(#[comptime] fragments: usize) -> Acc {
    let mut acc = Sequence::new();
    #[unroll]
    for _ in 0..fragments {
        let mut fragment = Array::<Pair>::new(2usize);
        fragment[0] = Pair::new(0.0);
        fragment[1] = Pair::new(0.0);
        acc.push(fragment);
    }
    acc
}

/// Puts a pair into a fragment.
#[cube]
pub(crate) fn set(fragment: &mut Array<Pair>, #[comptime] h: usize, x: Pair) {
    fragment[h] = x;
}
