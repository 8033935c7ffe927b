//! Some columns of one head's state, token by token: the arithmetic of the recurrences.
//!
//! Columns of a state do not meet in any recurrence, so that [`TILE`] of them at a time stay in the first
//! cache whatever the state's size is. Every rule is one form, with P the state before the token:
//! ```text
//! z = a P                          a: rows that read P, with the decay where they read after it
//! S = d P + k^T u + b^T z          d: e^g; without b the retrieved value z is in u = beta (v - z) alone
//! o = q S, or q P
//! ```
//! Backwards, with D the gradient of S:
//! ```text
//! D += q^T do         dq = do P^T d + (u do) k + (z do) b
//! du = k D            dk = u D^T           db = z D^T
//! w  = -beta du, or dz = b D               da = w P^T
//! dP = d D + a^T w    dd = rows of P D
//! ```

use super::super::real::{LANES, Machine, Real, add_times, times};

/// Columns of a tile.
pub(super) const TILE: usize = 2 * LANES;

/// One row of a tile.
pub(super) type Row<R> = [R; TILE];

/// Which rule of the module's form it is.
pub(super) trait Rule {
    /// Whether a row besides q reads the state.
    const RETRIEVES: bool;
    /// Whether the retrieved value is written under a row of its own.
    const LOW_RANK: bool;
    /// Whether the output is taken from the state before the token.
    const BEFORE: bool;
}

pub(super) struct Linear;
pub(super) struct LinearBefore;
pub(super) struct Delta;
pub(super) struct LowRank;

impl Rule for Linear {
    const RETRIEVES: bool = false;
    const LOW_RANK: bool = false;
    const BEFORE: bool = false;
}

impl Rule for LinearBefore {
    const RETRIEVES: bool = false;
    const LOW_RANK: bool = false;
    const BEFORE: bool = true;
}

impl Rule for Delta {
    const RETRIEVES: bool = true;
    const LOW_RANK: bool = false;
    const BEFORE: bool = false;
}

impl Rule for LowRank {
    const RETRIEVES: bool = true;
    const LOW_RANK: bool = true;
    const BEFORE: bool = false;
}

/// Rows of a token that multiply the rows of the state, K numbers each.
#[derive(Clone, Copy)]
pub(super) struct Token<'a, R> {
    /// d.
    pub(super) kept: &'a [R],
    /// Empty where no row besides q reads.
    pub(super) a: &'a [R],
    pub(super) q: &'a [R],
    pub(super) k: &'a [R],
    /// Empty unless the transition is of low rank.
    pub(super) b: &'a [R],
    /// 1 where there is none.
    pub(super) beta: R,
    /// Whether `a` has the decay in it.
    pub(super) a_after_decay: bool,
}

/// Intermediate results of a token of a tile.
#[derive(Clone, Copy)]
pub(super) struct Written<R> {
    /// z.
    pub(super) retrieved: Row<R>,
    /// v - z, which beta multiplies.
    pub(super) error: Row<R>,
    /// u.
    pub(super) update: Row<R>,
}

impl<R: Real> Written<R> {
    pub(super) const NONE: Self =
        Self { retrieved: [R::ZERO; TILE], error: [R::ZERO; TILE], update: [R::ZERO; TILE] };
}

/// `sum_i x_i rows_i`.
#[inline(always)]
fn read<M: Machine, R: Real>(x: &[R], rows: &[Row<R>]) -> Row<R> {
    let mut sum = [R::ZERO; TILE];
    for (&x, row) in x.iter().zip(rows) {
        add_times::<M, R, TILE>(&mut sum, x, row);
    }
    sum
}

/// Sums of products over the columns of a tile, as many as there are lanes.
#[inline(always)]
fn sums_by_lane<M: Machine, R: Real>(x: &Row<R>, y: &Row<R>) -> [R; LANES] {
    let mut sums = [R::ZERO; LANES];
    for l in 0..LANES {
        sums[l] = M::mul_add(x[l], y[l], sums[l]);
    }
    for l in 0..LANES {
        sums[l] = M::mul_add(x[l + LANES], y[l + LANES], sums[l]);
    }
    sums
}

/// From the state before a token to the one after it, with the token's output.
#[inline(always)]
pub(super) fn advance<M: Machine, R: Real, U: Rule>(
    before: &[Row<R>],
    after: &mut [Row<R>],
    token: Token<'_, R>,
    v: &Row<R>,
) -> (Row<R>, Written<R>) {
    let width = before.len();
    let (after, kept) = (&mut after[..width], &token.kept[..width]);
    let (q, k) = (&token.q[..width], &token.k[..width]);
    let mut written = Written { retrieved: [R::ZERO; TILE], error: *v, update: *v };
    if U::RETRIEVES {
        written.retrieved = read::<M, R>(token.a, before);
    }
    if U::RETRIEVES && !U::LOW_RANK {
        for w in 0..TILE {
            written.error[w] = v[w] - written.retrieved[w];
        }
        written.update = times(token.beta, &written.error);
    }
    let mut o = [R::ZERO; TILE];
    for i in 0..width {
        let old = before[i];
        let mut s = times(kept[i], &old);
        add_times::<M, R, TILE>(&mut s, k[i], &written.update);
        if U::LOW_RANK {
            add_times::<M, R, TILE>(&mut s, token.b[i], &written.retrieved);
        }
        add_times::<M, R, TILE>(&mut o, q[i], if U::BEFORE { &old } else { &s });
        after[i] = s;
    }
    (o, written)
}

/// Partial sums over the columns of a tile, one row for each row of the state.
pub(super) struct Partial<R> {
    /// Of `P do`.
    pub(super) read: Vec<[R; LANES]>,
    /// Of `D u`.
    pub(super) written: Vec<[R; LANES]>,
    /// Of `D z`.
    pub(super) retrieved: Vec<[R; LANES]>,
    /// Of `P w`.
    pub(super) erased: Vec<[R; LANES]>,
    /// Of `P D`.
    pub(super) kept: Vec<[R; LANES]>,
    /// Of all rows together: the gradient of a log decay that they share.
    pub(super) decay: [R; LANES],
}

impl<R: Real> Partial<R> {
    pub(super) fn new(width: usize) -> Self {
        let new = || vec![[R::ZERO; LANES]; width];
        Self {
            read: new(),
            written: new(),
            retrieved: new(),
            erased: new(),
            kept: new(),
            decay: [R::ZERO; LANES],
        }
    }
}

/// Back through one token: `d` is the gradient of the state after it, and then of the one before it.
/// Gives du, and w.
#[inline(always)]
pub(super) fn reverse<M: Machine, R: Real, U: Rule>(
    before: &[Row<R>],
    d: &mut [Row<R>],
    token: Token<'_, R>,
    (d_o, written): (&Row<R>, &Written<R>),
    partial: &mut Partial<R>,
) -> (Row<R>, Row<R>) {
    let width = before.len();
    let (d, kept) = (&mut d[..width], &token.kept[..width]);
    let (q, k) = (&token.q[..width], &token.k[..width]);
    let [reads, writes] = [&mut partial.read[..width], &mut partial.written[..width]];
    let [keeps, retrievals] = [&mut partial.kept[..width], &mut partial.retrieved[..width]];
    let (mut d_update, mut d_retrieved) = ([R::ZERO; TILE], [R::ZERO; TILE]);
    // Sums over rows also keep the compiler from computing several rows at once, a column at a time.
    let mut decay = [R::ZERO; LANES];
    for i in 0..width {
        // Rows are taken out and put back whole: the compiler cannot know that they are apart.
        let (p, mut s) = (before[i], d[i]);
        let (kept, q, k) = (kept[i], q[i], k[i]);
        if !U::BEFORE {
            add_times::<M, R, TILE>(&mut s, q, d_o);
        }
        add_times::<M, R, TILE>(&mut d_update, k, &s);
        let read = sums_by_lane::<M, R>(&p, d_o);
        let write = sums_by_lane::<M, R>(&s, &written.update);
        let keep = sums_by_lane::<M, R>(&p, &s);
        let mut retrieved = [R::ZERO; LANES];
        if U::LOW_RANK {
            add_times::<M, R, TILE>(&mut d_retrieved, token.b[i], &s);
            retrieved = sums_by_lane::<M, R>(&s, &written.retrieved);
        }
        if !U::RETRIEVES {
            s = times(kept, &s);
        }
        if U::BEFORE {
            add_times::<M, R, TILE>(&mut s, q, d_o);
        }
        for l in 0..LANES {
            decay[l] = M::mul_add(kept, keep[l], decay[l]);
        }
        (d[i], reads[i], writes[i], keeps[i]) = (s, read, write, keep);
        if U::LOW_RANK {
            retrievals[i] = retrieved;
        }
    }
    if U::RETRIEVES {
        if !U::LOW_RANK {
            d_retrieved = times(-token.beta, &d_update);
        }
        let (a, erased) = (&token.a[..width], &mut partial.erased[..width]);
        let decays = if token.a_after_decay { R::ONE } else { R::ZERO };
        for i in 0..width {
            let (p, mut s) = (before[i], d[i]);
            let (kept, by, share) = (kept[i], a[i], decays * a[i]);
            let erase = sums_by_lane::<M, R>(&p, &d_retrieved);
            s = times(kept, &s);
            add_times::<M, R, TILE>(&mut s, by, &d_retrieved);
            for l in 0..LANES {
                decay[l] = M::mul_add(share, erase[l], decay[l]);
            }
            (d[i], erased[i]) = (s, erase);
        }
    }
    partial.decay = decay;
    (d_update, d_retrieved)
}

/// The sum of each row of partial sums, in a fixed order.
#[inline(always)]
pub(super) fn totals<R: Real>(rows: &[[R; LANES]], sums: &mut [R]) {
    const SOME: usize = 16;
    let mut four = [[R::ZERO; 4]; SOME];
    for (rows, sums) in rows.chunks(SOME).zip(sums.chunks_mut(SOME)) {
        for (four, row) in four.iter_mut().zip(rows) {
            let mut eight = [R::ZERO; 8];
            for i in 0..8 {
                eight[i] = row[i] + row[i + 8];
            }
            for i in 0..4 {
                four[i] = eight[i] + eight[i + 4];
            }
        }
        for (sum, four) in sums.iter_mut().zip(&four) {
            *sum = (four[0] + four[2]) + (four[1] + four[3]);
        }
    }
}
