//! One token after another: what decoding does, and what the chunks add up to.

use super::backend::{Operands, Read, primitive, tensor};
use super::chunkwise::accumulator;
use super::general::gates;
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// One token of any recurrence: T is 1 in every tensor of `x`.
pub(super) fn step<B: Backend>(x: Operands<FloatTensor<B>>) -> (FloatTensor<B>, FloatTensor<B>) {
    let v = tensor::<B, 4>(x.v);
    let ([batch, _, heads, value_width], dtype) = (v.dims(), v.dtype());
    let row = |x: Tensor<B, 4>| share_heads(accumulator(x).swap_dims(1, 2), heads); // [B, H, 1, ..]
    let rows = |x: FloatTensor<B>| row(tensor(x));
    let (q, k, v) = (rows(x.q), rows(x.k), row(v));
    let (a, b) = (x.a.map(rows), x.b.map(rows));
    let beta = x.beta.map(|beta| row(tensor::<B, 3>(beta).unsqueeze_dim(3)));

    let before = match x.state {
        Some(s) => accumulator(tensor::<B, 4>(s)),
        None => Tensor::zeros([batch, heads, q.dims()[3], value_width], (&q.device(), q.dtype())),
    };
    let mut s = match x.g {
        Some(g) => before.clone() * row(gates::<B>(g)).exp().swap_dims(2, 3), // rows of S
        None => before.clone(),
    };
    let u = match &beta {
        Some(beta) => {
            let asking = a.clone().unwrap_or_else(|| k.clone());
            let answer = match x.read {
                Read::After => asking.matmul(s.clone()),
                Read::Before => asking.matmul(before.clone()),
            };
            beta.clone() * (v - answer)
        }
        None => v,
    };
    s = s + k.transpose().matmul(u);
    if let (Some(a), Some(b)) = (a, b) {
        s = s + b.transpose().matmul(a.matmul(before.clone()));
    }
    let read = match (x.read, beta) {
        (Read::Before, None) => before,
        _ => s.clone(),
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
