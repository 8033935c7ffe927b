//! When a result counts as right, and what the cases so far have come to.

use crate::args::Args;
use crate::case::Case;
use crate::problem::{Named, Problem};
use burn::tensor::DType;
use std::collections::BTreeMap;

/// Most that rounding of a truth of zero would leave.
const NOTHING: f64 = 1e-12;
/// Share by which inputs are moved to see how far the truth goes with them: in f64 nothing else shows there.
const STEP: f64 = 1e-7;
/// Draws of such moves. The largest answer counts.
const MOVES: u64 = 3;

fn rms(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = numbers.len().max(1) as f64;
    (numbers.map(|x| x * x).sum::<f64>() / count).sqrt()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    rms(a.iter().zip(b).map(|(a, b)| a - b))
}

/// How far each result moves with its inputs, over the share by which they move.
fn sensitivity(problem: &Problem, truth: &Named, seed: u64) -> BTreeMap<&'static str, f64> {
    let mut most = BTreeMap::new();
    for draw in 0..MOVES {
        let moved = problem.nearby(STEP, seed.wrapping_add(draw << 32)).solve();
        for ((name, truth), (_, moved)) in truth.iter().zip(&moved) {
            let most: &mut f64 = most.entry(*name).or_default();
            *most = most.max(distance(truth, moved) / STEP);
        }
    }
    most
}

/// The largest error of cases in one type.
#[derive(Debug, Clone, Copy, Default)]
struct Worst {
    error: f64,
    name: &'static str,
    seed: u64,
    cases: u64,
}

/// Results so far.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    pub cases: u64,
    numbers: u64,
    pub wrong: u64,
    /// Cases with a result that is right for what it is the difference of, not for its own size.
    cancelled: u64,
    /// In f32, and with q, k and v of 16 bits.
    worst: [Worst; 2],
}

impl Tally {
    /// Counts a case.
    /// # Errors
    /// A description of what it got wrong.
    pub fn add(
        &mut self,
        case: &Case,
        problem: &Problem,
        found: Result<Named, String>,
    ) -> Result<(), String> {
        self.cases += 1;
        self.worst[usize::from(case.dtype != DType::F32)].cases += 1;
        let checked = found.and_then(|found| self.compare(case, problem, &found));
        self.wrong += u64::from(checked.is_err());
        checked
    }

    /// A result is right if its error is within the limit of its own RMS; or else of its sensitivity: what
    /// inputs that are off by the limit make of it. NaN and infinity are wrong.
    fn compare(&mut self, case: &Case, problem: &Problem, found: &Named) -> Result<(), String> {
        let (truth, limit) = (problem.solve(), case.limit());
        let mut beyond = vec![];
        for (name, got) in found {
            let want = truth.iter().find(|(of, _)| of == name).map(|(_, want)| want.as_slice());
            let want = want.unwrap_or_default();
            self.numbers += want.len() as u64;
            if want.len() != got.len() {
                let (got, want) = (got.len(), want.len());
                return Err(format!("{name} has {got} numbers; it has to have {want}"));
            }
            let (error, size) = (distance(want, got), rms(want.iter().copied()));
            if !(error.is_finite() && error <= limit * size + NOTHING) {
                beyond.push((*name, error, size));
            } else if size > NOTHING / limit {
                self.note(case, name, error / size);
            }
        }
        if beyond.is_empty() {
            return Ok(());
        }
        let sensitivity = sensitivity(problem, &truth, case.seed);
        for (name, error, size) in beyond {
            let moves = sensitivity.get(name).copied().unwrap_or_default();
            if !(error.is_finite() && error <= limit * moves) {
                return Err(format!(
                    "{name}: error {error:.2e} of {size:.2e}, limit {limit:.0e}, sensitivity {moves:.2e}"
                ));
            }
            self.note(case, name, error / moves);
        }
        self.cancelled += 1;
        Ok(())
    }

    fn note(&mut self, case: &Case, name: &'static str, error: f64) {
        let worst = &mut self.worst[usize::from(case.dtype != DType::F32)];
        if error > worst.error {
            (worst.error, worst.name, worst.seed) = (error, name, case.seed);
        }
    }

    pub fn line(&self, args: &Args) -> String {
        let worst = self.worst.iter().zip(["f32", "16 bits"]).filter(|(worst, _)| worst.cases > 0);
        let worst: Vec<String> = worst
            .map(|(worst, kind)| {
                let &Worst { error, name, seed, cases } = worst;
                format!("{cases} in {kind}: worst error {error:.2e} ({name}, seed {seed})")
            })
            .collect();
        let Self { cases, numbers, wrong, cancelled, .. } = self;
        format!(
            "{cases} cases on {} from seed {}, {numbers} numbers, {wrong} wrong, {cancelled} held to what \
             they cancel; {}",
            args.device,
            args.seed,
            worst.join("; ")
        )
    }
}
