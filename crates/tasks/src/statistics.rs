//! Figures that tell whether a generator makes what it should.

use std::collections::HashMap;

use crate::Example;

/// One figure of a sample of examples.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistic {
    /// Name of the figure.
    pub name: String,
    /// As counted.
    pub value: f64,
    /// As theory or the literature has it, where it says.
    pub expected: Option<f64>,
}

impl Statistic {
    /// A figure without an expectation.
    pub fn new(name: impl Into<String>, value: f64) -> Self {
        Self { name: name.into(), value, expected: None }
    }

    /// A figure and what it should be.
    pub fn expected(name: impl Into<String>, value: f64, expected: f64) -> Self {
        Self { name: name.into(), value, expected: Some(expected) }
    }
}

/// Figures that every task has: the examples counted, scored positions, and the best score that one
/// and the same answer everywhere can get.
pub fn common(examples: impl Iterator<Item = Example>) -> Vec<Statistic> {
    let (mut count, mut scored) = (0u64, 0u64);
    let mut answers: HashMap<u32, u64> = HashMap::new();
    for example in examples {
        count += 1;
        for answer in example.target.into_iter().flatten() {
            scored += 1;
            *answers.entry(answer).or_default() += 1;
        }
    }
    let most = answers.values().copied().max().unwrap_or(0);
    let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    vec![
        Statistic::new("examples", count as f64),
        Statistic::new("scored positions, mean", share(scored, count)),
        Statistic::new("different answers", answers.len() as f64),
        Statistic::new("share of the commonest answer", share(most, scored)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_over_scored_positions_alone() {
        let target = |list: [Option<u32>; 3]| Example { input: vec![9; 3], target: list.into() };
        let examples =
            [target([None, Some(1), Some(2)]), target([None; 3]), target([Some(1), None, None])];
        let values: Vec<f64> = common(examples.into_iter()).into_iter().map(|s| s.value).collect();
        assert_eq!(values, [3.0, 1.0, 2.0, 2.0 / 3.0]);
    }
}
