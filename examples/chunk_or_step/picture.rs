//! Tokens a second, over the length of a sequence and over the width of a head.

use crate::row::{LENGTHS, Row, WIDTHS};
use crate::ways::{HEADS, Pass, Way};
use linattn::ops::Path;
use linattn_plot::{Chart, Point, Series, Stroke};
use std::error::Error;

/// Head width of the pictures over lengths, and length of those over widths.
const WIDTH: usize = WIDTHS[2];
const TOKENS: usize = LENGTHS[4];

/// A way on a device, as the legend has it.
fn name(way: Way, path: Path) -> &'static str {
    match (way, path) {
        (Way::Whole, Path::Kernels) => "kernels, in chunks",
        (Way::Whole, Path::TensorOps) => "a loop over tokens",
        (Way::Chunks, _) => "tensor operations, in chunks",
        (Way::Steps, _) => "a call a token",
    }
}

/// Writes the pictures to a folder: two passes, each over lengths and over widths, as far as there are rows for it.
pub fn draw(rows: &[Row], path: Path, folder: &std::path::Path) -> Result<(), Box<dyn Error>> {
    for (pass, file) in [(Pass::Forward, "forward"), (Pass::Both, "backward")] {
        let chart = |label: String, across: &str, of: &dyn Fn(&Row) -> Option<f64>| Chart {
            title: format!("The gated delta rule, in chunks and token by token: {pass}"),
            label,
            across: across.into(),
            up: "thousand tokens a second".into(),
            log: true,
            decades: true,
            series: series(rows, (pass, path), of),
        };
        let label = format!("{HEADS} heads of {WIDTH} x {WIDTH}, f32");
        let over_length = chart(label, "tokens of the sequence", &|row| {
            (row.width == WIDTH).then_some(row.tokens as f64)
        });
        write(over_length, &folder.join(format!("{file}_lengths.svg")))?;
        let label = format!("{HEADS} heads, {TOKENS} tokens, f32");
        let over_width = chart(label, "width of a key and of a value", &|row| {
            (row.tokens == TOKENS).then_some(row.width as f64)
        });
        write(over_width, &folder.join(format!("{file}_widths.svg")))?;
    }
    Ok(())
}

/// Writes a picture that has a line to show.
fn write(chart: Chart, file: &std::path::Path) -> Result<(), Box<dyn Error>> {
    match chart.series.is_empty() {
        true => Ok(()),
        false => Ok(chart.draw().write_svg(file)?),
    }
}

/// A line each way, `across` of the rows that have one.
fn series(
    rows: &[Row],
    (pass, path): (Pass, Path),
    across: &dyn Fn(&Row) -> Option<f64>,
) -> Vec<Series> {
    let line = |(place, way)| {
        let of = rows.iter().filter(|row| (row.way, row.pass) == (way, pass));
        let points: Vec<Point> =
            of.filter_map(|row| Some((across(row)?, row.tokens as f64 / row.ms[0]))).collect();
        Series { name: Some(name(way, path).into()), place, points, stroke: Stroke::Dots }
    };
    Way::ALL.into_iter().enumerate().map(line).filter(|line| !line.points.is_empty()).collect()
}
