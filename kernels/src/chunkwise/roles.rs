//! Roles of matrices in the input gradients.

/// A value-wide matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Values {
    V,
    U,
    R,
    DO,
}

/// Value-wide factors on one side of products that are made together: one, or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Factors {
    One([Values; 1]),
    Two([Values; 2]),
}

impl Factors {
    /// # Panics
    /// If there are other than one or two.
    pub fn of(each: &[Values]) -> Self {
        match *each {
            [one] => Self::One([one]),
            [first, second] => Self::Two([first, second]),
            _ => panic!("tiles are for one factor a side, or two: {each:?}"),
        }
    }

    fn each(&self) -> &[Values] {
        match self {
            Self::One(one) => one,
            Self::Two(two) => two,
        }
    }

    pub fn len(&self) -> usize {
        self.each().len()
    }

    /// Factor `n`.
    pub fn get(&self, n: usize) -> Values {
        self.each()[n]
    }

    /// The place of a factor that is one of them.
    pub fn place(&self, factor: Values) -> usize {
        let place = self.each().iter().position(|values| *values == factor);
        place.unwrap_or_else(|| panic!("{factor:?} is none of {self:?}"))
    }
}

/// A side of a product over values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Left,
    Right,
}

/// The right operands of products over values that are made together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Right {
    Factors(Factors),
    State(States),
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
