//! The input of a mixer: rows, or the residual stream whose norm is still to come.

use super::layers::Norm;
use super::residual::Residual;
use super::weight::Weight;
use crate::ops::{self, LinearAttentionBackend};
use burn::tensor::{Tensor, backend::Backend};

/// The input of a mixer, `[B, T, D]`.
///
/// Where a norm stands before the mixer, it is still to come: a token's projections can take it with them, which
/// saves a launch. Any other reader takes the [`rows`](Self::take_rows).
#[derive(Debug, Clone)]
pub struct MixerInput<'a, B: Backend> {
    read: Read<'a, B>,
    stream: Residual<B>,
}

/// Rows, or the norm that makes them of the stream.
#[derive(Debug, Clone)]
enum Read<'a, B: Backend> {
    Rows(Tensor<B, 3>),
    /// The stream through a norm; whether in the type of products and recurrences.
    Through(&'a Norm<B>, bool),
}

impl<'a, B: LinearAttentionBackend> MixerInput<'a, B> {
    /// These rows, `[B, T, D]`.
    pub fn of(rows: Tensor<B, 3>) -> Self {
        Self { stream: Residual::new(rows.clone()), read: Read::Rows(rows) }
    }

    /// Rows that were made of a stream.
    pub(super) fn made((rows, stream): (Tensor<B, 3>, Residual<B>)) -> Self {
        Self { read: Read::Rows(rows), stream }
    }

    /// A stream through a norm, which is still to come.
    pub(super) fn normalized(stream: Residual<B>, norm: &'a Norm<B>, narrow: bool) -> Self {
        Self { read: Read::Through(norm, narrow), stream }
    }

    /// T.
    pub fn tokens(&self) -> usize {
        match &self.read {
            Read::Rows(rows) => rows.dims()[1],
            Read::Through(..) => self.stream.dims()[1],
        }
    }

    /// The rows, normalized where they are not yet: `[B, T, D]`.
    pub fn take_rows(&mut self) -> Tensor<B, 3> {
        if let Read::Through(norm, narrow) = self.read {
            let (rows, stream) = self.stream.clone().normalized(norm, narrow);
            (self.read, self.stream) = (Read::Rows(rows), stream);
        }
        match &self.read {
            Read::Rows(rows) => rows.clone(),
            Read::Through(..) => unreachable!("the rows have just been made"),
        }
    }

    /// The norm that is still to come and a product in one launch, `[B, 1, N]`; nothing where there are several tokens, no
    /// norm is to come, or a backend has no such product.
    pub(super) fn product(&mut self, weights: &[&Weight<B>]) -> Option<Tensor<B, 3>> {
        let Read::Through(Norm::Rms(norm), _) = self.read else { return None };
        if self.tokens() > 1 {
            return None;
        }
        let matrices = Weight::side_by_side(weights)?;
        let norm = (norm.gamma.val(), norm.epsilon);
        let (y, stream) = self.stream.read_by(|stream, addend| {
            ops::normalized_linear(stream.clone(), addend.cloned(), norm, matrices)
        })?;
        self.stream = stream;
        Some(y)
    }

    /// The stream that the mixer's output is added to.
    pub(super) fn into_stream(self) -> Residual<B> {
        match self.read {
            // A mixer that read nothing: the sum is still to come.
            Read::Through(..) => self.stream.summed(false).1,
            Read::Rows(_) => self.stream,
        }
    }
}
