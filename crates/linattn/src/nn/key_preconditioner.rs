//! Keys of delta rules on the scale of those before them: the more often a row of the memory was written, the
//! smaller its next write.
//! ```text
//! A = e^{g'} A + beta' k^2                    g', beta': a log decay and a share, one a head, of x
//! r = ln(A + 1e-6) - c                        c learnt, one a head, from -0.2
//! m = 1.5^{-r / (1 + |r|)}                    between 2/3 and 3/2
//! k'= m k                                     what is written; k is what erases
//! ```
//! Keys of length 1 and beta of at most 1 keep the eigenvalues of a write between -1/2 and 1; beta of up to 2 may
//! pass -1, as in the authors' code. Source: preconditioned delta rules, arXiv 2604.21100, with
//! flash-linear-attention's constants and names. Its Gated DeltaNet has a preconditioner for each head of keys, and
//! so have all layers here; its KDA has one for each head of values.

use super::convolution::ConvPast;
use super::layers::{linear, share_heads};
use super::log_decay::{fresh_a_log, fresh_dt_bias};
use super::projection::Projection;
use super::{Cost, Kept, Linear};
use crate::ops::{self, LinearAttentionBackend, accumulator, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};

/// Least mean square of a row: the logarithm of 0 is no number.
const EPS: f64 = 1e-6;
/// Most that a key is divided or multiplied by.
const REACH: f64 = 1.5;
/// Where c starts.
const CENTER: f64 = -0.2;

/// The preconditioner of a layer's keys.
#[derive(Module, Debug)]
pub struct KeyPreconditioner<B: Backend> {
    a_atk_proj: Linear<B>,
    b_atk_proj: Linear<B>,
    a_log_atk: Param<Tensor<B, 1>>,
    dt_bias_atk: Param<Tensor<B, 1>>,
    log_atk_scale: Param<Tensor<B, 1>>,
}

impl<B: Backend> KeyPreconditioner<B> {
    /// Of `heads` heads of keys, which forget at most at rates uniform in `least` to 16.
    pub(crate) fn new(d_model: usize, heads: usize, least: f64, device: &B::Device) -> Self {
        Self {
            a_atk_proj: linear(d_model, heads, device),
            b_atk_proj: linear(d_model, heads, device),
            a_log_atk: fresh_a_log(heads, least, device),
            dt_bias_atk: fresh_dt_bias(heads, device),
            log_atk_scale: Initializer::Constant { value: CENTER }.init([heads], device),
        }
    }

    /// The projections of x that [`written`] takes: of g', and beta'.
    pub(crate) fn projections(preconditioner: &Option<Self>) -> [Option<Projection<'_, B>>; 2] {
        let Some(Self { a_atk_proj, b_atk_proj, .. }) = preconditioner else { return [None, None] };
        [Some(Projection::plain(a_atk_proj)), Some(Projection::beta(b_atk_proj, 1.0))]
    }
}

/// Cost of a preconditioner of `heads` heads of `width` numbers.
pub(crate) fn preconditioner_cost(d_model: usize, heads: usize, width: usize) -> Cost {
    let rows = (heads * width) as u64;
    Cost { state_bytes: 4 * rows, flops_per_token: 2 * (d_model * 2 * heads) as u64 + 4 * rows }
}

/// The keys that `heads` heads write, of keys `[B, T, H, K]`, and those that erase where these are others. `gates`
/// are what the [`projections`](KeyPreconditioner::projections) gave.
pub(crate) fn written<B: LinearAttentionBackend>(
    preconditioner: &Option<KeyPreconditioner<B>>,
    gates: [Option<Tensor<B, 3>>; 2],
    k: Tensor<B, 4>,
    heads: usize,
    conv_states: &mut ConvPast<B>,
) -> (Tensor<B, 4>, Option<Tensor<B, 4>>) {
    match (preconditioner, gates) {
        (Some(preconditioner), [Some(a), Some(beta)]) => {
            let written = preconditioner.forward([a, beta], &k, conv_states);
            (written, Some(share_heads(k, heads)))
        }
        _ => (k, None),
    }
}

impl<B: LinearAttentionBackend> KeyPreconditioner<B> {
    /// k' of keys `[B, T, H, K]`, from the projections. A, `[B, 1, H K]`, is kept as [`Kept::Sums`].
    fn forward(
        &self,
        [a, beta]: [Tensor<B, 3>; 2],
        k: &Tensor<B, 4>,
        conv_states: &mut ConvPast<B>,
    ) -> Tensor<B, 4> {
        let ([batch, tokens, heads, width], dtype) = (k.dims(), k.dtype());
        let keep = ops::log_decays(a, self.a_log_atk.val(), self.dt_bias_atk.val()).exp();
        let rows = |x: Tensor<B, 4>| x.expand([batch, tokens, heads, width]).flatten::<3>(2, 3);
        let k = accumulator(k.clone());
        let written = accumulator(beta).unsqueeze_dim::<4>(3) * k.clone().square();
        let sums = conv_states.through(Kept::Sums, |before| {
            ops::linear_scan(rows(keep.unsqueeze_dim(3)), rows(written), before)
                .expect("both are of one shape")
        });
        let center = accumulator(self.log_atk_scale.val()).reshape([1, 1, heads, 1]);
        let r = (sums.reshape([batch, tokens, heads, width]) + EPS).log() - center;
        let power = r.clone() / (r.abs() + 1.0);
        typed(k * (power * -REACH.ln()).exp(), dtype)
    }
}
