//! The learning curve of a run: training loss and test scores over steps.

use crate::PictureError;
use crate::axis::{Axis, extent};
use crate::chart::Panel;
use crate::drawing::{Drawing, FAINT_INK, INK, Point, colour, room, shorten};
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;
use std::ops::Range;
use std::path::Path;

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

const SIZE: (f64, f64) = (900.0, 420.0);
/// The first colour, mixed with much of the ground: overlapping strokes stay one shade.
const RAW: RGBColor = RGBColor(172, 207, 227);

/// Where the panels are: two of one width, numbers to their left, names of test sets to the right.
const TOP: f64 = 112.0;
const BOTTOM: f64 = 364.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 872.0;
const GAP: f64 = 74.0;
/// Of a number below the axis, at the most.
const LABEL_WIDTH: f64 = 52.0;

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
    /// [`PictureError`] names the file.
    pub fn draw(&self, folder: &Path) -> Result<(), PictureError> {
        let drawing = self.drawing();
        drawing.write_svg(&folder.join("curve.svg"))?;
        drawing.write_png(&folder.join("curve.png"))
    }

    fn drawing(&self) -> Drawing {
        let mut drawing = Drawing::new(SIZE, &self.title, &self.subtitle);
        let sets: Vec<Set> = self
            .scores
            .iter()
            .enumerate()
            .map(|(index, (name, points))| Set::new(index, name, points))
            .collect();
        let names = names(&sets);
        let width = (RIGHT - names_width(&names) - LEFT - GAP) / 2.0;
        let steps = Axis::counts([self.last_step()].into_iter(), width / LABEL_WIDTH);
        let panel = |left, y| Panel { left, width, top: TOP, bottom: BOTTOM, x: steps.clone(), y };
        self.draw_loss(&mut drawing, |y| panel(LEFT, y));
        self.draw_scores(&mut drawing, |y| panel(LEFT + width + GAP, y), &sets, &names);
        drawing
    }

    /// Both panels end at the same step.
    fn last_step(&self) -> f64 {
        let scores = self.scores.iter().flat_map(|(_, points)| points);
        self.loss.iter().chain(scores).map(|p| p.0).max().unwrap_or(0).max(1) as f64
    }

    fn draw_loss(&self, drawing: &mut Drawing, panel: impl Fn(Axis) -> Panel) {
        let mut loss = numbers(&self.loss);
        let log = spans_decades(&loss);
        if log {
            loss.retain(|p| p.1 > 0.0);
            loss.iter_mut().for_each(|p| p.1 = p.1.log10());
        }
        let values = loss.iter().map(|p| p.1);
        let panel = panel(if log { Axis::of_logarithms(values) } else { Axis::around(values) });
        let heading = if log { "training loss, log scale" } else { "training loss" };
        frame(&panel, drawing, heading, loss.is_empty());
        trace(&panel, drawing, &envelope(&loss), RAW, 1.0);
        trace(&panel, drawing, &smooth(&means(&loss)), colour(0), 2.2);
    }

    fn draw_scores(
        &self,
        drawing: &mut Drawing,
        panel: impl Fn(Axis) -> Panel,
        sets: &[Set],
        names: &[Name],
    ) {
        let values = sets.iter().flat_map(|set| set.points.iter().map(|p| p.1));
        let panel = panel(Axis::shares(values));
        let empty = sets.iter().all(|set| set.points.is_empty());
        frame(&panel, drawing, &shorten(&self.score_name, 40), empty);
        for set in sets.iter().rev() {
            trace(&panel, drawing, &envelope(&set.points), colour(set.place), 2.0);
            dots(&panel, drawing, &set.points, colour(set.place));
        }
        match names {
            [only] if sets.len() == 1 => name_end(&panel, drawing, only),
            _ => name_ends(&panel, drawing, names),
        }
    }
}

fn frame(panel: &Panel, drawing: &mut Drawing, heading: &str, empty: bool) {
    panel.frame(drawing, "step", heading);
    if empty {
        panel.empty(drawing);
    }
}

/// One test set.
struct Set {
    name: String,
    points: Vec<Point>,
    /// Number of its colour.
    place: usize,
}

impl Set {
    fn new(place: usize, name: &str, points: &[(u64, f64)]) -> Self {
        let name = name.strip_prefix("test/").unwrap_or(name);
        Self { name: shorten(name, LONGEST_NAME), points: numbers(points), place }
    }
}

/// Label beside the end of a line.
struct Name {
    text: String,
    end: Point,
    place: usize,
}

/// Names and last scores of the sets, best first. One set alone needs no name.
fn names(sets: &[Set]) -> Vec<Name> {
    let alone = sets.len() == 1;
    let name = |set: &Set| {
        let end = *set.points.last()?;
        let score = format!("{:.3}", end.1);
        let text = if alone { score } else { format!("{}  {score}", set.name) };
        Some(Name { text, end, place: set.place })
    };
    let mut names: Vec<Name> = sets.iter().filter_map(name).collect();
    names.sort_by(|a, b| b.end.1.total_cmp(&a.end.1));
    names
}

fn names_width(names: &[Name]) -> f64 {
    let longest = names.iter().take(MOST_NAMES).map(|name| name.text.chars().count()).max();
    longest.map_or(0.0, |letters| 18.0 + room(letters))
}

fn trace(panel: &Panel, drawing: &mut Drawing, points: &[Point], colour: RGBColor, width: f64) {
    let points: Vec<Point> = points.iter().map(|&p| panel.at(p)).collect();
    match points[..] {
        [] => {}
        [only] => drawing.dot(only, 2.5, colour),
        _ => drawing.line(&points, colour, width),
    }
}

/// Marks each evaluation where there are few, and the last one always.
fn dots(panel: &Panel, drawing: &mut Drawing, points: &[Point], colour: RGBColor) {
    let first = if points.len() <= 30 { 0 } else { points.len() - 1 };
    points[first..].iter().for_each(|&p| drawing.dot(panel.at(p), 2.8, colour));
}

/// Writes beside a line that is the only one.
fn name_end(panel: &Panel, drawing: &mut Drawing, name: &Name) {
    let end = panel.at(name.end);
    drawing.text(&name.text, (end.0 + 8.0, end.1), INK, HPos::Left);
}

/// Writes each name at the height of its line's end, moved where two would overlap.
fn name_ends(panel: &Panel, drawing: &mut Drawing, names: &[Name]) {
    let (shown, hidden) = names.split_at(names.len().min(MOST_NAMES));
    let mut wanted: Vec<f64> = shown.iter().map(|name| panel.at(name.end).1).collect();
    wanted.extend((!hidden.is_empty()).then_some(BOTTOM));
    let heights = spread(&wanted);
    let right = panel.left + panel.width + 14.0;
    for (name, &y) in shown.iter().zip(&heights) {
        let end = panel.at(name.end);
        drawing.line(&[(end.0 + 5.0, end.1), (right, y)], colour(name.place), 1.0);
        drawing.dot((right, y), 3.5, colour(name.place));
        drawing.text(&name.text, (right + 8.0, y), INK, HPos::Left);
    }
    if let (1.., Some(&y)) = (hidden.len(), heights.last()) {
        let text = format!("and {} more", hidden.len());
        drawing.text(&text, (right + 8.0, y), FAINT_INK, HPos::Left);
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

/// The points that can be drawn, by step.
fn numbers(points: &[(u64, f64)]) -> Vec<Point> {
    let drawable = points.iter().filter(|p| p.1.abs() < HUGE); // false for NaN
    let mut points: Vec<Point> = drawable.map(|&(step, value)| (step as f64, value)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Whether the losses above zero span more than a decade and a half.
fn spans_decades(points: &[Point]) -> bool {
    let positive = points.iter().map(|p| p.1).filter(|value| *value > 0.0);
    let (low, high) = extent(positive);
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let svg = curve(falling(5), 1).drawing().svg();
        assert!(svg.contains(r#"<svg width="900" height="420" viewBox="0 0 3600 1680""#));
        assert!(svg.chars().all(|c| c == '\n' || !c.is_control()));
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
