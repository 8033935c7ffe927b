//! Makes tables and pictures of a sweep's rows.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::report(linattn_cli::ReportArgs::parse())
}
