//! Does the runs of a grid. Each is a process of this same program, called with `train` and that
//! command's arguments.

use std::process::ExitCode;

fn main() -> ExitCode {
    linattn_cli::device::without_display();
    let mut args: Vec<_> = std::env::args_os().collect();
    match args.get(1).is_some_and(|first| first == "train") {
        true => {
            args.remove(1);
            linattn_cli::run_from(args, linattn_cli::train)
        }
        false => linattn_cli::run_from(args, linattn_cli::sweep),
    }
}
