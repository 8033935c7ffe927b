//! Direction and range of a launch of the state pass.

use crate::variant::Variant;

/// The range of tokens of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Span {
    /// Sequences.
    Sequence,
    /// Segments, each from its own start.
    Segment,
    /// Segments too, for E_p and M_p alone: the local pass.
    Local,
}

/// Direction and range of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Task {
    pub backward: bool,
    pub span: Span,
    /// There is a state to start from.
    pub given: bool,
    /// States and blocks are saved; of a local pass, what the backward pass needs of it.
    pub save: bool,
}

impl Task {
    /// A forward pass over sequences, that starts from nothing and saves nothing.
    pub const PLAIN: Self =
        Self { backward: false, span: Span::Sequence, given: false, save: false };

    pub fn local(&self) -> bool {
        self.span == Span::Local
    }

    /// Whether queries are used.
    pub fn queries(&self) -> bool {
        self.backward || !self.local()
    }

    /// Whether k is: a backward local pass needs it as the erase key of a delta rule alone.
    pub fn has_keys(&self, variant: Variant) -> bool {
        !(self.backward && self.local()) || variant.delta()
    }

    /// Whether a block is multiplied by A_qk (low rank: A_qb).
    pub fn applies_a_qk(&self, variant: Variant) -> bool {
        !self.local() || (self.backward && variant.solves())
    }
}
