//! Tensors that layers read of one another: handed from the first to the last, once through the model.
//! They are no state: nothing of them is kept for the next token. With them go the lengths of sequences that
//! lie in one row.

use super::softmax::KeyValueCache;
use crate::ops::SequenceLengths;
use burn::tensor::{Tensor, backend::Backend};

/// Tensors that earlier layers left for later ones, of the tokens that are being computed.
#[derive(Debug, Clone, Default)]
pub struct Shared<B: Backend> {
    /// Values of the first `rwkv7` layer, `[B, T, H V]`.
    pub first_values: Option<Tensor<B, 3>>,
    /// Keys and values of the last `attention` layer, of earlier tokens too.
    pub keys_values: Option<KeyValueCache<B>>,
    /// Of the sequences in the one row; absent where every row is a sequence. Whoever sets them has asked every
    /// layer whether it takes them.
    pub(super) lengths: Option<SequenceLengths>,
    /// Whether nobody reads the states after these tokens, as in training: then convolutions leave none.
    pub(super) drops_states: bool,
}

impl<B: Backend> Shared<B> {
    /// For sequences of these lengths in one row.
    pub(super) fn of_lengths(lengths: &SequenceLengths) -> Self {
        Self {
            lengths: Some(lengths.clone()),
            first_values: None,
            keys_values: None,
            drops_states: false,
        }
    }

    /// For sequences whose states nobody reads.
    pub(super) fn without_states(self) -> Self {
        Self { drops_states: true, ..self }
    }
}
