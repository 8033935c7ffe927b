//! Mixers of every kind over sequences of different lengths that lie one after another in one row.

use super::{Mixer, MixerState};
use crate::nn::Shared;
use crate::nn::lengths::{LengthsError, check_row, check_states};
use crate::ops::{LinearAttentionBackend, SequenceLengths};
use burn::tensor::Tensor;

impl<B: LinearAttentionBackend> Mixer<B> {
    /// N sequences in one row: see [`TokenMixer::forward_varlen`](super::TokenMixer::forward_varlen).
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, if the state has another number of rows, or if the
    /// mixer counts tokens, so that sequences of different lengths have no common state.
    /// # Panics
    /// If `state` is another kind of mixer's, or the mixer reads of another layer.
    pub fn forward_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
        state: Option<MixerState<B>>,
    ) -> Result<(Tensor<B, 3>, MixerState<B>), LengthsError> {
        self.check_varlen(true)?;
        check_row(x.dims(), lengths)?;
        check_states(state.as_ref().map(MixerState::tensors).as_ref(), lengths)?;
        Ok(self.forward_shared(x, state, &mut Shared::of_lengths(lengths)))
    }

    /// Whole sequences in one row, without states: see [`TokenMixer::outputs_varlen`](super::TokenMixer::outputs_varlen).
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, or the mixer takes no such sequences.
    /// # Panics
    /// If the mixer reads of another layer.
    pub fn outputs_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
    ) -> Result<Tensor<B, 3>, LengthsError> {
        self.check_varlen(false)?;
        check_row(x.dims(), lengths)?;
        Ok(self.forward_shared(x, None, &mut Shared::of_lengths(lengths)).0)
    }
}
