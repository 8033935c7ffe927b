//! A checkpoint as a model, and a model as a checkpoint.

use burn::tensor::backend::Backend;
use linattn::nn::{LanguageModel, LanguageModelConfig};
use std::path::{Path, PathBuf};

/// A checkpoint as a model.
#[derive(Debug)]
pub struct Imported<B: Backend> {
    /// The family, as [`known`](crate::known) names it.
    pub family: &'static str,
    /// The model's config.
    pub config: LanguageModelConfig,
    /// Ids that it knows.
    pub vocab: usize,
    /// The model.
    pub model: LanguageModel<B>,
    /// The `tokenizer.json` beside the checkpoint.
    pub tokenizer: Option<PathBuf>,
    /// Ids that end a text, as `config.json` says.
    pub end_ids: Vec<u32>,
    /// A safetensors file with what the checkpoint says in other words than the model, so that
    /// [`export`](crate::export) can say it in the same.
    pub kept: Option<Vec<u8>>,
    /// Tensors of parts that no model here has.
    pub left_out: Vec<String>,
}

/// A model to be written as a checkpoint.
#[derive(Debug)]
pub struct Exported<'a, B: Backend> {
    /// The model.
    pub model: &'a LanguageModel<B>,
    /// Its config.
    pub config: &'a LanguageModelConfig,
    /// Ids that it knows.
    pub vocab: usize,
    /// A `tokenizer.json` to be copied.
    pub tokenizer: Option<&'a Path>,
    /// Ids that end a text.
    pub end_ids: &'a [u32],
    /// Files to be copied as they are, under their own names: a chat template and the like.
    pub companions: &'a [PathBuf],
    /// The file of [`Imported::kept`], if the model came from a checkpoint.
    pub kept: Option<&'a Path>,
}

/// A checkpoint as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The family.
    pub family: &'static str,
    /// Tensors that the checkpoint it came from has besides, of parts that no model here has.
    pub left_out: Vec<String>,
}
