//! The layers around a recurrence, each one operation with a backward pass of its own.
//!
//! A backend that computes an operation in one piece says so by giving a [`Pass`]; where it gives none
//! (other types, sizes or devices), Burn's tensor operations do the same and Burn differentiates them.
//! Weights may be of another type than activations: `train.precision = "bf16"` keeps weights, residual
//! stream, statistics, gates and losses in f32.

mod block_linear;
mod conv_split;
mod conv_state;
mod cross_entropy;
mod diagonal_taps;
mod embedding;
mod gated_product;
mod inputs;
mod linear;
mod lstm;
mod normalize;
mod optimizer;
mod pack;
mod reshape;
mod rotary;
mod selective_scan;
mod softmax;
mod ttt;

pub(crate) use block_linear::block_linear;
pub(crate) use conv_split::{conv_split, conv_step, convolved_step};
pub(crate) use conv_state::next_conv_states;
pub(crate) use cross_entropy::linear_cross_entropy;
pub(crate) use diagonal_taps::diagonal_taps;
pub(crate) use embedding::{embedding, select_rows};
pub(crate) use gated_product::{activate, gate, gated_halves, log_sigmoid, softplus};
pub use inputs::{
    Activation, Column, ColumnKind, ConvSplit, ConvStates, ConvStep, ConvStepOutputs,
    ConvolvedStep, ConvolvedStepOutputs, DiagonalTaps, Discretization, Embedding, GateActivation,
    GatedProduct, GatedValue, HeadNorm, LinearCrossEntropy, LinearLayer, LongConvolution, LstmCell,
    LstmRecurrence, MOST_PACKED, Measure, Normalization, Pack, Rotary, Seen, SelectiveScan,
    SoftmaxRows, Ttt,
};
pub(crate) use linear::linear;
#[cfg(feature = "fusion")]
pub(super) use linear::linear_primitive;
pub(crate) use lstm::{LOWEST, lstm_cells};
pub use lstm::{LstmCells, LstmInputs, SlstmCells, SlstmInputs, lstm, slstm};
pub(crate) use normalize::{add_normalize, l2_normalize, rms_normalize, standardize};
pub use optimizer::{AdamW, AdamWStep, Clip, Moments};
pub(super) use optimizer::{norm_in_tensor_ops, step_in_tensor_ops};
pub(crate) use pack::pack;
pub(crate) use reshape::reshape;
pub(crate) use rotary::{rotary, turned};
pub use selective_scan::{SelectiveScanInputs, selective_scan};
pub(crate) use softmax::{HIDDEN, by_distance, causal_mask, softmax};
pub(crate) use ttt::{TttInputs, ttt};

#[cfg(all(test, feature = "cpu"))]
pub(super) use {
    block_linear::block_linear_in_tensor_ops, conv_split::conv_split_in_tensor_ops,
    cross_entropy::cross_entropy_in_tensor_ops, gated_product::gated_in_tensor_ops,
    lstm::in_tensor_ops as lstm_in_tensor_ops, normalize::normalize_in_tensor_ops,
    rotary::rotary_in_tensor_ops, softmax::softmax_in_tensor_ops,
};
