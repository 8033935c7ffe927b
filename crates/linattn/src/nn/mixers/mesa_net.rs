//! MesaNet: what a query reads is the least-squares fit of all values so far to their keys.
//! ```text
//! q, k   = silu(conv(x W)), each of length 1
//! v      = x W_v
//! beta   = sigmoid(x W_b + b_b)                a number for every head
//! g      = log_sigmoid(x W_a + b_a)            a number for every head
//! lambda = softplus(lambda_params) + lambda_lower_bound
//! H      = e^g H + beta k^T k
//! G      = e^g G + beta k^T v
//! y      = (rms_norm(q (H + diag(lambda))^-1 G) [silu(x W_g)]) W_o
//! ```
//! Source: arXiv 2506.05233. The equations are solved by conjugate gradients from zero, over whole
//! sequences as token by token, with a fixed number of iterations; there is no scaling of q, which
//! the norm would undo. flash-linear-attention adds 1e-5 to what its iterations divide by, and
//! stops short of the solution; these go on to it. The gradient is that of the solution, by one
//! more solve: see `ops::mesa`.

use super::{MatrixState, key_width, linear_flops, memory_cost};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost, convolved_heads};
use crate::nn::layers::{
    GatedRmsNorm, check_epsilon, l2_normalize, linear, linear_with_bias, merge_heads, softplus,
    split_heads,
};
use crate::nn::{ConfigError, Cost, Linear, check_chunk, positive};
use crate::ops::{self, DEFAULT_CHUNK, LinearAttentionBackend, Mesa, OpResult};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::{log_sigmoid, sigmoid};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// MesaNet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MesaNetConfig {
    /// Heads.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// Lower bound of lambda, which starts at 1.
    pub lambda_lower_bound: f64,
    /// Iterations of the conjugate gradients.
    pub cg_steps: usize,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
    /// Tokens a chunk. Changes speed, and results by no more than rounding.
    pub chunk: usize,
}

impl Default for MesaNetConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            lambda_lower_bound: 0.25,
            cg_steps: 30,
            conv_size: 4,
            output_gate: false,
            norm_eps: 1e-5,
            chunk: DEFAULT_CHUNK,
        }
    }
}

impl MesaNetConfig {
    /// K.
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        if !(0.0..1.0).contains(&self.lambda_lower_bound) {
            let want = "at least 0 and below 1";
            return Err(ConfigError::new("lambda_lower_bound", self.lambda_lower_bound, want));
        }
        positive("cg_steps", self.cg_steps)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        check_chunk(self.chunk)?;
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<MesaNet<B>, ConfigError> {
        let keys = self.heads * self.width(d_model)?;
        let project = || linear(d_model, keys, device);
        let gate = || linear_with_bias(d_model, self.heads, device);
        let conv = || ShortConvolution::optional(keys, self.conv_size, device);
        // The softplus of this is 1 less the bound.
        let ridge = (1.0 - self.lambda_lower_bound).exp_m1().ln();
        Ok(MesaNet {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            a_proj: gate(),
            b_proj: gate(),
            lambda_params: Initializer::Constant { value: ridge }.init([keys], device),
            q_conv1d: conv(),
            k_conv1d: conv(),
            g_proj: self.output_gate.then(project),
            o_norm: GatedRmsNorm::new(keys / self.heads, self.norm_eps, device),
            o_proj: linear(keys, d_model, device),
            heads: self.heads,
            lambda_lower_bound: self.lambda_lower_bound,
            cg_steps: self.cg_steps,
            chunk: self.chunk,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.width(d_model)?;
        let keys = self.heads * width;
        let mut cost = memory_cost(self.heads, width, 2 * width, false);
        // Of each iteration: the product with H, and five passes over rows.
        cost.flops_per_token += (self.cg_steps * keys * (2 * width + 10)) as u64;
        let inward = keys * if self.output_gate { 4 } else { 3 } + 2 * self.heads;
        cost.flops_per_token += linear_flops(d_model, inward) + linear_flops(keys, d_model);
        cost += convolution_cost(self.conv_size, 2 * keys);
        Ok(cost)
    }
}

/// MesaNet. `D -> D`. Its memory is H and G side by side, `[B, H, K, 2 K]`.
#[derive(Module, Debug)]
pub struct MesaNet<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    a_proj: Linear<B>,
    b_proj: Linear<B>,
    /// `[H K]`.
    lambda_params: Param<Tensor<B, 1>>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: Linear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    lambda_lower_bound: f64,
    #[module(skip)]
    cg_steps: usize,
    #[module(skip)]
    chunk: usize,
}

forward_and_step!(MesaNet, ops::mesa, ops::mesa_step);

impl<B: LinearAttentionBackend> MesaNet<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        op: impl FnOnce(Mesa<B>, Option<Tensor<B, 4>>) -> OpResult<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let tokens = x.dims()[1];
        let (memory, mut before, position) = MatrixState::parts(state);
        let mut tails = vec![];
        let mut project = |proj, conv| {
            l2_normalize(convolved_heads(&x, proj, conv, self.heads, &mut before, &mut tails))
        };
        let q = project(&self.q_proj, &self.q_conv1d);
        let k = project(&self.k_proj, &self.k_conv1d);
        let key_width = k.dims()[3];
        let lambda = softplus(self.lambda_params.val()) + self.lambda_lower_bound;
        let inputs = Mesa {
            q,
            k,
            v: split_heads(self.v_proj.forward(x.clone()), self.heads),
            beta: sigmoid(self.b_proj.forward(x.clone())),
            g: log_sigmoid(self.a_proj.forward(x.clone())),
            lambda: lambda.reshape([self.heads, key_width]),
            iterations: self.cg_steps,
        };
        let (o, memory) = op(inputs, memory).expect("the projections made the shapes");
        let gate = self.g_proj.as_ref().map(|g| split_heads(g.forward(x), self.heads));
        let y = self.o_proj.forward(merge_heads(self.o_norm.forward(o, gate)));
        (y, MatrixState { memory, tails, position: position + tokens })
    }
}
