//! Even pairs: do the first and the last letter agree? As often as they do, the pairs `ab` and `ba`
//! are even in number.
//! ```text
//! ids     0 PAD, 1 and 2 the letters a and b
//! input   s - 1 letters, uniform
//! answer  a where the first letter is the last, else b
//!
//! Size 5:
//! input   2 1 1 2
//! target  . . . 1
//! ```

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{Formal, Language, SizeRange, Supervision, check_ranges, published};
use crate::TaskError;

/// Even pairs in a row of two letters, as TOML spells it.
///
/// ```toml
/// [task.even_pairs]
/// train = [{ sizes = [3, 40], examples = 25_600_000 }]
/// test = [{ sizes = [40, 256], examples = 8_192 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvenPairsConfig {
    /// Which prefixes are answered, of those with two letters or more. Default `last`.
    #[serde(default)]
    pub supervision: Supervision,
    /// Sets to learn from.
    pub train: Vec<SizeRange>,
    /// Sets to choose settings by. Default none.
    #[serde(default)]
    pub validation: Vec<SizeRange>,
    /// Sets to report.
    pub test: Vec<SizeRange>,
}

impl EvenPairsConfig {
    /// The sizes of arXiv 2411.12537 and 2505.17761, for 100 000 steps of 256 examples.
    pub fn published() -> Self {
        let [train, validation, test] = published(25_600_000);
        Self { supervision: Supervision::Last, train, validation, test }
    }

    pub(crate) fn task(&self, seed: u64) -> Result<Formal<EvenPairs>, TaskError> {
        let lists = [&self.train[..], &self.validation, &self.test];
        check_ranges("even_pairs", lists)?;
        Ok(Formal::new(EvenPairs, self.supervision, lists, seed))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct EvenPairs;

impl Language for EvenPairs {
    const TAG: [u8; 8] = *b"evenpair";

    fn vocab(&self) -> u32 {
        3
    }

    fn pad(&self) -> u32 {
        0
    }

    fn answer_ids(&self) -> (u32, u32) {
        (1, 2)
    }

    fn token(&self, id: u32) -> String {
        ["PAD", "a", "b"][id as usize].into()
    }

    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        row.extend((0..tokens).map(|_| rng.random_range(1..3u32)));
    }

    // A letter alone always agrees with itself: nothing to ask.
    fn asked(&self, tokens: usize) -> usize {
        tokens - 1
    }

    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32> {
        row[1..].iter().map(|letter| if *letter == row[0] { 1 } else { 2 })
    }

    fn shares(&self, longest: usize) -> Vec<Vec<f64>> {
        vec![vec![0.5; 2]; longest + 1]
    }
}
