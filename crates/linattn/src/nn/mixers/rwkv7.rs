//! RWKV-7's time mix. Recurrence, shapes and source: `pages/rwkv7.md`, the page of [`Rwkv7`].

use super::rwkv7_parts::{LowRankMap, bend, fresh_share, from_places, ramp};
use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_heads, key_width, linear_flops, memory_cost,
};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, group_norm, l2_normalize, linear, merge_heads, split_heads,
};
use crate::nn::recurrence::low_rank;
use crate::nn::{ConfigError, Cost, Linear, Shared, positive};
use crate::ops::{
    self, Along, Decay, GateActivation, LinearAttentionBackend, LowRankInputs, accumulator,
};
use burn::module::{Initializer, Module, Param};
use burn::nn::{GroupNorm, GroupNormConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Bound of the log decay, `e^{-1/2}`: no row forgets more than 45 per cent at once.
const FASTEST_DECAY: f64 = 0.606_530_659_712_633_4;

/// Config of [`Rwkv7`], RWKV-7's time mix. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7Config {
    /// Heads.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Inner width of the decay's projection; by default 2.5 sqrt(d_model) K / 64, rounded to a
    /// multiple of 32, at least 32.
    pub decay_rank: Option<usize>,
    /// Inner width of the learning rate's projection; as `decay_rank` by default.
    pub rate_rank: Option<usize>,
    /// Inner width of the output gate's projection; by default 5 sqrt(d_model), rounded to a multiple
    /// of 32, at least 32.
    pub gate_rank: Option<usize>,
    /// Whether values are mixed with those of the model's first RWKV-7 layer, which is one before this.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_residual: bool,
    /// Inner width of the projection that says how much; by default 1.7 sqrt(d_model) K / 64, rounded
    /// to a multiple of 32, at least 32.
    pub value_rank: Option<usize>,
    /// Times K, added to a variance before its root.
    pub norm_eps: f64,
}

impl Default for Rwkv7Config {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            decay_rank: None,
            rate_rank: None,
            gate_rank: None,
            value_residual: false,
            value_rank: None,
            norm_eps: 1e-5,
        }
    }
}

/// Widths that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    /// Of one head.
    key: usize,
    /// Of all heads.
    keys: usize,
    decay: usize,
    rate: usize,
    gate: usize,
    /// Of the value residual, if there is one.
    value: Option<usize>,
}

/// The nearest multiple of 32, at least 32.
fn near_32(width: f64) -> usize {
    (32.0 * (width / 32.0).round()).max(32.0) as usize
}

impl Rwkv7Config {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        check_heads(self.heads, None)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let root = (d_model as f64).sqrt();
        let narrow = near_32(2.5 * root * key as f64 / 64.0);
        let decay = positive("decay_rank", self.decay_rank.unwrap_or(narrow))?;
        let rate = positive("rate_rank", self.rate_rank.unwrap_or(narrow))?;
        let gate = positive("gate_rank", self.gate_rank.unwrap_or(near_32(5.0 * root)))?;
        let value = match (self.value_residual, self.value_rank) {
            (true, rank) => {
                let usual = near_32(1.7 * root * key as f64 / 64.0);
                Some(positive("value_rank", rank.unwrap_or(usual))?)
            }
            (false, None) => None,
            (false, Some(rank)) => {
                let want = "left out, unless `value_residual` is true";
                return Err(ConfigError::new("value_rank", rank, want));
            }
        };
        check_epsilon(self.norm_eps)?;
        Ok(Widths { key, keys: self.heads * key, decay, rate, gate, value })
    }

    /// Refuses a value residual without a layer that gives the values, `first`, or with one whose
    /// values are not as wide.
    pub(in crate::nn) fn check_source(
        &self,
        first: Option<&Self>,
        d_model: usize,
    ) -> Result<(), ConfigError> {
        if !self.value_residual {
            return Ok(());
        }
        let Some(first) = first else {
            let want = "false in the model's first `rwkv7` layer, whose values later ones mix in";
            return Err(ConfigError::new("value_residual", true, want).within("rwkv7"));
        };
        let (own, first) = (self.resolve(d_model)?, first.resolve(d_model)?);
        if own.keys == first.keys {
            return Ok(());
        }
        let want = format!(
            "{} over heads: with `value_residual`, heads times it is as in the first `rwkv7` layer",
            first.keys
        );
        Err(ConfigError::new("key_width", own.key, want).within("rwkv7"))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Rwkv7<B>, ConfigError> {
        let Widths { key, keys, decay, rate, gate, value } = self.resolve(d_model)?;
        let share = |power| fresh_share(d_model, power, device);
        let values = |f: &dyn Fn(usize) -> f64| from_places(keys, f, device);
        let place = |n: usize| ramp(n, keys);
        let bent = |n: usize| bend(n % key, key);
        Ok(Rwkv7 {
            x_r: share(0.2),
            x_w: share(0.9),
            x_k: share(0.7),
            x_v: share(0.7),
            x_a: share(0.9),
            x_g: share(0.2),
            k_k: values(&|n| 0.71 - 0.1 * (place(n) - 0.5)),
            k_a: Initializer::Constant { value: 1.02 }.init([keys], device),
            r_k: Initializer::Constant { value: -0.04 }.init([self.heads, key], device),
            r_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, keys, device),
            w_lora: LowRankMap::new(d_model, decay, keys, device)
                .with_bias(values(&|n| 6.0 * place(n) + 2.5 * bent(n) - 5.5)),
            a_lora: LowRankMap::new(d_model, rate, keys, device)
                .with_bias(values(&|n| 0.3 * bent(n) + 0.4 * (place(n) - 0.5) - 0.19)),
            v_lora: value.map(|rank| {
                LowRankMap::new(d_model, rank, keys, device)
                    .with_bias(values(&|n| 0.73 - 0.4 * (place(n) - 0.5)))
            }),
            g_lora: LowRankMap::new(d_model, gate, keys, device),
            g_norm: GroupNormConfig::new(self.heads, keys)
                .with_epsilon(self.norm_eps * key as f64)
                .init(device),
            o_proj: linear(keys, d_model, device).into(),
            heads: self.heads,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, keys, decay, rate, gate, value } = self.resolve(d_model)?;
        let mut cost = memory_cost(self.heads, key, key, true);
        // A write of its own besides the delta rule's.
        cost.flops_per_token += 2 * (keys * key) as u64;
        let ranks = decay + rate + gate + value.unwrap_or(0);
        cost.flops_per_token += linear_flops(d_model, 3 * keys + ranks)
            + linear_flops(ranks, keys)
            + linear_flops(keys, d_model);
        cost.state_bytes += 4 * d_model as u64;
        Ok(cost)
    }
}

#[doc = include_str!("pages/rwkv7.md")]
#[derive(Module, Debug)]
pub struct Rwkv7<B: Backend> {
    x_r: Param<Tensor<B, 3>>,
    x_w: Param<Tensor<B, 3>>,
    x_k: Param<Tensor<B, 3>>,
    x_v: Param<Tensor<B, 3>>,
    x_a: Param<Tensor<B, 3>>,
    x_g: Param<Tensor<B, 3>>,
    k_k: Param<Tensor<B, 1>>,
    k_a: Param<Tensor<B, 1>>,
    r_k: Param<Tensor<B, 2>>,
    r_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    w_lora: LowRankMap<B>,
    a_lora: LowRankMap<B>,
    v_lora: Option<LowRankMap<B>>,
    g_lora: LowRankMap<B>,
    g_norm: GroupNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
}

impl<B: LinearAttentionBackend> Rwkv7<B> {
    /// Values of `x`, `[B, T, D]`: `[B, T, H V]`, those of the first layer mixed in where asked for.
    fn values(&self, x: Tensor<B, 3>, shared: &mut Shared<B>) -> Tensor<B, 3> {
        let own = self.v_proj.forward(x.clone());
        match &self.v_lora {
            Some(lora) => {
                let first =
                    shared.first_values.clone().expect("a layer before this one gave values");
                own.clone() + (first - own) * sigmoid(lora.forward(x, |x| x))
            }
            None => {
                shared.first_values.get_or_insert_with(|| own.clone());
                own
            }
        }
    }
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Rwkv7<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    /// The state's only conv state is the last token. The first of these layers leaves its values in `shared`.
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let shares = [&self.x_r, &self.x_w, &self.x_k, &self.x_v, &self.x_a, &self.x_g];
        let [of_r, of_w, of_k, of_v, of_a, of_g] =
            past.conv_states.mixed(&x, shares.map(Param::val));
        let split = |x: Tensor<B, 3>| split_heads(x, self.heads);

        let r = self.r_proj.forward(of_r);
        let v = split(self.values(of_v, shared));
        let decay = accumulator(self.w_lora.forward(of_w, |x| x.tanh()));
        let decay = split(ops::activate(decay, GateActivation::Sigmoid, -FASTEST_DECAY));
        let rate = sigmoid(self.a_lora.forward(of_a, |x| x));
        let gate = self.g_lora.forward(of_g, sigmoid);
        let k = self.k_proj.forward(of_k);
        let removed = ops::scale_channels(k.clone(), self.k_k.val(), None, None);
        let removed = l2_normalize(split(removed));
        // 1 + (rate - 1) k_a
        let strength = self.k_a.val();
        let rest = strength.clone().neg() + 1.0;
        let k = k * ops::scale_channels(rate.clone(), strength, Some(rest), None);
        let bonus =
            ops::scale_channels(r.clone() * k.clone(), self.r_k.val().flatten(0, 1), None, None);
        let bonus = split(bonus).sum_along(3) * v.clone();

        let inputs = LowRankInputs {
            q: split(r),
            k: split(k),
            v,
            a: removed.clone().neg(),
            b: removed * split(rate),
            g: Some(Decay::Vector(decay)),
        };
        let (o, memory) = low_rank(inputs, past.memory.take(), past.conv_states.lengths());
        let y = (group_norm(&self.g_norm, merge_heads(o)) + merge_heads(bonus)) * gate;
        (self.o_proj.forward(y), past.then(memory, tokens))
    }
}
