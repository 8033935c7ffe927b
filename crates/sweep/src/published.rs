//! Published numbers, with where they stand and how they were read. All of them are data, in
//! `published.toml`.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::config::{Statistic, Unit};
use crate::requirements::number;

/// Everything in `published.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Defaults of keys that a resolved run config leaves out; `*` stands for any part of a key.
    pub absent: Table,
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
    /// Remarks for the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// How many replicates stand behind a number, at the least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicates: Option<usize>,
    /// Keys of a run's config, each with the values that the best was chosen among: every cell of a
    /// table needs a run with each.
    #[serde(default)]
    pub grid: Table,
    /// Keys of every run's config, with what has to stand there: a value, a list of values that may,
    /// `"any"` or `"none"`. A number in a key is a place in a list, `*` is every place and `#` their
    /// number; in `model.layers` repeated layers count one by one.
    #[serde(default)]
    pub requires: Table,
    /// Requirements on some runs besides `requires`, or in its place.
    #[serde(default)]
    pub cells: Vec<Cells>,
    /// The tasks that its numbers are averaged over. Every model of a table needs a run of each, and
    /// has none of another.
    #[serde(default)]
    pub settings: Vec<Table>,
}

/// Runs of a protocol by where they stand in a table and what they are. Runs that fit every list
/// that is not empty have to be as `requires` says; later cells come before earlier ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cells {
    /// Names of lines, as a report has them.
    pub models: Vec<String>,
    /// Headings.
    pub columns: Vec<String>,
    /// Names of a report's sections.
    pub sections: Vec<String>,
    /// Mixers, any of which the model has.
    pub mixers: Vec<String>,
    /// Keys, as in a protocol's `requires`.
    #[serde(rename = "where")]
    pub fits: Table,
    /// As a protocol's.
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
    /// The score, as rows call it without its split; `*` stands for the column. A number stands beside
    /// no other score.
    pub metric: String,
    /// The number that stands for several replicates, where that is known: it stands beside no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statistic: Option<Statistic>,
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

impl PublishedTable {
    /// The number of a model in a column, in `unit`.
    pub fn value(&self, model: &str, column: &str) -> Option<f64> {
        self.entry(&self.values, model, column)
    }

    /// Its spread.
    pub fn spread(&self, model: &str, column: &str) -> Option<f64> {
        self.entry(&self.spread, model, column)
    }

    /// Whether its numbers are of this score; an unknown one is nobody's yet.
    pub(crate) fn measures(&self, metric: Option<&str>, column: &str) -> bool {
        metric.is_none_or(|metric| self.metric.replace('*', column) == metric)
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
