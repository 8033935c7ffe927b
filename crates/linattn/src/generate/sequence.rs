//! Texts in the making.

use super::error::GenerateError;
use super::reading::{check_tokens, check_window, read_tokens};
use crate::nn::state::{self, TextHeader};
use crate::nn::{LanguageModel, LanguageModelState, StateError};
use crate::ops::LinearAttentionBackend;
use burn::tensor::backend::Backend;
use std::path::Path;

/// A text in the making: its tokens, and the state after those that the model has read.
#[derive(Debug, Clone)]
pub struct Sequence<B: Backend> {
    pub(super) tokens: Vec<u32>,
    /// The state, of one row, and how many of the first tokens it has seen.
    pub(super) state: Option<(LanguageModelState<B>, usize)>,
    pub(super) stream: u64,
}

impl<B: Backend> Sequence<B> {
    /// A text that begins with `prompt`.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { tokens: prompt, state: None, stream: 0 }
    }

    /// The same, sampled with random numbers of its own. Texts of one stream and one seed that
    /// begin alike go on alike.
    #[must_use]
    pub fn with_stream(self, stream: u64) -> Self {
        Self { stream, ..self }
    }

    /// Which random numbers it is sampled with.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// All tokens, the prompt first.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds to the text what the model did not write.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// The state so far, of one row: after generation it has seen all tokens but the last.
    pub fn state(&self) -> Option<&LanguageModelState<B>> {
        self.state.as_ref().map(|(state, _)| state)
    }

    /// Tokens that the state has seen.
    pub fn read(&self) -> usize {
        self.state.as_ref().map_or(0, |(_, read)| *read)
    }

    /// Writes tokens and state to a file.
    /// # Errors
    /// [`StateError::Write`], also where there is no state yet.
    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        let Some((state, read)) = &self.state else {
            let why = "the text has no state yet".to_string();
            return Err(StateError::Write { path: path.into(), why });
        };
        let header = TextHeader { read: *read, stream: self.stream };
        state::write(path, state, Some((self.tokens.as_slice(), header)))
    }
}

impl<B: LinearAttentionBackend> Sequence<B> {
    /// Has the model read all tokens now, `window` of them at a time, and not when it goes on: a copy of the
    /// text taken here goes on from here, as often as it is wanted. [`generate`](super::generate) wants a token
    /// more after it.
    /// # Errors
    /// [`GenerateError`] if the model cannot read them.
    pub fn read_ahead(
        &mut self,
        model: &LanguageModel<B>,
        window: usize,
        device: &B::Device,
    ) -> Result<(), GenerateError> {
        let (read, length) = (self.read(), self.tokens.len());
        check_window(window)?;
        check_tokens(model, 0, &self.tokens, length)?;
        if model.needs_whole_sequences() {
            return Err(GenerateError::AutoEncoder);
        }
        if length > read {
            let before = self.state.take().map(|(state, _)| state);
            let (_, state) = read_tokens(model, &[&self.tokens[read..]], before, window, device);
            self.state = Some((state, length));
        }
        Ok(())
    }

    /// Reads what [`save`](Self::save) wrote, of a model of the same config.
    /// # Errors
    /// [`StateError`] names the file, or the layer and the tensor that does not fit.
    pub fn load(
        path: &Path,
        model: &LanguageModel<B>,
        device: &B::Device,
    ) -> Result<Self, StateError> {
        match state::read(model, path, device)? {
            (state, Some((tokens, TextHeader { read, stream }))) => {
                Ok(Self { tokens, state: Some((state, read)), stream })
            }
            (_, None) => {
                let why = "it has a state, and no text that the state has seen".to_string();
                Err(StateError::Read { path: path.into(), why })
            }
        }
    }
}
