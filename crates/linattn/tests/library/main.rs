//! Promises of the library. One binary: one link, and one file to carry to a GPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed
#![allow(clippy::disallowed_methods)] // no test learns beside another: see `support::alone`

// Generic code that the commands' library has made already is taken from there, of crates that are named.
use linattn_cli as _;

#[cfg(feature = "cpu")]
mod adapters;
#[cfg(all(feature = "cpu", feature = "wgpu", not(feature = "fusion")))]
mod block_linear;
mod call;
#[cfg(feature = "cpu")]
mod features;
mod fixtures;
#[cfg(feature = "cpu")]
mod formulas;
#[cfg(all(feature = "fusion", feature = "wgpu", feature = "cpu"))]
mod fused;
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
mod fused_ops;
#[cfg(feature = "cpu")]
mod generation;
#[cfg(feature = "cpu")]
mod initialization;
#[cfg(feature = "cpu")]
mod inner_learning;
#[cfg(feature = "cpu")]
mod layer_fixtures;
#[cfg(feature = "cpu")]
mod layers;
#[cfg(feature = "cpu")]
mod long_convolutions;
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
mod mixers_on_gpus;
#[cfg(feature = "cpu")]
mod omega_formulas;
#[cfg(feature = "cpu")]
mod one_regression;
mod ops;
#[cfg(feature = "cpu")]
mod parameters;
#[cfg(feature = "cpu")]
mod precision;
#[cfg(feature = "cpu")]
mod quantized;
#[cfg(feature = "cpu")]
mod recent_formulas;
#[cfg(feature = "cpu")]
mod recomputation;
#[cfg(feature = "cpu")]
mod softmax_formulas;
mod support;
#[cfg(feature = "cpu")]
mod tensor_operations;
#[cfg(feature = "cpu")]
mod variant_formulas;
#[cfg(feature = "cpu")]
mod variants;
#[cfg(feature = "cpu")]
mod varlen;
#[cfg(feature = "cpu")]
mod varlen_convolutions;
#[cfg(feature = "cpu")]
mod varlen_layers;
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
mod weights;
