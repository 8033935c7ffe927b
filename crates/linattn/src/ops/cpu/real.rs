//! Floating-point numbers, generic, and the widest instructions that the processor has.
//!
//! The program is built for the least processor of its kind. A [`Job`] is compiled several times, and
//! [`dispatch`] takes the best copy that runs here. Everything that a job calls has to be inlined into it,
//! or else it is compiled for the least processor again.
//!
//! Inner loops are plain ones, over a row or a [`Block`] each, that do one thing: LLVM makes vector instructions of these
//! at once. Of long loops, and of closures in iterators, it does only in the pass of link-time optimisation that rustc
//! leaves out where a profile has one codegen unit or `lto = "off"`.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

/// f32 or f64.
pub(super) trait Real:
    Copy
    + Send
    + Sync
    + 'static
    + PartialOrd
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;

    /// The nearest number of this type.
    fn of(x: f64) -> Self;
    /// In f64, exactly.
    fn wide(self) -> f64;
    /// `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// `e^self`, in loops of f32 without a call.
    fn exp(self) -> Self;
    /// `ln(1 + self)`.
    fn ln_1p(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The hyperbolic tangent, in loops of f32 without a call.
    fn tanh(self) -> Self;
    /// `ln(1 / (1 + e^-self))`, in loops of f32 without a call.
    fn log_sigmoid(self) -> Self;
    /// The error function, in loops of f32 without a call.
    fn erf(self) -> Self;

    /// The larger of two.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if other > self { other } else { self }
    }

    /// The smaller of two.
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        if other < self { other } else { self }
    }

    /// `1 / (1 + e^-self)`.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn of(x: f64) -> Self {
        x
    }

    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        f64::mul_add(self, a, b)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    #[inline(always)]
    fn log_sigmoid(self) -> Self {
        self.smaller(0.0) - (-self.abs()).exp().ln_1p()
    }

    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn of(x: f64) -> Self {
        x as f32
    }

    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        f32::mul_add(self, a, b)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        exp(self)
    }

    #[inline(always)]
    fn ln_1p(self) -> Self {
        f32::ln_1p(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        tanh(self)
    }

    #[inline(always)]
    fn log_sigmoid(self) -> Self {
        log_sigmoid(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        erf(self)
    }
}

/// A polynomial of x, the coefficient of its highest power first.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut sum = coefficients[0];
    for coefficient in &coefficients[1..] {
        sum = sum * x + coefficient;
    }
    sum
}

/// `e^x` within 2 units in the last place, without branches. 0 below e^-86.9, 2 e-38.
#[inline(always)]
#[allow(clippy::excessive_precision)] // digits as published; f32 rounds them
fn exp(x: f32) -> f32 {
    /// 1.5 times 2^23: the sum with a small number has that number, rounded, in its last bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts: the first has so few digits that whole multiples of it are exact.
    const LN_2: [f32; 2] = [0.693_359_375, -2.121_944_4e-4];
    /// Of `(e^r - 1 - r) / r^2` on -ln 2 / 2 to ln 2 / 2, the highest power first.
    const POLYNOMIAL: [f32; 6] = [
        1.987_569_1e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        5.000_000_1e-1,
    ];
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let times = shifted - ROUND;
    let r = (x - times * LN_2[0]) - times * LN_2[1];
    let p = polynomial(&POLYNOMIAL, r);
    let fraction = p * (r * r) + r + 1.0;
    // Half of the power of two: the power itself may be too large where the result is not.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(126);
    let half = f32::from_bits(exponent << 23);
    let found = fraction * half * 2.0;
    // Comparisons that are false for NaN, which went through all of the above.
    let found = if x > 88.722_84 { f32::INFINITY } else { found };
    if x < -86.9 { 0.0 } else { found }
}

/// A polynomial near 0, where a quotient of exponentials would lose digits; without branches.
#[inline(always)]
#[allow(clippy::excessive_precision)] // digits as published; f32 rounds them
fn tanh(x: f32) -> f32 {
    /// Of `(tanh x - x) / x^3` on -0.625 to 0.625, the highest power of x^2 first.
    const POLYNOMIAL: [f32; 5] = [
        -5.704_988_727_45e-3,
        2.063_908_879_54e-2,
        -5.373_971_555_31e-2,
        1.333_144_220_36e-1,
        -3.333_328_194_22e-1,
    ];
    let square = x * x;
    let p = polynomial(&POLYNOMIAL, square);
    let near = p * square * x + x;
    let e = exp(-2.0 * x.abs());
    let far = ((1.0 - e) / (1.0 + e)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// `min(x, 0) - ln(1 + e)` with e = e^-|x|. The logarithm is 2 artanh(s) with s = e / (2 + e), at most 1/3, as a
/// series that ends where f32 does.
#[inline(always)]
fn log_sigmoid(x: f32) -> f32 {
    const SERIES: [f32; 9] = [
        1.0 / 17.0,
        1.0 / 15.0,
        1.0 / 13.0,
        1.0 / 11.0,
        1.0 / 9.0,
        1.0 / 7.0,
        1.0 / 5.0,
        1.0 / 3.0,
        1.0,
    ];
    let e = exp(-x.abs());
    let s = e / (e + 2.0);
    let square = s * s;
    x.min(0.0) - (s + s) * polynomial(&SERIES, square)
}

/// A quotient of polynomials within 5e-7, odd in x; near 4 and beyond it is 1.
#[inline(always)]
#[allow(clippy::excessive_precision)] // digits as published; f32 rounds them
fn erf(x: f32) -> f32 {
    /// Of x^2, the highest power first.
    const ABOVE: [f32; 7] = [
        -2.726_142_258_013_06e-10,
        2.770_681_424_959_02e-8,
        -2.101_024_020_825_08e-6,
        -5.692_506_394_623_46e-5,
        -7.349_906_303_268_55e-4,
        -2.954_599_808_540_25e-3,
        -1.609_603_332_624_15e-2,
    ];
    const BELOW: [f32; 5] = [
        -1.456_607_184_649_96e-5,
        -2.133_740_552_789_05e-4,
        -1.682_826_974_382_03e-3,
        -7.373_329_167_204_68e-3,
        -1.426_473_905_141_89e-2,
    ];
    // NaN goes through both limits. The quotient passes 1 by a few units just below 4.
    let x = x.clamp(-4.0, 4.0);
    let square = x * x;
    let above = polynomial(&ABOVE, square);
    let below = polynomial(&BELOW, square);
    (x * above / below).clamp(-1.0, 1.0)
}

/// How one kind of processor multiplies and adds.
pub(super) trait Machine: Copy {
    /// `a * b + c`.
    fn mul_add<R: Real>(a: R, b: R, c: R) -> R;
}

/// In one instruction.
#[derive(Clone, Copy)]
pub(super) struct Fused;

/// In two.
#[derive(Clone, Copy)]
pub(super) struct Separate;

impl Machine for Fused {
    #[inline(always)]
    fn mul_add<R: Real>(a: R, b: R, c: R) -> R {
        a.mul_add(b, c)
    }
}

impl Machine for Separate {
    #[inline(always)]
    fn mul_add<R: Real>(a: R, b: R, c: R) -> R {
        a * b + c
    }
}

/// Something that is compiled for every kind of processor.
pub(super) trait Job {
    /// Its result.
    type Output;

    /// Does it. To be marked `#[inline(always)]`, as everything that it calls.
    fn run<M: Machine>(self) -> Self::Output;
}

/// Does a job with the best instructions there are.
#[cfg(target_arch = "x86_64")]
pub(super) fn dispatch<J: Job>(job: J) -> J::Output {
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    fn widest<J: Job>(job: J) -> J::Output {
        job.run::<Fused>()
    }
    #[target_feature(enable = "avx2,fma")]
    fn wide<J: Job>(job: J) -> J::Output {
        job.run::<Fused>()
    }
    let has_wide = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let has_widest = has_wide
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw");
    if has_widest {
        // SAFETY: the processor has just been asked for all of these features.
        #[allow(unsafe_code)]
        return unsafe { widest(job) };
    }
    if has_wide {
        // SAFETY: the processor has just been asked for both features.
        #[allow(unsafe_code)]
        return unsafe { wide(job) };
    }
    job.run::<Separate>()
}

/// Does a job with the best instructions there are.
#[cfg(target_arch = "aarch64")]
pub(super) fn dispatch<J: Job>(job: J) -> J::Output {
    job.run::<Fused>()
}

/// Does a job with the best instructions there are.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn dispatch<J: Job>(job: J) -> J::Output {
    job.run::<Separate>()
}

/// Numbers that are added up side by side: as many as the widest register holds of f32.
pub(super) const LANES: usize = 16;

/// One number of each of some columns.
pub(super) type Block<R> = [R; LANES];

/// Part `part` of a row, each `width` wide, from its number `first` on; zeros behind its end.
#[inline(always)]
pub(super) fn load<R: Real>(row: &[R], part: usize, width: usize, first: usize) -> Block<R> {
    let from = &row[part * width..][..width][first..];
    match from.first_chunk::<LANES>() {
        Some(block) => *block,
        None => {
            let mut block = [R::ZERO; LANES];
            block[..from.len()].copy_from_slice(from);
            block
        }
    }
}

/// The other way.
#[inline(always)]
pub(super) fn store<R: Real>(
    row: &mut [R],
    part: usize,
    width: usize,
    first: usize,
    block: &Block<R>,
) {
    let to = &mut row[part * width..][..width][first..];
    match to.first_chunk_mut::<LANES>() {
        Some(to) => *to = *block,
        None => to.copy_from_slice(&block[..to.len()]),
    }
}

/// `to += x row`.
#[inline(always)]
pub(super) fn add_times<M: Machine, R: Real, const N: usize>(to: &mut [R; N], x: R, row: &[R; N]) {
    for w in 0..N {
        to[w] = M::mul_add(x, row[w], to[w]);
    }
}

/// `to += x y`, number by number.
#[inline(always)]
pub(super) fn add_products<M: Machine, R: Real>(to: &mut Block<R>, x: &Block<R>, y: &Block<R>) {
    for w in 0..LANES {
        to[w] = M::mul_add(x[w], y[w], to[w]);
    }
}

/// `x y`, number by number.
#[inline(always)]
pub(super) fn product<R: Real>(x: &Block<R>, y: &Block<R>) -> Block<R> {
    let mut product = *x;
    for w in 0..LANES {
        product[w] = x[w] * y[w];
    }
    product
}

/// `x row`.
#[inline(always)]
pub(super) fn times<R: Real, const N: usize>(x: R, row: &[R; N]) -> [R; N] {
    let mut product = *row;
    for number in &mut product {
        *number *= x;
    }
    product
}

/// The largest number of a row that has one.
#[inline(always)]
pub(super) fn largest<R: Real>(row: &[R]) -> R {
    let mut lanes = [row[0]; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = lanes[i].larger(chunk[i]);
        }
    }
    let mut largest = row[0];
    for &x in lanes.iter().chain(rest) {
        largest = largest.larger(x);
    }
    largest
}

/// The sum of a row of partial sums, in a fixed order.
#[inline(always)]
pub(super) fn total<R: Real>(lanes: &[R; LANES]) -> R {
    let mut eight = [R::ZERO; 8];
    for i in 0..8 {
        eight[i] = lanes[i] + lanes[i + 8];
    }
    let mut four = [R::ZERO; 4];
    for i in 0..4 {
        four[i] = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// `sum_i x_i y_i`, in a fixed order.
#[inline(always)]
pub(super) fn dot<M: Machine, R: Real>(x: &[R], y: &[R]) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (y, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in x.iter().zip(y) {
        for i in 0..LANES {
            lanes[i] = M::mul_add(x[i], y[i], lanes[i]);
        }
    }
    for i in 0..x_rest.len().min(y_rest.len()) {
        lanes[i] = M::mul_add(x_rest[i], y_rest[i], lanes[i]);
    }
    total(&lanes)
}

/// `sum_i x_i`, in a fixed order.
#[inline(always)]
pub(super) fn sum<R: Real>(x: &[R]) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    for x in x {
        for i in 0..LANES {
            lanes[i] += x[i];
        }
    }
    for i in 0..rest.len() {
        lanes[i] += rest[i];
    }
    total(&lanes)
}

/// `to += x`.
#[inline(always)]
pub(super) fn add<R: Real>(to: &mut [R], x: &[R]) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to += x;
    }
}
