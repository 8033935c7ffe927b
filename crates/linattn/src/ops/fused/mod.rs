//! The layers around a recurrence, each one operation with a backward pass of its own.
//!
//! A backend that computes an operation in one piece says so by giving a [`Pass`]; where it gives none
//! (other types, sizes or devices), Burn's tensor operations do the same and Burn differentiates them.
//! Weights may be of another type than activations: `train.precision = "bf16"` keeps weights, residual
//! stream, statistics, gates and losses in f32.

mod conv_split;
mod conv_state;
mod cross_entropy;
mod embedding;
mod gated_product;
mod linear;
mod normalize;
mod optimizer;
mod pack;
mod selective_scan;
mod slstm;
#[cfg(all(test, feature = "cpu"))]
mod varlen_tests;

pub(crate) use conv_split::conv_split;
pub use conv_split::{Column, ColumnKind, ConvSplit, HeadNorm};
pub use conv_state::ConvStates;
pub(crate) use conv_state::next_conv_states;
pub use cross_entropy::LinearCrossEntropy;
pub(crate) use cross_entropy::linear_cross_entropy;
pub use embedding::Embedding;
pub(crate) use embedding::{embedding, select_rows};
pub use gated_product::GatedProduct;
pub(crate) use gated_product::{gate, gated_halves};
pub use linear::LinearLayer;
pub(crate) use linear::linear;
#[cfg(feature = "fusion")]
pub(super) use linear::linear_primitive;
pub use normalize::{Measure, Normalization};
pub(crate) use normalize::{add_normalize, l2_normalize, rms_normalize, standardize};
pub use optimizer::{AdamW, AdamWStep, Clip, Moments, adamw_step, global_norm};
pub(super) use optimizer::{norm_in_tensor_ops, step_in_tensor_ops};
pub(crate) use pack::pack;
pub use pack::{MOST_PACKED, Pack};
pub use selective_scan::SelectiveScan;
pub use selective_scan::{SelectiveScanInputs, selective_scan};
pub(crate) use slstm::LOWEST;
pub use slstm::{SlstmCells, SlstmInputs, SlstmRecurrence, slstm};

#[cfg(all(test, feature = "cpu"))]
pub(super) use {
    conv_split::conv_split_in_tensor_ops, cross_entropy::cross_entropy_in_tensor_ops,
    gated_product::gated_in_tensor_ops, normalize::normalize_in_tensor_ops,
    slstm::in_tensor_ops as slstm_in_tensor_ops,
};

/// A gate's or a convolution's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
}

impl Activation {
    pub(super) fn apply<B: burn::tensor::backend::Backend, const D: usize>(
        self,
        z: burn::tensor::Tensor<B, D>,
    ) -> burn::tensor::Tensor<B, D> {
        match self {
            Self::Silu => burn::tensor::activation::silu(z),
            Self::Sigmoid => burn::tensor::activation::sigmoid(z),
        }
    }
}
