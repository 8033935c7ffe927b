//! The error over the number of writes.

use linattn_plot::{Chart, Drawing, Point, Series, Stroke};

/// A name and points, for each line in the order of drawing.
pub fn picture(lines: Vec<(String, Vec<Point>)>, label: String) -> Drawing {
    let series = lines.into_iter().enumerate().map(|(place, (name, points))| Series {
        name: Some(name),
        place,
        points,
        stroke: Stroke::Dots,
    });
    let chart = Chart {
        title: "Hebb's rule clogs, the delta rule forgets".into(),
        label,
        across: "writes".into(),
        up: "|kS − v|² / |v|², mean over all keys written".into(),
        log: false,
        decades: false,
        series: series.collect(),
    };
    chart.draw()
}
