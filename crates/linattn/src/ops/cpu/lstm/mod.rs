//! The recurrences of LSTM and sLSTM: a few sequences of one head at a time, token by token, with their cells in the
//! first cache; heads and groups of sequences go in parallel.

mod cells;

use super::parallel::for_each;
use super::product::{Matrix, sum_of_products};
use super::real::{Job, LANES, Machine, Real, dispatch, load, store};
use super::shared::{Place, Rows, RowsMut, Shared, rows_at};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed, zeros};
use crate::ops::fused::{LOWEST, LstmCell, LstmRecurrence};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use cells::{GATES, Next, Previous, SAVED, after, before, multiply};
use std::borrow::Cow;

/// Sequences that share what is read of R.
const GROUP: usize = 4;
/// Cells of the widest head that goes alone: products with wider ones are for all cores.
const WIDEST_ALONE: usize = 256;

type Tensors = LstmRecurrence<FlexTensor>;

#[derive(Debug, Clone, Copy)]
struct Dims {
    cell: LstmCell,
    batch: usize,
    tokens: usize,
    heads: usize,
    width: usize,
}

impl Dims {
    fn of(x: &Tensors) -> Self {
        let [batch, tokens, heads] = [0, 1, 2].map(|d| x.x.shape()[d]);
        Self { cell: x.cell, batch, tokens, heads, width: x.r.shape()[1] }
    }

    /// Vectors of the state.
    fn vectors(&self) -> usize {
        self.cell.vectors()
    }

    /// Those that have a gradient: all but m.
    fn tracked(&self) -> usize {
        self.vectors().min(3)
    }

    /// Numbers of one vector of the state.
    fn state(&self) -> usize {
        self.batch * self.heads * self.width
    }

    /// Rows of a head of a sequence, where `of` numbers belong to each cell.
    fn rows(&self, b: usize, head: usize, of: usize) -> Place {
        let width = of * self.width;
        let first = (b * self.tokens * self.heads + head) * width;
        (first, [self.tokens, self.heads * width, width])
    }

    /// The vector of a head of a sequence.
    fn cells(&self, b: usize, head: usize) -> Place {
        let width = self.width;
        ((b * self.heads + head) * width, [1, width, width])
    }

    /// Runs `job` on every head of every [`GROUP`] of sequences, and of each sequence that is left over.
    fn for_each(&self, job: impl Fn(Group) + Send + Sync) {
        let (whole, rest) = (self.batch / GROUP, self.batch % GROUP);
        let work = self.tokens * GATES * self.width * (self.width + LANES);
        for_each((whole + rest) * self.heads, work, |n| {
            let (head, n) = (n % self.heads, n / self.heads);
            let first = if n < whole { n * GROUP } else { n + (GROUP - 1) * whole };
            job(Group { head, first, whole: n < whole });
        });
    }
}

/// A head of some sequences: of [`GROUP`], if it is `whole`, or of one.
#[derive(Clone, Copy)]
struct Group {
    head: usize,
    first: usize,
    whole: bool,
}

/// Columns up to a multiple of [`LANES`].
fn padded(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

/// Blocks `[H, I, O]` with rows of [`padded`] width, or with rows and columns swapped before.
fn blocks<R: Number>(x: &FlexTensor, swap: bool) -> Vec<R> {
    let [heads, inner, columns] = [0, 1, 2].map(|d| x.shape()[d]);
    let x = slice::<R>(x);
    let [rows, width] = if swap { [columns, inner] } else { [inner, columns] };
    let mut all = zeros::<R>(heads * rows * padded(width));
    for (head, to) in all.chunks_exact_mut(rows * padded(width)).enumerate() {
        let from = &x[head * inner * columns..];
        for (i, to) in to.chunks_exact_mut(padded(width)).enumerate() {
            match swap {
                true => (0..width).for_each(|j| to[j] = from[j * columns + i]),
                false => to[..width].copy_from_slice(&from[i * columns..][..width]),
            }
        }
    }
    all
}

/// R with rows of [`padded`] width: as it lies, if they are.
fn recurrent<R: Number>(x: &Tensors) -> Cow<'_, [R]> {
    match x.r.shape()[2].is_multiple_of(LANES) {
        true => Cow::Borrowed(slice(&x.r)),
        false => Cow::Owned(blocks(&x.r, false)),
    }
}

/// The block of a head.
fn block<R>(all: &[R], heads: usize, head: usize) -> &[R] {
    let numbers = all.len() / heads;
    &all[head * numbers..][..numbers]
}

/// The recurrence, of one type throughout; none of it for one wide head.
pub(super) fn lstm(x: Tensors, keep: bool) -> Option<Pass<Flex>> {
    let Dims { heads, width, .. } = Dims::of(&x);
    if heads == 1 && width > WIDEST_ALONE {
        return None;
    }
    let places = x.refill(std::iter::repeat(()));
    let tensors: Vec<_> = x.into_vec().into_iter().map(contiguous).collect();
    let dtype = one_type(&tensors)?;
    typed!(dtype, lstm_of(places.refill(tensors), keep))
}

struct Forward<'a, R, const S: usize> {
    dims: Dims,
    /// R of the head, `[D, padded(4 D)]`.
    weights: &'a [R],
    x: [Rows<'a, R>; S],
    /// The cells' vectors before the first token.
    state: Option<Vec<[Rows<'a, R>; S]>>,
    h: [RowsMut<'a, R>; S],
    /// Those after the last, but for h.
    last: Vec<[RowsMut<'a, R>; S]>,
    saved: Option<[RowsMut<'a, R>; S]>,
}

impl<R: Real, const S: usize> Job for Forward<'_, R, S> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Dims { cell: kind, tokens, width, .. } = self.dims;
        let columns = padded(GATES * width);
        let mut gates = vec![R::ZERO; S * columns];
        let [mut h, mut c, mut n] = [(); 3].map(|()| vec![R::ZERO; S * width]);
        let mut m = vec![R::of(LOWEST); S * width];
        if let Some(state) = &self.state {
            for (to, from) in [&mut h, &mut c, &mut n, &mut m].into_iter().zip(state) {
                for (to, from) in to.chunks_exact_mut(width).zip(from) {
                    to.copy_from_slice(from.at(0));
                }
            }
        }
        for t in 0..tokens {
            for (gates, x) in gates.chunks_exact_mut(columns).zip(&self.x) {
                gates[..GATES * width].copy_from_slice(x.at(t));
            }
            multiply::<M, R, S>(&mut gates, &h, self.weights, [width, columns]);
            for s in 0..S {
                let gates = &gates[s * columns..][..GATES * width];
                for first in (0..width).step_by(LANES) {
                    let part = |j| load(gates, j, width, first);
                    let cell = |x: &[R]| load(x, s, width, first);
                    let gates = std::array::from_fn(part);
                    let next = after(kind, &gates, &[cell(&c), cell(&n), cell(&m)]);
                    let Next { h: next_h, m: next_m, saved } = next;
                    store(&mut h, s, width, first, &next_h);
                    store(&mut c, s, width, first, &saved[SAVED - 2]);
                    store(&mut n, s, width, first, &saved[SAVED - 1]);
                    store(&mut m, s, width, first, &next_m);
                    if let Some(rows) = &mut self.saved {
                        let row = rows[s].at(t);
                        for j in 0..SAVED {
                            store(row, j, width, first, &saved[j]);
                        }
                    }
                }
                self.h[s].at(t).copy_from_slice(&h[s * width..][..width]);
            }
        }
        for (to, from) in self.last.iter_mut().zip([&c, &n, &m]) {
            for (to, from) in to.iter_mut().zip(from.chunks_exact(width)) {
                to.at(0).copy_from_slice(from);
            }
        }
    }
}

fn lstm_of<R: Number>(x: Tensors, keep: bool) -> Pass<Flex> {
    let dims = Dims::of(&x);
    let Dims { batch, tokens, heads, width, .. } = dims;
    let state = dims.state();
    let mut h = zeros::<R>(tokens * state);
    let mut last = vec![zeros::<R>(state); dims.vectors() - 1];
    let mut saved = keep.then(|| zeros::<R>(SAVED * tokens * state));
    let weights = recurrent::<R>(&x);
    let to = Results {
        h: Shared::new(&mut h),
        last: last.iter_mut().map(|last| Shared::new(last)).collect(),
        saved: saved.as_mut().map(|saved| Shared::new(saved)),
    };
    dims.for_each(|group| match group.whole {
        true => forward::<R, GROUP>(&x, dims, &weights, &to, group),
        false => forward::<R, 1>(&x, dims, &weights, &to, group),
    });
    let of_state = [batch, 1, heads, width];
    let h = tensor(h, [batch, tokens, heads, width]);
    let last = last.into_iter().map(|last| tensor(last, of_state));
    let outputs = [h.clone()].into_iter().chain(last).collect();
    let backward = saved.map(|saved| -> BackwardPass<Flex> {
        Box::new(move |gradients, wanted| {
            let gradients: Vec<_> = gradients.into_iter().map(|d| d.map(contiguous)).collect();
            backward_of(&x, &saved, slice(&h), &gradients, wanted)
        })
    });
    Pass { outputs, backward }
}

/// Buffers of a forward pass.
struct Results<'a, R> {
    h: Shared<'a, R>,
    last: Vec<Shared<'a, R>>,
    saved: Option<Shared<'a, R>>,
}

fn forward<R: Number, const S: usize>(
    x: &Tensors,
    dims: Dims,
    weights: &[R],
    to: &Results<'_, R>,
    Group { head, first, .. }: Group,
) {
    let rows = |s: usize, of: usize| dims.rows(first + s, head, of);
    let cells = |s: usize| dims.cells(first + s, head);
    let state = x.state.as_ref().map(|state| {
        let of_sequences = |x| std::array::from_fn(|s| rows_at(slice(x), cells(s)));
        state.iter().map(of_sequences).collect()
    });
    // SAFETY: every head of every sequence has rows of its own, and one group has it.
    #[allow(unsafe_code)]
    let (h, last, saved) = unsafe {
        let h = std::array::from_fn(|s| to.h.rows(rows(s, 1)));
        let last =
            to.last.iter().map(|last| std::array::from_fn(|s| last.rows(cells(s)))).collect();
        let saved =
            to.saved.as_ref().map(|saved| std::array::from_fn(|s| saved.rows(rows(s, SAVED))));
        (h, last, saved)
    };
    dispatch(Forward::<R, S> {
        dims,
        weights: block(weights, dims.heads, head),
        x: std::array::from_fn(|s| rows_at(slice(&x.x), rows(s, GATES))),
        state,
        h,
        last,
        saved,
    });
}

struct Backward<'a, R, const S: usize> {
    dims: Dims,
    /// R of the head, turned, `[4 D, padded(D)]`.
    weights: &'a [R],
    saved: [Rows<'a, R>; S],
    h: [Rows<'a, R>; S],
    /// h, c and, of sLSTM, n before the first token.
    state: Option<Vec<[Rows<'a, R>; S]>>,
    d_h: Option<[Rows<'a, R>; S]>,
    /// Of the last c and n.
    d_last: [Option<[Rows<'a, R>; S]>; 2],
    d_x: [RowsMut<'a, R>; S],
    /// Of those.
    d_state: Vec<[RowsMut<'a, R>; S]>,
    /// h before each token.
    before: [RowsMut<'a, R>; S],
}

impl<R: Real, const S: usize> Job for Backward<'_, R, S> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        let Dims { cell: kind, tokens, width, .. } = self.dims;
        let (columns, gates) = (padded(width), GATES * width);
        let mut rows = vec![R::ZERO; S * gates];
        let mut d_h = vec![R::ZERO; S * columns];
        let mut d_cells = [(); 2].map(|()| vec![R::ZERO; S * width]);
        for (to, from) in d_cells.iter_mut().zip(&self.d_last) {
            for (to, from) in to.chunks_exact_mut(width).zip(from.iter().flatten()) {
                to.copy_from_slice(from.at(0));
            }
        }
        let zeros = vec![R::ZERO; width];
        for t in (0..tokens).rev() {
            for s in 0..S {
                let start = |j: usize| {
                    self.state
                        .as_ref()
                        .and_then(|state| state.get(j))
                        .map_or(&zeros[..], |x| x[s].at(0))
                };
                let row = self.saved[s].at(t);
                let [h, c, n] = match t.checked_sub(1) {
                    Some(t) => {
                        let part = |j: usize| &self.saved[s].at(t)[j * width..][..width];
                        [self.h[s].at(t), part(SAVED - 2), part(SAVED - 1)]
                    }
                    None => [start(0), start(1), start(2)],
                };
                self.before[s].at(t).copy_from_slice(h);
                let d_h = &mut d_h[s * columns..][..columns];
                if let Some(given) = &self.d_h {
                    super::real::add(&mut d_h[..width], given[s].at(t));
                }
                let rows = &mut rows[s * gates..][..gates];
                for first in (0..width).step_by(LANES) {
                    let saved = std::array::from_fn(|j| load(row, j, width, first));
                    let [c, n] = [c, n].map(|x| load(x, 0, width, first));
                    let [d_c, d_n] = d_cells.each_ref().map(|d| load(d, s, width, first));
                    let d = [load(&d_h[..width], 0, width, first), d_c, d_n];
                    let Previous { gates, c, n } = before(kind, &saved, &[c, n], &d);
                    for j in 0..GATES {
                        store(rows, j, width, first, &gates[j]);
                    }
                    store(&mut d_cells[0], s, width, first, &c);
                    store(&mut d_cells[1], s, width, first, &n);
                }
                self.d_x[s].at(t).copy_from_slice(rows);
            }
            d_h.fill(R::ZERO);
            multiply::<M, R, S>(&mut d_h, &rows, self.weights, [gates, columns]);
        }
        let (of_h, of_cells) = self.d_state.split_first_mut().expect("h comes first");
        for s in 0..S {
            of_h[s].at(0).copy_from_slice(&d_h[s * columns..][..width]);
            for (to, from) in of_cells.iter_mut().zip(&d_cells) {
                to[s].at(0).copy_from_slice(&from[s * width..][..width]);
            }
        }
    }
}

/// Given to a backward pass beside the inputs.
struct Given<'a, R> {
    weights: &'a [R],
    saved: &'a [R],
    h: &'a [R],
    d_h: Option<&'a [R]>,
    d_last: [Option<&'a [R]>; 2],
}

/// Buffers of a backward pass.
struct Gradients<'a, R> {
    x: Shared<'a, R>,
    state: Vec<Shared<'a, R>>,
    before: Shared<'a, R>,
}

fn backward<R: Number, const S: usize>(
    x: &Tensors,
    dims: Dims,
    given: &Given<'_, R>,
    to: &Gradients<'_, R>,
    Group { head, first, .. }: Group,
) {
    let rows = |s: usize, of: usize| dims.rows(first + s, head, of);
    let cells = |s: usize| dims.cells(first + s, head);
    let start = |x| std::array::from_fn(|s| rows_at(slice(x), cells(s)));
    // SAFETY: every head of every sequence has rows of its own, and one group has it.
    #[allow(unsafe_code)]
    let (d_x, d_state, before) = unsafe {
        let d_x = std::array::from_fn(|s| to.x.rows(rows(s, GATES)));
        let d_state = to.state.iter().map(|d| std::array::from_fn(|s| d.rows(cells(s)))).collect();
        (d_x, d_state, std::array::from_fn(|s| to.before.rows(rows(s, 1))))
    };
    dispatch(Backward::<R, S> {
        dims,
        weights: block(given.weights, dims.heads, head),
        saved: std::array::from_fn(|s| rows_at(given.saved, rows(s, SAVED))),
        h: std::array::from_fn(|s| rows_at(given.h, rows(s, 1))),
        state: x.state.as_ref().map(|state| state.iter().take(dims.tracked()).map(start).collect()),
        d_h: given.d_h.map(|d| std::array::from_fn(|s| rows_at(d, rows(s, 1)))),
        d_last: given.d_last.map(|d| d.map(|d| std::array::from_fn(|s| rows_at(d, cells(s))))),
        d_x,
        d_state,
        before,
    });
}

/// Gradients of all inputs, that of m being 0, from those of h and the last vectors.
fn backward_of<R: Number>(
    x: &Tensors,
    saved: &[R],
    h: &[R],
    gradients: &[Option<FlexTensor>],
    wanted: &[bool],
) -> Vec<Option<FlexTensor>> {
    let dims = Dims::of(x);
    let Dims { batch, tokens, heads, width, .. } = dims;
    let [mut d_x, mut before] = [GATES, 1].map(|of| zeros::<R>(of * tokens * dims.state()));
    let mut d_state = vec![zeros::<R>(dims.state()); dims.tracked()];
    let given = Given {
        weights: &blocks(&x.r, true),
        saved,
        h,
        d_h: maybe(&gradients[0]),
        d_last: [1, 2].map(|n| gradients.get(n).and_then(maybe)),
    };
    let to = Gradients {
        x: Shared::new(&mut d_x),
        state: d_state.iter_mut().map(|d| Shared::new(d)).collect(),
        before: Shared::new(&mut before),
    };
    dims.for_each(|group| match group.whole {
        true => backward::<R, GROUP>(x, dims, &given, &to, group),
        false => backward::<R, 1>(x, dims, &given, &to, group),
    });
    let d_r = wanted[1].then(|| tensor(recurrent_gradient(dims, &before, &d_x), x.r.shape()));
    let mut all = vec![Some(tensor(d_x, x.x.shape())), d_r];
    if x.state.is_some() {
        let of_state = |d| Some(tensor(d, [batch, 1, heads, width]));
        all.extend(d_state.into_iter().map(of_state));
        all.resize_with(2 + dims.vectors(), || of_state(zeros::<R>(dims.state())));
    }
    all
}

/// dR: each head's `h_{t-1}^T dx_t`, summed over all tokens.
fn recurrent_gradient<R: Number>(dims: Dims, before: &[R], d_x: &[R]) -> Vec<R> {
    let Dims { batch, tokens, heads, width, .. } = dims;
    let of_head = |x, head: usize, width: usize| {
        let (rows, columns) = (batch * tokens, heads * width);
        Matrix::new(x, [rows, columns]).columns(head * width, width)
    };
    let product =
        |head| sum_of_products(of_head(before, head, width), of_head(d_x, head, GATES * width));
    (0..heads).flat_map(product).collect()
}
