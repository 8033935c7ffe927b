//! Activations in f32, and launches of one unit a number.

use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// Activation of a convolution, and of the gate behind a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    Identity,
    /// `z sigmoid(z)`.
    Silu,
    /// `1 / (1 + e^-z)`.
    Sigmoid,
}

/// Compile-time values of kernels that have no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source(pub &'static str);

/// Cubes for `count` of them, or for as many runs of [`UNITS`] numbers; `None` if there are none, the
/// device's counters cannot hold them or a unit's number would pass 32 bits.
pub(crate) fn spread(count: usize, largest: (u32, u32, u32)) -> Option<CubeCount> {
    let x = count.min(largest.0 as usize);
    let y = count.checked_next_multiple_of(x)? / x;
    // The last row of cubes may be longer than what is left.
    let fits = y <= largest.1 as usize && u32::try_from(x * y * UNITS).is_ok();
    fits.then_some(CubeCount::Static(x as u32, y as u32, 1))
}

/// `activation` of `z`.
#[cube]
pub(crate) fn activate(z: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Silu) {
        z * sigmoid(z)
    } else if comptime!(activation == Activation::Sigmoid) {
        sigmoid(z)
    } else {
        z
    }
}

/// The derivative of [`activate`] at `z`.
#[cube]
pub(crate) fn activation_slope(z: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Silu) {
        sigmoid(z) + z * sigmoid_slope(z)
    } else if comptime!(activation == Activation::Sigmoid) {
        sigmoid_slope(z)
    } else {
        1.0f32.runtime()
    }
}

/// `sigmoid(z) (1 - sigmoid(z))` as `e / (1 + e)^2` with `e = e^-|z|`: nothing overflows, and small slopes keep
/// their digits.
#[cube]
pub(crate) fn sigmoid_slope(z: f32) -> f32 {
    let e = f32::exp(-f32::abs(z));
    e / ((e + 1.0f32) * (e + 1.0f32))
}

/// `1 / (1 + e^-z)`, with an exponent that is never above 0: nothing overflows.
#[cube]
pub(crate) fn sigmoid(z: f32) -> f32 {
    let e = f32::exp(-f32::abs(z));
    select(z >= 0.0f32, 1.0f32, e) / (e + 1.0f32)
}

/// `ln(1 + e^z)`, as `max(z, 0) + ln(1 + e^-|z|)`: nothing overflows, and small values keep their
/// digits.
#[cube]
pub(crate) fn softplus(z: f32) -> f32 {
    max(z, 0.0f32) + log_1p(f32::exp(-f32::abs(z)))
}

/// `ln(1 + e)` for e from 0 to 1, as 2 artanh(s) with s = e / (2 + e), at most 1/3: the series ends
/// where f32 does. Shaders have no such function, and their logarithms near 1 lose what e is small by.
#[cube]
fn log_1p(e: f32) -> f32 {
    let s = e / (e + 2.0f32);
    let square = s * s;
    // 1 + s^2/3 + s^4/5 + .. + s^16/17, innermost first.
    let mut series = 0.0f32;
    #[unroll]
    for n in 0..9usize {
        series = series * square + comptime!(1.0 / (17 - 2 * n) as f32);
    }
    (s + s) * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_no_device_counts_are_none() {
        let counts = |cubes| match cubes {
            Some(CubeCount::Static(x, y, z)) => Some([x, y, z]),
            _ => None,
        };
        assert_eq!(counts(spread(7, (65_535, 65_535, 1))), Some([7, 1, 1]));
        // A second row of cubes, not whole.
        assert_eq!(counts(spread(15, (10, 2, 1))), Some([10, 2, 1]));
        assert_eq!(counts(spread(100, (9, 11, 1))), None, "on 99 places");
        assert_eq!(counts(spread(1 << 24, (u32::MAX, 1, 1))), None, "33 bits of units");
    }
}
