//! Bars side by side: a group a column, a bar a line of the table, a cross where it has no value.

use plotters::style::text_anchor::HPos;

use crate::axis::Axis;
use crate::chart::{Panel, list};
use crate::drawing::{Drawing, INK, Point, colour, room, shorten};

/// A name, its values and the published ones, one for each column.
pub type BarLine = (String, Vec<Option<f64>>, Vec<Option<f64>>);

/// Bars before they are drawn.
#[derive(Debug, Clone)]
pub struct Bars {
    /// First line.
    pub title: String,
    /// Second line.
    pub label: String,
    /// Meaning of a bar's height.
    pub up: String,
    /// A group of bars each.
    pub columns: Vec<String>,
    /// A bar in every group each.
    pub lines: Vec<BarLine>,
}

const SIZE: (f64, f64) = (900.0, 440.0);

/// Height of a bar for a zero, which is not nothing.
const THINNEST: f64 = 1.6;

/// A mark for a value that is not there.
fn cross(drawing: &mut Drawing, (x, y): Point, place: usize) {
    let arm = 3.2;
    for (left, right) in [(y - arm, y + arm), (y + arm, y - arm)] {
        drawing.line(&[(x - arm, left), (x + arm, right)], colour(place), 1.6);
    }
}

impl Bars {
    /// The picture.
    pub fn draw(self) -> Drawing {
        let mut drawing = Drawing::new(SIZE, &self.title, &self.label);
        let short = |(i, line): (usize, &BarLine)| (shorten(&line.0, 30), i);
        let names: Vec<(String, usize)> = self.lines.iter().enumerate().map(short).collect();
        let letters = names.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let width = 798.0 - room(letters) - 34.0;
        let values = self.lines.iter().flat_map(|(_, ours, theirs)| ours.iter().chain(theirs));
        let y = Axis::shares(values.flatten().copied());
        let x = Axis::counts([1.0].into_iter(), 1.0);
        let panel = Panel { left: 74.0, width, top: 112.0, bottom: 390.0, x, y };
        panel.levels(&mut drawing, &self.up);
        self.columns(&panel, &mut drawing);
        if self.lines.iter().all(|(_, ours, _)| ours.iter().all(Option::is_none)) {
            panel.empty(&mut drawing);
        }
        list(&mut drawing, &names, 74.0 + width + 26.0, 120.0);
        drawing
    }

    fn columns(&self, panel: &Panel, drawing: &mut Drawing) {
        let slot = panel.width / self.columns.len().max(1) as f64;
        let bar = 0.8 * slot / self.lines.len().max(1) as f64;
        for (i, column) in self.columns.iter().enumerate() {
            let left = panel.left + slot * (i as f64 + 0.1);
            for (j, (_, ours, theirs)) in self.lines.iter().enumerate() {
                let (from, to) = (left + bar * j as f64, left + bar * (j as f64 + 0.88));
                match ours[i] {
                    Some(value) => {
                        let (top, zero) = (panel.height(value), panel.height(0.0));
                        let (top, bottom) = (top.min(zero - THINNEST), top.max(zero));
                        drawing.fill((from, top), (to, bottom), colour(j));
                    }
                    None => cross(drawing, ((from + to) / 2.0, panel.height(0.0) - 7.0), j),
                }
                if let Some(value) = theirs[i] {
                    let y = panel.height(value);
                    drawing.line(&[(from - 1.0, y), (to + 1.0, y)], INK, 2.6);
                }
            }
            let letters = (slot / 7.4) as usize;
            let middle = panel.left + slot * (i as f64 + 0.5);
            let name = shorten(column, letters.max(2));
            drawing.text(&name, (middle, panel.bottom + 18.0), INK, HPos::Center);
        }
    }
}
