//! The trait of token mixers, and sequences of different lengths in one row through any of them: all at once where a
//! mixer keeps them apart itself, else one sequence after another.

use crate::nn::lengths::{LengthsError, Varlen, check_row, check_states};
use crate::nn::{MixerInput, RecurrentState, Shared, StateTensors};
use crate::ops::{LinearAttentionBackend, SequenceLengths, cat};
use burn::tensor::Tensor;

/// Layers that the residual stream passes.
#[derive(Debug, Clone, Copy)]
pub struct Stack {
    /// How many there are.
    pub layers: usize,
    /// Mixers and MLPs that add to the stream.
    pub writes: usize,
}

/// A token mixer. Whole sequences and single tokens go through [`run`](Self::run), so that they cannot
/// differ.
pub trait TokenMixer<B: LinearAttentionBackend> {
    /// Its memory between two tokens.
    type State;
    /// Whether its output depends on how many tokens came before, or its state grows with them. The others
    /// can go on with sequences of different lengths in one batch.
    const COUNTS_TOKENS: bool = false;
    /// Whether this one, of its config, is as [`COUNTS_TOKENS`](Self::COUNTS_TOKENS) says.
    fn counts_tokens(&self) -> bool {
        Self::COUNTS_TOKENS
    }

    /// How many positions it has learnt, where it has: no sequence may be longer.
    fn positions(&self) -> Option<usize> {
        None
    }

    /// How it takes sequences of different lengths in one row. [`Varlen::Packed`] is for mixers whose every look
    /// back is an operation of `nn/recurrence.rs` or goes through its conv states.
    const VARLEN: Varlen = Varlen::PerSequence;
    /// How this one, of its config, does.
    fn varlen(&self) -> Varlen {
        Self::VARLEN
    }

    /// Whether it takes activations of 16 bits beside weights of 32. The others work in the type of their
    /// weights.
    const TAKES_BF16: bool = false;
    /// Whether it draws the weights of its linear layers on the scale of its source, which a model's keys
    /// `initializer` and `initializer_range` then leave alone.
    const SCALES_ITSELF: bool = false;

    /// Factor of its [`ResidualLinear`](crate::nn::ResidualLinear) weights in a stack of layers.
    fn shrink(stack: Stack) -> f64 {
        (stack.writes as f64).powf(-0.5)
    }

    /// One or more tokens: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. Tensors that
    /// layers read of one another come and go by `shared`.
    /// # Panics
    /// If `shared` lacks a tensor that the mixer reads.
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<Self::State>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, Self::State);

    /// As [`run`](Self::run), of an input whose norm may be still to come, for mixers whose projections can take it with
    /// them.
    /// # Panics
    /// As [`run`](Self::run).
    fn run_input(
        &self,
        x: &mut MixerInput<'_, B>,
        state: Option<Self::State>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, Self::State) {
        self.run(x.take_rows(), state, shared)
    }

    /// Whole sequences through a mixer that reads of no other layer: `x` is `[B, T, D]`; gives `[B, T, D]`
    /// and the state after token T.
    /// # Panics
    /// If the mixer does read of another layer.
    fn forward(&self, x: Tensor<B, 3>, state: Option<Self::State>) -> (Tensor<B, 3>, Self::State) {
        self.run(x, state, &mut Shared::default())
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
    /// # Panics
    /// As [`forward`](Self::forward).
    fn step(&self, x: Tensor<B, 2>, state: Option<Self::State>) -> (Tensor<B, 2>, Self::State) {
        let (y, state) = self.forward(x.unsqueeze_dim(1), state);
        (y.squeeze_dim(1), state)
    }

    /// N sequences one after another in one row, as fla's `cu_seqlens`: none sees another, and nothing is padded.
    /// `x` is `[1, T, D]`, states have a row for each sequence. Gives `[1, T, D]` and the states after the last
    /// token of each sequence, with which [`step`](Self::step) goes on.
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, if the state has another number of rows, or if the
    /// mixer counts tokens, so that sequences of different lengths have no common state.
    /// # Panics
    /// As [`forward`](Self::forward).
    fn forward_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
        state: Option<Self::State>,
    ) -> Result<(Tensor<B, 3>, Self::State), LengthsError>
    where
        Self::State: RecurrentState<B>,
    {
        forward(self, x, lengths, state)
    }

    /// As [`forward_varlen`](Self::forward_varlen), of whole sequences and without their states, as in training:
    /// so mixers that count tokens are accepted too. Positions begin anew with each sequence.
    /// # Errors
    /// [`LengthsError`] if `lengths` do not divide the row, or the mixer takes no such sequences.
    /// # Panics
    /// As [`forward`](Self::forward).
    fn outputs_varlen(
        &self,
        x: Tensor<B, 3>,
        lengths: &SequenceLengths,
    ) -> Result<Tensor<B, 3>, LengthsError>
    where
        Self::State: RecurrentState<B>,
    {
        outputs(self, x, lengths)
    }
}

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
    let (y, state) = run(mixer, &mut MixerInput::of(x), state, &mut Shared::of_lengths(lengths));
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
    Ok(run(mixer, &mut MixerInput::of(x), None, &mut Shared::of_lengths(lengths)).0)
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

/// [`TokenMixer::run_input`], also of sequences of different lengths. The state is absent where the mixer counts tokens
/// and `shared` has lengths: sequences of different lengths then have no common one.
pub(super) fn run<
    B: LinearAttentionBackend,
    M: TokenMixer<B, State: RecurrentState<B>> + ?Sized,
>(
    mixer: &M,
    x: &mut MixerInput<'_, B>,
    state: Option<M::State>,
    shared: &mut Shared<B>,
) -> (Tensor<B, 3>, Option<M::State>) {
    let packed = mixer.varlen() == Varlen::Packed && !mixer.counts_tokens();
    match shared.lengths.clone() {
        Some(lengths) if !packed => per_sequence(mixer, x.take_rows(), state, &lengths),
        _ => {
            let (y, state) = mixer.run_input(x, state, shared);
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
    (cat(outputs, 1), (!mixer.counts_tokens()).then(joined))
}
