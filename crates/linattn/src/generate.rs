//! Text from a language model, token by token, with the recurrent state: ids in, ids out.
//! ```text
//! read     the prompt at once, chunkwise; only its last position has logits
//! choose   l_i = l_i / r where l_i > 0, else l_i r        ids that the text has already
//!          p   = softmax(l / temperature)                 over the top_k largest l
//!          the fewest likeliest ids whose p add up to top_p, and of these one at random
//! step     the chosen id gives the next state and the next logits; memory does not grow
//! ```
//! A text's random numbers are a function of the seed, its own stream and the place in the text. So
//! what is written depends neither on the other texts of a batch, rounding aside, nor on whether the
//! text was put away and taken up again in between.
//!
//! Source: top-p, Holtzman et al., arXiv 1904.09751; top-k, Fan et al., arXiv 1805.04833; the penalty
//! r, Keskar et al., arXiv 1909.05858, with the case of negative logits as every library has it.
//!
//! ```no_run
//! use burn::backend::Flex;
//! use linattn::generate::{GenerateConfig, Next, SamplingConfig, Sequence, generate};
//! use linattn::nn::LanguageModel;
//! use std::path::Path;
//!
//! fn write(model: &LanguageModel<Flex>) -> Result<(), Box<dyn std::error::Error>> {
//!     let device = Default::default();
//!     let config = GenerateConfig {
//!         new_tokens: 200,
//!         sampling: SamplingConfig { temperature: 0.8, top_k: Some(40), ..Default::default() },
//!         ..Default::default()
//!     };
//!     let prompt = Sequence::new(b"Once upon a time".map(u32::from).to_vec());
//!     let mut generated = generate(model, vec![prompt], &config, &device, |written| {
//!         println!("{}", written.id);
//!         if written.id == u32::from(b'.') { Next::FinishRow } else { Next::Continue }
//!     })?;
//!     generated.rows.remove(0).sequence.save(Path::new("text.state"))?;
//!
//!     // Another day:
//!     let text = Sequence::load(Path::new("text.state"), model, &device)?;
//!     generate(model, vec![text], &config, &device, |_| Next::Continue)?;
//!     Ok(())
//! }
//! ```

use crate::nn::state::{self, TextHeader};
use crate::nn::{ConfigError, LanguageModel, LanguageModelState, StateError};
use crate::ops::LinearAttentionBackend;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

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

/// A text in the making: its tokens, and the state after those that the model has read.
#[derive(Debug, Clone)]
pub struct Sequence<B: Backend> {
    tokens: Vec<u32>,
    /// The state, of one row, and how many of the first tokens it has seen.
    state: Option<(LanguageModelState<B>, usize)>,
    stream: u64,
}

impl<B: Backend> Sequence<B> {
    /// A text that begins with `prompt`.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { tokens: prompt, state: None, stream: 0 }
    }

    /// The same, sampled with random numbers of its own. Texts of one stream and one seed that
    /// begin alike go on alike.
    #[must_use]
    pub fn with_stream(self, stream: u64) -> Self {
        Self { stream, ..self }
    }

    /// Which random numbers it is sampled with.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// All tokens, the prompt first.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds to the text what the model did not write.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// The state so far, of one row: after generation it has seen all tokens but the last.
    pub fn state(&self) -> Option<&LanguageModelState<B>> {
        self.state.as_ref().map(|(state, _)| state)
    }

    /// Tokens that the state has seen.
    pub fn read(&self) -> usize {
        self.state.as_ref().map_or(0, |(_, read)| *read)
    }

    /// Writes tokens and state to a file.
    /// # Errors
    /// [`StateError::Write`], also where there is no state yet.
    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        let Some((state, read)) = &self.state else {
            let why = "the text has no state yet".to_string();
            return Err(StateError::Write { path: path.into(), why });
        };
        let header = TextHeader { read: *read, stream: self.stream };
        state::write(path, state, Some((self.tokens.as_slice(), header)))
    }
}

impl<B: LinearAttentionBackend> Sequence<B> {
    /// Reads what [`save`](Self::save) wrote, of a model of the same config.
    /// # Errors
    /// [`StateError`] names the file, or the layer and the tensor that does not fit.
    pub fn load(
        path: &Path,
        model: &LanguageModel<B>,
        device: &B::Device,
    ) -> Result<Self, StateError> {
        match state::read(model, path, device)? {
            (state, Some((tokens, TextHeader { read, stream }))) => {
                Ok(Self { tokens, state: Some((state, read)), stream })
            }
            (_, None) => {
                let why = "it has a state, and no text that the state has seen".to_string();
                Err(StateError::Read { path: path.into(), why })
            }
        }
    }
}

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

/// Result of [`generate`].
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

/// Why nothing, or nothing more, can be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// States do not go together, or with the model.
    #[error(transparent)]
    State(#[from] StateError),
    /// The model reads whole sequences only.
    #[error("the model's head is an auto-encoder, which answers whole sequences and cannot write")]
    AutoEncoder,
    /// There is nothing to go on from.
    #[error("prompt {row} is empty; it has to have a token at least")]
    Empty {
        /// Which of the texts.
        row: usize,
    },
    /// The model does not know a token.
    #[error("prompt {row} has the token {id}; it has to be below {vocab}, the model's vocabulary")]
    Vocabulary {
        /// Which of the texts.
        row: usize,
        /// The token.
        id: u32,
        /// How many ids the model knows.
        vocab: usize,
    },
    /// The text would be longer than the model's table of learnt positions.
    #[error(
        "text {row} would have {tokens} tokens read; it has to be at most {positions}, which the model has positions for"
    )]
    Positions {
        /// Which of the texts.
        row: usize,
        /// Tokens that the model would read.
        tokens: usize,
        /// Positions that it has learnt.
        positions: usize,
    },
    /// The model's numbers have overflowed, or its weights are no numbers.
    #[error("the model's logits for token {place} of text {row} are no finite numbers")]
    NotFinite {
        /// Which of the texts.
        row: usize,
        /// Which of its tokens, the prompt's included.
        place: usize,
    },
}

/// Goes on with each text, and calls `on_token` for every token written, text by text and step by
/// step.
///
/// Prompts of one length are read together. Texts are then written in one batch, or where the model
/// counts positions (rotation, growing caches) in one batch for each length. Texts that have ended
/// stay in their batch, unheard. `B` should not be an autodiff backend: it would keep the graph of
/// every step.
/// # Errors
/// [`GenerateError`]; but for `NotFinite`, before anything is computed.
pub fn generate<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    sequences: Vec<Sequence<B>>,
    config: &GenerateConfig,
    device: &B::Device,
    on_token: impl FnMut(Written<'_>) -> Next,
) -> Result<Generated<B>, GenerateError> {
    check(model, &sequences, config)?;
    let started = Instant::now();
    let row = |sequence: Sequence<B>| {
        let prompt = sequence.tokens.len();
        Row { sequence, prompt, finish: Finish::Length }
    };
    let mut writer = Writer {
        model,
        config,
        device,
        on_token,
        active: vec![true; sequences.len()],
        rows: sequences.into_iter().map(row).collect(),
        timing: Timing::default(),
    };
    if config.new_tokens > 0 {
        let cohorts = writer.read_prompts()?;
        writer.write(cohorts, started)?;
    }
    Ok(Generated { rows: writer.rows, timing: writer.timing })
}

fn check<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    sequences: &[Sequence<B>],
    config: &GenerateConfig,
) -> Result<(), GenerateError> {
    config.sampling.check()?;
    if config.window == 0 {
        return Err(ConfigError::new("window", 0, "at least 1").into());
    }
    if model.needs_whole_sequences() {
        return Err(GenerateError::AutoEncoder);
    }
    let vocab = model.vocab();
    for (row, sequence) in sequences.iter().enumerate() {
        if sequence.tokens.len() <= sequence.read() {
            return Err(GenerateError::Empty { row });
        }
        if let Some(&id) = sequence.tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(GenerateError::Vocabulary { row, id, vocab });
        }
        // The last token that is written is not read.
        let tokens = sequence.tokens.len() + config.new_tokens.saturating_sub(1);
        if let Some(positions) = model.positions().filter(|&positions| tokens > positions) {
            return Err(GenerateError::Positions { row, tokens, positions });
        }
    }
    Ok(())
}

/// Texts that are stepped together.
struct Cohort<B: Backend> {
    /// Which they are.
    rows: Vec<usize>,
    /// For their next tokens, `[rows, vocab]`.
    logits: Tensor<B, 2>,
    /// After all their tokens so far.
    state: LanguageModelState<B>,
}

struct Writer<'a, B: Backend, F> {
    model: &'a LanguageModel<B>,
    config: &'a GenerateConfig,
    device: &'a B::Device,
    on_token: F,
    rows: Vec<Row<B>>,
    /// Which texts have not ended.
    active: Vec<bool>,
    timing: Timing,
}

impl<B: LinearAttentionBackend, F: FnMut(Written<'_>) -> Next> Writer<'_, B, F> {
    /// Reads all prompts, those together that are as long and as far.
    fn read_prompts(&mut self) -> Result<Vec<Cohort<B>>, GenerateError> {
        let length = |row: &usize| self.rows[*row].sequence.tokens.len();
        let far = |row: &usize| (length(row), self.rows[*row].sequence.read());
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by_key(far);
        let groups: Vec<Vec<usize>> =
            order.chunk_by(|a, b| far(a) == far(b)).map(<[usize]>::to_vec).collect();
        let cohorts = groups.into_iter().map(|rows| self.read_group(rows));
        let cohorts = cohorts.collect::<Result<Vec<_>, _>>()?;
        self.merge(cohorts)
    }

    /// Reads prompts of one length, `window` tokens at a time.
    fn read_group(&mut self, rows: Vec<usize>) -> Result<Cohort<B>, GenerateError> {
        let first = &self.rows[rows[0]].sequence;
        let (read, length) = (first.read(), first.tokens.len());
        let states: Vec<_> =
            rows.iter().filter_map(|&row| self.rows[row].sequence.state.take()).collect();
        let mut state = match states.is_empty() {
            true => None,
            false => {
                let states = states.into_iter().map(|(state, _)| state).collect();
                Some(LanguageModelState::cat(states)?)
            }
        };
        self.timing.prompt_tokens += rows.len() * (length - read);
        let mut last = None;
        for from in (read..length).step_by(self.config.window) {
            let to = (from + self.config.window).min(length);
            let tokens = |&row: &usize| &self.rows[row].sequence.tokens[from..to];
            let ids: Vec<i32> = rows.iter().flat_map(tokens).map(|&id| id as i32).collect();
            let ids = TensorData::new(ids, [rows.len(), to - from]);
            let ids = Tensor::<B, 2, Int>::from_data(ids, self.device);
            let (hidden, next) = self.model.hidden(ids, state);
            last = Some(hidden.narrow(1, to - from - 1, 1).squeeze_dim::<2>(1));
            state = Some(next);
        }
        let (Some(last), Some(state)) = (last, state) else {
            panic!("`check` made sure of a token to read")
        };
        Ok(Cohort { rows, logits: self.model.logits(last), state })
    }

    /// Joins groups that can go on in one batch: those of one length, or all if the model does not
    /// count.
    fn merge(&self, groups: Vec<Cohort<B>>) -> Result<Vec<Cohort<B>>, GenerateError> {
        let uncounted = self.model.ignores_position();
        let length = |group: &Cohort<B>| self.rows[group.rows[0]].sequence.tokens.len();
        let longest = groups.iter().map(length).max().unwrap_or(0);
        let mut batches: Vec<(usize, Vec<Cohort<B>>)> = vec![];
        for group in groups {
            let key = if uncounted { longest } else { length(&group) };
            match batches.last_mut() {
                Some((last, batch)) if *last == key => batch.push(group),
                _ => batches.push((key, vec![group])),
            }
        }
        let join = |(length, batch): (usize, Vec<Cohort<B>>)| -> Result<_, GenerateError> {
            let (mut rows, mut logits, mut states) = (vec![], vec![], vec![]);
            let several = batch.len() > 1;
            for group in batch {
                rows.extend(group.rows);
                logits.push(group.logits);
                states.push(match several && uncounted {
                    true => group.state.with_position(length),
                    false => group.state,
                });
            }
            let state = LanguageModelState::cat(states)?;
            Ok(Cohort { rows, logits: Tensor::cat(logits, 0), state })
        };
        batches.into_iter().map(join).collect()
    }

    /// Writes until every text has ended.
    fn write(
        &mut self,
        mut cohorts: Vec<Cohort<B>>,
        started: Instant,
    ) -> Result<(), GenerateError> {
        let mut read = None;
        while !cohorts.is_empty() {
            let logits: Vec<Vec<f32>> = cohorts.iter().map(|c| download(&c.logits)).collect();
            let first = read.is_none();
            let begun = *read.get_or_insert_with(Instant::now);
            let mut finish_all = false;
            let mut ended = vec![];
            for (cohort, logits) in cohorts.iter().zip(&logits) {
                let vocab = logits.len() / cohort.rows.len();
                for (place, &row) in cohort.rows.iter().enumerate() {
                    if !self.active[row] {
                        continue;
                    }
                    let logits = &logits[place * vocab..][..vocab];
                    let next = self.write_token(row, logits)?;
                    self.timing.step_tokens += usize::from(!first);
                    finish_all |= next == Next::FinishAll;
                    let length = self.rows[row].new_tokens().len();
                    match next {
                        Next::FinishRow => ended.push((row, Finish::Stopped)),
                        _ if length >= self.config.new_tokens => ended.push((row, Finish::Length)),
                        _ => {}
                    }
                }
            }
            if finish_all {
                let active = (0..self.rows.len()).filter(|&row| self.active[row]);
                let cut = active.filter(|row| ended.iter().all(|(other, _)| other != row));
                let cut: Vec<_> = cut.map(|row| (row, Finish::Interrupted)).collect();
                ended.extend(cut);
            }
            for (row, finish) in ended {
                self.active[row] = false;
                self.rows[row].finish = finish;
            }
            cohorts = cohorts.into_iter().filter_map(|cohort| self.advance(cohort)).collect();
            self.timing.prompt_seconds = (begun - started).as_secs_f64();
            self.timing.step_seconds = begun.elapsed().as_secs_f64();
        }
        self.timing.state_bytes /= self.rows.len().max(1) as u64;
        Ok(())
    }

    /// Chooses and reports one token.
    fn write_token(&mut self, row: usize, logits: &[f32]) -> Result<Next, GenerateError> {
        let Row { sequence, prompt, .. } = &mut self.rows[row];
        let place = sequence.tokens.len();
        let sampling = &self.config.sampling;
        let draw = draw(sampling.seed, sequence.stream, place as u64);
        let id = sampling.choose(logits, sequence.tokens.iter().copied(), draw);
        let id = id.ok_or(GenerateError::NotFinite { row, place })?;
        sequence.tokens.push(id);
        Ok((self.on_token)(Written { row, id, new: &sequence.tokens[*prompt..] }))
    }

    /// Keeps the states of texts that have just ended, and steps the others; nothing is left where
    /// all have ended.
    fn advance(&mut self, cohort: Cohort<B>) -> Option<Cohort<B>> {
        let Cohort { rows, state, .. } = cohort;
        if self.config.keep_states {
            for (place, &row) in rows.iter().enumerate() {
                let sequence = &mut self.rows[row].sequence;
                if !self.active[row] && sequence.state.is_none() {
                    let read = sequence.tokens.len() - 1;
                    let own = match rows.len() {
                        1 => state.clone(),
                        _ => state.select(&[place]).with_position(read),
                    };
                    sequence.state = Some((own, read));
                }
            }
        }
        if rows.iter().all(|&row| !self.active[row]) {
            self.timing.state_bytes += state.bytes();
            return None;
        }
        // Texts that have ended are given their last token again and again.
        let last = |&row: &usize| self.rows[row].sequence.tokens.last().map_or(0, |&id| id as i32);
        let ids: Vec<i32> = rows.iter().map(last).collect();
        let ids = TensorData::new(ids, [rows.len()]);
        let ids = Tensor::<B, 1, Int>::from_data(ids, self.device);
        let (logits, state) = self.model.step(ids, Some(state));
        Some(Cohort { rows, logits, state })
    }
}

/// Logits, row after row.
fn download<B: Backend>(logits: &Tensor<B, 2>) -> Vec<f32> {
    logits.to_data().iter::<f32>().collect()
}
