//! HGRN. Recurrence, shapes and source: [`Hgrn`].

use super::hgrn2::{check_lower_bound, forgotten, fresh_bound};
use super::{TokenMixer, VectorPast, VectorState, linear_flops, scan_cost};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::layers::{GatedRmsNorm, ResidualLinear, check_epsilon, linear};
use crate::nn::projection::{Projection, project};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{self, Activation, LinearAttentionBackend, accumulator, typed};
use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Hgrn`]. The layer's page has recurrence, shapes, errors and source.
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
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
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
        let width = self.resolve(d_model)?;
        Ok(Hgrn {
            i_proj: linear(d_model, width, device),
            f_proj: linear(d_model, width, device),
            g_proj: linear(d_model, width, device),
            lower_bound: fresh_bound(self.lower_bound, width, device),
            i_conv1d: ShortConvolution::optional(width, self.conv_size, device),
            f_conv1d: ShortConvolution::optional(width, self.conv_size, device),
            g_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(width, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let mut cost = scan_cost(width);
        cost.flops_per_token += linear_flops(d_model, 3 * width) + linear_flops(width, d_model);
        cost += convolution_cost(self.conv_size, 2 * width);
        Ok(cost)
    }
}

/// HGRN: a vector with a forget gate that also says how much is written.
///
/// # Recurrence
/// ```text
/// f = b + (1 - b) sigmoid(x W_f)
/// h = f h + (1 - f) silu(x W_i)
/// y = (rms_norm(h) silu(x W_g)) W_o
/// ```
/// ```text
/// x_t ──> i, f
///            ┌─ decay ┐   ┌─ write ───────────┐
/// h_{t-1} ──>│ f h    │──>│ + (1 - f) silu(i) │──┬──> h_t
///            └────────┘   └───────────────────┘  │
///                                     ┌─ read ┐  │
///       y_t <── W_o <── norm, gate <──│ h     │<─┘
///                                     └───────┘
/// ```
/// b is the lower bound of the forget gate: 0, or one learnt number a channel. i and f are `x W_i` and the
/// gate, each of a convolution where there is one.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, one vector, `[B, 1, E D]` of E
/// `expand`; `conv_states`, the last W - 1 inputs of each short convolution; `position`, tokens seen. f is the
/// share of a channel that is kept, b to 1.
/// # Errors
/// [`HgrnConfig::init`] gives a [`ConfigError`] with the first key that does not fit: `expand` of 0, a
/// `lower_bound` outside 0 to 1, a `conv_size` of 1 or a `norm_eps` below 1e-37.
/// # Source
/// Qin et al., arXiv 2311.04823, with real numbers and the order of layers of the released models.
/// # Departures
/// There the bounds of all layers are learnt together so that they rise with depth; here each layer learns
/// its own, from where its config lets it start. It is kept as its inverse sigmoid, so that any bound can be
/// written into it.
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
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Hgrn<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, mut past) = (x.dims()[1], VectorPast::of(state));
        let projections = [
            Projection::convolved(
                &self.i_proj,
                self.i_conv1d.as_ref().map(|layer| (Kept::Input, layer)),
                Some(Activation::Silu),
                None,
            ),
            Projection::convolved(
                &self.f_proj,
                self.f_conv1d.as_ref().map(|layer| (Kept::Forget, layer)),
                None,
                None,
            ),
            Projection::plain(&self.g_proj),
        ];
        let [input, f, gate] = project(&x, projections, &mut past.conv_states);
        let dtype = input.dtype();
        let written = forgotten(accumulator(f), &self.lower_bound);
        let kept = written.clone().neg() + 1.0;
        let (h, last) =
            ops::linear_scan(kept, written * accumulator(input), past.draw(Kept::Hidden))
                .expect("the projections made the shapes");
        let y = self.o_proj.forward(self.g_norm.forward(typed(h, dtype), Some(gate)));
        (y, past.then([(Kept::Hidden, last)], tokens))
    }
}
