//! The kernel of a backward pass.

use super::arguments::{Form, GATES, GivenArrays, GradientArrays, SAVED, Sizes};
use super::cube::{Own, Shared, Terms, accumulate, column, has_column, held, number_or, own, row};
use cubecl::prelude::*;

/// Numbers that a unit reads of a token in the backward pass: the first five of the saved ones, dh, and c and n (of LSTM
/// tanh(c)) before the token.
const READ: usize = 8;

/// These numbers of one token.
#[cube]
fn fetch_saved(
    ahead: &mut Array<f32>,
    given: &GivenArrays,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let width = comptime!(form.width);
    let row = row(own, own.sequence, t);
    let at = row * comptime!(SAVED * form.width) + own.place;
    #[unroll]
    for j in 0..5usize {
        ahead[j] = given.saved[at + j * width];
    }
    ahead[5] = number_or(&given.d_h, row * width + own.place, 0.0f32, comptime!(form.given[0]));
    if t > 0 {
        let earlier = at - own.sizes.heads as usize * comptime!(SAVED * form.width);
        ahead[6] = given.saved[earlier + comptime!(5 * form.width)];
        ahead[7] = given.saved[earlier + comptime!(6 * form.width)];
    } else {
        ahead[6] = number_or(&given.c, own.at, 0.0f32, form.state);
        ahead[7] = number_or(&given.n, own.at, 0.0f32, comptime!(form.state && form.scaled()));
    }
}

/// The sum of a cell's four parts of `dx R^T`.
#[cube]
fn recurrent(parts: &SharedMemory<f32>, own: Own, #[comptime] form: Form) -> f32 {
    let at = own.gates + own.place;
    let (low, high) = (parts[at], parts[at + comptime!(2 * form.width)]);
    (low + parts[at + comptime!(form.width)]) + (high + parts[at + comptime!(3 * form.width)])
}

/// The weights of a unit's column of `[4 D]`, which stands for a gate and a cell here: the cell's sum over the
/// gate's columns.
#[cube]
fn terms(head: usize, #[comptime] turn: usize, #[comptime] form: Form) -> Terms {
    let width = comptime!(form.width);
    let column = column(turn, form);
    let gate = column / width;
    let block = head * comptime!(GATES * form.width * form.width);
    let weight = block + gate * comptime!(form.width * form.width) + column % width;
    Terms { number: gate * width, weight, stride: width.runtime() }
}

/// The four parts of `dx R^T`.
#[cube]
fn write_parts(
    parts: &mut SharedMemory<f32>,
    gradients: &SharedMemory<f32>,
    part: &Array<f32>,
    r_transposed: &Array<f32>,
    #[comptime] form: Form,
) {
    let together = comptime!(form.together);
    let shared = comptime!(Shared { form, apart: GATES * form.width });
    let mut sums = Array::<f32>::new(together);
    #[unroll]
    for turn in 0..comptime!(form.turns()) {
        #[unroll]
        for s in 0..together {
            sums[s] = 0.0f32;
        }
        let terms = terms(CUBE_POS_Y as usize, turn, form);
        accumulate(&mut sums, gradients, part, r_transposed, terms, shared);
        if has_column(turn, form) {
            #[unroll]
            for s in 0..together {
                parts[comptime!(s * GATES * form.width) + column(turn, form)] = sums[s];
            }
        }
    }
}

/// The kernel of [`backward`].
#[cube(launch_unchecked)]
pub(super) fn lstm_backward(
    given: &GivenArrays,
    to: &mut GradientArrays,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    let width = comptime!(form.width);
    let columns = comptime!(GATES * form.width);
    let own = own(sizes, form);
    let tokens = sizes.tokens as usize;
    let mut gradients = SharedMemory::<f32>::new(comptime!(form.gates()));
    let mut parts = SharedMemory::<f32>::new(comptime!(form.gates()));
    let part = held(&given.r_transposed, terms(own.head, 0usize, form), form);
    let mut d_c = number_or(&given.d_c, own.at, 0.0f32, comptime!(form.given[1]));
    let mut d_n = number_or(&given.d_n, own.at, 0.0f32, comptime!(form.given[2] && form.scaled()));
    let mut ahead = Array::<f32>::new(comptime!(READ));
    fetch_saved(&mut ahead, given, own, tokens - 1, form);
    let last = row(own, own.sequence, tokens - 1) * comptime!(SAVED * form.width) + own.place;
    let mut c = given.saved[last + comptime!(5 * form.width)];
    let mut n = given.saved[last + comptime!(6 * form.width)];
    if own.cell {
        #[unroll]
        for gate in 0..GATES {
            parts[own.gates + own.place + comptime!(gate * form.width)] = 0.0f32;
        }
    }
    for back in 0..tokens {
        let t = tokens - 1 - back;
        if own.cell {
            let d_h = ahead[5] + recurrent(&parts, own, form);
            let (keep, write, z, o, slope) = (ahead[0], ahead[1], ahead[2], ahead[3], ahead[4]);
            let (c_before, n_before) = (ahead[6], ahead[7]);
            // h is this by sigmoid(o).
            let mut read = n;
            if comptime!(form.scaled()) {
                read = c / n;
                let over = d_h * o / n;
                d_c += over;
                d_n -= over * read;
            } else {
                d_c += d_h * o * (1.0f32 - read * read);
            }
            let mut d_i = (d_c * z + d_n) * write;
            if comptime!(!form.scaled()) {
                d_i *= 1.0f32 - write;
            }
            let d_f = (d_c * c_before + d_n * n_before) * keep * slope;
            let d_z = d_c * write * (1.0f32 - z * z);
            let d_o = d_h * read * o * (1.0f32 - o);
            d_c *= keep;
            d_n *= keep;
            c = c_before;
            n = n_before;
            let at = own.gates + own.place;
            gradients[at] = d_i;
            gradients[at + width] = d_f;
            gradients[at + comptime!(2 * form.width)] = d_z;
            gradients[at + comptime!(3 * form.width)] = d_o;
            if own.there {
                let at = row(own, own.sequence, t) * columns + own.place;
                to.x[at] = d_i;
                to.x[at + width] = d_f;
                to.x[at + comptime!(2 * form.width)] = d_z;
                to.x[at + comptime!(3 * form.width)] = d_o;
            }
        }
        fetch_saved(&mut ahead, given, own, max(t, 1) - 1, form);
        sync_cube();
        write_parts(&mut parts, &gradients, &part, &given.r_transposed, form);
        sync_cube();
    }
    if own.there {
        to.h[own.at] = recurrent(&parts, own, form);
        to.c[own.at] = d_c;
        if comptime!(form.scaled()) {
            to.n[own.at] = d_n;
        }
    }
}
