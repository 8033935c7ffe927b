//! How tokens are shared out over cubes. A chunk lies in one sequence, and a cube in one chunk.

use super::inputs::Dims;

/// Numbers of a chunk in the table of chunks: its sequence, the sequence's first row and number of tokens, the
/// chunk's first token within the sequence, and its tokens, of which the last chunk of a sequence may lack some.
pub(super) const ENTRY: usize = 5;

/// The chunks of all sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunks {
    /// Tokens of a chunk, and chunks of a sequence, where all sequences have one length.
    pub length: usize,
    pub each: usize,
    /// All chunks.
    pub count: usize,
    /// [`ENTRY`] numbers for each, where sequences have lengths of their own.
    pub table: Option<Vec<u32>>,
}

impl Chunks {
    /// The longest chunks of which there are at least `enough`. `cu_seqlens` divides the one row.
    pub fn new(dims: Dims, cu_seqlens: Option<&[usize]>, enough: usize) -> Self {
        match cu_seqlens {
            Some(cu_seqlens) => Self::of_lengths(cu_seqlens, enough),
            None => {
                let Dims { batch, tokens, .. } = dims;
                let longest = longest(enough, |longest| batch * tokens.div_ceil(longest));
                let length = equal(tokens, longest);
                let each = tokens.div_ceil(length);
                Self { length, each, count: batch * each, table: None }
            }
        }
    }

    fn of_lengths(cu_seqlens: &[usize], enough: usize) -> Self {
        let sequences = || cu_seqlens.windows(2).map(|pair| (pair[0], pair[1] - pair[0]));
        let longest = longest(enough, |longest| {
            sequences().map(|(_, tokens)| tokens.div_ceil(longest)).sum::<usize>()
        });
        let mut table = vec![];
        for (n, (row, tokens)) in sequences().enumerate() {
            let length = equal(tokens, longest);
            for first in (0..tokens).step_by(length) {
                table.extend([n, row, tokens, first, length].map(|number| number as u32));
            }
        }
        Self { length: 0, each: 0, count: table.len() / ENTRY, table: Some(table) }
    }
}

/// Most tokens of a chunk, so that there are enough chunks.
fn longest(enough: usize, count: impl Fn(usize) -> usize) -> usize {
    [256, 128, 64].into_iter().find(|&longest| count(longest) >= enough).unwrap_or(32)
}

/// Tokens of a chunk where a sequence's chunks are of equal lengths, `longest` at most.
fn equal(tokens: usize, longest: usize) -> usize {
    tokens.div_ceil(tokens.div_ceil(longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(batch: usize, tokens: usize) -> Dims {
        Dims { batch, tokens, window: 4 }
    }

    #[test]
    fn every_token_is_in_one_chunk_of_its_sequence() {
        for enough in [0, 3, 1000] {
            let cu_seqlens = [0, 1, 301, 303, 560];
            let chunks = Chunks::new(dims(1, 560), Some(&cu_seqlens), enough);
            let table = chunks.table.expect("sequences have lengths of their own");
            assert_eq!(table.len(), ENTRY * chunks.count);
            let mut seen = vec![];
            for chunk in table.chunks(ENTRY).map(|chunk| chunk.iter().map(|&n| n as usize)) {
                let chunk: Vec<usize> = chunk.collect();
                let [n, row, tokens, first, length] = chunk[..] else { unreachable!() };
                assert_eq!([row, row + tokens], cu_seqlens[n..n + 2]);
                seen.extend((first..(first + length).min(tokens)).map(|t| row + t));
            }
            assert_eq!(seen, (0..560).collect::<Vec<_>>());
        }
    }

    #[test]
    fn sequences_of_one_length_are_cut_as_rows_of_a_batch() {
        for tokens in [1, 33, 256, 257, 1000] {
            let rows = Chunks::new(dims(3, tokens), None, 9);
            let cu_seqlens = [0, tokens, 2 * tokens, 3 * tokens];
            let lengths = Chunks::new(dims(1, 3 * tokens), Some(&cu_seqlens), 9);
            assert_eq!(rows.count, lengths.count);
            let table = lengths.table.expect("sequences have lengths of their own");
            assert!(table.chunks(ENTRY).all(|chunk| chunk[4] as usize == rows.length));
        }
    }
}
