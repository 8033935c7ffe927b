//! Tests a trained model.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::eval(linattn_cli::EvalArgs::parse())
}
