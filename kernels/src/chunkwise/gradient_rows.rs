//! Rows of the input gradients, at compile time: which are made together, and of which terms each is a sum.

use crate::chunkwise::decay_gradients::DecayTerm;
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{Factors, Keys, Scored, States, TokenOffset, Values};
use crate::chunkwise::vector_decay::Adjoint;

/// A row whose gradient is computed, by its part in the recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowRole {
    /// q.
    Query,
    /// a, or e of a delta rule.
    Erase,
    /// k, as it writes.
    Key,
    /// Low rank: b.
    Write,
}

/// Rows whose gradients are made together: what they have in common is loaded, and scaled, once. Where tensor cores
/// weight rows by a vector decay these are all that read, or all that write; elsewhere one alone, for registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Together {
    One(RowRole),
    Readers,
    Writers,
}

/// A term of a row's gradient: gradients of scores times the rows on their other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Term {
    pub scored: Scored,
    pub rows: Keys,
}

impl GradientPlan {
    pub fn has_decay(&self) -> bool {
        self.variant.decay != crate::Decay::None
    }

    /// Terms of a row's gradient within the chunk. Rows that are made together have the same rows on the other side, in
    /// the same order.
    pub fn terms(&self, role: RowRole) -> Vec<Term> {
        let low_rank = self.variant.low_rank();
        let term = |scored, rows| Term { scored, rows };
        match role {
            RowRole::Query if low_rank => {
                vec![term(Scored::Qk, Keys::K), term(Scored::Qb, Keys::B)]
            }
            RowRole::Query => vec![term(Scored::Qk, Keys::K)],
            RowRole::Erase if low_rank => {
                vec![term(Scored::Ak, Keys::K), term(Scored::Ab, Keys::B)]
            }
            RowRole::Erase => vec![term(Scored::Ab, self.write_key())],
            RowRole::Key if low_rank => vec![term(Scored::Qk, Keys::Q), term(Scored::Ak, Keys::A)],
            RowRole::Key if self.variant.delta() => {
                vec![term(Scored::Qk, Keys::Q), term(Scored::Scaled, self.erase_key())]
            }
            RowRole::Key => vec![term(Scored::Qk, Keys::Q)],
            RowRole::Write => vec![term(Scored::Qb, Keys::Q), term(Scored::Ab, Keys::A)],
        }
    }

    /// The rows of `together`.
    pub fn roles(&self, together: Together) -> Vec<RowRole> {
        match together {
            Together::One(role) => vec![role],
            Together::Readers if self.variant.solves() => vec![RowRole::Query, RowRole::Erase],
            Together::Readers => vec![RowRole::Query],
            Together::Writers if self.variant.low_rank() => vec![RowRole::Key, RowRole::Write],
            Together::Writers => vec![RowRole::Key],
        }
    }

    /// Rows on the other side of the terms of `together`, which all of its rows have in this order.
    pub fn others(&self, together: Together) -> Vec<Keys> {
        let of =
            |role: &RowRole| self.terms(*role).iter().map(|term| term.rows).collect::<Vec<_>>();
        let roles = self.roles(together);
        let others = of(&roles[0]);
        assert!(roles.iter().all(|role| of(role) == others), "{together:?} have the same terms");
        others
    }

    /// Most rows whose gradients are made together.
    pub fn most_together(&self) -> usize {
        let all = [Together::Readers, Together::Writers].map(|together| self.roles(together).len());
        if self.by_blocks() { all[0].max(all[1]) } else { 1 }
    }

    /// Most kinds of rows that gradients are made of at once.
    pub fn most_others(&self) -> usize {
        match self.by_blocks() {
            true => self.others(Together::Readers).len().max(self.others(Together::Writers).len()),
            false => 1,
        }
    }

    /// Left factors of the terms with a state, in the order of [`Self::roles`].
    pub fn state_factors(&self, together: Together) -> Factors {
        let each = self.roles(together).into_iter().map(|role| self.state_factor(role));
        Factors::of(&each.collect::<Vec<_>>())
    }

    /// The adjoint of scores under a vector decay of which the gradients of `together` are made.
    pub fn adjoint(&self, together: Together) -> Adjoint {
        let roles = self.roles(together);
        let terms = self.terms(roles[0]);
        let of_y = roles[0].writes();
        let last = match of_y {
            true => terms[terms.len() - 1],
            false => self.terms(roles[roles.len() - 1])[0],
        };
        let before = [terms[0], last].map(|term| self.before(term.scored));
        Adjoint { of_y, kinds: roles.len(), others: terms.len(), before }
    }

    /// The row itself.
    pub fn rows(&self, role: RowRole) -> Keys {
        match role {
            RowRole::Query => Keys::Q,
            RowRole::Erase => self.erase_key(),
            RowRole::Key => Keys::K,
            RowRole::Write => Keys::B,
        }
    }

    /// Left factor X of the row's term with a state, `X S^T`.
    fn state_factor(&self, role: RowRole) -> Values {
        match role {
            RowRole::Query => Values::DO,
            RowRole::Erase => Values::R,
            RowRole::Key => self.key_values(),
            RowRole::Write => Values::U,
        }
    }

    pub fn decay_term(&self, role: RowRole) -> DecayTerm {
        match role {
            RowRole::Query => DecayTerm::Query { before: self.reads_state_before(role) },
            RowRole::Erase => DecayTerm::Erase { before: self.reads_state_before(role) },
            RowRole::Key | RowRole::Write => DecayTerm::Write,
        }
    }

    /// Whether the row reads the state before its own token.
    pub fn reads_state_before(&self, role: RowRole) -> bool {
        match role {
            RowRole::Query => self.variant.reads_before(),
            RowRole::Erase => self.variant.erases_before(),
            RowRole::Key | RowRole::Write => false,
        }
    }

    /// Offset to the row that a term's own row is paired with in a zero-exponent term.
    pub fn offset(&self, term: Term, writes: bool) -> TokenOffset {
        match (self.before(term.scored), writes) {
            (false, _) => TokenOffset::Same,
            (true, false) => TokenOffset::Previous,
            (true, true) => TokenOffset::Next,
        }
    }
}

impl RowRole {
    /// Whether the row writes: its gradient comes from rows after it, and from the state's at the end.
    pub fn writes(self) -> bool {
        matches!(self, Self::Key | Self::Write)
    }

    /// The state of the row's term.
    pub fn states(self) -> States {
        if self.writes() { States::End } else { States::Start }
    }
}
