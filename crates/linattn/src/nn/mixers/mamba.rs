//! Mamba. Recurrence, shapes and source: [`Mamba`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, scan_cost};
use crate::nn::convolution::{ShortConvolution, convolution_cost};
use crate::nn::layers::{ResidualLinear, softplus, torch_linear};
use crate::nn::log_decay::fresh_dt_bias;
use crate::nn::projection::{convolved_half, split_columns};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{
    self, GateActivation, LinearAttentionBackend, SelectiveScanInputs, accumulator, typed,
};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Mamba`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MambaConfig {
    /// N, numbers in the memory of a channel.
    pub d_state: usize,
    /// Inner width over d_model.
    pub expand: usize,
    /// Tokens the short convolution sees; 1 for a factor and a bias for each channel.
    pub conv_size: usize,
    /// Inner width of the projection that makes the step sizes; d_model / 16 by default, rounded up.
    pub dt_rank: Option<usize>,
    /// Lets a memory change its sign, as counting modulo 2 asks for.
    pub allow_neg_eigval: bool,
}

impl Default for MambaConfig {
    fn default() -> Self {
        Self { d_state: 16, expand: 2, conv_size: 4, dt_rank: None, allow_neg_eigval: false }
    }
}

impl MambaConfig {
    /// Inner width and rank.
    pub(super) fn resolve(&self, d_model: usize) -> Result<(usize, usize), ConfigError> {
        positive("d_state", self.d_state)?;
        let inner = positive("expand", self.expand)? * d_model;
        let rank = positive("dt_rank", self.dt_rank.unwrap_or(d_model.div_ceil(16)))?;
        positive("conv_size", self.conv_size)?;
        Ok((inner, rank))
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Mamba<B>, ConfigError> {
        let (inner, rank) = self.resolve(d_model)?;
        let a_log: Vec<f32> =
            (0..inner * self.d_state).map(|i| ((i % self.d_state + 1) as f32).ln()).collect();
        let a_log =
            Tensor::<B, 2>::from_data(TensorData::new(a_log, [inner, self.d_state]), device);
        Ok(Mamba {
            in_proj: torch_linear(d_model, 2 * inner, device),
            conv1d: ShortConvolution::new(inner, self.conv_size, true, device),
            x_proj: torch_linear(inner, rank + 2 * self.d_state, device),
            dt_proj: Linear {
                bias: Some(fresh_dt_bias(inner, device)),
                ..torch_linear(rank, inner, device)
            },
            a_log: Param::from_tensor(a_log),
            d: Initializer::Ones.init([inner], device),
            out_proj: torch_linear(inner, d_model, device).into(),
            allow_neg_eigval: self.allow_neg_eigval,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let (inner, rank) = self.resolve(d_model)?;
        let mut cost = scan_cost(inner * self.d_state);
        // The share kept, what is written, what is read.
        cost.flops_per_token += 5 * (inner * self.d_state) as u64;
        cost.flops_per_token += linear_flops(d_model, 2 * inner)
            + linear_flops(inner, rank + 2 * self.d_state)
            + linear_flops(rank, inner)
            + linear_flops(inner, d_model);
        cost += convolution_cost(self.conv_size, inner);
        Ok(cost)
    }
}

/// Mamba: a state-space model whose step size, input and output vectors depend on the data.
///
/// # Recurrence
/// ```text
/// x, z   = u W_in
/// x      = silu(conv(x))
/// dt     = softplus((x W_x)_dt W_dt + b_dt)                one number a channel
/// B, C   = (x W_x)_B, (x W_x)_C                            [N], shared by all channels
/// h      = exp(-dt exp(A_log)) h + dt x B                  [I, N]
/// y      = ((h C^T + D x) silu(z)) W_out
/// ```
/// ```text
/// u_t ──> x, z, dt, B, C
///            ┌─ decay ───────────────┐   ┌─ write ──┐
/// h_{t-1} ──>│ exp(-dt exp(A_log)) h │──>│ + dt x B │──┬──> h_t
///            └───────────────────────┘   └──────────┘  │
///                                     ┌─ read ──────┐  │
///           y_t <── W_out <── gate <──│ h C^T + D x │<─┘
///                                     └─────────────┘
/// ```
/// I is the inner width, u_t the layer's input. With `allow_neg_eigval` the share kept is
/// `2 exp(-dt exp(A_log)) - 1`, between -1 and 1, as in arXiv 2411.12537, and the rest is as before.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, h, `[B, 1, I N]`; `conv_states`, the
/// last W - 1 inputs of the short convolution; `position`, tokens seen. dt is a step size above 0, for each
/// token and channel; N is `d_state`.
/// # Errors
/// [`MambaConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a size of 0.
/// # Source
/// Gu and Dao, arXiv 2312.00752. A starts as 1 to N, dt log-uniform in 0.001 to 0.1, D as 1; linear layers as
/// PyTorch draws them, uniform within 1 / sqrt(fan-in), as the authors' code leaves them.
#[derive(Module, Debug)]
pub struct Mamba<B: Backend> {
    in_proj: Linear<B>,
    conv1d: ShortConvolution<B>,
    x_proj: Linear<B>,
    dt_proj: Linear<B>,
    /// `[I, N]`.
    a_log: Param<Tensor<B, 2>>,
    d: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    allow_neg_eigval: bool,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Mamba<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;
    const SCALES_ITSELF: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, mut past) = (x.dims()[1], VectorPast::of(state));
        let ([_, size], rank) = (self.a_log.dims(), self.dt_proj.weight.dims()[0]);
        let y = self.in_proj.forward(x);
        let [x, z] = convolved_half(y, &self.conv1d, &mut past.conv_states);
        let [low, b, c] = split_columns(self.x_proj.forward(x.clone()), [rank, size, size]);
        let dt = softplus(accumulator(self.dt_proj.forward(low)));
        // The state and all that goes into it are f32 at least.
        let [b, c] = [b, c].map(accumulator);
        let wide = accumulator(x);
        let (o, last) = ops::selective_scan(SelectiveScanInputs {
            x: wide.clone(),
            dt,
            a: self.a_log.val().exp().neg(),
            b,
            c,
            state: past.draw(Kept::Hidden),
            signed: self.allow_neg_eigval,
        })
        .expect("the projections made the shapes");
        let o = o + ops::scale_channels(wide, self.d.val(), None, None);
        let o = typed(o, z.dtype());
        let y = self.out_proj.forward(ops::gate(o, z, GateActivation::Silu));
        (y, past.then([(Kept::Hidden, last)], tokens))
    }
}
