//! A few rows times matrices on tensor cores, 16 bits in and f32 sums: `mma.sync` of 16 x 8 x 16.
//! ```text
//! y^T = W^T x^T     A: 16 columns of W    B: 8 rows of x    C: [16, 8] of y^T
//!
//! lane (g, t) = (lane / 4, lane % 4) of a block of 16 rows of W, which it needs no shared memory for:
//!     rows 4t .. 4t + 3 of W, of each the vector of V columns from gV on       4 loads of 2V bytes
//!     columns 4t .. 4t + 3 of row g of x, for each 8 rows of x                 a load of 8 bytes
//! The sums' order is free: A's columns 2t, 2t + 1, 2t + 8, 2t + 9 are rows 4t .. 4t + 3 of W, as B's rows are of x.
//! ```
//! Both are read as words of two numbers. As numbers, a compiler takes them apart as soon as they arrive, which is
//! to wait for them a block too early.
//!
//! Work:   a cube has `rows` rows of x and 8V columns of one matrix. Its planes deal the blocks of 16 rows of W out
//!         among them, and add their sums up in shared memory in the end. Cube x counts columns, cube z rows.
//! Bytes:  `ahead` blocks of a plane are on their way; 8 planes and 2 blocks of 64 columns are 32 KB.
//! Edges:  K, N_i and `stride` are multiples of 4. Rows past M and columns past N_i repeat others and are not
//!         kept; rows of W past K repeat the last four, times 0.

use super::{Columns, CubeColumns, Dims, Matrix, Sizes, cube_columns, cubes_across};
use crate::SOURCE;
use crate::fused::column_sums::multiprocessors;
use crate::matmul;
use crate::tile::{Acc, Pair, execute, zeros};
use cubecl::ir::StorageType;
use cubecl::prelude::*;

/// Rows of W of a block.
const DEPTH: usize = 16;
/// Rows of x of a fragment.
const FRAGMENT: usize = 8;
/// Most rows of x of a cube.
const MOST: usize = 64;
/// Units of a plane.
const PLANE: usize = 32;
/// Fewest rows of x: fewer are multiplied as fast without.
const FEWEST: usize = 3;
/// Numbers of a word.
pub(super) const PACKED: usize = 2;
/// Numbers of x that a lane loads at once.
const X_WIDTH: usize = 4;

/// How a product is shared out over cubes and planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Rows of x of a cube: 8, 16, 32 or 64.
    pub rows: usize,
    /// Numbers of a vector of W: 2, 4 or 8. A cube has eight times as many columns.
    pub width: usize,
    /// Planes of a cube, a power of two.
    pub planes: usize,
    /// Blocks of a plane that are requested before the first is multiplied.
    pub ahead: usize,
}

impl Tiling {
    /// The tiling for a product; `None` where tensor cores or sizes are not as the kernel takes them.
    pub(super) fn choose<R: Runtime>(
        client: &ComputeClient<R>,
        dims: Dims,
        matrices: &[Columns],
        dtype: StorageType,
    ) -> Option<Self> {
        if dims.rows < FEWEST {
            return None;
        }
        let takes = |tiling: &Self| tiling.takes(client, dims, matrices, dtype);
        let across = cubes_across(matrices, FRAGMENT * 8) * dims.rows.div_ceil(MOST);
        let wide = Self::wide(dims.rows, across, multiprocessors(client)).filter(takes);
        wide.or_else(|| Some(Self::narrow(dims.rows)).filter(takes))
    }

    /// Vectors of 8 columns, for `across` cubes of 64 columns and up to 64 rows; `None` where these leave multiprocessors idle. The
    /// rule is made of rows measured on an H200 (`experiments/speed/decode.md`).
    pub(super) fn wide(rows: usize, across: usize, multiprocessors: usize) -> Option<Self> {
        let Self { rows: short, .. } = Self::narrow(rows);
        let rows = rows.next_power_of_two().clamp(FRAGMENT, MOST);
        let enough = multiprocessors * 3 / 4;
        let cubes = across * (rows / short);
        let (rows, planes, ahead) = match rows {
            ..=16 if across >= multiprocessors / 2 => (rows, 16, 2),
            17.. if across >= enough => (rows, 8, 2),
            17.. if cubes > multiprocessors => (short, 8, 2),
            17.. if cubes >= enough => (short, 16, 1),
            _ => return None,
        };
        Some(Self { rows, width: 8, planes, ahead })
    }

    /// Vectors of 4 columns, for few of them: each multiprocessor has one cube, which has much on its way.
    pub(super) fn narrow(rows: usize) -> Self {
        let rows = rows.next_power_of_two().clamp(FRAGMENT, 32);
        Self { rows, width: 4, planes: 16, ahead: 4 }
    }

    /// The parts are such as the kernel has.
    fn is_sound(&self) -> bool {
        [8, 16, 32, 64].contains(&self.rows)
            && [2, 4, 8].contains(&self.width)
            && [1, 2, 4, 8, 16, 32].contains(&self.planes)
            && self.ahead > 0
    }

    /// The tiling is sound, and the device, types and sizes suit the kernel.
    pub(super) fn takes<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        dims: Dims,
        matrices: &[Columns],
        dtype: StorageType,
    ) -> bool {
        let hardware = &client.properties().hardware;
        let vectors = |n: usize| n.is_multiple_of(self.width);
        let whole = |matrix: &Columns| vectors(matrix.count) && vectors(matrix.stride);
        self.is_sound()
            && dtype.size() == 2
            && matmul::supports(client, dtype)
            && dims.inner.is_multiple_of(X_WIDTH)
            && matrices.iter().all(whole)
            && self.shared_memory() <= hardware.max_shared_memory_size
            && self.units() <= hardware.max_units_per_cube as usize
    }

    /// Words of a vector of W, and of one of x.
    pub(super) fn words(&self) -> [usize; 2] {
        [self.width / PACKED, X_WIDTH / PACKED]
    }

    pub(super) fn units(&self) -> usize {
        PLANE * self.planes
    }

    /// Columns of a cube.
    pub(super) fn columns(&self) -> usize {
        FRAGMENT * self.width
    }

    /// Fragments of rows.
    fn down(&self) -> usize {
        self.rows / FRAGMENT
    }

    /// Fragments of rows whose sums meet at once.
    fn together(&self) -> usize {
        self.down().min(4).min(self.planes)
    }

    /// Units that share the columns of a vector out, where sums meet.
    fn parts(&self) -> usize {
        (self.planes / self.together()).min(self.width)
    }

    /// Pairs of sums in shared memory, all that the kernel allocates.
    fn pairs(&self) -> usize {
        self.together() * self.width * self.planes * PLANE
    }

    fn shared_memory(&self) -> usize {
        8 * self.pairs()
    }
}

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(super) source: &'static str,
    pub(super) tiling: Tiling,
    pub(super) matrices: usize,
    pub(super) biased: bool,
    /// The last block has fewer rows of W than [`DEPTH`].
    ragged: bool,
}

impl Form {
    pub(super) fn new(tiling: Tiling, inner: usize, matrices: usize, biased: bool) -> Self {
        let ragged = !inner.is_multiple_of(DEPTH);
        Self { source: SOURCE, tiling, matrices, biased, ragged }
    }
}

/// Rows and what is added to them.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Rows<E: Float, X: Size> {
    pub x: Array<Vector<u32, X>>,
    pub bias: Array<E>,
}

/// Share of a lane: the places of what it reads.
#[derive(CubeType, Clone, Copy)]
struct Share {
    /// Place of the matrix.
    matrix: u32,
    /// Place of its vector in a row of W, in vectors.
    column: usize,
    /// Vectors from one row of W to the next.
    stride: usize,
    /// Its first row of W in a block, column of x.
    down: usize,
    /// Its first row of x.
    row: usize,
    /// The last row of x.
    last: usize,
    /// Vectors of a row of x.
    line: usize,
    /// The last place where a lane's rows of W begin.
    end: usize,
}

/// Blocks on their way: `[ahead, 4]` vectors of W, `[ahead, rows / 8]` of x.
#[derive(CubeType)]
struct Requested<N: Size, X: Size> {
    w: Array<Vector<u32, N>>,
    x: Array<Vector<u32, X>>,
}

/// The kernel.
#[cube(launch_unchecked)]
pub(super) fn rows_on_tensor_cores<E: Float, N: Size, X: Size>(
    rows: &Rows<E, X>,
    weights: &Sequence<Matrix<u32, N>>,
    y: &mut Array<E>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(E)] _dtype: StorageType,
    #[define(N, X)] _words: [usize; 2],
) {
    let tiling = comptime!(form.tiling);
    let (planes, ahead) = comptime!((tiling.planes, tiling.ahead));
    let columns = cube_columns::<u32, N>(weights, comptime!(tiling.columns()), form.matrices);
    let share = share(&columns, sizes, form);
    let mut acc = zeros(comptime!(tiling.down() * tiling.width / 2));
    let mut requested = Requested::<N, X> {
        w: Array::new(comptime!(4 * ahead)),
        x: Array::new(comptime!(tiling.down() * ahead)),
    };
    let plane = UNIT_POS as usize / PLANE;
    let blocks = (sizes.inner as usize - 1) / DEPTH + 1;
    #[unroll]
    for n in 0..ahead {
        let block = plane + comptime!(n * planes);
        if block < blocks {
            request::<E, N, X>(&mut requested, rows, weights, block, &share, n, form);
        }
    }
    for turn in 0..(blocks - 1) / comptime!(planes * ahead) + 1 {
        #[unroll]
        for n in 0..ahead {
            let block = turn * comptime!(planes * ahead) + comptime!(n * planes) + plane;
            if block < blocks {
                multiply_add::<E, N, X>(&mut acc, &requested, block, &share, n, form);
                let next = block + comptime!(planes * ahead);
                if next < blocks {
                    request::<E, N, X>(&mut requested, rows, weights, next, &share, n, form);
                }
            }
        }
    }
    add_up::<E, X>(rows, y, &acc, &columns, sizes, form);
}

/// The share of this lane. Lanes past the last column repeat it; their results are not used.
#[cube]
fn share(columns: &CubeColumns, sizes: Sizes, #[comptime] form: Form) -> Share {
    let width = comptime!(form.tiling.width);
    let lane = UNIT_POS as usize % PLANE;
    let column = min(columns.first + lane / 4 * width, columns.count - width) / width;
    Share {
        matrix: columns.matrix,
        column,
        stride: columns.stride / width,
        down: lane % 4 * 4,
        row: CUBE_POS_Z as usize * comptime!(form.tiling.rows) + lane / 4,
        last: sizes.rows as usize - 1,
        line: sizes.inner as usize / X_WIDTH,
        end: sizes.inner as usize - X_WIDTH,
    }
}

/// Requests one block, as number `n` of those on their way.
#[cube]
fn request<E: Float, N: Size, X: Size>(
    requested: &mut Requested<N, X>,
    rows: &Rows<E, X>,
    weights: &Sequence<Matrix<u32, N>>,
    block: usize,
    share: &Share,
    #[comptime] n: usize,
    #[comptime] form: Form,
) {
    let down = comptime!(form.tiling.down());
    let k = if comptime!(form.ragged) {
        min(block * DEPTH + share.down, share.end)
    } else {
        block * DEPTH + share.down
    };
    let first = k * share.stride + share.column;
    if comptime!(form.matrices == 1) {
        request_rows::<N>(&mut requested.w, &weights.index(0usize).numbers, first, share, n);
    } else {
        #[unroll]
        for m in 0..comptime!(form.matrices) {
            if share.matrix == comptime!(m as u32) {
                let numbers = &weights.index(m).numbers;
                request_rows::<N>(&mut requested.w, numbers, first, share, n);
            }
        }
    }
    let column = k / X_WIDTH;
    #[unroll]
    for p in 0..down {
        let row = min(share.row + comptime!(p * FRAGMENT), share.last);
        requested.x[comptime!(n * down + p)] = rows.x[row * share.line + column];
    }
}

/// The vectors of this lane of block `n` on its way, from `first` on.
#[cube]
fn request_rows<N: Size>(
    w: &mut Array<Vector<u32, N>>,
    weight: &Array<Vector<u32, N>>,
    first: usize,
    share: &Share,
    #[comptime] n: usize,
) {
    #[unroll]
    for k in 0..4usize {
        w[comptime!(4 * n + k)] = weight[first + k * share.stride];
    }
}

/// Adds the products of block `n` on its way.
#[cube]
fn multiply_add<E: Float, N: Size, X: Size>(
    acc: &mut Acc,
    requested: &Requested<N, X>,
    block: usize,
    share: &Share,
    #[comptime] n: usize,
    #[comptime] form: Form,
) {
    // Zeros in place of columns of x past K. What is requested is not touched before it is multiplied.
    let mut kept = 0xffff_ffffu32;
    if comptime!(form.ragged) {
        kept = select(block * DEPTH + share.down <= share.end, kept, 0u32);
    }
    let (down, half) = comptime!((form.tiling.down(), form.tiling.width / 2));
    #[unroll]
    for f in 0..half {
        let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
        #[unroll]
        for k in 0..2usize {
            let at = comptime!(4 * n + 2 * k);
            let (upper, lower) = (requested.w[at][f], requested.w[comptime!(at + 1)][f]);
            let left = (upper & 0xffffu32) | (lower << 16u32);
            let right = (upper >> 16u32) | (lower & 0xffff_0000u32);
            a[comptime!(2 * k)] = Vector::<E, Const<2>>::reinterpret(left);
            a[comptime!(2 * k + 1)] = Vector::<E, Const<2>>::reinterpret(right);
        }
        #[unroll]
        for p in 0..down {
            let x = requested.x[comptime!(n * down + p)];
            let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
            let mut first = x[0];
            let mut second = x[1];
            if comptime!(form.ragged) {
                first &= kept;
                second &= kept;
            }
            b[0] = Vector::<E, Const<2>>::reinterpret(first);
            b[1] = Vector::<E, Const<2>>::reinterpret(second);
            execute::<E>(&a, &b, acc.index_mut(comptime!(p * half + f)));
        }
    }
}

/// The sums of all planes, added up for as many rows at once as there is room for, plus the bias: y.
///
/// A lane's pairs are those of rows 2t and 2t + 1 of 8, of column gV + j.
#[cube]
fn add_up<E: Float, X: Size>(
    rows: &Rows<E, X>,
    y: &mut Array<E>,
    acc: &Acc,
    columns: &CubeColumns,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let tiling = comptime!(form.tiling);
    let (width, planes) = comptime!((tiling.width, tiling.planes));
    let (together, parts) = comptime!((tiling.together(), tiling.parts()));
    let mut shared = SharedMemory::<Pair>::new(comptime!(tiling.pairs()));
    let lane = UNIT_POS as usize % PLANE;
    let plane = UNIT_POS as usize / PLANE;
    let p = plane % together;
    let part = plane / together;
    #[unroll]
    for round in 0..comptime!(tiling.down() / together) {
        if comptime!(round > 0) {
            sync_cube();
        }
        #[unroll]
        for n in 0..together {
            #[unroll]
            for j in 0..width {
                let fragment = comptime!((round * together + n) * width / 2 + j / 2);
                let at = comptime!((n * width + j) * planes * PLANE) + UNIT_POS as usize;
                let pair: Pair = acc.index(fragment)[comptime!(j % 2)];
                shared[at] = pair;
            }
        }
        sync_cube();
        let row = CUBE_POS_Z as usize * comptime!(tiling.rows)
            + (comptime!(round * together) + p) * FRAGMENT
            + lane % 4 * 2;
        #[unroll]
        for n in 0..comptime!(width / parts) {
            let j = part * comptime!(width / parts) + n;
            let column = columns.first + lane / 4 * width + j;
            if part < parts && column < columns.count {
                let from = (p * width + j) * comptime!(planes * PLANE) + lane;
                let mut sum = Pair::new(0.0f32);
                #[unroll]
                for s in 0..planes {
                    sum += shared[from + comptime!(s * PLANE)];
                }
                let column = columns.before + column;
                if comptime!(form.biased) {
                    sum += Pair::new(f32::cast_from(rows.bias[column]));
                }
                #[unroll]
                for e in 0..2usize {
                    if row + e < sizes.rows as usize {
                        y[(row + e) * sizes.columns as usize + column] = E::cast_from(sum[e]);
                    }
                }
            }
        }
    }
}
