//! The layers around a recurrence, each one launch forward and one or two backward.
//!
//! All arithmetic is f32 whatever the tensors are. Sums over rows go in two stages with a fixed order, and
//! nothing is added by atomics: the same inputs give the same bits. Tensors are contiguous. Gradients of
//! weights are in the type of the weights.

pub mod adamw;
pub mod argmax;
pub mod block_linear;
pub mod column_sums;
pub mod conv_split;
pub mod conv_state;
pub mod cross_entropy;
pub mod diagonal_taps;
pub mod embedding;
pub mod gated_product;
pub mod long_convolution;
pub mod lstm;
pub mod norm;
pub mod pack;
pub mod rotary;
#[cfg(test)]
#[path = "sandbox_tests.rs"]
pub(crate) mod sandbox;
pub mod selective_scan;
pub mod softmax;
pub(crate) mod team;
pub mod ttt_linear;
pub mod ttt_mlp;
