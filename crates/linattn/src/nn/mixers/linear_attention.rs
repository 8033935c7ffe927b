//! Linear attention: a memory that only adds.
//! ```text
//! q, k = phi(x W_q), phi(x W_k);  v = x W_v
//! S    = S + k^T v
//! o    = q S / sqrt(K)      or, normalised, q S / (q . sum of k)
//! y    = rms_norm(o) W_o
//! ```
//! Source: Katharopoulos et al., arXiv 2006.16236; the norm in place of the denominator is from
//! arXiv 2210.10340.

use super::{MatrixState, check_heads, key_width, linear_flops, memory_cost, value_width};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{GatedRmsNorm, check_epsilon, linear, merge_heads, split_heads};
use crate::nn::{ConfigError, Cost, check_chunk};
use crate::ops::{self, DEFAULT_CHUNK, LinearAttentionBackend, OpResult};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::relu;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// What is done to queries and keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMap {
    /// Nothing.
    Identity,
    /// `elu(x) + 1`, which is positive.
    #[default]
    Elu,
    /// `max(x, 0)`.
    Relu,
}

impl FeatureMap {
    /// Elementwise.
    pub fn apply<B: Backend, const D: usize>(self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            FeatureMap::Identity => x,
            // e^min(x, 0) + max(x, 0): x + 1 above zero, e^x below.
            FeatureMap::Elu => x.clone().clamp_max(0.0).exp() + relu(x),
            FeatureMap::Relu => relu(x),
        }
    }
}

/// Linear attention.
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
    /// Divides by the query's answer from the sum of keys; wants a positive feature map.
    pub normalize: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
    /// Tokens a chunk. Changes speed, and results by no more than rounding.
    pub chunk: usize,
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
            normalize: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl LinearAttentionConfig {
    /// K, V and the number of value heads.
    fn widths(&self, d_model: usize) -> Result<(usize, usize, usize), ConfigError> {
        let heads = check_heads(self.heads, self.value_heads)?;
        let key = key_width(self.key_width, d_model, self.heads)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        if self.normalize && self.feature_map == FeatureMap::Identity {
            return Err(ConfigError::new(
                "feature_map",
                "identity",
                "elu or relu where `normalize` is true: the denominator has to be positive",
            ));
        }
        Ok((key, value_width(key, self.expand_v)?, heads))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<LinearAttention<B>, ConfigError> {
        let (key, value, heads) = self.widths(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(LinearAttention {
            q_proj: linear(d_model, keys, device),
            k_proj: linear(d_model, keys, device),
            v_proj: linear(d_model, values, device),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device),
            key_heads: self.heads,
            heads,
            feature_map: self.feature_map,
            normalize: self.normalize,
            chunk: self.chunk,
        })
    }

    /// What it costs in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (key, value, heads) = self.widths(d_model)?;
        let (keys, values) = (self.heads * key, heads * value);
        let mut cost = memory_cost(heads, key, value + usize::from(self.normalize), false);
        cost.flops_per_token +=
            linear_flops(d_model, 2 * keys + values) + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Linear attention. `D -> D`.
#[derive(Module, Debug)]
pub struct LinearAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    norm: GatedRmsNorm<B>,
    o_proj: Linear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    feature_map: FeatureMap,
    #[module(skip)]
    normalize: bool,
    #[module(skip)]
    chunk: usize,
}

forward_and_step!(LinearAttention, ops::linear_attention, ops::linear_attention_step);

impl<B: LinearAttentionBackend> LinearAttention<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        op: impl FnOnce(ops::LinearAttention<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let tokens = x.dims()[1];
        let (memory, mut before, position) = MatrixState::parts(state);
        let mut tails = vec![];
        let mut project = |proj: &Linear<B>, conv: &Option<ShortConvolution<B>>, heads| {
            let mut y = proj.forward(x.clone());
            if let Some(conv) = conv {
                let (convolved, tail) = conv.forward(y, before.next());
                tails.push(tail);
                y = convolved;
            }
            split_heads(y, heads)
        };
        let q = self.feature_map.apply(project(&self.q_proj, &self.q_conv1d, self.key_heads));
        let k = self.feature_map.apply(project(&self.k_proj, &self.k_conv1d, self.key_heads));
        let v = project(&self.v_proj, &self.v_conv1d, self.heads);
        let (scale, value_width) = ((q.dims()[3] as f64).powf(-0.5), v.dims()[3]);
        // The sum of keys is one more column of the memory, written with a value of 1.
        let v = match self.normalize {
            true => Tensor::cat(vec![v.clone(), v.narrow(3, 0, 1).ones_like()], 3),
            false => v,
        };
        let inputs = ops::LinearAttention::new(q * scale, k, v);
        let (o, memory) = op(inputs, memory).expect("the projections made the shapes");
        let o = match self.normalize {
            true => o.clone().narrow(3, 0, value_width) / (o.narrow(3, value_width, 1) + 1e-6),
            false => o,
        };
        let y = self.o_proj.forward(merge_heads(self.norm.forward(o, None)));
        (y, MatrixState { memory, tails, position: position + tokens })
    }
}
