//! Rows of a table by number, and the gradient of the table.

use super::Embedding;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::typed;
use burn::tensor::{
    Int, Tensor, TensorMetadata,
    ops::{FloatTensor, IntTensor},
};

fn rows<B: LinearAttentionBackend>(e: Embedding<FloatTensor<B>, IntTensor<B>>) -> Tensor<B, 2> {
    if let Some(pass) = B::fused_embedding(e.clone(), false) {
        return tensor(pass.outputs.into_iter().next().expect("a table has rows"));
    }
    let ids = Tensor::<B, 1, Int>::from_primitive(e.ids);
    typed(tensor::<B, 2>(e.table).select(0, ids), e.dtype)
}

/// Embeddings of ids, `[B, T]` to `[B, T, D]`, in the type of the table.
pub(crate) fn embedding<B: LinearAttentionBackend>(
    table: Tensor<B, 2>,
    ids: Tensor<B, 2, Int>,
) -> Tensor<B, 3> {
    let ([batch, tokens], width, dtype) = (ids.dims(), table.dims()[1], table.dtype());
    let ids = ids.reshape([batch * tokens]).into_primitive();
    rows(Embedding { table: primitive(table), ids, dtype }).reshape([batch, tokens, width])
}

/// Rows of `x`, `[N, D]`, by number, `[M]`: `[M, D]`.
pub(crate) fn select_rows<B: LinearAttentionBackend>(
    x: Tensor<B, 2>,
    numbers: Tensor<B, 1, Int>,
) -> Tensor<B, 2> {
    let (dtype, table) = (x.dtype(), primitive(x));
    debug_assert_eq!(table.shape().num_dims(), 2);
    rows(Embedding { table, ids: numbers.into_primitive(), dtype })
}
