//! Lengths of sequences that lie one after another in one row of a batch.

use super::error::OpError;
use std::ops::Range;
use std::sync::Arc;

/// Sequences of different lengths without padding: B is 1, and sequence n has the tokens
/// `cu_seqlens[n]..cu_seqlens[n + 1]`. Each has a state of its own, and none sees another.
///
/// The term and the layout are those of flash-linear-attention and FlashAttention.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SequenceLengths {
    /// N + 1 offsets, the first 0.
    cu_seqlens: Arc<[usize]>,
}

impl SequenceLengths {
    /// Of each sequence's number of tokens, in their order.
    pub fn new(lengths: &[usize]) -> Self {
        let mut end = 0;
        let ends = lengths.iter().map(|length| {
            end += length;
            end
        });
        Self { cu_seqlens: std::iter::once(0).chain(ends).collect() }
    }

    /// Of cumulative lengths, from 0 to the number of all tokens.
    /// # Errors
    /// [`OpError::Lengths`] if they do not begin with 0, or do not grow.
    pub fn from_cu_seqlens(cu_seqlens: &[usize]) -> Result<Self, OpError> {
        let lengths = Self { cu_seqlens: cu_seqlens.into() };
        let grows = cu_seqlens.windows(2).all(|pair| pair[0] < pair[1]);
        match cu_seqlens.first() == Some(&0) && cu_seqlens.len() > 1 && grows {
            true => Ok(lengths),
            false => Err(OpError::Lengths { op: "cu_seqlens", got: cu_seqlens.to_vec() }),
        }
    }

    /// Of marks, one for each token: whether a sequence begins there. The first token begins one.
    ///
    /// Where a model is to start anew inside a text, this is the reset mask.
    /// # Errors
    /// [`OpError::Lengths`] if there are no tokens, or no sequence begins with the first.
    pub fn from_starts(starts: &[bool]) -> Result<Self, OpError> {
        let begin = starts.iter().enumerate().filter(|(_, begins)| **begins);
        let offsets: Vec<usize> = begin.map(|(token, _)| token).chain([starts.len()]).collect();
        Self::from_cu_seqlens(&offsets)
    }

    /// N + 1 offsets: where each sequence begins, and the number of all tokens.
    pub fn cu_seqlens(&self) -> &[usize] {
        &self.cu_seqlens
    }

    /// N, sequences.
    pub fn count(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens[self.count()]
    }

    /// Tokens of each sequence.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        self.cu_seqlens.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Each sequence's number of tokens.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.ranges().map(|range| range.len())
    }

    /// Tokens of the longest sequence; 0 if there is none.
    pub(crate) fn longest(&self) -> usize {
        self.lengths().max().unwrap_or(0)
    }

    /// The same sequences where each token takes `count` rows.
    pub(crate) fn repeated(&self, count: usize) -> Self {
        Self { cu_seqlens: self.cu_seqlens.iter().map(|offset| offset * count).collect() }
    }

    /// Whether they divide one row of so many tokens into sequences of at least one.
    pub(crate) fn check(
        &self,
        op: &'static str,
        batch: usize,
        tokens: usize,
    ) -> Result<(), OpError> {
        if batch != 1 {
            return Err(OpError::Rows { op, batch });
        }
        let empty = self.lengths().any(|length| length == 0);
        if empty || self.count() == 0 {
            return Err(OpError::Lengths { op, got: self.cu_seqlens.to_vec() });
        }
        match self.tokens() == tokens {
            true => Ok(()),
            false => Err(OpError::Tokens { op, tokens, got: self.tokens() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_offsets_say_the_same() {
        let lengths = SequenceLengths::new(&[3, 1, 5]);
        assert_eq!(lengths.cu_seqlens(), [0, 3, 4, 9]);
        assert_eq!(SequenceLengths::from_cu_seqlens(&[0, 3, 4, 9]), Ok(lengths.clone()));
        assert_eq!(lengths.ranges().collect::<Vec<_>>(), [0..3, 3..4, 4..9]);
        assert_eq!((lengths.count(), lengths.tokens()), (3, 9));
    }

    #[test]
    fn marks_say_where_sequences_begin() {
        let marks = [true, false, false, true, true, false];
        let lengths = SequenceLengths::new(&[3, 1, 2]);
        assert_eq!(SequenceLengths::from_starts(&marks), Ok(lengths.clone()));
        assert_eq!((lengths.longest(), lengths.repeated(2).cu_seqlens()), (3, &[0, 6, 8, 12][..]));
        let refused = |marks: &[bool]| SequenceLengths::from_starts(marks).is_err();
        assert!(refused(&[]) && refused(&[false, true]) && refused(&[false]));
    }

    #[test]
    fn what_divides_no_row_is_refused() {
        let op = "linear_attention";
        let refused = |offsets: &[usize]| SequenceLengths::from_cu_seqlens(offsets).is_err();
        assert!(refused(&[]) && refused(&[0]) && refused(&[1, 2]) && refused(&[0, 2, 2]));
        let lengths = SequenceLengths::new(&[3, 4]);
        assert_eq!(lengths.check(op, 1, 7), Ok(()));
        assert_eq!(lengths.check(op, 2, 7), Err(OpError::Rows { op, batch: 2 }));
        assert_eq!(lengths.check(op, 1, 8), Err(OpError::Tokens { op, tokens: 8, got: 7 }));
        let got = vec![0, 3, 3];
        assert_eq!(
            SequenceLengths::new(&[3, 0]).check(op, 1, 3),
            Err(OpError::Lengths { op, got })
        );
    }
}
