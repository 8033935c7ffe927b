//! RWKV-6. Recurrence, shapes and source: `pages/rwkv6.md`, the page of [`Rwkv6`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_heads, key_width, linear_flops, memory_cost,
    value_width,
};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, group_norm, linear, merge_heads, split_heads,
};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{self, Along, GateActivation, LinearAttentionBackend, Read, accumulator, typed};
use burn::module::{Module, Param};
use burn::nn::{GroupNorm, GroupNormConfig, Tanh};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Projections that see a mixture of their own.
const MIXTURES: usize = 5;
/// How the fresh shares of the token before fall over the channels, for r, w, k, v and g.
const SHARE_POWERS: [f64; MIXTURES] = [0.5, 1.0, 1.0, 1.0, 0.5];

/// Config of [`Rwkv6`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv6Config {
    /// Heads.
    pub heads: usize,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Inner width of the projections that make each of the five mixtures.
    pub mix_low_rank: usize,
    /// Inner width of the projection that makes the decay.
    pub gate_low_rank: usize,
    /// Added to a variance before its root; the authors have 64e-5.
    pub norm_eps: f64,
}

impl Default for Rwkv6Config {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            expand_v: 1.0,
            mix_low_rank: 32,
            gate_low_rank: 64,
            norm_eps: 1e-5,
        }
    }
}

impl Rwkv6Config {
    /// K and V.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        check_heads(self.heads, None)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let value = value_width(key, self.expand_v)?;
        positive("mix_low_rank", self.mix_low_rank)?;
        positive("gate_low_rank", self.gate_low_rank)?;
        check_epsilon(self.norm_eps)?;
        Ok((key, value))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Rwkv6<B>, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let plain = |to| Projection { linear: linear(d_model, to, device) };
        let mixtures = MIXTURES * self.mix_low_rank;
        Ok(Rwkv6 {
            x_proj: (
                MixedProjection {
                    linear: linear(d_model, mixtures, device),
                    mu: fresh_shares(&[1.0], [d_model], device),
                },
                Tanh::new(),
                linear(mixtures, d_model, device),
            ),
            x_bias: fresh_shares(&SHARE_POWERS, [MIXTURES, d_model], device),
            r_proj: plain(keys),
            w_proj: LowRankProjection {
                linear: LowRankLinear {
                    lora: (
                        linear(d_model, self.gate_low_rank, device),
                        Tanh::new(),
                        Linear {
                            bias: Some(Param::from_tensor(fresh_decay(keys, device))),
                            ..linear(self.gate_low_rank, keys, device)
                        },
                    ),
                },
            },
            k_proj: plain(keys),
            v_proj: plain(values),
            g_proj: plain(values),
            bonus: fresh_bonus([self.heads, key], device),
            g_norm: GroupNormConfig::new(self.heads, values)
                .with_epsilon(self.norm_eps)
                .init(device),
            o_proj: linear(values, d_model, device).into(),
            heads: self.heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value) = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, self.heads * value);
        let mut cost = memory_cost(self.heads, key, value, false);
        cost.state_bytes += 4 * d_model as u64;
        let mixtures = MIXTURES * self.mix_low_rank;
        let inward = mixtures + self.gate_low_rank + 2 * keys + 2 * values;
        cost.flops_per_token += linear_flops(d_model, inward)
            + linear_flops(mixtures, d_model)
            + linear_flops(self.gate_low_rank, keys)
            + linear_flops(values, d_model);
        Ok(cost)
    }
}

/// ln(-ln) of what each key channel keeps of its memory a token, from e^-6 up to e^-1 forgotten.
fn fresh_decay<B: Backend>(keys: usize, device: &B::Device) -> Tensor<B, 1> {
    let last = (keys - 1).max(1) as f64;
    let values: Vec<f32> =
        (0..keys).map(|n| (-6.0 + 5.0 * (n as f64 / last).powf(0.7)) as f32).collect();
    Tensor::from_data(TensorData::new(values, [keys]), device)
}

/// `1 - (n / D)^p` for channel n and each of the powers p, in `shape`, whose last size is D.
fn fresh_shares<B: Backend, const R: usize>(
    powers: &[f64],
    shape: [usize; R],
    device: &B::Device,
) -> Param<Tensor<B, R>> {
    let width = shape[R - 1];
    let share = |i: usize| 1.0 - ((i % width) as f64 / width as f64).powf(powers[i / width]);
    let values: Vec<f32> = (0..powers.len() * width).map(|i| share(i) as f32).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), device))
}

/// 0, 0.1 and -0.1 in turn, `[H, K]`.
fn fresh_bonus<B: Backend>(shape: [usize; 2], device: &B::Device) -> Param<Tensor<B, 2>> {
    let bonus = |n: usize| 0.1 * ((n + 1) % 3) as f32 - 0.1;
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(bonus).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), device))
}

/// A linear layer.
#[derive(Module, Debug)]
pub struct Projection<B: Backend> {
    linear: Linear<B>,
}

/// A linear layer, and the share of the token before in what it sees.
#[derive(Module, Debug)]
pub struct MixedProjection<B: Backend> {
    linear: Linear<B>,
    mu: Param<Tensor<B, 1>>,
}

/// Two linear layers with a tanh between.
#[derive(Module, Debug)]
pub struct LowRankLinear<B: Backend> {
    lora: (Linear<B>, Tanh, Linear<B>),
}

/// [`LowRankLinear`], under its name in checkpoints.
#[derive(Module, Debug)]
pub struct LowRankProjection<B: Backend> {
    linear: LowRankLinear<B>,
}

#[doc = include_str!("pages/rwkv6.md")]
#[derive(Module, Debug)]
pub struct Rwkv6<B: Backend> {
    x_proj: (MixedProjection<B>, Tanh, Linear<B>),
    x_bias: Param<Tensor<B, 2>>,
    r_proj: Projection<B>,
    w_proj: LowRankProjection<B>,
    k_proj: Projection<B>,
    v_proj: Projection<B>,
    g_proj: Projection<B>,
    /// u, `[H, K]`.
    bonus: Param<Tensor<B, 2>>,
    g_norm: GroupNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Rwkv6<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, width], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let before = past.conv_states.shifted(&x);
        let delta = before - x.clone();

        let shares = self.shares(x.clone(), delta.clone());
        let mixed = |j| {
            let share: Tensor<B, 3> =
                shares.clone().narrow(0, j, 1).reshape([batch, tokens, width]);
            x.clone() + delta.clone() * share
        };
        let r = split_heads(self.r_proj.linear.forward(mixed(0)), self.heads);
        let (narrow, tanh, widen) = &self.w_proj.linear.lora;
        let g = widen.forward(tanh.forward(narrow.forward(mixed(1))));
        let g = split_heads(accumulator(g).exp().neg(), self.heads);
        let k = split_heads(self.k_proj.linear.forward(mixed(2)), self.heads);
        let v = split_heads(self.v_proj.linear.forward(mixed(3)), self.heads);
        let gate = self.g_proj.linear.forward(mixed(4));

        let u = typed(self.bonus.val(), r.dtype()).unsqueeze::<4>(); // [1, 1, H, K]
        let own = (r.clone() * k.clone() * u).sum_along(3) * v.clone();
        let inputs = ops::LinearAttentionInputs {
            read: Read::Before,
            ..ops::LinearAttentionInputs::new(r, k, v).with_decay(g)
        };
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let o = group_norm(&self.g_norm, merge_heads(o + own));
        let y = ops::gate(o, gate, GateActivation::Silu);
        (self.o_proj.forward(y), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Rwkv6<B> {
    /// Shares of the token before in what each projection sees, `[5, B T, D]`.
    fn shares(&self, x: Tensor<B, 3>, delta: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, tokens, width] = x.dims();
        let (narrow, tanh, widen) = &self.x_proj;
        let dtype = x.dtype();
        let seen = x + delta * typed(narrow.mu.val(), dtype).unsqueeze::<3>();
        let low = tanh.forward(narrow.linear.forward(seen)); // [B, T, 5 R]
        let rank = low.dims()[2] / MIXTURES;
        let low: Tensor<B, 3> = low.reshape([batch * tokens, MIXTURES, rank]);
        let widen = widen.matrix(dtype);
        let widen: Tensor<B, 3> = widen.reshape([MIXTURES, rank, width]);
        let shares = low.swap_dims(0, 1).matmul(widen);
        shares + typed(self.x_bias.val(), dtype).unsqueeze_dim::<3>(1)
    }
}
