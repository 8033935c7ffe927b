//! Makes tables and pictures of a sweep's rows.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::run(linattn_cli::report)
}
