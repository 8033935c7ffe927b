//! Arguments of the kernels: compile-time numbers, and tensors.

use cubecl::prelude::*;

/// Rows whose sums over parts meet at once.
pub(in crate::fused) const TOGETHER: usize = 4;
/// Units that share the sum of a row.
pub(in crate::fused) const LANES: usize = 8;
/// Sums of each row that are kept at once.
pub(in crate::fused) const SUMS: usize = 7;

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::fused) struct Form {
    pub(in crate::fused) source: &'static str,
    /// K; of rows in a wider layer of TTT-MLP, F.
    pub(in crate::fused) width: usize,
    /// b.
    pub(in crate::fused) rows: usize,
    /// Units that share a column.
    pub(in crate::fused) parts: usize,
    /// Whether weights are kept for a backward pass.
    pub(in crate::fused) keep: bool,
    /// Whether there are gradients of y and of the last weights.
    pub(in crate::fused) given: [bool; 2],
}

impl Form {
    /// Rows of a column that a unit owns.
    pub(in crate::fused) fn run(&self) -> usize {
        self.width.div_ceil(self.parts)
    }

    /// From row to row of a tile: odd, so that the rows of a column lie in different banks. Numbers behind a row's
    /// end are zeros that runs reach.
    pub(in crate::fused) fn stride(&self) -> usize {
        (self.parts * self.run()) | 1
    }

    /// Numbers of a tile, `[b, K]`.
    pub(in crate::fused) fn tile(&self) -> usize {
        self.rows * self.stride()
    }

    /// Numbers of the sums that meet.
    pub(in crate::fused) fn meeting(&self) -> usize {
        (TOGETHER * self.units()).max(LANES * self.rows)
    }

    /// Rows of a tile that a unit owns a number of.
    pub(in crate::fused) fn turns(&self) -> usize {
        self.rows.div_ceil(self.parts)
    }

    pub(in crate::fused) fn units(&self) -> usize {
        self.width * self.parts
    }

    /// Numbers of W over c.
    pub(in crate::fused) fn weights(&self) -> usize {
        (self.width + 1) * self.width
    }

    /// Bytes of shared memory of a pass back, which has more than one forward.
    pub(in crate::fused) fn bytes(&self) -> usize {
        let rows = self.rows;
        4 * (6 * self.tile() + self.meeting() + 2 * rows * rows + (SUMS + 2) * rows)
    }
}

/// [`Inputs`](super::Inputs).
#[derive(CubeType, CubeLaunch)]
pub(in crate::fused) struct Operands {
    pub(in crate::fused) q: Array<f32>,
    pub(in crate::fused) k: Array<f32>,
    pub(in crate::fused) v: Array<f32>,
    pub(in crate::fused) rate: Array<f32>,
    pub(in crate::fused) scale: Array<f32>,
    pub(in crate::fused) norm_weight: Array<f32>,
    pub(in crate::fused) norm_bias: Array<f32>,
    /// Of the start; in a pass back, of the start of each mini-batch.
    pub(in crate::fused) weights: Array<f32>,
    pub(in crate::fused) epsilon: f32,
}

/// [`Outputs`](super::Outputs).
#[derive(CubeType, CubeLaunch)]
pub(in crate::fused) struct ResultArrays {
    pub(in crate::fused) y: Array<f32>,
    pub(in crate::fused) weights: Array<f32>,
    pub(in crate::fused) starts: Array<f32>,
}

/// Gradients of [`Outputs`](super::Outputs).
#[derive(CubeType, CubeLaunch)]
pub(in crate::fused) struct GivenArrays {
    pub(in crate::fused) d_y: Array<f32>,
    pub(in crate::fused) d_weights: Array<f32>,
}

/// [`Gradients`](super::Gradients).
#[derive(CubeType, CubeLaunch)]
pub(in crate::fused) struct GradientArrays {
    pub(in crate::fused) q: Array<f32>,
    pub(in crate::fused) k: Array<f32>,
    pub(in crate::fused) v: Array<f32>,
    pub(in crate::fused) rate: Array<f32>,
    pub(in crate::fused) scale: Array<f32>,
    pub(in crate::fused) norm_weight: Array<f32>,
    pub(in crate::fused) norm_bias: Array<f32>,
    pub(in crate::fused) weights: Array<f32>,
}

/// Mini-batches of a sequence, and H.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::fused) struct Sizes {
    pub(in crate::fused) mini_batches: u32,
    pub(in crate::fused) heads: u32,
}
