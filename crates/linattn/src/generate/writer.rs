//! Prompts read, and texts written in batches.

use super::call::{Finish, GenerateConfig, Next, Row, Timing, Written};
use super::error::GenerateError;
use super::reading::read_tokens;
use super::sampling::draw;
use crate::nn::{LanguageModel, LanguageModelState};
use crate::ops::{LinearAttentionBackend, cat};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use std::time::Instant;

/// Texts that are stepped together.
pub(super) struct Cohort<B: Backend> {
    /// Which they are.
    rows: Vec<usize>,
    /// For their next tokens, `[rows, vocab]`.
    logits: Tensor<B, 2>,
    /// After all their tokens so far.
    state: LanguageModelState<B>,
}

pub(super) struct Writer<'a, B: Backend, F> {
    pub(super) model: &'a LanguageModel<B>,
    pub(super) config: &'a GenerateConfig,
    pub(super) device: &'a B::Device,
    pub(super) on_token: F,
    pub(super) rows: Vec<Row<B>>,
    /// Which texts have not ended.
    pub(super) active: Vec<bool>,
    pub(super) timing: Timing,
}

impl<B: LinearAttentionBackend, F: FnMut(Written<'_>) -> Next> Writer<'_, B, F> {
    /// Reads all prompts, those together that are as long and as far.
    pub(super) fn read_prompts(&mut self) -> Result<Vec<Cohort<B>>, GenerateError> {
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
        let state = match states.is_empty() {
            true => None,
            false => {
                let states = states.into_iter().map(|(state, _)| state).collect();
                Some(LanguageModelState::cat(states)?)
            }
        };
        self.timing.prompt_tokens += rows.len() * (length - read);
        let tokens = |&row: &usize| &self.rows[row].sequence.tokens[read..length];
        let texts: Vec<&[u32]> = rows.iter().map(tokens).collect();
        let (last, state) = read_tokens(self.model, &texts, state, self.config.window, self.device);
        Ok(Cohort { rows, logits: self.model.logits(last), state })
    }

    /// Joins groups that can go on in one batch: those of one length, or all if the model does not
    /// count.
    fn merge(&self, groups: Vec<Cohort<B>>) -> Result<Vec<Cohort<B>>, GenerateError> {
        let uncounted = self.model.fixed_size_state();
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
            Ok(Cohort { rows, logits: cat(logits, 0), state })
        };
        batches.into_iter().map(join).collect()
    }

    /// Writes until every text has ended.
    pub(super) fn write(
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
