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
use super::ptx::{computed_here, local, name, ptx, sixteen_bits, sync_some, use_tile};
use super::{Acc, Grid, column, row};
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
    pub fn at_step(self, k: usize) -> usize {
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

/// This plane's 16 rows of a swizzled tile of so many that begins at number `start`, as left factor: `steps` of 16 columns
/// from step `first` on.
#[cube]
pub(crate) fn swizzled_factor<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    start: usize,
    #[comptime] rows: usize,
    #[comptime] first: usize,
    #[comptime] steps: usize,
) -> LeftFactor<E> {
    let unit = computed_here(UNIT_POS) as usize;
    let lane = unit % 32;
    let row = unit / 32 % 4 * 16 + lane % 16;
    let width = N::value();
    // Of the two columns of vectors of a step this lane has one.
    let place = (lane / 16) ^ (row % ROW);
    let mut left = LeftFactor::<E>::new();
    #[unroll]
    for n in 0..steps {
        let step = comptime!(first + n);
        let at = start / width
            + row * ROW
            + comptime!(step / 4 * rows * ROW)
            + (place ^ comptime!(step % 4 * 2));
        left.push(load_matrix_at::<E, N>(tile, at, false));
    }
    left
}

/// `acc += left right` of a grid whose planes stand four above each other: `left` is a swizzled tile of as many rows as
/// the product, `steps` of 16 wide. Both factors begin `at` numbers into their tiles.
#[cube]
pub(crate) fn multiply_by_warpgroups<E: Float, N: Size>(
    acc: &mut Acc,
    left: &SharedMemory<Vector<E, N>>,
    right: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] steps: usize,
    #[comptime] layout: Swizzled,
    #[comptime] grid: Grid,
) {
    #[unroll]
    for part in 0..comptime!(steps.div_ceil(STEPS)) {
        let first = comptime!(part * STEPS);
        let count = comptime!((steps - first).min(STEPS));
        let factor = swizzled_factor::<E, N>(left, at, comptime!(grid.m), first, count);
        add_warpgroup_product::<E, N>(acc, &factor, right, at, first, layout, grid);
    }
}

/// `acc += left right` from step `first` of the right factor on, which begins `start` numbers into its tile.
#[cube]
pub(crate) fn add_warpgroup_product<E: Float, N: Size>(
    acc: &mut Acc,
    left: &LeftFactor<E>,
    right: &SharedMemory<Vector<E, N>>,
    start: usize,
    #[comptime] first: usize,
    #[comptime] layout: Swizzled,
    #[comptime] grid: Grid,
) {
    comptime!(assert!(grid.down() == 4 && 128 * grid.across() == grid.units));
    comptime!(assert!(64 % (grid.n / grid.across()) == 0));
    let columns = comptime!(grid.n / grid.across());
    let mut warpgroup = UNIT_POS as usize / 128;
    if comptime!(grid.first > 0) {
        warpgroup -= comptime!(grid.first / 128);
    }
    // Warpgroups whose columns are of the same 64; transposed, all.
    let together = comptime!(if layout.transposed { grid.across() } else { 64 / columns });
    let at = start
        + warpgroup / together * comptime!(layout.at_column(64))
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

/// [`warpgroup_mul`] twice with one left factor: `acc += left right` and `other_acc += left other_right`.
#[cube]
pub(crate) fn warpgroup_mul_both<E: Float, N: Size>(
    acc: &mut Acc,
    other_acc: &mut Acc,
    left: &Sequence<Array<Vector<E, Const<2>>>>,
    right: &SharedMemory<Vector<E, N>>,
    other_right: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] layout: Swizzled,
) {
    let width = N::value();
    multiply_both::<E, N>(acc, other_acc, left, right, other_right, at / width, layout);
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
        let product = Product { acc: registers_of(acc), right: *right.expand };
        statement(scope, &[product], &registers_of(left), *at.expand, layout);
    })
}

#[cube]
#[allow(unused_variables)] // an intrinsic's
fn multiply_both<E: Float, N: Size>(
    acc: &mut Acc,
    other_acc: &mut Acc,
    left: &Sequence<Array<Vector<E, Const<2>>>>,
    right: &SharedMemory<Vector<E, N>>,
    other_right: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] layout: Swizzled,
) {
    intrinsic!(|scope| {
        let products = [
            Product { acc: registers_of(acc), right: *right.expand },
            Product { acc: registers_of(other_acc), right: *other_right.expand },
        ];
        statement(scope, &products, &registers_of(left), *at.expand, layout);
    })
}

/// Arrays of registers that a sequence has.
fn registers_of<T: CubePrimitive>(all: SequenceExpand<Array<T>>) -> Vec<Variable> {
    all.iter_cloned().map(|array| *array.expand).collect()
}

/// A product of a statement: where it is added up, and the tile of its right factor.
struct Product {
    acc: Vec<Variable>,
    right: Variable,
}

/// All steps of products with one left factor, whose right factors begin at vector `at` of their tiles, and the wait for
/// them: until then nobody may touch their registers.
fn statement(
    scope: &mut Scope,
    products: &[Product],
    left: &[Variable],
    at: Variable,
    layout: Swizzled,
) {
    let numbers = sixteen_bits(products[0].right.ty.elem_type());
    let at = local(scope, at);
    let addresses: Vec<_> = products
        .iter()
        .map(|product| {
            use_tile(scope, product.right);
            format!("{} + {at}", name(product.right))
        })
        .collect();
    let registers = |arrays: &[Variable], constraint: &str, what: &str| {
        let each = |array: &Variable| {
            let array = name(*array);
            (0..4)
                .map(move |n| format!("\"{constraint}\"(reinterpret_cast<{what}*>({array})[{n}])"))
        };
        arrays.iter().flat_map(each).collect::<Vec<_>>()
    };
    let list = |from: usize, count: usize| {
        (from..from + count).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ")
    };
    // Operands: products, one after another, the left factor, and a descriptor of each right one.
    let of_product = 4 * products[0].acc.len();
    let factors = of_product * products.len();
    let descriptors = factors + 4 * left.len();
    let steps = products.iter().enumerate().flat_map(|(n, product)| {
        (0..left.len()).map(move |k| {
            format!(
                "add.s64 right, %{}, {}; wgmma.mma_async.sync.aligned.m64n{}k16.f32.{numbers}.{numbers} \
                 {{{}}}, {{{}}}, right, all, 1, 1, {}; ",
                descriptors + n,
                layout.step(k),
                8 * product.acc.len(),
                list(n * of_product, of_product),
                list(factors + 4 * k, 4),
                u32::from(!layout.transposed),
            )
        })
    });
    let steps: String = steps.collect();
    let results: Vec<_> =
        products.iter().flat_map(|product| registers(&product.acc, "+f", "float")).collect();
    let mut operands = registers(left, "r", "const uint32");
    operands.extend(addresses.iter().map(|address| {
        format!(
            "\"l\"({}ull | ((static_cast<uint32>(__cvta_generic_to_shared({address})) & 0x3ffff) >> 4))",
            layout.descriptor()
        )
    }));
    ptx(
        scope,
        &format!(
            "asm volatile(\"{{ .reg .pred all; .reg .b64 right; setp.eq.s64 all, %{descriptors}, %{descriptors}; \
             wgmma.fence.sync.aligned; {steps}wgmma.commit_group.sync.aligned; \
             wgmma.wait_group.sync.aligned 0; }}\" : {} : {} : \"memory\");",
            results.join(", "),
            operands.join(", "),
        ),
    );
}

/// Puts a product of 64 columns into a swizzled tile of as many rows, which begins at number `at`.
#[cube]
pub(crate) fn store_swizzled<X: Float, M: Size>(
    tile: &mut SharedMemory<Vector<X, M>>,
    at: usize,
    acc: &Acc,
    #[comptime] grid: Grid,
) {
    comptime!(assert!(grid.n == 64 && 32 * grid.down() * grid.across() == grid.units));
    let start = at + row(0usize, 0usize, grid) * 64;
    let place = UNIT_POS as usize % 32 / 4;
    let first = column(0usize, grid);
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        #[unroll]
        for h in 0..2usize {
            let [down, right] = comptime!(grid.step(f, h));
            let vector = (first / 8 + comptime!(right / 8)) ^ place;
            let at = start + comptime!(down * 64) + vector * 8 + first % 8;
            tile[at / 2] = Vector::<X, M>::cast_from(acc.index(f)[h]);
        }
    }
}

/// Gives registers of every unit of this warpgroup back, down to so many, or takes them, up to so many, once others have
/// given theirs; without a number they stay. All four planes call it, once.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(crate) fn resize_registers(#[comptime] registers: Option<usize>, #[comptime] more: bool) {
    intrinsic!(|scope| {
        let what = if more { "inc" } else { "dec" };
        if let Some(n) = registers {
            ptx(scope, &format!("asm volatile(\"setmaxnreg.{what}.sync.aligned.u32 {n};\");"));
        }
    })
}

/// Shows tensor cores what so many units, whole planes that start with unit `first`, have written, and waits for all of them.
#[cube]
pub(crate) fn show_factors(#[comptime] first: usize, #[comptime] units: usize) {
    show_to_tensor_cores();
    sync_some(first, units);
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
