//! RWKV-4's time mix. Recurrence, shapes and source: [`Rwkv4`].

use super::{TokenMixer, VectorPast, VectorState, linear_flops, scan_cost};
use crate::nn::exponential_gates::{Sums, exponential_sums};
use crate::nn::layers::{ResidualLinear, linear, shift_tokens};
use crate::nn::{ConfigError, Cost, Kept, Linear, Shared, positive};
use crate::ops::{LinearAttentionBackend, accumulator, typed};
use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Rwkv4`], RWKV-4's time mix. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rwkv4Config {}

impl Rwkv4Config {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("d_model", d_model)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] if the width is 0.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Rwkv4<B>, ConfigError> {
        self.resolve(d_model)?;
        let values = |f: &dyn Fn(usize) -> f64| {
            let values: Vec<f32> = (0..d_model).map(|n| f(n) as f32).collect();
            Tensor::<B, 1>::from_data(TensorData::new(values, [d_model]), device)
        };
        let share = |power: f64| {
            let shares = values(&|n| (n as f64 / d_model as f64).powf(power));
            Param::from_tensor(shares.reshape([1, 1, d_model]))
        };
        let last = (d_model - 1).max(1) as f64;
        let bonus = |n: usize| 0.3f64.ln() + 0.5 * (((n + 1) % 3) as f64 - 1.0);
        Ok(Rwkv4 {
            time_decay: Param::from_tensor(values(&|n| -5.0 + 8.0 * (n as f64 / last).powf(0.7))),
            time_first: Param::from_tensor(values(&bonus)),
            time_mix_key: share(1.0),
            time_mix_value: share(1.0),
            time_mix_receptance: share(0.5),
            key: linear(d_model, d_model, device),
            value: linear(d_model, d_model, device),
            receptance: linear(d_model, d_model, device),
            o_proj: linear(d_model, d_model, device).into(),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let mut cost = scan_cost(2 * self.resolve(d_model)?);
        // m, and the last token.
        cost.state_bytes += 2 * 4 * d_model as u64;
        cost.flops_per_token += linear_flops(d_model, 4 * d_model);
        Ok(cost)
    }
}

/// RWKV-4's time mix: an average of all values so far, weighted by the exponential of their keys and a decay.
///
/// The token itself is weighted anew.
///
/// # Recurrence
/// ```text
/// x_c     = x mu_c + x_before (1 - mu_c)              for c in k, v, r
/// k, v, r = x_k W_k, x_v W_v, sigmoid(x_r W_r)
/// a_t     = e^{-w} a_{t-1} + e^{k_t} v_t              w = exp(time_decay), [D]
/// b_t     = e^{-w} b_{t-1} + e^{k_t}
/// wkv_t   = (a_{t-1} + e^{u + k_t} v_t) / (b_{t-1} + e^{u + k_t})       u = time_first, [D]
/// y       = (r wkv) W_o
/// ```
/// ```text
/// x_t, x_{t-1} ──> r, k, v
///                        ┌─ decay ──┐   ┌─ write ─┐
/// a_{t-1}, b_{t-1} ──┬──>│ e^{-w} a │──>│ + e^k v │──> a_t, b_t
///                    │   │ e^{-w} b │   │ + e^k   │
///                    │   └──────────┘   └─────────┘
///                    │   ┌─ read ────────────────────────────────────────────┐
///                    └──>│ r (a_{t-1} + e^{u + k} v) / (b_{t-1} + e^{u + k}) │ ──> W_o ──> y_t
///                        └───────────────────────────────────────────────────┘
/// ```
/// e^k can be too large for a float, so a and b are kept as e^m times smaller numbers, with
/// `m_t = max(m_{t-1} - w, k_t)`, which a whole sequence has by a running sum and a running maximum, as in
/// mLSTM's memory here; the share kept becomes `e^{m_{t-1} - w - m_t}`, at most 1. Nothing depends on m
/// beyond rounding, and no gradient is taken through it. b over e^m is at least 1.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`VectorState`]: `memory`, a and b side by side over e^m,
/// `[B, 1, 2 D]`, and m, `[B, 1, D]`; `conv_states`, the last token, `[B, 1, D]`; `position`, tokens seen. w and k
/// are natural logs: -w of the share that is kept, the same at every token, k of a token's weight.
/// # Errors
/// [`Rwkv4Config::init`] gives a [`ConfigError`] with the first key that does not fit: a width of 0.
/// # Source
/// Peng et al., arXiv 2305.13048. Decays, bonuses and shares start where the authors' code has them in its
/// first layer.
#[derive(Module, Debug)]
pub struct Rwkv4<B: Backend> {
    /// ln w, `[D]`.
    time_decay: Param<Tensor<B, 1>>,
    /// u, `[D]`.
    time_first: Param<Tensor<B, 1>>,
    time_mix_key: Param<Tensor<B, 3>>,
    time_mix_value: Param<Tensor<B, 3>>,
    time_mix_receptance: Param<Tensor<B, 3>>,
    key: Linear<B>,
    value: Linear<B>,
    receptance: Linear<B>,
    o_proj: ResidualLinear<B>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Rwkv4<B> {
    type State = VectorState<B>;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<VectorState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, VectorState<B>) {
        let (tokens, mut past) = (x.dims()[1], VectorPast::of(state));
        let dtype = x.dtype();
        // Its shares are of the token itself.
        let shares = [&self.time_mix_key, &self.time_mix_value, &self.time_mix_receptance];
        let shares = shares.map(|share| share.val().neg() + 1.0);
        let [of_key, of_value, of_receptance] = past.conv_states.mixed(&x, shares);
        let (k, v) = (self.key.forward(of_key), self.value.forward(of_value));
        let r = sigmoid(self.receptance.forward(of_receptance));
        let before_first = past.draw(Kept::Sums).zip(past.draw(Kept::Maximum));
        let (wkv, memory) = self.wkv(accumulator(k), accumulator(v), before_first);
        let y = self.o_proj.forward(r * typed(wkv, dtype));
        (y, past.then(memory, tokens))
    }
}

impl<B: LinearAttentionBackend> Rwkv4<B> {
    /// wkv, `[B, T, D]`, and the next memory: a and b over e^m, `[B, 1, 2 D]`, and m, `[B, 1, D]`.
    fn wkv(
        &self,
        k: Tensor<B, 3>,
        v: Tensor<B, 3>,
        memory: Option<(Tensor<B, 3>, Tensor<B, 3>)>,
    ) -> (Tensor<B, 3>, [(Kept, Tensor<B, 3>); 2]) {
        let width = k.dims()[2];
        let log_keep: Tensor<B, 3> = self.time_decay.val().exp().neg().unsqueeze();
        let Sums { all, largest, before: (sums, lowest), next } =
            exponential_sums(log_keep, k.clone(), v.clone(), memory);

        // The memory before each token, and the token itself, over the larger of their exponentials.
        let (earlier, _) = shift_tokens(&all, Some(sums));
        let (reached, _) = shift_tokens(&largest, Some(lowest));
        let own = k + self.time_first.val().unsqueeze::<3>();
        let top = reached.clone().max_pair(own.clone().detach());
        let (past, now) = ((reached - top.clone()).exp(), (own - top).exp());
        let above = earlier.clone().narrow(2, 0, width) * past.clone() + now.clone() * v;
        let below = earlier.narrow(2, width, width) * past + now;
        (above / below, next)
    }
}
