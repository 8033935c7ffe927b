//! Retrieval error over the number of writes: Hebb's rule and the delta rule, with random keys and with keys at right
//! angles to each other. Rows and a picture, on the CPU.
//!
//! `cargo run --release --example one_regression -- experiments/one_regression`

mod picture;
mod retrieval;

use retrieval::{ALL, KEY, SEEDS, VALUE};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let done = match arguments.as_slice() {
        [folder] => run(&PathBuf::from(folder)),
        _ => Err("one argument is wanted: the folder that rows.csv and error.svg go to".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

fn run(folder: &Path) -> Result<(), Box<dyn Error>> {
    let rows = retrieval::rows()?;
    let path = folder.join("rows.csv");
    std::fs::write(&path, retrieval::csv(&rows))
        .map_err(|e| format!("can't write {}: {e}", path.display()))?;
    let lines = ALL.map(|(rule, keys)| {
        let of = rows.iter().filter(|row| (row.rule, row.keys) == (rule, keys));
        let points = of.map(|row| (row.writes as f64, row.error[0])).collect();
        (format!("{rule}, {keys} keys"), points)
    });
    let label = format!(
        "a memory of {KEY} x {VALUE}, {SEEDS} seeds; orthogonal keys get new values after {KEY} writes"
    );
    picture::picture(lines.into(), label).write_svg(&folder.join("error.svg"))?;
    Ok(())
}
