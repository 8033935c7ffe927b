//! Atlas. Recurrence, shapes and source: `pages/atlas.md`, the page of [`Atlas`].

use super::{TokenMixer, check_divisor, key_width, linear_flops};
use crate::nn::NetworkState;
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ConvPast, ShortConvolution, check_window, convolution_cost};
use crate::nn::fast_weights::{InnerModel, NetworkPast, Piece, fresh, start, zeros_like};
use crate::nn::features::{check_width, polynomial, polynomial_width};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, merge_heads, split_heads,
};
use crate::nn::omega_memory::{NETWORK, OmegaRule, Rows};
use crate::nn::projection::Projection;
use crate::nn::{ConfigError, Cost, Kept, Linear, NetworkMemory, Shared, positive};
use crate::ops::{self, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// A fresh memory keeps 98 % of itself.
const KEEP_BIAS: f64 = 4.0;

/// Config of [`Atlas`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AtlasConfig {
    /// Heads, H.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// The memory.
    pub inner: InnerModel,
    /// Largest power of the polynomials, 1 or 2.
    pub degree: usize,
    /// Tokens that each token learns from, itself and those just before it.
    pub window: usize,
    /// Tokens of a mini-batch. Changes results.
    pub mini_batch: usize,
    /// Largest rate.
    pub base_lr: f64,
    /// Whether steps carry the last ones on.
    pub momentum: bool,
    /// Whether steps are made orthogonal.
    pub muon: bool,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for AtlasConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            inner: InnerModel::default(),
            degree: 2,
            window: 8,
            mini_batch: 16,
            base_lr: 0.1,
            momentum: true,
            muon: true,
            conv_size: 4,
            output_gate: true,
            norm_eps: 1e-5,
        }
    }
}

impl AtlasConfig {
    /// K, and inputs and outputs of each layer of the memory.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, Vec<[usize; 2]>), ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if !(1..=2).contains(&self.degree) {
            return Err(ConfigError::new("degree", self.degree, "1 or 2"));
        }
        let features = check_width(width, polynomial_width(width, self.degree))?;
        positive("window", self.window)?;
        positive("mini_batch", self.mini_batch)?;
        check_divisor("base_lr", self.base_lr)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok((width, self.inner.layers(features, width)))
    }

    fn rule(&self) -> OmegaRule {
        OmegaRule { window: self.window, mini_batch: self.mini_batch, muon: self.muon }
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Atlas<B>, ConfigError> {
        let (width, layers) = self.resolve(d_model)?;
        let keys = self.heads * width;
        let project = || linear(d_model, keys, device);
        let conv = || ShortConvolution::optional(keys, self.conv_size, device);
        let gate = || linear_with_bias(d_model, self.heads, device);
        let bias = Initializer::Constant { value: KEEP_BIAS }.init([self.heads], device);
        let layers = layers.into_iter();
        Ok(Atlas {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            q_conv1d: conv(),
            k_conv1d: conv(),
            v_conv1d: conv(),
            coefficients: Initializer::Ones.init([self.degree + 1], device),
            context_proj: gate(),
            rate_proj: gate(),
            momentum_proj: self.momentum.then(gate),
            keep_proj: Linear { bias: Some(bias), ..gate() },
            weights: layers.map(|size| fresh(self.heads, size, NETWORK, device)).collect(),
            g_proj: self.output_gate.then(project),
            o_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(keys, d_model, device).into(),
            config: self.clone(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (width, layers) = self.resolve(d_model)?;
        let (keys, rule) = (self.heads * width, self.rule());
        let (weights, inner) = rule.cost(&layers, self.heads);
        let kinds = if self.momentum { 3 } else { 2 };
        let seen = rule.before() * (2 * keys + self.heads);
        let inward = keys * if self.output_gate { 4 } else { 3 } + (kinds + 1) * self.heads;
        let mut cost = Cost {
            state_bytes: 4 * (kinds as u64 * weights + seen as u64),
            flops_per_token: inner + linear_flops(d_model, inward) + linear_flops(keys, d_model),
        };
        cost += convolution_cost(self.conv_size, 3 * keys);
        Ok(cost)
    }
}

#[doc = include_str!("pages/atlas.md")]
#[derive(Module, Debug)]
pub struct Atlas<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    /// One for each power.
    coefficients: Param<Tensor<B, 1>>,
    context_proj: Linear<B>,
    rate_proj: Linear<B>,
    momentum_proj: Option<Linear<B>>,
    keep_proj: Linear<B>,
    /// The memory at the start, `[H, from, to]` for each layer.
    weights: Vec<Param<Tensor<B, 3>>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    config: AtlasConfig,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Atlas<B> {
    type State = NetworkState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<NetworkState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, NetworkState<B>) {
        let ([batch, tokens, _], dtype) = (x.dims(), x.dtype());
        let mut past = NetworkPast::of(state, || {
            let weights = start(&self.weights, batch);
            let momentum = if self.config.momentum { zeros_like(&weights) } else { vec![] };
            NetworkMemory { start: weights.clone(), running: weights, momentum }
        });
        let (rows, residual, gate) = self.rows(&x, &mut past.conv_states);
        let rule = self.config.rule();
        let outputs = Piece::all(past.position, tokens, self.config.mini_batch)
            .into_iter()
            .map(|piece| rule.learn(&rows, piece, &mut past.memory))
            .collect();
        let o = cat(outputs, 1);
        let o = typed(if self.is_deep() { o + residual } else { o }, dtype);
        let y = GatedOutput::silu(&self.o_norm, &self.o_proj).forward(o, gate);
        (y, past.then(tokens))
    }
}

/// Rows of the memory, its residual for queries, and a gate.
type Inputs<B> = (Rows<B>, Tensor<B, 4>, Option<Tensor<B, 3>>);

impl<B: LinearAttentionBackend> Atlas<B> {
    fn is_deep(&self) -> bool {
        self.config.inner == InnerModel::Mlp
    }

    fn rows(&self, x: &Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Inputs<B> {
        let AtlasConfig { heads, window, base_lr, .. } = self.config;
        let gates = [
            Projection::beta(&self.context_proj, (window as f64).recip()),
            Projection::beta(&self.rate_proj, base_lr),
            Projection::plain(&self.keep_proj),
        ];
        let optional = [&self.momentum_proj, &self.g_proj];
        let optional = optional.map(|layer| layer.as_ref().map(Projection::plain));
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let qkv = ConvQkv::convolved(projections, convolutions, [heads; 3]).silu().unit(1.0);
        let (Qkv { q, k, v }, [gamma, rate, keep], [eta, gate]) =
            qkv.project_some(x, gates, optional, conv_states);
        let of_head = |x| split_heads(accumulator(x), heads);
        let kept = window - 1;
        let seen = [
            (Kept::WindowKey, accumulator(k)),
            (Kept::WindowValue, accumulator(v)),
            (Kept::WindowGate, of_head(gamma)),
        ];
        let [k, v, gamma] = seen.map(|(name, x)| behind(x, kept, name, conv_states));
        let [(q, residual), (k, of_keys)] = [accumulator(q), k].map(|x| self.features(x));
        let rows = Rows {
            q,
            k,
            v: if self.is_deep() { v - of_keys } else { v },
            gamma,
            rate: of_head(rate),
            log_keep: ops::log_sigmoid(of_head(keep), 1.0),
            log_eta: eta.map(|eta| ops::log_sigmoid(of_head(eta), 1.0)),
        };
        (rows, residual, gate)
    }

    /// Polynomials of queries or keys, and the first power among them.
    fn features(&self, x: Tensor<B, 4>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let width = x.dims()[3];
        let features = polynomial(x, accumulator(self.coefficients.val()));
        let first = features.clone().narrow(3, 1, width);
        (features, first)
    }
}

/// `x`, `[B, T, H, X]`, behind the `kept` tokens before it, which are zeros at the start of a sequence.
fn behind<B: LinearAttentionBackend>(
    x: Tensor<B, 4>,
    kept: usize,
    name: Kept,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 4> {
    if kept == 0 {
        return x;
    }
    let ([batch, tokens, heads, width], device) = (x.dims(), x.device());
    conv_states.through(name, |conv_state| {
        let zeros = || Tensor::zeros([batch, kept, heads * width], (&device, x.dtype()));
        let all = cat(vec![conv_state.unwrap_or_else(zeros), merge_heads(x.clone())], 1);
        let next = all.clone().narrow(1, tokens, kept);
        (split_heads(all, heads), next)
    })
}
