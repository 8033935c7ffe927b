//! Tokens read into states, a bounded number at a time.

use super::error::GenerateError;
use crate::nn::{ConfigError, LanguageModel, LanguageModelState};
use crate::ops::LinearAttentionBackend;
use burn::tensor::{Int, Tensor, TensorData};

/// Refuses to read no tokens at a time.
pub(super) fn check_window(window: usize) -> Result<(), ConfigError> {
    match window {
        0 => Err(ConfigError::new("window", 0, "at least 1")),
        _ => Ok(()),
    }
}

/// Refuses tokens of text `row` that the model does not know, and more of them to read than it has
/// positions for.
pub(super) fn check_tokens<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    row: usize,
    ids: &[u32],
    tokens: usize,
) -> Result<(), GenerateError> {
    let vocab = model.vocab();
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(GenerateError::Vocabulary { row, id, vocab });
    }
    match model.positions().filter(|&positions| tokens > positions) {
        Some(positions) => Err(GenerateError::Positions { row, tokens, positions }),
        None => Ok(()),
    }
}

/// Reads texts of one length, a token at the least, after `state`. Gives what the layers make of the last
/// tokens, `[rows, D]`, and the state after them. No more than `window` tokens of a text are there at a time:
/// where states do not grow, memory does not either.
pub(super) fn read_tokens<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    texts: &[&[u32]],
    state: Option<LanguageModelState<B>>,
    window: usize,
    device: &B::Device,
) -> (Tensor<B, 2>, LanguageModelState<B>) {
    let length = texts.iter().map(|text| text.len()).min().unwrap_or(0);
    let read = |(_, state), from: usize| {
        let to = (from + window).min(length);
        let ids = texts.iter().flat_map(|text| &text[from..to]).map(|&id| id as i32);
        let ids = TensorData::new(ids.collect::<Vec<i32>>(), [texts.len(), to - from]);
        let (hidden, state) = model.hidden(Tensor::<B, 2, Int>::from_data(ids, device), state);
        let last = hidden.narrow(1, to - from - 1, 1).squeeze_dim::<2>(1);
        (Some(last), Some(state))
    };
    match (0..length).step_by(window).fold((None, state), read) {
        (Some(last), Some(state)) => (last, state),
        _ => panic!("a text to read has a token"),
    }
}
