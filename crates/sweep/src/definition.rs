//! A sweep as its file has it, and the runs that it asks for.

use crate::dimensions::{Choice, Dimension};
use crate::values::{Settings, describe};
use crate::{SweepConfig, SweepError};
use std::path::PathBuf;
use toml::Table;

/// A sweep's file, with the folder that holds its rows and report.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// Contents of the file.
    pub config: SweepConfig,
    /// The file's folder.
    pub folder: PathBuf,
}

impl Sweep {
    /// The folder's name.
    pub fn name(&self) -> String {
        let folder = self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone());
        folder.file_name().map_or_else(|| "sweep".into(), |name| name.to_string_lossy().into())
    }

    /// Label of the rows about the protocol: its name, and whether it was scaled down. A report refuses rows
    /// with another label.
    pub fn label(&self) -> String {
        match (&self.config.protocol, &self.config.scaled_down) {
            (Some(protocol), None) => protocol.clone(),
            (Some(protocol), Some(_)) => format!("{protocol}, scaled down"),
            (None, _) => "scaled down".into(),
        }
    }

    /// Every combination of the sweep's keys and axes, the last changing first.
    pub(crate) fn combinations(&self) -> Result<Vec<Vec<Choice>>, SweepError> {
        let most = self.config.limits.runs.unwrap_or(usize::MAX);
        let mut list: Vec<Vec<Choice>> = vec![vec![]];
        for Dimension { choices, .. } in self.config.dimensions()? {
            if list.len().saturating_mul(choices.len()) > most {
                let got = format!("{most}, and the grid has more runs");
                return Err(SweepError::value("limits.runs", got, "more, or the grid smaller"));
            }
            let longer = |start: Vec<Choice>| {
                let longer = |choice: &Choice| [start.clone(), vec![choice.clone()]].concat();
                choices.iter().map(longer).collect::<Vec<_>>()
            };
            list = list.into_iter().flat_map(longer).collect();
        }
        Ok(list)
    }

    /// Columns and values of every run.
    pub(crate) fn settings(&self) -> Result<Vec<Vec<(String, String)>>, SweepError> {
        Ok(self.combinations()?.iter().map(|choices| settings(choices)).collect())
    }
}

/// Columns and values of a run that makes these choices.
pub(crate) fn settings(choices: &[Choice]) -> Settings {
    choices.iter().flat_map(|choice| choice.settings.clone()).collect()
}

/// A run that a sweep asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedRun {
    /// Hash of the resolved config without its name; the name of the run and of its folder.
    pub id: String,
    /// Each key or axis of the sweep, with this run's value.
    pub settings: Vec<(String, String)>,
    /// The resolved config.
    pub config: Table,
}

impl PlannedRun {
    /// `mixer = deltanet, seed = 0`.
    pub fn describe(&self) -> String {
        describe(&self.settings)
    }

    /// Its value of a key or axis.
    pub fn setting(&self, name: &str) -> Option<&str> {
        self.settings.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Every run of a sweep, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Hash of the resolved base config.
    pub base: String,
    /// The runs.
    pub runs: Vec<PlannedRun>,
}
