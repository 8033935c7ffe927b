//! A call of [`generate`](super::generate): its config, what it reports on the way, and what comes of it.

use super::sampling::SamplingConfig;
use super::sequence::Sequence;
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

/// Length and sampling of the text to write.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// The most tokens that each text gets.
    pub new_tokens: usize,
    /// Tokens of a prompt that are read at a time: memory, not results, beyond rounding.
    pub window: usize,
    /// Whether the texts come back with their states.
    pub keep_states: bool,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            sampling: SamplingConfig::default(),
            new_tokens: 100,
            window: 4096,
            keep_states: true,
        }
    }
}

/// A token that was just written.
#[derive(Debug, Clone, Copy)]
pub struct Written<'a> {
    /// Which of the texts.
    pub row: usize,
    /// The token.
    pub id: u32,
    /// Everything that was written of this text, the token last.
    pub new: &'a [u32],
}

/// Decision after a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next one, if there are any left to write.
    Continue,
    /// The end of this text.
    FinishRow,
    /// The end of all, once every text has this step's token.
    FinishAll,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// It has all tokens asked for.
    Length,
    /// [`Next::FinishRow`].
    Stopped,
    /// [`Next::FinishAll`].
    Interrupted,
}

/// One text, with what was written of it.
#[derive(Debug, Clone)]
pub struct Row<B: Backend> {
    /// The text; its state only where it was asked for.
    pub sequence: Sequence<B>,
    /// Tokens of the text that were there before.
    pub prompt: usize,
    /// Why it ended.
    pub finish: Finish,
}

impl<B: Backend> Row<B> {
    /// The tokens that were written.
    pub fn new_tokens(&self) -> &[u32] {
        &self.sequence.tokens[self.prompt..]
    }
}

/// Result of [`generate`](super::generate).
#[derive(Debug, Clone)]
pub struct Generated<B: Backend> {
    /// The texts, in the order given.
    pub rows: Vec<Row<B>>,
    /// How long it took.
    pub timing: Timing,
}

/// Work and time of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timing {
    /// Tokens of prompts that were read.
    pub prompt_tokens: usize,
    /// Seconds until the first logits were there.
    pub prompt_seconds: f64,
    /// Tokens that were written after the first of each text: each took a step.
    pub step_tokens: usize,
    /// Seconds from the first logits to the end.
    pub step_seconds: f64,
    /// Bytes of all states at the end, over the number of texts.
    pub state_bytes: u64,
}
