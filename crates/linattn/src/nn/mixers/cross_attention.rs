//! Cross-attention of YOCO's second half. Recurrence, shapes and source: [`CrossAttention`].

use super::attention_config::AttentionConfig;
use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, Varlen, key_width, linear_flops};
use crate::nn::layers::{ResidualLinear, linear, split_heads};
use crate::nn::softmax::{check_shared, turned, weigh};
use crate::nn::{ConfigError, Cost, Linear, RecurrentState, Rope, Shared, StateTensors, positive};
use crate::ops::{LinearAttentionBackend, Seen};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// Config of [`CrossAttention`], attention over the keys and values of an earlier layer. The layer's page has
/// recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CrossAttentionConfig {
    /// Heads of queries, a multiple of the heads of keys.
    pub heads: usize,
    /// Width of a head, that of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Whether queries are rotated by their position, as the keys are.
    pub rope: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
}

impl Default for CrossAttentionConfig {
    fn default() -> Self {
        Self { heads: 1, key_width: None, rope: true, rope_theta: 10_000.0 }
    }
}

impl CrossAttentionConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if self.rope {
            check_rotated("key_width", width)?;
            check_theta(self.rope_theta)?;
        }
        Ok(width)
    }

    /// Refuses keys and values that nobody makes, or that queries do not fit.
    pub(in crate::nn) fn check_source(
        &self,
        source: Option<&AttentionConfig>,
        d_model: usize,
    ) -> Result<(), ConfigError> {
        let Some(source) = source.filter(|source| source.window.is_none() && !source.alibi) else {
            let want = "after an `attention` layer, the last of them without `window` and `alibi`";
            return Err(ConfigError::new("cross_attention", "without keys and values", want));
        };
        let shared = check_shared(source.heads, source.key_value_heads)?;
        let own = self.resolve(d_model)?;
        let width = key_width(source.key_width, d_model, source.heads)?;
        let refuse = |key: &str, got: String, want: String| {
            let want = format!("{want} the `attention` layer before");
            Err(ConfigError::new(key, got, want).within("cross_attention"))
        };
        if !self.heads.is_multiple_of(shared) {
            let want = format!("a multiple of {shared}, the key heads of");
            return refuse("heads", self.heads.to_string(), want);
        }
        if own != width {
            return refuse("key_width", own.to_string(), format!("{width}, as in"));
        }
        if self.rope != source.rope {
            return refuse("rope", self.rope.to_string(), format!("{}, as in", source.rope));
        }
        if let Some(part) = source.rope_width.filter(|_| self.rope) {
            let want = format!("false after rotation of {part} channels alone, as in");
            return refuse("rope", self.rope.to_string(), want);
        }
        if self.rope && self.rope_theta != source.rope_theta {
            let want = format!("{}, as in", source.rope_theta);
            return refuse("rope_theta", self.rope_theta.to_string(), want);
        }
        Ok(())
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<CrossAttention<B>, ConfigError> {
        let queries = self.heads * self.resolve(d_model)?;
        Ok(CrossAttention {
            q_proj: linear(d_model, queries, device),
            o_proj: linear(queries, d_model, device).into(),
            heads: self.heads,
            rope: self.rope.then_some(Rope::whole(self.rope_theta)),
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens. Keys and values
    /// are counted where they are made.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let queries = self.heads * self.resolve(d_model)?;
        // On average a token looks at half the sequence: scores and their sum over values.
        let look_back = 2 * 2 * queries as u64 * length.div_ceil(2) as u64;
        let products = linear_flops(d_model, queries) + linear_flops(queries, d_model);
        Ok(Cost { state_bytes: 0, flops_per_token: products + look_back })
    }
}

/// Nothing: what the layer looks back at is another layer's.
#[derive(Debug, Clone, Default)]
pub struct NoState<B: Backend>(PhantomData<B>);

impl<B: Backend> RecurrentState<B> for NoState<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None)
    }

    fn from_tensors(_tensors: StateTensors<B>) -> Self {
        Self::default()
    }
}

/// Cross-attention of YOCO's second half: every layer reads the keys and values that one earlier layer made
/// and keeps.
///
/// # Recurrence
/// ```text
/// q = rope(x W_q)
/// y = softmax(q k^T / sqrt(K) + causal mask) v W_o      k, v: of the last `attention` layer before this
/// ```
/// ```text
/// x_t, position ──> q
///                                            ┌─ write ─┐
/// keys, values of that layer ───────────────>│ nothing │──┬──> keys, values
///                                            └─────────┘  │
///                 ┌─ read ─────────────────────────────┐  │
///  y_t <── W_o <──│ softmax(q keys^T / sqrt(K)) values │<─┘
///                 └────────────────────────────────────┘
/// ```
/// That layer is the first of the second half: it makes keys and values of the first half's output, and reads
/// them itself.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is [`NoState`]: nothing of its own. Keys and values are those
/// of the layer before, `[B, Hk, T, K]`.
/// # Errors
/// [`CrossAttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads` of 0,
/// `heads` that do not divide D while `key_width` is left out, an odd `key_width` that is rotated or a
/// `rope_theta` below 1. A model refuses the layer where no `attention` layer without `window` and `alibi` is
/// before it, or where heads, width or rotation do not fit. `run` panics where no layer before made keys and
/// values.
/// # Source
/// Sun et al., arXiv 2405.05254; among neighbouring layers, arXiv 2405.12981.
/// # Departures
/// The paper gives keys and values a norm of their own, whose weight our `W_k` and `W_v` take in.
#[derive(Module, Debug)]
pub struct CrossAttention<B: Backend> {
    q_proj: Linear<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    rope: Option<Rope>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for CrossAttention<B> {
    type State = NoState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Refused;

    fn run(
        &self,
        x: Tensor<B, 3>,
        _state: Option<NoState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, NoState<B>) {
        let cache =
            shared.keys_values.as_ref().expect("a layer before this one made keys and values");
        let first = cache.position - x.dims()[1];
        let rotation = self.rope.map(|rope| (rope, first));
        let q = turned(split_heads(self.q_proj.forward(x), self.heads), &None, rotation);
        let seen = Seen::Causal { window: None };
        let o = weigh(q, [&cache.keys, &cache.values], None, seen);
        (self.o_proj.forward(o), NoState::default())
    }
}
