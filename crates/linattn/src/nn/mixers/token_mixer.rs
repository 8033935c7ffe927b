//! The trait of token mixers.

use crate::nn::Shared;
use crate::ops::LinearAttentionBackend;
use burn::tensor::Tensor;

/// Layers that the residual stream passes.
#[derive(Debug, Clone, Copy)]
pub struct Stack {
    /// How many there are.
    pub layers: usize,
    /// Mixers and MLPs that add to the stream.
    pub writes: usize,
}

/// A token mixer. Whole sequences and single tokens go through [`run`](Self::run), so that they cannot
/// differ.
pub trait TokenMixer<B: LinearAttentionBackend> {
    /// Its memory between two tokens.
    type State;
    /// Whether its output depends on how many tokens came before, or its state grows with them. The others
    /// can go on with sequences of different lengths in one batch.
    const COUNTS_TOKENS: bool = false;
    /// Whether this one, of its config, is as [`COUNTS_TOKENS`](Self::COUNTS_TOKENS) says.
    fn counts_tokens(&self) -> bool {
        Self::COUNTS_TOKENS
    }

    /// How many positions it has learnt, where it has: no sequence may be longer.
    fn positions(&self) -> Option<usize> {
        None
    }

    /// Whether it takes activations of 16 bits beside weights of 32. The others work in the type of their
    /// weights.
    const TAKES_BF16: bool = false;
    /// Whether it draws the weights of its linear layers on the scale of its source, which a model's keys
    /// `initializer` and `initializer_range` then leave alone.
    const SCALES_ITSELF: bool = false;

    /// Factor of its [`ResidualLinear`](crate::nn::ResidualLinear) weights in a stack of layers.
    fn shrink(stack: Stack) -> f64 {
        (stack.writes as f64).powf(-0.5)
    }

    /// One or more tokens: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. Tensors that
    /// layers read of one another come and go by `shared`.
    /// # Panics
    /// If `shared` lacks a tensor that the mixer reads.
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<Self::State>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, Self::State);

    /// Whole sequences through a mixer that reads of no other layer: `x` is `[B, T, D]`; gives `[B, T, D]`
    /// and the state after token T.
    /// # Panics
    /// If the mixer does read of another layer.
    fn forward(&self, x: Tensor<B, 3>, state: Option<Self::State>) -> (Tensor<B, 3>, Self::State) {
        self.run(x, state, &mut Shared::default())
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
    /// # Panics
    /// As [`forward`](Self::forward).
    fn step(&self, x: Tensor<B, 2>, state: Option<Self::State>) -> (Tensor<B, 2>, Self::State) {
        let (y, state) = self.forward(x.unsqueeze_dim(1), state);
        (y.squeeze_dim(1), state)
    }
}
