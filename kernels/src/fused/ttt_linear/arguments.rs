//! Arguments of the kernels: compile-time numbers, and tensors.

use cubecl::prelude::*;

/// Rows whose sums over parts meet at once.
pub(super) const TOGETHER: usize = 4;
/// Units that share the sum of a row.
pub(super) const LANES: usize = 8;
/// Sums of each row that are kept at once.
pub(super) const SUMS: usize = 7;

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub(super) source: &'static str,
    /// K.
    pub(super) width: usize,
    /// b.
    pub(super) rows: usize,
    /// Units that share a column.
    pub(super) parts: usize,
    /// Whether weights are kept for a backward pass.
    pub(super) keep: bool,
    /// Whether there are gradients of y and of the last weights.
    pub(super) given: [bool; 2],
}

impl Form {
    /// Rows of a column that a unit owns.
    pub(super) fn run(&self) -> usize {
        self.width.div_ceil(self.parts)
    }

    /// From row to row of a tile: odd, so that the rows of a column lie in different banks. Numbers behind a row's
    /// end are zeros that runs reach.
    pub(super) fn stride(&self) -> usize {
        (self.parts * self.run()) | 1
    }

    /// Numbers of a tile, `[b, K]`.
    pub(super) fn tile(&self) -> usize {
        self.rows * self.stride()
    }

    /// Numbers of the sums that meet.
    pub(super) fn meeting(&self) -> usize {
        (TOGETHER * self.units()).max(LANES * self.rows)
    }

    /// Rows of a tile that a unit owns a number of.
    pub(super) fn turns(&self) -> usize {
        self.rows.div_ceil(self.parts)
    }

    pub(super) fn units(&self) -> usize {
        self.width * self.parts
    }

    /// Numbers of W over c.
    pub(super) fn weights(&self) -> usize {
        (self.width + 1) * self.width
    }

    /// Bytes of shared memory of a pass back, which has more than one forward.
    pub(super) fn bytes(&self) -> usize {
        let rows = self.rows;
        4 * (6 * self.tile() + self.meeting() + 2 * rows * rows + (SUMS + 2) * rows)
    }
}

/// [`Inputs`](super::Inputs).
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands {
    pub(super) q: Array<f32>,
    pub(super) k: Array<f32>,
    pub(super) v: Array<f32>,
    pub(super) rate: Array<f32>,
    pub(super) scale: Array<f32>,
    pub(super) norm_weight: Array<f32>,
    pub(super) norm_bias: Array<f32>,
    /// Of the start; in a pass back, of the start of each mini-batch.
    pub(super) weights: Array<f32>,
    pub(super) epsilon: f32,
}

/// [`Outputs`](super::Outputs).
#[derive(CubeType, CubeLaunch)]
pub(super) struct ResultArrays {
    pub(super) y: Array<f32>,
    pub(super) weights: Array<f32>,
    pub(super) starts: Array<f32>,
}

/// Gradients of [`Outputs`](super::Outputs).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GivenArrays {
    pub(super) d_y: Array<f32>,
    pub(super) d_weights: Array<f32>,
}

/// [`Gradients`](super::Gradients).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GradientArrays {
    pub(super) q: Array<f32>,
    pub(super) k: Array<f32>,
    pub(super) v: Array<f32>,
    pub(super) rate: Array<f32>,
    pub(super) scale: Array<f32>,
    pub(super) norm_weight: Array<f32>,
    pub(super) norm_bias: Array<f32>,
    pub(super) weights: Array<f32>,
}

/// Mini-batches of a sequence, and H.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) mini_batches: u32,
    pub(super) heads: u32,
}
