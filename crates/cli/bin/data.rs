//! Shows what a task asks.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::run(linattn_cli::data)
}
