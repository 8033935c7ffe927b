//! Sequences of different lengths in one row, among layers: why they are refused, and their tokens shifted.

use super::state::StateTensors;
use crate::ops::{OpError, SequenceLengths, cat, typed};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use std::fmt::Display;

/// How a mixer takes sequences of different lengths that lie one after another in one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Varlen {
    /// All at once: its convolutions and its recurrence keep sequences apart.
    Packed,
    /// Each by itself, one after another.
    PerSequence,
    /// Not at all.
    Refused,
}

/// Why sequences of different lengths in one row were refused. Nothing was computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LengthsError {
    /// Lengths that do not divide the row.
    #[error(transparent)]
    Row(#[from] OpError),
    /// A part that does not take such sequences, or not with their states.
    #[error("`{part}` does not take sequences of different lengths: {why}")]
    Part {
        /// The part, with the parts it stands in, as in `layers[1].mixer.attention`.
        part: String,
        /// The reason, and what would be accepted.
        why: &'static str,
    },
    /// A state of another number of sequences.
    #[error("the state has {got} rows; it has to have {want}, one for each sequence")]
    State {
        /// Rows of the state.
        got: usize,
        /// Sequences.
        want: usize,
    },
}

impl LengthsError {
    /// A part whose state says how many tokens its rows have seen.
    pub(super) fn counts_tokens(part: &str) -> Self {
        let why = "its state has one count of tokens for all rows; without states, `outputs_varlen` of layers \
                   and `hidden_varlen` of models take it";
        Self::part(part, why)
    }

    /// Any other part.
    pub(super) fn part(part: &str, why: &'static str) -> Self {
        Self::Part { part: part.to_string(), why }
    }

    /// The same error, its part inside `outer`.
    #[must_use]
    pub fn within(self, outer: impl Display) -> Self {
        match self {
            Self::Part { part, why } => Self::Part { part: format!("{outer}.{part}"), why },
            other => other,
        }
    }
}

/// Whether `lengths` divide the row `[1, T, D]`.
pub(super) fn check_row(
    [batch, tokens, _]: [usize; 3],
    lengths: &SequenceLengths,
) -> Result<(), LengthsError> {
    Ok(lengths.check("forward_varlen", batch, tokens)?)
}

/// Whether a state has a row for each sequence.
pub(super) fn check_states<B: Backend>(
    state: Option<&StateTensors<B>>,
    lengths: &SequenceLengths,
) -> Result<(), LengthsError> {
    let want = lengths.count();
    match state.and_then(|state| state.rows_but(want)) {
        Some(got) => Err(LengthsError::State { got, want }),
        None => Ok(()),
    }
}

/// As `shift_tokens`, of sequences one after another in one row: `x` is `[1, T, D]`; `last`, before and next, is
/// `[N, 1, D]`.
pub(super) fn shift_sequences<B: Backend>(
    x: &Tensor<B, 3>,
    last: Option<Tensor<B, 3>>,
    lengths: &SequenceLengths,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let ([_, _, width], count) = (x.dims(), lengths.count());
    let zeros = || Tensor::zeros([count, 1, width], (&x.device(), x.dtype()));
    let last = last.map_or_else(zeros, |last| typed(last, x.dtype()));
    let rows = cat(vec![last.reshape([1, count, width]), x.clone()], 1);
    let before = lengths.ranges().enumerate().flat_map(|(n, range)| {
        std::iter::once(n).chain(count + range.start..count + range.end - 1)
    });
    let before = rows.select(1, places(before, x));
    let ends = places(lengths.ranges().map(|range| range.end - 1), x);
    (before, x.clone().select(1, ends).reshape([count, 1, width]))
}

/// Numbers of rows, on the device of `like`.
fn places<B: Backend>(
    places: impl Iterator<Item = usize>,
    like: &Tensor<B, 3>,
) -> Tensor<B, 1, Int> {
    let places: Vec<i32> = places.map(|place| place as i32).collect();
    let count = places.len();
    Tensor::from_data(TensorData::new(places, [count]), &like.device())
}
