//! A picture as a list of marks, which become an SVG and a PNG alike.

use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::PictureError;

/// Pixels of a page, from the left and from the top.
pub type Point = (f64, f64);

/// A picture has a ground of its own, so that a dark page does not swallow its ink.
const GROUND: RGBColor = RGBColor(252, 252, 250);
const FRAME: RGBColor = RGBColor(222, 222, 218);
pub(crate) const GRID: RGBColor = RGBColor(230, 230, 226);
pub(crate) const INK: RGBColor = RGBColor(33, 37, 41);
pub(crate) const FAINT_INK: RGBColor = RGBColor(92, 99, 106);

/// Okabe and Ito's colours, which colour-blind readers tell apart; without yellow, too pale here,
/// and with five more at the end.
const COLOURS: [RGBColor; 12] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
    RGBColor(120, 80, 180),
    RGBColor(130, 70, 40),
    RGBColor(128, 128, 0),
    RGBColor(0, 70, 75),
    RGBColor(190, 20, 70),
];

/// Heights of letters.
const LARGE: f64 = 19.0;
pub(crate) const SMALL: f64 = 13.5;

/// Plotters draws on whole pixels; drawn this much larger, strokes fall on quarters of one.
const FINE: f64 = 4.0;
/// Pixels on a side that become one of the PNG, which has two for each of a page.
const SHRINK: usize = 2;

/// The colour of the `place`-th of several.
pub(crate) fn colour(place: usize) -> RGBColor {
    COLOURS[place % COLOURS.len()]
}

/// Something to draw.
#[derive(Clone)]
enum Mark {
    Line { points: Vec<Point>, colour: RGBColor, width: f64 },
    Dot { at: Point, radius: f64, colour: RGBColor },
    Box { from: Point, to: Point, colour: RGBColor },
    Text { text: String, at: Point, size: f64, colour: RGBColor, anchor: HPos },
}

/// Marks of a picture, in the order of drawing.
#[derive(Clone)]
pub struct Drawing {
    size: (f64, f64),
    marks: Vec<Mark>,
}

impl Drawing {
    /// A ground with two lines of text at its top.
    pub(crate) fn new(size: (f64, f64), title: &str, label: &str) -> Self {
        let mut drawing = Self { size, marks: vec![] };
        let (right, bottom) = (size.0 - 0.5, size.1 - 0.5);
        let frame = [(0.5, 0.5), (right, 0.5), (right, bottom), (0.5, bottom), (0.5, 0.5)];
        drawing.line(&frame, FRAME, 1.0);
        let at = (28.0, 30.0);
        let (text, colour) = (shorten(title, 80), INK);
        drawing.marks.push(Mark::Text { text, at, size: LARGE, colour, anchor: HPos::Left });
        drawing.text(&shorten(label, (size.0 / 7.4) as usize), (28.0, 55.0), FAINT_INK, HPos::Left);
        drawing
    }

    pub(crate) fn line(&mut self, points: &[Point], colour: RGBColor, width: f64) {
        self.marks.push(Mark::Line { points: points.to_vec(), colour, width });
    }

    pub(crate) fn dot(&mut self, at: Point, radius: f64, colour: RGBColor) {
        self.marks.push(Mark::Dot { at, radius, colour });
    }

    pub(crate) fn ring(&mut self, at: Point, radius: f64, colour: RGBColor) {
        self.dot(at, radius, colour);
        self.dot(at, radius - 1.8, GROUND);
    }

    pub(crate) fn fill(&mut self, from: Point, to: Point, colour: RGBColor) {
        self.marks.push(Mark::Box { from, to, colour });
    }

    /// `at` is the middle of the text's height.
    pub(crate) fn text(&mut self, text: &str, at: Point, colour: RGBColor, anchor: HPos) {
        self.marks.push(Mark::Text { text: text.into(), at, size: SMALL, colour, anchor });
    }

    /// The picture as text.
    pub fn svg(&self) -> String {
        let (width, height) = self.fine_size();
        let mut text = String::new();
        let canvas = SVGBackend::with_string(&mut text, (width, height)).into_drawing_area();
        let drawn = self.paint(&canvas, false);
        drop(canvas);
        debug_assert!(drawn.is_ok(), "a string takes everything");
        let fine = format!(r#"width="{width}" height="{height}""#);
        let shown = format!(r#"width="{}" height="{}""#, self.size.0, self.size.1);
        text.replacen(&fine, &shown, 1) // `viewBox` keeps the fine numbers
    }

    /// The picture as pixels, twice as many a side as the page has.
    /// # Errors
    /// [`PictureError`] names the file; what stood there before stays.
    pub fn write_png(&self, path: &Path) -> Result<(), PictureError> {
        install_font();
        replace(path, |draft| self.write_draft(draft))
    }

    /// Writes the picture as text.
    /// # Errors
    /// As [`Drawing::write_png`].
    pub fn write_svg(&self, path: &Path) -> Result<(), PictureError> {
        replace(path, |draft| Ok(std::fs::write(draft, self.svg())?))
    }

    fn write_draft(&self, draft: &Path) -> Result<(), BoxedError> {
        let (width, height) = self.fine_size();
        let mut pixels = vec![0; 3 * (width * height) as usize];
        let canvas = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        self.paint(&canvas, true)?;
        drop(canvas);
        let size = (width / SHRINK as u32, height / SHRINK as u32);
        let mut file = BitMapBackend::new(draft, size);
        file.blit_bitmap((0, 0), size, &shrink(&pixels, width as usize))?;
        Ok(file.present()?)
    }

    fn fine_size(&self) -> (u32, u32) {
        ((self.size.0 * FINE) as u32, (self.size.1 * FINE) as u32)
    }

    fn paint<DB: DrawingBackend>(
        &self,
        canvas: &DrawingArea<DB, Shift>,
        pixels: bool,
    ) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        canvas.fill(&GROUND)?;
        for mark in &self.marks {
            match mark {
                Mark::Line { points, colour, width } => {
                    let points: Vec<_> = points.iter().map(|&point| fine(point)).collect();
                    let style = colour.stroke_width((width * FINE).round() as u32);
                    match pixels {
                        true => strokes(canvas, &points, style)?,
                        false => canvas.draw(&PathElement::new(points, style))?,
                    }
                }
                Mark::Dot { at, radius, colour } => {
                    let radius = (radius * FINE).round() as i32;
                    canvas.draw(&Circle::new(fine(*at), radius, colour.filled()))?;
                }
                Mark::Box { from, to, colour } => {
                    canvas.draw(&Rectangle::new([fine(*from), fine(*to)], colour.filled()))?;
                }
                Mark::Text { text, at, size, colour, anchor } => {
                    // plotters divides a size by 1.24 to get SVG's, and centres on small letters.
                    let lower = if pixels { 0.16 } else { 0.1 } * size;
                    let font = ("sans-serif", size * 1.24 * FINE).into_font().color(colour);
                    let style = font.pos(Pos::new(*anchor, VPos::Center));
                    canvas.draw(&Text::new(text.as_str(), fine((at.0, at.1 + lower)), style))?;
                }
            }
        }
        canvas.present()
    }
}

/// A line as single strokes with round joints: where a line turns sharply, plotters' own bitmap of it has long
/// spikes.
fn strokes<DB: DrawingBackend>(
    canvas: &DrawingArea<DB, Shift>,
    points: &[(i32, i32)],
    style: ShapeStyle,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    for pair in points.windows(2) {
        canvas.draw(&PathElement::new(pair, style))?;
    }
    for &joint in points.iter().skip(1).take(points.len().saturating_sub(2)) {
        canvas.draw(&Circle::new(joint, style.stroke_width / 2, style.color.filled()))?;
    }
    Ok(())
}

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Has `write` make a file beside `path`, then gives it that name.
fn replace(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), BoxedError>,
) -> Result<(), PictureError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The name keeps its ending: by it the format is chosen.
    let draft = path.with_file_name(format!(".unfinished-{name}"));
    let done = write(&draft).and_then(|()| Ok(std::fs::rename(&draft, path)?));
    done.map_err(|why| {
        let _nothing_left = std::fs::remove_file(&draft);
        PictureError { path: path.into(), why: why.to_string() }
    })
}

fn fine((x, y): Point) -> (i32, i32) {
    ((x * FINE).round() as i32, (y * FINE).round() as i32)
}

/// Means of squares of `SHRINK` pixels a side.
fn shrink(pixels: &[u8], width: usize) -> Vec<u8> {
    let (columns, rows) = (width / SHRINK, pixels.len() / (3 * width * SHRINK));
    let mut small = Vec::with_capacity(3 * columns * rows);
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        for channel in 0..3 {
            let at = |y: usize, x: usize| 3 * ((row * SHRINK + y) * width + column * SHRINK + x);
            let square = (0..SHRINK).flat_map(|y| (0..SHRINK).map(move |x| (y, x)));
            let sum: usize = square.map(|(y, x)| usize::from(pixels[at(y, x) + channel])).sum();
            small.push((sum / (SHRINK * SHRINK)) as u8);
        }
    }
    small
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

/// The text without control characters, cut after `most` letters.
pub(crate) fn shorten(text: &str, most: usize) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    match text.chars().count() > most {
        true => clean.take(most.saturating_sub(1)).chain(['…']).collect(),
        false => clean.collect(),
    }
}

/// Room for texts of `letters` letters: they differ from one reader's font to another's.
pub(crate) fn room(letters: usize) -> f64 {
    7.4 * letters as f64
}
