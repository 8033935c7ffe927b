//! Tests a trained model.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::run(linattn_cli::eval)
}
