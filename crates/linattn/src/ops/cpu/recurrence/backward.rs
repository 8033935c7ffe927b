//! The recurrences with a matrix for a state, backwards.

use super::super::parallel::for_each;
use super::super::real::{Job, Machine, Real, add, dispatch, dot, times, total};
use super::super::shared::{Rows, RowsMut, Shared};
use super::tile::{
    Delta, Linear, LinearBefore, LowRank, Partial, Row, Rule, TILE, Token, Written, advance,
    reverse, totals,
};
use super::{BLOCK, Factors, Head, load, load_state, rows_at, sequences, store, store_state};
use crate::ops::recurrence::{Dims, LogDecay, Read, Recurrence, Transition};
use std::marker::PhantomData;

/// Arguments of the backward pass.
#[derive(Clone, Copy)]
pub(in crate::ops::cpu) struct Given<'a, R> {
    /// States that the forward pass kept.
    pub(in crate::ops::cpu) kept: &'a [R],
    /// Gradient of the output, where it was used.
    pub(in crate::ops::cpu) d_o: Option<&'a [R]>,
    /// Gradient of the last state, where it was used.
    pub(in crate::ops::cpu) d_state: Option<&'a [R]>,
}

/// One block's states and what its tokens wrote, of one tile.
struct Replay<R> {
    width: usize,
    /// The states before each token, and one that is never read.
    states: Vec<Row<R>>,
    written: [Written<R>; BLOCK],
}

impl<R: Real> Replay<R> {
    fn new(width: usize) -> Self {
        let states = vec![[R::ZERO; TILE]; (BLOCK + 1) * width];
        Self { width, states, written: [Written::NONE; BLOCK] }
    }

    /// State before token `j`.
    #[inline(always)]
    fn before(&self, j: usize) -> &[Row<R>] {
        &self.states[j * self.width..(j + 1) * self.width]
    }

    #[inline(always)]
    fn run<M: Machine, U: Rule>(
        &mut self,
        head: &Head<'_, R>,
        factors: &Factors<R>,
        [first, count, c]: [usize; 3],
    ) {
        for j in 0..count {
            let (before, after) = self.states[j * self.width..].split_at_mut(self.width);
            let token = factors.token(head, j, first + j);
            let v = load(head.x.v.at(first + j), c);
            (_, self.written[j]) = advance::<M, R, U>(before, after, token, &v);
        }
    }
}

/// Sums over a tile's columns, K numbers each.
struct Totals<R> {
    read: Vec<R>,
    written: Vec<R>,
    retrieved: Vec<R>,
    erased: Vec<R>,
    kept: Vec<R>,
    /// Of all rows: the gradient of a log decay that they share.
    decay: R,
}

impl<R: Real> Totals<R> {
    fn new(width: usize) -> Self {
        let new = || vec![R::ZERO; width];
        let rows = [new(), new(), new(), new(), new()];
        let [read, written, retrieved, erased, kept] = rows;
        Self { read, written, retrieved, erased, kept, decay: R::ZERO }
    }

    #[inline(always)]
    fn fill<U: Rule>(&mut self, partial: &Partial<R>, by_row: bool) {
        totals(&partial.read, &mut self.read);
        totals(&partial.written, &mut self.written);
        if U::LOW_RANK {
            totals(&partial.retrieved, &mut self.retrieved);
        }
        if U::RETRIEVES {
            totals(&partial.erased, &mut self.erased);
        }
        if by_row {
            totals(&partial.kept, &mut self.kept);
        }
        self.decay = total(&partial.decay);
    }
}

/// Rows of one head, of what comes from outside and of what is found.
struct Backward<'a, 'd, R, U> {
    head: Head<'a, R>,
    /// States that were kept, one a row.
    kept: Rows<'a, R>,
    d_o: Option<Rows<'a, R>>,
    d_state: Option<&'a [R]>,
    d: &'d mut Recurrence<RowsMut<'a, R>>,
    rule: PhantomData<U>,
}

impl<R: Real, U: Rule> Job for Backward<'_, '_, R, U> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let (dims, of, width) = (self.head.dims, self.head.of, self.head.dims.key_width);
        let mut d_states = load_state(dims, self.d_state);
        let by_row = matches!(self.head.x.decay, Some(LogDecay::Vector(_)));
        let mut factors = Factors::new(width);
        let mut replay = Replay::new(width);
        let (mut partial, mut totals) = (Partial::new(width), Totals::new(width));
        for block in (0..of.blocks()).rev() {
            let first = block * BLOCK;
            let count = BLOCK.min(of.tokens - first);
            factors.fill(&self.head, first, count);
            for (c, d_state) in d_states.chunks_exact_mut(width).enumerate() {
                for (i, row) in replay.states[..width].iter_mut().enumerate() {
                    let v = dims.value_width;
                    *row = load(&self.kept.at(block)[i * v..(i + 1) * v], c);
                }
                replay.run::<M, U>(&self.head, &factors, [first, count, c]);
                for j in (0..count).rev() {
                    let (t, token) = (first + j, factors.token(&self.head, j, first + j));
                    let d_o = self.d_o.map_or([R::ZERO; TILE], |d_o| load(d_o.at(t), c));
                    let (before, written) = (replay.before(j), &replay.written[j]);
                    let found =
                        reverse::<M, R, U>(before, d_state, token, (&d_o, written), &mut partial);
                    totals.fill::<U>(&partial, by_row);
                    self.values::<M>([t, c], token.beta, &found.0, written);
                    self.rows::<M>(t, token, (&d_o, written), &totals);
                }
            }
        }
        if let Some(d) = &mut self.d.state {
            store_state(dims, &d_states, d.at(0));
        }
    }
}

impl<R: Real, U: Rule> Backward<'_, '_, R, U> {
    /// Gradients of value and beta.
    #[inline(always)]
    fn values<M: Machine>(
        &mut self,
        [t, c]: [usize; 2],
        beta: R,
        d_update: &Row<R>,
        written: &Written<R>,
    ) {
        match &mut self.d.transition {
            Transition::Delta { beta: d_beta, .. } => {
                d_beta.at(t)[0] += dot::<M, R>(d_update, &written.error);
                store(self.d.v.at(t), c, &times(beta, d_update));
            }
            Transition::Identity { .. } | Transition::LowRank { .. } => {
                store(self.d.v.at(t), c, d_update);
            }
        }
    }

    /// Gradients of the rows of a token, to which this tile adds its part.
    #[inline(always)]
    fn rows<M: Machine>(
        &mut self,
        t: usize,
        token: Token<'_, R>,
        (d_o, written): (&Row<R>, &Written<R>),
        sums: &Totals<R>,
    ) {
        let d = &mut *self.d;
        let width = sums.read.len();
        let (d_q, d_k) = (d.q.at(t), d.k.at(t));
        match U::BEFORE {
            true => add(d_q, &sums.read),
            false => {
                let update = dot::<M, R>(&written.update, d_o);
                for i in 0..width {
                    d_q[i] += token.kept[i] * sums.read[i] + token.k[i] * update;
                }
            }
        }
        add(d_k, &sums.written);
        if U::LOW_RANK {
            let retrieved = dot::<M, R>(&written.retrieved, d_o);
            for i in 0..width {
                d_q[i] += token.b[i] * retrieved;
            }
            if let Transition::LowRank { b: d_b, .. } = &mut d.transition {
                add(d_b.at(t), &sums.retrieved);
            }
        }
        if U::RETRIEVES {
            let d_a = match &mut d.transition {
                Transition::Delta { erase: Some(d_a), .. } | Transition::LowRank { a: d_a, .. } => {
                    d_a.at(t)
                }
                Transition::Delta { erase: None, .. } | Transition::Identity { .. } => d_k,
            };
            match token.a_after_decay {
                true => {
                    for i in 0..width {
                        d_a[i] += token.kept[i] * sums.erased[i];
                    }
                }
                false => add(d_a, &sums.erased),
            }
        }
        match &mut d.decay {
            Some(LogDecay::Scalar(d_g)) => d_g.at(t)[0] += sums.decay,
            Some(LogDecay::Vector(d_g)) => {
                let d_g = d_g.at(t);
                for i in 0..width {
                    d_g[i] += token.kept[i] * sums.kept[i];
                    if U::RETRIEVES && token.a_after_decay {
                        d_g[i] += token.a[i] * sums.erased[i];
                    }
                }
            }
            None => {}
        }
    }
}

/// The backward pass: adds to `d`, whose rows are zeros when they are taken.
pub(in crate::ops::cpu) fn backward<R: Real>(
    x: Recurrence<&[R]>,
    dims: Dims,
    given: Given<'_, R>,
    d: Recurrence<Shared<'_, R>>,
) {
    match x.transition {
        Transition::Identity { read: Read::After } => backward_as::<R, Linear>(x, dims, given, d),
        Transition::Identity { read: Read::Before } => {
            backward_as::<R, LinearBefore>(x, dims, given, d);
        }
        Transition::Delta { .. } => backward_as::<R, Delta>(x, dims, given, d),
        Transition::LowRank { .. } => backward_as::<R, LowRank>(x, dims, given, d),
    }
}

/// One task has all heads that share a key head, because their gradients of it are added up.
fn backward_as<R: Real, U: Rule>(
    x: Recurrence<&[R]>,
    s: Dims,
    given: Given<'_, R>,
    d: Recurrence<Shared<'_, R>>,
) {
    let group = s.heads / s.key_heads;
    let sequences = sequences(&x, s);
    for_each(s.sequences * s.key_heads, 3 * group * s.work(), |n| {
        let (of, key_head) = (sequences[n / s.key_heads], n % s.key_heads);
        let mut keys: Option<[RowsMut<'_, R>; 2]> = None;
        for h in key_head * group..(key_head + 1) * group {
            let mut places = s.places(&x, of, h);
            let values = places.v;
            if keys.is_some() {
                // The first head has taken them.
                (places.q.1[0], places.k.1[0]) = (0, 0);
            }
            // SAFETY: rows of key heads are this task's alone, which takes them once; all other rows are one
            // head's alone.
            #[allow(unsafe_code)]
            let mut rows = d.as_ref().zip(places).map(|(d, place)| unsafe { d.rows(place) });
            if let Some(keys) = keys.take() {
                [rows.q, rows.k] = keys;
            }
            dispatch(Backward {
                head: Head::new(&x, s, of, h),
                kept: rows_at(given.kept, s.kept(of, h)),
                d_o: given.d_o.map(|d_o| rows_at(d_o, values)),
                d_state: given.d_state.map(|d| rows_at(d, s.state(of, h)).at(0)),
                d: &mut rows,
                rule: PhantomData::<U>,
            });
            keys = Some([rows.q, rows.k]);
        }
    });
}
