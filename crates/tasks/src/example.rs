//! One sequence with its answers, and batches of them.

use std::ops::Range;

/// One sequence and what is asked of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub input: Vec<u32>,
    /// The model's answer at the same position; nothing is shifted afterwards. `None` is not scored.
    pub target: Vec<Option<u32>>,
}

/// Examples of one length, stacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub rows: usize,
    /// Tokens of each sequence.
    pub length: usize,
    /// `[rows, length]`, row-major.
    pub input: Vec<u32>,
    /// The positions that are scored, ascending, as indices into `input`: `row * length + t`.
    pub scored: Vec<u32>,
    /// The right answer at each position of `scored`.
    pub target: Vec<u32>,
}

impl Batch {
    /// Stacks examples in the order given.
    /// # Panics
    /// If an example is not `length` tokens long, or the batch would pass 2^32 tokens.
    pub fn stack(length: usize, examples: impl IntoIterator<Item = Example>) -> Self {
        let mut batch =
            Self { rows: 0, length, input: Vec::new(), scored: Vec::new(), target: Vec::new() };
        for example in examples {
            batch.push(&example);
        }
        batch
    }

    /// The rows of several batches of one length, in order.
    pub(crate) fn join(length: usize, parts: Vec<Self>) -> Self {
        let mut batch = Self::stack(length, []);
        let scored = parts.iter().map(|part| part.scored.len()).sum();
        batch.input.reserve(parts.iter().map(|part| part.input.len()).sum());
        batch.scored.reserve(scored);
        batch.target.reserve(scored);
        for part in parts {
            let start = batch.input.len() as u32;
            batch.rows += part.rows;
            batch.input.extend(part.input);
            batch.scored.extend(part.scored.into_iter().map(|position| start + position));
            batch.target.extend(part.target);
        }
        assert!(
            u32::try_from(batch.input.len()).is_ok(),
            "the caller keeps a batch below 2^32 tokens"
        );
        batch
    }

    fn push(&mut self, example: &Example) {
        let lengths = (example.input.len(), example.target.len());
        assert_eq!(
            lengths,
            (self.length, self.length),
            "a task keeps the length that its `SetInfo` promises"
        );
        let start = self.input.len();
        for (t, target) in example.target.iter().enumerate() {
            if let Some(target) = *target {
                self.scored.push(
                    u32::try_from(start + t).expect("the caller keeps a batch below 2^32 tokens"),
                );
                self.target.push(target);
            }
        }
        self.input.extend_from_slice(&example.input);
        self.rows += 1;
    }

    /// For each row, in order, where its part of `scored` and `target` lies. Rows with nothing
    /// scored are left out.
    pub(crate) fn scored_rows(&self) -> impl Iterator<Item = Range<usize>> {
        let row = |position: &u32| *position as usize / self.length;
        let mut start = 0;
        self.scored.chunk_by(move |a, b| row(a) == row(b)).map(move |positions| {
            let range = start..start + positions.len();
            start = range.end;
            range
        })
    }
}
