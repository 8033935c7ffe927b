//! Multi-head latent attention. Recurrence, shapes and source: `pages/mla.md`, the page of [`Mla`].

use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, key_width, linear_flops};
use crate::nn::layers::{ResidualLinear, check_epsilon, linear, rms_norm, split_heads};
use crate::nn::softmax::{gather, merge, scores, weigh};
use crate::nn::{ConfigError, Cost, Linear, RecurrentState, Rope, Shared, StateTensors, positive};
use crate::ops::{LinearAttentionBackend, Seen, cat};
use burn::module::Module;
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Mla`], multi-head latent attention. The layer's page has recurrence, shapes, errors and
/// source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MlaConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a head's key that is not rotated; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Kr, width of the rotated key that all heads share, even; about half of K by default.
    pub rope_width: Option<usize>,
    /// V, width of a head's value; K by default.
    pub value_width: Option<usize>,
    /// R, width of the latent; 4 K by default.
    pub kv_rank: Option<usize>,
    /// Inner width of the projection that makes queries; in one piece by default.
    pub q_rank: Option<usize>,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for MlaConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            rope_width: None,
            value_width: None,
            kv_rank: None,
            q_rank: None,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
        }
    }
}

/// Widths that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    key: usize,
    rope: usize,
    value: usize,
    kv_rank: usize,
    q_rank: Option<usize>,
}

impl MlaConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        positive("heads", self.heads)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let rope = self.rope_width.unwrap_or((key / 4 * 2).max(2));
        positive("rope_width", rope)?;
        check_rotated("rope_width", rope)?;
        check_theta(self.rope_theta)?;
        check_epsilon(self.norm_eps)?;
        Ok(Widths {
            key,
            rope,
            value: positive("value_width", self.value_width.unwrap_or(key))?,
            kv_rank: positive("kv_rank", self.kv_rank.unwrap_or(4 * key))?,
            q_rank: self.q_rank.map(|rank| positive("q_rank", rank)).transpose()?,
        })
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mla<B>, ConfigError> {
        let Widths { key, rope, value, kv_rank, q_rank } = self.resolve(d_model)?;
        let through = |rank, to| {
            let norm = RmsNormConfig::new(rank).with_epsilon(self.norm_eps).init(device);
            (linear(d_model, rank, device), norm, linear(rank, to, device))
        };
        let queries = self.heads * (key + rope);
        Ok(Mla {
            q_proj: match q_rank {
                Some(rank) => QueryMap::Compressed(through(rank, queries)),
                None => QueryMap::Full(linear(d_model, queries, device)),
            },
            k_rope: linear(d_model, rope, device),
            kv_proj: through(kv_rank, self.heads * (key + value)),
            o_proj: linear(self.heads * value, d_model, device).into(),
            heads: self.heads,
            key_width: key,
            rope: Rope::whole(self.rope_theta),
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens: steps from
    /// the latents.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, rope, value, kv_rank, q_rank } = self.resolve(d_model)?;
        let queries = self.heads * (key + rope);
        let ask = match q_rank {
            Some(rank) => linear_flops(d_model, rank) + linear_flops(rank, queries),
            None => linear_flops(d_model, queries),
        };
        // On average a token looks at half the sequence: scores, and their sum over latents.
        let look_back = 2 * (self.heads * (2 * kv_rank + rope)) as u64 * length.div_ceil(2) as u64;
        Ok(Cost {
            state_bytes: 4 * ((kv_rank + rope) * length) as u64,
            flops_per_token: ask
                + linear_flops(d_model, kv_rank + rope)
                + linear_flops(kv_rank, self.heads * (key + value))
                + linear_flops(self.heads * value, d_model)
                + look_back,
        })
    }
}

/// Cache of [`Mla`]: for every token so far its latent and one rotated key. It grows with the sequence.
#[derive(Debug, Clone)]
pub struct LatentCache<B: Backend> {
    /// `[B, T, R]`, normalised.
    pub latents: Tensor<B, 3>,
    /// `[B, T, Kr]`, rotated.
    pub keys: Tensor<B, 3>,
}

impl<B: Backend> RecurrentState<B> for LatentCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(None)
            .with_growing("latents", &self.latents, 1)
            .with_growing("keys", &self.keys, 1)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        Self { latents: tensors.take("latents"), keys: tensors.take("keys") }
    }
}

impl<B: Backend> LatentCache<B> {
    /// `before`, and then these.
    fn after(before: Option<Self>, latents: Tensor<B, 3>, keys: Tensor<B, 3>) -> Self {
        match before {
            Some(before) => Self {
                latents: cat(vec![before.latents, latents], 1),
                keys: cat(vec![before.keys, keys], 1),
            },
            None => Self { latents, keys },
        }
    }
}

/// The projection, or the two, that make queries.
#[derive(Module, Debug)]
pub enum QueryMap<B: Backend> {
    /// One projection.
    Full(Linear<B>),
    /// One to a narrow vector, a norm, and one out of it.
    Compressed((Linear<B>, RmsNorm<B>, Linear<B>)),
}

impl<B: LinearAttentionBackend> QueryMap<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        match self {
            Self::Full(proj) => proj.forward(x),
            Self::Compressed((down, norm, up)) => up.forward(rms_norm(norm, down.forward(x), None)),
        }
    }
}

#[doc = include_str!("pages/mla.md")]
#[derive(Module, Debug)]
pub struct Mla<B: Backend> {
    q_proj: QueryMap<B>,
    k_rope: Linear<B>,
    kv_proj: (Linear<B>, RmsNorm<B>, Linear<B>),
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_width: usize,
    #[module(skip)]
    rope: Rope,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Mla<B> {
    type State = LatentCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<LatentCache<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, LatentCache<B>) {
        let tokens = x.dims()[1];
        let (q, cache) = self.project(x, state);
        let o = match tokens {
            1 => self.attend_to_latents(q, &cache),
            _ => self.attend(q, &cache),
        };
        (self.o_proj.forward(o), cache)
    }
}

impl<B: LinearAttentionBackend> Mla<B> {
    /// Queries over keys and values made of all latents, `[B, T, H V]`.
    fn attend(&self, q: Tensor<B, 4>, cache: &LatentCache<B>) -> Tensor<B, 3> {
        let (_, _, up) = &self.kv_proj;
        let both = split_heads(up.forward(cache.latents.clone()), self.heads).swap_dims(1, 2);
        let [batch, heads, seen, width] = both.dims();
        let shared = [batch, heads, seen, cache.keys.dims()[2]];
        let rotated = cache.keys.clone().unsqueeze_dim::<4>(1).expand(shared);
        let k = cat(vec![both.clone().narrow(3, 0, self.key_width), rotated], 3);
        let v = both.narrow(3, self.key_width, width - self.key_width);
        weigh(q, [&k, &v], None, Seen::Causal { window: None })
    }

    /// As [`attend`](Self::attend), of one token's queries: over the latents themselves.
    fn attend_to_latents(&self, q: Tensor<B, 4>, cache: &LatentCache<B>) -> Tensor<B, 3> {
        let width = q.dims()[3];
        let key = self.key_width;
        let (_, _, up) = &self.kv_proj;
        let up = up.matrix(q.dtype());
        let [rank, out] = up.dims();
        let up = up.reshape([rank, self.heads, out / self.heads]).swap_dims(0, 1).unsqueeze::<4>();
        let up_values = up.clone().narrow(3, key, out / self.heads - key);
        let up_keys = up.narrow(3, 0, key);

        let asked = q.clone().narrow(3, 0, key).matmul(up_keys.transpose()); // [B, H, 1, R]
        let q = cat(vec![asked, q.narrow(3, key, width - key)], 3);
        let latents = cache.latents.clone().unsqueeze_dim::<4>(1);
        let keys = cat(vec![latents.clone(), cache.keys.clone().unsqueeze_dim(1)], 3);
        let scores = scores(q * (width as f64).powf(-0.5), &keys);
        merge(gather(scores, &latents, Seen::All).matmul(up_values))
    }

    /// Queries, `[B, H, T, K + Kr]`, the last Kr rotated; and the cache with these tokens.
    fn project(
        &self,
        x: Tensor<B, 3>,
        state: Option<LatentCache<B>>,
    ) -> (Tensor<B, 4>, LatentCache<B>) {
        let position = state.as_ref().map_or(0, |cache| cache.latents.dims()[1]);
        let q = split_heads(self.q_proj.forward(x.clone()), self.heads);
        let rope_width = q.dims()[3] - self.key_width;
        let rotated = self.rope.forward(q.clone().narrow(3, self.key_width, rope_width), position);
        let q = cat(vec![q.narrow(3, 0, self.key_width), rotated], 3);

        let (down, norm, _) = &self.kv_proj;
        let latents = rms_norm(norm, down.forward(x.clone()), None);
        let keys = self.rope.forward(self.k_rope.forward(x).unsqueeze_dim::<4>(2), position);
        (q.swap_dims(1, 2), LatentCache::after(state, latents, keys.squeeze_dim(2)))
    }
}
