//! Two layouts of rows: `[B, T, H, X]` outside, `[chunks, B H, C, X]` inside.

use crate::ops::recurrence::Dims;
use crate::ops::tensors::{Along, accumulator, cat};
use burn::tensor::{Tensor, backend::Backend};

/// Sizes of one call, and of its chunks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    dims: Dims,
    /// Tokens of a chunk.
    chunk: usize,
}

impl Layout {
    pub(super) fn new(dims: Dims, chunk: usize) -> Self {
        Self { dims, chunk }
    }

    pub(super) fn chunks(&self) -> usize {
        self.dims.tokens.div_ceil(self.chunk)
    }

    fn rows(&self) -> usize {
        self.dims.batch * self.dims.heads
    }

    /// Of a state, `[1, B H, K, V]`.
    pub(super) fn state_shape(&self) -> [usize; 4] {
        [1, self.rows(), self.dims.key_width, self.dims.value_width]
    }

    /// Into chunks. The last one is filled up with zeros, which write nothing and, as log decays, keep all.
    /// Chunks and then heads are cut out and stacked: each cut is a run of rows, which copies faster
    /// than one permutation of four dimensions. Key heads are shared out over value heads.
    pub(super) fn split<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, tokens, heads, width] = x.dims();
        let padded = self.chunks() * self.chunk;
        let mut x = accumulator(x);
        if padded > tokens {
            let shape = [batch, padded - tokens, heads, width];
            x = cat(vec![x.clone(), Tensor::zeros(shape, (&x.device(), x.dtype()))], 1);
        }
        if self.chunks() > 1 {
            let cut = |c| x.clone().narrow(1, c * self.chunk, self.chunk);
            x = cat((0..self.chunks()).map(cut).collect(), 0);
        }
        let many = self.chunks() * batch;
        let x = x.reshape([many, self.chunk, heads, width]);
        let group = self.dims.heads / heads;
        let cut = |h| x.clone().narrow(2, h / group, 1).reshape([many, 1, self.chunk, width]);
        let x = match self.dims.heads {
            1 => cut(0),
            heads => cat((0..heads).map(cut).collect(), 1),
        };
        x.reshape([self.chunks(), self.rows(), self.chunk, width])
    }

    /// Out of chunks, back to `[B, T, H, X]`.
    pub(super) fn join<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let (many, width) = (self.chunks() * self.dims.batch, x.dims()[3]);
        let x = x.reshape([many, self.dims.heads, self.chunk, width]);
        let cut = |h| x.clone().narrow(1, h, 1).reshape([many, self.chunk, 1, width]);
        let mut x = match self.dims.heads {
            1 => cut(0),
            heads => cat((0..heads).map(cut).collect(), 2),
        };
        if self.chunks() > 1 {
            let cut = |c| x.clone().narrow(0, c * self.dims.batch, self.dims.batch);
            x = cat((0..self.chunks()).map(cut).collect(), 1);
        }
        x.narrow(1, 0, self.dims.tokens)
    }

    /// As [`join`](Self::join), adding up the value heads that share a key head.
    pub(super) fn join_key_heads<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let x = self.join(x);
        let [batch, tokens, key_heads, key_width] = self.dims.keys_shape();
        match self.dims.heads / key_heads {
            1 => x,
            group => {
                let x = x.reshape([batch, tokens, key_heads, group, key_width]);
                x.sum_along(3).squeeze_dim(3)
            }
        }
    }
}
