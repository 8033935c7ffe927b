//! Errors of generation.

use crate::nn::{ConfigError, StateError};

/// Why nothing, or nothing more, can be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// States do not go together, or with the model.
    #[error(transparent)]
    State(#[from] StateError),
    /// The model reads whole sequences only.
    #[error("the model's head is an auto-encoder, which answers whole sequences and cannot write")]
    AutoEncoder,
    /// There is nothing to go on from.
    #[error("prompt {row} is empty; it has to have a token at least")]
    Empty {
        /// Which of the texts.
        row: usize,
    },
    /// The model does not know a token.
    #[error("prompt {row} has the token {id}; it has to be below {vocab}, the model's vocabulary")]
    Vocabulary {
        /// Which of the texts.
        row: usize,
        /// The token.
        id: u32,
        /// How many ids the model knows.
        vocab: usize,
    },
    /// The text would be longer than the model's table of learnt positions.
    #[error(
        "text {row} would have {tokens} tokens read; it has to be at most {positions}, which the model has positions for"
    )]
    Positions {
        /// Which of the texts.
        row: usize,
        /// Tokens that the model would read.
        tokens: usize,
        /// Positions that it has learnt.
        positions: usize,
    },
    /// The model's numbers have overflowed, or its weights are no numbers.
    #[error("the model's logits for token {place} of text {row} are no finite numbers")]
    NotFinite {
        /// Which of the texts.
        row: usize,
        /// Which of its tokens, the prompt's included.
        place: usize,
    },
}
