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

mod call;
mod error;
mod reading;
mod sampling;
mod sequence;
mod writer;

pub use call::{Finish, GenerateConfig, Generated, Next, Row, Timing, Written};
pub use error::GenerateError;
pub use sampling::{SamplingConfig, draw};
pub use sequence::Sequence;

use crate::nn::LanguageModel;
use crate::ops::LinearAttentionBackend;
use reading::{check_tokens, check_window};
use std::time::Instant;
use writer::Writer;

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
    check_window(config.window)?;
    if model.needs_whole_sequences() {
        return Err(GenerateError::AutoEncoder);
    }
    for (row, sequence) in sequences.iter().enumerate() {
        if sequence.tokens.len() <= sequence.read() {
            return Err(GenerateError::Empty { row });
        }
        // The last token that is written is not read.
        let tokens = sequence.tokens.len() + config.new_tokens.saturating_sub(1);
        check_tokens(model, row, &sequence.tokens, tokens)?;
    }
    Ok(())
}
