//! Linear recurrences of vectors, each channel by itself: `h_t = a_t h_{t-1} + b_t`, real or complex.
//! ```text
//! backward     dh_t = do_t + conj(a_{t+1}) dh_{t+1}      the same recurrence, last token first
//!              da_t = dh_t conj(h_{t-1}),  db_t = dh_t
//! ```
//! Written out as one node of the autodiff graph, which keeps a and h alone. On GPUs and in types that the loop of
//! the CPU does not take, halving.rs has the recurrence itself.

use super::OpError;
use super::backend::{Composite, LinearAttentionBackend};
use super::halving::{Complex, Numbers, Scan, ScanField};
use super::pass::{BackwardPass, Pass};
use super::tensors::{accumulator, primitive, tensor};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// `h_t = a_t h_{t-1} + b_t` over whole sequences, each channel by itself. Gradients reach all inputs.
///
/// `a` and `b` are `[B, T, D]`, `state` is h before the first token, `[B, 1, D]`, zeros if absent.
/// Gives every h, `[B, T, D]`, and the last, `[B, 1, D]`, in f32 (f64 for f64 inputs). `a` may be any
/// number of size 1 or less; larger ones overflow as the recurrence itself does.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn linear_scan<B: LinearAttentionBackend>(
    a: Tensor<B, 3>,
    b: Tensor<B, 3>,
    state: Option<Tensor<B, 3>>,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    check("linear_scan", [("a", &a), ("b", &b)], state.as_ref().map(|s| ("state", s)))?;
    Ok(with_last(run(a, b, state, ScanField::Real)))
}

/// One token of [`linear_scan`]: T is 1 in `a` and `b`. Gives h, which is the next state as well.
/// # Errors
/// As [`linear_scan`], and [`OpError::Step`] if T is not 1.
pub fn linear_scan_step<B: LinearAttentionBackend>(
    a: Tensor<B, 3>,
    b: Tensor<B, 3>,
    state: Option<Tensor<B, 3>>,
) -> Result<Tensor<B, 3>, OpError> {
    let op = "linear_scan_step";
    check(op, [("a", &a), ("b", &b)], state.as_ref().map(|s| ("state", s)))?;
    match (a.dims()[1], state) {
        (1, Some(state)) => Ok(accumulator(a) * accumulator(state) + accumulator(b)),
        (1, None) => Ok(accumulator(b)),
        (tokens, _) => Err(OpError::Step { op, tokens }),
    }
}

/// [`linear_scan`] over complex numbers, real and imaginary parts apart. Gradients are those of a real
/// loss with respect to each part.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn complex_scan<B: LinearAttentionBackend>(
    a: Complex<B>,
    b: Complex<B>,
    state: Option<Complex<B>>,
) -> Result<(Complex<B>, Complex<B>), OpError> {
    let op = "complex_scan";
    check(op, [("a.re", &a.re), ("b.re", &b.re)], state.as_ref().map(|s| ("state.re", &s.re)))?;
    check(op, [("a.re", &a.re), ("a.im", &a.im)], None)?;
    check(op, [("a.re", &a.re), ("b.im", &b.im)], state.as_ref().map(|s| ("state.im", &s.im)))?;
    let h = run(a.pack(), b.pack(), state.map(Complex::pack), ScanField::Complex);
    let (h, last) = with_last(h);
    Ok((Complex::unpack(h), Complex::unpack(last)))
}

/// The first tensor says what the others have to be.
fn check<B: Backend>(
    op: &'static str,
    [(name, first), (second, other)]: [(&'static str, &Tensor<B, 3>); 2],
    state: Option<(&'static str, &Tensor<B, 3>)>,
) -> Result<(), OpError> {
    let [batch, tokens, width] = first.dims();
    if first.dims().contains(&0) {
        return Err(OpError::Empty { op, tensor: name, got: first.dims().into() });
    }
    let same = |tensor, got: [usize; 3], want: [usize; 3]| match got == want {
        true => Ok(()),
        false => Err(OpError::Shape { op, tensor, got: got.into(), want: want.into() }),
    };
    same(second, other.dims(), [batch, tokens, width])?;
    match state {
        Some((name, state)) => same(name, state.dims(), [batch, 1, width]),
        None => Ok(()),
    }
}

fn run<B: LinearAttentionBackend>(
    a: Tensor<B, 3>,
    b: Tensor<B, 3>,
    state: Option<Tensor<B, 3>>,
    field: ScanField,
) -> Tensor<B, 3> {
    let (a, b) = (accumulator(a), accumulator(b));
    let state = match state {
        Some(state) => accumulator(state),
        None => b.clone().narrow(1, 0, 1).zeros_like(),
    };
    let inputs = vec![primitive(a), primitive(b), primitive(state)];
    tensor(B::composite(ScanOf(field), inputs).remove(0))
}

/// A scan as one operation, of a, b and the state.
struct ScanOf(ScanField);

impl Composite for ScanOf {
    fn run<B: LinearAttentionBackend>(self, inputs: Vec<FloatTensor<B>>, keep: bool) -> Pass<B> {
        let field = self.0;
        let [a, b, state] = <[_; 3]>::try_from(inputs).expect("as `run` lists them");
        let kept = keep.then(|| (a.clone(), state.clone()));
        let h = B::linear_scan(Scan { a, b, state, field });
        let backward = kept.map(|(a, state)| -> BackwardPass<B> {
            let x = Scanned { a, state, h: h.clone(), field };
            Box::new(move |gradients, _| {
                let d_h = gradients.into_iter().next().flatten().expect("of the one output");
                let d = backward::<B>(x, d_h);
                [d.a, d.b, d.state].map(Some).into()
            })
        });
        Pass { outputs: vec![h], backward }
    }
}

/// All of h, and the last of it.
fn with_last<B: Backend>(h: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let tokens = h.dims()[1];
    (h.clone(), h.narrow(1, tokens - 1, 1))
}

/// Tensors of a scan that its backward pass needs; shapes as in [`Scan`].
struct Scanned<T> {
    a: T,
    state: T,
    /// Output of the scan, `[B, T, C]`.
    h: T,
    field: ScanField,
}

/// Gradients of all three inputs, from that of the output: the scan once more.
fn backward<B: LinearAttentionBackend>(
    x: Scanned<FloatTensor<B>>,
    d_h: FloatTensor<B>,
) -> Scan<FloatTensor<B>> {
    let field = x.field;
    let unpack = |part| Numbers::<B>::unpack(part, field);
    let (a, state, h, d_h) = (unpack(x.a).conjugate(), unpack(x.state), unpack(x.h), unpack(d_h));
    let backwards = Scan {
        // The last token's h goes into no other.
        a: a.clone().flipped().delayed(a.zero()).pack(),
        b: d_h.flipped().pack(),
        state: a.zero().pack(),
        field,
    };
    let d_h = unpack(B::linear_scan(backwards)).flipped();
    let before = h.delayed(state).conjugate();
    Scan {
        a: d_h.times(&before).pack(),
        state: a.narrow(0, 1).times(&d_h.narrow(0, 1)).pack(),
        b: d_h.pack(),
        field,
    }
}
