//! Products with an activated gate.

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch};
use super::shared::{Fresh, Rows, RowsMut};
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed};
use crate::ops::fused::{Activation, GatedProduct};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// Numbers of a piece.
const PIECE: usize = 4096;

type Product = GatedProduct<FlexTensor>;

/// The activation and its derivative.
#[inline(always)]
pub(super) fn activated<R: Real>(activation: Activation, z: R) -> (R, R) {
    let s = z.sigmoid();
    match activation {
        Activation::Silu => (z * s, s * (R::ONE + z * (R::ONE - s))),
        Activation::Sigmoid => (s, s * (R::ONE - s)),
        Activation::Softplus => (-(-z).log_sigmoid(), s),
    }
}

/// `activation(gate) * value`, of one type throughout.
pub(super) fn gated_product(p: Product, keep: bool) -> Option<Pass<Flex>> {
    let dtype = one_type(p.clone().into_vec().iter())?;
    let p = p.refill(p.clone().into_vec().into_iter().map(contiguous));
    typed!(dtype, gated_product_of(p, keep))
}

/// How gates and values lie: in one buffer for both, or in two.
#[derive(Clone, Copy)]
struct Place {
    numbers: usize,
    /// Of a row of gates, where values lie behind each.
    width: Option<usize>,
}

/// Rows of a task: the first number and `[count, stride, width]`, of gates and of outputs.
struct Piece {
    gates: (usize, [usize; 3]),
    outputs: (usize, [usize; 3]),
}

impl Place {
    fn new(p: &Product) -> Self {
        let shape = p.gate.shape();
        let width = shape[shape.num_dims() - 1] / 2;
        Self { numbers: shape.num_elements(), width: p.value.is_none().then_some(width) }
    }

    /// Rows of a piece, where rows have a width.
    fn rows(width: usize) -> usize {
        (PIECE / width.max(1)).max(1)
    }

    fn pieces(self) -> usize {
        match self.width {
            None => self.numbers.div_ceil(PIECE),
            Some(0) => 0,
            Some(width) => (self.numbers / (2 * width)).div_ceil(Self::rows(width)),
        }
    }

    fn piece(self, i: usize) -> Piece {
        let Some(width) = self.width else {
            let first = i * PIECE;
            let count = PIECE.min(self.numbers - first);
            let rows = (first, [1, count, count]);
            return Piece { gates: rows, outputs: rows };
        };
        let first = i * Self::rows(width);
        let count = Self::rows(width).min(self.numbers / (2 * width) - first);
        Piece {
            gates: (first * 2 * width, [count, 2 * width, width]),
            outputs: (first * width, [count, width, width]),
        }
    }
}

/// Where values of a piece begin.
fn values(place: Place, (first, shape): (usize, [usize; 3])) -> (usize, [usize; 3]) {
    (first + place.width.unwrap_or(0), shape)
}

struct Forward<'a, R> {
    activation: Activation,
    count: usize,
    gate: Rows<'a, R>,
    value: Rows<'a, R>,
    y: RowsMut<'a, R>,
}

impl<R: Real> Job for Forward<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        for i in 0..self.count {
            let (gate, value) = (self.gate.at(i), self.value.at(i));
            multiply(self.activation, gate, value, self.y.at(i));
        }
    }
}

#[inline(always)]
fn multiply<R: Real>(activation: Activation, gate: &[R], value: &[R], y: &mut [R]) {
    for ((y, &gate), &value) in y.iter_mut().zip(gate).zip(value) {
        *y = activated(activation, gate).0 * value;
    }
}

struct Backward<'a, R> {
    activation: Activation,
    count: usize,
    gate: Rows<'a, R>,
    value: Rows<'a, R>,
    d_y: Rows<'a, R>,
    d_gate: RowsMut<'a, R>,
    d_value: RowsMut<'a, R>,
}

impl<R: Real> Job for Backward<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        for i in 0..self.count {
            let given = [self.gate.at(i), self.value.at(i), self.d_y.at(i)];
            multiply_backward(self.activation, given, self.d_gate.at(i), self.d_value.at(i));
        }
    }
}

#[inline(always)]
fn multiply_backward<R: Real>(
    activation: Activation,
    [gate, value, d_y]: [&[R]; 3],
    d_gate: &mut [R],
    d_value: &mut [R],
) {
    let given = gate.iter().zip(value).zip(d_y);
    for ((d_gate, d_value), ((&gate, &value), &d_y)) in d_gate.iter_mut().zip(d_value).zip(given) {
        let (y, slope) = activated(activation, gate);
        *d_value = d_y * y;
        *d_gate = d_y * value * slope;
    }
}

fn gated_product_of<R: Number>(p: Product, keep: bool) -> Pass<Flex> {
    let place = Place::new(&p);
    let mut shape = p.gate.shape();
    if let Some(width) = place.width {
        let last = shape.num_dims() - 1;
        shape[last] = width;
    }
    let mut y = Fresh::<R>::new(shape.num_elements());
    let shared = y.shared();
    let gates = slice::<R>(&p.gate);
    let from = maybe(&p.value).unwrap_or(gates);
    for_each(place.pieces(), 8 * PIECE, |i| {
        let piece = place.piece(i);
        let (gate, value) = (rows(gates, piece.gates), rows(from, values(place, piece.gates)));
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let y = unsafe { shared.rows(piece.outputs) };
        dispatch(Forward { activation: p.activation, count: piece.gates.1[0], gate, value, y });
    });
    let outputs = vec![tensor(y.filled(), shape)];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| match gradients.into_iter().next().flatten() {
            Some(d_y) => gated_product_backward::<R>(&p, &contiguous(d_y)),
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

fn rows<R>(x: &[R], (first, [_, stride, width]): (usize, [usize; 3])) -> Rows<'_, R> {
    Rows::new(x, first, [stride, width])
}

fn gated_product_backward<R: Number>(p: &Product, d_y: &FlexTensor) -> Vec<Option<FlexTensor>> {
    let place = Place::new(p);
    let (gates, d_y) = (slice::<R>(&p.gate), slice::<R>(d_y));
    let own = maybe(&p.value);
    let from = own.unwrap_or(gates);
    let (mut d_gate, mut d_value) =
        (Fresh::<R>::new(gates.len()), Fresh::new(own.map_or(0, <[R]>::len)));
    let (first, second) = (d_gate.shared(), d_value.shared());
    for_each(place.pieces(), 12 * PIECE, |i| {
        let piece = place.piece(i);
        let of_values = values(place, piece.gates);
        // SAFETY: pieces do not overlap, and gradients of values lie between those of gates where there
        // is one buffer for both.
        #[allow(unsafe_code)]
        let (d_gate, d_value) = unsafe {
            let to = if own.is_some() { &second } else { &first };
            (first.rows(piece.gates), to.rows(of_values))
        };
        dispatch(Backward {
            activation: p.activation,
            count: piece.gates.1[0],
            gate: rows(gates, piece.gates),
            value: rows(from, of_values),
            d_y: rows(d_y, piece.outputs),
            d_gate,
            d_value,
        });
    });
    let d_gate = tensor(d_gate.filled(), p.gate.shape());
    let d_value = p.value.as_ref().map(|value| tensor(d_value.filled(), value.shape()));
    std::iter::once(d_gate).chain(d_value).map(Some).collect()
}
