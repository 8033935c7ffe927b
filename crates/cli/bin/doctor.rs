//! Says what this computer's devices can run, and how fast.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::run(linattn_cli::doctor)
}
