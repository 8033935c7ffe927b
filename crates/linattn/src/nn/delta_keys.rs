//! How delta rules make queries and keys, and the exact step.
//! ```text
//! q, k  = f(q), f(k)                          f: SiLU, max(x, 0), elu(x) + 1, DPFP, nothing
//! k     = k / |k|, or k / sum(k)              q likewise, and over sqrt(K)
//! beta' = (1 - e^{-beta |k|^2}) / |k|^2       the exact step
//! ```
//! The delta rule `S + beta k^T (v - k S)` is a step of Euler's method along `dS/dt = k^T (v - k S)`; beta' in
//! place of beta goes where that equation leads in a time of beta. Its eigenvalue e^{-beta |k|^2} lies in 0 to 1
//! for keys of any length, so keys keep theirs; queries have the length that is usual here.
//!
//! Sources: maps and sums, Schlag et al., arXiv 2102.11174, with flash-linear-attention's names; the exact step,
//! EFLA, arXiv 2512.12602. Sums there have nothing added to them, here 1e-6.

use super::ConfigError;
use super::conv_qkv::ConvQkv;
use super::features::{check_nu, check_width, elu_plus_one, neighbours, over_sum};
use super::layers::l2_normalize;
use crate::ops::{Activation, Along, LinearAttentionBackend, accumulator, typed};
use burn::tensor::activation::{relu, silu};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Added to the sum that a key is divided by.
const SUM_EPS: f64 = 1e-6;
/// Below this (1 - e^-x) / x is its series, whose next term is 3e-14.
const SMALL: f64 = 0.1;
/// Terms of that series.
const TERMS: u32 = 8;

/// Function of queries and keys, before their norm: a name, or a table for the one that has an option.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum QkActivation {
    /// `x sigmoid(x)`.
    #[default]
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `elu(x) + 1`, which is positive.
    Elu,
    /// Products of neighbours at `nu` distances, as the feature map `dpfp` has them: 2 K nu entries.
    Dpfp {
        /// How many distances, below 2 K.
        nu: usize,
    },
    /// Nothing.
    Identity,
}

/// Norm of each head's queries and keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Length 1.
    #[default]
    L2,
    /// Entries that add up to 1.
    Sum,
}

/// How queries and keys are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeltaKeys {
    pub(crate) activation: QkActivation,
    pub(crate) norm: QkNorm,
    /// Whether keys keep their length, and beta is beta'.
    pub(crate) exact_step: bool,
}

impl DeltaKeys {
    /// Entries of a key that is made of `key_width` numbers.
    /// # Errors
    /// [`ConfigError`] at sums of entries of any sign, at norms of keys that keep their length, and at sizes.
    pub(crate) fn check(self, key_width: usize) -> Result<usize, ConfigError> {
        let signed = matches!(self.activation, QkActivation::Silu | QkActivation::Identity);
        let refused = |key, given, want| Err(ConfigError::new(key, given, want));
        match self.norm {
            QkNorm::Sum if signed => refused(
                "qk_norm",
                "\"sum\"",
                "\"l2\", or `qk_activation` of relu, elu or dpfp: other entries may add up to 0",
            ),
            QkNorm::Sum if self.exact_step => refused(
                "exact_step",
                "true",
                "false beside `qk_norm = \"sum\"`: keys of an exact step keep their length",
            ),
            _ => match self.activation {
                QkActivation::Dpfp { nu } => {
                    check_nu(nu, key_width).map_err(|e| e.within("qk_activation.dpfp"))?;
                    check_width(key_width, 2 * key_width * nu)
                }
                _ => Ok(key_width),
            },
        }
    }

    /// Whether the projections make them: SiLU, and lengths.
    fn are_fused(self) -> bool {
        self.activation == QkActivation::Silu && self.norm == QkNorm::L2
    }

    /// Whether the recurrence takes what the projections make as it is.
    pub(crate) fn are_whole(self) -> bool {
        self.are_fused() && !self.exact_step
    }

    /// The projections that [`of`](Self::of) takes, with all that they can do themselves. Values go through
    /// SiLU.
    pub(crate) fn projected<'a, B: Backend>(self, qkv: ConvQkv<'a, B>) -> ConvQkv<'a, B> {
        match (self.are_fused(), self.exact_step) {
            (true, false) => qkv.silu().scaled(),
            (true, true) => qkv.silu().scaled_queries(),
            (false, _) => qkv.activated([None, None, Some(Activation::Silu)]),
        }
    }

    /// Queries and keys, `[B, T, H, K]`, of what the projections give.
    pub(crate) fn of<B: LinearAttentionBackend>(
        self,
        [q, k]: [Tensor<B, 4>; 2],
    ) -> [Tensor<B, 4>; 2] {
        if self.are_fused() {
            return [q, k];
        }
        let dtype = q.dtype();
        let [q, k] = [q, k].map(|x| match self.activation {
            QkActivation::Silu => silu(x),
            QkActivation::Relu => relu(x),
            QkActivation::Elu => elu_plus_one(x),
            QkActivation::Dpfp { nu } => neighbours(x, nu),
            QkActivation::Identity => x,
        });
        let scale = (q.dims()[3] as f64).powf(-0.5);
        let norm = |x: Tensor<B, 4>| match self.norm {
            QkNorm::L2 => l2_normalize(x),
            QkNorm::Sum => typed(over_sum(accumulator(x), SUM_EPS), dtype),
        };
        let k = if self.exact_step { k } else { norm(k) };
        [norm(q) * scale, k]
    }

    /// beta, `[B, T, H]`, or beta' of keys `[B, T, G, K]`, each of which belongs to H / G heads.
    pub(crate) fn step<B: LinearAttentionBackend>(
        self,
        beta: Tensor<B, 3>,
        k: &Tensor<B, 4>,
    ) -> Tensor<B, 3> {
        if !self.exact_step {
            return beta;
        }
        let ([batch, tokens, groups, _], heads) = (k.dims(), beta.dims()[2]);
        let squares = accumulator(k.clone()).square().sum_along(3);
        let squares = squares.expand([batch, tokens, groups, heads / groups]);
        let x = beta.clone() * squares.reshape([batch, tokens, heads]);
        beta * share_of_time(x)
    }
}

/// `(1 - e^-x) / x` of x at least 0.
fn share_of_time<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let small = x.clone().lower_elem(SMALL);
    // 1 - x / 2 (1 - x / 3 (1 - x / 4 ..)).
    let ones = x.ones_like();
    let series = (2..=TERMS)
        .rev()
        .fold(ones.clone(), |inner, i| ones.clone() - inner * x.clone() / f64::from(i));
    // No infinity behind the mask: its gradient would be no number.
    let large = x.mask_fill(small.clone(), 1.0);
    let exact = (large.clone().neg().exp().neg() + 1.0) / large;
    exact.mask_where(small, series)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::TensorData;

    #[test]
    fn shares_of_time_are_exact_on_both_sides_of_the_series() {
        let x = [0.0f64, 1e-300, 1e-12, 1e-3, 0.0999999, 0.1, 0.5, 3.0, 800.0];
        let data = Tensor::<Flex, 1>::from_data(
            TensorData::from(x),
            (&Default::default(), burn::tensor::DType::F64),
        );
        let got: Vec<f64> = share_of_time(data).into_data().iter().collect();
        for (x, got) in x.into_iter().zip(got) {
            let want = if x == 0.0 { 1.0 } else { -(-x).exp_m1() / x };
            assert!((got - want).abs() <= 1e-13 * want, "{x}: {got} {want}");
        }
    }
}
