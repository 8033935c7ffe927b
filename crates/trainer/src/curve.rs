//! The learning curve of a run: training loss and test scores over steps, as a picture.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// Contents of the picture. Points that are not finite numbers are left out.
#[derive(Debug, Clone)]
pub struct Curve {
    /// First line: as a rule the run's name.
    pub title: String,
    /// Second line: where the run ended.
    pub subtitle: String,
    /// Training loss, by step. Where it spans more than a decade and a half the scale is
    /// logarithmic, and a loss of zero or less is left out.
    pub loss: Vec<(u64, f64)>,
    /// Name of the score.
    pub score_name: String,
    /// The score, 0 to 1, by step, for each test set. A name may start with `test/`.
    pub scores: Vec<(String, Vec<(u64, f64)>)>,
}

/// A picture that could not be drawn or written.
#[derive(Debug, thiserror::Error)]
#[error("can't write the learning curve {path}: {source}")]
pub struct CurveError {
    path: PathBuf,
    source: BoxedError,
}

type BoxedError = Box<dyn Error + Send + Sync>;
type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;
type Point = (f64, f64);

/// Width and height, in pixels of a page.
const SIZE: (i32, i32) = (900, 420);
/// plotters places points on whole pixels. Drawn this much larger, lines and letters fall on quarters.
const FINE: i32 = 4;
/// Pixels that one side of a PNG pixel takes from the drawing: the PNG is made for dense screens.
const SHRINK: i32 = 2;

/// The picture has a ground of its own, so that a dark page does not swallow its ink.
const GROUND: RGBColor = RGBColor(252, 252, 250);
const FRAME: RGBColor = RGBColor(222, 222, 218);
const GRID: RGBColor = RGBColor(230, 230, 226);
const AXIS: RGBColor = RGBColor(150, 150, 150);
const INK: RGBColor = RGBColor(33, 37, 41);
const FAINT_INK: RGBColor = RGBColor(92, 99, 106);
/// Okabe and Ito's colours, which colour-blind readers tell apart; without yellow, too pale here.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];
/// The first colour, mixed with much of the ground: overlapping strokes stay one shade.
const RAW: RGBColor = RGBColor(172, 207, 227);

/// Height of letters, in pixels of a page.
const LARGE: f64 = 19.0;
const SMALL: f64 = 13.5;

/// Where the panels are: two of one width, numbers to their left, names of test sets to the right.
const TOP: f64 = 112.0;
const BOTTOM: f64 = 364.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 872.0;
const GAP: f64 = 74.0;

/// Between two names of test sets.
const NAME_HEIGHT: f64 = 18.0;
/// Names that fit between `TOP` and `BOTTOM`, with a line that counts the others.
const MOST_NAMES: usize = 13;
const LONGEST_NAME: usize = 18;

/// A loss beyond this is drawn as little as an infinite one.
const HUGE: f64 = 1e30;

impl Curve {
    /// Writes `curve.svg`, and `curve.png` at twice the pixels, into `folder`. Each takes its name
    /// only once it is whole.
    /// # Errors
    /// [`CurveError`] names the file.
    pub fn draw(&self, folder: &Path) -> Result<(), CurveError> {
        install_font();
        replace(&folder.join("curve.svg"), |draft| Ok(std::fs::write(draft, self.svg()?)?))?;
        replace(&folder.join("curve.png"), |draft| self.write_png(draft))
    }

    fn svg(&self) -> Result<String, BoxedError> {
        let (width, height) = fine_size();
        let mut text = String::new();
        let canvas = SVGBackend::with_string(&mut text, (width, height)).into_drawing_area();
        self.paint(Page { canvas, pixels: false })?;
        let drawn = format!(r#"width="{width}" height="{height}""#);
        let shown = format!(r#"width="{}" height="{}""#, SIZE.0, SIZE.1);
        Ok(text.replacen(&drawn, &shown, 1)) // `viewBox` keeps the fine numbers
    }

    fn write_png(&self, path: &Path) -> Result<(), BoxedError> {
        let (width, height) = fine_size();
        let mut pixels = vec![0; 3 * (width * height) as usize];
        let canvas = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        self.paint(Page { canvas, pixels: true })?;
        let size = (width / SHRINK as u32, height / SHRINK as u32);
        let mut file = BitMapBackend::new(path, size);
        file.blit_bitmap((0, 0), size, &shrink(&pixels, width as usize))?;
        Ok(file.present()?)
    }

    fn paint<DB: DrawingBackend>(&self, page: Page<DB>) -> Drawn<DB> {
        page.canvas.fill(&GROUND)?;
        page.frame()?;
        page.write(&shorten(&self.title, 80), (28.0, 30.0), LARGE, INK, HPos::Left)?;
        page.write(&shorten(&self.subtitle, 115), (28.0, 55.0), SMALL, FAINT_INK, HPos::Left)?;
        let sets: Vec<Set> = self
            .scores
            .iter()
            .enumerate()
            .map(|(index, (name, points))| Set::new(index, name, points))
            .collect();
        let names = names(&sets);
        let width = (RIGHT - names_width(&names) - LEFT - GAP) / 2.0;
        let steps = steps_axis(self.last_step(), width);
        self.paint_loss(&page, Place { left: LEFT, width }, steps.clone())?;
        let place = Place { left: LEFT + width + GAP, width };
        self.paint_scores(&page, place, steps, &sets, &names)?;
        page.canvas.present()
    }

    /// Both panels end at the same step.
    fn last_step(&self) -> f64 {
        let scores = self.scores.iter().flat_map(|(_, points)| points);
        self.loss.iter().chain(scores).map(|p| p.0).max().unwrap_or(0).max(1) as f64
    }

    fn paint_loss<DB: DrawingBackend>(&self, page: &Page<DB>, place: Place, x: Axis) -> Drawn<DB> {
        let mut loss = numbers(&self.loss);
        let log = spans_decades(&loss);
        if log {
            loss.retain(|p| p.1 > 0.0);
            loss.iter_mut().for_each(|p| p.1 = p.1.log10());
        }
        let y = if log { log_axis(&loss) } else { linear_axis(&loss) };
        let panel = Panel { page, place, x, y };
        let heading = if log { "training loss, log scale" } else { "training loss" };
        panel.paint(heading, loss.is_empty())?;
        panel.trace(&envelope(&loss), RAW, 1.0)?;
        panel.trace(&smooth(&means(&loss)), COLOURS[0], 2.2)
    }

    fn paint_scores<DB: DrawingBackend>(
        &self,
        page: &Page<DB>,
        place: Place,
        x: Axis,
        sets: &[Set],
        names: &[Name],
    ) -> Drawn<DB> {
        let values: Vec<Point> = sets.iter().flat_map(|set| set.points.clone()).collect();
        let panel = Panel { page, place, x, y: score_axis(&values) };
        panel.paint(&self.score_name, values.is_empty())?;
        for set in sets.iter().rev() {
            panel.trace(&envelope(&set.points), set.colour, 2.0)?;
            panel.dots(&set.points, set.colour)?;
        }
        match names {
            [only] if sets.len() == 1 => panel.name_end(only),
            _ => panel.name_ends(names),
        }
    }
}

/// One test set.
struct Set {
    name: String,
    points: Vec<Point>,
    colour: RGBColor,
}

impl Set {
    fn new(index: usize, name: &str, points: &[(u64, f64)]) -> Self {
        let name = name.strip_prefix("test/").unwrap_or(name);
        Self {
            name: shorten(name, LONGEST_NAME),
            points: numbers(points),
            colour: COLOURS[index % COLOURS.len()],
        }
    }
}

/// Label beside the end of a line.
struct Name {
    text: String,
    end: Point,
    colour: RGBColor,
}

/// Names and last scores of the sets, best first. One set alone needs no name.
fn names(sets: &[Set]) -> Vec<Name> {
    let alone = sets.len() == 1;
    let name = |set: &Set| {
        let end = *set.points.last()?;
        let score = format!("{:.3}", end.1);
        let text = if alone { score } else { format!("{}  {score}", set.name) };
        Some(Name { text, end, colour: set.colour })
    };
    let mut names: Vec<Name> = sets.iter().filter_map(name).collect();
    names.sort_by(|a, b| b.end.1.total_cmp(&a.end.1));
    names
}

/// Room for the names: letters differ from one reader's font to another's.
fn names_width(names: &[Name]) -> f64 {
    let longest = names.iter().take(MOST_NAMES).map(|name| name.text.chars().count()).max();
    longest.map_or(0.0, |letters| 18.0 + 7.4 * letters as f64)
}

/// A range of values, with the places that carry a number.
#[derive(Clone)]
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// The share of the way from `low` to `high`.
    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// Drawing surface. Places are in pixels of a page, a text's is the middle of its height.
struct Page<DB: DrawingBackend> {
    canvas: DrawingArea<DB, Shift>,
    /// Whether plotters makes the pixels itself.
    pixels: bool,
}

impl<DB: DrawingBackend> Page<DB> {
    fn frame(&self) -> Drawn<DB> {
        let (right, bottom) = (f64::from(SIZE.0) - 0.5, f64::from(SIZE.1) - 0.5);
        let corners = [(0.5, 0.5), (right, 0.5), (right, bottom), (0.5, bottom), (0.5, 0.5)];
        self.line(&corners, FRAME, 1.0)
    }

    fn line(&self, points: &[Point], colour: RGBColor, width: f64) -> Drawn<DB> {
        let points: Vec<(i32, i32)> = points.iter().map(|&p| fine(p)).collect();
        let width = (width * f64::from(FINE)).round() as u32;
        match self.pixels {
            true => self.joints(&points, colour, width),
            false => self.canvas.draw(&PathElement::new(points, colour.stroke_width(width))),
        }
    }

    /// A line as single strokes with round joints: where a line turns sharply, plotters' own bitmap
    /// of it has long spikes.
    fn joints(&self, points: &[(i32, i32)], colour: RGBColor, width: u32) -> Drawn<DB> {
        for pair in points.windows(2) {
            self.canvas.draw(&PathElement::new(pair.to_vec(), colour.stroke_width(width)))?;
        }
        for &joint in points.iter().take(points.len() - 1).skip(1) {
            self.canvas.draw(&Circle::new(joint, width / 2, colour.filled()))?;
        }
        Ok(())
    }

    fn dot(&self, centre: Point, radius: f64, colour: RGBColor) -> Drawn<DB> {
        let radius = (radius * f64::from(FINE)).round() as i32;
        self.canvas.draw(&Circle::new(fine(centre), radius, colour.filled()))
    }

    fn write(&self, text: &str, at: Point, size: f64, colour: RGBColor, anchor: HPos) -> Drawn<DB> {
        // plotters divides by 1.24 what it calls a size, to get the size that SVG means, and centres
        // on the middle of small letters.
        let lower = if self.pixels { 0.16 } else { 0.1 } * size;
        let font = ("sans-serif", size * 1.24 * f64::from(FINE)).into_font().color(&colour);
        let style = font.pos(Pos::new(anchor, VPos::Center));
        self.canvas.draw(&Text::new(text, fine((at.0, at.1 + lower)), style))
    }
}

/// Left side and width of a panel.
#[derive(Clone, Copy)]
struct Place {
    left: f64,
    width: f64,
}

/// A pair of axes on the page.
struct Panel<'a, DB: DrawingBackend> {
    page: &'a Page<DB>,
    place: Place,
    x: Axis,
    y: Axis,
}

impl<DB: DrawingBackend> Panel<'_, DB> {
    fn at(&self, (x, y): Point) -> Point {
        let across = self.place.left + self.x.share(x) * self.place.width;
        (across, BOTTOM - self.y.share(y) * (BOTTOM - TOP))
    }

    fn paint(&self, heading: &str, empty: bool) -> Drawn<DB> {
        let Place { left, width } = self.place;
        self.page.write(&shorten(heading, 40), (left, TOP - 19.0), SMALL, INK, HPos::Left)?;
        self.paint_scales()?;
        let middle = left + width / 2.0;
        self.page.write("step", (middle, BOTTOM + 36.0), SMALL, INK, HPos::Center)?;
        if empty {
            let centre = (middle, f64::midpoint(TOP, BOTTOM));
            self.page.write("nothing to show yet", centre, SMALL, FAINT_INK, HPos::Center)?;
        }
        Ok(())
    }

    fn paint_scales(&self) -> Drawn<DB> {
        let Place { left, width } = self.place;
        for (value, label) in &self.y.ticks {
            let y = self.at((self.x.low, *value)).1;
            self.page.line(&[(left, y), (left + width, y)], GRID, 1.0)?;
            self.page.write(label, (left - 8.0, y), SMALL, FAINT_INK, HPos::Right)?;
        }
        for (value, label) in &self.x.ticks {
            let x = self.at((*value, self.y.low)).0;
            self.page.line(&[(x, BOTTOM), (x, BOTTOM + 4.0)], AXIS, 1.0)?;
            self.page.write(label, (x, BOTTOM + 15.0), SMALL, FAINT_INK, HPos::Center)?;
        }
        self.page.line(&[(left, BOTTOM), (left + width, BOTTOM)], AXIS, 1.0)
    }

    fn trace(&self, points: &[Point], colour: RGBColor, width: f64) -> Drawn<DB> {
        let points: Vec<Point> = points.iter().map(|&p| self.at(p)).collect();
        match points[..] {
            [] => Ok(()),
            [only] => self.page.dot(only, 2.5, colour),
            _ => self.page.line(&points, colour, width),
        }
    }

    /// Marks each evaluation where there are few, and the last one always.
    fn dots(&self, points: &[Point], colour: RGBColor) -> Drawn<DB> {
        let first = if points.len() <= 30 { 0 } else { points.len() - 1 };
        points[first..].iter().try_for_each(|&p| self.page.dot(self.at(p), 2.8, colour))
    }

    /// Writes beside a line that is the only one.
    fn name_end(&self, name: &Name) -> Drawn<DB> {
        let end = self.at(name.end);
        self.page.write(&name.text, (end.0 + 8.0, end.1), SMALL, INK, HPos::Left)
    }

    /// Writes each name at the height of its line's end, moved where two would overlap.
    fn name_ends(&self, names: &[Name]) -> Drawn<DB> {
        let (shown, hidden) = names.split_at(names.len().min(MOST_NAMES));
        let mut wanted: Vec<f64> = shown.iter().map(|name| self.at(name.end).1).collect();
        wanted.extend((!hidden.is_empty()).then_some(BOTTOM));
        let heights = spread(&wanted);
        let right = self.place.left + self.place.width + 14.0;
        for (name, &y) in shown.iter().zip(&heights) {
            let end = self.at(name.end);
            self.page.line(&[(end.0 + 5.0, end.1), (right, y)], name.colour, 1.0)?;
            self.page.dot((right, y), 3.5, name.colour)?;
            self.page.write(&name.text, (right + 8.0, y), SMALL, INK, HPos::Left)?;
        }
        match (hidden.len(), heights.last()) {
            (1.., Some(&y)) => {
                let text = format!("and {} more", hidden.len());
                self.page.write(&text, (right + 8.0, y), SMALL, FAINT_INK, HPos::Left)
            }
            _ => Ok(()),
        }
    }
}

/// Heights at least a name apart and as near to `wanted`, which rises, as one pass each way brings
/// them, between `TOP` and `BOTTOM`.
fn spread(wanted: &[f64]) -> Vec<f64> {
    let mut heights = wanted.to_vec();
    let mut free = TOP;
    for height in &mut heights {
        *height = height.max(free);
        free = *height + NAME_HEIGHT;
    }
    let mut free = BOTTOM;
    for height in heights.iter_mut().rev() {
        *height = height.min(free);
        free = *height - NAME_HEIGHT;
    }
    heights
}

fn steps_axis(last: f64, width: f64) -> Axis {
    let step = nice_step(last * 52.0 / width).max(1.0); // a label is up to 40 pixels wide
    let ticks = multiples(0.0, last, step).into_iter().map(|v| (v, count_label(v))).collect();
    Axis { low: 0.0, high: last, ticks }
}

fn score_axis(values: &[Point]) -> Axis {
    let (low, high) = extent(values);
    let (low, high) = (low.min(0.0), high.max(1.0));
    let step = nice_step((high - low) / 5.0);
    Axis { low, high: high + 0.02 * (high - low), ticks: labelled(low, high, step) }
}

fn linear_axis(values: &[Point]) -> Axis {
    let (low, high) = extent(values);
    let room = match (0.06 * (high - low)).max(0.02 * high.abs()) {
        0.0 => 1.0, // only zeros
        room => room,
    };
    let high = high + room;
    // A loss has a natural end at zero: show it where it is near.
    let low = if low >= 0.0 && low < 0.4 * high { 0.0 } else { low - room };
    Axis { low, high, ticks: labelled(low, high, nice_step((high - low) / 5.0)) }
}

/// An axis over decimal logarithms: numbers at the powers of ten, and between them where these are
/// few.
fn log_axis(logs: &[Point]) -> Axis {
    let (low, high) = extent(logs);
    let room = 0.04 * (high - low);
    let (low, high) = (low - room, high + room);
    let every = ((high - low) / 6.0).ceil().max(1.0);
    let powers = multiples(low, high, every);
    let between: &[f64] = if powers.len() < 4 { &[1.0, 3.0] } else { &[1.0] };
    let ticks = multiples(low.floor(), high, every)
        .into_iter()
        .flat_map(|power| between.iter().map(move |&digit| (power, digit)))
        .map(|(power, digit)| (power + digit.log10(), power_label(power, digit)))
        .filter(|(value, _)| (low..=high).contains(value))
        .collect();
    Axis { low, high, ticks }
}

/// 1, 2 or 5 times a power of ten, `least` or the next above it.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let digits = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= least * 0.999);
    digits.unwrap_or(10.0) * power
}

fn multiples(low: f64, high: f64, step: f64) -> Vec<f64> {
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    (0..=(last - first).clamp(0.0, 50.0) as u32)
        .map(|i| (first + f64::from(i)) * step)
        .filter(|v| (low - step * 1e-6..=high + step * 1e-6).contains(v))
        .collect()
}

/// Multiples of `step`, with as many decimals as tell them apart.
fn labelled(low: f64, high: f64, step: f64) -> Vec<(f64, String)> {
    let digits = -step.log10().floor();
    let label = |v: f64| match digits {
        _ if v.abs() < step / 2.0 => "0".to_string(),
        d if d > 5.0 || low.abs().max(high.abs()) >= 1e5 => format!("{v:.1e}"),
        d => format!("{v:.*}", d.max(0.0) as usize),
    };
    multiples(low, high, step).into_iter().map(|v| (v, label(v))).collect()
}

fn power_label(power: f64, digit: f64) -> String {
    match power {
        -3.0..=4.0 => format!("{:.*}", (-power).max(0.0) as usize, digit * 10f64.powf(power)),
        _ => format!("{digit}e{power}"),
    }
}

/// 800, 1.5k, 20k, 3M.
fn count_label(count: f64) -> String {
    match count {
        ..1e4 => format!("{count}"),
        ..1e6 => format!("{}k", count / 1e3),
        ..1e9 => format!("{}M", count / 1e6),
        _ => format!("{count:.0e}"),
    }
}

/// The points that can be drawn, by step.
fn numbers(points: &[(u64, f64)]) -> Vec<Point> {
    let drawable = points.iter().filter(|p| p.1.abs() < HUGE); // false for NaN
    let mut points: Vec<Point> = drawable.map(|&(step, value)| (step as f64, value)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Least and greatest value; 0 and 1 where there is none.
fn extent(points: &[Point]) -> (f64, f64) {
    let values = || points.iter().map(|p| p.1);
    values().reduce(f64::min).zip(values().reduce(f64::max)).unwrap_or((0.0, 1.0))
}

/// Whether the losses above zero span more than a decade and a half.
fn spans_decades(points: &[Point]) -> bool {
    let positive: Vec<Point> = points.iter().copied().filter(|p| p.1 > 0.0).collect();
    let (low, high) = extent(&positive);
    low > 0.0 && high / low > 10f64.powf(1.5)
}

/// Lines of more points than this gain nothing on a panel this wide.
const MOST_POINTS: usize = 400;

/// Means of groups of neighbours, so that there are at most three times `MOST_POINTS`.
fn means(points: &[Point]) -> Vec<Point> {
    let group = points.len().div_ceil(3 * MOST_POINTS).max(1);
    let mean = |group: &[Point]| {
        let count = group.len() as f64;
        let (x, y) = group.iter().fold((0.0, 0.0), |sum, p| (sum.0 + p.0, sum.1 + p.1));
        (x / count, y / count)
    };
    points.chunks(group).map(mean).collect()
}

/// At each point the height of a straight line through its neighbours, a thirtieth of all each way:
/// unlike a mean, it does not lag where the loss falls, nor bend at the ends.
fn smooth(points: &[Point]) -> Vec<Point> {
    let reach = points.len() / 30;
    let near = |i: usize| i.saturating_sub(reach)..(i + reach + 1).min(points.len());
    (0..points.len()).map(|i| (points[i].0, straight(points, i, near(i)))).collect()
}

/// Height at point `i` of the line that fits points `near` it best, closer ones counting more.
fn straight(points: &[Point], i: usize, near: Range<usize>) -> f64 {
    let reach = near.len() as f64;
    let [mut n, mut x, mut y, mut xx, mut xy] = [0.0; 5];
    for j in near {
        let weight = 1.0 - i.abs_diff(j) as f64 / reach;
        let (dx, value) = (points[j].0 - points[i].0, points[j].1);
        n += weight;
        x += weight * dx;
        y += weight * value;
        xx += weight * dx * dx;
        xy += weight * dx * value;
    }
    let spread = n * xx - x * x;
    match spread > 1e-9 * n * xx {
        true => (y * xx - x * xy) / spread,
        false => y / n, // all at one step
    }
}

/// Least and greatest of each group of neighbours: fewer points, no spike lost.
fn envelope(points: &[Point]) -> Vec<Point> {
    let group = points.len().div_ceil(MOST_POINTS);
    if group < 3 {
        return points.to_vec();
    }
    points.chunks(group).flat_map(ends_of_range).collect()
}

/// Where a group is least and where it is greatest, in their order.
fn ends_of_range(group: &[Point]) -> Vec<Point> {
    let by_value = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
    let mut ends: Vec<Point> = group
        .iter()
        .min_by(by_value)
        .into_iter()
        .chain(group.iter().max_by(by_value))
        .copied()
        .collect();
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    ends
}

/// The text on one line, without control characters, cut after `most` letters.
fn shorten(text: &str, most: usize) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    match text.chars().count() {
        letters if letters > most => text.chars().map(clean).take(most - 1).chain(['…']).collect(),
        _ => text.chars().map(clean).collect(),
    }
}

fn fine((x, y): Point) -> (i32, i32) {
    let scale = f64::from(FINE);
    ((x * scale).round() as i32, (y * scale).round() as i32)
}

fn fine_size() -> (u32, u32) {
    ((SIZE.0 * FINE) as u32, (SIZE.1 * FINE) as u32)
}

/// Means of squares of `SHRINK` pixels a side.
fn shrink(pixels: &[u8], width: usize) -> Vec<u8> {
    let side = SHRINK as usize;
    let mean = |row: usize, column: usize, channel: usize| {
        let of = |(dy, dx)| {
            let at = (row * side + dy) * width + column * side + dx;
            u32::from(pixels[3 * at + channel])
        };
        let square = (0..side).flat_map(|dy| (0..side).map(move |dx| (dy, dx)));
        (square.map(of).sum::<u32>() / (side * side) as u32) as u8
    };
    let (rows, columns) = (pixels.len() / (3 * width * side), width / side);
    (0..rows)
        .flat_map(|row| {
            (0..columns).flat_map(move |c| (0..3).map(move |channel| (row, c, channel)))
        })
        .map(|(row, column, channel)| mean(row, column, channel))
        .collect()
}

/// Letters for the PNG; an SVG takes those of whoever looks at it.
fn install_font() {
    static FONT: Once = Once::new();
    FONT.call_once(|| {
        let font = epaint_default_fonts::UBUNTU_LIGHT;
        let known = register_font("sans-serif", FontStyle::Normal, font);
        debug_assert!(known.is_ok(), "the font comes with the program");
    });
}

/// Has `write` make a file beside `path`, then gives it that name.
fn replace(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), BoxedError>,
) -> Result<(), CurveError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The name keeps its ending: by it the format is chosen.
    let draft = path.with_file_name(format!(".unfinished-{name}"));
    let done = write(&draft).and_then(|()| Ok(std::fs::rename(&draft, path)?));
    done.map_err(|source| {
        let _nothing_left = std::fs::remove_file(&draft);
        CurveError { path: path.into(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABELS: usize = 12;

    fn curve(loss: Vec<(u64, f64)>, sets: usize) -> Curve {
        let scores = (0..sets).map(|i| (format!("test/set {i}"), loss.clone())).collect();
        let (title, subtitle) = ("a <run> & its \"name\"\u{1b}".into(), String::new());
        Curve { title, subtitle, loss, score_name: "accuracy".into(), scores }
    }

    fn falling(points: u64) -> Vec<(u64, f64)> {
        (1..=points).map(|i| (10 * i, 7.0 * (-(i as f64) / 100.0).exp() + 0.01)).collect()
    }

    #[test]
    fn any_series_gives_two_whole_pictures_and_no_other_file() {
        let series = [
            vec![],
            vec![(0, 0.5)],
            vec![(1, f64::NAN), (2, 3.0), (3, f64::INFINITY), (4, 0.0), (5, -1.0)],
            vec![(1, f64::NAN)],
            vec![(1, 0.0), (2, 0.0)],
            vec![(7, 2.5); 40],
            vec![(1, 1e-300), (2, 1e300), (u64::MAX, 1e29), (3, -1e29)],
            falling(2_000),
        ];
        for points in series {
            for sets in [1, 30] {
                let folder = tempfile::tempdir().unwrap();
                curve(points.clone(), sets).draw(folder.path()).unwrap();
                let read = |name| std::fs::read(folder.path().join(name)).unwrap();
                assert!(read("curve.svg").ends_with(b"</svg>\n"), "{sets} sets of {points:?}");
                assert!(
                    read("curve.png").ends_with(b"IEND\xaeB`\x82"),
                    "{sets} sets of {points:?}"
                );
                assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
            }
        }
    }

    #[test]
    fn a_second_picture_takes_the_place_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let svg = || std::fs::read_to_string(folder.path().join("curve.svg")).unwrap();
        curve(vec![], 0).draw(folder.path()).unwrap();
        assert!(svg().contains("nothing to show yet"));
        curve(falling(50), 1).draw(folder.path()).unwrap();
        assert!(!svg().contains("nothing to show yet"));
    }

    #[test]
    fn a_folder_that_can_not_be_written_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = curve(falling(5), 1).draw(file.path()).unwrap_err().to_string();
        let path = file.path().join("curve.svg");
        assert!(message.contains(&path.display().to_string()), "{message}");
    }

    #[test]
    fn the_svg_is_as_large_as_said_and_has_no_control_characters() {
        let svg = curve(falling(5), 1).svg().unwrap();
        assert!(svg.contains(r#"<svg width="900" height="420" viewBox="0 0 3600 1680""#));
        assert!(svg.chars().all(|c| c == '\n' || !c.is_control()));
    }

    #[test]
    fn scales_have_few_and_short_labels_at_any_size() {
        for exponent in -12..=18 {
            let high = 3.7 * 10f64.powi(exponent);
            let values = [(0.0, 0.3 * high), (1.0, high)];
            let mut scales = vec![linear_axis(&values), linear_axis(&values[1..])];
            scales.push(log_axis(&[(0.0, -3.0), (1.0, f64::from(exponent.abs()))]));
            scales.push(steps_axis(high.ceil(), 300.0));
            for Axis { low, high, ticks } in scales {
                assert!((2..LABELS).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
                assert!(
                    ticks.iter().all(|(v, label)| label.len() <= 7 && (low..=high).contains(v))
                );
            }
        }
    }

    #[test]
    fn smoothing_leaves_a_straight_line_as_it_is() {
        let line: Vec<Point> = (0..600).map(|i| (f64::from(i), 3.0 - 0.5 * f64::from(i))).collect();
        let worst = |(a, b): (&Point, &Point)| (a.1 - b.1).abs();
        assert!(smooth(&line).iter().zip(&line).map(worst).all(|error| error < 1e-9));
    }

    #[test]
    fn fewer_points_still_hold_every_spike() {
        let mut points = numbers(&falling(10_000));
        points[6_543].1 = 100.0;
        let kept = envelope(&points);
        assert!(kept.len() <= 2 * MOST_POINTS && kept.contains(&points[6_543]));
    }

    #[test]
    fn names_of_sets_keep_their_distance() {
        let heights = spread(&[TOP, TOP, TOP + 3.0, BOTTOM - 1.0, BOTTOM, BOTTOM]);
        let apart = |pair: &[f64]| pair[1] - pair[0] >= NAME_HEIGHT - 1e-9;
        assert!(heights.windows(2).all(apart), "{heights:?}");
        assert!(heights[0] >= TOP && heights[5] <= BOTTOM, "{heights:?}");
    }
}
