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

    pub(super) fn extend(&mut self, ids: &[u32], recalled: bool) {
        self.tokens.extend_from_slice(ids);
        self.recalled.resize(self.tokens.len(), recalled);
    }

    /// All tokens but the last are read, and the answer is the next token: in training everywhere,
    /// else only where it can be recalled.
    pub(super) fn cut(mut self, split: Split) -> Example {
        let next = self.tokens[1..].iter().copied();
        let target = match split {
            Split::Train => next.map(Some).collect(),
            _ => next.zip(&self.recalled[1..]).map(|(id, &asked)| asked.then_some(id)).collect(),
        };
        self.tokens.pop();
        Example { input: self.tokens, target }
    }
}
