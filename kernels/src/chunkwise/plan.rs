//! Compile-time plans: one that every stage has, and what two of them add to it.

use crate::chunkwise::decay::decay_factors;
use crate::chunkwise::task::Task;
use crate::tile::{Engine, Grid, INVERSE, Inverse, Mul, SWIZZLED, Window, Zeros};
use crate::variant::{Decay, Variant};
use std::ops::Deref;

/// Numbers of a tile that is neither read nor written.
pub(crate) const UNUSED: usize = 16;

/// Compile-time values of a stage. Neither batch nor length is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub source: &'static str,
    pub variant: Variant,
    /// Sequences have lengths of their own.
    pub varlen: bool,
    pub engine: Engine,
    /// `Tf32`: factors are rounded, for one product in place of three.
    pub rounded: bool,
    /// Products are those of warpgroups. Right factors lie in swizzled tiles; outside the state pass left factors of tensors
    /// do too.
    pub warpgroups: bool,
    pub key_width: usize,
    pub value_width: usize,
    /// C, tokens of a chunk.
    pub chunk: usize,
    /// Columns of keys in a tile.
    pub key_slice: usize,
    /// Columns of values in a tile; in the state pass those that a cube owns.
    pub value_slice: usize,
    /// Units that share the work of a stage, from unit `first` of the cube on: where producers and consumers each have their
    /// own, those of one of them.
    pub units: usize,
    pub first: usize,
}

/// Plan of a launch of the state pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StatePlan {
    pub common: Plan,
    pub schedule: Schedule,
    /// Planes that split the keys of the same columns of values; 1 where the state is in shared memory.
    pub split_k: usize,
    pub task: Task,
}

/// When a chunk's tiles are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Schedule {
    /// Slice by slice, right before a slice is used.
    Direct,
    /// By asynchronous copies of all tiles of a chunk: of this one (1 stage), or of the next one while this one is in
    /// use (2 stages).
    Staged { stages: usize },
    /// Warp specialisation. Producer planes copy tiles and make scores ahead of the others, or of a delta rule the UT transform
    /// alone: of three chunks one is copied, one scored, one consumed.
    Specialized { producers: usize },
}

/// Plan of the input gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GradientPlan {
    pub common: Plan,
    /// Tiles hold all values of a chunk, and all keys or a slice of them; else slices of both.
    pub whole: bool,
    /// S and dS' take turns in one tile.
    pub one_state: bool,
}

impl Deref for StatePlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.common
    }
}

impl Deref for GradientPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.common
    }
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

    /// Whether a cube's units are known to be planes of 32.
    pub fn has_planes(&self) -> bool {
        self.engine.by_planes()
    }

    /// The plan of products whose factors are as they lie in tensors, such as those over values. Where scaled factors are
    /// rounded to TF32, these have 16 bits. Accumulators lie the same in both.
    pub fn unscaled(&self) -> Plan {
        let engine = if self.rounded { Engine::Mma } else { self.engine };
        Plan { engine, rounded: false, ..*self }
    }

    /// From one row of a tile to the next, for rows of `columns` numbers.
    pub fn stride(&self, columns: usize) -> usize {
        columns + self.engine.padding()
    }

    /// A tile of `rows` rows and `columns` columns out of a tensor of `width` columns.
    pub fn window(&self, rows: usize, columns: usize, width: usize) -> Window {
        Window {
            rows,
            columns,
            width,
            stride: self.stride(columns),
            swizzled: false,
            units: self.units,
            first: self.first,
        }
    }

    /// A factor of products: a swizzled tile has nothing between its rows.
    pub fn factor(&self, window: Window) -> Window {
        match self.warpgroups {
            true => Window { swizzled: true, stride: window.columns, ..window },
            false => window,
        }
    }

    /// Bytes to which tiles of factors are aligned.
    pub fn aligned(&self) -> usize {
        if self.warpgroups { SWIZZLED } else { 16 }
    }

    /// A chunk's rows of keys.
    pub fn key_window(&self) -> Window {
        self.window(self.chunk, self.key_slice, self.key_width)
    }

    /// A chunk's rows of values.
    pub fn value_window(&self) -> Window {
        self.window(self.chunk, self.value_slice, self.value_width)
    }

    /// Numbers of a tile [C, key_slice].
    pub fn key_numbers(&self) -> usize {
        self.chunk * self.stride(self.key_slice)
    }

    /// Numbers of a tile [C, value_slice].
    pub fn value_numbers(&self) -> usize {
        self.chunk * self.stride(self.value_slice)
    }

    /// Numbers of a tile [C, C].
    pub fn square_numbers(&self) -> usize {
        self.chunk * self.stride(self.chunk)
    }

    pub fn grid(&self, m: usize, n: usize) -> Grid {
        let Self { engine, rounded, units, first, .. } = *self;
        Grid { engine, rounded, m, n, units, first }
    }

    /// C x C.
    pub fn pairs(&self) -> Grid {
        self.grid(self.chunk, self.chunk)
    }

    /// Of the UT transform.
    pub fn inverse(&self) -> Inverse {
        let Self { engine, chunk, units, .. } = *self;
        Inverse { engine, chunk, units }
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
            zeros: Zeros::None,
        }
    }
}

impl StatePlan {
    /// Numbers of a unit that hold a segment's cumulative decay: none where M is a matrix, or 1.
    pub fn carried_decays(&self) -> usize {
        match self.variant.decay {
            _ if !self.task.local() || self.variant.solves() => 0,
            Decay::None => 0,
            Decay::Scalar => 1,
            Decay::Vector => self.key_width.div_ceil(self.units),
        }
    }

    /// Producer planes, which make scores ahead of the others; 0 where the intra-chunk stage does.
    pub fn producers(&self) -> usize {
        match self.schedule {
            Schedule::Specialized { producers } => producers,
            Schedule::Direct | Schedule::Staged { .. } => 0,
        }
    }

    /// Whether producers invert: of a delta rule's intra-chunk stage they make T and the decay factors, and consumers A_qk.
    pub fn inverts_ahead(&self) -> bool {
        self.producers() > 0 && self.variant.solves()
    }

    /// Registers of a producer and of a consumer, where consumers need more than all could have.
    pub fn registers(&self) -> Option<[usize; 2]> {
        match self.units {
            _ if !self.inverts_ahead() || self.key_width < 128 => None,
            512 => Some([80, 176]),
            _ => Some([96, 216]),
        }
    }

    /// Numbers of a tile of a chunk's rows of keys, as of all right factors: swizzled tiles have nothing between their rows.
    pub fn key_numbers(&self) -> usize {
        let window = self.factor(self.key_window());
        window.rows * window.stride
    }

    /// Numbers of a tile [C, C].
    pub fn square_numbers(&self) -> usize {
        let window = self.factor(self.square_window());
        window.rows * window.stride
    }

    /// Numbers from one pipeline stage's [C, C] matrices to the next one's: T of producers is in two parts.
    pub fn square_stride(&self) -> usize {
        if self.inverts_ahead() { INVERSE } else { self.square_numbers() }
    }

    /// A [C, C] matrix.
    pub fn square_window(&self) -> Window {
        self.window(self.chunk, self.chunk, self.chunk)
    }

    /// Pipeline stages, a chunk's tiles each.
    pub fn stages(&self) -> usize {
        match self.schedule {
            Schedule::Direct => 1,
            Schedule::Staged { stages } => stages,
            Schedule::Specialized { .. } => 3,
        }
    }

    /// Whether the state is in registers; else in shared memory.
    pub fn in_registers(&self) -> bool {
        self.engine.accumulators_are_operands()
    }

    /// Chunks whose scores are held at once.
    pub fn score_stages(&self) -> usize {
        self.stages().min(2)
    }

    /// Chunks whose decay factors are held at once: producers that invert make them two chunks ahead of consumers.
    pub fn decay_factor_stages(&self) -> usize {
        if self.inverts_ahead() { 3 } else { self.score_stages() }
    }

    /// Rows of a chunk's decay factors.
    pub fn decay_factor_rows(&self) -> usize {
        match self.inverts_ahead() && self.variant.scalar() {
            true => decay_factors::ROWS_WITH_MASKS,
            false => decay_factors::ROWS,
        }
    }

    /// Whether blocks are written through the tile of values: a plane of a warpgroup has 16 columns of it to itself, and a low
    /// rank transition needs its values again.
    pub fn writes_through_values(&self) -> bool {
        self.warpgroups && self.split_k == 1 && !self.variant.low_rank()
    }

    /// The producers' plan.
    pub fn of_producers(&self) -> Plan {
        Plan { units: self.producers() * 32, ..self.common }
    }

    /// The producer that makes a chunk's decay factors as well: that of the upper right corner of A_qk. Of eight
    /// it has nothing else to make, of four as much as the others. Where producers invert, the next one helps.
    pub fn decay_factor_producer(&self) -> usize {
        let grid = self.of_producers().pairs();
        grid.down() * (grid.across() - 1)
    }

    /// The consumers' plan.
    pub fn of_consumers(&self) -> Plan {
        let first = self.producers() * 32;
        Plan { units: self.units - first, first, ..self.common }
    }

    /// The plan of the units that copy a chunk's tiles: of producers and consumers those with less to do, else all.
    pub fn of_copying(&self) -> Plan {
        match self.producers() {
            0 => self.common,
            _ if self.inverts_ahead() => self.of_consumers(),
            _ => self.of_producers(),
        }
    }

    /// Tiles of a matrix [K, K] where the state's are `value_slice` wide.
    pub fn key_tiles(&self) -> usize {
        self.key_width.div_ceil(self.value_slice)
    }

    /// This plan, its tiles of so many columns of values.
    pub fn of_columns(&self, value_slice: usize) -> Self {
        Self { common: Plan { value_slice, ..self.common }, ..*self }
    }

    /// This plan, by so many units.
    pub fn by_units(&self, units: usize) -> Self {
        Self { common: Plan { units, ..self.common }, ..*self }
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
