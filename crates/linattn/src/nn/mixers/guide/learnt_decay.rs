//! Linear attention that fades: every head forgets at a rate of its own, which is learnt.
//! ```text
//! q, k, v = x W_q, x W_k, x W_v
//! a       = sigmoid(decay)                  a number for every head
//! S       = a S + k^T v
//! y       = rms_norm(q S / sqrt(K)) W_o
//! ```
//! RetNet's recurrence, arXiv 2307.08621, without its rotation and with rates that are learnt.

use super::{MatrixPast, MatrixState, TokenMixer, Varlen, key_width, linear_flops, memory_cost};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::{Module, Param};
use burn::tensor::activation::log_sigmoid;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Linear attention with a learnt decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearntDecayConfig {
    /// Heads, H.
    pub heads: usize,
    /// K, width of a key, and as much of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LearntDecayConfig {
    fn default() -> Self {
        Self { heads: 1, key_width: None, norm_eps: 1e-5 }
    }
}

impl LearntDecayConfig {
    /// K.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        check_epsilon(self.norm_eps)?;
        key_width(self.key_width, d_model, self.heads)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<LearntDecay<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let inner = self.heads * width;
        Ok(LearntDecay {
            q_proj: linear(d_model, inner, device),
            k_proj: linear(d_model, inner, device),
            v_proj: linear(d_model, inner, device),
            decay: Param::from_tensor(fresh_decay(self.heads, device)),
            norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(inner, d_model, device).into(),
            heads: self.heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let inner = self.heads * width;
        let mut cost = memory_cost(self.heads, width, width, false);
        cost.flops_per_token += linear_flops(d_model, 3 * inner) + linear_flops(inner, d_model);
        Ok(cost)
    }
}

/// Where heads begin, as logits, `[H]`: head h keeps 1 - 2^{-5-h} of its memory, as in RetNet.
fn fresh_decay<B: Backend>(heads: usize, device: &B::Device) -> Tensor<B, 1> {
    let logit = |h: usize| (2f64.powi(5 + h as i32) - 1.0).ln() as f32;
    let logits: Vec<f32> = (0..heads).map(logit).collect();
    Tensor::from_data(TensorData::new(logits, [heads]), device)
}

/// Linear attention with a learnt decay. `D -> D`.
#[derive(Module, Debug)]
pub struct LearntDecay<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    decay: Param<Tensor<B, 1>>,
    norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for LearntDecay<B> {
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
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let qkv = ConvQkv::plain(projections, [self.heads; 3]);
        let (Qkv { q, k, v }, []) = qkv.project(&x, [], &mut past.conv_states);
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let g = log_sigmoid(self.decay.val()).reshape([1, 1, self.heads]);
        let g = g.expand([batch, tokens, self.heads]);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let y = GatedOutput::silu(&self.norm, &self.o_proj).forward(o, None);
        (y, past.then(memory, tokens))
    }
}
