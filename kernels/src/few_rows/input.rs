//! What a product of few rows reads in place of x: another operation on x that costs no launch of its own, because
//! every cube does it again where it puts its rows into shared memory.
//! ```text
//! Rows:        x                                                  [M, K]
//! Gated:       x_mk = f(both_mk) both_m(K + k)                    both: [M, 2K]
//! Normalized:  s = x + addend
//!              x_mk = w_k s_mk / sqrt(mean_k s_mk^2 + epsilon)    x, addend, s: [M, K], w: [K]
//! Heads:       x_mk = w_v o_mk / sqrt(mean_v o_mhv^2 + epsilon)   o, gate: [M, K], w: [V], K = H V, k = h V + v
//!              [times f(gate_mk)]
//! ```
//! The first cubes write s, which the caller goes on with. Squares of whole rows are summed in f32, in one order, while
//! rows are put into shared memory, and a row's factor multiplies what the product gives; those of heads are summed
//! before, and their factors multiply x. s is rounded to its type before anything reads it. Nothing else is rounded,
//! where an operation of its own rounds what it writes.
//! Source: RMS norm, arXiv 1910.07467; GLU variants, arXiv 2002.05202.

use super::{Output, UNITS};
use crate::buffer::{Buffer, array, together};
use crate::fused::embedding::vector_width;
use crate::fused::gated_product::{GateActivation, activate};
use crate::fused::team::{Team, over_team};
use crate::refusal::Refusal;
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
    /// Each of H heads through an RMS norm, times an activated gate.
    Heads {
        /// o.
        o: &'a Handle,
        /// The gate, and f.
        gate: Option<(&'a Handle, GateActivation)>,
        /// w.
        weight: &'a Handle,
        /// Added to the mean of squares.
        epsilon: f32,
        /// H, which divides K.
        heads: usize,
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
    /// Heads through an RMS norm.
    Heads {
        /// H, at most [`MOST_HEADS`].
        heads: usize,
        /// f of the gate.
        gate: Option<GateActivation>,
    },
}

/// Vectors that a unit requests before it uses the first: it waits for memory once for all of them.
const fn ahead(vector: usize) -> usize {
    match vector {
        8 => 2,
        4 => 4,
        _ => 8,
    }
}

/// Most heads of an input: a few units at least sum the squares of each.
pub const MOST_HEADS: usize = 64;

impl Input<'_> {
    /// Its kind.
    pub fn reading(&self) -> Reading {
        match *self {
            Self::Rows(_) => Reading::Rows,
            Self::Gated { activation, .. } => Reading::Gated(activation),
            Self::Normalized { addend, .. } => Reading::Normalized { added: addend.is_some() },
            Self::Heads { gate, heads, .. } => {
                Reading::Heads { heads, gate: gate.map(|(_, activation)| activation) }
            }
        }
    }

    /// The rows themselves, where nothing is done to them.
    pub(super) fn rows(&self) -> Option<&Handle> {
        match self {
            Self::Rows(x) => Some(x),
            _ => None,
        }
    }

    /// The kernel's arguments, for rows `[rows, inner]`, in vectors of so many numbers.
    pub(crate) fn arrays<F: Numeric, X: Size, R: Runtime>(
        &self,
        [rows, inner]: [usize; 2],
        vector: usize,
    ) -> InputArraysLaunch<F, X, R> {
        let all = rows * inner / vector;
        let (mut beside, mut weights) = (SequenceArg::new(), SequenceArg::new());
        let (x, epsilon) = match *self {
            Self::Rows(x) => (array(x, all), 0.0),
            Self::Gated { both, .. } => (array(both, 2 * all), 0.0),
            Self::Normalized { x, addend, weight, epsilon } => {
                addend.into_iter().for_each(|addend| beside.push(array(addend, all)));
                weights.push(array(weight, inner / vector));
                (array(x, all), epsilon)
            }
            Self::Heads { o, gate, weight, epsilon, heads } => {
                gate.into_iter().for_each(|(gate, _)| beside.push(array(gate, all)));
                weights.push(array(weight, inner / heads / vector));
                (array(o, all), epsilon)
            }
        };
        InputArraysLaunch::new(x, beside, weights, epsilon)
    }

    /// Numbers of a vector, of rows of `inner` numbers of type `dtype`.
    pub(crate) fn vector<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        inner: usize,
        dtype: StorageType,
    ) -> usize {
        match *self {
            Self::Rows(x) => vector_width(client, inner, &[(x, dtype)]),
            Self::Gated { both, .. } => vector_width(client, inner, &[(both, dtype)]),
            Self::Normalized { x, addend, weight, .. } => {
                let addend = (addend.unwrap_or(x), dtype);
                vector_width(client, inner, &[(x, dtype), addend, (weight, dtype)])
            }
            Self::Heads { o, gate, weight, heads, .. } => {
                let gate = (gate.map_or(o, |(gate, _)| gate), dtype);
                vector_width(client, inner / heads, &[(o, dtype), gate, (weight, dtype)])
            }
        }
    }
}

impl Reading {
    /// Whether rows go through a norm, whose factor is known when all of a row has been read.
    fn is_normalized(self) -> bool {
        matches!(self, Self::Normalized { .. })
    }

    /// Tensors of `[M, K]` that it reads from one buffer.
    pub(crate) fn parts(self) -> usize {
        if matches!(self, Self::Gated(_)) { 2 } else { 1 }
    }

    /// Buffers that it binds.
    pub(crate) fn bindings(self) -> usize {
        match self {
            Self::Rows | Self::Gated(_) => 1,
            Self::Normalized { added: false } => 2,
            // x, addend, weight and sum.
            Self::Normalized { added: true } => 4,
            Self::Heads { gate, .. } => 2 + usize::from(gate.is_some()),
        }
    }

    /// H, where heads go through a norm.
    fn heads(self) -> Option<usize> {
        match self {
            Self::Heads { heads, .. } => Some(heads),
            _ => None,
        }
    }

    /// Numbers in shared memory for factors of heads, of `tile` rows.
    pub(crate) fn factors_of_heads(self, tile: usize) -> usize {
        tile * self.heads().unwrap_or(0)
    }

    /// Checks that rows of `inner` numbers can be read so.
    ///
    /// # Errors
    /// [`Refusal`] of too many heads.
    /// # Panics
    /// If there are no heads, or they do not divide a row.
    pub(crate) fn check(self, inner: usize) -> Result<(), Refusal> {
        let Some(got) = self.heads() else { return Ok(()) };
        assert!(got > 0 && inner.is_multiple_of(got), "{got} heads divide {inner} numbers");
        let most = MOST_HEADS;
        match got > most {
            true => Err(Refusal::TooLarge { what: "heads of an input", got, most }),
            false => Ok(()),
        }
    }

    /// Where y goes, of so many columns, and s, if it is another tensor than x.
    pub(crate) fn output<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        [rows, inner]: [usize; 2],
        columns: usize,
        dtype: StorageType,
    ) -> Output {
        let of_sum = (self == Self::Normalized { added: true }).then_some(inner);
        let wanted = [Some(columns), of_sum].into_iter().flatten();
        let wanted: Vec<_> = wanted.map(|width| (rows * width, dtype)).collect();
        let mut made = together(client, &wanted).into_iter();
        let mut next = |width| {
            let buffer = made.next().expect("a buffer for each that was asked for");
            Buffer { shape: vec![rows, width], ..buffer }
        };
        Output { y: next(columns), sum: of_sum.map(next) }
    }
}

/// Arrays of [`Input`]; `Reading` says which of them there are.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct InputArrays<F: Numeric, X: Size> {
    x: Array<Vector<F, X>>,
    /// An addend, or a gate.
    beside: Sequence<Array<Vector<F, X>>>,
    weight: Sequence<Array<Vector<F, X>>>,
    epsilon: f32,
}

/// The rows of a cube: from `first` on, of which the tensor has `rows`, of `inner` numbers each.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct CubeRows {
    pub first: usize,
    pub rows: usize,
    pub inner: usize,
}

/// Columns of x that shared memory holds at once: `count` from `first` on, which vectors divide.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Held {
    pub first: usize,
    pub count: usize,
}

/// How rows of x lie in shared memory, and what they are: compile-time values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shelf {
    /// Rows of a cube.
    pub tile: usize,
    /// Columns that are held at once.
    pub span: usize,
    /// Numbers of a row that lie together, and from there to the next ones of the same row: rows lie one behind another
    /// in between.
    pub group: usize,
    pub line: usize,
    /// Numbers of a vector.
    pub vector: usize,
    pub reading: Reading,
    /// Whether units of a plane add numbers up by shuffles.
    pub planes: bool,
}

impl Shelf {
    /// Vectors of a row that are held at once.
    fn vectors(&self) -> usize {
        self.span / self.vector
    }

    /// Units that add numbers up.
    fn team(&self, units: usize) -> Team {
        Team { units, planes: self.planes }
    }

    /// Rows whose vectors units deal out at once: a row that goes through a norm by itself, so that its squares meet.
    fn run(&self) -> usize {
        if self.reading.is_normalized() { 1 } else { self.tile }
    }
}

/// Norms of a cube's rows: sums of squares so far, and factors of heads.
#[derive(CubeType)]
pub(crate) struct Norms {
    /// This unit's share of the sum of squares of each of `tile` rows that go through a norm.
    squares: Array<f32>,
    /// Factors of heads, `[tile, H]` in shared memory.
    heads: Sequence<SharedMemory<f32>>,
}

/// Norms before the first column is read, by way of shared memory of `tile` times [`UNITS`] numbers: factors of heads are
/// known then.
#[cube]
pub(crate) fn norms<F: Float, X: Size>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F, X>,
    of: CubeRows,
    #[comptime] shelf: Shelf,
) -> Norms {
    let mut squares = Array::<f32>::new(comptime!(shelf.tile));
    #[unroll]
    for m in 0..comptime!(shelf.tile) {
        squares[m] = 0.0f32;
    }
    let mut found = Sequence::<SharedMemory<f32>>::new();
    if comptime!(shelf.reading.heads().is_some()) {
        let heads = comptime!(shelf.reading.heads().unwrap_or(1));
        found.push(head_factors::<F, X>(shared, x, of, heads, shelf));
    }
    Norms { squares, heads: found }
}

/// The factors of all heads, `[tile, heads]`: a power of two of units that stand side by side sums the squares of each.
#[cube]
fn head_factors<F: Float, X: Size>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F, X>,
    of: CubeRows,
    #[comptime] heads: usize,
    #[comptime] shelf: Shelf,
) -> SharedMemory<f32> {
    let (tile, vector) = comptime!((shelf.tile, shelf.vector));
    let ahead = comptime!(ahead(vector));
    let team = comptime!(UNITS / heads.next_power_of_two());
    let unit = UNIT_POS as usize;
    // Vectors of a head.
    let width = of.inner / comptime!(heads * vector);
    let (head, lane) = (unit / team, unit % team);
    let mut values = Array::<Vector<F, X>>::new(ahead);
    let mut sums = Array::<f32>::new(tile);
    #[unroll]
    for m in 0..tile {
        // Units behind the last head sum up that one, for nothing.
        let row = min(of.first + m, of.rows - 1) * (of.inner / vector);
        let from = row + min(head, comptime!(heads - 1)) * width;
        let mut squares = 0.0f32;
        for turn in 0..(width - 1) / comptime!(team * ahead) + 1 {
            #[unroll]
            for n in 0..ahead {
                let v = turn * comptime!(team * ahead) + comptime!(n * team) + lane;
                values[n] = x.x[from + min(v, width - 1)];
            }
            #[unroll]
            for n in 0..ahead {
                let v = turn * comptime!(team * ahead) + comptime!(n * team) + lane;
                let o = Vector::<f32, X>::cast_from(values[n]);
                #[unroll]
                for l in 0..vector {
                    squares += select(v < width, o[l] * o[l], 0.0f32);
                }
            }
        }
        sums[m] = squares;
    }
    over_team(&mut sums, shared, tile, false, comptime!(shelf.team(team)));
    let mut factors = SharedMemory::<f32>::new(comptime!(tile * heads));
    if lane == 0 && head < heads {
        #[unroll]
        for m in 0..tile {
            let mean = sums[m] / f32::cast_from((width * vector) as u32);
            factors[head + comptime!(m * heads)] = f32::inverse_sqrt(mean + x.epsilon);
        }
    }
    sync_cube();
    factors
}

/// The factors of `tile` rows, by way of shared memory of `tile` times [`UNITS`] numbers, when all columns have been
/// read: 1 but for a norm of whole rows.
#[cube]
pub(crate) fn row_factors<F: Float, X: Size>(
    shared: &mut SharedMemory<f32>,
    x: &InputArrays<F, X>,
    norms: &Norms,
    inner: usize,
    #[comptime] shelf: Shelf,
) -> Array<f32> {
    let tile = comptime!(shelf.tile);
    let mut factors = Array::<f32>::new(tile);
    if comptime!(shelf.reading.is_normalized()) {
        #[unroll]
        for m in 0..tile {
            factors[m] = norms.squares[m];
        }
        over_team(&mut factors, shared, tile, false, comptime!(shelf.team(UNITS)));
        #[unroll]
        for m in 0..tile {
            factors[m] = f32::inverse_sqrt(factors[m] / f32::cast_from(inner as u32) + x.epsilon);
        }
    } else {
        #[unroll]
        for m in 0..tile {
            factors[m] = 1.0f32;
        }
    }
    factors
}

/// Fills shared memory with the held columns of this cube's rows, and zeros past the ends, but for factors of whole rows.
/// The first cube keeps s.
#[cube]
pub(crate) fn load<F: Float, X: Size>(
    shared: &mut SharedMemory<f32>,
    norms: &mut Norms,
    x: &InputArrays<F, X>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    of: CubeRows,
    held: Held,
    #[comptime] shelf: Shelf,
) {
    let ahead = comptime!(ahead(shelf.vector));
    let all = comptime!(shelf.run() * shelf.vectors());
    // Of one row, what is behind the last column is not read.
    let end = if comptime!(shelf.run() == 1) {
        (held.count - 1) / comptime!(shelf.vector) + 1
    } else {
        all.runtime()
    };
    #[unroll]
    for run in 0..comptime!(shelf.tile / shelf.run()) {
        #[unroll]
        for turn in 0..comptime!(all.div_ceil(UNITS * ahead)) {
            if comptime!(turn * UNITS * ahead) < end {
                load_vectors::<F, X>(shared, norms, x, sum, of, held, run, turn, shelf);
            }
        }
    }
}

/// As [`load`], of the vectors of one turn, of rows from `run` on.
#[cube]
fn load_vectors<F: Float, X: Size>(
    shared: &mut SharedMemory<f32>,
    norms: &mut Norms,
    x: &InputArrays<F, X>,
    sum: &mut Sequence<Array<Vector<F, X>>>,
    of: CubeRows,
    held: Held,
    #[comptime] run: usize,
    #[comptime] turn: usize,
    #[comptime] shelf: Shelf,
) {
    let (ahead, vector, vectors) = comptime!((ahead(shelf.vector), shelf.vector, shelf.vectors()));
    let mut own = Array::<Vector<F, X>>::new(ahead);
    let mut beside = Array::<Vector<F, X>>::new(ahead);
    let mut weight = Array::<Vector<F, X>>::new(ahead);
    #[unroll]
    for n in 0..ahead {
        let at = UNIT_POS as usize + comptime!((turn * ahead + n) * UNITS);
        let m = min(of.first + comptime!(run).runtime() + at / vectors, of.rows - 1);
        let v = min(held.first / vector + at % vectors, of.inner / vector - 1);
        request::<F, X>(&mut own, &mut beside, &mut weight, x, m, v, of.inner, n, shelf);
    }
    #[unroll]
    for n in 0..ahead {
        let at = UNIT_POS as usize + comptime!((turn * ahead + n) * UNITS);
        let row = comptime!(run).runtime() + at / vectors;
        let k = held.first + at % vectors * vector;
        let there = of.first + row < of.rows && k < of.inner;
        if at < comptime!(shelf.run() * vectors) {
            let (x_v, beside_v, weight_v) = (
                Vector::<f32, X>::cast_from(own[n]),
                Vector::<f32, X>::cast_from(beside[n]),
                Vector::<f32, X>::cast_from(weight[n]),
            );
            let mut kept = Vector::<f32, X>::empty();
            let from = at % vectors * vector;
            let mut factor = 1.0f32;
            if comptime!(shelf.reading.heads().is_some()) {
                let heads = comptime!(shelf.reading.heads().unwrap_or(1));
                let head = min(k, of.inner - 1) / (of.inner / heads);
                let row = min(row, comptime!(shelf.tile - 1));
                factor = norms.heads.index(0usize)[row * heads + head];
            }
            #[unroll]
            for l in 0..vector {
                let s = summed::<F>(x_v[l], beside_v[l], shelf.reading);
                if comptime!(shelf.reading.is_normalized()) {
                    norms.squares[run] += select(there, s * s, 0.0f32);
                    kept[l] = s;
                }
                let value = made(s, beside_v[l], weight_v[l], factor, shelf.reading);
                let k = from + l;
                let to = k / comptime!(shelf.group) * comptime!(shelf.line)
                    + row * comptime!(shelf.group)
                    + k % comptime!(shelf.group);
                shared[to] = select(there, value, 0.0f32);
            }
            if comptime!(shelf.reading == Reading::Normalized { added: true }) {
                if CUBE_POS_X == 0 && there {
                    let at = ((of.first + row) * of.inner + k) / vector;
                    sum.index_mut(0usize)[at] = Vector::<F, X>::cast_from(kept);
                }
            }
        }
    }
}

/// s where something is added, else x.
#[cube]
fn summed<F: Float>(x: f32, beside: f32, #[comptime] reading: Reading) -> f32 {
    if comptime!(reading == Reading::Normalized { added: true }) {
        f32::cast_from(F::cast_from(x + beside))
    } else {
        x
    }
}

/// A number of the product's rows, but for the factor of a whole row.
#[cube]
fn made(x: f32, beside: f32, weight: f32, factor: f32, #[comptime] reading: Reading) -> f32 {
    match comptime!(reading) {
        Reading::Rows => x,
        Reading::Gated(activation) => activate(x, activation) * beside,
        Reading::Normalized { .. } => x * weight,
        Reading::Heads { gate, .. } => {
            let value = x * factor * weight;
            match comptime!(gate) {
                Some(activation) => value * activate(beside, activation),
                None => value,
            }
        }
    }
}

/// Requests vector `v` of row `m`, and what stands beside it, as number `n`.
#[cube]
fn request<F: Float, X: Size>(
    own: &mut Array<Vector<F, X>>,
    beside: &mut Array<Vector<F, X>>,
    weight: &mut Array<Vector<F, X>>,
    x: &InputArrays<F, X>,
    m: usize,
    v: usize,
    inner: usize,
    #[comptime] n: usize,
    #[comptime] shelf: Shelf,
) {
    let across = inner / comptime!(shelf.vector);
    match comptime!(shelf.reading) {
        Reading::Rows => {
            own[n] = x.x[m * across + v];
        }
        Reading::Gated(_) => {
            own[n] = x.x[2 * m * across + v];
            beside[n] = x.x[(2 * m + 1) * across + v];
        }
        Reading::Normalized { added } => {
            own[n] = x.x[m * across + v];
            weight[n] = x.weight.index(0usize)[v];
            if comptime!(added) {
                beside[n] = x.beside.index(0usize)[m * across + v];
            }
        }
        Reading::Heads { heads, gate } => {
            own[n] = x.x[m * across + v];
            weight[n] = x.weight.index(0usize)[v % (across / heads)];
            if comptime!(gate.is_some()) {
                beside[n] = x.beside.index(0usize)[m * across + v];
            }
        }
    }
}
