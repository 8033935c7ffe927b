//! The residual stream.

use super::layers::Norm;
use crate::backend::TrainBackend;
use crate::ops::{self, LinearAttentionBackend};
use burn::tensor::{DType, Tensor, backend::AutodiffBackend, backend::Backend};

/// The residual stream between layers. The sum with the last layer's output is left to the next norm,
/// which does both at once.
#[derive(Debug, Clone)]
pub(super) struct Residual<B: Backend> {
    /// The sum so far, `[B, T, D]`.
    stream: Tensor<B, 3>,
    /// Added to it before anything reads it; of any type.
    addend: Option<Tensor<B, 3>>,
    /// Type of products and recurrences, for layers that take it.
    dtype: DType,
}

impl<B: LinearAttentionBackend> Residual<B> {
    /// A stream whose layers compute in its own type.
    pub(super) fn new(stream: Tensor<B, 3>) -> Self {
        let dtype = stream.dtype();
        Self { stream, addend: None, dtype }
    }

    /// A stream whose layers compute in type `dtype` where they can.
    pub(super) fn computed_in(stream: Tensor<B, 3>, dtype: DType) -> Self {
        Self { stream, addend: None, dtype }
    }

    /// The sum through `norm`, and the stream with nothing left to add.
    pub(super) fn normalized(self, norm: &Norm<B>, narrow: bool) -> (Tensor<B, 3>, Self) {
        let Self { stream, addend, dtype } = self;
        let own = if narrow { dtype } else { stream.dtype() };
        let (y, stream) = norm.add_forward(stream, addend, own);
        (y, Self { stream, addend: None, dtype })
    }

    /// The output of a part that adds what waits to the stream itself and gives that sum, too; and the stream with nothing
    /// left to add. `None` where the part does not take them, or computes in another type.
    pub(super) fn read_by(
        &self,
        part: impl FnOnce(&Tensor<B, 3>, Option<&Tensor<B, 3>>) -> Option<(Tensor<B, 3>, Tensor<B, 3>)>,
    ) -> Option<(Tensor<B, 3>, Self)> {
        if self.stream.dtype() != self.dtype {
            return None;
        }
        let (y, stream) = part(&self.stream, self.addend.as_ref())?;
        Some((y, Self { stream, addend: None, dtype: self.dtype }))
    }

    /// `[B, T, D]`.
    pub(super) fn dims(&self) -> [usize; 3] {
        self.stream.dims()
    }

    /// The sum itself, and the stream with nothing left to add.
    pub(super) fn summed(self, narrow: bool) -> (Tensor<B, 3>, Self) {
        let dtype = self.dtype;
        let stream = self.sum();
        let own = if narrow { dtype } else { stream.dtype() };
        (ops::typed(stream.clone(), own), Self { stream, addend: None, dtype })
    }

    /// The stream with `addend` to be added next; nothing else is left to add.
    pub(super) fn plus(self, addend: Tensor<B, 3>) -> Self {
        Self { addend: Some(addend), ..self }
    }

    /// The sum, with nothing left to add.
    pub(super) fn sum(self) -> Tensor<B, 3> {
        let dtype = self.stream.dtype();
        match self.addend {
            Some(addend) => self.stream + ops::typed(addend, dtype),
            None => self.stream,
        }
    }
}

/// Gradients of a stream and of what waits to be added to it.
pub(super) type Gradients<B> = [Option<Tensor<<B as AutodiffBackend>::InnerBackend, 3>>; 2];

impl<B: TrainBackend> Residual<B> {
    /// The same numbers at the start of a graph.
    pub(super) fn leaf(x: Residual<B::InnerBackend>) -> Self {
        let leaf = |x| Tensor::from_inner(x).require_grad();
        Self { stream: leaf(x.stream), addend: x.addend.map(leaf), dtype: x.dtype }
    }

    /// Gradients of a [`leaf`](Self::leaf), taken out of those of its graph.
    pub(super) fn gradients(&self, of: &mut B::Gradients) -> Gradients<B> {
        let addend = self.addend.as_ref();
        [self.stream.grad_remove(of), addend.and_then(|addend| addend.grad_remove(of))]
    }

    /// A number whose gradients by the stream and by what waits are these.
    pub(super) fn weighed(self, gradients: Gradients<B>) -> Tensor<B, 1> {
        let wide = self.stream.dtype();
        let parts = [Some(self.stream), self.addend].into_iter().zip(gradients);
        let weighed = parts
            .filter_map(|(x, d_x)| Some(ops::typed((x? * Tensor::from_inner(d_x?)).sum(), wide)));
        weighed.reduce(|a, b| a + b).expect("a stream has a gradient")
    }
}
