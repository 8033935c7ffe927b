//! Cycle navigation: where do these steps around a cycle lead?
//! ```text
//! ids     0 PAD, 1 stay, 2 one on, 3 one back, 4 + p position p of the cycle
//! input   s - 1 steps, uniform
//! answer  the position (sum of the steps) mod cycle
//!
//! Size 5, a cycle of 5:
//! input   2 2 1 2
//! target  . . . 7
//! ```

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{Formal, Language, SizeRange, Supervision, check_answers, check_ranges, published};
use crate::TaskError;

/// Steps around a cycle, as TOML spells it.
///
/// ```toml
/// [task.cycle_navigation]
/// train = [{ sizes = [3, 40], examples = 25_600_000 }]
/// test = [{ sizes = [40, 256], examples = 8_192 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CycleNavigationConfig {
    /// Positions of the cycle. Default 5.
    #[serde(default = "default_cycle")]
    pub cycle: u32,
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

fn default_cycle() -> u32 {
    5
}

impl CycleNavigationConfig {
    /// The sizes of arXiv 2411.12537 and 2505.17761, for 100 000 steps of 256 examples.
    pub fn published() -> Self {
        let [train, validation, test] = published(25_600_000);
        let (cycle, supervision) = (default_cycle(), Supervision::Last);
        Self { cycle, supervision, train, validation, test }
    }

    pub(crate) fn task(&self, seed: u64) -> Result<Formal<CycleNavigation>, TaskError> {
        let lists = [&self.train[..], &self.validation, &self.test];
        check_answers("task.cycle_navigation.cycle", self.cycle)?;
        check_ranges("cycle_navigation", lists)?;
        Ok(Formal::new(CycleNavigation { cycle: self.cycle }, self.supervision, lists, seed))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct CycleNavigation {
    cycle: u32,
}

impl CycleNavigation {
    /// Where a step leads.
    fn step(&self, position: u32, step: u32) -> u32 {
        match step {
            2 if position + 1 == self.cycle => 0,
            2 => position + 1,
            3 if position == 0 => self.cycle - 1,
            3 => position - 1,
            _ => position,
        }
    }
}

impl Language for CycleNavigation {
    const TAG: [u8; 8] = *b"cycle\0\0\0";

    fn vocab(&self) -> u32 {
        4 + self.cycle
    }

    fn pad(&self) -> u32 {
        0
    }

    fn answer_ids(&self) -> (u32, u32) {
        (4, self.cycle)
    }

    fn token(&self, id: u32) -> String {
        let named = ["PAD", "stay", "+1", "-1"].get(id as usize);
        named.map_or_else(|| (id - 4).to_string(), ToString::to_string)
    }

    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        row.extend((0..tokens).map(|_| rng.random_range(1..4u32)));
    }

    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32> {
        let mut position = 0;
        row.iter().map(move |&step| {
            position = self.step(position, step);
            4 + position
        })
    }

    fn shares(&self, longest: usize) -> Vec<Vec<f64>> {
        let mut shares = vec![vec![0.0; self.cycle as usize]; longest + 1];
        shares[0][0] = 1.0;
        for n in 1..=longest {
            for (position, step) in (0..self.cycle).flat_map(|p| (1..4).map(move |step| (p, step)))
            {
                let next = self.step(position, step) as usize;
                shares[n][next] += shares[n - 1][position as usize] / 3.0;
            }
        }
        shares
    }
}
