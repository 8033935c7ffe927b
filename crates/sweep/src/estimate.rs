//! How long runs take, from those that were measured.

use std::collections::BTreeMap;

use crate::config::SelectConfig;
use crate::rows::Row;
use crate::{Plan, PlannedRun};

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

/// Text of `--dry-run`: every run with its time, and their sum.
pub fn dry_run(plan: &Plan, rows: &[Row], select: &SelectConfig) -> String {
    let estimates = Estimates::new(select, rows);
    let done: BTreeMap<&str, &Row> = rows.iter().map(|row| (row.id(), row)).collect();
    let (mut text, mut sum, mut unknown) = (String::new(), 0.0, 0);
    for run in &plan.runs {
        let time = match (done.get(run.id.as_str()), estimates.seconds(run)) {
            (Some(row), _) => row.text("status").to_string(),
            (None, Some(seconds)) => {
                sum += seconds;
                format!("about {}", duration(seconds))
            }
            (None, None) => {
                unknown += 1;
                "time unknown".into()
            }
        };
        text.push_str(&format!("{}  {time:>14}  {}\n", run.id, run.describe()));
    }
    let unknown = match unknown {
        0 => String::new(),
        runs => format!(" and {runs} whose time is unknown"),
    };
    let left = plan.runs.iter().filter(|run| !done.contains_key(run.id.as_str())).count();
    text + &format!("{left} of {} runs to do: {}{unknown}\n", plan.runs.len(), duration(sum))
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
