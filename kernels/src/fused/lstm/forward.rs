//! The kernel of a forward pass.

use super::arguments::{Form, GATES, LOWEST, Operands, ResultArrays, SAVED, Sizes};
use super::cube::{
    Own, Shared, Terms, accumulate, column, has_column, held, number_or, own, row, tanh,
};
use crate::pointwise::{sigmoid, softplus};
use cubecl::prelude::*;

/// x of one token, for each of a unit's columns and sequences.
#[cube]
fn fetch_x(ahead: &mut Array<f32>, x: &Array<f32>, own: Own, t: usize, #[comptime] form: Form) {
    let together = comptime!(form.together);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        #[unroll]
        for s in 0..together {
            let sequence = min(own.first + s, own.sizes.batch as usize - 1);
            let at = row(own, sequence, t) * comptime!(GATES * form.width);
            ahead[comptime!(turn * together + s)] = x[at + column(turn, form)];
        }
    }
}

/// The weights of a unit's column: `x + h R` has a column of R for each.
#[cube]
fn terms(head: usize, #[comptime] turn: usize, #[comptime] form: Form) -> Terms {
    let columns = comptime!(GATES * form.width);
    let weight = head * comptime!(GATES * form.width * form.width) + column(turn, form);
    Terms { number: 0usize.runtime(), weight, stride: columns.runtime() }
}

/// `x + h R`: the gates of a token, before their functions.
#[cube]
fn linear_gates(
    gates: &mut SharedMemory<f32>,
    ahead: &Array<f32>,
    hidden: &SharedMemory<f32>,
    part: &Array<f32>,
    r: &Array<f32>,
    #[comptime] form: Form,
) {
    let together = comptime!(form.together);
    let shared = comptime!(Shared { form, apart: form.width });
    let mut sums = Array::<f32>::new(together);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        #[unroll]
        for s in 0..together {
            sums[s] = ahead[comptime!(turn * form.together + s)];
        }
        accumulate(&mut sums, hidden, part, r, terms(CUBE_POS_Y as usize, turn, form), shared);
        if has_column(turn, form) {
            #[unroll]
            for s in 0..together {
                gates[comptime!(s * GATES * form.width) + column(turn, form)] = sums[s];
            }
        }
    }
}

/// The kernel of [`forward`].
#[cube(launch_unchecked)]
pub(super) fn lstm_forward(
    x: &Operands,
    to: &mut ResultArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let width = comptime!(form.width);
    let own = own(sizes, form);
    let tokens = sizes.tokens as usize;
    let mut hidden = SharedMemory::<f32>::new(comptime!(form.cells()));
    let mut gates = SharedMemory::<f32>::new(comptime!(form.gates()));
    let part = held(&x.r, terms(own.head, 0usize, form), form);
    let mut h = number_or(&x.h, own.at, 0.0f32, form.state);
    let mut c = number_or(&x.c, own.at, 0.0f32, form.state);
    let scaled = comptime!(form.state && form.scaled());
    let mut n = number_or(&x.n, own.at, 0.0f32, scaled);
    let mut m = number_or(&x.m, own.at, comptime!(LOWEST).runtime(), scaled);
    if own.cell {
        hidden[UNIT_POS as usize] = h;
    }
    let mut ahead = Array::<f32>::new(comptime!(form.turns() * form.together));
    fetch_x(&mut ahead, &x.x, own, 0usize.runtime(), form);
    sync_cube();
    for t in 0..tokens {
        linear_gates(&mut gates, &ahead, &hidden, &part, &x.r, form);
        fetch_x(&mut ahead, &x.x, own, min(t + 1, tokens - 1), form);
        sync_cube();
        if own.cell {
            let at = own.gates + own.place;
            let (i, f) = (gates[at], gates[at + width]);
            let z = tanh(gates[at + comptime!(2 * form.width)]);
            let o = sigmoid(gates[at + comptime!(3 * form.width)]);
            let (keep, write) = if comptime!(form.scaled()) {
                let log_keep = -softplus(-f);
                let largest = max(log_keep + m, i);
                // In this order: the difference of two m is exact where they are close.
                let keep = f32::exp(log_keep + (m - largest));
                let write = f32::exp(i - largest);
                n = keep * n + write;
                m = largest;
                (keep, write)
            } else {
                (sigmoid(f), sigmoid(i))
            };
            c = keep * c + write * z;
            let mut read = n;
            if comptime!(!form.scaled()) {
                read = tanh(c);
            }
            if comptime!(form.keep) {
                if own.there {
                    let batch = sizes.batch as usize;
                    let at = ((own.head * batch + own.sequence) * tokens + t) * width;
                    to.before[at + own.place] = h;
                    let at = row(own, own.sequence, t) * comptime!(SAVED * form.width) + own.place;
                    to.saved[at] = keep;
                    to.saved[at + width] = write;
                    to.saved[at + comptime!(2 * form.width)] = z;
                    to.saved[at + comptime!(3 * form.width)] = o;
                    to.saved[at + comptime!(4 * form.width)] = sigmoid(-f);
                    to.saved[at + comptime!(5 * form.width)] = c;
                    to.saved[at + comptime!(6 * form.width)] = read;
                }
            }
            if comptime!(form.scaled()) {
                h = o * c / n;
            } else {
                h = o * read;
            }
            hidden[UNIT_POS as usize] = h;
            if own.there {
                to.h[row(own, own.sequence, t) * width + own.place] = h;
            }
        }
        sync_cube();
    }
    if own.there {
        to.c[own.at] = c;
        if comptime!(form.scaled()) {
            to.n[own.at] = n;
            to.m[own.at] = m;
        }
    }
}
