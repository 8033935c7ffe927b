//! The arithmetic of LSTM and sLSTM: one token of some cells, and the product with the recurrent weights.
//! ```text
//! LSTM
//! keep, write = sigmoid(f), sigmoid(i)
//! c'          = keep c + write tanh(z)             h = sigmoid(o) tanh(c')
//! sLSTM
//! l, m'       = ln sigmoid(f), max(l + m, i)       keep, write = e^{l + (m - m')}, e^{i - m'}
//! c', n'      = keep c + write tanh(z), keep n + write         h = sigmoid(o) c' / n'
//! ```

use super::super::real::{Block, LANES, Machine, Real, load, store};
use crate::ops::fused::LstmCell;

/// i, f, z and o.
pub(super) const GATES: usize = 4;
/// Numbers of a cell that its backward pass needs: keep, write, tanh(z), sigmoid(o), sigmoid(-f), c, and n or, of LSTM,
/// tanh(c).
pub(super) const SAVED: usize = 7;

/// `count` numbers of each of some cells.
type Blocks<R, const N: usize> = [Block<R>; N];

/// Cells after a token.
pub(super) struct Next<R> {
    pub(super) h: Block<R>,
    pub(super) m: Block<R>,
    /// c, and n or tanh(c), are the last two.
    pub(super) saved: Blocks<R, SAVED>,
}

/// Cells after a token, from its gates and the c, n and m before it.
#[inline(always)]
pub(super) fn after<R: Real>(
    cell: LstmCell,
    gates: &Blocks<R, GATES>,
    before: &Blocks<R, 3>,
) -> Next<R> {
    match cell {
        LstmCell::Sigmoid => after_sigmoid(gates, before),
        LstmCell::Exponential => after_exponential(gates, before),
    }
}

#[inline(always)]
fn after_sigmoid<R: Real>(gates: &Blocks<R, GATES>, [c, _, m]: &Blocks<R, 3>) -> Next<R> {
    let zeros = [R::ZERO; LANES];
    let mut next = Next { h: zeros, m: *m, saved: [zeros; SAVED] };
    for w in 0..LANES {
        let (i, f) = (gates[0][w], gates[1][w]);
        let (keep, write) = (f.sigmoid(), i.sigmoid());
        let (z, open) = (gates[2][w].tanh(), gates[3][w].sigmoid());
        let c = keep * c[w] + write * z;
        let read = c.tanh();
        next.h[w] = open * read;
        let saved = [keep, write, z, open, (-f).sigmoid(), c, read];
        for j in 0..SAVED {
            next.saved[j][w] = saved[j];
        }
    }
    next
}

#[inline(always)]
fn after_exponential<R: Real>(gates: &Blocks<R, GATES>, [c, n, m]: &Blocks<R, 3>) -> Next<R> {
    let zeros = [R::ZERO; LANES];
    let mut next = Next { h: zeros, m: zeros, saved: [zeros; SAVED] };
    for w in 0..LANES {
        let (i, f) = (gates[0][w], gates[1][w]);
        let log_keep = f.log_sigmoid();
        let largest = (log_keep + m[w]).larger(i);
        // In this order: the difference of two m is exact where they are close.
        let keep = (log_keep + (m[w] - largest)).exp();
        let write = (i - largest).exp();
        let (z, open) = (gates[2][w].tanh(), gates[3][w].sigmoid());
        let (c, n) = (keep * c[w] + write * z, keep * n[w] + write);
        next.h[w] = open * c / n;
        next.m[w] = largest;
        let saved = [keep, write, z, open, (-f).sigmoid(), c, n];
        for j in 0..SAVED {
            next.saved[j][w] = saved[j];
        }
    }
    next
}

/// Gradients before a token.
pub(super) struct Previous<R> {
    /// Of its gates.
    pub(super) gates: Blocks<R, GATES>,
    pub(super) c: Block<R>,
    pub(super) n: Block<R>,
}

/// Gradients before a token, from what was saved of it, the c and n before it, and the gradients of the h, c and n
/// after it.
#[inline(always)]
pub(super) fn before<R: Real>(
    cell: LstmCell,
    saved: &Blocks<R, SAVED>,
    cells: &Blocks<R, 2>,
    gradients: &Blocks<R, 3>,
) -> Previous<R> {
    match cell {
        LstmCell::Sigmoid => before_sigmoid(saved, cells, gradients),
        LstmCell::Exponential => before_exponential(saved, cells, gradients),
    }
}

#[inline(always)]
fn before_sigmoid<R: Real>(
    saved: &Blocks<R, SAVED>,
    [c_before, _]: &Blocks<R, 2>,
    [d_h, d_c, _]: &Blocks<R, 3>,
) -> Previous<R> {
    let zeros = [R::ZERO; LANES];
    let mut previous = Previous { gates: [zeros; GATES], c: zeros, n: zeros };
    let [keeps, writes, values, opens, slopes, _, reads] = saved;
    for w in 0..LANES {
        let (keep, write, z) = (keeps[w], writes[w], values[w]);
        let (open, slope, read) = (opens[w], slopes[w], reads[w]);
        let d_c = d_c[w] + d_h[w] * open * (R::ONE - read * read);
        previous.gates[0][w] = d_c * z * write * (R::ONE - write);
        previous.gates[1][w] = d_c * c_before[w] * keep * slope;
        previous.gates[2][w] = d_c * write * (R::ONE - z * z);
        previous.gates[3][w] = d_h[w] * read * open * (R::ONE - open);
        previous.c[w] = d_c * keep;
    }
    previous
}

#[inline(always)]
fn before_exponential<R: Real>(
    saved: &Blocks<R, SAVED>,
    [c_before, n_before]: &Blocks<R, 2>,
    [d_h, d_c, d_n]: &Blocks<R, 3>,
) -> Previous<R> {
    let zeros = [R::ZERO; LANES];
    let mut previous = Previous { gates: [zeros; GATES], c: zeros, n: zeros };
    let [keeps, writes, values, opens, slopes, cells, normalizers] = saved;
    for w in 0..LANES {
        let (keep, write, z) = (keeps[w], writes[w], values[w]);
        let (open, slope, c, n) = (opens[w], slopes[w], cells[w], normalizers[w]);
        let (ratio, over) = (c / n, d_h[w] * open / n);
        let (d_c, d_n) = (d_c[w] + over, d_n[w] - over * ratio);
        previous.gates[0][w] = (d_c * z + d_n) * write;
        previous.gates[1][w] = (d_c * c_before[w] + d_n * n_before[w]) * keep * slope;
        previous.gates[2][w] = d_c * write * (R::ONE - z * z);
        previous.gates[3][w] = d_h[w] * ratio * open * (R::ONE - open);
        (previous.c[w], previous.n[w]) = (d_c * keep, d_n * keep);
    }
    previous
}

/// `to += from weights`, for S rows: `from: [S, inner]`, `weights: [inner, columns]`, `to: [S, columns]`.
/// `columns` is a multiple of [`LANES`].
#[inline(always)]
pub(super) fn multiply<M: Machine, R: Real, const S: usize>(
    to: &mut [R],
    from: &[R],
    weights: &[R],
    [inner, columns]: [usize; 2],
) {
    for first in (0..columns).step_by(LANES) {
        let mut sums: Blocks<R, S> =
            std::array::from_fn(|s| load(&to[s * columns..][..columns], 0, columns, first));
        for (e, row) in weights.chunks_exact(columns).enumerate() {
            let row = load(row, 0, columns, first);
            for s in 0..S {
                let by = from[s * inner + e];
                for w in 0..LANES {
                    sums[s][w] = M::mul_add(by, row[w], sums[s][w]);
                }
            }
        }
        for s in 0..S {
            store(&mut to[s * columns..][..columns], 0, columns, first, &sums[s]);
        }
    }
}
