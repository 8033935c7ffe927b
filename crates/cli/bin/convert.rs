//! Brings models of other projects here, and takes ours there.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    linattn_cli::convert(linattn_cli::ConvertArgs::parse())
}
