//! The best setting of a group of runs, by the numbers of its replicates.

use std::collections::BTreeMap;

use crate::config::{SelectConfig, Statistic};
use crate::rows::Row;
use crate::values::Settings;
use crate::{Sweep, SweepError};

/// The best setting of a group: of all runs that differ only in what is chosen among and in the
/// replicate.
#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    /// Settings that all runs of the group share.
    pub(crate) group: Settings,
    /// Settings that were chosen; empty if nothing is there.
    pub(crate) choice: Settings,
    /// Its replicates that are done.
    pub(crate) rows: Vec<Row>,
    /// Replicates asked for.
    pub(crate) wanted: usize,
    /// Rows of the group that failed, whatever their setting.
    pub(crate) failed: Vec<Row>,
    /// Settings to choose among.
    pub(crate) offered: usize,
    /// Settings among these that no run has tried yet.
    pub(crate) untried: usize,
}

pub(crate) fn row_of<'a>(rows: &'a [Row], settings: &Settings) -> Option<&'a Row> {
    rows.iter().find(|row| settings.iter().all(|(key, value)| row.text(key) == value))
}

/// The setting that the first replicate of each group is best at, for groups in which each of its
/// settings has a row. `runs` are the settings of all runs, in the plan's order.
pub(crate) fn first_choices(
    sweep: &Sweep,
    runs: &[Settings],
    rows: &[Row],
) -> Result<BTreeMap<Settings, Settings>, SweepError> {
    let config = &sweep.config.select;
    let replicate = |settings: &Settings| {
        let found = settings.iter().find(|(key, _)| config.replicate.as_ref() == Some(key));
        found.map(|(_, value)| value.clone())
    };
    let first = runs.first().and_then(replicate);
    let mut groups: BTreeMap<Settings, Vec<Candidate>> = BTreeMap::new();
    for settings in runs.iter().filter(|settings| replicate(settings) == first) {
        let (group, choice) = split(config, settings);
        Candidate::add(groups.entry(group).or_default(), choice, row_of(rows, settings));
    }
    let whole = |candidate: &Candidate| candidate.rows.len() + candidate.failed.len() == 1;
    groups.retain(|_, candidates| candidates.iter().all(whole));
    let chosen = groups.into_iter().map(|(group, candidates)| {
        let chosen = choose(config, group, candidates)?;
        Ok((chosen.group, chosen.choice))
    });
    chosen.collect()
}

/// Settings that name a run in the report, and those to choose among. The replicate is in neither.
pub(crate) fn split(config: &SelectConfig, settings: &[(String, String)]) -> (Settings, Settings) {
    let replicate = |name: &String| config.replicate.as_ref() == Some(name);
    let settings = settings.iter().filter(|(name, _)| !replicate(name)).cloned();
    let (choice, group) = settings.partition(|(name, _)| config.over.contains(name));
    (group, choice)
}

/// A setting that may be chosen.
pub(crate) struct Candidate {
    choice: Settings,
    rows: Vec<Row>,
    failed: Vec<Row>,
    wanted: usize,
}

impl Candidate {
    pub(crate) fn add(list: &mut Vec<Self>, choice: Settings, row: Option<&Row>) {
        let place = list.iter().position(|known| known.choice == choice).unwrap_or_else(|| {
            list.push(Self { choice, rows: vec![], failed: vec![], wanted: 0 });
            list.len() - 1
        });
        let candidate = &mut list[place];
        candidate.wanted += 1;
        match row {
            Some(row) if row.failed() => candidate.failed.push(row.clone()),
            Some(row) => candidate.rows.push(row.clone()),
            None => {}
        }
    }

    fn tried(&self) -> bool {
        !self.rows.is_empty() || !self.failed.is_empty()
    }

    /// Sort key of the choice. Without a value for every row there is no choice.
    fn sort_key(&self, config: &SelectConfig) -> Result<f64, SweepError> {
        let mut values = vec![];
        for row in &self.rows {
            let metric = format!("{}/{}", config.rule.split(), metric(config, row));
            values.push(row.number(&metric).ok_or_else(|| {
                let got = format!("`{metric}`, which the row of run {} has not", row.id());
                SweepError::value("select.metric", got, "a metric that every row has")
            })?);
        }
        let value = statistic(config.by, config.lowest, &values).unwrap_or(f64::NEG_INFINITY);
        Ok(if config.lowest { -value } else { value })
    }
}

pub(crate) fn choose(
    config: &SelectConfig,
    group: Settings,
    candidates: Vec<Candidate>,
) -> Result<Chosen, SweepError> {
    let wanted = candidates.first().map_or(0, |candidate| candidate.wanted);
    let failed = candidates.iter().flat_map(|candidate| candidate.failed.clone()).collect();
    let offered = candidates.len();
    let alone = offered == 1;
    let untried = candidates.iter().filter(|candidate| !candidate.tried()).count();
    let mut best: Option<(usize, f64, Candidate)> = None;
    for candidate in candidates.into_iter().filter(|candidate| !candidate.rows.is_empty()) {
        let count = candidate.rows.len();
        let key = if alone { 0.0 } else { candidate.sort_key(config)? };
        let better = best.as_ref().is_none_or(|(n, m, _)| count > *n || (count == *n && key > *m));
        if better {
            best = Some((count, key, candidate));
        }
    }
    let (choice, rows) = best.map(|(_, _, best)| (best.choice, best.rows)).unwrap_or_default();
    Ok(Chosen { group, choice, rows, wanted, failed, offered, untried })
}

/// The metric's name without its split.
pub(crate) fn metric(config: &SelectConfig, row: &Row) -> String {
    config.metric.clone().unwrap_or_else(|| row.text("score_name").to_string())
}

impl Chosen {
    /// Its value of a key, axis or label.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        self.group.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A metric of each replicate.
    pub(crate) fn values(
        &self,
        config: &SelectConfig,
        name: Option<&str>,
    ) -> BTreeMap<String, f64> {
        let value = |row: &Row| {
            let name = name.map_or_else(|| format!("test/{}", metric(config, row)), str::to_string);
            let replicate = config.replicate.as_deref().map_or("", |key| row.text(key));
            Some((replicate.to_string(), row.number(&name)?))
        };
        self.rows.iter().filter_map(value).collect()
    }

    /// The mean of a column over its replicates.
    pub(crate) fn mean(&self, column: &str) -> Option<f64> {
        let values: Vec<f64> = self.rows.iter().filter_map(|row| row.number(column)).collect();
        statistic(Statistic::Mean, false, &values)
    }
}

/// One number for several; nothing for none.
pub(crate) fn statistic(which: Statistic, lowest: bool, values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (first, last) = (sorted.first().copied()?, sorted.last().copied()?);
    let n = sorted.len();
    Some(match which {
        Statistic::Mean => sorted.iter().sum::<f64>() / n as f64,
        Statistic::Median => f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
        Statistic::Best => {
            if lowest {
                first
            } else {
                last
            }
        }
    })
}

/// The standard deviation of the values that these were drawn from; nothing for fewer than two.
pub(crate) fn deviation(values: &[f64]) -> Option<f64> {
    let mean = statistic(Statistic::Mean, false, values)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_those_of_a_pocket_calculator() {
        let values = [0.25, 1.0, 0.5, 0.75];
        let of = |which, lowest| statistic(which, lowest, &values).unwrap();
        assert_eq!(of(Statistic::Mean, false), 0.625);
        assert_eq!(of(Statistic::Median, false), 0.625);
        assert_eq!(statistic(Statistic::Median, false, &values[..3]), Some(0.5));
        assert_eq!((of(Statistic::Best, false), of(Statistic::Best, true)), (1.0, 0.25));
        assert!((deviation(&[1.0, 2.0, 3.0, 4.0]).unwrap() - (5.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!((deviation(&[1.0]), statistic(Statistic::Mean, false, &[])), (None, None));
    }
}
