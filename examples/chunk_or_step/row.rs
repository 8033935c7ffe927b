//! Rows of the table of times: one for each way, pass, head width and length.

use crate::ways::{Pass, Way};

/// T, lengths of the sequences.
pub const LENGTHS: [usize; 7] = [64, 128, 256, 512, 1024, 2048, 4096];
/// K = V, widths of a head.
pub const WIDTHS: [usize; 4] = [16, 32, 64, 128];

/// A line of rows.csv.
pub struct Row {
    /// How the operation is computed.
    pub way: Way,
    /// Forwards alone, or with the backward pass.
    pub pass: Pass,
    /// K = V, the width of a head.
    pub width: usize,
    /// T, the length of the sequence.
    pub tokens: usize,
    /// Median, and fastest sample.
    pub ms: [f64; 2],
}

impl Row {
    /// A line of the table, unless it is none.
    pub fn read(line: &str) -> Option<Self> {
        let [pass, way, width, tokens, ms, fastest] =
            line.split(',').collect::<Vec<_>>().try_into().ok()?;
        Some(Self {
            way: Way::ALL.into_iter().find(|known| known.to_string() == way)?,
            pass: [Pass::Forward, Pass::Both]
                .into_iter()
                .find(|known| known.to_string() == pass)?,
            width: width.parse().ok()?,
            tokens: tokens.parse().ok()?,
            ms: [ms.parse().ok()?, fastest.parse().ok()?],
        })
    }
}
