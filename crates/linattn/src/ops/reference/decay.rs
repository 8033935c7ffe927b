//! Decay between the tokens of every chunk: factors, scores, and the way back.

use super::exponents::{ExponentGradients, ScoreGradients};
use super::mask::Mask;
use super::scalar_decay::ScalarDecay;
use super::vector_decay::VectorDecay;
use crate::ops::recurrence::{LogDecay, Read};
use crate::ops::tensors::Along;
use burn::tensor::{Tensor, backend::Backend};

/// Factors of the decay of a recurrence.
pub(super) enum DecayFactors<B: Backend> {
    /// All is kept: of scores only those of tokens before, with and without the token itself.
    None { causal: Mask<B>, strict: Mask<B> },
    /// One for every row of the state.
    Scalar(ScalarDecay<B>),
    /// Every row of the state has its own.
    Vector(VectorDecay<B>),
}

impl<B: Backend> DecayFactors<B> {
    /// `g` is `[M, N, C, 1 or K]`; `rows` are as many, `[M, N, C, ..]`.
    pub(super) fn new(g: Option<LogDecay<Tensor<B, 4>>>, rows: &Tensor<B, 4>) -> Self {
        let size = rows.dims()[2];
        match g {
            None => Self::None {
                causal: Mask::lower(rows, size, 0),
                strict: Mask::lower(rows, size, 1),
            },
            Some(LogDecay::Scalar(g)) => Self::Scalar(ScalarDecay::new(g)),
            Some(LogDecay::Vector(g)) => Self::Vector(VectorDecay::new(g)),
        }
    }

    /// `x_i e^{G_i}`, or with `G_{i-1}`.
    pub(super) fn since_start(&self, x: &Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        match self.factors() {
            Some((from_start, _)) => x.clone() * read.rows(from_start, 1.0),
            None => x.clone(),
        }
    }

    /// `x_j e^{G_C - G_j}`.
    pub(super) fn to_end(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        let factors = match self {
            Self::None { .. } => return x.clone(),
            Self::Scalar(decay) => decay.to_end(),
            Self::Vector(decay) => decay.to_end(),
        };
        x.clone() * factors
    }

    /// A state, `[1, N, K, V]`, carried over chunk `c`.
    pub(super) fn carry(&self, state: Tensor<B, 4>, c: usize) -> Tensor<B, 4> {
        match self.factors() {
            Some((_, total)) => state * total.narrow(0, c, 1),
            None => state,
        }
    }

    /// `e^{G_i}`, `[M, N, C, 1 or K]`, and `e^{G_C}`, `[M, N, 1 or K, 1]`.
    fn factors(&self) -> Option<(Tensor<B, 4>, Tensor<B, 4>)> {
        match self {
            Self::None { .. } => None,
            Self::Scalar(decay) => Some((decay.since_start(), decay.total())),
            Self::Vector(decay) => Some((decay.since_start(), decay.total())),
        }
    }

    /// Scores `[M, N, C, C]` of rows x against rows y.
    pub(super) fn scores(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        match self {
            Self::None { .. } => self.masked(x.clone().matmul(y.clone().transpose()), read),
            Self::Scalar(decay) => decay.scores(x, y, read),
            Self::Vector(decay) => decay.scores(x, y, read),
        }
    }

    /// The way back through [`scores`](Self::scores), whose result spares work where it is at hand.
    pub(super) fn scores_backward(
        &self,
        (x, y): (&Tensor<B, 4>, &Tensor<B, 4>),
        scores: Option<&Tensor<B, 4>>,
        d: Tensor<B, 4>,
        read: Read,
    ) -> ScoreGradients<B> {
        match self {
            Self::None { .. } => {
                let d = self.masked(d, read);
                let (d_x, d_y) = (d.clone().matmul(y.clone()), d.transpose().matmul(x.clone()));
                ScoreGradients { x: d_x, y: d_y, within: vec![] }
            }
            Self::Scalar(decay) => decay.scores_backward((x, y), scores, d, read),
            Self::Vector(decay) => decay.scores_backward(x, y, &d, read),
        }
    }

    /// Of scores without decay, those that count.
    fn masked(&self, scores: Tensor<B, 4>, read: Read) -> Tensor<B, 4> {
        match (self, read) {
            (Self::None { causal, .. }, Read::After) => causal.apply(scores),
            (Self::None { strict, .. }, Read::Before) => strict.apply(scores),
            (Self::Scalar(_) | Self::Vector(_), _) => scores,
        }
    }

    /// The sum over the last dimension where one decay is that of all rows.
    pub(super) fn own(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        match self {
            Self::None { .. } | Self::Scalar(_) => x.sum_along(3),
            Self::Vector(_) => x,
        }
    }
}

/// Gradients of a decay's exponents, as they are found; none where there is no decay.
pub(super) struct Exponents<'a, B: Backend> {
    decay: &'a DecayFactors<B>,
    found: Option<ExponentGradients<B>>,
}

impl<'a, B: Backend> Exponents<'a, B> {
    /// Those over whole chunks, of states at their starts and gradients at their ends.
    pub(super) fn new(
        decay: &'a DecayFactors<B>,
        states: &Tensor<B, 4>,
        d_states: &Tensor<B, 4>,
    ) -> Self {
        let factors = decay.factors();
        let found = factors.map(|(from_start, total)| {
            let total = (states.clone() * d_states.clone()).sum_along(3) * total;
            let total = decay.own(total.swap_dims(2, 3)); // of [.., 1, K]
            let zeros = from_start.zeros_like();
            ExponentGradients { within: vec![], from_start: zeros.clone(), to_end: zeros, total }
        });
        Self { decay, found }
    }

    /// Those from the start to rows x, whose gradients by the state are d.
    pub(super) fn add_from_start(&mut self, x: &Tensor<B, 4>, d: &Tensor<B, 4>, read: Read) {
        if let Some(found) = &mut self.found {
            let part = read.factors(self.decay.own(x.clone() * d.clone()));
            found.from_start = found.from_start.clone() + part;
        }
    }

    /// Those from rows x to the end, whose gradients by the state are d.
    pub(super) fn add_to_end(&mut self, x: &Tensor<B, 4>, d: &Tensor<B, 4>) {
        if let Some(found) = &mut self.found {
            let part = self.decay.own(x.clone() * d.clone());
            found.to_end = found.to_end.clone() + part;
        }
    }

    /// Those inside scores.
    pub(super) fn add_within(&mut self, further: Vec<Tensor<B, 4>>) {
        if let Some(found) = &mut self.found {
            found.within = match std::mem::take(&mut found.within) {
                none if none.is_empty() => further,
                sums => sums.into_iter().zip(further).map(|(sum, part)| sum + part).collect(),
            };
        }
    }

    /// Gradient of the log decay, `[M, N, C, 1 or K]`.
    pub(super) fn d_log_decays(self) -> Option<Tensor<B, 4>> {
        let found = self.found?;
        match self.decay {
            DecayFactors::None { .. } => None,
            DecayFactors::Scalar(_) => Some(ScalarDecay::d_log_decays(found)),
            DecayFactors::Vector(decay) => Some(decay.d_log_decays(found)),
        }
    }
}
