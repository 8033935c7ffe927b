//! Arguments of the kernels: compile-time numbers, and tensors.

use super::Cell;
use cubecl::prelude::*;

/// Cells of the widest head whose recurrent weights lie in registers.
const HELD: usize = 64;

/// i, f, z and o.
pub(super) const GATES: usize = 4;

/// k, w, tanh(z), sigmoid(o), sigmoid(-f), c, and n or, of LSTM, tanh(c).
pub(super) const SAVED: usize = 7;

/// m before the first token: lower than any i.
pub(super) const LOWEST: f32 = -1e30;

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub(super) source: &'static str,
    pub(super) cell: Cell,
    /// D.
    pub(super) width: usize,
    /// Sequences of a cube.
    pub(super) together: usize,
    /// Units of a cube.
    pub(super) units: usize,
    /// Whether there is a state before the first token.
    pub(super) state: bool,
    /// Whether numbers are kept for a backward pass.
    pub(super) keep: bool,
    /// Whether there are gradients of h, of the last c and of the last n.
    pub(super) given: [bool; 3],
}

impl Form {
    /// Whether cells have n and m.
    pub(super) fn scaled(&self) -> bool {
        self.cell == Cell::Exponential
    }

    /// Columns of a unit.
    pub(super) fn turns(&self) -> usize {
        (GATES * self.width).div_ceil(self.units)
    }

    /// Whether a unit holds its part of R in registers.
    pub(super) fn held(&self) -> bool {
        self.width <= HELD && self.turns() == 1
    }

    /// Units that own a cell.
    pub(super) fn cells(&self) -> usize {
        self.together * self.width
    }

    /// Gates of a cube.
    pub(super) fn gates(&self) -> usize {
        GATES * self.cells()
    }
}

/// [`Inputs`](super::Inputs).
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands {
    pub(super) x: Array<f32>,
    pub(super) r: Array<f32>,
    pub(super) h: Array<f32>,
    pub(super) c: Array<f32>,
    pub(super) n: Array<f32>,
    pub(super) m: Array<f32>,
}

/// [`Outputs`](super::Outputs).
#[derive(CubeType, CubeLaunch)]
pub(super) struct ResultArrays {
    pub(super) h: Array<f32>,
    pub(super) c: Array<f32>,
    pub(super) n: Array<f32>,
    pub(super) m: Array<f32>,
    pub(super) saved: Array<f32>,
    pub(super) before: Array<f32>,
}

/// [`Given`](super::Given).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GivenArrays {
    pub(super) saved: Array<f32>,
    pub(super) r_transposed: Array<f32>,
    pub(super) c: Array<f32>,
    pub(super) n: Array<f32>,
    pub(super) d_h: Array<f32>,
    pub(super) d_c: Array<f32>,
    pub(super) d_n: Array<f32>,
}

/// [`Gradients`](super::Gradients).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GradientArrays {
    pub(super) x: Array<f32>,
    pub(super) h: Array<f32>,
    pub(super) c: Array<f32>,
    pub(super) n: Array<f32>,
}

/// B, T and H.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
}
