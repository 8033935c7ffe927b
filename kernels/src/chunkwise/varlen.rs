//! Sequences with lengths of their own, one after another in one row: `cu_seqlens`.
//!
//! ```text
//! table   chunks numbers      of each chunk, the place of its sequence in the list below
//!         4 numbers a place   sequence, first token, tokens, first chunk; the longest sequence first
//! ```
//! A chunk lies in one sequence: sequences of 70 and 10 tokens have two chunks and one. Chunks are numbered by
//! sequences as they lie in the row, `[H, chunks]`. The state pass starts with the longest sequence, so that
//! the last cubes to run have short ones. Outside it a cube finds its sequence by its chunk.

use crate::chunkwise::chunk::{HeadOffsets, Place, Sizes, head_offsets, place_in};
use crate::chunkwise::plan::Plan;
use cubecl::prelude::*;

/// Numbers of a place in the list.
const FIELDS: usize = 4;

/// Sequences of a call, and their chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    pub numbers: Vec<u32>,
    pub sequences: usize,
    pub chunks: usize,
}

impl Table {
    /// Of N + 1 offsets, in chunks of `chunk` tokens.
    pub fn new(cu_seqlens: &[usize], chunk: usize) -> Self {
        let mut first_chunk = 0;
        let mut list: Vec<[usize; FIELDS]> = vec![];
        for (n, pair) in cu_seqlens.windows(2).enumerate() {
            let tokens = pair[1] - pair[0];
            list.push([n, pair[0], tokens, first_chunk]);
            first_chunk += tokens.div_ceil(chunk);
        }
        list.sort_by_key(|[n, _, tokens, _]| (std::cmp::Reverse(*tokens), *n));
        let mut numbers = vec![0; first_chunk];
        for (place, [_, _, tokens, first]) in list.iter().enumerate() {
            numbers[*first..first + tokens.div_ceil(chunk)].fill(place as u32);
        }
        numbers.extend(list.iter().flatten().map(|n| *n as u32));
        Self { numbers, sequences: list.len(), chunks: first_chunk }
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }
}

/// A sequence of the row.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SequenceInRow {
    pub number: usize,
    pub first_token: usize,
    pub tokens: usize,
    pub first_chunk: usize,
}

/// The sequence at this place of the list.
#[cube]
pub(crate) fn sequence(sizes: &Sizes, place: usize) -> SequenceInRow {
    let at = sizes.chunks as usize + place * FIELDS;
    SequenceInRow {
        number: sizes.table[at] as usize,
        first_token: sizes.table[at + 1] as usize,
        tokens: sizes.table[at + 2] as usize,
        first_chunk: sizes.table[at + 3] as usize,
    }
}

/// Place in the list of the sequence that this chunk of the row lies in.
#[cube]
pub(crate) fn sequence_of_chunk(sizes: &Sizes, chunk: usize) -> usize {
    sizes.table[chunk] as usize
}

/// Offsets of a head of a sequence.
#[cube]
pub(crate) fn offsets_in_row(sizes: &Sizes, sequence: &SequenceInRow, head: usize) -> HeadOffsets {
    let heads = sizes.heads as usize;
    let key_heads = sizes.key_heads as usize;
    HeadOffsets {
        tokens: sequence.tokens,
        heads,
        key_heads,
        head,
        key_head: head / (heads / key_heads),
        first: sequence.first_token,
        chunks: head * sizes.chunks as usize + sequence.first_chunk,
    }
}

/// A chunk of this cube's own: cubes lie along chunks, and along (sequence, head), or along heads where sequences
/// have lengths of their own.
#[cube]
pub(crate) fn own_chunk(sizes: &Sizes, #[comptime] plan: Plan) -> Place {
    let (chunk, across) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    if comptime!(plan.varlen) {
        let place = sequence_of_chunk(sizes, chunk);
        let sequence = sequence(sizes, place);
        let head_offsets = offsets_in_row(sizes, &sequence, across);
        place_in(&head_offsets, chunk - sequence.first_chunk, plan)
    } else {
        let head_offsets = head_offsets(sizes, across);
        place_in(&head_offsets, chunk, plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_knows_its_sequence_and_the_longest_comes_first() {
        let table = Table::new(&[0, 10, 80, 85], 32);
        assert_eq!((table.sequences, table.chunks), (3, 5));
        assert_eq!(table.numbers[..5], [1, 0, 0, 0, 2]);
        let list: Vec<_> = table.numbers[5..].chunks(FIELDS).collect();
        assert_eq!(list, [[1, 10, 70, 1], [0, 0, 10, 0], [2, 80, 5, 4]]);
    }
}
