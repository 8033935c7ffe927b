//! `generate --chat`: a conversation on the terminal, or with the lines of a pipe.

mod conversation;
mod template;
mod turns;

use crate::companions::{CompanionError, Companions};
use conversation::Rules;
use linattn::generate::GenerateConfig;
use linattn_tasks::Tokenizer;
use linattn_trainer::StoredModel;
use serde_json::{Map, Value};
use std::path::PathBuf;
use template::{Message, Role, Template, TemplateError};

pub(crate) use turns::{Broken, Chat, ChatRequest, Interrupts};

/// Why there is no conversation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    #[error(transparent)]
    Companion(#[from] CompanionError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(
        "{folder} has no chat template; it has to have `chat_template.jinja`, or `chat_template` in \
         `tokenizer_config.json`, as `convert import` takes them along"
    )]
    NoTemplate { folder: PathBuf },
    #[error("{folder} has no tokenizer; a conversation needs one")]
    NoTokenizer { folder: PathBuf },
}

impl<'a> Chat<'a> {
    /// A conversation with a model, its template tried.
    /// # Errors
    /// [`ChatError`] names the file.
    pub(crate) fn new(
        request: ChatRequest<'a>,
        model: &StoredModel,
        tokenizer: Option<Tokenizer>,
        ends: Vec<u32>,
        config: GenerateConfig,
    ) -> Result<Self, ChatError> {
        let folder = request.folder.to_path_buf();
        let companions = Companions::of(model);
        let Some(text) = companions.template()? else {
            return Err(ChatError::NoTemplate { folder });
        };
        let Some(tokenizer) = tokenizer else { return Err(ChatError::NoTokenizer { folder }) };
        let tokens = companions.special_tokens()?;
        let tokens = tokens.into_iter().map(|(name, token)| (name, Value::String(token)));
        let values: Map<String, Value> = tokens.chain(request.values.iter().cloned()).collect();
        let template = Template::new(text, values)?;
        try_out(&template, request.system)?;
        Ok(Self { request, rules: Rules { template, tokenizer, ends, config } })
    }
}

/// Renders what every conversation begins with, so that a template that refuses it does so at once.
fn try_out(template: &Template, system: Option<&str>) -> Result<(), TemplateError> {
    let system = system.map(|text| Message { role: Role::System, content: text.into() });
    let hello = Message { role: Role::User, content: "Hello".into() };
    let messages: Vec<Message> = system.into_iter().chain([hello]).collect();
    template.render(&messages, true).map(drop)
}
