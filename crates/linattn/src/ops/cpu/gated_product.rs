//! Products with an activated gate, and activations alone.

use super::parallel::for_each;
use super::real::{Job, Machine, Real, dispatch};
use super::shared::{Fresh, Rows, RowsMut};
use super::tensors::{Number, contiguous, one_type, slice, tensor, typed};
use crate::ops::fused::{Activation, GateActivation, GatedProduct, GatedValue};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
use std::marker::PhantomData;

/// Numbers of a piece.
const PIECE: usize = 4096;

/// `sqrt(2 / pi)`.
const SQRT_2_OVER_PI: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

type Product = GatedProduct<FlexTensor>;

/// The activation and its derivative.
#[inline(always)]
pub(super) fn activated<R: Real>(activation: Activation, z: R) -> (R, R) {
    match activation {
        Activation::Silu => Silu::at(z),
        Activation::Sigmoid => Sigmoid::at(z),
    }
}

/// An activation of a gate. Each is a type: a loop that asked which one it is for every number would not be one of
/// wide instructions.
trait Function {
    /// Its value and its derivative at `z`.
    fn at<R: Real>(z: R) -> (R, R);
}

struct Silu;
struct Sigmoid;
struct Softplus;
struct LogSigmoid;
struct Gelu;
struct GeluTanh;
struct SquaredRelu;

impl Function for Silu {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        let s = z.sigmoid();
        (z * s, s * (R::ONE + z * (R::ONE - s)))
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        let s = z.sigmoid();
        (s, s * (R::ONE - s))
    }
}

impl Function for Softplus {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        (-(-z).log_sigmoid(), z.sigmoid())
    }
}

impl Function for LogSigmoid {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        (z.log_sigmoid(), (-z).sigmoid())
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        let half = R::of(0.5);
        let share = half + half * (z * R::of(FRAC_1_SQRT_2)).erf();
        let density = R::of(0.5 * SQRT_2_OVER_PI) * (-half * z * z).exp();
        (z * share, share + z * density)
    }
}

impl Function for GeluTanh {
    /// `(1 + tanh u) / 2` is `sigmoid(2 u)`.
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        let (scale, cubic) = (R::of(2.0 * SQRT_2_OVER_PI), R::of(0.044715));
        let square = z * z;
        let s = (scale * z * (R::ONE + cubic * square)).sigmoid();
        let inner = scale * (R::ONE + R::of(3.0) * cubic * square);
        (z * s, s + z * (s * (R::ONE - s)) * inner)
    }
}

impl Function for SquaredRelu {
    #[inline(always)]
    fn at<R: Real>(z: R) -> (R, R) {
        // A comparison that is false for NaN, which goes through.
        let positive = if z <= R::ZERO { R::ZERO } else { z };
        (positive * positive, positive + positive)
    }
}

/// Does an expression with the type of an activation.
macro_rules! of_function {
    ($activation:expr, $name:ident => $do:expr) => {
        match $activation {
            GateActivation::Silu => of_function!(@ $name, Silu, $do),
            GateActivation::Sigmoid => of_function!(@ $name, Sigmoid, $do),
            GateActivation::Softplus => of_function!(@ $name, Softplus, $do),
            GateActivation::LogSigmoid => of_function!(@ $name, LogSigmoid, $do),
            GateActivation::Gelu => of_function!(@ $name, Gelu, $do),
            GateActivation::GeluTanh => of_function!(@ $name, GeluTanh, $do),
            GateActivation::SquaredRelu => of_function!(@ $name, SquaredRelu, $do),
        }
    };
    (@ $name:ident, $function:ident, $do:expr) => {{
        type $name = $function;
        $do
    }};
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
        let packed = matches!(p.value, GatedValue::Packed);
        Self { numbers: shape.num_elements(), width: packed.then_some(width) }
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

/// Values of a piece: a number for each gate, or one for all.
enum Values<'a, R> {
    Each(Rows<'a, R>),
    All(R),
}

impl<'a, R: Real> Values<'a, R> {
    /// Of the gates of `piece`, which lie in `gates`.
    fn new(p: &'a Product, gates: &'a [R], place: Place, piece: &Piece) -> Self
    where
        R: Number,
    {
        match &p.value {
            GatedValue::Packed => Self::Each(rows(gates, values(place, piece.gates))),
            GatedValue::Tensor(value) => Self::Each(rows(slice::<R>(value), piece.gates)),
            GatedValue::Number(factor) => Self::All(R::of(*factor)),
        }
    }
}

struct Forward<'a, R, F> {
    function: PhantomData<F>,
    count: usize,
    gate: Rows<'a, R>,
    values: Values<'a, R>,
    y: RowsMut<'a, R>,
}

impl<R: Real, F: Function> Job for Forward<'_, R, F> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        for i in 0..self.count {
            let (gate, y) = (self.gate.at(i), self.y.at(i));
            match &self.values {
                Values::Each(value) => {
                    for ((y, &gate), &value) in y.iter_mut().zip(gate).zip(value.at(i)) {
                        *y = F::at(gate).0 * value;
                    }
                }
                Values::All(factor) => {
                    for (y, &gate) in y.iter_mut().zip(gate) {
                        *y = F::at(gate).0 * *factor;
                    }
                }
            }
        }
    }
}

struct Backward<'a, R, F> {
    function: PhantomData<F>,
    count: usize,
    gate: Rows<'a, R>,
    values: Values<'a, R>,
    d_y: Rows<'a, R>,
    d_gate: RowsMut<'a, R>,
    /// Of values that are tensors.
    d_value: Option<RowsMut<'a, R>>,
}

impl<R: Real, F: Function> Job for Backward<'_, R, F> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self) {
        for i in 0..self.count {
            let (gate, d_y, d_gate) = (self.gate.at(i), self.d_y.at(i), self.d_gate.at(i));
            match (&self.values, &mut self.d_value) {
                (Values::Each(value), Some(d_value)) => {
                    let given = [gate, value.at(i), d_y];
                    multiply_backward::<R, F>(given, d_gate, d_value.at(i));
                }
                (Values::All(factor), _) => {
                    for ((d_gate, &gate), &d_y) in d_gate.iter_mut().zip(gate).zip(d_y) {
                        *d_gate = d_y * *factor * F::at(gate).1;
                    }
                }
                (Values::Each(_), None) => unreachable!("values of tensors have gradients"),
            }
        }
    }
}

#[inline(always)]
fn multiply_backward<R: Real, F: Function>(
    [gate, value, d_y]: [&[R]; 3],
    d_gate: &mut [R],
    d_value: &mut [R],
) {
    let given = gate.iter().zip(value).zip(d_y);
    for ((d_gate, d_value), ((&gate, &value), &d_y)) in d_gate.iter_mut().zip(d_value).zip(given) {
        let (y, slope) = F::at(gate);
        *d_value = d_y * y;
        *d_gate = d_y * value * slope;
    }
}

fn gated_product_of<R: Number>(p: Product, keep: bool) -> Pass<Flex> {
    let outputs = vec![of_function!(p.activation, F => forward::<R, F>(&p))];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| match gradients.into_iter().next().flatten() {
            Some(d_y) => {
                let d_y = contiguous(d_y);
                of_function!(p.activation, F => backward::<R, F>(&p, &d_y))
            }
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

fn forward<R: Number, F: Function>(p: &Product) -> FlexTensor {
    let place = Place::new(p);
    let mut shape = p.gate.shape();
    if let Some(width) = place.width {
        let last = shape.num_dims() - 1;
        shape[last] = width;
    }
    let mut y = Fresh::<R>::new(shape.num_elements());
    let shared = y.shared();
    let gates = slice::<R>(&p.gate);
    for_each(place.pieces(), 8 * PIECE, |i| {
        let piece = place.piece(i);
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let y = unsafe { shared.rows(piece.outputs) };
        dispatch(Forward {
            function: PhantomData::<F>,
            count: piece.gates.1[0],
            gate: rows(gates, piece.gates),
            values: Values::new(p, gates, place, &piece),
            y,
        });
    });
    tensor(y.filled(), shape)
}

fn rows<R>(x: &[R], (first, [_, stride, width]): (usize, [usize; 3])) -> Rows<'_, R> {
    Rows::new(x, first, [stride, width])
}

fn backward<R: Number, F: Function>(p: &Product, d_y: &FlexTensor) -> Vec<Option<FlexTensor>> {
    let place = Place::new(p);
    let (gates, d_y) = (slice::<R>(&p.gate), slice::<R>(d_y));
    let own = match &p.value {
        GatedValue::Tensor(value) => Some(value),
        GatedValue::Packed | GatedValue::Number(_) => None,
    };
    let mut d_gate = Fresh::<R>::new(gates.len());
    let mut d_own = own.map(|_| Fresh::<R>::new(gates.len()));
    let first = d_gate.shared();
    let second = d_own.as_mut().map(|d_own| d_own.shared());
    for_each(place.pieces(), 12 * PIECE, |i| {
        let piece = place.piece(i);
        // SAFETY: pieces do not overlap, and gradients of values lie between those of gates where there
        // is one buffer for both.
        #[allow(unsafe_code)]
        let (d_gate, d_value) = unsafe {
            let d_value = match &p.value {
                GatedValue::Packed => Some(first.rows(values(place, piece.gates))),
                GatedValue::Tensor(_) => second.as_ref().map(|second| second.rows(piece.gates)),
                GatedValue::Number(_) => None,
            };
            (first.rows(piece.gates), d_value)
        };
        dispatch(Backward {
            function: PhantomData::<F>,
            count: piece.gates.1[0],
            gate: rows(gates, piece.gates),
            values: Values::new(p, gates, place, &piece),
            d_y: rows(d_y, piece.outputs),
            d_gate,
            d_value,
        });
    });
    let d_gate = tensor(d_gate.filled(), p.gate.shape());
    let d_own = d_own.map(|d_own| tensor(d_own.filled(), p.gate.shape()));
    std::iter::once(d_gate).chain(d_own).map(Some).collect()
}
