//! Lightning attention. Recurrence, shapes and source: [`LightningAttention`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_heads, key_width, linear_flops, memory_cost,
};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, linear, merge_heads, rms_norm, split_heads, wide_type,
};
use crate::nn::projection::{Projection, project};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared};
use crate::ops::{self, Activation, LinearAttentionBackend};
use burn::module::Module;
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`LightningAttention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LightningAttentionConfig {
    /// Heads.
    pub heads: usize,
    /// K and V, width of a head; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Factor of all slopes; 0 forgets nothing.
    pub decay_scale: f64,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LightningAttentionConfig {
    fn default() -> Self {
        Self { heads: 1, key_width: None, decay_scale: 1.0, norm_eps: 1e-5 }
    }
}

impl LightningAttentionConfig {
    /// Width of a head.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        check_heads(self.heads, None)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if !(self.decay_scale >= 0.0 && self.decay_scale.is_finite()) {
            return Err(ConfigError::new("decay_scale", self.decay_scale, "at least 0"));
        }
        check_epsilon(self.norm_eps)?;
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<LightningAttention<B>, ConfigError> {
        let values = self.heads * self.resolve(d_model)?;
        Ok(LightningAttention {
            qkv_proj: linear(d_model, 3 * values, device),
            output_gate: linear(d_model, values, device),
            norm: RmsNormConfig::new(values).with_epsilon(self.norm_eps).init(device),
            out_proj: linear(values, d_model, device).into(),
            heads: self.heads,
            decay_scale: self.decay_scale,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let values = self.heads * width;
        let mut cost = memory_cost(self.heads, width, width, false);
        cost.flops_per_token += linear_flops(d_model, 4 * values) + linear_flops(values, d_model);
        Ok(cost)
    }
}

/// ALiBi's slopes: 2^{-8/H}, 2^{-16/H} and so on to 2^-8 where H is a power of two. Else those of the
/// largest power below it, then every other one of the power above.
fn slopes(heads: usize) -> Vec<f64> {
    let geometric = |heads: usize| -> Vec<f64> {
        (1..=heads).map(|h| 2f64.powf(-8.0 * h as f64 / heads as f64)).collect()
    };
    if heads.is_power_of_two() {
        return geometric(heads);
    }
    let above = heads.next_power_of_two();
    let below = above / 2;
    let mut slopes = geometric(below);
    slopes.extend(geometric(above).into_iter().step_by(2).take(heads - below));
    slopes
}

/// Lightning attention: linear attention of activated queries, keys and values, with a fixed decay per head.
///
/// # Recurrence
/// ```text
/// q, k, v = silu(x W_qkv)
/// S       = e^{-s_h} S + k^T v        s_h = 2^{-8 (h + 1) / H} times `decay_scale`, h from 0
/// y       = (rms_norm(q S) sigmoid(x W_g)) W_o          one norm over all heads
/// ```
/// ```text
/// x_t ──> q, k, v
///             ┌─ decay ────┐   ┌─ write ─┐
/// S_{t-1} ───>│ e^{-s_h} S │──>│ + k^T v │──┬──> S_t
///             └────────────┘   └─────────┘  │
///                                ┌─ read ┐  │
///  y_t <── W_o <── norm, gate <──│ q S   │<─┘
///                                └───────┘
/// ```
/// The slopes s_h are ALiBi's (arXiv 2108.12409), and its way with numbers of heads that are no powers of
/// two. Later layers forget less: the released models scale the slopes of layer l of L, from 0, by
/// 1 - l / (L - 1) + 1e-5.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`MatrixState`]: `memory`, `[B, H, K, V]` with V = K,
/// f32; `position`, tokens seen. s_h is minus the natural log of the share kept, the same for every token.
/// # Errors
/// [`LightningAttentionConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `heads`
/// of 0, `heads` that do not divide D while `key_width` is left out, a `decay_scale` below 0 or a `norm_eps`
/// below 1e-37.
/// # Source
/// Qin et al., arXiv 2401.04658, as TransNormer and MiniMax-01 have it; the layer around it as in arXiv
/// 2501.08313.
#[derive(Module, Debug)]
pub struct LightningAttention<B: Backend> {
    /// Query, key and value of the first head, then of the next.
    qkv_proj: Linear<B>,
    output_gate: Linear<B>,
    norm: RmsNorm<B>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    decay_scale: f64,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for LightningAttention<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, _], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let silu = Some(Activation::Silu);
        let projections = [
            Projection::convolved(&self.qkv_proj, None, silu, None),
            Projection::plain(&self.output_gate),
        ];
        let [qkv, gate] = project(&x, projections, &mut past.conv_states);
        let qkv = split_heads(qkv, self.heads);
        let width = qkv.dims()[3] / 3;
        let part = |i: usize| qkv.clone().narrow(3, i * width, width);
        let g = self.log_decay(&x).expand([batch, tokens, self.heads]);
        let inputs = ops::LinearAttentionInputs::new(part(0), part(1), part(2)).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let gate = (Activation::Sigmoid, gate);
        let y = self.out_proj.forward(rms_norm(&self.norm, merge_heads(o), Some(gate)));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> LightningAttention<B> {
    /// `[1, 1, H]`.
    fn log_decay(&self, like: &Tensor<B, 3>) -> Tensor<B, 3> {
        let logs: Vec<f32> =
            slopes(self.heads).iter().map(|slope| (-slope * self.decay_scale) as f32).collect();
        let data = TensorData::new(logs, [1, 1, self.heads]);
        Tensor::from_data(data, (&like.device(), wide_type(like.dtype())))
    }
}
