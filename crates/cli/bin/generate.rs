//! Lets a trained model write.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::generate(linattn_cli::GenerateArgs::parse())
}
