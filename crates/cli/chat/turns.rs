//! Turn by turn: lines of standard input as questions, answers as they come, and what Ctrl-C does.

use super::conversation::{Conversation, Rules, TurnError};
use crate::page::Page;
use crate::{INTERRUPTED, output, signals};
use linattn::generate::{GenerateError, Next, Timing};
use linattn::nn::LanguageModel;
use linattn::ops::LinearAttentionBackend;
use serde_json::Value;
use std::cell::RefCell;
use std::io::{self, BufRead, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// A conversation as a person asked for it.
pub(crate) struct ChatRequest<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) system: Option<&'a str>,
    pub(crate) values: &'a [(String, Value)],
    pub(crate) stops: &'a [String],
}

/// A conversation that can begin.
pub(crate) struct Chat<'a> {
    pub(super) request: ChatRequest<'a>,
    pub(super) rules: Rules,
}

/// Why a conversation ended before its end.
pub(crate) enum Broken {
    /// Someone's mistake.
    Input(String),
    /// A failure of ours.
    Failed(String),
}

impl From<TurnError> for Broken {
    fn from(e: TurnError) -> Self {
        match e {
            TurnError::Generate(GenerateError::NotFinite { .. }) => Self::Failed(e.to_string()),
            e => Self::Input(e.to_string()),
        }
    }
}

impl Chat<'_> {
    /// Asks the lines of standard input until there are no more, or one of them is `/exit`.
    pub(crate) fn talk<B: LinearAttentionBackend>(
        &self,
        model: &LanguageModel<B>,
        device: &B::Device,
        interrupts: &Interrupts,
    ) -> Result<Timing, Broken> {
        let mut conversation = Conversation::new(&self.rules, self.request.system, model, device);
        let (mut lines, person) = (io::stdin().lock(), io::stdin().is_terminal());
        if person {
            output::note("/exit or Ctrl-D ends the conversation, Ctrl-C an answer");
        }
        loop {
            if person {
                output::prompt("> ");
            }
            let mut line = String::new();
            let read = lines.read_line(&mut line);
            let read = read.map_err(|e| Broken::Input(format!("standard input: {e}")))?;
            let line = line.trim_end_matches(['\n', '\r']);
            match line.trim() {
                _ if read == 0 => break,
                "/exit" => break,
                "" => continue,
                _ => {}
            }
            if !self.turn(&mut conversation, line.to_string(), interrupts)? {
                break;
            }
        }
        Ok(conversation.timing)
    }

    /// One question and its answer; gives whether anybody still reads.
    fn turn<B: LinearAttentionBackend>(
        &self,
        conversation: &mut Conversation<'_, B>,
        question: String,
        interrupts: &Interrupts,
    ) -> Result<bool, Broken> {
        let page = RefCell::new(Page::new(Some(&self.rules.tokenizer), self.request.stops));
        let failed = RefCell::new(None);
        let show = |text: &str| match output::write(text) {
            Ok(()) => true,
            Err(e) => {
                failed.replace(Some(e));
                false
            }
        };
        let on_token = |id| {
            let mut page = page.borrow_mut();
            let shown = show(&page.push(id));
            match shown && !page.has_stopped() && !interrupts.asked() {
                true => Next::Continue,
                false => Next::FinishAll,
            }
        };
        interrupts.begin();
        let asked = conversation.ask(question, on_token, || {
            let mut page = page.borrow_mut();
            show(&format!("{}\n", page.finish()));
            page.text().to_string()
        });
        interrupts.end();
        asked?;
        match failed.into_inner() {
            None => Ok(true),
            Some(e) if output::nobody_reads(&e) => Ok(false),
            Some(e) => Err(Broken::Failed(format!("can't write the text: {e}"))),
        }
    }
}

const WAITING: u8 = 0;
const ANSWERING: u8 = 1;
const ASKED: u8 = 2;

/// Ctrl-C while an answer comes: once for its end, twice for the end of the program.
#[derive(Clone, Default)]
pub(crate) struct Interrupts(Arc<AtomicU8>);

impl Interrupts {
    /// Watches for signals from now on.
    /// # Errors
    /// The system's.
    pub(crate) fn watch() -> Result<Self, String> {
        let own = Self::default();
        let watched = own.clone();
        signals::watch(move |asked| watched.take(asked)).map_err(|e| e.to_string())?;
        Ok(own)
    }

    fn take(&self, asked: signals::Asked) {
        let key = asked == signals::Asked::Key;
        let stops = |state| (key && state == ANSWERING).then_some(ASKED);
        let stopped = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, stops);
        match stopped {
            Ok(_) => {}
            Err(WAITING) if key && io::stdin().is_terminal() => {
                output::note("\n/exit or Ctrl-D ends the conversation");
                output::prompt("> ");
            }
            Err(_) => std::process::exit(INTERRUPTED.into()),
        }
    }

    fn begin(&self) {
        self.0.store(ANSWERING, Ordering::SeqCst);
    }

    fn end(&self) {
        self.0.store(WAITING, Ordering::SeqCst);
    }

    fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ASKED
    }
}
