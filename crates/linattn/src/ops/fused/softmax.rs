//! Softmax of rows of scores: shares of keys, of those that a query sees.

use super::{Seen, SoftmaxRows};
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use burn::tensor::activation::softmax as softmax_of_all;
use burn::tensor::{DType, Tensor, TensorData, backend::Backend, ops::FloatTensor};

/// Term of a score whose key is hidden.
pub(crate) const HIDDEN: f32 = -1e9;

/// Shares of the keys in each row of `scores`, `[.., T, S]`, over those that query t of T sees.
/// # Panics
/// If some query sees none, or is none of the tokens that the keys are of.
pub(crate) fn softmax<B: LinearAttentionBackend, const D: usize>(
    scores: Tensor<B, D>,
    seen: Seen,
) -> Tensor<B, D> {
    if let Seen::Causal { window } = seen {
        assert!(scores.dims()[D - 2] <= scores.dims()[D - 1], "a key for each query");
        assert!(window != Some(0), "a window of one token at least");
    }
    let rows = SoftmaxRows { scores: primitive(scores), seen };
    match B::fused_softmax(rows.clone(), false) {
        Some(pass) => tensor(pass.outputs.into_iter().next().expect("shares")),
        None => softmax_in_tensor_ops(rows),
    }
}

/// [`softmax`] in tensor operations.
pub(in crate::ops) fn softmax_in_tensor_ops<B: Backend, const D: usize>(
    rows: SoftmaxRows<FloatTensor<B>>,
) -> Tensor<B, D> {
    let scores = tensor::<B, D>(rows.scores);
    let scores = match rows.seen {
        Seen::All => scores,
        Seen::Causal { window } => {
            let sizes = [scores.dims()[D - 2], scores.dims()[D - 1]];
            let mask = causal_mask::<B>(sizes, window, (&scores.device(), scores.dtype()));
            scores + mask.unsqueeze()
        }
    };
    softmax_of_all(scores, D - 1)
}

/// Zero where a query may see a key, and very negative where not, `[T, S]`: the queries are the last of as many
/// tokens as there are keys.
pub(crate) fn causal_mask<B: Backend>(
    sizes: [usize; 2],
    window: Option<usize>,
    of: (&B::Device, DType),
) -> Tensor<B, 2> {
    let reach = window.unwrap_or(sizes[1]) as isize;
    by_distance(sizes, |back| if (0..reach).contains(&back) { 0.0 } else { HIDDEN }, of)
}

/// A number for each of the last T of S tokens and each of all, given how many tokens that lies back (its own lead,
/// if it is ahead): `[T, S]`.
pub(crate) fn by_distance<B: Backend>(
    [queries, keys]: [usize; 2],
    f: impl Fn(isize) -> f32,
    of: (&B::Device, DType),
) -> Tensor<B, 2> {
    let first = (keys - queries) as isize;
    let values: Vec<f32> =
        (0..queries * keys).map(|x| f(first + (x / keys) as isize - (x % keys) as isize)).collect();
    Tensor::from_data(TensorData::new(values, [queries, keys]), of)
}
