//! Modular arithmetic: what is an expression worth, mod m?
//! ```text
//! without brackets, sizes 2u - 1 for u uniform over low/2 ..= high/2, halves rounded up
//! ids     0 PAD, 1 +, 2 -, 3 *, 4 =, 5 + d digit d
//! input   u - 1 digits with u - 2 operators between them, both uniform, then =
//! answer  the value, where * binds tighter than + and -
//!
//! Size 9, m = 5, 2*3-4+1 = 3:
//! input   7 3 8 2 9 1 6 4
//! target  . . . . . . . 8
//!
//! with brackets, for s uniform over low ..= high, but 5 at least: an expression of s - 3 tokens, =
//! ids     d digit d, m +, m + 1 -, m + 2 *, m + 3 (, m + 4 ), m + 5 =, m + 6 PAD
//! input   an expression of n tokens, for n = 1 to 4:  t   -t   (t)   (-t)   with t uniform; from 5:
//!         (LoR), L of 1 ..= n - 4 tokens, uniform, R of the rest, o a uniform operator; then =
//! answer  the value
//!
//! s = 16, m = 5, ((-2)-(3+-1)) = 1:
//! input   8 8 6 2 9 6 8 3 5 6 1 9 9 10
//! target  . . . . . . . . . . . . .  1
//! ```
//! With multiplication and brackets the answer 0 is likelier than others, since it survives products:
//! for m = 5 and sizes of 40 to 256 it alone has a scaled accuracy of 0.132.

use std::ops::RangeInclusive;

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{Formal, Language, SizeRange, Supervision, check_answers, check_ranges, published};
use crate::{Task, TaskError};

/// The value of an expression mod m, as TOML spells it.
///
/// ```toml
/// [task.modular_arithmetic]
/// brackets = true
/// multiplication = false
/// train = [{ sizes = [3, 40], examples = 102_400_000 }]
/// test = [{ sizes = [40, 256], examples = 8_192 }]
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModularArithmeticConfig {
    /// Digits, m. Default 5.
    #[serde(default = "default_modulus")]
    pub modulus: u32,
    /// Whether expressions are nested in brackets. They are another language with other ids.
    pub brackets: bool,
    /// Whether there is `*` beside `+` and `-`. Published are both ways with brackets, and only
    /// `true` without.
    pub multiplication: bool,
    /// Sets to learn from.
    pub train: Vec<SizeRange>,
    /// Sets to choose settings by. Default none.
    #[serde(default)]
    pub validation: Vec<SizeRange>,
    /// Sets to report.
    pub test: Vec<SizeRange>,
}

fn default_modulus() -> u32 {
    5
}

impl ModularArithmeticConfig {
    /// The setting of arXiv 2411.12537 without brackets: 100 000 steps of 1 024 examples.
    pub fn without_brackets() -> Self {
        Self::published(false, true)
    }

    /// The settings of arXiv 2411.12537 with brackets: its first version has no multiplication.
    pub fn with_brackets(multiplication: bool) -> Self {
        Self::published(true, multiplication)
    }

    fn published(brackets: bool, multiplication: bool) -> Self {
        let [train, validation, test] = published(102_400_000);
        Self { modulus: default_modulus(), brackets, multiplication, train, validation, test }
    }

    pub(crate) fn task(&self, seed: u64) -> Result<Box<dyn Task>, TaskError> {
        let lists = [&self.train[..], &self.validation, &self.test];
        check_answers("task.modular_arithmetic.modulus", self.modulus)?;
        check_ranges("modular_arithmetic", lists)?;
        let operators = if self.multiplication { 3 } else { 2 };
        let ring = Ring { modulus: self.modulus, operators };
        Ok(if self.brackets {
            Box::new(Formal::new(Brackets(ring), Supervision::Last, lists, seed))
        } else {
            Box::new(Formal::new(Flat(ring), Supervision::Last, lists, seed))
        })
    }
}

const OPERATORS: [&str; 3] = ["+", "-", "*"];

/// The numbers mod m, and how many of [`OPERATORS`] are in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    pub(super) modulus: u32,
    pub(super) operators: u32,
}

impl Ring {
    /// The value of two numbers below m with one of [`OPERATORS`] between them.
    fn apply(self, a: u32, operator: u32, b: u32) -> u32 {
        match operator {
            0 => (a + b) % self.modulus,
            1 => (a + self.modulus - b) % self.modulus,
            _ => (a * b) % self.modulus,
        }
    }

    fn uniform(self) -> Vec<f64> {
        vec![1.0 / f64::from(self.modulus); self.modulus as usize]
    }
}

/// Expressions without brackets.
#[derive(Debug, Clone)]
pub(super) struct Flat(pub(super) Ring);

impl Flat {
    const EQUALS: u32 = 4;
    const DIGITS: u32 = 5;

    /// The value of `digit (operator digit)* =`: a sum of terms, each a product with a sign.
    fn value(&self, row: &[u32]) -> u32 {
        let Self(ring) = *self;
        let (mut sum, mut sign, mut term) = (0, 0, row[0] - Self::DIGITS);
        for pair in row[1..row.len() - 1].chunks_exact(2) {
            let (operator, digit) = (pair[0] - 1, pair[1] - Self::DIGITS);
            if operator == 2 {
                term = ring.apply(term, operator, digit);
            } else {
                sum = ring.apply(sum, sign, term);
                (sign, term) = (operator, digit);
            }
        }
        ring.apply(sum, sign, term)
    }
}

impl Language for Flat {
    const TAG: [u8; 8] = *b"flatarit";

    fn vocab(&self) -> u32 {
        Self::DIGITS + self.0.modulus
    }

    fn pad(&self) -> u32 {
        0
    }

    fn answer_ids(&self) -> (u32, u32) {
        (Self::DIGITS, self.0.modulus)
    }

    fn token(&self, id: u32) -> String {
        match id {
            0 => "PAD".into(),
            Self::EQUALS => "=".into(),
            1..Self::EQUALS => OPERATORS[id as usize - 1].into(),
            _ => (id - Self::DIGITS).to_string(),
        }
    }

    fn drawn(&self, [low, high]: [usize; 2]) -> RangeInclusive<usize> {
        low.div_ceil(2)..=high.div_ceil(2)
    }

    fn tokens(&self, drawn: usize) -> usize {
        2 * drawn - 2
    }

    // Size 2u - 1 goes with 2u: a range from 40 draws 39, which belongs to it.
    fn size(&self, tokens: usize) -> usize {
        tokens + 2
    }

    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        let Self(Ring { modulus, operators }) = *self;
        for _ in 0..tokens / 2 {
            row.push(Self::DIGITS + rng.random_range(0..modulus));
            row.push(1 + rng.random_range(0..operators));
        }
        row[tokens - 1] = Self::EQUALS;
    }

    fn asked(&self, _tokens: usize) -> usize {
        1
    }

    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32> {
        std::iter::once(Self::DIGITS + self.value(row))
    }

    // `states[sum * m + term]`, with the term's sign in it, is how likely these are so far.
    fn shares(&self, longest: usize) -> Vec<Vec<f64>> {
        let Self(ring) = *self;
        let m = ring.modulus as usize;
        let mut states = vec![0.0; m * m];
        states[..m].fill(1.0 / m as f64);
        let mut shares = vec![Vec::new(); longest + 1];
        for tokens in (2..=longest).step_by(2) {
            shares[tokens] = sums(&states, m);
            states = self.extended(&states, &shares[tokens]);
        }
        shares
    }
}

/// How likely each sum with its last term is.
fn sums(states: &[f64], m: usize) -> Vec<f64> {
    let mut sums = vec![0.0; m];
    for (state, p) in states.iter().enumerate() {
        sums[(state / m + state % m) % m] += p;
    }
    sums
}

impl Flat {
    /// States after one operator and digit more, where `sums` is how likely each value is before.
    fn extended(&self, states: &[f64], sums: &[f64]) -> Vec<f64> {
        let Self(ring) = *self;
        let m = ring.modulus as usize;
        let each = 1.0 / (m as f64 * f64::from(ring.operators));
        // A digit is uniform with either sign, so that + and - do the same.
        let mut next: Vec<f64> = (0..m * m).map(|state| 2.0 * each * sums[state / m]).collect();
        if ring.operators == 3 {
            for (state, digit) in (0..m * m).flat_map(|state| (0..m).map(move |d| (state, d))) {
                next[state / m * m + state % m * digit % m] += each * states[state];
            }
        }
        next
    }
}

/// Expressions with brackets.
#[derive(Debug, Clone)]
pub(super) struct Brackets(pub(super) Ring);

/// A part of an expression that is still to be written.
enum Part {
    Token(u32),
    /// An expression of so many tokens.
    Expression(usize),
}

/// Prefix of an operand: `left operator`, then perhaps a minus of the operand's own.
#[derive(Clone, Copy)]
struct Pending {
    left: u32,
    operator: u32,
    negate: bool,
}

impl Brackets {
    // Ids after the digits; the operators come first, in the order of `OPERATORS`.
    const MINUS: u32 = 1;
    const OPEN: u32 = 3;
    const CLOSE: u32 = 4;
    const EQUALS: u32 = 5;
    const PAD: u32 = 6;

    /// Writes an expression, its parts kept on a stack.
    fn write(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        let Self(Ring { modulus, operators }) = *self;
        let mut parts = vec![Part::Expression(tokens)];
        while let Some(part) = parts.pop() {
            match part {
                Part::Token(id) => row.push(id),
                Part::Expression(n @ 0..5) => self.write_short(rng, n, row),
                Part::Expression(n) => {
                    let left = rng.random_range(1..=n as u32 - 4) as usize;
                    row.push(modulus + Self::OPEN);
                    parts.extend([
                        Part::Token(modulus + Self::CLOSE),
                        Part::Expression(n - 3 - left),
                        Part::Token(modulus + rng.random_range(0..operators)),
                        Part::Expression(left),
                    ]);
                }
            }
        }
    }

    fn write_short(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        let Self(Ring { modulus, .. }) = *self;
        let [open, minus, close] = [Self::OPEN, Self::MINUS, Self::CLOSE].map(|id| modulus + id);
        let digit = rng.random_range(0..modulus);
        match tokens {
            1 => row.push(digit),
            2 => row.extend([minus, digit]),
            3 => row.extend([open, digit, close]),
            _ => row.extend([open, minus, digit, close]),
        }
    }

    /// The value of `expression =`. Within a pair of brackets it goes from left to right, as there is
    /// no more than one operator.
    fn value(&self, row: &[u32]) -> u32 {
        let Self(ring) = *self;
        let start = Pending { left: 0, operator: 0, negate: false };
        let (mut outer, mut here, mut operand) = (Vec::with_capacity(row.len()), start, None);
        for &id in row {
            operand = match id.checked_sub(ring.modulus) {
                None => Some(here.with(ring, id)),
                Some(Self::OPEN) => {
                    outer.push(std::mem::replace(&mut here, start));
                    None
                }
                Some(Self::CLOSE) => {
                    here = outer.pop().expect("`write` opens what it closes");
                    operand.map(|value| here.with(ring, value))
                }
                Some(Self::EQUALS) => break,
                Some(operator) => {
                    here = match operand {
                        Some(left) => Pending { left, operator, negate: false },
                        None => Pending { negate: true, ..here },
                    };
                    None
                }
            };
        }
        operand.expect("`write` ends with an operand")
    }
}

impl Pending {
    fn with(self, ring: Ring, operand: u32) -> u32 {
        let operand = if self.negate { ring.apply(0, 1, operand) } else { operand };
        ring.apply(self.left, self.operator, operand)
    }
}

impl Language for Brackets {
    const TAG: [u8; 8] = *b"brackets";

    fn vocab(&self) -> u32 {
        self.0.modulus + 7
    }

    fn pad(&self) -> u32 {
        self.0.modulus + Self::PAD
    }

    fn answer_ids(&self) -> (u32, u32) {
        (0, self.0.modulus)
    }

    fn token(&self, id: u32) -> String {
        match id.checked_sub(self.0.modulus) {
            None => id.to_string(),
            Some(id) => ["+", "-", "*", "(", ")", "=", "PAD"][id as usize].into(),
        }
    }

    fn tokens(&self, drawn: usize) -> usize {
        drawn.max(5) - 2
    }

    fn size(&self, tokens: usize) -> usize {
        tokens + 2
    }

    fn draw(&self, rng: &mut impl Rng, tokens: usize, row: &mut Vec<u32>) {
        self.write(rng, tokens - 1, row);
        row.push(self.0.modulus + Self::EQUALS);
    }

    fn asked(&self, _tokens: usize) -> usize {
        1
    }

    fn answers(&self, row: &[u32]) -> impl Iterator<Item = u32> {
        std::iter::once(self.value(row))
    }

    fn shares(&self, longest: usize) -> Vec<Vec<f64>> {
        let Self(ring) = *self;
        let mut shares = vec![ring.uniform(); longest.min(5) + 1];
        for tokens in shares.len()..=longest {
            // One of the tokens is the `=`.
            let share = self.composed(&shares[1..], tokens - 1);
            shares.push(share);
        }
        shares
    }
}

impl Brackets {
    /// How likely each value of `n` tokens is, from the same for all shorter expressions.
    fn composed(&self, shorter: &[Vec<f64>], n: usize) -> Vec<f64> {
        let Self(ring) = *self;
        let each = 1.0 / ((n - 4) as f64 * f64::from(ring.operators));
        let mut share = vec![0.0; ring.modulus as usize];
        for (left, operator) in
            (1..n - 3).flat_map(|left| (0..ring.operators).map(move |o| (left, o)))
        {
            for (a, p) in (0..).zip(&shorter[left]) {
                for (b, q) in (0..).zip(&shorter[n - 3 - left]) {
                    share[ring.apply(a, operator, b) as usize] += each * p * q;
                }
            }
        }
        share
    }
}
