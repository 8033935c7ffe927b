//! `curves.csv`: the score over steps of the runs that are reported, so that pictures can be drawn
//! anew without the run folders.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::Value as Json;

use crate::choose::metric;
use crate::rows::Row;
use crate::select::Selection;
use crate::{FigureKind, Sweep, SweepError};

/// Most points of one curve.
const MOST_POINTS: usize = 100;

/// Curves by run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Curves(Vec<(String, Vec<(f64, f64)>)>);

const HEADER: &str = "run,step,score";

impl Curves {
    /// Those of a folder.
    pub(crate) fn read(sweep: &Sweep) -> Result<Self, SweepError> {
        let path = sweep.folder.join("curves.csv");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(SweepError::io("read", &path)(e)),
        };
        let mut curves = Self::default();
        for (i, line) in text.lines().enumerate().skip(1) {
            let (run, point) = parse(line).ok_or_else(|| SweepError::Rows {
                path: path.clone(),
                line: i + 1,
                why: format!("{line:?} is no `{HEADER}`; delete the file to make it anew"),
            })?;
            curves.add(run, point);
        }
        Ok(curves)
    }

    /// The points of a run.
    pub(crate) fn of(&self, run: &str) -> &[(f64, f64)] {
        self.0.iter().find(|(id, _)| id == run).map_or(&[], |(_, points)| points)
    }

    fn add(&mut self, run: &str, point: (f64, f64)) {
        match self.0.iter_mut().find(|(id, _)| id == run) {
            Some((_, points)) => points.push(point),
            None => self.0.push((run.into(), vec![point])),
        }
    }

    /// Takes the curves of all runs that are reported from their folders in `runs`; those that are
    /// not there stay as they are, and those of other runs go.
    pub(crate) fn collect(
        &mut self,
        sweep: &Sweep,
        selection: &Selection,
        runs: &Path,
    ) -> Result<(), SweepError> {
        let curves = |figure: &crate::Figure| figure.kind == FigureKind::LearningCurves;
        if !sweep.config.report.figures.iter().any(curves) {
            return Ok(());
        }
        let mut kept = vec![];
        for row in selection.groups.iter().flat_map(|group| &group.rows) {
            let path = runs.join(row.id()).join("metrics.jsonl");
            let points = match fs::read_to_string(&path) {
                Ok(text) => thin(&points(sweep, row, &text)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => self.of(row.id()).to_vec(),
                Err(e) => return Err(SweepError::io("read", &path)(e)),
            };
            if !points.is_empty() {
                kept.push((row.id().to_string(), points));
            }
        }
        self.0 = kept;
        Ok(())
    }

    /// The file; nothing if there are no curves.
    pub(crate) fn to_csv(&self) -> String {
        if self.0.is_empty() {
            return String::new();
        }
        let line = |run: &String, (step, score): &(f64, f64)| format!("{run},{step},{score}\n");
        let lines =
            self.0.iter().flat_map(|(run, points)| points.iter().map(move |p| line(run, p)));
        format!("{HEADER}\n{}", lines.collect::<String>())
    }
}

fn parse(line: &str) -> Option<(&str, (f64, f64))> {
    let mut parts = line.split(',');
    let (run, step, score) = (parts.next()?, parts.next()?, parts.next()?);
    let point = (step.parse().ok()?, score.parse().ok()?);
    parts.next().is_none().then_some((run, point))
}

/// The score on the test sets at every evaluation.
fn points(sweep: &Sweep, row: &Row, metrics: &str) -> Vec<(f64, f64)> {
    let name = format!("test/{}", metric(&sweep.config.select, row));
    let lines = metrics.lines().filter_map(|line| serde_json::from_str::<Json>(line).ok());
    lines.filter_map(|line| Some((line["step"].as_f64()?, line.get(&name)?.as_f64()?))).collect()
}

/// Evenly spread points, the last among them.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let every = points.len().div_ceil(MOST_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let kept = points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
    kept.map(|(_, point)| *point).collect()
}
