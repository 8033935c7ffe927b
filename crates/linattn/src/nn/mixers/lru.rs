//! LRU. Recurrence, shapes and source: [`Lru`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, recurrent_width, scan_cost};
use crate::nn::layers::{ResidualLinear, ScaledLinear, fresh, gelu, linear_with_bias};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared};
use crate::ops::{self, Complex, LinearAttentionBackend, cat};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::glu;
use burn::tensor::{Distribution, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::TAU;

/// Sizes nearer to 1 have no f32 of their own once squared.
const LARGEST_SIZE: f64 = 0.99999;

/// Config of [`Lru`], the linear recurrent unit. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LruConfig {
    /// N, complex numbers in the memory; d_model by default.
    pub width: Option<usize>,
    /// Least size of an eigenvalue, where learning starts.
    pub r_min: f64,
    /// Largest size of an eigenvalue, where learning starts, at most 0.99999.
    pub r_max: f64,
    /// Largest angle of an eigenvalue, where learning starts, up to 2 pi.
    pub max_phase: f64,
}

impl Default for LruConfig {
    fn default() -> Self {
        Self { width: None, r_min: 0.9, r_max: 0.999, max_phase: TAU }
    }
}

impl LruConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        let width = recurrent_width(self.width, d_model)?;
        if !(0.0..1.0).contains(&self.r_min) {
            return Err(ConfigError::new("r_min", self.r_min, "at least 0 and below 1"));
        }
        if !(self.r_min < self.r_max && self.r_max <= LARGEST_SIZE) {
            let want = format!("above r_min = {} and at most {LARGEST_SIZE}", self.r_min);
            return Err(ConfigError::new("r_max", self.r_max, want));
        }
        if !(self.max_phase > 0.0 && self.max_phase <= TAU) {
            return Err(ConfigError::new("max_phase", self.max_phase, "above 0 and at most 2 pi"));
        }
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Lru<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let uniform =
            |min, max| Tensor::<B, 1>::random([width], Distribution::Uniform(min, max), device);
        // |lambda|^2 uniform makes lambda uniform over the ring; 0 has no logarithm.
        let squares = uniform(self.r_min.powi(2), self.r_max.powi(2)).clamp_min(1e-12);
        let phases = uniform(0.0, self.max_phase).clamp_min(1e-6);
        let normal = |from: usize, to: usize, variance: f64| {
            let normal = Initializer::Normal { mean: 0.0, std: variance.sqrt() };
            Linear::<B>::new(fresh(normal, [from, to], device))
        };
        Ok(Lru {
            in_proj: normal(d_model, 2 * width, 0.5 / d_model as f64).into(),
            nu_log: Param::from_tensor((squares.clone().log() * -0.5).log()),
            theta_log: Param::from_tensor(phases.log()),
            gamma_log: Param::from_tensor((squares.neg() + 1.0).log() * 0.5),
            c_proj: normal(2 * width, d_model, 1.0 / width as f64).into(),
            d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([d_model], device),
            out_proj: linear_with_bias(d_model, 2 * d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let mut cost = scan_cost(2 * width);
        // A complex product has twice the products of two real ones.
        cost.flops_per_token += 4 * width as u64;
        cost.flops_per_token += 2 * linear_flops(d_model, 2 * width);
        cost.flops_per_token += linear_flops(d_model, 2 * d_model);
        Ok(cost)
    }
}

/// LRU, the linear recurrent unit: complex numbers that turn and shrink, the same at every token.
///
/// # Recurrence
/// ```text
/// lambda = exp(-exp(nu) + i exp(theta))          inside the unit circle, whatever nu and theta
/// h      = lambda h + exp(gamma) (x W_in)        [N] complex
/// u      = Re(h W_c) + d x
/// y      = glu(gelu(u) W_out)                    glu(a, b) = a sigmoid(b)
/// ```
/// ```text
/// x_t ──> x W_in
///            ┌─ decay and turn ┐   ┌─ write ───────────────┐
/// h_{t-1} ──>│ lambda h        │──>│ + exp(gamma) (x W_in) │──┬──> h_t
///            └─────────────────┘   └───────────────────────┘  │
///                                        ┌─ read ──────────┐  │
///            y_t <── gelu, W_out, glu <──│ Re(h W_c) + d x │<─┘
///                                        └─────────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, real and imaginary parts of h,
/// `[B, 1, N]` each, N `width`; `position`, tokens seen. The size of lambda is the share that is kept, its
/// angle a turn in radians for each token.
/// # Errors
/// [`LruConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `width` of 0, an
/// `r_min` outside 0 to 1, an `r_max` that is not above it or above 0.99999 or a `max_phase` outside 0 to 2
/// pi.
/// # Source
/// Orvieto et al., arXiv 2303.06349. lambda starts uniform on a ring, `r_min <= |lambda| <= r_max`, its angle
/// uniform up to `max_phase`. The paper chooses the ring for each problem. gamma starts as
/// `ln sqrt(1 - |lambda|^2)`, which keeps the size of h about that of its inputs. W_in starts from N(0,
/// 1 / (2 D)), W_c from N(0, 1 / N), in real and imaginary parts, d from N(0, 1).
#[derive(Module, Debug)]
pub struct Lru<B: Backend> {
    /// `D -> 2 N`: real parts, then imaginary ones.
    in_proj: ScaledLinear<B>,
    nu_log: Param<Tensor<B, 1>>,
    theta_log: Param<Tensor<B, 1>>,
    gamma_log: Param<Tensor<B, 1>>,
    /// `2 N -> D`: the real part of a complex product; the sign of its second half is in the weights.
    c_proj: ScaledLinear<B>,
    d: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Lru<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let [batch, tokens, _] = x.dims();
        let mut past = VectorPast::of(state);
        let width = self.gamma_log.dims()[0];
        let row = |x: Tensor<B, 1>| x.unsqueeze::<3>();
        let always = |x: Tensor<B, 1>| row(x).expand([batch, tokens, width]);
        let size = self.nu_log.val().exp().neg().exp();
        let angle = self.theta_log.val().exp();
        let lambda = Complex {
            re: always(size.clone() * angle.clone().cos()),
            im: always(size * angle.sin()),
        };
        let input = self.in_proj.forward(x.clone());
        let part = |from| input.clone().narrow(2, from, width) * row(self.gamma_log.val().exp());
        let before = past.draw_parts().map(|(re, im)| Complex { re, im });
        let (h, last) = ops::complex_scan(lambda, Complex { re: part(0), im: part(width) }, before)
            .expect("the projections made the shapes");
        let u = self.c_proj.forward(cat(vec![h.re, h.im], 2)) + x * row(self.d.val());
        let y = glu(self.out_proj.forward(gelu(u)), 2);
        (y, past.then([(Kept::Real, last.re), (Kept::Imaginary, last.im)], tokens))
    }
}
