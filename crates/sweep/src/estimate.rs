//! How long runs take, from those that were measured.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};
use toml::{Table, Value};

use crate::config::SelectConfig;
use crate::order::{Asked, Only, Order};
use crate::rows::Row;
use crate::values::{describe, lookup};
use crate::{Plan, PlannedRun, Sweep, SweepError};

/// Measured times, by what a run's time depends on: its settings but for the seed and for what the
/// best is chosen among, as a rule the learning rate.
#[derive(Debug, Clone)]
pub struct Estimates {
    left_out: Vec<String>,
    rows: Vec<Row>,
}

impl Estimates {
    /// Takes the times of rows that did not fail.
    pub fn new(select: &SelectConfig, rows: &[Row]) -> Self {
        let left_out = select.over.iter().chain(&select.replicate).cloned().collect();
        let rows = rows.iter().filter(|row| !row.failed()).cloned().collect();
        Self { left_out, rows }
    }

    /// One more row.
    pub(crate) fn add(&mut self, row: &Row) {
        if !row.failed() {
            self.rows.push(row.clone());
        }
    }

    /// Seconds that a run will take, if others of its kind were measured.
    pub fn seconds(&self, run: &PlannedRun) -> Option<f64> {
        let alike = |row: &&Row| {
            let settings = run.settings.iter().filter(|(name, _)| !self.left_out.contains(name));
            settings.into_iter().all(|(name, value)| row.text(name) == value)
        };
        mean(self.rows.iter().filter(alike))
    }

    /// Seconds for all of `runs` one after another. Those of a kind that was never measured are
    /// taken to be as long as the mean of all.
    pub(crate) fn total<'a>(&self, runs: impl Iterator<Item = &'a PlannedRun>) -> Option<f64> {
        let all = mean(self.rows.iter())?;
        Some(runs.map(|run| self.seconds(run).unwrap_or(all)).sum())
    }
}

fn mean<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<f64> {
    let times: Vec<f64> = rows.filter_map(|row| row.number("wall_seconds")).collect();
    (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64)
}

/// Expected cost of a sweep's runs. As text, a line for each run, and their sum.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DryRun {
    /// Every run, in the order in which they are done.
    pub runs: Vec<ExpectedRun>,
    /// Runs without a row.
    pub left: usize,
    /// Seconds of those whose time is known.
    pub seconds: f64,
    /// How many have no time that is known.
    pub unknown: usize,
    /// Optimizer steps of all that are left, at the most.
    pub steps: u64,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpectedRun {
    /// Nothing where its setting is chosen later.
    pub id: Option<String>,
    /// Keys and axes of the sweep, with their values as far as they are chosen.
    #[serde(serialize_with = "as_map")]
    pub settings: Vec<(String, String)>,
    /// Of its row, if it has one.
    pub status: Option<String>,
    /// Of one without a row, if others of its kind were measured.
    pub seconds: Option<f64>,
    #[serde(skip)]
    what: String,
}

fn as_map<S: Serializer>(pairs: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(key, value)| (key, value)))
}

impl fmt::Display for ExpectedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = match (&self.status, self.seconds) {
            (Some(status), _) => status.clone(),
            (None, Some(seconds)) => format!("about {}", duration(seconds)),
            (None, None) => "time unknown".into(),
        };
        writeln!(f, "{:12}  {time:>14}  {}", self.id.as_deref().unwrap_or_default(), self.what)
    }
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runs.iter().try_for_each(|run| run.fmt(f))?;
        let unknown = match self.unknown {
            0 => String::new(),
            runs => format!(" and {runs} whose time is unknown"),
        };
        writeln!(
            f,
            "{} of {} runs to do: {}{unknown}; {} steps at the most, {} at 5 ms each",
            self.left,
            self.runs.len(),
            duration(self.seconds),
            self.steps,
            duration(0.005 * self.steps as f64),
        )
    }
}

/// Looks ahead.
/// # Errors
/// [`SweepError`] where rows have no score to choose by.
pub fn dry_run(
    sweep: &Sweep,
    plan: &Plan,
    rows: &[Row],
    only: &Only,
) -> Result<DryRun, SweepError> {
    let select = &sweep.config.select;
    let estimates = Estimates::new(select, rows);
    let done: BTreeMap<&str, &Row> = rows.iter().map(|row| (row.id(), row)).collect();
    let settings: Vec<_> = plan.runs.iter().map(|run| run.settings.clone()).collect();
    let order = Order::new(sweep, &settings, rows)?;
    let taken = (0..settings.len()).filter(|&i| only.takes(&plan.runs[i]));
    let mut all = DryRun { runs: vec![], left: 0, seconds: 0.0, unknown: 0, steps: 0 };
    for i in order.sorted(taken) {
        let run = &plan.runs[i];
        let status = done.get(run.id.as_str()).map(|row| row.text("status").to_string());
        let seconds = estimates.seconds(run).filter(|_| status.is_none());
        if status.is_none() {
            all.left += 1;
            all.seconds += seconds.unwrap_or(0.0);
            all.unknown += usize::from(seconds.is_none());
            all.steps += steps(&run.config).unwrap_or(0);
        }
        let later = order.asked(i) == Asked::Later;
        let known = |(key, _): &&(String, String)| !later || !select.over.contains(key);
        let settings: Vec<_> = run.settings.iter().filter(known).cloned().collect();
        let what = match later {
            true => format!("{}, {} as chosen", describe(&settings), select.over.join(", ")),
            false => run.describe(),
        };
        let id = (!later).then(|| run.id.clone());
        all.runs.push(ExpectedRun { id, settings, status, seconds, what });
    }
    Ok(all)
}

/// Optimizer steps of a run that does not stop early, if its config says.
fn steps(config: &Table) -> Option<u64> {
    let number = |key: &str| lookup(config, key).and_then(Value::as_integer);
    if let Some(steps) = number("train.steps") {
        return u64::try_from(steps).ok();
    }
    let (_, task) = config.get("task")?.as_table()?.iter().next()?;
    let sets = task.get("train")?.as_array()?;
    let examples = sets.iter().map(|set| set.get("examples").and_then(Value::as_integer));
    let examples = u64::try_from(examples.sum::<Option<i64>>()?).ok()?;
    let batch = u64::try_from(number("train.batch_size")?).ok().filter(|&batch| batch > 0)?;
    Some(u64::try_from(number("train.epochs")?).ok()? * examples.div_ceil(batch))
}

/// 41s, 5m 07s, 2h 30m, 3d 04h.
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m {:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h {minutes:02}m"),
        (days, hours, _) => format!("{days}d {hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_from_steps_or_from_epochs_over_all_sets() {
        let of = |train: &str| {
            let sets = "task.mqar.train = [{ examples = 100 }, { examples = 30 }]";
            steps(&toml::from_str(&format!("{sets}\ntrain = {{ {train} }}")).unwrap())
        };
        assert_eq!(of("steps = 700, batch_size = 8"), Some(700));
        assert_eq!(of("epochs = 3, batch_size = 64"), Some(9), "3 times 130 / 64, rounded up");
        assert_eq!(of("epochs = 3, batch_size = 0"), None);
        assert_eq!(of("batch_size = 8"), None);
    }
}
