//! What a product of few rows reads in place of x: another operation on x that costs no launch of its own, because
//! every cube does it again where it puts its rows into shared memory.
//! ```text
//! Rows:        x                                                  [M, K]
//! Gated:       x_mk = f(both_mk) both_m(K + k)                    both: [M, 2K]
//! Normalized:  s = x + addend
//!              x_mk = w_k s_mk / sqrt(mean_k s_mk^2 + epsilon)    x, addend, s: [M, K], w: [K]
//! ```
//! The first cubes write s, which the caller goes on with. Squares are summed in f32, in one order; s is rounded to
//! its type before anything reads it. Nothing else is rounded, where an operation of its own rounds what it writes.
//! Source: RMS norm, arXiv 1910.07467; GLU variants, arXiv 2002.05202.

use super::UNITS;
use crate::buffer::{Buffer, array, buffer};
use crate::fused::gated_product::{GateActivation, activate};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// What a product reads.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// The rows of x.
    Rows(&'a Handle),
    /// Gates times values.
    Gated {
        /// Gates in the first K columns, values in the others.
        both: &'a Handle,
        /// f.
        activation: GateActivation,
    },
    /// Rows through an RMS norm.
    Normalized {
        /// x.
        x: &'a Handle,
        /// Added to it before.
        addend: Option<&'a Handle>,
        /// w.
        weight: &'a Handle,
        /// Added to the mean of squares.
        epsilon: f32,
    },
}

/// The kind of [`Input`]: a compile-time value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reading {
    /// As it is.
    Rows,
    /// Gated.
    Gated(GateActivation),
    /// Through an RMS norm.
    Normalized {
        /// Whether something is added before.
        added: bool,
    },
}

impl Input<'_> {
    /// Its kind.
    pub fn reading(&self) -> Reading {
        match *self {
            Self::Rows(_) => Reading::Rows,
            Self::Gated { activation, .. } => Reading::Gated(activation),
            Self::Normalized { addend, .. } => Reading::Normalized { added: addend.is_some() },
        }
    }

    /// The rows themselves, where nothing is done to them.
    pub(super) fn rows(&self) -> Option<&Handle> {
        match self {
            Self::Rows(x) => Some(x),
            _ => None,
        }
    }

    /// The kernel's arguments, for rows `[rows, inner]`.
    pub(crate) fn arrays<F: Numeric, R: Runtime>(
        &self,
        [rows, inner]: [usize; 2],
    ) -> InputArraysLaunch<F, R> {
        let all = rows * inner;
        let (mut addends, mut weights) = (SequenceArg::new(), SequenceArg::new());
        let (x, epsilon) = match *self {
            Self::Rows(x) => (array(x, all), 0.0),
            Self::Gated { both, .. } => (array(both, 2 * all), 0.0),
            Self::Normalized { x, addend, weight, epsilon } => {
                addend.into_iter().for_each(|addend| addends.push(array(addend, all)));
                weights.push(array(weight, inner));
                (array(x, all), epsilon)
            }
        };
        InputArraysLaunch::new(x, addends, weights, epsilon)
    }
}

impl Reading {
    /// Tensors of `[M, K]` that it reads from one buffer.
    pub(crate) fn parts(self) -> usize {
        if matches!(self, Self::Gated(_)) { 2 } else { 1 }
    }

    /// Whether rows go through a norm.
    fn is_normalized(self) -> bool {
        matches!(self, Self::Normalized { .. })
    }

    /// Buffers that it binds.
    pub(crate) fn bindings(self) -> usize {
        match self {
            Self::Rows | Self::Gated(_) => 1,
            Self::Normalized { added: false } => 2,
            // x, addend, weight and sum.
            Self::Normalized { added: true } => 4,
        }
    }

    /// Where s goes, if it is another tensor than x.
    pub(crate) fn sum<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        size: [usize; 2],
        dtype: StorageType,
    ) -> Option<Buffer> {
        (self == Self::Normalized { added: true }).then(|| buffer(client, &size, dtype))
    }
}

/// Arrays of [`Input`]; `Reading` says which of them there are.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct InputArrays<F: Numeric> {
    x: Array<F>,
    addend: Sequence<Array<F>>,
    weight: Sequence<Array<F>>,
    epsilon: f32,
}

/// The rows of a cube: `tile` of them from `first` on, of which the tensor has `rows`, of `inner` numbers each.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct CubeRows {
    pub first: usize,
    pub rows: usize,
    pub inner: usize,
}

/// s.
#[cube]
fn summed<F: Float>(x: &InputArrays<F>, at: usize, #[comptime] added: bool) -> f32 {
    let own = f32::cast_from(x.x[at]);
    if comptime!(added) {
        f32::cast_from(F::cast_from(own + f32::cast_from(x.addend.index(0usize)[at])))
    } else {
        own
    }
}

/// What number `k` of row `m` is times, for `tile` rows: 1 but for a norm, which goes through shared memory of
/// `tile` times [`UNITS`] numbers. The first cube keeps s.
#[cube]
pub(crate) fn row_factors<F: Float>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F>,
    sum: &mut Sequence<Array<F>>,
    of: CubeRows,
    #[comptime] tile: usize,
    #[comptime] reading: Reading,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(tile);
    #[unroll]
    for m in 0..tile {
        factors[m] = 1.0f32;
    }
    if comptime!(reading.is_normalized()) {
        let added = comptime!(reading == Reading::Normalized { added: true });
        sum_squares::<F>(shared, x, sum, of, tile, added);
        #[unroll]
        for m in 0..tile {
            let mean = shared[comptime!(m * UNITS)] / f32::cast_from(of.inner as u32);
            factors[m] = f32::inverse_sqrt(mean + x.epsilon);
        }
        sync_cube();
    }
    factors
}

/// The sums of squares of all rows, each at its own multiple of [`UNITS`] in shared memory.
#[cube]
fn sum_squares<F: Float>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F>,
    sum: &mut Sequence<Array<F>>,
    of: CubeRows,
    #[comptime] tile: usize,
    #[comptime] added: bool,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for m in 0..tile {
        let row = of.first + m;
        let from = min(row, of.rows - 1) * of.inner;
        let mut squares = 0.0f32;
        for turn in 0..(of.inner - 1) / UNITS + 1 {
            let k = turn * UNITS + unit;
            if k < of.inner {
                let s = summed::<F>(x, from + k, added);
                squares += s * s;
                if comptime!(added) {
                    if CUBE_POS_X == 0 && row < of.rows {
                        sum.index_mut(0usize)[from + k] = F::cast_from(s);
                    }
                }
            }
        }
        shared[unit + comptime!(m * UNITS)] = squares;
    }
    sync_cube();
    #[unroll]
    for level in 1..comptime!(UNITS.ilog2() + 1) {
        let half = comptime!(UNITS >> level);
        if unit < half {
            #[unroll]
            for m in 0..tile {
                let at = unit + comptime!(m * UNITS);
                shared[at] = shared[at] + shared[at + half];
            }
        }
        sync_cube();
    }
}

/// Number `k` of row `row`, but for the row's factor.
#[cube]
pub(crate) fn number<F: Float>(
    x: &InputArrays<F>,
    row: usize,
    k: usize,
    inner: usize,
    #[comptime] reading: Reading,
) -> f32 {
    match comptime!(reading) {
        Reading::Rows => f32::cast_from(x.x[row * inner + k]),
        Reading::Gated(activation) => {
            let at = 2 * row * inner + k;
            activate(f32::cast_from(x.x[at]), activation) * f32::cast_from(x.x[at + inner])
        }
        Reading::Normalized { added } => {
            summed::<F>(x, row * inner + k, added) * f32::cast_from(x.weight.index(0usize)[k])
        }
    }
}
