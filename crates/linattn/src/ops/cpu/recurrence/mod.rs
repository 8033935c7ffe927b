//! The recurrences with a matrix for a state, forwards and backwards, one token after another with the
//! state in the first cache; heads go in parallel.
//!
//! For the backward pass the forward pass keeps the state at every [`BLOCK`]th token. A block's states
//! are computed again from there, so that nothing is ever divided by a decay.

mod backward;
mod tile;

pub(super) use backward::{Given, Gradients, backward};

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch};
use super::shared::{Rows, RowsMut, Shared};
use crate::ops::Read;
use std::marker::PhantomData;
use tile::{Delta, Linear, LinearBefore, LowRank, Row, Rule, TILE, Token, advance};

/// Tokens from one state that is kept to the next.
const BLOCK: usize = 16;

/// Sizes of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) key_heads: usize,
    pub(super) heads: usize,
    pub(super) key_width: usize,
    pub(super) value_width: usize,
}

impl Sizes {
    /// Numbers of one state.
    fn memory(&self) -> usize {
        self.key_width * self.value_width
    }

    /// Numbers of all states.
    pub(super) fn states(&self) -> usize {
        self.batch * self.heads * self.memory()
    }

    fn blocks(&self) -> usize {
        self.tokens.div_ceil(BLOCK)
    }

    /// States that are kept of one head.
    pub(super) fn kept(&self) -> usize {
        self.blocks() * self.states()
    }

    /// Multiplications of one head, roughly.
    fn work(&self) -> usize {
        4 * self.tokens * self.key_width * self.value_width.next_multiple_of(TILE)
    }

    /// First number and `[count, stride, width]` of a head's rows, where there are `heads` of `width`.
    fn place(&self, b: usize, h: usize, heads: usize, width: usize) -> (usize, [usize; 3]) {
        ((b * self.tokens * heads + h) * width, [self.tokens, heads * width, width])
    }

    /// First number and `[count, stride, width]` of what there are `count` of per head.
    fn own(&self, b: usize, h: usize, count: usize) -> (usize, [usize; 3]) {
        let memory = self.memory();
        ((b * self.heads + h) * count * memory, [count, memory, memory])
    }
}

/// All operands, in the order of dimensions that callers have.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, R> {
    pub(super) sizes: Sizes,
    pub(super) q: &'a [R],
    pub(super) k: &'a [R],
    pub(super) v: &'a [R],
    pub(super) a: Option<&'a [R]>,
    pub(super) b: Option<&'a [R]>,
    /// With one number a head, or K.
    pub(super) g: Option<&'a [R]>,
    pub(super) beta: Option<&'a [R]>,
    pub(super) state: Option<&'a [R]>,
    pub(super) read: Read,
}

/// One head's rows.
#[derive(Clone, Copy)]
struct Head<'a, R> {
    sizes: Sizes,
    q: Rows<'a, R>,
    k: Rows<'a, R>,
    v: Rows<'a, R>,
    a: Option<Rows<'a, R>>,
    b: Option<Rows<'a, R>>,
    g: Option<Rows<'a, R>>,
    beta: Option<Rows<'a, R>>,
    start: Option<&'a [R]>,
    /// Whether a delta rule asks after its decay.
    asks_after: bool,
}

impl<'a, R: Real> Inputs<'a, R> {
    fn head(&self, b: usize, h: usize) -> Head<'a, R> {
        let s = self.sizes;
        let rows = |x: &'a [R], h: usize, heads: usize, width: usize| {
            let (first, [_, stride, width]) = s.place(b, h, heads, width);
            Rows::new(x, first, [stride, width])
        };
        let keys = |x| rows(x, h / (s.heads / s.key_heads), s.key_heads, s.key_width);
        let own = |x: &'a [R]| rows(x, h, s.heads, x.len() / (s.batch * s.tokens * s.heads));
        let state = s.own(b, h, 1).0;
        Head {
            sizes: s,
            q: keys(self.q),
            k: keys(self.k),
            v: own(self.v),
            a: self.a.map(own),
            b: self.b.map(own),
            g: self.g.map(own),
            beta: self.beta.map(own),
            start: self.state.map(|x| &x[state..][..s.memory()]),
            asks_after: self.beta.is_some() && self.read == Read::After,
        }
    }

    fn kind(&self) -> Kind {
        match (self.beta.is_some(), self.b.is_some(), self.read) {
            (true, _, _) => Kind::Delta,
            (false, true, _) => Kind::LowRank,
            (false, false, Read::After) => Kind::Linear,
            (false, false, Read::Before) => Kind::LinearBefore,
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Linear,
    LinearBefore,
    Delta,
    LowRank,
}

/// Decay factors of every token of a block.
struct Factors<R> {
    width: usize,
    kept: Vec<R>,
    asks: Vec<R>,
}

impl<R: Real> Factors<R> {
    fn new(width: usize) -> Self {
        Self { width, kept: vec![R::ONE; BLOCK * width], asks: vec![R::ZERO; BLOCK * width] }
    }

    /// For `count` tokens from `first`.
    #[inline(always)]
    fn fill(&mut self, head: &Head<'_, R>, first: usize, count: usize) {
        let width = self.width;
        for j in 0..count {
            let (at, t) = (j * width..(j + 1) * width, first + j);
            let (kept, asks) = (&mut self.kept[at.clone()], &mut self.asks[at]);
            if let Some(g) = head.g {
                let g = g.at(t);
                match g {
                    &[g] => kept.fill(g.exp()),
                    _ => kept.iter_mut().zip(g).for_each(|(kept, g)| *kept = g.exp()),
                }
            }
            let rows = match (head.a, head.beta) {
                (Some(a), _) => a.at(t),
                (None, Some(_)) => head.k.at(t),
                (None, None) => continue,
            };
            asks.copy_from_slice(rows);
            if head.asks_after {
                asks.iter_mut().zip(kept).for_each(|(asks, kept)| *asks *= *kept);
            }
        }
    }

    /// Token `j` of the block.
    #[inline(always)]
    fn token<'s>(&'s self, head: &Head<'s, R>, j: usize, t: usize) -> Token<'s, R> {
        let at = j * self.width..(j + 1) * self.width;
        Token {
            kept: &self.kept[at.clone()],
            asks: &self.asks[at],
            q: head.q.at(t),
            k: head.k.at(t),
            b: head.b.map_or(&[], |b| b.at(t)),
            beta: head.beta.map_or(R::ONE, |beta| beta.at(t)[0]),
            asks_after: head.asks_after,
        }
    }
}

/// Columns of tile `c` of a row, zeros behind its end.
#[inline(always)]
fn load<R: Real>(x: &[R], c: usize) -> Row<R> {
    let part = &x[c * TILE..];
    if let Some(row) = part.first_chunk::<TILE>() {
        return *row;
    }
    let mut row = [R::ZERO; TILE];
    row[..part.len()].copy_from_slice(part);
    row
}

/// The other way.
#[inline(always)]
fn store<R: Real>(x: &mut [R], c: usize, row: &Row<R>) {
    let part = &mut x[c * TILE..];
    match part.first_chunk_mut::<TILE>() {
        Some(part) => *part = *row,
        None => part.copy_from_slice(&row[..part.len()]),
    }
}

/// A state as tiles, one behind the other.
#[inline(always)]
fn load_state<R: Real>(sizes: Sizes, state: Option<&[R]>) -> Vec<Row<R>> {
    let tiles = sizes.value_width.div_ceil(TILE);
    let mut rows = vec![[R::ZERO; TILE]; tiles * sizes.key_width];
    for (c, rows) in rows.chunks_exact_mut(sizes.key_width).enumerate() {
        for (i, row) in rows.iter_mut().enumerate() {
            if let Some(state) = state {
                *row = load(&state[i * sizes.value_width..(i + 1) * sizes.value_width], c);
            }
        }
    }
    rows
}

/// The other way.
#[inline(always)]
fn store_state<R: Real>(sizes: Sizes, rows: &[Row<R>], state: &mut [R]) {
    for (c, rows) in rows.chunks_exact(sizes.key_width).enumerate() {
        for (row, state) in rows.iter().zip(state.chunks_exact_mut(sizes.value_width)) {
            store(state, c, row);
        }
    }
}

/// Where the forward pass of one head puts what it finds.
struct Found<'a, R> {
    o: RowsMut<'a, R>,
    last: RowsMut<'a, R>,
    kept: Option<RowsMut<'a, R>>,
}

struct Forward<'a, R, U> {
    head: Head<'a, R>,
    found: Found<'a, R>,
    rule: PhantomData<U>,
}

impl<R: Real, U: Rule> Job for Forward<'_, R, U> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self) {
        let Self { head, mut found, .. } = self;
        let (sizes, width) = (head.sizes, head.sizes.key_width);
        let mut states = load_state(sizes, head.start);
        let mut spare = vec![[R::ZERO; TILE]; width];
        let mut factors = Factors::new(width);
        for block in 0..sizes.blocks() {
            if let Some(kept) = &mut found.kept {
                store_state(sizes, &states, kept.at(block));
            }
            let first = block * BLOCK;
            let count = BLOCK.min(sizes.tokens - first);
            factors.fill(&head, first, count);
            for (c, state) in states.chunks_exact_mut(width).enumerate() {
                let (mut now, mut next) = (&mut *state, spare.as_mut_slice());
                for j in 0..count {
                    let token = factors.token(&head, j, first + j);
                    let v = load(head.v.at(first + j), c);
                    let (o, _) = advance::<M, R, U>(now, next, token, &v);
                    store(found.o.at(first + j), c, &o);
                    (now, next) = (next, now);
                }
                if count % 2 == 1 {
                    state.copy_from_slice(&spare);
                }
            }
        }
        store_state(sizes, &states, found.last.at(0));
    }
}

/// The forward pass: `o`, the last state, and states for the backward pass, as long as
/// [`Sizes::kept`] says, where they are wanted.
pub(super) fn forward<R: Real>(
    x: Inputs<'_, R>,
    o: &mut [R],
    last: &mut [R],
    kept: Option<&mut [R]>,
) {
    match x.kind() {
        Kind::Linear => forward_as::<R, Linear>(x, o, last, kept),
        Kind::LinearBefore => forward_as::<R, LinearBefore>(x, o, last, kept),
        Kind::Delta => forward_as::<R, Delta>(x, o, last, kept),
        Kind::LowRank => forward_as::<R, LowRank>(x, o, last, kept),
    }
}

fn forward_as<R: Real, U: Rule + Send>(
    x: Inputs<'_, R>,
    o: &mut [R],
    last: &mut [R],
    kept: Option<&mut [R]>,
) {
    let s = x.sizes;
    let (o, last, kept) = (Shared::new(o), Shared::new(last), kept.map(Shared::new));
    for_each(s.batch * s.heads, s.work(), |n| {
        let (b, h) = (n / s.heads, n % s.heads);
        // SAFETY: every head has rows of its own in each of the three buffers.
        #[allow(unsafe_code)]
        let found = unsafe {
            Found {
                o: o.rows(s.place(b, h, s.heads, s.value_width)),
                last: last.rows(s.own(b, h, 1)),
                kept: kept.as_ref().map(|kept| kept.rows(s.own(b, h, s.blocks()))),
            }
        };
        dispatch(Forward { head: x.head(b, h), found, rule: PhantomData::<U> });
    });
}
