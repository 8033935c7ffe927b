//! Promises that cross crates. One binary: one link, and one file to carry to a GPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

#[cfg(feature = "cpu")]
mod adapters;
mod call;
#[cfg(feature = "cpu")]
mod campaign;
#[cfg(feature = "cpu")]
mod chat;
#[cfg(feature = "cpu")]
mod checkpoints;
#[cfg(feature = "cpu")]
mod commands;
#[cfg(feature = "cpu")]
mod configs;
#[cfg(feature = "cpu")]
mod desk;
#[cfg(feature = "cpu")]
mod features;
#[cfg(feature = "cpu")]
mod fine_tuning;
mod fixtures;
#[cfg(feature = "cpu")]
mod formulas;
#[cfg(all(feature = "fusion", feature = "wgpu", feature = "cpu"))]
mod fused;
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
mod fused_ops;
mod generation;
mod guide;
#[cfg(feature = "cpu")]
mod hostile;
#[cfg(feature = "cpu")]
mod hub_checkpoints;
#[cfg(feature = "cpu")]
mod initialization;
#[cfg(feature = "cpu")]
mod inner_learning;
#[cfg(feature = "cpu")]
mod layer_fixtures;
#[cfg(feature = "cpu")]
mod layers;
mod layers_page;
#[cfg(feature = "cpu")]
mod long_convolutions;
#[cfg(all(feature = "cpu", any(feature = "wgpu", feature = "cuda")))]
mod mixers_on_gpus;
mod newcomer;
#[cfg(feature = "cpu")]
mod omega_formulas;
#[cfg(feature = "cpu")]
mod one_regression;
mod ops;
#[cfg(feature = "cpu")]
mod parameters;
#[cfg(feature = "cpu")]
mod paths;
#[cfg(feature = "cpu")]
mod precision;
mod quantized;
#[cfg(feature = "cpu")]
mod recent_formulas;
#[cfg(feature = "cpu")]
mod recomputation;
mod results;
#[cfg(feature = "cpu")]
mod retrieval_errors;
#[cfg(feature = "cpu")]
mod runs;
#[cfg(feature = "cpu")]
mod softmax_formulas;
mod support;
#[cfg(feature = "cpu")]
mod tensor_operations;
#[cfg(feature = "cpu")]
mod untrusted;
#[cfg(feature = "cpu")]
mod variant_formulas;
#[cfg(feature = "cpu")]
mod variants;
#[cfg(feature = "cpu")]
mod varlen;
#[cfg(feature = "cpu")]
mod varlen_layers;

#[cfg(feature = "cpu")]
#[path = "../examples/own_project.rs"]
mod own_project;

#[cfg(feature = "cpu")]
#[test]
fn the_example_of_library_use_runs() {
    let _alone = support::alone();
    own_project::main().unwrap();
}
