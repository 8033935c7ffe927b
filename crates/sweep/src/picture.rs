//! The pictures of a report: what each kind shows, from the rows that were chosen.

use std::collections::BTreeMap;

use crate::choose::Chosen;
use crate::config::Figure;
use crate::report::curves::Curves;
use crate::report::table::{Cell, Layout, MEAN, Section, beside};
use crate::rows::Row;
use crate::select::Selection;
use crate::{FigureKind, Sweep, SweepError};
use linattn_plot::{BarLine, Bars, Chart, Drawing, Heat, HeatPanel, Series, Stroke};

/// A picture and the name of its files.
pub(crate) struct Picture {
    pub(crate) file: String,
    pub(crate) title: String,
    pub(crate) drawing: Drawing,
}

/// Draws every picture that a sweep asks for: one of each kind a section, and of learning curves
/// one a column.
pub(crate) fn figures(
    sweep: &Sweep,
    selection: &Selection,
    layout: &Layout,
    curves: &Curves,
) -> Result<Vec<Picture>, SweepError> {
    let mut pictures: Vec<Picture> = vec![];
    if selection.done.is_empty() {
        return Ok(pictures); // an empty table says as much
    }
    for figure in &sweep.config.report.figures {
        for section in &layout.sections {
            let draft = Draft { sweep, selection, section, figure, curves, column: None };
            pictures.extend(draft.each().iter().map(Draft::picture));
        }
    }
    for (i, picture) in pictures.iter().enumerate() {
        if pictures[..i].iter().any(|other| other.file == picture.file) {
            let want = "a name that no other picture has";
            return Err(SweepError::value("report.figures", &picture.file, want));
        }
    }
    Ok(pictures)
}

/// One picture of one section.
#[derive(Clone, Copy)]
struct Draft<'a> {
    sweep: &'a Sweep,
    selection: &'a Selection,
    section: &'a Section,
    figure: &'a Figure,
    curves: &'a Curves,
    /// The column it shows, if not all.
    column: Option<&'a str>,
}

impl Draft<'_> {
    /// One for each column where all of them would be too much for one picture.
    fn each(self) -> Vec<Self> {
        let one = |column| Self { column, ..self };
        let by_column = self.sweep.config.report.columns.is_some();
        match self.figure.kind {
            FigureKind::LearningCurves if by_column => {
                let columns = self.section.columns.iter().filter(|column| *column != MEAN);
                columns.map(|column| one(Some(column.as_str()))).collect()
            }
            _ => vec![self],
        }
    }

    fn picture(&self) -> Picture {
        let slug = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
        let slug = |name: &str| name.chars().map(slug).collect::<String>();
        let parts: Vec<&str> =
            self.section.name.as_deref().into_iter().chain(self.column).collect();
        let title = self.figure.title.as_deref().unwrap_or(self.figure.kind.title());
        let (mut file, mut title) = (self.figure.file().to_string(), title.to_string());
        if !parts.is_empty() {
            file = format!("{file}_{}", slug(&parts.join("_")));
            title = format!("{title}: {}", parts.join(", "));
        }
        let drawing = match self.figure.kind {
            FigureKind::LearningCurves => self.learning_curves(&title),
            FigureKind::OverState => self.over_state(&title),
            FigureKind::Bars => self.bars(&title),
            FigureKind::OverLength => self.over_length(&title),
            FigureKind::HeatMap => self.heat_map(&title),
        };
        Picture { file, title, drawing }
    }

    /// Text under the title: a scaled-down number never goes without saying so.
    fn label(&self, more: &str) -> String {
        let config = &self.sweep.config;
        let rate = config.one_learning_rate.as_ref().map(|_| "; one learning rate for all mixers");
        let rate = rate.unwrap_or_default();
        match &config.scaled_down {
            Some(cut) => format!("scaled down: {cut}{rate}{more}"),
            None => format!("protocol {}{rate}{more}", self.sweep.label()),
        }
    }

    fn groups(&self) -> impl Iterator<Item = &Chosen> {
        let report = &self.sweep.config.report;
        self.selection.groups.iter().filter(|group| {
            let value = |key: &Option<String>| {
                key.as_ref().and_then(|key| group.value(key)).map(|value| report.called(value))
            };
            let here = self.column.is_none_or(|column| value(&report.columns) == Some(column));
            here && value(&report.section) == self.section.name.as_deref()
        })
    }

    /// A line's name, and its column's where the picture has several.
    fn name(&self, group: &Chosen) -> String {
        let report = &self.sweep.config.report;
        let columns = report.columns.iter().filter(|_| self.column.is_none());
        let columns = columns.chain(&report.average);
        let values = columns.filter_map(|key| group.value(key)).map(|value| report.called(value));
        let line = report.line_name(&group.group);
        std::iter::once(line.as_str()).chain(values).collect::<Vec<_>>().join(", ")
    }

    fn score(&self) -> String {
        let row = self.groups().flat_map(|group| &group.rows).next();
        row.map_or("score".into(), |row| crate::choose::metric(&self.sweep.config.select, row))
    }

    fn learning_curves(&self, title: &str) -> Drawing {
        let mut series = vec![];
        for (place, group) in self.groups().enumerate() {
            for (i, row) in group.rows.iter().enumerate() {
                let points = self.curves.of(row.id()).to_vec();
                let name = (i == 0).then(|| self.name(group));
                series.push(Series { name, place, points, stroke: Stroke::Line });
            }
        }
        let chart = Chart {
            title: title.into(),
            label: self.label("; a line a run"),
            across: "step".into(),
            up: format!("test {}", self.score()),
            log: false,
            decades: false,
            series,
        };
        chart.draw()
    }

    fn over_state(&self, title: &str) -> Drawing {
        let mut series = vec![];
        let full = self.sweep.config.scaled_down.is_none();
        for (place, line) in self.section.lines.iter().enumerate() {
            let point = |cell: &Cell| {
                let bytes = if full { cell.bytes_beside_published() } else { cell.state_bytes };
                Some((bytes?, cell.value(self.sweep)?))
            };
            let points: Vec<_> = line.cells.iter().filter_map(point).collect();
            // Once in the legend: by its rings where it has nothing else yet.
            let mut ringed = points.is_empty().then(|| line.name.clone());
            let name = Some(line.name.clone());
            series.push(Series { name, place, points, stroke: Stroke::Dots });
            let tables = beside(self.sweep, self.section.name.as_deref());
            for table in tables.into_iter().filter(|_| full) {
                let points = self.section.comparable_points(table, &line.name).into_iter();
                let points: Vec<_> =
                    points.map(|(bytes, value)| (bytes, table.unit.share(value))).collect();
                let name = if points.is_empty() { None } else { ringed.take() };
                series.push(Series { name, place, points, stroke: Stroke::Rings });
            }
        }
        series.sort_by_key(|series| series.stroke != Stroke::Rings); // rings lie below
        let published = series.iter().any(|s| s.stroke == Stroke::Rings && !s.points.is_empty());
        let chart = Chart {
            title: title.into(),
            label: self.label(if published { "; rings are published" } else { "" }),
            across: match full {
                true => "bytes of state, a sequence, as published sizes count".into(),
                false => "bytes of state, a sequence".into(),
            },
            up: format!("test {}", self.score()),
            log: true,
            decades: false,
            series,
        };
        chart.draw()
    }

    fn bars(&self, title: &str) -> Drawing {
        let full = self.sweep.config.scaled_down.is_none();
        let tables = beside(self.sweep, self.section.name.as_deref());
        let table = tables.into_iter().find(|_| full);
        let lines = self.section.lines.iter().map(|line| {
            let values = line.cells.iter().map(|cell| cell.value(self.sweep)).collect();
            let published = self.section.columns.iter().map(|column| {
                let table = table?;
                let value = self.section.comparable(table, &line.name, column)?;
                Some(table.unit.share(value))
            });
            (line.name.clone(), values, published.collect())
        });
        let lines: Vec<BarLine> = lines.collect();
        let mut more = table
            .map(|table| format!("; ticks are published: {}", table.source))
            .unwrap_or_default();
        if lines.iter().any(|(_, ours, _)| ours.iter().any(Option::is_none)) {
            more.push_str("; a cross has no rows yet");
        }
        let bars = Bars {
            title: title.into(),
            label: self.label(&more),
            up: format!("test {}", self.score()),
            columns: self.section.columns.clone(),
            lines,
        };
        bars.draw()
    }

    fn over_length(&self, title: &str) -> Drawing {
        let pattern = self.figure.metric.as_deref().unwrap_or_default();
        let series = self.groups().enumerate().map(|(place, group)| {
            let mut sums: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
            for (stars, value) in group.rows.iter().flat_map(|row| matches(row, pattern)) {
                if let Ok(length) = stars[0].parse() {
                    let sum = sums.entry(length).or_default();
                    *sum = (sum.0 + value, sum.1 + 1.0);
                }
            }
            let points = sums.into_iter().map(|(length, (sum, n))| (length as f64, sum / n));
            let name = Some(self.name(group));
            Series { name, place, points: points.collect(), stroke: Stroke::Dots }
        });
        let chart = Chart {
            title: title.into(),
            label: self.label("; means over replicates"),
            across: "length, tokens".into(),
            up: pattern.trim_start_matches("test/").replace("_*", "").replace('*', ""),
            log: false,
            decades: false,
            series: series.collect(),
        };
        chart.draw()
    }

    fn heat_map(&self, title: &str) -> Drawing {
        let pattern = self.figure.metric.as_deref().unwrap_or_default();
        let panel = |group: &Chosen| {
            let found: Vec<_> = group.rows.iter().flat_map(|row| matches(row, pattern)).collect();
            HeatPanel::new(self.name(group), &found)
        };
        let panels = self.groups().map(panel).collect();
        let label = self.label("; means over replicates");
        Heat { title: title.into(), label, across: "length".into(), up: "depth".into(), panels }
            .draw()
    }
}

impl FigureKind {
    fn title(self) -> &'static str {
        match self {
            Self::LearningCurves => "Learning curves",
            Self::OverState => "Score over state size",
            Self::Bars => "Scores side by side",
            Self::OverLength => "Score over length",
            Self::HeatMap => "Score over length and depth",
        }
    }
}

/// Metrics of a row whose name is `pattern` with something for each `*`, and what that is.
fn matches(row: &Row, pattern: &str) -> Vec<(Vec<String>, f64)> {
    let parts: Vec<&str> = pattern.split('*').collect();
    let stars = |name: &str| -> Option<Vec<String>> {
        let mut rest = name.strip_prefix(parts[0])?;
        let mut found = vec![];
        for (i, part) in parts.iter().enumerate().skip(1) {
            let last = i + 1 == parts.len();
            let at = if last { rest.strip_suffix(part)?.len() } else { rest.find(part)? };
            found.push(rest[..at].to_string());
            rest = &rest[at + part.len()..];
        }
        found.iter().all(|star| !star.is_empty() && !star.contains('/')).then_some(found)
    };
    let metric = |(name, value): (&str, &str)| Some((stars(name)?, value.parse().ok()?));
    row.metrics().filter_map(metric).collect()
}

#[cfg(test)]
mod tests;
