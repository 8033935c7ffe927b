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

use super::async_copies::wait_for_own_copies;
use super::mma::load_matrix_at;
use super::ptx::{computed_here, local, name, ptx, sixteen_bits, use_tile};
use super::{Acc, Grid};
use cubecl::ir::{Scope, Variable};
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

    /// Numbers from the tile's start to step `k`.
    fn at_step(self, k: usize) -> usize {
        8 * self.step(k)
    }

    /// Numbers from the tile's start to where a product begins whose columns start at `n`.
    fn at_column(self, n: usize) -> usize {
        match self.transposed {
            true => 8 * n * ROW,
            false => n / 64 * self.rows * 64 + n % 64,
        }
    }
}

/// A unit's share of a left factor.
pub(crate) type LeftFactor<E> = Sequence<Array<Vector<E, Const<2>>>>;

/// Steps of 16 whose left factor a plane holds at once.
const STEPS: usize = 4;

/// This plane's 16 rows of a swizzled tile of so many, as left factor: `steps` of 16 columns from step `first` on.
#[cube]
pub(crate) fn swizzled_factor<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    #[comptime] rows: usize,
    #[comptime] first: usize,
    #[comptime] steps: usize,
) -> LeftFactor<E> {
    let unit = computed_here(UNIT_POS) as usize;
    let lane = unit % 32;
    let row = unit / 32 % 4 * 16 + lane % 16;
    // Of the two columns of vectors of a step this lane has one.
    let place = (lane / 16) ^ (row % ROW);
    let mut left = LeftFactor::<E>::new();
    #[unroll]
    for n in 0..steps {
        let step = comptime!(first + n);
        let at = row * ROW + comptime!(step / 4 * rows * ROW) + (place ^ comptime!(step % 4 * 2));
        left.push(load_matrix_at::<E, N>(tile, at, false));
    }
    left
}

/// `acc += left right` of a grid whose planes stand four above each other: `left` is a swizzled tile of as many rows as
/// the product, `steps` of 16 wide.
#[cube]
pub(crate) fn multiply_by_warpgroups<E: Float, N: Size>(
    acc: &mut Acc,
    left: &SharedMemory<Vector<E, N>>,
    right: &SharedMemory<Vector<E, N>>,
    #[comptime] steps: usize,
    #[comptime] layout: Swizzled,
    #[comptime] grid: Grid,
) {
    #[unroll]
    for part in 0..comptime!(steps.div_ceil(STEPS)) {
        let first = comptime!(part * STEPS);
        let count = comptime!((steps - first).min(STEPS));
        let factor = swizzled_factor::<E, N>(left, comptime!(grid.m), first, count);
        add_warpgroup_product::<E, N>(acc, &factor, right, first, layout, grid);
    }
}

/// `acc += left right` from step `first` of the right factor on.
#[cube]
pub(crate) fn add_warpgroup_product<E: Float, N: Size>(
    acc: &mut Acc,
    left: &LeftFactor<E>,
    right: &SharedMemory<Vector<E, N>>,
    #[comptime] first: usize,
    #[comptime] layout: Swizzled,
    #[comptime] grid: Grid,
) {
    comptime!(assert!(grid.down() == 4 && 128 * grid.across() == grid.units));
    comptime!(assert!(64 % (grid.n / grid.across()) == 0));
    let columns = comptime!(grid.n / grid.across());
    let warpgroup = UNIT_POS as usize / 128;
    // Warpgroups whose columns are of the same 64; transposed, all.
    let together = comptime!(if layout.transposed { grid.across() } else { 64 / columns });
    let at = warpgroup / together * comptime!(layout.at_column(64))
        + warpgroup % together * comptime!(layout.at_column(columns));
    warpgroup_mul::<E, N>(acc, left, right, at + comptime!(layout.at_step(first)), layout);
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
    let numbers = sixteen_bits(tile.ty.elem_type());
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
