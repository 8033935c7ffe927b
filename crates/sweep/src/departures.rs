//! Where the runs of a sweep depart from the protocol that it names.

use std::collections::BTreeSet;

use toml::{Table, Value};

use crate::choose::split;
use crate::published::{Cells, Protocol, Published};
use crate::requirements::{Departure, View, same};
use crate::values::{Settings, describe, lookup, value_text};
use crate::{PlannedRun, Sweep};

/// The key of a departure in the number of replicates.
const REPLICATES: &str = "replicates";

/// The key of a departure in the tasks that a number is averaged over.
const SETTINGS: &str = "settings";

/// Every key in which a run departs, once, with the first run that does.
pub(crate) fn departures(
    sweep: &Sweep,
    protocol: &Protocol,
    runs: &[PlannedRun],
) -> Vec<(Departure, String)> {
    let mut found: Vec<(Departure, String)> = vec![];
    let mut add = |departure: Departure, at: String| {
        if found.iter().all(|(known, _)| known.key != departure.key) {
            found.push((departure, at));
        }
    };
    for run in runs {
        let place = Place::new(sweep, run);
        for departure in of_run(protocol, run, &place) {
            add(departure, format!("in the run {}", run.describe()));
        }
    }
    for (group, runs) in by_group(sweep, runs) {
        let at = describe(&group);
        for departure in of_group(sweep, protocol, &runs) {
            add(departure, format!("at {at}"));
        }
    }
    for (departure, line) in of_lines(sweep, protocol, runs) {
        add(departure, format!("for {line}"));
    }
    found
}

/// Where a run stands in its report.
struct Place {
    line: String,
    column: Option<String>,
    section: Option<String>,
}

impl Place {
    fn new(sweep: &Sweep, run: &PlannedRun) -> Self {
        let report = &sweep.config.report;
        let (group, _) = split(&sweep.config.select, &run.settings);
        let called = |key: &Option<String>| {
            let value = key.as_ref().and_then(|key| run.setting(key))?;
            Some(report.called(value).to_string())
        };
        Self {
            line: report.line_name(&group),
            column: called(&report.columns),
            section: called(&report.section),
        }
    }
}

impl Cells {
    fn hold(&self, view: &View, place: &Place) -> bool {
        let among = |list: &[String], name: Option<&String>| {
            list.is_empty() || name.is_some_and(|name| list.contains(name))
        };
        among(&self.models, Some(&place.line))
            && among(&self.columns, place.column.as_ref())
            && among(&self.sections, place.section.as_ref())
            && (self.mixers.is_empty() || view.mixers().iter().any(|m| self.mixers.contains(m)))
            && view.fits(&self.fits)
    }
}

fn of_run(protocol: &Protocol, run: &PlannedRun, place: &Place) -> Vec<Departure> {
    let view = View::new(&run.config, &Published::embedded().absent);
    let mut wanted = protocol.requires.clone();
    wanted.extend(protocol.grid.clone());
    for cells in protocol.cells.iter().filter(|cells| cells.hold(&view, place)) {
        wanted.extend(cells.requires.clone());
    }
    let mut found: Vec<_> =
        wanted.iter().filter_map(|(key, want)| view.departure(key, want)).collect();
    if !protocol.settings.is_empty() && setting(protocol, run).is_none() {
        found.push(Departure {
            key: SETTINGS.into(),
            got: run.config.get("task").map_or_else(|| "no task".into(), value_text),
            want: format!("one of its {}", protocol.settings.len()),
        });
    }
    found
}

/// Which of the protocol's settings a run's task is; its validation sets are its own affair.
fn setting(protocol: &Protocol, run: &PlannedRun) -> Option<usize> {
    let mut task: Table = run.config.get("task")?.as_table()?.clone();
    for config in task.iter_mut().filter_map(|(_, config)| config.as_table_mut()) {
        config.remove("validation");
    }
    let task = Value::Table(task);
    protocol.settings.iter().position(|setting| same(&Value::Table(setting.clone()), &task))
}

/// Runs that differ only in the replicate and in what is chosen among.
fn by_group<'a>(sweep: &Sweep, runs: &'a [PlannedRun]) -> Vec<(Settings, Vec<&'a PlannedRun>)> {
    let mut groups: Vec<(Settings, Vec<&PlannedRun>)> = vec![];
    for run in runs {
        let (group, _) = split(&sweep.config.select, &run.settings);
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, runs)) => runs.push(run),
            None => groups.push((group, vec![run])),
        }
    }
    groups
}

fn of_group(sweep: &Sweep, protocol: &Protocol, runs: &[&PlannedRun]) -> Vec<Departure> {
    let mut found = vec![];
    for (key, wanted) in &protocol.grid {
        let values: Vec<&Value> = runs.iter().filter_map(|run| lookup(&run.config, key)).collect();
        let missing = wanted.as_array().into_iter().flatten();
        let mut missing = missing.filter(|want| !values.iter().any(|value| same(want, value)));
        if let Some(value) = missing.next() {
            found.push(Departure {
                key: key.clone(),
                got: format!("never {}", value_text(value)),
                want: format!("each of {}", value_text(wanted)),
            });
        }
    }
    let select = &sweep.config.select;
    if select.repeat_chosen && protocol.replicates.unwrap_or(1) > 1 {
        found.push(Departure {
            key: "select.repeat_chosen".into(),
            got: "true".into(),
            want: "left out: all replicates choose".into(),
        });
    }
    let replicate = select.replicate.as_deref();
    let replicates: BTreeSet<_> =
        runs.iter().map(|run| replicate.and_then(|key| run.setting(key))).collect();
    let wanted = protocol.replicates.unwrap_or(1);
    if replicates.len() < wanted {
        found.push(Departure {
            key: REPLICATES.into(),
            got: replicates.len().to_string(),
            want: wanted.to_string(),
        });
    }
    found
}

/// Lines without a run of some setting.
fn of_lines(sweep: &Sweep, protocol: &Protocol, runs: &[PlannedRun]) -> Vec<(Departure, String)> {
    if protocol.settings.is_empty() {
        return vec![];
    }
    let mut lines: Vec<(String, BTreeSet<usize>)> = vec![];
    for run in runs {
        let Place { line, .. } = Place::new(sweep, run);
        let setting = setting(protocol, run);
        match lines.iter_mut().find(|(known, _)| *known == line) {
            Some((_, settings)) => settings.extend(setting),
            None => lines.push((line, setting.into_iter().collect())),
        }
    }
    let all = protocol.settings.len();
    let short = lines.into_iter().filter(|(_, settings)| settings.len() < all);
    let departure = |(line, settings): (String, BTreeSet<usize>)| {
        let got = format!("{} of {all}", settings.len());
        (Departure { key: SETTINGS.into(), got, want: format!("all {all}") }, line)
    };
    short.map(departure).collect()
}

#[cfg(test)]
mod tests;
