//! States of mixers with a memory of fixed size, and the same taken apart.

use crate::nn::convolution::ConvPast;
use crate::nn::state::CONV_STATES;
use crate::nn::{Kept, KeptTensors, RecurrentState, Shared, StateTensors, VectorState};
use crate::ops::SequenceLengths;
use burn::tensor::{Tensor, backend::Backend};

/// State of a mixer with a matrix memory between two tokens. Its size does not grow.
#[derive(Debug, Clone)]
pub struct MatrixState<B: Backend> {
    /// `[B, H, K, V]`.
    pub memory: Tensor<B, 4>,
    /// Last inputs of each short convolution, `[B, W - 1, channels]`, and what else a mixer needs of its last token:
    /// RWKV-6 and RWKV-7 the token itself, `[B, 1, D]`, mLSTM its running maximum, `[B, 1, H]`, GateLoop its angles,
    /// `[B, 1, H K / 2]`, Mamba-3 its angles, keys and values, a preconditioner its sums, `[B, 1, H K]`. Empty where
    /// there is nothing of the kind.
    pub conv_states: KeptTensors<B>,
    /// Tokens seen; the most that any row has, where sequences of different lengths came in one row.
    pub position: usize,
}

/// A [`MatrixState`] taken apart, to become the next.
pub(super) struct MatrixPast<B: Backend> {
    pub(super) memory: Option<Tensor<B, 4>>,
    pub(super) conv_states: ConvPast<B>,
    pub(super) position: usize,
}

impl<B: Backend> MatrixPast<B> {
    /// Of a state, or of the start of a sequence; of sequences of different lengths where `shared` has them.
    pub(super) fn of(state: Option<MatrixState<B>>, shared: &Shared<B>) -> Self {
        let (memory, conv_states, position) = match state {
            Some(MatrixState { memory, conv_states, position }) => {
                (Some(memory), ConvPast::after(conv_states), position)
            }
            None => (None, ConvPast::none(), 0),
        };
        Self { memory, conv_states: conv_states.among(shared), position }
    }

    /// The state `tokens` tokens later; of sequences of different lengths it says those of the longest.
    pub(super) fn then(self, memory: Tensor<B, 4>, tokens: usize) -> MatrixState<B> {
        let tokens = self.conv_states.lengths().map_or(tokens, SequenceLengths::longest);
        MatrixState {
            memory,
            conv_states: self.conv_states.into_next(),
            position: self.position + tokens,
        }
    }
}

/// A [`VectorState`] taken apart, to become the next.
pub(super) struct VectorPast<B: Backend> {
    memory: KeptTensors<B>,
    pub(super) conv_states: ConvPast<B>,
    pub(super) position: usize,
}

impl<B: Backend> VectorPast<B> {
    /// Of a state, or of the start of a sequence.
    pub(super) fn of(state: Option<VectorState<B>>) -> Self {
        match state {
            Some(VectorState { memory, conv_states, position }) => {
                Self { memory, conv_states: ConvPast::after(conv_states), position }
            }
            None => {
                Self { memory: KeptTensors::default(), conv_states: ConvPast::none(), position: 0 }
            }
        }
    }

    /// Of the tokens that `shared` goes with: where nobody reads what comes next, convolutions leave nothing.
    pub(super) fn among(self, shared: &Shared<B>) -> Self {
        Self { conv_states: self.conv_states.among(shared), ..self }
    }

    /// The vector that earlier tokens left as `name`.
    pub(super) fn draw(&mut self, name: Kept) -> Option<Tensor<B, 3>> {
        self.memory.take(name)
    }

    /// Real and imaginary parts of its vector.
    pub(super) fn draw_parts(&mut self) -> Option<(Tensor<B, 3>, Tensor<B, 3>)> {
        self.draw(Kept::Real).zip(self.draw(Kept::Imaginary))
    }

    /// The state `tokens` tokens later.
    pub(super) fn then(
        self,
        memory: impl IntoIterator<Item = (Kept, Tensor<B, 3>)>,
        tokens: usize,
    ) -> VectorState<B> {
        VectorState {
            memory: memory.into_iter().collect(),
            conv_states: self.conv_states.into_next(),
            position: self.position + tokens,
        }
    }
}

impl<B: Backend> RecurrentState<B> for MatrixState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with("memory", &self.memory)
            .with_kept(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let position = tensors.position();
        Self {
            memory: tensors.take("memory"),
            conv_states: tensors.take_kept(CONV_STATES),
            position,
        }
    }
}
