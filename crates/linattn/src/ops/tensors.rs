//! Tensors as Burn has them and as backends have them, and their types.

use burn::tensor::{BasicOps, DType, Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

/// The tensor around a backend's own.
pub(super) fn tensor<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// A backend's own tensor.
pub(super) fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// f32 for everything narrower: states, log decays and sums lose too much in 16 bits.
pub(crate) fn accumulator<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::F64 | DType::F32 => x,
        _ => x.cast(DType::F32),
    }
}

/// `x` in another type. Backends take two tensors of different types for two of one, so what meets has to
/// be of one.
pub(crate) fn typed<B: Backend, const D: usize>(x: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// `tensors` one after another along `dim`, as [`Tensor::cat`] does, while other threads learn.
///
/// Burn 0.21 lets go of what it joins before the graph knows the result. A backward pass that another thread ends
/// in between frees steps that no tensor holds, and their gradients are lost without a word
/// (tracel-ai/burn#5573), so the tensors are held here.
pub(crate) fn cat<B: Backend, K: BasicOps<B>, const D: usize>(
    tensors: Vec<Tensor<B, D, K>>,
    dim: usize,
) -> Tensor<B, D, K> {
    let held = tensors.clone();
    #[allow(clippy::disallowed_methods)] // the one place where it is right
    let joined = Tensor::cat(tensors, dim);
    drop(held);
    joined
}

/// [`cat`] of a backend's own tensors.
pub(super) fn float_cat<B: Backend>(tensors: Vec<FloatTensor<B>>, dim: usize) -> FloatTensor<B> {
    let held = tensors.clone();
    #[allow(clippy::disallowed_methods)] // as above
    let joined = B::float_cat(tensors, dim);
    drop(held);
    joined
}

/// Sums and means along a dimension that is kept with one number, as Burn's are, with right gradients on GPUs.
///
/// On CubeCL's backends Burn 0.21 sums a dimension of one number wrongly where a tensor lies permuted, and the gradient
/// of a sum starts with such a sum of the gradient that came. So what comes is laid out anew here, by a way through
/// a tensor of one dimension, unless it lies in order.
pub(crate) trait Along {
    fn sum_along(self, dim: usize) -> Self;
    fn mean_along(self, dim: usize) -> Self;
}

#[allow(clippy::disallowed_methods)] // the one place where they are right
impl<B: Backend, const D: usize> Along for Tensor<B, D> {
    fn sum_along(self, dim: usize) -> Self {
        if self.dims()[dim] == 1 { self } else { with_gradients_in_order(self.sum_dim(dim)) }
    }

    fn mean_along(self, dim: usize) -> Self {
        if self.dims()[dim] == 1 { self } else { with_gradients_in_order(self.mean_dim(dim)) }
    }
}

fn with_gradients_in_order<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let dims = x.dims();
    in_one_row(x).reshape(dims)
}

/// All numbers of `x` in their order, from where any shape can be had: Burn 0.21 loses strides where a reshape, or the
/// gradient of one, adds dimensions behind one of 1 of a tensor that lies permuted.
pub(crate) fn in_one_row<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    let count: usize = x.dims().iter().product();
    x.reshape([count])
}

/// `tensors` beside one another along a new dimension, joined by [`cat`].
pub(crate) fn stack<B: Backend, const D: usize, const E: usize>(
    tensors: Vec<Tensor<B, D>>,
    dim: usize,
) -> Tensor<B, E> {
    cat(tensors.into_iter().map(|x| x.unsqueeze_dim(dim)).collect(), dim)
}

/// The N parts of `x` along a dimension, each one wide. Halved again and again, because the gradient of a
/// slice is as large as what it was cut from: so all of them are O(N log N) numbers, not O(N^2).
pub(crate) fn each_part<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    dim: usize,
) -> Vec<Tensor<B, D>> {
    let parts = x.dims()[dim];
    if parts == 1 {
        return vec![x];
    }
    let half = parts / 2;
    let mut list = each_part(x.clone().narrow(dim, 0, half), dim);
    list.extend(each_part(x.narrow(dim, half, parts - half), dim));
    list
}

/// The sum of all numbers, `[1]`. Burn's own sum of a whole tensor is made of atomic additions on some GPUs, in any
/// order.
pub(crate) fn sum_in_order<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    let count = x.dims().iter().product();
    x.reshape([1, count]).sum_along(1).reshape([1])
}

/// `ln(1 + e^x)` without an infinity where x is large, in f32 at least. It is as good as the backend's `log1p`, which
/// shaders make of a logarithm.
pub(super) fn softplus_in_tensor_ops<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = x.dtype();
    let x = accumulator(x);
    let low = x.clone().clamp_max(20.0);
    typed(low.clone().exp().log1p() + (x - low), dtype)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use burn::tensor::backend::AutodiffBackend;
    use burn_flex::Flex;
    use std::sync::atomic::{AtomicBool, Ordering};

    type B = burn::backend::Autodiff<Flex>;

    /// The gradient of a weight that a backward pass went through before, as in the second of two batches whose
    /// gradients are added.
    fn second_gradient(join: impl Fn(Vec<Tensor<B, 2>>) -> Tensor<B, 2>) -> Option<f32> {
        let weight = Tensor::<B, 2>::ones([64, 2048], &Default::default()).require_grad();
        let loss = || join(vec![weight.clone() * 2.0, weight.clone() * 3.0]).sum();
        loss().backward();
        let gradients: <B as AutodiffBackend>::Gradients = loss().backward();
        weight.grad(&gradients).and_then(|x| x.into_data().iter::<f32>().next())
    }

    #[test]
    fn what_is_joined_keeps_its_gradient_beside_a_thread_that_learns() {
        /// Ends the other thread, after a panic too.
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = Done(&done);
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let other = Tensor::<B, 1>::ones([1], &Default::default()).require_grad();
                    (other.clone() * 2.0).backward();
                }
            });
            let found: Vec<_> = (0..300)
                .flat_map(|_| {
                    let wide = second_gradient(|x| cat(x, 1));
                    [wide, second_gradient(|x| stack::<B, 2, 3>(x, 0).reshape([128, 2048]))]
                })
                .collect();
            drop(end);
            assert_eq!(found, vec![Some(5.0); 600]);
        });
    }
}
