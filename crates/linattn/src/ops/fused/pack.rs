//! Matrices side by side: weights of layers that read the same input become one product.

use crate::ops::backend::{LinearAttentionBackend, primitive, tensor};
use crate::ops::typed;
use burn::tensor::{DType, Tensor, ops::FloatTensor};

/// Matrices of equally many rows, `[R, C_i]`, side by side.
#[derive(Debug, Clone)]
pub struct Pack<T> {
    /// The matrices, first columns first; at most [`MOST_PACKED`].
    pub matrices: Vec<T>,
    /// Type of the result.
    pub dtype: DType,
}

/// Matrices that a pack can hold.
pub const MOST_PACKED: usize = 8;

/// `[R, C_1 + C_2 + ..]`, in type `dtype`.
pub(crate) fn pack<B: LinearAttentionBackend>(
    matrices: Vec<Tensor<B, 2>>,
    dtype: DType,
) -> Tensor<B, 2> {
    let pack = Pack { matrices: matrices.into_iter().map(primitive).collect(), dtype };
    match B::fused_pack(pack.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("a matrix")),
        None => reference::<B>(pack),
    }
}

fn reference<B: LinearAttentionBackend>(pack: Pack<FloatTensor<B>>) -> Tensor<B, 2> {
    let of = |matrix| typed(tensor::<B, 2>(matrix), pack.dtype);
    Tensor::cat(pack.matrices.into_iter().map(of).collect(), 1)
}
