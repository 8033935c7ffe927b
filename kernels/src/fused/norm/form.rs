//! Compile-time form of a norm.

use crate::fused::team::Team;
use crate::pointwise::Activation;

/// Most sums that a team makes at once.
pub(super) const SUMS: usize = 3;

/// Divisor of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Measure {
    /// `sqrt(mean h^2 + epsilon)`: RMSNorm.
    RootMeanSquare,
    /// `sqrt(sum h^2 + epsilon)`: L2 norm.
    Length,
    /// `sqrt(variance h + epsilon)`, after the mean is subtracted: LayerNorm.
    Standard,
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub(super) source: &'static str,
    pub(super) width: usize,
    /// Numbers of a vector.
    pub(super) vector: usize,
    /// Who shares a row.
    pub(super) team: Team,
    pub(super) measure: Measure,
    /// Forward: x + residual is computed, and stored.
    pub(super) residual: bool,
    pub(super) gate: Option<Activation>,
    pub(super) weighted: bool,
    pub(super) biased: bool,
    /// Backward: h has a gradient from elsewhere.
    pub(super) given: bool,
    /// Backward: the gradient is stored in type X too.
    pub(super) narrow: bool,
}

impl Form {
    /// Vectors of a row.
    pub(super) fn vectors(&self) -> usize {
        self.width / self.vector
    }

    /// Vectors of a unit.
    pub(super) fn turns(&self) -> usize {
        self.vectors().div_ceil(self.team.units)
    }

    /// Whether every unit of a team has a vector in this turn.
    pub(super) fn fills(&self, turn: usize) -> bool {
        (turn + 1) * self.team.units <= self.vectors()
    }

    /// Teams of a cube.
    pub(super) fn teams(&self) -> usize {
        self.team.in_a_cube()
    }

    pub(super) fn centered(&self) -> bool {
        self.measure == Measure::Standard
    }

    /// Factor of a sum over a row.
    pub(super) fn share(&self) -> f32 {
        match self.measure {
            Measure::Length => 1.0,
            Measure::RootMeanSquare | Measure::Standard => 1.0 / self.width as f32,
        }
    }

    /// Numbers of shared memory for the sums of teams.
    pub(super) fn scratch(&self) -> usize {
        self.team.scratch(SUMS)
    }

    /// Vectors of a row of partial sums.
    pub(super) fn partials(&self) -> usize {
        self.vectors() * (usize::from(self.weighted) + usize::from(self.biased))
    }

    pub(super) fn activation(&self) -> Activation {
        self.gate.unwrap_or(Activation::Identity)
    }
}
