//! Sampling: options of the command line and, where they are left out, the words of the model's
//! `generation_config.json`.

use crate::companions::{CompanionError, Companions, GENERATION_CONFIG, SamplingWords};
use linattn::generate::SamplingConfig;
use linattn::nn::ConfigError;

// A comment of Rust alone: clap would take a documentation's words for the command's.
#[derive(Debug, clap::Args)]
pub(crate) struct SamplingArgs {
    /// Divisor of the logits; 0 always takes the likeliest token. What generation_config.json beside the model says,
    /// or else 1
    #[arg(long)]
    temperature: Option<f64>,
    /// Only so many of the likeliest tokens can come next; 0 for all. What generation_config.json says, or else all
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the fewest likeliest tokens whose probabilities add up to this can come next. What generation_config.json
    /// says, or else 1
    #[arg(long)]
    top_p: Option<f64>,
    /// Divides the logits of tokens that are there already. What generation_config.json says, or else 1
    #[arg(long)]
    repetition_penalty: Option<f64>,
    /// Where the random numbers start from
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Why a model cannot be sampled from as asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SamplingError {
    #[error(transparent)]
    File(#[from] CompanionError),
    #[error(transparent)]
    Option(#[from] ConfigError),
    #[error("{GENERATION_CONFIG} beside the model: {0}")]
    Value(#[source] ConfigError),
}

impl SamplingArgs {
    /// Options of the command line first, then the words of the model's files, checked.
    /// # Errors
    /// [`SamplingError`] names the option or the file.
    pub(crate) fn resolve(&self, model: &Companions<'_>) -> Result<SamplingConfig, SamplingError> {
        // A wrong option is no mistake of the file, so options are checked alone first.
        self.over(&SamplingWords::default()).check()?;
        let sampling = self.over(&model.sampling()?);
        sampling.check().map_err(SamplingError::Value)?;
        Ok(sampling)
    }

    fn over(&self, words: &SamplingWords) -> SamplingConfig {
        let top_k = self.top_k.or(words.top_k);
        SamplingConfig {
            temperature: self.temperature.or(words.temperature()).unwrap_or(1.0),
            top_k: top_k.filter(|count| *count > 0),
            top_p: self.top_p.or(words.top_p).unwrap_or(1.0),
            repetition_penalty: self.repetition_penalty.or(words.repetition_penalty).unwrap_or(1.0),
            seed: self.seed,
        }
    }
}
