//! One token after another: what decoding does, and what the chunks add up to.

use super::backend::{Operands, primitive, tensor};
use super::chunkwise::accumulator;
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// One token. `q`, `k`: `[B, 1, Hk, K]`; `v`: `[B, 1, H, V]`; `g`, `beta`: `[B, 1, H]`.
pub(super) fn step<B: Backend>(x: Operands<FloatTensor<B>>) -> (FloatTensor<B>, FloatTensor<B>) {
    let v = tensor::<B, 4>(x.v);
    let ([batch, _, heads, value_width], dtype) = (v.dims(), v.dtype());
    let row = |x: Tensor<B, 4>| share_heads(accumulator(x).swap_dims(1, 2), heads); // [B, H, 1, ..]
    let gate = |x: FloatTensor<B>| accumulator(tensor::<B, 3>(x)).reshape([batch, heads, 1, 1]);
    let (q, k, v) = (row(tensor(x.q)), row(tensor(x.k)), row(v));

    let mut s = match x.state {
        Some(s) => accumulator(tensor::<B, 4>(s)),
        None => Tensor::zeros([batch, heads, q.dims()[3], value_width], (&q.device(), q.dtype())),
    };
    if let Some(g) = x.g {
        s = s * gate(g).exp();
    }
    let u = match x.beta {
        Some(beta) => gate(beta) * (v - k.clone().matmul(s.clone())),
        None => v,
    };
    s = s + k.transpose().matmul(u);
    let o = q.matmul(s.clone()).swap_dims(1, 2).cast(dtype);
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
