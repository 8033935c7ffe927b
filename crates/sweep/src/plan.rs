//! From a sweep to the list of its runs.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use toml::{Table, Value};

use crate::config::Rule;
use crate::definition::settings;
use crate::departures::departures;
use crate::published::{Protocol, Published, PublishedTable};
use crate::requirements::Departure;
use crate::rows::{Added, Row, Rows, RowsFile};
use crate::values::{describe, lookup, value_text};
use crate::{Plan, PlannedRun, Runner, Sweep, SweepConfig, SweepError};

impl Sweep {
    /// Reads a sweep's file.
    /// # Errors
    /// [`SweepError`] names the file, or the first key that cannot be used.
    pub fn read(file: &Path) -> Result<Self, SweepError> {
        let config = SweepConfig::read(file)?;
        let folder = match file.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let sweep = Self { config, folder };
        sweep.check_protocol(Published::embedded())?;
        Ok(sweep)
    }

    /// The folder's rows. Nothing is changed.
    /// # Errors
    /// [`SweepError::OtherRows`] where they are of another base config or protocol.
    pub fn rows(&self, plan: &Plan) -> Result<Rows, SweepError> {
        let file = RowsFile::new(&self.folder);
        let rows = file.view()?;
        same(&file, &rows, "base", "base config", &plan.base)?;
        same(&file, &rows, "protocol", "protocol", &self.label())?;
        Ok(rows)
    }

    /// Adds rows that another machine wrote for the same sweep, as it does for another shard. Gives
    /// how many were new.
    /// # Errors
    /// [`SweepError::OtherRows`] where they are of another base config or protocol; then none is
    /// added.
    pub fn join(&self, plan: &Plan, other: &Path) -> Result<usize, SweepError> {
        let theirs = RowsFile::at(other);
        let rows = theirs.view()?;
        same(&theirs, &rows, "base", "base config", &plan.base)?;
        same(&theirs, &rows, "protocol", "protocol", &self.label())?;
        let known = self.rows(plan)?.rows;
        let known = |row: &Row| known.iter().any(|other| other.id() == row.id());
        let mut new = 0;
        for row in rows.rows.iter().filter(|row| !(row.failed() && known(row))) {
            let here = RowsFile::new(&self.folder).in_order_of(plan);
            new += usize::from(here.add(row)? == Added::New);
        }
        Ok(new)
    }

    /// The folder's rows, looked at and not changed.
    pub(crate) fn view(&self) -> Result<Rows, SweepError> {
        let file = RowsFile::new(&self.folder);
        let rows = file.view()?;
        same(&file, &rows, "protocol", "protocol", &self.label())?;
        Ok(rows)
    }

    /// Resolves every run.
    /// # Errors
    /// [`SweepError::Resolve`] passes on what the run's own check says, and names the settings;
    /// [`SweepError::Value`] where a run departs from the protocol that the sweep claims to follow.
    pub fn plan(&self, runner: &dyn Runner) -> Result<Plan, SweepError> {
        let base_file = self.folder.join(&self.config.base);
        let resolve = |overrides: &[(String, Value)], settings: &[(String, String)]| {
            runner.resolve(&base_file, overrides).map_err(|why| SweepError::Resolve {
                base: base_file.clone(),
                settings: describe(settings),
                why,
            })
        };
        let base = config_hash(&resolve(&[], &[])?);
        let mut runs: Vec<PlannedRun> = vec![];
        for choices in self.combinations()? {
            let settings = settings(&choices);
            let overrides: Vec<_> =
                choices.into_iter().flat_map(|choice| choice.overrides).collect();
            let config = resolve(&overrides, &settings)?;
            runs.push(PlannedRun { id: config_hash(&config), settings, config });
        }
        check_distinct(&runs)?;
        self.check_runs(&runs)?;
        Ok(Plan { base, runs })
    }

    fn check_protocol(&self, published: &Published) -> Result<(), SweepError> {
        let Some(name) = &self.config.protocol else { return self.check_compare(published) };
        let protocol = published.protocol(name).ok_or_else(|| {
            let want = format!("one of {}", published.names().join(", "));
            SweepError::value("protocol", name, want)
        })?;
        if let (Some(why), None) = (&protocol.out_of_reach, &self.config.scaled_down) {
            let got = format!("{name}, which needs {why}");
            return Err(SweepError::value("protocol", got, "given together with `scaled_down`"));
        }
        self.check_compare(published)
    }

    /// Published numbers stand beside rows of their own protocol and of no other.
    fn check_compare(&self, published: &Published) -> Result<(), SweepError> {
        for name in self.config.report.compare.iter().flatten() {
            let fits =
                |table: &&PublishedTable| Some(&table.protocol) == self.config.protocol.as_ref();
            let tables: Vec<&str> =
                published.tables.iter().filter(fits).map(|table| table.name.as_str()).collect();
            if !tables.contains(&name.as_str()) {
                let want = match tables.is_empty() {
                    true => "left out: no published number belongs beside these rows".to_string(),
                    false => format!("a table of the sweep's protocol: {}", tables.join(", ")),
                };
                return Err(SweepError::value("report.compare", name, want));
            }
        }
        Ok(())
    }

    fn check_runs(&self, runs: &[PlannedRun]) -> Result<(), SweepError> {
        if self.config.select.rule == Rule::Honest {
            runs.iter().try_for_each(check_honest)?;
        }
        let protocol = self.config.protocol.as_deref().and_then(crate::published::protocol);
        let Some(protocol) = protocol else { return Ok(()) };
        let found = departures(self, protocol, runs);
        match self.config.scaled_down {
            None => check_none(protocol, &found),
            Some(_) => self.check_named(protocol, &found),
        }
    }

    /// Every departure is named, and nothing else is.
    fn check_named(
        &self,
        protocol: &Protocol,
        found: &[(Departure, String)],
    ) -> Result<(), SweepError> {
        let named = &self.config.departs;
        let silent = found.iter().filter(|(departure, _)| !named.contains_key(&departure.key));
        let silent: Vec<String> = silent
            .map(|(Departure { key, got, want }, at)| format!("`{key}` ({got}, not {want}, {at})"))
            .collect();
        if !silent.is_empty() {
            let got = format!("without {}", silent.join(", "));
            let want = format!("a word on each key in which runs depart from `{}`", protocol.name);
            return Err(SweepError::value("departs", got, want));
        }
        let departs = |key: &String| found.iter().any(|(departure, _)| departure.key == *key);
        match named.keys().find(|key| !departs(key)) {
            None => Ok(()),
            Some(key) => {
                let want = format!("left out: every run is as `{}` says there", protocol.name);
                Err(SweepError::value("departs", format!("given for `{key}`"), want))
            }
        }
    }
}

fn check_none(protocol: &Protocol, found: &[(Departure, String)]) -> Result<(), SweepError> {
    let Some((Departure { key, got, want }, at)) = found.first() else { return Ok(()) };
    let others: Vec<String> = found[1..].iter().map(|(d, _)| format!("`{}`", d.key)).collect();
    let others = match others.is_empty() {
        true => String::new(),
        false => format!(" (as {} would have to be too)", others.join(", ")),
    };
    let want = format!(
        "{want} under the protocol `{}`{others}, or `scaled_down` and `departs` say what is not",
        protocol.name
    );
    Err(SweepError::value(key, format!("{got} {at}"), want))
}

/// Refuses rows that have something else in a column.
fn same(
    file: &RowsFile,
    rows: &Rows,
    column: &str,
    what: &'static str,
    here: &str,
) -> Result<(), SweepError> {
    match rows.rows.iter().map(|row| row.text(column)).find(|there| *there != here) {
        None => Ok(()),
        Some(there) => Err(SweepError::OtherRows {
            path: file.path().into(),
            what,
            there: there.into(),
            here: here.into(),
        }),
    }
}

/// An honest choice needs sets of its own, and a run that did not stop by the test.
fn check_honest(run: &PlannedRun) -> Result<(), SweepError> {
    let at = run.describe();
    let on = lookup(&run.config, "evaluate.select_on").map(value_text);
    if on.as_deref() != Some("validation") {
        let got = format!("{} in the run {at}", on.as_deref().unwrap_or("missing"));
        let want = "validation, where `select.rule` is honest";
        return Err(SweepError::value("evaluate.select_on", got, want));
    }
    let tasks = run.config.get("task").and_then(Value::as_table).into_iter().flatten();
    for (task, config) in tasks {
        let sets = config.get("validation").and_then(Value::as_array).map_or(0, Vec::len);
        if sets == 0 {
            let got = format!("empty in the run {at}");
            let want = "a list of one set or more, where `select.rule` is honest";
            return Err(SweepError::value(format!("task.{task}.validation"), got, want));
        }
    }
    Ok(())
}

fn check_distinct(runs: &[PlannedRun]) -> Result<(), SweepError> {
    for (i, run) in runs.iter().enumerate() {
        if let Some(same) = runs[..i].iter().find(|other| other.id == run.id) {
            let got = format!("one run twice: {}, and {}", same.describe(), run.describe());
            return Err(SweepError::value("grid", got, "a list of runs that differ"));
        }
    }
    Ok(())
}

/// Twelve digits that stand for a resolved config, whatever the order of its keys. The name is left
/// out: it is where a run is kept and no part of it.
pub(crate) fn config_hash(config: &Table) -> String {
    let mut text = String::new();
    let mut config = config.clone();
    config.remove("name");
    canonical(&Value::Table(config), &mut text);
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Table(table) => {
            let mut keys: Vec<&String> = table.keys().collect();
            keys.sort();
            text.push('{');
            for key in keys {
                text.push_str(&format!("{key:?}="));
                canonical(&table[key], text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Array(list) => {
            text.push('[');
            for value in list {
                canonical(value, text);
                text.push(',');
            }
            text.push(']');
        }
        other => text.push_str(&other.to_string()),
    }
}
