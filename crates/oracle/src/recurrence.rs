//! The recurrences, forwards.

use crate::inputs::{Inputs, Read, Transition};
use crate::token::{Token, add_scaled, decayed, dot, read, times, write};

/// Result of a recurrence.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// Outputs, `[B, T, H, V]`.
    pub o: Vec<f64>,
    /// States after the last token, `[B, H, K, V]`.
    pub state: Vec<f64>,
}

/// Runs the recurrence that `x` describes, one token after another, as the [crate] states it.
/// # Panics
/// If the tensors of `x` do not fit together, or there is no such recurrence.
#[track_caller]
pub fn forward(x: &Inputs) -> Output {
    x.check();
    let d = x.dims;
    let mut out = Output { o: vec![0.0; d.values_len()], state: x.start() };
    for (b, h) in d.states() {
        let mut s = out.state[d.state(b, h)].to_vec();
        for t in 0..d.tokens {
            let token = Token { x, b, t, h };
            let after = token.advance(&s);
            out.o[token.values()].copy_from_slice(&token.output(&s, &after));
            s = after;
        }
        out.state[d.state(b, h)].copy_from_slice(&s);
    }
    out
}

impl Token<'_> {
    /// S_t of S_{t-1}, both `[K, V]`.
    pub(crate) fn advance(self, before: &[f64]) -> Vec<f64> {
        let mut s = decayed(&self.kept(), before);
        match &self.x.transition {
            Transition::Identity => write(&mut s, self.k(), self.v()),
            Transition::Delta { beta, erase } => {
                let delta = self.delta(beta, erase.as_ref());
                let u = match self.x.read {
                    Read::After => delta.correction(&s),
                    Read::Before => delta.correction(before),
                };
                write(&mut s, self.k(), &u);
            }
            Transition::LowRank { a, b } => {
                let z = read(&a[self.rows()], before);
                write(&mut s, &b[self.rows()], &z);
                write(&mut s, self.k(), self.v());
            }
        }
        s
    }

    /// o_t, `[V]`, of S_{t-1} and S_t.
    fn output(self, before: &[f64], after: &[f64]) -> Vec<f64> {
        if !self.outputs_before() {
            return read(self.q(), after);
        }
        let mut o = read(self.q(), before);
        if let Some(bonus) = &self.x.bonus {
            let share = dot(self.q(), &times(&bonus[self.head()], self.k()));
            add_scaled(&mut o, share, self.v());
        }
        o
    }

    /// Whether the output is taken from S_{t-1}: the delta rule's read position is its erasure's.
    pub(crate) fn outputs_before(self) -> bool {
        self.x.read == Read::Before && self.x.transition == Transition::Identity
    }
}
