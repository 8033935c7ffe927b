//! Gated DeltaNet, which is a [`DeltaNet`] with a decay: delta_net.rs.

use super::Widths;
use super::delta_net::{DeltaNet, DeltaNetConfig};
use crate::nn::{ConfigError, Cost};
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

/// Config of [`GatedDeltaNet`]: the same keys as [`DeltaNetConfig`], and a decay that depends on the data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GatedDeltaNetConfig(pub DeltaNetConfig);

#[doc = include_str!("pages/gated_delta_net.md")]
pub type GatedDeltaNet<B> = DeltaNet<B>;

impl GatedDeltaNetConfig {
    /// `heads` heads of `key_width`, everything else as by default.
    pub fn new(heads: usize, key_width: usize) -> Self {
        Self(DeltaNetConfig::new(heads, key_width))
    }

    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        self.0.resolve_as(d_model, true)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GatedDeltaNet<B>, ConfigError> {
        self.0.build(d_model, true, device)
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        self.0.count(d_model, true)
    }
}
