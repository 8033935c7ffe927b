//! Published numbers, with where they stand and how they were read. All of them are data, in
//! `published.toml`.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::config::{Unit, value_text};
use crate::plan::lookup;
use crate::{PlannedRun, SweepError};

/// Everything in `published.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// How numbers come about.
    pub protocols: Vec<Protocol>,
    /// The numbers.
    pub tables: Vec<PublishedTable>,
}

/// A published way of training and testing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// As a sweep's `protocol` names it.
    pub name: String,
    /// In words.
    pub title: String,
    /// Where it is described.
    pub source: String,
    /// How many seeds, and what the number reported was chosen on.
    pub selection: String,
    /// Resources that it takes, where they are more than a sweep can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_reach: Option<String>,
    /// How many settings its numbers are averaged over, or stand for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<usize>,
    /// Remarks for the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Keys of a run's config that have to stand as they do here; a list names what may stand
    /// there.
    #[serde(default)]
    pub requires: Table,
}

/// Numbers of one source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedTable {
    /// As a sweep's `report.compare` names it.
    pub name: String,
    /// The protocol that they came about by.
    pub protocol: String,
    /// Where they stand.
    pub source: String,
    /// How they were read.
    pub tag: Tag,
    /// Whether they are shares or percent.
    pub unit: Unit,
    /// How far they may be off, in `unit`, where they were read off a picture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// The value of a report's `section` that they belong to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
    /// Remarks for the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Headings, as a report's columns have them.
    #[serde(default)]
    pub columns: Vec<String>,
    /// For each model a number a column; NaN where none was published.
    #[serde(default)]
    pub values: Table,
    /// Spread, as `values`; the note says of what kind.
    #[serde(default)]
    pub spread: Table,
    /// Bytes of state, as `values`.
    #[serde(default)]
    pub state_bytes: Table,
    /// Where there are no columns: for each model pairs of a state's bytes and its number.
    #[serde(default)]
    pub points: Table,
}

/// How a number was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tag {
    /// In the reference code or a results file of its repository.
    Code,
    /// In the paper's text or tables.
    Paper,
    /// Off a figure, within `error`.
    Figure,
    /// In someone else's copy of it.
    Transcription,
}

impl Tag {
    /// In words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Code => "read in code or results file",
            Self::Paper => "read in the paper",
            Self::Figure => "read off a figure",
            Self::Transcription => "a third party's transcription",
        }
    }
}

impl Published {
    /// The protocols and tables that come with this library.
    pub fn embedded() -> &'static Self {
        static ALL: OnceLock<Published> = OnceLock::new();
        ALL.get_or_init(|| {
            toml::from_str(include_str!("../published.toml")).expect("a test reads published.toml")
        })
    }

    /// A protocol by its name.
    pub fn protocol(&self, name: &str) -> Option<&Protocol> {
        self.protocols.iter().find(|protocol| protocol.name == name)
    }

    /// The names of all protocols.
    pub fn names(&self) -> Vec<&str> {
        self.protocols.iter().map(|protocol| protocol.name.as_str()).collect()
    }

    /// The tables that belong beside rows of a protocol: those named, or all.
    pub fn tables_of<'a>(
        &'a self,
        protocol: &'a str,
        named: Option<&'a [String]>,
    ) -> impl Iterator<Item = &'a PublishedTable> {
        let of = self.tables.iter().filter(move |table| table.protocol == protocol);
        of.filter(move |table| named.is_none_or(|names| names.contains(&table.name)))
    }
}

/// A protocol of those embedded.
pub(crate) fn protocol(name: &str) -> Option<&'static Protocol> {
    Published::embedded().protocol(name)
}

impl Protocol {
    /// Refuses a run that departs from the protocol.
    pub(crate) fn check(&self, run: &PlannedRun) -> Result<(), SweepError> {
        for (key, want) in &self.requires {
            let got = lookup(&run.config, key);
            if !got.is_some_and(|got| accepts(want, got)) {
                let got = got.map_or_else(|| "missing".into(), value_text);
                return Err(SweepError::Value {
                    key: key.clone(),
                    got: format!("{got} in the run {}", run.describe()),
                    want: format!(
                        "{} under the protocol `{}`, or `scaled_down` says what was cut",
                        value_text(want),
                        self.name
                    ),
                });
            }
        }
        Ok(())
    }
}

/// Numbers may differ in the third digit: 4.64e-4 and 10^(-10/3) are one learning rate.
fn accepts(want: &Value, got: &Value) -> bool {
    match (want, number(want), number(got)) {
        (Value::Array(list), ..) => list.iter().any(|want| accepts(want, got)),
        (_, Some(want), Some(got)) => (want - got).abs() <= 2e-3 * want.abs(),
        _ => want == got,
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or(value.as_integer().map(|n| n as f64))
}

impl PublishedTable {
    /// The number of a model in a column, in `unit`.
    pub fn value(&self, model: &str, column: &str) -> Option<f64> {
        self.entry(&self.values, model, column)
    }

    /// Its spread.
    pub fn spread(&self, model: &str, column: &str) -> Option<f64> {
        self.entry(&self.spread, model, column)
    }

    fn entry(&self, table: &Table, model: &str, column: &str) -> Option<f64> {
        let place = self.columns.iter().position(|known| known == column)?;
        numbers(table.get(model)?).get(place).copied().filter(|value| value.is_finite())
    }

    /// Pairs of a state's bytes and the model's number, in `unit`.
    pub fn over_state(&self, model: &str) -> Vec<(f64, f64)> {
        let of = |table: &Table| table.get(model).map(numbers).unwrap_or_default();
        let columns = of(&self.state_bytes).into_iter().zip(of(&self.values));
        let points = self.points.get(model).and_then(Value::as_array).into_iter().flatten();
        let points = points.filter_map(|pair| match numbers(pair)[..] {
            [bytes, value] => Some((bytes, value)),
            _ => None,
        });
        columns.chain(points).filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
    }

    /// All its models.
    pub fn models(&self) -> impl Iterator<Item = &String> {
        self.values.keys().chain(self.points.keys())
    }
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().into_iter().flatten().map(|v| number(v).unwrap_or(f64::NAN)).collect()
}

#[cfg(test)]
mod tests;
