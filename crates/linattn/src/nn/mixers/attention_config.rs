//! The config of softmax attention, and what it refuses.

use super::key_width;
use super::retnet::{check_rotated, check_theta};
use crate::nn::canon::check_canon;
use crate::nn::layers::{NormKind, check_epsilon};
use crate::nn::softmax::check_shared;
use crate::nn::{ConfigError, Rope, is_default, positive};
use serde::{Deserialize, Serialize};

/// Config of [`Attention`](super::Attention), softmax attention. The layer's page has recurrence, shapes,
/// errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`; as many by default.
    pub key_value_heads: Option<usize>,
    /// Width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Whether queries and keys are rotated by their position.
    pub rope: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
    /// Channels of a head that are rotated, the first ones, an even number; all by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_width: Option<usize>,
    /// Tokens that a query sees, itself and those just before it, at least 2; all by default. The
    /// state then stops growing.
    pub window: Option<usize>,
    /// Whether scores fall with the distance, at a fixed rate for each head; in place of rotation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
    /// Tokens s such that a query sees itself and those just before it, s in all, and every s-th
    /// before them, at least 2; in place of a window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Contextual positions that there are, 0 among them, at least 2; in place of rotation and slopes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cope: Option<usize>,
    /// Whether queries and keys are normalised, before rotation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qk_norm: bool,
    /// The norm of queries and keys.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm_kind: NormKind,
    /// Channels that such a norm takes together.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm_span: QkNormSpan,
    /// Added to a mean square before its root, where queries and keys are normalised.
    #[serde(skip_serializing_if = "is_usual")]
    pub norm_eps: f64,
    /// Whether queries, keys and values have a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qkv_bias: bool,
    /// Whether the answers of the heads are multiplied by the sigmoid of a projection, before the last one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_gate: bool,
    /// Whether the output has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_bias: bool,
    /// Share of the weights of keys that training sets to zero.
    #[serde(skip_serializing_if = "is_default")]
    pub dropout: f64,
    /// Tokens that Canon layers of queries, keys and values see, at least 2; 0 for none.
    #[serde(skip_serializing_if = "is_default")]
    pub canon: usize,
}

/// Channels of queries and keys that are normalised together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNormSpan {
    /// Those of a head; the heads share their weights.
    #[default]
    Head,
    /// Those of all heads, with a weight for each.
    Projection,
}

const USUAL_EPSILON: f64 = 1e-5;

fn is_usual(epsilon: &f64) -> bool {
    *epsilon == USUAL_EPSILON
}

impl Default for AttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_value_heads: None,
            key_width: None,
            rope: true,
            rope_theta: 10_000.0,
            rope_width: None,
            window: None,
            alibi: false,
            stride: None,
            cope: None,
            qk_norm: false,
            qk_norm_kind: NormKind::Rms,
            qk_norm_span: QkNormSpan::Head,
            norm_eps: USUAL_EPSILON,
            qkv_bias: false,
            output_gate: false,
            output_bias: false,
            dropout: 0.0,
            canon: 0,
        }
    }
}

impl AttentionConfig {
    /// Width of a head, and heads of keys and values.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let shared = check_shared(self.heads, self.key_value_heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        self.check_rope(width)?;
        check_canon("canon", self.canon)?;
        check_epsilon(self.norm_eps)?;
        let normed = self.qk_norm_kind != NormKind::Rms || self.qk_norm_span != QkNormSpan::Head;
        if normed && !self.qk_norm {
            let want = "true where `qk_norm_kind` or `qk_norm_span` is given";
            return Err(ConfigError::new("qk_norm", false, want));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ConfigError::new("dropout", self.dropout, "at least 0 and below 1"));
        }
        self.check_seen()?;
        Ok((width, shared))
    }

    /// Checks what bears on which keys a query sees, and how it tells where they stand.
    fn check_seen(&self) -> Result<(), ConfigError> {
        for (key, value) in [("window", self.window), ("stride", self.stride), ("cope", self.cope)]
        {
            match value {
                Some(value) if value < 2 => Err(ConfigError::new(key, value, "at least 2")),
                value => positive(key, value.unwrap_or(1)),
            }?;
        }
        let refused = |key, want| Err(ConfigError::new(key, true, want));
        match (self.cope, self.stride.and(self.window)) {
            _ if self.rope && self.alibi => refused("rope", "false where `alibi` is true"),
            (Some(_), _) if self.rope => refused("rope", "false where `cope` is given"),
            (Some(_), _) if self.alibi => refused("alibi", "false where `cope` is given"),
            (_, Some(window)) => {
                Err(ConfigError::new("window", window, "left out where `stride` is given"))
            }
            _ => Ok(()),
        }
    }

    /// Checks the keys of the rotation, for heads of `width` channels.
    fn check_rope(&self, width: usize) -> Result<(), ConfigError> {
        match self.rope_width {
            Some(part) if !self.rope => {
                Err(ConfigError::new("rope_width", part, "left out, unless `rope` is true"))
            }
            Some(part) if part == 0 || part > width => {
                let want = format!("from 2 to {width}, the width of a head");
                Err(ConfigError::new("rope_width", part, want))
            }
            Some(part) => check_rotated("rope_width", part),
            None if self.rope => check_rotated("key_width", width),
            None => Ok(()),
        }?;
        if self.rope { check_theta(self.rope_theta) } else { Ok(()) }
    }

    /// The rotation of queries and keys, where there is one.
    pub(super) fn rotation(&self) -> Option<Rope> {
        self.rope.then_some(Rope { theta: self.rope_theta, width: self.rope_width })
    }
}
