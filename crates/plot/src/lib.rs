//! Pictures of runs and of sweeps: each is a list of marks, which become an SVG and a PNG alike.
//!
//! ```text
//! Curve    training loss and test scores of one run over steps
//! Chart    lines, dots or rings between two axes
//! Bars     a group a column, a bar a line of a table
//! Heat     a map a model, with the numbers in it
//! ```
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod axis;
mod bars;
mod chart;
mod curve;
mod drawing;
mod heat;
#[cfg(test)]
mod tests;

pub use bars::{BarLine, Bars};
pub use chart::{Chart, Series, Stroke};
pub use curve::Curve;
pub use drawing::{Drawing, Point};
pub use heat::{Heat, HeatPanel};

use std::path::PathBuf;

/// A picture that could not be drawn or written.
#[derive(Debug, thiserror::Error)]
#[error("can't draw {path}: {why}")]
pub struct PictureError {
    /// The picture.
    pub path: PathBuf,
    /// Why.
    pub why: String,
}

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
