//! Window attention beside a memory. Recurrence, shapes and source: [`WindowAttention`].

use super::retnet::{check_rotated, check_theta};
use super::{block_width, linear_flops};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{INIT_STD, linear, split_heads};
use crate::nn::score_bias::causal_mask;
use crate::nn::softmax::{KeyValueCache, rotated_heads, through_window, weigh};
use crate::nn::{ConfigError, Cost, Kept, KeptTensors, LARGEST, Linear, Rope};
use crate::ops::{LinearAttentionBackend, Seen, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`WindowAttention`], attention through a window beside a memory. The layer's page has
/// recurrence, shapes, errors and source.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WindowAttentionConfig {
    /// Heads of attention, which share out the width of the memory's heads.
    pub heads: usize,
    /// Tokens that a query sees, itself and those just before it, at least 2.
    pub window: usize,
    /// Learnt tokens that every query sees besides; 0 for none.
    pub persistent: usize,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
}

impl Default for WindowAttentionConfig {
    fn default() -> Self {
        Self { heads: 1, window: 64, persistent: 4, rope_theta: 10_000.0 }
    }
}

impl WindowAttentionConfig {
    /// Checks every key, for an inner width of `width`.
    pub(super) fn check(&self, width: usize) -> Result<(), ConfigError> {
        check_rotated("heads", block_width(self.heads, width)?)?;
        if !(2..=LARGEST).contains(&self.window) {
            return Err(ConfigError::new("window", self.window, format!("from 2 to {LARGEST}")));
        }
        if self.persistent > LARGEST {
            return Err(ConfigError::new(
                "persistent",
                self.persistent,
                format!("at most {LARGEST}"),
            ));
        }
        check_theta(self.rope_theta)
    }

    /// The branch in a model of width `d_model`, of inner width `width`.
    pub(super) fn init<B: Backend>(
        &self,
        [d_model, width]: [usize; 2],
        device: &B::Device,
    ) -> WindowAttention<B> {
        let project = || linear(d_model, width, device);
        let normal = Initializer::Normal { mean: 0.0, std: INIT_STD };
        let persistent = (self.persistent > 0).then_some(self.persistent);
        WindowAttention {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            persistent: persistent.map(|count| normal.init([count, d_model], device)),
            config: *self,
        }
    }

    /// Cost of the same.
    pub(super) fn cost(&self, [d_model, width]: [usize; 2]) -> Cost {
        let seen = (self.window + self.persistent) as u64;
        Cost {
            state_bytes: 4 * 2 * ((self.window - 1) * width) as u64,
            flops_per_token: linear_flops(d_model, 3 * width) + 4 * width as u64 * seen,
        }
    }
}

/// Softmax attention through a window, behind tokens that are learnt: the branch that the memory of
/// [`Titans`](super::Titans) gates.
///
/// # Recurrence
/// ```text
/// q, k     = rope(x W_q), rope(x W_k)      v = x W_v
/// k_p, v_p = p W_k, p W_v                  learnt tokens p, which every token sees
/// a        = softmax([k_p, k] q^T / sqrt(K) + window) [v_p, v]
/// ```
/// ```text
/// x_t, position ──> q, k, v;  learnt tokens p ──> k_p, v_p
///                                       ┌─ write ──────────────────────┐
/// keys, values ────────────────────────>│ append k, v; drop the oldest │──┬──> keys, values
///                                       └──────────────────────────────┘  │
///                                 ┌─ read ─────────────────────────────┐  │
///  y_t <── memory as gate, W_o <──│ softmax(q [k_p, keys]^T / sqrt(K)) │<─┘
///                                 │   times [v_p, values]              │
///                                 └────────────────────────────────────┘
/// ```
/// # Shapes and units
/// Input is `[B, T, D]`, output `[B, T, width]` of the memory's heads together. Keys and values that the
/// window still sees are kept among the memory's `conv_states`, `[B, w - 1, width]` each, zeros in front at the
/// start of a sequence, so that the state does not grow. w, `window`, counts tokens.
/// # Errors
/// [`TitansConfig::init`](super::TitansConfig::init) gives a [`ConfigError`] where `heads` do not divide the
/// width or leave heads of odd width, `window` is below 2, `persistent` is too large or `rope_theta` below 1.
/// # Source
/// Behrouz et al., arXiv 2501.00663, whose "persistent memory" p is.
/// # Departures
/// p is not rotated here.
#[derive(Module, Debug)]
pub struct WindowAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    /// p, `[count, D]`.
    persistent: Option<Param<Tensor<B, 2>>>,
    #[module(skip)]
    config: WindowAttentionConfig,
}

impl<B: LinearAttentionBackend> WindowAttention<B> {
    /// Of `x`, `[B, T, D]`, whose first token stands at `position`: `[B, T, width]`.
    pub(super) fn forward(
        &self,
        x: &Tensor<B, 3>,
        conv_states: &mut ConvPast<B>,
        position: usize,
    ) -> Tensor<B, 3> {
        let rotation = (Rope::whole(self.config.rope_theta), position);
        let rows = [&self.q_proj, &self.k_proj, &self.v_proj].map(|layer| layer.forward(x.clone()));
        let rows = rotated_heads(rows, self.config.heads, rotation);
        let learnt = self.learnt(x);
        let (before, window) = (self.before(conv_states, position, x), Some(self.config.window));
        let (a, cache) = through_window(rows, window, before, |q, cache, seen| match &learnt {
            Some([keys, values]) => {
                let hidden = causal_mask(&q, cache.keys.dims()[2], window);
                let ([.., tokens, _], count) = (hidden.dims(), keys.dims()[2]);
                let whole = Tensor::zeros([1, 1, 1, tokens, count], (&x.device(), hidden.dtype()));
                let keys = cat(vec![keys.clone(), cache.keys.clone()], 2);
                let values = cat(vec![values.clone(), cache.values.clone()], 2);
                weigh(q, [&keys, &values], Some(cat(vec![whole, hidden], 4)), Seen::All)
            }
            None => weigh(q, [&cache.keys, &cache.values], None, seen),
        });
        for (name, rows) in [(Kept::WindowKey, cache.keys), (Kept::WindowValue, cache.values)] {
            conv_states.keep(name, self.padded(rows));
        }
        a
    }

    /// Keys and values of the learnt tokens, `[B, H, count, K]`.
    fn learnt(&self, x: &Tensor<B, 3>) -> Option<[Tensor<B, 4>; 2]> {
        let p = typed(self.persistent.as_ref()?.val(), x.dtype()).unsqueeze::<3>();
        Some([&self.k_proj, &self.v_proj].map(|layer| {
            let rows = split_heads(layer.forward(p.clone()), self.config.heads).swap_dims(1, 2);
            let [_, heads, count, width] = rows.dims();
            rows.expand([x.dims()[0], heads, count, width])
        }))
    }

    /// Keys and values of the tokens before that the window still sees.
    fn before(
        &self,
        conv_states: &mut ConvPast<B>,
        position: usize,
        x: &Tensor<B, 3>,
    ) -> Option<KeyValueCache<B>> {
        let [keys, values] =
            [Kept::WindowKey, Kept::WindowValue].map(|name| conv_states.draw(name));
        let (keys, values) = (keys?, values?);
        let kept = self.config.window - 1;
        let there = position.min(kept);
        let [keys, values] = [keys, values].map(|conv_state| {
            let rows = typed(conv_state.narrow(1, kept - there, there), x.dtype());
            split_heads(rows, self.config.heads).swap_dims(1, 2)
        });
        Some(KeyValueCache { keys, values, position, conv_states: KeptTensors::default() })
    }

    /// Keys or values of a cache, `[B, H, S, K]`, as those of a whole window but its last token, zeros in front:
    /// `[B, window - 1, H K]`.
    fn padded(&self, rows: Tensor<B, 4>) -> Tensor<B, 3> {
        let [batch, heads, there, width] = rows.dims();
        let missing = self.config.window - 1 - there;
        let rows = rows.swap_dims(1, 2).reshape([batch, there, heads * width]);
        if missing == 0 {
            return rows;
        }
        let zeros = Tensor::zeros([batch, missing, heads * width], (&rows.device(), rows.dtype()));
        cat(vec![zeros, rows], 1)
    }
}
