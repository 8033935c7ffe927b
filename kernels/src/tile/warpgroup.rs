//! Products of warpgroups: `wgmma`, of compute capability 9.0 alone.
//!
//! A warpgroup is four planes side by side. Each has 16 rows of the left factor and of the product in its registers, laid
//! out as for `mma.m16n8k16`. Tensor cores read the right factor out of shared memory themselves, once for all four planes,
//! where `ldmatrix` would read it for each plane.
//!
//! ```text
//! swizzled tile   64 columns of all rows, 128 bytes a row, then the next 64 columns. Of a row's eight parts of 16 bytes
//!                 part p lies at place p ^ (row % 8), so that neither rows nor columns share banks
//! ```
//! Source: PTX, `wgmma.mma_async`, its matrix descriptor and its swizzling by 128 bytes.

use super::Acc;
use super::async_copies::wait_for_own_copies;
use super::ptx::{local, name, ptx, use_tile};
use cubecl::ir::{ElemType, FloatKind, Scope, Variable};
use cubecl::prelude::*;

/// Bytes to which a swizzled tile is aligned: eight of its rows.
pub(crate) const SWIZZLED: usize = 1024;

/// Vectors of 8 numbers in a row of a swizzled tile.
const ROW: usize = 8;

/// Vectors of 8 numbers from a swizzled tile's start to vector `column` of row `row`.
#[cube]
pub(crate) fn swizzled(row: usize, column: usize, #[comptime] rows: usize) -> usize {
    column / ROW * comptime!(rows * ROW) + row * ROW + ((column % ROW) ^ (row % ROW))
}

/// A right factor: a swizzled tile of so many rows, read as it is or transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Swizzled {
    pub rows: usize,
    pub transposed: bool,
}

impl Swizzled {
    /// Vectors from the tile's start to step `k` of 16 that a product sums over.
    fn step(self, k: usize) -> usize {
        match self.transposed {
            true => k / 4 * self.rows * ROW + k % 4 * 2,
            false => 16 * k * ROW,
        }
    }

    /// The descriptor without an address, in vectors of 16 bytes: from 64 columns to the next, where those are the product's
    /// ("leading"), and from eight rows to the next ("stride").
    fn descriptor(self) -> u64 {
        let leading = if self.transposed { 1 } else { self.rows * ROW };
        ((leading as u64) << 16) | ((8 * ROW as u64) << 32) | (1 << 62)
    }
}

/// `acc += left right`: a plane has 16 of 64 rows of the product and of `left`, whose numbers are `16 left.len()` a row.
/// Every plane of a warpgroup calls it. `right` begins `at` numbers into its tile.
#[cube]
pub(crate) fn warpgroup_mul<E: Float, N: Size>(
    acc: &mut Acc,
    left: &Sequence<Array<Vector<E, Const<2>>>>,
    right: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] layout: Swizzled,
) {
    let width = N::value();
    multiply::<E, N>(acc, left, right, at / width, layout);
}

#[cube]
#[allow(unused_variables)] // an intrinsic's
fn multiply<E: Float, N: Size>(
    acc: &mut Acc,
    left: &Sequence<Array<Vector<E, Const<2>>>>,
    right: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] layout: Swizzled,
) {
    intrinsic!(|scope| {
        let acc: Vec<_> = acc.iter_cloned().map(|fragment| *fragment.expand).collect();
        let left: Vec<_> = left.iter_cloned().map(|factor| *factor.expand).collect();
        statement(scope, &acc, &left, [*right.expand, *at.expand], layout);
    })
}

/// All steps of a product, and the wait for them: until then nobody may touch their registers.
fn statement(
    scope: &mut Scope,
    acc: &[Variable],
    left: &[Variable],
    [tile, at]: [Variable; 2],
    layout: Swizzled,
) {
    let numbers = match tile.ty.elem_type() {
        ElemType::Float(FloatKind::BF16) => "bf16",
        ElemType::Float(FloatKind::F16) => "f16",
        other => unreachable!("warpgroups multiply 16 bits, not {other}"),
    };
    use_tile(scope, tile);
    let address = format!("{} + {}", name(tile), local(scope, at));
    let registers = |arrays: &[Variable], constraint: &str, what: &str| {
        let each = |array: &Variable| {
            let array = name(*array);
            (0..4)
                .map(move |n| format!("\"{constraint}\"(reinterpret_cast<{what}*>({array})[{n}])"))
        };
        arrays.iter().flat_map(each).collect::<Vec<_>>().join(", ")
    };
    let list = |from: usize, count: usize| {
        (from..from + count).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ")
    };
    let [products, factors] = [4 * acc.len(), 4 * left.len()];
    let right = products + factors;
    let steps = (0..left.len()).map(|k| {
        format!(
            "add.s64 right, %{right}, {}; wgmma.mma_async.sync.aligned.m64n{}k16.f32.{numbers}.{numbers} \
             {{{}}}, {{{}}}, right, all, 1, 1, {}; ",
            layout.step(k),
            8 * acc.len(),
            list(0, products),
            list(products + 4 * k, 4),
            u32::from(!layout.transposed),
        )
    });
    let steps: String = steps.collect();
    ptx(
        scope,
        &format!(
            "asm volatile(\"{{ .reg .pred all; .reg .b64 right; setp.eq.s64 all, %{right}, %{right}; \
             wgmma.fence.sync.aligned; {steps}wgmma.commit_group.sync.aligned; \
             wgmma.wait_group.sync.aligned 0; }}\" : {} : {}, \"l\"({}ull | \
             ((static_cast<uint32>(__cvta_generic_to_shared({address})) & 0x3ffff) >> 4)) : \"memory\");",
            registers(acc, "+f", "float"),
            registers(left, "r", "const uint32"),
            layout.descriptor(),
        ),
    );
}

/// As [`wait_for_copies`](super::wait_for_copies), of tiles that tensor cores read themselves.
#[cube]
pub(crate) fn wait_for_factors(#[comptime] later: usize) {
    wait_for_own_copies(later);
    show_to_tensor_cores();
    sync_cube();
}

/// Shows tensor cores what this unit has written to shared memory: `wgmma` reads by another way than units do.
#[cube]
fn show_to_tensor_cores() {
    intrinsic!(|scope| ptx(
        scope,
        "asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\");"
    ))
}
