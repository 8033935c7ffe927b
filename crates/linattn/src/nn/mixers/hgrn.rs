//! HGRN: a vector with a forget gate that also says how much is written.
//! ```text
//! f = b + (1 - b) sigmoid(x W_f)
//! h = f h + (1 - f) silu(x W_i)
//! y = (rms_norm(h) silu(x W_g)) W_o
//! ```
//! b is the lower bound of the forget gate: 0, or one learnt number a channel.
//! Source: Qin et al., arXiv 2311.04823, with real numbers and the order of layers of the released
//! models. There the bounds of all layers are learnt together so that they rise with depth; here each
//! layer learns its own, from where its config lets it start. It is kept as its inverse sigmoid, so
//! that any bound can be written into it.

use super::hgrn2::{check_lower_bound, forgotten, fresh_bound};
use super::{VectorState, linear_flops, scan_cost};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost, convolve_linearly};
use crate::nn::layers::{GatedRmsNorm, check_epsilon, linear};
use crate::nn::{ConfigError, Cost, Linear, positive};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// HGRN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HgrnConfig {
    /// Width of the memory over d_model.
    pub expand: usize,
    /// Least share that a forget gate keeps, where learning starts, below 1; 0 for no bound at all.
    pub lower_bound: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for HgrnConfig {
    fn default() -> Self {
        Self { expand: 1, lower_bound: 0.0, conv_size: 0, norm_eps: 1e-5 }
    }
}

impl HgrnConfig {
    fn width(&self, d_model: usize) -> Result<usize, ConfigError> {
        let width = positive("expand", self.expand)? * d_model;
        check_lower_bound(self.lower_bound)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Hgrn<B>, ConfigError> {
        let width = self.width(d_model)?;
        Ok(Hgrn {
            i_proj: linear(d_model, width, device),
            f_proj: linear(d_model, width, device),
            g_proj: linear(d_model, width, device),
            lower_bound: fresh_bound(self.lower_bound, width, device),
            i_conv1d: ShortConvolution::optional(width, self.conv_size, device),
            f_conv1d: ShortConvolution::optional(width, self.conv_size, device),
            g_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(width, d_model, device),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.width(d_model)?;
        let mut cost = scan_cost(width);
        cost.flops_per_token += linear_flops(d_model, 3 * width) + linear_flops(width, d_model);
        cost += convolution_cost(self.conv_size, 2 * width);
        Ok(cost)
    }
}

/// HGRN. `D -> D`.
#[derive(Module, Debug)]
pub struct Hgrn<B: Backend> {
    i_proj: Linear<B>,
    f_proj: Linear<B>,
    g_proj: Linear<B>,
    /// The inverse sigmoid of the bound.
    lower_bound: Option<Param<Tensor<B, 1>>>,
    i_conv1d: Option<ShortConvolution<B>>,
    f_conv1d: Option<ShortConvolution<B>>,
    g_norm: GatedRmsNorm<B>,
    o_proj: Linear<B>,
}

forward_and_step!(Hgrn);

impl<B: LinearAttentionBackend> Hgrn<B> {
    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let tokens = x.dims()[1];
        let (mut memory, mut before, position) = VectorState::parts(state);
        let mut tails = vec![];
        let mut project = |proj: &Linear<B>, conv: &Option<ShortConvolution<B>>| {
            convolve_linearly(conv, proj.forward(x.clone()), &mut before, &mut tails)
        };
        let input = silu(project(&self.i_proj, &self.i_conv1d));
        let written = forgotten(project(&self.f_proj, &self.f_conv1d), &self.lower_bound);
        let kept = written.clone().neg() + 1.0;
        let (h, last) = ops::linear_scan(kept, written * input, memory.next())
            .expect("the projections made the shapes");
        let y = self.o_proj.forward(self.g_norm.forward(h, Some(self.g_proj.forward(x))));
        (y, VectorState { memory: vec![last], tails, position: position + tokens })
    }
}
