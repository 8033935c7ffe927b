//! From a folder's rows to the tables and pictures of its README.
//!
//! ```text
//! sweep.toml says            ours       beside it
//! scaled_down alone          a label    nothing
//! protocol and scaled_down   a label    published numbers with a label of their own, no difference,
//!                                       and every key in which runs depart, as `departs` has them
//! protocol alone             no label   published numbers and the difference; every run was held
//!                                       to the protocol before it started
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::picture::{Picture, figures};
use crate::report::curves::Curves;
use crate::report::table::Layout;
use crate::rows::{Row, replace};
use crate::select::{Selection, select};
use crate::{Rule, Sweep, SweepError};

pub(crate) mod curves;
mod html;
mod page;
pub(crate) mod table;

pub use html::write_html;
pub use page::page;
#[cfg(test)]
use table::comparable_value;

/// Treatment of a report that differs from the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Write it.
    Write,
    /// Leave it.
    Check,
}

/// Result of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Files that differ from what the rows make, or differed before they were written.
    pub changed: Vec<PathBuf>,
    /// Notes for a person: a broken line, rows of other runs.
    pub notes: Vec<String>,
}

/// The folders below `root` that hold a sweep, by name.
/// # Errors
/// [`SweepError::Io`] where `root` cannot be read.
pub fn experiments(root: &Path) -> Result<Vec<PathBuf>, SweepError> {
    let entries = fs::read_dir(root).map_err(SweepError::io("read", root))?;
    let mut folders: Vec<PathBuf> = vec![];
    for entry in entries {
        let folder = entry.map_err(SweepError::io("read", root))?.path();
        if folder.join("sweep.toml").exists() {
            folders.push(folder);
        }
    }
    folders.sort();
    Ok(folders)
}

/// Makes the tables and pictures of a folder anew from its `sweep.toml`, `rows.csv` and
/// `curves.csv`. Where `runs` is given, learning curves are first copied from the run folders in it
/// to `curves.csv`. Tables go between the marks `<!-- report:begin NAME -->` and `<!-- report:end
/// -->` of the README, NAME being the folder's, or to its end.
/// # Errors
/// [`SweepError`] where the rows are of another protocol than the sweep, or a file is not what it
/// should be.
pub fn report(folder: &Path, mode: Mode, runs: Option<&Path>) -> Result<Report, SweepError> {
    let sweep = Sweep::read(&folder.join("sweep.toml"))?;
    let rows = sweep.view()?;
    let selection = select(&sweep, &rows.rows)?;
    let layout = Layout::new(&sweep, &selection);
    let mut curves = Curves::read(&sweep)?;
    if let Some(runs) = runs {
        curves.collect(&sweep, &selection, runs)?;
    }
    let pictures = figures(&sweep, &selection, &layout, &curves)?;
    let text = text(&sweep, &selection, &layout, &pictures);
    let mut report = Report { notes: rows.repair.into_iter().collect(), ..Report::default() };
    if selection.unmatched > 0 {
        let note =
            format!("{} rows are of runs that sweep.toml does not ask for", selection.unmatched);
        report.notes.push(note);
    }
    report.write_readme_if_changed(&sweep, &text, mode)?;
    report.write_if_changed(&folder.join("curves.csv"), &curves.to_csv(), mode)?;
    for picture in &pictures {
        report.write_picture_if_changed(folder, picture, mode)?;
    }
    Ok(report)
}

impl Report {
    /// Compares a file with what it should be; nothing for an empty file that is not there.
    fn write_if_changed(
        &mut self,
        path: &Path,
        wanted: &str,
        mode: Mode,
    ) -> Result<bool, SweepError> {
        let there = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(SweepError::io("read", path)(e)),
        };
        if there == wanted {
            return Ok(false);
        }
        self.changed.push(path.into());
        if mode == Mode::Write {
            replace(path, wanted.as_bytes())?;
        }
        Ok(true)
    }

    /// The PNG is drawn when its SVG changes or it is not there.
    fn write_picture_if_changed(
        &mut self,
        folder: &Path,
        picture: &Picture,
        mode: Mode,
    ) -> Result<(), SweepError> {
        let svg = folder.join(format!("{}.svg", picture.file));
        let png = svg.with_extension("png");
        let changed = self.write_if_changed(&svg, &picture.drawing.svg(), mode)?;
        let missing = !png.exists();
        if missing {
            self.changed.push(png.clone());
        }
        match (changed || missing) && mode == Mode::Write {
            true => Ok(picture.drawing.write_png(&png)?),
            false => Ok(()),
        }
    }

    fn write_readme_if_changed(
        &mut self,
        sweep: &Sweep,
        text: &str,
        mode: Mode,
    ) -> Result<(), SweepError> {
        let path = sweep.folder.join("README.md");
        let there = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => format!("# {}\n", sweep.name()),
            Err(e) => return Err(SweepError::io("read", &path)(e)),
        };
        let wanted = put_between_marks(&there, &sweep.name(), text)
            .map_err(|why| SweepError::Readme { path: path.clone(), why })?;
        self.write_if_changed(&path, &wanted, mode)?;
        Ok(())
    }
}

const END: &str = "<!-- report:end -->";

/// The README with `text` between the marks, which are added at its end where there are none.
fn put_between_marks(readme: &str, name: &str, text: &str) -> Result<String, String> {
    let begin = format!("<!-- report:begin {name} -->");
    let count = |mark: &str| readme.matches(mark).count();
    let begins = count("<!-- report:begin ");
    match (begins, count(&begin), count(END)) {
        (0, 0, 0) => Ok(format!("{}\n\n{begin}\n{text}{END}\n", readme.trim_end())),
        (1, 1, 1) => {
            let (before, rest) = readme.split_once(&begin).unwrap_or_default();
            match rest.split_once(END) {
                Some((_, after)) => Ok(format!("{before}{begin}\n{text}{END}{after}")),
                None => Err(format!("`{END}` stands before `{begin}`")),
            }
        }
        _ => Err(format!("there has to be one `{begin}` and one `{END}`, or neither")),
    }
}

fn text(sweep: &Sweep, selection: &Selection, layout: &Layout, pictures: &[Picture]) -> String {
    let mut text = facts(sweep, selection);
    for section in &layout.sections {
        text.push_str(&section.markdown(sweep));
    }
    for picture in pictures {
        let (title, file) = (&picture.title, &picture.file);
        text.push_str(&format!("\n![{title}]({file}.svg)\n"));
    }
    let failed = selection.done.iter().filter(|row| row.failed());
    let failed: Vec<String> = failed.map(|row| failure(sweep, row)).collect();
    if !failed.is_empty() {
        text.push_str(&format!("\nFailed:\n{}", failed.concat()));
    }
    text
}

fn failure(sweep: &Sweep, row: &Row) -> String {
    let dimensions = sweep.config.dimensions().unwrap_or_default();
    let names = dimensions.iter().map(|dimension| &dimension.name);
    let settings: Vec<String> = names.map(|name| format!("{name} = {}", row.text(name))).collect();
    format!("- {}: {}\n", settings.join(", "), row.text("error").replace('|', "\\|"))
}

/// Facts to know before reading a number.
fn facts(sweep: &Sweep, selection: &Selection) -> String {
    let Selection { done, wanted, .. } = selection;
    let failed = done.iter().filter(|row| row.failed()).count();
    let mut lines = vec![
        format!("- Runs: {} of {wanted}, {failed} of them failed.", done.len()),
        protocol(sweep),
        choice(sweep),
    ];
    lines.extend(one_rate(sweep));
    lines.extend(departures(sweep));
    lines.extend(published_choice(sweep));
    let fine: Vec<&Row> = done.iter().filter(|row| !row.failed()).collect();
    if !fine.is_empty() {
        lines.push(format!(
            "- Tokens trained on: {} a run. Devices: {}. Commits: {}.",
            range(&fine, "tokens"),
            distinct(&fine, "device"),
            distinct(&fine, "commit"),
        ));
    }
    lines.join("\n") + "\n"
}

fn protocol(sweep: &Sweep) -> String {
    let cut = sweep.config.scaled_down.as_deref().map(|cut| cut.trim_end_matches('.'));
    let published = sweep.config.protocol.as_deref().and_then(crate::published::protocol);
    match (published, cut) {
        (Some(p), None) => format!("- Protocol: {}, in full ({}).", p.title, p.source),
        (Some(p), Some(cut)) => {
            format!("- Protocol: {} ({}), **scaled down**: {cut}.", p.title, p.source)
        }
        (None, cut) => format!(
            "- Protocol: our own, **scaled down**: {}. No published number belongs beside it.",
            cut.unwrap_or_default()
        ),
    }
}

fn choice(sweep: &Sweep) -> String {
    let config = &sweep.config.select;
    let split = config.rule.split();
    let dimensions = sweep.config.dimensions().unwrap_or_default();
    let list = |name: &String| {
        let dimension = dimensions.iter().find(|dimension| dimension.name == *name);
        let values = dimension.into_iter().flat_map(|d| &d.choices);
        let values: Vec<&str> = values.map(|choice| choice.settings[0].1.as_str()).collect();
        format!("`{name}` of {}", values.join(", "))
    };
    let over: Vec<String> = config.over.iter().map(list).collect();
    let chosen = match (over.is_empty(), config.rule) {
        (true, Rule::Honest) => "- Choice: none, every setting is reported.".to_string(),
        (true, Rule::Published) => {
            "- Choice: none, every setting is reported; runs may stop by the **test** sets.".into()
        }
        (_, Rule::Honest) => {
            format!("- Choice: {} on {split}; the test was not looked at.", over.join("; "))
        }
        (_, Rule::Published) => {
            format!("- Choice: {} on the **test** sets, as the papers did.", over.join("; "))
        }
    };
    let replicates = config.replicate.as_ref().map(|name| format!(" Replicates: {}.", list(name)));
    let by = match (over.is_empty(), &replicates) {
        (false, Some(_)) if config.repeat_chosen => {
            " The first of them chooses, the others repeat what it chose.".into()
        }
        (false, Some(_)) => format!(" Replicates count by their {}.", config.by.name()),
        _ => String::new(),
    };
    chosen + &replicates.unwrap_or_else(|| " One run a setting.".into()) + &by
}

fn one_rate(sweep: &Sweep) -> Option<String> {
    let why = sweep.config.one_learning_rate.as_deref()?.trim_end_matches('.');
    Some(format!(
        "- **One learning rate for all mixers**: {why}. What one of them lacks here it may have at a \
         rate of its own."
    ))
}

fn departures(sweep: &Sweep) -> Option<String> {
    let departs = &sweep.config.departs;
    let word = |(key, why): (&String, &toml::Value)| {
        let why = why.as_str().unwrap_or_default().trim_end_matches('.');
        format!("`{key}` ({why})")
    };
    let list: Vec<String> = departs.iter().map(word).collect();
    (!list.is_empty()).then(|| format!("- Departs from the protocol in {}.", list.join("; ")))
}

fn published_choice(sweep: &Sweep) -> Option<String> {
    let protocol = crate::published::protocol(sweep.config.protocol.as_deref()?)?;
    let note = protocol.note.as_ref().map(|note| format!(" {note}")).unwrap_or_default();
    Some(format!("- Published numbers: {}.{note}", protocol.selection))
}

fn range(rows: &[&Row], column: &str) -> String {
    let values: Vec<f64> = rows.iter().filter_map(|row| row.number(column)).collect();
    let (least, most) =
        (values.iter().copied().reduce(f64::min), values.iter().copied().reduce(f64::max));
    match (least, most) {
        (Some(least), Some(most)) if least == most => format!("{least}"),
        (Some(least), Some(most)) => format!("{least} to {most}"),
        _ => "unknown".into(),
    }
}

fn distinct(rows: &[&Row], column: &str) -> String {
    let values: BTreeSet<&str> = rows.iter().map(|row| row.text(column)).collect();
    let name = |text: &str| if text.is_empty() { "unknown".to_string() } else { text.to_string() };
    values.into_iter().map(name).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
