//! Trains a model from a TOML file.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::run(linattn_cli::train)
}
