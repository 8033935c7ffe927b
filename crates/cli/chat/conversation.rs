//! A conversation: what was said, and the model's state after it.
//!
//! A turn reads only what the conversation has more than before. Where the template says an earlier turn
//! in other words by now, such as an answer without its thoughts, reading begins again behind the last
//! question that both have.

use super::template::{Message, Role, Template, TemplateError};
use linattn::generate::{
    GenerateConfig, GenerateError, Next, Sequence, Timing, Written, generate as write_texts,
};
use linattn::nn::LanguageModel;
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::Tokenizer;
use std::time::Instant;

/// All that a conversation needs beside the model.
pub(super) struct Rules {
    pub(super) template: Template,
    pub(super) tokenizer: Tokenizer,
    /// Ids that end an answer.
    pub(super) ends: Vec<u32>,
    pub(super) config: GenerateConfig,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum TurnError {
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("the chat template makes a text without a token of the conversation")]
    Empty,
    #[error("the tokenizer can't read the conversation: {0}")]
    Tokenizer(String),
    #[error(transparent)]
    Generate(#[from] GenerateError),
}

/// The sequence read before, and the ids behind it.
type Rest<B> = (Sequence<B>, Vec<u32>);

/// A conversation with a model.
pub(super) struct Conversation<'a, B: LinearAttentionBackend> {
    rules: &'a Rules,
    model: &'a LanguageModel<B>,
    device: &'a B::Device,
    messages: Vec<Message>,
    /// Everything up to the last answer.
    whole: Option<Sequence<B>>,
    /// Everything up to the last question, which no later turn changes as a rule.
    asked: Option<Sequence<B>>,
    /// Work and time of all turns.
    pub(super) timing: Timing,
}

impl<'a, B: LinearAttentionBackend> Conversation<'a, B> {
    pub(super) fn new(
        rules: &'a Rules,
        system: Option<&str>,
        model: &'a LanguageModel<B>,
        device: &'a B::Device,
    ) -> Self {
        let system = system.map(|text| Message { role: Role::System, content: text.into() });
        Self {
            rules,
            model,
            device,
            messages: system.into_iter().collect(),
            whole: None,
            asked: None,
            timing: Timing::default(),
        }
    }

    /// Puts a question, and calls `on_token` with each id of the answer until it says that this is the end.
    /// The answer is kept as `shown` gives it afterwards.
    pub(super) fn ask(
        &mut self,
        question: String,
        mut on_token: impl FnMut(u32) -> Next,
        shown: impl FnOnce() -> String,
    ) -> Result<(), TurnError> {
        self.messages.push(Message { role: Role::User, content: question });
        let sequence = self.read_question()?;
        let ends = &self.rules.ends;
        let heard = |Written { id, .. }: Written<'_>| match ends.contains(&id) {
            true => Next::FinishRow,
            false => on_token(id),
        };
        let (config, start) = (&self.rules.config, vec![sequence]);
        let generated = write_texts(self.model, start, config, self.device, heard)?;
        self.whole = generated.rows.into_iter().next().map(|row| row.sequence);
        self.count(&generated.timing);
        self.messages.push(Message { role: Role::Assistant, content: shown() });
        Ok(())
    }

    fn count(&mut self, turn: &Timing) {
        let all = &mut self.timing;
        all.prompt_tokens += turn.prompt_tokens;
        all.prompt_seconds += turn.prompt_seconds;
        all.step_tokens += turn.step_tokens;
        all.step_seconds += turn.step_seconds;
        all.state_bytes = turn.state_bytes;
    }

    /// The conversation as far as the beginning of an answer, its questions read.
    fn read_question(&mut self) -> Result<Sequence<B>, TurnError> {
        let template = &self.rules.template;
        let text = template.render(&self.messages, true)?;
        let question = template.render(&self.messages, false)?;
        let ids = self.ids(&text)?;
        let shared = |(a, b): &(&u32, &u32)| a == b;
        let question = ids.iter().zip(&self.ids(&question)?).take_while(shared).count();
        if ids.is_empty() {
            return Err(TurnError::Empty);
        }
        let (mut sequence, new) = self.after_what_was_read(&text, &ids)?;
        // Counted from the end: an answer may be of other ids than its text has.
        let opening = (ids.len() - question).clamp(1, new.len());
        let (rest, opening) = new.split_at(new.len() - opening);
        if !rest.is_empty() {
            sequence.extend(rest);
            let started = Instant::now();
            self.timing.prompt_tokens += sequence.tokens().len() - sequence.read();
            sequence.read_ahead(self.model, self.rules.config.window, self.device)?;
            self.timing.prompt_seconds += started.elapsed().as_secs_f64();
            self.asked = Some(sequence.clone());
        }
        sequence.extend(opening);
        Ok(sequence)
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, TurnError> {
        self.rules.tokenizer.ids(text).map_err(TurnError::Tokenizer)
    }

    /// As much of the conversation as was read before, and the ids behind it.
    fn after_what_was_read(&self, text: &str, ids: &[u32]) -> Result<Rest<B>, TurnError> {
        let rest = |sequence: &Sequence<B>| {
            let rest = ids.strip_prefix(sequence.tokens())?;
            (!rest.is_empty()).then(|| (sequence.clone(), rest.to_vec()))
        };
        if let Some(found) = self.whole.as_ref().and_then(rest) {
            return Ok(found);
        }
        if let Some(found) = self.after_the_same_text(text)? {
            return Ok(found);
        }
        let found = self.asked.as_ref().and_then(rest);
        Ok(found.unwrap_or_else(|| (Sequence::new(vec![]), ids.to_vec())))
    }

    /// The same where the model wrote its answer in other ids than the tokenizer would.
    fn after_the_same_text(&self, text: &str) -> Result<Option<Rest<B>>, TurnError> {
        let Some(whole) = &self.whole else { return Ok(None) };
        let tokenizer = &self.rules.tokenizer;
        let Some(rest) = text.strip_prefix(&tokenizer.decode(whole.tokens())) else {
            return Ok(None);
        };
        let new = self.ids(rest)?;
        // Some tokenizers begin every text with a space.
        let all = [whole.tokens(), &new].concat();
        let same = !new.is_empty() && tokenizer.decode(&all) == text;
        Ok(same.then(|| (whole.clone(), new)))
    }
}
