//! Linear recurrences of vectors in tensor operations, by halving, and as a loop on the CPU.
//! ```text
//! neighbours   a'_i = a_{2i+1} a_{2i},  b'_i = a_{2i+1} b_{2i} + b_{2i+1}    a recurrence half as long
//! its answers  h'_i = h_{2i+1}
//! the others   h_{2i} = a_{2i} h_{2i-1} + b_{2i}
//! ```
//! So T tokens take about 2 log2 T operations over whole tensors, O(T) arithmetic in all. There are only
//! products and sums, never a quotient of cumulative products: a may be 0 or negative, and where its
//! size is at most 1 no intermediate value is larger than the sums that the recurrence itself makes.
//! Source of the halving: Blelloch, "Prefix sums and their applications", 1990.

use super::tensors::{cat, primitive, tensor};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Kind of numbers of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanField {
    /// Real.
    Real,
    /// Complex.
    Complex,
}

/// Inputs of a scan, or their gradients, as a backend holds them. Complex numbers lie as all real
/// parts and then all imaginary parts of a token: C is 2 D for them, and D if real.
#[derive(Debug, Clone)]
pub struct Scan<T> {
    /// Factors of the state, `[B, T, C]`.
    pub a: T,
    /// Additions to the state, `[B, T, C]`.
    pub b: T,
    /// The state before the first token, `[B, 1, C]`.
    pub state: T,
    /// Real or complex.
    pub field: ScanField,
}

/// Complex numbers, `[B, T, D]`.
#[derive(Debug, Clone)]
pub struct Complex<B: Backend> {
    /// Real parts.
    pub re: Tensor<B, 3>,
    /// Imaginary parts.
    pub im: Tensor<B, 3>,
}

impl<B: Backend> Complex<B> {
    pub(super) fn pack(self) -> Tensor<B, 3> {
        cat(vec![self.re, self.im], 2)
    }

    pub(super) fn unpack(x: Tensor<B, 3>) -> Self {
        let width = x.dims()[2] / 2;
        Self { re: x.clone().narrow(2, 0, width), im: x.narrow(2, width, width) }
    }
}

/// Numbers, `[B, T, D]`: one tensor where they are real, real and imaginary parts where complex.
#[derive(Debug, Clone)]
pub(super) struct Numbers<B: Backend>(Vec<Tensor<B, 3>>);

impl<B: Backend> Numbers<B> {
    pub(super) fn unpack(x: FloatTensor<B>, field: ScanField) -> Self {
        let x = tensor::<B, 3>(x);
        match field {
            ScanField::Real => Self(vec![x]),
            ScanField::Complex => {
                let Complex { re, im } = Complex::unpack(x);
                Self(vec![re, im])
            }
        }
    }

    pub(super) fn pack(mut self) -> FloatTensor<B> {
        match (self.0.pop(), self.0.pop()) {
            (Some(im), Some(re)) => primitive(Complex { re, im }.pack()),
            (Some(x), None) => primitive(x),
            (None, _) => unreachable!("`unpack` made one part or two"),
        }
    }

    fn map(self, f: impl Fn(Tensor<B, 3>) -> Tensor<B, 3>) -> Self {
        Self(self.0.into_iter().map(f).collect())
    }

    fn zip(self, other: Self, f: impl Fn(Tensor<B, 3>, Tensor<B, 3>) -> Tensor<B, 3>) -> Self {
        Self(self.0.into_iter().zip(other.0).map(|(x, y)| f(x, y)).collect())
    }

    fn plus(self, other: Self) -> Self {
        self.zip(other, |x, y| x + y)
    }

    pub(super) fn times(&self, other: &Self) -> Self {
        let product = |x: &Tensor<B, 3>, y: &Tensor<B, 3>| x.clone() * y.clone();
        match (self.0.as_slice(), other.0.as_slice()) {
            ([x], [y]) => Self(vec![product(x, y)]),
            ([re, im], [u, v]) => {
                Self(vec![product(re, u) - product(im, v), product(re, v) + product(im, u)])
            }
            _ => unreachable!("`unpack` made as many parts of each"),
        }
    }

    pub(super) fn conjugate(mut self) -> Self {
        if let [_, im] = self.0.as_mut_slice() {
            *im = im.clone().neg();
        }
        self
    }

    fn tokens(&self) -> usize {
        self.0[0].dims()[1]
    }

    pub(super) fn narrow(&self, from: usize, tokens: usize) -> Self {
        self.clone().map(|x| x.narrow(1, from, tokens))
    }

    /// These tokens, and those of `later` after them.
    fn then(self, later: Self) -> Self {
        self.zip(later, |x, y| cat(vec![x, y], 1))
    }

    pub(super) fn flipped(self) -> Self {
        self.map(|x| x.flip([1]))
    }

    /// One token of zeros.
    pub(super) fn zero(&self) -> Self {
        self.narrow(0, 1).map(|x| x.zeros_like())
    }

    /// `first`, then all but the last token.
    pub(super) fn delayed(&self, first: Self) -> Self {
        match self.tokens() {
            1 => first,
            tokens => first.then(self.narrow(0, tokens - 1)),
        }
    }

    /// Tokens 0, 2, .. and tokens 1, 3, .., as many of each: a last one without a partner is left out.
    fn neighbours(&self) -> (Self, Self) {
        let pairs = self.tokens() / 2;
        let side = |side: usize| {
            self.clone().map(|x| {
                let [batch, _, width] = x.dims();
                let rows = x.narrow(1, 0, 2 * pairs).reshape([batch, pairs, 2 * width]);
                rows.narrow(2, side * width, width)
            })
        };
        (side(0), side(1))
    }

    /// The way back from [`neighbours`](Self::neighbours).
    fn interleave(even: Self, odd: Self) -> Self {
        even.zip(odd, |x, y| {
            let [batch, pairs, width] = x.dims();
            cat(vec![x, y], 2).reshape([batch, 2 * pairs, width])
        })
    }
}

/// h, from zeros before the first token.
fn scan<B: Backend>(a: Numbers<B>, b: Numbers<B>) -> Numbers<B> {
    let tokens = b.tokens();
    if tokens == 1 {
        return b;
    }
    let ((a_even, a_odd), (b_even, b_odd)) = (a.neighbours(), b.neighbours());
    let odd = scan(a_odd.times(&a_even), a_odd.times(&b_even).plus(b_odd));
    let even = a_even.times(&odd.delayed(odd.zero())).plus(b_even);
    let h = Numbers::interleave(even, odd);
    if tokens.is_multiple_of(2) {
        return h;
    }
    let last = |x: &Numbers<B>| x.narrow(x.tokens() - 1, 1);
    let end = last(&a).times(&last(&h)).plus(last(&b));
    h.then(end)
}

/// [`LinearAttentionBackend::linear_scan`] in tensor operations.
pub(super) fn forward<B: Backend>(x: Scan<FloatTensor<B>>) -> FloatTensor<B> {
    let unpack = |part| Numbers::<B>::unpack(part, x.field);
    let (a, b, state) = (unpack(x.a), unpack(x.b), unpack(x.state));
    // The state is one more thing that the first token adds.
    let first = a.narrow(0, 1).times(&state).plus(b.narrow(0, 1));
    let b = match b.tokens() {
        1 => first,
        tokens => first.then(b.narrow(1, tokens - 1)),
    };
    scan(a, b).pack()
}

/// One loop over the tokens, on the CPU; types other than f32 and f64 go through tensor operations.
#[cfg(feature = "cpu")]
pub(super) fn on_cpu<B: Backend>(x: Scan<FloatTensor<B>>) -> FloatTensor<B> {
    use burn::tensor::{DType, TensorMetadata};
    match x.b.dtype() {
        DType::F32 => looped::<B, f32>(x),
        DType::F64 => looped::<B, f64>(x),
        _ => forward::<B>(x),
    }
}

#[cfg(feature = "cpu")]
fn looped<B: Backend, E: Number>(x: Scan<FloatTensor<B>>) -> FloatTensor<B> {
    let add_kept = match x.field {
        ScanField::Real => E::add_real,
        ScanField::Complex => E::add_complex,
    };
    let b = tensor::<B, 3>(x.b);
    let ([_, tokens, width], device, dtype) = (b.dims(), b.device(), b.dtype());
    let [a, state] = [x.a, x.state].map(|x| tensor::<B, 3>(x).into_data());
    let mut h = b.into_data();
    let has = "`on_cpu` asked for the type, which `run` gave to all";
    let (a, state) = (a.as_slice::<E>().expect(has), state.as_slice::<E>().expect(has));
    let rows = h.as_mut_slice::<E>().expect(has).chunks_mut(tokens * width);
    for ((h, a), state) in rows.zip(a.chunks(tokens * width)).zip(state.chunks(width)) {
        let mut before = state;
        for (now, a) in h.chunks_mut(width).zip(a.chunks(width)) {
            add_kept(now, a, before);
            before = now;
        }
    }
    primitive(Tensor::<B, 3>::from_data(h, (&device, dtype)))
}

/// Numbers of the loop.
#[cfg(feature = "cpu")]
trait Number:
    burn::tensor::Element
    + core::ops::Add<Output = Self>
    + core::ops::Sub<Output = Self>
    + core::ops::Mul<Output = Self>
{
    /// `h += a before`
    fn add_real(h: &mut [Self], a: &[Self], before: &[Self]) {
        for ((h, &a), &before) in h.iter_mut().zip(a).zip(before) {
            *h = a * before + *h;
        }
    }

    /// The same where the first half of each are real parts and the second half imaginary ones.
    fn add_complex(h: &mut [Self], a: &[Self], before: &[Self]) {
        let half = h.len() / 2;
        for i in 0..half {
            let (re, im) = (before[i], before[half + i]);
            h[i] = a[i] * re - a[half + i] * im + h[i];
            h[half + i] = a[i] * im + a[half + i] * re + h[half + i];
        }
    }
}

#[cfg(feature = "cpu")]
impl Number for f32 {}
#[cfg(feature = "cpu")]
impl Number for f64 {}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Distribution};
    use burn_flex::Flex;

    #[test]
    fn halving_gives_what_the_loop_gives() {
        let device = Default::default();
        for field in [ScanField::Real, ScanField::Complex] {
            for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64, 65] {
                let random = |tokens: usize| {
                    let size = Distribution::Uniform(-0.7, 0.7);
                    Tensor::<Flex, 3>::random([2, tokens, 6], size, (&device, DType::F64))
                };
                let (a, b, state) = (random(tokens), random(tokens), random(1));
                let inputs =
                    Scan { a: primitive(a), b: primitive(b), state: primitive(state), field };
                let looped = tensor::<Flex, 3>(on_cpu::<Flex>(inputs.clone()));
                let halved = tensor::<Flex, 3>(forward::<Flex>(inputs));
                let error = (looped - halved).abs().max().into_scalar();
                assert!(error < 1e-12, "{field:?}, {tokens} tokens: {error}");
            }
        }
    }
}
