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
//! tensor cores, 16 x 8 x 8 at a time and each number as a sum of two. Only
//! [`Grid`] knows which unit holds which element: a kernel calls [`row`] and [`column`].

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// Two neighbouring columns of one row.
pub(crate) type Pair = Vector<f32, Const<2>>;
/// A unit's share of a product: fragments of two [`Pair`]s.
pub(crate) type Acc = Sequence<Array<Pair>>;

/// Engine: the arithmetic that multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// f32 arithmetic, on every device.
    Plain,
    /// f32 on tensor cores through `mma.m16n8k8`, three products of TF32 parts for each product of f32
    /// (relative error 2^-21): NVIDIA from sm_80 on.
    Tf32,
    /// Tensor cores through `mma.m16n8k16`, bf16 or f16 in and f32 out: NVIDIA from sm_80 on.
    Mma,
}

impl Engine {
    /// Whether a plane has fragments of tensor cores, 16 rows high, and not each unit its own.
    pub(crate) fn by_planes(self) -> bool {
        self != Engine::Plain
    }

    /// Bytes of a number in a tile.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Engine::Plain | Engine::Tf32 => 4,
            Engine::Mma => 2,
        }
    }
}

/// How an [m, n] product is split over the units of a cube. `m` and `n` are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grid {
    pub engine: Engine,
    pub m: usize,
    pub n: usize,
    pub units: usize,
}

const fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Grid {
    /// Units (plain) or planes (mma) one below another.
    pub fn down(&self) -> usize {
        match self.engine {
            Engine::Plain => self.units / self.across(),
            Engine::Tf32 | Engine::Mma => gcd(self.units / 32, self.m / 16),
        }
    }

    /// Units or planes side by side.
    pub fn across(&self) -> usize {
        match self.engine {
            Engine::Plain => gcd(16, self.n / 2),
            Engine::Tf32 | Engine::Mma => gcd(self.units / 32 / self.down(), self.n / 16),
        }
    }

    /// Fragments of a unit, one below another.
    pub fn fragment_rows(&self) -> usize {
        match self.engine {
            Engine::Plain => (self.m / 2).div_ceil(self.down()),
            Engine::Tf32 | Engine::Mma => self.m / 16 / self.down(),
        }
    }

    /// Fragments of a unit, side by side.
    pub fn fragment_columns(&self) -> usize {
        match self.engine {
            Engine::Plain => self.n / 2 / self.across(),
            Engine::Tf32 | Engine::Mma => self.n / 8 / self.across(),
        }
    }

    /// Fragments of a unit.
    pub fn fragments(&self) -> usize {
        self.fragment_rows() * self.fragment_columns()
    }

    /// Rows and columns from a unit's first pair to pair `h` of fragment `f`.
    pub fn step(&self, f: usize, h: usize) -> [usize; 2] {
        let [r, c] = [f / self.fragment_columns(), f % self.fragment_columns()];
        match self.engine {
            Engine::Plain => [r * self.down() * 2 + h, c * self.across() * 2],
            Engine::Tf32 | Engine::Mma => [r * self.down() * 16 + h * 8, c * 8],
        }
    }
}

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

/// Row of pair `h` of fragment `f`.
#[cube]
pub(crate) fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize {
    let down = comptime!(grid.step(f, h)[0]);
    if comptime!(grid.engine.by_planes()) {
        let plane = UNIT_POS as usize / 32 % comptime!(grid.down());
        let lane = UNIT_POS as usize % 32;
        plane * 16 + lane / 4 + down
    } else {
        UNIT_POS as usize / comptime!(grid.across()) * 2 + down
    }
}

/// First column of the pairs of fragment `f`.
#[cube]
pub(crate) fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize {
    let right = comptime!(grid.step(f, 0)[1]);
    if comptime!(grid.engine.by_planes()) {
        let plane = UNIT_POS as usize / 32 / comptime!(grid.down());
        let lane = UNIT_POS as usize % 32;
        plane * comptime!(grid.n / grid.across()) + lane % 4 * 2 + right
    } else {
        UNIT_POS as usize % comptime!(grid.across()) * 2 + right
    }
}

/// Whether fragment `f` belongs to the product: there may be more units than work.
#[cube]
pub(crate) fn inside(#[comptime] f: usize, #[comptime] grid: Grid) -> bool {
    if comptime!(grid.engine.by_planes()) {
        UNIT_POS as usize / comptime!(32 * grid.down()) < comptime!(grid.across())
    } else {
        row(f, 0usize, grid) < comptime!(grid.m)
    }
}

/// How [`mul`] finds its operands. `a` is [m, k] or, transposed, [k, m]; `b` is [k, n] or [n, k].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Mul {
    pub grid: Grid,
    pub k: usize,
    /// Numbers from one stored row to the next.
    pub a_stride: usize,
    pub b_stride: usize,
    pub a_transposed: bool,
    pub b_transposed: bool,
}

impl Mul {
    /// Numbers from one row of A to the next, and from one column to the next.
    fn a_steps(&self) -> [usize; 2] {
        if self.a_transposed { [1, self.a_stride] } else { [self.a_stride, 1] }
    }

    /// The same of B.
    fn b_steps(&self) -> [usize; 2] {
        if self.b_transposed { [1, self.b_stride] } else { [self.b_stride, 1] }
    }
}

/// `acc += A B`. `a` and `b` start `a_at` and `b_at` numbers into their tiles.
#[cube]
pub(crate) fn mul<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    match comptime!(spec.grid.engine) {
        Engine::Plain => mul_plain::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Tf32 => mul_tf32::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
        Engine::Mma => mul_mma::<E, NA, NB>(acc, a, a_at, b, b_at, spec),
    }
}

#[cube]
fn mul_plain<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    let rows = comptime!(spec.grid.fragment_rows());
    let columns = comptime!(spec.grid.fragment_columns());
    let [a_row, a_k] = comptime!(spec.a_steps());
    let [b_k, b_column] = comptime!(spec.b_steps());
    let mut a_from = Array::<usize>::new(comptime!(2 * rows));
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for h in 0..2usize {
            let i = row(comptime!(r * columns), h, spec.grid);
            // Units without work repeat the last row; their results are not used.
            a_from[comptime!(2 * r + h)] =
                a_at + min(i, comptime!(spec.grid.m - 1)) * comptime!(a_row);
        }
    }
    let b_from = b_at + column(0usize, spec.grid) * comptime!(b_column);
    for k in 0..comptime!(spec.k) {
        let mut x = Array::<f32>::new(comptime!(2 * rows));
        #[unroll]
        for r in 0..comptime!(2 * rows) {
            x[r] = f32::cast_from(a[a_from[r] + k * comptime!(a_k)]);
        }
        let b_row = b_from + k * comptime!(b_k);
        #[unroll]
        for c in 0..columns {
            let j = b_row + comptime!(c * spec.grid.across() * 2 * b_column);
            let mut y = Pair::empty();
            y[0] = f32::cast_from(b[j]);
            y[1] = f32::cast_from(b[j + comptime!(b_column)]);
            #[unroll]
            for r in 0..rows {
                let x0 = x[comptime!(2 * r)];
                let x1 = x[comptime!(2 * r + 1)];
                add_outer(acc.index_mut(comptime!(r * columns + c)), x0, x1, y);
            }
        }
    }
}

#[cube]
fn add_outer(acc: &mut Array<Pair>, x0: f32, x1: f32, y: Pair) {
    acc[0] = acc[0] + Pair::new(x0) * y;
    acc[1] = acc[1] + Pair::new(x1) * y;
}

/// A left or right operand of `mma.m16n8k8`: its numbers as sums of two of TF32.
#[derive(CubeType)]
pub(crate) struct Parts {
    high: Array<Vector<tf32, Const<1>>>,
    low: Array<Vector<tf32, Const<1>>>,
}

/// Room for an operand of so many registers.
#[cube]
pub(crate) fn parts(#[comptime] registers: usize) -> Parts {
    Parts {
        high: Array::<Vector<tf32, Const<1>>>::new(registers),
        low: Array::<Vector<tf32, Const<1>>>::new(registers),
    }
}

/// Number `n` of an operand: `high` is x to 11 bits, `low` the rest, which tensor cores read to 11 bits.
#[cube]
pub(crate) fn put_parts(to: &mut Parts, #[comptime] n: usize, x: f32) {
    let high = (u32::reinterpret(x) + 0x1000u32) & 0xffff_e000u32;
    to.high[n] = Vector::<tf32, Const<1>>::reinterpret(high);
    to.low[n] = Vector::<tf32, Const<1>>::reinterpret(x - f32::reinterpret(high));
}

/// `c +=` one of the three products that `a b` is made of, for one 16 x 8 x 8 block; the least comes first.
#[cube]
pub(crate) fn execute_tf32(a: &Parts, b: &Parts, c: &mut Array<Pair>, #[comptime] term: usize) {
    let mma = MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize);
    match comptime!(term) {
        0usize => mma.execute_inplace(&a.low, &b.high, c),
        1usize => mma.execute_inplace(&a.high, &b.low, c),
        _ => mma.execute_inplace(&a.high, &b.high, c),
    }
}

/// f32 on tensor cores.
#[cube]
fn mul_tf32<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    let grid = comptime!(spec.grid);
    let rows = comptime!(grid.fragment_rows());
    let columns = comptime!(grid.fragment_columns());
    let [a_row, a_k] = comptime!(spec.a_steps());
    let [b_k, b_column] = comptime!(spec.b_steps());
    let lane = UNIT_POS as usize % 32;
    let left_column = column(0usize, grid) - lane % 4 * 2;
    let a_from = a_at + row(0usize, 0usize, grid) * a_row + lane % 4 * a_k;
    let b_from = b_at + (left_column + lane / 4) * b_column + lane % 4 * b_k;
    if inside(0usize, grid) {
        #[unroll]
        for step in 0..comptime!(spec.k / 8) {
            let mut left = Sequence::<Parts>::new();
            #[unroll]
            for r in 0..rows {
                let mut block = parts(4usize);
                #[unroll]
                for n in 0..4usize {
                    let down = comptime!(grid.step(r * columns, 0)[0] + n % 2 * 8);
                    let at = comptime!(down * a_row + (step * 8 + n / 2 * 4) * a_k);
                    put_parts(&mut block, n, f32::cast_from(a[a_from + at]));
                }
                left.push(block);
            }
            let mut right = Sequence::<Parts>::new();
            #[unroll]
            for c in 0..columns {
                let mut block = parts(2usize);
                #[unroll]
                for n in 0..2usize {
                    let at = comptime!(c * 8 * b_column + (step * 8 + n * 4) * b_k);
                    put_parts(&mut block, n, f32::cast_from(b[b_from + at]));
                }
                right.push(block);
            }
            // Fragments in the inner loop: products into one fragment wait for each other.
            #[unroll]
            for term in 0..3usize {
                #[unroll]
                for f in 0..comptime!(rows * columns) {
                    let x = left.index(comptime!(f / columns));
                    let y = right.index(comptime!(f % columns));
                    execute_tf32(x, y, acc.index_mut(f), term);
                }
            }
        }
    }
}

#[cube]
fn mul_mma<E: Float, NA: Size, NB: Size>(
    acc: &mut Acc,
    a: &SharedMemory<Vector<E, NA>>,
    a_at: usize,
    b: &SharedMemory<Vector<E, NB>>,
    b_at: usize,
    #[comptime] spec: Mul,
) {
    let grid = comptime!(spec.grid);
    let rows = comptime!(grid.fragment_rows());
    let columns = comptime!(grid.fragment_columns());
    let plane = UNIT_POS as usize / 32;
    let m0 = plane % comptime!(grid.down()) * 16;
    let n0 = plane / comptime!(grid.down()) * comptime!(grid.n / grid.across());
    if plane / comptime!(grid.down()) < comptime!(grid.across()) {
        #[unroll]
        for k in 0..comptime!(spec.k / 16) {
            let mut left = Sequence::<Array<Vector<E, Const<2>>>>::new();
            #[unroll]
            for r in 0..rows {
                left.push(load_a::<E, NA>(
                    a,
                    a_at,
                    m0,
                    comptime!(grid.step(r * columns, 0)[0]),
                    comptime!(k * 16),
                    comptime!(spec.a_stride),
                    comptime!(spec.a_transposed),
                ));
            }
            #[unroll]
            for c in 0..comptime!(columns / 2) {
                let right = load_b::<E, NB>(
                    b,
                    b_at,
                    comptime!(k * 16),
                    n0,
                    comptime!(c * 16),
                    comptime!(spec.b_stride),
                    comptime!(spec.b_transposed),
                );
                #[unroll]
                for r in 0..rows {
                    let f = comptime!(r * columns + c * 2);
                    execute::<E>(left.index(r), &pair(&right, 0usize, 1usize), acc.index_mut(f));
                    execute::<E>(
                        left.index(r),
                        &pair(&right, 2usize, 3usize),
                        acc.index_mut(comptime!(f + 1)),
                    );
                }
            }
        }
    }
}

/// `c += a b` for one 16 x 8 x 16 block.
#[cube]
pub(crate) fn execute<E: Float>(
    a: &Array<Vector<E, Const<2>>>,
    b: &Array<Vector<E, Const<2>>>,
    c: &mut Array<Pair>,
) {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    mma.execute_inplace(a, b, c);
}

/// Two registers of four.
#[cube]
pub(crate) fn pair<E: Float>(
    registers: &Array<Vector<E, Const<2>>>,
    #[comptime] i: usize,
    #[comptime] j: usize,
) -> Array<Vector<E, Const<2>>> {
    let mut two = Array::<Vector<E, Const<2>>>::new(2usize);
    two[0] = registers[i];
    two[1] = registers[j];
    two
}

/// The 16 x 16 block of A at (i + down, k), as four registers.
#[cube]
pub(crate) fn load_a<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    i: usize,
    #[comptime] down: usize,
    #[comptime] k: usize,
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let lane = UNIT_POS as usize % 32;
    if comptime!(transposed) {
        let stored = (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored + i, comptime!(k * stride + down), true)
    } else {
        let stored = (i + lane % 16) * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(down * stride + k), false)
    }
}

/// The 16 x 16 block of B at (k, j + right): registers 0 and 1 are its left half, 2 and 3 its right half.
#[cube]
pub(crate) fn load_b<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] k: usize,
    j: usize,
    #[comptime] right: usize,
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let lane = UNIT_POS as usize % 32;
    if comptime!(transposed) {
        let stored = (j + lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
        load_matrix::<E, N>(tile, at + stored, comptime!(right * stride + k), false)
    } else {
        let stored = lane % 16 * stride + lane / 16 * 8;
        load_matrix::<E, N>(tile, at + stored + j, comptime!(k * stride + right), true)
    }
}

/// Four 8 x 8 matrices; this lane's row of 16 bytes starts `offset` numbers after `at`, whole vectors both.
/// Compile-time offsets come apart from run-time ones, here and in [`put`]: once the sum of both is divided by a
/// vector's width no compiler parts them again, and each load computes an address.
#[cube]
pub(crate) fn load_matrix<E: Float, N: Size>(
    tile: &SharedMemory<Vector<E, N>>,
    at: usize,
    #[comptime] offset: usize,
    #[comptime] transposed: bool,
) -> Array<Vector<E, Const<2>>> {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let width = N::value();
    let at = at / width + comptime!(offset / width);
    mma.load_matrix::<Vector<E, N>, Const<2>>(
        &tile.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}

/// A tile in shared memory, `numbers` long.
#[cube]
pub(crate) fn tile<E: Float, N: Size>(#[comptime] numbers: usize) -> SharedMemory<Vector<E, N>> {
    let width = N::value();
    if comptime!(width == 1) {
        SharedMemory::<Vector<E, N>>::new(numbers)
    } else {
        // `ldmatrix` reads rows of 16 bytes, aligned.
        SharedMemory::<Vector<E, N>>::new_aligned(comptime!(numbers / width), 16usize)
    }
}

/// Where rows of one matrix lie in a tensor, all counted in numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    /// First number of the first row.
    pub start: usize,
    /// From one row to the next.
    pub stride: usize,
    /// Rows that exist; those after are read as zeros.
    pub valid: usize,
}

/// The part of a matrix that a tile holds. `columns` is a multiple of 16; columns of the tensor end
/// at `width`, and those after are read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Window {
    pub rows: usize,
    pub columns: usize,
    pub width: usize,
    /// Numbers from one row of the tile to the next.
    pub stride: usize,
    pub units: usize,
}

impl Window {
    /// Vectors of `read` numbers that a unit loads.
    fn turns(&self, read: usize) -> usize {
        (self.rows * self.columns / read).div_ceil(self.units)
    }
}

/// Fills a tile with rows of `source`, from column `first` on.
#[cube]
pub(crate) fn load<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    #[unroll]
    for turn in 0..comptime!(window.turns(read)) {
        let x = request::<S, G>(source, rows, first, turn, window);
        lay_down::<S, G, E, N>(tile, x, turn, window);
    }
}

/// This unit's vectors of [`load`], requested and not yet waited for.
#[cube]
pub(crate) fn fetch<S: Float, G: Size>(
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) -> Array<Vector<S, G>> {
    let read = G::value();
    let turns = comptime!(window.turns(read));
    let mut coming = Array::<Vector<S, G>>::new(turns);
    #[unroll]
    for turn in 0..turns {
        coming[turn] = request::<S, G>(source, rows, first, turn, window);
    }
    coming
}

/// Writes the vectors of [`fetch`] to a tile.
#[cube]
pub(crate) fn lay<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    coming: &Array<Vector<S, G>>,
    #[comptime] window: Window,
) {
    let read = G::value();
    #[unroll]
    for turn in 0..comptime!(window.turns(read)) {
        lay_down::<S, G, E, N>(tile, coming[turn], turn, window);
    }
}

/// Vector `turn` of this unit's share of a window.
#[cube]
fn request<S: Float, G: Size>(
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] turn: usize,
    #[comptime] window: Window,
) -> Vector<S, G> {
    let read = G::value();
    let across = comptime!(window.columns / read);
    let n = UNIT_POS as usize + comptime!(turn * window.units);
    let i = n / across;
    let c = n % across * read;
    let mut x = Vector::<S, G>::new(S::new(0.0));
    if n < comptime!(window.rows * across) && i < rows.valid && first + c < comptime!(window.width)
    {
        x = source[(rows.start + i * rows.stride + first + c) / read];
    }
    x
}

#[cube]
fn lay_down<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    x: Vector<S, G>,
    #[comptime] turn: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    let kept = N::value();
    let across = comptime!(window.columns / read);
    let n = UNIT_POS as usize + comptime!(turn * window.units);
    if n < comptime!(window.rows * across) {
        let at = n / across * comptime!(window.stride) + n % across * read;
        if comptime!(read == kept) {
            tile[at / kept] = Vector::<E, N>::cast_from(x);
        } else {
            #[unroll]
            for l in 0..read {
                tile[at + l] = Vector::<E, N>::cast_from(x[l]);
            }
        }
    }
}

/// As [`load`], from `at` numbers into the tile on and without waiting: 16 bytes a copy, which the
/// barrier that they are committed to waits for. Tensor and tile are of one type.
#[cube]
pub(crate) fn load_async<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    at: usize,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    let across = comptime!(window.columns / read);
    // Every unit stays in its column, so that addresses only ever grow by whole rows.
    let down = comptime!(window.units / across);
    let i = UNIT_POS as usize / across;
    let c = UNIT_POS as usize % across;
    let from = (rows.start + first) / read + i * (rows.stride / read) + c;
    let step = rows.stride / read * down;
    let to = at / read + i * comptime!(window.stride / read) + c;
    #[unroll]
    for turn in 0..comptime!(window.rows.div_ceil(down)) {
        let row = i + comptime!(turn * down);
        let to = to + comptime!(turn * down * window.stride / read);
        if i < down && row < comptime!(window.rows) {
            if row < rows.valid {
                let from = from + step * turn;
                copy_async(
                    &source.slice(from, from + 1).downcast::<Vector<E, N>>(),
                    &mut tile.slice_mut(to, to + 1),
                    comptime!(read as u32),
                );
            } else {
                tile[to] = Vector::<E, N>::new(E::new(0.0));
            }
        }
    }
}

/// Writes a pair into a tile, `offset` numbers after `at`: as it is where vectors hold two (both are even
/// then), one by one where they hold one.
#[cube]
pub(crate) fn put<E: Float, M: Size>(
    tile: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    #[comptime] offset: usize,
    x: Pair,
) {
    let width = M::value();
    if comptime!(width == 1) {
        tile[at + offset] = Vector::<E, M>::cast_from(x[0usize]);
        tile[at + comptime!(offset + 1)] = Vector::<E, M>::cast_from(x[1usize]);
    } else {
        tile[at / 2 + comptime!(offset / 2)] = Vector::<E, M>::cast_from(x);
    }
}

/// As [`put`], into a tensor whose rows may end before the pair does: `room` numbers are left.
#[cube]
pub(crate) fn put_out<S: Float, M: Size>(
    tensor: &mut Array<Vector<S, M>>,
    at: usize,
    x: Pair,
    room: usize,
) {
    let width = M::value();
    if comptime!(width == 1) {
        if room > 0 {
            tensor[at] = Vector::<S, M>::cast_from(x[0usize]);
        }
        if room > 1 {
            tensor[at + 1] = Vector::<S, M>::cast_from(x[1usize]);
        }
    } else if room > 0 {
        tensor[at / 2] = Vector::<S, M>::cast_from(x);
    }
}

/// Two pairs of this unit and of its neighbour across `lanes`, exchanged so that each writes four
/// neighbouring numbers, vector `at` of the tensor: the unit with `second` the second pairs, the other one
/// the first. Planes that write whole sectors of 32 bytes write half as often.
#[cube]
pub(crate) fn put_four<S: Float, W: Size>(
    tensor: &mut Array<Vector<S, W>>,
    at: usize,
    first: Pair,
    other: Pair,
    second: bool,
    there: bool,
    #[comptime] lanes: u32,
) {
    let a = u32::reinterpret(Vector::<S, Const<2>>::cast_from(first));
    let b = u32::reinterpret(Vector::<S, Const<2>>::cast_from(other));
    let got = plane_shuffle_xor(select(second, a, b), lanes);
    let low = Vector::<S, Const<2>>::reinterpret(select(second, got, a));
    let high = Vector::<S, Const<2>>::reinterpret(select(second, b, got));
    let mut x = Vector::<S, W>::empty();
    x[0] = low[0];
    x[1] = low[1];
    x[2] = high[0];
    x[3] = high[1];
    if there {
        tensor[at] = x;
    }
}

/// Puts a pair into a fragment.
#[cube]
pub(crate) fn set(fragment: &mut Array<Pair>, #[comptime] h: usize, x: Pair) {
    fragment[h] = x;
}
