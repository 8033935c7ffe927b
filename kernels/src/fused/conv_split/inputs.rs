//! Sizes, columns and tensors of the packed projection.

use crate::rowwise::Activation;
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

impl Inputs<'_> {
    /// N, or B where every row is a sequence.
    pub(super) fn sequences(&self, dims: Dims) -> usize {
        self.cu_seqlens.map_or(dims.batch, |cu_seqlens| cu_seqlens.len() - 1)
    }
}
