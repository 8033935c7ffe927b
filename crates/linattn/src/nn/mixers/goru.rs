//! Gated orthogonal recurrent unit. Recurrence, shapes and source: [`Goru`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, recurrent_width};
use crate::nn::layers::{ResidualLinear, each_token, linear};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{LinearAttentionBackend, cat, stack};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::{relu, sigmoid};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Where the bias of the reset gate starts, b_r.
const RESET_BIAS: f64 = 2.0;
/// Where b starts.
const THRESHOLD: f64 = 0.01;

/// Config of [`Goru`], the gated orthogonal recurrent unit. The layer's page has recurrence, shapes, errors
/// and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GoruConfig {
    /// Width of the memory, an even number; d_model by default.
    pub width: Option<usize>,
    /// L: how many rotations of neighbours make the whole one.
    pub capacity: usize,
}

impl Default for GoruConfig {
    fn default() -> Self {
        Self { width: None, capacity: 2 }
    }
}

impl GoruConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("capacity", self.capacity)?;
        match recurrent_width(self.width, d_model)? {
            width if width % 2 == 0 => Ok(width),
            width => Err(ConfigError::new("width", width, "an even number")),
        }
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Goru<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let constant = |value| Initializer::Constant { value }.init([width], device);
        let angles = Initializer::Uniform { min: -PI, max: PI };
        Ok(Goru {
            x_proj: linear(d_model, 3 * width, device),
            h_proj: linear(width, 2 * width, device),
            reset_bias: constant(RESET_BIAS),
            update_bias: constant(0.0),
            angles: angles.init([self.capacity, width / 2], device),
            threshold: constant(THRESHOLD),
            o_proj: linear(width, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 4 * width as u64,
            flops_per_token: linear_flops(d_model + width, 3 * width)
                + linear_flops(width, d_model),
        })
    }
}

/// Gated orthogonal recurrent unit (GORU): a GRU whose candidate comes from the last state turned by a learnt
/// rotation.
///
/// A rotation keeps the state's length. Its gates see the last output, so tokens go one after another: time
/// grows with T whatever the device.
///
/// # Recurrence
/// ```text
/// a_r, a_z, a_c = x W_x                                 three parts
/// r, z       = sigmoid(a_r + h W_r + b_r), sigmoid(a_z + h W_z + b_z)
/// s          = a_c + r (h G_1 G_2 .. G_L)            G_l turns neighbours by angles: (0 1)(2 3).. where l is
/// c          = sign(s) relu(|s| + b)                 odd, (1 2)(3 4)..(H-1 0) where it is even
/// h          = z h + (1 - z) c
/// y          = h W_out
/// ```
/// ```text
/// x_t, h_{t-1} ──> r, z, c        c from h turned by G_1 .. G_L
///            ┌─ decay ┐   ┌─ write ─────┐
/// h_{t-1} ──>│ z h    │──>│ + (1 - z) c │──┬──> h_t
///            └────────┘   └─────────────┘  │
///                               ┌─ read ┐  │
///              y_t <── W_out <──│ h     │<─┘
///                               └───────┘
/// ```
/// The rotations are multiplied out once for all tokens, so a token is one product of h, as in a GRU.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, h, `[B, 1, H]`, H `width`;
/// `position`, tokens seen. z is the share of h that is kept, 0 to 1; angles are in radians.
/// # Errors
/// [`GoruConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `capacity` of 0 or a
/// `width` that is 0 or odd.
/// # Source
/// Jing et al., arXiv 1706.02761, with the rotations of arXiv 1612.05231 and their authors' starting values.
/// # Departures
/// There the first and the last number stay as they are where l is even. Weights start as N(0, 0.02^2), as
/// everywhere here.
#[derive(Module, Debug)]
pub struct Goru<B: Backend> {
    x_proj: Linear<B>,
    /// W_r and W_z.
    h_proj: Linear<B>,
    reset_bias: Param<Tensor<B, 1>>,
    update_bias: Param<Tensor<B, 1>>,
    /// `[L, H / 2]`.
    angles: Param<Tensor<B, 2>>,
    /// b, `[H]`.
    threshold: Param<Tensor<B, 1>>,
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Goru<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let tokens = x.dims()[1];
        let mut past = VectorPast::of(state);
        let inward = self.x_proj.forward(x);
        let width = inward.dims()[2] / 3;
        let start = || inward.clone().detach().narrow(1, 0, 1).narrow(2, 0, width).zeros_like();
        let mut h = past.draw(Kept::Hidden).unwrap_or_else(start);
        let rotation = self.rotation().unsqueeze::<3>();
        let row = |bias: &Param<Tensor<B, 1>>| bias.val().unsqueeze::<3>();
        let [reset, update, threshold] =
            [&self.reset_bias, &self.update_bias, &self.threshold].map(row);
        let mut outputs = Vec::with_capacity(tokens);
        for token in each_token(inward.clone()) {
            let gates = self.h_proj.forward(h.clone());
            let part = |x: &Tensor<B, 3>, j: usize| x.clone().narrow(2, j * width, width);
            let gate =
                |j, bias: &Tensor<B, 3>| sigmoid(part(&token, j) + part(&gates, j) + bias.clone());
            let sum = part(&token, 2) + gate(0, &reset) * h.clone().matmul(rotation.clone());
            let new = sum.clone().sign() * relu(sum.abs() + threshold.clone());
            h = new.clone() + gate(1, &update) * (h - new);
            outputs.push(h.clone());
        }
        let y = self.o_proj.forward(cat(outputs, 1));
        (y, past.then([(Kept::Hidden, h)], tokens))
    }
}

impl<B: LinearAttentionBackend> Goru<B> {
    /// G_1 G_2 .. G_L, `[H, H]`.
    fn rotation(&self) -> Tensor<B, 2> {
        let angles = self.angles.val();
        let [layers, half] = angles.dims();
        let width = 2 * half;
        let whole = Tensor::<B, 2>::eye(width, &angles.device()).cast(angles.dtype());
        (0..layers).fold(whole, |rows, layer| {
            let angle = angles.clone().narrow(0, layer, 1);
            let (cos, sin) = (angle.clone().cos(), angle.sin());
            // Where neighbours start with the second number, the first is the last of all.
            let moved = if layer % 2 == 1 { rolled(rows, 1) } else { rows };
            let pairs = moved.reshape([width, half, 2]);
            let part = |j| pairs.clone().narrow(2, j, 1).reshape([width, half]);
            let (a, b) = (part(0), part(1));
            let turned = [a.clone() * cos.clone() - b.clone() * sin.clone(), a * sin + b * cos];
            let turned = stack::<B, _, 3>(turned.into(), 2).reshape([width, width]);
            if layer % 2 == 1 { rolled(turned, width - 1) } else { turned }
        })
    }
}

/// Columns of `x` from number `first` on, and those before it behind them.
fn rolled<B: Backend>(x: Tensor<B, 2>, first: usize) -> Tensor<B, 2> {
    let columns = x.dims()[1];
    let (before, after) = (x.clone().narrow(1, 0, first), x.narrow(1, first, columns - first));
    cat(vec![after, before], 1)
}
