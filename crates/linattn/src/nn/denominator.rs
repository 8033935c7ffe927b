//! Denominators of linear attention: a query's answer from the sum of keys.
//! ```text
//! [S z] = sum of k^T [v 1]                      one more column of the memory
//! o     = q S / (q z + epsilon)                 where no score is negative
//! o     = q S / max(q z, floor)                 where scores may be
//! ```
//! The floor is that of random feature attention, arXiv 2103.02143, as its authors' code has it.

use crate::ops::cat;
use burn::tensor::{Tensor, backend::Backend};

/// Bound that keeps the division from one by zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Denominator {
    /// Added to it.
    Plus(f64),
    /// Its least value.
    AtLeast(f64),
}

impl Denominator {
    /// `[v 1]`: values, `[B, T, H, V]`, and what the sum of keys is written with.
    pub(crate) fn with_ones<B: Backend>(v: Tensor<B, 4>) -> Tensor<B, 4> {
        let ones = v.clone().narrow(3, 0, 1).ones_like();
        cat(vec![v, ones], 3)
    }

    /// `q S` over its denominator, of `q [S z]`, `[B, T, H, V + 1]`.
    pub(crate) fn divide<B: Backend>(self, o: Tensor<B, 4>) -> Tensor<B, 4> {
        let width = o.dims()[3] - 1;
        let sum = o.clone().narrow(3, width, 1);
        o.narrow(3, 0, width)
            / match self {
                Self::Plus(epsilon) => sum + epsilon,
                Self::AtLeast(floor) => sum.clamp_min(floor),
            }
    }
}
