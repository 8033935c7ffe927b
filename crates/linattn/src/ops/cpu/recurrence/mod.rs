//! The recurrences with a matrix for a state, forwards and backwards, one token after another with the
//! state in the first cache; heads go in parallel.
//!
//! For the backward pass the forward pass keeps the state at every [`BLOCK`]th token. A block's states
//! are computed again from there, so that nothing is ever divided by a decay.

mod backward;
mod tile;

pub(super) use backward::{Given, backward};

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch};
use super::shared::{Place, Rows, RowsMut, Shared, rows_at};
use crate::ops::recurrence::{Dims, LogDecay, Read, Recurrence, Transition};
use std::marker::PhantomData;
use tile::{Delta, Linear, LinearBefore, LowRank, Row, Rule, TILE, Token, advance};

/// Tokens from one state that is kept to the next.
const BLOCK: usize = 16;

/// Tokens of one sequence, and its states.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence {
    /// Its number.
    number: usize,
    /// Its first token, of all rows' tokens.
    first: usize,
    tokens: usize,
    /// The first block of tokens, of all sequences'.
    block: usize,
}

impl Sequence {
    fn blocks(&self) -> usize {
        self.tokens.div_ceil(BLOCK)
    }
}

/// All sequences of a recurrence.
fn sequences<T>(x: &Recurrence<T>, dims: Dims) -> Vec<Sequence> {
    let lengths: Vec<usize> = match &x.lengths {
        Some(lengths) => lengths.lengths().collect(),
        None => vec![dims.tokens; dims.batch],
    };
    let (mut first, mut block) = (0, 0);
    let place = |(number, tokens)| {
        let sequence = Sequence { number, first, tokens, block };
        first += tokens;
        block += sequence.blocks();
        sequence
    };
    lengths.into_iter().enumerate().map(place).collect()
}

/// States that the forward pass keeps for the backward pass, of all heads.
pub(super) fn kept<T>(x: &Recurrence<T>, dims: Dims) -> usize {
    let blocks: usize = sequences(x, dims).iter().map(Sequence::blocks).sum();
    blocks * dims.heads * dims.state_numbers()
}

impl Dims {
    /// Numbers of one state.
    fn state_numbers(&self) -> usize {
        self.key_width * self.value_width
    }

    /// Numbers of all states.
    pub(super) fn states(&self) -> usize {
        self.sequences * self.heads * self.state_numbers()
    }

    /// Multiplications of one head of one sequence, roughly.
    fn work(&self) -> usize {
        let tokens = (self.batch * self.tokens).div_ceil(self.sequences);
        4 * tokens * self.key_width * self.value_width.next_multiple_of(TILE)
    }

    /// A head's rows, where there are `heads` of `width`.
    fn place(&self, of: Sequence, h: usize, heads: usize, width: usize) -> Place {
        ((of.first * heads + h) * width, [of.tokens, heads * width, width])
    }

    /// A head's state.
    fn state(&self, of: Sequence, h: usize) -> Place {
        let numbers = self.state_numbers();
        ((of.number * self.heads + h) * numbers, [1, numbers, numbers])
    }

    /// A head's states that are kept.
    fn kept(&self, of: Sequence, h: usize) -> Place {
        let numbers = self.state_numbers();
        ((of.block * self.heads + h * of.blocks()) * numbers, [of.blocks(), numbers, numbers])
    }

    /// A head's part of every tensor of `x`.
    fn places<T>(&self, x: &Recurrence<T>, of: Sequence, h: usize) -> Recurrence<Place> {
        let own = |width| self.place(of, h, self.heads, width);
        let (rows, scalar) = (own(self.key_width), own(1));
        let key_head = h / (self.heads / self.key_heads);
        let keys = self.place(of, key_head, self.key_heads, self.key_width);
        Recurrence {
            q: keys,
            k: keys,
            v: own(self.value_width),
            decay: x.decay.as_ref().map(|decay| match decay {
                LogDecay::Scalar(_) => LogDecay::Scalar(scalar),
                LogDecay::Vector(_) => LogDecay::Vector(rows),
            }),
            transition: match &x.transition {
                Transition::Identity { read } => Transition::Identity { read: *read },
                Transition::Delta { erase, read, .. } => {
                    let erase = erase.as_ref().map(|_| rows);
                    Transition::Delta { beta: scalar, erase, read: *read }
                }
                Transition::LowRank { .. } => Transition::LowRank { a: rows, b: rows },
            },
            state: x.state.as_ref().map(|_| self.state(of, h)),
            lengths: x.lengths.clone(),
        }
    }
}

/// One head's rows.
struct Head<'a, R> {
    dims: Dims,
    /// Its tokens.
    of: Sequence,
    x: Recurrence<Rows<'a, R>>,
    /// Rows that read the state: erase keys of a delta rule, or a.
    a: Option<Rows<'a, R>>,
    b: Option<Rows<'a, R>>,
    beta: Option<Rows<'a, R>>,
    /// Whether they read after the decay.
    a_after_decay: bool,
}

impl<'a, R: Real> Head<'a, R> {
    fn new(x: &Recurrence<&'a [R]>, dims: Dims, of: Sequence, h: usize) -> Self {
        let places = dims.places(x, of, h);
        let x = x.clone().zip(places).map(|(x, place)| rows_at(x, place));
        let (transition, k) = (x.transition, x.k);
        let head = Self { dims, of, x, a: None, b: None, beta: None, a_after_decay: false };
        match transition {
            Transition::Identity { .. } => head,
            Transition::Delta { beta, erase, read } => Self {
                a: Some(erase.unwrap_or(k)),
                beta: Some(beta),
                a_after_decay: read == Read::After,
                ..head
            },
            Transition::LowRank { a, b } => Self { a: Some(a), b: Some(b), ..head },
        }
    }

    /// The state before the first token.
    fn start(&self) -> Option<&'a [R]> {
        self.x.state.map(|state| state.at(0))
    }
}

/// Decay factors of every token of a block.
struct Factors<R> {
    width: usize,
    kept: Vec<R>,
    a: Vec<R>,
}

impl<R: Real> Factors<R> {
    fn new(width: usize) -> Self {
        Self { width, kept: vec![R::ONE; BLOCK * width], a: vec![R::ZERO; BLOCK * width] }
    }

    /// For `count` tokens from `first`.
    #[inline(always)]
    fn fill(&mut self, head: &Head<'_, R>, first: usize, count: usize) {
        let width = self.width;
        for j in 0..count {
            let (at, t) = (j * width..(j + 1) * width, first + j);
            let (kept, a) = (&mut self.kept[at.clone()], &mut self.a[at]);
            match head.x.decay {
                Some(LogDecay::Scalar(g)) => kept.fill(g.at(t)[0].exp()),
                Some(LogDecay::Vector(g)) => {
                    kept.iter_mut().zip(g.at(t)).for_each(|(kept, g)| *kept = g.exp());
                }
                None => {}
            }
            let Some(rows) = head.a else { continue };
            a.copy_from_slice(rows.at(t));
            if head.a_after_decay {
                a.iter_mut().zip(kept).for_each(|(a, kept)| *a *= *kept);
            }
        }
    }

    /// Token `j` of the block.
    #[inline(always)]
    fn token<'s>(&'s self, head: &Head<'s, R>, j: usize, t: usize) -> Token<'s, R> {
        let at = j * self.width..(j + 1) * self.width;
        Token {
            kept: &self.kept[at.clone()],
            a: &self.a[at],
            q: head.x.q.at(t),
            k: head.x.k.at(t),
            b: head.b.map_or(&[], |b| b.at(t)),
            beta: head.beta.map_or(R::ONE, |beta| beta.at(t)[0]),
            a_after_decay: head.a_after_decay,
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
fn load_state<R: Real>(dims: Dims, state: Option<&[R]>) -> Vec<Row<R>> {
    let tiles = dims.value_width.div_ceil(TILE);
    let mut rows = vec![[R::ZERO; TILE]; tiles * dims.key_width];
    for (c, rows) in rows.chunks_exact_mut(dims.key_width).enumerate() {
        for (i, row) in rows.iter_mut().enumerate() {
            if let Some(state) = state {
                *row = load(&state[i * dims.value_width..(i + 1) * dims.value_width], c);
            }
        }
    }
    rows
}

/// The other way.
#[inline(always)]
fn store_state<R: Real>(dims: Dims, rows: &[Row<R>], state: &mut [R]) {
    for (c, rows) in rows.chunks_exact(dims.key_width).enumerate() {
        for (row, state) in rows.iter().zip(state.chunks_exact_mut(dims.value_width)) {
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
        let (dims, of, width) = (head.dims, head.of, head.dims.key_width);
        let mut states = load_state(dims, head.start());
        let mut spare = vec![[R::ZERO; TILE]; width];
        let mut factors = Factors::new(width);
        for block in 0..of.blocks() {
            if let Some(kept) = &mut found.kept {
                store_state(dims, &states, kept.at(block));
            }
            let first = block * BLOCK;
            let count = BLOCK.min(of.tokens - first);
            factors.fill(&head, first, count);
            for (c, state) in states.chunks_exact_mut(width).enumerate() {
                let (mut now, mut next) = (&mut *state, spare.as_mut_slice());
                for j in 0..count {
                    let token = factors.token(&head, j, first + j);
                    let v = load(head.x.v.at(first + j), c);
                    let (o, _) = advance::<M, R, U>(now, next, token, &v);
                    store(found.o.at(first + j), c, &o);
                    (now, next) = (next, now);
                }
                if count % 2 == 1 {
                    state.copy_from_slice(&spare);
                }
            }
        }
        store_state(dims, &states, found.last.at(0));
    }
}

/// Where the forward pass puts what it finds: `o`, the last state, and states for the backward pass, as long as
/// [`kept`] says, where they are wanted.
pub(super) struct Outputs<'a, R> {
    pub(super) o: Shared<'a, R>,
    pub(super) last: Shared<'a, R>,
    pub(super) kept: Option<Shared<'a, R>>,
}

/// The forward pass.
pub(super) fn forward<R: Real>(x: Recurrence<&[R]>, dims: Dims, found: Outputs<'_, R>) {
    match x.transition {
        Transition::Identity { read: Read::After } => forward_as::<R, Linear>(x, dims, found),
        Transition::Identity { read: Read::Before } => {
            forward_as::<R, LinearBefore>(x, dims, found);
        }
        Transition::Delta { .. } => forward_as::<R, Delta>(x, dims, found),
        Transition::LowRank { .. } => forward_as::<R, LowRank>(x, dims, found),
    }
}

fn forward_as<R: Real, U: Rule + Send>(x: Recurrence<&[R]>, s: Dims, found: Outputs<'_, R>) {
    let Outputs { o, last, kept } = found;
    let sequences = sequences(&x, s);
    for_each(s.sequences * s.heads, s.work(), |n| {
        let (of, h) = (sequences[n / s.heads], n % s.heads);
        // SAFETY: every head has rows of its own in each of the three buffers.
        #[allow(unsafe_code)]
        let found = unsafe {
            Found {
                o: o.rows(s.place(of, h, s.heads, s.value_width)),
                last: last.rows(s.state(of, h)),
                kept: kept.as_ref().map(|kept| kept.rows(s.kept(of, h))),
            }
        };
        dispatch(Forward { head: Head::new(&x, s, of, h), found, rule: PhantomData::<U> });
    });
}
