//! States whose memory is vectors, or the weights of a network.

use super::{CONV_STATES, KeptTensors, RecurrentState, StateTensors};
use burn::tensor::{Tensor, backend::Backend};

/// State of a mixer whose memory is vectors, between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct VectorState<B: Backend> {
    /// `[B, 1, channels]` each: one as a rule; real and imaginary parts; sums over the exponential of a maximum, and
    /// that; hidden and cell state.
    pub memory: KeptTensors<B>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, or the last token, `[B, 1, D]`, where the
    /// next one sees it.
    pub conv_states: KeptTensors<B>,
    /// Tokens seen.
    pub position: usize,
}

impl<B: Backend> RecurrentState<B> for VectorState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_kept("memory", &self.memory)
            .with_kept(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self {
            memory: tensors.take_kept("memory"),
            conv_states: tensors.take_kept(CONV_STATES),
            position,
        }
    }
}

/// The weights of a network that learns while it reads: `[B, H, from, to]` of each of its layers.
#[derive(Debug, Clone)]
pub struct NetworkMemory<B: Backend> {
    /// At the start of the mini-batch: gradients are taken at them.
    pub start: Vec<Tensor<B, 4>>,
    /// After the last token (Titans, Atlas); or the sums of steps since `start` (TTT, LaCT).
    pub running: Vec<Tensor<B, 4>>,
    /// The momentum of its steps; none in mixers without.
    pub momentum: Vec<Tensor<B, 4>>,
}

/// State of a mixer whose memory is a network, between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct NetworkState<B: Backend> {
    /// Its weights.
    pub memory: NetworkMemory<B>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, and what else the mixer keeps of its last tokens.
    pub conv_states: KeptTensors<B>,
    /// Tokens seen.
    pub position: usize,
}

impl<B: Backend> RecurrentState<B> for NetworkState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_list("memory.start", &self.memory.start)
            .with_list("memory.running", &self.memory.running)
            .with_list("memory.momentum", &self.memory.momentum)
            .with_kept(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        let memory = NetworkMemory {
            start: tensors.take_list("memory.start"),
            running: tensors.take_list("memory.running"),
            momentum: tensors.take_list("memory.momentum"),
        };
        Self { memory, conv_states: tensors.take_kept(CONV_STATES), position }
    }
}
