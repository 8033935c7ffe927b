//! temporary, replaced
use std::path::Path;
/// c
#[derive(Debug)]
pub struct Curve { /// a
pub title: String, /// a
pub subtitle: String, /// a
pub loss: Vec<(u64,f64)>, /// a
pub score_name: String, /// a
pub scores: Vec<(String, Vec<(u64,f64)>)> }
/// e
#[derive(Debug, thiserror::Error)]
pub enum CurveError {}
impl Curve { /// d
pub fn draw(&self, _f: &Path) -> Result<(), CurveError> { Ok(()) } }
