//! Rows of a table by number.

use super::parallel::for_each;
use super::real::{Real, add};
use super::shared::Fresh;
use super::tensors::{Number, contiguous, indices, one_type, slice, tensor, typed};
use crate::ops::fused::Embedding;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Rows of a piece.
const ROWS: usize = 256;
/// Parts of a table whose gradients are found at the same time.
const PARTS: usize = 8;

/// Rows of a table, in the type of the table.
pub(super) fn embedding(e: Embedding<FlexTensor, FlexTensor>, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type([&e.table])?;
    let ids = indices(e.ids)?;
    let table = contiguous(e.table);
    match e.dtype == dtype {
        true => typed!(dtype, embedding_of(table, ids, keep)),
        false => None,
    }
}

fn embedding_of<R: Number>(table: FlexTensor, ids: Vec<usize>, keep: bool) -> Pass<Flex> {
    let [count, width] = [table.shape()[0], table.shape()[1]];
    let rows = slice::<R>(&table);
    let mut y = Fresh::<R>::new(ids.len() * width);
    let shared = y.shared();
    for_each(ids.len().div_ceil(ROWS), ROWS * width / 2, |i| {
        let ids = &ids[i * ROWS..((i + 1) * ROWS).min(ids.len())];
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let mut y = unsafe { shared.rows((i * ROWS * width, [ids.len(), width, width])) };
        for (j, &id) in ids.iter().enumerate() {
            y.at(j).copy_from_slice(&rows[id * width..(id + 1) * width]);
        }
    });
    let outputs = vec![tensor(y.filled(), [ids.len(), width])];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| {
            let d = gradients.into_iter().next().flatten().map(contiguous);
            vec![d.map(|d| tensor(gradient(slice::<R>(&d), &ids, [count, width]), [count, width]))]
        })
    });
    Pass { outputs, backward }
}

/// The gradient of a table: rows of `d` are added up in their order.
fn gradient<R: Real>(d: &[R], ids: &[usize], [count, width]: [usize; 2]) -> Vec<R> {
    let mut table = Fresh::new(count * width);
    let part = count.div_ceil(PARTS).max(1);
    let shared = table.shared();
    for_each(count.div_ceil(part), ids.len() * (width / PARTS + 1), |n| {
        let (first, some) = (n * part, part.min(count - n * part));
        // SAFETY: parts do not overlap.
        #[allow(unsafe_code)]
        let mut rows = unsafe { shared.rows((first * width, [some, width, width])) };
        for (&id, d) in ids.iter().zip(d.chunks_exact(width.max(1))) {
            if (first..first + some).contains(&id) {
                add(rows.at(id - first), d);
            }
        }
    });
    table.filled()
}
