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

use cubecl::prelude::*;

mod copies;
mod products;

pub(crate) use copies::{Rows, Window, fetch, lay, load, load_async, put, put_four, put_out, tile};
pub(crate) use products::{
    Mul, Parts, execute, execute_tf32, load_a, load_b, load_matrix, mul, pair, parts, put_parts,
};

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

/// Puts a pair into a fragment.
#[cube]
pub(crate) fn set(fragment: &mut Array<Pair>, #[comptime] h: usize, x: Pair) {
    fragment[h] = x;
}
