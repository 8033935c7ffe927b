//! Mamba-3. Recurrence, shapes and source: `pages/mamba3.md`, the page of [`Mamba3`].

use super::{MatrixPast, MatrixState, TokenMixer};
use super::{check_groups, expanded_heads, linear_flops, memory_cost};
use crate::nn::layers::{
    ResidualLinear, check_epsilon, merge_heads, rms_norm, rms_normalize, share_heads, softplus,
    split_heads, torch_linear,
};
use crate::nn::log_decay::fresh_dt_bias;
use crate::nn::rope::{Turn, sum_of_angles};
use crate::nn::trapezoid::Trapezoid;
use crate::nn::{ConfigError, Cost, Kept, LARGEST, Linear, Shared, positive};
use crate::ops::{Along, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Config of [`Mamba3`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba3Config {
    /// K, width of a row of B and C, even.
    pub d_state: usize,
    /// Inner width over d_model.
    pub expand: usize,
    /// V, width of a head; the inner width must be a multiple of it.
    pub head_width: usize,
    /// Groups of heads that share B and C but for their biases.
    pub groups: usize,
    /// Share of B's and C's channels that are turned.
    pub rope_fraction: f64,
    /// R, rows that a token writes and reads: 1 is the model of one input and one output, SISO.
    pub mimo_rank: usize,
    /// Whether each head's output has a norm, before the gate.
    pub output_norm: bool,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for Mamba3Config {
    fn default() -> Self {
        Self {
            d_state: 128,
            expand: 2,
            head_width: 64,
            groups: 1,
            rope_fraction: 0.5,
            mimo_rank: 1,
            output_norm: false,
            norm_eps: 1e-5,
        }
    }
}

/// Sizes that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// H V.
    inner: usize,
    /// H.
    heads: usize,
    /// Pairs of channels that turn.
    angles: usize,
    /// R G K.
    keys: usize,
}

impl Mamba3Config {
    pub(super) fn resolve(&self, d_model: usize) -> Result<Sizes, ConfigError> {
        let (inner, heads) = expanded_heads(self.expand, self.head_width, d_model)?;
        check_groups(self.groups, heads)?;
        if !positive("d_state", self.d_state)?.is_multiple_of(2) {
            return Err(ConfigError::new("d_state", self.d_state, "even: pairs of channels turn"));
        }
        let angles = (self.d_state as f64 * self.rope_fraction / 2.0) as usize;
        if !(1..=self.d_state / 2).contains(&angles) {
            let want = format!("at most 1, and such that 2 of {} channels turn", self.d_state);
            return Err(ConfigError::new("rope_fraction", self.rope_fraction, want));
        }
        check_epsilon(self.norm_eps)?;
        let (rank, of_rank) = (positive("mimo_rank", self.mimo_rank)?, heads * self.d_state);
        let most = (LARGEST / of_rank).max(1);
        if rank > most {
            let want = format!("at most {most}");
            return Err(ConfigError::new("mimo_rank", rank, want));
        }
        Ok(Sizes { inner, heads, angles, keys: rank * self.groups * self.d_state })
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mamba3<B>, ConfigError> {
        let Sizes { inner, heads, angles, keys } = self.resolve(d_model)?;
        let (rank, width) = (self.mimo_rank, self.d_state);
        let norm = |width| RmsNormConfig::new(width).with_epsilon(self.norm_eps).init(device);
        let bias = || Initializer::Ones.init([heads, rank, width], device);
        let rows = |value| {
            let shape = [heads, rank, self.head_width];
            (rank > 1).then(|| Initializer::Constant { value }.init(shape, device))
        };
        let projected = 2 * (inner + keys) + 3 * heads + angles;
        Ok(Mamba3 {
            in_proj: torch_linear(d_model, projected, device),
            dt_bias: fresh_dt_bias(heads, device),
            b_norm: norm(width),
            c_norm: norm(width),
            b_bias: bias(),
            c_bias: bias(),
            mimo_x: rows((rank as f64).recip()),
            mimo_z: rows(1.0),
            mimo_o: rows((rank as f64).recip()),
            d: Initializer::Ones.init([heads], device),
            norm: self.output_norm.then(|| norm(inner)),
            out_proj: torch_linear(inner, d_model, device).into(),
            groups: self.groups,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let Sizes { inner, heads, angles, keys } = self.resolve(d_model)?;
        let rank = self.mimo_rank as u64;
        let mut cost = memory_cost(heads, self.d_state, self.head_width, false);
        // Every row is written and read; and scored with those of its token.
        cost.flops_per_token *= rank;
        cost.flops_per_token += 2 * rank * rank * (heads * self.d_state + inner) as u64;
        cost.flops_per_token += linear_flops(d_model, 2 * (inner + keys) + 3 * heads + angles)
            + linear_flops(inner, d_model);
        let rows = self.mimo_rank * self.d_state;
        cost.state_bytes += 4 * (heads * (angles + rows) + inner) as u64;
        Ok(cost)
    }
}

#[doc = include_str!("pages/mamba3.md")]
#[derive(Module, Debug)]
pub struct Mamba3<B: Backend> {
    in_proj: Linear<B>,
    dt_bias: Param<Tensor<B, 1>>,
    b_norm: RmsNorm<B>,
    c_norm: RmsNorm<B>,
    /// `[H, R, K]`.
    b_bias: Param<Tensor<B, 3>>,
    c_bias: Param<Tensor<B, 3>>,
    /// `[H, R, V]`, none if R is 1.
    mimo_x: Option<Param<Tensor<B, 3>>>,
    mimo_z: Option<Param<Tensor<B, 3>>>,
    mimo_o: Option<Param<Tensor<B, 3>>>,
    d: Param<Tensor<B, 1>>,
    norm: Option<RmsNorm<B>>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    groups: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Mamba3<B> {
    type State = MatrixState<B>;
    const TAKES_BF16: bool = true;
    const SCALES_ITSELF: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<MatrixState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, MatrixState<B>) {
        let ([batch, tokens, _], mut past) = (x.dims(), MatrixPast::of(state, shared));
        let [heads, rank, width] = self.b_bias.dims();
        let inner = self.out_proj.weight.dims()[0];
        let keys = rank * self.groups * width;
        let projected = self.in_proj.forward(x);
        let angles = projected.dims()[2] - 2 * (inner + keys) - 3 * heads;
        let sizes = vec![inner, inner, keys, keys, heads, heads, heads, angles];
        let parts: [_; 8] = projected.split_with_sizes(sizes, 2).try_into().expect("eight sizes");
        let [z, x, b, c, step, rate, share, angles] = parts;

        let step = softplus(accumulator(step) + self.dt_bias.val().unsqueeze());
        let angles = past
            .conv_states
            .through(Kept::Angles, |sums| sum_of_angles(turns(angles, &step), sums));
        let turn = self.turn(split_heads(angles, heads));
        let k = self.rows(b, &self.b_norm, &self.b_bias, &turn);
        let q = self.rows(c, &self.c_norm, &self.c_bias, &turn);
        let v = self.over_rows(&x, &self.mimo_x);
        let now = sigmoid(accumulator(share)) * step.clone();
        let before = step.clone() - now.clone();
        let g = (heavy_tail(accumulator(rate)) * step).neg();

        let [last_k, last_x] = [Kept::Key, Kept::Value].map(|name| past.conv_states.draw(name));
        let last = last_k.zip(last_x).map(|(k, x)| {
            let k = k.reshape([batch, 1, rank, heads, width]);
            (k, self.over_rows(&x, &self.mimo_x))
        });
        let last_k = k.clone().narrow(1, tokens - 1, 1);
        past.conv_states.keep(Kept::Key, last_k.reshape([batch, 1, rank * heads * width]));
        past.conv_states.keep(Kept::Value, x.narrow(1, tokens - 1, 1));
        let rows = Trapezoid { q, k, v: v.clone(), now, before, g };
        let (o, memory) = rows.attend(last, past.memory.take());
        let d = typed(self.d.val(), o.dtype()).reshape([1, 1, 1, heads, 1]);
        let y = self.gated(o + v * d, &z);
        (self.out_proj.forward(y), past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Mamba3<B> {
    /// By angles, `[B, T, H, S]`, in all R rows: by none where there are fewer than pairs of channels.
    fn turn(&self, angles: Tensor<B, 4>) -> Turn<B> {
        let ([batch, tokens, heads, _], [_, rank, width]) = (angles.dims(), self.b_bias.dims());
        let none = width / 2 - angles.dims()[3];
        let zeros =
            || Tensor::zeros([batch, tokens, heads, none], (&angles.device(), angles.dtype()));
        let angles = if none == 0 { angles } else { cat(vec![angles.clone(), zeros()], 3) };
        Turn::by(angles.repeat_dim(2, rank))
    }

    /// Turned rows of B or C, `[B, T, R, H, K]`, of their projection, `[B, T, R G K]`.
    fn rows(
        &self,
        x: Tensor<B, 3>,
        norm: &RmsNorm<B>,
        bias: &Param<Tensor<B, 3>>,
        turn: &Turn<B>,
    ) -> Tensor<B, 5> {
        let ([batch, tokens, _], [heads, rank, width]) = (x.dims(), bias.dims());
        let x = rms_norm(norm, x.reshape([batch, tokens * rank, self.groups, width]), None);
        let rows = share_heads(x, heads).reshape([batch, tokens, rank * heads, width]);
        let bias = typed(bias.val(), rows.dtype()).swap_dims(0, 1);
        let rows = turn.forward(rows + bias.reshape([1, 1, rank * heads, width]));
        rows.reshape([batch, tokens, rank, heads, width])
    }

    /// `x`, `[B, T, H V]`, times a row of factors for each of R rows, `[B, T, R, H, V]`.
    fn over_rows(&self, x: &Tensor<B, 3>, factors: &Option<Param<Tensor<B, 3>>>) -> Tensor<B, 5> {
        let heads = self.d.dims()[0];
        let x = split_heads(x.clone(), heads).unsqueeze_dim(2);
        match factors {
            Some(factors) => {
                let factors = typed(factors.val(), x.dtype()).swap_dims(0, 1);
                x * factors.unsqueeze()
            }
            None => x,
        }
    }

    /// Outputs of rows, `[B, T, R, H, V]`, normalised, gated and summed: `[B, T, H V]`.
    fn gated(&self, o: Tensor<B, 5>, z: &Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, tokens, _, heads, width] = o.dims();
        let o = match &self.norm {
            Some(norm) => {
                let gamma = typed(norm.gamma.val(), o.dtype()).reshape([1, 1, 1, heads, width]);
                rms_normalize(o, norm.epsilon) * gamma
            }
            None => o,
        };
        let o = o * silu(self.over_rows(z, &self.mimo_z));
        let o = match &self.mimo_o {
            Some(factors) => {
                o.clone() * typed(factors.val(), o.dtype()).swap_dims(0, 1).unsqueeze()
            }
            None => o,
        };
        o.sum_along(2).reshape([batch, tokens, heads * width])
    }
}

/// Angles of each head, `[B, T, H S]`, of their projection, `[B, T, S]`, and steps, `[B, T, H]`.
fn turns<B: LinearAttentionBackend>(angles: Tensor<B, 3>, step: &Tensor<B, 3>) -> Tensor<B, 3> {
    let shares = accumulator(angles).tanh() * PI;
    merge_heads(shares.unsqueeze_dim::<4>(2) * step.clone().unsqueeze_dim::<4>(3))
}

/// `1 + x` where x is at least 0, else `1 / (1 - x)`.
fn heavy_tail<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    x.clone().clamp_min(0.0) + (x.clamp_max(0.0).neg() + 1.0).recip()
}
