//! Tensors that layers read of one another: handed from the first to the last, once through the model.
//! They are no state: nothing of them is kept for the next token. With them go the lengths of sequences that
//! lie in one row.

use super::ConfigError;
use super::mixers::{AttentionConfig, KeyValueCache, MixerConfig, Rwkv7Config};
use crate::ops::SequenceLengths;
use burn::tensor::{Tensor, backend::Backend};

/// Tensors that earlier layers left for later ones, of the tokens that are being computed.
#[derive(Debug, Clone, Default)]
pub struct Shared<B: Backend> {
    /// Values of the first `rwkv7` layer, `[B, T, H V]`.
    pub first_values: Option<Tensor<B, 3>>,
    /// Keys and values of the last `attention` layer, of earlier tokens too.
    pub keys_values: Option<KeyValueCache<B>>,
    /// Of the sequences in the one row; absent where every row is a sequence. Whoever sets them has asked every
    /// layer whether it takes them.
    pub(super) lengths: Option<SequenceLengths>,
}

impl<B: Backend> Shared<B> {
    /// For sequences of these lengths in one row.
    pub(super) fn of_lengths(lengths: &SequenceLengths) -> Self {
        Self { lengths: Some(lengths.clone()), first_values: None, keys_values: None }
    }
}

/// The same among configs: the layers so far that a later one may read from.
#[derive(Debug, Default)]
pub(super) struct Sources<'a> {
    first_values: Option<&'a Rwkv7Config>,
    keys_values: Option<&'a AttentionConfig>,
}

impl<'a> Sources<'a> {
    /// Refuses a mixer that reads what no layer so far leaves, or what does not fit; else adds what it
    /// leaves itself.
    pub(super) fn add(
        &mut self,
        mixer: &'a MixerConfig,
        d_model: usize,
    ) -> Result<(), ConfigError> {
        match mixer {
            MixerConfig::Rwkv7(config) => {
                config.check_source(self.first_values, d_model)?;
                self.first_values = self.first_values.or(Some(config));
            }
            MixerConfig::Attention(config) => self.keys_values = Some(config),
            MixerConfig::CrossAttention(config) => {
                config.check_source(self.keys_values, d_model)?;
            }
            _ => {}
        }
        Ok(())
    }
}
