//! Softmax of rows of scores, forward and backward, one launch each; causal where asked for.
//! ```text
//! y_ij  = e^{x_ij - m_i} / sum_j e^{x_ij - m_i}     m_i = max_j x_ij, over the keys j that query i sees
//! y_ij  = 0                                         for the others, whatever x_ij is
//! dx_ij = y_ij (dy_ij - sum_j dy_ij y_ij)
//!
//! x, y: [.., T, S]  f32     causal: query t of T sees key j if 0 <= S - T + t - j < window
//!
//! Work:   a team of 8, 32 or 256 units a row, which its registers hold. Sums and maxima of a team meet through
//!         plane shuffles on devices whose planes have 32 units, else in shared memory.
//! Cost:   one read of what is seen, one write of the whole row. Backward, one read of both.
//! Edges:  S up to 8192. All sizes are run-time values. A kernel is compiled for a team of 8, 32 or 256 units, a
//!         power of two of vectors that each has of a row, and their width.
//! ```
//! Tensors begin at multiples of 16 bytes.

use super::column_sums::{check_matrix, grid, vector_width};
use super::team::{Team, over_team};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{F32, Refusal};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most numbers of a row.
pub const WIDEST: usize = 8192;
/// Units that may share a row: few, so that rows of many lengths share a kernel.
const TEAMS: [usize; 3] = [8, 32, UNITS];
/// Vectors of a unit, while teams are smaller than cubes.
const VECTORS: usize = 8;
/// Numbers below which they are read one by one, as those of a token that is decoded, whose rows grow by one.
const FEW: usize = 1 << 16;
/// Stands for a score that is not seen: below all others, and finite.
const LOWEST: f32 = -3.0e38;

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// All.
    All,
    /// The last as many as there are queries end with the query itself; it sees none after it, and of those before
    /// it so many that with itself they are no more than the window.
    Causal {
        /// At least 1.
        window: usize,
    },
}

/// Sizes of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Rows in all: T of each head of each sequence.
    pub count: usize,
    /// T.
    pub queries: usize,
    /// S.
    pub keys: usize,
    /// Which of them count.
    pub seen: Seen,
}

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Numbers of a vector.
    width: usize,
    /// Who shares a row.
    team: Team,
    /// Vectors of a unit.
    turns: usize,
    causal: bool,
}

impl Rows {
    fn check<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<(), Refusal> {
        check_matrix(client, self.count, self.keys)?;
        if self.keys > WIDEST {
            return Err(Refusal::Width { name: "S", got: self.keys, most: WIDEST });
        }
        let too_large = |what, got, most| Err(Refusal::TooLarge { what, got, most });
        match self.seen {
            Seen::Causal { .. } if self.queries > self.keys => {
                too_large("queries that see themselves", self.queries, self.keys)
            }
            Seen::Causal { window: 0 } => too_large("keys outside of a window", 1, 0),
            _ => Ok(()),
        }
    }

    fn form<R: Runtime>(&self, client: &ComputeClient<R>) -> Form {
        let width = match self.numbers() < FEW {
            true => 1,
            false => vector_width(client, self.keys),
        };
        let vectors = self.keys / width;
        let fits = |units: &usize| vectors <= VECTORS * units;
        let units = TEAMS.into_iter().find(fits).unwrap_or(UNITS);
        Form {
            source: SOURCE,
            width,
            team: Team::of(client, units),
            turns: vectors.div_ceil(units).next_power_of_two(),
            causal: self.seen != Seen::All,
        }
    }

    fn sizes<R: Runtime>(&self) -> SizesLaunch<R> {
        let window = match self.seen {
            Seen::All => self.keys,
            Seen::Causal { window } => window.min(self.keys),
        };
        SizesLaunch::new(self.count as u32, self.queries as u32, self.keys as u32, window as u32)
    }

    fn numbers(&self) -> usize {
        self.count * self.keys
    }
}

/// Shares, `[.., T, S]`, of scores `x`.
///
/// # Errors
/// [`Refusal`] names what is wrong; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    rows: Rows,
    x: &Handle,
) -> Result<Buffer, Refusal> {
    rows.check(client)?;
    let form = rows.form(client);
    let cubes = grid(client, rows.count.div_ceil(form.team.in_a_cube()))?;
    let y = buffer(client, &[rows.count, rows.keys], F32);
    // SAFETY: rows end at `count`, vectors at S, and the caller promises the sizes of `rows`.
    #[allow(unsafe_code)]
    unsafe {
        shares::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(x, rows.numbers()),
            whole(&y),
            rows.sizes(),
            form,
            form.width,
        );
    }
    Ok(y)
}

/// The gradient of the scores, `[.., T, S]`, from shares `y` and their gradient.
///
/// # Errors
/// As [`forward`].
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    rows: Rows,
    y: &Handle,
    d_y: &Handle,
) -> Result<Buffer, Refusal> {
    rows.check(client)?;
    let form = rows.form(client);
    let cubes = grid(client, rows.count.div_ceil(form.team.in_a_cube()))?;
    let d_x = buffer(client, &[rows.count, rows.keys], F32);
    // SAFETY: as in `forward`.
    #[allow(unsafe_code)]
    unsafe {
        differentiate::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(y, rows.numbers()),
            array(d_y, rows.numbers()),
            whole(&d_x),
            rows.sizes(),
            form,
            form.width,
        );
    }
    Ok(d_x)
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    queries: u32,
    keys: u32,
    window: u32,
}

/// A unit's place in a row.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The row's first vector.
    start: usize,
    /// The unit's first vector in the row; its others are a team apart.
    own: usize,
    /// Vectors of a row.
    vectors: usize,
    /// The first number that is seen, and the one behind the last.
    from: usize,
    to: usize,
    /// Whether there is such a row: units past the last one repeat that, since none may miss a barrier.
    stored: bool,
}

#[cube]
fn place(sizes: Sizes, #[comptime] form: Form) -> Place {
    let unit = UNIT_POS as usize;
    let row = CUBE_POS * comptime!(form.team.in_a_cube()) + unit / comptime!(form.team.units);
    let stored = row < sizes.rows as usize;
    let row = min(row, sizes.rows as usize - 1);
    let keys = sizes.keys as usize;
    let vectors = keys / comptime!(form.width);
    let mut from = 0usize;
    let mut to = keys;
    if comptime!(form.causal) {
        let queries = sizes.queries as usize;
        to = keys - queries + row % queries + 1;
        from = to - min(to, sizes.window as usize);
    }
    let own = unit % comptime!(form.team.units);
    Place { start: row * vectors, own, vectors, from, to, stored }
}

/// A unit's numbers of a row; `otherwise` where they are not seen, or there are none.
#[cube]
fn load<N: Size>(
    x: &Array<Vector<f32, N>>,
    at: Place,
    otherwise: f32,
    #[comptime] form: Form,
) -> Array<Vector<f32, N>> {
    let width = comptime!(form.width);
    let mut held = Array::<Vector<f32, N>>::new(comptime!(form.turns));
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        let vector = at.own + comptime!(turn * form.team.units);
        let mut value = Vector::<f32, N>::new(otherwise);
        if vector * width < at.to && (vector + 1) * width > at.from {
            value = x[at.start + vector];
        }
        if comptime!(form.causal) {
            #[unroll]
            for l in 0..width {
                let j = vector * width + l;
                let seen = j >= at.from && j < at.to;
                value[l] = select(seen, value[l], otherwise);
            }
        }
        held[turn] = value;
    }
    held
}

#[cube]
fn store<N: Size>(
    y: &mut Array<Vector<f32, N>>,
    held: &Array<Vector<f32, N>>,
    at: Place,
    #[comptime] form: Form,
) {
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        let vector = at.own + comptime!(turn * form.team.units);
        if at.stored && vector < at.vectors {
            y[at.start + vector] = held[turn];
        }
    }
}

/// The sum over a team, or the `largest`, of its units' numbers. Every unit of the cube has to come here.
#[cube]
fn of_team(
    own: f32,
    scratch: &mut SharedMemory<f32>,
    #[comptime] largest: bool,
    #[comptime] form: Form,
) -> f32 {
    let mut value = Array::<f32>::new(1usize);
    value[0] = own;
    over_team(&mut value, scratch, 1usize, largest, comptime!(form.team));
    value[0]
}

/// The kernel of [`forward`].
#[cube(launch_unchecked)]
fn shares<N: Size>(
    x: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<f32, N>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(N)] _width: usize,
) {
    let width = comptime!(form.width);
    let at = place(sizes, form);
    let mut held = load::<N>(x, at, f32::new(LOWEST), form);
    let mut scratch = SharedMemory::<f32>::new(comptime!(form.team.scratch(1)));

    let mut most = f32::new(LOWEST);
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        let value = held[turn];
        #[unroll]
        for l in 0..width {
            most = max(most, value[l]);
        }
    }
    let most = of_team(most, &mut scratch, true, form);

    let mut sum = 0.0f32;
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        let vector = at.own + comptime!(turn * form.team.units);
        let mut powers = Vector::exp(held[turn] - Vector::<f32, N>::new(most));
        #[unroll]
        for l in 0..width {
            let j = vector * width + l;
            powers[l] = select(j >= at.from && j < at.to, powers[l], 0.0f32);
            sum += powers[l];
        }
        held[turn] = powers;
    }
    let sum = of_team(sum, &mut scratch, false, form);

    let scale = Vector::<f32, N>::new(1.0 / sum);
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        held[turn] *= scale;
    }
    store::<N>(y, &held, at, form);
}

/// The kernel of [`backward`].
#[cube(launch_unchecked)]
fn differentiate<N: Size>(
    y: &Array<Vector<f32, N>>,
    d_y: &Array<Vector<f32, N>>,
    d_x: &mut Array<Vector<f32, N>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(N)] _width: usize,
) {
    let at = place(sizes, form);
    let shares = load::<N>(y, at, 0.0f32, form);
    let mut held = load::<N>(d_y, at, 0.0f32, form);
    let mut scratch = SharedMemory::<f32>::new(comptime!(form.team.scratch(1)));

    let mut sum = 0.0f32;
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        let product = shares[turn] * held[turn];
        #[unroll]
        for l in 0..comptime!(form.width) {
            sum += product[l];
        }
    }
    let mean = Vector::<f32, N>::new(of_team(sum, &mut scratch, false, form));
    #[unroll]
    for turn in 0..comptime!(form.turns) {
        held[turn] = shares[turn] * (held[turn] - mean);
    }
    store::<N>(d_x, &held, at, form);
}

#[cfg(test)]
#[path = "softmax_tests.rs"]
mod tests;
