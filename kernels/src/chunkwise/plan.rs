//! The compile-time plan of a kernel.

use crate::tile::{Engine, Grid, Mul, Window};
use crate::variant::Variant;

/// Compile-time values of a kernel. Neither batch nor length is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub source: &'static str,
    pub variant: Variant,
    pub engine: Engine,
    pub key_width: usize,
    pub value_width: usize,
    /// C, tokens of a chunk.
    pub chunk: usize,
    /// Columns of keys in a tile.
    pub key_slice: usize,
    /// Columns of values that a cube of the state pass owns.
    pub value_tile: usize,
    /// Columns of values in a tile elsewhere.
    pub value_slice: usize,
    /// Pipeline stages of the state pass, a chunk's tiles each: with 2, one is copied while one is in use; with
    /// producers 3, since one is scored in between. Input gradients on tensor cores: 1 if a chunk's tiles are held
    /// at once, 0 if slice by slice.
    pub stages: usize,
    /// Producer planes of the state pass, which make scores ahead of the others; 0 where the intra-chunk stage does.
    pub producers: usize,
    /// Planes of the state pass that split the keys of the same columns of values; 1 on the f32 engines.
    pub split_k: usize,
    pub units: usize,
}

impl Plan {
    /// K, filled up to whole slices.
    pub fn keys(&self) -> usize {
        self.key_width.next_multiple_of(self.key_slice)
    }

    pub fn key_slices(&self) -> usize {
        self.keys() / self.key_slice
    }

    pub fn value_slices(&self) -> usize {
        self.value_width.div_ceil(self.value_slice)
    }

    pub fn value_tiles(&self) -> usize {
        self.value_width.div_ceil(self.value_tile)
    }

    /// Chunks whose scores the state pass holds at once.
    pub fn score_stages(&self) -> usize {
        self.stages.min(2)
    }

    /// This plan with no units but the producers.
    pub fn of_producers(&self) -> Self {
        Self { units: self.producers * 32, ..*self }
    }

    /// The producer that makes a chunk's decay factors as well: that of the upper right corner of A_qk. Of eight
    /// it has nothing else to make, of four as much as the others.
    pub fn decay_factor_producer(&self) -> usize {
        let grid = self.of_producers().pairs();
        grid.down() * (grid.across() - 1)
    }

    /// Units that copy a chunk's tiles: producers alone, because consumers have more to do, or all.
    pub fn copying_units(&self) -> usize {
        if self.producers > 0 { self.of_producers().units } else { self.units }
    }

    /// Tiles of a matrix [K, K] where the state's are `value_tile` wide.
    pub fn key_tiles(&self) -> usize {
        self.key_width.div_ceil(self.value_tile)
    }

    /// From one row of a tile to the next, for rows of `columns` numbers.
    pub fn stride(&self, columns: usize) -> usize {
        columns
            + match self.engine {
                Engine::Plain => 1,
                // Eight rows of four numbers meet 32 banks.
                Engine::Tf32 => 4,
                Engine::Mma => 8,
            }
    }

    /// A tile of `rows` rows and `columns` columns out of a tensor of `width` columns.
    pub fn window(&self, rows: usize, columns: usize, width: usize) -> Window {
        Window { rows, columns, width, stride: self.stride(columns), units: self.units }
    }

    /// A chunk's rows of keys.
    pub fn key_window(&self) -> Window {
        self.window(self.chunk, self.key_slice, self.key_width)
    }

    pub fn grid(&self, m: usize, n: usize) -> Grid {
        Grid { engine: self.engine, m, n, units: self.units }
    }

    /// C x C.
    pub fn pairs(&self) -> Grid {
        self.grid(self.chunk, self.chunk)
    }

    /// `[m, n] += [m, k] [k, n]` over tiles whose rows are this long as stored.
    pub fn mul(&self, grid: Grid, k: usize, a: Stored, b: Stored) -> Mul {
        Mul {
            grid,
            k,
            a_stride: self.stride(a.columns),
            b_stride: self.stride(b.columns),
            a_transposed: a.transposed,
            b_transposed: b.transposed,
        }
    }
}

/// How a tile that goes into a product is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub columns: usize,
    pub transposed: bool,
}

/// Row-major, as the product reads it.
pub(crate) fn row_major(columns: usize) -> Stored {
    Stored { columns, transposed: false }
}

/// Transposed: rows for columns.
pub(crate) fn transposed(columns: usize) -> Stored {
    Stored { columns, transposed: true }
}
