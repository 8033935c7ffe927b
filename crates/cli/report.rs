//! `report`: a sweep's rows as tables and pictures.

use crate::{BAD_INPUT, FAILED, fail, output};
use linattn_sweep::{
    Mode, Report, RowsFile, Sweep, SweepError, page as make_page, report as make_report,
    write_events, write_html,
};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Makes tables and pictures of a sweep's rows, beside published numbers, and puts them into its
/// folder's README.md.
#[derive(Debug, clap::Parser)]
#[command(name = "report", version)]
pub struct ReportArgs {
    /// Folders with a sweep.toml and its rows
    #[arg(required_unless_present = "page")]
    folders: Vec<PathBuf>,
    /// A page that gathers the tables of several folders, as docs/results.md does; it is made last
    #[arg(long, value_name = "PAGE.MD")]
    page: Option<PathBuf>,
    /// Also writes this one HTML page, with the READMEs of the folders, their pictures, and `--page`
    #[arg(long, value_name = "FILE.HTML", conflicts_with = "check")]
    html: Option<PathBuf>,
    /// Writes nothing, and fails where anything would change
    #[arg(long)]
    check: bool,
    /// Folder with the sweeps' runs, where they are still there: learning curves are taken from it
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
    /// Also writes TensorBoard's event files into the runs' folders
    #[arg(long)]
    tensorboard: bool,
}

/// Runs the command and gives its exit code: 0 done, 1 `--check` found a change, 2 bad input.
pub fn report(args: ReportArgs) -> ExitCode {
    let mut said = String::new();
    let changed = match all(&args, &mut said) {
        Ok(changed) => changed,
        Err(e) => {
            let _the_error_counts = output::write(&said);
            return fail(BAD_INPUT, &e);
        }
    };
    let code = output::show(&said);
    match changed && args.check {
        true => ExitCode::from(FAILED),
        false => code,
    }
}

/// Makes all that is asked for, adds to `said` what was made, and gives whether anything changed.
fn all(args: &ReportArgs, said: &mut String) -> Result<bool, SweepError> {
    let mut changed = false;
    for folder in &args.folders {
        let report = one(args, folder)?;
        said.push_str(&summary(args, folder, &report));
        changed |= !report.changed.is_empty();
    }
    if let Some(page) = &args.page {
        let report = make_page(page, if args.check { Mode::Check } else { Mode::Write })?;
        said.push_str(&summary(args, page, &report));
        changed |= !report.changed.is_empty();
    }
    if let Some(to) = &args.html {
        let readmes = args.folders.iter().map(|folder| folder.join("README.md"));
        let sources: Vec<PathBuf> = readmes.chain(args.page.clone()).collect();
        write_html(&sources, to)?;
        said.push_str(&format!("wrote {}\n", to.display()));
    }
    Ok(changed)
}

fn one(args: &ReportArgs, folder: &Path) -> Result<Report, SweepError> {
    let sweep = Sweep::read(&folder.join("sweep.toml"))?;
    let runs = args.runs.join(sweep.name());
    if args.tensorboard {
        for row in RowsFile::new(folder).view()?.rows {
            let run = runs.join(row.id());
            if run.join("metrics.jsonl").exists() {
                write_events(&run)?;
            }
        }
    }
    match args.check {
        true => make_report(folder, Mode::Check, None),
        false => make_report(folder, Mode::Write, Some(&runs)),
    }
}

/// The files that changed, or would.
fn summary(args: &ReportArgs, folder: &Path, report: &Report) -> String {
    for note in &report.notes {
        output::note(note);
    }
    let verb = if args.check { "would change" } else { "wrote" };
    let changed = report.changed.iter().map(|path| format!("{verb} {}\n", path.display()));
    match report.changed.is_empty() {
        true => format!("{} says what its rows say\n", folder.display()),
        false => changed.collect(),
    }
}
