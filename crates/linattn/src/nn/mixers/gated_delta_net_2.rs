//! Gated DeltaNet-2: what a token erases and what it writes are gated apart, channel by channel.
//! ```text
//! q, k, v = silu(conv(x W))   k, q of length 1, q / sqrt(K)
//! b       = sigmoid(x W_b)    [K]  erase     (times 2 for eigenvalues down to -1)
//! w       = sigmoid(x W_w)    [V]  write
//! g       = -exp(A_log) softplus(x W_f0 W_f1 + dt_bias)      [K] for every head
//! S       = (I - k^T (b * k)) diag(e^g) S + k^T (w * v)
//! y       = (rms_norm(q S) sigmoid(x W_g0 W_g1 + c)) W_o
//! ```
//! With b and w equal to one number it is Kimi Delta Attention. Source: arXiv 2605.22791.

use super::delta_net::{fresh_a_log, fresh_dt_bias};
use super::kda::{one_after_other, row_decay};
use super::{MatrixState, Widths, head_widths, linear_flops, memory_cost};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost, convolved_heads};
use crate::nn::layers::{
    GatedRmsNorm, check_epsilon, l2_normalize, linear, linear_with_bias, merge_heads,
    scaled_queries, share_heads, split_heads,
};
use crate::nn::{ConfigError, Cost, Linear, check_chunk, positive};
use crate::ops::{self, DEFAULT_CHUNK, Decay, DeltaRule, LinearAttentionBackend, OpResult};
use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Gated DeltaNet-2.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedDeltaNet2Config {
    /// Heads of queries and keys, and of what belongs to them: erasing and decay.
    pub heads: usize,
    /// Heads of values, a multiple of `heads`; as many by default.
    pub value_heads: Option<usize>,
    /// K, width of a key; d_model / heads by default.
    pub key_width: Option<usize>,
    /// V / K.
    pub expand_v: f64,
    /// Inner width of the two-layer projections of decay and output gate; V by default.
    pub gate_rank: Option<usize>,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Lets the erase gate reach 2, and the state's eigenvalues -1.
    pub allow_neg_eigval: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
    /// Tokens a chunk. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for GatedDeltaNet2Config {
    fn default() -> Self {
        Self {
            heads: 1,
            value_heads: None,
            key_width: None,
            expand_v: 1.0,
            gate_rank: None,
            conv_size: 4,
            allow_neg_eigval: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl GatedDeltaNet2Config {
    /// Widths, and the inner width of the two-layer projections.
    fn widths(&self, d_model: usize) -> Result<(Widths, usize), ConfigError> {
        let widths =
            head_widths(self.heads, self.value_heads, self.key_width, self.expand_v, d_model)?;
        let rank = positive("gate_rank", self.gate_rank.unwrap_or(widths.value))?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        Ok((widths, rank))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<GatedDeltaNet2<B>, ConfigError> {
        let (Widths { heads, value, keys, values, .. }, rank) = self.widths(d_model)?;
        let project = |to| linear(d_model, to, device);
        let conv = |channels| ShortConvolution::optional(channels, self.conv_size, device);
        Ok(GatedDeltaNet2 {
            q_proj: project(keys),
            k_proj: project(keys),
            v_proj: project(values),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            f_proj: vec![project(rank), linear(rank, keys, device)],
            b_proj: project(keys),
            w_proj: project(values),
            a_log: Param::from_tensor(fresh_a_log(self.heads, 1.0, device)),
            dt_bias: Param::from_tensor(fresh_dt_bias(keys, device)),
            g_proj: vec![project(rank), linear_with_bias(rank, values, device)],
            o_norm: GatedRmsNorm::new(value, self.norm_eps, device),
            o_proj: linear(values, d_model, device),
            key_heads: self.heads,
            heads,
            erase_scale: if self.allow_neg_eigval { 2.0 } else { 1.0 },
            chunk: self.chunk,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (Widths { heads, key, value, keys, values }, rank) = self.widths(d_model)?;
        let mut cost = memory_cost(heads, key, value, true);
        cost.flops_per_token += linear_flops(d_model, 3 * keys + 2 * values + 2 * rank)
            + linear_flops(rank, keys + values)
            + linear_flops(values, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys + values);
        Ok(cost)
    }
}

/// Gated DeltaNet-2. `D -> D`.
#[derive(Module, Debug)]
pub struct GatedDeltaNet2<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    f_proj: Vec<Linear<B>>,
    b_proj: Linear<B>,
    w_proj: Linear<B>,
    a_log: Param<Tensor<B, 1>>,
    dt_bias: Param<Tensor<B, 1>>,
    g_proj: Vec<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: Linear<B>,
    #[module(skip)]
    key_heads: usize,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    erase_scale: f64,
    #[module(skip)]
    chunk: usize,
}

forward_and_step!(GatedDeltaNet2, ops::delta_rule, ops::delta_rule_step);

impl<B: LinearAttentionBackend> GatedDeltaNet2<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        op: impl FnOnce(DeltaRule<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let [batch, tokens, _] = x.dims();
        let (memory, mut before, position) = MatrixState::parts(state);
        let mut tails = vec![];
        let mut project =
            |proj, conv, heads| convolved_heads(&x, proj, conv, heads, &mut before, &mut tails);
        let q = scaled_queries(project(&self.q_proj, &self.q_conv1d, self.key_heads));
        let k = l2_normalize(project(&self.k_proj, &self.k_conv1d, self.key_heads));
        let v = project(&self.v_proj, &self.v_conv1d, self.heads);
        let gate = |proj: &Linear<B>, heads| split_heads(sigmoid(proj.forward(x.clone())), heads);
        let erase = gate(&self.b_proj, self.key_heads) * k.clone() * self.erase_scale;
        let write = gate(&self.w_proj, self.heads) * v;
        let g = row_decay(one_after_other(&self.f_proj, x.clone()), &self.a_log, &self.dt_bias);
        // Erasing and writing have their gates already: all of the rest is corrected.
        let beta = Tensor::ones([batch, tokens, self.heads], (&x.device(), x.dtype()));
        let inputs = DeltaRule {
            erase: Some(share_heads(erase, self.heads)),
            g: Some(Decay::Vector(share_heads(g, self.heads))),
            ..DeltaRule::new(q, k, write, beta)
        };
        let (o, memory) = op(inputs, memory).expect("the projections made the shapes");
        let gate = split_heads(one_after_other(&self.g_proj, x), self.heads);
        let y = self.o_proj.forward(merge_heads(self.o_norm.forward_sigmoid(o, gate)));
        (y, MatrixState { memory, tails, position: position + tokens })
    }
}
