//! Mixers over sequences of different lengths that lie one after another in one row: all at once where a mixer
//! keeps them apart itself, else one sequence after another.

use super::{Mixer, MixerState, TokenMixer};
use crate::nn::lengths::{LengthsError, Varlen};
use crate::nn::{RecurrentState, Shared, StateTensors};
use crate::ops::{LinearAttentionBackend, SequenceLengths};
use burn::tensor::{Tensor, backend::Backend};

/// [`TokenMixer::forward_varlen`].
pub(super) fn forward<
    B: LinearAttentionBackend,
    M: TokenMixer<B, State: RecurrentState<B>> + ?Sized,
>(
    mixer: &M,
    x: Tensor<B, 3>,
    lengths: &SequenceLengths,
    state: Option<M::State>,
) -> Result<(Tensor<B, 3>, M::State), LengthsError> {
    check(mixer, type_name::<M>(), true)?;
    check_row(x.dims(), lengths)?;
    check_states(state.as_ref().map(RecurrentState::tensors).as_ref(), lengths)?;
    let (y, state) = run(mixer, x, state, &mut Shared::of_lengths(lengths));
    Ok((y, state.expect("a mixer that counts no tokens has states of all sequences")))
}

/// [`TokenMixer::outputs_varlen`].
pub(super) fn outputs<
    B: LinearAttentionBackend,
    M: TokenMixer<B, State: RecurrentState<B>> + ?Sized,
>(
    mixer: &M,
    x: Tensor<B, 3>,
    lengths: &SequenceLengths,
) -> Result<Tensor<B, 3>, LengthsError> {
    check(mixer, type_name::<M>(), false)?;
    check_row(x.dims(), lengths)?;
    Ok(run(mixer, x, None, &mut Shared::of_lengths(lengths)).0)
}

/// Name of a type, without modules and parameters.
fn type_name<M: ?Sized>() -> &'static str {
    let path = std::any::type_name::<M>();
    let path = path.split_once('<').map_or(path, |(path, _)| path);
    path.rsplit_once("::").map_or(path, |(_, name)| name)
}

/// Whether a mixer takes sequences of different lengths, and also their states where `with_states` says so. An
/// error calls it `name`.
pub(super) fn check<B: LinearAttentionBackend, M: TokenMixer<B> + ?Sized>(
    mixer: &M,
    name: &str,
    with_states: bool,
) -> Result<(), LengthsError> {
    if mixer.varlen() == Varlen::Refused {
        let why = "it reads keys of an earlier layer, which has them of one sequence; an `attention` in its place \
                   has its own";
        return Err(LengthsError::part(name, why));
    }
    match with_states && mixer.counts_tokens() {
        true => Err(LengthsError::counts_tokens(name)),
        false => Ok(()),
    }
}

/// Whether `lengths` divide the row `[1, T, D]`.
pub(in crate::nn) fn check_row(
    [batch, tokens, _]: [usize; 3],
    lengths: &SequenceLengths,
) -> Result<(), LengthsError> {
    Ok(lengths.check("forward_varlen", batch, tokens)?)
}

/// Whether a state has a row for each sequence.
pub(in crate::nn) fn check_states<B: Backend>(
    state: Option<&StateTensors<B>>,
    lengths: &SequenceLengths,
) -> Result<(), LengthsError> {
    let want = lengths.count();
    match state.and_then(|state| state.rows_but(want)) {
        Some(got) => Err(LengthsError::State { got, want }),
        None => Ok(()),
    }
}

/// [`TokenMixer::run`], also of sequences of different lengths. The state is absent where the mixer counts tokens
/// and `shared` has lengths: sequences of different lengths then have no common one.
pub(super) fn run<
    B: LinearAttentionBackend,
    M: TokenMixer<B, State: RecurrentState<B>> + ?Sized,
>(
    mixer: &M,
    x: Tensor<B, 3>,
    state: Option<M::State>,
    shared: &mut Shared<B>,
) -> (Tensor<B, 3>, Option<M::State>) {
    let packed = mixer.varlen() == Varlen::Packed && !mixer.counts_tokens();
    match shared.lengths.clone() {
        Some(lengths) if !packed => per_sequence(mixer, x, state, &lengths),
        _ => {
            let (y, state) = mixer.run(x, state, shared);
            (y, Some(state))
        }
    }
}

/// One sequence after another, each from its row of the state.
fn per_sequence<B: LinearAttentionBackend, M: TokenMixer<B, State: RecurrentState<B>> + ?Sized>(
    mixer: &M,
    x: Tensor<B, 3>,
    state: Option<M::State>,
    lengths: &SequenceLengths,
) -> (Tensor<B, 3>, Option<M::State>) {
    let before = state.map(|state| state.tensors());
    let (outputs, states): (Vec<_>, Vec<_>) = lengths
        .ranges()
        .enumerate()
        .map(|(n, range)| {
            let x = x.clone().narrow(1, range.start, range.len());
            let state = before.as_ref().map(|state| M::State::from_tensors(state.row(n)));
            let (y, next) = mixer.run(x, state, &mut Shared::default());
            (y, next.tensors())
        })
        .unzip();
    let joined = || M::State::from_tensors(StateTensors::cat(&states));
    (Tensor::cat(outputs, 1), (!mixer.counts_tokens()).then(joined))
}

impl<B: LinearAttentionBackend> Mixer<B> {
    /// N sequences in one row: see [`TokenMixer::forward_varlen`].
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

    /// Whole sequences in one row, without states: see [`TokenMixer::outputs_varlen`].
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
