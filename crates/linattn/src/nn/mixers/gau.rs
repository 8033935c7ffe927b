//! Gated attention unit. Recurrence, shapes and source: [`Gau`].

use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, linear_flops};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{ResidualLinear, linear};
use crate::nn::projection::{Projection, project};
use crate::nn::score_bias::pairs;
use crate::nn::softmax::{KeyValueCache, blend, merge, scores, through_window, turned};
use crate::nn::{ConfigError, Cost, Linear, Rope, Shared, positive};
use crate::ops::{Activation, LinearAttentionBackend, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::relu;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Gau`], the gated attention unit. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GauConfig {
    /// S, width of the one head's queries and keys, an even number.
    pub key_width: usize,
    /// E over the model's width.
    pub expand: usize,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
}

impl Default for GauConfig {
    fn default() -> Self {
        Self { key_width: 128, expand: 2, rope_theta: 10_000.0 }
    }
}

impl GauConfig {
    /// E.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        check_rotated("key_width", positive("key_width", self.key_width)?)?;
        check_theta(self.rope_theta)?;
        Ok(positive("expand", self.expand)? * positive("d_model", d_model)?)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Gau<B>, ConfigError> {
        let inner = self.resolve(d_model)?;
        let scale = || Initializer::Ones.init([self.key_width], device);
        let offset = || Initializer::Zeros.init([self.key_width], device);
        Ok(Gau {
            u_proj: linear(d_model, inner, device),
            v_proj: linear(d_model, inner, device),
            z_proj: linear(d_model, self.key_width, device),
            q_scale: scale(),
            q_offset: offset(),
            k_scale: scale(),
            k_offset: offset(),
            o_proj: linear(inner, d_model, device).into(),
            rope: Rope::whole(self.rope_theta),
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let inner = self.resolve(d_model)?;
        // On average a token looks at half the sequence: products and their sum over values.
        let look_back = 2 * (self.key_width + inner) as u64 * length.div_ceil(2) as u64;
        Ok(Cost {
            state_bytes: 4 * ((self.key_width + inner) * length) as u64,
            flops_per_token: linear_flops(d_model, 2 * inner + self.key_width)
                + linear_flops(inner, d_model)
                + look_back,
        })
    }
}

/// Gated attention unit (GAU): one head of attention without a softmax, inside a gated MLP.
///
/// # Recurrence
/// ```text
/// u, v, z = silu(x W)                                   D -> E, E, S
/// q, k    = rope(z g_q + c_q), rope(z g_k + c_k)        a scale and an offset for each channel and use
/// a_tj    = relu(q_t k_j^T / sqrt(S))^2 / t             j <= t, tokens counted from 1
/// y       = (u * a v) W_o
/// ```
/// ```text
/// x_t, position ──> u, v, z, q, k
///                                                   ┌─ write ─────┐
/// keys, values ────────────────────────────────────>│ append k, v │──┬──> keys, values
///                                                   └─────────────┘  │
///                         ┌─ read ────────────────────────────────┐  │
///  y_t <── W_o <── * u <──│ relu(q keys^T / sqrt(S))^2 values / t │<─┘
///                         └───────────────────────────────────────┘
/// ```
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is a [`KeyValueCache`]: `keys`, `[B, 1, T, S]`, rotated;
/// `values`, `[B, 1, T, E]`; `position`, tokens seen. It grows with T. E is `expand` D, S is `key_width`.
/// # Errors
/// [`GauConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `key_width` that is 0
/// or odd, an `expand` of 0 or a `rope_theta` below 1.
/// # Source
/// Hua et al., arXiv 2202.10447, in its quadratic form.
/// # Departures
/// There products are divided by the length of the sequence before they are squared, which no token of a
/// sequence in the making knows, and a learnt bias of the distance is added to them; here they are divided as
/// in softmax attention, the sum by the tokens seen, and rotation alone tells positions.
#[derive(Module, Debug)]
pub struct Gau<B: Backend> {
    u_proj: Linear<B>,
    v_proj: Linear<B>,
    z_proj: Linear<B>,
    q_scale: Param<Tensor<B, 1>>,
    q_offset: Param<Tensor<B, 1>>,
    k_scale: Param<Tensor<B, 1>>,
    k_offset: Param<Tensor<B, 1>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    rope: Rope,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Gau<B> {
    type State = KeyValueCache<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<KeyValueCache<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, KeyValueCache<B>) {
        let position = state.as_ref().map_or(0, |cache| cache.position);
        let silu = |layer| Projection::convolved(layer, None, Some(Activation::Silu), None);
        let layers = [&self.u_proj, &self.v_proj, &self.z_proj];
        let [u, v, z] = project(&x, layers.map(silu), &mut ConvPast::none());
        let row = |param: &Param<Tensor<B, 1>>| typed(param.val(), z.dtype()).unsqueeze::<3>();
        let of = |scale, offset| {
            let x = z.clone() * row(scale) + row(offset);
            turned(x.unsqueeze_dim::<4>(2), &None, Some((self.rope, position)))
        };
        let q = of(&self.q_scale, &self.q_offset);
        let k = of(&self.k_scale, &self.k_offset);
        let v = v.unsqueeze_dim::<4>(1);
        let (o, cache) = through_window([q, k, v], None, state, |q, cache, _| {
            let shares = relu(scores(q.clone(), &cache.keys)).square() * shares(&q, cache.position);
            merge(blend(shares, &cache.values))
        });
        (self.o_proj.forward(u * o), cache)
    }
}

/// Factors of squared products of the last queries with `seen` keys, `[1, 1, 1, T, seen]`: 1 / (S t), and 0 ahead.
fn shares<B: Backend>(q: &Tensor<B, 4>, seen: usize) -> Tensor<B, 5> {
    let [_, _, tokens, width] = q.dims();
    let visible = pairs(q, seen, |back| if back >= 0 { 1.0 } else { 0.0 });
    let share = |t: usize| ((t * width) as f64).recip() as f32;
    let values: Vec<f32> = (seen - tokens + 1..=seen).map(share).collect();
    let data = TensorData::new(values, [1, 1, 1, tokens, 1]);
    let shares = Tensor::from_data(data, (&visible.device(), visible.dtype()));
    visible * shares
}
