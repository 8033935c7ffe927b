//! temporary, replaced
/// s
#[derive(Debug, Clone, Copy)]
pub enum ProgressStyle { /// a
Auto, /// a
Tui, /// a
Lines, /// a
Quiet }
/// p
#[derive(Debug)]
pub struct Progress {}
impl Progress {
/// n
pub fn new(_t: u64, _s: u64, _y: ProgressStyle, _i: burn_train::Interrupter) -> Self { Self {} }
/// n
pub fn train(&mut self, step: u64, _epoch: u64, loss: f64, _lr: f64, tps: f64) { eprintln!("{step} {loss:.4} {tps:.0}") }
/// n
pub fn evaluated(&mut self, step: u64, m: &[(String, f64)], _best: bool) { eprintln!("{step} {m:?}") }
/// n
pub fn finish(self) {}
}
