//! A sweep as TOML spells it.
//!
//! ```toml
//! base = "../../configs/mqar/deltanet.toml"
//! protocol = "mqar_mix"
//! scaled_down = "2 epochs in place of 32"
//!
//! [grid]
//! optimizer.learning_rate = [1e-3, 3.16e-3]
//! seed = [0, 1, 2]
//!
//! [[variants]]
//! axis = "mixer"
//! name = "deltanet"
//! set = { "model.layers.1.mixer" = { deltanet = { heads = 2 } } }
//!
//! [select]
//! rule = "honest"
//! over = ["optimizer.learning_rate"]
//! replicate = "seed"
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::SweepError;
use crate::dimensions::{Choice, Dimension, check_conflicts, check_names, flatten, known};
use crate::values::{lookup, value_text};

/// A grid of runs around one config, and what is made of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepConfig {
    /// The run config that all runs share, relative to the sweep's file.
    pub base: PathBuf,
    /// The published protocol that is followed, by its name in `published.toml`. With `scaled_down`
    /// it says what was scaled down. Either this or `scaled_down`, or both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Cuts from the published protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaled_down: Option<String>,
    /// Keys in which runs depart from the protocol, each with why; with both keys above. A sweep that
    /// departs in another, or not in one of these, is refused.
    #[serde(default)]
    pub departs: Table,
    /// Why mixers are compared at one learning rate for all, where they are. Such a comparison says
    /// so, or it is refused: what one mixer lacks there it may have at a rate of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_learning_rate: Option<String>,
    /// Keys of the run config, each with a list of values; every combination is a run.
    #[serde(default)]
    pub grid: Table,
    /// Groups of keys that are set together; those of `variants_from` too, once it was read.
    #[serde(default)]
    pub variants: Vec<Variant>,
    /// A folder whose run configs are variants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variants_from: Option<VariantsFrom>,
    /// Which runs are reported.
    pub select: SelectConfig,
    /// When to stop.
    #[serde(default)]
    pub limits: Limits,
    /// Tables and pictures of the rows.
    #[serde(default)]
    pub report: ReportConfig,
}

/// A named group of keys that are set together, for instance a mixer with settings of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Variants of one axis are alternatives; axes multiply. The axis is a column of the rows.
    #[serde(default = "default_axis")]
    pub axis: String,
    /// The variant's value in that column.
    pub name: String,
    /// More columns that follow from the variant, for instance `task = "ICR"` for one of its
    /// settings.
    #[serde(default)]
    pub labels: Table,
    /// Keys of the run config by dotted path, in quotes. A table takes the place of the whole
    /// table.
    pub set: Table,
}

fn default_axis() -> String {
    "variant".into()
}

/// Variants that are files: every run config of a folder, named as its file is. Where it differs from
/// the base it takes the place of the base's tables and keys, its name aside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VariantsFrom {
    /// The folder, relative to the sweep's file. What lies in folders of its own there is left out.
    pub folder: PathBuf,
    /// As a variant's.
    #[serde(default = "default_axis")]
    pub axis: String,
    /// The keys at the top of each config that are taken from it, all others being the base's; by
    /// default all.
    #[serde(default)]
    pub keys: Vec<String>,
}

impl VariantsFrom {
    /// The variants, sorted by name; `home` is the folder of the sweep's file, `base` its base.
    fn read(&self, home: &Path, base: &Path) -> Result<Vec<Variant>, SweepError> {
        let folder = home.join(&self.folder);
        let entries = fs::read_dir(&folder).map_err(SweepError::io("read", &folder))?;
        let mut files = vec![];
        for entry in entries {
            let path = entry.map_err(SweepError::io("read", &folder))?.path();
            if path.is_file() && path.extension().is_some_and(|ending| ending == "toml") {
                files.push(path);
            }
        }
        if files.is_empty() {
            let want = "a folder with run configs, `.toml`";
            return Err(SweepError::value("variants_from.folder", folder.display(), want));
        }
        files.sort();
        let base: Table = read_toml(&home.join(base), "run config")?;
        files.iter().map(|file| self.variant(file, &base)).collect()
    }

    fn variant(&self, file: &Path, base: &Table) -> Result<Variant, SweepError> {
        let mut set: Table = read_toml(file, "run config")?;
        if let Some(key) = self.keys.iter().find(|key| !set.contains_key(*key)) {
            let want = "a list of keys that every config of the folder has at its top";
            let got = format!("{key}, which {} has not", file.display());
            return Err(SweepError::value("variants_from.keys", got, want));
        }
        if let Some(key) = base.keys().find(|key| *key != "name" && !set.contains_key(*key)) {
            let got = format!("{}, which has no `{key}`", file.display());
            let want = "a folder of configs with every key that the base has at its top";
            return Err(SweepError::value("variants_from.folder", got, want));
        }
        let taken = |key: &str| self.keys.is_empty() || self.keys.iter().any(|known| known == key);
        set.retain(|key, value| key != "name" && taken(key) && base.get(key) != Some(&*value));
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into();
        Ok(Variant { axis: self.axis.clone(), name, labels: Table::new(), set })
    }
}

/// Which runs are reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectConfig {
    /// Split that the choice is made on.
    pub rule: Rule,
    /// Keys of the grid, or axes, among whose values the best is chosen.
    #[serde(default)]
    pub over: Vec<String>,
    /// The key whose values only repeat a run, as a rule `seed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicate: Option<String>,
    /// Whether the choice is made on the first replicate, and the others repeat the chosen setting
    /// alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeat_chosen: bool,
    /// How replicates are seen as one when choosing.
    #[serde(default)]
    pub by: Statistic,
    /// The metric without its split; by default the task's headline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// Whether less is better.
    #[serde(default)]
    pub lowest: bool,
}

/// Split that the best setting is chosen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// The test sets, as the papers did: the number reported is a little too good.
    Published,
    /// The validation sets; the test is then read once.
    Honest,
}

impl Rule {
    /// The split it looks at, as metrics are named.
    pub fn split(self) -> &'static str {
        match self {
            Self::Published => "test",
            Self::Honest => "validation",
        }
    }
}

/// One number for several replicates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// Their mean.
    #[default]
    Mean,
    /// Their median; of an even number, the mean of the middle two.
    Median,
    /// The best of them.
    Best,
}

impl Statistic {
    /// As a table's heading has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Median => "median",
            Self::Best => "best",
        }
    }
}

/// When to stop.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// No run starts later than this after the command did; those that run are finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_minutes: Option<f64>,
    /// A grid of more runs is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs: Option<usize>,
}

/// Tables and pictures of the rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReportConfig {
    /// The key or axis whose values are the table's columns; all others make its lines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<String>,
    /// In place of `columns`: headings, and for each the metric of a run that stands below it.
    pub metrics: Table,
    /// The key or axis that gets a table for each of its values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
    /// Keys or axes that are averaged over after the choice, as MAD does over its settings.
    pub average: Vec<String>,
    /// Adds a column with the mean of the others.
    pub mean: bool,
    /// The number that stands for several replicates, beside their spread.
    pub statistic: Statistic,
    /// Whether scores are shown as shares or in percent.
    pub unit: Unit,
    /// Tables of `published.toml` to put beside; by default all of the protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Vec<String>>,
    /// Lines by their score in the first column, the best first; as the sweep has them if not.
    pub sort: bool,
    /// Numbers of the rows that get a column too, the mean over replicates: `steps`, `tokens`,
    /// `tokens_per_second`, `wall_seconds`.
    pub also: Vec<String>,
    /// Names of the values of keys and axes, for people: `deltanet = "DeltaNet"`.
    pub names: Table,
    /// Pictures.
    pub figures: Vec<Figure>,
}

/// Numbers of the rows that a table can show beside the score, with their headings.
pub(crate) const ALSO: [(&str, &str); 4] = [
    ("steps", "steps"),
    ("tokens", "tokens"),
    ("tokens_per_second", "tokens/s"),
    ("wall_seconds", "seconds"),
];

/// How a score is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// 0.988.
    #[default]
    Fraction,
    /// 98.8.
    Percent,
}

/// A picture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Kind of picture.
    pub kind: FigureKind,
    /// The file's name without its ending; by default the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The first line; by default what the kind says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// For `over_length` a metric with one `*` for the length, `test/sequence_accuracy_*`; for
    /// `heat_map` one with two, for the length and then the depth, `test/*/exact_depth_*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
}

/// Kind of picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureKind {
    /// The score over steps, a line for every setting that was chosen.
    LearningCurves,
    /// The score over the bytes of a sequence's state.
    OverState,
    /// The score in every column, side by side.
    Bars,
    /// A score over the length it was measured at.
    OverLength,
    /// A score over length and depth.
    HeatMap,
}

impl FigureKind {
    /// The name that TOML has.
    pub fn name(self) -> &'static str {
        match self {
            Self::LearningCurves => "learning_curves",
            Self::OverState => "over_state",
            Self::Bars => "bars",
            Self::OverLength => "over_length",
            Self::HeatMap => "heat_map",
        }
    }

    /// How many stars its metric has to have; none means that it takes no metric.
    fn stars(self) -> usize {
        match self {
            Self::OverLength => 1,
            Self::HeatMap => 2,
            Self::LearningCurves | Self::OverState | Self::Bars => 0,
        }
    }
}

impl Figure {
    /// The file's name without its ending.
    pub fn file(&self) -> &str {
        self.name.as_deref().unwrap_or(self.kind.name())
    }
}

/// Reads TOML of any kind.
pub(crate) fn read_toml<T: serde::de::DeserializeOwned>(
    path: &Path,
    what: &'static str,
) -> Result<T, SweepError> {
    let text = fs::read_to_string(path).map_err(SweepError::io("read", path))?;
    let parse = |source| SweepError::Parse { what, path: path.into(), source: Box::new(source) };
    toml::from_str(&text).map_err(parse)
}

impl SweepConfig {
    /// Reads a file and checks every value that can be checked without the base config.
    /// # Errors
    /// [`SweepError`] names the file, or the first key that cannot be used.
    pub fn read(path: &Path) -> Result<Self, SweepError> {
        let mut config: Self = read_toml(path, "sweep")?;
        if let Some(from) = &config.variants_from {
            let home = path.parent().unwrap_or(Path::new(""));
            let variants = from.read(home, &config.base)?;
            config.variants.extend(variants);
        }
        config.check()?;
        let base = path.parent().unwrap_or(Path::new("")).join(&config.base);
        config.check_learning_rate(&base)?;
        Ok(config)
    }

    /// Axes in the order of their first variants, then keys of the grid, all as in the file.
    pub(crate) fn dimensions(&self) -> Result<Vec<Dimension>, SweepError> {
        let mut dimensions: Vec<Dimension> = vec![];
        for variant in &self.variants {
            let name = (variant.axis.clone(), variant.name.clone());
            let labels = variant.labels.iter().map(|(k, v)| (k.clone(), value_text(v)));
            let choice = Choice {
                settings: std::iter::once(name).chain(labels).collect(),
                overrides: variant.set.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            };
            match dimensions.iter_mut().find(|known| known.name == variant.axis) {
                Some(axis) => axis.choices.push(choice),
                None => {
                    dimensions.push(Dimension { name: variant.axis.clone(), choices: vec![choice] })
                }
            }
        }
        flatten("", &self.grid, &mut dimensions)?;
        Ok(dimensions)
    }

    fn check(&self) -> Result<(), SweepError> {
        self.check_label()?;
        let dimensions = self.dimensions()?;
        check_names(&dimensions)?;
        check_conflicts(&dimensions)?;
        self.check_limits()?;
        self.check_select(&dimensions)?;
        self.report.check(&dimensions, &self.select)
    }

    fn check_label(&self) -> Result<(), SweepError> {
        let empty = self.scaled_down.as_ref().is_some_and(|cut| cut.trim().is_empty());
        if empty {
            return Err(SweepError::value("scaled_down", "empty", "what was cut, in words"));
        }
        self.check_departs()?;
        match (&self.protocol, &self.scaled_down) {
            (None, None) => {
                let want = "given, or `scaled_down`: nothing is reported without a label";
                Err(SweepError::value("protocol", "missing", want))
            }
            _ => Ok(()),
        }
    }

    fn check_departs(&self) -> Result<(), SweepError> {
        if !self.departs.is_empty() && (self.protocol.is_none() || self.scaled_down.is_none()) {
            let want = "left out but where `protocol` and `scaled_down` are both given";
            return Err(SweepError::value("departs", "given", want));
        }
        let silent = |value: &Value| value.as_str().is_none_or(|why| why.trim().is_empty());
        match self.departs.iter().find(|(_, value)| silent(value)) {
            None => Ok(()),
            Some((key, value)) => {
                let want = "a string that says why";
                Err(SweepError::value(format!("departs.{key}"), value, want))
            }
        }
    }

    /// Mixers that are compared at one learning rate say so, and others do not.
    fn check_learning_rate(&self, base: &Path) -> Result<(), SweepError> {
        let one_rate = self.compares_mixers()? && self.learning_rates(base)? <= 1;
        let key = "one_learning_rate";
        match (&self.one_learning_rate, one_rate) {
            (None, true) => {
                let want = "given, with why mixers are compared at one learning rate for all; or \
                            `select.over` has `optimizer.learning_rate`, with several in the grid";
                Err(SweepError::value(key, "missing", want))
            }
            (Some(_), false) => {
                let want = "left out: no mixers are compared at one learning rate here";
                Err(SweepError::value(key, "given", want))
            }
            (Some(why), true) if why.trim().is_empty() => {
                Err(SweepError::value(key, "empty", "why, in words"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the values of a dimension have different mixers.
    fn compares_mixers(&self) -> Result<bool, SweepError> {
        Ok(self.dimensions()?.iter().any(|dimension| {
            let mixers = |choice: &Choice| {
                let mut names = BTreeSet::new();
                choice.overrides.iter().for_each(|(key, value)| mixers(key, value, &mut names));
                names
            };
            let all: BTreeSet<_> = dimension.choices.iter().map(mixers).collect();
            all.len() > 1
        }))
    }

    /// How many learning rates a mixer could have been given: those that the best is chosen among,
    /// or those that variants bring along.
    fn learning_rates(&self, base: &Path) -> Result<usize, SweepError> {
        let key = "optimizer.learning_rate";
        let usual = match base.exists() {
            true => lookup(&read_toml(base, "run config")?, key).map(value_text),
            false => None,
        };
        let mut rates: BTreeSet<Option<String>> = BTreeSet::new();
        for dimension in self.dimensions()? {
            let of = |choice: &Choice| {
                let set: Table = choice.overrides.iter().cloned().collect();
                let within = set.get("optimizer").and_then(|o| o.get("learning_rate"));
                set.get(key).or(within).map(value_text)
            };
            let brought: Vec<_> = dimension.choices.iter().map(of).collect();
            let chosen = self.select.over.contains(&dimension.name);
            let own = dimension.name != key || chosen;
            if brought.iter().any(Option::is_some) && own {
                rates.extend(brought.into_iter().map(|rate| rate.or_else(|| usual.clone())));
            }
        }
        Ok(rates.len())
    }

    fn check_limits(&self) -> Result<(), SweepError> {
        let sound = |minutes: f64| minutes.is_finite() && minutes > 0.0;
        match (self.limits.wall_minutes, self.limits.runs) {
            (Some(minutes), _) if !sound(minutes) => {
                Err(SweepError::value("limits.wall_minutes", minutes, "above 0"))
            }
            (_, Some(0)) => Err(SweepError::value("limits.runs", 0, "1 or more")),
            _ => Ok(()),
        }
    }

    fn check_select(&self, dimensions: &[Dimension]) -> Result<(), SweepError> {
        for name in &self.select.over {
            known("select.over", name, dimensions)?;
        }
        let can_choose = !self.select.over.is_empty() && self.select.replicate.is_some();
        if self.select.repeat_chosen && !can_choose {
            let want = "left out but where `select.over` and `select.replicate` are both given";
            return Err(SweepError::value("select.repeat_chosen", true, want));
        }
        let Some(replicate) = &self.select.replicate else { return Ok(()) };
        known("select.replicate", replicate, dimensions)?;
        if self.select.over.contains(replicate) {
            let want = "a key that is not in `select.over`";
            return Err(SweepError::value("select.replicate", replicate, want));
        }
        Ok(())
    }
}

impl ReportConfig {
    fn check(&self, dimensions: &[Dimension], select: &SelectConfig) -> Result<(), SweepError> {
        let average = self.average.iter().map(|name| ("report.average", name));
        let keys = [("report.columns", &self.columns), ("report.section", &self.section)];
        let keys = keys.into_iter().filter_map(|(key, name)| Some((key, name.as_ref()?)));
        let mut used: Vec<&String> = vec![];
        for (key, name) in keys.chain(average) {
            known(key, name, dimensions)?;
            let chosen = select.over.contains(name) || select.replicate.as_ref() == Some(name);
            if chosen || used.contains(&name) {
                let want = "a key with no other part in `select` and `report`";
                return Err(SweepError::value(key, name, want));
            }
            used.push(name);
        }
        if self.columns.is_some() && !self.metrics.is_empty() {
            let want = "left out where `report.columns` is given";
            return Err(SweepError::value("report.metrics", "given too", want));
        }
        for (table, list) in [("metrics", &self.metrics), ("names", &self.names)] {
            if let Some((key, value)) = list.iter().find(|(_, value)| !value.is_str()) {
                return Err(SweepError::value(format!("report.{table}.{key}"), value, "a string"));
            }
        }
        let unknown = |name: &&String| ALSO.iter().all(|(known, _)| known != name);
        if let Some(name) = self.also.iter().find(unknown) {
            let want = format!("one of {}", ALSO.map(|(known, _)| known).join(", "));
            return Err(SweepError::value("report.also", name, want));
        }
        self.check_figures()
    }

    fn check_figures(&self) -> Result<(), SweepError> {
        for (i, figure) in self.figures.iter().enumerate() {
            let at = format!("report.figures[{i}]");
            let stars = figure.metric.as_ref().map_or(0, |metric| metric.matches('*').count());
            let wanted = figure.kind.stars();
            if stars != wanted || (wanted == 0 && figure.metric.is_some()) {
                let got = figure.metric.as_deref().unwrap_or("missing");
                let want = match wanted {
                    0 => "left out for this kind".to_string(),
                    stars => format!("a metric with {stars} `*`"),
                };
                return Err(SweepError::value(format!("{at}.metric"), got, want));
            }
            let file = figure.file();
            let twice = self.figures[..i].iter().any(|other| other.file() == file);
            if twice || file.is_empty() || file.contains(['/', '\\', '.']) {
                let want = "one file's name, without an ending and unlike all others";
                return Err(SweepError::value(format!("{at}.name"), format!("{file:?}"), want));
            }
        }
        Ok(())
    }

    /// Name of a value, for people.
    pub(crate) fn called<'a>(&'a self, text: &'a str) -> &'a str {
        self.names.get(text).and_then(Value::as_str).unwrap_or(text)
    }

    /// Name of a line: everything that tells a group from others in its table, except its column.
    pub(crate) fn line_name(&self, group: &[(String, String)]) -> String {
        let elsewhere = |name: &String| {
            self.columns.as_ref() == Some(name)
                || self.section.as_ref() == Some(name)
                || self.average.contains(name)
        };
        let values = group.iter().filter(|(name, _)| !elsewhere(name));
        let values: Vec<&str> = values.map(|(_, value)| self.called(value)).collect();
        if values.is_empty() { "all".into() } else { values.join(", ") }
    }
}

/// The names of mixers that a key with its value sets.
fn mixers(key: &str, value: &Value, names: &mut BTreeSet<String>) {
    let last = key.rsplit('.').next().unwrap_or(key);
    match value {
        Value::Table(table) if last == "mixer" => names.extend(table.keys().cloned()),
        Value::Table(table) => table.iter().for_each(|(key, value)| mixers(key, value, names)),
        Value::Array(list) => list.iter().for_each(|value| mixers(key, value, names)),
        _ => {}
    }
}
