//! Promises that cross crates. One binary: one link, and one file to carry to a GPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

// Generic code that the commands' library has made already is taken from there, of crates that are named.
use linattn_cli as _;

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
mod fine_tuning;
#[cfg(feature = "cpu")]
mod generate;
mod guide;
#[cfg(feature = "cpu")]
mod hostile;
#[cfg(feature = "cpu")]
mod hub_checkpoints;
mod layers_page;
mod newcomer;
#[cfg(feature = "cpu")]
mod paths;
#[cfg(feature = "cpu")]
mod quantized_run;
mod results;
#[cfg(feature = "cpu")]
mod retrieval_errors;
#[cfg(feature = "cpu")]
mod runs;
#[cfg(feature = "cpu")]
#[path = "../crates/linattn/tests/library/support.rs"]
mod support;
#[cfg(feature = "cpu")]
mod untrusted;

#[cfg(feature = "cpu")]
#[path = "../examples/own_project.rs"]
mod own_project;

#[cfg(feature = "cpu")]
#[test]
fn the_example_of_library_use_runs() {
    let _alone = support::alone();
    own_project::main().unwrap();
}
