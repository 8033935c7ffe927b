//! The picture of a run: training loss and test score over steps.

use plotters::coord::combinators::IntoLogRange;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// What a run's picture shows.
#[derive(Debug, Clone)]
pub struct Curve {
    /// The run's name.
    pub title: String,
    /// Where it ended.
    pub subtitle: String,
    /// Training loss at each step it was logged at.
    pub loss: Vec<(u64, f64)>,
    /// What the score is called.
    pub score_name: String,
    /// For each test set, its name and the score, 0 to 1, at each evaluation.
    pub scores: Vec<(String, Vec<(u64, f64)>)>,
}

/// Why a picture could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("can't draw {path}: {why}")]
pub struct CurveError {
    path: PathBuf,
    why: String,
}

impl CurveError {
    fn new(path: &Path, why: impl ToString) -> Self {
        Self { path: path.into(), why: why.to_string() }
    }
}

/// Width and height of the picture, in pixels; the PNG has twice as many each way.
const SIZE: (u32, u32) = (900, 400);
/// Its own light ground, so that it reads on a dark page as well as on a white one.
const GROUND: RGBColor = RGBColor(252, 252, 250);
const INK: RGBColor = RGBColor(40, 44, 52);
const GRID: RGBColor = RGBColor(226, 226, 222);
/// Colours that people with colour blindness tell apart, after Okabe and Ito.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

impl Curve {
    /// Writes `curve.svg` and `curve.png` into `folder`, each whole or not at all.
    /// # Errors
    /// [`CurveError`] names the file.
    pub fn draw(&self, folder: &Path) -> Result<(), CurveError> {
        static FONT: Once = Once::new();
        FONT.call_once(|| {
            // A second registration is the only way this fails.
            let font = epaint_default_fonts::UBUNTU_LIGHT;
            let _registered = register_font("sans-serif", FontStyle::Normal, font);
        });
        replace(&folder.join("curve.svg"), |draft| {
            let area = SVGBackend::new(draft, SIZE).into_drawing_area();
            self.paint(&area, 1).map_err(|e| e.to_string())
        })?;
        replace(&folder.join("curve.png"), |draft| {
            let area = BitMapBackend::new(draft, (2 * SIZE.0, 2 * SIZE.1)).into_drawing_area();
            self.paint(&area, 2).map_err(|e| e.to_string())
        })
    }

    fn paint<DB: DrawingBackend>(&self, area: &Area<DB>, scale: u32) -> Painted<DB> {
        let pen = Pen { scale };
        area.fill(&GROUND)?;
        let line = |text: &str, size, y| {
            area.draw(&Text::new(text.to_string(), (pen.px(20), pen.px(y)), pen.font(size, &INK)))
        };
        line(&self.title, 17, 12)?;
        line(&self.subtitle, 13, 34)?;
        let (left, right) = area
            .margin(pen.px(52), pen.px(8), pen.px(8), pen.px(16))
            .split_horizontally((50).percent_width());
        self.paint_loss(&left, &pen)?;
        self.paint_scores(&right, &pen)?;
        area.present()
    }

    fn paint_loss<DB: DrawingBackend>(&self, area: &Area<DB>, pen: &Pen) -> Painted<DB> {
        let raw = numbers(&self.loss);
        let Some((low, high)) = extent(raw.iter().map(|p| p.1)) else {
            return pen.nothing_yet(area, "training loss");
        };
        let steps = 0..raw.iter().map(|p| p.0).max().unwrap_or(0).max(1);
        let series = [
            Line { points: raw.clone(), colour: COLOURS[0].mix(0.35), width: 1 },
            Line { points: smooth(&raw), colour: COLOURS[0].mix(1.0), width: 2 },
        ];
        if low > 0.0 && high / low > 30.0 {
            let y = (low * 0.8..high * 1.25).log_scale();
            pen.panel(area, "training loss", steps, y, &log_label, &series)
        } else {
            let room = ((high - low) * 0.05).max(high.abs() * 1e-3).max(1e-9);
            let y = low - room..high + room;
            pen.panel(area, "training loss", steps, y, &|v: &f64| format!("{v:.2}"), &series)
        }
    }

    fn paint_scores<DB: DrawingBackend>(&self, area: &Area<DB>, pen: &Pen) -> Painted<DB> {
        let sets: Vec<(&str, Vec<(u64, f64)>)> =
            self.scores.iter().map(|(name, points)| (name.as_str(), numbers(points))).collect();
        let last = sets.iter().flat_map(|(_, points)| points).map(|p| p.0).max();
        let Some(last) = last else { return pen.nothing_yet(area, &self.score_name) };
        let colour = |i: usize| COLOURS[i % COLOURS.len()];
        let series: Vec<Line> = sets
            .iter()
            .enumerate()
            .map(|(i, (_, points))| Line {
                points: points.clone(),
                colour: colour(i).mix(1.0),
                width: 2,
            })
            .collect();
        let label = |v: &f64| format!("{v:.1}");
        pen.panel(area, &self.score_name, 0..last.max(1), 0.0..1.02, &label, &series)?;
        if sets.len() > 1 {
            for (i, (name, _)) in sets.iter().enumerate() {
                let at = (pen.px(64), pen.px(30 + 17 * i as i32));
                let name = name.strip_prefix("test/").unwrap_or(name).to_string();
                area.draw(&Text::new(name, at, pen.font(13, &colour(i))))?;
            }
        }
        Ok(())
    }
}

type Area<DB> = DrawingArea<DB, plotters::coord::Shift>;
type Painted<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

struct Line {
    points: Vec<(u64, f64)>,
    colour: RGBAColor,
    width: u32,
}

/// Sizes for one resolution.
struct Pen {
    scale: u32,
}

impl Pen {
    fn px(&self, pixels: i32) -> i32 {
        pixels * self.scale as i32
    }

    fn font<'a>(&self, size: i32, colour: &'a RGBColor) -> TextStyle<'a> {
        ("sans-serif", self.px(size)).into_font().color(colour)
    }

    fn nothing_yet<DB: DrawingBackend>(&self, area: &Area<DB>, what: &str) -> Painted<DB> {
        let text = format!("no {what} yet");
        area.draw(&Text::new(text, (self.px(60), self.px(120)), self.font(14, &INK)))
    }

    fn panel<DB: DrawingBackend, Y>(
        &self,
        area: &Area<DB>,
        title: &str,
        steps: Range<u64>,
        y: Y,
        label: &dyn Fn(&f64) -> String,
        series: &[Line],
    ) -> Painted<DB>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .margin(self.px(6))
            .x_label_area_size(self.px(42))
            .y_label_area_size(self.px(52))
            .caption(title, self.font(14, &INK))
            .build_cartesian_2d(steps, y)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(GRID)
            .light_line_style(GROUND)
            .axis_style(INK.mix(0.5))
            .x_labels(6)
            .y_labels(6)
            .x_desc("step")
            .x_label_formatter(&step_label)
            .y_label_formatter(label)
            .label_style(self.font(13, &INK))
            .axis_desc_style(self.font(13, &INK))
            .draw()?;
        for line in series {
            let style = line.colour.stroke_width(line.width * self.scale);
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
            if let [point] = line.points[..] {
                chart.draw_series([Circle::new(point, self.px(2), line.colour.filled())])?;
            }
        }
        Ok(())
    }
}

/// Writes under another name first.
fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), CurveError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The ending stays: the bitmap backend goes by it.
    let draft = path.with_file_name(format!("unfinished-{name}"));
    write(&draft).map_err(|why| CurveError::new(path, why))?;
    std::fs::rename(&draft, path).map_err(|e| CurveError::new(path, e))
}

/// The points that are numbers.
fn numbers(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    points.iter().copied().filter(|p| p.1.is_finite()).collect()
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |found, v| match found {
        None => Some((v, v)),
        Some((low, high)) => Some((f64::min(low, v), f64::max(high, v))),
    })
}

/// A running mean over about a thirtieth of the run, the same at both ends.
fn smooth(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let reach = points.len() / 60;
    (0..points.len())
        .map(|i| {
            let reach = reach.min(i).min(points.len() - 1 - i);
            let window = &points[i - reach..=i + reach];
            (points[i].0, window.iter().map(|p| p.1).sum::<f64>() / window.len() as f64)
        })
        .collect()
}

fn step_label(step: &u64) -> String {
    match *step {
        0..10_000 => step.to_string(),
        10_000..10_000_000 => format!("{}k", step / 1000),
        _ => format!("{}M", step / 1_000_000),
    }
}

fn log_label(value: &f64) -> String {
    match *value {
        v if v >= 0.01 => format!("{v}"),
        v => format!("{v:.0e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(loss: Vec<(u64, f64)>, sets: usize) -> Curve {
        let scores = (0..sets).map(|i| (format!("test/{i}"), loss.clone())).collect();
        Curve {
            title: "a run".into(),
            subtitle: "its end".into(),
            loss,
            score_name: "accuracy".into(),
            scores,
        }
    }

    #[test]
    fn any_numbers_give_two_pictures() {
        let cases = [
            vec![],
            vec![(5, 1.0)],
            vec![(1, 0.0), (2, 0.0)],
            vec![(1, f64::NAN), (2, 3.0), (3, f64::INFINITY)],
            (0..500).map(|i| (i, 7.0 * 0.97f64.powi(i as i32) + 1e-3)).collect(),
            vec![(1, -1.0), (u64::MAX / 2, 1.0)],
        ];
        for loss in cases {
            for sets in [0, 1, 9] {
                let folder = tempfile::tempdir().unwrap();
                curve(loss.clone(), sets).draw(folder.path()).unwrap();
                let mut files: Vec<String> = std::fs::read_dir(folder.path())
                    .unwrap()
                    .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
                    .collect();
                files.sort();
                assert_eq!(files, ["curve.png", "curve.svg"]);
            }
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = curve(vec![], 0).draw(Path::new("/absent/folder")).unwrap_err().to_string();
        assert!(error.contains("/absent/folder/curve.svg"), "{error}");
    }

    #[test]
    fn smoothing_keeps_both_ends_and_the_mean_of_a_line() {
        let line: Vec<(u64, f64)> = (0..600).map(|i| (i, i as f64)).collect();
        assert_eq!(smooth(&line), line);
    }
}
