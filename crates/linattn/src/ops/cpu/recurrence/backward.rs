//! The recurrences with a matrix for a state, backwards.

use super::super::parallel::for_each;
use super::super::real::{Job, Machine, Real, add, dispatch, dot, total};
use super::super::shared::{Rows, RowsMut, Shared};
use super::tile::{
    Delta, Linear, LinearBefore, LowRank, Partial, Row, Rule, TILE, Token, Written, advance,
    reverse, totals,
};
use super::{BLOCK, Factors, Head, Inputs, Kind, load, load_state, store, store_state};
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

/// Gradients of the operands that are there: zeros to begin with.
pub(in crate::ops::cpu) struct Gradients<T> {
    pub(in crate::ops::cpu) q: T,
    pub(in crate::ops::cpu) k: T,
    pub(in crate::ops::cpu) v: T,
    pub(in crate::ops::cpu) a: Option<T>,
    pub(in crate::ops::cpu) b: Option<T>,
    pub(in crate::ops::cpu) g: Option<T>,
    pub(in crate::ops::cpu) beta: Option<T>,
    pub(in crate::ops::cpu) state: Option<T>,
}

impl<R> Gradients<Vec<R>> {
    /// To be filled.
    pub(in crate::ops::cpu) fn each_mut(&mut self) -> Gradients<&mut [R]> {
        Gradients {
            q: &mut self.q,
            k: &mut self.k,
            v: &mut self.v,
            a: self.a.as_deref_mut(),
            b: self.b.as_deref_mut(),
            g: self.g.as_deref_mut(),
            beta: self.beta.as_deref_mut(),
            state: self.state.as_deref_mut(),
        }
    }
}

impl<T> Gradients<T> {
    /// The gradients that are there, in the order of the fields.
    pub(in crate::ops::cpu) fn into_vec(self) -> Vec<T> {
        let Self { q, k, v, a, b, g, beta, state } = self;
        [Some(q), Some(k), Some(v), a, b, g, beta, state].into_iter().flatten().collect()
    }

    fn map<U>(self, mut f: impl FnMut(T) -> U) -> Gradients<U> {
        Gradients {
            q: f(self.q),
            k: f(self.k),
            v: f(self.v),
            a: self.a.map(&mut f),
            b: self.b.map(&mut f),
            g: self.g.map(&mut f),
            beta: self.beta.map(&mut f),
            state: self.state.map(&mut f),
        }
    }
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
            let v = load(head.v.at(first + j), c);
            (_, self.written[j]) = advance::<M, R, U>(before, after, token, &v);
        }
    }
}

/// Sums over a tile's columns, K numbers each.
struct Totals<R> {
    read: Vec<R>,
    written: Vec<R>,
    answered: Vec<R>,
    asked: Vec<R>,
    kept: Vec<R>,
    /// Of all rows: the gradient of a log decay that they share.
    decay: R,
}

impl<R: Real> Totals<R> {
    fn new(width: usize) -> Self {
        let new = || vec![R::ZERO; width];
        let rows = [new(), new(), new(), new(), new()];
        let [read, written, answered, asked, kept] = rows;
        Self { read, written, answered, asked, kept, decay: R::ZERO }
    }

    #[inline(always)]
    fn fill<U: Rule>(&mut self, partial: &Partial<R>, by_row: bool) {
        totals(&partial.read, &mut self.read);
        totals(&partial.written, &mut self.written);
        if U::LOW_RANK {
            totals(&partial.answered, &mut self.answered);
        }
        if U::ASKS {
            totals(&partial.asked, &mut self.asked);
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
    d: &'d mut Gradients<RowsMut<'a, R>>,
    rule: PhantomData<U>,
}

impl<R: Real, U: Rule> Job for Backward<'_, '_, R, U> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let (sizes, width) = (self.head.sizes, self.head.sizes.key_width);
        let mut d_states = load_state(sizes, self.d_state);
        let by_row = self.head.g.is_some_and(|g| g.width() > 1);
        let mut factors = Factors::new(width);
        let mut replay = Replay::new(width);
        let (mut partial, mut totals) = (Partial::new(width), Totals::new(width));
        for block in (0..sizes.blocks()).rev() {
            let first = block * BLOCK;
            let count = BLOCK.min(sizes.tokens - first);
            factors.fill(&self.head, first, count);
            for (c, d_state) in d_states.chunks_exact_mut(width).enumerate() {
                for (i, row) in replay.states[..width].iter_mut().enumerate() {
                    let v = sizes.value_width;
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
            store_state(sizes, &d_states, d.at(0));
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
        match &mut self.d.beta {
            Some(d_beta) => {
                d_beta.at(t)[0] += dot::<M, R>(d_update, &written.error);
                store(self.d.v.at(t), c, &d_update.map(|d| beta * d));
            }
            None => store(self.d.v.at(t), c, d_update),
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
            let answer = dot::<M, R>(&written.answer, d_o);
            for i in 0..width {
                d_q[i] += token.b[i] * answer;
            }
            if let Some(d_b) = &mut d.b {
                add(d_b.at(t), &sums.answered);
            }
        }
        if U::ASKS {
            let asking = match &mut d.a {
                Some(d_a) => d_a.at(t),
                None => d_k,
            };
            match token.asks_after {
                true => {
                    for i in 0..width {
                        asking[i] += token.kept[i] * sums.asked[i];
                    }
                }
                false => add(asking, &sums.asked),
            }
        }
        match d.g.as_mut().map(|d_g| d_g.at(t)) {
            Some([d_g]) => *d_g += sums.decay,
            Some(d_g) => {
                for i in 0..width {
                    d_g[i] += token.kept[i] * sums.kept[i];
                    if U::ASKS && token.asks_after {
                        d_g[i] += token.asks[i] * sums.asked[i];
                    }
                }
            }
            None => {}
        }
    }
}

/// The backward pass: adds to `d`, which holds zeros.
pub(in crate::ops::cpu) fn backward<R: Real>(
    x: Inputs<'_, R>,
    given: Given<'_, R>,
    d: Gradients<&mut [R]>,
) {
    match x.kind() {
        Kind::Linear => backward_as::<R, Linear>(x, given, d),
        Kind::LinearBefore => backward_as::<R, LinearBefore>(x, given, d),
        Kind::Delta => backward_as::<R, Delta>(x, given, d),
        Kind::LowRank => backward_as::<R, LowRank>(x, given, d),
    }
}

/// One task has all heads that share a key head, because their gradients of it are added up.
fn backward_as<R: Real, U: Rule>(x: Inputs<'_, R>, given: Given<'_, R>, d: Gradients<&mut [R]>) {
    let s = x.sizes;
    let group = s.heads / s.key_heads;
    let gates = x.g.map_or(1, |g| g.len() / (s.batch * s.tokens * s.heads));
    let d = d.map(Shared::new);
    for_each(s.batch * s.key_heads, 3 * group * s.work(), |n| {
        let (b, key_head) = (n / s.key_heads, n % s.key_heads);
        for h in key_head * group..(key_head + 1) * group {
            let own = |width| s.place(b, h, s.heads, width);
            let keys = s.place(b, key_head, s.key_heads, s.key_width);
            // SAFETY: rows of key heads are this task's alone, and it takes its heads one by one; all
            // other rows are one head's alone.
            #[allow(unsafe_code)]
            let mut rows = unsafe {
                Gradients {
                    q: d.q.rows(keys),
                    k: d.k.rows(keys),
                    v: d.v.rows(own(s.value_width)),
                    a: d.a.as_ref().map(|d| d.rows(own(s.key_width))),
                    b: d.b.as_ref().map(|d| d.rows(own(s.key_width))),
                    g: d.g.as_ref().map(|d| d.rows(own(gates))),
                    beta: d.beta.as_ref().map(|d| d.rows(own(1))),
                    state: d.state.as_ref().map(|d| d.rows(s.own(b, h, 1))),
                }
            };
            let read = |x, (first, [_, stride, width]): (usize, [usize; 3])| {
                Rows::new(x, first, [stride, width])
            };
            dispatch(Backward {
                head: x.head(b, h),
                kept: read(given.kept, s.own(b, h, s.blocks())),
                d_o: given.d_o.map(|d_o| read(d_o, own(s.value_width))),
                d_state: given.d_state.map(|d| read(d, s.own(b, h, 1)).at(0)),
                d: &mut rows,
                rule: PhantomData::<U>,
            });
        }
    });
}
