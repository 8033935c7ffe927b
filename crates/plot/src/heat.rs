//! Heat maps: a panel a model, columns by length and rows by depth, with the numbers in them.

use std::collections::BTreeMap;

use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

use crate::drawing::{Drawing, FAINT_INK, GRID, INK, shorten};

/// Heat maps before they are drawn.
#[derive(Debug, Clone)]
pub struct Heat {
    /// First line.
    pub title: String,
    /// Second line.
    pub label: String,
    /// Meaning of columns.
    pub across: String,
    /// Meaning of rows.
    pub up: String,
    /// A map each.
    pub panels: Vec<HeatPanel>,
}

/// The map of one model.
#[derive(Debug, Clone)]
pub struct HeatPanel {
    name: String,
    columns: Vec<String>,
    rows: Vec<String>,
    /// By place in `columns` and `rows`.
    values: BTreeMap<(usize, usize), f64>,
}

const WIDTH: f64 = 900.0;
const PANEL: (f64, f64) = (400.0, 250.0);
const ACROSS: usize = 2;
const TOP: f64 = 78.0;

impl HeatPanel {
    /// From values with their length and depth; several of one place are averaged.
    pub fn new(name: String, found: &[(Vec<String>, f64)]) -> Self {
        let list = |star: usize| {
            let mut list: Vec<String> =
                found.iter().map(|(stars, _)| stars[star].clone()).collect();
            list.sort_by(|a, b| leading(a).total_cmp(&leading(b)).then_with(|| a.cmp(b)));
            list.dedup();
            list
        };
        let (columns, rows) = (list(0), list(1));
        let mut sums: BTreeMap<(usize, usize), (f64, f64)> = BTreeMap::new();
        for (stars, value) in found {
            let column = columns.iter().position(|column| *column == stars[0]);
            let row = rows.iter().position(|row| *row == stars[1]);
            if let Some(place) = column.zip(row) {
                let sum = sums.entry(place).or_default();
                *sum = (sum.0 + value, sum.1 + 1.0);
            }
        }
        let values = sums.into_iter().map(|(place, (sum, n))| (place, sum / n)).collect();
        Self { name, columns, rows, values }
    }

    fn draw(&self, drawing: &mut Drawing, (left, top): (f64, f64)) {
        drawing.text(&shorten(&self.name, 48), (left, top + 12.0), INK, HPos::Left);
        let (left, top) = (left + 62.0, top + 28.0);
        let width = (PANEL.0 - 84.0) / self.columns.len().max(1) as f64;
        let height = (PANEL.1 - 66.0) / self.rows.len().max(1) as f64;
        for (i, j) in
            (0..self.columns.len()).flat_map(|i| (0..self.rows.len()).map(move |j| (i, j)))
        {
            let from = (left + width * i as f64, top + height * j as f64);
            let (to, middle) =
                ((from.0 + width - 1.0, from.1 + height - 1.0), from.0 + width / 2.0);
            let value = self.values.get(&(i, j)).copied();
            drawing.fill(from, to, value.map_or(GRID, shade));
            let text = value.map_or_else(|| "–".to_string(), |value| format!("{value:.2}"));
            if height >= 13.0 && width >= 30.0 {
                let ink = if value.is_some_and(|value| value < 0.52) { LIGHT } else { INK };
                drawing.text(&text, (middle, from.1 + height / 2.0), ink, HPos::Center);
            }
        }
        for (i, column) in self.columns.iter().enumerate() {
            let x = left + width * (i as f64 + 0.5);
            let y = top + PANEL.1 - 66.0 + 12.0;
            drawing.text(&shorten(column, (width / 7.4) as usize), (x, y), FAINT_INK, HPos::Center);
        }
        for (j, row) in self.rows.iter().enumerate() {
            let y = top + height * (j as f64 + 0.5);
            drawing.text(&row.replace('_', "–"), (left - 8.0, y), FAINT_INK, HPos::Right);
        }
    }
}

/// The number that a text starts with, to sort by.
fn leading(text: &str) -> f64 {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().unwrap_or(f64::INFINITY)
}

impl Heat {
    /// The picture.
    pub fn draw(self) -> Drawing {
        let lines = self.panels.len().div_ceil(ACROSS).max(1);
        let size = (WIDTH, TOP + PANEL.1 * lines as f64 + 16.0);
        let label = format!("{}; {} across, {} down", self.label, self.across, self.up);
        let mut drawing = Drawing::new(size, &self.title, &label);
        if self.panels.iter().all(|panel| panel.values.is_empty()) {
            let centre = (WIDTH / 2.0, size.1 / 2.0);
            drawing.text("nothing to show yet", centre, FAINT_INK, HPos::Center);
            return drawing;
        }
        for (i, panel) in self.panels.iter().enumerate() {
            let left = 28.0 + (PANEL.0 + 38.0) * (i % ACROSS) as f64;
            panel.draw(&mut drawing, (left, TOP + PANEL.1 * (i / ACROSS) as f64));
        }
        drawing
    }
}

const LIGHT: RGBColor = RGBColor(252, 252, 250);

/// From dark blue at 0 over green to pale yellow at 1: lightness alone tells the order.
const SHADES: [(f64, f64, f64); 5] = [
    (48.0, 30.0, 92.0),
    (44.0, 88.0, 140.0),
    (33.0, 140.0, 140.0),
    (120.0, 198.0, 110.0),
    (250.0, 236.0, 130.0),
];

fn shade(value: f64) -> RGBColor {
    let at = value.clamp(0.0, 1.0) * (SHADES.len() - 1) as f64;
    let first = (at as usize).min(SHADES.len() - 2);
    let (part, a, b) = (at - first as f64, SHADES[first], SHADES[first + 1]);
    let mix = |a: f64, b: f64| (a + (b - a) * part).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}
