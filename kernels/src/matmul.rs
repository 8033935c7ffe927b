//! Matrix products on tensor cores through `mma.sync`, for the layers around a recurrence.
//! ```text
//! y_mn = sum_k a_mk b_kn                     sums in f32
//!
//! a: [M, K]   b: [K, N]      bf16, f16, or f32 read as TF32 (10 bits of mantissa)
//! y: [M, N]                  the type of a and b, or f32
//! ```
//! Either side lies with K or with its other axis contiguous, so that `y = x W`, `dx = dy W^T` and
//! `dW = x^T dy` read their tensors where they lie.
//!
//! Work:     a cube has a tile of y and goes over K in steps through `stages` buffers in shared memory, which
//!           asynchronous copies fill ahead. Where tiles are fewer than the device can hold, K is cut
//!           into slices (split-K) whose f32 sums a second launch adds up in a fixed order.
//! Tilings:  a fixed table by shape, `Tiling::choose`, made of rows measured on an H200
//!           (`experiments/speed/matmul.md`). Nothing is timed when a program runs.
//! Edges:    any M, N and K whose contiguous axes are multiples of 16 bytes and whose rows begin at such;
//!           N is a multiple of 4. They are run-time values: new ones compile nothing.
//! Devices:  NVIDIA from sm_80 on; elsewhere [`supports`] is false.

mod form;
mod kernel;

pub use form::Tiling;

use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::fused::column_sums::{column_sums, multiprocessors};
use crate::refusal::{F32, Refusal};
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use form::Form;
use kernel::{SidesLaunch, SizesLaunch, multiply};

/// f32 as tensor cores read it.
const TF32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::TF32));
/// Bytes of a copy.
const PIECE: usize = 16;
/// Sums along K of so many numbers at most end before a cube's first loads are paid for.
const SHORT: usize = 512;
/// Numbers along K of a slice at least: shorter ones spend more on their sums than on their products.
const SHORTEST_SLICE: usize = 256;

/// One side of a product in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Numbers from one row of what is not contiguous to the next.
    pub stride: usize,
    /// K is contiguous: a as it is written, or b transposed.
    pub along_k: bool,
}

/// A product, `[m, k] x [k, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Rows of a and y.
    pub m: usize,
    /// Columns of b and y.
    pub n: usize,
    /// The length of the sums.
    pub k: usize,
    /// How a lies.
    pub lhs: Layout,
    /// How b lies.
    pub rhs: Layout,
    /// The type of a and b: bf16, f16 or f32.
    pub input: StorageType,
    /// The type of y: that of a and b, or f32.
    pub output: StorageType,
}

impl Tiling {
    /// The row of the table for a product; `None` where the device has too little shared memory for any.
    fn choose(product: &Product, multiprocessors: usize, shared_memory: usize) -> Option<Self> {
        let size = product.input.size();
        let [square, deep, eight, thin, narrow, small] =
            TABLE.map(|tiling| Self { k: tiling.k / size, ..tiling });
        let cubes = product.tiles(square) * product.slices(square, multiprocessors);
        let short = product.k <= SHORT && !product.rhs.along_k;
        let wanted = match product.lhs.along_k {
            _ if cubes < multiprocessors * 3 / 4 => small,
            false if product.tiles(square) == 1 => narrow,
            false => thin,
            true if product.input == F32 && (short || product.n <= eight.n) => eight,
            true if product.n <= deep.n => deep,
            true => square,
        };
        let fits = |tiling: &Self| product.form(*tiling).shared_memory() <= shared_memory;
        [wanted, square, small].into_iter().find(fits)
    }
}

const TABLE: [Tiling; 6] = [SQUARE, DEEP, EIGHT, THIN, NARROW, SMALL];
/// Three cubes fit on a multiprocessor: most planes to wait for memory.
const SQUARE: Tiling = Tiling::new([128, 128], 128, [2, 2], 2);
/// For one column of tiles, which may be too few for three cubes each.
const DEEP: Tiling = Tiling::new([128, 128], 128, [2, 2], 3);
/// For TF32 where a cube soon ends, or has its multiprocessor to itself: more planes to wait.
const EIGHT: Tiling = Tiling::new([128, 128], 128, [2, 4], 3);
/// For gradients of weights, whose rows of both sides lie across K: a stage has half as many of them.
const THIN: Tiling = Tiling::new([128, 128], 64, [2, 2], 4);
/// For gradients of weights that are one tile.
const NARROW: Tiling = Tiling::new([128, 64], 128, [2, 2], 3);
/// Where larger ones would be too few.
const SMALL: Tiling = Tiling::new([64, 64], 128, [2, 2], 3);

impl Product {
    fn form(&self, tiling: Tiling) -> Form {
        Form {
            source: SOURCE,
            tiling,
            lhs_along_k: self.lhs.along_k,
            rhs_along_k: self.rhs.along_k,
            half: self.input.size() == 2,
            narrow_out: self.output.size() == 2,
        }
    }

    /// Contiguous axes and strides are multiples of a copy.
    fn aligned(&self) -> bool {
        let piece = PIECE / self.input.size();
        let side = |layout: Layout, outer: usize| {
            let contiguous = if layout.along_k { self.k } else { outer };
            contiguous.is_multiple_of(piece) && layout.stride.is_multiple_of(piece)
        };
        side(self.lhs, self.m) && side(self.rhs, self.n) && self.n.is_multiple_of(4)
    }

    /// Every number of a side or of the output, in all slices, has an index of 32 bits.
    fn indexable(&self, slices: usize) -> bool {
        let rows = |layout: Layout, outer: usize| if layout.along_k { outer } else { self.k };
        // Tiles count rows past the last one.
        let numbers = [
            (rows(self.lhs, self.m) + 256).saturating_mul(self.lhs.stride),
            (rows(self.rhs, self.n) + 256).saturating_mul(self.rhs.stride),
            slices.saturating_mul(self.m + 256).saturating_mul(self.n + 256),
        ];
        self.m > 0 && self.n > 0 && self.k > 0 && numbers.iter().all(|n| *n <= u32::MAX as usize)
    }

    fn tiles(&self, tiling: Tiling) -> usize {
        self.m.div_ceil(tiling.m) * self.n.div_ceil(tiling.n)
    }

    /// Slices of K: as many as give each multiprocessor two cubes, as far as [`SHORTEST_SLICE`] goes.
    fn slices(&self, tiling: Tiling, multiprocessors: usize) -> usize {
        let tiles = self.tiles(tiling);
        if tiles > multiprocessors / 2 {
            return 1;
        }
        (2 * multiprocessors / tiles).min(self.k / SHORTEST_SLICE).max(1)
    }
}

/// The device has `mma.sync` for the type, asynchronous copies and planes of 32.
pub fn supports<R: Runtime>(client: &ComputeClient<R>, input: StorageType) -> bool {
    let (a_type, k) = if input == F32 { (TF32, 8) } else { (input, 16) };
    let wanted = MmaConfig { a_type, b_type: a_type, cd_type: F32, m: 16, n: 8, k };
    let (features, hardware) = (client.features(), &client.properties().hardware);
    let planes = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    features.matmul.mma.contains(&wanted) && features.copy_async && planes
}

/// The product of `lhs` and `rhs`, `[m, n]`; `None` where [`supports`] is false, the axes are no multiples
/// of 16 bytes or the sizes pass 32 bits: then nothing was launched.
///
/// One launch; with split-K two or three.
///
/// # Errors
/// [`Refusal`] where the sum over slices cannot be launched.
pub fn matmul<R: Runtime>(
    client: &ComputeClient<R>,
    lhs: &Handle,
    rhs: &Handle,
    product: Product,
) -> Result<Option<Buffer>, Refusal> {
    let multiprocessors = multiprocessors(client);
    let shared_memory = client.properties().hardware.max_shared_memory_size;
    let Some(tiling) = Tiling::choose(&product, multiprocessors, shared_memory) else {
        return Ok(None);
    };
    let slices = product.slices(tiling, multiprocessors);
    matmul_with(client, lhs, rhs, product, tiling, slices)
}

/// As [`matmul`], with a tiling and a number of slices of the caller's choice.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_with<R: Runtime>(
    client: &ComputeClient<R>,
    lhs: &Handle,
    rhs: &Handle,
    product: Product,
    tiling: Tiling,
    slices: usize,
) -> Result<Option<Buffer>, Refusal> {
    if !takes(client, [lhs, rhs], &product, tiling, slices) {
        return Ok(None);
    }
    let each = product.k.div_ceil(slices).next_multiple_of(tiling.k);
    let slices = product.k.div_ceil(each);
    if slices == 1 {
        let y = buffer(client, &[product.m, product.n], product.output);
        launch(client, [lhs, rhs], &y, &product, tiling, [1, each]);
        return Ok(Some(y));
    }
    let parts = buffer(client, &[slices, product.m, product.n], F32);
    let to_f32 = Product { output: F32, ..product };
    launch(client, [lhs, rhs], &parts, &to_f32, tiling, [slices, each]);
    let numbers = product.m * product.n;
    let sums = column_sums(client, &parts.handle, slices, numbers, F32, product.output)?;
    Ok(Some(Buffer { shape: vec![product.m, product.n], ..sums }))
}

/// The device, the sides' memory and the sizes suit the kernel.
fn takes<R: Runtime>(
    client: &ComputeClient<R>,
    sides: [&Handle; 2],
    product: &Product,
    tiling: Tiling,
    slices: usize,
) -> bool {
    let begins = sides.map(|handle| handle.offset_start.unwrap_or(0));
    let aligned = begins.iter().all(|begin| begin.is_multiple_of(PIECE as u64));
    let most = client.properties().hardware.max_shared_memory_size;
    supports(client, product.input)
        && aligned
        && product.aligned()
        && product.indexable(slices)
        && product.form(tiling).shared_memory() <= most
}

fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    sides: [&Handle; 2],
    y: &Buffer,
    product: &Product,
    tiling: Tiling,
    [slices, each]: [usize; 2],
) {
    let form = product.form(tiling);
    let input = if form.half { product.input } else { TF32 };
    // Single loads read 32 bits, `ldmatrix` rows of 16 bytes.
    let widths = [if form.half { 8 } else { 1 }, if form.narrow_out { 4 } else { 2 }];
    let rows = |layout: Layout, outer: usize| if layout.along_k { outer } else { product.k };
    let numbers = [
        rows(product.lhs, product.m) * product.lhs.stride,
        rows(product.rhs, product.n) * product.rhs.stride,
    ];
    let cubes = CubeCount::Static(product.tiles(tiling) as u32, slices as u32, 1);
    // SAFETY: pieces past the ends are not read, and rows and columns past the output's not written.
    #[allow(unsafe_code)]
    unsafe {
        multiply::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(form.units() as u32),
            SidesLaunch::new(array(sides[0], numbers[0]), array(sides[1], numbers[1])),
            whole(y),
            SizesLaunch::new(
                product.m as u32,
                product.n as u32,
                product.k as u32,
                product.lhs.stride as u32,
                product.rhs.stride as u32,
                each as u32,
            ),
            form,
            [input, product.output],
            widths,
        );
    }
}

#[cfg(test)]
#[path = "matmul/tests.rs"]
mod tests;
