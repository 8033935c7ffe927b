//! Linear recurrences of vectors, `h_t = a_t h_{t-1} + b_t`, and their gradients. Numbers are complex;
//! real ones have no imaginary part.

use crate::random::Rng;
use std::ops::{Add, Mul};

/// One complex number.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Complex {
    /// Real part.
    pub re: f64,
    /// Imaginary part.
    pub im: f64,
}

impl Complex {
    /// With the sign of the imaginary part turned.
    #[must_use]
    pub fn conjugate(self) -> Self {
        Self { im: -self.im, ..self }
    }
}

impl Add for Complex {
    type Output = Self;

    fn add(self, y: Self) -> Self {
        Self { re: self.re + y.re, im: self.im + y.im }
    }
}

impl Mul for Complex {
    type Output = Self;

    fn mul(self, y: Self) -> Self {
        Self { re: self.re * y.re - self.im * y.im, im: self.re * y.im + self.im * y.re }
    }
}

/// Inputs of a scan, or their gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct ScanInputs {
    /// B, T and D.
    pub dims: [usize; 3],
    /// Factors of the state, `[B, T, D]`.
    pub a: Vec<Complex>,
    /// Additions to the state, `[B, T, D]`.
    pub b: Vec<Complex>,
    /// h before the first token, `[B, D]`.
    pub state: Vec<Complex>,
}

impl ScanInputs {
    /// Numbers of a seed: real ones with a from -1 to 1, 0 now and then; or complex ones with a inside
    /// the unit circle.
    pub fn random(seed: u64, dims: [usize; 3], complex: bool) -> Self {
        let mut rng = Rng::named(seed, "scan");
        let [batch, tokens, width] = dims;
        let a = (0..batch * tokens * width).map(|i| {
            let size = if i % 11 == 3 { 0.0 } else { 1.0 - rng.uniform().powi(3) };
            match complex {
                true => {
                    let angle = 7.0 * rng.uniform();
                    Complex { re: size * angle.cos(), im: size * angle.sin() }
                }
                false => Complex { re: if rng.uniform() < 0.5 { -size } else { size }, im: 0.0 },
            }
        });
        let a = a.collect();
        let b = normals(&mut rng, batch * tokens * width, complex);
        let state = normals(&mut rng, batch * width, complex);
        Self { dims, a, b, state }
    }
}

/// Normal numbers.
pub fn normals(rng: &mut Rng, len: usize, complex: bool) -> Vec<Complex> {
    let mut next = || Complex { re: rng.normal(), im: if complex { rng.normal() } else { 0.0 } };
    (0..len).map(|_| next()).collect()
}

/// Every h, `[B, T, D]`.
pub fn linear_scan(x: &ScanInputs) -> Vec<Complex> {
    let [batch, tokens, width] = x.dims;
    let mut h = Vec::with_capacity(x.b.len());
    for row in 0..batch {
        let mut last = x.state[row * width..(row + 1) * width].to_vec();
        for t in 0..tokens {
            for (d, last) in last.iter_mut().enumerate() {
                let at = (row * tokens + t) * width + d;
                *last = x.a[at] * *last + x.b[at];
                h.push(*last);
            }
        }
    }
    h
}

/// Gradients of a real loss with respect to the parts of each input, from those with respect to the
/// parts of every h, `d_h`.
pub fn linear_scan_backward(x: &ScanInputs, d_h: &[Complex]) -> ScanInputs {
    let [batch, tokens, width] = x.dims;
    let h = linear_scan(x);
    let zeros = |len| vec![Complex::default(); len];
    let (mut a, mut b, mut state) = (zeros(x.a.len()), zeros(x.b.len()), zeros(x.state.len()));
    for row in 0..batch {
        for d in 0..width {
            let start = row * width + d;
            let mut later = Complex::default();
            for t in (0..tokens).rev() {
                let at = (row * tokens + t) * width + d;
                let before = if t == 0 { x.state[start] } else { h[at - width] };
                let d_now = d_h[at] + later;
                b[at] = d_now;
                a[at] = d_now * before.conjugate();
                later = d_now * x.a[at].conjugate();
            }
            state[start] = later;
        }
    }
    ScanInputs { dims: x.dims, a, b, state }
}
