//! Matrices side by side: weights of layers that read the same input become one product.

use super::Pack;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{cat, primitive, tensor};
use crate::ops::typed;
use burn::tensor::{DType, Tensor, ops::FloatTensor};

/// `[R, C_1 + C_2 + .. + padding]`, in type `dtype`.
pub(crate) fn pack<B: LinearAttentionBackend>(
    matrices: Vec<Tensor<B, 2>>,
    padding: usize,
    dtype: DType,
) -> Tensor<B, 2> {
    let pack = Pack { matrices: matrices.into_iter().map(primitive).collect(), padding, dtype };
    match B::fused_pack(pack.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("a matrix")),
        None => reference::<B>(pack),
    }
}

fn reference<B: LinearAttentionBackend>(pack: Pack<FloatTensor<B>>) -> Tensor<B, 2> {
    let of = |matrix| typed(tensor::<B, 2>(matrix), pack.dtype);
    let mut matrices: Vec<_> = pack.matrices.into_iter().map(of).collect();
    if pack.padding > 0 {
        let [rows, _] = matrices[0].dims();
        let zeros = Tensor::zeros([rows, pack.padding], (&matrices[0].device(), pack.dtype));
        matrices.push(zeros);
    }
    cat(matrices, 1)
}
