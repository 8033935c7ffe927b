//! Layers and models over sequences of different lengths that lie one after another in one row.

use super::block::{Block, BlockState};
use super::lengths::{LengthsError, check_row, check_states};
use super::model::{LanguageModel, LanguageModelState};
use super::shared::Shared;
use crate::ops::{LinearAttentionBackend, SequenceLengths};
use burn::tensor::{Int, Tensor};

impl<B: LinearAttentionBackend> Block<B> {
    /// Whether it takes sequences of different lengths in one row, and also their states where `with_states` says
    /// so.
    /// # Errors
    /// [`LengthsError`] with the name of its mixer, and what would be accepted.
    pub fn check_varlen(&self, with_states: bool) -> Result<(), LengthsError> {
        let Some(mixer) = self.mixer() else { return Ok(()) };
        mixer.check_varlen(with_states).map_err(|e| e.within("mixer"))
    }

    /// N sequences in one row: `x` is `[1, T, D]`, states have a row for each sequence. Gives `[1, T, D]` and the
    /// states after the last token of each sequence, with which [`step`](Self::step) goes on. `shared` is as in
    /// [`forward`](Self::forward).
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, if the state has another number of rows, or if the
    /// mixer counts tokens, so that sequences of different lengths have no common state.
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> Result<(Tensor<B, 3>, BlockState<B>), LengthsError> {
        self.check_varlen(true)?;
        check_row(x.dims(), lengths)?;
        check_states(state.as_ref().map(BlockState::tensors).as_ref(), lengths)?;
        shared.lengths = Some(lengths.clone());
        Ok(self.forward(x, state, shared))
    }

    /// As [`forward_varlen`](Self::forward_varlen), of whole sequences and without their states, as in training:
    /// so mixers that count tokens are accepted too. Positions begin anew with each sequence.
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, or the mixer takes no such sequences.
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn outputs_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
        shared: &mut Shared<B>,
    ) -> Result<Tensor<B, 3>, LengthsError> {
        self.check_varlen(false)?;
        check_row(x.dims(), lengths)?;
        shared.lengths = Some(lengths.clone());
        Ok(self.forward(x, None, shared).0)
    }
}

impl<B: LinearAttentionBackend> LanguageModel<B> {
    /// Whether it takes sequences of different lengths in one row, and also their states where `with_states` says
    /// so.
    /// # Errors
    /// [`LengthsError`] names the first part that does not, and what would be accepted.
    pub fn check_varlen(&self, with_states: bool) -> Result<(), LengthsError> {
        if self.needs_whole_sequences() {
            let why = "an auto-encoder reads all of a row at its end; the head `position` does";
            return Err(LengthsError::part("head", why));
        }
        if with_states && self.positions.is_some() {
            return Err(LengthsError::counts_tokens("positions"));
        }
        for (i, block) in self.layers.iter().enumerate() {
            block.check_varlen(with_states).map_err(|e| e.within(format!("layers[{i}]")))?;
        }
        Ok(())
    }

    /// N sequences of ids in one row, `[1, T]`, as `cu_seqlens` of flash-linear-attention: none sees another, and
    /// nothing is padded. Gives logits, `[1, T, vocab]`, and the states after the last token of each sequence, with
    /// which [`step`](Self::step) goes on, N rows at once. A state that goes in has a row for each sequence, too.
    ///
    /// ```
    /// # use burn::tensor::{Int, Tensor};
    /// # use linattn::nn::{LanguageModel, LanguageModelConfig};
    /// # use linattn::ops::SequenceLengths;
    /// # type B = burn::backend::Flex;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Default::default();
    /// let layers = "d_model = 16\n[[layers]]\nrepeat = 2\nmixer.gated_deltanet = { heads = 2 }\nmlp.swiglu = {}";
    /// let model: LanguageModel<B> = toml::from_str::<LanguageModelConfig>(layers)?.init(100, &device)?;
    /// let ids = Tensor::<B, 2, Int>::from_data([[5, 8, 2, 7, 1, 9]], &device);
    /// let lengths = SequenceLengths::new(&[3, 1, 2]); // 5 8 2, 7 and 1 9
    ///
    /// let (logits, state) = model.forward_varlen(ids, &lengths, None)?; // [1, 6, 100]
    /// let next = Tensor::<B, 1, Int>::from_data([4, 4, 6], &device); // an id for each of the three
    /// let (logits_of_next, state) = model.step(next, Some(state)); // [3, 100]
    /// # assert_eq!((logits.dims(), logits_of_next.dims(), state.rows()), ([1, 6, 100], [3, 100], 3));
    /// # Ok(())
    /// # }
    /// ```
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, if the state has another number of rows, or if a part
    /// of the model counts tokens, so that sequences of different lengths have no common state. It names the part.
    /// # Panics
    /// If `state` is another model's.
    pub fn forward_varlen(
        &self,
        ids: Tensor<B, 2, Int>,
        lengths: &SequenceLengths,
        state: Option<LanguageModelState<B>>,
    ) -> Result<(Tensor<B, 3>, LanguageModelState<B>), LengthsError> {
        self.check_varlen(true)?;
        self.check_ids(&ids, lengths)?;
        for layer in state.iter().flat_map(|state| &state.layers) {
            check_states(Some(&layer.tensors()), lengths)?;
        }
        let (hidden, state) = self.hidden_among(ids, state, Shared::of_lengths(lengths));
        Ok((self.logits(hidden), state))
    }

    /// As [`hidden`](Self::hidden), of N whole sequences in one row, `[1, T]`, and without their states, as in
    /// training: so parts that count tokens are accepted too. Positions begin anew with each sequence. Gives
    /// `[1, T, D]`.
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, or names the first part that takes no such sequences.
    /// # Panics
    /// If a sequence is longer than the positions that the model has learnt.
    pub fn hidden_varlen(
        &self,
        ids: Tensor<B, 2, Int>,
        lengths: &SequenceLengths,
    ) -> Result<Tensor<B, 3>, LengthsError> {
        self.check_varlen(false)?;
        self.check_ids(&ids, lengths)?;
        let shared = Shared::of_lengths(lengths).without_states();
        Ok(self.hidden_among(ids, None, shared).0)
    }

    fn check_ids(
        &self,
        ids: &Tensor<B, 2, Int>,
        lengths: &SequenceLengths,
    ) -> Result<(), LengthsError> {
        let [batch, tokens] = ids.dims();
        check_row([batch, tokens, 1], lengths)
    }
}
