//! Mamba's recurrence: [`LANES`] channels of a sequence at a time, token by token, with their states in the first
//! cache; sequences and groups of channels go in parallel.
//! ```text
//! k = e^{dt A}, or 2 e^{dt A} - 1           h_t = k h_{t-1} + dt x b           y = sum_n c_n h_n
//!
//! dh_n  = dy c_n + k' dh'_n                 k', dh': of the next token
//! dx    = dt sum_n dh_n b_n                 ddt = sum_n dh_n h_{t-1,n} dk_n A_n + x sum_n dh_n b_n
//! dA_n  = sum_t dh_n h_{t-1,n} dk_n dt      db_n, dc_n = sum over channels of dh_n dt x, dy h_n
//! ```
//! For a backward pass, which makes the states between again, every [`CHUNK`]-th state is kept.

use super::parallel::for_each;
use super::real::{
    Block, Job, LANES, Machine, Real, add_products, add_times, dispatch, load, product, store,
    total,
};
use super::shared::{Place, Rows, RowsMut, Shared, rows_at};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed, zeros};
use crate::ops::fused::SelectiveScan;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Tokens between two states that are kept.
const CHUNK: usize = 8;
/// Channels of a task, in blocks of [`LANES`]: they add up their gradients of b and c.
const TOGETHER: usize = 8 * LANES;

type Tensors = SelectiveScan<FlexTensor>;

#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    tokens: usize,
    channels: usize,
    states: usize,
}

/// Some channels of a sequence: [`LANES`], or those that are left.
#[derive(Debug, Clone, Copy)]
struct Channels {
    sequence: usize,
    first: usize,
    width: usize,
}

impl Dims {
    fn of(x: &Tensors) -> Self {
        let [batch, tokens, channels] = [0, 1, 2].map(|d| x.x.shape()[d]);
        Self { batch, tokens, channels, states: x.b.shape()[2] }
    }

    /// Numbers of the states of all sequences.
    fn state(&self) -> usize {
        self.batch * self.channels * self.states
    }

    fn groups(&self) -> usize {
        self.channels.div_ceil(TOGETHER)
    }

    /// Blocks of channels of a sequence.
    fn blocks(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    fn chunks(&self) -> usize {
        self.tokens.div_ceil(CHUNK)
    }

    /// First number and `[count, stride, width]` of the rows of `[B, T, I]`.
    fn rows(&self, place: Channels) -> Place {
        let first = place.sequence * self.tokens * self.channels + place.first;
        (first, [self.tokens, self.channels, place.width])
    }

    /// The one row of `[B, I, N]`.
    fn of_state(&self, place: Channels) -> Place {
        let width = place.width * self.states;
        ((place.sequence * self.channels + place.first) * self.states, [1, width, width])
    }

    /// The kept states, `[B, I / LANES, T / CHUNK]` rows.
    fn kept(&self, place: Channels) -> Place {
        let width = self.states * LANES;
        let block = place.sequence * self.blocks() + place.first / LANES;
        (block * self.chunks() * width, [self.chunks(), width, width])
    }

    /// Runs `job` on every group of channels of every sequence: its number, and its blocks.
    fn for_each(&self, job: impl Fn([usize; 2], &mut dyn Iterator<Item = Channels>) + Send + Sync) {
        let groups = self.groups();
        let work = self.tokens * self.states * TOGETHER.min(self.channels) * 8;
        for_each(self.batch * groups, work, |task| {
            let (sequence, group) = (task / groups, task % groups);
            let end = self.channels.min((group + 1) * TOGETHER);
            let blocks = (group * TOGETHER..end).step_by(LANES);
            let place = |first| Channels { sequence, first, width: LANES.min(end - first) };
            job([sequence, group], &mut blocks.map(place));
        });
    }
}

/// `[width, N]` as N blocks.
fn turned<R: Real>(x: &[R], states: usize) -> Vec<Block<R>> {
    let mut blocks = vec![[R::ZERO; LANES]; states];
    for (w, row) in x.chunks_exact(states).enumerate() {
        for (block, &x) in blocks.iter_mut().zip(row) {
            block[w] = x;
        }
    }
    blocks
}

/// The other way.
fn turn_back<R: Real>(to: &mut [R], blocks: &[Block<R>]) {
    for (w, row) in to.chunks_exact_mut(blocks.len()).enumerate() {
        for (x, block) in row.iter_mut().zip(blocks) {
            *x = block[w];
        }
    }
}

/// The recurrence, of one type throughout.
pub(super) fn selective_scan(x: Tensors, keep: bool) -> Option<Pass<Flex>> {
    let places = x.refill(std::iter::repeat(()));
    let tensors: Vec<_> = x.into_vec().into_iter().map(contiguous).collect();
    let dtype = one_type(&tensors)?;
    typed!(dtype, scan_of(places.refill(tensors), keep))
}

/// Inputs of some channels.
#[derive(Clone, Copy)]
struct Operands<'a, R> {
    dims: Dims,
    x: Rows<'a, R>,
    dt: Rows<'a, R>,
    b: Rows<'a, R>,
    c: Rows<'a, R>,
    a: &'a [R],
    /// k = scale e^{dt A} + offset.
    scale: R,
    offset: R,
}

impl<'a, R: Number> Operands<'a, R> {
    fn of(x: &'a Tensors, dims: Dims, place: Channels) -> Self {
        let rows = |x: &'a FlexTensor| rows_at(slice(x), dims.rows(place));
        let shared = |x: &'a FlexTensor| {
            let states = dims.states;
            Rows::new(slice(x), place.sequence * dims.tokens * states, [states, states])
        };
        let [scale, offset] = if x.signed { [2.0, -1.0] } else { [1.0, 0.0] };
        let of_a = dims.of_state(Channels { sequence: 0, ..place });
        Self {
            dims,
            x: rows(&x.x),
            dt: rows(&x.dt),
            b: shared(&x.b),
            c: shared(&x.c),
            a: rows_at(slice(&x.a), of_a).at(0),
            scale: R::of(scale),
            offset: R::of(offset),
        }
    }
}

/// dt, and dt x, of a token.
#[inline(always)]
fn token<R: Real>(x: &Operands<'_, R>, t: usize) -> [Block<R>; 2] {
    let (row, dt) = (x.x.at(t), x.dt.at(t));
    let (row, dt) = (load(row, 0, row.len(), 0), load(dt, 0, dt.len(), 0));
    [dt, product(&dt, &row)]
}

/// e^{dt A}.
#[inline(always)]
fn decay<R: Real>(dt: &Block<R>, rate: &Block<R>) -> Block<R> {
    let mut decay = *dt;
    for w in 0..LANES {
        decay[w] = (dt[w] * rate[w]).exp();
    }
    decay
}

/// k, the share of h that stays.
#[inline(always)]
fn kept<M: Machine, R: Real>(x: &Operands<'_, R>, e: &Block<R>) -> Block<R> {
    let mut kept = *e;
    for w in 0..LANES {
        kept[w] = M::mul_add(x.scale, e[w], x.offset);
    }
    kept
}

/// h of the next token.
#[inline(always)]
fn next<M: Machine, R: Real>(
    x: &Operands<'_, R>,
    e: &Block<R>,
    h: &Block<R>,
    written: &Block<R>,
    b: R,
) -> Block<R> {
    let mut next = kept::<M, R>(x, e);
    for w in 0..LANES {
        next[w] = M::mul_add(next[w], h[w], written[w] * b);
    }
    next
}

struct Forward<'a, R> {
    x: Operands<'a, R>,
    /// Before the first token, `[width, N]`.
    state: Option<&'a [R]>,
    y: RowsMut<'a, R>,
    last: RowsMut<'a, R>,
    kept: Option<RowsMut<'a, R>>,
}

impl<R: Real> Job for Forward<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Dims { tokens, states, .. } = self.x.dims;
        let rates = turned(self.x.a, states);
        let mut h = match self.state {
            Some(state) => turned(state, states),
            None => vec![[R::ZERO; LANES]; states],
        };
        for t in 0..tokens {
            if let Some(kept) = &mut self.kept
                && t.is_multiple_of(CHUNK)
            {
                kept.at(t / CHUNK).copy_from_slice(h.as_flattened());
            }
            let [dt, written] = token(&self.x, t);
            let (b, c) = (self.x.b.at(t), self.x.c.at(t));
            let mut y = [R::ZERO; LANES];
            for n in 0..states {
                let e = decay(&dt, &rates[n]);
                h[n] = next::<M, R>(&self.x, &e, &h[n], &written, b[n]);
                add_times::<M, R, LANES>(&mut y, c[n], &h[n]);
            }
            let row = self.y.at(t);
            let width = row.len();
            store(row, 0, width, 0, &y);
        }
        turn_back(self.last.at(0), &h);
    }
}

fn scan_of<R: Number>(x: Tensors, keep: bool) -> Pass<Flex> {
    let dims = Dims::of(&x);
    let Dims { batch, tokens, channels, states } = dims;
    let mut y = zeros::<R>(batch * tokens * channels);
    let mut last = zeros::<R>(dims.state());
    let kept = batch * dims.blocks() * dims.chunks() * states * LANES;
    let mut kept = keep.then(|| zeros::<R>(kept));
    let to = [Shared::new(&mut y), Shared::new(&mut last)];
    let of_kept = kept.as_mut().map(|kept| Shared::new(kept));
    dims.for_each(|_, places| {
        for place in places {
            // SAFETY: every block of channels of every sequence has rows of its own, and one task has it.
            #[allow(unsafe_code)]
            let (y, last, kept) = unsafe {
                let kept = of_kept.as_ref().map(|kept| kept.rows(dims.kept(place)));
                (to[0].rows(dims.rows(place)), to[1].rows(dims.of_state(place)), kept)
            };
            let state = x.state.as_ref().map(|x| rows_at(slice(x), dims.of_state(place)).at(0));
            dispatch(Forward { x: Operands::of(&x, dims, place), state, y, last, kept });
        }
    });
    let outputs = vec![tensor(y, x.x.shape()), tensor(last, [batch, 1, channels * states])];
    let backward = kept.map(|kept| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| {
            let gradients: Vec<_> = gradients.into_iter().map(|d| d.map(contiguous)).collect();
            gradients_of::<R>(&x, &kept, &gradients)
        })
    });
    Pass { outputs, backward }
}

struct Backward<'a, 'b, R> {
    x: Operands<'a, R>,
    kept: Rows<'a, R>,
    d_y: Option<Rows<'a, R>>,
    /// Of the last state, `[width, N]`.
    d_last: Option<&'a [R]>,
    d_x: RowsMut<'a, R>,
    d_dt: RowsMut<'a, R>,
    /// Of this sequence alone, `[width, N]`.
    d_a: RowsMut<'a, R>,
    d_state: RowsMut<'a, R>,
    /// Of this group of channels, `[T, N]`.
    d_b: &'b mut RowsMut<'a, R>,
    d_c: &'b mut RowsMut<'a, R>,
}

impl<R: Real> Backward<'_, '_, R> {
    /// e^{dt A} of each token of a chunk, and the states before the first and after each.
    #[inline(always)]
    fn again<M: Machine>(&self, rates: &[Block<R>], chunk: usize, memory: [&mut [Block<R>]; 2]) {
        let Dims { tokens, states, .. } = self.x.dims;
        let [decays, h] = memory;
        h[..states].as_flattened_mut().copy_from_slice(self.kept.at(chunk));
        let first = chunk * CHUNK;
        for r in 0..CHUNK.min(tokens - first) {
            let [dt, written] = token(&self.x, first + r);
            let b = self.x.b.at(first + r);
            for n in 0..states {
                let e = decay(&dt, &rates[n]);
                let before = h[r * states + n];
                decays[r * states + n] = e;
                h[(r + 1) * states + n] = next::<M, R>(&self.x, &e, &before, &written, b[n]);
            }
        }
    }
}

impl<R: Real> Job for Backward<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Dims { tokens, states, .. } = self.x.dims;
        let rates = turned(self.x.a, states);
        let none = || vec![[R::ZERO; LANES]; states];
        let mut d_h = self.d_last.map_or_else(none, |d| turned(d, states));
        let mut d_rates = none();
        let mut decays = vec![[R::ZERO; LANES]; CHUNK * states];
        let mut h = vec![[R::ZERO; LANES]; (CHUNK + 1) * states];
        for chunk in (0..self.x.dims.chunks()).rev() {
            self.again::<M>(&rates, chunk, [&mut decays, &mut h]);
            let first = chunk * CHUNK;
            for r in (0..CHUNK.min(tokens - first)).rev() {
                let t = first + r;
                let [dt, written] = token(&self.x, t);
                let (b, c) = (self.x.b.at(t), self.x.c.at(t));
                let d_y = match &self.d_y {
                    Some(d_y) => load(d_y.at(t), 0, d_y.at(t).len(), 0),
                    None => [R::ZERO; LANES],
                };
                let (d_b, d_c) = (self.d_b.at(t), self.d_c.at(t));
                let mut of_written = [R::ZERO; LANES];
                let mut of_rates = [R::ZERO; LANES];
                for n in 0..states {
                    let (e, rate) = (decays[r * states + n], rates[n]);
                    let (before, after) = (h[r * states + n], h[(r + 1) * states + n]);
                    let (mut whole, mut d_rate) = (d_h[n], d_rates[n]);
                    add_times::<M, R, LANES>(&mut whole, c[n], &d_y);
                    let mut d_exponent = whole;
                    for w in 0..LANES {
                        d_exponent[w] = whole[w] * before[w] * e[w] * self.x.scale;
                    }
                    add_times::<M, R, LANES>(&mut of_written, b[n], &whole);
                    add_products::<M, R>(&mut of_rates, &d_exponent, &rate);
                    add_products::<M, R>(&mut d_rate, &d_exponent, &dt);
                    d_rates[n] = d_rate;
                    d_b[n] += total(&product(&whole, &written));
                    d_c[n] += total(&product(&d_y, &after));
                    d_h[n] = product(&whole, &kept::<M, R>(&self.x, &e));
                }
                let row = self.x.x.at(t);
                let width = row.len();
                let row = load(row, 0, width, 0);
                add_products::<M, R>(&mut of_rates, &row, &of_written);
                store(self.d_x.at(t), 0, width, 0, &product(&dt, &of_written));
                store(self.d_dt.at(t), 0, width, 0, &of_rates);
            }
        }
        turn_back(self.d_a.at(0), &d_rates);
        turn_back(self.d_state.at(0), &d_h);
    }
}

/// The sum of `parts` tensors that lie one behind another, in their order.
fn summed<R: Number>(all: Vec<R>, parts: usize) -> Vec<R> {
    if parts == 1 {
        return all;
    }
    let (sum, rest) = all.split_at(all.len() / parts);
    let mut sum = sum.to_vec();
    rest.chunks_exact(sum.len()).for_each(|part| super::real::add(&mut sum, part));
    sum
}

/// Gradients of all inputs, from those of y and the last state.
fn gradients_of<R: Number>(
    x: &Tensors,
    kept: &[R],
    gradients: &[Option<FlexTensor>],
) -> Vec<Option<FlexTensor>> {
    let dims = Dims::of(x);
    let Dims { batch, tokens, channels, states } = dims;
    let of_vectors = batch * tokens * states;
    let mut rows = [(); 2].map(|()| zeros::<R>(batch * tokens * channels));
    let mut of_states = [(); 2].map(|()| zeros::<R>(dims.state()));
    let mut vectors = [(); 2].map(|()| zeros::<R>(dims.groups() * of_vectors));
    let to_rows = rows.each_mut().map(|d| Shared::new(d));
    let to_states = of_states.each_mut().map(|d| Shared::new(d));
    let to_vectors = vectors.each_mut().map(|d| Shared::new(d));
    let (d_y, d_last) = (maybe::<R>(&gradients[0]), maybe::<R>(&gradients[1]));
    dims.for_each(|[sequence, group], places| {
        let first = (group * batch + sequence) * tokens * states;
        // SAFETY: every group of channels of every sequence has rows of its own, and one task has it.
        #[allow(unsafe_code)]
        let [mut d_b, mut d_c] =
            to_vectors.each_ref().map(|to| unsafe { to.rows((first, [tokens, states, states])) });
        for place in places {
            // SAFETY: as above, of blocks.
            #[allow(unsafe_code)]
            let ([d_x, d_dt], [d_a, d_state]) = unsafe {
                let of_rows = to_rows.each_ref().map(|to| to.rows(dims.rows(place)));
                (of_rows, to_states.each_ref().map(|to| to.rows(dims.of_state(place))))
            };
            dispatch(Backward {
                x: Operands::of(x, dims, place),
                kept: rows_at(kept, dims.kept(place)),
                d_y: d_y.map(|d| rows_at(d, dims.rows(place))),
                d_last: d_last.map(|d| rows_at(d, dims.of_state(place)).at(0)),
                d_x,
                d_dt,
                d_a,
                d_state,
                d_b: &mut d_b,
                d_c: &mut d_c,
            });
        }
    });
    let ([d_x, d_dt], [d_a, d_state], [d_b, d_c]) = (rows, of_states, vectors);
    let like = |d: Vec<R>, of: &FlexTensor| Some(tensor(d, of.shape()));
    let mut all = vec![
        like(d_x, &x.x),
        like(d_dt, &x.dt),
        like(summed(d_a, batch), &x.a),
        like(summed(d_b, dims.groups()), &x.b),
        like(summed(d_c, dims.groups()), &x.c),
    ];
    all.extend(x.state.as_ref().map(|state| like(d_state, state)));
    all
}
