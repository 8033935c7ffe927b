//! A forward pass and the backward pass that it leaves.

use burn::tensor::{backend::Backend, ops::FloatTensor};

/// Gradients of the inputs from those of the outputs. An output that was not used has no gradient; an
/// input that needs none (`false` in the second list) may be given none.
pub type BackwardPass<B> =
    Box<dyn FnOnce(Vec<Option<FloatTensor<B>>>, &[bool]) -> Vec<Option<FloatTensor<B>>> + Send>;

/// Outputs of a forward pass, and its backward pass where one was asked for.
pub struct Pass<B: Backend> {
    /// The outputs.
    pub outputs: Vec<FloatTensor<B>>,
    /// The backward pass, which holds what it needs of the forward pass.
    pub backward: Option<BackwardPass<B>>,
}

impl<B: Backend> Pass<B> {
    /// Outputs without a backward pass.
    pub fn forward(outputs: Vec<FloatTensor<B>>) -> Self {
        Self { outputs, backward: None }
    }
}
