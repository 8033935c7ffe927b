//! Training that starts from a model which is there already: `model.from` in a run's config.
//! ```toml
//! [model]
//! from = "runs/qwen"    # keys of the model, its weights and its tokenizer
//!
//! [base]                # the same in a resolved config, beside all keys of the model
//! run = "runs/qwen"
//! step = 0
//! vocab = 248320
//! checksum = "5d0a3c21"
//! end_ids = [248046]    # left out where there are none
//! ```

use crate::checkpoint::Which;
use crate::config::{BaseConfig, ConfigError, RunConfig, first_difference};
use crate::folder::{CONFIG, TOKENIZER};
use crate::folder_error::FolderError;
use crate::stored::{StoredError, StoredModel};
use linattn::nn::LanguageModelConfig;
use linattn_tasks::TokenizerConfig;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

impl BaseConfig {
    /// The model, which has to be the one that was meant.
    /// # Errors
    /// [`StoredError`] names the folder and the difference.
    pub(crate) fn open(&self) -> Result<StoredModel, StoredError> {
        let stored = StoredModel::open(&self.run, Which::Step(self.step))?;
        let now = Self::of(&self.run, &stored);
        for (what, there, want) in [
            ("weights of checksum", &now.checksum, &self.checksum),
            ("ids:", &now.vocab.to_string(), &self.vocab.to_string()),
        ] {
            if there != want {
                let why = format!("it has {what} {there}, and `base` says {want}");
                return Err(FolderError::OtherBase { path: self.run.clone(), why }.into());
            }
        }
        Ok(stored)
    }

    fn of(run: &Path, stored: &StoredModel) -> Self {
        Self {
            run: run.into(),
            step: stored.checkpoint.position.step,
            vocab: stored.vocab,
            checksum: format!("{:08x}", stored.checkpoint.checksum),
            end_ids: stored.end_ids.clone(),
        }
    }
}

/// The origin of a config's model.
pub(crate) struct Source {
    base: BaseConfig,
    model: LanguageModelConfig,
    /// None where the model says nothing of text.
    tokenizer: Option<TokenizerConfig>,
    /// The tokenizer that a run to be resumed was given, of which `tokenizer` is its own copy.
    given: Option<TokenizerConfig>,
}

impl Source {
    /// The source that `model.from` names. Its keys then stand in `table` in place of `from`. A run to be
    /// resumed, in `own`, remembers what it started from.
    /// # Errors
    /// [`ConfigError`] says what is wrong with the source.
    pub(crate) fn take(table: &mut Table, own: Option<&Path>) -> Result<Option<Self>, ConfigError> {
        let remembered = own.and_then(Self::remembered);
        let Some(from) = named(table)? else { return Ok(remembered) };
        let source = match remembered.filter(|source| source.base.run == from) {
            Some(source) => source,
            None => Self::open(&from)?,
        };
        source.put(table);
        Ok(Some(source))
    }

    fn open(from: &Path) -> Result<Self, ConfigError> {
        let wrong = |why: String| ConfigError::Source { key: "model.from", path: from.into(), why };
        let stored = StoredModel::open(from, Which::Best).map_err(|e| wrong(e.to_string()))?;
        if stored.adapters().is_some() {
            let why = "it keeps low-rank adapters beside the weights of another run; `convert merge` \
                       makes a run of both to start from";
            return Err(wrong(why.to_string()));
        }
        Ok(Self {
            base: BaseConfig::of(from, &stored),
            tokenizer: stored.text(),
            model: stored.config,
            given: None,
        })
    }

    /// The origin of the run in `root`.
    fn remembered(root: &Path) -> Option<Self> {
        let text = fs::read_to_string(root.join(CONFIG)).ok()?;
        let run: RunConfig = toml::from_str(&text).ok()?;
        let (base, given) = (run.base?, run.task.tokenizer().cloned());
        let kept = root.join(TOKENIZER);
        let tokenizer = match &given {
            Some(TokenizerConfig::File(_)) if kept.exists() => Some(TokenizerConfig::File(kept)),
            given => given.clone(),
        };
        Some(Self { base, model: run.model, tokenizer, given })
    }

    fn put(&self, table: &mut Table) {
        let value = |x: Result<Value, toml::ser::Error>| x.expect("a config is a table");
        let mut model = value(Value::try_from(&self.model));
        if let (Value::Table(model), Some(Value::Table(given))) =
            (&mut model, table.remove("model"))
        {
            model.extend(given);
        }
        table.insert("model".into(), model);
        table.insert("base".into(), value(Value::try_from(&self.base)));
    }

    /// Gives `run`, made of `table`, the source's tokenizer where it has none of its own.
    /// # Errors
    /// [`ConfigError`] names the first key that contradicts the source.
    pub(crate) fn settle(&self, run: &mut RunConfig, table: &Table) -> Result<(), ConfigError> {
        if run.base.as_ref() != Some(&self.base) {
            return Ok(());
        }
        let want = |there: &str| format!("{there}, as in {}, or left out", self.base.run.display());
        let value = |model: &LanguageModelConfig| {
            // Dropout is of training, not of the weights.
            let dropout = run.model.embedding_dropout;
            let model = LanguageModelConfig { embedding_dropout: dropout, ..model.clone() };
            Value::try_from(&model).expect("a model's config is a table")
        };
        if let Some((key, there, here)) =
            first_difference("model", &value(&self.model), &value(&run.model))
        {
            return Err(ConfigError::value(&key, here, want(&there)));
        }
        let (Some(own), Some(theirs)) = (run.task.tokenizer_mut(), &self.tokenizer) else {
            return Ok(());
        };
        let (key, given) = given_tokenizer(table);
        if !given || Some(&*own) == self.given.as_ref() || same_text(own, theirs) {
            *own = theirs.clone();
            return Ok(());
        }
        Err(ConfigError::value(&key, spelled(own), want(&spelled(theirs))))
    }
}

/// The folder that `model.from` names, taken out of the table.
fn named(table: &mut Table) -> Result<Option<PathBuf>, ConfigError> {
    let Some(model) = table.get_mut("model").and_then(Value::as_table_mut) else { return Ok(None) };
    let from = match model.remove("from") {
        None => return Ok(None),
        Some(Value::String(from)) if !from.is_empty() => from,
        Some(other) => {
            return Err(ConfigError::value(
                "model.from",
                other,
                "the folder of a run: \"runs/NAME\"",
            ));
        }
    };
    match table.get("base") {
        None => Ok(Some(from.into())),
        Some(base) => {
            let want = "left out where `model.from` is given, which says the same";
            Err(ConfigError::value("base", base, want))
        }
    }
}

/// The key of the task's tokenizer, and whether it stands in `table`.
fn given_tokenizer(table: &Table) -> (String, bool) {
    let task = table.get("task").and_then(Value::as_table).and_then(|task| task.iter().next());
    match task {
        Some((name, keys)) => (format!("task.{name}.tokenizer"), keys.get("tokenizer").is_some()),
        None => ("task".into(), false),
    }
}

fn spelled(tokenizer: &TokenizerConfig) -> String {
    match tokenizer {
        TokenizerConfig::Bytes => "\"bytes\"".into(),
        TokenizerConfig::File(path) => format!("{{ file = \"{}\" }}", path.display()),
    }
}

fn same_text(a: &TokenizerConfig, b: &TokenizerConfig) -> bool {
    match (a, b) {
        (TokenizerConfig::File(a), TokenizerConfig::File(b)) => {
            a == b || matches!((fs::read(a), fs::read(b)), (Ok(a), Ok(b)) if a == b)
        }
        (a, b) => a == b,
    }
}
