//! Which runs a sweep asks for, and which of them come first.
//! ```text
//! 1  the first replicate: every model at the first setting of `select.over`, then at the next
//! 2  the second replicate, and so on: in the same order; of the chosen setting alone where
//!    `select.repeat_chosen` stands
//! ```
//! So a table is complete early, with one seed, and its spread comes later.

use crate::choose::{first_choices, split};
use crate::rows::Row;
use crate::values::Settings;
use crate::{PlannedRun, Sweep, SweepError};

/// Whether a run is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It is.
    Yes,
    /// It stands for a run at the setting that will be chosen.
    Later,
    /// It repeats a setting that was not chosen.
    No,
}

/// The runs of a sweep by when they are worth doing.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    /// For each run of the plan its replicate and its setting, as places in the grid.
    places: Vec<(usize, usize)>,
    asked: Vec<Asked>,
}

impl Order {
    /// `runs` are the settings of all runs, in the plan's order; `rows` decide what is repeated.
    pub(crate) fn new(sweep: &Sweep, runs: &[Settings], rows: &[Row]) -> Result<Self, SweepError> {
        let config = &sweep.config.select;
        let (mut replicates, mut choices) = (vec![], vec![]);
        let mut places = vec![];
        for settings in runs {
            let replicate = settings.iter().find(|(key, _)| config.replicate.as_ref() == Some(key));
            let (_, choice) = split(config, settings);
            places.push((place(&mut replicates, replicate), place(&mut choices, choice)));
        }
        let first = first_choices(sweep, runs, rows)?;
        let asked = runs.iter().zip(&places).map(|(settings, (replicate, at))| {
            if *replicate == 0 || !config.repeat_chosen {
                return Asked::Yes;
            }
            let (group, choice) = split(config, settings);
            match first.get(&group) {
                Some(chosen) if *chosen == choice => Asked::Yes,
                None if *at == 0 => Asked::Later,
                _ => Asked::No,
            }
        });
        let asked = asked.collect();
        Ok(Self { places, asked })
    }

    /// Whether a run is done.
    pub(crate) fn asked(&self, run: usize) -> Asked {
        self.asked[run]
    }

    /// Whether a run only repeats another.
    pub(crate) fn repeats(&self, run: usize) -> bool {
        self.places[run].0 > 0
    }

    /// Those of `runs` that are asked for, or will be, the first to do first.
    pub(crate) fn sorted(&self, runs: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut runs: Vec<usize> = runs.filter(|&run| self.asked[run] != Asked::No).collect();
        runs.sort_by_key(|&run| (self.places[run], run));
        runs
    }
}

/// Where a value stands among those seen so far.
fn place<T: PartialEq>(seen: &mut Vec<T>, value: T) -> usize {
    seen.iter().position(|known| *known == value).unwrap_or_else(|| {
        seen.push(value);
        seen.len() - 1
    })
}

/// Runs with these values alone: of one key any, of several keys all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Only(Vec<(String, Vec<String>)>);

impl Only {
    /// Reads `KEY=VALUE`, for a key of the grid, an axis or a label.
    /// # Errors
    /// [`SweepError::Value`] lists the keys and values that runs have.
    pub fn new(texts: &[String], runs: &[PlannedRun]) -> Result<Self, SweepError> {
        let mut only: Vec<(String, Vec<String>)> = vec![];
        for text in texts {
            let (key, value) = text.split_once('=').unwrap_or((text, ""));
            let mut values: Vec<&str> = runs.iter().filter_map(|run| run.setting(key)).collect();
            values.sort_unstable();
            values.dedup();
            if !values.contains(&value) {
                let keys = runs.iter().flat_map(|run| &run.settings).map(|(key, _)| key.as_str());
                let mut keys: Vec<&str> = keys.collect();
                keys.sort_unstable();
                keys.dedup();
                let want = match values.is_empty() {
                    true => format!("KEY=VALUE with one of the keys {}", keys.join(", ")),
                    false => format!("{key}= and one of {}", values.join("; ")),
                };
                return Err(SweepError::value("--only", text, want));
            }
            match only.iter_mut().find(|(known, _)| known == key) {
                Some((_, list)) => list.push(value.into()),
                None => only.push((key.into(), vec![value.into()])),
            }
        }
        Ok(Self(only))
    }

    /// Whether a run is one of them.
    pub fn takes(&self, run: &PlannedRun) -> bool {
        let fits = |(key, values): &(String, Vec<String>)| {
            run.setting(key).is_some_and(|value| values.iter().any(|known| known == value))
        };
        self.0.iter().all(fits)
    }
}
