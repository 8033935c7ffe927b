//! LaCT. Recurrence, shapes and source: `pages/lact.md`, the page of [`Lact`].

use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, check_divisor, key_width, linear_flops};
use crate::nn::convolution::ConvPast;
use crate::nn::fast_weights::{NetworkPast, Piece, start, zeros_like};
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, l2_normalize, linear, linear_with_bias,
    merge_heads, rms_norm, softplus, split_heads,
};
use crate::nn::projection::{Projection, project};
use crate::nn::softmax::{KeyValueCache, rotated_heads, through_window, weigh};
use crate::nn::swiglu_memory::{LactState, Rows, SwigluMemory, lengths, sizes};
use crate::nn::{ConfigError, Cost, Kept, LARGEST, Linear, NetworkMemory, Rope, Shared, positive};
use crate::ops::{LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Lact`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LactConfig {
    /// Heads of the memory, H, a divisor of d_model.
    pub heads: usize,
    /// Heads of attention, a divisor of d_model.
    pub attention_heads: usize,
    /// Width inside the memory, over that of a head.
    pub expand: usize,
    /// Tokens of a chunk. Changes results.
    pub mini_batch: usize,
    /// Tokens that attention sees.
    pub window: usize,
    /// Where learning rates start.
    pub base_lr: f64,
    /// Whether updates carry the last ones on.
    pub momentum: bool,
    /// Whether updates are made orthogonal.
    pub muon: bool,
    /// Whether queries and keys are normalised.
    pub qk_norm: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LactConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            attention_heads: 1,
            expand: 1,
            mini_batch: 2048,
            window: 2048,
            base_lr: 0.001,
            momentum: true,
            muon: false,
            qk_norm: true,
            rope_theta: 500_000.0,
            norm_eps: 1e-5,
        }
    }
}

impl LactConfig {
    /// Widths of a head of the memory, and inside it.
    pub(super) fn resolve(&self, d_model: usize) -> Result<[usize; 2], ConfigError> {
        positive("attention_heads", self.attention_heads)?;
        let of_attention = key_width(None, d_model, self.attention_heads)
            .map_err(|e| ConfigError { key: "attention_heads".into(), ..e })?;
        positive("heads", self.heads)?;
        let width = key_width(None, d_model, self.heads)?;
        check_rotated("attention_heads", of_attention)?;
        check_rotated("heads", width)?;
        check_theta(self.rope_theta)?;
        let inner = positive("expand", self.expand)? * width;
        if inner > LARGEST {
            return Err(ConfigError::new(
                "expand",
                self.expand,
                format!("at most {}", LARGEST / width),
            ));
        }
        positive("mini_batch", self.mini_batch)?;
        positive("window", self.window)?;
        check_divisor("base_lr", self.base_lr)?;
        check_epsilon(self.norm_eps)?;
        Ok([width, inner])
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Lact<B>, ConfigError> {
        let [width, inner] = self.resolve(d_model)?;
        let project = || linear(d_model, d_model, device);
        let gate = |count| linear_with_bias(d_model, count * self.heads, device);
        let norm = || {
            self.qk_norm
                .then(|| RmsNormConfig::new(d_model).with_epsilon(self.norm_eps).init(device))
        };
        let channels = |value| Initializer::Constant { value }.init([d_model], device);
        let weight = |[from, to]: [usize; 2]| {
            let std = (from as f64).powf(-0.5);
            Initializer::Normal { mean: 0.0, std }.init([self.heads, from, to], device)
        };
        Ok(Lact {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            q_norm: norm(),
            k_norm: norm(),
            q_scale: channels(1.0),
            q_offset: channels(0.0),
            k_scale: channels(1.0),
            k_offset: channels(0.0),
            lr_proj: gate(3),
            momentum_proj: self.momentum.then(|| gate(1)),
            scale_proj: gate(1),
            weights: sizes(width, inner).map(weight).into(),
            ttt_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: project().into(),
            config: self.clone(),
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let [_, inner] = self.resolve(d_model)?;
        let weights = 3 * d_model * inner;
        let kept = length.min(self.window - 1);
        let (kinds, carried) = if self.momentum { (3, self.heads) } else { (2, 0) };
        let gates = 4 * self.heads + carried;
        let seen = length.div_ceil(2).min(self.window);
        Ok(Cost {
            state_bytes: 4 * (kinds * weights + carried + 2 * d_model * kept) as u64,
            // A key's outputs, its gradients, their products, and a query's outputs.
            flops_per_token: (2 * 3 * weights + 4 * d_model * seen) as u64
                + linear_flops(d_model, 4 * d_model + gates),
        })
    }
}

#[doc = include_str!("pages/lact.md")]
#[derive(Module, Debug)]
pub struct Lact<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_norm: Option<RmsNorm<B>>,
    k_norm: Option<RmsNorm<B>>,
    q_scale: Param<Tensor<B, 1>>,
    q_offset: Param<Tensor<B, 1>>,
    k_scale: Param<Tensor<B, 1>>,
    k_offset: Param<Tensor<B, 1>>,
    lr_proj: Linear<B>,
    momentum_proj: Option<Linear<B>>,
    scale_proj: Linear<B>,
    /// W_0, W_1 and W_2 at the start, `[H, from, to]`.
    weights: Vec<Param<Tensor<B, 3>>>,
    ttt_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    config: LactConfig,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Lact<B> {
    type State = LactState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<LactState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, LactState<B>) {
        let ([batch, tokens, _], dtype) = (x.dims(), x.dtype());
        let (memory, cache) = state.map(|state| (state.memory, state.cache)).unzip();
        let first = start(&self.weights, batch);
        let NetworkPast { memory, mut conv_states, position } = NetworkPast::of(memory, || {
            let running = zeros_like(&first);
            let momentum = if self.config.momentum { running.clone() } else { vec![] };
            NetworkMemory { start: first.clone(), running, momentum }
        });
        let [q, k, v, lr, scale] = project(
            &x,
            [&self.q_proj, &self.k_proj, &self.v_proj, &self.lr_proj, &self.scale_proj]
                .map(Projection::plain),
            &mut ConvPast::none(),
        );
        let [q, k] = [(q, &self.q_norm), (k, &self.k_norm)].map(|(x, norm)| match norm {
            Some(norm) => rms_norm(norm, x, None),
            None => x,
        });
        let (a, cache) = self.attend([&q, &k, &v], cache);
        let momentum = |proj: &Linear<B>| sigmoid(accumulator(proj.forward(x.clone())));
        let rows = Rows {
            q: self.unit(q, [&self.q_scale, &self.q_offset], position),
            k: self.unit(k, [&self.k_scale, &self.k_offset], position),
            v: accumulator(split_heads(silu(v), self.config.heads)),
            rates: self.rates(lr),
            momentum: self.momentum_proj.as_ref().map(momentum).map(|m| m.unsqueeze_dim(3)),
        };
        let mut memory = SwigluMemory {
            weights: memory,
            lengths: first.iter().map(lengths).collect(),
            carried: conv_states.draw(Kept::Sums),
            size: self.config.mini_batch,
            muon: self.config.muon,
        };
        let outputs = Piece::all(position, tokens, memory.size)
            .into_iter()
            .map(|piece| memory.learn(&rows, piece))
            .collect();
        let SwigluMemory { weights, carried, .. } = memory;
        carried.into_iter().for_each(|sum| conv_states.keep(Kept::Sums, sum));
        let past = NetworkPast { memory: weights, conv_states, position };
        let o = typed(cat(outputs, 1), dtype);
        let o = self.ttt_norm.forward(o, None) * silu(scale).unsqueeze_dim::<4>(3);
        let y = self.o_proj.forward(a + merge_heads(o));
        (y, LactState { memory: past.then(tokens), cache })
    }
}

impl<B: LinearAttentionBackend> Lact<B> {
    /// Sliding-window attention, `[B, T, D]`.
    fn attend(
        &self,
        rows: [&Tensor<B, 3>; 3],
        cache: Option<KeyValueCache<B>>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let position = cache.as_ref().map_or(0, |cache| cache.position);
        let heads = self.config.attention_heads;
        let rows = rotated_heads(rows.map(Clone::clone), heads, (self.rope(), position));
        through_window(rows, Some(self.config.window), cache, |q, cache, seen| {
            weigh(q, [&cache.keys, &cache.values], None, seen)
        })
    }

    fn rope(&self) -> Rope {
        Rope::whole(self.config.rope_theta)
    }

    /// Queries or keys of the memory: scaled, moved, through SiLU, of length 1 and rotated.
    fn unit(
        &self,
        x: Tensor<B, 3>,
        [scale, offset]: [&Param<Tensor<B, 1>>; 2],
        position: usize,
    ) -> Tensor<B, 4> {
        let of_channels = |x: Tensor<B, 1>| x.unsqueeze::<3>();
        let x = silu(accumulator(x) * of_channels(scale.val()) + of_channels(offset.val()));
        let x = l2_normalize(split_heads(x, self.config.heads));
        self.rope().forward(x, position)
    }

    /// Three rates for each head, `[B, T, H, 3]`.
    fn rates(&self, lr: Tensor<B, 3>) -> Tensor<B, 4> {
        // The softplus of this is the first rate.
        let first = self.config.base_lr.exp_m1().ln();
        split_heads(softplus(accumulator(lr) + first), self.config.heads)
    }
}
