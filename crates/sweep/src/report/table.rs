//! Tables: lines are models, columns are tasks or sizes, and every cell says how it came about.

use std::collections::BTreeMap;

use crate::Sweep;
use crate::choose::{Chosen, deviation, statistic};
use crate::config::{ALSO, Unit};
use crate::published::{Published, PublishedTable};
use crate::select::Selection;
use crate::state_size::PUBLISHED_BYTES;

/// All tables of a report.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) sections: Vec<Section>,
}

/// One table.
#[derive(Debug, Clone)]
pub(crate) struct Section {
    /// The value of the report's `section`, if it has one.
    pub(crate) name: Option<String>,
    pub(crate) columns: Vec<String>,
    /// The score in each column, without its split; nothing as long as no run says it.
    metrics: Vec<Option<String>>,
    pub(crate) lines: Vec<Line>,
}

/// One model.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// One for each column.
    pub(crate) cells: Vec<Cell>,
}

/// One cell of a table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cell {
    /// By replicate.
    pub(crate) values: BTreeMap<String, f64>,
    /// Replicates asked for.
    wanted: usize,
    /// Runs that failed, of any setting.
    failed: usize,
    choice: String,
    /// Settings to choose among, and those of them that no run has tried yet.
    offered: usize,
    untried: usize,
    pub(crate) state_bytes: Option<f64>,
    /// As published sizes count them.
    published_bytes: Option<f64>,
    parameters: Option<f64>,
    /// As the report's `also` has them.
    also: Vec<Option<f64>>,
}

/// Behind a number that may still change, and what it says.
const MARK: &str = " †";
const MARKED: &str = "\n† Chosen among fewer settings than the grid has: the others wait, and one of them may be better.\n";

/// The heading of the column with the mean of the others.
pub(crate) const MEAN: &str = "Mean";

impl Layout {
    pub(crate) fn new(sweep: &Sweep, selection: &Selection) -> Self {
        let report = &sweep.config.report;
        let mut sections: Vec<(Option<String>, Vec<&Chosen>)> = vec![];
        for group in &selection.groups {
            let name = report.section.as_ref().and_then(|key| group.value(key));
            let name = name.map(|name| report.called(name).to_string());
            match sections.iter_mut().find(|(known, _)| *known == name) {
                Some((_, groups)) => groups.push(group),
                None => sections.push((name, vec![group])),
            }
        }
        let section = |(name, groups): (_, Vec<&Chosen>)| Section::new(sweep, name, &groups);
        Self { sections: sections.into_iter().map(section).collect() }
    }
}

impl Line {
    /// The larger, the better; nothing is worse than no score.
    fn sort_key(&self, sweep: &Sweep) -> f64 {
        match self.cells.first().and_then(|cell| cell.value(sweep)) {
            Some(score) if sweep.config.select.lowest => -score,
            Some(score) => score,
            None => f64::NEG_INFINITY,
        }
    }
}

impl Section {
    fn new(sweep: &Sweep, name: Option<String>, groups: &[&Chosen]) -> Self {
        let report = &sweep.config.report;
        let columns = columns(sweep, groups);
        let mut lines: Vec<(String, Vec<&Chosen>)> = vec![];
        for group in groups {
            let name = report.line_name(&group.group);
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, groups)) => groups.push(group),
                None => lines.push((name, vec![group])),
            }
        }
        let line = |(name, groups): (String, Vec<&Chosen>)| {
            let cells = columns.iter().map(|column| Cell::new(sweep, &groups, column));
            Line { name, cells: cells.collect() }
        };
        let mut lines: Vec<Line> = lines.into_iter().map(line).collect();
        if report.sort {
            lines.sort_by(|a, b| b.sort_key(sweep).total_cmp(&a.sort_key(sweep)));
        }
        let row = groups.iter().flat_map(|group| &group.rows).next();
        let usual = row.map(|row| crate::choose::metric(&sweep.config.select, row));
        let metric = |column: &Column| match &column.metric {
            Some(metric) => Some(last_of(metric, '/').to_string()),
            None => usual.clone(),
        };
        let metrics = columns.iter().map(metric).collect();
        let columns = columns.into_iter().map(|column| column.heading).collect();
        let section = Self { name, columns, metrics, lines };
        if report.mean { section.with_mean() } else { section }
    }

    fn with_mean(mut self) -> Self {
        self.columns.push(MEAN.into());
        self.metrics.push(self.metrics.first().cloned().flatten());
        for line in &mut self.lines {
            let mean = Cell::mean(&line.cells);
            line.cells.push(mean);
        }
        self
    }

    /// A table's number for a model in a column, if that is the same thing beside ours.
    pub(crate) fn comparable(
        &self,
        table: &PublishedTable,
        model: &str,
        column: &str,
    ) -> Option<f64> {
        let place = self.columns.iter().position(|known| known == column)?;
        let metric = self.metrics[place].as_deref();
        let value = comparable_value(table, model, column, &self.columns);
        value.filter(|_| table.measures(metric, column))
    }

    /// Pairs of a state's bytes and a model's number, where the table's score is ours.
    pub(crate) fn comparable_points(&self, table: &PublishedTable, model: &str) -> Vec<(f64, f64)> {
        let metric = self.metrics.first().and_then(Option::as_deref);
        let column = self.columns.first().map_or("", String::as_str);
        match table.measures(metric, column) {
            true => table.over_state(model),
            false => vec![],
        }
    }

    pub(crate) fn markdown(&self, sweep: &Sweep) -> String {
        let mut text = String::new();
        if let Some(name) = &self.name {
            text.push_str(&format!("\n### {name}\n"));
        }
        if self.columns.len() > 1 {
            text.push_str(&self.overview(sweep));
        }
        text + &self.details(sweep)
    }

    /// The mark's meaning, if one is in the table.
    fn mark(&self) -> &'static str {
        let mut cells = self.lines.iter().flat_map(|line| &line.cells);
        if cells.any(Cell::may_change) { MARKED } else { "" }
    }

    /// Models by columns, ours alone.
    fn overview(&self, sweep: &Sweep) -> String {
        let mut rows = vec![[vec![heading(sweep)], self.columns.clone()].concat()];
        for line in &self.lines {
            let cells = line.cells.iter().map(|cell| cell.marked(sweep));
            rows.push([vec![line.name.clone()], cells.collect()].concat());
        }
        markdown(&rows) + self.mark()
    }

    /// Models by columns, ours with what is published in brackets.
    pub(crate) fn beside_published(&self, sweep: &Sweep) -> String {
        let beside = Beside::new(sweep, self);
        let title = self.name.as_ref().map(|name| format!("\n**{name}**\n")).unwrap_or_default();
        let ours = match beside.tables.is_empty() {
            true => heading(sweep),
            false => format!("{} (published)", heading(sweep)),
        };
        let mut rows = vec![[vec![ours], self.columns.clone()].concat()];
        for line in &self.lines {
            let cells = self.columns.iter().zip(&line.cells).map(|(column, cell)| {
                let ours = if cell.values.is_empty() { dash() } else { cell.marked(sweep) };
                match beside.numbers(sweep, &line.name, column) {
                    published if published.is_empty() => ours,
                    published => format!("{ours} ({published})"),
                }
            });
            rows.push([vec![line.name.clone()], cells.collect()].concat());
        }
        title + &markdown(&rows) + self.mark() + &beside.sources()
    }

    /// A line for every cell: how it came about, and what is published.
    fn details(&self, sweep: &Sweep) -> String {
        let beside = Beside::new(sweep, self);
        let first = ["model", "at", &heading(sweep), "least to most", "replicates", "chosen"];
        let mut head: Vec<String> = first.iter().map(|text| text.to_string()).collect();
        head.extend(["parameters", "state, bytes"].map(String::from));
        let two_counts = self.lines.iter().flat_map(|line| &line.cells);
        let two_counts = two_counts.into_iter().any(|cell| cell.published_bytes.is_some());
        if two_counts {
            head.push("as published sizes count".into());
        }
        head.extend(sweep.config.report.also.iter().map(|name| also_heading(name).to_string()));
        head.extend(beside.headings());
        let mut rows = vec![head];
        for line in &self.lines {
            for (column, cell) in self.columns.iter().zip(&line.cells) {
                let ours =
                    [vec![line.name.clone(), column.clone()], cell.details(sweep, two_counts)]
                        .concat();
                rows.push([ours, beside.cells(sweep, &line.name, column, cell)].concat());
            }
        }
        markdown(&rows) + &beside.sources()
    }
}

/// A column before it is filled.
struct Column {
    heading: String,
    /// The value of the report's `columns` that belongs here.
    value: Option<String>,
    /// The metric that stands here, if not the one that was chosen by.
    metric: Option<String>,
}

fn columns(sweep: &Sweep, groups: &[&Chosen]) -> Vec<Column> {
    let report = &sweep.config.report;
    if let Some(key) = &report.columns {
        let mut values: Vec<&str> = vec![];
        for value in groups.iter().filter_map(|group| group.value(key)) {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        let column = |value: &str| Column {
            heading: report.called(value).into(),
            value: Some(value.into()),
            metric: None,
        };
        return values.into_iter().map(column).collect();
    }
    let named = report.metrics.iter().filter_map(|(heading, metric)| {
        let metric = Some(metric.as_str()?.to_string());
        Some(Column { heading: heading.clone(), value: None, metric })
    });
    let named: Vec<Column> = named.collect();
    match named.is_empty() {
        false => named,
        true => {
            let name = groups.iter().flat_map(|group| &group.rows).next();
            let heading = name.map(|row| crate::choose::metric(&sweep.config.select, row));
            let heading = heading.unwrap_or_else(|| "score".into());
            vec![Column { heading, value: None, metric: None }]
        }
    }
}

impl Cell {
    /// Of the groups of one line those of one column, averaged if there are several.
    fn new(sweep: &Sweep, groups: &[&Chosen], column: &Column) -> Self {
        let config = &sweep.config;
        let here = |group: &&&Chosen| {
            let key = config.report.columns.as_ref();
            key.and_then(|key| group.value(key)) == column.value.as_deref()
        };
        let groups: Vec<&&Chosen> = groups.iter().filter(here).collect();
        let metric = column.metric.as_deref();
        let values: Vec<_> = groups.iter().map(|g| g.values(&config.select, metric)).collect();
        let mean = |name: &str| {
            let means: Vec<f64> = groups.iter().filter_map(|group| group.mean(name)).collect();
            statistic(crate::Statistic::Mean, false, &means)
        };
        Self {
            values: common_mean(&values),
            wanted: groups.iter().map(|group| group.wanted).min().unwrap_or(0),
            failed: groups.iter().map(|group| group.failed.len()).sum(),
            choice: choices(&groups),
            offered: groups.iter().map(|group| group.offered).sum(),
            untried: groups.iter().map(|group| group.untried).sum(),
            state_bytes: mean("state_bytes"),
            published_bytes: mean(PUBLISHED_BYTES),
            parameters: mean("parameters"),
            also: config.report.also.iter().map(|name| mean(name)).collect(),
        }
    }

    /// The mean of a line's cells, for replicates that all of them have.
    fn mean(cells: &[Self]) -> Self {
        let values: Vec<_> = cells.iter().map(|cell| cell.values.clone()).collect();
        Self {
            values: common_mean(&values),
            wanted: cells.iter().map(|cell| cell.wanted).min().unwrap_or(0),
            failed: cells.iter().map(|cell| cell.failed).sum(),
            untried: cells.iter().map(|cell| cell.untried).sum(),
            ..Self::default()
        }
    }

    /// The number that stands for its replicates, as a share.
    pub(crate) fn value(&self, sweep: &Sweep) -> Option<f64> {
        let values: Vec<f64> = self.values.values().copied().collect();
        statistic(sweep.config.report.statistic, sweep.config.select.lowest, &values)
    }

    /// The number with its spread, or why there is none.
    fn number(&self, sweep: &Sweep) -> String {
        let unit = sweep.config.report.unit;
        let values: Vec<f64> = self.values.values().copied().collect();
        match (self.value(sweep), deviation(&values)) {
            (None, _) if self.failed > 0 => format!("none, {} failed", self.failed),
            (None, _) => "no rows yet".into(),
            (Some(value), None) => unit.write(value),
            (Some(value), Some(spread)) => {
                format!("{} ± {}", unit.write(value), unit.write(spread))
            }
        }
    }

    /// Whether there is a number, and settings wait that may give another.
    fn may_change(&self) -> bool {
        self.untried > 0 && !self.values.is_empty()
    }

    /// [`number`](Self::number), with a mark where it may still change.
    fn marked(&self, sweep: &Sweep) -> String {
        self.number(sweep) + if self.may_change() { MARK } else { "" }
    }

    /// The state where published sizes would have it, which leave parts out; all of it if nobody
    /// says how they count.
    pub(crate) fn bytes_beside_published(&self) -> Option<f64> {
        self.published_bytes.or(self.state_bytes)
    }

    fn details(&self, sweep: &Sweep, two_counts: bool) -> Vec<String> {
        let unit = sweep.config.report.unit;
        let values = || self.values.values().copied();
        let ends = values().reduce(f64::min).zip(values().reduce(f64::max));
        let ends = ends.map(|(low, high)| format!("{} to {}", unit.write(low), unit.write(high)));
        let count = |value: Option<f64>| value.map_or_else(dash, |value| format!("{value:.0}"));
        let failed = match self.failed {
            0 => String::new(),
            failed => format!(", {failed} failed"),
        };
        let done = format!("{} of {}{failed}", self.values.len(), self.wanted);
        let choice = match (self.choice.is_empty(), self.may_change()) {
            (true, _) => dash(),
            (false, false) => self.choice.clone(),
            (false, true) => {
                let tried = self.offered - self.untried;
                format!("{}, of {tried} of {} settings", self.choice, self.offered)
            }
        };
        let mut counts = vec![count(self.parameters), count(self.state_bytes)];
        if two_counts {
            counts.push(count(self.published_bytes));
        }
        let also = 0..sweep.config.report.also.len();
        let also = also.map(|i| count(self.also.get(i).copied().flatten()));
        let first = [self.number(sweep), ends.unwrap_or_else(dash), done, choice];
        first.into_iter().chain(counts).chain(also).collect()
    }
}

/// Heading of a number of the rows in a table.
fn also_heading(name: &str) -> &str {
    ALSO.iter().find(|(known, _)| *known == name).map_or(name, |(_, heading)| *heading)
}

fn dash() -> String {
    "–".into()
}

/// For every replicate that all have, the mean.
fn common_mean(lists: &[BTreeMap<String, f64>]) -> BTreeMap<String, f64> {
    let Some(first) = lists.first() else { return BTreeMap::new() };
    let mean = |replicate: &String| {
        let values = lists.iter().map(|list| list.get(replicate).copied());
        let sum = values.sum::<Option<f64>>()?;
        Some((replicate.clone(), sum / lists.len() as f64))
    };
    first.keys().filter_map(mean).collect()
}

/// The setting that was chosen; where cells are averaged, only whether all chose the same.
fn choices(groups: &[&&Chosen]) -> String {
    let write = |group: &&&Chosen| {
        let parts = group.choice.iter().map(|(name, value)| format!("{} {value}", last(name)));
        parts.collect::<Vec<_>>().join(", ")
    };
    let mut all: Vec<String> = groups.iter().map(write).collect();
    all.dedup();
    match &all[..] {
        [] => String::new(),
        [one] => one.clone(),
        _ => "each its own".into(),
    }
}

/// The last part of a key.
fn last(name: &str) -> &str {
    last_of(name, '.')
}

fn last_of(name: &str, between: char) -> &str {
    name.rsplit(between).next().unwrap_or(name)
}

impl Unit {
    /// A share as this unit has it.
    pub(crate) fn write(self, share: f64) -> String {
        match self {
            Self::Fraction => format!("{share:.3}"),
            Self::Percent => format!("{:.1}", 100.0 * share),
        }
    }

    /// A number in this unit as a share.
    pub(crate) fn share(self, number: f64) -> f64 {
        match self {
            Self::Fraction => number,
            Self::Percent => number / 100.0,
        }
    }
}

/// Ours never goes without its label.
fn heading(sweep: &Sweep) -> String {
    let statistic = sweep.config.report.statistic.name();
    let cut = sweep.config.scaled_down.as_ref().map(|_| ", scaled down");
    let rate = sweep.config.one_learning_rate.as_ref().map(|_| ", one learning rate");
    format!("ours{}{}, {statistic} ± sd", cut.unwrap_or_default(), rate.unwrap_or_default())
}

/// Published numbers that may stand beside a table.
pub(crate) struct Beside<'a> {
    tables: Vec<&'a PublishedTable>,
    /// Whether they may be compared.
    full: bool,
    section: &'a Section,
}

impl<'a> Beside<'a> {
    fn new(sweep: &'a Sweep, section: &'a Section) -> Self {
        let tables = beside(sweep, section.name.as_deref());
        let useful = |table: &&PublishedTable| {
            section.columns.iter().any(|column| {
                let lines = section.lines.iter();
                lines.into_iter().any(|l| section.comparable(table, &l.name, column).is_some())
            })
        };
        let full = sweep.config.scaled_down.is_none();
        Self { tables: tables.into_iter().filter(useful).collect(), full, section }
    }

    fn headings(&self) -> Vec<String> {
        let heading = |(i, _): (usize, &&PublishedTable)| match self.full {
            true => vec![format!("published [{}]", i + 1), format!("difference [{}]", i + 1)],
            false => vec![format!("published in full [{}], **not comparable**", i + 1)],
        };
        self.tables.iter().enumerate().flat_map(heading).collect()
    }

    fn cells(&self, sweep: &Sweep, model: &str, column: &str, cell: &Cell) -> Vec<String> {
        let unit = sweep.config.report.unit;
        let cells = |table: &&PublishedTable| {
            let value = self.section.comparable(table, model, column);
            let share = value.map(|value| table.unit.share(value));
            let spread = table.spread(model, column).map(|spread| table.unit.share(spread));
            let mut number = share.map_or_else(|| "none published".into(), |v| unit.write(v));
            if let (Some(_), Some(spread)) = (share, spread) {
                number.push_str(&format!(" ± {}", unit.write(spread)));
            }
            let difference = cell.value(sweep).zip(share).map(|(ours, theirs)| ours - theirs);
            match self.full {
                true => vec![number, difference.map_or_else(dash, |d| signed(unit, d))],
                false => vec![number],
            }
        };
        self.tables.iter().flat_map(cells).collect()
    }

    /// The published numbers of a cell, each with its source's.
    fn numbers(&self, sweep: &Sweep, model: &str, column: &str) -> String {
        let unit = sweep.config.report.unit;
        let number = |(i, table): (usize, &&PublishedTable)| {
            let value = self.section.comparable(table, model, column)?;
            Some(format!("{} [{}]", unit.write(table.unit.share(value)), i + 1))
        };
        let numbers: Vec<String> = self.tables.iter().enumerate().filter_map(number).collect();
        numbers.join(", ")
    }

    fn sources(&self) -> String {
        let source = |(i, table): (usize, &&PublishedTable)| {
            let error = table.error.map(|error| format!(", within {error}")).unwrap_or_default();
            let note = table.note.as_ref().map(|note| format!(" {note}")).unwrap_or_default();
            format!("\n[{}] {} ({}{error}).{note}\n", i + 1, table.source, table.tag.describe())
        };
        self.tables.iter().enumerate().map(source).collect()
    }
}

/// A published table's value for a model in a column, if it is the same thing beside our columns.
pub(crate) fn comparable_value(
    table: &PublishedTable,
    model: &str,
    column: &str,
    ours: &[String],
) -> Option<f64> {
    let comparable = column != MEAN || same_columns(table, ours);
    table.value(model, column).filter(|_| comparable)
}

/// A mean is that of all columns: with others it is another number.
fn same_columns(table: &PublishedTable, ours: &[String]) -> bool {
    let sorted = |columns: &[String]| {
        let mut columns: Vec<String> = columns.to_vec();
        columns.sort();
        columns
    };
    sorted(&table.columns) == sorted(ours)
}

fn signed(unit: Unit, difference: f64) -> String {
    let text = unit.write(difference);
    if text.starts_with('-') { text } else { format!("+{text}") }
}

/// The published tables that belong beside a section: those of the sweep's protocol whose numbers
/// stand for replicates as ours do, and none where the sweep names none.
pub(crate) fn beside<'a>(sweep: &'a Sweep, section: Option<&str>) -> Vec<&'a PublishedTable> {
    let Some(protocol) = &sweep.config.protocol else { return vec![] };
    let named = sweep.config.report.compare.as_deref();
    let ours = sweep.config.report.statistic;
    let tables = Published::embedded().tables_of(protocol, named);
    let tables = tables.filter(|table| table.statistic.is_none_or(|theirs| theirs == ours));
    tables.filter(|table| table.section.as_deref() == section || table.section.is_none()).collect()
}

/// A table from its rows, the first being the head.
fn markdown(rows: &[Vec<String>]) -> String {
    let line = |cells: &Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let Some((head, body)) = rows.split_first() else { return String::new() };
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    format!("\n{}{rule}{}", line(head), body.iter().map(line).collect::<String>())
}
