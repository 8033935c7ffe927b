//! Tensors that layers read of one another: handed from the first to the last, once through the model.
//! They are no state: nothing of them is kept for the next token.

use super::softmax::KeyValueCache;
use burn::tensor::{Tensor, backend::Backend};

/// Tensors that earlier layers left for later ones, of the tokens that are being computed.
#[derive(Debug, Clone, Default)]
pub struct Shared<B: Backend> {
    /// Values of the first `rwkv7` layer, `[B, T, H V]`.
    pub first_values: Option<Tensor<B, 3>>,
    /// Keys and values of the last `attention` layer, of earlier tokens too.
    pub keys_values: Option<KeyValueCache<B>>,
}
