//! Mamba-2. Recurrence, shapes and source: `pages/mamba2.md`, the page of [`Mamba2`].

use super::retnet::check_rotated;
use super::{
    MatrixPast, MatrixState, TokenMixer, Varlen, check_groups, expanded_heads, linear_flops,
    memory_cost,
};
use crate::nn::convolution::{ConvPast, ShortConvolution};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, merge_heads, rms_norm, rms_normalize, softplus, split_heads,
    torch_linear,
};
use crate::nn::log_decay::{LogDecayParams, fresh_a_log, fresh_dt_bias};
use crate::nn::projection::{Convolution, Split, padding};
use crate::nn::recurrence::linear_attention;
use crate::nn::{ConfigError, Cost, Kept, Linear, Rope, Shared, positive};
use crate::ops::{
    self, Activation, Column, ColumnKind, GateActivation, LinearAttentionBackend, accumulator,
    typed,
};
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Base of the rotation's wavelengths.
const ROPE_THETA: f64 = 10_000.0;

/// Config of [`Mamba2`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba2Config {
    /// K, width of B and C.
    pub d_state: usize,
    /// Inner width over d_model, where `heads` does not say it.
    pub expand: usize,
    /// V, width of a head; the inner width must be a multiple of it.
    pub head_width: usize,
    /// Heads, which make the inner width heads times `head_width`; as many as `expand` gives by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Tokens the short convolution sees; 1 for a factor and a bias for each channel.
    pub conv_size: usize,
    /// Whether the norm takes each group's values by themselves, as released models of several groups
    /// have it; else all together.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub group_norm: bool,
    /// Least step size: smaller ones are raised to it; 0 for none.
    #[serde(skip_serializing_if = "is_zero")]
    pub step_min: f64,
    /// Whether B and C are rotated by position.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub rope: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

fn is_zero(step: &f64) -> bool {
    *step == 0.0
}

impl Default for Mamba2Config {
    fn default() -> Self {
        Self {
            d_state: 128,
            expand: 2,
            head_width: 64,
            heads: None,
            groups: 1,
            conv_size: 4,
            group_norm: false,
            step_min: 0.0,
            rope: false,
            norm_eps: 1e-5,
        }
    }
}

impl Mamba2Config {
    /// Inner width and heads.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("d_state", self.d_state)?;
        if self.rope {
            check_rotated("d_state", self.d_state)?;
        }
        let (inner, heads) = self.inner(d_model)?;
        if !(self.step_min >= 0.0 && self.step_min.is_finite()) {
            return Err(ConfigError::new("step_min", self.step_min, "at least 0"));
        }
        check_groups(self.groups, heads)?;
        positive("conv_size", self.conv_size)?;
        check_epsilon(self.norm_eps)?;
        Ok((inner, heads))
    }

    /// Inner width and heads, from `heads` or from `expand`.
    fn inner(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        let width = positive("head_width", self.head_width)?;
        if let Some(heads) = self.heads {
            return Ok((positive("heads", heads)? * width, heads));
        }
        expanded_heads(self.expand, width, d_model)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mamba2<B>, ConfigError> {
        let (inner, heads) = self.resolve(d_model)?;
        let channels = inner + 2 * self.groups * self.d_state;
        Ok(Mamba2 {
            in_proj: torch_linear(d_model, inner + channels + heads, device),
            conv1d: ShortConvolution::new(channels, self.conv_size, true, device),
            dt_bias: fresh_dt_bias(heads, device),
            a_log: fresh_a_log(heads, 1.0, device),
            d: Initializer::Ones.init([heads], device),
            norm: RmsNormConfig::new(inner).with_epsilon(self.norm_eps).init(device),
            out_proj: torch_linear(inner, d_model, device).into(),
            heads,
            groups: self.groups,
            group_norm: self.group_norm,
            rope: self.rope.then_some(Rope::whole(ROPE_THETA)),
            d_state: self.d_state,
            step_min: self.step_min,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (inner, heads) = self.resolve(d_model)?;
        let channels = (inner + 2 * self.groups * self.d_state) as u64;
        let mut cost = memory_cost(heads, self.d_state, self.head_width, false);
        cost.flops_per_token += linear_flops(d_model, inner + channels as usize + heads)
            + linear_flops(inner, d_model)
            + 2 * self.conv_size as u64 * channels;
        cost.state_bytes += 4 * (self.conv_size as u64 - 1) * channels;
        Ok(cost)
    }
}

#[doc = include_str!("pages/mamba2.md")]
#[derive(Module, Debug)]
pub struct Mamba2<B: Backend> {
    in_proj: Linear<B>,
    conv1d: ShortConvolution<B>,
    dt_bias: Param<Tensor<B, 1>>,
    a_log: Param<Tensor<B, 1>>,
    d: Param<Tensor<B, 1>>,
    norm: RmsNorm<B>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    groups: usize,
    #[module(skip)]
    group_norm: bool,
    #[module(skip)]
    rope: Option<Rope>,
    #[module(skip)]
    d_state: usize,
    #[module(skip)]
    step_min: f64,
}

/// Parts of the projected input, `[B, T, ..]`.
struct Parts<B: Backend> {
    /// Gate, all heads'.
    z: Tensor<B, 3>,
    /// Values, all heads'.
    x: Tensor<B, 3>,
    /// B, all groups'.
    k: Tensor<B, 3>,
    /// C, all groups'.
    q: Tensor<B, 3>,
    /// dt, a number a head, in f32 at least.
    step: Tensor<B, 3>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Mamba2<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const VARLEN: Varlen = Varlen::Packed;
    const SCALES_ITSELF: bool = true;

    fn counts_tokens(&self) -> bool {
        self.rope.is_some()
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let (tokens, mut past) = (x.dims()[1], MatrixPast::of(state, shared));
        let Parts { z, x, k, q, step } = self.parts(x, &mut past.conv_states);
        let step = if self.step_min > 0.0 { step.clamp_min(self.step_min) } else { step };
        let [q, k] = [q, k].map(|rows| {
            let rows = split_heads(rows, self.groups);
            self.rope.map_or(rows.clone(), |rope| rope.forward(rows, past.position))
        });
        let (dtype, x) = (x.dtype(), split_heads(x, self.heads));
        let v = x.clone() * typed(step.clone(), dtype).unsqueeze_dim(3);
        let g: Tensor<B, 3> = step * self.a_log.val().exp().neg().unsqueeze();
        let inputs = ops::LinearAttentionInputs::new(q, k, v).with_decay(g);
        let (o, memory) = linear_attention(inputs, past.memory.take(), past.conv_states.lengths());
        let skip = x * typed(self.d.val(), dtype).reshape([1, 1, self.heads, 1]);
        let y = self.normalize(ops::gate(merge_heads(o + skip), z, GateActivation::Silu));
        (self.out_proj.forward(y), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Mamba2<B> {
    /// The input's parts. Over several tokens the projection's columns are put in the order in which one
    /// operation splits them: those of the convolution, those of the steps, and z.
    fn parts(&self, x: Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Parts<B> {
        let (inner, keys) = (self.norm.gamma.dims()[0], self.groups * self.d_state);
        let behind = inner + 2 * keys + self.heads;
        if x.dims()[1] == 1 || self.conv1d.weight.dims()[0] == 1 {
            return self.parts_of_token(x, conv_states);
        }
        let silu = ColumnKind::Conv { activation: Some(Activation::Silu), norm: None };
        let column = |width, kind| Column { width, kind };
        let columns = vec![
            column(inner, silu),
            column(keys, silu),
            column(keys, silu),
            column(self.heads, ColumnKind::LogDecay),
            column(inner, ColumnKind::Copy),
        ];
        let weight = self.in_proj.weight.val();
        let part = |from, width| weight.clone().narrow(1, from, width);
        let weights = vec![part(inner, behind), part(0, inner)];
        let weight = ops::pack(weights, padding(&columns), x.dtype());
        let y = ops::affine(x.clone(), weight, None).expect("the projection reads `x`");
        let y = self.in_proj.adapter.add_parts(y, &x, &[(inner, behind), (0, inner)]);
        let convolution = Some(Convolution::of((Kept::Input, &self.conv1d), &y, conv_states));
        // With rates of 1 a log decay is less than 0 by the step.
        let decay = Some(LogDecayParams {
            a_log: self.a_log.val().detach().zeros_like(),
            dt_bias: self.dt_bias.val(),
        });
        let outputs = Split { y, columns, convolution, decay }.outputs();
        let [x, k, q, less, z] = outputs.try_into().expect("an output for each of five columns");
        Parts { z, x, k, q, step: less.neg() }
    }

    /// As [`parts`](Self::parts), in the projection's own order.
    fn parts_of_token(&self, x: Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Parts<B> {
        let (inner, keys) = (self.norm.gamma.dims()[0], self.groups * self.d_state);
        let channels = inner + 2 * keys;
        let part = |x: &Tensor<B, 3>, from, width| x.clone().narrow(2, from, width);
        let projected = self.in_proj.forward(x);
        let mixed = self.conv1d.forward_between(
            part(&projected, inner, channels),
            Kept::Input,
            conv_states,
        );
        let step = accumulator(part(&projected, inner + channels, self.heads));
        Parts {
            z: part(&projected, 0, inner),
            x: part(&mixed, 0, inner),
            k: part(&mixed, inner, keys),
            q: part(&mixed, inner + keys, keys),
            step: softplus(step + self.dt_bias.val().unsqueeze()),
        }
    }

    /// Mean square taken out, over all values or over each group's, `[B, T, D]`.
    fn normalize(&self, y: Tensor<B, 3>) -> Tensor<B, 3> {
        if !self.group_norm {
            return rms_norm(&self.norm, y, None);
        }
        let dtype = y.dtype();
        let by_group = rms_normalize(split_heads(y, self.groups), self.norm.epsilon);
        merge_heads(by_group) * typed(self.norm.gamma.val(), dtype).unsqueeze()
    }
}
