//! The kernels of [`forward`](super::forward) and [`backward`](super::backward).

use super::{BLOCK, Form, TOGETHER, UNITS};
use cubecl::prelude::*;

/// [`Inputs`](super::Inputs); vectors of numbers of one state.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands<W: Size> {
    x: Array<f32>,
    dt: Array<f32>,
    a: Array<Vector<f32, W>>,
    b: Array<Vector<f32, W>>,
    c: Array<Vector<f32, W>>,
    state: Array<Vector<f32, W>>,
}

/// [`Given`](super::Given).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GivenArrays<W: Size> {
    h: Array<Vector<f32, W>>,
    d_y: Array<f32>,
    d_state: Array<Vector<f32, W>>,
}

/// [`Gradients`](super::Gradients).
#[derive(CubeType, CubeLaunch)]
pub(super) struct GradientArrays<W: Size> {
    x: Array<f32>,
    dt: Array<f32>,
    a: Array<Vector<f32, W>>,
    b: Array<f32>,
    c: Array<f32>,
    state: Array<Vector<f32, W>>,
}

/// B, T and I.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    batch: u32,
    tokens: u32,
    channels: u32,
}

/// The numbers of a state that are a unit's.
#[derive(CubeType, Clone, Copy)]
struct Own {
    sequence: usize,
    /// The cube's first channel.
    first: usize,
    /// i, at most I - 1.
    channel: usize,
    /// Whether there is such a channel.
    there: bool,
    /// Place of the first vector among those of a channel.
    vector: usize,
    sizes: Sizes,
}

/// One token: its row of `[B, T]`, and what a channel reads of it.
#[derive(CubeType, Clone, Copy)]
struct Token {
    row: usize,
    x: f32,
    dt: f32,
}

#[cube]
fn own(sizes: Sizes, #[comptime] form: Form) -> Own {
    let (lanes, each) = comptime!((form.lanes(), form.each()));
    let first = CUBE_POS_X as usize * each;
    let channels = sizes.channels as usize;
    let wanted = first + UNIT_POS as usize / lanes;
    Own {
        sequence: CUBE_POS_Y as usize,
        first,
        channel: min(wanted, channels - 1),
        there: wanted < channels,
        vector: UNIT_POS as usize % lanes * comptime!(form.vectors()),
        sizes,
    }
}

/// Place of a unit's first vector in `[.., I, N]`.
#[cube]
fn vectors_at(own: Own, row: usize, #[comptime] form: Form) -> usize {
    (row * own.sizes.channels as usize + own.channel) * comptime!(form.states / form.vector)
        + own.vector
}

/// The token of a block, or the sequence's last one.
#[cube]
fn token<W: Size>(x: &Operands<W>, own: Own, t: usize) -> Token {
    let tokens = own.sizes.tokens as usize;
    let row = own.sequence * tokens + min(t, tokens - 1);
    let at = row * own.sizes.channels as usize + own.channel;
    Token { row, x: x.x[at], dt: x.dt[at] }
}

/// e^{dt A}, and the share of the state that is kept.
#[cube]
fn decay<W: Size>(
    rate: Vector<f32, W>,
    dt: f32,
    #[comptime] form: Form,
) -> (Vector<f32, W>, Vector<f32, W>) {
    let e = Vector::exp(rate * Vector::new(dt));
    let mut kept = e;
    if comptime!(form.signed) {
        kept = e * Vector::new(2.0f32) - Vector::new(1.0f32);
    }
    (e, kept)
}

/// A unit's vectors from `at` on.
#[cube]
fn own_vectors<W: Size>(
    tensor: &Array<Vector<f32, W>>,
    at: usize,
    #[comptime] there: bool,
    #[comptime] form: Form,
) -> Array<Vector<f32, W>> {
    let mut vectors = Array::<Vector<f32, W>>::new(comptime!(form.vectors()));
    #[unroll]
    for q in 0..comptime!(form.vectors()) {
        let mut x = Vector::<f32, W>::new(0.0f32);
        if there {
            x = tensor[at + q];
        }
        vectors[q] = x;
    }
    vectors
}

/// The sum of a vector's numbers.
#[cube]
fn sum_of<W: Size>(x: Vector<f32, W>, #[comptime] form: Form) -> f32 {
    let mut sum = x[0];
    #[unroll]
    for l in 1..comptime!(form.vector) {
        sum += x[l];
    }
    sum
}

/// The kernel of [`forward`](super::forward).
#[cube(launch_unchecked)]
pub(super) fn scan_forward<W: Size>(
    x: &Operands<W>,
    y: &mut Array<f32>,
    last: &mut Array<Vector<f32, W>>,
    all: &mut Array<Vector<f32, W>>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(W)] _width: usize,
) {
    let own = own(sizes, form);
    let vectors = comptime!(form.vectors());
    let tokens = sizes.tokens as usize;
    let blocks = tokens.div_ceil(BLOCK);
    let rates = own_vectors::<W>(&x.a, vectors_at(own, 0usize, form), true, form);
    let mut terms = SharedMemory::<f32>::new(comptime!(form.channel_terms()));
    let at = vectors_at(own, own.sequence, form);
    let mut h = own_vectors::<W>(&x.state, at, comptime!(form.state), form);
    for block in 0..blocks {
        if comptime!(form.keep) {
            if own.there {
                let at = vectors_at(own, own.sequence * blocks + block, form);
                #[unroll]
                for q in 0..vectors {
                    all[at + q] = h[q];
                }
            }
        }
        let mut sums = Array::<f32>::new(BLOCK);
        #[unroll]
        for r in 0..BLOCK {
            let now = token::<W>(x, own, block * BLOCK + r);
            sums[r] = 0.0f32;
            if block * BLOCK + r < tokens {
                let vector = now.row * comptime!(form.states / form.vector) + own.vector;
                let mut sum = Vector::<f32, W>::new(0.0f32);
                #[unroll]
                for q in 0..vectors {
                    let (_, kept) = decay::<W>(rates[q], now.dt, form);
                    h[q] = kept * h[q] + x.b[vector + q] * Vector::new(now.dt * now.x);
                    sum += x.c[vector + q] * h[q];
                }
                sums[r] = sum_of::<W>(sum, form);
            }
        }
        give_channels(&sums, &mut terms, 0usize, y, own, block * BLOCK, form);
        if comptime!(form.lanes() > 1) {
            sync_cube();
            sum_channels(&terms, 0usize, y, own, block * BLOCK, form);
            sync_cube();
        }
    }
    if own.there {
        #[unroll]
        for q in 0..vectors {
            last[at + q] = h[q];
        }
    }
}

/// A block's numbers of this unit's channel, from token `t` on: to `[B, T, I]`, or, where units share a channel, to
/// `terms` for [`sum_channels`].
#[cube]
fn give_channels(
    sums: &Array<f32>,
    terms: &mut SharedMemory<f32>,
    #[comptime] from: usize,
    to: &mut Array<f32>,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let (tokens, channels) = (own.sizes.tokens as usize, own.sizes.channels as usize);
    #[unroll]
    for r in 0..BLOCK {
        if comptime!(form.lanes() > 1) {
            terms[comptime!(from + r * UNITS) + UNIT_POS as usize] = sums[r];
        } else if own.there && t + r < tokens {
            to[(own.sequence * tokens + t + r) * channels + own.channel] = sums[r];
        }
    }
}

/// Sums over the units of each of the cube's channels, of a block from token `t` on: numbers of `[B, T, I]`.
#[cube]
fn sum_channels(
    terms: &SharedMemory<f32>,
    #[comptime] from: usize,
    to: &mut Array<f32>,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let (lanes, each) = comptime!((form.lanes(), form.each()));
    let (tokens, channels) = (own.sizes.tokens as usize, own.sizes.channels as usize);
    #[unroll]
    for turn in 0..comptime!((BLOCK * each).div_ceil(UNITS)) {
        let at = comptime!(turn * UNITS) + UNIT_POS as usize;
        let (r, i) = (at / each, at % each);
        if r < BLOCK && t + r < tokens && own.first + i < channels {
            let mut sum = 0.0f32;
            for n in 0..lanes {
                // Neighbours begin at other places, so that they do not wait for one bank.
                let lane = (n + i) % lanes;
                sum += terms[from + r * UNITS + i * lanes + lane];
            }
            to[(own.sequence * tokens + t + r) * channels + own.first + i] = sum;
        }
    }
}

/// Places of `terms` before those of number `n` of this unit's: a row of units each.
fn term(r: usize, of: usize, n: usize, form: Form) -> usize {
    ((r % TOGETHER * 2 + of) * form.numbers + n) * UNITS
}

/// Sums over the cube's channels of db and dc, of the tokens from `t` on whose terms are there: numbers of
/// `[parts, B, T, N]`.
#[cube]
fn sum_states<W: Size>(
    terms: &SharedMemory<f32>,
    to: &mut GradientArrays<W>,
    own: Own,
    t: usize,
    #[comptime] form: Form,
) {
    let (states, numbers) = comptime!((form.states, form.numbers));
    let (lanes, each) = comptime!((form.lanes(), form.each()));
    let (batch, tokens) = (own.sizes.batch as usize, own.sizes.tokens as usize);
    #[unroll]
    for turn in 0..comptime!((TOGETHER * 2 * states).div_ceil(UNITS)) {
        let at = comptime!(turn * UNITS) + UNIT_POS as usize;
        let lane = at % lanes;
        let (row, n) = (at / lanes, at / lanes % numbers);
        let (r, of) = (row / comptime!(2 * numbers), row / numbers % 2);
        if r < TOGETHER && t + r < tokens {
            let mut sum = 0.0f32;
            for i in 0..each {
                // Neighbours begin at other channels, so that they do not wait for one bank.
                let channel = (i + row) % each;
                sum += terms[row * UNITS + channel * lanes + lane];
            }
            let place = (CUBE_POS_X as usize * batch + own.sequence) * tokens + t + r;
            let place = place * states + lane * numbers + n;
            if of == 0 {
                to.b[place] = sum;
            } else {
                to.c[place] = sum;
            }
        }
    }
}

/// The states before each token of a block, from that before its first one.
#[cube]
fn states_of_block<W: Size>(
    x: &Operands<W>,
    rates: &Array<Vector<f32, W>>,
    given: &Array<Vector<f32, W>>,
    own: Own,
    block: usize,
    #[comptime] form: Form,
) -> Array<Vector<f32, W>> {
    let vectors = comptime!(form.vectors());
    let blocks = (own.sizes.tokens as usize).div_ceil(BLOCK);
    let at = vectors_at(own, own.sequence * blocks + block, form);
    let mut states = Array::<Vector<f32, W>>::new(comptime!(BLOCK * vectors));
    #[unroll]
    for q in 0..vectors {
        states[q] = given[at + q];
    }
    #[unroll]
    for r in 1..BLOCK {
        let now = token::<W>(x, own, block * BLOCK + comptime!(r - 1));
        let vector = now.row * comptime!(form.states / form.vector) + own.vector;
        #[unroll]
        for q in 0..vectors {
            let (_, kept) = decay::<W>(rates[q], now.dt, form);
            let before = states[comptime!((r - 1) * vectors + q)];
            let added = x.b[vector + q] * Vector::new(now.dt * now.x);
            states[comptime!(r * vectors + q)] = kept * before + added;
        }
    }
    states
}

/// The kernel of [`backward`](super::backward).
#[cube(launch_unchecked)]
pub(super) fn scan_backward<W: Size>(
    x: &Operands<W>,
    given: &GivenArrays<W>,
    to: &mut GradientArrays<W>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(W)] _width: usize,
) {
    let own = own(sizes, form);
    let vectors = comptime!(form.vectors());
    let tokens = sizes.tokens as usize;
    let blocks = tokens.div_ceil(BLOCK);
    let rates = own_vectors::<W>(&x.a, vectors_at(own, 0usize, form), true, form);
    let mut terms = SharedMemory::<f32>::new(comptime!(TOGETHER * 2 * form.numbers * UNITS));
    let mut channel_terms = SharedMemory::<f32>::new(comptime!(form.channel_terms()));
    let at = vectors_at(own, own.sequence, form);
    let mut d_h = own_vectors::<W>(&given.d_state, at, comptime!(form.d_state), form);
    let mut d_rates = own_vectors::<W>(&x.a, at, false, form);
    for back in 0..blocks {
        let block = blocks - 1 - back;
        let states = states_of_block::<W>(x, &rates, &given.h, own, block, form);
        let mut d_x = Array::<f32>::new(BLOCK);
        let mut d_dt = Array::<f32>::new(BLOCK);
        #[unroll]
        for back in 0..BLOCK {
            let r = comptime!(BLOCK - 1 - back);
            let t = block * BLOCK + r;
            let now = token::<W>(x, own, t);
            let vector = now.row * comptime!(form.states / form.vector) + own.vector;
            let mut d_y = 0.0f32;
            if comptime!(form.d_y) {
                d_y = given.d_y[now.row * sizes.channels as usize + own.channel];
            }
            // Tokens and channels that are not there count for nothing.
            let mut count = 0.0f32;
            if t < tokens && own.there {
                count = 1.0f32;
            }
            let mut of_written = Vector::<f32, W>::new(0.0f32);
            let mut of_rates = Vector::<f32, W>::new(0.0f32);
            #[unroll]
            for q in 0..vectors {
                let (b, c) = (x.b[vector + q], x.c[vector + q]);
                let before = states[comptime!(r * vectors + q)];
                let (e, kept) = decay::<W>(rates[q], now.dt, form);
                let whole = d_h[q] + c * Vector::new(d_y);
                let of_e = if comptime!(form.signed) { whole * Vector::new(2.0f32) } else { whole };
                let d_exponent = of_e * before * e;
                of_written += whole * b;
                of_rates += d_exponent * rates[q];
                d_rates[q] += d_exponent * Vector::new(count * now.dt);
                let d_b = whole * Vector::new(count * now.dt * now.x);
                let h = kept * before + b * Vector::new(now.dt * now.x);
                let d_c = h * Vector::new(count * d_y);
                #[unroll]
                for l in 0..comptime!(form.vector) {
                    let n = comptime!(q * form.vector + l);
                    terms[comptime!(term(r, 0, n, form)) + UNIT_POS as usize] = d_b[l];
                    terms[comptime!(term(r, 1, n, form)) + UNIT_POS as usize] = d_c[l];
                }
                if t < tokens {
                    d_h[q] = kept * whole;
                }
            }
            let written = sum_of::<W>(of_written, form);
            d_x[r] = now.dt * written;
            d_dt[r] = sum_of::<W>(of_rates, form) + now.x * written;
            if comptime!(r % TOGETHER == 0) {
                sync_cube();
                sum_states::<W>(&terms, to, own, t, form);
                sync_cube();
            }
        }
        let t = block * BLOCK;
        give_channels(&d_x, &mut channel_terms, 0usize, &mut to.x, own, t, form);
        give_channels(
            &d_dt,
            &mut channel_terms,
            comptime!(BLOCK * UNITS),
            &mut to.dt,
            own,
            t,
            form,
        );
        if comptime!(form.lanes() > 1) {
            sync_cube();
            sum_channels(&channel_terms, 0usize, &mut to.x, own, t, form);
            sum_channels(&channel_terms, comptime!(BLOCK * UNITS), &mut to.dt, own, t, form);
        }
    }
    if own.there {
        #[unroll]
        for q in 0..vectors {
            to.a[at + q] = d_rates[q];
            to.state[at + q] = d_h[q];
        }
    }
}
