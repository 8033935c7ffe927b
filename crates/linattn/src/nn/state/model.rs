//! The state of a model: its layers' tensors, and states of several sequences in one batch.

use super::StateError;
use super::tensors::{CONV_STATES, Named, StateTensors, counted, like};
use crate::nn::block::BlockState;
use crate::nn::model::LanguageModelState;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

impl<B: Backend> BlockState<B> {
    /// Its tensors: those of the mixer below `mixer`, and `conv_states`.
    pub fn tensors(&self) -> StateTensors<B> {
        self.mixer.tensors().within("mixer").with_kept(CONV_STATES, &self.conv_states)
    }

    /// A state of the same kind, of other tensors.
    fn of(&self, mut tensors: StateTensors<B>) -> Self {
        let conv_states = tensors.take_kept(CONV_STATES);
        Self { mixer: self.mixer.of(tensors.out_of("mixer")), conv_states }
    }
}

impl<B: Backend> LanguageModelState<B> {
    /// The tensors of each layer.
    pub fn tensors(&self) -> Vec<StateTensors<B>> {
        self.layers.iter().map(BlockState::tensors).collect()
    }

    /// A state of the same kind whose layers have other tensors.
    pub(super) fn of(&self, tensors: impl IntoIterator<Item = StateTensors<B>>) -> Self {
        let layers = self.layers.iter().zip(tensors).map(|(layer, t)| layer.of(t)).collect();
        Self { layers, position: self.position }
    }

    /// Sequences in the batch.
    pub fn rows(&self) -> usize {
        let first = self.layers.iter().find_map(|layer| layer.tensors().list.into_iter().next());
        first.map_or(0, |tensor| tensor.shape[0])
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        let size = |t: &Named<B>| (t.rows.shape().num_elements() * t.rows.dtype().size()) as u64;
        self.tensors().iter().flat_map(|layer| layer.list.iter().map(size)).sum()
    }

    /// The states of some sequences of the batch, in that order.
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn select(&self, rows: &[usize]) -> Self {
        let have = self.rows();
        assert!(rows.iter().all(|&row| row < have), "rows {rows:?} of a batch of {have}");
        let ids: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let take = |_: usize, tensor: &Named<B>| {
            let data = TensorData::new(ids.clone(), [ids.len()]);
            let ids = Tensor::<B, 1, Int>::from_data(data, &tensor.rows.device());
            tensor.rows.clone().select(0, ids)
        };
        self.of(self.tensors().iter().map(|layer| layer.map(take)))
    }

    /// The sequences of several states in one batch, in order.
    /// # Errors
    /// [`StateError::Layer`] if they are of different models, or have seen different numbers of
    /// tokens and count them.
    /// # Panics
    /// If there are none.
    pub fn cat(states: Vec<Self>) -> Result<Self, StateError> {
        let [first, ..] = states.as_slice() else { panic!("a batch is of one state at least") };
        if let [_] = states.as_slice() {
            return Ok(first.clone());
        }
        if let Some(other) = states.iter().find(|state| state.position != first.position) {
            let (got, want) = (counted(other.position), counted(first.position));
            return Err(StateError::Position { got, want });
        }
        let parts: Vec<Vec<StateTensors<B>>> = states.iter().map(Self::tensors).collect();
        for other in &parts[1..] {
            check_alike(&parts[0], other)?;
        }
        let layer = |i: usize| {
            let of_layer: Vec<_> = parts.iter().map(|part| part[i].clone()).collect();
            StateTensors::cat(&of_layer)
        };
        Ok(first.of((0..first.layers.len()).map(layer)))
    }

    /// The same state, which says it has seen `position` tokens. It then goes with states of other
    /// lengths, which is right only if every mixer of the model
    /// [`fixed_size_state`](crate::nn::LanguageModel::fixed_size_state).
    #[must_use]
    pub fn with_position(&self, position: usize) -> Self {
        let moved = |mut layer: StateTensors<B>| {
            layer.position = layer.position.map(|_| position);
            layer
        };
        let state = self.of(self.tensors().into_iter().map(moved));
        Self { position: self.position.map(|_| position), ..state }
    }
}

/// Refuses states that cannot stand in one batch.
fn check_alike<B: Backend>(
    first: &[StateTensors<B>],
    other: &[StateTensors<B>],
) -> Result<(), StateError> {
    if first.len() != other.len() {
        return Err(StateError::Layers { got: other.len(), want: first.len() });
    }
    for (layer, (a, b)) in first.iter().zip(other).enumerate() {
        if a.position != b.position {
            let seen = |x: &StateTensors<B>| format!("{} tokens", x.position());
            return Err(StateError::layer(layer, "position", seen(b), seen(a)));
        }
        if a.list.len() != b.list.len() {
            let count = |x: &StateTensors<B>| format!("{} tensors", x.list.len());
            return Err(StateError::layer(layer, "mixer", count(b), count(a)));
        }
        for (a, b) in a.list.iter().zip(&b.list) {
            if !a.fits(&b.name, &b.shape, false) {
                let got = format!("{:?}", b.shape);
                return Err(StateError::layer(layer, &b.name, got, like(a)));
            }
        }
    }
    Ok(())
}
