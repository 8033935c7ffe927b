//! States whose memory is a list of tensors.

use super::{CONV_STATES, RecurrentState, StateTensors};
use burn::tensor::{Tensor, backend::Backend};

/// State of a mixer whose memory is a list of tensors of R dimensions, between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct ListState<B: Backend, const R: usize> {
    /// The memory, in the order that the mixer gives it.
    pub memory: Vec<Tensor<B, R>>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, or the last token, `[B, 1, D]`, where the
    /// next one sees it.
    pub conv_states: Vec<Tensor<B, 3>>,
    /// Tokens seen.
    pub position: usize,
}

/// Vectors, `[B, 1, channels]`: one as a rule; real and imaginary parts; numerator and denominator over the
/// exponential of a maximum, and that; hidden and cell state.
pub type VectorState<B> = ListState<B, 3>;

/// A network's weights that gradients are taken at, `[B, H, from, to]`, a tensor for each layer; then what else the
/// mixer keeps of each layer, in the order that its page gives.
pub type NetworkState<B> = ListState<B, 4>;

impl<B: Backend, const R: usize> RecurrentState<B> for ListState<B, R> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_list("memory", &self.memory)
            .with_list(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self {
            memory: tensors.take_list("memory"),
            conv_states: tensors.take_list(CONV_STATES),
            position,
        }
    }
}
