//! Lines and dots between two axes, with names to the right.

use plotters::style::text_anchor::HPos;

use crate::axis::Axis;
use crate::drawing::{Drawing, FAINT_INK, GRID, INK, Point, colour, room, shorten};

/// A chart before it is drawn.
#[derive(Debug, Clone)]
pub struct Chart {
    /// First line.
    pub title: String,
    /// Second line.
    pub label: String,
    /// Meaning of the axis across.
    pub across: String,
    /// Meaning of the axis up.
    pub up: String,
    /// Whether the axis across is over powers of two.
    pub log: bool,
    /// Whether the axis up is over powers of ten.
    pub decades: bool,
    /// Points that belong together, in the order of drawing.
    pub series: Vec<Series>,
}

/// Points that belong together. Those that are not finite are left out.
#[derive(Debug, Clone)]
pub struct Series {
    /// In the list to the right, unless others speak for it.
    pub name: Option<String>,
    /// Number of its colour.
    pub place: usize,
    /// Points, in any order.
    pub points: Vec<Point>,
    /// How they are shown.
    pub stroke: Stroke,
}

/// How points are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stroke {
    /// A line.
    Line,
    /// Dots with a line between.
    Dots,
    /// Rings, for what is published.
    Rings,
}

const SIZE: (f64, f64) = (900.0, 460.0);
const TOP: f64 = 112.0;
const BOTTOM: f64 = 400.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 872.0;
/// Between two names.
const NAME_HEIGHT: f64 = 19.0;
/// Names that fit, with a line that counts the others.
const MOST_NAMES: usize = 14;
const LONGEST_NAME: usize = 30;

impl Chart {
    /// The picture.
    pub fn draw(mut self) -> Drawing {
        self.series.iter_mut().for_each(|series| series.clean(self.decades));
        let mut drawing = Drawing::new(SIZE, &self.title, &self.label);
        let names: Vec<(String, usize)> = self.names();
        let letters = names.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let width = RIGHT - LEFT - room(letters) - 34.0;
        let xs = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0));
        let ys = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
        let most = width / 64.0;
        let x = if self.log { Axis::powers(xs, most) } else { Axis::counts(xs, most) };
        let y = if self.decades { Axis::of_logarithms(ys) } else { Axis::shares(ys) };
        let panel = Panel { left: LEFT, width, top: TOP, bottom: BOTTOM, x, y };
        panel.frame(&mut drawing, &self.across, &self.up);
        if self.series.iter().all(|series| series.points.is_empty()) {
            panel.empty(&mut drawing);
        }
        for series in &self.series {
            series.draw(&panel, &mut drawing);
        }
        list(&mut drawing, &names, LEFT + width + 26.0, TOP + 8.0);
        drawing
    }

    fn names(&self) -> Vec<(String, usize)> {
        let named = self.series.iter().filter(|series| !series.points.is_empty());
        let named = named.filter_map(|s| Some((shorten(s.name.as_ref()?, LONGEST_NAME), s.place)));
        named.collect()
    }
}

impl Series {
    /// Leaves out what is no number, and sorts; `decades` takes logarithms of heights.
    fn clean(&mut self, decades: bool) {
        if decades {
            self.points.iter_mut().for_each(|(_, y)| *y = y.log10());
        }
        self.points.retain(|(x, y)| x.is_finite() && y.is_finite());
        self.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }

    fn draw(&self, panel: &Panel, drawing: &mut Drawing) {
        let points: Vec<Point> = self.points.iter().map(|&point| panel.at(point)).collect();
        let colour = colour(self.place);
        match self.stroke {
            Stroke::Line if points.len() > 1 => drawing.line(&points, colour, 1.6),
            Stroke::Line => points.iter().for_each(|&at| drawing.dot(at, 3.0, colour)),
            Stroke::Dots => {
                drawing.line(&points, colour, 2.0);
                points.iter().for_each(|&at| drawing.dot(at, 4.0, colour));
            }
            Stroke::Rings => points.iter().for_each(|&at| drawing.ring(at, 7.5, colour)),
        }
    }
}

/// Names below one another, each with its colour.
pub(crate) fn list(drawing: &mut Drawing, names: &[(String, usize)], left: f64, top: f64) {
    let (shown, hidden) = names.split_at(names.len().min(MOST_NAMES));
    for (i, (name, place)) in shown.iter().enumerate() {
        let y = top + NAME_HEIGHT * i as f64;
        drawing.dot((left, y), 4.5, colour(*place));
        drawing.text(name, (left + 11.0, y), INK, HPos::Left);
    }
    if !hidden.is_empty() {
        let y = top + NAME_HEIGHT * shown.len() as f64;
        let text = format!("and {} more", hidden.len());
        drawing.text(&text, (left + 11.0, y), FAINT_INK, HPos::Left);
    }
}

/// Two axes and the room between them.
pub(crate) struct Panel {
    pub(crate) left: f64,
    pub(crate) width: f64,
    pub(crate) top: f64,
    pub(crate) bottom: f64,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
}

impl Panel {
    pub(crate) fn at(&self, (x, y): Point) -> Point {
        (self.left + self.x.share(x) * self.width, self.height(y))
    }

    pub(crate) fn height(&self, y: f64) -> f64 {
        self.bottom - self.y.share(y) * (self.bottom - self.top)
    }

    /// Grid, numbers and what they mean.
    pub(crate) fn frame(&self, drawing: &mut Drawing, across: &str, up: &str) {
        self.levels(drawing, up);
        for (value, label) in &self.x.ticks {
            let x = self.left + self.x.share(*value) * self.width;
            drawing.line(&[(x, self.bottom), (x, self.bottom + 5.0)], FAINT_INK, 1.0);
            drawing.text(label, (x, self.bottom + 17.0), FAINT_INK, HPos::Center);
        }
        let middle = self.left + self.width / 2.0;
        drawing.text(across, (middle, self.bottom + 38.0), INK, HPos::Center);
    }

    /// The lines across, and their numbers.
    pub(crate) fn levels(&self, drawing: &mut Drawing, up: &str) {
        drawing.text(&shorten(up, 60), (self.left, self.top - 21.0), INK, HPos::Left);
        for (value, label) in &self.y.ticks {
            let y = self.height(*value);
            drawing.line(&[(self.left, y), (self.left + self.width, y)], GRID, 1.0);
            drawing.text(label, (self.left - 9.0, y), FAINT_INK, HPos::Right);
        }
        let ends = [(self.left, self.bottom), (self.left + self.width, self.bottom)];
        drawing.line(&ends, FAINT_INK, 1.0);
    }

    pub(crate) fn empty(&self, drawing: &mut Drawing) {
        let centre = (self.left + self.width / 2.0, f64::midpoint(self.top, self.bottom));
        drawing.text("nothing to show yet", centre, FAINT_INK, HPos::Center);
    }
}
