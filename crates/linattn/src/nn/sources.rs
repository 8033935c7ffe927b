//! Layers of a config that later ones read from.

use super::ConfigError;
use super::mixers::{AttentionConfig, MixerConfig, Rwkv7Config};

/// Layers so far that a later one may read from: among configs, as [`Shared`](super::Shared) is among tensors.
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
