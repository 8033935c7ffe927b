//! Linear attention. Recurrence, shapes and source: `pages/linear_attention.md`, the page of
//! [`LinearAttention`].

use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_heads, key_width, linear_flops, memory_cost,
    value_width,
};
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::denominator::Denominator;
use crate::nn::features::Features;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, check_small, linear, linear_with_bias, merge_heads,
};
use crate::nn::log_decay::gated_write;
use crate::nn::projection::Projection;
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, FeatureMap, Linear, Shared, is_default};
use crate::ops::{Decay, LinearAttentionBackend, LinearAttentionInputs};
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`LinearAttention`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinearAttentionConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// phi.
    pub feature_map: FeatureMap,
    /// Whether queries and keys share what phi learns.
    pub tie_feature_map_qk: bool,
    /// Whether a query's features are divided by their sum; wants features that are not negative.
    pub norm_q: bool,
    /// The same of keys.
    pub norm_k: bool,
    /// Divides by the query's answer from the sum of keys; wants scores that are not negative, and no
    /// norm after it.
    pub normalize: bool,
    /// Added to that denominator.
    pub denominator_eps: f64,
    /// The denominator's least value, with nothing added to it: scores may then be negative.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denominator_floor: Option<f64>,
    /// Whether each head forgets, and writes what it forgets, at a gate of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub forget_gate: bool,
    /// The norm over each head's output.
    pub output_norm: OutputNorm,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for LinearAttentionConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            conv_size: 0,
            feature_map: FeatureMap::default(),
            tie_feature_map_qk: false,
            norm_q: false,
            norm_k: false,
            normalize: false,
            denominator_eps: 1e-6,
            denominator_floor: None,
            forget_gate: false,
            output_norm: OutputNorm::default(),
            norm_eps: 1e-5,
        }
    }
}

/// Norm of each head's output before the last projection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputNorm {
    /// RMSNorm, its weight shared by the heads.
    #[default]
    Rms,
    /// Nothing.
    None,
}

/// Widths that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    /// K.
    key: usize,
    /// F, what phi makes of K.
    features: usize,
    /// V.
    value: usize,
    /// Heads of values.
    heads: usize,
}

impl LinearAttentionConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Widths, ConfigError> {
        let heads = check_heads(self.heads, self.value_heads)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        let features = self.feature_map.check(key)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        check_small("denominator_eps", self.denominator_eps)?;
        self.check_floor()?;
        self.check_signs()?;
        if self.normalize && self.output_norm == OutputNorm::Rms {
            let want = "false where `output_norm` is \"rms\", which takes the denominator out again; \
                        it may be true where `output_norm` is \"none\"";
            return Err(ConfigError::new("normalize", true, want));
        }
        Ok(Widths { key, features, value: value_width(key, self.expand_v)?, heads })
    }

    /// Refuses floors of a denominator that is not there, or that they do not keep from zero.
    fn check_floor(&self) -> Result<(), ConfigError> {
        match self.denominator_floor {
            Some(floor) if !self.normalize => {
                Err(ConfigError::new("denominator_floor", floor, "left out without `normalize`"))
            }
            Some(floor) => check_small("denominator_floor", floor),
            None => Ok(()),
        }
    }

    /// Refuses maps whose sums, by which outputs are divided, may not be positive.
    fn check_signs(&self) -> Result<(), ConfigError> {
        let map = self.feature_map;
        let refused = |want: &str| Err(ConfigError::new("feature_map", map.name(), want));
        if self.normalize && self.denominator_floor.is_none() && !map.has_positive_scores() {
            return refused(
                "elu, relu, taylor, learnable_square, performer, cosformer, hedgehog, dijiang or \
                 dpfp where `normalize` is true without `denominator_floor`: the denominator has to be \
                 positive",
            );
        }
        if (self.norm_q || self.norm_k) && !map.is_positive() {
            return refused(
                "elu, relu, performer, cosformer, hedgehog or dpfp where `norm_q` or `norm_k` is \
                 true: the sum of features has to be positive",
            );
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
    ) -> Result<LinearAttention<B>, ConfigError> {
        let Widths { key, value, heads, .. } = self.resolve(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        let features = || self.feature_map.init::<B>(self.heads, key, device);
        let own = self.feature_map.may_differ() && !self.tie_feature_map_qk;
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(LinearAttention {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            f_proj: self.forget_gate.then(|| linear_with_bias(d_model, heads, device)),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            norm: (self.output_norm == OutputNorm::Rms)
                .then(|| GatedRmsNorm::new(value, self.norm_eps, device)),
            o_proj: linear(values, d_model, device).into(),
            key_heads: self.heads,
            heads,
            feature_map_q: features()?,
            feature_map_k: own.then(features).transpose()?,
            norm_q: self.norm_q,
            norm_k: self.norm_k,
            denominator: self.normalize.then_some(match self.denominator_floor {
                Some(floor) => Denominator::AtLeast(floor),
                None => Denominator::Plus(self.denominator_eps),
            }),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init), and where the feature map does not reach over `length` tokens.
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let Widths { key, features, value, heads } = self.resolve(d_model)?;
        self.feature_map.check_length(length)?;
        let (keys, values) = (self.heads * key, heads * value);
        let mut cost = memory_cost(heads, features, value + usize::from(self.normalize), false);
        let gates = if self.forget_gate { heads } else { 0 };
        cost.flops_per_token +=
            linear_flops(d_model, 2 * keys + values + gates) + linear_flops(values, d_model);
        cost.flops_per_token += 2 * self.heads as u64 * self.feature_map.flops(key);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

#[doc = include_str!("pages/linear_attention.md")]
#[derive(Module, Debug)]
pub struct LinearAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    f_proj: Option<Linear<B>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    feature_map_q: Features<B>,
    /// None where keys go through the queries' map.
    feature_map_k: Option<Features<B>>,
    norm: Option<GatedRmsNorm<B>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    norm_q: bool,
    #[module(skip)]
    norm_k: bool,
    /// None where nothing is divided.
    #[module(skip)]
    denominator: Option<Denominator>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for LinearAttention<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;

    fn counts_tokens(&self) -> bool {
        self.feature_map_q.counts_tokens()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let gate = self.f_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [], [gate]) =
            self.qkv().project_some(&x, [], [gate], &mut past.conv_states);
        let map_of_keys = self.feature_map_k.as_ref().unwrap_or(&self.feature_map_q);
        let q = self.feature_map_q.typed(q, past.position, self.norm_q);
        let k = map_of_keys.typed(k, past.position, self.norm_k);
        let width = q.dims()[3] as f64;
        // A division by the sum of scores takes the place of a scale.
        let (q, v) = match self.denominator {
            Some(_) => (q, Denominator::with_ones(v)),
            None => (q * width.powf(-0.5), v),
        };
        let (v, g) = gated_write(v, gate);
        let g = g.map(Decay::Scalar);
        let inputs = LinearAttentionInputs { g, ..LinearAttentionInputs::new(q, k, v) };
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let o = match self.denominator {
            Some(denominator) => denominator.divide(o),
            None => o,
        };
        let o = match &self.norm {
            Some(norm) => norm.forward(o, None),
            None => o,
        };
        (self.o_proj.forward(merge_heads(o)), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> LinearAttention<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        let heads = [self.key_heads, self.key_heads, self.heads];
        ConvQkv::convolved(projections, convolutions, heads)
    }
}
