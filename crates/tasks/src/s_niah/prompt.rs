//! The wording of a needle sample, and how much haystack goes into it.

use serde::{Deserialize, Serialize};

use crate::corpus::Prose;
use crate::tokenizer::Tokenizer;

/// Kind of needle, and of the haystack around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Needle {
    /// Seven digits among copies of one line: S-NIAH-1.
    #[serde(alias = "S-NIAH-1")]
    NumberInNoise,
    /// Seven digits among sentences: S-NIAH-2.
    #[serde(alias = "S-NIAH-2")]
    NumberInEssays,
    /// A uuid, 36 characters, among sentences: S-NIAH-3.
    #[serde(alias = "S-NIAH-3")]
    UuidInEssays,
}

impl Needle {
    /// As TOML spells it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NumberInNoise => "number_in_noise",
            Self::NumberInEssays => "number_in_essays",
            Self::UuidInEssays => "uuid_in_essays",
        }
    }

    pub(super) fn in_essays(self) -> bool {
        self != Self::NumberInNoise
    }

    /// Noun for the value, in the singular.
    fn kind(self) -> &'static str {
        if self == Self::UuidInEssays { "uuid" } else { "number" }
    }

    /// Characters of a value.
    pub(super) fn value_length(self) -> usize {
        if self == Self::UuidInEssays { 36 } else { 7 }
    }
}

/// The line that noise repeats.
pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

const NEEDLE: &str = "One of the special magic ";
const QUESTION: &str = "\nWhat is the special magic ";

/// Depths in percent: 40 even steps from 0 to 100, rounded.
pub(super) const DEPTHS: usize = 40;

fn depth_in_percent(place: f64) -> u32 {
    let step = ((place * DEPTHS as f64) as usize).min(DEPTHS - 1);
    (100.0 * step as f64 / (DEPTHS - 1) as f64).round() as u32
}

/// Random part of a needle sample.
#[derive(Debug, Clone)]
pub(super) struct Hidden {
    pub(super) needle: Needle,
    pub(super) key: String,
    pub(super) value: String,
    /// Where the needle lies, 0 to 1. 1 itself is the very end, after the last line or sentence.
    pub(super) place: f64,
    /// The word that a haystack of sentences starts with.
    pub(super) first: usize,
}

impl Hidden {
    /// Text to write after the prompt, which ends without a space.
    pub(super) fn answer(&self) -> String {
        format!(" {}", self.value)
    }

    /// The prompt with `size` lines of noise or words of `prose` as its haystack.
    pub(super) fn prompt(&self, prose: &Prose, size: usize) -> String {
        let (kind, key, context) = (self.needle.kind(), &self.key, self.context(prose, size));
        format!(
            "A special magic {kind} is hidden within the following text. Make sure to memorize it. \
             I will quiz you about the {kind} afterwards.\n{context}{QUESTION}{kind} for {key} \
             mentioned in the provided text? The special magic {kind} for {key} mentioned in the \
             provided text is"
        )
    }

    fn context(&self, prose: &Prose, size: usize) -> String {
        let Self { needle, key, value, place, first } = self;
        let hidden = format!("{NEEDLE}{}s for {key} is: {value}.", needle.kind());
        if needle.in_essays() {
            let (before, after) = prose.cut(*first, size, depth_in_percent(*place));
            return [before, &hidden, after].join(" ");
        }
        let mut lines = vec![NOISE; size];
        lines.insert((place * size as f64) as usize, &hidden);
        lines.join("\n")
    }

    /// The prompt with the largest haystack that leaves start, prompt and answer within `length`
    /// tokens. The size is guessed twice, from the bytes a token of the shell and then of the first
    /// guess, before it is searched for: encoding is what takes time.
    pub(super) fn fill(&self, prose: &Prose, tokenizer: &Tokenizer, length: usize) -> String {
        let whole = |size| self.prompt(prose, size) + &self.answer();
        let tokens = |text: &str| 1 + tokenizer.count(text);
        let shell = whole(0);
        let guess = |text: &str| {
            let bytes = (text.len() * length / tokens(text)).saturating_sub(shell.len());
            self.size_within(prose, bytes)
        };
        let guess = guess(&whole(guess(&shell)));
        let most = if self.needle.in_essays() { prose.words() - self.first } else { length };
        let size = largest(guess, most, |size| tokens(&whole(size)) <= length);
        self.prompt(prose, size)
    }

    /// Lines or words of `bytes` of haystack.
    fn size_within(&self, prose: &Prose, bytes: usize) -> usize {
        if self.needle.in_essays() {
            prose.words_within(self.first, bytes)
        } else {
            bytes / (NOISE.len() + 1)
        }
    }
}

/// The largest number up to `most` that fits, if all below it do; 0 is taken to fit. Tries `guess`
/// first, then steps that double, then halves.
pub(super) fn largest(guess: usize, most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut high, mut step) = (0, most + 1, 1);
    let mut next = guess;
    while high - fitting > 1 {
        let size = next.clamp(fitting + 1, high - 1);
        if fits(size) {
            fitting = size
        } else {
            high = size
        }
        let bracketed = fitting > 0 && high <= most;
        next = match fitting {
            _ if bracketed => fitting.midpoint(high),
            0 => high.saturating_sub(step),
            _ => fitting + step,
        };
        step *= 2;
    }
    fitting
}

/// The share of the haystack that comes before the needle of a prompt; `None` without a needle, or
/// without a question.
pub(super) fn depth(prompt: &str) -> Option<f64> {
    let (_, text) = prompt.split_once('\n')?;
    let text = &text[..text.rfind(QUESTION)?];
    let before = text.find(NEEDLE)?;
    let value = before + text[before..].find(" is: ")? + " is: ".len();
    let after = text.len() - value - text[value..].find('.')? - 1;
    Some(before as f64 / (before + after).max(1) as f64)
}
