//! Shows what a task asks.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::data(linattn_cli::DataArgs::parse())
}
