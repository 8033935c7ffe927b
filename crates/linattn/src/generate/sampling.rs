//! Choice of the next token.

use crate::nn::ConfigError;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// How the next token is chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divisor of the logits; 0 always takes the likeliest token.
    pub temperature: f64,
    /// How many of the likeliest tokens can be chosen; all by default.
    pub top_k: Option<usize>,
    /// Only the fewest likeliest tokens whose probabilities add up to this can be chosen.
    pub top_p: f64,
    /// Penalty on tokens that the text has already: their logits are divided by it where they are above 0,
    /// and multiplied elsewhere; 1 for none.
    pub repetition_penalty: f64,
    /// Where the random numbers start from.
    pub seed: u64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SamplingConfig {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Default::default() }
    }

    /// Checks every value.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(ConfigError::new("temperature", self.temperature, "at least 0"));
        }
        if self.top_k == Some(0) {
            return Err(ConfigError::new("top_k", 0, "at least 1"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(ConfigError::new("top_p", self.top_p, "above 0 and at most 1"));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let got = self.repetition_penalty;
            return Err(ConfigError::new("repetition_penalty", got, "above 0"));
        }
        Ok(())
    }

    /// The ids that can come next and their probabilities: by id where every id can, else the
    /// likeliest first; of equal logits the lower id counts as the likelier. `seen` are the ids that
    /// the text has. `None` if a logit is no number, or the largest is infinite.
    /// # Panics
    /// If an id of `seen` has no logit.
    pub fn candidates(
        &self,
        logits: &[f32],
        seen: impl IntoIterator<Item = u32>,
    ) -> Option<Vec<(u32, f64)>> {
        let mut logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        if self.repetition_penalty != 1.0 {
            for id in seen.into_iter().collect::<BTreeSet<u32>>() {
                let x = &mut logits[id as usize];
                let factor = self.repetition_penalty;
                *x = if *x > 0.0 { *x / factor } else { *x * factor };
            }
        }
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if !largest.is_finite() || logits.iter().any(|x| x.is_nan()) {
            return None;
        }
        if self.temperature == 0.0 {
            let likeliest = logits.iter().position(|&x| x == largest)?;
            return Some(vec![(likeliest as u32, 1.0)]);
        }
        let ids = self.largest(&logits);
        let weight = |&id: &u32| ((logits[id as usize] - largest) / self.temperature).exp();
        let weights: Vec<f64> = ids.iter().map(weight).collect();
        Some(self.nucleus(shares(ids, weights)))
    }

    /// The `top_k` ids with the largest logits; sorted by them where anything is cut.
    fn largest(&self, logits: &[f64]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| {
            let (x, y) = (logits[*a as usize], logits[*b as usize]);
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
        };
        let cut = self.top_k.filter(|&k| k < ids.len());
        if let Some(k) = cut {
            ids.select_nth_unstable_by(k - 1, likelier);
            ids.truncate(k);
        }
        if cut.is_some() || self.top_p < 1.0 {
            ids.sort_unstable_by(likelier);
        }
        ids
    }

    /// The first candidates that add up to `top_p`.
    fn nucleus(&self, mut candidates: Vec<(u32, f64)>) -> Vec<(u32, f64)> {
        if self.top_p >= 1.0 {
            return candidates;
        }
        let mut sum = 0.0;
        let enough = candidates.iter().position(|(_, p)| {
            sum += p;
            sum >= self.top_p
        });
        if let Some(last) = enough {
            candidates.truncate(last + 1);
        }
        let (ids, weights) = candidates.into_iter().unzip();
        shares(ids, weights)
    }

    /// The next id, given a random number in 0 to 1. `None` as in [`candidates`](Self::candidates).
    /// # Panics
    /// If an id of `seen` has no logit.
    pub fn choose(
        &self,
        logits: &[f32],
        seen: impl IntoIterator<Item = u32>,
        draw: f64,
    ) -> Option<u32> {
        let candidates = self.candidates(logits, seen)?;
        let mut sum = 0.0;
        let drawn = candidates.iter().find(|(_, p)| {
            sum += p;
            draw < sum
        });
        // Rounding may leave the sum a little below 1.
        let possible = || candidates.iter().rev().find(|(_, p)| *p > 0.0);
        drawn.or_else(possible).map(|(id, _)| *id)
    }
}

/// Weights as shares of their sum.
fn shares(ids: Vec<u32>, weights: Vec<f64>) -> Vec<(u32, f64)> {
    let sum: f64 = weights.iter().sum();
    ids.into_iter().zip(weights).map(|(id, weight)| (id, weight / sum)).collect()
}

/// The random number, from 0 up to 1, for token `place` of the text with this stream.
pub fn draw(seed: u64, stream: u64, place: u64) -> f64 {
    let mut key = [0; 32];
    let words = [u64::from_le_bytes(*b"sampling"), seed, stream];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(place);
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
