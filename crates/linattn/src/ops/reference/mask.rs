//! Masks over square matrices.

use burn::tensor::{Tensor, TensorData, backend::Backend};

/// Ones and zeros in the place of the entries of a C x C matrix, `[1, C C]`: one row, so that laying
/// it over many matrices is the plainest of broadcasts, which every backend does fast.
#[derive(Debug, Clone)]
pub(super) struct Mask<B: Backend>(Tensor<B, 2>);

impl<B: Backend> Mask<B> {
    /// One where `keep(row, column)`; on the device and in the type of `like`.
    pub(super) fn new<const D: usize>(
        like: &Tensor<B, D>,
        size: usize,
        keep: impl Fn(usize, usize) -> bool,
    ) -> Self {
        let ones: Vec<f32> =
            (0..size * size).map(|x| f32::from(u8::from(keep(x / size, x % size)))).collect();
        let data = TensorData::new(ones, [1, size * size]);
        Self(Tensor::from_data(data, (&like.device(), like.dtype())))
    }

    /// One where row - column >= `offset`.
    pub(super) fn lower<const D: usize>(like: &Tensor<B, D>, size: usize, offset: usize) -> Self {
        Self::new(like, size, |i, j| i >= j + offset)
    }

    /// The mask as a matrix for products, `[1, 1, C, C]`.
    pub(super) fn matrix(self) -> Tensor<B, 4> {
        let size = self.0.dims()[1].isqrt();
        self.0.reshape([1, 1, size, size])
    }

    /// `[.., C, C]`, zero where the mask is.
    pub(super) fn apply<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.over(x, |x, mask| x * mask)
    }

    /// `[.., C, C]`, one more where the mask is one.
    pub(super) fn add_to<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        self.over(x, |x, mask| x + mask)
    }

    fn over<const D: usize>(
        &self,
        x: Tensor<B, D>,
        op: impl Fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, D> {
        let (shape, entries) = (x.dims(), self.0.dims()[1]);
        let matrices = x.shape().num_elements() / entries;
        op(x.reshape([matrices, entries]), self.0.clone()).reshape(shape)
    }
}
