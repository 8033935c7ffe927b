//! Roles of matrices in the input gradients.

/// A value-wide matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Values {
    V,
    U,
    R,
    DO,
}

/// A key-wide matrix of a chunk's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keys {
    Q,
    K,
    A,
    B,
}

/// A state, stored [V, K].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum States {
    Start,
    /// The gradient of the one at the chunk's end.
    End,
}

/// Offset from a row to the row it is paired with in a zero-exponent term: 0, -1 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TokenOffset {
    Same,
    Previous,
    Next,
}

/// Copies that are waited for together, in the order of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CopyGroup {
    Values,
    Start,
    Keys,
    End,
}

/// A [C, C] block of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scored {
    Qk,
    Qb,
    Ab,
    Ak,
    /// Delta: ab times -beta.
    Scaled,
}

impl Scored {
    pub const ALL: [Self; 5] = [Self::Qk, Self::Qb, Self::Ab, Self::Ak, Self::Scaled];

    /// Row of `ScoreGradients::zero_exponent`.
    pub fn zero_exponent_row(self) -> usize {
        match self {
            Self::Qk => 0,
            Self::Qb => 1,
            Self::Ab | Self::Scaled => 2,
            Self::Ak => 3,
        }
    }

    /// Whether the row on the left is a query, and not an erase key.
    pub fn reads(self) -> bool {
        matches!(self, Self::Qk | Self::Qb)
    }
}
