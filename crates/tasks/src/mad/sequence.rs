//! A sequence of the recall tasks, before it is cut into what is read and what is asked.

use crate::{Example, Split};

/// Tokens, and which of them can be recalled.
#[derive(Debug)]
pub(super) struct Sequence {
    tokens: Vec<u32>,
    /// For each token, whether it belongs to the value of a key that was shown before, or of the
    /// probe.
    recalled: Vec<bool>,
}

impl Sequence {
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self { tokens: Vec::with_capacity(tokens), recalled: Vec::with_capacity(tokens) }
    }

    pub(super) fn push(&mut self, id: u32, recalled: bool) {
        self.tokens.push(id);
        self.recalled.push(recalled);
    }

    /// All tokens but the last are read, and the answer is the next token: in training everywhere,
    /// else only where it can be recalled.
    pub(super) fn cut(mut self, split: Split) -> Example {
        let all = split == Split::Train;
        let next = self.tokens.iter().zip(&self.recalled).skip(1);
        let target = next.map(|(&id, &recalled)| (all || recalled).then_some(id)).collect();
        self.tokens.pop();
        Example { input: self.tokens, target }
    }
}
