//! Parity: is the number of ones odd?
//! ```text
//! ids     0 PAD, 1 and 2 the bits 0 and 1
//! input   s - 1 bits, uniform
//! answer  the bit (sum of the bits) mod 2
//!
//! Size 5, bits 1 0 1 1:
//! input   2 1 2 2
//! target  . . . 2
//! ```

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{Formal, Language, SizeRange, Supervision, check_ranges, published};
use crate::TaskError;

/// Parity of a row of bits, as TOML spells it.
///
/// ```toml
/// [task.parity]
/// train = [{ sizes = [3, 40], examples = 5_120_000 }]
/// test = [{ sizes = [40, 256], examples = 8_192 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParityConfig {
    /// Which prefixes are answered. Default `last`.
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

impl ParityConfig {
    /// The setting of arXiv 2411.12537 as its code has it: 20 000 steps of 256 examples.
    pub fn published() -> Self {
        let [train, validation, test] = published(5_120_000);
        Self { supervision: Supervision::Last, train, validation, test }
    }

    pub(crate) fn task(&self, seed: u64) -> Result<Formal<Parity>, TaskError> {
        let lists = [&self.train[..], &self.validation, &self.test];
        check_ranges("parity", lists)?;
        Ok(Formal::new(Parity, self.supervision, lists, seed))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Parity;

impl Language for Parity {
    const TAG: [u8; 8] = *b"parity\0\0";

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
        ["PAD", "0", "1"][id as usize].into()
    }

    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        row.extend((0..tokens).map(|_| rng.random_range(1..3u32)));
    }

    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32> {
        let mut odd = 0;
        row.iter().map(move |bit| {
            odd ^= bit - 1;
            odd + 1
        })
    }

    fn shares(&self, longest: usize) -> Vec<Vec<f64>> {
        vec![vec![0.5; 2]; longest + 1]
    }
}
