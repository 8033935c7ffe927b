//! Variants of the recurrence, and sizes of a call.

/// Decay of the state from token to token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decay {
    /// All of it.
    None,
    /// `e^g`, one g a head: `[B, T, H]`.
    Scalar,
    /// `e^g` for each row of the state: `[B, T, H, K]`.
    Vector,
}

/// Transition of the state by a token, besides decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transition {
    /// Adds `k^T v`.
    Identity,
    /// Corrects the value retrieved by the erase key toward v by the share beta, and writes with k.
    Delta {
        /// The erase key has a tensor of its own; else it is k.
        erase: bool,
    },
    /// Adds `k^T v + b^T (a S)`.
    LowRank,
}

/// Read position: the state that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Read {
    /// The state after this token's decay.
    After,
    /// The state that the last token left: for the output of [`Transition::Identity`] and the erase key of
    /// [`Transition::Delta`]. The `a` of [`Transition::LowRank`] always reads that one.
    Before,
}

/// One member of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Decay.
    pub decay: Decay,
    /// Transition.
    pub transition: Transition,
    /// Read position.
    pub read: Read,
}

impl Variant {
    /// Whether a triangular system has to be solved in each chunk.
    pub fn solves(&self) -> bool {
        self.transition != Transition::Identity
    }

    pub(crate) fn low_rank(&self) -> bool {
        self.transition == Transition::LowRank
    }

    pub(crate) fn delta(&self) -> bool {
        matches!(self.transition, Transition::Delta { .. })
    }

    /// Whether `a` has a tensor of its own.
    pub(crate) fn own_a(&self) -> bool {
        matches!(self.transition, Transition::Delta { erase: true } | Transition::LowRank)
    }

    pub(crate) fn vector(&self) -> bool {
        self.decay == Decay::Vector
    }

    pub(crate) fn scalar(&self) -> bool {
        self.decay == Decay::Scalar
    }

    /// Whether a query reads the state that the last token left, and so not this token's own write.
    pub(crate) fn reads_before(&self) -> bool {
        self.transition == Transition::Identity && self.read == Read::Before
    }

    /// Whether the erase key `a` reads the state that the last token left.
    pub(crate) fn erases_before(&self) -> bool {
        self.low_rank() || (self.delta() && self.read == Read::Before)
    }
}

/// Sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, sequences.
    pub batch: usize,
    /// T, tokens of a sequence.
    pub tokens: usize,
    /// Hk, heads of queries and keys.
    pub key_heads: usize,
    /// H, heads of values, a multiple of `key_heads`.
    pub heads: usize,
    /// K, width of a key.
    pub key_width: usize,
    /// V, width of a value.
    pub value_width: usize,
}
