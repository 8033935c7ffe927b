//! A page that gathers the tables of several folders: ours, with what is published in brackets.

use std::fs;
use std::path::Path;

use super::{Mode, Report};
use crate::report::table::Layout;
use crate::select::select;
use crate::{Sweep, SweepError};

const BEGIN: &str = "<!-- results:begin ";
const END: &str = "<!-- results:end -->";

/// Fills a page anew: what stands between `<!-- results:begin FOLDER -->` and `<!-- results:end -->`
/// becomes the tables of that folder's rows. FOLDER is relative to the page.
/// # Errors
/// [`SweepError`] where a folder has no sweep, or a mark has no end.
pub fn page(file: &Path, mode: Mode) -> Result<Report, SweepError> {
    let text = fs::read_to_string(file).map_err(SweepError::io("read", file))?;
    let broken = |why: String| SweepError::Readme { path: file.into(), why };
    let home = file.parent().unwrap_or(Path::new(""));
    let (mut wanted, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after
            .split_once(" -->")
            .ok_or_else(|| broken(format!("`{BEGIN}` names no folder and has no ` -->`")))?;
        let (_, after) = after
            .split_once(END)
            .filter(|(within, _)| !within.contains(BEGIN))
            .ok_or_else(|| broken(format!("`{BEGIN}{name} -->` has no `{END}` of its own")))?;
        let tables = tables(&home.join(name))?;
        wanted.push_str(&format!("{before}{BEGIN}{name} -->\n{tables}{END}"));
        rest = after;
    }
    wanted.push_str(rest);
    let mut report = Report::default();
    report.write_if_changed(file, &wanted, mode)?;
    Ok(report)
}

/// The tables of a folder, with what to know before reading them.
fn tables(folder: &Path) -> Result<String, SweepError> {
    let sweep = Sweep::read(&folder.join("sweep.toml"))?;
    let rows = sweep.view()?;
    let selection = select(&sweep, &rows.rows)?;
    let layout = Layout::new(&sweep, &selection);
    let done = selection.done.len();
    let runs = format!("{done} of {} runs are done. ", selection.wanted);
    let mut text = format!("{runs}{}\n", super::protocol(&sweep).trim_start_matches("- "));
    for section in &layout.sections {
        text.push_str(&section.beside_published(&sweep));
    }
    Ok(text)
}
