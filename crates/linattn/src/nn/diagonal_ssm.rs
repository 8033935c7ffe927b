//! Diagonal state-space models, one for each channel: N / 2 complex modes and their conjugates.
//! ```text
//! A      = -exp(log_a_real) + i a_imag            [D, N / 2], step sizes dt = exp(log_dt), [D]
//! zoh        a = exp(dt A)                        b = (a - 1) / A
//! bilinear   a = (1 + dt A / 2) / (1 - dt A / 2)  b = dt / (1 - dt A / 2)
//! h      = a h + b x                              [D, N / 2] complex
//! y      = 2 Re(C h) + d x                        summed over a channel's modes
//! ```
//! Over a sequence of T tokens, as products, with the powers of a from its size and angle:
//! ```text
//! a^l    = |a|^l exp(i l arg a)
//! taps_l = 2 Re(sum C b a^l)                      y = taps * x, and 2 Re(C a^{t+1} h_0) of what came before
//! h_T    = a^T h_0 + b sum_s a^{T-1-s} x_s
//! ```
//! b is times the input vector, which is 1 unless it is learnt: it only scales C.

use super::convolution::with_tap;
use super::{ConfigError, Kept, Shared, positive};
use crate::ops::{self, Discretization, LinearAttentionBackend};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Distribution, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Square of the least size of a whose powers are taken: 0 has no logarithm.
const LEAST_SQUARE: f64 = 1e-30;

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

/// Real and imaginary parts.
#[derive(Debug, Clone)]
pub(crate) struct Parts<B: Backend, const D: usize> {
    pub(crate) re: Tensor<B, D>,
    pub(crate) im: Tensor<B, D>,
}

impl<B: Backend, const D: usize> Parts<B, D> {
    pub(crate) fn times(&self, by: &Self) -> Self {
        let product = |x: &Tensor<B, D>, y: &Tensor<B, D>| x.clone() * y.clone();
        Self {
            re: product(&self.re, &by.re) - product(&self.im, &by.im),
            im: product(&self.re, &by.im) + product(&self.im, &by.re),
        }
    }

    pub(crate) fn over(&self, by: &Self) -> Self {
        let square = by.re.clone() * by.re.clone() + by.im.clone() * by.im.clone();
        let conjugate = Self { re: by.re.clone(), im: by.im.clone().neg() };
        let Self { re, im } = self.times(&conjugate);
        Self { re: re / square.clone(), im: im / square }
    }

    fn each<const E: usize>(&self, f: impl Fn(Tensor<B, D>) -> Tensor<B, E>) -> Parts<B, E> {
        Parts { re: f(self.re.clone()), im: f(self.im.clone()) }
    }
}

impl<B: Backend> Parts<B, 2> {
    /// Of `[2, D, N / 2]`.
    fn of(both: &Param<Tensor<B, 3>>) -> Self {
        let part = |n| both.val().narrow(0, n, 1).squeeze_dim(0);
        Self { re: part(0), im: part(1) }
    }
}

impl<B: Backend> Parts<B, 3> {
    /// States of a batch, `[B x, D, N / 2]`, as vectors of each sequence, `[B, 1, x D N / 2]`, of as many sequences
    /// as each is copies of.
    pub(crate) fn pack(self, copies: usize) -> [(Kept, Tensor<B, 3>); 2] {
        let [many, channels, modes] = self.re.dims();
        let shape = [many / copies, 1, copies * channels * modes];
        [(Kept::Real, self.re.reshape(shape)), (Kept::Imaginary, self.im.reshape(shape))]
    }

    /// The states that [`pack`](Self::pack) packed, of `channels` channels.
    pub(crate) fn unpack(
        (re, im): (Tensor<B, 3>, Tensor<B, 3>),
        copies: usize,
        channels: usize,
    ) -> Self {
        let [batch, _, width] = re.dims();
        let shape = [batch * copies, channels, width / (copies * channels)];
        Self { re: re.reshape(shape), im: im.reshape(shape) }
    }

    /// Real part of the product of matrices.
    fn real_matmul(&self, by: &Self) -> Tensor<B, 3> {
        self.re.clone().matmul(by.re.clone()) - self.im.clone().matmul(by.im.clone())
    }
}

/// Start of a [`DiagonalSsm`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiagonalStart {
    pub(crate) channels: usize,
    /// N / 2.
    pub(crate) modes: usize,
    pub(crate) spectrum: Spectrum,
    pub(crate) discretization: Discretization,
    /// Step sizes are log-uniform between these.
    pub(crate) dt: [f64; 2],
    /// Whether the input vector is learnt.
    pub(crate) learns_input: bool,
}

/// A state-space model for each channel.
#[derive(Module, Debug)]
pub struct DiagonalSsm<B: Backend> {
    /// `[D]`.
    log_dt: Param<Tensor<B, 1>>,
    /// `[D, N / 2]`.
    log_a_real: Param<Tensor<B, 2>>,
    /// `[D, N / 2]`.
    a_imag: Param<Tensor<B, 2>>,
    /// `[2, D, N / 2]`: real parts, imaginary parts.
    c: Param<Tensor<B, 3>>,
    /// The input vector, as `c`, where it is learnt.
    b: Option<Param<Tensor<B, 3>>>,
    d: Param<Tensor<B, 1>>,
    #[module(skip)]
    discretization: Discretization,
}

impl DiagonalStart {
    /// Refuses what no model starts from; N is given.
    pub(crate) fn check(self, d_state: usize) -> Result<(), ConfigError> {
        if !positive("d_state", d_state)?.is_multiple_of(2) {
            return Err(ConfigError::new("d_state", d_state, "even"));
        }
        let [least, most] = self.dt;
        if !(least > 0.0 && least.is_finite()) {
            return Err(ConfigError::new("dt_min", least, "above 0"));
        }
        if !(most > least && most.is_finite()) {
            return Err(ConfigError::new("dt_max", most, format!("above dt_min = {least}")));
        }
        Ok(())
    }

    /// Floating-point operations of a token as a recurrence: two complex products and a read.
    pub(crate) fn flops(self) -> u64 {
        (2 * 2 + 4 + 2 + 4) * (self.modes * self.channels) as u64
    }

    pub(crate) fn init<B: Backend>(self, device: &B::Device) -> DiagonalSsm<B> {
        let Self { channels, modes, spectrum, discretization, dt: [least, most], learns_input } =
            self;
        let log_steps = Distribution::Uniform(least.ln(), most.ln());
        let frequencies: Vec<f32> =
            (0..channels * modes).map(|i| spectrum.frequency(i % modes, modes) as f32).collect();
        let frequencies =
            Tensor::<B, 2>::from_data(TensorData::new(frequencies, [channels, modes]), device);
        // Real and imaginary parts of variance 1/2 make a complex number of size 1.
        let unit = Initializer::Normal { mean: 0.0, std: 0.5f64.sqrt() };
        let ones = || {
            let shape = [1, channels, modes];
            let real = Tensor::<B, 3>::ones(shape, device);
            Param::from_tensor(ops::cat(vec![real, Tensor::zeros(shape, device)], 0))
        };
        DiagonalSsm {
            log_dt: Param::from_tensor(Tensor::random([channels], log_steps, device)),
            log_a_real: Initializer::Constant { value: 0.5f64.ln() }
                .init([channels, modes], device),
            a_imag: Param::from_tensor(frequencies),
            c: unit.init([2, channels, modes], device),
            b: learns_input.then(ones),
            d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([channels], device),
            discretization,
        }
    }
}

impl<B: LinearAttentionBackend> DiagonalSsm<B> {
    /// Of `x`, `[B, T, D]`, behind the state h_0, `[B, D, N / 2]`: y, `[B, T, D]`, and the state after token T, unless
    /// `shared` says that nobody reads it.
    pub(crate) fn run(
        &self,
        x: Tensor<B, 3>,
        before: Option<Parts<B, 3>>,
        shared: &Shared<B>,
    ) -> (Tensor<B, 3>, Option<Parts<B, 3>>) {
        let tokens = x.dims()[1];
        if before.is_none()
            && shared.drops_states
            && let Some(taps) = self.taps(tokens)
        {
            return (convolved(x, taps), None);
        }
        let (turn, b) = self.steps();
        let c = Parts::of(&self.c);
        let b = match &self.b {
            Some(input) => b.times(&Parts::of(input)),
            None => b,
        };
        // What goes on from state to state takes a token's power more.
        let goes_on = before.is_some() || !shared.drops_states;
        let powers = turn.powers(tokens + usize::from(goes_on));
        let earlier =
            if goes_on { powers.each(|p| p.narrow(2, 0, tokens)) } else { powers.clone() };
        let row = c.times(&b).each(|x| x.unsqueeze_dim::<3>(1));
        let taps: Tensor<B, 2> = row.real_matmul(&earlier).squeeze_dim(1);
        let taps = taps.swap_dims(0, 1) * 2.0;
        let taps = with_tap(taps, 0, |first| first + self.d.val().unsqueeze::<2>());
        let y = convolved(x.clone(), taps);

        let before = before.map(|h| h.each(|h| h.permute([1, 0, 2]))); // [D, B, N / 2]
        let y = match &before {
            Some(before) => {
                let later = powers.each(|p| p.narrow(2, 1, tokens));
                let read = c.each(|c| c.unsqueeze_dim::<3>(2)).times(&later);
                y + (before.real_matmul(&read) * 2.0).permute([1, 2, 0])
            }
            None => y,
        };
        if shared.drops_states {
            return (y, None);
        }
        // [D, N / 2, T] [D, T, B]
        let inputs = x.permute([2, 1, 0]);
        let written = earlier.each(|p| p.flip([2]).matmul(inputs.clone()));
        let written = b.each(|b| b.unsqueeze_dim::<3>(2)).times(&written);
        let after = match before {
            Some(before) => {
                let last = powers.each(|p| p.narrow(2, tokens, 1));
                let kept = last.times(&before.each(|h| h.swap_dims(1, 2)));
                Parts { re: kept.re + written.re, im: kept.im + written.im }
            }
            None => written,
        };
        (y, Some(after.each(|h| h.permute([2, 0, 1]))))
    }

    /// The first `length` taps, `[L, D]`, with what a token gives to itself; nothing where this backend has no piece for
    /// them.
    fn taps(&self, length: usize) -> Option<Tensor<B, 2>> {
        let vectors = [self.log_dt.val(), self.d.val()];
        let poles = [self.log_a_real.val(), self.a_imag.val()];
        let ends = (self.c.val(), self.b.as_ref().map(Param::val));
        ops::diagonal_taps(vectors, poles, ends, self.discretization, length)
    }

    /// a and b of one time step, `[D, N / 2]`.
    fn steps(&self) -> (Polar<B>, Parts<B, 2>) {
        let dt = self.log_dt.val().exp().unsqueeze_dim::<2>(1); // [D, 1]
        let (re, im) = (self.log_a_real.val().exp().neg(), self.a_imag.val());
        match self.discretization {
            Discretization::Zoh => held(dt, Parts { re, im }),
            Discretization::Bilinear => {
                let half = dt.clone() / 2.0;
                trapezoidal(dt, Parts { re: re * half.clone(), im: im * half })
            }
        }
    }
}

/// Sequences through a convolution of as many taps as they have tokens.
fn convolved<B: LinearAttentionBackend>(x: Tensor<B, 3>, taps: Tensor<B, 2>) -> Tensor<B, 3> {
    ops::long_convolution(x, taps, None).expect("a tap for each channel")
}

/// a and b of a step over which inputs stay the same.
fn held<B: Backend>(dt: Tensor<B, 2>, pole: Parts<B, 2>) -> (Polar<B>, Parts<B, 2>) {
    let (log_size, angle) = (pole.re.clone() * dt.clone(), pole.im.clone() * dt);
    let size = log_size.clone().exp();
    let (cos, half_sin) = (angle.clone().cos(), (angle.clone() / 2.0).sin());
    // a - 1 without cancelling: e^s cos t - 1 = (e^s - 1) cos t - 2 sin^2(t / 2), and
    // e^s - 1 = (e^s + 1) tanh(s / 2).
    let shrinking = (size.clone() + 1.0) * (log_size.clone() / 2.0).tanh() * cos;
    let turning = half_sin.clone() * half_sin * 2.0;
    let change = Parts { re: shrinking - turning, im: size * angle.clone().sin() };
    (Polar { log_size, angle }, change.over(&pole))
}

/// a and b of a step by the trapezoidal rule, h its half: `(1 + h) / (1 - h)` and `dt / (1 - h)`.
fn trapezoidal<B: Backend>(dt: Tensor<B, 2>, half: Parts<B, 2>) -> (Polar<B>, Parts<B, 2>) {
    let square = |x: &Tensor<B, 2>| x.clone() * x.clone();
    let (above, below) = (half.re.clone() + 1.0, half.re.neg() + 1.0);
    let turned = square(&half.im);
    let sizes = [&above, &below].map(|x| square(x) + turned.clone());
    let share = dt / sizes[1].clone();
    let b = Parts { re: below.clone() * share.clone(), im: half.im.clone() * share };
    let [above_size, below_size] = sizes;
    let a = Polar {
        log_size: (above_size / below_size).clamp_min(LEAST_SQUARE).log() / 2.0,
        angle: (half.im * 2.0).atan2(above * below - turned),
    };
    (a, b)
}

/// Complex numbers, `[D, N / 2]`, as sizes and angles in radians.
struct Polar<B: Backend> {
    log_size: Tensor<B, 2>,
    angle: Tensor<B, 2>,
}

impl<B: Backend> Polar<B> {
    /// a^0 .. a^{count - 1}, `[D, N / 2, count]`.
    fn powers(&self, count: usize) -> Parts<B, 3> {
        let like = &self.angle;
        let lags: Vec<f32> = (0..count).map(|lag| lag as f32).collect();
        let lags = TensorData::new(lags, [1, 1, count]);
        let lags = Tensor::<B, 3>::from_data(lags, (&like.device(), like.dtype()));
        let of_lags = |x: Tensor<B, 2>| x.unsqueeze_dim::<3>(2) * lags.clone();
        // Less whole turns: shaders' sines are exact near 0 alone.
        let turns = of_lags(self.angle.clone() / (2.0 * PI));
        let angle = (turns.clone() - turns.detach().round()) * (2.0 * PI);
        let size = of_lags(self.log_size.clone()).exp();
        Parts { re: size.clone() * angle.clone().cos(), im: size * angle.sin() }
    }
}
