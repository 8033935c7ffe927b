//! Trains a model from a TOML file.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::train(linattn_cli::TrainArgs::parse())
}
