//! Mamba-2 as state-space duality: linear attention with a decay that depends on the data.
//! ```text
//! z, xBC, dt = x W_in                  x: H heads of V, B and C: G groups of K
//! x, B, C    = silu(conv(xBC))
//! dt         = softplus(dt + dt_bias),  g = -exp(A_log) dt
//! S          = e^g S + B^T (dt x)
//! y          = rms_norm((C S + D x) silu(z)) W_out
//! ```
//! Source: Dao and Gu, arXiv 2405.21060. C takes the query's place, B the key's, unscaled. A starts uniform
//! in 1 to 16, dt log-uniform in 0.001 to 0.1, D as 1; linear layers as PyTorch draws them, uniform within
//! 1 / sqrt(fan-in), as the authors' code leaves them.

use super::delta_net::{fresh_a_log, fresh_dt_bias};
use super::{MatrixState, linear_flops, memory_cost};
use crate::nn::convolution::ShortConvolution;
use crate::nn::layers::{
    check_epsilon, merge_heads, rms_norm, rms_normalize, softplus, split_heads, torch_linear,
};
use crate::nn::{ConfigError, Cost, Linear, check_chunk, positive};
use crate::ops::{self, Activation, DEFAULT_CHUNK, LinearAttentionBackend, OpResult};
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Mamba-2.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba2Config {
    /// K, width of B and C.
    pub d_state: usize,
    /// Inner width over d_model.
    pub expand: usize,
    /// V, width of a head; the inner width must be a multiple of it.
    pub head_width: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Tokens the short convolution sees; 1 for a factor and a bias for each channel.
    pub conv_size: usize,
    /// Whether the norm takes each group's values by themselves, as released models of several groups
    /// have it; else all together.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub group_norm: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
    /// Tokens a chunk. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for Mamba2Config {
    fn default() -> Self {
        Self {
            d_state: 128,
            expand: 2,
            head_width: 64,
            groups: 1,
            conv_size: 4,
            group_norm: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl Mamba2Config {
    /// Inner width and heads.
    fn widths(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("d_state", self.d_state)?;
        positive("groups", self.groups)?;
        let inner = positive("expand", self.expand)? * d_model;
        if !inner.is_multiple_of(positive("head_width", self.head_width)?) {
            let want = format!("a divisor of expand * d_model = {inner}");
            return Err(ConfigError::new("head_width", self.head_width, want));
        }
        let heads = inner / self.head_width;
        if !heads.is_multiple_of(self.groups) {
            let want = format!("a divisor of the {heads} heads");
            return Err(ConfigError::new("groups", self.groups, want));
        }
        positive("conv_size", self.conv_size)?;
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        Ok((inner, heads))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mamba2<B>, ConfigError> {
        let (inner, heads) = self.widths(d_model)?;
        let channels = inner + 2 * self.groups * self.d_state;
        Ok(Mamba2 {
            in_proj: torch_linear(d_model, inner + channels + heads, device),
            conv1d: ShortConvolution::new(channels, self.conv_size, true, device),
            dt_bias: Param::from_tensor(fresh_dt_bias(heads, device)),
            a_log: Param::from_tensor(fresh_a_log(heads, 1.0, device)),
            d: Initializer::Ones.init([heads], device),
            norm: RmsNormConfig::new(inner).with_epsilon(self.norm_eps).init(device),
            out_proj: torch_linear(inner, d_model, device),
            heads,
            groups: self.groups,
            group_norm: self.group_norm,
            d_state: self.d_state,
            chunk: self.chunk,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (inner, heads) = self.widths(d_model)?;
        let channels = (inner + 2 * self.groups * self.d_state) as u64;
        let mut cost = memory_cost(heads, self.d_state, self.head_width, false);
        cost.flops_per_token += linear_flops(d_model, inner + channels as usize + heads)
            + linear_flops(inner, d_model)
            + 2 * self.conv_size as u64 * channels;
        cost.state_bytes += 4 * (self.conv_size as u64 - 1) * channels;
        Ok(cost)
    }
}

/// Mamba-2. `D -> D`.
#[derive(Module, Debug)]
pub struct Mamba2<B: Backend> {
    in_proj: Linear<B>,
    conv1d: ShortConvolution<B>,
    dt_bias: Param<Tensor<B, 1>>,
    a_log: Param<Tensor<B, 1>>,
    d: Param<Tensor<B, 1>>,
    norm: RmsNorm<B>,
    out_proj: Linear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    groups: usize,
    #[module(skip)]
    group_norm: bool,
    #[module(skip)]
    d_state: usize,
    #[module(skip)]
    chunk: usize,
}

forward_and_step!(Mamba2, ops::linear_attention, ops::linear_attention_step);

impl<B: LinearAttentionBackend> Mamba2<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        op: impl FnOnce(ops::LinearAttention<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let tokens = x.dims()[1];
        let (memory, mut before, position) = MatrixState::parts(state);
        let mut tails = vec![];
        let (inner, keys) = (self.norm.gamma.dims()[0], self.groups * self.d_state);
        let projected = self.in_proj.forward(x);
        let part = |x: &Tensor<B, 3>, from, width| x.clone().narrow(2, from, width);
        let z = part(&projected, 0, inner);
        let channels = inner + 2 * keys;
        let mixed = part(&projected, inner, channels);
        let mixed = self.conv1d.forward_between(mixed, &mut before, &mut tails);
        let dt = part(&projected, inner + channels, self.heads);
        let dt = softplus(dt + self.dt_bias.val().unsqueeze());

        let x = split_heads(part(&mixed, 0, inner), self.heads);
        let q = split_heads(part(&mixed, inner + keys, keys), self.groups);
        let k = split_heads(part(&mixed, inner, keys), self.groups);
        let v = x.clone() * dt.clone().unsqueeze_dim(3);
        let g: Tensor<B, 3> = dt * self.a_log.val().exp().neg().unsqueeze();
        let inputs = ops::LinearAttention::new(q, k, v).with_decay(g);
        let (o, memory) = op(inputs, memory).expect("the projections made the shapes");
        let skip = x * self.d.val().reshape([1, 1, self.heads, 1]);
        let y = self.normalize(ops::gate(merge_heads(o + skip), z, Activation::Silu));
        (self.out_proj.forward(y), MatrixState { memory, tails, position: position + tokens })
    }

    /// Mean square taken out, over all values or over each group's, `[B, T, D]`.
    fn normalize(&self, y: Tensor<B, 3>) -> Tensor<B, 3> {
        if !self.group_norm {
            return rms_norm(&self.norm, y, None);
        }
        let by_group = rms_normalize(split_heads(y, self.groups), self.norm.epsilon);
        merge_heads(by_group) * self.norm.gamma.val().unsqueeze()
    }
}
