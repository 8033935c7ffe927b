//! Sizes, columns and tensors of the packed projection.

use crate::pointwise::Activation;
use cubecl::server::Handle;

/// Widest window that is kept in registers.
pub const UNROLLED: usize = 8;

/// Sizes of the projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, sequences.
    pub batch: usize,
    /// T, tokens of a sequence.
    pub tokens: usize,
    /// W, tokens that a channel of a convolution sees; 1 without weights.
    pub window: usize,
}

/// Heads whose rows are divided by their length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Head {
    /// Columns of a head, from 1 to 256, a divisor of the part's.
    pub width: usize,
    /// Factor of rows of length 1.
    pub factor: f64,
    /// Added to the sum of y^2.
    pub epsilon: f64,
}

/// Treatment of columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Convolution over time, if there are weights; then an activation; then a norm.
    Conv {
        /// Activation of the sum.
        activation: Activation,
        /// Heads to normalise.
        head: Option<Head>,
    },
    /// Nothing.
    Copy,
    /// `scale sigmoid(x)`, f32.
    Beta {
        /// Factor of the sigmoid.
        scale: f64,
    },
    /// `-e^{a_log} softplus(x + dt_bias)`, f32.
    LogDecay {
        /// Numbers of `a_log`, a divisor of the width.
        heads: usize,
    },
}

/// A part of the columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Columns {
    /// How many there are.
    pub width: usize,
    /// Their treatment.
    pub kind: Kind,
}

/// Tensors, contiguous, shaped as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The packed projection.
    pub x: &'a Handle,
    /// Weights of the convolution; without them z is x, plus the bias if there is one.
    pub weight: Option<&'a Handle>,
    /// Bias of the convolution.
    pub bias: Option<&'a Handle>,
    /// Tokens before x, of each sequence; zeros if absent.
    pub conv_state: Option<&'a Handle>,
    /// Logarithms of the decay rates.
    pub a_log: Option<&'a Handle>,
    /// Bias of the step sizes.
    pub dt_bias: Option<&'a Handle>,
    /// N + 1 offsets, from 0 to T: where sequences of lengths of their own begin and end in the one row.
    pub cu_seqlens: Option<&'a [usize]>,
}

/// Tensors of each convolution by itself, as layers and states have them: what a [`step`](super::step) reads in the
/// place of `weight`, `bias` and `conv_state`. There are as many of each as parts of the kind `Conv`, or none.
#[derive(Debug, Clone, Copy)]
pub struct Apart<'a> {
    /// `[W, width]`; at least one.
    pub weights: &'a [&'a Handle],
    /// `[width]`.
    pub biases: &'a [&'a Handle],
    /// `[B, W - 1, width]`; zeros if there are none.
    pub conv_states: &'a [&'a Handle],
}

/// All tensors of a launch.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    inputs: Inputs<'a>,
    /// Of a step.
    pub(super) apart: Option<Apart<'a>>,
}

impl<'a> From<Inputs<'a>> for Tensors<'a> {
    fn from(inputs: Inputs<'a>) -> Self {
        Self { inputs, apart: None }
    }
}

impl<'a> std::ops::Deref for Tensors<'a> {
    type Target = Inputs<'a>;

    fn deref(&self) -> &Inputs<'a> {
        &self.inputs
    }
}

impl<'a> Tensors<'a> {
    /// Of a step: without a convolution's tensors in `inputs`.
    pub(super) fn of_step(inputs: Inputs<'a>, apart: Apart<'a>) -> Self {
        let inputs = Inputs { weight: None, bias: None, conv_state: None, ..inputs };
        Self { inputs, apart: Some(apart) }
    }

    /// Weights: one tensor of all convolutions, or one of each.
    pub(super) fn weights(&self) -> &[&'a Handle] {
        self.apart.map_or(self.weight.as_slice(), |apart| apart.weights)
    }

    /// Biases, likewise.
    pub(super) fn biases(&self) -> &[&'a Handle] {
        self.apart.map_or(self.bias.as_slice(), |apart| apart.biases)
    }

    /// Conv states, likewise.
    pub(super) fn conv_states(&self) -> &[&'a Handle] {
        self.apart.map_or(self.conv_state.as_slice(), |apart| apart.conv_states)
    }

    /// N, or B where every row is a sequence.
    pub(super) fn sequences(&self, dims: Dims) -> usize {
        self.cu_seqlens.map_or(dims.batch, |cu_seqlens| cu_seqlens.len() - 1)
    }
}
