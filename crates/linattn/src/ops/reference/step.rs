//! One token after another: what decoding does, and what the chunks add up to.

use crate::ops::recurrence::{LogDecay, Read, Recurrence, Transition};
use crate::ops::tensors::{accumulator, primitive, tensor};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// One token of any recurrence: T is 1 in every tensor of `x`.
pub(crate) fn step<B: Backend>(x: Recurrence<FloatTensor<B>>) -> (FloatTensor<B>, FloatTensor<B>) {
    let v = tensor::<B, 4>(x.v);
    let ([batch, _, heads, value_width], dtype) = (v.dims(), v.dtype());
    let row = |x: Tensor<B, 4>| share_heads(accumulator(x).swap_dims(1, 2), heads); // [B, H, 1, ..]
    let rows = |x: FloatTensor<B>| row(tensor(x));
    let (q, k, v) = (rows(x.q), rows(x.k), row(v));

    let before = match x.state {
        Some(s) => accumulator(tensor::<B, 4>(s)),
        None => Tensor::zeros([batch, heads, q.dims()[3], value_width], (&q.device(), q.dtype())),
    };
    let scalar = |x: FloatTensor<B>| row(tensor::<B, 3>(x).unsqueeze_dim(3));
    let factors = |g: LogDecay<FloatTensor<B>>| match g {
        LogDecay::Scalar(g) => scalar(g),
        LogDecay::Vector(g) => rows(g),
    };
    let decayed = match x.decay {
        Some(g) => before.clone() * factors(g).exp().swap_dims(2, 3), // rows of S
        None => before.clone(),
    };
    let (s, read) = match x.transition {
        Transition::Identity { read } => {
            let s = decayed + k.transpose().matmul(v);
            match read {
                Read::After => (s.clone(), s),
                Read::Before => (s, before),
            }
        }
        Transition::Delta { beta, erase, read } => {
            let erase = erase.map_or(k.clone(), rows);
            let retrieved = match read {
                Read::After => erase.matmul(decayed.clone()),
                Read::Before => erase.matmul(before),
            };
            let u = scalar(beta) * (v - retrieved);
            let s = decayed + k.transpose().matmul(u);
            (s.clone(), s)
        }
        Transition::LowRank { a, b } => {
            let written = decayed + k.transpose().matmul(v);
            let s = written + rows(b).transpose().matmul(rows(a).matmul(before));
            (s.clone(), s)
        }
    };
    let o = q.matmul(read).swap_dims(1, 2).cast(dtype);
    (primitive(o), primitive(s))
}

/// `[B, Hk, 1, X]` to `[B, heads, 1, X]`: each key head serves heads / Hk value heads in a row.
fn share_heads<B: Backend>(x: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [batch, key_heads, tokens, width] = x.dims();
    if key_heads == heads {
        return x;
    }
    x.unsqueeze_dim::<5>(2)
        .expand([batch, key_heads, heads / key_heads, tokens, width])
        .reshape([batch, heads, tokens, width])
}
