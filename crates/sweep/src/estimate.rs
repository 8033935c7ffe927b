//! How long runs take, from those that were measured.

use std::collections::BTreeMap;

use toml::{Table, Value};

use crate::config::SelectConfig;
use crate::order::{Asked, Only, Order};
use crate::plan::{describe, lookup};
use crate::rows::Row;
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

/// Text of `--dry-run`: every run with its time, and their sum; and, as long as times are
/// unknown, the steps of all of them.
/// # Errors
/// [`SweepError`] where rows have no score to choose by.
pub fn dry_run(
    sweep: &Sweep,
    plan: &Plan,
    rows: &[Row],
    only: &Only,
) -> Result<String, SweepError> {
    let select = &sweep.config.select;
    let estimates = Estimates::new(select, rows);
    let done: BTreeMap<&str, &Row> = rows.iter().map(|row| (row.id(), row)).collect();
    let settings: Vec<_> = plan.runs.iter().map(|run| run.settings.clone()).collect();
    let order = Order::new(sweep, &settings, rows)?;
    let taken = (0..settings.len()).filter(|&i| only.takes(&plan.runs[i]));
    let runs = order.sorted(taken);
    let (mut text, mut sum, mut unknown) = (String::new(), 0.0, 0);
    for &i in &runs {
        let run = &plan.runs[i];
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
        let (id, what) = match order.asked(i) {
            Asked::Later => ("            ", chosen_later(select, run)),
            _ => (run.id.as_str(), run.describe()),
        };
        text.push_str(&format!("{id}  {time:>14}  {what}\n"));
    }
    let unknown = match unknown {
        0 => String::new(),
        runs => format!(" and {runs} whose time is unknown"),
    };
    let left = runs.iter().map(|&i| &plan.runs[i]);
    let left = left.filter(|run| !done.contains_key(run.id.as_str()));
    let (left, steps): (Vec<_>, Vec<_>) = left.map(|run| (run, steps(&run.config))).unzip();
    let steps: u64 = steps.into_iter().flatten().sum();
    let (left, all) = (left.len(), runs.len());
    Ok(text
        + &format!(
            "{left} of {all} runs to do: {}{unknown}; {steps} steps at the most, {} at 5 ms each\n",
            duration(sum),
            duration(0.005 * steps as f64),
        ))
}

/// A run at a setting that is not chosen yet.
fn chosen_later(select: &SelectConfig, run: &PlannedRun) -> String {
    let known = run.settings.iter().filter(|(key, _)| !select.over.contains(key));
    format!(
        "{}, {} as chosen",
        describe(&known.cloned().collect::<Vec<_>>()),
        select.over.join(", ")
    )
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
