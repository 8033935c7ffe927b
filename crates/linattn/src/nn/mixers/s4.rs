//! S4. Recurrence, shapes and source: [`S4`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops};
use crate::nn::convolution::with_tap;
use crate::nn::diagonal_ssm::{DiagonalStart, Parts, Spectrum};
use crate::nn::hippo;
use crate::nn::layers::{ResidualLinear, gelu, linear_with_bias};
use crate::nn::{ConfigError, Cost, Kept, Shared};
use crate::ops::{self, Along, Discretization, LinearAttentionBackend, cat};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::glu;
use burn::tensor::{Distribution, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`S4`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S4Config {
    /// N, even: real numbers in the memory of a channel.
    pub d_state: usize,
    /// Least step size, where learning starts.
    pub dt_min: f64,
    /// Largest step size, where learning starts.
    pub dt_max: f64,
}

impl Default for S4Config {
    fn default() -> Self {
        Self { d_state: 64, dt_min: 0.001, dt_max: 0.1 }
    }
}

impl S4Config {
    /// N / 2.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        let start = DiagonalStart {
            channels: d_model,
            modes: self.d_state / 2,
            spectrum: Spectrum::Lin,
            discretization: Discretization::Bilinear,
            dt: [self.dt_min, self.dt_max],
            learns_input: false,
        };
        start.check(self.d_state)?;
        match self.d_state <= LARGEST_STATE {
            true => Ok(self.d_state / 2),
            false => {
                let want = format!("at most {LARGEST_STATE}");
                Err(ConfigError::new("d_state", self.d_state, want))
            }
        }
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<S4<B>, ConfigError> {
        let modes = self.resolve(d_model)?;
        let hippo = hippo::modes(modes);
        let log_steps = Distribution::Uniform(self.dt_min.ln(), self.dt_max.ln());
        let rows = |numbers: Vec<f64>| {
            let width = numbers.len();
            let row = Tensor::<B, 1>::from_data(TensorData::new(numbers, [width]), device);
            Param::from_tensor(row.unsqueeze::<2>().repeat_dim(0, d_model))
        };
        let parts = |of: fn(&hippo::Mode) -> [f64; 2]| {
            rows([0, 1].into_iter().flat_map(|i| hippo.iter().map(move |m| of(m)[i])).collect())
        };
        // Real and imaginary parts of variance 1/2 make a complex number of size 1.
        let unit = Initializer::Normal { mean: 0.0, std: 0.5f64.sqrt() };
        Ok(S4 {
            log_dt: Param::from_tensor(Tensor::random([d_model], log_steps, device)),
            log_a_real: Initializer::Constant { value: 0.5f64.ln() }.init([d_model, modes], device),
            a_imag: rows(hippo.iter().map(|mode| mode.frequency).collect()),
            p: parts(|mode| mode.p),
            b: parts(|mode| mode.b),
            c: unit.init([d_model, 2 * modes], device),
            d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([d_model], device),
            out_proj: linear_with_bias(d_model, 2 * d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let size = 2 * self.resolve(d_model)?;
        Ok(Cost {
            state_bytes: 4 * (size * d_model) as u64,
            // A step by the dense matrix, a write and a read.
            flops_per_token: (2 * d_model * size * (size + 2)) as u64
                + linear_flops(d_model, 2 * d_model),
        })
    }
}

/// Its square is held for each channel, and its eigenvectors are found before training.
const LARGEST_STATE: usize = 512;

/// S4: in each channel a state-space model whose matrix is a diagonal less a product of one vector.
///
/// A channel has N / 2 complex modes and their conjugates, started as HiPPO-LegS.
///
/// # Recurrence
/// ```text
/// A   = diag(-exp(log_a_real) + i a_imag) - p p^*     over modes and conjugates, step sizes dt = exp(log_dt)
/// h   = (1 - dt A / 2)^-1 ((1 + dt A / 2) h + dt b x)
/// u   = 2 Re(C h) + d x                               summed over a channel's modes
/// y   = glu(gelu(u) W_out)
/// ```
/// ```text
/// x_t ──> each channel
///            ┌─ decay and turn ───────────────────┐   ┌─ write ────────────────────┐
/// h_{t-1} ──>│ (1 - dt A / 2)^-1 (1 + dt A / 2) h │──>│ + (1 - dt A / 2)^-1 dt b x │──┬──> h_t
///            └────────────────────────────────────┘   └────────────────────────────┘  │
///                                                                ┌─ read ──────────┐  │
///                                    y_t <── gelu, W_out, glu <──│ 2 Re(C h) + d x │<─┘
///                                                                └─────────────────┘
/// ```
/// With h as real and imaginary parts, N real numbers, A is `R - 2 p p^T`, R of blocks for the modes; the
/// inverse is that of a diagonal and one more product (Sherman and Morrison). A sequence of T tokens is a
/// convolution with `taps_l = c M^l b`, M and b of one step, whose vectors come by doubling: `[V, M^L V]`
/// from V of L.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, one vector, `[B, 1, D N]`;
/// `position`, tokens seen. dt is a step size above 0, N is `d_state`.
/// # Errors
/// [`S4Config::init`] gives a [`ConfigError`] with the first key that does not fit: a `d_state` that is 0,
/// odd or above 512, a `dt_min` that is not above 0 or a `dt_max` that is not above it.
/// # Source
/// Gu et al., arXiv 2111.00396, with the bilinear rule.
/// # Departures
/// The paper makes the same taps from a Cauchy kernel and an FFT; products of N x N matrices cost as much at
/// N = 64 and need no complex numbers.
#[derive(Module, Debug)]
pub struct S4<B: Backend> {
    /// `[D]`.
    log_dt: Param<Tensor<B, 1>>,
    /// `[D, N / 2]`.
    log_a_real: Param<Tensor<B, 2>>,
    /// `[D, N / 2]`.
    a_imag: Param<Tensor<B, 2>>,
    /// `[D, N]`, as the next two: real parts, imaginary parts.
    p: Param<Tensor<B, 2>>,
    b: Param<Tensor<B, 2>>,
    c: Param<Tensor<B, 2>>,
    d: Param<Tensor<B, 1>>,
    out_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for S4<B> {
    type State = VectorState<B>;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let [batch, tokens, width] = x.dims();
        let mut past = VectorPast::of(state);
        let (step, drive) = self.step();
        let read = self.read();
        // M^l b for l below T, [D, N, T], and c M^l for l from 1 to T, [D, T, N].
        let mut columns = drive;
        let mut rows = read.clone().matmul(step.clone());
        let mut last = past.draw(Kept::Hidden).map(|h| {
            let size = step.dims()[1];
            h.reshape([batch, width, size]).permute([1, 2, 0]) // [D, N, B]
        });
        let before = last.clone();
        let (mut power, mut left) = (step, tokens);
        while left > 0 {
            if left % 2 == 1 {
                last = last.map(|h| power.clone().matmul(h));
            }
            left /= 2;
            let have = columns.dims()[2];
            if have < tokens {
                let more = have.min(tokens - have);
                let next = power.clone().matmul(columns.clone().narrow(2, 0, more));
                columns = cat(vec![columns, next], 2);
                if before.is_some() {
                    let next = rows.clone().narrow(1, 0, more).matmul(power.clone());
                    rows = cat(vec![rows, next], 1);
                }
            }
            if left > 0 {
                power = power.clone().matmul(power);
            }
        }
        let taps: Tensor<B, 2> = read.matmul(columns.clone()).squeeze_dim::<2>(1).swap_dims(0, 1);
        let taps = with_tap(taps, 0, |first| first + self.d.val().unsqueeze::<2>());
        let mut u = ops::long_convolution(x.clone(), taps, None).expect("a tap for each channel");
        if let Some(before) = before {
            u = u + rows.matmul(before).permute([2, 1, 0]);
        }
        let y = glu(self.out_proj.forward(gelu(u)), 2);
        if shared.drops_states {
            return (y, past.then([], tokens));
        }
        let written = columns.flip([2]).matmul(x.permute([2, 1, 0])); // [D, N, B]
        let after = match last {
            Some(last) => written + last,
            None => written,
        };
        let after = after.permute([2, 0, 1]);
        let size = after.dims()[2];
        (y, past.then([(Kept::Hidden, after.reshape([batch, 1, width * size]))], tokens))
    }
}

impl<B: LinearAttentionBackend> S4<B> {
    /// Weights of real and imaginary parts in `2 Re(C h)`, `[D, 1, N]`.
    fn read(&self) -> Tensor<B, 3> {
        let c = real_and_imaginary(self.c.val().unsqueeze_dim::<3>(1), 2);
        cat(vec![c.re * 2.0, c.im * -2.0], 2)
    }

    /// M, `[D, N, N]`, and b, `[D, N, 1]`, of one step.
    fn step(&self) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let dt = self.log_dt.val().exp().reshape([-1, 1, 1]);
        let column = |x: Tensor<B, 2>| x.unsqueeze_dim::<3>(2);
        let half = Parts {
            re: column(self.log_a_real.val().exp().neg()) * dt.clone() / 2.0,
            im: column(self.a_imag.val()) * dt.clone() / 2.0,
        };
        let p = column(self.p.val());
        // E = 1 / (1 - dt R / 2), of blocks; 1 - dt A / 2 = 1 / E + dt p p^T.
        let below = Parts { re: half.re.clone().neg() + 1.0, im: half.im.clone().neg() };
        let one = Parts { re: half.re.ones_like(), im: half.im.zeros_like() };
        let inverse = one.over(&below);
        let shrunk = |x: Tensor<B, 3>| {
            let y = inverse.times(&real_and_imaginary(x, 1));
            cat(vec![y.re, y.im], 1)
        };
        let ahead = dense(&half) - p.clone().matmul(p.clone().transpose()) * dt.clone();
        let along = shrunk(p.clone());
        let share = (p.clone() * along.clone()).sum_along(1) * dt.clone() + 1.0; // [D, 1, 1]
        let solve = |x: Tensor<B, 3>| {
            let x = shrunk(x);
            let met = p.clone().transpose().matmul(x.clone()) * dt.clone() / share.clone();
            x - along.clone().matmul(met)
        };
        (solve(ahead), solve(column(self.b.val()) * dt.clone()))
    }
}

/// Halves of a dimension as real and imaginary parts.
fn real_and_imaginary<B: Backend>(x: Tensor<B, 3>, dim: usize) -> Parts<B, 3> {
    let half = x.dims()[dim] / 2;
    Parts { re: x.clone().narrow(dim, 0, half), im: x.narrow(dim, half, half) }
}

/// `1 + x` of modes `x`, `[D, N / 2, 1]`, as matrices over real and imaginary parts, `[D, N, N]`.
fn dense<B: Backend>(x: &Parts<B, 3>) -> Tensor<B, 3> {
    let modes = x.re.dims()[1];
    let eye = Tensor::<B, 2>::eye(modes, &x.re.device()).cast(x.re.dtype()).unsqueeze::<3>();
    let [re, im] = [x.re.clone() + 1.0, x.im.clone()].map(|x| x * eye.clone());
    let above = cat(vec![re.clone(), im.clone().neg()], 2);
    cat(vec![above, cat(vec![im, re], 2)], 1)
}
