//! H3. Recurrence, shapes and source: [`H3`].

use super::{TokenMixer, VectorPast, VectorState, block_width, linear_flops};
use crate::nn::convolution::{
    ShortConvolution, check_window, convolution_cost, through_weight, with_tap,
};
use crate::nn::diagonal_ssm::{DiagonalSsm, DiagonalStart, Parts, Spectrum};
use crate::nn::layers::{ResidualLinear, linear_with_bias};
use crate::nn::projection::{Projection, project};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{self, Along, Discretization, LinearAttentionBackend, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`H3`]. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct H3Config {
    /// K, width of a head; a divisor of d_model.
    pub head_width: usize,
    /// N, even: tokens that the shift sees, and real numbers in the state of each of a head's K x K products.
    pub d_state: usize,
    /// Least step size, where learning starts.
    pub dt_min: f64,
    /// Largest step size, where learning starts.
    pub dt_max: f64,
    /// Whether input vectors, of the shift and of the state-space models, are learnt too.
    pub learn_inputs: bool,
}

impl Default for H3Config {
    fn default() -> Self {
        Self { head_width: 1, d_state: 64, dt_min: 0.001, dt_max: 0.1, learn_inputs: false }
    }
}

impl H3Config {
    pub(super) fn resolve(&self, d_model: usize) -> Result<DiagonalStart, ConfigError> {
        let heads = d_model / positive("head_width", self.head_width)?;
        if heads == 0 || block_width(heads, d_model)? != self.head_width {
            let want = format!("a divisor of d_model = {d_model}");
            return Err(ConfigError::new("head_width", self.head_width, want));
        }
        let ssm = DiagonalStart {
            channels: heads,
            modes: self.d_state / 2,
            spectrum: Spectrum::Lin,
            discretization: Discretization::Bilinear,
            dt: [self.dt_min, self.dt_max],
            learns_input: self.learn_inputs,
        };
        ssm.check(self.d_state)?;
        check_window(self.d_state, 2).map_err(|e| ConfigError { key: "d_state".into(), ..e })?;
        Ok(ssm)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<H3<B>, ConfigError> {
        let ssm = self.resolve(d_model)?;
        let project = || linear_with_bias(d_model, d_model, device);
        Ok(H3 {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            shift: ShortConvolution::new(d_model, self.d_state, false, device),
            shift_input: self.learn_inputs.then(|| {
                let first = Tensor::<B, 2>::ones([1, d_model], device);
                let rest = Tensor::zeros([self.d_state - 1, d_model], device);
                Param::from_tensor(ops::cat(vec![first, rest], 0))
            }),
            shift_d: Initializer::Normal { mean: 0.0, std: 1.0 }.init([d_model], device),
            ssm: ssm.init(device),
            out_proj: project().into(),
            head_width: self.head_width,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let ssm = self.resolve(d_model)?;
        let products = self.head_width * self.head_width;
        let mut cost = convolution_cost(self.d_state, d_model);
        cost += Cost {
            state_bytes: 4 * (products * ssm.channels * self.d_state) as u64,
            flops_per_token: linear_flops(d_model, 4 * d_model)
                + products as u64 * (ssm.flops() + 3 * ssm.channels as u64),
        };
        Ok(cost)
    }
}

/// H3: outer products of shifted keys with values, through state-space models, read by queries.
///
/// # Recurrence
/// ```text
/// q, k, v = x W + b
/// k'      = shift(k) + d k                  a convolution over N tokens, and the token itself
/// U_t     = k'_t^T v_t                      [K, K] for each head
/// y       = (q ssm(U)) W_o + b_o            a state-space model of N numbers for each head: `diagonal_ssm`
/// ```
/// ```text
/// x_t ──> q, k, v;  k' from k of the last N tokens
///              ┌─ decay and turn ┐   ┌─ write ────┐
/// h_{t-1} ────>│ a h             │──>│ + b k'^T v │──┬──> h_t
///              └─────────────────┘   └────────────┘  │
///                      ┌─ read ───────────────────┐  │
///  y_t <── W_o, b_o <──│ q (2 Re(C h) + d k'^T v) │<─┘
///                      └──────────────────────────┘
/// ```
/// a, b, C and d are those of a diagonal state-space model for each head, N / 2 complex modes and their
/// conjugates: see [`S4d`](super::S4d). With `learn_inputs` two more vectors are learnt, which change what the
/// same numbers add up to at each step of learning, not what a model can compute:
/// ```text
/// shift_l = sum_n e_n s_{n+l}               of N taps s and as many numbers e, for each channel
/// b       = b times N / 2 complex numbers   for each head
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, real and imaginary parts of h,
/// `[B, 1, D K N / 2]` each, of heads of width K; `conv_states`, the last N - 1 keys, `[B, N - 1, D]`; `position`,
/// tokens seen. N is `d_state`, K `head_width`. The size of a is the share that is kept, its angle a turn in
/// radians for each token.
/// # Errors
/// [`H3Config::init`] gives a [`ConfigError`] with the first key that does not fit: a `head_width` that does
/// not divide D, a `d_state` that is 0 or odd, a `dt_min` that is not above 0 or a `dt_max` that is not above
/// it.
/// # Source
/// Fu et al., arXiv 2212.14052, with its diagonal state-space model, bilinear steps and real convolution, as
/// Zoology runs it.
/// # Departures
/// Without `learn_inputs` the shift's input vector is the first unit vector and that of the diagonal model is 1,
/// from where the reference learns both.
#[derive(Module, Debug)]
pub struct H3<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    shift: ShortConvolution<B>,
    /// Its input vector, `[N, D]`.
    shift_input: Option<Param<Tensor<B, 2>>>,
    /// `[D]`.
    shift_d: Param<Tensor<B, 1>>,
    ssm: DiagonalSsm<B>,
    out_proj: ResidualLinear<B>,
    #[module(skip)]
    head_width: usize,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for H3<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let ([batch, tokens, d_model], dtype) = (x.dims(), x.dtype());
        let (width, mut past) = (self.head_width, VectorPast::of(state).among(shared));
        let (heads, products) = (d_model / width, width * width);
        let list = [&self.q_proj, &self.k_proj, &self.v_proj].map(Projection::plain);
        let [q, k, v] = project(&x, list, &mut past.conv_states);
        let k = through_weight(k, self.shift_weight(), Kept::Key, &mut past.conv_states);

        // [B, K, 1, T, H] and [B, 1, K, T, H], in f32 at least
        let of_heads = |x| {
            let x: Tensor<B, 4> = accumulator::<B, 3>(x).reshape([batch, tokens, heads, width]);
            x.permute([0, 3, 1, 2])
        };
        let [q, k] = [q, k].map(|x| of_heads(x).unsqueeze_dim::<5>(2));
        let u = k * of_heads(v).unsqueeze_dim::<5>(1);
        let u: Tensor<B, 3> = u.reshape([batch * products, tokens, heads]);
        let before = past.draw_parts().map(|pair| Parts::unpack(pair, products, heads));
        let (y, after) = self.ssm.run(u, before, shared);
        let y: Tensor<B, 5> = y.reshape([batch, width, width, tokens, heads]);
        let y: Tensor<B, 4> = (q * y).sum_along(1).squeeze_dim(1);
        let y: Tensor<B, 3> = y.permute([0, 2, 3, 1]).reshape([batch, tokens, d_model]);
        (
            self.out_proj.forward(typed(y, dtype)),
            past.then(after.into_iter().flat_map(|h| h.pack(products)), tokens),
        )
    }
}

impl<B: LinearAttentionBackend> H3<B> {
    /// Taps of the shift, `[N, D]`, the last for the newest token, which is added to it too.
    fn shift_weight(&self) -> Tensor<B, 2> {
        let taps = self.shift.weight.val();
        let taps = match &self.shift_input {
            // The taps stand in reverse, so what looks ahead in them looks back here.
            Some(input) => {
                let taps = taps.unsqueeze::<3>();
                let seen = ops::long_convolution(taps, input.val(), None);
                seen.expect("as many numbers as taps").squeeze_dim(0)
            }
            None => taps,
        };
        let newest = taps.dims()[0] - 1;
        with_tap(taps, newest, |tap| tap + self.shift_d.val().unsqueeze::<2>())
    }
}
