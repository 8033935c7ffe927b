//! Files beside a model that say how it is talked to: its chat template, the tokens that end a text, and how
//! special tokens are spelt.

use linattn_trainer::StoredModel;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const TEMPLATE: &str = "chat_template";
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// Why such a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompanionError {
    /// It cannot be read.
    #[error("can't read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no JSON object.
    #[error("{path} is no JSON object: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A key has a value of another kind.
    #[error("{path}: `{key}` is {got}; it has to be {want}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// A value that would be accepted.
        want: String,
    },
}

/// A chat template, and the file that it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TemplateText {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// A checkpoint's sampling; `None` where it has none.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct SamplingWords {
    /// Whether tokens are drawn; the likeliest is taken otherwise.
    draws: Option<bool>,
    temperature: Option<f64>,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
}

impl SamplingWords {
    /// A checkpoint that takes the likeliest token may have a temperature beside it, which it does not use.
    pub(crate) fn temperature(&self) -> Option<f64> {
        if self.draws == Some(false) { Some(0.0) } else { self.temperature }
    }
}

/// The files of one model.
pub(crate) struct Companions<'a> {
    files: &'a [PathBuf],
}

impl<'a> Companions<'a> {
    /// Those in the model's folder.
    pub(crate) fn of(model: &'a StoredModel) -> Self {
        Self { files: &model.companions }
    }

    fn path(&self, name: &str) -> Option<&'a Path> {
        self.files.iter().map(PathBuf::as_path).find(|path| path.ends_with(name))
    }

    /// Contents of a file of JSON; nothing where there is none.
    fn table(&self, name: &str) -> Result<Map<String, Value>, CompanionError> {
        let Some(path) = self.path(name) else { return Ok(Map::new()) };
        serde_json::from_str(&read(path)?)
            .map_err(|source| CompanionError::Json { path: path.into(), source })
    }

    /// The template: a file of its own, or else the one in `tokenizer_config.json`, whose list of several has
    /// one that is named `default`.
    /// # Errors
    /// [`CompanionError`] names the file.
    pub(crate) fn template(&self) -> Result<Option<TemplateText>, CompanionError> {
        if let Some(path) = self.path("chat_template.jinja") {
            return Ok(Some(TemplateText { path: path.into(), text: read(path)? }));
        }
        let Some(path) = self.path("tokenizer_config.json") else { return Ok(None) };
        let table = self.table("tokenizer_config.json")?;
        let given = match table.get(TEMPLATE) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(list)) => list.iter().find(|entry| entry["name"] == "default"),
            Some(given) => Some(given),
        };
        let text = given.and_then(|given| given.as_str().or(given["template"].as_str()));
        let value = || CompanionError::Value {
            path: path.into(),
            key: TEMPLATE,
            got: short(&table[TEMPLATE]),
            want: "a text, or a list of named ones with a `default` among them".into(),
        };
        let text = text.ok_or_else(value)?.to_string();
        Ok(Some(TemplateText { path: path.into(), text }))
    }

    /// Special tokens by the names that templates know them by, such as `bos_token`.
    /// # Errors
    /// [`CompanionError`] names the file.
    pub(crate) fn special_tokens(&self) -> Result<BTreeMap<String, String>, CompanionError> {
        let mut tokens = BTreeMap::new();
        // The second file overrides the first.
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            for (key, value) in self.table(name)? {
                let spelt = value.as_str().or(value["content"].as_str());
                if let Some(spelt) = spelt.filter(|_| key.ends_with("_token")) {
                    tokens.insert(key, spelt.to_string());
                }
            }
        }
        Ok(tokens)
    }

    /// Ids that end a text, as `generation_config.json` says.
    /// # Errors
    /// [`CompanionError`] names the file.
    pub(crate) fn end_ids(&self) -> Result<Vec<u32>, CompanionError> {
        const KEY: &str = "eos_token_id";
        let Some(path) = self.path(GENERATION_CONFIG) else { return Ok(vec![]) };
        let list = match self.table(GENERATION_CONFIG)?.remove(KEY) {
            None | Some(Value::Null) => return Ok(vec![]),
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        ids.ok_or_else(|| CompanionError::Value {
            path: path.into(),
            key: KEY,
            got: short(&Value::Array(list)),
            want: "a token's id, or a list of them".into(),
        })
    }

    /// How tokens are drawn, as `generation_config.json` says.
    /// # Errors
    /// [`CompanionError`] names the file and the key.
    pub(crate) fn sampling(&self) -> Result<SamplingWords, CompanionError> {
        let Some(path) = self.path(GENERATION_CONFIG) else { return Ok(SamplingWords::default()) };
        let table = Table { path, values: self.table(GENERATION_CONFIG)? };
        Ok(SamplingWords {
            draws: table.get("do_sample", "true or false")?,
            temperature: table.get("temperature", "a number")?,
            top_k: table.get("top_k", "a whole number, 0 for all tokens")?,
            top_p: table.get("top_p", "a number")?,
            repetition_penalty: table.get("repetition_penalty", "a number")?,
        })
    }
}

/// Contents of a file.
struct Table<'a> {
    path: &'a Path,
    values: Map<String, Value>,
}

impl Table<'_> {
    /// The value of a key; `None` where the key is missing, or null.
    fn get<T: DeserializeOwned>(
        &self,
        key: &'static str,
        want: &str,
    ) -> Result<Option<T>, CompanionError> {
        let value = self.values.get(key).unwrap_or(&Value::Null);
        Option::deserialize(value).map_err(|_| CompanionError::Value {
            path: self.path.into(),
            key,
            got: short(value),
            want: want.into(),
        })
    }
}

fn read(path: &Path) -> Result<String, CompanionError> {
    std::fs::read_to_string(path)
        .map_err(|source| CompanionError::Read { path: path.into(), source })
}

/// A value in no more than a line.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{} ..", &text[..end]),
        None => text,
    }
}
