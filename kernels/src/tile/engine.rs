//! Engines, and the trait that they have: how tiles are multiplied.

use super::Acc;
use crate::refusal::F32;
use cubecl::ir::StorageType;
use cubecl::prelude::*;

/// Engine: the arithmetic that multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// f32 arithmetic, on every device.
    Plain,
    /// f32 on tensor cores through `mma.m16n8k8`, three products of TF32 parts for each product of f32
    /// (relative error below 2^-19, in the mean 2^-22 towards 0): NVIDIA from sm_80 on. Around a state pass on
    /// [`Engine::Mma`], one product of scaled factors that are rounded to TF32 (1.3 2^-10).
    Tf32,
    /// Tensor cores through `mma.m16n8k16`, bf16 or f16 in and f32 out: NVIDIA from sm_80 on.
    Mma,
}

impl Engine {
    /// Whether a plane has fragments of tensor cores, 16 rows high, and not each unit its own.
    pub(crate) fn by_planes(self) -> bool {
        self != Engine::Plain
    }

    /// Numbers between two rows of a tile.
    pub(crate) fn padding(self) -> usize {
        match self {
            Engine::Plain => 1,
            // Eight rows of four numbers meet 32 banks.
            Engine::Tf32 => 4,
            Engine::Mma => 8,
        }
    }

    /// Bytes of a number in a tile.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Engine::Plain | Engine::Tf32 => 4,
            Engine::Mma => 2,
        }
    }

    /// Type of a number in a tile; `between` is that of tensors between stages.
    pub(crate) fn tile_type(self, between: StorageType) -> StorageType {
        match self {
            Engine::Plain | Engine::Tf32 => F32,
            Engine::Mma => between,
        }
    }

    /// Numbers of a vector in a tile that is loaded, and in one of products: 16 bytes for asynchronous copies and
    /// `ldmatrix`, and a pair of an accumulator.
    pub(crate) fn tile_widths(self) -> [usize; 2] {
        match self {
            Engine::Plain | Engine::Tf32 => [1, 1],
            Engine::Mma => [8, 2],
        }
    }

    /// Numbers of a vector that is written: neighbouring lanes of tensor cores exchange pairs for four in a row.
    pub(crate) fn store_width(self) -> usize {
        match self {
            Engine::Plain | Engine::Tf32 => 1,
            Engine::Mma => 4,
        }
    }

    /// Whether accumulators are operands of the next product as they lie in registers, but for rounding. A state
    /// pass then keeps its state there, else in shared memory.
    pub(crate) fn accumulators_are_operands(self) -> bool {
        match self {
            Engine::Plain | Engine::Tf32 => false,
            Engine::Mma => true,
        }
    }
}

/// How an [m, n] product is split over the units of a cube. `m` and `n` are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grid {
    pub engine: Engine,
    /// `Tf32`: factors are rounded, for one product in place of three.
    pub rounded: bool,
    pub m: usize,
    pub n: usize,
    /// Units that have a part of it, from unit `first` of the cube on: 0 but for products of warpgroups.
    pub units: usize,
    pub first: usize,
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

    /// Units that hold columns of the same rows.
    pub fn slots(&self) -> usize {
        match self.engine {
            Engine::Plain => self.across(),
            Engine::Tf32 | Engine::Mma => 4 * self.across(),
        }
    }

    /// `Tf32`: the first of the three products that a product of f32 is made of, least first.
    pub fn first_term(&self) -> usize {
        if self.rounded { 2 } else { 0 }
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
    /// Elements of A that are 0, which `Tf32` does not multiply.
    pub zeros: Zeros,
}

/// The part of A that is known to be 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Zeros {
    None,
    /// Above the diagonal.
    Above,
    /// Below the diagonal.
    Below,
}

impl Mul {
    /// This product of an A that has such zeros.
    pub fn with_zeros(self, zeros: Zeros) -> Self {
        Self { zeros, ..self }
    }

    /// Where the k of a TF32 fragment's two registers lie: from lane to lane, and from one register to the other. A lane may
    /// take any two of eight, the same of both operands. Two neighbours where B is stored by rows of k, which then meet
    /// every bank once, else four apart.
    pub(super) fn k_of_lane(&self) -> [usize; 2] {
        if self.b_transposed { [1, 4] } else { [2, 1] }
    }

    /// Numbers from one row of A to the next, and from one column to the next.
    pub(super) fn a_steps(&self) -> [usize; 2] {
        if self.a_transposed { [1, self.a_stride] } else { [self.a_stride, 1] }
    }

    /// The same of B.
    pub(super) fn b_steps(&self) -> [usize; 2] {
        if self.b_transposed { [1, self.b_stride] } else { [self.b_stride, 1] }
    }
}

/// Compile-time values of an inverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Inverse {
    pub engine: Engine,
    /// C, rows and columns.
    pub chunk: usize,
    pub units: usize,
}

impl Inverse {
    /// Numbers from one row to the next. Four more than a multiple of 32 on tensor cores: the lanes of a plane, eight
    /// rows by four columns or pairs, then meet a bank twice at most, as do the columns of two blocks that are solved.
    pub fn stride(&self) -> usize {
        match self.engine {
            Engine::Plain => self.chunk + 1,
            Engine::Tf32 | Engine::Mma => self.chunk + 4,
        }
    }
}

/// The arithmetic of an engine: which unit holds which element of a product, and how products are made.
#[cube]
pub(crate) trait TileEngine: Send + Sync + 'static {
    /// Row of pair `h` of fragment `f`.
    fn row(#[comptime] f: usize, #[comptime] h: usize, #[comptime] grid: Grid) -> usize;

    /// First column of the pairs of fragment `f`. Of a unit that is not [`inside`](Self::inside) it is another unit's: it
    /// may be read, not written.
    fn column(#[comptime] f: usize, #[comptime] grid: Grid) -> usize;

    /// Whether fragment `f` belongs to the product: there may be more units than work.
    fn inside(#[comptime] f: usize, #[comptime] grid: Grid) -> bool;

    /// This unit's number among [`Grid::slots`], those that hold columns of the same rows.
    fn slot(#[comptime] grid: Grid) -> usize;

    /// `acc += A B`. `a` and `b` start `a_at` and `b_at` numbers into their tiles.
    fn mul<E: Float, NA: Size, NB: Size>(
        acc: &mut Acc,
        a: &SharedMemory<Vector<E, NA>>,
        a_at: usize,
        b: &SharedMemory<Vector<E, NB>>,
        b_at: usize,
        #[comptime] spec: Mul,
    );
}
