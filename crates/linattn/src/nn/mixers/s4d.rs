//! S4D: in each channel a diagonal state-space model, N / 2 complex modes and their conjugates, of the
//! channel's own past.
//! ```text
//! A      = -exp(log_a_real) + i a_imag            [D, N / 2], step sizes dt = exp(log_dt), [D]
//! zoh        a = exp(dt A)                        b = (a - 1) / A
//! bilinear   a = (1 + dt A / 2) / (1 - dt A / 2)  b = dt / (1 - dt A / 2)
//! h      = a h + b x                              [D, N / 2] complex
//! u      = 2 Re(C h) + d x                        summed over a channel's modes
//! y      = glu(gelu(u) W_out)                     glu(a, b) = a sigmoid(b)
//! ```
//! A starts as `-1/2 + i pi n` (S4D-Lin) or `-1/2 + i (N / pi) (N / (2 n + 1) - 1)` (S4D-Inv).
//! Source: Gu et al., arXiv 2206.11893. The input vector B, which only scales C, is 1 throughout.

use super::{TokenMixer, VectorPast, VectorState, linear_flops, scan_cost};
use crate::nn::layers::{ResidualLinear, linear_with_bias};
use crate::nn::{ConfigError, Cost, Shared, positive};
use crate::ops::{self, Complex, LinearAttentionBackend};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::{gelu, glu};
use burn::tensor::{Distribution, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Where the imaginary parts of A start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spectrum {
    /// `pi n`: evenly spaced.
    #[default]
    Lin,
    /// `(N / pi) (N / (2 n + 1) - 1)`: dense at low frequencies.
    Inv,
}

impl Spectrum {
    /// Imaginary part of mode `n` of `modes`, half of N.
    fn frequency(self, n: usize, modes: usize) -> f64 {
        let (n, size) = (n as f64, 2.0 * modes as f64);
        match self {
            Spectrum::Lin => PI * n,
            Spectrum::Inv => size / PI * (size / (2.0 * n + 1.0) - 1.0),
        }
    }
}

/// How time steps are made of a continuous system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Discretization {
    /// Inputs constant over a step.
    #[default]
    Zoh,
    /// The trapezoidal rule.
    Bilinear,
}

/// S4D.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S4dConfig {
    /// N, even: real numbers in the memory of a channel.
    pub d_state: usize,
    /// Where A starts.
    pub spectrum: Spectrum,
    /// How time steps are made.
    pub discretization: Discretization,
    /// Least step size, where learning starts.
    pub dt_min: f64,
    /// Largest step size, where learning starts.
    pub dt_max: f64,
}

impl Default for S4dConfig {
    fn default() -> Self {
        Self {
            d_state: 64,
            spectrum: Spectrum::default(),
            discretization: Discretization::default(),
            dt_min: 0.001,
            dt_max: 0.1,
        }
    }
}

impl S4dConfig {
    /// Modes of a channel, N / 2.
    pub(super) fn resolve(&self, _d_model: usize) -> Result<usize, ConfigError> {
        if !positive("d_state", self.d_state)?.is_multiple_of(2) {
            return Err(ConfigError::new("d_state", self.d_state, "even"));
        }
        if !(self.dt_min > 0.0 && self.dt_min.is_finite()) {
            return Err(ConfigError::new("dt_min", self.dt_min, "above 0"));
        }
        if !(self.dt_max > self.dt_min && self.dt_max.is_finite()) {
            let want = format!("above dt_min = {}", self.dt_min);
            return Err(ConfigError::new("dt_max", self.dt_max, want));
        }
        Ok(self.d_state / 2)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<S4d<B>, ConfigError> {
        let modes = self.resolve(d_model)?;
        let log_steps = Distribution::Uniform(self.dt_min.ln(), self.dt_max.ln());
        let frequencies: Vec<f32> = (0..d_model * modes)
            .map(|i| self.spectrum.frequency(i % modes, modes) as f32)
            .collect();
        let frequencies =
            Tensor::<B, 2>::from_data(TensorData::new(frequencies, [d_model, modes]), device);
        // Real and imaginary parts of variance 1/2 make a complex number of size 1.
        let unit = Initializer::Normal { mean: 0.0, std: 0.5f64.sqrt() };
        Ok(S4d {
            log_dt: Param::from_tensor(Tensor::random([d_model], log_steps, device)),
            log_a_real: Initializer::Constant { value: 0.5f64.ln() }.init([d_model, modes], device),
            a_imag: Param::from_tensor(frequencies),
            c: unit.init([2, d_model, modes], device),
            d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([d_model], device),
            out_proj: linear_with_bias(d_model, 2 * d_model, device).into(),
            discretization: self.discretization,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let modes = self.resolve(d_model)?;
        let mut cost = scan_cost(2 * modes * d_model);
        // The rest of a complex product; b x; C h.
        cost.flops_per_token += (4 + 2 + 4) * (modes * d_model) as u64;
        cost.flops_per_token += linear_flops(d_model, 2 * d_model);
        Ok(cost)
    }
}

/// A pair of real and imaginary parts, `[D, N / 2]`.
struct Pair<B: Backend> {
    re: Tensor<B, 2>,
    im: Tensor<B, 2>,
}

impl<B: Backend> Pair<B> {
    fn over(self, by: Self) -> Self {
        let square = by.re.clone() * by.re.clone() + by.im.clone() * by.im.clone();
        Self {
            re: (self.re.clone() * by.re.clone() + self.im.clone() * by.im.clone())
                / square.clone(),
            im: (self.im * by.re - self.re * by.im) / square,
        }
    }
}

/// S4D. `D -> D`.
#[derive(Module, Debug)]
pub struct S4d<B: Backend> {
    /// `[D]`.
    log_dt: Param<Tensor<B, 1>>,
    /// `[D, N / 2]`.
    log_a_real: Param<Tensor<B, 2>>,
    /// `[D, N / 2]`.
    a_imag: Param<Tensor<B, 2>>,
    /// `[2, D, N / 2]`: real parts, imaginary parts.
    c: Param<Tensor<B, 3>>,
    d: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    discretization: Discretization,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for S4d<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let [batch, tokens, width] = x.dims();
        let mut past = VectorPast::of(state);
        let channels = width * self.a_imag.dims()[1];
        let (a, b) = self.steps();
        let always =
            |x: Tensor<B, 2>| x.reshape([1, 1, channels]).expand([batch, tokens, channels]);
        let input = x.clone().unsqueeze_dim::<4>(3); // [B, T, D, 1]
        let driven = |b: Tensor<B, 2>| {
            (input.clone() * b.unsqueeze::<4>()).reshape([batch, tokens, channels])
        };
        let before = past.draw_pair().map(|(re, im)| Complex { re, im });
        let a = Complex { re: always(a.re), im: always(a.im) };
        let b = Complex { re: driven(b.re), im: driven(b.im) };
        let (h, last) = ops::complex_scan(a, b, before).expect("`steps` made the shapes");
        let c = |part| self.c.val().narrow(0, part, 1).reshape([1, 1, channels]);
        let modes: Tensor<B, 4> =
            (h.re * c(0) - h.im * c(1)).reshape([batch, tokens, width, channels / width]);
        let u = modes.sum_dim(3).squeeze_dim::<3>(3) * 2.0 + x * self.d.val().unsqueeze::<3>();
        let y = glu(self.out_proj.forward(gelu(u)), 2);
        (y, past.then(vec![last.re, last.im], tokens))
    }
}

impl<B: LinearAttentionBackend> S4d<B> {
    /// a and b of one time step.
    fn steps(&self) -> (Pair<B>, Pair<B>) {
        let dt = self.log_dt.val().exp().unsqueeze_dim::<2>(1); // [D, 1]
        let re = self.log_a_real.val().exp().neg();
        let im = self.a_imag.val();
        let (turned, shrunk) = (im.clone() * dt.clone(), re.clone() * dt.clone());
        match self.discretization {
            Discretization::Zoh => {
                let size = shrunk.clone().exp();
                let (cos, half_sin) = (turned.clone().cos(), (turned.clone() / 2.0).sin());
                let a = Pair { re: size.clone() * cos.clone(), im: size.clone() * turned.sin() };
                // a - 1 without cancelling: e^s cos t - 1 = (e^s - 1) cos t - 2 sin^2(t / 2), and
                // e^s - 1 = (e^s + 1) tanh(s / 2).
                let shrinking = (size + 1.0) * (shrunk / 2.0).tanh() * cos;
                let turning = half_sin.clone() * half_sin * 2.0;
                let change = Pair { re: shrinking - turning, im: a.im.clone() };
                (a, change.over(Pair { re, im }))
            }
            Discretization::Bilinear => {
                let (half_re, half_im) = (shrunk / 2.0, turned / 2.0);
                let below = || Pair { re: half_re.clone().neg() + 1.0, im: half_im.clone().neg() };
                let above = Pair { re: half_re.clone() + 1.0, im: half_im.clone() };
                let dt = Pair { re: re.zeros_like() + dt, im: re.zeros_like() };
                (above.over(below()), dt.over(below()))
            }
        }
    }
}
